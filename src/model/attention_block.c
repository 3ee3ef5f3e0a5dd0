/* attention_block.c - attention of a layer, forward and backward, on one rank or many: families
 * have the same one under other masks, and Qwen3.5 with gates; and the projection in front of any
 * mixer. */
#include "model/delta_block.h"

typedef ith_tensor T;

/* Wider heads go forward through a library that has no windows on GPUs. */
#define WINDOW_DIM 128

ith_qkv ith_block_split_qkv(const ith_hf_config *c, T qkv)
{
    int64_t kv = c->num_key_value_heads * c->head_dim, q = qkv.shape[1] - 2 * kv;
    ith_qkv s = {ith_split_heads(ith_col_range(qkv, 0, q), c->num_attention_heads),
                 ith_split_heads(ith_col_range(qkv, q, q + kv), c->num_key_value_heads),
                 ith_split_heads(ith_col_range(qkv, q + kv, q + 2 * kv), c->num_key_value_heads)};
    s.q.shape[2] = c->head_dim;
    return s;
}

static ith_status push_qk(ith_model *m, ith_ctx *ctx, ith_mem_class where, int64_t t, T *q, T *k)
{
    const ith_hf_config *c = m->config;
    ITH_TRY(ith_push_heads(ctx, where, "q after norm and RoPE", m->dtype, t, c->num_attention_heads,
                           c->head_dim, q));
    return ith_push_heads(ctx, where, "k after norm and RoPE", m->dtype, t, c->num_key_value_heads,
                          c->head_dim, k);
}

static ith_status push_rstd(ith_model *m, ith_ctx *ctx, ith_mem_class where, int64_t t, T *q, T *k)
{
    const ith_hf_config *c = m->config;
    ITH_TRY(ith_push(ctx, where, "norm statistics", ITH_F32, t, c->num_attention_heads, q));
    return ith_push(ctx, where, "norm statistics", ITH_F32, t, c->num_key_value_heads, k);
}

ith_status ith_block_push_attention_in(ith_model *m, ith_ctx *ctx, ith_layer_acts *a, int64_t t,
                                       int64_t n)
{
    const ith_hf_config *c = m->config;
    const ith_mem_class where = ITH_MEM_ACTIVATIONS;
    ith_qkv from = ith_block_split_qkv(c, a->qkv);
    ITH_TRY(push_rstd(m, ctx, where, t, &a->q_rstd, &a->k_rstd));
    if (ith_ulysses_size(m->mesh) == 1) {
        ITH_TRY(push_qk(m, ctx, where, t, &from.q, &from.k));
        a->heads = from;
        return ITH_OK;
    }
    ITH_TRY(ith_ulysses_push_heads(m->mesh, ctx, where, "heads of all tokens", n, from, &a->heads));
    return ith_push_heads(ctx, where, "attention output of own tokens", m->dtype, t,
                          c->num_attention_heads, c->head_dim, &a->o_tokens);
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

ith_status ith_block_push_projection(ith_model *m, ith_ctx *ctx, ith_mem_class where, int64_t l,
                                     int64_t t, T *out)
{
    int64_t room = ith_delta_room(m, l);
    ITH_TRY(ith_push(ctx, where, "mixer projection", m->dtype, room + t,
                     ith_layer_param(m, l, ITH_P_QKV)->shape[0], out));
    *out = ith_row_range(*out, room, room + t);
    return ITH_OK;
}

ith_status ith_block_project(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             bool forward, ith_mixer_in *in)
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
        ITH_TRY(ith_rmsnorm_forward(ctx, in->n1, a->x, in->rstd1, m->delta, m->residual, w, eps,
                                    m->norm_offset));
    else if (!kept)
        ITH_TRY(
            ith_rmsnorm_forward(ctx, in->n1, none, in->rstd1, a->x, none, w, eps, m->norm_offset));
    if (!kept_qkv)
        ITH_TRY(ith_block_push_projection(m, ctx, ITH_MEM_WORKSPACE, l, t, &a->qkv));
    if (kept_qkv && !forward)
        return ITH_OK;
    return ith_linear_forward(ctx, a->qkv, in->n1, ith_layer_param(m, l, ITH_P_QKV)->w, false);
}

/* Room for q' and k' with their statistics, and for all of them at the heads. */
static ith_status push_qkv(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                           ith_mixer_in *in)
{
    const ith_layer_acts *a = &m->acts[l];
    const ith_mem_class where = ITH_MEM_WORKSPACE;
    bool kept = a->q_rstd.ndim != 0;
    if (kept && ith_ulysses_size(m->mesh) == 1) {
        in->q = in->heads.q;
        in->k = in->heads.k;
        return ITH_OK;
    }
    ITH_TRY(push_qk(m, ctx, where, b->num_tokens, &in->q, &in->k));
    if (kept)
        return ITH_OK;
    ITH_TRY(push_rstd(m, ctx, where, b->num_tokens, &in->q_rstd, &in->k_rstd));
    ith_qkv from = {in->q, in->k, ith_block_split_qkv(m->config, a->qkv).v};
    return ith_ulysses_push_heads(m->mesh, ctx, where, "heads of all tokens", b->group_tokens, from,
                                  &in->heads);
}

ith_status ith_block_attention_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  bool forward, ith_mixer_in *in)
{
    const ith_layer_acts *a = &m->acts[l];
    ITH_TRY(ith_block_project(m, ctx, b, l, forward, in));
    in->q_rstd = a->q_rstd;
    in->k_rstd = a->k_rstd;
    in->heads = a->heads;
    if (a->q_rstd.ndim && !forward)
        return ITH_OK;
    ITH_TRY(push_qkv(m, ctx, b, l, in));
    ith_qkv s = ith_block_split_qkv(m->config, a->qkv);
    ITH_TRY(ith_qk_norm_rope_forward(
        ctx, in->q, in->k, in->q_rstd, in->k_rstd, s.q, s.k, ith_layer_param(m, l, ITH_P_Q_NORM)->w,
        ith_layer_param(m, l, ITH_P_K_NORM)->w, m->rope_cos, m->rope_sin, b->position_ids,
        (float)m->config->rms_norm_eps, m->norm_offset));
    ITH_TRY(ith_ulysses_to_heads(m->mesh, ctx, b->group_tokens, (ith_qkv){in->q, in->k, s.v},
                                 in->heads));
    return ith_ulysses_await(m->mesh, ctx);
}

/* ---- attention ---- */

/* Of rows [first, end) of all tokens. */
static ith_status attend_rows(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                              int64_t first, int64_t end, const ith_qkv *x)
{
    const ith_layer_acts *a = &m->acts[l];
    ith_seqs window = b->seqs;
    window.window = true;
    window.q_first = first;
    window.k_first = 0;
    if (first == end)
        return ITH_OK;
    return ith_attention_forward(ctx, ith_row_range(a->o, first, end),
                                 ith_row_range(a->lse, first, end), ith_row_range(x->q, first, end),
                                 x->k, x->v, window, ith_score_scale(m->config->head_dim),
                                 !b->bidirectional);
}

/* Tokens of the others first: they are on their way while own ones are computed. */
static ith_status attend_in_windows(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                    ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    T o = m->acts[l].o;
    int64_t n = b->group_tokens, hkv = c->num_key_value_heads;
    int64_t first = ith_cp_begin(m->mesh, n), end = ith_cp_end(m->mesh, n);
    if (!in->o.ndim)
        ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "attention output of own tokens", m->dtype,
                               b->num_tokens, c->num_attention_heads, c->head_dim, &in->o));
    ITH_TRY(attend_rows(m, ctx, b, l, 0, first, &in->heads));
    ITH_TRY(attend_rows(m, ctx, b, l, end, n, &in->heads));
    ITH_TRY(ith_ulysses_others_to_tokens(m->mesh, ctx, n, hkv, o, in->o));
    ITH_TRY(attend_rows(m, ctx, b, l, first, end, &in->heads));
    ITH_TRY(ith_ulysses_own_to_tokens(m->mesh, ctx, n, hkv, o, in->o));
    return ith_ulysses_await(m->mesh, ctx);
}

static ith_status output_to_tokens(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                   ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ITH_TRY(ith_ulysses_to_tokens(m->mesh, ctx, b->group_tokens, c->num_attention_heads,
                                  c->num_key_value_heads, m->acts[l].o, &in->o));
    return ith_ulysses_await(m->mesh, ctx);
}

ith_status ith_block_attend(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                            ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    if (!a->o.ndim)
        ITH_TRY(ith_block_push_attention_out(m, ctx, ITH_MEM_WORKSPACE, a, b->group_tokens));
    in->o = a->o_tokens;
    if (ith_ulysses_is_direct(m->mesh, ctx, c->num_key_value_heads) && c->head_dim <= WINDOW_DIM)
        return attend_in_windows(m, ctx, b, l, in);
    ITH_TRY(ith_ring_attention_forward(m->mesh, ctx, b->group_tokens, a->o, a->lse, in->heads,
                                       b->seqs, ith_score_scale(c->head_dim), !b->bidirectional));
    return output_to_tokens(m, ctx, b, l, in);
}

/* ---- backward ---- */

ith_status ith_block_output_again(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  ith_mixer_in *in)
{
    if (in->o.ndim)
        return ITH_OK;
    in->o = m->acts[l].o_tokens;
    if (in->o.ndim)
        return ITH_OK;
    if (m->acts[l].o.ndim)
        return output_to_tokens(m, ctx, b, l, in);
    ITH_TRY(ith_block_attention_in(m, ctx, b, l, false, in));
    return ith_block_attend(m, ctx, b, l, in);
}

ith_status ith_block_output_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b,
                                     ith_mixer_in *in, T do_)
{
    return ith_ulysses_to_tokens_backward(m->mesh, ctx, b->group_tokens,
                                          m->config->num_key_value_heads, do_, &in->do_heads);
}

ith_status ith_block_attend_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     ith_mixer_in *in, T dproj)
{
    const ith_hf_config *c = m->config;
    const ith_layer_acts *a = &m->acts[l];
    ith_qkv dheads;
    in->dtokens = ith_block_split_qkv(c, dproj);
    if (ith_cp_size(m->mesh) > 1 && in->dtokens.q.stride[1] != c->head_dim) /* without the gates */
        ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "q gradient", m->dtype, b->num_tokens,
                               c->num_attention_heads, c->head_dim, &in->dtokens.q));
    ITH_TRY(ith_ulysses_push_heads(m->mesh, ctx, ITH_MEM_WORKSPACE,
                                   "gradient of heads of all tokens", b->group_tokens, in->dtokens,
                                   &dheads));
    ITH_TRY(ith_ulysses_await(m->mesh, ctx));
    ITH_TRY(ith_ring_attention_backward(m->mesh, ctx, b->group_tokens, dheads, in->do_heads,
                                        in->heads, a->o, a->lse, b->seqs,
                                        ith_score_scale(c->head_dim), !b->bidirectional));
    return ith_ulysses_to_heads_backward(m->mesh, ctx, b->group_tokens, in->dtokens, dheads);
}

ith_status ith_block_qk_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                 const ith_mixer_in *in, T dproj)
{
    const ith_param *qn = ith_layer_param(m, l, ITH_P_Q_NORM),
                    *kn = ith_layer_param(m, l, ITH_P_K_NORM);
    ith_qkv s = ith_block_split_qkv(m->config, m->acts[l].qkv),
            ds = ith_block_split_qkv(m->config, dproj);
    ITH_TRY(ith_ulysses_await(m->mesh, ctx));
    return ith_qk_norm_rope_backward(ctx, ds.q, ds.k, qn->grad, kn->grad, in->dtokens.q, ds.k, s.q,
                                     s.k, in->q_rstd, in->k_rstd, qn->w, kn->w, m->rope_cos,
                                     m->rope_sin, b->position_ids, m->norm_offset);
}

ith_status ith_block_project_backward(ith_model *m, ith_ctx *ctx, int64_t l, ith_mixer_in *in,
                                      T dproj, T dx)
{
    const ith_param *w = ith_layer_param(m, l, ITH_P_QKV),
                    *norm = ith_layer_param(m, l, ITH_P_INPUT_NORM);
    ITH_TRY(ith_linear_backward_weight(ctx, w->grad, dproj, in->n1));
    T dn1 = in->n1; /* n1 was read for the last time */
    ITH_TRY(ith_linear_backward_input(ctx, dn1, dproj, w->w, false));
    return ith_rmsnorm_backward(ctx, dx, norm->grad, dn1, dx, m->acts[l].x, in->rstd1, norm->w,
                                m->norm_offset);
}

/* ---- decode ---- */

int64_t ith_block_cache_index(const ith_hf_config *c, int64_t l)
{
    int64_t n = 0;
    for (int64_t i = 0; i < l; i++)
        n += c->layer_is_linear[i] == c->layer_is_linear[l];
    return n;
}

/* Keys or values of a layer: [rows, Hkv, Dh]. */
static T cache_layer(T all, int64_t idx)
{
    T t = ith_row_range(all, idx, idx + 1);
    return ith_tensor_3d(t.data, t.dtype, t.shape[1], t.shape[2], t.shape[3]);
}

/* The same by sequences: [B, C, Hkv, Dh]. */
static T cache_sequences(const ith_kv_cache *cache, T t)
{
    return ith_tensor_4d(t.data, t.dtype, 4, cache->batch, cache->capacity, t.shape[1], t.shape[2]);
}

ith_status ith_block_fill_cache(ith_model *m, ith_ctx *ctx, int64_t l, const ith_kv_cache *cache,
                                const ith_mixer_in *in, T rows, T *k, T *v)
{
    T qkv = m->acts[l].qkv;
    int64_t idx = ith_block_cache_index(m->config, l), all = qkv.shape[1],
            kv = m->config->num_key_value_heads * m->config->head_dim;
    *k = cache_layer(cache->k, idx);
    *v = cache_layer(cache->v, idx);
    ITH_TRY(ith_scatter_rows(ctx, ith_heads_2d(*k), ith_heads_2d(in->k), rows));
    return ith_scatter_rows(ctx, ith_heads_2d(*v), ith_col_range(qkv, all - kv, all), rows);
}

ith_status ith_block_attend_cache(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  const ith_kv_cache *cache, T rows, bool prefill, ith_mixer_in *in)
{
    ith_layer_acts *a = &m->acts[l];
    ith_cache_parts part;
    T k, v;
    ITH_TRY(ith_block_fill_cache(m, ctx, l, cache, in, rows, &k, &v));
    if (prefill)
        return ith_block_attend(m, ctx, b, l, in);
    ITH_TRY(ith_block_push_attention_out(m, ctx, ITH_MEM_WORKSPACE, a, b->group_tokens));
    in->o = a->o;
    ITH_TRY(ith_cache_parts_open(cache->mesh, ctx, a->o, &part));
    ITH_TRY(ith_attention_decode(ctx, part.o, part.lse, in->q, cache_sequences(cache, k),
                                 cache_sequences(cache, v), cache->lengths,
                                 ith_score_scale(m->config->head_dim)));
    return ith_cache_parts_close(cache->mesh, ctx, a->o, &part);
}
