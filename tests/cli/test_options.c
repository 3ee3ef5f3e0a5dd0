/* Goal: option tables parse as users expect from other programs. Method: argument lists with the
 * expected values or the exact error. */
#include "testing.h"

#include "cli/options.h"

#include <math.h>

static const ith_option table[] = {
    {.name = "verbose", .letter = 'v', .help = "Say more."},
    {.name = "quiet", .letter = 'q', .help = "Say less."},
    {.name = "count",
     .letter = 'n',
     .type = ITH_OPTION_INT,
     .default_text = "3",
     .min = 1,
     .max = 10,
     .help = "How many."},
    {.name = "limit", .type = ITH_OPTION_INT, .min = 0, .max = 0x1p53, .help = "At most."},
    {.name = "top-p",
     .type = ITH_OPTION_FLOAT,
     .default_text = "0.9",
     .min = 0,
     .max = 1,
     .help = "Mass."},
    {.name = "shift", .type = ITH_OPTION_FLOAT, .help = "Any number."},
    {.name = "output", .letter = 'o', .type = ITH_OPTION_PATH, .help = "Where."},
    {.name = "format",
     .type = ITH_OPTION_WORD,
     .default_text = "text",
     .words = "text json",
     .help = "How."},
    {0}};

static ith_status parse(ith_args *out, bool overrides, const char *const *words, ith_error *err)
{
    char *argv[16];
    int argc = 0;
    for (; words[argc]; argc++)
        memcpy(&argv[argc], &words[argc], sizeof argv[0]);
    return ith_args_parse(out, table, overrides, argc, argv, err);
}

static void test_defaults_hold_when_nothing_is_given(void **state)
{
    (void)state;
    static const char *const words[] = {NULL};
    ith_args args;
    ith_error err = {0};
    assert_ok(parse(&args, false, words, &err), err);
    assert_false(ith_args_flag(&args, "verbose"));
    assert_int_equal(ith_args_int(&args, "count"), 3);
    assert_true(ith_args_int(&args, "limit") == INT64_MIN);
    assert_true(fabs(ith_args_float(&args, "top-p") - 0.9) < 1e-15);
    assert_true(isnan(ith_args_float(&args, "shift")));
    assert_null(ith_args_text(&args, "output"));
    assert_int_equal(ith_args_word(&args, "format"), 0);
    assert_false(ith_args_given(&args, "count"));
    ith_args_deinit(&args);
}

static void test_every_form_of_an_option_is_read(void **state)
{
    (void)state;
    static const char *const words[] = {
        "a",       "-vq",      "-n5",  "--top-p=0.5", "--output", "-x",      "--shift",
        "-2.5e-3", "--format", "json", "key=value",   "--",       "--count", NULL};
    ith_args args;
    ith_error err = {0};
    assert_ok(parse(&args, false, words, &err), err);
    assert_true(ith_args_flag(&args, "verbose"));
    assert_true(ith_args_flag(&args, "quiet"));
    assert_int_equal(ith_args_int(&args, "count"), 5);
    assert_true(fabs(ith_args_float(&args, "top-p") - 0.5) < 1e-15);
    assert_true(fabs(ith_args_float(&args, "shift") + 2.5e-3) < 1e-15);
    assert_string_equal(ith_args_text(&args, "output"), "-x");
    assert_int_equal(ith_args_word(&args, "format"), 1);
    assert_int_equal(args.num_positional, 3);
    assert_string_equal(args.positional[0], "a");
    assert_string_equal(args.positional[1], "key=value");
    assert_string_equal(args.positional[2], "--count");
    assert_false(args.help);
    ith_args_deinit(&args);
}

static void test_the_last_one_wins_and_help_is_seen(void **state)
{
    (void)state;
    static const char *const words[] = {"-n", "1", "--count", "2", "-h", NULL};
    ith_args args;
    ith_error err = {0};
    assert_ok(parse(&args, false, words, &err), err);
    assert_int_equal(ith_args_int(&args, "count"), 2);
    assert_true(args.help);
    ith_args_deinit(&args);
}

static void test_overrides_pass_where_the_command_takes_them(void **state)
{
    (void)state;
    static const char *const words[] = {"f.yaml", "--learning_rate=1e-5", "--count=4", NULL};
    ith_args args;
    ith_error err = {0};
    assert_ok(parse(&args, true, words, &err), err);
    assert_int_equal(args.num_positional, 2);
    assert_string_equal(args.positional[1], "--learning_rate=1e-5");
    assert_int_equal(ith_args_int(&args, "count"), 4);
    ith_args_deinit(&args);
    assert_fails(parse(&args, false, words, &err), err, ITH_ERR_USAGE,
                 "--learning_rate: unknown option (--help lists all)");
}

static void test_mistakes_are_exact(void **state)
{
    (void)state;
    static const struct {
        const char *words[4], *expected;
    } cases[] = {
        {{"--count", "x"}, "--count: found 'x' (use an integer from 1 to 10)"},
        {{"--count", "11"}, "--count: found '11' (use an integer from 1 to 10)"},
        {{"--count", "5.0"}, "--count: found '5.0' (use an integer from 1 to 10)"},
        {{"--count", ""}, "--count: found '' (use an integer from 1 to 10)"},
        {{"--count", "99999999999999999999"},
         "--count: found '99999999999999999999' (use an integer from 1 to 10)"},
        {{"--limit", "-1"}, "--limit: found '-1' (use an integer >= 0)"},
        {{"--top-p", "nan"}, "--top-p: found 'nan' (use a number from 0 to 1)"},
        {{"--shift", "1x"}, "--shift: found '1x' (use a number)"},
        {{"--format", "xml"}, "--format: found 'xml' (use one of text, json)"},
        {{"--output"}, "--output: the value is missing"},
        {{"-n"}, "--count: the value is missing"},
        {{"--verbose=yes"}, "--verbose: takes no value"},
        {{"--cuont=3"}, "--cuont: unknown option (did you mean --count?)"},
        {{"--hepl"}, "--hepl: unknown option (did you mean --help?)"},
        {{"-vx"}, "-x: unknown option (--help lists all)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_args args;
        ith_error err = {0};
        ith_status status = parse(&args, false, cases[i].words, &err);
        assert_int_equal(status, ITH_ERR_USAGE);
        assert_string_equal(err.text, cases[i].expected);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_hold_when_nothing_is_given),
        cmocka_unit_test(test_every_form_of_an_option_is_read),
        cmocka_unit_test(test_the_last_one_wins_and_help_is_seen),
        cmocka_unit_test(test_overrides_pass_where_the_command_takes_them),
        cmocka_unit_test(test_mistakes_are_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
