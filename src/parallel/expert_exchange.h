/* expert_exchange.h - tokens to the experts of other ranks, and back: expert parallelism.
 *
 * The E experts of a layer are cut among the P ranks of an ep group, E/P each, in order. A rank's
 * rows, sorted by expert (ith_expert_sort), go to the ranks that have their experts; what is
 * computed there comes back to the same rows. Nothing is dropped: a rank takes at most as many rows
 * at a time as its buffers hold, a quarter more than a rank brings, and there are as many rounds as
 * the busiest rank needs. All ranks of a group know all counts, so the schedule is the same
 * everywhere without further agreement; it fixes the order of rows, so sums over them are the same
 * in every run.
 *
 * Bytes that a rank sends when the experts are evenly used, S rows of D: (P-1)/P * S * D * e for
 * each tensor that goes and the one that comes back, and 4 (P-1) (E+1) for the counts. */
#ifndef ITH_PARALLEL_EXPERT_EXCHANGE_H
#define ITH_PARALLEL_EXPERT_EXCHANGE_H

#include "kernels/ops.h"
#include "parallel/mesh.h"

#define ITH_EXPERT_INPUTS 2

/* Rows of one round, sorted by own expert. */
typedef struct {
    ith_tensor in[ITH_EXPERT_INPUTS]; /* [n,D] of each tensor that was sent */
    ith_tensor offsets;               /* [E/P + 1] I32: rows of an expert, as ith_expert_sort's */
    ith_tensor out;                   /* [n,D] to fill; it goes back */
} ith_expert_round;
typedef ith_status (*ith_expert_function)(void *arg, ith_ctx *ctx, const ith_expert_round *round);

/* Collective over mesh->ep. in: num_in tensors [S,D] of rows sorted by expert; offsets: [E+1] I32
 * of them; out: [S,D], which may alias an input. f is called once a round, also with no rows; while
 * the plan counts, once with the most. */
ith_status ith_expert_rounds(const ith_mesh *mesh, ith_ctx *ctx, const ith_tensor *in, int num_in,
                             ith_tensor offsets, ith_tensor out, ith_expert_function f, void *arg);

#endif
