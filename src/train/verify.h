/* verify.h - checks at points of a step, for `verify: true`.
 *
 * They read every gradient and weight back to the host: for hunting faults, not for speed. */
#ifndef ITH_TRAIN_VERIFY_H
#define ITH_TRAIN_VERIFY_H

#include "train/trainer.h"

/* Before the update. Names the first tensor whose gradient is not finite (what happens then is the
 * business of `nonfinite`); with `first`, the tensors that got no gradient at all, too. */
ith_status ith_verify_gradients(ith_trainer *t, bool first, const ith_trainer_hooks *hooks,
                                ith_error *err);
/* After the update. Fails unless the weights are the rounded master. Gradients become NaN, so that
 * the next check shows what a step did not write anew; cut ones (ZeRO 2, 3) must be zero. */
ith_status ith_verify_update(ith_trainer *t, ith_error *err);

#endif
