/* samples.c - opening, reading and splitting tokenized samples.
 *
 * Invariants:
 *  1. Entries and table agree (samples_sum checks what comes from a file).
 *  2. A key is never reused for other content: what decides ids, labels or weights goes into it. */
#include "data/samples.h"

#include "base/checked.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/rng.h"
#include "data/samples_internal.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* Raised when the meaning of stored samples or the file layout changes. */
#define SAMPLES_FORMAT 5

ith_samples_options ith_samples_options_from(const ith_config *config, bool eval,
                                             const ith_tokenizer *tokenizer, const ith_chat *chat,
                                             ith_pool *pool)
{
    return (ith_samples_options){.path = eval ? config->eval_dataset : config->train_dataset,
                                 .all_turns = config->train_on == ITH_TRAIN_ON_ALL_TURNS,
                                 .split_long = config->split_long,
                                 .cutoff_len = config->cutoff_len,
                                 .seed = (uint64_t)config->seed,
                                 .cache_dir = config->data_cache_dir,
                                 .tokenizer = tokenizer,
                                 .chat = chat,
                                 .pool = pool};
}

/* SHA-256 over all that decides what is stored. */
static ith_status make_key(ith_samples *s, const ith_samples_options *o, ith_error *err)
{
    char text[1200];
    if (o->identity)
        snprintf(s->identity, sizeof s->identity, "%s", o->identity);
    else
        ITH_TRY(ith_dataset_identity(s->dataset, s->identity, err));
    int n = snprintf(text, sizeof text,
                     "ithaca %s format %d\ntokenizer %s\ntemplate %s\ndata %s\ncutoff_len %" PRId64
                     " split_long %d all_turns %d media %s\n",
                     ITH_VERSION, SAMPLES_FORMAT, ith_tokenizer_hash(o->tokenizer),
                     ith_chat_hash(o->chat), s->identity, o->cutoff_len, o->split_long,
                     o->all_turns, o->media ? ith_media_settings(o->media) : "none");
    if (o->mask_id)
        snprintf(text + n, sizeof text - (size_t)n, "mask %d\n", *o->mask_id);
    ith_sha256 h;
    ith_sha256_init(&h);
    ith_sha256_update(&h, text, (int64_t)strlen(text));
    ith_sha256_hex(&h, s->key);
    return ITH_OK;
}

static ith_status copy_part_names(ith_samples *s, ith_error *err)
{
    int64_t n = ith_dataset_num_parts(s->dataset);
    ITH_TRY(ith_alloc_zero((void **)&s->part_names, n, sizeof(char *), "names", err));
    for (s->num_parts = 0; s->num_parts < n; s->num_parts++) {
        const char *name = ith_dataset_part_at(s->dataset, s->num_parts)->name;
        s->part_names[s->num_parts] = ith_strndup(name, (int64_t)strlen(name));
        if (!s->part_names[s->num_parts])
            return ith_fail(err, ITH_ERR_MEMORY, "out of memory for names");
    }
    return ITH_OK;
}

/* Places of the first dropped rows, while the files are open. */
static ith_status name_drops(ith_samples *s, ith_error *err)
{
    for (int k = 1; k < ITH_DROP_COUNT; k++) {
        const ith_drop_row *drop = &s->drops.rows[k];
        ith_free(s->where[k]);
        s->where[k] = NULL;
        if (drop->count == 0)
            continue;
        char where[PATH_MAX];
        ith_dataset_where(s->dataset, drop->dataset, drop->row, where, sizeof where);
        s->where[k] = ith_strndup(where, (int64_t)strlen(where));
        if (!s->where[k])
            return ith_fail(err, ITH_ERR_MEMORY, "out of memory for a message");
    }
    return ITH_OK;
}

void ith_samples_drop_report(const ith_samples *s, ith_buf *out)
{
    for (int k = 1; k < ITH_DROP_COUNT; k++) {
        const ith_drop_row *drop = &s->drops.rows[k];
        if (drop->count == 0)
            continue;
        const char *unit = ith_drop_unit((ith_drop)k);
        bool of_rows = strcmp(unit, "row") == 0, of_samples = strcmp(unit, "sample") == 0;
        ith_buf_printf(out, "%" PRId64, drop->count);
        if (of_rows || of_samples)
            ith_buf_printf(out, " of %" PRId64, of_rows ? s->num_rows : s->num_candidates);
        int64_t plural = of_rows ? s->num_rows : of_samples ? s->num_candidates : drop->count;
        ith_buf_printf(out, " %s%s dropped: %s", unit, plural == 1 ? "" : "s",
                       ith_drop_text((ith_drop)k));
        ith_buf_printf(out, " (first: %s%s%s)\n", s->where[k] ? s->where[k] : "?",
                       drop->detail[0] ? ": " : "", drop->detail);
    }
}

/* The report on one line, for an error text. */
static ith_status fail_empty(const ith_samples *s, const char *path, ith_error *err)
{
    ith_buf report = {0};
    ith_samples_drop_report(s, &report);
    while (report.len && report.data[report.len - 1] == '\n')
        report.data[--report.len] = '\0';
    ith_buf line = {0};
    for (int64_t i = 0; i < report.len; i++)
        ith_buf_puts(&line, report.data[i] == '\n' ? "; " : (char[]){report.data[i], '\0'});
    ith_fail(err, ITH_ERR_FORMAT, "%s: no sample is left: %s", path,
             line.len ? line.data : "size or weight choose none");
    ith_buf_deinit(&line);
    ith_buf_deinit(&report);
    return ITH_ERR_FORMAT;
}

static void log_result(const ith_samples *s, const char *path)
{
    ith_log(ITH_LOG_INFO, "data",
            "%s: %" PRId64 " sample%s, %" PRId64 " tokens, %" PRId64 " trained%s", path,
            s->num_entries, s->num_entries == 1 ? "" : "s", s->num_tokens, s->num_labels,
            s->from_cache ? " (cached)" : "");
    if (s->num_truncated)
        ith_log(ITH_LOG_WARN, "data",
                "%s: %" PRId64 " sample%s longer than cutoff_len: %" PRId64
                " tokens at their ends are not used",
                path, s->num_truncated, s->num_truncated == 1 ? " is" : "s are", s->tokens_lost);
    ith_buf report = {0};
    ith_samples_drop_report(s, &report);
    char *line = report.data;
    while (line && *line) {
        char *end = strchr(line, '\n');
        if (end)
            *end = '\0';
        ith_log(ITH_LOG_WARN, "data", "%s", line);
        line = end ? end + 1 : NULL;
    }
    ith_buf_deinit(&report);
}

/* Tokenizes, through the cache file when path is given. */
static ith_status build(ith_samples *s, const ith_samples_options *o, const char *cache_path,
                        ith_error *err)
{
    ith_writer writer = {.fd = -1};
    ith_status status = ITH_OK;
    if (cache_path) {
        ITH_TRY(ith_make_dirs(o->cache_dir, err));
        ITH_TRY(samples_cache_begin(&writer, cache_path, err));
    }
    ITH_TRY_OUT(samples_build(s, o, cache_path ? &writer : NULL, err));
    ITH_TRY_OUT(name_drops(s, err));
    if (s->num_entries == 0) {
        status = fail_empty(s, o->path, err);
        goto out;
    }
    if (cache_path) {
        bool valid = false;
        ITH_TRY_OUT(samples_cache_finish(s, &writer, err));
        samples_release(s);
        ITH_TRY_OUT(samples_cache_open(s, cache_path, &valid, err));
        status = valid ? ITH_OK : ITH_ERR_IO;
    } else {
        status = samples_sum(s, err);
    }
out:
    if (cache_path)
        ith_writer_abort(&writer);
    return status;
}

static ith_status open_cached(ith_samples *s, const ith_samples_options *o, ith_error *err)
{
    ith_buf path = {0};
    samples_cache_path(&path, o->cache_dir, s->key);
    ith_status status = ith_buf_check(&path, "cache path", err);
    if (status == ITH_OK && ith_path_exists(path.data)) {
        bool valid = false;
        ith_error why = {0};
        status = samples_cache_open(s, path.data, &valid, &why);
        if (status != ITH_OK)
            ith_fail(err, status, "%s", why.text);
        else if (valid)
            s->from_cache = true;
        else
            ith_log(ITH_LOG_WARN, "data", "%s; it is made anew", why.text);
    } else if (status == ITH_OK) {
        ith_log(ITH_LOG_INFO, "data",
                "no tokenized data for these files, tokenizer, template and settings in %s: it is "
                "made now",
                o->cache_dir);
    }
    if (status == ITH_OK && !s->from_cache)
        status = build(s, o, path.data, err);
    ith_buf_deinit(&path);
    return status;
}

ith_status ith_samples_open(ith_samples **out, const ith_samples_options *options, ith_error *err)
{
    ITH_ASSERT(options->path && options->tokenizer && options->chat);
    if (options->cutoff_len < 2 || options->cutoff_len > INT32_MAX - 1)
        return ith_fail(err, ITH_ERR_USAGE, "cutoff_len: found %" PRId64 " (2 to %d)",
                        options->cutoff_len, INT32_MAX - 1);
    ith_samples *s = NULL;
    ITH_TRY(ith_alloc_zero((void **)&s, 1, sizeof *s, "samples", err));
    ith_dataset_options choice = {.all_turns = options->all_turns,
                                  .allow_media = options->media != NULL,
                                  .seed = options->seed};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_dataset_open(&s->dataset, options->path, &choice, err));
    ITH_TRY_OUT(copy_part_names(s, err));
    ITH_TRY_OUT(make_key(s, options, err));
    if (options->cache_dir)
        ITH_TRY_OUT(open_cached(s, options, err));
    else
        ITH_TRY_OUT(build(s, options, NULL, err));
    log_result(s, options->path);
    *out = s;
    return ITH_OK;
out:
    ith_samples_close(s);
    return status;
}

void samples_release(ith_samples *s)
{
    if (s->map.data) {
        ith_map_close(&s->map);
    } else {
        ith_free(s->ids);
        ith_free(s->runs);
        ith_free(s->table);
        ith_free(s->entries);
        ith_free(s->media);
        ith_free(s->frames);
        ith_free(s->paths);
    }
    s->ids = NULL;
    s->runs = NULL;
    s->table = NULL;
    s->entries = NULL;
    s->media = NULL;
    s->frames = NULL;
    s->paths = NULL;
    s->num_ids = s->num_runs = s->num_stored = s->num_entries = 0;
    s->num_media = s->num_frames = s->path_bytes = 0;
    s->cap_ids = s->cap_runs = s->cap_stored = s->cap_media = s->cap_frames = s->cap_paths = 0;
}

void ith_samples_close(ith_samples *s)
{
    if (!s)
        return;
    samples_release(s);
    ith_dataset_close(s->dataset);
    for (int k = 0; k < ITH_DROP_COUNT; k++)
        ith_free(s->where[k]);
    for (int64_t i = 0; i < s->num_parts; i++)
        ith_free(s->part_names[i]);
    ith_free(s->part_names);
    ith_free(s);
}

/* Runs of equal weight among count ids; the first id is no target, for nothing predicts it. */
static ith_status append_runs(ith_samples *s, const float *weights, int64_t count,
                              stored_sample *sample, ith_error *err)
{
    sample->run_begin = s->num_runs;
    for (int64_t t = 0; t < count;) {
        int64_t end = t + 1;
        while (end < count && weights[end] == weights[t])
            end++;
        if (weights[t] > 0) {
            int64_t targets = end - ith_max_i64(t, 1);
            ITH_TRY(ith_grow((void **)&s->runs, &s->cap_runs, s->num_runs + 1, sizeof *s->runs,
                             "samples", err));
            s->runs[s->num_runs++] = (ith_sample_run){ith_narrow(t), ith_narrow(end), weights[t]};
            sample->num_runs++;
            sample->num_labels += ith_narrow(targets);
            sample->weight_sum += (double)targets * (double)weights[t];
        }
        t = end;
    }
    return ITH_OK;
}

/* Ids of the table's memory: those of the sample, then its steps. */
static int64_t stored_ids(const stored_sample *t)
{
    return (1 + (int64_t)t->has_steps) * t->num_tokens;
}

ith_status samples_append(ith_samples *s, const int32_t *ids, const float *weights,
                          const int32_t *steps, int64_t count, const stored_sample *from,
                          bool *has_target, ith_error *err)
{
    ITH_ASSERT(count > 0 && count <= INT32_MAX);
    int64_t runs_before = s->num_runs;
    stored_sample sample = *from;
    sample.num_tokens = ith_narrow(count);
    sample.num_runs = sample.num_labels = 0;
    sample.weight_sum = 0;
    sample.id_begin = s->num_ids;
    sample.has_steps = steps != NULL;
    ITH_TRY(append_runs(s, weights, count, &sample, err));
    *has_target = sample.num_labels > 0;
    if (!*has_target) {
        s->num_runs = runs_before;
        return ITH_OK;
    }
    int64_t stored = stored_ids(&sample);
    ITH_TRY(ith_grow((void **)&s->ids, &s->cap_ids, s->num_ids + stored, 4, "samples", err));
    memcpy(s->ids + s->num_ids, ids, (size_t)count * 4);
    if (steps)
        memcpy(s->ids + s->num_ids + count, steps, (size_t)count * 4);
    s->num_ids += stored;
    ITH_TRY(ith_grow((void **)&s->table, &s->cap_stored, s->num_stored + 1, sizeof *s->table,
                     "samples", err));
    s->table[s->num_stored++] = sample;
    return ITH_OK;
}

/* One row of the table, which may come from a file: inside of what it points into? */
static bool sample_ok(const ith_samples *s, const stored_sample *t)
{
    if (t->num_tokens <= 0 || t->has_steps < 0 || t->has_steps > 1 || t->has_mask < 0 ||
        t->has_mask > 1 || t->id_begin < 0 || t->id_begin > s->num_ids - stored_ids(t) ||
        t->num_runs <= 0 || t->run_begin < 0 || t->run_begin > s->num_runs - t->num_runs ||
        t->part < 0 || t->part >= ith_max_i64(s->num_parts, 1) || t->row < 0 || t->cut < 0 ||
        t->num_media < 0 || t->media_begin < 0 || t->media_begin > s->num_media - t->num_media)
        return false;
    int64_t labels = 0;
    double sum = 0;
    int32_t end = 0;
    for (int64_t i = t->run_begin; i < t->run_begin + t->num_runs; i++) {
        const ith_sample_run *run = &s->runs[i];
        if (run->begin < end || run->end <= run->begin || run->end > t->num_tokens ||
            !isfinite(run->weight) || run->weight <= 0)
            return false;
        int64_t targets = run->end - ith_max_i64(run->begin, 1);
        labels += targets;
        sum += (double)targets * (double)run->weight;
        end = run->end;
    }
    return labels == t->num_labels && labels > 0 && sum <= t->weight_sum && sum >= t->weight_sum;
}

static bool item_ok(const ith_samples *s, const ith_media_item *m)
{
    ith_grid g = m->grid;
    return m->path >= 0 && m->path < s->path_bytes && g.t > 0 && g.h > 0 && g.w > 0 &&
           g.h < 1 << 20 && g.w < 1 << 20 && g.t < 1 << 20 && m->num_frames >= 0 &&
           ith_grid_patches(g) < INT32_MAX && m->frames >= 0 && m->frames <= s->num_frames - g.t;
}

ith_status samples_sum(ith_samples *s, ith_error *err)
{
    if (s->path_bytes && s->paths[s->path_bytes - 1] != '\0')
        return ith_fail(err, ITH_ERR_FORMAT, "the paths of media are damaged");
    for (int64_t i = 0; i < s->num_media; i++)
        if (!item_ok(s, &s->media[i]))
            return ith_fail(err, ITH_ERR_FORMAT, "item %" PRId64 " of the media is damaged", i);
    for (int64_t i = 0; i < s->num_stored; i++)
        if (!sample_ok(s, &s->table[i]))
            return ith_fail(err, ITH_ERR_FORMAT, "sample %" PRId64 " of the table is damaged", i);
    s->num_tokens = s->num_labels = s->num_truncated = s->tokens_lost = s->num_trajectories = 0;
    for (int64_t i = 0; i < s->num_entries; i++) {
        if (s->entries[i] < 0 || s->entries[i] >= s->num_stored)
            return ith_fail(err, ITH_ERR_FORMAT, "entry %" PRId64 " of the table is damaged", i);
        const stored_sample *t = &s->table[s->entries[i]];
        s->num_tokens += t->num_tokens;
        s->num_labels += t->num_labels;
        s->num_trajectories += t->has_steps;
        s->num_truncated += t->full_tokens > t->num_tokens;
        s->tokens_lost += ith_max_i64(t->full_tokens - t->num_tokens, 0);
    }
    return ITH_OK;
}

int64_t ith_samples_count(const ith_samples *s)
{
    return s->num_entries;
}

int64_t ith_samples_num_stored(const ith_samples *s)
{
    return s->num_stored;
}

int64_t ith_samples_num_tokens(const ith_samples *s)
{
    return s->num_tokens;
}

int64_t ith_samples_num_labels(const ith_samples *s)
{
    return s->num_labels;
}

int64_t ith_samples_num_trajectories(const ith_samples *s)
{
    return s->num_trajectories;
}

int64_t ith_samples_num_truncated(const ith_samples *s, int64_t *tokens_lost)
{
    if (tokens_lost)
        *tokens_lost = s->tokens_lost;
    return s->num_truncated;
}

int32_t ith_samples_max_id(const ith_samples *s)
{
    return s->max_id;
}

int64_t ith_samples_length(const ith_samples *s, int64_t entry)
{
    ITH_ASSERT(entry >= 0 && entry < s->num_entries);
    return s->table[s->entries[entry]].num_tokens;
}

ith_sample ith_samples_get(const ith_samples *s, int64_t entry)
{
    ITH_ASSERT(entry >= 0 && entry < s->num_entries);
    const stored_sample *t = &s->table[s->entries[entry]];
    return (ith_sample){.ids = s->ids + t->id_begin,
                        .steps = t->has_steps ? s->ids + t->id_begin + t->num_tokens : NULL,
                        .num_tokens = t->num_tokens,
                        .runs = s->runs + t->run_begin,
                        .num_runs = t->num_runs,
                        .has_mask = t->has_mask,
                        .num_labels = t->num_labels,
                        .weight_sum = t->weight_sum,
                        .full_tokens = t->full_tokens,
                        .part = t->part,
                        .row = t->row,
                        .cut = t->cut,
                        .media = t->num_media ? s->media + t->media_begin : NULL,
                        .num_media = t->num_media};
}

const char *ith_samples_media_path(const ith_samples *s, const ith_media_item *item)
{
    return s->paths + item->path;
}

const int32_t *ith_samples_media_frames(const ith_samples *s, const ith_media_item *item)
{
    return s->frames + item->frames;
}

int64_t ith_samples_num_media(const ith_samples *s)
{
    return s->num_media;
}

const char *ith_samples_identity(const ith_samples *samples)
{
    return samples->identity;
}

const char *ith_samples_key(const ith_samples *s)
{
    return s->key;
}

bool ith_samples_from_cache(const ith_samples *s)
{
    return s->from_cache;
}

const ith_drops *ith_samples_drops(const ith_samples *s)
{
    return &s->drops;
}

const char *ith_samples_where(const ith_samples *s, int64_t part, int64_t row, char *buf,
                              size_t size)
{
    if (s->dataset)
        return ith_dataset_where(s->dataset, part, row, buf, size);
    snprintf(buf, size, "sample %" PRId64, row + 1);
    return buf;
}

int64_t ith_samples_num_parts(const ith_samples *s)
{
    return s->num_parts;
}

const char *ith_samples_part_name(const ith_samples *s, int64_t part)
{
    ITH_ASSERT(part >= 0 && part < s->num_parts);
    return s->part_names[part];
}

/* Entries ascend, so those of one conversation stand together. */
static bool same_conversation(const ith_samples *s, int64_t a, int64_t b)
{
    const stored_sample *x = &s->table[s->entries[a]], *y = &s->table[s->entries[b]];
    return x->part == y->part && x->row == y->row;
}

ith_status ith_samples_split(const ith_samples *s, double ratio, uint64_t seed, int64_t **train,
                             int64_t *num_train, int64_t **eval, int64_t *num_eval, ith_error *err)
{
    ITH_ASSERT(ratio > 0 && ratio < 1);
    int64_t n = s->num_entries, groups = n > 0;
    for (int64_t i = 1; i < n; i++)
        groups += !same_conversation(s, i - 1, i);
    int64_t held = ith_max_i64((int64_t)llround(ratio * (double)groups), 1);
    if (held >= groups)
        return ith_fail(err, ITH_ERR_USAGE,
                        "eval_split_ratio %g of %" PRId64 " conversation%s leaves none to train on",
                        ratio, groups, groups == 1 ? "" : "s");
    int64_t *order = NULL, *lists[2] = {NULL, NULL}, counts[2] = {0, 0};
    bool *is_held = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc((void **)&order, groups * 8, "split", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&is_held, groups, sizeof(bool), "split", err));
    ITH_TRY_OUT(ith_alloc((void **)&lists[0], n * 8, "split", err));
    ITH_TRY_OUT(ith_alloc((void **)&lists[1], n * 8, "split", err));
    ith_rng_permutation(seed, ith_rng_stream("evaluation split"), groups, order);
    for (int64_t i = 0; i < held; i++)
        is_held[order[i]] = true;
    for (int64_t i = 0, group = 0; i < n; i++) {
        group += i > 0 && !same_conversation(s, i - 1, i);
        int side = is_held[group];
        lists[side][counts[side]++] = i;
    }
    *train = lists[0];
    *num_train = counts[0];
    *eval = lists[1];
    *num_eval = counts[1];
    lists[0] = lists[1] = NULL;
out:
    ith_free(order);
    ith_free(is_held);
    ith_free(lists[0]);
    ith_free(lists[1]);
    return status;
}

ith_status ith_samples_from_arrays(ith_samples **out, int64_t count, const int64_t *lengths,
                                   const int32_t *ids, const float *weights, ith_error *err)
{
    ith_samples *s = NULL;
    ITH_TRY(ith_alloc_zero((void **)&s, 1, sizeof *s, "samples", err));
    ith_status status = ITH_OK;
    float *ones = NULL;
    int64_t longest = 1, at = 0;
    for (int64_t i = 0; i < count; i++)
        longest = ith_max_i64(longest, lengths[i]);
    ITH_TRY_OUT(ith_alloc((void **)&ones, longest * 4, "samples", err));
    ITH_TRY_OUT(ith_alloc((void **)&s->entries, count * 8, "samples", err));
    for (int64_t t = 0; t < longest; t++)
        ones[t] = 1;
    ith_sha256 h;
    ith_sha256_init(&h);
    for (int64_t i = 0; i < count; at += lengths[i++]) {
        bool has_target = false;
        stored_sample from = {.row = i, .full_tokens = lengths[i]};
        const float *w = weights ? weights + at : ones;
        ITH_TRY_OUT(samples_append(s, ids + at, w, NULL, lengths[i], &from, &has_target, err));
        if (!has_target) {
            status = ith_fail(err, ITH_ERR_FORMAT, "sample %" PRId64 " has no target", i);
            goto out;
        }
        ith_sha256_update(&h, &lengths[i], 8);
        ith_sha256_update(&h, ids + at, lengths[i] * 4);
        ith_sha256_update(&h, w, lengths[i] * 4);
        s->entries[i] = i;
    }
    s->num_entries = count;
    for (int64_t i = 0; i < s->num_ids; i++)
        s->max_id = s->ids[i] > s->max_id ? s->ids[i] : s->max_id;
    ith_sha256_hex(&h, s->key);
    ITH_TRY_OUT(samples_sum(s, err));
    ith_free(ones);
    *out = s;
    return ITH_OK;
out:
    ith_free(ones);
    ith_samples_close(s);
    return status;
}
