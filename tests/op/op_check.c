/* op_check - compares a backend with the reference, one line a case; exit 0 when all bounds hold.
 *
 *     op_check [device=cpu|ref|cuda] [dtype=f32|bf16|all] [seed=N] [only=TEXT] [quiet=1] [fast=1]
 * [long=1]
 *
 * only= keeps the cases whose text contains TEXT; quiet=1 prints failures and the count alone;
 * fast=1 does not ask the backend for bit-equal re-runs; long=1 runs the cases that take the
 * reference seconds or minutes, and only those. */
#include "op_cases.h"

#ifdef ITH_HAVE_CUDA_LOADER
#include "kernels/cuda_plugin.h"
#endif

#include <stdio.h>
#include <stdlib.h>

typedef struct {
    const char *device, *dtype, *only;
    uint64_t seed;
    bool quiet, fast, longer;
} options;

static const char *value_of(const char *arg, const char *key)
{
    size_t len = strlen(key);
    return strncmp(arg, key, len) == 0 ? arg + len : NULL;
}

static bool parse(int argc, char **argv, options *o)
{
    *o = (options){.device = "cpu", .dtype = "all", .only = "", .seed = 1};
    for (int i = 1; i < argc; i++) {
        const char *v;
        if ((v = value_of(argv[i], "device=")))
            o->device = v;
        else if ((v = value_of(argv[i], "dtype=")))
            o->dtype = v;
        else if ((v = value_of(argv[i], "only=")))
            o->only = v;
        else if ((v = value_of(argv[i], "seed=")))
            o->seed = strtoull(v, NULL, 10);
        else if ((v = value_of(argv[i], "quiet=")))
            o->quiet = *v == '1';
        else if ((v = value_of(argv[i], "fast=")))
            o->fast = *v == '1';
        else if ((v = value_of(argv[i], "long=")))
            o->longer = *v == '1';
        else
            return false;
    }
    return strcmp(o->dtype, "all") == 0 || strcmp(o->dtype, "f32") == 0 ||
           strcmp(o->dtype, "bf16") == 0;
}

static ith_status open_device(const options *o, ith_ctx *ctx, ith_pool **pool, ith_error *err)
{
    if (strcmp(o->device, "ref") == 0) {
        *ctx = ith_ctx_host(ith_backend_ref(), NULL, err);
        return ITH_OK;
    }
#ifdef ITH_HAVE_CPU_BACKEND
    if (strcmp(o->device, "cpu") == 0) {
        ITH_TRY(ith_pool_create(pool, 0, err));
        *ctx = ith_ctx_host(ith_backend_cpu(), *pool, err);
        return ITH_OK;
    }
#endif
#ifdef ITH_HAVE_CUDA_LOADER
    if (strcmp(o->device, "cuda") == 0) {
        *ctx = (ith_ctx){.err = err, .deterministic = !o->fast};
        return ith_ctx_open_cuda(ctx, 0, false);
    }
#endif
    (void)pool;
    return ith_fail(err, ITH_ERR_USAGE, "device=%s is not in this build", o->device);
}

/* True when the case holds. */
static bool check(const options *o, const op_case *c, ith_ctx *ctx, ith_dtype dtype)
{
    char text[256];
    op_case_text(c, text, sizeof text);
    op_result result = {0};
    ith_error_clear(ctx->err);
    ith_status status = op_bench_check(c, o->seed, ctx, dtype, &result);
    if (status == ITH_ERR_UNSUPPORTED) { /* told, and no mistake of the backend */
        printf("none %-4s %s: %s\n", ith_dtype_name(dtype), text, ctx->err->text);
        return true;
    }
    bool ok = status == ITH_OK && result.ok;
    if (o->quiet && ok)
        return true;
    printf("%-4s %-4s %s: ", ok ? "ok" : "BAD", ith_dtype_name(dtype), text);
    if (status != ITH_OK)
        printf("%s\n", ctx->err->text);
    else if (result.text[0])
        printf("%s\n", result.text);
    else
        printf("%s %.3g (bound %.3g)\n", result.output ? result.output : "-", result.error,
               result.bound);
    fflush(stdout);
    return ok;
}

int main(int argc, char **argv)
{
    options o;
    if (!parse(argc, argv, &o)) {
        fprintf(stderr, "usage: op_check [device=cpu|ref|cuda] [dtype=f32|bf16|all] [seed=N] "
                        "[only=TEXT] [quiet=1] [fast=1] [long=1]\n");
        return 2;
    }
    static ith_error err;
    ith_ctx ctx;
    ith_pool *pool = NULL;
    if (open_device(&o, &ctx, &pool, &err) != ITH_OK) {
        fprintf(stderr, "error: %s\n", err.text);
        return 2;
    }
    int64_t bad = 0, count = 0;
    static const ith_dtype dtypes[] = {ITH_F32, ITH_BF16};
    for (int d = 0; d < 2; d++) {
        if (strcmp(o.dtype, d ? "f32" : "bf16") == 0)
            continue;
        int64_t first = o.longer ? op_case_count() : 0;
        int64_t end = op_case_count() + (o.longer ? op_long_case_count() : 0);
        for (int64_t i = first; i < end; i++) {
            char text[256];
            op_case_text(op_case_at(i), text, sizeof text);
            if (!strstr(text, o.only))
                continue;
            count++;
            bad += !check(&o, op_case_at(i), &ctx, dtypes[d]);
        }
    }
    printf("%lld cases on %s, %lld bad\n", (long long)count, o.device, (long long)bad);
#ifdef ITH_HAVE_CUDA_LOADER
    if (strcmp(o.device, "cuda") == 0)
        ith_ctx_close_cuda(&ctx);
#endif
    ith_pool_destroy(pool);
    return bad || !count ? 1 : 0;
}
