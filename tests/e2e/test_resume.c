/* test_resume.c - a run that is stopped and resumed is the run that was not: weights, moments and
 * log rows, bit for bit.
 * Method: train to the end saving every few steps; train again, stopping in between, and resume;
 * compare every file of the last checkpoint and of the model, and the numbers of each log row. */
#include "e2e/small_dir.h"

#include <math.h>

static char *base;

static int setup(void **state)
{
    (void)state;
    base = small_setup("resume");
    small_shape shape = small_dense, moe = small_moe;
    shape.vocab = moe.vocab = 320;
    small_make_model(small_join(base, "dense"), &shape, &(small_layout){.dtype = ITH_BF16});
    small_make_model(small_join(base, "moe"), &moe, &(small_layout){.dtype = ITH_F32, .fused = 1});
    small_make_data(small_join(base, "data.jsonl"), 23);
    return 0;
}

static bool same_number(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

static void assert_same_rows(const small_seen *a, const small_seen *b, int from)
{
    assert_int_equal(a->num_rows, from + b->num_rows);
    for (int i = 0; i < b->num_rows; i++) {
        const ith_report_row *x = &a->rows[from + i], *y = &b->rows[i];
        if (x->step != y->step || x->is_eval != y->is_eval || !same_number(x->loss, y->loss) ||
            !same_number(x->grad_norm, y->grad_norm) ||
            !same_number(x->learning_rate, y->learning_rate) || !same_number(x->epoch, y->epoch) ||
            x->tokens != y->tokens || x->labels != y->labels)
            fail_msg("row of step %lld: loss %.17g norm %.17g lr %.17g epoch %.17g tokens %lld, "
                     "after resume step %lld: loss %.17g norm %.17g lr %.17g epoch %.17g tokens "
                     "%lld",
                     (long long)x->step, x->loss, x->grad_norm, x->learning_rate, x->epoch,
                     (long long)x->tokens, (long long)y->step, y->loss, y->grad_norm,
                     y->learning_rate, y->epoch, (long long)y->tokens);
    }
}

/* Steps and losses of trainer_log.jsonl: no row twice, none missing. */
static void assert_same_log(const char *dir_a, const char *dir_b)
{
    ith_error err = {0};
    ith_buf text[2] = {{0}, {0}};
    assert_ok(ith_read_file(small_join(dir_a, "trainer_log.jsonl"), 0, &text[0], &err), err);
    assert_ok(ith_read_file(small_join(dir_b, "trainer_log.jsonl"), 0, &text[1], &err), err);
    char *line[2] = {text[0].data, text[1].data};
    while (line[0] && line[1] && *line[0] && *line[1]) {
        /* up to the first number that depends on time */
        for (int k = 0; k < 2; k++) {
            char *end = strchr(line[k], '\n'), *cut = strstr(line[k], ", \"mfu\"");
            char *cut2 = strstr(line[k], ", \"eval_tokens_per_second\"");
            assert_non_null(end);
            *end = '\0';
            if (cut && cut < end)
                *cut = '\0';
            if (cut2 && cut2 < end)
                *cut2 = '\0';
        }
        assert_string_equal(line[0], line[1]);
        for (int k = 0; k < 2; k++) {
            line[k] += strlen(line[k]) + 1;
            while (line[k] < text[k].data + text[k].len && *line[k] != '{')
                line[k]++;
        }
    }
    assert_true(line[0] == text[0].data + text[0].len && line[1] == text[1].data + text[1].len);
    ith_buf_deinit(&text[0]);
    ith_buf_deinit(&text[1]);
}

typedef struct {
    const char *name, *model, *more;
    int64_t stop_at, last; /* stopped after this step; steps of the whole run */
} resume_case;

static const resume_case cases[] = {
    {"plain", "dense", "num_train_epochs: 2\nglobal_batch_size: 4\nmicro_batch_size: 2\n", 4, 12},
    {"later_epoch", "dense", "num_train_epochs: 3\nglobal_batch_size: 4\nmicro_batch_size: 2\n", 9,
     18},
    {"eval_split", "dense",
     "num_train_epochs: 2\nglobal_batch_size: 4\neval_split_ratio: 0.2\neval_strategy: steps\n"
     "eval_steps: 2\nlogging_steps: 3\n",
     4, 0},
    {"packing", "dense",
     "num_train_epochs: 3\nglobal_batch_size: 2\nbatching_strategy: packing\n"
     "lr_scheduler_config: {name: cosine, warmup_steps: 2}\n",
     3, 0},
    {"dynamic", "moe",
     "max_steps: 9\nbatching_strategy: dynamic_batching\nmicro_batch_size: 2\n"
     "lr_scheduler_config: {name: linear, warmup_ratio: 0.3}\nlogging_steps: 2\nbf16: false\n",
     5, 9},
    {"padding_free", "moe",
     "max_steps: 8\nbatching_strategy: dynamic_padding_free\nmicro_batch_size: 2\nbf16: true\n", 7,
     8},
    {"bf16_moments", "dense", "max_steps: 6\nmaster_dtype: bfloat16\n", 3, 6},
};

static void run_case(const resume_case *k)
{
    ith_error err = {0};
    ith_config c;
    ith_run_result result;
    small_seen *seen[3];
    for (int i = 0; i < 3; i++) {
        seen[i] = ith_calloc(1, sizeof *seen[i]);
        assert_non_null(seen[i]);
    }
    char whole[1200], cut[1200], more[1200];
    snprintf(whole, sizeof whole, "%s/%s-whole", base, k->name);
    snprintf(cut, sizeof cut, "%s/%s-cut", base, k->name);
    /* a checkpoint of the last step, to compare moments: it is written because of save_steps */
    snprintf(more, sizeof more, "%ssave_steps: 1\nsave_total_limit: 1\n", k->more);
    small_config(&c, small_join(base, k->model), small_join(base, "data.jsonl"), whole, more);
    assert_ok(small_train(&c, seen[0], &result, &err), err);
    ith_config_deinit(&c);
    int64_t last = result.steps;
    if (k->last)
        assert_int_equal(last, k->last);
    small_config(&c, small_join(base, k->model), small_join(base, "data.jsonl"), cut, more);
    seen[1]->poll_at = k->stop_at;
    seen[1]->poll_bits = ITH_POLL_STOP;
    assert_ok(small_train(&c, seen[1], &result, &err), err);
    assert_true(result.stopped);
    assert_int_equal(result.steps, k->stop_at);
    assert_false(ith_path_exists(small_join(cut, "model.safetensors")));
    ith_config_deinit(&c);
    size_t used = strlen(more);
    snprintf(more + used, sizeof more - used, "resume_from_checkpoint: auto\n");
    small_config(&c, small_join(base, k->model), small_join(base, "data.jsonl"), cut, more);
    assert_ok(small_train(&c, seen[2], &result, &err), err);
    assert_non_null(strstr(seen[2]->news.data, "resumed "));
    assert_int_equal(result.steps, last - k->stop_at);
    ith_config_deinit(&c);
    assert_same_rows(seen[0], seen[2], seen[1]->num_rows);
    char name[64];
    static const char *const files[] = {"weights.safetensors", "adam_m.safetensors",
                                        "adam_v.safetensors"};
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "checkpoint-%lld/%s", (long long)last, files[i]);
        assert_same_file(small_join(whole, name), small_join(cut, name));
    }
    assert_same_file(small_join(whole, "model.safetensors"), small_join(cut, "model.safetensors"));
    assert_same_log(whole, cut);
    for (int i = 0; i < 3; i++) {
        ith_buf_deinit(&seen[i]->news);
        ith_free(seen[i]);
    }
}

static void test_resume_equals_uninterrupted(void **state)
{
    (void)state;
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++)
        run_case(&cases[i]);
}

/* The newest checkpoint is damaged: auto goes on from the one before; a named one is refused. */
static void test_resume_passes_over_a_damaged_checkpoint(void **state)
{
    (void)state;
    small_job *j = small_job_create();
    char out[1200], text[2400];
    snprintf(out, sizeof out, "%s/damaged", base);
    assert_ok(
        small_job_run(j, base, "dense", "data.jsonl", "damaged", "max_steps: 6\nsave_steps: 2\n"),
        j->err);
    char broken[1300];
    snprintf(broken, sizeof broken, "%s/checkpoint-6/adam_v.safetensors", out);
    assert_int_equal(truncate(broken, 1000), 0);
    snprintf(text, sizeof text, "max_steps: 6\nresume_from_checkpoint: %s/checkpoint-6\n", out);
    assert_fails(small_job_run(j, base, "dense", "data.jsonl", "damaged", text), j->err,
                 ITH_ERR_FORMAT, "adam_v");
    assert_ok(small_job_run(j, base, "dense", "data.jsonl", "damaged",
                            "max_steps: 6\nresume_from_checkpoint: auto\n"),
              j->err);
    assert_non_null(strstr(j->seen.news.data, "checkpoint-4"));
    assert_int_equal(j->result.steps, 2);
    small_job_destroy(j);
}

static void test_resume_auto_without_a_checkpoint_starts_anew(void **state)
{
    (void)state;
    small_job *j = small_job_create();
    assert_ok(small_job_run(j, base, "dense", "data.jsonl", "anew",
                            "max_steps: 1\nresume_from_checkpoint: auto\n"),
              j->err);
    assert_non_null(strstr(j->seen.news.data, "starting anew"));
    small_job_destroy(j);
}

/* Other data, another batch size, another model: refused, and nothing is changed. */
static void test_resume_refuses_another_run(void **state)
{
    (void)state;
    small_job *j = small_job_create();
    assert_ok(
        small_job_run(j, base, "dense", "data.jsonl", "other", "max_steps: 2\nsave_steps: 2\n"),
        j->err);
    small_make_data(small_join(base, "other.jsonl"), 22);
    ith_status status = small_job_run(j, base, "dense", "other.jsonl", "other",
                                      "max_steps: 4\nresume_from_checkpoint: auto\n");
    if (status == ITH_OK || !strstr(j->err.text, "checkpoint-2"))
        fail_msg("other data: status %d, %s", (int)status, j->err.text);
    status = small_job_run(j, base, "moe", "data.jsonl", "other",
                           "max_steps: 4\nresume_from_checkpoint: auto\n");
    if (status == ITH_OK || !strstr(j->err.text, "checkpoint-2"))
        fail_msg("another model: status %d, %s", (int)status, j->err.text);
    small_job_destroy(j);
}

/* save_total_limit keeps the newest, and SAVE asked from outside saves and goes on. */
static void test_save_limit_and_save_now(void **state)
{
    (void)state;
    small_job *j = small_job_create();
    char out[1200];
    snprintf(out, sizeof out, "%s/limit", base);
    j->seen.poll_at = 5;
    j->seen.poll_bits = ITH_POLL_SAVE;
    assert_ok(small_job_run(j, base, "dense", "data.jsonl", "limit",
                            "max_steps: 7\nsave_steps: 2\nsave_total_limit: 2\n"),
              j->err);
    assert_false(j->result.stopped);
    assert_int_equal(j->result.steps, 7);
    static const struct {
        const char *name;
        bool there;
    } want[] = {{"checkpoint-2", false},
                {"checkpoint-4", false},
                {"checkpoint-5", true},
                {"checkpoint-6", true},
                {"checkpoint-7", false}};
    for (int i = 0; i < 5; i++)
        if (ith_path_exists(small_join(out, want[i].name)) != want[i].there)
            fail_msg("%s is %s", want[i].name, want[i].there ? "missing" : "still there");
    small_job_destroy(j);
}

/* The step loop allocates nothing: between the polls of two steps without rows, saves and
 * evaluations the count stands still. */
static void test_run_allocates_nothing_in_the_loop(void **state)
{
    (void)state;
    small_job *j = small_job_create();
    assert_ok(small_job_run(j, base, "moe", "data.jsonl", "allocs",
                            "num_train_epochs: 3\nglobal_batch_size: 4\nmicro_batch_size: 2\n"
                            "logging_steps: 100\nbatching_strategy: packing\n"),
              j->err);
    assert_true(j->seen.polls > 5);
    for (int64_t i = 1; i + 1 < j->seen.polls; i++)
        if (j->seen.allocs[i] != j->seen.allocs[0])
            fail_msg("step %lld: %lld allocations since the first step", (long long)i + 1,
                     (long long)(j->seen.allocs[i] - j->seen.allocs[0]));
    small_job_destroy(j);
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
        cmocka_unit_test(test_resume_equals_uninterrupted),
        cmocka_unit_test(test_resume_passes_over_a_damaged_checkpoint),
        cmocka_unit_test(test_resume_auto_without_a_checkpoint_starts_anew),
        cmocka_unit_test(test_resume_refuses_another_run),
        cmocka_unit_test(test_save_limit_and_save_now),
        cmocka_unit_test(test_run_allocates_nothing_in_the_loop),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
