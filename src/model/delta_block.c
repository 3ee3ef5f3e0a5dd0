/* delta_block.c - Gated DeltaNet of a layer: what it reads and who has it, the rule, backward,
 * decode. */
#include "model/delta_block.h"

typedef ith_tensor T;

/* Elements [first, first + count) of a parameter or its gradient; absent of an absent one. */
static T part_of(T t, int64_t first, int64_t count)
{
    return t.ndim ? ith_row_range(t, first, first + count) : t;
}

ith_delta_views ith_delta_split(const ith_hf_config *c, T t)
{
    int64_t u = ith_delta_conv_width(c), z = u + ith_delta_value_width(c),
            b = z + c->linear_num_value_heads;
    ith_delta_views s = {
        ith_col_range(t, 0, u), ith_split_heads(ith_col_range(t, u, z), c->linear_num_value_heads),
        ith_col_range(t, z, b), ith_col_range(t, b, b + c->linear_num_value_heads)};
    return s;
}

/* Linear layers have no ring: all ranks of the group exchange their heads. */
static const ith_mesh *linear_mesh(const ith_model *m)
{
    return m->mesh ? &m->linear_mesh : NULL;
}

/* Value heads [q_first, ..) and key heads [kv_first, ..) of this rank. */
static ith_head_share delta_share(const ith_model *m)
{
    const ith_hf_config *c = m->config;
    if (m->passes_states)
        return (ith_head_share){0, c->linear_num_value_heads, 0, c->linear_num_key_heads};
    return ith_ulysses_own_share(linear_mesh(m), c->linear_num_value_heads,
                                 c->linear_num_key_heads);
}

static int64_t share_width(const ith_hf_config *c, const ith_head_share *s)
{
    return 2 * s->kv_count * c->linear_key_head_dim + s->q_count * c->linear_value_head_dim;
}

/* Heads of [N, share_width]: q, k and v behind each other. */
static ith_qkv split_conv(const ith_hf_config *c, const ith_head_share *s, T t)
{
    int64_t k = s->kv_count * c->linear_key_head_dim;
    ith_qkv x = {ith_split_heads(ith_col_range(t, 0, k), s->kv_count),
                 ith_split_heads(ith_col_range(t, k, 2 * k), s->kv_count),
                 ith_split_heads(ith_col_range(t, 2 * k, t.shape[1]), s->q_count)};
    return x;
}

/* Channels [first, first + count) of the convolution are columns [column, ..) of a share. */
typedef struct {
    int64_t first, column, count;
} channels;

/* q, k and v of a share; of the whole one stretch. Returns how many. */
static int conv_channels(const ith_hf_config *c, const ith_head_share *s, channels out[3])
{
    int64_t k = s->kv_count * c->linear_key_head_dim, v = s->q_count * c->linear_value_head_dim;
    int64_t first_k = s->kv_first * c->linear_key_head_dim;
    out[0] = (channels){first_k, 0, k};
    out[1] = (channels){c->linear_num_key_heads * c->linear_key_head_dim + first_k, k, k};
    out[2] = (channels){2 * c->linear_num_key_heads * c->linear_key_head_dim +
                            s->q_first * c->linear_value_head_dim,
                        2 * k, v};
    if (s->q_count < c->linear_num_value_heads)
        return 3;
    out[0].count = ith_delta_conv_width(c);
    return 1;
}

/* What the core of a linear layer reads, as it travels. */
static ith_head_parts delta_parts(const ith_hf_config *c, const ith_delta_views *x)
{
    ith_head_share all = {0, c->linear_num_value_heads, 0, c->linear_num_key_heads};
    ith_qkv u = split_conv(c, &all, x->u);
    ith_head_parts p = {.count = 5,
                        .q_heads = all.q_count,
                        .kv_heads = all.kv_count,
                        .t = {u.q, u.k, u.v, ith_split_heads(x->b, all.q_count),
                              ith_split_heads(x->a, all.q_count)},
                        .kv = {true, true, false, false, false}};
    return p;
}

/* And as it has arrived: u [N, share_width], b and a [N, value heads]. */
static ith_delta_views delta_arrived(const ith_head_parts *p)
{
    int64_t width = 0, n = p->t[0].shape[0], row = p->t[0].stride[0];
    for (int i = 0; i < 3; i++)
        width += p->t[i].shape[1] * p->t[i].shape[2];
    ith_delta_views x = {.u = p->t[0], .b = p->t[3], .a = p->t[4]};
    T *flat[] = {&x.u, &x.b, &x.a};
    const int64_t cols[] = {width, p->t[3].shape[1], p->t[4].shape[1]};
    for (int i = 0; i < 3; i++)
        *flat[i] = (T){flat[i]->data, flat[i]->dtype, 2, {n, cols[i], 1, 1}, {row, 1, 1, 1}};
    return x;
}

int64_t ith_delta_room(const ith_model *m, int64_t l)
{
    return m->passes_states && m->config->layer_is_linear[l] ? m->config->linear_conv_kernel_dim - 1
                                                             : 0;
}

/* u with the rows of the halo in front. */
static T with_halo(T u, int64_t halo)
{
    u.data = (char *)u.data - halo * u.stride[0] * ith_dtype_bytes(u.dtype);
    u.shape[0] += halo;
    return u;
}

/* history: see ith_conv1d_silu_forward. */
static ith_status make_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T history,
                          ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_head_share share = delta_share(m);
    ith_delta_views x = ith_delta_split(c, m->acts[l].qkv);
    if (m->passes_states) {
        x.u = with_halo(x.u, b->slice.halo);
        ITH_TRY(ith_slice_halo(m->mesh, ctx, &b->slice, c->linear_conv_kernel_dim, b->seqs, x.u));
    } else {
        ith_head_parts parts = delta_parts(c, &x), own;
        ITH_TRY(ith_ulysses_push_parts(linear_mesh(m), ctx, ITH_MEM_WORKSPACE,
                                       "heads of all tokens", b->group_tokens, &parts, &own));
        ITH_TRY(ith_ulysses_parts_to_heads(linear_mesh(m), ctx, b->group_tokens, &parts, &own));
        ITH_TRY(ith_ulysses_await(linear_mesh(m), ctx));
        x = delta_arrived(&own);
    }
    in->u = x.u;
    in->b = x.b;
    in->a = x.a;
    int64_t n = x.u.shape[0], rows = x.a.shape[0], heads = share.q_count;
    channels part[3];
    int count = conv_channels(c, &share, part);
    T w = ith_layer_param(m, l, ITH_P_CONV)->w;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "convolution output", m->dtype, n,
                     share_width(c, &share), &in->conv));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "decay and beta", ITH_F32, rows, heads, &in->g));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "decay and beta", ITH_F32, rows, heads, &in->beta));
    for (int i = 0; i < count; i++) {
        int64_t from = part[i].column, to = from + part[i].count;
        ITH_TRY(ith_conv1d_silu_forward(ctx, ith_col_range(in->conv, from, to),
                                        ith_col_range(in->u, from, to),
                                        part_of(w, part[i].first, part[i].count), history,
                                        m->passes_states ? b->slice.conv : b->seqs));
    }
    return ith_gdn_gates_forward(
        ctx, in->g, in->beta, in->a, in->b,
        part_of(ith_layer_param(m, l, ITH_P_A_LOG)->w, share.q_first, heads),
        part_of(ith_layer_param(m, l, ITH_P_DT_BIAS)->w, share.q_first, heads));
}

/* The delta rule's operands, without the halo. */
static ith_delta_in delta_in(const ith_model *m, const ith_mixer_in *in)
{
    ith_head_share share = delta_share(m);
    int64_t end = in->conv.shape[0], begin = end - in->g.shape[0];
    ith_qkv x = split_conv(m->config, &share, ith_row_range(in->conv, begin, end));
    return (ith_delta_in){x.q,   x.k,      x.v,
                          in->g, in->beta, ith_score_scale(m->config->linear_key_head_dim)};
}

ith_status ith_delta_push_states(ith_model *m, ith_ctx *ctx, ith_mem_class where, ith_layer_acts *a)
{
    const ith_hf_config *c = m->config;
    int64_t heads = c->linear_num_value_heads, dk = c->linear_key_head_dim;
    ITH_TRY(ith_ctx_push(ctx, where, "state of the slice before", ITH_F32, 4, 1, heads, dk,
                         c->linear_value_head_dim, &a->state));
    return ith_ctx_push(ctx, where, "state map", ITH_F32, 4, 1, heads, dk, dk, &a->map);
}

/* a->o of a linear layer that passes states; again: a->state and a->map are there. */
static ith_status scan_delta(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             const ith_mixer_in *in)
{
    ith_layer_acts *a = &m->acts[l];
    ith_delta_in x = delta_in(m, in);
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    bool known = a->state.ndim && a->knows_state;
    if (!a->state.ndim)
        ITH_TRY(ith_delta_push_states(m, ctx, ITH_MEM_WORKSPACE, a));
    ITH_TRY(ith_delta_scan_forward(m->mesh, ctx, &b->slice, b->seqs, a->o, a->state, a->map, &x,
                                   known));
    a->knows_state = true;
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

ith_status ith_delta_push_out(ith_model *m, ith_ctx *ctx, ith_mem_class where, ith_layer_acts *a,
                              int64_t t)
{
    const ith_hf_config *c = m->config;
    return ith_push_heads(ctx, where, "delta rule output", m->dtype, t, c->linear_num_value_heads,
                          c->linear_value_head_dim, &a->o);
}

/* state: see ith_gated_delta_rule_forward. */
static ith_status mix(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T state,
                      const ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    if (!m->acts[l].o.ndim)
        ITH_TRY(ith_delta_push_out(m, ctx, ITH_MEM_WORKSPACE, &m->acts[l], b->num_tokens));
    if (m->passes_states)
        return scan_delta(m, ctx, b, l, in);
    ith_delta_in x = delta_in(m, in);
    T o = m->acts[l].o;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    if (ith_cp_size(m->mesh) > 1)
        ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "delta rule output of all tokens", m->dtype,
                               x.v.shape[0], x.v.shape[1], c->linear_value_head_dim, &o));
    ITH_TRY(
        ith_gated_delta_rule_forward(ctx, o, x.q, x.k, x.v, x.g, x.beta, state, b->seqs, x.scale));
    ITH_TRY(ith_ulysses_to_tokens(linear_mesh(m), ctx, b->group_tokens, c->linear_num_value_heads,
                                  c->linear_num_key_heads, o, &m->acts[l].o));
    ITH_TRY(ith_ulysses_await(linear_mesh(m), ctx));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

ith_status ith_delta_mixer_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                              ith_mixer_in *in)
{
    return make_in(m, ctx, b, l, ith_tensor_none(), in);
}

ith_status ith_delta_mix(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                         const ith_mixer_in *in)
{
    return mix(m, ctx, b, l, ith_tensor_none(), in);
}

/* ---- backward ---- */

ith_status ith_delta_mix_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  const ith_mixer_in *in, T do_, T dproj)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    const ith_param *conv = ith_layer_param(m, l, ITH_P_CONV),
                    *a_log = ith_layer_param(m, l, ITH_P_A_LOG),
                    *dt_bias = ith_layer_param(m, l, ITH_P_DT_BIAS);
    ith_head_share share = delta_share(m);
    channels part[3];
    int count = conv_channels(c, &share, part);
    int64_t n = in->conv.shape[0], rows = in->g.shape[0], first = share.q_first,
            heads = share.q_count;
    T dconv, none = ith_tensor_none();
    ith_delta_views ds = ith_delta_split(c, dproj), d = ds;
    ith_head_parts to = delta_parts(c, &ds), from;
    if (m->passes_states) {
        d.u = with_halo(ds.u, b->slice.halo);
    } else {
        ITH_TRY(ith_ulysses_to_tokens_backward(linear_mesh(m), ctx, b->group_tokens,
                                               c->linear_num_key_heads, do_, &do_));
        ITH_TRY(ith_ulysses_push_parts(linear_mesh(m), ctx, ITH_MEM_WORKSPACE,
                                       "gradient of heads of all tokens", b->group_tokens, &to,
                                       &from));
        ITH_TRY(ith_ulysses_await(linear_mesh(m), ctx));
        d = delta_arrived(&from);
    }
    ith_delta_gradient dx;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "convolution gradient", m->dtype, n,
                     share_width(c, &share), &dconv));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "decay and beta", ITH_F32, rows, heads, &dx.dg));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "decay and beta", ITH_F32, rows, heads, &dx.dbeta));
    ith_delta_in x = delta_in(m, in);
    ith_qkv dqkv = split_conv(c, &share, ith_row_range(dconv, n - rows, n));
    dx.dq = dqkv.q;
    dx.dk = dqkv.k;
    dx.dv = dqkv.v;
    if (n > rows) /* outputs of the halo are another rank's */
        ITH_TRY(ith_zero(ctx, ith_row_range(dconv, 0, n - rows)));
    ITH_TRY(m->passes_states ? ith_delta_scan_backward(m->mesh, ctx, &b->slice, b->seqs, &dx, do_,
                                                       &x, a->state, a->map)
                             : ith_gated_delta_rule_backward(ctx, dx.dq, dx.dk, dx.dv, dx.dg,
                                                             dx.dbeta, none, do_, x.q, x.k, x.v,
                                                             x.g, x.beta, none, b->seqs, x.scale));
    ITH_TRY(ith_gdn_gates_backward(ctx, d.a, d.b, part_of(a_log->grad, first, heads),
                                   part_of(dt_bias->grad, first, heads), dx.dg, dx.dbeta, in->a,
                                   in->b, part_of(a_log->w, first, heads),
                                   part_of(dt_bias->w, first, heads)));
    for (int i = 0; i < count; i++) {
        int64_t c0 = part[i].column, c1 = c0 + part[i].count;
        ITH_TRY(ith_conv1d_silu_backward(ctx, ith_col_range(d.u, c0, c1),
                                         part_of(conv->grad, part[i].first, part[i].count),
                                         ith_col_range(dconv, c0, c1), ith_col_range(in->u, c0, c1),
                                         part_of(conv->w, part[i].first, part[i].count),
                                         m->passes_states ? b->slice.conv : b->seqs));
    }
    if (m->passes_states)
        return ith_slice_halo_backward(m->mesh, ctx, &b->slice, c->linear_conv_kernel_dim, b->seqs,
                                       d.u);
    ITH_TRY(ith_ulysses_parts_to_heads_backward(linear_mesh(m), ctx, b->group_tokens, &to, &from));
    return ith_ulysses_await(linear_mesh(m), ctx);
}

/* ---- decode ---- */

/* A prefill among the ranks of a group: this one has the state of its heads and the inputs of its
 * tokens, and row `at` of all caches gets all. */
static ith_status prefill_cut(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                              const ith_kv_cache *cache, int64_t at, const ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T state;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "state of own heads", ITH_F32, 4, 1,
                         delta_share(m).q_count, c->linear_key_head_dim, c->linear_value_head_dim,
                         &state));
    ITH_TRY(ith_zero(ctx, state));
    ITH_TRY(mix(m, ctx, b, l, state, in));
    ITH_TRY(ith_cut_cache_gather_states(m->mesh, ctx, ith_row_range(cache->state, at, at + 1),
                                        state, c->linear_num_key_heads));
    ITH_TRY(ith_cut_cache_gather_tail(m->mesh, ctx, b->group_tokens,
                                      ith_row_range(cache->conv, at, at + 1),
                                      ith_delta_split(c, m->acts[l].qkv).u));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

ith_status ith_delta_mix_cache(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               const ith_kv_cache *cache, ith_mixer_in *in)
{
    int64_t first = ith_block_cache_index(m->config, l) * cache->batch, end = first + cache->batch;
    bool cut = ith_cp_size(m->mesh) > 1;
    T history = cut ? ith_tensor_none() : ith_row_range(cache->conv, first, end);
    ITH_TRY(make_in(m, ctx, b, l, history, in));
    ITH_TRY(ith_delta_push_out(m, ctx, ITH_MEM_WORKSPACE, &m->acts[l], b->num_tokens));
    if (cut)
        return prefill_cut(m, ctx, b, l, cache, first + cache->first, in);
    return mix(m, ctx, b, l, ith_row_range(cache->state, first, end), in);
}
