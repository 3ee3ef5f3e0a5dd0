/* diffusion.c - from a config and a model's files to the options of its noise. */
#include "train/diffusion.h"

#include "base/log.h"
#include "model/llada2.h"

#include <string.h>

bool ith_is_diffusion(const ith_config *config, const ith_hf_config *hf)
{
    (void)config;
    return hf->family == ITH_FAMILY_LLADA2;
}

ith_status ith_diffusion_check(const ith_config *config, const ith_hf_config *hf, ith_error *err)
{
    bool diffusion = ith_is_diffusion(config, hf);
    if (!diffusion && config->diffusion.name != ITH_DIFFUSION_NONE)
        return ith_config_fail(config, "diffusion_config", err,
                               "%s is not a diffusion model (use llada2_moe, or leave it out)",
                               hf->model_type);
    if (diffusion && config->router_aux_loss_coef > 0)
        return ith_config_fail(config, "router_aux_loss_coef", err,
                               "%s balances its experts without a loss (use 0)", hf->model_type);
    return ITH_OK;
}

int64_t ith_diffusion_mask(const ith_config *config, const ith_hf_config *hf,
                           const ith_tokenizer *tokenizer)
{
    int64_t id = config->diffusion.mask_token_id;
    return id == ITH_CONFIG_UNSET ? ith_llada2_mask_id(hf, tokenizer) : id;
}

static ith_status find_mask(const ith_config *config, const ith_hf_config *hf,
                            const ith_tokenizer *tokenizer, int32_t *out, ith_error *err)
{
    int64_t id = ith_diffusion_mask(config, hf, tokenizer);
    if (id < 0)
        return ith_config_fail(config, "diffusion_config.mask_token_id", err,
                               "neither config.json nor the tokenizer names a mask token (give its "
                               "id)");
    if (id >= hf->vocab_size)
        return ith_config_fail(config, "diffusion_config.mask_token_id", err,
                               "%lld is outside vocab_size %lld", (long long)id,
                               (long long)hf->vocab_size);
    *out = (int32_t)id;
    const char *bytes = NULL;
    int64_t len = 0;
    bool added = false, special = false;
    ith_buf text = {0};
    if (ith_tokenizer_token(tokenizer, *out, &bytes, &len, &added, &special) == ITH_OK)
        ith_buf_printf(&text, "%.*s", (int)len, bytes);
    bool looks = text.data && strstr(text.data, "mask") != NULL;
    ith_log(looks ? ITH_LOG_INFO : ITH_LOG_WARN, "diffusion", "mask token: id %lld, \"%s\"%s",
            (long long)id, text.data ? text.data : "not in the tokenizer",
            looks ? "" : " (does not look like a mask; diffusion_config.mask_token_id sets it)");
    ith_buf_deinit(&text);
    return ITH_OK;
}

ith_noise_options ith_diffusion_shape(const ith_config *config, const ith_hf_config *hf)
{
    const ith_diffusion_config *d = &config->diffusion;
    _Static_assert((int)ITH_END_FULL == (int)ITH_PAD_FULL &&
                       (int)ITH_END_BLOCK == (int)ITH_PAD_BLOCK &&
                       (int)ITH_LOSS_INVERSE == (int)ITH_WEIGHT_INVERSE,
                   "config and noise name the same things");
    return (ith_noise_options){.blocks = d->name != ITH_DIFFUSION_RANDOM_MASK,
                               .block_size = d->block_size,
                               .low = d->noise_range_low,
                               .high = d->noise_range_high,
                               .complementary = d->complementary,
                               .random = d->random_tokens,
                               .vocab_size = hf->vocab_size,
                               .same_token = d->same_token_labels,
                               .weight = (ith_noise_weight)d->loss_weight,
                               .padding = (ith_noise_padding)d->padding,
                               .full_len = config->cutoff_len,
                               .per_micro_batch = d->normalizer == ITH_NORM_MICRO_BATCH,
                               .seed = (uint64_t)config->seed};
}

ith_status ith_diffusion_options(const ith_config *config, const ith_hf_config *hf,
                                 const ith_tokenizer *tokenizer, ith_noise_options *out,
                                 ith_error *err)
{
    ith_noise_options o = ith_diffusion_shape(config, hf);
    ITH_TRY(find_mask(config, hf, tokenizer, &o.mask_id, err));
    int64_t end = ith_tokenizer_eos(tokenizer);
    if (end < 0 && hf->num_eos_token_ids)
        end = hf->eos_token_ids[0];
    if (end < 0)
        end = hf->pad_token_id;
    if (end < 0 && o.padding != ITH_PAD_NONE)
        return ith_config_fail(config, "diffusion_config.padding", err,
                               "the model names no end token (use none)");
    o.end_id = (int32_t)end;
    *out = o;
    return ITH_OK;
}

double ith_diffusion_flops(const ith_model *model, const ith_noise_options *o,
                           const ith_micro_batch *b)
{
    ith_flops f = ith_model_flops(model, b->cu_seqlens, b->num_docs, b->num_labels);
    double pairs = 0, causal = 0;
    for (int64_t d = 0; d < b->num_docs; d++) {
        int64_t begin = b->cu_seqlens[d], len = b->cu_seqlens[d + 1] - begin;
        causal += (double)len * (double)len / 2;
        for (int64_t i = 0; i < len; i++) {
            ith_key_range r =
                ith_keys_seen(o->block_size, o->blocks, len, b->noisy ? b->noisy[d] : 0, i,
                              b->position_ids[begin + i]);
            pairs += (double)(r.hi[0] - r.lo[0] + r.hi[1] - r.lo[1]);
        }
    }
    double unread = (double)(b->num_tokens - b->num_labels) * f.last_row;
    return f.linear - unread + f.head + (causal > 0 ? f.attention * pairs / causal : 0);
}
