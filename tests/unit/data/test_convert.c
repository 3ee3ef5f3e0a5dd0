/* Converters: each format to canonical messages, and what happens to rows that do not fit. */
#include "testing.h"

#include "data/convert.h"

static ith_error err;
static ith_converted got;

static json_t *parse(const char *text)
{
    json_t *value = NULL;
    assert_ok(ith_json_parse(&value, text, (int64_t)strlen(text), "row", &err), err);
    return value;
}

/* Converts `row`; *got holds the result until the next call. */
static ith_status convert_with(ith_converter converter, const char *row, const char *separator)
{
    json_t *value = parse(row);
    ith_convert_options options = {.separator = separator};
    ith_converted_deinit(&got);
    ith_error_clear(&err);
    ith_status status = ith_convert_row(converter, value, &options, &got, &err);
    json_decref(value);
    return status;
}

/* Short form of messages: "role*weight[type:value|type:value] ...". */
static void describe(const json_t *messages, ith_buf *out)
{
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *m = json_array_get(messages, i), *content = json_object_get(m, "content");
        ith_buf_printf(out, "%s%s*%g[", i ? " " : "", json_string_value(json_object_get(m, "role")),
                       ith_message_weight(m));
        for (size_t k = 0; k < json_array_size(content); k++) {
            const json_t *block = json_array_get(content, k);
            ith_buf_printf(out, "%s%s:%s", k ? "|" : "",
                           json_string_value(json_object_get(block, "type")),
                           json_string_value(json_object_get(block, "value")));
        }
        ith_buf_puts(out, "]");
    }
}

static void assert_messages(const json_t *messages, const char *expected)
{
    ith_buf text = {0};
    describe(messages, &text);
    assert_string_equal(text.data ? text.data : "", expected);
    ith_buf_deinit(&text);
}

static void expect(ith_converter converter, const char *row, const char *expected)
{
    assert_ok(convert_with(converter, row, NULL), err);
    if (got.drop != ITH_DROP_NONE)
        fail_msg("%s: dropped: %s: %s", row, ith_drop_text(got.drop), got.detail);
    assert_messages(got.messages, expected);
}

static void expect_drop(ith_converter converter, const char *row, ith_drop drop, const char *detail)
{
    assert_ok(convert_with(converter, row, NULL), err);
    if (got.drop != drop || !strstr(got.detail, detail))
        fail_msg("%s: drop %d '%s', expected %d '%s'", row, (int)got.drop, got.detail, (int)drop,
                 detail);
    assert_null(got.messages);
    assert_null(got.tools);
}

static void test_alpaca_joins_instruction_and_input(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_ALPACA, "{\"instruction\":\"Add\",\"input\":\"2 3\",\"output\":\"5\"}",
           "user*0[text:Add2 3] assistant*1[text:5]");
    expect(ITH_CONVERTER_ALPACA, "{\"instruction\":\"Add\",\"input\":\"\",\"output\":\"5\"}",
           "user*0[text:Add] assistant*1[text:5]");
    expect(ITH_CONVERTER_ALPACA, "{\"system\":\"S\",\"input\":\"i\",\"output\":\"o\"}",
           "system*0[text:S] user*0[text:i] assistant*1[text:o]");
    assert_ok(convert_with(ITH_CONVERTER_ALPACA,
                           "{\"instruction\":\"Add\",\"input\":\"2 3\",\"output\":\"5\"}", "\n"),
              err);
    assert_messages(got.messages, "user*0[text:Add\n2 3] assistant*1[text:5]");
    /* The separator stands between two texts only. */
    assert_ok(convert_with(ITH_CONVERTER_ALPACA, "{\"input\":\"2 3\",\"output\":\"5\"}", "\n"),
              err);
    assert_messages(got.messages, "user*0[text:2 3] assistant*1[text:5]");
}

/* Null columns are what table formats put where a row has no such field. */
static void test_alpaca_null_columns_are_absent(void **state)
{
    (void)state;
    expect(
        ITH_CONVERTER_ALPACA,
        "{\"system\":null,\"instruction\":\"q\",\"input\":null,\"output\":\"a\",\"images\":null}",
        "user*0[text:q] assistant*1[text:a]");
    expect(ITH_CONVERTER_ALPACA, "{\"instruction\":\"q\",\"output\":null}", "user*0[text:q]");
}

/* The field, and what was found in it (cases S02). */
static void test_alpaca_wrong_type_is_named(void **state)
{
    (void)state;
    expect_drop(ITH_CONVERTER_ALPACA,
                "{\"instruction\":\"q\",\"input\":\"\",\"output\":{\"n\":5,\"m\":null}}",
                ITH_DROP_TYPE, "output: found object, expected text");
    expect_drop(ITH_CONVERTER_ALPACA, "{\"instruction\":7,\"output\":\"a\"}", ITH_DROP_TYPE,
                "instruction: found integer");
}

/* Fields that nobody reads may hold anything. */
static void test_unknown_fields_are_ignored(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_ALPACA, "{\"instruction\":\"q\",\"output\":\"a\",\"meta\":[[1,\"x\"],{}]}",
           "user*0[text:q] assistant*1[text:a]");
}

static void test_sharegpt_speakers_and_weights(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_SHAREGPT,
           "{\"conversations\":[{\"from\":\"system\",\"value\":\"S\"},"
           "{\"from\":\"human\",\"value\":\"h\"},{\"from\":\"function_call\",\"value\":"
           "\"{\\\"name\\\":\\\"f\\\",\\\"arguments\\\":{\\\"b\\\":1,\\\"a\\\":2}}\"},"
           "{\"from\":\"observation\",\"value\":\"42\"},{\"from\":\"gpt\",\"value\":\"g\"}]}",
           "system*0[text:S] user*0[text:h] "
           "assistant*1[tool_call:{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": 2}}] "
           "tool*0[text:42] assistant*1[text:g]");
    assert_null(got.tools);
}

/* A list of calls gives one block each; any JSON is passed on; what is no JSON goes, counted. */
static void test_sharegpt_function_calls(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_SHAREGPT,
           "{\"conversations\":[{\"from\":\"function_call\",\"value\":\"[{\\\"name\\\":\\\"f\\\"},"
           " 1]\"}]}",
           "assistant*1[tool_call:{\"name\": \"f\"}|tool_call:1]");
    expect(ITH_CONVERTER_SHAREGPT,
           "{\"conversations\":[{\"from\":\"function_call\",\"value\":\"1\"}]}",
           "assistant*1[tool_call:1]");
    expect(ITH_CONVERTER_SHAREGPT,
           "{\"conversations\":[{\"from\":\"human\",\"value\":\"h\"},"
           "{\"from\":\"function_call\",\"value\":\"call f\"},{\"from\":\"gpt\",\"value\":\"g\"}]}",
           "user*0[text:h] assistant*1[text:g]");
    assert_int_equal(got.num_messages_dropped[ITH_DROP_MESSAGE_CALL], 1);
    assert_non_null(strstr(got.message_detail[ITH_DROP_MESSAGE_CALL - ITH_DROP_MESSAGE_TAG],
                           "conversations[1].value: 'call f'"));
}

static void test_sharegpt_unknown_speaker_is_dropped_and_counted(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_SHAREGPT,
           "{\"conversations\":[{\"from\":\"narrator\",\"value\":\"x\"},"
           "{\"from\":\"human\",\"value\":\"h\"},{\"from\":\"gpt\",\"value\":\"g\"}]}",
           "user*0[text:h] assistant*1[text:g]");
    assert_int_equal(got.num_messages_dropped[ITH_DROP_MESSAGE_TAG], 1);
}

static void test_sharegpt_tools(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_SHAREGPT,
           "{\"conversations\":[],\"tools\":\"[{\\\"name\\\":\\\"f\\\"}]\"}", "");
    assert_true(json_is_array(got.tools));
    expect(ITH_CONVERTER_SHAREGPT, "{\"conversations\":[],\"tools\":\"\"}", "");
    assert_null(got.tools);
    expect(ITH_CONVERTER_SHAREGPT, "{\"conversations\":[],\"tools\":\"f(x)\"}", "");
    assert_null(got.tools);
    assert_int_equal(got.num_messages_dropped[ITH_DROP_TOOLS], 1);
}

static void test_sharegpt_wrong_types_are_named(void **state)
{
    (void)state;
    expect_drop(ITH_CONVERTER_SHAREGPT, "{\"conversations\":\"hi\"}", ITH_DROP_TYPE,
                "conversations: found string");
    expect_drop(ITH_CONVERTER_SHAREGPT, "{\"text\":\"hi\"}", ITH_DROP_TYPE,
                "conversations: found nothing");
    expect_drop(ITH_CONVERTER_SHAREGPT, "{\"conversations\":[{\"from\":\"human\",\"value\":null}]}",
                ITH_DROP_TYPE, "conversations[0].value: found nothing, expected text");
    expect_drop(ITH_CONVERTER_SHAREGPT, "{\"conversations\":[\"x\"]}", ITH_DROP_TYPE,
                "conversations[0]: found string");
}

static void test_canonical_blocks_are_kept(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_CANONICAL,
           "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"value\":\"q\"}],"
           "\"loss_weight\":0.0},{\"role\":\"assistant\",\"content\":[{\"type\":\"reasoning\","
           "\"value\":\"r\"},{\"type\":\"text\",\"value\":\"a\"}],\"loss_weight\":0.25}],"
           "\"tools\":\"[]\"}",
           "user*0[text:q] assistant*0.25[reasoning:r|text:a]");
    assert_string_equal(json_string_value(got.tools), "[]");
    assert_true(ith_message_is_supervised(json_array_get(got.messages, 1)));
    assert_false(ith_message_is_supervised(json_array_get(got.messages, 0)));
}

/* Text content, as OpenAI-style files have it; null is absent everywhere (cases S06, S26). */
static void test_canonical_text_content_and_nulls(void **state)
{
    (void)state;
    const char *plain = "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},"
                        "{\"role\":\"assistant\",\"content\":\"a\"}]}";
    const char *nulls = "{\"messages\":[{\"role\":\"user\",\"content\":\"q\",\"tool_calls\":null,"
                        "\"loss_weight\":null},{\"role\":\"assistant\",\"content\":\"a\","
                        "\"tool_calls\":null,\"reasoning_content\":null}],\"tools\":null}";
    expect(ITH_CONVERTER_CANONICAL, plain, "user*0[text:q] assistant*1[text:a]");
    expect(ITH_CONVERTER_CANONICAL, nulls, "user*0[text:q] assistant*1[text:a]");
    expect(ITH_CONVERTER_CANONICAL, "{\"messages\":[{\"role\":\"assistant\",\"content\":null}]}",
           "assistant*1[text:]");
}

/* Arguments stay as they are, in the order of the file, row by row (cases S05); as text they must
 * be JSON (cases S24). */
static void test_canonical_tool_calls_keep_their_arguments(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_CANONICAL,
           "{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"type\":"
           "\"function\",\"function\":{\"name\":\"go\",\"arguments\":{\"y\":0,\"x\":[1.5,null]}}},"
           "{\"name\":\"stop\",\"arguments\":\"{\\\"now\\\": true}\"}]}]}",
           "assistant*1[text:|tool_call:{\"name\": \"go\", \"arguments\": {\"y\": 0, \"x\": [1.5, "
           "null]}}|tool_call:{\"name\": \"stop\", \"arguments\": {\"now\": true}}]");
    expect_drop(ITH_CONVERTER_CANONICAL,
                "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"name\":\"f\","
                "\"arguments\":\"{x\"}]}]}",
                ITH_DROP_TYPE, "messages[0].tool_calls[0].arguments: text that is not a JSON obj");
    expect_drop(ITH_CONVERTER_CANONICAL,
                "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}]}",
                ITH_DROP_TYPE, "messages[0].tool_calls[0].name: found nothing");
}

/* The usual names of a per-message weight (cases S28). */
static void test_canonical_weight_under_any_usual_name(void **state)
{
    (void)state;
    static const struct {
        const char *fields;
        double weight;
    } rows[] = {{"\"loss_weight\":0.5", 0.5},
                {"\"loss_mask\":0", 0},
                {"\"loss\":false", 0},
                {"\"train\":true", 1},
                {"\"weight\":2", 2},
                {"\"loss_mask\":1.0", 1},
                {"\"loss\":true,\"loss_weight\":1", 1}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[200];
        snprintf(text, sizeof text,
                 "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",%s}]}", rows[i].fields);
        assert_ok(convert_with(ITH_CONVERTER_CANONICAL, text, NULL), err);
        double weight = ith_message_weight(json_array_get(got.messages, 0));
        if (weight < rows[i].weight || weight > rows[i].weight)
            fail_msg("%s: weight %g, expected %g", rows[i].fields, weight, rows[i].weight);
    }
    expect_drop(ITH_CONVERTER_CANONICAL,
                "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"loss_weight\":-1}]}",
                ITH_DROP_TYPE, "messages[0].loss_weight: found a negative one");
    expect_drop(ITH_CONVERTER_CANONICAL,
                "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"loss\":\"no\"}]}",
                ITH_DROP_TYPE, "messages[0].loss: found string");
    expect_drop(ITH_CONVERTER_CANONICAL,
                "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"loss\":true,"
                "\"train\":false}]}",
                ITH_DROP_TYPE, "loss and train disagree");
}

static void test_canonical_wrong_types_are_named(void **state)
{
    (void)state;
    expect_drop(ITH_CONVERTER_CANONICAL, "{\"messages\":{}}", ITH_DROP_TYPE,
                "messages: found object, expected a list");
    expect_drop(ITH_CONVERTER_CANONICAL, "{\"messages\":[{\"role\":\"bot\",\"content\":\"x\"}]}",
                ITH_DROP_TYPE, "messages[0].role: found bot, expected system, user");
    expect_drop(ITH_CONVERTER_CANONICAL, "{\"messages\":[{\"content\":\"x\"}]}", ITH_DROP_TYPE,
                "messages[0].role: found nothing");
    expect_drop(ITH_CONVERTER_CANONICAL, "{\"messages\":[{\"role\":\"user\",\"content\":3}]}",
                ITH_DROP_TYPE, "messages[0].content: found integer");
    expect_drop(ITH_CONVERTER_CANONICAL,
                "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"picture\",\"value\":"
                "\"x\"}]}]}",
                ITH_DROP_TYPE, "messages[0].content[0].type: found picture");
    expect_drop(ITH_CONVERTER_CANONICAL,
                "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"value\":[]}]}]"
                "}",
                ITH_DROP_TYPE, "messages[0].content[0].value: found array");
}

/* A path as text is one file (cases S04); tags take files of their kind in order. */
static void test_media_tags_become_blocks(void **state)
{
    (void)state;
    expect(ITH_CONVERTER_ALPACA,
           "{\"instruction\":\"see <image>!\",\"output\":\"<image> ok\",\"images\":\"p/1.jpg\"}",
           "user*0[text:see |image_url:p/1.jpg|text:!] assistant*1[text:<image> ok]");
    assert_true(got.has_media);
    expect(ITH_CONVERTER_SHAREGPT,
           "{\"conversations\":[{\"from\":\"human\",\"value\":\"<image><video>a<image>\"},"
           "{\"from\":\"gpt\",\"value\":\"b<audio>\"}],\"images\":[\"1\",\"2\"],\"videos\":[\"v\"],"
           "\"audios\":\"s\"}",
           "user*0[image_url:1|video_url:v|text:a|image_url:2] assistant*1[text:b|audio_url:s]");
    expect(ITH_CONVERTER_CANONICAL,
           "{\"messages\":[{\"role\":\"user\",\"content\":\"<image>who?\"}],\"images\":[\"1\"]}",
           "user*0[image_url:1|text:who?]");
    /* Without a media column the text of canonical rows is text. */
    expect(ITH_CONVERTER_CANONICAL,
           "{\"messages\":[{\"role\":\"user\",\"content\":\"the <video> tag\"}]}",
           "user*0[text:the <video> tag]");
    assert_false(got.has_media);
    expect(ITH_CONVERTER_CANONICAL,
           "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":"
           "{\"url\":\"u\"}},{\"type\":\"text\",\"text\":\"t\"}]}]}",
           "user*0[image_url:u|text:t]");
}

/* Both counts are told (cases S11). */
static void test_media_counts_that_differ_are_errors(void **state)
{
    (void)state;
    assert_fails(convert_with(ITH_CONVERTER_ALPACA,
                              "{\"instruction\":\"<image><image>hi\",\"output\":\"a\",\"images\":"
                              "[\"1\"]}",
                              NULL),
                 err, ITH_ERR_FORMAT, "2 placeholders <image>, but 1 image in images");
    assert_fails(convert_with(ITH_CONVERTER_SHAREGPT,
                              "{\"conversations\":[{\"from\":\"human\",\"value\":\"hi\"}],"
                              "\"audios\":[\"a\",\"b\"]}",
                              NULL),
                 err, ITH_ERR_FORMAT, "0 placeholders <audio>, but 2 audios in audios");
    assert_fails(convert_with(ITH_CONVERTER_SHAREGPT,
                              "{\"conversations\":[{\"from\":\"human\",\"value\":\"<video>\"}]}",
                              NULL),
                 err, ITH_ERR_FORMAT, "1 placeholder <video>, but 0 videos in videos");
    expect_drop(ITH_CONVERTER_ALPACA, "{\"output\":\"a\",\"images\":[{\"path\":\"1\"}]}",
                ITH_DROP_TYPE, "images[0]: found object, expected a path");
}

/* Both sides take the files from the start. */
static void test_pair_sides_share_media(void **state)
{
    (void)state;
    assert_ok(convert_with(ITH_CONVERTER_PAIR,
                           "{\"chosen\":[{\"role\":\"user\",\"content\":\"<image>q\"},{\"role\":"
                           "\"assistant\",\"content\":\"yes\"}],\"rejected\":[{\"role\":\"user\","
                           "\"content\":\"<image>q\"},{\"role\":\"tool\",\"content\":\"[{}]\"},"
                           "{\"role\":\"assistant\",\"content\":\"no\"}],\"images\":[\"1\"]}",
                           NULL),
              err);
    assert_messages(got.chosen, "user*0[image_url:1|text:q] assistant*1[text:yes]");
    assert_messages(got.rejected,
                    "user*0[image_url:1|text:q] tool*0[tool_call:{}] assistant*1[text:no]");
}

/* Expected keys, found keys, and what would fit (cases S03). */
static void test_detect_names_expected_and_found_keys(void **state)
{
    (void)state;
    static const struct {
        const char *row;
        ith_converter wanted, found; /* AUTO: an error */
        const char *part;
    } cases[] = {
        {"{\"messages\":[]}", ITH_CONVERTER_AUTO, ITH_CONVERTER_CANONICAL, NULL},
        {"{\"instruction\":\"a\",\"output\":\"b\"}", ITH_CONVERTER_AUTO, ITH_CONVERTER_ALPACA,
         NULL},
        {"{\"conversations\":[]}", ITH_CONVERTER_AUTO, ITH_CONVERTER_SHAREGPT, NULL},
        {"{\"chosen\":[],\"rejected\":[]}", ITH_CONVERTER_AUTO, ITH_CONVERTER_PAIR, NULL},
        {"{\"conversations\":[],\"chosen\":{},\"rejected\":{}}", ITH_CONVERTER_AUTO,
         ITH_CONVERTER_PAIR, NULL},
        {"{\"text\":\"hello\"}", ITH_CONVERTER_CANONICAL, ITH_CONVERTER_AUTO,
         "found the keys text; converter canonical expects messages"},
        {"{\"text\":\"hello\"}", ITH_CONVERTER_AUTO, ITH_CONVERTER_AUTO,
         "found the keys text; expected messages (canonical)"},
        {"{\"conversations\":[]}", ITH_CONVERTER_ALPACA, ITH_CONVERTER_AUTO,
         "converter alpaca expects instruction, input, output; converter: sharegpt would fit"},
        {"{}", ITH_CONVERTER_AUTO, ITH_CONVERTER_AUTO, "found the keys none"},
        {"{\"identity\": {\"file_name\": \"identity.json\"}, \"more\": {\"hf_hub_url\": \"a/b\"}}",
         ITH_CONVERTER_AUTO, ITH_CONVERTER_AUTO, "a dataset_info.json of LlamaFactory v0"},
        {"{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1,\"i\":1}",
         ITH_CONVERTER_AUTO, ITH_CONVERTER_AUTO, "a, b, c, d, e, f, g, h and 1 more"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *row = parse(cases[i].row);
        ith_converter found = ITH_CONVERTER_AUTO;
        if (cases[i].part)
            assert_fails(ith_convert_detect(row, cases[i].wanted, &found, &err), err,
                         ITH_ERR_FORMAT, cases[i].part);
        else
            assert_ok(ith_convert_detect(row, cases[i].wanted, &found, &err), err);
        assert_int_equal(found, cases[i].found);
        json_decref(row);
    }
}

/* Details are one line of whole characters, and the first one wins. */
static void test_tokenid_rows_keep_ids_and_steps(void **state)
{
    (void)state;
    assert_ok(convert_with(ITH_CONVERTER_TOKENID,
                           "{\"input_ids\":[7,8,9],\"prompt_lengths\":1,\"reveal_steps\":[2,0]}",
                           NULL),
              err);
    assert_null(got.messages);
    assert_int_equal(json_array_size(got.input_ids), 3);
    assert_int_equal(got.prompt_length, 1);
    assert_int_equal(json_integer_value(json_array_get(got.reveal_steps, 0)), 2);
    assert_ok(convert_with(ITH_CONVERTER_TOKENID,
                           "{\"input_ids\":[7],\"prompt_lengths\":0,\"reveal_steps\":null}", NULL),
              err);
    assert_int_equal(json_array_size(got.input_ids), 1);
    assert_null(got.reveal_steps);
    static const struct {
        const char *row, *detail;
    } bad[] = {
        {"{\"input_ids\":\"7\",\"prompt_lengths\":0}", "input_ids: found string"},
        {"{\"input_ids\":[7,8.5],\"prompt_lengths\":0}", "input_ids[1]: found number"},
        {"{\"input_ids\":[-1],\"prompt_lengths\":0}", "input_ids[0]: found -1, expected 0 to"},
        {"{\"input_ids\":[2147483648],\"prompt_lengths\":0}", "found 2147483648"},
        {"{\"input_ids\":[7,8]}", "prompt_lengths: found nothing"},
        {"{\"input_ids\":[7,8],\"prompt_lengths\":2}", "found 2, expected less than the 2"},
        {"{\"input_ids\":[],\"prompt_lengths\":0}", "found 0, expected less than the 0"},
        {"{\"input_ids\":[7,8],\"prompt_lengths\":1,\"reveal_steps\":[0,1]}",
         "reveal_steps: found 2, expected one for each of the 1"},
        {"{\"input_ids\":[7,8],\"prompt_lengths\":1,\"reveal_steps\":[-1]}",
         "reveal_steps[0]: found -1"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_drop(ITH_CONVERTER_TOKENID, bad[i].row, ITH_DROP_TYPE, bad[i].detail);
}

static void test_drops_keep_the_first_detail(void **state)
{
    (void)state;
    ith_drops a = {0}, b = {0};
    char text[300] = "x\n\xc3";
    memset(text + 3, 'y', 290);
    ith_drops_add(&b, ITH_DROP_TYPE, 1, 7, text);
    ith_drops_add(&b, ITH_DROP_TYPE, 1, 8, "later");
    ith_drops_add(&b, ITH_DROP_MEDIA, 1, 9, "m");
    assert_int_equal(b.rows[ITH_DROP_TYPE].count, 2);
    assert_int_equal(strlen(b.rows[ITH_DROP_TYPE].detail), ITH_DROP_DETAIL_BYTES - 1);
    assert_memory_equal(b.rows[ITH_DROP_TYPE].detail, "x ?yyy", 6);
    ith_drops_add(&a, ITH_DROP_TYPE, 0, 3, "first");
    ith_drops_merge(&a, &b);
    assert_int_equal(a.rows[ITH_DROP_TYPE].count, 3);
    assert_int_equal(a.rows[ITH_DROP_TYPE].row, 3);
    assert_string_equal(a.rows[ITH_DROP_TYPE].detail, "first");
    assert_int_equal(a.rows[ITH_DROP_MEDIA].row, 9);
}

/* The n-th failing allocation, for every n: an error and nothing left behind. */
static void test_convert_faults_leave_nothing(void **state)
{
    (void)state;
    static const struct {
        ith_converter converter;
        const char *row;
    } rows[] = {
        {ITH_CONVERTER_ALPACA,
         "{\"system\":\"s\",\"instruction\":\"a<image>b\",\"input\":\"c\",\"output\":\"d\","
         "\"images\":[\"1\"]}"},
        {ITH_CONVERTER_SHAREGPT,
         "{\"conversations\":[{\"from\":\"human\",\"value\":\"h\"},{\"from\":\"function_call\","
         "\"value\":\"[{\\\"name\\\":\\\"f\\\"}]\"}],\"tools\":\"[]\"}"},
        {ITH_CONVERTER_CANONICAL,
         "{\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"text\",\"value\":\"x\"}],"
         "\"tool_calls\":[{\"name\":\"f\",\"arguments\":\"{}\"}]}],\"tools\":\"[]\"}"},
        {ITH_CONVERTER_PAIR, "{\"chosen\":[{\"role\":\"assistant\",\"content\":\"x\"}],"
                             "\"rejected\":[{\"role\":\"tool\",\"content\":\"{}\"}]}"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        json_t *row = parse(rows[i].row);
        int64_t faults = 0;
        for (int64_t n = 1;; n++) {
            ith_converted out;
            ith_error_clear(&err);
            ith_fault_set(ITH_FAULT_ALLOC, n);
            ith_status status = ith_convert_row(rows[i].converter, row, NULL, &out, &err);
            bool hit = ith_fault_count(ITH_FAULT_ALLOC) >= n;
            ith_fault_set(ITH_FAULT_ALLOC, 0);
            if (hit && status != ITH_ERR_MEMORY && status != ITH_OK)
                fail_msg("row %zu, allocation %lld: status %d", i, (long long)n, (int)status);
            if (status == ITH_OK)
                ith_converted_deinit(&out);
            else
                assert_null(out.messages);
            if (!hit)
                break;
            faults++; /* base/json.c survives most of them: it asks once more */
        }
        assert_true(faults > 5);
        json_decref(row);
    }
}

static int teardown(void **state)
{
    (void)state;
    ith_converted_deinit(&got);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alpaca_joins_instruction_and_input),
        cmocka_unit_test(test_alpaca_null_columns_are_absent),
        cmocka_unit_test(test_alpaca_wrong_type_is_named),
        cmocka_unit_test(test_unknown_fields_are_ignored),
        cmocka_unit_test(test_sharegpt_speakers_and_weights),
        cmocka_unit_test(test_sharegpt_function_calls),
        cmocka_unit_test(test_sharegpt_unknown_speaker_is_dropped_and_counted),
        cmocka_unit_test(test_sharegpt_tools),
        cmocka_unit_test(test_sharegpt_wrong_types_are_named),
        cmocka_unit_test(test_canonical_blocks_are_kept),
        cmocka_unit_test(test_canonical_text_content_and_nulls),
        cmocka_unit_test(test_canonical_tool_calls_keep_their_arguments),
        cmocka_unit_test(test_canonical_weight_under_any_usual_name),
        cmocka_unit_test(test_canonical_wrong_types_are_named),
        cmocka_unit_test(test_media_tags_become_blocks),
        cmocka_unit_test(test_media_counts_that_differ_are_errors),
        cmocka_unit_test(test_pair_sides_share_media),
        cmocka_unit_test(test_detect_names_expected_and_found_keys),
        cmocka_unit_test(test_tokenid_rows_keep_ids_and_steps),
        cmocka_unit_test(test_drops_keep_the_first_detail),
        cmocka_unit_test(test_convert_faults_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, teardown);
}
