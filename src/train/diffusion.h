/* diffusion.h - diffusion training inside a run: ids from the model's own files, noise per epoch.
 */
#ifndef ITH_TRAIN_DIFFUSION_H
#define ITH_TRAIN_DIFFUSION_H

#include "data/noise.h"
#include "train/trainer.h"

/* True when this model, with this config, is trained by diffusion. */
bool ith_is_diffusion(const ith_config *config, const ith_hf_config *hf);
/* Refuses what does not fit together: diffusion of a causal model, a balancing loss. */
ith_status ith_diffusion_check(const ith_config *config, const ith_hf_config *hf, ith_error *err);
/* The mask token: from the config, config.json, or the tokenizer. -1: none names one. */
int64_t ith_diffusion_mask(const ith_config *config, const ith_hf_config *hf,
                           const ith_tokenizer *tokenizer);
/* Options of the noise but for the ids of tokens. */
ith_noise_options ith_diffusion_shape(const ith_config *config, const ith_hf_config *hf);
/* All of them; the mask token is told. */
ith_status ith_diffusion_options(const ith_config *config, const ith_hf_config *hf,
                                 const ith_tokenizer *tokenizer, ith_noise_options *out,
                                 ith_error *err);
/* FLOP of one micro-batch, with the pairs its mask allows. */
double ith_diffusion_flops(const ith_model *model, const ith_noise_options *options,
                           const ith_micro_batch *batch);

/* Epoch number of evaluation noise: the same masks in every evaluation. */
#define ITH_EVAL_EPOCH_NOISE ((int64_t)1 << 40)

#endif
