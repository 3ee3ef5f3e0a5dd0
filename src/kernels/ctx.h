/* ctx.h - what every operator call carries: backend, device, threads, planned memory, error chain.
 */
#ifndef ITH_KERNELS_CTX_H
#define ITH_KERNELS_CTX_H

#include "base/checked.h"
#include "base/device.h"
#include "base/plan.h"
#include "base/pool.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_backend ith_backend;
typedef struct ith_profile ith_profile; /* kernels/profile.h */
typedef struct ith_blanks ith_blanks;   /* kernels/blanks.h */

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
    ith_blanks *blanks; /* NULL: gradients are what their memory says */
    bool overwrite;   /* the running weight product finds a blank gradient: set by the dispatcher */
    bool beside, few; /* between enter and leave; there, on few processors of the device */
    bool shared;      /* forward products leave these few to what runs beside */
} ith_ctx;

/* Pushes a tensor of this shape onto a class of the plan. */
ith_status ith_ctx_push(ith_ctx *ctx, ith_mem_class c, const char *name, ith_dtype dtype, int ndim,
                        int64_t d0, int64_t d1, int64_t d2, int64_t d3, ith_tensor *out);

/* Operators queued until leave go to this queue of the device, which must have it. None of them may
 * want scratch: that is the main queue's. few: those that can (AdamW) take few processors. */
void ith_ctx_enter(ith_ctx *ctx, ith_queue queue, bool few);
void ith_ctx_leave(ith_ctx *ctx);

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
    /* Block masks, for causal attention. Rows of a document are counted in blocks of `block` from
     * its start; a row sees its own block whole, and the blocks before it. 0 and 1: single rows. */
    int64_t block;
    /* Block diffusion: the first noisy[i] rows of document i are masked copies of some of its
     * blocks, whole ones in order; the rest are its clean rows from position 0. A noisy row sees
     * its own noisy block and the clean blocks before it, a clean row clean blocks only. position
     * of a row: in its document, from 0 in both parts. Absent: no noisy rows. */
    ith_tensor noisy, position; /* [num_docs], [rows] I32 on the device */
    const int32_t *noisy_host, *position_host;
    /* Parts of the batch: q has its rows from q_first on, k and v those from k_first on, as many as
     * the tensors have. All else still describes the whole batch. */
    bool window;
    int64_t q_first, k_first;
} ith_seqs;

/* A document in a window: its first row in the batch, and of its rows those that q has, [q_lo,
 * q_hi), and that k has. Without a window: all of them. */
typedef struct {
    int64_t begin, len, q_lo, q_hi, k_lo, k_hi;
} ith_document;

static inline ith_document ith_document_of(const ith_seqs *s, int64_t begin, int64_t end,
                                           int64_t q_rows, int64_t k_rows)
{
    int64_t len = end - begin;
    ith_document d = {begin, len, 0, len, 0, len};
    if (!s->window)
        return d;
    int64_t q0 = s->q_first - begin, k0 = s->k_first - begin;
    d.q_lo = ith_min_i64(ith_max_i64(q0, 0), len);
    d.q_hi = ith_max_i64(ith_min_i64(q0 + q_rows, len), d.q_lo);
    d.k_lo = ith_min_i64(ith_max_i64(k0, 0), len);
    d.k_hi = ith_max_i64(ith_min_i64(k0 + k_rows, len), d.k_lo);
    return d;
}

/* Keys that a row sees, as rows of its document: [lo[0], hi[0]) and [lo[1], hi[1]). Stretch 0 lies
 * in the noisy part, stretch 1 in the clean part (of a document without noisy rows: all of it). */
typedef struct {
    int64_t lo[2], hi[2];
} ith_key_range;

/* Row i of a document of len rows, `noisy` of them noisy; position: of row i, read for noisy rows
 * only. */
static inline ith_key_range ith_keys_seen(int64_t block, bool causal, int64_t len, int64_t noisy,
                                          int64_t i, int64_t position)
{
    ith_key_range r = {{0, noisy}, {0, len}};
    int64_t b = block > 1 ? block : 1;
    if (i < noisy) {
        r.lo[0] = i / b * b;
        r.hi[0] = r.lo[0] + b < noisy ? r.lo[0] + b : noisy;
        r.hi[1] = noisy + position / b * b;
        r.hi[1] = r.hi[1] < len ? r.hi[1] : len;
    } else if (causal) {
        r.hi[1] = noisy + ((i - noisy) / b + 1) * b;
        r.hi[1] = r.hi[1] < len ? r.hi[1] : len;
    }
    return r;
}

static inline bool ith_seqs_have_blocks(ith_seqs s)
{
    return s.block > 1 || s.noisy.ndim != 0;
}

#ifdef __cplusplus
}
#endif
#endif
