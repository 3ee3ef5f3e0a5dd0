/* rope_cuda.cu - per-head RMSNorm and RoPE of q and k, forward and backward.
 *
 * A group of lanes (a power of two, up to a warp) owns one head vector, in pieces of N elements;
 * the partner of element i, i + half, is exchanged through shared memory, so in-place calls are
 * safe: a group has read its vectors before it writes. Where vectors are short a group takes
 * several heads of one token, for more reads in flight. Backward sums the norm's weight gradient as
 * rmsnorm does: in registers, over the block's groups, over blocks, in order. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 128, MAX_DIM = 512, BLOCKS = ITH_CUDA_SMS * 3 };

struct rope_args {
    int64_t tokens, heads, dim, half;
    int64_t out_row, out_head, in_row, in_head, x_row, x_head; /* element strides */
    int64_t cos_row, sin_row, axis_stride;                     /* axis_stride 0: one position */
    int group;                                                 /* lanes per head vector */
    float eps, w_offset;
};

/* cos and sin of the pairs that elements d .. d+N-1 belong to, at token t; 1 and 0 past the rotated
 * ones. With three axes each frequency has its own row; otherwise it is p0. */
template <typename T, int N>
__device__ __forceinline__ void angles(const rope_args &a, float (&c)[N], float (&s)[N], int64_t t,
                                       int32_t p0, int d, const T *cos, const T *sin,
                                       const int32_t *ids)
{
    int half = (int)a.half, i = d < half ? d : d - half;
    if (d >= 2 * half) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            c[j] = 1;
            s[j] = 0;
        }
    } else if (a.axis_stride == 0) {
        load_f32<T, N>(c, cos + p0 * a.cos_row + i);
        load_f32<T, N>(s, sin + p0 * a.sin_row + i);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) {
            int64_t p = ids[(i + j) % 3 * a.axis_stride + t];
            c[j] = to_f32(cos[p * a.cos_row + i + j]);
            s[j] = to_f32(sin[p * a.sin_row + i + j]);
        }
    }
}

/* v: elements d .. d+N-1 of the vector u in shared memory, rotated (BACK: rotated back). */
template <int N, bool BACK>
__device__ __forceinline__ void rotate(const rope_args &a, float (&v)[N], const float *u, int d,
                                       const float (&c)[N], const float (&s)[N])
{
    int half = (int)a.half;
    load_any<float, N>(v, u + d);
    if (d >= 2 * half)
        return;
    bool low = d < half;
    float sign = (low != BACK) ? -1.0f : 1.0f, other[N];
    load_any<float, N>(other, u + (low ? d + half : d - half));
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] = v[j] * c[j] + sign * other[j] * s[j];
}

template <typename T, int N> __device__ __forceinline__ vec<T, N> read(const T *from)
{
    return *reinterpret_cast<const vec<T, N> *>(from);
}

/* A group's share: `HEADS` heads of one token, so that angles are read once. */
struct share {
    int64_t t;
    int head; /* first one */
    bool live;
};

template <int HEADS> __device__ __forceinline__ share share_at(const rope_args &a, uint32_t at)
{
    uint32_t per_token = ((uint32_t)a.heads + HEADS - 1) / HEADS;
    share s;
    s.live = at < (uint32_t)a.tokens * per_token;
    uint32_t n = s.live ? at : 0, t = n / per_token;
    s.t = t;
    s.head = (int)(n - t * per_token) * HEADS;
    return s;
}

template <typename T, int N, int ITEMS, int HEADS>
__global__ void __launch_bounds__(THREADS, ITEMS == 1 ? 8 : 4)
    rope_forward(rope_args a, T *out, float *__restrict__ rstd, const T *x, const T *__restrict__ w,
                 const T *__restrict__ cos, const T *__restrict__ sin,
                 const int32_t *__restrict__ ids)
{
    extern __shared__ __align__(32) float shared[];
    int lane = (int)threadIdx.x % a.group, groups = THREADS / a.group, heads = (int)a.heads;
    float *u = shared + (threadIdx.x / a.group) * a.dim * HEADS;
    share at = share_at<HEADS>(a, blockIdx.x * groups + threadIdx.x / a.group);
    vec<T, N> raw[HEADS][ITEMS];
    float c[ITEMS][N], s[ITEMS][N];
    int32_t p0 = ids[at.t];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) { /* all reads first */
        int d = (i * a.group + lane) * N;
        if (d >= a.dim)
            continue;
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            if (at.head + h < heads)
                raw[h][i] = read<T, N>(x + at.t * a.x_row + (at.head + h) * a.x_head + d);
        angles<T, N>(a, c[i], s[i], at.t, p0, d, cos, sin, ids);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float v[ITEMS][N], squares = 0, r = 1;
        bool live = at.head + h < heads;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                v[i][j] = live && (i * a.group + lane) * N < a.dim ? to_f32(raw[h][i].v[j]) : 0.0f;
                squares += v[i][j] * v[i][j];
            }
        if (w) {
            r = 1.0f / sqrtf(group_sum(squares, a.group) / (float)a.dim + a.eps);
            if (at.live && lane == 0 && live)
                rstd[at.t * heads + at.head + h] = r;
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= a.dim)
                continue;
            if (w) {
                float f[N];
                load_f32<T, N>(f, w + d);
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[i][j] *= r;
                if (a.w_offset == 0)
                    round_all<T, N>(v[i]);
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[i][j] *= a.w_offset + f[j];
                round_all<T, N>(v[i]);
            }
            store_f32<float, N>(u + h * a.dim + d, v[i]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d < a.dim && at.live && at.head + h < heads) {
                float v[N];
                rotate<N, false>(a, v, u + h * a.dim, d, c[i], s[i]);
                store_f32<T, N>(out + at.t * a.out_row + (at.head + h) * a.out_head + d, v);
            }
        }
}

/* partial[block][d]: the sums of the block's groups, joined in order. */
template <int N, int ITEMS>
__device__ __forceinline__ void join_groups(const rope_args &a, float *partial, float *shared,
                                            const float (&dw)[ITEMS][N])
{
    int lane = (int)threadIdx.x % a.group, groups = THREADS / a.group;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int d = (i * a.group + lane) * N;
        if (d < a.dim)
            store_f32<float, N>(shared + threadIdx.x / a.group * a.dim + d, dw[i]);
    }
    __syncthreads();
    for (int d = (int)threadIdx.x; d < a.dim; d += THREADS) {
        float sum = 0;
        for (int g = 0; g < groups; g++)
            sum += shared[g * a.dim + d];
        partial[blockIdx.x * a.dim + d] = sum;
    }
}

template <typename T, int N, int ITEMS, int HEADS>
__global__ void __launch_bounds__(THREADS, ITEMS == 1 ? 3 : 2)
    rope_backward(rope_args a, T *dx, float *__restrict__ partial, const T *dy,
                  const T *__restrict__ x, const float *__restrict__ rstd, const T *__restrict__ w,
                  const T *__restrict__ cos, const T *__restrict__ sin,
                  const int32_t *__restrict__ ids)
{
    extern __shared__ __align__(32) float shared[];
    int lane = (int)threadIdx.x % a.group, groups = THREADS / a.group, heads = (int)a.heads;
    float *u = shared + (threadIdx.x / a.group) * a.dim * HEADS;
    uint32_t first = blockIdx.x * groups + threadIdx.x / a.group, step = gridDim.x * groups;
    uint32_t n = (uint32_t)a.tokens * (((uint32_t)a.heads + HEADS - 1) / HEADS);
    uint32_t rounds = (n + step - 1) / step;
    float dw[ITEMS][N] = {}, f[ITEMS][N];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int d = (i * a.group + lane) * N;
        if (d < a.dim && w)
            load_f32<T, N>(f[i], w + d);
    }
    int32_t p_next = n > 0 ? ids[share_at<HEADS>(a, first).t] : 0;
    for (uint32_t round = 0; round < rounds; round++) { /* all lanes stay for the shuffles */
        share at = share_at<HEADS>(a, first + round * step);
        int32_t p0 = p_next; /* read a round ahead: the angles' addresses wait for it */
        p_next = ids[share_at<HEADS>(a, first + (round + 1) * step).t];
        vec<T, N> grads[HEADS][ITEMS], xs[HEADS][ITEMS];
        float c[ITEMS][N], s[ITEMS][N], r[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            r[h] = w && at.live && at.head + h < heads ? rstd[at.t * heads + at.head + h] : 0.0f;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) { /* all reads first */
            int d = (i * a.group + lane) * N;
            if (d >= a.dim)
                continue;
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                int64_t head = at.head + h;
                if (head >= heads)
                    continue;
                grads[h][i] = read<T, N>(dy + at.t * a.in_row + head * a.in_head + d);
                if (w)
                    xs[h][i] = read<T, N>(x + at.t * a.x_row + head * a.x_head + d);
            }
            angles<T, N>(a, c[i], s[i], at.t, p0, d, cos, sin, ids);
        }
        __syncwarp(); /* the last round's reads of u are done */
#pragma unroll
        for (int h = 0; h < HEADS; h++)
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                int d = (i * a.group + lane) * N;
                float v[N];
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[j] = to_f32(grads[h][i].v[j]);
                if (d < a.dim && at.head + h < heads)
                    store_f32<float, N>(u + h * a.dim + d, v);
            }
        __syncwarp();
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            bool live = at.live && at.head + h < heads;
            float v[ITEMS][N], xh[ITEMS][N], dot = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                int d = (i * a.group + lane) * N;
                if (d >= a.dim || !live)
                    continue;
                rotate<N, true>(a, v[i], u + h * a.dim, d, c[i], s[i]);
                if (!w)
                    continue;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    xh[i][j] = to_f32(xs[h][i].v[j]) * r[h];
                    dw[i][j] += v[i][j] * xh[i][j];
                    v[i][j] *= a.w_offset + f[i][j];
                    dot += v[i][j] * xh[i][j];
                }
            }
            float mean = w ? group_sum(dot, a.group) / (float)a.dim : 0.0f;
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                int d = (i * a.group + lane) * N;
                if (d >= a.dim || !live)
                    continue;
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[i][j] = w ? r[h] * (v[i][j] - xh[i][j] * mean) : v[i][j];
                store_f32<T, N>(dx + at.t * a.out_row + (at.head + h) * a.out_head + d, v[i]);
            }
        }
    }
    if (partial)
        join_groups<N, ITEMS>(a, partial, shared, dw);
}

/* Pieces of WIDE elements when everything lies so, and no piece straddles a rotation's end. */
static bool is_wide(ith_tensor out, ith_tensor in, ith_tensor x, ith_tensor w, ith_tensor cos,
                    ith_tensor sin)
{
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    return rows_aligned(out, n) && rows_aligned(in, n) && rows_aligned(x, n) &&
           rows_aligned(w, n) && rows_aligned(cos, n) && rows_aligned(sin, n);
}

static int group_of(int64_t dim, int64_t n)
{
    int group = 1;
    while (group < 32 && group * n < dim)
        group *= 2;
    return group;
}

static rope_args args_of(ith_tensor out, ith_tensor in, ith_tensor x, ith_tensor cos,
                         ith_tensor sin, ith_tensor position_ids, bool wide)
{
    rope_args a = {};
    a.tokens = x.shape[0];
    a.heads = x.shape[1];
    a.dim = x.shape[2];
    a.half = cos.shape[1];
    a.out_row = out.stride[0];
    a.out_head = out.stride[1];
    a.in_row = in.stride[0];
    a.in_head = in.stride[1];
    a.x_row = x.stride[0];
    a.x_head = x.stride[1];
    a.cos_row = cos.stride[0];
    a.sin_row = sin.stride[0];
    a.axis_stride = position_ids.ndim == 2 ? position_ids.stride[0] : 0;
    a.group = group_of(a.dim, wide ? 16 / ith_dtype_bytes(x.dtype) : 1);
    return a;
}

static unsigned blocks_of(const rope_args &a, int heads, int64_t most)
{
    return grid_of(a.tokens * ith_div_ceil(a.heads, heads), THREADS / a.group, most);
}

static size_t shared_bytes(const rope_args &a, int heads)
{
    return (size_t)(THREADS / a.group * a.dim * heads) * sizeof(float);
}

static ith_status check_dim(ith_ctx *ctx, ith_tensor x)
{
    if (x.shape[2] > MAX_DIM)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "head_dim %lld; the most is %d",
                        (long long)x.shape[2], MAX_DIM);
    ITH_ASSERT(x.shape[0] * x.shape[1] <= INT32_MAX);
    return ITH_OK;
}

static ith_status forward_one(ith_ctx *ctx, ith_tensor out, ith_tensor rstd, ith_tensor x,
                              ith_tensor w, ith_tensor cos, ith_tensor sin, ith_tensor position_ids,
                              float eps, float w_offset)
{
    bool wide = is_wide(out, x, x, w, cos, sin);
    rope_args a = args_of(out, x, x, cos, sin, position_ids, wide);
    a.eps = eps;
    a.w_offset = w_offset;
    ITH_TRY(check_dim(ctx, x));
    if (a.tokens == 0)
        return ITH_OK;
#define LAUNCH(N, ITEMS, HEADS)                                                                    \
    rope_forward<T, N, ITEMS, HEADS><<<blocks_of(a, HEADS, INT32_MAX), THREADS,                    \
                                       shared_bytes(a, HEADS), ith_cuda_stream(ctx)>>>(            \
        a, (T *)out.data, (float *)rstd.data, (const T *)x.data, (const T *)w.data,                \
        (const T *)cos.data, (const T *)sin.data, (const int32_t *)position_ids.data)
    ITH_BY_TYPE(x.dtype, {
        if (wide && a.dim <= 32 * WIDE<T>)
            LAUNCH(WIDE<T>, 1, 4);
        else if (wide)
            LAUNCH(WIDE<T>, MAX_DIM / 32 / WIDE<T>, 1);
        else
            LAUNCH(1, MAX_DIM / 32, 1);
    });
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static ith_status backward_one(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                               ith_tensor x, ith_tensor rstd, ith_tensor w, ith_tensor cos,
                               ith_tensor sin, ith_tensor position_ids, float w_offset)
{
    bool wide = is_wide(dx, dy, x, w, cos, sin);
    rope_args a = args_of(dx, dy, x, cos, sin, position_ids, wide);
    a.w_offset = w_offset;
    ITH_TRY(check_dim(ctx, x));
    if (a.tokens == 0)
        return ITH_OK;
    float *partial = is_absent(dw) || is_absent(w) ? NULL : (float *)ctx->scratch;
    unsigned blocks = 0;
#define LAUNCH(N, ITEMS, HEADS)                                                                    \
    do {                                                                                           \
        blocks = blocks_of(a, HEADS, BLOCKS);                                                      \
        rope_backward<T, N, ITEMS, HEADS>                                                          \
            <<<blocks, THREADS, shared_bytes(a, HEADS), ith_cuda_stream(ctx)>>>(                   \
                a, (T *)dx.data, partial, (const T *)dy.data, (const T *)x.data,                   \
                (const float *)rstd.data, (const T *)w.data, (const T *)cos.data,                  \
                (const T *)sin.data, (const int32_t *)position_ids.data);                          \
    } while (0)
    ITH_BY_TYPE(x.dtype, {
        if (wide && a.dim <= 32 * WIDE<T>)
            LAUNCH(WIDE<T>, 1, 4);
        else if (wide)
            LAUNCH(WIDE<T>, MAX_DIM / 32 / WIDE<T>, 1);
        else
            LAUNCH(1, MAX_DIM / 32, 1);
    });
#undef LAUNCH
    if (partial)
        ith_cuda_add_columns(ith_cuda_stream(ctx), (float *)dw.data, partial, blocks, a.dim);
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static ith_status qk_norm_rope_forward(ith_ctx *ctx, ith_tensor q_out, ith_tensor k_out,
                                       ith_tensor q_rstd, ith_tensor k_rstd, ith_tensor q,
                                       ith_tensor k, ith_tensor q_w, ith_tensor k_w, ith_tensor cos,
                                       ith_tensor sin, ith_tensor position_ids, float eps,
                                       float w_offset)
{
    ITH_TRY(forward_one(ctx, q_out, q_rstd, q, q_w, cos, sin, position_ids, eps, w_offset));
    return forward_one(ctx, k_out, k_rstd, k, k_w, cos, sin, position_ids, eps, w_offset);
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
    return ith_mul_bytes(BLOCKS * q.shape[2], 4);
}

static ith_status qk_norm_rope_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dq_w,
                                        ith_tensor dk_w, ith_tensor dq_out, ith_tensor dk_out,
                                        ith_tensor q, ith_tensor k, ith_tensor q_rstd,
                                        ith_tensor k_rstd, ith_tensor q_w, ith_tensor k_w,
                                        ith_tensor cos, ith_tensor sin, ith_tensor position_ids,
                                        float w_offset)
{
    ITH_TRY(backward_one(ctx, dq, dq_w, dq_out, q, q_rstd, q_w, cos, sin, position_ids, w_offset));
    return backward_one(ctx, dk, dk_w, dk_out, k, k_rstd, k_w, cos, sin, position_ids, w_offset);
}

void ith_cuda_fill_rope(struct ith_backend *b)
{
    b->qk_norm_rope_forward.run = qk_norm_rope_forward;
    b->qk_norm_rope_backward.run = qk_norm_rope_backward;
    b->qk_norm_rope_backward.workspace = qk_norm_rope_backward_workspace;
}
