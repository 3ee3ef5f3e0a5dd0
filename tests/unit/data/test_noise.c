/* Goal: masks, labels, weights and rows of diffusion training are those of the definition, and do
 * not depend on anything but (seed, epoch, sample, token).
 * Method: small samples with draws worked out by hand; then the drawn noise in the two ways a
 * sample can be batched; then the counts that the rules for leaving rows out must give. */
#include "testing.h"
#include "thirds.h"

#include "base/checked.h"
#include "data/noise.h"

#include <math.h>

static ith_error err;

enum { MAX_LEN = 64, MAX_DOCS = 4 };

/* Documents of which the first prompt tokens are not trained; sample s has ids 10 + 100 s on. */
typedef struct {
    int64_t sample[MAX_DOCS], len[MAX_DOCS], prompt[MAX_DOCS];
    ith_micro_batch batch;
    ith_samples *samples; /* those, and between them others of two tokens */
} clean_batch;

static void clean_begin(clean_batch *c)
{
    memset(c, 0, sizeof *c);
    c->batch.sample = c->sample;
}

static void clean_add(clean_batch *c, int64_t len, int64_t prompt, int64_t sample)
{
    int64_t d = c->batch.num_docs++;
    c->sample[d] = sample;
    c->len[d] = len;
    c->prompt[d] = prompt;
    c->batch.num_tokens += len;
}

static void clean_open(clean_batch *c)
{
    int64_t count = 0, at = 0;
    for (int64_t d = 0; d < c->batch.num_docs; d++)
        count = ith_max_i64(count, c->sample[d] + 1);
    int64_t *lengths = calloc((size_t)count, 8);
    int32_t *ids = calloc((size_t)(2 * count + MAX_DOCS * MAX_LEN), 4);
    float *weights = calloc((size_t)(2 * count + MAX_DOCS * MAX_LEN), 4);
    for (int64_t s = 0; s < count; at += lengths[s++]) {
        int64_t prompt = 1;
        lengths[s] = 2;
        for (int64_t d = 0; d < c->batch.num_docs; d++)
            if (c->sample[d] == s) {
                lengths[s] = c->len[d];
                prompt = c->prompt[d];
            }
        for (int64_t i = 0; i < lengths[s]; i++) {
            ids[at + i] = (int32_t)(10 + s * 100 + i);
            weights[at + i] = i >= prompt ? 1 : 0;
        }
    }
    assert_ok(ith_samples_from_arrays(&c->samples, count, lengths, ids, weights, &err), err);
    free(lengths);
    free(ids);
    free(weights);
}

static void clean_end(clean_batch *c)
{
    ith_samples_close(c->samples);
    c->samples = NULL;
}

static void apply(ith_noiser *n, clean_batch *c, int64_t epoch, int64_t num_micro,
                  ith_micro_batch *out)
{
    if (!c->samples)
        clean_open(c);
    assert_ok(ith_noiser_apply(n, c->samples, &c->batch, epoch, num_micro, out, &err), err);
}

static ith_noise_options options(void)
{
    ith_noise_options o = {.blocks = true,
                           .block_size = 4,
                           .mask_id = 5,
                           .end_id = 2,
                           .low = 0.3,
                           .high = 0.8,
                           .same_token = true,
                           .seed = 7};
    return o;
}

static const ith_batch_limits limits = {/* at most 4 tokens follow */
                                        .max_tokens = MAX_DOCS * (MAX_LEN + 4),
                                        .max_docs = MAX_DOCS,
                                        .max_doc_tokens = MAX_LEN + 4};

static ith_noiser *open_noiser(const ith_noise_options *o)
{
    ith_noiser *n = NULL;
    assert_ok(ith_noiser_create(&n, o, &limits, &err), err);
    return n;
}

/* x0 = [1,2,0,3], one prompt token, t = 0.55, draws 0.10 0.40 0.90 0.20, mask id 4. */
static void test_tokens_by_hand_and_their_complement(void **state)
{
    (void)state;
    ith_noise_options o = options();
    o.mask_id = 4;
    const int32_t x0[] = {1, 2, 0, 3};
    const bool may[] = {false, true, true, true};
    const double u[] = {0.10, 0.40, 0.90, 0.20};
    int32_t stands[4];
    bool hit[4];
    assert_int_equal(ith_noise_tokens(&o, x0, may, u, NULL, 0.55, false, 4, stands, hit), 2);
    assert_memory_equal(stands, ((int32_t[]){-1, 4, -1, 4}), sizeof stands);
    assert_memory_equal(hit, ((bool[]){false, true, false, true}), sizeof hit);
    assert_int_equal(ith_noise_tokens(&o, NULL, may, u, NULL, 0.55, true, 4, stands, hit), 1);
    assert_memory_equal(stands, ((int32_t[]){-1, -1, 4, -1}), sizeof stands);
    assert_memory_equal(hit, ((bool[]){false, false, true, false}), sizeof hit);
    const int32_t masked[] = {4, 2, 4, 3}; /* token 0 may not be masked */
    assert_int_equal(ith_noise_tokens(&o, masked, may, u, NULL, 0.55, false, 4, stands, hit), 3);
    assert_memory_equal(stands, ((int32_t[]){-1, 4, 4, 4}), sizeof stands);
    assert_memory_equal(hit, ((bool[]){false, true, true, true}), sizeof hit);
}

/* Ids 8, 9, 7, 6 would replace tokens 0 to 3: only token 2 is one that may be masked and is not.
 * Its complement is masked there, and replaces 1 and 3 but for the -1. */
static void test_replaced_tokens_by_hand(void **state)
{
    (void)state;
    ith_noise_options o = options();
    o.mask_id = 4;
    const int32_t x0[] = {1, 2, 0, 3}, stray[] = {8, 9, 7, -1};
    const bool may[] = {false, true, true, true};
    const double u[] = {0.10, 0.40, 0.90, 0.20};
    int32_t stands[4];
    bool hit[4];
    assert_int_equal(ith_noise_tokens(&o, x0, may, u, stray, 0.55, false, 4, stands, hit), 3);
    assert_memory_equal(stands, ((int32_t[]){-1, 4, 7, 4}), sizeof stands);
    assert_memory_equal(hit, ((bool[]){false, true, true, true}), sizeof hit);
    assert_int_equal(ith_noise_tokens(&o, x0, may, u, stray, 0.55, true, 4, stands, hit), 2);
    assert_memory_equal(stands, ((int32_t[]){-1, 9, 4, -1}), sizeof stands);
    assert_memory_equal(hit, ((bool[]){false, true, true, false}), sizeof hit);
}

/* Of 40 trained tokens of many epochs: the share replaced among those not masked, never by the mask
 * id, from the whole vocabulary; masks are those of a run without. */
static void test_the_share_of_replaced_tokens(void **state)
{
    (void)state;
    static clean_batch c;
    clean_begin(&c);
    clean_add(&c, 40, 1, 3);
    ith_noise_options plain = options(), edits = options();
    edits.random = 0.25;
    edits.vocab_size = 16;
    plain.keep_all = edits.keep_all = true;
    ith_noiser *a = open_noiser(&plain), *b = open_noiser(&edits);
    int64_t open = 0, replaced = 0, seen[16] = {0};
    for (int64_t epoch = 0; epoch < 400; epoch++) {
        ith_micro_batch without, with;
        apply(a, &c, epoch, 1, &without);
        apply(b, &c, epoch, 1, &with);
        for (int64_t t = 1; t < 40; t++) {
            assert_int_equal(without.ids[t] == 5, with.ids[t] == 5);
            open += without.ids[t] != 5;
            if (with.ids[t] == 5 || with.labels[t] < 0)
                continue;
            assert_int_equal(with.labels[t], 310 + t);
            assert_int_equal(with.ids[40 + t], 310 + t); /* the clean half */
            seen[with.ids[t]]++;
            replaced++;
        }
        assert_true(with.weight_sum == (double)with.num_labels);
    }
    double share = (double)replaced / (double)open;
    if (fabs(share - 0.25) > 5 * sqrt(0.25 * 0.75 / (double)open))
        fail_msg("%g of %d tokens replaced, expected 0.25", share, (int)open);
    for (int id = 0; id < 16; id++)
        if ((seen[id] == 0) != (id == 5))
            fail_msg("id %d stood in for a token %d times", id, (int)seen[id]);
    clean_end(&c);
    ith_noiser_destroy(a);
    ith_noiser_destroy(b);
}

/* States of a decoder that wrote token 3 first, then 1 and 4, then 2; two prompt tokens before. */
static void test_states_of_a_trajectory_by_hand(void **state)
{
    (void)state;
    ith_noise_options o = options();
    const int32_t steps[] = {-1, -1, 1, 2, 0, 1};
    const bool may[] = {false, false, true, true, true, true};
    static const struct {
        int64_t from, to;
        const char *stands, *hit; /* m: the mask, -: its own id; h: to be predicted */
        int64_t hits;
    } cases[] = {{0, 1, "--mmmm", "----h-", 1},
                 {1, 2, "--mm-m", "--h--h", 2},
                 {1, 3, "--mm-m", "--hh-h", 3},
                 {0, 3, "--mmmm", "--hhhh", 4},
                 {2, 3, "---m--", "---h--", 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t stands[6];
        bool hit[6];
        assert_int_equal(
            ith_noise_states(&o, may, steps, cases[i].from, cases[i].to, 6, stands, hit),
            cases[i].hits);
        for (int k = 0; k < 6; k++) {
            assert_int_equal(stands[k], cases[i].stands[k] == 'm' ? 5 : -1);
            assert_int_equal(hit[k], cases[i].hit[k] == 'h');
        }
    }
}

/* The middle of the k-th of n(n+1)/2 equal stretches of [0, 1) gives the k-th pair. */
static void test_pairs_of_states_are_drawn_alike(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 9; n++) {
        int64_t pairs = n * (n + 1) / 2, k = 0, from = -1, to = -1;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = i + 1; j <= n; j++, k++) {
                ith_noise_draw_states(n, ((double)k + 0.5) / (double)pairs, &from, &to);
                if (from != i || to != j)
                    fail_msg("pair %d of %d: %d, %d, expected %d, %d", (int)k, (int)pairs,
                             (int)from, (int)to, (int)i, (int)j);
            }
        assert_int_equal(k, pairs);
        ith_noise_draw_states(n, 1 - 1e-16, &from, &to);
        assert_int_equal(from, n - 1);
        assert_int_equal(to, n);
    }
}

/* 10 tokens in blocks of 4; tokens 5 and 6 masked: one live block, one clean block before it. */
static void test_rows_left_out_are_those_nobody_reads(void **state)
{
    (void)state;
    int32_t x0[10], xt[10], target[10];
    float w[10];
    for (int i = 0; i < 10; i++) {
        x0[i] = 20 + i;
        xt[i] = i == 5 || i == 6 ? 5 : x0[i];
        target[i] = xt[i] == 5 ? x0[i] : -100;
        w[i] = 1;
    }
    for (int keep_all = 0; keep_all < 2; keep_all++) {
        ith_noise_options o = options();
        o.keep_all = keep_all != 0;
        ith_noiser *n = open_noiser(&o);
        ith_micro_batch b;
        ith_noiser_begin(n);
        ith_noiser_add(n, x0, xt, target, w, 10, 3);
        ith_noiser_end(n, &b);
        assert_int_equal(b.num_docs, 1);
        assert_int_equal(b.num_tokens, keep_all ? 20 : 8);
        assert_int_equal(b.noisy[0], keep_all ? 10 : 4);
        assert_int_equal(b.num_labels, 2);
        int at = keep_all ? 5 : 1;
        assert_int_equal(b.position_ids[at], 5);
        assert_int_equal(b.labels[at], 25);
        assert_int_equal(b.ids[at], 5);
        assert_int_equal(b.ids[b.noisy[0]], 20); /* the clean part begins */
        assert_int_equal(b.position_ids[b.noisy[0]], 0);
        ith_noiser_destroy(n);
    }
}

/* Token 4 opens a block; with shifted labels its loss row is the last row of the block before,
 * which has no mask itself and must stay. */
static void test_shifted_labels_keep_the_block_of_the_loss_row(void **state)
{
    (void)state;
    const int32_t x0[] = {20, 21, 22, 23, 24, 25, 26, 27}, xt[] = {20, 21, 22, 23, 5, 25, 26, 27};
    const int32_t target[] = {-100, -100, -100, -100, 24, -100, -100, -100};
    const float w[] = {1, 1, 1, 1, 1, 1, 1, 1};
    ith_noise_options o = options();
    o.same_token = false;
    ith_noiser *n = open_noiser(&o);
    ith_micro_batch b;
    ith_noiser_begin(n);
    ith_noiser_add(n, x0, xt, target, w, 8, 0);
    ith_noiser_end(n, &b);
    assert_int_equal(b.num_tokens, 4); /* the first noisy block, and no clean one before it */
    assert_int_equal(b.noisy[0], 4);
    assert_int_equal(b.labels[3], 24);
    assert_int_equal(b.num_labels, 1);
    ith_noiser_destroy(n);
}

static uint64_t masks_of(const ith_micro_batch *b, int64_t doc)
{
    uint64_t bits = 0;
    for (int32_t t = b->cu_seqlens[doc]; t < b->cu_seqlens[doc + 1]; t++)
        if (b->labels[t] >= 0)
            bits |= 1ULL << b->position_ids[t];
    return bits;
}

static void test_noise_depends_on_epoch_and_sample_alone(void **state)
{
    (void)state;
    ith_noise_options o = options();
    o.keep_all = true;
    clean_batch both, one;
    clean_begin(&both);
    clean_add(&both, 40, 5, 8);
    clean_add(&both, 60, 9, 3);
    clean_begin(&one);
    clean_add(&one, 60, 9, 3);
    ith_noiser *n = open_noiser(&o), *again = open_noiser(&o);
    ith_micro_batch a, b, c;
    apply(n, &both, 4, 1, &a);
    apply(again, &one, 4, 1, &b);
    uint64_t first = masks_of(&a, 0), second = masks_of(&a, 1);
    assert_true(first != 0 && second != 0);
    assert_true(second == masks_of(&b, 0));
    assert_int_equal(second & 0x1ff, 0); /* the prompt */
    apply(again, &one, 5, 1, &c);
    assert_true(second != masks_of(&c, 0));
    clean_end(&both);
    clean_end(&one);
    ith_noiser_destroy(n);
    ith_noiser_destroy(again);
}

/* Ratios follow the range: of 51 tokens that may be masked, over many samples. */
static void test_mask_ratio_stays_in_its_range(void **state)
{
    (void)state;
    ith_noise_options o = options();
    ith_noiser *n = open_noiser(&o);
    double sum = 0;
    enum { SAMPLES = 400 };
    for (int64_t s = 0; s < SAMPLES; s++) {
        clean_batch c;
        ith_micro_batch b;
        clean_begin(&c);
        clean_add(&c, 60, 9, s);
        apply(n, &c, 0, 1, &b);
        sum += (double)b.num_labels / 51;
        clean_end(&c);
    }
    if (fabs(sum / SAMPLES - 0.55) > 0.02)
        fail_msg("mean ratio %g, expected 0.55", sum / SAMPLES);
    ith_noiser_destroy(n);
}

/* Answer of 3 tokens after a prompt of 5, everything masked. */
static void test_padding_trains_what_it_says(void **state)
{
    (void)state;
    static const struct {
        ith_noise_padding padding;
        int64_t labels;
    } cases[] = {{ITH_PAD_NONE, 3}, {ITH_PAD_END, 4}, {ITH_PAD_BLOCK, 7}, {ITH_PAD_FULL, 11}};
    for (int i = 0; i < 4; i++) {
        ith_noise_options o = options();
        o.low = o.high = 1;
        o.padding = cases[i].padding;
        o.full_len = 16;
        ith_noiser *n = open_noiser(&o);
        clean_batch c;
        ith_micro_batch b;
        clean_begin(&c);
        clean_add(&c, 8, 5, 0);
        apply(n, &c, 0, 1, &b);
        if (b.num_labels != cases[i].labels)
            fail_msg("padding %d: %d labels, expected %d", i, (int)b.num_labels,
                     (int)cases[i].labels);
        clean_end(&c);
        if (i > 0)
            assert_int_equal(b.labels[b.noisy[0] - 1], 2); /* the last one is an end token */
        ith_noiser_destroy(n);
    }
}

static void test_complement_masks_every_answer_token_once(void **state)
{
    (void)state;
    ith_noise_options o = options();
    o.complementary = o.keep_all = true;
    ith_noiser *n = open_noiser(&o);
    clean_batch c;
    ith_micro_batch b;
    clean_begin(&c);
    clean_add(&c, 40, 5, 11);
    apply(n, &c, 0, 1, &b);
    assert_int_equal(b.num_docs, 2);
    uint64_t first = masks_of(&b, 0), second = masks_of(&b, 1),
             answer = ((1ULL << 40) - 1) & ~0x1fULL;
    assert_true((first & second) == 0);
    assert_true((first | second) == answer);
    assert_int_equal(b.num_labels, 35);
    clean_end(&c);
    ith_noiser_destroy(n);
}

static void check_sum(const char *what, double got, double wanted)
{
    if (!(fabs(got - wanted) <= 1e-5 * fabs(wanted)))
        fail_msg("%s: %.9g, expected %.9g", what, got, wanted);
}

static double sum_of(const ith_micro_batch *b)
{
    double sum = 0;
    for (int64_t i = 0; i < b->num_tokens; i++)
        sum += (double)b->weights[i];
    return sum;
}

static void test_weights_and_their_part_of_c(void **state)
{
    (void)state;
    ith_noise_options o = options();
    o.low = o.high = 0.5;
    clean_batch c;
    clean_begin(&c);
    clean_add(&c, 60, 9, 0);
    ith_micro_batch b;
    ith_noiser *n = open_noiser(&o);
    apply(n, &c, 0, 4, &b);
    int64_t masked = b.num_labels;
    check_sum("one: C counts masked tokens", b.weight_sum, (double)masked);
    ith_noiser_destroy(n);
    o.weight = ITH_WEIGHT_INVERSE;
    n = open_noiser(&o);
    apply(n, &c, 0, 4, &b);
    check_sum("inverse: C counts answer tokens", b.weight_sum, 51);
    check_sum("inverse: a masked token weighs 1/t", sum_of(&b), 2.0 * (double)masked);
    ith_noiser_destroy(n);
    o.weight = ITH_WEIGHT_ONE;
    o.per_micro_batch = true;
    n = open_noiser(&o);
    apply(n, &c, 0, 4, &b);
    check_sum("per micro-batch: part of C", b.weight_sum, 0.25);
    check_sum("per micro-batch: weights", sum_of(&b), 0.25);
    clean_end(&c);
    ith_noiser_destroy(n);
}

/* Four answer tokens, a share of 0.8, two of them masked with losses 1 and 3 (cases S79): the mean
 * over masked tokens, and the one over answer tokens with weights 1/share. */
static void test_denominators_by_hand(void **state)
{
    (void)state;
    static const struct {
        ith_noise_weight weight;
        double loss;
    } cases[] = {{ITH_WEIGHT_ONE, 2.0}, {ITH_WEIGHT_INVERSE, 1.25}};
    for (int i = 0; i < 2; i++) {
        ith_noise_options o = options();
        o.low = o.high = 0.8;
        o.weight = cases[i].weight;
        ith_noiser *n = open_noiser(&o);
        clean_batch c;
        ith_micro_batch b = {0};
        clean_begin(&c);
        clean_add(&c, 9, 5, 0);
        for (int64_t epoch = 0; epoch < 200 && b.num_labels != 2; epoch++)
            apply(n, &c, epoch, 1, &b);
        assert_int_equal(b.num_labels, 2);
        double sum = 0, loss = 1;
        for (int64_t t = 0; t < b.num_tokens; t++)
            if (b.labels[t] >= 0) {
                sum += loss * (double)b.weights[t];
                loss = 3;
            }
        check_sum("loss", sum / b.weight_sum, cases[i].loss);
        clean_end(&c);
        ith_noiser_destroy(n);
    }
}

static void test_nothing_masked_is_an_empty_batch(void **state)
{
    (void)state;
    for (int mode = 0; mode < 3; mode++) {
        ith_noise_options o = options();
        o.low = o.high = 0;
        o.per_micro_batch = mode == 1;
        o.weight = mode == 2 ? ITH_WEIGHT_INVERSE : ITH_WEIGHT_ONE;
        ith_noiser *n = open_noiser(&o);
        clean_batch c;
        ith_micro_batch b;
        clean_begin(&c);
        clean_add(&c, 6, 5, 0);
        apply(n, &c, 0, 1, &b);
        assert_int_equal(b.num_tokens, 0);
        assert_int_equal(b.num_docs, 0);
        assert_true(isfinite(b.weight_sum));
        clean_end(&c);
        ith_noiser_destroy(n);
    }
}

static void test_limits_hold_for_every_option(void **state)
{
    (void)state;
    for (int i = 0; i < 32; i++) {
        ith_noise_options o = options();
        o.low = o.high = 1;
        o.padding = (ith_noise_padding)(i & 3);
        o.full_len = MAX_LEN;
        o.complementary = i & 4;
        o.blocks = i & 8;
        o.keep_all = i & 16;
        ith_batch_limits padded = {.max_tokens = ith_noise_padded(&o, 2) +
                                                 (MAX_DOCS - 1) * ith_noise_padded(&o, MAX_LEN),
                                   .max_docs = MAX_DOCS,
                                   .max_doc_tokens = ith_noise_padded(&o, MAX_LEN)};
        ith_noiser *n = NULL;
        assert_ok(ith_noiser_create(&n, &o, &padded, &err), err);
        ith_batch_limits l = ith_noiser_limits(n);
        clean_batch c;
        ith_micro_batch b;
        clean_begin(&c);
        for (int d = 0; d < MAX_DOCS; d++)
            clean_add(&c, d ? MAX_LEN : 2, 1, d);
        apply(n, &c, 0, 1, &b);
        assert_true(b.num_tokens <= l.max_tokens && b.num_docs <= l.max_docs &&
                    b.num_labels <= l.max_labels);
        for (int64_t d = 0; d < b.num_docs; d++)
            assert_true(b.cu_seqlens[d + 1] - b.cu_seqlens[d] <= l.max_doc_tokens);
        clean_end(&c);
        ith_noiser_destroy(n);
    }
}

/* Rows of rank r of three against those of `all`; returns the ids it read. */
static int64_t check_slice(ith_noise_options o, clean_batch *c, int64_t r,
                           const ith_micro_batch *all, bool whole)
{
    o.own_rows = third_of_each_half;
    o.own_arg = &r;
    ith_noiser *n = open_noiser(&o);
    ith_micro_batch b;
    int64_t own[4] = {0, all->num_tokens, 0, 0};
    if (!whole)
        third_of_each_half(&r, all->num_tokens, own);
    c->batch.whole = whole;
    apply(n, c, 6, 4, &b);
    c->batch.whole = false;
    assert_int_equal(b.num_tokens, all->num_tokens);
    assert_int_equal(b.num_labels, all->num_labels);
    assert_int_equal(b.num_docs, all->num_docs);
    assert_int_equal(b.whole, whole);
    assert_float_equal(b.weight_sum, all->weight_sum, 0);
    assert_memory_equal(b.cu_seqlens, all->cu_seqlens, (size_t)(all->num_docs + 1) * 4);
    assert_memory_equal(b.position_ids, all->position_ids, (size_t)all->num_tokens * 4);
    if (o.blocks)
        assert_memory_equal(b.noisy, all->noisy, (size_t)all->num_docs * 4);
    for (int i = 0; i < 4; i += 2) {
        size_t bytes = (size_t)(own[i + 1] - own[i]) * 4;
        assert_memory_equal(b.ids + own[i], all->ids + own[i], bytes);
        assert_memory_equal(b.labels + own[i], all->labels + own[i], bytes);
        assert_memory_equal(b.weights + own[i], all->weights + own[i], bytes);
    }
    assert_float_equal(ith_noiser_weight(n, c->samples, &c->batch, 6, 4), all->weight_sum, 0);
    int64_t read = b.num_read;
    ith_noiser_destroy(n);
    return read;
}

/* Ranks that share a batch lay it out alike, have the rows of one rank, and read each id where its
 * row is; one that has the batch alone has all of it. */
static void test_ranks_read_the_ids_of_their_rows(void **state)
{
    (void)state;
    for (int i = 0; i < 48; i++) {
        ith_noise_options o = options();
        o.padding = (ith_noise_padding)(i & 1 ? ITH_PAD_BLOCK : ITH_PAD_NONE);
        o.complementary = i & 2;
        o.blocks = i & 4;
        o.same_token = i & 8;
        o.random = i & 16 ? 0.3 : 0;
        o.vocab_size = 400;
        o.weight = i >= 32 ? ITH_WEIGHT_INVERSE : ITH_WEIGHT_ONE;
        o.per_micro_batch = i >= 40;
        clean_batch c;
        clean_begin(&c);
        clean_add(&c, 41, 5, 2);
        clean_add(&c, 7, 3, 0);
        clean_add(&c, 60, 30, 1);
        ith_noiser *n = open_noiser(&o);
        ith_micro_batch all;
        apply(n, &c, 6, 4, &all);
        int64_t read = 0;
        for (int64_t r = 0; r < 3; r++) {
            int64_t mine = check_slice(o, &c, r, &all, false);
            assert_true(mine > 0 && mine < all.num_read);
            read += mine;
        }
        assert_int_equal(read, all.num_read);
        assert_int_equal(check_slice(o, &c, 1, &all, true), all.num_read);
        clean_end(&c);
        ith_noiser_destroy(n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens_by_hand_and_their_complement),
        cmocka_unit_test(test_replaced_tokens_by_hand),
        cmocka_unit_test(test_the_share_of_replaced_tokens),
        cmocka_unit_test(test_states_of_a_trajectory_by_hand),
        cmocka_unit_test(test_pairs_of_states_are_drawn_alike),
        cmocka_unit_test(test_rows_left_out_are_those_nobody_reads),
        cmocka_unit_test(test_shifted_labels_keep_the_block_of_the_loss_row),
        cmocka_unit_test(test_noise_depends_on_epoch_and_sample_alone),
        cmocka_unit_test(test_mask_ratio_stays_in_its_range),
        cmocka_unit_test(test_padding_trains_what_it_says),
        cmocka_unit_test(test_complement_masks_every_answer_token_once),
        cmocka_unit_test(test_weights_and_their_part_of_c),
        cmocka_unit_test(test_denominators_by_hand),
        cmocka_unit_test(test_nothing_masked_is_an_empty_batch),
        cmocka_unit_test(test_limits_hold_for_every_option),
        cmocka_unit_test(test_ranks_read_the_ids_of_their_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
