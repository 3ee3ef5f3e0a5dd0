/* model_dir.h - a Hugging Face model directory, read and written again.
 *
 * Written directories are complete for transformers, SGLang and vLLM: config.json (the source's
 * text, byte for byte, unless a dtype is asked for), generation config, tokenizer, chat template,
 * processor files, code files, and weights. Tensors that the caller does not hold (mtp.*, a vision
 * tower) are copied through bit for bit; names and dtypes are those of the source. */
#ifndef ITH_CHECKPOINT_MODEL_DIR_H
#define ITH_CHECKPOINT_MODEL_DIR_H

#include "checkpoint/safetensors.h"

typedef struct ith_model_sink ith_model_sink;

typedef struct {
    const char *source;           /* directory whose config and side files are copied */
    const ith_st_reader *weights; /* its weights; NULL: only the caller's tensors are written */
    /* The caller's tensors: name, shape, and the dtype in which their data is pushed. A tensor the
     * source has keeps its place and its dtype there; others follow at the end in their own. */
    const ith_st_entry *tensors;
    int64_t count;
    /* Pushes all of tensor i (in its declared dtype) with ith_model_push. NULL: entries hold data.
     */
    ith_status (*push)(void *arg, int64_t i, ith_model_sink *sink, ith_error *err);
    void *push_arg;
    bool set_dtype; /* write `dtype` where the source has its main dtype (that of most bytes);
                       tensors kept in another type on purpose (fp32 A_log) stay */
    ith_dtype dtype;
    int64_t max_shard_bytes; /* 0: the default of safetensors.h */
} ith_model_write;

ith_status ith_model_push(ith_model_sink *sink, const void *data, int64_t bytes, ith_error *err);

/* Writes out_dir (created). The source directory itself is refused. A tied model's stored duplicate
 * lm_head.weight is not written unless the caller holds it. */
ith_status ith_model_dir_write(const char *out_dir, const ith_model_write *write, ith_error *err);
/* Only config.json and the side files. set_dtype as above. */
ith_status ith_model_dir_copy_files(const char *source, const char *out_dir, bool set_dtype,
                                    ith_dtype dtype, ith_error *err);
/* True for files that belong beside the weights (tokenizer*, chat_template*, *.py ..). */
bool ith_model_dir_is_side_file(const char *name);

/* Sets a key of a JSON object text, "text_config.dtype" style, leaving every other byte as it is;
 * a missing key is added at the end of its object. value: JSON text. */
ith_status ith_json_edit_set(ith_buf *text, const char *path, const char *value, ith_error *err);

#endif
