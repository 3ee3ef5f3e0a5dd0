/* config_keys.c - every configuration key: one row each. Order is the order of docs and dump; rows
 * of a plugin map follow their map's row. */
#include "config/config_internal.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define INF ((double)INFINITY)
#define AT(field) .offset = offsetof(ith_config, field)
#define NOT_NEEDED .status = ITH_KEY_NOT_NEEDED, .why
#define NOT_YET .status = ITH_KEY_NOT_YET, .why
#define ANY_INT .min = -0x1p53, .max = 0x1p53
#define AT_LEAST(n) .min = (n), .max = 0x1p53
#define FROM_TO(a, b) .min = (a), .max = (b)
#define AT_LEAST_F(x) .min = (x), .max = INF

#define MODEL "Model"
#define DATA "Data"
#define TRAINING "Training"
#define OPTIMIZER "Optimizer"
#define SCHEDULE "Learning rate schedule"
#define EVALUATION "Evaluation"
#define SAVING "Saving and reports"
#define MACHINE "Machine and parallelism"
#define ADAPTERS "Adapters"
#define QUANT "Quantization"
#define PREFERENCE "Preference training"
#define GENERATION "Generation"

static_assert(offsetof(ith_optim_config, beta2) ==
                  offsetof(ith_optim_config, beta1) + sizeof(double),
              "adamw_betas fills both");

/* clang-format off */
const config_row ith_config_rows[] = {
/* ---- model ---- */
{"model", MODEL, KEY_TEXT, AT(model), "Qwen/Qwen3-4B-Instruct-2507",
 .help = "Model directory in Hugging Face layout (config.json, *.safetensors, tokenizer.json)."},
{"custom_chat_template", MODEL, KEY_TEXT, AT(custom_chat_template), "null", .nullable = true,
 .help = "Jinja text, or a file with it, that replaces the model's chat template, also beside the model that is written."},
{"trust_remote_code", MODEL, KEY_BOOL, AT(trust_remote_code), "false",
 NOT_NEEDED = "no code is loaded from model directories",
 .help = "Accepted from LlamaFactory files."},
{"flash_attn", MODEL, KEY_ENUM, AT(flash_attn), "sdpa", .words = "eager sdpa flash_attention_2",
 NOT_NEEDED = "attention always runs tiled, with exact document borders",
 .help = "Accepted from LlamaFactory files."},
{"model_class", MODEL, KEY_ENUM, AT(model_class), "llm", .words = "llm cls other",
 NOT_YET = "classification and headless models",
 .help = "llm: a language model with its head; cls: one score per sequence; other: without a head."},
{"dtype", MODEL, KEY_ENUM, AT(dtype), "auto", .words = "auto bfloat16 float32",
 .help = "Type of the weights in the step. auto: bfloat16 when bf16 is true, else float32."},
{"master_dtype", MODEL, KEY_ENUM, AT(master_dtype), "float32", .words = "- bfloat16 float32",
 .help = "Type of the weights the optimizer updates. float32 keeps a master copy beside bfloat16 "
         "weights, so that small updates are not rounded away."},
{"router_aux_loss_coef", MODEL, KEY_FLOAT, AT(router_aux_loss_coef), "0.0", AT_LEAST_F(0),
 .help = "Weight of the load balancing loss of mixture-of-experts models; 0 is off."},
{"init_config", MODEL, KEY_PLUGIN, AT(init), "null", .nullable = true,
 .words = "- init_on_meta init_on_rank0 init_on_default",
 NOT_NEEDED = "weights are mapped from the files and never loaded twice",
 .help = "Accepted from LlamaFactory files."},
{"kernel_config", MODEL, KEY_PLUGIN, AT(kernel.name), "null", .nullable = true,
 NOT_NEEDED = "the best kernels of this machine are chosen by the program (ithaca env shows them)",
 .help = "Accepted from LlamaFactory files; name is a comma list."},
{"kernel_config.include_kernels", MODEL, KEY_TEXT, AT(kernel.include_kernels), "auto",
 NOT_NEEDED = "kernels are chosen by the program", .help = "auto or a comma list."},
{"kernel_config.chunk_size", MODEL, KEY_INT, AT(kernel.chunk_size), "64", FROM_TO(16, 64),
 .words = "16 32 64", NOT_NEEDED = "kernels are chosen by the program",
 .help = "Chunk length of linear attention kernels."},
{"kernel_config.require_logits", MODEL, KEY_BOOL, AT(kernel.require_logits), "false",
 NOT_NEEDED = "kernels are chosen by the program", .help = "Of liger_kernel."},
{"mtp_config", MODEL, KEY_PLUGIN, AT(mtp.name), "null", .nullable = true, .words = "- mtp",
 NOT_YET = "multi-token prediction heads", .help = "Trains extra heads that predict later tokens."},
{"mtp_config.num_layers", MODEL, KEY_INT, AT(mtp.num_layers), "1", AT_LEAST(1), .plugins = "mtp",
 .help = "Number of heads."},
{"mtp_config.loss_scale", MODEL, KEY_FLOAT, AT(mtp.loss_scale), "0.3", AT_LEAST_F(0),
 .plugins = "mtp", .help = "Weight of the mean loss of the heads."},
{"diffusion_config", MODEL, KEY_PLUGIN, AT(diffusion.name), "null", .nullable = true,
 .words = "- block_diffusion random_mask",
 .help = "Training of a diffusion model (LLaDA2). block_diffusion: a noisy and a clean copy of each "
         "sample, block by block. random_mask: masks over the whole sequence, every token sees all. "
         "null: block_diffusion for such a model."},
{"diffusion_config.block_size", MODEL, KEY_INT, AT(diffusion.block_size), "32", AT_LEAST(1),
 .help = "Tokens of a block."},
{"diffusion_config.noise_range_low", MODEL, KEY_FLOAT, AT(diffusion.noise_range_low), "0.3",
 FROM_TO(0, 1), .help = "Least share of the answer that is masked; drawn for each sample and epoch."},
{"diffusion_config.noise_range_high", MODEL, KEY_FLOAT, AT(diffusion.noise_range_high), "0.8",
 FROM_TO(0, 1), .help = "Largest share of the answer that is masked."},
{"diffusion_config.random_tokens", MODEL, KEY_FLOAT, AT(diffusion.random_tokens), "0.0", FROM_TO(0, 1),
 .help = "Token editing (LLaDA2.1): this share of the answer's tokens that are not masked is replaced "
         "by random ids, and trained to become the right ones again. The published models' share is "
         "not known; 0 for 2.0."},
{"diffusion_config.same_token_labels", MODEL, KEY_BOOL, AT(diffusion.same_token_labels), "true",
 .help = "A masked position predicts its own token (LLaDA2). false: the row before it does."},
{"diffusion_config.complementary", MODEL, KEY_BOOL, AT(diffusion.complementary), "false",
 .help = "A second copy of each sample, masked exactly where the first is not."},
{"diffusion_config.loss_weight", MODEL, KEY_ENUM, AT(diffusion.loss_weight), "masked",
 .words = "masked inverse",
 .help = "masked: mean over masked tokens. inverse: a masked token weighs 1 / share masked, and the "
         "mean is over all tokens of the answers (the likelihood bound)."},
{"diffusion_config.normalizer", MODEL, KEY_ENUM, AT(diffusion.normalizer), "step",
 .words = "step micro_batch",
 .help = "step: the mean of the loss is over the whole optimizer step. micro_batch: over each "
         "micro-batch, then over micro-batches, as dFactory does."},
{"diffusion_config.padding", MODEL, KEY_ENUM, AT(diffusion.padding), "block",
 .words = "none end block full",
 .help = "End tokens trained after an answer: none, one (end), up to the end of its block, which is "
         "what the decoder has to write, or up to cutoff_len (full, as dFactory does)."},
{"diffusion_config.confidence_beta", MODEL, KEY_FLOAT, AT(diffusion.confidence_beta), "0.0",
 AT_LEAST_F(0),
 .help = "Trainable parallel decoding: this times the entropy of masked tokens that are predicted "
         "right already is added to the loss, so that the decoder dares to write more at a time "
         "(dFactory recommends 2). Its mean is over all masked tokens of the step, with normalizer "
         "micro_batch over the right ones of each micro-batch."},
{"diffusion_config.mask_token_id", MODEL, KEY_INT, AT(diffusion.mask_token_id), "null", AT_LEAST(0),
 .nullable = true,
 .help = "Id of the mask token. null: mask_token_id of config.json, else the tokenizer's <|mask|>."},

/* ---- data ---- */
{"train_dataset", DATA, KEY_TEXT, AT(train_dataset), "null", .nullable = true,
 .help = "A dataset YAML (name: path, source, converter, size, weight), or a data file or directory "
         "in the canonical messages format."},
{"eval_dataset", DATA, KEY_TEXT, AT(eval_dataset), "null", .nullable = true,
 .help = "Like train_dataset, for evaluation."},
{"eval_split_ratio", DATA, KEY_FLOAT, AT(eval_split_ratio), "0.0", FROM_TO(0, 1), .max_open = true,
 .help = "Part of train_dataset that is held out for evaluation; 0 holds nothing out."},
{"train_on", DATA, KEY_ENUM, AT(train_on), "last_turn", .words = "last_turn all_turns",
 .help = "last_turn: one sample per assistant turn, as LlamaFactory does. all_turns: one sample per "
         "conversation with every assistant turn trained (linear cost in turns)."},
{"cutoff_len", DATA, KEY_INT, AT(cutoff_len), "2048", FROM_TO(2, 0x7ffffffe),
 .help = "Longest sample in tokens; the tail beyond it is cut, or becomes samples of its own "
         "(split_long)."},
{"split_long", DATA, KEY_BOOL, AT(split_long), "false",
 .help = "Samples longer than cutoff_len become several, each of at most cutoff_len tokens that see "
         "only their own part; parts without a trained token are dropped and counted. false: the "
         "tail is cut."},
{"batching_strategy", DATA, KEY_ENUM, AT(batching_strategy), "normal",
 .words = "normal padding_free dynamic_batching dynamic_padding_free packing",
 .help = "normal: micro_batch_size padded samples. padding_free: the same samples in one row without "
         "padding. dynamic_batching, dynamic_padding_free: as many samples as fit cutoff_len * "
         "micro_batch_size tokens, padded or not. packing: best-fit packing into rows of that size; "
         "documents stay whole."},
{"pack_window", DATA, KEY_INT, AT(pack_window), "8192", FROM_TO(1, 0x7ffffffe),
 .help = "Samples that packing places at a time; more fill rows better and take 40 bytes each."},
{"batching_workers", DATA, KEY_INT, AT(batching_workers), "16", AT_LEAST(0),
 NOT_NEEDED = "samples are prepared by threads (nproc)", .help = "Accepted from LlamaFactory files."},
{"data_cache_dir", DATA, KEY_TEXT, AT(data_cache_dir), "null", .nullable = true,
 .help = "Directory for tokenized data that later runs reuse; null keeps no cache."},
{"media_dir", DATA, KEY_TEXT, AT(media_dir), "null", .nullable = true,
 .help = "Where the images and videos of rows are looked for first; then from the working directory "
         "and beside the data file."},
{"image_max_pixels", DATA, KEY_INT, AT(image_max_pixels), "null", AT_LEAST(1), .nullable = true,
 .help = "Larger images are brought down to this area before the model's processor sees them, as "
         "LlamaFactory does (its default is 589824). null: the processor's limit alone."},
{"image_min_pixels", DATA, KEY_INT, AT(image_min_pixels), "null", AT_LEAST(1), .nullable = true,
 .help = "Smaller images are brought up to this area."},
{"video_max_pixels", DATA, KEY_INT, AT(video_max_pixels), "null", AT_LEAST(1), .nullable = true,
 .help = "Like image_max_pixels, for each frame of a video."},
{"video_min_pixels", DATA, KEY_INT, AT(video_min_pixels), "null", AT_LEAST(1), .nullable = true,
 .help = "Like image_min_pixels, for each frame of a video."},
{"video_fps", DATA, KEY_FLOAT, AT(video_fps), "null", AT_LEAST_F(0), .min_open = true, .nullable = true,
 .help = "Frames taken of each second of a video. null: as the model's processor says (2)."},
{"video_maxlen", DATA, KEY_INT, AT(video_maxlen), "null", AT_LEAST(1), .nullable = true,
 .help = "Most frames taken of a video. null: as the model's processor says (768)."},
{"nproc", DATA, KEY_INT, AT(nproc), "0", AT_LEAST(0),
 .help = "Threads that prepare data; 0 is all cores."},

/* ---- training ---- */
{"output_dir", TRAINING, KEY_TEXT, AT(output_dir), "null", .nullable = true,
 .help = "Directory for the trained model, checkpoints and logs; null makes a new one below outputs/."},
{"micro_batch_size", TRAINING, KEY_INT, AT(micro_batch_size), "1", FROM_TO(1, 0x7fffffff),
 .help = "Samples of one forward and backward pass (or the token budget in units of cutoff_len, see "
         "batching_strategy)."},
{"global_batch_size", TRAINING, KEY_INT, AT(global_batch_size), "null", AT_LEAST(1),
 .nullable = true,
 .help = "Samples of one optimizer step over all processes; gradients accumulate over "
         "global_batch_size / (dp_size * micro_batch_size) passes. null: no accumulation."},
{"gradient_accumulation_steps", TRAINING, KEY_INT, AT(gradient_accumulation_steps), "null",
 AT_LEAST(1), .nullable = true,
 .help = "Passes of one optimizer step, instead of global_batch_size."},
{"learning_rate", TRAINING, KEY_FLOAT, AT(learning_rate), "1.0e-04", AT_LEAST_F(0),
 .help = "Peak learning rate."},
{"num_train_epochs", TRAINING, KEY_INT, AT(num_train_epochs), "3", FROM_TO(1, 1e6),
 .help = "Passes over the data when max_steps is not given."},
{"max_steps", TRAINING, KEY_INT, AT(max_steps), "null", AT_LEAST(-1), .nullable = true,
 .help = "Optimizer steps to run, instead of num_train_epochs; null or -1: by epochs."},
{"max_grad_norm", TRAINING, KEY_FLOAT, AT(max_grad_norm), "1.0", AT_LEAST_F(0),
 .help = "Gradients are scaled down to this global L2 norm; 0 is off."},
{"freeze_vision_tower", TRAINING, KEY_BOOL, AT(freeze_vision_tower), "false",
 .help = "Images are seen, and the vision tower keeps its weights."},
{"freeze_multi_modal_projector", TRAINING, KEY_BOOL, AT(freeze_multi_modal_projector), "false",
 .help = "The merger behind the vision tower keeps its weights."},
{"freeze_language_model", TRAINING, KEY_BOOL, AT(freeze_language_model), "false",
 .help = "All but the vision tower and its merger keep their weights."},
{"bf16", TRAINING, KEY_BOOL, AT(bf16), "true",
 .help = "Compute in bfloat16 (dtype overrules it)."},
{"enable_activation_checkpointing", TRAINING, KEY_BOOL, AT(enable_activation_checkpointing), "true",
 .help = "Recompute activations in the backward pass (recompute says which)."},
{"recompute", TRAINING, KEY_ENUM, AT(recompute), "auto", .words = "auto none attention full",
 .help = "none keeps all activations; attention keeps each layer's input, attention output and "
         "log-sum-exp; full keeps each layer's input only. auto: none when "
         "enable_activation_checkpointing is false, else attention where it fits, else full. "
         "Results are equal bit for bit."},
{"chunk_loss_size", TRAINING, KEY_INT, AT(chunk_loss_size), "null", AT_LEAST(1), .nullable = true,
 .help = "Token rows per chunk of the language model head and loss; null: chosen by the program. "
         "Results do not depend on it."},
{"nonfinite", TRAINING, KEY_ENUM, AT(nonfinite), "skip", .words = "skip stop",
 .help = "When the gradient norm is NaN or infinite: skip the update with a warning, or stop the run."},
{"seed", TRAINING, KEY_INT, AT(seed), "42", AT_LEAST(0),
 .help = "Seed of everything random."},
{"full_determinism", TRAINING, KEY_BOOL, AT(full_determinism), "false",
 .help = "Use only kernels whose result is the same bit for bit on every run. The CPU's always are."},
{"verify", TRAINING, KEY_BOOL, AT(verify), "false",
 .help = "Extra checks at every step: gradients present and finite, weights equal across "
         "processes. Slower."},

/* ---- optimizer ---- */
{"optim_config", OPTIMIZER, KEY_PLUGIN, AT(optim.name), "adamw", .nullable = true,
 .words = "adamw muon", .help = "The optimizer; null is adamw."},
{"optim_config.beta1", OPTIMIZER, KEY_FLOAT, AT(optim.beta1), "0.9", FROM_TO(0, 1),
 .max_open = true, .plugins = "adamw", .help = "Decay of the gradient average."},
{"optim_config.beta2", OPTIMIZER, KEY_FLOAT, AT(optim.beta2), "0.999", FROM_TO(0, 1),
 .max_open = true, .plugins = "adamw", .help = "Decay of the squared gradient average."},
{"optim_config.eps", OPTIMIZER, KEY_FLOAT, AT(optim.eps), "1.0e-08", AT_LEAST_F(0),
 .min_open = true, .plugins = "adamw", .help = "Added to the root of the squared gradient average."},
{"optim_config.weight_decay", OPTIMIZER, KEY_FLOAT, AT(optim.weight_decay), "0.01", AT_LEAST_F(0),
 .plugins = "adamw", .help = "Decoupled weight decay, on all parameters."},
{"optim_config.wd", OPTIMIZER, KEY_FLOAT, AT(optim.weight_decay), "0.1", AT_LEAST_F(0),
 .plugins = "muon", .help = "Decoupled weight decay."},
{"optim_config.momentum", OPTIMIZER, KEY_FLOAT, AT(optim.momentum), "0.95", FROM_TO(0, 1),
 .max_open = true, .plugins = "muon", .help = "Momentum of the gradient buffer."},
{"optim_config.nesterov", OPTIMIZER, KEY_BOOL, AT(optim.nesterov), "true", .plugins = "muon",
 .help = "Nesterov momentum."},
{"optim_config.ns_steps", OPTIMIZER, KEY_INT, AT(optim.ns_steps), "5", FROM_TO(1, 100),
 .plugins = "muon", .help = "Newton-Schulz iterations."},
{"optim_config.adamw_betas", OPTIMIZER, KEY_FLOAT2, AT(optim.beta1), "[0.9, 0.95]", FROM_TO(0, 1),
 .max_open = true, .plugins = "muon", .help = "beta1 and beta2 of the parameters that use Adam."},
{"optim_config.adamw_eps", OPTIMIZER, KEY_FLOAT, AT(optim.eps), "1.0e-08", AT_LEAST_F(0),
 .min_open = true, .plugins = "muon", .help = "eps of the parameters that use Adam."},

/* ---- schedule ---- */
{"lr_scheduler_config", SCHEDULE, KEY_PLUGIN, AT(lr_scheduler.name), "constant", .nullable = true,
 .words = "constant linear cosine warmup_stable_decay",
 .help = "Learning rate over the run; null is constant."},
{"lr_scheduler_config.warmup_steps", SCHEDULE, KEY_INT, AT(lr_scheduler.warmup_steps), "null",
 AT_LEAST(0), .nullable = true,
 .help = "Optimizer steps over which the rate rises from 0; null: by warmup_ratio."},
{"lr_scheduler_config.warmup_ratio", SCHEDULE, KEY_FLOAT, AT(lr_scheduler.warmup_ratio), "0.0",
 FROM_TO(0, 1), .help = "Warm-up as a part of all optimizer steps."},
{"lr_scheduler_config.min_lr_ratio", SCHEDULE, KEY_FLOAT, AT(lr_scheduler.min_lr_ratio), "0.0",
 FROM_TO(0, 1), .plugins = "linear,cosine,warmup_stable_decay",
 .help = "Rate at the end, as a part of learning_rate."},
{"lr_scheduler_config.decay_steps", SCHEDULE, KEY_INT, AT(lr_scheduler.decay_steps), "null",
 AT_LEAST(0), .nullable = true, .plugins = "warmup_stable_decay",
 .help = "Optimizer steps of the final decay, instead of decay_ratio."},
{"lr_scheduler_config.decay_ratio", SCHEDULE, KEY_FLOAT, AT(lr_scheduler.decay_ratio), "0.1",
 FROM_TO(0, 1), .plugins = "warmup_stable_decay",
 .help = "Final decay as a part of all optimizer steps."},
{"lr_scheduler_config.decay_type", SCHEDULE, KEY_ENUM, AT(lr_scheduler.decay_type), "linear",
 .words = "linear cosine sqrt", .plugins = "warmup_stable_decay",
 .help = "Shape of the final decay; sqrt is 1 - sqrt(part done)."},

/* ---- evaluation ---- */
{"eval_strategy", EVALUATION, KEY_ENUM, AT(eval_strategy), "null", .words = "no steps epoch",
 .nullable = true,
 .help = "When to evaluate. null: steps when eval_steps is given, else after each epoch when there "
         "is evaluation data, else no."},
{"eval_steps", EVALUATION, KEY_INT, AT(eval_steps), "null", AT_LEAST(1), .nullable = true,
 .help = "Optimizer steps between evaluations."},

/* ---- saving and reports ---- */
{"resume_from_checkpoint", SAVING, KEY_TEXT, AT(resume_from_checkpoint), "null", .nullable = true,
 .help = "A checkpoint directory, or auto: the newest complete one in output_dir."},
{"save_steps", SAVING, KEY_INT, AT(save_steps), "null", AT_LEAST(1), .nullable = true,
 .help = "Optimizer steps between checkpoints; null: the final model only."},
{"save_epochs", SAVING, KEY_FLOAT, AT(save_epochs), "null", AT_LEAST_F(0), .min_open = true,
 .nullable = true, .help = "Epochs between checkpoints, fractions allowed; overrules save_steps."},
{"save_ckpt_as_hf", SAVING, KEY_BOOL, AT(save_ckpt_as_hf), "false",
 .help = "Write a Hugging Face directory into every checkpoint."},
{"save_total_limit", SAVING, KEY_INT, AT(save_total_limit), "null", AT_LEAST(1), .nullable = true,
 .help = "Keep the newest N complete checkpoints; null keeps all."},
{"save_dtype", SAVING, KEY_ENUM, AT(save_dtype), "auto", .words = "auto bfloat16 float32 float16",
 .help = "Type of the written weights; auto: each tensor's type in the source."},
{"max_shard_size", SAVING, KEY_SIZE, AT(max_shard_size), "4GB", AT_LEAST(1),
 .help = "Largest size of one written safetensors file."},
{"logging_steps", SAVING, KEY_INT, AT(logging_steps), "1", AT_LEAST(1),
 .help = "Optimizer steps between log lines."},
{"report_to", SAVING, KEY_FLAGS, AT(report_to), "[tensorboard]", .words = "tensorboard",
 .nullable = true, .help = "Extra reports beside trainer_log.jsonl: [tensorboard] or none."},

/* ---- machine ---- */
{"device", MACHINE, KEY_ENUM, AT(device), "auto", .words = "auto cpu cuda",
 .help = "auto: cuda when the plug-in finds a device, else cpu."},
{"threads", MACHINE, KEY_INT, AT(threads), "0", FROM_TO(0, 4096),
 .help = "Compute threads on the CPU; 0 is ITH_THREADS, or all cores."},
{"memory_limit", MACHINE, KEY_SIZE, AT(memory_limit), "null", AT_LEAST(1), .nullable = true,
 .help = "Most memory the run may plan for, such as 24GiB; null: what the machine has."},
{"zero_stage", MACHINE, KEY_INT, AT(zero_stage), "null", FROM_TO(0, 3), .nullable = true,
 .help = "What the processes divide instead of copying: 1 the optimizer's state, 2 gradients too, 3 "
         "weights too. null: 3 with dist_config fsdp2 or fsdpturbo (2 when reshard_after_forward is "
         "false), else 0."},
{"ranks", MACHINE, KEY_INT, AT(ranks), "null", FROM_TO(1, 65536), .nullable = true,
 .help = "Processes that train together. Started by mpirun or srun they are there already; else "
         "train starts this many on this machine through mpirun. null: dp_size * cp_size."},
{"dp_size", MACHINE, KEY_INT, AT(dp_size), "null", AT_LEAST(1), .nullable = true,
 .help = "Data-parallel size; dp_size * cp_size is the number of processes. null: the rest."},
{"cp_size", MACHINE, KEY_INT, AT(cp_size), "1", AT_LEAST(1),
 .help = "Context-parallel size: processes that share one sequence."},
{"ep_size", MACHINE, KEY_INT, AT(ep_size), "null", AT_LEAST(1), .nullable = true,
 .help = "Expert-parallel size: processes that share the experts of a layer; divides the number of "
         "processes. null: as dist_config says, else 1."},
{"cp_mode", MACHINE, KEY_ENUM, AT(cp_mode), "auto",
 .words = "auto ulysses ring hybrid",
 .help = "How one sequence is shared: ulysses exchanges parts of the sequence for heads, ring passes "
         "keys and values on, hybrid is rings of ulysses groups. auto: what sends least."},
{"linear_cp_mode", MACHINE, KEY_ENUM, AT(linear_cp_mode), "auto", .words = "auto heads states",
 .help = "How linear attention (Gated DeltaNet) shares a sequence: heads exchanges sequence parts for "
         "heads, states passes states between the parts; auto takes the cheaper."},
{"cp_whole_documents", MACHINE, KEY_ENUM, AT(cp_whole_documents), "auto",
 .words = "never auto always",
 .help = "Under cp_size, documents of at most 1/cp_size of the longest micro-batch that stay whole on one "
         "process, beside longer ones that are shared within the same step. auto: those that make the "
         "step shorter, by its work and exchanges; always: all of them. Results do not depend on it."},
{"mp_replicate_size", MACHINE, KEY_INT, AT(mp_replicate_size), "1", AT_LEAST(1),
 .help = "Copies of what zero_stage divides: each is divided among mp_shard_size neighbours."},
{"mp_shard_size", MACHINE, KEY_INT, AT(mp_shard_size), "null", AT_LEAST(1), .nullable = true,
 .help = "Processes that share one copy; null: the rest."},
{"dist_timeout", MACHINE, KEY_INT, AT(dist_timeout), "18000", AT_LEAST(1),
 .help = "Seconds after which a process that does not answer ends the run; reading and tokenizing "
         "the data may take any time."},
{"dist_config", MACHINE, KEY_PLUGIN, AT(dist.name), "null", .nullable = true,
 .words = "- fsdp2 fsdpturbo deepspeed",
 .help = "Sharding of weights, gradients and optimizer state over processes: fsdp2 and fsdpturbo are "
         "zero_stage 3 (2 without reshard_after_forward). A process alone has nothing to shard."},
{"dist_config.reshard_after_forward", MACHINE, KEY_BOOL, AT(dist.reshard_after_forward), "true",
 .plugins = "fsdp2,fsdpturbo", .help = "false: zero_stage 2."},
{"dist_config.offload_params", MACHINE, KEY_BOOL, AT(dist.offload_params), "false",
 .plugins = "fsdp2,fsdpturbo", NOT_YET = "weights kept in host memory",
 .help = "Keep weights and optimizer state in host memory."},
{"dist_config.pin_memory", MACHINE, KEY_BOOL, AT(dist.pin_memory), "true",
 .plugins = "fsdp2,fsdpturbo", NOT_NEEDED = "host buffers are always pinned where it helps",
 .help = "Accepted from LlamaFactory files."},
{"dist_config.dcp_path", MACHINE, KEY_TEXT, AT(dist.dcp_path), "null", .nullable = true,
 .plugins = "fsdp2,fsdpturbo",
 NOT_YET = "reading torch distributed checkpoints",
 .help = "A pre-converted torch distributed checkpoint."},
{"dist_config.ep_size", MACHINE, KEY_INT, AT(dist.ep_size), "1", AT_LEAST(1),
 .plugins = "fsdpturbo", .help = "Expert-parallel size, unless ep_size is given."},
{"dist_config.ep_dispatcher", MACHINE, KEY_ENUM, AT(dist.ep_dispatcher), "eager",
 .words = "eager fused mc2 domino", .plugins = "fsdpturbo",
 NOT_NEEDED = "tokens reach experts by one exchange", .help = "Accepted from LlamaFactory files."},
{"dist_config.fsdp_ignored_modules", MACHINE, KEY_LIST, AT(dist.fsdp_ignored_modules), "[]",
 .plugins = "fsdpturbo", NOT_NEEDED = "zero_stage says what is sharded",
 .help = "Accepted from LlamaFactory files."},
{"dist_config.hook_modules", MACHINE, KEY_LIST, AT(dist.hook_modules), "[]",
 .plugins = "fsdpturbo", NOT_NEEDED = "zero_stage says what is sharded",
 .help = "Accepted from LlamaFactory files."},
{"dist_config.fsdp_implementation", MACHINE, KEY_ENUM, AT(dist.fsdp_implementation), "native",
 .words = "native custom", .plugins = "fsdpturbo", NOT_NEEDED = "zero_stage says what is sharded",
 .help = "Accepted from LlamaFactory files."},
{"dist_config.config_file", MACHINE, KEY_TEXT, AT(dist.config_file), "null", .nullable = true,
 .plugins = "deepspeed", .help = "DeepSpeed JSON file, required by deepspeed."},

/* ---- adapters ---- */
{"peft_config", ADAPTERS, KEY_PLUGIN, AT(peft.name), "null", .nullable = true,
 .words = "- lora freeze", NOT_YET = "adapters and partial training",
 .help = "lora: train low-rank adapters; freeze: train some layers; null: train everything."},
{"peft_config.r", ADAPTERS, KEY_INT, AT(peft.r), "8", AT_LEAST(1), .plugins = "lora",
 .help = "Rank."},
{"peft_config.lora_alpha", ADAPTERS, KEY_INT, AT(peft.lora_alpha), "16", AT_LEAST(1),
 .plugins = "lora", .help = "The adapter is scaled by lora_alpha / r."},
{"peft_config.lora_dropout", ADAPTERS, KEY_FLOAT, AT(peft.lora_dropout), "0.05", FROM_TO(0, 1),
 .max_open = true, .plugins = "lora", .help = "Dropout before the adapter."},
{"peft_config.target_modules", ADAPTERS, KEY_LIST, AT(peft.target_modules), "all",
 .plugins = "lora", .help = "all, a name, or a list of names of linear layers."},
{"peft_config.use_rslora", ADAPTERS, KEY_BOOL, AT(peft.use_rslora), "false", .plugins = "lora",
 .help = "Scale by lora_alpha / sqrt(r)."},
{"peft_config.use_dora", ADAPTERS, KEY_BOOL, AT(peft.use_dora), "false", .plugins = "lora",
 .help = "Weight-decomposed adapters."},
{"peft_config.modules_to_save", ADAPTERS, KEY_LIST, AT(peft.modules_to_save), "null",
 .nullable = true, .plugins = "lora", .help = "Modules trained whole."},
{"peft_config.adapter_name_or_path", ADAPTERS, KEY_PATHS, AT(peft.adapter_name_or_path), "null",
 .nullable = true, .plugins = "lora", .help = "Adapter directory to start from, or a list of them."},
{"peft_config.export_dir", ADAPTERS, KEY_TEXT, AT(peft.export_dir), "null", .nullable = true,
 .plugins = "lora", .help = "Directory of the merged model."},
{"peft_config.export_size", ADAPTERS, KEY_INT, AT(peft.export_size), "5", AT_LEAST(1),
 .plugins = "lora", .help = "Gigabytes per file of the merged model."},
{"peft_config.export_hub_model_id", ADAPTERS, KEY_TEXT, AT(peft.export_hub_model_id), "null",
 .nullable = true, .plugins = "lora", .help = "Hub name to upload the merged model to."},
{"peft_config.infer_dtype", ADAPTERS, KEY_ENUM, AT(peft.infer_dtype), "auto",
 .words = "auto bfloat16 float32 float16", .plugins = "lora", .help = "Type of the merged model."},
{"peft_config.export_legacy_format", ADAPTERS, KEY_BOOL, AT(peft.export_legacy_format), "false",
 .plugins = "lora", .help = "Write .bin files."},
{"peft_config.freeze_trainable_layers", ADAPTERS, KEY_INT, AT(peft.freeze_trainable_layers), "2",
 ANY_INT, .plugins = "freeze", .help = "Last layers (positive) or first layers (negative) to train."},
{"peft_config.freeze_trainable_modules", ADAPTERS, KEY_LIST, AT(peft.freeze_trainable_modules),
 "all", .plugins = "freeze", .help = "Modules of those layers to train: all, or names."},
{"peft_config.freeze_extra_modules", ADAPTERS, KEY_LIST, AT(peft.freeze_extra_modules), "[]",
 .nullable = true, .plugins = "freeze", .help = "Modules outside the layers to train."},
{"peft_config.cast_trainable_params_to_fp32", ADAPTERS, KEY_BOOL,
 AT(peft.cast_trainable_params_to_fp32), "true", .plugins = "freeze",
 .help = "Keep trained weights in float32."},

/* ---- quantization ---- */
{"quant_config", QUANT, KEY_PLUGIN, AT(quant.name), "null", .nullable = true, .words = "- bnb auto",
 NOT_YET = "quantized base weights", .help = "Hold frozen base weights in 4 or 8 bits."},
{"quant_config.quantization_bit", QUANT, KEY_INT, AT(quant.quantization_bit), "null",
 FROM_TO(4, 8), .nullable = true, .words = "4 8", .help = "Bits per weight."},
{"quant_config.compute_dtype", QUANT, KEY_TEXT, AT(quant.compute_dtype), "float16",
 .help = "Type that weights are expanded to."},
{"quant_config.double_quantization", QUANT, KEY_BOOL, AT(quant.double_quantization), "true",
 .help = "Quantize the scales too."},
{"quant_config.quantization_type", QUANT, KEY_TEXT, AT(quant.quantization_type), "nf4",
 .help = "Number format."},

/* ---- preference training ---- */
{"pref_loss", PREFERENCE, KEY_ENUM, AT(pref_loss), "sigmoid", .words = "sigmoid orpo simpo",
 NOT_YET = "preference training", .help = "The preference loss."},
{"pref_beta", PREFERENCE, KEY_FLOAT, AT(pref_beta), "0.1", AT_LEAST_F(0),
 NOT_YET = "preference training", .help = "Its temperature."},
{"pref_ftx", PREFERENCE, KEY_FLOAT, AT(pref_ftx), "0.0", AT_LEAST_F(0),
 NOT_YET = "preference training", .help = "Weight of an added SFT loss."},
{"simpo_gamma", PREFERENCE, KEY_FLOAT, AT(simpo_gamma), "0.5", AT_LEAST_F(0),
 NOT_YET = "preference training", .help = "Target margin of simpo."},
{"dpo_label_smoothing", PREFERENCE, KEY_FLOAT, AT(dpo_label_smoothing), "0.0", FROM_TO(0, 0.5),
 NOT_YET = "preference training", .help = "Probability that a preference is wrong."},
{"ld_alpha", PREFERENCE, KEY_FLOAT, AT(ld_alpha), "null", FROM_TO(0, 1), .nullable = true,
 NOT_YET = "preference training", .help = "Weight of the longer answer's excess tokens."},
{"disable_dropout", PREFERENCE, KEY_BOOL, AT(disable_dropout), "true",
 NOT_NEEDED = "the models have no dropout", .help = "Accepted from LlamaFactory files."},

/* ---- generation ---- */
{"sample_backend", GENERATION, KEY_ENUM, AT(sample_backend), "hf", .words = "hf vllm",
 NOT_NEEDED = "the program generates by itself", .help = "Accepted from LlamaFactory files."},
{"max_new_tokens", GENERATION, KEY_INT, AT(max_new_tokens), "128", AT_LEAST(1),
 .help = "Most tokens of one answer."},
};
/* clang-format on */

static_assert(sizeof ith_config_rows / sizeof *ith_config_rows <= ITH_MAX_CONFIG_KEYS,
              "raise ITH_MAX_CONFIG_KEYS");
const int ith_config_num_rows = (int)(sizeof ith_config_rows / sizeof *ith_config_rows);

int ith_config_num_keys(void)
{
    return ith_config_num_rows;
}

ith_config_key ith_config_key_at(int idx)
{
    ITH_ASSERT(idx >= 0 && idx < ith_config_num_rows);
    const config_row *row = &ith_config_rows[idx];
    return (ith_config_key){.name = row->name,
                            .section = row->section,
                            .default_text = row->default_text,
                            .help = row->help,
                            .plugins = row->plugins,
                            .status = row->status,
                            .why = row->why,
                            .is_plugin = row->kind == KEY_PLUGIN};
}

int ith_config_find_row(const char *name, size_t len)
{
    for (int i = 0; i < ith_config_num_rows; i++)
        if (strlen(ith_config_rows[i].name) == len &&
            memcmp(ith_config_rows[i].name, name, len) == 0)
            return i;
    return -1;
}

int ith_config_plugin_of(int idx)
{
    const char *name = ith_config_rows[idx].name, *dot = strchr(name, '.');
    return dot ? ith_config_find_row(name, (size_t)(dot - name)) : -1;
}

static bool comma_list_has(const char *list, const char *word, size_t len)
{
    for (const char *p = list; *p;) {
        size_t item = strcspn(p, ",");
        if (item == len && memcmp(p, word, len) == 0)
            return true;
        p += item + (p[item] == ',');
    }
    return false;
}

bool ith_config_row_applies(const ith_config *config, int idx)
{
    int plugin = ith_config_plugin_of(idx);
    if (plugin < 0)
        return true;
    const config_row *map = &ith_config_rows[plugin];
    if (!map->words) {
        const char *name = NULL;
        memcpy(&name, ith_config_field_const(config, plugin), sizeof name);
        return name != NULL;
    }
    int chosen = 0, len = 0;
    memcpy(&chosen, ith_config_field_const(config, plugin), sizeof chosen);
    const char *word = ith_word(map->words, chosen, &len);
    if (!word || *word == '-')
        return false;
    return !ith_config_rows[idx].plugins ||
           comma_list_has(ith_config_rows[idx].plugins, word, (size_t)len);
}

/* "a, b, c" of the words that can be written. */
static void join_words(const char *words, ith_buf *out)
{
    int len = 0, shown = 0;
    for (int i = 0;; i++) {
        const char *word = ith_word(words, i, &len);
        if (!word)
            break;
        if (*word != '-')
            ith_buf_printf(out, "%s%.*s", shown++ ? ", " : "", len, word);
    }
}

static void write_range(const config_row *row, const char *noun, ith_buf *out)
{
    bool has_max = row->max < 0x1p53;
    ith_buf_puts(out, noun);
    if (row->min <= -0x1p53 && !has_max)
        return;
    if (!has_max)
        ith_buf_printf(out, " %s %.15g", row->min_open ? ">" : ">=", row->min);
    else
        ith_buf_printf(out, " from %.15g %s %.15g", row->min, row->max_open ? "to below" : "to",
                       row->max);
}

const char *ith_config_key_type(int idx, char *buf, size_t size)
{
    const config_row *row = &ith_config_rows[idx];
    ith_buf text = {0};
    switch (row->kind) {
    case KEY_BOOL:
        ith_buf_puts(&text, "true or false");
        break;
    case KEY_INT:
        if (row->words) {
            ith_buf_puts(&text, "one of ");
            join_words(row->words, &text);
        } else {
            write_range(row, "an integer", &text);
        }
        break;
    case KEY_FLOAT:
        write_range(row, "a number", &text);
        break;
    case KEY_FLOAT2:
        write_range(row, "a list of two numbers", &text);
        break;
    case KEY_TEXT:
        ith_buf_puts(&text, "text");
        break;
    case KEY_ENUM:
        ith_buf_puts(&text, "one of ");
        join_words(row->words, &text);
        break;
    case KEY_FLAGS:
        ith_buf_puts(&text, "a list of ");
        join_words(row->words, &text);
        ith_buf_puts(&text, "; or none");
        break;
    case KEY_LIST:
        ith_buf_puts(&text, "a list of names, or one text with commas");
        break;
    case KEY_PATHS:
        ith_buf_puts(&text, "a path or a list of paths");
        break;
    case KEY_SIZE:
        ith_buf_puts(&text, "a size such as 16GiB, 4GB, 512MB or a number of bytes");
        break;
    case KEY_PLUGIN:
        ith_buf_puts(&text, "a map with a name");
        if (row->words) {
            ith_buf_puts(&text, ": one of ");
            join_words(row->words, &text);
        }
        break;
    }
    if (row->nullable)
        ith_buf_puts(&text, ", or null");
    snprintf(buf, size, "%s", text.failed ? "?" : text.data);
    ith_buf_deinit(&text);
    return buf;
}
