/* test_schedule.c - learning rates against the closed forms of transformers' schedulers.
 * Method: each form is written out here once more, from its description, and compared at every
 * step; ends and corners have worked numbers. */
#include "testing.h"

#include <math.h>

#include "train/schedule.h"

static const double pi = 3.14159265358979323846;

static ith_lr_scheduler_config schedule(ith_schedule_name name, int64_t warmup, double min_ratio)
{
    return (ith_lr_scheduler_config){.name = name,
                                     .warmup_steps = warmup,
                                     .min_lr_ratio = min_ratio,
                                     .decay_steps = ITH_CONFIG_UNSET,
                                     .decay_ratio = 0.1,
                                     .decay_type = ITH_DECAY_LINEAR};
}

static void assert_rate(const ith_lr_scheduler_config *c, int64_t step, int64_t total, double want)
{
    double got = ith_schedule_rate(c, 2e-4, step, total);
    if (!(fabs(got - want * 2e-4) <= 1e-15))
        fail_msg("step %lld of %lld: %.17g, expected %.17g", (long long)step, (long long)total, got,
                 want * 2e-4);
}

static void test_schedule_constant(void **state)
{
    (void)state;
    ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_CONSTANT, 4, 0.5);
    for (int64_t s = 0; s < 30; s++)
        assert_rate(&c, s, 20, s < 4 ? (double)s / 4 : 1);
    c.warmup_steps = 0;
    assert_rate(&c, 0, 20, 1);
}

/* max(0, (total - s) / (total - warmup)) */
static void test_schedule_linear(void **state)
{
    (void)state;
    for (int64_t warmup = 0; warmup <= 20; warmup += 5) {
        ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_LINEAR, warmup, 0);
        for (int64_t s = 0; s < 25; s++) {
            double want = s < warmup
                              ? (double)s / (double)warmup
                              : fmax(0, (double)(20 - s) / (double)(20 > warmup ? 20 - warmup : 1));
            assert_rate(&c, s, 20, want);
        }
    }
    ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_LINEAR, 0, 0.1);
    assert_rate(&c, 10, 20, 0.55);
    assert_rate(&c, 20, 20, 0.1);
    assert_rate(&c, 99, 20, 0.1);
}

/* (1 + cos(pi p)) / 2, scaled onto [min, 1] */
static void test_schedule_cosine(void **state)
{
    (void)state;
    for (int k = 0; k < 3; k++) {
        double min = 0.05 * k;
        ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_COSINE, 7, min);
        for (int64_t s = 0; s <= 100; s++) {
            double shape = 0.5 * (1 + cos(pi * (double)(s - 7) / 93.0));
            assert_rate(&c, s, 100, s < 7 ? (double)s / 7 : shape * (1 - min) + min);
        }
    }
    ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_COSINE, 0, 0);
    assert_rate(&c, 50, 100, 0.5);
    assert_rate(&c, 0, 100, 1);
    assert_rate(&c, 100, 100, 0);
}

static void test_schedule_warmup_stable_decay(void **state)
{
    (void)state;
    static const ith_decay_type types[] = {ITH_DECAY_LINEAR, ITH_DECAY_COSINE, ITH_DECAY_SQRT};
    for (int k = 0; k < 3; k++) {
        ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_WSD, 5, 0.2);
        c.decay_type = types[k];
        c.decay_steps = 20;
        for (int64_t s = 0; s <= 60; s++) {
            double p = (double)(s - 30) / 20, shape = 1 - p;
            if (types[k] == ITH_DECAY_COSINE)
                shape = 0.5 * (1 + cos(pi * p));
            if (types[k] == ITH_DECAY_SQRT)
                shape = 1 - sqrt(p);
            double want = s < 5 ? (double)s / 5 : s < 30 ? 1 : s < 50 ? shape * 0.8 + 0.2 : 0.2;
            assert_rate(&c, s, 50, want);
        }
    }
    /* a decay longer than what is left begins right after the warm-up */
    ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_WSD, 4, 0);
    c.decay_steps = 100;
    assert_rate(&c, 4, 10, 1);
    assert_rate(&c, 7, 10, 0.5);
    c.decay_steps = ITH_CONFIG_UNSET; /* a tenth of 40 */
    assert_rate(&c, 36, 40, 1);
    assert_rate(&c, 38, 40, 0.5);
}

/* The ratio counts optimizer steps, whatever the accumulation, and is rounded up. */
static void test_schedule_warmup_ratio(void **state)
{
    (void)state;
    ith_lr_scheduler_config c = schedule(ITH_SCHEDULE_LINEAR, ITH_CONFIG_UNSET, 0);
    c.warmup_ratio = 0.25;
    assert_int_equal(ith_schedule_warmup(&c, 80), 20);
    assert_rate(&c, 20, 80, 1);
    assert_rate(&c, 19, 80, 0.95);
    assert_int_equal(ith_schedule_warmup(&c, 81), 21);
    c.warmup_ratio = 0;
    assert_int_equal(ith_schedule_warmup(&c, 80), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedule_constant),
        cmocka_unit_test(test_schedule_linear),
        cmocka_unit_test(test_schedule_cosine),
        cmocka_unit_test(test_schedule_warmup_stable_decay),
        cmocka_unit_test(test_schedule_warmup_ratio),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
