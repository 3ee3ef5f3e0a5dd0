/* samples.h - samples as token ids with loss weights, and their cache on disk.
 *
 * A stored sample is its ids, the runs of ids that are trained, each with a weight (labels are the
 * ids inside runs, -100 outside), and the images and videos whose tokens are among the ids. Samples
 * are cut to cutoff_len (the head is kept), or split into parts of at most cutoff_len; a cut that
 * would go through an image or a video is made before it. Samples without a trained token are
 * dropped and counted.
 *
 * Invariants:
 *  1. Every stored sample has 1..cutoff_len ids and a target: a trained id after its first.
 *  2. The same bytes for any number of threads.
 *  3. An `entry` is one place in an epoch; its sample may be shared with another entry (size or
 *     weight above 1).
 *  4. A recorded trajectory also has the step of each id.
 *
 * With a cache folder the ids go to FOLDER/samples-KEY.bin while they are made (memory: a few
 * bytes per sample, whatever the length) and are mapped afterwards; without one they are kept in
 * memory. KEY covers tokenizer, template, data, converters, seed, cutoff, mask settings and program
 * version. */
#ifndef ITH_DATA_SAMPLES_H
#define ITH_DATA_SAMPLES_H

#include "config/config.h"
#include "data/dataset.h"
#include "data/media.h"
#include "tokenizer/chat.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_samples ith_samples;

typedef struct {
    const char *path; /* train_dataset or eval_dataset */
    bool all_turns;
    const ith_media *media; /* NULL: the model reads text only, rows with media are dropped */
    const int32_t *mask_id; /* samples that have this id are marked; NULL: none is */
    bool split_long;        /* longer samples are split into parts; else their tail is cut off */
    int64_t cutoff_len;
    uint64_t seed;
    const char *cache_dir; /* NULL: no cache on disk */
    const char *identity; /* of the data, from ith_samples_identity of another rank; NULL: the files
                             are read for it */
    const ith_tokenizer *tokenizer;
    const ith_chat *chat;
    ith_pool *pool; /* may be NULL */
} ith_samples_options;

/* Opens the data set, tokenizes it or maps the cache. Fails when no sample is left; the text then
 * tells the reasons. Progress and drops are logged ("data"). */
ith_status ith_samples_open(ith_samples **out, const ith_samples_options *options, ith_error *err);
/* Options out of a config; path stays NULL when the config has none. */
ith_samples_options ith_samples_options_from(const ith_config *config, bool eval,
                                             const ith_tokenizer *tokenizer, const ith_chat *chat,
                                             ith_pool *pool);
void ith_samples_close(ith_samples *samples); /* NULL is fine */

typedef struct {
    int32_t begin, end; /* ids [begin, end) are trained */
    float weight;       /* > 1e-6 */
} ith_sample_run;
typedef struct {
    const int32_t *ids; /* valid while the samples are open */
    const int32_t
        *steps; /* [num_tokens] of a trajectory: step that wrote the id, -1: prompt; NULL */
    int64_t num_tokens;
    const ith_sample_run *runs;
    int64_t num_runs;
    bool has_mask;               /* an id of it is the mask_id they were opened with */
    int64_t num_labels;          /* targets: trained ids but the first of the sample */
    double weight_sum;           /* over the targets */
    int64_t full_tokens;         /* before the cut */
    int64_t part, row;           /* where it came from: data set and row in it, from 0 */
    int32_t cut;                 /* messages[0, cut); 0: the whole conversation */
    const ith_media_item *media; /* in the order of their tokens */
    int64_t num_media;
} ith_sample;

int64_t ith_samples_count(const ith_samples *samples);      /* entries */
int64_t ith_samples_num_stored(const ith_samples *samples); /* different ones */
int64_t ith_samples_num_tokens(const ith_samples *samples); /* of an epoch, after cuts */
int64_t ith_samples_num_labels(const ith_samples *samples);
int64_t ith_samples_num_trajectories(const ith_samples *samples); /* entries with steps */
int64_t ith_samples_num_truncated(const ith_samples *samples, int64_t *tokens_lost);
ith_sample ith_samples_get(const ith_samples *samples, int64_t entry);
/* Largest id of all: the model's vocabulary must be larger. */
int32_t ith_samples_max_id(const ith_samples *samples);
/* File of an item of ith_sample.media. */
const char *ith_samples_media_path(const ith_samples *samples, const ith_media_item *item);
/* [grid.t] first token of each of its frames, from the begin of the sample. */
const int32_t *ith_samples_media_frames(const ith_samples *samples, const ith_media_item *item);
int64_t ith_samples_num_media(const ith_samples *samples); /* of the stored samples */
/* Length alone: cheap. */
int64_t ith_samples_length(const ith_samples *samples, int64_t entry);
/* 64 hexadecimal digits over content and settings. */
const char *ith_samples_key(const ith_samples *samples);
/* SHA-256 over the data set, see ith_dataset_identity. */
const char *ith_samples_identity(const ith_samples *samples);
bool ith_samples_from_cache(const ith_samples *samples);
const ith_drops *ith_samples_drops(const ith_samples *samples);
/* "FILE: row 3 (line 4)"; after a cache hit "NAME: row 3". */
const char *ith_samples_where(const ith_samples *samples, int64_t part, int64_t row, char *buf,
                              size_t size);
/* Appends one line per reason: "dropped 3 rows: no assistant turn (first: FILE: row 8 (line 8))".
 */
void ith_samples_drop_report(const ith_samples *samples, ith_buf *out);
/* Name of a data set: the _dataset_name of its samples. */
int64_t ith_samples_num_parts(const ith_samples *samples);
const char *ith_samples_part_name(const ith_samples *samples, int64_t part);

/* Splits the entries by conversation, so that no conversation is in both: about ratio of the
 * conversations are held out, at least one. Depends on seed alone. Both lists ascend; free with
 * ith_free. Fails when either would be empty. */
ith_status ith_samples_split(const ith_samples *samples, double ratio, uint64_t seed,
                             int64_t **train, int64_t *num_train, int64_t **eval, int64_t *num_eval,
                             ith_error *err);

/* Samples made from arrays, for tests and for text that needs no template. Entry i has
 * lengths[i] ids; weights holds one value per id (NULL: all 1). Copies. */
ith_status ith_samples_from_arrays(ith_samples **out, int64_t count, const int64_t *lengths,
                                   const int32_t *ids, const float *weights, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
