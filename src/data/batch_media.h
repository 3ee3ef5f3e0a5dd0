/* batch_media.h - images and videos of a micro-batch, read from their files. */
#ifndef ITH_DATA_BATCH_MEDIA_H
#define ITH_DATA_BATCH_MEDIA_H

#include "data/batching.h"

typedef struct {
    const ith_media *media;
    ith_pool *pool;
    int32_t *mrope;                 /* [3, max_tokens] */
    float *pixels;                  /* [max_patches, patch width] */
    ith_grid *grids;                /* [max_grids] */
    int32_t *frames;                /* [max_segments] */
    struct batch_media_task *tasks; /* [max_grids] */
    ith_batch_limits limits;
    int64_t rank, ranks; /* media_rank, media_ranks */
} batch_media;

ith_status batch_media_create(batch_media *m, const ith_media *media, ith_pool *pool,
                              const ith_batch_limits *limits, ith_error *err);
void batch_media_destroy(batch_media *m);
/* Positions, patches and grids of the documents that are in the batch. ranges: rows whose ids are
 * in it, and whose positions are wanted. */
ith_status batch_media_fill(batch_media *m, const ith_samples *samples, const int64_t ranges[4],
                            ith_micro_batch *batch, ith_error *err);
/* Sum of the k largest of n values, which are sorted. */
int64_t batch_media_sum_largest(int64_t *values, int64_t n, int64_t k);

#endif
