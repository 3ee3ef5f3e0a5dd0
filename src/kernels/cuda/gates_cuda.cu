/* gates_cuda.cu - sigmoid gates of attention output (6 to 10 bytes per element in bf16) and of the
 * shared expert. A thread reads its places before it writes them: outputs may be inputs. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x)); /* e^-x = inf gives 0, as it should */
}

/* Where [T,H,D] lies. */
struct place {
    int64_t row, head;
};

static place place_of(ith_tensor t)
{
    return {t.stride[0], t.stride[1]};
}

struct gate_args {
    int64_t count; /* pieces of N elements */
    uint32_t heads, pieces;
    place y, x, gate, dgate;
};

/* Head and offset of piece i. */
struct piece {
    int64_t t;
    uint32_t h, d;
};

template <int N> __device__ __forceinline__ piece piece_at(const gate_args &a, int64_t i)
{
    int64_t head = i / a.pieces;
    piece p;
    p.d = (uint32_t)(i - head * a.pieces) * N;
    p.t = head / a.heads;
    p.h = (uint32_t)(head - p.t * a.heads);
    return p;
}

__device__ __forceinline__ int64_t at(const place &s, const piece &p)
{
    return p.t * s.row + p.h * s.head + p.d;
}

template <typename T, int N>
__global__ void gate_fwd(gate_args a, T *y, const T *x, const T *__restrict__ gate)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.count;
         i += (int64_t)gridDim.x * blockDim.x) {
        piece p = piece_at<N>(a, i);
        float v[N], g[N];
        load_any<T, N>(v, x + at(a.x, p));
        load_f32<T, N>(g, gate + at(a.gate, p));
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] *= round_to<T>(sigmoid(g[j]));
        store_f32<T, N>(y + at(a.y, p), v);
    }
}

/* y: dy and dx. */
template <typename T, int N>
__global__ void gate_bwd(gate_args a, place dx_at, T *dx, T *__restrict__ dgate, const T *dy,
                         const T *__restrict__ x, const T *__restrict__ gate)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.count;
         i += (int64_t)gridDim.x * blockDim.x) {
        piece p = piece_at<N>(a, i);
        float grad[N], v[N], g[N];
        load_any<T, N>(grad, dy + at(a.y, p));
        load_f32<T, N>(v, x + at(a.x, p));
        load_f32<T, N>(g, gate + at(a.gate, p));
#pragma unroll
        for (int j = 0; j < N; j++) {
            float s = sigmoid(g[j]);
            g[j] = grad[j] * v[j] * s * (1.0f - s);
            grad[j] *= s;
        }
        store_f32<T, N>(dx + at(dx_at, p), grad);
        store_f32<T, N>(dgate + at(a.dgate, p), g);
    }
}

static gate_args args_of(ith_tensor x, ith_tensor gate, int64_t n)
{
    gate_args a = {};
    a.count = ith_numel(x) / n;
    a.heads = (uint32_t)x.shape[1];
    a.pieces = (uint32_t)(x.shape[2] / n);
    a.x = place_of(x);
    a.gate = place_of(gate);
    return a;
}

static ith_status sigmoid_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor gate)
{
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    if (ith_numel(x) == 0)
        return ITH_OK;
    bool wide = rows_aligned(y, n) && rows_aligned(x, n) && rows_aligned(gate, n);
    gate_args a = args_of(x, gate, wide ? n : 1);
    a.y = place_of(y);
#define LAUNCH(N)                                                                                  \
    gate_fwd<T, N><<<grid_of(a.count, THREADS, 1 << 20), THREADS, 0, ith_cuda_stream(ctx)>>>(      \
        a, (T *)y.data, (const T *)x.data, (const T *)gate.data)
    ITH_BY_WIDTH(x.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static ith_status sigmoid_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate,
                                        ith_tensor dy, ith_tensor x, ith_tensor gate)
{
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    if (ith_numel(x) == 0)
        return ITH_OK;
    bool wide = rows_aligned(dx, n) && rows_aligned(dgate, n) && rows_aligned(dy, n) &&
                rows_aligned(x, n) && rows_aligned(gate, n);
    gate_args a = args_of(x, gate, wide ? n : 1);
    a.y = place_of(dy);
    a.dgate = place_of(dgate);
#define LAUNCH(N)                                                                                  \
    gate_bwd<T, N><<<grid_of(a.count, THREADS, 1 << 20), THREADS, 0, ith_cuda_stream(ctx)>>>(      \
        a, place_of(dx), (T *)dx.data, (T *)dgate.data, (const T *)dy.data, (const T *)x.data,     \
        (const T *)gate.data)
    ITH_BY_WIDTH(x.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

/* ---- one gate for a row: a warp each ---- */

struct row_gate_args {
    int64_t rows, width;
    int64_t y, base, x, gate, dgate; /* row strides */
};

template <typename T, int N>
__global__ void row_gate_fwd(row_gate_args a, T *y, const T *base, const T *__restrict__ x,
                             const T *__restrict__ gate)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = (int)threadIdx.x % 32;
    if (row >= a.rows)
        return;
    float s = round_to<T>(sigmoid(to_f32(gate[row * a.gate])));
#pragma unroll 4
    for (int64_t d = lane * N; d < a.width; d += 32 * N) {
        float v[N], b[N];
        load_any<T, N>(b, base + row * a.base + d);
        load_f32<T, N>(v, x + row * a.x + d);
#pragma unroll
        for (int j = 0; j < N; j++)
            v[j] = b[j] + s * v[j];
        store_f32<T, N>(y + row * a.y + d, v);
    }
}

/* y: dy;  base: dx. */
template <typename T, int N>
__global__ void row_gate_bwd(row_gate_args a, T *dx, T *__restrict__ dgate,
                             const T *__restrict__ dy, const T *x, const T *__restrict__ gate)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = (int)threadIdx.x % 32;
    if (row >= a.rows)
        return;
    float s = sigmoid(to_f32(gate[row * a.gate])), sum = 0;
#pragma unroll 4
    for (int64_t d = lane * N; d < a.width; d += 32 * N) {
        float v[N], g[N];
        load_f32<T, N>(g, dy + row * a.y + d);
        load_any<T, N>(v, x + row * a.x + d);
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum += g[j] * v[j];
            g[j] *= s;
        }
        store_f32<T, N>(dx + row * a.base + d, g);
    }
    sum = group_sum(sum, 32);
    if (lane == 0)
        dgate[row * a.dgate] = from_f32<T>(sum * s * (1.0f - s));
}

static ith_status row_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                                   ith_tensor gate)
{
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    row_gate_args a = {x.shape[0],     x.shape[1], y.stride[0], base.stride[0], x.stride[0],
                       gate.stride[0], 0};
    if (ith_numel(x) == 0)
        return ITH_OK;
    bool wide = rows_aligned(y, n) && rows_aligned(base, n) && rows_aligned(x, n);
#define LAUNCH(N)                                                                                  \
    row_gate_fwd<T, N>                                                                             \
        <<<(unsigned)ith_div_ceil(a.rows, WARPS), THREADS, 0, ith_cuda_stream(ctx)>>>(             \
            a, (T *)y.data, (const T *)base.data, (const T *)x.data, (const T *)gate.data)
    ITH_BY_WIDTH(x.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static ith_status row_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate, ith_tensor dy,
                                    ith_tensor x, ith_tensor gate)
{
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    row_gate_args a = {x.shape[0],  x.shape[1],     dy.stride[0],   dx.stride[0],
                       x.stride[0], gate.stride[0], dgate.stride[0]};
    if (ith_numel(x) == 0)
        return ITH_OK;
    bool wide = rows_aligned(dx, n) && rows_aligned(dy, n) && rows_aligned(x, n);
#define LAUNCH(N)                                                                                  \
    row_gate_bwd<T, N>                                                                             \
        <<<(unsigned)ith_div_ceil(a.rows, WARPS), THREADS, 0, ith_cuda_stream(ctx)>>>(             \
            a, (T *)dx.data, (T *)dgate.data, (const T *)dy.data, (const T *)x.data,               \
            (const T *)gate.data)
    ITH_BY_WIDTH(x.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

void ith_cuda_fill_gates(struct ith_backend *b)
{
    b->sigmoid_gate_forward.run = sigmoid_gate_forward;
    b->sigmoid_gate_backward.run = sigmoid_gate_backward;
    b->row_gate_forward.run = row_gate_forward;
    b->row_gate_backward.run = row_gate_backward;
}
