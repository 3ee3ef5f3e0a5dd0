/* patches.c - a picture as the rows of the vision tower. */
#include <string.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "image/image.h"

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
    if (p->std[0] == 0 || p->std[1] == 0 || p->std[2] == 0)
        return ith_fail(err, ITH_ERR_FORMAT, "image_std: 0 cannot be divided by");
    if (p->patch_size > 1024 || p->merge_size > 64 || p->temporal_patch_size > 64)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "patch_size, merge_size or temporal_patch_size: too "
                        "large (1024, 64 and 64 are the limits)");
    return ITH_OK;
}

ith_status ith_image_processor_load(ith_image_processor *out, const char *model_dir, ith_error *err)
{
    ith_image_processor p = {.patch_size = 16,
                             .temporal_patch_size = 2,
                             .merge_size = 2,
                             .min_pixels = 65536,
                             .max_pixels = 16777216,
                             .mean = {0.5, 0.5, 0.5},
                             .std = {0.5, 0.5, 0.5}};
    ith_buf path = {0};
    json_t *root = NULL;
    ith_status status = ITH_OK;
    ith_path_join(&path, model_dir, "preprocessor_config.json");
    ITH_TRY_OUT(ith_buf_check(&path, "path", err));
    if (ith_path_exists(path.data)) {
        ITH_TRY_OUT(ith_json_load(&root, path.data, err));
        status = parse_processor(&p, root, err);
        if (status != ITH_OK)
            ith_wrap(err, status, "%s", path.data);
    }
    if (status == ITH_OK)
        *out = p;
out:
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

/* One patch: [3, time, y, x]; a still picture stands at every time. */
static void fill_patch(float *out, const ith_image_processor *p, const ith_image *image,
                       int64_t row, int64_t col, float table[3][256])
{
    int64_t side = p->patch_size;
    for (int c = 0; c < 3; c++)
        for (int64_t t = 0; t < p->temporal_patch_size; t++)
            for (int64_t y = 0; y < side; y++) {
                const uint8_t *from =
                    image->rgb + ((row * side + y) * image->width + col * side) * 3 + c;
                for (int64_t x = 0; x < side; x++)
                    *out++ = table[c][from[3 * x]];
            }
}

ith_status ith_image_to_patches(const ith_image_processor *p, const ith_image *image,
                                ith_grid *grid, float **pixels, ith_error *err)
{
    ith_grid g;
    ith_image sized = {0};
    float *out = NULL, table[3][256];
    ith_status status = ITH_OK;
    ITH_TRY(ith_image_grid(p, image->height, image->width, &g, err));
    int64_t width = 3 * p->temporal_patch_size * p->patch_size * p->patch_size;
    ITH_TRY_OUT(ith_image_resize(&sized, image, g.h * p->patch_size, g.w * p->patch_size, err));
    ITH_TRY_OUT(ith_alloc((void **)&out, ith_grid_patches(g) * width * 4, "patches", err));
    for (int c = 0; c < 3; c++) /* rescaling folded into mean and deviation, each rounded to f32 */
        for (int v = 0; v < 256; v++)
            table[c][v] = ((float)v - (float)(p->mean[c] * 255)) / (float)(p->std[c] * 255);
    int64_t m = p->merge_size, block_cols = g.w / m;
    for (int64_t i = 0; i < ith_grid_patches(g); i++) {
        int64_t block = i / (m * m), inner = i % (m * m);
        fill_patch(out + i * width, p, &sized, block / block_cols * m + inner / m,
                   block % block_cols * m + inner % m, table);
    }
    *grid = g;
    *pixels = out;
    out = NULL;
out:
    ith_free(out);
    ith_image_deinit(&sized);
    return status;
}
