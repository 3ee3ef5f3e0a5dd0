/* config.h - what a run is asked to do: one plain struct, read from a file.
 *
 * The flat LlamaFactory v1 dialect is our own dialect too; dFactory and TRL files are read by
 * tables that say what their keys mean in ours (config_dialect.h). One table (ith_config_keys)
 * gives for each key its type, range, default, help and status; reading, the dump, docs/config.md
 * and the checks all come from it. Invariants after ith_config_load:
 *   1. Every key holds a valid value; combinations of keys that cannot work were refused.
 *   2. Mistakes are errors "file:line:col: key: found X (would be right)". All mistakes of a file
 *      are found in one go: the error text then has one line for each.
 *   3. ith_config_dump writes every key in table order; reading the dump gives the same values.
 * Keys of features that are not built yet read fine; ith_config_check_supported names them.
 *
 * Life cycle: load (or init_defaults), check_supported, resolve_layout once the number of processes
 * is known, deinit. Strings belong to the config. */
#ifndef ITH_CONFIG_CONFIG_H
#define ITH_CONFIG_CONFIG_H

#include "config/yaml.h"

/* Unset values: INT64_MIN for int64_t, NaN for double, NULL for text. */
#define ITH_CONFIG_UNSET INT64_MIN

typedef enum { ITH_FLASH_EAGER, ITH_FLASH_SDPA, ITH_FLASH_2 } ith_flash_attn;
typedef enum { ITH_MODEL_LLM, ITH_MODEL_CLS, ITH_MODEL_OTHER } ith_model_class;
typedef enum {
    ITH_BATCHING_NORMAL,
    ITH_BATCHING_PADDING_FREE,
    ITH_BATCHING_DYNAMIC,
    ITH_BATCHING_DYNAMIC_PADDING_FREE,
    ITH_BATCHING_PACKING /* best-fit packing, whole documents only */
} ith_batching;
typedef enum { ITH_TRAIN_ON_LAST_TURN, ITH_TRAIN_ON_ALL_TURNS } ith_train_on;
typedef enum { ITH_DTYPE_AUTO, ITH_DTYPE_BF16, ITH_DTYPE_F32, ITH_DTYPE_F16 } ith_config_dtype;
typedef enum {
    ITH_RECOMPUTE_AUTO,
    ITH_RECOMPUTE_NONE,
    ITH_RECOMPUTE_ATTENTION, /* keep x, attention output and LSE of each layer */
    ITH_RECOMPUTE_FULL       /* keep x only */
} ith_recompute;
typedef enum { ITH_NONFINITE_SKIP, ITH_NONFINITE_STOP } ith_nonfinite;
typedef enum { ITH_DEVICE_AUTO, ITH_DEVICE_CPU, ITH_DEVICE_CUDA } ith_device_choice;
typedef enum { ITH_EVAL_NO, ITH_EVAL_STEPS, ITH_EVAL_EPOCH } ith_eval_strategy;
typedef enum { ITH_PREF_SIGMOID, ITH_PREF_ORPO, ITH_PREF_SIMPO } ith_pref_loss;
typedef enum {
    ITH_SCHEDULE_CONSTANT,
    ITH_SCHEDULE_LINEAR,
    ITH_SCHEDULE_COSINE,
    ITH_SCHEDULE_WSD /* warmup_stable_decay */
} ith_schedule_name;
typedef enum { ITH_DECAY_LINEAR, ITH_DECAY_COSINE, ITH_DECAY_SQRT } ith_decay_type;
typedef enum { ITH_OPTIM_ADAMW, ITH_OPTIM_MUON } ith_optim_name;
typedef enum { ITH_PEFT_NONE, ITH_PEFT_LORA, ITH_PEFT_FREEZE } ith_peft_name;
typedef enum { ITH_QUANT_NONE, ITH_QUANT_BNB, ITH_QUANT_AUTO } ith_quant_name;
typedef enum {
    ITH_DIST_NONE,
    ITH_DIST_FSDP2,
    ITH_DIST_FSDPTURBO,
    ITH_DIST_DEEPSPEED
} ith_dist_name;
typedef enum {
    ITH_INIT_NONE,
    ITH_INIT_ON_META,
    ITH_INIT_ON_RANK0,
    ITH_INIT_ON_DEFAULT
} ith_init_name;
typedef enum { ITH_EP_EAGER, ITH_EP_FUSED, ITH_EP_MC2, ITH_EP_DOMINO } ith_ep_dispatcher;
typedef enum { ITH_FSDP_NATIVE, ITH_FSDP_CUSTOM } ith_fsdp_implementation;
typedef enum { ITH_CP_AUTO, ITH_CP_ULYSSES, ITH_CP_RING, ITH_CP_HYBRID } ith_cp_mode;
typedef enum { ITH_LINEAR_CP_AUTO, ITH_LINEAR_CP_HEADS, ITH_LINEAR_CP_STATES } ith_linear_cp_mode;
typedef enum { ITH_CP_WHOLE_NEVER, ITH_CP_WHOLE_AUTO, ITH_CP_WHOLE_ALWAYS } ith_cp_whole;
typedef enum { ITH_SAMPLE_HF, ITH_SAMPLE_VLLM } ith_sample_backend;
typedef enum { ITH_MTP_NONE, ITH_MTP_ON } ith_mtp_name;
typedef enum {
    ITH_DIFFUSION_NONE,
    ITH_DIFFUSION_BLOCKS,     /* [noisy; clean], block by block */
    ITH_DIFFUSION_RANDOM_MASK /* the whole sequence, every token sees all */
} ith_diffusion_name;
typedef enum { ITH_LOSS_MASKED, ITH_LOSS_INVERSE } ith_diffusion_weight;
typedef enum { ITH_NORM_STEP, ITH_NORM_MICRO_BATCH } ith_diffusion_normalizer;
typedef enum { ITH_END_NONE, ITH_END_TOKEN, ITH_END_BLOCK, ITH_END_FULL } ith_diffusion_padding;
typedef enum { ITH_REPORT_TENSORBOARD = 1 } ith_report_to; /* bits */

typedef struct {
    const char **items;
    int64_t count;
} ith_config_list;

typedef struct {
    ith_peft_name name;
    /* lora */
    int64_t r, lora_alpha;
    double lora_dropout;
    ith_config_list target_modules; /* one element "all": every linear layer */
    bool use_rslora, use_dora;
    ith_config_list modules_to_save, adapter_name_or_path;
    const char *export_dir; /* may be NULL */
    int64_t export_size;    /* GB per shard */
    const char *export_hub_model_id;
    ith_config_dtype infer_dtype;
    bool export_legacy_format;
    /* freeze */
    int64_t freeze_trainable_layers;
    ith_config_list freeze_trainable_modules, freeze_extra_modules;
    bool cast_trainable_params_to_fp32;
} ith_peft_config;

typedef struct {
    ith_optim_name name;
    /* adamw; its beta1, beta2, eps are also muon's adamw_betas and adamw_eps */
    double beta1, beta2, eps;
    double weight_decay; /* muon: wd */
    /* muon */
    double momentum;
    bool nesterov;
    int64_t ns_steps;
} ith_optim_config;

typedef struct {
    ith_schedule_name name;
    int64_t warmup_steps; /* optimizer steps; ITH_CONFIG_UNSET: use warmup_ratio */
    double warmup_ratio;  /* of all optimizer steps */
    double min_lr_ratio;  /* of learning_rate, at the end */
    int64_t decay_steps;  /* warmup_stable_decay; ITH_CONFIG_UNSET: use decay_ratio */
    double decay_ratio;   /* of all optimizer steps */
    ith_decay_type decay_type;
} ith_lr_scheduler_config;

typedef struct {
    ith_dist_name name;
    bool reshard_after_forward, offload_params, pin_memory;
    const char *dcp_path;
    int64_t ep_size; /* fsdpturbo, as all below but config_file */
    ith_ep_dispatcher ep_dispatcher;
    ith_config_list fsdp_ignored_modules, hook_modules;
    ith_fsdp_implementation fsdp_implementation;
    const char *config_file; /* deepspeed */
} ith_dist_config;

typedef struct {
    ith_quant_name name;
    int64_t quantization_bit; /* 4, 8 or ITH_CONFIG_UNSET */
    const char *compute_dtype, *quantization_type;
    bool double_quantization;
} ith_quant_config;

typedef struct {
    ith_mtp_name name;
    int64_t num_layers;
    double loss_scale;
} ith_mtp_config;

/* Training of a diffusion model; see data/noise.h. */
typedef struct {
    ith_diffusion_name name;
    int64_t block_size;
    double noise_range_low, noise_range_high, random_tokens;
    bool same_token_labels, complementary;
    ith_diffusion_weight loss_weight;
    ith_diffusion_normalizer normalizer;
    ith_diffusion_padding padding;
    double confidence_beta;
    int64_t mask_token_id; /* ITH_CONFIG_UNSET: the model's own */
} ith_diffusion_config;

/* Kernels of the Python program; kept for the dump only. */
typedef struct {
    const char *name; /* comma list, NULL: not given */
    const char *include_kernels;
    int64_t chunk_size;
    bool require_logits;
} ith_kernel_config;

/* Sizes of the run that depend on the number of processes; see ith_config_resolve_layout. */
typedef struct {
    int64_t world_size, dp_size, cp_size, ep_size;
    int64_t shard_size;        /* processes that share one copy of what zero_stage cuts */
    int64_t global_batch_size; /* samples per optimizer step, all ranks */
    int64_t grad_accum;        /* micro-batches per optimizer step and data-parallel rank */
} ith_config_layout;

typedef struct {
    /* model */
    const char *model;
    const char *custom_chat_template; /* Jinja text, NULL: the model's own */
    bool trust_remote_code;
    ith_flash_attn flash_attn;
    ith_model_class model_class;
    ith_init_name init;
    ith_kernel_config kernel;
    ith_peft_config peft;
    ith_quant_config quant;
    ith_mtp_config mtp;
    ith_diffusion_config diffusion;
    ith_config_dtype dtype;        /* of weights in the step; AUTO: see ith_config_param_dtype */
    ith_config_dtype master_dtype; /* F32: fp32 master copy beside bf16 weights; BF16: none */
    double router_aux_loss_coef;   /* MoE load balancing loss, 0: off */

    /* data */
    const char *train_dataset, *eval_dataset; /* may be NULL */
    double eval_split_ratio;                  /* part of train_dataset held out; 0: none */
    ith_train_on train_on;
    int64_t cutoff_len; /* tokens per sample */
    bool split_long;    /* longer ones become several */
    ith_batching batching_strategy;
    int64_t pack_window; /* samples that packing places at a time */
    int64_t batching_workers;
    const char *data_cache_dir; /* NULL: no cache of tokenized data on disk */
    int64_t nproc;              /* threads that prepare data, 0: all cores */
    const char *media_dir;      /* NULL: beside the data */
    int64_t image_max_pixels, image_min_pixels, video_max_pixels, video_min_pixels, video_maxlen;
    double video_fps; /* NaN: unset, as ITH_CONFIG_UNSET for those above */

    /* training */
    const char *output_dir;
    int64_t micro_batch_size, global_batch_size; /* global: ITH_CONFIG_UNSET = dp_size * micro */
    int64_t gradient_accumulation_steps;         /* ITH_CONFIG_UNSET: as global_batch_size says */
    double learning_rate;
    int64_t num_train_epochs, max_steps; /* max_steps: ITH_CONFIG_UNSET = by epochs */
    double max_grad_norm;                /* 0: no clipping */
    bool freeze_vision_tower, freeze_multi_modal_projector, freeze_language_model;
    bool bf16;
    bool enable_activation_checkpointing;
    ith_recompute recompute; /* AUTO only with enable_activation_checkpointing */
    int64_t chunk_loss_size; /* rows per chunk; ITH_CONFIG_UNSET: chosen by the program */
    ith_nonfinite nonfinite;
    ith_optim_config optim;
    ith_lr_scheduler_config lr_scheduler;
    int64_t seed;
    bool full_determinism;
    bool verify;

    /* evaluation, saving, reports */
    ith_eval_strategy eval_strategy;
    int64_t eval_steps;                 /* ITH_CONFIG_UNSET unless eval_strategy is steps */
    const char *resume_from_checkpoint; /* path, "auto", or NULL */
    int64_t save_steps;                 /* ITH_CONFIG_UNSET: only at the end */
    double save_epochs;                 /* NaN: unset */
    bool save_ckpt_as_hf;
    int64_t save_total_limit;    /* ITH_CONFIG_UNSET: keep all */
    ith_config_dtype save_dtype; /* AUTO: the source's */
    int64_t max_shard_size;      /* bytes */
    int64_t logging_steps;
    int64_t report_to; /* ith_report_to bits */

    /* machine */
    ith_device_choice device;
    int64_t threads;      /* 0: all cores */
    int64_t memory_limit; /* bytes; ITH_CONFIG_UNSET: what the machine has */
    ith_dist_config dist;
    int64_t zero_stage;       /* ITH_CONFIG_UNSET: as dist_config says */
    int64_t ranks;            /* ITH_CONFIG_UNSET: dp_size * cp_size */
    int64_t dp_size, cp_size; /* dp_size: ITH_CONFIG_UNSET = world / cp */
    int64_t ep_size;          /* ITH_CONFIG_UNSET: as dist_config says */
    ith_cp_mode cp_mode;
    ith_linear_cp_mode linear_cp_mode;
    ith_cp_whole cp_whole_documents;
    int64_t mp_replicate_size, mp_shard_size; /* mp_shard_size: ITH_CONFIG_UNSET = the rest */
    int64_t dist_timeout;                     /* seconds */

    /* preference losses */
    ith_pref_loss pref_loss;
    double pref_beta, pref_ftx, simpo_gamma, dpo_label_smoothing, ld_alpha; /* ld_alpha: NaN off */
    bool disable_dropout;

    /* generation */
    ith_sample_backend sample_backend;
    int64_t max_new_tokens;

    /* where it came from; private to config.c */
    struct ith_config_origin *origin;
} ith_config;

typedef enum {
    ITH_KEY_USED,
    ITH_KEY_NOT_NEEDED, /* selects machinery of the Python program; reported once when given */
    ITH_KEY_NOT_YET     /* a feature that is not built; refused when switched on */
} ith_key_status;

/* One row of the key table. Keys inside plugin maps are written with a dot: optim_config.beta1. */
typedef struct {
    const char *name;
    const char *section;      /* heading in docs and dump */
    const char *default_text; /* as it would be written in YAML; "null" for unset */
    const char *help;
    const char *plugins; /* values of <map>.name it belongs to, comma list; NULL: all */
    ith_key_status status;
    const char *why; /* why it is not needed, or what is missing; NULL for used keys */
    bool is_plugin;  /* a map with a name */
} ith_config_key;
int ith_config_num_keys(void);
ith_config_key ith_config_key_at(int idx);
/* What a key takes, for people: "an integer >= 1", "one of eager, sdpa, flash_attention_2". */
const char *ith_config_key_type(int idx, char *buf, size_t size);

/* Reads `path` (.yaml, .yml, .json; NULL: defaults only), then key=value overrides. */
ith_status ith_config_load(ith_config *out, const char *path, const char *const *overrides,
                           int num_overrides, ith_error *err);
/* The same from text; `name` stands in messages. */
ith_status ith_config_parse(ith_config *out, const char *text, int64_t len, const char *name,
                            const char *const *overrides, int num_overrides, ith_error *err);
void ith_config_deinit(ith_config *config);

/* One line naming key, place and what is missing when the config asks for something that is not
 * built yet; ITH_ERR_UNSUPPORTED. */
ith_status ith_config_check_supported(const ith_config *config, ith_error *err);
/* What the ranks cut among them, 0 to 3: zero_stage, else what dist_config means. */
int ith_config_zero_stage(const ith_config *config);
/* Processes that share the experts of a layer: ep_size, else that of dist_config, else 1. */
int64_t ith_config_ep_size(const ith_config *config);
/* Processes that the config asks for: ranks, else dp_size * cp_size, enough for ep_size. */
int64_t ith_config_ranks(const ith_config *config);
/* Checks and fills what depends on the number of processes: dp_size * cp_size = world_size,
 * global_batch_size divisible by dp_size * micro_batch_size. */
ith_status ith_config_resolve_layout(const ith_config *config, int64_t world_size,
                                     ith_config_layout *out, ith_error *err);
/* Dtype of the weights in the step: never AUTO. */
ith_config_dtype ith_config_param_dtype(const ith_config *config);

/* Records "file:line:col: key: text" for a mistake that shows only later (a head count that does
 * not divide, a missing file). ITH_ERR_USAGE. */
ith_status ith_config_fail(const ith_config *config, const char *key, ith_error *err,
                           const char *fmt, ...) ITH_PRINTF(4, 5);
/* Fails, with how to get one, unless `model` is a directory. other: what could be given instead, or
 * "". */
ith_status ith_config_need_model(const ith_config *config, const char *other, ith_error *err);
/* The user gave this key (in the file or as an override), whatever its value. */
bool ith_config_is_set(const ith_config *config, const char *key);
/* Given keys that have no meaning here, one line each: "file:line:col: key: not needed: why". */
int ith_config_num_notes(const ith_config *config);
const char *ith_config_note(const ith_config *config, int idx);

/* Appends the resolved config as YAML, in table order, one map per plugin: all keys under the names
 * of their sections, or those alone that were given. */
ith_status ith_config_dump(const ith_config *config, bool all, ith_buf *out, ith_error *err);
/* Appends docs/config.md. */
void ith_config_markdown(ith_buf *out);

#endif
