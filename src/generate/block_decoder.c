/* block_decoder.c - block by block, with a cache.
 *
 * Invariants:
 *  1. Row b*C + p of a cache layer holds position p of sequence b (among ranks that share
 *     sequences, the p-th of the positions that this rank holds); rows of the running block are
 *     overwritten by every forward until its commit.
 *  2. A written token is final, unless edits are on.
 *  3. Every step writes at least one token, unless its quota is 0 or no mask is left.
 *  4. Sequences that are done ride along; their results are not used. */
#include "generate/block_decoder.h"

#include <string.h>

#include "base/rng.h"

typedef ith_tensor T;

/* ---- opening ---- */

static ith_status push_ints(ith_ctx *ctx, int64_t n, T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_I32, 1, n, 1, 1, 1, out);
}

/* Prompt tokens that one walk takes at most, of the whole group. */
static int64_t most_of_group(const ith_block_decoder *d)
{
    return ith_decoder_ranks_most(&d->ranks, d->options.max_append, d->options.capacity);
}

/* Rows that this rank walks at most. */
static int64_t max_rows(const ith_block_decoder *d)
{
    return ith_max_i64(ith_decoder_ranks_slice(&d->ranks, most_of_group(d)),
                       d->options.batch * d->block);
}

static ith_status place(ith_block_decoder *d)
{
    ith_ctx *ctx = &d->session.ctx;
    const ith_decoder_options *o = &d->options;
    const ith_hf_config *c = &d->hf;
    int64_t queries = o->batch * d->block;
    ITH_TRY(ith_decoder_ranks_place(&d->ranks, ctx));
    ITH_TRY(ith_model_place(d->model, ctx, false));
    ITH_TRY(ith_decoder_ranks_place_cache(&d->ranks, d->model, ctx, o->batch, o->capacity, d->block,
                                          &d->cache));
    ITH_TRY(push_ints(ctx, queries, &d->cache.lengths));
    ITH_TRY(push_ints(ctx, max_rows(d), &d->ids));
    ITH_TRY(push_ints(ctx, max_rows(d), &d->position_ids));
    ITH_TRY(push_ints(ctx, max_rows(d), &d->rows));
    ITH_TRY(push_ints(ctx, o->batch + 1, &d->cu_seqlens));
    ITH_TRY(push_ints(ctx, queries, &d->all_rows));
    ITH_TRY(push_ints(ctx, queries, &d->chosen));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_F32, 1, queries, 1, 1, 1,
                         &d->confidence));
    ITH_TRY(
        ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "batch", ITH_F32, 1, queries, 1, 1, 1, &d->draws));
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "logits", d->model->dtype, 2, queries,
                        c->vocab_size, 1, 1, &d->logits);
}

/* What one walk takes: rows of sequences [first, first + num), or a slice of a prompt. */
typedef struct {
    int64_t first, num;
    int64_t tokens, group_tokens, max_len; /* of this rank, of its group, of a sequence */
    const int32_t *cu;                     /* host borders of the group's rows */
} piece;

/* Rows through the model. Of block rows (how: not NULL) then the id and its probability. */
static ith_status walk(ith_block_decoder *d, const piece *p, const ith_block_how *how)
{
    ith_ctx *ctx = &d->session.ctx;
    ith_model *m = d->model;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_ACTIVATIONS), tokens = p->tokens;
    T hidden;
    ith_batch b = {.num_tokens = tokens,
                   .group_tokens = p->group_tokens,
                   .ids = ith_row_range(d->ids, 0, tokens),
                   .position_ids = ith_row_range(d->position_ids, 0, tokens),
                   .seqs = {.cu_seqlens = ith_row_range(d->cu_seqlens, 0, p->num + 1),
                            .cu_host = p->cu,
                            .num_docs = p->num,
                            .max_len = p->max_len,
                            .block = d->block}};
    ith_decoder_ranks_share(&d->ranks, m, !how);
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "last hidden state", m->dtype, 2, tokens,
                         m->config->hidden_size, 1, 1, &hidden));
    ITH_TRY(
        m->family->decode(m, ctx, &b, &d->cache, ith_row_range(d->rows, 0, tokens), !how, hidden));
    if (how) {
        ITH_TRY(ith_model_logits(m, ctx, d->logits, hidden, d->all_rows));
        ITH_TRY(ith_choose_ids(ctx, d->chosen, d->confidence, d->logits,
                               how->temperature > 0 ? d->draws : ith_tensor_none(),
                               how->temperature > 0 ? (float)(1 / how->temperature) : 1.0f,
                               how->mask_id));
    }
    ith_plan_release(ctx->plan, ITH_MEM_ACTIVATIONS, mark);
    return ITH_OK;
}

static ith_status plan_memory(ith_block_decoder *d)
{
    ith_ctx *ctx = &d->session.ctx;
    const ith_decoder_options *o = &d->options;
    const ith_block_how any = {.mask_id = -1};
    int64_t n = most_of_group(d), blocks = o->batch * d->block;
    const piece prompts = {.num = ith_decoder_ranks_cp(&d->ranks) > 1 ? 1 : o->batch,
                           .tokens = ith_decoder_ranks_slice(&d->ranks, n),
                           .group_tokens = n,
                           .max_len = ith_min_i64(n, o->capacity)};
    const piece more = {
        .num = o->batch, .tokens = blocks, .group_tokens = blocks, .max_len = o->capacity};
    ITH_TRY(place(d));
    ITH_TRY(walk(d, &prompts, NULL));
    ITH_TRY(walk(d, &more, &any));
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        ith_plan_release(ctx->plan, (ith_mem_class)c, 0);
    ITH_TRY(ith_plan_commit(ctx->plan, ctx->err));
    return place(d);
}

/* The logits are those of all block rows, in order. */
static ith_status upload_all_rows(ith_block_decoder *d, ith_error *err)
{
    ith_device *dev = d->session.ctx.device;
    int64_t n = d->options.batch * d->block;
    for (int64_t i = 0; i < n; i++)
        d->staging[i] = (int32_t)i;
    ITH_TRY(dev->upload(dev, d->all_rows.data, d->staging, n * 4, err));
    return dev->sync(dev, err);
}

static ith_status open_memory(ith_block_decoder *d, const char *model_dir, ith_error *err)
{
    int64_t rows = d->options.batch * d->block;
    ITH_TRY(plan_memory(d));
    ITH_TRY(ith_decoder_load(d->model, &d->session.ctx, model_dir, err));
    ITH_TRY(ith_alloc((void **)&d->staging, (3 * max_rows(d) + rows + d->options.batch + 1) * 4,
                      "decoder", err));
    ITH_TRY(ith_alloc_zero((void **)&d->held, d->options.batch, sizeof *d->held, "decoder", err));
    ITH_TRY(ith_alloc((void **)&d->host_chosen, rows * 4, "decoder", err));
    ITH_TRY(ith_alloc((void **)&d->host_confidence, rows * 4, "decoder", err));
    return upload_all_rows(d, err);
}

ith_status ith_block_decoder_open(ith_block_decoder *d, const char *model_dir,
                                  const ith_decoder_options *options, int64_t block, ith_error *err)
{
    ith_comm *world = options->ranks.world;
    ith_status status = ITH_OK;
    memset(d, 0, sizeof *d);
    d->options = *options;
    d->block = block;
    ITH_ASSERT(block > 0 && options->batch > 0 && options->capacity % block == 0);
    d->options.max_append = ith_max_i64(options->max_append, 1);
    ITH_TRY_OUT(ith_comm_agree(
        world,
        ith_decoder_open_model(&d->hf, &d->session, &d->model, model_dir, options, true, err),
        err));
    ITH_TRY_OUT(ith_decoder_ranks_open(&d->ranks, d->model, &d->session, &options->ranks));
    ITH_TRY_OUT(ith_comm_agree(world, open_memory(d, model_dir, err), err));
    ITH_TRY_OUT(ith_model_refresh_weights(d->model, &d->session.ctx));
    return ITH_OK;
out:
    ith_block_decoder_close(d);
    return status;
}

void ith_block_decoder_close(ith_block_decoder *d)
{
    ith_model_destroy(d->model);
    ith_decoder_ranks_close(&d->ranks);
    ith_session_close(&d->session);
    ith_hf_config_deinit(&d->hf);
    ith_free(d->staging);
    ith_free(d->held);
    ith_free(d->host_chosen);
    ith_free(d->host_confidence);
    memset(d, 0, sizeof *d);
}

int64_t ith_block_row_len(int64_t prompt, int64_t max_new, int64_t block)
{
    return ith_round_up(prompt + max_new, block);
}

/* ---- forwards ---- */

typedef struct {
    ith_block_answer *answer;
    int64_t begin; /* of the running block */
    int64_t step;  /* within it */
    int64_t post;  /* steps without a mask in it */
    bool committing, done;
} sequence;

/* What draws the ids of the block rows: masks only, at a temperature. */
static ith_status upload_draws(ith_block_decoder *d, const sequence *seqs, const ith_block_how *how,
                               ith_error *err)
{
    ith_device *dev = d->session.ctx.device;
    int64_t rows = d->options.batch * d->block;
    float *draws = d->host_confidence;
    for (int64_t r = 0; r < rows; r++) {
        const sequence *s = &seqs[r / d->block];
        int64_t p = s->begin + r % d->block;
        bool masked = s->answer && !s->done && s->answer->row.ids[p] == how->mask_id;
        uint64_t stream = how->first_stream + (uint64_t)(r / d->block),
                 index = (uint64_t)p + ((uint64_t)s->step << 32);
        draws[r] = masked ? (float)ith_rng_uniform(how->seed, stream, index) : -1;
    }
    return dev->upload(dev, d->draws.data, draws, rows * 4, err);
}

/* Of the rank that chooses, on all of its group. */
static ith_status download_chosen(ith_block_decoder *d, ith_error *err)
{
    ith_device *dev = d->session.ctx.device;
    int64_t bytes = d->options.batch * d->block * 4;
    ITH_TRY(dev->download(dev, d->host_chosen, d->chosen.data, bytes, err));
    ITH_TRY(dev->download(dev, d->host_confidence, d->confidence.data, bytes, err));
    ITH_TRY(dev->sync(dev, err));
    ITH_TRY(ith_decoder_ranks_tell(&d->ranks, d->host_chosen, bytes, err));
    return ith_decoder_ranks_tell(&d->ranks, d->host_confidence, bytes, err);
}

/* Host memory of a forward. */
typedef struct {
    int32_t *ids, *positions, *rows; /* [max_rows] of this rank */
    int32_t *lengths;                /* [batch * block] */
    int32_t *cu;                     /* [batch + 1] */
} staging;

static staging staging_of(const ith_block_decoder *d)
{
    int64_t room = max_rows(d);
    int32_t *rows = d->staging + 2 * room;
    return (staging){.ids = d->staging,
                     .positions = d->staging + room,
                     .rows = rows,
                     .lengths = rows + room,
                     .cu = rows + room + d->options.batch * d->block};
}

/* This rank's part of rows [from, end) of sequence b, of which `before` are staged: all, or a
 * slice. They go behind those that it holds. Returns how many. */
static int64_t take_rows(const ith_block_decoder *d, const staging *s, const sequence *seq,
                         int64_t b, int64_t from, int64_t end, int64_t before, bool slices)
{
    ith_stretch own[2] = {{0, end - from}, {0, 0}};
    int64_t n = 0;
    if (slices)
        ith_cp_stretches(d->ranks.exchange ? &d->ranks.mesh : NULL, end - from, own);
    for (int k = 0; k < 2; k++)
        for (int64_t t = own[k].first; t < own[k].first + own[k].count; t++, n++) {
            int64_t p = from + t, at = before + n;
            ITH_ASSERT(at < max_rows(d) && p < d->options.capacity);
            s->ids[at] = seq->answer ? seq->answer->row.ids[p] : 0;
            s->positions[at] = (int32_t)p;
            s->rows[at] = (int32_t)(b * d->cache.capacity + d->held[b] + n);
        }
    return n;
}

static bool keeps(const ith_block_decoder *d, int64_t begin)
{
    return ith_decoder_ranks_keeps(&d->ranks, begin, d->block);
}

/* Rows [from[b], to[b]) of sequences [first, first + num): whole prompt blocks (how: NULL), or a
 * block each. */
static ith_status forward(ith_block_decoder *d, const sequence *seqs, int64_t first, int64_t num,
                          const int64_t *from, const int64_t *to, const ith_block_how *how,
                          ith_error *err)
{
    ith_device *dev = d->session.ctx.device;
    const staging s = staging_of(d);
    piece p = {.first = first, .num = num, .cu = s.cu};
    s.cu[0] = 0;
    for (int64_t b = first; b < first + num; b++) {
        int64_t n = to[b] - from[b];
        int64_t here = take_rows(d, &s, &seqs[b], b, from[b], to[b], p.tokens, !how);
        for (int64_t i = 0; how && i < n; i++)
            s.lengths[p.tokens + i] = (int32_t)(d->held[b] + (keeps(d, from[b]) ? n : 0));
        d->held[b] += how ? 0 : here;
        p.tokens += here;
        p.group_tokens += n;
        p.max_len = ith_max_i64(p.max_len, n);
        s.cu[b - first + 1] = (int32_t)p.group_tokens;
    }
    ITH_TRY(dev->upload(dev, d->ids.data, s.ids, p.tokens * 4, err));
    ITH_TRY(dev->upload(dev, d->position_ids.data, s.positions, p.tokens * 4, err));
    ITH_TRY(dev->upload(dev, d->rows.data, s.rows, p.tokens * 4, err));
    ITH_TRY(dev->upload(dev, d->cu_seqlens.data, s.cu, (num + 1) * 4, err));
    if (how)
        ITH_TRY(dev->upload(dev, d->cache.lengths.data, s.lengths, p.tokens * 4, err));
    if (how && how->temperature > 0)
        ITH_TRY(upload_draws(d, seqs, how, err));
    ITH_TRY(walk(d, &p, how));
    d->forwards++;
    return how ? download_chosen(d, err) : dev->sync(dev, err);
}

/* Whole prompt blocks: all at once; those that are cut one by one. A rank without any walks along
 * with a token, which the first block overwrites. */
static ith_status prefill(ith_block_decoder *d, const sequence *seqs, const int64_t *from,
                          int64_t *to, ith_error *err)
{
    int64_t batch = d->options.batch, num = ith_decoder_ranks_cp(&d->ranks) > 1 ? 1 : batch;
    for (int64_t first = 0; first < batch; first += num) {
        bool own = false;
        for (int64_t b = first; b < first + num; b++)
            own |= to[b] > 0;
        bool any = own;
        ITH_TRY(ith_decoder_ranks_any(&d->ranks, &any, err));
        if (!any)
            continue;
        to[first] = own ? to[first] : 1;
        ITH_TRY(forward(d, seqs, first, num, from, to, NULL, err));
        d->held[first] = own ? d->held[first] : 0;
    }
    return ITH_OK;
}

/* ---- choosing ---- */

typedef struct {
    int64_t position;
    int32_t id;
    double confidence;
} candidate;

static bool is_stop(const ith_block_how *how, int32_t id)
{
    for (int i = 0; i < how->num_stop_ids; i++)
        if (how->stop_ids[i] == id)
            return true;
    return false;
}

static int64_t steps_of(const ith_block_how *how)
{
    int64_t most = how->minimal_topk > 0 ? how->max_new / how->minimal_topk : how->steps;
    return ith_max_i64(1, ith_min_i64(how->steps, most));
}

static int64_t quota_of(const ith_block_how *how, int64_t step)
{
    int64_t steps = steps_of(how);
    return how->block / steps + (step < how->block % steps);
}

/* Moves the `take` most confident candidates to the front, positions ascending among equals. */
static void most_confident_first(candidate *c, int64_t n, int64_t take)
{
    for (int64_t i = 0; i < take; i++) {
        int64_t best = i;
        for (int64_t j = i + 1; j < n; j++)
            if (c[j].confidence > c[best].confidence ||
                (c[j].confidence == c[best].confidence && c[j].position < c[best].position))
                best = j;
        candidate chosen = c[best];
        c[best] = c[i];
        c[i] = chosen;
    }
}

static void write_token(sequence *s, int64_t i, const ith_block_how *how, const candidate *c)
{
    ith_block_answer *a = s->answer;
    if (a->row.ids[c->position] == how->mask_id)
        a->revealed[c->position] = (int32_t)a->steps;
    else
        a->edits++;
    a->row.ids[c->position] = c->id;
    if (how->written)
        how->written(how->arg, i, c->position, c->id, c->confidence, a->steps);
}

/* What one step did to its block. */
typedef struct {
    int64_t masks, written; /* masks before it; tokens written or replaced */
    bool stop;              /* a stop id among them */
} step_result;

/* Writes what this step accepts of the block's candidates. scratch: [block]. */
static step_result accept(const ith_block_decoder *d, sequence *s, int64_t i,
                          const ith_block_how *how, candidate *scratch)
{
    int64_t n = 0, above = 0, edits = 0, quota = quota_of(how, s->step);
    const int32_t *row = s->answer->row.ids + s->begin, *ids = d->host_chosen + i * d->block;
    const float *confidence = d->host_confidence + i * d->block;
    candidate *chosen = scratch; /* masks, then edits */
    for (int64_t k = 0; k < d->block; k++)
        if (row[k] == how->mask_id) {
            above += (double)confidence[k] > how->threshold;
            chosen[n++] = (candidate){s->begin + k, ids[k], (double)confidence[k]};
        }
    for (int64_t k = ith_max_i64(s->answer->prompt - s->begin, 0); how->edit && k < d->block; k++)
        if (row[k] != how->mask_id && row[k] != ids[k] &&
            (double)confidence[k] > how->edit_threshold)
            chosen[n + edits++] = (candidate){s->begin + k, ids[k], (double)confidence[k]};
    int64_t take = above >= quota ? above : ith_min_i64(quota, n);
    most_confident_first(chosen, n, take);
    step_result r = {.masks = n, .written = take + edits};
    for (int64_t k = 0; k < n + edits; k++) {
        if (k >= take && k < n)
            continue;
        write_token(s, i, how, &chosen[k]);
        r.stop |= is_stop(how, chosen[k].id);
    }
    s->answer->steps++;
    s->step++;
    s->post += n == 0;
    return r;
}

/* First stop id of the answer in [prompt, end), or -1; *complete: no mask before it. */
static int64_t first_stop(const ith_block_how *how, const ith_block_answer *a, int64_t end,
                          bool *complete)
{
    *complete = true;
    for (int64_t p = a->prompt; p < end; p++) {
        if (is_stop(how, a->row.ids[p]))
            return p;
        *complete = *complete && a->row.ids[p] != how->mask_id;
    }
    return -1;
}

static bool has_mask(const sequence *s, const ith_block_how *how, int64_t block)
{
    for (int64_t p = s->begin; p < s->begin + block; p++)
        if (s->answer->row.ids[p] == how->mask_id)
            return true;
    return false;
}

static void finish(sequence *s, const ith_block_how *how)
{
    ith_block_answer *a = s->answer;
    bool complete = false;
    int64_t stop =
        first_stop(how, a, ith_min_i64(a->prompt + how->max_new, a->row.count), &complete);
    a->stopped = stop >= 0;
    a->end = stop >= 0 ? stop + 1 : a->prompt + how->max_new;
    s->done = true;
}

static void next_block(ith_block_decoder *d, sequence *s, int64_t i)
{
    d->held[i] += keeps(d, s->begin) ? d->block : 0;
    s->begin += d->block;
    s->step = s->post = 0;
    s->committing = false;
}

/* After a forward: writes, and moves on to the commit, the next block, or the end. */
static void advance(ith_block_decoder *d, sequence *s, int64_t i, const ith_block_how *how,
                    candidate *scratch)
{
    ith_block_answer *a = s->answer;
    bool complete = false;
    if (s->committing) {
        a->commits++;
        next_block(d, s, i);
        return;
    }
    step_result r = accept(d, s, i, how, scratch);
    int64_t end = s->begin + d->block;
    if (how->early_stop && r.stop && first_stop(how, a, end, &complete) >= 0 && complete) {
        a->blocks++;
        finish(s, how);
        return;
    }
    if (has_mask(s, how, d->block) && s->step < steps_of(how))
        return;
    if (how->edit && r.written && s->post < how->max_post_steps)
        return;
    a->blocks++;
    if (first_stop(how, a, end, &complete) >= 0 || end >= a->row.count)
        finish(s, how);
    else if (r.written)
        s->committing = true;
    else /* the cache holds these very tokens */
        next_block(d, s, i);
}

void ith_block_answer_deinit(ith_block_answer *answer)
{
    ith_ids_free(&answer->row);
    ith_free(answer->revealed);
    answer->revealed = NULL;
}

static ith_status make_row(ith_block_answer *a, const ith_ids *prompt, const ith_block_how *how,
                           ith_error *err)
{
    int64_t len = ith_block_row_len(prompt->count, how->max_new, how->block);
    void *ids = NULL;
    *a = (ith_block_answer){.prompt = prompt->count};
    ITH_TRY(ith_grow(&ids, &a->row.cap, len, 4, "tokens", err));
    a->row.ids = ids;
    a->row.count = len;
    ITH_TRY(ith_alloc((void **)&a->revealed, len * 4, "tokens", err));
    memset(a->revealed, 0xff, (size_t)len * 4);
    memcpy(a->row.ids, prompt->ids, (size_t)prompt->count * 4);
    for (int64_t p = prompt->count; p < len; p++)
        a->row.ids[p] = how->mask_id;
    return ITH_OK;
}

static ith_status run(ith_block_decoder *d, sequence *seqs, int64_t num, const ith_block_how *how,
                      int64_t *from, int64_t *to, candidate *scratch, ith_error *err)
{
    int64_t batch = d->options.batch;
    for (int64_t b = 0; b < batch; b++) {
        from[b] = d->held[b] = 0;
        to[b] = b < num ? seqs[b].answer->prompt / d->block * d->block : 0;
        seqs[b].begin = to[b];
    }
    ITH_TRY(prefill(d, seqs, from, to, err));
    for (;;) {
        bool open = false;
        for (int64_t b = 0; b < batch; b++) {
            from[b] = seqs[b].begin;
            to[b] = from[b] + d->block;
            open = open || (b < num && !seqs[b].done);
        }
        ITH_TRY(ith_decoder_ranks_any(&d->ranks, &open, err));
        if (!open)
            return ITH_OK;
        ITH_TRY(forward(d, seqs, 0, batch, from, to, how, err));
        for (int64_t b = 0; b < num; b++)
            if (!seqs[b].done)
                advance(d, &seqs[b], b, how, scratch);
    }
}

ith_status ith_block_decoder_generate(ith_block_decoder *d, const ith_ids *prompts, int64_t num,
                                      const ith_block_how *how, ith_block_answer *out,
                                      ith_error *err)
{
    int64_t batch = d->options.batch;
    ITH_ASSERT(num <= batch && how->block == d->block && how->max_new > 0);
    ITH_ASSERT(how->mask_id >= 0 && how->mask_id < d->hf.vocab_size);
    sequence *seqs = NULL;
    int64_t *ranges = NULL;
    candidate *scratch = NULL;
    ith_status status = ITH_OK;
    if (!ith_decoder_ranks_walks(&d->ranks, num))
        return ITH_OK;
    for (int64_t i = 0; i < num; i++)
        out[i] = (ith_block_answer){0};
    ITH_TRY_OUT(ith_alloc_zero((void **)&seqs, batch, sizeof *seqs, "sequences", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&ranges, 2 * batch, sizeof *ranges, "sequences", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&scratch, d->block, sizeof *scratch, "candidates", err));
    for (int64_t i = 0; i < num; i++) {
        ITH_TRY_OUT(make_row(&out[i], &prompts[i], how, err));
        ITH_ASSERT(out[i].row.count <= d->options.capacity);
        seqs[i].answer = &out[i];
    }
    status = run(d, seqs, num, how, ranges, ranges + batch, scratch, err);
out:
    for (int64_t i = 0; i < num && status != ITH_OK; i++)
        ith_block_answer_deinit(&out[i]);
    ith_free(seqs);
    ith_free(ranges);
    ith_free(scratch);
    return status;
}
