/* media_open.c - options of the media reader out of config.json and the configuration. */
#include "model/media_open.h"

#include "model/vision.h"

#include <math.h>

static int64_t or_zero(int64_t value)
{
    return value == ITH_CONFIG_UNSET ? 0 : value;
}

ith_status ith_media_open_model(ith_media **out, const char *model_dir, const ith_config *config,
                                int64_t max_pixels, const ith_hf_config *hf,
                                const ith_tokenizer *tokenizer, ith_error *err)
{
    ith_media_options o = {.model_dir = model_dir,
                           .tokenizer = tokenizer,
                           .tokens = {.image = (int32_t)hf->image_token_id,
                                      .video = (int32_t)hf->video_token_id,
                                      .merge = hf->vision.spatial_merge_size}};
    *out = NULL;
    if (max_pixels > 0)
        o.image_max_pixels = o.video_max_pixels = max_pixels;
    if (hf->vision.hidden_size == 0)
        return ITH_OK;
    if (config) {
        o.media_dir = config->media_dir;
        o.image_max_pixels = or_zero(config->image_max_pixels);
        o.image_min_pixels = or_zero(config->image_min_pixels);
        o.video_max_pixels = or_zero(config->video_max_pixels);
        o.video_min_pixels = or_zero(config->video_min_pixels);
        o.video_maxlen = or_zero(config->video_maxlen);
        o.video_fps = isnan(config->video_fps) ? 0 : config->video_fps;
    }
    ITH_TRY(ith_media_open(out, &o, err));
    int64_t found = ith_media_patch_width(*out), wanted = ith_vision_patch_width(&hf->vision);
    if (found == wanted)
        return ITH_OK;
    ith_media_close(*out);
    *out = NULL;
    return ith_fail(err, ITH_ERR_FORMAT,
                    "%s: preprocessor_config.json makes patches of %lld values, vision_config of "
                    "config.json wants %lld (patch_size, temporal_patch_size)",
                    model_dir, (long long)found, (long long)wanted);
}
