/* op_bench.c - worlds, poisoned memory, and the comparison. */
#include "op_bench.h"

#include "base/mem.h"
#include "base/rng.h"

#include <math.h>
#include <stdio.h>

enum { GUARD_BYTES = 256 }; /* before and after each tensor; keeps its alignment */

double op_normal(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)t;
    return ith_rng_normal(r->seed, stream, (uint64_t)n);
}

double op_small(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)t;
    return ith_rng_normal(r->seed, stream, (uint64_t)n) / 8;
}

double op_positive(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)t;
    return 1 - ith_rng_uniform(r->seed, stream, (uint64_t)n);
}

static ith_dtype dtype_of(const op_run *r, op_class kind)
{
    static const ith_dtype fixed[] = {[OP_F32] = ITH_F32, [OP_F64] = ITH_F64, [OP_I32] = ITH_I32};
    if (kind == OP_ACT)
        return r->act;
    if (kind == OP_STAT)
        return r->act == ITH_F64 ? ITH_F64 : ITH_F32;
    return fixed[kind];
}

/* A NaN that no computation makes (signalling), or a number no index takes. */
static void poison(void *at, ith_dtype dtype)
{
    static const uint16_t half = 0x7fa5;
    static const uint32_t single = 0x7fa5a5a5, integer = 0xa5a5a5a5;
    static const uint64_t wide = 0x7ff5a5a5a5a5a5a5;
    const void *pattern = dtype == ITH_BF16  ? (const void *)&half
                          : dtype == ITH_F32 ? (const void *)&single
                          : dtype == ITH_F64 ? (const void *)&wide
                                             : (const void *)&integer;
    memcpy(at, pattern, (size_t)ith_dtype_bytes(dtype));
}

static bool is_poison(const void *at, ith_dtype dtype)
{
    unsigned char pattern[8];
    poison(pattern, dtype);
    return memcmp(at, pattern, (size_t)ith_dtype_bytes(dtype)) == 0;
}

/* Where element n of the view lies in an image. */
static int64_t image_offset(const ith_tensor *t, int64_t n)
{
    int64_t at = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        at += n % t->shape[d] * t->stride[d];
        n /= t->shape[d];
    }
    return GUARD_BYTES + at * ith_dtype_bytes(t->dtype);
}

static double value_at(const op_tensor *t, int64_t n)
{
    const unsigned char *at = t->after + image_offset(&t->view, n);
    if (t->view.dtype == ITH_I32) {
        int32_t value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    double value;
    ith_convert(&value, ITH_F64, at, t->view.dtype, 1);
    return value;
}

/* All memory of an image gets the poison pattern; GUARD_BYTES is a multiple of every size. */
static void poison_image(op_tensor *t)
{
    int64_t size = ith_dtype_bytes(t->view.dtype);
    for (int64_t at = 0; at < t->bytes; at += size)
        poison(t->before + at, t->view.dtype);
}

static void fill_image(const op_run *r, op_tensor *t, op_fill fill, uint64_t stream)
{
    ith_dtype seen = t->kind == OP_ACT ? r->tested : (t->kind == OP_F64 ? ITH_F64 : ITH_F32);
    for (int64_t n = 0; n < ith_numel(t->view); n++) {
        unsigned char *at = t->before + image_offset(&t->view, n);
        double value = fill(r, stream, &t->view, n);
        if (t->kind == OP_I32) {
            int32_t integer = (int32_t)value;
            memcpy(at, &integer, sizeof integer);
            continue;
        }
        unsigned char rounded[8];
        double back;
        ith_convert(rounded, seen, &value, ITH_F64, 1);
        ith_convert(&back, ITH_F64, rounded, seen, 1);
        ith_convert(at, t->view.dtype, &back, ITH_F64, 1);
    }
}

static ith_status place(op_run *r, op_tensor *t)
{
    ith_device *device = r->ctx->device;
    ITH_TRY(device->alloc(device, t->bytes, &t->base, r->ctx->err));
    t->view.data = (char *)t->base + GUARD_BYTES;
    return device->upload(device, t->base, t->before, t->bytes, r->ctx->err);
}

/* A view with its dimension 0 padded, on poisoned images of its own. */
static op_tensor *new_tensor(op_run *r, op_role role, op_class kind, const char *name, int ndim,
                             const int64_t *shape, int64_t pad)
{
    ITH_ASSERT(r->num_tensors < OP_MAX_TENSORS && ndim >= 1 && ndim <= ITH_MAX_DIMS);
    op_tensor *t = &r->tensors[r->num_tensors++];
    *t = (op_tensor){.name = name, .role = role, .kind = kind};
    t->view.dtype = dtype_of(r, kind);
    t->view.ndim = ndim;
    int64_t stride = 1;
    for (int d = ITH_MAX_DIMS - 1; d >= 0; d--) {
        t->view.shape[d] = d < ndim ? shape[d] : 1;
        t->view.stride[d] = d == 0 && ndim > 1 ? stride + pad : stride;
        stride *= t->view.shape[d];
    }
    int64_t span = ndim > 1 ? t->view.shape[0] * t->view.stride[0] : t->view.shape[0];
    t->bytes = 2 * GUARD_BYTES + ith_mul_bytes(span, ith_dtype_bytes(t->view.dtype));
    t->before = ith_malloc(t->bytes);
    t->after = ith_malloc(t->bytes);
    if (t->before && t->after)
        poison_image(t);
    else if (r->status == ITH_OK)
        r->status = ith_fail(r->ctx->err, ITH_ERR_MEMORY, "no memory for test tensor %s", name);
    return t;
}

ith_tensor op_make(op_run *r, op_role role, op_class kind, const char *name, op_fill fill, int ndim,
                   const int64_t *shape, int64_t pad)
{
    op_tensor *t = new_tensor(r, role, kind, name, ndim, shape, pad);
    if (r->status == ITH_OK && (role == OP_IN || role == OP_INOUT))
        fill_image(r, t, fill, (uint64_t)r->num_tensors);
    if (r->status == ITH_OK)
        r->status = place(r, t);
    return t->view;
}

ith_tensor op_ints(op_run *r, const char *name, const int32_t *values, int64_t rows, int64_t n)
{
    bool flat = rows == OP_VECTOR;
    int64_t shape[2] = {flat ? n : rows, n};
    op_tensor *t = new_tensor(r, OP_IN, OP_I32, name, flat ? 1 : 2, shape, 0);
    if (r->status == ITH_OK && !values)
        r->status = ith_fail(r->ctx->err, ITH_ERR_MEMORY, "no memory for test tensor %s", name);
    if (r->status == ITH_OK && ith_numel(t->view))
        memcpy(t->before + GUARD_BYTES, values, (size_t)ith_tensor_bytes(t->view));
    if (r->status == ITH_OK)
        r->status = place(r, t);
    return t->view;
}

const int32_t *op_host_ints(const op_run *r, ith_tensor t)
{
    for (int i = 0; i < r->num_tensors; i++)
        if (r->tensors[i].view.data == t.data)
            return (const int32_t *)(const void *)(r->tensors[i].before + GUARD_BYTES);
    return NULL; /* not of this run */
}

static void run_free(op_run *r)
{
    for (int i = 0; r && i < r->num_tensors; i++) {
        op_tensor *t = &r->tensors[i];
        if (t->base)
            r->ctx->device->free(r->ctx->device, t->base);
        ith_free(t->before);
        ith_free(t->after);
    }
    ith_free(r);
}

static ith_status download(op_run *r)
{
    ith_device *device = r->ctx->device;
    for (int i = 0; i < r->num_tensors; i++) {
        op_tensor *t = &r->tensors[i];
        ITH_TRY(device->download(device, t->after, t->base, t->bytes, r->ctx->err));
    }
    return device->sync(device, r->ctx->err);
}

/* Runs the case in one world; *out is freed with run_free. */
static ith_status run_world(const op_case *c, uint64_t seed, ith_ctx *ctx, ith_dtype act,
                            ith_dtype tested, op_run **out)
{
    op_run *r = ith_calloc(1, (int64_t)sizeof *r);
    if (!r)
        return ith_fail(ctx->err, ITH_ERR_MEMORY, "no memory for an operator case");
    uint64_t mixed = seed;
    for (int i = 0; i < OP_MAX_PARAMS; i++)
        mixed = ith_rng_u64(mixed, ith_rng_stream(c->family->name), (uint64_t)c->params[i]);
    r->ctx = ctx;
    r->act = act;
    r->tested = tested;
    r->seed = mixed;
    ith_status status = c->family->body(r, c->params);
    if (status == ITH_OK)
        status = download(r);
    if (status == ITH_OK)
        *out = r;
    else
        run_free(r);
    return status;
}

static void complain(op_result *out, const char *tensor, const char *text, int64_t n)
{
    if (!out->ok)
        return;
    out->ok = false;
    out->output = tensor;
    out->error = HUGE_VAL;
    snprintf(out->text, sizeof out->text, "%s: %s (element %lld)", tensor, text, (long long)n);
}

/* Inputs, guards and gaps hold what they held; outputs are written. */
static void check_memory(op_run *r, op_result *out)
{
    for (int i = 0; i < r->num_tensors; i++) {
        op_tensor *t = &r->tensors[i];
        int64_t size = ith_dtype_bytes(t->view.dtype);
        unsigned char *image = ith_malloc(t->bytes);
        if (!image) {
            complain(out, t->name, "no memory for the check", 0);
            return;
        }
        memcpy(image, t->after, (size_t)t->bytes);
        for (int64_t n = 0; t->role != OP_IN && n < ith_numel(t->view); n++) {
            int64_t at = image_offset(&t->view, n);
            if (t->role == OP_OUT && is_poison(image + at, t->view.dtype))
                complain(out, t->name, "not written", n);
            memcpy(image + at, t->before + at, (size_t)size);
        }
        for (int64_t at = 0; at < t->bytes; at += size)
            if (memcmp(image + at, t->before + at, (size_t)size) != 0)
                complain(out, t->name,
                         t->role == OP_IN ? "input changed" : "written outside the view",
                         (at - GUARD_BYTES) / size);
        ith_free(image);
    }
}

typedef struct {
    double sum_squares, max_error; /* of the difference */
    double value_squares, max_value;
    int64_t count;
} difference;

/* Equal values (infinities and NaNs too) differ by 0; a NaN on one side is an infinite error. */
static difference compare(const op_tensor *a, const op_tensor *b)
{
    difference d = {0};
    d.count = ith_numel(a->view);
    for (int64_t n = 0; n < d.count; n++) {
        double x = value_at(a, n), y = value_at(b, n);
        double error = x == y || (isnan(x) && isnan(y)) ? 0 : fabs(x - y);
        if (isnan(error))
            error = HUGE_VAL;
        if (error < 1e-34) /* an exponential may flush what f32 holds no more at full precision */
            error = 0;
        d.sum_squares += error * error;
        d.max_error = fmax(d.max_error, error);
        if (isfinite(y)) {
            d.value_squares += y * y;
            d.max_value = fmax(d.max_value, fabs(y));
        }
    }
    return d;
}

/* Error as a share of its bound; above 1 it does not hold. */
static double share_of(double error, double bound)
{
    if (error == 0)
        return 0;
    return bound > 0 && !isnan(error) ? error / bound : HUGE_VAL;
}

/* Keeps the output that is worst against its bound. */
static void judge(op_result *out, const char *name, double error, double bound)
{
    if (!out->output || share_of(error, bound) > share_of(out->error, out->bound)) {
        out->output = name;
        out->error = error;
        out->bound = bound;
        out->ok = share_of(error, bound) <= 1;
    }
}

/* wide, plain, test: the same tensor in the three worlds. */
static void judge_tensor(const op_family *family, op_result *out, const op_tensor *wide,
                         const op_tensor *plain, const op_tensor *test, ith_dtype tested)
{
    if (test->kind == OP_I32 || family->exact) {
        judge(out, test->name, compare(test, plain).max_error, 0);
        if (test->kind == OP_I32)
            return;
    }
    difference d = compare(test, wide), p = compare(plain, wide);
    if (tested == ITH_F32) {
        double nmse = d.sum_squares / (d.value_squares > 0 ? d.value_squares : 1);
        judge(out, test->name, nmse, family->nmse);
        return;
    }
    double count = (double)(d.count ? d.count : 1);
    judge(out, test->name, sqrt(d.sum_squares / count),
          2 * sqrt(p.sum_squares / count) + family->floor * sqrt(d.value_squares / count));
    judge(out, test->name, d.max_error, 2 * p.max_error + family->floor * d.max_value);
}

static void same_bits(const op_run *a, const op_run *b, op_result *out, const char *what)
{
    ITH_ASSERT(a->num_tensors == b->num_tensors);
    for (int i = 0; i < a->num_tensors; i++) {
        const op_tensor *x = &a->tensors[i], *y = &b->tensors[i];
        int64_t size = ith_dtype_bytes(x->view.dtype);
        for (int64_t at = 0; at < x->bytes; at += size)
            if (memcmp(x->after + at, y->after + at, (size_t)size) != 0)
                complain(out, x->name, what, (at - GUARD_BYTES) / size);
    }
}

ith_status op_bench_check(const op_case *c, uint64_t seed, ith_ctx *test, ith_dtype dtype,
                          op_result *out)
{
    op_result result = {.ok = true};
    op_run *wide = NULL, *plain = NULL, *first = NULL, *second = NULL;
    ith_ctx ref = ith_ctx_host(ith_backend_ref(), NULL, test->err);
    ith_status status;
    ITH_TRY_OUT(run_world(c, seed, &ref, ITH_F64, dtype, &wide));
    ITH_TRY_OUT(run_world(c, seed, &ref, dtype, dtype, &plain));
    ITH_TRY_OUT(run_world(c, seed, test, dtype, dtype, &first));
    ITH_TRY_OUT(run_world(c, seed, test, dtype, dtype, &second));
    check_memory(first, &result);
    if (test->deterministic || test->device == ith_device_cpu())
        same_bits(first, second, &result, "two runs differ");
    for (int i = 0; result.text[0] == '\0' && i < first->num_tensors; i++)
        if (first->tensors[i].role == OP_OUT || first->tensors[i].role == OP_INOUT)
            judge_tensor(c->family, &result, &wide->tensors[i], &plain->tensors[i],
                         &first->tensors[i], dtype);
    *out = result;
out:
    run_free(wide);
    run_free(plain);
    run_free(first);
    run_free(second);
    return status;
}

ith_status op_bench_same_bits(const op_case *c, uint64_t seed, ith_ctx *a, ith_ctx *b,
                              ith_dtype dtype, op_result *out)
{
    op_result result = {.ok = true};
    op_run *first = NULL, *second = NULL;
    ith_status status;
    ITH_TRY_OUT(run_world(c, seed, a, dtype, dtype, &first));
    ITH_TRY_OUT(run_world(c, seed, b, dtype, dtype, &second));
    same_bits(first, second, &result, "the two contexts differ");
    *out = result;
out:
    run_free(first);
    run_free(second);
    return status;
}

void op_case_text(const op_case *c, char *out, int64_t out_bytes)
{
    int64_t len = snprintf(out, (size_t)out_bytes, "%s", c->family->name);
    const char *name = c->family->params;
    for (int i = 0; i < OP_MAX_PARAMS && *name && len < out_bytes; i++) {
        int chars = (int)strcspn(name, " ");
        len += snprintf(out + len, (size_t)(out_bytes - len), " %.*s=%lld", chars, name,
                        (long long)c->params[i]);
        name += chars + (name[chars] == ' ');
    }
}
