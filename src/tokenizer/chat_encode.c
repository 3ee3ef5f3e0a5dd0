/* chat_encode.c - canonical conversations to HF form, and to token ids with labels.
 *
 * Invariants:
 * 1. Which text is trained is decided by where the renderer printed it, never by searching for it.
 * 2. A token is trained when it begins inside a trained span; a token that begins before the span
 *    holds prompt text and is not. */
#include "tokenizer/chat_internal.h"

#include <string.h>

#define MIN_WEIGHT 1e-6

/* ---- canonical to HF ------------------------------------------------------------------------- */

typedef enum { BLOCK_TEXT, BLOCK_REASONING, BLOCK_TOOL_CALL, BLOCK_MEDIA } block_type;

static const struct {
    const char *canonical;
    block_type type;
    const char *hf; /* media */
} block_types[] = {
    {"text", BLOCK_TEXT, NULL},           {"reasoning", BLOCK_REASONING, NULL},
    {"tool_call", BLOCK_TOOL_CALL, NULL}, {"image_url", BLOCK_MEDIA, "image"},
    {"video_url", BLOCK_MEDIA, "video"},  {"audio_url", BLOCK_MEDIA, "audio"},
};
#define NUM_BLOCK_TYPES ((int)(sizeof block_types / sizeof block_types[0]))

/* One message on its way; parts is made when a media block asks for a content list. */
typedef struct {
    const ith_chat *chat;
    size_t index;
    ith_buf text, reasoning;
    bool has_reasoning;
    json_t *calls, *parts;
} converter;

static ith_status flush_text(converter *c, int64_t *from, ith_error *err)
{
    if (c->text.len == *from)
        return ITH_OK;
    json_t *part = json_pack("{s:s, s:s%}", "type", "text", "text", c->text.data + *from,
                             (size_t)(c->text.len - *from));
    *from = c->text.len;
    return ith_json_push(c->parts, part, err);
}

/* Text arguments are escaped as a mapping when they hold one: JSON escapes could hide a token. */
static ith_status escape_arguments(const ith_chat *chat, const json_t *args, json_t **out,
                                   ith_error *err)
{
    json_t *parsed = NULL, *escaped = NULL;
    ith_error ignored = {0};
    if (!json_is_string(args) ||
        ith_json_parse(&parsed, json_string_value(args), (int64_t)json_string_length(args),
                       "arguments", &ignored) != ITH_OK)
        return ith_chat_escape_json(chat, args, out, err);
    ith_status status = ith_chat_escape_json(chat, parsed, &escaped, err);
    if (status == ITH_OK && json_equal(parsed, escaped)) {
        *out = json_incref(ith_json_unconst(args));
    } else if (status == ITH_OK) {
        ith_buf text = {0};
        status = ith_json_dump(escaped, true, &text, err);
        if (status == ITH_OK && !(*out = json_stringn(text.data, (size_t)text.len)))
            status = ith_fail(err, ITH_ERR_MEMORY, "out of memory: tool call");
        ith_buf_deinit(&text);
    }
    json_decref(parsed);
    json_decref(escaped);
    return status;
}

static ith_status add_tool_call(converter *c, const json_t *value, ith_error *err)
{
    json_t *call = NULL, *name = NULL, *args = NULL, *entry = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_json_parse(&call, json_string_value(value), (int64_t)json_string_length(value),
                           "tool_call", err));
    const json_t *call_name = json_object_get(call, "name");
    const json_t *call_args = json_object_get(call, "arguments");
    if (!json_is_string(call_name) || !call_args) {
        status = ith_fail(err, ITH_ERR_FORMAT,
                          "tool_call: a JSON object with 'name' and 'arguments' expected");
        goto out;
    }
    ITH_TRY_OUT(ith_chat_escape_json(c->chat, call_name, &name, err));
    ITH_TRY_OUT(escape_arguments(c->chat, call_args, &args, err));
    if (!c->calls && !(c->calls = json_array())) {
        status = ith_fail(err, ITH_ERR_MEMORY, "out of memory: tool calls");
        goto out;
    }
    entry = json_pack("{s:s, s:{s:O, s:O}}", "type", "function", "function", "name", name,
                      "arguments", args);
    status = ith_json_push(c->calls, entry, err);
out:
    json_decref(call);
    json_decref(name);
    json_decref(args);
    return status;
}

static ith_status add_block(converter *c, const json_t *block, int64_t *text_from, ith_error *err)
{
    const char *type = json_string_value(json_object_get(block, "type"));
    const json_t *value = json_object_get(block, "value");
    int k = 0;
    while (type && k < NUM_BLOCK_TYPES && strcmp(block_types[k].canonical, type) != 0)
        k++;
    if (!type || k == NUM_BLOCK_TYPES)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "type '%.60s': text, reasoning, tool_call, image_url, video_url or "
                        "audio_url expected",
                        type ? type : "");
    if (!json_is_string(value))
        return ith_fail(err, ITH_ERR_FORMAT, "value: %s found, a text expected",
                        ith_json_type_name(value));
    const char *text = json_string_value(value);
    int64_t len = (int64_t)json_string_length(value);
    switch (block_types[k].type) {
    case BLOCK_TEXT:
        return ith_chat_escape(c->chat, text, len, &c->text, err);
    case BLOCK_REASONING:
        c->has_reasoning = true;
        return ith_chat_escape(c->chat, text, len, &c->reasoning, err);
    case BLOCK_TOOL_CALL:
        return add_tool_call(c, value, err);
    default:
        break;
    }
    if (!c->parts && !(c->parts = json_array()))
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: content");
    ITH_TRY(flush_text(c, text_from, err));
    return ith_json_push(c->parts,
                         json_pack("{s:s, s:O}", "type", block_types[k].hf, block_types[k].hf,
                                   ith_json_unconst(value)),
                         err);
}

static ith_status add_blocks(converter *c, const json_t *content, ith_error *err)
{
    int64_t text_from = 0;
    if (json_is_string(content))
        return ith_chat_escape(c->chat, json_string_value(content),
                               (int64_t)json_string_length(content), &c->text, err);
    if (!json_is_array(content))
        return ith_fail(err, ITH_ERR_FORMAT, "content: %s found, a list of {type, value} expected",
                        ith_json_type_name(content));
    for (size_t i = 0; i < json_array_size(content); i++)
        ITH_WRAP(add_block(c, json_array_get(content, i), &text_from, err), err, "content[%zu]", i);
    return c->parts ? flush_text(c, &text_from, err) : ITH_OK;
}

static ith_status finish_message(converter *c, const char *role, json_t *out, ith_error *err)
{
    ITH_TRY(ith_json_put(out, "role", json_string(role), err));
    json_t *content = c->parts ? json_incref(c->parts)
                               : json_stringn(c->text.len ? c->text.data : "", (size_t)c->text.len);
    ITH_TRY(ith_json_put(out, "content", content, err));
    if (c->has_reasoning)
        ITH_TRY(ith_json_put(
            out, "reasoning_content",
            json_stringn(c->reasoning.len ? c->reasoning.data : "", (size_t)c->reasoning.len),
            err));
    return c->calls ? ith_json_put(out, "tool_calls", json_incref(c->calls), err) : ITH_OK;
}

static ith_status convert_message(const ith_chat *chat, const json_t *message, json_t *list,
                                  ith_error *err)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    const char *role = json_string_value(json_object_get(message, "role"));
    int r = 0;
    while (role && r < 4 && strcmp(roles[r], role) != 0)
        r++;
    if (!role || r == 4)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "role '%.60s': system, user, assistant or tool expected", role ? role : "");
    converter c = {.chat = chat};
    json_t *out = json_object();
    ith_status status = out ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory: messages");
    if (status == ITH_OK)
        status = add_blocks(&c, json_object_get(message, "content"), err);
    if (status == ITH_OK)
        status = finish_message(&c, role, out, err);
    if (status == ITH_OK)
        status = ith_json_push(list, json_incref(out), err);
    json_decref(out);
    json_decref(c.calls);
    json_decref(c.parts);
    ith_buf_deinit(&c.text);
    ith_buf_deinit(&c.reasoning);
    return status;
}

static ith_status convert_tools(const ith_chat *chat, const json_t *tools, json_t **out,
                                ith_error *err)
{
    json_t *parsed = NULL, *escaped = NULL;
    *out = NULL;
    if (!tools || json_is_null(tools))
        return ITH_OK;
    if (json_is_string(tools)) {
        if (json_string_length(tools) == 0)
            return ITH_OK;
        ITH_TRY(ith_json_parse(&parsed, json_string_value(tools),
                               (int64_t)json_string_length(tools), "tools", err));
    } else {
        parsed = json_incref(ith_json_unconst(tools));
    }
    ith_status status = ith_chat_escape_json(chat, parsed, &escaped, err);
    json_decref(parsed);
    if (status == ITH_OK && !json_is_array(escaped)) {
        json_t *list = json_array();
        status = ith_json_push(list, escaped, err);
        escaped = list;
    }
    if (status == ITH_OK)
        *out = escaped;
    else
        json_decref(escaped);
    return status;
}

ith_status ith_chat_to_hf(const ith_chat *chat, const json_t *messages, const json_t *tools,
                          json_t **out_messages, json_t **out_tools, ith_error *err)
{
    json_t *list = NULL, *hf_tools = NULL;
    ith_status status = ITH_OK;
    if (!json_is_array(messages))
        return ith_fail(err, ITH_ERR_FORMAT, "messages: %s found, an array expected",
                        ith_json_type_name(messages));
    ITH_TRY(convert_tools(chat, tools, &hf_tools, err));
    list = json_array();
    if (!list)
        status = ith_fail(err, ITH_ERR_MEMORY, "out of memory: messages");
    for (size_t i = 0; status == ITH_OK && i < json_array_size(messages); i++) {
        status = convert_message(chat, json_array_get(messages, i), list, err);
        if (status != ITH_OK)
            ith_wrap(err, status, "messages[%zu]", i);
    }
    if (status != ITH_OK) {
        json_decref(list);
        json_decref(hf_tools);
        return status;
    }
    *out_messages = list;
    *out_tools = hf_tools;
    return ITH_OK;
}

/* ---- samples --------------------------------------------------------------------------------- */

void ith_encoded_deinit(ith_encoded *encoded)
{
    ith_ids_free(&encoded->ids);
    ith_free(encoded->labels);
    ith_free(encoded->weights);
    memset(encoded, 0, sizeof *encoded);
}

static bool is_assistant(const json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    return role && strcmp(role, "assistant") == 0;
}

static double loss_weight(const json_t *message)
{
    const json_t *weight = json_object_get(message, "loss_weight");
    return json_is_number(weight) ? json_number_value(weight) : 1.0;
}

static bool is_trained(const json_t *message)
{
    return is_assistant(message) && loss_weight(message) > MIN_WEIGHT;
}

/* Labels and weights for the ids, none trained yet. */
static ith_status alloc_labels(ith_encoded *e, ith_error *err)
{
    void *labels = NULL, *weights = NULL;
    ITH_TRY(ith_alloc(&labels, e->ids.count * (int64_t)sizeof *e->labels, "labels", err));
    e->labels = labels;
    ITH_TRY(ith_alloc_zero(&weights, e->ids.count, sizeof *e->weights, "loss weights", err));
    e->weights = weights;
    for (int64_t i = 0; i < e->ids.count; i++)
        e->labels[i] = ITH_LABEL_IGNORE;
    return ITH_OK;
}

static void train_token(ith_encoded *e, int64_t i, double weight)
{
    if (weight > MIN_WEIGHT) {
        e->labels[i] = e->ids.ids[i];
        e->weights[i] = (float)weight;
    }
}

/* A conversation in HF form with what stays the same for all its renders. */
typedef struct {
    const json_t *canonical;
    json_t *messages, *tools;
    int enable_thinking;
} conversation;

/* Reasoning stands in a field of its own, or in the text before </think>. */
static bool has_reasoning(const json_t *message)
{
    const json_t *content = json_object_get(message, "content");
    const char *text = json_string_value(content);
    if (json_object_get(message, "reasoning_content") || (text && strstr(text, "</think>")))
        return true;
    for (size_t i = 0; i < json_array_size(content); i++) {
        text = json_string_value(json_object_get(json_array_get(content, i), "text"));
        if (text && strstr(text, "</think>"))
            return true;
    }
    return false;
}

static ith_status open_conversation(conversation *c, const ith_chat *chat, const json_t *messages,
                                    const json_t *tools, ith_error *err)
{
    ITH_ASSERT(chat->tok);
    *c = (conversation){.canonical = messages, .enable_thinking = -1};
    ITH_TRY(ith_chat_to_hf(chat, messages, tools, &c->messages, &c->tools, err));
    const json_t *last = json_array_get(c->messages, json_array_size(c->messages) - 1);
    if (is_assistant(last))
        c->enable_thinking = has_reasoning(last);
    return ITH_OK;
}

static void close_conversation(conversation *c)
{
    json_decref(c->messages);
    json_decref(c->tools);
}

/* The text of all messages, with what stands for their media. */
static ith_status render_whole(const ith_chat *chat, const conversation *c,
                               const ith_chat_options *o, ith_buf *out, ith_error *err)
{
    ITH_TRY(ith_chat_render(chat, c->messages, c->tools, o, out, err));
    return ith_chat_expand_media(c->canonical, true, out, NULL, 0, err);
}

static ith_status render_prompt(const ith_chat *chat, const conversation *c, ith_buf *out,
                                ith_error *err)
{
    json_t *prefix = json_copy(c->messages); /* shallow */
    if (!prefix)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: messages");
    json_array_remove(prefix, json_array_size(prefix) - 1);
    ith_chat_options o = {.add_generation_prompt = true, .enable_thinking = c->enable_thinking};
    ith_status status = ith_chat_render(chat, prefix, c->tools, &o, out, err);
    json_decref(prefix);
    return status == ITH_OK ? ith_chat_expand_media(c->canonical, false, out, NULL, 0, err)
                            : status;
}

/* First index where the prompt is not a prefix of the whole, or -1. */
static int64_t first_difference(const ith_ids *prompt, const ith_ids *full)
{
    for (int64_t i = 0; i < prompt->count; i++)
        if (i >= full->count || prompt->ids[i] != full->ids[i])
            return i;
    return -1;
}

/* Where prompt and answer meet their texts may merge into one token (a line feed
 * that ends the header with one that begins the answer): a token belongs to the part in which it
 * begins. Gives the number of the prompt's tokens, or -1 when its text is no prefix. */
static ith_status tokens_of_prompt(const ith_chat *chat, const ith_buf *prompt, const ith_buf *full,
                                   int64_t *out, ith_error *err)
{
    *out = -1;
    if (prompt->len > full->len || memcmp(prompt->data, full->data, (size_t)prompt->len) != 0)
        return ITH_OK;
    ith_ids ids = {0}, begins = {0};
    ith_status status =
        ith_tokenizer_encode_offsets(chat->tok, full->data, full->len, &ids, &begins, NULL, err);
    int64_t n = 0;
    while (n < begins.count && begins.ids[n] < prompt->len)
        n++;
    ith_ids_free(&ids);
    ith_ids_free(&begins);
    if (status == ITH_OK)
        *out = n;
    return status;
}

/* Whether a message has reasoning of which `text`, what was printed for it, shows nothing. */
static bool drops_reasoning(const json_t *message, const char *text, int64_t len)
{
    const char *reasoning = json_string_value(json_object_get(message, "reasoning_content"));
    if (!reasoning)
        return false;
    while (*reasoning == '\n' || *reasoning == ' ')
        reasoning++;
    size_t n = strlen(reasoning);
    while (n > 0 && (reasoning[n - 1] == '\n' || reasoning[n - 1] == ' '))
        n--;
    return n > 0 && !memmem(text, (size_t)len, reasoning, n);
}

ith_status ith_chat_encode_sample(const ith_chat *chat, const json_t *messages, const json_t *tools,
                                  ith_encoded *out, ith_error *err)
{
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    if (!is_assistant(last))
        return ith_fail(err, ITH_ERR_FORMAT, "messages: the last one must be the assistant's");
    conversation c;
    ith_buf full = {0}, prompt = {0};
    ith_ids prompt_ids = {0};
    ith_encoded e = {0};
    ITH_TRY(open_conversation(&c, chat, messages, tools, err));
    ith_status status = ITH_OK;
    ith_chat_options o = {.enable_thinking = c.enable_thinking};
    ITH_TRY_OUT(render_whole(chat, &c, &o, &full, err));
    ITH_TRY_OUT(render_prompt(chat, &c, &prompt, err));
    ITH_TRY_OUT(ith_tokenizer_encode(chat->tok, full.data, full.len, &e.ids, err));
    ITH_TRY_OUT(ith_tokenizer_encode(chat->tok, prompt.data, prompt.len, &prompt_ids, err));
    int64_t at = first_difference(&prompt_ids, &e.ids), first = prompt_ids.count;
    if (at >= 0)
        ITH_TRY_OUT(tokens_of_prompt(chat, &prompt, &full, &first, err));
    if (first < 0) {
        status = ith_fail(
            err, ITH_ERR_FORMAT,
            "%s: the prompt (%lld tokens) is not a prefix of the whole (%lld tokens): "
            "they part at token %lld",
            chat->source, (long long)prompt_ids.count, (long long)e.ids.count, (long long)at);
        goto out;
    }
    int64_t begin = prompt.len < full.len ? prompt.len : full.len;
    e.num_dropped_reasoning =
        drops_reasoning(json_array_get(c.messages, json_array_size(c.messages) - 1),
                        full.data + begin, full.len - begin);
    ITH_TRY_OUT(alloc_labels(&e, err));
    for (int64_t i = first; i < e.ids.count; i++)
        train_token(&e, i, loss_weight(last));
    *out = e;
    memset(&e, 0, sizeof e);
out:
    ith_encoded_deinit(&e);
    ith_ids_free(&prompt_ids);
    ith_buf_deinit(&full);
    ith_buf_deinit(&prompt);
    close_conversation(&c);
    return status;
}

ith_status ith_chat_encode_prompt(const ith_chat *chat, const json_t *messages, const json_t *tools,
                                  int enable_thinking, ith_encoded *out, ith_error *err)
{
    conversation c;
    ith_buf text = {0};
    ith_encoded e = {0};
    ith_chat_options o = {.add_generation_prompt = true, .enable_thinking = enable_thinking};
    ITH_TRY(open_conversation(&c, chat, messages, tools, err));
    ith_status status = render_whole(chat, &c, &o, &text, err);
    if (status == ITH_OK)
        status = ith_tokenizer_encode(chat->tok, text.data, text.len, &e.ids, err);
    if (status == ITH_OK)
        status = alloc_labels(&e, err);
    if (status == ITH_OK)
        *out = e;
    else
        ith_encoded_deinit(&e);
    ith_buf_deinit(&text);
    close_conversation(&c);
    return status;
}

/* ---- all turns at once ----------------------------------------------------------------------- */

static const char probe_answer[] = "ithaca-probe-answer";

/* Renders for a probe: a template that refuses it gives an empty text; only memory can fail. */
static ith_status probe_render(const ith_chat *chat, const json_t *messages, const json_t *tools,
                               const ith_chat_options *o, ith_buf *out, ith_error *err)
{
    ith_error refused = {0};
    ith_status status = ith_chat_render(chat, messages, tools, o, out, &refused);
    return status == ITH_ERR_MEMORY ? ith_fail(err, status, "%s", refused.text) : ITH_OK;
}

/* The generation prompt: what add_generation_prompt adds at the end. */
static ith_status probe_generation_prompt(const ith_chat *chat, const json_t *question,
                                          const json_t *tools, int enable_thinking, ith_buf *out,
                                          ith_error *err)
{
    ith_buf without = {0}, with = {0};
    ith_chat_options o = {.enable_thinking = enable_thinking};
    ith_status status = probe_render(chat, question, tools, &o, &without, err);
    o.add_generation_prompt = true;
    if (status == ITH_OK)
        status = probe_render(chat, question, tools, &o, &with, err);
    if (status == ITH_OK && with.len > without.len && without.len > 0 &&
        memcmp(with.data, without.data, (size_t)without.len) == 0)
        ith_buf_append(out, with.data + without.len, with.len - without.len);
    ith_buf_deinit(&without);
    ith_buf_deinit(&with);
    return status == ITH_OK ? ith_buf_check(out, "generation prompt", err) : status;
}

/* What stands before an earlier answer, where templates leave reasoning out. */
static ith_status probe_earlier_answer(const ith_chat *chat, const json_t *tools, ith_buf *out,
                                       ith_error *err)
{
    json_t *messages =
        json_pack("[{s:s, s:s}, {s:s, s:s}, {s:s, s:s}]", "role", "user", "content", "q", "role",
                  "assistant", "content", probe_answer, "role", "user", "content", "q");
    ith_buf text = {0};
    ith_jinja_trace trace = {0};
    ith_chat_options o = {.enable_thinking = -1, .trace = &trace};
    ith_status status = messages ? probe_render(chat, messages, tools, &o, &text, err)
                                 : ith_fail(err, ITH_ERR_MEMORY, "out of memory: messages");
    for (int64_t i = 0; status == ITH_OK && text.len > 0 && i < trace.num_items; i++) {
        const ith_jinja_span *s = &trace.items[i];
        const char *at = s->message != 1 ? NULL
                                         : memmem(text.data + s->begin, (size_t)(s->end - s->begin),
                                                  probe_answer, sizeof probe_answer - 1);
        if (at && out->len == 0)
            ith_buf_append(out, text.data + s->begin, at - text.data - s->begin);
    }
    json_decref(messages);
    ith_buf_deinit(&text);
    ith_jinja_trace_deinit(&trace);
    return status == ITH_OK ? ith_buf_check(out, "turn header", err) : status;
}

ith_status ith_chat_probe_headers(const ith_chat *chat, const json_t *tools, ith_headers *h,
                                  ith_error *err)
{
    json_t *question = json_pack("[{s:s, s:s}]", "role", "user", "content", "q");
    if (!question)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: messages");
    ith_status status = ITH_OK;
    for (int k = ITH_HEADER_THINK_OFF; status == ITH_OK && k <= ITH_HEADER_UNSET; k++)
        status = probe_generation_prompt(chat, question, tools, k == ITH_HEADER_UNSET ? -1 : k,
                                         &h->text[k], err);
    json_decref(question);
    if (status != ITH_OK)
        return status;
    return probe_earlier_answer(chat, tools, &h->text[ITH_HEADER_EARLIER], err);
}

/* Bytes of the header that this turn's text begins with, or -1. */
static int64_t match_header(const ith_headers *h, bool has_reasoning, const char *text, int64_t len)
{
    const int order[] = {has_reasoning ? ITH_HEADER_THINK_ON : ITH_HEADER_THINK_OFF,
                         ITH_HEADER_UNSET, ITH_HEADER_EARLIER};
    for (int i = 0; i < 3; i++) {
        const ith_buf *b = &h->text[order[i]];
        if (b->len > 0 && b->len <= len && memcmp(text, b->data, (size_t)b->len) == 0)
            return b->len;
    }
    return -1;
}

/* Trained spans by message, in output order. */
typedef struct {
    ith_jinja_span *spans;
    int64_t count, cap;
} span_list;

static ith_status add_span(span_list *list, ith_jinja_span span, ith_error *err)
{
    void *mem = list->spans;
    ITH_TRY(ith_grow(&mem, &list->cap, list->count + 1, sizeof span, "trained spans", err));
    list->spans = mem;
    list->spans[list->count++] = span;
    return ITH_OK;
}

/* Spans of the {% generation %} blocks. One outside a loop over messages belongs to the next
 * assistant message. */
static ith_status spans_from_blocks(const ith_jinja_trace *trace, const json_t *messages,
                                    span_list *out, ith_error *err)
{
    int64_t n = (int64_t)json_array_size(messages), next = 0;
    for (int64_t i = 0; i < trace->num_generation; i++) {
        ith_jinja_span s = trace->generation[i];
        while (s.message < 0 && next < n && !is_assistant(json_array_get(messages, (size_t)next)))
            next++;
        if (s.message < 0)
            s.message = next;
        if (s.message >= n)
            return ith_fail(err, ITH_ERR_FORMAT,
                            "more {%% generation %%} blocks than assistant messages");
        next = s.message + 1;
        if (is_trained(json_array_get(messages, (size_t)s.message)))
            ITH_TRY(add_span(out, s, err));
    }
    return ITH_OK;
}

static ith_status spans_from_passes(const ith_headers *h, const ith_jinja_trace *trace,
                                    const json_t *messages, const ith_buf *text, const json_t *hf,
                                    span_list *out, ith_error *err)
{
    for (int64_t i = 0; i < trace->num_items; i++) {
        ith_jinja_span s = trace->items[i];
        if (!is_trained(json_array_get(messages, (size_t)s.message)))
            continue;
        const json_t *message = json_array_get(hf, (size_t)s.message);
        bool has_reasoning = json_object_get(message, "reasoning_content") != NULL;
        int64_t skip = match_header(h, has_reasoning, text->data + s.begin, s.end - s.begin);
        if (skip < 0)
            return ith_fail(err, ITH_ERR_FORMAT,
                            "messages[%lld]: its text does not begin with the generation prompt, "
                            "so where the answer begins is not known",
                            (long long)s.message);
        s.begin += skip;
        ITH_TRY(add_span(out, s, err));
    }
    return ITH_OK;
}

/* Every weighted assistant message has a span, exactly one, and spans do not run backwards. */
static ith_status check_spans(const json_t *canonical, const span_list *list,
                              ith_turns_report *report, ith_error *err)
{
    int64_t n = (int64_t)json_array_size(canonical), k = 0;
    for (int64_t i = 1; i < list->count; i++)
        if (list->spans[i].begin < list->spans[i - 1].end ||
            list->spans[i].message < list->spans[i - 1].message)
            return ith_fail(err, ITH_ERR_FORMAT,
                            "the template prints messages out of their order (messages[%lld])",
                            (long long)list->spans[i].message);
    for (int64_t m = 0; m < n; m++) {
        const json_t *message = json_array_get(canonical, (size_t)m);
        while (k < list->count && list->spans[k].message < m)
            k++;
        if (!is_trained(message))
            continue;
        if (k == list->count || list->spans[k].message != m)
            return ith_fail(err, ITH_ERR_FORMAT,
                            "messages[%lld]: the template's loop over messages does not print it, "
                            "so what to train is not known",
                            (long long)m);
        report->num_turns++;
    }
    return ITH_OK;
}

/* Tokens and spans both run forward: one walk. */
static void label_spans(ith_encoded *e, const ith_ids *begins, const json_t *canonical,
                        const span_list *list)
{
    int64_t k = 0;
    for (int64_t i = 0; i < e->ids.count; i++) {
        while (k < list->count && list->spans[k].end <= begins->ids[i])
            k++;
        if (k < list->count && list->spans[k].begin <= begins->ids[i])
            train_token(e, i,
                        loss_weight(json_array_get(canonical, (size_t)list->spans[k].message)));
    }
}

/* Renders, finds the spans and encodes; all it made is the caller's to free. */
typedef struct {
    conversation c;
    ith_buf text;
    ith_jinja_trace trace;
    span_list list;
    ith_ids begins;
    ith_encoded e;
} turns_work;

static ith_status encode_turns(turns_work *w, const ith_chat *chat, const json_t *messages,
                               ith_turns_report *report, ith_error *err)
{
    ith_chat_options o = {
        .enable_thinking = w->c.enable_thinking, .trace = &w->trace, .steps = &report->steps};
    ITH_TRY(ith_chat_render(chat, w->c.messages, w->c.tools, &o, &w->text, err));
    const ith_jinja *used = w->c.tools && chat->tool_use ? chat->tool_use : chat->plain;
    const ith_headers *h = used == chat->plain ? &chat->plain_headers : &chat->tool_use_headers;
    ITH_WRAP(ith_jinja_has_generation(used) ? spans_from_blocks(&w->trace, messages, &w->list, err)
                                            : spans_from_passes(h, &w->trace, messages, &w->text,
                                                                w->c.messages, &w->list, err),
             err, "%s", chat->source);
    ITH_WRAP(check_spans(messages, &w->list, report, err), err, "%s", chat->source);
    for (int64_t i = 0; i < w->list.count; i++) {
        const ith_jinja_span *span = &w->list.spans[i];
        w->e.num_dropped_reasoning +=
            drops_reasoning(json_array_get(w->c.messages, (size_t)span->message),
                            w->text.data + span->begin, span->end - span->begin);
    }
    ITH_TRY(ith_chat_expand_media(messages, true, &w->text, w->list.spans, w->list.count, err));
    ITH_TRY(ith_tokenizer_encode_offsets(chat->tok, w->text.data, w->text.len, &w->e.ids,
                                         &w->begins, NULL, err));
    ITH_TRY(alloc_labels(&w->e, err));
    label_spans(&w->e, &w->begins, messages, &w->list);
    return ITH_OK;
}

ith_status ith_chat_encode_turns(const ith_chat *chat, const json_t *messages, const json_t *tools,
                                 ith_encoded *out, ith_turns_report *report, ith_error *err)
{
    turns_work w = {0};
    ith_turns_report seen = {0};
    ITH_TRY(open_conversation(&w.c, chat, messages, tools, err));
    ith_status status = encode_turns(&w, chat, messages, &seen, err);
    if (status == ITH_OK) {
        *out = w.e;
        if (report)
            *report = seen;
    } else {
        ith_encoded_deinit(&w.e);
    }
    close_conversation(&w.c);
    ith_buf_deinit(&w.text);
    ith_jinja_trace_deinit(&w.trace);
    ith_free(w.list.spans);
    ith_ids_free(&w.begins);
    return status;
}
