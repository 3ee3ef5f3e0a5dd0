/* chat_escape.c - special tokens written in user-controlled text are not special.
 *
 * U+200B goes after the first character of every occurrence (LlamaFactory's rule), so a user's
 * "<|im_end|>" becomes ordinary text that still reads the same. */
#include "tokenizer/chat_internal.h"

#include "base/utf8.h"

#include <string.h>

#define ZERO_WIDTH_SPACE "\xe2\x80\x8b"

/* A special token begins at p. */
static bool begins_special(const ith_chat *chat, const char *p, const char *end)
{
    for (int64_t i = 0; i < chat->num_specials; i++) {
        const ith_special_text *t = &chat->specials[i];
        if (end - p >= t->len && memcmp(p, t->text, (size_t)t->len) == 0)
            return true;
    }
    return false;
}

static bool is_special_id(const ith_tokenizer *tok, int32_t id)
{
    bool special = false;
    return ith_tokenizer_token(tok, id, NULL, NULL, NULL, &special) == ITH_OK && special;
}

static ith_status check_escaped(const ith_chat *chat, const char *text, int64_t len, ith_error *err)
{
    ith_ids ids = {0};
    ith_status status = ith_tokenizer_encode(chat->tok, text, len, &ids, err);
    for (int64_t i = 0; status == ITH_OK && i < ids.count; i++)
        if (is_special_id(chat->tok, ids.ids[i]))
            status = ith_fail(err, ITH_ERR_FORMAT,
                              "text still holds the special token %d after escaping", ids.ids[i]);
    ith_ids_free(&ids);
    return status;
}

ith_status ith_chat_escape(const ith_chat *chat, const char *text, int64_t len, ith_buf *out,
                           ith_error *err)
{
    const char *p = text, *end = text + len, *from = text;
    int64_t begin = out->len;
    bool changed = false;
    while (p < end) {
        if (!chat->first_byte[(unsigned char)*p] || !begins_special(chat, p, end)) {
            p++;
            continue;
        }
        uint32_t c;
        int n = ith_utf8_decode(p, end, &c);
        p += n ? n : 1;
        ith_buf_append(out, from, p - from);
        ith_buf_puts(out, ZERO_WIDTH_SPACE);
        from = p;
        changed = true;
    }
    ith_buf_append(out, from, end - from);
    ITH_TRY(ith_buf_check(out, "message text", err));
    return changed ? check_escaped(chat, out->data + begin, out->len - begin, err) : ITH_OK;
}

static ith_status escape_string(const ith_chat *chat, const json_t *value, json_t **out,
                                ith_error *err)
{
    ith_buf buf = {0};
    ith_status status = ith_chat_escape(chat, json_string_value(value),
                                        (int64_t)json_string_length(value), &buf, err);
    if (status == ITH_OK) {
        *out = json_stringn(buf.data, (size_t)buf.len);
        if (!*out)
            status = ith_fail(err, ITH_ERR_MEMORY, "out of memory: a message");
    }
    ith_buf_deinit(&buf);
    return status;
}

static ith_status escape_members(const ith_chat *chat, const json_t *value, json_t *out,
                                 ith_error *err)
{
    const char *key;
    json_t *member;
    ith_buf name = {0};
    ith_status status = ITH_OK;
    json_object_foreach(ith_json_unconst(value), key, member)
    {
        json_t *copy = NULL;
        ith_buf_clear(&name);
        ITH_TRY_OUT(ith_chat_escape(chat, key, (int64_t)strlen(key), &name, err));
        ITH_TRY_OUT(ith_chat_escape_json(chat, member, &copy, err));
        ITH_TRY_OUT(ith_json_put(out, name.data, copy, err));
    }
out:
    ith_buf_deinit(&name);
    return status;
}

/* Recursion is bounded: the parser of JSON refuses more than 2,048 levels. */
ith_status ith_chat_escape_json(const ith_chat *chat, const json_t *value, json_t **out,
                                ith_error *err)
{
    if (json_is_string(value))
        return escape_string(chat, value, out, err);
    if (!json_is_object(value) && !json_is_array(value)) {
        *out = json_incref(ith_json_unconst(value));
        return ITH_OK;
    }
    json_t *copy = json_is_object(value) ? json_object() : json_array();
    ith_status status = copy ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory: a message");
    if (status == ITH_OK && json_is_object(value))
        status = escape_members(chat, value, copy, err);
    for (size_t i = 0; status == ITH_OK && json_is_array(value) && i < json_array_size(value);
         i++) {
        json_t *item = NULL;
        status = ith_chat_escape_json(chat, json_array_get(value, i), &item, err);
        if (status == ITH_OK)
            status = ith_json_push(copy, item, err);
    }
    if (status == ITH_OK)
        *out = copy;
    else
        json_decref(copy);
    return status;
}
