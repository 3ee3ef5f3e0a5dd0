/* dataset.h - what `train_dataset` names: files, rows, and the list of samples in them.
 *
 *   FILE.yaml          a dataset-info file: name -> {path, source, split, converter, size, weight}
 *   a file, a folder   one data set called "default"; a folder's files are read in order of name
 *   anything else      a name on a hub: one line that says to download it first
 * A relative `path` inside a dataset-info file is looked for from the working folder, then from the
 * folder of the file, then from the parent of that folder.
 *
 * Samples. train_on last_turn: each assistant turn with a loss weight gives one sample, the prefix
 * of the conversation that ends with it. all_turns: one sample per conversation. Then `size` and
 * `weight` choose: without replacement as far as there are samples; whole extra rounds beyond.
 *
 * Opening reads every row once, on all cores, and counts what cannot be used by reason. Memory: 16
 * bytes a row and 16 a sample. */
#ifndef ITH_DATA_DATASET_H
#define ITH_DATA_DATASET_H

#include "base/pool.h"
#include "data/convert.h"
#include "data/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_dataset ith_dataset;

typedef struct {
    bool all_turns;   /* else: one sample per supervised turn */
    bool allow_media; /* else rows with media are dropped and counted */
    uint64_t seed;    /* of size and weight */
    ith_pool *pool;   /* may be NULL */
} ith_dataset_options;

ith_status ith_dataset_open(ith_dataset **out, const char *path, const ith_dataset_options *options,
                            ith_error *err);
void ith_dataset_close(ith_dataset *dataset); /* NULL is fine */

/* One part per entry of the dataset-info file. */
typedef struct {
    const char *name, *path;
    ith_converter converter;
    const char *separator;
    int64_t size;  /* -1: unset */
    double weight; /* < 0: unset */
    int64_t num_files, num_rows;
    int64_t num_samples; /* different ones */
    int64_t num_drawn;   /* after size and weight */
} ith_dataset_part;
int64_t ith_dataset_num_parts(const ith_dataset *dataset);
const ith_dataset_part *ith_dataset_part_at(const ith_dataset *dataset, int64_t i);
/* Rows dropped while the index was made. */
const ith_drops *ith_dataset_drops(const ith_dataset *dataset);
/* "FILE: row 3 (line 4)" of row `row` of part `part`. */
const char *ith_dataset_where(const ith_dataset *dataset, int64_t part, int64_t row, char *buf,
                              size_t size);

/* A sample: messages[0, cut) of a row; cut 0: all. */
typedef struct {
    int64_t row;
    int32_t part, cut;
} ith_dataset_sample;
/* Different samples, in order of part, row, cut. */
int64_t ith_dataset_num_samples(const ith_dataset *dataset);
const ith_dataset_sample *ith_dataset_samples(const ith_dataset *dataset);
/* What an epoch holds: numbers of samples, ascending; one twice when it was drawn twice. */
int64_t ith_dataset_num_drawn(const ith_dataset *dataset);
const int64_t *ith_dataset_drawn(const ith_dataset *dataset);

/* Reads and converts one row. Any number of threads may call it. */
ith_status ith_dataset_read(const ith_dataset *dataset, int64_t part, int64_t row,
                            ith_converted *out, ith_error *err);
/* Bytes of one row in its file. */
int64_t ith_dataset_row_bytes(const ith_dataset *dataset, int64_t part, int64_t row);

/* Feeds what identifies the content to `update`: names, settings, size and content of each file
 * (beyond 256 MiB: size, time and 64 pieces of the content). For cache keys. */
ith_status ith_dataset_identity(const ith_dataset *dataset, char out_hex[65], ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
