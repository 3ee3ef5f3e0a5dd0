/* level_avx512bf16.c - AVX-512 with vdpbf16ps: pairs of bf16 are multiplied in hardware. */
#ifndef ITH_LEVEL_ABSENT
#define LEVEL_TABLE ith_cpu_level_avx512bf16
#define LEVEL_NAME "avx512bf16"
#define VW 16
#define MR 14
#define NV 2
#define LEVEL_BF16_DOT 1
#include "kernels/cpu/level_impl.h"
#else
typedef int ith_cpu_no_level; /* another kind of machine */
#endif
