/* tensor.h - a view of memory: pointer, type, shape, strides. Passed by value; never owns. */
#ifndef ITH_TENSOR_TENSOR_H
#define ITH_TENSOR_TENSOR_H

#include "base/checked.h"
#include "tensor/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ITH_MAX_DIMS 4

typedef struct {
    void *data; /* NULL: an absent tensor */
    ith_dtype dtype;
    int ndim;
    int64_t shape[ITH_MAX_DIMS];  /* elements; shape[ndim..] = 1 */
    int64_t stride[ITH_MAX_DIMS]; /* elements */
} ith_tensor;

static inline ith_tensor ith_tensor_4d(void *data, ith_dtype dtype, int ndim, int64_t a, int64_t b,
                                       int64_t c, int64_t d)
{
    ith_tensor t = {data, dtype, ndim, {a, b, c, d}, {b * c * d, c * d, d, 1}};
    return t;
}

static inline ith_tensor ith_tensor_1d(void *data, ith_dtype dtype, int64_t a)
{
    ith_tensor t = {data, dtype, 1, {a, 1, 1, 1}, {1, 1, 1, 1}};
    return t;
}

static inline ith_tensor ith_tensor_2d(void *data, ith_dtype dtype, int64_t a, int64_t b)
{
    ith_tensor t = {data, dtype, 2, {a, b, 1, 1}, {b, 1, 1, 1}};
    return t;
}

static inline ith_tensor ith_tensor_3d(void *data, ith_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    ith_tensor t = {data, dtype, 3, {a, b, c, 1}, {b * c, c, 1, 1}};
    return t;
}

/* The absent tensor. */
static inline ith_tensor ith_tensor_none(void)
{
    ith_tensor t = {NULL, ITH_F32, 0, {0, 0, 0, 0}, {0, 0, 0, 0}};
    return t;
}

static inline int64_t ith_numel(ith_tensor t)
{
    int64_t n = 1;
    for (int i = 0; i < t.ndim; i++)
        n *= t.shape[i];
    return t.ndim ? n : 0;
}

static inline int64_t ith_tensor_bytes(ith_tensor t)
{
    return ith_mul_bytes(ith_numel(t), ith_dtype_bytes(t.dtype));
}

/* Rows [begin, end) of dimension 0. */
static inline ith_tensor ith_row_range(ith_tensor t, int64_t begin, int64_t end)
{
    ITH_ASSERT(t.ndim >= 1 && begin >= 0 && begin <= end && end <= t.shape[0]);
    t.data = (char *)t.data + begin * t.stride[0] * ith_dtype_bytes(t.dtype);
    t.shape[0] = end - begin;
    return t;
}

/* Columns [begin, end) of a 2-D view; the row stride stays. */
static inline ith_tensor ith_col_range(ith_tensor t, int64_t begin, int64_t end)
{
    ITH_ASSERT(t.ndim == 2 && begin >= 0 && begin <= end && end <= t.shape[1]);
    t.data = (char *)t.data + begin * t.stride[1] * ith_dtype_bytes(t.dtype);
    t.shape[1] = end - begin;
    return t;
}

/* [T, H*D] (any row stride) seen as [T, H, D]. */
static inline ith_tensor ith_split_heads(ith_tensor t, int64_t heads)
{
    ITH_ASSERT(t.ndim == 2 && t.stride[1] == 1);
    int64_t dim = ith_div_exact(t.shape[1], heads);
    ith_tensor r = {t.data, t.dtype, 3, {t.shape[0], heads, dim, 1}, {t.stride[0], dim, 1, 1}};
    return r;
}

static inline bool ith_is_contiguous(ith_tensor t)
{
    int64_t expect = 1;
    for (int i = t.ndim - 1; i >= 0; i--) {
        if (t.shape[i] != 1 && t.stride[i] != expect)
            return false;
        expect *= t.shape[i];
    }
    return true;
}

/* "[3, 4] BF16" for error texts. */
const char *ith_tensor_text(ith_tensor t, char *out, int64_t out_bytes);

#ifdef __cplusplus
}
#endif
#endif
