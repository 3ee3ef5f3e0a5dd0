/* batch_deal.h - who computes which document of an optimizer step. Stays inside data/.
 *
 * A step is dealt out in rounds. In a round of groups each of the D cp groups has one micro-batch,
 * which its ranks share; in a round of ranks each of the D * cp ranks has one of its own, of whole
 * documents. Rounds of groups come first. The work of a round is that of its busiest rank, and a
 * step lasts as long as the sum over its rounds: that is what dealing makes small.
 *
 * A deal is a function of lengths and options: all ranks find the same one. */
#ifndef ITH_DATA_BATCH_DEAL_H
#define ITH_DATA_BATCH_DEAL_H

#include "data/batching.h"

typedef struct {
    ith_batch_work work;
    int64_t groups, cp_size;
    bool regroup;       /* documents may change micro-batches, at most group_docs in each */
    bool keep_together; /* micro-batches stay what they are: each is dealt as one */
    bool whole_always;  /* of rounds of ranks: not only where they make the step shorter */
    int64_t max_micro;  /* micro-batches of a step */
    int64_t max_docs;   /* documents of a step */
    int64_t group_tokens, group_docs; /* most of a group's micro-batch */
    int64_t rank_tokens, rank_docs;   /* of a rank's own; 0: no rounds of ranks */
    const int32_t *lengths;           /* of documents, by number */
    const double *media;              /* work of their images; NULL: they have none */
} batch_deal_options;

/* Micro-batches, one after the other: documents docs[begin[i] .. begin[i + 1]) of micro-batch i. */
typedef struct {
    int64_t *docs, *begin, num;
} batch_list;

typedef struct {
    batch_deal_options options;
    /* the deal: group g has micro-batch round * groups + g of cut in the first rounds, rank r has
     * (round - group_rounds) * groups * cp_size + r of whole in the others */
    batch_list cut, whole;
    int64_t group_rounds, rank_rounds;
    double busiest,
        mean; /* work of the busiest ranks, summed over rounds; of every rank, if even */
    struct batch_deal_scratch *scratch;
} batch_deal;

ith_status batch_deal_create(batch_deal *deal, const batch_deal_options *options, ith_error *err);
void batch_deal_destroy(batch_deal *deal);
/* Most rounds of a step. */
int64_t batch_deal_max_rounds(const batch_deal_options *options);
/* step: the micro-batches that the strategy made, num of them at least 1. No allocation. */
void batch_deal_step(batch_deal *deal, const batch_list *step);

#endif
