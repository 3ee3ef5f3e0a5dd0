/* level_amx.c - AVX-512 with bf16 conversions, and bf16 products on AMX tiles. */
#ifndef ITH_LEVEL_ABSENT
#ifndef LEVEL_TABLE
#define LEVEL_TABLE ith_cpu_level_amx
#define LEVEL_NAME "amx"
#endif
#define VW 16
#define MR 14
#define NV 2
#define LEVEL_AMX 1
#include "kernels/cpu/level_impl.h"
#else
typedef int ith_cpu_no_level; /* another kind of machine */
#endif
