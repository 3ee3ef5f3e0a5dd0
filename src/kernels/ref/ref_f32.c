/* ref_f32.c - the reference operators in float. */
#define REAL float
#define EXP expf
#define LOG logf
#define SQRT sqrtf
#define LOG1P log1pf
#define TANH tanhf
#define ERF erff
#define TABLE ith_ref_f32
#include "kernels/ref/ref_ops.inc"
