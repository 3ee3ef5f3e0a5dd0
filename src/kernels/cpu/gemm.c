/* gemm.c - matrix products: cut into blocks, packed, multiplied by the level's register tile.
 *
 * A task owns a block of y, [bm, bn]. For each stretch of KC dwords of the summed index it packs
 * its rows of A once (1 MB), then, 256 columns at a time, its columns of B (512 KB, stays in L2)
 * and runs the tile over all pairs of panels. Packing twice what a neighbour packs too costs 2-4 %
 * (AMX: all packing 20 %) and saves a barrier.
 *
 * Invariants. 1. An element of y is summed over stretches of KC in order, whatever the block: the
 * cut into blocks may follow the number of threads without changing a bit. 2. bf16 outputs are
 * rounded once: several stretches meet in an f32 block in scratch. */
#include "kernels/cpu/cpu_internal.h"

#define BLOCK_M 512 /* less what is no whole tile */
#define BLOCK_N 1024
#define STRIP_N 256
#define GEMV_ROWS 4

typedef struct {
    int64_t bm, bn, num_m, num_n;
} cut;

static const ith_cpu_tile *tile_of(const ith_cpu_level *level, const ith_cpu_gemm *g)
{
    bool bf16 = level->bf16 && g->a.dtype == ITH_BF16 && g->b.dtype == ITH_BF16;
    return bf16 ? level->bf16 : level->f32;
}

static int64_t block_m(const ith_cpu_tile *tile)
{
    return BLOCK_M / tile->mr * tile->mr;
}

/* Blocks of nearly equal size, enough of them to keep all threads busy. */
static cut choose_cut(const ith_cpu_tile *tile, const ith_cpu_gemm *g, int threads)
{
    int64_t wanted = threads > 1 ? 4 * (int64_t)threads : 1;
    cut c = {0, 0, ith_div_ceil(g->m, block_m(tile)), ith_div_ceil(g->n, BLOCK_N)};
    while (c.num_m * c.num_n < wanted) {
        int64_t bm = ith_div_ceil(g->m, c.num_m), bn = ith_div_ceil(g->n, c.num_n);
        if (bn >= bm && bn > 128)
            c.num_n++;
        else if (bm > 112)
            c.num_m++;
        else
            break;
    }
    c.bm = ith_round_up(ith_div_ceil(g->m, c.num_m), tile->mr);
    c.bn = ith_round_up(ith_div_ceil(g->n, c.num_n), tile->nr);
    c.num_m = ith_div_ceil(g->m, c.bm);
    c.num_n = ith_div_ceil(g->n, c.bn);
    return c;
}

static int64_t packed_a_bytes(int64_t m)
{
    return ith_round_up(((m + 32) * ITH_CPU_KC + ITH_CPU_PACK_SLACK) * 4, 256);
}

static int64_t packed_b_bytes(int64_t n)
{
    return ith_round_up(((ith_min_i64(n, STRIP_N) + 64) * ITH_CPU_KC + ITH_CPU_PACK_SLACK) * 4,
                        256);
}

#define TILE_BYTES (32 * 32 * 4)

/* Scratch of block_run. */
static int64_t block_bytes(int64_t m, int64_t n, int64_t k)
{
    int64_t sums = k > ITH_CPU_KC ? m * ith_round_up(n, 64) * 4 : 0;
    return packed_a_bytes(m) + packed_b_bytes(n) + TILE_BYTES + ith_round_up(sums, 256);
}

/* Where tiles of a block go. */
typedef struct {
    float *sums; /* f32 block of several stretches, or NULL */
    int64_t sums_ld;
    float *tile;
    bool first; /* stretch */
} target;

static void store_rows(const ith_cpu_level *level, const ith_cpu_gemm *g, const float *c,
                       int64_t ldc, int64_t m, int64_t rows, int64_t n, int64_t cols,
                       bool accumulate)
{
    level->store_rows((char *)g->y + (m * g->y_ld + n) * ith_dtype_bytes(g->y_dtype), g->y_dtype,
                      g->y_ld, c, ldc, rows, cols, accumulate);
}

static void run_tile(const ith_cpu_level *level, const ith_cpu_tile *tile, const ith_cpu_gemm *g,
                     const target *to, const uint32_t *a, const uint32_t *b, int64_t kd, int64_t m,
                     int64_t rows, int64_t n, int64_t cols, int64_t m0, int64_t n0)
{
    bool add = g->accumulate || !to->first;
    if (to->sums) {
        tile->micro(rows, kd, a, b, to->sums + (m - m0) * to->sums_ld + (n - n0), to->sums_ld,
                    !to->first);
    } else if (g->y_dtype == ITH_F32 && cols == tile->nr) {
        tile->micro(rows, kd, a, b, (float *)g->y + m * g->y_ld + n, g->y_ld, add);
    } else {
        tile->micro(rows, kd, a, b, to->tile, tile->nr, false);
        store_rows(level, g, to->tile, tile->nr, m, rows, n, cols, add);
    }
}

/* The block [m0, m1) x [n0, n1) of y, by one thread. */
static void block_run(const ith_cpu_level *level, const ith_cpu_gemm *g, int64_t m0, int64_t m1,
                      int64_t n0, int64_t n1, char *scratch)
{
    const ith_cpu_tile *tile = tile_of(level, g);
    int64_t kc = ITH_CPU_KC * tile->k_per_dword, mr = tile->mr, nr = tile->nr;
    uint32_t *a = (uint32_t *)(void *)scratch;
    uint32_t *b = (uint32_t *)(void *)(scratch + packed_a_bytes(m1 - m0));
    target to = {.tile = (float *)(void *)((char *)b + packed_b_bytes(n1 - n0))};
    if (g->k > kc && g->y_dtype != ITH_F32) {
        to.sums = (float *)(void *)((char *)to.tile + TILE_BYTES);
        to.sums_ld = ith_round_up(n1 - n0, 64);
    }
    if (tile->begin)
        tile->begin();
    for (int64_t k = 0; k < g->k || k == 0; k += kc) {
        int64_t len = ith_min_i64(kc, g->k - k), kd = ith_cpu_tile_dwords(tile, len);
        to.first = k == 0;
        tile->pack_a(a, &g->a, m0, m1 - m0, k, len);
        for (int64_t ns = n0; ns < n1; ns += STRIP_N) {
            int64_t ne = ith_min_i64(ns + STRIP_N, n1);
            tile->pack_b(b, &g->b, ns, ne - ns, k, len);
            for (int64_t m = m0; m < m1; m += mr)
                for (int64_t n = ns; n < ne; n += nr)
                    run_tile(level, tile, g, &to, a + (m - m0) * kd, b + (n - ns) * kd, kd, m,
                             ith_min_i64(mr, m1 - m), n, ith_min_i64(nr, ne - n), m0, n0);
        }
    }
    if (tile->end)
        tile->end();
    if (to.sums)
        store_rows(level, g, to.sums, to.sums_ld, m0, m1 - m0, n0, n1 - n0, g->accumulate);
}

static bool is_gemv(const ith_cpu_gemm *g)
{
    return g->m <= GEMV_ROWS && g->a.k_contiguous && g->b.k_contiguous;
}

/* Of the largest block that any cut of this or a smaller product has: a plan for the most rows must
 * hold for fewer, whose blocks may be wider. */
int64_t ith_cpu_gemm_bytes(ith_ctx *ctx, const ith_cpu_gemm *g)
{
    if (is_gemv(g) || g->m == 0 || g->n == 0)
        return 0;
    const ith_cpu_tile *tile = tile_of(ith_cpu_level_get(), g);
    int64_t bm = ith_round_up(ith_min_i64(g->m, block_m(tile)), tile->mr),
            bn = ith_round_up(ith_min_i64(g->n, BLOCK_N), tile->nr);
    return block_bytes(bm, bn, g->k) * ith_pool_threads(ctx->pool);
}

typedef struct {
    const ith_cpu_level *level;
    const ith_cpu_gemm *g;
    cut cut;
    char *scratch;
    int64_t thread_bytes;
} gemm_job;

/* Block i: columns outer, so that neighbours in time share columns of B. */
static void gemm_task(void *arg, int64_t begin, int64_t end, int thread)
{
    const gemm_job *job = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t m = i % job->cut.num_m * job->cut.bm, n = i / job->cut.num_m * job->cut.bn;
        block_run(job->level, job->g, m, ith_min_i64(m + job->cut.bm, job->g->m), n,
                  ith_min_i64(n + job->cut.bn, job->g->n),
                  job->scratch + thread * job->thread_bytes);
    }
}

static void gemv_task(void *arg, int64_t begin, int64_t end, int thread)
{
    const gemm_job *job = arg;
    (void)thread;
    job->level->gemv(job->g, begin, end);
}

void ith_cpu_gemm_run(ith_ctx *ctx, const ith_cpu_gemm *g)
{
    if (g->m == 0 || g->n == 0 || (g->k == 0 && g->accumulate))
        return;
    const ith_cpu_level *level = ith_cpu_level_get();
    gemm_job job = {.level = level, .g = g, .scratch = ctx->scratch};
    if (is_gemv(g)) {
        ith_pool_for(ctx->pool, g->n, 64, gemv_task, &job);
        return;
    }
    job.cut = choose_cut(tile_of(level, g), g, ith_pool_threads(ctx->pool));
    job.thread_bytes = block_bytes(job.cut.bm, job.cut.bn, g->k);
    ITH_ASSERT(ctx->scratch_bytes >= job.thread_bytes * ith_pool_threads(ctx->pool));
    ith_pool_for(ctx->pool, job.cut.num_m * job.cut.num_n, 1, gemm_task, &job);
}

/* ---- the three products of a linear layer ---- */

static ith_cpu_matrix matrix(ith_tensor t, bool k_contiguous)
{
    ith_cpu_matrix m = {t.data, t.dtype, t.stride[t.ndim - 2], k_contiguous};
    return m;
}

static ith_cpu_gemm forward_of(ith_tensor y, ith_tensor x, ith_tensor w, bool accumulate)
{
    ith_cpu_gemm g = {matrix(x, true), matrix(w, true), y.data,     y.dtype,   y.stride[0],
                      y.shape[0],      y.shape[1],      x.shape[1], accumulate};
    return g;
}

static ith_cpu_gemm input_of(ith_tensor dx, ith_tensor dy, ith_tensor w, bool accumulate)
{
    ith_cpu_gemm g = {matrix(dy, true), matrix(w, false), dx.data,     dx.dtype,  dx.stride[0],
                      dx.shape[0],      dx.shape[1],      dy.shape[1], accumulate};
    return g;
}

static ith_cpu_gemm weight_of(ith_tensor dw, ith_tensor dy, ith_tensor x)
{
    ith_cpu_gemm g = {matrix(dy, false), matrix(x, false), dw.data,     dw.dtype, dw.stride[0],
                      dw.shape[0],       dw.shape[1],      dy.shape[0], true};
    return g;
}

static int64_t linear_forward_bytes(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                    bool accumulate)
{
    ith_cpu_gemm g = forward_of(y, x, w, accumulate);
    return x.dtype == ITH_F64 ? 0 : ith_cpu_gemm_bytes(ctx, &g);
}

static ith_status linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                 bool accumulate)
{
    if (x.dtype == ITH_F64)
        return ith_backend_ref()->linear_forward.run(ctx, y, x, w, accumulate);
    ith_cpu_gemm g = forward_of(y, x, w, accumulate);
    ith_cpu_gemm_run(ctx, &g);
    return ITH_OK;
}

static int64_t linear_backward_input_bytes(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor w,
                                           bool accumulate)
{
    ith_cpu_gemm g = input_of(dx, dy, w, accumulate);
    return dy.dtype == ITH_F64 ? 0 : ith_cpu_gemm_bytes(ctx, &g);
}

static ith_status linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor w,
                                        bool accumulate)
{
    if (dy.dtype == ITH_F64)
        return ith_backend_ref()->linear_backward_input.run(ctx, dx, dy, w, accumulate);
    ith_cpu_gemm g = input_of(dx, dy, w, accumulate);
    ith_cpu_gemm_run(ctx, &g);
    return ITH_OK;
}

static int64_t linear_backward_weight_bytes(ith_ctx *ctx, ith_tensor dw, ith_tensor dy,
                                            ith_tensor x)
{
    ith_cpu_gemm g = weight_of(dw, dy, x);
    return dy.dtype == ITH_F64 ? 0 : ith_cpu_gemm_bytes(ctx, &g);
}

static ith_status linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor x)
{
    if (dy.dtype == ITH_F64)
        return ith_backend_ref()->linear_backward_weight.run(ctx, dw, dy, x);
    ith_cpu_gemm g = weight_of(dw, dy, x);
    ith_cpu_gemm_run(ctx, &g);
    return ITH_OK;
}

/* ---- experts: the same products on each expert's rows; a task is a strip of one expert's y ----
 */

typedef struct {
    const ith_cpu_level *level;
    ith_cpu_gemm g; /* of one expert with all rows */
    int64_t w_step; /* elements from one expert's matrix to the next */
    const int32_t *offsets;
    int64_t strips, strip;
    bool rows_summed; /* weight gradient: the expert's rows are the summed index */
    char *scratch;
    int64_t thread_bytes;
} grouped_job;

static const void *offset_by(const void *data, ith_dtype dtype, int64_t elements)
{
    return (const char *)data + elements * ith_dtype_bytes(dtype);
}

static void grouped_expert(const grouped_job *job, int64_t e, int64_t strip, char *scratch)
{
    ith_cpu_gemm g = job->g;
    int64_t first = job->offsets[e], rows = job->offsets[e + 1] - first;
    if (rows == 0)
        return;
    g.a.data = offset_by(g.a.data, g.a.dtype, first * g.a.ld);
    if (job->rows_summed) {
        g.k = rows;
        g.b.data = offset_by(g.b.data, g.b.dtype, first * g.b.ld);
        g.y = (char *)g.y + e * job->w_step * 4;
    } else {
        g.m = rows;
        g.b.data = offset_by(g.b.data, g.b.dtype, e * job->w_step);
        g.y = (char *)g.y + first * g.y_ld * ith_dtype_bytes(g.y_dtype);
    }
    int64_t n0 = strip * job->strip, n1 = ith_min_i64(n0 + job->strip, g.n);
    if (is_gemv(&g)) {
        job->level->gemv(&g, n0, n1);
        return;
    }
    int64_t bm = block_m(tile_of(job->level, &g));
    for (int64_t m = 0; m < g.m; m += bm)
        block_run(job->level, &g, m, ith_min_i64(m + bm, g.m), n0, n1, scratch);
}

static void grouped_task(void *arg, int64_t begin, int64_t end, int thread)
{
    const grouped_job *job = arg;
    for (int64_t i = begin; i < end; i++)
        grouped_expert(job, i / job->strips, i % job->strips,
                       job->scratch + thread * job->thread_bytes);
}

static int64_t grouped_thread_bytes(const ith_cpu_gemm *g)
{
    return block_bytes(ith_min_i64(g->m, block_m(tile_of(ith_cpu_level_get(), g))),
                       ith_min_i64(g->n, STRIP_N), g->k);
}

static void grouped_run(ith_ctx *ctx, const ith_cpu_gemm *g, ith_tensor w, ith_tensor offsets,
                        bool rows_summed)
{
    grouped_job job = {.level = ith_cpu_level_get(),
                       .g = *g,
                       .w_step = w.stride[0],
                       .offsets = offsets.data,
                       .strip = STRIP_N,
                       .strips = ith_div_ceil(g->n, STRIP_N),
                       .rows_summed = rows_summed,
                       .scratch = ctx->scratch,
                       .thread_bytes = grouped_thread_bytes(g)};
    ITH_ASSERT(ctx->scratch_bytes >= job.thread_bytes * ith_pool_threads(ctx->pool));
    ith_pool_for(ctx->pool, w.shape[0] * job.strips, 1, grouped_task, &job);
}

/* One expert's matrix of [E, N, K]. */
static ith_tensor expert_of(ith_tensor w)
{
    ith_tensor t = {w.data, w.dtype, 2, {w.shape[1], w.shape[2], 1, 1}, {w.stride[1], 1, 1, 1}};
    return t;
}

static int64_t grouped_linear_forward_bytes(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                            ith_tensor offsets)
{
    (void)offsets;
    ith_cpu_gemm g = forward_of(y, x, expert_of(w), false);
    return x.dtype == ITH_F64 ? 0 : grouped_thread_bytes(&g) * ith_pool_threads(ctx->pool);
}

static ith_status grouped_linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                         ith_tensor offsets)
{
    if (x.dtype == ITH_F64)
        return ith_backend_ref()->grouped_linear_forward.run(ctx, y, x, w, offsets);
    ith_cpu_gemm g = forward_of(y, x, expert_of(w), false);
    grouped_run(ctx, &g, w, offsets, false);
    return ITH_OK;
}

static int64_t grouped_linear_backward_input_bytes(ith_ctx *ctx, ith_tensor dx, ith_tensor dy,
                                                   ith_tensor w, ith_tensor offsets)
{
    (void)offsets;
    ith_cpu_gemm g = input_of(dx, dy, expert_of(w), false);
    return dy.dtype == ITH_F64 ? 0 : grouped_thread_bytes(&g) * ith_pool_threads(ctx->pool);
}

static ith_status grouped_linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy,
                                                ith_tensor w, ith_tensor offsets)
{
    if (dy.dtype == ITH_F64)
        return ith_backend_ref()->grouped_linear_backward_input.run(ctx, dx, dy, w, offsets);
    ith_cpu_gemm g = input_of(dx, dy, expert_of(w), false);
    grouped_run(ctx, &g, w, offsets, false);
    return ITH_OK;
}

static int64_t grouped_linear_backward_weight_bytes(ith_ctx *ctx, ith_tensor dw, ith_tensor dy,
                                                    ith_tensor x, ith_tensor offsets)
{
    (void)offsets;
    ith_cpu_gemm g = weight_of(expert_of(dw), dy, x);
    return dy.dtype == ITH_F64 ? 0 : grouped_thread_bytes(&g) * ith_pool_threads(ctx->pool);
}

static ith_status grouped_linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy,
                                                 ith_tensor x, ith_tensor offsets)
{
    if (dy.dtype == ITH_F64)
        return ith_backend_ref()->grouped_linear_backward_weight.run(ctx, dw, dy, x, offsets);
    ith_cpu_gemm g = weight_of(expert_of(dw), dy, x);
    grouped_run(ctx, &g, dw, offsets, true);
    return ITH_OK;
}

#define FILL(op)                                                                                   \
    b->op.run = op;                                                                                \
    b->op.workspace = op##_bytes

void ith_cpu_fill_gemm(ith_backend *b)
{
    FILL(linear_forward);
    FILL(linear_backward_input);
    FILL(linear_backward_weight);
    FILL(grouped_linear_forward);
    FILL(grouped_linear_backward_input);
    FILL(grouped_linear_backward_weight);
}
