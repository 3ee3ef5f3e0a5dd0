/* qwen3.c - Qwen3 and Qwen3-MoE: parameters, forward, backward below it in mirrored order, decode.
 *
 * Layer:  x = residual + delta
 *         n1 = norm(x)      qkv = n1 Wqkv^T      q', k' = rope(norm_head(q, k))
 *         o = attention(q', k', v)               x2 = x + o Wo^T
 *         n2 = norm(x2)     delta = MLP(n2) or experts(n2)      residual = x2
 *
 * The stream between layers is a pair (residual, delta): the next norm adds them, so no pass over
 * memory only adds.
 *
 * Invariants:
 *  1. Tensors saved by forward are ITH_MEM_ACTIVATIONS in layer order, backward releases them in
 *     reverse.
 *  2. What is made again in backward comes from the same operators on the same inputs: bit-equal
 *     to forward's.
 *  3. A dense MLP runs in tiles of mlp_tile rows, forward and backward, so its width never meets
 *     all rows at once. */
#include "model/blocks.h"

typedef ith_tensor T;

/* ---- parameters ---- */

static ith_status declare_norm(ith_model *m, const char *ours, const char *hf, int64_t width,
                               int32_t *out, ith_error *err)
{
    ITH_TRY(ith_model_add_param(m, ours, 1, width, 1, 1, out, err));
    return ith_model_add_piece(m, hf, *out, 0, 1, width, 1, 1, true, err);
}

/* One parameter made of `count` Hugging Face matrices stacked by rows. */
static ith_status declare_stack(ith_model *m, const char *ours, const char *prefix, int64_t layer,
                                const char *const *names, const int64_t *rows, int count,
                                int64_t cols, int32_t *out, ith_error *err)
{
    int64_t all_rows = 0;
    for (int i = 0; i < count; i++)
        all_rows += rows[i];
    ITH_TRY(ith_model_add_param(m, ours, 2, all_rows, cols, 1, out, err));
    int64_t first = 0;
    for (int i = 0; i < count; i++) {
        const char *hf =
            ith_model_text(m, "model.layers.%lld.%s.%s.weight", (long long)layer, prefix, names[i]);
        ITH_TRY(ith_model_add_piece(m, hf, *out, first, 2, rows[i], cols, 1, false, err));
        first += rows[i] * cols;
    }
    return ITH_OK;
}

static ith_status declare_experts(ith_model *m, int64_t l, int32_t *p, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t d = c->hidden_size, e = c->num_experts;
    long long n = (long long)l;
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.router", n), 2, e, d, 1,
                                &p[ITH_P_ROUTER], err));
    ITH_TRY(ith_model_add_piece(m, ith_model_text(m, "model.layers.%lld.mlp.gate.weight", n),
                                p[ITH_P_ROUTER], 0, 2, e, d, 1, false, err));
    return ith_block_declare_experts(m, l, err);
}

static ith_status declare_layer(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int32_t *p = m->layer_param + l * ITH_LAYER_PARAMS;
    int64_t d = c->hidden_size, q = c->num_attention_heads * c->head_dim,
            kv = c->num_key_value_heads * c->head_dim;
    long long n = (long long)l;
    static const char *const qkv_names[] = {"q_proj", "k_proj", "v_proj"}, *const o_names[] = {
                                                                               "o_proj"};
    static const char *const mlp_names[] = {"gate_proj", "up_proj"}, *const down_names[] = {
                                                                         "down_proj"};
    ITH_TRY(declare_norm(m, ith_model_text(m, "layers.%lld.input_norm", n),
                         ith_model_text(m, "model.layers.%lld.input_layernorm.weight", n), d,
                         &p[ITH_P_INPUT_NORM], err));
    ITH_TRY(declare_stack(m, ith_model_text(m, "layers.%lld.qkv", n), "self_attn", l, qkv_names,
                          (const int64_t[]){q, kv, kv}, 3, d, &p[ITH_P_QKV], err));
    ITH_TRY(declare_norm(m, ith_model_text(m, "layers.%lld.q_norm", n),
                         ith_model_text(m, "model.layers.%lld.self_attn.q_norm.weight", n),
                         c->head_dim, &p[ITH_P_Q_NORM], err));
    ITH_TRY(declare_norm(m, ith_model_text(m, "layers.%lld.k_norm", n),
                         ith_model_text(m, "model.layers.%lld.self_attn.k_norm.weight", n),
                         c->head_dim, &p[ITH_P_K_NORM], err));
    ITH_TRY(declare_stack(m, ith_model_text(m, "layers.%lld.o", n), "self_attn", l, o_names, &d, 1,
                          q, &p[ITH_P_O], err));
    ITH_TRY(declare_norm(m, ith_model_text(m, "layers.%lld.post_norm", n),
                         ith_model_text(m, "model.layers.%lld.post_attention_layernorm.weight", n),
                         d, &p[ITH_P_POST_NORM], err));
    if (c->layer_is_moe[l])
        return declare_experts(m, l, p, err);
    int64_t i = c->intermediate_size;
    ITH_TRY(declare_stack(m, ith_model_text(m, "layers.%lld.gate_up", n), "mlp", l, mlp_names,
                          (const int64_t[]){i, i}, 2, d, &p[ITH_P_GATE_UP], err));
    return declare_stack(m, ith_model_text(m, "layers.%lld.down", n), "mlp", l, down_names, &d, 1,
                         i, &p[ITH_P_DOWN], err);
}

static ith_status qwen3_declare(ith_model *m, ith_error *err)
{
    const ith_hf_config *c = m->config;
    ITH_TRY(ith_model_add_param(m, "embed_tokens", 2, c->vocab_size, c->hidden_size, 1, &m->embed,
                                err));
    ITH_TRY(ith_model_add_piece(m, "model.embed_tokens.weight", m->embed, 0, 2, c->vocab_size,
                                c->hidden_size, 1, false, err));
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        ITH_TRY(declare_layer(m, l, err));
    ITH_TRY(declare_norm(m, "norm", "model.norm.weight", c->hidden_size, &m->final_norm, err));
    m->head = m->embed;
    if (c->tie_word_embeddings)
        return ITH_OK;
    ITH_TRY(ith_model_add_param(m, "lm_head", 2, c->vocab_size, c->hidden_size, 1, &m->head, err));
    return ith_model_add_piece(m, "lm_head.weight", m->head, 0, 2, c->vocab_size, c->hidden_size, 1,
                               false, err);
}

/* ---- what both directions share ---- */

static ith_status push_norm(ith_ctx *ctx, ith_mem_class where, ith_dtype dtype, int64_t t,
                            int64_t d, T *n, T *rstd)
{
    ITH_TRY(ith_push(ctx, where, "norm output", dtype, t, d, n));
    return ith_ctx_push(ctx, where, "norm statistics", ITH_F32, 1, t, 1, 1, 1, rstd);
}

/* ---- experts ---- */

/* Saved or made-again tensors of an expert layer on class `where`. */
static ith_status push_experts(ith_model *m, ith_ctx *ctx, ith_mem_class where, ith_layer_acts *a,
                               int64_t t)
{
    const ith_hf_config *c = m->config;
    int64_t e = c->num_experts, k = c->num_experts_per_tok, s = t * k;
    ITH_TRY(ith_push(ctx, where, "router", ITH_F32, t, e, &a->probs));
    ITH_TRY(ith_push(ctx, where, "router", ITH_F32, t, k, &a->topk_w));
    ITH_TRY(ith_push(ctx, where, "router", ITH_I32, t, k, &a->topk_idx));
    ITH_TRY(ith_ctx_push(ctx, where, "router", ITH_I32, 1, e + 1, 1, 1, 1, &a->offsets));
    ITH_TRY(ith_ctx_push(ctx, where, "router", ITH_I32, 1, s, 1, 1, 1, &a->source));
    ITH_TRY(ith_push(ctx, where, "router", ITH_I32, t, k, &a->row_of));
    return ith_block_push_expert_rows(m, ctx, where, a, s);
}

/* Everything of an expert layer from n2: routing, gate_up, expert_out. */
static ith_status experts_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T n2,
                                  bool count_load)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = n2.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T logits;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "router", m->dtype, t, c->num_experts, &logits));
    ITH_TRY(ith_linear_forward(ctx, logits, n2, ith_layer_param(m, l, ITH_P_ROUTER)->w, false));
    ITH_TRY(ith_router_forward(ctx, a->topk_w, a->topk_idx, a->probs, logits, c->norm_topk_prob));
    ITH_TRY(ith_expert_sort(ctx, a->offsets, a->source, a->row_of, a->topk_idx));
    if (count_load)
        ITH_TRY(ith_expert_load(
            ctx, m->expert_fraction, m->expert_mean_prob, a->offsets, a->probs,
            1.0f / (float)(ith_num_moe_layers(c) * ith_max_i64(b->group_tokens, 1))));
    ITH_TRY(ith_block_expert_mlp_forward(m, ctx, l, n2));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dn2 = gradient of the expert layer's input; dy = gradient of its output. */
static ith_status experts_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dn2,
                                   T dy, T n2)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    const ith_param *router = ith_layer_param(m, l, ITH_P_ROUTER);
    int64_t t = dy.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T dtopk, dlogits;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "router", ITH_F32, t, c->num_experts_per_tok, &dtopk));
    T dout = a->expert_out; /* in place */
    ITH_TRY(ith_expert_combine_backward(ctx, dout, dtopk, dy, a->expert_out, a->topk_w, a->row_of));
    ITH_TRY(ith_block_expert_mlp_backward(m, ctx, l, dn2, n2));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "router", m->dtype, t, c->num_experts, &dlogits));
    float aux_scale = m->aux_coef * b->share * (float)c->num_experts /
                      (float)(ith_num_moe_layers(c) * ith_max_i64(b->group_tokens, 1));
    ITH_TRY(ith_router_backward(ctx, dlogits, dtopk, a->topk_w, a->topk_idx, a->probs,
                                m->expert_fraction, aux_scale, c->norm_topk_prob));
    ITH_TRY(ith_linear_backward_weight(ctx, router->grad, dlogits, n2));
    ITH_TRY(ith_linear_backward_input(ctx, dn2, dlogits, router->w, true));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* ---- forward ---- */

static int64_t mlp_tile(const ith_model *m, int64_t l, int64_t t)
{
    return m->config->layer_is_moe[l] || m->mlp_tile <= 0 || m->mlp_tile > t ? ith_max_i64(t, 1)
                                                                             : m->mlp_tile;
}

/* Rows [r0, r1) of n2 = norm(x2): of the kept one, else in the workspace. */
static ith_status rows_of_n2(ith_model *m, ith_ctx *ctx, int64_t l, int64_t r0, int64_t r1, T *n2,
                             T *rstd2)
{
    const ith_layer_acts *a = &m->acts[l];
    if (!a->n2.ndim)
        return push_norm(ctx, ITH_MEM_WORKSPACE, m->dtype, r1 - r0, m->config->hidden_size, n2,
                         rstd2);
    *n2 = ith_row_range(a->n2, r0, r1);
    *rstd2 = ith_row_range(a->rstd2, r0, r1);
    return ITH_OK;
}

/* x2 = x + o_out and delta = MLP(norm(x2)), tile by tile. Experts run without tokens too: they are
 * other ranks'. */
static ith_status mlp_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T o_out)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    bool moe = c->layer_is_moe[l];
    int64_t t = b->num_tokens, tile = mlp_tile(m, l, t),
            mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T saved_gate_up = a->gate_up;
    for (int64_t r0 = 0; r0 < t || (moe && r0 == 0); r0 += tile) {
        int64_t r1 = ith_min_i64(r0 + tile, t);
        T n2, rstd2, h,
            gate_up =
                saved_gate_up.ndim && !moe ? ith_row_range(saved_gate_up, r0, r1) : saved_gate_up;
        ITH_TRY(rows_of_n2(m, ctx, l, r0, r1, &n2, &rstd2));
        ITH_TRY(ith_rmsnorm_forward(ctx, n2, ith_row_range(a->x2, r0, r1), rstd2,
                                    ith_row_range(o_out, r0, r1), ith_row_range(a->x, r0, r1),
                                    ith_layer_param(m, l, ITH_P_POST_NORM)->w,
                                    (float)c->rms_norm_eps, m->norm_offset));
        T delta = ith_row_range(m->delta, r0, r1);
        if (moe) {
            if (!a->gate_up.ndim)
                ITH_TRY(push_experts(m, ctx, ITH_MEM_WORKSPACE, a, t));
            ITH_TRY(experts_forward(m, ctx, b, l, n2, m->expert_fraction.ndim != 0));
            ITH_TRY(ith_expert_combine(ctx, delta, ith_tensor_none(), a->expert_out, a->topk_w,
                                       a->row_of));
        } else {
            if (!gate_up.ndim)
                ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "gate and up", m->dtype, r1 - r0,
                                 2 * c->intermediate_size, &gate_up));
            ITH_TRY(ith_linear_forward(ctx, gate_up, n2, ith_layer_param(m, l, ITH_P_GATE_UP)->w,
                                       false));
            ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden", m->dtype, r1 - r0,
                             c->intermediate_size, &h));
            ITH_TRY(ith_swiglu_forward(ctx, h, gate_up));
            ITH_TRY(ith_linear_forward(ctx, delta, h, ith_layer_param(m, l, ITH_P_DOWN)->w, false));
        }
        ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    }
    return ITH_OK;
}

/* Pushes what layer l keeps. */
static ith_status push_saved(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             bool training)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens;
    ith_keep keep = training ? m->keep[l] : ITH_KEEP_INPUT;
    ITH_TRY(ith_walk_push_input(m, ctx, b, l, training));
    if (keep <= ITH_KEEP_ATTENTION)
        ITH_TRY(ith_block_push_attention_out(m, ctx, ITH_MEM_ACTIVATIONS, a, b->group_tokens));
    if (keep == ITH_KEEP_ALL) {
        ITH_TRY(ith_block_push_projection(m, ctx, ITH_MEM_ACTIVATIONS, l, t, &a->qkv));
        ITH_TRY(ith_push(ctx, ITH_MEM_ACTIVATIONS, "middle residual", m->dtype, t, c->hidden_size,
                         &a->x2));
        if (c->layer_is_moe[l])
            ITH_TRY(push_experts(m, ctx, ITH_MEM_ACTIVATIONS, a, t));
        else
            ITH_TRY(ith_push(ctx, ITH_MEM_ACTIVATIONS, "gate and up", m->dtype, t,
                             2 * c->intermediate_size, &a->gate_up));
    }
    if (keep != ITH_KEEP_ALL || !m->keep_normed[l])
        return ITH_OK;
    ITH_TRY(push_norm(ctx, ITH_MEM_ACTIVATIONS, m->dtype, t, c->hidden_size, &a->n1, &a->rstd1));
    ITH_TRY(ith_block_push_attention_in(m, ctx, a, t, b->group_tokens));
    return push_norm(ctx, ITH_MEM_ACTIVATIONS, m->dtype, t, c->hidden_size, &a->n2, &a->rstd2);
}

/* x2 = x + o Wo^T and delta = MLP(norm(x2)). */
static ith_status after_attention(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T o)
{
    T o_out;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "attention projection", m->dtype, b->num_tokens,
                     m->config->hidden_size, &o_out));
    ITH_TRY(
        ith_linear_forward(ctx, o_out, ith_heads_2d(o), ith_layer_param(m, l, ITH_P_O)->w, false));
    return mlp_forward(m, ctx, b, l, o_out);
}

static ith_status layer_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                bool training)
{
    ith_mixer_in in = {0};
    ITH_TRY(push_saved(m, ctx, b, l, training));
    ITH_TRY(ith_block_attention_in(m, ctx, b, l, true, &in));
    ITH_TRY(ith_block_attend(m, ctx, b, l, &in));
    return after_attention(m, ctx, b, l, in.o);
}

static ith_status qwen3_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training,
                                T hidden)
{
    ITH_TRY(ith_walk_open(m, ctx, b, training));
    ITH_TRY(ith_walk_open_balance(m, ctx, training));
    ITH_TRY(ith_walk_forward(m, ctx, b, training, layer_forward));
    ITH_TRY(ith_walk_sum_balance(m, ctx));
    return ith_add(ctx, hidden, m->residual, m->delta);
}

/* ---- backward ---- */

/* Makes o, lse and x2 again when the layer kept less. */
static ith_status remake_attention(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                   ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens;
    if (a->x2.ndim)
        return ITH_OK;
    ITH_TRY(ith_block_output_again(m, ctx, b, l, in));
    T o_out, rstd2;
    ITH_TRY(
        ith_push(ctx, ITH_MEM_WORKSPACE, "middle residual", m->dtype, t, c->hidden_size, &a->x2));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "attention projection", m->dtype, t, c->hidden_size,
                     &o_out));
    ITH_TRY(
        ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, 1, t, 1, 1, 1, &rstd2));
    ITH_TRY(ith_linear_forward(ctx, o_out, ith_heads_2d(in->o), ith_layer_param(m, l, ITH_P_O)->w,
                               false));
    ITH_TRY(ith_rmsnorm_forward(ctx, ith_tensor_none(), a->x2, rstd2, o_out, a->x,
                                ith_layer_param(m, l, ITH_P_POST_NORM)->w, (float)c->rms_norm_eps,
                                0.0f));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* Whether the product for the gradient of gate_up waits for the exchange behind attention, to run
 * beside it: what it reads is kept. */
static bool waits_for_attention(const ith_model *m, const ith_ctx *ctx, int64_t l, int64_t t)
{
    const ith_hf_config *c = m->config;
    return !c->layer_is_moe[l] && m->acts[l].n2.ndim && mlp_tile(m, l, t) >= t &&
           ith_ulysses_is_direct(m->mesh, ctx, c->num_key_value_heads);
}

/* dx [T,D]: in, the gradient of the layer's output; out, that of x2. */
static ith_status mlp_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    bool moe = c->layer_is_moe[l];
    const ith_param *norm = ith_layer_param(m, l, ITH_P_POST_NORM),
                    *up = ith_layer_param(m, l, ITH_P_GATE_UP);
    const ith_param *down = ith_layer_param(m, l, ITH_P_DOWN);
    int64_t t = b->num_tokens, tile = mlp_tile(m, l, t),
            mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T saved_gate_up = a->gate_up, none = ith_tensor_none();
    for (int64_t r0 = 0; r0 < t || (moe && r0 == 0); r0 += tile) {
        int64_t r1 = ith_min_i64(r0 + tile, t), n = r1 - r0;
        T n2, rstd2, dn2, dh, h, x2 = ith_row_range(a->x2, r0, r1), dy = ith_row_range(dx, r0, r1);
        ITH_TRY(rows_of_n2(m, ctx, l, r0, r1, &n2, &rstd2));
        if (!a->n2.ndim)
            ITH_TRY(ith_rmsnorm_forward(ctx, n2, none, rstd2, x2, none, norm->w,
                                        (float)c->rms_norm_eps, m->norm_offset));
        ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "norm output gradient", m->dtype, n,
                         c->hidden_size, &dn2));
        if (moe) {
            if (!a->gate_up.ndim) {
                ITH_TRY(push_experts(m, ctx, ITH_MEM_WORKSPACE, a, t));
                ITH_TRY(experts_forward(m, ctx, b, l, n2, false));
            }
            ITH_TRY(experts_backward(m, ctx, b, l, dn2, dy, n2));
        } else {
            T gate_up = saved_gate_up;
            if (gate_up.ndim) {
                gate_up = ith_row_range(gate_up, r0, r1);
            } else {
                ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "gate and up", m->dtype, n,
                                 2 * c->intermediate_size, &gate_up));
                ITH_TRY(ith_linear_forward(ctx, gate_up, n2, up->w, false));
            }
            ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden gradient", m->dtype, n,
                             c->intermediate_size, &dh));
            ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden", m->dtype, n,
                             c->intermediate_size, &h));
            ITH_TRY(ith_linear_backward_input(ctx, dh, dy, down->w, false));
            ITH_TRY(ith_swiglu_backward(ctx, gate_up, h, dh,
                                        gate_up)); /* gate_up is its gradient now */
            ITH_TRY(ith_linear_backward_weight(ctx, down->grad, dy, h));
            if (!waits_for_attention(m, ctx, l, t))
                ITH_TRY(ith_linear_backward_weight(ctx, up->grad, gate_up, n2));
            ITH_TRY(ith_linear_backward_input(ctx, dn2, gate_up, up->w, false));
        }
        ITH_TRY(
            ith_rmsnorm_backward(ctx, dy, norm->grad, dn2, dy, x2, rstd2, norm->w, m->norm_offset));
        ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    }
    return ITH_OK;
}

/* dx: in, the gradient of x2; out, that of x. */
static ith_status attention_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     ith_mixer_in *in, T dx)
{
    const ith_hf_config *c = m->config;
    const ith_layer_acts *a = &m->acts[l];
    const ith_param *wo = ith_layer_param(m, l, ITH_P_O);
    T do_, dqkv;
    if (!in->n1.ndim)
        ITH_TRY(ith_block_attention_in(m, ctx, b, l, false, in));
    ITH_TRY(ith_block_output_again(m, ctx, b, l, in));
    ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "attention output gradient", m->dtype,
                           b->num_tokens, c->num_attention_heads, c->head_dim, &do_));
    ITH_TRY(ith_linear_backward_input(ctx, ith_heads_2d(do_), dx, wo->w, false));
    ITH_TRY(ith_block_output_backward(m, ctx, b, in, do_));
    ITH_TRY(ith_linear_backward_weight(ctx, wo->grad, dx, ith_heads_2d(in->o)));
    ITH_TRY(ith_block_push_projection(m, ctx, ITH_MEM_WORKSPACE, l, b->num_tokens, &dqkv));
    ITH_TRY(ith_block_attend_backward(m, ctx, b, l, in, dqkv));
    if (waits_for_attention(m, ctx, l, b->num_tokens))
        ITH_TRY(ith_linear_backward_weight(ctx, ith_layer_param(m, l, ITH_P_GATE_UP)->grad,
                                           a->gate_up, a->n2));
    ITH_TRY(ith_block_qk_backward(m, ctx, b, l, in, dqkv));
    return ith_block_project_backward(m, ctx, l, in, dqkv, dx);
}

static ith_status layer_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx)
{
    ith_mixer_in in = {0};
    ITH_TRY(remake_attention(m, ctx, b, l, &in));
    ITH_TRY(mlp_backward(m, ctx, b, l, dx));
    return attention_backward(m, ctx, b, l, &in, dx);
}

static ith_status qwen3_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, T dhidden)
{
    ITH_TRY(ith_walk_backward(m, ctx, b, dhidden, layer_backward));
    return ith_embedding_backward(ctx, m->params[m->embed].grad, dhidden, b->ids);
}

/* ---- decode ---- */

static ith_status layer_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               ith_kv_cache *cache, T rows, bool prefill)
{
    ith_mixer_in in = {0};
    ITH_TRY(push_saved(m, ctx, b, l, false));
    ITH_TRY(ith_block_attention_in(m, ctx, b, l, true, &in));
    ITH_TRY(ith_block_attend_cache(m, ctx, b, l, cache, rows, prefill, &in));
    return after_attention(m, ctx, b, l, in.o);
}

static ith_status qwen3_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, ith_kv_cache *cache,
                               T rows, bool prefill, T hidden)
{
    ITH_TRY(ith_walk_open(m, ctx, b, false));
    ITH_TRY(ith_walk_decode(m, ctx, b, cache, rows, prefill, layer_decode));
    return ith_add(ctx, hidden, m->residual, m->delta);
}

/* ---- for other families (blocks.h) ---- */

ith_status ith_block_mlp_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T o_out)
{
    return mlp_forward(m, ctx, b, l, o_out);
}

ith_status ith_block_mlp_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx)
{
    return mlp_backward(m, ctx, b, l, dx);
}

ith_status ith_block_push_experts(ith_model *m, ith_ctx *ctx, ith_mem_class where,
                                  ith_layer_acts *a, int64_t t)
{
    return push_experts(m, ctx, where, a, t);
}

ith_status ith_block_experts_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     T n2, bool count_load)
{
    return experts_forward(m, ctx, b, l, n2, count_load);
}

ith_status ith_block_experts_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                      T dn2, T dy, T n2)
{
    return experts_backward(m, ctx, b, l, dn2, dy, n2);
}

const ith_model_family ith_family_qwen3 = {ITH_FAMILY_QWEN3, qwen3_declare, qwen3_forward,
                                           qwen3_backward, qwen3_decode};
