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

/* Of an APP1 segment, which may be something else. */
static int exif_of(const uint8_t *p, int64_t n)
{
    return n >= 6 && memcmp(p, "Exif\0", 6) == 0 ? ith_exif_orientation(p, n) : 1;
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
            r->orientation = exif_of(m->data, m->data_length);
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
    return ith_image_turn(&r->image, r->orientation, err);
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
