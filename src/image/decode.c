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

static bool is_png(const uint8_t *b, int64_t n)
{
    static const uint8_t magic[] = {0x89, 'P', 'N', 'G', 0x0d, 0x0a, 0x1a, 0x0a};
    return n >= 8 && memcmp(b, magic, 8) == 0;
}

static bool is_jpeg(const uint8_t *b, int64_t n)
{
    return n >= 3 && b[0] == 0xff && b[1] == 0xd8 && b[2] == 0xff;
}

static bool is_webp(const uint8_t *b, int64_t n)
{
    return n >= 12 && memcmp(b, "RIFF", 4) == 0 && memcmp(b + 8, "WEBP", 4) == 0;
}

#ifdef ITH_HAVE_PNG
#define PNG_DECODER ith_decode_png
#define PNG_NAME ", png"
#else
#define PNG_DECODER NULL
#define PNG_NAME ""
#endif
#ifdef ITH_HAVE_JPEG
#define JPEG_DECODER ith_decode_jpeg
#define JPEG_NAME ", jpeg"
#else
#define JPEG_DECODER NULL
#define JPEG_NAME ""
#endif
#ifdef ITH_HAVE_WEBP
#define WEBP_DECODER ith_decode_webp
#define WEBP_NAME ", webp"
#else
#define WEBP_DECODER NULL
#define WEBP_NAME ""
#endif

static const struct {
    const char *name;
    bool (*is)(const uint8_t *bytes, int64_t size);
    ith_status (*decode)(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                         ith_error *err); /* NULL: not built in */
} formats[] = {
    {"PNG", is_png, PNG_DECODER}, {"JPEG", is_jpeg, JPEG_DECODER}, {"WebP", is_webp, WEBP_DECODER}};

const char *ith_image_formats(void)
{
    static const char names[] = PNG_NAME JPEG_NAME WEBP_NAME;
    /* cppcheck-suppress pointerOutOfBounds ; not of an empty one */
    return sizeof names > 1 ? names + 2 : "none";
}

static ith_status decode(ith_image *out, const uint8_t *b, int64_t size, int64_t max_pixels,
                         ith_error *err)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (!formats[i].is(b, size))
            continue;
        if (formats[i].decode)
            return formats[i].decode(out, b, size, max_pixels, err);
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s pictures are not built in (built in: %s)",
                        formats[i].name, ith_image_formats());
    }
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
