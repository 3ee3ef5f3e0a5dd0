/* config_check.c - what needs more than one key, what is not built yet, and the layout. */
#include "base/checked.h"
#include "base/file.h"
#include "config/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Position of a key for messages: where it stands, or the configuration as a whole. */
static const ith_yaml_node *key_node(const ith_config *config, const char *key)
{
    int idx = ith_config_find_row(key, strlen(key));
    const config_given *given = idx >= 0 ? &config->origin->given[idx] : NULL;
    if (given && given->value)
        return given->value->line || !given->key ? given->value : given->key;
    return NULL;
}

static ith_status fail_text(const ith_config *config, const char *key, const char *text,
                            ith_status status, ith_error *err)
{
    const ith_yaml_node *node = key_node(config, key);
    const char *file = config->origin->file.root->file;
    if (node && node->line)
        return ith_fail(err, status, "%s:%d:%d: %s: %s", node->file, node->line, node->column, key,
                        text);
    return ith_fail(err, status, "%s: %s: %s", node ? node->file : file, key, text);
}

ith_status ith_config_fail(const ith_config *config, const char *key, ith_error *err,
                           const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return fail_text(config, key, text, ITH_ERR_USAGE, err);
}

bool ith_config_is_set(const ith_config *config, const char *key)
{
    int idx = ith_config_find_row(key, strlen(key));
    ITH_ASSERT(idx >= 0);
    return config->origin->given[idx].value != NULL;
}

int ith_config_num_notes(const ith_config *config)
{
    return (int)config->origin->num_notes;
}

const char *ith_config_note(const ith_config *config, int idx)
{
    ITH_ASSERT(idx >= 0 && idx < config->origin->num_notes);
    return config->origin->notes[idx];
}

ith_config_dtype ith_config_param_dtype(const ith_config *config)
{
    if (config->dtype != ITH_DTYPE_AUTO)
        return config->dtype;
    return config->bf16 ? ITH_DTYPE_BF16 : ITH_DTYPE_F32;
}

/* ---- combinations ---- */

static ith_status check_eval(ith_config *c, ith_error *err)
{
    bool has_data = c->eval_dataset || c->eval_split_ratio > 0;
    bool has_steps = c->eval_steps != ITH_CONFIG_UNSET;
    if (c->eval_dataset && c->eval_split_ratio > 0)
        return ith_config_fail(c, "eval_split_ratio", err,
                               "found beside eval_dataset (keep one of them)");
    if ((int)c->eval_strategy == -1)
        c->eval_strategy = has_steps ? ITH_EVAL_STEPS : has_data ? ITH_EVAL_EPOCH : ITH_EVAL_NO;
    if (c->eval_strategy != ITH_EVAL_NO && !has_data)
        return ith_config_fail(c, has_steps ? "eval_steps" : "eval_strategy", err,
                               "nothing to evaluate on (add eval_dataset or eval_split_ratio)");
    if (c->eval_strategy == ITH_EVAL_STEPS && !has_steps)
        return ith_config_fail(c, "eval_strategy", err, "found steps without eval_steps (add it)");
    if (c->eval_strategy != ITH_EVAL_STEPS && has_steps)
        return ith_config_fail(c, "eval_steps", err, "has no effect (use eval_strategy: steps)");
    return ITH_OK;
}

#define DEFAULT_PACK_WINDOW 8192 /* stands in every dump */

static ith_status check_batching(ith_config *c, ith_error *err)
{
    bool restarts = c->batching_strategy == ITH_BATCHING_DYNAMIC ||
                    c->batching_strategy == ITH_BATCHING_DYNAMIC_PADDING_FREE;
    if (restarts && c->max_steps == ITH_CONFIG_UNSET)
        return ith_config_fail(c, "batching_strategy", err,
                               "dynamic batches have no epochs (add max_steps)");
    if (restarts && !isnan(c->save_epochs))
        return ith_config_fail(c, "save_epochs", err,
                               "dynamic batches have no epochs (use save_steps)");
    if (c->batching_strategy != ITH_BATCHING_PACKING && c->pack_window != DEFAULT_PACK_WINDOW)
        return ith_config_fail(c, "pack_window", err,
                               "has no effect (use batching_strategy: packing)");
    if (c->gradient_accumulation_steps != ITH_CONFIG_UNSET &&
        c->global_batch_size != ITH_CONFIG_UNSET)
        return ith_config_fail(c, "gradient_accumulation_steps", err,
                               "found beside global_batch_size (keep one of them)");
    if (c->global_batch_size != ITH_CONFIG_UNSET && c->global_batch_size % c->micro_batch_size != 0)
        return ith_config_fail(c, "global_batch_size", err,
                               "%lld is not a multiple of micro_batch_size %lld",
                               (long long)c->global_batch_size, (long long)c->micro_batch_size);
    return ITH_OK;
}

static ith_status check_schedule(ith_config *c, ith_error *err)
{
    const ith_lr_scheduler_config *s = &c->lr_scheduler;
    if (s->warmup_steps != ITH_CONFIG_UNSET && s->warmup_ratio > 0)
        return ith_config_fail(c, "lr_scheduler_config.warmup_ratio", err,
                               "found beside warmup_steps (keep one of them)");
    if (s->name == ITH_SCHEDULE_WSD && s->decay_steps == ITH_CONFIG_UNSET &&
        s->warmup_steps == ITH_CONFIG_UNSET && s->warmup_ratio + s->decay_ratio > 1)
        return ith_config_fail(c, "lr_scheduler_config.decay_ratio", err,
                               "%g and warmup_ratio %g are more than the whole run", s->decay_ratio,
                               s->warmup_ratio);
    return ITH_OK;
}

static ith_status check_training(ith_config *c, ith_error *err)
{
    if (c->max_steps == 0)
        return ith_config_fail(c, "max_steps", err, "found 0 (use 1 or more, -1 or null)");
    if (c->max_steps == -1)
        c->max_steps = ITH_CONFIG_UNSET;
    if (c->recompute == ITH_RECOMPUTE_AUTO && !c->enable_activation_checkpointing)
        c->recompute = ITH_RECOMPUTE_NONE;
    return ITH_OK;
}

static ith_status check_diffusion(ith_config *c, ith_error *err)
{
    const ith_diffusion_config *d = &c->diffusion;
    if (d->noise_range_low > d->noise_range_high)
        return ith_config_fail(c, "diffusion_config.noise_range_low", err,
                               "%g is above noise_range_high %g", d->noise_range_low,
                               d->noise_range_high);
    if (d->padding == ITH_END_FULL && c->batching_strategy != ITH_BATCHING_NORMAL &&
        c->batching_strategy != ITH_BATCHING_PADDING_FREE)
        return ith_config_fail(c, "diffusion_config.padding", err,
                               "full beside packed batches (use end or block)");
    if (d->random_tokens > 0 && d->loss_weight == ITH_LOSS_INVERSE)
        return ith_config_fail(c, "diffusion_config.random_tokens", err,
                               "found %g with loss_weight inverse, which has no weight for tokens "
                               "that are not masked (use loss_weight masked)",
                               d->random_tokens);
    return ITH_OK;
}

static ith_status check_dist(ith_config *c, ith_error *err)
{
    if (ith_config_ep_size(c) > 1 && ith_config_zero_stage(c) != 3)
        return ith_config_fail(c, "zero_stage", err, "found %d beside ep_size %lld (use 3)",
                               ith_config_zero_stage(c), (long long)ith_config_ep_size(c));
    if (c->dist.name == ITH_DIST_DEEPSPEED && !c->dist.config_file)
        return ith_config_fail(c, "dist_config", err, "deepspeed without config_file (add it)");
    return ITH_OK;
}

ith_status ith_config_check_together(ith_config *config, config_problems *problems)
{
    static ith_status (*const checks[])(ith_config *, ith_error *) = {
        check_training, check_batching, check_schedule, check_eval, check_dist, check_diffusion};
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        ith_error err = {0};
        ITH_TRY(ith_config_add_problem(problems, NULL, checks[i](config, &err), &err));
    }
    return ITH_OK;
}

/* ---- what is not built yet ---- */

/* Features of keys that are in use otherwise: `switched_on` says when they are asked for. */
static bool is_muon(const ith_config *c)
{
    return c->optim.name == ITH_OPTIM_MUON;
}
static bool is_deepspeed(const ith_config *c)
{
    return c->dist.name == ITH_DIST_DEEPSPEED;
}
static bool is_vllm(const ith_config *c)
{
    return c->sample_backend == ITH_SAMPLE_VLLM;
}

static const struct {
    const char *key;
    bool (*switched_on)(const ith_config *);
    const char *missing;
} missing_features[] = {
    {"optim_config", is_muon, "muon is not built yet (use adamw)"},
    {"dist_config", is_deepspeed, "DeepSpeed files are not read yet (leave dist_config out)"},
    {"sample_backend", is_vllm, "vllm is not here (use hf: the program generates by itself)"},
};

static ith_status fail_row(const ith_config *config, int idx, ith_error *err)
{
    const config_row *row = &ith_config_rows[idx];
    char text[512];
    ith_buf value = {0};
    ith_config_write_value(config, idx, &value);
    snprintf(text, sizeof text, "%.80s is not built yet (%s; use %s)",
             value.data ? value.data : "?", row->why, row->default_text);
    ith_buf_deinit(&value);
    return fail_text(config, row->name, text, ITH_ERR_UNSUPPORTED, err);
}

ith_status ith_config_check_supported(const ith_config *config, ith_error *err)
{
    for (int i = 0; i < ith_config_num_rows; i++) {
        bool differs = false;
        if (ith_config_rows[i].status != ITH_KEY_NOT_YET || !ith_config_row_applies(config, i))
            continue;
        ITH_TRY(ith_config_differs(config, i, &differs, err));
        if (differs)
            return fail_row(config, i, err);
    }
    for (size_t i = 0; i < sizeof missing_features / sizeof *missing_features; i++)
        if (missing_features[i].switched_on(config))
            return fail_text(config, missing_features[i].key, missing_features[i].missing,
                             ITH_ERR_UNSUPPORTED, err);
    return ITH_OK;
}

/* ---- layout ---- */

int ith_config_zero_stage(const ith_config *config)
{
    if (config->zero_stage != ITH_CONFIG_UNSET)
        return ith_narrow(config->zero_stage);
    if (ith_config_ep_size(config) > 1)
        return 3; /* what ranks do not share of a layer is cut by expert and gathered in no other */
    bool fsdp = config->dist.name == ITH_DIST_FSDP2 || config->dist.name == ITH_DIST_FSDPTURBO;
    return !fsdp ? 0 : config->dist.reshard_after_forward ? 3 : 2;
}

int64_t ith_config_ep_size(const ith_config *config)
{
    return config->ep_size != ITH_CONFIG_UNSET       ? config->ep_size
           : config->dist.name == ITH_DIST_FSDPTURBO ? config->dist.ep_size
                                                     : 1;
}

int64_t ith_config_ranks(const ith_config *config)
{
    int64_t dp = config->dp_size == ITH_CONFIG_UNSET ? 1 : config->dp_size, ranks = 0;
    if (config->ranks != ITH_CONFIG_UNSET)
        return config->ranks;
    if (!ith_mul_ok(dp, config->cp_size, &ranks))
        return INT64_MAX;
    int64_t ep = ith_config_ep_size(config);
    return config->dp_size == ITH_CONFIG_UNSET && ranks % ep != 0 ? ith_max_i64(ep, ranks * ep)
                                                                  : ranks;
}

ith_status ith_config_resolve_layout(const ith_config *config, int64_t world_size,
                                     ith_config_layout *out, ith_error *err)
{
    ITH_ASSERT(world_size >= 1);
    ith_config_layout layout = {.world_size = world_size, .cp_size = config->cp_size};
    long long world = (long long)world_size, cp = (long long)config->cp_size;
    if (world_size % config->cp_size != 0)
        return ith_config_fail(config, "cp_size", err,
                               "%lld does not divide the number of processes %lld", cp, world);
    layout.dp_size = world_size / config->cp_size;
    if (config->dp_size != ITH_CONFIG_UNSET && config->dp_size != layout.dp_size)
        return ith_config_fail(config, "dp_size", err,
                               "%lld * cp_size %lld is not the number of processes %lld (use %lld)",
                               (long long)config->dp_size, cp, world, (long long)layout.dp_size);
    layout.ep_size = ith_config_ep_size(config);
    if (world_size % layout.ep_size != 0)
        return ith_config_fail(
            config, config->ep_size == ITH_CONFIG_UNSET ? "dist_config.ep_size" : "ep_size", err,
            "%lld does not divide the number of processes %lld", (long long)layout.ep_size, world);
    if (world_size % config->mp_replicate_size != 0)
        return ith_config_fail(config, "mp_replicate_size", err,
                               "%lld does not divide the number of processes %lld",
                               (long long)config->mp_replicate_size, world);
    int64_t shard = world_size / config->mp_replicate_size;
    if (config->mp_shard_size != ITH_CONFIG_UNSET && config->mp_shard_size != shard)
        return ith_config_fail(config, "mp_shard_size", err,
                               "%lld * mp_replicate_size is not the number of processes %lld "
                               "(use %lld)",
                               (long long)config->mp_shard_size, world, (long long)shard);
    layout.shard_size = shard;
    int64_t pass = 0;
    if (!ith_mul_ok(layout.dp_size, config->micro_batch_size, &pass))
        return ith_config_fail(config, "micro_batch_size", err, "found a number that is too large");
    int64_t steps = config->gradient_accumulation_steps, accumulated = pass;
    if (steps != ITH_CONFIG_UNSET && !ith_mul_ok(pass, steps, &accumulated))
        return ith_config_fail(config, "gradient_accumulation_steps", err,
                               "found a number that is too large");
    layout.global_batch_size =
        config->global_batch_size == ITH_CONFIG_UNSET ? accumulated : config->global_batch_size;
    if (layout.global_batch_size % pass != 0)
        return ith_config_fail(config, "global_batch_size", err,
                               "%lld is not a multiple of dp_size * micro_batch_size = %lld",
                               (long long)layout.global_batch_size, (long long)pass);
    layout.grad_accum = layout.global_batch_size / pass;
    *out = layout;
    return ITH_OK;
}

ith_status ith_config_need_model(const ith_config *config, const char *other, ith_error *err)
{
    const char *dir = config->model, *slash = strchr(dir, '/');
    if (ith_path_is_dir(dir))
        return ITH_OK;
    bool is_hub_name = slash && slash[1] && !strchr(slash + 1, '/') && !strchr("./~", dir[0]);
    if (!is_hub_name)
        return ith_config_fail(config, "model", err,
                               "%s is not a directory (give one with config.json, tokenizer and "
                               "*.safetensors%s)",
                               dir, other);
    return ith_config_fail(config, "model", err,
                           "%s%s is not a directory here (download the model first, e.g. with "
                           "`hf download %s --local-dir DIR`, and give DIR%s)",
                           ith_config_is_set(config, "model") ? "" : "not given; ", dir, dir,
                           other);
}
