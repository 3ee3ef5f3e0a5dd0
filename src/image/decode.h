/* decode.h - one function for each format; they may assume nothing about the bytes. */
#ifndef ITH_IMAGE_DECODE_H
#define ITH_IMAGE_DECODE_H

#include "image/image.h"

ith_status ith_decode_png(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                          ith_error *err);
ith_status ith_decode_jpeg(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                           ith_error *err);
/* Room for a picture of this size, or why not. */
ith_status ith_image_alloc(ith_image *out, int64_t width, int64_t height, int64_t max_pixels,
                           ith_error *err);

#endif
