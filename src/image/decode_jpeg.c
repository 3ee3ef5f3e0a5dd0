/* decode_jpeg.c - JPEG through libjpeg-turbo, from memory: baseline and progressive, grey, YCbCr,
 * CMYK and YCCK, turned as its EXIF orientation says. */
#include "image/decode.h"

#ifdef ITH_HAVE_JPEG
#include <setjmp.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>

#include "base/mem.h"

#define MAX_SCANS 500 /* a small file with endless scans costs hours */

typedef struct {
    struct jpeg_error_mgr base; /* first: libjpeg knows only this */
    jmp_buf jump;
    char text[JMSG_LENGTH_MAX];
} errors;

typedef struct {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_progress_mgr progress;
    errors errors;
    ith_image image;
    uint8_t *line; /* CMYK */
    int orientation;
} reader;

static void on_error(j_common_ptr jpeg)
{
    errors *e = (errors *)jpeg->err;
    jpeg->err->format_message(jpeg, e->text);
    longjmp(e->jump, 1);
}

/* Warnings mean a damaged or cut file; half a picture is none. */
static void on_message(j_common_ptr jpeg, int level)
{
    if (level < 0)
        on_error(jpeg);
}

static void on_progress(j_common_ptr jpeg)
{
    errors *e = (errors *)jpeg->err;
    if (jpeg->is_decompressor && ((j_decompress_ptr)jpeg)->input_scan_number > MAX_SCANS) {
        snprintf(e->text, sizeof e->text, "more than %d scans", MAX_SCANS);
        longjmp(e->jump, 1);
    }
}

/* ---- EXIF ---- */

static uint32_t exif_number(const uint8_t *p, int bytes, bool big)
{
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint32_t)p[i] << (8 * (big ? bytes - 1 - i : i));
    return value;
}

/* Tag 0x0112 of the first directory; 1 (upright) when it is not there. */
static int exif_orientation(const uint8_t *p, int64_t n)
{
    if (n < 14 || memcmp(p, "Exif\0", 6) != 0)
        return 1;
    p += 6;
    n -= 6;
    bool big = p[0] == 'M';
    int64_t at = exif_number(p + 4, 4, big);
    if (at + 2 > n)
        return 1;
    int64_t count = exif_number(p + at, 2, big);
    for (int64_t i = 0; i < count && at + 2 + (i + 1) * 12 <= n; i++) {
        const uint8_t *entry = p + at + 2 + i * 12;
        if (exif_number(entry, 2, big) != 0x0112)
            continue;
        uint32_t value = exif_number(entry + 8, 2, big);
        return value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

/* The picture as it is to be seen: bit 2 of orientation - 1 swaps the axes. */
static ith_status turn(ith_image *image, int orientation, ith_error *err)
{
    static const struct {
        bool swap, flip_x, flip_y; /* flips of the source that output (x, y) reads */
    } kinds[] = {{0, 0, 0}, {0, 1, 0}, {0, 1, 1}, {0, 0, 1},
                 {1, 0, 0}, {1, 0, 1}, {1, 1, 1}, {1, 1, 0}};
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

/* ---- pixels ---- */

/* a * b / 255, rounded. */
static int times_255(int a, int b)
{
    int t = a * b + 128;
    return ((t >> 8) + t) >> 8;
}

/* Adobe writes CMYK inverted; all known files do. */
static void cmyk_line(uint8_t *rgb, const uint8_t *cmyk, int64_t width, bool inverted)
{
    for (int64_t x = 0; x < width; x++)
        for (int c = 0; c < 3; c++) {
            int ink = cmyk[4 * x + c], light = cmyk[4 * x + 3];
            if (inverted)
                ink = 255 - ink;
            else
                light = 255 - light;
            rgb[3 * x + c] = (uint8_t)(light - times_255(ink, light));
        }
}

/* Jumps on errors of libjpeg. */
static ith_status read_jpeg(reader *r, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                            ith_error *err)
{
    j_decompress_ptr j = &r->jpeg;
    jpeg_create_decompress(j);
    j->progress = &r->progress;
    r->progress.progress_monitor = on_progress;
    j->mem->max_memory_to_use = 1L << 30;
    jpeg_mem_src(j, bytes, (unsigned long)size);
    jpeg_save_markers(j, JPEG_APP0 + 1, 0xffff);
    (void)jpeg_read_header(j, TRUE);
    for (jpeg_saved_marker_ptr m = j->marker_list; m; m = m->next)
        if (m->marker == JPEG_APP0 + 1 && r->orientation == 1)
            r->orientation = exif_orientation(m->data, m->data_length);
    bool cmyk = j->num_components == 4;
    ITH_TRY(ith_image_alloc(&r->image, j->image_width, j->image_height, max_pixels, err));
    j->out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
    (void)jpeg_start_decompress(j);
    if (j->output_components != (cmyk ? 4 : 3))
        return ith_fail(err, ITH_ERR_FORMAT, "damaged JPEG: %d components", j->output_components);
    if (cmyk)
        ITH_TRY(ith_alloc((void **)&r->line, r->image.width * 4, "picture row", err));
    while (j->output_scanline < j->output_height) {
        uint8_t *to = r->image.rgb + (int64_t)j->output_scanline * r->image.width * 3;
        JSAMPROW row = cmyk ? r->line : to;
        (void)jpeg_read_scanlines(j, &row, 1);
        if (cmyk)
            cmyk_line(to, r->line, r->image.width, j->saw_Adobe_marker);
    }
    (void)jpeg_finish_decompress(j);
    return ITH_OK;
}

static ith_status run(reader *r, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                      ith_error *err)
{
    r->jpeg.err = jpeg_std_error(&r->errors.base);
    r->errors.base.error_exit = on_error;
    r->errors.base.emit_message = on_message;
    r->orientation = 1;
    if (setjmp(r->errors.jump))
        return ith_fail(err, ITH_ERR_FORMAT, "damaged JPEG: %s", r->errors.text);
    ITH_TRY(read_jpeg(r, bytes, size, max_pixels, err));
    return turn(&r->image, r->orientation, err);
}

ith_status ith_decode_jpeg(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                           ith_error *err)
{
    reader *r = NULL;
    ITH_TRY(ith_alloc_zero((void **)&r, 1, sizeof *r, "JPEG reader", err));
    ith_status status = run(r, bytes, size, max_pixels, err);
    if (r->jpeg.mem)
        jpeg_destroy_decompress(&r->jpeg);
    if (status == ITH_OK)
        *out = r->image;
    else
        ith_image_deinit(&r->image);
    ith_free(r->line);
    ith_free(r);
    return status;
}
#else
typedef int ith_no_jpeg; /* libjpeg is absent */
#endif
