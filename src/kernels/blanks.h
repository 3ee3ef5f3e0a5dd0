/* blanks.h - gradients that count as zero although nobody cleared them.
 *
 * A step does not clear its gradients: at its begin every parameter is blank. The first operator
 * that adds to a blank one overwrites it, where its backend can (matrix products), or the
 * dispatcher clears it just before. Operators and models know nothing but "+=". */
#ifndef ITH_KERNELS_BLANKS_H
#define ITH_KERNELS_BLANKS_H

#include "kernels/ctx.h"

typedef struct {
    int64_t begin, end; /* bytes of a parameter's gradient in the buffer */
    bool blank;
} ith_blank;

struct ith_blanks {
    char *base;
    ith_blank *all; /* ascending */
    int64_t count;
};

/* Before something is added to dw: clears it if it is blank. */
ith_status ith_blanks_clear(ith_ctx *ctx, ith_tensor dw);
/* The same before a product of `rows` rows; sets ctx->overwrite instead when the product will write
 * all of the blank gradient. */
ith_status ith_blanks_overwrite(ith_ctx *ctx, ith_tensor dw, int64_t rows);
/* Clears what is still blank. */
ith_status ith_blanks_close(ith_ctx *ctx);

#endif
