/* convert_formats.c - alpaca, sharegpt and pair rows. Rules: LlamaFactory v1's converters. */
#include "data/convert_internal.h"

#include <stdio.h>
#include <string.h>

/* instruction + separator + input; the separator only between two texts that are there. */
static ith_status join_prompt(conversion *c, json_t *instruction, json_t *input, json_t **out)
{
    ith_buf text = {0};
    if (instruction)
        ith_buf_append(&text, json_string_value(instruction),
                       (int64_t)json_string_length(instruction));
    if (input && json_string_length(input) > 0) {
        if (text.len > 0 && c->options->separator)
            ith_buf_puts(&text, c->options->separator);
        ith_buf_append(&text, json_string_value(input), (int64_t)json_string_length(input));
    }
    *out = text.failed ? NULL : json_stringn_nocheck(text.data ? text.data : "", (size_t)text.len);
    ith_buf_deinit(&text);
    return *out ? ITH_OK : conv_memory(c);
}

ith_status conv_alpaca(conversion *c)
{
    static const char *const fields[] = {"system", "instruction", "input", "output"};
    json_t *value[4];
    for (int i = 0; i < 4; i++) {
        value[i] = conv_get(c->row, fields[i]);
        if (value[i])
            ITH_TRY(conv_want_text(c, value[i], fields[i]));
    }
    c->out->messages = json_array();
    if (!c->out->messages)
        return conv_memory(c);
    json_t *content = NULL;
    if (value[0]) {
        ITH_TRY(conv_message(c, c->out->messages, "system", 0, &content));
        ITH_TRY(conv_media_text(c, content, value[0]));
    }
    if (value[1] || value[2]) {
        json_t *prompt = NULL;
        ITH_TRY(join_prompt(c, value[1], value[2], &prompt));
        ith_status status = conv_message(c, c->out->messages, "user", 0, &content);
        if (status == ITH_OK)
            status = conv_media_text(c, content, prompt);
        json_decref(prompt);
        ITH_TRY(status);
    }
    if (value[3]) {
        ITH_TRY(conv_message(c, c->out->messages, "assistant", 1, &content));
        ITH_TRY(conv_block(c, content, "text", value[3]));
    }
    return conv_media_end(c);
}

/* One tool_call block per call in JSON text. False: the text is no JSON, nothing was added. */
static ith_status add_calls(conversion *c, json_t *content, const json_t *text, bool *valid)
{
    json_t *calls = NULL;
    ith_error inner = {0};
    ith_status status = ith_json_parse(&calls, json_string_value(text),
                                       (int64_t)json_string_length(text), "", &inner);
    *valid = status == ITH_OK;
    if (status != ITH_OK)
        return status == ITH_ERR_MEMORY ? conv_memory(c) : ITH_OK;
    size_t count = json_is_array(calls) ? json_array_size(calls) : 1;
    ith_buf value = {0};
    for (size_t i = 0; i < count && status == ITH_OK; i++) {
        ith_buf_clear(&value);
        status = ith_json_dump(json_is_array(calls) ? json_array_get(calls, i) : calls, true,
                               &value, c->err);
        if (status == ITH_OK)
            status = conv_block_text(c, content, "tool_call", value.data, (size_t)value.len);
    }
    ith_buf_deinit(&value);
    json_decref(calls);
    return status;
}

/* Appends a message of tool calls to list, or notes that it is none. */
static ith_status add_call_message(conversion *c, json_t *list, const char *role, double weight,
                                   const json_t *text, const char *field)
{
    json_t *content = NULL;
    bool valid = false;
    ITH_TRY(conv_message(c, list, role, weight, &content));
    ITH_TRY(add_calls(c, content, text, &valid));
    if (!valid) {
        json_array_remove(list, json_array_size(list) - 1);
        conv_note(c, ITH_DROP_MESSAGE_CALL, "%s: '%.60s'", field, json_string_value(text));
    }
    return ITH_OK;
}

/* tools: JSON text, or the list itself. What is not JSON is left out and noted. */
static ith_status take_tools(conversion *c)
{
    json_t *tools = conv_get(c->row, "tools");
    if (!tools || (json_is_string(tools) && json_string_length(tools) == 0))
        return ITH_OK;
    if (json_is_array(tools) || json_is_object(tools)) {
        c->out->tools = json_incref(tools);
        return ITH_OK;
    }
    if (!json_is_string(tools)) {
        conv_note(c, ITH_DROP_TOOLS, "tools: found %s", ith_json_type_name(tools));
        return ITH_OK;
    }
    ith_error inner = {0};
    json_t *parsed = NULL;
    ith_status status = ith_json_parse(&parsed, json_string_value(tools),
                                       (int64_t)json_string_length(tools), "", &inner);
    if (status == ITH_ERR_MEMORY)
        return conv_memory(c);
    if (status != ITH_OK)
        conv_note(c, ITH_DROP_TOOLS, "tools: '%.60s'", json_string_value(tools));
    else
        c->out->tools = parsed;
    return ITH_OK;
}

typedef struct {
    const char *from, *role;
    double weight;
    bool is_call;
} speaker_row;

static const speaker_row speakers[] = {{"system", "system", 0, false},
                                       {"human", "user", 0, false},
                                       {"gpt", "assistant", 1, false},
                                       {"observation", "tool", 0, false},
                                       {"function_call", "assistant", 1, true}};

static const speaker_row *find_speaker(const char *from)
{
    for (size_t i = 0; i < sizeof speakers / sizeof speakers[0]; i++)
        if (strcmp(speakers[i].from, from) == 0)
            return &speakers[i];
    return NULL;
}

static ith_status add_turn(conversion *c, const json_t *turn, size_t i)
{
    char field[64];
    snprintf(field, sizeof field, "conversations[%zu]", i);
    if (!json_is_object(turn))
        return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected an object", field,
                         ith_json_type_name(turn));
    snprintf(field, sizeof field, "conversations[%zu].from", i);
    json_t *from = conv_get(turn, "from"), *value = conv_get(turn, "value"), *content = NULL;
    ITH_TRY(conv_want_text(c, from, field));
    const speaker_row *speaker = find_speaker(json_string_value(from));
    if (!speaker) {
        conv_note(c, ITH_DROP_MESSAGE_TAG, "%s: '%.60s'", field, json_string_value(from));
        return ITH_OK;
    }
    snprintf(field, sizeof field, "conversations[%zu].value", i);
    ITH_TRY(conv_want_text(c, value, field));
    if (speaker->is_call)
        return add_call_message(c, c->out->messages, speaker->role, speaker->weight, value, field);
    ITH_TRY(conv_message(c, c->out->messages, speaker->role, speaker->weight, &content));
    return conv_media_text(c, content, value);
}

ith_status conv_sharegpt(conversion *c)
{
    const json_t *turns = conv_get(c->row, "conversations");
    if (!json_is_array(turns))
        return conv_drop(c, ITH_DROP_TYPE, "conversations: found %s, expected a list",
                         ith_json_type_name(turns));
    c->out->messages = json_array();
    if (!c->out->messages)
        return conv_memory(c);
    for (size_t i = 0; i < json_array_size(turns); i++)
        ITH_TRY(add_turn(c, json_array_get(turns, i), i));
    ITH_TRY(take_tools(c));
    return conv_media_end(c);
}

static ith_status add_pair_message(conversion *c, json_t *list, const json_t *message,
                                   const char *side, size_t i)
{
    char field[64];
    snprintf(field, sizeof field, "%s[%zu]", side, i);
    if (!json_is_object(message))
        return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected an object", field,
                         ith_json_type_name(message));
    json_t *role = conv_get(message, "role"), *text = conv_get(message, "content"), *content = NULL;
    snprintf(field, sizeof field, "%s[%zu].role", side, i);
    ITH_TRY(conv_want_text(c, role, field));
    snprintf(field, sizeof field, "%s[%zu].content", side, i);
    ITH_TRY(conv_want_text(c, text, field));
    const char *name = json_string_value(role);
    if (strcmp(name, "tool") == 0)
        return add_call_message(c, list, "tool", 0, text, field);
    ITH_TRY(conv_message(c, list, name, strcmp(name, "assistant") == 0, &content));
    return conv_media_text(c, content, text);
}

static ith_status add_side(conversion *c, const char *side, json_t **out)
{
    const json_t *turns = conv_get(c->row, side);
    if (!json_is_array(turns))
        return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected a list of messages", side,
                         ith_json_type_name(turns));
    *out = json_array();
    if (!*out)
        return conv_memory(c);
    conv_media_rewind(c);
    for (size_t i = 0; i < json_array_size(turns); i++)
        ITH_TRY(add_pair_message(c, *out, json_array_get(turns, i), side, i));
    return conv_media_end(c);
}

ith_status conv_pair(conversion *c)
{
    ITH_TRY(add_side(c, "chosen", &c->out->chosen));
    ITH_TRY(add_side(c, "rejected", &c->out->rejected));
    return take_tools(c);
}
