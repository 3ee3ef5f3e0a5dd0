/* attention_stream_forward.cu - attention forward by specialised warps, under every mask of
 * ith_seqs: bf16, head sizes up to 256.
 *
 * A block owns 128 queries of a head, 64 a warpgroup, which take turns: one multiplies while the
 * other weighs. Scores of the next tile are made beside the sum over values of the one before. */
#include "kernels/cuda/attention_stream.cuh"

/* Named barriers, one for each warpgroup's turn. */
enum { TURN = 2 };

struct forward_args {
    CUtensorMap q, k, v;
    attn_mask mask;
    head_rows o;
    float *lse; /* [T,Hq] */
    int32_t queries, q_heads, group, dim;
    float scale;
};

/* Keys of a tile, and shared memory in bytes from a multiple of 1024. */
template <int D> struct forward_layout {
    static constexpr int KEYS = D > 128 ? 64 : 128, PANELS = D / 64;
    static constexpr uint32_t OWN = 64 * D * 2, TILE = KEYS * D * 2;
    static constexpr uint32_t Q = 0, K = CONSUMERS * OWN, V = K + STAGES * TILE;
    static constexpr uint32_t BARS = V + STAGES * TILE, BYTES = BARS + 128;
};

/* Over the four lanes of a row. */
__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Scores become weights; top and sum (this lane's share) follow the new maximum, and what was
 * summed before is to be multiplied by back. */
template <int N>
__device__ __forceinline__ void weigh(float (&s)[N][4], float (&top)[2], float (&sum)[2],
                                      float (&back)[2], float scale_log2)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = top[half], added = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
            max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        max = quad_max(max);
        float base = max == -INFINITY ? 0.0f : max * scale_log2;
        back[half] = power_of_two(top[half] * scale_log2 - base);
        top[half] = max;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float p = power_of_two(s[n][2 * half + j] * scale_log2 - base);
                s[n][2 * half + j] = p;
                added += p;
            }
        sum[half] = sum[half] * back[half] + added;
    }
}

template <int D>
__device__ __forceinline__ void stream_keys(const forward_args &a, uint32_t base,
                                            const walk<forward_layout<D>::KEYS> &w, int32_t row0,
                                            int32_t head)
{
    using at = forward_layout<D>;
    constexpr int HALVES = at::KEYS / 64;
    uint32_t q_full = base + at::BARS, k_full = q_full + 8, v_full = k_full + STAGES * 8;
    uint32_t k_empty = v_full + STAGES * 8, v_empty = k_empty + STAGES * 8;
    int32_t kv = head / a.group;
    barrier_expect(q_full, CONSUMERS * at::OWN);
    for (int g = 0; g < CONSUMERS; g++)
        for (int p = 0; p < at::PANELS; p++)
            copy_box(base + at::Q + (uint32_t)(g * at::PANELS + p) * PIECE_BYTES, &a.q, q_full,
                     p * 64, row0 + g * 64, head, 0);
    for (int32_t i = 0; i < w.total(); i++) {
        uint32_t s = (uint32_t)i % STAGES, round = (uint32_t)i / STAGES;
        int32_t row = w.row(i);
        if (round > 0)
            barrier_wait(k_empty + s * 8, (round - 1) & 1);
        barrier_expect(k_full + s * 8, at::TILE);
        for (int p = 0; p < at::PANELS; p++)
            for (int h = 0; h < HALVES; h++)
                copy_box(base + at::K + s * at::TILE + (uint32_t)(p * HALVES + h) * PIECE_BYTES,
                         &a.k, k_full + s * 8, p * 64, row + h * 64, kv, 0);
        if (round > 0)
            barrier_wait(v_empty + s * 8, (round - 1) & 1);
        barrier_expect(v_full + s * 8, at::TILE);
        for (int h = 0; h < HALVES; h++)
            for (int p = 0; p < at::PANELS; p++)
                copy_box(base + at::V + s * at::TILE + (uint32_t)(h * at::PANELS + p) * PIECE_BYTES,
                         &a.v, v_full + s * 8, p * 64, row + h * 64, kv, 0);
    }
}

template <int D>
__global__ void __launch_bounds__(THREADS, 1) stream_forward(const __grid_constant__ forward_args a)
{
    using at = forward_layout<D>;
    constexpr int N = at::KEYS / 8;
    extern __shared__ char memory[];
    __shared__ stretches own[ROWS];
    uint32_t base = (shared_at(memory) + 1023) / 1024 * 1024;
    uint32_t q_full = base + at::BARS, k_full = q_full + 8, v_full = k_full + STAGES * 8;
    uint32_t k_empty = v_full + STAGES * 8, v_empty = k_empty + STAGES * 8;
    /* the longest walks first */
    int32_t rank = (int32_t)(gridDim.x - 1 - blockIdx.x), tile = rank / a.q_heads;
    int32_t head = rank - tile * a.q_heads, row0 = tile * ROWS;
    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        for (uint32_t s = 0; s < STAGES; s++) {
            barrier_init(k_full + s * 8, 1);
            barrier_init(v_full + s * 8, 1);
            barrier_init(k_empty + s * 8, CONSUMERS * 4);
            barrier_init(v_empty + s * 8, CONSUMERS * 4);
        }
        barrier_init_done();
    }
    find_stretches<ROWS>(own, a.mask, row0, false);
    walk<at::KEYS> w = walk_of<ROWS, at::KEYS>(own);
    int32_t total = w.total();
    if (threadIdx.x < GROUP_THREADS) {
        registers_give<STREAM_REGISTERS>();
        if (threadIdx.x == 0)
            stream_keys<D>(a, base, w, row0, head);
    } else {
        consumer me = enter_consumer(own, 64);
        uint32_t g = me.group;
        uint32_t qs = base + at::Q + g * at::OWN;
        float acc[D / 8][4] = {}, s[N][4], sum[2] = {}, back[2];
        float top[2] = {-INFINITY, -INFINITY}, scale_log2 = a.scale * LOG2_E;
        uint32_t left[N / 2][4];
        auto scores = [&](int32_t i) {
            uint32_t st = (uint32_t)i % STAGES;
            barrier_wait(k_full + st * 8, (uint32_t)i / STAGES & 1);
            wgmma_begin();
            product<D>(s, qs, base + at::K + st * at::TILE, PIECE_BYTES, at::KEYS * 128);
            wgmma_commit();
        };
        auto add_values = [&](int32_t i) {
            uint32_t st = (uint32_t)i % STAGES, vs = base + at::V + st * at::TILE;
            barrier_wait(v_full + st * 8, (uint32_t)i / STAGES & 1);
            wgmma_begin();
#pragma unroll
            for (uint32_t k = 0; k < at::KEYS / 16; k++)
                wgmma<false>(
                    acc, left[k],
                    operand_at<false>(vs + k / 4 * at::PANELS * PIECE_BYTES + k % 4 * 2048), true);
            wgmma_commit();
        };
        auto weights = [&](int32_t i) {
            if (me.lane == 0)
                barrier_arrive(k_empty + (uint32_t)i % STAGES * 8);
            hide_unseen<at::KEYS>(s, me, w.part(i), w.row(i), -INFINITY);
            weigh(s, top, sum, back, scale_log2);
        };
        if (g == 1) /* the first may begin */
            signal_threads<CONSUMERS * GROUP_THREADS>(TURN);
        barrier_wait(q_full, 0);
        if (total > 0) {
            scores(0);
            wgmma_wait<0>();
            wgmma_results(s);
            weights(0);
            as_left(left, s);
            for (int32_t i = 1; i < total; i++) {
                join_threads<CONSUMERS * GROUP_THREADS>(TURN + (int)g);
                scores(i);
                add_values(i - 1);
                signal_threads<CONSUMERS * GROUP_THREADS>(TURN + 1 - (int)g);
                wgmma_wait<1>();
                wgmma_results(s);
                weights(i);
                wgmma_wait<0>();
                wgmma_results(acc);
                if (me.lane == 0)
                    barrier_arrive(v_empty + (uint32_t)(i - 1) % STAGES * 8);
#pragma unroll
                for (int n = 0; n < D / 8; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        acc[n][j] *= back[j / 2];
                as_left(left, s);
            }
            add_values(total - 1);
            wgmma_wait<0>();
            wgmma_results(acc);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t row = row0 + (int32_t)g * 64 + me.warp * 16 + me.lane / 4 + 8 * half;
            float whole = quad_sum(sum[half]), factor = whole > 0 ? 1.0f / whole : 0.0f;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                acc[n][2 * half] *= factor;
                acc[n][2 * half + 1] *= factor;
            }
            if (row < a.queries && me.lane % 4 == 0)
                a.lse[row * a.q_heads + head] = top[half] * a.scale + logf(whole);
        }
        store_rows<D>(a.o, head, row0 + (int32_t)g * 64, a.queries, acc, 1.0f, a.dim);
    }
}

/* ---- host ---- */

bool ith_attention_stream_fits(ith_tensor t)
{
    return (t.dtype == ITH_BF16 || t.dtype == ITH_F32) && t.shape[2] % 8 == 0 &&
           t.shape[2] <= 256 && t.stride[2] == 1 && (uintptr_t)t.data % 16 == 0 &&
           t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 && t.shape[0] <= INT32_MAX / 2;
}

template <int D> static ith_status run_forward(ith_ctx *ctx, const forward_args &a, ith_tensor q)
{
    constexpr int BYTES = forward_layout<D>::BYTES + 1024;
    int64_t tiles = ith_div_ceil(q.shape[0], ROWS);
    ITH_CUDA_TRY(
        ctx,
        cudaFuncSetAttribute(stream_forward<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES),
        q);
    stream_forward<D><<<(unsigned)(tiles * a.q_heads), THREADS, BYTES, ith_cuda_stream(ctx)>>>(a);
    return ITH_CUDA_LAUNCHED(ctx, q);
}

ith_status ith_attention_stream_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                        ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                        bool causal)
{
    forward_args a = {};
    a.mask = mask_of(seqs, q.shape[0], k.shape[0], causal);
    a.o = rows_of(o);
    a.lse = (float *)lse.data;
    a.queries = (int32_t)q.shape[0];
    a.q_heads = (int32_t)q.shape[1];
    a.group = (int32_t)(q.shape[1] / k.shape[1]);
    a.dim = (int32_t)q.shape[2];
    a.scale = scale;
    ITH_TRY(map_heads(ctx, &a.q, q));
    ITH_TRY(map_heads(ctx, &a.k, k));
    ITH_TRY(map_heads(ctx, &a.v, v));
    int64_t dim = tile_dim(q);
    return dim == 64    ? run_forward<64>(ctx, a, q)
           : dim == 128 ? run_forward<128>(ctx, a, q)
                        : run_forward<256>(ctx, a, q);
}
