/* Batching: which samples go together, the packed arrays, ends of epochs, ranks and resume. Samples
 * are made from lengths; composition rules are those of LlamaFactory v1. */
#include "testing.h"
#include "thirds.h"

#include <math.h>

#include "base/checked.h"
#include "base/rng.h"
#include "data/batching.h"
#include "data/best_fit.h"

#define MAX_SAMPLES 4096

static ith_error err;

/* Sample i has lengths[i] ids i * 100, i * 100 + 1, ...: ids tell where a token came from. */
static ith_samples *make_samples(const int64_t *lengths, int64_t count)
{
    int64_t total = 0, at = 0;
    for (int64_t i = 0; i < count; i++)
        total += lengths[i];
    int32_t *ids = calloc((size_t)total, 4);
    for (int64_t i = 0; i < count; i++)
        for (int64_t t = 0; t < lengths[i]; t++)
            ids[at++] = (int32_t)(i * 100 + t);
    ith_samples *samples = NULL;
    assert_ok(ith_samples_from_arrays(&samples, count, lengths, ids, NULL, &err), err);
    free(ids);
    return samples;
}

static ith_batcher_options options_of(ith_batching strategy, int64_t cutoff, int64_t m,
                                      int64_t accum)
{
    return (ith_batcher_options){.strategy = strategy,
                                 .micro_batch_size = m,
                                 .cutoff_len = cutoff,
                                 .grad_accum = accum,
                                 .dp_size = 1,
                                 .seed = 7,
                                 .num_epochs = 1};
}

static ith_batcher *make_batcher(const ith_samples *samples, ith_batcher_options o)
{
    ith_batcher *b = NULL;
    assert_ok(ith_batcher_create(&b, samples, &o, &err), err);
    return b;
}

/* "0,1,2 3" : entries of each micro-batch of the current step. */
static void step_text(ith_batcher *b, const ith_batch_step *step, ith_buf *out)
{
    for (int64_t j = 0; j < step->num_micro; j++) {
        ith_micro_batch mb;
        assert_ok(ith_batcher_fill(b, j, &mb, &err), err);
        for (int64_t d = 0; d < mb.num_docs; d++)
            ith_buf_printf(out, "%s%lld", d ? "," : (j ? " " : ""), (long long)mb.sample[d]);
        if (mb.num_docs == 0)
            ith_buf_puts(out, j ? " -" : "-");
    }
}

/* All steps that are left, joined by " | "; at most `most` of them. */
static char *run_text(ith_batcher *b, int64_t most)
{
    static ith_buf out;
    ith_buf_clear(&out);
    ith_buf_puts(&out, "");
    ith_batch_step step;
    for (int64_t i = 0; i < most && ith_batcher_next(b, &step); i++) {
        ith_buf_puts(&out, i ? " | " : "");
        step_text(b, &step, &out);
    }
    return out.data;
}

static void expect_run(const int64_t *lengths, int64_t count, ith_batcher_options o, int64_t most,
                       const char *expected)
{
    ith_samples *samples = make_samples(lengths, count);
    ith_batcher *b = make_batcher(samples, o);
    assert_string_equal(run_text(b, most), expected);
    ith_batcher_destroy(b);
    ith_samples_close(samples);
}

#define COUNT(table) ((int64_t)(sizeof(table) / sizeof(table)[0]))

/* The layout of packed documents (cases S31, S38): positions restart, labels are shifted within a
 * document, the last row of each has none. */
static void test_fill_packs_documents_with_own_positions_and_labels(void **state)
{
    (void)state;
    const int64_t lengths[] = {3, 2};
    const int32_t ids[] = {1, 2, 3, 4, 5};
    ith_samples *samples = NULL;
    assert_ok(ith_samples_from_arrays(&samples, 2, lengths, ids, NULL, &err), err);
    ith_batcher *b = make_batcher(samples, options_of(ITH_BATCHING_PADDING_FREE, 8, 2, 1));
    ith_batch_step step;
    ith_micro_batch mb;
    assert_true(ith_batcher_next(b, &step));
    assert_ok(ith_batcher_fill(b, 0, &mb, &err), err);
    const int32_t positions[] = {0, 1, 2, 0, 1}, labels[] = {2, 3, -100, 5, -100};
    const int32_t cu_seqlens[] = {0, 3, 5};
    const float weights[] = {1, 1, 0, 1, 0};
    assert_int_equal(mb.num_tokens, 5);
    assert_int_equal(mb.num_docs, 2);
    assert_int_equal(mb.num_labels, 3);
    assert_memory_equal(mb.ids, ids, sizeof ids);
    assert_memory_equal(mb.position_ids, positions, sizeof positions);
    assert_memory_equal(mb.labels, labels, sizeof labels);
    assert_memory_equal(mb.cu_seqlens, cu_seqlens, sizeof cu_seqlens);
    assert_memory_equal(mb.weights, weights, sizeof weights);
    assert_float_equal(mb.weight_sum, 3, 0);
    assert_int_equal(step.num_labels, 3);
    assert_float_equal(step.weight_sum, 3, 0);
    ith_batcher_destroy(b);
    ith_samples_close(samples);
}

/* Weights follow their targets; the weight of a first token has no row that predicts it. */
static void test_fill_weights_belong_to_targets(void **state)
{
    (void)state;
    const int64_t lengths[] = {5, 3};
    const int32_t ids[] = {10, 11, 12, 13, 14, 20, 21, 22};
    const float given[] = {0, 0.5f, 0.5f, 0, 2, 1, 1, 0};
    ith_samples *samples = NULL;
    assert_ok(ith_samples_from_arrays(&samples, 2, lengths, ids, given, &err), err);
    ith_batcher *b = make_batcher(samples, options_of(ITH_BATCHING_NORMAL, 8, 2, 1));
    ith_batch_step step;
    ith_micro_batch mb;
    assert_true(ith_batcher_next(b, &step));
    assert_ok(ith_batcher_fill(b, 0, &mb, &err), err);
    const int32_t labels[] = {11, 12, -100, 14, -100, 21, -100, -100};
    const float weights[] = {0.5f, 0.5f, 0, 2, 0, 1, 0, 0};
    assert_memory_equal(mb.labels, labels, sizeof labels);
    assert_memory_equal(mb.weights, weights, sizeof weights);
    assert_float_equal(step.weight_sum, 4, 0);
    assert_int_equal(step.num_labels, 4);
    ith_batcher_destroy(b);
    ith_samples_close(samples);
}

static void test_normal_groups_by_count(void **state)
{
    (void)state;
    const int64_t lengths[] = {4, 4, 4, 4, 4, 4, 4, 4};
    expect_run(lengths, 8, options_of(ITH_BATCHING_NORMAL, 10, 4, 2), 9, "0,1,2,3 4,5,6,7");
    expect_run(lengths, 8, options_of(ITH_BATCHING_PADDING_FREE, 10, 3, 1), 9,
               "0,1,2 | 3,4,5 | 6,7");
}

/* Fewer samples than a global batch: one step of what is there, never none (cases S10); a short
 * last step at the end of an epoch (cases S56). */
static void test_last_step_holds_what_is_left(void **state)
{
    (void)state;
    const int64_t lengths[] = {4, 4, 4, 4, 4};
    expect_run(lengths, 3, options_of(ITH_BATCHING_NORMAL, 10, 1, 8), 9, "0 1 2");
    expect_run(lengths, 5, options_of(ITH_BATCHING_NORMAL, 10, 1, 4), 9, "0 1 2 3 | 4");
    ith_samples *samples = make_samples(lengths, 5);
    ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 1, 4);
    o.num_epochs = 3;
    ith_batcher *b = make_batcher(samples, o);
    assert_int_equal(ith_batcher_steps_per_epoch(b), 2);
    assert_int_equal(ith_batcher_total_steps(b), 6);
    ith_batch_step step;
    for (int64_t i = 0; i < 6; i++) {
        assert_true(ith_batcher_next(b, &step));
        assert_int_equal(step.step, i);
        assert_int_equal(step.epoch, i / 2);
        assert_int_equal(step.epoch_end, i % 2);
        assert_int_equal(step.num_micro, i % 2 ? 1 : 4);
        assert_float_equal(step.weight_sum, (i % 2 ? 3 : 12), 0);
    }
    assert_false(ith_batcher_next(b, &step));
    assert_false(ith_batcher_next(b, &step));
    ith_batcher_destroy(b);
    ith_samples_close(samples);
}

/* longest x count <= C*m, in order; a budget that is just full closes at once. */
static void test_dynamic_counts_padded_tokens(void **state)
{
    (void)state;
    const int64_t lengths[] = {3, 4, 6, 2, 8, 9};
    ith_samples *samples = make_samples(lengths, COUNT(lengths));
    ith_batcher *b = make_batcher(samples, options_of(ITH_BATCHING_DYNAMIC, 10, 2, 1));
    /* 3 x 6 = 18 fits into 20, a fourth would make 24; then 2, 8 (16); 9 would make 27. */
    assert_string_equal(run_text(b, 1), "0,1,2");
    ith_micro_batch mb;
    assert_ok(ith_batcher_fill(b, 0, &mb, &err), err);
    const int32_t positions[] = {0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5};
    assert_int_equal(mb.num_tokens, COUNT(positions));
    assert_memory_equal(mb.position_ids, positions, sizeof positions);
    assert_string_equal(run_text(b, 9), "3,4 | 5");
    ith_batcher_destroy(b);
    ith_samples_close(samples);
    const int64_t full[] = {10, 10, 5, 5, 5, 5};
    expect_run(full, 6, options_of(ITH_BATCHING_DYNAMIC, 10, 2, 1), 9, "0,1 | 2,3,4,5");
}

/* The plain sum <= C*m; closed by the sample that does not fit. */
static void test_dynamic_padding_free_counts_tokens(void **state)
{
    (void)state;
    const int64_t lengths[] = {3, 4, 6, 2, 8, 9};
    ith_samples *samples = make_samples(lengths, COUNT(lengths));
    ith_batcher *b = make_batcher(samples, options_of(ITH_BATCHING_DYNAMIC_PADDING_FREE, 10, 2, 1));
    ith_batch_step step;
    assert_true(ith_batcher_next(b, &step));
    assert_int_equal(step.num_docs, 4);
    assert_int_equal(step.num_tokens, 15);
    assert_string_equal(run_text(b, 9), "4,5");
    ith_batcher_destroy(b);
    ith_samples_close(samples);
}

/* Under max_steps a micro-batch that is not full goes on with the next pass: one sample of 6 needs
 * four passes to close a budget of 20, three used, one kept. */
static void test_dynamic_carries_over_the_end_of_data(void **state)
{
    (void)state;
    const int64_t lengths[] = {6};
    ith_samples *samples = make_samples(lengths, 1);
    ith_batcher_options o = options_of(ITH_BATCHING_DYNAMIC, 10, 2, 1);
    o.num_epochs = 0;
    o.carry_over = true;
    ith_batcher *b = make_batcher(samples, o);
    ith_batch_step step;
    assert_true(ith_batcher_next(b, &step));
    assert_int_equal(step.num_docs, 3);
    json_t *state_json = NULL;
    assert_ok(ith_batcher_save(b, &state_json, &err), err);
    assert_int_equal(json_integer_value(json_object_get(state_json, "epoch")), 3);
    json_decref(state_json);
    assert_string_equal(run_text(b, 3), "0,0,0 | 0,0,0 | 0,0,0");
    assert_int_equal(ith_batcher_total_steps(b), 0);
    ith_batcher_destroy(b);
    ith_samples_close(samples);
    const int64_t two[] = {6, 9};
    o.strategy = ITH_BATCHING_DYNAMIC_PADDING_FREE;
    expect_run(two, 2, o, 4, "0,1 | 0,1 | 0,1 | 0,1");
    const int64_t three[] = {6, 9, 8};
    o.grad_accum = 2;
    expect_run(three, 3, o, 3, "0,1 2,0 | 1,2 0,1 | 2,0 1,2");
}

/* A step is the same list of samples for any number of ranks and any split into micro-batches. */
static void test_ranks_share_one_order(void **state)
{
    (void)state;
    int64_t lengths[37];
    for (int64_t i = 0; i < 37; i++)
        lengths[i] = 2 + i % 7;
    ith_samples *samples = make_samples(lengths, 37);
    char expected[1024] = "";
    for (int64_t ranks = 1; ranks <= 4; ranks *= 2) {
        ith_batcher *b[4];
        for (int64_t r = 0; r < ranks; r++) {
            ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 2, 4 / ranks);
            o.shuffle = true;
            o.dp_rank = r;
            o.dp_size = ranks;
            o.num_epochs = 2;
            b[r] = make_batcher(samples, o);
        }
        assert_int_equal(ith_batcher_total_steps(b[0]), 10);
        ith_buf text = {0};
        for (int64_t s = 0; s < 10; s++) {
            ith_batch_step step[4];
            bool seen[37] = {false};
            for (int64_t r = 0; r < ranks; r++) {
                assert_true(ith_batcher_next(b[r], &step[r]));
                assert_memory_equal(&step[r], &step[0], sizeof *step);
                for (int64_t j = 0; j < step[r].num_micro; j++) {
                    ith_micro_batch mb;
                    assert_ok(ith_batcher_fill(b[r], j, &mb, &err), err);
                    for (int64_t d = 0; d < mb.num_docs; d++) {
                        assert_false(seen[mb.sample[d]]);
                        seen[mb.sample[d]] = true;
                    }
                }
            }
            ith_buf_printf(&text, "%g:", step[0].weight_sum);
            for (int i = 0; i < 37; i++)
                ith_buf_printf(&text, "%s", seen[i] ? "x" : ".");
        }
        for (int64_t r = 0; r < ranks; r++) {
            ith_batch_step step;
            assert_false(ith_batcher_next(b[r], &step));
            ith_batcher_destroy(b[r]);
        }
        if (ranks == 1)
            snprintf(expected, sizeof expected, "%s", text.data);
        assert_string_equal(text.data, expected);
        ith_buf_deinit(&text);
    }
    ith_samples_close(samples);
}

static const ith_batching all_strategies[] = {
    ITH_BATCHING_NORMAL, ITH_BATCHING_PADDING_FREE, ITH_BATCHING_DYNAMIC,
    ITH_BATCHING_DYNAMIC_PADDING_FREE, ITH_BATCHING_PACKING};

static const struct {
    int64_t dp, cp;
    ith_cp_whole whole;
} layouts[] = {{1, 1, ITH_CP_WHOLE_AUTO},   {2, 1, ITH_CP_WHOLE_NEVER}, {3, 1, ITH_CP_WHOLE_AUTO},
               {1, 2, ITH_CP_WHOLE_NEVER},  {2, 2, ITH_CP_WHOLE_AUTO},  {1, 2, ITH_CP_WHOLE_ALWAYS},
               {2, 3, ITH_CP_WHOLE_ALWAYS}, {1, 5, ITH_CP_WHOLE_AUTO}};

static int64_t as_it_is(const void *arg, int64_t tokens)
{
    (void)arg;
    return tokens;
}

static int64_t full_block(const void *arg, int64_t tokens)
{
    (void)arg;
    return ith_round_up(tokens + 1, 8);
}

static int64_t full_cutoff(const void *arg, int64_t tokens)
{
    (void)arg;
    return ith_max_i64(tokens, 64);
}

/* One rank's micro-batches of a step: within the limits, padded; counts samples where they are
 * computed. */
static void check_rank_step(ith_batcher *b, const ith_batcher_options *o,
                            const ith_batch_step *step, bool first_of_group, int *seen,
                            int64_t *tokens, int64_t *labels)
{
    ith_batch_limits limits = ith_batcher_limits(b);
    assert_true(step->num_micro >= 1 && step->num_micro <= limits.max_micro);
    for (int64_t j = 0; j < step->num_micro; j++) {
        ith_micro_batch mb;
        assert_ok(ith_batcher_fill(b, j, &mb, &err), err);
        int64_t padded = 0;
        for (int64_t d = 0; d < mb.num_docs; d++) {
            int64_t n = o->padded(NULL, mb.cu_seqlens[d + 1] - mb.cu_seqlens[d]);
            assert_true(n <= limits.max_doc_tokens);
            padded += n;
        }
        assert_true(padded <= (mb.whole ? limits.max_whole_tokens : limits.max_tokens));
        assert_true(mb.num_docs <= limits.max_docs);
        if (!mb.whole && !first_of_group)
            continue;
        *tokens += mb.num_tokens;
        *labels += mb.num_labels;
        for (int64_t d = 0; d < mb.num_docs; d++) {
            seen[mb.sample[d]]++;
            assert_int_equal(mb.ids[mb.cu_seqlens[d]], mb.sample[d] * 100);
        }
    }
}

/* Two epochs of a job: every rank has as many micro-batches, and every sample is computed once in
 * each epoch, by one rank or by one group. */
static void check_job(const ith_samples *samples, int64_t count, ith_batcher_options o)
{
    ith_batcher *b[6];
    ith_batch_step step[6];
    int seen[211] = {0};
    int64_t ranks = o.dp_size * o.cp_size, steps = 0;
    for (int64_t r = 0; r < ranks; r++) {
        o.dp_rank = r / o.cp_size;
        o.cp_rank = r % o.cp_size;
        b[r] = make_batcher(samples, o);
    }
    ith_batch_limits bound = ith_batcher_limits_bound(&o), limits = ith_batcher_limits(b[0]);
    assert_true(o.padded != as_it_is || limits.max_tokens <= bound.max_tokens);
    while (ith_batcher_next(b[0], &step[0])) {
        int64_t tokens = 0, labels = 0;
        for (int64_t r = 0; r < ranks; r++) {
            assert_true(r == 0 || ith_batcher_next(b[r], &step[r]));
            assert_memory_equal(&step[r], &step[0], sizeof *step);
            check_rank_step(b[r], &o, &step[r], r % o.cp_size == 0, seen, &tokens, &labels);
        }
        assert_int_equal(tokens, step[0].num_tokens);
        assert_int_equal(labels, step[0].num_labels);
        steps++;
    }
    assert_int_equal(steps, ith_batcher_total_steps(b[0]));
    for (int64_t i = 0; i < count; i++)
        if (seen[i] != 2)
            fail_msg("strategy %d, dp %d, cp %d, %d: sample %d of %d seen %d times in 2 epochs",
                     (int)o.strategy, (int)o.dp_size, (int)o.cp_size, (int)o.whole, (int)i,
                     (int)count, seen[i]);
    for (int64_t r = 0; r < ranks; r++)
        ith_batcher_destroy(b[r]);
}

/* For all strategies, layouts and sizes. */
static void test_epoch_covers_every_sample_once(void **state)
{
    (void)state;
    int64_t lengths[211];
    int64_t (*const padded[])(const void *, int64_t) = {as_it_is, full_block, full_cutoff};
    for (int64_t i = 0; i < 211; i++)
        lengths[i] = 2 + (i * i * 31 + i * 7) % 63;
    static const int64_t counts[] = {1, 2, 5, 64, 211};
    for (int64_t c = 0; c < COUNT(counts); c++) {
        ith_samples *samples = make_samples(lengths, counts[c]);
        for (int s = 0; s < 5; s++)
            for (int64_t l = 0; l < COUNT(layouts); l++) {
                ith_batcher_options o = options_of(all_strategies[s], 64, 2, 3);
                o.shuffle = true;
                o.dp_size = layouts[l].dp;
                o.cp_size = layouts[l].cp;
                o.whole = layouts[l].whole;
                o.work = (ith_batch_work){.linear = 1, .quadratic = 0.1, .exchange = 0.5};
                o.num_epochs = 2;
                o.pack_window = 50;
                for (int k = 0; k < 6; k++) {
                    o.keep_together = k % 2;
                    o.padded = padded[k / 2];
                    check_job(samples, counts[c], o);
                }
            }
        ith_samples_close(samples);
    }
}

/* Ranks of a group read their own rows, all of them once, and see what the whole batch has there.
 */
static void test_ranks_read_their_own_rows(void **state)
{
    (void)state;
    const int64_t lengths[] = {5, 2, 9, 4, 6};
    ith_samples *samples = make_samples(lengths, COUNT(lengths));
    ith_batcher_options o = options_of(ITH_BATCHING_PADDING_FREE, 10, 5, 1);
    ith_batcher *all = make_batcher(samples, o), *part = NULL;
    ith_batch_step step;
    ith_micro_batch a, b;
    int64_t read = 0;
    assert_true(ith_batcher_next(all, &step));
    assert_ok(ith_batcher_fill(all, 0, &a, &err), err);
    assert_int_equal(a.num_read, 26);
    for (int64_t r = 0; r < 3; r++) {
        o.cp_size = 3;
        o.cp_rank = r;
        o.own_rows = third_of_each_half;
        o.own_arg = &r;
        part = make_batcher(samples, o);
        assert_true(ith_batcher_next(part, &step));
        assert_ok(ith_batcher_fill(part, 0, &b, &err), err);
        int64_t own[4];
        third_of_each_half(&r, 26, own);
        for (int i = 0; i < 4; i += 2) {
            size_t bytes = (size_t)(own[i + 1] - own[i]) * 4;
            assert_memory_equal(a.ids + own[i], b.ids + own[i], bytes);
            assert_memory_equal(a.labels + own[i], b.labels + own[i], bytes);
            assert_memory_equal(a.weights + own[i], b.weights + own[i], bytes);
            assert_memory_equal(a.position_ids + own[i], b.position_ids + own[i], bytes);
        }
        assert_memory_equal(a.cu_seqlens, b.cu_seqlens, 6 * 4);
        assert_int_equal(b.num_read, own[1] - own[0] + own[3] - own[2]);
        assert_int_equal(b.num_labels, a.num_labels);
        read += b.num_read;
        ith_batcher_destroy(part);
    }
    assert_int_equal(read, 26);
    ith_batcher_destroy(all);
    ith_samples_close(samples);
}

/* First and last half of the tokens. */
static void half(const void *arg, int64_t tokens, int64_t ranges[4])
{
    int64_t k = *(const int64_t *)arg, middle = (tokens + 1) / 2;
    ranges[0] = k ? middle : 0;
    ranges[1] = k ? tokens : middle;
    ranges[2] = ranges[3] = 0;
}

/* Ranks of a group have one sample and halves of its rows, groups have other samples (cases S50);
 * the last label of the first half is the first token of the second (cases S39). */
static void test_a_group_shares_what_others_do_not_have(void **state)
{
    (void)state;
    const int64_t lengths[] = {7, 7};
    const int32_t labels[2][7] = {{1, 2, 3, 4, 5, 6, -100}, {101, 102, 103, 104, 105, 106, -100}};
    ith_samples *samples = make_samples(lengths, COUNT(lengths));
    for (int64_t rank = 0; rank < 4; rank++) {
        int64_t group = rank / 2, place = rank % 2, own[4];
        ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 7, 1, 1);
        o.dp_size = o.cp_size = 2;
        o.dp_rank = group;
        o.cp_rank = place;
        o.own_rows = half;
        o.own_arg = &place;
        ith_batcher *b = make_batcher(samples, o);
        ith_batch_step step;
        ith_micro_batch mb;
        assert_true(ith_batcher_next(b, &step));
        assert_int_equal(step.num_labels, 12);
        assert_ok(ith_batcher_fill(b, 0, &mb, &err), err);
        assert_int_equal(mb.num_docs, 1);
        assert_int_equal(mb.sample[0], group);
        half(&place, 7, own);
        assert_memory_equal(mb.labels + own[0], labels[group] + own[0],
                            (size_t)(own[1] - own[0]) * 4);
        assert_int_equal(mb.num_read, place ? 3 : 4);
        ith_batcher_destroy(b);
    }
    ith_samples_close(samples);
}

/* A mean over a micro-batch: which samples are together is the same for any number of ranks. */
static void test_samples_of_a_micro_batch_stay_together(void **state)
{
    (void)state;
    const int64_t lengths[] = {4, 9, 5, 8, 6, 2, 7, 3};
    ith_samples *samples = make_samples(lengths, COUNT(lengths));
    for (int64_t r = 0; r < 2; r++) {
        ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 2, 2);
        o.keep_together = true;
        o.dp_size = 2;
        o.dp_rank = r;
        ith_batcher *b = make_batcher(samples, o);
        /* 0,1 and 2,3 have 13 tokens, 6,7 has 10, 4,5 has 8 */
        assert_string_equal(run_text(b, 9), r ? "2,3 4,5" : "0,1 6,7");
        ith_batcher_destroy(b);
        o.keep_together = false; /* of the longer half 9 + 6 and 8 + 7, then 5 + 2 and 4 + 3 */
        b = make_batcher(samples, o);
        assert_string_equal(run_text(b, 9), r ? "3,6 0,7" : "1,4 2,5");
        ith_batcher_destroy(b);
    }
    /* Two ranks of a group: 4,5 is as long as a slice of the longest possible, 9 + 8. */
    for (int64_t r = 0; r < 2; r++) {
        ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 2, 4);
        o.keep_together = true;
        o.cp_size = 2;
        o.cp_rank = r;
        o.whole = ITH_CP_WHOLE_ALWAYS;
        ith_batcher *b = make_batcher(samples, o);
        assert_string_equal(run_text(b, 9), r ? "0,1 2,3 6,7 -" : "0,1 2,3 6,7 4,5");
        ith_batcher_destroy(b);
    }
    ith_samples_close(samples);
}

/* A document of a slice's tokens stays on one rank, one of a token more is cut. */
static void test_whole_documents_end_at_a_slice(void **state)
{
    (void)state;
    const int64_t lengths[] = {40, 20, 21, 3};
    ith_samples *samples = make_samples(lengths, COUNT(lengths));
    static const char *const expected[] = {"0 2 1", "0 2 3"};
    for (int64_t r = 0; r < 2; r++) {
        ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 40, 1, 4);
        o.cp_size = 2;
        o.cp_rank = r;
        o.whole = ITH_CP_WHOLE_ALWAYS;
        ith_batcher *b = make_batcher(samples, o);
        assert_int_equal(ith_batcher_limits(b).max_whole_tokens, 20);
        assert_string_equal(run_text(b, 1), expected[r]);
        for (int64_t j = 0; j < 3; j++) {
            ith_micro_batch mb;
            assert_ok(ith_batcher_fill(b, j, &mb, &err), err);
            assert_int_equal(mb.whole, j == 2);
        }
        ith_batcher_destroy(b);
    }
    /* One that is too small to stay whole anywhere: all are cut. */
    const int64_t same[] = {8, 8, 8};
    ith_samples *equal = make_samples(same, COUNT(same));
    ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 8, 1, 3);
    o.cp_size = 2;
    o.whole = ITH_CP_WHOLE_ALWAYS;
    ith_batcher *b = make_batcher(equal, o);
    assert_int_equal(ith_batcher_limits(b).max_whole_tokens, 0);
    assert_string_equal(run_text(b, 1), "0 1 2");
    ith_batcher_destroy(b);
    ith_samples_close(equal);
    ith_samples_close(samples);
}

/* What a round costs may be known after the limits are: a dear one is not made, a cheap one is. */
static void test_rounds_are_made_by_what_they_cost(void **state)
{
    (void)state;
    const int64_t lengths[] = {40, 10, 10};
    ith_samples *samples = make_samples(lengths, COUNT(lengths));
    for (int cheap = 0; cheap < 2; cheap++) {
        ith_batcher_options o = options_of(ITH_BATCHING_PACKING, 60, 1, 1);
        ith_batch_step step;
        ith_micro_batch mb;
        o.cp_size = 2;
        o.whole = ITH_CP_WHOLE_AUTO;
        o.work = (ith_batch_work){.linear = 1, .exchange = 3, .round = 1e6};
        ith_batcher *b = make_batcher(samples, o);
        if (cheap)
            ith_batcher_set_work(b, (ith_batch_work){.linear = 1, .exchange = 3});
        assert_true(ith_batcher_next(b, &step));
        assert_int_equal(step.num_micro,
                         cheap ? 2 : 1); /* 40 / 2 * 4 + 10 is less than 60 / 2 * 4 */
        assert_ok(ith_batcher_fill(b, step.num_micro - 1, &mb, &err), err);
        assert_int_equal(mb.whole, cheap);
        assert_int_equal(mb.num_docs, cheap ? 1 : 3);
        ith_batcher_destroy(b);
    }
    ith_samples_close(samples);
}

/* Lengths of chats and documents: log-normal, median 600, a twelfth beyond 6,000, cut at 32,768. */
static ith_samples *make_corpus(int64_t count)
{
    int64_t *lengths = calloc((size_t)count, 8);
    for (int64_t i = 0; i < count; i++)
        lengths[i] =
            ith_min_i64(32768, 16 + (int64_t)(600 * exp(1.7 * ith_rng_normal(1, 2, (uint64_t)i))));
    ith_samples *samples = make_samples(lengths, count);
    free(lengths);
    return samples;
}

/* Work like that of a model of 28 layers, 1,024 wide, with 16 heads of 128: attention is as much as
 * the products at some 10,000 tokens. Bounds are what these lengths give, with a margin. */
static void test_ranks_have_about_as_much_work(void **state)
{
    (void)state;
    static const struct {
        ith_batching strategy;
        int64_t m, accum, dp;
        double before, after; /* busiest over even: at least, at most */
    } jobs[] = {{ITH_BATCHING_NORMAL, 1, 8, 8, 5, 2.8},
                {ITH_BATCHING_NORMAL, 4, 2, 8, 3.5, 2.6},
                {ITH_BATCHING_PADDING_FREE, 8, 1, 16, 3.4, 3},
                {ITH_BATCHING_DYNAMIC_PADDING_FREE, 1, 4, 8, 1.9, 1.3},
                {ITH_BATCHING_PACKING, 1, 4, 8, 1.6, 1.2}};
    ith_samples *samples = make_corpus(6000);
    for (int64_t i = 0; i < COUNT(jobs); i++) {
        ith_batcher_options o = options_of(jobs[i].strategy, 32768, jobs[i].m, jobs[i].accum);
        o.shuffle = true;
        o.dp_size = jobs[i].dp;
        o.work = (ith_batch_work){.linear = 3.6e9, .quadratic = 0.34e6};
        ith_batcher *b = make_batcher(samples, o);
        ith_batch_report r = ith_batcher_report(b);
        double before = r.work_in_order / r.work_even, after = r.work_dealt / r.work_even;
        print_message(
            "strategy %d, m %d, accum %d, dp %2d: busiest / even %.3f in order, %.3f dealt\n",
            (int)jobs[i].strategy, (int)jobs[i].m, (int)jobs[i].accum, (int)jobs[i].dp, before,
            after);
        assert_true(before >= jobs[i].before && after <= jobs[i].after && after >= 1);
        ith_batcher_destroy(b);
    }
    ith_samples_close(samples);
}

/* Short documents on single ranks, long ones over the group: never longer than all of them cut. */
static void test_whole_documents_make_steps_shorter(void **state)
{
    (void)state;
    static const struct {
        ith_batching strategy;
        int64_t m, accum, dp, cp;
        double exchange, round, shorter; /* at least, in percent */
    } jobs[] = {{ITH_BATCHING_NORMAL, 1, 32, 1, 4, 0.5e9, 0, 1},
                {ITH_BATCHING_NORMAL, 1, 16, 2, 4, 0.5e9, 0, 0.2},
                {ITH_BATCHING_PACKING, 1, 4, 1, 8, 2e9, 0, 5},
                {ITH_BATCHING_NORMAL, 1, 16, 1, 8, 2e9, 1e12, 12},
                {ITH_BATCHING_PACKING, 1, 2, 1, 8, 0.1e9, 1e14, 0},
                {ITH_BATCHING_DYNAMIC_PADDING_FREE, 1, 1, 2, 2, 0, 0, 0}};
    ith_samples *samples = make_corpus(2000);
    for (int64_t i = 0; i < COUNT(jobs); i++) {
        double work[3];
        for (ith_cp_whole whole = ITH_CP_WHOLE_NEVER; whole <= ITH_CP_WHOLE_ALWAYS; whole++) {
            ith_batcher_options o = options_of(jobs[i].strategy, 32768, jobs[i].m, jobs[i].accum);
            o.shuffle = true;
            o.dp_size = jobs[i].dp;
            o.cp_size = jobs[i].cp;
            o.work = (ith_batch_work){.linear = 3.6e9,
                                      .quadratic = 0.34e6,
                                      .exchange = jobs[i].exchange,
                                      .round = jobs[i].round};
            o.whole = whole;
            ith_batcher *b = make_batcher(samples, o);
            work[whole] = ith_batcher_report(b).work_dealt;
            ith_batcher_destroy(b);
        }
        double shorter = 100 * (1 - work[ITH_CP_WHOLE_AUTO] / work[ITH_CP_WHOLE_NEVER]);
        print_message(
            "strategy %d, accum %d, dp %d x cp %d: auto %.1f %% shorter than never, always "
            "%.1f %%\n",
            (int)jobs[i].strategy, (int)jobs[i].accum, (int)jobs[i].dp, (int)jobs[i].cp, shorter,
            100 * (1 - work[ITH_CP_WHOLE_ALWAYS] / work[ITH_CP_WHOLE_NEVER]));
        assert_true(shorter >= jobs[i].shorter);
        assert_true(work[ITH_CP_WHOLE_AUTO] <= work[ITH_CP_WHOLE_NEVER]);
    }
    ith_samples_close(samples);
}

static void test_epochs_are_shuffled_by_seed_and_epoch(void **state)
{
    (void)state;
    int64_t lengths[40];
    for (int64_t i = 0; i < 40; i++)
        lengths[i] = 2;
    ith_samples *samples = make_samples(lengths, 40);
    ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 40, 1);
    o.shuffle = true;
    char text[3][400];
    ith_batcher *b = make_batcher(samples, o);
    snprintf(text[0], 400, "%s", run_text(b, 1));
    ith_batcher_destroy(b);
    o.num_epochs = 2;
    b = make_batcher(samples, o);
    assert_string_equal(run_text(b, 1), text[0]);
    assert_string_not_equal(run_text(b, 1), text[0]);
    ith_batcher_destroy(b);
    o.seed = 8;
    b = make_batcher(samples, o);
    assert_string_not_equal(run_text(b, 1), text[0]);
    ith_batcher_destroy(b);
    ith_samples_close(samples);
}

static void test_subset_uses_only_its_entries(void **state)
{
    (void)state;
    const int64_t lengths[] = {4, 5, 6, 7, 8}, subset[] = {1, 3, 4};
    ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 2, 1);
    o.subset = subset;
    o.num_subset = 3;
    expect_run(lengths, 5, o, 9, "1,3 | 4");
    o.strategy = ITH_BATCHING_PACKING;
    expect_run(lengths, 5, o, 9, "4,3,1");
}

/* A run that stops after any step and goes on from its state gives what the whole run gives. */
static void test_resume_equals_uninterrupted(void **state)
{
    (void)state;
    int64_t lengths[53];
    for (int64_t i = 0; i < 53; i++)
        lengths[i] = 2 + (i * 17) % 29;
    ith_samples *samples = make_samples(lengths, 53);
    for (int s = 0; s < 5; s++) {
        for (int carry = 0; carry < 2; carry++) {
            bool dynamic = s == 2 || s == 3;
            if (carry && !dynamic)
                continue;
            ith_batcher_options o = options_of(all_strategies[s], 32, 2, 2);
            o.shuffle = true;
            o.num_epochs = carry ? 0 : 2;
            o.carry_over = carry;
            o.dp_size = 2;
            o.dp_rank = 1;
            o.pack_window = 16;
            ith_batcher *whole = make_batcher(samples, o);
            for (int64_t stop = 0; stop < 20; stop++) {
                ith_batcher *resumed = make_batcher(samples, o);
                json_t *saved = NULL;
                assert_ok(ith_batcher_save(whole, &saved, &err), err);
                ith_buf text = {0};
                json_t *loaded = NULL;
                assert_ok(ith_json_dump(saved, false, &text, &err), err);
                assert_ok(ith_json_parse(&loaded, text.data, text.len, "state", &err), err);
                assert_ok(ith_batcher_load(resumed, loaded, &err), err);
                ith_batcher *other = make_batcher(samples, o);
                assert_ok(ith_batcher_load(other, loaded, &err), err);
                char *expected = strdup(run_text(other, 12));
                assert_string_equal(run_text(resumed, 12), expected);
                ith_batch_step a, b;
                bool more = ith_batcher_next(whole, &a);
                assert_ok(ith_batcher_load(resumed, loaded, &err), err);
                assert_int_equal(ith_batcher_next(resumed, &b), more);
                if (more) {
                    ith_buf x = {0}, y = {0};
                    step_text(whole, &a, &x);
                    step_text(resumed, &b, &y);
                    assert_string_equal(x.data, y.data);
                    assert_int_equal(a.step, b.step);
                    assert_int_equal(a.epoch, b.epoch);
                    assert_int_equal(a.epoch_end, b.epoch_end);
                    ith_buf_deinit(&x);
                    ith_buf_deinit(&y);
                }
                free(expected);
                ith_buf_deinit(&text);
                json_decref(saved);
                json_decref(loaded);
                ith_batcher_destroy(other);
                ith_batcher_destroy(resumed);
                if (!more)
                    break;
            }
            ith_batcher_destroy(whole);
        }
    }
    ith_samples_close(samples);
}

/* Where steps name the same samples for any number of ranks, a run resumes on another number. */
static void test_resume_on_other_number_of_ranks(void **state)
{
    (void)state;
    int64_t lengths[48];
    for (int64_t i = 0; i < 48; i++)
        lengths[i] = 2 + i % 5;
    ith_samples *samples = make_samples(lengths, 48);
    ith_batcher_options two = options_of(ITH_BATCHING_NORMAL, 10, 2, 2), one = two;
    two.shuffle = one.shuffle = true;
    two.dp_size = 2;
    one.grad_accum = 4;
    ith_batcher *a = make_batcher(samples, two), *b = make_batcher(samples, one);
    ith_batcher *straight = make_batcher(samples, one);
    ith_batch_step step;
    json_t *saved = NULL;
    for (int i = 0; i < 3; i++) {
        assert_true(ith_batcher_next(a, &step));
        assert_true(ith_batcher_next(straight, &step));
    }
    assert_ok(ith_batcher_save(a, &saved, &err), err);
    assert_ok(ith_batcher_load(b, saved, &err), err);
    char *expected = strdup(run_text(straight, 9));
    assert_string_equal(run_text(b, 9), expected);
    free(expected);
    json_decref(saved);
    ith_batcher_destroy(a);
    ith_batcher_destroy(b);
    ith_batcher_destroy(straight);
    ith_samples_close(samples);
}

static void test_resume_refuses_other_data_and_settings(void **state)
{
    (void)state;
    const int64_t lengths[] = {4, 5, 6, 7}, others[] = {4, 5, 6, 8};
    ith_samples *samples = make_samples(lengths, 4), *changed = make_samples(others, 4);
    ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 1, 2);
    ith_batcher *b = make_batcher(samples, o), *c = make_batcher(changed, o);
    json_t *saved = NULL;
    assert_ok(ith_batcher_save(b, &saved, &err), err);
    assert_fails(ith_batcher_load(c, saved, &err), err, ITH_ERR_USAGE, "data position: data:");
    ith_batcher_destroy(c);
    o.seed = 9;
    c = make_batcher(samples, o);
    assert_fails(ith_batcher_load(c, saved, &err), err, ITH_ERR_USAGE, "settings: the checkpoint");
    json_object_set_new(saved, "position", json_string("x"));
    assert_fails(ith_batcher_load(b, saved, &err), err, ITH_ERR_FORMAT, "position: found string");
    json_object_set_new(saved, "position", json_integer(99));
    assert_fails(ith_batcher_load(b, saved, &err), err, ITH_ERR_FORMAT, "position 99 in an epoch");
    json_object_set_new(saved, "carry", json_pack("[i]", 1));
    assert_fails(ith_batcher_load(b, saved, &err), err, ITH_ERR_FORMAT, "carry: 1 samples");
    json_decref(saved);
    ith_batcher_destroy(b);
    ith_batcher_destroy(c);
    ith_samples_close(samples);
    ith_samples_close(changed);
}

static void test_create_refuses_what_cannot_run(void **state)
{
    (void)state;
    const int64_t lengths[] = {4, 5, 12};
    ith_samples *samples = make_samples(lengths, 3);
    ith_batcher *b = NULL;
    ith_batcher_options o = options_of(ITH_BATCHING_NORMAL, 10, 1, 1);
    assert_fails(ith_batcher_create(&b, samples, &o, &err), err, ITH_ERR_USAGE,
                 "sample 2 has 12 tokens, more than cutoff_len 10");
    o.cutoff_len = INT32_MAX - 1;
    o.micro_batch_size = 2;
    assert_fails(ith_batcher_create(&b, samples, &o, &err), err, ITH_ERR_USAGE,
                 "more than 2^31 tokens");
    o = options_of(ITH_BATCHING_NORMAL, 10, 1, 1);
    o.subset = lengths;
    assert_fails(ith_batcher_create(&b, samples, &o, &err), err, ITH_ERR_FORMAT, "no sample");
    assert_null(b);
    ith_samples_close(samples);
}

/* After create there is no allocation, whatever the strategy. */
static void test_steps_make_no_allocation(void **state)
{
    (void)state;
    int64_t lengths[100];
    for (int64_t i = 0; i < 100; i++)
        lengths[i] = 2 + (i * 13) % 31;
    ith_samples *samples = make_samples(lengths, 100);
    for (int s = 0; s < 5; s++) {
        ith_batcher_options o = options_of(all_strategies[s], 32, 2, 2);
        o.shuffle = true;
        o.num_epochs = 0;
        o.carry_over = s == 2 || s == 3;
        ith_batcher *b = make_batcher(samples, o);
        int64_t before = ith_alloc_count();
        ith_batch_step step;
        for (int i = 0; i < 100; i++) {
            ith_micro_batch mb;
            assert_true(ith_batcher_next(b, &step));
            for (int64_t j = 0; j < step.num_micro; j++)
                assert_ok(ith_batcher_fill(b, j, &mb, &err), err);
        }
        assert_int_equal(ith_alloc_count() - before, 0);
        ith_batcher_destroy(b);
    }
    ith_samples_close(samples);
}

/* The bitmap search against the plain rule: longest first, the bin with least room that fits. */
static void test_best_fit_equals_plain_search(void **state)
{
    (void)state;
    static const int64_t capacities[] = {1, 5, 63, 64, 65, 4096, 300000};
    for (size_t c = 0; c < sizeof capacities / sizeof capacities[0]; c++) {
        int64_t cap = capacities[c];
        int32_t lengths[500];
        int64_t placed[500], begin[501], room[500], num_room = 0;
        uint64_t x = 88172645463325252u;
        for (int i = 0; i < 500; i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            int64_t most = i % 3 ? cap : (cap + 7) / 8;
            lengths[i] = (int32_t)(1 + (int64_t)(x % (uint64_t)most));
        }
        ith_best_fit *fit = NULL;
        assert_ok(ith_best_fit_create(&fit, cap, 500, &err), err);
        for (int round = 0; round < 2; round++) { /* the second run starts clean */
            int64_t bins = ith_best_fit_run(fit, lengths, 500, placed, begin), last = cap + 1;
            bool used[500] = {false};
            num_room = 0;
            assert_int_equal(begin[bins], 500);
            for (int64_t b = 0; b < bins; b++) {
                int64_t sum = 0;
                for (int64_t i = begin[b]; i < begin[b + 1]; i++) {
                    assert_false(used[placed[i]]);
                    used[placed[i]] = true;
                    sum += lengths[placed[i]];
                }
                assert_true(sum <= cap && sum > 0);
                assert_true(lengths[placed[begin[b]]] <= last);
                last = lengths[placed[begin[b]]];
            }
            /* Plain best-fit decreasing makes as many bins. */
            int32_t sorted[500];
            memcpy(sorted, lengths, sizeof sorted);
            for (int i = 1; i < 500; i++)
                for (int k = i; k > 0 && sorted[k] > sorted[k - 1]; k--) {
                    int32_t t = sorted[k];
                    sorted[k] = sorted[k - 1];
                    sorted[k - 1] = t;
                }
            for (int i = 0; i < 500; i++) {
                int64_t best = -1;
                for (int64_t b = 0; b < num_room; b++)
                    if (room[b] >= sorted[i] && (best < 0 || room[b] < room[best]))
                        best = b;
                if (best < 0)
                    room[best = num_room++] = cap;
                room[best] -= sorted[i];
            }
            assert_int_equal(bins, num_room);
        }
        ith_best_fit_destroy(fit);
    }
}

/* Packing fills micro-batches nearly whole where counting in order leaves gaps. */
static void test_packing_report(void **state)
{
    (void)state;
    static int64_t lengths[MAX_SAMPLES];
    uint64_t x = 1;
    for (int i = 0; i < MAX_SAMPLES; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        lengths[i] = 2 + (int64_t)((x >> 33) % 90) * (int64_t)((x >> 43) % 10) / 9;
    }
    ith_samples *samples = make_samples(lengths, MAX_SAMPLES);
    ith_batcher *b = make_batcher(samples, options_of(ITH_BATCHING_PACKING, 128, 4, 1));
    ith_batch_report packed = ith_batcher_report(b);
    ith_batcher_destroy(b);
    b = make_batcher(samples, options_of(ITH_BATCHING_NORMAL, 128, 4, 1));
    ith_batch_report normal = ith_batcher_report(b);
    ith_batcher_destroy(b);
    assert_int_equal(packed.num_docs, MAX_SAMPLES);
    assert_int_equal(packed.num_tokens, normal.num_tokens);
    assert_int_equal(packed.capacity, 512);
    if (packed.efficiency < 0.99)
        fail_msg("packing efficiency %.4f, expected 0.99 or more", packed.efficiency);
    assert_true(normal.efficiency < 0.5);
    assert_true(normal.pad_efficiency < 1 && normal.padded_tokens > normal.num_tokens);
    ith_samples_close(samples);
}

static void test_create_faults_leave_nothing(void **state)
{
    (void)state;
    const int64_t lengths[] = {4, 5, 6, 7, 8}, subset[] = {0, 2, 4};
    ith_samples *samples = make_samples(lengths, 5);
    for (int s = 0; s < 5; s++) {
        ith_batcher_options o = options_of(all_strategies[s], 10, 2, 2);
        o.subset = subset;
        o.num_subset = 3;
        for (int64_t n = 1;; n++) {
            ith_batcher *b = NULL;
            ith_error_clear(&err);
            ith_fault_set(ITH_FAULT_ALLOC, n);
            ith_status status = ith_batcher_create(&b, samples, &o, &err);
            bool hit = ith_fault_count(ITH_FAULT_ALLOC) >= n;
            ith_fault_set(ITH_FAULT_ALLOC, 0);
            if (hit && status != ITH_ERR_MEMORY)
                fail_msg("strategy %d, allocation %lld: status %d", s, (long long)n, (int)status);
            ith_batcher_destroy(b);
            if (!hit)
                break;
        }
    }
    ith_samples_close(samples);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fill_packs_documents_with_own_positions_and_labels),
        cmocka_unit_test(test_fill_weights_belong_to_targets),
        cmocka_unit_test(test_normal_groups_by_count),
        cmocka_unit_test(test_last_step_holds_what_is_left),
        cmocka_unit_test(test_dynamic_counts_padded_tokens),
        cmocka_unit_test(test_dynamic_padding_free_counts_tokens),
        cmocka_unit_test(test_dynamic_carries_over_the_end_of_data),
        cmocka_unit_test(test_ranks_share_one_order),
        cmocka_unit_test(test_epoch_covers_every_sample_once),
        cmocka_unit_test(test_ranks_read_their_own_rows),
        cmocka_unit_test(test_a_group_shares_what_others_do_not_have),
        cmocka_unit_test(test_samples_of_a_micro_batch_stay_together),
        cmocka_unit_test(test_whole_documents_end_at_a_slice),
        cmocka_unit_test(test_ranks_have_about_as_much_work),
        cmocka_unit_test(test_rounds_are_made_by_what_they_cost),
        cmocka_unit_test(test_whole_documents_make_steps_shorter),
        cmocka_unit_test(test_epochs_are_shuffled_by_seed_and_epoch),
        cmocka_unit_test(test_subset_uses_only_its_entries),
        cmocka_unit_test(test_resume_equals_uninterrupted),
        cmocka_unit_test(test_resume_on_other_number_of_ranks),
        cmocka_unit_test(test_resume_refuses_other_data_and_settings),
        cmocka_unit_test(test_create_refuses_what_cannot_run),
        cmocka_unit_test(test_steps_make_no_allocation),
        cmocka_unit_test(test_best_fit_equals_plain_search),
        cmocka_unit_test(test_packing_report),
        cmocka_unit_test(test_create_faults_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
