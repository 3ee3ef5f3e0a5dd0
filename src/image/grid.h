/* grid.h - size of an image or video in patches, after resizing: time, height, width. */
#ifndef ITH_IMAGE_GRID_H
#define ITH_IMAGE_GRID_H

#include <stdint.h>

typedef struct {
    int32_t t, h, w; /* t = 1 for an image; h and w are multiples of spatial_merge_size */
} ith_grid;

static inline int64_t ith_grid_patches(ith_grid g)
{
    return (int64_t)g.t * g.h * g.w;
}

/* Which of `ranks` ranks encodes a frame that has `before` of `all` patches before it: the one in
 * whose part its middle lies. So ranks have stretches of frames, in order. */
static inline int64_t ith_frame_rank(int64_t before, int64_t frame, int64_t all, int64_t ranks)
{
    return (2 * before + frame) * ranks / (2 * all);
}

#endif
