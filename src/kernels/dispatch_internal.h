/* dispatch_internal.h - what the files with public operators share: scratch, shape checks, RUN. */
#ifndef ITH_KERNELS_DISPATCH_INTERNAL_H
#define ITH_KERNELS_DISPATCH_INTERNAL_H

#include "kernels/backend.h"
#include "kernels/blanks.h"
#include "kernels/profile.h"

ith_status ith_scratch_begin(ith_ctx *ctx, const char *op, int64_t bytes, int64_t *mark);
void ith_scratch_end(ith_ctx *ctx, int64_t mark);
void ith_op_stamp(ith_ctx *ctx, const char *op, bool end);

#define RUN(op, ...)                                                                               \
    do {                                                                                           \
        if (!ctx->backend->op.run)                                                                 \
            return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED,                                         \
                            "operator %s is not built for backend %s", #op, ctx->backend->name);   \
        int64_t bytes_ =                                                                           \
            ctx->backend->op.workspace ? ctx->backend->op.workspace(ctx, __VA_ARGS__) : 0;         \
        int64_t mark_ = 0;                                                                         \
        ITH_TRY(ith_scratch_begin(ctx, #op, bytes_, &mark_));                                      \
        ith_status status_ = ITH_OK;                                                               \
        if (!ith_ctx_counting(ctx)) {                                                              \
            if (ctx->device->use)                                                                  \
                ctx->device->use(ctx->device);                                                     \
            ith_op_stamp(ctx, #op, false);                                                         \
            status_ = ctx->backend->op.run(ctx, __VA_ARGS__);                                      \
            ith_op_stamp(ctx, #op, true);                                                          \
        }                                                                                          \
        ith_scratch_end(ctx, mark_);                                                               \
        return status_ == ITH_OK ? ITH_OK : ith_wrap(ctx->err, status_, "%s", #op);                \
    } while (0)

static inline bool is(ith_tensor t, int ndim, int64_t d0, int64_t d1, int64_t d2)
{
    return t.ndim == ndim && t.shape[0] == d0 && (ndim < 2 || t.shape[1] == d1) &&
           (ndim < 3 || t.shape[2] == d2) &&
           (ndim == 0 || t.stride[ndim - 1] == 1 || t.shape[ndim - 1] == 1);
}

static inline bool absent(ith_tensor t)
{
    return t.ndim == 0;
}

static inline bool is_act(ith_tensor t)
{
    return t.dtype == ITH_F32 || t.dtype == ITH_BF16 || t.dtype == ITH_F64;
}

/* The statistics type that goes with an activation type. */
static inline bool is_stat(ith_tensor t, ith_tensor act)
{
    return t.dtype == (act.dtype == ITH_F64 ? ITH_F64 : ITH_F32);
}

#endif
