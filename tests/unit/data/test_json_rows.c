/* Rows of JSON and JSON-lines files: where they begin and end, and what an error says. */
#include "testing.h"

#include "data/json_rows.h"

static ith_error err;

static ith_rows *open_text(const char *text, int64_t len, bool lines)
{
    ith_rows *rows = NULL;
    assert_ok(ith_rows_open_text(&rows, text, len, "file", lines, &err), err);
    return rows;
}

static ith_rows *open_lines(const char *text)
{
    return open_text(text, (int64_t)strlen(text), true);
}

static void assert_row(const ith_rows *rows, int64_t i, const char *expected)
{
    int64_t len = 0;
    const char *text = ith_rows_text(rows, i, &len);
    if (len != (int64_t)strlen(expected) || memcmp(text, expected, (size_t)len) != 0)
        fail_msg("row %lld is '%.*s', expected '%s'", (long long)i, (int)len, text, expected);
}

/* Blank lines are no rows, one CR goes, the last line needs no LF. */
static void test_rows_lines_blank_and_cr_are_skipped(void **state)
{
    (void)state;
    ith_rows *rows = open_lines("{\"a\":1}\r\n\n  \t\r\n{\"a\":2}\n   {\"a\":3}  ");
    assert_int_equal(ith_rows_count(rows), 3);
    assert_row(rows, 0, "{\"a\":1}");
    assert_row(rows, 1, "{\"a\":2}");
    assert_row(rows, 2, "{\"a\":3}");
    assert_int_equal(ith_rows_line(rows, 0), 1);
    assert_int_equal(ith_rows_line(rows, 1), 4);
    assert_int_equal(ith_rows_line(rows, 2), 5);
    char where[64];
    assert_string_equal(ith_rows_where(rows, 1, where, sizeof where), "file: row 2 (line 4)");
    ith_rows_close(rows);
}

/* Unicode line ends inside a string do not end a record (cases S07). */
static void test_rows_unicode_line_ends_are_text(void **state)
{
    (void)state;
    ith_rows *rows = open_lines("{\"t\":\"x\xe2\x80\xa8y\xe2\x80\xa9z\xc2\x85w\x0bv\x0cu\"}\n{}\n");
    assert_int_equal(ith_rows_count(rows), 2);
    ith_rows_close(rows);
    rows = open_lines("{\"t\":\"x\xe2\x80\xa8y\"}");
    json_t *row = NULL;
    assert_ok(ith_rows_parse(rows, 0, &row, &err), err);
    assert_string_equal(json_string_value(json_object_get(row, "t")), "x\xe2\x80\xa8y");
    json_decref(row);
    ith_rows_close(rows);
}

/* A byte order mark at byte 0 is skipped, U+FEFF in a string stays, one before a later row is an
 * error (cases S08). */
static void test_rows_bom_only_at_start_of_file(void **state)
{
    (void)state;
    ith_rows *rows = open_lines("\xef\xbb\xbf{\"t\":\"\xef\xbb\xbfq\"}\n\xef\xbb\xbf{\"t\":2}\n");
    json_t *row = NULL;
    assert_int_equal(ith_rows_count(rows), 2);
    assert_ok(ith_rows_parse(rows, 0, &row, &err), err);
    assert_string_equal(json_string_value(json_object_get(row, "t")), "\xef\xbb\xbfq");
    json_decref(row);
    assert_fails(ith_rows_parse(rows, 1, &row, &err), err, ITH_ERR_FORMAT,
                 "file:2: row 2 begins with a byte order mark");
    ith_rows_close(rows);
    rows = open_text("\xef\xbb\xbf[{}, {}]", 11, false);
    assert_int_equal(ith_rows_count(rows), 2);
    ith_rows_close(rows);
}

/* Elements of an array are found although strings hold brackets, quotes and backslashes. */
static void test_rows_array_elements_with_brackets_in_strings(void **state)
{
    (void)state;
    const char *text = "[\n  {\"a\": \"]},{[\", \"b\": [1, {\"c\": \"\\\\\\\"\"}]},\n"
                       "  {\"a\": \"\\\\\"}\n, {} ]\n\n";
    ith_rows *rows = open_text(text, (int64_t)strlen(text), false);
    assert_int_equal(ith_rows_count(rows), 3);
    assert_row(rows, 0, "{\"a\": \"]},{[\", \"b\": [1, {\"c\": \"\\\\\\\"\"}]}");
    assert_row(rows, 1, "{\"a\": \"\\\\\"}");
    assert_row(rows, 2, "{}");
    assert_int_equal(ith_rows_line(rows, 1), 3);
    ith_rows_close(rows);
    /* Also in a file called .jsonl. */
    rows = open_lines("[{\"a\":1},{\"a\":2}]");
    assert_int_equal(ith_rows_count(rows), 2);
    ith_rows_close(rows);
}

/* A .json file may hold lines, or objects that span lines. */
static void test_rows_json_values_in_sequence(void **state)
{
    (void)state;
    const char *text = "{\"a\":1}\n{\"a\":\n  2}\n\n{\"a\":3}{\"a\":4}";
    ith_rows *rows = open_text(text, (int64_t)strlen(text), false);
    assert_int_equal(ith_rows_count(rows), 4);
    assert_row(rows, 1, "{\"a\":\n  2}");
    ith_rows_close(rows);
}

static void test_rows_empty_files_have_no_rows(void **state)
{
    (void)state;
    const char *const texts[] = {"", "\n\n", "\xef\xbb\xbf", "[]", " [ ] \n"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        ith_rows *rows = open_lines(texts[i]);
        if (ith_rows_count(rows) != 0)
            fail_msg("'%s' has %lld rows", texts[i], (long long)ith_rows_count(rows));
        ith_rows_close(rows);
    }
}

/* What is wrong with the whole file is said when it is opened, with the place. */
static void test_rows_broken_files_name_the_place(void **state)
{
    (void)state;
    static const struct {
        const char *text, *part;
    } broken[] = {
        {"[{\"a\":1},\n {\"a\":2}", "file:2:9: row 3: the array is not closed"},
        {"[{\"a\":1},\n {\"a\":\"2]\n", "file:2:2: row 2: is not closed before the end"},
        {"[{\"a\":1} {\"a\":2}]", "file:1:10: row 2: expected ',' or ']'"},
        {"[{\"a\":1},]", "file:1:10: row 2: expected a JSON object after the comma"},
        {"[,{\"a\":1}]", "file:1:2: row 1: expected a JSON object"},
        {"[{}] {}", "file:1:6: row 2: text after the end of the array"},
        {"{\"a\":1}\nnonsense", "file:2:1: row 2: expected a JSON object"},
        {"{\"a\":1}\n{\"a\":", "file:2:1: row 2: is not closed"},
    };
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        ith_rows *rows = NULL;
        assert_fails(ith_rows_open_text(&rows, broken[i].text, (int64_t)strlen(broken[i].text),
                                        "file", false, &err),
                     err, ITH_ERR_FORMAT, broken[i].part);
        assert_null(rows);
    }
    /* NUL bytes are no punctuation and no end. */
    ith_rows *rows = NULL;
    assert_ok(ith_rows_open_text(&rows, "[\0\0,{}]", 7, "file", false, &err), err);
    assert_int_equal(ith_rows_count(rows), 2);
    ith_rows_close(rows);
}

/* What is wrong within a row is said when it is parsed, with line and column of the file. */
static void test_rows_parse_errors_have_file_positions(void **state)
{
    (void)state;
    json_t *row = NULL;
    ith_rows *rows = open_lines("{\"a\":1}\n\n{\"a\":1 \"b\":2}\n[1]\n\"x\"\n{\"a\":1,}");
    assert_int_equal(ith_rows_count(rows), 5);
    assert_fails(ith_rows_parse(rows, 1, &row, &err), err, ITH_ERR_FORMAT, "file:3:");
    assert_non_null(strstr(err.text, "row 2"));
    assert_fails(ith_rows_parse(rows, 2, &row, &err), err, ITH_ERR_FORMAT,
                 "file:4: row 3: found array, expected a JSON object");
    assert_fails(ith_rows_parse(rows, 3, &row, &err), err, ITH_ERR_FORMAT, "found string");
    assert_fails(ith_rows_parse(rows, 4, &row, &err), err, ITH_ERR_FORMAT, "file:6:");
    assert_null(row);
    ith_rows_close(rows);
    const char *text = "[\n{},\n{\"a\":\n tru}]";
    rows = open_text(text, (int64_t)strlen(text), false);
    assert_fails(ith_rows_parse(rows, 1, &row, &err), err, ITH_ERR_FORMAT, "file:4:");
    ith_rows_close(rows);
}

/* Each row is judged alone: a field may change its type from row to row (cases S01). */
static void test_rows_types_may_differ_between_rows(void **state)
{
    (void)state;
    ith_rows *rows = open_lines("{\"m\":1}\n{\"m\":\"one\"}\n{\"m\":[[0,\"x\",null]]}\n"
                                "{\"m\":123456789012345678901234567890}");
    for (int64_t i = 0; i < ith_rows_count(rows); i++) {
        json_t *row = NULL;
        assert_ok(ith_rows_parse(rows, i, &row, &err), err);
        json_decref(row);
    }
    assert_int_equal(ith_rows_count(rows), 4);
    ith_rows_close(rows);
}

static void test_rows_other_kinds_of_files_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *name, *part;
        ith_status status;
    } kinds[] = {{"x.csv", "convert it to .jsonl", ITH_ERR_UNSUPPORTED},
                 {"x.PARQUET", "convert it to .jsonl", ITH_ERR_UNSUPPORTED},
                 {"x.arrow", "convert it to .jsonl", ITH_ERR_UNSUPPORTED},
                 {"x.jsonl.gz", "unpack it first", ITH_ERR_UNSUPPORTED},
                 {"x.txt", "raw text", ITH_ERR_UNSUPPORTED},
                 {"x.docx", "unknown kind of file", ITH_ERR_USAGE},
                 {"missing.jsonl", "missing.jsonl: cannot open", ITH_ERR_IO}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        ith_rows *rows = NULL;
        assert_fails(ith_rows_open(&rows, kinds[i].name, &err), err, kinds[i].status,
                     kinds[i].part);
    }
}

/* Every failing allocation and read gives one error and no leak (ASan), and the file opens after
 * that. */
static void test_rows_faults_leave_nothing(void **state)
{
    (void)state;
    char path[4200];
    ith_buf text = {0};
    snprintf(path, sizeof path, "%s/rows.jsonl", temp_dir("rows"));
    for (int i = 0; i < 100; i++)
        ith_buf_puts(&text, "{\"a\": [1, 2, {\"b\": \"c\"}]}\n");
    assert_ok(ith_write_file(path, text.data, text.len, &err), err);
    ith_buf_deinit(&text);
    for (int kind = ITH_FAULT_ALLOC; kind <= ITH_FAULT_READ; kind++) {
        int failures = 0;
        for (int64_t n = 1;; n++) {
            ith_rows *rows = NULL;
            json_t *row = NULL;
            ith_error_clear(&err);
            ith_fault_set((ith_fault_kind)kind, n);
            ith_status status = ith_rows_open(&rows, path, &err);
            if (status == ITH_OK)
                status = ith_rows_parse(rows, 99, &row, &err);
            bool hit = ith_fault_count((ith_fault_kind)kind) >= n;
            ith_fault_set((ith_fault_kind)kind, 0);
            json_decref(row);
            ith_rows_close(rows);
            failures += status != ITH_OK;
            if (status != ITH_OK && err.text[0] == '\0')
                fail_msg("fault %lld of kind %d: no text", (long long)n, kind);
            if (!hit)
                break;
        }
        assert_true(failures > 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_lines_blank_and_cr_are_skipped),
        cmocka_unit_test(test_rows_unicode_line_ends_are_text),
        cmocka_unit_test(test_rows_bom_only_at_start_of_file),
        cmocka_unit_test(test_rows_array_elements_with_brackets_in_strings),
        cmocka_unit_test(test_rows_json_values_in_sequence),
        cmocka_unit_test(test_rows_empty_files_have_no_rows),
        cmocka_unit_test(test_rows_broken_files_name_the_place),
        cmocka_unit_test(test_rows_parse_errors_have_file_positions),
        cmocka_unit_test(test_rows_types_may_differ_between_rows),
        cmocka_unit_test(test_rows_other_kinds_of_files_are_refused),
        cmocka_unit_test(test_rows_faults_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
