/* schedule.c - learning-rate schedules. */
#include "train/schedule.h"

#include <math.h>

#include "base/checked.h"

int64_t ith_schedule_warmup(const ith_lr_scheduler_config *c, int64_t total)
{
    if (c->warmup_steps != ITH_CONFIG_UNSET)
        return c->warmup_steps;
    return (int64_t)ceil(c->warmup_ratio * (double)total);
}

/* From 1 at progress 0 to 0 at progress 1. */
static double decay(ith_decay_type type, double progress)
{
    switch (type) {
    case ITH_DECAY_LINEAR:
        return 1.0 - progress;
    case ITH_DECAY_COSINE:
        return 0.5 * (1.0 + cos(3.14159265358979323846 * progress));
    default:
        return 1.0 - sqrt(progress);
    }
}

double ith_schedule_rate(const ith_lr_scheduler_config *c, double base, int64_t step, int64_t total)
{
    int64_t warmup = ith_schedule_warmup(c, total), begin = warmup;
    if (step < warmup)
        return base * (double)step / (double)ith_max_i64(warmup, 1);
    ith_decay_type type = ITH_DECAY_LINEAR;
    switch (c->name) {
    case ITH_SCHEDULE_CONSTANT:
        return base;
    case ITH_SCHEDULE_LINEAR:
        break;
    case ITH_SCHEDULE_COSINE:
        type = ITH_DECAY_COSINE;
        break;
    case ITH_SCHEDULE_WSD: {
        int64_t steps = c->decay_steps != ITH_CONFIG_UNSET
                            ? c->decay_steps
                            : (int64_t)ceil(c->decay_ratio * (double)total);
        begin = ith_max_i64(warmup, total - steps);
        type = c->decay_type;
        break;
    }
    }
    if (step < begin)
        return base;
    double progress = total > begin ? (double)(step - begin) / (double)(total - begin) : 1.0;
    double shape = decay(type, fmin(progress, 1.0));
    return base * (c->min_lr_ratio + (1.0 - c->min_lr_ratio) * shape);
}
