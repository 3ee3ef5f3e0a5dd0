/* dispatch_gdn.c - the public operators of Gated DeltaNet, gates and vision towers; see dispatch.c
 * for the invariants. */
#include "kernels/dispatch_internal.h"

/* [T,H,D] of this type. */
static bool heads_fit(ith_tensor t, ith_dtype dtype, int64_t tokens, int64_t heads, int64_t dim)
{
    return t.dtype == dtype && is(t, 3, tokens, heads, dim);
}

static bool rows_fit(ith_tensor t, ith_dtype dtype, int64_t rows, int64_t cols)
{
    return t.dtype == dtype && is(t, 2, rows, cols, 0);
}

static bool seqs_fit(ith_seqs seqs)
{
    return seqs.num_docs >= 0 && seqs.cu_seqlens.dtype == ITH_I32 &&
           is(seqs.cu_seqlens, 1, seqs.num_docs + 1, 0, 0);
}

ith_status ith_conv1d_silu_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                   ith_tensor history, ith_seqs seqs)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(y, x.dtype, x.shape[0], x.shape[1]));
    ITH_ASSERT(rows_fit(w, x.dtype, x.shape[1], w.shape[1]) && w.shape[1] >= 1 && seqs_fit(seqs));
    ITH_ASSERT(absent(history) ||
               heads_fit(history, x.dtype, seqs.num_docs, w.shape[1] - 1, x.shape[1]));
    RUN(conv1d_silu_forward, y, x, w, history, seqs);
}

ith_status ith_conv1d_silu_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                    ith_tensor x, ith_tensor w, ith_seqs seqs)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(dy, x.dtype, x.shape[0], x.shape[1]));
    ITH_ASSERT(rows_fit(dx, x.dtype, x.shape[0], x.shape[1]) && seqs_fit(seqs));
    ITH_ASSERT(rows_fit(w, x.dtype, x.shape[1], w.shape[1]) && w.shape[1] >= 1);
    ITH_ASSERT(absent(dw) || (is_stat(dw, x) && is(dw, 2, x.shape[1], w.shape[1], 0)));
    ITH_TRY(ith_blanks_clear(ctx, dw));
    RUN(conv1d_silu_backward, dx, dw, dy, x, w, seqs);
}

static bool gates_fit(ith_tensor g, ith_tensor beta, ith_tensor a, ith_tensor b, ith_tensor a_log,
                      ith_tensor dt_bias)
{
    int64_t rows = a.shape[0], heads = a.shape[1];
    return is_act(a) && a.ndim == 2 && rows_fit(b, a.dtype, rows, heads) && is_stat(g, a) &&
           is_stat(beta, a) && is(g, 2, rows, heads, 0) && is(beta, 2, rows, heads, 0) &&
           is_stat(a_log, a) && is(a_log, 1, heads, 0, 0) && dt_bias.dtype == a.dtype &&
           is(dt_bias, 1, heads, 0, 0);
}

ith_status ith_gdn_gates_forward(ith_ctx *ctx, ith_tensor g, ith_tensor beta, ith_tensor a,
                                 ith_tensor b, ith_tensor a_log, ith_tensor dt_bias)
{
    ITH_ASSERT(gates_fit(g, beta, a, b, a_log, dt_bias));
    RUN(gdn_gates_forward, g, beta, a, b, a_log, dt_bias);
}

ith_status ith_gdn_gates_backward(ith_ctx *ctx, ith_tensor da, ith_tensor db, ith_tensor da_log,
                                  ith_tensor ddt_bias, ith_tensor dg, ith_tensor dbeta,
                                  ith_tensor a, ith_tensor b, ith_tensor a_log, ith_tensor dt_bias)
{
    ITH_ASSERT(gates_fit(dg, dbeta, a, b, a_log, dt_bias));
    ITH_ASSERT(rows_fit(da, a.dtype, a.shape[0], a.shape[1]) &&
               rows_fit(db, a.dtype, a.shape[0], a.shape[1]));
    ITH_ASSERT(absent(da_log) || (is_stat(da_log, a) && is(da_log, 1, a.shape[1], 0, 0)));
    ITH_ASSERT(absent(ddt_bias) || (is_stat(ddt_bias, a) && is(ddt_bias, 1, a.shape[1], 0, 0)));
    ITH_TRY(ith_blanks_clear(ctx, da_log));
    ITH_TRY(ith_blanks_clear(ctx, ddt_bias));
    RUN(gdn_gates_backward, da, db, da_log, ddt_bias, dg, dbeta, a, b, a_log, dt_bias);
}

static bool delta_rule_fits(ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor g, ith_tensor beta,
                            ith_seqs seqs)
{
    return is_act(q) && q.ndim == 3 && v.ndim == 3 &&
           heads_fit(k, q.dtype, q.shape[0], q.shape[1], q.shape[2]) &&
           heads_fit(v, q.dtype, q.shape[0], v.shape[1], v.shape[2]) &&
           v.shape[1] % q.shape[1] == 0 && is_stat(g, q) && is_stat(beta, q) &&
           is(g, 2, q.shape[0], v.shape[1], 0) && is(beta, 2, q.shape[0], v.shape[1], 0) &&
           seqs_fit(seqs);
}

static bool state_fits(ith_tensor state, ith_tensor q, ith_tensor v, ith_seqs seqs)
{
    return absent(state) ||
           (is_stat(state, q) && is(state, 4, seqs.num_docs, v.shape[1], q.shape[2]) &&
            state.shape[3] == v.shape[2] && ith_is_contiguous(state));
}

ith_status ith_gated_delta_rule_forward(ith_ctx *ctx, ith_tensor o, ith_tensor q, ith_tensor k,
                                        ith_tensor v, ith_tensor g, ith_tensor beta,
                                        ith_tensor state, ith_seqs seqs, float scale)
{
    ITH_ASSERT(delta_rule_fits(q, k, v, g, beta, seqs));
    ITH_ASSERT(heads_fit(o, v.dtype, v.shape[0], v.shape[1], v.shape[2]));
    ITH_ASSERT(state_fits(state, q, v, seqs));
    RUN(gated_delta_rule_forward, o, q, k, v, g, beta, state, seqs, scale);
}

ith_status ith_gated_delta_rule_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                         ith_tensor dg, ith_tensor dbeta, ith_tensor dstate,
                                         ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                         ith_tensor g, ith_tensor beta, ith_tensor state,
                                         ith_seqs seqs, float scale)
{
    ITH_ASSERT(delta_rule_fits(q, k, v, g, beta, seqs));
    ITH_ASSERT(delta_rule_fits(dq, dk, dv, dg, dbeta, seqs) && dq.dtype == q.dtype);
    ITH_ASSERT(dq.shape[1] == q.shape[1] && dq.shape[2] == q.shape[2]);
    ITH_ASSERT(heads_fit(dv, v.dtype, v.shape[0], v.shape[1], v.shape[2]) &&
               heads_fit(do_, v.dtype, v.shape[0], v.shape[1], v.shape[2]));
    ITH_ASSERT(state_fits(state, q, v, seqs) && state_fits(dstate, q, v, seqs));
    RUN(gated_delta_rule_backward, dq, dk, dv, dg, dbeta, dstate, do_, q, k, v, g, beta, state,
        seqs, scale);
}

ith_status ith_gated_rmsnorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor z,
                                     ith_tensor w, float eps)
{
    ITH_ASSERT(is_act(x) && x.ndim == 3 && is_stat(w, x) && is(w, 1, x.shape[2], 0, 0));
    ITH_ASSERT(heads_fit(y, x.dtype, x.shape[0], x.shape[1], x.shape[2]) &&
               heads_fit(z, x.dtype, x.shape[0], x.shape[1], x.shape[2]));
    RUN(gated_rmsnorm_forward, y, x, z, w, eps);
}

ith_status ith_gated_rmsnorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dz, ith_tensor dw,
                                      ith_tensor dy, ith_tensor x, ith_tensor z, ith_tensor w,
                                      float eps)
{
    ITH_ASSERT(is_act(x) && x.ndim == 3 && is_stat(w, x) && is(w, 1, x.shape[2], 0, 0));
    ith_tensor same[] = {dx, dz, dy, z};
    for (int i = 0; i < 4; i++)
        ITH_ASSERT(heads_fit(same[i], x.dtype, x.shape[0], x.shape[1], x.shape[2]));
    ITH_ASSERT(absent(dw) || (is_stat(dw, x) && is(dw, 1, x.shape[2], 0, 0)));
    ITH_TRY(ith_blanks_clear(ctx, dw));
    RUN(gated_rmsnorm_backward, dx, dz, dw, dy, x, z, w, eps);
}

ith_status ith_sigmoid_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor gate)
{
    ITH_ASSERT(is_act(x) && x.ndim == 3);
    ITH_ASSERT(heads_fit(y, x.dtype, x.shape[0], x.shape[1], x.shape[2]) &&
               heads_fit(gate, x.dtype, x.shape[0], x.shape[1], x.shape[2]));
    RUN(sigmoid_gate_forward, y, x, gate);
}

ith_status ith_sigmoid_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate, ith_tensor dy,
                                     ith_tensor x, ith_tensor gate)
{
    ITH_ASSERT(is_act(x) && x.ndim == 3);
    ith_tensor same[] = {dx, dgate, dy, gate};
    for (int i = 0; i < 4; i++)
        ITH_ASSERT(heads_fit(same[i], x.dtype, x.shape[0], x.shape[1], x.shape[2]));
    RUN(sigmoid_gate_backward, dx, dgate, dy, x, gate);
}

ith_status ith_row_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                                ith_tensor gate)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(gate, x.dtype, x.shape[0], 1));
    ITH_ASSERT(rows_fit(y, x.dtype, x.shape[0], x.shape[1]) &&
               rows_fit(base, x.dtype, x.shape[0], x.shape[1]));
    RUN(row_gate_forward, y, base, x, gate);
}

ith_status ith_row_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate, ith_tensor dy,
                                 ith_tensor x, ith_tensor gate)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(gate, x.dtype, x.shape[0], 1));
    ITH_ASSERT(rows_fit(dgate, x.dtype, x.shape[0], 1) &&
               rows_fit(dx, x.dtype, x.shape[0], x.shape[1]) &&
               rows_fit(dy, x.dtype, x.shape[0], x.shape[1]));
    RUN(row_gate_backward, dx, dgate, dy, x, gate);
}

ith_status ith_layernorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor mean, ith_tensor rstd,
                                 ith_tensor x, ith_tensor w, ith_tensor b, float eps)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(y, x.dtype, x.shape[0], x.shape[1]));
    ITH_ASSERT(is_stat(mean, x) && is_stat(rstd, x) && is(mean, 1, x.shape[0], 0, 0) &&
               is(rstd, 1, x.shape[0], 0, 0));
    ITH_ASSERT(w.dtype == x.dtype && b.dtype == x.dtype && is(w, 1, x.shape[1], 0, 0) &&
               is(b, 1, x.shape[1], 0, 0));
    RUN(layernorm_forward, y, mean, rstd, x, w, b, eps);
}

ith_status ith_layernorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor db,
                                  ith_tensor dy, ith_tensor dres, ith_tensor x, ith_tensor mean,
                                  ith_tensor rstd, ith_tensor w)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(dx, x.dtype, x.shape[0], x.shape[1]) &&
               rows_fit(dy, x.dtype, x.shape[0], x.shape[1]));
    ITH_ASSERT(absent(dres) || rows_fit(dres, x.dtype, x.shape[0], x.shape[1]));
    ITH_ASSERT(is_stat(mean, x) && is_stat(rstd, x) && is(mean, 1, x.shape[0], 0, 0) &&
               is(rstd, 1, x.shape[0], 0, 0) && is(w, 1, x.shape[1], 0, 0));
    ITH_ASSERT(absent(dw) == absent(db) &&
               (absent(dw) || (is_stat(dw, x) && is(dw, 1, x.shape[1], 0, 0) && is_stat(db, x) &&
                               is(db, 1, x.shape[1], 0, 0))));
    ITH_TRY(ith_blanks_clear(ctx, dw));
    ITH_TRY(ith_blanks_clear(ctx, db));
    RUN(layernorm_backward, dx, dw, db, dy, dres, x, mean, rstd, w);
}

ith_status ith_bias_add(ith_ctx *ctx, ith_tensor y, ith_tensor b)
{
    ITH_ASSERT(is_act(y) && y.ndim == 2 && b.dtype == y.dtype && is(b, 1, y.shape[1], 0, 0));
    RUN(bias_add, y, b);
}

ith_status ith_bias_backward(ith_ctx *ctx, ith_tensor db, ith_tensor dy)
{
    ITH_ASSERT(is_act(dy) && dy.ndim == 2 && is_stat(db, dy) && is(db, 1, dy.shape[1], 0, 0));
    ITH_TRY(ith_blanks_clear(ctx, db));
    RUN(bias_backward, db, dy);
}

ith_status ith_gelu_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, bool approximate)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(y, x.dtype, x.shape[0], x.shape[1]));
    RUN(gelu_forward, y, x, approximate);
}

ith_status ith_gelu_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor x,
                             bool approximate)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && rows_fit(dx, x.dtype, x.shape[0], x.shape[1]) &&
               rows_fit(dy, x.dtype, x.shape[0], x.shape[1]));
    RUN(gelu_backward, dx, dy, x, approximate);
}
