/* links: ith_image */
/* Pictures: any bytes are a picture of a bounded size or one line of error; what is decoded can be
 * turned into patches. */
#include "image/image.h"

#include "base/mem.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
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
