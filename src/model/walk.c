/* walk.c - what the walks of all families do around their layers: the stream, the load balance,
 * memory of a layer, exchanges of its weights and gradients. */
#include "model/blocks.h"

typedef ith_tensor T;

ith_status ith_walk_open(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training)
{
    int64_t t = b->num_tokens, d = m->config->hidden_size;
    ITH_TRY(ith_push(ctx, ITH_MEM_ACTIVATIONS, "residual stream", m->dtype, t, d, &m->stream));
    ITH_TRY(ith_push(ctx, ITH_MEM_ACTIVATIONS, "residual stream", m->dtype, t, d, &m->delta));
    m->residual = m->stream;
    m->expert_fraction = m->expert_mean_prob = ith_tensor_none();
    ITH_TRY(ith_offload_open(m, ctx, t, training));
    ITH_TRY(ith_embedding_forward(ctx, m->stream, b->ids, m->params[m->embed].w));
    return ith_zero(ctx, m->delta);
}

/* ---- load balance ---- */

ith_status ith_walk_open_balance(ith_model *m, ith_ctx *ctx, bool training)
{
    if (!training || m->aux_coef == 0.0f || ith_num_moe_layers(m->config) == 0)
        return ITH_OK;
    int64_t e = m->config->num_experts;
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_ACTIVATIONS, "router", ITH_F32, e, &m->expert_fraction));
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_ACTIVATIONS, "router", ITH_F32, e, &m->expert_mean_prob));
    ITH_TRY(ith_zero(ctx, m->expert_fraction));
    return ith_zero(ctx, m->expert_mean_prob);
}

ith_status ith_walk_sum_balance(const ith_model *m, ith_ctx *ctx)
{
    if (!m->expert_fraction.ndim)
        return ITH_OK;
    ITH_TRY(ith_mesh_sum_cp(m->mesh, ctx, m->expert_fraction));
    return ith_mesh_sum_cp(m->mesh, ctx, m->expert_mean_prob);
}

/* ---- layers ---- */

ith_status ith_walk_push_input(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               bool training)
{
    ith_layer_acts *a = &m->acts[l];
    *a = (ith_layer_acts){.mark = ith_plan_mark(ctx->plan, ITH_MEM_ACTIVATIONS),
                          .host_mark = ith_plan_mark(ctx->plan, ITH_MEM_HOST),
                          .x = m->stream,
                          .x2 = m->stream};
    if (!training)
        return ITH_OK;
    if (m->keep[l] == ITH_KEEP_HOST)
        return ith_offload_stage(m, ctx, l);
    return ith_push(ctx, ITH_MEM_ACTIVATIONS, "layer input", m->dtype, b->num_tokens,
                    m->config->hidden_size, &a->x);
}

/* Drops the views whose memory went with the workspace of the layer. */
static void forget_unsaved(ith_model *m, int64_t l, bool training)
{
    ith_layer_acts *a = &m->acts[l], kept = *a;
    ith_keep keep = training ? m->keep[l] : ITH_KEEP_INPUT;
    if (keep == ITH_KEEP_ALL)
        return;
    *a = (ith_layer_acts){
        .mark = kept.mark, .host_mark = kept.host_mark, .host_x = kept.host_x, .x = kept.x};
    if (training) {
        a->state = kept.state;
        a->map = kept.map;
        a->knows_state = kept.knows_state;
    }
    if (keep == ITH_KEEP_ATTENTION) {
        a->o = kept.o;
        a->lse = kept.lse;
    }
}

static ith_status forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, bool training,
                          ith_layer_forward layer)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(ith_model_gather_layer(m, ctx, l));
    ITH_TRY(layer(m, ctx, b, l, training));
    ITH_TRY(ith_offload_save(m, ctx, l));
    m->residual = m->acts[l].x2;
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    forget_unsaved(m, l, training);
    return ITH_OK;
}

ith_status ith_walk_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training,
                            ith_layer_forward layer)
{
    for (int64_t l = 0; l < m->config->num_hidden_layers; l++)
        ITH_WRAP(forward(m, ctx, b, l, training, layer), ctx->err, "layer %lld", (long long)l);
    return ITH_OK;
}

static ith_status backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx,
                           ith_layer_backward layer)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(ith_offload_fetch(m, ctx, l));
    ITH_TRY(ith_model_gather_layer(m, ctx, l));
    ITH_TRY(ith_model_open_grads(m, ctx, l));
    ITH_TRY(layer(m, ctx, b, l, dx));
    ITH_TRY(ith_model_close_grads(m, ctx, l));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    ith_plan_release(ctx->plan, ITH_MEM_HOST, m->acts[l].host_mark);
    ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, m->acts[l].mark);
    return ITH_OK;
}

ith_status ith_walk_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, T dx,
                             ith_layer_backward layer)
{
    for (int64_t l = m->config->num_hidden_layers - 1; l >= 0; l--)
        ITH_WRAP(backward(m, ctx, b, l, dx, layer), ctx->err, "layer %lld backward", (long long)l);
    return ITH_OK;
}

static ith_status decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                         ith_kv_cache *cache, T rows, bool prefill, ith_layer_decode layer)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(ith_model_gather_layer(m, ctx, l));
    ITH_TRY(layer(m, ctx, b, l, cache, rows, prefill));
    m->residual = m->acts[l].x2;
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    forget_unsaved(m, l, false);
    return ITH_OK;
}

ith_status ith_walk_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, ith_kv_cache *cache,
                           T rows, bool prefill, ith_layer_decode layer)
{
    for (int64_t l = 0; l < m->config->num_hidden_layers; l++)
        ITH_WRAP(decode(m, ctx, b, l, cache, rows, prefill, layer), ctx->err, "layer %lld",
                 (long long)l);
    return ITH_OK;
}
