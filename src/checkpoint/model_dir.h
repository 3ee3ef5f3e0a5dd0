/* model_dir.h - writes a complete Hugging Face model directory.
 *
 * Complete for transformers, SGLang and vLLM: config.json (the source's text, byte for byte, unless
 * a dtype is asked for), generation config, tokenizer, chat template, processor and code files, and
 * weights. Tensors that the caller does not hold (mtp.*, a vision tower) are copied through bit for
 * bit; names and dtypes are those of the source. Weights come last, their index at the very end. */
#ifndef ITH_CHECKPOINT_MODEL_DIR_H
#define ITH_CHECKPOINT_MODEL_DIR_H

#include "checkpoint/safetensors.h"

typedef struct ith_model_sink ith_model_sink;

typedef struct {
    const char *source;           /* directory whose config and side files are copied */
    const ith_st_reader *weights; /* its weights; NULL: only the caller's tensors are written */
    /* The caller's tensors: name, shape, and the dtype in which their data comes. A tensor the
     * source has must have its shape and is written in its dtype; the others follow at the end in
     * their own. */
    const ith_st_entry *tensors;
    int64_t count;
    /* Hands over tensor i, or this rank's part of it, with ith_model_put. NULL: the entries hold
     * their data. */
    ith_status (*put)(void *arg, int64_t i, ith_model_sink *sink, ith_error *err);
    void *put_arg;
    const char
        *chat_template; /* text for chat_template.jinja; NULL: the source's files as they are */
    ith_comm *ranks;    /* that write together; NULL: this process alone */
    /* Write `dtype` where the source has its main floating type (that of most bytes); what is kept
     * in another on purpose (fp32 A_log among bf16) stays. New tensors get it, too. */
    bool set_dtype;
    ith_dtype dtype;
    int64_t max_shard_bytes; /* 0: the default of safetensors.h */
} ith_model_write;

/* Elements [first, first + n) of the current tensor; every element once, by one rank. */
ith_status ith_model_put(ith_model_sink *sink, int64_t first, const void *data, int64_t n,
                         ith_error *err);

/* Writes out_dir (created). The source directory itself is refused. Of a tied model whose embedding
 * the caller holds, a stored duplicate lm_head.weight is left out unless the caller holds that,
 * too. With ranks: all of them call it with the same tensors, share what is copied, and return the
 * failure of the lowest failing one. */
ith_status ith_model_dir_write(const char *out_dir, const ith_model_write *write, ith_error *err);

/* Only config.json (dtype keys, nested ones as well, changed when set_dtype) and the side files. */
ith_status ith_model_dir_copy_files(const char *source, const char *out_dir, bool set_dtype,
                                    ith_dtype dtype, ith_error *err);

/* That the parts which a command reads are there; what is missing is one line and a wrong request.
 * Their contents are the business of their readers. */
typedef enum { ITH_DIR_CONFIG = 1, ITH_DIR_TOKENIZER = 2, ITH_DIR_WEIGHTS = 4 } ith_dir_parts;
ith_status ith_model_dir_check(const char *dir, int parts, ith_error *err);

/* True for files that belong beside the weights: tokenizer*, chat_template*, *.py .. */
bool ith_model_dir_is_side_file(const char *name);

#endif
