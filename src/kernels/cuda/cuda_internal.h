/* cuda_internal.h - the state of the CUDA backend and what its files share.
 *
 * Invariants:
 *  1. Operators are queued on one stream, in program order; they never wait for it and never
 *     allocate.
 *  2. Workspace functions only compute: they run on machines without a driver.
 *  3. Every launch and every call is checked; the dispatcher puts the operator's name before the
 *     text, we add the shapes. */
#ifndef ITH_KERNELS_CUDA_CUDA_INTERNAL_H
#define ITH_KERNELS_CUDA_CUDA_INTERNAL_H

#include "kernels/backend.h"
#include "kernels/cuda/cuda_libs.h"

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_matmul_cache ith_matmul_cache;
typedef struct ith_sdpa_cache ith_sdpa_cache;

typedef struct {
    ith_device device; /* its .state is this struct */
    char name[16];
    int index;
    bool counting_only; /* no stream, no libraries */
    int few_sms;        /* multiprocessors that ctx->few takes and ctx->shared leaves to it */
    cudaStream_t main, stream; /* stream: where operators are queued, main but between enter and
                                  leave */
    const ith_cuda_libs *libs;
    cublasLtHandle_t lt;
    cudnnHandle_t dnn;
    ith_matmul_cache *matmuls;
    ith_sdpa_cache *sdpas;
    struct {
        cudaStream_t stream;
        cudaEvent_t forked, *marks; /* made as they are asked for */
        int64_t num_marks, cap_marks;
    } queues[ITH_QUEUES];
    cudaEvent_t *stamps; /* made as they are asked for: profiling only */
    int64_t num_stamps, cap_stamps;
} ith_cuda;

/* Makes its GPU the one of the calling thread: launches, events and memory go to that one, whatever
 * the stream says. */
ith_cuda *ith_cuda_use(ith_cuda *cuda);

/* Blocks that fill an H200 (132 multiprocessors) at full occupancy. A constant, not read off the
 * device: partial sums are counted by the plan, and the order of sums must not depend on it. */
enum { ITH_CUDA_SMS = 132 };

static inline ith_cuda *ith_cuda_of(const ith_ctx *ctx)
{
    return (ith_cuda *)ctx->state;
}

static inline cudaStream_t ith_cuda_stream(const ith_ctx *ctx)
{
    return ith_cuda_of(ctx)->stream;
}

/* ITH_OK, or a failure that says what was being done on which tensor. */
ith_status ith_cuda_check(ith_error *err, cudaError_t code, const char *what, ith_tensor t);
/* To end every operator that launched kernels. */
#define ITH_CUDA_LAUNCHED(ctx, t)                                                                  \
    ith_cuda_check((ctx)->err, cudaGetLastError(), "kernel launch", (t))
#define ITH_CUDA_TRY(ctx, call, t) ITH_TRY(ith_cuda_check((ctx)->err, (call), #call, (t)))

/* Pieces of ctx->scratch, 256-byte aligned, in order; the sum must stay within scratch_bytes. */
typedef struct {
    char *base;
    int64_t used, size;
} ith_carve;
static inline ith_carve ith_carve_begin(const ith_ctx *ctx)
{
    ith_carve c = {(char *)ctx->scratch, 0, ctx->scratch_bytes};
    return c;
}
static inline void *ith_carve_take(ith_carve *c, int64_t bytes)
{
    void *p = c->base + c->used;
    c->used += ith_round_up(bytes, 256);
    ITH_ASSERT(c->used <= c->size);
    return p;
}

/* ---- parts behind operators ---- */

/* D = alpha-less product through cuBLASLt. Column-major as cuBLAS has it: D [m,n] = op(A) op(B)
 * (+ D), op(A): [m,k]. */
typedef struct {
    int64_t m, n, k;
    bool transpose_a, transpose_b, accumulate;
    const void *a, *b;
    void *d;
    int64_t lda, ldb, ldd;
    ith_dtype in, out;
    int64_t sms; /* multiprocessors it should take; 0: all */
} ith_matmul;
enum { ITH_MATMUL_WORKSPACE_BYTES = 64 << 20 };
ith_status ith_matmul_cache_create(ith_matmul_cache **out, ith_error *err);
void ith_matmul_cache_destroy(ith_matmul_cache *cache, const ith_cuda_libs *libs);
/* *done is false when cuBLASLt has no kernel for these layouts (odd strides). */
ith_status ith_matmul_run(ith_ctx *ctx, const ith_matmul *p, ith_tensor named, bool *done);

/* The grouped products, any shape, stride and type; expert rows are offsets[e] .. offsets[e+1], and
 * num_groups = 1 with offsets NULL means all rows. Scratch: ith_grouped_workspace_bytes. */
typedef enum { ITH_GROUPED_FORWARD, ITH_GROUPED_INPUT, ITH_GROUPED_WEIGHT } ith_grouped_kind;
typedef struct {
    ith_grouped_kind kind;
    ith_tensor out, a, b; /* y, x, w    or dx, dy, w    or dw, dy, x */
    const int32_t *offsets;
    int64_t num_groups;
    bool accumulate;
} ith_grouped;
int64_t ith_grouped_workspace_bytes(int64_t rows, int64_t num_groups);
ith_status ith_grouped_run(ith_ctx *ctx, const ith_grouped *p);

/* Plain attention: any head size up to 512, any stride, f32 or bf16; deterministic. Like the other
 * it knows windows and, beside bf16 inputs, f32 results (ops.h). */
ith_status ith_attention_plain_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                       ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                       bool causal);
/* delta: [T,Hq] f32 scratch. */
ith_status ith_attention_plain_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                        ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                        ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                        bool causal, float *delta);

/* The same by specialised warps, for tensors that all fit. Without ctx->deterministic backward adds
 * dq up with atomics. */
bool ith_attention_stream_fits(ith_tensor t);
ith_status ith_attention_stream_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                        ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                        bool causal);
/* Bytes that backward takes from its scratch. */
int64_t ith_attention_stream_workspace(ith_ctx *ctx, ith_tensor q, ith_tensor k, ith_seqs seqs);
ith_status ith_attention_stream_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                         ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                         ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                         bool causal, ith_carve *scratch);

/* Stable sort of n keys in [0, num_buckets), num_buckets <= 1024: rank[i] is the place of element i
 * when `rank` is given; out_key/out_value (either may be NULL) receive key and value (value NULL:
 * i) in order. The key of element i is (keys[i] >> shift) & mask. bucket_begin: [num_buckets + 1]
 * or NULL. */
typedef struct {
    const int32_t *keys, *values;
    int32_t *rank, *out_key, *out_value, *bucket_begin;
    int64_t n, num_buckets;
    int shift;
    uint32_t mask;
} ith_bucket_sort;
int64_t ith_bucket_sort_workspace_bytes(int64_t n, int64_t num_buckets);
void ith_bucket_sort_launch(cudaStream_t stream, const ith_bucket_sort *p, void *scratch);

/* For each of `count` (1 or 2) sums: dw[d] += sum over teams of partial[team][d], in order of the
 * team. */
typedef struct {
    float *dw;            /* [width] */
    const float *partial; /* [teams, width] */
    int64_t teams;
} ith_columns;
void ith_cuda_add_columns(cudaStream_t stream, const ith_columns *sums, int count, int64_t width);

/* Sum over ranks, see ith_device_links. */
typedef struct {
    void *to;
    const void *own, *parts;
    int64_t stride, n;
    int rank, size;
    bool wide, add;
} ith_cuda_parts;
void ith_cuda_add_parts(cudaStream_t stream, const ith_cuda_parts *p);
/* Many rows within a GPU, where cudaMemcpy2D makes 750 GB/s. */
void ith_cuda_copy_rows(cudaStream_t stream, void *dst, int64_t dst_stride, const void *src,
                        int64_t src_stride, int64_t bytes, int64_t rows);
extern const ith_device_links ith_cuda_links;

/* ---- tables of run and workspace functions, one per file ---- */
void ith_cuda_fill_rows(struct ith_backend *b);   /* embedding, gather, scatter, add, cast, zero */
void ith_cuda_fill_norm(struct ith_backend *b);   /* rmsnorm */
void ith_cuda_fill_rope(struct ith_backend *b);   /* qk_norm_rope */
void ith_cuda_fill_linear(struct ith_backend *b); /* linear */
void ith_cuda_fill_attention(struct ith_backend *b); /* attention, decode */
void ith_cuda_fill_swiglu(struct ith_backend *b);
void ith_cuda_fill_loss(struct ith_backend *b);    /* cross entropy, dot */
void ith_cuda_fill_experts(struct ith_backend *b); /* router, sort, combine */
void ith_cuda_fill_group_router(struct ith_backend *b);
void ith_cuda_fill_grouped(struct ith_backend *b);   /* grouped linear */
void ith_cuda_fill_gates(struct ith_backend *b);     /* of attention output and shared expert */
void ith_cuda_fill_vision(struct ith_backend *b);    /* layernorm, bias, gelu */
void ith_cuda_fill_optimizer(struct ith_backend *b); /* sumsq, clip, adamw */
void ith_cuda_fill_gdn_rows(struct ith_backend *b);  /* conv1d, gates, gated norm */
void ith_cuda_fill_delta(struct ith_backend *b);     /* gated delta rule */

#ifdef __cplusplus
}
#endif
#endif
