/* attention_stream.cuh - what the warp-specialised kernels of attention share: which tiles a block
 * visits, and products of tiles in shared memory.
 *
 * A block has three warpgroups. A thread of the first streams tiles into shared memory by the bulk
 * copy engine; the other two multiply. Only tiles that some of the block's rows see are visited,
 * and only tiles that not all of a warp's rows see are masked. Tiles are pieces of 64 x 64
 * (hopper.cuh). */
#ifndef ITH_KERNELS_CUDA_ATTENTION_STREAM_CUH
#define ITH_KERNELS_CUDA_ATTENTION_STREAM_CUH

#include "kernels/cuda/attention_mask.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.h"

/* Warpgroups: one that streams, and those that multiply, 64 rows each. */
enum {
    GROUP_THREADS = 128,
    CONSUMERS = 2,
    THREADS = GROUP_THREADS * (CONSUMERS + 1),
    ROWS = 64 * CONSUMERS,
    STAGES = 2
};
enum { STREAM_REGISTERS = 24, CONSUMER_REGISTERS = 240 }; /* of a thread; 168 on average */

#define LOG2_E 1.4426950408889634f

/* One tensor [T,heads,dim], bf16 or, of results that are parts of a sum, f32; strides in elements.
 */
struct head_rows {
    bf16 *data;
    int64_t row, head;
    bool f32;
};

/* Two neighbours of a row; at: elements from the tensor's first. */
__device__ __forceinline__ void store_pair(const head_rows &t, int64_t at, float x, float y)
{
    if (t.f32)
        *reinterpret_cast<float2 *>(reinterpret_cast<float *>(t.data) + at) = {x, y};
    else
        *reinterpret_cast<uint32_t *>(t.data + at) = two(x, y);
}

/* ---- the walk ---- */

/* What the 16 rows of a warp see of a part: all see [lo, hi). */
struct seen_by_all {
    int32_t lo[2], hi[2];
};

/* Tiles of both parts, from begin[part] on; tile i of a walk. */
template <int OTHER> struct walk {
    int32_t begin[2], count[2];

    __device__ __forceinline__ int32_t total() const
    {
        return count[0] + count[1];
    }
    __device__ __forceinline__ int part(int32_t i) const
    {
        return i >= count[0];
    }
    __device__ __forceinline__ int32_t row(int32_t i) const
    {
        return i < count[0] ? begin[0] + i * OTHER : begin[1] + (i - count[0]) * OTHER;
    }
};

/* own[ROWS] is filled by the block's first ROWS threads. All threads. */
template <int ROWS>
__device__ __forceinline__ void find_stretches(stretches *own, const attn_mask &mask, int32_t row0,
                                               bool of_key)
{
    if (threadIdx.x < ROWS)
        own[threadIdx.x] = stretches_of(mask, row0 + (int32_t)threadIdx.x, of_key);
    __syncthreads();
}

/* Tiles begin at multiples of OTHER. */
template <int ROWS, int OTHER> __device__ __forceinline__ walk<OTHER> walk_of(const stretches *own)
{
    walk<OTHER> w;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        int32_t lo = INT32_MAX, hi = 0;
#pragma unroll
        for (int r = (int)threadIdx.x % 32; r < ROWS; r += 32)
            if (own[r].hi[part] > own[r].lo[part]) {
                lo = min(lo, own[r].lo[part]);
                hi = max(hi, own[r].hi[part]);
            }
        lo = __reduce_min_sync(0xffffffffu, lo) / OTHER * OTHER;
        hi = __reduce_max_sync(0xffffffffu, hi);
        w.begin[part] = lo;
        w.count[part] = hi > lo ? (hi - lo + OTHER - 1) / OTHER : 0;
    }
    return w;
}

/* own: of the warp's 16 rows. */
__device__ __forceinline__ seen_by_all all_see(const stretches *own)
{
    seen_by_all s;
    int lane = (int)threadIdx.x % 16;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        s.lo[part] = __reduce_max_sync(0xffffffffu, own[lane].lo[part]);
        s.hi[part] = __reduce_min_sync(0xffffffffu, own[lane].hi[part]);
    }
    return s;
}

template <int OTHER>
__device__ __forceinline__ bool covers(const seen_by_all &s, int part, int32_t row)
{
    int32_t lo = part ? s.lo[1] : s.lo[0], hi = part ? s.hi[1] : s.hi[0];
    return row >= lo && row + OTHER <= hi;
}

/* s = value where the row of own[lane/4 (+ 8)] does not see the column. column0: of s[0]. */
template <int N>
__device__ __forceinline__ void hide(float (&s)[N][4], const stretches *own, int part,
                                     int32_t column0, int lane, float value)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int32_t lo = own[lane / 4 + 8 * half].lo[part], hi = own[lane / 4 + 8 * half].hi[part];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int32_t c = column0 + n * 8 + lane % 4 * 2 + j;
                if (c < lo || c >= hi)
                    s[n][2 * half + j] = value;
            }
    }
}

/* A thread of those that multiply. seen: what its warp's 16 rows see. */
struct consumer {
    int thread, lane, warp; /* of its warpgroup; of its warp; of the warpgroup's */
    uint32_t group;
    const stretches *seen;
    seen_by_all all;
};

/* rows: how many a warpgroup has of own; 0: all have the same. */
__device__ __forceinline__ consumer enter_consumer(const stretches *own, uint32_t rows)
{
    consumer me;
    registers_take<CONSUMER_REGISTERS>();
    me.thread = (int)threadIdx.x % GROUP_THREADS;
    me.lane = me.thread % 32;
    me.warp = me.thread / 32;
    me.group = threadIdx.x / GROUP_THREADS - 1;
    me.seen = own + me.group * rows + me.warp * 16;
    me.all = all_see(me.seen);
    return me;
}

/* What the warp's rows do not see of a tile of OTHER columns from `column` on; s begins `skip`
 * columns further. */
template <int OTHER, int N>
__device__ __forceinline__ void hide_unseen(float (&s)[N][4], const consumer &me, int part,
                                            int32_t column, float value, int32_t skip = 0)
{
    if (!covers<OTHER>(me.all, part, column))
        hide(s, me.seen, part, column + skip, me.lane, value);
}

/* Results of 16 N columns as left operands. */
template <int N>
__device__ __forceinline__ void as_left(uint32_t (&a)[N / 2][4], const float (&x)[N][4])
{
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        a[k][0] = two(x[2 * k][0], x[2 * k][1]);
        a[k][1] = two(x[2 * k][2], x[2 * k][3]);
        a[k][2] = two(x[2 * k + 1][0], x[2 * k + 1][1]);
        a[k][3] = two(x[2 * k + 1][2], x[2 * k + 1][3]);
    }
}

/* Own rows: factor * acc. row0: of the warpgroup. */
template <int D>
__device__ __forceinline__ void store_rows(const head_rows &t, int64_t head, int64_t row0,
                                           int64_t end, const float (&acc)[D / 8][4], float factor,
                                           int dim)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = row0 + warp * 16 + lane / 4 + 8 * half;
        if (row >= end)
            continue;
        int64_t at = row * t.row + head * t.head + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (n * 8 < dim)
                store_pair(t, at + n * 8, acc[n][2 * half] * factor, acc[n][2 * half + 1] * factor);
    }
}

/* c = rows of A times rows of B, both D long. */
template <int D, int N>
__device__ __forceinline__ void product(float (&c)[N][4], uint32_t a, uint32_t b, uint32_t a_panel,
                                        uint32_t b_panel)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma<true, true>(c, operand_at<true>(a + k / 4 * a_panel + k % 4 * 32),
                          operand_at<true>(b + k / 4 * b_panel + k % 4 * 32), k > 0);
}

/* acc += a B; rows of B are the inner index. */
template <int N, int K>
__device__ __forceinline__ void add_product(float (&acc)[N][4], const uint32_t (&a)[K][4],
                                            uint32_t b)
{
#pragma unroll
    for (int k = 0; k < K; k++)
        wgmma<false>(acc, a[k], operand_at<false>(b + (uint32_t)k * 2048), true);
}

/* ---- host ---- */

static inline head_rows rows_of(ith_tensor t)
{
    return {(bf16 *)t.data, t.stride[0], t.stride[1], t.dtype == ITH_F32};
}

/* Heads are the slowest index. */
static inline ith_status map_heads(ith_ctx *ctx, CUtensorMap *map, ith_tensor t)
{
    if (t.shape[0] == 0) /* no tile of it is visited */
        return ITH_OK;
    ith_tensor heads = ith_tensor_3d(t.data, t.dtype, t.shape[1], t.shape[0], t.shape[2]);
    heads.stride[0] = t.stride[1];
    heads.stride[1] = t.stride[0];
    return ith_cuda_tensor_map(ctx, map, heads);
}

/* Columns of the tiles that hold a head. */
static inline int64_t tile_dim(ith_tensor q)
{
    return q.shape[2] <= 64 ? 64 : q.shape[2] <= 128 ? 128 : 256;
}

#endif
