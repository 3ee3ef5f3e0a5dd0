/* convert_canonical.c - rows that have messages: LlamaFactory v1's content blocks, and the
 * {role, content: "text", tool_calls} of OpenAI-style files. */
#include "data/convert_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static bool is_one_of(const char *text, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(text, names[i]) == 0)
            return true;
    return false;
}

static const char *const roles[] = {"system", "user", "assistant", "tool"};
static const char *const text_types[] = {"text", "reasoning", "tool_call"};
/* canonical first; the second is how Hugging Face messages spell it */
static const char *const media_types[][2] = {
    {"image_url", "image"}, {"video_url", "video"}, {"audio_url", "audio"}};
static const char *const reasoning_keys[] = {"reasoning_content", "reasoning", "thinking"};
/* read elsewhere, or of no use to a template */
static const char *const other_keys[] = {"role", "content", "tool_calls", "tool_call_id", "name"};
static const char *const weight_keys[] = {"loss_weight", "loss_mask", "loss", "train", "weight"};

#define COUNT(table) (sizeof(table) / sizeof(table)[0])

/* One number or boolean under any of the usual names; two names that disagree are an error of the
 * row. */
static ith_status take_weight(conversion *c, const json_t *message, const char *field, double *out)
{
    const char *used = NULL;
    for (size_t i = 0; i < COUNT(weight_keys); i++) {
        const json_t *value = conv_get(message, weight_keys[i]);
        if (!value)
            continue;
        double weight = json_is_boolean(value) ? json_is_true(value) : json_number_value(value);
        if ((!json_is_boolean(value) && !json_is_number(value)) || !isfinite(weight) || weight < 0)
            return conv_drop(c, ITH_DROP_TYPE,
                             "%s.%s: found %s, expected a number that is not negative", field,
                             weight_keys[i],
                             json_is_number(value) ? "a negative one" : ith_json_type_name(value));
        if (used && weight < *out + 1e-9 && weight > *out - 1e-9)
            continue;
        if (used)
            return conv_drop(c, ITH_DROP_TYPE, "%s: %s and %s disagree", field, used,
                             weight_keys[i]);
        used = weight_keys[i];
        *out = weight;
    }
    return ITH_OK;
}

/* The value of a block: "value" as LlamaFactory has it, or under the name of its type as OpenAI
 * ({type: text, text: ...}, {type: image_url, image_url: {url: ...}}), or as transformers ({type:
 * image, url: ...} or path). */
static json_t *block_value(const json_t *block, const char *type)
{
    json_t *value = conv_get(block, "value");
    if (!value)
        value = conv_get(block, type);
    if (!value)
        value = conv_get(block, "url");
    if (!value)
        value = conv_get(block, "path");
    if (json_is_object(value) && conv_get(value, "url"))
        value = conv_get(value, "url");
    return value;
}

static ith_status add_block(conversion *c, json_t *content, const json_t *block, const char *field)
{
    const char *type = json_string_value(conv_get(block, "type"));
    const char *canonical = type;
    bool is_media = false;
    for (size_t i = 0; type && i < COUNT(media_types); i++)
        for (int k = 0; k < 2; k++)
            if (strcmp(type, media_types[i][k]) == 0) {
                canonical = media_types[i][0];
                is_media = true;
            }
    if (!type || (!is_media && !is_one_of(type, text_types, COUNT(text_types))))
        return conv_drop(c, ITH_DROP_TYPE,
                         "%s.type: found %.40s, expected text, reasoning, tool_call, image_url, "
                         "video_url or audio_url",
                         field, type ? type : ith_json_type_name(conv_get(block, "type")));
    json_t *value = block_value(block, type);
    if (!json_is_string(value))
        return conv_drop(c, ITH_DROP_TYPE, "%s.value: found %s, expected text", field,
                         ith_json_type_name(value));
    c->out->has_media |= is_media;
    return conv_block(c, content, canonical, value);
}

/* The members of {name, arguments} of one OpenAI-style call. */
static ith_status read_call(conversion *c, const json_t *call, const char *field, json_t **name,
                            json_t **arguments)
{
    const json_t *function = conv_get(call, "function");
    if (!function)
        function = call;
    *name = conv_get(function, "name");
    *arguments = conv_get(function, "arguments");
    if (!json_is_string(*name))
        return conv_drop(c, ITH_DROP_TYPE, "%s.name: found %s, expected text", field,
                         ith_json_type_name(*name));
    if (*arguments && !json_is_object(*arguments) && !json_is_string(*arguments))
        return conv_drop(c, ITH_DROP_TYPE, "%s.arguments: found %s, expected an object", field,
                         ith_json_type_name(*arguments));
    return ITH_OK;
}

/* Arguments keep their keys and the order of these; a text must hold a JSON object. */
static ith_status parse_arguments(conversion *c, json_t *arguments, const char *field, json_t **out)
{
    if (!arguments) {
        *out = json_object();
        return *out ? ITH_OK : conv_memory(c);
    }
    if (json_is_object(arguments)) {
        *out = json_incref(arguments);
        return ITH_OK;
    }
    json_t *parsed = NULL;
    ith_error inner = {0};
    ith_status status = ith_json_parse(&parsed, json_string_value(arguments),
                                       (int64_t)json_string_length(arguments), "", &inner);
    if (status == ITH_ERR_MEMORY)
        return conv_memory(c);
    if (status != ITH_OK || !json_is_object(parsed)) {
        json_decref(parsed);
        return conv_drop(c, ITH_DROP_TYPE, "%s.arguments: text that is not a JSON object: '%.60s'",
                         field, json_string_value(arguments));
    }
    *out = parsed;
    return ITH_OK;
}

static ith_status add_call(conversion *c, json_t *content, const json_t *call, const char *field)
{
    json_t *name = NULL, *given = NULL, *arguments = NULL;
    ITH_TRY(read_call(c, call, field, &name, &given));
    ITH_TRY(parse_arguments(c, given, field, &arguments));
    json_t *value = json_object();
    bool failed = json_object_set(value, "name", name) != 0;
    failed |= json_object_set_new(value, "arguments", arguments) != 0;
    ith_buf text = {0};
    ith_status status = failed ? conv_memory(c) : ith_json_dump(value, true, &text, c->err);
    if (status == ITH_OK)
        status = conv_block_text(c, content, "tool_call", text.data, (size_t)text.len);
    ith_buf_deinit(&text);
    json_decref(value);
    return status;
}

static ith_status add_calls(conversion *c, json_t *content, const json_t *message,
                            const char *field)
{
    const json_t *calls = conv_get(message, "tool_calls");
    if (!calls)
        return ITH_OK;
    if (!json_is_array(calls))
        return conv_drop(c, ITH_DROP_TYPE, "%s.tool_calls: found %s, expected a list", field,
                         ith_json_type_name(calls));
    for (size_t i = 0; i < json_array_size(calls); i++) {
        char name[96];
        snprintf(name, sizeof name, "%s.tool_calls[%zu]", field, i);
        ITH_TRY(add_call(c, content, json_array_get(calls, i), name));
    }
    return ITH_OK;
}

static ith_status add_content(conversion *c, json_t *content, const json_t *message,
                              const char *field)
{
    json_t *given = conv_get(message, "content");
    char name[96];
    if (json_is_string(given))
        return c->has_columns ? conv_media_text(c, content, given)
                              : conv_block(c, content, "text", given);
    if (!given) /* as "" */
        return conv_block_text(c, content, "text", "", 0);
    if (!json_is_array(given))
        return conv_drop(c, ITH_DROP_TYPE,
                         "%s.content: found %s, expected text or a list of blocks", field,
                         ith_json_type_name(given));
    for (size_t i = 0; i < json_array_size(given); i++) {
        snprintf(name, sizeof name, "%s.content[%zu]", field, i);
        ITH_TRY(add_block(c, content, json_array_get(given, i), name));
    }
    return ITH_OK;
}

/* A key that is not read, loss_maks say, is told and counted. */
static void note_unknown_keys(conversion *c, const json_t *message, const char *field)
{
    const char *key = NULL;
    json_t *value = NULL;
    json_object_foreach((json_t *)(uintptr_t)message, key, value)
    {
        if (!json_is_null(value) && !is_one_of(key, weight_keys, COUNT(weight_keys)) &&
            !is_one_of(key, reasoning_keys, COUNT(reasoning_keys)) &&
            !is_one_of(key, other_keys, COUNT(other_keys)))
            conv_note(c, ITH_DROP_KEY, "%s.%.60s", field, key);
    }
}

static ith_status add_reasoning(conversion *c, json_t *content, const json_t *message,
                                const char *field)
{
    for (size_t i = 0; i < COUNT(reasoning_keys); i++) {
        json_t *reasoning = conv_get(message, reasoning_keys[i]);
        char text[96];
        if (!reasoning)
            continue;
        snprintf(text, sizeof text, "%s.%s", field, reasoning_keys[i]);
        ITH_TRY(conv_want_text(c, reasoning, text));
        return conv_block(c, content, "reasoning", reasoning);
    }
    return ITH_OK;
}

static ith_status add_message(conversion *c, json_t *list, const json_t *message, const char *field)
{
    if (!json_is_object(message))
        return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected an object", field,
                         ith_json_type_name(message));
    const json_t *role = conv_get(message, "role");
    const char *name = json_string_value(role);
    if (!name || !is_one_of(name, roles, COUNT(roles)))
        return conv_drop(c, ITH_DROP_TYPE,
                         "%s.role: found %.40s, expected system, user, assistant or tool", field,
                         name ? name : ith_json_type_name(role));
    double weight = strcmp(name, "assistant") == 0;
    ITH_TRY(take_weight(c, message, field, &weight));
    note_unknown_keys(c, message, field);
    json_t *content = NULL;
    ITH_TRY(conv_message(c, list, name, weight, &content));
    ITH_TRY(add_reasoning(c, content, message, field));
    ITH_TRY(add_content(c, content, message, field));
    return add_calls(c, content, message, field);
}

static ith_status add_list(conversion *c, const char *key, json_t **out)
{
    const json_t *messages = conv_get(c->row, key);
    if (!json_is_array(messages))
        return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected a list", key,
                         ith_json_type_name(messages));
    *out = json_array();
    if (!*out)
        return conv_memory(c);
    conv_media_rewind(c);
    for (size_t i = 0; i < json_array_size(messages); i++) {
        char field[48];
        snprintf(field, sizeof field, "%s[%zu]", key, i);
        ITH_TRY(add_message(c, *out, json_array_get(messages, i), field));
    }
    /* Blocks name their files themselves; columns beside them are somebody else's. */
    bool any_tag = c->num_tags[MEDIA_IMAGE] || c->num_tags[MEDIA_VIDEO] || c->num_tags[MEDIA_AUDIO];
    return any_tag || !c->out->has_media ? conv_media_end(c) : ITH_OK;
}

ith_status conv_canonical(conversion *c)
{
    if (ith_row_is_preference(c->row)) {
        ITH_TRY(add_list(c, "chosen_messages", &c->out->chosen));
        ITH_TRY(add_list(c, "rejected_messages", &c->out->rejected));
    } else {
        ITH_TRY(add_list(c, "messages", &c->out->messages));
    }
    json_t *tools = conv_get(c->row, "tools");
    if (!tools || (json_is_string(tools) && json_string_length(tools) == 0))
        return ITH_OK;
    if (!json_is_string(tools) && !json_is_array(tools) && !json_is_object(tools))
        return conv_drop(c, ITH_DROP_TYPE, "tools: found %s, expected JSON text or a list",
                         ith_json_type_name(tools));
    c->out->tools = json_incref(tools);
    return ITH_OK;
}
