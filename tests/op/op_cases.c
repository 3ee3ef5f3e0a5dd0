/* op_cases.c - bodies and shapes of the bench, in the order of kernels/ops.h.
 *
 * Parameters named 0/1 switch optional tensors and aliasing on. `pad` is the gap between rows in
 * elements: 0, a multiple of 16 bytes (8), and one that breaks the alignment of rows (3). */
#include "op_cases.h"

#include "base/mem.h"
#include "base/rng.h"

#include <math.h>

static ith_tensor vector(op_run *r, op_role role, op_class kind, const char *name, op_fill fill,
                         int64_t n)
{
    return op_make(r, role, kind, name, fill, 1, &n, 0);
}

static ith_tensor matrix(op_run *r, op_role role, op_class kind, const char *name, op_fill fill,
                         int64_t rows, int64_t cols, int64_t pad)
{
    int64_t shape[2] = {rows, cols};
    return op_make(r, role, kind, name, fill, 2, shape, pad);
}

/* [rows, heads, dim] with a gap between rows. */
static ith_tensor heads(op_run *r, op_role role, op_class kind, const char *name, op_fill fill,
                        int64_t rows, int64_t num_heads, int64_t dim, int64_t pad)
{
    int64_t shape[3] = {rows, num_heads, dim};
    return op_make(r, role, kind, name, fill, 3, shape, pad);
}

/* Random integers below n; NULL-safe for count 0. The caller frees with ith_free. */
static int32_t *random_ints(op_run *r, uint64_t stream, int64_t count, int64_t n)
{
    int32_t *values = ith_calloc(count + 1, (int64_t)sizeof *values);
    for (int64_t i = 0; values && i < count; i++)
        values[i] = (int32_t)ith_rng_below(r->seed, stream, (uint64_t)i, n);
    return values;
}

static ith_tensor below(op_run *r, const char *name, int64_t rows, int64_t count, int64_t n)
{
    int32_t *values =
        random_ints(r, ith_rng_stream(name), (rows == OP_VECTOR ? 1 : rows) * count, n);
    ith_tensor t = op_ints(r, name, values, rows, count);
    ith_free(values);
    return t;
}

/* count different integers below n in random order. */
static ith_tensor distinct(op_run *r, const char *name, int64_t count, int64_t n)
{
    int64_t *order = ith_calloc(n + 1, (int64_t)sizeof *order);
    int32_t *values = ith_calloc(n + 1, (int64_t)sizeof *values);
    if (order && values) {
        ith_rng_permutation(r->seed, ith_rng_stream(name), n, order);
        for (int64_t i = 0; i < n; i++)
            values[i] = (int32_t)order[i];
    }
    ith_tensor t = op_ints(r, name, values, OP_VECTOR, count);
    ith_free(order);
    ith_free(values);
    return t;
}

/* ---- embedding ---- */

enum { EMB_T, EMB_D, EMB_V, EMB_PAD };

static ith_status embedding_forward(op_run *r, const int64_t *a)
{
    ith_tensor y = matrix(r, OP_OUT, OP_ACT, "y", NULL, a[EMB_T], a[EMB_D], a[EMB_PAD]);
    ith_tensor ids = below(r, "ids", OP_VECTOR, a[EMB_T], a[EMB_V]);
    ith_tensor w = matrix(r, OP_IN, OP_ACT, "w", op_normal, a[EMB_V], a[EMB_D], 0);
    OP_READY(r);
    return ith_embedding_forward(r->ctx, y, ids, w);
}

static ith_status embedding_backward(op_run *r, const int64_t *a)
{
    ith_tensor dw = matrix(r, OP_INOUT, OP_STAT, "dw", op_normal, a[EMB_V], a[EMB_D], 0);
    ith_tensor dy = matrix(r, OP_IN, OP_ACT, "dy", op_normal, a[EMB_T], a[EMB_D], a[EMB_PAD]);
    ith_tensor ids = below(r, "ids", OP_VECTOR, a[EMB_T], a[EMB_V]);
    OP_READY(r);
    return ith_embedding_backward(r->ctx, dw, dy, ids);
}

/* ---- RMSNorm ---- */

enum { NORM_T, NORM_D, NORM_PAD, NORM_OFFSET, NORM_RESIDUAL, NORM_ALIAS, NORM_Y };

/* alias: 0 none, 1 sum is x, 2 sum is residual. y = 0: only sum and rstd. */
static ith_status rmsnorm_forward(op_run *r, const int64_t *a)
{
    int64_t rows = a[NORM_T], width = a[NORM_D], pad = a[NORM_PAD];
    ith_tensor none = ith_tensor_none(), y = none, sum = none, residual = none;
    if (a[NORM_Y])
        y = matrix(r, OP_OUT, OP_ACT, "y", NULL, rows, width, pad);
    ith_tensor rstd = vector(r, OP_OUT, OP_STAT, "rstd", NULL, rows);
    ith_tensor x =
        matrix(r, a[NORM_ALIAS] == 1 ? OP_INOUT : OP_IN, OP_ACT, "x", op_normal, rows, width, pad);
    if (a[NORM_RESIDUAL]) {
        residual = matrix(r, a[NORM_ALIAS] == 2 ? OP_INOUT : OP_IN, OP_ACT, "residual", op_normal,
                          rows, width, pad);
        sum = a[NORM_ALIAS] == 1   ? x
              : a[NORM_ALIAS] == 2 ? residual
                                   : matrix(r, OP_OUT, OP_ACT, "sum", NULL, rows, width, pad);
    }
    ith_tensor w = vector(r, OP_IN, OP_ACT, "w", op_normal, width);
    OP_READY(r);
    return ith_rmsnorm_forward(r->ctx, y, sum, rstd, x, residual, w, 1e-6F, (float)a[NORM_OFFSET]);
}

enum { NORMB_T, NORMB_D, NORMB_PAD, NORMB_OFFSET, NORMB_DRES, NORMB_ALIAS, NORMB_DW };

/* alias: 0 none, 1 dx is dy, 2 dx is dres. dw = 0: frozen. */
static ith_status rmsnorm_backward(op_run *r, const int64_t *a)
{
    int64_t rows = a[NORMB_T], width = a[NORMB_D], pad = a[NORMB_PAD];
    ith_tensor dw = ith_tensor_none(), dres = ith_tensor_none();
    ith_tensor rstd = vector(r, OP_OUT, OP_STAT, "rstd", NULL, rows);
    ith_tensor x = matrix(r, OP_IN, OP_ACT, "x", op_normal, rows, width, pad);
    ith_tensor w = vector(r, OP_IN, OP_ACT, "w", op_normal, width);
    ith_tensor dy = matrix(r, a[NORMB_ALIAS] == 1 ? OP_INOUT : OP_IN, OP_ACT, "dy", op_normal, rows,
                           width, pad);
    if (a[NORMB_DRES])
        dres = matrix(r, a[NORMB_ALIAS] == 2 ? OP_INOUT : OP_IN, OP_ACT, "dres", op_normal, rows,
                      width, pad);
    if (a[NORMB_DW])
        dw = vector(r, OP_INOUT, OP_STAT, "dw", op_normal, width);
    ith_tensor dx = a[NORMB_ALIAS] == 1   ? dy
                    : a[NORMB_ALIAS] == 2 ? dres
                                          : matrix(r, OP_OUT, OP_ACT, "dx", NULL, rows, width, pad);
    OP_READY(r);
    ITH_TRY(ith_rmsnorm_forward(r->ctx, ith_tensor_none(), ith_tensor_none(), rstd, x,
                                ith_tensor_none(), w, 1e-6F, (float)a[NORMB_OFFSET]));
    return ith_rmsnorm_backward(r->ctx, dx, dw, dy, dres, x, rstd, w, (float)a[NORMB_OFFSET]);
}

/* ---- q/k norm and RoPE ---- */

enum { ROPE_T, ROPE_HQ, ROPE_HKV, ROPE_DH, ROPE_RD, ROPE_NORM, ROPE_OFFSET, ROPE_AXES, ROPE_ALIAS };
enum { ROPE_POSITIONS = 301 };

static double rope_angle(const ith_tensor *t, int64_t n)
{
    int64_t half = t->shape[1];
    return (double)(n / half) * pow(10000, -(double)(n % half) / (double)half);
}

static double rope_cos(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)r, (void)stream;
    return cos(rope_angle(t, n));
}

static double rope_sin(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)r, (void)stream;
    return sin(rope_angle(t, n));
}

/* What both directions share; q and k are columns of one buffer that holds v too. */
typedef struct {
    ith_tensor q, k, q_w, k_w, q_rstd, k_rstd, cos, sin, position_ids;
} rope_args;

static void split_qk(ith_tensor qkv, const int64_t *a, ith_tensor *q, ith_tensor *k)
{
    int64_t q_cols = a[ROPE_HQ] * a[ROPE_DH], k_cols = a[ROPE_HKV] * a[ROPE_DH];
    *q = ith_split_heads(ith_col_range(qkv, 0, q_cols), a[ROPE_HQ]);
    *k = ith_split_heads(ith_col_range(qkv, q_cols, q_cols + k_cols), a[ROPE_HKV]);
}

static ith_tensor qkv_buffer(op_run *r, op_role role, const char *name, const int64_t *a)
{
    int64_t cols = (a[ROPE_HQ] + 2 * a[ROPE_HKV]) * a[ROPE_DH];
    return matrix(r, role, OP_ACT, name, op_normal, a[ROPE_T], cols, 0);
}

static rope_args rope_make(op_run *r, const int64_t *a, bool in_place)
{
    ith_tensor none = ith_tensor_none();
    rope_args g = {.q_w = none, .k_w = none, .q_rstd = none, .k_rstd = none};
    split_qk(qkv_buffer(r, in_place ? OP_INOUT : OP_IN, "qkv", a), a, &g.q, &g.k);
    if (a[ROPE_NORM]) {
        g.q_w = vector(r, OP_IN, OP_ACT, "q_w", op_normal, a[ROPE_DH]);
        g.k_w = vector(r, OP_IN, OP_ACT, "k_w", op_normal, a[ROPE_DH]);
        g.q_rstd = matrix(r, OP_OUT, OP_STAT, "q_rstd", NULL, a[ROPE_T], a[ROPE_HQ], 0);
        g.k_rstd = matrix(r, OP_OUT, OP_STAT, "k_rstd", NULL, a[ROPE_T], a[ROPE_HKV], 0);
    }
    g.cos = matrix(r, OP_IN, OP_ACT, "cos", rope_cos, ROPE_POSITIONS, a[ROPE_RD] / 2, 0);
    g.sin = matrix(r, OP_IN, OP_ACT, "sin", rope_sin, ROPE_POSITIONS, a[ROPE_RD] / 2, 0);
    g.position_ids =
        below(r, "position_ids", a[ROPE_AXES] == 3 ? 3 : OP_VECTOR, a[ROPE_T], ROPE_POSITIONS);
    return g;
}

static ith_status qk_norm_rope_forward(op_run *r, const int64_t *a)
{
    rope_args g = rope_make(r, a, a[ROPE_ALIAS] != 0);
    ith_tensor q_out = g.q, k_out = g.k;
    if (!a[ROPE_ALIAS]) {
        q_out = heads(r, OP_OUT, OP_ACT, "q_out", NULL, a[ROPE_T], a[ROPE_HQ], a[ROPE_DH], 0);
        k_out = heads(r, OP_OUT, OP_ACT, "k_out", NULL, a[ROPE_T], a[ROPE_HKV], a[ROPE_DH], 8);
    }
    OP_READY(r);
    return ith_qk_norm_rope_forward(r->ctx, q_out, k_out, g.q_rstd, g.k_rstd, g.q, g.k, g.q_w,
                                    g.k_w, g.cos, g.sin, g.position_ids, 1e-6F,
                                    (float)a[ROPE_OFFSET]);
}

/* alias: dq and dk are dq_out and dk_out, all in one dqkv buffer whose v part must stay. */
static ith_status qk_norm_rope_backward(op_run *r, const int64_t *a)
{
    rope_args g = rope_make(r, a, false);
    ith_tensor none = ith_tensor_none(), dq, dk, dq_out, dk_out, dq_w = none, dk_w = none;
    split_qk(qkv_buffer(r, OP_INOUT, "dqkv", a), a, &dq, &dk);
    split_qk(qkv_buffer(r, OP_IN, "dqkv_out", a), a, &dq_out, &dk_out);
    if (a[ROPE_ALIAS]) {
        dq_out = dq;
        dk_out = dk;
    }
    if (a[ROPE_NORM]) {
        dq_w = vector(r, OP_INOUT, OP_STAT, "dq_w", op_normal, a[ROPE_DH]);
        dk_w = vector(r, OP_INOUT, OP_STAT, "dk_w", op_normal, a[ROPE_DH]);
    }
    ith_tensor q_out =
        heads(r, OP_OUT, OP_ACT, "q_out", NULL, a[ROPE_T], a[ROPE_HQ], a[ROPE_DH], 0);
    ith_tensor k_out =
        heads(r, OP_OUT, OP_ACT, "k_out", NULL, a[ROPE_T], a[ROPE_HKV], a[ROPE_DH], 0);
    OP_READY(r);
    ITH_TRY(ith_qk_norm_rope_forward(r->ctx, q_out, k_out, g.q_rstd, g.k_rstd, g.q, g.k, g.q_w,
                                     g.k_w, g.cos, g.sin, g.position_ids, 1e-6F,
                                     (float)a[ROPE_OFFSET]));
    return ith_qk_norm_rope_backward(r->ctx, dq, dk, dq_w, dk_w, dq_out, dk_out, g.q, g.k, g.q_rstd,
                                     g.k_rstd, g.q_w, g.k_w, g.cos, g.sin, g.position_ids,
                                     (float)a[ROPE_OFFSET]);
}

/* ---- matrix products ---- */

enum { LIN_T, LIN_N, LIN_K, LIN_PAD, LIN_ACC, LIN_STAT_Y };

static ith_status linear_forward(op_run *r, const int64_t *a)
{
    ith_tensor y = matrix(r, a[LIN_ACC] ? OP_INOUT : OP_OUT, a[LIN_STAT_Y] ? OP_STAT : OP_ACT, "y",
                          op_normal, a[LIN_T], a[LIN_N], a[LIN_PAD]);
    ith_tensor x = matrix(r, OP_IN, OP_ACT, "x", op_normal, a[LIN_T], a[LIN_K], a[LIN_PAD]);
    ith_tensor w = matrix(r, OP_IN, OP_ACT, "w", op_small, a[LIN_N], a[LIN_K], 0);
    OP_READY(r);
    return ith_linear_forward(r->ctx, y, x, w, a[LIN_ACC] != 0);
}

static ith_status linear_backward_input(op_run *r, const int64_t *a)
{
    ith_tensor dx = matrix(r, a[LIN_ACC] ? OP_INOUT : OP_OUT, OP_ACT, "dx", op_normal, a[LIN_T],
                           a[LIN_K], a[LIN_PAD]);
    ith_tensor dy = matrix(r, OP_IN, OP_ACT, "dy", op_normal, a[LIN_T], a[LIN_N], a[LIN_PAD]);
    ith_tensor w = matrix(r, OP_IN, OP_ACT, "w", op_small, a[LIN_N], a[LIN_K], 0);
    OP_READY(r);
    return ith_linear_backward_input(r->ctx, dx, dy, w, a[LIN_ACC] != 0);
}

static ith_status linear_backward_weight(op_run *r, const int64_t *a)
{
    ith_tensor dw = matrix(r, OP_INOUT, OP_STAT, "dw", op_normal, a[LIN_N], a[LIN_K], 0);
    ith_tensor dy = matrix(r, OP_IN, OP_ACT, "dy", op_normal, a[LIN_T], a[LIN_N], a[LIN_PAD]);
    ith_tensor x = matrix(r, OP_IN, OP_ACT, "x", op_normal, a[LIN_T], a[LIN_K], a[LIN_PAD]);
    OP_READY(r);
    return ith_linear_backward_weight(r->ctx, dw, dy, x);
}

/* ---- attention ---- */

/* Borders of packed documents: name them by index in the parameter `docs`. */
typedef struct {
    int64_t num_docs;
    int32_t cu[10];
} document_list;

static const document_list document_lists[] = {
    {0, {0}},                            /* 0: no document */
    {1, {0, 0}},                         /* 1: an empty one */
    {1, {0, 1}},                         /* 2: one token */
    {1, {0, 37}},                        /* 3: odd */
    {6, {0, 1, 1, 2, 39, 39, 41}},       /* 4: lengths 1, 0, 1, 37, 0, 2 */
    {1, {0, 150}},                       /* 5 */
    {3, {0, 64, 128, 192}},              /* 6: equal, the size of a tile */
    {4, {0, 257, 258, 387, 515}},        /* 7: long beside short, tiles not filled */
    {9, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}, /* 8: all single */
    {2, {0, 128, 256}},                  /* 9: equal */
    {2, {0, 100, 17000}},                /* 10: longer than a stretch of the CUDA delta rule */
    {1, {0, 65536}},                     /* 11, 12: as long as training goes */
    {1, {0, 262144}},
    {1, {0, 5000}}, /* 13: so long that the CUDA delta rule walks it in pieces */
};

static ith_seqs make_seqs(op_run *r, int64_t docs, int64_t *rows)
{
    const document_list *list = &document_lists[docs];
    ith_seqs seqs = {.num_docs = list->num_docs};
    seqs.cu_seqlens = op_ints(r, "cu_seqlens", list->cu, OP_VECTOR, list->num_docs + 1);
    seqs.cu_host = op_host_ints(r, seqs.cu_seqlens);
    for (int64_t i = 0; i < list->num_docs; i++)
        seqs.max_len = ith_max_i64(seqs.max_len, list->cu[i + 1] - list->cu[i]);
    *rows = list->cu[list->num_docs];
    return seqs;
}

enum { ATT_DOCS, ATT_HQ, ATT_HKV, ATT_DH, ATT_CAUSAL, ATT_PAD };

typedef struct {
    ith_tensor q, k, v;
} qkv_views;

static qkv_views attention_views(ith_tensor qkv, const int64_t *a)
{
    int64_t q = a[ATT_HQ] * a[ATT_DH], kv = a[ATT_HKV] * a[ATT_DH];
    qkv_views g = {ith_split_heads(ith_col_range(qkv, 0, q), a[ATT_HQ]),
                   ith_split_heads(ith_col_range(qkv, q, q + kv), a[ATT_HKV]),
                   ith_split_heads(ith_col_range(qkv, q + kv, q + 2 * kv), a[ATT_HKV])};
    return g;
}

static float attention_scale(const int64_t *a)
{
    return 1 / sqrtf((float)a[ATT_DH]);
}

static ith_status attention_forward(op_run *r, const int64_t *a)
{
    int64_t rows = 0, cols = (a[ATT_HQ] + 2 * a[ATT_HKV]) * a[ATT_DH];
    ith_seqs seqs = make_seqs(r, a[ATT_DOCS], &rows);
    ith_tensor qkv = matrix(r, OP_IN, OP_ACT, "qkv", op_normal, rows, cols, a[ATT_PAD]);
    ith_tensor o = heads(r, OP_OUT, OP_ACT, "o", NULL, rows, a[ATT_HQ], a[ATT_DH], a[ATT_PAD]);
    ith_tensor lse = matrix(r, OP_OPAQUE, OP_STAT, "lse", NULL, rows, a[ATT_HQ], 0);
    OP_READY(r);
    qkv_views in = attention_views(qkv, a);
    return ith_attention_forward(r->ctx, o, lse, in.q, in.k, in.v, seqs, attention_scale(a),
                                 a[ATT_CAUSAL] != 0);
}

static ith_status attention_backward(op_run *r, const int64_t *a)
{
    int64_t rows = 0, cols = (a[ATT_HQ] + 2 * a[ATT_HKV]) * a[ATT_DH];
    ith_seqs seqs = make_seqs(r, a[ATT_DOCS], &rows);
    ith_tensor qkv = matrix(r, OP_IN, OP_ACT, "qkv", op_normal, rows, cols, a[ATT_PAD]);
    ith_tensor dqkv = matrix(r, OP_OUT, OP_ACT, "dqkv", NULL, rows, cols, a[ATT_PAD]);
    ith_tensor o = heads(r, OP_OUT, OP_ACT, "o", NULL, rows, a[ATT_HQ], a[ATT_DH], 0);
    ith_tensor do_ = heads(r, OP_IN, OP_ACT, "do", op_normal, rows, a[ATT_HQ], a[ATT_DH], 0);
    ith_tensor lse = matrix(r, OP_OPAQUE, OP_STAT, "lse", NULL, rows, a[ATT_HQ], 0);
    OP_READY(r);
    qkv_views in = attention_views(qkv, a), d = attention_views(dqkv, a);
    float scale = attention_scale(a);
    ITH_TRY(
        ith_attention_forward(r->ctx, o, lse, in.q, in.k, in.v, seqs, scale, a[ATT_CAUSAL] != 0));
    return ith_attention_backward(r->ctx, d.q, d.k, d.v, do_, in.q, in.k, in.v, o, lse, seqs, scale,
                                  a[ATT_CAUSAL] != 0);
}

/* Of a part that has no key now and then. */
static double fill_lse(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return ith_rng_below(r->seed, stream + 99, (uint64_t)n, 3) ? op_normal(r, stream, t, n)
                                                               : -HUGE_VAL;
}

static ith_status attention_merge(op_run *r, const int64_t *a)
{
    ith_tensor o = heads(r, OP_INOUT, OP_STAT, "o", op_normal, a[0], a[1], a[2], 0);
    ith_tensor lse = matrix(r, OP_INOUT, OP_STAT, "lse", fill_lse, a[0], a[1], 0);
    ith_tensor part = heads(r, OP_IN, OP_STAT, "part_o", op_normal, a[0], a[1], a[2], 0);
    ith_tensor part_lse = matrix(r, OP_IN, OP_STAT, "part_lse", fill_lse, a[0], a[1], 0);
    OP_READY(r);
    return ith_attention_merge(r->ctx, o, lse, part, part_lse);
}

/* Block diffusion: documents [noisy; clean] whose noisy part holds every `keep`-th block; keep 0:
 * no noisy rows, blocks alone. */
enum { BLK_DOCS, BLK_SIZE, BLK_KEEP, BLK_HQ, BLK_HKV, BLK_DH, BLK_PAD };

static ith_seqs make_block_seqs(op_run *r, const int64_t *a, int64_t *rows)
{
    const document_list *list = &document_lists[a[BLK_DOCS]];
    ith_seqs seqs = {.num_docs = list->num_docs, .block = a[BLK_SIZE]};
    int32_t cu[10] = {0}, noisy[10] = {0}, position[2048];
    int64_t n = 0, b = a[BLK_SIZE];
    for (int64_t i = 0; i < list->num_docs; i++) {
        int32_t len = list->cu[i + 1] - list->cu[i];
        for (int32_t p = 0; p < len && a[BLK_KEEP]; p++)
            if (p / b % a[BLK_KEEP] == 0) {
                position[n++] = p;
                noisy[i]++;
            }
        for (int32_t p = 0; p < len; p++)
            position[n++] = p;
        cu[i + 1] = (int32_t)n;
        seqs.max_len = ith_max_i64(seqs.max_len, len + noisy[i]);
    }
    ITH_ASSERT(n <= 2048);
    seqs.cu_seqlens = op_ints(r, "cu_seqlens", cu, OP_VECTOR, list->num_docs + 1);
    seqs.cu_host = op_host_ints(r, seqs.cu_seqlens);
    if (a[BLK_KEEP]) {
        seqs.noisy = op_ints(r, "noisy", noisy, OP_VECTOR, list->num_docs);
        seqs.noisy_host = op_host_ints(r, seqs.noisy);
        seqs.position = op_ints(r, "position", position, OP_VECTOR, n);
        seqs.position_host = op_host_ints(r, seqs.position);
    }
    *rows = n;
    return seqs;
}

static ith_status block_attention(op_run *r, const int64_t *a, bool backward)
{
    const int64_t plain[] = {0, a[BLK_HQ], a[BLK_HKV], a[BLK_DH], 1, a[BLK_PAD]};
    int64_t rows = 0, cols = (a[BLK_HQ] + 2 * a[BLK_HKV]) * a[BLK_DH];
    ith_seqs seqs = make_block_seqs(r, a, &rows);
    ith_tensor qkv = matrix(r, OP_IN, OP_ACT, "qkv", op_normal, rows, cols, a[BLK_PAD]), dqkv, do_;
    ith_tensor o = heads(r, OP_OUT, OP_ACT, "o", NULL, rows, a[BLK_HQ], a[BLK_DH], 0);
    ith_tensor lse = matrix(r, OP_OPAQUE, OP_STAT, "lse", NULL, rows, a[BLK_HQ], 0);
    if (backward) {
        dqkv = matrix(r, OP_OUT, OP_ACT, "dqkv", NULL, rows, cols, a[BLK_PAD]);
        do_ = heads(r, OP_IN, OP_ACT, "do", op_normal, rows, a[BLK_HQ], a[BLK_DH], 0);
    }
    OP_READY(r);
    qkv_views in = attention_views(qkv, plain);
    float scale = attention_scale(plain);
    ITH_TRY(ith_attention_forward(r->ctx, o, lse, in.q, in.k, in.v, seqs, scale, true));
    if (!backward)
        return ITH_OK;
    qkv_views d = attention_views(dqkv, plain);
    return ith_attention_backward(r->ctx, d.q, d.k, d.v, do_, in.q, in.k, in.v, o, lse, seqs, scale,
                                  true);
}

static ith_status attention_blocks_forward(op_run *r, const int64_t *a)
{
    return block_attention(r, a, false);
}

static ith_status attention_blocks_backward(op_run *r, const int64_t *a)
{
    return block_attention(r, a, true);
}

/* Windows: rows [q0, q1) against keys [k0, k1) of such a batch, in thousandths of its rows; block
 * -1: no mask but the documents. Backward reads the statistics of the whole attention. */
enum { WIN_Q0 = BLK_PAD, WIN_Q1, WIN_K0, WIN_K1 };

static ith_status window_attention(op_run *r, const int64_t *a, bool backward)
{
    int64_t block_args[] = {a[BLK_DOCS], ith_max_i64(a[BLK_SIZE], 0), a[BLK_KEEP]};
    int64_t rows = 0, hq = a[BLK_HQ], hkv = a[BLK_HKV], dim = a[BLK_DH];
    ith_seqs whole = make_block_seqs(r, block_args, &rows), seqs = whole;
    int64_t q0 = rows * a[WIN_Q0] / 1000, q1 = rows * a[WIN_Q1] / 1000;
    int64_t k0 = rows * a[WIN_K0] / 1000, k1 = rows * a[WIN_K1] / 1000;
    bool causal = a[BLK_SIZE] >= 0;
    float scale = 1 / sqrtf((float)dim);
    seqs.window = true;
    seqs.q_first = q0;
    seqs.k_first = k0;
    ith_tensor q = heads(r, OP_IN, OP_ACT, "q", op_normal, rows, hq, dim, 0);
    ith_tensor k = heads(r, OP_IN, OP_ACT, "k", op_normal, rows, hkv, dim, 0);
    ith_tensor v = heads(r, OP_IN, OP_ACT, "v", op_normal, rows, hkv, dim, 0);
    ith_tensor part_q = ith_row_range(q, q0, q1), part_k = ith_row_range(k, k0, k1),
               part_v = ith_row_range(v, k0, k1);
    if (!backward) {
        ith_tensor o = heads(r, OP_OUT, OP_STAT, "o", NULL, q1 - q0, hq, dim, 0);
        ith_tensor lse = matrix(r, OP_OPAQUE, OP_STAT, "lse", NULL, q1 - q0, hq, 0);
        OP_READY(r);
        return ith_attention_forward(r->ctx, o, lse, part_q, part_k, part_v, seqs, scale, causal);
    }
    ith_tensor o = heads(r, OP_OUT, OP_ACT, "o", NULL, rows, hq, dim, 0);
    ith_tensor lse = matrix(r, OP_OPAQUE, OP_STAT, "lse", NULL, rows, hq, 0);
    ith_tensor do_ = heads(r, OP_IN, OP_ACT, "do", op_normal, q1 - q0, hq, dim, 0);
    ith_tensor dq = heads(r, OP_OUT, OP_STAT, "dq", NULL, q1 - q0, hq, dim, 0);
    ith_tensor dk = heads(r, OP_OUT, OP_STAT, "dk", NULL, k1 - k0, hkv, dim, 0);
    ith_tensor dv = heads(r, OP_OUT, OP_STAT, "dv", NULL, k1 - k0, hkv, dim, 0);
    OP_READY(r);
    ITH_TRY(ith_attention_forward(r->ctx, o, lse, q, k, v, whole, scale, causal));
    return ith_attention_backward(r->ctx, dq, dk, dv, do_, part_q, part_k, part_v,
                                  ith_row_range(o, q0, q1), ith_row_range(lse, q0, q1), seqs, scale,
                                  causal);
}

static ith_status attention_window_forward(op_run *r, const int64_t *a)
{
    return window_attention(r, a, false);
}

static ith_status attention_window_backward(op_run *r, const int64_t *a)
{
    return window_attention(r, a, true);
}

enum { DEC_B, DEC_NEW, DEC_C, DEC_HQ, DEC_HKV, DEC_DH, DEC_PART, DEC_SHARED };

/* Lengths: full, idle, and random ones that hold the new rows. shared: all have one cache. */
static ith_status attention_decode(op_run *r, const int64_t *a)
{
    int64_t rows = a[DEC_B] * a[DEC_NEW];
    int64_t cache[4] = {a[DEC_SHARED] ? 1 : a[DEC_B], a[DEC_C], a[DEC_HKV], a[DEC_DH]};
    ith_tensor o =
        heads(r, OP_OUT, a[DEC_PART] ? OP_STAT : OP_ACT, "o", NULL, rows, a[DEC_HQ], a[DEC_DH], 0);
    ith_tensor lse = a[DEC_PART] ? matrix(r, OP_OUT, OP_STAT, "lse", NULL, rows, a[DEC_HQ], 0)
                                 : ith_tensor_none();
    ith_tensor q = heads(r, OP_IN, OP_ACT, "q", op_normal, rows, a[DEC_HQ], a[DEC_DH], 8);
    ith_tensor k = op_make(r, OP_IN, OP_ACT, "k_cache", op_normal, 4, cache, 0);
    ith_tensor v = op_make(r, OP_IN, OP_ACT, "v_cache", op_normal, 4, cache, 0);
    int32_t lengths[32] = {0};
    ITH_ASSERT(a[DEC_B] <= 32);
    for (int64_t b = 0; b < a[DEC_B]; b++)
        lengths[b] = (int32_t)(a[DEC_NEW] +
                               ith_rng_below(r->seed, 77, (uint64_t)b, a[DEC_C] - a[DEC_NEW] + 1));
    lengths[0] = (int32_t)a[DEC_C];
    if (a[DEC_B] > 1)
        lengths[1] = 0;
    ith_tensor len = op_ints(r, "lengths", lengths, OP_VECTOR, a[DEC_B]);
    OP_READY(r);
    k.shape[0] = v.shape[0] = a[DEC_B];
    if (a[DEC_SHARED])
        k.stride[0] = v.stride[0] = 0;
    return ith_attention_decode(r->ctx, o, lse, q, k, v, len, 1 / sqrtf((float)a[DEC_DH]));
}

/* ---- SwiGLU ---- */

enum { GLU_T, GLU_I, GLU_PAD, GLU_H, GLU_ALIAS };

static double wide_normal(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return n % 31 == 0 ? 100 * op_normal(r, stream, t, n) : op_normal(r, stream, t, n);
}

static ith_status swiglu_forward(op_run *r, const int64_t *a)
{
    ith_tensor h = matrix(r, OP_OUT, OP_ACT, "h", NULL, a[GLU_T], a[GLU_I], a[GLU_PAD]);
    ith_tensor in =
        matrix(r, OP_IN, OP_ACT, "gate_up", wide_normal, a[GLU_T], 2 * a[GLU_I], a[GLU_PAD]);
    OP_READY(r);
    return ith_swiglu_forward(r->ctx, h, in);
}

/* alias: dgate_up is gate_up and h is dh. */
static ith_status swiglu_backward(op_run *r, const int64_t *a)
{
    int64_t rows = a[GLU_T], width = a[GLU_I], pad = a[GLU_PAD];
    op_role role = a[GLU_ALIAS] ? OP_INOUT : OP_IN;
    ith_tensor in = matrix(r, role, OP_ACT, "gate_up", wide_normal, rows, 2 * width, pad);
    ith_tensor dh = matrix(r, a[GLU_H] ? role : OP_IN, OP_ACT, "dh", op_normal, rows, width, pad);
    ith_tensor h = ith_tensor_none(), din = in;
    if (!a[GLU_ALIAS])
        din = matrix(r, OP_OUT, OP_ACT, "dgate_up", NULL, rows, 2 * width, pad);
    if (a[GLU_H])
        h = a[GLU_ALIAS] ? dh : matrix(r, OP_OUT, OP_ACT, "h", NULL, rows, width, pad);
    OP_READY(r);
    return ith_swiglu_backward(r->ctx, din, h, dh, in);
}

/* ---- rows and elements ---- */

enum { ROWS_M, ROWS_T, ROWS_D, ROWS_PAD, ROWS_KIND };

static ith_status gather_rows(op_run *r, const int64_t *a)
{
    op_class kind = (op_class)a[ROWS_KIND];
    ith_tensor y = matrix(r, OP_OUT, kind, "y", NULL, a[ROWS_M], a[ROWS_D], a[ROWS_PAD]);
    ith_tensor x = matrix(r, OP_IN, kind, "x", op_normal, a[ROWS_T], a[ROWS_D], a[ROWS_PAD]);
    ith_tensor idx = below(r, "idx", OP_VECTOR, a[ROWS_M], a[ROWS_T]);
    OP_READY(r);
    return ith_gather_rows(r->ctx, y, x, idx);
}

static ith_status scatter_rows(op_run *r, const int64_t *a)
{
    op_class kind = (op_class)a[ROWS_KIND];
    ith_tensor y = matrix(r, OP_INOUT, kind, "y", op_normal, a[ROWS_T], a[ROWS_D], a[ROWS_PAD]);
    ith_tensor x = matrix(r, OP_IN, kind, "x", op_normal, a[ROWS_M], a[ROWS_D], a[ROWS_PAD]);
    ith_tensor idx = distinct(r, "idx", a[ROWS_M], a[ROWS_T]);
    OP_READY(r);
    return ith_scatter_rows(r->ctx, y, x, idx);
}

/* G ranges of 0 to `most` rows. */
static ith_status list_ranges(op_run *r, const int64_t *a)
{
    static int32_t offsets[1025];
    ITH_ASSERT(a[0] <= 1024);
    offsets[0] = 0;
    for (int64_t g = 0; g < a[0]; g++)
        offsets[g + 1] = offsets[g] + (int32_t)ith_rng_below(3, 1, (uint64_t)g, a[1] + 1);
    ith_tensor index = op_make(r, OP_OUT, OP_I32, "index", NULL, 1, (int64_t[]){offsets[a[0]]}, 0);
    ith_tensor first = below(r, "first", OP_VECTOR, a[0], 1000);
    ith_tensor at = op_ints(r, "offsets", offsets, OP_VECTOR, a[0] + 1);
    OP_READY(r);
    return ith_list_ranges(r->ctx, index, first, at);
}

enum { ELEM_T, ELEM_D, ELEM_PAD, ELEM_MODE };

/* mode: 0 apart, 1 y is a, 2 y is b. */
static ith_status add(op_run *r, const int64_t *a)
{
    int64_t mode = a[ELEM_MODE];
    ith_tensor p = matrix(r, mode == 1 ? OP_INOUT : OP_IN, OP_ACT, "a", op_normal, a[ELEM_T],
                          a[ELEM_D], a[ELEM_PAD]);
    ith_tensor q =
        matrix(r, mode == 2 ? OP_INOUT : OP_IN, OP_ACT, "b", op_normal, a[ELEM_T], a[ELEM_D], 0);
    ith_tensor y = mode == 1 ? p
                   : mode == 2
                       ? q
                       : matrix(r, OP_OUT, OP_ACT, "y", NULL, a[ELEM_T], a[ELEM_D], a[ELEM_PAD]);
    OP_READY(r);
    return ith_add(r->ctx, y, p, q);
}

/* mode: 0 act to f32, 1 f32 to act, 2 act to act. */
static ith_status cast(op_run *r, const int64_t *a)
{
    int64_t mode = a[ELEM_MODE];
    ith_tensor y = matrix(r, OP_OUT, mode == 0 ? OP_STAT : OP_ACT, "y", NULL, a[ELEM_T], a[ELEM_D],
                          a[ELEM_PAD]);
    ith_tensor x = matrix(r, OP_IN, mode == 1 ? OP_STAT : OP_ACT, "x", op_normal, a[ELEM_T],
                          a[ELEM_D], a[ELEM_PAD]);
    OP_READY(r);
    return ith_cast(r->ctx, y, x);
}

static ith_status zero(op_run *r, const int64_t *a)
{
    op_class kind = (op_class)a[ELEM_MODE];
    ith_tensor y = matrix(r, OP_OUT, kind, "y", NULL, a[ELEM_T], a[ELEM_D], a[ELEM_PAD]);
    OP_READY(r);
    return ith_zero(r->ctx, y);
}

/* ---- loss ---- */

enum { CE_M, CE_V, CE_PAD, CE_GRAD, CE_STAT, CE_SPREAD };

static double near_logits(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return 3 * op_normal(r, stream, t, n);
}

/* One word far above the others: the sum needs its maximum taken out. */
static double far_logits(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return 3 * op_normal(r, stream, t, n) + (n % 97 == 5 ? 300 : -200);
}

/* Every fifth row carries no loss. */
static double some_seeds(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return n % 5 == 4 ? 0 : op_positive(r, stream, t, n);
}

static ith_status cross_entropy(op_run *r, const int64_t *a)
{
    ith_tensor seeds = ith_tensor_none();
    ith_tensor loss = vector(r, OP_OUT, OP_STAT, "row_loss", NULL, a[CE_M]);
    ith_tensor logits =
        matrix(r, a[CE_GRAD] ? OP_INOUT : OP_IN, a[CE_STAT] ? OP_STAT : OP_ACT, "logits",
               a[CE_SPREAD] ? far_logits : near_logits, a[CE_M], a[CE_V], a[CE_PAD]);
    ith_tensor labels = below(r, "labels", OP_VECTOR, a[CE_M], a[CE_V]);
    if (a[CE_GRAD])
        seeds = vector(r, OP_IN, OP_STAT, "seeds", some_seeds, a[CE_M]);
    OP_READY(r);
    return ith_cross_entropy(r->ctx, loss, logits, labels, seeds, a[CE_GRAD] != 0);
}

/* The label stands first in every other row by far: it is right in those. */
static double sure_logits(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    int64_t row = n / t->shape[1], word = n % t->shape[1];
    return 2 * op_normal(r, stream, t, n) + (row % 2 == 0 && word == row * 7 % t->shape[1] ? 8 : 0);
}

static ith_status cross_entropy_confident(op_run *r, const int64_t *a)
{
    int64_t m = a[CE_M];
    int32_t *values = ith_calloc(m + 1, 4);
    for (int64_t i = 0; values && i < m; i++)
        values[i] = (int32_t)(i * 7 % a[CE_V]);
    ith_tensor seeds = ith_tensor_none();
    ith_tensor loss = vector(r, OP_OUT, OP_STAT, "row_loss", NULL, m);
    ith_tensor confidence = vector(r, OP_OUT, OP_STAT, "row_confidence", NULL, m);
    ith_tensor right = vector(r, OP_OUT, OP_STAT, "right", NULL, m);
    ith_tensor logits = matrix(r, a[CE_GRAD] ? OP_INOUT : OP_IN, a[CE_STAT] ? OP_STAT : OP_ACT,
                               "logits", sure_logits, m, a[CE_V], a[CE_PAD]);
    ith_tensor labels = op_ints(r, "labels", values, OP_VECTOR, m);
    ith_free(values);
    if (a[CE_GRAD])
        seeds = vector(r, OP_IN, OP_STAT, "seeds", some_seeds, m);
    OP_READY(r);
    return ith_cross_entropy_confident(r->ctx, loss, confidence, right, logits, labels, seeds, 1.5F,
                                       a[CE_GRAD] != 0);
}

enum { CHOOSE_T, CHOOSE_V, CHOOSE_PAD, CHOOSE_BARRED, CHOOSE_DRAWS };

/* Every third row takes the likeliest. */
static double some_draws(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)t;
    return n % 3 == 2 ? -1 : ith_rng_uniform(r->seed, stream, (uint64_t)n);
}

static ith_status choose_ids(op_run *r, const int64_t *a)
{
    int64_t rows = a[CHOOSE_T];
    ith_tensor ids = op_make(r, OP_OUT, OP_I32, "ids", NULL, 1, &rows, 0);
    ith_tensor p = vector(r, OP_OUT, OP_STAT, "probability", NULL, rows);
    ith_tensor logits =
        matrix(r, OP_IN, OP_ACT, "logits", near_logits, rows, a[CHOOSE_V], a[CHOOSE_PAD]);
    ith_tensor draws =
        a[CHOOSE_DRAWS] ? vector(r, OP_IN, OP_STAT, "draws", some_draws, rows) : ith_tensor_none();
    OP_READY(r);
    return ith_choose_ids(r->ctx, ids, p, logits, draws, a[CHOOSE_DRAWS] ? 0.7F : 1.0F,
                          a[CHOOSE_BARRED]);
}

enum { DOT_N, DOT_B };

static ith_status dot_accumulate(op_run *r, const int64_t *a)
{
    ith_tensor out = vector(r, OP_INOUT, OP_F64, "out", op_positive, 1);
    ith_tensor x = vector(r, OP_IN, OP_STAT, "a", op_positive, a[DOT_N]);
    ith_tensor b =
        a[DOT_B] ? vector(r, OP_IN, OP_STAT, "b", op_positive, a[DOT_N]) : ith_tensor_none();
    OP_READY(r);
    return ith_dot_accumulate(r->ctx, out, x, b);
}

/* ---- experts ---- */

enum { MOE_T, MOE_E, MOE_K, MOE_NORM, MOE_AUX };

/* A coarse grid: equal logits are common (ties go to the lower index), others are far enough apart
 * that rounding cannot reorder them. */
static double grid_logits(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return round(op_normal(r, stream, t, n) * 16) / 8;
}

typedef struct {
    ith_tensor w, idx, probs, logits;
} router_args;

static router_args router_make(op_run *r, const int64_t *a)
{
    int64_t topk[2] = {a[MOE_T], a[MOE_K]};
    router_args g = {
        matrix(r, OP_OUT, OP_STAT, "topk_w", NULL, a[MOE_T], a[MOE_K], 0),
        op_make(r, OP_OUT, OP_I32, "topk_idx", NULL, 2, topk, 0),
        matrix(r, OP_OUT, OP_STAT, "probs", NULL, a[MOE_T], a[MOE_E], 0),
        matrix(r, OP_IN, OP_ACT, "logits", grid_logits, a[MOE_T], a[MOE_E], 0),
    };
    return g;
}

static ith_status router_forward(op_run *r, const int64_t *a)
{
    router_args g = router_make(r, a);
    OP_READY(r);
    return ith_router_forward(r->ctx, g.w, g.idx, g.probs, g.logits, a[MOE_NORM] != 0);
}

static ith_status router_backward(op_run *r, const int64_t *a)
{
    router_args g = router_make(r, a);
    ith_tensor dlogits = matrix(r, OP_OUT, OP_ACT, "dlogits", NULL, a[MOE_T], a[MOE_E], 0);
    ith_tensor dtopk = matrix(r, OP_IN, OP_STAT, "dtopk_w", op_normal, a[MOE_T], a[MOE_K], 0);
    ith_tensor fraction = ith_tensor_none();
    if (a[MOE_AUX])
        fraction = vector(r, OP_IN, OP_STAT, "expert_fraction", op_positive, a[MOE_E]);
    OP_READY(r);
    ITH_TRY(ith_router_forward(r->ctx, g.w, g.idx, g.probs, g.logits, a[MOE_NORM] != 0));
    return ith_router_backward(r->ctx, dlogits, dtopk, g.w, g.idx, g.probs, fraction, 0.37F,
                               a[MOE_NORM] != 0);
}

enum { GR_T, GR_E, GR_K, GR_GROUPS, GR_STAY, GR_BIAS };

/* Equal biased scores within a group are common here as well. */
static double grid_bias(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return round(op_normal(r, stream, t, n)) / 4;
}

static ith_status group_router(op_run *r, const int64_t *a, bool backward)
{
    int64_t topk[2] = {a[GR_T], a[GR_K]};
    ith_tensor w = matrix(r, OP_OUT, OP_STAT, "topk_w", NULL, a[GR_T], a[GR_K], 0);
    ith_tensor idx = op_make(r, OP_OUT, OP_I32, "topk_idx", NULL, 2, topk, 0);
    ith_tensor scores = matrix(r, OP_OUT, OP_STAT, "scores", NULL, a[GR_T], a[GR_E], 0);
    ith_tensor z = matrix(r, OP_IN, OP_STAT, "logits", grid_logits, a[GR_T], a[GR_E], 0);
    ith_tensor bias = ith_tensor_none(), dlogits, dtopk;
    if (a[GR_BIAS])
        bias = vector(r, OP_IN, OP_STAT, "bias", grid_bias, a[GR_E]);
    if (backward) {
        dlogits = matrix(r, OP_OUT, OP_ACT, "dlogits", NULL, a[GR_T], a[GR_E], 0);
        dtopk = matrix(r, OP_IN, OP_STAT, "dtopk_w", op_normal, a[GR_T], a[GR_K], 0);
    }
    OP_READY(r);
    ITH_TRY(
        ith_group_router_forward(r->ctx, w, idx, scores, z, bias, a[GR_GROUPS], a[GR_STAY], 2.5F));
    return backward ? ith_group_router_backward(r->ctx, dlogits, dtopk, idx, scores, 2.5F) : ITH_OK;
}

static ith_status group_router_forward(op_run *r, const int64_t *a)
{
    return group_router(r, a, false);
}

static ith_status group_router_backward(op_run *r, const int64_t *a)
{
    return group_router(r, a, true);
}

/* Routing of T tokens to k different experts of E; `skew` 1 sends everything to the last ones. */
static ith_tensor routing(op_run *r, int64_t tokens, int64_t experts, int64_t k, bool skew)
{
    int32_t *values = ith_calloc(tokens * k + 1, (int64_t)sizeof *values);
    int64_t *order = ith_calloc(experts, (int64_t)sizeof *order);
    for (int64_t t = 0; values && order && t < tokens; t++) {
        ith_rng_permutation(r->seed, (uint64_t)(1000 + t), experts, order);
        for (int64_t s = 0; s < k; s++)
            values[t * k + s] = (int32_t)(skew ? experts - 1 - s : order[s]);
    }
    ith_tensor idx = op_ints(r, "topk_idx", values, tokens, k);
    ith_free(values);
    ith_free(order);
    return idx;
}

enum { SORT_T, SORT_E, SORT_K, SORT_SKEW };

typedef struct {
    ith_tensor offsets, source, row_of, idx;
} sort_args;

static sort_args sort_make(op_run *r, int64_t tokens, int64_t experts, int64_t k, bool skew)
{
    int64_t ends = experts + 1, rows = tokens * k, pairs[2] = {tokens, k};
    sort_args g = {op_make(r, OP_OUT, OP_I32, "offsets", NULL, 1, &ends, 0),
                   op_make(r, OP_OUT, OP_I32, "source", NULL, 1, &rows, 0),
                   op_make(r, OP_OUT, OP_I32, "row_of", NULL, 2, pairs, 0),
                   routing(r, tokens, experts, k, skew)};
    return g;
}

static ith_status expert_sort(op_run *r, const int64_t *a)
{
    sort_args g = sort_make(r, a[SORT_T], a[SORT_E], a[SORT_K], a[SORT_SKEW] != 0);
    OP_READY(r);
    return ith_expert_sort(r->ctx, g.offsets, g.source, g.row_of, g.idx);
}

static ith_status expert_load(op_run *r, const int64_t *a)
{
    sort_args g = sort_make(r, a[SORT_T], a[SORT_E], a[SORT_K], a[SORT_SKEW] != 0);
    ith_tensor fraction = vector(r, OP_INOUT, OP_STAT, "fraction", op_positive, a[SORT_E]);
    ith_tensor mean = vector(r, OP_INOUT, OP_STAT, "mean_prob", op_positive, a[SORT_E]);
    ith_tensor probs = matrix(r, OP_IN, OP_STAT, "probs", op_positive, a[SORT_T], a[SORT_E], 0);
    OP_READY(r);
    ITH_TRY(ith_expert_sort(r->ctx, g.offsets, g.source, g.row_of, g.idx));
    return ith_expert_load(r->ctx, fraction, mean, g.offsets, probs, 0.01F);
}

enum { GRP_T, GRP_E, GRP_K, GRP_SKEW, GRP_N, GRP_D, GRP_TAIL };

/* tail: rows after the last expert's, which must stay as they are. */
static ith_status grouped(op_run *r, const int64_t *a, int which)
{
    int64_t rows = a[GRP_T] * a[GRP_K] + a[GRP_TAIL];
    int64_t w_shape[3] = {a[GRP_E], a[GRP_N], a[GRP_D]};
    sort_args g = sort_make(r, a[GRP_T], a[GRP_E], a[GRP_K], a[GRP_SKEW] != 0);
    op_role out = a[GRP_TAIL] ? OP_INOUT : OP_OUT;
    ith_tensor x = matrix(r, which == 1 ? out : OP_IN, OP_ACT, which == 1 ? "dx" : "x", op_normal,
                          rows, a[GRP_D], 0);
    ith_tensor y = matrix(r, which == 0 ? out : OP_IN, OP_ACT, which == 0 ? "y" : "dy", op_normal,
                          rows, a[GRP_N], 0);
    ith_tensor w = op_make(r, which == 2 ? OP_INOUT : OP_IN, which == 2 ? OP_STAT : OP_ACT,
                           which == 2 ? "dw" : "w", op_small, 3, w_shape, 0);
    OP_READY(r);
    ITH_TRY(ith_expert_sort(r->ctx, g.offsets, g.source, g.row_of, g.idx));
    if (which == 0)
        return ith_grouped_linear_forward(r->ctx, y, x, w, g.offsets);
    if (which == 1)
        return ith_grouped_linear_backward_input(r->ctx, x, y, w, g.offsets);
    return ith_grouped_linear_backward_weight(r->ctx, w, y, x, g.offsets);
}

static ith_status grouped_linear_forward(op_run *r, const int64_t *a)
{
    return grouped(r, a, 0);
}

static ith_status grouped_linear_backward_input(op_run *r, const int64_t *a)
{
    return grouped(r, a, 1);
}

static ith_status grouped_linear_backward_weight(op_run *r, const int64_t *a)
{
    return grouped(r, a, 2);
}

enum { COMB_T, COMB_E, COMB_K, COMB_D, COMB_BASE, COMB_WEIGHTS };

/* base: 0 absent, 1 apart, 2 is y. weights 0: all one. */
static ith_status expert_combine(op_run *r, const int64_t *a)
{
    sort_args g = sort_make(r, a[COMB_T], a[COMB_E], a[COMB_K], false);
    ith_tensor none = ith_tensor_none(), base = none, w = none;
    ith_tensor y = matrix(r, a[COMB_BASE] == 2 ? OP_INOUT : OP_OUT, OP_ACT, "y", op_normal,
                          a[COMB_T], a[COMB_D], 0);
    ith_tensor x = matrix(r, OP_IN, OP_ACT, "x", op_normal, a[COMB_T] * a[COMB_K], a[COMB_D], 0);
    if (a[COMB_BASE])
        base = a[COMB_BASE] == 2
                   ? y
                   : matrix(r, OP_IN, OP_ACT, "base", op_normal, a[COMB_T], a[COMB_D], 8);
    if (a[COMB_WEIGHTS])
        w = matrix(r, OP_IN, OP_STAT, "topk_w", op_positive, a[COMB_T], a[COMB_K], 0);
    OP_READY(r);
    ITH_TRY(ith_expert_sort(r->ctx, g.offsets, g.source, g.row_of, g.idx));
    return ith_expert_combine(r->ctx, y, base, x, w, g.row_of);
}

enum { COMBB_T, COMBB_E, COMBB_K, COMBB_D, COMBB_ALIAS };

/* alias: dx is x. */
static ith_status expert_combine_backward(op_run *r, const int64_t *a)
{
    int64_t rows = a[COMBB_T] * a[COMBB_K];
    sort_args g = sort_make(r, a[COMBB_T], a[COMBB_E], a[COMBB_K], false);
    ith_tensor x =
        matrix(r, a[COMBB_ALIAS] ? OP_INOUT : OP_IN, OP_ACT, "x", op_normal, rows, a[COMBB_D], 0);
    ith_tensor dx = a[COMBB_ALIAS] ? x : matrix(r, OP_OUT, OP_ACT, "dx", NULL, rows, a[COMBB_D], 0);
    ith_tensor dw = matrix(r, OP_OUT, OP_STAT, "dtopk_w", NULL, a[COMBB_T], a[COMBB_K], 0);
    ith_tensor dy = matrix(r, OP_IN, OP_ACT, "dy", op_normal, a[COMBB_T], a[COMBB_D], 8);
    ith_tensor w = matrix(r, OP_IN, OP_STAT, "topk_w", op_positive, a[COMBB_T], a[COMBB_K], 0);
    OP_READY(r);
    ITH_TRY(ith_expert_sort(r->ctx, g.offsets, g.source, g.row_of, g.idx));
    return ith_expert_combine_backward(r->ctx, dx, dw, dy, x, w, g.row_of);
}

/* ---- optimizer ---- */

enum { SUM_N, SUM_COLS };

static ith_status sumsq_accumulate(op_run *r, const int64_t *a)
{
    ith_tensor out = vector(r, OP_INOUT, OP_F64, "out", op_positive, 1);
    ith_tensor x = matrix(r, OP_IN, OP_STAT, "x", op_normal, a[SUM_N], a[SUM_COLS], 0);
    OP_READY(r);
    return ith_sumsq_accumulate(r->ctx, out, x);
}

enum { CLIP_VALUE, CLIP_MAX };

static const double clip_sums[] = {0, 4, 1e-30, 1e10, 1e300, HUGE_VAL, -1 /* root is NaN */};

static double clip_sum(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)stream, (void)t, (void)n;
    return clip_sums[r->user];
}

static ith_status clip_scale(op_run *r, const int64_t *a)
{
    r->user = a[CLIP_VALUE];
    ith_tensor norm = vector(r, OP_OUT, OP_F32, "norm", NULL, 1);
    ith_tensor scale = vector(r, OP_OUT, OP_F32, "scale", NULL, 1);
    ith_tensor sumsq = vector(r, OP_IN, OP_F64, "sumsq", clip_sum, 1);
    OP_READY(r);
    return ith_clip_scale(r->ctx, norm, scale, sumsq, (float)a[CLIP_MAX]);
}

enum {
    ADAM_N,
    ADAM_MASTER,
    ADAM_STATE,
    ADAM_STEP,
    ADAM_SKIP,
    ADAM_ZERO,
    ADAM_FIRST,
    ADAM_WILD,
    ADAM_BESIDE
};

static double adam_scale(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)stream, (void)t, (void)n;
    return r->user ? -1 : 0.625;
}

/* From far below the smallest normal f32 to 2^40, and zeros: sqrt and division of their own kind.
 */
static double adam_wild(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    (void)r, (void)t;
    double u = ith_rng_uniform(r->seed, stream, (uint64_t)n), e = floor(188 * u);
    return n % 7 == 3 ? 0 : (n % 2 ? -1 : 1) * ldexp(1 + 188 * u - e, (int)e - 148);
}

static double adam_wild_positive(const op_run *r, uint64_t stream, const ith_tensor *t, int64_t n)
{
    return fabs(adam_wild(r, stream, t, n));
}

/* On the queue for updates, of a device that has one. */
static ith_status enter_beside(ith_ctx *ctx)
{
    ITH_TRY(ctx->device->fork(ctx->device, ITH_QUEUE_UPDATES, ctx->err));
    ith_ctx_enter(ctx, ITH_QUEUE_UPDATES, true);
    return ITH_OK;
}

static ith_status leave_beside(ith_ctx *ctx)
{
    ith_ctx_leave(ctx);
    ITH_TRY(ctx->device->note(ctx->device, ITH_QUEUE_UPDATES, 0, ctx->err));
    return ctx->device->await(ctx->device, ITH_QUEUE_UPDATES, 0, ctx->err);
}

/* state: 0 m and v in f32, 1 in act. Without master, BF16 weights are rounded stochastically. */
static ith_status adamw(op_run *r, const int64_t *a)
{
    int64_t n = a[ADAM_N];
    bool wild = a[ADAM_WILD] != 0, beside = a[ADAM_BESIDE] && r->ctx->device->enter;
    op_class state = a[ADAM_STATE] ? OP_ACT : OP_STAT;
    r->user = a[ADAM_SKIP];
    ith_tensor w = vector(r, OP_INOUT, OP_ACT, "w", op_normal, n);
    ith_tensor master = ith_tensor_none();
    if (a[ADAM_MASTER])
        master = vector(r, OP_INOUT, OP_STAT, "master", op_normal, n);
    ith_tensor m = vector(r, OP_INOUT, state, "m", wild ? adam_wild : op_small, n);
    ith_tensor v = vector(r, OP_INOUT, state, "v", wild ? adam_wild_positive : op_positive, n);
    ith_tensor grad =
        vector(r, a[ADAM_ZERO] ? OP_INOUT : OP_IN, OP_F32, "grad", wild ? adam_wild : op_normal, n);
    ith_tensor scale = vector(r, OP_IN, OP_F32, "scale", adam_scale, 1);
    OP_READY(r);
    ith_adamw_hyper hyper = {1e-3F, 0.9F, 0.999F, 1e-8F, 0.1F, a[ADAM_STEP]};
    if (beside)
        ITH_TRY(enter_beside(r->ctx));
    ith_status status = ith_adamw(r->ctx, w, master, m, v, grad, scale, hyper, 42, a[ADAM_FIRST],
                                  a[ADAM_ZERO] != 0);
    if (beside)
        ITH_TRY(leave_beside(r->ctx));
    return status;
}

/* ---- the table ---- */

/* A relative error of 1e-5 in root mean square: f32 sums in any order stay far below, products in
 * tf32 or bf16 do not. */
#define NMSE 1e-10
/* f32 outputs of bf16 inputs: only the order of f32 sums differs. */
#define FLOOR 1e-5
/* Weights and score gradients rounded to bf16 before their second product (as every fast attention
 * does) add about one rounding of the output, which the plain reference does not have. */
#define FLOOR_ATTENTION 2e-3
/* Chunked forms on tensor cores round what one product hands to the next (Z, P, D, the states and
 * their gradients) to bf16. In double arithmetic with these roundings alone o, dq, dk and dv are
 * off by 2 to 3e-3 of their root mean square, dg and dbeta, which are f32, by up to 3.7e-3; single
 * elements by half as much again. */
#define FLOOR_DELTA 6e-3
/* With f32 results the plain reference rounds nothing, so these roundings stand alone in the bound.
 * P and dS are off by at most half a unit of bf16, 2^-8 of themselves; over mantissas that is 2^-8
 * / sqrt(3) * sqrt(3 / (8 ln 2)) = 1.66e-3 in root mean square. Sums of terms of either sign pass
 * it on as it is: in double arithmetic with these roundings alone the median error of dq, dk and dv
 * on these shapes is 1.65e-3 to 1.68e-3, the largest of 100 draws 2.2e-3. Their largest element may
 * be one term, and then is off by up to 2^-8 of itself. */
#define FLOOR_PARTS (1.0 / 256)

#include "op_cases_gdn.inc"

#define FAMILY(op, exact, floor, params)                                                           \
    static const op_family family_##op = {#op, params, op, exact, NMSE, floor};

FAMILY(embedding_forward, true, 0, "T D V pad")
FAMILY(embedding_backward, false, FLOOR, "T D V pad")
FAMILY(rmsnorm_forward, false, FLOOR, "T D pad offset residual alias y")
FAMILY(rmsnorm_backward, false, FLOOR, "T D pad offset dres alias dw")
FAMILY(qk_norm_rope_forward, false, FLOOR, "T Hq Hkv Dh rd norm offset axes alias")
FAMILY(qk_norm_rope_backward, false, FLOOR, "T Hq Hkv Dh rd norm offset axes alias")
FAMILY(linear_forward, false, FLOOR, "T N K pad accumulate stat_y")
FAMILY(linear_backward_input, false, FLOOR, "T N K pad accumulate")
FAMILY(linear_backward_weight, false, FLOOR, "T N K pad")
FAMILY(attention_forward, false, FLOOR_ATTENTION, "docs Hq Hkv Dh causal pad")
FAMILY(attention_backward, false, FLOOR_ATTENTION, "docs Hq Hkv Dh causal pad")
FAMILY(attention_blocks_forward, false, FLOOR_ATTENTION, "docs block keep Hq Hkv Dh pad")
FAMILY(attention_blocks_backward, false, FLOOR_ATTENTION, "docs block keep Hq Hkv Dh pad")
FAMILY(attention_window_forward, false, FLOOR_PARTS, "docs block keep Hq Hkv Dh q0 q1 k0 k1")
FAMILY(attention_window_backward, false, FLOOR_PARTS, "docs block keep Hq Hkv Dh q0 q1 k0 k1")
FAMILY(attention_merge, false, FLOOR, "T Hq Dh")
FAMILY(attention_decode, false, FLOOR, "B new C Hq Hkv Dh part shared")
FAMILY(swiglu_forward, false, FLOOR, "T I pad")
FAMILY(swiglu_backward, false, FLOOR, "T I pad h alias")
FAMILY(gather_rows, true, 0, "M T D pad kind")
FAMILY(scatter_rows, true, 0, "M T D pad kind")
FAMILY(list_ranges, true, 0, "G most")
FAMILY(add, true, 0, "T D pad mode")
FAMILY(cast, true, 0, "T D pad mode")
FAMILY(zero, true, 0, "T D pad kind")
FAMILY(cross_entropy, false, FLOOR, "M V pad gradient stat far")
FAMILY(cross_entropy_confident, false, FLOOR, "M V pad gradient stat")
FAMILY(choose_ids, false, FLOOR, "T V pad barred draws")
FAMILY(dot_accumulate, false, FLOOR, "n b")
FAMILY(router_forward, false, FLOOR, "T E k norm")
FAMILY(router_backward, false, FLOOR, "T E k norm aux")
FAMILY(group_router_forward, false, FLOOR, "T E k groups stay bias")
FAMILY(group_router_backward, false, FLOOR, "T E k groups stay bias")
FAMILY(expert_sort, true, 0, "T E k skew")
FAMILY(expert_load, false, FLOOR, "T E k skew")
FAMILY(grouped_linear_forward, false, FLOOR, "T E k skew N D tail")
FAMILY(grouped_linear_backward_input, false, FLOOR, "T E k skew N D tail")
FAMILY(grouped_linear_backward_weight, false, FLOOR, "T E k skew N D tail")
FAMILY(expert_combine, false, FLOOR, "T E k D base weights")
FAMILY(expert_combine_backward, false, FLOOR, "T E k D alias")
FAMILY(conv1d_silu_forward, false, FLOOR, "docs C K history pad")
FAMILY(conv1d_silu_backward, false, FLOOR, "docs C K history pad")
FAMILY(gdn_gates_forward, false, FLOOR, "T H pad")
FAMILY(gdn_gates_backward, false, FLOOR, "T H pad")
FAMILY(gated_delta_rule_forward, false, FLOOR_DELTA, "docs Hk Hv Dk Dv decay state")
FAMILY(gated_delta_rule_backward, false, FLOOR_DELTA, "docs Hk Hv Dk Dv decay state")
FAMILY(gated_rmsnorm_forward, false, FLOOR, "T H D pad alias")
FAMILY(gated_rmsnorm_backward, false, FLOOR, "T H D pad alias")
FAMILY(sigmoid_gate_forward, false, FLOOR, "T H D pad alias")
FAMILY(sigmoid_gate_backward, false, FLOOR, "T H D pad alias")
FAMILY(row_gate_forward, false, FLOOR, "T H D pad alias")
FAMILY(row_gate_backward, false, FLOOR, "T H D pad alias")
FAMILY(layernorm_forward, false, FLOOR, "T H D pad alias")
FAMILY(layernorm_backward, false, FLOOR, "T H D pad alias")
FAMILY(bias_add, false, FLOOR, "T H D pad alias")
FAMILY(bias_backward, false, FLOOR, "T H D pad alias")
FAMILY(gelu_forward, false, FLOOR, "T H D pad alias")
FAMILY(gelu_backward, false, FLOOR, "T H D pad alias")
FAMILY(sumsq_accumulate, false, FLOOR, "rows cols")
FAMILY(clip_scale, false, FLOOR, "value max_norm")
FAMILY(adamw, true, FLOOR, "n master state step skip zero first wild beside")

#define C(op, ...)                                                                                 \
    {                                                                                              \
        &family_##op,                                                                              \
        {                                                                                          \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }

static const op_case cases[] = {
#include "op_cases.inc"
};

/* Seconds to minutes each in the reference. */
static const op_case long_cases[] = {
    C(attention_decode, 1, 1, 100000, 8, 1, 64),
    C(attention_decode, 1, 2, 100000, 2, 1, 128, 1),
    C(gated_delta_rule_forward, 10, 1, 2, 128, 128, 1, 1),
    C(gated_delta_rule_forward, 11, 1, 1, 128, 128, 1, 0),
    C(gated_delta_rule_forward, 12, 1, 1, 128, 128, 0, 0),
    C(gated_delta_rule_forward, 12, 1, 1, 128, 128, 3, 0),
    C(gated_delta_rule_forward, 12, 1, 1, 128, 128, 2, 0),
    C(gated_delta_rule_backward, 10, 1, 2, 128, 128, 1, 1),
    C(gated_delta_rule_backward, 10, 1, 1, 128, 128, 3, 1),
    C(gated_delta_rule_backward, 11, 1, 1, 128, 128, 0, 0),
    C(gated_delta_rule_backward, 11, 1, 1, 128, 128, 2, 0),
    C(gated_delta_rule_backward, 12, 1, 1, 128, 128, 0, 0),
    C(gated_delta_rule_backward, 12, 1, 1, 128, 128, 2, 0),
};

int64_t op_case_count(void)
{
    return (int64_t)(sizeof cases / sizeof cases[0]);
}

int64_t op_long_case_count(void)
{
    return (int64_t)(sizeof long_cases / sizeof long_cases[0]);
}

const op_case *op_case_at(int64_t i)
{
    ITH_ASSERT(i >= 0 && i < op_case_count() + op_long_case_count());
    return i < op_case_count() ? &cases[i] : &long_cases[i - op_case_count()];
}
