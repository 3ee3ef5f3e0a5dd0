/* tensor_map.h - descriptions of tensors for the bulk copy engine (TMA). */
#ifndef ITH_KERNELS_CUDA_TENSOR_MAP_H
#define ITH_KERNELS_CUDA_TENSOR_MAP_H

#include "kernels/cuda/cuda_internal.h"

#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Boxes of 64 rows of 128 bytes of t [R,C] or [E,R,C], bf16 or f32, at (column, row, e), in the
 * 128-byte swizzle; what lies outside of t reads as zero and is not written. Rows start at 16-byte
 * aligned addresses, no dimension is 0. */
ith_status ith_cuda_tensor_map(ith_ctx *ctx, CUtensorMap *out, ith_tensor t);

#ifdef __cplusplus
}
#endif
#endif
