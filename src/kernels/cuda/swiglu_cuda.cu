/* swiglu_cuda.cu - silu(gate)*up, forward (6I bytes per token) and backward (12I). */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256 };
/* Forward: a block takes FORWARD_THREADS pieces of ROWS rows, so that each thread has four loads on
 * their way. */
enum { FORWARD_THREADS = 128, ROWS = 2 };

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x)); /* e^-x = inf gives 0, as it should */
}

/* For bf16, which cannot tell it from the exact one. */
template <typename T> __device__ __forceinline__ float sigmoid_for(float x)
{
    return sizeof(T) == 2 ? __fdividef(1.0f, 1.0f + __expf(-x)) : sigmoid(x);
}

/* columns: blocks beside each other. */
template <typename T, int N>
__global__ void __launch_bounds__(FORWARD_THREADS)
    swiglu_fwd(T *__restrict__ h, const T *__restrict__ gate_up, int64_t rows, int64_t width,
               int64_t h_row, int64_t gate_row, uint32_t columns)
{
    uint32_t group = blockIdx.x / columns;
    int64_t d = ((int64_t)(blockIdx.x - group * columns) * FORWARD_THREADS + threadIdx.x) * N;
    int64_t t0 = (int64_t)group * ROWS;
    vec<T, N> gate[ROWS] = {}, up[ROWS] = {};
    if (d >= width)
        return;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (t0 + i < rows) {
            const T *from = gate_up + (t0 + i) * gate_row + d;
            gate[i] = *reinterpret_cast<const vec<T, N> *>(from);
            up[i] = *reinterpret_cast<const vec<T, N> *>(from + width);
        }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float out[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            float x = to_f32(gate[i].v[j]);
            out[j] = round_to<T>(x * sigmoid_for<T>(x)) * to_f32(up[i].v[j]);
        }
        if (t0 + i < rows)
            store_f32<T, N>(h + (t0 + i) * h_row + d, out);
    }
}

/* One thread reads the four values of its positions before it writes: outputs may be inputs. */
template <typename T, int N>
__global__ void swiglu_bwd(T *dgate_up, T *h, const T *dh, const T *gate_up, int64_t rows,
                           int64_t width, int64_t dgate_row, int64_t h_row, int64_t dh_row,
                           int64_t gate_row)
{
    int64_t pieces = width / N, n = rows * pieces;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t t = i / pieces, d = (i - t * pieces) * N;
        float gate[N], up[N], grad[N], out[N];
        load_any<T, N>(gate, gate_up + t * gate_row + d);
        load_any<T, N>(up, gate_up + t * gate_row + width + d);
        load_any<T, N>(grad, dh + t * dh_row + d);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float s = sigmoid(gate[j]), silu = gate[j] * s;
            out[j] = round_to<T>(silu) * up[j];
            gate[j] = grad[j] * up[j] * (s * (1.0f + gate[j] * (1.0f - s)));
            up[j] = grad[j] * silu;
        }
        store_f32<T, N>(dgate_up + t * dgate_row + d, gate);
        store_f32<T, N>(dgate_up + t * dgate_row + width + d, up);
        if (h)
            store_f32<T, N>(h + t * h_row + d, out);
    }
}

/* Both halves of a gate_up row start at a wide place. */
static bool halves_aligned(ith_tensor gate_up, int64_t n)
{
    return rows_aligned(gate_up, n) && gate_up.shape[1] / 2 % n == 0;
}

static ith_status swiglu_forward(ith_ctx *ctx, ith_tensor h, ith_tensor gate_up)
{
    int64_t rows = h.shape[0], width = h.shape[1], n = 16 / ith_dtype_bytes(h.dtype);
    if (rows * width == 0)
        return ITH_OK;
    bool wide = rows_aligned(h, n) && halves_aligned(gate_up, n);
    int64_t columns = ith_div_ceil(width, FORWARD_THREADS * (wide ? n : 1));
    unsigned blocks = (unsigned)(columns * ith_div_ceil(rows, ROWS));
#define LAUNCH(N)                                                                                  \
    swiglu_fwd<T, N><<<blocks, FORWARD_THREADS, 0, ith_cuda_stream(ctx)>>>(                        \
        (T *)h.data, (const T *)gate_up.data, rows, width, h.stride[0], gate_up.stride[0],         \
        (uint32_t)columns)
    ITH_BY_WIDTH(h.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, gate_up);
}

static ith_status swiglu_backward(ith_ctx *ctx, ith_tensor dgate_up, ith_tensor h, ith_tensor dh,
                                  ith_tensor gate_up)
{
    int64_t rows = dh.shape[0], width = dh.shape[1], n = 16 / ith_dtype_bytes(dh.dtype);
    if (rows * width == 0)
        return ITH_OK;
    bool wide = rows_aligned(h, n) && rows_aligned(dh, n) && halves_aligned(dgate_up, n) &&
                halves_aligned(gate_up, n);
#define LAUNCH(N)                                                                                  \
    swiglu_bwd<T, N>                                                                               \
        <<<grid_of(rows *width, THREADS *N, 1 << 20), THREADS, 0, ith_cuda_stream(ctx)>>>(         \
            (T *)dgate_up.data, (T *)h.data, (const T *)dh.data, (const T *)gate_up.data, rows,    \
            width, dgate_up.stride[0], h.stride[0], dh.stride[0], gate_up.stride[0])
    ITH_BY_WIDTH(dh.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, gate_up);
}

void ith_cuda_fill_swiglu(struct ith_backend *b)
{
    b->swiglu_forward.run = swiglu_forward;
    b->swiglu_backward.run = swiglu_backward;
}
