/* bench_cuda.c - every CUDA operator at the shapes of a model, as a share of its floor.
 *
 *     bench_cuda [T=16384] [DOC=4096] [only=TEXT] [keys=16] [values=32] [deterministic=1]
 *
 * keys, values: heads of Gated DeltaNet.
 *
 * The floor is the larger of bytes over 4.3 TB/s and FLOP over 670 TFLOP/s (attention: its own
 * measured rates). Bytes and FLOP come from the header formulas. Times: host clock around many
 * calls and one wait, after warm-up; sustained, so the power cap is in them. Memory is planned as
 * in a run: the walk counts first, then runs. */
#include "kernels/backend.h"
#include "kernels/blanks.h"
#include "kernels/cuda_plugin.h"

#include "base/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BANDWIDTH 4.3e12
#define MATRIX_RATE 670e12

typedef struct {
    const char *name;
    int64_t hidden, inner, heads_q, heads_kv, head_dim, vocab;
} model;

static const model models[] = {
    {"Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936},
    {"Qwen3-4B", 2560, 9728, 32, 8, 128, 151936},
};

typedef struct {
    ith_ctx *ctx;
    const model *m;
    const char *only;
    int64_t tokens, doc;
    int64_t key_heads, value_heads; /* of Gated DeltaNet */
    const void *noise;              /* host, NOISE_BYTES of bf16 */
    double measured_ms, floor_ms;
} bench;

enum { NOISE_BYTES = 32 << 20 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- tensors ---- */

static ith_status fill_noise(bench *b, ith_tensor t)
{
    int64_t bytes = ith_tensor_bytes(t);
    for (int64_t at = 0; at < bytes; at += NOISE_BYTES)
        ITH_TRY(b->ctx->device->upload(b->ctx->device, (char *)t.data + at, b->noise,
                                       ith_min_i64(NOISE_BYTES, bytes - at), b->ctx->err));
    return ITH_OK;
}

static ith_status make(bench *b, ith_dtype dtype, int64_t rows, int64_t cols, ith_tensor *out)
{
    ITH_TRY(ith_ctx_push(b->ctx, ITH_MEM_ACTIVATIONS, "bench", dtype, 2, rows, cols, 1, 1, out));
    if (ith_ctx_counting(b->ctx))
        return ITH_OK;
    if (dtype == ITH_BF16)
        return fill_noise(b, *out);
    return b->ctx->device->fill(b->ctx->device, out->data, 0, ith_tensor_bytes(*out), b->ctx->err);
}

static ith_status make_ints(bench *b, const int32_t *values, int64_t n, ith_tensor *out)
{
    ITH_TRY(ith_ctx_push(b->ctx, ITH_MEM_ACTIVATIONS, "ints", ITH_I32, 1, n, 1, 1, 1, out));
    if (ith_ctx_counting(b->ctx))
        return ITH_OK;
    ITH_TRY(b->ctx->device->upload(b->ctx->device, out->data, values, n * 4, b->ctx->err));
    return b->ctx->device->sync(b->ctx->device, b->ctx->err);
}

static ith_tensor row(ith_tensor t)
{
    return ith_tensor_1d(t.data, t.dtype, ith_numel(t));
}

/* ---- timing ---- */

typedef struct {
    ith_tensor t[12];
    ith_seqs seqs;
} args;
typedef ith_status (*call)(bench *b, const args *a);

/* times: how often a step does this per layer; 0: not counted in the sum. */
static ith_status timed(bench *b, const char *name, call f, const args *a, double bytes,
                        double flop, double rate)
{
    if (!strstr(name, b->only))
        return ITH_OK;
    if (ith_ctx_counting(b->ctx))
        return f(b, a);
    ith_device *d = b->ctx->device;
    double floor_s = fmax(bytes / BANDWIDTH, flop / rate);
    int64_t calls = (int64_t)fmin(300, fmax(5, 0.06 / fmax(floor_s, 5e-6)));
    for (int64_t i = 0; i < 3 + calls / 4; i++)
        ITH_TRY(f(b, a));
    ITH_TRY(d->sync(d, b->ctx->err));
    double start = now();
    for (int64_t i = 0; i < calls; i++)
        ITH_TRY(f(b, a));
    ITH_TRY(d->sync(d, b->ctx->err));
    double s = (now() - start) / (double)calls;
    printf("%-10s %-22s %8.1f us  floor %8.1f us  %3.0f%%", b->m->name, name, 1e6 * s,
           1e6 * floor_s, 100 * floor_s / s);
    if (flop > 0)
        printf("  %.0f TF\n", flop / s * 1e-12);
    else
        printf("  %.2f TB/s\n", bytes / s * 1e-12);
    fflush(stdout);
    b->measured_ms += 1e3 * s;
    b->floor_ms += 1e3 * floor_s;
    return ITH_OK;
}

/* ---- operators ---- */

static ith_status norm_fwd(bench *b, const args *a)
{
    return ith_rmsnorm_forward(b->ctx, a->t[0], a->t[1], a->t[2], a->t[1], a->t[3], a->t[4], 1e-6f,
                               0);
}

static ith_status norm_bwd(bench *b, const args *a)
{
    return ith_rmsnorm_backward(b->ctx, a->t[0], a->t[5], a->t[1], a->t[0], a->t[3], a->t[2],
                                a->t[4], 0);
}

static ith_status lin_fwd(bench *b, const args *a)
{
    return ith_linear_forward(b->ctx, a->t[0], a->t[1], a->t[2], false);
}

static ith_status lin_dx(bench *b, const args *a)
{
    return ith_linear_backward_input(b->ctx, a->t[1], a->t[0], a->t[2], false);
}

static ith_status lin_dw(bench *b, const args *a)
{
    return ith_linear_backward_weight(b->ctx, a->t[3], a->t[0], a->t[1]);
}

static ith_status rope_fwd(bench *b, const args *a)
{
    return ith_qk_norm_rope_forward(b->ctx, a->t[0], a->t[1], a->t[2], a->t[3], a->t[0], a->t[1],
                                    a->t[4], a->t[5], a->t[6], a->t[7], a->t[8], 1e-6f, 0);
}

static ith_status rope_bwd(bench *b, const args *a)
{
    return ith_qk_norm_rope_backward(b->ctx, a->t[0], a->t[1], a->t[9], a->t[10], a->t[0], a->t[1],
                                     a->t[0], a->t[1], a->t[2], a->t[3], a->t[4], a->t[5], a->t[6],
                                     a->t[7], a->t[8], 0);
}

static ith_status attn_fwd(bench *b, const args *a)
{
    return ith_attention_forward(b->ctx, a->t[3], a->t[4], a->t[0], a->t[1], a->t[2], a->seqs,
                                 0.088f, true);
}

static ith_status attn_bwd(bench *b, const args *a)
{
    return ith_attention_backward(b->ctx, a->t[6], a->t[7], a->t[8], a->t[5], a->t[0], a->t[1],
                                  a->t[2], a->t[3], a->t[4], a->seqs, 0.088f, true);
}

static ith_status glu_fwd(bench *b, const args *a)
{
    return ith_swiglu_forward(b->ctx, a->t[0], a->t[1]);
}

static ith_status glu_bwd(bench *b, const args *a)
{
    return ith_swiglu_backward(b->ctx, a->t[2], a->t[0], a->t[3], a->t[1]);
}

static ith_status loss(bench *b, const args *a)
{
    return ith_cross_entropy(b->ctx, a->t[1], a->t[0], a->t[2], a->t[3], true);
}

static ith_status embed_fwd(bench *b, const args *a)
{
    return ith_embedding_forward(b->ctx, a->t[0], a->t[1], a->t[2]);
}

static ith_status embed_bwd(bench *b, const args *a)
{
    return ith_embedding_backward(b->ctx, a->t[3], a->t[0], a->t[1]);
}

static ith_status add_op(bench *b, const args *a)
{
    return ith_add(b->ctx, a->t[0], a->t[0], a->t[1]);
}

static ith_status adam(bench *b, const args *a)
{
    ith_adamw_hyper h = {1e-5f, 0.9f, 0.95f, 1e-8f, 0.1f, 10};
    return ith_adamw(b->ctx, a->t[0], a->t[1], a->t[2], a->t[3], a->t[4], a->t[5], h, 1, 0, false);
}

static ith_status adam_beside(bench *b, const args *a)
{
    ith_ctx *ctx = b->ctx;
    ith_device *d = ctx->device;
    if (ith_ctx_counting(ctx))
        return adam(b, a);
    ITH_TRY(d->fork(d, ITH_QUEUE_UPDATES, ctx->err));
    ith_ctx_enter(ctx, ITH_QUEUE_UPDATES, true);
    ith_status status = adam(b, a);
    ith_ctx_leave(ctx);
    ITH_TRY(status);
    ITH_TRY(d->note(d, ITH_QUEUE_UPDATES, 0, ctx->err));
    return d->await(d, ITH_QUEUE_UPDATES, 0, ctx->err);
}

static ith_status sumsq(bench *b, const args *a)
{
    return ith_sumsq_accumulate(b->ctx, a->t[6], a->t[4]);
}

/* ---- the walk ---- */

static ith_status walk_linear(bench *b, const char *name, int64_t rows, int64_t n, int64_t k)
{
    args a = {0};
    char text[64];
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ITH_TRY(make(b, ITH_BF16, rows, n, &a.t[0]));
    ITH_TRY(make(b, ITH_BF16, rows, k, &a.t[1]));
    ITH_TRY(make(b, ITH_BF16, n, k, &a.t[2]));
    ITH_TRY(make(b, ITH_F32, n, k, &a.t[3]));
    double flop = 2.0 * (double)rows * (double)n * (double)k;
    static const call calls[] = {lin_fwd, lin_dx, lin_dw};
    static const char *const parts[] = {"forward", "dx", "dw"};
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "%s %s", name, parts[i]);
        ITH_TRY(timed(b, text, calls[i], &a, 0, flop, MATRIX_RATE));
    }
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status walk_norm(bench *b)
{
    const model *m = b->m;
    args a = {0};
    double row_bytes = (double)(b->tokens * m->hidden * 2);
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    for (int i = 0; i < 4; i++)
        ITH_TRY(make(b, i == 2 ? ITH_F32 : ITH_BF16, b->tokens, i == 2 ? 1 : m->hidden, &a.t[i]));
    ITH_TRY(make(b, ITH_BF16, 1, m->hidden, &a.t[4]));
    ITH_TRY(make(b, ITH_F32, 1, m->hidden, &a.t[5]));
    a.t[2] = row(a.t[2]);
    a.t[4] = row(a.t[4]);
    a.t[5] = row(a.t[5]);
    ITH_TRY(timed(b, "add+rmsnorm forward", norm_fwd, &a, 4 * row_bytes, 0, 1));
    ITH_TRY(timed(b, "rmsnorm backward+add", norm_bwd, &a, 4 * row_bytes, 0, 1));
    ITH_TRY(timed(b, "add", add_op, &a, 3 * row_bytes, 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status walk_swiglu(bench *b)
{
    args a = {0};
    double bytes = (double)(b->tokens * b->m->inner * 2);
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ITH_TRY(make(b, ITH_BF16, b->tokens, b->m->inner, &a.t[0]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, 2 * b->m->inner, &a.t[1]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, 2 * b->m->inner, &a.t[2]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, b->m->inner, &a.t[3]));
    ITH_TRY(timed(b, "swiglu forward", glu_fwd, &a, 3 * bytes, 0, 1));
    ITH_TRY(timed(b, "swiglu backward+h", glu_bwd, &a, 6 * bytes, 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

/* Documents of equal length, or (uneven) 7 rows moved from the second to the first. */
static ith_status walk_attention(bench *b, bool uneven)
{
    const model *m = b->m;
    args a = {0};
    static int32_t cu[1025], positions[1 << 20];
    int64_t docs = ith_max_i64(b->tokens / b->doc, 1), dim = m->head_dim;
    double pairs = 0, attn = 0;
    for (int64_t i = 0; i <= docs; i++)
        cu[i] = (int32_t)(i * b->tokens / docs + (uneven && i == 1 && docs > 1 ? 7 : 0));
    for (int64_t i = 0; i < docs; i++)
        pairs += 0.5 * (double)(cu[i + 1] - cu[i]) * (double)(cu[i + 1] - cu[i]);
    for (int64_t t = 0; t < b->tokens; t++)
        positions[t] = (int32_t)(t % b->doc);
    attn = 4.0 * (double)(dim * m->heads_q) * pairs;
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    int64_t q_cols = m->heads_q * dim, kv_cols = m->heads_kv * dim, all = q_cols + 2 * kv_cols;
    ith_tensor qkv, dqkv, o, do_, lse, docs_at;
    ITH_TRY(make(b, ITH_BF16, b->tokens, all, &qkv));
    ITH_TRY(make(b, ITH_BF16, b->tokens, all, &dqkv));
    ITH_TRY(make(b, ITH_BF16, b->tokens, q_cols, &o));
    ITH_TRY(make(b, ITH_BF16, b->tokens, q_cols, &do_));
    ITH_TRY(make(b, ITH_F32, b->tokens, m->heads_q, &lse));
    ITH_TRY(make_ints(b, cu, docs + 1, &docs_at));
    a.t[0] = ith_split_heads(ith_col_range(qkv, 0, q_cols), m->heads_q);
    a.t[1] = ith_split_heads(ith_col_range(qkv, q_cols, q_cols + kv_cols), m->heads_kv);
    a.t[2] = ith_split_heads(ith_col_range(qkv, q_cols + kv_cols, all), m->heads_kv);
    a.t[3] = ith_split_heads(o, m->heads_q);
    a.t[4] = lse;
    a.t[5] = ith_split_heads(do_, m->heads_q);
    a.t[6] = ith_split_heads(ith_col_range(dqkv, 0, q_cols), m->heads_q);
    a.t[7] = ith_split_heads(ith_col_range(dqkv, q_cols, q_cols + kv_cols), m->heads_kv);
    a.t[8] = ith_split_heads(ith_col_range(dqkv, q_cols + kv_cols, all), m->heads_kv);
    a.seqs = (ith_seqs){.cu_seqlens = docs_at,
                        .cu_host = cu,
                        .num_docs = docs,
                        .max_len = b->doc + (uneven ? 7 : 0)};
    ITH_TRY(timed(b, uneven ? "attention packed fwd" : "attention batch fwd", attn_fwd, &a, 0, attn,
                  582e12));
    ITH_TRY(timed(b, uneven ? "attention packed bwd" : "attention batch bwd", attn_bwd, &a, 0,
                  2.5 * attn, 437e12));
    if (!uneven) {
        args r = {0};
        double bytes = (double)(b->tokens * (q_cols + kv_cols) * 2);
        ITH_TRY(make(b, ITH_F32, b->tokens, m->heads_q, &r.t[2]));
        ITH_TRY(make(b, ITH_F32, b->tokens, m->heads_kv, &r.t[3]));
        for (int i = 4; i < 6; i++) {
            ITH_TRY(make(b, ITH_BF16, 1, dim, &r.t[i]));
            r.t[i] = row(r.t[i]);
        }
        ITH_TRY(make(b, ITH_BF16, b->doc, dim / 2, &r.t[6]));
        ITH_TRY(make(b, ITH_BF16, b->doc, dim / 2, &r.t[7]));
        ITH_TRY(make_ints(b, positions, b->tokens, &r.t[8]));
        for (int i = 9; i < 11; i++) {
            ITH_TRY(make(b, ITH_F32, 1, dim, &r.t[i]));
            r.t[i] = row(r.t[i]);
        }
        r.t[0] = a.t[0];
        r.t[1] = a.t[1];
        ITH_TRY(timed(b, "qk norm+rope forward", rope_fwd, &r, 2 * bytes, 0, 1));
        ITH_TRY(timed(b, "qk norm+rope backward", rope_bwd, &r, 3 * bytes, 0, 1));
    }
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status walk_head(bench *b)
{
    const model *m = b->m;
    args a = {0};
    static int32_t ids[1 << 20];
    int64_t rows = ith_min_i64(2048, b->tokens);
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    for (int64_t t = 0; t < b->tokens; t++) /* a tenth is one id, as padding and commas are */
        ids[t] = (int32_t)(t % 10 ? ith_rng_below(7, 1, (uint64_t)t, m->vocab) : 11);
    ITH_TRY(make(b, ITH_BF16, rows, m->vocab, &a.t[0]));
    ITH_TRY(make(b, ITH_F32, rows, 1, &a.t[1]));
    ITH_TRY(make_ints(b, ids, rows, &a.t[2]));
    ITH_TRY(make(b, ITH_F32, rows, 1, &a.t[3]));
    a.t[1] = row(a.t[1]);
    a.t[3] = row(a.t[3]);
    ITH_TRY(timed(b, "cross entropy 2048", loss, &a, 3.0 * (double)(rows * m->vocab * 2), 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    ITH_TRY(walk_linear(b, "head 2048", rows, m->vocab, m->hidden));
    args e = {0};
    double bytes = (double)(b->tokens * m->hidden);
    ITH_TRY(make(b, ITH_BF16, b->tokens, m->hidden, &e.t[0]));
    ITH_TRY(make_ints(b, ids, b->tokens, &e.t[1]));
    ITH_TRY(make(b, ITH_BF16, m->vocab, m->hidden, &e.t[2]));
    ITH_TRY(make(b, ITH_F32, m->vocab, m->hidden, &e.t[3]));
    ITH_TRY(timed(b, "embedding forward", embed_fwd, &e, 4 * bytes, 0, 1));
    ITH_TRY(timed(b, "embedding backward", embed_bwd, &e, 10 * bytes, 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status walk_adamw(bench *b)
{
    args a = {0};
    int64_t n = 200 << 20;
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ITH_TRY(make(b, ITH_BF16, 1, n, &a.t[0]));
    for (int i = 1; i < 5; i++)
        ITH_TRY(make(b, ITH_F32, 1, n, &a.t[i]));
    ITH_TRY(make(b, ITH_F32, 1, 1, &a.t[5]));
    ITH_TRY(make(b, ITH_F64, 1, 1, &a.t[6]));
    for (int i = 0; i < 7; i++)
        a.t[i] = row(a.t[i]);
    ith_device *d = b->ctx->device;
    for (int i = 1; i < 5 && !ith_ctx_counting(b->ctx); i++) /* 4.4e-5: as in training */
        ITH_TRY(d->fill(d, a.t[i].data, 0x38, 4 * n, b->ctx->err));
    ITH_TRY(timed(b, "adamw fp32 200Mi", adam, &a, 30.0 * (double)n, 0, 1));
    ITH_TRY(timed(b, "adamw beside 200Mi", adam_beside, &a, 30.0 * (double)n, 0, 1));
    ITH_TRY(timed(b, "sumsq 200Mi", sumsq, &a, 4.0 * (double)n, 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

/* ---- experts, 8 per token and 1024 rows each: w [E,N,K]; dense: the same rows, one matrix ---- */

typedef struct {
    const char *name;
    int64_t experts, n, k;
} expert_shape;

static const expert_shape expert_shapes[] = {
    {"128 x 2048->1536", 128, 1536, 2048}, /* gate_up and down of Qwen3-30B-A3B */
    {"128 x 768->2048", 128, 2048, 768},
    {"256 x 2048->1024", 256, 1024, 2048}, /* of Qwen3.5-35B-A3B and LLaDA2-mini */
    {"256 x 512->2048", 256, 2048, 512},
};

static ith_status moe_fwd(bench *b, const args *a)
{
    return ith_grouped_linear_forward(b->ctx, a->t[0], a->t[1], a->t[2], a->t[4]);
}

static ith_status moe_dx(bench *b, const args *a)
{
    return ith_grouped_linear_backward_input(b->ctx, a->t[1], a->t[0], a->t[2], a->t[4]);
}

static ith_status moe_dw(bench *b, const args *a)
{
    return ith_grouped_linear_backward_weight(b->ctx, a->t[3], a->t[0], a->t[1], a->t[4]);
}

/* The first of a step, which overwrites. */
static ith_status moe_first_dw(bench *b, const args *a)
{
    ith_blank all = {0, ith_tensor_bytes(a->t[3]), true};
    ith_blanks blanks = {a->t[3].data, &all, 1};
    b->ctx->blanks = &blanks;
    ith_status status = moe_dw(b, a);
    b->ctx->blanks = NULL;
    return status;
}

static ith_status moe_route(bench *b, const args *a)
{
    return ith_router_forward(b->ctx, a->t[5], a->t[6], a->t[7], a->t[8], true);
}

static ith_status moe_sort(bench *b, const args *a)
{
    return ith_expert_sort(b->ctx, a->t[4], a->t[9], a->t[10], a->t[6]);
}

static ith_status moe_combine(bench *b, const args *a)
{
    return ith_expert_combine(b->ctx, a->t[11], ith_tensor_none(), a->t[1], a->t[5], a->t[10]);
}

static ith_status walk_experts(bench *b, const expert_shape *e)
{
    enum { SLOTS = 8, ROWS = 1024 };
    args a = {0};
    static int32_t zeros[1 << 20];
    static const struct {
        const char *part;
        call run;
    } products[] = {
        {"forward", moe_fwd}, {"dx", moe_dx}, {"first dw", moe_first_dw}, {"dw", moe_dw}};
    int64_t s = e->experts * ROWS, tokens = s / SLOTS;
    double flop = 2.0 * (double)(s * e->n * e->k), token = (double)tokens;
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ITH_TRY(make(b, ITH_BF16, s, e->n, &a.t[0]));
    ITH_TRY(make(b, ITH_BF16, s, e->k, &a.t[1]));
    ITH_TRY(make(b, ITH_BF16, e->experts * e->n, e->k, &a.t[2]));
    ITH_TRY(make(b, ITH_F32, e->experts * e->n, e->k, &a.t[3]));
    a.t[2] = ith_tensor_3d(a.t[2].data, ITH_BF16, e->experts, e->n, e->k);
    a.t[3] = ith_tensor_3d(a.t[3].data, ITH_F32, e->experts, e->n, e->k);
    ITH_TRY(make_ints(b, zeros, e->experts + 1, &a.t[4]));
    ITH_TRY(make(b, ITH_F32, tokens, SLOTS, &a.t[5]));
    ITH_TRY(make_ints(b, zeros, s, &a.t[6]));
    ITH_TRY(make(b, ITH_F32, tokens, e->experts, &a.t[7]));
    ITH_TRY(make(b, ITH_BF16, tokens, e->experts, &a.t[8]));
    ITH_TRY(make_ints(b, zeros, s, &a.t[9]));
    ITH_TRY(make_ints(b, zeros, s, &a.t[10]));
    ITH_TRY(make(b, ITH_BF16, tokens, e->k, &a.t[11]));
    a.t[6] = ith_tensor_2d(a.t[6].data, ITH_I32, tokens, SLOTS);
    a.t[10] = ith_tensor_2d(a.t[10].data, ITH_I32, tokens, SLOTS);
    double route_bytes = token * (double)(e->experts * 6 + SLOTS * 8);
    ITH_TRY(timed(b, "router", moe_route, &a, route_bytes, 0, 1));
    ITH_TRY(timed(b, "expert sort", moe_sort, &a, token * SLOTS * 12, 0, 1));
    if (!ith_ctx_counting(b->ctx)) /* the products need it, whatever `only` says */
        ITH_TRY(moe_route(b, &a));
    ITH_TRY(moe_sort(b, &a));
    for (int i = 0; i < 4; i++) {
        char text[64];
        snprintf(text, sizeof text, "experts %s %s", e->name, products[i].part);
        ITH_TRY(timed(b, text, products[i].run, &a, 0, flop, MATRIX_RATE));
    }
    double combine_bytes = token * (double)(e->k * 2 * (SLOTS + 1));
    ITH_TRY(timed(b, "expert combine", moe_combine, &a, combine_bytes, 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    char dense[64];
    snprintf(dense, sizeof dense, "experts %s dense", e->name);
    return walk_linear(b, dense, s, e->n, e->k);
}

/* ---- LLaDA2-mini: documents [noisy; clean] of 2 x DOC rows, blocks of 32 ---- */

static ith_status walk_blocks(bench *b)
{
    enum { HQ = 16, HKV = 4, DIM = 128, BLOCK = 32 };
    static int32_t cu[1025], noisy[1024], position[1 << 20];
    args a = {0};
    int64_t docs = ith_max_i64(b->tokens / (2 * b->doc), 1), rows = docs * 2 * b->doc;
    int64_t q_cols = HQ * DIM, kv_cols = HKV * DIM, all = q_cols + 2 * kv_cols;
    double pairs = (double)docs * (double)b->doc * (double)(b->doc + BLOCK);
    double flop = 4.0 * DIM * HQ * pairs;
    for (int64_t i = 0; i <= docs; i++)
        cu[i] = (int32_t)(i * 2 * b->doc);
    for (int64_t i = 0; i < docs; i++)
        noisy[i] = (int32_t)b->doc;
    for (int64_t t = 0; t < rows; t++)
        position[t] = (int32_t)(t % b->doc);
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ith_tensor qkv, dqkv, o, do_;
    ITH_TRY(make(b, ITH_BF16, rows, all, &qkv));
    ITH_TRY(make(b, ITH_BF16, rows, all, &dqkv));
    ITH_TRY(make(b, ITH_BF16, rows, q_cols, &o));
    ITH_TRY(make(b, ITH_BF16, rows, q_cols, &do_));
    ITH_TRY(make(b, ITH_F32, rows, HQ, &a.t[4]));
    a.seqs = (ith_seqs){.cu_host = cu,
                        .num_docs = docs,
                        .max_len = 2 * b->doc,
                        .block = BLOCK,
                        .noisy_host = noisy,
                        .position_host = position};
    ITH_TRY(make_ints(b, cu, docs + 1, &a.seqs.cu_seqlens));
    ITH_TRY(make_ints(b, noisy, docs, &a.seqs.noisy));
    ITH_TRY(make_ints(b, position, rows, &a.seqs.position));
    a.t[0] = ith_split_heads(ith_col_range(qkv, 0, q_cols), HQ);
    a.t[1] = ith_split_heads(ith_col_range(qkv, q_cols, q_cols + kv_cols), HKV);
    a.t[2] = ith_split_heads(ith_col_range(qkv, q_cols + kv_cols, all), HKV);
    a.t[3] = ith_split_heads(o, HQ);
    a.t[5] = ith_split_heads(do_, HQ);
    a.t[6] = ith_split_heads(ith_col_range(dqkv, 0, q_cols), HQ);
    a.t[7] = ith_split_heads(ith_col_range(dqkv, q_cols, q_cols + kv_cols), HKV);
    a.t[8] = ith_split_heads(ith_col_range(dqkv, q_cols + kv_cols, all), HKV);
    ITH_TRY(timed(b, "block diffusion fwd", attn_fwd, &a, 0, flop, 582e12));
    ITH_TRY(timed(b, "block diffusion bwd", attn_bwd, &a, 0, 2.5 * flop, 437e12));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status group_route(bench *b, const args *a)
{
    return ith_group_router_forward(b->ctx, a->t[0], a->t[1], a->t[2], a->t[3], a->t[4], 8, 4,
                                    2.5F);
}

static ith_status group_route_bwd(bench *b, const args *a)
{
    return ith_group_router_backward(b->ctx, a->t[5], a->t[0], a->t[1], a->t[2], 2.5F);
}

static ith_status walk_group_router(bench *b)
{
    enum { EXPERTS = 256, SLOTS = 8 };
    args a = {0};
    double token = (double)b->tokens;
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ITH_TRY(make(b, ITH_F32, b->tokens, SLOTS, &a.t[0]));
    ITH_TRY(make(b, ITH_F32, b->tokens, SLOTS, &a.t[1]));
    a.t[1].dtype = ITH_I32;
    ITH_TRY(make(b, ITH_F32, b->tokens, EXPERTS, &a.t[2]));
    ITH_TRY(make(b, ITH_F32, b->tokens, EXPERTS, &a.t[3]));
    ITH_TRY(make(b, ITH_F32, 1, EXPERTS, &a.t[4]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, EXPERTS, &a.t[5]));
    a.t[4] = row(a.t[4]);
    ITH_TRY(
        timed(b, "group router forward", group_route, &a, token * (EXPERTS * 8 + SLOTS * 8), 0, 1));
    ITH_TRY(timed(b, "group router backward", group_route_bwd, &a,
                  token * (EXPERTS * 6 + SLOTS * 8), 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

/* ---- gates and vision tower of Qwen3.5: heads of 256, tower 1152 wide with heads of 72 ---- */

static ith_status gate_fwd(bench *b, const args *a)
{
    return ith_sigmoid_gate_forward(b->ctx, a->t[0], a->t[0], a->t[1]);
}

static ith_status gate_bwd(bench *b, const args *a)
{
    return ith_sigmoid_gate_backward(b->ctx, a->t[2], a->t[3], a->t[2], a->t[0], a->t[1]);
}

static ith_status row_fwd(bench *b, const args *a)
{
    return ith_row_gate_forward(b->ctx, a->t[4], a->t[4], a->t[5], a->t[6]);
}

static ith_status row_bwd(bench *b, const args *a)
{
    return ith_row_gate_backward(b->ctx, a->t[5], a->t[7], a->t[4], a->t[5], a->t[6]);
}

/* The second half of each head: query and gate lie head by head. */
static ith_tensor gates_of(ith_tensor rows, int64_t heads)
{
    ith_tensor t = ith_split_heads(rows, heads);
    t.shape[2] /= 2;
    t.data = (char *)t.data + t.shape[2] * ith_dtype_bytes(t.dtype);
    return t;
}

/* Heads of 256, eight query heads to a key head. */
static ith_status walk_wide_heads(bench *b)
{
    static const model wide = {"Qwen3.5", 2048, 0, 16, 2, 256, 0};
    const model *before = b->m;
    b->m = &wide;
    ITH_TRY(walk_attention(b, false));
    ITH_TRY(walk_attention(b, true));
    b->m = before;
    return ITH_OK;
}

static ith_status walk_gates(bench *b)
{
    enum { HEADS = 16, DIM = 256, HIDDEN = 2048 };
    args a = {0};
    ith_tensor qg, dqg;
    double bytes = (double)b->tokens * HEADS * DIM * 2, rows = (double)b->tokens * HIDDEN * 2;
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ITH_TRY(make(b, ITH_BF16, b->tokens, HEADS * DIM, &a.t[0]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, 2 * HEADS * DIM, &qg));
    ITH_TRY(make(b, ITH_BF16, b->tokens, HEADS * DIM, &a.t[2]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, 2 * HEADS * DIM, &dqg));
    a.t[0] = ith_split_heads(a.t[0], HEADS);
    a.t[1] = gates_of(qg, HEADS);
    a.t[2] = ith_split_heads(a.t[2], HEADS);
    a.t[3] = gates_of(dqg, HEADS);
    ITH_TRY(make(b, ITH_BF16, b->tokens, HIDDEN, &a.t[4]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, HIDDEN, &a.t[5]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, 1, &a.t[6]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, 1, &a.t[7]));
    ITH_TRY(timed(b, "sigmoid gate forward", gate_fwd, &a, 3 * bytes, 0, 1));
    ITH_TRY(timed(b, "sigmoid gate backward", gate_bwd, &a, 5 * bytes, 0, 1));
    ITH_TRY(timed(b, "row gate forward", row_fwd, &a, 3 * rows, 0, 1));
    ITH_TRY(timed(b, "row gate backward", row_bwd, &a, 3 * rows, 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status ln_fwd(bench *b, const args *a)
{
    return ith_layernorm_forward(b->ctx, a->t[0], a->t[2], a->t[3], a->t[1], a->t[4], a->t[5],
                                 1e-6F);
}

static ith_status ln_bwd(bench *b, const args *a)
{
    return ith_layernorm_backward(b->ctx, a->t[8], a->t[6], a->t[7], a->t[0], a->t[8], a->t[1],
                                  a->t[2], a->t[3], a->t[4]);
}

static ith_status bias_fwd(bench *b, const args *a)
{
    return ith_bias_add(b->ctx, a->t[0], a->t[4]);
}

static ith_status bias_bwd(bench *b, const args *a)
{
    return ith_bias_backward(b->ctx, a->t[6], a->t[0]);
}

static ith_status gelu_fwd(bench *b, const args *a)
{
    return ith_gelu_forward(b->ctx, a->t[10], a->t[9], true);
}

static ith_status gelu_bwd(bench *b, const args *a)
{
    return ith_gelu_backward(b->ctx, a->t[10], a->t[10], a->t[9], true);
}

static ith_status seg_fwd(bench *b, const args *a)
{
    return ith_attention_forward(b->ctx, a->t[3], a->t[4], a->t[0], a->t[1], a->t[2], a->seqs,
                                 0.118F, false);
}

static ith_status seg_bwd(bench *b, const args *a)
{
    return ith_attention_backward(b->ctx, a->t[6], a->t[7], a->t[8], a->t[5], a->t[0], a->t[1],
                                  a->t[2], a->t[3], a->t[4], a->seqs, 0.118F, false);
}

static ith_status walk_tower(bench *b)
{
    enum { WIDTH = 1152, INNER = 4304, HEADS = 16, SEGMENT = 1024 };
    static int32_t cu[1025];
    args a = {0}, s = {0};
    double bytes = (double)b->tokens * WIDTH * 2, wide = (double)b->tokens * INNER * 2;
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    for (int i = 0; i < 9; i++) {
        bool rows = i < 2 || i == 8, stats = i == 2 || i == 3, f32 = stats || i == 6 || i == 7;
        ITH_TRY(make(b, f32 ? ITH_F32 : ITH_BF16, rows || stats ? b->tokens : 1, stats ? 1 : WIDTH,
                     &a.t[i]));
        if (!rows)
            a.t[i] = row(a.t[i]);
    }
    ITH_TRY(make(b, ITH_BF16, b->tokens, INNER, &a.t[9]));
    ITH_TRY(make(b, ITH_BF16, b->tokens, INNER, &a.t[10]));
    ITH_TRY(timed(b, "layernorm forward", ln_fwd, &a, 2 * bytes, 0, 1));
    ITH_TRY(timed(b, "layernorm backward+add", ln_bwd, &a, 4 * bytes, 0, 1));
    ITH_TRY(timed(b, "bias add", bias_fwd, &a, 2 * bytes, 0, 1));
    ITH_TRY(timed(b, "bias backward", bias_bwd, &a, bytes, 0, 1));
    ITH_TRY(timed(b, "gelu forward", gelu_fwd, &a, 2 * wide, 0, 1));
    ITH_TRY(timed(b, "gelu backward", gelu_bwd, &a, 3 * wide, 0, 1));
    int64_t segments = ith_max_i64(b->tokens / SEGMENT, 1);
    for (int64_t i = 0; i <= segments; i++)
        cu[i] = (int32_t)(i * b->tokens / segments);
    for (int i = 0; i < 9; i++) {
        ITH_TRY(make(b, i == 4 ? ITH_F32 : ITH_BF16, b->tokens, i == 4 ? HEADS : WIDTH, &s.t[i]));
        s.t[i] = i == 4 ? s.t[i] : ith_split_heads(s.t[i], HEADS);
    }
    s.seqs = (ith_seqs){.cu_host = cu, .num_docs = segments, .max_len = SEGMENT};
    ITH_TRY(make_ints(b, cu, segments + 1, &s.seqs.cu_seqlens));
    double flop = 4.0 * (double)b->tokens * SEGMENT * WIDTH;
    ITH_TRY(timed(b, "segments of 1024 fwd", seg_fwd, &s, 0, flop, 582e12));
    ITH_TRY(timed(b, "segments of 1024 bwd", seg_bwd, &s, 0, 2.5 * flop, 437e12));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

/* ---- Gated DeltaNet: by default 16 key and 32 value heads of 128 (Qwen3.5-4B to 35B-A3B) ---- */

static ith_status conv_fwd(bench *b, const args *a)
{
    return ith_conv1d_silu_forward(b->ctx, a->t[0], a->t[1], a->t[2], ith_tensor_none(), a->seqs);
}

static ith_status conv_bwd(bench *b, const args *a)
{
    return ith_conv1d_silu_backward(b->ctx, a->t[1], a->t[3], a->t[0], a->t[4], a->t[2], a->seqs);
}

static ith_status delta_fwd(bench *b, const args *a)
{
    return ith_gated_delta_rule_forward(b->ctx, a->t[3], a->t[0], a->t[1], a->t[2], a->t[4],
                                        a->t[5], ith_tensor_none(), a->seqs, 0.088f);
}

static ith_status delta_bwd(bench *b, const args *a)
{
    ith_tensor none = ith_tensor_none();
    return ith_gated_delta_rule_backward(b->ctx, a->t[6], a->t[7], a->t[8], a->t[9], a->t[10], none,
                                         a->t[3], a->t[0], a->t[1], a->t[2], a->t[4], a->t[5], none,
                                         a->seqs, 0.088f);
}

static ith_status gated_fwd(bench *b, const args *a)
{
    return ith_gated_rmsnorm_forward(b->ctx, a->t[0], a->t[1], a->t[2], a->t[3], 1e-6f);
}

static ith_status gated_bwd(bench *b, const args *a)
{
    return ith_gated_rmsnorm_backward(b->ctx, a->t[0], a->t[4], a->t[5], a->t[0], a->t[1], a->t[2],
                                      a->t[3], 1e-6f);
}

static ith_status make_gates(bench *b, double size, ith_tensor *out)
{
    static float values[1 << 16];
    ITH_TRY(make(b, ITH_F32, b->tokens, b->m->heads_q, out));
    int64_t n = ith_numel(*out), most = sizeof values / sizeof *values;
    for (int64_t i = 0; i < most; i++)
        values[i] = (float)(size * ith_rng_uniform(3, 4, (uint64_t)i));
    for (int64_t at = 0; !ith_ctx_counting(b->ctx) && at < n; at += most)
        ITH_TRY(b->ctx->device->upload(b->ctx->device, (float *)out->data + at, values,
                                       ith_min_i64(most, n - at) * 4, b->ctx->err));
    return ITH_OK;
}

/* FLOP of the delta rule: 6 Dk Dv + 4 C (Dk + Dv) forward for each token and value head, chunks of
 * C = 64, and three times that backward, states made again included. Bytes: every operand once. */
static ith_status walk_delta(bench *b)
{
    enum { CHUNK = 64 };
    const model *m = b->m = &(model){"Qwen3.5", 2560, 0, b->value_heads, b->key_heads, 128, 0};
    args a = {0};
    static int32_t cu[1025];
    int64_t docs = ith_max_i64(b->tokens / b->doc, 1), dim = m->head_dim;
    int64_t key = m->heads_kv * dim, value = m->heads_q * dim, all = 2 * key + value;
    double tokens = (double)b->tokens, gates = tokens * (double)m->heads_q * 8;
    double flop = tokens * (double)(m->heads_q * (6 * dim * dim + 8 * CHUNK * dim));
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ith_tensor u, conv, dconv, o, docs_at;
    for (int64_t i = 0; i <= docs; i++)
        cu[i] = (int32_t)(i * b->tokens / docs);
    ITH_TRY(make_ints(b, cu, docs + 1, &docs_at));
    a.seqs = (ith_seqs){.cu_seqlens = docs_at,
                        .cu_host = cu,
                        .num_docs = docs,
                        .max_len = ith_div_ceil(b->tokens, docs)};
    ITH_TRY(make(b, ITH_BF16, b->tokens, all, &u));
    ITH_TRY(make(b, ITH_BF16, b->tokens, all, &conv));
    ITH_TRY(make(b, ITH_BF16, b->tokens, all, &dconv));
    ITH_TRY(make(b, ITH_BF16, b->tokens, value, &o));
    args c = {.t = {dconv, conv}, .seqs = a.seqs};
    ITH_TRY(make(b, ITH_BF16, all, 4, &c.t[2]));
    ITH_TRY(make(b, ITH_F32, all, 4, &c.t[3]));
    c.t[4] = u;
    double row = tokens * (double)all * 2;
    ITH_TRY(timed(b, "gdn conv+silu forward", conv_fwd, &c, 2 * row, 0, 1));
    ITH_TRY(timed(b, "gdn conv+silu backward", conv_bwd, &c, 3 * row, 0, 1));
    a.t[0] = ith_split_heads(ith_col_range(u, 0, key), m->heads_kv);
    a.t[1] = ith_split_heads(ith_col_range(u, key, 2 * key), m->heads_kv);
    a.t[2] = ith_split_heads(ith_col_range(u, 2 * key, all), m->heads_q);
    a.t[3] = ith_split_heads(o, m->heads_q);
    ITH_TRY(make_gates(b, -0.3, &a.t[4]));
    ITH_TRY(make_gates(b, 1.0, &a.t[5]));
    a.t[6] = ith_split_heads(ith_col_range(dconv, 0, key), m->heads_kv);
    a.t[7] = ith_split_heads(ith_col_range(dconv, key, 2 * key), m->heads_kv);
    a.t[8] = ith_split_heads(ith_col_range(dconv, 2 * key, all), m->heads_q);
    ITH_TRY(make(b, ITH_F32, b->tokens, m->heads_q, &a.t[9]));
    ITH_TRY(make(b, ITH_F32, b->tokens, m->heads_q, &a.t[10]));
    double out = tokens * (double)value * 2;
    ITH_TRY(
        timed(b, "gdn delta rule forward", delta_fwd, &a, row + out + gates, flop, MATRIX_RATE));
    ITH_TRY(timed(b, "gdn delta rule backward", delta_bwd, &a, 2 * row + out + 2 * gates, 3 * flop,
                  MATRIX_RATE));
    args g = {.t = {a.t[3], a.t[2], ith_split_heads(ith_col_range(conv, 0, value), m->heads_q)}};
    ITH_TRY(make(b, ITH_F32, 1, dim, &g.t[3]));
    g.t[3] = ith_tensor_1d(g.t[3].data, ITH_F32, dim);
    g.t[4] = ith_split_heads(ith_col_range(dconv, 0, value), m->heads_q);
    ITH_TRY(make(b, ITH_F32, 1, dim, &g.t[5]));
    g.t[5] = ith_tensor_1d(g.t[5].data, ITH_F32, dim);
    ITH_TRY(timed(b, "gdn gated norm forward", gated_fwd, &g, 3 * out, 0, 1));
    ITH_TRY(timed(b, "gdn gated norm backward", gated_bwd, &g, 5 * out, 0, 1));
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

/* ---- decoding ---- */

static ith_status decode(bench *b, const args *a)
{
    return ith_attention_decode(b->ctx, a->t[0], ith_tensor_none(), a->t[1], a->t[2], a->t[3],
                                a->t[4], 0.09f);
}

/* New queries against caches of all lengths; the floor is the caches' bytes. 32 queries of one
 * cache: a block of a diffusion model. */
static ith_status walk_decode(bench *b)
{
    static const struct {
        const char *name;
        int64_t batch, capacity; /* sequences, or queries of one cache */
        bool shared;
    } caches[] = {{"decode 1K", 1, 1 << 10, false},       {"decode 16K", 1, 1 << 14, false},
                  {"decode 128K", 1, 1 << 17, false},     {"decode 1M", 1, 1 << 20, false},
                  {"decode 32 x 4K", 32, 1 << 12, false}, {"decode 32 of 16K", 32, 1 << 14, true}};
    static const model shapes[] = {{"Qwen3-4B", 0, 0, 32, 8, 128, 0},
                                   {"Qwen3.5", 0, 0, 16, 2, 256, 0},
                                   {"LLaDA2", 0, 0, 16, 4, 128, 0},
                                   {"head of 64", 0, 0, 8, 1, 64, 0}};
    int64_t mark = ith_plan_mark(b->ctx->plan, ITH_MEM_ACTIVATIONS);
    ith_tensor k, v, q, o;
    ITH_TRY(make(b, ITH_BF16, 1 << 20, 8 * 128, &k));
    ITH_TRY(make(b, ITH_BF16, 1 << 20, 8 * 128, &v));
    ITH_TRY(make(b, ITH_BF16, 32, 32 * 128, &q));
    ITH_TRY(make(b, ITH_BF16, 32, 32 * 128, &o));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const model *m = b->m = &shapes[i];
        for (size_t j = 0; j < sizeof caches / sizeof *caches; j++) {
            int64_t n = caches[j].batch, capacity = caches[j].capacity;
            int64_t kept = (caches[j].shared ? 1 : n) * capacity * m->heads_kv * m->head_dim;
            int32_t lengths[32];
            args a = {
                .t = {ith_tensor_3d(o.data, ITH_BF16, n, m->heads_q, m->head_dim),
                      ith_tensor_3d(q.data, ITH_BF16, n, m->heads_q, m->head_dim),
                      ith_tensor_4d(k.data, ITH_BF16, 4, n, capacity, m->heads_kv, m->head_dim),
                      ith_tensor_4d(v.data, ITH_BF16, 4, n, capacity, m->heads_kv, m->head_dim)}};
            for (int s = 0; s < 32; s++)
                lengths[s] = (int32_t)capacity;
            if (caches[j].shared)
                a.t[2].stride[0] = a.t[3].stride[0] = 0;
            ITH_TRY(make_ints(b, lengths, n, &a.t[4]));
            ITH_TRY(timed(b, caches[j].name, decode, &a, 4.0 * (double)kept, 0, 1));
        }
    }
    ith_plan_release(b->ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status walk(bench *b)
{
    if (strncmp(b->only, "gdn", 3) == 0) /* without the memory of all others */
        return walk_delta(b);
    if (strncmp(b->only, "decode", 6) == 0)
        return walk_decode(b);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const model *m = b->m = &models[i];
        int64_t q_cols = m->heads_q * m->head_dim, kv_cols = m->heads_kv * m->head_dim;
        ITH_TRY(walk_norm(b));
        ITH_TRY(walk_linear(b, "qkv", b->tokens, q_cols + 2 * kv_cols, m->hidden));
        ITH_TRY(walk_attention(b, false));
        ITH_TRY(walk_attention(b, true));
        ITH_TRY(walk_linear(b, "o", b->tokens, m->hidden, q_cols));
        ITH_TRY(walk_linear(b, "gate_up", b->tokens, 2 * m->inner, m->hidden));
        ITH_TRY(walk_swiglu(b));
        ITH_TRY(walk_linear(b, "down", b->tokens, m->hidden, m->inner));
        ITH_TRY(walk_head(b));
    }
    ITH_TRY(walk_adamw(b));
    for (size_t i = 0; i < sizeof expert_shapes / sizeof *expert_shapes; i++)
        ITH_TRY(walk_experts(b, &expert_shapes[i]));
    ITH_TRY(walk_blocks(b));
    ITH_TRY(walk_group_router(b));
    ITH_TRY(walk_wide_heads(b));
    ITH_TRY(walk_gates(b));
    ITH_TRY(walk_tower(b));
    return walk_delta(b);
}

static ith_status run(bench *b)
{
    ITH_TRY(ith_plan_create(&b->ctx->plan, b->ctx->device, b->ctx->err));
    ITH_TRY(walk(b));
    ITH_TRY(ith_plan_commit(b->ctx->plan, b->ctx->err));
    ITH_TRY(walk(b));
    printf("sum of calls %.2f ms, of floors %.2f ms: %.0f%%\n", b->measured_ms, b->floor_ms,
           100 * b->floor_ms / b->measured_ms);
    return ITH_OK;
}

int main(int argc, char **argv)
{
    static ith_error err;
    ith_ctx ctx = {.err = &err};
    bench b = {.ctx = &ctx, .only = "", .tokens = 16384, .doc = 4096};
    b.key_heads = 16;
    b.value_heads = 32;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "T=", 2) == 0)
            b.tokens = ith_min_i64(strtoll(argv[i] + 2, NULL, 10), 1 << 20);
        else if (strncmp(argv[i], "DOC=", 4) == 0)
            b.doc = strtoll(argv[i] + 4, NULL, 10);
        else if (strncmp(argv[i], "keys=", 5) == 0)
            b.key_heads = strtoll(argv[i] + 5, NULL, 10);
        else if (strncmp(argv[i], "values=", 7) == 0)
            b.value_heads = strtoll(argv[i] + 7, NULL, 10);
        else if (strncmp(argv[i], "only=", 5) == 0)
            b.only = argv[i] + 5;
        else if (strcmp(argv[i], "deterministic=1") == 0)
            ctx.deterministic = true;
    }
    uint16_t *noise = malloc(NOISE_BYTES);
    for (int64_t i = 0; noise && i < NOISE_BYTES / 2; i++) {
        uint64_t r = ith_rng_u64(1, 2, (uint64_t)i); /* a sum of four uniforms is near normal */
        float x = (float)((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48));
        noise[i] = ith_f32_to_bf16((x / 65536.0f - 2.0f) * 0.3f);
    }
    b.noise = noise;
    ith_status status = noise ? ith_ctx_open_cuda(&ctx, 0, false) : ITH_ERR_MEMORY;
    if (status == ITH_OK)
        status = run(&b);
    if (status != ITH_OK)
        fprintf(stderr, "error: %s\n", err.text);
    ith_plan_destroy(ctx.plan);
    ith_ctx_close_cuda(&ctx);
    free(noise);
    return status == ITH_OK ? 0 : 1;
}
