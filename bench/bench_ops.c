/* bench_ops.c - every CPU operator on the shapes of a Qwen3-0.6B step: best and median time, rate,
 * and share of what this machine can do, measured in the same run: the register tile on operands
 * in L1 for products, copying 256 MiB for the rest.
 *
 * Usage: ithaca_bench [threads=N] [tokens=T] [dtype=bf16|f32] [csv=FILE (appended)]
 * [clock=cpu: processor time, for a busy machine] */
#include "bench_common.h"

typedef struct {
    ith_ctx ctx;
    int64_t t, width, heads, kv_heads, dim, inter, words;
    ith_dtype act;
    double flops, copy; /* limits: FLOP/s, B/s */
    FILE *csv;
} bench;

static ith_tensor make2(int64_t a, int64_t b, ith_dtype dtype)
{
    return ith_tensor_2d(bench_filled(a * b, dtype), dtype, a, b);
}

static ith_tensor make1(int64_t a, ith_dtype dtype)
{
    return ith_tensor_1d(bench_filled(a, dtype), dtype, a);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(bench *b, const char *op, const char *shape, double *times, int n, double flop,
                   double bytes)
{
    qsort(times, (size_t)n, sizeof *times, by_value);
    double best = times[0], median = times[n / 2];
    bool product = flop / b->flops > bytes / b->copy;
    double rate = (product ? flop : bytes) / best / 1e9;
    double share = 100 * (product ? flop / b->flops : bytes / b->copy) / best;
    printf("%-24s %-22s %9.3f %9.3f %9.1f %-7s %5.0f %%\n", op, shape, best * 1e3, median * 1e3,
           rate, product ? "GFLOP/s" : "GB/s", share);
    fflush(stdout);
    if (b->csv)
        fprintf(b->csv, "%s,%s,%s,%d,%.6f,%.6f,%.3f,%s,%.1f\n", op, shape, ith_dtype_name(b->act),
                ith_pool_threads(b->ctx.pool), best * 1e3, median * 1e3, rate,
                product ? "GFLOP/s" : "GB/s", share);
}

#define MAX_ROUNDS 15

/* One warm-up, then at least 3 rounds, up to MAX_ROUNDS within half a second. Scratch is taken
 * once, as a plan would. */
#define BENCH(op, shape, flop, bytes, ...)                                                         \
    do {                                                                                           \
        const ith_backend *be = b->ctx.backend;                                                    \
        int64_t need = be->op.workspace ? be->op.workspace(&b->ctx, __VA_ARGS__) : 0;              \
        b->ctx.scratch = ith_malloc_aligned(ith_max_i64(need, 1), 256);                            \
        b->ctx.scratch_bytes = need;                                                               \
        double times_[MAX_ROUNDS], end_ = bench_seconds() + 0.5;                                   \
        int num_ = 0;                                                                              \
        bench_check(be->op.run(&b->ctx, __VA_ARGS__), b->ctx.err);                                 \
        while (num_ < 3 || (num_ < MAX_ROUNDS && bench_seconds() < end_)) {                        \
            double t0 = bench_seconds();                                                           \
            bench_check(be->op.run(&b->ctx, __VA_ARGS__), b->ctx.err);                             \
            times_[num_++] = bench_seconds() - t0;                                                 \
        }                                                                                          \
        ith_free(b->ctx.scratch);                                                                  \
        report(b, #op, shape, times_, num_, (double)(flop), (double)(bytes));                      \
    } while (0)

static char shape_text[64];

static const char *shape(int64_t a, int64_t b, int64_t c)
{
    snprintf(shape_text, sizeof shape_text, c ? "%lldx%lldx%lld" : "%lldx%lld", (long long)a,
             (long long)b, (long long)c);
    return shape_text;
}

/* ---- the machine's limits ---- */

enum { PEAK_KD = 128, PEAK_ROUNDS = 400 };

static void peak_task(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const ith_cpu_tile *tile = arg;
    static const float zeros[PEAK_KD * 64 + 16];
    float c[32 * 64];
    memset(c, 0, sizeof c);
    if (tile->begin)
        tile->begin();
    for (int64_t i = begin; i < end; i++)
        for (int r = 0; r < PEAK_ROUNDS; r++)
            tile->micro(tile->mr, PEAK_KD, zeros, zeros, c, tile->nr, true);
    if (tile->end)
        tile->end();
}

static double peak_flops(ith_ctx *ctx, bool bf16)
{
    const ith_cpu_level *level = ith_cpu_level_get();
    ith_cpu_tile tile = bf16 && level->bf16 ? *level->bf16 : *level->f32;
    int64_t pieces = 8 * ith_pool_threads(ctx->pool), k = PEAK_KD * tile.k_per_dword;
    double flop = 2.0 * tile.mr * tile.nr * (double)(k * PEAK_ROUNDS * pieces), best = 1e30;
    for (int i = 0; i < 8; i++) {
        double t0 = bench_seconds();
        ith_pool_for(ctx->pool, pieces, 1, peak_task, &tile);
        double t = bench_seconds() - t0;
        best = t < best ? t : best;
    }
    return flop / best;
}

typedef struct {
    char *to;
    const char *from;
} copy_arg;

static void copy_task(void *arg, int64_t begin, int64_t end, int thread)
{
    copy_arg *c = arg;
    (void)thread;
    memcpy(c->to + begin, c->from + begin, (size_t)(end - begin));
}

/* Bytes read plus bytes written. */
static double copy_rate(ith_ctx *ctx)
{
    int64_t n = 256 << 20;
    copy_arg c = {ith_malloc_aligned(n, 4096), ith_malloc_aligned(n, 4096)};
    if (!c.to || !c.from)
        exit(1);
    memset(c.to, 1, (size_t)n);
    double best = 1e30;
    for (int i = 0; i < 6; i++) {
        double t0 = bench_seconds();
        ith_pool_for(ctx->pool, n, 1 << 20, copy_task, &c);
        double t = bench_seconds() - t0;
        best = i && t < best ? t : best;
    }
    ith_free(c.to);
    union {
        const char *in;
        void *out;
    } from = {c.from};
    ith_free(from.out);
    return 2.0 * (double)n / best;
}

/* ---- operators ---- */

static void bench_linear(bench *b, int64_t n, int64_t k)
{
    int64_t size = ith_dtype_bytes(b->act), t = b->t;
    ith_tensor x = make2(t, k, b->act), w = make2(n, k, b->act), y = make2(t, n, b->act);
    ith_tensor dw = make2(n, k, ITH_F32);
    double flop = 2.0 * (double)t * (double)n * (double)k;
    int64_t bytes = (t * k + n * k + t * n) * size;
    BENCH(linear_forward, shape(t, n, k), flop, bytes, y, x, w, false);
    BENCH(linear_backward_input, shape(t, k, n), flop, bytes, x, y, w, false);
    BENCH(linear_backward_weight, shape(n, k, t), flop, bytes + 8 * n * k, dw, y, x);
    ith_tensor one = ith_row_range(x, 0, 1), y_one = ith_row_range(y, 0, 1);
    BENCH(linear_forward, shape(1, n, k), 2 * n * k, n * k * size, y_one, one, w, false);
    ith_free(x.data);
    ith_free(w.data);
    ith_free(y.data);
    ith_free(dw.data);
}

static ith_tensor heads_of(bench *b, int64_t heads)
{
    return ith_split_heads(make2(b->t, heads * b->dim, b->act), heads);
}

static void bench_attention(bench *b)
{
    int32_t *cu = bench_filled(2, ITH_I32);
    cu[1] = (int32_t)b->t;
    ith_seqs seqs = {
        .cu_seqlens = ith_tensor_1d(cu, ITH_I32, 2), .cu_host = cu, .num_docs = 1, .max_len = b->t};
    ith_tensor q = heads_of(b, b->heads), k = heads_of(b, b->kv_heads),
               v = heads_of(b, b->kv_heads);
    ith_tensor o = heads_of(b, b->heads), dq = heads_of(b, b->heads), g = heads_of(b, b->heads);
    ith_tensor dk = heads_of(b, b->kv_heads), dv = heads_of(b, b->kv_heads);
    ith_tensor lse = make2(b->t, b->heads, ITH_F32);
    double flop = 2.0 * (double)b->t * (double)b->t * (double)(b->heads * b->dim); /* causal half */
    BENCH(attention_forward, shape(b->t, b->heads, b->dim), flop, 0, o, lse, q, k, v, seqs, 0.1f,
          true);
    BENCH(attention_backward, shape(b->t, b->heads, b->dim), 2.5 * flop, 0, dq, dk, dv, g, q, k, v,
          o, lse, seqs, 0.1f, true);
    int32_t *len = bench_filled(1, ITH_I32);
    len[0] = (int32_t)b->t;
    ith_tensor kc = ith_tensor_4d(k.data, b->act, 4, 1, b->t, b->kv_heads, b->dim);
    ith_tensor vc = ith_tensor_4d(v.data, b->act, 4, 1, b->t, b->kv_heads, b->dim);
    BENCH(attention_decode, shape(b->t, b->heads, b->dim), 0,
          2 * b->t * b->kv_heads * b->dim * ith_dtype_bytes(b->act), ith_row_range(o, 0, 1),
          ith_tensor_none(), ith_row_range(q, 0, 1), kc, vc, ith_tensor_1d(len, ITH_I32, 1), 0.1f);
    ith_tensor qw = make1(b->dim, b->act), dqw = make1(b->dim, ITH_F32),
               dkw = make1(b->dim, ITH_F32);
    ith_tensor cs = make2(b->t, b->dim / 2, b->act), pos = make1(b->t, ITH_I32);
    ith_tensor kr = make2(b->t, b->kv_heads, ITH_F32);
    int64_t bytes = b->t * (b->heads + b->kv_heads) * b->dim * ith_dtype_bytes(b->act);
    BENCH(qk_norm_rope_forward, shape(b->t, b->heads, b->dim), 0, 2 * bytes, o, dk, lse, kr, q, k,
          qw, qw, cs, cs, pos, 1e-6f, 0.0f);
    BENCH(qk_norm_rope_backward, shape(b->t, b->heads, b->dim), 0, 3 * bytes, dq, dk, dqw, dkw, g,
          dv, q, k, lse, kr, qw, qw, cs, cs, pos, 0.0f);
    void *all[] = {cu,       q.data,   k.data,  v.data,   o.data, dq.data,
                   g.data,   dk.data,  dv.data, lse.data, len,    qw.data,
                   dqw.data, dkw.data, cs.data, pos.data, kr.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]);
}

static void bench_rows(bench *b)
{
    int64_t size = ith_dtype_bytes(b->act), t = b->t, d = b->width, none_bytes = t * d * size;
    ith_tensor x = make2(t, d, b->act), y = make2(t, d, b->act), z = make2(t, d, b->act);
    ith_tensor w = make1(d, b->act), dw = make1(d, ITH_F32), rstd = make1(t, ITH_F32);
    ith_tensor none = ith_tensor_none();
    BENCH(rmsnorm_forward, shape(t, d, 0), 0, 4 * none_bytes, y, z, rstd, x, z, w, 1e-6f, 0.0f);
    BENCH(rmsnorm_backward, shape(t, d, 0), 0, 3 * none_bytes, y, dw, z, none, x, rstd, w, 0.0f);
    BENCH(add, shape(t, d, 0), 0, 3 * none_bytes, y, x, z);
    ith_tensor gu = make2(t, 2 * b->inter, b->act), h = make2(t, b->inter, b->act);
    BENCH(swiglu_forward, shape(t, b->inter, 0), 0, 3 * t * b->inter * size, h, gu);
    BENCH(swiglu_backward, shape(t, b->inter, 0), 0, 6 * t * b->inter * size, gu, h, h, gu);
    ith_tensor ids = make1(t, ITH_I32), table = make2(b->words, d, b->act);
    for (int64_t i = 0; i < t; i++)
        ((int32_t *)ids.data)[i] = (int32_t)(i * 7919 % b->words);
    ith_tensor dtable = make2(b->words, d, ITH_F32);
    BENCH(embedding_forward, shape(t, d, 0), 0, 2 * none_bytes, y, ids, table);
    BENCH(embedding_backward, shape(t, d, 0), 0, none_bytes + 8 * t * d, dtable, x, ids);
    BENCH(zero, shape(b->words, d, 0), 0, b->words * d * 4, dtable);
    BENCH(cast, shape(b->words, d, 0), 0, b->words * d * (4 + size), table, dtable);
    int64_t rows = ith_min_i64(t, 256);
    ith_tensor logits = make2(rows, b->words, b->act), loss = make1(rows, ITH_F32);
    ith_tensor seeds = make1(rows, ITH_F32), labels = ith_row_range(ids, 0, rows);
    BENCH(cross_entropy, shape(rows, b->words, 0), 0, 2 * rows * b->words * size, loss, logits,
          labels, seeds, true);
    void *all[] = {x.data, y.data,   z.data,     w.data,      dw.data,     rstd.data, gu.data,
                   h.data, ids.data, table.data, dtable.data, logits.data, loss.data, seeds.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]);
}

static void bench_optimizer(bench *b)
{
    int64_t n = 1 << 24;
    ith_tensor w = make1(n, b->act), master = make1(n, ITH_F32), m = make1(n, ITH_F32);
    ith_tensor v = make1(n, ITH_F32), g = make1(n, ITH_F32), scale = make1(1, ITH_F32);
    ith_tensor sum = make1(1, ITH_F64), none = ith_tensor_none();
    ith_adamw_hyper hyper = {1e-5f, 0.9f, 0.999f, 1e-8f, 0.0f, 1};
    memset(v.data, 0, (size_t)n * 4);
    *(float *)scale.data = 1.0f;
    BENCH(sumsq_accumulate, shape(n, 1, 0), 0, 4 * n, sum, g);
    BENCH(adamw, "16M, f32 master", 0, n * (4 * 8 + ith_dtype_bytes(b->act)), w, master, m, v, g,
          scale, hyper, 1, 0, true);
    if (b->act == ITH_BF16)
        BENCH(adamw, "16M, stochastic", 0, n * (3 * 8 + 4), w, none, m, v, g, scale, hyper, 1, 0,
              true);
    void *all[] = {w.data, master.data, m.data, v.data, g.data, scale.data, sum.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]);
}

static void bench_experts(bench *b)
{
    enum { EXPERTS = 32, TOPK = 4 };
    int64_t t = b->t, d = b->width, inter = 768, rows = t * TOPK, size = ith_dtype_bytes(b->act);
    ith_tensor x = make2(rows, d, b->act), y = make2(rows, 2 * inter, b->act);
    ith_tensor w =
        ith_tensor_3d(bench_filled(EXPERTS * 2 * inter * d, b->act), b->act, EXPERTS, 2 * inter, d);
    ith_tensor dw = ith_tensor_3d(bench_filled(EXPERTS * 2 * inter * d, ITH_F32), ITH_F32, EXPERTS,
                                  2 * inter, d);
    ith_tensor offsets = make1(EXPERTS + 1, ITH_I32), logits = make2(t, EXPERTS, b->act);
    ith_tensor probs = make2(t, EXPERTS, ITH_F32), topk_w = make2(t, TOPK, ITH_F32);
    ith_tensor idx = make2(t, TOPK, ITH_I32), row_of = make2(t, TOPK, ITH_I32);
    ith_tensor source = make1(rows, ITH_I32), out = make2(t, d, b->act), none = ith_tensor_none();
    for (int64_t i = 0; i < t * EXPERTS; i++)
        if (b->act == ITH_BF16)
            ((uint16_t *)logits.data)[i] = ith_f32_to_bf16((float)(i * 7717 % 1013) / 500.0f);
        else
            ((float *)logits.data)[i] = (float)(i * 7717 % 1013) / 500.0f;
    BENCH(router_forward, shape(t, EXPERTS, TOPK), 0, t * EXPERTS * (4 + size), topk_w, idx, probs,
          logits, true);
    BENCH(expert_sort, shape(t, EXPERTS, TOPK), 0, rows * 12, offsets, source, row_of, idx);
    double flop = 2.0 * (double)rows * (double)(2 * inter) * (double)d;
    BENCH(grouped_linear_forward, shape(rows, 2 * inter, d), flop, 0, y, x, w, offsets);
    BENCH(grouped_linear_backward_input, shape(rows, d, 2 * inter), flop, 0, x, y, w, offsets);
    BENCH(grouped_linear_backward_weight, shape(2 * inter, d, rows), flop, 0, dw, y, x, offsets);
    BENCH(expert_combine, shape(t, d, TOPK), 0, (t + rows) * d * size, out, none, x, topk_w,
          row_of);
    void *all[] = {x.data,     y.data,   w.data,      dw.data,     offsets.data, logits.data,
                   probs.data, idx.data, row_of.data, source.data, out.data,     topk_w.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]);
}

/* Gated DeltaNet of Qwen3.5-0.8B: 16 heads of 128; FLOP of the recurrent form, bytes of all
 * tensors.
 */
static void bench_delta(bench *b)
{
    enum { HEADS = 16, DIM = 128, TAPS = 4 };
    int64_t t = b->t, width = HEADS * DIM, size = ith_dtype_bytes(b->act);
    int32_t cu[2] = {0, (int32_t)t};
    ith_seqs seqs = {
        .cu_seqlens = ith_tensor_1d(cu, ITH_I32, 2), .cu_host = cu, .num_docs = 1, .max_len = t};
    ith_tensor u = make2(t, 3 * width, b->act), c = make2(t, 3 * width, b->act);
    ith_tensor w = make2(3 * width, TAPS, b->act), dw = make2(3 * width, TAPS, ITH_F32);
    ith_tensor o = make2(t, width, b->act), g = make2(t, HEADS, ITH_F32);
    ith_tensor beta = make2(t, HEADS, ITH_F32), dg = make2(t, HEADS, ITH_F32);
    ith_tensor dbeta = make2(t, HEADS, ITH_F32), none = ith_tensor_none(), heads[7];
    for (int64_t i = 0; i < t * HEADS; i++) {
        ((float *)g.data)[i] = -0.01f * (float)(i * 7717 % 101);
        ((float *)beta.data)[i] = (float)(i * 7717 % 97) / 97.0f;
    }
    for (int i = 0; i < 3; i++) {
        heads[i] = ith_split_heads(ith_col_range(c, i * width, (i + 1) * width), HEADS);
        heads[3 + i] = ith_split_heads(ith_col_range(u, i * width, (i + 1) * width), HEADS);
    }
    heads[6] = ith_split_heads(o, HEADS);
    double flop = 7.0 * (double)(t * width * DIM);
    BENCH(conv1d_silu_forward, shape(t, 3 * width, TAPS), 0, 6 * t * width * size, c, u, w, none,
          seqs);
    BENCH(conv1d_silu_backward, shape(t, 3 * width, TAPS), 0, 9 * t * width * size, c, dw, u, u, w,
          seqs);
    BENCH(gated_delta_rule_forward, shape(t, HEADS, DIM), flop, 4 * t * width * size, heads[6],
          heads[0], heads[1], heads[2], g, beta, none, seqs, 0.088f);
    BENCH(gated_delta_rule_backward, shape(t, HEADS, DIM), 3 * flop, 7 * t * width * size, heads[3],
          heads[4], heads[5], dg, dbeta, none, heads[6], heads[0], heads[1], heads[2], g, beta,
          none, seqs, 0.088f);
    void *all[] = {u.data, c.data, w.data, dw.data, o.data, g.data, beta.data, dg.data, dbeta.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]);
}

static const char *option(int argc, char **argv, const char *name, const char *otherwise)
{
    size_t len = strlen(name);
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], name, len) == 0 && argv[i][len] == '=')
            return argv[i] + len + 1;
    return otherwise;
}

int main(int argc, char **argv)
{
    ith_error err = {0};
    ith_pool *pool = NULL;
    bench_check(
        ith_pool_create(&pool, (int)strtol(option(argc, argv, "threads", "0"), NULL, 10), &err),
        &err);
    if (strcmp(option(argc, argv, "clock", "wall"), "cpu") == 0)
        bench_cpu_threads = ith_pool_threads(pool);
    bench b = {.ctx = ith_ctx_host(ith_backend_cpu(), pool, &err),
               .t = strtoll(option(argc, argv, "tokens", "2048"), NULL, 10),
               .width = 1024,
               .heads = 16,
               .kv_heads = 8,
               .dim = 128,
               .inter = 3072,
               .words = 151936};
    b.act = strcmp(option(argc, argv, "dtype", "bf16"), "f32") == 0 ? ITH_F32 : ITH_BF16;
    const char *csv = option(argc, argv, "csv", NULL);
    if (csv && !(b.csv = fopen(csv, "a"))) {
        fprintf(stderr, "error: %s: cannot be opened for appending\n", csv);
        return 1;
    }
    b.flops = peak_flops(&b.ctx, b.act == ITH_BF16);
    b.copy = copy_rate(&b.ctx);
    printf("%s, %s, %d threads, %lld tokens; limits: products %.1f GFLOP/s, copy %.1f GB/s\n",
           ith_backend_cpu_name(), ith_dtype_name(b.act), ith_pool_threads(pool), (long long)b.t,
           b.flops / 1e9, b.copy / 1e9);
    printf("%-24s %-22s %9s %9s %9s %-7s %7s\n", "operator", "shape", "best ms", "median ms",
           "rate", "", "share");
    static const int64_t linears[][2] = {{4096, 1024}, {1024, 2048}, {6144, 1024}, {1024, 3072}};
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++)
        bench_linear(&b, linears[i][0], linears[i][1]);
    bench_attention(&b);
    bench_rows(&b);
    bench_experts(&b);
    bench_delta(&b);
    bench_optimizer(&b);
    if (b.csv && fclose(b.csv) != 0) {
        fprintf(stderr, "error: %s: write failed\n", csv);
        return 1;
    }
    ith_pool_destroy(pool);
    return 0;
}
