/* Chat templates of model directories, and conversations as labelled token ids. */
#include "testing.h"

#include "tokenizer/chat.h"

static ith_error err;

/* A thinking template in the manner of current models: reasoning of earlier turns is left out. */
static const char think_template[] =
    "{%- if tools %}\n"
    "{{- '<|im_start|>system\\nTools:' }}\n"
    "{%- for t in tools %}{{ '\\n' ~ (t | tojson) }}{% endfor %}\n"
    "{{- '<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- set ns = namespace(last=-1) %}\n"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- for m in messages %}\n"
    "{{- '<|im_start|>' + m.role + '\\n' }}\n"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}\n"
    "{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}\n"
    "{%- endif %}\n"
    "{%- if m.content is string %}{{ m.content }}{% else %}\n"
    "{%- for c in m.content %}{{ c.text if c.type == 'text' else '<' ~ c.type ~ '>' }}{% endfor "
    "%}\n"
    "{%- endif %}\n"
    "{%- for call in m.tool_calls or [] %}\n"
    "{{- '<tool_call>' ~ call.function.name }}\n"
    "{%- for k, v in call.function.arguments | items %}{{ ' ' ~ k ~ '=' ~ v }}{% endfor %}\n"
    "{{- '</tool_call>' }}\n"
    "{%- endfor %}\n"
    "{{- '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}\n"
    "{{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "{%- endif %}\n"
    "{%- endif %}\n";

/* The same text for every turn, whatever follows it; says itself what is trained. */
static const char training_template[] =
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

static ith_tokenizer *tokenizer;
static char tokenizer_dir[4096];

static int open_tokenizer(void **state)
{
    static const char text[] =
        "user assistant system tool think yes no hello world answer question the quick brown fox "
        "yes yes answer answer question question hello hello\n\nyes\n\nno\n\nhello\n\nyes\n\nno";
    static const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>",
                                          "</think>"};
    (void)state;
    snprintf(tokenizer_dir, sizeof tokenizer_dir, "%s", temp_dir("chat-tokenizer"));
    assert_ok(ith_bpe_train(text, sizeof text - 1, 320, special, 5, tokenizer_dir, &err), err);
    assert_ok(ith_tokenizer_open(&tokenizer, tokenizer_dir, &err), err);
    return 0;
}

static int close_tokenizer(void **state)
{
    (void)state;
    ith_tokenizer_close(tokenizer);
    return ith_remove_tree(tokenizer_dir, NULL) == ITH_OK ? 0 : -1;
}

static json_t *parse_json(const char *text)
{
    json_t *json = NULL;
    assert_ok(ith_json_parse(&json, text, (int64_t)strlen(text), "test", &err), err);
    return json;
}

static ith_chat *open_chat(const char *text)
{
    ith_chat *chat = NULL;
    assert_ok(ith_chat_open(&chat, NULL, text, tokenizer, &err), err);
    return chat;
}

static void assert_text(const ith_chat *chat, const char *messages, const char *tools,
                        const ith_chat_options *o, const char *expected)
{
    json_t *m = parse_json(messages), *t = tools ? parse_json(tools) : NULL;
    ith_buf out = {0};
    assert_ok(ith_chat_render(chat, m, t, o, &out, &err), err);
    assert_string_equal(out.data, expected);
    ith_buf_deinit(&out);
    json_decref(m);
    json_decref(t);
}

/* Text of the trained tokens, spans separated by "|". */
static void trained_text(const ith_tokenizer *tok, const ith_encoded *e, ith_buf *out)
{
    for (int64_t i = 0; i < e->ids.count; i++) {
        bool trained = e->labels[i] != ITH_LABEL_IGNORE;
        assert_true(trained == (e->weights[i] > 0));
        if (trained)
            assert_int_equal(e->labels[i], e->ids.ids[i]);
        if (trained && i > 0 && e->labels[i - 1] == ITH_LABEL_IGNORE && out->len > 0)
            ith_buf_puts(out, "|");
        if (trained)
            assert_ok(ith_tokenizer_decode(tok, &e->ids.ids[i], 1, false, out, &err), err);
    }
}

static void assert_trained(const ith_encoded *e, const char *expected)
{
    ith_buf text = {0};
    ith_buf_puts(&text, "");
    trained_text(tokenizer, e, &text);
    assert_string_equal(text.data ? text.data : "", expected);
    ith_buf_deinit(&text);
}

/* ---- finding the template -------------------------------------------------------------------- */

static void write_text(const char *dir, const char *name, const char *text)
{
    char path[5000];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_ok(ith_write_file(path, text, (int64_t)strlen(text), &err), err);
}

/* Goal: each source of a template is found, the jinja file before the JSON, custom text before all.
 */
static void test_open_finds_the_template_of_the_directory(void **state)
{
    static const char messages[] = "[{\"role\": \"user\", \"content\": \"hi\"}]";
    (void)state;
    const char *dir = temp_dir("chat-open");
    ith_chat *chat = NULL;

    assert_ok(ith_chat_open(&chat, dir, NULL, NULL, &err), err);
    assert_text(chat, messages, NULL, NULL, "<|im_start|>user\nhi<|im_end|>\n");
    assert_non_null(strstr(ith_chat_source(chat), "ChatML"));
    ith_chat_close(chat);

    write_text(dir, "tokenizer_config.json",
               "{\"eos_token\": {\"content\": \"<end>\"}, \"chat_template\": [{\"name\": "
               "\"default\", \"template\": \"D{{ eos_token }}\"}, {\"name\": \"tool_use\", "
               "\"template\": \"T{{ tools[0] }}\"}]}");
    assert_ok(ith_chat_open(&chat, dir, NULL, NULL, &err), err);
    assert_text(chat, messages, NULL, NULL, "D<end>");
    assert_text(chat, messages, "[7]", NULL, "T7");
    char hash[65];
    snprintf(hash, sizeof hash, "%s", ith_chat_hash(chat));
    ith_chat_close(chat);

    write_text(dir, "chat_template.jinja", "J{{ messages[0].content }}\n");
    assert_ok(ith_chat_open(&chat, dir, NULL, NULL, &err), err);
    assert_text(chat, messages, NULL, NULL, "Jhi");
    assert_string_not_equal(hash, ith_chat_hash(chat));
    ith_chat_close(chat);

    assert_ok(ith_chat_open(&chat, dir, "C{{ x }}", NULL, &err), err);
    json_t *extra = parse_json("{\"x\": 5}");
    ith_chat_options o = {.enable_thinking = -1, .extra = extra};
    assert_text(chat, messages, NULL, &o, "C5");
    json_decref(extra);
    ith_chat_close(chat);
    assert_ok(ith_chat_open(&chat, dir, NULL, NULL, &err), err);

    char file[5000];
    snprintf(file, sizeof file, "%s/other.jinja", dir);
    write_text(dir, "other.jinja", "F{{ messages[0].content }}\n");
    assert_null(ith_chat_custom(chat));
    ith_chat_close(chat);
    assert_ok(ith_chat_open(&chat, dir, file, NULL, &err), err);
    assert_text(chat, messages, NULL, NULL, "Fhi");
    assert_string_equal(ith_chat_source(chat), file);
    assert_string_equal(ith_chat_custom(chat), "F{{ messages[0].content }}\n");
    ith_chat_close(chat);
    assert_fails(ith_chat_open(&chat, dir, "none.jinja", NULL, &err), err, ITH_ERR_USAGE,
                 "chat template: found none.jinja, no such file (give a file, or Jinja text)");

    write_text(dir, "chat_template.jinja", "\n{{ 1 | nosuch }}");
    assert_fails(ith_chat_open(&chat, dir, NULL, NULL, &err), err, ITH_ERR_FORMAT,
                 "chat_template.jinja:2: filter 'nosuch'");
    assert_ok(ith_remove_tree(dir, &err), err);
}

static void test_fallback_refuses_what_it_has_no_form_for(void **state)
{
    (void)state;
    ith_chat *chat = NULL;
    ith_buf out = {0};
    assert_ok(ith_chat_open(&chat, NULL, NULL, NULL, &err), err);
    json_t *m = parse_json("[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
                           "\"content\": \"b\", \"reasoning_content\": \"c\"}]");
    assert_fails(ith_chat_render(chat, m, NULL, NULL, &out, &err), err, ITH_ERR_FORMAT,
                 "no form for reasoning");
    json_decref(m);
    ith_buf_deinit(&out);
    ith_chat_close(chat);
}

/* ---- rendering ------------------------------------------------------------------------------- */

/* Goal: a message may leave content out or null; arguments may be JSON text. */
static void test_render_accepts_null_content_and_text_arguments(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    assert_text(
        chat,
        "[{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": "
        "null, \"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": \"{\\\"a\\\":"
        " 1}\"}}]}]",
        NULL, NULL,
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        "<tool_call>f a=1</tool_call><|im_end|>\n");
    ith_buf out = {0};
    json_t *m = parse_json("[{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": "
                           "\"f\", \"arguments\": \"{broken\"}}]}]");
    assert_fails(ith_chat_render(chat, m, NULL, NULL, &out, &err), err, ITH_ERR_FORMAT,
                 "messages[0].tool_calls: arguments:1:");
    json_decref(m);
    ith_buf_deinit(&out);
    ith_chat_close(chat);
    chat = open_chat("{% for m in messages %}{% for c in m.tool_calls %}"
                     "{{ c.function.arguments if c.function.arguments is string else 'M' }}"
                     "{% endfor %}{% endfor %}");
    assert_text(chat,
                "[{\"role\": \"assistant\", \"tool_calls\": [{\"function\": {\"name\": \"f\", "
                "\"arguments\": \"{ }\"}}]}]",
                NULL, NULL, "{ }");
    ith_chat_close(chat);
}

static void test_render_thinking_switch_changes_the_generation_prompt(void **state)
{
    static const char m[] = "[{\"role\": \"user\", \"content\": \"q\"}]";
    (void)state;
    ith_chat *chat = open_chat(think_template);
    ith_chat_options o = {.add_generation_prompt = true, .enable_thinking = -1};
    assert_text(chat, m, NULL, &o, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
    o.enable_thinking = 1;
    assert_text(chat, m, NULL, &o, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
    o.enable_thinking = 0;
    assert_text(chat, m, NULL, &o,
                "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    ith_chat_close(chat);
}

/* ---- canonical form -------------------------------------------------------------------------- */

static void assert_hf(const ith_chat *chat, const char *messages, const char *tools,
                      const char *expected, const char *expected_tools)
{
    json_t *m = parse_json(messages), *t = tools ? parse_json(tools) : NULL;
    json_t *hf = NULL, *hf_tools = NULL;
    assert_ok(ith_chat_to_hf(chat, m, t, &hf, &hf_tools, &err), err);
    ith_buf text = {0};
    assert_ok(ith_json_dump(hf, true, &text, &err), err);
    assert_string_equal(text.data, expected);
    assert_true((hf_tools != NULL) == (expected_tools != NULL));
    if (hf_tools) {
        ith_buf_clear(&text);
        assert_ok(ith_json_dump(hf_tools, true, &text, &err), err);
        assert_string_equal(text.data, expected_tools);
    }
    ith_buf_deinit(&text);
    json_decref(hf);
    json_decref(hf_tools);
    json_decref(m);
    json_decref(t);
}

static void test_to_hf_gathers_blocks(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    assert_hf(
        chat,
        "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"value\": \"a\"}, {\"type\":"
        " \"text\", \"value\": \"b\"}]}, {\"role\": \"assistant\", \"content\": [{\"type\": "
        "\"reasoning\", \"value\": \"r\"}, {\"type\": \"tool_call\", \"value\": \"{\\\"name\\\":"
        " \\\"f\\\", \\\"arguments\\\": {\\\"x\\\": 1}}\"}, {\"type\": \"text\", \"value\": "
        "\"c\"}]}]",
        "\"{\\\"name\\\": \\\"f\\\"}\"",
        "[{\"role\": \"user\", \"content\": \"ab\"}, {\"role\": \"assistant\", \"content\": "
        "\"c\", \"reasoning_content\": \"r\", \"tool_calls\": [{\"type\": \"function\", "
        "\"function\": {\"name\": \"f\", \"arguments\": {\"x\": 1}}}]}]",
        "[{\"name\": \"f\"}]");
    assert_hf(
        chat,
        "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"value\": \"see \"}, "
        "{\"type\": \"image_url\", \"value\": \"a.png\"}, {\"type\": \"text\", \"value\": "
        "\" ?\"}]}]",
        NULL,
        "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"see \"}, "
        "{\"type\": \"image\", \"image\": \"a.png\"}, {\"type\": \"text\", \"text\": \" ?\"}]}]",
        NULL);
    ith_chat_close(chat);
}

/* Goal: a special token in user-controlled text is no special token, also behind JSON escapes. */
static void test_to_hf_escapes_special_tokens(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    assert_hf(chat,
              "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"value\": "
              "\"a<|im_end|>b<|im_start<|im_start|>\"}]}]",
              "\"[{\\\"d\\\": \\\"\\\\u003c|im_end|>\\\"}]\"",
              "[{\"role\": \"user\", \"content\": "
              "\"a<\xe2\x80\x8b|im_end|>b<|im_start<\xe2\x80\x8b|im_start|>\"}]",
              "[{\"d\": \"<\xe2\x80\x8b|im_end|>\"}]");
    assert_hf(chat,
              "[{\"role\": \"assistant\", \"content\": [{\"type\": \"tool_call\", \"value\": "
              "\"{\\\"name\\\": \\\"f\\\", \\\"arguments\\\": \\\"{\\\\\\\"a\\\\\\\": "
              "\\\\\\\"\\\\\\\\u003c|im_end|>\\\\\\\"}\\\"}\"}]}]",
              NULL,
              "[{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"type\": "
              "\"function\", \"function\": {\"name\": \"f\", \"arguments\": \"{\\\"a\\\": "
              "\\\"<\xe2\x80\x8b|im_end|>\\\"}\"}}]}]",
              NULL);
    ith_chat_close(chat);
}

static void test_to_hf_names_the_wrong_block(void **state)
{
    static const struct {
        const char *messages, *error;
    } cases[] = {
        {"[{\"role\": \"bot\", \"content\": []}]", "messages[0]: role 'bot'"},
        {"[{\"role\": \"user\", \"content\": []}, {\"role\": \"user\", \"content\": [{\"type\": "
         "\"image\", \"value\": \"\"}]}]",
         "messages[1]: content[0]: type 'image'"},
        {"[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"value\": 5}]}]",
         "messages[0]: content[0]: value: integer found"},
        {"[{\"role\": \"user\"}]", "messages[0]: content: nothing found"},
        {"[{\"role\": \"assistant\", \"content\": [{\"type\": \"tool_call\", \"value\": \"{\"}]}]",
         "messages[0]: content[0]: tool_call:1:"},
        {"[{\"role\": \"assistant\", \"content\": [{\"type\": \"tool_call\", \"value\": "
         "\"{\\\"name\\\": \\\"f\\\"}\"}]}]",
         "messages[0]: content[0]: tool_call: a JSON object with 'name' and 'arguments'"},
    };
    (void)state;
    ith_chat *chat = open_chat(think_template);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        json_t *m = parse_json(cases[i].messages), *hf = NULL, *tools = NULL;
        assert_fails(ith_chat_to_hf(chat, m, NULL, &hf, &tools, &err), err, ITH_ERR_FORMAT,
                     cases[i].error);
        assert_null(hf);
        json_decref(m);
    }
    ith_chat_close(chat);
}

/* ---- samples --------------------------------------------------------------------------------- */

static json_t *turn(const char *role, const char *reasoning, const char *text, double weight)
{
    json_t *content = json_array();
    if (reasoning)
        json_array_append_new(content,
                              json_pack("{s:s, s:s}", "type", "reasoning", "value", reasoning));
    json_array_append_new(content, json_pack("{s:s, s:s}", "type", "text", "value", text));
    return json_pack("{s:s, s:o, s:f}", "role", role, "content", content, "loss_weight", weight);
}

/* Goal: the answer alone is trained; the empty think block counts as prompt without reasoning and
 * as answer with it. */
static void test_encode_sample_trains_the_last_answer(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    for (int k = 0; k < 2; k++) {
        json_t *m = json_pack("[o, o, o, o]", turn("user", NULL, "yes", 0),
                              turn("assistant", NULL, "yes", 1), turn("user", NULL, "hello", 0),
                              turn("assistant", k ? "world" : NULL, "yes", 0.5));
        ith_encoded e = {0};
        assert_ok(ith_chat_encode_sample(chat, m, NULL, &e, &err), err);
        assert_trained(&e, k ? "<think>\nworld\n</think>\n\nyes<|im_end|>\n" : "yes<|im_end|>\n");
        assert_true(e.weights[e.ids.count - 1] == 0.5f);
        ith_encoded_deinit(&e);
        json_decref(m);
    }
    ith_chat_close(chat);
}

/* Goal: where the line feed of the header and one that begins the answer are one token, the ids are
 * those of the whole text, that token is the prompt's, and all that follows is trained. */
static void test_encode_sample_token_across_the_joint_is_the_prompts(void **state)
{
    (void)state;
    ith_chat *chat = open_chat("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                               "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
                               "<|im_start|>assistant\n{% endif %}");
    json_t *m =
        json_pack("[o, o]", turn("user", NULL, "hello", 0), turn("assistant", NULL, "\nyes", 1));
    ith_encoded e = {0};
    ith_ids whole = {0};
    assert_ok(ith_tokenizer_encode(tokenizer, "\n\n", 2, &whole, &err), err);
    assert_int_equal(whole.count, 1); /* else nothing is tried here */
    whole.count = 0;
    static const char text[] =
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n\nyes<|im_end|>\n";
    assert_ok(ith_chat_encode_sample(chat, m, NULL, &e, &err), err);
    assert_ok(ith_tokenizer_encode(tokenizer, text, (int64_t)strlen(text), &whole, &err), err);
    assert_int_equal(e.ids.count, whole.count);
    assert_memory_equal(e.ids.ids, whole.ids, (size_t)whole.count * 4);
    assert_trained(&e, "yes<|im_end|>\n");
    ith_ids_free(&whole);
    ith_encoded_deinit(&e);
    json_decref(m);
    ith_chat_close(chat);
}

static void test_encode_sample_refuses_what_it_cannot_label(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    ith_encoded e = {0};
    json_t *m = json_pack("[o]", turn("user", NULL, "hello", 1));
    assert_fails(ith_chat_encode_sample(chat, m, NULL, &e, &err), err, ITH_ERR_FORMAT,
                 "the last one must be the assistant's");
    json_decref(m);
    ith_chat_close(chat);
    chat = open_chat("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}");
    m = json_pack("[o, o]", turn("user", NULL, "hello", 1), turn("assistant", NULL, "yes", 1));
    assert_fails(ith_chat_encode_sample(chat, m, NULL, &e, &err), err, ITH_ERR_FORMAT,
                 "is not a prefix of the whole");
    assert_null(e.ids.ids);
    json_decref(m);
    ith_chat_close(chat);
}

/* Goal: all answers of a conversation are trained in one sample, each from where its prompt ends;
 * text that occurs twice is told apart by place; weight 0 masks. */
static void test_encode_turns_trains_every_weighted_answer(void **state)
{
    static const char *const templates[] = {think_template, training_template};
    static const char *const expected[] = {
        "yes<|im_end|>\n|yes<|im_end|>\n",
        "yes<|im_end|>\n|yes<|im_end|>\n",
    };
    (void)state;
    for (int k = 0; k < 2; k++) {
        ith_chat *chat = open_chat(templates[k]);
        json_t *m = json_pack("[o, o, o, o, o, o]", turn("user", NULL, "yes", 0),
                              turn("assistant", NULL, "yes", 1), turn("user", NULL, "no", 0),
                              turn("assistant", NULL, "no", 0), turn("user", NULL, "yes", 1),
                              turn("assistant", NULL, "yes", 2));
        ith_encoded e = {0};
        ith_turns_report report = {0};
        assert_ok(ith_chat_encode_turns(chat, m, NULL, &e, &report, &err), err);
        assert_trained(&e, expected[k]);
        assert_int_equal(report.num_turns, 2);
        assert_int_equal(e.num_dropped_reasoning, 0);
        assert_true(e.weights[e.ids.count - 1] == 2.0f);
        ith_encoded_deinit(&e);
        json_decref(m);
        ith_chat_close(chat);
    }
}

/* Goal: for the last answer, one render of all turns and the prompt/full difference give the same
 * ids and labels. */
static void test_encode_turns_agrees_with_the_sample_of_the_last_turn(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    for (int k = 0; k < 4; k++) {
        json_t *m = json_pack("[o, o, o, o]", turn("user", NULL, "hello", 0),
                              turn("assistant", k & 1 ? "fox" : NULL, "yes", 0),
                              turn("user", NULL, "question", 0),
                              turn("assistant", k & 2 ? "the quick" : NULL, "answer", 1));
        ith_encoded one = {0}, all = {0};
        ith_turns_report report = {0};
        assert_ok(ith_chat_encode_sample(chat, m, NULL, &one, &err), err);
        assert_ok(ith_chat_encode_turns(chat, m, NULL, &all, &report, &err), err);
        assert_int_equal(one.ids.count, all.ids.count);
        assert_memory_equal(one.ids.ids, all.ids.ids, (size_t)one.ids.count * 4);
        assert_memory_equal(one.labels, all.labels, (size_t)one.ids.count * 4);
        assert_memory_equal(one.weights, all.weights, (size_t)one.ids.count * 4);
        ith_encoded_deinit(&one);
        ith_encoded_deinit(&all);
        json_decref(m);
    }
    ith_chat_close(chat);
}

static void test_encode_turns_counts_reasoning_that_is_left_out(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    json_t *m = json_pack("[o, o, o, o]", turn("user", NULL, "hello", 0),
                          turn("assistant", "brown fox", "yes", 1), turn("user", NULL, "no", 0),
                          turn("assistant", "quick", "answer", 1));
    ith_encoded e = {0};
    ith_turns_report report = {0};
    assert_ok(ith_chat_encode_turns(chat, m, NULL, &e, &report, &err), err);
    assert_trained(&e, "yes<|im_end|>\n|<think>\nquick\n</think>\n\nanswer<|im_end|>\n");
    assert_int_equal(report.num_turns, 2);
    assert_int_equal(e.num_dropped_reasoning, 1);
    ith_encoded_deinit(&e);
    json_decref(m);
    ith_chat_close(chat);

    /* Of the sample of one answer: the last keeps it, unless the template knows none. */
    for (int k = 0; k < 2; k++) {
        chat = open_chat(k ? "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                             "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
                             "<|im_start|>assistant\n{% endif %}"
                           : think_template);
        m = json_pack("[o, o]", turn("user", NULL, "no", 0),
                      turn("assistant", "quick", "answer", 1));
        assert_ok(ith_chat_encode_sample(chat, m, NULL, &e, &err), err);
        assert_int_equal(e.num_dropped_reasoning, k);
        ith_encoded_deinit(&e);
        json_decref(m);
        ith_chat_close(chat);
    }
}

/* Goal: a template in which the answers cannot be placed is an error, not a guess. */
static void test_encode_turns_refuses_templates_it_cannot_place(void **state)
{
    static const char *const texts[] = {
        "{{ messages[0].content + messages[1].content }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        ("{% for m in messages[::-1] %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"),
    };
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        ith_chat *chat = open_chat(texts[i]);
        ith_encoded e = {0};
        json_t *m = json_pack("[o, o, o, o]", turn("user", NULL, "yes", 0),
                              turn("assistant", NULL, "yes", 1), turn("user", NULL, "no", 0),
                              turn("assistant", NULL, "yes", 1));
        ith_status status = ith_chat_encode_turns(chat, m, NULL, &e, NULL, &err);
        if (status != ITH_ERR_FORMAT || !strstr(err.text, "custom_chat_template: "))
            fail_msg("template %zu: status %d, '%s'", i, (int)status, err.text);
        ith_error_clear(&err);
        assert_null(e.ids.ids);
        json_decref(m);
        ith_chat_close(chat);
    }
}

/* Goal: twice the turns, at most twice the template's steps. */
static void test_encode_turns_steps_are_linear(void **state)
{
    static const char *const templates[] = {think_template, training_template};
    (void)state;
    for (int k = 0; k < 2; k++) {
        ith_chat *chat = open_chat(templates[k]);
        int64_t steps[2];
        for (int r = 0; r < 2; r++) {
            json_t *m = json_array();
            for (int i = 0; i < 300 << r; i++) {
                json_array_append_new(m, turn("user", NULL, "question", 0));
                json_array_append_new(m, turn("assistant", NULL, "answer", 1));
            }
            ith_encoded e = {0};
            ith_turns_report report = {0};
            assert_ok(ith_chat_encode_turns(chat, m, NULL, &e, &report, &err), err);
            assert_int_equal(report.num_turns, 300 << r);
            steps[r] = report.steps;
            ith_encoded_deinit(&e);
            json_decref(m);
        }
        if (steps[1] > steps[0] * 2 + steps[0] / 20)
            fail_msg("%lld steps for 300 turns, %lld for 600", (long long)steps[0],
                     (long long)steps[1]);
        ith_chat_close(chat);
    }
}

static void test_encode_prompt_labels_nothing(void **state)
{
    (void)state;
    ith_chat *chat = open_chat(think_template);
    json_t *m = json_pack("[o]", turn("user", NULL, "hello", 1));
    ith_encoded e = {0};
    assert_ok(ith_chat_encode_prompt(chat, m, NULL, 0, &e, &err), err);
    assert_trained(&e, "");
    ith_buf text = {0};
    assert_ok(ith_tokenizer_decode(tokenizer, e.ids.ids, e.ids.count, false, &text, &err), err);
    assert_string_equal(text.data, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
                                   "<think>\n\n</think>\n\n");
    ith_buf_deinit(&text);
    ith_encoded_deinit(&e);
    json_decref(m);
    ith_chat_close(chat);
}

/* Goal: any failing allocation gives one error, or is survived (base/json.c asks once more), and no
 * leak (under ASan). */
static void test_every_failing_allocation_is_reported(void **state)
{
    (void)state;
    json_t *m = json_pack("[o, o]", turn("user", NULL, "hello <|im_end|>", 0),
                          turn("assistant", "fox", "yes", 1));
    bool hit = true;
    int64_t n = 1;
    for (; hit && n < 20000; n += n < 300 ? 1 : 13) {
        ith_chat *chat = NULL;
        ith_encoded e = {0};
        ith_error_clear(&err);
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ith_status status = ith_chat_open(&chat, NULL, think_template, tokenizer, &err);
        if (status == ITH_OK)
            status = ith_chat_encode_turns(chat, m, NULL, &e, NULL, &err);
        hit = ith_fault_count(ITH_FAULT_ALLOC) >= n;
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        if (status != ITH_OK && strlen(err.text) == 0)
            fail_msg("allocation %lld: status %d without a text", (long long)n, (int)status);
        ith_encoded_deinit(&e);
        ith_chat_close(chat);
    }
    assert_true(n > 50 && n < 20000);
    json_decref(m);
}

/* ---- published templates --------------------------------------------------------------------- */

static ith_chat *shared_chat(const char *name)
{
    char file[200];
    snprintf(file, sizeof file, "data/chat_templates/%s.jinja", name);
    ith_buf text = {0};
    ith_chat *chat = NULL;
    assert_ok(ith_read_file(shared_path(file), 0, &text, &err), err);
    assert_ok(ith_chat_open(&chat, NULL, text.data, NULL, &err), err);
    ith_buf_deinit(&text);
    return chat;
}

typedef struct {
    const char *name, *messages;
    bool prompt;
    int thinking;
    const char *expected;
} published_case;

#define USER_HI "[{\"role\": \"user\", \"content\": \"Hi\"}]"
#define TWO_ROUNDS                                                                                 \
    "[{\"role\": \"user\", \"content\": \"u1\"}, {\"role\": \"assistant\", \"content\": "          \
    "\"<think>\\nr1\\n</think>\\n\\na1\"}, {\"role\": \"user\", \"content\": \"u2\"}, "            \
    "{\"role\": \"assistant\", \"content\": \"<think>\\nr2\\n</think>\\n\\na2\"}]"
#define SPACED                                                                                     \
    "[{\"role\": \"user\", \"content\": \"  u \\n\"}, {\"role\": \"assistant\", \"content\": "     \
    "\"\\n\\na \\n\"}]"
#define NULL_CALL                                                                                  \
    "[{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", \"content\": null, "     \
    "\"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": {}}}]}]"
#define TEXT_ARGS                                                                                  \
    "[{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", \"content\": \"ok\", "   \
    "\"tool_calls\": [{\"function\": {\"name\": \"get\", \"arguments\": \"{\\\"city\\\": "         \
    "\\\"Seoul\\\"}\"}}]}]"
#define HALF_THINK                                                                                 \
    "[{\"role\": \"user\", \"content\": \"u\"}, {\"role\": \"assistant\", \"content\": \"r\\n"     \
    "</think>\\n\\na\"}]"
#define U(TEXT) "<|im_start|>user\n" TEXT "<|im_end|>\n"
#define A "<|im_start|>assistant\n"
#define NO_THINK "<think>\n\n</think>\n\n"

/* Goal: what users of these templates reported as surprising comes out as the templates mean it. */
static void test_published_templates_render_reported_cases(void **state)
{
    static const published_case cases[] = {
        {"qwen3", USER_HI, true, -1, U("Hi") A},
        {"qwen3", USER_HI, true, 1, U("Hi") A},
        {"qwen3", USER_HI, true, 0, U("Hi") A NO_THINK},
        {"qwen3_5_think", USER_HI, true, -1, U("Hi") A "<think>\n"},
        {"qwen3_5_think", USER_HI, true, 0, U("Hi") A NO_THINK},
        {"qwen3_5_nothink", USER_HI, true, -1, U("Hi") A NO_THINK},
        {"qwen3_5_nothink", USER_HI, true, 1, U("Hi") A "<think>\n"},
        {"qwen3", TWO_ROUNDS, false, -1,
         U("u1") A "a1<|im_end|>\n" U("u2") A "<think>\nr2\n</think>\n\na2<|im_end|>\n"},
        {"qwen3_5_think", TWO_ROUNDS, false, -1,
         U("u1") A "a1<|im_end|>\n" U("u2") A "<think>\nr2\n</think>\n\na2<|im_end|>\n"},
        {"qwen3_training", TWO_ROUNDS, false, -1,
         U("u1") A "<think>\nr1\n</think>\n\na1<|im_end|>\n" U("u2") A
         "<think>\nr2\n</think>\n\na2<|im_end|>\n"},
        {"qwen3", SPACED, false, -1, U("  u \n") A NO_THINK "a \n<|im_end|>\n"},
        {"qwen3_5_think", SPACED, false, -1, U("u") A NO_THINK "a<|im_end|>\n"},
        {"qwen3_instruct_2507", SPACED, false, -1, U("  u \n") A "\n\na \n<|im_end|>\n"},
        {"qwen3", NULL_CALL, false, -1,
         U("u") A NO_THINK "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"
                           "<|im_end|>\n"},
        {"qwen3_5_think", NULL_CALL, false, -1,
         U("u") A NO_THINK "<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>\n"},
        {"qwen3_vl", NULL_CALL, false, -1,
         U("u") A "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>\n"},
        {"qwen3", TEXT_ARGS, false, -1,
         U("u") A NO_THINK "ok\n<tool_call>\n{\"name\": \"get\", \"arguments\": {\"city\": "
                           "\"Seoul\"}}\n</tool_call><|im_end|>\n"},
        {"qwen3_5_think", TEXT_ARGS, false, -1,
         U("u") A NO_THINK "ok\n\n<tool_call>\n<function=get>\n<parameter=city>\nSeoul\n"
                           "</parameter>\n</function>\n</tool_call><|im_end|>\n"},
        {"qwen3", HALF_THINK, false, -1, U("u") A "<think>\nr\n</think>\n\na<|im_end|>\n"},
        {"qwen3_5_think", HALF_THINK, false, -1, U("u") A "<think>\nr\n</think>\n\na<|im_end|>\n"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_chat *chat = shared_chat(cases[i].name);
        ith_chat_options o = {.add_generation_prompt = cases[i].prompt,
                              .enable_thinking = cases[i].thinking};
        assert_text(chat, cases[i].messages, NULL, &o, cases[i].expected);
        ith_chat_close(chat);
    }
}

/* Ids of two reported conversations, whole: an answer without reasoning gets the empty block in
 * one template and none in others; half a block in the answer becomes a whole one. */
static void test_published_templates_give_the_ids_of_reported_cases(void **state)
{
    static const struct {
        const char *name, *user, *answer;
        int32_t ids[48];
    } cases[] = {
        {"qwen3",
         "Hi",
         "Yo",
         {151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271, 64725,
          151645, 198}},
        {"qwen3_instruct_2507",
         "Hi",
         "Yo",
         {151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198, 64725, 151645, 198}},
        {"qwen3_vl",
         "Hi",
         "Yo",
         {151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198, 64725, 151645, 198}},
        {"qwen3",
         "What is 2+2?",
         "2+2 equals 4.\n</think>\n\nThe answer is 4.",
         {151644, 872,   198, 3838,   374, 220, 17, 10, 17,     30,  151645, 198,
          151644, 77091, 198, 151667, 198, 17,  10, 17, 16819,  220, 19,     624,
          151668, 271,   785, 4226,   374, 220, 19, 13, 151645, 198}},
    };
    (void)state;
    ith_tokenizer *real = NULL;
    assert_ok(ith_tokenizer_open(&real, shared_path("data/qwen3-tokenizer"), &err), err);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char file[200];
        ith_buf text = {0}, seen = {0};
        ith_chat *chat = NULL;
        ith_encoded e = {0};
        int64_t num = 0;
        snprintf(file, sizeof file, "data/chat_templates/%s.jinja", cases[i].name);
        assert_ok(ith_read_file(shared_path(file), 0, &text, &err), err);
        assert_ok(ith_chat_open(&chat, NULL, text.data, real, &err), err);
        json_t *m = json_pack("[o, o]", turn("user", NULL, cases[i].user, 0),
                              turn("assistant", NULL, cases[i].answer, 1));
        assert_ok(ith_chat_encode_sample(chat, m, NULL, &e, &err), err);
        while (num < 48 && cases[i].ids[num])
            num++;
        for (int64_t k = 0; k < e.ids.count; k++)
            ith_buf_printf(&seen, "%d ", e.ids.ids[k]);
        if (e.ids.count != num || memcmp(e.ids.ids, cases[i].ids, (size_t)num * 4) != 0)
            fail_msg("%s: %s", cases[i].name, seen.data);
        ith_encoded_deinit(&e);
        ith_buf_deinit(&text);
        ith_buf_deinit(&seen);
        json_decref(m);
        ith_chat_close(chat);
    }
    ith_tokenizer_close(real);
}

/* Goal: with each published template and the real vocabulary, the last turn of encode_turns is the
 * sample that the prompt/full difference gives. */
static void test_published_templates_label_the_same_both_ways(void **state)
{
    static const char *const names[] = {"qwen3",   "qwen3_5_think",       "qwen3_5_nothink",
                                        "qwen3_6", "qwen3_instruct_2507", "qwen3_vl"};
    (void)state;
    ith_tokenizer *real = NULL;
    assert_ok(ith_tokenizer_open(&real, shared_path("data/qwen3-tokenizer"), &err), err);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        for (int k = 0; k < 4; k++) {
            char file[200];
            snprintf(file, sizeof file, "data/chat_templates/%s.jinja", names[i]);
            ith_buf text = {0};
            ith_chat *chat = NULL;
            assert_ok(ith_read_file(shared_path(file), 0, &text, &err), err);
            assert_ok(ith_chat_open(&chat, NULL, text.data, real, &err), err);
            json_t *m = json_pack("[o, o, o, o]", turn("user", NULL, "Hi there", 0),
                                  turn("assistant", k & 1 ? "thought" : NULL, "Yo", 0),
                                  turn("user", NULL, "And?", 0),
                                  turn("assistant", k & 2 ? "more thought" : NULL, "Yes.", 1));
            ith_encoded one = {0}, all = {0};
            assert_ok(ith_chat_encode_sample(chat, m, NULL, &one, &err), err);
            assert_ok(ith_chat_encode_turns(chat, m, NULL, &all, NULL, &err), err);
            assert_int_equal(one.ids.count, all.ids.count);
            assert_memory_equal(one.ids.ids, all.ids.ids, (size_t)one.ids.count * 4);
            if (memcmp(one.labels, all.labels, (size_t)one.ids.count * 4) != 0)
                fail_msg("%s, case %d: labels differ", names[i], k);
            ith_encoded_deinit(&one);
            ith_encoded_deinit(&all);
            ith_buf_deinit(&text);
            json_decref(m);
            ith_chat_close(chat);
        }
    ith_tokenizer_close(real);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_finds_the_template_of_the_directory),
        cmocka_unit_test(test_fallback_refuses_what_it_has_no_form_for),
        cmocka_unit_test(test_render_accepts_null_content_and_text_arguments),
        cmocka_unit_test(test_render_thinking_switch_changes_the_generation_prompt),
        cmocka_unit_test(test_to_hf_gathers_blocks),
        cmocka_unit_test(test_to_hf_escapes_special_tokens),
        cmocka_unit_test(test_to_hf_names_the_wrong_block),
        cmocka_unit_test(test_encode_sample_trains_the_last_answer),
        cmocka_unit_test(test_encode_sample_token_across_the_joint_is_the_prompts),
        cmocka_unit_test(test_encode_sample_refuses_what_it_cannot_label),
        cmocka_unit_test(test_encode_turns_trains_every_weighted_answer),
        cmocka_unit_test(test_encode_turns_agrees_with_the_sample_of_the_last_turn),
        cmocka_unit_test(test_encode_turns_counts_reasoning_that_is_left_out),
        cmocka_unit_test(test_encode_turns_refuses_templates_it_cannot_place),
        cmocka_unit_test(test_encode_turns_steps_are_linear),
        cmocka_unit_test(test_encode_prompt_labels_nothing),
        cmocka_unit_test(test_every_failing_allocation_is_reported),
        cmocka_unit_test(test_published_templates_render_reported_cases),
        cmocka_unit_test(test_published_templates_give_the_ids_of_reported_cases),
        cmocka_unit_test(test_published_templates_label_the_same_both_ways),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
