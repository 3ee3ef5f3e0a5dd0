/* attention_tiles.cu - attention on tensor cores under every mask of ith_seqs: bf16, head sizes up
 * to 128, any row stride that is 16-byte aligned. No atomics: the bits never vary.
 *
 * A block owns rows of one head, 16 or 32 per warp, and walks tiles of 64 rows of the other side
 * through two stages of shared memory; only tiles that some of its rows see are visited. Forward
 * and dq own queries; dk and dv own keys and sum over the query heads of their kv head. Products
 * are mma.sync m16n8k16: what one product leaves in registers is the next one's left operand.
 * Products computed: 2 forward, 7 backward (cuDNN's 5, for it adds dq up with atomics). */
#include "kernels/cuda/attention_mask.cuh"

enum { WARPS = 4, THREADS = 32 * WARPS, OTHER = 64, MAX_DIM = 128 };

#define LOG2_E 1.4426950408889634f

/* One tensor [T,heads,dim]; strides in elements. */
struct head_rows {
    bf16 *data;
    int64_t row, head;
};

struct tiles_args {
    attn_mask mask;
    head_rows q, k, v, o, do_, dq, dk, dv;
    float *lse, *delta; /* [T,Hq] */
    int32_t q_heads, group, dim;
    float scale;
};

/* ---- fragments: rows lane/4 and lane/4 + 8, columns 2 (lane%4) and the next, of 16 x 8 ---- */

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two units in the last place: far below the rounding of weights to bf16. */
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t two(float lo, float hi)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&x);
}

/* Results of two column tiles as the left operand of 16 columns. */
__device__ __forceinline__ void as_left(uint32_t (&a)[4], const float (&x)[4], const float (&y)[4])
{
    a[0] = two(x[0], x[1]);
    a[1] = two(x[2], x[3]);
    a[2] = two(y[0], y[1]);
    a[3] = two(y[2], y[3]);
}

/* ---- tiles in shared memory: rows of D elements and 8 more, so that 8 rows lie in 8 bank groups
 * ---- */

template <int D> constexpr int PITCH = D + 8;
template <int D> constexpr int TILE = OTHER *PITCH<D>;

__device__ __forceinline__ uint32_t shared_at(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Rows [row0, row0 + ROWS) of one head; zeros from `end` and from dim on. */
template <int D, int ROWS>
__device__ __forceinline__ void fetch_rows(bf16 *to, const head_rows &t, int64_t head, int32_t row0,
                                           int32_t end, int dim)
{
    const bf16 *from = t.data + head * t.head;
    for (int n = (int)threadIdx.x; n < ROWS * (D / 8); n += THREADS) {
        int r = n / (D / 8), c = n % (D / 8) * 8;
        bool live = row0 + r < end && c < dim;
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_at(to + r * PITCH<D> + c)),
            "l"(live ? from + (row0 + r) * t.row + c : from), "r"(live ? 16 : 0)
            : "memory");
    }
}

/* Where a lane reads matrices of a tile: as left operand, as right operand with columns as rows of
 * the tile, and as right operand with columns as columns. Bytes. */
template <int D> __device__ __forceinline__ uint32_t left_place(int lane)
{
    return (uint32_t)(lane % 16 * PITCH<D> + lane / 16 * 8) * 2;
}

template <int D> __device__ __forceinline__ uint32_t right_place(int lane)
{
    return (uint32_t)((lane % 8 + lane / 16 * 8) * PITCH<D> + lane / 8 % 2 * 8) * 2;
}

template <int D> __device__ __forceinline__ uint32_t turned_place(int lane)
{
    return (uint32_t)((lane % 8 + lane / 8 % 2 * 8) * PITCH<D> + lane / 16 * 8) * 2;
}

/* c = A B^T, A: 16 M rows, B: 8 NT rows of a tile. */
template <int D, int M, int NT>
__device__ __forceinline__ void product(float (&c)[M][NT][4], uint32_t left, uint32_t right)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                c[m][n][i] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrices(a[m], left + (uint32_t)(m * 16 * PITCH<D> + k * 16) * 2);
#pragma unroll
        for (int n = 0; n < NT / 2; n++) {
            uint32_t b[4];
            load_matrices(b, right + (uint32_t)(n * 16 * PITCH<D> + k * 16) * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(c[m][2 * n], a[m], b[0], b[1]);
                multiply_add(c[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* acc += x B, x: results [16 M rows, 8 NT columns], B: 8 NT rows of D of a tile. */
template <int D, int M, int NT>
__device__ __forceinline__ void add_product(float (&acc)[M][D / 8][4], const float (&x)[M][NT][4],
                                            uint32_t turned)
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            as_left(a[m], x[m][2 * k], x[m][2 * k + 1]);
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            uint32_t b[4];
            load_transposed(b, turned + (uint32_t)(k * 16 * PITCH<D> + d * 16) * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add(acc[m][2 * d], a[m], b[0], b[1]);
                multiply_add(acc[m][2 * d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* Own rows: factor * acc of the row's half (0: lane/4, 1: 8 below). */
template <int D>
__device__ __forceinline__ void store_rows(const head_rows &t, int64_t head, int64_t row, int lane,
                                           int half, const float (&acc)[D / 8][4], float factor,
                                           int dim)
{
    bf16 *to = t.data + row * t.row + head * t.head + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
        if (n * 8 < dim)
            *reinterpret_cast<uint32_t *>(to + n * 8) =
                two(acc[n][2 * half] * factor, acc[n][2 * half + 1] * factor);
}

/* ---- the walk ---- */

/* What rows see of a part: [any_lo, any_hi) holds all of it, and all rows see [all_lo, all_hi). */
struct bounds {
    int32_t any_lo, any_hi, all_lo, all_hi;
};

/* Tiles of both parts, one after the other. */
struct walk {
    int32_t begin[2], end[2], count[2];
};

struct tile {
    int32_t begin, end;
    int part;
};

__device__ __forceinline__ tile tile_at(const walk &w, int32_t i)
{
    if (i < w.count[0])
        return {w.begin[0] + i * OTHER, w.end[0], 0};
    return {w.begin[1] + (i - w.count[0]) * OTHER, w.end[1], 1};
}

/* Fills own[ROWS]; the warp's bounds and the block's walk. All threads. */
template <int ROWS>
__device__ __forceinline__ walk plan_walk(stretches *own, bounds (&mine)[2], const attn_mask &mask,
                                          int32_t row0, bool of_key)
{
    constexpr int EACH = ROWS / WARPS;
    __shared__ bounds all[WARPS][2];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int at = warp * EACH + lane % EACH;
    stretches s = stretches_of(mask, row0 + at, of_key);
    bool live = row0 + at < mask.tokens;
    own[at] = s;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        bool some = s.hi[part] > s.lo[part];
        mine[part].any_lo = __reduce_min_sync(0xffffffffu, some ? s.lo[part] : INT32_MAX);
        mine[part].any_hi = __reduce_max_sync(0xffffffffu, some ? s.hi[part] : 0);
        mine[part].all_lo = __reduce_max_sync(0xffffffffu, live ? s.lo[part] : 0);
        mine[part].all_hi = __reduce_min_sync(0xffffffffu, live ? s.hi[part] : INT32_MAX);
        if (lane == 0)
            all[warp][part] = mine[part];
    }
    __syncthreads();
    walk w;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        int32_t lo = INT32_MAX, hi = 0;
        for (int i = 0; i < WARPS; i++) {
            lo = min(lo, all[i][part].any_lo);
            hi = max(hi, all[i][part].any_hi);
        }
        w.begin[part] = lo;
        w.end[part] = hi;
        w.count[part] = hi > lo ? (hi - lo + OTHER - 1) / OTHER : 0;
    }
    return w;
}

/* Constant indices keep arrays in registers. */
__device__ __forceinline__ bounds bounds_of(const bounds (&b)[2], const tile &t)
{
    return t.part ? b[1] : b[0];
}

__device__ __forceinline__ bool touches(const bounds &b, const tile &t)
{
    return t.begin < b.any_hi && t.begin + OTHER > b.any_lo;
}

__device__ __forceinline__ bool covers(const bounds &b, const tile &t)
{
    return t.begin >= b.all_lo && t.begin + OTHER <= b.all_hi;
}

/* s = value where the row of own[first + lane/4 (+ 8)] does not see the column. column0: of s[0].
 */
template <int NT>
__device__ __forceinline__ void hide(float (&s)[NT][4], const stretches *own, int part,
                                     int32_t column0, int lane, float value)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int32_t lo = own[lane / 4 + 8 * half].lo[part], hi = own[lane / 4 + 8 * half].hi[part];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int32_t c = column0 + n * 8 + lane % 4 * 2 + j;
                if (c < lo || c >= hi)
                    s[n][2 * half + j] = value;
            }
    }
}

/* ---- forward ---- */

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

/* Scores of 16 rows become weights; top, sum (this lane's share) and acc follow the new maximum. */
template <int D>
__device__ __forceinline__ void weigh(float (&s)[OTHER / 8][4], float (&acc)[D / 8][4],
                                      float (&top)[2], float (&sum)[2], float scale_log2)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = top[half], added = 0;
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
            max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        max = quad_max(max);
        float base = max == -INFINITY ? 0.0f : max * scale_log2;
        float back = power_of_two(top[half] * scale_log2 - base);
        top[half] = max;
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float p = power_of_two(s[n][2 * half + j] * scale_log2 - base);
                s[n][2 * half + j] = p;
                added += p;
            }
        sum[half] = sum[half] * back + added;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            acc[n][2 * half] *= back;
            acc[n][2 * half + 1] *= back;
        }
    }
}

template <int D, int M> static constexpr size_t forward_shared()
{
    return (size_t)(64 * M * PITCH<D> + 4 * TILE<D>)*sizeof(bf16);
}

template <int D, int M>
__global__ void __launch_bounds__(THREADS, 2) tiles_forward(const __grid_constant__ tiles_args a)
{
    constexpr int ROWS = 64 * M;
    extern __shared__ __align__(16) bf16 tiles[];
    __shared__ stretches own[ROWS];
    int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16 * M;
    int32_t row0 = (int32_t)(gridDim.x - 1 - blockIdx.x) * ROWS; /* the longest walks first */
    int32_t h = (int32_t)blockIdx.y, kv = h / a.group;
    bf16 *stages = tiles + ROWS * PITCH<D>;
    bounds mine[2];
    walk w = plan_walk<ROWS>(own, mine, a.mask, row0, false);
    int32_t total = w.count[0] + w.count[1];
    fetch_rows<D, ROWS>(tiles, a.q, h, row0, (int32_t)a.mask.tokens, a.dim);
    auto fetch = [&](int32_t i) {
        bf16 *to = stages + i % 2 * 2 * TILE<D>;
        if (i < total) {
            tile t = tile_at(w, i);
            fetch_rows<D, OTHER>(to, a.k, kv, t.begin, t.end, a.dim);
            fetch_rows<D, OTHER>(to + TILE<D>, a.v, kv, t.begin, t.end, a.dim);
        }
        copies_end();
    };
    uint32_t qs = shared_at(tiles + first * PITCH<D>) + left_place<D>(lane);
    float acc[M][D / 8][4] = {}, top[M][2], sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++)
        top[m][0] = top[m][1] = -INFINITY;
    fetch(0);
    for (int32_t i = 0; i < total; i++) {
        fetch(i + 1);
        copies_wait_but_last();
        __syncthreads();
        tile t = tile_at(w, i);
        if (touches(bounds_of(mine, t), t)) {
            const bf16 *ks = stages + i % 2 * 2 * TILE<D>;
            float s[M][OTHER / 8][4];
            product<D, M, OTHER / 8>(s, qs, shared_at(ks) + right_place<D>(lane));
            bool hidden = !covers(bounds_of(mine, t), t);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (hidden)
                    hide<OTHER / 8>(s[m], own + first + m * 16, t.part, t.begin, lane, -INFINITY);
                weigh<D>(s[m], acc[m], top[m], sum[m], a.scale * LOG2_E);
            }
            add_product<D, M, OTHER / 8>(acc, s, shared_at(ks + TILE<D>) + turned_place<D>(lane));
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t row = row0 + first + m * 16 + lane / 4 + 8 * half;
            float all = quad_sum(sum[m][half]);
            if (row >= a.mask.tokens)
                continue;
            store_rows<D>(a.o, h, row, lane, half, acc[m], 1.0f / all, a.dim);
            if (lane % 4 == 0)
                a.lse[row * a.q_heads + h] = top[m][half] * a.scale + logf(all);
        }
}

/* ---- backward ---- */

/* delta[t,h] = sum_d do*o: 16 lanes each, 8 elements a lane. */
__global__ void tiles_delta(const __grid_constant__ tiles_args a)
{
    int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    int d = (int)threadIdx.x % 16 * 8;
    bool live = at < a.mask.tokens * a.q_heads;
    int64_t t = at / a.q_heads, h = at - t * a.q_heads;
    float sum = 0;
    if (live && d < a.dim) {
        float x[8], y[8];
        load_f32<bf16, 8>(x, a.do_.data + t * a.do_.row + h * a.do_.head + d);
        load_f32<bf16, 8>(y, a.o.data + t * a.o.row + h * a.o.head + d);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += x[j] * y[j];
    }
    sum = group_sum(sum, 16);
    if (live && d == 0)
        a.delta[at] = sum;
}

template <int D> static constexpr size_t backward_shared()
{
    return (size_t)(6 * TILE<D>)*sizeof(bf16);
}

template <int D>
__global__ void __launch_bounds__(THREADS, 2) tiles_dq(const __grid_constant__ tiles_args a)
{
    extern __shared__ __align__(16) bf16 tiles[];
    __shared__ stretches own[OTHER];
    int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16;
    int32_t row0 = (int32_t)(gridDim.x - 1 - blockIdx.x) * OTHER;
    int32_t h = (int32_t)blockIdx.y, kv = h / a.group;
    bf16 *stages = tiles + 2 * TILE<D>;
    bounds mine[2];
    walk w = plan_walk<OTHER>(own, mine, a.mask, row0, false);
    int32_t total = w.count[0] + w.count[1], tokens = (int32_t)a.mask.tokens;
    fetch_rows<D, OTHER>(tiles, a.q, h, row0, tokens, a.dim);
    fetch_rows<D, OTHER>(tiles + TILE<D>, a.do_, h, row0, tokens, a.dim);
    auto fetch = [&](int32_t i) {
        bf16 *to = stages + i % 2 * 2 * TILE<D>;
        if (i < total) {
            tile t = tile_at(w, i);
            fetch_rows<D, OTHER>(to, a.k, kv, t.begin, t.end, a.dim);
            fetch_rows<D, OTHER>(to + TILE<D>, a.v, kv, t.begin, t.end, a.dim);
        }
        copies_end();
    };
    uint32_t qs = shared_at(tiles + first * PITCH<D>) + left_place<D>(lane);
    uint32_t gs = qs + TILE<D> * 2;
    float acc[1][D / 8][4] = {}, lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = row0 + first + lane / 4 + 8 * half;
        lse[half] = row < tokens ? a.lse[row * a.q_heads + h] * LOG2_E : 0.0f;
        delta[half] = row < tokens ? a.delta[row * a.q_heads + h] : 0.0f;
    }
    fetch(0);
    for (int32_t i = 0; i < total; i++) {
        fetch(i + 1);
        copies_wait_but_last();
        __syncthreads();
        tile t = tile_at(w, i);
        if (touches(bounds_of(mine, t), t)) {
            uint32_t ks = shared_at(stages + i % 2 * 2 * TILE<D>);
            float s[1][OTHER / 8][4], dp[1][OTHER / 8][4];
            product<D, 1, OTHER / 8>(s, qs, ks + right_place<D>(lane));
            product<D, 1, OTHER / 8>(dp, gs, ks + TILE<D> * 2 + right_place<D>(lane));
#pragma unroll
            for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[0][n][j] = power_of_two(s[0][n][j] * (a.scale * LOG2_E) - lse[j / 2]) *
                                 (dp[0][n][j] - delta[j / 2]);
            if (!covers(bounds_of(mine, t), t))
                hide<OTHER / 8>(s[0], own + first, t.part, t.begin, lane, 0.0f);
            add_product<D, 1, OTHER / 8>(acc, s, ks + turned_place<D>(lane));
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = row0 + first + lane / 4 + 8 * half;
        if (row < tokens)
            store_rows<D>(a.dq, h, row, lane, half, acc[0], a.scale, a.dim);
    }
}

/* Columns of scores are queries here. */
template <int D>
__global__ void __launch_bounds__(THREADS, 2) tiles_dkv(const __grid_constant__ tiles_args a)
{
    constexpr int STEP = 32; /* queries at a time: registers */
    extern __shared__ __align__(16) bf16 tiles[];
    __shared__ stretches own[OTHER];
    __shared__ float stats[2][2][OTHER]; /* lse and delta of a stage */
    int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16;
    int32_t row0 = (int32_t)blockIdx.x * OTHER, kv = (int32_t)blockIdx.y;
    bf16 *stages = tiles + 2 * TILE<D>;
    bounds mine[2];
    walk w = plan_walk<OTHER>(own, mine, a.mask, row0, true);
    int32_t each = w.count[0] + w.count[1], total = each * a.group;
    int32_t tokens = (int32_t)a.mask.tokens;
    fetch_rows<D, OTHER>(tiles, a.k, kv, row0, tokens, a.dim);
    fetch_rows<D, OTHER>(tiles + TILE<D>, a.v, kv, row0, tokens, a.dim);
    auto fetch = [&](int32_t i) {
        bf16 *to = stages + i % 2 * 2 * TILE<D>;
        if (i < total) {
            int32_t h = kv * a.group + i / each;
            tile t = tile_at(w, i % each);
            fetch_rows<D, OTHER>(to, a.q, h, t.begin, t.end, a.dim);
            fetch_rows<D, OTHER>(to + TILE<D>, a.do_, h, t.begin, t.end, a.dim);
            int64_t row = t.begin + (int32_t)threadIdx.x % OTHER;
            const float *from = threadIdx.x < OTHER ? a.lse : a.delta;
            float *at = &stats[i % 2][threadIdx.x / OTHER][threadIdx.x % OTHER];
            if (row < t.end)
                copy_ahead(at, from + row * a.q_heads + h);
            else
                *at = 0;
        }
        copies_end();
    };
    uint32_t ks = shared_at(tiles + first * PITCH<D>) + left_place<D>(lane);
    uint32_t vs = ks + TILE<D> * 2;
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    fetch(0);
    for (int32_t i = 0; i < total; i++) {
        fetch(i + 1);
        copies_wait_but_last();
        __syncthreads();
        tile t = tile_at(w, i % each);
        if (touches(bounds_of(mine, t), t)) {
            bool hidden = !covers(bounds_of(mine, t), t);
#pragma unroll 1
            for (int c = 0; c < OTHER; c += STEP) {
                uint32_t qs = shared_at(stages + i % 2 * 2 * TILE<D> + c * PITCH<D>);
                uint32_t gs = qs + TILE<D> * 2;
                float p[1][STEP / 8][4], ds[1][STEP / 8][4];
                product<D, 1, STEP / 8>(p, ks, qs + right_place<D>(lane));
                product<D, 1, STEP / 8>(ds, vs, gs + right_place<D>(lane));
#pragma unroll
                for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        int column = c + n * 8 + lane % 4 * 2 + j % 2;
                        p[0][n][j] = power_of_two(p[0][n][j] * (a.scale * LOG2_E) -
                                                  stats[i % 2][0][column] * LOG2_E);
                        ds[0][n][j] -= stats[i % 2][1][column];
                    }
                if (hidden)
                    hide<STEP / 8>(p[0], own + first, t.part, t.begin + c, lane, 0.0f);
#pragma unroll
                for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        ds[0][n][j] *= p[0][n][j];
                add_product<D, 1, STEP / 8>(dv, p, gs + turned_place<D>(lane));
                add_product<D, 1, STEP / 8>(dk, ds, qs + turned_place<D>(lane));
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = row0 + first + lane / 4 + 8 * half;
        if (row >= tokens)
            continue;
        store_rows<D>(a.dk, kv, row, lane, half, dk[0], a.scale, a.dim);
        store_rows<D>(a.dv, kv, row, lane, half, dv[0], 1.0f, a.dim);
    }
}

/* ---- host ---- */

bool ith_attention_tiles_fit(ith_tensor t)
{
    return t.dtype == ITH_BF16 && t.shape[2] % 8 == 0 && t.shape[2] <= MAX_DIM &&
           t.stride[2] == 1 && (uintptr_t)t.data % 16 == 0 && t.stride[0] % 8 == 0 &&
           t.stride[1] % 8 == 0 && t.shape[0] <= INT32_MAX / 2;
}

static head_rows rows_of(ith_tensor t)
{
    return {(bf16 *)t.data, t.stride[0], t.stride[1]};
}

static tiles_args args_of(ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor o, ith_tensor lse,
                          ith_seqs seqs, float scale, bool causal)
{
    tiles_args a = {};
    a.mask = mask_of(seqs, q.shape[0], causal);
    a.q = rows_of(q);
    a.k = rows_of(k);
    a.v = rows_of(v);
    a.o = rows_of(o);
    a.lse = (float *)lse.data;
    a.q_heads = (int32_t)q.shape[1];
    a.group = (int32_t)(q.shape[1] / k.shape[1]);
    a.dim = (int32_t)q.shape[2];
    a.scale = scale;
    return a;
}

/* The smallest tile that holds a head. */
#define BY_DIM(dim, F)                                                                             \
    do {                                                                                           \
        if ((dim) <= 64)                                                                           \
            F(64);                                                                                 \
        else if ((dim) <= 80)                                                                      \
            F(80);                                                                                 \
        else                                                                                       \
            F(128);                                                                                \
    } while (0)

#define LAUNCH(KERNEL, rows, heads, bytes)                                                         \
    do {                                                                                           \
        ITH_CUDA_TRY(ctx,                                                                          \
                     cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,     \
                                          (int)(bytes)),                                           \
                     q);                                                                           \
        KERNEL<<<dim3((unsigned)ith_div_ceil(a.mask.tokens, rows), (unsigned)(heads)), THREADS,    \
                 bytes, ith_cuda_stream(ctx)>>>(a);                                                \
    } while (0)

ith_status ith_attention_tiles_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                       ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                       bool causal)
{
    tiles_args a = args_of(q, k, v, o, lse, seqs, scale, causal);
#define RUN(D) LAUNCH((tiles_forward<D, 2>), 128, a.q_heads, (forward_shared<D, 2>()))
    BY_DIM(a.dim, RUN);
#undef RUN
    return ITH_CUDA_LAUNCHED(ctx, q);
}

ith_status ith_attention_tiles_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                        ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                        ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                        bool causal, float *delta)
{
    tiles_args a = args_of(q, k, v, o, lse, seqs, scale, causal);
    a.do_ = rows_of(do_);
    a.dq = rows_of(dq);
    a.dk = rows_of(dk);
    a.dv = rows_of(dv);
    a.delta = delta;
    tiles_delta<<<(unsigned)ith_div_ceil(a.mask.tokens * a.q_heads, 8), THREADS, 0,
                  ith_cuda_stream(ctx)>>>(a);
#define RUN(D)                                                                                     \
    do {                                                                                           \
        LAUNCH(tiles_dq<D>, OTHER, a.q_heads, backward_shared<D>());                               \
        LAUNCH(tiles_dkv<D>, OTHER, k.shape[1], backward_shared<D>());                             \
    } while (0)
    BY_DIM(a.dim, RUN);
#undef RUN
    return ITH_CUDA_LAUNCHED(ctx, q);
}
