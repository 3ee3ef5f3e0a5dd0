/* gdn_cpu.c - entries of the CPU table for Gated DeltaNet, gates and vision towers. The work is in
 * gdn_impl.h; what is small beside the products is the reference, cut into rows. */
#include "kernels/cpu/cpu_internal.h"

#include <string.h>

#define PIECE_ROWS 16 /* of pieces that have no sum over rows */

/* ---- delta rule ---- */

static int64_t delta_forward_bytes(ith_ctx *ctx, ith_tensor o, ith_tensor q, ith_tensor k,
                                   ith_tensor v, ith_tensor g, ith_tensor beta, ith_tensor state,
                                   ith_seqs seqs, float scale)
{
    if (!ith_cpu_is_fast(q))
        return ith_backend_ref()->gated_delta_rule_forward.workspace(ctx, o, q, k, v, g, beta,
                                                                     state, seqs, scale);
    ith_cpu_delta a = {.q = q, .k = k, .v = v, .seqs = seqs};
    return ith_cpu_level_get()->delta_bytes(&a, false) * ith_pool_threads(ctx->pool);
}

static ith_status delta_forward(ith_ctx *ctx, ith_tensor o, ith_tensor q, ith_tensor k,
                                ith_tensor v, ith_tensor g, ith_tensor beta, ith_tensor state,
                                ith_seqs seqs, float scale)
{
    if (!ith_cpu_is_fast(q))
        return ith_backend_ref()->gated_delta_rule_forward.run(ctx, o, q, k, v, g, beta, state,
                                                               seqs, scale);
    const ith_cpu_level *level = ith_cpu_level_get();
    ith_cpu_delta a = {.o = o,
                       .q = q,
                       .k = k,
                       .v = v,
                       .g = g,
                       .beta = beta,
                       .state = state,
                       .seqs = seqs,
                       .scale = scale,
                       .scratch = ctx->scratch};
    a.thread_bytes = level->delta_bytes(&a, false);
    ith_pool_for(ctx->pool, seqs.num_docs * k.shape[1], 1, level->delta_forward, &a);
    return ITH_OK;
}

static int64_t delta_backward_bytes(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                    ith_tensor dg, ith_tensor dbeta, ith_tensor dstate,
                                    ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                    ith_tensor g, ith_tensor beta, ith_tensor state, ith_seqs seqs,
                                    float scale)
{
    if (!ith_cpu_is_fast(q))
        return ith_backend_ref()->gated_delta_rule_backward.workspace(
            ctx, dq, dk, dv, dg, dbeta, dstate, do_, q, k, v, g, beta, state, seqs, scale);
    ith_cpu_delta a = {.q = q, .k = k, .v = v, .seqs = seqs};
    return ith_cpu_level_get()->delta_bytes(&a, true) * ith_pool_threads(ctx->pool);
}

static ith_status delta_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                 ith_tensor dg, ith_tensor dbeta, ith_tensor dstate, ith_tensor do_,
                                 ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor g,
                                 ith_tensor beta, ith_tensor state, ith_seqs seqs, float scale)
{
    if (!ith_cpu_is_fast(q))
        return ith_backend_ref()->gated_delta_rule_backward.run(
            ctx, dq, dk, dv, dg, dbeta, dstate, do_, q, k, v, g, beta, state, seqs, scale);
    const ith_cpu_level *level = ith_cpu_level_get();
    ith_cpu_delta a = {.q = q,
                       .k = k,
                       .v = v,
                       .g = g,
                       .beta = beta,
                       .dq = dq,
                       .dk = dk,
                       .dv = dv,
                       .dg = dg,
                       .dbeta = dbeta,
                       .do_ = do_,
                       .state = state,
                       .dstate = dstate,
                       .seqs = seqs,
                       .scale = scale,
                       .scratch = ctx->scratch};
    a.thread_bytes = level->delta_bytes(&a, true);
    ith_pool_for(ctx->pool, seqs.num_docs * k.shape[1], 1, level->delta_backward, &a);
    return ITH_OK;
}

/* ---- convolution, by channels ---- */

static ith_status conv_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                               ith_tensor history, ith_seqs seqs)
{
    const ith_cpu_level *level = ith_cpu_level_get();
    if (!ith_cpu_is_fast(x) || w.shape[1] > level->conv_max_taps)
        return ith_backend_ref()->conv1d_silu_forward.run(ctx, y, x, w, history, seqs);
    ith_cpu_rows a = {.t = {y, x, w, history}, .seqs = seqs};
    ith_pool_for(ctx->pool, ith_div_ceil(x.shape[1], level->conv_lanes), 1, level->conv_forward,
                 &a);
    return ITH_OK;
}

static ith_status conv_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                ith_tensor x, ith_tensor w, ith_seqs seqs)
{
    const ith_cpu_level *level = ith_cpu_level_get();
    if (!ith_cpu_is_fast(x) || w.shape[1] > level->conv_max_taps)
        return ith_backend_ref()->conv1d_silu_backward.run(ctx, dx, dw, dy, x, w, seqs);
    ith_cpu_rows a = {.t = {dx, x, w, ith_tensor_none(), dy, dw}, .seqs = seqs};
    ith_pool_for(ctx->pool, ith_div_ceil(x.shape[1], level->conv_lanes), 1, level->conv_backward,
                 &a);
    return ITH_OK;
}

/* ---- gated norm and gate ---- */

static ith_status gated_norm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor z,
                                     ith_tensor w, float eps)
{
    if (!ith_cpu_is_fast(x))
        return ith_backend_ref()->gated_rmsnorm_forward.run(ctx, y, x, z, w, eps);
    ith_cpu_rows a = {.t = {y, x, z, w}, .f = {eps}};
    ith_pool_for(ctx->pool, x.shape[0], PIECE_ROWS, ith_cpu_level_get()->gated_norm_forward, &a);
    return ITH_OK;
}

static int64_t gated_norm_backward_bytes(ith_ctx *ctx, ith_tensor dx, ith_tensor dz, ith_tensor dw,
                                         ith_tensor dy, ith_tensor x, ith_tensor z, ith_tensor w,
                                         float eps)
{
    (void)ctx, (void)dx, (void)dz, (void)dy, (void)z, (void)w, (void)eps;
    return dw.ndim ? ith_cpu_part_count(x.shape[0]) * x.shape[2] * 4 : 0;
}

static ith_status gated_norm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dz, ith_tensor dw,
                                      ith_tensor dy, ith_tensor x, ith_tensor z, ith_tensor w,
                                      float eps)
{
    if (!ith_cpu_is_fast(x))
        return ith_backend_ref()->gated_rmsnorm_backward.run(ctx, dx, dz, dw, dy, x, z, w, eps);
    ith_cpu_rows a = {.t = {dx, dz, dy, x, z, w},
                      .f = {eps},
                      .i = {ith_cpu_part_rows(x.shape[0])},
                      .flag = dw.ndim != 0,
                      .scratch = ctx->scratch};
    int64_t parts = ith_cpu_part_count(x.shape[0]);
    ith_pool_for(ctx->pool, parts, 1, ith_cpu_level_get()->gated_norm_backward, &a);
    if (a.flag)
        ith_cpu_add_parts(dw, ctx->scratch, parts, x.shape[2]);
    return ITH_OK;
}

static ith_status sigmoid_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor gate)
{
    if (!ith_cpu_is_fast(x))
        return ith_backend_ref()->sigmoid_gate_forward.run(ctx, y, x, gate);
    ith_cpu_rows a = {.t = {y, x, gate}};
    ith_pool_for(ctx->pool, x.shape[0], PIECE_ROWS, ith_cpu_level_get()->sigmoid_gate_forward, &a);
    return ITH_OK;
}

static ith_status sigmoid_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate,
                                        ith_tensor dy, ith_tensor x, ith_tensor gate)
{
    if (!ith_cpu_is_fast(x))
        return ith_backend_ref()->sigmoid_gate_backward.run(ctx, dx, dgate, dy, x, gate);
    ith_cpu_rows a = {.t = {dx, dgate, dy, x, gate}};
    ith_pool_for(ctx->pool, x.shape[0], PIECE_ROWS, ith_cpu_level_get()->sigmoid_gate_backward, &a);
    return ITH_OK;
}

/* ---- the reference on pieces of rows: nothing in it crosses rows but the sums ---- */

typedef struct {
    ith_ctx ctx;
    ith_tensor t[10];
    float eps;
    bool flag;
    float *parts; /* sums of a piece, or NULL */
    int64_t rows, part_rows, stride;
} job;

static ith_tensor rows_of(const job *j, int i, int64_t begin, int64_t end)
{
    return j->t[i].ndim ? ith_row_range(j->t[i], begin, end) : j->t[i];
}

#define ROWS(i) rows_of(j, i, begin, end)
#define TASK(name, call)                                                                           \
    static void name(void *arg, int64_t begin, int64_t end, int thread)                            \
    {                                                                                              \
        job *j = arg;                                                                              \
        (void)thread;                                                                              \
        (void)ith_backend_ref()->call;                                                             \
    }

TASK(gates_task,
     gdn_gates_forward.run(&j->ctx, ROWS(0), ROWS(1), ROWS(2), ROWS(3), j->t[4], j->t[5]))
TASK(row_gate_task, row_gate_forward.run(&j->ctx, ROWS(0), ROWS(1), ROWS(2), ROWS(3)))
TASK(row_gate_back_task,
     row_gate_backward.run(&j->ctx, ROWS(0), ROWS(1), ROWS(2), ROWS(3), ROWS(4)))
TASK(layernorm_task,
     layernorm_forward.run(&j->ctx, ROWS(0), ROWS(1), ROWS(2), ROWS(3), j->t[4], j->t[5], j->eps))
TASK(bias_task, bias_add.run(&j->ctx, ROWS(0), j->t[1]))
TASK(gelu_task, gelu_forward.run(&j->ctx, ROWS(0), ROWS(1), j->flag))
TASK(gelu_back_task, gelu_backward.run(&j->ctx, ROWS(0), ROWS(1), ROWS(2), j->flag))

static ith_status by_rows(ith_ctx *ctx, job *j, int64_t rows, ith_task task)
{
    j->ctx = *ctx;
    ith_pool_for(ctx->pool, rows, PIECE_ROWS, task, j);
    return ITH_OK;
}

static ith_status gates_forward(ith_ctx *ctx, ith_tensor g, ith_tensor beta, ith_tensor a,
                                ith_tensor b, ith_tensor a_log, ith_tensor dt_bias)
{
    job j = {.t = {g, beta, a, b, a_log, dt_bias}};
    return by_rows(ctx, &j, a.shape[0], gates_task);
}

static ith_status row_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                                   ith_tensor gate)
{
    job j = {.t = {y, base, x, gate}};
    return by_rows(ctx, &j, x.shape[0], row_gate_task);
}

static ith_status row_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate, ith_tensor dy,
                                    ith_tensor x, ith_tensor gate)
{
    job j = {.t = {dx, dgate, dy, x, gate}};
    return by_rows(ctx, &j, x.shape[0], row_gate_back_task);
}

static ith_status layernorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor mean, ith_tensor rstd,
                                    ith_tensor x, ith_tensor w, ith_tensor b, float eps)
{
    job j = {.t = {y, mean, rstd, x, w, b}, .eps = eps};
    return by_rows(ctx, &j, x.shape[0], layernorm_task);
}

static ith_status bias_add(ith_ctx *ctx, ith_tensor y, ith_tensor b)
{
    job j = {.t = {y, b}};
    return by_rows(ctx, &j, y.shape[0], bias_task);
}

static ith_status gelu_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, bool approximate)
{
    job j = {.t = {y, x}, .flag = approximate};
    return by_rows(ctx, &j, x.shape[0], gelu_task);
}

static ith_status gelu_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor x,
                                bool approximate)
{
    job j = {.t = {dx, dy, x}, .flag = approximate};
    return by_rows(ctx, &j, x.shape[0], gelu_back_task);
}

/* ---- the same with sums: each part of rows has its own, added in order afterwards ---- */

#define PART_TASK(name, call)                                                                      \
    static void name(void *arg, int64_t first, int64_t last, int thread)                           \
    {                                                                                              \
        job *j = arg;                                                                              \
        (void)thread;                                                                              \
        for (int64_t part = first; part < last; part++) {                                          \
            int64_t begin = part * j->part_rows;                                                   \
            int64_t end = ith_min_i64(begin + j->part_rows, j->rows);                              \
            float *sums = j->parts ? j->parts + part * 2 * j->stride : NULL;                       \
            if (sums)                                                                              \
                memset(sums, 0, (size_t)(2 * j->stride) * 4);                                      \
            ith_tensor first_sum =                                                                 \
                           sums ? ith_tensor_1d(sums, ITH_F32, j->stride) : ith_tensor_none(),     \
                       second_sum = sums ? ith_tensor_1d(sums + j->stride, ITH_F32, j->stride)     \
                                         : ith_tensor_none();                                      \
            (void)ith_backend_ref()->call;                                                         \
        }                                                                                          \
    }

PART_TASK(gates_back_task,
          gdn_gates_backward.run(&j->ctx, ROWS(0), ROWS(1), first_sum, second_sum, ROWS(2), ROWS(3),
                                 ROWS(4), ROWS(5), j->t[6], j->t[7]))
PART_TASK(layernorm_back_task,
          layernorm_backward.run(&j->ctx, ROWS(0), first_sum, second_sum, ROWS(1), ROWS(2), ROWS(3),
                                 ROWS(4), ROWS(5), j->t[6]))

static ith_status by_parts(ith_ctx *ctx, job *j, int64_t rows, ith_tensor a, ith_tensor b,
                           ith_task task)
{
    int64_t parts = ith_cpu_part_count(rows);
    j->ctx = *ctx;
    j->rows = rows;
    j->part_rows = ith_cpu_part_rows(rows);
    j->stride = a.ndim ? a.shape[0] : 0;
    j->parts = a.ndim ? ctx->scratch : NULL;
    ith_pool_for(ctx->pool, parts, 1, task, j);
    if (a.ndim) {
        ith_cpu_add_parts(a, j->parts, parts, 2 * j->stride);
        ith_cpu_add_parts(b, j->parts + j->stride, parts, 2 * j->stride);
    }
    return ITH_OK;
}

static int64_t gates_backward_bytes(ith_ctx *ctx, ith_tensor da, ith_tensor db, ith_tensor da_log,
                                    ith_tensor ddt_bias, ith_tensor dg, ith_tensor dbeta,
                                    ith_tensor a, ith_tensor b, ith_tensor a_log,
                                    ith_tensor dt_bias)
{
    (void)ctx, (void)da, (void)db, (void)ddt_bias, (void)dg, (void)dbeta, (void)b, (void)a_log;
    (void)dt_bias;
    return da_log.ndim ? ith_cpu_part_count(a.shape[0]) * 2 * a.shape[1] * 4 : 0;
}

static ith_status gates_backward(ith_ctx *ctx, ith_tensor da, ith_tensor db, ith_tensor da_log,
                                 ith_tensor ddt_bias, ith_tensor dg, ith_tensor dbeta, ith_tensor a,
                                 ith_tensor b, ith_tensor a_log, ith_tensor dt_bias)
{
    if (!ith_cpu_is_fast(a) || da_log.ndim != ddt_bias.ndim)
        return ith_backend_ref()->gdn_gates_backward.run(ctx, da, db, da_log, ddt_bias, dg, dbeta,
                                                         a, b, a_log, dt_bias);
    job j = {.t = {da, db, dg, dbeta, a, b, a_log, dt_bias}};
    return by_parts(ctx, &j, a.shape[0], da_log, ddt_bias, gates_back_task);
}

static int64_t layernorm_backward_bytes(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor db,
                                        ith_tensor dy, ith_tensor dres, ith_tensor x,
                                        ith_tensor mean, ith_tensor rstd, ith_tensor w)
{
    (void)ctx, (void)dx, (void)db, (void)dy, (void)dres, (void)mean, (void)rstd, (void)w;
    return dw.ndim ? ith_cpu_part_count(x.shape[0]) * 2 * x.shape[1] * 4 : 0;
}

static ith_status layernorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor db,
                                     ith_tensor dy, ith_tensor dres, ith_tensor x, ith_tensor mean,
                                     ith_tensor rstd, ith_tensor w)
{
    if (!ith_cpu_is_fast(x))
        return ith_backend_ref()->layernorm_backward.run(ctx, dx, dw, db, dy, dres, x, mean, rstd,
                                                         w);
    job j = {.t = {dx, dy, dres, x, mean, rstd, w}};
    return by_parts(ctx, &j, x.shape[0], dw, db, layernorm_back_task);
}

/* Columns do not meet either. */
static void bias_back_task(void *arg, int64_t begin, int64_t end, int thread)
{
    job *j = arg;
    (void)thread;
    (void)ith_backend_ref()->bias_backward.run(&j->ctx, ith_row_range(j->t[0], begin, end),
                                               ith_col_range(j->t[1], begin, end));
}

static ith_status bias_backward(ith_ctx *ctx, ith_tensor db, ith_tensor dy)
{
    job j = {.ctx = *ctx, .t = {db, dy}};
    ith_pool_for(ctx->pool, db.shape[0], 64, bias_back_task, &j);
    return ITH_OK;
}

void ith_cpu_fill_gdn(ith_backend *b)
{
    b->gated_delta_rule_forward.run = delta_forward;
    b->gated_delta_rule_forward.workspace = delta_forward_bytes;
    b->gated_delta_rule_backward.run = delta_backward;
    b->gated_delta_rule_backward.workspace = delta_backward_bytes;
    b->conv1d_silu_forward.run = conv_forward;
    b->conv1d_silu_backward.run = conv_backward;
    b->gated_rmsnorm_forward.run = gated_norm_forward;
    b->gated_rmsnorm_backward.run = gated_norm_backward;
    b->gated_rmsnorm_backward.workspace = gated_norm_backward_bytes;
    b->sigmoid_gate_forward.run = sigmoid_gate_forward;
    b->sigmoid_gate_backward.run = sigmoid_gate_backward;
    b->gdn_gates_forward.run = gates_forward;
    b->gdn_gates_backward.run = gates_backward;
    b->gdn_gates_backward.workspace = gates_backward_bytes;
    b->row_gate_forward.run = row_gate_forward;
    b->row_gate_backward.run = row_gate_backward;
    b->layernorm_forward.run = layernorm_forward;
    b->layernorm_backward.run = layernorm_backward;
    b->layernorm_backward.workspace = layernorm_backward_bytes;
    b->bias_add.run = bias_add;
    b->bias_backward.run = bias_backward;
    b->gelu_forward.run = gelu_forward;
    b->gelu_backward.run = gelu_backward;
}
