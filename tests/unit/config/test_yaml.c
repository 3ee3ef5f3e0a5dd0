/* Goal: the tree of a YAML file is what PyYAML would load, with positions, and no input can hang,
 * exhaust memory or crash. Method: small texts with known results, limits, every failing
 * allocation, and the fuzz corpus. */
#include "testing.h"

#include "config/yaml.h"

#include <math.h>

static ith_status parse(ith_yaml *out, const char *text, ith_error *err)
{
    return ith_yaml_parse(out, text, (int64_t)strlen(text), "f.yaml", err);
}

static void assert_error(const char *text, const char *expected)
{
    ith_yaml yaml;
    ith_error err = {0};
    ith_status status = parse(&yaml, text, &err);
    if (status == ITH_OK || strcmp(err.text, expected) != 0)
        fail_msg("'%s': status %d, text '%s'; expected '%s'", text, (int)status, err.text,
                 expected);
}

static void test_parse_positions_are_kept(void **state)
{
    (void)state;
    ith_yaml yaml;
    ith_error err = {0};
    assert_ok(parse(&yaml, "# comment\na: 1\nb:\n  - x\n  - c: 'y'\n", &err), err);
    const ith_yaml_node *b = ith_yaml_find(yaml.root, "b");
    assert_non_null(b);
    assert_int_equal(b->kind, ITH_YAML_SEQ);
    assert_int_equal(b->count, 2);
    const ith_yaml_node *y = ith_yaml_find(b->items[1], "c");
    assert_string_equal(y->text, "y");
    assert_int_equal(y->line, 5);
    assert_int_equal(y->column, 8);
    assert_true(y->quoted);
    assert_null(ith_yaml_find(yaml.root, "absent"));
    ith_error_clear(&err);
    ith_yaml_fail(y, &err, "bad");
    assert_string_equal(err.text, "f.yaml:5:8: bad");
    ith_yaml_deinit(&yaml);
}

static void test_parse_empty_document_is_null(void **state)
{
    (void)state;
    static const char *const texts[] = {"", "# only a comment\n", "---\n", "\xef\xbb\xbf"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        ith_yaml yaml;
        ith_error err = {0};
        assert_ok(parse(&yaml, texts[i], &err), err);
        assert_true(ith_yaml_is_null(yaml.root));
        ith_yaml_deinit(&yaml);
    }
}

static void test_parse_byte_order_mark_is_skipped(void **state)
{
    (void)state;
    ith_yaml yaml;
    ith_error err = {0};
    assert_ok(parse(&yaml, "\xef\xbb\xbfkey: v\n", &err), err);
    assert_non_null(ith_yaml_find(yaml.root, "key"));
    assert_int_equal(yaml.root->pairs[0].key->column, 1);
    ith_yaml_deinit(&yaml);
}

/* Types that yaml.safe_load of PyYAML 6.0 gives. */
static void test_scalar_types_are_yaml_1_1(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        ith_yaml_type type;
        double value;
    } cases[] = {
        {"yes", ITH_YAML_BOOL, 1},
        {"Off", ITH_YAML_BOOL, 0},
        {"TRUE", ITH_YAML_BOOL, 1},
        {"tRUE", ITH_YAML_STR, 0},
        {"y", ITH_YAML_STR, 0},
        {"~", ITH_YAML_NULL, 0},
        {"Null", ITH_YAML_NULL, 0},
        {"nULL", ITH_YAML_STR, 0},
        {"12", ITH_YAML_INT, 12},
        {"-12", ITH_YAML_INT, -12},
        {"+7", ITH_YAML_INT, 7},
        {"1_000", ITH_YAML_INT, 1000},
        {"017", ITH_YAML_INT, 15},
        {"0o17", ITH_YAML_STR, 0},
        {"0x1F", ITH_YAML_INT, 31},
        {"0b101", ITH_YAML_INT, 5},
        {"08", ITH_YAML_STR, 0},
        {"0", ITH_YAML_INT, 0},
        {"1:30", ITH_YAML_INT, 90},
        {"-1:30:05", ITH_YAML_INT, -5405},
        {"1:60", ITH_YAML_STR, 0},
        {"1:30.5", ITH_YAML_FLOAT, 90.5},
        {"1.0e-4", ITH_YAML_FLOAT, 1e-4},
        {"1e-4", ITH_YAML_STR, 0},
        {"1.0e4", ITH_YAML_STR, 0},
        {"1.e+4", ITH_YAML_FLOAT, 1e4},
        {"3.", ITH_YAML_FLOAT, 3},
        {".5", ITH_YAML_FLOAT, 0.5},
        {"-.5", ITH_YAML_STR, 0},
        {".inf", ITH_YAML_FLOAT, (double)INFINITY},
        {"-.INF", ITH_YAML_FLOAT, -(double)INFINITY},
        {"inf", ITH_YAML_STR, 0},
        {"1_0.2_5", ITH_YAML_FLOAT, 10.25},
        {"0x", ITH_YAML_STR, 0},
        {"+", ITH_YAML_STR, 0},
        {".", ITH_YAML_STR, 0},
        {"1.2.3", ITH_YAML_STR, 0},
        {"2001-01-01", ITH_YAML_STR, 0},
        {"9223372036854775807", ITH_YAML_INT, 9223372036854775807.0},
        {"9223372036854775808", ITH_YAML_FLOAT, 9223372036854775808.0},
        {"'12'", ITH_YAML_STR, 0},
        {"\"yes\"", ITH_YAML_STR, 0},
        {"!!str 12", ITH_YAML_STR, 0},
        {"!!int \"12\"", ITH_YAML_INT, 12},
        {"!!float 1e-4", ITH_YAML_FLOAT, 1e-4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[64];
        ith_yaml yaml;
        ith_error err = {0};
        snprintf(text, sizeof text, "k: %s\n", cases[i].text);
        assert_ok(parse(&yaml, text, &err), err);
        const ith_yaml_node *node = ith_yaml_find(yaml.root, "k");
        double value = node->type == ITH_YAML_BOOL    ? node->bool_value
                       : node->type == ITH_YAML_INT   ? (double)node->int_value
                       : node->type == ITH_YAML_FLOAT ? node->float_value
                                                      : 0;
        if (node->type != cases[i].type || value < cases[i].value || value > cases[i].value)
            fail_msg("%s: type %d value %.17g; expected type %d value %.17g", cases[i].text,
                     (int)node->type, value, (int)cases[i].type, cases[i].value);
        ith_yaml_deinit(&yaml);
    }
}

static void test_get_float_takes_every_usual_form(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double value;
    } cases[] = {{"1e-5", 1e-5},  {"1.0e-5", 1e-5}, {"5E-05", 5e-5},    {".1", 0.1},
                 {"3.e-4", 3e-4}, {"1e5", 1e5},     {"\"1e-5\"", 1e-5}, {"'0.5'", 0.5},
                 {"7", 7},        {"-2.5", -2.5},   {"1_000.5", 1000.5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_yaml yaml;
        ith_error err = {0};
        double value = 0;
        assert_ok(parse(&yaml, cases[i].text, &err), err);
        assert_ok(ith_yaml_get_float(yaml.root, "lr", -1e9, 1e9, &value, &err), err);
        if (value < cases[i].value || value > cases[i].value)
            fail_msg("%s: got %.17g, expected %.17g", cases[i].text, value, cases[i].value);
        ith_yaml_deinit(&yaml);
    }
    static const char *const wrong[] = {"1e-5x", "one",  "true", "null", "[1]",   "1e400",
                                        ".inf",  ".nan", "''",   "1e",   "0x10.5"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ith_yaml yaml;
        ith_error err = {0};
        double value = 0;
        assert_ok(parse(&yaml, wrong[i], &err), err);
        assert_fails(ith_yaml_get_float(yaml.root, "lr", 0, 1, &value, &err), err, ITH_ERR_USAGE,
                     "f.yaml:1:1: lr: found ");
        ith_yaml_deinit(&yaml);
    }
}

static void test_getters_name_place_found_and_wanted(void **state)
{
    (void)state;
    ith_yaml yaml;
    ith_error err = {0};
    int64_t n = 7;
    bool flag = false;
    const char *text = NULL;
    assert_ok(parse(&yaml, "a: long\nb: [1]\nc: 3\nd: 'on'\ne: ~\nf: \"x\\0y\"\n", &err), err);
    const ith_yaml_node *a = ith_yaml_find(yaml.root, "a"), *b = ith_yaml_find(yaml.root, "b");
    const ith_yaml_node *c = ith_yaml_find(yaml.root, "c"), *d = ith_yaml_find(yaml.root, "d");
    const ith_yaml_node *e = ith_yaml_find(yaml.root, "e"), *f = ith_yaml_find(yaml.root, "f");
    assert_fails(ith_yaml_get_int(a, "a", 1, INT64_MAX, &n, &err), err, ITH_ERR_USAGE,
                 "f.yaml:1:4: a: found text 'long' (use an integer >= 1)");
    assert_fails(ith_yaml_get_int(c, "c", 4, 8, &n, &err), err, ITH_ERR_USAGE,
                 "f.yaml:3:4: c: found 3 (use an integer from 4 to 8)");
    assert_int_equal(n, 7); /* untouched */
    assert_fails(ith_yaml_get_bool(b, "b", &flag, &err), err, ITH_ERR_USAGE,
                 "f.yaml:2:4: b: found a list (use true or false)");
    assert_ok(ith_yaml_get_bool(d, "d", &flag, &err), err);
    assert_true(flag);
    assert_fails(ith_yaml_get_string(e, "e", &text, &err), err, ITH_ERR_USAGE,
                 "f.yaml:5:4: e: found nothing (null) (use text)");
    assert_fails(ith_yaml_get_string(f, "f", &text, &err), err, ITH_ERR_USAGE, "NUL");
    assert_ok(ith_yaml_get_string(c, "c", &text, &err), err);
    assert_string_equal(text, "3");
    ith_yaml_deinit(&yaml);
}

static void test_check_keys_names_the_nearest(void **state)
{
    (void)state;
    static const char *const names[] = {"path", "source", "converter", "split"};
    ith_yaml yaml;
    ith_error err = {0};
    assert_ok(parse(&yaml, "d:\n  path: x\n  convertor: alpaca\n", &err), err);
    const ith_yaml_node *d = ith_yaml_find(yaml.root, "d");
    assert_fails(ith_yaml_check_keys(d, "d", names, 4, &err), err, ITH_ERR_USAGE,
                 "f.yaml:3:3: d.convertor: unknown key (did you mean converter?)");
    ith_yaml_deinit(&yaml);
}

static void test_mistakes_are_named_with_their_place(void **state)
{
    (void)state;
    assert_error("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: a: given twice (first at line 1)");
    assert_error("a: *x\n", "f.yaml:1:4: alias *x has no anchor before it");
    assert_error("a: &x [*x]\n", "f.yaml:1:8: alias *x has no anchor before it");
    assert_error("? [1]\n: 2\n", "f.yaml:1:3: found a list or map as a key (keys are words)");
    assert_error("a: 1\n---\nb: 2\n", "f.yaml:2:1: found a second YAML document (keep one)");
    assert_error("a: !!python/object:os.system x\n",
                 "f.yaml:1:4: found a YAML tag that is not supported (remove it)");
    assert_error("a: !!int x\n", "f.yaml:1:4: the value does not fit its YAML tag");
    assert_error("a: [1, 2\n", "f.yaml:2:1: not YAML: did not find expected ',' or ']', while "
                               "parsing a flow sequence (line 1)");
    assert_error("a:\n\t- 1\n", "f.yaml:2:1: not YAML: found a tab at the begin of the line "
                                "(indent by spaces)");
    assert_error("a: 1\nb: c\n \td: 1\n", "f.yaml:3:1: not YAML: found a tab at the begin of the "
                                          "line (indent by spaces)");
    assert_error("a: 1\nb:c\nd: 1\n", "f.yaml:2:1: not YAML: found text without a colon and a "
                                      "space (key: value)");
    assert_error("<<: 3\n", "f.yaml:1:5: <<: found a value (use a map or a list of maps)");
}

static void test_merge_keys_yield_to_own_keys(void **state)
{
    (void)state;
    ith_yaml yaml;
    ith_error err = {0};
    assert_ok(parse(&yaml,
                    "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\n"
                    "one:\n  <<: *b\n  x: 9\ntwo:\n  <<: [*b, *o]\n",
                    &err),
              err);
    const ith_yaml_node *one = ith_yaml_find(yaml.root, "one");
    const ith_yaml_node *two = ith_yaml_find(yaml.root, "two");
    assert_int_equal(one->count, 2);
    assert_int_equal(ith_yaml_find(one, "x")->int_value, 9);
    assert_int_equal(ith_yaml_find(one, "y")->int_value, 2);
    assert_int_equal(two->count, 3);
    assert_int_equal(ith_yaml_find(two, "y")->int_value, 2);
    assert_int_equal(ith_yaml_find(two, "z")->int_value, 4);
    ith_yaml_deinit(&yaml);
}

static void test_alias_bomb_is_refused(void **state)
{
    (void)state;
    ith_buf text = {0};
    ith_buf_puts(&text, "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
    for (int i = 1; i < 9; i++) {
        ith_buf_printf(&text, "a%d: &a%d [", i, i);
        for (int k = 0; k < 10; k++)
            ith_buf_printf(&text, "%s*a%d", k ? "," : "", i - 1);
        ith_buf_puts(&text, "]\n");
    }
    ith_yaml yaml;
    ith_error err = {0};
    assert_fails(parse(&yaml, text.data, &err), err, ITH_ERR_USAGE,
                 "aliases expand to more than 1000000 values");
    ith_buf_deinit(&text);
}

static void test_depth_is_limited(void **state)
{
    (void)state;
    for (int depth = 60; depth < 70; depth++) {
        ith_buf text = {0};
        for (int i = 0; i < depth; i++)
            ith_buf_putc(&text, '[');
        for (int i = 0; i < depth; i++)
            ith_buf_putc(&text, ']');
        ith_yaml yaml;
        ith_error err = {0};
        ith_status status = parse(&yaml, text.data, &err);
        if ((status == ITH_OK) != (depth <= ITH_YAML_MAX_DEPTH))
            fail_msg("depth %d: status %d, text '%s'", depth, (int)status, err.text);
        if (status == ITH_OK)
            ith_yaml_deinit(&yaml);
        ith_buf_deinit(&text);
    }
}

static void test_json_is_read_with_positions(void **state)
{
    (void)state;
    static const char text[] =
        "\t{\"a\":1,\n\t\"b\": \"\\ud83d\\ude00\\/\", \"c\": [true, null, 1E5]}";
    ith_yaml yaml;
    ith_error err = {0};
    assert_ok(ith_yaml_parse(&yaml, text, sizeof text - 1, "f.json", &err), err);
    double value = 0;
    const ith_yaml_node *c = ith_yaml_find(yaml.root, "c");
    assert_string_equal(ith_yaml_find(yaml.root, "b")->text, "\xf0\x9f\x98\x80/");
    assert_ok(ith_yaml_get_float(c->items[2], "c", 0, 1e9, &value, &err), err);
    assert_int_equal((int64_t)value, 100000);
    assert_int_equal(c->line, 2);
    ith_yaml_deinit(&yaml);
    assert_fails(ith_yaml_parse(&yaml, "{\"a\": 1,}", 9, "f.json", &err), err, ITH_ERR_USAGE,
                 "f.json:1:");
}

static void test_write_string_reads_back(void **state)
{
    (void)state;
    static const char *const texts[] = {"plain",
                                        "./a/b-c_d.yaml",
                                        "",
                                        "yes",
                                        "null",
                                        "12",
                                        "1e-4",
                                        "-x",
                                        "~/x",
                                        "a: b",
                                        "a #b",
                                        "tab\tnew\nline\\\"quote\"",
                                        "\xe2\x80\xa8 sep",
                                        "\xc2\x85",
                                        "\xf0\x9f\x98\x80 smile",
                                        "\xef\xbb\xbf mark",
                                        "{x}",
                                        "[x]",
                                        "*x",
                                        "&x",
                                        "!x",
                                        "%x",
                                        "@x",
                                        "`x",
                                        "'x",
                                        "=",
                                        "<<",
                                        "trailing ",
                                        " leading",
                                        "2001-01-01",
                                        ".5",
                                        "0x1f",
                                        "\x01\x7f"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        ith_buf out = {0};
        ith_yaml yaml;
        ith_error err = {0};
        const char *back = NULL;
        ith_buf_puts(&out, "k: ");
        ith_yaml_write_string(&out, texts[i]);
        ith_buf_puts(&out, "\n");
        assert_ok(parse(&yaml, out.data, &err), err);
        const ith_yaml_node *node = ith_yaml_find(yaml.root, "k");
        assert_ok(ith_yaml_get_string(node, "k", &back, &err), err);
        assert_string_equal(back, texts[i]);
        assert_int_equal(node->type, ITH_YAML_STR);
        ith_yaml_deinit(&yaml);
        ith_buf_deinit(&out);
    }
}

static void test_nearest_name(void **state)
{
    (void)state;
    static const char *const names[] = {"learning_rate", "cutoff_len", "seed", "model"};
    assert_string_equal(ith_nearest_name("learing_rate", names, 4), "learning_rate");
    assert_string_equal(ith_nearest_name("cutof_length", names, 4), "cutoff_len");
    assert_string_equal(ith_nearest_name("sede", names, 4), "seed");
    assert_null(ith_nearest_name("banana", names, 4));
    assert_null(ith_nearest_name("", names, 4));
}

static void test_every_failing_allocation_is_reported(void **state)
{
    (void)state;
    static const char text[] = "a: &x {p: 1, q: [1, 2]}\nb:\n  <<: *x\n  c: {d: e}\n";
    for (int64_t n = 1;; n++) {
        ith_yaml yaml;
        ith_error err = {0};
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ith_status status = parse(&yaml, text, &err);
        int64_t seen = ith_fault_count(ITH_FAULT_ALLOC);
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        if (status == ITH_OK) {
            ith_yaml_deinit(&yaml);
            assert_true(seen < n);
            assert_true(n > 5);
            return;
        }
        assert_int_equal(status, ITH_ERR_MEMORY);
        assert_true(err.text[0] != '\0');
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse_positions_are_kept),
        cmocka_unit_test(test_parse_empty_document_is_null),
        cmocka_unit_test(test_parse_byte_order_mark_is_skipped),
        cmocka_unit_test(test_scalar_types_are_yaml_1_1),
        cmocka_unit_test(test_get_float_takes_every_usual_form),
        cmocka_unit_test(test_getters_name_place_found_and_wanted),
        cmocka_unit_test(test_check_keys_names_the_nearest),
        cmocka_unit_test(test_mistakes_are_named_with_their_place),
        cmocka_unit_test(test_merge_keys_yield_to_own_keys),
        cmocka_unit_test(test_alias_bomb_is_refused),
        cmocka_unit_test(test_depth_is_limited),
        cmocka_unit_test(test_json_is_read_with_positions),
        cmocka_unit_test(test_write_string_reads_back),
        cmocka_unit_test(test_nearest_name),
        cmocka_unit_test(test_every_failing_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
