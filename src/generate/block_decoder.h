/* block_decoder.h - generation of diffusion models: a block of masks at a time, many tokens a step.
 *
 * A row is the prompt and then masks; blocks are counted from its first token, so the first active
 * block may begin with prompt tokens, which stay. Whole prompt blocks go through the model once
 * (prefill). Then, block after block:
 *   step    one forward of the block's rows against the cache and themselves; at each mask the
 *           likeliest id but the mask id is the candidate, its probability the confidence (the mask
 *           id counts in the denominator). Candidates above the threshold are written when there
 *           are at least `quota` of them, else the quota most confident ones (equal: lower
 *           position). With `edit`, a written token whose likeliest id is another one, above
 *           edit_threshold, is replaced in the same step; once no mask is left, steps go on until
 *           one changes nothing, at most max_post_steps.
 *   commit  one more forward of the finished block, so that the cache holds its final tokens; not
 *           for the last block, nor after a step that changed nothing.
 * Exact: earlier blocks never see later ones. Temperature 0 takes the likeliest id; above it, ids
 * are drawn, keyed by (seed, stream, position, step); edits are never drawn. Sequences of a batch
 * do not touch each other. */
#ifndef ITH_GENERATE_BLOCK_DECODER_H
#define ITH_GENERATE_BLOCK_DECODER_H

#include "generate/decoder.h"

typedef struct {
    int64_t block;        /* tokens; as in training */
    int64_t steps;        /* most steps of a block; quota = block / steps, one more in the first
                             block % steps of them */
    int64_t minimal_topk; /* steps <= max_new / minimal_topk */
    double threshold;     /* above 1: never, the quota alone decides */
    int64_t max_new;
    int32_t mask_id;
    const int32_t *stop_ids;
    int num_stop_ids;
    bool early_stop; /* stop within a block once all before the first stop id is written */
    bool edit;
    double edit_threshold;
    int64_t max_post_steps;
    double temperature;
    uint64_t seed, first_stream; /* sequence i draws from stream first_stream + i */
    /* A token was written (or replaced); the row is in the caller's answer. step: forwards of this
     * sequence so far, from 0. NULL: nobody looks. */
    void (*written)(void *arg, int64_t i, int64_t position, int32_t id, double confidence,
                    int64_t step);
    void *arg;
} ith_block_how;

typedef struct {
    ith_ids row;         /* prompt, then the blocks, masks where generation stopped; owned */
    int64_t prompt, end; /* the answer is row[prompt, end), a stop id included */
    int32_t *revealed;   /* [row.count] step that first wrote the token; -1: none did; owned */
    bool stopped;        /* by a stop id */
    int64_t steps;       /* forwards that could write */
    int64_t commits;     /* forwards that only filled the cache */
    int64_t blocks;      /* blocks decoded */
    int64_t edits;       /* tokens replaced */
} ith_block_answer;

typedef struct {
    ith_hf_config hf;
    ith_session session;
    ith_model *model;
    ith_decoder_ranks ranks;
    ith_decoder_options options; /* max_append: most prompt tokens of all sequences together */
    int64_t block;
    ith_kv_cache cache;
    ith_tensor ids, position_ids, cu_seqlens, rows, all_rows, logits;
    ith_tensor chosen, confidence, draws; /* [batch*block], of ith_choose_ids */
    int64_t *held; /* [batch] rows of the cache behind which the running block goes */
    int32_t *staging, *host_chosen;
    float *host_confidence;
    int64_t forwards; /* of all calls, prefills included */
} ith_block_decoder;

/* options.capacity: tokens of a row, a multiple of block. */
ith_status ith_block_decoder_open(ith_block_decoder *d, const char *model_dir,
                                  const ith_decoder_options *options, int64_t block,
                                  ith_error *err);
void ith_block_decoder_close(ith_block_decoder *d);
/* Rows that hold a prompt of this length and its answer. */
int64_t ith_block_row_len(int64_t prompt, int64_t max_new, int64_t block);
void ith_block_answer_deinit(ith_block_answer *answer);
/* Answers to num prompts (0: see ith_decoder_generate), of which none is longer than
 * options.capacity holds with its answer;
 * out[i] is filled, and deinit by the caller. */
ith_status ith_block_decoder_generate(ith_block_decoder *d, const ith_ids *prompts, int64_t num,
                                      const ith_block_how *how, ith_block_answer *out,
                                      ith_error *err);

#endif
