/* ctx.h - what every operator call carries: backend, device, threads, planned memory, error chain.
 */
#ifndef ITH_KERNELS_CTX_H
#define ITH_KERNELS_CTX_H

#include "base/device.h"
#include "base/plan.h"
#include "base/pool.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_backend ith_backend;
typedef struct ith_profile ith_profile; /* kernels/profile.h */

typedef struct ith_ctx {
    const ith_backend *backend; /* the operator table */
    ith_device *device;
    ith_pool *pool;       /* CPU threads; NULL: one */
    ith_plan *plan;       /* NULL: operators take their scratch from the device (tests) */
    void *state;          /* the backend's own: handles, streams, tuned algorithms */
    ith_error *err;       /* owned by the caller */
    bool deterministic;   /* ask backends for bit-equal re-runs where the fast way is not */
    ith_profile *profile; /* NULL: nobody measures */
    void *scratch; /* of the running operator: set by the dispatcher, valid during the call */
    int64_t scratch_bytes;
} ith_ctx;

/* Pushes a tensor of this shape onto a class of the plan. */
ith_status ith_ctx_push(ith_ctx *ctx, ith_mem_class c, const char *name, ith_dtype dtype, int ndim,
                        int64_t d0, int64_t d1, int64_t d2, int64_t d3, ith_tensor *out);

static inline bool ith_ctx_counting(const ith_ctx *ctx)
{
    return ctx->plan && ith_plan_counting(ctx->plan);
}

/* Documents of a packed batch: document i owns rows [cu[i], cu[i+1]). Travels with the batch
 * everywhere. */
typedef struct {
    ith_tensor cu_seqlens;  /* [num_docs + 1] I32 on the device; first 0, last = rows; empty
                               documents allowed */
    const int32_t *cu_host; /* the same on the host */
    int64_t num_docs;
    int64_t max_len; /* longest document */
} ith_seqs;

#ifdef __cplusplus
}
#endif
#endif
