/* The template interpreter: Jinja2's text for Jinja2's templates, one-line errors, bounded work. */
#include "testing.h"

#include "tokenizer/jinja.h"

#define SNIPPET(TEXT, EXPECTED)                                                                    \
    {                                                                                              \
        TEXT, EXPECTED, sizeof(EXPECTED) - 1                                                       \
    }
#include "jinja_cases.inc"

static ith_error err;

static json_t *parse_json(const char *text)
{
    json_t *json = NULL;
    assert_ok(ith_json_parse(&json, text, (int64_t)strlen(text), "test", &err), err);
    return json;
}

static ith_status render(const char *text, const json_t *context, const ith_jinja_options *o,
                         ith_buf *out)
{
    ith_jinja *jinja = NULL;
    ith_error_clear(&err);
    ith_status status = ith_jinja_compile(&jinja, text, (int64_t)strlen(text), "t", &err);
    if (status == ITH_OK)
        status = ith_jinja_render(jinja, context, o, out, &err);
    ith_jinja_free(jinja);
    return status;
}

static void assert_renders(const char *text, const json_t *context, const char *expected)
{
    ith_buf out = {0};
    if (render(text, context, NULL, &out) != ITH_OK)
        fail_msg("%s: %s", text, err.text);
    assert_string_equal(out.data, expected);
    ith_buf_deinit(&out);
}

/* Goal: every kind of expression, filter, test, method and statement prints as in Python. */
static void test_render_snippets_equal_jinja2(void **state)
{
    (void)state;
    json_t *context = parse_json(snippet_context);
    ith_buf out = {0};
    for (size_t i = 0; i < sizeof snippets / sizeof snippets[0]; i++) {
        ith_buf_clear(&out);
        if (render(snippets[i].text, context, NULL, &out) != ITH_OK)
            fail_msg("%s: %s", snippets[i].text, err.text);
        if (out.len != (int64_t)snippets[i].expected_len ||
            memcmp(out.data, snippets[i].expected, snippets[i].expected_len) != 0)
            fail_msg("%s:\n got '%s'\nwant '%s'", snippets[i].text, out.data, snippets[i].expected);
    }
    ith_buf_deinit(&out);
    json_decref(context);
}

/* Goal: what Jinja2 refuses is refused, with line and construct, and prints nothing. */
static void test_render_refused_snippets_name_line_and_construct(void **state)
{
    (void)state;
    json_t *context = parse_json(snippet_context);
    ith_buf out = {0};
    ith_buf_puts(&out, "before");
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        if (render(refused[i].text, context, NULL, &out) == ITH_OK)
            fail_msg("%s: printed '%s', expected error '%s'", refused[i].text, out.data,
                     refused[i].error);
        if (!strstr(err.text, refused[i].error))
            fail_msg("%s: error '%s', expected '%s'", refused[i].text, err.text, refused[i].error);
        assert_string_equal(out.data, "before");
    }
    ith_buf_deinit(&out);
    json_decref(context);
}

static void test_errors_name_the_line_of_the_construct(void **state)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"a\n{{ 1 }}\n{{ 'x' + 1 }}", "t:3: '+'"},
        {"a\n\n{{ x | nosuch }}", "t:3: filter 'nosuch': unknown"},
        {"{% if a %}\n{% for x in y %}\n{% endif %}",
         "t:3: tag 'endif': unknown, or out of place in "
         "the 'for' of line 2"},
        {"\n{% for x in y %}\n", "t:2: for: no end tag"},
        {"{{ a\n\n", "t:1: tag: the template ends before '}}'"},
        {"{% include 'x' %}", "t:1: include: not supported"},
        {"\n{{ raise_exception('two\nlines') }}", "t:2: raise_exception: two lines"},
        {"\xff", "t:1: byte 0xff is not UTF-8"},
        {"{# never closed", "t:1: comment: no closing '#}'"},
    };
    (void)state;
    json_t *context = json_object();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_buf out = {0};
        assert_fails(render(cases[i].text, context, NULL, &out), err, ITH_ERR_FORMAT,
                     cases[i].error);
        assert_null(strchr(err.text, '\n'));
        ith_buf_deinit(&out);
    }
    json_decref(context);
}

/* Goal: hostile templates end soon, with a limit named, whatever they try. */
static void test_hostile_templates_hit_a_limit(void **state)
{
    static const struct {
        const char *text;
        ith_status status;
        const char *error;
    } cases[] = {
        {"{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
         ITH_ERR_RUN, "steps"},
        {"{{ 'a' * 99999999999 }}", ITH_ERR_MEMORY, "memory"},
        {"{{ [0] * 4000000000000000000 }}", ITH_ERR_MEMORY, "too many"},
        {"{{ range(100001) }}", ITH_ERR_MEMORY, "range"},
        {"{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
         "{% endfor %}",
         ITH_ERR_MEMORY, "memory"},
        {"{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = "
         "n.s.replace('a',"
         "'aa') %}{% endfor %}",
         ITH_ERR_MEMORY, "limit"},
        {"{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}"
         "{% endfor %}{{ n.l }}",
         ITH_ERR_MEMORY, "output"},
        {"{% set n = namespace() %}{% set n.n = n %}{{ n }}", ITH_ERR_RUN, "depth"},
        {"{% set n = namespace(l=[1]) %}{% for i in range(5000) %}{% set n.l = [n.l] %}{% endfor %}"
         "{{ n.l|tojson }}",
         ITH_ERR_RUN, "depth"},
        {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ITH_ERR_RUN, "depth"},
        {"{{ '%99999999d' % 1 }}", ITH_ERR_FORMAT, "width"},
        {"{{ 2 ** 9999 }}", ITH_ERR_FORMAT, "64 bits"},
        {"{% for i in range(99999) %}{{ 'x'.center(99999) }}{% endfor %}", ITH_ERR_MEMORY,
         "output"},
    };
    (void)state;
    json_t *context = json_object();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_buf out = {0};
        ith_jinja_options o = {.max_output_bytes = 1 << 22, .max_memory_bytes = 1 << 26};
        o.max_steps = 10 * 1000 * 1000;
        assert_fails(render(cases[i].text, context, &o, &out), err, cases[i].status,
                     cases[i].error);
        assert_int_equal(out.len, 0);
        ith_buf_deinit(&out);
    }
    json_decref(context);
}

/* Goal: depth in the template's text is bounded when it is compiled. Method: each opening repeated
 * 10,000 times. */
static void test_deep_nesting_is_refused(void **state)
{
    static const char *const openings[] = {"(",       "[",  "{1:", "-",     "not ",
                                           "a if b ", "a[", "a(",  "1 + (", "x|map("};
    static const char *const chains[] = {".a",           "|e",    " + 1",   "[0]",    "()",
                                         " if a else 1", " ** 2", " and 1", " is odd"};
    (void)state;
    json_t *context = json_object();
    for (size_t i = 0; i < sizeof openings / sizeof openings[0]; i++) {
        ith_buf text = {0}, out = {0};
        ith_buf_puts(&text, "{{ ");
        for (int k = 0; k < 10000; k++)
            ith_buf_puts(&text, openings[i]);
        assert_int_not_equal(render(text.data, context, NULL, &out), ITH_OK);
        ith_buf_deinit(&text);
        ith_buf_deinit(&out);
    }
    for (size_t i = 0; i < sizeof chains / sizeof chains[0]; i++) {
        ith_buf text = {0}, out = {0};
        ith_buf_puts(&text, "{{ 1");
        for (int k = 0; k < 10000; k++)
            ith_buf_puts(&text, chains[i]);
        ith_buf_puts(&text, " }}");
        assert_int_not_equal(render(text.data, context, NULL, &out), ITH_OK);
        ith_buf_deinit(&text);
        ith_buf_deinit(&out);
    }
    json_decref(context);
}

static json_t *make_messages(int turns)
{
    json_t *list = json_array();
    for (int i = 0; i < turns; i++) {
        json_array_append_new(list, json_pack("{s:s, s:s}", "role", "user", "content", "question"));
        json_array_append_new(list,
                              json_pack("{s:s, s:s}", "role", "assistant", "content", "answer"));
    }
    return json_pack("{s:o}", "messages", list);
}

/* Goal: work grows with the conversation, not with its square, also where a template collects its
 * text in a variable. */
static void test_steps_are_linear_in_the_conversation(void **state)
{
    static const char *const texts[] = {
        "{% for m in messages %}{{ m.role ~ ': ' + m.content|trim + '\n' }}{% endfor %}",
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t + m.role + m.content "
        "%}{% endfor %}{{ n.t }}",
        "{% for m in messages %}{% if messages[loop.index0 - 1].role != m.role %}{{ loop.last }}"
        "{% endif %}{% endfor %}",
    };
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        int64_t steps[2] = {0, 0};
        for (int k = 0; k < 2; k++) {
            ith_buf out = {0};
            json_t *context = make_messages(2000 << k);
            ith_jinja_options o = {.steps = &steps[k]};
            assert_ok(render(texts[i], context, &o, &out), err);
            json_decref(context);
            ith_buf_deinit(&out);
        }
        if (steps[1] > steps[0] * 2 + steps[0] / 20)
            fail_msg("template %zu: %lld steps for 2000 turns, %lld for 4000", i,
                     (long long)steps[0], (long long)steps[1]);
    }
}

/* Goal: spans say which bytes a message's pass and a generation block printed. */
static void test_trace_gives_spans_of_passes_and_blocks(void **state)
{
    (void)state;
    json_t *context = make_messages(1);
    ith_jinja_trace trace = {0};
    ith_jinja_options o = {.track = "messages", .trace = &trace};
    ith_buf out = {0};
    ith_buf_puts(&out, "kept ");
    assert_ok(render("{% for m in messages[::-1] %}{% set x = m %}{% endfor %}"
                     "<{% for m in messages %}[{% for c in 'ab' %}{{ c }}{% endfor %}"
                     "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
                     "{% endgeneration %}{% endif %}]{% endfor %}>",
                     context, &o, &out),
              err);
    assert_string_equal(out.data, "kept <[ab][abanswer]>");
    assert_int_equal(trace.num_items, 2);
    assert_int_equal(trace.num_generation, 1);
    assert_int_equal(trace.items[0].begin, 1);
    assert_int_equal(trace.items[0].end, 5);
    assert_int_equal(trace.items[0].message, 0);
    assert_int_equal(trace.items[1].message, 1);
    assert_int_equal(trace.generation[0].begin, 8);
    assert_int_equal(trace.generation[0].end, 14);
    assert_int_equal(trace.generation[0].message, 1);
    ith_jinja_trace_deinit(&trace);
    ith_buf_deinit(&out);
    json_decref(context);
}

static void test_strftime_now_uses_the_given_time(void **state)
{
    (void)state;
    json_t *context = json_object();
    ith_buf out = {0};
    ith_jinja_options o = {.now = 86400 * 365};
    assert_ok(render("{{ strftime_now('%Y-%m') }}", context, &o, &out), err);
    assert_string_equal(out.data, "1971-01");
    ith_buf_deinit(&out);
    json_decref(context);
}

static void test_long_strings_and_many_keys_work(void **state)
{
    (void)state;
    json_t *dict = json_object(), *context = NULL;
    for (int i = 0; i < 3000; i++) {
        char key[16];
        snprintf(key, sizeof key, "k%d", i);
        json_object_set_new(dict, key, json_integer(i));
    }
    context = json_pack("{s:o}", "d", dict);
    assert_renders("{{ d.k0 }} {{ d['k2999'] }} {{ d|length }} {{ 'k17' in d }} {{ d.k3000 is "
                   "defined }} {{ d.values()|sum }} {{ (d|dictsort)[1][0] }}",
                   context, "0 2999 3000 True False 4498500 k1");
    json_decref(context);
}

/* Goal: any failing allocation gives one memory error, no leak (under ASan) and an untouched out.
 */
static void test_every_failing_allocation_is_reported(void **state)
{
    static const char text[] =
        "{% macro f(a, b=2) %}{{ a }}{{ b|tojson }}{% endmacro %}"
        "{% for m in messages %}{% generation %}{{ f(m) }}"
        "{{ m.content.split('s')|join('-') }}{% endgeneration %}{% endfor %}";
    (void)state;
    json_t *context = make_messages(20);
    int64_t n = 1;
    bool failed = true;
    for (; failed && n < 1000; n++) {
        ith_buf out = {0};
        ith_jinja_trace trace = {0};
        ith_jinja_options o = {.track = "messages", .trace = &trace};
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ith_status status = render(text, context, &o, &out);
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        failed = status != ITH_OK;
        if (failed) {
            assert_int_equal(status, ITH_ERR_MEMORY);
            assert_int_equal(out.len, 0);
            assert_true(strlen(err.text) > 0);
        }
        ith_jinja_trace_deinit(&trace);
        ith_buf_deinit(&out);
    }
    assert_true(n > 5 && n < 1000);
    json_decref(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_render_snippets_equal_jinja2),
        cmocka_unit_test(test_render_refused_snippets_name_line_and_construct),
        cmocka_unit_test(test_errors_name_the_line_of_the_construct),
        cmocka_unit_test(test_hostile_templates_hit_a_limit),
        cmocka_unit_test(test_deep_nesting_is_refused),
        cmocka_unit_test(test_steps_are_linear_in_the_conversation),
        cmocka_unit_test(test_trace_gives_spans_of_passes_and_blocks),
        cmocka_unit_test(test_strftime_now_uses_the_given_time),
        cmocka_unit_test(test_long_strings_and_many_keys_work),
        cmocka_unit_test(test_every_failing_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
