/* presets.c - shapes of published models. Source: the config.json files of the Qwen3 releases. */
#include "model/presets.h"

#include <string.h>

const char ith_preset_words[] = "tiny small 0.6b 1.7b 4b 8b 14b 32b tiny-moe 30b-a3b tiny-llada2";

/* Published Qwen3 shapes, and two small ones. */
static const struct preset {
    const char *name;
    int64_t hidden, layers, heads, kv_heads, head_dim, intermediate;
    bool tied;
    int64_t experts, experts_per_tok, moe_intermediate;
    bool llada2; /* first layer dense, 4 groups of experts, 2 of them, one shared expert */
} presets[] = {{"tiny", 64, 2, 4, 2, 16, 128, true, 0, 0, 0, false},
               {"small", 256, 4, 4, 2, 64, 768, true, 0, 0, 0, false},
               {"0.6b", 1024, 28, 16, 8, 128, 3072, true, 0, 0, 0, false},
               {"1.7b", 2048, 28, 16, 8, 128, 6144, true, 0, 0, 0, false},
               {"4b", 2560, 36, 32, 8, 128, 9728, true, 0, 0, 0, false},
               {"8b", 4096, 36, 32, 8, 128, 12288, false, 0, 0, 0, false},
               {"14b", 5120, 40, 40, 8, 128, 17408, false, 0, 0, 0, false},
               {"32b", 5120, 64, 64, 8, 128, 25600, false, 0, 0, 0, false},
               {"tiny-moe", 64, 2, 4, 2, 16, 128, false, 8, 2, 32, false},
               {"30b-a3b", 2048, 48, 32, 4, 128, 6144, false, 128, 8, 768, false},
               {"tiny-llada2", 64, 3, 4, 2, 16, 128, false, 8, 2, 32, true}};

int ith_preset_find(const char *name)
{
    for (int i = 0; i < (int)(sizeof presets / sizeof *presets); i++)
        if (strcmp(presets[i].name, name) == 0)
            return i;
    return -1;
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
        "first_k_dense_replace", (json_int_t)1, "n_group", (json_int_t)4, "topk_group",
        (json_int_t)2, "use_bias", 0, "use_qkv_bias", 0, "use_qk_norm", 1, "norm_topk_prob", 1,
        "routed_scaling_factor", 2.5, "score_function", "sigmoid", "moe_router_enable_expert_bias",
        1);
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
    ITH_ASSERT(preset >= 0 && preset < (int)(sizeof presets / sizeof *presets));
    return presets[preset].llada2;
}

ith_status ith_preset_config(int preset, int64_t vocab_size, int64_t eos_token_id, ith_dtype dtype,
                             json_t **out, ith_error *err)
{
    ITH_ASSERT(preset >= 0 && preset < (int)(sizeof presets / sizeof *presets));
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
    if (c && p->llada2)
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
