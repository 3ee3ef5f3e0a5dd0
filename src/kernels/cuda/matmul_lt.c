/* matmul_lt.c - matrix products through cuBLASLt, the algorithm chosen once per shape.
 *
 * Descriptors and algorithm of a shape are made on its first use and kept in a table of fixed size
 * (the oldest entry leaves), so later calls cost the launch alone. The first algorithm of the
 * heuristic is taken: the choice depends on the shape only, so a re-run gives the same bits. */
#include "kernels/cuda/cuda_internal.h"

#include <string.h>

enum { ENTRIES = 256 };

/* All int64_t: compared as bytes. */
typedef struct {
    int64_t m, n, k, lda, ldb, ldd;
    int64_t transpose_a, transpose_b, accumulate, in, out;
    int64_t sms, align_a, align_b, align_d; /* bytes, a power of two up to 256 */
} matmul_key;

typedef struct {
    matmul_key key;
    bool used, possible;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
} matmul_entry;

struct ith_matmul_cache {
    matmul_entry entries[ENTRIES];
    int64_t next; /* place of the next new entry */
};

ith_status ith_matmul_cache_create(ith_matmul_cache **out, ith_error *err)
{
    void *cache = NULL;
    ITH_TRY(ith_alloc_zero(&cache, 1, (int64_t)sizeof(ith_matmul_cache), "matrix products", err));
    *out = cache;
    return ITH_OK;
}

static int64_t alignment(const void *p)
{
    int64_t bytes = 256;
    while ((uintptr_t)p % (uintptr_t)bytes != 0)
        bytes /= 2;
    return bytes;
}

static matmul_key key_of(const ith_matmul *p)
{
    matmul_key key = {
        .m = p->m,
        .n = p->n,
        .k = p->k,
        .lda = p->lda,
        .ldb = p->ldb,
        .ldd = p->ldd,
        .transpose_a = p->transpose_a,
        .transpose_b = p->transpose_b,
        .accumulate = p->accumulate,
        .in = p->in,
        .out = p->out,
        .sms = p->sms,
        .align_a = alignment(p->a),
        .align_b = alignment(p->b),
        .align_d = alignment(p->d),
    };
    return key;
}

static cudaDataType_t cuda_type(int64_t dtype)
{
    return dtype == ITH_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static ith_status check_lt(ith_ctx *ctx, cublasStatus_t code, const char *what)
{
    if (code == CUBLAS_STATUS_SUCCESS)
        return ITH_OK;
    return ith_fail(ctx->err, ITH_ERR_RUN, "%s: %s", what,
                    ith_cuda_of(ctx)->libs->cublasLtGetStatusString(code));
}

static void drop(const ith_cuda_libs *lt, matmul_entry *e)
{
    if (e->op)
        lt->cublasLtMatmulDescDestroy(e->op);
    if (e->a)
        lt->cublasLtMatrixLayoutDestroy(e->a);
    if (e->b)
        lt->cublasLtMatrixLayoutDestroy(e->b);
    if (e->d)
        lt->cublasLtMatrixLayoutDestroy(e->d);
    memset(e, 0, sizeof *e);
}

void ith_matmul_cache_destroy(ith_matmul_cache *cache, const ith_cuda_libs *libs)
{
    for (int i = 0; cache && i < ENTRIES; i++)
        drop(libs, &cache->entries[i]);
    ith_free(cache);
}

static ith_status describe(ith_ctx *ctx, matmul_entry *e)
{
    const ith_cuda_libs *lt = ith_cuda_of(ctx)->libs;
    const matmul_key *k = &e->key;
    cublasOperation_t ops[2] = {k->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                                k->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N};
    int64_t a_rows = k->transpose_a ? k->k : k->m, a_cols = k->transpose_a ? k->m : k->k;
    int64_t b_rows = k->transpose_b ? k->n : k->k, b_cols = k->transpose_b ? k->k : k->n;
    cudaDataType_t in = cuda_type(k->in), out = cuda_type(k->out);
    ITH_TRY(check_lt(ctx, lt->cublasLtMatmulDescCreate(&e->op, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                     "product descriptor"));
    ITH_TRY(check_lt(ctx,
                     lt->cublasLtMatmulDescSetAttribute(e->op, CUBLASLT_MATMUL_DESC_TRANSA, &ops[0],
                                                        sizeof ops[0]),
                     "transpose of A"));
    ITH_TRY(check_lt(ctx,
                     lt->cublasLtMatmulDescSetAttribute(e->op, CUBLASLT_MATMUL_DESC_TRANSB, &ops[1],
                                                        sizeof ops[1]),
                     "transpose of B"));
    int32_t sms = (int32_t)k->sms;
    if (sms)
        ITH_TRY(check_lt(ctx,
                         lt->cublasLtMatmulDescSetAttribute(
                             e->op, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms, sizeof sms),
                         "multiprocessors"));
    ITH_TRY(check_lt(
        ctx, lt->cublasLtMatrixLayoutCreate(&e->a, in, (uint64_t)a_rows, (uint64_t)a_cols, k->lda),
        "layout of A"));
    ITH_TRY(check_lt(
        ctx, lt->cublasLtMatrixLayoutCreate(&e->b, in, (uint64_t)b_rows, (uint64_t)b_cols, k->ldb),
        "layout of B"));
    return check_lt(
        ctx, lt->cublasLtMatrixLayoutCreate(&e->d, out, (uint64_t)k->m, (uint64_t)k->n, k->ldd),
        "layout of D");
}

static ith_status set_preferences(ith_ctx *ctx, cublasLtMatmulPreference_t pref,
                                  const matmul_key *k)
{
    const ith_cuda_libs *lt = ith_cuda_of(ctx)->libs;
    uint64_t workspace = ITH_MATMUL_WORKSPACE_BYTES;
    uint32_t align[4] = {(uint32_t)k->align_a, (uint32_t)k->align_b, (uint32_t)k->align_d,
                         (uint32_t)k->align_d};
    static const cublasLtMatmulPreferenceAttributes_t names[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    ITH_TRY(
        check_lt(ctx,
                 lt->cublasLtMatmulPreferenceSetAttribute(
                     pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace),
                 "workspace limit"));
    for (int i = 0; i < 4; i++)
        ITH_TRY(check_lt(
            ctx,
            lt->cublasLtMatmulPreferenceSetAttribute(pref, names[i], &align[i], sizeof align[i]),
            "alignment"));
    return ITH_OK;
}

static ith_status choose(ith_ctx *ctx, matmul_entry *e)
{
    ith_cuda *cuda = ith_cuda_of(ctx);
    const ith_cuda_libs *lt = cuda->libs;
    cublasLtMatmulPreference_t pref = NULL;
    cublasLtMatmulHeuristicResult_t result = {0};
    int found = 0;
    ITH_TRY(check_lt(ctx, lt->cublasLtMatmulPreferenceCreate(&pref), "preferences"));
    ith_status status = set_preferences(ctx, pref, &e->key);
    if (status == ITH_OK) {
        cublasStatus_t code = lt->cublasLtMatmulAlgoGetHeuristic(cuda->lt, e->op, e->a, e->b, e->d,
                                                                 e->d, pref, 1, &result, &found);
        if (code == CUBLAS_STATUS_NOT_SUPPORTED || code == CUBLAS_STATUS_INVALID_VALUE)
            found = 0;
        else
            status = check_lt(ctx, code, "choice of an algorithm");
    }
    lt->cublasLtMatmulPreferenceDestroy(pref);
    e->possible = found > 0;
    e->algo = result.algo;
    return status;
}

static ith_status entry_of(ith_ctx *ctx, const ith_matmul *p, matmul_entry **out)
{
    ith_cuda *cuda = ith_cuda_of(ctx);
    ith_matmul_cache *cache = cuda->matmuls;
    matmul_key key = key_of(p);
    for (int i = 0; i < ENTRIES && cache->entries[i].used; i++) {
        if (memcmp(&cache->entries[i].key, &key, sizeof key) == 0) {
            *out = &cache->entries[i];
            return ITH_OK;
        }
    }
    matmul_entry *e = &cache->entries[cache->next];
    drop(cuda->libs, e);
    e->key = key;
    ith_status status = describe(ctx, e);
    if (status == ITH_OK)
        status = choose(ctx, e);
    if (status != ITH_OK) {
        drop(cuda->libs, e);
        return status;
    }
    e->used = true;
    cache->next = (cache->next + 1) % ENTRIES;
    *out = e;
    return ITH_OK;
}

ith_status ith_matmul_run(ith_ctx *ctx, const ith_matmul *p, ith_tensor named, bool *done)
{
    ith_cuda *cuda = ith_cuda_of(ctx);
    matmul_entry *e = NULL;
    char shape[96];
    ITH_ASSERT(ctx->scratch_bytes >= ITH_MATMUL_WORKSPACE_BYTES);
    ITH_WRAP(entry_of(ctx, p, &e), ctx->err, "%s", ith_tensor_text(named, shape, sizeof shape));
    *done = e->possible;
    if (!e->possible)
        return ITH_OK;
    float alpha = 1, beta = p->accumulate ? 1 : 0;
    ITH_WRAP(check_lt(ctx,
                      cuda->libs->cublasLtMatmul(
                          cuda->lt, e->op, &alpha, p->a, e->a, p->b, e->b, &beta, p->d, e->d, p->d,
                          e->d, &e->algo, ctx->scratch, ITH_MATMUL_WORKSPACE_BYTES, cuda->stream),
                      "cublasLtMatmul"),
             ctx->err, "%s", ith_tensor_text(named, shape, sizeof shape));
    return ITH_OK;
}
