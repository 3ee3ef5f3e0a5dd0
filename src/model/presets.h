/* presets.h - published Qwen3, Qwen3.5 and LLaDA2 shapes, and a few small ones, for `ithaca init`,
 * tests and benches.
 */
#ifndef ITH_MODEL_PRESETS_H
#define ITH_MODEL_PRESETS_H

#include "base/json.h"
#include "tensor/dtype.h"

/* The names, separated by blanks; index i of ith_preset_config. */
extern const char ith_preset_words[];
int ith_preset_find(const char *name); /* -1: none */
/* config.json of preset i. eos_token_id -1: null. Caller frees with json_decref. */
ith_status ith_preset_config(int preset, int64_t vocab_size, int64_t eos_token_id, ith_dtype dtype,
                             json_t **out, ith_error *err);

/* Words of the published models of that shape. */
int64_t ith_preset_vocab_size(int preset);
/* A diffusion model: its tokenizer needs a mask token. */
bool ith_preset_is_diffusion(int preset);
/* A model with a vision tower: its tokenizer needs the tokens of images and videos. */
bool ith_preset_sees(int preset);
/* preprocessor_config.json (video: that of videos) of such a model. Caller frees. */
ith_status ith_preset_processor(int preset, bool video, json_t **out, ith_error *err);

#endif
