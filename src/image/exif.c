/* exif.c - the orientation a picture is to be seen in. Foreign bytes: every offset is checked. */
#include <string.h>

#include "base/checked.h"
#include "image/decode.h"

static uint32_t number(const uint8_t *p, int bytes, bool big)
{
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint32_t)p[i] << (8 * (big ? bytes - 1 - i : i));
    return value;
}

/* Tag 0x0112 of the first directory. */
int ith_exif_orientation(const uint8_t *p, int64_t n)
{
    if (n >= 6 && memcmp(p, "Exif\0", 6) == 0) {
        p += 6;
        n -= 6;
    }
    if (n < 8)
        return 1;
    bool big = p[0] == 'M';
    int64_t at = number(p + 4, 4, big);
    if (at + 2 > n)
        return 1;
    int64_t count = number(p + at, 2, big);
    for (int64_t i = 0; i < count && at + 2 + (i + 1) * 12 <= n; i++) {
        const uint8_t *entry = p + at + 2 + i * 12;
        if (number(entry, 2, big) != 0x0112)
            continue;
        uint32_t value = number(entry + 8, 2, big);
        return value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

/* A chunk of PNG is length, name, data, checksum. */
int ith_exif_of_png(const uint8_t *p, int64_t n)
{
    for (int64_t at = 8; at + 12 <= n;) {
        int64_t length = number(p + at, 4, true);
        if (length > n - at - 12)
            break;
        if (memcmp(p + at + 4, "eXIf", 4) == 0)
            return ith_exif_orientation(p + at + 8, length);
        at += 12 + length;
    }
    return 1;
}

/* A chunk of WebP is name, length, data, padded to an even length. */
int ith_exif_of_webp(const uint8_t *p, int64_t n)
{
    for (int64_t at = 12; at + 8 <= n;) {
        int64_t length = number(p + at + 4, 4, false);
        if (length > n - at - 8)
            break;
        if (memcmp(p + at, "EXIF", 4) == 0)
            return ith_exif_orientation(p + at + 8, length);
        at += 8 + length + length % 2;
    }
    return 1;
}

/* Bit 2 of orientation - 1 swaps the axes. */
ith_status ith_image_turn(ith_image *image, int orientation, ith_error *err)
{
    static const struct {
        bool swap, flip_x, flip_y; /* flips of the source that output (x, y) reads */
    } kinds[] = {{0, 0, 0}, {0, 1, 0}, {0, 1, 1}, {0, 0, 1},
                 {1, 0, 0}, {1, 0, 1}, {1, 1, 1}, {1, 1, 0}};
    ITH_ASSERT(orientation >= 1 && orientation <= 8);
    if (orientation == 1)
        return ITH_OK;
    int64_t w = image->width, h = image->height;
    bool swap = kinds[orientation - 1].swap;
    ith_image out;
    ITH_TRY(ith_image_alloc(&out, swap ? h : w, swap ? w : h, w * h, err));
    for (int64_t y = 0; y < out.height; y++)
        for (int64_t x = 0; x < out.width; x++) {
            int64_t sx = swap ? y : x, sy = swap ? x : y;
            sx = kinds[orientation - 1].flip_x ? w - 1 - sx : sx;
            sy = kinds[orientation - 1].flip_y ? h - 1 - sy : sy;
            memcpy(out.rgb + (y * out.width + x) * 3, image->rgb + (sy * w + sx) * 3, 3);
        }
    ith_image_deinit(image);
    *image = out;
    return ITH_OK;
}
