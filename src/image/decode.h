/* decode.h - one function for each format; they may assume nothing about the bytes. */
#ifndef ITH_IMAGE_DECODE_H
#define ITH_IMAGE_DECODE_H

#include "image/image.h"

ith_status ith_decode_png(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                          ith_error *err);
ith_status ith_decode_jpeg(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                           ith_error *err);
ith_status ith_decode_webp(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                           ith_error *err);
/* EXIF orientation, 1 (upright) when there is none: of a TIFF block, with or without "Exif" before
 * it; of the chunks of a PNG or WebP file. */
int ith_exif_orientation(const uint8_t *tiff, int64_t size);
int ith_exif_of_png(const uint8_t *bytes, int64_t size);
int ith_exif_of_webp(const uint8_t *bytes, int64_t size);
/* The picture as it is to be seen. */
ith_status ith_image_turn(ith_image *image, int orientation, ith_error *err);
/* Room for a picture of this size, or why not. */
ith_status ith_image_alloc(ith_image *out, int64_t width, int64_t height, int64_t max_pixels,
                           ith_error *err);

#endif
