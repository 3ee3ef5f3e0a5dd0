/* Goal: every family gives the same loss, gradients and updated weights on any number of ranks.
 * Method: each rank first makes one step alone over all documents, then its part of it in a job of
 * dp x cp ranks at each ZeRO stage, attention by Ulysses, rings and both, linear layers by heads
 * and by states; borders of documents lie on and inside the slices, some ranks have no label,
 * images are in several documents. `test_families all` makes every layout instead of some, twice:
 * the second run has the same bits. `device=cuda` runs on GPUs, which ITH_SHARE_GPU lets ranks
 * share; `device=twin` on the host in disguise (twin.h); `only=test_whole*` runs some. */
#include "testing.h"

#include <math.h>

#include "base/rng.h"
#include "data/noise.h"
#include "kernels/session.h"
#include "parallel/expert_exchange.h"
#include "train/step.h"
#include "twin.h"

static ith_comm *world;
static ith_error err;
static ith_session session; /* of all runs */

#define KEEP_AUTO (-1) /* here: all there is to keep */

#define LINEAR_OF(q, kv)                                                                           \
    "\"hidden_size\": 24, \"num_hidden_layers\": 3, \"layer_types\": [\"linear_attention\","       \
    " \"full_attention\", \"linear_attention\"], \"num_attention_heads\": " #q ","                 \
    " \"num_key_value_heads\": " #kv ", \"head_dim\": 16, \"linear_num_key_heads\": 3,"            \
    " \"linear_num_value_heads\": 9, \"linear_key_head_dim\": 8, \"linear_value_head_dim\": 12,"   \
    " \"linear_conv_kernel_dim\": 4, \"vocab_size\": 50, \"rope_parameters\":"                     \
    " {\"rope_theta\": 10000.0, \"partial_rotary_factor\": 0.5, \"mrope_section\": [2, 1, 1]}"
#define LINEAR LINEAR_OF(8, 2)

/* Qwen3 by its heads: those that ranks divide and those that they do not, groups of one to eight
 * query heads, one kv head for all. */
#define HEADS(q, kv)                                                                               \
    {                                                                                              \
        .name = "qwen3 " #q "/" #kv, .dense = true,                                                \
        .config = "{\"model_type\": \"qwen3\", \"hidden_size\": 24, \"num_hidden_layers\": 2,"     \
                  " \"intermediate_size\": 40, \"num_attention_heads\": " #q                       \
                  ", \"num_key_value_heads\": " #kv ", \"head_dim\": 8, \"vocab_size\": 50,"       \
                  " \"tie_word_embeddings\": true, \"rope_theta\": 10000.0}"                       \
    }

#define EXPERTS                                                                                    \
    "{\"model_type\": \"qwen3_5_moe_text\", \"num_experts\": 6, \"num_experts_per_tok\": 2,"       \
    " \"moe_intermediate_size\": 12, \"shared_expert_intermediate_size\": 20, " LINEAR "}"

#define DENSE(q, kv)                                                                               \
    "{\"model_type\": \"qwen3_5_text\", \"intermediate_size\": 40,"                                \
    " \"tie_word_embeddings\": true, " LINEAR_OF(q, kv) "}"

#define LLADA2(q, kv)                                                                              \
    "{\"model_type\": \"llada2_moe\", \"vocab_size\": 50, \"hidden_size\": 24,"                    \
    " \"num_hidden_layers\": 2, \"num_attention_heads\": " #q ", \"num_key_value_heads\": " #kv    \
    ", \"head_dim\": 16, \"intermediate_size\": 40, \"hidden_act\": \"silu\","                     \
    " \"num_experts\": 8, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 12,"              \
    " \"num_shared_experts\": 1, \"first_k_dense_replace\": 1, \"n_group\": 4,"                    \
    " \"topk_group\": 2, \"partial_rotary_factor\": 0.5, \"rope_theta\": 10000.0,"                 \
    " \"rms_norm_eps\": 1e-6, \"max_position_embeddings\": 512, \"use_bias\": false,"              \
    " \"use_qkv_bias\": false, \"norm_topk_prob\": true, \"use_qk_norm\": true,"                   \
    " \"routed_scaling_factor\": 2.5, \"score_function\": \"sigmoid\","                            \
    " \"attention_dropout\": 0.0, \"embedding_dropout\": 0.0, \"output_dropout\": 0.0,"            \
    " \"moe_router_enable_expert_bias\": false, \"tie_word_embeddings\": false}"

#define SEEING                                                                                     \
    "{\"model_type\": \"qwen3_5\", \"image_token_id\": 48, \"video_token_id\": 49,"                \
    " \"tie_word_embeddings\": false,"                                                             \
    " \"text_config\": {\"model_type\": \"qwen3_5_text\", \"intermediate_size\": 40, " LINEAR      \
    "}, \"vision_config\": {\"model_type\": \"qwen3_5\", \"depth\": 2, \"hidden_size\": 16,"       \
    " \"intermediate_size\": 24, \"num_heads\": 2, \"in_channels\": 1, \"patch_size\": 2,"         \
    " \"temporal_patch_size\": 2, \"spatial_merge_size\": 2, \"num_position_embeddings\": 16,"     \
    " \"out_hidden_size\": 24}}"

static const struct family {
    const char *name, *config;
    bool media, diffusion, bidirectional;
    bool dense;     /* attention and an MLP alone: every division into rings, nothing else */
    float aux_coef; /* the balance is that of a micro-batch: it must not be cut by documents */
    ith_model_parts frozen;
    bool few;     /* short documents only: slices of a token, and of none */
    bool steered; /* the words of a document want one expert: see steer */
} families[] = {
    {.name = "qwen3_5", .config = DENSE(8, 2)},
    {.name = "qwen3_5, two heads", .config = DENSE(2, 1)},
    {.name = "qwen3_5_moe", .config = EXPERTS},
    {.name = "qwen3_5_moe, few tokens", .config = EXPERTS, .few = true},
    {.name = "qwen3_5_moe, balanced", .config = EXPERTS, .aux_coef = 0.1F},
    {.name = "qwen3_5 with images", .config = SEEING, .media = true},
    {.name = "qwen3_5, tower frozen",
     .config = SEEING,
     .media = true,
     .frozen = {.vision_tower = true}},
    {.name = "qwen3_5, text frozen",
     .config = SEEING,
     .media = true,
     .frozen = {.language_model = true}},
    {.name = "llada2", .config = LLADA2(8, 2), .diffusion = true},
    {.name = "llada2, two heads", .config = LLADA2(2, 2), .diffusion = true},
    {.name = "llada2, whole documents seen", .config = LLADA2(4, 1), .bidirectional = true},
    {.name = "qwen3_moe",
     .config =
         "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 24, \"num_hidden_layers\": 3,"
         " \"intermediate_size\": 40, \"num_attention_heads\": 8, \"num_key_value_heads\": 2,"
         " \"head_dim\": 16, \"vocab_size\": 50, \"tie_word_embeddings\": false,"
         " \"rope_theta\": 10000.0, \"num_experts\": 8, \"num_experts_per_tok\": 2,"
         " \"moe_intermediate_size\": 12, \"norm_topk_prob\": true, \"mlp_only_layers\": [1]}"},
    HEADS(32, 8),
    HEADS(16, 2),
    HEADS(9, 3),
    HEADS(14, 2),
    HEADS(6, 2),
    HEADS(8, 1),
};

/* ---- the batch ---- */

enum { MAX_TOKENS = 256, MAX_DOCS = 8, BLOCK = 4, PIXELS_PER_PATCH = 8 };
/* Borders inside slices; one document that fills all, with the labels of one rank; borders on the
 * slices of 2, 4 and 8 ranks. */
static const struct documents {
    int64_t count, lengths[MAX_DOCS];
    bool last_labels;
} sets[] = {
    {6, {1, 17, 3, 30, 2, 11}, false}, {1, {64}, true}, {8, {8, 8, 8, 8, 8, 8, 8, 8}, false}};
enum { NUM_SETS = sizeof sets / sizeof *sets };
static const struct documents *docs = &sets[0];
/* Images of a document: at its token 1, one after the other with a token between. The slices of 2,
 * 4 and 8 ranks end inside of some (tokens 22 to 25, 27 to 32, 54 to 56). */
static const struct {
    int64_t doc;
    ith_grid grid;
} images[] = {{1, {1, 4, 4}}, {3, {1, 4, 4}}, {3, {2, 2, 6}}, {3, {1, 4, 2}}, {5, {1, 6, 2}}};
enum { NUM_IMAGES = sizeof images / sizeof *images };

typedef struct {
    int32_t ids[MAX_TOKENS], positions[MAX_TOKENS], labels[MAX_TOKENS], cu[MAX_DOCS + 1];
    int32_t noisy[MAX_DOCS], mrope[3 * MAX_TOKENS], frames[MAX_TOKENS];
    float weights[MAX_TOKENS], pixels[1024];
    ith_grid grids[NUM_IMAGES + 1];
    ith_micro_batch b;
} batch;

static void begin(batch *x)
{
    memset(x, 0, sizeof *x);
    x->b = (ith_micro_batch){.ids = x->ids,
                             .position_ids = x->positions,
                             .labels = x->labels,
                             .cu_seqlens = x->cu,
                             .weights = x->weights};
}

static void add_row(batch *x, int32_t id, int64_t position, int32_t label, float weight)
{
    int64_t t = x->b.num_tokens++;
    assert_true(t < MAX_TOKENS);
    x->ids[t] = id;
    x->positions[t] = (int32_t)position;
    x->labels[t] = label;
    x->weights[t] = label >= 0 ? weight : 0;
    x->b.num_labels += label >= 0;
    x->b.weight_sum += (double)x->weights[t];
}

static void end_doc(batch *x)
{
    x->cu[++x->b.num_docs] = (int32_t)x->b.num_tokens;
}

static bool steered;

static int32_t token_of(int64_t doc, int64_t i)
{
    int32_t id = (int32_t)ith_rng_below(5, (uint64_t)doc, (uint64_t)i, 40);
    return steered ? id / 2 * 2 + (int32_t)(doc % 2) : id;
}

/* In the first half of documents: some slices have none. */
static bool has_label(int64_t i, int64_t len)
{
    return docs->last_labels ? i + 4 >= len : 2 * i < len;
}

static void causal_document(batch *x, int64_t doc, bool media)
{
    int32_t ids[64];
    int64_t len = docs->lengths[doc], at = 1, patches = 0;
    for (int64_t i = 0; i < len; i++)
        ids[i] = token_of(doc, i);
    for (int k = 0; media && k < NUM_IMAGES; k++)
        if (images[k].doc == doc) {
            int64_t n = ith_grid_patches(images[k].grid);
            for (int64_t i = 0; i < n / 4; i++)
                ids[at + i] = images[k].grid.t > 1 ? 49 : 48;
            at += n / 4 + 1;
            x->grids[x->b.num_grids++] = images[k].grid;
        }
    for (int64_t i = 0; i < len; i++)
        add_row(x, ids[i], i, i + 1 < len && has_label(i, len) ? ids[i + 1] : -100,
                doc % 2 ? 1.0F : 0.5F);
    assert_true(at <= len + 1);
    for (int64_t i = 0; i < x->b.num_grids; i++)
        patches += ith_grid_patches(x->grids[i]);
    assert_true(patches * PIXELS_PER_PATCH <= 1024);
    end_doc(x);
}

/* Pixels depend on the image, not on the batch it is in. */
static void finish_media(batch *x, const ith_hf_config *config, const bool *mine)
{
    float *to = x->pixels;
    for (int k = 0; k < NUM_IMAGES; k++)
        for (int64_t i = 0;
             mine[images[k].doc] && i < ith_grid_patches(images[k].grid) * PIXELS_PER_PATCH; i++)
            *to++ = (float)ith_rng_normal(9, (uint64_t)k, (uint64_t)i);
    x->b.mrope = x->mrope;
    x->b.pixels = x->pixels;
    x->b.grids = x->grids;
    const ith_media_tokens tokens = {.image = (int32_t)config->image_token_id,
                                     .video = (int32_t)config->video_token_id,
                                     .merge = config->vision.spatial_merge_size};
    assert_ok(ith_media_find(&tokens, x->ids, x->cu, x->b.num_docs, x->grids, x->b.num_grids,
                             x->frames, &err),
              err);
    ith_mrope_positions(tokens.merge, x->cu, x->b.num_docs, x->grids, x->b.num_grids, x->frames,
                        NULL, x->mrope);
    x->b.frames = x->frames;
}

/* [noisy; clean] documents, two tokens of three masked. */
static void noisy_document(batch *x, ith_noiser *noiser, int64_t doc)
{
    int32_t x0[64], xt[64], target[64];
    float weights[64];
    ith_micro_batch one;
    for (int64_t i = 0; i < docs->lengths[doc]; i++) {
        bool masked = (i + doc) % 3 != 0;
        x0[i] = token_of(doc, i);
        xt[i] = masked ? 47 : x0[i];
        target[i] = masked ? x0[i] : -100;
        weights[i] = 1;
    }
    ith_noiser_begin(noiser);
    ith_noiser_add(noiser, x0, xt, target, weights, docs->lengths[doc], doc);
    ith_noiser_end(noiser, &one);
    if (one.num_tokens == 0)
        return;
    x->noisy[x->b.num_docs] = one.noisy[0];
    for (int64_t i = 0; i < one.num_tokens; i++)
        add_row(x, one.ids[i], one.position_ids[i], one.labels[i], one.weights[i]);
    end_doc(x);
}

/* Which documents: every size-th, of these lengths; at_most 0: of any. */
typedef struct {
    int64_t rank, size, longer_than, at_most;
} share;

/* The documents of a share. */
static void make_batch(batch *x, const struct family *f, const ith_hf_config *config, share part)
{
    bool mine[MAX_DOCS];
    ith_noiser *noiser = NULL;
    ith_noise_options o = {.blocks = true, .block_size = BLOCK, .mask_id = 47, .same_token = true};
    ith_batch_limits limits = {.max_tokens = MAX_TOKENS,
                               .max_docs = MAX_DOCS,
                               .max_labels = MAX_TOKENS,
                               .max_doc_tokens = 64,
                               .max_micro = 1};
    assert_ok(ith_noiser_create(&noiser, &o, &limits, &err), err);
    begin(x);
    steered = f->steered;
    for (int64_t doc = 0; doc < docs->count; doc++) {
        mine[doc] = doc % part.size == part.rank && (!f->few || docs->lengths[doc] <= 3) &&
                    docs->lengths[doc] > part.longer_than &&
                    (part.at_most == 0 || docs->lengths[doc] <= part.at_most);
        if (mine[doc] && f->diffusion)
            noisy_document(x, noiser, doc);
        else if (mine[doc])
            causal_document(x, doc, f->media);
    }
    if (f->diffusion)
        x->b.noisy = x->noisy;
    if (f->media)
        finish_media(x, config, mine);
    ith_noiser_destroy(noiser);
}

/* ---- a step ---- */

typedef struct {
    int64_t ep;          /* ranks that share experts; 0: none */
    bool copies;         /* two of what the stage cuts */
    int64_t cp, ulysses; /* ulysses: ranks that exchange heads, of cp; the rest is a ring */
    int zero, keep;
    ith_linear_cp linear_cp;
    ith_dtype dtype; /* 0 is f32 */
    int64_t whole;   /* documents of so many tokens are computed by one rank; 0: none */
} layout;

typedef struct {
    ith_hf_config config;
    ith_ctx ctx; /* the session's, with a plan of its own */
    ith_model *model;
    ith_step *step;
    double loss, norm;
    int64_t n;
    float *grad, *w; /* [n] of the flat layout; w of f32 models */
} run;

/* Elements [first, first + n) of t, which is the device's. */
static void write_to(ith_tensor t, int64_t first, const float *values, int64_t n)
{
    ith_device *d = session.ctx.device;
    int64_t size = ith_dtype_bytes(t.dtype);
    void *host = ith_malloc(n * size + 1);
    ith_convert(host, t.dtype, values, ITH_F32, n);
    assert_ok(d->upload(d, (char *)t.data + first * size, host, n * size, &err), err);
    assert_ok(d->sync(d, &err), err);
    ith_free(host);
}

static void read_back(float *to, ith_tensor from)
{
    ith_device *d = session.ctx.device;
    assert_ok(d->download(d, to, from.data, ith_tensor_bytes(from), &err), err);
    assert_ok(d->sync(d, &err), err);
}

/* Even words go one way in the first channel and odd ones the other, and the routers look at it
 * alone: to expert 0, or to the last one. */
static void steer(const run *r, const ith_hf_piece *p, float *values)
{
    int64_t width = r->config.hidden_size, rows = p->count / width;
    if (strstr(p->hf_name, "embed_tokens"))
        for (int64_t i = 0; i < rows; i++)
            values[i * width] = i % 2 ? -3 : 3;
    if (strstr(p->hf_name, "mlp.gate.weight"))
        for (int64_t i = 0; i < p->count; i++)
            values[i] = i == 0 ? 1 : i == (rows - 1) * width ? -1 : 0;
}

/* Decay is slow: what happens in one slice is felt in all behind it. */
static void fill_weights(run *r, const struct family *f)
{
    ith_model *m = r->model;
    for (int64_t i = 0; i < m->num_pieces; i++) {
        const ith_hf_piece *p = &m->pieces[i];
        float *values = ith_malloc(p->count * 4);
        int64_t from = 0, at = m->params[p->param].first + p->first, n = p->count, to = at;
        ith_tensor w = m->w;
        ith_model_init_piece(m, p, 3, 0, p->count, values);
        for (int64_t k = 0; k < p->count; k++)
            values[k] = p->init == ITH_INIT_ZEROS                   ? 0.1F * sinf((float)k)
                        : p->init == ITH_INIT_A_LOG                 ? -4 - 0.1F * (float)k
                        : p->init == ITH_INIT_NORMAL && !p->is_norm ? 4 * values[k]
                                                                    : values[k];
        if (f->steered)
            steer(r, p, values);
        if (at >= m->num_act) {
            w = m->w_f32;
            to -= m->num_act;
        } else if (m->zero_stage >= 3) {
            n = ith_shard_overlap(m->shard, at, p->count, &from, &to);
        }
        write_to(w, to, values + from, n);
        ith_free(values);
    }
    assert_ok(ith_model_refresh_weights(m, &r->ctx), err);
}

/* A flat f32 buffer, whole on every rank. */
static float *whole(run *r, ith_tensor flat)
{
    ith_model *m = r->model;
    ith_shard *s = m->shard;
    float *out = ith_calloc(m->num_elements, 4);
    if (!s) {
        read_back(out, flat);
        return out;
    }
    for (int64_t b = 0; b < s->num_blocks; b++) {
        int64_t first = s->block_first[b], n = s->block_first[b + 1] - first;
        if (n == 0)
            continue;
        ith_tensor own = ith_shard_slice(s, b, flat);
        int64_t at = ith_shard_slice_first(s, b) - first;
        for (int64_t from = 0; from < world->size; from++) { /* everyone's slice to everyone */
            int64_t each[2] = {at, own.shape[0]};
            assert_ok(ith_comm_broadcast(world, each, sizeof each, from, &err), err);
            if (from == world->rank)
                read_back(out + first + at, own);
            assert_ok(ith_comm_broadcast(world, out + first + each[0], each[1] * 4, from, &err),
                      err);
        }
    }
    return out;
}

static void open_run(run *r, const struct family *f, const ith_mesh *mesh, layout l)
{
    memset(r, 0, sizeof *r);
    assert_ok(
        ith_hf_config_parse(&r->config, f->config, (int64_t)strlen(f->config), "config", &err),
        err);
    r->ctx = session.ctx;
    assert_ok(ith_plan_create(&r->ctx.plan, r->ctx.device, &err), err);
    assert_ok(f->media ? ith_model_create_multimodal(&r->model, &r->config, l.dtype, 128, &err)
                       : ith_model_create(&r->model, &r->config, l.dtype, 128, &err),
              err);
    r->model->aux_coef = f->aux_coef;
    assert_ok(ith_model_freeze(r->model, f->frozen, &err), err);
    ith_step_config c = {.mesh = mesh,
                         .zero_stage = l.zero,
                         .max_tokens = MAX_TOKENS,
                         .max_whole_tokens = l.whole ? MAX_TOKENS / l.cp : 0,
                         .max_docs = MAX_DOCS,
                         .max_labels = MAX_TOKENS,
                         .max_doc_tokens = 128,
                         .vision = {128, 8, 64, l.whole ? 128 : 0, l.whole ? 8 : 0},
                         .chunk_rows = 7,
                         .training = true,
                         .keep = l.keep,
                         .linear_cp = l.linear_cp,
                         .max_grad_norm = 1.0F,
                         .block = f->diffusion ? BLOCK : 0,
                         .noisy = f->diffusion,
                         .bidirectional = f->bidirectional};
    assert_ok(ith_step_create(&r->step, r->model, &r->ctx, &c, false), err);
    if (mesh && l.keep != KEEP_AUTO) /* some ranks have fewer tiles, or none */
        r->model->mlp_tile = 5;
    fill_weights(r, f);
}

static void close_run(run *r)
{
    ith_free(r->grad);
    ith_free(r->w);
    ith_step_destroy(r->step);
    ith_model_destroy(r->model);
    ith_plan_destroy(r->ctx.plan);
    ith_hf_config_deinit(&r->config);
}

static void micro(run *r, const struct family *f, share part, bool whole)
{
    static batch x;
    make_batch(&x, f, &r->config, part);
    x.b.whole = whole;
    assert_ok(ith_step_micro(r->step, &x.b), err);
}

/* One step: gradients are kept before the update, with an eps that makes it smooth. With l.whole
 * one rank makes the micro-batches of all groups, then those of all ranks of that layout. */
static void make_step(run *r, const struct family *f, const ith_mesh *mesh, layout l)
{
    static batch all;
    ith_step_stats stats;
    int64_t groups = l.whole ? world->size / l.cp : 1, ranks = l.whole ? world->size : 0;
    make_batch(&all, f, &r->config, (share){0, 1, 0, 0});
    ith_step_begin(r->step, all.b.weight_sum);
    if (mesh) {
        micro(r, f, (share){mesh->dp_rank, mesh->dp_size, l.whole, 0}, false);
        if (l.whole)
            micro(r, f, (share){world->rank, world->size, 0, l.whole}, true);
    }
    for (int64_t g = 0; !mesh && g < groups; g++)
        micro(r, f, (share){g, groups, l.whole, 0}, false);
    for (int64_t k = 0; !mesh && k < ranks; k++)
        micro(r, f, (share){k, ranks, 0, l.whole}, false);
    assert_ok(ith_step_reduce(r->step), err);
    r->n = r->model->num_elements;
    r->grad = whole(r, r->model->grad);
    assert_ok(ith_step_end(r->step, (ith_adamw_hyper){0.1F, 0.9F, 0.999F, 1e-1F, 0.01F, 1}, &stats),
              err);
    assert_ok(ith_step_settle(r->step), err);
    if (!mesh) /* the clip is at work: a norm of a shard would give another update */
        assert_true(stats.grad_norm > (double)r->step->config.max_grad_norm);
    r->loss = stats.loss + stats.aux_loss;
    r->norm = stats.grad_norm;
    r->w = r->model->dtype == ITH_F32 ? whole(r, r->model->w) : NULL;
}

static double distance(const float *a, const float *b, int64_t n)
{
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return diff > 0 ? sqrt(diff / norm) : 0 * diff;
}

static bool is_zero(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (x[i] != 0)
            return false;
    return true;
}

/* Experts that one rank alone gives no token have a gradient of exactly 0 everywhere. Returns how
 * many have one. */
static int64_t compare_idle_experts(const run *r, const run *alone, const char *what)
{
    int64_t busy = 0;
    for (int64_t i = 0; i < r->model->num_pieces; i++) {
        const ith_hf_piece *p = &r->model->pieces[i];
        int64_t at = r->model->params[p->param].first + p->first;
        if (!strstr(p->hf_name, ".experts.") || !strstr(p->hf_name, "down_proj"))
            continue;
        bool idle = is_zero(alone->grad + at, p->count);
        if (idle && !is_zero(r->grad + at, p->count))
            fail_msg("%s: %s has no token, and a gradient", what, p->hf_name);
        busy += !idle;
    }
    return busy;
}

static void compare(const run *r, const run *alone, const char *what)
{
    double far = distance(r->grad, alone->grad, r->n);
    if (!r->w && !(far <= 2e-2)) /* bf16 */
        fail_msg("%s: gradient differs by %g", what, far);
    if (!r->w)
        return;
    for (int64_t i = 0; i < r->model->num_params; i++) { /* each parameter by itself */
        const ith_param *p = &r->model->params[i];
        int64_t n = p->shape[0] * p->shape[1] * p->shape[2];
        double e = distance(r->grad + p->first, alone->grad + p->first, n);
        if (!(e <= 1e-4))
            fail_msg("%s: gradient of %s differs by %g", what, p->name, e);
    }
    double errors[] = {fabs(r->loss - alone->loss) / fabs(alone->loss),
                       fabs(r->norm - alone->norm) / alone->norm,
                       distance(r->grad, alone->grad, r->n), distance(r->w, alone->w, r->n)};
    static const char *const names[] = {"loss", "gradient norm", "gradient", "weights"};
    for (int i = 0; i < 4; i++)
        if (!(errors[i] <= 1e-5))
            fail_msg("%s: %s differs by %g", what, names[i], errors[i]);
}

static void open_mesh(ith_mesh *mesh, const run *alone, layout l)
{
    assert_ok(ith_mesh_open(mesh, world, l.cp, &err), err);
    ith_mesh_set_ulysses(mesh, l.ulysses, alone->config.linear_num_value_heads > 0);
    if (l.copies)
        assert_ok(ith_mesh_set_shard(mesh, world->size / 2, &err), err);
    if (l.ep)
        assert_ok(ith_mesh_set_experts(mesh, l.ep, &err), err);
    if (session.ctx.device->links)
        assert_ok(ith_mesh_open_device(mesh, session.ctx.device, l.zero >= 2, &err), err);
}

static bool thorough; /* every layout, twice: tests of the label `long` */

static void run_layout(const struct family *f, const run *alone, layout l)
{
    char what[160];
    ith_mesh mesh;
    run r, again;
    snprintf(what, sizeof what,
             "%s, documents %d, %lld ranks, cp %lld, ulysses %lld, ep %lld, zero %d, keep %d, "
             "linear %d, whole %lld",
             f->name, (int)(docs - sets), (long long)world->size, (long long)l.cp,
             (long long)l.ulysses, (long long)l.ep, l.zero, l.keep, (int)l.linear_cp,
             (long long)l.whole);
    open_mesh(&mesh, alone, l);
    open_run(&r, f, &mesh, l);
    make_step(&r, f, &mesh, l);
    compare(&r, alone, what);
    compare_idle_experts(&r, alone, what);
    if (thorough) {
        open_run(&again, f, &mesh, l);
        make_step(&again, f, &mesh, l);
        if (memcmp(&again.loss, &r.loss, sizeof r.loss) != 0 ||
            memcmp(again.grad, r.grad, (size_t)r.n * 4) != 0 ||
            (r.w && memcmp(again.w, r.w, (size_t)r.n * 4) != 0))
            fail_msg("%s: a second run has other bits", what);
        close_run(&again);
    }
    close_run(&r);
    ith_mesh_close(&mesh);
}

static void open_alone(run *r, const struct family *f, ith_dtype dtype)
{
    layout one = {.cp = 1, .ulysses = 1, .keep = ITH_KEEP_ALL, .dtype = dtype};
    open_run(r, f, NULL, one);
    make_step(r, f, NULL, one);
}

/* The micro-batches of a layout that has whole documents, on one rank. */
static void open_alone_like(run *r, const struct family *f, layout l)
{
    open_run(r, f, NULL, (layout){.cp = 1, .ulysses = 1, .keep = ITH_KEEP_ALL});
    make_step(r, f, NULL, l);
}

/* As few rings as there can be. */
static int64_t most_heads(const ith_hf_config *c, int64_t cp)
{
    int64_t u = ith_min_i64(cp, c->num_attention_heads);
    while (cp % u)
        u--;
    return u;
}

/* Experts on 2, 4, .. ranks, with every way to keep; slices without tokens, too. */
static void test_shared_experts_are_as_one_rank(void **state)
{
    (void)state;
    int keep = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        run alone;
        if (families[i].dense)
            continue;
        open_alone(&alone, &families[i], ITH_F32);
        for (int64_t ep = 2; ep <= world->size; ep++)
            for (int64_t cp = 1; cp <= world->size; cp += world->size - 1)
                if (alone.config.num_experts > 0 && alone.config.num_experts % ep == 0 &&
                    world->size % ep == 0 && (cp == world->size || !families[i].aux_coef))
                    run_layout(&families[i], &alone,
                               (layout){ep, world->size % 2 == 0 && cp == 1, cp,
                                        most_heads(&alone.config, cp), 3, keep++ % 3,
                                        ITH_LINEAR_AUTO, ITH_F32, 0});
        close_run(&alone);
    }
}

static bool is_linear(const run *alone)
{
    return alone->config.linear_num_value_heads > 0;
}

/* Borders on and inside slices, one document over all ranks: as few rings as there can be, and one
 * ring. bf16 is held to 2e-2 of the gradient, where no expert is chosen. */
static void test_borders_and_bf16(void **state)
{
    (void)state;
    int zero = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        for (int set = 0; set < NUM_SETS; set++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                const struct family *f = &families[i];
                run alone;
                docs = &sets[set];
                if (f->media || f->few || f->aux_coef || (set == 0 && !bf16))
                    continue;
                open_alone(&alone, f, bf16 ? ITH_BF16 : ITH_F32);
                int64_t cp = world->size, u = most_heads(&alone.config, cp);
                if (!bf16 || !alone.config.num_experts)
                    for (int64_t k = 0; k < 2; k++)
                        run_layout(f, &alone,
                                   (layout){0, false, cp, k ? 1 : u, zero++ % 4, ITH_KEEP_ATTENTION,
                                            ITH_LINEAR_AUTO, alone.model->dtype, 0});
                close_run(&alone);
            }
    docs = &sets[0];
}

/* One family: every cp and U, stage, way of linear layers, and number of ranks that share experts.
 */
static void run_every_layout(const struct family *f, const run *alone)
{
    int keep = 0;
    for (int64_t cp = 1; cp <= world->size; cp++)
        for (int64_t u = 1; u <= cp && u <= alone->config.num_attention_heads; u++)
            for (int zero = 0; zero < 4 && world->size % cp == 0 && cp % u == 0; zero++)
                for (int linear = ITH_LINEAR_HEADS; linear <= ITH_LINEAR_STATES; linear++)
                    for (int64_t ep = 1; ep <= 4; ep *= 2) {
                        bool first = linear == ITH_LINEAR_HEADS;
                        if ((!is_linear(alone) || cp == 1) && !first)
                            continue;
                        if (is_linear(alone) && first && cp > alone->config.linear_num_value_heads)
                            continue;
                        if (ep > 1 && (zero < 3 || !alone->config.num_experts ||
                                       alone->config.num_experts % ep || world->size % ep))
                            continue;
                        if (f->aux_coef && cp < world->size)
                            continue;
                        run_layout(f, alone,
                                   (layout){ep, false, cp, u, zero, keep++ % 3,
                                            (ith_linear_cp)linear, ITH_F32, 0});
                    }
}

static void test_every_layout(void **state)
{
    (void)state;
    if (!thorough)
        skip();
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        for (int set = 0; set < NUM_SETS; set++) {
            const struct family *f = &families[i];
            run alone;
            bool one = f->media || f->few || f->aux_coef || world->size > 8;
            if ((set > 0 && one) || (world->size > 8 && !f->dense))
                continue;
            docs = &sets[set];
            open_alone(&alone, f, ITH_F32);
            run_every_layout(f, &alone);
            close_run(&alone);
        }
    docs = &sets[0];
}

/* Goal: rows reach the experts that they are for, in any number of rounds, and come back to their
 * places. Method: rows name their rank, place and expert; the function checks and negates them. */
enum { ROWS = 10, EXPERTS_EACH = 3, WIDTH = 5 };

typedef struct {
    int64_t calls, rows;
} seen;

static ith_status negate(void *arg, ith_ctx *ctx, const ith_expert_round *r)
{
    seen *x = arg;
    const int32_t *offsets = r->offsets.data;
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    x->calls++;
    x->rows += r->in[0].shape[0];
    for (int e = 0; e < EXPERTS_EACH; e++)
        for (int64_t i = offsets[e]; i < offsets[e + 1]; i++)
            for (int64_t d = 0; d < WIDTH; d++) {
                float v = ((const float *)r->in[0].data)[i * WIDTH + d];
                assert_int_equal((int64_t)v % 100, world->rank * EXPERTS_EACH + e);
                ((float *)r->out.data)[i * WIDTH + d] = -v;
            }
    assert_int_equal(offsets[EXPERTS_EACH], r->in[0].shape[0]);
    return ITH_OK;
}

/* kind 0: evenly; 1: all to the last expert; 2: ranks bring 0, 1, .. rows to some. */
static void send_rows(const ith_mesh *mesh, ith_ctx *ctx, int kind, seen *x)
{
    int64_t experts = world->size * EXPERTS_EACH, rows = kind == 2 ? world->rank % ROWS : ROWS;
    bool runs = !ith_ctx_counting(ctx);
    ith_tensor in, out, offsets;
    rows = runs ? rows : ROWS;
    assert_ok(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "test", ITH_F32, 2, rows, WIDTH, 1, 1, &in),
              err);
    assert_ok(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "test", ITH_F32, 2, rows, WIDTH, 1, 1, &out),
              err);
    assert_ok(
        ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "test", ITH_I32, 1, experts + 1, 1, 1, 1, &offsets),
        err);
    for (int64_t e = 0, n = 0; runs && e <= experts; e++) {
        int64_t end = e == experts ? rows
                      : kind == 1  ? (e == experts - 1 ? rows : 0)
                      : kind == 2  ? rows * (e + 1) * (e + 1) / experts / experts
                                   : rows * (e + 1) / experts;
        ((int32_t *)offsets.data)[e] = (int32_t)n;
        for (; n < end; n++)
            for (int64_t d = 0; d < WIDTH; d++)
                ((float *)in.data)[n * WIDTH + d] =
                    (float)(((world->rank * ROWS + n) * WIDTH + d) * 100 + e);
    }
    assert_ok(ith_expert_rounds(mesh, ctx, &in, 1, offsets, out, negate, x), err);
    for (int64_t i = 0; runs && i < rows * WIDTH; i++)
        assert_true(((float *)out.data)[i] == -((float *)in.data)[i]);
}

static void test_rows_of_experts_come_back(void **state)
{
    (void)state;
    ith_mesh mesh;
    ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), NULL, &err);
    if (world->size == 1)
        return;
    assert_ok(ith_mesh_open(&mesh, world, 1, &err), err);
    assert_ok(ith_mesh_set_experts(&mesh, world->size, &err), err);
    for (int kind = 0; kind < 3; kind++) {
        seen x = {0, 0};
        assert_ok(ith_plan_create(&ctx.plan, ctx.device, &err), err);
        send_rows(&mesh, &ctx, kind, &x);
        for (int c = 0; c < ITH_MEM_CLASSES; c++)
            ith_plan_release(ctx.plan, (ith_mem_class)c, 0);
        assert_ok(ith_plan_commit(ctx.plan, &err), err);
        int64_t sent = mesh.ep->bytes_sent;
        send_rows(&mesh, &ctx, kind, &x);
        sent = mesh.ep->bytes_sent - sent;
        if (kind == 1) { /* one rank has all rows, in as many rounds as its buffers need */
            bool last = world->rank == world->size - 1;
            int64_t p = world->size, counts = (p - 1) * (p * EXPERTS_EACH + 1) * 4;
            assert_int_equal(x.rows, last ? p * ROWS : 0);
            assert_int_equal(x.calls, ith_div_ceil(p * ROWS, ROWS + ROWS / 4));
            assert_int_equal(sent, counts + (last ? p - 1 : 1) * ROWS * WIDTH * 4);
        }
        ith_plan_destroy(ctx.plan);
    }
    ith_mesh_close(&mesh);
}

/* Every division of the group in Ulysses and ring, with every stage and every way to keep; degrees
 * beyond the number of heads. */
static void test_rings_are_as_one_rank(void **state)
{
    (void)state;
    int zero = 0, keep = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        run alone;
        open_alone(&alone, &families[i], ITH_F32);
        for (int64_t cp = world->size; cp > 1; cp = world->size % 4 == 0 && cp > 4 ? cp / 2 : 1)
            for (int64_t u = 1; u <= cp && u <= alone.config.num_attention_heads; u++) {
                bool heads = u % 2 == 0 && cp <= alone.config.linear_num_value_heads;
                ith_linear_cp linear = heads ? ITH_LINEAR_HEADS : ITH_LINEAR_STATES;
                if (cp % u == 0 && (families[i].dense || u < cp) &&
                    (cp == world->size || !families[i].aux_coef))
                    run_layout(
                        &families[i], &alone,
                        (layout){0, false, cp, u, zero++ % 4, keep++ % 3, linear, ITH_F32, 0});
            }
        close_run(&alone);
    }
}

/* Goal: a ring sends what the formula says, and the plan knows its memory. */
static void walk_ring(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, int64_t *sent)
{
    enum { HEADS_Q = 4, HEADS_KV = 2, DIM = 8 };
    static const int32_t cu[] = {0, 5, 5, 40, 48};
    const int64_t rows = n / mesh->cp_size, counts[] = {HEADS_Q, HEADS_KV, HEADS_KV};
    ith_tensor t[8], lse, borders;
    for (int i = 0; i < 8; i++)
        assert_ok(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "test", ITH_F32, 3, rows,
                               i < 6 ? counts[i % 3] : HEADS_Q, DIM, 1, &t[i]),
                  err);
    assert_ok(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "test", ITH_F32, 2, rows, HEADS_Q, 1, 1, &lse),
              err);
    assert_ok(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "test", ITH_I32, 1, 5, 1, 1, 1, &borders),
              err);
    for (int i = 0; i < 8 && !ith_ctx_counting(ctx); i++)
        for (int64_t k = 0; k < ith_numel(t[i]); k++)
            ((float *)t[i].data)[k] = sinf((float)(k + i));
    ith_seqs seqs = {.cu_seqlens = borders, .cu_host = cu, .num_docs = 4, .max_len = 35};
    sent[0] = -mesh->cp->bytes_sent;
    assert_ok(ith_ring_attention_forward(mesh, ctx, n, t[6], lse, (ith_qkv){t[0], t[1], t[2]}, seqs,
                                         0.3F, true),
              err);
    sent[0] += mesh->cp->bytes_sent;
    sent[1] = -mesh->cp->bytes_sent;
    assert_ok(ith_ring_attention_backward(mesh, ctx, n, (ith_qkv){t[3], t[4], t[5]}, t[7],
                                          (ith_qkv){t[0], t[1], t[2]}, t[6], lse, seqs, 0.3F, true),
              err);
    sent[1] += mesh->cp->bytes_sent;
    int64_t unit = (mesh->cp_size - 1) * rows * 2 * HEADS_KV * DIM;
    if (!ith_ctx_counting(ctx)) {
        assert_int_equal(sent[0], unit * 4);
        assert_int_equal(sent[1], unit * (4 + 4));
    }
}

static void check_ring_bytes(bool in_order)
{
    ith_mesh mesh;
    ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), NULL, &err);
    int64_t n = 48, sent[2];
    assert_ok(ith_mesh_open(&mesh, world, world->size, &err), err);
    ith_mesh_set_ulysses(&mesh, 1, in_order);
    assert_ok(ith_plan_create(&ctx.plan, ctx.device, &err), err);
    walk_ring(&mesh, &ctx, n, sent);
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        ith_plan_release(ctx.plan, (ith_mem_class)c, 0);
    assert_ok(ith_plan_commit(ctx.plan, &err), err);
    walk_ring(&mesh, &ctx, n, sent);
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        assert_int_equal(ith_plan_high(ctx.plan, (ith_mem_class)c),
                         ith_plan_peak(ctx.plan, (ith_mem_class)c));
    ith_plan_destroy(ctx.plan);
    ith_mesh_close(&mesh);
}

static void test_a_ring_sends_what_the_formula_says(void **state)
{
    (void)state;
    for (int in_order = 0; in_order < 2 && 48 % world->size == 0 && world->size > 1; in_order++)
        check_ring_bytes(in_order);
}

/* Goal: the choice follows bytes and even heads. */
static void test_the_cheapest_scheme_is_chosen(void **state)
{
    (void)state;
    static const struct {
        int64_t q, kv, cp, e;
        ith_ring_wish wish;
        int64_t ulysses;
        bool in_order;
    } cases[] = {
        {32, 8, 8, 2, ITH_RING_AUTO, 8, false}, {32, 8, 64, 2, ITH_RING_AUTO, 32, false},
        {16, 2, 2, 2, ITH_RING_AUTO, 1, false}, {16, 2, 8, 2, ITH_RING_AUTO, 8, false},
        {9, 3, 2, 4, ITH_RING_AUTO, 1, false}, /* 3 and 6 heads are uneven */
        {4, 4, 8, 4, ITH_RING_AUTO, 4, false},  {8, 8, 8, 4, ITH_RING_ONLY, 1, false},
        {8, 8, 8, 4, ITH_RING_MIXED, 4, false}, {8, 8, 2, 4, ITH_RING_MIXED, 0, false},
        {4, 4, 8, 4, ITH_RING_NEVER, 0, false}, {9, 3, 2, 4, ITH_RING_NEVER, 2, false},
        {8, 2, 2, 2, ITH_RING_AUTO, 2, true}, /* a ring would send less, and work 1.5 of its share
                                               */
        {8, 2, 16, 2, ITH_RING_AUTO, 8, true},  {9, 3, 2, 2, ITH_RING_AUTO, 2, true},
        {8, 2, 8, 2, ITH_RING_ONLY, 1, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t u = ith_ring_choose(cases[i].q, cases[i].kv, 128, cases[i].cp, cases[i].e,
                                    cases[i].wish, cases[i].in_order);
        if (u != cases[i].ulysses)
            fail_msg("heads %lld/%lld on %lld ranks: ulysses %lld, expected %lld",
                     (long long)cases[i].q, (long long)cases[i].kv, (long long)cases[i].cp,
                     (long long)u, (long long)cases[i].ulysses);
    }
}

static const int keeps[] = {KEEP_AUTO, ITH_KEEP_ATTENTION, ITH_KEEP_INPUT, ITH_KEEP_INPUT};

static void test_all_layouts_are_as_one_rank(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        run alone;
        if (families[i].dense)
            continue;
        open_alone(&alone, &families[i], ITH_F32);
        for (int64_t cp = 1; cp <= world->size && cp <= alone.config.num_attention_heads; cp++)
            for (int zero = 0; zero <= 3 && world->size % cp == 0; zero++) {
                bool all =
                    cp == world->size; /* of the mixed ones a stage each, another per family */
                if (all ? zero % 3 : families[i].aux_coef > 0 || (cp + (int64_t)i) % 4 != zero)
                    continue;
                run_layout(&families[i], &alone,
                           (layout){0, world->size % 2 == 0 && cp == world->size, cp, cp, zero,
                                    keeps[zero], ITH_LINEAR_HEADS, ITH_F32, 0});
                if (cp > 1 && !families[i].diffusion)
                    run_layout(&families[i], &alone,
                               (layout){0, world->size % 2 == 0 && cp == world->size, cp, cp, zero,
                                        keeps[zero], ITH_LINEAR_STATES, ITH_F32, 0});
            }
        close_run(&alone);
    }
}

/* Goal: weights and gradients of experts move in the same order whatever the router says (cases
 * S74). Method: in each layer all tokens of every other document, and so of half of the ranks, go
 * to expert 0, those of the others to expert 7, and none to the other six. */
static void test_ranks_that_use_one_expert_each(void **state)
{
    (void)state;
    static const struct family lonely = {
        .name = "two experts of eight",
        .steered = true,
        .config = "{\"model_type\": \"qwen3_moe\", \"hidden_size\": 24, \"num_hidden_layers\": 2,"
                  " \"intermediate_size\": 40, \"num_attention_heads\": 8,"
                  " \"num_key_value_heads\": 2, \"head_dim\": 16, \"vocab_size\": 50,"
                  " \"tie_word_embeddings\": false, \"rope_theta\": 10000.0, \"num_experts\": 8,"
                  " \"num_experts_per_tok\": 1, \"moe_intermediate_size\": 12,"
                  " \"norm_topk_prob\": false}"};
    run alone;
    open_alone(&alone, &lonely, ITH_F32);
    int64_t busy = compare_idle_experts(&alone, &alone, lonely.name);
    if (busy != 4)
        fail_msg("%lld experts of two layers have tokens, expected 4", (long long)busy);
    for (int zero = 0; zero <= 3; zero++)
        for (int64_t ep = 0; ep <= (zero == 3 ? 8 : 0); ep = ep ? 2 * ep : 2)
            if (ep == 0 || world->size % ep == 0)
                run_layout(
                    &lonely, &alone,
                    (layout){ep, false, 1, 1, zero, keeps[zero], ITH_LINEAR_HEADS, ITH_F32, 0});
    close_run(&alone);
}

/* Within a step some documents are cut over their group and the others whole on one rank each; with
 * many ranks some have none of these. 30 is as long as the longest: nothing is cut. */
static void test_whole_documents_beside_cut_ones(void **state)
{
    (void)state;
    static const int64_t lengths[] = {3, 11, 17, 30};
    int n = 0;
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        const struct family *f = &families[i];
        run alone, like;
        open_alone(&alone, f, ITH_F32);
        for (int64_t cp = 2; cp <= world->size; cp++)
            for (int zero = 0; zero <= 3 && world->size % cp == 0; zero++, n++) {
                int64_t experts = alone.config.num_experts;
                layout l = {
                    .cp = cp,
                    .ulysses = n % 3 ? most_heads(&alone.config, cp) : 1,
                    .zero = zero,
                    .keep = n % 3,
                    .linear_cp = n % 2 ? ITH_LINEAR_STATES : ITH_LINEAR_AUTO,
                    .ep = zero == 3 && experts > 0 && experts % cp == 0 ? cp : 0,
                    .whole = ith_min_i64(lengths[n % 4], MAX_TOKENS / cp / (f->diffusion ? 2 : 1))};
                if (f->aux_coef > 0) { /* a mean over each micro-batch */
                    open_alone_like(&like, f, l);
                    run_layout(f, &like, l);
                    close_run(&like);
                } else {
                    run_layout(f, &alone, l);
                }
            }
        close_run(&alone);
    }
}

/* States cost nothing where documents are short, runs where they are long; bytes decide for heads
 * where links are slow. */
static void test_the_cheaper_way(void **state)
{
    (void)state;
    ith_linear_shape shape = {65536, 65536, 16, 32, 128, 128, 2};
    assert_false(ith_delta_scan_pays(4, &shape, 16));
    assert_true(ith_delta_scan_pays(4, &shape, 4000));
    assert_true(ith_delta_scan_pays(64, &shape, 16)); /* no heads for all */
    shape.max_doc_tokens = 1000;
    assert_true(ith_delta_scan_pays(4, &shape, 16));
    shape.tokens = 256; /* a state is as large as these parts */
    shape.max_doc_tokens = 64;
    assert_false(ith_delta_scan_pays(4, &shape, 16));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all_layouts_are_as_one_rank),
                                       cmocka_unit_test(test_ranks_that_use_one_expert_each),
                                       cmocka_unit_test(test_rings_are_as_one_rank),
                                       cmocka_unit_test(test_shared_experts_are_as_one_rank),
                                       cmocka_unit_test(test_whole_documents_beside_cut_ones),
                                       cmocka_unit_test(test_borders_and_bf16),
                                       cmocka_unit_test(test_every_layout),
                                       cmocka_unit_test(test_rows_of_experts_come_back),
                                       cmocka_unit_test(test_a_ring_sends_what_the_formula_says),
                                       cmocka_unit_test(test_the_cheapest_scheme_is_chosen),
                                       cmocka_unit_test(test_the_cheaper_way)};
    ith_use_device device = ITH_USE_CPU;
    bool has_twin = false;
    for (int i = 1; i < argc; i++) {
        thorough |= strcmp(argv[i], "all") == 0;
        if (strncmp(argv[i], "only=", 5) == 0)
            cmocka_set_test_filter(argv[i] + 5);
        device = strcmp(argv[i], "device=cuda") == 0 ? ITH_USE_CUDA : device;
        has_twin |= strcmp(argv[i], "device=twin") == 0;
    }
    ith_status status = ith_comm_open_world(&world, 120, &err);
    if (status == ITH_OK)
        status = ith_session_open(&session, device, ith_narrow(world->local_rank), 1, false, &err);
    if (status != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return status == ITH_ERR_UNSUPPORTED && device == ITH_USE_CUDA ? 77 : 1;
    }
    ith_device twin = twin_device(world, false);
    if (has_twin)
        session.ctx.device = &twin;
    int failed = cmocka_run_group_tests_name("families", tests, NULL, NULL);
    ith_session_close(&session);
    ith_comm_close(world);
    return failed;
}
