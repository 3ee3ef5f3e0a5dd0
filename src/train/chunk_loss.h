/* chunk_loss.h - final norm, head and cross entropy on the labelled rows, in chunks; gradient in
 * the same pass.
 *
 *     loss = sum_i seeds[i] * (lse(z_i) - z_i[labels[i]])
 *     z_i = head * norm(hidden[rows[i]])        seeds = weight / C
 * Rows without a label never reach the head. Logits exist for `chunk` rows at a time; the head's
 * gradient is summed in f32, so the result does not depend on the chunk size beyond rounding. No
 * labelled row: loss 0, gradient 0. */
#ifndef ITH_TRAIN_CHUNK_LOSS_H
#define ITH_TRAIN_CHUNK_LOSS_H

#include "model/model.h"

/* Confidence-aware training: adds beta * sum_i seeds[i] * H_i over the rows whose label is the
 * likeliest id already, H_i the entropy of softmax(z_i) (ops.h, ith_cross_entropy_confident). By
 * the one gradient rule it is a sum over the step's C like the loss. mean_of_right instead divides
 * by the weight of those rows in this micro-batch (of all ranks of its cp group) times its share of
 * the step, as dFactory does; it takes a first pass over the logits. */
typedef struct {
    float beta; /* 0: off, the tensors are absent */
    bool mean_of_right;
    ith_tensor row_confidence, right; /* [M] f32 of all labelled rows */
    ith_tensor sum, right_sum;        /* [1] F64: += the added loss; scratch */
} ith_confidence;

/* dhidden [T,D]: gradient, all rows written (zero where unlabelled); absent: loss only
 * (evaluation, without confidence). loss_sum: [1] F64, += loss.   hidden: [T,D] before the final
 * norm.   row_loss: [M] f32, unweighted, by labelled row. */
ith_status ith_chunk_loss(ith_model *model, ith_ctx *ctx, const ith_batch *batch, int64_t chunk,
                          const ith_confidence *confidence, ith_tensor dhidden, ith_tensor loss_sum,
                          ith_tensor row_loss, ith_tensor hidden);

#endif
