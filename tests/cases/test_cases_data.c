/* Rows that other loaders choke on, as `ithaca data` shows them. Token borders (|) are taken out of
 * what it prints, so that texts do not depend on the vocabulary; trained tokens stand in [[ ]]. */
#include "cases.h"

#define USER(text) "{\"role\":\"user\",\"content\":\"" text "\"}"
#define BOT(text) "{\"role\":\"assistant\",\"content\":\"" text "\"}"
#define ROW(a, b) "{\"messages\":[" a "," b "]}\n"

static int setup(void **state)
{
    (void)state;
    return case_setup("cases_data");
}

static char *without_borders(const ith_buf *out)
{
    ith_buf text = {0};
    for (int64_t i = 0; i < out->len; i++)
        if (out->data[i] != '|')
            ith_buf_putc(&text, out->data[i]);
    ith_buf_puts(&text, "");
    assert_non_null(text.data);
    return text.data;
}

/* The whole of what is shown of `rows`; free with ith_free. */
static char *shown(const char *rows, const char *more)
{
    char line[300];
    case_write("rows.jsonl", rows);
    snprintf(line, sizeof line, "data @/c.yaml train_dataset=@/rows.jsonl --rows=9 %s", more);
    program_run run = case_run(line);
    if (run.code != 0)
        fail_msg("exit %d: %s", run.code, run.err.data);
    char *text = without_borders(&run.out);
    program_run_deinit(&run);
    return text;
}

static void assert_shown(const char *rows, const char *more, int samples, const char *part)
{
    char *text = shown(rows, more), count[32];
    snprintf(count, sizeof count, "\n%d sample%s, ", samples, samples == 1 ? "" : "s");
    if (!strstr(text, count) || !strstr(text, part))
        fail_msg("expected '%s' and '%s' in:\n%s", count + 1, part, text);
    ith_free(text);
}

static void assert_refused(const char *rows, int code, const char *message)
{
    case_write("rows.jsonl", rows);
    case_expect("data @/c.yaml train_dataset=@/rows.jsonl", code, message);
}

/* What nobody reads may have any type, another one in each row. */
static void test_unused_field_may_have_any_type(void **state)
{
    (void)state;
    assert_shown("{\"note\":7,\"messages\":[" USER("a") "," BOT(
                     "one") "]}\n"
                            "{\"note\":\"7\",\"messages\":[" USER("a") "," BOT(
                                "two") "]}\n"
                                       "{\"note\":[[7,{\"k\":null}],\"x\"],\"messages\":[" USER(
                                           "a") "," BOT("three") "]}\n",
                 "", 3, "[[three<im_end>\\n]]");
}

static void test_field_of_wrong_type_names_row_field_and_type(void **state)
{
    (void)state;
    assert_refused("{\"instruction\":\"add\",\"input\":\"1 2\",\"output\":{\"sum\":3}}\n", 1,
                   "@/rows.jsonl: no sample is left: 1 of 1 row dropped: a field that is not what "
                   "it should be (first: @/rows.jsonl: row 1 (line 1): output: found object, "
                   "expected text)");
}

static void test_rows_of_another_kind_name_the_keys(void **state)
{
    (void)state;
    assert_refused("{\"text\":\"once\"}\n{\"text\":\"upon\"}\n", 1,
                   "@/rows.jsonl: row 1 (line 1): found the keys text; expected messages "
                   "(canonical), instruction and output (alpaca), conversations (sharegpt) or "
                   "input_ids (tokenid)");
    assert_refused("{\"messages\":[]}\n", 1,
                   "@/rows.jsonl: no sample is left: 1 of 1 row dropped: no assistant turn (first: "
                   "@/rows.jsonl: row 1 (line 1))");
    assert_refused("{\"prompt\":\"p\",\"chosen\":\"a\",\"rejected\":\"b\"}\n", 2,
                   "@/rows.jsonl: row 1 (line 1): preference data (chosen and rejected answers); "
                   "supervised fine-tuning needs conversations");
}

/* A text of five letters is one path, not five images. */
static void test_images_as_one_text_is_one_image(void **state)
{
    (void)state;
    assert_refused("{\"messages\":[" USER("<image>what") "," BOT("x") "],\"images\":\"a.jpg\"}\n",
                   1,
                   "@/rows.jsonl: no sample is left: 1 of 1 row dropped: images, video or audio, "
                   "and the model reads text only (first: @/rows.jsonl: row 1 (line 1))");
    assert_refused("{\"messages\":[" USER("<image><image>") "," BOT("x") "],\"images\":[\"a\"]}\n",
                   1,
                   "@/rows.jsonl: row 1 (line 1): 2 placeholders <image>, but 1 image in images");
}

static void test_null_is_absent(void **state)
{
    (void)state;
    char *with = shown(
        "{\"messages\":[" USER("hi") ",{\"role\":\"assistant\",\"content\":\"yo\","
                                     "\"tool_calls\":null,\"loss_weight\":null}],\"tools\":null}\n",
        "");
    char *without = shown(ROW(USER("hi"), BOT("yo")), "");
    assert_string_equal(with, without);
    ith_free(with);
    ith_free(without);
}

/* Line separators of Unicode are text; a byte order mark counts at the start of a file only; a CR
 * before the LF is no text. */
static void test_rows_end_at_line_feeds_only(void **state)
{
    (void)state;
    assert_shown(ROW(USER("a"), BOT("x\xe2\x80\xa8y\xe2\x80\xa9z\xc2\x85w")), "", 1, "trained, ");
    assert_shown("\xef\xbb\xbf" ROW(USER("a"), BOT("b")) ROW(USER("c"), BOT("\xef\xbb\xbf"
                                                                            "d")),
                 "", 2, "d<im_end>\\n]]");
    assert_shown("{\"messages\":[" USER("a") "," BOT("b") "]}\r\n{\"messages\":[" USER("c") "," BOT(
                     "d") "]}\r\n",
                 "", 2, "[[d<im_end>\\n]]");
}

/* The answer is found by its place, not by its text. */
static void test_answer_that_repeats_the_question(void **state)
{
    (void)state;
    char *text = shown(ROW(USER("yes"), BOT("yes")), "");
    if (!strstr(text, "\nyes<im_end>\\n\n<im_start>assistant\\n\n[[yes<im_end>\\n]]\n"))
        fail_msg("only the second yes is trained:\n%s", text);
    ith_free(text);
}

static void test_weight_zero_is_not_trained(void **state)
{
    (void)state;
    static const char rows[] = "{\"messages\":[" USER(
        "a") ",{\"role\":\"assistant\",\"content\":\"first\","
             "\"loss_weight\":0.0}," USER("b") ",{\"role\":\"assistant\",\"content\":\"second\","
                                               "\"loss_weight\":1.0}]}\n";
    static const char *const modes[] = {"train_on=last_turn", "train_on=all_turns"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        char *text = shown(rows, modes[i]);
        if (!strstr(text, "\nfirst<im_end>\\n\n") || !strstr(text, "[[second<im_end>\\n]]") ||
            !strstr(text, "\n1 sample, "))
            fail_msg("%s:\n%s", modes[i], text);
        ith_free(text);
    }
}

/* A misspelt weight is told and counted; reasoning is read under each of its names. */
static void test_keys_of_messages_are_read_or_told(void **state)
{
    (void)state;
    assert_shown("{\"messages\":[" USER("a") ",{\"role\":\"assistant\",\"content\":\"b\","
                                             "\"loss_maks\":0,\"refusal\":null}]}\n" ROW(USER("c"),
                                                                                         BOT("d")),
                 "", 2, "1 message key dropped: it has no meaning here (first: ");
    static const char *const names[] = {"reasoning_content", "reasoning", "thinking"};
    case_write("think.yaml",
               "model: @/model\ntrain_dataset: @/rows.jsonl\noutput_dir: @/out\nnproc: 1\n"
               "custom_chat_template: \"{% for m in messages %}{{ m.role }}:{% if "
               "m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }};"
               "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}\"\n");
    for (int i = 0; i < 3; i++) {
        char row[300];
        snprintf(row, sizeof row,
                 "{\"messages\":[" USER("a") ",{\"role\":\"assistant\",\"content\":\"b\","
                                             "\"%s\":\"why\"}]}\n",
                 names[i]);
        case_write("rows.jsonl", row);
        program_run run = case_run("data @/think.yaml");
        char *text = without_borders(&run.out);
        if (run.code != 0 || !strstr(text, "[[<why>b;]]"))
            fail_msg("%s: exit %d: %s%s", names[i], run.code, text, run.err.data);
        ith_free(text);
        program_run_deinit(&run);
    }
}

/* Each call keeps its own arguments, in the order of the file: rows are no table with one set of
 * columns. */
static void test_tools_of_other_rows_add_no_arguments(void **state)
{
    (void)state;
    case_write("tools.yaml",
               "model: @/model\ntrain_dataset: @/rows.jsonl\noutput_dir: @/out\nnproc: 1\n"
               "custom_chat_template: \"{% for m in messages %}{{ m.role }}:{% for c in "
               "m.tool_calls %}<{{ c.function.name }}{{ c.function.arguments | tojson }}>"
               "{% endfor %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:"
               "{% endif %}\"\n");
    static const char call[] = "{\"messages\":[" USER(
        "a") ",{\"role\":\"assistant\",\"content\":null,"
             "\"tool_calls\":[{\"function\":{\"name\":\"%s\",\"arguments\":%s}}]}]}\n";
    ith_buf rows = {0};
    ith_buf_printf(&rows, call, "steer", "{\"port\":7,\"by\":\"oar\"}");
    ith_buf_printf(&rows, call, "anchor", "{\"fathoms\":12}");
    case_write("rows.jsonl", rows.data);
    ith_buf_deinit(&rows);
    program_run run = case_run("data @/tools.yaml --rows=2");
    char *text = without_borders(&run.out);
    if (run.code != 0 || !strstr(text, "[[<steer{\"port\": 7, \"by\": \"oar\"}>;]]") ||
        !strstr(text, "[[<anchor{\"fathoms\": 12}>;]]"))
        fail_msg("exit %d:\n%s%s", run.code, text, run.err.data);
    ith_free(text);
    program_run_deinit(&run);
}

/* A template that, like those of current models, walks through arguments, trims texts and parts
 * reasoning from the answer: rows give it what it needs in every usual form. {} is the reasoning;
 * its empty form belongs to the prompt, as no thinking is wanted there. */
static void test_templates_get_calls_and_reasoning_in_any_form(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{\"role\":\"assistant\",\"content\":\"ok\",\"tool_calls\":[{\"function\":{\"name\":"
         "\"get\","
         "\"arguments\":\"{\\\"city\\\": \\\"Seoul\\\"}\"}}]}",
         "{}[[ok get.city=Seoul;]]"},
        {"{\"role\":\"assistant\",\"content\":\"ok\",\"tool_calls\":[{\"function\":{\"name\":"
         "\"get\","
         "\"arguments\":{\"city\":\"Seoul\"}}}]}",
         "{}[[ok get.city=Seoul;]]"},
        {"{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\","
         "\"arguments\":{}}}]}",
         "{}[[ f;]]"},
        {BOT("r\\n</think>\\n\\na"), "[[{r}a;]]"},
        {BOT("<think>\\nr\\n</think>\\n\\na"), "[[{r}a;]]"},
        {BOT("\\n\\na \\n"), "{}[[a;]]"}};
    case_write(
        "calls.yaml",
        "model: @/model\ntrain_dataset: @/rows.jsonl\noutput_dir: @/out\nnproc: 1\n"
        "custom_chat_template: |-\n"
        "  {%- for m in messages %}\n"
        "  {%- set text = m.content | trim %}\n"
        "  {{- '(' ~ m.role ~ ')' }}\n"
        "  {%- if m.role == 'assistant' %}\n"
        "  {%- set why = '' %}\n"
        "  {%- if '</think>' in text %}\n"
        "  {%- set why = text.split('</think>')[0].split('<think>')[-1] | trim %}\n"
        "  {%- set text = text.split('</think>')[-1] | trim %}\n"
        "  {%- endif %}\n"
        "  {{- '{' ~ why ~ '}' }}\n"
        "  {%- endif %}\n"
        "  {{- text }}\n"
        "  {%- for call in m.tool_calls or [] %}\n"
        "  {{- ' ' ~ call.function.name }}\n"
        "  {%- for k, v in call.function.arguments.items() %}{{ '.' ~ k ~ '=' ~ v }}\n"
        "  {%- endfor %}\n"
        "  {%- endfor %}\n"
        "  {{- ';' }}\n"
        "  {%- endfor %}\n"
        "  {%- if add_generation_prompt %}{{ '(assistant)' }}\n"
        "  {%- if enable_thinking is defined and not enable_thinking %}{{ '{}' }}{% endif %}\n"
        "  {%- endif %}\n");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char row[400];
        snprintf(row, sizeof row, "{\"messages\":[" USER("  u \\n") ",%s]}\n", cases[i][0]);
        case_write("rows.jsonl", row);
        program_run run = case_run("data @/calls.yaml");
        char *text = without_borders(&run.out);
        if (run.code != 0 || !strstr(text, "(user)u;(assistant)") || !strstr(text, cases[i][1]))
            fail_msg("'%s' is not in (exit %d):\n%s%s", cases[i][1], run.code, text, run.err.data);
        ith_free(text);
        program_run_deinit(&run);
    }
    case_write("rows.jsonl",
               "{\"messages\":[" USER("u") ",{\"role\":\"assistant\",\"content\":\"\","
                                           "\"tool_calls\":[{\"function\":{\"name\":\"f\","
                                           "\"arguments\":\"{city\"}}]}]}\n");
    case_expect("data @/calls.yaml", 1,
                "@/rows.jsonl: no sample is left: 1 of 1 row dropped: a field that is not what it "
                "should be (first: @/rows.jsonl: row 1 (line 1): messages[1].tool_calls[0]."
                "arguments: text that is not a JSON object: '{city')");
}

/* A forced template that thinks where the model's own does not is told; one that does as the
 * model's own is not. */
static void test_template_that_thinks_otherwise_is_told(void **state)
{
    (void)state;
    static const char *const texts[] = {"<think>\\n\\n</think>\\n", ""};
    case_write("rows.jsonl", ROW(USER("a"), BOT("b")));
    for (int i = 0; i < 2; i++) {
        char config[600];
        snprintf(config, sizeof config,
                 "model: @/model\ntrain_dataset: @/rows.jsonl\noutput_dir: @/out\nnproc: 1\n"
                 "custom_chat_template: \"{%% for m in messages %%}{{ m.role }}:{%% if m.role == "
                 "'assistant' %%}%s{%% endif %%}{{ m.content }};{%% endfor %%}{%% if "
                 "add_generation_prompt %%}assistant:{%% endif %%}\"\n",
                 texts[i]);
        case_write("think.yaml", config);
        program_run run = case_run("data @/think.yaml");
        int told = case_count(&run.err, "custom_chat_template writes a <think> block before an "
                                        "answer without reasoning, the model's own (");
        if (run.code != 0 || told != (i == 0) || case_count(&run.err, "<think>") != told)
            fail_msg("exit %d, '%s': %s", run.code, texts[i], run.err.data);
        program_run_deinit(&run);
    }
}

/* Goal: the ids are those of the whole text, also where header and answer meet, in both ways of
 * making samples. */
static void test_answer_that_begins_with_a_line_feed(void **state)
{
    (void)state;
    static const char rows[] = ROW(USER("a"), BOT("\\nb"));
    char *last = shown(rows, "train_on=last_turn"), *all = shown(rows, "train_on=all_turns");
    const char *a = strstr(last, " tokens, "), *b = strstr(all, " tokens, ");
    assert_non_null(a);
    assert_non_null(b);
    assert_string_equal(a, b);
    assert_non_null(strstr(a, "b<im_end>\\n]]"));
    ith_free(last);
    ith_free(all);
}

/* The end of a turn is learned also when the vocabulary pads with the very token. */
static void test_end_token_is_trained_when_it_is_the_pad_token(void **state)
{
    (void)state;
    ith_error err = {0};
    assert_ok(ith_make_dirs(small_join(case_root, "padded"), &err), err);
    static const char *const files[] = {"config.json", "tokenizer.json", "chat_template.jinja"};
    for (int i = 0; i < 3; i++) {
        char from[4200];
        snprintf(from, sizeof from, "%s/model/%s", case_root, files[i]);
        assert_ok(ith_copy_file(from, small_join(small_join(case_root, "padded"), files[i]), &err),
                  err);
    }
    small_write(small_join(case_root, "padded"), "tokenizer_config.json",
                "{\"eos_token\": \"<|im_end|>\", \"pad_token\": \"<|im_end|>\"}");
    case_write("rows.jsonl", ROW(USER("Hi"), BOT("Yo")) ROW(
                                 USER("Hi"), BOT("a longer answer that would make the other pad")));
    program_run run = case_run("data @/c.yaml model=@/padded train_dataset=@/rows.jsonl "
                               "micro_batch_size=2 --step=1");
    char *text = without_borders(&run.out);
    if (run.code != 0 || !strstr(text, "[[Yo<im_end>\\n]]") ||
        case_count(&run.out, "<|im_end|>") != 4)
        fail_msg("exit %d:\n%s%s", run.code, text, run.err.data);
    ith_free(text);
    program_run_deinit(&run);
}

/* A long answer becomes several samples instead of losing its tail. The window of packing is a key,
 * and no other strategy has one. */
static void test_long_rows_become_several_samples(void **state)
{
    (void)state;
    static const char row[] =
        ROW(USER("count"), BOT("one two three four five six seven eight nine ten "
                               "eleven twelve thirteen fourteen fifteen"));
    char *cut = shown(row, "cutoff_len=64"), *split = shown(row, "cutoff_len=64 split_long=true");
    if (!strstr(cut, "\n1 sample, ") || strstr(cut, "fifteen<im_end>"))
        fail_msg("the tail should be cut:\n%s", cut);
    if (strstr(split, "\n1 sample, ") || !strstr(split, "fifteen<im_end>"))
        fail_msg("the tail should be a sample of its own:\n%s", split);
    ith_free(cut);
    ith_free(split);
    case_write("rows.jsonl", row);
    case_expect("data @/c.yaml train_dataset=@/rows.jsonl cutoff_len=16 pack_window=9", 2,
                "command line: pack_window: has no effect (use batching_strategy: packing)");
    ith_free(shown(row, "batching_strategy=packing pack_window=9"));
}

/* Prompts as long as the limit leave nothing to learn: told, counted, and no success. */
static void test_prompts_beyond_the_limit_are_counted(void **state)
{
    (void)state;
    ith_buf rows = {0};
    for (int i = 0; i < 5; i++)
        ith_buf_printf(
            &rows,
            ROW(USER("%d: which of the seven ships came home in autumn, and what did it carry?"),
                BOT("ok")),
            i);
    case_write("rows.jsonl", rows.data);
    ith_buf_deinit(&rows);
    case_expect(
        "train @/c.yaml train_dataset=@/rows.jsonl cutoff_len=16 output_dir=@/none", 1,
        "@/rows.jsonl: no sample is left: 5 of 5 samples dropped: no trainable token "
        "within cutoff_len (first: @/rows.jsonl: row 1 (line 1): 73 tokens, cutoff_len 16)");
    assert_false(ith_path_exists(small_join(case_root, "none")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unused_field_may_have_any_type),
        cmocka_unit_test(test_field_of_wrong_type_names_row_field_and_type),
        cmocka_unit_test(test_rows_of_another_kind_name_the_keys),
        cmocka_unit_test(test_images_as_one_text_is_one_image),
        cmocka_unit_test(test_null_is_absent),
        cmocka_unit_test(test_rows_end_at_line_feeds_only),
        cmocka_unit_test(test_answer_that_repeats_the_question),
        cmocka_unit_test(test_weight_zero_is_not_trained),
        cmocka_unit_test(test_keys_of_messages_are_read_or_told),
        cmocka_unit_test(test_tools_of_other_rows_add_no_arguments),
        cmocka_unit_test(test_templates_get_calls_and_reasoning_in_any_form),
        cmocka_unit_test(test_template_that_thinks_otherwise_is_told),
        cmocka_unit_test(test_answer_that_begins_with_a_line_feed),
        cmocka_unit_test(test_end_token_is_trained_when_it_is_the_pad_token),
        cmocka_unit_test(test_long_rows_become_several_samples),
        cmocka_unit_test(test_prompts_beyond_the_limit_are_counted),
    };
    return cmocka_run_group_tests(tests, setup, case_teardown);
}
