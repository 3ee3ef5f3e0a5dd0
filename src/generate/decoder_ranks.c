/* decoder_ranks.c - see the header. */
#include "generate/decoder_ranks.h"

#include <string.h>

static ith_status check_sizes(const ith_hf_config *c, const ith_ranks_options *o, int64_t ep_size,
                              int64_t cp_size, ith_error *err)
{
    const int64_t experts = c->num_experts, heads = c->linear_num_value_heads,
                  size = o->world->size;
    if (heads > 0 && cp_size > heads)
        return ith_fail(err, ITH_ERR_USAGE,
                        "--cp-size: %lld is more than linear_num_value_heads %lld",
                        (long long)cp_size, (long long)heads);
    if (size % ep_size != 0 || (ep_size > 1 && (!experts || experts % ep_size != 0)))
        return ith_fail(err, ITH_ERR_USAGE,
                        "--ep-size: %lld does not divide the %lld ranks and num_experts %lld",
                        (long long)ep_size, (long long)size, (long long)experts);
    return ITH_OK;
}

/* Heads and rings of a prompt, as in training. */
static ith_status choose_scheme(ith_mesh *mesh, const ith_model *model, ith_ring_wish wish,
                                bool cuda, ith_error *err)
{
    const ith_hf_config *c = model->config;
    bool in_order = c->linear_num_value_heads > 0;
    if (mesh->cp_size == 1)
        return ITH_OK;
    if (wish == ITH_RING_AUTO && cuda && mesh->cp_size <= c->num_attention_heads)
        wish = ITH_RING_NEVER;
    int64_t u = ith_ring_choose(c->num_attention_heads, c->num_key_value_heads, c->head_dim,
                                mesh->cp_size, ith_dtype_bytes(model->dtype), wish, in_order);
    if (!u)
        return ith_fail(err, ITH_ERR_USAGE,
                        "--cp-mode: none of this kind for %lld ranks and num_attention_heads %lld "
                        "(use auto)",
                        (long long)mesh->cp_size, (long long)c->num_attention_heads);
    ith_mesh_set_ulysses(mesh, u, in_order);
    return ITH_OK;
}

/* Ranks exchange between their GPUs, or between CPUs. */
static ith_status open_links(ith_mesh *mesh, ith_session *session, bool beside)
{
    ith_error *err = session->ctx.err;
    int64_t any = session->cuda;
    ITH_TRY(ith_mesh_max(mesh, &any, err));
    ITH_TRY(ith_mesh_agree(mesh,
                           any == session->cuda
                               ? ITH_OK
                               : ith_fail(err, ITH_ERR_USAGE,
                                          "no GPU here, others of the %lld ranks have one (use "
                                          "--device cpu)",
                                          (long long)mesh->world_size),
                           err));
    return any ? ith_mesh_open_device(mesh, session->ctx.device, beside, err) : ITH_OK;
}

ith_status ith_decoder_ranks_open(ith_decoder_ranks *r, ith_model *model, ith_session *session,
                                  const ith_ranks_options *o)
{
    ith_error *err = session->ctx.err;
    const int64_t ep_size = ith_max_i64(o->ep_size, 1), cp_size = ith_max_i64(o->cp_size, 1);
    bool cut = o->cut_weights && o->world && o->world->size > 1;
    if (!o->world || (!cut && cp_size == 1))
        return ITH_OK;
    ITH_TRY(check_sizes(model->config, o, ep_size, cp_size, err));
    ITH_TRY(ith_mesh_open(&r->mesh, o->world, cp_size, err));
    ITH_TRY(ith_mesh_set_experts(&r->mesh, ep_size, err));
    ITH_TRY(choose_scheme(&r->mesh, model, o->cp_mode, session->cuda, err));
    ITH_TRY(open_links(&r->mesh, session, cut));
    ITH_TRY(
        ith_mesh_agree(&r->mesh, ith_model_cut(model, &r->mesh, cut ? 3 : 0, &r->shard, err), err));
    r->alone = ith_mesh_alone(&r->mesh);
    r->exchange = true;
    r->walks_together = cut;
    return ITH_OK;
}

void ith_decoder_ranks_close(ith_decoder_ranks *r)
{
    ith_shard_deinit(&r->shard);
    ith_mesh_close(&r->mesh);
    memset(r, 0, sizeof *r);
}

ith_status ith_decoder_ranks_place(const ith_decoder_ranks *r, ith_ctx *ctx)
{
    return r->exchange ? ith_mesh_place(&r->mesh, ctx, r->walks_together) : ITH_OK;
}

/* A rank keeps its slice of the prompt and every cp_size-th unit behind it; a unit that is not to
 * stay is written behind them all the same, and over again. */
ith_status ith_decoder_ranks_place_cache(const ith_decoder_ranks *r, ith_model *model, ith_ctx *ctx,
                                         int64_t batch, int64_t capacity, int64_t unit,
                                         ith_kv_cache *cache)
{
    int64_t cp = ith_decoder_ranks_cp(r);
    cache->mesh = cp > 1 ? &r->mesh : NULL;
    return ith_model_place_cache(
        model, ctx, batch, cp > 1 ? ith_div_ceil(capacity, cp) + 2 * unit + 1 : capacity, cache);
}

int64_t ith_decoder_ranks_cp(const ith_decoder_ranks *r)
{
    return r->exchange ? r->mesh.cp_size : 1;
}

bool ith_decoder_ranks_chooses(const ith_decoder_ranks *r)
{
    return !r->exchange || r->mesh.cp_rank == 0;
}

void ith_decoder_ranks_share(const ith_decoder_ranks *r, ith_model *model, bool slices)
{
    if (r->exchange)
        ith_model_set_mesh(model, slices ? &r->mesh : &r->alone);
}

int64_t ith_decoder_ranks_most(const ith_decoder_ranks *r, int64_t max_append, int64_t capacity)
{
    return ith_decoder_ranks_cp(r) == 1 ? max_append : ith_min_i64(max_append, capacity);
}

int64_t ith_decoder_ranks_slice(const ith_decoder_ranks *r, int64_t n)
{
    return ith_div_ceil(n, ith_decoder_ranks_cp(r));
}

bool ith_decoder_ranks_keeps(const ith_decoder_ranks *r, int64_t position, int64_t unit)
{
    return !r->exchange || position / unit % r->mesh.cp_size == r->mesh.cp_rank;
}

bool ith_decoder_ranks_walks(const ith_decoder_ranks *r, int64_t num_prompts)
{
    return num_prompts > 0 || r->walks_together;
}

ith_status ith_decoder_ranks_any(const ith_decoder_ranks *r, bool *open, ith_error *err)
{
    int64_t any = *open;
    if (!r->walks_together)
        return ITH_OK;
    ITH_TRY(ith_mesh_max(&r->mesh, &any, err));
    *open = any != 0;
    return ITH_OK;
}

ith_status ith_decoder_ranks_tell(const ith_decoder_ranks *r, void *data, int64_t bytes,
                                  ith_error *err)
{
    return ith_decoder_ranks_cp(r) == 1 ? ITH_OK
                                        : ith_comm_broadcast(r->mesh.cp, data, bytes, 0, err);
}

ith_status ith_decoder_ranks_gather(const ith_decoder_ranks *r, float *x, int64_t n, ith_error *err)
{
    return ith_decoder_ranks_cp(r) == 1
               ? ITH_OK
               : ith_comm_all_reduce(r->mesh.cp, x, n, ITH_F32, ITH_REDUCE_SUM, err);
}
