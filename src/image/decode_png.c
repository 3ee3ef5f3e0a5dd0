/* decode_png.c - PNG through libpng, from memory. Its errors jump; everything that must be freed
 * hangs on one struct, so that the jump loses nothing. */
#include "image/decode.h"

#ifdef ITH_HAVE_PNG
#include <png.h>
#include <string.h>

#include "base/mem.h"

typedef struct {
    png_structp png;
    png_infop info;
    const uint8_t *at;
    int64_t left;
    ith_image image;
    png_bytep *rows;
    char text[128]; /* of the error */
} reader;

static void on_error(png_structp png, png_const_charp text)
{
    reader *r = png_get_error_ptr(png);
    snprintf(r->text, sizeof r->text, "%s", text);
    png_longjmp(png, 1);
}

static void on_warning(png_structp png, png_const_charp text)
{
    (void)png;
    (void)text;
}

static void read_bytes(png_structp png, png_bytep out, size_t n)
{
    reader *r = png_get_io_ptr(png);
    if ((int64_t)n > r->left)
        png_error(png, "the file ends early");
    memcpy(out, r->at, n);
    r->at += n;
    r->left -= (int64_t)n;
}

static png_voidp allocate(png_structp png, png_alloc_size_t n)
{
    (void)png;
    return ith_malloc((int64_t)n);
}

static void release(png_structp png, png_voidp p)
{
    (void)png;
    ith_free(p);
}

/* Everything to 8-bit RGB, as Pillow's convert("RGB") does. */
static void set_transforms(reader *r)
{
    png_set_expand(r->png);
    png_set_strip_16(r->png);
    png_set_gray_to_rgb(r->png);
    png_set_strip_alpha(r->png);
    (void)png_set_interlace_handling(r->png);
    png_read_update_info(r->png, r->info);
}

/* Jumps on errors of libpng. */
static ith_status read_png(reader *r, int64_t max_pixels, ith_error *err)
{
    png_read_info(r->png, r->info);
    int64_t width = png_get_image_width(r->png, r->info);
    int64_t height = png_get_image_height(r->png, r->info);
    ITH_TRY(ith_image_alloc(&r->image, width, height, max_pixels, err));
    ITH_TRY(ith_alloc((void **)&r->rows, height * (int64_t)sizeof *r->rows, "picture rows", err));
    for (int64_t y = 0; y < height; y++)
        r->rows[y] = r->image.rgb + y * width * 3;
    set_transforms(r);
    if ((int64_t)png_get_rowbytes(r->png, r->info) != width * 3)
        png_error(r->png, "rows of an unexpected size");
    png_read_image(r->png, r->rows);
    return ITH_OK;
}

static ith_status run(reader *r, int64_t max_pixels, ith_error *err)
{
    if (setjmp(png_jmpbuf(r->png)))
        return ith_fail(err, ITH_ERR_FORMAT, "damaged PNG: %s", r->text);
    png_set_read_fn(r->png, r, read_bytes);
    png_set_user_limits(r->png, 1000000, 1000000);
    png_set_chunk_malloc_max(r->png, 1 << 26);
    /* IHDR, PLTE, tRNS, IDAT and IEND only: the lengths of others are believed before they are read */
    png_set_keep_unknown_chunks(r->png, PNG_HANDLE_CHUNK_NEVER, NULL, -1);
    return read_png(r, max_pixels, err);
}

ith_status ith_decode_png(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                          ith_error *err)
{
    reader r = {.at = bytes, .left = size};
    ith_status status = ITH_ERR_MEMORY;
    r.png = png_create_read_struct_2(PNG_LIBPNG_VER_STRING, &r, on_error, on_warning, NULL,
                                     allocate, release);
    r.info = r.png ? png_create_info_struct(r.png) : NULL;
    if (r.info)
        status = run(&r, max_pixels, err);
    else
        ith_fail(err, status, "out of memory for a PNG reader");
    if (r.png)
        png_destroy_read_struct(&r.png, r.info ? &r.info : NULL, NULL);
    ith_free(r.rows);
    if (status == ITH_OK)
        status = ith_image_turn(&r.image, ith_exif_of_png(bytes, size), err);
    if (status == ITH_OK)
        *out = r.image;
    else
        ith_image_deinit(&r.image);
    return status;
}
#else
typedef int ith_no_png; /* libpng is absent */
#endif
