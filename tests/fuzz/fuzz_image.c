/* links: ith_image */
/* Pictures: any bytes are a picture of a bounded size or one line of error; what is decoded can be
 * turned into patches. Bytes that begin as JSON are the settings of the processors instead. */
#include "image/image.h"
#include "image/video.h"

#include "base/file.h"
#include "base/mem.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char dir[64];

static void remove_dir(void)
{
    ith_remove_tree(dir, NULL);
}

static void write_bytes(const char *name, const uint8_t *data, size_t size)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    FILE *file = fopen(path.data, "wb");
    ITH_ASSERT(file && fwrite(data, 1, size, file) == size && fclose(file) == 0);
    ith_buf_deinit(&path);
}

static void check_processor(const ith_image_processor *p)
{
    ith_grid grid;
    ith_error err = {0};
    ITH_ASSERT(p->patch_size > 0 && p->merge_size > 0 && p->min_pixels <= p->max_pixels);
    if (ith_image_grid(p, 480, 640, &grid, &err) == ITH_OK)
        ITH_ASSERT(grid.h % p->merge_size == 0 && grid.w % p->merge_size == 0);
    else
        ITH_ASSERT(err.text[0]);
}

static void run_settings(const uint8_t *data, size_t size)
{
    ith_error err = {0};
    ith_image_processor image;
    ith_video_processor video;
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "fuzz-image-%ld", (long)getpid());
        ITH_ASSERT(ith_make_dirs(dir, NULL) == ITH_OK);
        atexit(remove_dir);
    }
    write_bytes("preprocessor_config.json", data, size);
    write_bytes("video_preprocessor_config.json", data, size);
    if (ith_image_processor_load(&image, dir, &err) == ITH_OK)
        check_processor(&image);
    else
        ITH_ASSERT(err.text[0]);
    ith_error_clear(&err);
    if (ith_video_processor_load(&video, dir, &err) == ITH_OK)
        check_processor(&video.image);
    else
        ITH_ASSERT(err.text[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 0 && data[0] == '{') {
        run_settings(data, size);
        return 0;
    }
    static const ith_image_processor small = {.patch_size = 4,
                                              .temporal_patch_size = 2,
                                              .merge_size = 2,
                                              .min_pixels = 64,
                                              .max_pixels = 4096,
                                              .std = {1, 1, 1}};
    ith_error err = {0};
    ith_image image = {0};
    if (ith_image_decode(&image, data, (int64_t)size, "input", 1 << 20, &err) != ITH_OK) {
        ITH_ASSERT(err.text[0] && !image.rgb);
        return 0;
    }
    ITH_ASSERT(image.width > 0 && image.height > 0 && image.width * image.height <= 1 << 20);
    ith_grid grid;
    float *pixels = NULL;
    if (ith_image_grid(&small, image.height, image.width, &grid, &err) == ITH_OK) {
        ITH_ASSERT(grid.t == 1 && grid.h % 2 == 0 && grid.w % 2 == 0);
        int64_t values = ith_grid_patches(grid) * ith_image_patch_width(&small);
        if (ith_alloc((void **)&pixels, values * 4, "patches", &err) == ITH_OK)
            (void)ith_image_fill_patches(&small, &image, grid, 0, 2, pixels, &err);
    }
    ith_free(pixels);
    ith_image_deinit(&image);
    return 0;
}
