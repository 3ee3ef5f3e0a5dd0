/* decoder.c - generation with a KV cache.
 *
 * Invariants:
 *  1. Row b*C + p of a cache layer holds position p of sequence b; among ranks that share
 *     sequences, the p-th of the positions that this rank holds.
 *  2. held[b] counts valid rows; rows beyond it are never read.
 *  3. Sequences that are done ride along with their last token; their results are not used. */
#include "generate/decoder.h"

#include <string.h>

#include "checkpoint/safetensors.h"

typedef ith_tensor T;

static ith_status push_1d(ith_ctx *ctx, const char *name, int64_t n, T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, name, ITH_I32, 1, n, 1, 1, 1, out);
}

static int64_t position_axes(const ith_decoder *d)
{
    return d->model->has_vision ? 3 : 1;
}

/* Tokens of a prompt that one walk takes at most, of the whole group. */
static int64_t most_of_group(const ith_decoder *d)
{
    return ith_decoder_ranks_most(&d->ranks, d->options.max_append, d->options.capacity);
}

/* Rows that this rank walks at most. */
static int64_t most_rows(const ith_decoder *d)
{
    return ith_max_i64(ith_decoder_ranks_slice(&d->ranks, most_of_group(d)), d->options.batch);
}

static ith_status place(ith_decoder *d)
{
    ith_ctx *ctx = &d->session.ctx;
    const ith_decoder_options *o = &d->options;
    const ith_hf_config *c = &d->hf;
    int64_t rows = most_rows(d);
    ITH_TRY(ith_decoder_ranks_place(&d->ranks, ctx));
    ITH_TRY(ith_model_place(d->model, ctx, false));
    ITH_TRY(ith_decoder_ranks_place_cache(&d->ranks, d->model, ctx, o->batch, o->capacity, 1,
                                          &d->cache));
    ITH_TRY(push_1d(ctx, "batch", o->batch, &d->cache.lengths));
    ITH_TRY(push_1d(ctx, "batch", rows, &d->ids));
    ITH_TRY(push_1d(ctx, "batch", position_axes(d) * rows, &d->position_ids));
    ITH_TRY(ith_vision_buffers_place(&d->vision, d->model, ctx, o->media));
    ITH_TRY(push_1d(ctx, "batch", rows, &d->rows));
    ITH_TRY(push_1d(ctx, "batch", o->batch + 1, &d->cu_seqlens));
    ITH_TRY(push_1d(ctx, "batch", o->batch, &d->last_rows));
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "logits", d->model->dtype, 2, o->batch,
                        c->vocab_size, 1, 1, &d->logits);
}

/* What one walk appends: tokens of sequences [first, first + num), or a slice of a prompt. */
typedef struct {
    int64_t first, num;
    int64_t tokens, group_tokens, max_len; /* of this rank, of its group, of a sequence */
    const int32_t *cu;                     /* host borders of the group's tokens */
    bool prefill;
    int64_t ends; /* sequences whose last token is here: 0, or num */
} piece;

/* Hidden states of the piece, and logits of the sequences' last tokens. */
static ith_status walk(ith_decoder *d, const piece *p, const ith_vision_batch *vision)
{
    ith_ctx *ctx = &d->session.ctx;
    ith_model *m = d->model;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_ACTIVATIONS), tokens = p->tokens;
    T hidden;
    ith_batch b = {.num_tokens = tokens,
                   .group_tokens = p->group_tokens,
                   .ids = ith_row_range(d->ids, 0, tokens),
                   .position_ids = m->has_vision
                                       ? ith_tensor_2d(d->position_ids.data, ITH_I32, 3, tokens)
                                       : ith_row_range(d->position_ids, 0, tokens),
                   .vision = *vision,
                   .seqs = {.cu_seqlens = ith_row_range(d->cu_seqlens, 0, p->num + 1),
                            .cu_host = p->cu,
                            .num_docs = p->num,
                            .max_len = p->max_len}};
    ith_decoder_ranks_share(&d->ranks, m, p->prefill);
    d->cache.first = p->first;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "last hidden state", m->dtype, 2, tokens,
                         m->config->hidden_size, 1, 1, &hidden));
    ITH_TRY(m->family->decode(m, ctx, &b, &d->cache, ith_row_range(d->rows, 0, tokens), p->prefill,
                              hidden));
    if (p->ends)
        ITH_TRY(ith_model_logits(m, ctx, ith_row_range(d->logits, p->first, p->first + p->ends),
                                 hidden, ith_row_range(d->last_rows, 0, p->ends)));
    ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status plan_memory(ith_decoder *d)
{
    ith_ctx *ctx = &d->session.ctx;
    const ith_decoder_options *o = &d->options;
    bool cut = ith_decoder_ranks_cp(&d->ranks) > 1;
    ITH_TRY(place(d));
    ith_vision_batch most = ith_vision_buffers_largest(&d->vision, d->model), none = {0};
    int64_t n = most_of_group(d), num = cut ? 1 : o->batch;
    const piece prompts = {.num = num,
                           .tokens = ith_decoder_ranks_slice(&d->ranks, n),
                           .group_tokens = n,
                           .max_len = ith_min_i64(n, o->capacity),
                           .prefill = true,
                           .ends = num};
    ITH_TRY(walk(d, &prompts, &most));
    n = cut ? o->batch : ith_max_i64(o->batch, o->max_append / o->batch * o->batch);
    const piece more = {
        .num = o->batch, .tokens = n, .group_tokens = n, .max_len = o->capacity, .ends = o->batch};
    ITH_TRY(walk(d, &more, cut ? &none : &most));
    ith_decoder_ranks_share(&d->ranks, d->model, true);
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        ith_plan_release(ctx->plan, (ith_mem_class)c, 0);
    ITH_TRY(ith_plan_commit(ctx->plan, ctx->err));
    return place(d);
}

ith_status ith_decoder_load(ith_model *model, ith_ctx *ctx, const char *dir, ith_error *err)
{
    ith_st_reader *reader = NULL;
    ITH_TRY(ith_st_open(&reader, dir, err));
    ith_status status = ith_model_load(model, ctx, reader, model->w, ith_tensor_none());
    ith_st_close(reader);
    return status == ITH_OK ? ITH_OK : ith_wrap(err, status, "%s", dir);
}

/* Threads and device are those of the local rank. */
static ith_status open_session(ith_session *session, const ith_decoder_options *options,
                               ith_error *err)
{
    const ith_comm *ranks = options->ranks.world;
    int threads = options->threads, index = ranks ? ith_narrow(ranks->local_rank) : 0;
    if (threads == 0 && ranks && ranks->local_size > 1) {
        ITH_TRY(ith_pool_default_threads(&threads, err));
        threads = ith_narrow(ith_max_i64(1, threads / ranks->local_size));
    }
    return ith_session_open(session, options->device, index, threads, false, err);
}

/* Of weights and cache: the wish, or that of the files. */
static ith_dtype wanted_dtype(const ith_decoder_options *options, const ith_hf_config *hf)
{
    return options->set_dtype                      ? options->dtype
           : hf->has_dtype && hf->dtype == ITH_F32 ? ITH_F32
                                                   : ITH_BF16;
}

ith_status ith_decoder_open_model(ith_hf_config *hf, ith_session *session, ith_model **model,
                                  const char *dir, const ith_decoder_options *o, bool diffusion,
                                  ith_error *err)
{
    ITH_TRY(ith_hf_config_load(hf, dir, err));
    if (diffusion && hf->family != ITH_FAMILY_LLADA2)
        return ith_fail(err, ITH_ERR_USAGE, "%s: %s is not a diffusion model", dir, hf->model_type);
    if (!diffusion && hf->family == ITH_FAMILY_LLADA2)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "%s: %s writes blocks, not token by token (use ithaca generate)", dir,
                        hf->model_type);
    ITH_TRY(open_session(session, o, err));
    return (o->media.max_patches ? ith_model_create_multimodal : ith_model_create)(
        model, hf, wanted_dtype(o, hf), o->capacity, err);
}

/* Host memory of an append. */
typedef struct {
    int32_t *ids, *positions;                /* of the group's tokens: [n], [axes,n] */
    int32_t *frames;                         /* the first token of each frame of media */
    int32_t *own_ids, *own_positions, *rows; /* of this rank's: [t], [axes,t], [t] */
    int32_t *cu, *last, *lengths;            /* [sequences + 1], [sequences], [batch] */
} staging;

/* Returns its size in int32_t; without memory that alone. */
static int64_t make_staging(const ith_decoder *d, staging *s)
{
    int64_t batch = d->options.batch, n = ith_max_i64(most_of_group(d), batch), t = most_rows(d);
    int32_t **parts[] = {&s->ids,  &s->positions, &s->frames, &s->own_ids, &s->own_positions,
                         &s->rows, &s->cu,        &s->last,   &s->lengths};
    const int64_t sizes[] = {n, 3 * n, n, t, 3 * t, t, batch + 1, batch, batch};
    int64_t at = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        *parts[i] = d->staging ? d->staging + at : NULL;
        at += sizes[i];
    }
    return at;
}

static ith_status open_memory(ith_decoder *d, const char *model_dir, ith_error *err)
{
    const ith_decoder_options *o = &d->options;
    staging sizes;
    ITH_TRY(plan_memory(d));
    ITH_TRY(ith_decoder_load(d->model, &d->session.ctx, model_dir, err));
    ITH_TRY(ith_alloc_zero((void **)&d->lengths, o->batch, sizeof *d->lengths, "decoder", err));
    ITH_TRY(ith_alloc_zero((void **)&d->held, o->batch, sizeof *d->held, "decoder", err));
    ITH_TRY(ith_alloc_zero((void **)&d->positions, o->batch, sizeof *d->positions, "decoder", err));
    ITH_TRY(ith_alloc((void **)&d->host_logits, o->batch * d->hf.vocab_size * 4, "logits", err));
    ITH_TRY(ith_alloc((void **)&d->raw_logits, o->batch * d->hf.vocab_size * 4, "logits", err));
    return ith_alloc((void **)&d->staging, make_staging(d, &sizes) * 4, "decoder", err);
}

ith_status ith_decoder_open(ith_decoder *d, const char *model_dir,
                            const ith_decoder_options *options, ith_error *err)
{
    ith_comm *world = options->ranks.world;
    ith_status status = ITH_OK;
    memset(d, 0, sizeof *d);
    d->options = *options;
    ITH_ASSERT(options->batch > 0 && options->capacity > 0 &&
               options->max_append >= options->batch);
    ITH_TRY_OUT(ith_comm_agree(
        world,
        ith_decoder_open_model(&d->hf, &d->session, &d->model, model_dir, options, false, err),
        err));
    ITH_TRY_OUT(ith_decoder_ranks_open(&d->ranks, d->model, &d->session, &options->ranks));
    ITH_TRY_OUT(ith_comm_agree(world, open_memory(d, model_dir, err), err));
    ITH_TRY_OUT(ith_model_refresh_weights(d->model, &d->session.ctx));
    return ITH_OK;
out:
    ith_decoder_close(d);
    return status;
}

void ith_decoder_close(ith_decoder *d)
{
    ith_model_destroy(d->model);
    ith_decoder_ranks_close(&d->ranks);
    ith_session_close(&d->session);
    ith_hf_config_deinit(&d->hf);
    ith_free(d->lengths);
    ith_free(d->held);
    ith_free(d->positions);
    ith_free(d->host_logits);
    ith_free(d->raw_logits);
    ith_free(d->staging);
    memset(d, 0, sizeof *d);
}

void ith_decoder_reset(ith_decoder *d)
{
    memset(d->lengths, 0, (size_t)d->options.batch * sizeof *d->lengths);
    memset(d->held, 0, (size_t)d->options.batch * sizeof *d->held);
    memset(d->positions, 0, (size_t)d->options.batch * sizeof *d->positions);
}

/* A state cannot go back: models with linear layers drop the whole sequence. Nor are positions
 * before an image kept, or which of the tokens a rank holds. */
int64_t ith_decoder_truncate(ith_decoder *d, int64_t b, int64_t length)
{
    ITH_ASSERT(length >= 0 && length <= d->lengths[b]);
    bool dense = !d->cache.state.ndim && d->positions[b] == d->lengths[b] && !d->cache.mesh;
    if (length == d->lengths[b])
        return length;
    d->lengths[b] = d->held[b] = d->positions[b] = dense ? length : 0;
    return d->lengths[b];
}

/* State and convolution inputs of sequences that begin while others go on. */
static ith_status clear_empty(ith_decoder *d)
{
    ith_ctx *ctx = &d->session.ctx;
    for (int64_t row = 0; row < d->cache.state.shape[0]; row++) {
        if (d->lengths[row % d->options.batch])
            continue;
        ITH_TRY(ith_zero(ctx, ith_row_range(d->cache.state, row, row + 1)));
        ITH_TRY(ith_zero(ctx, ith_row_range(d->cache.conv, row, row + 1)));
    }
    return ITH_OK;
}

/* Positions of the piece's tokens, on all axes, and of what follows them. A media token that a
 * model writes is text. */
static ith_status new_positions(ith_decoder *d, const piece *p, const staging *s,
                                const ith_decoder_media *media)
{
    const ith_hf_config *c = &d->hf;
    int64_t axes = position_axes(d);
    const ith_media_tokens tokens = {.image = (int32_t)c->image_token_id,
                                     .video = (int32_t)c->video_token_id,
                                     .merge = ith_max_i64(c->vision.spatial_merge_size, 1)};
    const ith_grid *grids = media ? media->grids : NULL;
    int64_t num_grids = media ? media->num_grids : 0;
    bool pictures = axes == 3 && (p->prefill || num_grids);
    if (pictures) {
        ITH_TRY(ith_media_find(&tokens, s->ids, p->cu, p->num, grids, num_grids, s->frames,
                               d->session.ctx.err));
        ith_mrope_positions(tokens.merge, p->cu, p->num, grids, num_grids, s->frames, NULL,
                            s->positions);
    }
    for (int64_t i = 0; i < p->num; i++) {
        int64_t b = p->first + i;
        int32_t first = (int32_t)d->positions[b];
        for (int64_t t = p->cu[i]; t < p->cu[i + 1]; t++)
            for (int64_t axis = 0; axis < axes; axis++) {
                int32_t *at = &s->positions[axis * p->group_tokens + t];
                *at = first + (pictures ? *at : (int32_t)t - p->cu[i]);
                d->positions[b] = ith_max_i64(d->positions[b], *at + 1);
            }
    }
    return ITH_OK;
}

/* The tokens of the piece, whole. */
static void lay_out(ith_decoder *d, piece *p, const staging *s, const int32_t *const *ids,
                    const int64_t *counts)
{
    int64_t n = 0;
    s->cu[0] = 0;
    for (int64_t i = 0; i < p->num; i++) {
        ITH_ASSERT(d->lengths[p->first + i] + counts[i] <= d->options.capacity &&
                   n + counts[i] <= d->options.max_append);
        memcpy(s->ids + n, ids[i], (size_t)counts[i] * sizeof *s->ids);
        n += counts[i];
        p->max_len = ith_max_i64(p->max_len, counts[i]);
        s->cu[i + 1] = (int32_t)n;
    }
    p->cu = s->cu;
    p->group_tokens = n;
}

/* This rank's tokens of the piece: all, or a slice of a prompt. They go behind those it holds; of
 * the others' turn they are overwritten there. */
static void take_slice(ith_decoder *d, piece *p, const staging *s)
{
    int64_t n = p->group_tokens, axes = position_axes(d), i = 0, b = 0, row = 0;
    ith_stretch own[2];
    ith_cp_stretches(d->model->mesh, n, own);
    p->tokens = own[0].count + own[1].count;
    memset(s->last, 0, (size_t)p->num * sizeof *s->last);
    for (int k = 0; k < 2; k++)
        for (int64_t t = own[k].first; t < own[k].first + own[k].count; t++, i++, row++) {
            for (; t >= p->cu[b + 1]; row = 0)
                b++;
            s->own_ids[i] = s->ids[t];
            for (int64_t axis = 0; axis < axes; axis++)
                s->own_positions[axis * p->tokens + i] = s->positions[axis * n + t];
            s->rows[i] =
                (int32_t)((p->first + b) * d->cache.capacity + d->held[p->first + b] + row);
            if (t == p->cu[b + 1] - 1)
                s->last[b] = (int32_t)i;
            if (t == n - 1)
                p->ends = p->num;
        }
}

/* Lengths behind the piece. */
static void count_tokens(ith_decoder *d, const piece *p, const staging *s)
{
    for (int64_t i = 0; i < p->num; i++) {
        int64_t b = p->first + i, n = p->cu[i + 1] - p->cu[i];
        bool keeps = p->prefill || ith_decoder_ranks_keeps(&d->ranks, d->lengths[b], 1);
        int64_t here = p->tokens < p->group_tokens ? p->tokens : n;
        d->held[b] += keeps ? here : 0;
        d->lengths[b] += n;
        s->lengths[b] = (int32_t)d->held[b];
    }
}

static ith_status upload_piece(ith_decoder *d, const piece *p, const staging *s)
{
    ith_device *dev = d->session.ctx.device;
    ith_error *err = d->session.ctx.err;
    int64_t t = p->tokens;
    ITH_TRY(dev->upload(dev, d->ids.data, s->own_ids, t * 4, err));
    ITH_TRY(
        dev->upload(dev, d->position_ids.data, s->own_positions, position_axes(d) * t * 4, err));
    ITH_TRY(dev->upload(dev, d->rows.data, s->rows, t * 4, err));
    ITH_TRY(dev->upload(dev, d->cu_seqlens.data, s->cu, (p->num + 1) * 4, err));
    ITH_TRY(dev->upload(dev, d->last_rows.data, s->last, p->num * 4, err));
    return dev->upload(dev, d->cache.lengths.data, s->lengths, d->options.batch * 4, err);
}

/* Logits of the sequences that end here; zeros of the others. */
static ith_status download_logits(ith_decoder *d, const piece *p)
{
    ith_device *dev = d->session.ctx.device;
    ith_error *err = d->session.ctx.err;
    int64_t words = d->hf.vocab_size, values = p->ends * words;
    float *to = d->host_logits + p->first * words;
    T from = ith_row_range(d->logits, p->first, p->first + p->ends);
    ITH_TRY(dev->download(dev, d->raw_logits, from.data, ith_tensor_bytes(from), err));
    ITH_TRY(dev->sync(dev, err));
    ith_convert(to, ITH_F32, d->raw_logits, d->logits.dtype, values);
    memset(to + values, 0, (size_t)((p->num - p->ends) * words) * sizeof *to);
    return ITH_OK;
}

/* ids and counts: of the piece's sequences. */
static ith_status append_piece(ith_decoder *d, piece *p, const int32_t *const *ids,
                               const int64_t *counts, const ith_decoder_media *media)
{
    staging s;
    ith_vision_batch vision = {0};
    (void)make_staging(d, &s);
    ith_decoder_ranks_share(&d->ranks, d->model, p->prefill);
    lay_out(d, p, &s, ids, counts);
    ITH_TRY(new_positions(d, p, &s, media));
    take_slice(d, p, &s);
    count_tokens(d, p, &s);
    if (media && media->num_grids) {
        ith_micro_batch mb = {.num_tokens = p->group_tokens,
                              .pixels = media->pixels,
                              .frames = s.frames,
                              .grids = media->grids,
                              .num_grids = media->num_grids};
        ITH_TRY(ith_vision_buffers_fill(&d->vision, d->model, &d->session.ctx, &mb, &vision));
    }
    ITH_TRY(upload_piece(d, p, &s));
    ITH_TRY(walk(d, p, &vision));
    return download_logits(d, p);
}

/* The images and videos of a prompt are the first of *rest, and leave it. */
static ith_decoder_media take_media(const ith_decoder *d, const int32_t *ids, int64_t n,
                                    ith_decoder_media *rest)
{
    const ith_hf_config *c = &d->hf;
    ith_decoder_media own = {rest->pixels, rest->grids, 0};
    int64_t side = ith_max_i64(c->vision.spatial_merge_size, 1), patches = 0, wanted = 0;
    for (int64_t i = 0; i < n; i++)
        wanted += side * side *
                  (ids[i] >= 0 && (ids[i] == c->image_token_id || ids[i] == c->video_token_id));
    while (own.num_grids < rest->num_grids && patches < wanted)
        patches += ith_grid_patches(own.grids[own.num_grids++]);
    rest->pixels += rest->pixels ? patches * ith_vision_patch_width(&c->vision) : 0;
    rest->grids += own.num_grids;
    rest->num_grids -= own.num_grids;
    return own;
}

/* Prompts that are cut, one by one. A rank without one walks along with a token, which nobody
 * reads.
 */
static ith_status prefill_cut(ith_decoder *d, const int32_t *const *ids, const int64_t *counts,
                              const ith_decoder_media *media)
{
    static const int32_t nothing = 0;
    int64_t batch = d->options.batch, words = d->hf.vocab_size;
    ith_error *err = d->session.ctx.err;
    ith_decoder_media rest = media ? *media : (ith_decoder_media){0};
    for (int64_t b = 0; b < batch; b++) {
        const int32_t *own = counts[b] ? ids[b] : &nothing;
        int64_t n = ith_max_i64(counts[b], 1);
        bool any = counts[b] > 0;
        ITH_TRY(ith_decoder_ranks_any(&d->ranks, &any, err));
        if (!any) {
            memset(d->host_logits + b * words, 0, (size_t)words * sizeof *d->host_logits);
            continue;
        }
        ith_decoder_media of_prompt = take_media(d, own, counts[b], &rest);
        piece p = {.first = b, .num = 1, .prefill = true};
        ITH_TRY(append_piece(d, &p, &own, &n, &of_prompt));
    }
    return ith_decoder_ranks_gather(&d->ranks, d->host_logits, batch * words, err);
}

ith_status ith_decoder_append(ith_decoder *d, const int32_t *const *ids, const int64_t *counts)
{
    return ith_decoder_append_media(d, ids, counts, NULL);
}

ith_status ith_decoder_append_media(ith_decoder *d, const int32_t *const *ids,
                                    const int64_t *counts, const ith_decoder_media *media)
{
    int64_t batch = d->options.batch, cached = 0;
    for (int64_t b = 0; b < batch; b++)
        cached += d->lengths[b];
    if (d->cache.mesh && !cached)
        return prefill_cut(d, ids, counts, media);
    for (int64_t b = 0; b < batch; b++)
        ITH_ASSERT(!d->cache.mesh || counts[b] == 1);
    if (cached && d->cache.state.ndim)
        ITH_TRY(clear_empty(d));
    piece p = {.num = batch, .prefill = !cached};
    return append_piece(d, &p, ids, counts, media);
}

/* ---- generation ---- */

typedef struct {
    ith_ids past; /* prompt and answer */
    int64_t new_tokens;
    bool done;
} sequence;

static bool is_stop(const ith_generate_options *how, int32_t id)
{
    for (int i = 0; i < how->num_stop_ids; i++)
        if (how->stop_ids[i] == id)
            return true;
    return false;
}

/* What the rank that chooses tells the others of its group. */
typedef struct {
    int32_t id, done;
} choice;

/* The next token of sequence i from host_logits, by the rank that chooses. */
static ith_status choose(ith_decoder *d, ith_sampler *sampler, const sequence *s, int64_t i,
                         const ith_generate_options *how, choice *out, ith_error *err)
{
    ITH_TRY(ith_sampler_next(sampler, &how->sampling, d->host_logits + i * d->hf.vocab_size,
                             s->past.ids, s->past.count, how->first_stream + (uint64_t)i, &out->id,
                             err));
    bool stop = is_stop(how, out->id), go_on = how->token(how->arg, i, out->id, stop);
    out->done = stop || !go_on || s->new_tokens + 1 >= how->max_new ||
                s->past.count + 1 >= d->options.capacity;
    return ITH_OK;
}

/* A token more for every open sequence; *open: some are open still. */
static ith_status next_tokens(ith_decoder *d, ith_sampler *sampler, sequence *seqs, int64_t num,
                              choice *choices, const ith_generate_options *how, bool *open,
                              ith_error *err)
{
    if (ith_decoder_ranks_chooses(&d->ranks))
        for (int64_t i = 0; i < num; i++)
            if (!seqs[i].done)
                ITH_TRY(choose(d, sampler, &seqs[i], i, how, &choices[i], err));
    ITH_TRY(ith_decoder_ranks_tell(&d->ranks, choices, num * (int64_t)sizeof *choices, err));
    *open = false;
    for (int64_t i = 0; i < num; i++) {
        sequence *s = &seqs[i];
        if (s->done)
            continue;
        void *grown = s->past.ids;
        ITH_TRY(ith_grow(&grown, &s->past.cap, s->past.count + 1, 4, "tokens", err));
        s->past.ids = grown;
        s->past.ids[s->past.count++] = choices[i].id;
        s->new_tokens++;
        s->done = choices[i].done;
        *open = *open || !s->done;
    }
    return ITH_OK;
}

static ith_status run(ith_decoder *d, ith_sampler *sampler, sequence *seqs, int64_t num,
                      const int32_t **ids, int64_t *counts, choice *choices,
                      const ith_generate_options *how, ith_error *err)
{
    static const int32_t nothing = 0;
    ith_decoder_reset(d);
    for (int64_t b = 0; b < d->options.batch; b++) {
        ids[b] = b < num ? seqs[b].past.ids : &nothing;
        counts[b] = b < num ? seqs[b].past.count : 0;
    }
    counts[0] = ith_max_i64(counts[0], 1); /* of a rank that only walks along */
    ITH_TRY(ith_decoder_append_media(d, ids, counts, how->media));
    for (bool open = true;;) {
        ITH_TRY(next_tokens(d, sampler, seqs, num, choices, how, &open, err));
        ITH_TRY(ith_decoder_ranks_any(&d->ranks, &open, err));
        if (!open)
            return ITH_OK;
        for (int64_t b = 0; b < d->options.batch; b++) {
            ids[b] = b < num ? &seqs[b].past.ids[seqs[b].past.count - 1] : &nothing;
            counts[b] = 1;
            if (b >= num || seqs[b].done) /* ride along on the same row */
                ith_decoder_truncate(
                    d, b, ith_max_i64(0, d->lengths[b] - (d->lengths[b] >= d->options.capacity)));
        }
        ITH_TRY(ith_decoder_append(d, ids, counts));
    }
}

ith_status ith_decoder_generate(ith_decoder *d, const ith_ids *prompts, int64_t num,
                                const ith_generate_options *how, ith_error *err)
{
    ITH_ASSERT(num <= d->options.batch);
    if (!ith_decoder_ranks_walks(&d->ranks, num))
        return ITH_OK;
    sequence *seqs = NULL;
    const int32_t **ids = NULL;
    int64_t *counts = NULL;
    choice *choices = NULL;
    ith_sampler sampler = {0};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc_zero((void **)&seqs, num, sizeof *seqs, "sequences", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&ids, d->options.batch, sizeof *ids, "sequences", err));
    ITH_TRY_OUT(
        ith_alloc_zero((void **)&counts, d->options.batch, sizeof *counts, "sequences", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&choices, num, sizeof *choices, "sequences", err));
    ITH_TRY_OUT(ith_sampler_init(&sampler, d->hf.vocab_size, err));
    for (int64_t i = 0; i < num; i++) {
        ITH_ASSERT(prompts[i].count > 0 && prompts[i].count < d->options.capacity);
        void *copy = NULL;
        ITH_TRY_OUT(ith_grow(&copy, &seqs[i].past.cap, prompts[i].count + 64, 4, "tokens", err));
        seqs[i].past.ids = copy;
        memcpy(copy, prompts[i].ids, (size_t)prompts[i].count * 4);
        seqs[i].past.count = prompts[i].count;
    }
    status = run(d, &sampler, seqs, num, ids, counts, choices, how, err);
out:
    for (int64_t i = 0; seqs && i < num; i++)
        ith_free(seqs[i].past.ids);
    ith_sampler_deinit(&sampler);
    ith_free(seqs);
    ith_free(ids);
    ith_free(counts);
    ith_free(choices);
    return status;
}
