/* dataset_internal.h - a data set in memory; shared by dataset.c (files) and dataset_index.c
 * (samples). */
#ifndef ITH_DATA_DATASET_INTERNAL_H
#define ITH_DATA_DATASET_INTERNAL_H

#include "data/dataset.h"

typedef struct {
    char *path;
    ith_rows *rows;    /* NULL until loaded */
    int64_t first_row; /* of the part */
} dataset_file;

typedef struct {
    ith_dataset_part info;
    ith_converter given; /* info.converter is what it turned out to be */
    dataset_file *files;
    int64_t cap_files;
} dataset_part;

struct ith_dataset {
    ith_arena arena; /* names */
    ith_dataset_options options;
    dataset_part *parts;
    int64_t num_parts, cap_parts;
    bool loaded;
    ith_drops drops;
    ith_dataset_sample *samples;
    int64_t num_samples, cap_samples;
    int64_t *drawn;
    int64_t num_drawn, cap_drawn;
};

/* The file that holds row `row` of a loaded part; *local is the row's number in it. */
const dataset_file *dataset_find_file(const dataset_part *part, int64_t row, int64_t *local);

#endif
