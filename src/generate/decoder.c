/* decoder.c - generation with a KV cache.
 * Invariants: 1. row b*C + p of a cache layer holds position p of sequence b. 2. lengths[b] counts
 * valid rows; rows beyond it are never read. 3. Sequences that are done ride along with their last
 * token; their results are not used. */
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

static ith_status place(ith_decoder *d)
{
    ith_ctx *ctx = &d->session.ctx;
    const ith_decoder_options *o = &d->options;
    const ith_hf_config *c = &d->hf;
    ITH_TRY(ith_model_place(d->model, ctx, false));
    ITH_TRY(ith_model_place_cache(d->model, ctx, o->batch, o->capacity, &d->cache));
    ITH_TRY(push_1d(ctx, "batch", o->batch, &d->cache.lengths));
    ITH_TRY(push_1d(ctx, "batch", o->max_append, &d->ids));
    ITH_TRY(push_1d(ctx, "batch", position_axes(d) * o->max_append, &d->position_ids));
    ITH_TRY(ith_vision_buffers_place(&d->vision, d->model, ctx, o->media));
    ITH_TRY(push_1d(ctx, "batch", o->max_append, &d->rows));
    ITH_TRY(push_1d(ctx, "batch", o->batch + 1, &d->cu_seqlens));
    ITH_TRY(push_1d(ctx, "batch", o->batch, &d->last_rows));
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "logits", d->model->dtype, 2, o->batch,
                        c->vocab_size, 1, 1, &d->logits);
}

/* Hidden states of the appended tokens and logits of the last ones. cu: host borders. */
static ith_status walk(ith_decoder *d, int64_t tokens, const int32_t *cu, int64_t max_len,
                       bool prefill, const ith_vision_batch *vision)
{
    ith_ctx *ctx = &d->session.ctx;
    ith_model *m = d->model;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_ACTIVATIONS);
    T hidden;
    ith_batch b = {.num_tokens = tokens,
                   .group_tokens = tokens,
                   .ids = ith_row_range(d->ids, 0, tokens),
                   .position_ids = m->has_vision
                                       ? ith_tensor_2d(d->position_ids.data, ITH_I32, 3, tokens)
                                       : ith_row_range(d->position_ids, 0, tokens),
                   .vision = *vision,
                   .seqs = {.cu_seqlens = d->cu_seqlens,
                            .cu_host = cu,
                            .num_docs = d->options.batch,
                            .max_len = max_len}};
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "last hidden state", m->dtype, 2, tokens,
                         m->config->hidden_size, 1, 1, &hidden));
    ITH_TRY(m->family->decode(m, ctx, &b, &d->cache, ith_row_range(d->rows, 0, tokens), prefill,
                              hidden));
    ITH_TRY(ith_model_logits(m, ctx, d->logits, hidden, d->last_rows));
    ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status plan_memory(ith_decoder *d)
{
    ith_ctx *ctx = &d->session.ctx;
    const ith_decoder_options *o = &d->options;
    ITH_TRY(place(d));
    ith_vision_batch most = ith_vision_buffers_largest(&d->vision, d->model);
    ITH_TRY(walk(d, o->max_append, NULL, ith_min_i64(o->max_append, o->capacity), true, &most));
    ITH_TRY(walk(d, ith_max_i64(o->batch, o->max_append / o->batch * o->batch), NULL, o->capacity,
                 false, &most));
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

ith_status ith_decoder_open_session(ith_session *session, const ith_decoder_options *options,
                                    ith_error *err)
{
    const ith_comm *ranks = options->ranks;
    int threads = options->threads, index = ranks ? ith_narrow(ranks->local_rank) : 0;
    if (threads == 0 && ranks && ranks->local_size > 1) {
        ITH_TRY(ith_pool_default_threads(&threads, err));
        threads = ith_narrow(ith_max_i64(1, threads / ranks->local_size));
    }
    return ith_session_open(session, options->device, index, threads, false, err);
}

/* Device and model, before its ranks share it. */
static ith_status open_model(ith_decoder *d, const char *model_dir, ith_error *err)
{
    const ith_decoder_options *o = &d->options;
    ITH_TRY(ith_hf_config_load(&d->hf, model_dir, err));
    if (d->hf.family == ITH_FAMILY_LLADA2)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "%s: %s writes blocks, not token by token (use ithaca generate)", model_dir,
                        d->hf.model_type);
    ITH_TRY(ith_decoder_open_session(&d->session, o, err));
    ith_dtype dtype =
        o->set_dtype ? o->dtype : (d->hf.has_dtype && d->hf.dtype == ITH_F32 ? ITH_F32 : ITH_BF16);
    return (o->media.max_patches ? ith_model_create_multimodal
                                 : ith_model_create)(&d->model, &d->hf, dtype, o->capacity, err);
}

static ith_status open_memory(ith_decoder *d, const char *model_dir, ith_error *err)
{
    const ith_decoder_options *o = &d->options;
    ITH_TRY(plan_memory(d));
    ITH_TRY(ith_decoder_load(d->model, &d->session.ctx, model_dir, err));
    ITH_TRY(ith_alloc_zero((void **)&d->lengths, o->batch, sizeof *d->lengths, "decoder", err));
    ITH_TRY(ith_alloc_zero((void **)&d->positions, o->batch, sizeof *d->positions, "decoder", err));
    ITH_TRY(ith_alloc((void **)&d->host_logits, o->batch * d->hf.vocab_size * 4, "logits", err));
    ITH_TRY(ith_alloc((void **)&d->raw_logits, o->batch * d->hf.vocab_size * 4, "logits", err));
    return ith_alloc((void **)&d->staging, (6 * o->max_append + 3 * o->batch + 1) * 4, "decoder",
                     err);
}

ith_status ith_decoder_open(ith_decoder *d, const char *model_dir,
                            const ith_decoder_options *options, ith_error *err)
{
    ith_status status = ITH_OK;
    memset(d, 0, sizeof *d);
    d->options = *options;
    ITH_ASSERT(options->batch > 0 && options->capacity > 0 &&
               options->max_append >= options->batch);
    ITH_TRY_OUT(ith_comm_agree(options->ranks, open_model(d, model_dir, err), err));
    if (options->ranks && options->cut_weights)
        ITH_TRY_OUT(ith_decoder_ranks_cut(&d->ranks, d->model, &d->session.ctx, options->ranks,
                                          ith_max_i64(options->ep_size, 1)));
    ITH_TRY_OUT(ith_comm_agree(options->ranks, open_memory(d, model_dir, err), err));
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
    ith_free(d->positions);
    ith_free(d->host_logits);
    ith_free(d->raw_logits);
    ith_free(d->staging);
    memset(d, 0, sizeof *d);
}

void ith_decoder_reset(ith_decoder *d)
{
    memset(d->lengths, 0, (size_t)d->options.batch * sizeof *d->lengths);
    memset(d->positions, 0, (size_t)d->options.batch * sizeof *d->positions);
}

/* A state cannot go back: models with linear layers drop the whole sequence. Nor are positions
 * before an image kept. */
int64_t ith_decoder_truncate(ith_decoder *d, int64_t b, int64_t length)
{
    ITH_ASSERT(length >= 0 && length <= d->lengths[b]);
    bool dense = !d->cache.state.ndim && d->positions[b] == d->lengths[b];
    if (length < d->lengths[b]) {
        length = dense ? length : 0;
        d->positions[b] = length;
    }
    d->lengths[b] = length;
    return length;
}

/* State and convolution inputs of sequences that begin while others go on. */
static ith_status clear_empty(ith_decoder *d, const int64_t *counts)
{
    ith_ctx *ctx = &d->session.ctx;
    int64_t batch = d->options.batch;
    for (int64_t row = 0; row < d->cache.state.shape[0]; row++) {
        if (d->lengths[row % batch] != counts[row % batch])
            continue;
        ITH_TRY(ith_zero(ctx, ith_row_range(d->cache.state, row, row + 1)));
        ITH_TRY(ith_zero(ctx, ith_row_range(d->cache.conv, row, row + 1)));
    }
    return ITH_OK;
}

/* Positions of n new tokens, on all axes, and of what follows them; frames of the media. */
static ith_status new_positions(ith_decoder *d, const int32_t *ids, const int32_t *cu, int64_t n,
                                const ith_decoder_media *media, int32_t *frames, int32_t *out)
{
    const ith_hf_config *c = &d->hf;
    int64_t batch = d->options.batch, axes = position_axes(d);
    const ith_media_tokens tokens = {.image = (int32_t)c->image_token_id,
                                     .video = (int32_t)c->video_token_id,
                                     .merge = ith_max_i64(c->vision.spatial_merge_size, 1)};
    const ith_grid *grids = media ? media->grids : NULL;
    int64_t num_grids = media ? media->num_grids : 0;
    if (axes == 3) {
        ITH_TRY(ith_media_find(&tokens, ids, cu, batch, grids, num_grids, frames,
                               d->session.ctx.err));
        ith_mrope_positions(tokens.merge, cu, batch, grids, num_grids, frames, NULL, out);
    }
    for (int64_t b = 0; b < batch; b++) {
        int32_t first = (int32_t)d->positions[b];
        for (int64_t t = cu[b]; t < cu[b + 1]; t++)
            for (int64_t axis = 0; axis < axes; axis++) {
                int32_t *at = &out[axis * n + t];
                *at = first + (axes == 3 ? *at : (int32_t)t - cu[b]);
                d->positions[b] = ith_max_i64(d->positions[b], *at + 1);
            }
    }
    return ITH_OK;
}

ith_status ith_decoder_append(ith_decoder *d, const int32_t *const *ids, const int64_t *counts)
{
    return ith_decoder_append_media(d, ids, counts, NULL);
}

ith_status ith_decoder_append_media(ith_decoder *d, const int32_t *const *ids,
                                    const int64_t *counts, const ith_decoder_media *media)
{
    const ith_decoder_options *o = &d->options;
    ith_ctx *ctx = &d->session.ctx;
    ith_device *dev = ctx->device;
    ith_error *err = ctx->err;
    int32_t *sid = d->staging, *pos = sid + o->max_append, *rows = pos + 3 * o->max_append,
            *cu = rows + o->max_append;
    int32_t *last = cu + o->batch + 1, *len = last + o->batch, *frames = len + o->batch;
    int64_t n = 0, max_len = 0, cached = 0;
    ith_vision_batch vision = {0};
    cu[0] = 0;
    for (int64_t b = 0; b < o->batch; b++) {
        ITH_ASSERT(d->lengths[b] + counts[b] <= o->capacity && n + counts[b] <= o->max_append);
        cached += d->lengths[b];
        for (int64_t i = 0; i < counts[b]; i++, n++) {
            sid[n] = ids[b][i];
            rows[n] = (int32_t)(b * o->capacity + d->lengths[b] + i);
        }
        d->lengths[b] += counts[b];
        max_len = ith_max_i64(max_len, counts[b]);
        cu[b + 1] = (int32_t)n;
        last[b] = (int32_t)ith_max_i64(n - 1, 0);
        len[b] = (int32_t)d->lengths[b];
    }
    ITH_TRY(new_positions(d, sid, cu, n, media, frames, pos));
    if (media && media->num_grids) {
        ith_micro_batch mb = {.num_tokens = n,
                              .pixels = media->pixels,
                              .frames = frames,
                              .grids = media->grids,
                              .num_grids = media->num_grids};
        ITH_TRY(ith_vision_buffers_fill(&d->vision, d->model, ctx, &mb, &vision));
    }
    ITH_TRY(dev->upload(dev, d->ids.data, sid, n * 4, err));
    ITH_TRY(dev->upload(dev, d->position_ids.data, pos, position_axes(d) * n * 4, err));
    ITH_TRY(dev->upload(dev, d->rows.data, rows, n * 4, err));
    ITH_TRY(dev->upload(dev, d->cu_seqlens.data, cu, (o->batch + 1) * 4, err));
    ITH_TRY(dev->upload(dev, d->last_rows.data, last, o->batch * 4, err));
    ITH_TRY(dev->upload(dev, d->cache.lengths.data, len, o->batch * 4, err));
    if (cached && d->cache.state.ndim)
        ITH_TRY(clear_empty(d, counts));
    ITH_TRY(walk(d, n, cu, max_len, cached == 0, &vision));
    int64_t values = o->batch * d->hf.vocab_size;
    ITH_TRY(dev->download(dev, d->raw_logits, d->logits.data,
                          values * ith_dtype_bytes(d->logits.dtype), err));
    ITH_TRY(dev->sync(dev, err));
    ith_convert(d->host_logits, ITH_F32, d->raw_logits, d->logits.dtype, values);
    return ITH_OK;
}

/* ---- generation
 * -------------------------------------------------------------------------------------------- */

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

/* The next token of every open sequence from host_logits; false when none is open. */
static ith_status choose(ith_decoder *d, ith_sampler *sampler, sequence *seqs, int64_t num,
                         const ith_generate_options *how, bool *open, ith_error *err)
{
    *open = false;
    for (int64_t i = 0; i < num; i++) {
        sequence *s = &seqs[i];
        int32_t id = 0;
        if (s->done)
            continue;
        ITH_TRY(ith_sampler_next(sampler, &how->sampling, d->host_logits + i * d->hf.vocab_size,
                                 s->past.ids, s->past.count, how->first_stream + (uint64_t)i, &id,
                                 err));
        void *grown = s->past.ids;
        ITH_TRY(ith_grow(&grown, &s->past.cap, s->past.count + 1, 4, "tokens", err));
        s->past.ids = grown;
        s->past.ids[s->past.count++] = id;
        s->new_tokens++;
        bool stop = is_stop(how, id), go_on = how->token(how->arg, i, id, stop);
        s->done =
            stop || !go_on || s->new_tokens >= how->max_new || s->past.count >= d->options.capacity;
        *open = *open || !s->done;
    }
    return ITH_OK;
}

static ith_status run(ith_decoder *d, ith_sampler *sampler, sequence *seqs, int64_t num,
                      const int32_t **ids, int64_t *counts, const ith_generate_options *how,
                      ith_error *err)
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
        ITH_TRY(choose(d, sampler, seqs, num, how, &open, err));
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
    ITH_ASSERT((num > 0 || d->ranks.walks_together) && num <= d->options.batch);
    sequence *seqs = NULL;
    const int32_t **ids = NULL;
    int64_t *counts = NULL;
    ith_sampler sampler = {0};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc_zero((void **)&seqs, num, sizeof *seqs, "sequences", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&ids, d->options.batch, sizeof *ids, "sequences", err));
    ITH_TRY_OUT(
        ith_alloc_zero((void **)&counts, d->options.batch, sizeof *counts, "sequences", err));
    ITH_TRY_OUT(ith_sampler_init(&sampler, d->hf.vocab_size, err));
    for (int64_t i = 0; i < num; i++) {
        ITH_ASSERT(prompts[i].count > 0 && prompts[i].count < d->options.capacity);
        void *copy = NULL;
        ITH_TRY_OUT(ith_grow(&copy, &seqs[i].past.cap, prompts[i].count + 64, 4, "tokens", err));
        seqs[i].past.ids = copy;
        memcpy(copy, prompts[i].ids, (size_t)prompts[i].count * 4);
        seqs[i].past.count = prompts[i].count;
    }
    status = run(d, &sampler, seqs, num, ids, counts, how, err);
out:
    for (int64_t i = 0; seqs && i < num; i++)
        ith_free(seqs[i].past.ids);
    ith_sampler_deinit(&sampler);
    ith_free(seqs);
    ith_free(ids);
    ith_free(counts);
    return status;
}
