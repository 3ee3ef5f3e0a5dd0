/* llada2.h - what a LLaDA2 model's files do not always say. */
#ifndef ITH_MODEL_LLADA2_H
#define ITH_MODEL_LLADA2_H

#include "checkpoint/hf_config.h"
#include "tokenizer/tokenizer.h"

/* Id of the mask token: mask_token_id of config.json, else the tokenizer's <|mask|>, else that of
 * the published vocabulary. -1: none. */
int64_t ith_llada2_mask_id(const ith_hf_config *config, const ith_tokenizer *tokenizer);

#endif
