/* dataset.h - what `train_dataset` names: files, rows, and the list of samples in them.
 *
 *   FILE.yaml          a dataset-info file: name -> {path, source, split, converter, size, weight,
 *                      streaming, separator}
 *   a file, a folder   one data set called "default"; a folder's files are read in order of name
 *   anything else      a name on a hub: one line that says to download it first
 * A relative `path` inside a dataset-info file is looked for from the working folder, then from the
 * folder of the file, then from the folder above that, and at last by its bare name beside the
 * file.
 *
 * Samples. train_on last_turn: each assistant turn with a loss weight gives one sample, the prefix
 * of the conversation that ends with it. all_turns: one sample per conversation. Then `size` and
 * `weight` choose: without replacement as far as there are samples; whole extra rounds beyond.
 *
 * Life cycle: open finds the files; index reads every row once, on all cores, and counts what
 * cannot be used by reason. Memory: 16 bytes a row and 16 a sample. */
#ifndef ITH_DATA_DATASET_H
#define ITH_DATA_DATASET_H

#include "base/pool.h"
#include "data/convert.h"
#include "data/json_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_dataset ith_dataset;

typedef struct {
    bool all_turns;   /* else: one sample per supervised turn */
    bool allow_media; /* else rows with media are dropped and counted */
    uint64_t seed;    /* of size and weight */
} ith_dataset_options;

ith_status ith_dataset_open(ith_dataset **out, const char *path, const ith_dataset_options *options,
                            ith_error *err);
void ith_dataset_close(ith_dataset *dataset); /* NULL is fine */
/* Maps the files and finds their rows and converters; done once, later calls do nothing. */
ith_status ith_dataset_load(ith_dataset *dataset, ith_error *err);
/* Loads, then makes the list of samples. pool may be NULL; the result does not depend on it. Called
 * once. */
ith_status ith_dataset_index(ith_dataset *dataset, ith_pool *pool, ith_error *err);

/* One part per entry of the dataset-info file. */
typedef struct {
    const char *name;
    ith_converter converter; /* AUTO until loaded, when not given */
    const char *separator;   /* alpaca: between instruction and input; NULL: nothing */
    int64_t size;            /* -1: unset */
    double weight;           /* < 0: unset */
    int64_t num_files;
    int64_t num_rows;    /* 0 until loaded */
    int64_t num_samples; /* different ones; 0 until indexed, like: */
    int64_t num_drawn;   /* after size and weight */
} ith_dataset_part;
int64_t ith_dataset_num_parts(const ith_dataset *dataset);
const ith_dataset_part *ith_dataset_part_at(const ith_dataset *dataset, int64_t i);
/* Rows and messages dropped while the index was made. */
const ith_drops *ith_dataset_drops(const ith_dataset *dataset);
/* "FILE: row 3 (line 4)" of row `row` of part `part`; before load "NAME: row 3". */
const char *ith_dataset_where(const ith_dataset *dataset, int64_t part, int64_t row, char *buf,
                              size_t size);

/* A sample: messages[0, cut) of a row; cut 0: all. */
typedef struct {
    int64_t row;
    int32_t part, cut;
} ith_dataset_sample;
/* Different samples that are drawn, in order of part, row, cut. */
int64_t ith_dataset_num_samples(const ith_dataset *dataset);
const ith_dataset_sample *ith_dataset_samples(const ith_dataset *dataset);
/* What an epoch holds: numbers of samples, ascending; one twice when it was drawn twice. */
int64_t ith_dataset_num_drawn(const ith_dataset *dataset);
const int64_t *ith_dataset_drawn(const ith_dataset *dataset);

/* Reads and converts one row of loaded data. Any number of threads may call it. */
ith_status ith_dataset_read(const ith_dataset *dataset, int64_t part, int64_t row,
                            ith_converted *out, ith_error *err);
/* The file a row of loaded data is in. */
const char *ith_dataset_row_file(const ith_dataset *dataset, int64_t part, int64_t row);
/* Bytes of one row in its file. */
int64_t ith_dataset_row_bytes(const ith_dataset *dataset, int64_t part, int64_t row);

/* SHA-256 (64 hexadecimal digits) over what decides the samples: names, settings, and of each file
 * its size and content (beyond 256 MiB: size, time of change and 64 pieces of the content). Works
 * before load. For cache keys. */
ith_status ith_dataset_identity(const ith_dataset *dataset, char out_hex[65], ith_error *err);

/* The drawing of size and weight: appends k of 0..n-1 to out, ascending: k / n whole rounds and a
 * random part without replacement. */
ith_status ith_dataset_draw(int64_t n, int64_t k, uint64_t seed, uint64_t stream, int64_t *out,
                            ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
