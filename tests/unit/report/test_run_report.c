/* test_run_report.c - the files a run leaves: log, state, event file, curve. */
#include "testing.h"

#include <math.h>

#include "base/json.h"
#include "report/loss_curve.h"
#include "report/run_report.h"
#include "report/tfevents.h"

static ith_report_row row_at(int64_t step, double loss)
{
    return (ith_report_row){.step = step,
                            .total_steps = 10,
                            .epoch = (double)step / 5,
                            .loss = loss,
                            .grad_norm = 1.5,
                            .learning_rate = 1e-5,
                            .tokens_per_s = 1234.5,
                            .mfu = 0.625,
                            .step_ms = 20,
                            .tokens = 100,
                            .labels = 60,
                            .peak_bytes = 5000,
                            .elapsed_s = 3};
}

static json_t *load(const char *dir, const char *name)
{
    ith_error err = {0};
    ith_buf path = {0};
    json_t *j = NULL;
    ith_path_join(&path, dir, name);
    assert_ok(ith_json_load(&j, path.data, &err), err);
    ith_buf_deinit(&path);
    return j;
}

static ith_buf text_of(const char *dir, const char *name)
{
    ith_error err = {0};
    ith_buf path = {0}, text = {0};
    ith_path_join(&path, dir, name);
    assert_ok(ith_read_file(path.data, 0, &text, &err), err);
    ith_buf_deinit(&path);
    return text;
}

static double number(const json_t *j, const char *key)
{
    const json_t *v = json_object_get(j, key);
    if (!json_is_number(v))
        fail_msg("%s is not a number", key);
    return json_number_value(v);
}

/* Every line is one JSON object with LlamaFactory's keys; what is not finite is null. */
static void test_log_has_the_keys(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_run_report *r = NULL;
    const char *dir = temp_dir("report");
    assert_ok(ith_run_report_open(&r, dir, 0, false, &err), err);
    ith_report_row a = row_at(1, 2.25), b = row_at(2, (double)NAN), e = row_at(2, 1.75);
    b.mfu = (double)NAN;
    e.is_eval = true;
    assert_ok(ith_run_report_add(r, &a, &err), err);
    ith_buf early = text_of(dir, "trainer_log.jsonl"); /* on disk at once */
    assert_true(early.len > 0 && early.data[early.len - 1] == '\n');
    ith_buf_deinit(&early);
    assert_ok(ith_run_report_add(r, &b, &err), err);
    assert_ok(ith_run_report_add(r, &e, &err), err);
    assert_ok(ith_run_report_close(r, &err), err);
    ith_buf text = text_of(dir, "trainer_log.jsonl");
    char *line = text.data;
    for (int i = 0; i < 3; i++) {
        json_t *j = NULL;
        size_t len = strcspn(line, "\n");
        assert_ok(ith_json_parse(&j, line, (int64_t)len, "line", &err), err);
        assert_int_equal((int)number(j, "step"), i ? 2 : 1);
        assert_int_equal((int)number(j, "total_steps"), 10);
        if (i == 0) {
            assert_true(number(j, "loss") == 2.25 && number(j, "learning_rate") == 1e-5);
            assert_true(number(j, "grad_norm") == 1.5 && number(j, "epoch") == 0.2);
        }
        if (i == 1)
            assert_true(json_is_null(json_object_get(j, "loss")) &&
                        json_is_null(json_object_get(j, "mfu")));
        if (i == 2)
            assert_true(number(j, "eval_loss") == 1.75 && !json_object_get(j, "loss"));
        json_decref(j);
        line += len + 1;
    }
    assert_int_equal(*line, '\0');
    ith_buf_deinit(&text);
    json_t *s = load(dir, "trainer_state.json");
    assert_int_equal((int)number(s, "global_step"), 2);
    assert_int_equal((int)json_array_size(json_object_get(s, "log_history")), 3);
    assert_true(number(s, "best_metric") == 1.75);
    json_decref(s);
}

/* A resumed run takes the rows up to its step, drops later ones and a torn line; a new run drops
 * all. */
static void test_log_after_a_resume(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_run_report *r = NULL;
    const char *dir = temp_dir("report_resume");
    assert_ok(ith_run_report_open(&r, dir, 0, false, &err), err);
    for (int64_t s = 1; s <= 4; s++) {
        ith_report_row row = row_at(s, 3.0 - 0.5 * (double)s);
        assert_ok(ith_run_report_add(r, &row, &err), err);
    }
    assert_ok(ith_run_report_close(r, &err), err);
    ith_buf path = {0};
    ith_path_join(&path, dir, "trainer_log.jsonl");
    FILE *f = fopen(path.data, "ab");
    assert_non_null(f);
    fputs("{\"epoch\": 1, \"step\": 2, \"lo", f); /* killed while writing */
    fclose(f);
    assert_ok(ith_run_report_open(&r, dir, 2, false, &err), err);
    ith_report_row row = row_at(3, 0.125);
    assert_ok(ith_run_report_add(r, &row, &err), err);
    assert_ok(ith_run_report_close(r, &err), err);
    json_t *s = load(dir, "trainer_state.json"), *rows = json_object_get(s, "log_history");
    assert_int_equal((int)json_array_size(rows), 3);
    static const double losses[] = {2.5, 2.0, 0.125};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal((int)number(json_array_get(rows, i), "step"), (int)i + 1);
        assert_true(number(json_array_get(rows, i), "loss") == losses[i]);
    }
    json_decref(s);
    assert_ok(ith_run_report_open(&r, dir, 0, false, &err), err);
    assert_ok(ith_run_report_close(r, &err), err);
    ith_buf text = text_of(dir, "trainer_log.jsonl");
    assert_int_equal(text.len, 0);
    ith_buf_deinit(&text);
    ith_buf_deinit(&path);
}

/* ---- event files ---- */

static void test_crc32c(void **state)
{
    (void)state;
    static const unsigned char zeros[32] = {0};
    static const struct {
        const void *data;
        int64_t len;
        uint32_t want; /* RFC 3720 B.4, and the common check value */
    } known[] = {{"123456789", 9, 0xe3069283u}, {zeros, 32, 0x8a9136aau}, {"", 0, 0}};
    for (int i = 0; i < 3; i++) {
        uint32_t got = ith_crc32c(known[i].data, known[i].len);
        if (got != known[i].want)
            fail_msg("crc32c of case %d: %08x, expected %08x", i, got, known[i].want);
    }
}

static uint64_t little(const unsigned char *p, int n)
{
    uint64_t v = 0;
    for (int i = n - 1; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

/* Framing and checksums of each record; scalars found by tag and value. */
static void test_event_file_can_be_read(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_run_report *r = NULL;
    const char *dir = temp_dir("events");
    assert_ok(ith_run_report_open(&r, dir, 0, true, &err), err);
    ith_report_row row = row_at(7, 2.25), bad = row_at(8, (double)NAN);
    assert_ok(ith_run_report_add(r, &row, &err), err);
    assert_ok(ith_run_report_add(r, &bad, &err), err);
    assert_ok(ith_run_report_close(r, &err), err);
    ith_buf path = {0};
    ith_names names;
    ith_path_join(&path, dir, "runs");
    assert_ok(ith_list_dir(path.data, &names, &err), err);
    assert_int_equal(names.count, 1);
    assert_non_null(strstr(names.names[0], "events.out.tfevents."));
    ith_buf name = {0};
    ith_path_join(&name, "runs", names.names[0]);
    ith_buf text = text_of(dir, name.data);
    const unsigned char *p = (const unsigned char *)text.data, *end = p + text.len;
    int records = 0, losses = 0;
    while (p < end) {
        int64_t len = (int64_t)little(p, 8);
        uint32_t crc = ith_crc32c(p, 8), masked = (crc >> 15 | crc << 17) + 0xa282ead8u;
        assert_true(end - p >= 16 + len);
        assert_int_equal(little(p + 8, 4), masked);
        crc = ith_crc32c(p + 12, len);
        masked = (crc >> 15 | crc << 17) + 0xa282ead8u;
        assert_int_equal(little(p + 12 + len, 4), masked);
        const unsigned char *tag = memmem(p + 12, (size_t)len, "train/loss", 10);
        if (records == 0)
            assert_non_null(memmem(p + 12, (size_t)len, "brain.Event:2", 13));
        if (tag) { /* tag, then field 2 as a little-endian float */
            float value;
            assert_int_equal(tag[10], 2 << 3 | 5);
            memcpy(&value, tag + 11, 4);
            assert_true(value == 2.25f);
            losses++;
        }
        records++;
        p += 16 + len;
    }
    assert_int_equal(losses, 1); /* the one that is not a number is left out */
    assert_int_equal(records, 1 + 6 + 5);
    ith_buf_deinit(&text);
    ith_buf_deinit(&name);
    ith_buf_deinit(&path);
    ith_names_free(&names);
}

/* ---- the curve ---- */

/* Tags close in order and quotes pair up: what an XML reader wants. */
static void assert_well_formed(const ith_buf *svg)
{
    char stack[32][16];
    int depth = 0;
    for (const char *p = svg->data; (p = strchr(p, '<')); p++) {
        const char *end = strchr(p, '>');
        assert_non_null(end);
        int quotes = 0;
        for (const char *q = p; q < end; q++)
            quotes += *q == '\'' || *q == '"';
        assert_int_equal(quotes % 2, 0);
        char name[16];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(p + 1, " />"), p + 1);
        if (p[1] == '/') {
            snprintf(name, sizeof name, "%.*s", (int)strcspn(p + 2, " >"), p + 2);
            assert_true(depth > 0);
            assert_string_equal(stack[--depth], name);
        } else if (end[-1] != '/') {
            assert_true(depth < 32);
            snprintf(stack[depth++], 16, "%s", name);
        }
    }
    assert_int_equal(depth, 0);
    assert_null(strstr(svg->data, "nan"));
    assert_null(strstr(svg->data, "inf"));
}

static void test_curve_of_any_length(void **state)
{
    (void)state;
    static const int64_t counts[] = {0, 1, 2, 50, 200000};
    for (int k = 0; k < 5; k++) {
        int64_t n = counts[k];
        ith_report_row *rows = ith_calloc(n + 1, sizeof *rows);
        assert_non_null(rows);
        for (int64_t i = 0; i < n; i++) {
            rows[i] = row_at(i + 1, 1 + 5 / (1 + (double)i / 10));
            rows[i].is_eval = i % 10 == 9;
        }
        ith_buf svg = {0};
        ith_loss_curve_svg(rows, n, "a <title> & more", &svg);
        assert_true(svg.failed == ITH_OK && svg.len > 200);
        if (svg.len > 400000)
            fail_msg("%lld rows make %lld bytes", (long long)n, (long long)svg.len);
        assert_well_formed(&svg);
        assert_int_equal(!!strstr(svg.data, "r='2'"), n == 1); /* one point is no line */
        assert_non_null(strstr(svg.data, "a &lt;title&gt; &amp; more") ||
                                strstr(svg.data, "a &lt;title> &amp; more")
                            ? svg.data
                            : NULL);
        ith_buf_deinit(&svg);
        ith_free(rows);
    }
}

static void test_curve_leaves_out_what_is_not_finite(void **state)
{
    (void)state;
    ith_report_row rows[20];
    for (int i = 0; i < 20; i++)
        rows[i] = row_at(i + 1, i % 5 == 2 ? (i % 2 ? (double)NAN : (double)INFINITY) : 3.0);
    ith_buf svg = {0};
    ith_loss_curve_svg(rows, 20, "t", &svg);
    assert_well_formed(&svg);
    if (!strstr(svg.data, "4 "))
        fail_msg("the caption does not count 4 rows");
    ith_buf_deinit(&svg);
    for (int i = 0; i < 20; i++)
        rows[i].loss = (double)NAN;
    ith_loss_curve_svg(rows, 20, "t", &svg);
    assert_well_formed(&svg);
    ith_buf_deinit(&svg);
}

/* Numbers beside the axes: no two are the same, and none meets the name of its axis (20 px) or
 * leaves the picture, at 7 px a digit. */
static void test_curve_numbers_differ_and_fit(void **state)
{
    (void)state;
    static const double levels[][2] = {{1.1, 1e-5},     {0, 0.002},        {3, 2},
                                       {12.3456, 1e-3}, {1234.5678, 1e-4}, {-2.5e-7, 5e-7}};
    for (int k = 0; k < 6; k++) {
        ith_report_row rows[20];
        for (int i = 0; i < 20; i++) {
            rows[i] = row_at(50000 * (i + 1), levels[k][0] + levels[k][1] * (i + 1) / 20);
            rows[i].learning_rate = k % 2 ? 1.25e-5 : 1.23456e-10;
        }
        ith_buf svg = {0};
        ith_loss_curve_svg(rows, 20, "t", &svg);
        char last[32] = "";
        int count = 0;
        for (const char *at = svg.data; (at = strstr(at, "<text x='")); at++) {
            char text[32], anchor[32];
            double x, y;
            if (sscanf(at, "<text x='%lf' y='%lf' text-anchor='%31[^']'>%31[^<]", &x, &y, anchor,
                       text) != 4)
                continue;
            double width = 7 * (double)strlen(text);
            if (strcmp(anchor, "end") == 0) {
                assert_string_not_equal(text, last);
                snprintf(last, sizeof last, "%s", text);
                count++;
                if (x - width < 20)
                    fail_msg("%s begins at %.1f", text, x - width);
            } else if (x + width / 2 > 860) {
                fail_msg("%s ends at %.1f", text, x + width / 2);
            }
        }
        assert_true(count >= 4);
        ith_buf_deinit(&svg);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log_has_the_keys),
        cmocka_unit_test(test_log_after_a_resume),
        cmocka_unit_test(test_crc32c),
        cmocka_unit_test(test_event_file_can_be_read),
        cmocka_unit_test(test_curve_of_any_length),
        cmocka_unit_test(test_curve_leaves_out_what_is_not_finite),
        cmocka_unit_test(test_curve_numbers_differ_and_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
