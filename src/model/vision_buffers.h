/* vision_buffers.h - images and videos of a micro-batch, from host arrays to the device. */
#ifndef ITH_MODEL_VISION_BUFFERS_H
#define ITH_MODEL_VISION_BUFFERS_H

#include "data/batching.h"
#include "model/vision.h"

/* Largest counts of a micro-batch (the whole one, also where a cp group shares it out), and of one
 * that a rank of such a group has for itself. max_patches 0: no media. */
typedef struct {
    int64_t max_patches, max_segments, max_segment_patches;
    int64_t max_whole_patches, max_whole_segments;
} ith_vision_limits;

typedef struct {
    ith_vision_limits limits;
    int64_t ranks; /* that share a micro-batch */
    ith_tensor pixels, corners, corner_weights, cos, sin, order, cu_seqlens, rows;
    ith_vision_layout host; /* and staging of what is uploaded */
    ith_grid *own;          /* frames of this rank as grids */
    int64_t *encoded, *read;
    int32_t *host_order, *host_rows;
    char *host_typed; /* one array in the model's type */
} ith_vision_buffers;

/* Pushes everything (device and host) for the largest micro-batch; of a model whose mesh is that of
 * shared ones. */
ith_status ith_vision_buffers_place(ith_vision_buffers *b, const ith_model *m, ith_ctx *ctx,
                                    ith_vision_limits limits);
/* The largest batch, without contents: for counting. Of a rank alone when the model's mesh is. */
ith_vision_batch ith_vision_buffers_largest(const ith_vision_buffers *b, const ith_model *m);
/* Lays out and uploads the media of a micro-batch; waits for the device. */
ith_status ith_vision_buffers_fill(ith_vision_buffers *b, const ith_model *m, ith_ctx *ctx,
                                   const ith_micro_batch *batch, ith_vision_batch *out);

#endif
