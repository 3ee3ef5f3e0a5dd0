/* ref_f64.c - the reference operators in double: what the others are measured against. */
#define REAL double
#define EXP exp
#define LOG log
#define SQRT sqrt
#define LOG1P log1p
#define TANH tanh
#define ERF erf
#define TABLE ith_ref_f64
#include "kernels/ref/ref_ops.inc"
