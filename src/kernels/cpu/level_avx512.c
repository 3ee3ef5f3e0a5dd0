/* level_avx512.c - AVX-512 F, BW, DQ, VL: 28 sums of the tile in 32 registers; bf16 is widened when
 * packed. */
#ifndef ITH_LEVEL_ABSENT
#define LEVEL_TABLE ith_cpu_level_avx512
#define LEVEL_NAME "avx512"
#define VW 16
#define MR 14
#define NV 2
#include "kernels/cpu/level_impl.h"
#else
typedef int ith_cpu_no_level; /* another kind of machine */
#endif
