/* Goal: one value changes, every other byte stays. Method: texts in and out. */
#include "testing.h"

#include "checkpoint/json_edit.h"

static void check(const char *text, const char *path, const char *value, const char *wanted)
{
    ith_error err = {0};
    ith_buf buf = {0};
    ith_buf_puts(&buf, text);
    assert_ok(ith_json_edit_set(&buf, path, value, &err), err);
    assert_string_equal(buf.data, wanted);
    ith_buf_deinit(&buf);
}

static void test_set_replaces_only_the_value(void **state)
{
    (void)state;
    check("{\"dtype\": \"bfloat16\"}", "dtype", "\"float32\"", "{\"dtype\": \"float32\"}");
    check("{\n  \"eps\": 1e-06,\n  \"dtype\" :\t null ,\n  \"z\": [1, {\"dtype\": 3}]\n}\n",
          "dtype", "7",
          "{\n  \"eps\": 1e-06,\n  \"dtype\" :\t 7 ,\n  \"z\": [1, {\"dtype\": 3}]\n}\n");
    check("{\"a\":{\"dtype\":1},\"t\":{\"x\":[],\"dtype\":{\"q\":\"}\\\"\"}},\"dtype\":2}",
          "t.dtype", "true", "{\"a\":{\"dtype\":1},\"t\":{\"x\":[],\"dtype\":true},\"dtype\":2}");
    check("{\"s\": \"\\\\\", \"k\": -1.5e3}", "k", "0", "{\"s\": \"\\\\\", \"k\": 0}");
    check("{\"k\":true}", "k", "0", "{\"k\":0}");
    check("{\"k\":1,\"k\":2}", "k", "0", "{\"k\":1,\"k\":0}"); /* parsers take the last */
    check("\xef\xbb\xbf{\"k\":1}", "k", "0", "\xef\xbb\xbf{\"k\":0}");
}

static void test_set_adds_a_missing_key_in_the_style_around_it(void **state)
{
    (void)state;
    check("{\n  \"a\": 1,\n  \"b\": {}\n}\n", "c", "2",
          "{\n  \"a\": 1,\n  \"b\": {},\n  \"c\": 2\n}\n");
    check("{\"a\":1}", "c", "2", "{\"a\":1,\"c\": 2}");
    check("{}", "c", "2", "{\"c\": 2}");
    check("{ }", "c", "2", "{\"c\": 2 }");
    check("{\"t\": { \"a\": 1 }}", "t.c", "2", "{\"t\": { \"a\": 1, \"c\": 2 }}");
}

static void test_set_refuses_what_it_cannot_do_and_changes_nothing(void **state)
{
    (void)state;
    static const struct {
        const char *text, *path, *part;
    } cases[] = {{"{\"a\": 1", "a", "a:1:"},
                 {"[1]", "a", "a: not in an object"},
                 {"{\"a\": 1}", "a.b", "a.b: not in an object"},
                 {"{\"a\": 1}", "t.b", "t.b: t is missing"},
                 {"", "a", "empty, expected JSON"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_error err = {0};
        ith_buf buf = {0};
        ith_buf_puts(&buf, cases[i].text);
        assert_fails(ith_json_edit_set(&buf, cases[i].path, "2", &err), err, ITH_ERR_FORMAT,
                     cases[i].part);
        assert_string_equal(buf.data, cases[i].text);
        ith_buf_deinit(&buf);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_set_replaces_only_the_value),
        cmocka_unit_test(test_set_adds_a_missing_key_in_the_style_around_it),
        cmocka_unit_test(test_set_refuses_what_it_cannot_do_and_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
