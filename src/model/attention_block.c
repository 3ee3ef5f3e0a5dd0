/* attention_block.c - attention of a layer, forward and backward, on one rank or many: Qwen3 and
 * LLaDA2 have the same one under other masks. */
#include "model/blocks.h"

typedef ith_tensor T;

ith_qkv ith_block_split_qkv(const ith_hf_config *c, T qkv)
{
    int64_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
    ith_qkv s = {ith_split_heads(ith_col_range(qkv, 0, q), c->num_attention_heads),
                 ith_split_heads(ith_col_range(qkv, q, q + kv), c->num_key_value_heads),
                 ith_split_heads(ith_col_range(qkv, q + kv, q + 2 * kv), c->num_key_value_heads)};
    return s;
}

ith_status ith_block_push_qk(ith_model *m, ith_ctx *ctx, ith_mem_class where, int64_t t, T *q, T *k,
                             T *q_rstd, T *k_rstd)
{
    const ith_hf_config *c = m->config;
    int64_t hq = c->num_attention_heads, hkv = c->num_key_value_heads;
    ITH_TRY(ith_push_heads(ctx, where, "q after norm and RoPE", m->dtype, t, hq, c->head_dim, q));
    ITH_TRY(ith_push_heads(ctx, where, "k after norm and RoPE", m->dtype, t, hkv, c->head_dim, k));
    ITH_TRY(ith_push(ctx, where, "norm statistics", ITH_F32, t, hq, q_rstd));
    return ith_push(ctx, where, "norm statistics", ITH_F32, t, hkv, k_rstd);
}

ith_status ith_block_push_attention_out(ith_model *m, ith_ctx *ctx, ith_mem_class where,
                                        ith_layer_acts *a, int64_t n)
{
    const ith_hf_config *c = m->config;
    int64_t heads =
        ith_ulysses_own_share(m->mesh, c->num_attention_heads, c->num_key_value_heads).q_count;
    int64_t rows = ith_ring_own_rows(m->mesh, ctx, n);
    ITH_TRY(
        ith_push_heads(ctx, where, "attention output", m->dtype, rows, heads, c->head_dim, &a->o));
    return ith_push(ctx, where, "attention lse", ITH_F32, rows, heads, &a->lse);
}

/* n1 and qkv. */
static ith_status make_qkv(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, bool forward,
                           ith_attention_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens;
    float eps = (float)c->rms_norm_eps;
    T none = ith_tensor_none(), w = ith_layer_param(m, l, ITH_P_INPUT_NORM)->w;
    bool kept = a->n1.ndim != 0, kept_qkv = a->qkv.ndim != 0;
    in->n1 = a->n1;
    in->rstd1 = a->rstd1;
    if (!kept) {
        ITH_TRY(
            ith_push(ctx, ITH_MEM_WORKSPACE, "norm output", m->dtype, t, c->hidden_size, &in->n1));
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, 1, t, 1, 1, 1,
                             &in->rstd1));
    }
    if (forward)
        ITH_TRY(
            ith_rmsnorm_forward(ctx, in->n1, a->x, in->rstd1, m->delta, m->residual, w, eps, 0.0f));
    else if (!kept)
        ITH_TRY(ith_rmsnorm_forward(ctx, in->n1, none, in->rstd1, a->x, none, w, eps, 0.0f));
    if (!kept_qkv)
        ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "qkv", m->dtype, t, ith_qkv_width(c), &a->qkv));
    if (kept_qkv && !forward)
        return ITH_OK;
    return ith_linear_forward(ctx, a->qkv, in->n1, ith_layer_param(m, l, ITH_P_QKV)->w, false);
}

ith_status ith_block_attention_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  bool forward, ith_attention_in *in)
{
    const ith_hf_config *c = m->config;
    const ith_layer_acts *a = &m->acts[l];
    bool kept = a->q.ndim != 0;
    ITH_TRY(make_qkv(m, ctx, b, l, forward, in));
    in->q = a->q;
    in->k = a->k;
    in->q_rstd = a->q_rstd;
    in->k_rstd = a->k_rstd;
    if (!kept)
        ITH_TRY(ith_block_push_qk(m, ctx, ITH_MEM_WORKSPACE, b->num_tokens, &in->q, &in->k,
                                  &in->q_rstd, &in->k_rstd));
    ith_qkv s = ith_block_split_qkv(c, a->qkv);
    if (!kept || forward)
        ITH_TRY(ith_qk_norm_rope_forward(
            ctx, in->q, in->k, in->q_rstd, in->k_rstd, s.q, s.k,
            ith_layer_param(m, l, ITH_P_Q_NORM)->w, ith_layer_param(m, l, ITH_P_K_NORM)->w,
            m->rope_cos, m->rope_sin, b->position_ids, (float)c->rms_norm_eps, 0.0f));
    return ith_ulysses_to_heads(m->mesh, ctx, b->group_tokens, (ith_qkv){in->q, in->k, s.v},
                                &in->heads);
}

ith_status ith_block_attend(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                            const ith_attention_in *in)
{
    ith_layer_acts *a = &m->acts[l];
    if (!a->o.ndim)
        ITH_TRY(ith_block_push_attention_out(m, ctx, ITH_MEM_WORKSPACE, a, b->group_tokens));
    return ith_ring_attention_forward(m->mesh, ctx, b->group_tokens, a->o, a->lse, in->heads,
                                      b->seqs, ith_score_scale(m->config->head_dim),
                                      !b->bidirectional);
}

ith_status ith_block_fill_cache(ith_model *m, ith_ctx *ctx, int64_t l, const ith_kv_cache *cache,
                                const ith_attention_in *in, T rows, T *k, T *v)
{
    int64_t all = ith_qkv_width(m->config),
            kv = m->config->num_key_value_heads * m->config->head_dim;
    T at = ith_row_range(cache->k, l, l + 1);
    *k = ith_tensor_3d(at.data, at.dtype, at.shape[1], at.shape[2], at.shape[3]);
    at = ith_row_range(cache->v, l, l + 1);
    *v = ith_tensor_3d(at.data, at.dtype, at.shape[1], at.shape[2], at.shape[3]);
    ITH_TRY(ith_scatter_rows(ctx, ith_heads_2d(*k), ith_heads_2d(in->k), rows));
    return ith_scatter_rows(ctx, ith_heads_2d(*v), ith_col_range(m->acts[l].qkv, all - kv, all),
                            rows);
}

ith_status ith_block_output_to_tokens(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                      ith_attention_in *in)
{
    const ith_hf_config *c = m->config;
    return ith_ulysses_to_tokens(m->mesh, ctx, b->group_tokens, c->num_attention_heads,
                                 c->num_key_value_heads, m->acts[l].o, &in->o);
}

/* ---- backward ---- */

ith_status ith_block_output_again(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  ith_attention_in *in)
{
    if (!m->acts[l].o.ndim) {
        ITH_TRY(ith_block_attention_in(m, ctx, b, l, false, in));
        ITH_TRY(ith_block_attend(m, ctx, b, l, in));
    }
    return in->o.ndim ? ITH_OK : ith_block_output_to_tokens(m, ctx, b, l, in);
}

ith_status ith_block_attention_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                        ith_attention_in *in, T do_, T dx)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    const ith_param *wqkv = ith_layer_param(m, l, ITH_P_QKV),
                    *qn = ith_layer_param(m, l, ITH_P_Q_NORM),
                    *kn = ith_layer_param(m, l, ITH_P_K_NORM),
                    *norm = ith_layer_param(m, l, ITH_P_INPUT_NORM);
    T do_heads, dqkv;
    ith_qkv dheads;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "qkv gradient", m->dtype, b->num_tokens,
                     ith_qkv_width(c), &dqkv));
    ITH_TRY(ith_ulysses_to_tokens_backward(m->mesh, ctx, b->group_tokens, c->num_key_value_heads,
                                           do_, &do_heads));
    ith_qkv s = ith_block_split_qkv(c, a->qkv), ds = ith_block_split_qkv(c, dqkv);
    ITH_TRY(ith_ulysses_push_gradient(m->mesh, ctx, b->group_tokens, ds, &dheads));
    ITH_TRY(ith_ring_attention_backward(m->mesh, ctx, b->group_tokens, dheads, do_heads, in->heads,
                                        a->o, a->lse, b->seqs, ith_score_scale(c->head_dim),
                                        !b->bidirectional));
    ITH_TRY(ith_ulysses_to_heads_backward(m->mesh, ctx, b->group_tokens, ds, dheads));
    ITH_TRY(ith_qk_norm_rope_backward(ctx, ds.q, ds.k, qn->grad, kn->grad, ds.q, ds.k, s.q, s.k,
                                      in->q_rstd, in->k_rstd, qn->w, kn->w, m->rope_cos,
                                      m->rope_sin, b->position_ids, 0.0f));
    ITH_TRY(ith_linear_backward_weight(ctx, wqkv->grad, dqkv, in->n1));
    T dn1 = in->n1; /* n1 was read for the last time */
    ITH_TRY(ith_linear_backward_input(ctx, dn1, dqkv, wqkv->w, false));
    return ith_rmsnorm_backward(ctx, dx, norm->grad, dn1, dx, a->x, in->rstd1, norm->w, 0.0f);
}
