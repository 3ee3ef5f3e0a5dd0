/* bench_common.h - time, operands and printing shared by the benches. */
#ifndef ITH_BENCH_COMMON_H
#define ITH_BENCH_COMMON_H

#include "base/mem.h"
#include "kernels/cpu/cpu_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* On a busy machine the wall clock measures the neighbours: with bench_cpu_threads > 0 time is the
 * processor time of the whole process divided by that number of threads. */
static int bench_cpu_threads;

static inline double bench_seconds(void)
{
    struct timespec t;
    clock_gettime(bench_cpu_threads ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    double s = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    return bench_cpu_threads ? s / bench_cpu_threads : s;
}

static inline void bench_check(ith_status status, const ith_error *err)
{
    if (status == ITH_OK)
        return;
    fprintf(stderr, "error: %s\n", err->text);
    exit(1);
}

/* Values in [-1, 1) without pattern. */
static inline void *bench_filled(int64_t n, ith_dtype dtype)
{
    char *p = ith_malloc_aligned(ith_max_i64(n, 1) * ith_dtype_bytes(dtype), 256);
    if (!p) {
        fprintf(stderr, "error: out of memory for %lld elements\n", (long long)n);
        exit(1);
    }
    for (int64_t i = 0; i < n; i++) {
        float x = (float)((i * 7919) % 2003) / 1001.0f - 1.0f;
        if (dtype == ITH_BF16)
            ((uint16_t *)(void *)p)[i] = ith_f32_to_bf16(x);
        else if (dtype == ITH_F32)
            ((float *)(void *)p)[i] = x;
        else
            memset(p + i * ith_dtype_bytes(dtype), 0, (size_t)ith_dtype_bytes(dtype));
    }
    return p;
}

#endif
