/* verify.h - checks at four points of every step, for `verify: true`.
 *
 *   begin     before the first micro-batch: weights and optimizer state are what the last update
 *             left
 *   backward  before gradients are summed over the ranks: none that this rank has is NaN or inf
 *   reduce    after it: every tensor got one in the first step; finite
 *   update    after it: weights are the rounded master; gradients are cleared
 *
 * At begin, reduce and update what several ranks have must be the same bits on them: with stage 0
 * all of it, what a stage cuts where mp_replicate_size makes copies, and the weights that are whole
 * on every rank beside their shards. A tied head is the embedding, so it is in step with it where
 * the embedding is. What one rank alone has is held against its hash of the update before.
 *
 * All ranks call these together and agree: a difference ends the run with one line that names
 * point, rank and tensor. They read every gradient and weight back to the host: for hunting faults,
 * not for speed. ITH_FAULT=verify:N changes an element at the N-th point, before it is checked. */
#ifndef ITH_TRAIN_VERIFY_H
#define ITH_TRAIN_VERIFY_H

#include "train/trainer.h"

#define ITH_VERIFY_VIEWS 5 /* weights, whole weights beside shards, master, m, v */

typedef struct {
    ith_trainer *t;
    const ith_trainer_hooks *hooks;
    uint64_t *sums;         /* [ITH_VERIFY_VIEWS * pieces] hashes after the last update */
    uint64_t *now, *theirs; /* [pieces] of the running check, and of a group's first rank */
    int64_t *present;       /* [pieces] gradients that are not all zero */
    char *chunk;
    bool has_sums;
} ith_verifier;

/* hooks may be NULL. Collective, like all that follow. */
ith_status ith_verifier_open(ith_verifier *v, ith_trainer *t, const ith_trainer_hooks *hooks,
                             ith_error *err);
void ith_verifier_close(ith_verifier *v); /* also of a zeroed one */

ith_status ith_verify_begin(ith_verifier *v, ith_error *err);
/* What is not finite is told, here and after the sum; what happens then is the business of
 * `nonfinite`. */
ith_status ith_verify_backward(ith_verifier *v, ith_error *err);
/* first: of the run; the tensors without a gradient are told. */
ith_status ith_verify_reduce(ith_verifier *v, bool first, ith_error *err);
/* Gradients become NaN, so that the next step shows what it did not write anew; cut ones (ZeRO 2,
 * 3) must be zero. */
ith_status ith_verify_update(ith_verifier *v, ith_error *err);

#endif
