/* Goal: a wrong configuration ends train and plan with exact lines and exit code 2, before any
 * weight is read and before anything is written. Method: run the program on small files. */
#include "run_program.h"

typedef struct {
    const char *text;
    const char *args[4];  /* after the file */
    const char *expected; /* every "@" is the path of the file */
} wrong_config;

static void expand(const char *text, const char *path, ith_buf *out)
{
    for (const char *p = text; *p; p++)
        if (*p == '@')
            ith_buf_puts(out, path);
        else
            ith_buf_putc(out, *p);
}

static void check(const char *command, const wrong_config *c)
{
    char dir[4096], path[4200], written[4200];
    ith_error err = {0};
    ith_buf expected = {0};
    snprintf(dir, sizeof dir, "%s", temp_dir("config_errors"));
    snprintf(path, sizeof path, "%s/f.yaml", dir);
    snprintf(written, sizeof written, "%s/out", dir);
    assert_ok(ith_write_file(path, c->text, (int64_t)strlen(c->text), &err), err);
    expand(c->expected, path, &expected);
    char output_dir[4300];
    snprintf(output_dir, sizeof output_dir, "output_dir=%s", written);
    const char *args[8] = {command, path, output_dir};
    for (int i = 0; i < 4 && c->args[i]; i++)
        args[3 + i] = c->args[i];
    program_run run = run_program(args, NULL);
    if (run.code != 2 || strcmp(run.err.data, expected.data) != 0)
        fail_msg("%s '%s': exit code %d\n   got      %s   expected %s", command, c->text, run.code,
                 run.err.data, expected.data);
    assert_false(ith_path_exists(written));
    program_run_deinit(&run);
    ith_buf_deinit(&expected);
}

static const wrong_config cases[] = {
    {"chunk_loss_size: 0\n",
     {NULL},
     "error: @:1:18: chunk_loss_size: found 0 (use an integer >= 1, or null)\n"},
    {"chunk_loss_size: 8\n",
     {"chunk_loss_size=-1", NULL},
     "error: command line: chunk_loss_size: found -1 (use an integer >= 1, or null)\n"},
    {"evaluation_strategy: steps\ntrain_mm_proj_only: true\nlearning_rate: 1e-5x\n",
     {NULL},
     "error: @:1:1: evaluation_strategy: unknown key (here it is eval_strategy)\n"
     "error: @:2:1: train_mm_proj_only: unknown key (docs/config.md lists all)\n"
     "error: @:3:16: learning_rate: found text '1e-5x' (use a number >= 0)\n"},
    {"seed: 1\n",
     {"--sed=2", NULL},
     "error: command line: sed: unknown key (did you mean seed?)\n"},
    {"seed: 1\n", {"oops", NULL}, "error: 'oops': not key=value\n"},
    {"peft_config:\n  name: lora\n  r: 16\n",
     {NULL},
     "error: @:2:9: peft_config: lora is not built yet (adapters and partial training; use "
     "null)\n"},
    {"model_name_or_path: x\nmax_lenth: 5\n",
     {NULL},
     "error: @:2:1: max_lenth: unknown key (did you mean max_length?)\n"},
    {"a: [1\n",
     {NULL},
     "error: @:2:1: not YAML: did not find expected ',' or ']', while parsing a flow sequence "
     "(line "
     "1)\n"},
};

static void test_train_names_every_mistake(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check("train", &cases[i]);
}

static void test_plan_names_every_mistake(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check("plan", &cases[i]);
}

static void test_a_missing_file_is_a_wrong_request(void **state)
{
    (void)state;
    static const char *const missing[] = {"train", "no/such.yaml", NULL};
    static const char *const directory[] = {"plan", "/", NULL};
    static const char *const none[] = {"train", NULL};
    program_run run = run_program(missing, NULL);
    assert_int_equal(run.code, 2);
    assert_string_equal(run.err.data,
                        "error: no/such.yaml: no such file (give a YAML or JSON file)\n");
    program_run_deinit(&run);
    run = run_program(directory, NULL);
    assert_int_equal(run.code, 2);
    assert_string_equal(run.err.data, "error: /: found a directory (give a YAML or JSON file)\n");
    program_run_deinit(&run);
    run = run_program(none, NULL);
    assert_int_equal(run.code, 2);
    assert_string_equal(run.err.data, "error: train: an argument is missing (use ithaca train "
                                      "CONFIG [key=value ...])\n");
    program_run_deinit(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_train_names_every_mistake),
        cmocka_unit_test(test_plan_names_every_mistake),
        cmocka_unit_test(test_a_missing_file_is_a_wrong_request),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
