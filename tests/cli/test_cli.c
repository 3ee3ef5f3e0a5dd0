/* Goal: the frame of the command line: exit codes, exact error lines, help, and pages in sync with
 * their tables. Method: run the program and compare what it wrote. */
#include "run_program.h"

#include "base/env.h"

static void test_mistakes_are_exact_lines(void **state)
{
    (void)state;
    static const struct {
        const char *args[6];
        const char *expected;
    } cases[] = {
        {{"trian"}, "error: trian: unknown command (did you mean train?)\n"},
        {{"banana"}, "error: banana: unknown command (ithaca help lists all)\n"},
        {{""}, "error: : unknown command (ithaca help lists all)\n"},
        {{"version", "x"}, "error: version: 'x': one argument too many (use ithaca version)\n"},
        {{"completion"},
         "error: completion: an argument is missing (use ithaca completion bash|zsh|fish)\n"},
        {{"completion", "tcsh"}, "error: completion: found 'tcsh' (use bash, zsh or fish)\n"},
        {{"env", "--markdwn"},
         "error: env: --markdwn: unknown option (did you mean --markdown?)\n"},
        {{"env", "--xyzzy"}, "error: env: --xyzzy: unknown option (--help lists all)\n"},
        {{"env", "--markdown=1"}, "error: env: --markdown: takes no value\n"},
        {{"env", "-z"}, "error: env: -z: unknown option (--help lists all)\n"},
        {{"help", "trian"}, "error: trian: unknown command (did you mean train?)\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        program_run run = run_program(cases[i].args, NULL);
        assert_string_equal(run.err.data, cases[i].expected);
        assert_string_equal(run.out.data, "");
        assert_int_equal(run.code, 2);
        program_run_deinit(&run);
    }
}

static void test_no_command_shows_the_overview(void **state)
{
    (void)state;
    static const char *const none[] = {NULL}, *const help[] = {"--help", NULL};
    program_run run = run_program(none, NULL), wanted = run_program(help, NULL);
    assert_int_equal(run.code, 2);
    assert_int_equal(wanted.code, 0);
    assert_string_equal(run.out.data, wanted.out.data);
    assert_string_equal(run.err.data, "error: a command is missing (ithaca train CONFIG trains)\n");
    assert_string_equal(wanted.err.data, "");
    program_run_deinit(&run);
    program_run_deinit(&wanted);
}

/* The words of the overview's command list are commands: each has a help page that names it. */
static void test_every_command_has_help(void **state)
{
    (void)state;
    static const char *const names[] = {"train",   "plan",       "chat", "generate", "export",
                                        "experts", "data",       "init", "tokenize", "render",
                                        "env",     "completion", "help", "version"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *const long_form[] = {names[i], "--help", NULL};
        const char *const short_form[] = {names[i], "-h", NULL};
        const char *const help_form[] = {"help", names[i], NULL};
        char usage[64];
        program_run a = run_program(long_form, NULL), b = run_program(short_form, NULL);
        program_run c = run_program(help_form, NULL);
        snprintf(usage, sizeof usage, "Usage: ithaca %s", names[i]);
        assert_int_equal(a.code, 0);
        assert_int_equal(strncmp(a.out.data, usage, strlen(usage)), 0);
        assert_string_equal(a.out.data, b.out.data);
        assert_string_equal(a.out.data, c.out.data);
        for (const char *p = a.out.data; *p;) {
            size_t len = strcspn(p, "\n");
            if (len > 80)
                fail_msg("%s --help: %zu columns: %.*s", names[i], len, (int)len, p);
            p += len + (p[len] == '\n');
        }
        program_run_deinit(&a);
        program_run_deinit(&b);
        program_run_deinit(&c);
    }
}

static void test_version_is_one_line(void **state)
{
    (void)state;
    static const char *const forms[][2] = {{"version", NULL}, {"--version", NULL}, {"-V", NULL}};
    for (size_t i = 0; i < 3; i++) {
        program_run run = run_program(forms[i], NULL);
        assert_int_equal(run.code, 0);
        assert_string_equal(run.out.data, "ithaca " ITH_VERSION "\n");
        program_run_deinit(&run);
    }
}

static void test_env_names_every_variable(void **state)
{
    (void)state;
    static const char *const args[] = {"env", NULL};
    program_run run = run_program(args, "ITH_THREADS=3");
    assert_int_equal(run.code, 0);
    for (int i = 0; i < ITH_ENV_COUNT; i++)
        assert_non_null(strstr(run.out.data, ith_env_table[i].name));
    assert_non_null(strstr(run.out.data, "ITH_THREADS=3"));
    assert_non_null(strstr(run.out.data, "version        " ITH_VERSION));
    program_run plain = run_program(args, "ITH_CPU=generic");
    assert_non_null(strstr(plain.out.data, "cpu kernels    generic\n"));
    program_run_deinit(&plain);
    program_run_deinit(&run);
}

static void test_wrong_environment_is_one_line(void **state)
{
    (void)state;
    static const char *const args[] = {"version", NULL};
    program_run run = run_program(args, "ITH_LOG=loud");
    assert_int_equal(run.code, 2);
    assert_string_equal(run.err.data, "error: ITH_LOG: 'loud' is not LEVEL or SUBSYSTEM:LEVEL "
                                      "(debug, info, warn, error)\n");
    program_run_deinit(&run);
}

/* The n-th failing allocation ends with one line and exit code 1, for every n. */
static void test_every_failing_allocation_is_one_line(void **state)
{
    (void)state;
    static const char *const args[] = {"help", "--man", NULL};
    for (int n = 1; n < 1000; n++) {
        char fault[64];
        snprintf(fault, sizeof fault, "ITH_FAULT=alloc:%d", n);
        program_run run = run_program(args, fault);
        int code = run.code;
        bool one_line =
            run.err.len > 0 && strchr(run.err.data, '\n') == run.err.data + run.err.len - 1;
        program_run_deinit(&run);
        if (code == 0)
            return;
        if (code != 1 || !one_line)
            fail_msg("allocation %d: exit code %d, one line: %d", n, code, one_line);
    }
    fail_msg("never succeeded");
}

static void assert_page(const char *const *args, const char *name)
{
    char path[4200];
    ith_buf file = {0};
    ith_error err = {0};
    snprintf(path, sizeof path, "%s/docs/%s", ITH_SOURCE_DIR, name);
    program_run run = run_program(args, NULL);
    assert_int_equal(run.code, 0);
    assert_ok(ith_read_file(path, 0, &file, &err), err);
    if (strcmp(run.out.data, file.data) != 0)
        fail_msg("docs/%s is out of date (build the target docs)", name);
    ith_buf_deinit(&file);
    program_run_deinit(&run);
}

static void test_pages_are_in_sync(void **state)
{
    (void)state;
    static const char *const man[] = {"help", "--man", NULL};
    static const char *const config[] = {"help", "--config-markdown", NULL};
    static const char *const env[] = {"env", "--markdown", NULL};
    assert_page(man, "ithaca.1");
    assert_page(config, "config.md");
    assert_page(env, "env.md");
}

static void test_output_to_a_full_disk_fails(void **state)
{
    (void)state;
    if (access("/dev/full", W_OK) != 0)
        skip();
    static const char *const args[] = {"help", "--man", NULL};
    program_run run = run_program_to(args, NULL, "/dev/full");
    assert_int_equal(run.code, 1);
    assert_string_equal(run.err.data, "error: stdout: cannot write: No space left on device\n");
    program_run_deinit(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mistakes_are_exact_lines),
        cmocka_unit_test(test_no_command_shows_the_overview),
        cmocka_unit_test(test_every_command_has_help),
        cmocka_unit_test(test_version_is_one_line),
        cmocka_unit_test(test_env_names_every_variable),
        cmocka_unit_test(test_wrong_environment_is_one_line),
        cmocka_unit_test(test_every_failing_allocation_is_one_line),
        cmocka_unit_test(test_pages_are_in_sync),
        cmocka_unit_test(test_output_to_a_full_disk_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
