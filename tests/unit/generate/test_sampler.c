/* test_sampler.c - the next token out of logits: greedy, filters in their order, draws. */
#include "testing.h"

#include <math.h>

#include "generate/sampler.h"

#define V 8

static ith_sampler sampler;
static ith_error err;

static int setup(void **state)
{
    (void)state;
    assert_ok(ith_sampler_init(&sampler, V, &err), err);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ith_sampler_deinit(&sampler);
    return 0;
}

static const ith_sampling greedy = {false, 1, 0, 1, 0, 1, 0};
static const ith_sampling plain = {true, 1, 0, 1, 0, 1, 5};

static int32_t next(const ith_sampling *how, const float *logits, const int32_t *past, int64_t n,
                    uint64_t stream)
{
    int32_t id = -1;
    assert_ok(ith_sampler_next(&sampler, how, logits, past, n, stream, &id, &err), err);
    return id;
}

/* Which ids come out of many draws, and how often. */
static void draw_many(const ith_sampling *how, const float *logits, int draws, int *counts)
{
    memset(counts, 0, V * sizeof *counts);
    for (int i = 0; i < draws; i++)
        counts[next(how, logits, NULL, 0, (uint64_t)i)]++;
}

static void assert_only(const int *counts, const char *want, const char *what)
{
    char got[V + 1];
    for (int i = 0; i < V; i++)
        got[i] = counts[i] ? 'x' : '.';
    got[V] = '\0';
    if (strcmp(got, want) != 0)
        fail_msg("%s: ids drawn %s, expected %s", what, got, want);
}

/* softmax of log(p) is p */
static void logs(const double *p, float *out)
{
    for (int i = 0; i < V; i++)
        out[i] = p[i] > 0 ? (float)log(p[i]) : -INFINITY;
}

static void test_sampler_greedy_takes_the_largest_and_the_first_of_equals(void **state)
{
    (void)state;
    static const float logits[V] = {0, 3, -1, 5, 5, 2, 5, 1};
    assert_int_equal(next(&greedy, logits, NULL, 0, 0), 3);
    ith_sampling cold = plain;
    cold.temperature = 0;
    assert_int_equal(next(&cold, logits, NULL, 0, 9), 3);
    static const float holes[V] = {NAN, -INFINITY, -7, NAN, -3, INFINITY, -3, NAN};
    assert_int_equal(next(&greedy, holes, NULL, 0, 0), 4);
}

static void test_sampler_fails_without_a_finite_logit(void **state)
{
    (void)state;
    float none[V];
    int32_t id = 77;
    for (int i = 0; i < V; i++)
        none[i] = i % 2 ? NAN : -INFINITY;
    assert_fails(ith_sampler_next(&sampler, &greedy, none, NULL, 0, 0, &id, &err), err, ITH_ERR_RUN,
                 "finite");
    assert_int_equal(id, 77);
}

/* Frequencies of 20,000 draws within 4 standard deviations of p. */
static void test_sampler_draws_the_distribution(void **state)
{
    (void)state;
    static const double p[V] = {0.4, 0.05, 0.2, 0, 0.1, 0.15, 0.07, 0.03};
    float logits[V];
    int counts[V];
    logs(p, logits);
    draw_many(&plain, logits, 20000, counts);
    for (int i = 0; i < V; i++) {
        double want = 20000 * p[i], sd = sqrt(want * (1 - p[i]));
        if (fabs(counts[i] - want) > 4 * sd + 1e-9)
            fail_msg("id %d: drawn %d times, expected %.0f +- %.0f", i, counts[i], want, sd);
    }
}

/* Temperature divides logits: at 0.5 probabilities are squared and normalized. */
static void test_sampler_temperature(void **state)
{
    (void)state;
    static const double p[V] = {0.5, 0.25, 0.25, 0, 0, 0, 0, 0};
    float logits[V];
    int counts[V];
    logs(p, logits);
    ith_sampling how = plain;
    how.temperature = 0.5;
    draw_many(&how, logits, 20000, counts);
    double want = 20000 * 0.25 / 0.375;
    if (fabs(counts[0] - want) > 300)
        fail_msg("id 0 drawn %d times, expected %.0f", counts[0], want);
}

static void test_sampler_filters(void **state)
{
    (void)state;
    static const double p[V] = {0.05, 0.3, 0.02, 0.25, 0.2, 0.03, 0.05, 0.1};
    float logits[V];
    int counts[V];
    logs(p, logits);
    ith_sampling how = plain;
    how.top_k = 3;
    draw_many(&how, logits, 2000, counts);
    assert_only(counts, ".x.xx...", "top-k 3");
    how = plain;
    how.top_k = 1;
    draw_many(&how, logits, 50, counts);
    assert_only(counts, ".x......", "top-k 1");
    how = plain;
    how.top_p = 0.5; /* 0.3 + 0.25 reaches it */
    draw_many(&how, logits, 2000, counts);
    assert_only(counts, ".x.x....", "top-p 0.5");
    how.top_p = 0.56;
    draw_many(&how, logits, 2000, counts);
    assert_only(counts, ".x.xx...", "top-p 0.56");
    how.top_p = 1e-9; /* never nothing */
    draw_many(&how, logits, 50, counts);
    assert_only(counts, ".x......", "top-p 1e-9");
    how = plain;
    how.min_p = 0.5; /* of the largest: at least 0.15 */
    draw_many(&how, logits, 2000, counts);
    assert_only(counts, ".x.xx...", "min-p 0.5");
}

/* Top-k first, then top-p over what is left: of {0.4, 0.3} renormalized to {0.57, 0.43}, top-p 0.5
 * keeps one; the other way round both would stay. */
static void test_sampler_order_of_filters(void **state)
{
    (void)state;
    static const double p[V] = {0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0};
    float logits[V];
    int counts[V];
    logs(p, logits);
    ith_sampling how = plain;
    how.top_k = 2;
    how.top_p = 0.5;
    draw_many(&how, logits, 500, counts);
    assert_only(counts, "x.......", "top-k 2, top-p 0.5");
    /* temperature before top-p: at 2 the first has 0.32, at 1 0.4 */
    how = plain;
    how.temperature = 2;
    how.top_p = 0.39;
    draw_many(&how, logits, 2000, counts);
    assert_only(counts, "xx......", "temperature 2, top-p 0.39");
}

/* Seen ids: positive logits divided, negative multiplied, once however often they were seen. */
static void test_sampler_repetition_penalty(void **state)
{
    (void)state;
    static const float logits[V] = {1, 4, 3, -1, -3, 0, 0, 0};
    static const int32_t past[] = {1, 1, 1};
    ith_sampling how = greedy;
    how.repetition_penalty =
        1.2; /* 4 / 1.2 = 3.33: still first; three times over it would not be */
    assert_int_equal(next(&how, logits, past, 3, 0), 1);
    how.repetition_penalty = 1.5; /* 2.67 */
    assert_int_equal(next(&how, logits, past, 1, 0), 2);
    static const float negative[V] = {-1, -2, -9, -9, -9, -9, -9, -9};
    static const int32_t zero[] = {0};
    how.repetition_penalty = 3; /* -3 */
    assert_int_equal(next(&how, negative, zero, 1, 0), 1);
    static const int32_t odd[] = {-1, V, 100};
    assert_int_equal(next(&how, logits, odd, 3, 0), 1);
}

/* A draw depends on seed, stream and position alone. */
static void test_sampler_draws_are_keyed(void **state)
{
    (void)state;
    static const float logits[V] = {0, 0, 0, 0, 0, 0, 0, 0};
    int32_t past[64] = {0}, first[64];
    int same_stream = 0, same_seed = 0;
    ith_sampling other = plain;
    other.seed = 6;
    for (int i = 0; i < 64; i++)
        first[i] = next(&plain, logits, past, i, 3);
    for (int i = 63; i >= 0; i--) {
        assert_int_equal(next(&plain, logits, past, i, 3), first[i]);
        same_stream += next(&plain, logits, past, i, 4) == first[i];
        same_seed += next(&other, logits, past, i, 3) == first[i];
    }
    if (same_stream > 24 || same_seed > 24) /* 8 expected */
        fail_msg("%d of 64 draws equal in another stream, %d with another seed", same_stream,
                 same_seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sampler_greedy_takes_the_largest_and_the_first_of_equals),
        cmocka_unit_test(test_sampler_fails_without_a_finite_logit),
        cmocka_unit_test(test_sampler_draws_the_distribution),
        cmocka_unit_test(test_sampler_temperature),
        cmocka_unit_test(test_sampler_filters),
        cmocka_unit_test(test_sampler_order_of_filters),
        cmocka_unit_test(test_sampler_repetition_penalty),
        cmocka_unit_test(test_sampler_draws_are_keyed),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
