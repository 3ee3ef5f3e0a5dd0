/* checked.h - integer arithmetic that cannot overflow unnoticed. Sizes and offsets are int64_t. */
#ifndef ITH_BASE_CHECKED_H
#define ITH_BASE_CHECKED_H

#include "base/status.h"

static inline int64_t ith_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t ith_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ceil(a / b) for a >= 0, b > 0. */
static inline int64_t ith_div_ceil(int64_t a, int64_t b)
{
    ITH_ASSERT(a >= 0 && b > 0);
    return a / b + (a % b != 0);
}

/* a / b where b must divide a. */
static inline int64_t ith_div_exact(int64_t a, int64_t b)
{
    ITH_ASSERT(b > 0 && a % b == 0);
    return a / b;
}

static inline int64_t ith_round_up(int64_t a, int64_t multiple)
{
    return ith_div_ceil(a, multiple) * multiple;
}

/* True and *out = a * b (a + b) when the result fits; false otherwise. For sizes read from foreign
 * bytes. */
static inline bool ith_mul_ok(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool ith_add_ok(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

/* count * size for our own sizes; an overflow is a bug. */
static inline int64_t ith_mul_bytes(int64_t count, int64_t size)
{
    int64_t bytes = 0;
    ITH_ASSERT(count >= 0 && size >= 0 && ith_mul_ok(count, size, &bytes));
    return bytes;
}

/* int64_t to int for C APIs that take int; out of range is a bug. */
static inline int ith_narrow(int64_t value)
{
    ITH_ASSERT(value >= INT32_MIN && value <= INT32_MAX);
    return (int)value;
}

#endif
