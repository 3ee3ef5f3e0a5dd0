/* vision_cuda.cu - what a vision tower needs besides: LayerNorm, biases, GELU.
 *
 * A block owns a row of a LayerNorm and keeps it in registers, so each element is read once. Sums
 * over rows go by column: every team of threads sums its own rows in order, then the teams' sums
 * are added in order of the team, so the bits do not vary. The number of teams is a constant. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256, TEAMS = ITH_CUDA_SMS * 4, MAX_WIDTH = 16 * 512 };

/* ---- LayerNorm ---- */

struct layernorm_args {
    int64_t rows, width;
    int64_t y, x, dy, dres; /* row strides; backward: y is dx */
    float eps;
};

/* A thread's pieces of a row: place i of N elements begins at (i * TEAM + thread) * N. */
template <typename T, int N, int ITEMS, int TEAM>
__global__ void __launch_bounds__(TEAM)
    layernorm_fwd(layernorm_args a, T *__restrict__ y, float *__restrict__ mean,
                  float *__restrict__ rstd, const T *__restrict__ x, const T *__restrict__ w,
                  const T *__restrict__ b)
{
    int64_t row = blockIdx.x;
    float v[ITEMS][N], sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = (int64_t)(i * TEAM + threadIdx.x) * N;
        if (d >= a.width)
            break;
        load_f32<T, N>(v[i], x + row * a.x + d);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum += v[i][j];
    }
    float m = block_sum<TEAM>(sum) / (float)a.width;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if ((int64_t)(i * TEAM + threadIdx.x) * N >= a.width)
            break;
#pragma unroll
        for (int j = 0; j < N; j++) {
            v[i][j] -= m;
            squares += v[i][j] * v[i][j];
        }
    }
    float r = 1.0f / sqrtf(block_sum<TEAM>(squares) / (float)a.width + a.eps);
    if (threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = (int64_t)(i * TEAM + threadIdx.x) * N;
        if (d >= a.width)
            break;
        float f[N], g[N];
        load_f32<T, N>(f, w + d);
        load_f32<T, N>(g, b + d);
#pragma unroll
        for (int j = 0; j < N; j++)
            f[j] = v[i][j] * r * f[j] + g[j];
        store_f32<T, N>(y + row * a.y + d, f);
    }
}

/* partial: [2][TEAMS, width], the sums of dy*xh and of dy; or NULL. */
template <typename T, int N, int ITEMS, int TEAM>
__global__ void __launch_bounds__(TEAM)
    layernorm_bwd(layernorm_args a, T *dx, float *__restrict__ partial, const T *dy, const T *dres,
                  const T *__restrict__ x, const float *__restrict__ mean,
                  const float *__restrict__ rstd, const T *__restrict__ w)
{
    float dw[ITEMS][N] = {}, db[ITEMS][N] = {};
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        float xh[ITEMS][N], g[ITEMS][N], m = mean[row], r = rstd[row], sum = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int64_t d = (int64_t)(i * TEAM + threadIdx.x) * N;
            if (d >= a.width)
                break;
            float f[N];
            load_f32<T, N>(xh[i], x + row * a.x + d);
            load_any<T, N>(g[i], dy + row * a.dy + d);
            load_f32<T, N>(f, w + d);
#pragma unroll
            for (int j = 0; j < N; j++) {
                xh[i][j] = (xh[i][j] - m) * r;
                dw[i][j] += g[i][j] * xh[i][j];
                db[i][j] += g[i][j];
                g[i][j] *= f[j];
                sum += g[i][j];
                dot += g[i][j] * xh[i][j];
            }
        }
        sum = block_sum<TEAM>(sum) / (float)a.width;
        dot = block_sum<TEAM>(dot) / (float)a.width;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int64_t d = (int64_t)(i * TEAM + threadIdx.x) * N;
            if (d >= a.width)
                break;
            float through[N] = {};
            if (dres)
                load_any<T, N>(through, dres + row * a.dres + d);
#pragma unroll
            for (int j = 0; j < N; j++)
                g[i][j] = r * (g[i][j] - sum - xh[i][j] * dot) + through[j];
            store_f32<T, N>(dx + row * a.y + d, g[i]);
        }
    }
    if (!partial)
        return;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = (int64_t)(i * TEAM + threadIdx.x) * N;
        if (d >= a.width)
            break;
        store_f32<float, N>(partial + blockIdx.x * a.width + d, dw[i]);
        store_f32<float, N>(partial + (TEAMS + blockIdx.x) * a.width + d, db[i]);
    }
}

/* Calls F(T, N, ITEMS, TEAM): the smallest team whose registers hold a row. */
#define BY_WIDTH(width, wide, F)                                                                   \
    do {                                                                                           \
        if ((wide) && (width) <= 128 * 2 * WIDE<T>)                                                \
            F(T, WIDE<T>, 2, 128);                                                                 \
        else if ((wide) && (width) <= 512 * 2 * WIDE<T>)                                           \
            F(T, WIDE<T>, 2, 512);                                                                 \
        else                                                                                       \
            F(T, 1, 16, 512);                                                                      \
    } while (0)

static ith_status check_width(ith_ctx *ctx, ith_tensor x)
{
    if (x.shape[1] > MAX_WIDTH)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "rows of %lld elements; the most is %d",
                        (long long)x.shape[1], MAX_WIDTH);
    return ITH_OK;
}

static ith_status layernorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor mean, ith_tensor rstd,
                                    ith_tensor x, ith_tensor w, ith_tensor b, float eps)
{
    layernorm_args a = {x.shape[0], x.shape[1], y.stride[0], x.stride[0], 0, 0, eps};
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    if (a.rows == 0)
        return ITH_OK;
    ITH_TRY(check_width(ctx, x));
    bool wide =
        rows_aligned(y, n) && rows_aligned(x, n) && rows_aligned(w, n) && rows_aligned(b, n);
#define LAUNCH(T, N, ITEMS, TEAM)                                                                  \
    layernorm_fwd<T, N, ITEMS, TEAM><<<(unsigned)a.rows, TEAM, 0, ith_cuda_stream(ctx)>>>(         \
        a, (T *)y.data, (float *)mean.data, (float *)rstd.data, (const T *)x.data,                 \
        (const T *)w.data, (const T *)b.data)
    ITH_BY_TYPE(x.dtype, BY_WIDTH(a.width, wide, LAUNCH));
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static int64_t layernorm_backward_workspace(ith_ctx *ctx, ith_tensor dx, ith_tensor dw,
                                            ith_tensor db, ith_tensor dy, ith_tensor dres,
                                            ith_tensor x, ith_tensor mean, ith_tensor rstd,
                                            ith_tensor w)
{
    (void)ctx, (void)dx, (void)db, (void)dy, (void)dres, (void)mean, (void)rstd, (void)w;
    return is_absent(dw) ? 0 : ith_mul_bytes(2 * TEAMS * x.shape[1], 4);
}

static ith_status layernorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor db,
                                     ith_tensor dy, ith_tensor dres, ith_tensor x, ith_tensor mean,
                                     ith_tensor rstd, ith_tensor w)
{
    layernorm_args a = {x.shape[0],     x.shape[1], dx.stride[0], x.stride[0], dy.stride[0],
                        dres.stride[0], 0};
    int64_t n = 16 / ith_dtype_bytes(x.dtype), teams = ith_min_i64(a.rows, TEAMS);
    if (a.rows == 0)
        return ITH_OK;
    ITH_TRY(check_width(ctx, x));
    bool wide = rows_aligned(dx, n) && rows_aligned(dy, n) && rows_aligned(dres, n) &&
                rows_aligned(x, n) && rows_aligned(w, n);
    float *partial = is_absent(dw) ? NULL : (float *)ctx->scratch;
#define LAUNCH(T, N, ITEMS, TEAM)                                                                  \
    layernorm_bwd<T, N, ITEMS, TEAM><<<(unsigned)teams, TEAM, 0, ith_cuda_stream(ctx)>>>(          \
        a, (T *)dx.data, partial, (const T *)dy.data, (const T *)dres.data, (const T *)x.data,     \
        (const float *)mean.data, (const float *)rstd.data, (const T *)w.data)
    ITH_BY_TYPE(x.dtype, BY_WIDTH(a.width, wide, LAUNCH));
#undef LAUNCH
    if (partial) {
        ith_columns sums[2] = {{(float *)dw.data, partial, teams},
                               {(float *)db.data, partial + TEAMS * a.width, teams}};
        ith_cuda_add_columns(ith_cuda_stream(ctx), sums, 2, a.width);
    }
    return ITH_CUDA_LAUNCHED(ctx, x);
}

/* ---- elements of rows ---- */

struct element_args {
    int64_t rows, pieces; /* of N elements, per row */
    int64_t y, x, dy;     /* row strides */
};

template <typename T, int N>
__global__ void bias_add_kernel(element_args a, T *y, const T *__restrict__ b)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.rows * a.pieces;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t t = i / a.pieces, d = (i - t * a.pieces) * N;
        float v[N], f[N];
        load_any<T, N>(v, y + t * a.y + d);
        load_f32<T, N>(f, b + d);
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] += f[j];
        store_f32<T, N>(y + t * a.y + d, v);
    }
}

static ith_status bias_add(ith_ctx *ctx, ith_tensor y, ith_tensor b)
{
    int64_t n = 16 / ith_dtype_bytes(y.dtype);
    if (ith_numel(y) == 0)
        return ITH_OK;
    bool wide = rows_aligned(y, n) && rows_aligned(b, n);
    element_args a = {y.shape[0], y.shape[1] / (wide ? n : 1), y.stride[0], 0, 0};
#define LAUNCH(N)                                                                                  \
    bias_add_kernel<T, N>                                                                          \
        <<<grid_of(a.rows *a.pieces, THREADS, 1 << 20), THREADS, 0, ith_cuda_stream(ctx)>>>(       \
            a, (T *)y.data, (const T *)b.data)
    ITH_BY_WIDTH(y.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, y);
}

/* partial[team][d]: sum over rows team, team + teams, ... */
template <typename T, int N>
__global__ void column_parts(float *__restrict__ partial, const T *__restrict__ dy, int64_t rows,
                             int64_t width, int64_t dy_row)
{
    int64_t d = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N, team = blockIdx.y;
    float sum[N] = {};
    if (d >= width)
        return;
#pragma unroll 4
    for (int64_t t = team; t < rows; t += gridDim.y) {
        float v[N];
        load_f32<T, N>(v, dy + t * dy_row + d);
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] += v[j];
    }
    store_f32<float, N>(partial + team * width + d, sum);
}

static int64_t bias_backward_workspace(ith_ctx *ctx, ith_tensor db, ith_tensor dy)
{
    (void)ctx, (void)db;
    return ith_mul_bytes(TEAMS * dy.shape[1], 4);
}

static ith_status bias_backward(ith_ctx *ctx, ith_tensor db, ith_tensor dy)
{
    int64_t n = 16 / ith_dtype_bytes(dy.dtype), width = dy.shape[1];
    int64_t teams = ith_min_i64(ith_div_ceil(dy.shape[0], 16), TEAMS);
    if (ith_numel(dy) == 0)
        return ITH_OK;
    bool wide = rows_aligned(dy, n);
    float *partial = (float *)ctx->scratch;
#define LAUNCH(N)                                                                                  \
    column_parts<T, N>                                                                             \
        <<<dim3((unsigned)ith_div_ceil(width, 64 * N), (unsigned)teams), 64, 0,                    \
           ith_cuda_stream(ctx)>>>(partial, (const T *)dy.data, dy.shape[0], width, dy.stride[0])
    ITH_BY_WIDTH(dy.dtype, wide, LAUNCH);
#undef LAUNCH
    ith_columns sum = {(float *)db.data, partial, teams};
    ith_cuda_add_columns(ith_cuda_stream(ctx), &sum, 1, width);
    return ITH_CUDA_LAUNCHED(ctx, dy);
}

/* ---- GELU ---- */

__device__ __forceinline__ float tanh_inside(float x)
{
    return tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x));
}

template <bool APPROXIMATE> __device__ __forceinline__ float gelu(float x)
{
    if (APPROXIMATE)
        return 0.5f * x * (1.0f + tanh_inside(x));
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

template <bool APPROXIMATE> __device__ __forceinline__ float gelu_slope(float x)
{
    if (APPROXIMATE) {
        float t = tanh_inside(x);
        float inner = 0.79788456080286536f * (1.0f + 3.0f * 0.044715f * x * x);
        return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
    }
    return 0.5f * (1.0f + erff(x * 0.70710678118654752f)) +
           x * 0.39894228040143268f * expf(-0.5f * x * x);
}

/* y = gelu(x), or (dy given) dy * slope(x). */
template <typename T, int N, bool APPROXIMATE>
__global__ void gelu_kernel(element_args a, T *y, const T *dy, const T *x)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.rows * a.pieces;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t t = i / a.pieces, d = (i - t * a.pieces) * N;
        float v[N], g[N];
        load_any<T, N>(v, x + t * a.x + d);
        if (dy)
            load_any<T, N>(g, dy + t * a.dy + d);
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = dy ? g[j] * gelu_slope<APPROXIMATE>(v[j]) : gelu<APPROXIMATE>(v[j]);
        store_f32<T, N>(y + t * a.y + d, v);
    }
}

/* dy absent: forward. */
static ith_status gelu_of(ith_ctx *ctx, ith_tensor y, ith_tensor dy, ith_tensor x, bool approximate)
{
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    if (ith_numel(x) == 0)
        return ITH_OK;
    bool wide = rows_aligned(y, n) && rows_aligned(x, n) && rows_aligned(dy, n);
    element_args a = {x.shape[0], x.shape[1] / (wide ? n : 1), y.stride[0], x.stride[0],
                      dy.stride[0]};
#define LAUNCH(N, A)                                                                               \
    gelu_kernel<T, N, A>                                                                           \
        <<<grid_of(a.rows *a.pieces, THREADS, 1 << 20), THREADS, 0, ith_cuda_stream(ctx)>>>(       \
            a, (T *)y.data, (const T *)dy.data, (const T *)x.data)
    ITH_BY_TYPE(x.dtype, {
        if (wide && approximate)
            LAUNCH(WIDE<T>, true);
        else if (wide)
            LAUNCH(WIDE<T>, false);
        else if (approximate)
            LAUNCH(1, true);
        else
            LAUNCH(1, false);
    });
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static ith_status gelu_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, bool approximate)
{
    return gelu_of(ctx, y, ith_tensor_none(), x, approximate);
}

static ith_status gelu_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor x,
                                bool approximate)
{
    return gelu_of(ctx, dx, dy, x, approximate);
}

void ith_cuda_fill_vision(struct ith_backend *b)
{
    b->layernorm_forward.run = layernorm_forward;
    b->layernorm_backward.run = layernorm_backward;
    b->layernorm_backward.workspace = layernorm_backward_workspace;
    b->bias_add.run = bias_add;
    b->bias_backward.run = bias_backward;
    b->bias_backward.workspace = bias_backward_workspace;
    b->gelu_forward.run = gelu_forward;
    b->gelu_backward.run = gelu_backward;
}
