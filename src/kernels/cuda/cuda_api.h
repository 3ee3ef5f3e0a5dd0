/* cuda_api.h - what libithaca_cuda.so exports. Program and plug-in must be built from the same
 * sources: ith_cuda_abi texts are compared before anything else is called. */
#ifndef ITH_KERNELS_CUDA_CUDA_API_H
#define ITH_KERNELS_CUDA_CUDA_API_H

#include "base/mem.h"
#include "kernels/backend.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ITH_CUDA_EXPORT __attribute__((visibility("default")))

/* Version and the sizes of the structures that cross the border. */
static inline void ith_cuda_abi_text(char out[96])
{
    snprintf(out, 96, "%s table %d context %d tensor %d device %d", ITH_VERSION,
             (int)sizeof(struct ith_backend), (int)sizeof(ith_ctx), (int)sizeof(ith_tensor),
             (int)sizeof(ith_device));
}

ITH_CUDA_EXPORT void ith_cuda_abi(char out[96]);
/* See ith_ctx_open_cuda. */
ITH_CUDA_EXPORT ith_status ith_cuda_open(ith_ctx *ctx, int index, bool counting_only);
ITH_CUDA_EXPORT void ith_cuda_close(ith_ctx *ctx);
ITH_CUDA_EXPORT ith_status ith_cuda_describe(ith_buf *out, ith_error *err);
/* Builds every attention graph we ship for an H200, needing cuDNN but no GPU: a line per graph. */
ITH_CUDA_EXPORT ith_status ith_cuda_check_graphs(ith_buf *out, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
