/* Goal: Qwen3.5 configs, flat and nested, dense and with experts, are read as transformers reads
 * them, and what is not built is refused with its key. Method: one base, one change per case. */
#include "testing.h"

#include "checkpoint/hf_config.h"

static const char text_base[] =
    "{\"model_type\": \"qwen3_5_text\", \"vocab_size\": 500, \"hidden_size\": 64,"
    " \"num_hidden_layers\": 8, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
    " \"head_dim\": 32, \"intermediate_size\": 96, \"linear_num_key_heads\": 2,"
    " \"linear_num_value_heads\": 4, \"linear_key_head_dim\": 16, \"linear_value_head_dim\": 16,"
    " \"tie_word_embeddings\": true, \"eos_token_id\": 7, \"dtype\": \"bfloat16\"}";
static const char vision_base[] =
    "{\"depth\": 2, \"hidden_size\": 32, \"num_heads\": 2, \"intermediate_size\": 48,"
    " \"patch_size\": 4, \"num_position_embeddings\": 36, \"deepstack_visual_indexes\": []}";

static void set_all(json_t *object, const char *change)
{
    ith_error err = {0};
    json_t *delta = NULL, *value;
    const char *key;
    assert_ok(ith_json_parse(&delta, change, (int64_t)strlen(change), "change", &err), err);
    json_object_foreach(delta, key, value)
    {
        if (json_is_string(value) && strcmp(json_string_value(value), "<absent>") == 0)
            json_object_del(object, key);
        else
            json_object_set(object, key, value);
    }
    json_decref(delta);
}

static json_t *parse_json(const char *text)
{
    ith_error err = {0};
    json_t *root = NULL;
    assert_ok(ith_json_parse(&root, text, (int64_t)strlen(text), "base", &err), err);
    return root;
}

/* A flat text config, or the nested one around it; changes to the top, text and vision parts. */
static ith_status parse(bool nested, const char *top, const char *text, const char *vision,
                        ith_hf_config *c, ith_error *err)
{
    json_t *root = parse_json(text_base);
    set_all(root, text);
    if (nested) {
        json_t *v = parse_json(vision_base), *inner = root;
        set_all(v, vision);
        root = parse_json("{\"model_type\": \"qwen3_5\", \"image_token_id\": 90}");
        json_object_set_new(root, "text_config", inner);
        json_object_set_new(root, "vision_config", v);
    }
    set_all(root, top);
    ith_buf dump = {0};
    assert_ok(ith_json_dump(root, false, &dump, err), *err);
    json_decref(root);
    ith_status status = ith_hf_config_parse(c, dump.data, dump.len, "config.json", err);
    ith_buf_deinit(&dump);
    return status;
}

static void parse_ok(ith_hf_config *c, bool nested, const char *top, const char *text)
{
    ith_error err = {0};
    assert_ok(parse(nested, top, text, "{}", c, &err), err);
}

static void parse_fails(bool nested, const char *top, const char *text, const char *vision,
                        const char *expected)
{
    ith_error err = {0};
    ith_hf_config c;
    ith_status status = parse(nested, top, text, vision, &c, &err);
    if (status == ITH_OK || !strstr(err.text, expected))
        fail_msg("status %d, text \"%s\", expected \"%s\"", (int)status, err.text, expected);
}

static void test_flat_text_config(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, false, "{}", "{}");
    assert_int_equal(c.family, ITH_FAMILY_QWEN3_5);
    assert_false(c.is_nested);
    assert_int_equal(c.vision.hidden_size, 0);
    assert_true(c.tie_word_embeddings);
    assert_int_equal(c.linear_conv_kernel_dim, 4);
    assert_true(c.rope.partial_rotary_factor == 0.25); /* the class default of this family */
    for (int l = 0; l < 8; l++)
        assert_int_equal(c.layer_is_linear[l], (l + 1) % 4 != 0);
    ith_hf_config_deinit(&c);
    parse_ok(&c, false, "{}", "{\"full_attention_interval\": 2}");
    assert_false(c.layer_is_linear[1]);
    assert_true(c.layer_is_linear[2]);
    ith_hf_config_deinit(&c);
}

/* lm_head belongs to the top level: its key decides, and absent means not tied. */
static void test_tying_follows_the_top_level(void **state)
{
    (void)state;
    static const struct {
        const char *top, *text;
        bool tied;
    } cases[] = {{"{}", "{}", false},
                 {"{\"tie_word_embeddings\": true}", "{}", true},
                 {"{\"tie_word_embeddings\": true}", "{\"tie_word_embeddings\": false}", true},
                 {"{\"tie_word_embeddings\": false}", "{\"tie_word_embeddings\": true}", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_hf_config c;
        parse_ok(&c, true, cases[i].top, cases[i].text);
        if (c.tie_word_embeddings != cases[i].tied)
            fail_msg("case %zu: tied %d, expected %d", i, c.tie_word_embeddings, cases[i].tied);
        ith_hf_config_deinit(&c);
    }
}

static void test_nested_config_keeps_both_parts(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, true, "{}", "{}");
    assert_true(c.is_nested);
    assert_int_equal(c.hidden_size, 64);
    assert_int_equal(c.vision.hidden_size, 32);
    assert_int_equal(c.vision.spatial_merge_size, 2);
    assert_int_equal(c.vision.out_hidden_size, 64);
    assert_true(c.vision.rope_theta == 10000.0);
    assert_int_equal(c.image_token_id, 90);
    assert_int_equal(c.video_token_id, -1);
    assert_true(c.has_dtype && c.dtype == ITH_BF16); /* named in text_config only */
    assert_int_equal(c.eos_token_ids[0], 7);
    ith_hf_config_deinit(&c);
}

static void test_experts_need_no_dense_size(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, true, "{\"model_type\": \"qwen3_5_moe\"}",
             "{\"intermediate_size\": \"<absent>\", \"num_experts\": 6, \"num_experts_per_tok\": 2,"
             " \"moe_intermediate_size\": 24, \"shared_expert_intermediate_size\": 40}");
    assert_int_equal(c.family, ITH_FAMILY_QWEN3_5_MOE);
    assert_true(c.norm_topk_prob && c.layer_is_moe[0] && c.layer_is_moe[7]);
    assert_int_equal(c.shared_expert_intermediate_size, 40);
    assert_false(c.output_router_logits);
    ith_hf_config_deinit(&c);
}

static void test_what_is_not_built_is_refused(void **state)
{
    (void)state;
    parse_fails(false, "{}", "{\"layer_types\": [\"linear_attention\"]}", "{}",
                "layer_types: 1 entries, num_hidden_layers is 8");
    parse_fails(false, "{}", "{\"attn_output_gate\": false}", "{}", "attn_output_gate");
    parse_fails(false, "{}", "{\"linear_num_value_heads\": 3}", "{}",
                "linear_num_key_heads: 2 does not divide linear_num_value_heads 3");
    parse_fails(false, "{}", "{\"linear_key_head_dim\": \"<absent>\"}", "{}",
                "linear_key_head_dim is missing");
    parse_fails(false, "{}", "{\"rope_parameters\": {\"mrope_section\": [4, 0, 0]}}", "{}",
                "mrope_section [4, 0, 0]");
    parse_fails(false, "{}", "{\"rope_parameters\": {\"mrope_interleaved\": false}}", "{}",
                "without mrope_interleaved");
    parse_fails(true, "{}", "{}", "{\"deepstack_visual_indexes\": [3]}",
                "vision_config: deepstack_visual_indexes");
    parse_fails(true, "{}", "{}", "{\"rope_parameters\": {\"rope_type\": \"default\"}}", "axial");
    parse_fails(true, "{}", "{}", "{\"out_hidden_size\": 63}",
                "out_hidden_size: 63, but hidden_size of text_config is 64");
    parse_fails(true, "{}", "{}", "{\"num_heads\": 3}", "vision_config: hidden_size: 32");
    parse_fails(true, "{}", "{\"hidden_size\": \"<absent>\"}", "{}",
                "text_config: hidden_size is missing");
    parse_fails(true, "{\"text_config\": 3}", "{}", "{}", "text_config: found");
    parse_fails(true, "{\"quantization_config\": {}}", "{}", "{}", "quantization_config");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flat_text_config),
        cmocka_unit_test(test_tying_follows_the_top_level),
        cmocka_unit_test(test_nested_config_keeps_both_parts),
        cmocka_unit_test(test_experts_need_no_dense_size),
        cmocka_unit_test(test_what_is_not_built_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
