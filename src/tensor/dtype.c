/* dtype.c - element types: names, sizes, conversions. */
#include "tensor/dtype.h"

static const struct {
    const char *name;
    int64_t bytes;
} rows[ITH_DTYPE_COUNT] = {
    [ITH_F32] = {"F32", 4},
    [ITH_BF16] = {"BF16", 2},
    [ITH_F16] = {"F16", 2},
    [ITH_F64] = {"F64", 8},
    [ITH_I64] = {"I64", 8},
    [ITH_I32] = {"I32", 4},
    [ITH_I16] = {"I16", 2},
    [ITH_I8] = {"I8", 1},
    [ITH_U8] = {"U8", 1},
    [ITH_BOOL] = {"BOOL", 1},
    [ITH_F8_E4M3] = {"F8_E4M3", 1},
    [ITH_F8_E5M2] = {"F8_E5M2", 1},
    [ITH_U16] = {"U16", 2},
    [ITH_U32] = {"U32", 4},
    [ITH_U64] = {"U64", 8},
    [ITH_F8_E8M0] = {"F8_E8M0", 1},
    [ITH_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 1},
    [ITH_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 1},
    [ITH_C64] = {"C64", 8},
};

int64_t ith_dtype_bytes(ith_dtype dtype)
{
    ITH_ASSERT((unsigned)dtype < ITH_DTYPE_COUNT);
    return rows[dtype].bytes;
}

const char *ith_dtype_name(ith_dtype dtype)
{
    ITH_ASSERT((unsigned)dtype < ITH_DTYPE_COUNT);
    return rows[dtype].name;
}

bool ith_dtype_from_name(const char *name, ith_dtype *out)
{
    for (int i = 0; i < ITH_DTYPE_COUNT; i++)
        if (strcmp(rows[i].name, name) == 0) {
            *out = (ith_dtype)i;
            return true;
        }
    return false;
}

float ith_f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 0x1f, mantissa = x & 0x3ff,
             bits;
    if (exponent == 0x1f)
        bits = sign | 0x7f800000u | mantissa << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else if (!mantissa)
        bits = sign;
    else {
        int shift = __builtin_clz(mantissa) - 21;
        bits = sign | (uint32_t)(113 - shift) << 23 | (mantissa << (13 + shift) & 0x7fffffu);
    }
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

uint16_t ith_f32_to_f16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000u) /* rounds to 2^16 or more, or infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000u) { /* subnormal half: let the FPU round at 2^-24 */
        float scaled, magic = 0.5f;
        memcpy(&scaled, &magnitude, sizeof scaled);
        scaled += magic;
        uint32_t r;
        memcpy(&r, &scaled, sizeof r);
        return (uint16_t)(sign | (r - 0x3f000000u));
    }
    uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}

static double load(const void *src, ith_dtype dtype, int64_t i)
{
    switch (dtype) {
    case ITH_F32:
        return (double)((const float *)src)[i];
    case ITH_BF16:
        return (double)ith_bf16_to_f32(((const uint16_t *)src)[i]);
    case ITH_F16:
        return (double)ith_f16_to_f32(((const uint16_t *)src)[i]);
    default:
        ITH_ASSERT(dtype == ITH_F64);
        return ((const double *)src)[i];
    }
}

void ith_convert(void *dst, ith_dtype dst_dtype, const void *src, ith_dtype src_dtype, int64_t n)
{
    if (dst_dtype == src_dtype) {
        if (n > 0 && dst != src)
            memmove(dst, src, (size_t)(n * ith_dtype_bytes(dst_dtype)));
        return;
    }
    if (dst_dtype == ITH_F32 && src_dtype == ITH_BF16) { /* the two that move whole models */
        for (int64_t i = 0; i < n; i++)
            ((float *)dst)[i] = ith_bf16_to_f32(((const uint16_t *)src)[i]);
        return;
    }
    if (dst_dtype == ITH_BF16 && src_dtype == ITH_F32) {
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)dst)[i] = ith_f32_to_bf16(((const float *)src)[i]);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        double x = load(src, src_dtype, i);
        switch (dst_dtype) {
        case ITH_F32:
            ((float *)dst)[i] = (float)x;
            break;
        case ITH_BF16:
            ((uint16_t *)dst)[i] = ith_f32_to_bf16((float)x);
            break;
        case ITH_F16:
            ((uint16_t *)dst)[i] = ith_f32_to_f16((float)x);
            break;
        default:
            ITH_ASSERT(dst_dtype == ITH_F64);
            ((double *)dst)[i] = x;
        }
    }
}
