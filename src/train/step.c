/* step.c - one optimizer step, and the plan of its memory by walking it.
 *
 * Invariants:
 *  1. Gradients are blank at the begin of a step (kernels/blanks.h); where they are cut among the
 *     ranks, zero.
 *  2. The walk that is counted is the walk that runs: place_all and walk_micro are called for
 *     both. */
#include "train/step.h"

typedef ith_tensor T;

/* Rows of logits at a time, where none are asked for. Every chunk reads and writes the gradient of
 * the head once, so a GPU takes more of them; beside long sequences that counts for little, and
 * memory for much. Chosen from the shape alone, never from what is free: sums over chunks have
 * other last bits. */
#define CHUNK_ROWS 2048
#define LARGE_CHUNK_ROWS 4096
#define LARGE_CHUNK_MOST_TOKENS 65536
/* Rows of a dense MLP at a time: enough for full speed, little memory beside long sequences. */
#define MLP_TILE_ROWS 16384
#define GIB ((double)(1 << 30))
#define MAX_TOKENS ((int64_t)1 << 25) /* of the search for the longest sequence */
#define RESERVE_PERCENT 3 /* of the free device memory is left alone when no limit is given */

static ith_status push_1d(ith_ctx *ctx, ith_mem_class c, const char *name, ith_dtype dtype,
                          int64_t n, T *out)
{
    return ith_ctx_push(ctx, c, name, dtype, 1, n, 1, 1, 1, out);
}

static ith_status place_optimizer(ith_step *s)
{
    ith_ctx *ctx = s->ctx;
    ith_model *model = s->model;
    int64_t n = model->shard ? ith_shard_elements(model->shard) : model->num_elements;
    ith_dtype moments = s->config.bf16_moments ? ITH_BF16 : ITH_F32;
    s->master = ith_tensor_none();
    if (s->model->dtype != ITH_F32 && s->config.fp32_master)
        ITH_TRY(push_1d(ctx, ITH_MEM_OPTIMIZER, "master weights", ITH_F32, n, &s->master));
    ITH_TRY(push_1d(ctx, ITH_MEM_OPTIMIZER, "AdamW m", moments, n, &s->m));
    ITH_TRY(push_1d(ctx, ITH_MEM_OPTIMIZER, "AdamW v", moments, n, &s->v));
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    ITH_TRY(ith_zero(ctx, s->m));
    return ith_zero(ctx, s->v);
}

/* Most tokens and labels of this rank's slice. */
static int64_t slice_tokens(const ith_step_config *c)
{
    return ith_div_ceil(c->max_tokens, ith_cp_size(c->mesh));
}

static int64_t slice_labels(const ith_step_config *c)
{
    return ith_cp_size(c->mesh) == 1 ? c->max_labels : ith_min_i64(c->max_labels, slice_tokens(c));
}

static ith_status place_confidence(ith_step *s, int64_t labels)
{
    ith_ctx *ctx = s->ctx;
    ith_confidence *c = &s->confidence;
    *c = (ith_confidence){.beta = s->config.confidence_beta,
                          .mean_of_right = s->config.mean_of_right};
    if (c->beta <= 0 || !s->config.training)
        return ITH_OK;
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_F32, labels, &c->row_confidence));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_F32, labels, &c->right));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "sums", ITH_F64, 1, &c->sum));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "sums", ITH_F64, 1, &c->right_sum));
    return ith_zero(ctx, c->sum);
}

/* Pushes all that stays for the whole run. */
static ith_status place_all(ith_step *s)
{
    ith_ctx *ctx = s->ctx;
    const ith_step_config *c = &s->config;
    int64_t tokens = slice_tokens(c), labels = slice_labels(c);
    ITH_TRY(ith_mesh_place(c->mesh, ctx, c->zero_stage >= 2));
    ITH_TRY(ith_model_place(s->model, ctx, c->training));
    if (c->training)
        ITH_TRY(place_optimizer(s));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, tokens, &s->ids));
    int64_t axes = s->model->has_vision ? 3 : 1;
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, axes * tokens, &s->position_ids));
    ITH_TRY(ith_vision_buffers_place(&s->vision, s->model, ctx, c->vision));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, c->max_docs + 1, &s->cu_seqlens));
    s->noisy = ith_tensor_none();
    s->group_position_ids = s->position_ids;
    if (c->noisy)
        ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, c->max_docs, &s->noisy));
    if (c->noisy && ith_cp_size(c->mesh) > 1) /* of all rows of a group */
        ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, c->max_tokens,
                        &s->group_position_ids));
    int64_t list_size = s->model->passes_states ? ith_slice_list_size(c->max_docs) : 0;
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, list_size, &s->slice_lists));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, labels, &s->rows));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, labels, &s->labels));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_F32, labels, &s->seeds));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_F32, labels, &s->row_loss));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "sums", ITH_F64, 1, &s->loss_sum));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "sums", ITH_F64, 1, &s->balance_sum));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "sums", ITH_F64, 1, &s->sumsq));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "sums", ITH_F32, 1, &s->norm));
    ITH_TRY(push_1d(ctx, ITH_MEM_ACTIVATIONS, "sums", ITH_F32, 1, &s->scale));
    ITH_TRY(place_confidence(s, labels));
    void *host = NULL;
    ITH_TRY(ith_plan_push(ctx->plan, ITH_MEM_HOST, "batch staging", labels * 4, &host, ctx->err));
    s->host_rows = host;
    ITH_TRY(ith_plan_push(ctx->plan, ITH_MEM_HOST, "batch staging", labels * 4, &host, ctx->err));
    s->host_labels = host;
    ITH_TRY(ith_plan_push(ctx->plan, ITH_MEM_HOST, "batch staging", labels * 4, &host, ctx->err));
    s->host_seeds = host;
    ITH_TRY(
        ith_plan_push(ctx->plan, ITH_MEM_HOST, "batch staging", list_size * 4, &host, ctx->err));
    s->host_slice_lists = host;
    ITH_TRY(ith_zero(ctx, s->balance_sum));
    return ith_zero(ctx, s->loss_sum);
}

/* Of the ranks that share a micro-batch, and its balance, the one that counts it. */
static bool speaks_for_group(const ith_mesh *mesh)
{
    return ith_cp_size(mesh) == 1 || mesh->cp_rank == 0;
}

/* Forward, loss and (training) backward of s->batch. */
static ith_status walk_micro(ith_step *s, bool training)
{
    ith_model *m = s->model;
    ith_ctx *ctx = s->ctx;
    int64_t t = s->batch.num_tokens, mark = ith_plan_mark(ctx->plan, ITH_MEM_ACTIVATIONS);
    T hidden, dhidden = ith_tensor_none();
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "last hidden state", m->dtype, 2, t,
                         m->config->hidden_size, 1, 1, &hidden));
    if (training)
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "gradient of the stream", m->dtype, 2, t,
                             m->config->hidden_size, 1, 1, &dhidden));
    ITH_TRY(m->family->forward(m, ctx, &s->batch, training, hidden));
    ITH_TRY(ith_model_settle_all(m, ctx)); /* head and final norm */
    ITH_TRY(ith_chunk_loss(m, ctx, &s->batch, s->config.chunk_rows, &s->confidence, dhidden,
                           s->loss_sum, s->row_loss, hidden));
    if (m->expert_fraction.ndim && speaks_for_group(m->mesh))
        ITH_TRY(ith_dot_accumulate(ctx, s->balance_sum, m->expert_fraction, m->expert_mean_prob));
    if (training)
        ITH_TRY(m->family->backward(m, ctx, &s->batch, dhidden));
    ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

/* What is not trained has no gradient: before norms are taken. `grad` holds elements [first, ..) of
 * the flat layout. */
static ith_status clear_frozen(ith_step *s, T grad, int64_t first)
{
    const ith_model *m = s->model;
    int64_t at = first, last = first + grad.shape[0], begin = 0, end = first;
    if (!m->frozen.vision_tower && !m->frozen.merger && !m->frozen.language_model)
        return ITH_OK;
    for (; at < last; at = end) {
        if (!ith_model_next_trained(m, at, &begin, &end))
            begin = end = last;
        int64_t stop = ith_min_i64(begin, last);
        if (stop > at)
            ITH_TRY(ith_zero(s->ctx, ith_row_range(grad, at - first, stop - first)));
    }
    return ITH_OK;
}

/* AdamW over the trained elements of a stretch of the flat layout that begins with element `first`.
 * All buffers hold that stretch; master may be absent. */
static ith_status adamw_stretch(ith_step *s, T w, T master, T m, T v, T grad, int64_t first,
                                ith_adamw_hyper hyper)
{
    const T none = ith_tensor_none();
    int64_t last = first + grad.shape[0], begin = 0, end = 0;
    for (int64_t at = first; at < last; at = end) {
        if (!ith_model_next_trained(s->model, at, &begin, &end) || begin >= last)
            break;
        int64_t a = ith_max_i64(begin, first) - first, b = ith_min_i64(end, last) - first;
        ITH_TRY(ith_adamw(s->ctx, ith_row_range(w, a, b),
                          master.ndim ? ith_row_range(master, a, b) : none, ith_row_range(m, a, b),
                          ith_row_range(v, a, b), ith_row_range(grad, a, b), s->scale, hyper,
                          s->config.seed, first + a, s->model->zero_stage >= 2));
    }
    return ITH_OK;
}

/* The update of what this rank has of the optimizer, block by block. */
static ith_status update_shard(ith_step *s, ith_adamw_hyper hyper)
{
    ith_ctx *ctx = s->ctx;
    ith_model *m = s->model;
    for (int64_t b = 0; b < s->shard.num_blocks; b++) {
        T grad = ith_shard_slice(&s->shard, b, m->grad);
        ITH_TRY(clear_frozen(s, grad, ith_shard_slice_first(&s->shard, b)));
        if (!ith_shard_is_copy(&s->shard, b))
            ITH_TRY(ith_sumsq_accumulate(ctx, s->sumsq, grad));
    }
    ITH_TRY(ith_mesh_sum_world(s->config.mesh, ctx, s->sumsq));
    ITH_TRY(ith_clip_scale(ctx, s->norm, s->scale, s->sumsq, s->config.max_grad_norm));
    for (int64_t b = 0; b < s->shard.num_blocks; b++)
        ITH_TRY(adamw_stretch(
            s, ith_model_weight_slice(m, b), ith_shard_slice(&s->shard, b, s->master),
            ith_shard_slice(&s->shard, b, s->m), ith_shard_slice(&s->shard, b, s->v),
            ith_shard_slice(&s->shard, b, m->grad), ith_shard_slice_first(&s->shard, b), hyper));
    return ith_model_refresh_weights(m, ctx);
}

/* Elements [begin, end) of the flat buffers, of which w holds the weights. */
static ith_status adamw_range(ith_step *s, T w, int64_t begin, int64_t end, ith_adamw_hyper hyper)
{
    T master = s->master.ndim ? ith_row_range(s->master, begin, end) : s->master;
    return adamw_stretch(s, w, master, ith_row_range(s->m, begin, end),
                         ith_row_range(s->v, begin, end), ith_row_range(s->model->grad, begin, end),
                         begin, hyper);
}

/* Block b of the flat layout, whole. */
static ith_status update_block(ith_step *s, int64_t b, ith_adamw_hyper hyper)
{
    const ith_model *m = s->model;
    int64_t first = s->blocks[b], end = s->blocks[b + 1];
    T w = first == m->num_act ? m->w_f32 : ith_row_range(m->w, first, end);
    return adamw_range(s, w, first, end, hyper);
}

/* Layers through which the first micro-batch of a step has gone, at its largest, when few
 * processors have updated all of them; 0: the update had better take all processors, for it takes
 * them longer than the walk, or its experts do. Whether or not an update is on its way: which
 * products are chosen, and so the last bits, must not depend on it. */
static int64_t shared_layers(const ith_step *s)
{
    const ith_hf_config *c = s->model->config;
    int64_t tokens = slice_tokens(&s->config), update = s->ctx->device->update_tokens;
    if (s->model->shard || update == 0 || c->num_experts > 0 || tokens < update)
        return 0;
    return ith_div_ceil(c->num_hidden_layers * update, tokens);
}

/* The update beside the next forward walk: first, on the main queue, what it begins with; then
 * layer by layer on a queue of its own. Memory bounds the one, and power the other
 * (docs/cuda_backend.md). */
static ith_status update_beside(ith_step *s, ith_adamw_hyper hyper)
{
    ith_ctx *ctx = s->ctx;
    ith_model *m = s->model;
    ith_device *d = ctx->device;
    int64_t layers = m->config->num_hidden_layers, rest = layers + 1;
    ith_status status = ITH_OK;
    ITH_TRY(update_block(s, 0, hyper));
    if (m->has_vision)
        ITH_TRY(update_block(s, rest, hyper));
    if (m->w_f32.ndim)
        ITH_TRY(update_block(s, rest + 1, hyper));
    ITH_TRY(update_block(s, 1, hyper));
    ITH_TRY(d->fork(d, ITH_QUEUE_UPDATES, ctx->err));
    ith_ctx_enter(ctx, ITH_QUEUE_UPDATES, shared_layers(s) > 0);
    for (int64_t l = 1; l <= layers; l++) {
        if (l < layers || !m->has_vision)
            ITH_TRY_OUT(update_block(s, 1 + l, hyper));
        ITH_TRY_OUT(d->note(d, ITH_QUEUE_UPDATES, (int)l, ctx->err));
    }
    m->unsettled = layers;
out:
    ith_ctx_leave(ctx);
    return status;
}

static ith_status update(ith_step *s, ith_adamw_hyper hyper)
{
    ith_ctx *ctx = s->ctx;
    ITH_TRY(ith_zero(ctx, s->sumsq));
    if (s->model->shard)
        return update_shard(s, hyper);
    ITH_TRY(clear_frozen(s, s->model->grad, 0));
    ITH_TRY(ith_sumsq_accumulate(ctx, s->sumsq, s->model->grad));
    ITH_TRY(ith_clip_scale(ctx, s->norm, s->scale, s->sumsq, s->config.max_grad_norm));
    if (s->blocks)
        return update_beside(s, hyper);
    const ith_model *m = s->model;
    ITH_TRY(adamw_range(s, m->w, 0, m->num_act, hyper));
    return m->w_f32.ndim ? adamw_range(s, m->w_f32, m->num_act, m->num_elements, hyper) : ITH_OK;
}

/* [T], or three rows for a model that sees. */
static T positions_of(const ith_step *s, int64_t tokens)
{
    return s->model->has_vision ? ith_tensor_2d(s->position_ids.data, ITH_I32, 3, tokens)
                                : ith_row_range(s->position_ids, 0, tokens);
}

/* The batch without contents; group_tokens of the cp group, tokens of this rank. */
static void bind_batch(ith_step *s, int64_t group_tokens, int64_t tokens, int64_t docs,
                       int64_t rows, int64_t max_len, const int32_t *cu)
{
    s->batch = (ith_batch){.num_tokens = tokens,
                           .group_tokens = group_tokens,
                           .ids = ith_row_range(s->ids, 0, tokens),
                           .position_ids = positions_of(s, tokens),
                           .vision = ith_vision_buffers_largest(&s->vision, s->model),
                           .seqs = {.cu_seqlens = ith_row_range(s->cu_seqlens, 0, docs + 1),
                                    .cu_host = cu,
                                    .num_docs = docs,
                                    .max_len = max_len,
                                    .block = s->config.block},
                           .bidirectional = s->config.bidirectional,
                           .num_rows = rows,
                           .rows = ith_row_range(s->rows, 0, rows),
                           .labels = ith_row_range(s->labels, 0, rows),
                           .seeds = ith_row_range(s->seeds, 0, rows)};
    if (s->config.noisy) {
        s->batch.seqs.noisy = ith_row_range(s->noisy, 0, docs);
        s->batch.seqs.position = ith_row_range(s->group_position_ids, 0, group_tokens);
    }
}

/* How many layers, from the top (their activations are wanted first), keep what; the rest keeps its
 * input on the host. normed: of those that keep all, see ith_model. */
typedef struct {
    int64_t all, attention, input, normed;
} keep_counts;

/* What the next micro-batch is: shared by the cp group, or this rank's alone. */
static void set_whole(ith_step *s, bool whole)
{
    ith_model *m = s->model;
    ith_model_set_mesh(m, whole ? &s->alone : s->config.mesh);
    m->passes_states = s->passes_states && !whole;
}

/* The largest micro-batch of one rank alone, where there are such. */
static ith_status count_whole(ith_step *s)
{
    const ith_step_config *c = &s->config;
    int64_t tokens = c->max_whole_tokens;
    if (tokens == 0)
        return ITH_OK;
    set_whole(s, true);
    bind_batch(s, tokens, tokens, c->max_docs, ith_min_i64(tokens, slice_labels(c)),
               ith_min_i64(tokens, c->max_doc_tokens), NULL);
    ith_status status = walk_micro(s, c->training);
    if (status == ITH_OK && c->training && c->evaluates)
        status = walk_micro(s, false);
    set_whole(s, false);
    return status;
}

/* Counts a whole step. */
static ith_status count_step(ith_step *s, keep_counts n)
{
    ith_ctx *ctx = s->ctx;
    const ith_step_config *c = &s->config;
    int64_t layers = s->model->config->num_hidden_layers;
    for (int64_t l = 0; l < layers; l++) {
        int64_t top = layers - 1 - l;
        s->model->keep[l] = top < n.all                           ? ITH_KEEP_ALL
                            : top < n.all + n.attention           ? ITH_KEEP_ATTENTION
                            : top < n.all + n.attention + n.input ? ITH_KEEP_INPUT
                                                                  : ITH_KEEP_HOST;
        s->model->keep_normed[l] = top < n.normed;
    }
    ITH_TRY(place_all(s));
    bind_batch(s, c->max_tokens, slice_tokens(c), c->max_docs, slice_labels(c), c->max_doc_tokens,
               NULL);
    if (s->model->passes_states)
        ith_slice_docs_largest(s->model->config->linear_conv_kernel_dim, slice_tokens(c),
                               c->max_docs, c->max_doc_tokens, s->slice_lists, &s->batch.slice);
    ITH_TRY(walk_micro(s, c->training));
    if (c->training)
        ITH_TRY(update(s, (ith_adamw_hyper){.step = 1}));
    if (c->training && c->evaluates) /* with all kept it wants other workspace than training */
        ITH_TRY(walk_micro(s, false));
    ITH_TRY(count_whole(s)); /* binds another batch */
    for (int i = 0; i < ITH_MEM_CLASSES; i++)
        ith_plan_release(ctx->plan, (ith_mem_class)i, 0);
    s->layers_keep_all = n.all;
    s->layers_keep_attention = n.attention;
    s->layers_keep_input = n.input;
    return ITH_OK;
}

static ith_status bytes_of(ith_step *s, keep_counts n, int64_t *out)
{
    ith_plan_reset(s->ctx->plan);
    ITH_TRY(ith_mesh_agree(s->config.mesh, count_step(s, n), s->ctx->err));
    *out = ith_plan_total(s->ctx->plan);
    /* Shares of heads differ, and with them bytes: what is kept must not. */
    return ith_mesh_max(s->config.mesh, out, s->ctx->err);
}

/* Mix `phase` with n layers of its better kind: 0 all with what norms make, over all; 1 all over
 * attention, 2 attention over input, 3 input over host. */
static keep_counts mix(int phase, int64_t n, int64_t layers)
{
    return phase == 0   ? (keep_counts){layers, 0, 0, n}
           : phase == 1 ? (keep_counts){n, layers - n, 0, 0}
           : phase == 2 ? (keep_counts){0, n, layers - n, 0}
                        : (keep_counts){0, 0, n, 0};
}

/* The fastest mix that fits: keeping all is faster than keeping attention, than keeping inputs,
 * than fetching them from the host. Bytes grow with n. The CPU is its own host: it stops at inputs.
 */
static ith_status choose_keep(ith_step *s, int64_t limit)
{
    int64_t layers = s->model->config->num_hidden_layers, bytes = 0;
    int phases = s->ctx->device == ith_device_cpu() ? 3 : 4;
    for (int phase = 0; phase < phases; phase++) {
        ITH_TRY(bytes_of(s, mix(phase, 0, layers), &bytes));
        if (bytes > limit && phase + 1 < phases)
            continue;
        int64_t low = 0, high = bytes <= limit ? layers : 0;
        while (low < high) {
            int64_t mid = low + (high - low + 1) / 2;
            ITH_TRY(bytes_of(s, mix(phase, mid, layers), &bytes));
            if (bytes <= limit)
                low = mid;
            else
                high = mid - 1;
        }
        return bytes_of(s, mix(phase, low, layers), &bytes);
    }
    return ITH_OK;
}

/* Bytes the plan may use: the config's limit, else what is free less a reserve. */
static ith_status limit_of(ith_step *s, int64_t *limit)
{
    int64_t total = 0;
    const ith_mesh *mesh = s->config.mesh;
    *limit = s->config.memory_limit;
    if (*limit > 0)
        return ITH_OK;
    ITH_TRY(ith_mesh_agree(mesh, s->ctx->device->memory(s->ctx->device, limit, &total, s->ctx->err),
                           s->ctx->err));
    *limit -= *limit / 100 * RESERVE_PERCENT;
    if (mesh && mesh->world) /* ranks that share it */
        *limit /= s->ctx->device == ith_device_cpu() ? mesh->world->local_size
                                                     : mesh->device_world[0]->sharers;
    *limit = -*limit; /* the tightest decides for all */
    ITH_TRY(ith_mesh_max(mesh, limit, s->ctx->err));
    *limit = -*limit;
    return ITH_OK;
}

/* All layers keep the same. */
static keep_counts all_layers(ith_keep keep, int64_t layers)
{
    return keep == ITH_KEEP_ALL         ? (keep_counts){layers, 0, 0, 0}
           : keep == ITH_KEEP_ATTENTION ? (keep_counts){0, layers, 0, 0}
           : keep == ITH_KEEP_INPUT     ? (keep_counts){0, 0, layers, 0}
                                        : (keep_counts){0, 0, 0, 0};
}

/* The step as it is, for one document of `tokens`, every row labelled. */
static ith_status bytes_for_tokens(ith_step *s, int64_t tokens, ith_keep keep, int64_t *out)
{
    ith_step_config *c = &s->config;
    c->max_tokens = c->max_labels = c->max_doc_tokens = tokens;
    c->max_docs = 1;
    c->max_whole_tokens = 0;
    s->model->max_positions = tokens;
    return bytes_of(s, all_layers(keep, s->model->config->num_hidden_layers), out);
}

ith_status ith_step_longest(const ith_step *step, int64_t limit, ith_keep keep, int64_t *out)
{
    ith_step s = *step;
    int64_t positions = s.model->max_positions, low = 0, high = MAX_TOKENS, bytes = 0;
    while (low < high) {
        int64_t mid = low + (high - low + 1) / 2;
        ITH_TRY(bytes_for_tokens(&s, mid, keep, &bytes));
        if (bytes <= limit)
            low = mid;
        else
            high = mid - 1;
    }
    if (low > 0)
        ITH_TRY(bytes_for_tokens(&s, low, keep, &bytes));
    s.model->max_positions = positions;
    *out = low;
    return ITH_OK;
}

static ith_status refuse_too_large(ith_step *s, int64_t limit)
{
    int64_t longest = 0, needed = ith_plan_total(s->ctx->plan);
    ITH_TRY(ith_step_longest(s, limit, ITH_KEEP_INPUT, &longest));
    if (longest == 0)
        return ith_fail(s->ctx->err, ITH_ERR_MEMORY,
                        "%s: the model alone, with gradients and optimizer, does not fit: %.2f GiB "
                        "for a micro-batch of %lld tokens, %.2f GiB may be used (master_dtype "
                        "bfloat16 needs less; zero_stage shares it over ranks)",
                        s->ctx->device->name, (double)needed / GIB, (long long)s->config.max_tokens,
                        (double)limit / GIB);
    return ith_fail(s->ctx->err, ITH_ERR_MEMORY,
                    "%s: a micro-batch of %lld tokens needs %.2f GiB, %.2f GiB may be used; one "
                    "sequence of %lld tokens fits (cutoff_len, micro_batch_size; master_dtype "
                    "bfloat16 needs less)",
                    s->ctx->device->name, (long long)s->config.max_tokens, (double)needed / GIB,
                    (double)limit / GIB, (long long)longest);
}

/* Where there is room beside what layers keep, micro-batches add to whole gradients, which are then
 * exchanged once a step and not by each of them. */
static ith_status choose_gradients(ith_step *s, int64_t limit)
{
    ith_model *m = s->model;
    keep_counts n = {s->layers_keep_all, s->layers_keep_attention, s->layers_keep_input, 0};
    int64_t bytes = 0;
    if (!s->config.accumulates || m->zero_stage != 2)
        return ITH_OK;
    for (int64_t l = 0; l < m->config->num_hidden_layers; l++)
        n.normed += m->keep_normed[l];
    m->zero_stage = 1;
    ITH_TRY(bytes_of(s, n, &bytes));
    if (bytes <= limit)
        return ITH_OK;
    m->zero_stage = 2;
    return bytes_of(s, n, &bytes);
}

static ith_status plan_step(ith_step *s, bool plan_only)
{
    int64_t layers = s->model->config->num_hidden_layers, limit = 0, unused = 0;
    ITH_TRY(limit_of(s, &limit));
    if (s->config.keep >= 0)
        ITH_TRY(bytes_of(s, all_layers((ith_keep)s->config.keep, layers), &unused));
    else
        ITH_TRY(choose_keep(s, limit));
    ITH_TRY(choose_gradients(s, limit));
    int64_t total = ith_plan_total(s->ctx->plan);
    ITH_TRY(ith_mesh_max(s->config.mesh, &total, s->ctx->err));
    return plan_only || total <= limit ? ITH_OK : refuse_too_large(s, limit);
}

double ith_flop_per_byte(const ith_device *device)
{
    return device == ith_device_cpu() ? 16 : 400; /* a GPU over NVLink */
}

static bool passes_states(const ith_step *s)
{
    const ith_hf_config *c = s->model->config;
    int64_t cp = ith_cp_size(s->config.mesh);
    bool is_linear = false;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        is_linear |= c->layer_is_linear[l];
    if (cp == 1 || !is_linear || s->config.linear_cp == ITH_LINEAR_HEADS)
        return false;
    ith_linear_shape shape = {.tokens = s->config.max_tokens,
                              .max_doc_tokens = s->config.max_doc_tokens,
                              .key_heads = c->linear_num_key_heads,
                              .value_heads = c->linear_num_value_heads,
                              .key_dim = c->linear_key_head_dim,
                              .value_dim = c->linear_value_head_dim,
                              .element_bytes = ith_dtype_bytes(s->model->dtype)};
    return s->config.linear_cp == ITH_LINEAR_STATES ||
           ith_delta_scan_pays(cp, &shape, ith_flop_per_byte(s->ctx->device));
}

/* Every parameter's gradient, in the order of memory: those kept in f32 lie behind the others. */
static ith_status list_gradients(ith_step *s)
{
    const ith_model *m = s->model;
    if (!s->config.training || m->zero_stage >= 2)
        return ITH_OK;
    ith_blanks *b = &s->blanks;
    ITH_TRY(
        ith_alloc_zero((void **)&b->all, m->num_params, sizeof *b->all, "gradients", s->ctx->err));
    b->base = m->grad.data;
    for (int f32 = 0; f32 < 2; f32++)
        for (int64_t i = 0; i < m->num_params; i++) {
            const ith_param *p = &m->params[i];
            if (p->is_f32 == (f32 != 0))
                b->all[b->count++] =
                    (ith_blank){p->first * 4, p->first * 4 + ith_tensor_bytes(p->grad), false};
        }
    return ITH_OK;
}

/* Where updates run beside: borders of the blocks. */
static ith_status list_blocks(ith_step *s)
{
    const ith_model *m = s->model;
    int64_t n = ith_model_num_blocks(m), *list = NULL;
    if (!s->config.training || s->config.updates_first || m->shard || !s->ctx->device->enter)
        return ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&list, 2 * n + 1, sizeof *list, "blocks", s->ctx->err));
    ith_model_blocks(m, list, list + n + 1);
    s->blocks = list;
    return ITH_OK;
}

static int64_t default_chunk_rows(const ith_step *s)
{
    bool large =
        s->ctx->device != ith_device_cpu() && s->config.max_tokens <= LARGE_CHUNK_MOST_TOKENS;
    return large ? LARGE_CHUNK_ROWS : CHUNK_ROWS;
}

ith_status ith_step_create(ith_step **out, ith_model *model, ith_ctx *ctx,
                           const ith_step_config *config, bool plan_only)
{
    ITH_ASSERT(ctx->plan && ith_plan_counting(ctx->plan) && config->max_tokens > 0 &&
               config->max_docs > 0);
    ith_step *s = NULL;
    ith_status status = ITH_OK;
    /* The plan is made together: who cannot begin is agreed first. */
    ITH_TRY(ith_mesh_agree(config->mesh,
                           ith_alloc_zero((void **)&s, 1, sizeof *s, "step", ctx->err), ctx->err));
    s->model = model;
    s->ctx = ctx;
    s->config = *config;
    if (config->mesh)
        s->alone = ith_mesh_alone(config->mesh);
    set_whole(s, false);
    model->mlp_tile = MLP_TILE_ROWS;
    if (s->config.chunk_rows <= 0)
        s->config.chunk_rows = default_chunk_rows(s);
    s->config.chunk_rows = ith_min_i64(s->config.chunk_rows, ith_max_i64(config->max_labels, 1));
    model->passes_states = s->passes_states = passes_states(s);
    ITH_ASSERT(config->max_whole_tokens <= slice_tokens(&s->config));
    ITH_TRY_OUT(ith_mesh_agree(
        config->mesh, ith_model_cut(model, config->mesh, config->zero_stage, &s->shard, ctx->err),
        ctx->err));
    ITH_TRY_OUT(plan_step(s, plan_only));
    if (!plan_only) {
        ITH_TRY_OUT(ith_plan_commit(ctx->plan, ctx->err));
        ITH_TRY_OUT(place_all(s));
        ITH_TRY_OUT(list_gradients(s));
        ITH_TRY_OUT(list_blocks(s));
    }
    *out = s;
    return ITH_OK;
out:
    ith_step_destroy(s);
    return status;
}

void ith_step_destroy(ith_step *step)
{
    if (step) {
        ith_shard_deinit(&step->shard);
        ith_free(step->blanks.all);
        ith_free(step->blocks);
        step->ctx->blanks = NULL;
    }
    ith_free(step);
}

void ith_step_begin(ith_step *step, double weight_sum)
{
    step->weight_sum = weight_sum;
    step->num_micro = 0;
    step->reduced = step->walked = false;
    for (int64_t i = 0; i < step->blanks.count; i++)
        step->blanks.all[i].blank = true;
    step->ctx->blanks = &step->blanks;
}

/* Labelled rows of a stretch, whose first token is row `row`, with their seeds into the staging
 * buffers behind n others; returns how many there are then. */
static int64_t stage_rows(ith_step *s, const ith_micro_batch *b, ith_stretch own, int64_t row,
                          int64_t n, double weight_sum)
{
    for (int64_t t = own.first; t < own.first + own.count; t++) {
        if (b->labels[t] < 0)
            continue;
        ITH_ASSERT(n < s->config.max_labels);
        s->host_rows[n] = (int32_t)(t - own.first + row);
        s->host_labels[n] = b->labels[t];
        s->host_seeds[n++] = (float)((double)b->weights[t] / weight_sum);
    }
    return n;
}

/* What is of all tokens of the group -> this rank's. */
static ith_status upload_own(ith_step *s, void *to, const int32_t *all, const ith_stretch *own)
{
    ith_device *d = s->ctx->device;
    ITH_TRY(d->upload(d, to, all + own[0].first, own[0].count * 4, s->ctx->err));
    return d->upload(d, (int32_t *)to + own[0].count, all + own[1].first, own[1].count * 4,
                     s->ctx->err);
}

static ith_status upload(ith_step *s, const ith_micro_batch *b, double weight_sum)
{
    ith_device *d = s->ctx->device;
    ith_error *err = s->ctx->err;
    ITH_ASSERT(b->num_tokens <= (b->whole ? s->config.max_whole_tokens : s->config.max_tokens) &&
               b->num_docs <= s->config.max_docs);
    ITH_TRY(d->sync(d, err)); /* the staging buffers of the micro-batch before */
    ith_stretch own[2];
    set_whole(s, b->whole);
    ith_cp_stretches(s->model->mesh, b->num_tokens, own);
    int64_t tokens = own[0].count + own[1].count, max_len = 0;
    int64_t rows = stage_rows(s, b, own[0], 0, 0, weight_sum);
    rows = stage_rows(s, b, own[1], own[0].count, rows, weight_sum);
    for (int64_t i = 0; i < b->num_docs; i++)
        max_len = ith_max_i64(max_len, b->cu_seqlens[i + 1] - b->cu_seqlens[i]);
    bind_batch(s, b->num_tokens, tokens, b->num_docs, rows, max_len, b->cu_seqlens);
    if (s->config.noisy) {
        ITH_ASSERT(b->noisy);
        s->batch.seqs.noisy_host = b->noisy;
        s->batch.seqs.position_host = b->position_ids;
        ITH_TRY(d->upload(d, s->noisy.data, b->noisy, b->num_docs * 4, err));
        if (s->group_position_ids.data != s->position_ids.data)
            ITH_TRY(
                d->upload(d, s->group_position_ids.data, b->position_ids, b->num_tokens * 4, err));
    }
    if (s->model->passes_states) {
        ith_slice_docs_find(s->model->mesh, s->model->config->linear_conv_kernel_dim, b->cu_seqlens,
                            b->num_docs, s->host_slice_lists, s->slice_lists, &s->batch.slice);
        ITH_TRY(d->upload(d, s->slice_lists.data, s->host_slice_lists,
                          ith_slice_list_size(b->num_docs) * 4, err));
    }
    s->batch.share = (float)(b->weight_sum / weight_sum);
    ITH_TRY(upload_own(s, s->ids.data, b->ids, own));
    for (int64_t axis = 0; axis < (s->model->has_vision ? 3 : 1); axis++)
        ITH_TRY(upload_own(s, (int32_t *)s->position_ids.data + axis * tokens,
                           b->mrope ? b->mrope + axis * b->num_tokens : b->position_ids, own));
    ITH_TRY(ith_vision_buffers_fill(&s->vision, s->model, s->ctx, b, &s->batch.vision));
    ITH_TRY(d->upload(d, s->cu_seqlens.data, b->cu_seqlens, (b->num_docs + 1) * 4, err));
    ITH_TRY(d->upload(d, s->rows.data, s->host_rows, rows * 4, err));
    ITH_TRY(d->upload(d, s->labels.data, s->host_labels, rows * 4, err));
    return d->upload(d, s->seeds.data, s->host_seeds, rows * 4, err);
}

ith_status ith_step_micro(ith_step *step, const ith_micro_batch *batch)
{
    ITH_ASSERT(step->config.training);
    /* From stage 2 on layers are reduced and gathered by all ranks in every walk. */
    if (batch->num_tokens == 0 && step->model->zero_stage < 2)
        return ITH_OK;
    step->model->shared_layers = step->walked ? 0 : shared_layers(step);
    step->walked = true;
    ITH_TRY(upload(step, batch, step->weight_sum > 0 ? step->weight_sum : 1.0));
    step->num_micro += batch->num_tokens > 0 && speaks_for_group(step->model->mesh);
    ith_status status = walk_micro(step, true);
    step->model->shared_layers = 0;
    step->ctx->shared = false;
    return status;
}

ith_status ith_step_reduce(ith_step *step)
{
    const ith_mesh *mesh = step->config.mesh;
    set_whole(step, false);
    step->reduced = true;
    ITH_TRY(ith_step_settle(step)); /* no micro-batch may have come */
    ITH_TRY(ith_blanks_close(step->ctx));
    step->ctx->blanks = NULL;
    if (ith_world_size(mesh) == 1)
        return ITH_OK;
    ITH_TRY(ith_model_reduce_grads(step->model, step->ctx));
    ITH_TRY(ith_mesh_sum_world(mesh, step->ctx, step->loss_sum));
    if (step->confidence.sum.ndim)
        ITH_TRY(ith_mesh_sum_world(mesh, step->ctx, step->confidence.sum));
    ITH_TRY(ith_mesh_sum_world(mesh, step->ctx, step->balance_sum));
    ITH_TRY(ith_comm_all_reduce(mesh->world, &step->num_micro, 1, ITH_I64, ITH_REDUCE_SUM,
                                step->ctx->err));
    return ITH_OK;
}

ith_status ith_step_end(ith_step *step, ith_adamw_hyper hyper, ith_step_stats *out)
{
    ith_ctx *ctx = step->ctx;
    ith_device *d = ctx->device;
    float norm = 0, scale = 0;
    double loss = 0, balance = 0, confidence = 0;
    T confidence_sum = step->confidence.sum;
    if (!step->reduced)
        ITH_TRY(ith_step_reduce(step));
    ITH_TRY(update(step, hyper));
    ITH_TRY(d->download(d, &norm, step->norm.data, sizeof norm, ctx->err));
    ITH_TRY(d->download(d, &scale, step->scale.data, sizeof scale, ctx->err));
    ITH_TRY(d->download(d, &loss, step->loss_sum.data, sizeof loss, ctx->err));
    ITH_TRY(d->download(d, &balance, step->balance_sum.data, sizeof balance, ctx->err));
    if (confidence_sum.ndim)
        ITH_TRY(d->download(d, &confidence, confidence_sum.data, sizeof confidence, ctx->err));
    ITH_TRY(d->sync(d, ctx->err));
    ITH_TRY(ith_zero(ctx, step->loss_sum));
    ITH_TRY(ith_zero(ctx, step->balance_sum));
    if (confidence_sum.ndim)
        ITH_TRY(ith_zero(ctx, confidence_sum));
    if (scale < 0 && step->model->zero_stage >= 2) /* nothing was updated, nothing cleared */
        ITH_TRY(ith_zero(ctx, step->model->grad));
    double micros = (double)ith_max_i64(step->num_micro, 1),
           experts = (double)step->model->config->num_experts;
    *out = (ith_step_stats){loss, (double)norm,
                            (double)step->model->aux_coef * experts * balance / micros + confidence,
                            scale < 0};
    return ITH_OK;
}

ith_status ith_step_settle(ith_step *step)
{
    return ith_model_settle_all(step->model, step->ctx);
}

ith_status ith_step_eval(ith_step *step, const ith_micro_batch *batch, double *loss)
{
    ith_device *d = step->ctx->device;
    double sum = 0;
    ITH_ASSERT(step->config.evaluates || !step->config.training);
    if (batch->num_tokens == 0 && step->model->zero_stage < 3)
        return ITH_OK;
    ITH_TRY(upload(step, batch, 1.0));
    ITH_TRY(ith_zero(step->ctx, step->loss_sum));
    ITH_TRY(walk_micro(step, false));
    set_whole(step, false);
    ITH_TRY(d->download(d, &sum, step->loss_sum.data, sizeof sum, step->ctx->err));
    ITH_TRY(d->sync(d, step->ctx->err));
    ITH_TRY(ith_zero(step->ctx, step->loss_sum));
    *loss += sum;
    return ITH_OK;
}
