/* rows.c - entries of the CPU table that are bound by memory: pieces, scratch and what the
 * reference keeps (F64, shapes past the stack buffers). The work is in rows_impl.h.
 *
 * Pieces have a fixed size in rows or elements, so that nothing depends on the number of threads.
 * Sums over rows: see ith_cpu_part_rows. */
#include "kernels/cpu/cpu_internal.h"

#include <math.h>
#include <string.h>

/* Rows of one piece: about 64 KiB. */
static int64_t grain_of(int64_t row_bytes)
{
    return ith_max_i64(1, 65536 / ith_max_i64(row_bytes, 1));
}

static int64_t row_bytes(ith_tensor t)
{
    int64_t bytes = ith_dtype_bytes(t.dtype);
    for (int d = 1; d < t.ndim; d++)
        bytes *= t.shape[d];
    return bytes;
}

/* ---- norms ---- */

static ith_status rmsnorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor sum, ith_tensor rstd,
                                  ith_tensor x, ith_tensor residual, ith_tensor w, float eps,
                                  float w_offset)
{
    if (!ith_cpu_is_fast(x))
        return ith_backend_ref()->rmsnorm_forward.run(ctx, y, sum, rstd, x, residual, w, eps,
                                                      w_offset);
    ith_cpu_rows a = {.t = {y, sum, rstd, x, residual, w}, .f = {eps, w_offset}};
    ith_pool_for(ctx->pool, x.shape[0], grain_of(row_bytes(x)),
                 ith_cpu_level_get()->rmsnorm_forward, &a);
    return ITH_OK;
}

static int64_t rmsnorm_backward_bytes(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                      ith_tensor dres, ith_tensor x, ith_tensor rstd, ith_tensor w,
                                      float w_offset)
{
    (void)ctx, (void)dx, (void)dy, (void)dres, (void)rstd, (void)w, (void)w_offset;
    return dw.ndim ? ith_cpu_part_count(x.shape[0]) * x.shape[1] * 4 : 0;
}

static ith_status rmsnorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                   ith_tensor dres, ith_tensor x, ith_tensor rstd, ith_tensor w,
                                   float w_offset)
{
    if (!ith_cpu_is_fast(x))
        return ith_backend_ref()->rmsnorm_backward.run(ctx, dx, dw, dy, dres, x, rstd, w, w_offset);
    ith_cpu_rows a = {.t = {dx, dy, dres, x, rstd, w},
                      .f = {w_offset},
                      .i = {ith_cpu_part_rows(x.shape[0])},
                      .flag = dw.ndim != 0,
                      .scratch = ctx->scratch};
    int64_t parts = ith_cpu_part_count(x.shape[0]);
    ith_pool_for(ctx->pool, parts, 1, ith_cpu_level_get()->rmsnorm_backward, &a);
    if (a.flag)
        ith_cpu_add_parts(dw, ctx->scratch, parts, x.shape[1]);
    return ITH_OK;
}

static bool rope_is_fast(ith_tensor q)
{
    return ith_cpu_is_fast(q) && q.shape[2] <= ITH_CPU_MAX_DIM;
}

static ith_status rope_forward(ith_ctx *ctx, ith_tensor q_out, ith_tensor k_out, ith_tensor q_rstd,
                               ith_tensor k_rstd, ith_tensor q, ith_tensor k, ith_tensor q_w,
                               ith_tensor k_w, ith_tensor cos, ith_tensor sin,
                               ith_tensor position_ids, float eps, float w_offset)
{
    if (!rope_is_fast(q))
        return ith_backend_ref()->qk_norm_rope_forward.run(ctx, q_out, k_out, q_rstd, k_rstd, q, k,
                                                           q_w, k_w, cos, sin, position_ids, eps,
                                                           w_offset);
    ith_cpu_rows a = {.t = {q_out, k_out, q_rstd, k_rstd, q, k, q_w, k_w, cos, sin},
                      .ids = position_ids,
                      .f = {eps, w_offset}};
    ith_pool_for(ctx->pool, q.shape[0], grain_of(row_bytes(q)), ith_cpu_level_get()->rope_forward,
                 &a);
    return ITH_OK;
}

static int64_t rope_backward_bytes(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dq_w,
                                   ith_tensor dk_w, ith_tensor dq_out, ith_tensor dk_out,
                                   ith_tensor q, ith_tensor k, ith_tensor q_rstd, ith_tensor k_rstd,
                                   ith_tensor q_w, ith_tensor k_w, ith_tensor cos, ith_tensor sin,
                                   ith_tensor position_ids, float w_offset)
{
    (void)ctx, (void)dq, (void)dk, (void)dk_w, (void)dq_out, (void)dk_out, (void)k, (void)q_rstd;
    (void)k_rstd, (void)q_w, (void)k_w, (void)cos, (void)sin, (void)position_ids, (void)w_offset;
    return dq_w.ndim ? ith_cpu_part_count(q.shape[0]) * 2 * q.shape[2] * 4 : 0;
}

static ith_status rope_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dq_w,
                                ith_tensor dk_w, ith_tensor dq_out, ith_tensor dk_out, ith_tensor q,
                                ith_tensor k, ith_tensor q_rstd, ith_tensor k_rstd, ith_tensor q_w,
                                ith_tensor k_w, ith_tensor cos, ith_tensor sin,
                                ith_tensor position_ids, float w_offset)
{
    if (!rope_is_fast(q))
        return ith_backend_ref()->qk_norm_rope_backward.run(ctx, dq, dk, dq_w, dk_w, dq_out, dk_out,
                                                            q, k, q_rstd, k_rstd, q_w, k_w, cos,
                                                            sin, position_ids, w_offset);
    ith_cpu_rows a = {.t = {dq, dk, dq_out, dk_out, q, k, q_w, k_w, cos, sin},
                      .more = {q_rstd, k_rstd},
                      .ids = position_ids,
                      .f = {w_offset},
                      .i = {ith_cpu_part_rows(q.shape[0])},
                      .flag = dq_w.ndim != 0,
                      .scratch = ctx->scratch};
    int64_t parts = ith_cpu_part_count(q.shape[0]), dim = q.shape[2];
    ith_pool_for(ctx->pool, parts, 1, ith_cpu_level_get()->rope_backward, &a);
    if (a.flag) {
        ith_cpu_add_parts(dq_w, ctx->scratch, parts, 2 * dim);
        ith_cpu_add_parts(dk_w, (const float *)ctx->scratch + dim, parts, 2 * dim);
    }
    return ITH_OK;
}

/* ---- SwiGLU, add, cast, zero ---- */

static ith_status swiglu_forward(ith_ctx *ctx, ith_tensor h, ith_tensor gate_up)
{
    if (!ith_cpu_is_fast(h))
        return ith_backend_ref()->swiglu_forward.run(ctx, h, gate_up);
    ith_cpu_rows a = {.t = {h, gate_up}};
    ith_pool_for(ctx->pool, h.shape[0], grain_of(row_bytes(h)), ith_cpu_level_get()->swiglu_forward,
                 &a);
    return ITH_OK;
}

static ith_status swiglu_backward(ith_ctx *ctx, ith_tensor dgate_up, ith_tensor h, ith_tensor dh,
                                  ith_tensor gate_up)
{
    if (!ith_cpu_is_fast(dh))
        return ith_backend_ref()->swiglu_backward.run(ctx, dgate_up, h, dh, gate_up);
    ith_cpu_rows a = {.t = {dgate_up, h, dh, gate_up}};
    ith_pool_for(ctx->pool, dh.shape[0], grain_of(row_bytes(dh)),
                 ith_cpu_level_get()->swiglu_backward, &a);
    return ITH_OK;
}

#define FLAT_ROW 8192

/* The same memory as rows of FLAT_ROW elements; the last one is shorter, and not counted. */
static ith_tensor flat_rows(ith_tensor t)
{
    return ith_tensor_2d(t.data, t.dtype, ith_numel(t) / FLAT_ROW, FLAT_ROW);
}

static ith_tensor flat_rest(ith_tensor t)
{
    int64_t n = ith_numel(t), first = n / FLAT_ROW * FLAT_ROW;
    return ith_tensor_2d((char *)t.data + first * ith_dtype_bytes(t.dtype), t.dtype, 1, n - first);
}

/* task over the elements of `count` tensors of one shape: stretches of memory, or rows. False: it
 * is neither. */
static bool each_element(ith_ctx *ctx, ith_task task, const ith_tensor *t, int count)
{
    bool flat = true, fast = true;
    for (int k = 0; k < count; k++) {
        flat = flat && ith_is_contiguous(t[k]);
        fast = fast && ith_cpu_is_fast(t[k]);
    }
    if (!fast || (!flat && t[0].ndim != 2))
        return false;
    ith_cpu_rows rows = {.i = {flat ? FLAT_ROW : t[0].shape[1]}}, rest = {0};
    for (int k = 0; k < count; k++) {
        rows.t[k] = flat ? flat_rows(t[k]) : t[k];
        rest.t[k] = flat_rest(t[k]);
    }
    ith_pool_for(ctx->pool, rows.t[0].shape[0], flat ? 4 : grain_of(row_bytes(t[0])), task, &rows);
    rest.i[0] = rest.t[0].shape[1];
    if (flat && rest.i[0])
        task(&rest, 0, 1, 0);
    return true;
}

static ith_status add(ith_ctx *ctx, ith_tensor y, ith_tensor a, ith_tensor b)
{
    const ith_tensor t[] = {y, a, b};
    return each_element(ctx, ith_cpu_level_get()->add, t, 3)
               ? ITH_OK
               : ith_backend_ref()->add.run(ctx, y, a, b);
}

static ith_status cast(ith_ctx *ctx, ith_tensor y, ith_tensor x)
{
    const ith_tensor t[] = {y, x};
    return each_element(ctx, ith_cpu_level_get()->cast, t, 2)
               ? ITH_OK
               : ith_backend_ref()->cast.run(ctx, y, x);
}

static void zero_task(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    memset((char *)arg + begin, 0, (size_t)(end - begin));
}

static ith_status zero(ith_ctx *ctx, ith_tensor y)
{
    if (!ith_is_contiguous(y))
        return ith_backend_ref()->zero.run(ctx, y);
    ith_pool_for(ctx->pool, ith_tensor_bytes(y), 1 << 18, zero_task, y.data);
    return ITH_OK;
}

/* ---- rows by index ---- */

typedef struct {
    ith_tensor y, x, idx;
    bool scatter;
} move_job;

static void move_task(void *arg, int64_t begin, int64_t end, int thread)
{
    const move_job *job = arg;
    (void)thread;
    const int32_t *idx = job->idx.data;
    int64_t size = ith_dtype_bytes(job->y.dtype);
    for (int64_t i = begin; i < end; i++) {
        int64_t there = idx[i * job->idx.stride[0]];
        int64_t to = job->scatter ? there : i, from = job->scatter ? i : there;
        ITH_ASSERT(to >= 0 && to < job->y.shape[0] && from >= 0 && from < job->x.shape[0]);
        memcpy((char *)job->y.data + to * job->y.stride[0] * size,
               (const char *)job->x.data + from * job->x.stride[0] * size,
               (size_t)(job->y.shape[1] * size));
    }
}

static ith_status move_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx, bool scatter)
{
    move_job job = {y, x, idx, scatter};
    ith_pool_for(ctx->pool, idx.shape[0], grain_of(row_bytes(y)), move_task, &job);
    return ITH_OK;
}

static ith_status gather_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    return move_rows(ctx, y, x, idx, false);
}

static ith_status scatter_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    return move_rows(ctx, y, x, idx, true);
}

static ith_status embedding_forward(ith_ctx *ctx, ith_tensor y, ith_tensor ids, ith_tensor w)
{
    return move_rows(ctx, y, w, ids, false);
}

/* A task owns columns: the rows of one id are added in order of t without locks. */
static ith_status embedding_backward(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor ids)
{
    if (!ith_cpu_is_fast(dy))
        return ith_backend_ref()->embedding_backward.run(ctx, dw, dy, ids);
    ith_cpu_rows a = {.t = {dw, dy, ids}};
    ith_pool_for(ctx->pool, dy.shape[1], 128, ith_cpu_level_get()->embedding_backward, &a);
    return ITH_OK;
}

/* ---- loss and sums ---- */

static ith_status cross_entropy(ith_ctx *ctx, ith_tensor row_loss, ith_tensor logits,
                                ith_tensor labels, ith_tensor seeds, bool gradient)
{
    if (!ith_cpu_is_fast(logits))
        return ith_backend_ref()->cross_entropy.run(ctx, row_loss, logits, labels, seeds, gradient);
    ith_cpu_rows a = {.t = {row_loss, logits, labels, seeds}, .flag = gradient};
    ith_pool_for(ctx->pool, logits.shape[0], grain_of(row_bytes(logits)),
                 ith_cpu_level_get()->cross_entropy, &a);
    return ITH_OK;
}

static ith_status cross_entropy_confident(ith_ctx *ctx, ith_tensor row_loss,
                                          ith_tensor row_confidence, ith_tensor right,
                                          ith_tensor logits, ith_tensor labels, ith_tensor seeds,
                                          float confidence, bool gradient)
{
    if (!ith_cpu_is_fast(logits))
        return ith_backend_ref()->cross_entropy_confident.run(
            ctx, row_loss, row_confidence, right, logits, labels, seeds, confidence, gradient);
    ith_cpu_rows a = {.t = {row_loss, logits, labels, seeds, row_confidence, right},
                      .f = {confidence},
                      .flag = gradient};
    ith_pool_for(ctx->pool, logits.shape[0], grain_of(row_bytes(logits)),
                 ith_cpu_level_get()->cross_entropy_confident, &a);
    return ITH_OK;
}

static ith_status choose_ids(ith_ctx *ctx, ith_tensor ids, ith_tensor probability,
                             ith_tensor logits, ith_tensor draws, float scale, int64_t barred)
{
    if (!ith_cpu_is_fast(logits))
        return ith_backend_ref()->choose_ids.run(ctx, ids, probability, logits, draws, scale,
                                                 barred);
    ith_cpu_rows a = {.t = {ids, probability, logits, draws}, .f = {scale}, .i = {barred}};
    ith_pool_for(ctx->pool, logits.shape[0], 1, ith_cpu_level_get()->choose_ids, &a);
    return ITH_OK;
}

#define SUM_PART 65536

static void sum_products(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b)
{
    ith_cpu_rows rows = {.t = {a, b}, .i = {SUM_PART}, .scratch = ctx->scratch};
    int64_t parts = ith_div_ceil(ith_numel(a), SUM_PART);
    ith_pool_for(ctx->pool, parts, 1, ith_cpu_level_get()->dot, &rows);
    const double *part = ctx->scratch;
    double sum = 0;
    for (int64_t p = 0; p < parts; p++)
        sum += part[p];
    *(double *)out.data += sum;
}

static bool is_f32_line(ith_tensor t)
{
    return t.ndim == 0 || (t.dtype == ITH_F32 && ith_is_contiguous(t));
}

static int64_t dot_bytes(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b)
{
    (void)ctx, (void)out, (void)b;
    return ith_div_ceil(ith_numel(a), SUM_PART) * 8;
}

static ith_status dot(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b)
{
    if (!is_f32_line(a) || !is_f32_line(b))
        return ith_backend_ref()->dot_accumulate.run(ctx, out, a, b);
    sum_products(ctx, out, a, b);
    return ITH_OK;
}

static int64_t sumsq_bytes(ith_ctx *ctx, ith_tensor out, ith_tensor x)
{
    return dot_bytes(ctx, out, x, x);
}

static ith_status sumsq(ith_ctx *ctx, ith_tensor out, ith_tensor x)
{
    if (!is_f32_line(x))
        return ith_backend_ref()->sumsq_accumulate.run(ctx, out, x);
    sum_products(ctx, out, x, x);
    return ITH_OK;
}

/* ---- experts ---- */

static ith_status router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                                 ith_tensor probs, ith_tensor logits, bool norm_topk)
{
    if (!ith_cpu_is_fast(logits) || logits.shape[1] > ITH_CPU_MAX_EXPERTS)
        return ith_backend_ref()->router_forward.run(ctx, topk_w, topk_idx, probs, logits,
                                                     norm_topk);
    ith_cpu_rows a = {.t = {topk_w, topk_idx, probs, logits}, .flag = norm_topk};
    ith_pool_for(ctx->pool, logits.shape[0], 16, ith_cpu_level_get()->router_forward, &a);
    return ITH_OK;
}

typedef struct {
    ith_ctx ctx;
    ith_tensor t[6];
    float scale;
    bool norm;
} router_job;

/* The reference on a stretch of tokens: cheap next to the experts, but quadratic in E. */
static void router_backward_task(void *arg, int64_t begin, int64_t end, int thread)
{
    router_job *job = arg;
    (void)thread;
    ith_tensor t[5];
    for (int i = 0; i < 5; i++)
        t[i] = ith_row_range(job->t[i], begin, end);
    (void)ith_backend_ref()->router_backward.run(&job->ctx, t[0], t[1], t[2], t[3], t[4], job->t[5],
                                                 job->scale, job->norm);
}

static ith_status router_backward(ith_ctx *ctx, ith_tensor dlogits, ith_tensor dtopk_w,
                                  ith_tensor topk_w, ith_tensor topk_idx, ith_tensor probs,
                                  ith_tensor expert_fraction, float aux_scale, bool norm_topk)
{
    router_job job = {
        *ctx, {dlogits, dtopk_w, topk_w, topk_idx, probs, expert_fraction}, aux_scale, norm_topk};
    ith_pool_for(ctx->pool, probs.shape[0], 16, router_backward_task, &job);
    return ITH_OK;
}

typedef struct {
    ith_tensor topk_w, topk_idx, scores, logits, bias;
    int64_t n_group, topk_group;
    float scaling;
} group_router_job;

static float *floats_at(ith_tensor t, int64_t row)
{
    return (float *)t.data + row * t.stride[0];
}

/* Index of the largest value, the first of equals. */
static int64_t largest(const float *x, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return best;
}

/* Experts of the groups that do not stay lose their biased score c. The analyzer does not know that
 * groups times size is all of it. */
static void drop_groups(float *c, int64_t groups, int64_t size, int64_t stay)
{
    float score[ITH_CPU_MAX_EXPERTS];
    bool stays[ITH_CPU_MAX_EXPERTS] = {false};
    for (int64_t g = 0; g < groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t i = 0; i < size; i++) {
            float x = c[g * size + i]; /* NOLINT(clang-analyzer-core.uninitialized.Assign) */
            second = x > best ? best : fmaxf(second, x);
            best = fmaxf(best, x);
        }
        score[g] = size > 1 ? best + second : best;
    }
    for (int64_t i = 0; i < stay; i++) {
        int64_t g = largest(score, groups);
        stays[g] = true;
        score[g] = -INFINITY;
    }
    for (int64_t e = 0; e < groups * size; e++)
        if (!stays[e / size])
            c[e] = -INFINITY;
}

static void group_router_task(void *arg, int64_t begin, int64_t end, int thread)
{
    const group_router_job *job = arg;
    (void)thread;
    int64_t experts = job->logits.shape[1], k = job->topk_w.shape[1];
    for (int64_t t = begin; t < end; t++) {
        float c[ITH_CPU_MAX_EXPERTS], sum = 1e-20f;
        const float *z = floats_at(job->logits, t);
        float *s = floats_at(job->scores, t), *w = floats_at(job->topk_w, t);
        int32_t *idx = (int32_t *)job->topk_idx.data + t * job->topk_idx.stride[0];
        for (int64_t e = 0; e < experts; e++) {
            float x = expf(-fabsf(z[e]));
            s[e] = z[e] >= 0 ? 1.0f / (1.0f + x) : x / (1.0f + x);
            c[e] = s[e] + (job->bias.ndim ? ((const float *)job->bias.data)[e] : 0.0f);
        }
        drop_groups(c, job->n_group, experts / job->n_group, job->topk_group);
        for (int64_t i = 0; i < k; i++) {
            int64_t e = largest(c, experts);
            c[e] = -INFINITY;
            idx[i] = (int32_t)e;
            sum += s[e];
        }
        for (int64_t i = 0; i < k; i++)
            w[i] = (k > 1 ? s[idx[i]] / sum : s[idx[i]]) * job->scaling;
    }
}

static ith_status group_router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                                       ith_tensor scores, ith_tensor logits, ith_tensor bias,
                                       int64_t n_group, int64_t topk_group, float scaling)
{
    if (logits.dtype != ITH_F32 || logits.shape[1] > ITH_CPU_MAX_EXPERTS)
        return ith_backend_ref()->group_router_forward.run(ctx, topk_w, topk_idx, scores, logits,
                                                           bias, n_group, topk_group, scaling);
    group_router_job job = {topk_w, topk_idx, scores, logits, bias, n_group, topk_group, scaling};
    ith_pool_for(ctx->pool, logits.shape[0], 16, group_router_task, &job);
    return ITH_OK;
}

static ith_status combine(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                          ith_tensor topk_w, ith_tensor row_of)
{
    if (!ith_cpu_is_fast(y))
        return ith_backend_ref()->expert_combine.run(ctx, y, base, x, topk_w, row_of);
    ith_cpu_rows a = {.t = {y, base, x, topk_w, row_of}};
    ith_pool_for(ctx->pool, y.shape[0], grain_of(row_bytes(y) * row_of.shape[1]),
                 ith_cpu_level_get()->combine, &a);
    return ITH_OK;
}

static ith_status combine_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dtopk_w, ith_tensor dy,
                                   ith_tensor x, ith_tensor topk_w, ith_tensor row_of)
{
    if (!ith_cpu_is_fast(dy))
        return ith_backend_ref()->expert_combine_backward.run(ctx, dx, dtopk_w, dy, x, topk_w,
                                                              row_of);
    ith_cpu_rows a = {.t = {dx, dtopk_w, dy, x, topk_w, row_of}};
    ith_pool_for(ctx->pool, dy.shape[0], grain_of(row_bytes(dy) * row_of.shape[1]),
                 ith_cpu_level_get()->combine_backward, &a);
    return ITH_OK;
}

/* ---- optimizer ---- */

static ith_cpu_adamw factors_of(ith_adamw_hyper hyper)
{
    double b1 = (double)hyper.beta1, b2 = (double)hyper.beta2, lr = (double)hyper.lr;
    double step = (double)hyper.step;
    ith_cpu_adamw f = {
        .beta1 = hyper.beta1,
        .rest1 = (float)(1 - b1),
        .beta2 = hyper.beta2,
        .rest2 = (float)(1 - b2),
        .decay = (float)(1 - lr * (double)hyper.weight_decay),
        .step_size = (float)(lr / (1 - pow(b1, step))),
        .v_factor = (float)(1 / sqrt(1 - pow(b2, step))),
        .eps = hyper.eps,
    };
    return f;
}

static ith_status adamw(ith_ctx *ctx, ith_tensor w, ith_tensor master, ith_tensor m, ith_tensor v,
                        ith_tensor grad, ith_tensor scale, ith_adamw_hyper hyper, uint64_t seed,
                        int64_t first, bool zero_grad)
{
    float factor = *(const float *)scale.data;
    bool f32_master = master.ndim == 0 || master.dtype == ITH_F32;
    if (!ith_cpu_is_fast(w) || !ith_cpu_is_fast(m) || m.dtype != v.dtype || !f32_master)
        return ith_backend_ref()->adamw.run(ctx, w, master, m, v, grad, scale, hyper, seed, first,
                                            zero_grad);
    if (factor < 0.0f)
        return zero_grad ? zero(ctx, grad) : ITH_OK;
    bool stochastic = master.ndim == 0 && w.dtype == ITH_BF16;
    ith_cpu_rows a = {.t = {w, master, m, v, grad},
                      .f = {factor},
                      .i = {first, stochastic, hyper.step},
                      .flag = zero_grad,
                      .adamw = factors_of(hyper),
                      .seed = seed};
    ith_pool_for(ctx->pool, ith_numel(w), 16384, ith_cpu_level_get()->adamw, &a);
    return ITH_OK;
}

void ith_cpu_fill_rows(ith_backend *b)
{
    b->embedding_forward.run = embedding_forward;
    b->embedding_backward.run = embedding_backward;
    b->rmsnorm_forward.run = rmsnorm_forward;
    b->rmsnorm_backward.run = rmsnorm_backward;
    b->rmsnorm_backward.workspace = rmsnorm_backward_bytes;
    b->qk_norm_rope_forward.run = rope_forward;
    b->qk_norm_rope_backward.run = rope_backward;
    b->qk_norm_rope_backward.workspace = rope_backward_bytes;
    b->swiglu_forward.run = swiglu_forward;
    b->swiglu_backward.run = swiglu_backward;
    b->gather_rows.run = gather_rows;
    b->scatter_rows.run = scatter_rows;
    b->add.run = add;
    b->cast.run = cast;
    b->zero.run = zero;
    b->cross_entropy.run = cross_entropy;
    b->cross_entropy_confident.run = cross_entropy_confident;
    b->choose_ids.run = choose_ids;
    b->dot_accumulate.run = dot;
    b->dot_accumulate.workspace = dot_bytes;
    b->sumsq_accumulate.run = sumsq;
    b->sumsq_accumulate.workspace = sumsq_bytes;
    b->router_forward.run = router_forward;
    b->router_backward.run = router_backward;
    b->group_router_forward.run = group_router_forward;
    b->expert_combine.run = combine;
    b->expert_combine_backward.run = combine_backward;
    b->adamw.run = adamw;
}
