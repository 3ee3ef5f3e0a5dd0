/* vision.c - the vision tower, forward and backward.
 *
 *     x0 = patches W^T + b + position table (bilinear)
 *     block: x' = x + attention(LN1 x) Wo^T + bo
 *            x = x' + gelu(LN2 x' W1^T + b1) W2^T + b2
 *     features = gelu(LN(x) merged Wm1^T + b) Wm2^T + b
 *
 * Invariant: a block keeps its input only; the rest is made again, with the same bits. */
#include "model/blocks.h"
#include "model/vision.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "parallel/redeal.h"

typedef ith_tensor T;

#define PATCHES_PER_PIECE 256
#define MAX_FREQUENCIES 128 /* of a head and an axis */
#define LAYERNORM_EPS 1e-6F /* a constant of the published code, not a key */

/* Indices into vision_param: of a block, then of the tower. */
enum {
    B_NORM1_W,
    B_NORM1_B,
    B_QKV_W,
    B_QKV_B,
    B_PROJ_W,
    B_PROJ_B,
    B_NORM2_W,
    B_NORM2_B,
    B_FC1_W,
    B_FC1_B,
    B_FC2_W,
    B_FC2_B,
    BLOCK_PARAMS
};
enum {
    V_PATCH_W,
    V_PATCH_B,
    V_POSITIONS,
    V_NORM_W,
    V_NORM_B,
    V_FC1_W,
    V_FC1_B,
    V_FC2_W,
    V_FC2_B,
    TOWER_PARAMS
};

int64_t ith_vision_patch_width(const ith_hf_vision *v)
{
    return v->in_channels * v->temporal_patch_size * v->patch_size * v->patch_size;
}

ith_vision_flops ith_vision_flops_of(const ith_hf_vision *v, bool frozen)
{
    double d = (double)v->hidden_size, f = (double)v->intermediate_size, walks = frozen ? 1 : 3;
    double side = (double)v->spatial_merge_size, merged = d * side * side;
    double weights = (double)v->depth * (4 * d * d + 2 * d * f) +
                     (double)ith_vision_patch_width(v) * d +
                     merged * (merged + (double)v->out_hidden_size) / (side * side);
    return (ith_vision_flops){2 * walks * weights, 4 * walks * d * (double)v->depth};
}

static int64_t merge_count(const ith_hf_vision *v)
{
    return v->spatial_merge_size * v->spatial_merge_size;
}

/* ---- layout on the host ---- */

/* The two table rows around patch i of n, and the weight of the second. */
static void neighbours(int64_t i, int64_t n, int64_t side, int64_t at[2], float *second)
{
    float source = n > 1 ? (float)i * ((float)(side - 1) / (float)(n - 1)) : 0.0F;
    at[0] = ith_min_i64((int64_t)source, side - 1);
    at[1] = ith_min_i64(at[0] + 1, side - 1);
    *second = source - (float)at[0];
}

/* inv_freq: [head_dim/4]. */
static void lay_out_patch(const ith_hf_vision *v, const float *inv_freq, ith_grid g, int64_t y,
                          int64_t x, int64_t at, ith_vision_layout *out)
{
    int64_t side = (int64_t)sqrt((double)v->num_position_embeddings), ys[2], xs[2];
    float fy = 0, fx = 0;
    neighbours(y, g.h, side, ys, &fy);
    neighbours(x, g.w, side, xs, &fx);
    for (int k = 0; k < 4; k++) {
        out->corners[4 * at + k] = (int32_t)(ys[k / 2] * side + xs[k % 2]);
        out->corner_weights[4 * at + k] = (k / 2 ? fy : 1 - fy) * (k % 2 ? fx : 1 - fx);
    }
    int64_t half = v->hidden_size / v->num_heads / 2, quarter = half / 2;
    for (int64_t i = 0; i < half; i++) {
        float angle = (float)(i < quarter ? y : x) * inv_freq[i % quarter];
        out->cos[at * half + i] = (float)cos((double)angle);
        out->sin[at * half + i] = (float)sin((double)angle);
    }
}

typedef struct {
    const ith_hf_vision *v;
    const ith_grid *grids;
    ith_vision_layout *out;
} layout_task;

/* Patches [begin, end) of all grids. */
static void lay_out_range(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const layout_task *task = arg;
    const ith_hf_vision *v = task->v;
    int64_t merge = v->spatial_merge_size, half = v->hidden_size / v->num_heads / 2;
    const ith_grid *g = task->grids;
    int64_t base = 0; /* first patch of *g */
    float inv_freq[MAX_FREQUENCIES];
    ITH_ASSERT(half / 2 <= MAX_FREQUENCIES);
    for (int64_t i = 0; i < half / 2; i++)
        inv_freq[i] = (float)(1.0 / pow(v->rope_theta, 2.0 * (double)i / (double)half));
    for (int64_t at = begin; at < end; at++) {
        for (; at >= base + ith_grid_patches(*g); g++)
            base += ith_grid_patches(*g);
        int64_t p = (at - base) % ((int64_t)g->h * g->w), block_cols = g->w / merge;
        int64_t block = p / (merge * merge), inner = p % (merge * merge);
        lay_out_patch(v, inv_freq, *g, block / block_cols * merge + inner / merge,
                      block % block_cols * merge + inner % merge, at, task->out);
    }
}

void ith_vision_lay_out(const ith_hf_vision *v, const ith_grid *grids, int64_t num_grids,
                        ith_pool *pool, ith_vision_layout *out)
{
    int64_t at = 0, merge = v->spatial_merge_size;
    out->num_segments = out->max_len = 0;
    out->cu_seqlens[0] = 0;
    for (int64_t i = 0; i < num_grids; i++) {
        ith_grid g = grids[i];
        ITH_ASSERT(g.t > 0 && g.h > 0 && g.w > 0 && g.h % merge == 0 && g.w % merge == 0);
        for (int64_t t = 0; t < g.t; t++) {
            at += (int64_t)g.h * g.w;
            out->cu_seqlens[++out->num_segments] = (int32_t)at;
        }
        out->max_len = ith_max_i64(out->max_len, (int64_t)g.h * g.w);
    }
    layout_task task = {v, grids, out};
    ith_pool_for(pool, at, PATCHES_PER_PIECE, lay_out_range, &task);
}

/* ---- parameters ---- */

static ith_status declare(ith_model *m, int32_t *out, const char *name, int ndim,
                          const int64_t *shape, ith_init init, ith_error *err)
{
    int64_t cols = 1;
    for (int i = 1; i < ndim; i++)
        cols *= shape[i];
    ITH_TRY(ith_model_add_param(m, name, ndim > 1 ? 2 : 1, shape[0], cols, 1, out, err));
    ITH_TRY(ith_model_add_piece(m, name, *out, 0, ndim > 1 ? 2 : 1, shape[0], cols, 1, false, err));
    ith_hf_piece *piece = &m->pieces[m->num_pieces - 1];
    piece->ndim = ndim;
    for (int i = 0; i < ndim; i++)
        piece->shape[i] = shape[i];
    piece->init = init;
    return ITH_OK;
}

static ith_status declare_pair(ith_model *m, int32_t *out, const char *stem, int64_t rows,
                               int64_t cols, ith_error *err)
{
    bool norm = cols == 0;
    ITH_TRY(declare(m, out, ith_model_text(m, "model.visual.%s.weight", stem), norm ? 1 : 2,
                    (const int64_t[]){rows, cols}, norm ? ITH_INIT_ONES : ITH_INIT_NORMAL, err));
    return declare(m, out + 1, ith_model_text(m, "model.visual.%s.bias", stem), 1, &rows,
                   ITH_INIT_ZEROS, err);
}

static ith_status declare_block(ith_model *m, int64_t block, ith_error *err)
{
    const ith_hf_vision *v = &m->config->vision;
    int64_t d = v->hidden_size, f = v->intermediate_size;
    const struct {
        const char *name;
        int first;
        int64_t rows, cols;
    } pairs[] = {{"norm1", B_NORM1_W, d, 0},        {"attn.qkv", B_QKV_W, 3 * d, d},
                 {"attn.proj", B_PROJ_W, d, d},     {"norm2", B_NORM2_W, d, 0},
                 {"mlp.linear_fc1", B_FC1_W, f, d}, {"mlp.linear_fc2", B_FC2_W, d, f}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char stem[64];
        snprintf(stem, sizeof stem, "blocks.%lld.%s", (long long)block, pairs[i].name);
        ITH_TRY(declare_pair(m,
                             &m->vision_param[TOWER_PARAMS + block * BLOCK_PARAMS] + pairs[i].first,
                             stem, pairs[i].rows, pairs[i].cols, err));
    }
    return ITH_OK;
}

ith_status ith_vision_declare(ith_model *m, ith_error *err)
{
    const ith_hf_vision *v = &m->config->vision;
    int64_t d = v->hidden_size, merged = d * merge_count(v);
    ITH_TRY(ith_alloc_zero((void **)&m->vision_param, TOWER_PARAMS + v->depth * BLOCK_PARAMS,
                           sizeof *m->vision_param, "vision tower", err));
    int32_t *p = m->vision_param;
    const int64_t kernel[] = {d, v->in_channels, v->temporal_patch_size, v->patch_size,
                              v->patch_size};
    ITH_TRY(declare(m, &p[V_PATCH_W], "model.visual.patch_embed.proj.weight", 5, kernel,
                    ITH_INIT_NORMAL, err));
    ITH_TRY(declare(m, &p[V_PATCH_B], "model.visual.patch_embed.proj.bias", 1, &d, ITH_INIT_ZEROS,
                    err));
    ITH_TRY(declare(m, &p[V_POSITIONS], "model.visual.pos_embed.weight", 2,
                    (const int64_t[]){v->num_position_embeddings, d}, ITH_INIT_NORMAL, err));
    for (int64_t i = 0; i < v->depth; i++)
        ITH_TRY(declare_block(m, i, err));
    ITH_TRY(declare_pair(m, &p[V_NORM_W], "merger.norm", d, 0, err));
    ITH_TRY(declare_pair(m, &p[V_FC1_W], "merger.linear_fc1", merged, merged, err));
    return declare_pair(m, &p[V_FC2_W], "merger.linear_fc2", v->out_hidden_size, merged, err);
}

static const ith_param *tower_param(const ith_model *m, int which)
{
    return &m->params[m->vision_param[which]];
}

static const ith_param *block_param(const ith_model *m, int64_t block, int which)
{
    return &m->params[m->vision_param[TOWER_PARAMS + block * BLOCK_PARAMS + which]];
}

/* ---- parts ---- */

static ith_status push(ith_ctx *ctx, const char *name, ith_dtype dtype, int64_t rows, int64_t cols,
                       T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_WORKSPACE, name, dtype, 2, rows, cols, 1, 1, out);
}

/* A LayerNorm's output and statistics. */
typedef struct {
    T y, mean, rstd;
} normed;

static ith_status norm_forward(ith_ctx *ctx, T x, const ith_param *w, const ith_param *b,
                               normed *out)
{
    int64_t n = x.shape[0];
    const ith_mem_class where = ITH_MEM_WORKSPACE;
    ITH_TRY(push(ctx, "vision norm", x.dtype, n, x.shape[1], &out->y));
    ITH_TRY(ith_ctx_push(ctx, where, "norm statistics", ITH_F32, 1, n, 1, 1, 1, &out->mean));
    ITH_TRY(ith_ctx_push(ctx, where, "norm statistics", ITH_F32, 1, n, 1, 1, 1, &out->rstd));
    return ith_layernorm_forward(ctx, out->y, out->mean, out->rstd, x, w->w, b->w, LAYERNORM_EPS);
}

/* y = x W^T + b, pushed. */
static ith_status affine(ith_ctx *ctx, const char *name, T x, const ith_param *w,
                         const ith_param *b, T *y)
{
    ITH_TRY(push(ctx, name, x.dtype, x.shape[0], w->shape[0], y));
    ITH_TRY(ith_linear_forward(ctx, *y, x, w->w, false));
    return ith_bias_add(ctx, *y, b->w);
}

/* dx (absent: not wanted) and the parameters' gradients. */
static ith_status affine_backward(ith_ctx *ctx, T dx, T dy, T x, const ith_param *w,
                                  const ith_param *b)
{
    ITH_TRY(ith_linear_backward_weight(ctx, w->grad, dy, x));
    ITH_TRY(ith_bias_backward(ctx, b->grad, dy));
    return dx.ndim ? ith_linear_backward_input(ctx, dx, dy, w->w, false) : ITH_OK;
}

static T heads_2d(T t)
{
    return ith_tensor_2d(t.data, t.dtype, t.shape[0], t.shape[1] * t.shape[2]);
}

/* [N, d] seen as [N / merge^2, d * merge^2]. */
static T merged_view(const ith_hf_vision *v, T t)
{
    int64_t k = merge_count(v);
    return ith_tensor_2d(t.data, t.dtype, t.shape[0] / k, t.shape[1] * k);
}

static T third(const ith_hf_vision *v, T qkv, int i)
{
    int64_t d = v->hidden_size;
    return ith_split_heads(ith_col_range(qkv, i * d, (i + 1) * d), v->num_heads);
}

static float scale_of(const ith_hf_vision *v)
{
    return ith_score_scale(v->hidden_size / v->num_heads);
}

/* Everything a block makes, in the workspace. */
typedef struct {
    normed n1, n2;
    T qkv, q, k, o, lse, x2, h, a;
} block_acts;

/* Up to a = gelu(h); the block's output is x2 + a W2^T + b2. */
static ith_status block_inside(ith_model *m, ith_ctx *ctx, const ith_vision_batch *vb, int64_t i,
                               T x, block_acts *s)
{
    const ith_hf_vision *v = &m->config->vision;
    int64_t n = x.shape[0], heads = v->num_heads, dim = v->hidden_size / heads;
    const ith_mem_class where = ITH_MEM_WORKSPACE;
    T none = ith_tensor_none(), out;
    ITH_TRY(
        norm_forward(ctx, x, block_param(m, i, B_NORM1_W), block_param(m, i, B_NORM1_B), &s->n1));
    ITH_TRY(affine(ctx, "vision qkv", s->n1.y, block_param(m, i, B_QKV_W),
                   block_param(m, i, B_QKV_B), &s->qkv));
    ITH_TRY(ith_ctx_push(ctx, where, "vision q, k", x.dtype, 3, n, heads, dim, 1, &s->q));
    ITH_TRY(ith_ctx_push(ctx, where, "vision q, k", x.dtype, 3, n, heads, dim, 1, &s->k));
    ITH_TRY(ith_qk_norm_rope_forward(ctx, s->q, s->k, none, none, third(v, s->qkv, 0),
                                     third(v, s->qkv, 1), none, none, vb->cos, vb->sin, vb->order,
                                     0.0F, 0.0F));
    ITH_TRY(ith_ctx_push(ctx, where, "vision attention", x.dtype, 3, n, heads, dim, 1, &s->o));
    ITH_TRY(push(ctx, "vision lse", ITH_F32, n, heads, &s->lse));
    ITH_TRY(ith_attention_forward(ctx, s->o, s->lse, s->q, s->k, third(v, s->qkv, 2), vb->segments,
                                  scale_of(v), false));
    ITH_TRY(affine(ctx, "vision middle", heads_2d(s->o), block_param(m, i, B_PROJ_W),
                   block_param(m, i, B_PROJ_B), &out));
    s->x2 = out;
    ITH_TRY(ith_add(ctx, s->x2, x, out));
    ITH_TRY(norm_forward(ctx, s->x2, block_param(m, i, B_NORM2_W), block_param(m, i, B_NORM2_B),
                         &s->n2));
    ITH_TRY(affine(ctx, "vision hidden", s->n2.y, block_param(m, i, B_FC1_W),
                   block_param(m, i, B_FC1_B), &s->h));
    ITH_TRY(push(ctx, "vision hidden", x.dtype, n, v->intermediate_size, &s->a));
    return ith_gelu_forward(ctx, s->a, s->h, true);
}

/* dx: in, the gradient of the block's output; out, that of x. */
static ith_status block_backward(ith_model *m, ith_ctx *ctx, const ith_vision_batch *vb, int64_t i,
                                 T x, T dx)
{
    const ith_hf_vision *v = &m->config->vision;
    int64_t n = x.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T none = ith_tensor_none(), da, dn, dqkv, do_;
    block_acts s;
    ITH_TRY(block_inside(m, ctx, vb, i, x, &s));
    ITH_TRY(push(ctx, "vision hidden gradient", x.dtype, n, v->intermediate_size, &da));
    ITH_TRY(push(ctx, "vision gradient", x.dtype, n, v->hidden_size, &dn));
    ITH_TRY(
        affine_backward(ctx, da, dx, s.a, block_param(m, i, B_FC2_W), block_param(m, i, B_FC2_B)));
    ITH_TRY(ith_gelu_backward(ctx, da, da, s.h, true));
    ITH_TRY(affine_backward(ctx, dn, da, s.n2.y, block_param(m, i, B_FC1_W),
                            block_param(m, i, B_FC1_B)));
    const ith_param *w2 = block_param(m, i, B_NORM2_W), *w1 = block_param(m, i, B_NORM1_W);
    ITH_TRY(ith_layernorm_backward(ctx, dx, w2->grad, block_param(m, i, B_NORM2_B)->grad, dn, dx,
                                   s.x2, s.n2.mean, s.n2.rstd, w2->w));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "vision gradient", x.dtype, 3, n, v->num_heads,
                         v->hidden_size / v->num_heads, 1, &do_));
    ITH_TRY(push(ctx, "vision qkv gradient", x.dtype, n, 3 * v->hidden_size, &dqkv));
    ITH_TRY(affine_backward(ctx, heads_2d(do_), dx, heads_2d(s.o), block_param(m, i, B_PROJ_W),
                            block_param(m, i, B_PROJ_B)));
    T dq = third(v, dqkv, 0), dk = third(v, dqkv, 1), dv = third(v, dqkv, 2);
    ITH_TRY(ith_attention_backward(ctx, dq, dk, dv, do_, s.q, s.k, third(v, s.qkv, 2), s.o, s.lse,
                                   vb->segments, scale_of(v), false));
    ITH_TRY(ith_qk_norm_rope_backward(ctx, dq, dk, none, none, dq, dk, third(v, s.qkv, 0),
                                      third(v, s.qkv, 1), none, none, none, none, vb->cos, vb->sin,
                                      vb->order, 0.0F));
    ITH_TRY(affine_backward(ctx, dn, dqkv, s.n1.y, block_param(m, i, B_QKV_W),
                            block_param(m, i, B_QKV_B)));
    ITH_TRY(ith_layernorm_backward(ctx, dx, w1->grad, block_param(m, i, B_NORM1_B)->grad, dn, dx, x,
                                   s.n1.mean, s.n1.rstd, w1->w));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* ---- forward ---- */

/* Saved input of block i (depth: of the merger). */
static T block_input(const ith_model *m, int64_t i)
{
    T t = ith_row_range(m->vision_x, i, i + 1);
    return ith_tensor_2d(t.data, t.dtype, t.shape[1], t.shape[2]);
}

/* x_0 into x. */
static ith_status embed_patches(ith_model *m, ith_ctx *ctx, const ith_vision_batch *vb, T x)
{
    ITH_TRY(ith_linear_forward(ctx, x, vb->pixels, tower_param(m, V_PATCH_W)->w, false));
    ITH_TRY(ith_bias_add(ctx, x, tower_param(m, V_PATCH_B)->w));
    return ith_expert_combine(ctx, x, x, tower_param(m, V_POSITIONS)->w, vb->corner_weights,
                              vb->corners);
}

/* What the merger makes of x. */
typedef struct {
    normed n;
    T h, a, features;
} merger_acts;

static ith_status merge(ith_model *m, ith_ctx *ctx, T x, merger_acts *s)
{
    const ith_hf_vision *v = &m->config->vision;
    ITH_TRY(norm_forward(ctx, x, tower_param(m, V_NORM_W), tower_param(m, V_NORM_B), &s->n));
    ITH_TRY(affine(ctx, "merger hidden", merged_view(v, s->n.y), tower_param(m, V_FC1_W),
                   tower_param(m, V_FC1_B), &s->h));
    ITH_TRY(push(ctx, "merger hidden", x.dtype, s->h.shape[0], s->h.shape[1], &s->a));
    ITH_TRY(ith_gelu_forward(ctx, s->a, s->h, false));
    return affine(ctx, "image features", s->a, tower_param(m, V_FC2_W), tower_param(m, V_FC2_B),
                  &s->features);
}

/* Features of this rank's frames, in the workspace. */
static ith_status encode(ith_model *m, ith_ctx *ctx, const ith_vision_batch *vb, bool training,
                         T *features)
{
    const ith_hf_vision *v = &m->config->vision;
    int64_t n = vb->num_patches, blocks = training && !m->frozen.vision_tower ? v->depth : 0;
    *features = ith_tensor_2d(NULL, m->dtype, 0, v->out_hidden_size);
    if (n == 0)
        return ITH_OK;
    /* inputs of all blocks and of the merger when the tower is trained, else one buffer */
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "vision block inputs", m->dtype, 3, blocks + 1,
                         n, v->hidden_size, 1, &m->vision_x));
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    for (int64_t i = 0; i <= v->depth; i++) {
        T x = block_input(m, ith_min_i64(i, blocks)), out;
        if (i == 0)
            ITH_TRY(embed_patches(m, ctx, vb, x));
        if (i == v->depth)
            break;
        block_acts s;
        ITH_TRY(block_inside(m, ctx, vb, i, x, &s));
        ITH_TRY(affine(ctx, "vision block output", s.a, block_param(m, i, B_FC2_W),
                       block_param(m, i, B_FC2_B), &out));
        ITH_TRY(ith_add(ctx, block_input(m, ith_min_i64(i + 1, blocks)), s.x2, out));
        ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    }
    merger_acts s;
    ITH_TRY(merge(m, ctx, block_input(m, blocks), &s));
    *features = s.features;
    return ITH_OK;
}

/* Features that this rank's rows read: of the group's, while counting, no more than its rows. */
static int64_t features_read(const ith_model *m, const ith_ctx *ctx, const ith_batch *b)
{
    int64_t n = b->vision.rows.shape[0];
    return ith_ctx_counting(ctx) && ith_cp_size(m->mesh) > 1 ? ith_min_i64(n, b->num_tokens) : n;
}

ith_status ith_vision_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training)
{
    const ith_vision_batch *vb = &b->vision;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T features, mine;
    m->vision_mark = ith_plan_mark(ctx->plan, ITH_MEM_ACTIVATIONS);
    if (vb->group_features == 0)
        return ITH_OK;
    ITH_TRY(encode(m, ctx, vb, training, &features));
    ITH_TRY(ith_redeal_rows(m->mesh, ctx, "image features", features, vb->encoded, vb->read,
                            features_read(m, ctx, b), &mine));
    ITH_TRY(ith_scatter_rows(ctx, m->stream, mine, ith_row_range(vb->rows, 0, mine.shape[0])));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    if (!training)
        ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, m->vision_mark);
    return ITH_OK;
}

/* ---- backward ---- */

/* Gradient of the merger's input into dx. */
static ith_status merger_backward(ith_model *m, ith_ctx *ctx, T dfeatures, T x, T dx)
{
    const ith_hf_vision *v = &m->config->vision;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE), rows = dfeatures.shape[0];
    merger_acts s;
    T da, dn;
    ITH_TRY(merge(m, ctx, x, &s));
    ITH_TRY(push(ctx, "merger hidden gradient", m->dtype, rows, s.h.shape[1], &da));
    ITH_TRY(
        affine_backward(ctx, da, dfeatures, s.a, tower_param(m, V_FC2_W), tower_param(m, V_FC2_B)));
    ITH_TRY(ith_gelu_backward(ctx, da, da, s.h, false));
    ITH_TRY(push(ctx, "vision gradient", m->dtype, x.shape[0], v->hidden_size, &dn));
    ITH_TRY(affine_backward(ctx, merged_view(v, dn), da, merged_view(v, s.n.y),
                            tower_param(m, V_FC1_W), tower_param(m, V_FC1_B)));
    const ith_param *w = tower_param(m, V_NORM_W);
    ITH_TRY(ith_layernorm_backward(ctx, dx, w->grad, tower_param(m, V_NORM_B)->grad, dn,
                                   ith_tensor_none(), x, s.n.mean, s.n.rstd, w->w));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* The position table is read like experts' rows: dx four times with its weights, each copy a row
 * of its own, then summed by table row. */
static ith_status patches_backward(ith_model *m, ith_ctx *ctx, const ith_vision_batch *vb, T dx)
{
    int64_t n = dx.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T copies, unused, none = ith_tensor_none();
    ITH_TRY(affine_backward(ctx, none, dx, vb->pixels, tower_param(m, V_PATCH_W),
                            tower_param(m, V_PATCH_B)));
    ITH_TRY(push(ctx, "position gradient", dx.dtype, 4 * n, dx.shape[1], &copies));
    ITH_TRY(push(ctx, "position gradient", ITH_F32, n, 4, &unused));
    ITH_TRY(ith_zero(ctx, copies));
    T each = ith_tensor_2d(vb->order4.data, ITH_I32, n, 4);
    ITH_TRY(ith_expert_combine_backward(ctx, copies, unused, dx, copies, vb->corner_weights, each));
    ITH_TRY(ith_embedding_backward(ctx, tower_param(m, V_POSITIONS)->grad, copies,
                                   ith_tensor_1d(vb->corners.data, ITH_I32, 4 * n)));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* The tower from the gradient of this rank's features. */
static ith_status encode_backward(ith_model *m, ith_ctx *ctx, const ith_vision_batch *vb,
                                  T dfeatures)
{
    const ith_hf_vision *v = &m->config->vision;
    int64_t saved = m->vision_x.shape[0] - 1;
    T dx;
    ITH_TRY(push(ctx, "vision gradient", m->dtype, vb->num_patches, v->hidden_size, &dx));
    ITH_TRY(merger_backward(m, ctx, dfeatures, block_input(m, saved), dx));
    for (int64_t i = saved - 1; i >= 0; i--)
        ITH_WRAP(block_backward(m, ctx, vb, i, block_input(m, i), dx), ctx->err,
                 "vision block %lld backward", (long long)i);
    return m->frozen.vision_tower ? ITH_OK : patches_backward(m, ctx, vb, dx);
}

ith_status ith_vision_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, T dstream)
{
    const ith_hf_vision *v = &m->config->vision;
    const ith_vision_batch *vb = &b->vision;
    if (vb->group_features) {
        int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE), read = features_read(m, ctx, b);
        int64_t own = vb->num_patches / merge_count(v);
        T rows = ith_row_range(vb->rows, 0, read), dread, dfeatures;
        ITH_TRY(push(ctx, "image feature gradient", m->dtype, read, v->out_hidden_size, &dread));
        ITH_TRY(ith_gather_rows(ctx, dread, dstream, rows));
        ITH_TRY(ith_redeal_rows(m->mesh, ctx, "image feature gradient", dread, vb->read,
                                vb->encoded, own, &dfeatures));
        if (vb->num_patches)
            ITH_TRY(encode_backward(m, ctx, vb, dfeatures));
        ITH_TRY(ith_zero(ctx, dread)); /* the pad token's embedding gets nothing */
        ITH_TRY(ith_scatter_rows(ctx, dstream, dread, rows));
        ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    }
    ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, m->vision_mark);
    return ITH_OK;
}
