/* Goal: pictures become the patches of the Hugging Face processor, bit for bit, and damaged files
 * are one line. Method: reference pictures where they are present; own small files, written here
 * and by libjpeg, then cut and changed at every byte. */
#include "testing.h"

#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "image/image.h"

#include <math.h>

static void test_smart_resize_examples(void **state)
{
    (void)state;
    static const struct {
        int64_t height, width, factor, min, max, wanted_h, wanted_w;
    } cases[] = {{480, 640, 32, 65536, 16777216, 480, 640},
                 {256, 256, 32, 65536, 16777216, 256, 256},
                 {100, 100, 32, 65536, 16777216, 256, 256},
                 {1080, 1920, 32, 65536, 16777216, 1088, 1920},
                 {720, 1280, 32, 65536, 16777216, 704, 1280}, /* 22.5: half to even */
                 {5000, 4000, 32, 65536, 16777216, 4576, 3648},
                 {5000, 5000, 32, 65536, 16777216, 4096, 4096},
                 {48, 80, 32, 65536, 16777216, 224, 352},
                 {16, 2048, 32, 65536, 16777216, 32, 2912},
                 {168, 300, 32, 65536, 16777216, 192, 352},
                 {199, 300, 32, 65536, 16777216, 224, 320},
                 {166, 300, 32, 65536, 16777216, 192, 352},
                 {256, 51200, 32, 65536, 16777216, 256, 51200},
                 {70, 70, 28, 3136, 12845056, 56, 56},
                 {639, 31, 28, 3136, 20 * 28 * 28, 560, 28}}; /* no side becomes 0 */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        int64_t h = 0, w = 0;
        assert_ok(ith_smart_resize(cases[i].height, cases[i].width, cases[i].factor, cases[i].min,
                                   cases[i].max, &h, &w, &err),
                  err);
        if (h != cases[i].wanted_h || w != cases[i].wanted_w)
            fail_msg("%lld x %lld gives %lld x %lld, expected %lld x %lld",
                     (long long)cases[i].height, (long long)cases[i].width, (long long)h,
                     (long long)w, (long long)cases[i].wanted_h, (long long)cases[i].wanted_w);
    }
    ith_error err = {0};
    int64_t h = 0, w = 0;
    assert_fails(ith_smart_resize(1, 201, 32, 65536, 16777216, &h, &w, &err), err, ITH_ERR_FORMAT,
                 "201 x 1: sides may be at most 200:1 apart");
}

/* Flat areas stay flat, and a picture of the same size stays the same. */
static void test_resize_keeps_what_is_flat(void **state)
{
    (void)state;
    uint8_t rgb[7 * 5 * 3];
    ith_error err = {0};
    ith_image in = {7, 5, rgb}, out = {0};
    for (int i = 0; i < 7 * 5; i++)
        for (int c = 0; c < 3; c++)
            rgb[3 * i + c] = (uint8_t)(40 + 100 * c);
    assert_ok(ith_image_resize(&out, &in, 16, 3, ITH_RESIZE_TORCHVISION, &err), err);
    for (int i = 0; i < 16 * 3; i++)
        for (int c = 0; c < 3; c++)
            assert_int_equal(out.rgb[3 * i + c], 40 + 100 * c);
    ith_image_deinit(&out);
    for (int i = 0; i < 7 * 5 * 3; i++)
        rgb[i] = (uint8_t)(i * 37);
    assert_ok(ith_image_resize(&out, &in, 5, 7, ITH_RESIZE_PILLOW, &err), err);
    assert_memory_equal(out.rgb, rgb, sizeof rgb);
    ith_image_deinit(&out);
}

#ifdef ITH_HAVE_PNG
/* 3 x 2, RGB: red, green, blue; black, grey, white. */
static const uint8_t small_png[] = {
    0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48, 0x44, 0x52,
    0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x00, 0x02, 0x08, 0x02, 0x00, 0x00, 0x00, 0x12, 0x16, 0xf1,
    0x4d, 0x00, 0x00, 0x00, 0x16, 0x49, 0x44, 0x41, 0x54, 0x78, 0x9c, 0x63, 0xf8, 0xcf, 0xc0, 0xc0,
    0x00, 0xc3, 0x0c, 0x0d, 0x0d, 0x0d, 0xff, 0xff, 0xff, 0x07, 0x00, 0x3a, 0x61, 0x07, 0x7b, 0x00,
    0x43, 0x97, 0xc3, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82};

static void test_png_pixels(void **state)
{
    (void)state;
    static const uint8_t wanted[] = {255, 0, 0, 0,   255, 0,   0,   0,   255,
                                     0,   0, 0, 128, 128, 128, 255, 255, 255};
    ith_error err = {0};
    ith_image image = {0};
    assert_ok(ith_image_decode(&image, small_png, sizeof small_png, "small.png", 100, &err), err);
    assert_int_equal(image.width, 3);
    assert_int_equal(image.height, 2);
    assert_memory_equal(image.rgb, wanted, sizeof wanted);
    ith_image_deinit(&image);
    assert_fails(ith_image_decode(&image, small_png, sizeof small_png, "small.png", 5, &err), err,
                 ITH_ERR_FORMAT, "small.png: a picture of 3 x 2 (at most 5 pixels)");
}

/* Every prefix and every changed byte: an error or a picture, never a crash or a leak. */
static void test_damaged_png(void **state)
{
    (void)state;
    uint8_t bytes[sizeof small_png];
    for (size_t n = 0; n < sizeof small_png - 12; n++) {
        ith_error err = {0};
        ith_image image = {0};
        ith_status status = ith_image_decode(&image, small_png, (int64_t)n, "cut", 100, &err);
        if (status == ITH_OK)
            fail_msg("%zu bytes of %zu are taken for a picture", n, sizeof small_png);
        assert_non_null(strstr(err.text, "cut: "));
    }
    for (size_t n = 0; n < sizeof small_png; n++)
        for (int bit = 0; bit < 8; bit++) {
            ith_error err = {0};
            ith_image image = {0};
            memcpy(bytes, small_png, sizeof bytes);
            bytes[n] ^= (uint8_t)(1 << bit);
            (void)ith_image_decode(&image, bytes, sizeof bytes, "bad", 100, &err);
            ith_image_deinit(&image);
        }
}

static void test_every_failing_allocation_is_one_error(void **state)
{
    (void)state;
    for (int64_t n = 1;; n++) {
        ith_error err = {0};
        ith_image image = {0};
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ith_status status =
            ith_image_decode(&image, small_png, sizeof small_png, "small.png", 100, &err);
        bool hit = ith_fault_count(ITH_FAULT_ALLOC) >= n;
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        ith_image_deinit(&image);
        if (!hit)
            break;
        if (status != ITH_OK)
            assert_true(err.text[0] != 0);
        assert_in_range(n, 1, 100);
    }
}
#endif

static uint64_t fnv(const uint8_t *bytes, int64_t n)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3;
    return hash;
}

#include "picture_files.inc"

static bool built_in(size_t i)
{
    return strstr(ith_image_formats(), pictures[i].is_png ? "png" : "webp") != NULL;
}

/* Palette, two levels, alpha, 16 bit, turned by EXIF; lossy and lossless. */
static void test_picture_pixels(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof pictures / sizeof *pictures; i++) {
        ith_error err = {0};
        ith_image image = {0};
        if (!built_in(i))
            continue;
        assert_ok(ith_image_decode(&image, pictures[i].bytes, pictures[i].size, pictures[i].name,
                                   100, &err),
                  err);
        assert_int_equal(image.width, pictures[i].width);
        assert_int_equal(image.height, pictures[i].height);
        uint64_t hash = fnv(image.rgb, image.width * image.height * 3);
        if (hash != pictures[i].hash)
            fail_msg("%s: hash %llx, expected %llx", pictures[i].name, (unsigned long long)hash,
                     (unsigned long long)pictures[i].hash);
        ith_image_deinit(&image);
        assert_fails(
            ith_image_decode(&image, pictures[i].bytes, pictures[i].size, "large", 95, &err), err,
            ITH_ERR_FORMAT, "large: a picture of ");
    }
}

/* Every prefix and changed bytes: an error or a picture. */
static void test_damaged_pictures(void **state)
{
    (void)state;
    uint8_t bytes[1024];
    for (size_t i = 0; i < sizeof pictures / sizeof *pictures; i++) {
        assert_true(pictures[i].size <= (int64_t)sizeof bytes);
        for (int64_t n = 0; built_in(i) && n < pictures[i].size; n++) {
            ith_error err = {0};
            ith_image image = {0};
            if (ith_image_decode(&image, pictures[i].bytes, n, "cut", 100, &err) != ITH_OK)
                assert_non_null(strstr(err.text, "cut: "));
            else if (n < pictures[i].size / 2)
                fail_msg("%s: %lld bytes of %lld are taken for a picture", pictures[i].name,
                         (long long)n, (long long)pictures[i].size);
            ith_image_deinit(&image);
            for (int k = 0; k < 3; k++) {
                ith_error other = {0};
                memcpy(bytes, pictures[i].bytes, (size_t)pictures[i].size);
                bytes[n] = k == 0 ? 0 : k == 1 ? 0xff : (uint8_t)(bytes[n] ^ 0x10);
                (void)ith_image_decode(&image, bytes, pictures[i].size, "bad", 100, &other);
                ith_image_deinit(&image);
            }
        }
    }
}

#ifdef ITH_HAVE_JPEG
#include "jpeg_files.inc"

/* Baseline, progressive, turned by EXIF, grey, CMYK. */
static void test_jpeg_pixels(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof jpegs / sizeof *jpegs; i++) {
        ith_error err = {0};
        ith_image image = {0};
        assert_ok(ith_image_decode(&image, jpegs[i].bytes, jpegs[i].size, jpegs[i].name, 100, &err),
                  err);
        assert_int_equal(image.width, jpegs[i].width);
        assert_int_equal(image.height, jpegs[i].height);
        uint64_t hash = fnv(image.rgb, image.width * image.height * 3);
        if (hash != jpegs[i].hash)
            fail_msg("%s: hash %llx, expected %llx; first pixel %d %d %d", jpegs[i].name,
                     (unsigned long long)hash, (unsigned long long)jpegs[i].hash, image.rgb[0],
                     image.rgb[1], image.rgb[2]);
        ith_image_deinit(&image);
        assert_fails(ith_image_decode(&image, jpegs[i].bytes, jpegs[i].size, "large.jpg", 95, &err),
                     err, ITH_ERR_FORMAT, "large.jpg: a picture of ");
    }
}

static void test_damaged_jpeg(void **state)
{
    (void)state;
    uint8_t bytes[1024];
    for (size_t i = 0; i < sizeof jpegs / sizeof *jpegs; i++) {
        for (int64_t n = 0; n < jpegs[i].size - 2; n++) { /* without the end marker: still whole */
            ith_error err = {0};
            ith_image image = {0};
            if (ith_image_decode(&image, jpegs[i].bytes, n, "cut", 100, &err) == ITH_OK)
                fail_msg("%s: %lld bytes of %lld are taken for a picture", jpegs[i].name,
                         (long long)n, (long long)jpegs[i].size);
            ith_image_deinit(&image);
        }
        for (int64_t n = 0; n < jpegs[i].size; n++)
            for (int k = 0; k < 3; k++) {
                ith_error err = {0};
                ith_image image = {0};
                memcpy(bytes, jpegs[i].bytes, (size_t)jpegs[i].size);
                bytes[n] = k == 0 ? 0 : k == 1 ? 0xff : (uint8_t)(bytes[n] ^ 0x10);
                (void)ith_image_decode(&image, bytes, jpegs[i].size, "bad", 100, &err);
                ith_image_deinit(&image);
            }
    }
}
#endif

static void test_other_bytes_are_no_picture(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_image image = {0};
    assert_fails(ith_image_decode(&image, "GIF89a", 6, "x.gif", 100, &err), err, ITH_ERR_FORMAT,
                 "x.gif: no picture of a known format");
    memset(&err, 0, sizeof err);
    bool webp = strstr(ith_image_formats(), "webp") != NULL;
    assert_fails(ith_image_decode(&image, "RIFF....WEBPVP8 ", 16, "x.webp", 100, &err), err,
                 webp ? ITH_ERR_FORMAT : ITH_ERR_UNSUPPORTED,
                 webp ? "x.webp: damaged WebP" : "x.webp: WebP pictures are not built in");
}

/* ---- the reference pictures ---- */

static void need_grid(const json_t *ref, const char *key, ith_grid g)
{
    const json_t *row = json_array_get(json_object_get(ref, key), 0);
    assert_non_null(row);
    int32_t wanted[3];
    for (size_t i = 0; i < 3; i++)
        wanted[i] = (int32_t)json_integer_value(json_array_get(row, i));
    if (g.t != wanted[0] || g.h != wanted[1] || g.w != wanted[2])
        fail_msg("%s: grid %d %d %d, expected %d %d %d", key, g.t, g.h, g.w, wanted[0], wanted[1],
                 wanted[2]);
}

/* The f32 data of a tensor in a safetensors file; this folder knows no reader of them. */
static const float *find_tensor(const ith_map *map, const json_t *header, int64_t data,
                                const char *name, int64_t *count)
{
    const json_t *offsets = json_object_get(json_object_get(header, name), "data_offsets");
    int64_t begin = json_integer_value(json_array_get(offsets, 0));
    int64_t end = json_integer_value(json_array_get(offsets, 1));
    *count = (end - begin) / 4;
    assert_true(end > begin && data + end <= (int64_t)map->size);
    return (const float *)(const void *)((const char *)map->data + data + begin);
}

static void test_reference_pictures_bit_for_bit(void **state)
{
    (void)state;
#ifdef ITH_HAVE_PNG
    ith_error err = {0};
    json_t *ref = NULL, *header = NULL;
    ith_map map = {NULL, 0};
    uint64_t header_bytes = 0;
    assert_ok(ith_json_load(&ref, shared_path("golden/images/ref.json"), &err), err);
    assert_ok(ith_map_open(&map, shared_path("golden/images/pixels.safetensors"), &err), err);
    memcpy(&header_bytes, map.data, 8);
    assert_ok(
        ith_json_parse(&header, (const char *)map.data + 8, (int64_t)header_bytes, "pixels", &err),
        err);
    ith_image_processor full, small;
    assert_ok(ith_image_processor_load(&full, "/nonexistent", &err), err);
    small = full;
    small.min_pixels = 1024;
    small.max_pixels = 40000;
    for (int i = 0; i < 4; i++) {
        char path[64], key[64];
        ith_image image = {0};
        ith_grid grid;
        float *pixels = NULL;
        int64_t count = 0;
        snprintf(path, sizeof path, "golden/images/im%d.png", i);
        assert_ok(ith_image_load(&image, shared_path(path), ITH_IMAGE_MAX_PIXELS, &err), err);
        assert_ok(ith_image_grid(&full, image.height, image.width, &grid, &err), err);
        snprintf(key, sizeof key, "im%d.full", i);
        need_grid(ref, key, grid);
        assert_ok(ith_image_grid(&small, image.height, image.width, &grid, &err), err);
        assert_ok(ith_alloc((void **)&pixels, ith_grid_patches(grid) * 1536 * 4, "p", &err), err);
        assert_ok(ith_image_fill_patches(&small, &image, grid, 0, 2, pixels, &err), err);
        snprintf(key, sizeof key, "im%d.small", i);
        need_grid(ref, key, grid);
        snprintf(key, sizeof key, "im%d.small", i);
        const float *wanted = find_tensor(&map, header, 8 + (int64_t)header_bytes, key, &count);
        assert_int_equal(count, ith_grid_patches(grid) * 1536);
        for (int64_t k = 0; k < count; k++) {
            float w;
            memcpy(&w, wanted + k, 4);
            if (memcmp(&w, pixels + k, 4) != 0)
                fail_msg("im%d: value %lld is %.9g, expected %.9g", i, (long long)k,
                         (double)pixels[k], (double)w);
        }
        ith_free(pixels);
        ith_image_deinit(&image);
    }
    json_decref(ref);
    json_decref(header);
    ith_map_close(&map);
#else
    skip();
#endif
}

/* Settings that contradict themselves, or that no pixel can be divided by: the file and the key. */
static void test_settings_of_the_processor_are_checked(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message; /* NULL: good */
    } cases[] = {
        {"{\"size\": {\"shortest_edge\": 64, \"longest_edge\": 64}}", NULL},
        {"{\"size\": {\"shortest_edge\": 65, \"longest_edge\": 64}}",
         "preprocessor_config.json: min_pixels 65, max_pixels 64: out of order"},
        {"{\"image_std\": [1, 0, 1]}",
         "preprocessor_config.json: image_std: found 0, expected a number above 0"},
        {"{\"image_std\": [1, 1, 1e-60]}",
         "preprocessor_config.json: image_std: found 1e-60, expected a number above 0"},
        {"{\"image_std\": [1, 1]}", "preprocessor_config.json: image_std: expected three numbers"},
        {"{\"patch_size\": 0}", "preprocessor_config.json: patch_size: found"},
    };
    const char *dir = temp_dir("settings");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        ith_image_processor p;
        char path[4200];
        snprintf(path, sizeof path, "%s/preprocessor_config.json", dir);
        assert_ok(ith_write_file(path, cases[i].text, (int64_t)strlen(cases[i].text), &err), err);
        if (cases[i].message)
            assert_fails(ith_image_processor_load(&p, dir, &err), err, ITH_ERR_FORMAT,
                         cases[i].message);
        else
            assert_ok(ith_image_processor_load(&p, dir, &err), err);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smart_resize_examples),
        cmocka_unit_test(test_settings_of_the_processor_are_checked),
        cmocka_unit_test(test_resize_keeps_what_is_flat),
#ifdef ITH_HAVE_PNG
        cmocka_unit_test(test_png_pixels),
        cmocka_unit_test(test_damaged_png),
        cmocka_unit_test(test_every_failing_allocation_is_one_error),
#endif
#ifdef ITH_HAVE_JPEG
        cmocka_unit_test(test_jpeg_pixels),
        cmocka_unit_test(test_damaged_jpeg),
#endif
        cmocka_unit_test(test_picture_pixels),
        cmocka_unit_test(test_damaged_pictures),
        cmocka_unit_test(test_other_bytes_are_no_picture),
        cmocka_unit_test(test_reference_pictures_bit_for_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
