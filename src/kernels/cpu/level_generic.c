/* level_generic.c - the baseline of the target: vectors of four, no fused multiply-add assumed. */
#define LEVEL_TABLE ith_cpu_level_generic
#define LEVEL_NAME "generic"
#define VW 4
#define MR 4
#define NV 2
#include "kernels/cpu/level_impl.h"
