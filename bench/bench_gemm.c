/* bench_gemm.c - matrix products of a Qwen3-0.6B step beside oneDNN's on the same operands in the
 * same run: GFLOP/s of both, and the ratio. Usage: ithaca_bench_gemm [threads] [tokens]
 * [wall|cpu] [bf16|all]; cpu: processor time, for a busy machine */
#include "bench_common.h"
#include "onednn.h"

typedef struct {
    const char *name;
    int64_t n, k; /* of the weight */
} shape;

static const shape shapes[] = {
    {"qkv", 4096, 1024},  {"o", 1024, 2048},        {"gate_up", 6144, 1024},
    {"down", 1024, 3072}, {"head/8", 151936, 1024},
};

/* Best of several; both sides alternate so that other load hits both. */
static void measure(ith_ctx *ctx, const ith_cpu_gemm *g, double out[2])
{
    double flop = 2.0 * (double)g->m * (double)g->n * (double)g->k;
    ctx->scratch_bytes = ith_cpu_gemm_bytes(ctx, g);
    ctx->scratch = ith_malloc_aligned(ith_max_i64(ctx->scratch_bytes, 1), 256);
    out[0] = out[1] = 0;
    double budget = bench_seconds() + 1.5;
    for (int round = 0; round < 3 || (round < 9 && bench_seconds() < budget); round++) {
        double t0 = bench_seconds();
        ith_cpu_gemm_run(ctx, g);
        double t1 = bench_seconds();
        bool ok = ith_onednn_gemm(g);
        double t2 = bench_seconds();
        if (round && flop / (t1 - t0) > out[0])
            out[0] = flop / (t1 - t0);
        if (round && ok && flop / (t2 - t1) > out[1])
            out[1] = flop / (t2 - t1);
    }
    ith_free(ctx->scratch);
    ctx->scratch = NULL;
}

static void row(ith_ctx *ctx, const shape *s, int64_t tokens, ith_dtype act, double total[2])
{
    static const char *const kinds[] = {"forward", "dgrad", "wgrad"};
    bool head = s->n > 100000;
    int64_t t = head ? tokens / 8 : tokens;
    void *x = bench_filled(t * s->k, act), *dy = bench_filled(t * s->n, act),
         *w = bench_filled(s->n * s->k, act);
    float *dw = bench_filled(s->n * s->k, ITH_F32);
    for (int kind = 0; kind < 3; kind++) {
        ith_cpu_matrix mx = {x, act, s->k, kind != 2}, mw = {w, act, s->k, kind == 0},
                       mdy = {dy, act, s->n, kind != 2};
        ith_cpu_gemm g = {mx, mw, dy, act, s->n, t, s->n, s->k, false};
        if (kind == 1)
            g = (ith_cpu_gemm){mdy, mw, x, act, s->k, t, s->k, s->n, false};
        if (kind == 2)
            g = (ith_cpu_gemm){mdy, mx, dw, ITH_F32, s->k, s->n, s->k, t, true};
        double rate[2];
        measure(ctx, &g, rate);
        double flop = 2.0 * (double)t * (double)s->n * (double)s->k * (head ? 8 : 28);
        total[0] += flop / rate[0];
        total[1] += flop / rate[1];
        printf(
            "%-5s %-8s %-8s %6lld x %6lld x %6lld  own %7.1f  oneDNN %7.1f GFLOP/s  ratio %.2f\n",
            ith_dtype_name(act), s->name, kinds[kind], (long long)g.m, (long long)g.n,
            (long long)g.k, rate[0] / 1e9, rate[1] / 1e9, rate[1] > 0 ? rate[0] / rate[1] : 0.0);
        fflush(stdout);
    }
    ith_free(x);
    ith_free(dy);
    ith_free(w);
    ith_free(dw);
}

int main(int argc, char **argv)
{
    ith_error err = {0};
    ith_pool *pool = NULL;
    int threads = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 0;
    int64_t tokens = argc > 2 ? strtoll(argv[2], NULL, 10) : 2048;
    if (ith_pool_create(&pool, threads, &err) != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    if (argc > 3 && strcmp(argv[3], "cpu") == 0)
        bench_cpu_threads = ith_pool_threads(pool);
    ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), pool, &err);
    printf("%s, %d threads, %lld tokens\n", ith_backend_cpu_name(), ith_pool_threads(pool),
           (long long)tokens);
    static const ith_dtype acts[] = {ITH_BF16, ITH_F32};
    for (int a = 0; a < (argc > 4 && strcmp(argv[4], "bf16") == 0 ? 1 : 2); a++) {
        double total[2] = {0, 0};
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            row(&ctx, &shapes[i], tokens, acts[a], total);
        printf("%-5s all products of a step: own %.2f s, oneDNN %.2f s, ratio %.2f\n",
               ith_dtype_name(acts[a]), total[0], total[1], total[1] / total[0]);
    }
    ith_pool_destroy(pool);
    return 0;
}
