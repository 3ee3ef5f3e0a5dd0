/* decode.c - which format, and what all of them share. */
#include "image/decode.h"

#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/mem.h"

void ith_image_deinit(ith_image *image)
{
    ith_free(image->rgb);
    *image = (ith_image){0};
}

ith_status ith_image_alloc(ith_image *out, int64_t width, int64_t height, int64_t max_pixels,
                           ith_error *err)
{
    int64_t pixels = 0;
    if (width <= 0 || height <= 0 || !ith_mul_ok(width, height, &pixels) || pixels > max_pixels)
        return ith_fail(err, ITH_ERR_FORMAT, "a picture of %lld x %lld (at most %lld pixels)",
                        (long long)width, (long long)height, (long long)max_pixels);
    uint8_t *rgb = NULL;
    ITH_TRY(ith_alloc((void **)&rgb, pixels * 3, "picture", err));
    memset(rgb, 0, (size_t)(pixels * 3));
    *out = (ith_image){width, height, rgb};
    return ITH_OK;
}

const char *ith_image_formats(void)
{
#if defined(ITH_HAVE_PNG) && defined(ITH_HAVE_JPEG)
    return "png, jpeg";
#elif defined(ITH_HAVE_PNG)
    return "png";
#elif defined(ITH_HAVE_JPEG)
    return "jpeg";
#else
    return "none";
#endif
}

static ith_status not_built(const char *format, ith_error *err)
{
    return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s pictures are not built in (built in: %s)", format,
                    ith_image_formats());
}

static ith_status decode(ith_image *out, const uint8_t *b, int64_t size, int64_t max_pixels,
                         ith_error *err)
{
    static const uint8_t png[] = {0x89, 'P', 'N', 'G', 0x0d, 0x0a, 0x1a, 0x0a};
    if (size >= 8 && memcmp(b, png, 8) == 0)
#ifdef ITH_HAVE_PNG
        return ith_decode_png(out, b, size, max_pixels, err);
#else
        return not_built("PNG", err);
#endif
    if (size >= 3 && b[0] == 0xff && b[1] == 0xd8 && b[2] == 0xff)
#ifdef ITH_HAVE_JPEG
        return ith_decode_jpeg(out, b, size, max_pixels, err);
#else
        return not_built("JPEG", err);
#endif
    if (size >= 12 && memcmp(b, "RIFF", 4) == 0 && memcmp(b + 8, "WEBP", 4) == 0)
        return not_built("WebP", err);
    (void)out, (void)max_pixels;
    return ith_fail(err, ITH_ERR_FORMAT, "no picture of a known format (%s)", ith_image_formats());
}

ith_status ith_image_decode(ith_image *out, const void *bytes, int64_t size, const char *name,
                            int64_t max_pixels, ith_error *err)
{
    ith_image image = {0};
    ITH_WRAP(decode(&image, bytes, size, max_pixels, err), err, "%s", name);
    *out = image;
    return ITH_OK;
}

ith_status ith_image_load(ith_image *out, const char *path, int64_t max_pixels, ith_error *err)
{
    ith_map map = {NULL, 0};
    ITH_TRY(ith_map_open(&map, path, err));
    ith_status status = ith_image_decode(out, map.data, map.size, path, max_pixels, err);
    ith_map_close(&map);
    return status;
}
