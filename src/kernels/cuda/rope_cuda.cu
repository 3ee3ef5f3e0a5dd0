/* rope_cuda.cu - per-head RMSNorm and RoPE of q and k, forward and backward.
 *
 * A group of lanes (a power of two, up to a warp) owns one head vector, in pieces of N elements;
 * the partner of element i, i + half, is exchanged through shared memory, so in-place calls are
 * safe: a group has read its vector before it writes. Backward sums the norm's weight gradient as
 * rmsnorm does: per group in registers, then over groups in order. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, MAX_DIM = 512, BLOCKS = ITH_CUDA_SMS * 8 };

struct rope_args {
    int64_t tokens, heads, dim, half;
    int64_t out_row, out_head, in_row, in_head, x_row, x_head; /* element strides */
    int64_t cos_row, sin_row, axis_stride;                     /* axis_stride 0: one position */
    int group;                                                 /* lanes per head vector */
    float eps, w_offset;
};

/* cos and sin of frequencies i .. i+N-1 at token t. With three axes each frequency has its own row. */
template <typename T, int N>
__device__ __forceinline__ void angles(const rope_args &a, float (&c)[N], float (&s)[N], int64_t t,
                                       int i, const T *cos, const T *sin, const int32_t *ids)
{
    if (a.axis_stride == 0) {
        int64_t p = ids[t];
        load_f32<T, N>(c, cos + p * a.cos_row + i);
        load_f32<T, N>(s, sin + p * a.sin_row + i);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        int64_t p = ids[(i + j) % 3 * a.axis_stride + t];
        c[j] = to_f32(cos[p * a.cos_row + i + j]);
        s[j] = to_f32(sin[p * a.sin_row + i + j]);
    }
}

/* Elements d .. d+N-1 of the rotated (BACK: rotated back) vector u, which lies in shared memory. */
template <typename T, int N, bool BACK>
__device__ __forceinline__ void rotate(const rope_args &a, float (&out)[N], const float *u, int d,
                                       int64_t t, const T *cos, const T *sin, const int32_t *ids)
{
    int half = (int)a.half;
    bool low = d < half;
    int i = low ? d : d - half;
    float sign = (low != BACK) ? -1.0f : 1.0f, c[N], s[N], other[N];
    angles<T, N>(a, c, s, t, i, cos, sin, ids);
    load_any<float, N>(out, u + d);
    load_any<float, N>(other, u + (low ? d + half : d - half));
#pragma unroll
    for (int j = 0; j < N; j++)
        out[j] = out[j] * c[j] + sign * other[j] * s[j];
}

template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    rope_forward(rope_args a, T *out, float *__restrict__ rstd, const T *x, const T *__restrict__ w,
                 const T *__restrict__ cos, const T *__restrict__ sin,
                 const int32_t *__restrict__ ids)
{
    extern __shared__ __align__(32) float shared[];
    int lane = (int)threadIdx.x % a.group, groups = THREADS / a.group;
    float *u = shared + (threadIdx.x / a.group) * a.dim;
    int64_t n = a.tokens * a.heads, step = (int64_t)gridDim.x * groups;
    int64_t first = (int64_t)blockIdx.x * groups + threadIdx.x / a.group;
    int64_t rounds = (n + step - 1) / step;
    for (int64_t round = 0; round < rounds; round++) {
        int64_t at = first + round * step;
        bool live = at < n;
        int64_t t = live ? at / a.heads : 0, h = live ? at - t * a.heads : 0;
        float v[ITEMS][N], squares = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= a.dim)
                break;
            load_any<T, N>(v[i], x + t * a.x_row + h * a.x_head + d);
#pragma unroll
            for (int j = 0; j < N; j++)
                squares += v[i][j] * v[i][j];
        }
        float r = 1;
        if (w) {
            r = 1.0f / sqrtf(group_sum(squares, a.group) / (float)a.dim + a.eps);
            if (live && lane == 0)
                rstd[at] = r;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= a.dim)
                break;
            if (w) {
                float f[N];
                load_f32<T, N>(f, w + d);
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[i][j] = round_to<T>(a.w_offset == 0
                                              ? round_to<T>(v[i][j] * r) * f[j]
                                              : v[i][j] * r * (a.w_offset + f[j]));
            }
            store_f32<float, N>(u + d, v[i]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= a.dim || !live)
                break;
            if (d < 2 * a.half)
                rotate<T, N, false>(a, v[i], u, d, t, cos, sin, ids);
            store_f32<T, N>(out + t * a.out_row + h * a.out_head + d, v[i]);
        }
    }
}

template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    rope_backward(rope_args a, T *dx, float *__restrict__ partial, const T *dy,
                  const T *__restrict__ x, const float *__restrict__ rstd,
                  const T *__restrict__ w, const T *__restrict__ cos, const T *__restrict__ sin,
                  const int32_t *__restrict__ ids)
{
    extern __shared__ __align__(32) float shared[];
    int lane = (int)threadIdx.x % a.group, groups = THREADS / a.group;
    float *u = shared + (threadIdx.x / a.group) * a.dim;
    int64_t n = a.tokens * a.heads, step = (int64_t)gridDim.x * groups;
    int64_t first = (int64_t)blockIdx.x * groups + threadIdx.x / a.group;
    int64_t rounds = (n + step - 1) / step;
    float dw[ITEMS][N];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            dw[i][j] = 0;
    for (int64_t round = 0; round < rounds; round++) {
        int64_t at = first + round * step;
        bool live = at < n;
        int64_t t = live ? at / a.heads : 0, h = live ? at - t * a.heads : 0;
        float v[ITEMS][N], xh[ITEMS][N], dot = 0, r = w && live ? rstd[at] : 1.0f;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= a.dim)
                break;
            load_any<T, N>(v[i], dy + t * a.in_row + h * a.in_head + d);
            store_f32<float, N>(u + d, v[i]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= a.dim || !live)
                break;
            if (d < 2 * a.half)
                rotate<T, N, true>(a, v[i], u, d, t, cos, sin, ids);
            if (!w)
                continue;
            float f[N];
            load_f32<T, N>(xh[i], x + t * a.x_row + h * a.x_head + d);
            load_f32<T, N>(f, w + d);
#pragma unroll
            for (int j = 0; j < N; j++) {
                xh[i][j] *= r;
                dw[i][j] += v[i][j] * xh[i][j];
                v[i][j] *= a.w_offset + f[j];
                dot += v[i][j] * xh[i][j];
            }
        }
        float mean = w ? group_sum(dot, a.group) / (float)a.dim : 0.0f;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= a.dim || !live)
                break;
            if (w)
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[i][j] = r * (v[i][j] - xh[i][j] * mean);
            store_f32<T, N>(dx + t * a.out_row + h * a.out_head + d, v[i]);
        }
    }
    if (!partial)
        return;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int d = (i * a.group + lane) * N;
        if (d < a.dim)
            store_f32<float, N>(partial + first * a.dim + d, dw[i]);
    }
}

void ith_cuda_add_columns(cudaStream_t stream, float *dw, const float *partial, int64_t teams,
                          int64_t width);

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

static rope_args args_of(ith_tensor out, ith_tensor in, ith_tensor x, ith_tensor cos, ith_tensor sin,
                         ith_tensor position_ids, bool wide)
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

static unsigned blocks_of(const rope_args &a)
{
    return grid_of(a.tokens * a.heads, THREADS / a.group, BLOCKS);
}

static size_t shared_bytes(const rope_args &a)
{
    return (size_t)(THREADS / a.group * a.dim) * sizeof(float);
}

static ith_status check_dim(ith_ctx *ctx, ith_tensor x)
{
    if (x.shape[2] > MAX_DIM)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "head_dim %lld; the most is %d",
                        (long long)x.shape[2], MAX_DIM);
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
#define LAUNCH(N, ITEMS)                                                                           \
    rope_forward<T, N, ITEMS>                                                                      \
        <<<blocks_of(a), THREADS, shared_bytes(a), ith_cuda_stream(ctx)>>>(                        \
            a, (T *)out.data, (float *)rstd.data, (const T *)x.data, (const T *)w.data,            \
            (const T *)cos.data, (const T *)sin.data, (const int32_t *)position_ids.data)
    ITH_BY_TYPE(x.dtype, {
        if (wide)
            LAUNCH(WIDE<T>, MAX_DIM / 32 / WIDE<T>);
        else
            LAUNCH(1, MAX_DIM / 32);
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
#define LAUNCH(N, ITEMS)                                                                           \
    rope_backward<T, N, ITEMS><<<blocks_of(a), THREADS, shared_bytes(a), ith_cuda_stream(ctx)>>>(  \
        a, (T *)dx.data, partial, (const T *)dy.data, (const T *)x.data,                           \
        (const float *)rstd.data, (const T *)w.data, (const T *)cos.data, (const T *)sin.data,     \
        (const int32_t *)position_ids.data)
    ITH_BY_TYPE(x.dtype, {
        if (wide)
            LAUNCH(WIDE<T>, MAX_DIM / 32 / WIDE<T>);
        else
            LAUNCH(1, MAX_DIM / 32);
    });
#undef LAUNCH
    if (partial)
        ith_cuda_add_columns(ith_cuda_stream(ctx), (float *)dw.data, partial,
                             (int64_t)blocks_of(a) * (THREADS / a.group), a.dim);
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
    int64_t dim = q.shape[2];
    int64_t wide = THREADS / group_of(dim, 16 / ith_dtype_bytes(q.dtype));
    return ith_mul_bytes(BLOCKS * ith_max_i64(wide, THREADS / group_of(dim, 1)) * dim, 4);
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
