/* schedule.h - learning rate as a function of the step: nothing to save, nothing to resume. */
#ifndef ITH_TRAIN_SCHEDULE_H
#define ITH_TRAIN_SCHEDULE_H

#include "config/config.h"

/* Warm-up steps that the config asks for out of `total` optimizer steps. */
int64_t ith_schedule_warmup(const ith_lr_scheduler_config *c, int64_t total);

/* Rate of update `step` (0 for the first) of `total`, as transformers' schedulers give it: during
 * warm-up of w steps base * step / w, then by name; linear and cosine go to base * min_lr_ratio at
 * `total`. Steps beyond `total` keep the last value. */
double ith_schedule_rate(const ith_lr_scheduler_config *c, double base, int64_t step,
                         int64_t total);

#endif
