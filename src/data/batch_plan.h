/* batch_plan.h - the micro-batches of one epoch, of all ranks, from lengths alone. Stays inside
 * data/.
 *
 * Documents are numbered by their position in the list the batcher uses. A plan is a function of
 * (options, epoch, carried documents); nothing of it needs saving. */
#ifndef ITH_DATA_BATCH_PLAN_H
#define ITH_DATA_BATCH_PLAN_H

#include "config/config.h"
#include "data/best_fit.h"

typedef struct {
    ith_batching strategy;
    int64_t micro_batch_size, budget; /* budget: tokens, cutoff_len * micro_batch_size */
    int64_t window;                   /* of packing, documents */
    uint64_t seed;
    bool shuffle, carry_over;
    const int32_t *lengths; /* [count], 1..cutoff_len each */
    int64_t count;
} batch_plan_options;

typedef struct {
    batch_plan_options options;
    int64_t *order; /* [order_cap] documents, micro-batch after micro-batch */
    int64_t order_cap, num_order;
    int64_t *micro_begin; /* [order_cap + 2] where each micro-batch begins in order */
    int64_t num_micro;
    /* packing */
    int64_t *permutation; /* [count] */
    ith_best_fit *fit;
    int64_t *bin_begin, *bin_order; /* [count + 1], [count] */
    int64_t *window_docs, *window_begin;
    int32_t *window_lengths;
} batch_plan;

/* max_carry: most documents that can be carried over from the epoch before. */
ith_status batch_plan_create(batch_plan *plan, const batch_plan_options *options, int64_t max_carry,
                             ith_error *err);
void batch_plan_destroy(batch_plan *plan);
/* carry may lie in plan->order. With carry_over the documents behind the last closed micro-batch,
 * order[micro_begin[num_micro] .. num_order), are for the next epoch to carry. No allocation. */
void batch_plan_build(batch_plan *plan, int64_t epoch, const int64_t *carry, int64_t num_carry);

#endif
