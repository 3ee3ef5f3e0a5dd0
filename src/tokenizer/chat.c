/* chat.c - finding a model's chat template and rendering HF messages with it. */
#include "tokenizer/chat_internal.h"

#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

#define MAX_FILE_BYTES ((int64_t)64 << 20)

/* Where a model directory has none. What it has no form for is refused rather than dropped. */
static const char chatml[] =
    "{% for message in messages %}"
    "{% if message.tool_calls or message.role == 'tool' %}"
    "{{ raise_exception('plain ChatML has no form for tool calls; give a chat template') }}"
    "{% endif %}"
    "{% if message.reasoning_content %}"
    "{{ raise_exception('plain ChatML has no form for reasoning; give a chat template') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if tools %}"
    "{{ raise_exception('plain ChatML has no form for tools; give a chat template') }}"
    "{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

ith_status ith_json_put(json_t *object, const char *key, json_t *value, ith_error *err)
{
    if (!value || json_object_set_new(object, key, value) != 0)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: message field '%s'", key);
    return ITH_OK;
}

ith_status ith_json_push(json_t *array, json_t *value, ith_error *err)
{
    if (!value || json_array_append_new(array, value) != 0)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: a list of messages");
    return ITH_OK;
}

/* ---- open ------------------------------------------------------------------------------------ */

/* A template that asks "arguments is string" wants strings left alone; all others want mappings. */
static bool reads_text_args(const char *text, int64_t len)
{
    static const char question[] = "arguments is string";
    return memmem(text, (size_t)len, question, sizeof question - 1) != NULL;
}

static ith_status compile(ith_chat *chat, bool tool_use, const char *text, int64_t len,
                          const char *name, ith_sha256 *hash, ith_error *err)
{
    ITH_TRY(ith_jinja_compile(tool_use ? &chat->tool_use : &chat->plain, text, len, name, err));
    if (tool_use)
        chat->tool_use_reads_text_args = reads_text_args(text, len);
    else
        chat->plain_reads_text_args = reads_text_args(text, len);
    ith_sha256_update(hash, text, len);
    if (!chat->source && !(chat->source = ith_strndup(name, (int64_t)strlen(name))))
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", name);
    return ITH_OK;
}

/* "chat_template": text, or a list of named ones. */
static ith_status compile_json(ith_chat *chat, const json_t *value, const char *path,
                               ith_sha256 *hash, ith_error *err)
{
    if (json_is_string(value))
        return compile(chat, false, json_string_value(value), (int64_t)json_string_length(value),
                       path, hash, err);
    if (!json_is_array(value))
        return ith_fail(
            err, ITH_ERR_FORMAT,
            "%s: chat_template: %s found, a text or a list of {name, template} expected", path,
            ith_json_type_name(value));
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *row = json_array_get(value, i), *text = json_object_get(row, "template");
        const char *name = json_string_value(json_object_get(row, "name"));
        if (!name || !json_is_string(text))
            return ith_fail(err, ITH_ERR_FORMAT,
                            "%s: chat_template[%zu]: needs a text 'name' and a text 'template'",
                            path, i);
        bool is_default = strcmp(name, "default") == 0, is_tool_use = strcmp(name, "tool_use") == 0;
        if ((is_default && !chat->plain) || (is_tool_use && !chat->tool_use))
            ITH_TRY(compile(chat, is_tool_use, json_string_value(text),
                            (int64_t)json_string_length(text), path, hash, err));
    }
    if (!chat->plain)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: chat_template: no template named 'default'",
                        path);
    return ITH_OK;
}

/* A file of the directory; *found false when it is absent. */
static ith_status compile_file(ith_chat *chat, const char *dir, const char *file, bool is_json,
                               ith_sha256 *hash, ith_error *err)
{
    ith_buf path = {0}, text = {0};
    json_t *json = NULL;
    ith_status status = ITH_OK;
    ith_path_join(&path, dir, file);
    ITH_TRY_OUT(ith_buf_check(&path, "path", err));
    if (!ith_path_exists(path.data))
        goto out;
    ITH_TRY_OUT(ith_read_file(path.data, MAX_FILE_BYTES, &text, err));
    if (!is_json) {
        ITH_TRY_OUT(
            compile(chat, false, text.data ? text.data : "", text.len, path.data, hash, err));
        goto out;
    }
    ITH_TRY_OUT(ith_json_parse(&json, text.data, text.len, path.data, err));
    const json_t *value = json_object_get(json, "chat_template");
    if (value && !json_is_null(value))
        ITH_TRY_OUT(compile_json(chat, value, path.data, hash, err));
out:
    json_decref(json);
    ith_buf_deinit(&path);
    ith_buf_deinit(&text);
    return status;
}

static const char no_template[] = "ChatML (no template)";

/* Jinja text, or a file that holds it: no file name has braces or lines, no template is without. */
static ith_status compile_custom(ith_chat *chat, const char *custom, ith_sha256 *hash,
                                 ith_error *err)
{
    bool is_file = !strpbrk(custom, "{\n");
    ith_buf text = {0};
    ith_status status = ITH_OK;
    if (is_file && !ith_path_exists(custom))
        return ith_fail(err, ITH_ERR_USAGE,
                        "chat template: found %s, no such file (give a file, or Jinja text)",
                        custom);
    if (is_file)
        ITH_TRY_OUT(ith_read_file(custom, MAX_FILE_BYTES, &text, err));
    else
        ith_buf_puts(&text, custom);
    ITH_TRY_OUT(ith_buf_check(&text, "chat template", err));
    const char *data = text.data ? text.data : "";
    chat->custom = ith_strndup(data, text.len);
    status = chat->custom ? compile(chat, false, data, text.len,
                                    is_file ? custom : "custom_chat_template", hash, err)
                          : ith_fail(err, ITH_ERR_MEMORY, "out of memory for a chat template");
out:
    ith_buf_deinit(&text);
    return status;
}

static ith_status find_template(ith_chat *chat, const char *dir, const char *custom,
                                ith_sha256 *hash, ith_error *err)
{
    if (custom)
        return compile_custom(chat, custom, hash, err);
    if (dir)
        ITH_TRY(compile_file(chat, dir, "chat_template.jinja", false, hash, err));
    if (dir && !chat->plain)
        ITH_TRY(compile_file(chat, dir, "tokenizer_config.json", true, hash, err));
    if (dir && !chat->plain)
        ITH_TRY(compile_file(chat, dir, "chat_template.json", true, hash, err));
    if (!chat->plain)
        ITH_TRY(compile(chat, false, chatml, (int64_t)sizeof chatml - 1, no_template, hash, err));
    return ITH_OK;
}

/* bos_token and the like: templates print them. A token is a text or {"content": text}. */
static ith_status read_special_names(ith_chat *chat, const char *dir, ith_error *err)
{
    static const char *const names[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};
    ith_buf path = {0};
    json_t *json = NULL;
    ith_status status = ITH_OK;
    chat->special_names = json_object();
    if (!chat->special_names)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: chat template");
    if (!dir)
        return ITH_OK;
    ith_path_join(&path, dir, "tokenizer_config.json");
    ITH_TRY_OUT(ith_buf_check(&path, "path", err));
    if (!ith_path_exists(path.data))
        goto out;
    ITH_TRY_OUT(ith_json_load(&json, path.data, err));
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        json_t *value = json_object_get(json, names[i]);
        if (json_is_object(value))
            value = json_object_get(value, "content");
        if (json_is_string(value))
            ITH_TRY_OUT(ith_json_put(chat->special_names, names[i], json_incref(value), err));
    }
out:
    json_decref(json);
    ith_buf_deinit(&path);
    return status;
}

static int longer_first(const void *a, const void *b)
{
    const ith_special_text *x = a, *y = b;
    if (x->len != y->len)
        return x->len > y->len ? -1 : 1;
    return strcmp(x->text, y->text);
}

static ith_status collect_specials(ith_chat *chat, ith_error *err)
{
    int64_t n = chat->tok ? ith_tokenizer_num_added(chat->tok) : 0;
    void *mem = NULL;
    ITH_TRY(ith_alloc_zero(&mem, n, sizeof *chat->specials, "special tokens", err));
    chat->specials = mem;
    for (int64_t i = 0; i < n; i++) {
        const char *text;
        bool special;
        int64_t chars = 0;
        ith_tokenizer_added(chat->tok, i, &text, NULL, &special);
        for (const char *p = text; *p; p++)
            chars += ((unsigned char)*p & 0xc0) != 0x80;
        if (!special || chars < 2)
            continue;
        chat->specials[chat->num_specials++] = (ith_special_text){text, (int64_t)strlen(text)};
        chat->first_byte[(unsigned char)text[0]] = true;
    }
    if (chat->num_specials > 1)
        qsort(chat->specials, (size_t)chat->num_specials, sizeof *chat->specials, longer_first);
    return ITH_OK;
}

/* Templates with {% generation %} say themselves what is trained. */
static ith_status probe_templates(ith_chat *chat, ith_error *err)
{
    if (!ith_jinja_has_generation(chat->plain))
        ITH_TRY(ith_chat_probe_headers(chat, NULL, &chat->plain_headers, err));
    if (!chat->tool_use || ith_jinja_has_generation(chat->tool_use))
        return ITH_OK;
    json_t *tools = json_array();
    ith_status status = tools ? ith_chat_probe_headers(chat, tools, &chat->tool_use_headers, err)
                              : ith_fail(err, ITH_ERR_MEMORY, "out of memory: chat template");
    json_decref(tools);
    return status;
}

/* Whether an answer without reasoning comes with a think block; -1: no such answer can be made. */
static int writes_think_block(const ith_chat *chat)
{
    ith_error ignored = {0};
    ith_buf text = {0};
    json_t *m = json_pack("[{s:s,s:s},{s:s,s:s}]", "role", "user", "content", "Hi", "role",
                          "assistant", "content", "Yo");
    int result = -1;
    if (m && ith_chat_render(chat, m, NULL, NULL, &text, &ignored) == ITH_OK && text.data)
        result = strstr(text.data, "<think>") != NULL;
    json_decref(m);
    ith_buf_deinit(&text);
    return result;
}

/* A model that learned answers with a think block unlearns it from a template without one, and the
 * other way round. */
static void compare_thinking(const ith_chat *custom, const char *model_dir)
{
    ith_error ignored = {0};
    ith_chat *own = NULL;
    if (ith_chat_open(&own, model_dir, NULL, NULL, &ignored) != ITH_OK)
        return;
    int now = writes_think_block(custom), learned = writes_think_block(own);
    if (strcmp(own->source, no_template) != 0 && now >= 0 && learned >= 0 && now != learned)
        ith_log(ITH_LOG_WARN, "chat",
                "custom_chat_template writes %s before an answer without reasoning, the model's "
                "own (%s) %s",
                now ? "a <think> block" : "no <think> block", own->source,
                learned ? "writes one" : "does not");
    ith_chat_close(own);
}

ith_status ith_chat_open(ith_chat **out, const char *model_dir, const char *custom_template,
                         const ith_tokenizer *tok, ith_error *err)
{
    void *mem = NULL;
    ith_sha256 hash;
    ITH_TRY(ith_alloc_zero(&mem, 1, sizeof(ith_chat), "chat template", err));
    ith_chat *chat = mem;
    chat->tok = tok;
    ith_sha256_init(&hash);
    ith_status status = find_template(chat, model_dir, custom_template, &hash, err);
    if (status == ITH_OK)
        status = read_special_names(chat, model_dir, err);
    if (status == ITH_OK)
        status = collect_specials(chat, err);
    if (status == ITH_OK)
        status = probe_templates(chat, err);
    if (status != ITH_OK) {
        ith_chat_close(chat);
        return status;
    }
    if (custom_template && model_dir)
        compare_thinking(chat, model_dir);
    ith_sha256_hex(&hash, chat->hash);
    *out = chat;
    return ITH_OK;
}

void ith_chat_close(ith_chat *chat)
{
    if (!chat)
        return;
    for (int k = 0; k < ITH_NUM_HEADERS; k++) {
        ith_buf_deinit(&chat->plain_headers.text[k]);
        ith_buf_deinit(&chat->tool_use_headers.text[k]);
    }
    ith_jinja_free(chat->plain);
    ith_jinja_free(chat->tool_use);
    json_decref(chat->special_names);
    ith_free(chat->specials);
    ith_free(chat->source);
    ith_free(chat->custom);
    ith_free(chat);
}

const char *ith_chat_source(const ith_chat *chat)
{
    return chat->source;
}

const char *ith_chat_custom(const ith_chat *chat)
{
    return chat->custom;
}

const char *ith_chat_hash(const ith_chat *chat)
{
    return chat->hash;
}

/* ---- render ---------------------------------------------------------------------------------- */

/* Arguments given as JSON text become the mapping that most templates iterate over. */
static ith_status parse_arguments(json_t *call, size_t message, ith_error *err)
{
    json_t *function = json_object_get(call, "function");
    json_t *holder = json_is_object(function) ? function : call, *parsed = NULL;
    const json_t *text = json_object_get(holder, "arguments");
    if (!json_is_string(text))
        return ITH_OK;
    ITH_WRAP(ith_json_parse(&parsed, json_string_value(text), (int64_t)json_string_length(text),
                            "arguments", err),
             err, "messages[%zu].tool_calls", message);
    if (!json_is_object(parsed)) {
        const char *type = ith_json_type_name(parsed);
        json_decref(parsed);
        return ith_fail(err, ITH_ERR_FORMAT,
                        "messages[%zu].tool_calls: arguments: %s found, a JSON object expected",
                        message, type);
    }
    return ith_json_put(holder, "arguments", parsed, err);
}

static ith_status parse_tool_calls(json_t *message, size_t i, ith_error *err)
{
    const json_t *calls = json_object_get(message, "tool_calls");
    bool any = false;
    for (size_t k = 0; json_is_array(calls) && k < json_array_size(calls); k++) {
        const json_t *call = json_array_get(calls, k), *f = json_object_get(call, "function");
        any |= json_is_string(json_object_get(json_is_object(f) ? f : call, "arguments"));
    }
    if (!any)
        return ITH_OK;
    json_t *copy = json_deep_copy(calls); /* the caller's messages stay as they are */
    ith_status status = copy ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory: tool calls");
    for (size_t k = 0; status == ITH_OK && k < json_array_size(copy); k++)
        status = parse_arguments(json_array_get(copy, k), i, err);
    if (status != ITH_OK) {
        json_decref(copy);
        return status;
    }
    return ith_json_put(message, "tool_calls", copy, err);
}

/* Reasoning goes by three names in the field; templates read "reasoning_content", some "thinking".
 */
static ith_status alias_reasoning(json_t *message, ith_error *err)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    json_t *value = NULL;
    for (int i = 0; i < 3 && !value; i++)
        value = json_object_get(message, names[i]);
    if (!value)
        return ITH_OK;
    for (int i = 0; i < 2; i++)
        if (!json_object_get(message, names[i]))
            ITH_TRY(ith_json_put(message, names[i], json_incref(value), err));
    return ITH_OK;
}

static ith_status normalize_message(const json_t *message, size_t i, bool parse_args, json_t **out,
                                    ith_error *err)
{
    const char *key;
    json_t *member;
    if (!json_is_object(message) || !json_is_string(json_object_get(message, "role")))
        return ith_fail(err, ITH_ERR_FORMAT, "messages[%zu]: an object with a text 'role' expected",
                        i);
    json_t *copy = json_object();
    ith_status status = copy ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory: messages");
    json_object_foreach(ith_json_unconst(message), key, member)
    {
        if (status == ITH_OK && !json_is_null(member))
            status = ith_json_put(copy, key, json_incref(member), err);
    }
    if (status == ITH_OK && !json_object_get(copy, "content"))
        status = ith_json_put(copy, "content", json_string(""), err);
    if (status == ITH_OK)
        status = alias_reasoning(copy, err);
    if (status == ITH_OK && parse_args)
        status = parse_tool_calls(copy, i, err);
    if (status == ITH_OK)
        *out = copy;
    else
        json_decref(copy);
    return status;
}

static ith_status normalize(const json_t *messages, bool parse_args, json_t **out, ith_error *err)
{
    if (!json_is_array(messages))
        return ith_fail(err, ITH_ERR_FORMAT, "messages: %s found, an array expected",
                        ith_json_type_name(messages));
    json_t *list = json_array();
    ith_status status = list ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory: messages");
    for (size_t i = 0; status == ITH_OK && i < json_array_size(messages); i++) {
        json_t *message = NULL;
        status = normalize_message(json_array_get(messages, i), i, parse_args, &message, err);
        if (status == ITH_OK)
            status = ith_json_push(list, message, err);
    }
    if (status == ITH_OK)
        *out = list;
    else
        json_decref(list);
    return status;
}

static ith_status fill_context(const ith_chat *chat, json_t *context, const json_t *tools,
                               const ith_chat_options *o, ith_error *err)
{
    if (json_object_update(context, chat->special_names) != 0)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: template variables");
    json_t *given = tools ? json_incref(ith_json_unconst(tools)) : json_null();
    ITH_TRY(ith_json_put(context, "tools", given, err));
    ITH_TRY(ith_json_put(context, "documents", json_null(), err));
    ITH_TRY(ith_json_put(context, "add_generation_prompt", json_boolean(o->add_generation_prompt),
                         err));
    if (o->enable_thinking >= 0)
        ITH_TRY(ith_json_put(context, "enable_thinking", json_boolean(o->enable_thinking), err));
    if (o->extra && json_object_update(context, ith_json_unconst(o->extra)) != 0)
        return ith_fail(err, ITH_ERR_USAGE, "template variables: an object is needed, not %s",
                        ith_json_type_name(o->extra));
    return ITH_OK;
}

static bool has_lists(const json_t *messages)
{
    size_t i;
    const json_t *message;
    json_array_foreach(messages, i,
                       message) if (json_is_array(json_object_get(message, "content"))) return true;
    return false;
}

ith_status ith_chat_render(const ith_chat *chat, const json_t *messages, const json_t *tools,
                           const ith_chat_options *options, ith_buf *out, ith_error *err)
{
    static const ith_chat_options defaults = {.enable_thinking = -1};
    const ith_chat_options *o = options ? options : &defaults;
    if (json_is_null(tools))
        tools = NULL;
    bool with_tools = tools && chat->tool_use;
    bool parse_args = !(with_tools ? chat->tool_use_reads_text_args : chat->plain_reads_text_args);
    json_t *list = NULL, *context = json_object();
    ith_status status = ITH_OK;
    if (!context)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: template variables");
    ITH_TRY_OUT(normalize(messages, parse_args, &list, err));
    ITH_TRY_OUT(fill_context(chat, context, tools, o, err));
    status = ith_json_put(context, "messages", list, err);
    list = NULL;
    if (status == ITH_OK) {
        ith_jinja_options jinja = {.track = "messages", .trace = o->trace, .steps = o->steps};
        status =
            ith_jinja_render(with_tools ? chat->tool_use : chat->plain, context, &jinja, out, err);
    }
    if (status != ITH_OK && has_lists(messages))
        ith_wrap(err, status, "content lists (images, videos) may not be known to the template");
out:
    json_decref(list);
    json_decref(context);
    return status;
}
