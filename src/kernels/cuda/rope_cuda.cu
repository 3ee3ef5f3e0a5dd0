/* rope_cuda.cu - per-head RMSNorm and RoPE of q and k, forward and backward, one launch each.
 *
 * A lane holds pieces of N elements in pairs, (i, i + half), so a rotation stays in its registers
 * and in-place calls are safe. A group of lanes (a power of two, up to a warp) owns a head vector;
 * a warp takes STEPS heads of one token per lane at a time and reads the token's angles once.
 * Elements past the rotated ones pair up, too.
 * Backward: the first blocks work on q, the others on k; each lane copies what it needs next to its
 * own place in shared memory while it works on what came before. The norm's weight gradient is
 * summed as rmsnorm does: in registers, over the block's groups, over blocks, in order. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 128, MAX_DIM = 512, PER_SM = 4, BLOCKS = ITH_CUDA_SMS * PER_SM };
/* The plain form: bf16 heads of 128, 8 lanes with 8 elements of each half, two heads a lane. */
enum { PLAIN_GROUP = 8, PLAIN_N = 8, PLAIN_STEPS = 2 };

/* q or k; strides in elements. */
struct part {
    const void *x, *in, *w; /* in: the gradient of the output */
    void *out;
    float *rstd;
    int64_t out_row, out_head, in_row, in_head, x_row, x_head;
    uint32_t heads, chunks; /* chunks: how many warps' shares a token is */
    uint32_t first_block, blocks;
};

struct rope_args {
    part parts[2];
    const void *cos, *sin;
    const int32_t *ids;
    float *partial;                        /* [blocks, dim] or NULL */
    int64_t cos_row, sin_row, axis_stride; /* axis_stride 0: one position */
    uint32_t tokens;
    int dim, half, rest; /* rest: elements of the lower half of what is not rotated */
    int group;           /* lanes per head vector */
    float eps, w_offset;
};

/* Lanes per head vector. GROUP > 0: that many, known beforehand, and with them that each lane has
 * one pair, which is rotated, weights without offset, one position a token and heads for every lane
 * (is_plain). */
template <int GROUP> __device__ __forceinline__ int group_of(const rope_args &a)
{
    return GROUP ? GROUP : a.group;
}

template <int GROUP> __device__ __forceinline__ bool has_w(const part &p)
{
    return GROUP || p.w;
}

/* Places of a lane's pair j of pieces. */
struct pair {
    int lo, hi;
    bool live, both, rotated;
};

template <int N, int GROUP> __device__ __forceinline__ pair pair_at(const rope_args &a, int j)
{
    pair p;
    if constexpr (GROUP > 0)
        return {j * N, (j + GROUP) * N, true, true, true};
    p.lo = j * N;
    p.rotated = p.lo < a.half;
    p.hi = p.lo + a.half;
    p.live = p.both = true;
    if (!p.rotated) {
        p.lo += a.half; /* = 2 half + what lies past the rotated pairs */
        p.hi = p.lo + a.rest;
        p.live = p.lo < 2 * a.half + a.rest;
        p.both = p.live && p.hi < a.dim;
    }
    return p;
}

template <typename T, int N> struct turn {
    vec<T, N> c, s;
};

template <typename T, int N> __device__ __forceinline__ vec<T, N> read(const T *from)
{
    return *reinterpret_cast<const vec<T, N> *>(from);
}

/* cos and sin of a pair at token t. With three axes each frequency has its own row; otherwise it is
 * p0. */
template <typename T, int N, int GROUP>
__device__ __forceinline__ void read_turn(turn<T, N> &at, const rope_args &a, const pair &p,
                                          uint32_t t, int32_t p0)
{
    const T *cos = (const T *)a.cos, *sin = (const T *)a.sin;
    if (!p.rotated)
        return;
    if (GROUP || a.axis_stride == 0) {
        at.c = read<T, N>(cos + p0 * a.cos_row + p.lo);
        at.s = read<T, N>(sin + p0 * a.sin_row + p.lo);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) {
            int64_t row = a.ids[(p.lo + j) % 3 * a.axis_stride + t];
            at.c.v[j] = cos[row * a.cos_row + p.lo + j];
            at.s.v[j] = sin[row * a.sin_row + p.lo + j];
        }
    }
}

/* (lo, hi) turned by the angle, or back. */
template <typename T, int N, bool BACK>
__device__ __forceinline__ void rotate(float (&lo)[N], float (&hi)[N], const turn<T, N> &at)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        float c = to_f32(at.c.v[j]), s = BACK ? -to_f32(at.s.v[j]) : to_f32(at.s.v[j]);
        float l = lo[j], h = hi[j];
        lo[j] = l * c - h * s;
        hi[j] = h * c + l * s;
    }
}

template <typename T, int N>
__device__ __forceinline__ void unpack(float (&to)[N], const vec<T, N> &from)
{
#pragma unroll
    for (int j = 0; j < N; j++)
        to[j] = to_f32(from.v[j]);
}

/* v = norm of v, rounded to T: v r, rounded, times w when w_offset is 0, else v r (w_offset + w).
 */
template <typename T, int N>
__device__ __forceinline__ void normalize(float (&v)[N], float r, const vec<T, N> &w,
                                          float w_offset)
{
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] *= w_offset == 0 ? r : r * (w_offset + to_f32(w.v[j]));
    vec<T, N> n = pack<T, N>(v);
    if (w_offset == 0) {
        if constexpr (sizeof(T) == 2 && N % 2 == 0) { /* rounds once, as the f32 product does */
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                __nv_bfloat162 *two = reinterpret_cast<__nv_bfloat162 *>(&n.v[j]);
                *two = __hmul2_rn(*two, *reinterpret_cast<const __nv_bfloat162 *>(&w.v[j]));
            }
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                n.v[j] = from_f32<T>(to_f32(n.v[j]) * to_f32(w.v[j]));
        }
    }
    unpack<T, N>(v, n);
}

/* A warp's share of a part: heads of token t from `head` (this lane's group's first one), every
 * `stride` of them. */
struct share {
    uint32_t t, head;
    bool live;
};

template <int STEPS, int GROUP>
__device__ __forceinline__ share share_at(const rope_args &a, const part &p, uint32_t at)
{
    uint32_t group = (uint32_t)group_of<GROUP>(a), per_step = 32 / group;
    uint32_t t = GROUP && p.chunks == 1 ? at : at / p.chunks;
    share s;
    s.live = t < a.tokens;
    s.t = s.live ? t : 0;
    s.head = (at - t * p.chunks) * STEPS * per_step + threadIdx.x % 32 / group;
    return s;
}

/* A warp takes a token's heads of one part. */
template <typename T, int N, int ITEMS, int STEPS>
__global__ void __launch_bounds__(THREADS) rope_forward(const __grid_constant__ rope_args a)
{
    constexpr int GROUP = 0;
    const part &p = a.parts[blockIdx.y];
    uint32_t t = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (t >= a.tokens)
        return;
    int lane = (int)threadIdx.x % a.group;
    uint32_t stride = 32 / (uint32_t)a.group;
    const T *x = (const T *)p.x + t * p.x_row, *w = (const T *)p.w;
    T *out = (T *)p.out + t * p.out_row;
    pair d[ITEMS];
    vec<T, N> w_lo[ITEMS] = {}, w_hi[ITEMS] = {};
    turn<float, N> turns[ITEMS]; /* of what is not rotated: by no angle */
    int32_t p0 = a.ids[t];
    float inv_dim = 1.0f / (float)a.dim;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        turn<T, N> at = {};
        d[i] = pair_at<N, GROUP>(a, i * a.group + lane);
        read_turn<T, N, GROUP>(at, a, d[i], t, p0);
#pragma unroll
        for (int j = 0; j < N; j++) {
            turns[i].c.v[j] = d[i].rotated ? to_f32(at.c.v[j]) : 1.0f;
            turns[i].s.v[j] = to_f32(at.s.v[j]);
        }
        if (w && d[i].live)
            w_lo[i] = read<T, N>(w + d[i].lo);
        if (w && d[i].both)
            w_hi[i] = read<T, N>(w + d[i].hi);
    }
    /* A warp stays together for the shuffles. */
    uint32_t head = threadIdx.x % 32 / (uint32_t)a.group;
    for (uint32_t first = 0; first < p.heads; first += STEPS * stride, head += STEPS * stride) {
        vec<T, N> lo[STEPS][ITEMS] = {}, hi[STEPS][ITEMS] = {};
        float squares[STEPS] = {};
#pragma unroll
        for (int h = 0; h < STEPS; h++)
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const T *from = x + (head + h * stride) * p.x_head;
                bool live = head + h * stride < p.heads;
                if (live && d[i].live)
                    lo[h][i] = read<T, N>(from + d[i].lo);
                if (live && d[i].both)
                    hi[h][i] = read<T, N>(from + d[i].hi);
            }
        if (w) {
#pragma unroll
            for (int h = 0; h < STEPS; h++) {
#pragma unroll
                for (int i = 0; i < ITEMS; i++)
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        float l = to_f32(lo[h][i].v[j]), u = to_f32(hi[h][i].v[j]);
                        squares[h] += l * l + u * u;
                    }
                squares[h] = group_sum(squares[h], a.group);
            }
        }
#pragma unroll
        for (int h = 0; h < STEPS; h++) {
            uint32_t own = head + h * stride;
            if (own >= p.heads)
                continue;
            float r = w ? rsqrtf(squares[h] * inv_dim + a.eps) : 1.0f;
            if (w && lane == 0)
                p.rstd[t * (int64_t)p.heads + own] = r;
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                T *to = out + own * p.out_head;
                float l[N], u[N];
                unpack<T, N>(l, lo[h][i]);
                unpack<T, N>(u, hi[h][i]);
                if (w) {
                    normalize<T, N>(l, r, w_lo[i], a.w_offset);
                    normalize<T, N>(u, r, w_hi[i], a.w_offset);
                }
                rotate<float, N, false>(l, u, turns[i]);
                if (d[i].live)
                    store_f32<T, N>(to + d[i].lo, l);
                if (d[i].both)
                    store_f32<T, N>(to + d[i].hi, u);
            }
        }
    }
}

/* The same for a plain form: a warp takes a share of a part, whose heads are on their way before
 * anything waits for the angles. Nothing is read after the first write. */
template <typename T, int N, int STEPS, int GROUP>
__global__ void __launch_bounds__(THREADS, 2 * PER_SM)
    rope_forward_plain(const __grid_constant__ rope_args a)
{
    const part &p = a.parts[blockIdx.x >= a.parts[1].first_block];
    share at = share_at<STEPS, GROUP>(
        a, p, (blockIdx.x - p.first_block) * (THREADS / 32) + threadIdx.x / 32);
    if (!at.live)
        return; /* a whole warp */
    constexpr uint32_t STRIDE = 32 / GROUP;
    int lane = (int)threadIdx.x % GROUP;
    int32_t p0 = a.ids[at.t];
    const T *x = (const T *)p.x + at.t * p.x_row + at.head * p.x_head + lane * N;
    T *out = (T *)p.out + at.t * p.out_row + at.head * p.out_head + lane * N;
    vec<T, N> lo[STEPS], hi[STEPS];
#pragma unroll
    for (int h = 0; h < STEPS; h++) {
        lo[h] = read<T, N>(x + h * STRIDE * p.x_head);
        hi[h] = read<T, N>(x + h * STRIDE * p.x_head + GROUP * N);
    }
    vec<T, N> w_lo = read<T, N>((const T *)p.w + lane * N);
    vec<T, N> w_hi = read<T, N>((const T *)p.w + (lane + GROUP) * N);
    turn<T, N> angle;
    read_turn<T, N, GROUP>(angle, a, pair_at<N, GROUP>(a, lane), at.t, p0);
    float squares[STEPS] = {};
#pragma unroll
    for (int h = 0; h < STEPS; h++)
#pragma unroll
        for (int j = 0; j < N; j++) {
            float l = to_f32(lo[h].v[j]), u = to_f32(hi[h].v[j]);
            squares[h] += l * l + u * u;
        }
#pragma unroll
    for (int o = GROUP / 2; o > 0; o >>= 1)
#pragma unroll
        for (int h = 0; h < STEPS; h++)
            squares[h] += __shfl_xor_sync(0xffffffffu, squares[h], o);
    turn<float, N> turns;
    unpack<T, N>(turns.c.v, angle.c);
    unpack<T, N>(turns.s.v, angle.s);
#pragma unroll
    for (int h = 0; h < STEPS; h++) {
        float r = rsqrtf(squares[h] * (1.0f / (2 * GROUP * N)) + a.eps), l[N], u[N];
        if (lane == 0)
            p.rstd[at.t * (int64_t)p.heads + at.head + h * STRIDE] = r;
        unpack<T, N>(l, lo[h]);
        unpack<T, N>(u, hi[h]);
        normalize<T, N>(l, r, w_lo, 0.0f);
        normalize<T, N>(u, r, w_hi, 0.0f);
        rotate<float, N, false>(l, u, turns);
        store_f32<T, N>(out + h * STRIDE * p.out_head, l);
        store_f32<T, N>(out + h * STRIDE * p.out_head + GROUP * N, u);
    }
}

/* ---- backward ---- */

/* A lane's places in shared memory: gradient and input of its pairs, low and high. */
enum { G_LO, G_HI, X_LO, X_HI, OPERANDS };

template <typename T, int N>
__device__ __forceinline__ vec<T, N> *place(vec<T, N> *base, int pair_idx, int operand)
{
    return base + (pair_idx * OPERANDS + operand) * THREADS + threadIdx.x;
}

/* What is read a round ahead into registers. */
template <typename T, int N, int ITEMS, int STEPS> struct ahead {
    turn<T, N> turns[ITEMS];
    float r[STEPS];
};

template <typename T, int N, int ITEMS, int STEPS, int GROUP>
__device__ __forceinline__ void fetch(vec<T, N> *to, ahead<T, N, ITEMS, STEPS> &next,
                                      const rope_args &a, const part &p, const share &at,
                                      int32_t p0)
{
    int lane = (int)threadIdx.x % group_of<GROUP>(a);
    uint32_t stride = 32 / (uint32_t)group_of<GROUP>(a);
    const T *in = (const T *)p.in + at.t * p.in_row, *x = (const T *)p.x + at.t * p.x_row;
    if (!at.live)
        return;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        pair d = pair_at<N, GROUP>(a, i * a.group + lane);
#pragma unroll
        for (int h = 0; h < STEPS; h++) {
            uint32_t head = at.head + h * stride;
            const T *g_from = in + head * p.in_head, *x_from = x + head * p.x_head;
            bool lo = d.live && (GROUP || head < p.heads), hi = d.both && (GROUP || head < p.heads);
            if (lo)
                copy_ahead(place<T, N>(to, h * ITEMS + i, G_LO), g_from + d.lo);
            if (hi)
                copy_ahead(place<T, N>(to, h * ITEMS + i, G_HI), g_from + d.hi);
            if (lo && has_w<GROUP>(p))
                copy_ahead(place<T, N>(to, h * ITEMS + i, X_LO), x_from + d.lo);
            if (hi && has_w<GROUP>(p))
                copy_ahead(place<T, N>(to, h * ITEMS + i, X_HI), x_from + d.hi);
        }
        read_turn<T, N, GROUP>(next.turns[i], a, d, at.t, p0);
    }
#pragma unroll
    for (int h = 0; h < STEPS; h++)
        if (has_w<GROUP>(p) && (GROUP || at.head + h * stride < p.heads))
            next.r[h] = p.rstd[at.t * (int64_t)p.heads + at.head + h * stride];
}

/* partial[block][d]: the sums of the block's groups, joined in order. */
template <int N, int ITEMS, int GROUP>
__device__ __forceinline__ void join_groups(const rope_args &a, float *shared,
                                            const float (&lo)[ITEMS][N],
                                            const float (&hi)[ITEMS][N])
{
    int lane = (int)threadIdx.x % group_of<GROUP>(a), groups = THREADS / group_of<GROUP>(a);
    float *own = shared + threadIdx.x / group_of<GROUP>(a) * a.dim;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        pair d = pair_at<N, GROUP>(a, i * a.group + lane);
        if (d.live)
            store_f32<float, N>(own + d.lo, lo[i]);
        if (d.both)
            store_f32<float, N>(own + d.hi, hi[i]);
    }
    __syncthreads();
    for (int d = (int)threadIdx.x; d < a.dim; d += THREADS) {
        float sum = 0;
        for (int g = 0; g < groups; g++)
            sum += shared[g * a.dim + d];
        a.partial[blockIdx.x * (int64_t)a.dim + d] = sum;
    }
}

/* g: a lane's half pair of the gradient behind the norm, x: its input. g becomes g w; dw and dot
 * grow. */
template <typename T, int N>
__device__ __forceinline__ void weigh(float (&g)[N], float (&dw)[N], float &dot, const vec<T, N> &x,
                                      const vec<T, N> &w, float r, float w_offset)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        float xh = to_f32(x.v[j]) * r;
        dw[j] += g[j] * xh;
        g[j] *= w_offset + to_f32(w.v[j]);
        dot += g[j] * xh;
    }
}

template <typename T, int N, int ITEMS, int STEPS, int GROUP>
__global__ void __launch_bounds__(THREADS, PER_SM)
    rope_backward(const __grid_constant__ rope_args a)
{
    extern __shared__ __align__(32) char shared[];
    constexpr int PLACES = STEPS * ITEMS * OPERANDS * THREADS;
    vec<T, N> *buffers = reinterpret_cast<vec<T, N> *>(shared);
    const part &p = a.parts[blockIdx.x >= a.parts[1].first_block];
    int lane = (int)threadIdx.x % group_of<GROUP>(a);
    uint32_t stride = 32 / (uint32_t)group_of<GROUP>(a), step = p.blocks * (THREADS / 32);
    uint32_t n = (blockIdx.x - p.first_block) * (THREADS / 32) + threadIdx.x / 32;
    float dw_lo[ITEMS][N] = {}, dw_hi[ITEMS][N] = {};
    vec<T, N> w_lo[ITEMS] = {}, w_hi[ITEMS] = {};
    float inv_dim = 1.0f / (float)a.dim;
    pair d[ITEMS];
    for (int i = 0; i < 2 * STEPS * ITEMS * OPERANDS; i++) /* what no copy fills counts nothing */
        buffers[i * THREADS + threadIdx.x] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        d[i] = pair_at<N, GROUP>(a, i * a.group + lane);
        if (has_w<GROUP>(p) && d[i].live)
            w_lo[i] = read<T, N>((const T *)p.w + d[i].lo);
        if (has_w<GROUP>(p) && d[i].both)
            w_hi[i] = read<T, N>((const T *)p.w + d[i].hi);
    }
    ahead<T, N, ITEMS, STEPS> next = {};
    share at = share_at<STEPS, GROUP>(a, p, n), after = share_at<STEPS, GROUP>(a, p, n += step);
    fetch<T, N, ITEMS, STEPS, GROUP>(buffers, next, a, p, at, a.ids[at.t]);
    copies_end();
    int32_t p_after = a.ids[after.t];
    for (int side = 0; at.live; side ^= 1) { /* a warp stays together for the shuffles */
        vec<T, N> *now_at = buffers + side * PLACES;
        ahead<T, N, ITEMS, STEPS> now = next;
        share later = share_at<STEPS, GROUP>(a, p, n += step);
        fetch<T, N, ITEMS, STEPS, GROUP>(buffers + (1 - side) * PLACES, next, a, p, after, p_after);
        copies_end();
        p_after = a.ids[later.t]; /* the angles' addresses wait for it */
        copies_wait<1>();
        float lo[STEPS][ITEMS][N], hi[STEPS][ITEMS][N], dot[STEPS] = {};
#pragma unroll
        for (int h = 0; h < STEPS; h++)
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                unpack<T, N>(lo[h][i], *place<T, N>(now_at, h * ITEMS + i, G_LO));
                unpack<T, N>(hi[h][i], *place<T, N>(now_at, h * ITEMS + i, G_HI));
                if (d[i].rotated)
                    rotate<T, N, true>(lo[h][i], hi[h][i], now.turns[i]);
                if (!has_w<GROUP>(p) || (!GROUP && at.head + h * stride >= p.heads))
                    continue;
                weigh<T, N>(lo[h][i], dw_lo[i], dot[h], *place<T, N>(now_at, h * ITEMS + i, X_LO),
                            w_lo[i], now.r[h], GROUP ? 0.0f : a.w_offset);
                weigh<T, N>(hi[h][i], dw_hi[i], dot[h], *place<T, N>(now_at, h * ITEMS + i, X_HI),
                            w_hi[i], now.r[h], GROUP ? 0.0f : a.w_offset);
            }
        for (int o = group_of<GROUP>(a) / 2; has_w<GROUP>(p) && o > 0; o >>= 1)
#pragma unroll
            for (int h = 0; h < STEPS; h++)
                dot[h] += __shfl_xor_sync(0xffffffffu, dot[h], o);
#pragma unroll
        for (int h = 0; h < STEPS; h++) {
            uint32_t head = at.head + h * stride;
            float r = now.r[h], back = dot[h] * inv_dim * r * r;
            T *to = (T *)p.out + at.t * p.out_row + head * p.out_head;
            if (!GROUP && head >= p.heads)
                continue;
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                if (has_w<GROUP>(p)) {
                    vec<T, N> x_lo = *place<T, N>(now_at, h * ITEMS + i, X_LO);
                    vec<T, N> x_hi = *place<T, N>(now_at, h * ITEMS + i, X_HI);
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        lo[h][i][j] = r * lo[h][i][j] - back * to_f32(x_lo.v[j]);
                        hi[h][i][j] = r * hi[h][i][j] - back * to_f32(x_hi.v[j]);
                    }
                }
                if (d[i].live)
                    store_f32<T, N>(to + d[i].lo, lo[h][i]);
                if (d[i].both)
                    store_f32<T, N>(to + d[i].hi, hi[h][i]);
            }
        }
        at = after;
        after = later;
    }
    copies_wait();
    if (a.partial)
        join_groups<N, ITEMS, GROUP>(a, reinterpret_cast<float *>(shared), dw_lo, dw_hi);
}

/* ---- launches ---- */

static part part_for(ith_tensor out, ith_tensor rstd, ith_tensor in, ith_tensor x, ith_tensor w)
{
    part p = {};
    p.x = x.data;
    p.in = in.data;
    p.w = w.data;
    p.out = out.data;
    p.rstd = (float *)rstd.data;
    p.out_row = out.stride[0];
    p.out_head = out.stride[1];
    p.in_row = in.stride[0];
    p.in_head = in.stride[1];
    p.x_row = x.stride[0];
    p.x_head = x.stride[1];
    p.heads = (uint32_t)x.shape[1];
    return p;
}

static rope_args args_of(part q, part k, ith_tensor x, ith_tensor cos, ith_tensor sin,
                         ith_tensor position_ids, int n)
{
    rope_args a = {};
    a.parts[0] = q;
    a.parts[1] = k;
    a.cos = cos.data;
    a.sin = sin.data;
    a.ids = (const int32_t *)position_ids.data;
    a.cos_row = cos.stride[0];
    a.sin_row = sin.stride[0];
    a.axis_stride = position_ids.ndim == 2 ? position_ids.stride[0] : 0;
    a.tokens = (uint32_t)x.shape[0];
    a.dim = (int)x.shape[2];
    a.half = (int)cos.shape[1];
    a.rest = (int)ith_round_up(ith_div_ceil(a.dim - 2 * a.half, 2), n);
    a.group = 1;
    while (a.group < 32 && a.group * n < a.half + a.rest)
        a.group *= 2;
    return a;
}

/* Blocks for both parts, at most `most` of them, shared out by their work. */
static unsigned share_blocks(rope_args *a, int steps, int64_t most)
{
    int64_t shares[2], total = 0;
    uint32_t first = 0;
    for (int i = 0; i < 2; i++) {
        part *p = &a->parts[i];
        p->chunks = (uint32_t)ith_div_ceil(p->heads, steps * 32 / a->group);
        shares[i] = (int64_t)a->tokens * p->chunks;
        total += shares[i];
    }
    for (int i = 0; i < 2; i++) {
        int64_t blocks = ith_div_ceil(shares[i], THREADS / 32);
        if (blocks > 0)
            blocks = ith_min_i64(blocks, ith_max_i64(most * shares[i] / total, 1));
        a->parts[i].first_block = first;
        a->parts[i].blocks = (uint32_t)blocks;
        first += (uint32_t)blocks;
    }
    return first;
}

/* Whether the plain form holds. */
static bool is_plain(const rope_args *a)
{
    enum { SHARE = PLAIN_STEPS * 32 / PLAIN_GROUP };
    return a->group == PLAIN_GROUP && a->half == PLAIN_GROUP * PLAIN_N && a->dim == 2 * a->half &&
           a->axis_stride == 0 && a->w_offset == 0 && a->parts[0].w && a->parts[1].w &&
           a->parts[0].heads % SHARE == 0 && a->parts[1].heads % SHARE == 0;
}

/* Pieces of 16 bytes when everything lies so, and no piece straddles a rotation's end. */
static bool is_wide(const ith_tensor *t, int count)
{
    bool wide = true;
    for (int i = 0; i < count; i++)
        wide = wide && rows_aligned(t[i], 16 / ith_dtype_bytes(t[i].dtype));
    return wide;
}

static ith_status check_dim(ith_ctx *ctx, ith_tensor q, ith_tensor k)
{
    if (q.shape[2] > MAX_DIM)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "head_dim %lld; the most is %d",
                        (long long)q.shape[2], MAX_DIM);
    ITH_ASSERT(q.shape[0] * q.shape[1] <= INT32_MAX && k.shape[0] * k.shape[1] <= INT32_MAX);
    return ITH_OK;
}

/* Calls F<T, N, ITEMS, STEPS>: pieces and pairs of pieces per lane that MAX_DIM needs. */
#define BY_FORM(dtype, wide, F)                                                                    \
    ITH_BY_TYPE(dtype, {                                                                           \
        if (!(wide))                                                                               \
            F(T, 1, (MAX_DIM / 64), 1);                                                            \
        else                                                                                       \
            F(T, WIDE<T>, (MAX_DIM / 64 / WIDE<T>), (sizeof(T) == 2 ? 2 : 1));                     \
    })

static ith_status qk_norm_rope_forward(ith_ctx *ctx, ith_tensor q_out, ith_tensor k_out,
                                       ith_tensor q_rstd, ith_tensor k_rstd, ith_tensor q,
                                       ith_tensor k, ith_tensor q_w, ith_tensor k_w, ith_tensor cos,
                                       ith_tensor sin, ith_tensor position_ids, float eps,
                                       float w_offset)
{
    const ith_tensor all[] = {q_out, k_out, q, k, q_w, k_w, cos, sin};
    bool wide = is_wide(all, 8);
    ITH_TRY(check_dim(ctx, q, k));
    if (q.shape[0] == 0)
        return ITH_OK;
    rope_args a = args_of(part_for(q_out, q_rstd, q, q, q_w), part_for(k_out, k_rstd, k, k, k_w), q,
                          cos, sin, position_ids, wide ? 16 / (int)ith_dtype_bytes(q.dtype) : 1);
    a.eps = eps;
    a.w_offset = w_offset;
    dim3 grid((unsigned)ith_div_ceil(a.tokens, THREADS / 32), 2);
#define LAUNCH(T, N, ITEMS, STEPS)                                                                 \
    rope_forward<T, N, ITEMS, STEPS><<<grid, THREADS, 0, ith_cuda_stream(ctx)>>>(a)
    if (q.dtype == ITH_BF16 && wide && is_plain(&a)) {
        unsigned blocks = share_blocks(&a, PLAIN_STEPS, INT32_MAX);
        rope_forward_plain<bf16, PLAIN_N, PLAIN_STEPS, PLAIN_GROUP>
            <<<blocks, THREADS, 0, ith_cuda_stream(ctx)>>>(a);
        return ITH_CUDA_LAUNCHED(ctx, q);
    }
    BY_FORM(q.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, q);
}

static int64_t qk_norm_rope_backward_workspace(ith_ctx *ctx, ith_tensor dq, ith_tensor dk,
                                               ith_tensor dq_w, ith_tensor dk_w, ith_tensor dq_out,
                                               ith_tensor dk_out, ith_tensor q, ith_tensor k,
                                               ith_tensor q_rstd, ith_tensor k_rstd, ith_tensor q_w,
                                               ith_tensor k_w, ith_tensor cos, ith_tensor sin,
                                               ith_tensor position_ids, float w_offset)
{
    (void)ctx, (void)dq, (void)dk, (void)dk_w, (void)dq_out, (void)dk_out, (void)k, (void)q_rstd;
    (void)k_rstd, (void)k_w, (void)cos, (void)sin, (void)position_ids, (void)w_offset;
    if (is_absent(dq_w) || is_absent(q_w))
        return 0;
    return ith_mul_bytes((BLOCKS + 1) * q.shape[2], 4);
}

static ith_status qk_norm_rope_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dq_w,
                                        ith_tensor dk_w, ith_tensor dq_out, ith_tensor dk_out,
                                        ith_tensor q, ith_tensor k, ith_tensor q_rstd,
                                        ith_tensor k_rstd, ith_tensor q_w, ith_tensor k_w,
                                        ith_tensor cos, ith_tensor sin, ith_tensor position_ids,
                                        float w_offset)
{
    const ith_tensor all[] = {dq, dk, dq_out, dk_out, q, k, q_w, k_w, cos, sin};
    bool wide = is_wide(all, 10);
    ITH_TRY(check_dim(ctx, q, k));
    if (q.shape[0] == 0)
        return ITH_OK;
    rope_args a =
        args_of(part_for(dq, q_rstd, dq_out, q, q_w), part_for(dk, k_rstd, dk_out, k, k_w), q, cos,
                sin, position_ids, wide ? 16 / (int)ith_dtype_bytes(q.dtype) : 1);
    a.w_offset = w_offset;
    a.partial = is_absent(dq_w) || is_absent(q_w) ? NULL : (float *)ctx->scratch;
#define LAUNCH_FOR(T, N, ITEMS, STEPS, GROUP)                                                      \
    do {                                                                                           \
        unsigned blocks = share_blocks(&a, STEPS, BLOCKS);                                         \
        size_t shared = 2 * STEPS * ITEMS * OPERANDS * THREADS * sizeof(vec<T, N>);                \
        rope_backward<T, N, ITEMS, STEPS, GROUP>                                                   \
            <<<blocks, THREADS, shared, ith_cuda_stream(ctx)>>>(a);                                \
    } while (0)
#define LAUNCH(T, N, ITEMS, STEPS) LAUNCH_FOR(T, N, ITEMS, STEPS, 0)
    if (q.dtype == ITH_BF16 && wide && is_plain(&a))
        LAUNCH_FOR(bf16, PLAIN_N, 1, PLAIN_STEPS, PLAIN_GROUP);
    else
        BY_FORM(q.dtype, wide, LAUNCH);
#undef LAUNCH
#undef LAUNCH_FOR
    if (a.partial) {
        const part *p = a.parts;
        ith_columns sums[2] = {
            {(float *)dq_w.data, a.partial, p[0].blocks},
            {(float *)dk_w.data, a.partial + p[0].blocks * q.shape[2], p[1].blocks}};
        ith_cuda_add_columns(ith_cuda_stream(ctx), sums, 2, q.shape[2]);
    }
    return ITH_CUDA_LAUNCHED(ctx, q);
}

void ith_cuda_fill_rope(struct ith_backend *b)
{
    b->qk_norm_rope_forward.run = qk_norm_rope_forward;
    b->qk_norm_rope_backward.run = qk_norm_rope_backward;
    b->qk_norm_rope_backward.workspace = qk_norm_rope_backward_workspace;
}
