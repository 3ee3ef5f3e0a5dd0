/* golden_check.c - runs directories of reference vectors and prints each error beside its bound.
 *
 *     golden_check [device=cpu|cuda] [dtype=float32|bfloat16] [threads=N]
 * [keep=all|attention|input|host] [chunk=N] [cp=N] [ulysses=N] [zero=N] [draws=N] DIR...
 *
 * Under mpirun the ranks are dp x cp: documents are dealt to the dp groups, each document's tokens
 * are sliced over the cp ranks, of which `ulysses` neighbours exchange heads (default: all) and the
 * rest is a ring. The same values must come out, within the same bounds.
 *
 * DIR/hf is a model directory; ref.safetensors holds input_ids, labels, logits (and packed_ids,
 * packed_labels, cu_seqlens, packed_logits, greedy), or of a diffusion model clean, noisy, labels
 * and three logits; grads/, grads_packed/, after3/ hold gradients and the weights after three AdamW
 * steps under the names of hf/; ref.json holds losses and the AdamW settings. Exit 0 when every
 * error is within its bound, 1 when one is not, 77 when a directory is not there. Bounds for
 * float32: logits 2e-5 of the largest logit, gradients 1e-4 and weights after three steps 1e-3 in
 * relative norm, losses 1e-5, gradient norms 3e-3 relative.
 *
 * For bfloat16 the bound of a value is twice the error that the plain bf16 reference operators make
 * in the same place, plus a floor of 2^-8. Both are root mean squares over `draws` (8) models: the
 * first is the directory's, the others have its weights a little off, and what they should give is
 * what the reference gives in float32. One draw would not do: a tensor of four numbers is now and
 * then right by chance. A gradient norm is one number, whose error may cancel to nothing; it is
 * measured by the relative error of all gradients together, which is the most that of their norm
 * can be. Which experts a token gets is discrete, and where two are nearly equal rounding decides:
 * in bfloat16 every token takes the choice of the float32 run, and the scores are compared. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "checkpoint/safetensors.h"
#include "generate/decoder.h"
#include "data/noise.h"
#include "generate/block_decoder.h"
#include "kernels/backend.h"
#include "kernels/session.h"
#include "train/chunk_loss.h"
#include "train/step.h"

#define GREEDY_CAPACITY 512
#define GREEDY_PROMPT                                                                              \
    9 /* tokens of greedy that are the prompt, unless ref.json says greedy_prompt */
#define BF16_FLOOR (1.0 / 256)
#define DRAWS 8
#define DRAW_SPREAD (1.0 / 256) /* weights of a draw, relative */

/* In bfloat16 a float32 run of the reference leaves its values and its choices of experts to those
 * that follow. */
typedef enum { RUN_ALONE, RUN_LEADS, RUN_FOLLOWS } run_kind;

typedef struct {
    ith_use_device device;
    ith_dtype dtype;
    int threads, keep;
    int64_t chunk, cp;
    int64_t ulysses; /* 0: cp */
    int zero;        /* zero_stage */
    bool reference;  /* plain operators: the yardstick of bf16 */
    run_kind kind;
    int64_t draws, draw; /* of bf16: 0 is the directory's own weights */
    ith_mesh *mesh;
} options;

typedef struct {
    const char *dir;
    ith_hf_config config;
    ith_st_reader *weights, *ref;
    json_t *json;
} golden;

/* Results by name: error and bound. In the yardstick run the errors are only recorded. */
typedef struct {
    char name[160];
    double error, bound;
} result;

typedef struct {
    result *rows;
    int64_t count, cap;
} results;

static ith_error err;

static void die_on(ith_status status)
{
    if (status != ITH_OK) {
        fprintf(stderr, "golden_check: %s\n", err.text);
        exit(1);
    }
}

static void record(results *r, double error, double bound, const char *fmt, ...) ITH_PRINTF(4, 5);
static void record(results *r, double error, double bound, const char *fmt, ...)
{
    die_on(ith_grow((void **)&r->rows, &r->cap, r->count + 1, sizeof *r->rows, "results", &err));
    result *row = &r->rows[r->count++];
    va_list args;
    va_start(args, fmt);
    vsnprintf(row->name, sizeof row->name, fmt, args);
    va_end(args);
    row->error = error;
    row->bound = bound;
}

static const ith_st_entry *entry_of(const golden *g, const char *name)
{
    return ith_st_find(g->ref, name);
}

/* Elements of an I64 or I32 entry as int32. */
static int32_t *ints(const ith_st_entry *e)
{
    int64_t n = ith_st_numel(e);
    int32_t *out = ith_malloc(n * 4 + 4);
    if (!out)
        exit(1);
    for (int64_t i = 0; i < n; i++) {
        int64_t wide = 0;
        if (e->dtype == ITH_I64)
            memcpy(&wide, (const char *)e->data + i * 8, 8);
        else
            memcpy(&out[i], (const char *)e->data + i * 4, 4);
        if (e->dtype == ITH_I64)
            out[i] = (int32_t)wide;
    }
    return out;
}

/* Packed documents with labels of the Hugging Face kind (label of a row is its own id) as a
 * micro-batch. */
static ith_micro_batch batch_of(const int32_t *ids, const int32_t *labels, const int32_t *cu,
                                int64_t docs)
{
    ith_micro_batch b = {.num_tokens = cu[docs], .num_docs = docs};
    int64_t n = b.num_tokens;
    b.ids = ith_malloc(n * 4);
    b.position_ids = ith_malloc(n * 4);
    b.labels = ith_malloc(n * 4);
    b.weights = ith_malloc(n * 4);
    b.cu_seqlens = ith_malloc((docs + 1) * 4);
    memcpy(b.ids, ids, (size_t)n * 4);
    memcpy(b.cu_seqlens, cu, (size_t)(docs + 1) * 4);
    for (int64_t d = 0; d < docs; d++)
        for (int32_t t = cu[d]; t < cu[d + 1]; t++) {
            b.position_ids[t] = t - cu[d];
            b.labels[t] = t + 1 < cu[d + 1] ? labels[t + 1] : -100;
            b.weights[t] = b.labels[t] >= 0 ? 1.0f : 0.0f;
            b.num_labels += b.labels[t] >= 0;
        }
    b.weight_sum = (double)b.num_labels;
    return b;
}

/* The documents of this rank's dp group, and where each of its tokens is in the whole batch. */
static ith_micro_batch deal(const ith_micro_batch *all, const ith_mesh *mesh, int32_t **origin)
{
    ith_micro_batch b = {0};
    int64_t n = all->num_tokens;
    b.ids = ith_malloc(n * 4);
    b.position_ids = ith_malloc(n * 4);
    b.labels = ith_malloc(n * 4);
    b.weights = ith_malloc(n * 4);
    b.cu_seqlens = ith_malloc((all->num_docs + 1) * 4);
    *origin = ith_malloc(n * 4);
    b.noisy = all->noisy ? ith_malloc(all->num_docs * 4 + 4) : NULL;
    b.cu_seqlens[0] = 0;
    for (int64_t d = 0; d < all->num_docs; d++) {
        if (d % mesh->dp_size != mesh->dp_rank)
            continue;
        for (int32_t t = all->cu_seqlens[d]; t < all->cu_seqlens[d + 1]; t++) {
            int64_t to = b.num_tokens++;
            b.ids[to] = all->ids[t];
            b.position_ids[to] = all->position_ids[t];
            b.labels[to] = all->labels[t];
            b.weights[to] = all->weights[t];
            b.num_labels += all->labels[t] >= 0;
            (*origin)[to] = t;
        }
        if (all->noisy)
            b.noisy[b.num_docs] = all->noisy[d];
        b.cu_seqlens[++b.num_docs] = (int32_t)b.num_tokens;
    }
    b.weight_sum = (double)b.num_labels;
    return b;
}

static int64_t count_media(const golden *g, const ith_micro_batch *b, int64_t doc)
{
    int64_t n = 0;
    for (int32_t t = b->cu_seqlens[doc]; t < b->cu_seqlens[doc + 1]; t++)
        n += b->ids[t] == g->config.image_token_id || b->ids[t] == g->config.video_token_id;
    return n;
}

/* Images of the documents of b, which are those of `all` that this rank's dp group has, with our
 * own positions. */
static void add_media(const golden *g, const ith_micro_batch *all, const ith_mesh *mesh,
                      ith_micro_batch *b)
{
    bool packed = all->num_docs > 1;
    const ith_st_entry *pixels = entry_of(g, packed ? "packed_pixel_values" : "pixel_values"),
                       *grid = entry_of(g, packed ? "packed_image_grid_thw" : "image_grid_thw");
    if (!pixels)
        return;
    int64_t num_grids = ith_st_numel(grid) / 3, next = 0, at = 0;
    int64_t side = g->config.vision.spatial_merge_size,
            width = ith_vision_patch_width(&g->config.vision), kept = 0;
    int32_t *thw = ints(grid);
    ith_grid *grids = ith_malloc(num_grids * (int64_t)sizeof *grids + 1);
    float *values = ith_malloc(ith_st_numel(pixels) * 4);
    b->mrope = ith_malloc(3 * b->num_tokens * 4 + 4);
    if (!values || !b->mrope || !grids)
        exit(1);
    for (int64_t d = 0; d < all->num_docs; d++) {
        int64_t left = count_media(g, all, d) * side * side;
        bool mine = d % mesh->dp_size == mesh->dp_rank;
        for (; left > 0 && next < num_grids; next++) {
            ith_grid item = {thw[3 * next], thw[3 * next + 1], thw[3 * next + 2]};
            int64_t n = ith_grid_patches(item);
            if (mine) {
                memcpy(values + kept * width, (const float *)pixels->data + at * width,
                       (size_t)(n * width) * 4);
                grids[b->num_grids++] = item;
            }
            kept += mine ? n : 0;
            at += n;
            left -= n;
        }
    }
    ith_free(thw);
    b->grids = grids;
    b->pixels = values;
    const ith_media_tokens tokens = {.image = (int32_t)g->config.image_token_id,
                                     .video = (int32_t)g->config.video_token_id,
                                     .merge = g->config.vision.spatial_merge_size};
    int32_t *frames = ith_malloc(b->num_tokens * 4 + 4);
    die_on(ith_media_find(&tokens, b->ids, b->cu_seqlens, b->num_docs, b->grids, b->num_grids,
                          frames, &err));
    ith_mrope_positions(tokens.merge, b->cu_seqlens, b->num_docs, b->grids, b->num_grids, frames,
                        NULL, b->mrope);
    b->frames = frames;
}

static void free_batch(ith_micro_batch *b)
{
    ith_free((void *)(uintptr_t)b->pixels);
    ith_free((void *)(uintptr_t)b->grids);
    ith_free((void *)(uintptr_t)b->frames);
    ith_free(b->mrope);
    ith_free(b->ids);
    ith_free(b->position_ids);
    ith_free(b->labels);
    ith_free(b->weights);
    ith_free(b->cu_seqlens);
}

/* What a row of the batch sees; all zero: causal. */
typedef struct {
    int64_t block;
    bool bidirectional;
} mask_kind;

/* ---- a model opened for a run ---- */

typedef struct {
    ith_session session;
    ith_mesh *mesh;
    ith_model *model;
    ith_step *step;
} bench;

static ith_vision_limits vision_limits(const ith_micro_batch *batch)
{
    ith_vision_limits limits = {0};
    for (int64_t i = 0; i < batch->num_grids; i++) {
        limits.max_patches += ith_grid_patches(batch->grids[i]);
        limits.max_segments += batch->grids[i].t;
        limits.max_segment_patches =
            ith_max_i64(limits.max_segment_patches, (int64_t)batch->grids[i].h * batch->grids[i].w);
    }
    return limits;
}

/* Contents of a device tensor as f32. */
static float *floats(ith_ctx *ctx, ith_tensor t)
{
    int64_t n = ith_numel(t);
    char *raw = ith_malloc(ith_tensor_bytes(t) + 8);
    float *out = ith_malloc(n * 4 + 4);
    if (!raw || !out)
        exit(1);
    die_on(ctx->device->download(ctx->device, raw, t.data, ith_tensor_bytes(t), &err));
    die_on(ctx->device->sync(ctx->device, &err));
    ith_convert(out, ITH_F32, raw, t.dtype, n);
    ith_free(raw);
    return out;
}

/* ---- what a run should give ---- */

/* What the float32 run of this draw gave, in the order of its questions. */
static struct {
    float **values;
    int64_t count, cap, next;
} truth;

/* What the float32 run gave where this one gives `got`. */
static const float *true_values(const options *o, const float *got, int64_t n)
{
    ITH_ASSERT(o->kind != RUN_ALONE);
    if (o->kind == RUN_FOLLOWS) {
        ITH_ASSERT(truth.next < truth.count);
        return truth.values[truth.next++];
    }
    die_on(ith_grow((void **)&truth.values, &truth.cap, truth.count + 1, sizeof *truth.values,
                    "values", &err));
    float *copy = ith_malloc(n * 4 + 4);
    if (!copy)
        exit(1);
    memcpy(copy, got, (size_t)n * 4);
    return truth.values[truth.count++] = copy;
}

/* The number of the files, or of the float32 run when those are of other weights. */
static double true_number(const options *o, bool other_weights, double got, double in_file)
{
    float value = (float)got;
    return other_weights ? (double)*true_values(o, &value, 1) : in_file;
}

static double rel_norm(const float *a, const char *ref, ith_dtype dtype, int64_t n)
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

static void hook_routes(const options *o, ith_ctx *ctx)
{
    if (o->kind == RUN_ALONE)
        return;
    routes.own = routes.hooked = *ctx->backend;
    routes.record = o->kind == RUN_LEADS;
    routes.hooked.router_forward.run = routed;
    routes.hooked.group_router_forward.run = group_routed;
    ctx->backend = &routes.hooked;
}

static void record_scores(const options *o, const char *what, results *r)
{
    if (o->kind == RUN_FOLLOWS && routes.count)
        record(r, routes.worst, 0, "scores of experts, %s", what);
    routes.worst = 0;
}

/* Those that follow begin anew. */
static void rewind_truth(void)
{
    routes.next = truth.next = 0;
}

static void free_truth(void)
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

static void open_bench(bench *b, const golden *g, const options *o, const ith_micro_batch *batch,
                       mask_kind mask, double max_grad_norm)
{
    memset(b, 0, sizeof *b);
    die_on(ith_session_open(&b->session, o->device, (int)o->mesh->world->local_rank, o->threads,
                            false, &err));
    b->mesh = o->mesh;
    if (b->session.cuda && o->mesh->world_size > 1)
        die_on(ith_mesh_open_device(o->mesh, b->session.ctx.device, o->zero >= 2, &err));
    if (o->reference)
        b->session.ctx.backend = ith_backend_ref();
    hook_routes(o, &b->session.ctx);
    int64_t positions = ith_max_i64(batch->num_tokens, GREEDY_CAPACITY);
    die_on(batch->num_grids
               ? ith_model_create_multimodal(&b->model, &g->config, o->dtype, positions, &err)
               : ith_model_create(&b->model, &g->config, o->dtype, positions, &err));
    ith_step_config c = {.mesh = o->mesh,
                         .zero_stage = o->zero,
                         .max_tokens = batch->num_tokens,
                         .vision = vision_limits(batch),
                         .max_docs = batch->num_docs,
                         .max_labels = ith_max_i64(batch->num_labels, 1),
                         .max_doc_tokens = batch->num_tokens,
                         .chunk_rows = o->chunk,
                         .training = true,
                         .fp32_master = true,
                         .keep = o->keep,
                         .max_grad_norm = (float)max_grad_norm,
                         .block = mask.block,
                         .noisy = batch->noisy != NULL,
                         .bidirectional = mask.bidirectional};
    die_on(ith_step_create(&b->step, b->model, &b->session.ctx, &c, false));
    die_on(ith_model_load(b->model, &b->session.ctx, g->weights, b->model->w, b->step->master));
    die_on(ith_model_refresh_weights(b->model, &b->session.ctx));
}

static void close_bench(bench *b)
{
    ith_step_destroy(b->step);
    ith_model_destroy(b->model);
    ith_mesh_close_device(b->mesh);
    ith_session_close(&b->session);
}

/* The same of a flat buffer, whichever ranks have it: whole on every rank. */
static float *whole(bench *b, ith_tensor flat)
{
    ith_model *m = b->model;
    ith_shard *s = m->shard;
    ith_ctx *ctx = &b->session.ctx;
    if (!s)
        return floats(ctx, flat);
    bool is_shard = flat.shape[0] != m->num_elements;
    float *mine = floats(ctx, flat), *out = ith_calloc(m->num_elements, 4);
    for (int64_t block = 0; block < s->num_blocks; block++) {
        int64_t slice = ith_shard_slice_first(s, block),
                n = s->shard_first[block + 1] - s->shard_first[block];
        memcpy(out + slice, mine + (is_shard ? s->shard_first[block] : slice), (size_t)n * 4);
    }
    die_on(
        ith_comm_all_reduce(b->mesh->world, out, m->num_elements, ITH_F32, ITH_REDUCE_SUM, &err));
    ith_free(mine);
    return out;
}

/* ---- the checks ---- */

/* What is of all tokens of the group -> this rank's. */
static void upload_own(ith_device *d, void *to, const int32_t *all, const ith_stretch *own)
{
    die_on(d->upload(d, to, all + own[0].first, own[0].count * 4, &err));
    die_on(d->upload(d, (int32_t *)to + own[0].count, all + own[1].first, own[1].count * 4, &err));
}

/* Forward of the batch in the plan's memory that backward would use; logits of all rows against the
 * reference. */
static void check_logits(bench *b, const options *o, const ith_micro_batch *batch,
                         const int32_t *origin, mask_kind mask, const ith_st_entry *want,
                         results *r, const char *what)
{
    ith_stretch own[2];
    ith_cp_stretches(o->mesh, batch->num_tokens, own);
    ith_ctx *ctx = &b->session.ctx;
    ith_model *m = b->model;
    int64_t n = 0, v = m->config->vocab_size;
    ith_vision_buffers vision;
    /* Logits of all rows are not part of a training step: a plan of their own. */
    ith_plan *kept = ctx->plan, *plan = NULL;
    ith_tensor hidden = {0}, logits = {0}, rows = {0}, ids = {0}, pos = {0}, all_pos = {0},
               cu = {0}, noisy = {0}, slices = {0};
    int64_t list_size = ith_slice_list_size(batch->num_docs);
    int32_t *host_lists = ith_malloc(list_size * 4);
    ctx->plan = NULL;
    die_on(ith_plan_create(&plan, ctx->device, &err));
    ctx->plan = plan;
    for (int pass = 0; pass < 2; pass++) {
        n = pass ? own[0].count + own[1].count : ith_div_ceil(batch->num_tokens, o->mesh->cp_size);
        int64_t marks[ITH_MEM_CLASSES];
        for (int c = 0; c < ITH_MEM_CLASSES; c++)
            marks[c] = ith_plan_mark(plan, (ith_mem_class)c);
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "ids", ITH_I32, 1, n, 1, 1, 1, &ids));
        int64_t axes = m->has_vision ? 3 : 1;
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "pos", ITH_I32, 1, axes * n, 1, 1, 1, &pos));
        die_on(ith_vision_buffers_place(&vision, m, ctx, vision_limits(batch)));
        ith_vision_batch media = ith_vision_buffers_largest(&vision, m);
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "rows", ITH_I32, 1, n, 1, 1, 1, &rows));
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "cu", ITH_I32, 1, batch->num_docs + 1, 1, 1,
                            1, &cu));
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "slices", ITH_I32, 1, list_size, 1, 1, 1,
                            &slices));
        if (batch->noisy) {
            die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "noisy", ITH_I32, 1, batch->num_docs, 1,
                                1, 1, &noisy));
            die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "pos of all", ITH_I32, 1,
                                batch->num_tokens, 1, 1, 1, &all_pos));
        }
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "hidden", m->dtype, 2, n,
                            m->config->hidden_size, 1, 1, &hidden));
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "logits", m->dtype, 2, n, v, 1, 1, &logits));
        if (pass) {
            int32_t *all = ith_malloc(n * 4 + 4);
            for (int64_t i = 0; i < n; i++)
                all[i] = (int32_t)i;
            ith_device *d = ctx->device;
            upload_own(d, ids.data, batch->ids, own);
            for (int64_t axis = 0; axis < axes; axis++)
                upload_own(d, (int32_t *)pos.data + axis * n,
                           batch->mrope ? batch->mrope + axis * batch->num_tokens
                                        : batch->position_ids,
                           own);
            die_on(ith_vision_buffers_fill(&vision, m, ctx, batch, &media));
            die_on(d->upload(d, rows.data, all, n * 4, &err));
            die_on(d->upload(d, cu.data, batch->cu_seqlens, (batch->num_docs + 1) * 4, &err));
            if (batch->noisy) {
                die_on(d->upload(d, noisy.data, batch->noisy, batch->num_docs * 4, &err));
                die_on(
                    d->upload(d, all_pos.data, batch->position_ids, batch->num_tokens * 4, &err));
            }
            die_on(d->sync(d, &err));
            ith_free(all);
        }
        int64_t max_len = 0;
        for (int64_t i = 0; i < batch->num_docs; i++)
            max_len = ith_max_i64(max_len, batch->cu_seqlens[i + 1] - batch->cu_seqlens[i]);
        ith_batch dev = {.num_tokens = n,
                         .group_tokens = batch->num_tokens,
                         .ids = ids,
                         .position_ids = axes == 3 ? ith_tensor_2d(pos.data, ITH_I32, 3, n) : pos,
                         .vision = media,
                         .seqs = {.cu_seqlens = cu,
                                  .cu_host = batch->cu_seqlens,
                                  .num_docs = batch->num_docs,
                                  .max_len = max_len,
                                  .block = mask.block},
                         .bidirectional = mask.bidirectional};
        if (batch->noisy) {
            dev.seqs.noisy = noisy;
            dev.seqs.position = all_pos;
            dev.seqs.noisy_host = batch->noisy;
            dev.seqs.position_host = batch->position_ids;
        }
        int64_t taps = m->config->linear_conv_kernel_dim;
        if (m->passes_states && pass == 0)
            ith_slice_docs_largest(taps, n, batch->num_docs, max_len, slices, &dev.slice);
        if (m->passes_states && pass == 1) {
            ith_slice_docs_find(o->mesh, taps, batch->cu_seqlens, batch->num_docs, host_lists,
                                slices, &dev.slice);
            die_on(ctx->device->upload(ctx->device, slices.data, host_lists, list_size * 4, &err));
        }
        die_on(m->family->forward(m, ctx, &dev, false, hidden));
        die_on(ith_model_logits(m, ctx, logits, hidden, rows));
        if (pass == 0) {
            for (int c = 0; c < ITH_MEM_CLASSES; c++)
                ith_plan_release(plan, (ith_mem_class)c, marks[c]);
            die_on(ith_plan_commit(plan, &err));
        }
    }
    float *got = floats(ctx, logits);
    const float *from_run = o->draw ? true_values(o, got, n * v) : NULL;
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < n * v; i++) {
        int64_t at =
            i / v < own[0].count ? own[0].first + i / v : own[1].first + i / v - own[0].count;
        int64_t row = origin[at];
        if (row * v >= ith_st_numel(want)) /* diffusion: only the noisy rows */
            continue;
        float ref = 0;
        memcpy(&ref, from_run ? from_run + i : (const float *)want->data + row * v + i % v, 4);
        double diff = fabs((double)got[i] - (double)ref);
        worst = diff > worst || isnan(diff) ? diff : worst;
        largest = from_run ? fmax(largest, fabs((double)ref)) : largest;
    }
    for (int64_t i = 0; i < ith_st_numel(want) && !from_run; i++) {
        float ref = 0;
        memcpy(&ref, (const char *)want->data + i * 4, 4);
        largest = fmax(largest, fabs((double)ref));
    }
    record(r, largest > 0 ? worst / largest : worst, 2e-5, "%s logits", what);
    ith_free(got);
    ith_free(host_lists);
    ctx->plan = kept;
    ith_plan_destroy(plan);
}

static void check_pieces(bench *b, const options *o, bool other_weights, ith_tensor flat,
                         const char *dir, const char *sub, double bound, results *r)
{
    ith_buf path = {0};
    ith_st_reader *reader = NULL;
    ith_path_join(&path, dir, sub);
    die_on(ith_st_open(&reader, path.data, &err));
    float *all = whole(b, flat);
    for (int64_t i = 0; i < b->model->num_pieces; i++) {
        const ith_hf_piece *p = &b->model->pieces[i];
        const ith_st_entry *want = NULL;
        die_on(ith_st_need(reader, p->hf_name, p->ndim, p->shape, NULL, &want, &err));
        const float *got = all + b->model->params[p->param].first + p->first;
        double e = other_weights ? rel_norm(got, (const char *)true_values(o, got, p->count),
                                            ITH_F32, p->count)
                                 : rel_norm(got, want->data, want->dtype, p->count);
        record(r, e, bound, "%s %s", sub, p->hf_name);
    }
    ith_free(all);
    ith_st_close(reader);
    ith_buf_deinit(&path);
}

static double number(const json_t *json, const char *key)
{
    return json_number_value(json_object_get(json, key));
}

/* Loss, logits and every gradient of one batch. */
static void check_batch(const golden *g, const options *o, const ith_micro_batch *batch,
                        mask_kind mask, const char *what, const ith_st_entry *logits, double loss,
                        const char *grads, results *r)
{
    bench b;
    int32_t *origin = NULL;
    ith_micro_batch mine = deal(batch, o->mesh, &origin);
    if (batch->num_grids)
        add_media(g, batch, o->mesh, &mine);
    open_bench(&b, g, o, batch, mask, 0);
    if (logits)
        check_logits(&b, o, &mine, origin, mask, logits, r, what);
    ith_step_begin(b.step, batch->weight_sum);
    die_on(ith_step_micro(b.step, &mine));
    die_on(ith_step_reduce(b.step));
    double got = 0;
    ith_ctx *ctx = &b.session.ctx;
    die_on(ctx->device->download(ctx->device, &got, b.step->loss_sum.data, sizeof got, &err));
    die_on(ctx->device->sync(ctx->device, &err));
    loss = true_number(o, o->draw > 0, got, loss);
    record(r, fabs(got - loss) / fabs(loss), 1e-5, "%s loss", what);
    if (grads)
        check_pieces(&b, o, o->draw > 0, b.model->grad, g->dir, grads, 1e-4, r);
    record_scores(o, what, r);
    for (int c = 0; c < ITH_MEM_CLASSES;
         c++) /* the batch is as large as planned: no byte more, no byte less */
        record(r,
               (double)(c != ITH_MEM_OPTIMIZER && ith_plan_high(ctx->plan, (ith_mem_class)c) >
                                                      ith_plan_peak(ctx->plan, (ith_mem_class)c)),
               0, "planned memory of %s, %s", what, ith_mem_class_name((ith_mem_class)c));
    close_bench(&b);
    ith_free(mine.noisy);
    free_batch(&mine);
    ith_free(origin);
}

static double number_or(const json_t *json, double otherwise)
{
    return json ? json_number_value(json) : otherwise;
}

/* Of all gradients together, of the running step. */
static void check_all_gradients(bench *b, const options *o, int step, results *r)
{
    float *all = whole(b, b->model->grad);
    int64_t n = b->model->num_elements;
    record(r, rel_norm(all, (const char *)true_values(o, all, n), ITH_F32, n), 0,
           "adamw step %d gradients", step);
    ith_free(all);
}

/* All runs go on from the weights of the float32 run, rounded (the moments stay their own): AdamW
 * makes a sign of a gradient near zero, so that runs in bf16 part at once, and the next step would
 * be compared with that of another model. */
static void meet(bench *b, const golden *g, const options *o)
{
    const ith_model *m = b->model;
    float *all = o->kind == RUN_LEADS ? whole(b, m->w) : NULL;
    for (int64_t i = 0; all && i < m->num_elements; i++)
        all[i] = ith_bf16_to_f32(ith_f32_to_bf16(all[i]));
    int64_t count = ith_st_count(g->weights);
    ith_st_entry *of_file = ith_malloc(count * (int64_t)sizeof *of_file);
    if (!of_file)
        exit(1);
    for (int64_t i = 0; i < count; i++)
        of_file[i] = *ith_st_at(g->weights, i);
    for (int64_t i = 0; i < m->num_pieces; i++) {
        const ith_hf_piece *p = &m->pieces[i];
        const ith_st_entry *e = NULL;
        die_on(ith_st_need(g->weights, p->hf_name, p->ndim, p->shape, NULL, &e, &err));
        ith_st_entry *given = (ith_st_entry *)(uintptr_t)e;
        given->data =
            true_values(o, all ? all + m->params[p->param].first + p->first : NULL, p->count);
        given->dtype = ITH_F32;
        given->bytes = p->count * 4;
    }
    die_on(ith_model_load(b->model, &b->session.ctx, g->weights, m->w, b->step->master));
    die_on(ith_model_refresh_weights(b->model, &b->session.ctx));
    for (int64_t i = 0; i < count; i++)
        *(ith_st_entry *)(uintptr_t)ith_st_at(g->weights, i) = of_file[i];
    ith_free(of_file);
    ith_free(all);
}

static void check_adamw(const golden *g, const options *o, const ith_micro_batch *batch,
                        mask_kind mask, results *r)
{
    const json_t *a = json_object_get(g->json, "adamw");
    ith_adamw_hyper h = {(float)number(a, "lr"),
                         (float)number_or(json_array_get(json_object_get(a, "betas"), 0), 0.9),
                         (float)number_or(json_array_get(json_object_get(a, "betas"), 1), 0.999),
                         (float)number_or(json_object_get(a, "eps"), 1e-8),
                         (float)number(a, "weight_decay"),
                         0};
    bench b;
    int32_t *origin = NULL;
    ith_micro_batch mine = deal(batch, o->mesh, &origin);
    if (batch->num_grids)
        add_media(g, batch, o->mesh, &mine);
    open_bench(&b, g, o, batch, mask, number(a, "max_grad_norm"));
    bool other = o->kind != RUN_ALONE; /* after the first step: see meet */
    for (int64_t i = 0; i < 3; i++) {
        ith_step_stats stats;
        h.step = i + 1;
        ith_step_begin(b.step, batch->weight_sum);
        die_on(ith_step_micro(b.step, &mine));
        die_on(ith_step_reduce(b.step));
        if (other)
            check_all_gradients(&b, o, (int)i + 1, r);
        die_on(ith_step_end(b.step, h, &stats));
        die_on(ith_step_settle(b.step));
        double loss = json_number_value(json_array_get(json_object_get(a, "losses"), (size_t)i));
        double norm =
            json_number_value(json_array_get(json_object_get(a, "grad_norms"), (size_t)i));
        loss = true_number(o, i ? other : o->draw > 0, stats.loss, loss);
        norm = true_number(o, i ? other : o->draw > 0, stats.grad_norm, norm);
        record(r, fabs(stats.grad_norm - norm) / norm, i ? 3e-3 : 1e-5, "adamw step %d grad norm",
               (int)i + 1);
        record(r, fabs(stats.loss - loss) / loss, i ? 3e-3 : 1e-5, "adamw step %d loss",
               (int)i + 1);
        if (other && i < 2)
            meet(&b, g, o);
    }
    /* A rank whose slice is one token shorter, whose group has no document, whose share of the
     * images or (diffusion: the last layer runs on those rows) of the labels is not the largest
     * possible, that passes states and has no document from end to end of its slice, or (in a ring)
     * no document from stretch to stretch, uses less.
     */
    bool full =
        o->mesh->dp_size == 1 && batch->num_tokens % o->mesh->cp_size == 0 &&
        (o->mesh->cp_size == 1 || !(ith_ring_size(o->mesh) > 1 || batch->num_grids || mask.block ||
                                    mask.bidirectional || b.model->passes_states));
    /* Where the head's workspace is the largest, fewer labels use less of it. */
    int64_t most_labels =
        ith_min_i64(batch->num_labels, ith_div_ceil(batch->num_tokens, o->mesh->cp_size));
    for (int c = 0; c < ITH_MEM_CLASSES; c++) {
        const ith_plan *plan = b.session.ctx.plan;
        int64_t planned = ith_plan_peak(plan, (ith_mem_class)c),
                high = ith_plan_high(plan, (ith_mem_class)c);
        bool equal = full && (c != ITH_MEM_WORKSPACE || mine.num_labels == most_labels);
        record(r, equal ? fabs((double)(planned - high)) : fmax(0, (double)(high - planned)), 0,
               "planned = used, %s", ith_mem_class_name((ith_mem_class)c));
    }
    check_pieces(&b, o, other, b.step->master.ndim ? b.step->master : b.model->w, g->dir, "after3",
                 1e-3, r);
    record_scores(o, "adamw", r);
    close_bench(&b);
    ith_free(mine.noisy);
    free_batch(&mine);
    ith_free(origin);
}

typedef struct {
    const int32_t *want;
    int64_t count, wrong;
} greedy_check;

static bool on_greedy(void *arg, int64_t i, int32_t id, bool is_stop)
{
    (void)i;
    (void)is_stop;
    greedy_check *c = arg;
    c->wrong += id != c->want[c->count];
    c->count++;
    return true;
}

/* Greedy decoding with the cache: token for token. Rounding to bf16 may choose others. With media
 * the prompt holds all those of the one document. */
static void check_greedy(const golden *g, const options *o, const ith_micro_batch *one, results *r)
{
    const ith_st_entry *entry = entry_of(g, "greedy");
    if (!entry || o->dtype != ITH_F32 || o->reference)
        return;
    json_t *given = json_object_get(g->json, "greedy_prompt");
    int64_t total = ith_st_numel(entry),
            prompt = given ? (int64_t)json_integer_value(given) : GREEDY_PROMPT;
    int32_t *all = ints(entry);
    ith_buf dir = {0};
    ith_path_join(&dir, g->dir, "hf");
    ith_decoder_options d = {.device = o->device,
                             .threads = o->threads,
                             .set_dtype = true,
                             .dtype = ITH_F32,
                             .batch = 1,
                             .capacity = total + 1,
                             .max_append = prompt,
                             .media = vision_limits(one)};
    ith_decoder decoder;
    die_on(ith_decoder_open(&decoder, dir.data, &d, &err));
    greedy_check c = {all + prompt, 0, 0};
    const ith_decoder_media media = {one->pixels, one->grids, one->num_grids};
    ith_generate_options how = {.sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1},
                                .media = &media,
                                .max_new = total - prompt,
                                .token = on_greedy,
                                .arg = &c};
    ith_ids ids = {.ids = all, .count = prompt};
    die_on(ith_decoder_generate(&decoder, &ids, 1, &how, &err));
    record(r, (double)(c.wrong + llabs(total - prompt - c.count)), 0, "greedy tokens that differ");
    ith_decoder_close(&decoder);
    ith_buf_deinit(&dir);
    ith_free(all);
}

/* Decoding runs of decode.json: tokens and numbers of forwards equal, confidences near. */
typedef struct {
    const json_t *trace;
    double worst;
    int64_t next; /* token within the step */
    int64_t step;
    bool wrong;
} decode_trace;

static void on_written(void *arg, int64_t i, int64_t position, int32_t id, double confidence,
                       int64_t step)
{
    decode_trace *t = arg;
    (void)i;
    if (step != t->step)
        t->next = 0;
    t->step = step;
    const json_t *accepted = json_object_get(json_array_get(t->trace, (size_t)step), "accepted");
    bool found = false;
    for (size_t k = 0; k < json_array_size(accepted); k++) {
        const json_t *a = json_array_get(accepted, k);
        if (json_integer_value(json_array_get(a, 0)) != position)
            continue;
        found = json_integer_value(json_array_get(a, 1)) == id;
        t->worst = fmax(t->worst, fabs(json_number_value(json_array_get(a, 2)) - confidence));
    }
    t->wrong |= !found;
}

static int32_t *json_ints(const json_t *list, int64_t *count)
{
    *count = (int64_t)json_array_size(list);
    int32_t *out = ith_malloc(*count * 4 + 4);
    if (!out)
        exit(1);
    for (int64_t i = 0; i < *count; i++)
        out[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return out;
}

/* The head, float32, wherever it lies. */
static void scale_head(ith_block_decoder *d, double scale)
{
    ith_device *dev = d->session.ctx.device;
    ith_tensor head = d->model->params[d->model->head].w;
    float *w = ith_malloc(ith_tensor_bytes(head));
    if (!w)
        exit(1);
    die_on(dev->download(dev, w, head.data, ith_tensor_bytes(head), &err));
    die_on(dev->sync(dev, &err));
    for (int64_t i = 0; i < ith_numel(head); i++)
        w[i] *= (float)scale;
    die_on(dev->upload(dev, head.data, w, ith_tensor_bytes(head), &err));
    die_on(dev->sync(dev, &err));
    ith_free(w);
}

/* batch > 1: the same prompt in every place must give the same answer in every place. */
static void check_decode_run(const golden *g, const options *o, const json_t *run, int64_t batch,
                             results *r)
{
    int64_t num_prompt = 0, num_row = 0, num_out = 0, max_new = (int64_t)number(run, "gen_length");
    int32_t *prompt = json_ints(json_object_get(run, "prompt"), &num_prompt);
    int32_t *row = json_ints(json_object_get(run, "sequence"), &num_row);
    int32_t *generated = json_ints(json_object_get(run, "generated"), &num_out);
    int32_t stop = (int32_t)number(run, "eos_id");
    const json_t *threshold = json_object_get(run, "threshold"),
                 *edit = json_object_get(run, "edit_threshold"); /* absent or null: no edits */
    const char *name = json_string_value(json_object_get(run, "name"));
    double scale = number(run, "head_scale");
    decode_trace trace = {.trace = json_object_get(run, "trace"), .step = -1};
    ith_block_how how = {.block = (int64_t)number(run, "block_length"),
                         .steps = (int64_t)number(run, "steps"),
                         .minimal_topk = 1,
                         .threshold = json_is_null(threshold) ? 2 : json_number_value(threshold),
                         .max_new = max_new,
                         .edit = json_is_number(edit),
                         .edit_threshold = json_number_value(edit),
                         .max_post_steps =
                             json_integer_value(json_object_get(run, "max_post_steps")),
                         .mask_id = (int32_t)number(run, "mask_id"),
                         .stop_ids = &stop,
                         .num_stop_ids = 1,
                         .written = batch == 1 ? on_written : NULL,
                         .arg = &trace};
    ith_decoder_options opened = {.device = o->device,
                                  .threads = o->threads,
                                  .set_dtype = true,
                                  .dtype = ITH_F32,
                                  .batch = batch,
                                  .capacity = ith_block_row_len(num_prompt, max_new, how.block),
                                  .max_append = batch * num_prompt};
    ith_block_decoder d;
    ith_block_answer answers[3];
    ith_ids prompts[3];
    ith_buf path = {0};
    ith_path_join(&path, g->dir, "hf");
    die_on(ith_block_decoder_open(&d, path.data, &opened, how.block, &err));
    scale_head(&d, scale);
    for (int64_t i = 0; i < batch; i++)
        prompts[i] = (ith_ids){.ids = prompt, .count = num_prompt};
    die_on(ith_block_decoder_generate(&d, prompts, batch, &how, answers, &err));
    for (int64_t i = 0; i < batch; i++) {
        const ith_block_answer *a = &answers[i];
        bool same = a->row.count == num_row && memcmp(a->row.ids, row, (size_t)num_row * 4) == 0 &&
                    a->end - a->prompt == num_out &&
                    memcmp(a->row.ids + a->prompt, generated, (size_t)num_out * 4) == 0;
        record(r, same && !trace.wrong ? 0 : 1, 0, "decode %s tokens", name);
        record(r, fabs((double)a->steps - number(run, "forwards")), 0, "decode %s steps", name);
        record(r, fabs((double)a->edits - json_number_value(json_object_get(run, "edits"))), 0,
               "decode %s edits", name);
        record(r, fabs((double)(d.forwards + 1) - number(run, "forwards_with_cache")), 0,
               "decode %s forwards but the last commit", name);
        if (batch == 1)
            record(r, trace.worst, scale > 1 ? 1e-5 : 1e-6, "decode %s confidence", name);
        ith_block_answer_deinit(&answers[i]);
    }
    ith_block_decoder_close(&d);
    ith_buf_deinit(&path);
    ith_free(prompt);
    ith_free(row);
    ith_free(generated);
}

static void check_decode(const golden *g, const options *o, results *r)
{
    ith_buf path = {0};
    json_t *json = NULL;
    ith_path_join(&path, g->dir, "decode.json");
    bool can = ith_path_exists(path.data) && o->dtype == ITH_F32 && !o->reference;
    if (can) {
        die_on(ith_json_load(&json, path.data, &err));
        const json_t *runs = json_object_get(json, "runs");
        for (size_t i = 0; i < json_array_size(runs); i++)
            for (int64_t batch = 1; batch <= 3; batch += 2)
                check_decode_run(g, o, json_array_get(runs, i), batch, r);
        json_decref(json);
    }
    ith_buf_deinit(&path);
}

/* Diffusion: clean, noisy and labels [1,L] (labels at the masked positions themselves). */
static void run_diffusion(golden *g, const options *o, results *r)
{
    int64_t len = ith_st_numel(entry_of(g, "clean"));
    int32_t *clean = ints(entry_of(g, "clean")), *noisy = ints(entry_of(g, "noisy")),
            *labels = ints(entry_of(g, "labels"));
    float *weights = ith_malloc(len * 4);
    for (int64_t i = 0; i < len; i++)
        weights[i] = 1;
    mask_kind blocks = {(int64_t)number(g->json, "block_size"), false}, all = {0, true};
    ith_batch_limits limits = {.max_tokens = len, .max_docs = 1, .max_doc_tokens = len};
    static const struct {
        const char *what, *logits, *loss, *grads;
        bool blocks, keep_all, only_logits;
    } kinds[] = {
        {"blocks", "noisy_logits", "loss", "grads", true, true, false},
        {"bidirectional", "full_logits", "loss_full_bidirectional", NULL, false, true, false},
        {"block-causal", "block_causal_logits", NULL, NULL, false, true, true},
        {"skipping", NULL, "loss", "grads", true, false, false}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        ith_noise_options no = {.blocks = kinds[k].blocks,
                                .block_size = blocks.block,
                                .mask_id = (int32_t)number(g->json, "mask_id"),
                                .same_token = true,
                                .keep_all = kinds[k].keep_all};
        ith_noiser *noiser = NULL;
        ith_micro_batch batch;
        die_on(ith_noiser_create(&noiser, &no, &limits, &err));
        ith_noiser_begin(noiser);
        ith_noiser_add(noiser, clean, noisy, labels, weights, len, 0);
        ith_noiser_end(noiser, &batch);
        mask_kind mask = kinds[k].blocks || kinds[k].only_logits ? blocks : all;
        const ith_st_entry *logits = kinds[k].logits ? entry_of(g, kinds[k].logits) : NULL;
        if (kinds[k].only_logits) {
            bench b;
            int32_t *origin = NULL;
            ith_micro_batch mine = deal(&batch, o->mesh, &origin);
            open_bench(&b, g, o, &batch, mask, 0);
            check_logits(&b, o, &mine, origin, mask, logits, r, kinds[k].what);
            close_bench(&b);
            ith_free(mine.noisy);
            free_batch(&mine);
            ith_free(origin);
        } else {
            check_batch(g, o, &batch, mask, kinds[k].what, logits, number(g->json, kinds[k].loss),
                        kinds[k].grads, r);
        }
        if (kinds[k].blocks)
            check_adamw(g, o, &batch, mask, r);
        ith_noiser_destroy(noiser);
    }
    ith_free(clean);
    ith_free(noisy);
    ith_free(labels);
    ith_free(weights);
}

static void run_golden(golden *g, const options *o, results *r)
{
    const mask_kind causal = {0, false};
    if (entry_of(g, "noisy")) {
        run_diffusion(g, o, r);
        check_decode(g, o, r);
        return;
    }
    const ith_st_entry *ids_entry = entry_of(g, "input_ids"), *packed = entry_of(g, "packed_ids");
    int32_t *ids = ints(ids_entry), *labels = ints(entry_of(g, "labels"));
    int32_t cu[2] = {0, (int32_t)ith_st_numel(ids_entry)};
    ith_micro_batch one = batch_of(ids, labels, cu, 1);
    add_media(g, &one, &(ith_mesh){.dp_size = 1}, &one);
    check_batch(g, o, &one, causal, "one document", entry_of(g, "logits"), number(g->json, "loss"),
                "grads", r);
    check_adamw(g, o, &one, causal, r);
    check_greedy(g, o, &one, r);
    free_batch(&one);
    ith_free(ids);
    ith_free(labels);
    if (!packed)
        return;
    const ith_st_entry *cu_entry = entry_of(g, "cu_seqlens");
    int32_t *packed_cu = ints(cu_entry);
    ids = ints(packed);
    labels = ints(entry_of(g, "packed_labels"));
    ith_micro_batch many = batch_of(ids, labels, packed_cu, ith_st_numel(cu_entry) - 1);
    add_media(g, &many, &(ith_mesh){.dp_size = 1}, &many);
    check_batch(g, o, &many, causal, "packed", entry_of(g, "packed_logits"),
                number(g->json, "packed_loss"), "grads_packed", r);
    free_batch(&many);
    ith_free(ids);
    ith_free(labels);
    ith_free(packed_cu);
}

/* Each error becomes the largest of all ranks. */
static void merge(const options *o, results *r)
{
    for (int64_t i = 0; i < r->count; i++)
        die_on(ith_comm_all_reduce(o->mesh->world, &r->rows[i].error, 1, ITH_F64, ITH_REDUCE_MAX,
                                   &err));
}

static bool is_count(const result *row)
{
    return strncmp(row->name, "planned", 7) == 0;
}

/* Adds the squares of a draw's errors. */
static void add_draw(results *sums, const results *draw)
{
    for (int64_t i = 0; i < draw->count; i++) {
        const result *row = &draw->rows[i];
        if (i == sums->count)
            record(sums, 0, row->bound, "%s", row->name);
        ITH_ASSERT(strcmp(sums->rows[i].name, row->name) == 0);
        if (is_count(row))
            sums->rows[i].error = fmax(sums->rows[i].error, row->error);
        else
            sums->rows[i].error += row->error * row->error;
    }
}

static void end_draws(results *sums, int64_t draws)
{
    for (int64_t i = 0; i < sums->count; i++)
        if (!is_count(&sums->rows[i]))
            sums->rows[i].error = sqrt(sums->rows[i].error / (double)draws);
}

/* What bf16 must be expected to do to row i: the error of the reference there; to a gradient norm,
 * that of the gradients, which is the row before. */
static double expected_error(const results *reference, int64_t i)
{
    return reference->rows[strstr(reference->rows[i].name, "grad norm") ? i - 1 : i].error;
}

/* Prints the rows that fail, and the worst of each kind (first word of the name); returns the
 * number of failures. */
static int64_t report(const golden *g, const results *r, const results *yardstick)
{
    int64_t failures = 0;
    for (int64_t i = 0; i < r->count; i++) {
        result *row = &r->rows[i];
        if (yardstick && !is_count(row))
            row->bound = fmax(row->bound, 2 * expected_error(yardstick, i) + BF16_FLOOR);
        bool bad = !(row->error <= row->bound);
        failures += bad;
        if (bad)
            printf("FAIL  %-60s %.3g  bound %.3g\n", row->name, row->error, row->bound);
    }
    for (int64_t i = 0; i < r->count;) {
        size_t word = strcspn(r->rows[i].name, " ");
        int64_t worst = i, j = i;
        for (; j < r->count && strncmp(r->rows[j].name, r->rows[i].name, word + 1) == 0; j++)
            if (!(r->rows[j].error * r->rows[worst].bound <=
                  r->rows[worst].error * r->rows[j].bound))
                worst = j;
        printf("%-12.*s worst of %3lld: %-55s %.3g  bound %.3g\n", (int)word, r->rows[i].name,
               (long long)(j - i), r->rows[worst].name, r->rows[worst].error, r->rows[worst].bound);
        i = j;
    }
    printf("%s: %lld values, %lld out of bounds\n", g->dir, (long long)r->count,
           (long long)failures);
    return failures;
}

/* Weights of this draw, which both types hold exactly: what is measured is arithmetic. */
static void draw_weights(ith_st_reader *weights, int64_t draw, float **copies)
{
    uint64_t stream = ith_rng_stream("golden_check"), at = 0;
    for (int64_t i = 0; i < ith_st_count(weights); i++) {
        ith_st_entry *e = (ith_st_entry *)(uintptr_t)ith_st_at(weights, i);
        int64_t n = ith_st_numel(e);
        float *x = copies[i] = ith_malloc(n * 4 + 4);
        if (!x)
            exit(1);
        ith_convert(x, ITH_F32, e->data, e->dtype, n);
        for (int64_t j = 0; j < n; j++) {
            double u = ith_rng_uniform((uint64_t)draw, stream, at++);
            x[j] *= (float)(1 + (2 * u - 1) * DRAW_SPREAD);
            x[j] = ith_bf16_to_f32(ith_f32_to_bf16(x[j]));
        }
        if (e->dtype == ITH_F32)
            e->data = x;
        else
            ITH_ASSERT(e->dtype == ITH_BF16);
    }
}

/* bf16: errors of the run and of the yardstick over all draws. */
static void run_draws(golden *g, const options *o, const char *weights, results *r,
                      results *yardstick)
{
    options plain = *o, own = *o;
    plain.device = ITH_USE_CPU;
    plain.reference = true;
    for (int64_t draw = 0; draw < o->draws; draw++) {
        results exact = {0}, reference = {0}, got = {0};
        int64_t count = ith_st_count(g->weights);
        float **copies = ith_calloc(count, sizeof *copies);
        if (draw)
            draw_weights(g->weights, draw, copies);
        plain.draw = own.draw = draw;
        plain.dtype = ITH_F32;
        plain.kind = RUN_LEADS;
        run_golden(g, &plain, &exact);
        plain.dtype = ITH_BF16;
        plain.kind = own.kind = RUN_FOLLOWS;
        run_golden(g, &plain, &reference);
        rewind_truth();
        run_golden(g, &own, &got);
        free_truth();
        add_draw(yardstick, &reference);
        add_draw(r, &got);
        ith_free(exact.rows);
        ith_free(reference.rows);
        ith_free(got.rows);
        for (int64_t i = 0; i < count; i++)
            ith_free(copies[i]);
        ith_free(copies);
        ith_st_close(g->weights);
        die_on(ith_st_open(&g->weights, weights, &err));
    }
    end_draws(r, o->draws);
    end_draws(yardstick, o->draws);
}

static int64_t check_dir(const char *dir, const options *o)
{
    golden g = {.dir = dir};
    ith_buf path = {0};
    ith_path_join(&path, dir, "hf");
    die_on(ith_hf_config_load(&g.config, path.data, &err));
    ith_mesh_set_ulysses(o->mesh, o->ulysses ? o->ulysses : o->mesh->cp_size,
                         g.config.linear_num_value_heads > 0);
    die_on(ith_st_open(&g.weights, path.data, &err));
    ith_path_join(&path, dir, "ref.safetensors");
    die_on(ith_st_open(&g.ref, path.data, &err));
    ith_path_join(&path, dir, "ref.json");
    die_on(ith_json_load(&g.json, path.data, &err));
    results r = {0}, yardstick = {0};
    ith_path_join(&path, dir, "hf");
    if (o->dtype == ITH_BF16)
        run_draws(&g, o, path.data, &r, &yardstick);
    else
        run_golden(&g, o, &r);
    merge(o, &r);
    merge(o, &yardstick);
    if (o->mesh->world->rank > 0 && !freopen("/dev/null", "w", stdout)) /* rank 0 speaks */
        exit(1);
    int64_t failures = report(&g, &r, o->dtype == ITH_BF16 ? &yardstick : NULL);
    ith_free(r.rows);
    ith_free(yardstick.rows);
    ith_st_close(g.weights);
    ith_st_close(g.ref);
    json_decref(g.json);
    ith_hf_config_deinit(&g.config);
    ith_buf_deinit(&path);
    return failures;
}

static int run_dirs(int argc, char **argv, options *o, ith_comm *world)
{
    int64_t failures = 0, dirs = 0;
    ith_mesh mesh = {0};
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i], *eq = strchr(a, '=');
        if (eq && strncmp(a, "device=", 7) == 0)
            o->device = strcmp(eq, "=cuda") == 0 ? ITH_USE_CUDA : ITH_USE_CPU;
        else if (eq && strncmp(a, "dtype=", 6) == 0)
            o->dtype = strcmp(eq, "=bfloat16") == 0 ? ITH_BF16 : ITH_F32;
        else if (eq && strncmp(a, "threads=", 8) == 0)
            o->threads = (int)strtol(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "chunk=", 6) == 0)
            o->chunk = strtoll(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "draws=", 6) == 0)
            o->draws = ith_max_i64(1, strtoll(eq + 1, NULL, 10));
        else if (eq && strncmp(a, "zero=", 5) == 0)
            o->zero = (int)strtol(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "cp=", 3) == 0)
            o->cp = strtoll(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "ulysses=", 8) == 0)
            o->ulysses = strtoll(eq + 1, NULL, 10);
        else if (eq && strncmp(a, "keep=", 5) == 0)
            o->keep = strcmp(eq, "=all") == 0         ? ITH_KEEP_ALL
                      : strcmp(eq, "=attention") == 0 ? ITH_KEEP_ATTENTION
                      : strcmp(eq, "=host") == 0      ? ITH_KEEP_HOST
                                                      : ITH_KEEP_INPUT;
        else if (eq && strcmp(a, "backend=ref") == 0)
            o->reference = true;
        else if (!ith_path_is_dir(a))
            return fprintf(stderr, "golden_check: %s is not here\n", a), 77;
        else if (o->cp < 1 || world->size % o->cp != 0)
            return fprintf(stderr, "golden_check: cp=%lld does not divide %lld ranks\n",
                           (long long)o->cp, (long long)world->size),
                   2;
        else if (o->ulysses < 0 || (o->ulysses && o->cp % o->ulysses != 0))
            return fprintf(stderr, "golden_check: ulysses=%lld does not divide cp=%lld\n",
                           (long long)o->ulysses, (long long)o->cp),
                   2;
        else {
            die_on(ith_mesh_open(&mesh, world, o->cp, &err));
            o->mesh = &mesh;
            failures += check_dir(a, o);
            ith_mesh_close(&mesh);
            dirs++;
        }
    }
    if (!dirs)
        return fprintf(stderr, "golden_check: no directory given\n"), 2;
    return failures ? 1 : 0;
}

int main(int argc, char **argv)
{
    options o = {.device = ITH_USE_CPU, .dtype = ITH_F32, .keep = -1, .cp = 1, .draws = DRAWS};
    ith_comm *world = NULL;
    die_on(ith_comm_open_world(&world, 120, &err));
    int code = run_dirs(argc, argv, &o, world);
    ith_comm_close(world);
    return code;
}
