/* test_decoder.c - decoding with a cache is the full forward, row by row; answers do not depend on
 * the batch they are in. */
#include "e2e/small_dir.h"

#include <math.h>

#include "generate/decoder.h"

static char *base;

#define LENGTH 40

static void open_decoder(ith_decoder *d, const char *model, int64_t batch, int64_t max_append,
                         ith_error *err)
{
    ith_decoder_options o = {.device = ITH_USE_CPU,
                             .threads = 2,
                             .set_dtype = true,
                             .dtype = ITH_F32,
                             .batch = batch,
                             .capacity = LENGTH + 24,
                             .max_append = max_append};
    assert_ok(ith_decoder_open(d, small_join(base, model), &o, err), *err);
}

static void make_ids(int64_t doc, int32_t *ids)
{
    for (int64_t i = 0; i < LENGTH; i++)
        ids[i] = (int32_t)(ith_rng_uniform(1, (uint64_t)doc, (uint64_t)i) * 320.0);
}

static void assert_logits(const float *got, const float *want, int64_t n, const char *what,
                          int64_t at)
{
    double largest = 0, worst = 0;
    for (int64_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
        worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
    }
    if (!(worst <= 1e-5 * largest))
        fail_msg("%s, position %lld: logits differ by %.3g of %.3g", what, (long long)at, worst,
                 largest);
}

static const char *const models[] = {"dense", "moe", "yarn"};

/* Logits after each prefix, computed by a prefill of the whole prefix (no cache is read), against
 * one token at a time, and against chunks of 7 tokens. */
static void test_decoder_cache_equals_no_cache(void **state)
{
    (void)state;
    for (int m = 0; m < 3; m++) {
        ith_error err = {0};
        int32_t ids[LENGTH];
        make_ids(m, ids);
        ith_decoder full, steps, chunks;
        open_decoder(&full, models[m], 1, LENGTH, &err);
        open_decoder(&steps, models[m], 1, LENGTH, &err);
        open_decoder(&chunks, models[m], 1, LENGTH, &err);
        for (int64_t n = 1; n <= LENGTH; n++) {
            const int32_t *at = ids, *one = ids + n - 1, *seven = ids + n - 7;
            int64_t all = n, single = 1, chunk = 7;
            ith_decoder_reset(&full);
            assert_ok(ith_decoder_append(&full, &at, &all), err);
            assert_ok(ith_decoder_append(&steps, &one, &single), err);
            assert_logits(steps.host_logits, full.host_logits, 320, models[m], n - 1);
            if (n % 7 == 0) {
                assert_ok(ith_decoder_append(&chunks, &seven, &chunk), err);
                assert_logits(chunks.host_logits, full.host_logits, 320, "chunks", n - 1);
            }
        }
        /* cut back, and the same tokens again */
        ith_decoder_truncate(&steps, 0, 11);
        const int32_t *again = ids + 11;
        int64_t rest = LENGTH - 11;
        assert_ok(ith_decoder_append(&steps, &again, &rest), err);
        assert_logits(steps.host_logits, full.host_logits, 320, "after a cut", LENGTH - 1);
        ith_decoder_close(&full);
        ith_decoder_close(&steps);
        ith_decoder_close(&chunks);
    }
}

/* ---- answers ---- */

typedef struct {
    int32_t ids[4][64];
    int64_t count[4];
    bool stopped[4];
    int64_t limit; /* false after so many tokens of sequence 0; 0: never */
} answers;

static bool on_token(void *arg, int64_t i, int32_t id, bool is_stop)
{
    answers *a = arg;
    assert_true(a->count[i] < 64 && !a->stopped[i]);
    a->ids[i][a->count[i]++] = id;
    a->stopped[i] = is_stop;
    return a->limit == 0 || i != 0 || a->count[0] < a->limit;
}

static const ith_sampling greedy = {false, 1, 0, 1, 0, 1, 0};
static const ith_sampling random_draws = {true, 1.5, 50, 0.98, 0.01, 1.1, 11};

static answers answer(ith_decoder *d, int64_t first, int64_t num, ith_generate_options how,
                      int64_t limit)
{
    ith_error err = {0};
    answers *a = ith_calloc(1, sizeof *a), out;
    int32_t ids[4][LENGTH];
    ith_ids prompts[4] = {{0}};
    assert_non_null(a);
    a->limit = limit;
    for (int64_t i = 0; i < num; i++) {
        make_ids((first + i) % 3, ids[i]); /* 0 and 3 are the same prompt */
        prompts[i] = (ith_ids){.ids = ids[i], .count = 5 + 9 * ((first + i) % 3)};
    }
    how.token = on_token;
    how.arg = a;
    how.first_stream = (uint64_t)first;
    assert_ok(ith_decoder_generate(d, prompts, num, &how, &err), err);
    out = *a;
    ith_free(a);
    return out;
}

static void assert_same_answer(const answers *a, int64_t i, const answers *b, int64_t k,
                               const char *what)
{
    if (a->count[i] != b->count[k])
        fail_msg("%s: %lld and %lld tokens", what, (long long)a->count[i], (long long)b->count[k]);
    for (int64_t t = 0; t < a->count[i]; t++)
        if (a->ids[i][t] != b->ids[k][t])
            fail_msg("%s: token %lld is %d and %d", what, (long long)t, a->ids[i][t], b->ids[k][t]);
}

/* Three prompts of different lengths in one batch of four = each alone, greedy and drawn; the same
 * prompt in another place, another time, gives the same greedy answer. */
static void test_decoder_batch_equals_single(void **state)
{
    (void)state;
    for (int m = 0; m < 2; m++)
        for (int drawn = 0; drawn < 2; drawn++) {
            ith_error err = {0};
            ith_generate_options how = {.sampling = drawn ? random_draws : greedy, .max_new = 17};
            ith_decoder four, one;
            open_decoder(&four, models[m], 4, 4 * LENGTH, &err);
            open_decoder(&one, models[m], 1, LENGTH, &err);
            answers batch = answer(&four, 0, 3, how, 0);
            for (int64_t i = 0; i < 3; i++) {
                answers alone = answer(&one, i, 1, how, 0);
                assert_int_equal(alone.count[0], 17);
                assert_same_answer(&batch, i, &alone, 0, models[m]);
            }
            answers again = answer(&four, 0, 4, how, 0);
            for (int64_t i = 0; i < 3; i++)
                assert_same_answer(&again, i, &batch, i, "again");
            if (!drawn)
                assert_same_answer(&again, 3, &batch, 0, "repeated prompt");
            ith_decoder_close(&four);
            ith_decoder_close(&one);
        }
}

/* A stop id ends its sequence and is handed over; the others go on as if alone. */
static void test_decoder_stops(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_generate_options how = {.sampling = greedy, .max_new = 20};
    ith_decoder d;
    open_decoder(&d, "dense", 3, 3 * LENGTH, &err);
    answers free_run = answer(&d, 0, 3, how, 0);
    int32_t stop[2] = {free_run.ids[1][4], 319};
    how.stop_ids = stop;
    how.num_stop_ids = 2;
    answers stopped = answer(&d, 0, 3, how, 0);
    for (int64_t i = 0; i < 3; i++) {
        int64_t want = 0;
        while (want < 20 && free_run.ids[i][want] != stop[0] && free_run.ids[i][want] != 319)
            want++;
        want = want < 20 ? want + 1 : 20;
        assert_int_equal(stopped.count[i], want);
        assert_memory_equal(stopped.ids[i], free_run.ids[i], (size_t)want * 4);
    }
    assert_true(stopped.stopped[1] && stopped.count[1] <= 5);
    how.num_stop_ids = 0;
    answers cut = answer(&d, 0, 3, how, 6); /* the caller wants no more of sequence 0 */
    assert_int_equal(cut.count[0], 6);
    assert_same_answer(&cut, 1, &free_run, 1, "beside one that was cut");
    assert_same_answer(&cut, 2, &free_run, 2, "beside one that was cut");
    ith_decoder_close(&d);
}

/* An answer ends where the cache is full, with every token right up to there. */
static void test_decoder_ends_at_the_capacity(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_generate_options how = {.sampling = greedy, .max_new = 60};
    ith_decoder d;
    open_decoder(&d, "dense", 3, 3 * LENGTH, &err);
    answers a = answer(&d, 0, 3, how, 0);
    for (int64_t i = 0; i < 3; i++) {
        int64_t room = LENGTH + 24 - (5 + 9 * i);
        assert_int_equal(a.count[i], room < 60 ? room : 60);
    }
    how.max_new = 17;
    answers b = answer(&d, 0, 3, how, 0);
    for (int64_t i = 0; i < 3; i++)
        assert_memory_equal(a.ids[i], b.ids[i], 17 * 4);
    ith_decoder_close(&d);
}

/* Memory of the decoder is planned: no allocation while tokens come. */
static void test_decoder_append_allocates_nothing(void **state)
{
    (void)state;
    ith_error err = {0};
    int32_t ids[LENGTH];
    make_ids(0, ids);
    ith_decoder d;
    open_decoder(&d, "moe", 2, 2 * LENGTH, &err);
    const int32_t *both[2] = {ids, ids + 3};
    int64_t counts[2] = {9, 4}, one[2] = {1, 1}, before = ith_alloc_count();
    assert_ok(ith_decoder_append(&d, both, counts), err);
    for (int i = 0; i < 10; i++)
        assert_ok(ith_decoder_append(&d, both, one), err);
    assert_int_equal(ith_alloc_count(), before);
    ith_decoder_close(&d);
}

static int setup(void **state)
{
    (void)state;
    base = small_setup("decoder");
    small_shape dense = small_dense, moe = small_moe, yarn = small_tied;
    dense.vocab = moe.vocab = yarn.vocab = 320;
    yarn.more = ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
                "\"original_max_position_embeddings\": 1024}";
    small_make_model(small_join(base, "dense"), &dense, &(small_layout){.dtype = ITH_F32});
    small_make_model(small_join(base, "moe"), &moe, &(small_layout){.dtype = ITH_F32});
    small_make_model(small_join(base, "yarn"), &yarn, &(small_layout){.dtype = ITH_F32});
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_teardown(base);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decoder_cache_equals_no_cache),
        cmocka_unit_test(test_decoder_batch_equals_single),
        cmocka_unit_test(test_decoder_stops),
        cmocka_unit_test(test_decoder_ends_at_the_capacity),
        cmocka_unit_test(test_decoder_append_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
