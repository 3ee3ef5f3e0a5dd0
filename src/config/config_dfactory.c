/* config_dfactory.c - keys of dFactory and VeOmni files (model: data: train:), and what each means
 * here. Source: VeOmni's argument classes as dFactory pins them. */
#include "config/config_dialect.h"

#include <stddef.h>

#define TO(key) .to = key
#define NOTE(why) .note = why
#define ONLY(word, why) .choices = {{word, NULL}}, .note = why

static const char kernels[] = "the best kernels of this machine are chosen by the program";
static const char sharding[] = "how weights are spread follows from the number of processes";
static const char loading[] = "samples are prepared by threads (nproc)";
static const char packing[] = "documents never see each other here; batching_strategy packs them";
static const char upstream[] = "it has no effect in dFactory either";
static const char tracking[] = "metrics go to trainer_log.jsonl and TensorBoard";
static const char profiler[] = "there is no profiler trace";
static const char memory[] = "memory is planned before the run";

static const ith_dialect_key keys[] = {
    {"model.model_path", TO("model")},
    {"model.config_path", NOTE("config.json is read from model_path")},
    {"model.tokenizer_path", NOTE("the tokenizer is read from model_path")},
    {"model.attn_implementation", NOTE(kernels)},
    {"model.moe_implementation", NOTE(kernels)},
    {"model.basic_modules", NOTE(sharding)},
    {"model.force_use_huggingface", NOTE(upstream)},
    {"model.foundation", NOTE(upstream)},
    {"model.encoders", NOTE(upstream)},
    {"model.decoders", NOTE(upstream)},
    {"model.input_encoder", NOTE(upstream)},
    {"model.output_encoder", NOTE(upstream)},
    {"model.encode_target", NOTE(upstream)},

    {"data.train_path", TO("train_dataset")},
    {"data.data_type", ONLY("conversation or tokenid", "the keys of a row tell which it is")},
    {"data.datasets_type",
     ONLY("mapping", "saved Hugging Face data sets are not read (use JSONL)")},
    {"data.dataloader_type", NOTE(loading)},
    {"data.max_seq_len", TO("cutoff_len")},
    {"data.text_keys", ONLY("messages or input_ids", "the columns have these names")},
    {"data.noise_range_low", TO("diffusion_config.noise_range_low")},
    {"data.noise_range_high", TO("diffusion_config.noise_range_high")},
    {"data.num_workers", NOTE(loading)},
    {"data.prefetch_factor", NOTE(loading)},
    {"data.pin_memory", NOTE(loading)},
    {"data.drop_last", NOTE("the last batch of an epoch is trained, however small")},
    {"data.train_size", NOTE(upstream)},
    {"data.enable_multisource", NOTE(upstream)},
    {"data.source_name", NOTE(upstream)},
    {"data.data_tag", NOTE(upstream)},
    {"data.drop_resume_buffer", NOTE(upstream)},
    {"data.image_keys", NOTE(upstream)},
    {"data.chat_template", NOTE(upstream)},
    {"data.shuffle_shard_nums", NOTE(upstream)},
    {"data.split_nums", NOTE(upstream)},
    {"data.predownload_factor", NOTE(upstream)},
    {"data.silent_exception", NOTE(upstream)},

    {"train.output_dir", TO("output_dir")},
    {"train.block_diffusion_mode",
     .choices = {{"true", "diffusion_config: {name: block_diffusion}"},
                 {"false", "diffusion_config: {name: random_mask}"}}},
    {"train.block_size", TO("diffusion_config.block_size")},
    {"train.same_token_labels", TO("diffusion_config.same_token_labels")},
    {"train.confidence_beta", TO("diffusion_config.confidence_beta")},
    {"train.beta1", TO("optim_config.beta1")},
    {"train.beta2", TO("optim_config.beta2")},
    {"train.optimizer", TO("optim_config.name")},
    {"train.lr", TO("learning_rate")},
    {"train.lr_min", .is_lr_min = true},
    {"train.lr_start", ONLY("0", "the rate rises from 0")},
    {"train.lr_warmup_ratio", TO("lr_scheduler_config.warmup_ratio")},
    {"train.lr_decay_style", TO("lr_scheduler_config.name")},
    {"train.lr_decay_ratio", ONLY("1", "the rate falls until the last step")},
    {"train.weight_decay", TO("optim_config.weight_decay")},
    {"train.no_decay_modules", NOTE(upstream)},
    {"train.no_decay_params", NOTE(upstream)},
    {"train.max_grad_norm", TO("max_grad_norm")},
    {"train.global_batch_size", TO("global_batch_size")},
    {"train.micro_batch_size", TO("micro_batch_size")},
    {"train.num_train_epochs", TO("num_train_epochs")},
    {"train.max_steps", TO("max_steps")},
    {"train.data_parallel_mode",
     .choices = {{"ddp", "zero_stage: 0"}, {"fsdp1", "zero_stage: 3"}, {"fsdp2", "zero_stage: 3"}}},
    {"train.data_parallel_replicate_size", TO("mp_replicate_size"), .skip_if = "-1"},
    {"train.data_parallel_shard_size", TO("mp_shard_size"), .null_if = "-1"},
    {"train.tensor_parallel_size", ONLY("1", "there is no tensor parallelism")},
    {"train.pipeline_parallel_size", ONLY("1", "there is no pipeline parallelism")},
    {"train.expert_parallel_size", TO("ep_size")},
    {"train.ep_outside", NOTE(upstream)},
    {"train.ulysses_parallel_size", TO("cp_size")},
    {"train.context_parallel_size",
     ONLY("1", "ulysses_parallel_size splits sequences, and cp_mode says how")},
    {"train.rmpad", NOTE(packing)},
    {"train.rmpad_with_pos_ids", NOTE(packing)},
    {"train.dyn_bsz", NOTE(packing)},
    {"train.dyn_bsz_margin", NOTE(packing)},
    {"train.dyn_bsz_runtime", NOTE(packing)},
    {"train.dyn_bsz_buffer_size", NOTE(packing)},
    {"train.bsz_warmup_ratio", NOTE(packing)},
    {"train.bsz_warmup_init_mbtoken", NOTE(packing)},
    {"train.enable_mixed_precision", TO("bf16")},
    {"train.enable_gradient_checkpointing", TO("enable_activation_checkpointing")},
    {"train.enable_reentrant", NOTE(memory)},
    {"train.enable_full_shard", NOTE(sharding)},
    {"train.enable_fsdp_offload", NOTE(sharding)},
    {"train.enable_forward_prefetch", NOTE(sharding)},
    {"train.enable_activation_offload", NOTE(memory)},
    {"train.activation_gpu_limit", NOTE(memory)},
    {"train.init_device", NOTE(sharding)},
    {"train.broadcast_model_weights_from_rank0", NOTE(sharding)},
    {"train.enable_full_determinism", TO("full_determinism")},
    {"train.allow_cuda_launch_blocking", NOTE(upstream)},
    {"train.seed", TO("seed")},
    {"train.empty_cache_steps", NOTE(memory)},
    {"train.gc_steps", NOTE(memory)},
    {"train.ckpt_manager", NOTE("checkpoints have one format here")},
    {"train.load_checkpoint_path", TO("resume_from_checkpoint"), .null_if = ""},
    {"train.save_steps", TO("save_steps"), .null_if = "0"},
    {"train.save_epochs", TO("save_epochs"), .null_if = "0"},
    {"train.save_async", NOTE(upstream)},
    {"train.save_hf_weights", NOTE("a Hugging Face directory is always written at the end")},
    {"train.use_wandb", NOTE(tracking)},
    {"train.wandb_project", NOTE(tracking)},
    {"train.wandb_name", NOTE(tracking)},
    {"train.enable_profiling", NOTE(profiler)},
    {"train.profile_start_step", NOTE(profiler)},
    {"train.profile_end_step", NOTE(profiler)},
    {"train.profile_trace_dir", NOTE(profiler)},
    {"train.profile_record_shapes", NOTE(profiler)},
    {"train.profile_profile_memory", NOTE(profiler)},
    {"train.profile_with_stack", NOTE(profiler)},
    {"train.profile_rank0_only", NOTE(profiler)},
    {"train.enable_compile", NOTE(upstream)},
    {"train.enable_rank0_init", NOTE(upstream)},
    {"train.log_steps", TO("logging_steps")},
};

/* What dFactory does when a key is absent, where it differs from our defaults; and what a user of
 * it expects of one sample per conversation with its last turn trained. */
static const char defaults[] = "learning_rate: 5.0e-5\n"
                               "num_train_epochs: 1\n"
                               "optim_config: {name: adamw, weight_decay: 0.0}\n"
                               "diffusion_config: {name: random_mask}\n";

const ith_dialect ith_dialect_dfactory = {.name = "dFactory and VeOmni",
                                          .keys = keys,
                                          .num_keys = (int)(sizeof keys / sizeof *keys),
                                          .defaults = defaults};
