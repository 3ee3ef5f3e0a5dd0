/* Goal: every spelling of a config that is in the world is read into the same struct, and what
 * cannot be trained is refused with key and reason. Method: one base config, one change per case.
 */
#include "testing.h"

#include "checkpoint/hf_config.h"

#include <math.h>

static const char dense[] =
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"attention_bias\": false, \"attention_dropout\": "
    "0.0,"
    " \"bos_token_id\": 151643, \"eos_token_id\": 151645, \"head_dim\": 128, \"hidden_act\": "
    "\"silu\","
    " \"hidden_size\": 1024, \"initializer_range\": 0.02, \"intermediate_size\": 3072,"
    " \"max_position_embeddings\": 40960, \"max_window_layers\": 28, \"model_type\": \"qwen3\","
    " \"num_attention_heads\": 16, \"num_hidden_layers\": 4, \"num_key_value_heads\": 8,"
    " \"rms_norm_eps\": 1e-06, \"rope_scaling\": null, \"rope_theta\": 1000000, "
    "\"sliding_window\": null,"
    " \"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", \"use_sliding_window\": false,"
    " \"vocab_size\": 151936}";

static const char moe[] =
    "{\"model_type\": \"qwen3_moe\", \"num_experts\": 8, \"num_experts_per_tok\": 2,"
    " \"moe_intermediate_size\": 768, \"norm_topk_prob\": true, \"decoder_sparse_step\": 1,"
    " \"mlp_only_layers\": [], \"router_aux_loss_coef\": 0.002, \"output_router_logits\": true}";

/* base with the keys of `change` (JSON) set; the value "<absent>" removes a key. */
static void parse_changed(const char *base, const char *change, ith_buf *text)
{
    ith_error err = {0};
    json_t *root = NULL, *delta = NULL, *value;
    const char *key;
    assert_ok(ith_json_parse(&root, dense, (int64_t)strlen(dense), "base", &err), err);
    for (int i = 0; i < 2; i++) {
        const char *part = i ? change : base == dense ? "{}" : base;
        assert_ok(ith_json_parse(&delta, part, (int64_t)strlen(part), "change", &err), err);
        json_object_foreach(delta, key, value)
        {
            if (json_is_string(value) && strcmp(json_string_value(value), "<absent>") == 0)
                json_object_del(root, key);
            else
                json_object_set(root, key, value);
        }
        json_decref(delta);
    }
    ith_buf_clear(text);
    assert_ok(ith_json_dump(root, false, text, &err), err);
    json_decref(root);
}

static void parse_ok(ith_hf_config *c, const char *base, const char *change)
{
    ith_error err = {0};
    ith_buf text = {0};
    parse_changed(base, change, &text);
    assert_ok(ith_hf_config_parse(c, text.data, text.len, "config.json", &err), err);
    ith_buf_deinit(&text);
}

static void assert_near(double got, double wanted)
{
    if (!(fabs(got - wanted) <= 1e-12 * fabs(wanted)))
        fail_msg("%.17g, expected %.17g", got, wanted);
}

static void test_dense_config_fills_every_field(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, dense, "{}");
    assert_int_equal(c.family, ITH_FAMILY_QWEN3);
    assert_string_equal(c.model_type, "qwen3");
    assert_int_equal(c.vocab_size, 151936);
    assert_int_equal(c.hidden_size, 1024);
    assert_int_equal(c.num_hidden_layers, 4);
    assert_int_equal(c.num_attention_heads, 16);
    assert_int_equal(c.num_key_value_heads, 8);
    assert_int_equal(c.head_dim, 128); /* not 1024 / 16 */
    assert_int_equal(c.intermediate_size, 3072);
    assert_int_equal(c.max_position_embeddings, 40960);
    assert_near(c.rms_norm_eps, 1e-6);
    assert_near(c.initializer_range, 0.02);
    assert_true(c.tie_word_embeddings);
    assert_int_equal(c.rope.type, ITH_ROPE_DEFAULT);
    assert_near(c.rope.theta, 1e6);
    assert_near(c.rope.attention_factor, 1);
    assert_near(c.rope.partial_rotary_factor, 1);
    assert_int_equal(c.bos_token_id, 151643);
    assert_int_equal(c.pad_token_id, -1);
    assert_int_equal(c.num_eos_token_ids, 1);
    assert_int_equal(c.eos_token_ids[0], 151645);
    assert_int_equal(c.num_experts, 0);
    assert_false(c.layer_is_moe[0]);
    assert_true(c.has_dtype && c.dtype == ITH_BF16);
    assert_non_null(json_object_get(c.raw, "max_window_layers"));
    ith_hf_config_deinit(&c);
}

static void test_both_spellings_of_the_rotary_keys_agree(void **state)
{
    (void)state;
    static const char *const same[] = {
        "{\"rope_theta\": 5e6}",
        "{\"rope_theta\": 5000000.0, \"rope_scaling\": {\"rope_type\": \"default\"}}",
        ("{\"rope_theta\": \"<absent>\", \"rope_scaling\": \"<absent>\", \"rope_parameters\": "
         "{\"rope_theta\": 5000000, \"rope_type\": \"default\"}}"),
        "{\"rope_theta\": 10000, \"rope_parameters\": {\"rope_theta\": 5e6}}",
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        ith_hf_config c;
        parse_ok(&c, dense, same[i]);
        assert_int_equal(c.rope.type, ITH_ROPE_DEFAULT);
        assert_near(c.rope.theta, 5e6);
        ith_hf_config_deinit(&c);
    }
    ith_hf_config c;
    parse_ok(&c, dense, "{\"rope_theta\": \"<absent>\"}");
    assert_near(c.rope.theta, 10000);
    ith_hf_config_deinit(&c);
}

static void test_linear_and_yarn_scaling(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, dense, "{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.0}}");
    assert_int_equal(c.rope.type, ITH_ROPE_LINEAR);
    assert_near(c.rope.factor, 2);
    assert_near(c.rope.attention_factor, 1);
    ith_hf_config_deinit(&c);
    parse_ok(&c, dense,
             "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
             "\"original_max_position_embeddings\": 32768}}");
    assert_int_equal(c.rope.type, ITH_ROPE_YARN);
    assert_near(c.rope.theta, 1e6);
    assert_near(c.rope.factor, 4);
    assert_int_equal(c.rope.original_max_position_embeddings, 32768);
    assert_near(c.rope.beta_fast, 32);
    assert_near(c.rope.beta_slow, 1);
    assert_true(c.rope.truncate);
    assert_near(c.rope.attention_factor, 0.1 * log(4) + 1);
    ith_hf_config_deinit(&c);
    parse_ok(&c, dense,
             "{\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 8, \"rope_theta\": 1e4, "
             "\"beta_fast\": 16, \"beta_slow\": 2,"
             " \"truncate\": false, \"mscale\": 1.0, \"mscale_all_dim\": 0.5}}");
    assert_int_equal(c.rope.original_max_position_embeddings, 40960);
    assert_near(c.rope.beta_fast, 16);
    assert_near(c.rope.beta_slow, 2);
    assert_false(c.rope.truncate);
    assert_near(c.rope.attention_factor, (0.1 * log(8) + 1) / (0.05 * log(8) + 1));
    ith_hf_config_deinit(&c);
    parse_ok(
        &c, dense,
        "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"attention_factor\": 1.5}}");
    assert_near(c.rope.attention_factor, 1.5);
    ith_hf_config_deinit(&c);
}

static void test_moe_layers_follow_step_and_list(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, moe, "{}");
    assert_int_equal(c.family, ITH_FAMILY_QWEN3_MOE);
    assert_int_equal(c.num_experts, 8);
    assert_int_equal(c.num_experts_per_tok, 2);
    assert_int_equal(c.moe_intermediate_size, 768);
    assert_true(c.norm_topk_prob && c.output_router_logits);
    assert_near(c.router_aux_loss_coef, 0.002);
    for (int l = 0; l < 4; l++)
        assert_true(c.layer_is_moe[l]);
    ith_hf_config_deinit(&c);
    parse_ok(&c, moe,
             "{\"num_experts\": \"<absent>\", \"num_local_experts\": 8, \"decoder_sparse_step\": "
             "2, \"mlp_only_layers\": [3],"
             " \"norm_topk_prob\": \"<absent>\", \"output_router_logits\": \"<absent>\", "
             "\"router_aux_loss_coef\": \"<absent>\"}");
    assert_int_equal(c.num_experts, 8);
    assert_false(c.norm_topk_prob || c.output_router_logits);
    assert_near(c.router_aux_loss_coef, 0.001);
    static const bool wanted[] = {false, true, false, false};
    for (int l = 0; l < 4; l++)
        assert_int_equal(c.layer_is_moe[l], wanted[l]);
    ith_hf_config_deinit(&c);
    parse_ok(&c, moe, "{\"num_experts\": 0, \"num_experts_per_tok\": null}");
    assert_false(c.layer_is_moe[0]);
    ith_hf_config_deinit(&c);
}

static void test_absent_and_null_keys_take_the_defaults(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, dense,
             "{\"head_dim\": \"<absent>\", \"num_key_value_heads\": null, \"bos_token_id\": null, "
             "\"eos_token_id\": null, \"torch_dtype\": null,"
             " \"tie_word_embeddings\": \"<absent>\", \"rms_norm_eps\": \"<absent>\", "
             "\"hidden_size\": 1024.0}");
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.num_key_value_heads, 16);
    assert_int_equal(c.bos_token_id, -1);
    assert_int_equal(c.num_eos_token_ids, 0);
    assert_false(c.tie_word_embeddings || c.has_dtype);
    assert_near(c.rms_norm_eps, 1e-6);
    ith_hf_config_deinit(&c);
    parse_ok(&c, dense,
             "{\"eos_token_id\": [151645, 151643], \"torch_dtype\": \"<absent>\", \"dtype\": "
             "\"torch.float32\", \"layer_types\":"
             " [\"full_attention\", \"full_attention\", \"full_attention\", \"full_attention\"], "
             "\"use_sliding_window\": true}");
    assert_int_equal(c.num_eos_token_ids, 2);
    assert_int_equal(c.eos_token_ids[1], 151643);
    assert_true(c.has_dtype && c.dtype == ITH_F32);
    ith_hf_config_deinit(&c);
}

static const char llada2[] =
    "{\"model_type\": \"llada2_moe\", \"rms_norm_eps\": 1e-06, \"rope_theta\": 600000,"
    " \"num_experts\": 16, \"num_experts_per_tok\": 4, \"moe_intermediate_size\": 512,"
    " \"num_shared_experts\": 1, \"first_k_dense_replace\": 1, \"n_group\": 4, \"topk_group\": 2,"
    " \"routed_scaling_factor\": 2.5, \"use_bias\": false, \"use_qkv_bias\": false,"
    " \"embedding_dropout\": 0.0, \"output_dropout\": 0.0, \"partial_rotary_factor\": 0.5,"
    " \"score_function\": \"sigmoid\", \"pad_token_id\": 7, \"tie_word_embeddings\": false}";

static void test_llada2_config_and_its_absent_keys(void **state)
{
    (void)state;
    ith_hf_config c;
    parse_ok(&c, llada2, "{}");
    assert_int_equal(c.family, ITH_FAMILY_LLADA2);
    assert_false(c.layer_is_moe[0]);
    assert_true(c.layer_is_moe[1] && c.layer_is_moe[3]);
    assert_int_equal(c.num_shared_experts, 1);
    assert_int_equal(c.n_group, 4);
    assert_int_equal(c.topk_group, 2);
    assert_near(c.routed_scaling_factor, 2.5);
    assert_near(c.rope.partial_rotary_factor, 0.5);
    assert_int_equal(c.mask_token_id, -1);
    assert_true(c.has_expert_bias);
    ith_hf_config_deinit(&c);
    parse_ok(&c, llada2,
             "{\"model_type\": \"llada2_moe_veomni\", \"first_k_dense_replace\": \"<absent>\","
             " \"n_group\": \"<absent>\", \"topk_group\": \"<absent>\", \"hidden_act\": "
             "\"<absent>\","
             " \"partial_rotary_factor\": \"<absent>\", \"routed_scaling_factor\": \"<absent>\","
             " \"mask_token_id\": 9}");
    assert_int_equal(c.family, ITH_FAMILY_LLADA2);
    assert_true(c.layer_is_moe[0]);
    assert_int_equal(c.n_group, 8);
    assert_int_equal(c.topk_group, 4);
    assert_near(c.routed_scaling_factor, 2.5);
    assert_near(c.rope.partial_rotary_factor, 0.5);
    assert_int_equal(c.mask_token_id, 9);
    ith_hf_config_deinit(&c);
}

static void test_each_odd_value_is_refused_with_key_and_reason(void **state)
{
    (void)state;
    static const struct {
        const char *base, *change;
        ith_status status;
        const char *text;
    } cases[] = {
        {dense, "{\"model_type\": \"<absent>\"}", ITH_ERR_FORMAT,
         "config.json: model_type is missing"},
        {dense, "{\"model_type\": \"llama\"}", ITH_ERR_UNSUPPORTED,
         "model_type: \"llama\" is not supported (known: qwen3, qwen3_moe, "},
        {llada2, "{\"output_dropout\": \"<absent>\"}", ITH_ERR_FORMAT, "output_dropout is missing"},
        {llada2, "{\"attention_dropout\": 0.1}", ITH_ERR_UNSUPPORTED, "attention_dropout: 0.1"},
        {llada2, "{\"rope_theta\": \"<absent>\"}", ITH_ERR_FORMAT, "rope_theta is missing"},
        {llada2, "{\"use_bias\": true}", ITH_ERR_UNSUPPORTED, "use_bias: true is not supported"},
        {llada2, "{\"use_bias\": \"<absent>\"}", ITH_ERR_FORMAT, "use_bias is missing"},
        {llada2, "{\"n_group\": 3}", ITH_ERR_FORMAT, "n_group: 3 groups of 16 experts"},
        {llada2, "{\"n_group\": 16}", ITH_ERR_FORMAT, "n_group: 16 groups of 16 experts"},
        {llada2, "{\"topk_group\": 5}", ITH_ERR_FORMAT, "topk_group: 5, but n_group is 4"},
        {llada2, "{\"num_experts_per_tok\": 9}", ITH_ERR_FORMAT, "num_experts_per_tok: 9"},
        {llada2, "{\"score_function\": \"softmax\"}", ITH_ERR_UNSUPPORTED, "score_function"},
        {llada2, "{\"mask_token_id\": 200000}", ITH_ERR_FORMAT, "mask_token_id: 200000 is outside"},
        {dense, "{\"model_type\": 3}", ITH_ERR_FORMAT, "model_type: found integer"},
        {dense, "{\"hidden_size\": \"<absent>\"}", ITH_ERR_FORMAT, "hidden_size is missing"},
        {dense, "{\"hidden_size\": null}", ITH_ERR_FORMAT, "hidden_size is missing"},
        {dense, "{\"hidden_size\": 0}", ITH_ERR_FORMAT, "hidden_size: 0 is outside 1 .."},
        {dense, "{\"hidden_size\": 1e30}", ITH_ERR_FORMAT,
         "hidden_size: found number, expected an integer"},
        {dense, "{\"hidden_size\": \"1024\"}", ITH_ERR_FORMAT,
         "hidden_size: found string, expected an integer"},
        {dense, "{\"vocab_size\": 9007199254740993}", ITH_ERR_FORMAT,
         "vocab_size: 9007199254740993 is outside"},
        {dense, "{\"num_hidden_layers\": 100000}", ITH_ERR_FORMAT,
         "num_hidden_layers: 100000 is outside 1 .. 1024"},
        {dense, "{\"num_key_value_heads\": 3}", ITH_ERR_FORMAT,
         "num_key_value_heads: 3 does not divide num_attention_heads 16"},
        {dense, "{\"num_attention_heads\": 24, \"head_dim\": null}", ITH_ERR_FORMAT,
         "head_dim is missing, and num_attention_heads 24 does not divide hidden_size 1024"},
        {dense, "{\"head_dim\": 65}", ITH_ERR_FORMAT, "head_dim: 65 is odd"},
        {dense, "{\"rms_norm_eps\": -1e-6}", ITH_ERR_FORMAT, "rms_norm_eps: -1e-06 is outside"},
        {dense, "{\"rms_norm_eps\": \"1e-6\"}", ITH_ERR_FORMAT,
         "rms_norm_eps: found string, expected a number"},
        {dense, "{\"tie_word_embeddings\": 1}", ITH_ERR_FORMAT,
         "tie_word_embeddings: found integer, expected true or false"},
        {dense, "{\"eos_token_id\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}",
         ITH_ERR_UNSUPPORTED, "eos_token_id: 17 ids, at most 16"},
        {dense, "{\"eos_token_id\": [[1]]}", ITH_ERR_FORMAT,
         "eos_token_id: found array, expected an integer"},
        {dense, "{\"pad_token_id\": 151936}", ITH_ERR_FORMAT,
         "pad_token_id: 151936 is outside vocab_size 151936"},
        {dense, "{\"torch_dtype\": \"int8\"}", ITH_ERR_FORMAT,
         "torch_dtype: found \"int8\", expected float32, bfloat16"},
        {dense, "{\"dtype\": 7}", ITH_ERR_FORMAT, "dtype: found \"integer\""},
        {dense, "{\"rope_scaling\": \"yarn\"}", ITH_ERR_FORMAT,
         "rope_scaling: found string, expected an object or null"},
        {dense, "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8}}",
         ITH_ERR_UNSUPPORTED,
         "rope_scaling: rope_type: \"llama3\" is not supported (default, linear and yarn are)"},
        {dense, "{\"rope_parameters\": {\"type\": 4}}", ITH_ERR_FORMAT,
         "rope_parameters: type: found integer"},
        {dense, "{\"rope_scaling\": {\"rope_type\": \"yarn\"}}", ITH_ERR_FORMAT,
         "rope_scaling: factor is missing"},
        {dense, "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 0.5}}", ITH_ERR_FORMAT,
         "rope_scaling: factor: 0.5 is outside"},
        {dense, "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"beta_slow\": 64}}",
         ITH_ERR_FORMAT, "beta_fast: 32 is below beta_slow 64"},
        {dense, "{\"use_sliding_window\": true, \"sliding_window\": 4096}", ITH_ERR_UNSUPPORTED,
         "use_sliding_window: sliding window attention is not supported"},
        {dense, "{\"use_sliding_window\": true, \"sliding_window\": \"<absent>\"}",
         ITH_ERR_UNSUPPORTED, "use_sliding_window"},
        {dense, "{\"attention_bias\": true}", ITH_ERR_UNSUPPORTED,
         "attention_bias: biases are not supported"},
        {dense, "{\"attention_dropout\": 0.1}", ITH_ERR_UNSUPPORTED,
         "attention_dropout: 0.1 is not supported"},
        {dense, "{\"hidden_act\": \"gelu\"}", ITH_ERR_UNSUPPORTED, "hidden_act: only \"silu\""},
        {dense, "{\"quantization_config\": {\"quant_method\": \"fp8\"}}", ITH_ERR_UNSUPPORTED,
         "quantization_config: quantized weights cannot be trained"},
        {dense, "{\"layer_types\": [\"full_attention\"]}", ITH_ERR_FORMAT,
         "layer_types: 1 entries, num_hidden_layers is 4"},
        {dense, "{\"num_hidden_layers\": 1, \"layer_types\": [\"sliding_attention\"]}",
         ITH_ERR_UNSUPPORTED, "layer_types[0]: \"sliding_attention\" is not supported"},
        {moe, "{\"num_experts\": \"<absent>\"}", ITH_ERR_FORMAT,
         "num_experts (or num_local_experts) is missing"},
        {moe, "{\"num_local_experts\": 9}", ITH_ERR_FORMAT,
         "num_local_experts: 9, but num_experts is 8"},
        {moe, "{\"num_experts_per_tok\": 9}", ITH_ERR_FORMAT,
         "num_experts_per_tok: 9 is outside 1 .. 8"},
        {moe, "{\"moe_intermediate_size\": \"<absent>\"}", ITH_ERR_FORMAT,
         "moe_intermediate_size is missing"},
        {moe, "{\"mlp_only_layers\": [4]}", ITH_ERR_FORMAT, "mlp_only_layers: 4 is outside 0 .. 3"},
        {moe, "{\"mlp_only_layers\": 4}", ITH_ERR_FORMAT, "mlp_only_layers: found integer"},
        {moe, "{\"decoder_sparse_step\": 0}", ITH_ERR_FORMAT, "decoder_sparse_step: 0 is outside"},
    };
    ith_buf text = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        ith_hf_config c;
        parse_changed(cases[i].base, cases[i].change, &text);
        assert_fails(ith_hf_config_parse(&c, text.data, text.len, "config.json", &err), err,
                     cases[i].status, cases[i].text);
    }
    ith_buf_deinit(&text);
    ith_error err = {0};
    ith_hf_config c;
    assert_fails(ith_hf_config_parse(&c, "[]", 2, "config.json", &err), err, ITH_ERR_FORMAT,
                 "config.json: found array");
    assert_fails(ith_hf_config_parse(&c, "{\"a\":\n}", 7, "config.json", &err), err, ITH_ERR_FORMAT,
                 "config.json:2:1:");
    assert_fails(ith_hf_config_load(&c, "test-tmp/nowhere", &err), err, ITH_ERR_IO,
                 "nowhere/config.json: cannot open");
}

static void test_every_failing_allocation_gives_one_error(void **state)
{
    (void)state;
    for (int64_t n = 1;; n++) {
        ith_error err = {0};
        ith_hf_config c;
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ith_status status =
            ith_hf_config_parse(&c, dense, (int64_t)strlen(dense), "config.json", &err);
        int64_t seen = ith_fault_count(ITH_FAULT_ALLOC);
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        if (seen < n) {
            assert_int_equal(status, ITH_OK);
            ith_hf_config_deinit(&c);
            break;
        }
        if (status == ITH_OK || !err.text[0])
            fail_msg("n %lld: status %d, text '%s'", (long long)n, (int)status, err.text);
    }
}

static void test_generation_config_values_and_defaults(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_hf_generation g;
    static const char text[] = "{\"bos_token_id\": 151643, \"do_sample\": true, \"eos_token_id\": "
                               "[151645, 151643], \"pad_token_id\": 151643,"
                               " \"temperature\": 0.6, \"top_k\": 20, \"top_p\": 0.95, "
                               "\"transformers_version\": \"4.51.0\"}";
    assert_ok(ith_hf_generation_parse(&g, text, (int64_t)strlen(text), "g", &err), err);
    assert_true(g.do_sample);
    assert_near(g.temperature, 0.6);
    assert_near(g.top_p, 0.95);
    assert_int_equal(g.top_k, 20);
    assert_near(g.repetition_penalty, 1);
    assert_int_equal(g.num_eos_token_ids, 2);
    assert_int_equal(g.eos_token_ids[0], 151645);
    assert_int_equal(g.max_new_tokens, -1);
    assert_fails(ith_hf_generation_parse(&g, "{\"top_p\": 2}", 12, "g", &err), err, ITH_ERR_FORMAT,
                 "g: top_p: 2 is outside 0 .. 1");
    const char *dir = temp_dir("generation");
    assert_ok(ith_hf_generation_load(&g, dir, &err), err); /* no file: the defaults */
    assert_false(g.do_sample);
    assert_int_equal(g.num_eos_token_ids, 0);
    char path[4200];
    snprintf(path, sizeof path, "%s/generation_config.json", dir);
    assert_ok(ith_write_file(path, "", 0, &err), err);
    assert_fails(ith_hf_generation_load(&g, dir, &err), err, ITH_ERR_FORMAT,
                 "generation_config.json:");
}

static void test_reference_configs_parse_or_are_named(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        ith_status status;
    } dirs[] = {
        {"qwen3", ITH_OK}, {"qwen3_tied", ITH_OK}, {"qwen3_moe", ITH_OK}, {"llada2", ITH_OK}};
    shared_path("golden");
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        ith_error err = {0};
        ith_hf_config c;
        char name[64];
        snprintf(name, sizeof name, "golden/%s/hf", dirs[i].name);
        if (dirs[i].status != ITH_OK) {
            assert_fails(ith_hf_config_load(&c, shared_path(name), &err), err, dirs[i].status,
                         "model_type");
            continue;
        }
        assert_ok(ith_hf_config_load(&c, shared_path(name), &err), err);
        assert_int_equal(c.vocab_size, c.family == ITH_FAMILY_LLADA2 ? 300 : 320);
        assert_int_equal(c.head_dim, 16);
        ith_hf_config_deinit(&c);
        ith_hf_generation g;
        assert_ok(ith_hf_generation_load(&g, shared_path(name), &err), err);
    }
    static const char *const toys[] = {"qwen3_toy", "qwen3_moe_toy"};
    for (int i = 0; i < 2; i++) {
        ith_error err = {0};
        ith_hf_config c;
        ith_buf text = {0};
        char name[96];
        snprintf(name, sizeof name, "data/toy_config/%s.config.json", toys[i]);
        assert_ok(ith_read_file(shared_path(name), 0, &text, &err), err);
        assert_ok(ith_hf_config_parse(&c, text.data, text.len, name, &err), err);
        assert_int_equal(c.num_experts, i ? 16 : 0);
        ith_hf_config_deinit(&c);
        ith_buf_deinit(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dense_config_fills_every_field),
        cmocka_unit_test(test_both_spellings_of_the_rotary_keys_agree),
        cmocka_unit_test(test_linear_and_yarn_scaling),
        cmocka_unit_test(test_moe_layers_follow_step_and_list),
        cmocka_unit_test(test_absent_and_null_keys_take_the_defaults),
        cmocka_unit_test(test_llada2_config_and_its_absent_keys),
        cmocka_unit_test(test_each_odd_value_is_refused_with_key_and_reason),
        cmocka_unit_test(test_every_failing_allocation_gives_one_error),
        cmocka_unit_test(test_generation_config_values_and_defaults),
        cmocka_unit_test(test_reference_configs_parse_or_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
