/* decoder.h - a model opened for generation: weights, KV cache, one call per batch of new tokens.
 *
 * Memory is planned as for training: counted by walking prefill and decode, committed once. */
#ifndef ITH_GENERATE_DECODER_H
#define ITH_GENERATE_DECODER_H

#include "generate/decoder_ranks.h"
#include "generate/sampler.h"
#include "kernels/session.h"
#include "model/vision_buffers.h"
#include "tokenizer/tokenizer.h"

typedef struct {
    ith_use_device device;
    int threads;             /* 0: all cores */
    bool set_dtype;          /* else the type of config.json (bf16 for bf16 and f16 files) */
    ith_dtype dtype;         /* F32 or BF16 */
    int64_t batch;           /* sequences at a time */
    int64_t capacity;        /* tokens of a sequence, prompt and answer */
    int64_t max_append;      /* tokens of one append, all sequences together */
    ith_vision_limits media; /* of one append; max_patches 0: text only */
    ith_ranks_options ranks; /* all zero: one */
} ith_decoder_options;

/* Images and videos of an append, sequence after sequence, in the order of their tokens. */
typedef struct {
    const float *pixels; /* patches of all of them */
    const ith_grid *grids;
    int64_t num_grids;
} ith_decoder_media;

typedef struct {
    ith_hf_config hf;
    ith_session session;
    ith_model *model;
    ith_decoder_ranks ranks;
    ith_decoder_options options;
    ith_kv_cache cache;
    ith_tensor ids, position_ids, cu_seqlens, rows, last_rows, logits;
    ith_vision_buffers vision;
    int64_t *lengths;   /* [batch] tokens in the cache */
    int64_t *held;      /* [batch] those of them that this rank holds: all, of a cut cache a part */
    int64_t *positions; /* [batch] of the next token: behind images they differ from lengths */
    float *host_logits; /* [batch, vocab_size] after an append: the next token of each sequence */
    int32_t *staging;   /* host: what an append uploads, see decoder.c */
    void *raw_logits;
} ith_decoder;

/* *d must not move while it is open. With options->ranks: collective, and failures are agreed;
 * where they exchange (ranks.exchange) appends and answers are collective, too. */
ith_status ith_decoder_open(ith_decoder *d, const char *model_dir,
                            const ith_decoder_options *options, ith_error *err);
void ith_decoder_close(ith_decoder *d);
/* Forgets all sequences. */
void ith_decoder_reset(ith_decoder *d);
/* Drops the tokens of sequence b from position `length` on; returns how many are left: `length`, or
 * 0 when the model keeps a state that cannot go back, or ranks share the cache. */
int64_t ith_decoder_truncate(ith_decoder *d, int64_t b, int64_t length);
/* Appends counts[b] tokens to sequence b, for all b in [0, batch); computes host_logits. Either all
 * sequences are empty (prefill, any counts, 0 allowed for sequences that are not used), or all
 * counts are equal; 1, where ranks share the cache. */
ith_status ith_decoder_append(ith_decoder *d, const int32_t *const *ids, const int64_t *counts);
/* The same with images and videos; their tokens are among the ids, whole. media may be NULL. */
ith_status ith_decoder_append_media(ith_decoder *d, const int32_t *const *ids,
                                    const int64_t *counts, const ith_decoder_media *media);

/* Parts of opening that the block decoder shares: device and model, which writes blocks (diffusion)
 * or does not, before ranks share it; then its weights. */
ith_status ith_decoder_open_model(ith_hf_config *hf, ith_session *session, ith_model **model,
                                  const char *dir, const ith_decoder_options *options,
                                  bool diffusion, ith_error *err);
ith_status ith_decoder_load(ith_model *model, ith_ctx *ctx, const char *dir, ith_error *err);

/* Answers to a batch of prompts (num <= options.batch; each with room for one token more). Without
 * any a rank walks along, where all walk together. Calls token(arg, i, id) for every new token,
 * stop tokens included; an answer ends with a stop id, after max_new tokens, at the capacity, or
 * when token returns false. Of ranks that share sequences only the one that chooses calls it. */
typedef struct {
    ith_sampling sampling;
    const int32_t *stop_ids;
    int num_stop_ids;
    int64_t max_new;
    bool (*token)(void *arg, int64_t i, int32_t id, bool is_stop);
    void *arg;
    uint64_t first_stream;          /* sequence i draws from stream first_stream + i */
    const ith_decoder_media *media; /* of all prompts; NULL: none */
} ith_generate_options;
ith_status ith_decoder_generate(ith_decoder *d, const ith_ids *prompts, int64_t num,
                                const ith_generate_options *how, ith_error *err);

#endif
