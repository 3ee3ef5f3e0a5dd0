/* Goal: Gated DeltaNet on numbers that can be followed by hand: two tokens, one head of two,
 * forward and backward through unit vectors and gates; the convolution at a border. Method: values
 * made by an independent calculation in double with 8 digits. */
#include "testing.h"

#include "kernels/backend.h"

#include <math.h>

static ith_error err;

static ith_tensor heads(double *x)
{
    return ith_tensor_3d(x, ITH_F64, 2, 1, 2);
}

static ith_tensor column(double *x)
{
    return ith_tensor_2d(x, ITH_F64, 2, 1);
}

static void need(const char *what, const double *got, const double *wanted, int n)
{
    for (int i = 0; i < n; i++)
        if (!(fabs(got[i] - wanted[i]) <= 2e-8))
            fail_msg("%s[%d] is %.9g, expected %.9g", what, i, got[i], wanted[i]);
}

static void test_two_tokens_forward_and_back(void **state)
{
    (void)state;
    ith_ctx ctx = ith_ctx_host(ith_backend_ref(), NULL, &err);
    double q[] = {1, 2, 2, -0.5}, k[] = {2, 1, 1, -1}, v[] = {1, 2, -1, 0.5};
    double b[] = {0, 1}, a[] = {0.5, -0.5}, a_log[] = {0}, dt_bias[] = {1};
    double g[2], beta[2], o[4], s[4] = {0}, dout[] = {1, -1, 0.5, 1};
    double dq[4], dk[4], dv[4], dg[2], dbeta[2], da[2], db[2], da_log[1] = {0}, ddt[1] = {0};
    int32_t cu[] = {0, 2};
    ith_seqs seqs = {
        .cu_seqlens = ith_tensor_1d(cu, ITH_I32, 2), .cu_host = cu, .num_docs = 1, .max_len = 2};
    ith_tensor log_t = ith_tensor_1d(a_log, ITH_F64, 1), bias = ith_tensor_1d(dt_bias, ITH_F64, 1);
    ith_tensor none = ith_tensor_none();
    float scale = 0.70710678F;
    assert_ok(
        ith_gdn_gates_forward(&ctx, column(g), column(beta), column(a), column(b), log_t, bias),
        err);
    need("g", g, (const double[]){-1.70141328, -0.97407698}, 2);
    need("beta", beta, (const double[]){0.5, 0.73105858}, 2);
    assert_ok(ith_gated_delta_rule_forward(&ctx, heads(o), heads(q), heads(k), heads(v), column(g),
                                           column(beta), ith_tensor_4d(s, ITH_F64, 4, 1, 1, 2, 2),
                                           seqs, scale),
              err);
    need("o", o, (const double[]){0.28284266, 0.56568531, -0.36838376, 0.37140551}, 4);
    need("state", s, (const double[]){-0.37895325, 0.53443437, 0.63221521, -0.02791046}, 4);
    assert_ok(ith_gated_delta_rule_backward(&ctx, heads(dq), heads(dk), heads(dv), column(dg),
                                            column(dbeta), none, heads(dout), heads(q), heads(k),
                                            heads(v), column(g), column(beta), none, seqs, scale),
              err);
    need("dq", dq, (const double[]){-0.08485281, 0.04242638, 0.03021900, 0.12087592}, 4);
    need("dk", dk, (const double[]){0.04616942, -0.09233886, -0.11907314, -0.11907307}, 4);
    need("dv", dv, (const double[]){0.32028538, -0.20795720, 0.22163461, 0.44326921}, 4);
    need("dg", dg, (const double[]){0, 0.18721364}, 2);
    need("dbeta", dbeta, (const double[]){-0.19125804, -0.09048758}, 2);
    assert_ok(ith_gdn_gates_backward(&ctx, column(da), column(db),
                                     ith_tensor_1d(da_log, ITH_F64, 1),
                                     ith_tensor_1d(ddt, ITH_F64, 1), column(dg), column(dbeta),
                                     column(a), column(b), log_t, bias),
              err);
    need("db", db, (const double[]){-0.04781451, -0.01779094}, 2);
    need("da", da, (const double[]){0, -0.11653287}, 2);
    need("da_log", da_log, (const double[]){-0.18236049}, 1);
    need("ddt_bias", ddt, (const double[]){-0.11653287}, 1);
}

/* Five inputs as one document, as two, and as two calls with history. */
static void test_convolution_at_a_border(void **state)
{
    (void)state;
    ith_ctx ctx = ith_ctx_host(ith_backend_ref(), NULL, &err);
    double w[] = {0.1, -0.2, 0.3, 0.4}, u[] = {1, 2, 3, 4, 5}, y[5], history[3] = {0};
    static const double one[] = {0.23947506, 0.82528612, 1.33122942, 1.98054892, 2.63949231};
    static const double two[] = {0.23947506, 0.82528612, 1.33122942, 1.33122942, 3.07466969};
    int32_t whole[] = {0, 5}, cut[] = {0, 3, 5}, head[] = {0, 2}, tail[] = {0, 3};
    ith_tensor none = ith_tensor_none(), taps = ith_tensor_2d(w, ITH_F64, 1, 4);
    ith_tensor past = ith_tensor_3d(history, ITH_F64, 1, 3, 1);
    ith_tensor x = ith_tensor_2d(u, ITH_F64, 5, 1), out = ith_tensor_2d(y, ITH_F64, 5, 1);
    ith_seqs seqs = {.cu_seqlens = ith_tensor_1d(whole, ITH_I32, 2),
                     .cu_host = whole,
                     .num_docs = 1,
                     .max_len = 5};
    assert_ok(ith_conv1d_silu_forward(&ctx, out, x, taps, none, seqs), err);
    need("one document", y, one, 5);
    seqs = (ith_seqs){
        .cu_seqlens = ith_tensor_1d(cut, ITH_I32, 3), .cu_host = cut, .num_docs = 2, .max_len = 3};
    assert_ok(ith_conv1d_silu_forward(&ctx, out, x, taps, none, seqs), err);
    need("two documents", y, two, 5);
    seqs = (ith_seqs){.cu_seqlens = ith_tensor_1d(head, ITH_I32, 2),
                      .cu_host = head,
                      .num_docs = 1,
                      .max_len = 2};
    assert_ok(ith_conv1d_silu_forward(&ctx, ith_row_range(out, 0, 2), ith_row_range(x, 0, 2), taps,
                                      past, seqs),
              err);
    need("history", history, (const double[]){0, 1, 2}, 3);
    seqs = (ith_seqs){.cu_seqlens = ith_tensor_1d(tail, ITH_I32, 2),
                      .cu_host = tail,
                      .num_docs = 1,
                      .max_len = 3};
    assert_ok(ith_conv1d_silu_forward(&ctx, ith_row_range(out, 2, 5), ith_row_range(x, 2, 5), taps,
                                      past, seqs),
              err);
    need("continued", y, one, 5);
}

/* ---- one head of one: k = q = 1, write strength a half, values 1, 2, 3 ---- */

enum { STEPS = 3 };

typedef struct {
    double o[STEPS], dv[STEPS], dg[STEPS], dbeta[STEPS];
} scalar_run;

/* Through the backend in its own precision; the gradient of each output is 1. */
static void run_scalar(const ith_backend *backend, const double *g, const int32_t *cu, int64_t docs,
                       scalar_run *r)
{
    ith_ctx ctx = ith_ctx_host(backend, NULL, &err);
    float one[STEPS] = {1, 1, 1}, v[STEPS] = {1, 2, 3}, beta[STEPS] = {0.5F, 0.5F, 0.5F};
    float decay[STEPS], o[STEPS], dq[STEPS], dk[STEPS], dv[STEPS], dg[STEPS], dbeta[STEPS];
    ith_seqs seqs = {.cu_seqlens = ith_tensor_1d((void *)(uintptr_t)cu, ITH_I32, docs + 1),
                     .cu_host = cu,
                     .num_docs = docs,
                     .max_len = STEPS};
    ith_tensor none = ith_tensor_none();
    for (int t = 0; t < STEPS; t++)
        decay[t] = (float)g[t];
#define HEAD(x) ith_tensor_3d(x, ITH_F32, STEPS, 1, 1)
#define COLUMN(x) ith_tensor_2d(x, ITH_F32, STEPS, 1)
    assert_ok(ith_gated_delta_rule_forward(&ctx, HEAD(o), HEAD(one), HEAD(one), HEAD(v),
                                           COLUMN(decay), COLUMN(beta), none, seqs, 1),
              err);
    assert_ok(ith_gated_delta_rule_backward(&ctx, HEAD(dq), HEAD(dk), HEAD(dv), COLUMN(dg),
                                            COLUMN(dbeta), none, HEAD(one), HEAD(one), HEAD(one),
                                            HEAD(v), COLUMN(decay), COLUMN(beta), none, seqs, 1),
              err);
#undef HEAD
#undef COLUMN
    for (int t = 0; t < STEPS; t++) {
        r->o[t] = (double)o[t];
        r->dv[t] = (double)dv[t];
        r->dg[t] = (double)dg[t];
        r->dbeta[t] = (double)dbeta[t];
    }
}

static void about(const char *what, const double *got, const double *wanted)
{
    for (int i = 0; i < STEPS; i++)
        if (!(fabs(got[i] - wanted[i]) <= 1e-5)) /* unit vectors have 1e-6 under the root */
            fail_msg("%s[%d] is %.9g, expected %.9g", what, i, got[i], wanted[i]);
}

/* A gate of exactly 0 is no gate, forward and backward; one below forgets; a border empties. */
static void test_scalar_rule_by_hand(void **state)
{
    (void)state;
    static const int32_t whole[] = {0, 3}, cut[] = {0, 2, 3};
    static const double none[STEPS] = {0, 0, 0}, some[STEPS] = {-0.1, -0.2, -0.3};
    const ith_backend *backends[] = {ith_backend_ref(), ith_backend_cpu()};
    for (int i = 0; i < 2; i++) {
        scalar_run r;
        run_scalar(backends[i], none, whole, 1, &r);
        about("o", r.o, (const double[]){0.5, 1.25, 2.125});
        about("dv", r.dv, (const double[]){0.875, 0.75, 0.5});
        about("dbeta", r.dbeta, (const double[]){1.75, 2.25, 1.75});
        about("dg", r.dg, (const double[]){0, 0.375, 0.625});
        run_scalar(backends[i], some, whole, 1, &r);
        about("o with a gate", r.o, (const double[]){0.5, 1.2046826883, 1.9462254428});
        run_scalar(backends[i], none, cut, 2, &r);
        about("o of two documents", r.o, (const double[]){0.5, 1.25, 1.5});
        about("dv of two documents", r.dv, (const double[]){0.75, 0.5, 0.5});
    }
}

/* Queries, keys and values of nothing but zeros, as behind a convolution over zeros: finite. */
static void test_zero_rows_have_finite_gradients(void **state)
{
    (void)state;
    enum { N = 5, D = 8 };
    static const int32_t cu[] = {0, N};
    const ith_backend *backends[] = {ith_backend_ref(), ith_backend_cpu()};
    for (int i = 0; i < 2; i++) {
        ith_ctx ctx = ith_ctx_host(backends[i], NULL, &err);
        float x[3][N * D] = {{0}}, dout[N * D], out[4][N * D], g[N], beta[N], dg[N], dbeta[N];
        for (int t = 0; t < N; t++) {
            g[t] = -0.1F;
            beta[t] = 0.5F;
            for (int d = 0; d < D; d++) { /* the middle row stays zero */
                dout[t * D + d] = 1;
                for (int p = 0; p < 3 && t != 2; p++)
                    x[p][t * D + d] = (float)(t - d + p);
            }
        }
        ith_seqs seqs = {.cu_seqlens = ith_tensor_1d((void *)(uintptr_t)cu, ITH_I32, 2),
                         .cu_host = cu,
                         .num_docs = 1,
                         .max_len = N};
        ith_tensor none = ith_tensor_none(), t[8];
        for (int k = 0; k < 8; k++)
            t[k] = ith_tensor_3d(k < 3 ? x[k] : k < 7 ? out[k - 3] : dout, ITH_F32, N, 1, D);
        ith_tensor gate = ith_tensor_2d(g, ITH_F32, N, 1),
                   write = ith_tensor_2d(beta, ITH_F32, N, 1);
        assert_ok(ith_gated_delta_rule_forward(&ctx, t[6], t[0], t[1], t[2], gate, write, none,
                                               seqs, 0.35F),
                  err);
        assert_ok(ith_gated_delta_rule_backward(&ctx, t[3], t[4], t[5],
                                                ith_tensor_2d(dg, ITH_F32, N, 1),
                                                ith_tensor_2d(dbeta, ITH_F32, N, 1), none, t[7],
                                                t[0], t[1], t[2], gate, write, none, seqs, 0.35F),
                  err);
        for (int k = 0; k < N * D; k++)
            for (int p = 0; p < 4; p++)
                if (!isfinite(out[p][k]))
                    fail_msg("%s: part %d of row %d is %g", i ? "cpu" : "ref", p, k / D,
                             (double)out[p][k]);
        for (int k = 0; k < N; k++)
            assert_true(isfinite(dg[k]) && isfinite(dbeta[k]));
        for (int d = 0; d < D; d++) /* nothing asked, nothing answered */
            assert_true(out[3][2 * D + d] == 0);
    }
}

/* The norm behind the rule multiplies by its weight, not by 1 + weight, and by SiLU of the gate
 * (cases S62): [3, 4] has rms sqrt(12.5). */
static void test_gated_norm_by_hand(void **state)
{
    (void)state;
    const ith_backend *backends[] = {ith_backend_ref(), ith_backend_cpu()};
    const double r = 1 / sqrt(12.5), silu = 1 / (1 + exp(-1)), low = -2 / (1 + exp(2));
    for (int i = 0; i < 2; i++) {
        ith_ctx ctx = ith_ctx_host(backends[i], NULL, &err);
        float x[] = {3, 4}, z[] = {1, -2}, w[] = {1, 0.5F}, y[2];
        assert_ok(ith_gated_rmsnorm_forward(
                      &ctx, ith_tensor_3d(y, ITH_F32, 1, 1, 2), ith_tensor_3d(x, ITH_F32, 1, 1, 2),
                      ith_tensor_3d(z, ITH_F32, 1, 1, 2), ith_tensor_1d(w, ITH_F32, 2), 0),
                  err);
        const double wanted[] = {3 * r * silu, 2 * r * low};
        for (int k = 0; k < 2; k++)
            if (!(fabs((double)y[k] - wanted[k]) <= 1e-6))
                fail_msg("y[%d] is %.9g, expected %.9g", k, (double)y[k], wanted[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_tokens_forward_and_back),
        cmocka_unit_test(test_convolution_at_a_border),
        cmocka_unit_test(test_scalar_rule_by_hand),
        cmocka_unit_test(test_zero_rows_have_finite_gradients),
        cmocka_unit_test(test_gated_norm_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
