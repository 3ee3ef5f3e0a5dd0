/* convert.c - drop reasons, format detection, and what all converters share.
 *
 * Invariants:
 *  1. A failed or dropped row leaves nothing in ith_converted but the reason.
 *  2. Weights are finite and >= 0. */
#include "data/convert_internal.h"

#include "base/checked.h"
#include "base/utf8.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define SUPERVISED_WEIGHT 1e-6

/* Enough keys to recognise a row by; the rest is counted. */
#define MAX_KEYS_SHOWN 8

typedef struct {
    const char *name;
    const char *any_of[3]; /* a row of this format has one of these */
    const char *expected;  /* for messages */
    ith_status (*convert)(conversion *c);
} converter_row;

static const converter_row converters[ITH_CONVERTER_COUNT] = {
    [ITH_CONVERTER_AUTO] = {"auto", {NULL}, "", NULL},
    [ITH_CONVERTER_CANONICAL] = {"canonical",
                                 {"messages", "chosen_messages", NULL},
                                 "messages",
                                 conv_canonical},
    [ITH_CONVERTER_ALPACA] = {"alpaca",
                              {"output", "instruction", NULL},
                              "instruction, input, output",
                              conv_alpaca},
    [ITH_CONVERTER_SHAREGPT] = {"sharegpt",
                                {"conversations", NULL, NULL},
                                "conversations",
                                conv_sharegpt},
    [ITH_CONVERTER_PAIR] = {"pair", {"chosen", NULL, NULL}, "chosen, rejected", conv_pair},
    [ITH_CONVERTER_TOKENID] = {"tokenid",
                               {"input_ids", NULL, NULL},
                               "input_ids, prompt_lengths",
                               conv_tokenid},
};

typedef struct {
    const char *text, *unit;
} drop_text;

static const drop_text drop_texts[ITH_DROP_COUNT] = {
    [ITH_DROP_NONE] = {"used", "row"},
    [ITH_DROP_TYPE] = {"a field that is not what it should be", "row"},
    [ITH_DROP_NO_ASSISTANT] = {"no assistant turn", "row"},
    [ITH_DROP_NO_WEIGHT] = {"no assistant turn with a loss weight", "row"},
    [ITH_DROP_MEDIA] = {"images, video or audio, and the model reads text only", "row"},
    [ITH_DROP_BROKEN_MEDIA] = {"an image or video that cannot be read", "row"},
    [ITH_DROP_RENDER] = {"cannot be rendered", "sample"},
    [ITH_DROP_NO_TRAINABLE] = {"no trainable token within cutoff_len", "sample"},
    [ITH_DROP_SPLIT_PART] = {"no trainable token in this part of a long document", "part"},
    [ITH_DROP_MESSAGE_TAG] = {"unknown speaker", "message"},
    [ITH_DROP_MESSAGE_CALL] = {"function call that is not JSON", "message"},
    [ITH_DROP_TOOLS] = {"tools that are not JSON", "tools column"},
    [ITH_DROP_KEY] = {"it has no meaning here", "message key"},
};

const char *ith_converter_name(ith_converter converter)
{
    return converters[converter].name;
}

bool ith_converter_from_name(const char *name, ith_converter *out)
{
    for (int i = 0; i < ITH_CONVERTER_COUNT; i++) {
        if (strcmp(converters[i].name, name) == 0) {
            *out = (ith_converter)i;
            return true;
        }
    }
    return false;
}

const char *ith_drop_text(ith_drop drop)
{
    return drop_texts[drop].text;
}

const char *ith_drop_unit(ith_drop drop)
{
    return drop_texts[drop].unit;
}

/* Details quote foreign text, perhaps cut: one line of whole characters. */
static void set_detail(char *out, size_t size, const char *text)
{
    const char *end = text + strlen(text);
    size_t used = 0;
    while (text < end) {
        uint32_t c = 0;
        int n = ith_utf8_decode(text, end, &c);
        if (n == 0 || c < ' ')
            c = n == 0 ? '?' : ' ';
        char bytes[4];
        int len = ith_utf8_encode(c, bytes);
        if (used + (size_t)len >= size)
            break;
        memcpy(out + used, bytes, (size_t)len);
        used += (size_t)len;
        text += n ? n : 1;
    }
    out[used] = '\0';
}

void ith_drops_add(ith_drops *drops, ith_drop drop, int64_t dataset, int64_t row,
                   const char *detail)
{
    ITH_ASSERT(drop > ITH_DROP_NONE && drop < ITH_DROP_COUNT);
    ith_drop_row *r = &drops->rows[drop];
    if (r->count++ == 0) {
        r->dataset = dataset;
        r->row = row;
        set_detail(r->detail, sizeof r->detail, detail);
    }
}

void ith_drops_merge(ith_drops *drops, const ith_drops *more)
{
    for (int i = 0; i < ITH_DROP_COUNT; i++) {
        int64_t count = drops->rows[i].count + more->rows[i].count;
        if (drops->rows[i].count == 0)
            drops->rows[i] = more->rows[i];
        drops->rows[i].count = count;
    }
}

double ith_message_weight(const json_t *message)
{
    const json_t *weight = conv_get(message, "loss_weight");
    return json_is_number(weight) ? json_number_value(weight) : 1.0;
}

bool ith_message_is_supervised(const json_t *message)
{
    const char *role = json_string_value(json_object_get(message, "role"));
    return role && strcmp(role, "assistant") == 0 &&
           ith_message_weight(message) > SUPERVISED_WEIGHT;
}

bool ith_row_is_preference(const json_t *row)
{
    return (json_object_get(row, "chosen") && json_object_get(row, "rejected")) ||
           (json_object_get(row, "chosen_messages") && json_object_get(row, "rejected_messages"));
}

static bool fits(const json_t *row, ith_converter converter)
{
    const converter_row *r = &converters[converter];
    for (int i = 0; i < 3 && r->any_of[i]; i++)
        if (json_object_get(row, r->any_of[i]))
            return true;
    return false;
}

/* The keys of a row, for messages: "a, b, c". */
static void list_keys(const json_t *row, char *out, size_t size)
{
    size_t used = 0, shown = 0, total = json_object_size(row);
    snprintf(out, size, "%s", total ? "" : "none");
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)row, key, value)
    {
        if (shown == MAX_KEYS_SHOWN || used + 1 >= size)
            break;
        int put = snprintf(out + used, size - used, "%s%.40s", shown ? ", " : "", key);
        used += put > 0 ? (size_t)put : 0;
        shown++;
    }
    if (shown < total && used < size)
        snprintf(out + used, size - used, " and %zu more", total - shown);
}

/* {"identity": {"file_name": ...}, ...}: dataset_info.json of LlamaFactory v0. */
static bool lists_data_sets(const json_t *row)
{
    const json_t *first = json_object_iter_value(json_object_iter((json_t *)(uintptr_t)row));
    return json_object_get(first, "file_name") || json_object_get(first, "hf_hub_url");
}

ith_status ith_convert_detect(const json_t *row, ith_converter wanted, ith_converter *out,
                              ith_error *err)
{
    ith_converter fitting = ITH_CONVERTER_AUTO;
    if (ith_row_is_preference(row))
        fitting = json_object_get(row, "chosen") ? ITH_CONVERTER_PAIR : ITH_CONVERTER_CANONICAL;
    for (int i = ITH_CONVERTER_CANONICAL; i < ITH_CONVERTER_COUNT; i++)
        if (fitting == ITH_CONVERTER_AUTO && fits(row, (ith_converter)i))
            fitting = (ith_converter)i;
    if (wanted == ITH_CONVERTER_AUTO && fitting != ITH_CONVERTER_AUTO)
        wanted = fitting;
    if (wanted != ITH_CONVERTER_AUTO && fits(row, wanted)) {
        *out = wanted;
        return ITH_OK;
    }
    if (lists_data_sets(row))
        return ith_fail(err, ITH_ERR_FORMAT,
                        "this is a dataset_info.json of LlamaFactory v0 (give a data file, or list "
                        "data sets in YAML: docs/data.md)");
    char found[400], hint[80] = "";
    list_keys(row, found, sizeof found);
    if (fitting != ITH_CONVERTER_AUTO)
        snprintf(hint, sizeof hint, "; converter: %s would fit", ith_converter_name(fitting));
    if (wanted == ITH_CONVERTER_AUTO)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "found the keys %s; expected messages (canonical), instruction and output "
                        "(alpaca), conversations (sharegpt) or input_ids (tokenid)",
                        found);
    return ith_fail(err, ITH_ERR_FORMAT, "found the keys %s; converter %s expects %s%s", found,
                    ith_converter_name(wanted), converters[wanted].expected, hint);
}

json_t *conv_get(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

ith_status conv_drop(conversion *c, ith_drop drop, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->out->detail, sizeof c->out->detail, fmt, args);
    va_end(args);
    c->out->drop = drop;
    return ITH_ERR_FORMAT;
}

void conv_note(conversion *c, ith_drop drop, const char *fmt, ...)
{
    c->out->num_messages_dropped[drop]++;
    if (c->out->message_detail[drop - ITH_DROP_MESSAGE_TAG][0])
        return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->out->message_detail[drop - ITH_DROP_MESSAGE_TAG], ITH_DROP_DETAIL_BYTES, fmt,
              args);
    va_end(args);
}

ith_status conv_memory(conversion *c)
{
    return ith_fail(c->err, ITH_ERR_MEMORY, "out of memory for a row");
}

ith_status conv_want_text(conversion *c, const json_t *value, const char *field)
{
    if (json_is_string(value))
        return ITH_OK;
    return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected text", field,
                     ith_json_type_name(value));
}

ith_status conv_message(conversion *c, json_t *list, const char *role, double weight,
                        json_t **content)
{
    ITH_ASSERT(isfinite(weight) && weight >= 0);
    json_t *message = json_object(), *blocks = json_array();
    bool failed = json_object_set_new(message, "role", json_string(role)) != 0;
    failed |= json_object_set_new(message, "content", blocks) != 0;
    failed |= json_object_set_new(message, "loss_weight", json_real(weight)) != 0;
    if (failed || json_array_append_new(list, message) != 0) {
        if (failed)
            json_decref(message);
        return conv_memory(c);
    }
    *content = blocks;
    return ITH_OK;
}

ith_status conv_block(conversion *c, json_t *content, const char *type, json_t *text)
{
    ITH_ASSERT(json_is_string(text));
    json_t *block = json_object();
    bool failed = json_object_set_new(block, "type", json_string(type)) != 0;
    failed |= json_object_set(block, "value", text) != 0;
    if (failed || json_array_append_new(content, block) != 0) {
        if (failed)
            json_decref(block);
        return conv_memory(c);
    }
    return ITH_OK;
}

ith_status conv_block_text(conversion *c, json_t *content, const char *type, const char *text,
                           size_t len)
{
    json_t *value = json_stringn_nocheck(text, len);
    if (!value)
        return conv_memory(c);
    ith_status status = conv_block(c, content, type, value);
    json_decref(value);
    return status;
}

void ith_converted_deinit(ith_converted *converted)
{
    json_decref(converted->messages);
    json_decref(converted->tools);
    json_decref(converted->chosen);
    json_decref(converted->rejected);
    json_decref(converted->input_ids);
    json_decref(converted->reveal_steps);
    converted->messages = converted->tools = converted->chosen = converted->rejected = NULL;
    converted->input_ids = converted->reveal_steps = NULL;
}

ith_status ith_convert_row(ith_converter converter, const json_t *row,
                           const ith_convert_options *options, ith_converted *out, ith_error *err)
{
    ITH_ASSERT(converter > ITH_CONVERTER_AUTO && converter < ITH_CONVERTER_COUNT);
    static const ith_convert_options defaults = {NULL};
    memset(out, 0, sizeof *out);
    conversion c = {.row = row, .options = options ? options : &defaults, .out = out, .err = err};
    ith_status status = conv_media_begin(&c);
    if (status == ITH_OK)
        status = converters[converter].convert(&c);
    if (status == ITH_OK)
        return ITH_OK;
    ith_converted_deinit(out);
    return out->drop != ITH_DROP_NONE ? ITH_OK : status;
}
