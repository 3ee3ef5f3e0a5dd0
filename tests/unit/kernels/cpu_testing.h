/* cpu_testing.h - helpers of the CPU kernel tests: random tensors, every level of this machine. */
#ifndef ITH_TESTS_CPU_TESTING_H
#define ITH_TESTS_CPU_TESTING_H

#include "testing.h"

#include "base/rng.h"
#include "kernels/cpu/cpu_internal.h"

#include <math.h>

static const char *const cpu_levels[] = {"generic",    "avx2", "avx512",
                                         "avx512bf16", "amx",  "amx emulated"};
#define NUM_CPU_LEVELS ((int)(sizeof cpu_levels / sizeof *cpu_levels))

/* Level amx with its instructions in C, for machines with AVX-512 (amx_emulated.c). */
extern const ith_cpu_level ith_cpu_level_amx_emulated;

/* False when the machine lacks the level. */
static inline bool cpu_level_set(const char *name)
{
#if defined(__x86_64__)
    if (strcmp(name, "amx emulated") == 0) {
        if (!ith_cpu_level_set("avx512"))
            return false;
        ith_cpu_level_use(&ith_cpu_level_amx_emulated);
        return true;
    }
#endif
    return ith_cpu_level_set(name);
}

/* Rows padded by pad elements, so that strides are real; the padding holds NaN. */
static inline ith_tensor cpu_tensor(ith_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c,
                                    int64_t pad)
{
    int64_t row = (ndim > 1 ? b : 1) * (ndim > 2 ? c : 1) + (ndim > 1 ? pad : 0);
    ith_tensor t = ndim == 1   ? ith_tensor_1d(NULL, dtype, a)
                   : ndim == 2 ? ith_tensor_2d(NULL, dtype, a, b)
                               : ith_tensor_3d(NULL, dtype, a, b, c);
    t.stride[0] = row;
    int64_t bytes = ith_max_i64(a * row, 1) * ith_dtype_bytes(dtype);
    t.data = ith_malloc_aligned(bytes, 64);
    assert_non_null(t.data);
    memset(t.data, 0xff, (size_t)bytes); /* NaN in every float type */
    return t;
}

static inline int64_t cpu_at(ith_tensor t, int64_t n)
{
    int64_t at = 0;
    for (int d = t.ndim - 1; d >= 0; d--) {
        at += n % t.shape[d] * t.stride[d];
        n /= t.shape[d];
    }
    return at;
}

static inline double cpu_get(ith_tensor t, int64_t n)
{
    int64_t at = cpu_at(t, n);
    if (t.dtype == ITH_F64)
        return ((double *)t.data)[at];
    return (double)(t.dtype == ITH_BF16 ? ith_bf16_to_f32(((uint16_t *)t.data)[at])
                                        : ((float *)t.data)[at]);
}

static inline void cpu_put(ith_tensor t, int64_t n, double x)
{
    int64_t at = cpu_at(t, n);
    if (t.dtype == ITH_F64)
        ((double *)t.data)[at] = x;
    else if (t.dtype == ITH_BF16)
        ((uint16_t *)t.data)[at] = ith_f32_to_bf16((float)x);
    else
        ((float *)t.data)[at] = (float)x;
}

static inline ith_tensor cpu_random(ith_dtype dtype, int ndim, int64_t a, int64_t b, int64_t c,
                                    int64_t pad, uint64_t stream)
{
    ith_tensor t = cpu_tensor(dtype, ndim, a, b, c, pad);
    for (int64_t i = 0; i < ith_numel(t); i++)
        cpu_put(t, i, ith_rng_normal(1234, stream, (uint64_t)i));
    return t;
}

/* Contiguous copy in another type. */
static inline ith_tensor cpu_copy(ith_tensor x, ith_dtype dtype)
{
    ith_tensor t = cpu_tensor(dtype, x.ndim, x.shape[0], x.shape[1], x.shape[2], 0);
    for (int64_t i = 0; i < ith_numel(t); i++)
        cpu_put(t, i, cpu_get(x, i));
    return t;
}

/* sum (a-b)^2 / sum b^2 */
static inline double cpu_nmse(ith_tensor a, ith_tensor b)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < ith_numel(a); i++) {
        double x = cpu_get(a, i), y = cpu_get(b, i);
        diff += (x - y) * (x - y);
        norm += y * y;
    }
    return norm > 0 ? diff / norm : diff;
}

#define assert_near(got, wanted, bound, what)                                                      \
    do {                                                                                           \
        double nmse_ = cpu_nmse((got), (wanted));                                                  \
        if (!(nmse_ <= (bound)))                                                                   \
            fail_msg("%s: level %s: NMSE %g, at most %g allowed (first values %g, %g)", (what),    \
                     ith_cpu_level_get()->name, nmse_, (double)(bound), cpu_get((got), 0),         \
                     cpu_get((wanted), 0));                                                        \
    } while (0)

static inline void assert_same_bits(ith_tensor a, ith_tensor b, const char *what)
{
    for (int64_t i = 0; i < ith_numel(a); i++) {
        double x = cpu_get(a, i), y = cpu_get(b, i);
        if (memcmp(&x, &y, sizeof x) != 0)
            fail_msg("%s: level %s: element %lld: %.9g and %.9g", what, ith_cpu_level_get()->name,
                     (long long)i, x, y);
    }
}

/* Bound for one activation type. */
static inline double cpu_bound(ith_dtype act)
{
    return act == ITH_BF16 ? 2e-5 : 1e-11;
}

#endif
