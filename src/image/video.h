/* video.h - frames of videos, through the programs ffprobe and ffmpeg of PATH.
 *
 * Frames come as 8-bit RGB, turned as the file says. A file is untrusted: it is read by ffmpeg with
 * the file protocol only; frames are counted by demuxing, and a video that gives fewer frames than
 * it has packets is one line of error. */
#ifndef ITH_IMAGE_VIDEO_H
#define ITH_IMAGE_VIDEO_H

#include "image/image.h"

typedef struct {
    int64_t width, height; /* as shown */
    int64_t num_frames;
    double fps; /* 0: not said */
} ith_video_info;

ith_status ith_video_probe(ith_video_info *out, const char *path, ith_error *err);
/* The frames `indices` [n], ascending without doubles, one by one to take(arg, i, frame); its
 * failure ends the reading. */
ith_status ith_video_read(const char *path, const int64_t *indices, int64_t n,
                          ith_status (*take)(void *arg, int64_t i, const ith_image *frame),
                          void *arg, ith_error *err);

/* video_preprocessor_config.json. Absent keys, or an absent file, give the values of Qwen3-VL. */
typedef struct {
    ith_image_processor image; /* min_pixels and max_pixels count all frames of a video */
    double fps;                /* frames to take of each second */
    int64_t min_frames, max_frames;
} ith_video_processor;
ith_status ith_video_processor_load(ith_video_processor *out, const char *model_dir,
                                    ith_error *err);

/* Which frames stand for a video: *n indices, evenly over all of them (halves to even). Room for
 * max_frames. */
ith_status ith_video_sample(const ith_video_processor *p, const ith_video_info *info,
                            int64_t *indices, int64_t *n, ith_error *err);
/* Grid of n frames: t = ceil(n / temporal_patch_size); one scale for all frames. */
ith_status ith_video_grid(const ith_video_processor *p, int64_t n, int64_t height, int64_t width,
                          ith_grid *grid, ith_error *err);

#endif
