/* decoder_ranks.h - several ranks that answer different prompts at the same time.
 *
 * With whole weights they need nothing of each other. With shards (ZeRO 3, and experts by ep) a
 * layer is gathered for the moment of its walk, so all ranks walk equally often: who has no open
 * sequence rides along. The ranks are data-parallel: a sequence and its cache are on one rank. */
#ifndef ITH_GENERATE_DECODER_RANKS_H
#define ITH_GENERATE_DECODER_RANKS_H

#include "model/model.h"

typedef struct {
    ith_mesh mesh;
    ith_shard shard;
    bool walks_together;
} ith_decoder_ranks;

/* Collective, after the model is made: cuts its weights among the ranks. r must not move. */
ith_status ith_decoder_ranks_cut(ith_decoder_ranks *r, ith_model *model, ith_ctx *ctx,
                                 ith_comm *ranks, int64_t ep_size);
void ith_decoder_ranks_close(ith_decoder_ranks *r); /* also of a zeroed one */
/* *open becomes whether it is so on any rank that walks along. */
ith_status ith_decoder_ranks_any(const ith_decoder_ranks *r, bool *open, ith_error *err);

#endif
