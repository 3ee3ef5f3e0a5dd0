/* dtype.h - element types and their conversions. Names are those of safetensors files. */
#ifndef ITH_TENSOR_DTYPE_H
#define ITH_TENSOR_DTYPE_H

#include "base/status.h"

#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    ITH_F32,
    ITH_BF16,
    ITH_F16,
    ITH_F64,
    ITH_I64,
    ITH_I32,
    ITH_I16,
    ITH_I8,
    ITH_U8,
    ITH_BOOL,
    ITH_F8_E4M3, /* carried through files only */
    ITH_F8_E5M2,
    ITH_U16,
    ITH_U32,
    ITH_U64,
    ITH_F8_E8M0, /* these four through files only, too */
    ITH_F8_E4M3FNUZ,
    ITH_F8_E5M2FNUZ,
    ITH_C64,
    ITH_DTYPE_COUNT
} ith_dtype;

int64_t ith_dtype_bytes(ith_dtype dtype);
/* "F32", "BF16", ... as in safetensors headers. */
const char *ith_dtype_name(ith_dtype dtype);
bool ith_dtype_from_name(const char *name, ith_dtype *out);

/* bf16 <-> f32. To bf16 rounds to nearest even; NaN stays NaN (quiet). */
static inline float ith_bf16_to_f32(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint16_t ith_f32_to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* IEEE half <-> f32, round to nearest even, subnormals kept. */
float ith_f16_to_f32(uint16_t x);
uint16_t ith_f32_to_f16(float f);

/* Converts n elements between floating types (F32, BF16, F16, F64); same type copies. dst and src
 * may be the same memory only when the types are. */
void ith_convert(void *dst, ith_dtype dst_dtype, const void *src, ith_dtype src_dtype, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
