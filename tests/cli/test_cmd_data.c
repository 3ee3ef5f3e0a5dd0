/* `ithaca data`: what it prints and its error lines. */
#include "run_program.h"

#include "tokenizer/tokenizer.h"

static ith_error err;
static char root[4096], config[4200];

static void put(const char *name, const char *text)
{
    char path[4400];
    snprintf(path, sizeof path, "%s/%s", root, name);
    assert_ok(ith_write_file(path, text, (int64_t)strlen(text), &err), err);
}

static program_run run_data(const char *a, const char *b)
{
    const char *const args[] = {"data", config, a, b, NULL};
    return run_program(args, "NO_COLOR=1");
}

static void assert_has(const ith_buf *text, const char *part)
{
    if (!text->data || !strstr(text->data, part))
        fail_msg("'%s' is not in:\n%s", part, text->data ? text->data : "");
}

static void assert_has_not(const ith_buf *text, const char *part)
{
    if (text->data && strstr(text->data, part))
        fail_msg("'%s' is in:\n%s", part, text->data);
}

static void test_data_shows_tokens_mask_and_drops(void **state)
{
    (void)state;
    program_run run = run_data("--rows=1", NULL);
    if (run.code != 0)
        fail_msg("exit %d: %s", run.code, run.err.data);
    assert_has(&run.out, "--- sample 1 of 2: default, ");
    assert_has(&run.out, "rows.jsonl: row 1 (line 1), messages 1-2: ");
    assert_has(&run.out, "<|im_start|>|user|\\n\nhello|<|im_end|>|\\n\n<|im_start|>|assistant|\\n\n"
                         "[[hello|<|im_end|>|\\n]]\n");
    assert_has_not(&run.out, "sample 2 of 2");
    assert_has_not(&run.out, "\033");
    assert_has(&run.out, "2 samples, ");
    assert_has(&run.out, "1 of 3 rows dropped: no assistant turn (first: ");
    program_run_deinit(&run);
}

static void test_data_shows_a_step_document_by_document(void **state)
{
    (void)state;
    program_run run = run_data("--step=1", "batching_strategy=packing");
    assert_int_equal(run.code, 0);
    assert_has(&run.out, "=== step 1, micro-batch 1 of 1: 2 documents, ");
    assert_has(&run.out, "--- rows 0-");
    program_run_deinit(&run);
    run = run_data("--step=1", "ranks=2");
    assert_int_equal(run.code, 0);
    assert_has(&run.out, "=== step 1, group 1 of 2, micro-batch 1 of 1: 1 document, ");
    assert_has(&run.out, "=== step 1, group 2 of 2, micro-batch 1 of 1: 1 document, ");
    program_run_deinit(&run);
    const char *const shared[] = {"data",      config,
                                  "--step=1",  "batching_strategy=packing",
                                  "cp_size=2", "cp_whole_documents=always",
                                  NULL};
    run = run_program(shared, "NO_COLOR=1");
    if (run.code != 0)
        fail_msg("exit %d: %s", run.code, run.err.data);
    assert_has(&run.out, "=== step 1, rank 1 of 2, micro-batch 1 of 1: 1 document, ");
    assert_has(&run.out, "=== step 1, rank 2 of 2, micro-batch 1 of 1: 1 document, ");
    assert_has_not(&run.out, "=== step 1, micro-batch");
    program_run_deinit(&run);
    run = run_data("--stats", "ranks=2");
    assert_has(&run.out, "if padded  busiest\n");
    program_run_deinit(&run);
    run = run_data("--step=99", NULL);
    assert_int_equal(run.code, 2);
    assert_has(&run.err, "error: data: --step 99: the run has ");
    program_run_deinit(&run);
}

static void test_data_stats_compare_strategies(void **state)
{
    (void)state;
    program_run run = run_data("--stats", NULL);
    assert_int_equal(run.code, 0);
    assert_has(&run.out, "tokens per sample\n");
    assert_has(&run.out, "* normal ");
    assert_has(&run.out, "  packing ");
    assert_has_not(&run.out, "--- sample");
    program_run_deinit(&run);
}

static void test_data_errors(void **state)
{
    (void)state;
    program_run run = run_data("--from=7", NULL);
    assert_int_equal(run.code, 2);
    assert_string_equal(strstr(run.err.data, "error: "),
                        "error: data: --from 7: there are 2 samples\n");
    program_run_deinit(&run);
    run = run_data("--eval", NULL);
    assert_int_equal(run.code, 2);
    assert_has(&run.err, "eval_dataset: not given; there is nothing to show");
    program_run_deinit(&run);
    run = run_data("cutoff_len=4", NULL);
    assert_int_equal(run.code, 1);
    assert_has(&run.err, "no sample is left: 1 of 3 rows dropped: no assistant turn");
    assert_has(&run.err, "2 of 2 samples dropped: no trainable token within cutoff_len");
    program_run_deinit(&run);
    run = run_data("train_dataset=some/name", NULL);
    assert_int_equal(run.code, 2);
    assert_has(&run.err, "some/name: no such file or folder; data sets are not fetched");
    program_run_deinit(&run);
}

static int setup(void **state)
{
    (void)state;
    static const char text[] = "user\nuser\nhello\nhello\nassistant\nassistant\nassistant\n";
    const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    char model[4200], yaml[16384];
    snprintf(root, sizeof root, "%s", temp_dir("cmd_data"));
    snprintf(model, sizeof model, "%s/model", root);
    snprintf(config, sizeof config, "%s/c.yaml", root);
    assert_ok(ith_make_dirs(model, &err), err);
    assert_ok(ith_bpe_train(text, (int64_t)strlen(text), 400, special, 3, model, &err), err);
    put("rows.jsonl", "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"},{\"role\":"
                      "\"assistant\",\"content\":\"hello\"}]}\n"
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}\n"
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"user\"},{\"role\":"
                      "\"assistant\",\"content\":\"assistant\"}]}\n");
    snprintf(yaml, sizeof yaml, "model: %s\ntrain_dataset: %s/rows.jsonl\noutput_dir: %s/out\n",
             model, root, root);
    put("c.yaml", yaml);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return ith_remove_tree(root, &err) == ITH_OK ? 0 : 1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_data_shows_tokens_mask_and_drops),
        cmocka_unit_test(test_data_shows_a_step_document_by_document),
        cmocka_unit_test(test_data_stats_compare_strategies),
        cmocka_unit_test(test_data_errors),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
