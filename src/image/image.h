/* image.h - pictures from files to patches, equal to the Hugging Face processor of Qwen-VL models.
 *
 * A picture is 8-bit RGB. Decoders (libpng, libjpeg-turbo, libwebp) are found at configure time; a
 * format that is not built in is a clear error. Foreign bytes are untrusted: sizes are checked
 * against max_pixels before anything of that size is allocated, and a damaged file is one line of
 * error. */
#ifndef ITH_IMAGE_IMAGE_H
#define ITH_IMAGE_IMAGE_H

#include "base/status.h"
#include "image/grid.h"

typedef struct {
    int64_t width, height;
    uint8_t *rgb; /* [height, width, 3], owned */
} ith_image;

#define ITH_IMAGE_MAX_PIXELS                                                                       \
    ((int64_t)178956970) /* twice Pillow's limit for a warning: its error */

void ith_image_deinit(ith_image *image);
/* PNG, JPEG or WebP, told apart by their first bytes. Palettes and greys become RGB, 16 bit become
 * 8, alpha is dropped, CMYK converted, EXIF orientation applied. As Pillow's RGB, but for grey of
 * 16 bit: its high byte is taken, where Pillow cuts at 255. name: for errors. */
ith_status ith_image_decode(ith_image *out, const void *bytes, int64_t size, const char *name,
                            int64_t max_pixels, ith_error *err);
ith_status ith_image_load(ith_image *out, const char *path, int64_t max_pixels, ith_error *err);
/* "png, jpeg, webp", or what of them is built in. */
const char *ith_image_formats(void);

/* preprocessor_config.json. */
typedef struct {
    int64_t patch_size, temporal_patch_size, merge_size;
    int64_t min_pixels, max_pixels; /* areas; the file calls them shortest_edge and longest_edge */
    double mean[3], std[3];
} ith_image_processor;
/* Absent keys, or an absent file, give the values of the published Qwen3.5 models. */
ith_status ith_image_processor_load(ith_image_processor *out, const char *model_dir,
                                    ith_error *err);

/* Size whose sides are multiples of factor and whose area lies in [min_pixels, max_pixels], near
 * height x width. Quotients are rounded half to even. Sides more than 200:1 apart are refused. */
ith_status ith_smart_resize(int64_t height, int64_t width, int64_t factor, int64_t min_pixels,
                            int64_t max_pixels, int64_t *out_height, int64_t *out_width,
                            ith_error *err);
#define ITH_IMAGE_MAX_ASPECT 200

/* Antialiased bicubic in fixed point, bit-equal to torchvision's on uint8 (each axis has int16
 * weights of its own precision) or to Pillow's (22 bits always); the horizontal result is rounded
 * and cut to 8 bits before the vertical pass. */
typedef enum { ITH_RESIZE_TORCHVISION, ITH_RESIZE_PILLOW } ith_resize_kind;
ith_status ith_image_resize(ith_image *out, const ith_image *in, int64_t height, int64_t width,
                            ith_resize_kind kind, ith_error *err);

/* The grid of a picture: what it costs. */
ith_status ith_image_grid(const ith_image_processor *p, int64_t height, int64_t width,
                          ith_grid *grid, ith_error *err);
/* Values of a patch: 3 * temporal_patch_size * patch_size^2. */
int64_t ith_image_patch_width(const ith_image_processor *p);
/* A picture, resized to the grid and normalised, at times [first, first + times) of pixels: [t*h*w,
 * patch width] f32 in merge-block order, columns by channel, time, y, x. A still picture fills all
 * temporal_patch_size times; a frame of a video one, the last of an odd number two. */
ith_status ith_image_fill_patches(const ith_image_processor *p, const ith_image *image,
                                  ith_grid grid, int64_t first, int64_t times, float *pixels,
                                  ith_error *err);

#endif
