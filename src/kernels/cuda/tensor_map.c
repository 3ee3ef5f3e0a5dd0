/* tensor_map.c - the driver encodes the maps; its function is asked for at the first use. */
#include "kernels/cuda/tensor_map.h"

#include <string.h>

enum { DRIVER_VERSION = 12000 }; /* the first with the function */

typedef __typeof__(&cuTensorMapEncodeTiled) encoder;

static ith_status find_encoder(ith_ctx *ctx, encoder *out)
{
    static encoder known;
    void *entry = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    if (!known &&
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, DRIVER_VERSION,
                                         cudaEnableDefault, &found) == cudaSuccess &&
        found == cudaDriverEntryPointSuccess)
        memcpy(&known, &entry, sizeof known);
    if (!known)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED,
                        "the driver has no cuTensorMapEncodeTiled (older than CUDA 12)");
    *out = known;
    return ITH_OK;
}

ith_status ith_cuda_tensor_map(ith_ctx *ctx, CUtensorMap *out, ith_tensor t)
{
    ITH_ASSERT((t.dtype == ITH_BF16 || t.dtype == ITH_F32) && (t.ndim == 2 || t.ndim == 3));
    encoder encode = NULL;
    char shape[96];
    int64_t size = ith_dtype_bytes(t.dtype);
    int rows = t.ndim - 2, cols = t.ndim - 1;
    int64_t row_stride = t.shape[rows] > 1 ? t.stride[rows] : ith_round_up(t.shape[cols], 8);
    int64_t next = t.ndim == 3 && t.shape[0] > 1 ? t.stride[0] : row_stride * t.shape[rows];
    cuuint64_t sizes[3] = {(cuuint64_t)t.shape[cols], (cuuint64_t)t.shape[rows],
                           t.ndim == 3 ? (cuuint64_t)t.shape[0] : 1};
    cuuint64_t strides[2] = {(cuuint64_t)(row_stride * size), (cuuint64_t)(next * size)};
    const cuuint32_t box[3] = {(cuuint32_t)(128 / size), 64, 1}, steps[3] = {1, 1, 1};
    ITH_TRY(find_encoder(ctx, &encode));
    CUresult code =
        encode(out, size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
               3, t.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS)
        return ith_fail(ctx->err, ITH_ERR_RUN, "tensor map of %s: driver error %d",
                        ith_tensor_text(t, shape, sizeof shape), (int)code);
    return ITH_OK;
}
