/* norm_cuda.cu - RMSNorm with residual, forward and backward.
 *
 * One team of TEAM threads owns a row and keeps it in registers (ITEMS pieces of N elements each),
 * so each element is read once; backward copies the next row to shared memory meanwhile, for more
 * reads in flight than registers hold. Forward moves 2 to 4 rows of 2D bytes per token, backward 3
 * to 4. dw: a team sums the rows it owns in registers; the column sums of all blocks are then added
 * in order of the block, so the bits do not vary. The most blocks are a constant. */
#include "kernels/cuda/common.cuh"

enum { BLOCKS = ITH_CUDA_SMS * 4 };

struct norm_args {
    int64_t rows, width;
    int64_t y, sum, x, residual; /* row strides, elements */
    float eps, w_offset;
};

/* Sum over the team, which is the block or, for 32 threads, a warp of it. */
template <int TEAM> __device__ __forceinline__ float team_sum(float x)
{
    return TEAM == 32 ? group_sum(x, 32) : block_sum<TEAM>(x);
}

template <typename T, int N, int ITEMS, int TEAM>
__global__ void __launch_bounds__(TEAM == 32 ? 128 : TEAM)
    forward(norm_args a, T *y, T *sum, float *__restrict__ rstd, const T *x, const T *residual,
            const T *__restrict__ w)
{
    int per_block = (int)blockDim.x / TEAM;
    int64_t row = (int64_t)blockIdx.x * per_block + threadIdx.x / TEAM;
    int lane = (int)threadIdx.x % TEAM;
    if (row >= a.rows)
        return; /* a whole team */
    float s[ITEMS][N], squares = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = (int64_t)(i * TEAM + lane) * N;
        if (d >= a.width)
            break;
        load_any<T, N>(s[i], x + row * a.x + d);
        if (residual) {
            float r[N];
            load_any<T, N>(r, residual + row * a.residual + d);
#pragma unroll
            for (int j = 0; j < N; j++)
                s[i][j] += r[j];
            round_all<T, N>(s[i]);
            store_f32<T, N>(sum + row * a.sum + d, s[i]);
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            squares += s[i][j] * s[i][j];
    }
    squares = team_sum<TEAM>(squares);
    float r = 1.0f / sqrtf(squares / (float)a.width + a.eps);
    if (lane == 0)
        rstd[row] = r;
    if (!y)
        return;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = (int64_t)(i * TEAM + lane) * N;
        if (d >= a.width)
            break;
        float f[N];
        load_f32<T, N>(f, w + d);
#pragma unroll
        for (int j = 0; j < N; j++)
            s[i][j] *= r;
        if (a.w_offset == 0)
            round_all<T, N>(s[i]);
#pragma unroll
        for (int j = 0; j < N; j++)
            f[j] = s[i][j] * (a.w_offset + f[j]);
        store_f32<T, N>(y + row * a.y + d, f);
    }
}

struct norm_back_args {
    int64_t rows, width;
    int64_t dx, dy, dres, x; /* row strides, elements */
    float w_offset;
};

/* What a thread needs of a row: its pieces of x, dy and dres. */
enum { X, DY, DRES, OPERANDS };

/* Starts the copies of a row to the thread's own places in `to`, [OPERANDS][ITEMS][threads]. */
template <typename T, int N, int ITEMS, int TEAM>
__device__ __forceinline__ void fetch(vec<T, N> *to, const norm_back_args &a, int64_t row,
                                      const T *x, const T *dy, const T *dres)
{
    int lane = (int)threadIdx.x % TEAM;
    if (row < a.rows)
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int64_t d = (int64_t)(i * TEAM + lane) * N;
            vec<T, N> *own = to + i * blockDim.x + threadIdx.x;
            if (d >= a.width)
                break;
            copy_ahead(own + X * ITEMS * blockDim.x, x + row * a.x + d);
            copy_ahead(own + DY * ITEMS * blockDim.x, dy + row * a.dy + d);
            if (dres)
                copy_ahead(own + DRES * ITEMS * blockDim.x, dres + row * a.dres + d);
        }
    copies_end();
}

/* Bytes of two rows' operands, one being worked on while the other comes. */
template <typename T, int N, int ITEMS, int TEAM> static size_t backward_shared()
{
    return 2 * (size_t)OPERANDS * ITEMS * (TEAM == 32 ? 128 : TEAM) * sizeof(vec<T, N>);
}

/* A team's columns of dw stay in registers. */
template <typename T, int N, int ITEMS, int TEAM>
__global__ void __launch_bounds__(TEAM == 32 ? 128 : TEAM, TEAM == 512 ? 1 : 4)
    backward(norm_back_args a, T *dx, float *__restrict__ partial, const T *dy, const T *dres,
             const T *__restrict__ x, const float *__restrict__ rstd, const T *__restrict__ w)
{
    extern __shared__ __align__(32) char shared[];
    vec<T, N> *buffers = reinterpret_cast<vec<T, N> *>(shared);
    int per_block = (int)blockDim.x / TEAM, lane = (int)threadIdx.x % TEAM;
    int places = OPERANDS * ITEMS * (int)blockDim.x, side = 0;
    int64_t team = (int64_t)blockIdx.x * per_block + threadIdx.x / TEAM;
    int64_t teams = (int64_t)gridDim.x * per_block;
    float dw[ITEMS][N] = {}, r_next = team < a.rows ? rstd[team] : 0.0f;
    vec<T, N> ws[ITEMS] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if ((i * TEAM + lane) * N < a.width)
            ws[i] = *reinterpret_cast<const vec<T, N> *>(w + (i * TEAM + lane) * N);
    fetch<T, N, ITEMS, TEAM>(buffers, a, team, x, dy, dres);
    for (int64_t row = team; row < a.rows; row += teams, side ^= 1) {
        const vec<T, N> *own = buffers + side * places + threadIdx.x;
        float dot = 0, r = r_next;
        fetch<T, N, ITEMS, TEAM>(buffers + (1 - side) * places, a, row + teams, x, dy, dres);
        r_next = row + teams < a.rows ? rstd[row + teams] : 0.0f;
        copies_wait<1>();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int64_t d = (int64_t)(i * TEAM + lane) * N;
            if (d >= a.width)
                continue;
            vec<T, N> xs = own[(X * ITEMS + i) * blockDim.x],
                      gs = own[(DY * ITEMS + i) * blockDim.x];
#pragma unroll
            for (int j = 0; j < N; j++) {
                float xh = to_f32(xs.v[j]) * r, g = to_f32(gs.v[j]);
                dw[i][j] += g * xh;
                dot += g * (a.w_offset + to_f32(ws[i].v[j])) * xh;
            }
        }
        float mean = team_sum<TEAM>(dot) / (float)a.width;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int64_t d = (int64_t)(i * TEAM + lane) * N;
            if (d >= a.width)
                continue;
            vec<T, N> xs = own[(X * ITEMS + i) * blockDim.x],
                      gs = own[(DY * ITEMS + i) * blockDim.x];
            vec<T, N> through = dres ? own[(DRES * ITEMS + i) * blockDim.x] : vec<T, N>{};
            float f[N];
#pragma unroll
            for (int j = 0; j < N; j++) {
                float xh = to_f32(xs.v[j]) * r;
                float h = to_f32(gs.v[j]) * (a.w_offset + to_f32(ws[i].v[j]));
                f[j] = r * (h - xh * mean) + to_f32(through.v[j]);
            }
            store_f32<T, N>(dx + row * a.dx + d, f);
        }
    }
    if (!partial)
        return;
    if constexpr (TEAM == 32) { /* the block's warps, joined in order */
        float *joined = reinterpret_cast<float *>(shared);
        copies_wait();
        __syncthreads();
        float *own = joined + threadIdx.x / 32 * (32 * ITEMS * N);
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            store_f32<float, N>(own + (i * 32 + lane) * N, dw[i]);
        __syncthreads();
        for (int64_t d = threadIdx.x; d < a.width; d += 128)
            partial[blockIdx.x * a.width + d] = joined[d] + joined[32 * ITEMS * N + d] +
                                                joined[2 * 32 * ITEMS * N + d] +
                                                joined[3 * 32 * ITEMS * N + d];
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int64_t d = (int64_t)(i * TEAM + lane) * N;
            if (d < a.width)
                store_f32<float, N>(partial + team * a.width + d, dw[i]);
        }
    }
}

struct column_sums {
    ith_columns sum[2];
};

/* 32 columns by 32 lanes, lanes joined in order; blockIdx.y: which sum. */
__global__ void add_columns(const __grid_constant__ column_sums sums, int64_t width)
{
    __shared__ float part[32][33];
    const ith_columns &s = sums.sum[blockIdx.y];
    int64_t d = (int64_t)blockIdx.x * 32 + threadIdx.x, teams = s.teams;
    const float *partial = s.partial + d;
    float sum = 0;
    if (d < width)
#pragma unroll 16
        for (int64_t t = threadIdx.y; t < teams; t += 32)
            sum += partial[t * width];
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && d < width) {
        for (int i = 1; i < 32; i++)
            sum += part[i][threadIdx.x];
        s.dw[d] += sum;
    }
}

void ith_cuda_add_columns(cudaStream_t stream, const ith_columns *sums, int count, int64_t width)
{
    column_sums all = {{sums[0], sums[count - 1]}};
    add_columns<<<dim3((unsigned)ith_div_ceil(width, 32), (unsigned)count), dim3(32, 32), 0,
                  stream>>>(all, width);
}

/* Calls F<T, N, ITEMS, TEAM>: the smallest team whose registers hold a row. */
#define BY_WIDTH(width, wide, F)                                                                   \
    do {                                                                                           \
        if (wide) {                                                                                \
            if ((width) <= 32 * 4 * WIDE<T>)                                                       \
                F(T, WIDE<T>, 4, 32);                                                              \
            else if ((width) <= 128 * 4 * WIDE<T>)                                                 \
                F(T, WIDE<T>, 4, 128);                                                             \
            else                                                                                   \
                F(T, WIDE<T>, 4, 512);                                                             \
        } else {                                                                                   \
            F(T, 1, 16, 512);                                                                      \
        }                                                                                          \
    } while (0)

/* Rows wider than this are not built: no model has them. */
static ith_status check_width(ith_ctx *ctx, ith_tensor x, bool wide)
{
    int64_t most = wide ? 512 * 4 * 16 / ith_dtype_bytes(x.dtype) : 512 * 16;
    if (x.shape[1] > most)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "rows of %lld elements; the most is %lld",
                        (long long)x.shape[1], (long long)most);
    return ITH_OK;
}

static ith_status rmsnorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor sum, ith_tensor rstd,
                                  ith_tensor x, ith_tensor residual, ith_tensor w, float eps,
                                  float w_offset)
{
    norm_args a = {x.shape[0],  x.shape[1],         y.stride[0], sum.stride[0],
                   x.stride[0], residual.stride[0], eps,         w_offset};
    if (a.rows == 0)
        return ITH_OK;
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    bool wide = rows_aligned(y, n) && rows_aligned(sum, n) && rows_aligned(x, n) &&
                rows_aligned(residual, n) && rows_aligned(w, n);
    ITH_TRY(check_width(ctx, x, wide));
#define LAUNCH(T, N, ITEMS, TEAM)                                                                  \
    forward<T, N, ITEMS, TEAM>                                                                     \
        <<<(unsigned)ith_div_ceil(a.rows, TEAM == 32 ? 4 : 1), TEAM == 32 ? 128 : TEAM, 0,         \
           ith_cuda_stream(ctx)>>>(a, (T *)y.data, (T *)sum.data, (float *)rstd.data,              \
                                   (const T *)x.data, (const T *)residual.data, (const T *)w.data)
    ITH_BY_TYPE(x.dtype, BY_WIDTH(a.width, wide, LAUNCH));
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static int64_t rmsnorm_backward_workspace(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                          ith_tensor dres, ith_tensor x, ith_tensor rstd,
                                          ith_tensor w, float w_offset)
{
    (void)ctx, (void)dx, (void)dy, (void)dres, (void)rstd, (void)w, (void)w_offset;
    return is_absent(dw) ? 0 : ith_mul_bytes(BLOCKS * x.shape[1], 4);
}

static ith_status rmsnorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                   ith_tensor dres, ith_tensor x, ith_tensor rstd, ith_tensor w,
                                   float w_offset)
{
    norm_back_args a = {x.shape[0],     x.shape[1],  dx.stride[0], dy.stride[0],
                        dres.stride[0], x.stride[0], w_offset};
    if (a.rows == 0)
        return ITH_OK;
    int64_t n = 16 / ith_dtype_bytes(x.dtype), teams = 0;
    bool wide = rows_aligned(dx, n) && rows_aligned(dy, n) && rows_aligned(dres, n) &&
                rows_aligned(x, n) && rows_aligned(w, n);
    ITH_TRY(check_width(ctx, x, wide));
    float *partial = is_absent(dw) ? NULL : (float *)ctx->scratch;
#define LAUNCH(T, N, ITEMS, TEAM)                                                                  \
    do {                                                                                           \
        int64_t per_block = TEAM == 32 ? 4 : 1;                                                    \
        int64_t blocks = ith_min_i64(ith_div_ceil(a.rows, per_block), BLOCKS);                     \
        teams = blocks;                                                                            \
        size_t shared = backward_shared<T, N, ITEMS, TEAM>();                                      \
        ITH_CUDA_TRY(ctx,                                                                          \
                     cudaFuncSetAttribute(backward<T, N, ITEMS, TEAM>,                             \
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,             \
                                          (int)shared),                                            \
                     x);                                                                           \
        backward<T, N, ITEMS, TEAM>                                                                \
            <<<(unsigned)blocks, TEAM == 32 ? 128 : TEAM, shared, ith_cuda_stream(ctx)>>>(         \
                a, (T *)dx.data, partial, (const T *)dy.data, (const T *)dres.data,                \
                (const T *)x.data, (const float *)rstd.data, (const T *)w.data);                   \
    } while (0)
    ITH_BY_TYPE(x.dtype, BY_WIDTH(a.width, wide, LAUNCH));
#undef LAUNCH
    if (partial) {
        ith_columns sum = {(float *)dw.data, partial, teams};
        ith_cuda_add_columns(ith_cuda_stream(ctx), &sum, 1, a.width);
    }
    return ITH_CUDA_LAUNCHED(ctx, x);
}

void ith_cuda_fill_norm(struct ith_backend *b)
{
    b->rmsnorm_forward.run = rmsnorm_forward;
    b->rmsnorm_backward.run = rmsnorm_backward;
    b->rmsnorm_backward.workspace = rmsnorm_backward_workspace;
}
