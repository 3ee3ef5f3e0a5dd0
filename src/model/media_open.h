/* media_open.h - the media reader (data/media.h) of a model. */
#ifndef ITH_MODEL_MEDIA_OPEN_H
#define ITH_MODEL_MEDIA_OPEN_H

#include "checkpoint/hf_config.h"
#include "config/config.h"
#include "data/media.h"

/* *out NULL: the model reads text only. config: media_dir and the keys of images and videos; NULL:
 * none, but max_pixels for both (<= 0: none). */
ith_status ith_media_open_model(ith_media **out, const char *model_dir, const ith_config *config,
                                int64_t max_pixels, const ith_hf_config *hf,
                                const ith_tokenizer *tokenizer, ith_error *err);

#endif
