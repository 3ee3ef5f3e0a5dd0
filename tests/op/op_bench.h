/* op_bench.h - runs one operator call in several worlds and compares what comes out.
 *
 * A case body makes its tensors with op_make and calls public operators on r->ctx. It runs on the
 * double reference, on the plain reference of the tested type, and twice on the backend under test.
 * Inputs are drawn from (seed, case, ordinal of the tensor, element) and rounded to the tested
 * type, so that all worlds see the same numbers. Around and between the rows of every tensor lies
 * NaN that must stay, inputs must stay, and outputs hold a NaN pattern that must be overwritten.
 *
 * Bounds. Exact families: bits of the plain reference. F32: NMSE = sum (a-b)^2 / sum b^2 against
 * the double reference below the family's bound. BF16: root mean square and largest error against
 * the double reference at most twice those of the plain reference plus `floor` times the root mean
 * square (largest) value. */
#ifndef ITH_TESTS_OP_BENCH_H
#define ITH_TESTS_OP_BENCH_H

#include "kernels/backend.h"

/* Memory type of a tensor: follows the world's activation type, its statistics type, or is fixed.
 */
typedef enum { OP_ACT, OP_STAT, OP_F32, OP_F64, OP_I32 } op_class;

/* OPAQUE: an output whose layout is the backend's own; repeated runs must agree, values are not
 * compared. */
typedef enum { OP_IN, OP_OUT, OP_INOUT, OP_OPAQUE } op_role;

enum { OP_MAX_TENSORS = 32, OP_MAX_PARAMS = 10 };

typedef struct {
    const char *name;
    op_role role;
    op_class kind;
    ith_tensor view;       /* data on the device of the world */
    void *base;            /* device memory, guards included */
    unsigned char *before; /* host image as uploaded */
    unsigned char *after;  /* host image as downloaded */
    int64_t bytes;         /* of an image */
} op_tensor;

/* One run of a case in one world. */
typedef struct {
    ith_ctx *ctx;
    ith_dtype act;     /* of this world */
    ith_dtype tested;  /* inputs are rounded to it */
    uint64_t seed;     /* of the case */
    int64_t user;      /* parameter of a case that its fills need */
    ith_status status; /* first failure of op_make; see OP_READY */
    int num_tensors;
    op_tensor tensors[OP_MAX_TENSORS];
} op_run;

/* Value of element n (row-major) of a tensor; stream is unique to the tensor. */
typedef double (*op_fill)(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n);
double op_normal(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n);
double op_small(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n);    /* normal/8 */
double op_positive(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n); /* (0, 1] */

/* A tensor of this run. shape: ndim sizes. pad: elements between rows of dimension 0. fill: unused
 * for OP_OUT. */
ith_tensor op_make(op_run *r, op_role role, op_class kind, const char *name, op_fill fill, int ndim,
                   const int64_t *shape, int64_t pad);
enum { OP_VECTOR = -1 };
/* An I32 input with these values; shape [rows,n], or [n] for OP_VECTOR rows. */
ith_tensor op_ints(op_run *r, const char *name, const int32_t *values, int64_t rows, int64_t n);
/* Host copy of an I32 tensor made by op_ints, alive as long as the run. */
const int32_t *op_host_ints(const op_run *r, ith_tensor t);
/* Call before the first operator: forwards a failure of op_make. */
#define OP_READY(r) ITH_TRY((r)->status)

/* A group of cases with one body and one set of bounds. */
typedef struct {
    const char *name;   /* of the operator */
    const char *params; /* names of the parameters, blank-separated */
    ith_status (*body)(op_run *r, const int64_t *params);
    bool exact;
    double nmse;  /* F32 bound */
    double floor; /* BF16 floor, relative */
} op_family;

typedef struct {
    const op_family *family;
    int64_t params[OP_MAX_PARAMS];
} op_case;

typedef struct {
    bool ok;
    const char *output; /* the tensor that is worst in error/bound */
    double error, bound;
    char text[256]; /* what is wrong, when it is not a bound */
} op_result;

/* Compares the backend of `test` with the references. The status is that of the operators; a wrong
 * result is ok = false. */
ith_status op_bench_check(const op_case *c, uint64_t seed, ith_ctx *test, ith_dtype dtype,
                          op_result *out);
/* The two contexts give the same bits. */
ith_status op_bench_same_bits(const op_case *c, uint64_t seed, ith_ctx *a, ith_ctx *b,
                              ith_dtype dtype, op_result *out);
/* "rmsnorm_forward T=5 D=37 pad=3" */
void op_case_text(const op_case *c, char *out, int64_t out_bytes);

#endif
