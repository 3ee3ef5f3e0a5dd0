/* qwen3_5.c - Qwen3.5 and Qwen3.5-MoE: parameters, forward, backward in mirrored order, decode.
 *
 * Layer:  x = residual + delta      n1 = norm(x)      x2 = x + mixer(n1)      n2 = norm(x2)
 *         delta = MLP(n2), or experts(n2) + sigmoid(n2 w) * shared(n2)
 * Mixer, full attention:  [q, gate per head | k | v] = n1 Wqkv^T    q', k' = rope(norm_head(q, k))
 *         (attention(q', k', v) * sigmoid(gate)) Wo^T
 * Mixer, Gated DeltaNet:  [u | z | b | a] = n1 Win^T    [q | k | v] = silu(conv(u))
 *         g, beta = gates(a, b)     o = delta_rule(q, k, v, g, beta)     gated_norm(o, z) Wo^T
 *
 * Many ranks: projections and all behind the mixers' cores are of a rank's own tokens. The cores,
 * convolution included, are of its own heads and all tokens of the group (parallel/ulysses.h); of
 * full attention, in a ring, and of linear layers, with passes_states, of less (parallel/ring.h,
 * delta_scan.h). Slices are contiguous always. Gates of the output stay with the tokens.
 *
 * Invariants: 1. convolution and state begin at zero in every document of a packed row.
 * 2. What is made again in backward comes from the same operators on the same inputs: bit-equal to
 * forward's.
 * 3. Layers that keep less than all make the input projection again before the MLP's backward, for
 * x2 needs its gates. */
#include "model/blocks.h"
#include "model/vision.h"

typedef ith_tensor T;

/* Widths of the projections. */
static int64_t attention_width(const ith_hf_config *c)
{
    return 2 * (c->num_attention_heads + c->num_key_value_heads) * c->head_dim;
}

static int64_t key_width(const ith_hf_config *c)
{
    return c->linear_num_key_heads * c->linear_key_head_dim;
}

static int64_t value_width(const ith_hf_config *c)
{
    return c->linear_num_value_heads * c->linear_value_head_dim;
}

static int64_t conv_width(const ith_hf_config *c)
{
    return 2 * key_width(c) + value_width(c);
}

static int64_t mixer_width(const ith_hf_config *c, int64_t l)
{
    return c->layer_is_linear[l] ? conv_width(c) + value_width(c) + 2 * c->linear_num_value_heads
                                 : attention_width(c);
}

/* ---- parameters ---- */

/* Where the tensors of this model lie: model. or model.language_model. */
static const char *prefix_of(const ith_model *m)
{
    return m->config->is_nested ? "model.language_model." : "model.";
}

/* One Hugging Face matrix of a stack. */
typedef struct {
    const char *name; /* below layers.N. */
    int64_t rows;
} matrix;

/* Layer parameter `which`, made of `count` matrices stacked by rows. */
static ith_status declare_stack(ith_model *m, int64_t l, int which, const char *ours,
                                const matrix *parts, int count, int64_t cols, ith_error *err)
{
    int32_t *p = &m->layer_param[l * ITH_LAYER_PARAMS + which];
    int64_t rows = 0, first = 0;
    for (int i = 0; i < count; i++)
        rows += parts[i].rows;
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.%s", (long long)l, ours), 2, rows,
                                cols, 1, p, err));
    for (int i = 0; i < count; i++) {
        const char *hf =
            ith_model_text(m, "%slayers.%lld.%s.weight", prefix_of(m), (long long)l, parts[i].name);
        ITH_TRY(ith_model_add_piece(m, hf, *p, first, 2, parts[i].rows, cols, 1, false, err));
        first += parts[i].rows * cols;
    }
    return ITH_OK;
}

static ith_status declare_vector(ith_model *m, int64_t l, int which, const char *hf_name,
                                 int64_t width, ith_init init, ith_error *err)
{
    int32_t *p = &m->layer_param[l * ITH_LAYER_PARAMS + which];
    const char *hf = ith_model_text(m, "%slayers.%lld.%s", prefix_of(m), (long long)l, hf_name);
    ITH_TRY(ith_model_add_param(m, hf, 1, width, 1, 1, p, err));
    ITH_TRY(ith_model_add_piece(m, hf, *p, 0, 1, width, 1, 1, false, err));
    ith_model_set_init(m, init);
    return ITH_OK;
}

static ith_status declare_attention(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t q = c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
    ITH_TRY(declare_stack(m, l, ITH_P_QKV, "qkv",
                          (const matrix[]){{"self_attn.q_proj", 2 * q},
                                           {"self_attn.k_proj", kv},
                                           {"self_attn.v_proj", kv}},
                          3, c->hidden_size, err));
    ITH_TRY(declare_vector(m, l, ITH_P_Q_NORM, "self_attn.q_norm.weight", c->head_dim,
                           ITH_INIT_ZEROS, err));
    ITH_TRY(declare_vector(m, l, ITH_P_K_NORM, "self_attn.k_norm.weight", c->head_dim,
                           ITH_INIT_ZEROS, err));
    return declare_stack(m, l, ITH_P_O, "o", (const matrix[]){{"self_attn.o_proj", c->hidden_size}},
                         1, q, err);
}

static ith_status declare_linear(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t heads = c->linear_num_value_heads, taps = c->linear_conv_kernel_dim;
    ITH_TRY(declare_stack(m, l, ITH_P_QKV, "in_proj",
                          (const matrix[]){{"linear_attn.in_proj_qkv", conv_width(c)},
                                           {"linear_attn.in_proj_z", value_width(c)},
                                           {"linear_attn.in_proj_b", heads},
                                           {"linear_attn.in_proj_a", heads}},
                          4, c->hidden_size, err));
    int32_t *conv = &m->layer_param[l * ITH_LAYER_PARAMS + ITH_P_CONV];
    const char *name =
        ith_model_text(m, "%slayers.%lld.linear_attn.conv1d.weight", prefix_of(m), (long long)l);
    ITH_TRY(ith_model_add_param(m, name, 2, conv_width(c), taps, 1, conv, err));
    ITH_TRY(ith_model_add_piece(m, name, *conv, 0, 3, conv_width(c), 1, taps, false, err));
    ITH_TRY(declare_vector(m, l, ITH_P_DT_BIAS, "linear_attn.dt_bias", heads, ITH_INIT_ONES, err));
    ITH_TRY(declare_vector(m, l, ITH_P_A_LOG, "linear_attn.A_log", heads, ITH_INIT_A_LOG, err));
    ith_model_set_f32(m);
    ITH_TRY(declare_vector(m, l, ITH_P_GDN_NORM, "linear_attn.norm.weight",
                           c->linear_value_head_dim, ITH_INIT_ONES, err));
    ith_model_set_f32(m);
    return declare_stack(m, l, ITH_P_O, "out_proj",
                         (const matrix[]){{"linear_attn.out_proj", c->hidden_size}}, 1,
                         value_width(c), err);
}

static ith_status declare_experts(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t d = c->hidden_size, e = c->num_experts, im = c->moe_intermediate_size;
    int64_t is = c->shared_expert_intermediate_size;
    int32_t *p = m->layer_param + l * ITH_LAYER_PARAMS;
    long long n = (long long)l;
    ITH_TRY(
        declare_stack(m, l, ITH_P_ROUTER, "router", (const matrix[]){{"mlp.gate", e}}, 1, d, err));
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.experts.gate_up", n), 3, e,
                                2 * im, d, &p[ITH_P_GATE_UP], err));
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.experts.down", n), 3, e, d, im,
                                &p[ITH_P_DOWN], err));
    for (int64_t i = 0; i < 3 * e; i++) {
        static const char *const names[] = {"gate_proj", "up_proj", "down_proj"};
        int64_t expert = i / 3, k = i % 3;
        bool down = k == 2;
        const char *hf = ith_model_text(m, "%slayers.%lld.mlp.experts.%lld.%s.weight", prefix_of(m),
                                        n, (long long)expert, names[k]);
        ITH_TRY(ith_model_add_piece(m, hf, p[down ? ITH_P_DOWN : ITH_P_GATE_UP],
                                    down ? expert * d * im : (2 * expert + k) * im * d, 2,
                                    down ? d : im, down ? im : d, 1, false, err));
    }
    ITH_TRY(declare_stack(
        m, l, ITH_P_SHARED_GATE_UP, "shared.gate_up",
        (const matrix[]){{"mlp.shared_expert.gate_proj", is}, {"mlp.shared_expert.up_proj", is}}, 2,
        d, err));
    ITH_TRY(declare_stack(m, l, ITH_P_SHARED_DOWN, "shared.down",
                          (const matrix[]){{"mlp.shared_expert.down_proj", d}}, 1, is, err));
    return declare_stack(m, l, ITH_P_SHARED_GATE, "shared.gate",
                         (const matrix[]){{"mlp.shared_expert_gate", 1}}, 1, d, err);
}

static ith_status declare_layer(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t d = c->hidden_size, i = c->intermediate_size;
    ITH_TRY(
        declare_vector(m, l, ITH_P_INPUT_NORM, "input_layernorm.weight", d, ITH_INIT_ZEROS, err));
    ITH_TRY(c->layer_is_linear[l] ? declare_linear(m, l, err) : declare_attention(m, l, err));
    ITH_TRY(declare_vector(m, l, ITH_P_POST_NORM, "post_attention_layernorm.weight", d,
                           ITH_INIT_ZEROS, err));
    if (c->layer_is_moe[l])
        return declare_experts(m, l, err);
    ITH_TRY(declare_stack(m, l, ITH_P_GATE_UP, "gate_up",
                          (const matrix[]){{"mlp.gate_proj", i}, {"mlp.up_proj", i}}, 2, d, err));
    return declare_stack(m, l, ITH_P_DOWN, "down", (const matrix[]){{"mlp.down_proj", d}}, 1, i,
                         err);
}

static ith_status qwen3_5_declare(ith_model *m, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t v = c->vocab_size, d = c->hidden_size;
    m->norm_offset = 1.0f;
    ITH_TRY(ith_model_add_param(m, "embed_tokens", 2, v, d, 1, &m->embed, err));
    ITH_TRY(ith_model_add_piece(m, ith_model_text(m, "%sembed_tokens.weight", prefix_of(m)),
                                m->embed, 0, 2, v, d, 1, false, err));
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        ITH_TRY(declare_layer(m, l, err));
    ITH_TRY(ith_model_add_param(m, "norm", 1, d, 1, 1, &m->final_norm, err));
    ITH_TRY(ith_model_add_piece(m, ith_model_text(m, "%snorm.weight", prefix_of(m)), m->final_norm,
                                0, 1, d, 1, 1, false, err));
    ith_model_set_init(m, ITH_INIT_ZEROS);
    if (m->has_vision)
        ITH_TRY(ith_vision_declare(m, err));
    m->head = m->embed;
    if (c->tie_word_embeddings)
        return ITH_OK;
    ITH_TRY(ith_model_add_param(m, "lm_head", 2, v, d, 1, &m->head, err));
    return ith_model_add_piece(m, "lm_head.weight", m->head, 0, 2, v, d, 1, false, err);
}

/* ---- what both directions share ---- */

static ith_status push(ith_ctx *ctx, const char *name, ith_dtype dtype, int64_t rows, int64_t cols,
                       T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_WORKSPACE, name, dtype, 2, rows, cols, 1, 1, out);
}

static ith_status push_rows(ith_ctx *ctx, const char *name, int64_t rows, T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_WORKSPACE, name, ITH_F32, 1, rows, 1, 1, 1, out);
}

/* Elements [first, first + count) of a parameter or its gradient; absent of an absent one. */
static T part_of(T t, int64_t first, int64_t count)
{
    return t.ndim ? ith_row_range(t, first, first + count) : t;
}

/* Views of [T, attention_width]. Each query head is followed by its gate. */
typedef struct {
    T q, gate, k, v;
} attention_views;

static attention_views split_attention(const ith_hf_config *c, T t)
{
    int64_t q = 2 * c->num_attention_heads * c->head_dim, kv = c->num_key_value_heads * c->head_dim;
    T pairs = ith_split_heads(ith_col_range(t, 0, q), c->num_attention_heads);
    pairs.shape[2] = c->head_dim;
    attention_views s = {
        pairs, pairs, ith_split_heads(ith_col_range(t, q, q + kv), c->num_key_value_heads),
        ith_split_heads(ith_col_range(t, q + kv, q + 2 * kv), c->num_key_value_heads)};
    s.gate.data = (char *)s.gate.data + c->head_dim * ith_dtype_bytes(t.dtype);
    return s;
}

/* Views of [T, mixer_width] of a linear layer. */
typedef struct {
    T u, z, b, a;
} linear_views;

static linear_views split_linear(const ith_hf_config *c, T t)
{
    int64_t u = conv_width(c), z = u + value_width(c), b = z + c->linear_num_value_heads;
    linear_views s = {ith_col_range(t, 0, u),
                      ith_split_heads(ith_col_range(t, u, z), c->linear_num_value_heads),
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
    out[1] = (channels){key_width(c) + first_k, k, k};
    out[2] = (channels){2 * key_width(c) + s->q_first * c->linear_value_head_dim, 2 * k, v};
    if (s->q_count < c->linear_num_value_heads)
        return 3;
    out[0].count = conv_width(c);
    return 1;
}

/* What the core of a linear layer reads, as it travels. */
static ith_head_parts delta_parts(const ith_hf_config *c, const linear_views *x)
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
static linear_views delta_arrived(const ith_head_parts *p)
{
    int64_t width = 0, n = p->t[0].shape[0], row = p->t[0].stride[0];
    for (int i = 0; i < 3; i++)
        width += p->t[i].shape[1] * p->t[i].shape[2];
    linear_views x = {.u = p->t[0], .b = p->t[3], .a = p->t[4]};
    T *flat[] = {&x.u, &x.b, &x.a};
    const int64_t cols[] = {width, p->t[3].shape[1], p->t[4].shape[1]};
    for (int i = 0; i < 3; i++)
        *flat[i] = (T){flat[i]->data, flat[i]->dtype, 2, {n, cols[i], 1, 1}, {row, 1, 1, 1}};
    return x;
}

/* What the mixer works on, in the layer's workspace; a->qkv is the projection. */
typedef struct {
    T n1, rstd1;
    T q, k, q_rstd, k_rstd; /* full attention, after norm and RoPE */
    ith_qkv heads;          /* q', k', v of this rank's heads, all N tokens of its group */
    linear_views delta;     /* Gated DeltaNet, the same: what convolution and gates read, */
    T conv, g, beta;        /* and what they make */
    T o;                    /* output of this rank's tokens, all heads; absent: not made yet */
} mixer_in;

/* Rows in front of a projection for the inputs of convolutions before the slice. */
static int64_t room_for_halo(const ith_model *m, int64_t l)
{
    return m->passes_states && m->config->layer_is_linear[l] ? m->config->linear_conv_kernel_dim - 1
                                                             : 0;
}

/* [T, mixer_width] behind that room. */
static ith_status push_projection(ith_model *m, ith_ctx *ctx, ith_mem_class where, int64_t l,
                                  int64_t t, T *out)
{
    int64_t room = room_for_halo(m, l);
    ITH_TRY(ith_ctx_push(ctx, where, "mixer projection", m->dtype, 2, room + t,
                         mixer_width(m->config, l), 1, 1, out));
    *out = ith_row_range(*out, room, room + t);
    return ITH_OK;
}

/* u with the rows of the halo in front. */
static T with_halo(T u, int64_t halo)
{
    u.data = (char *)u.data - halo * u.stride[0] * ith_dtype_bytes(u.dtype);
    u.shape[0] += halo;
    return u;
}

/* n1 from a->x (or from residual + delta, which then gives a->x) and the projection, unless saved.
 */
static ith_status project(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, bool from_pair,
                          mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens;
    float eps = (float)c->rms_norm_eps;
    T none = ith_tensor_none(), w = ith_layer_param(m, l, ITH_P_INPUT_NORM)->w;
    bool saved = a->qkv.ndim && !from_pair;
    ITH_TRY(push(ctx, "norm output", m->dtype, t, c->hidden_size, &in->n1));
    ITH_TRY(push_rows(ctx, "norm statistics", t, &in->rstd1));
    if (from_pair)
        ITH_TRY(ith_rmsnorm_forward(ctx, in->n1, a->x, in->rstd1, m->delta, m->residual, w, eps,
                                    m->norm_offset));
    else
        ITH_TRY(
            ith_rmsnorm_forward(ctx, in->n1, none, in->rstd1, a->x, none, w, eps, m->norm_offset));
    if (saved)
        return ITH_OK;
    if (!a->qkv.ndim)
        ITH_TRY(push_projection(m, ctx, ITH_MEM_WORKSPACE, l, t, &a->qkv));
    return ith_linear_forward(ctx, a->qkv, in->n1, ith_layer_param(m, l, ITH_P_QKV)->w, false);
}

static ith_status make_qk(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, mixer_in *in)
{
    const ith_hf_config *c = m->config;
    int64_t t = b->num_tokens, hq = c->num_attention_heads, hkv = c->num_key_value_heads;
    ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "q after norm and RoPE", m->dtype, t, hq,
                           c->head_dim, &in->q));
    ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "k after norm and RoPE", m->dtype, t, hkv,
                           c->head_dim, &in->k));
    ITH_TRY(push(ctx, "norm statistics", ITH_F32, t, hq, &in->q_rstd));
    ITH_TRY(push(ctx, "norm statistics", ITH_F32, t, hkv, &in->k_rstd));
    attention_views s = split_attention(c, m->acts[l].qkv);
    ITH_TRY(ith_qk_norm_rope_forward(
        ctx, in->q, in->k, in->q_rstd, in->k_rstd, s.q, s.k, ith_layer_param(m, l, ITH_P_Q_NORM)->w,
        ith_layer_param(m, l, ITH_P_K_NORM)->w, m->rope_cos, m->rope_sin, b->position_ids,
        (float)c->rms_norm_eps, m->norm_offset));
    return ith_ulysses_to_heads(m->mesh, ctx, b->group_tokens, (ith_qkv){in->q, in->k, s.v},
                                &in->heads);
}

/* Convolution and gates. history: see ith_conv1d_silu_forward. */
static ith_status make_delta_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                T history, mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_head_share share = delta_share(m);
    in->delta = split_linear(c, m->acts[l].qkv);
    if (m->passes_states) {
        in->delta.u = with_halo(in->delta.u, b->slice.halo);
        ITH_TRY(ith_slice_halo(m->mesh, ctx, &b->slice, c->linear_conv_kernel_dim, b->seqs,
                               in->delta.u));
    } else {
        ith_head_parts parts = delta_parts(c, &in->delta), own;
        ITH_TRY(ith_ulysses_parts_to_heads(linear_mesh(m), ctx, b->group_tokens, &parts, &own));
        in->delta = delta_arrived(&own);
    }
    int64_t n = in->delta.u.shape[0], rows = in->delta.a.shape[0], heads = share.q_count;
    channels part[3];
    int count = conv_channels(c, &share, part);
    T w = ith_layer_param(m, l, ITH_P_CONV)->w;
    ITH_TRY(push(ctx, "convolution output", m->dtype, n, share_width(c, &share), &in->conv));
    ITH_TRY(push(ctx, "decay and beta", ITH_F32, rows, heads, &in->g));
    ITH_TRY(push(ctx, "decay and beta", ITH_F32, rows, heads, &in->beta));
    for (int i = 0; i < count; i++) {
        int64_t from = part[i].column, to = from + part[i].count;
        ITH_TRY(ith_conv1d_silu_forward(ctx, ith_col_range(in->conv, from, to),
                                        ith_col_range(in->delta.u, from, to),
                                        part_of(w, part[i].first, part[i].count), history,
                                        m->passes_states ? b->slice.conv : b->seqs));
    }
    return ith_gdn_gates_forward(
        ctx, in->g, in->beta, in->delta.a, in->delta.b,
        part_of(ith_layer_param(m, l, ITH_P_A_LOG)->w, share.q_first, heads),
        part_of(ith_layer_param(m, l, ITH_P_DT_BIAS)->w, share.q_first, heads));
}

/* Projection and what the mixer reads of it. */
static ith_status make_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, bool from_pair,
                          T history, mixer_in *in)
{
    ITH_TRY(project(m, ctx, b, l, from_pair, in));
    return m->config->layer_is_linear[l] ? make_delta_in(m, ctx, b, l, history, in)
                                         : make_qk(m, ctx, b, l, in);
}

/* Room for a->o: of attention (with a->lse) of its own heads and the ring slice of n tokens, for
 * its backward reads them there; of the delta rule all heads of t tokens. Alone, n = t. */
static ith_status push_mixer_out(ith_model *m, ith_ctx *ctx, ith_mem_class where, int64_t l,
                                 int64_t n, int64_t t)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    if (c->layer_is_linear[l])
        return ith_push_heads(ctx, where, "delta rule output", m->dtype, t,
                              c->linear_num_value_heads, c->linear_value_head_dim, &a->o);
    int64_t heads =
        ith_ulysses_own_share(m->mesh, c->num_attention_heads, c->num_key_value_heads).q_count;
    int64_t rows = ith_ring_own_rows(m->mesh, ctx, n);
    ITH_TRY(
        ith_push_heads(ctx, where, "attention output", m->dtype, rows, heads, c->head_dim, &a->o));
    return ith_ctx_push(ctx, where, "attention lse", ITH_F32, 2, rows, heads, 1, 1, &a->lse);
}

/* The delta rule's operands, without the halo. */
static ith_delta_in delta_in(const ith_model *m, const mixer_in *in)
{
    ith_head_share share = delta_share(m);
    int64_t end = in->conv.shape[0], begin = end - in->g.shape[0];
    ith_qkv x = split_conv(m->config, &share, ith_row_range(in->conv, begin, end));
    return (ith_delta_in){x.q,   x.k,      x.v,
                          in->g, in->beta, ith_score_scale(m->config->linear_key_head_dim)};
}

/* What a linear layer that passes states keeps of them, whatever else it keeps. */
static ith_status push_states(ith_model *m, ith_ctx *ctx, ith_mem_class where, ith_layer_acts *a)
{
    const ith_hf_config *c = m->config;
    int64_t heads = c->linear_num_value_heads, dk = c->linear_key_head_dim;
    ITH_TRY(ith_ctx_push(ctx, where, "state of the slice before", ITH_F32, 4, 1, heads, dk,
                         c->linear_value_head_dim, &a->state));
    return ith_ctx_push(ctx, where, "state map", ITH_F32, 4, 1, heads, dk, dk, &a->map);
}

/* a->o of a linear layer that passes states; again: a->state and a->map are there. */
static ith_status scan_delta(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             const mixer_in *in)
{
    ith_layer_acts *a = &m->acts[l];
    ith_delta_in x = delta_in(m, in);
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    bool known = a->state.ndim && a->knows_state;
    if (!a->state.ndim)
        ITH_TRY(push_states(m, ctx, ITH_MEM_WORKSPACE, a));
    ITH_TRY(ith_delta_scan_forward(m->mesh, ctx, &b->slice, b->seqs, a->o, a->state, a->map, &x,
                                   known));
    a->knows_state = true;
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* a->o of a linear layer. state: see ith_gated_delta_rule_forward. */
static ith_status run_delta(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T state,
                            const mixer_in *in)
{
    const ith_hf_config *c = m->config;
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
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* a->o over whole documents. */
static ith_status mix(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T state,
                      const mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    if (c->layer_is_linear[l])
        return run_delta(m, ctx, b, l, state, in);
    return ith_ring_attention_forward(m->mesh, ctx, b->group_tokens, a->o, a->lse, in->heads,
                                      b->seqs, ith_score_scale(c->head_dim), true);
}

/* in->o from a->o. */
static ith_status output_to_tokens(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                   mixer_in *in)
{
    const ith_hf_config *c = m->config;
    in->o = m->acts[l].o;
    if (c->layer_is_linear[l] || ith_cp_size(m->mesh) == 1)
        return ITH_OK;
    in->o = ith_tensor_none();
    return ith_ulysses_to_tokens(m->mesh, ctx, b->group_tokens, c->num_attention_heads,
                                 c->num_key_value_heads, m->acts[l].o, &in->o);
}

/* out [T,H,Dh]: the output o of this rank's tokens through its gate. */
static ith_status gate_out(ith_model *m, ith_ctx *ctx, int64_t l, T o, T *out)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "gated mixer output", m->dtype, o.shape[0],
                           o.shape[1], o.shape[2], out));
    if (!c->layer_is_linear[l])
        return ith_sigmoid_gate_forward(ctx, *out, o, split_attention(c, a->qkv).gate);
    return ith_gated_rmsnorm_forward(ctx, *out, o, split_linear(c, a->qkv).z,
                                     ith_layer_param(m, l, ITH_P_GDN_NORM)->w,
                                     (float)c->rms_norm_eps);
}

/* out [T,D] = the mixer's contribution to the stream. */
static ith_status project_out(ith_model *m, ith_ctx *ctx, int64_t l, T o, T *out)
{
    T gated;
    ITH_TRY(push(ctx, "mixer output", m->dtype, o.shape[0], m->config->hidden_size, out));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(gate_out(m, ctx, l, o, &gated));
    ITH_TRY(ith_linear_forward(ctx, *out, ith_heads_2d(gated), ith_layer_param(m, l, ITH_P_O)->w,
                               false));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* ---- experts with a shared one ---- */

static ith_status push_experts(ith_model *m, ith_ctx *ctx, ith_mem_class where, ith_layer_acts *a,
                               int64_t t)
{
    const ith_hf_config *c = m->config;
    ITH_TRY(ith_block_push_experts(m, ctx, where, a, t));
    ITH_TRY(ith_ctx_push(ctx, where, "shared expert gate and up", m->dtype, 2, t,
                         2 * c->shared_expert_intermediate_size, 1, 1, &a->shared_gate_up));
    ITH_TRY(ith_ctx_push(ctx, where, "shared expert output", m->dtype, 2, t, c->hidden_size, 1, 1,
                         &a->shared_out));
    return ith_ctx_push(ctx, where, "shared expert gate", m->dtype, 2, t, 1, 1, 1, &a->shared_gate);
}

/* Both kinds of experts from n2, up to their outputs. */
static ith_status experts_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T n2,
                                  bool count_load)
{
    ith_layer_acts *a = &m->acts[l];
    T h;
    ITH_TRY(ith_block_experts_forward(m, ctx, b, l, n2, count_load));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(push(ctx, "mlp hidden", m->dtype, n2.shape[0],
                 m->config->shared_expert_intermediate_size, &h));
    ITH_TRY(ith_linear_forward(ctx, a->shared_gate_up, n2,
                               ith_layer_param(m, l, ITH_P_SHARED_GATE_UP)->w, false));
    ITH_TRY(ith_swiglu_forward(ctx, h, a->shared_gate_up));
    ITH_TRY(ith_linear_forward(ctx, a->shared_out, h, ith_layer_param(m, l, ITH_P_SHARED_DOWN)->w,
                               false));
    ITH_TRY(ith_linear_forward(ctx, a->shared_gate, n2, ith_layer_param(m, l, ITH_P_SHARED_GATE)->w,
                               false));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dn2 += what comes through the shared expert; dy: gradient of the layer's output. */
static ith_status shared_backward(ith_model *m, ith_ctx *ctx, int64_t l, T dn2, T dy, T n2)
{
    ith_layer_acts *a = &m->acts[l];
    const ith_param *up = ith_layer_param(m, l, ITH_P_SHARED_GATE_UP);
    const ith_param *down = ith_layer_param(m, l, ITH_P_SHARED_DOWN);
    const ith_param *gate = ith_layer_param(m, l, ITH_P_SHARED_GATE);
    int64_t t = n2.shape[0], width = m->config->shared_expert_intermediate_size;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T dgate, dh, h, dout = a->shared_out, dgate_up = a->shared_gate_up; /* in place */
    ITH_TRY(push(ctx, "shared expert gate", m->dtype, t, 1, &dgate));
    ITH_TRY(ith_row_gate_backward(ctx, dout, dgate, dy, a->shared_out, a->shared_gate));
    ITH_TRY(ith_linear_backward_weight(ctx, gate->grad, dgate, n2));
    ITH_TRY(ith_linear_backward_input(ctx, dn2, dgate, gate->w, true));
    ITH_TRY(push(ctx, "mlp hidden gradient", m->dtype, t, width, &dh));
    ITH_TRY(push(ctx, "mlp hidden", m->dtype, t, width, &h));
    ITH_TRY(ith_linear_backward_input(ctx, dh, dout, down->w, false));
    ITH_TRY(ith_swiglu_backward(ctx, dgate_up, h, dh, a->shared_gate_up));
    ITH_TRY(ith_linear_backward_weight(ctx, down->grad, dout, h));
    ITH_TRY(ith_linear_backward_weight(ctx, up->grad, dgate_up, n2));
    ITH_TRY(ith_linear_backward_input(ctx, dn2, dgate_up, up->w, true));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* x2 = x + mixed and delta = FFN(norm(x2)). */
static ith_status ffn_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T mixed)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    if (!c->layer_is_moe[l])
        return ith_block_mlp_forward(m, ctx, b, l, mixed);
    T n2, rstd2;
    int64_t t = b->num_tokens, mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(push(ctx, "norm output", m->dtype, t, c->hidden_size, &n2));
    ITH_TRY(push_rows(ctx, "norm statistics", t, &rstd2));
    ITH_TRY(ith_rmsnorm_forward(ctx, n2, a->x2, rstd2, mixed, a->x,
                                ith_layer_param(m, l, ITH_P_POST_NORM)->w, (float)c->rms_norm_eps,
                                m->norm_offset));
    if (!a->gate_up.ndim)
        ITH_TRY(push_experts(m, ctx, ITH_MEM_WORKSPACE, a, t));
    ITH_TRY(experts_forward(m, ctx, b, l, n2, m->expert_fraction.ndim != 0));
    ITH_TRY(
        ith_expert_combine(ctx, m->delta, ith_tensor_none(), a->expert_out, a->topk_w, a->row_of));
    ITH_TRY(ith_row_gate_forward(ctx, m->delta, m->delta, a->shared_out, a->shared_gate));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dx: in, the gradient of the layer's output; out, that of x2. */
static ith_status ffn_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    if (!c->layer_is_moe[l])
        return ith_block_mlp_backward(m, ctx, b, l, dx);
    const ith_param *norm = ith_layer_param(m, l, ITH_P_POST_NORM);
    T n2, rstd2, dn2, none = ith_tensor_none();
    int64_t t = b->num_tokens, mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(push(ctx, "norm output", m->dtype, t, c->hidden_size, &n2));
    ITH_TRY(push_rows(ctx, "norm statistics", t, &rstd2));
    ITH_TRY(ith_rmsnorm_forward(ctx, n2, none, rstd2, a->x2, none, norm->w, (float)c->rms_norm_eps,
                                m->norm_offset));
    ITH_TRY(push(ctx, "norm output gradient", m->dtype, t, c->hidden_size, &dn2));
    if (!a->gate_up.ndim) {
        ITH_TRY(push_experts(m, ctx, ITH_MEM_WORKSPACE, a, t));
        ITH_TRY(experts_forward(m, ctx, b, l, n2, false));
    }
    ITH_TRY(ith_block_experts_backward(m, ctx, b, l, dn2, dx, n2));
    ITH_TRY(shared_backward(m, ctx, l, dn2, dx, n2));
    ITH_TRY(
        ith_rmsnorm_backward(ctx, dx, norm->grad, dn2, dx, a->x2, rstd2, norm->w, m->norm_offset));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* ---- forward ---- */

/* Pushes what layer l keeps; see qwen3.c. */
static ith_status push_saved(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             bool training)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens, d = c->hidden_size;
    ith_keep keep = training ? m->keep[l] : ITH_KEEP_INPUT;
    const ith_mem_class kept = ITH_MEM_ACTIVATIONS;
    *a = (ith_layer_acts){.mark = ith_plan_mark(ctx->plan, kept),
                          .host_mark = ith_plan_mark(ctx->plan, ITH_MEM_HOST),
                          .x = m->stream,
                          .x2 = m->stream};
    if (training && keep == ITH_KEEP_HOST) {
        ITH_TRY(ith_offload_stage(m, ctx, l));
    } else if (training) {
        ITH_TRY(ith_ctx_push(ctx, kept, "layer input", m->dtype, 2, t, d, 1, 1, &a->x));
    }
    if (keep <= ITH_KEEP_ATTENTION)
        ITH_TRY(push_mixer_out(m, ctx, kept, l, b->group_tokens, t));
    if (training && m->passes_states && c->layer_is_linear[l])
        ITH_TRY(push_states(m, ctx, kept, a));
    if (keep != ITH_KEEP_ALL)
        return ITH_OK;
    ITH_TRY(push_projection(m, ctx, kept, l, t, &a->qkv));
    ITH_TRY(ith_ctx_push(ctx, kept, "middle residual", m->dtype, 2, t, d, 1, 1, &a->x2));
    if (c->layer_is_moe[l])
        return push_experts(m, ctx, kept, a, t);
    return ith_ctx_push(ctx, kept, "gate and up", m->dtype, 2, t, 2 * c->intermediate_size, 1, 1,
                        &a->gate_up);
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

static ith_status layer_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                bool training)
{
    ith_layer_acts *a = &m->acts[l];
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T mixed, none = ith_tensor_none();
    mixer_in in = {0};
    ITH_TRY(ith_model_gather_layer(m, ctx, l));
    ITH_TRY(push_saved(m, ctx, b, l, training));
    ITH_TRY(make_in(m, ctx, b, l, true, none, &in));
    if (!a->o.ndim)
        ITH_TRY(push_mixer_out(m, ctx, ITH_MEM_WORKSPACE, l, b->group_tokens, b->num_tokens));
    ITH_TRY(mix(m, ctx, b, l, none, &in));
    ITH_TRY(output_to_tokens(m, ctx, b, l, &in));
    ITH_TRY(project_out(m, ctx, l, in.o, &mixed));
    ITH_TRY(ffn_forward(m, ctx, b, l, mixed));
    ITH_TRY(ith_offload_save(m, ctx, l));
    m->residual = a->x2;
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    forget_unsaved(m, l, training);
    return ITH_OK;
}

static ith_status qwen3_5_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training,
                                  T hidden)
{
    ITH_TRY(ith_block_open(m, ctx, b, training));
    if (m->has_vision)
        ITH_TRY(ith_vision_forward(m, ctx, b, training));
    for (int64_t l = 0; l < m->config->num_hidden_layers; l++)
        ITH_WRAP(layer_forward(m, ctx, b, l, training), ctx->err, "layer %lld", (long long)l);
    ITH_TRY(ith_block_sum_balance(m, ctx));
    return ith_add(ctx, hidden, m->residual, m->delta);
}

/* ---- backward ---- */

/* The mixer's inputs, o and x2 again when the layer kept less; *have_in: `in` is filled. */
static ith_status remake_mixer(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               mixer_in *in, bool *have_in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens;
    T mixed, rstd2, none = ith_tensor_none();
    *have_in = !a->x2.ndim;
    if (a->x2.ndim)
        return ITH_OK;
    ITH_TRY(make_in(m, ctx, b, l, false, none, in));
    if (!a->o.ndim) {
        ITH_TRY(push_mixer_out(m, ctx, ITH_MEM_WORKSPACE, l, b->group_tokens, t));
        ITH_TRY(mix(m, ctx, b, l, none, in));
    }
    ITH_TRY(output_to_tokens(m, ctx, b, l, in));
    ITH_TRY(push(ctx, "middle residual", m->dtype, t, c->hidden_size, &a->x2));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(project_out(m, ctx, l, in->o, &mixed));
    ITH_TRY(push_rows(ctx, "norm statistics", t, &rstd2));
    ITH_TRY(ith_rmsnorm_forward(ctx, none, a->x2, rstd2, mixed, a->x,
                                ith_layer_param(m, l, ITH_P_POST_NORM)->w, (float)c->rms_norm_eps,
                                m->norm_offset));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dproj: gradient of the projection, from do_ = gradient of the gated output (overwritten). */
static ith_status attention_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     const mixer_in *in, T do_, T dproj)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    const ith_param *qn = ith_layer_param(m, l, ITH_P_Q_NORM),
                    *kn = ith_layer_param(m, l, ITH_P_K_NORM);
    attention_views s = split_attention(c, a->qkv), ds = split_attention(c, dproj);
    ith_qkv dtokens = {ds.q, ds.k, ds.v}, dheads;
    T do_heads;
    if (ith_cp_size(m->mesh) > 1) /* packed: the gates lie between the heads of ds.q */
        ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "q gradient", m->dtype, ds.q.shape[0],
                               ds.q.shape[1], c->head_dim, &dtokens.q));
    ITH_TRY(ith_sigmoid_gate_backward(ctx, do_, ds.gate, do_, in->o, s.gate));
    ITH_TRY(ith_ulysses_to_tokens_backward(m->mesh, ctx, b->group_tokens, c->num_key_value_heads,
                                           do_, &do_heads));
    ITH_TRY(ith_ulysses_push_gradient(m->mesh, ctx, b->group_tokens, dtokens, &dheads));
    ITH_TRY(ith_ring_attention_backward(m->mesh, ctx, b->group_tokens, dheads, do_heads, in->heads,
                                        a->o, a->lse, b->seqs, ith_score_scale(c->head_dim), true));
    ITH_TRY(ith_ulysses_to_heads_backward(m->mesh, ctx, b->group_tokens, dtokens, dheads));
    return ith_qk_norm_rope_backward(ctx, ds.q, ds.k, qn->grad, kn->grad, dtokens.q, ds.k, s.q, s.k,
                                     in->q_rstd, in->k_rstd, qn->w, kn->w, m->rope_cos, m->rope_sin,
                                     b->position_ids, m->norm_offset);
}

static ith_status linear_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  const mixer_in *in, T do_, T dproj)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    const ith_param *norm = ith_layer_param(m, l, ITH_P_GDN_NORM),
                    *conv = ith_layer_param(m, l, ITH_P_CONV),
                    *a_log = ith_layer_param(m, l, ITH_P_A_LOG),
                    *dt_bias = ith_layer_param(m, l, ITH_P_DT_BIAS);
    ith_head_share share = delta_share(m);
    channels part[3];
    int count = conv_channels(c, &share, part);
    int64_t n = in->conv.shape[0], rows = in->g.shape[0], first = share.q_first,
            heads = share.q_count;
    T dconv, none = ith_tensor_none();
    linear_views s = split_linear(c, a->qkv), ds = split_linear(c, dproj), d = ds;
    ith_head_parts to = delta_parts(c, &ds), from;
    ITH_TRY(ith_gated_rmsnorm_backward(ctx, do_, ds.z, norm->grad, do_, a->o, s.z, norm->w,
                                       (float)c->rms_norm_eps));
    if (m->passes_states) {
        d.u = with_halo(ds.u, b->slice.halo);
    } else {
        ITH_TRY(ith_ulysses_to_tokens_backward(linear_mesh(m), ctx, b->group_tokens,
                                               c->linear_num_key_heads, do_, &do_));
        ITH_TRY(ith_ulysses_push_parts_gradient(linear_mesh(m), ctx, b->group_tokens, &to, &from));
        d = delta_arrived(&from);
    }
    ith_delta_gradient dx;
    ITH_TRY(push(ctx, "convolution gradient", m->dtype, n, share_width(c, &share), &dconv));
    ITH_TRY(push(ctx, "decay and beta", ITH_F32, rows, heads, &dx.dg));
    ITH_TRY(push(ctx, "decay and beta", ITH_F32, rows, heads, &dx.dbeta));
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
                                   part_of(dt_bias->grad, first, heads), dx.dg, dx.dbeta,
                                   in->delta.a, in->delta.b, part_of(a_log->w, first, heads),
                                   part_of(dt_bias->w, first, heads)));
    for (int i = 0; i < count; i++) {
        int64_t c0 = part[i].column, c1 = c0 + part[i].count;
        ITH_TRY(ith_conv1d_silu_backward(
            ctx, ith_col_range(d.u, c0, c1), part_of(conv->grad, part[i].first, part[i].count),
            ith_col_range(dconv, c0, c1), ith_col_range(in->delta.u, c0, c1),
            part_of(conv->w, part[i].first, part[i].count),
            m->passes_states ? b->slice.conv : b->seqs));
    }
    if (m->passes_states)
        return ith_slice_halo_backward(m->mesh, ctx, &b->slice, c->linear_conv_kernel_dim, b->seqs,
                                       d.u);
    return ith_ulysses_parts_to_heads_backward(linear_mesh(m), ctx, b->group_tokens, &to, &from);
}

/* dx: in, the gradient of x2; out, that of x. */
static ith_status mixer_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                 mixer_in *in, bool have_in, T dx)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    const ith_param *wo = ith_layer_param(m, l, ITH_P_O), *win = ith_layer_param(m, l, ITH_P_QKV);
    const ith_param *norm = ith_layer_param(m, l, ITH_P_INPUT_NORM);
    T gated, do_, dproj;
    if (!have_in)
        ITH_TRY(make_in(m, ctx, b, l, false, ith_tensor_none(), in));
    if (!in->o.ndim)
        ITH_TRY(output_to_tokens(m, ctx, b, l, in));
    ITH_TRY(gate_out(m, ctx, l, in->o, &gated));
    ITH_TRY(ith_linear_backward_weight(ctx, wo->grad, dx, ith_heads_2d(gated)));
    do_ = gated; /* read for the last time */
    ITH_TRY(ith_linear_backward_input(ctx, ith_heads_2d(do_), dx, wo->w, false));
    ITH_TRY(push_projection(m, ctx, ITH_MEM_WORKSPACE, l, b->num_tokens, &dproj));
    ITH_TRY(c->layer_is_linear[l] ? linear_backward(m, ctx, b, l, in, do_, dproj)
                                  : attention_backward(m, ctx, b, l, in, do_, dproj));
    ITH_TRY(ith_linear_backward_weight(ctx, win->grad, dproj, in->n1));
    T dn1 = in->n1; /* likewise */
    ITH_TRY(ith_linear_backward_input(ctx, dn1, dproj, win->w, false));
    return ith_rmsnorm_backward(ctx, dx, norm->grad, dn1, dx, a->x, in->rstd1, norm->w,
                                m->norm_offset);
}

static ith_status layer_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    mixer_in in = {0};
    bool have_in = false;
    ITH_TRY(ith_offload_fetch(m, ctx, l));
    ITH_TRY(ith_model_gather_layer(m, ctx, l));
    ITH_TRY(ith_model_open_grads(m, ctx, l));
    ITH_TRY(remake_mixer(m, ctx, b, l, &in, &have_in));
    ITH_TRY(ffn_backward(m, ctx, b, l, dx));
    ITH_TRY(mixer_backward(m, ctx, b, l, &in, have_in, dx));
    ITH_TRY(ith_model_close_grads(m, ctx, l));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    ith_plan_release(ctx->plan, ITH_MEM_HOST, m->acts[l].host_mark);
    ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, m->acts[l].mark);
    return ITH_OK;
}

static ith_status qwen3_5_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, T dhidden)
{
    for (int64_t l = m->config->num_hidden_layers - 1; l >= 0; l--)
        ITH_WRAP(layer_backward(m, ctx, b, l, dhidden), ctx->err, "layer %lld backward",
                 (long long)l);
    if (m->has_vision)
        ITH_TRY(ith_vision_backward(m, ctx, b, dhidden));
    return ith_embedding_backward(ctx, m->params[m->embed].grad, dhidden, b->ids);
}

/* ---- decode ---- */

/* Number of layers below l of the same kind. */
static int64_t index_of_kind(const ith_hf_config *c, int64_t l)
{
    int64_t n = 0;
    for (int64_t i = 0; i < l; i++)
        n += c->layer_is_linear[i] == c->layer_is_linear[l];
    return n;
}

/* Keys or values of attention layer `idx`: [B, C, Hkv, Dh]. */
static T cache_layer(const ith_kv_cache *cache, T all, int64_t idx)
{
    T t = ith_row_range(all, idx, idx + 1);
    return ith_tensor_4d(t.data, t.dtype, 4, cache->batch, cache->capacity, t.shape[2], t.shape[3]);
}

static T cache_rows(T t)
{
    return ith_tensor_2d(t.data, t.dtype, t.shape[0] * t.shape[1], t.shape[2] * t.shape[3]);
}

static ith_status attention_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                   const ith_kv_cache *cache, T rows, bool prefill,
                                   const mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t idx = index_of_kind(c, l), first_v = attention_width(c) - in->k.shape[1] * c->head_dim;
    T k = cache_layer(cache, cache->k, idx), v = cache_layer(cache, cache->v, idx);
    ITH_TRY(ith_scatter_rows(ctx, cache_rows(k), ith_heads_2d(in->k), rows));
    ITH_TRY(ith_scatter_rows(ctx, cache_rows(v), ith_col_range(a->qkv, first_v, attention_width(c)),
                             rows));
    if (prefill)
        return mix(m, ctx, b, l, ith_tensor_none(), in);
    ith_cache_parts part;
    ITH_TRY(ith_cache_parts_open(cache->mesh, ctx, a->o, &part));
    ITH_TRY(ith_attention_decode(ctx, part.o, part.lse, in->q, k, v, cache->lengths,
                                 ith_score_scale(c->head_dim)));
    return ith_cache_parts_close(cache->mesh, ctx, a->o, &part);
}

/* A linear layer of a slice: this rank has the state of its heads and the inputs of its tokens, and
 * all get all. `at`: the sequence in the cache. */
static ith_status linear_prefill_cut(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     const ith_kv_cache *cache, int64_t at, const mixer_in *in)
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
                                      split_linear(c, m->acts[l].qkv).u));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

static ith_status layer_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               ith_kv_cache *cache, T rows, bool prefill)
{
    const ith_hf_config *c = m->config;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE), first = 0;
    bool cut = ith_cp_size(m->mesh) > 1;
    T mixed, history = ith_tensor_none(), state = ith_tensor_none();
    mixer_in in = {0};
    if (c->layer_is_linear[l])
        first = index_of_kind(c, l) * cache->batch;
    if (c->layer_is_linear[l] && !cut) {
        history = ith_row_range(cache->conv, first, first + cache->batch);
        state = ith_row_range(cache->state, first, first + cache->batch);
    }
    ITH_TRY(ith_model_gather_layer(m, ctx, l));
    ITH_TRY(push_saved(m, ctx, b, l, false));
    ITH_TRY(make_in(m, ctx, b, l, true, history, &in));
    ITH_TRY(push_mixer_out(m, ctx, ITH_MEM_WORKSPACE, l, b->group_tokens, b->num_tokens));
    if (!c->layer_is_linear[l])
        ITH_TRY(attention_decode(m, ctx, b, l, cache, rows, prefill, &in));
    else if (cut)
        ITH_TRY(linear_prefill_cut(m, ctx, b, l, cache, first + cache->first, &in));
    else
        ITH_TRY(mix(m, ctx, b, l, state, &in));
    ITH_TRY(output_to_tokens(m, ctx, b, l, &in));
    ITH_TRY(project_out(m, ctx, l, in.o, &mixed));
    ITH_TRY(ffn_forward(m, ctx, b, l, mixed));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    forget_unsaved(m, l, false);
    return ITH_OK;
}

static ith_status qwen3_5_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b,
                                 ith_kv_cache *cache, T rows, bool prefill, T hidden)
{
    ITH_TRY(ith_block_open(m, ctx, b, false));
    if (m->has_vision)
        ITH_TRY(ith_vision_forward(m, ctx, b, false));
    if (prefill && cache->state.ndim && ith_cp_size(m->mesh) == 1) {
        ITH_TRY(ith_zero(ctx, cache->conv));
        ITH_TRY(ith_zero(ctx, cache->state));
    }
    for (int64_t l = 0; l < m->config->num_hidden_layers; l++)
        ITH_WRAP(layer_decode(m, ctx, b, l, cache, rows, prefill), ctx->err, "layer %lld",
                 (long long)l);
    return ith_add(ctx, hidden, m->residual, m->delta);
}

const ith_model_family ith_family_qwen3_5 = {ITH_FAMILY_QWEN3_5, qwen3_5_declare, qwen3_5_forward,
                                             qwen3_5_backward, qwen3_5_decode};
