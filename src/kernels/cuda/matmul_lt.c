/* matmul_lt.c - matrix products through cuBLASLt, the algorithm chosen once per shape.
 *
 * Descriptors and algorithm of a shape are made on its first use and kept in a table of fixed size
 * (the oldest entry leaves), so later calls cost the launch alone. The best of the heuristic's
 * first algorithms is measured then, in turn and back to back as in a step, and kept on disk: a
 * re-run on the machine takes the same one, so its bits are the same. Where re-runs must be
 * bit-equal across machines' states (ctx.deterministic) or nothing can be kept, the heuristic's
 * first is taken, which depends on the shape only. */
#include "kernels/cuda/cuda_internal.h"

#include "base/log.h"

#include <assert.h>
#include <float.h>
#include <stdio.h>
#include <string.h>

enum { ENTRIES = 256, CANDIDATES = 8, ROUNDS = 5, MOST_CALLS = 10, KEY_TEXT_BYTES = 512 };
#define ROUND_MS 0.5  /* at least this long is measured at once */
#define WORTH_IT 0.99 /* of the first's time: what is less of a gain stays with the first */

/* All int64_t: compared as bytes. */
typedef struct {
    int64_t m, n, k, lda, ldb, ldd;
    int64_t transpose_a, transpose_b, accumulate, in, out;
    int64_t align_a, align_b, align_d; /* bytes, a power of two up to 256 */
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
    int64_t next;         /* place of the next new entry */
    ith_choices *choices; /* NULL: the heuristic's first algorithm is taken */
};

/* A file for each device of the machine: ranks do not write over each other's lines. */
ith_status ith_matmul_cache_create(ith_matmul_cache **out, int64_t library_version,
                                   const char *device_name, int device_index, ith_error *err)
{
    void *memory = NULL;
    char name[384];
    snprintf(name, sizeof name, "matmul-%lld-%s-%d.txt", (long long)library_version, device_name,
             device_index);
    for (char *p = name; *p; p++)
        if (*p == ' ' || *p == '/')
            *p = '_';
    ITH_TRY(ith_alloc_zero(&memory, 1, (int64_t)sizeof(ith_matmul_cache), "matrix products", err));
    ith_matmul_cache *cache = memory;
    ith_status status = ith_choices_open(&cache->choices, name, err);
    if (status != ITH_OK)
        ith_free(cache);
    else
        *out = cache;
    return status;
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
    if (cache)
        ith_choices_close(cache->choices);
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

static cublasStatus_t launch(ith_ctx *ctx, const matmul_entry *e, const ith_matmul *p,
                             const cublasLtMatmulAlgo_t *algo, float alpha)
{
    ith_cuda *cuda = ith_cuda_of(ctx);
    float beta = p->accumulate ? 1 : 0;
    return cuda->libs->cublasLtMatmul(cuda->lt, e->op, &alpha, p->a, e->a, p->b, e->b, &beta, p->d,
                                      e->d, p->d, e->d, algo, ctx->scratch,
                                      ITH_MATMUL_WORKSPACE_BYTES, cuda->stream);
}

/* ---- measuring ---- */

typedef struct {
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    int num_found;
    bool fails[CANDIDATES];
    double ms[CANDIDATES]; /* sum over rounds, per call */
} contest;

/* One round: each candidate `calls` times, one after the other without a wait. */
static ith_status run_round(ith_ctx *ctx, const matmul_entry *e, const ith_matmul *p, contest *c,
                            cudaEvent_t *marks, int calls)
{
    /* The product of an accumulating call is scaled by the smallest float: all of its work is
     * done, and what is added to D is lost in rounding beside the real product added later. */
    float alpha = p->accumulate ? FLT_MIN : 1.0f;
    ith_tensor none = ith_tensor_none();
    ITH_CUDA_TRY(ctx, cudaEventRecord(marks[0], ith_cuda_stream(ctx)), none);
    for (int i = 0; i < c->num_found; i++) {
        for (int k = 0; k < calls && !c->fails[i]; k++)
            c->fails[i] = launch(ctx, e, p, &c->found[i].algo, alpha) != CUBLAS_STATUS_SUCCESS;
        ITH_CUDA_TRY(ctx, cudaEventRecord(marks[i + 1], ith_cuda_stream(ctx)), none);
    }
    ITH_CUDA_TRY(ctx, cudaEventSynchronize(marks[c->num_found]), none);
    for (int i = 0; i < c->num_found; i++) {
        float ms = 0;
        ITH_CUDA_TRY(ctx, cudaEventElapsedTime(&ms, marks[i], marks[i + 1]), none);
        c->ms[i] += (double)ms / calls;
    }
    return ITH_OK;
}

static ith_status run_rounds(ith_ctx *ctx, const matmul_entry *e, const ith_matmul *p, contest *c,
                             cudaEvent_t *marks)
{
    for (int i = 0; i < 2; i++) { /* loads the kernels; then a first idea of the time */
        memset(c->ms, 0, sizeof c->ms);
        ITH_TRY(run_round(ctx, e, p, c, marks, 1));
    }
    int calls = 1;
    while (calls < MOST_CALLS && calls * c->ms[0] < ROUND_MS)
        calls++;
    memset(c->ms, 0, sizeof c->ms);
    for (int i = 0; i < ROUNDS; i++)
        ITH_TRY(run_round(ctx, e, p, c, marks, calls));
    return ITH_OK;
}

/* *best: index of the fastest candidate. D holds nothing of use afterwards unless accumulating. */
static ith_status measure(ith_ctx *ctx, const matmul_entry *e, const ith_matmul *p, contest *c,
                          int *best)
{
    cudaEvent_t marks[CANDIDATES + 1] = {0};
    ith_status status = ITH_OK;
    for (int i = 0; i <= c->num_found && status == ITH_OK; i++)
        status = ith_cuda_check(ctx->err, cudaEventCreate(&marks[i]), "event", ith_tensor_none());
    if (status == ITH_OK)
        status = run_rounds(ctx, e, p, c, marks);
    for (int i = 0; i <= CANDIDATES; i++)
        if (marks[i])
            (void)cudaEventDestroy(marks[i]);
    if (status != ITH_OK)
        return status;
    *best = 0;
    for (int i = 1; i < c->num_found; i++)
        if (!c->fails[i] && (c->fails[*best] || c->ms[i] < c->ms[*best]))
            *best = i;
    if (!c->fails[0] && c->ms[*best] > WORTH_IT * c->ms[0])
        *best = 0;
    return ITH_OK;
}

static void key_text(const matmul_key *k, char out[KEY_TEXT_BYTES])
{
    int64_t words[sizeof *k / sizeof(int64_t)];
    int used = 0;
    memcpy(words, k, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        used += snprintf(out + used, (size_t)(KEY_TEXT_BYTES - used), i ? " %lld" : "%lld",
                         (long long)words[i]);
}

/* The kept choice of the shape, or a measured one, which is kept; one that cannot be kept is not
 * used, for the next run would not know it. */
static ith_status choose_measured(ith_ctx *ctx, matmul_entry *e, const ith_matmul *p, contest *c)
{
    ith_choices *choices = ith_cuda_of(ctx)->matmuls->choices;
    char key[KEY_TEXT_BYTES];
    uint64_t words[ITH_CHOICE_WORDS];
    ith_error local = {0};
    int best = 0;
    static_assert(sizeof words == sizeof e->algo, "an algorithm is kept as words");
    key_text(&e->key, key);
    if (ith_choices_find(choices, key, words)) {
        memcpy(&e->algo, words, sizeof words);
        return ITH_OK;
    }
    ITH_TRY(measure(ctx, e, p, c, &best));
    ith_log(ITH_LOG_DEBUG, "cuda", "product %s: algorithm %d of %d, %.1f us; the first %.1f us",
            key, best, c->num_found, 1e3 * c->ms[best] / ROUNDS, 1e3 * c->ms[0] / ROUNDS);
    memcpy(words, &c->found[best].algo, sizeof words);
    if (ith_choices_keep(choices, key, words, &local) != ITH_OK) {
        ith_log(ITH_LOG_WARN, "cuda", "matrix algorithms are measured no more: %s", local.text);
        ith_choices_close(choices);
        ith_cuda_of(ctx)->matmuls->choices = NULL;
        return ITH_OK;
    }
    e->algo = c->found[best].algo;
    return ITH_OK;
}

static ith_status choose(ith_ctx *ctx, matmul_entry *e, const ith_matmul *p)
{
    ith_cuda *cuda = ith_cuda_of(ctx);
    const ith_cuda_libs *lt = cuda->libs;
    cublasLtMatmulPreference_t pref = NULL;
    contest c = {0};
    bool measured = cuda->matmuls->choices && !ctx->deterministic;
    ITH_TRY(check_lt(ctx, lt->cublasLtMatmulPreferenceCreate(&pref), "preferences"));
    ith_status status = set_preferences(ctx, pref, &e->key);
    if (status == ITH_OK) {
        cublasStatus_t code =
            lt->cublasLtMatmulAlgoGetHeuristic(cuda->lt, e->op, e->a, e->b, e->d, e->d, pref,
                                               measured ? CANDIDATES : 1, c.found, &c.num_found);
        if (code == CUBLAS_STATUS_NOT_SUPPORTED || code == CUBLAS_STATUS_INVALID_VALUE)
            c.num_found = 0;
        else
            status = check_lt(ctx, code, "choice of an algorithm");
    }
    lt->cublasLtMatmulPreferenceDestroy(pref);
    e->possible = c.num_found > 0;
    e->algo = c.found[0].algo;
    if (status == ITH_OK && measured && c.num_found > 1)
        status = choose_measured(ctx, e, p, &c);
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
        status = choose(ctx, e, p);
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
    matmul_entry *e = NULL;
    char shape[96];
    ITH_ASSERT(ctx->scratch_bytes >= ITH_MATMUL_WORKSPACE_BYTES);
    ITH_WRAP(entry_of(ctx, p, &e), ctx->err, "%s", ith_tensor_text(named, shape, sizeof shape));
    *done = e->possible;
    if (!e->possible)
        return ITH_OK;
    ITH_WRAP(check_lt(ctx, launch(ctx, e, p, &e->algo, 1.0f), "cublasLtMatmul"), ctx->err, "%s",
             ith_tensor_text(named, shape, sizeof shape));
    return ITH_OK;
}
