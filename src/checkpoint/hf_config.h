/* hf_config.h - config.json of a Hugging Face model directory as a plain struct.
 *
 * Both spellings of the world are read: rope_theta + rope_scaling or rope_parameters, torch_dtype
 * or dtype, num_experts or num_local_experts. What this program cannot do (sliding windows, biases
 * in attention, quantized weights, an unknown model_type) is an error before any weight is read.
 * Keys nobody reads are kept in the file when the model is written (model_dir.h). */
#ifndef ITH_CHECKPOINT_HF_CONFIG_H
#define ITH_CHECKPOINT_HF_CONFIG_H

#include "base/json.h"
#include "tensor/dtype.h"

#define ITH_HF_MAX_STOP_IDS 16
#define ITH_HF_MAX_LAYERS 1024

typedef enum {
    ITH_FAMILY_QWEN3,
    ITH_FAMILY_QWEN3_MOE,
    ITH_FAMILY_QWEN3_5,
    ITH_FAMILY_QWEN3_5_MOE,
    ITH_FAMILY_LLADA2
} ith_family;
typedef enum { ITH_ROPE_DEFAULT, ITH_ROPE_LINEAR, ITH_ROPE_YARN } ith_rope_type;

/* Rotary position embedding. The fields below `factor` matter for yarn only. */
typedef struct {
    ith_rope_type type;
    double theta;
    double partial_rotary_factor; /* share of head_dim that is rotated; 1 for Qwen3 */
    double factor;                /* positions are divided by it (linear), or stretched (yarn) */
    int64_t original_max_position_embeddings;
    double beta_fast, beta_slow;
    bool truncate;           /* round the ramp's ends to whole dimensions */
    double attention_factor; /* cos and sin are multiplied by it; resolved, 1 unless yarn */
} ith_rope_config;

/* The vision tower of Qwen3.5; hidden_size 0: the model has none. */
typedef struct {
    int64_t depth, hidden_size, intermediate_size, num_heads;
    int64_t in_channels, patch_size, temporal_patch_size, spatial_merge_size;
    int64_t num_position_embeddings; /* a square table, side * side */
    int64_t out_hidden_size;         /* of the merger: the text model's hidden_size */
    double rope_theta;
} ith_hf_vision;

typedef struct {
    ith_family family;
    char model_type[32];
    int64_t vocab_size, hidden_size, num_hidden_layers;
    int64_t num_attention_heads, num_key_value_heads, head_dim;
    int64_t intermediate_size; /* of dense layers */
    int64_t max_position_embeddings;
    double rms_norm_eps, initializer_range;
    bool tie_word_embeddings;
    ith_rope_config rope;

    /* ids; -1: none */
    int64_t bos_token_id, pad_token_id;
    int64_t eos_token_ids[ITH_HF_MAX_STOP_IDS];
    int num_eos_token_ids;

    /* mixture of experts; num_experts 0: dense */
    int64_t num_experts, num_experts_per_tok, moe_intermediate_size;
    bool norm_topk_prob, output_router_logits;
    double router_aux_loss_coef;
    bool layer_is_moe[ITH_HF_MAX_LAYERS];
    int64_t shared_expert_intermediate_size; /* 0: no shared expert */

    /* Gated DeltaNet layers of Qwen3.5 */
    bool layer_is_linear[ITH_HF_MAX_LAYERS];
    int64_t linear_num_key_heads, linear_num_value_heads;
    int64_t linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim;

    /* The text model lies in text_config, its tensors under model.language_model. */
    bool is_nested;
    ith_hf_vision vision;
    int64_t image_token_id, video_token_id; /* -1: none */

    /* LLaDA2: sigmoid router with groups, shared experts (num_shared_experts 0: none) */
    int64_t num_shared_experts, n_group, topk_group;
    double routed_scaling_factor;
    bool has_expert_bias;  /* a missing mlp.gate.expert_bias is an error, else it is zero */
    int64_t mask_token_id; /* of diffusion models, where the file names one; else -1 */

    bool has_dtype; /* the file names a dtype */
    ith_dtype dtype;

    json_t *raw; /* the whole file; owned */
} ith_hf_config;

/* dir/config.json. On success the caller ends with ith_hf_config_deinit. */
ith_status ith_hf_config_load(ith_hf_config *out, const char *dir, ith_error *err);
/* The same from text; `name` stands in error texts. */
ith_status ith_hf_config_parse(ith_hf_config *out, const char *text, int64_t len, const char *name,
                               ith_error *err);
void ith_hf_config_deinit(ith_hf_config *config);

/* generation_config.json: sampling defaults and stop ids. Absent values hold the HF defaults; a
 * missing file gives them all. */
typedef struct {
    bool do_sample;
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;                              /* 0: off */
    int64_t max_new_tokens;                     /* -1: not given */
    int64_t eos_token_ids[ITH_HF_MAX_STOP_IDS]; /* none given: num 0, use those of config.json */
    int num_eos_token_ids;
    int64_t bos_token_id, pad_token_id; /* -1: none */
} ith_hf_generation;
ith_status ith_hf_generation_load(ith_hf_generation *out, const char *dir, ith_error *err);
ith_status ith_hf_generation_parse(ith_hf_generation *out, const char *text, int64_t len,
                                   const char *name, ith_error *err);

/* "bfloat16", "float32", "float16", "float64" (also with "torch." before it). */
bool ith_hf_dtype_from_name(const char *name, ith_dtype *out);
const char *ith_hf_dtype_name(ith_dtype dtype); /* NULL when HF has no such training dtype */

#endif
