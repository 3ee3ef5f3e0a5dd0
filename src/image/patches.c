/* patches.c - the processor files of a model directory, and a picture as the rows of the vision
 * tower. */
#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "image/video.h"

/* ---- preprocessor_config.json ---- */

static ith_status get_size(const json_t *object, const char *key, int64_t *out, ith_error *err)
{
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value))
        return ITH_OK;
    if (!json_is_integer(value) || json_integer_value(value) < 1 ||
        json_integer_value(value) > (json_int_t)1 << 31)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: found %s, expected an integer from 1 to 2^31",
                        key, ith_json_type_name(value));
    *out = (int64_t)json_integer_value(value);
    return ITH_OK;
}

static ith_status get_three(const json_t *object, const char *key, double out[3], ith_error *err)
{
    const json_t *value = json_object_get(object, key);
    if (!value || json_is_null(value))
        return ITH_OK;
    bool fits = json_is_array(value) && json_array_size(value) == 3;
    for (size_t i = 0; fits && i < 3; i++)
        fits = json_is_number(json_array_get(value, i));
    if (!fits)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: expected three numbers", key);
    for (size_t i = 0; i < 3; i++)
        out[i] = json_number_value(json_array_get(value, i));
    return ITH_OK;
}

static ith_status parse_processor(ith_image_processor *p, const json_t *root, ith_error *err)
{
    const json_t *size = json_object_get(root, "size");
    ITH_TRY(get_size(root, "patch_size", &p->patch_size, err));
    ITH_TRY(get_size(root, "temporal_patch_size", &p->temporal_patch_size, err));
    ITH_TRY(get_size(root, "merge_size", &p->merge_size, err));
    ITH_TRY(get_size(root, "min_pixels", &p->min_pixels, err));
    ITH_TRY(get_size(root, "max_pixels", &p->max_pixels, err));
    ITH_TRY(get_size(size, "shortest_edge", &p->min_pixels, err));
    ITH_TRY(get_size(size, "longest_edge", &p->max_pixels, err));
    ITH_TRY(get_three(root, "image_mean", p->mean, err));
    ITH_TRY(get_three(root, "image_std", p->std, err));
    for (int c = 0; c < 3; c++)
        if (!((float)(p->std[c] * 255) > 0))
            return ith_fail(err, ITH_ERR_FORMAT, "image_std: found %g, expected a number above 0",
                            p->std[c]);
    if (p->min_pixels > p->max_pixels)
        return ith_fail(err, ITH_ERR_FORMAT, "min_pixels %lld, max_pixels %lld: out of order",
                        (long long)p->min_pixels, (long long)p->max_pixels);
    if (p->patch_size > 1024 || p->merge_size > 64 || p->temporal_patch_size > 64)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "patch_size, merge_size or temporal_patch_size: too "
                        "large (1024, 64 and 64 are the limits)");
    return ITH_OK;
}

static const ith_image_processor published = {.patch_size = 16,
                                              .temporal_patch_size = 2,
                                              .merge_size = 2,
                                              .min_pixels = 65536,
                                              .max_pixels = 16777216,
                                              .mean = {0.5, 0.5, 0.5},
                                              .std = {0.5, 0.5, 0.5}};

/* A file of the model directory; *root NULL when it is absent. */
static ith_status load_json(json_t **root, const char *dir, const char *name, ith_buf *path,
                            ith_error *err)
{
    *root = NULL;
    ith_path_join(path, dir, name);
    ITH_TRY(ith_buf_check(path, "path", err));
    return ith_path_exists(path->data) ? ith_json_load(root, path->data, err) : ITH_OK;
}

ith_status ith_image_processor_load(ith_image_processor *out, const char *model_dir, ith_error *err)
{
    ith_image_processor p = published;
    ith_buf path = {0};
    json_t *root = NULL;
    ith_status status = load_json(&root, model_dir, "preprocessor_config.json", &path, err);
    if (status == ITH_OK && root) {
        status = parse_processor(&p, root, err);
        if (status != ITH_OK)
            ith_wrap(err, status, "%s", path.data);
    }
    if (status == ITH_OK)
        *out = p;
    json_decref(root);
    ith_buf_deinit(&path);
    return status;
}

static ith_status parse_video(ith_video_processor *p, const json_t *root, ith_error *err)
{
    const json_t *fps = json_object_get(root, "fps");
    ITH_TRY(parse_processor(&p->image, root, err));
    ITH_TRY(get_size(root, "min_frames", &p->min_frames, err));
    ITH_TRY(get_size(root, "max_frames", &p->max_frames, err));
    if (json_is_number(fps) && json_number_value(fps) > 0)
        p->fps = json_number_value(fps);
    else if (fps && !json_is_null(fps))
        return ith_fail(err, ITH_ERR_FORMAT, "fps: expected a number above 0");
    if (p->min_frames > p->max_frames || p->max_frames > 1 << 20)
        return ith_fail(err, ITH_ERR_FORMAT, "min_frames %lld, max_frames %lld: out of order",
                        (long long)p->min_frames, (long long)p->max_frames);
    return ITH_OK;
}

ith_status ith_video_processor_load(ith_video_processor *out, const char *model_dir, ith_error *err)
{
    ith_video_processor p = {.image = published, .fps = 2, .min_frames = 4, .max_frames = 768};
    ith_buf path = {0};
    json_t *root = NULL;
    p.image.min_pixels = 4096;
    p.image.max_pixels = 25165824;
    ith_status status = load_json(&root, model_dir, "video_preprocessor_config.json", &path, err);
    if (status == ITH_OK && root) {
        status = parse_video(&p, root, err);
        if (status != ITH_OK)
            ith_wrap(err, status, "%s", path.data);
    }
    if (status == ITH_OK)
        *out = p;
    json_decref(root);
    ith_buf_deinit(&path);
    return status;
}

/* ---- patches ---- */

ith_status ith_image_grid(const ith_image_processor *p, int64_t height, int64_t width,
                          ith_grid *grid, ith_error *err)
{
    int64_t h = 0, w = 0;
    ITH_TRY(ith_smart_resize(height, width, p->patch_size * p->merge_size, p->min_pixels,
                             p->max_pixels, &h, &w, err));
    *grid = (ith_grid){1, (int32_t)(h / p->patch_size), (int32_t)(w / p->patch_size)};
    return ITH_OK;
}

static void processor_table(const ith_image_processor *p, float table[3][256])
{
    for (int c = 0; c < 3; c++) /* rescaling folded into mean and deviation, each rounded to f32 */
        for (int v = 0; v < 256; v++)
            table[c][v] = ((float)v - (float)(p->mean[c] * 255)) / (float)(p->std[c] * 255);
}

/* One time of one patch: its three channels lie a whole patch time apart. */
static void fill_patch(float *out, const ith_image_processor *p, const ith_image *image,
                       int64_t row, int64_t col, float table[3][256])
{
    int64_t side = p->patch_size, channel = p->temporal_patch_size * side * side;
    for (int c = 0; c < 3; c++)
        for (int64_t y = 0; y < side; y++) {
            const uint8_t *from =
                image->rgb + ((row * side + y) * image->width + col * side) * 3 + c;
            float *to = out + c * channel + y * side;
            for (int64_t x = 0; x < side; x++)
                to[x] = table[c][from[3 * x]];
        }
}

ith_status ith_image_fill_patches(const ith_image_processor *p, const ith_image *image,
                                  ith_grid grid, int64_t first, int64_t times, float *pixels,
                                  ith_error *err)
{
    ith_image sized = {0};
    float table[3][256];
    int64_t m = p->merge_size, block_cols = grid.w / m, frame = (int64_t)grid.h * grid.w;
    int64_t side = p->patch_size, width = ith_image_patch_width(p);
    ITH_TRY(
        ith_image_resize(&sized, image, grid.h * side, grid.w * side, ITH_RESIZE_TORCHVISION, err));
    processor_table(p, table);
    for (int64_t k = first; k < first + times; k++) {
        int64_t t = k / p->temporal_patch_size, within = k % p->temporal_patch_size;
        for (int64_t i = 0; i < frame; i++) {
            int64_t block = i / (m * m), inner = i % (m * m);
            fill_patch(pixels + (t * frame + i) * width + within * side * side, p, &sized,
                       block / block_cols * m + inner / m, block % block_cols * m + inner % m,
                       table);
        }
    }
    ith_image_deinit(&sized);
    return ITH_OK;
}

int64_t ith_image_patch_width(const ith_image_processor *p)
{
    return 3 * p->temporal_patch_size * p->patch_size * p->patch_size;
}
