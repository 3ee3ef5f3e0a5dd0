/* llada2.c - LLaDA2 (MoE, diffusion): parameters, forward, backward below it, decode.
 *
 * Layer:  x = residual + delta
 *         n1 = norm(x)        qkv = n1 Wqkv^T     q', k' = rope(norm_head(q, k)), half of each head
 *         o = attention(q', k', v) under the batch's block mask      x2 = x + o Wdense^T
 *         n2 = norm(x2)       delta = MLP(n2), or shared(n2) + sum_e w_e expert_e(n2)
 * w from the sigmoid router with groups (ops.h). No token of a layer sees another one but through
 * attention, so rows that nobody reads can be left out of a batch (data/noise.h does). Behind the
 * attention of the last layer only the labelled rows are read: the rest of it runs on them alone.
 *
 * Invariants:
 *  1. Saved tensors are ITH_MEM_ACTIVATIONS in layer order, backward releases them in reverse.
 *  2. What backward makes again comes from the same operators on the same inputs.
 *  3. The selection bias is a buffer: read, used for the choice, never trained.
 *  4. The embedding of pad_token_id gets no gradient, as in the published code. */
#include "model/llada2.h"

#include "model/blocks.h"

typedef ith_tensor T;

/* The parent models give this id to another token: it counts with LLaDA2's vocabulary alone. */
#define PUBLISHED_MASK_ID 156895
#define PUBLISHED_VOCAB 157184

int64_t ith_llada2_mask_id(const ith_hf_config *config, const ith_tokenizer *tokenizer)
{
    int64_t id = config->mask_token_id;
    if (id < 0)
        id = ith_tokenizer_find(tokenizer, "<|mask|>");
    return id < 0 && config->vocab_size == PUBLISHED_VOCAB ? PUBLISHED_MASK_ID : id;
}

static int64_t q_width(const ith_hf_config *c)
{
    return c->num_attention_heads * c->head_dim;
}

static int64_t shared_width(const ith_hf_config *c)
{
    return c->moe_intermediate_size * c->num_shared_experts;
}

/* ---- parameters ---- */

/* One parameter that is one tensor of the file, model.layers.<l>.<hf>. */
static ith_status declare_one(ith_model *m, int64_t l, const char *ours, const char *hf, int ndim,
                              int64_t d0, int64_t d1, int which, ith_error *err)
{
    int32_t *out = &m->layer_param[l * ITH_LAYER_PARAMS + which];
    long long n = (long long)l;
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.%s", n, ours), ndim, d0, d1, 1,
                                out, err));
    return ith_model_add_piece(m, ith_model_text(m, "model.layers.%lld.%s.weight", n, hf), *out, 0,
                               ndim, d0, d1, 1, ndim == 1, err);
}

/* gate and up stacked by rows, and down, of one MLP. */
static ith_status declare_mlp(ith_model *m, int64_t l, const char *ours, const char *hf,
                              int64_t width, int up, int down, ith_error *err)
{
    int64_t d = m->config->hidden_size;
    long long n = (long long)l;
    int32_t *p = m->layer_param + l * ITH_LAYER_PARAMS;
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.%sgate_up", n, ours), 2,
                                2 * width, d, 1, &p[up], err));
    ITH_TRY(ith_model_add_piece(m,
                                ith_model_text(m, "model.layers.%lld.%s.gate_proj.weight", n, hf),
                                p[up], 0, 2, width, d, 1, false, err));
    ITH_TRY(ith_model_add_piece(m, ith_model_text(m, "model.layers.%lld.%s.up_proj.weight", n, hf),
                                p[up], width * d, 2, width, d, 1, false, err));
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.%sdown", n, ours), 2, d, width, 1,
                                &p[down], err));
    return ith_model_add_piece(m, ith_model_text(m, "model.layers.%lld.%s.down_proj.weight", n, hf),
                               p[down], 0, 2, d, width, 1, false, err);
}

static ith_status declare_experts(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t d = c->hidden_size, e = c->num_experts;
    int32_t *p = m->layer_param + l * ITH_LAYER_PARAMS;
    long long n = (long long)l;
    ITH_TRY(declare_one(m, l, "router", "mlp.gate", 2, e, d, ITH_P_ROUTER, err));
    ITH_TRY(ith_model_add_buffer(m, ith_model_text(m, "model.layers.%lld.mlp.gate.expert_bias", n),
                                 e, !c->has_expert_bias, &p[ITH_P_ROUTER_BIAS], err));
    ITH_TRY(ith_block_declare_experts(m, l, err));
    if (c->num_shared_experts)
        return declare_mlp(m, l, "shared.", "mlp.shared_experts", shared_width(c),
                           ITH_P_SHARED_GATE_UP, ITH_P_SHARED_DOWN, err);
    return ITH_OK;
}

static ith_status declare_layer(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t d = c->hidden_size, dh = c->head_dim;
    ITH_TRY(declare_one(m, l, "input_norm", "input_layernorm", 1, d, 1, ITH_P_INPUT_NORM, err));
    ITH_TRY(declare_one(m, l, "qkv", "attention.query_key_value", 2,
                        (c->num_attention_heads + 2 * c->num_key_value_heads) * c->head_dim, d,
                        ITH_P_QKV, err));
    ITH_TRY(declare_one(m, l, "q_norm", "attention.query_layernorm", 1, dh, 1, ITH_P_Q_NORM, err));
    ITH_TRY(declare_one(m, l, "k_norm", "attention.key_layernorm", 1, dh, 1, ITH_P_K_NORM, err));
    ITH_TRY(declare_one(m, l, "o", "attention.dense", 2, d, q_width(c), ITH_P_O, err));
    ITH_TRY(
        declare_one(m, l, "post_norm", "post_attention_layernorm", 1, d, 1, ITH_P_POST_NORM, err));
    if (c->layer_is_moe[l])
        return declare_experts(m, l, err);
    return declare_mlp(m, l, "", "mlp", c->intermediate_size, ITH_P_GATE_UP, ITH_P_DOWN, err);
}

static ith_status llada2_declare(ith_model *m, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t v = c->vocab_size, d = c->hidden_size;
    ITH_TRY(ith_model_add_param(m, "word_embeddings", 2, v, d, 1, &m->embed, err));
    ITH_TRY(ith_model_add_piece(m, "model.word_embeddings.weight", m->embed, 0, 2, v, d, 1, false,
                                err));
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        ITH_TRY(declare_layer(m, l, err));
    ITH_TRY(ith_model_add_param(m, "norm", 1, d, 1, 1, &m->final_norm, err));
    ITH_TRY(ith_model_add_piece(m, "model.norm.weight", m->final_norm, 0, 1, d, 1, 1, true, err));
    m->head = m->embed;
    if (c->tie_word_embeddings)
        return ITH_OK;
    ITH_TRY(ith_model_add_param(m, "lm_head", 2, v, d, 1, &m->head, err));
    return ith_model_add_piece(m, "lm_head.weight", m->head, 0, 2, v, d, 1, false, err);
}

/* ---- what the walks share ---- */

/* Rows that layer l computes behind its attention: of the last one the labelled ones when the batch
 * names them; else absent: all. */
static T rows_behind(const ith_model *m, const ith_batch *b, int64_t l)
{
    return l == m->config->num_hidden_layers - 1 ? b->rows : ith_tensor_none();
}

static int64_t num_behind(const ith_model *m, const ith_batch *b, int64_t l)
{
    return rows_behind(m, b, l).ndim ? b->num_rows : b->num_tokens;
}

/* These rows of x [T,*], in the workspace; x itself when all are wanted. */
static ith_status take_rows(ith_ctx *ctx, T x, T rows, T *out)
{
    *out = x;
    if (!rows.ndim)
        return ITH_OK;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "labelled rows", x.dtype, 2, rows.shape[0],
                         x.shape[1], 1, 1, out));
    return ith_gather_rows(ctx, *out, x, rows);
}

static T weight(const ith_model *m, int64_t l, int which)
{
    return ith_layer_param(m, l, which)->w;
}

static T grad(const ith_model *m, int64_t l, int which)
{
    return ith_layer_param(m, l, which)->grad;
}

/* ---- MLPs ---- */

/* Saved or made-again tensors of an expert layer on class `where`. */
static ith_status push_experts(ith_model *m, ith_ctx *ctx, ith_mem_class where, ith_layer_acts *a,
                               int64_t t)
{
    const ith_hf_config *c = m->config;
    int64_t e = c->num_experts, k = c->num_experts_per_tok, s = t * k;
    ITH_TRY(ith_push(ctx, where, "router", ITH_F32, t, e, &a->probs));
    ITH_TRY(ith_push(ctx, where, "router", ITH_F32, t, k, &a->topk_w));
    ITH_TRY(ith_push(ctx, where, "router", ITH_I32, t, k, &a->topk_idx));
    ITH_TRY(ith_push_rows(ctx, where, "router", ITH_I32, e + 1, &a->offsets));
    ITH_TRY(ith_push_rows(ctx, where, "router", ITH_I32, s, &a->source));
    ITH_TRY(ith_push(ctx, where, "router", ITH_I32, t, k, &a->row_of));
    ITH_TRY(ith_block_push_expert_rows(m, ctx, where, a, s));
    if (c->num_shared_experts)
        ITH_TRY(ith_push(ctx, where, "shared expert gate and up", m->dtype, t, 2 * shared_width(c),
                         &a->shared_gate_up));
    return ITH_OK;
}

/* Routing, gate_up and expert_out of a layer from n2. */
static ith_status experts_forward(ith_model *m, ith_ctx *ctx, int64_t l, T n2)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = n2.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T logits;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "router", ITH_F32, t, c->num_experts, &logits));
    ITH_TRY(ith_linear_forward(ctx, logits, n2, weight(m, l, ITH_P_ROUTER), false));
    ITH_TRY(ith_group_router_forward(ctx, a->topk_w, a->topk_idx, a->probs, logits,
                                     ith_layer_buffer(m, l, ITH_P_ROUTER_BIAS), c->n_group,
                                     c->topk_group, (float)c->routed_scaling_factor));
    ITH_TRY(ith_expert_sort(ctx, a->offsets, a->source, a->row_of, a->topk_idx));
    ITH_TRY(ith_block_expert_mlp_forward(m, ctx, l, n2));
    if (c->num_shared_experts)
        ITH_TRY(ith_linear_forward(ctx, a->shared_gate_up, n2, weight(m, l, ITH_P_SHARED_GATE_UP),
                                   false));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* y = silu(gate)*up Wdown^T from gate_up. */
static ith_status mlp_out(ith_model *m, ith_ctx *ctx, T y, T gate_up, T down)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T h;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden", m->dtype, gate_up.shape[0],
                     gate_up.shape[1] / 2, &h));
    ITH_TRY(ith_swiglu_forward(ctx, h, gate_up));
    ITH_TRY(ith_linear_forward(ctx, y, h, down, false));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dn2 (+)= gradient of an MLP's input, from dy; gate_up becomes its gradient. */
static ith_status mlp_in_gradient(ith_model *m, ith_ctx *ctx, T dn2, bool add, T dy, T gate_up,
                                  T n2, const ith_param *up, const ith_param *down)
{
    int64_t t = dy.shape[0], width = gate_up.shape[1] / 2,
            mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T dh, h;
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden gradient", m->dtype, t, width, &dh));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "mlp hidden", m->dtype, t, width, &h));
    ITH_TRY(ith_linear_backward_input(ctx, dh, dy, down->w, false));
    ITH_TRY(ith_swiglu_backward(ctx, gate_up, h, dh, gate_up));
    ITH_TRY(ith_linear_backward_weight(ctx, down->grad, dy, h));
    ITH_TRY(ith_linear_backward_weight(ctx, up->grad, gate_up, n2));
    ITH_TRY(ith_linear_backward_input(ctx, dn2, gate_up, up->w, add));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dn2 = gradient of the expert layer's input; dy = gradient of its output. */
static ith_status experts_backward(ith_model *m, ith_ctx *ctx, int64_t l, T dn2, T dy, T n2)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = dy.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T dtopk, dlogits, dout = a->expert_out; /* in place */
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "router", ITH_F32, t, c->num_experts_per_tok, &dtopk));
    ITH_TRY(ith_expert_combine_backward(ctx, dout, dtopk, dy, a->expert_out, a->topk_w, a->row_of));
    ITH_TRY(ith_block_expert_mlp_backward(m, ctx, l, dn2, n2));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "router", m->dtype, t, c->num_experts, &dlogits));
    ITH_TRY(ith_group_router_backward(ctx, dlogits, dtopk, a->topk_idx, a->probs,
                                      (float)c->routed_scaling_factor));
    ITH_TRY(ith_linear_backward_weight(ctx, grad(m, l, ITH_P_ROUTER), dlogits, n2));
    ITH_TRY(ith_linear_backward_input(ctx, dn2, dlogits, weight(m, l, ITH_P_ROUTER), true));
    if (c->num_shared_experts)
        ITH_TRY(mlp_in_gradient(m, ctx, dn2, true, dy, a->shared_gate_up, n2,
                                ith_layer_param(m, l, ITH_P_SHARED_GATE_UP),
                                ith_layer_param(m, l, ITH_P_SHARED_DOWN)));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* ---- forward ---- */

/* Pushes what layer l keeps; x2 is of the rows that are read. */
static ith_status push_saved(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             bool training)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = b->num_tokens, n = num_behind(m, b, l);
    ith_keep keep = training ? m->keep[l] : ITH_KEEP_INPUT;
    ITH_TRY(ith_walk_push_input(m, ctx, b, l, training));
    a->x2 = ith_row_range(m->stream, 0, n);
    if (keep <= ITH_KEEP_ATTENTION)
        ITH_TRY(ith_block_push_attention_out(m, ctx, ITH_MEM_ACTIVATIONS, a, b->group_tokens));
    if (keep != ITH_KEEP_ALL)
        return ITH_OK;
    ITH_TRY(ith_block_push_projection(m, ctx, ITH_MEM_ACTIVATIONS, l, t, &a->qkv));
    ITH_TRY(
        ith_push(ctx, ITH_MEM_ACTIVATIONS, "middle residual", m->dtype, n, c->hidden_size, &a->x2));
    if (c->layer_is_moe[l])
        return push_experts(m, ctx, ITH_MEM_ACTIVATIONS, a, n);
    return ith_push(ctx, ITH_MEM_ACTIVATIONS, "gate and up", m->dtype, n, 2 * c->intermediate_size,
                    &a->gate_up);
}

/* x2 = x + o Wdense^T and delta = MLP(norm(x2)), of the rows that are read; o: of all. */
static ith_status after_attention(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T o)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = num_behind(m, b, l);
    T x, o_out, n2, rstd2, rows = rows_behind(m, b, l);
    ITH_TRY(take_rows(ctx, ith_heads_2d(o), rows, &o));
    ITH_TRY(take_rows(ctx, a->x, rows, &x));
    m->delta = ith_row_range(m->delta, 0, t);
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "attention projection", m->dtype, t, c->hidden_size,
                     &o_out));
    ITH_TRY(ith_linear_forward(ctx, o_out, o, weight(m, l, ITH_P_O), false));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "norm output", m->dtype, t, c->hidden_size, &n2));
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, t, &rstd2));
    ITH_TRY(ith_rmsnorm_forward(ctx, n2, a->x2, rstd2, o_out, x, weight(m, l, ITH_P_POST_NORM),
                                (float)c->rms_norm_eps, 0.0f));
    if (!c->layer_is_moe[l]) {
        if (!a->gate_up.ndim)
            ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "gate and up", m->dtype, t,
                             2 * c->intermediate_size, &a->gate_up));
        ITH_TRY(ith_linear_forward(ctx, a->gate_up, n2, weight(m, l, ITH_P_GATE_UP), false));
        return mlp_out(m, ctx, m->delta, a->gate_up, weight(m, l, ITH_P_DOWN));
    }
    if (!a->gate_up.ndim)
        ITH_TRY(push_experts(m, ctx, ITH_MEM_WORKSPACE, a, t));
    ITH_TRY(experts_forward(m, ctx, l, n2));
    if (c->num_shared_experts)
        ITH_TRY(mlp_out(m, ctx, m->delta, a->shared_gate_up, weight(m, l, ITH_P_SHARED_DOWN)));
    T base = c->num_shared_experts ? m->delta : ith_tensor_none();
    return ith_expert_combine(ctx, m->delta, base, a->expert_out, a->topk_w, a->row_of);
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

static ith_status llada2_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training,
                                 T hidden)
{
    ITH_TRY(ith_walk_open(m, ctx, b, training));
    ITH_TRY(ith_walk_forward(m, ctx, b, training, layer_forward));
    if (!b->rows.ndim)
        return ith_add(ctx, hidden, m->residual, m->delta);
    ITH_TRY(ith_add(ctx, m->delta, m->residual, m->delta));
    return ith_scatter_rows(ctx, hidden, m->delta, b->rows);
}

/* ---- backward ---- */

/* Makes o, lse and x2 again when the layer kept less. */
static ith_status remake_attention(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                   ith_mixer_in *in)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    if (a->x2.ndim)
        return ITH_OK;
    ITH_TRY(ith_block_output_again(m, ctx, b, l, in));
    T o, x, o_out, rstd2, rows = rows_behind(m, b, l);
    int64_t t = num_behind(m, b, l);
    ITH_TRY(
        ith_push(ctx, ITH_MEM_WORKSPACE, "middle residual", m->dtype, t, c->hidden_size, &a->x2));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(take_rows(ctx, ith_heads_2d(in->o), rows, &o));
    ITH_TRY(take_rows(ctx, a->x, rows, &x));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "attention projection", m->dtype, t, c->hidden_size,
                     &o_out));
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, t, &rstd2));
    ITH_TRY(ith_linear_forward(ctx, o_out, o, weight(m, l, ITH_P_O), false));
    ITH_TRY(ith_rmsnorm_forward(ctx, ith_tensor_none(), a->x2, rstd2, o_out, x,
                                weight(m, l, ITH_P_POST_NORM), (float)c->rms_norm_eps, 0.0f));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dx [rows that are read, D]: in, the gradient of the layer's output; out, that of x2. */
static ith_status mlp_backward(ith_model *m, ith_ctx *ctx, int64_t l, T dx)
{
    const ith_hf_config *c = m->config;
    ith_layer_acts *a = &m->acts[l];
    int64_t t = dx.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T n2, rstd2, dn2, none = ith_tensor_none(), norm = weight(m, l, ITH_P_POST_NORM);
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "norm output", m->dtype, t, c->hidden_size, &n2));
    ITH_TRY(ith_push_rows(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, t, &rstd2));
    ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "norm output gradient", m->dtype, t, c->hidden_size,
                     &dn2));
    ITH_TRY(
        ith_rmsnorm_forward(ctx, n2, none, rstd2, a->x2, none, norm, (float)c->rms_norm_eps, 0.0f));
    if (c->layer_is_moe[l]) {
        if (!a->gate_up.ndim) {
            ITH_TRY(push_experts(m, ctx, ITH_MEM_WORKSPACE, a, t));
            ITH_TRY(experts_forward(m, ctx, l, n2));
        }
        ITH_TRY(experts_backward(m, ctx, l, dn2, dx, n2));
    } else {
        T gate_up = a->gate_up;
        if (!gate_up.ndim) {
            ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "gate and up", m->dtype, t,
                             2 * c->intermediate_size, &gate_up));
            ITH_TRY(ith_linear_forward(ctx, gate_up, n2, weight(m, l, ITH_P_GATE_UP), false));
        }
        ITH_TRY(mlp_in_gradient(m, ctx, dn2, false, dx, gate_up, n2,
                                ith_layer_param(m, l, ITH_P_GATE_UP),
                                ith_layer_param(m, l, ITH_P_DOWN)));
    }
    ITH_TRY(ith_rmsnorm_backward(ctx, dx, grad(m, l, ITH_P_POST_NORM), dn2, dx, a->x2, rstd2, norm,
                                 0.0f));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* do_ [T, Hq Dh] from dx2, the gradient of x2 at the rows that are read; it is zero elsewhere. */
static ith_status output_gradient(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T do_,
                                  T dx2)
{
    T part = do_, rows = rows_behind(m, b, l);
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    if (rows.ndim)
        ITH_TRY(ith_push(ctx, ITH_MEM_WORKSPACE, "labelled rows", m->dtype, dx2.shape[0],
                         do_.shape[1], &part));
    ITH_TRY(ith_linear_backward_input(ctx, part, dx2, weight(m, l, ITH_P_O), false));
    if (rows.ndim) {
        ITH_TRY(ith_zero(ctx, do_));
        ITH_TRY(ith_scatter_rows(ctx, do_, part, rows));
    }
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* o: [T, Hq Dh] */
static ith_status output_weight_gradient(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                         T dx2, T o)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ITH_TRY(take_rows(ctx, o, rows_behind(m, b, l), &o));
    ITH_TRY(ith_linear_backward_weight(ctx, grad(m, l, ITH_P_O), dx2, o));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dx2: gradient of x2 at the rows that are read; dx: in, of x2 at all rows; out, that of x. */
static ith_status attention_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     ith_mixer_in *in, T dx2, T dx)
{
    const ith_hf_config *c = m->config;
    T do_, dqkv;
    if (!in->n1.ndim)
        ITH_TRY(ith_block_attention_in(m, ctx, b, l, false, in));
    ITH_TRY(ith_block_output_again(m, ctx, b, l, in));
    ITH_TRY(ith_push_heads(ctx, ITH_MEM_WORKSPACE, "attention output gradient", m->dtype,
                           b->num_tokens, c->num_attention_heads, c->head_dim, &do_));
    ITH_TRY(output_gradient(m, ctx, b, l, ith_heads_2d(do_), dx2));
    ITH_TRY(ith_block_output_backward(m, ctx, b, in, do_));
    ITH_TRY(output_weight_gradient(m, ctx, b, l, dx2, ith_heads_2d(in->o)));
    ITH_TRY(ith_block_push_projection(m, ctx, ITH_MEM_WORKSPACE, l, b->num_tokens, &dqkv));
    ITH_TRY(ith_block_attend_backward(m, ctx, b, l, in, dqkv));
    ITH_TRY(ith_block_qk_backward(m, ctx, b, l, in, dqkv));
    return ith_block_project_backward(m, ctx, l, in, dqkv, dx);
}

static ith_status layer_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l, T dx)
{
    ith_mixer_in in = {0};
    T dx2, rows = rows_behind(m, b, l);
    ITH_TRY(remake_attention(m, ctx, b, l, &in));
    ITH_TRY(take_rows(ctx, dx, rows, &dx2));
    ITH_TRY(mlp_backward(m, ctx, l, dx2));
    if (rows.ndim) /* dx is zero at the others */
        ITH_TRY(ith_scatter_rows(ctx, dx, dx2, rows));
    return attention_backward(m, ctx, b, l, &in, dx2, dx);
}

static ith_status llada2_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, T dhidden)
{
    int64_t pad = m->config->pad_token_id;
    T embed = m->params[m->embed].grad;
    ITH_TRY(ith_walk_backward(m, ctx, b, dhidden, layer_backward));
    ITH_TRY(ith_embedding_backward(ctx, embed, dhidden, b->ids));
    if (pad < 0 || m->head == m->embed)
        return ITH_OK;
    return ith_zero(ctx, ith_row_range(embed, pad, pad + 1));
}

/* ---- decode ----
 * New rows of a sequence are one block that sees itself whole and all that is cached. Its keys and
 * values go to the cache's next rows; decoding the block again overwrites them. */

/* The rows of sequence b as one cache for each of n queries: none hides a row from another. */
static T cache_for_queries(T cache, const ith_kv_cache *kv, int64_t b, int64_t n)
{
    T rows = ith_row_range(cache, b * kv->capacity, (b + 1) * kv->capacity);
    T t = ith_tensor_4d(rows.data, rows.dtype, 4, n, kv->capacity, rows.shape[1], rows.shape[2]);
    t.stride[0] = 0;
    return t;
}

/* o of the blocks against their sequences' caches. */
static ith_status attention_decode(ith_model *m, ith_ctx *ctx, int64_t l, const ith_kv_cache *cache,
                                   T k, T v, ith_mixer_in *in)
{
    T o = in->o = m->acts[l].o;
    int64_t n = o.shape[0] / cache->batch;
    ith_cache_parts part;
    ITH_TRY(ith_cache_parts_open(cache->mesh, ctx, o, &part));
    for (int64_t s = 0; s < cache->batch; s++) {
        int64_t r0 = s * n, r1 = r0 + n;
        T lse = part.lse.ndim ? ith_row_range(part.lse, r0, r1) : part.lse;
        ITH_TRY(ith_attention_decode(
            ctx, ith_row_range(part.o, r0, r1), lse, ith_row_range(in->q, r0, r1),
            cache_for_queries(k, cache, s, n), cache_for_queries(v, cache, s, n),
            ith_row_range(cache->lengths, r0, r1), ith_score_scale(m->config->head_dim)));
    }
    return ith_cache_parts_close(cache->mesh, ctx, o, &part);
}

static ith_status layer_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               ith_kv_cache *cache, T rows, bool prefill)
{
    ith_layer_acts *a = &m->acts[l];
    ith_mixer_in in = {0};
    T k, v;
    ITH_TRY(push_saved(m, ctx, b, l, false));
    ITH_TRY(ith_block_attention_in(m, ctx, b, l, true, &in));
    ITH_TRY(ith_block_fill_cache(m, ctx, l, cache, &in, rows, &k, &v));
    ITH_TRY(ith_block_push_attention_out(m, ctx, ITH_MEM_WORKSPACE, a, b->group_tokens));
    ITH_TRY(prefill ? ith_block_attend(m, ctx, b, l, &in)
                    : attention_decode(m, ctx, l, cache, k, v, &in));
    return after_attention(m, ctx, b, l, in.o);
}

static ith_status llada2_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, ith_kv_cache *cache,
                                T rows, bool prefill, T hidden)
{
    ITH_ASSERT(prefill || b->num_tokens % cache->batch == 0);
    ITH_TRY(ith_walk_open(m, ctx, b, false));
    ITH_TRY(ith_walk_decode(m, ctx, b, cache, rows, prefill, layer_decode));
    return ith_add(ctx, hidden, m->residual, m->delta);
}

const ith_model_family ith_family_llada2 = {ITH_FAMILY_LLADA2, llada2_declare, llada2_forward,
                                            llada2_backward, llada2_decode};
