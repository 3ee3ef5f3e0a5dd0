/* attention_stream_backward.cu - attention backward by specialised warps, under every mask of
 * ith_seqs: bf16, head sizes up to 256.
 *
 * A block owns keys of a kv head and visits tiles of 64 queries of its query heads. Scores are
 * transposed (keys are rows), so that weights and their gradients are left operands of dv and dk:
 * from registers, of 128 keys, for heads up to 128. Gradients of scores pass through shared memory
 * to become the left operand of dq, which is added up in f32 memory with atomics, tile by tile in
 * the order of registers, and made bf16 by a last pass: 5 products. For wider heads, and when
 * re-runs must give equal bits, dq is made by a kernel of its own that owns queries: 7 products. */
#include "kernels/cuda/attention_stream.cuh"

enum { QUERIES = 64, MULTIPROCESSORS = 132, NEAR = 4 };

struct backward_args {
    CUtensorMap q, k, v, do_;
    attn_mask mask;
    head_rows o, g, dq, dk, dv;
    const float *lse;        /* [T,Hq] */
    float *lse_log2, *delta; /* [Hq,padded]; lse of padding is infinite */
    float *dq_sum;           /* [padded / 64, Hq, D / 64] tiles in the order of registers */
    float *parts;            /* [splits, key tiles, Hkv, {dk, dv}, D x 128], the same */
    int64_t padded;          /* queries, in whole tiles */
    int32_t queries, keys, q_heads, kv_heads, group, splits, dim, key_tiles, first_tile;
    int32_t kv_near; /* kv heads whose blocks run at a time */
    float scale;
};

/* Elements of 64 rows x 64 columns in the order of registers: [8 columns of 8][thread][4]. */
enum { FRAGMENTS = 64 * 64 };

/* Shared memory of backward, in bytes from a multiple of 1024. */
template <int D> struct backward_layout {
    static constexpr int PANELS = D / 64;
    static constexpr uint32_t TILE = 64 * D * 2;
    static constexpr uint32_t K = 0, V = K + CONSUMERS * TILE, Q = V + CONSUMERS * TILE;
    static constexpr uint32_t G = Q + STAGES * TILE, DS = G + STAGES * TILE;
    static constexpr uint32_t DQ = DS + 2 * ROWS * 128, STATS = DQ + CONSUMERS * FRAGMENTS * 4;
    static constexpr uint32_t BARS = STATS + STAGES * 2 * QUERIES * 4;
    static constexpr uint32_t BYTES = BARS + 64;
};

/* lse in powers of two and delta = sum_d do*o: 16 lanes a row and head, 8 elements at a time.
 * Clears dq in f32, if there is one, beside these reads: D columns a row and head. */
template <int D> __global__ void backward_stats(const __grid_constant__ backward_args a)
{
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, at = thread / 16;
    int32_t t = (int32_t)(at / a.q_heads), h = (int32_t)(at - (int64_t)t * a.q_heads);
    if (at <= INT32_MAX) { /* a division in 64 bits takes a hundred instructions */
        t = (int32_t)((uint32_t)at / (uint32_t)a.q_heads);
        h = (int32_t)at - t * a.q_heads;
    }
    bool live = t < a.queries;
    float sum = 0;
    for (int d = (int)threadIdx.x % 16 * 8; live && d < a.dim; d += 128) {
        float x[8], y[8];
        load_f32<bf16, 8>(x, a.g.data + t * a.g.row + h * a.g.head + d);
        load_f32<bf16, 8>(y, a.o.data + t * a.o.row + h * a.o.head + d);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += x[j] * y[j];
    }
    if (a.dq_sum && t < a.padded) { /* a warp at a time two rows of it in a row */
        float4 *zeros = reinterpret_cast<float4 *>(a.dq_sum) + thread / 32 * (D / 2);
#pragma unroll
        for (int i = 0; i < D / 64; i++)
            zeros[i * 32 + (int)threadIdx.x % 32] = {0, 0, 0, 0};
    }
    sum = group_sum(sum, 16);
    if (threadIdx.x % 16 == 0 && t < a.padded) {
        a.delta[h * a.padded + t] = sum;
        a.lse_log2[h * a.padded + t] = live ? a.lse[at] * LOG2_E : INFINITY;
    }
}

__device__ __forceinline__ void add_to_memory(float *to, const float (&x)[4])
{
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
                 "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

/* Tiles of the walk, all heads of the block one after the other. */
struct backward_step {
    int32_t head, row;
    int part;
};

__device__ __forceinline__ backward_step step_at(const walk<QUERIES> &w, int32_t i, int32_t each,
                                                 int32_t head0)
{
    int32_t h = i / each, r = i - h * each;
    return {head0 + h, w.row(r), w.part(r)};
}

/* Step i of a walk: queries and what belongs to them, in two halves. L: where they lie. */
template <typename L>
__device__ __forceinline__ void stream_step(const backward_args &a, uint32_t base, backward_step t,
                                            int32_t i, uint32_t q_full, uint32_t g_full,
                                            uint32_t empty)
{
    uint32_t s = (uint32_t)i % STAGES, round = (uint32_t)i / STAGES;
    if (round > 0)
        barrier_wait(empty + s * 8, (round - 1) & 1);
    int64_t stats = (int64_t)t.head * a.padded + t.row;
    uint32_t to = base + L::STATS + s * 2 * QUERIES * 4;
    barrier_expect(q_full + s * 8, L::TILE + QUERIES * 4);
    for (int p = 0; p < L::PANELS; p++)
        copy_box(base + L::Q + s * L::TILE + (uint32_t)p * PIECE_BYTES, &a.q, q_full + s * 8,
                 p * 64, t.row, t.head, 0);
    copy_bytes(to, a.lse_log2 + stats, QUERIES * 4, q_full + s * 8);
    barrier_expect(g_full + s * 8, L::TILE + QUERIES * 4);
    for (int p = 0; p < L::PANELS; p++)
        copy_box(base + L::G + s * L::TILE + (uint32_t)p * PIECE_BYTES, &a.do_, g_full + s * 8,
                 p * 64, t.row, t.head, 0);
    copy_bytes(to + QUERIES * 4, a.delta + stats, QUERIES * 4, g_full + s * 8);
}

/* Where the gradient of a tile's queries is added up. */
__device__ __forceinline__ float *dq_at(const backward_args &a, const backward_step &t, int panels,
                                        int panel)
{
    int64_t tile = t.row / QUERIES;
    return a.dq_sum + ((tile * a.q_heads + t.head) * panels + panel) * FRAGMENTS;
}

template <int D>
__device__ __forceinline__ void stream_queries(const backward_args &a, uint32_t base,
                                               const walk<QUERIES> &w, int32_t total, int32_t row0,
                                               int32_t kv, int32_t head0)
{
    using at = backward_layout<D>;
    uint32_t keys = base + at::BARS, q_full = keys + 8, g_full = q_full + 16, empty = g_full + 16;
    barrier_expect(keys, 2 * CONSUMERS * at::TILE);
    for (int g = 0; g < CONSUMERS; g++)
        for (int p = 0; p < at::PANELS; p++) {
            uint32_t to = base + (uint32_t)(g * at::PANELS + p) * PIECE_BYTES;
            copy_box(to + at::K, &a.k, keys, p * 64, row0 + g * 64, kv, 0);
            copy_box(to + at::V, &a.v, keys, p * 64, row0 + g * 64, kv, 0);
        }
    for (int32_t i = 0; i < total; i++)
        stream_step<at>(a, base, step_at(w, i, w.total(), head0), i, q_full, g_full, empty);
}

/* What a block owns: a tile of keys of a kv head, for some of the head's query heads. A few heads
 * at a time, so that what the running blocks share, dq in f32 above all, stays in the L2 cache;
 * among these the heavy blocks first: all heads of a tile, then the next tile. */
struct backward_block {
    int32_t tile, kv, split, head0, heads;
};

__device__ __forceinline__ backward_block block_of(const backward_args &a)
{
    int32_t near = a.kv_near, each = near * a.splits, turn = each * a.key_tiles;
    int32_t first = (int32_t)blockIdx.x / turn, at = (int32_t)blockIdx.x - first * turn;
    int32_t tile = at / each, rest = at - tile * each, kv = rest / a.splits;
    int32_t split = rest - kv * a.splits, heads = a.group / a.splits;
    kv += first * near;
    tile += a.first_tile;
    tile -= tile < a.key_tiles ? 0 : a.key_tiles;
    return {tile, kv, split, kv * a.group + split * heads, heads};
}

__device__ __forceinline__ void init_barriers(uint32_t keys, uint32_t q_full, uint32_t g_full,
                                              uint32_t empty)
{
    if (threadIdx.x > 0)
        return;
    barrier_init(keys, 1);
    for (uint32_t s = 0; s < STAGES; s++) {
        barrier_init(q_full + s * 8, 1);
        barrier_init(g_full + s * 8, 1);
        barrier_init(empty + s * 8, CONSUMERS * 4);
    }
    barrier_init_done();
}

/* Weights of scores whose columns are queries; lse: of this lane's first two columns. */
template <int N>
__device__ __forceinline__ void weights_of(float (&p)[N][4], const float (&s)[N][4],
                                           const float2 *lse, float scale_log2)
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 l = lse[n * 4];
        p[n][0] = power_of_two(s[n][0] * scale_log2 - l.x);
        p[n][1] = power_of_two(s[n][1] * scale_log2 - l.y);
        p[n][2] = power_of_two(s[n][2] * scale_log2 - l.x);
        p[n][3] = power_of_two(s[n][3] * scale_log2 - l.y);
    }
}

/* Weights become gradients of scores (without the scale). */
template <int N>
__device__ __forceinline__ void gradients_of(float (&p)[N][4], const float (&dp)[N][4],
                                             const float2 *delta)
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 d = delta[n * 4];
        p[n][0] *= dp[n][0] - d.x;
        p[n][1] *= dp[n][1] - d.y;
        p[n][2] *= dp[n][2] - d.x;
        p[n][3] *= dp[n][3] - d.y;
    }
}

/* Where a block leaves its share of dk, and `elements` further that of dv. */
__device__ __forceinline__ float *part_of(const backward_args &a, const backward_block &b,
                                          int64_t elements)
{
    return a.parts + (((int64_t)b.split * a.key_tiles + b.tile) * a.kv_heads + b.kv) * 2 * elements;
}

template <int N>
__device__ __forceinline__ void store_fragments(float *to, const float (&x)[N][4], int thread)
{
#pragma unroll
    for (int n = 0; n < N; n++)
        *reinterpret_cast<float4 *>(to + (n * 128 + thread) * 4) = {x[n][0], x[n][1], x[n][2],
                                                                    x[n][3]};
}

template <int D, bool DQ>
__global__ void __launch_bounds__(THREADS, 1)
    stream_backward(const __grid_constant__ backward_args a)
{
    using at = backward_layout<D>;
    constexpr int PANELS = D / 64;
    extern __shared__ char memory[];
    __shared__ stretches own[ROWS];
    uint32_t base = (shared_at(memory) + 1023) / 1024 * 1024;
    const char *start = memory + (base - shared_at(memory));
    uint32_t keys = base + at::BARS, q_full = keys + 8, g_full = q_full + 16, empty = g_full + 16;
    backward_block b = block_of(a);
    int32_t row0 = b.tile * ROWS;
    init_barriers(keys, q_full, g_full, empty);
    find_stretches<ROWS>(own, a.mask, row0, true);
    walk<QUERIES> w = walk_of<ROWS, QUERIES>(own);
    int32_t each = w.total(), total = each * b.heads;
    if (threadIdx.x < GROUP_THREADS) {
        registers_give<STREAM_REGISTERS>();
        if (threadIdx.x == 0)
            stream_queries<D>(a, base, w, total, row0, b.kv, b.head0);
    } else {
        consumer me = enter_consumer(own, 64);
        uint32_t g = me.group;
        uint32_t ks = base + at::K + g * at::TILE, vs = base + at::V + g * at::TILE;
        /* where this lane stores rows of its warp's gradients of scores */
        uint32_t row = (uint32_t)(me.warp * 16 + me.lane % 16);
        uint32_t ds_row = base + at::DS + g * PIECE_BYTES + row * 128;
        uint32_t ds_piece = (uint32_t)me.lane / 16;
        float dk[D / 8][4] = {}, dv[D / 8][4] = {}, s[QUERIES / 8][4];
        float scale_log2 = a.scale * LOG2_E;
        float *dq_tile = reinterpret_cast<float *>(memory + (base - shared_at(memory)) + at::DQ);
        auto scores = [&](int32_t i) {
            uint32_t st = (uint32_t)i % STAGES;
            if (i < total)
                barrier_wait(q_full + st * 8, (uint32_t)i / STAGES & 1);
            wgmma_begin();
            product<D>(s, ks, base + at::Q + st * at::TILE, PIECE_BYTES, PIECE_BYTES);
            wgmma_commit();
        };
        barrier_wait(keys, 0);
        scores(0);
        for (int32_t i = 0; i < total; i++) {
            uint32_t st = (uint32_t)i % STAGES, buffer = (uint32_t)i % 2;
            uint32_t qs = base + at::Q + st * at::TILE, gs = base + at::G + st * at::TILE;
            backward_step t = step_at(w, i, each, b.head0);
            const float2 *lse =
                reinterpret_cast<const float2 *>(start + at::STATS + st * 2 * QUERIES * 4) +
                me.lane % 4;
            const float2 *delta = lse + QUERIES / 2;
            float p[QUERIES / 8][4], dp[QUERIES / 8][4];
            uint32_t left[QUERIES / 16][4], left_ds[QUERIES / 16][4];
            wgmma_wait<0>();
            wgmma_results(s);
            barrier_wait(g_full + st * 8, (uint32_t)i / STAGES & 1);
            wgmma_begin();
            product<D>(dp, vs, gs, PIECE_BYTES, PIECE_BYTES);
            wgmma_commit();
            weights_of(p, s, lse, scale_log2);
            hide_unseen<QUERIES>(p, me, t.part, t.row, 0.0f);
            as_left(left, p);
            wgmma_begin();
            add_product(dv, left, gs);
            wgmma_commit();
            wgmma_wait<1>();
            wgmma_results(dp);
            gradients_of(p, dp, delta);
            as_left(left_ds, p);
            wgmma_begin();
            add_product(dk, left_ds, qs);
            wgmma_commit();
            float dq[8][4];
            if constexpr (DQ) {
#pragma unroll
                for (uint32_t k = 0; k < QUERIES / 16; k++)
                    store_squares(ds_row + buffer * ROWS * 128 +
                                      ((2 * k + ds_piece ^ row % 8) * 16),
                                  left_ds[k]);
                written_for_engines();
                if (me.thread == 0)
                    stores_wait_read();
                join_threads<CONSUMERS * GROUP_THREADS>(1);
                /* heads of 128: each warpgroup makes half of the columns; of 64: its keys' share */
                uint32_t ds =
                    base + at::DS + buffer * ROWS * 128 + (PANELS == 1 ? g * PIECE_BYTES : 0);
                uint32_t kb = base + at::K + g * PIECE_BYTES;
                wgmma_begin();
#pragma unroll
                for (uint32_t k = 0; k < (PANELS == 1 ? 4 : 8); k++)
                    wgmma<false, false>(
                        dq, operand_at<false>(ds + k * 2048),
                        operand_at<false>(kb + k / 4 * PANELS * PIECE_BYTES + k % 4 * 2048), k > 0);
                wgmma_commit();
            }
            wgmma_wait<0>();
            if constexpr (DQ)
                wgmma_results(dq);
            wgmma_results(dv);
            wgmma_results(dk);
            scores(i + 1);
            if (me.lane == 0)
                barrier_arrive(empty + st * 8);
            if constexpr (DQ) {
                float *from = dq_tile + g * FRAGMENTS;
                store_fragments(from, dq, me.thread);
                written_for_engines();
                join_threads<GROUP_THREADS>(2 + (int)g);
                if (me.thread == 0) {
                    add_bytes(dq_at(a, t, PANELS, PANELS == 1 ? 0 : (int)g), shared_at(from),
                              FRAGMENTS * 4);
                    stores_end();
                }
            }
        }
        wgmma_wait<0>();
        wgmma_results(s);
        if (me.thread == 0)
            stores_wait();
        int64_t end = a.keys, first = row0 + (int32_t)g * 64;
        if (a.splits == 1) {
            store_rows<D>(a.dk, b.kv, first, end, dk, a.scale, a.dim);
            store_rows<D>(a.dv, b.kv, first, end, dv, 1.0f, a.dim);
        } else {
            float *to = part_of(a, b, ROWS * D) + g * PANELS * FRAGMENTS;
            store_fragments(to, dk, me.thread);
            store_fragments(to + ROWS * D, dv, me.thread);
        }
    }
}

/* ---- backward of heads up to 256 ----
 * 64 keys a block: each warpgroup weighs half of the queries of a tile against all of them, and
 * makes half of the columns of dk and dv out of what both left in shared memory. Adding dq up in
 * memory, 64 KB a tile, would take as long as all else together: it has a kernel of its own. */

struct wide_layout {
    static constexpr int D = 256, KEYS = 64, PANELS = D / 64;
    static constexpr uint32_t TILE = 64 * D * 2, SCORES = PIECE_BYTES;
    static constexpr uint32_t K = 0, V = K + TILE, Q = V + TILE, G = Q + STAGES * TILE;
    static constexpr uint32_t P = G + STAGES * TILE, DS = P + 2 * SCORES, STATS = DS + 2 * SCORES;
    static constexpr uint32_t OWN = STATS + STAGES * 2 * QUERIES * 4;
    static constexpr uint32_t BARS = OWN + KEYS * (uint32_t)sizeof(stretches), BYTES = BARS + 64;
};

__device__ __forceinline__ void stream_wide_queries(const backward_args &a, uint32_t base,
                                                    const walk<QUERIES> &w, int32_t total,
                                                    int32_t row0, int32_t kv, int32_t head0)
{
    using at = wide_layout;
    uint32_t keys = base + at::BARS, q_full = keys + 8, g_full = q_full + 16, empty = g_full + 16;
    barrier_expect(keys, 2 * at::TILE);
    for (int p = 0; p < at::PANELS; p++) {
        uint32_t to = base + (uint32_t)p * PIECE_BYTES;
        copy_box(to + at::K, &a.k, keys, p * 64, row0, kv, 0);
        copy_box(to + at::V, &a.v, keys, p * 64, row0, kv, 0);
    }
    for (int32_t i = 0; i < total; i++)
        stream_step<at>(a, base, step_at(w, i, w.total(), head0), i, q_full, g_full, empty);
}

__device__ __forceinline__ head_rows columns_from(head_rows t, int first)
{
    t.data += t.f32 ? 2 * first : first;
    return t;
}

__global__ void __launch_bounds__(THREADS, 1)
    stream_backward_wide(const __grid_constant__ backward_args a)
{
    using at = wide_layout;
    constexpr int HALF = at::D / 2;
    extern __shared__ __align__(1024) char memory[];
    uint32_t base = shared_at(memory);
    stretches *own = reinterpret_cast<stretches *>(memory + at::OWN);
    uint32_t keys = base + at::BARS, q_full = keys + 8, g_full = q_full + 16, empty = g_full + 16;
    backward_block b = block_of(a);
    int32_t row0 = b.tile * at::KEYS;
    init_barriers(keys, q_full, g_full, empty);
    find_stretches<at::KEYS>(own, a.mask, row0, true);
    walk<QUERIES> w = walk_of<at::KEYS, QUERIES>(own);
    int32_t each = w.total(), total = each * b.heads;
    if (threadIdx.x < GROUP_THREADS) {
        registers_give<STREAM_REGISTERS>();
        if (threadIdx.x == 0)
            stream_wide_queries(a, base, w, total, row0, b.kv, b.head0);
    } else {
        consumer me = enter_consumer(own, 0);
        uint32_t g = me.group;
        uint32_t row = (uint32_t)(me.warp * 16 + me.lane % 16),
                 piece = g * 4 + (uint32_t)me.lane / 16;
        float dk[HALF / 8][4] = {}, dv[HALF / 8][4] = {}, s[4][4];
        float scale_log2 = a.scale * LOG2_E;
        auto scores = [&](int32_t i) {
            uint32_t st = (uint32_t)i % STAGES;
            if (i < total)
                barrier_wait(q_full + st * 8, (uint32_t)i / STAGES & 1);
            wgmma_begin();
            product<at::D>(s, base + at::K, base + at::Q + st * at::TILE + g * 32 * 128,
                           PIECE_BYTES, PIECE_BYTES);
            wgmma_commit();
        };
        barrier_wait(keys, 0);
        scores(0);
        for (int32_t i = 0; i < total; i++) {
            uint32_t st = (uint32_t)i % STAGES, buffer = (uint32_t)i % 2 * at::SCORES;
            uint32_t columns = g * 2 * PIECE_BYTES;
            uint32_t qs = base + at::Q + st * at::TILE, gs = base + at::G + st * at::TILE;
            uint32_t ps = base + at::P + buffer, ds = base + at::DS + buffer;
            backward_step t = step_at(w, i, each, b.head0);
            const float2 *lse =
                reinterpret_cast<const float2 *>(memory + at::STATS + st * 2 * QUERIES * 4) +
                g * 16 + me.lane % 4;
            const float2 *delta = lse + QUERIES / 2;
            float p[4][4], dp[4][4];
            uint32_t left[2][4];
            wgmma_wait<0>();
            wgmma_results(s);
            barrier_wait(g_full + st * 8, (uint32_t)i / STAGES & 1);
            wgmma_begin();
            product<at::D>(dp, base + at::V, gs + g * 32 * 128, PIECE_BYTES, PIECE_BYTES);
            wgmma_commit();
            weights_of(p, s, lse, scale_log2);
            hide_unseen<QUERIES>(p, me, t.part, t.row, 0.0f, (int32_t)g * 32);
            as_left(left, p);
#pragma unroll
            for (uint32_t k = 0; k < 2; k++)
                store_squares(ps + row * 128 + ((2 * k + piece ^ row % 8) * 16), left[k]);
            wgmma_wait<0>();
            wgmma_results(dp);
            gradients_of(p, dp, delta);
            as_left(left, p);
#pragma unroll
            for (uint32_t k = 0; k < 2; k++)
                store_squares(ds + row * 128 + ((2 * k + piece ^ row % 8) * 16), left[k]);
            written_for_engines();
            join_threads<CONSUMERS * GROUP_THREADS>(1);
            wgmma_begin();
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                wgmma<true, false>(dv, operand_at<true>(ps + k * 32),
                                   operand_at<false>(gs + columns + k * 2048), true);
                wgmma<true, false>(dk, operand_at<true>(ds + k * 32),
                                   operand_at<false>(qs + columns + k * 2048), true);
            }
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_results(dv);
            wgmma_results(dk);
            if (me.lane == 0)
                barrier_arrive(empty + st * 8);
            scores(i + 1);
        }
        wgmma_wait<0>();
        wgmma_results(s);
        if (a.splits == 1) {
            store_rows<HALF>(columns_from(a.dk, (int)g * HALF), b.kv, row0, a.keys, dk, a.scale,
                             a.dim - (int)g * HALF);
            store_rows<HALF>(columns_from(a.dv, (int)g * HALF), b.kv, row0, a.keys, dv, 1.0f,
                             a.dim - (int)g * HALF);
        } else {
            float *to = part_of(a, b, at::PANELS * FRAGMENTS) + g * 2 * FRAGMENTS;
            store_fragments(to, dk, me.thread);
            store_fragments(to + at::PANELS * FRAGMENTS, dv, me.thread);
        }
    }
}

/* ---- dq by itself ----
 * As in forward a block owns 128 queries; it visits tiles of 64 keys. */

template <int D> struct dq_layout {
    static constexpr int KEYS = 64, PANELS = D / 64;
    static constexpr int K_STAGES = D > 128 ? 2 : 3, V_STAGES = D > 128 ? 1 : 3;
    static constexpr uint32_t OWN = 64 * D * 2, TILE = KEYS * D * 2;
    static constexpr uint32_t Q = 0, G = Q + CONSUMERS * OWN, K = G + CONSUMERS * OWN;
    static constexpr uint32_t V = K + K_STAGES * TILE, SEEN = V + V_STAGES * TILE;
    static constexpr uint32_t ROWS_FULL = SEEN + ROWS * (uint32_t)sizeof(stretches);
    static constexpr uint32_t K_FULL = ROWS_FULL + 8, V_FULL = K_FULL + K_STAGES * 8;
    static constexpr uint32_t K_EMPTY = V_FULL + V_STAGES * 8, V_EMPTY = K_EMPTY + K_STAGES * 8;
    static constexpr uint32_t BYTES = V_EMPTY + V_STAGES * 8;
};

/* Tile i of a walk over keys, into stage i % COUNT of its operand. */
template <int D, int COUNT>
__device__ __forceinline__ void stream_tile(const CUtensorMap *map, uint32_t to, uint32_t full,
                                            uint32_t empty, int32_t i, int32_t row, int32_t head)
{
    uint32_t s = (uint32_t)i % COUNT, round = (uint32_t)i / COUNT;
    if (round > 0)
        barrier_wait(empty + s * 8, (round - 1) & 1);
    barrier_expect(full + s * 8, dq_layout<D>::TILE);
    for (int p = 0; p < D / 64; p++)
        copy_box(to + s * dq_layout<D>::TILE + (uint32_t)p * PIECE_BYTES, map, full + s * 8, p * 64,
                 row, head, 0);
}

template <int D>
__global__ void __launch_bounds__(THREADS, 1) stream_dq(const __grid_constant__ backward_args a)
{
    using at = dq_layout<D>;
    constexpr int N = at::KEYS / 8;
    extern __shared__ __align__(1024) char memory[];
    stretches *own = reinterpret_cast<stretches *>(memory + at::SEEN);
    uint32_t base = shared_at(memory), rows_full = base + at::ROWS_FULL;
    int32_t rank = (int32_t)(gridDim.x - 1 - blockIdx.x), tile = rank / a.q_heads;
    int32_t head = rank - tile * a.q_heads, row0 = tile * ROWS;
    if (threadIdx.x == 0) {
        barrier_init(rows_full, 1);
        for (uint32_t s = 0; s < at::K_STAGES; s++) {
            barrier_init(base + at::K_FULL + s * 8, 1);
            barrier_init(base + at::K_EMPTY + s * 8, CONSUMERS * 4);
        }
        for (uint32_t s = 0; s < at::V_STAGES; s++) {
            barrier_init(base + at::V_FULL + s * 8, 1);
            barrier_init(base + at::V_EMPTY + s * 8, CONSUMERS * 4);
        }
        barrier_init_done();
    }
    find_stretches<ROWS>(own, a.mask, row0, false);
    walk<at::KEYS> w = walk_of<ROWS, at::KEYS>(own);
    int32_t total = w.total();
    if (threadIdx.x < GROUP_THREADS) {
        registers_give<STREAM_REGISTERS>();
        if (threadIdx.x == 0) {
            barrier_expect(rows_full, 2 * CONSUMERS * at::OWN);
            for (int g = 0; g < CONSUMERS; g++)
                for (int p = 0; p < at::PANELS; p++) {
                    uint32_t to = base + (uint32_t)(g * at::PANELS + p) * PIECE_BYTES;
                    copy_box(to + at::Q, &a.q, rows_full, p * 64, row0 + g * 64, head, 0);
                    copy_box(to + at::G, &a.do_, rows_full, p * 64, row0 + g * 64, head, 0);
                }
            for (int32_t i = 0; i < total; i++) {
                stream_tile<D, at::K_STAGES>(&a.k, base + at::K, base + at::K_FULL,
                                             base + at::K_EMPTY, i, w.row(i), head / a.group);
                stream_tile<D, at::V_STAGES>(&a.v, base + at::V, base + at::V_FULL,
                                             base + at::V_EMPTY, i, w.row(i), head / a.group);
            }
        }
    } else {
        consumer me = enter_consumer(own, 64);
        uint32_t g = me.group;
        uint32_t qs = base + at::Q + g * at::OWN, gs = base + at::G + g * at::OWN;
        float acc[D / 8][4] = {}, s[N][4], lse[2], delta[2], scale_log2 = a.scale * LOG2_E;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t row = row0 + (int32_t)g * 64 + me.warp * 16 + me.lane / 4 + 8 * half;
            lse[half] = a.lse_log2[head * a.padded + row];
            delta[half] = a.delta[head * a.padded + row];
        }
        auto scores = [&](int32_t i) {
            uint32_t st = (uint32_t)i % at::K_STAGES;
            if (i < total)
                barrier_wait(base + at::K_FULL + st * 8, (uint32_t)i / at::K_STAGES & 1);
            wgmma_begin();
            product<D>(s, qs, base + at::K + st * at::TILE, PIECE_BYTES, PIECE_BYTES);
            wgmma_commit();
        };
        barrier_wait(rows_full, 0);
        wgmma_results(acc); /* zeros are there before products begin */
        scores(0);
        for (int32_t i = 0; i < total; i++) {
            uint32_t ks = base + at::K + (uint32_t)i % at::K_STAGES * at::TILE;
            uint32_t st = (uint32_t)i % at::V_STAGES;
            float p[N][4], dp[N][4];
            uint32_t left[N / 2][4];
            wgmma_wait<0>();
            wgmma_results(s);
            wgmma_results(acc);
            if (me.lane == 0 && i > 0)
                barrier_arrive(base + at::K_EMPTY + (uint32_t)(i - 1) % at::K_STAGES * 8);
            barrier_wait(base + at::V_FULL + st * 8, (uint32_t)i / at::V_STAGES & 1);
            wgmma_begin();
            product<D>(dp, gs, base + at::V + st * at::TILE, PIECE_BYTES, PIECE_BYTES);
            wgmma_commit();
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    p[n][j] = power_of_two(s[n][j] * scale_log2 - lse[j / 2]);
            hide_unseen<at::KEYS>(p, me, w.part(i), w.row(i), 0.0f);
            wgmma_wait<0>();
            wgmma_results(dp);
            if (me.lane == 0)
                barrier_arrive(base + at::V_EMPTY + st * 8);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    p[n][j] *= dp[n][j] - delta[j / 2];
            as_left(left, p);
            wgmma_begin();
            add_product(acc, left, ks);
            wgmma_commit();
            scores(i + 1);
        }
        wgmma_wait<0>();
        wgmma_results(s);
        wgmma_results(acc);
        store_rows<D>(a.dq, head, row0 + (int32_t)g * 64, a.queries, acc, a.scale, a.dim);
    }
}

/* A tile of 64 x 64 in the order of registers, summed over `count` of them `stride` apart, times
 * factor, becomes rows. 128 threads. */
__device__ __forceinline__ void unfold(const head_rows &t, int64_t head, int64_t row0, int64_t end,
                                       int panel, int dim, const float *from, int count,
                                       int64_t stride, float factor)
{
    __shared__ alignas(16) uint32_t words[64][36];
    int thread = (int)threadIdx.x, lane = thread % 32, r = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float4 x = *reinterpret_cast<const float4 *>(from + (n * 128 + thread) * 4);
        for (int i = 1; i < count; i++) {
            float4 y =
                *reinterpret_cast<const float4 *>(from + i * stride + (n * 128 + thread) * 4);
            x.x += y.x;
            x.y += y.y;
            x.z += y.z;
            x.w += y.w;
        }
        words[r][n * 4 + lane % 4] = two(x.x * factor, x.y * factor);
        words[r + 8][n * 4 + lane % 4] = two(x.z * factor, x.w * factor);
        int64_t at = (row0 + r) * t.row + head * t.head + panel * 64 + n * 8 + lane % 4 * 2;
        bool column = t.f32 && panel * 64 + n * 8 < dim;
        if (column && row0 + r < end)
            store_pair(t, at, x.x * factor, x.y * factor);
        if (column && row0 + r + 8 < end)
            store_pair(t, at + 8 * t.row, x.z * factor, x.w * factor);
    }
    if (t.f32)
        return;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; n++) {
        int64_t row = row0 + n * 16 + thread / 8;
        int column = panel * 64 + thread % 8 * 8;
        if (row < end && column < dim)
            *reinterpret_cast<uint4 *>(t.data + row * t.row + head * t.head + column) =
                *reinterpret_cast<const uint4 *>(&words[n * 16 + thread / 8][thread % 8 * 4]);
    }
}

/* Blocks: tiles of 64 rows, panels, heads. */
__global__ void __launch_bounds__(128) finish_dq(const __grid_constant__ backward_args a)
{
    int64_t tile = blockIdx.x, h = blockIdx.z;
    const float *from = a.dq_sum + ((tile * a.q_heads + h) * gridDim.y + blockIdx.y) * FRAGMENTS;
    unfold(a.dq, h, tile * QUERIES, a.queries, (int)blockIdx.y, a.dim, from, 1, 0, a.scale);
}

/* Blocks: tiles of 64 keys, panels, {dk, dv} of each kv head. */
__global__ void __launch_bounds__(128) finish_dkv(const __grid_constant__ backward_args a)
{
    int64_t tile = blockIdx.x, kv = blockIdx.z / 2, panels = gridDim.y;
    bool values = blockIdx.z % 2;
    int64_t each = gridDim.x / a.key_tiles; /* of a block */
    int64_t at = ((tile / each * a.kv_heads + kv) * 2 + values) * each + tile % each;
    at = at * panels + blockIdx.y;
    int64_t stride = (int64_t)gridDim.x * a.kv_heads * 2 * panels * FRAGMENTS;
    unfold(values ? a.dv : a.dk, kv, tile * 64, a.keys, (int)blockIdx.y, a.dim,
           a.parts + at * FRAGMENTS, a.splits, stride, values ? 1.0f : a.scale);
}

/* ---- host ---- */

static int64_t padded_rows(int64_t rows)
{
    return ith_round_up(rows, ROWS);
}

/* Keys of a block. */
static int64_t keys_of(int64_t dim)
{
    return dim > 128 ? 64 : ROWS;
}

/* How many blocks share the query heads of a kv head, so that every multiprocessor gets work of
 * even length: two blocks or more, when those that see few queries are not counted. */
static int32_t splits_of(ith_tensor q, ith_tensor k, ith_seqs seqs)
{
    int64_t kv_heads = k.shape[1], group = q.shape[1] / kv_heads, splits = 1;
    int64_t tiles = ith_div_ceil(k.shape[0], keys_of(tile_dim(q)));
    int64_t heavy = tiles * kv_heads / (seqs.noisy.ndim != 0 ? 2 : 1);
    while (heavy * splits < 2 * MULTIPROCESSORS && group % (2 * splits) == 0)
        splits *= 2;
    return (int32_t)splits;
}

static int64_t parts_bytes(ith_tensor q, ith_tensor k, ith_seqs seqs)
{
    int64_t splits = splits_of(q, k, seqs);
    return splits == 1 ? 0 : splits * padded_rows(k.shape[0]) * k.shape[1] * tile_dim(q) * 8;
}

/* Whether dq is added up in memory. */
static bool adds_dq(ith_ctx *ctx, ith_tensor q)
{
    return !ctx->deterministic && tile_dim(q) <= 128;
}

int64_t ith_attention_stream_workspace(ith_ctx *ctx, ith_tensor q, ith_tensor k, ith_seqs seqs)
{
    int64_t stats = padded_rows(q.shape[0]) * q.shape[1] * 4;
    int64_t dq = adds_dq(ctx, q) ? stats * tile_dim(q) : 0;
    return 2 * stats + dq + parts_bytes(q, k, seqs) + 4 * 256;
}

template <int D> static ith_status run_backward(ith_ctx *ctx, const backward_args &a, ith_tensor q)
{
    cudaStream_t stream = ith_cuda_stream(ctx);
    unsigned tiles = (unsigned)(a.padded / QUERIES), panels = D / 64;
    int64_t lanes = a.padded * a.q_heads * 16;
    bool adds = a.dq_sum != NULL;
    auto kernel = stream_backward_wide;
    int bytes = wide_layout::BYTES;
    if constexpr (D <= 128) {
        kernel = adds ? stream_backward<D, true> : stream_backward<D, false>;
        bytes = backward_layout<D>::BYTES + 1024;
    }
    backward_stats<D><<<(unsigned)ith_div_ceil(lanes, 256), 256, 0, stream>>>(a);
    ITH_CUDA_TRY(
        ctx, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), q);
    if (a.keys > 0)
        kernel<<<(unsigned)(a.key_tiles * a.kv_heads * a.splits), THREADS, bytes, stream>>>(a);
    if (adds) {
        finish_dq<<<dim3(tiles, panels, (unsigned)a.q_heads), 128, 0, stream>>>(a);
    } else {
        bytes = dq_layout<D>::BYTES;
        ITH_CUDA_TRY(
            ctx,
            cudaFuncSetAttribute(stream_dq<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            q);
        stream_dq<D><<<(unsigned)(a.padded / (ROWS)*a.q_heads), THREADS, bytes, stream>>>(a);
    }
    if (a.splits > 1 && a.keys > 0)
        finish_dkv<<<dim3((unsigned)(a.key_tiles * keys_of(D) / 64), panels,
                          (unsigned)(2 * a.kv_heads)),
                     128, 0, stream>>>(a);
    return ITH_CUDA_LAUNCHED(ctx, q);
}

ith_status ith_attention_stream_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                         ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                         ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                         bool causal, ith_carve *scratch)
{
    backward_args a = {};
    int64_t d = tile_dim(q), heads = q.shape[1];
    a.mask = mask_of(seqs, q.shape[0], k.shape[0], causal);
    a.o = rows_of(o);
    a.g = rows_of(do_);
    a.dq = rows_of(dq);
    a.dk = rows_of(dk);
    a.dv = rows_of(dv);
    a.lse = (const float *)lse.data;
    a.queries = (int32_t)q.shape[0];
    a.keys = (int32_t)k.shape[0];
    a.padded = padded_rows(a.queries);
    a.q_heads = (int32_t)heads;
    a.kv_heads = (int32_t)k.shape[1];
    a.group = (int32_t)(heads / k.shape[1]);
    a.dim = (int32_t)q.shape[2];
    a.key_tiles = (int32_t)ith_div_ceil(a.keys, keys_of(d));
    a.first_tile = a.mask.noisy ? a.key_tiles / 2 : 0;
    a.splits = splits_of(q, k, seqs);
    a.kv_near = a.kv_heads % NEAR == 0 ? NEAR : a.kv_heads;
    a.scale = scale;
    a.lse_log2 = (float *)ith_carve_take(scratch, a.padded * heads * 4);
    a.delta = (float *)ith_carve_take(scratch, a.padded * heads * 4);
    if (adds_dq(ctx, q))
        a.dq_sum = (float *)ith_carve_take(scratch, a.padded * heads * d * 4);
    if (a.splits > 1)
        a.parts = (float *)ith_carve_take(scratch, parts_bytes(q, k, seqs));
    ITH_TRY(map_heads(ctx, &a.q, q));
    ITH_TRY(map_heads(ctx, &a.k, k));
    ITH_TRY(map_heads(ctx, &a.v, v));
    ITH_TRY(map_heads(ctx, &a.do_, do_));
    if (d == 64)
        return run_backward<64>(ctx, a, q);
    return d == 128 ? run_backward<128>(ctx, a, q) : run_backward<256>(ctx, a, q);
}
