/* qwen3_5.c - Qwen3.5 and Qwen3.5-MoE: parameters, forward, backward in mirrored order, decode.
 *
 * Layer:  x = residual + delta      n1 = norm(x)      x2 = x + mixer(n1)      n2 = norm(x2)
 *         delta = MLP(n2), or experts(n2) + sigmoid(n2 w) * shared(n2)
 * Mixer, full attention:  [q, gate per head | k | v] = n1 Wqkv^T    q', k' = rope(norm_head(q, k))
 *         (attention(q', k', v) * sigmoid(gate)) Wo^T
 * Mixer, Gated DeltaNet:  [u | z | b | a] = n1 Win^T    [q | k | v] = silu(conv(u))
 *         g, beta = gates(a, b)     o = delta_rule(q, k, v, g, beta)     gated_norm(o, z) Wo^T
 *
 * Many ranks: projections and all behind the mixers' cores, the gates of their outputs included,
 * are of a rank's own tokens; attention_block.c and delta_block.c say what of a core is. Slices are
 * contiguous always.
 *
 * Invariants:
 *  1. Convolution and state begin at zero in every document of a packed row.
 *  2. What is made again in backward comes from the same operators on the same inputs: bit-equal to
 *     forward's.
 *  3. Layers that keep less than all make the input projection again before the MLP's backward, for
 *     x2 needs its gates. */
#include "model/delta_block.h"
#include "model/vision.h"

typedef ith_tensor T;

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
                          (const matrix[]){{"linear_attn.in_proj_qkv", ith_delta_conv_width(c)},
                                           {"linear_attn.in_proj_z", ith_delta_value_width(c)},
                                           {"linear_attn.in_proj_b", heads},
                                           {"linear_attn.in_proj_a", heads}},
                          4, c->hidden_size, err));
    int32_t *conv = &m->layer_param[l * ITH_LAYER_PARAMS + ITH_P_CONV];
    const char *name =
        ith_model_text(m, "%slayers.%lld.linear_attn.conv1d.weight", prefix_of(m), (long long)l);
    ITH_TRY(ith_model_add_param(m, name, 2, ith_delta_conv_width(c), taps, 1, conv, err));
    ITH_TRY(
        ith_model_add_piece(m, name, *conv, 0, 3, ith_delta_conv_width(c), 1, taps, false, err));
    ITH_TRY(declare_vector(m, l, ITH_P_DT_BIAS, "linear_attn.dt_bias", heads, ITH_INIT_ONES, err));
    ITH_TRY(declare_vector(m, l, ITH_P_A_LOG, "linear_attn.A_log", heads, ITH_INIT_A_LOG, err));
    ith_model_set_f32(m);
    ITH_TRY(declare_vector(m, l, ITH_P_GDN_NORM, "linear_attn.norm.weight",
                           c->linear_value_head_dim, ITH_INIT_ONES, err));
    ith_model_set_f32(m);
    return declare_stack(m, l, ITH_P_O, "out_proj",
                         (const matrix[]){{"linear_attn.out_proj", c->hidden_size}}, 1,
                         ith_delta_value_width(c), err);
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

/* ---- the mixer ---- */

/* The gate behind each query head, [T,Hq,Dh] of a projection. */
static T query_gate(const ith_hf_config *c, T projection)
{
    T gate = ith_block_split_qkv(c, projection).q;
    gate.data = (char *)gate.data + c->head_dim * ith_dtype_bytes(gate.dtype);
    return gate;
}

/* Projection and what the mixer reads of it. forward: see ith_block_project. */
static ith_status make_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, bool forward,
                          ith_mixer_in *in)
{
    if (!m->config->layer_is_linear[l])
        return ith_block_attention_in(m, ctx, b, l, forward, in);
    ITH_TRY(ith_block_project(m, ctx, b, l, forward, in));
    return ith_delta_mixer_in(m, ctx, b, l, in);
}

/* a->o over whole documents, and in->o. */
static ith_status mix(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, ith_mixer_in *in)
{
    if (!m->config->layer_is_linear[l])
        return ith_block_attend(m, ctx, b, l, in);
    ITH_TRY(ith_delta_mix(m, ctx, b, l, in));
    in->o = m->acts[l].o;
    return ITH_OK;
}

/* in->o from the kept a->o. */
static ith_status output_again(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               ith_mixer_in *in)
{
    if (!m->config->layer_is_linear[l])
        return ith_block_output_again(m, ctx, b, l, in);
    in->o = m->acts[l].o;
    return ITH_OK;
}

/* out [T,H,Dh]: the output o of this rank's tokens through its gate. */
static ith_status gate_out(ith_model *m, ith_ctx *ctx, int64_t l, T o, T *out)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "gated mixer output", m->dtype, o.shape[0],
                           o.shape[1], o.shape[2], out));
    if (!c->layer_is_linear[l])
        return ith_sigmoid_gate_forward(ctx, *out, o, query_gate(c, a->qkv));
    return ith_gated_rmsnorm_forward(ctx, *out, o, ith_delta_split(c, a->qkv).z,
                                     ith_layer_param(m, l, ITH_P_GDN_NORM)->w,
                                     (float)c->rms_norm_eps);
}

/* out [T,D] = the mixer's contribution to the stream. */
static ith_status project_out(ith_model *m, ith_ctx *ctx, int64_t l, T o, T *out)
{
    T gated;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mixer output", m->dtype, o.shape[0],
                     m->config->hidden_size, out));
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
    ITH_TRY(ith_push(ctx, where, "shared expert gate and up", m->dtype, t,
                     2 * c->shared_expert_intermediate_size, &a->shared_gate_up));
    ITH_TRY(
        ith_push(ctx, where, "shared expert output", m->dtype, t, c->hidden_size, &a->shared_out));
    return ith_push(ctx, where, "shared expert gate", m->dtype, t, 1, &a->shared_gate);
}

/* Both kinds of experts from n2, up to their outputs. */
static ith_status experts_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T n2,
                                  bool count_load)
{
    ith_layer_acts *a = &m->acts[l];
    T h;
    ITH_TRY(ith_block_experts_forward(m, ctx, b, l, n2, count_load));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden", m->dtype, n2.shape[0],
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
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "shared expert gate", m->dtype, t, 1, &dgate));
    ITH_TRY(ith_row_gate_backward(ctx, dout, dgate, dy, a->shared_out, a->shared_gate));
    ITH_TRY(ith_linear_backward_weight(ctx, gate->grad, dgate, n2));
    ITH_TRY(ith_linear_backward_input(ctx, dn2, dgate, gate->w, true));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden gradient", m->dtype, t, width, &dh));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden", m->dtype, t, width, &h));
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
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "norm output", m->dtype, t, c->hidden_size, &n2));
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, t, &rstd2));
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
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "norm output", m->dtype, t, c->hidden_size, &n2));
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, t, &rstd2));
    ITH_TRY(ith_rmsnorm_forward(ctx, n2, none, rstd2, a->x2, none, norm->w, (float)c->rms_norm_eps,
                                m->norm_offset));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "norm output gradient", m->dtype, t, c->hidden_size,
                     &dn2));
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

/* Pushes what layer l keeps. */
static ith_status push_saved(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             bool training)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens, d = c->hidden_size;
    ith_keep keep = training ? m->keep[l] : ITH_KEEP_INPUT;
    const ith_mem_class kept = ITH_MEM_ACTIVATIONS;
    ITH_TRY(ith_walk_push_input(m, ctx, b, l, training));
    if (keep <= ITH_KEEP_ATTENTION)
        ITH_TRY(c->layer_is_linear[l]
                    ? ith_delta_push_out(m, ctx, kept, a, t)
                    : ith_block_push_attention_out(m, ctx, kept, a, b->group_tokens));
    if (training && m->passes_states && c->layer_is_linear[l])
        ITH_TRY(ith_delta_push_states(m, ctx, kept, a));
    if (keep != ITH_KEEP_ALL)
        return ITH_OK;
    ITH_TRY(ith_block_push_projection(m, ctx, kept, l, t, &a->qkv));
    ITH_TRY(ith_push(ctx, kept, "middle residual", m->dtype, t, d, &a->x2));
    if (c->layer_is_moe[l])
        return push_experts(m, ctx, kept, a, t);
    return ith_push(ctx, kept, "gate and up", m->dtype, t, 2 * c->intermediate_size, &a->gate_up);
}

static ith_status layer_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                bool training)
{
    T mixed;
    ith_mixer_in in = {0};
    ITH_TRY(push_saved(m, ctx, b, l, training));
    ITH_TRY(make_in(m, ctx, b, l, true, &in));
    ITH_TRY(mix(m, ctx, b, l, &in));
    ITH_TRY(project_out(m, ctx, l, in.o, &mixed));
    return ffn_forward(m, ctx, b, l, mixed);
}

static ith_status qwen3_5_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training,
                                  T hidden)
{
    ITH_TRY(ith_walk_open(m, ctx, b, training));
    ITH_TRY(ith_walk_open_balance(m, ctx, training));
    if (m->has_vision)
        ITH_TRY(ith_vision_forward(m, ctx, b, training));
    ITH_TRY(ith_walk_forward(m, ctx, b, training, layer_forward));
    ITH_TRY(ith_walk_sum_balance(m, ctx));
    return ith_add(ctx, hidden, m->residual, m->delta);
}

/* ---- backward ---- */

/* The mixer's inputs, o and x2 again when the layer kept less. */
static ith_status remake_mixer(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens;
    T mixed, rstd2, none = ith_tensor_none();
    if (a->x2.ndim)
        return ITH_OK;
    ITH_TRY(make_in(m, ctx, b, l, false, in));
    ITH_TRY(a->o.ndim ? output_again(m, ctx, b, l, in) : mix(m, ctx, b, l, in));
    ITH_TRY(
        ith_push(ctx, ITH_MEM_WORKSPACE, "middle residual", m->dtype, t, c->hidden_size, &a->x2));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(project_out(m, ctx, l, in->o, &mixed));
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, t, &rstd2));
    ITH_TRY(ith_rmsnorm_forward(ctx, none, a->x2, rstd2, mixed, a->x,
                                ith_layer_param(m, l, ITH_P_POST_NORM)->w, (float)c->rms_norm_eps,
                                m->norm_offset));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* do_ [T,H,Dh]: in, the gradient of the gated output; out, that of in->o. The gate's goes to dproj,
 * the gradient of the projection. */
static ith_status gate_backward(ith_model *m, ith_ctx *ctx, int64_t l, const ith_mixer_in *in,
                                T do_, T dproj)
{
    const ith_hf_config *c = m->config;
    T proj = m->acts[l].qkv;
    if (!c->layer_is_linear[l])
        return ith_sigmoid_gate_backward(ctx, do_, query_gate(c, dproj), do_, in->o,
                                         query_gate(c, proj));
    const ith_param *norm = ith_layer_param(m, l, ITH_P_GDN_NORM);
    return ith_gated_rmsnorm_backward(ctx, do_, ith_delta_split(c, dproj).z, norm->grad, do_, in->o,
                                      ith_delta_split(c, proj).z, norm->w, (float)c->rms_norm_eps);
}

/* dx: in, the gradient of x2; out, that of x. */
static ith_status mixer_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                 ith_mixer_in *in, T dx)
{
    const ith_param *wo = ith_layer_param(m, l, ITH_P_O);
    T gated, do_, dproj;
    if (!in->n1.ndim)
        ITH_TRY(make_in(m, ctx, b, l, false, in));
    ITH_TRY(output_again(m, ctx, b, l, in));
    ITH_TRY(gate_out(m, ctx, l, in->o, &gated));
    ITH_TRY(ith_linear_backward_weight(ctx, wo->grad, dx, ith_heads_2d(gated)));
    do_ = gated; /* read for the last time */
    ITH_TRY(ith_linear_backward_input(ctx, ith_heads_2d(do_), dx, wo->w, false));
    ITH_TRY(ith_block_push_projection(m, ctx, ITH_MEM_WORKSPACE, l, b->num_tokens, &dproj));
    ITH_TRY(gate_backward(m, ctx, l, in, do_, dproj));
    if (m->config->layer_is_linear[l]) {
        ITH_TRY(ith_delta_mix_backward(m, ctx, b, l, in, do_, dproj));
    } else {
        ITH_TRY(ith_block_output_backward(m, ctx, b, in, do_));
        ITH_TRY(ith_block_attend_backward(m, ctx, b, l, in, dproj));
        ITH_TRY(ith_block_qk_backward(m, ctx, b, l, in, dproj));
    }
    return ith_block_project_backward(m, ctx, l, in, dproj, dx);
}

static ith_status layer_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx)
{
    ith_mixer_in in = {0};
    ITH_TRY(remake_mixer(m, ctx, b, l, &in));
    ITH_TRY(ffn_backward(m, ctx, b, l, dx));
    return mixer_backward(m, ctx, b, l, &in, dx);
}

static ith_status qwen3_5_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, T dhidden)
{
    ITH_TRY(ith_walk_backward(m, ctx, b, dhidden, layer_backward));
    if (m->has_vision)
        ITH_TRY(ith_vision_backward(m, ctx, b, dhidden));
    return ith_embedding_backward(ctx, m->params[m->embed].grad, dhidden, b->ids);
}

/* ---- decode ---- */

static ith_status layer_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               ith_kv_cache *cache, T rows, bool prefill)
{
    T mixed;
    ith_mixer_in in = {0};
    ITH_TRY(push_saved(m, ctx, b, l, false));
    if (m->config->layer_is_linear[l]) {
        ITH_TRY(ith_block_project(m, ctx, b, l, true, &in));
        ITH_TRY(ith_delta_mix_cache(m, ctx, b, l, cache, &in));
        in.o = m->acts[l].o;
    } else {
        ITH_TRY(ith_block_attention_in(m, ctx, b, l, true, &in));
        ITH_TRY(ith_block_attend_cache(m, ctx, b, l, cache, rows, prefill, &in));
    }
    ITH_TRY(project_out(m, ctx, l, in.o, &mixed));
    return ffn_forward(m, ctx, b, l, mixed);
}

static ith_status qwen3_5_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b,
                                 ith_kv_cache *cache, T rows, bool prefill, T hidden)
{
    ITH_TRY(ith_walk_open(m, ctx, b, false));
    if (m->has_vision)
        ITH_TRY(ith_vision_forward(m, ctx, b, false));
    if (prefill && cache->state.ndim && ith_cp_size(m->mesh) == 1) {
        ITH_TRY(ith_zero(ctx, cache->conv));
        ITH_TRY(ith_zero(ctx, cache->state));
    }
    ITH_TRY(ith_walk_decode(m, ctx, b, cache, rows, prefill, layer_decode));
    return ith_add(ctx, hidden, m->residual, m->delta);
}

const ith_model_family ith_family_qwen3_5 = {ITH_FAMILY_QWEN3_5, qwen3_5_declare, qwen3_5_forward,
                                             qwen3_5_backward, qwen3_5_decode};
