/* small_model.h - small Qwen3 models and packed batches for tests, in memory or as directories.
 *
 * Weights are those of `ithaca init` with a wide initializer_range, and norms away from one, so
 * that a gradient that is dropped or counted twice shows. Everything follows from the seed. */
#ifndef ITH_TESTS_SMALL_MODEL_H
#define ITH_TESTS_SMALL_MODEL_H

#include "testing.h"

#include "base/rng.h"
#include "kernels/session.h"
#include "train/step.h"

typedef struct {
    int64_t vocab, hidden, layers, heads, kv_heads, head_dim, inter;
    int64_t experts, topk, moe_inter; /* experts 0: dense */
    bool tied, norm_topk;
    const char *more;       /* further members of config.json, ", \"key\": value", or NULL */
    const char *init_range; /* initializer_range; NULL: 0.15 */
    const char *type;       /* model_type; NULL: qwen3 or qwen3_moe */
} small_shape;

static const small_shape small_dense = {211, 48, 3,     4,     2,    16,   80,  0,
                                        0,   0,  false, false, NULL, NULL, NULL};
static const small_shape small_tied = {211, 40, 2,    2,     1,    24,   72,  0,
                                       0,   0,  true, false, NULL, NULL, NULL};
static const small_shape small_moe = {211, 48, 2,     4,    2,    16,   80,  8,
                                      2,   24, false, true, NULL, NULL, NULL};
static const small_shape small_moe_raw = {211, 48, 2,    4,     2,    16,   80,  8,
                                          3,   24, true, false, NULL, NULL, NULL};

/* Layers with a state around one of attention. */
static const small_shape small_linear = {
    .vocab = 211,
    .hidden = 24,
    .layers = 3,
    .heads = 4,
    .kv_heads = 2,
    .head_dim = 16,
    .inter = 40,
    .type = "qwen3_5_text",
    .more = ", \"layer_types\": [\"linear_attention\", \"full_attention\", \"linear_attention\"],"
            " \"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, "
            "\"linear_key_head_dim\": 8, \"linear_value_head_dim\": 12, "
            "\"linear_conv_kernel_dim\": 4, \"rope_parameters\": {\"rope_theta\": 10000.0, "
            "\"partial_rotary_factor\": 0.5, \"mrope_section\": [2, 1, 1]}"};

static inline void small_config_text(const small_shape *s, ith_buf *out)
{
    const char *type = s->type ? s->type : s->experts ? "qwen3_moe" : "qwen3";
    ith_buf_printf(out,
                   "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"vocab_size\": %lld, "
                   "\"hidden_size\": %lld, \"num_hidden_layers\": %lld, "
                   "\"num_attention_heads\": %lld, \"num_key_value_heads\": %lld, "
                   "\"head_dim\": %lld, \"intermediate_size\": %lld, \"hidden_act\": \"silu\", "
                   "\"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, "
                   "\"max_position_embeddings\": 4096, \"tie_word_embeddings\": %s, "
                   "\"initializer_range\": %s, \"attention_bias\": false",
                   s->type      ? "Qwen3_5ForCausalLM"
                   : s->experts ? "Qwen3MoeForCausalLM"
                                : "Qwen3ForCausalLM",
                   type, (long long)s->vocab, (long long)s->hidden, (long long)s->layers,
                   (long long)s->heads, (long long)s->kv_heads, (long long)s->head_dim,
                   (long long)s->inter, s->tied ? "true" : "false",
                   s->init_range ? s->init_range : "0.15");
    if (s->experts)
        ith_buf_printf(out,
                       ", \"num_experts\": %lld, \"num_experts_per_tok\": %lld, "
                       "\"moe_intermediate_size\": %lld, \"norm_topk_prob\": %s, "
                       "\"decoder_sparse_step\": 1, \"mlp_only_layers\": []",
                       (long long)s->experts, (long long)s->topk, (long long)s->moe_inter,
                       s->norm_topk ? "true" : "false");
    ith_buf_printf(out, "%s}", s->more ? s->more : "");
}

/* Values of a piece: those of `init`, norms 1 + 0.2 u. */
static inline void small_values(const ith_model *m, const ith_hf_piece *p, uint64_t seed,
                                float *out)
{
    ith_model_init_piece(m, p, seed, 0, p->count, out);
    for (int64_t i = 0; p->is_norm && i < p->count; i++)
        out[i] +=
            0.2f * (float)(ith_rng_uniform(seed, ith_rng_stream(p->hf_name), (uint64_t)i) - 0.5);
}

/* ---- a model ready to step ---- */

typedef struct {
    ith_error err;
    ith_hf_config config;
    ith_session session;
    ith_model *model;
    ith_step *step;
} small_run;

static inline void small_fill(small_run *r, uint64_t seed)
{
    ith_device *d = r->session.ctx.device;
    if (r->step->master.ndim) /* the gaps between parameters */
        assert_ok(ith_zero(&r->session.ctx, r->step->master), r->err);
    for (int64_t i = 0; i < r->model->num_pieces; i++) {
        const ith_hf_piece *p = &r->model->pieces[i];
        float *values = ith_malloc(p->count * 4);
        char *bytes = ith_malloc(p->count * 4);
        assert_true(values && bytes);
        small_values(r->model, p, seed, values);
        ith_tensor flats[2] = {r->model->w, r->step->master};
        for (int k = 0; k < 2; k++) {
            if (!flats[k].ndim)
                continue;
            int64_t size = ith_dtype_bytes(flats[k].dtype),
                    at = r->model->params[p->param].first + p->first;
            ith_convert(bytes, flats[k].dtype, values, ITH_F32, p->count);
            assert_ok(
                d->upload(d, (char *)flats[k].data + at * size, bytes, p->count * size, &r->err),
                r->err);
            assert_ok(d->sync(d, &r->err), r->err);
        }
        ith_free(values);
        ith_free(bytes);
    }
}

/* device: a copy of the CPU's, which then is a device beside the host; NULL: the CPU itself. */
static inline void small_open_on(small_run *r, const small_shape *shape, ith_dtype dtype,
                                 int threads, const ith_step_config *config, ith_device *device)
{
    memset(r, 0, sizeof *r);
    ith_buf text = {0};
    small_config_text(shape, &text);
    assert_ok(ith_hf_config_parse(&r->config, text.data, text.len, "config.json", &r->err), r->err);
    ith_buf_deinit(&text);
    assert_ok(ith_session_open(&r->session, ITH_USE_CPU, 0, threads, false, &r->err), r->err);
    if (device) {
        r->session.ctx.device = device;
        assert_ok(ith_session_new_plan(&r->session), r->err);
    }
    assert_ok(ith_model_create(&r->model, &r->config, dtype, config->max_doc_tokens, &r->err),
              r->err);
    assert_ok(ith_step_create(&r->step, r->model, &r->session.ctx, config, false), r->err);
    small_fill(r, 7);
}

static inline void small_open(small_run *r, const small_shape *shape, ith_dtype dtype, int threads,
                              const ith_step_config *config)
{
    small_open_on(r, shape, dtype, threads, config, NULL);
}

static inline void small_close(small_run *r)
{
    ith_step_destroy(r->step);
    ith_model_destroy(r->model);
    ith_session_close(&r->session);
    ith_hf_config_deinit(&r->config);
}

/* A device tensor as f32; free with ith_free. */
static inline float *small_floats(small_run *r, ith_tensor t)
{
    ith_device *d = r->session.ctx.device;
    int64_t n = ith_numel(t);
    char *raw = ith_malloc(ith_tensor_bytes(t) + 8);
    float *out = ith_malloc(n * 4 + 4);
    assert_true(raw && out);
    assert_ok(d->download(d, raw, t.data, ith_tensor_bytes(t), &r->err), r->err);
    assert_ok(d->sync(d, &r->err), r->err);
    ith_convert(out, ITH_F32, raw, t.dtype, n);
    ith_free(raw);
    return out;
}

static inline double small_loss(small_run *r)
{
    ith_device *d = r->session.ctx.device;
    double loss = 0;
    assert_ok(d->download(d, &loss, r->step->loss_sum.data, sizeof loss, &r->err), r->err);
    assert_ok(d->sync(d, &r->err), r->err);
    return loss;
}

/* ---- batches ---- */

/* Packed documents of these lengths. A row has a target with probability 2/3 (always when `full`);
 * weights are 1, or one of 0.25, 1, 2 per document when `weighted`. Document i is made from `first
 * + i` alone, so the same document comes again in another packing. */
static inline ith_micro_batch small_batch(const int64_t *lengths, int64_t docs, int64_t first,
                                          int64_t vocab, bool full, bool weighted)
{
    static const float weight_of[] = {0.25f, 1.0f, 2.0f};
    ith_micro_batch b = {.num_docs = docs};
    for (int64_t i = 0; i < docs; i++)
        b.num_tokens += lengths[i];
    int64_t n = b.num_tokens;
    b.ids = ith_malloc(n * 4);
    b.position_ids = ith_malloc(n * 4);
    b.labels = ith_malloc(n * 4);
    b.weights = ith_malloc(n * 4);
    b.cu_seqlens = ith_malloc((docs + 1) * 4);
    assert_true(b.ids && b.position_ids && b.labels && b.weights && b.cu_seqlens);
    b.cu_seqlens[0] = 0;
    for (int64_t i = 0, t = 0; i < docs; i++) {
        uint64_t doc = (uint64_t)(first + i);
        for (int64_t p = 0; p < lengths[i]; p++, t++) {
            b.ids[t] = (int32_t)(ith_rng_uniform(1, doc, (uint64_t)p) * (double)vocab);
            b.position_ids[t] = (int32_t)p;
            bool target =
                p + 1 < lengths[i] && (full || ith_rng_uniform(2, doc, (uint64_t)p) < 2.0 / 3.0);
            b.labels[t] =
                target ? (int32_t)(ith_rng_uniform(1, doc, (uint64_t)p + 1) * (double)vocab) : -100;
            b.weights[t] = !target ? 0.0f : weighted ? weight_of[doc % 3] : 1.0f;
            b.num_labels += target;
            b.weight_sum += (double)b.weights[t];
        }
        b.cu_seqlens[i + 1] = (int32_t)t;
    }
    return b;
}

static inline void small_batch_free(ith_micro_batch *b)
{
    ith_free(b->ids);
    ith_free(b->position_ids);
    ith_free(b->labels);
    ith_free(b->weights);
    ith_free(b->cu_seqlens);
}

/* Limits that hold the batch. */
static inline ith_step_config small_limits(const ith_micro_batch *b)
{
    ith_step_config c = {.max_tokens = b->num_tokens,
                         .max_docs = b->num_docs,
                         .max_labels = b->num_labels > 0 ? b->num_labels : 1,
                         .training = true,
                         .evaluates = true,
                         .fp32_master = true,
                         .keep = ITH_KEEP_ALL};
    for (int64_t i = 0; i < b->num_docs; i++)
        if (b->cu_seqlens[i + 1] - b->cu_seqlens[i] > c.max_doc_tokens)
            c.max_doc_tokens = b->cu_seqlens[i + 1] - b->cu_seqlens[i];
    return c;
}

#endif
