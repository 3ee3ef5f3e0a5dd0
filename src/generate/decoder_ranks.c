/* decoder_ranks.c - weights cut among ranks that decode. */
#include "generate/decoder_ranks.h"

#include <string.h>

ith_status ith_decoder_ranks_cut(ith_decoder_ranks *r, ith_model *model, ith_ctx *ctx,
                                 ith_comm *ranks, int64_t ep_size)
{
    const int64_t experts = model->config->num_experts;
    if (ctx->device != ith_device_cpu())
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED,
                        "weights cut among ranks that decode are for CPUs so far (whole ones, or "
                        "--device cpu)");
    if (ranks->size % ep_size != 0 || (ep_size > 1 && (!experts || experts % ep_size != 0)))
        return ith_fail(ctx->err, ITH_ERR_USAGE,
                        "--ep-size: %lld does not divide the %lld ranks and num_experts %lld",
                        (long long)ep_size, (long long)ranks->size, (long long)experts);
    ITH_TRY(ith_mesh_open(&r->mesh, ranks, 1, ctx->err));
    ITH_TRY(ith_mesh_set_experts(&r->mesh, ep_size, ctx->err));
    ITH_TRY(
        ith_comm_agree(ranks, ith_model_cut(model, &r->mesh, 3, &r->shard, ctx->err), ctx->err));
    r->walks_together = true;
    return ITH_OK;
}

void ith_decoder_ranks_close(ith_decoder_ranks *r)
{
    ith_shard_deinit(&r->shard);
    ith_mesh_close(&r->mesh);
    memset(r, 0, sizeof *r);
}

ith_status ith_decoder_ranks_any(const ith_decoder_ranks *r, bool *open, ith_error *err)
{
    int64_t any = *open;
    if (!r->walks_together)
        return ITH_OK;
    ITH_TRY(ith_comm_all_reduce(r->mesh.world, &any, 1, ITH_I64, ITH_REDUCE_MAX, err));
    *open = any != 0;
    return ITH_OK;
}
