/* hf_config.c - reads config.json and generation_config.json.
 *
 * Invariants:
 *  1. After a successful parse every size is positive and the struct is consistent (heads divide,
 *     experts fit), so that model code only asserts.
 *  2. An error names the key and what would be right. */
#include "checkpoint/hf_config.h"

#include "base/checked.h"
#include "base/file.h"

#include <math.h>

/* Sizes above these are typing errors or attacks; products of a few of them fit 64 bits. */
#define MAX_SIZE ((int64_t)1 << 31)
#define MAX_POSITIONS ((int64_t)1 << 40)

/* ---- typed look-ups; a null value counts as absent, as in HF ---- */

static const json_t *get(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

/* Of two spellings, the first that is there. */
static const json_t *get_either(const json_t *object, const char *key, const char *other,
                                const char **found)
{
    const json_t *value = get(object, key);
    *found = value || !get(object, other) ? key : other;
    return value ? value : get(object, other);
}

static ith_status wrong_type(const char *key, const json_t *value, const char *expected,
                             ith_error *err)
{
    return ith_fail(err, ITH_ERR_FORMAT, "%s: found %s, expected %s", key,
                    ith_json_type_name(value), expected);
}

/* 4096 and 4096.0 are the same size. */
static bool as_integer(const json_t *value, int64_t *out)
{
    if (json_is_integer(value)) {
        *out = (int64_t)json_integer_value(value);
        return true;
    }
    double real = json_real_value(value);
    if (!json_is_real(value) || real != floor(real) || fabs(real) > 9e15)
        return false;
    *out = (int64_t)real;
    return true;
}

static ith_status check_integer(const json_t *value, const char *key, int64_t low, int64_t high,
                                int64_t *out, ith_error *err)
{
    int64_t number = 0;
    if (!as_integer(value, &number))
        return wrong_type(key, value, "an integer", err);
    if (number < low || number > high)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: %lld is outside %lld .. %lld", key,
                        (long long)number, (long long)low, (long long)high);
    *out = number;
    return ITH_OK;
}

static ith_status need_integer(const json_t *object, const char *key, int64_t low, int64_t high,
                               int64_t *out, ith_error *err)
{
    const json_t *value = get(object, key);
    if (!value)
        return ith_fail(err, ITH_ERR_FORMAT, "%s is missing", key);
    return check_integer(value, key, low, high, out, err);
}

/* *out keeps its value when the key is absent. */
static ith_status opt_integer(const json_t *object, const char *key, int64_t low, int64_t high,
                              int64_t *out, ith_error *err)
{
    const json_t *value = get(object, key);
    return value ? check_integer(value, key, low, high, out, err) : ITH_OK;
}

static ith_status opt_number(const json_t *object, const char *key, double low, double high,
                             double *out, ith_error *err)
{
    const json_t *value = get(object, key);
    if (!value)
        return ITH_OK;
    if (!json_is_number(value))
        return wrong_type(key, value, "a number", err);
    double number = json_number_value(value);
    if (!(number >= low && number <= high))
        return ith_fail(err, ITH_ERR_FORMAT, "%s: %g is outside %g .. %g", key, number, low, high);
    *out = number;
    return ITH_OK;
}

static ith_status opt_bool(const json_t *object, const char *key, bool *out, ith_error *err)
{
    const json_t *value = get(object, key);
    if (value && !json_is_boolean(value))
        return wrong_type(key, value, "true or false", err);
    if (value)
        *out = json_is_true(value);
    return ITH_OK;
}

/* One id or a list of ids. */
static ith_status opt_ids(const json_t *object, const char *key, int64_t *ids, int *num_ids,
                          ith_error *err)
{
    const json_t *value = get(object, key);
    if (!value)
        return ITH_OK;
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    if (count > ITH_HF_MAX_STOP_IDS)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s: %zu ids, at most %d are supported", key,
                        count, ITH_HF_MAX_STOP_IDS);
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
        ITH_TRY(check_integer(id, key, 0, MAX_SIZE, &ids[i], err));
    }
    *num_ids = (int)count;
    return ITH_OK;
}

/* Some configs give a list where one id is meant; the first counts. -1 (none) is in the wild. */
static ith_status opt_id(const json_t *object, const char *key, int64_t *out, ith_error *err)
{
    const json_t *value = get(object, key);
    if (json_is_array(value))
        value = json_array_get(value, 0);
    return value ? check_integer(value, key, -1, MAX_SIZE, out, err) : ITH_OK;
}

static bool is_qwen3_5(const ith_hf_config *c)
{
    return c->family == ITH_FAMILY_QWEN3_5 || c->family == ITH_FAMILY_QWEN3_5_MOE;
}

/* ---- rotary embedding ---- */

static ith_status parse_rope_type(const json_t *rope, ith_rope_type *out, ith_error *err)
{
    static const struct {
        const char *name;
        ith_rope_type type;
    } known[] = {
        {"default", ITH_ROPE_DEFAULT}, {"linear", ITH_ROPE_LINEAR}, {"yarn", ITH_ROPE_YARN}};
    const char *key;
    const json_t *value = get_either(rope, "rope_type", "type", &key);
    if (!value)
        return ITH_OK;
    if (!json_is_string(value))
        return wrong_type(key, value, "a name like \"yarn\"", err);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(json_string_value(value), known[i].name) == 0) {
            *out = known[i].type;
            return ITH_OK;
        }
    return ith_fail(err, ITH_ERR_UNSUPPORTED,
                    "%s: \"%.32s\" is not supported (default, linear and yarn are)", key,
                    json_string_value(value));
}

/* cos and sin grow with the stretch factor; DeepSeek's two mscales divide out. */
static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

static ith_status parse_yarn(const json_t *rope, ith_rope_config *out, ith_error *err)
{
    double mscale = 0, mscale_all_dim = 0;
    ITH_TRY(opt_integer(rope, "original_max_position_embeddings", 1, MAX_POSITIONS,
                        &out->original_max_position_embeddings, err));
    ITH_TRY(opt_number(rope, "beta_fast", 1e-6, 1e6, &out->beta_fast, err));
    ITH_TRY(opt_number(rope, "beta_slow", 1e-6, 1e6, &out->beta_slow, err));
    if (out->beta_fast < out->beta_slow)
        return ith_fail(err, ITH_ERR_FORMAT, "beta_fast: %g is below beta_slow %g", out->beta_fast,
                        out->beta_slow);
    ITH_TRY(opt_bool(rope, "truncate", &out->truncate, err));
    ITH_TRY(opt_number(rope, "mscale", 0, 1e3, &mscale, err));
    ITH_TRY(opt_number(rope, "mscale_all_dim", 0, 1e3, &mscale_all_dim, err));
    out->attention_factor =
        mscale != 0 && mscale_all_dim != 0
            ? yarn_mscale(out->factor, mscale) / yarn_mscale(out->factor, mscale_all_dim)
            : yarn_mscale(out->factor, 1);
    return opt_number(rope, "attention_factor", 1e-6, 1e3, &out->attention_factor, err);
}

static ith_status parse_rope(const json_t *root, ith_hf_config *c, ith_error *err)
{
    ith_rope_config *out = &c->rope;
    double share = is_qwen3_5(c) ? 0.25 : 1;
    *out = (ith_rope_config){
        ITH_ROPE_DEFAULT, 10000, share, 1, c->max_position_embeddings, 32, 1, true, 1};
    const char *key;
    const json_t *rope = get_either(root, "rope_parameters", "rope_scaling", &key);
    if (rope && !json_is_object(rope))
        return wrong_type(key, rope, "an object or null", err);
    /* inside rope_parameters wins over a copy at the top */
    ITH_TRY(opt_number(root, "rope_theta", 1, 1e12, &out->theta, err));
    ITH_TRY(opt_number(root, "partial_rotary_factor", 1e-6, 1, &out->partial_rotary_factor, err));
    if (!rope)
        return ITH_OK;
    ITH_WRAP(opt_number(rope, "rope_theta", 1, 1e12, &out->theta, err), err, "%s", key);
    ITH_WRAP(opt_number(rope, "partial_rotary_factor", 1e-6, 1, &out->partial_rotary_factor, err),
             err, "%s", key);
    ITH_WRAP(parse_rope_type(rope, &out->type, err), err, "%s", key);
    if (out->type == ITH_ROPE_DEFAULT)
        return ITH_OK;
    if (!get(rope, "factor"))
        return ith_fail(err, ITH_ERR_FORMAT, "%s: factor is missing", key);
    ITH_WRAP(opt_number(rope, "factor", 1, 1e6, &out->factor, err), err, "%s", key);
    if (out->type == ITH_ROPE_YARN)
        ITH_WRAP(parse_yarn(rope, out, err), err, "%s", key);
    return ITH_OK;
}

/* ---- what cannot be trained yet ---- */

static ith_status refuse_unsupported(const json_t *root, const ith_hf_config *c, ith_error *err)
{
    bool use_sliding_window = false, attention_bias = false, mlp_bias = false;
    ITH_TRY(opt_bool(root, "use_sliding_window", &use_sliding_window, err));
    ITH_TRY(opt_bool(root, "attention_bias", &attention_bias, err));
    ITH_TRY(opt_bool(root, "mlp_bias", &mlp_bias, err));
    /* an explicit null is no window; an absent key is the class default, a window */
    if (use_sliding_window && !json_is_null(json_object_get(root, "sliding_window")))
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "use_sliding_window: sliding window attention is not supported (set it to "
                        "false to attend to everything)");
    if (attention_bias || mlp_bias)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s: biases are not supported",
                        attention_bias ? "attention_bias" : "mlp_bias");
    if (get(root, "quantization_config"))
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "quantization_config: quantized weights cannot be trained (use the bf16 "
                        "model they were made from)");
    const json_t *act = get(root, "hidden_act");
    if (act && (!json_is_string(act) || strcmp(json_string_value(act), "silu") != 0))
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "hidden_act: only \"silu\" is supported");
    double dropout = 0;
    ITH_TRY(opt_number(root, "attention_dropout", 0, 1, &dropout, err));
    if (dropout > 0)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "attention_dropout: %g is not supported (0 is)",
                        dropout);
    const json_t *types = get(root, "layer_types");
    if (types && !json_is_array(types))
        return wrong_type("layer_types", types, "an array", err);
    if (types && (int64_t)json_array_size(types) != c->num_hidden_layers)
        return ith_fail(err, ITH_ERR_FORMAT, "layer_types: %zu entries, num_hidden_layers is %lld",
                        json_array_size(types), (long long)c->num_hidden_layers);
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        bool linear = type && is_qwen3_5(c) && strcmp(type, "linear_attention") == 0;
        if (!type || (!linear && strcmp(type, "full_attention") != 0))
            return ith_fail(err, ITH_ERR_UNSUPPORTED,
                            "layer_types[%zu]: \"%.32s\" is not supported (full_attention%s)", i,
                            type ? type : "?", is_qwen3_5(c) ? " and linear_attention are" : " is");
    }
    return ITH_OK;
}

static ith_status parse_dtype(const json_t *root, ith_hf_config *c, ith_error *err)
{
    const char *key;
    const json_t *value = get_either(root, "dtype", "torch_dtype", &key);
    if (!value)
        return ITH_OK;
    const char *name = json_string_value(value);
    if (!name || !ith_hf_dtype_from_name(name, &c->dtype))
        return ith_fail(err, ITH_ERR_FORMAT,
                        "%s: found \"%.32s\", expected float32, bfloat16, float16 or float64", key,
                        name ? name : ith_json_type_name(value));
    c->has_dtype = true;
    return ITH_OK;
}

/* ---- families ---- */

static ith_status parse_decoder(const json_t *root, ith_hf_config *c, ith_error *err)
{
    ITH_TRY(need_integer(root, "vocab_size", 1, MAX_SIZE, &c->vocab_size, err));
    ITH_TRY(need_integer(root, "hidden_size", 1, MAX_SIZE, &c->hidden_size, err));
    ITH_TRY(
        need_integer(root, "num_hidden_layers", 1, ITH_HF_MAX_LAYERS, &c->num_hidden_layers, err));
    ITH_TRY(need_integer(root, "num_attention_heads", 1, 65536, &c->num_attention_heads, err));
    c->num_key_value_heads = c->num_attention_heads;
    ITH_TRY(opt_integer(root, "num_key_value_heads", 1, 65536, &c->num_key_value_heads, err));
    if (c->num_attention_heads % c->num_key_value_heads)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "num_key_value_heads: %lld does not divide num_attention_heads %lld",
                        (long long)c->num_key_value_heads, (long long)c->num_attention_heads);
    if (!get(root, "head_dim") && c->hidden_size % c->num_attention_heads)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "head_dim is missing, and num_attention_heads %lld does not divide "
                        "hidden_size %lld",
                        (long long)c->num_attention_heads, (long long)c->hidden_size);
    c->head_dim = c->hidden_size / c->num_attention_heads;
    ITH_TRY(opt_integer(root, "head_dim", 2, 65536, &c->head_dim, err));
    if (c->head_dim % 2)
        return ith_fail(err, ITH_ERR_FORMAT, "head_dim: %lld is odd, rotary embedding needs pairs",
                        (long long)c->head_dim);
    if (c->family != ITH_FAMILY_QWEN3_5_MOE) /* which has no dense layer */
        ITH_TRY(need_integer(root, "intermediate_size", 1, MAX_SIZE, &c->intermediate_size, err));
    c->rms_norm_eps = 1e-6;
    ITH_TRY(opt_number(root, "rms_norm_eps", 0, 1, &c->rms_norm_eps, err));
    c->initializer_range = 0.02;
    ITH_TRY(opt_number(root, "initializer_range", 0, 10, &c->initializer_range, err));
    c->max_position_embeddings = 32768;
    ITH_TRY(opt_integer(root, "max_position_embeddings", 1, MAX_POSITIONS,
                        &c->max_position_embeddings, err));
    ITH_TRY(opt_bool(root, "tie_word_embeddings", &c->tie_word_embeddings, err));
    c->bos_token_id = c->pad_token_id = c->mask_token_id = -1;
    ITH_TRY(opt_id(root, "bos_token_id", &c->bos_token_id, err));
    ITH_TRY(opt_id(root, "pad_token_id", &c->pad_token_id, err));
    ITH_TRY(opt_ids(root, "eos_token_id", c->eos_token_ids, &c->num_eos_token_ids, err));
    if (c->pad_token_id >= c->vocab_size)
        return ith_fail(err, ITH_ERR_FORMAT, "pad_token_id: %lld is outside vocab_size %lld",
                        (long long)c->pad_token_id, (long long)c->vocab_size);
    ITH_TRY(parse_rope(root, c, err));
    return refuse_unsupported(root, c, err);
}

static ith_status parse_qwen3(const json_t *root, ith_hf_config *c, ith_error *err)
{
    return parse_decoder(root, c, err);
}

/* Marks layers: MoE unless listed in mlp_only_layers or off the sparse step. */
static ith_status mark_moe_layers(const json_t *root, ith_hf_config *c, ith_error *err)
{
    int64_t step = 1;
    ITH_TRY(opt_integer(root, "decoder_sparse_step", 1, ITH_HF_MAX_LAYERS, &step, err));
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        c->layer_is_moe[l] = c->num_experts > 0 && (l + 1) % step == 0;
    const json_t *dense = get(root, "mlp_only_layers");
    if (dense && !json_is_array(dense))
        return wrong_type("mlp_only_layers", dense, "an array of layer numbers", err);
    for (size_t i = 0; i < json_array_size(dense); i++) {
        int64_t l = 0;
        ITH_TRY(check_integer(json_array_get(dense, i), "mlp_only_layers", 0,
                              c->num_hidden_layers - 1, &l, err));
        c->layer_is_moe[l] = false;
    }
    return ITH_OK;
}

static ith_status parse_experts(const json_t *root, ith_hf_config *c, ith_error *err)
{
    const char *key;
    const json_t *experts = get_either(root, "num_experts", "num_local_experts", &key);
    if (!experts)
        return ith_fail(err, ITH_ERR_FORMAT, "num_experts (or num_local_experts) is missing");
    ITH_TRY(check_integer(experts, key, 0, 65536, &c->num_experts, err));
    const json_t *other = get(root, "num_local_experts");
    int64_t second = c->num_experts;
    if (other)
        ITH_TRY(check_integer(other, "num_local_experts", 0, 65536, &second, err));
    if (second != c->num_experts)
        return ith_fail(err, ITH_ERR_FORMAT, "num_local_experts: %lld, but num_experts is %lld",
                        (long long)second, (long long)c->num_experts);
    if (c->num_experts > 0) {
        ITH_TRY(need_integer(root, "num_experts_per_tok", 1, c->num_experts,
                             &c->num_experts_per_tok, err));
        ITH_TRY(need_integer(root, "moe_intermediate_size", 1, MAX_SIZE, &c->moe_intermediate_size,
                             err));
    }
    ITH_TRY(opt_bool(root, "output_router_logits", &c->output_router_logits, err));
    c->router_aux_loss_coef = 0.001;
    return opt_number(root, "router_aux_loss_coef", 0, 1e3, &c->router_aux_loss_coef, err);
}

static ith_status parse_qwen3_moe(const json_t *root, ith_hf_config *c, ith_error *err)
{
    ITH_TRY(parse_decoder(root, c, err));
    ITH_TRY(parse_experts(root, c, err));
    ITH_TRY(opt_bool(root, "norm_topk_prob", &c->norm_topk_prob, err));
    return mark_moe_layers(root, c, err);
}

/* ---- Qwen3.5 ---- */

/* layer_types, or every full_attention_interval-th layer is full attention. */
static ith_status mark_linear_layers(const json_t *text, ith_hf_config *c, ith_error *err)
{
    int64_t interval = 4;
    ITH_TRY(opt_integer(text, "full_attention_interval", 1, ITH_HF_MAX_LAYERS, &interval, err));
    const json_t *types = get(text, "layer_types");
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        const char *type = json_string_value(json_array_get(types, (size_t)l));
        c->layer_is_linear[l] =
            types ? strcmp(type, "linear_attention") == 0 : (l + 1) % interval != 0;
    }
    return ITH_OK;
}

static ith_status parse_linear_attention(const json_t *text, ith_hf_config *c, ith_error *err)
{
    c->linear_conv_kernel_dim = 4;
    ITH_TRY(need_integer(text, "linear_num_key_heads", 1, 65536, &c->linear_num_key_heads, err));
    ITH_TRY(
        need_integer(text, "linear_num_value_heads", 1, 65536, &c->linear_num_value_heads, err));
    ITH_TRY(need_integer(text, "linear_key_head_dim", 1, 65536, &c->linear_key_head_dim, err));
    ITH_TRY(need_integer(text, "linear_value_head_dim", 1, 65536, &c->linear_value_head_dim, err));
    ITH_TRY(opt_integer(text, "linear_conv_kernel_dim", 1, 64, &c->linear_conv_kernel_dim, err));
    if (c->linear_num_value_heads % c->linear_num_key_heads)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "linear_num_key_heads: %lld does not divide linear_num_value_heads %lld",
                        (long long)c->linear_num_key_heads, (long long)c->linear_num_value_heads);
    bool gate = true;
    ITH_TRY(opt_bool(text, "attn_output_gate", &gate, err));
    if (!gate)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "attn_output_gate: false is not supported (Qwen3.5 always has the gate)");
    return ITH_OK;
}

/* Frequency i belongs to position row i % 3; a section that gives it to another is refused. */
static ith_status check_mrope(const json_t *text, const ith_hf_config *c, ith_error *err)
{
    int64_t half = (int64_t)((double)c->head_dim * c->rope.partial_rotary_factor) / 2;
    int64_t section[3] = {11, 11, 10};
    const json_t *given = get(get(text, "rope_parameters"), "mrope_section");
    if (half < 1)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "partial_rotary_factor: %g of head_dim %lld is no pair",
                        c->rope.partial_rotary_factor, (long long)c->head_dim);
    if (given && (!json_is_array(given) || json_array_size(given) != 3))
        return wrong_type("mrope_section", given, "an array of three integers", err);
    for (size_t i = 0; given && i < 3; i++)
        ITH_TRY(
            check_integer(json_array_get(given, i), "mrope_section", 0, 65536, &section[i], err));
    bool interleaved = true;
    ITH_WRAP(opt_bool(get(text, "rope_parameters"), "mrope_interleaved", &interleaved, err), err,
             "rope_parameters");
    for (int64_t i = 0; i < half; i++)
        if (!interleaved || (i % 3 && i >= 3 * section[i % 3]))
            return ith_fail(err, ITH_ERR_UNSUPPORTED,
                            "mrope_section [%lld, %lld, %lld]%s: only sections that interleave all "
                            "%lld frequencies are supported",
                            (long long)section[0], (long long)section[1], (long long)section[2],
                            interleaved ? "" : " without mrope_interleaved", (long long)half);
    return ITH_OK;
}

static ith_status parse_vision(const json_t *root, ith_hf_config *c, ith_error *err)
{
    const json_t *v = get(root, "vision_config");
    if (!v)
        return ITH_OK;
    if (!json_is_object(v))
        return wrong_type("vision_config", v, "an object", err);
    ith_hf_vision *o = &c->vision;
    *o = (ith_hf_vision){.in_channels = 3,
                         .temporal_patch_size = 2,
                         .spatial_merge_size = 2,
                         .out_hidden_size = c->hidden_size,
                         .rope_theta = 10000};
    const struct {
        const char *key;
        int64_t high, *out;
        bool optional;
    } sizes[] = {{"depth", 1024, &o->depth, false},
                 {"hidden_size", 65536, &o->hidden_size, false},
                 {"intermediate_size", 1 << 20, &o->intermediate_size, false},
                 {"num_heads", 1024, &o->num_heads, false},
                 {"patch_size", 1024, &o->patch_size, false},
                 {"num_position_embeddings", 1 << 24, &o->num_position_embeddings, false},
                 {"in_channels", 4, &o->in_channels, true},
                 {"temporal_patch_size", 64, &o->temporal_patch_size, true},
                 {"spatial_merge_size", 64, &o->spatial_merge_size, true},
                 {"out_hidden_size", 65536, &o->out_hidden_size, true}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        ITH_TRY(sizes[i].optional
                    ? opt_integer(v, sizes[i].key, 1, sizes[i].high, sizes[i].out, err)
                    : need_integer(v, sizes[i].key, 1, sizes[i].high, sizes[i].out, err));
    if (o->hidden_size % (4 * o->num_heads))
        return ith_fail(
            err, ITH_ERR_FORMAT,
            "hidden_size: %lld is not a multiple of 4 * num_heads %lld (rotation in two "
            "dimensions)",
            (long long)o->hidden_size, (long long)o->num_heads);
    if (o->hidden_size / o->num_heads > 512)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "hidden_size: %lld of %lld heads: a head may be 512 wide at most",
                        (long long)o->hidden_size, (long long)o->num_heads);
    if (o->out_hidden_size != c->hidden_size)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "out_hidden_size: %lld, but hidden_size of text_config is %lld",
                        (long long)o->out_hidden_size, (long long)c->hidden_size);
    const json_t *act = get(v, "hidden_act"), *rope = get(v, "rope_parameters");
    if (act && (!json_is_string(act) || strcmp(json_string_value(act), "gelu_pytorch_tanh") != 0))
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "hidden_act: only \"gelu_pytorch_tanh\" is supported");
    if (json_array_size(get(v, "deepstack_visual_indexes")) > 0)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "deepstack_visual_indexes: deepstack is not supported (an empty list is)");
    const json_t *type = get(rope, "rope_type");
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), "axial") != 0))
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "rope_type: only \"axial\" is supported");
    return opt_number(rope, "rope_theta", 1, 1e12, &o->rope_theta, err);
}

/* The text model: the file itself, or its text_config. Whoever owns lm_head decides on tying: the
 * top level of a nested file (absent: not tied). */
static ith_status parse_qwen3_5(const json_t *root, ith_hf_config *c, ith_error *err)
{
    const json_t *text = get(root, "text_config");
    c->is_nested = text != NULL;
    if (text && !json_is_object(text))
        return wrong_type("text_config", text, "an object", err);
    if (!text)
        text = root;
    c->image_token_id = c->video_token_id = -1;
    ith_status status = parse_decoder(text, c, err);
    if (status != ITH_OK)
        return c->is_nested ? ith_wrap(err, status, "text_config") : status;
    ITH_TRY(mark_linear_layers(text, c, err));
    ITH_TRY(parse_linear_attention(text, c, err));
    ITH_TRY(check_mrope(text, c, err));
    if (c->family == ITH_FAMILY_QWEN3_5_MOE) {
        ITH_TRY(parse_experts(text, c, err));
        c->norm_topk_prob = true;
        for (int64_t l = 0; l < c->num_hidden_layers; l++)
            c->layer_is_moe[l] = true;
        ITH_TRY(need_integer(text, "shared_expert_intermediate_size", 1, MAX_SIZE,
                             &c->shared_expert_intermediate_size, err));
    }
    if (!c->is_nested)
        return ITH_OK;
    c->tie_word_embeddings = false;
    ITH_TRY(opt_bool(root, "tie_word_embeddings", &c->tie_word_embeddings, err));
    ITH_TRY(opt_id(root, "image_token_id", &c->image_token_id, err));
    ITH_TRY(opt_id(root, "video_token_id", &c->video_token_id, err));
    if (!c->has_dtype)
        ITH_TRY(parse_dtype(text, c, err));
    if (get(root, "quantization_config"))
        return refuse_unsupported(root, c, err);
    ITH_WRAP(parse_vision(root, c, err), err, "vision_config");
    return ITH_OK;
}

/* ---- LLaDA2 ----
 * The published class has defaults that no published model uses (rope_theta 10000, biases on,
 * dropout 0.1): such keys must be there. */

static ith_status need_number(const json_t *object, const char *key, double low, double high,
                              double *out, ith_error *err)
{
    if (!get(object, key))
        return ith_fail(err, ITH_ERR_FORMAT, "%s is missing", key);
    return opt_number(object, key, low, high, out, err);
}

static ith_status refuse_llada2_options(const json_t *root, ith_error *err)
{
    static const char *const off[] = {"use_bias", "use_qkv_bias", "norm_head", "norm_softmax",
                                      "using_split_qkv_in_self_attention"};
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        bool on = false;
        ITH_TRY(opt_bool(root, off[i], &on, err));
        if (on)
            return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s: true is not supported (false is)",
                            off[i]);
    }
    if (!get(root, "use_bias"))
        return ith_fail(err, ITH_ERR_FORMAT, "use_bias is missing (false is supported)");
    static const char *const dropouts[] = {"attention_dropout", "embedding_dropout",
                                           "output_dropout"};
    for (size_t i = 0; i < sizeof dropouts / sizeof *dropouts; i++) {
        double value = 0;
        ITH_TRY(need_number(root, dropouts[i], 0, 1, &value, err));
        if (value > 0)
            return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s: %g is not supported (0 is)", dropouts[i],
                            value);
    }
    bool qk_norm = true;
    ITH_TRY(opt_bool(root, "use_qk_norm", &qk_norm, err));
    if (!qk_norm)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "use_qk_norm: false is not supported (true is)");
    const json_t *score = get(root, "score_function");
    if (score && (!json_is_string(score) || strcmp(json_string_value(score), "sigmoid") != 0))
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "score_function: only \"sigmoid\" is supported");
    return ITH_OK;
}

static ith_status parse_llada2_router(const json_t *root, ith_hf_config *c, ith_error *err)
{
    ITH_TRY(need_integer(root, "num_experts", 1, 65536, &c->num_experts, err));
    ITH_TRY(
        need_integer(root, "num_experts_per_tok", 1, c->num_experts, &c->num_experts_per_tok, err));
    ITH_TRY(
        need_integer(root, "moe_intermediate_size", 1, MAX_SIZE, &c->moe_intermediate_size, err));
    ITH_TRY(need_integer(root, "num_shared_experts", 0, 65536, &c->num_shared_experts, err));
    c->n_group = 8;
    c->topk_group = 4;
    c->routed_scaling_factor = 2.5;
    c->has_expert_bias = true;
    ITH_TRY(opt_integer(root, "n_group", 1, c->num_experts, &c->n_group, err));
    ITH_TRY(opt_integer(root, "topk_group", 1, 65536, &c->topk_group, err));
    ITH_TRY(opt_number(root, "routed_scaling_factor", 1e-6, 1e6, &c->routed_scaling_factor, err));
    ITH_TRY(opt_bool(root, "moe_router_enable_expert_bias", &c->has_expert_bias, err));
    if (c->num_experts % c->n_group || c->num_experts / c->n_group < 2)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "n_group: %lld groups of %lld experts (each needs the same number, at "
                        "least 2)",
                        (long long)c->n_group, (long long)c->num_experts);
    if (c->topk_group > c->n_group)
        return ith_fail(err, ITH_ERR_FORMAT, "topk_group: %lld, but n_group is %lld",
                        (long long)c->topk_group, (long long)c->n_group);
    if (c->num_experts_per_tok > c->topk_group * (c->num_experts / c->n_group))
        return ith_fail(err, ITH_ERR_FORMAT,
                        "num_experts_per_tok: %lld, but topk_group %lld of n_group %lld leave %lld",
                        (long long)c->num_experts_per_tok, (long long)c->topk_group,
                        (long long)c->n_group,
                        (long long)(c->topk_group * (c->num_experts / c->n_group)));
    return ITH_OK;
}

static ith_status parse_llada2(const json_t *root, ith_hf_config *c, ith_error *err)
{
    double number = 0;
    int64_t dense = 0, kv_heads = 0;
    ITH_TRY(need_number(root, "rms_norm_eps", 0, 1, &number, err));
    ITH_TRY(need_number(root, "rope_theta", 1, 1e12, &number, err));
    ITH_TRY(need_integer(root, "num_key_value_heads", 1, 65536, &kv_heads, err));
    ITH_TRY(refuse_llada2_options(root, err));
    ITH_TRY(parse_decoder(root, c, err));
    if (!get(root, "partial_rotary_factor"))
        c->rope.partial_rotary_factor = 0.5;
    ITH_TRY(parse_llada2_router(root, c, err));
    ITH_TRY(opt_integer(root, "first_k_dense_replace", 0, ITH_HF_MAX_LAYERS, &dense, err));
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        c->layer_is_moe[l] = l >= dense;
    c->norm_topk_prob = c->num_experts_per_tok > 1; /* what the published code does */
    ITH_TRY(opt_id(root, "mask_token_id", &c->mask_token_id, err));
    if (c->mask_token_id >= c->vocab_size)
        return ith_fail(err, ITH_ERR_FORMAT, "mask_token_id: %lld is outside vocab_size %lld",
                        (long long)c->mask_token_id, (long long)c->vocab_size);
    return ITH_OK;
}

static const struct {
    const char *model_type;
    ith_family family;
    ith_status (*parse)(const json_t *root, ith_hf_config *c, ith_error *err);
} families[] = {
    {"qwen3", ITH_FAMILY_QWEN3, parse_qwen3},
    {"qwen3_moe", ITH_FAMILY_QWEN3_MOE, parse_qwen3_moe},
    {"qwen3_5", ITH_FAMILY_QWEN3_5, parse_qwen3_5},
    {"qwen3_5_text", ITH_FAMILY_QWEN3_5, parse_qwen3_5},
    {"qwen3_5_moe", ITH_FAMILY_QWEN3_5_MOE, parse_qwen3_5},
    {"qwen3_5_moe_text", ITH_FAMILY_QWEN3_5_MOE, parse_qwen3_5},
    {"llada2_moe", ITH_FAMILY_LLADA2, parse_llada2},
    {"llada2_moe_veomni", ITH_FAMILY_LLADA2, parse_llada2},
};
#define NUM_FAMILIES ((int)(sizeof families / sizeof *families))

static ith_status find_family(const json_t *root, int *out, ith_error *err)
{
    const json_t *type = get(root, "model_type");
    if (!type)
        return ith_fail(err, ITH_ERR_FORMAT, "model_type is missing");
    if (!json_is_string(type))
        return wrong_type("model_type", type, "a name like \"qwen3\"", err);
    char known[256];
    size_t len = 0;
    for (int i = 0; i < NUM_FAMILIES; i++) {
        if (strcmp(json_string_value(type), families[i].model_type) == 0) {
            *out = i;
            return ITH_OK;
        }
        len += (size_t)snprintf(known + len, sizeof known - len, "%s%s", i ? ", " : "",
                                families[i].model_type);
    }
    return ith_fail(err, ITH_ERR_UNSUPPORTED, "model_type: \"%.64s\" is not supported (known: %s)",
                    json_string_value(type), known);
}

static ith_status parse_root(const json_t *root, ith_hf_config *c, ith_error *err)
{
    if (!json_is_object(root))
        return ith_fail(err, ITH_ERR_FORMAT, "found %s, expected an object",
                        ith_json_type_name(root));
    int i = 0;
    ITH_TRY(find_family(root, &i, err));
    c->family = families[i].family;
    snprintf(c->model_type, sizeof c->model_type, "%s", families[i].model_type);
    ITH_TRY(parse_dtype(root, c, err));
    return families[i].parse(root, c, err);
}

ith_status ith_hf_config_parse(ith_hf_config *out, const char *text, int64_t len, const char *name,
                               ith_error *err)
{
    ith_hf_config config;
    memset(&config, 0, sizeof config);
    ITH_TRY(ith_json_parse(&config.raw, text, len, name, err));
    ith_status status = parse_root(config.raw, &config, err);
    if (status != ITH_OK) {
        ith_hf_config_deinit(&config);
        return ith_wrap(err, status, "%s", name);
    }
    *out = config;
    return ITH_OK;
}

/* Opens dir/file when it is there; *map stays empty otherwise. path: for error texts. */
static ith_status map_in_dir(ith_map *map, ith_buf *path, const char *dir, const char *file,
                             bool optional, ith_error *err)
{
    ith_path_join(path, dir, file);
    ITH_TRY(ith_buf_check(path, file, err));
    if (optional && !ith_path_exists(path->data))
        return ITH_OK;
    return ith_map_open(map, path->data, err);
}

ith_status ith_hf_config_load(ith_hf_config *out, const char *dir, ith_error *err)
{
    ith_map map = {NULL, 0};
    ith_buf path = {0};
    ith_status status = map_in_dir(&map, &path, dir, "config.json", false, err);
    if (status == ITH_OK)
        status = ith_hf_config_parse(out, map.data, map.size, path.data, err);
    ith_map_close(&map);
    ith_buf_deinit(&path);
    return status;
}

void ith_hf_config_deinit(ith_hf_config *config)
{
    json_decref(config->raw);
    config->raw = NULL;
}

/* ---- generation_config.json ---- */

static void generation_defaults(ith_hf_generation *g)
{
    memset(g, 0, sizeof *g);
    g->temperature = g->top_p = g->repetition_penalty = 1;
    g->top_k = 50; /* HF's default when sampling */
    g->max_new_tokens = g->bos_token_id = g->pad_token_id = -1;
}

static ith_status parse_generation(const json_t *root, ith_hf_generation *g, ith_error *err)
{
    if (!json_is_object(root))
        return ith_fail(err, ITH_ERR_FORMAT, "found %s, expected an object",
                        ith_json_type_name(root));
    ITH_TRY(opt_bool(root, "do_sample", &g->do_sample, err));
    ITH_TRY(opt_number(root, "temperature", 0, 1e4, &g->temperature, err));
    ITH_TRY(opt_number(root, "top_p", 0, 1, &g->top_p, err));
    ITH_TRY(opt_number(root, "min_p", 0, 1, &g->min_p, err));
    ITH_TRY(opt_number(root, "repetition_penalty", 1e-3, 1e3, &g->repetition_penalty, err));
    ITH_TRY(opt_integer(root, "top_k", 0, MAX_SIZE, &g->top_k, err));
    ITH_TRY(opt_integer(root, "max_new_tokens", 0, MAX_POSITIONS, &g->max_new_tokens, err));
    ITH_TRY(opt_id(root, "bos_token_id", &g->bos_token_id, err));
    ITH_TRY(opt_id(root, "pad_token_id", &g->pad_token_id, err));
    return opt_ids(root, "eos_token_id", g->eos_token_ids, &g->num_eos_token_ids, err);
}

ith_status ith_hf_generation_parse(ith_hf_generation *out, const char *text, int64_t len,
                                   const char *name, ith_error *err)
{
    ith_hf_generation generation;
    json_t *root = NULL;
    generation_defaults(&generation);
    ITH_TRY(ith_json_parse(&root, text, len, name, err));
    ith_status status = parse_generation(root, &generation, err);
    json_decref(root);
    if (status != ITH_OK)
        return ith_wrap(err, status, "%s", name);
    *out = generation;
    return ITH_OK;
}

ith_status ith_hf_generation_load(ith_hf_generation *out, const char *dir, ith_error *err)
{
    ith_map map = {NULL, 0};
    ith_buf path = {0};
    ith_status status = map_in_dir(&map, &path, dir, "generation_config.json", true, err);
    if (status == ITH_OK && !map.data && !ith_path_exists(path.data))
        generation_defaults(out);
    else if (status == ITH_OK)
        status = ith_hf_generation_parse(out, map.data, map.size, path.data, err);
    ith_map_close(&map);
    ith_buf_deinit(&path);
    return status;
}

/* ---- dtype names ---- */

static const struct {
    const char *name;
    ith_dtype dtype;
} dtypes[] = {
    {"float32", ITH_F32}, {"bfloat16", ITH_BF16}, {"float16", ITH_F16}, {"float64", ITH_F64}};

bool ith_hf_dtype_from_name(const char *name, ith_dtype *out)
{
    if (strncmp(name, "torch.", 6) == 0)
        name += 6;
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            *out = dtypes[i].dtype;
            return true;
        }
    return false;
}

const char *ith_hf_dtype_name(ith_dtype dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].name;
    return NULL;
}
