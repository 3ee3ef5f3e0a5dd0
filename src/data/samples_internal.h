/* samples_internal.h - stored samples in memory and in the cache file; shared by samples.c (API),
 * samples_build.c (tokenizing) and samples_cache.c (file). */
#ifndef ITH_DATA_SAMPLES_INTERNAL_H
#define ITH_DATA_SAMPLES_INTERNAL_H

#include "base/file.h"
#include "data/samples.h"

#include <assert.h>

/* One row of the table, in memory as in the file. */
typedef struct {
    int64_t id_begin, run_begin; /* index of the first id and run */
    int64_t row, full_tokens;
    double weight_sum;
    int32_t num_tokens, num_runs, num_labels;
    int32_t cut, part, num_media;
    int32_t has_steps, has_mask; /* 1: as many steps follow the ids; an id is mask_id */
    int64_t media_begin;         /* index of the first item */
} stored_sample;
static_assert(sizeof(stored_sample) == 80, "the layout of the cache file");
static_assert(sizeof(ith_media_item) == 40, "the layout of the cache file");
static_assert(sizeof(ith_sample_run) == 12, "the layout of the cache file");

typedef struct {
    ith_drop_row drop;
    char *where; /* of the first */
} sample_drop;

struct ith_samples {
    ith_dataset *dataset; /* NULL for samples from arrays */
    char identity[65], key[65];
    bool from_cache;

    /* in `map`, or each on the heap */
    ith_map map;
    int32_t *ids;
    ith_sample_run *runs;
    stored_sample *table;
    int64_t *entries; /* stored sample of each entry */
    ith_media_item *media;
    int32_t *frames; /* of the media: first token of each */
    char *paths;     /* of the media, each with its NUL */
    int64_t num_ids, num_runs, num_stored, num_entries, num_media, num_frames, path_bytes;
    int64_t cap_ids, cap_runs, cap_stored, cap_media, cap_frames, cap_paths;

    int64_t num_rows, num_candidates; /* rows read, samples tried */
    ith_drops drops;
    char *where[ITH_DROP_COUNT]; /* place of the first of each reason, NULL: none */
    char **part_names;
    int64_t num_parts;

    /* of an epoch */
    int32_t max_id;
    int64_t num_tokens, num_labels, num_truncated, tokens_lost, num_trajectories;
};

/* Tokenizes s->dataset into s. writer: where ids go in place of memory, or NULL. */
ith_status samples_build(ith_samples *s, const ith_samples_options *options, ith_writer *writer,
                         ith_error *err);
/* Checks runs, table and entries against each other (they may come from a file), and sums up. */
ith_status samples_sum(ith_samples *s, ith_error *err);

/* Begin of the cache file: ids follow through samples_build. */
ith_status samples_cache_begin(ith_writer *writer, const char *path, ith_error *err);
/* Everything but the ids; commits. */
ith_status samples_cache_finish(const ith_samples *s, ith_writer *writer, ith_error *err);
/* Maps a cache file. *valid is false, with the reason in err, when it is damaged or belongs to
 * another key. */
ith_status samples_cache_open(ith_samples *s, const char *path, bool *valid, ith_error *err);
void samples_cache_path(ith_buf *out, const char *dir, const char *key);
/* Frees the arrays, on the heap or mapped. */
void samples_release(ith_samples *s);

/* The ids and runs of one sample of `count` ids with weights, and steps or NULL; appends to s. */
ith_status samples_append(ith_samples *s, const int32_t *ids, const float *weights,
                          const int32_t *steps, int64_t count, const stored_sample *from,
                          bool *has_target, ith_error *err);

#endif
