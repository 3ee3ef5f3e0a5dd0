/* config_trl.c - keys of TRL's supervised fine-tuning files (ScriptArguments, ModelConfig,
 * SFTConfig with transformers' TrainingArguments) and of accelerate's parallelism_config_*, and
 * what each means here. Source: TRL 1.x, transformers 5, accelerate 1.x. */
#include "config/config_dialect.h"

#include <stddef.h>

#define TO(key) .to = key
#define NOTE(why) .note = why
#define ONLY(word, why) .choices = {{word, NULL}}, .note = why

static const char kernels[] = "the best kernels of this machine are chosen by the program";
static const char loading[] = "samples are prepared by threads (nproc)";
static const char memory[] = "memory is planned before the run";
static const char tracking[] = "metrics go to trainer_log.jsonl and TensorBoard";
static const char hub[] = "nothing is uploaded";
static const char padding[] = "slices of a sequence need no padding";
static const char scheme[] = "cp_mode says how a sequence is shared";
static const char code[] = "no code is loaded from model directories";
static const char exact[] = "losses are weighted by the tokens of all processes in any case";
static const char adapters[] = "adapters are not built yet";
static const char half[] = "float16 is not built (bf16 is)";
static const char progress[] = "log lines say it all";

static const ith_dialect_key keys[] = {
    /* model */
    {"model_name_or_path", TO("model")},
    {"model_revision", NOTE("the model is a directory here")},
    {"dtype", TO("dtype")},
    {"torch_dtype", TO("dtype")},
    {"trust_remote_code", NOTE(code)},
    {"attn_implementation", NOTE(kernels)},
    {"use_liger_kernel", NOTE(kernels)},
    {"tf32", NOTE(kernels)},
    {"use_peft", ONLY("false", adapters)},
    {"load_in_4bit", ONLY("false", "quantized weights are not built yet")},
    {"load_in_8bit", ONLY("false", "quantized weights are not built yet")},
    {"chat_template_path", TO("custom_chat_template")},

    /* data */
    {"dataset_name", TO("train_dataset")},
    {"dataset_config", ONLY("null", "datasets are files here")},
    {"dataset_train_split", ONLY("train", "datasets are files here")},
    {"dataset_test_split", NOTE("eval_dataset or eval_split_ratio holds the evaluation data")},
    {"dataset_streaming", ONLY("false", "datasets are files here")},
    {"dataset_num_proc", TO("nproc")},
    {"dataset_text_field", NOTE("a dataset YAML says what stands where (docs/data.md)")},
    {"dataset_kwargs", NOTE(loading)},
    {"max_length", TO("cutoff_len")},
    {"packing", .choices = {{"true", "batching_strategy: packing"}, {"false", NULL}}},
    {"packing_strategy", .choices = {{"bfd", NULL}, {"bfd_split", "split_long: true"}},
     NOTE("documents never see each other")},
    {"padding_free", .late = true,
     .choices = {{"true", "batching_strategy: padding_free"}, {"false", NULL}}},
    {"pad_to_multiple_of", NOTE(padding)},
    {"eval_packing", NOTE("evaluation is batched as training is")},
    {"assistant_only_loss", NOTE("the loss is on the answers in any case")},
    {"completion_only_loss", NOTE("the loss is on the answers in any case")},
    {"shuffle_dataset", NOTE("every epoch has its own order")},
    {"remove_unused_columns", NOTE(loading)},
    {"dataloader_num_workers", NOTE(loading)},
    {"dataloader_pin_memory", NOTE(loading)},
    {"dataloader_drop_last", ONLY("false", "the last batch of an epoch is trained, however small")},
    {"dataloader_prefetch_factor", NOTE(loading)},
    {"group_by_length", ONLY("false", "batching_strategy packs documents instead")},

    /* training */
    {"output_dir", TO("output_dir")},
    {"overwrite_output_dir", NOTE("a new run begins beside old checkpoints and says so")},
    {"do_train", ONLY("true", "train trains")},
    {"do_eval", NOTE("eval_strategy says when")},
    {"per_device_train_batch_size", TO("micro_batch_size")},
    {"per_device_eval_batch_size", NOTE("evaluation has the micro-batches of training")},
    {"gradient_accumulation_steps", TO("gradient_accumulation_steps")},
    {"learning_rate", TO("learning_rate")},
    {"num_train_epochs", TO("num_train_epochs"), .whole = true},
    {"max_steps", TO("max_steps")},
    {"max_grad_norm", TO("max_grad_norm")},
    {"bf16", TO("bf16")},
    {"fp16", ONLY("false", half)},
    {"gradient_checkpointing", TO("enable_activation_checkpointing")},
    {"gradient_checkpointing_kwargs", NOTE(memory)},
    {"activation_offloading", NOTE(memory)},
    {"auto_find_batch_size", NOTE(memory)},
    {"torch_empty_cache_steps", NOTE(memory)},
    {"loss_type", .choices = {{"nll", NULL}, {"chunked_nll", NULL}, {"null", NULL}},
     NOTE("the loss is the likelihood of the labels")},
    {"average_tokens_across_devices", NOTE(exact)},
    {"neftune_noise_alpha", ONLY("null", "noise on embeddings is not built")},
    {"label_smoothing_factor", ONLY("0", "label smoothing is not built")},
    {"seed", TO("seed")},
    {"data_seed", NOTE("seed is that of everything random")},
    {"full_determinism", TO("full_determinism")},
    {"torch_compile", NOTE(kernels)},

    /* optimizer and schedule */
    {"optim", .choices = {{"adamw_torch", NULL}, {"adamw_torch_fused", NULL}, {"adamw", NULL}},
     NOTE("other optimizers are not built")},
    {"adam_beta1", TO("optim_config.beta1")},
    {"adam_beta2", TO("optim_config.beta2")},
    {"adam_epsilon", TO("optim_config.eps")},
    {"weight_decay", TO("optim_config.weight_decay")},
    {"lr_scheduler_type",
     .choices = {{"linear", NULL},
                 {"cosine", "lr_scheduler_config: {name: cosine}"},
                 {"constant", "lr_scheduler_config: {name: constant}"},
                 {"constant_with_warmup", "lr_scheduler_config: {name: constant}"},
                 {"warmup_stable_decay", "lr_scheduler_config: {name: warmup_stable_decay}"}}},
    {"warmup_ratio", TO("lr_scheduler_config.warmup_ratio")},
    {"warmup_steps", TO("lr_scheduler_config.warmup_steps"), .skip_if = "0"},

    /* evaluation, saving, reports */
    {"eval_strategy", TO("eval_strategy")},
    {"eval_steps", TO("eval_steps")},
    {"save_strategy", .late = true,
     .choices = {{"steps", NULL},
                 {"no", "save_steps: null"},
                 {"epoch", "{save_steps: null, save_epochs: 1}"}},
     NOTE("checkpoints are not chosen by their evaluation")},
    {"save_steps", TO("save_steps")},
    {"save_total_limit", TO("save_total_limit")},
    {"save_only_model", ONLY("false", "checkpoints can be resumed")},
    {"save_safetensors", NOTE("weights are written as safetensors")},
    {"load_best_model_at_end", ONLY("false", "the last model is the result")},
    {"resume_from_checkpoint",
     .choices = {{"null", NULL}, {"false", NULL}, {"true", "resume_from_checkpoint: auto"}},
     NOTE("true takes the newest one of output_dir")},
    {"logging_steps", TO("logging_steps")},
    {"logging_strategy", ONLY("steps", "logging_steps counts steps")},
    {"logging_first_step", NOTE(progress)},
    {"logging_dir", NOTE("reports are written to output_dir")},
    {"log_level", NOTE("ITH_LOG sets it")},
    {"disable_tqdm", NOTE(progress)},
    {"report_to", .choices = {{"none", "report_to: none"},
                              {"tensorboard", "report_to: [tensorboard]"},
                              {"wandb", "report_to: [tensorboard]"},
                              {"trackio", "report_to: [tensorboard]"},
                              {"all", "report_to: [tensorboard]"}}},
    {"run_name", NOTE(tracking)},
    {"push_to_hub", ONLY("false", hub)},
    {"hub_model_id", NOTE(hub)},
    {"hub_strategy", NOTE(hub)},

    /* many processes */
    {"num_processes", TO("ranks")},
    {"ddp_timeout", TO("dist_timeout")},
    {"ddp_find_unused_parameters", NOTE("gradients are summed whole")},
    {"sp_size", TO("cp_size"), .skip_if = "1"},
    {"cp_size", TO("cp_size"), .skip_if = "1"},
    {"parallelism_config_sp_size", TO("cp_size"), .skip_if = "1"},
    {"parallelism_config_cp_size", TO("cp_size"), .skip_if = "1"},
    {"parallelism_config_dp_replicate_size", TO("mp_replicate_size"), .skip_if = "1"},
    {"parallelism_config_dp_shard_size",
     NOTE("the rest of the processes share the weights (zero_stage)")},
    {"parallelism_config_tp_size", ONLY("1", "there is no tensor parallelism")},
    {"parallelism_config_sp_backend", NOTE(scheme)},
    {"parallelism_config_cp_backend", NOTE(scheme)},
    {"parallelism_config_cp_comm_strategy", NOTE(scheme)},
    {"parallelism_config_sp_seq_length", NOTE(padding)},
    {"parallelism_config_sp_seq_length_is_variable", NOTE(padding)},
    {"parallelism_config_sp_attn_implementation", NOTE(kernels)},
};

/* What TRL does when a key is absent, where it differs from our defaults. Conversations are one
 * sample with every answer trained. */
static const char defaults[] = "micro_batch_size: 8\n"
                               "learning_rate: 2.0e-5\n"
                               "cutoff_len: 1024\n"
                               "train_on: all_turns\n"
                               "optim_config: {name: adamw, weight_decay: 0.0}\n"
                               "lr_scheduler_config: {name: linear}\n"
                               "save_steps: 500\n"
                               "logging_steps: 10\n"
                               "report_to: none\n";

const ith_dialect ith_dialect_trl = {
    .name = "TRL",
    .keys = keys,
    .num_keys = (int)(sizeof keys / sizeof *keys),
    .defaults = defaults,
    .differs =
        "the loss is on the answers, TRL's is on prompts too unless assistant_only_loss is true"};
