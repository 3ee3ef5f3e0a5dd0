/* decoder_ranks.h - several ranks that answer: dp x cp, as in training.
 *
 * Groups of cp_size neighbours answer different prompts at the same time. Within a group a sequence
 * and its cache are cut (parallel/cut_cache.h): prompts go through one by one, in slices; what
 * comes after them goes through every rank, and its keys and values stay on the one whose turn it
 * is: rank p / unit % cp_size has position p (unit: tokens that are decoded together, a block or
 * one). The first rank of a group chooses, the others are told.
 *
 * With cut weights (ZeRO 3, and experts by ep) a layer is gathered for the moment of its walk, so
 * all ranks walk equally often: who has no open sequence rides along. */
#ifndef ITH_GENERATE_DECODER_RANKS_H
#define ITH_GENERATE_DECODER_RANKS_H

#include "kernels/session.h"
#include "model/model.h"

typedef struct {
    ith_comm *world;  /* that decode at the same time, borrowed; NULL: one */
    bool cut_weights; /* among them */
    int64_t ep_size;  /* of cut experts; 0: 1 */
    int64_t cp_size;  /* ranks that share a sequence; 0: 1 */
    ith_ring_wish cp_mode;
} ith_ranks_options;

typedef struct {
    ith_mesh mesh;  /* of prompts */
    ith_mesh alone; /* the same ranks for what every rank of a group does itself */
    ith_shard shard;
    bool exchange;       /* within a walk: ranks open and generate together */
    bool walks_together; /* all of them walk equally often */
} ith_decoder_ranks;

/* Collective, after the model is made: cuts its weights, or makes it one of a cp group. Failures
 * are agreed. r must not move. One rank, or ranks that need nothing of each other: nothing. */
ith_status ith_decoder_ranks_open(ith_decoder_ranks *r, ith_model *model, ith_session *session,
                                  const ith_ranks_options *options);
void ith_decoder_ranks_close(ith_decoder_ranks *r); /* also of a zeroed one */
/* For the plan: what exchanges need, then the cache of `batch` sequences of `capacity` tokens. */
ith_status ith_decoder_ranks_place(const ith_decoder_ranks *r, ith_ctx *ctx);
ith_status ith_decoder_ranks_place_cache(const ith_decoder_ranks *r, ith_model *model, ith_ctx *ctx,
                                         int64_t batch, int64_t capacity, int64_t unit,
                                         ith_kv_cache *cache);

/* Ranks that share a sequence; whether this one of them chooses. */
int64_t ith_decoder_ranks_cp(const ith_decoder_ranks *r);
bool ith_decoder_ranks_chooses(const ith_decoder_ranks *r);
/* The walks that follow are of slices of a prompt, or of tokens that all ranks of the group have.
 */
void ith_decoder_ranks_share(const ith_decoder_ranks *r, ith_model *model, bool slices);
/* The most that a walk takes of prompts with max_append tokens together and `capacity` each: all,
 * or one prompt; and what a rank has of n tokens of its group, at most. */
int64_t ith_decoder_ranks_most(const ith_decoder_ranks *r, int64_t max_append, int64_t capacity);
int64_t ith_decoder_ranks_slice(const ith_decoder_ranks *r, int64_t n);
/* Whether what is decoded at this position stays here. */
bool ith_decoder_ranks_keeps(const ith_decoder_ranks *r, int64_t position, int64_t unit);

/* Whether this one generates: it has prompts, or walks along with those that have. */
bool ith_decoder_ranks_walks(const ith_decoder_ranks *r, int64_t num_prompts);
/* *open becomes whether it is so on any rank that walks along. */
ith_status ith_decoder_ranks_any(const ith_decoder_ranks *r, bool *open, ith_error *err);
/* data of the rank that chooses, on all of its group. */
ith_status ith_decoder_ranks_tell(const ith_decoder_ranks *r, void *data, int64_t bytes,
                                  ith_error *err);
/* x [n] of the one rank of the group that has it, on all; the others bring zeros. */
ith_status ith_decoder_ranks_gather(const ith_decoder_ranks *r, float *x, int64_t n,
                                    ith_error *err);

#endif
