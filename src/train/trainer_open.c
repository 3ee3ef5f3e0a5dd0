/* trainer_open.c - opening a run, cheapest mistakes first: request, model config, tokenizer, data,
 * memory plan. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/env.h"
#include "base/file.h"
#include "checkpoint/model_dir.h"
#include "checkpoint/train_state.h"
#include "model/media_open.h"
#include "train/batch_work.h"
#include "train/diffusion.h"
#include "train/trainer_internal.h"

void ith_trainer_say(const ith_trainer_hooks *hooks, const char *fmt, ...)
{
    if (!hooks || !hooks->text)
        return;
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    hooks->text(hooks->arg, text);
}

static bool same_directory(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Headers only: a truncated download is told before hours of tokenizing. */
static ith_status check_weights(const char *dir, ith_error *err)
{
    ith_st_reader *reader = NULL;
    ITH_TRY(ith_st_open(&reader, dir, err));
    ith_st_close(reader);
    return ITH_OK;
}

/* A named checkpoint that is not there is told before the data is read. A run that begins anew
 * beside the checkpoints of another one is told of them: auto takes, and save_total_limit keeps,
 * the highest number, whosever it is. */
static ith_status check_checkpoints(const ith_config *c, const ith_trainer_hooks *hooks,
                                    ith_error *err)
{
    const char *from = c->resume_from_checkpoint;
    if (from && strcmp(from, "auto") != 0 && !ith_path_is_dir(from))
        return ith_config_fail(c, "resume_from_checkpoint", err,
                               "found %s, which is no directory (give a checkpoint, or auto)",
                               from);
    if (from || !c->output_dir || !ith_path_is_dir(c->output_dir))
        return ITH_OK;
    ith_buf latest = {0};
    ith_status status = ith_train_state_find_latest(c->output_dir, &latest, err);
    if (status == ITH_OK && latest.len)
        ith_trainer_say(hooks,
                        "%s is of an earlier run; this one begins anew beside it "
                        "(resume_from_checkpoint=auto goes on, another output_dir keeps apart)",
                        latest.data);
    ith_buf_deinit(&latest);
    return status;
}

/* Told before hours of tokenizing, not after. */
static ith_status check_output(const ith_config *c, bool plan_only, ith_error *err)
{
    const char *out = c->output_dir;
    if (out && ith_path_exists(out) && !ith_path_is_dir(out))
        return ith_config_fail(c, "output_dir", err, "found %s, which is no directory", out);
    if (!out || plan_only)
        return ITH_OK;
    ith_buf dir = {0};
    ith_buf_puts(&dir, out);
    while (!dir.failed && dir.len && !ith_path_exists(dir.data)) { /* up to what is there */
        while (dir.len && dir.data[dir.len - 1] != '/')
            dir.data[--dir.len] = '\0';
        while (dir.len > 1 && dir.data[dir.len - 1] == '/')
            dir.data[--dir.len] = '\0';
    }
    ith_status status = ith_buf_check(&dir, "output_dir", err);
    const char *there = dir.len ? dir.data : ".";
    if (status == ITH_OK && access(there, W_OK | X_OK) != 0)
        status = ith_config_fail(c, "output_dir", err, "found %s, cannot write in %s (%s)", out,
                                 there, strerror(errno));
    ith_buf_deinit(&dir);
    return status;
}

static ith_status open_model_files(ith_trainer *t, bool plan_only, ith_error *err)
{
    const char *dir = t->config->model, *out = t->config->output_dir;
    ITH_TRY(ith_config_need_model(t->config, "", err));
    if (same_directory(dir, out))
        return ith_config_fail(t->config, "output_dir", err,
                               "found %s, the directory of the model (give another one)", out);
    ITH_TRY(check_output(t->config, plan_only, err));
    ITH_TRY(ith_model_dir_check(
        dir, ITH_DIR_CONFIG | ITH_DIR_TOKENIZER | (plan_only ? 0 : ITH_DIR_WEIGHTS), err));
    if (!plan_only)
        ITH_TRY(check_weights(dir, err));
    ITH_TRY(ith_hf_config_load(&t->hf, dir, err));
    ITH_TRY(ith_diffusion_check(t->config, &t->hf, err));
    ITH_TRY(ith_tokenizer_open(&t->tokenizer, dir, err));
    ITH_TRY(ith_chat_open(&t->chat, dir, t->config->custom_chat_template, t->tokenizer, err));
    if (ith_is_diffusion(t->config, &t->hf))
        ITH_TRY(ith_diffusion_options(t->config, &t->hf, t->tokenizer, &t->noise, err));
    if (ith_tokenizer_size(t->tokenizer) > t->hf.vocab_size)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "%s: the tokenizer has ids up to %lld, vocab_size of config.json is %lld",
                        dir, (long long)ith_tokenizer_size(t->tokenizer) - 1,
                        (long long)t->hf.vocab_size);
    return ITH_OK;
}

/* A chat template may write a token that the tokenizer has and the embedding has not. */
static ith_status check_ids(const ith_trainer *t, const ith_samples *samples, const char *path,
                            ith_error *err)
{
    int64_t max = ith_samples_max_id(samples);
    return max < t->hf.vocab_size ? ITH_OK
                                  : ith_fail(err, ITH_ERR_FORMAT,
                                             "%s: token id %lld, vocab_size of config.json is %lld",
                                             path, (long long)max, (long long)t->hf.vocab_size);
}

static ith_status open_media(ith_trainer *t, ith_error *err)
{
    ITH_TRY(
        ith_media_open_model(&t->media, t->config->model, t->config, 0, &t->hf, t->tokenizer, err));
    const char *const keys[] = {"freeze_vision_tower", "freeze_multi_modal_projector",
                                "freeze_language_model"};
    const bool set[] = {t->config->freeze_vision_tower, t->config->freeze_multi_modal_projector,
                        t->config->freeze_language_model};
    for (int i = 0; i < 3; i++)
        if (set[i] && !t->media)
            return ith_config_fail(t->config, keys[i], err,
                                   "true, but %s has no vision tower (leave it out)",
                                   t->hf.model_type);
    return ITH_OK;
}

/* Rows of this rank's slice. */
static void own_rows(const void *arg, int64_t tokens, int64_t ranges[4])
{
    const ith_mesh *mesh = arg;
    ith_stretch own[2];
    ith_cp_stretches(mesh, tokens, own);
    for (int i = 0; i < 2; i++) {
        ranges[2 * i] = own[i].first;
        ranges[2 * i + 1] = own[i].first + own[i].count;
    }
}

static ith_run_shape shape_of(const ith_trainer *t)
{
    return (ith_run_shape){.config = t->config,
                           .layout = &t->layout,
                           .hf = &t->hf,
                           .samples = t->samples,
                           .noise = ith_is_diffusion(t->config, &t->hf) ? &t->noise : NULL,
                           .flop_per_byte = ith_flop_per_byte(t->session.ctx.device)};
}

/* A cp group shares micro-batches, and reads and encodes each image once. Of a diffusion model the
 * rows are made where the noise is. */
static void share_ranks(const ith_trainer *t, bool training, ith_batcher_options *o)
{
    ith_run_shape shape = shape_of(t);
    ith_deal_options(&shape, training, o);
    o->cp_rank = o->media_rank = t->mesh ? t->mesh->cp_rank : 0;
    o->media_ranks = o->cp_size;
    o->media = t->media;
    if (shape.noise) {
        o->no_rows = true;
    } else if (o->cp_size > 1) {
        o->own_rows = own_rows;
        o->own_arg = t->mesh;
    }
}

static ith_status check_whole(const ith_trainer *t, ith_error *err)
{
    if (t->layout.cp_size == 1 && t->config->cp_whole_documents == ITH_CP_WHOLE_ALWAYS)
        return ith_config_fail(t->config, "cp_whole_documents", err,
                               "always: one rank has every document whole (use auto)");
    return ITH_OK;
}

/* What the ranks of a job have in common of their data. */
typedef struct {
    const char *cache_dir; /* NULL: no cache on disk */
    struct {
        char train[65], eval[65];
    } names; /* identities; empty: not known yet */
} shared_data;

/* While one rank tokenizes the others of its machine wait: it may have all cores. */
static ith_status open_wide_pool(const ith_trainer *t, ith_pool **out, ith_error *err)
{
    int threads = 0;
    if (!ith_trainer_ranks(t) || t->config->nproc > 0 || t->config->threads > 0 ||
        ith_env(ITH_ENV_THREADS))
        return ITH_OK;
    ITH_TRY(ith_pool_default_threads(&threads, err));
    return ith_pool_create(out, threads, err);
}

static ith_status open_samples(ith_trainer *t, const shared_data *shared, bool eval, ith_pool *pool,
                               ith_samples **out, ith_error *err)
{
    const char *identity = eval ? shared->names.eval : shared->names.train;
    ith_pool *wide = NULL;
    if (!identity[0])
        ITH_TRY(open_wide_pool(t, &wide, err));
    ith_samples_options o =
        ith_samples_options_from(t->config, eval, t->tokenizer, t->chat, wide ? wide : pool);
    o.media = t->media;
    o.mask_id = ith_is_diffusion(t->config, &t->hf) ? &t->noise.mask_id : NULL;
    o.cache_dir = shared->cache_dir;
    o.identity = identity[0] ? identity : NULL;
    ith_status status = ith_samples_open(out, &o, err);
    ith_pool_destroy(wide);
    return status;
}

static ith_status open_data(ith_trainer *t, const shared_data *shared, ith_error *err)
{
    const ith_config *c = t->config;
    if (!c->train_dataset)
        return ith_config_fail(
            c, "train_dataset", err,
            "not given; nothing to train on (give a .jsonl, .json or data-set .yaml)");
    if (c->nproc > 0)
        ITH_TRY(ith_pool_create(&t->data_pool, (int)c->nproc, err));
    ith_pool *pool = t->data_pool ? t->data_pool : t->session.pool;
    ITH_TRY(open_media(t, err));
    ITH_TRY(open_samples(t, shared, false, pool, &t->samples, err));
    int64_t num_train = 0, num_eval = 0;
    if (c->eval_dataset) {
        ITH_TRY(open_samples(t, shared, true, pool, &t->eval_samples, err));
    } else if (c->eval_split_ratio > 0) {
        ITH_TRY(ith_samples_split(t->samples, c->eval_split_ratio, (uint64_t)c->seed,
                                  &t->train_subset, &num_train, &t->eval_subset, &num_eval, err));
        t->eval_samples = t->samples;
        t->num_held_out = num_eval;
    }
    ITH_TRY(check_whole(t, err));
    ITH_TRY(check_ids(t, t->samples, c->train_dataset, err));
    if (t->eval_samples && t->eval_samples != t->samples)
        ITH_TRY(check_ids(t, t->eval_samples, c->eval_dataset, err));
    int64_t dp_rank = t->mesh ? t->mesh->dp_rank : 0;
    ith_batcher_options b = ith_batcher_options_from(c, &t->layout, dp_rank);
    b.subset = t->train_subset;
    b.num_subset = num_train;
    b.pool = pool;
    share_ranks(t, true, &b);
    ITH_TRY(ith_batcher_create(&t->batcher, t->samples, &b, err));
    if (t->eval_samples) {
        b = ith_batcher_eval_options(c, &t->layout, dp_rank);
        b.subset = t->eval_subset;
        b.num_subset = num_eval;
        b.pool = pool;
        share_ranks(t, false, &b);
        ITH_TRY(ith_batcher_create(&t->eval_batcher, t->eval_samples, &b, err));
        ITH_TRY(ith_batcher_save(t->eval_batcher, &t->eval_start, err));
    }
    t->steps_per_epoch = ith_batcher_steps_per_epoch(t->batcher);
    t->total_steps = c->max_steps > 0 ? c->max_steps : ith_batcher_total_steps(t->batcher);
    if (t->total_steps <= 0)
        return ith_fail(err, ITH_ERR_USAGE, "%s: %lld samples make no optimizer step",
                        c->train_dataset, (long long)ith_samples_count(t->samples));
    return ITH_OK;
}

/* Largest batch of training and evaluation. */
static ith_batch_limits clean_limits(const ith_trainer *t)
{
    ith_batch_limits a = ith_batcher_limits(t->batcher), e = {0};
    if (t->eval_batcher)
        e = ith_batcher_limits(t->eval_batcher);
    return (ith_batch_limits){
        .max_tokens = ith_max_i64(a.max_tokens, e.max_tokens),
        .max_docs = ith_max_i64(a.max_docs, e.max_docs),
        .max_labels = ith_max_i64(a.max_labels, e.max_labels),
        .max_doc_tokens = ith_max_i64(a.max_doc_tokens, e.max_doc_tokens),
        .max_whole_tokens = ith_max_i64(a.max_whole_tokens, e.max_whole_tokens),
        .max_micro = ith_max_i64(a.max_micro, e.max_micro),
        .max_patches = ith_max_i64(a.max_patches, e.max_patches),
        .max_segments = ith_max_i64(a.max_segments, e.max_segments),
        .max_segment_patches = ith_max_i64(a.max_segment_patches, e.max_segment_patches),
        .max_whole_patches = ith_max_i64(a.max_whole_patches, e.max_whole_patches),
        .max_whole_segments = ith_max_i64(a.max_whole_segments, e.max_whole_segments)};
}

static ith_status open_noise(ith_trainer *t, const ith_trainer_hooks *hooks, ith_error *err)
{
    int64_t recorded = ith_samples_num_trajectories(t->samples);
    if (!ith_is_diffusion(t->config, &t->hf) && recorded)
        return ith_config_fail(t->config, "train_dataset", err,
                               "%lld samples are trajectories of a diffusion model, and %s is none "
                               "(leave their reveal_steps out)",
                               (long long)recorded, t->hf.model_type);
    if (!ith_is_diffusion(t->config, &t->hf))
        return ITH_OK;
    ith_batch_limits limits = clean_limits(t);
    if (ith_cp_size(t->mesh) > 1) {
        t->noise.own_rows = own_rows;
        t->noise.own_arg = t->mesh;
    }
    ITH_TRY(ith_noiser_create(&t->noiser, &t->noise, &limits, err));
    const ith_noise_options *o = &t->noise;
    ith_trainer_say(hooks, "diffusion: %s, %g to %g of each answer masked by token %d; loss: %s",
                    o->blocks ? "blocks" : "random masks over the whole sequence", o->low, o->high,
                    (int)o->mask_id,
                    o->per_micro_batch ? "mean of each micro-batch, then over micro-batches"
                    : o->weight == ITH_WEIGHT_INVERSE
                        ? "masked tokens by 1/share, mean over answer tokens of the step"
                        : "mean over masked tokens of the step");
    if (o->random > 0)
        ith_trainer_say(hooks,
                        "token editing: %g of the answer tokens that are not masked are "
                        "replaced by random ids and trained like masked ones",
                        o->random);
    if (t->config->diffusion.confidence_beta > 0)
        ith_trainer_say(hooks,
                        "confidence loss: %g times the entropy of masked tokens that are "
                        "right already, mean over %s",
                        t->config->diffusion.confidence_beta,
                        o->per_micro_batch ? "those of each micro-batch" : "all masked tokens");
    if (recorded)
        ith_trainer_say(hooks, "path distillation: %lld of %lld samples are trajectories",
                        (long long)recorded, (long long)ith_samples_count(t->samples));
    return ITH_OK;
}

static ith_step_config step_config(const ith_trainer *t, ith_batch_limits limits)
{
    const ith_config *c = t->config;
    ith_step_config s = {
        .mesh = t->mesh,
        .zero_stage = ith_config_zero_stage(c),
        .accumulates = t->layout.grad_accum > 1,
        .max_tokens = limits.max_tokens,
        .max_docs = limits.max_docs,
        .max_labels = limits.max_labels,
        .max_doc_tokens = limits.max_doc_tokens,
        .max_whole_tokens = limits.max_whole_tokens,
        .vision = {limits.max_patches, limits.max_segments, limits.max_segment_patches,
                   limits.max_whole_patches, limits.max_whole_segments},
        .block = t->noiser && t->noise.blocks ? t->noise.block_size : 0,
        .noisy = t->noiser && t->noise.blocks,
        .bidirectional = t->noiser && !t->noise.blocks,
        .confidence_beta = t->noiser ? (float)c->diffusion.confidence_beta : 0,
        .mean_of_right = t->noiser && t->noise.per_micro_batch,
        .chunk_rows = c->chunk_loss_size == ITH_CONFIG_UNSET ? 0 : c->chunk_loss_size,
        .training = true,
        .evaluates = t->eval_batcher != NULL,
        .fp32_master = c->master_dtype != ITH_DTYPE_BF16,
        .bf16_moments = c->master_dtype == ITH_DTYPE_BF16,
        .keep = c->recompute == ITH_RECOMPUTE_AUTO ? -1 : (int)c->recompute - ITH_RECOMPUTE_NONE,
        .memory_limit = c->memory_limit == ITH_CONFIG_UNSET ? 0 : c->memory_limit,
        .max_grad_norm = (float)c->max_grad_norm,
        .seed = (uint64_t)c->seed,
        .linear_cp = (ith_linear_cp)c->linear_cp_mode};
    return s;
}

static ith_status create_model(ith_trainer *t, const ith_step_config *s, ith_dtype dtype,
                               ith_error *err)
{
    const ith_config *c = t->config;
    ITH_TRY((s->vision.max_patches ? ith_model_create_multimodal : ith_model_create)(
        &t->model, &t->hf, dtype, s->max_doc_tokens, err));
    return ith_model_freeze(t->model,
                            (ith_model_parts){c->freeze_vision_tower,
                                              c->freeze_multi_modal_projector,
                                              c->freeze_language_model},
                            err);
}

static ith_status open_step(ith_trainer *t, ith_batch_limits batch, bool plan_only, ith_error *err)
{
    _Static_assert(ITH_RECOMPUTE_ATTENTION - ITH_RECOMPUTE_NONE == ITH_KEEP_ATTENTION &&
                       ITH_RECOMPUTE_FULL - ITH_RECOMPUTE_NONE == ITH_KEEP_INPUT,
                   "recompute names what keep does not");
    _Static_assert((int)ITH_LINEAR_CP_HEADS == (int)ITH_LINEAR_HEADS &&
                       (int)ITH_LINEAR_CP_STATES == (int)ITH_LINEAR_STATES,
                   "config and step name the same things");
    ith_dtype dtype = ith_config_param_dtype(t->config) == ITH_DTYPE_F32 ? ITH_F32 : ITH_BF16;
    ith_step_config s = step_config(t, batch);
    int64_t *limits[] = {&s.max_tokens,
                         &s.max_docs,
                         &s.max_labels,
                         &s.max_doc_tokens,
                         &s.vision.max_patches,
                         &s.vision.max_segments,
                         &s.vision.max_segment_patches};
    for (size_t i = 0; i < sizeof limits / sizeof *limits;
         i++) /* data-parallel ranks have different batches, and one plan */
        ITH_TRY(ith_mesh_max(t->mesh, limits[i], err));
    ITH_TRY(ith_trainer_agree(t, create_model(t, &s, dtype, err), err));
    t->model->aux_coef = (float)ith_aux_coef(t->config, &t->hf);
    t->session.ctx.deterministic = t->config->full_determinism;
    return ith_step_create(&t->step, t->model, &t->session.ctx, &s, plan_only);
}

ith_status ith_trainer_agree(const ith_trainer *t, ith_status status, ith_error *err)
{
    return t->mesh && t->mesh->world && !t->alone ? ith_comm_agree(t->mesh->world, status, err)
                                                  : status;
}

/* Ranks of the job that runs, or of the one that the config describes. */
static int64_t world_size(const ith_config *c, const ith_comm *world, bool plan_only)
{
    if (world && world->size > 1)
        return world->size;
    return plan_only ? ith_config_ranks(c) : 1;
}

static ith_status open_mesh(ith_trainer *t, ith_comm *world, bool plan_only, ith_error *err)
{
    const ith_config *c = t->config;
    int64_t size = world_size(c, world, plan_only);
    if (world && world->size > 1 && c->ranks != ITH_CONFIG_UNSET && c->ranks != world->size)
        return ith_config_fail(c, "ranks", err, "found %lld, the launcher started %lld",
                               (long long)c->ranks, (long long)world->size);
    ITH_TRY(ith_config_resolve_layout(c, size, &t->layout, err));
    if (size == 1)
        return ITH_OK;
    if (world && world->size > 1)
        ITH_TRY(ith_mesh_open(&t->mesh_store, world, c->cp_size, err));
    else
        ith_mesh_imagine(&t->mesh_store, size, c->cp_size);
    t->mesh = &t->mesh_store;
    ITH_TRY(ith_mesh_set_shard(&t->mesh_store, t->layout.shard_size, err));
    return ith_mesh_set_experts(&t->mesh_store, t->layout.ep_size, err);
}

static ith_status check_mesh(const ith_trainer *t, ith_error *err)
{
    int64_t value_heads = t->hf.linear_num_value_heads;
    if (value_heads > 0 && t->layout.cp_size > value_heads &&
        t->config->linear_cp_mode == ITH_LINEAR_CP_HEADS)
        return ith_config_fail(t->config, "cp_size", err,
                               "%lld is more than linear_num_value_heads %lld (use at most that "
                               "many, or linear_cp_mode states)",
                               (long long)t->layout.cp_size, (long long)value_heads);
    const char *ep_key =
        ith_config_is_set(t->config, "ep_size") ? "ep_size" : "dist_config.ep_size";
    if (t->layout.ep_size > 1 && t->hf.num_experts == 0)
        return ith_config_fail(t->config, ep_key, err, "%lld, and %s has no experts (use 1)",
                               (long long)t->layout.ep_size, t->hf.model_type);
    if (t->hf.num_experts % t->layout.ep_size != 0)
        return ith_config_fail(t->config, ep_key, err, "%lld does not divide num_experts %lld",
                               (long long)t->layout.ep_size, (long long)t->hf.num_experts);
    return ITH_OK;
}

/* Attention of cp_size ranks: the scheme that sends least, or the one of cp_mode. */
static ith_status choose_scheme(ith_trainer *t, ith_error *err)
{
    static const ith_ring_wish wishes[] = {ITH_RING_AUTO, ITH_RING_NEVER, ITH_RING_ONLY,
                                           ITH_RING_MIXED};
    const ith_config *c = t->config;
    const ith_hf_config *hf = &t->hf;
    bool in_order = hf->linear_num_value_heads > 0; /* states pass from slice to slice */
    ith_ring_wish wish = wishes[c->cp_mode];
    if (t->layout.cp_size == 1)
        return ITH_OK;
    if (wish == ITH_RING_AUTO && t->session.cuda && t->layout.cp_size <= hf->num_attention_heads)
        wish = ITH_RING_NEVER; /* over fast links a whole attention beats its parts */
    int64_t bytes = ith_config_param_dtype(c) == ITH_DTYPE_F32 ? 4 : 2;
    int64_t u = ith_ring_choose(hf->num_attention_heads, hf->num_key_value_heads, hf->head_dim,
                                t->layout.cp_size, bytes, wish, in_order);
    if (!u && wish == ITH_RING_MIXED)
        return ith_config_fail(c, "cp_mode", err,
                               "hybrid with cp_size %lld: no divisor between 1 and it is at most "
                               "num_attention_heads %lld (use auto)",
                               (long long)t->layout.cp_size, (long long)hf->num_attention_heads);
    if (!u)
        return ith_config_fail(c, "cp_size", err,
                               "%lld is more than num_attention_heads %lld (use at most that many, "
                               "or cp_mode auto)",
                               (long long)t->layout.cp_size, (long long)hf->num_attention_heads);
    ith_mesh_set_ulysses(&t->mesh_store, u, in_order);
    return ITH_OK;
}

/* The ranks of a machine share its cores. */
static ith_status open_session(ith_trainer *t, bool plan_only, ith_error *err)
{
    static const ith_use_device use[] = {ITH_USE_AUTO, ITH_USE_CPU, ITH_USE_CUDA};
    int threads = (int)t->config->threads;
    if (threads == 0 && t->mesh && t->mesh->world && !ith_env(ITH_ENV_THREADS)) {
        ITH_TRY(ith_pool_default_threads(&threads, err));
        threads = ith_narrow(ith_max_i64(1, threads / t->mesh->world->local_size));
    }
    int index = t->mesh && t->mesh->world ? ith_narrow(t->mesh->world->local_rank) : 0;
    return ith_session_open(&t->session, use[t->config->device], index, threads, plan_only, err);
}

/* Ranks exchange between their GPUs, or between CPUs. */
static ith_status open_links(ith_trainer *t, ith_error *err)
{
    ith_device *d = t->session.ctx.device;
    int64_t any = t->session.cuda, mine = any, before = 0, after = 0, total = 0;
    if (t->mesh && t->session.cuda)
        t->links_bytes = d->links->ways[0]->overhead_bytes;
    if (!t->mesh || !t->mesh->world)
        return ITH_OK;
    ITH_TRY(ith_mesh_max(t->mesh, &any, err));
    ITH_TRY(ith_trainer_agree(
        t,
        any == mine ? ITH_OK
                    : ith_config_fail(t->config, "device", err,
                                      "no GPU here, others of the %lld ranks have one (use cpu)",
                                      (long long)t->mesh->world_size),
        err));
    if (!any)
        return ITH_OK;
    ITH_TRY(ith_trainer_agree(t, d->memory(d, &before, &total, err), err));
    ITH_TRY(ith_mesh_open_device(&t->mesh_store, d, ith_config_zero_stage(t->config) >= 2, err));
    ITH_TRY(ith_trainer_agree(t, d->memory(d, &after, &total, err), err));
    t->links_bytes = before - after;
    return ITH_OK;
}

ith_flops ith_trainer_step_flops(const ith_trainer *t)
{
    ith_run_shape shape = shape_of(t);
    double tower, samples = (double)ith_samples_count(t->samples);
    ith_flops f = ith_epoch_flops(&shape, &tower);
    double share = (1 - (double)t->num_held_out / samples) / (double)t->steps_per_epoch;
    f.linear = (f.linear + tower) * share;
    f.attention *= share;
    f.head *= share;
    f.total = f.linear + f.attention + f.head;
    return f;
}

void ith_trainer_put_data(const ith_trainer *t, ith_buf *out)
{
    ith_buf_printf(out, "data: %lld sample%s", (long long)ith_samples_count(t->samples),
                   ith_samples_count(t->samples) == 1 ? "" : "s");
    if (t->num_held_out)
        ith_buf_printf(out, " (%lld held out)", (long long)t->num_held_out);
    ith_buf_printf(out, ", %lld tokens (%lld trained), %lld step%s per epoch, %lld in all",
                   (long long)ith_samples_num_tokens(t->samples),
                   (long long)ith_samples_num_labels(t->samples), (long long)t->steps_per_epoch,
                   t->steps_per_epoch == 1 ? "" : "s", (long long)t->total_steps);
}

static void say_data(const ith_trainer *t, const ith_trainer_hooks *hooks)
{
    ith_buf line = {0};
    ith_trainer_put_data(t, &line);
    ith_trainer_say(hooks, "%s", line.data ? line.data : "");
    ith_buf_deinit(&line);
}

static void say_mesh(const ith_trainer *t, const ith_trainer_hooks *hooks)
{
    if (!t->mesh)
        return;
    ith_head_share h =
        ith_ulysses_own_share(t->mesh, t->hf.num_attention_heads, t->hf.num_key_value_heads);
    int64_t u = t->mesh->ulysses_size, rings = ith_ring_size(t->mesh);
    char scheme[64] = "local", experts[32] = "";
    const ith_comm *world = t->mesh->device_world[0]; /* NULL: a plan */
    if (t->mesh->ep_size > 1)
        snprintf(experts, sizeof experts, ", ep %lld", (long long)t->mesh->ep_size);
    if (rings > 1)
        snprintf(scheme, sizeof scheme, "ulysses %lld x ring %lld", (long long)u, (long long)rings);
    else if (u > 1)
        snprintf(scheme, sizeof scheme, "ulysses");
    ith_trainer_say(hooks,
                    "ranks: %lld = dp %lld x cp %lld%s%s%s; attention: %s, %lld query and %lld "
                    "key heads a rank; zero_stage %d over %lld; %lld sample%s a step, %lld "
                    "micro-batch%s a rank",
                    (long long)t->mesh->world_size, (long long)t->mesh->dp_size,
                    (long long)t->mesh->cp_size, experts, world ? " over " : "",
                    world ? ith_comm_way(world) : "", scheme, (long long)h.q_count,
                    (long long)h.kv_count, ith_config_zero_stage(t->config),
                    (long long)t->mesh->shard_size, (long long)t->layout.global_batch_size,
                    t->layout.global_batch_size == 1 ? "" : "s", (long long)t->layout.grad_accum,
                    t->layout.grad_accum == 1 ? "" : "es");
    if (world && world->sharers > 1)
        ith_trainer_say(hooks, "ITH_SHARE_GPU: %lld ranks share %s, each plans with its part",
                        (long long)world->sharers, t->session.ctx.device->name);
}

/* Which kernels run, so that a slow choice does not pass unseen. */
static void say_kernels(const ith_trainer *t, const ith_trainer_hooks *hooks)
{
    if (t->session.cuda)
        ith_trainer_say(hooks, "kernels: %s", t->session.ctx.device->name);
    else
        ith_trainer_say(hooks, "kernels: cpu %s, %d thread%s", ith_backend_cpu_name(),
                        ith_pool_threads(t->session.ctx.pool),
                        ith_pool_threads(t->session.ctx.pool) == 1 ? "" : "s");
}

/* What the plan decided beside what layers keep. */
static void say_planned(const ith_trainer *t, const ith_trainer_hooks *hooks)
{
    if (t->step->config.zero_stage == 2 && t->model->zero_stage == 1)
        ith_trainer_say(hooks, "there is room for whole gradients: they are summed once a step");
    int64_t tokens = ith_batcher_limits(t->batcher).max_whole_tokens;
    if (tokens)
        ith_trainer_say(hooks, "%s of up to %lld tokens stay whole on one rank%s",
                        ith_keeps_micro_batches(t->config, &t->hf) ? "micro-batches" : "documents",
                        (long long)tokens,
                        t->config->cp_whole_documents == ITH_CP_WHOLE_AUTO
                            ? " where that makes a step shorter"
                            : "");
}

/* One rank reads and tokenizes the files, the others map what it wrote: rank 0, then on machines
 * that do not share its disk the first of each. */
static ith_status take_turns(ith_trainer *t, shared_data *shared, ith_error *err)
{
    ith_comm *ranks = ith_trainer_ranks(t);
    int64_t mine = ranks->rank == 0 ? 0 : ranks->local_rank == 0 ? 1 : 2;
    for (int64_t turn = 0; turn < 3; turn++) {
        ITH_TRY(ith_trainer_agree(t, turn == mine ? open_data(t, shared, err) : ITH_OK, err));
        if (turn > 0)
            continue;
        if (mine == 0)
            snprintf(shared->names.train, 65, "%s", ith_samples_identity(t->samples));
        if (mine == 0 && t->eval_samples)
            snprintf(shared->names.eval, 65, "%s", ith_samples_identity(t->eval_samples));
        ITH_TRY(ith_comm_broadcast(ranks, &shared->names, sizeof shared->names, 0, err));
    }
    return ITH_OK;
}

/* However long that takes: a rank that is gone ends the job, one that is busy does not. */
static ith_status take_turns_without_limit(ith_trainer *t, shared_data *shared, ith_error *err)
{
    ith_comm *ranks = ith_trainer_ranks(t);
    double timeout_s = ranks->timeout_s;
    ranks->timeout_s = 0;
    ith_status status = take_turns(t, shared, err);
    ranks->timeout_s = timeout_s;
    return status;
}

static ith_status open_data_in_turn(ith_trainer *t, ith_error *err)
{
    shared_data shared = {.cache_dir = t->config->data_cache_dir};
    if (!ith_trainer_ranks(t))
        return open_data(t, &shared, err);
    ith_buf dir = {0};
    ith_path_join(&dir, t->config->output_dir, "tokenized");
    ith_status status = ith_trainer_agree(t, ith_buf_check(&dir, "output_dir", err), err);
    if (!shared.cache_dir)
        shared.cache_dir = dir.data;
    if (status == ITH_OK)
        status = take_turns_without_limit(t, &shared, err);
    ith_buf_deinit(&dir);
    return status;
}

ith_status ith_trainer_open(ith_trainer *t, const ith_config *config, bool plan_only,
                            const ith_trainer_hooks *hooks, ith_error *err)
{
    return ith_trainer_open_rank(t, config, NULL, plan_only, hooks, err);
}

ith_status ith_trainer_open_rank(ith_trainer *t, const ith_config *config, ith_comm *world,
                                 bool plan_only, const ith_trainer_hooks *hooks, ith_error *err)
{
    memset(t, 0, sizeof *t);
    t->config = config;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_config_check_supported(config, err));
    ITH_TRY_OUT(open_mesh(t, world, plan_only, err));
    status = open_model_files(t, plan_only, err);
    if (status == ITH_OK && !plan_only)
        status = check_checkpoints(config, hooks, err);
    if (status == ITH_OK)
        status = check_mesh(t, err);
    if (status == ITH_OK)
        status = open_session(t, plan_only, err);
    if (status == ITH_OK)
        status = choose_scheme(t, err);
    ITH_TRY_OUT(ith_trainer_agree(t, status, err));
    ITH_TRY_OUT(open_links(t, err));
    ITH_TRY_OUT(open_data_in_turn(t, err));
    say_kernels(t, hooks);
    say_mesh(t, hooks);
    ith_trainer_say(hooks, "chat template: %s", ith_chat_source(t->chat));
    say_data(t, hooks);
    ITH_TRY_OUT(ith_trainer_agree(t, open_noise(t, hooks, err), err));
    ith_batch_limits limits = t->noiser ? ith_noiser_limits(t->noiser) : clean_limits(t);
    ITH_TRY_OUT(ith_trainer_agree(t, open_step(t, limits, plan_only, err), err));
    if (t->model->zero_stage < ith_config_zero_stage(config)) {
        ith_run_shape shape = shape_of(t);
        shape.sums_once = true;
        ith_batcher_set_work(t->batcher, ith_batch_work_of(&shape));
    }
    say_planned(t, hooks);
    bool shares = t->layout.cp_size > 1 && t->hf.linear_num_value_heads > 0;
    if (!shares && ith_config_is_set(config, "linear_cp_mode"))
        ith_trainer_say(hooks, "linear_cp_mode: no effect, %s",
                        t->layout.cp_size > 1 ? "the model has no linear attention"
                                              : "one rank has the whole sequence");
    if (shares)
        ith_trainer_say(hooks, "linear attention: %s",
                        t->model->passes_states ? "passes states between parts of the sequence"
                                                : "exchanges parts of the sequence for heads");
    return ITH_OK;
out:
    ith_trainer_close(t);
    return status;
}

ith_status ith_trainer_open_document(ith_trainer *t, const ith_config *config, const char *hf_text,
                                     int64_t tokens, ith_error *err)
{
    ith_status status = ITH_OK;
    memset(t, 0, sizeof *t);
    t->config = config;
    ITH_TRY_OUT(ith_config_check_supported(config, err));
    if (!hf_text)
        ITH_TRY_OUT(ith_config_need_model(config, ", or --size with a published shape", err));
    ITH_TRY_OUT(open_mesh(t, NULL, true, err));
    ITH_TRY_OUT(
        hf_text ? ith_hf_config_parse(&t->hf, hf_text, (int64_t)strlen(hf_text), "config.json", err)
                : ith_hf_config_load(&t->hf, config->model, err));
    if (ith_is_diffusion(config, &t->hf))
        ITH_TRY_OUT(ith_fail(err, ITH_ERR_USAGE,
                             "%s: batches of a diffusion model depend on its noise (plan a run "
                             "with its data)",
                             t->hf.model_type));
    ITH_TRY_OUT(check_mesh(t, err));
    ITH_TRY_OUT(open_session(t, true, err));
    ITH_TRY_OUT(choose_scheme(t, err));
    ITH_TRY_OUT(open_links(t, err));
    ITH_TRY_OUT(open_step(t,
                          (ith_batch_limits){.max_tokens = tokens,
                                             .max_docs = 1,
                                             .max_labels = tokens,
                                             .max_doc_tokens = tokens,
                                             .max_micro = 1},
                          true, err));
    return ITH_OK;
out:
    ith_trainer_close(t);
    return status;
}

void ith_trainer_close(ith_trainer *t)
{
    ith_step_destroy(t->step);
    ith_model_destroy(t->model);
    ith_mesh_close(&t->mesh_store); /* before the device of its links */
    ith_session_close(&t->session);
    ith_batcher_destroy(t->batcher);
    ith_batcher_destroy(t->eval_batcher);
    ith_noiser_destroy(t->noiser);
    if (t->eval_samples != t->samples)
        ith_samples_close(t->eval_samples);
    ith_samples_close(t->samples);
    ith_pool_destroy(t->data_pool);
    json_decref(t->eval_start);
    ith_free(t->train_subset);
    ith_free(t->eval_subset);
    ith_media_close(t->media);
    ith_chat_close(t->chat);
    ith_tokenizer_close(t->tokenizer);
    ith_hf_config_deinit(&t->hf);
    memset(t, 0, sizeof *t);
}
