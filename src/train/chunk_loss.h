/* chunk_loss.h - final norm, head and cross entropy on the labelled rows, in chunks; gradient in
 * the same pass.
 *
 * loss = sum_i seeds[i] * (lse(z_i) - z_i[labels[i]]),  z_i = head * norm(hidden[rows[i]]),  seeds
 * = weight / C. Rows without a label never reach the head. Logits exist for `chunk` rows at a time;
 * the head's gradient is summed in f32, so the result does not depend on the chunk size beyond
 * rounding. No labelled row: loss 0, gradient 0. */
#ifndef ITH_TRAIN_CHUNK_LOSS_H
#define ITH_TRAIN_CHUNK_LOSS_H

#include "model/model.h"

/* dhidden [T,D]: gradient, all rows written (zero where unlabelled); absent: loss only
 * (evaluation). loss_sum: [1] F64, += loss.   hidden: [T,D] before the final norm.   row_loss: [M]
 * f32, unweighted, by labelled row. */
ith_status ith_chunk_loss(ith_model *model, ith_ctx *ctx, const ith_batch *batch, int64_t chunk,
                          ith_tensor dhidden, ith_tensor loss_sum, ith_tensor row_loss,
                          ith_tensor hidden);

#endif
