/* samples_build.c - rows to tokens on all cores, in bounded memory.
 *
 * A unit is one row with all its samples; units are handled in batches that are bounded by rows and
 * by bytes, and joined in order. Invariant: what is stored, counted and reported does not depend on
 * the number of threads. */
#include "base/checked.h"
#include "base/log.h"
#include "data/samples_internal.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <time.h>

#define BATCH_UNITS 512
#define BATCH_BYTES_PER_THREAD ((int64_t)4 << 20)
#define PROGRESS_SECONDS 10

typedef struct {
    int64_t first, end; /* samples of the data set */
    ith_samples made;   /* ids, runs and table of this unit alone */
    int32_t *num_made;  /* stored samples by sample of the unit */
    int64_t cap_num_made;
    ith_media_list media; /* of the row */
    int64_t num_items;    /* of them in the sample at hand */
    ith_grid *grids;      /* of a part of it */
    int64_t cap_grids;
    int64_t dropped_reasoning;
    ith_status status;
    ith_error err;
} unit;

typedef struct {
    const ith_samples *samples;
    const ith_samples_options *options;
    unit *units;
} unit_batch;

/* messages[0, cut) as an array of its own; cut 0: all. */
static json_t *prefix_of(json_t *messages, int64_t cut)
{
    if (cut == 0)
        return json_incref(messages);
    json_t *prefix = json_array();
    bool failed = !prefix;
    for (int64_t i = 0; i < cut && !failed; i++)
        failed = json_array_append(prefix, json_array_get(messages, (size_t)i)) != 0;
    if (failed) {
        json_decref(prefix);
        return NULL;
    }
    return prefix;
}

static ith_status encode(unit *u, const ith_samples_options *o, const ith_converted *row,
                         int64_t cut, ith_encoded *encoded, ith_error *err)
{
    json_t *messages = prefix_of(row->messages, cut);
    if (!messages)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for a conversation");
    ith_status status =
        o->all_turns ? ith_chat_encode_turns(o->chat, messages, row->tools, encoded, NULL, err)
                     : ith_chat_encode_sample(o->chat, messages, row->tools, encoded, err);
    if (status == ITH_OK)
        u->dropped_reasoning += encoded->num_dropped_reasoning;
    json_decref(messages);
    return status;
}

/* The items of the sample that was stored last, whose n ids these are. */
static ith_status store_media(unit *u, const ith_media_tokens *tokens, const int32_t *ids,
                              int64_t n, const ith_media_item *items, int64_t num_items)
{
    ith_samples *made = &u->made;
    int64_t frames = 0;
    ITH_TRY(ith_grow((void **)&made->media, &made->cap_media, made->num_media + num_items,
                     sizeof *items, "media", &u->err));
    ITH_TRY(
        ith_grow((void **)&u->grids, &u->cap_grids, num_items, sizeof *u->grids, "media", &u->err));
    for (int64_t i = 0; i < num_items; frames += items[i++].grid.t) {
        u->grids[i] = items[i].grid;
        made->media[made->num_media + i] = items[i];
        made->media[made->num_media + i].frames = made->num_frames + frames;
    }
    ITH_TRY(ith_grow((void **)&made->frames, &made->cap_frames, made->num_frames + frames, 4,
                     "media", &u->err));
    const int32_t cu[] = {0, ith_narrow(n)};
    ITH_TRY(ith_media_find(tokens, ids, cu, 1, u->grids, num_items, made->frames + made->num_frames,
                           &u->err)); /* ith_media_cut has seen that they fit */
    stored_sample *last = &made->table[made->num_stored - 1];
    last->media_begin = made->num_media;
    last->num_media = ith_narrow(num_items);
    made->num_media += num_items;
    made->num_frames += frames;
    return ITH_OK;
}

/* Cuts or splits one encoded sample, and stores what has a target. Ids and items that do not fit
 * together are why it is dropped. steps: or NULL. */
static ith_status store(unit *u, const ith_samples_options *o, const ith_dataset_sample *sample,
                        const ith_encoded *e, const int32_t *steps, int32_t *num_made,
                        ith_error *why)
{
    stored_sample from = {.row = sample->row, .part = sample->part, .cut = sample->cut};
    const ith_media_item *items = u->media.items;
    int64_t n = e->ids.count, cutoff = o->cutoff_len, end = 0, num = 0;
    int64_t num_items = o->media ? ith_min_i64(u->num_items, u->media.count) : 0;
    for (int64_t begin = 0; begin < n; begin = end, items += num, num_items -= num) {
        bool stored = false;
        end = ith_min_i64(begin + cutoff, n);
        if (o->media)
            ITH_TRY(ith_media_cut(ith_media_ids(o->media), e->ids.ids, n, begin, cutoff, items,
                                  num_items, &end, &num, why));
        if (end == begin) { /* one image is longer than the cutoff */
            if (begin)
                ith_drops_add(&u->made.drops, ITH_DROP_SPLIT_PART, sample->part, sample->row,
                              "from an image that is longer than cutoff_len on");
            break;
        }
        from.full_tokens = o->split_long ? end - begin : n;
        from.has_mask = 0;
        for (int64_t t = begin; o->mask_id && t < end; t++)
            from.has_mask |= e->ids.ids[t] == *o->mask_id;
        ITH_TRY(samples_append(&u->made, e->ids.ids + begin, e->weights + begin,
                               steps ? steps + begin : NULL, end - begin, &from, &stored, &u->err));
        if (stored && num)
            ITH_TRY(store_media(u, ith_media_ids(o->media), e->ids.ids + begin, end - begin, items,
                                num));
        *num_made += stored;
        if (!stored && o->split_long && n > cutoff)
            ith_drops_add(&u->made.drops, ITH_DROP_SPLIT_PART, sample->part, sample->row, "");
        if (!o->split_long)
            break;
    }
    if (*num_made == 0 && (n <= cutoff || !o->split_long || end == 0)) {
        char detail[ITH_DROP_DETAIL_BYTES];
        snprintf(detail, sizeof detail, "%" PRId64 " tokens, cutoff_len %" PRId64, n, cutoff);
        ith_drops_add(&u->made.drops, ITH_DROP_NO_TRAINABLE, sample->part, sample->row, detail);
    }
    return ITH_OK;
}

/* Nothing predicts an image. */
static void no_loss_on_media(const ith_media_tokens *m, ith_encoded *e)
{
    for (int64_t t = 0; t < e->ids.count; t++)
        if (e->ids.ids[t] == m->image || e->ids.ids[t] == m->video)
            e->weights[t] = 0;
}

static ith_status encode_one(unit *u, const ith_samples_options *o,
                             const ith_dataset_sample *sample, const ith_converted *row,
                             int32_t *num_made)
{
    ith_encoded encoded = {0};
    ith_error why = {0};
    ith_status status = encode(u, o, row, sample->cut, &encoded, &why);
    if (status == ITH_ERR_MEMORY)
        ith_fail(&u->err, status, "%s", why.text);
    if (status != ITH_OK && status != ITH_ERR_MEMORY) {
        ith_drops_add(&u->made.drops, ITH_DROP_RENDER, sample->part, sample->row, why.text);
        status = ITH_OK;
    } else if (status == ITH_OK && encoded.ids.count == 0) {
        ith_drops_add(&u->made.drops, ITH_DROP_NO_TRAINABLE, sample->part, sample->row,
                      "the template gives no text");
    } else if (status == ITH_OK) {
        if (o->media)
            no_loss_on_media(ith_media_ids(o->media), &encoded);
        u->num_items = ith_media_count(row->messages, sample->cut);
        status = store(u, o, sample, &encoded, NULL, num_made, &why);
        if (status != ITH_OK && why.text[0]) {
            ith_drops_add(&u->made.drops, ITH_DROP_RENDER, sample->part, sample->row, why.text);
            status = ITH_OK;
        }
    }
    ith_encoded_deinit(&encoded);
    return status;
}

/* A row of ids: its own weights, and the steps of a trajectory. */
static ith_status store_ids(unit *u, const ith_samples_options *o, const ith_dataset_sample *sample,
                            const ith_converted *row, int32_t *num_made)
{
    int64_t n = (int64_t)json_array_size(row->input_ids), prompt = row->prompt_length;
    ith_encoded e = {0};
    int32_t *steps = NULL;
    ith_status status = ITH_OK;
    e.ids.count = n;
    ITH_TRY_OUT(ith_alloc((void **)&e.ids.ids, n * 4, "ids", &u->err));
    ITH_TRY_OUT(ith_alloc((void **)&e.weights, n * 4, "ids", &u->err));
    if (row->reveal_steps)
        ITH_TRY_OUT(ith_alloc((void **)&steps, n * 4, "ids", &u->err));
    for (int64_t i = 0; i < n; i++) {
        e.ids.ids[i] = (int32_t)json_integer_value(json_array_get(row->input_ids, (size_t)i));
        e.weights[i] = i >= prompt ? 1.0f : 0.0f;
        if (steps && i >= prompt)
            steps[i] = (int32_t)json_integer_value(
                json_array_get(row->reveal_steps, (size_t)(i - prompt)));
        else if (steps)
            steps[i] = -1;
    }
    u->num_items = 0;
    status = store(u, o, sample, &e, steps, num_made, &u->err);
out:
    ith_free(steps);
    ith_encoded_deinit(&e);
    return status;
}

/* Files of the row's media; *broken: the row is dropped. */
static ith_status prepare_media(unit *u, const ith_dataset *dataset, const ith_samples_options *o,
                                const ith_dataset_sample *sample, json_t *messages, bool *broken)
{
    const char *file = ith_dataset_row_file(dataset, sample->part, sample->row);
    ith_error why = {0};
    ith_status status = ith_media_prepare(o->media, messages, file, &u->media, &why);
    *broken = status == ITH_ERR_FORMAT;
    if (status == ITH_OK)
        return ITH_OK;
    char where[PATH_MAX];
    if (!*broken)
        return ith_fail(&u->err, status, "%s: %s",
                        ith_dataset_where(dataset, sample->part, sample->row, where, sizeof where),
                        why.text);
    ith_drops_add(&u->made.drops, ITH_DROP_BROKEN_MEDIA, sample->part, sample->row, why.text);
    return ITH_OK;
}

static ith_status keep_paths(unit *u)
{
    ith_samples *made = &u->made;
    const ith_buf *paths = &u->media.paths;
    if (made->num_media == 0)
        return ITH_OK;
    ITH_TRY(ith_grow((void **)&made->paths, &made->cap_paths, paths->len, 1, "media", &u->err));
    memcpy(made->paths, paths->data, (size_t)paths->len);
    made->path_bytes = paths->len;
    return ITH_OK;
}

static ith_status encode_unit(const unit_batch *batch, unit *u)
{
    const ith_dataset *dataset = batch->samples->dataset;
    const ith_dataset_sample *all = ith_dataset_samples(dataset);
    int64_t count = u->end - u->first;
    ITH_TRY(ith_grow((void **)&u->num_made, &u->cap_num_made, count, sizeof *u->num_made, "samples",
                     &u->err));
    memset(u->num_made, 0, (size_t)count * sizeof *u->num_made);
    ith_converted row;
    ITH_TRY(ith_dataset_read(dataset, all[u->first].part, all[u->first].row, &row, &u->err));
    ITH_ASSERT(row.drop == ITH_DROP_NONE && (row.messages || row.input_ids));
    ith_status status = ITH_OK;
    bool broken = false;
    if (row.has_media && batch->options->media)
        status = prepare_media(u, dataset, batch->options, &all[u->first], row.messages, &broken);
    for (int64_t i = 0; i < count && status == ITH_OK && !broken; i++)
        status = (row.input_ids ? store_ids : encode_one)(u, batch->options, &all[u->first + i],
                                                          &row, &u->num_made[i]);
    if (status == ITH_OK)
        status = keep_paths(u);
    ith_media_list_deinit(&u->media);
    ith_converted_deinit(&row);
    return status;
}

static void encode_task(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const unit_batch *batch = arg;
    for (int64_t i = begin; i < end; i++)
        batch->units[i].status = encode_unit(batch, &batch->units[i]);
}

/* Fills units with the next rows; returns how many. */
static int64_t gather_units(const ith_samples *s, unit *units, int64_t max_bytes, int64_t *next)
{
    const ith_dataset_sample *all = ith_dataset_samples(s->dataset);
    int64_t n = ith_dataset_num_samples(s->dataset), count = 0, bytes = 0;
    while (*next < n && count < BATCH_UNITS && bytes < max_bytes) {
        unit *u = &units[count++];
        u->first = u->end = *next;
        while (u->end < n && all[u->end].part == all[u->first].part &&
               all[u->end].row == all[u->first].row)
            u->end++;
        u->made.num_ids = u->made.num_runs = u->made.num_stored = 0;
        u->made.num_media = u->made.num_frames = u->made.path_bytes = 0;
        memset(&u->made.drops, 0, sizeof u->made.drops);
        u->dropped_reasoning = 0;
        ith_error_clear(&u->err);
        bytes += ith_dataset_row_bytes(s->dataset, all[u->first].part, all[u->first].row) *
                 (u->end - u->first);
        *next = u->end;
    }
    return count;
}

static ith_status join_media(ith_samples *s, const ith_samples *made, ith_error *err)
{
    if (made->num_media == 0)
        return ITH_OK;
    ITH_TRY(ith_grow((void **)&s->media, &s->cap_media, s->num_media + made->num_media,
                     sizeof *s->media, "media", err));
    ITH_TRY(ith_grow((void **)&s->frames, &s->cap_frames, s->num_frames + made->num_frames, 4,
                     "media", err));
    ITH_TRY(ith_grow((void **)&s->paths, &s->cap_paths, s->path_bytes + made->path_bytes, 1,
                     "media", err));
    for (int64_t i = 0; i < made->num_media; i++) {
        s->media[s->num_media + i] = made->media[i];
        s->media[s->num_media + i].path += s->path_bytes;
        s->media[s->num_media + i].frames += s->num_frames;
    }
    memcpy(s->frames + s->num_frames, made->frames, (size_t)made->num_frames * 4);
    memcpy(s->paths + s->path_bytes, made->paths, (size_t)made->path_bytes);
    s->num_media += made->num_media;
    s->num_frames += made->num_frames;
    s->path_bytes += made->path_bytes;
    return ITH_OK;
}

/* Appends what a unit made. first_stored[i]: where the stored samples of sample i begin. */
static ith_status join_unit(ith_samples *s, const unit *u, ith_writer *writer,
                            int64_t *first_stored, ith_error *err)
{
    const ith_samples *made = &u->made;
    if (u->status != ITH_OK)
        return ith_fail(err, u->status, "%s", u->err.text);
    ith_drops_merge(&s->drops, &made->drops);
    for (int64_t i = u->first, stored = s->num_stored; i < u->end; i++) {
        first_stored[i] = stored;
        stored += u->num_made[i - u->first];
    }
    ITH_TRY(ith_grow((void **)&s->runs, &s->cap_runs, s->num_runs + made->num_runs, sizeof *s->runs,
                     "samples", err));
    ITH_TRY(ith_grow((void **)&s->table, &s->cap_stored, s->num_stored + made->num_stored,
                     sizeof *s->table, "samples", err));
    for (int64_t i = 0; i < made->num_stored; i++) {
        stored_sample *t = &s->table[s->num_stored + i];
        *t = made->table[i];
        for (int64_t k = 0; k < t->num_tokens; k++)
            s->max_id =
                made->ids[t->id_begin + k] > s->max_id ? made->ids[t->id_begin + k] : s->max_id;
        t->id_begin += s->num_ids;
        t->run_begin += s->num_runs;
        t->media_begin += s->num_media;
    }
    ITH_TRY(join_media(s, made, err));
    if (made->num_runs)
        memcpy(s->runs + s->num_runs, made->runs, (size_t)made->num_runs * sizeof *s->runs);
    if (writer) {
        ITH_TRY(ith_writer_write(writer, made->ids, made->num_ids * 4, err));
    } else if (made->num_ids) {
        ITH_TRY(
            ith_grow((void **)&s->ids, &s->cap_ids, s->num_ids + made->num_ids, 4, "samples", err));
        memcpy(s->ids + s->num_ids, made->ids, (size_t)made->num_ids * 4);
    }
    s->num_ids += made->num_ids;
    s->num_runs += made->num_runs;
    s->num_stored += made->num_stored;
    return ITH_OK;
}

/* Entries of an epoch: all stored samples of each drawn sample. */
static ith_status make_entries(ith_samples *s, const int64_t *first_stored, ith_error *err)
{
    const int64_t *drawn = ith_dataset_drawn(s->dataset);
    int64_t n = ith_dataset_num_drawn(s->dataset), count = 0;
    for (int64_t i = 0; i < n; i++)
        count += first_stored[drawn[i] + 1] - first_stored[drawn[i]];
    ITH_TRY(ith_alloc((void **)&s->entries, count * 8, "samples", err));
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = first_stored[drawn[i]]; k < first_stored[drawn[i] + 1]; k++)
            s->entries[s->num_entries++] = k;
    return ITH_OK;
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static ith_status encode_all(ith_samples *s, const ith_samples_options *o, unit *units,
                             ith_writer *writer, int64_t *first_stored, ith_error *err)
{
    unit_batch batch = {s, o, units};
    int64_t n = ith_dataset_num_samples(s->dataset), dropped_reasoning = 0;
    int64_t max_bytes = BATCH_BYTES_PER_THREAD * ith_pool_threads(o->pool);
    double last = seconds_now();
    for (int64_t next = 0; next < n;) {
        int64_t count = gather_units(s, units, max_bytes, &next);
        ith_pool_for(o->pool, count, 1, encode_task, &batch);
        for (int64_t i = 0; i < count; i++) {
            ITH_TRY(join_unit(s, &units[i], writer, first_stored, err));
            dropped_reasoning += units[i].dropped_reasoning;
        }
        if (next < n && seconds_now() - last > PROGRESS_SECONDS) {
            last = seconds_now();
            ith_log(ITH_LOG_INFO, "data",
                    "%s: %" PRId64 " of %" PRId64 " samples tokenized (%.0f %%)", o->path, next, n,
                    100.0 * (double)next / (double)n);
        }
    }
    first_stored[n] = s->num_stored;
    if (dropped_reasoning)
        ith_log(ITH_LOG_WARN, "data",
                "%s: the template leaves out the reasoning of %" PRId64
                " trained answers; %s trains on it",
                o->path, dropped_reasoning,
                o->all_turns ? "train_on: last_turn, or a template that keeps it,"
                             : "a template that keeps it");
    return ITH_OK;
}

ith_status samples_build(ith_samples *s, const ith_samples_options *o, ith_writer *writer,
                         ith_error *err)
{
    ITH_TRY(ith_dataset_index(s->dataset, o->pool, err));
    s->drops = *ith_dataset_drops(s->dataset);
    s->num_candidates = ith_dataset_num_samples(s->dataset);
    s->num_rows = 0;
    for (int64_t i = 0; i < ith_dataset_num_parts(s->dataset); i++)
        s->num_rows += ith_dataset_part_at(s->dataset, i)->num_rows;
    unit *units = NULL;
    int64_t *first_stored = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc((void **)&first_stored, (s->num_candidates + 1) * 8, "samples", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&units, BATCH_UNITS, sizeof *units, "samples", err));
    ITH_TRY_OUT(encode_all(s, o, units, writer, first_stored, err));
    ITH_TRY_OUT(make_entries(s, first_stored, err));
out:
    for (int64_t i = 0; units && i < BATCH_UNITS; i++) {
        ith_free(units[i].made.ids);
        ith_free(units[i].made.runs);
        ith_free(units[i].made.table);
        ith_free(units[i].made.media);
        ith_free(units[i].made.frames);
        ith_free(units[i].grids);
        ith_free(units[i].made.paths);
        ith_free(units[i].num_made);
    }
    ith_free(units);
    ith_free(first_stored);
    return status;
}
