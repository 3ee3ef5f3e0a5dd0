/* presets.c - shapes of published models. Source: the config.json files of the Qwen3, Qwen3.5 and
 * LLaDA2 releases. */
#include "model/presets.h"

#include <string.h>

const char ith_preset_words[] =
    "tiny small 0.6b 1.7b 4b 8b 14b 32b tiny-moe 30b-a3b tiny-llada2 llada2-mini llada2-flash "
    "qwen3.5-tiny qwen3.5-tiny-moe qwen3.5-0.8b qwen3.5-2b qwen3.5-4b qwen3.5-9b qwen3.5-27b "
    "qwen3.5-35b-a3b";

/* Published Qwen3 and LLaDA2 shapes, and small ones. */
static const struct preset {
    const char *name;
    int64_t hidden, layers, heads, kv_heads, head_dim, intermediate;
    bool tied;
    int64_t experts, experts_per_tok, moe_intermediate;
    /* LLaDA2 (first layer dense, one shared expert): groups of experts, those a token may use */
    int64_t groups, groups_used;
} presets[] = {{"tiny", 64, 2, 4, 2, 16, 128, true, 0, 0, 0, 0, 0},
               {"small", 256, 4, 4, 2, 64, 768, true, 0, 0, 0, 0, 0},
               {"0.6b", 1024, 28, 16, 8, 128, 3072, true, 0, 0, 0, 0, 0},
               {"1.7b", 2048, 28, 16, 8, 128, 6144, true, 0, 0, 0, 0, 0},
               {"4b", 2560, 36, 32, 8, 128, 9728, true, 0, 0, 0, 0, 0},
               {"8b", 4096, 36, 32, 8, 128, 12288, false, 0, 0, 0, 0, 0},
               {"14b", 5120, 40, 40, 8, 128, 17408, false, 0, 0, 0, 0, 0},
               {"32b", 5120, 64, 64, 8, 128, 25600, false, 0, 0, 0, 0, 0},
               {"tiny-moe", 64, 2, 4, 2, 16, 128, false, 8, 2, 32, 0, 0},
               {"30b-a3b", 2048, 48, 32, 4, 128, 6144, false, 128, 8, 768, 0, 0},
               {"tiny-llada2", 64, 3, 4, 2, 16, 128, false, 8, 2, 32, 4, 2},
               {"llada2-mini", 2048, 20, 16, 4, 128, 5120, false, 256, 8, 512, 8, 4},
               {"llada2-flash", 4096, 32, 32, 4, 128, 9216, false, 256, 8, 1024, 8, 4}};

/* Qwen3.5 with its vision tower; behind the others. */
static const struct preset_3_5 {
    const char *name;
    int64_t hidden, layers, heads, kv_heads, head_dim, intermediate; /* of the shared expert, too */
    int64_t key_heads, value_heads, linear_dim;
    bool tied;
    int64_t experts, experts_per_tok;
    int64_t depth, vision_hidden, vision_heads, vision_intermediate, positions;
    int64_t min_pixels, max_pixels; /* of an image */
} presets_3_5[] = {
    {"qwen3.5-tiny", 64, 4, 4, 2, 32, 128, 2, 4, 16, true, 0, 0, 2, 32, 4, 64, 64, 1024, 65536},
    {"qwen3.5-tiny-moe", 64, 4, 4, 2, 32, 32, 2, 4, 16, false, 8, 2, 2, 32, 4, 64, 64, 1024, 65536},
    {"qwen3.5-0.8b", 1024, 24, 8,  2,   256, 3584, 16,   16,    128,
     true,           0,    0,  12, 768, 12,  3072, 2304, 65536, 16777216},
    {"qwen3.5-2b", 2048, 24, 8,  2,    256, 6144, 16,   16,    128,
     true,         0,    0,  24, 1024, 16,  4096, 2304, 65536, 16777216},
    {"qwen3.5-4b", 2560, 32, 16, 4,    256, 9216, 16,   32,    128,
     true,         0,    0,  24, 1024, 16,  4096, 2304, 65536, 16777216},
    {"qwen3.5-9b", 4096, 32, 16, 4,    256, 12288, 16,   32,    128,
     false,        0,    0,  27, 1152, 16,  4304,  2304, 65536, 16777216},
    {"qwen3.5-27b", 5120, 64, 24, 4,    256, 17408, 16,   48,    128,
     false,         0,    0,  27, 1152, 16,  4304,  2304, 65536, 16777216},
    {"qwen3.5-35b-a3b",
     2048,
     40,
     16,
     2,
     256,
     512,
     16,
     32,
     128,
     false,
     256,
     8,
     27,
     1152,
     16,
     4304,
     2304,
     65536,
     16777216}};

#define NUM_PRESETS ((int)(sizeof presets / sizeof *presets))
#define NUM_3_5 ((int)(sizeof presets_3_5 / sizeof *presets_3_5))

int ith_preset_find(const char *name)
{
    for (int i = 0; i < NUM_PRESETS + NUM_3_5; i++)
        if (strcmp(i < NUM_PRESETS ? presets[i].name : presets_3_5[i - NUM_PRESETS].name, name) ==
            0)
            return i;
    return -1;
}

int64_t ith_preset_vocab_size(int preset)
{
    return ith_preset_sees(preset) ? 248320 : ith_preset_is_diffusion(preset) ? 157184 : 151936;
}

bool ith_preset_sees(int preset)
{
    return preset >= NUM_PRESETS;
}

ith_status ith_preset_processor(int preset, bool video, json_t **out, ith_error *err)
{
    ITH_ASSERT(ith_preset_sees(preset) && preset < NUM_PRESETS + NUM_3_5);
    const struct preset_3_5 *p = &presets_3_5[preset - NUM_PRESETS];
    bool small = p->max_pixels < 1 << 20;
    json_t *c = json_pack(
        "{s:{s:I, s:I}, s:I, s:I, s:I, s:[f,f,f], s:[f,f,f], s:s, s:s}", "size", "shortest_edge",
        (json_int_t)(video ? 4096 : p->min_pixels), "longest_edge",
        (json_int_t)(!video  ? p->max_pixels
                     : small ? 2 * p->max_pixels
                             : 25165824),
        "patch_size", (json_int_t)16, "temporal_patch_size", (json_int_t)2, "merge_size",
        (json_int_t)2, "image_mean", 0.5, 0.5, 0.5, "image_std", 0.5, 0.5, 0.5, "processor_class",
        "Qwen3VLProcessor", video ? "video_processor_type" : "image_processor_type",
        video ? "Qwen3VLVideoProcessor" : "Qwen2VLImageProcessor");
    if (!c)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for the processor");
    *out = c;
    return ITH_OK;
}

static json_t *text_config(const struct preset_3_5 *p, int64_t vocab_size, int64_t eos_token_id,
                           const char *dtype)
{
    json_t *c = json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:I, "
        "s:f, s:o, s:{s:b, s:[I,I,I], s:s, s:f, s:f}}",
        "model_type", p->experts ? "qwen3_5_moe_text" : "qwen3_5_text", "dtype", dtype,
        "vocab_size", (json_int_t)vocab_size, "hidden_size", (json_int_t)p->hidden,
        "num_hidden_layers", (json_int_t)p->layers, "num_attention_heads", (json_int_t)p->heads,
        "num_key_value_heads", (json_int_t)p->kv_heads, "head_dim", (json_int_t)p->head_dim,
        "full_attention_interval", (json_int_t)4, "linear_conv_kernel_dim", (json_int_t)4,
        "linear_key_head_dim", (json_int_t)p->linear_dim, "linear_value_head_dim",
        (json_int_t)p->linear_dim, "linear_num_key_heads", (json_int_t)p->key_heads,
        "linear_num_value_heads", (json_int_t)p->value_heads, "hidden_act", "silu", "rms_norm_eps",
        1e-6, "max_position_embeddings", (json_int_t)262144, "initializer_range", 0.02,
        "eos_token_id", eos_token_id >= 0 ? json_integer(eos_token_id) : json_null(),
        "rope_parameters", "mrope_interleaved", 1, "mrope_section",
        (json_int_t)(p->head_dim == 256 ? 11 : 2), (json_int_t)(p->head_dim == 256 ? 11 : 1),
        (json_int_t)(p->head_dim == 256 ? 10 : 1), "rope_type", "default", "rope_theta", 1e7,
        "partial_rotary_factor", 0.25);
    if (p->experts) {
        json_object_set_new(c, "num_experts", json_integer(p->experts));
        json_object_set_new(c, "num_experts_per_tok", json_integer(p->experts_per_tok));
        json_object_set_new(c, "moe_intermediate_size", json_integer(p->intermediate));
        json_object_set_new(c, "shared_expert_intermediate_size", json_integer(p->intermediate));
    } else {
        json_object_set_new(c, "intermediate_size", json_integer(p->intermediate));
    }
    return c;
}

static ith_status qwen3_5_config(const struct preset_3_5 *p, int64_t vocab_size,
                                 int64_t eos_token_id, const char *dtype, json_t **out,
                                 ith_error *err)
{
    json_t *vision =
        json_pack("{s:s, s:I, s:s, s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "model_type",
                  p->experts ? "qwen3_5_moe" : "qwen3_5", "depth", (json_int_t)p->depth,
                  "hidden_act", "gelu_pytorch_tanh", "hidden_size", (json_int_t)p->vision_hidden,
                  "in_channels", (json_int_t)3, "initializer_range", 0.02, "intermediate_size",
                  (json_int_t)p->vision_intermediate, "num_heads", (json_int_t)p->vision_heads,
                  "num_position_embeddings", (json_int_t)p->positions, "out_hidden_size",
                  (json_int_t)p->hidden, "patch_size", (json_int_t)16, "spatial_merge_size",
                  (json_int_t)2, "temporal_patch_size", (json_int_t)2);
    json_t *c = json_pack("{s:[s], s:s, s:o, s:o, s:b}", "architectures",
                          p->experts ? "Qwen3_5MoeForConditionalGeneration"
                                     : "Qwen3_5ForConditionalGeneration",
                          "model_type", p->experts ? "qwen3_5_moe" : "qwen3_5", "text_config",
                          text_config(p, vocab_size, eos_token_id, dtype), "vision_config", vision,
                          "tie_word_embeddings", (int)p->tied);
    if (!c)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for config.json");
    *out = c;
    return ITH_OK;
}

/* What LLaDA2 has besides, or otherwise. Takes c. */
static ith_status llada2_config(json_t *c, const struct preset *p, json_t **out, ith_error *err)
{
    static const char *const zeros[] = {"attention_dropout", "embedding_dropout", "output_dropout"};
    json_object_set_new(c, "architectures", json_pack("[s]", "LLaDA2MoeModelLM"));
    json_object_set_new(c, "model_type", json_string("llada2_moe"));
    json_object_del(c, "attention_bias");
    for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++)
        json_object_set_new(c, zeros[i], json_real(0));
    json_t *more = json_pack(
        "{s:f, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:b, s:b, s:b, s:f, s:s, s:b}",
        "rope_theta", 600000.0, "partial_rotary_factor", 0.5, "num_experts", (json_int_t)p->experts,
        "num_experts_per_tok", (json_int_t)p->experts_per_tok, "moe_intermediate_size",
        (json_int_t)p->moe_intermediate, "num_shared_experts", (json_int_t)1,
        "first_k_dense_replace", (json_int_t)1, "n_group", (json_int_t)p->groups, "topk_group",
        (json_int_t)p->groups_used, "use_bias", 0, "use_qkv_bias", 0, "use_qk_norm", 1,
        "norm_topk_prob", 1, "routed_scaling_factor", 2.5, "score_function", "sigmoid",
        "moe_router_enable_expert_bias", 1);
    int failed = !more || json_object_update(c, more) != 0;
    json_decref(more);
    if (failed) {
        json_decref(c);
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for config.json");
    }
    *out = c;
    return ITH_OK;
}

bool ith_preset_is_diffusion(int preset)
{
    ITH_ASSERT(preset >= 0 && preset < NUM_PRESETS + NUM_3_5);
    return preset < NUM_PRESETS && presets[preset].groups > 0;
}

ith_status ith_preset_config(int preset, int64_t vocab_size, int64_t eos_token_id, ith_dtype dtype,
                             json_t **out, ith_error *err)
{
    ITH_ASSERT(preset >= 0 && preset < NUM_PRESETS + NUM_3_5);
    if (ith_preset_sees(preset))
        return qwen3_5_config(&presets_3_5[preset - NUM_PRESETS], vocab_size, eos_token_id,
                              dtype == ITH_F32 ? "float32" : "bfloat16", out, err);
    const struct preset *p = &presets[preset];
    json_t *c = json_pack(
        "{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:f, s:f, s:I, s:b, s:b, s:f, s:o, "
        "s:o, s:s, s:b, s:b}",
        "architectures", p->experts ? "Qwen3MoeForCausalLM" : "Qwen3ForCausalLM", "model_type",
        p->experts ? "qwen3_moe" : "qwen3", "vocab_size", (json_int_t)vocab_size, "hidden_size",
        (json_int_t)p->hidden, "num_hidden_layers", (json_int_t)p->layers, "num_attention_heads",
        (json_int_t)p->heads, "num_key_value_heads", (json_int_t)p->kv_heads, "head_dim",
        (json_int_t)p->head_dim, "intermediate_size", (json_int_t)p->intermediate, "hidden_act",
        "silu", "rms_norm_eps", 1e-6, "rope_theta", 1e6, "max_position_embeddings",
        (json_int_t)40960, "tie_word_embeddings", (int)p->tied, "attention_bias", 0,
        "initializer_range", 0.02, "eos_token_id",
        eos_token_id >= 0 ? json_integer(eos_token_id) : json_null(), "bos_token_id", json_null(),
        "torch_dtype", dtype == ITH_F32 ? "float32" : "bfloat16", "use_cache", 1,
        "use_sliding_window", 0);
    if (c && p->groups)
        return llada2_config(c, p, out, err);
    if (c && p->experts) {
        json_object_set_new(c, "num_experts", json_integer(p->experts));
        json_object_set_new(c, "num_experts_per_tok", json_integer(p->experts_per_tok));
        json_object_set_new(c, "moe_intermediate_size", json_integer(p->moe_intermediate));
        json_object_set_new(c, "norm_topk_prob", json_true());
        json_object_set_new(c, "decoder_sparse_step", json_integer(1));
    }
    if (!c)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for config.json");
    *out = c;
    return ITH_OK;
}
