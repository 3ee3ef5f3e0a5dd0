/* level_avx2.c - AVX2 with FMA: 12 sums of the tile in 16 registers. */
#ifndef ITH_LEVEL_ABSENT
#define LEVEL_TABLE ith_cpu_level_avx2
#define LEVEL_NAME "avx2"
#define VW 8
#define MR 6
#define NV 2
#include "kernels/cpu/level_impl.h"
#else
typedef int ith_cpu_no_level; /* another kind of machine */
#endif
