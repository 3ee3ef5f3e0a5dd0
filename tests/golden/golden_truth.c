/* golden_truth.c - what a run in bfloat16 should give: the values of the float32 run before it, in
 * the order in which they were asked for, with its choices of experts. */
#include "golden.h"

#include <math.h>
#include <string.h>

#include "kernels/backend.h"

float *floats(ith_ctx *ctx, ith_tensor t)
{
    int64_t n = ith_numel(t);
    char *raw = ith_malloc(ith_tensor_bytes(t) + 8);
    float *out = ith_malloc(n * 4 + 4);
    if (!raw || !out)
        exit(1);
    die_on(ctx->device->download(ctx->device, raw, t.data, ith_tensor_bytes(t), &golden_err));
    die_on(ctx->device->sync(ctx->device, &golden_err));
    ith_convert(out, ITH_F32, raw, t.dtype, n);
    ith_free(raw);
    return out;
}

/* What the float32 run of this draw gave, in the order of its questions. */
static struct {
    float **values;
    int64_t count, cap, next;
} truth;

const float *true_values(const options *o, const float *got, int64_t n)
{
    ITH_ASSERT(o->kind != RUN_ALONE);
    if (o->kind == RUN_FOLLOWS) {
        ITH_ASSERT(truth.next < truth.count);
        return truth.values[truth.next++];
    }
    die_on(ith_grow((void **)&truth.values, &truth.cap, truth.count + 1, sizeof *truth.values,
                    "values", &golden_err));
    float *copy = ith_malloc(n * 4 + 4);
    if (!copy)
        exit(1);
    memcpy(copy, got, (size_t)n * 4);
    return truth.values[truth.count++] = copy;
}

double true_number(const options *o, bool other_weights, double got, double in_file)
{
    float value = (float)got;
    return other_weights ? (double)*true_values(o, &value, 1) : in_file;
}

double rel_norm(const float *a, const char *ref, ith_dtype dtype, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        float r = 0;
        ith_convert(&r, ITH_F32, ref + i * ith_dtype_bytes(dtype), dtype, 1);
        diff += ((double)a[i] - (double)r) * ((double)a[i] - (double)r);
        norm += (double)r * (double)r;
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

/* ---- routes ---- */

typedef struct {
    int32_t *topk_idx; /* [rows,k] */
    float *scores;     /* [rows,E] */
    int64_t rows;
} route;

static struct {
    struct ith_backend own, hooked; /* the running backend, and the same with our routers */
    route *calls;
    int64_t count, cap, next;
    bool record;
    double worst; /* error of the scores of a call */
} routes;

/* How a router makes weights of the chosen scores (ops.h). */
typedef struct {
    float scaling;
    bool norm, group, bf16;
} weighing;

static void weigh_row(float *w, int64_t k, weighing how)
{
    float sum = how.group ? 1e-20F : 0;
    for (int64_t s = 0; s < k; s++)
        sum += w[s];
    for (int64_t s = 0; s < k; s++) {
        w[s] = how.norm ? w[s] / sum * how.scaling : w[s] * how.scaling;
        w[s] = how.bf16 ? ith_bf16_to_f32(ith_f32_to_bf16(w[s])) : w[s];
    }
}

/* Records a choice, or replaces it and the weights and compares the scores. */
static ith_status route_call(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                             ith_tensor scores, weighing how)
{
    ith_device *d = ctx->device;
    int64_t rows = topk_idx.shape[0], k = topk_idx.shape[1], e = scores.shape[1];
    float *own = floats(ctx, scores), *weights = ith_malloc(rows * k * 4 + 4);
    int32_t *idx = ith_malloc(rows * k * 4 + 4);
    if (routes.record) {
        ITH_TRY(d->download(d, idx, topk_idx.data, rows * k * 4, ctx->err));
        ITH_TRY(d->sync(d, ctx->err));
        ITH_TRY(ith_grow((void **)&routes.calls, &routes.cap, routes.count + 1,
                         sizeof *routes.calls, "routes", ctx->err));
        routes.calls[routes.count++] = (route){idx, own, rows};
        ith_free(weights);
        return ITH_OK;
    }
    ITH_ASSERT(routes.next < routes.count);
    const route *r = &routes.calls[routes.next++];
    ITH_ASSERT(r->rows == rows);
    double e_scores = rel_norm(own, (const char *)r->scores, ITH_F32, rows * e);
    routes.worst = e_scores > routes.worst || isnan(e_scores) ? e_scores : routes.worst;
    memcpy(idx, r->topk_idx, (size_t)(rows * k) * 4);
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t s = 0; s < k; s++)
            weights[t * k + s] = own[t * e + idx[t * k + s]];
        weigh_row(weights + t * k, k, how);
    }
    ITH_TRY(d->upload(d, topk_idx.data, idx, rows * k * 4, ctx->err));
    ITH_TRY(d->upload(d, topk_w.data, weights, rows * k * 4, ctx->err));
    ITH_TRY(d->sync(d, ctx->err));
    ith_free(idx);
    ith_free(own);
    ith_free(weights);
    return ITH_OK;
}

static ith_status routed(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx, ith_tensor probs,
                         ith_tensor logits, bool norm_topk)
{
    weighing how = {1, norm_topk, false, logits.dtype == ITH_BF16};
    ITH_TRY(routes.own.router_forward.run(ctx, topk_w, topk_idx, probs, logits, norm_topk));
    return route_call(ctx, topk_w, topk_idx, probs, how);
}

static ith_status group_routed(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                               ith_tensor scores, ith_tensor logits, ith_tensor bias,
                               int64_t n_group, int64_t topk_group, float scaling)
{
    weighing how = {scaling, topk_w.shape[1] > 1, true, false};
    ITH_TRY(routes.own.group_router_forward.run(ctx, topk_w, topk_idx, scores, logits, bias,
                                                n_group, topk_group, scaling));
    return route_call(ctx, topk_w, topk_idx, scores, how);
}

void hook_routes(const options *o, ith_ctx *ctx)
{
    if (o->kind == RUN_ALONE)
        return;
    routes.own = routes.hooked = *ctx->backend;
    routes.record = o->kind == RUN_LEADS;
    routes.hooked.router_forward.run = routed;
    routes.hooked.group_router_forward.run = group_routed;
    ctx->backend = &routes.hooked;
}

void record_scores(const options *o, const char *what, results *r)
{
    if (o->kind == RUN_FOLLOWS && routes.count)
        record(r, routes.worst, 0, "scores of experts, %s", what);
    routes.worst = 0;
}

void rewind_truth(void)
{
    routes.next = truth.next = 0;
}

void free_truth(void)
{
    for (int64_t i = 0; i < routes.count; i++) {
        ith_free(routes.calls[i].topk_idx);
        ith_free(routes.calls[i].scores);
    }
    for (int64_t i = 0; i < truth.count; i++)
        ith_free(truth.values[i]);
    ith_free(routes.calls);
    ith_free(truth.values);
    routes.calls = NULL;
    truth.values = NULL;
    routes.count = routes.cap = truth.count = truth.cap = 0;
    rewind_truth();
}
