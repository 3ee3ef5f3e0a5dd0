/* batching.c - steps, packed arrays and resume over the plan of an epoch.
 *
 * Invariants:
 *  1. A step is a function of (options, lengths, epoch, cursor, carried documents), which is what
 *     the state holds.
 *  2. Every rank knows the whole step and how it is dealt. */
#include "data/batching.h"

#include "base/checked.h"
#include "base/rng.h"
#include "data/batch_deal.h"
#include "data/batch_media.h"
#include "data/batch_plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define STATE_VERSION 1
#define DEFAULT_PACK_WINDOW 8192

struct ith_batcher {
    const ith_samples *samples;
    ith_batcher_options options; /* subset is our copy */
    int64_t *subset;             /* entry by position, NULL: the position itself */
    int32_t *lengths;            /* [count] by position */
    int32_t *padded;             /* the same, padded; lengths itself where nothing is */
    double *media_work;          /* [count] of their images; NULL: none */
    int64_t count;
    batch_plan plan;
    ith_batch_limits limits;
    int64_t steps_per_epoch, total_steps;

    int64_t epoch, cursor, step; /* next micro-batch of the plan; steps made */
    int64_t *carry;              /* documents the epoch began with */
    int64_t num_carry, max_carry;

    batch_list now; /* the current step, of all ranks: positions */
    int64_t max_now_docs;
    batch_deal deal;

    ith_micro_batch arrays;
    batch_media media;
};

static int64_t entry_of(const ith_batcher *b, int64_t position)
{
    return b->subset ? b->subset[position] : position;
}

static bool is_counted(ith_batching strategy)
{
    return strategy == ITH_BATCHING_NORMAL || strategy == ITH_BATCHING_PADDING_FREE;
}

ith_batcher_options ith_batcher_options_from(const ith_config *config,
                                             const ith_config_layout *layout, int64_t dp_rank)
{
    bool by_steps = config->max_steps != ITH_CONFIG_UNSET;
    bool dynamic = config->batching_strategy == ITH_BATCHING_DYNAMIC ||
                   config->batching_strategy == ITH_BATCHING_DYNAMIC_PADDING_FREE;
    ith_batcher_options o = {.strategy = config->batching_strategy,
                             .micro_batch_size = config->micro_batch_size,
                             .cutoff_len = config->cutoff_len,
                             .grad_accum = layout->grad_accum,
                             .dp_rank = dp_rank,
                             .dp_size = layout->dp_size,
                             .seed = (uint64_t)config->seed,
                             .shuffle = true,
                             .carry_over = dynamic && by_steps,
                             .pack_window = config->pack_window,
                             .num_epochs = by_steps ? 0 : config->num_train_epochs};
    return o;
}

ith_batcher_options ith_batcher_eval_options(const ith_config *config,
                                             const ith_config_layout *layout, int64_t dp_rank)
{
    ith_batcher_options o = ith_batcher_options_from(config, layout, dp_rank);
    o.shuffle = o.carry_over = false;
    o.num_epochs = 1;
    return o;
}

static int compare_desc(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

/* Sum of the k largest padded lengths. */
static ith_status sum_longest(const ith_batcher *b, int64_t k, int64_t *out, ith_error *err)
{
    int32_t *sorted = NULL;
    ITH_TRY(ith_alloc((void **)&sorted, b->count * 4, "lengths", err));
    memcpy(sorted, b->padded, (size_t)b->count * 4);
    qsort(sorted, (size_t)b->count, 4, compare_desc);
    *out = 0;
    for (int64_t i = 0; i < ith_min_i64(k, b->count); i++)
        *out += sorted[i];
    ith_free(sorted);
    return ITH_OK;
}

ith_batch_limits ith_batcher_limits_bound(const ith_batcher_options *o)
{
    int64_t tokens = ith_mul_bytes(o->cutoff_len, o->micro_batch_size);
    /* A stored sample has two ids at least. */
    int64_t docs = is_counted(o->strategy) ? o->micro_batch_size : ith_max_i64(tokens / 2, 1);
    return (ith_batch_limits){.max_tokens = tokens,
                              .max_docs = docs,
                              .max_labels = tokens,
                              .max_doc_tokens = o->cutoff_len,
                              .max_micro = o->grad_accum};
}

/* What the media of max_docs documents can be at most, and of a rank's own (they have no more
 * features than tokens), and the work of each document's. */
static ith_status find_media_limits(ith_batcher *b, ith_batch_limits *limits, int64_t whole_docs,
                                    ith_error *err)
{
    int64_t merge = ith_media_ids(b->options.media)->merge, *counts = NULL;
    int64_t docs = limits->max_docs, whole = limits->max_whole_tokens;
    const ith_batch_work *w = &b->options.work;
    ITH_TRY(ith_alloc_zero((void **)&b->media_work, b->count, sizeof(double), "media", err));
    ITH_TRY(ith_alloc_zero((void **)&counts, 3 * b->count, sizeof *counts, "media", err));
    int64_t *patches = counts, *segments = counts + b->count, *items = counts + 2 * b->count;
    for (int64_t i = 0; i < b->count; i++) {
        ith_sample s = ith_samples_get(b->samples, entry_of(b, i));
        items[i] = s.num_media;
        for (int64_t k = 0; k < s.num_media; k++) {
            ith_grid g = s.media[k].grid;
            patches[i] += ith_grid_patches(g);
            segments[i] += g.t;
            int64_t frame = (int64_t)g.h * g.w;
            limits->max_segment_patches = ith_max_i64(limits->max_segment_patches, frame);
            b->media_work[i] += (double)g.t * (double)frame * (w->patch + w->pair * (double)frame);
        }
    }
    limits->max_patches = ith_min_i64(batch_media_sum_largest(patches, b->count, docs),
                                      ith_mul_bytes(limits->max_tokens, merge * merge));
    limits->max_segments =
        ith_min_i64(batch_media_sum_largest(segments, b->count, docs), limits->max_tokens);
    limits->max_grids =
        ith_min_i64(batch_media_sum_largest(items, b->count, ith_max_i64(docs, whole_docs)),
                    limits->max_tokens);
    limits->max_whole_patches = ith_min_i64(batch_media_sum_largest(patches, b->count, whole_docs),
                                            ith_mul_bytes(whole, merge * merge));
    limits->max_whole_segments =
        ith_min_i64(batch_media_sum_largest(segments, b->count, whole_docs), whole);
    ith_free(counts);
    return ITH_OK;
}

/* Micro-batches of a step, of all groups. */
static int64_t micro_of_step(const ith_batcher *b)
{
    return ith_mul_bytes(b->options.grad_accum, b->options.dp_size);
}

/* Without carry_over a step is at most a whole epoch; else what its tokens can be in whole passes
 * over the data, and parts of two. */
static int64_t most_docs_of_step(const ith_batcher *b, int64_t total_tokens)
{
    int64_t docs = ith_mul_bytes(micro_of_step(b), b->limits.max_docs);
    if (!b->options.carry_over)
        return ith_min_i64(docs, b->count);
    ITH_ASSERT(total_tokens > 0);
    int64_t passes = ith_mul_bytes(micro_of_step(b), b->limits.max_tokens) / total_tokens + 2;
    return ith_min_i64(docs, ith_mul_bytes(passes, b->count));
}

static int64_t shortest_padded(const ith_batcher *b)
{
    int32_t shortest = INT32_MAX;
    for (int64_t i = 0; i < b->count; i++)
        shortest = b->padded[i] < shortest ? b->padded[i] : shortest;
    return shortest;
}

static int64_t most_whole_docs(const ith_batcher *b)
{
    return ith_min_i64(b->limits.max_whole_tokens / shortest_padded(b), b->max_now_docs);
}

static ith_status find_limits(ith_batcher *b, ith_error *err)
{
    const ith_batcher_options *o = &b->options;
    int32_t longest = 0, shortest = INT32_MAX; /* longest: padded */
    int64_t total = 0, most_added = 0;
    for (int64_t i = 0; i < b->count; i++) {
        longest = b->padded[i] > longest ? b->padded[i] : longest;
        shortest = b->lengths[i] < shortest ? b->lengths[i] : shortest;
        total += b->lengths[i];
        most_added = ith_max_i64(most_added, b->padded[i] - b->lengths[i]);
    }
    ith_batch_limits bound = ith_batcher_limits_bound(o);
    bound.max_doc_tokens = longest;
    if (is_counted(o->strategy)) {
        bound.max_docs = ith_min_i64(o->micro_batch_size, b->count);
        ITH_TRY(sum_longest(b, bound.max_docs, &bound.max_tokens, err));
    } else {
        bound.max_docs = bound.max_tokens / shortest;
        if (!o->carry_over) {
            bound.max_docs = ith_min_i64(bound.max_docs, b->count);
            bound.max_tokens = ith_min_i64(bound.max_tokens, total);
        }
        if (most_added)
            bound.max_tokens = ith_min_i64(bound.max_tokens + bound.max_docs * most_added,
                                           ith_mul_bytes(bound.max_docs, longest));
    }
    bound.max_labels = bound.max_tokens - 1;
    bound.max_whole_tokens = o->whole == ITH_CP_WHOLE_NEVER ? 0 : bound.max_tokens / o->cp_size;
    if (bound.max_whole_tokens < shortest_padded(b) || o->cp_size == 1)
        bound.max_whole_tokens = 0;
    b->limits = bound;
    b->max_carry = o->carry_over ? bound.max_docs + 1 : 0;
    b->max_now_docs = most_docs_of_step(b, total);
    return o->media ? find_media_limits(b, &b->limits, most_whole_docs(b), err) : ITH_OK;
}

static batch_deal_options deal_options(const ith_batcher *b)
{
    const ith_batcher_options *o = &b->options;
    const ith_batch_limits *l = &b->limits;
    ith_batch_work work = o->work;
    if (work.linear <= 0)
        work = (ith_batch_work){.linear = 1};
    return (batch_deal_options){.work = work,
                                .groups = o->dp_size,
                                .cp_size = o->cp_size,
                                .regroup = is_counted(o->strategy) && !o->keep_together,
                                .keep_together = o->keep_together,
                                .whole_always = o->whole == ITH_CP_WHOLE_ALWAYS,
                                .max_micro = micro_of_step(b),
                                .max_docs = b->max_now_docs,
                                .group_tokens = l->max_tokens,
                                .group_docs = l->max_docs,
                                .rank_tokens = l->max_whole_tokens,
                                .rank_docs = most_whole_docs(b),
                                .lengths = b->padded,
                                .media = b->media_work};
}

/* Room for the deals: a rank's own micro-batch may have more documents than its group's. */
static ith_status create_deal(ith_batcher *b, ith_error *err)
{
    batch_deal_options o = deal_options(b);
    ITH_TRY(batch_deal_create(&b->deal, &o, err));
    b->limits.max_docs = ith_max_i64(b->limits.max_docs, o.rank_docs);
    b->limits.max_micro = batch_deal_max_rounds(&o);
    return ITH_OK;
}

static ith_status check_options(const ith_batcher_options *o, int64_t count, ith_error *err)
{
    ITH_ASSERT(o->micro_batch_size > 0 && o->cutoff_len > 0 && o->grad_accum > 0);
    ITH_ASSERT(o->dp_size > 0 && o->dp_rank >= 0 && o->dp_rank < o->dp_size && o->num_epochs >= 0);
    ITH_ASSERT(!o->carry_over || o->num_epochs == 0);
    ITH_ASSERT(o->cp_size > 0 && o->cp_rank >= 0 && o->cp_rank < o->cp_size);
    if (o->cutoff_len > (INT32_MAX - 1) / o->micro_batch_size)
        return ith_fail(err, ITH_ERR_USAGE,
                        "cutoff_len %" PRId64 " x micro_batch_size %" PRId64
                        " is more than 2^31 tokens in one micro-batch",
                        o->cutoff_len, o->micro_batch_size);
    if (count == 0)
        return ith_fail(err, ITH_ERR_FORMAT, "no sample to make batches of");
    return ITH_OK;
}

static ith_status copy_lengths(ith_batcher *b, ith_error *err)
{
    ITH_TRY(ith_alloc((void **)&b->lengths, b->count * 4, "lengths", err));
    for (int64_t i = 0; i < b->count; i++) {
        int64_t length = ith_samples_length(b->samples, entry_of(b, i));
        if (length > b->options.cutoff_len)
            return ith_fail(err, ITH_ERR_USAGE,
                            "sample %" PRId64 " has %" PRId64 " tokens, more than cutoff_len "
                            "%" PRId64,
                            entry_of(b, i), length, b->options.cutoff_len);
        b->lengths[i] = ith_narrow(length);
    }
    b->padded = b->lengths;
    if (!b->options.padded)
        return ITH_OK;
    b->padded = NULL;
    ITH_TRY(ith_alloc((void **)&b->padded, b->count * 4, "lengths", err));
    for (int64_t i = 0; i < b->count; i++)
        b->padded[i] = ith_narrow(b->options.padded(b->options.padded_arg, b->lengths[i]));
    return ITH_OK;
}

static ith_status alloc_arrays(ith_batcher *b, ith_error *err)
{
    ith_micro_batch *a = &b->arrays;
    int64_t tokens = b->options.no_rows ? 0 : b->limits.max_tokens, docs = b->limits.max_docs;
    ITH_TRY(ith_alloc((void **)&a->ids, tokens * 4, "batch", err));
    ITH_TRY(ith_alloc((void **)&a->position_ids, tokens * 4, "batch", err));
    ITH_TRY(ith_alloc((void **)&a->labels, tokens * 4, "batch", err));
    ITH_TRY(ith_alloc((void **)&a->weights, tokens * 4, "batch", err));
    ITH_TRY(ith_alloc((void **)&a->cu_seqlens, (docs + 1) * 4, "batch", err));
    ITH_TRY(ith_alloc((void **)&a->sample, docs * 8, "batch", err));
    if (b->limits.max_patches)
        ITH_TRY(batch_media_create(&b->media, b->options.media, b->options.pool, &b->limits, err));
    b->media.rank = b->options.media_rank;
    b->media.ranks = b->options.media_ranks;
    ITH_TRY(ith_alloc((void **)&b->now.docs, b->max_now_docs * 8, "batch", err));
    ITH_TRY(ith_alloc((void **)&b->now.begin, (micro_of_step(b) + 1) * 8, "batch", err));
    return b->max_carry ? ith_alloc((void **)&b->carry, b->max_carry * 8, "batch", err) : ITH_OK;
}

/* Steps of the epoch the plan holds. */
static int64_t plan_steps(const ith_batcher *b)
{
    return ith_div_ceil(b->plan.num_micro, micro_of_step(b));
}

static void count_steps(ith_batcher *b)
{
    const ith_batcher_options *o = &b->options;
    batch_plan_build(&b->plan, 0, NULL, 0);
    b->steps_per_epoch =
        o->carry_over ? ith_div_ceil(b->count, ith_mul_bytes(o->micro_batch_size, micro_of_step(b)))
                      : plan_steps(b);
    if (is_counted(o->strategy) || !o->shuffle) { /* every epoch has as many */
        b->total_steps = ith_mul_bytes(b->steps_per_epoch, o->num_epochs);
        return;
    }
    b->total_steps = o->num_epochs ? b->steps_per_epoch : 0;
    for (int64_t epoch = 1; epoch < o->num_epochs; epoch++) {
        batch_plan_build(&b->plan, epoch, NULL, 0);
        b->total_steps += plan_steps(b);
    }
    if (o->num_epochs > 1)
        batch_plan_build(&b->plan, 0, NULL, 0);
}

ith_status ith_batcher_create(ith_batcher **out, const ith_samples *samples,
                              const ith_batcher_options *options, ith_error *err)
{
    int64_t count = options->subset ? options->num_subset : ith_samples_count(samples);
    ith_batcher_options o = *options;
    o.cp_size = ith_max_i64(o.cp_size, 1);
    ITH_TRY(check_options(&o, count, err));
    ith_batcher *b = NULL;
    ITH_TRY(ith_alloc_zero((void **)&b, 1, sizeof *b, "batcher", err));
    b->samples = samples;
    b->options = o;
    b->count = count;
    if (b->options.pack_window <= 0)
        b->options.pack_window = DEFAULT_PACK_WINDOW;
    ith_status status = ITH_OK;
    if (options->subset) {
        ITH_TRY_OUT(ith_alloc((void **)&b->subset, count * 8, "subset", err));
        memcpy(b->subset, options->subset, (size_t)count * 8);
        b->options.subset = b->subset;
    }
    ITH_TRY_OUT(copy_lengths(b, err));
    ITH_TRY_OUT(find_limits(b, err));
    ITH_TRY_OUT(create_deal(b, err));
    ITH_TRY_OUT(alloc_arrays(b, err));
    batch_plan_options plan = {.strategy = options->strategy,
                               .micro_batch_size = options->micro_batch_size,
                               .budget = options->cutoff_len * options->micro_batch_size,
                               .window = b->options.pack_window,
                               .seed = options->seed,
                               .shuffle = options->shuffle,
                               .carry_over = options->carry_over,
                               .lengths = b->lengths,
                               .count = count};
    ITH_TRY_OUT(batch_plan_create(&b->plan, &plan, b->max_carry, err));
    count_steps(b);
    *out = b;
    return ITH_OK;
out:
    ith_batcher_destroy(b);
    return status;
}

void ith_batcher_destroy(ith_batcher *b)
{
    if (!b)
        return;
    batch_plan_destroy(&b->plan);
    batch_deal_destroy(&b->deal);
    batch_media_destroy(&b->media);
    ith_free(b->subset);
    if (b->padded != b->lengths)
        ith_free(b->padded);
    ith_free(b->lengths);
    ith_free(b->media_work);
    ith_free(b->carry);
    ith_free(b->now.docs);
    ith_free(b->now.begin);
    ith_free(b->arrays.ids);
    ith_free(b->arrays.position_ids);
    ith_free(b->arrays.labels);
    ith_free(b->arrays.weights);
    ith_free(b->arrays.cu_seqlens);
    ith_free(b->arrays.sample);
    ith_free(b);
}

ith_batch_limits ith_batcher_limits(const ith_batcher *batcher)
{
    return batcher->limits;
}

int64_t ith_batcher_steps_per_epoch(const ith_batcher *batcher)
{
    return batcher->steps_per_epoch;
}

int64_t ith_batcher_total_steps(const ith_batcher *batcher)
{
    return batcher->total_steps;
}

/* Appends the next micro-batch of the plan to the step. */
static void take_micro(ith_batcher *b)
{
    batch_list *now = &b->now;
    int64_t j = b->cursor++, used = now->begin[now->num];
    int64_t n = b->plan.micro_begin[j + 1] - b->plan.micro_begin[j];
    ITH_ASSERT(n <= b->limits.max_docs && used + n <= b->max_now_docs);
    memcpy(now->docs + used, b->plan.order + b->plan.micro_begin[j], (size_t)n * 8);
    now->begin[++now->num] = used + n;
}

static void next_epoch(ith_batcher *b)
{
    int64_t left = 0;
    if (b->options.carry_over) {
        int64_t begin = b->plan.micro_begin[b->plan.num_micro];
        left = b->plan.num_order - begin;
        ITH_ASSERT(left <= b->max_carry);
        if (left)
            memcpy(b->carry, b->plan.order + begin, (size_t)left * 8);
    }
    b->num_carry = left;
    b->epoch++;
    b->cursor = 0;
    batch_plan_build(&b->plan, b->epoch, b->carry, b->num_carry);
}

static void sum_step(const ith_batcher *b, ith_batch_step *step)
{
    for (int64_t i = 0; i < b->now.begin[b->now.num]; i++) {
        ith_sample s = ith_samples_get(b->samples, entry_of(b, b->now.docs[i]));
        step->num_docs++;
        step->num_tokens += s.num_tokens;
        step->num_labels += s.num_labels;
        step->weight_sum += s.weight_sum;
    }
}

void ith_batcher_set_work(ith_batcher *b, ith_batch_work work)
{
    ITH_ASSERT(b->now.num == 0 && work.linear > 0);
    b->options.work = b->deal.options.work = work;
}

bool ith_batcher_next(ith_batcher *b, ith_batch_step *step)
{
    const ith_batcher_options *o = &b->options;
    b->now.num = 0;
    b->now.begin[0] = 0;
    if (o->num_epochs && b->epoch >= o->num_epochs)
        return false;
    ith_batch_step s = {.step = b->step, .epoch = b->epoch};
    while (b->now.num < micro_of_step(b)) {
        while (o->carry_over && b->cursor >= b->plan.num_micro)
            next_epoch(b);
        if (b->cursor >= b->plan.num_micro)
            break;
        take_micro(b);
    }
    s.epoch_end = !o->carry_over && b->cursor >= b->plan.num_micro;
    batch_deal_step(&b->deal, &b->now);
    s.num_micro = b->deal.group_rounds + b->deal.rank_rounds;
    sum_step(b, &s);
    b->step++;
    if (s.epoch_end) {
        /* The plan of an epoch that is over is not needed: the step has its own copy. */
        if (o->num_epochs && b->epoch + 1 >= o->num_epochs) {
            b->epoch++;
            b->cursor = 0;
        } else {
            next_epoch(b);
        }
    }
    *step = s;
    return true;
}

/* Ids, positions, labels and weights of rows [first, last) of a document that begins at row `at`.
 */
static ith_status put_rows(ith_batcher *b, int64_t at, int64_t entry, const ith_sample *s,
                           int64_t first, int64_t last, ith_error *err)
{
    ith_micro_batch *a = &b->arrays;
    int32_t max_id = ith_samples_max_id(b->samples);
    for (int64_t t = first; t < last; t++) {
        if (s->ids[t] < 0 || s->ids[t] > max_id)
            return ith_fail(err, ITH_ERR_FORMAT,
                            "cache of tokenized data is damaged (sample %" PRId64
                            " has id %d): remove it and start again",
                            entry, s->ids[t]);
        a->ids[at + t] = s->ids[t];
        a->position_ids[at + t] = (int32_t)t;
        a->labels[at + t] = ITH_LABEL_IGNORE;
        a->weights[at + t] = 0;
    }
    for (int64_t r = 0; r < s->num_runs; r++) {
        int64_t begin = ith_max_i64(s->runs[r].begin, first + 1);
        for (int64_t t = begin; t < ith_min_i64(s->runs[r].end, last + 1); t++) {
            a->labels[at + t - 1] = s->ids[t];
            a->weights[at + t - 1] = s->runs[r].weight;
        }
    }
    a->num_read += last - first;
    return ITH_OK;
}

/* The arrays of one document at row `at`, as far as they are in the ranges. */
static ith_status put_document(ith_batcher *b, int64_t at, int64_t entry, const int64_t *ranges,
                               ith_error *err)
{
    ith_micro_batch *a = &b->arrays;
    ith_sample s = ith_samples_get(b->samples, entry);
    for (int i = 0; i < 4; i += 2) {
        int64_t first = ith_max_i64(ranges[i] - at, 0),
                last = ith_min_i64(ranges[i + 1] - at, s.num_tokens);
        if (first < last)
            ITH_TRY(put_rows(b, at, entry, &s, first, last, err));
    }
    a->num_labels += s.num_labels;
    a->weight_sum += s.weight_sum;
    return ITH_OK;
}

static void find_own_rows(const ith_batcher *b, const batch_list *list, int64_t at,
                          int64_t ranges[4])
{
    const ith_batcher_options *o = &b->options;
    int64_t tokens = 0;
    for (int64_t i = list->begin[at]; i < list->begin[at + 1]; i++)
        tokens += b->lengths[list->docs[i]];
    ranges[0] = ranges[2] = ranges[3] = 0;
    ranges[1] = o->no_rows ? 0 : tokens;
    if (o->own_rows && !b->arrays.whole)
        o->own_rows(o->own_arg, tokens, ranges);
}

/* Micro-batch j of this rank: list and place in it. */
static const batch_list *find_micro(const ith_batcher *b, int64_t j, int64_t *at)
{
    const ith_batcher_options *o = &b->options;
    const batch_deal *d = &b->deal;
    ITH_ASSERT(j >= 0 && j < d->group_rounds + d->rank_rounds && b->now.num > 0);
    bool whole = j >= d->group_rounds;
    *at = whole ? ((j - d->group_rounds) * o->dp_size + o->dp_rank) * o->cp_size + o->cp_rank
                : j * o->dp_size + o->dp_rank;
    const batch_list *list = whole ? &d->whole : &d->cut;
    ITH_ASSERT(*at < list->num);
    return list;
}

ith_status ith_batcher_fill(ith_batcher *b, int64_t j, ith_micro_batch *out, ith_error *err)
{
    ith_micro_batch *a = &b->arrays;
    int64_t at = 0, ranges[4];
    const batch_list *list = find_micro(b, j, &at);
    a->whole = list == &b->deal.whole;
    find_own_rows(b, list, at, ranges);
    a->num_tokens = a->num_docs = a->num_labels = a->num_read = 0;
    a->weight_sum = 0;
    a->cu_seqlens[0] = 0;
    for (int64_t i = list->begin[at]; i < list->begin[at + 1]; i++) {
        int64_t position = list->docs[i], n = b->lengths[position];
        ITH_ASSERT(a->num_tokens + n <= b->limits.max_tokens);
        ITH_TRY(put_document(b, a->num_tokens, entry_of(b, position), ranges, err));
        a->sample[a->num_docs++] = entry_of(b, position);
        a->num_tokens += n;
        a->cu_seqlens[a->num_docs] = (int32_t)a->num_tokens;
    }
    if (b->limits.max_patches)
        ITH_TRY(batch_media_fill(&b->media, b->samples, ranges, a, err));
    *out = *a;
    return ITH_OK;
}

/* What a state belongs to. Ranks may change: only the samples of a whole step are named. */
static void settings_text(const ith_batcher *b, char *out, size_t size)
{
    const ith_batcher_options *o = &b->options;
    uint64_t subset = 0;
    for (int64_t i = 0; b->subset && i < b->count; i++)
        subset = ith_rng_u64(subset, 0, (uint64_t)b->subset[i]);
    int64_t micro = micro_of_step(b);
    int n = snprintf(out, size,
                     "strategy %d seed %" PRIu64 " shuffle %d carry %d samples %" PRId64
                     " subset %016" PRIx64,
                     (int)o->strategy, o->seed, o->shuffle, o->carry_over, b->count, subset);
    if (is_counted(o->strategy))
        snprintf(out + n, size - (size_t)n, " per step %" PRId64, micro * o->micro_batch_size);
    else if (o->strategy == ITH_BATCHING_PACKING)
        snprintf(out + n, size - (size_t)n, " micro %" PRId64 " budget %" PRId64 " window %" PRId64,
                 micro, b->plan.options.budget, o->pack_window);
    else
        snprintf(out + n, size - (size_t)n, " micro %" PRId64 " budget %" PRId64, micro,
                 b->plan.options.budget);
}

ith_status ith_batcher_save(const ith_batcher *b, json_t **out, ith_error *err)
{
    char settings[400];
    settings_text(b, settings, sizeof settings);
    json_t *carry = json_array();
    bool failed = !carry;
    for (int64_t i = 0; i < b->num_carry; i++)
        failed |= json_array_append_new(carry, json_integer(b->carry[i])) != 0;
    /* Positions are counted in steps of the epoch: ranks and accumulation may change. */
    int64_t position = b->options.carry_over ? b->cursor : b->cursor / micro_of_step(b);
    json_t *state = json_object();
    failed |= json_object_set_new(state, "version", json_integer(STATE_VERSION)) != 0;
    failed |= json_object_set_new(state, "data", json_string(ith_samples_key(b->samples))) != 0;
    failed |= json_object_set_new(state, "settings", json_string(settings)) != 0;
    failed |= json_object_set_new(state, "step", json_integer(b->step)) != 0;
    failed |= json_object_set_new(state, "epoch", json_integer(b->epoch)) != 0;
    failed |= json_object_set_new(state, "position", json_integer(position)) != 0;
    failed |= json_object_set_new(state, "carry", carry) != 0;
    if (failed) {
        json_decref(state);
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for the data position");
    }
    *out = state;
    return ITH_OK;
}

static ith_status get_integer(const json_t *state, const char *key, int64_t *out, ith_error *err)
{
    const json_t *value = json_object_get(state, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return ith_fail(err, ITH_ERR_FORMAT, "data position: %s: found %s, expected a count", key,
                        ith_json_type_name(value));
    *out = json_integer_value(value);
    return ITH_OK;
}

static ith_status check_text(const json_t *state, const char *key, const char *now,
                             const char *advice, ith_error *err)
{
    const char *then = json_string_value(json_object_get(state, key));
    if (then && strcmp(then, now) == 0)
        return ITH_OK;
    return ith_fail(err, ITH_ERR_USAGE,
                    "data position: %s: the checkpoint has '%s', now it is '%s'"
                    " (%s)",
                    key, then ? then : "nothing", now, advice);
}

ith_status ith_batcher_load(ith_batcher *b, const json_t *state, ith_error *err)
{
    int64_t version = 0, step = 0, epoch = 0, position = 0;
    char settings[400];
    settings_text(b, settings, sizeof settings);
    ITH_TRY(get_integer(state, "version", &version, err));
    if (version != STATE_VERSION)
        return ith_fail(err, ITH_ERR_FORMAT, "data position: version %" PRId64 ", expected %d",
                        version, STATE_VERSION);
    ITH_TRY(check_text(state, "data", ith_samples_key(b->samples),
                       "train on the same data with the same tokenizer, template and cutoff_len, "
                       "or start anew",
                       err));
    ITH_TRY(check_text(state, "settings", settings, "resume with the settings of the run", err));
    ITH_TRY(get_integer(state, "step", &step, err));
    ITH_TRY(get_integer(state, "epoch", &epoch, err));
    ITH_TRY(get_integer(state, "position", &position, err));
    const json_t *carry = json_object_get(state, "carry");
    int64_t num_carry = (int64_t)json_array_size(carry);
    if (num_carry > b->max_carry)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "data position: carry: %" PRId64 " samples, at most "
                        "%" PRId64,
                        num_carry, b->max_carry);
    for (int64_t i = 0; i < num_carry; i++) {
        const json_t *item = json_array_get(carry, (size_t)i);
        if (!json_is_integer(item) || json_integer_value(item) < 0 ||
            json_integer_value(item) >= b->count)
            return ith_fail(err, ITH_ERR_FORMAT, "data position: carry: not a sample number");
    }
    for (int64_t i = 0; i < num_carry; i++)
        b->carry[i] = json_integer_value(json_array_get(carry, (size_t)i));
    b->num_carry = num_carry;
    b->now.num = 0;
    b->step = step;
    b->epoch = epoch;
    batch_plan_build(&b->plan, epoch, b->carry, num_carry);
    int64_t most = b->options.carry_over ? b->plan.num_micro : plan_steps(b);
    if (position > most)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "data position: position %" PRId64 " in an epoch of %" PRId64, position,
                        most);
    b->cursor = b->options.carry_over ? position : position * micro_of_step(b);
    return ITH_OK;
}

/* What a rank has to do for micro-batch j of the step. */
static double work_of_micro(const ith_batcher *b, int64_t j)
{
    const batch_deal_options *o = &b->deal.options;
    double sum = 0;
    for (int64_t i = b->now.begin[j]; i < b->now.begin[j + 1]; i++) {
        double n = b->padded[b->now.docs[i]];
        sum += b->media_work ? b->media_work[b->now.docs[i]] : 0;
        sum += (o->work.linear + o->work.exchange) * n + o->work.quadratic * n * n;
    }
    return sum / (double)o->cp_size + o->work.round;
}

/* Deals out the steps of the epoch that the plan holds. */
static void report_work(ith_batcher *b, ith_batch_report *r)
{
    int64_t cursor = b->cursor, groups = b->options.dp_size;
    for (b->cursor = 0; b->cursor < b->plan.num_micro;) {
        b->now.num = b->now.begin[0] = 0;
        while (b->now.num < micro_of_step(b) && b->cursor < b->plan.num_micro)
            take_micro(b);
        for (int64_t j = 0; j < b->now.num; j += groups) {
            double most = 0;
            for (int64_t g = j; g < ith_min_i64(j + groups, b->now.num); g++)
                most = work_of_micro(b, g) > most ? work_of_micro(b, g) : most;
            r->work_in_order += most;
        }
        batch_deal_step(&b->deal, &b->now);
        r->work_dealt += b->deal.busiest;
        r->work_even += b->deal.mean;
    }
    b->cursor = cursor;
    b->now.num = 0;
}

ith_batch_report ith_batcher_report(ith_batcher *b)
{
    batch_plan *plan = &b->plan;
    ith_batch_report r = {.capacity = plan->options.budget};
    batch_plan_build(plan, 0, NULL, 0);
    r.num_micro = plan->num_micro;
    r.num_steps = plan_steps(b);
    for (int64_t j = 0; j < plan->num_micro; j++) {
        int64_t longest = 0, begin = plan->micro_begin[j], end = plan->micro_begin[j + 1];
        for (int64_t i = begin; i < end; i++) {
            int64_t n = b->lengths[plan->order[i]];
            longest = ith_max_i64(longest, n);
            r.num_tokens += n;
            r.sum_squares += n * n;
        }
        r.num_docs += end - begin;
        r.padded_tokens += longest * (end - begin);
    }
    if (r.num_micro)
        r.efficiency = (double)r.num_tokens / ((double)r.num_micro * (double)r.capacity);
    if (r.padded_tokens)
        r.pad_efficiency = (double)r.num_tokens / (double)r.padded_tokens;
    if (r.num_micro)
        report_work(b, &r);
    batch_plan_build(plan, b->epoch, b->carry, b->num_carry);
    return r;
}
