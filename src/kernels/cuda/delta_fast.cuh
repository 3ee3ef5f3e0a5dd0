/* delta_fast.cuh - what the tensor-core kernels of the gated delta rule share: bf16, heads of 128.
 *
 * delta_fast.cu makes norms, decays, Z and P; delta_states.cu walks along the chunks;
 * delta_grads.cu makes the gradients that are left. Products take bf16 operands and sum in f32.
 * What enters them unrounded: q, k, v and dO as they are, with norms and decays applied to rows of
 * the result or of the other operand; what is rounded: Z, P, D, the states and dR.
 *
 * Tiles of 64 tokens are pieces of 64 rows and 64 columns, in shared memory as hopper.cuh has them
 * and byte for byte so in scratch: Z and P are one piece, y and dr two, side by side, a state four,
 * [2,2], rows being keys. Rows behind the end of a chunk are zero. */
#ifndef ITH_KERNELS_CUDA_DELTA_FAST_CUH
#define ITH_KERNELS_CUDA_DELTA_FAST_CUH

#include "kernels/cuda/delta_cuda.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.h"

enum { C = DELTA_C, DIM = 128, TILE_BYTES = C * DIM * 2, SQUARE_BYTES = C * C * 2 };

/* Element (row, col) of a tile. */
__device__ __forceinline__ int place_of(int row, int col)
{
    return col / 64 * (C * 64) + row * 64 + (col / 8 % 8 ^ row % 8) * 8 + col % 8;
}

/* Rows from `from` on of `pieces` pieces; THREADS threads. */
template <int THREADS> __device__ __forceinline__ void clear_rows(void *tile, int pieces, int from)
{
    int per_row = pieces * 8;
    for (int n = (int)threadIdx.x; n < (C - from) * per_row; n += THREADS)
        *(uint4 *)((char *)tile + n % per_row / 8 * PIECE_BYTES + (from + n / per_row) * 128 +
                   n % 8 * 16) = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void put2(bf16 *to, float x, float y)
{
    *reinterpret_cast<__nv_bfloat162 *>(to) = __floats2bfloat162_rn(x, y);
}

/* G in units of log 2, in two parts that add up to 48 bits: what a.sums holds here. */
struct log_sum {
    float high, low;
};

__device__ __forceinline__ log_sum log_sum_of(double g)
{
    double x = g * 1.4426950408889634074;
    float high = (float)x;
    log_sum sum = {high, (float)(x - (double)high)};
    return sum;
}

/* e^(G_i - G_j), right to a few units in the last place however large both are. */
__device__ __forceinline__ float decay_of(log_sum i, log_sum j)
{
    return power_of_two((i.high - j.high) + (i.low - j.low));
}

/* [T,H,D] as [H,T,D]: a box is 64 tokens of a head. */
static inline ith_status delta_fast_map(ith_ctx *ctx, CUtensorMap *out, ith_tensor t)
{
    ith_tensor heads = t;
    heads.shape[0] = t.shape[1];
    heads.shape[1] = t.shape[0];
    heads.stride[0] = t.stride[1];
    heads.stride[1] = t.stride[0];
    return ith_cuda_tensor_map(ctx, out, heads);
}

#endif
