/* Goal: a configuration says exactly what the user asked, and every mistake is one exact line.
 * Method: table-driven texts with expected values or error lines; dump and read back; the files of
 * LlamaFactory where they are at hand; every failing allocation. */
#include "testing.h"

#include "config/config.h"

#include <math.h>

static ith_status parse(ith_config *out, const char *text, ith_error *err)
{
    return ith_config_parse(out, text, (int64_t)strlen(text), "f.yaml", NULL, 0, err);
}

static void assert_error(const char *text, const char *expected)
{
    ith_config config;
    ith_error err = {0};
    ith_status status = parse(&config, text, &err);
    if (status == ITH_OK || strcmp(err.text, expected) != 0)
        fail_msg("'%s': status %d\n   got      '%s'\n   expected '%s'", text, (int)status, err.text,
                 expected);
    assert_int_equal(ith_exit_code(status), 2);
}

static void test_defaults_are_llamafactory_s(void **state)
{
    (void)state;
    ith_config c;
    ith_error err = {0};
    assert_ok(parse(&c, "", &err), err);
    assert_string_equal(c.model, "Qwen/Qwen3-4B-Instruct-2507");
    assert_null(c.custom_chat_template);
    assert_int_equal(c.micro_batch_size, 1);
    assert_true(c.global_batch_size == ITH_CONFIG_UNSET);
    assert_int_equal(c.cutoff_len, 2048);
    assert_true(fabs(c.learning_rate - 1e-4) < 1e-18);
    assert_int_equal(c.num_train_epochs, 3);
    assert_true(c.max_steps == ITH_CONFIG_UNSET);
    assert_true(fabs(c.max_grad_norm - 1) < 1e-18);
    assert_int_equal(c.diffusion.name, ITH_DIFFUSION_NONE); /* a diffusion model has these, too */
    assert_int_equal(c.diffusion.block_size, 32);
    assert_true(c.diffusion.mask_token_id == ITH_CONFIG_UNSET);
    assert_true(c.bf16);
    assert_int_equal(c.batching_strategy, ITH_BATCHING_NORMAL);
    assert_true(c.enable_activation_checkpointing);
    assert_int_equal(c.cp_size, 1);
    assert_int_equal(c.seed, 42);
    assert_int_equal(c.logging_steps, 1);
    assert_int_equal(c.optim.name, ITH_OPTIM_ADAMW);
    assert_true(fabs(c.optim.beta1 - 0.9) < 1e-18);
    assert_true(fabs(c.optim.beta2 - 0.999) < 1e-18);
    assert_true(fabs(c.optim.eps - 1e-8) < 1e-24);
    assert_true(fabs(c.optim.weight_decay - 0.01) < 1e-18);
    assert_int_equal(c.lr_scheduler.name, ITH_SCHEDULE_CONSTANT);
    assert_int_equal(c.eval_strategy, ITH_EVAL_NO);
    assert_true(isnan(c.save_epochs));
    assert_int_equal(c.max_shard_size, 4000000000);
    assert_int_equal(c.report_to, ITH_REPORT_TENSORBOARD);
    assert_int_equal(c.master_dtype, ITH_DTYPE_F32);
    assert_int_equal(ith_config_param_dtype(&c), ITH_DTYPE_BF16);
    assert_int_equal(strncmp(c.output_dir, "outputs/", 8), 0);
    assert_int_equal(strlen(c.output_dir), 16);
    assert_int_equal(ith_config_num_notes(&c), 0);
    assert_ok(ith_config_check_supported(&c, &err), err);
    ith_config_deinit(&c);
}

static void test_values_are_read(void **state)
{
    (void)state;
    static const char text[] = "model: ./m\n"
                               "cutoff_len: '4096'\n"
                               "learning_rate: 2e-5\n"
                               "bf16: no\n"
                               "max_steps: -1\n"
                               "memory_limit: 1.5GiB\n"
                               "eval_split_ratio: 0.1\n"
                               "eval_steps: 20\n"
                               "report_to: none\n"
                               "lr_scheduler_config: {name: cosine, warmup_ratio: 0.03}\n"
                               "optim_config: '{\"name\": \"adamw\", \"weight_decay\": 0}'\n"
                               "peft_config:\n"
                               "  name: lora\n"
                               "  r: \"16\"\n"
                               "  use_dora: \"True\"\n"
                               "  target_modules: [q_proj, v_proj]\n"
                               "  adapter_name_or_path: a,b\n";
    ith_config c;
    ith_error err = {0};
    assert_ok(parse(&c, text, &err), err);
    assert_string_equal(c.model, "./m");
    assert_int_equal(c.cutoff_len, 4096);
    assert_true(fabs(c.learning_rate - 2e-5) < 1e-18);
    assert_int_equal(ith_config_param_dtype(&c), ITH_DTYPE_F32);
    assert_true(c.max_steps == ITH_CONFIG_UNSET);
    assert_int_equal(c.memory_limit, 1610612736);
    assert_int_equal(c.eval_strategy, ITH_EVAL_STEPS);
    assert_int_equal(c.report_to, 0);
    assert_int_equal(c.lr_scheduler.name, ITH_SCHEDULE_COSINE);
    assert_true(fabs(c.lr_scheduler.warmup_ratio - 0.03) < 1e-18);
    assert_true(fabs(c.optim.weight_decay) < 1e-18);
    assert_int_equal(c.peft.r, 16);
    assert_true(c.peft.use_dora);
    assert_int_equal(c.peft.target_modules.count, 2);
    assert_string_equal(c.peft.target_modules.items[1], "v_proj");
    assert_int_equal(c.peft.adapter_name_or_path.count, 1);
    assert_string_equal(c.peft.adapter_name_or_path.items[0], "a,b");
    assert_true(ith_config_is_set(&c, "eval_steps"));
    assert_false(ith_config_is_set(&c, "save_steps"));
    ith_config_deinit(&c);
}

static void test_recompute_is_none_without_activation_checkpointing(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        ith_recompute expected;
    } cases[] = {{"", ITH_RECOMPUTE_AUTO},
                 {"enable_activation_checkpointing: false", ITH_RECOMPUTE_NONE},
                 {"enable_activation_checkpointing: false\nrecompute: full", ITH_RECOMPUTE_FULL},
                 {"recompute: attention", ITH_RECOMPUTE_ATTENTION}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_config c;
        ith_error err = {0};
        assert_ok(parse(&c, cases[i].text, &err), err);
        assert_int_equal(c.recompute, cases[i].expected);
        ith_config_deinit(&c);
    }
}

static void test_learning_rate_takes_every_usual_form(void **state)
{
    (void)state;
    static const char *const forms[] = {"1e-5",  "1.0e-5",   "1E-05",   ".00001",
                                        "1.e-5", "\"1e-5\"", "0.00001", "1.0E-5"};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        char text[64];
        ith_config c;
        ith_error err = {0};
        snprintf(text, sizeof text, "learning_rate: %s\n", forms[i]);
        assert_ok(parse(&c, text, &err), err);
        if (fabs(c.learning_rate - 1e-5) > 1e-20)
            fail_msg("%s: %.17g", forms[i], c.learning_rate);
        ith_config_deinit(&c);
    }
}

static void test_mistakes_are_exact_lines(void **state)
{
    (void)state;
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"learning_rate: 1e-5x",
         "f.yaml:1:16: learning_rate: found text '1e-5x' (use a number >= 0)"},
        {"learning_rate: -1", "f.yaml:1:16: learning_rate: found -1 (use a number >= 0)"},
        {"chunk_loss_size: 0",
         "f.yaml:1:18: chunk_loss_size: found 0 (use an integer >= 1, or null)"},
        {"chunk_loss_size: -1",
         "f.yaml:1:18: chunk_loss_size: found -1 (use an integer >= 1, or null)"},
        {"cutoff_len: 2048.5",
         "f.yaml:1:13: cutoff_len: found 2048.5 (use an integer from 2 to 2147483646)"},
        {"cutoff_len:",
         "f.yaml:1:12: cutoff_len: found nothing (null) (use an integer from 2 to 2147483646)"},
        {"bf16: 1", "f.yaml:1:7: bf16: found 1 (use true or false)"},
        {"flash_attn: fa3", "f.yaml:1:13: flash_attn: found text 'fa3' (use one of eager, sdpa, "
                            "flash_attention_2)"},
        {"cp_mode: round",
         "f.yaml:1:10: cp_mode: found text 'round' (use one of auto, ulysses, ring, hybrid)"},
        {"model: [a]", "f.yaml:1:8: model: found a list (use text)"},
        {"memory_limit: 3 apples",
         "f.yaml:1:15: memory_limit: found text '3 apples' (use a size such as 16GiB, 4GB, 512MB "
         "or a number of bytes, or null)"},
        {"peft_config: lora",
         "f.yaml:1:14: peft_config: found text 'lora' (use a map with a name)"},
        {"peft_config: {}", "f.yaml:1:14: peft_config: found an empty map (use a map with a name)"},
        {"peft_config: {r: 8}",
         "f.yaml:1:15: peft_config.r: peft_config has no name (add name: lora)"},
        {"peft_config: {name: dora}",
         "f.yaml:1:21: peft_config.name: found text 'dora' (use one of lora, freeze, or null)"},
        {"peft_config: {name: freeze, r: 8}",
         "f.yaml:1:29: peft_config.r: belongs to name: lora, not to freeze"},
        {"peft_config: {name: lora, rr: 8}",
         "f.yaml:1:27: peft_config.rr: unknown key (did you mean peft_config.r?)"},
        {"peft_config: '{\"name\": lora'",
         "f.yaml:1:14: not YAML: did not find expected ',' or '}', while parsing a flow mapping "
         "(line 1)"},
        {"dist_config: {name: fsdpturbo, cp_size: 2}",
         "f.yaml:1:32: dist_config.cp_size: unknown key (did you mean dist_config.ep_size?)"},
        {"kernel_config: {name: auto, chunk_size: 48}",
         "f.yaml:1:41: kernel_config.chunk_size: found 48 (use one of 16, 32, 64)"},
        {"dist_config: {name: deepspeed}",
         "f.yaml:1:21: dist_config: deepspeed without config_file (add it)"},
        {"learing_rate: 1", "f.yaml:1:1: learing_rate: unknown key (did you mean learning_rate?)"},
        {"lr: 1", "f.yaml:1:1: lr: unknown key (here it is learning_rate)"},
        {"banana: 1", "f.yaml:1:1: banana: unknown key (docs/config.md lists all)"},
        {"optim_config.beta1: 1", "f.yaml:1:1: optim_config.beta1: unknown key (did you mean "
                                  "optim_config.beta1?)"},
        {"optim_config: {name: adamw, lr: 1}",
         "f.yaml:1:29: optim_config.lr: unknown key (here it is learning_rate)"},
        {"optim_config: {name: adamw, beta2: 1.0}",
         "f.yaml:1:36: optim_config.beta2: found 1.0 (use a number from 0 to below 1)"},
        {"optim_config: {name: muon, adamw_betas: [0.9]}",
         "f.yaml:1:41: optim_config.adamw_betas: found a list (use a list of two numbers from 0 to "
         "below 1)"},
        {"batching_strategy: dynamic_batching",
         "f.yaml:1:20: batching_strategy: dynamic batches have no epochs (add max_steps)"},
        {"batching_strategy: dynamic_padding_free\nmax_steps: 5\nsave_epochs: 1",
         "f.yaml:3:14: save_epochs: dynamic batches have no epochs (use save_steps)"},
        {"micro_batch_size: 4\nglobal_batch_size: 6",
         "f.yaml:2:20: global_batch_size: 6 is not a multiple of micro_batch_size 4"},
        {"max_steps: 0", "f.yaml:1:12: max_steps: found 0 (use 1 or more, -1 or null)"},
        {"eval_steps: 5",
         "f.yaml:1:13: eval_steps: nothing to evaluate on (add eval_dataset or eval_split_ratio)"},
        {"eval_dataset: x\neval_split_ratio: 0.1",
         "f.yaml:2:19: eval_split_ratio: found beside eval_dataset (keep one of them)"},
        {"eval_dataset: x\neval_strategy: epoch\neval_steps: 3",
         "f.yaml:3:13: eval_steps: has no effect (use eval_strategy: steps)"},
        {"model: m\npack_window: 100\n",
         "f.yaml:2:14: pack_window: has no effect (use batching_strategy: packing)"},
        {"split_long: 3\n", "f.yaml:1:13: split_long: found 3 (use true or false)"},
        {"lr_scheduler_config: {name: linear, warmup_steps: 5, warmup_ratio: 0.1}",
         "f.yaml:1:68: lr_scheduler_config.warmup_ratio: found beside warmup_steps (keep one of "
         "them)"},
        {"[1, 2]", "f.yaml:1:1: this file: found a list (use a map)"},
        {"just text", "f.yaml:1:1: this file: found text 'just text' (use a map)"},
        {"seed: 1\nseed: 2", "f.yaml:2:1: seed: given twice (first at line 1)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_error(cases[i].text, cases[i].expected);
}

static void test_all_mistakes_are_reported_in_file_order(void **state)
{
    (void)state;
    assert_error("train_mm_proj_only: true\ncutoff_len: 0\nevaluation_strategy: steps\n",
                 "f.yaml:1:1: train_mm_proj_only: unknown key (docs/config.md lists all)\n"
                 "f.yaml:2:13: cutoff_len: found 0 (use an integer from 2 to 2147483646)\n"
                 "f.yaml:3:1: evaluation_strategy: unknown key (here it is eval_strategy)");
    ith_buf text = {0};
    for (int i = 0; i < 200; i++)
        ith_buf_printf(&text, "unknown_key_number_%d: 1\n", i);
    ith_config c;
    ith_error err = {0};
    assert_fails(parse(&c, text.data, &err), err, ITH_ERR_USAGE, " more");
    ith_buf_deinit(&text);
}

static void test_extra_keys_are_allowed_on_request(void **state)
{
    (void)state;
    ith_config c;
    ith_error err = {0};
    setenv("ALLOW_EXTRA_KEYS", "Yes", 1);
    ith_status top = parse(&c, "banana: 1\nseed: 7\n", &err);
    int64_t seed = top == ITH_OK ? c.seed : 0;
    if (top == ITH_OK)
        ith_config_deinit(&c);
    ith_status inner = parse(&c, "peft_config: {name: lora, rr: 8}\n", &err);
    unsetenv("ALLOW_EXTRA_KEYS");
    assert_int_equal(top, ITH_OK);
    assert_int_equal(seed, 7);
    assert_int_equal(inner, ITH_ERR_USAGE);
}

static void test_overrides_replace_and_reach_into_maps(void **state)
{
    (void)state;
    static const char text[] = "learning_rate: 1.0e-4\npeft_config: {name: lora, r: 8}\n"
                               "quant_config: {name: bnb}\n";
    static const char *const args[] = {"learning_rate=3e-5",
                                       "peft_config.r=32",
                                       "--quant_config=null",
                                       "eval_dataset=",
                                       "optim_config.beta2=.95",
                                       "model=a=b",
                                       "lr_scheduler_config={name: linear}"};
    ith_config c;
    ith_error err = {0};
    assert_ok(ith_config_parse(&c, text, sizeof text - 1, "f.yaml", args, 7, &err), err);
    assert_true(fabs(c.learning_rate - 3e-5) < 1e-18);
    assert_int_equal(c.peft.r, 32);
    assert_int_equal(c.quant.name, ITH_QUANT_NONE);
    assert_null(c.eval_dataset);
    assert_true(fabs(c.optim.beta2 - 0.95) < 1e-18);
    assert_string_equal(c.model, "a=b");
    assert_int_equal(c.lr_scheduler.name, ITH_SCHEDULE_LINEAR);
    ith_config_deinit(&c);

    static const struct {
        const char *arg, *expected;
    } wrong[] = {
        {"learning_rate", "'learning_rate': not key=value"},
        {"=3", "'=3': not key=value"},
        {"seed=x", "command line: seed: found text 'x' (use an integer >= 0)"},
        {"sed=1", "command line: sed: unknown key (did you mean seed?)"},
        {"peft_config.name=dora",
         "command line: peft_config.name: found text 'dora' (use one of lora, freeze, or null)"},
        {"report_to=[x", "report_to: command line: not YAML: did not find expected ',' or ']', "
                         "while parsing a flow sequence (line 1)"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ith_error_clear(&err);
        ith_status status =
            ith_config_parse(&c, text, sizeof text - 1, "f.yaml", &wrong[i].arg, 1, &err);
        if (status == ITH_OK || strcmp(err.text, wrong[i].expected) != 0)
            fail_msg("'%s': status %d\n   got      '%s'\n   expected '%s'", wrong[i].arg,
                     (int)status, err.text, wrong[i].expected);
    }
}

static void test_missing_features_are_one_line(void **state)
{
    (void)state;
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"seed: 1\npeft_config:\n  name: lora\n", "f.yaml:3:9: peft_config: lora is not built yet "
                                                  "(adapters and partial training; use null)"},
        {"quant_config: {name: bnb}",
         "f.yaml:1:22: quant_config: bnb is not built yet (quantized base weights; use null)"},
        {"dist_config: {name: fsdp2, offload_params: true}",
         "f.yaml:1:44: dist_config.offload_params: true is not built yet (weights kept in host "
         "memory; use false)"},
        {"dist_config: {name: deepspeed, config_file: x.json}",
         "f.yaml:1:21: dist_config: DeepSpeed files are not read yet (leave dist_config out)"},
        {"model_class: cls", "f.yaml:1:14: model_class: cls is not built yet (classification and "
                             "headless models; use llm)"},
        {"pref_loss: orpo",
         "f.yaml:1:12: pref_loss: orpo is not built yet (preference training; use sigmoid)"},
        {"mtp_config: {name: mtp}",
         "f.yaml:1:20: mtp_config: mtp is not built yet (multi-token prediction heads; use null)"},
        {"optim_config: {name: muon}",
         "f.yaml:1:22: optim_config: muon is not built yet (use adamw)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_config c;
        ith_error err = {0};
        assert_ok(parse(&c, cases[i].text, &err), err);
        ith_status status = ith_config_check_supported(&c, &err);
        if (status != ITH_ERR_UNSUPPORTED || strcmp(err.text, cases[i].expected) != 0)
            fail_msg("'%s': status %d\n   got      '%s'\n   expected '%s'", cases[i].text,
                     (int)status, err.text, cases[i].expected);
        ith_config_deinit(&c);
    }
}

static void test_foreign_dialects_are_named(void **state)
{
    (void)state;
    assert_error("model_name_or_path: x\nstage: sft\n",
                 "f.yaml:2:1: stage: this is a LlamaFactory v0 file (write it with LlamaFactory v1 "
                 "keys)");
    assert_error(
        "distributed_type: FSDP\n",
        "f.yaml:1:1: distributed_type: this is an accelerate file (it starts programs; its "
        "parallelism_config_* sizes go into a TRL file)");
}

/* Values, defaults and notes of a dFactory file; overrides in its own names and in ours. */
static void test_dfactory_files_become_our_keys(void **state)
{
    (void)state;
    static const char text[] =
        "model:\n  model_path: ./m\n  moe_implementation: fused\n"
        "data:\n  train_path: t.jsonl\n  max_seq_len: 512\n  noise_range_low: 0.2\n"
        "train:\n  output_dir: o\n  block_diffusion_mode: true\n  block_size: 16\n"
        "  lr: 1.0e-5\n  lr_min: 1.0e-6\n  lr_decay_style: cosine\n  lr_warmup_ratio: 0.03\n"
        "  weight_decay: 0.1\n  beta2: 0.95\n  load_checkpoint_path: \"\"\n  save_epochs: 0\n"
        "  global_batch_size: 8\n  data_parallel_mode: fsdp2\n  expert_parallel_size: 2\n  "
        "enable_mixed_precision: false\n";
    const char *overrides[] = {"train.block_size=8", "seed=7"};
    ith_config c;
    ith_error err = {0};
    assert_ok(ith_config_parse(&c, text, (int64_t)strlen(text), "f.yaml", overrides, 2, &err), err);
    assert_string_equal(c.model, "./m");
    assert_string_equal(c.train_dataset, "t.jsonl");
    assert_int_equal(c.cutoff_len, 512);
    assert_int_equal(c.diffusion.name, ITH_DIFFUSION_BLOCKS);
    assert_int_equal(c.diffusion.block_size, 8);
    assert_true(fabs(c.diffusion.noise_range_low - 0.2) < 1e-12);
    assert_true(fabs(c.diffusion.noise_range_high - 0.8) < 1e-12);
    assert_true(fabs(c.learning_rate - 1e-5) < 1e-18);
    assert_int_equal(c.lr_scheduler.name, ITH_SCHEDULE_COSINE);
    assert_true(fabs(c.lr_scheduler.min_lr_ratio - 0.1) < 1e-12);
    assert_true(fabs(c.optim.weight_decay - 0.1) < 1e-12);
    assert_true(fabs(c.optim.beta2 - 0.95) < 1e-12);
    assert_int_equal(c.zero_stage, 3);
    assert_int_equal(ith_config_ep_size(&c), 2);
    assert_int_equal(c.num_train_epochs, 1); /* dFactory's default, not ours */
    assert_null(c.resume_from_checkpoint);
    assert_true(isnan(c.save_epochs));
    assert_false(c.bf16);
    assert_int_equal(c.seed, 7);
    assert_int_equal(ith_config_num_notes(&c), 1);
    assert_string_equal(
        ith_config_note(&c, 0),
        "f.yaml:3:3: model.moe_implementation: not needed: the best kernels of this "
        "machine are chosen by the program");
    ith_config_deinit(&c);
}

static void test_dfactory_mistakes_are_named(void **state)
{
    (void)state;
    assert_error("train:\n  blok_size: 4\n",
                 "f.yaml:2:3: train.blok_size: unknown key (did you mean train.block_size?)");
    assert_error("train:\n  tensor_parallel_size: 2\n",
                 "f.yaml:2:25: train.tensor_parallel_size: found 2 (use 1: there is no tensor "
                 "parallelism)");
    assert_error(
        "data:\n  data_type: plaintext\n",
        "f.yaml:2:14: data.data_type: found text 'plaintext' (use conversation or tokenid: "
        "the keys of a row tell which it is)");
    assert_error("diffusion_config:\n  name: block_diffusion\n  loss_weight: inverse\n"
                 "  random_tokens: 0.1\n",
                 "f.yaml:4:18: diffusion_config.random_tokens: found 0.1 with loss_weight inverse, "
                 "which has no weight for tokens that are not masked (use loss_weight masked)");
    assert_error("train:\n  confidence_beta: -1\n",
                 "f.yaml:2:20: diffusion_config.confidence_beta: found -1 (use a number >= 0)");
    assert_error("train:\n  lr: fast\n",
                 "f.yaml:2:7: learning_rate: found text 'fast' (use a number >= 0)");
    assert_error(
        "data:\n  noise_range_low: 0.9\n",
        "f.yaml:2:20: diffusion_config.noise_range_low: 0.9 is above noise_range_high 0.8");
    assert_error("model: x\ntrain:\n  lr: 1\n",
                 "f.yaml:1:1: model: unknown key of dFactory and VeOmni files");
}

/* Values and defaults of TRL, accelerate's sizes in a block, overrides in both languages. */
static void test_trl_files_become_our_keys(void **state)
{
    (void)state;
    static const char text[] =
        "model_name_or_path: ./m\ndataset_name: t.jsonl\noutput_dir: o\nmax_length: 4096\n"
        "packing: true\npacking_strategy: bfd_split\npad_to_multiple_of: "
        "4\nper_device_train_batch_size: 2\n"
        "gradient_accumulation_steps: 3\nnum_train_epochs: 2.0\nlr_scheduler_type: cosine\n"
        "warmup_ratio: 0.1\nweight_decay: 0.05\nsave_strategy: epoch\nsave_steps: 10\n"
        "gradient_checkpointing: false\nddp_timeout: 60\n"
        "chat_template_path: t.jinja\ndataloader_num_workers: 2\ndataloader_pin_memory: true\n"
        "parallelism_config:\n  parallelism_config_sp_size: 4\n  parallelism_config_cp_size: 1\n";
    const char *overrides[] = {"per_device_train_batch_size=1", "seed=7"};
    ith_config c;
    ith_config_layout layout;
    ith_error err = {0};
    assert_ok(ith_config_parse(&c, text, (int64_t)strlen(text), "f.yaml", overrides, 2, &err), err);
    assert_string_equal(c.model, "./m");
    assert_string_equal(c.train_dataset, "t.jsonl");
    assert_int_equal(c.cutoff_len, 4096);
    assert_int_equal(c.batching_strategy, ITH_BATCHING_PACKING);
    assert_true(c.split_long);
    assert_int_equal(c.pack_window, 8192);
    assert_int_equal(c.micro_batch_size, 1);
    assert_int_equal(c.num_train_epochs, 2);
    assert_int_equal(c.lr_scheduler.name, ITH_SCHEDULE_COSINE);
    assert_true(fabs(c.lr_scheduler.warmup_ratio - 0.1) < 1e-12);
    assert_true(fabs(c.optim.weight_decay - 0.05) < 1e-12);
    assert_true(fabs(c.learning_rate - 2e-5) < 1e-18); /* TRL's default, not ours */
    assert_int_equal(c.train_on, ITH_TRAIN_ON_ALL_TURNS);
    assert_true(c.save_steps == ITH_CONFIG_UNSET && c.save_epochs == 1.0);
    assert_false(c.enable_activation_checkpointing);
    assert_int_equal(c.dist_timeout, 60);
    assert_int_equal(c.cp_size, 4);
    assert_int_equal(c.seed, 7);
    assert_string_equal(c.custom_chat_template, "t.jinja");
    assert_int_equal(ith_config_num_notes(&c), 3);
    assert_string_equal(ith_config_note(&c, 2),
                        "f.yaml:19:1: dataloader_num_workers, dataloader_pin_memory: not needed: "
                        "samples are prepared by threads (nproc)");
    assert_string_equal(ith_config_note(&c, 0),
                        "f.yaml:1:1: read as TRL: the loss is on the answers, TRL's is on prompts "
                        "too unless assistant_only_loss is true");
    assert_string_equal(ith_config_note(&c, 1),
                        "f.yaml:7:1: pad_to_multiple_of: not needed: slices of a sequence need no "
                        "padding");
    assert_ok(ith_config_resolve_layout(&c, 8, &layout, &err), err);
    assert_int_equal(layout.dp_size, 2);
    assert_int_equal(layout.global_batch_size, 6);
    assert_int_equal(layout.grad_accum, 3);
    ith_config_deinit(&c);
}

static void test_trl_mistakes_are_named(void **state)
{
    (void)state;
    assert_error("dataset_name: d\nmax_lenght: 4\n",
                 "f.yaml:2:1: max_lenght: unknown key (did you mean max_length?)");
    assert_error("dataset_name: d\npacking_strategy: wrapped\n",
                 "f.yaml:2:19: packing_strategy: found text 'wrapped' (use bfd, bfd_split: "
                 "documents never see each other)");
    assert_error("dataset_name: d\nparallelism_config_sp_size: 2\nparallelism_config_cp_size: 2\n",
                 "f.yaml:3:1: parallelism_config_cp_size: found beside parallelism_config_sp_size "
                 "of line 2 (keep one of them)");
    assert_error("dataset_name: d\noptim: lion\n",
                 "f.yaml:2:8: optim: found text 'lion' (use adamw_torch, adamw_torch_fused, adamw: "
                 "other optimizers are not built)");
    assert_error("ep_size: 2\nzero_stage: 1\n",
                 "f.yaml:2:13: zero_stage: found 1 beside ep_size 2 (use 3)");
    assert_error("gradient_accumulation_steps: 2\nglobal_batch_size: 8\n",
                 "f.yaml:1:30: gradient_accumulation_steps: found beside global_batch_size (keep "
                 "one of them)");
}

static void test_keys_without_meaning_are_noted_once(void **state)
{
    (void)state;
    ith_config c;
    ith_error err = {0};
    assert_ok(parse(&c,
                    "trust_remote_code: true\nsample_backend: hf\nkernel_config: {name: auto}\n",
                    &err),
              err);
    assert_int_equal(ith_config_num_notes(&c), 2);
    assert_string_equal(ith_config_note(&c, 0),
                        "f.yaml:1:1: trust_remote_code: not needed: no code is loaded from model "
                        "directories");
    ith_config_deinit(&c);
}

static void test_layout_follows_the_number_of_processes(void **state)
{
    (void)state;
    ith_config c;
    ith_config_layout layout;
    ith_error err = {0};
    assert_ok(parse(&c, "micro_batch_size: 2\nglobal_batch_size: 16\ncp_size: 2\n", &err), err);
    assert_ok(ith_config_resolve_layout(&c, 8, &layout, &err), err);
    assert_int_equal(layout.dp_size, 4);
    assert_int_equal(layout.grad_accum, 2);
    assert_fails(ith_config_resolve_layout(&c, 3, &layout, &err), err, ITH_ERR_USAGE,
                 "f.yaml:3:10: cp_size: 2 does not divide the number of processes 3");
    assert_fails(ith_config_resolve_layout(&c, 6, &layout, &err), err, ITH_ERR_USAGE,
                 "f.yaml:2:20: global_batch_size: 16 is not a multiple of dp_size * "
                 "micro_batch_size = 6");
    ith_config_deinit(&c);
    assert_ok(parse(&c, "dp_size: 3\n", &err), err);
    assert_fails(ith_config_resolve_layout(&c, 2, &layout, &err), err, ITH_ERR_USAGE,
                 "f.yaml:1:10: dp_size: 3 * cp_size 1 is not the number of processes 2 (use 2)");
    ith_config_deinit(&c);
    assert_ok(parse(&c, "micro_batch_size: 3\n", &err), err);
    assert_ok(ith_config_resolve_layout(&c, 2, &layout, &err), err);
    assert_int_equal(layout.global_batch_size, 6);
    assert_int_equal(layout.grad_accum, 1);
    assert_fails(ith_config_fail(&c, "model", &err, "no such directory"), err, ITH_ERR_USAGE,
                 "f.yaml: model: no such directory");
    ith_config_deinit(&c);
}

/* Dump of a config, of the config read from that dump: equal, and, of all keys, without notes lost.
 * The keys that were given say as much as all. */
static void assert_dump_reads_back(const char *text, const char *name)
{
    ith_config c;
    ith_error err = {0};
    ith_buf first = {0};
    assert_ok(ith_config_parse(&c, text, (int64_t)strlen(text), name, NULL, 0, &err), err);
    assert_ok(ith_config_dump(&c, true, &first, &err), err);
    for (int all = 0; all < 2; all++) {
        ith_config again;
        ith_buf dump = {0}, second = {0}, dir = {0};
        ith_buf_printf(&dir, "output_dir=%s", c.output_dir); /* another random one without */
        const char *override = dir.data;
        assert_ok(ith_config_dump(&c, all, &dump, &err), err);
        assert_ok(ith_config_parse(&again, dump.data, dump.len, "dump.yaml", &override, !all, &err),
                  err);
        assert_ok(ith_config_dump(&again, true, &second, &err), err);
        assert_string_equal(first.data, second.data);
        if (all)
            assert_int_equal(ith_config_num_notes(&c), ith_config_num_notes(&again));
        else
            assert_true(dump.len < first.len / 3);
        ith_buf_deinit(&dir);
        ith_buf_deinit(&dump);
        ith_buf_deinit(&second);
        ith_config_deinit(&again);
    }
    ith_buf_deinit(&first);
    ith_config_deinit(&c);
}

static void test_dump_reads_back_equal(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "",
        ("learning_rate: 3.3333333333333335e-05\nseed: 9007199254740991\ncustom_chat_template: |\n"
         "  {% for m in messages %}\n  {{ m.content }}: \"x\" # y\n  {% endfor %}\n"),
        "optim_config: {name: muon, adamw_betas: [0.8, 0.99]}\nmemory_limit: 3GiB\n",
        "lr_scheduler_config: {name: warmup_stable_decay, warmup_steps: 3, decay_steps: 4}\n",
        "peft_config: {name: freeze, freeze_extra_modules: 'embed_tokens, lm_head'}\n",
        "eval_dataset: e.yaml\nreport_to: none\nmax_steps: -1\nsave_epochs: 0.5\n",
        "dist_config: {name: fsdpturbo, hook_modules: [a, 'b c', '1']}\nbf16: false\n",
        "kernel_config: {name: 'auto, flash-linear-attention', include_kernels: 'x, y'}\n",
        "quant_config: {name: bnb, quantization_bit: 8}\nmtp_config: {name: mtp}\n"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        assert_dump_reads_back(texts[i], "f.yaml");
}

static void test_key_table_is_complete(void **state)
{
    (void)state;
    for (int i = 0; i < ith_config_num_keys(); i++) {
        ith_config_key key = ith_config_key_at(i);
        char type[400];
        assert_true(strlen(key.help) > 3);
        assert_int_equal(key.help[strlen(key.help) - 1], '.');
        assert_true(strlen(ith_config_key_type(i, type, sizeof type)) > 3);
        assert_true((key.status == ITH_KEY_USED) == (key.why == NULL));
        for (int k = 0; k < i; k++)
            assert_string_not_equal(ith_config_key_at(k).name, key.name);
    }
}

static void test_json_config_is_read(void **state)
{
    (void)state;
    static const char text[] =
        "{\n\t\"model\": \"m\",\n\t\"peft_config\": {\"name\": \"lora\", \"r\": 4},\n"
        "\t\"learning_rate\": 1e-5, \"train_dataset\": null}\n";
    ith_config c;
    ith_error err = {0};
    assert_ok(ith_config_parse(&c, text, sizeof text - 1, "f.json", NULL, 0, &err), err);
    assert_int_equal(c.peft.r, 4);
    assert_true(fabs(c.learning_rate - 1e-5) < 1e-20);
    ith_config_deinit(&c);
    assert_fails(ith_config_parse(&c, "{\"sed\": 1}", 10, "f.json", NULL, 0, &err), err,
                 ITH_ERR_USAGE, "f.json:1:2: sed: unknown key (did you mean seed?)");
}

static void test_every_failing_allocation_is_reported(void **state)
{
    (void)state;
    static const char text[] = "model: m\npeft_config: '{\"name\": \"lora\", \"r\": 8}'\n"
                               "kernel_config: {name: auto}\nreport_to: [tensorboard]\n";
    static const char *const args[] = {"seed=3"};
    for (int64_t n = 1;; n++) {
        ith_config c;
        ith_error err = {0};
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ith_status status = ith_config_parse(&c, text, sizeof text - 1, "f.yaml", args, 1, &err);
        int64_t seen = ith_fault_count(ITH_FAULT_ALLOC);
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        if (status == ITH_OK) {
            ith_config_deinit(&c);
            if (seen < n)
                return;
            fail_msg("allocation %lld failed unnoticed", (long long)n);
        }
        if (status != ITH_ERR_MEMORY || !err.text[0])
            fail_msg("allocation %lld: status %d, '%s'", (long long)n, (int)status, err.text);
    }
}

/* Every example file of LlamaFactory v1 is accepted, and its dump reads back. */
static void test_llamafactory_examples_are_accepted(void **state)
{
    (void)state;
    ith_names names;
    ith_error err = {0};
    char dir[4096];
    snprintf(dir, sizeof dir, "%s", shared_path("data/llamafactory/v1_yaml"));
    assert_ok(ith_list_dir(dir, &names, &err), err);
    assert_true(names.count >= 17);
    for (int64_t i = 0; i < names.count; i++) {
        ith_buf path = {0}, text = {0};
        ith_path_join(&path, dir, names.names[i]);
        assert_ok(ith_read_file(path.data, 0, &text, &err), err);
        assert_dump_reads_back(text.data, names.names[i]);
        ith_buf_deinit(&path);
        ith_buf_deinit(&text);
    }
    ith_names_free(&names);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_are_llamafactory_s),
        cmocka_unit_test(test_values_are_read),
        cmocka_unit_test(test_recompute_is_none_without_activation_checkpointing),
        cmocka_unit_test(test_learning_rate_takes_every_usual_form),
        cmocka_unit_test(test_mistakes_are_exact_lines),
        cmocka_unit_test(test_all_mistakes_are_reported_in_file_order),
        cmocka_unit_test(test_extra_keys_are_allowed_on_request),
        cmocka_unit_test(test_overrides_replace_and_reach_into_maps),
        cmocka_unit_test(test_missing_features_are_one_line),
        cmocka_unit_test(test_foreign_dialects_are_named),
        cmocka_unit_test(test_dfactory_files_become_our_keys),
        cmocka_unit_test(test_dfactory_mistakes_are_named),
        cmocka_unit_test(test_trl_files_become_our_keys),
        cmocka_unit_test(test_trl_mistakes_are_named),
        cmocka_unit_test(test_keys_without_meaning_are_noted_once),
        cmocka_unit_test(test_layout_follows_the_number_of_processes),
        cmocka_unit_test(test_dump_reads_back_equal),
        cmocka_unit_test(test_key_table_is_complete),
        cmocka_unit_test(test_json_config_is_read),
        cmocka_unit_test(test_every_failing_allocation_is_reported),
        cmocka_unit_test(test_llamafactory_examples_are_accepted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
