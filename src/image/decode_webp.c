/* decode_webp.c - WebP through libwebp, from memory: lossy, lossless, with alpha (dropped), turned
 * as its EXIF orientation says; of an animation there is no picture. */
#include "image/decode.h"

#ifdef ITH_HAVE_WEBP
#include <webp/decode.h>

static const char *status_text(VP8StatusCode code)
{
    switch (code) {
    case VP8_STATUS_OUT_OF_MEMORY:
        return "out of memory";
    case VP8_STATUS_NOT_ENOUGH_DATA:
    case VP8_STATUS_SUSPENDED:
        return "the file ends early";
    case VP8_STATUS_UNSUPPORTED_FEATURE:
        return "a feature that is not supported";
    default:
        return "broken bits";
    }
}

ith_status ith_decode_webp(ith_image *out, const uint8_t *bytes, int64_t size, int64_t max_pixels,
                           ith_error *err)
{
    WebPDecoderConfig config;
    ith_image image = {0};
    if (!WebPInitDecoderConfig(&config))
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "the library of WebP is another one");
    VP8StatusCode code = WebPGetFeatures(bytes, (size_t)size, &config.input);
    if (code != VP8_STATUS_OK)
        return ith_fail(err, ITH_ERR_FORMAT, "damaged WebP: %s", status_text(code));
    if (config.input.has_animation)
        return ith_fail(err, ITH_ERR_FORMAT, "an animated WebP (give a single picture)");
    ITH_TRY(ith_image_alloc(&image, config.input.width, config.input.height, max_pixels, err));
    config.output.colorspace = MODE_RGB;
    config.output.is_external_memory = 1;
    config.output.u.RGBA.rgba = image.rgb;
    config.output.u.RGBA.stride = (int)(image.width * 3);
    config.output.u.RGBA.size = (size_t)(image.width * image.height * 3);
    code = WebPDecode(bytes, (size_t)size, &config);
    WebPFreeDecBuffer(&config.output);
    if (code != VP8_STATUS_OK) {
        ith_image_deinit(&image);
        return ith_fail(err, code == VP8_STATUS_OUT_OF_MEMORY ? ITH_ERR_MEMORY : ITH_ERR_FORMAT,
                        "damaged WebP: %s", status_text(code));
    }
    ith_status status = ith_image_turn(&image, ith_exif_of_webp(bytes, size), err);
    if (status == ITH_OK)
        *out = image;
    else
        ith_image_deinit(&image);
    return status;
}
#else
typedef int ith_no_webp; /* libwebp is absent */
#endif
