/* far_check - operators of a GPU at a million rows of real widths: beyond 2^31 elements and 4 GiB.
 *
 *     far_check [device=cuda] [rows=1048576] [only=TEXT] [long=1]
 *
 * Every input repeats after PERIOD rows, and documents do, so rows of the last period must have the
 * results of the first, bit for bit (dq of attention, added up by atomics: within rounding). One
 * document as long as all rows cannot repeat, and is shown in other ways: the delta rule forgets
 * within a period when it decays fast; attention of a head among many is compared with that of the
 * head alone by another kernel (long=1: 40 s and 80 GiB). Exit 0 when all hold, 77 without a GPU.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kernels/backend.h"
#include "kernels/cuda_plugin.h"

enum { PERIOD = 4096, MAX_TENSORS = 32 };

typedef struct {
    ith_ctx ctx;
    const char *only;
    int64_t rows;
    bool longer;
    void *taken[MAX_TENSORS];
    int num_taken, bad;
    ith_tensor even, uneven, whole, period_of; /* borders; row t reads row t % PERIOD */
    int32_t *even_host, *uneven_host, whole_host[2];
} far;

static ith_error err;

static void check(ith_status status)
{
    if (status == ITH_OK)
        return;
    fprintf(stderr, "error: %s\n", err.text);
    exit(1);
}

/* ---- tensors ---- */

static ith_tensor take(far *f, ith_dtype dtype, int64_t rows, int64_t cols)
{
    ith_tensor t = ith_tensor_2d(NULL, dtype, rows, cols);
    ITH_ASSERT(f->num_taken < MAX_TENSORS);
    check(f->ctx.device->alloc(f->ctx.device, ith_tensor_bytes(t), &t.data, &err));
    f->taken[f->num_taken++] = t.data;
    check(f->ctx.device->fill(f->ctx.device, t.data, 0, ith_tensor_bytes(t), &err));
    return t;
}

static void give_back(far *f, int down_to)
{
    check(f->ctx.device->sync(f->ctx.device, &err));
    while (f->num_taken > down_to)
        f->ctx.device->free(f->ctx.device, f->taken[--f->num_taken]);
}

static void upload(far *f, ith_tensor t, const void *from)
{
    check(f->ctx.device->upload(f->ctx.device, t.data, from, ith_tensor_bytes(t), &err));
    check(f->ctx.device->sync(f->ctx.device, &err));
}

/* Values shift + scale * (-1..1). */
static ith_tensor random_rows(far *f, ith_dtype dtype, int64_t rows, int64_t cols, float shift,
                              float scale)
{
    static uint64_t seed;
    ith_tensor t = take(f, dtype, rows, cols);
    char *host = malloc((size_t)ith_tensor_bytes(t));
    ITH_ASSERT(host);
    seed++;
    for (int64_t i = 0; i < rows * cols; i++) {
        float x = shift + scale * (2 * (float)ith_rng_uniform(seed, 1, (uint64_t)i) - 1);
        if (dtype == ITH_F32)
            ((float *)host)[i] = x;
        else
            ((uint16_t *)host)[i] = ith_f32_to_bf16(x);
    }
    upload(f, t, host);
    free(host);
    return t;
}

/* [rows, cols] that repeats. */
static ith_tensor repeated(far *f, ith_dtype dtype, int64_t cols, float shift, float scale)
{
    ith_tensor all = take(f, dtype, f->rows, cols);
    ith_tensor one = random_rows(f, dtype, PERIOD, cols, shift, scale);
    int64_t bytes = ith_tensor_bytes(one);
    for (int64_t at = 0; at < f->rows; at += PERIOD)
        check(f->ctx.device->copy(f->ctx.device, (char *)all.data + at / PERIOD * bytes, one.data,
                                  bytes, &err));
    give_back(f, f->num_taken - 1);
    return all;
}

static ith_tensor vector(ith_tensor t)
{
    return ith_tensor_1d(t.data, t.dtype, ith_numel(t));
}

static ith_tensor weight(far *f, ith_dtype dtype, int64_t n, float shift, float scale)
{
    return vector(random_rows(f, dtype, 1, n, shift, scale));
}

static ith_seqs borders(far *f, const int32_t *host, ith_tensor device, int64_t docs)
{
    int64_t longest = 0;
    for (int64_t i = 0; i < docs; i++)
        longest = ith_max_i64(longest, host[i + 1] - host[i]);
    (void)f;
    return (ith_seqs){.cu_seqlens = device, .cu_host = host, .num_docs = docs, .max_len = longest};
}

static ith_seqs even_documents(far *f)
{
    return borders(f, f->even_host, f->even, f->rows / PERIOD);
}

static ith_seqs uneven_documents(far *f)
{
    return borders(f, f->uneven_host, f->uneven, 2 * f->rows / PERIOD);
}

static ith_seqs one_document(far *f)
{
    return borders(f, f->whole_host, f->whole, 1);
}

/* ---- results ---- */

static float *values_of(far *f, ith_tensor t, int64_t first, int64_t rows)
{
    ith_tensor part = ith_row_range(t, first, first + rows);
    int64_t cols = ith_numel(part) / rows, width = t.dtype == ITH_F32 ? 4 : 2;
    char *raw = malloc((size_t)(rows * cols * width));
    float *out = malloc((size_t)(rows * cols) * sizeof *out);
    ITH_ASSERT(raw && out);
    for (int64_t r = 0; r < rows; r++) /* rows may be strided; heads within one lie together */
        check(f->ctx.device->download(f->ctx.device, raw + r * cols * width,
                                      (char *)part.data + r * part.stride[0] * width, cols * width,
                                      &err));
    check(f->ctx.device->sync(f->ctx.device, &err));
    for (int64_t i = 0; i < rows * cols; i++)
        out[i] = t.dtype == ITH_F32 ? ((float *)raw)[i] : ith_bf16_to_f32(((uint16_t *)raw)[i]);
    free(raw);
    return out;
}

/* Largest difference beside the largest value; infinite where a value is not finite. */
static double difference(const float *a, const float *b, int64_t n)
{
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(a[i]) || !isfinite(b[i]))
            return (double)INFINITY;
        worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
        largest = fmax(largest, fabs((double)a[i]));
    }
    return largest > 0 ? worst / largest : (double)INFINITY; /* nothing but zeros shows nothing */
}

static void report(far *f, const char *name, const char *what, double d, double bound)
{
    bool good = d <= bound;
    f->bad += !good;
    printf("%s %-34s %-8s %.2g (bound %.2g)\n", good ? "ok " : "BAD", name, what, d, bound);
    fflush(stdout);
}

/* Rows of period a are those of period b. */
static void same_periods(far *f, const char *name, const char *what, ith_tensor t, int64_t a,
                         int64_t b, double bound)
{
    float *x = values_of(f, t, a * PERIOD, PERIOD), *y = values_of(f, t, b * PERIOD, PERIOD);
    report(f, name, what, difference(x, y, PERIOD * (ith_numel(t) / f->rows)), bound);
    free(x);
    free(y);
}

static void ends_agree(far *f, const char *name, const char *what, ith_tensor t, double bound)
{
    same_periods(f, name, what, t, 0, f->rows / PERIOD - 1, bound);
}

static void is_finite(far *f, const char *name, const char *what, ith_tensor t)
{
    float *x = values_of(f, t, 0, t.shape[0]);
    report(f, name, what, difference(x, x, ith_numel(t)), 0);
    free(x);
}

static bool wanted(const far *f, const char *name)
{
    return strstr(name, f->only) != NULL;
}

/* ---- operators ---- */

static void norms(far *f, ith_dtype dtype)
{
    enum { D = 1024 };
    ith_ctx *c = &f->ctx;
    ith_tensor x = repeated(f, dtype, D, 0, 1), res = repeated(f, dtype, D, 0, 1);
    ith_tensor dy = repeated(f, dtype, D, 0, 1), y = take(f, dtype, f->rows, D);
    ith_tensor sum = take(f, dtype, f->rows, D), rstd = vector(take(f, ITH_F32, f->rows, 1));
    ith_tensor w = weight(f, dtype, D, 1, 0.2F), dw = vector(take(f, ITH_F32, 1, D));
    check(ith_rmsnorm_forward(c, y, sum, rstd, x, res, w, 1e-6F, 0));
    ends_agree(f, "rmsnorm", "y", y, 0);
    ends_agree(f, "rmsnorm", "sum", sum, 0);
    check(ith_rmsnorm_backward(c, y, dw, dy, res, sum, rstd, w, 0));
    ends_agree(f, "rmsnorm", "dx", y, 0);
    is_finite(f, "rmsnorm", "dw", dw);
}

static void gates(far *f, ith_dtype dtype)
{
    enum { H = 8, D = 256 };
    ith_ctx *c = &f->ctx;
    ith_tensor x = ith_split_heads(repeated(f, dtype, H * D, 0, 1), H);
    ith_tensor qkv = repeated(f, dtype, 2 * H * D + 1024, 0, 1);
    ith_tensor gate = ith_split_heads(ith_col_range(qkv, H * D, 2 * H * D), H);
    ith_tensor dgates = take(f, dtype, f->rows, 2 * H * D + 1024);
    ith_tensor dgate = ith_split_heads(ith_col_range(dgates, H * D, 2 * H * D), H);
    ith_tensor y = ith_split_heads(take(f, dtype, f->rows, H * D), H);
    check(ith_sigmoid_gate_forward(c, y, x, gate));
    ends_agree(f, "sigmoid_gate", "y", y, 0);
    check(ith_sigmoid_gate_backward(c, y, dgate, x, x, gate));
    ends_agree(f, "sigmoid_gate", "dx", y, 0);
    ends_agree(f, "sigmoid_gate", "dgate", dgate, 0);
}

static void rope(far *f, ith_dtype dtype)
{
    enum { HQ = 8, HKV = 2, D = 256, ALL = 2 * HQ * D + 2 * HKV * D };
    ith_ctx *c = &f->ctx;
    ith_tensor qkv = repeated(f, dtype, ALL, 0, 1);
    ith_tensor q = ith_split_heads(ith_col_range(qkv, 0, HQ * D), HQ);
    ith_tensor k = ith_split_heads(ith_col_range(qkv, 2 * HQ * D, 2 * HQ * D + HKV * D), HKV);
    ith_tensor q_out = ith_split_heads(take(f, dtype, f->rows, HQ * D), HQ);
    ith_tensor k_out = ith_split_heads(take(f, dtype, f->rows, HKV * D), HKV);
    ith_tensor q_rstd = take(f, ITH_F32, f->rows, HQ), k_rstd = take(f, ITH_F32, f->rows, HKV);
    ith_tensor qw = weight(f, dtype, D, 0, 0.2F), kw = weight(f, dtype, D, 0, 0.2F);
    ith_tensor cos = random_rows(f, dtype, PERIOD, 32, 0, 1);
    ith_tensor sin = random_rows(f, dtype, PERIOD, 32, 0, 1);
    ith_tensor dqw = vector(take(f, ITH_F32, 1, D)), dkw = vector(take(f, ITH_F32, 1, D));
    ith_tensor at = vector(f->period_of);
    check(ith_qk_norm_rope_forward(c, q_out, k_out, q_rstd, k_rstd, q, k, qw, kw, cos, sin, at,
                                   1e-6F, 1));
    ends_agree(f, "qk_norm_rope", "q", q_out, 0);
    ends_agree(f, "qk_norm_rope", "k", k_out, 0);
    check(ith_qk_norm_rope_backward(c, q_out, k_out, dqw, dkw, q_out, k_out, q, k, q_rstd, k_rstd,
                                    qw, kw, cos, sin, at, 1));
    ends_agree(f, "qk_norm_rope", "dq", q_out, 0);
    ends_agree(f, "qk_norm_rope", "dk", k_out, 0);
    is_finite(f, "qk_norm_rope", "dq_w", dqw);
}

static void convolution(far *f, ith_dtype dtype)
{
    enum { C = 6144 };
    ith_ctx *c = &f->ctx;
    ith_tensor x = repeated(f, dtype, C, 0, 1), y = take(f, dtype, f->rows, C);
    ith_tensor dx = take(f, dtype, f->rows, C), w = random_rows(f, dtype, C, 4, 0, 1);
    ith_tensor dw = take(f, ITH_F32, C, 4), none = ith_tensor_none();
    check(ith_conv1d_silu_forward(c, y, x, w, none, even_documents(f)));
    ends_agree(f, "conv1d_silu", "y", y, 0);
    check(ith_conv1d_silu_backward(c, dx, dw, y, x, w, even_documents(f)));
    ends_agree(f, "conv1d_silu", "dx", dx, 0);
    is_finite(f, "conv1d_silu", "dw", dw);
    check(ith_conv1d_silu_forward(c, y, x, w, none, one_document(f)));
    same_periods(f, "conv1d_silu of one document", "y", y, 1, f->rows / PERIOD - 1, 0);
    check(ith_conv1d_silu_backward(c, dx, dw, y, x, w, one_document(f)));
    same_periods(f, "conv1d_silu of one document", "dx", dx, 1, f->rows / PERIOD - 2, 0);
}

static void gated_norms(far *f, ith_dtype dtype)
{
    enum { H = 16, D = 128 };
    ith_ctx *c = &f->ctx;
    ith_tensor x = ith_split_heads(repeated(f, dtype, H * D, 0, 1), H);
    ith_tensor z = ith_split_heads(repeated(f, dtype, H * D, 0, 1), H);
    ith_tensor y = ith_split_heads(take(f, dtype, f->rows, H * D), H);
    ith_tensor dz = ith_split_heads(take(f, dtype, f->rows, H * D), H);
    ith_tensor w = weight(f, ITH_F32, D, 1, 0.2F), dw = vector(take(f, ITH_F32, 1, D));
    check(ith_gated_rmsnorm_forward(c, y, x, z, w, 1e-6F));
    ends_agree(f, "gated_rmsnorm", "y", y, 0);
    check(ith_gated_rmsnorm_backward(c, y, dz, dw, y, x, z, w, 1e-6F));
    ends_agree(f, "gated_rmsnorm", "dx", y, 0);
    ends_agree(f, "gated_rmsnorm", "dz", dz, 0);
    is_finite(f, "gated_rmsnorm", "dw", dw);
    give_back(f, 4);
    ith_tensor a = repeated(f, dtype, H, 0, 1), b = repeated(f, dtype, H, 0, 1);
    ith_tensor g = take(f, ITH_F32, f->rows, H), beta = take(f, ITH_F32, f->rows, H);
    ith_tensor a_log = weight(f, ITH_F32, H, 0, 1), bias = weight(f, dtype, H, 0, 1);
    ith_tensor da_log = vector(take(f, ITH_F32, 1, H)), dbias = vector(take(f, ITH_F32, 1, H));
    check(ith_gdn_gates_forward(c, g, beta, a, b, a_log, bias));
    ends_agree(f, "gdn_gates", "g", g, 0);
    ends_agree(f, "gdn_gates", "beta", beta, 0);
    ith_tensor da = take(f, dtype, f->rows, H), db = take(f, dtype, f->rows, H);
    check(ith_gdn_gates_backward(c, da, db, da_log, dbias, g, beta, a, b, a_log, bias));
    ends_agree(f, "gdn_gates", "da", da, 0);
    is_finite(f, "gdn_gates", "da_log", da_log);
    is_finite(f, "gdn_gates", "ddt_bias", dbias);
}

static void delta(far *f, const char *name, ith_seqs seqs, float decay, int64_t a, int64_t b,
                  double bound)
{
    enum { H = 16, D = 128, ALL = 3 * H * D };
    ith_ctx *c = &f->ctx;
    ith_tensor qkv = repeated(f, ITH_BF16, ALL, 0, 1), d = take(f, ITH_BF16, f->rows, ALL);
    ith_tensor part[3], dpart[3], none = ith_tensor_none();
    for (int i = 0; i < 3; i++) {
        part[i] = ith_split_heads(ith_col_range(qkv, i * H * D, (i + 1) * H * D), H);
        dpart[i] = ith_split_heads(ith_col_range(d, i * H * D, (i + 1) * H * D), H);
    }
    ith_tensor o = ith_split_heads(take(f, ITH_BF16, f->rows, H * D), H);
    ith_tensor do_ = ith_split_heads(repeated(f, ITH_BF16, H * D, 0, 1), H);
    ith_tensor g = repeated(f, ITH_F32, H, -decay, 0.2F * decay);
    ith_tensor beta = repeated(f, ITH_F32, H, 0.5F, 0.4F);
    ith_tensor dg = take(f, ITH_F32, f->rows, H), dbeta = take(f, ITH_F32, f->rows, H);
    check(ith_gated_delta_rule_forward(c, o, part[0], part[1], part[2], g, beta, none, seqs,
                                       0.0883883F));
    same_periods(f, name, "o", o, a, b, bound);
    check(ith_gated_delta_rule_backward(c, dpart[0], dpart[1], dpart[2], dg, dbeta, none, do_,
                                        part[0], part[1], part[2], g, beta, none, seqs,
                                        0.0883883F));
    static const char *const names[] = {"dq", "dk", "dv"};
    for (int i = 0; i < 3; i++)
        same_periods(f, name, names[i], dpart[i], a, b, bound);
    same_periods(f, name, "dg", dg, a, b, bound);
    same_periods(f, name, "dbeta", dbeta, a, b, bound);
}

typedef struct {
    ith_tensor q, k, v, o, lse, do_, dq, dk, dv;
} attended;

static attended attention_tensors(far *f, int64_t hq, int64_t hkv, int64_t dim, int64_t unused)
{
    attended a;
    int64_t nq = hq * dim, nk = hkv * dim, all = nq + 2 * nk + unused;
    ith_tensor qkv = repeated(f, ITH_BF16, all, 0, 1), d = take(f, ITH_BF16, f->rows, all);
    a.q = ith_split_heads(ith_col_range(qkv, 0, nq), hq);
    a.k = ith_split_heads(ith_col_range(qkv, all - 2 * nk, all - nk), hkv);
    a.v = ith_split_heads(ith_col_range(qkv, all - nk, all), hkv);
    a.dq = ith_split_heads(ith_col_range(d, 0, nq), hq);
    a.dk = ith_split_heads(ith_col_range(d, all - 2 * nk, all - nk), hkv);
    a.dv = ith_split_heads(ith_col_range(d, all - nk, all), hkv);
    a.o = ith_split_heads(take(f, ITH_BF16, f->rows, nq), hq);
    a.do_ = ith_split_heads(repeated(f, ITH_BF16, nq, 0, 1), hq);
    a.lse = take(f, ITH_F32, f->rows, hq);
    return a;
}

static void attend(far *f, const attended *a, ith_seqs seqs)
{
    float scale = 1 / sqrtf((float)a->q.shape[2]);
    check(ith_attention_forward(&f->ctx, a->o, a->lse, a->q, a->k, a->v, seqs, scale, true));
    check(ith_attention_backward(&f->ctx, a->dq, a->dk, a->dv, a->do_, a->q, a->k, a->v, a->o,
                                 a->lse, seqs, scale, true));
}

static void attention(far *f, const char *name, ith_seqs seqs, int64_t hq, int64_t hkv, int64_t dim,
                      int64_t unused)
{
    attended a = attention_tensors(f, hq, hkv, dim, unused);
    attend(f, &a, seqs);
    ends_agree(f, name, "o", a.o, 0);
    ends_agree(f, name, "dq", a.dq, f->ctx.deterministic ? 0 : 8e-3);
    ends_agree(f, name, "dk", a.dk, f->ctx.deterministic ? 0 : 8e-3);
    ends_agree(f, name, "dv", a.dv, f->ctx.deterministic ? 0 : 8e-3);
}

static ith_tensor head(ith_tensor t, int64_t i)
{
    t.data = (char *)t.data + i * t.stride[1] * 2;
    t.shape[1] = 1;
    return t;
}

/* The last head of all, against itself alone; dk and dv are those of its kv head alone as every
 * head has its own. */
static void long_document(far *f, const char *name, int64_t heads, int64_t dim)
{
    attended a = attention_tensors(f, heads, heads, dim, 0), b = a;
    attend(f, &a, one_document(f));
    int64_t i = heads - 1;
    ith_tensor *of[] = {&b.q, &b.k, &b.v, &b.do_};
    for (int n = 0; n < 4; n++)
        *of[n] = head(*of[n], i);
    b.o = ith_split_heads(take(f, ITH_BF16, f->rows, dim), 1);
    b.lse = take(f, ITH_F32, f->rows, 1);
    ith_tensor d = take(f, ITH_BF16, f->rows, 3 * dim);
    b.dq = ith_split_heads(ith_col_range(d, 0, dim), 1);
    b.dk = ith_split_heads(ith_col_range(d, dim, 2 * dim), 1);
    b.dv = ith_split_heads(ith_col_range(d, 2 * dim, 3 * dim), 1);
    f->ctx.deterministic = !f->ctx.deterministic;
    attend(f, &b, one_document(f));
    f->ctx.deterministic = !f->ctx.deterministic;
    const ith_tensor all[] = {a.o, a.dq, a.dk, a.dv}, alone[] = {b.o, b.dq, b.dk, b.dv};
    static const char *const names[] = {"o", "dq", "dk", "dv"};
    for (int n = 0; n < 4; n++)
        for (int64_t at = 0; at < f->rows; at += f->rows / 4) {
            float *x = values_of(f, head(all[n], i), at + f->rows / 4 - 512, 512);
            float *y = values_of(f, alone[n], at + f->rows / 4 - 512, 512);
            report(f, name, names[n], difference(x, y, 512 * dim), 2e-2);
            free(x);
            free(y);
        }
}

static void copies(far *f)
{
    ith_device *d = f->ctx.device;
    ith_tensor x = repeated(f, ITH_BF16, 1024, 0, 1), y = take(f, ITH_BF16, f->rows, 1024);
    void *host = NULL;
    check(d->alloc_host(d, ith_tensor_bytes(x), &host, &err));
    check(d->fork(d, ITH_QUEUE_COPIES, &err));
    check(d->copy_beside(d, host, x.data, ith_tensor_bytes(x), true, &err));
    check(d->copy_beside(d, y.data, host, ith_tensor_bytes(x), false, &err));
    check(d->note(d, ITH_QUEUE_COPIES, 0, &err));
    check(d->await(d, ITH_QUEUE_COPIES, 0, &err));
    ends_agree(f, "copy to the host and back", "x", y, 0);
    check(d->sync(d, &err));
    d->free_host(d, host);
}

static void run(far *f)
{
    int keep = f->num_taken;
#define CASE(name, call)                                                                           \
    if (wanted(f, name)) {                                                                         \
        call;                                                                                      \
        give_back(f, keep);                                                                        \
    }
    CASE("copies", copies(f));
    CASE("rmsnorm", norms(f, ITH_BF16));
    CASE("sigmoid_gate", gates(f, ITH_BF16));
    CASE("qk_norm_rope", rope(f, ITH_BF16));
    CASE("conv1d_silu", convolution(f, ITH_BF16));
    CASE("gated_rmsnorm", gated_norms(f, ITH_BF16));
    const char *name = "delta rule, documents";
    CASE(name, delta(f, name, even_documents(f), 0.05F, 0, f->rows / PERIOD - 1, 0));
    name = "delta rule, one document";
    CASE(name, delta(f, name, one_document(f), 1, 1, f->rows / PERIOD - 2, 8e-3));
    for (int same = 0; same < 2; same++) {
        f->ctx.deterministic = same;
        name = same ? "attention 256, same bits" : "attention 256";
        CASE(name, attention(f, name, even_documents(f), 8, 2, 256, 2048));
        name = same ? "attention 256 uneven, same bits" : "attention 256 uneven";
        CASE(name, attention(f, name, uneven_documents(f), 8, 2, 256, 2048));
        name = same ? "attention 128, same bits" : "attention 128";
        CASE(name, attention(f, name, uneven_documents(f), 16, 8, 128, 0));
    }
    f->ctx.deterministic = false;
    name = "attention 256, one long document";
    if (f->longer)
        CASE(name, long_document(f, name, 8, 256));
#undef CASE
}

static void open_borders(far *f)
{
    int64_t periods = f->rows / PERIOD;
    int32_t *at = malloc((size_t)f->rows * sizeof *at);
    f->even_host = malloc((size_t)(periods + 1) * sizeof *at);
    f->uneven_host = malloc((size_t)(2 * periods + 1) * sizeof *at);
    ITH_ASSERT(at && f->even_host && f->uneven_host);
    for (int64_t i = 0; i < periods; i++) {
        f->even_host[i + 1] = (int32_t)((i + 1) * PERIOD);
        f->uneven_host[2 * i + 1] = (int32_t)(i * PERIOD + 3001);
        f->uneven_host[2 * i + 2] = (int32_t)((i + 1) * PERIOD);
    }
    f->even_host[0] = f->uneven_host[0] = 0;
    f->whole_host[1] = (int32_t)f->rows;
    for (int64_t t = 0; t < f->rows; t++)
        at[t] = (int32_t)(t % PERIOD);
    f->even = vector(take(f, ITH_I32, 1, periods + 1));
    f->uneven = vector(take(f, ITH_I32, 1, 2 * periods + 1));
    f->whole = vector(take(f, ITH_I32, 1, 2));
    f->period_of = vector(take(f, ITH_I32, 1, f->rows));
    upload(f, f->even, f->even_host);
    upload(f, f->uneven, f->uneven_host);
    upload(f, f->whole, f->whole_host);
    upload(f, f->period_of, at);
    free(at);
}

int main(int argc, char **argv)
{
    static far f = {.only = "", .rows = 1 << 20};
    f.ctx.err = &err;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "rows=", 5) == 0)
            f.rows = ith_round_up(strtoll(argv[i] + 5, NULL, 10), PERIOD);
        else if (strncmp(argv[i], "only=", 5) == 0)
            f.only = argv[i] + 5;
        else if (strcmp(argv[i], "long=1") == 0)
            f.longer = true;
    }
    if (ith_ctx_open_cuda(&f.ctx, 0, false) != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 77;
    }
    open_borders(&f);
    run(&f);
    printf("%d bad\n", f.bad);
    give_back(&f, 0);
    free(f.even_host);
    free(f.uneven_host);
    ith_ctx_close_cuda(&f.ctx);
    return f.bad > 0;
}
