/* vision.h - the vision tower of Qwen3.5: patches in, rows of the text's width out.
 *
 * Patches come in merge-block order: spatial_merge_size^2 patches that become one feature lie
 * together. All items of a micro-batch go through the tower at once; attention is whole within each
 * temporal patch (frame) of each item, and nowhere else. So the ranks of a cp group share the
 * frames out: each is encoded once, and its features go to the ranks whose rows they are. */
#ifndef ITH_MODEL_VISION_H
#define ITH_MODEL_VISION_H

#include "image/grid.h"
#include "model/model.h"

/* Values of a patch: channels * time * height * width. */
int64_t ith_vision_patch_width(const ith_hf_vision *v);

/* FLOPs of tower and merger in a step, for a patch and for two patches of a frame that see each
 * other; of a frozen tower, forward alone. */
typedef struct {
    double patch, pair;
} ith_vision_flops;
ith_vision_flops ith_vision_flops_of(const ith_hf_vision *v, bool frozen);

/* What the tower wants to know about its patches, on the host. N patches in all, S segments. */
typedef struct {
    int32_t *corners;      /* [N,4] rows of the position table */
    float *corner_weights; /* [N,4] bilinear, 0 where there is no neighbour */
    float *cos, *sin;      /* [N, head_dim/2] */
    int32_t *cu_seqlens;   /* [S + 1] */
    int64_t num_segments, max_len;
} ith_vision_layout;
/* Fills the arrays, which have room. pool may be NULL. */
void ith_vision_lay_out(const ith_hf_vision *v, const ith_grid *grids, int64_t num_grids,
                        ith_pool *pool, ith_vision_layout *out);

/* Parameters of the tower and merger, under model.visual. */
ith_status ith_vision_declare(ith_model *m, ith_error *err);
/* Features of b->vision replace their rows of m->stream. Saves for backward when training. */
ith_status ith_vision_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training);
/* Gradients of the tower from those rows of dstream, which are then set to zero. Releases what
 * forward saved. */
ith_status ith_vision_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, ith_tensor dstream);

#endif
