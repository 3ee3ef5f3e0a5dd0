/* expert_mlp.c - the experts' MLPs behind any router: rows of tokens, sorted by expert, through
 * gate_up, SwiGLU and down, here or on the ranks that have the experts
 * (parallel/expert_exchange.h).
 *
 * Invariants:
 *  1. a->expert_out always lies with the tokens, so routing weights never travel.
 *  2. With expert parallelism gate_up is never kept: its rows are other ranks', and how many is
 *     not known before the run; backward makes it again where the experts are. */
#include "model/blocks.h"
#include "parallel/expert_exchange.h"

typedef ith_tensor T;

typedef struct {
    ith_model *m;
    int64_t layer;
} job;

static T weight(const job *j, int which)
{
    return ith_layer_param(j->m, j->layer, which)->w;
}

static ith_status push(const job *j, ith_ctx *ctx, const char *name, int64_t rows, int64_t cols,
                       T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_WORKSPACE, name, j->m->dtype, 2, rows, cols, 1, 1, out);
}

/* out = down(swiglu(gate_up)), gate_up = up(x). */
static ith_status mlp(const job *j, ith_ctx *ctx, T out, T gate_up, T x, T offsets)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T h;
    ITH_TRY(ith_grouped_linear_forward(ctx, gate_up, x, weight(j, ITH_P_GATE_UP), offsets));
    ITH_TRY(push(j, ctx, "mlp hidden", x.shape[0], gate_up.shape[1] / 2, &h));
    ITH_TRY(ith_swiglu_forward(ctx, h, gate_up));
    ITH_TRY(ith_grouped_linear_forward(ctx, out, h, weight(j, ITH_P_DOWN), offsets));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* dx (may alias x) from dy; gate_up becomes its gradient. */
static ith_status mlp_backward(const job *j, ith_ctx *ctx, T dx, T dy, T gate_up, T x, T offsets)
{
    const ith_param *up = ith_layer_param(j->m, j->layer, ITH_P_GATE_UP),
                    *down = ith_layer_param(j->m, j->layer, ITH_P_DOWN);
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE), width = gate_up.shape[1] / 2;
    T dh, h;
    ITH_TRY(push(j, ctx, "mlp hidden gradient", dy.shape[0], width, &dh));
    ITH_TRY(push(j, ctx, "mlp hidden", dy.shape[0], width, &h));
    ITH_TRY(ith_grouped_linear_backward_input(ctx, dh, dy, down->w, offsets));
    ITH_TRY(ith_swiglu_backward(ctx, gate_up, h, dh, gate_up));
    ITH_TRY(ith_grouped_linear_backward_weight(ctx, down->grad, dy, h, offsets));
    ITH_TRY(ith_grouped_linear_backward_weight(ctx, up->grad, gate_up, x, offsets));
    ITH_TRY(ith_grouped_linear_backward_input(ctx, dx, gate_up, up->w, offsets));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

static int64_t gate_up_width(const ith_model *m)
{
    return 2 * m->config->moe_intermediate_size;
}

static ith_status round_forward(void *arg, ith_ctx *ctx, const ith_expert_round *r)
{
    const job *j = arg;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T gate_up;
    ITH_TRY(push(j, ctx, "experts gate and up", r->in[0].shape[0], gate_up_width(j->m), &gate_up));
    ITH_TRY(mlp(j, ctx, r->out, gate_up, r->in[0], r->offsets));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* in: x and dy; out: dx. */
static ith_status round_backward(void *arg, ith_ctx *ctx, const ith_expert_round *r)
{
    const job *j = arg;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T gate_up;
    ITH_TRY(push(j, ctx, "experts gate and up", r->in[0].shape[0], gate_up_width(j->m), &gate_up));
    ITH_TRY(
        ith_grouped_linear_forward(ctx, gate_up, r->in[0], weight(j, ITH_P_GATE_UP), r->offsets));
    ITH_TRY(mlp_backward(j, ctx, r->out, r->in[1], gate_up, r->in[0], r->offsets));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

ith_status ith_block_declare_experts(ith_model *m, int64_t l, ith_error *err)
{
    const ith_hf_config *c = m->config;
    int64_t d = c->hidden_size, e = c->num_experts, im = c->moe_intermediate_size;
    int32_t *p = m->layer_param + l * ITH_LAYER_PARAMS;
    long long n = (long long)l;
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.experts.gate_up", n), 3, e,
                                2 * im, d, &p[ITH_P_GATE_UP], err));
    ITH_TRY(ith_model_add_param(m, ith_model_text(m, "layers.%lld.experts.down", n), 3, e, d, im,
                                &p[ITH_P_DOWN], err));
    for (int64_t i = 0; i < e; i++) {
        static const char *const names[] = {"gate_proj", "up_proj", "down_proj"};
        for (int k = 0; k < 3; k++) {
            const char *hf = ith_model_text(m, "model.layers.%lld.mlp.experts.%lld.%s.weight", n,
                                            (long long)i, names[k]);
            bool down = k == 2;
            ITH_TRY(ith_model_add_piece(m, hf, p[down ? ITH_P_DOWN : ITH_P_GATE_UP],
                                        down ? i * d * im : (2 * i + k) * im * d, 2, down ? d : im,
                                        down ? im : d, 1, false, err));
        }
    }
    return ITH_OK;
}

ith_status ith_block_push_expert_rows(ith_model *m, ith_ctx *ctx, ith_mem_class where,
                                      ith_layer_acts *a, int64_t rows)
{
    int64_t kept = ith_ep_size(m->mesh) > 1 ? 0 : rows;
    ITH_TRY(ith_ctx_push(ctx, where, "experts gate and up", m->dtype, 2, kept, gate_up_width(m), 1,
                         1, &a->gate_up));
    return ith_ctx_push(ctx, where, "experts output", m->dtype, 2, rows, m->config->hidden_size, 1,
                        1, &a->expert_out);
}

ith_status ith_block_expert_mlp_forward(ith_model *m, ith_ctx *ctx, int64_t l, T n2)
{
    ith_layer_acts *a = &m->acts[l];
    job j = {m, l};
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T xs;
    ITH_TRY(push(&j, ctx, "experts input", a->source.shape[0], n2.shape[1], &xs));
    ITH_TRY(ith_gather_rows(ctx, xs, n2, a->source));
    if (ith_ep_size(m->mesh) > 1)
        ITH_TRY(
            ith_expert_rounds(m->mesh, ctx, &xs, 1, a->offsets, a->expert_out, round_forward, &j));
    else
        ITH_TRY(mlp(&j, ctx, a->expert_out, a->gate_up, xs, a->offsets));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

ith_status ith_block_expert_mlp_backward(ith_model *m, ith_ctx *ctx, int64_t l, T dn2, T n2)
{
    ith_layer_acts *a = &m->acts[l];
    job j = {m, l};
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T xs;
    ITH_TRY(push(&j, ctx, "experts input", a->source.shape[0], n2.shape[1], &xs));
    ITH_TRY(ith_gather_rows(ctx, xs, n2, a->source));
    const T in[] = {xs, a->expert_out};
    if (ith_ep_size(m->mesh) > 1)
        ITH_TRY(ith_expert_rounds(m->mesh, ctx, in, 2, a->offsets, xs, round_backward, &j));
    else
        ITH_TRY(mlp_backward(&j, ctx, xs, a->expert_out, a->gate_up, xs, a->offsets));
    ITH_TRY(ith_expert_combine(ctx, dn2, ith_tensor_none(), xs, ith_tensor_none(), a->row_of));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}
