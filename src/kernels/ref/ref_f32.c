/* ref_f32.c - the reference operators in float. */
#define REAL float
#define EXP expf
#define LOG logf
#define SQRT sqrtf
#define TABLE ith_ref_f32
#include "kernels/ref/ref_ops.inc"
