/* json_edit.c - finds the span of a value in JSON text known to be valid, and replaces it.
 * Invariant: the cursor never passes the end: the text was parsed first. */
#include "checkpoint/json_edit.h"

#include "base/json.h"

#include <string.h>

/* Offsets into the text. */
typedef struct {
    int64_t begin, end;
} span;

static int64_t skip_space(const char *text, int64_t at)
{
    while (text[at] == ' ' || text[at] == '\t' || text[at] == '\n' || text[at] == '\r')
        at++;
    return at;
}

/* at: the opening quote; returns the offset behind the closing one. */
static int64_t skip_string(const char *text, int64_t at)
{
    ITH_ASSERT(text[at] == '"');
    for (at++; text[at] != '"'; at++)
        if (text[at] == '\\')
            at++;
    return at + 1;
}

static int64_t skip_value(const char *text, int64_t at)
{
    int64_t depth = 0;
    do {
        char c = text[at];
        if (c == '"') {
            at = skip_string(text, at);
            continue;
        }
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        at++;
        if (depth == 0 && c != '}' && c != ']') /* a number or a word */
            while (text[at] && !strchr(",]} \t\r\n", text[at]))
                at++;
    } while (depth > 0);
    return at;
}

/* Value of `key` (the last one, as parsers take it) in the object that opens at `at`; *end: offset
 * of its closing brace. Returns false when absent. */
static bool find_key(const char *text, int64_t at, const char *key, int64_t key_len, span *value,
                     int64_t *end)
{
    ITH_ASSERT(text[at] == '{');
    bool found = false;
    at = skip_space(text, at + 1);
    while (text[at] != '}') {
        int64_t name = at;
        at = skip_string(text, at);
        bool same = at - name - 2 == key_len && memcmp(text + name + 1, key, (size_t)key_len) == 0;
        at = skip_space(text, at);
        ITH_ASSERT(text[at] == ':');
        int64_t begin = skip_space(text, at + 1);
        at = skip_value(text, begin);
        if (same) {
            *value = (span){begin, at};
            found = true;
        }
        at = skip_space(text, at);
        if (text[at] == ',')
            at = skip_space(text, at + 1);
    }
    *end = at;
    return found;
}

static void append_span(ith_buf *out, const char *text, int64_t begin, int64_t end)
{
    ith_buf_append(out, text + begin, end - begin);
}

/* Adds key: value before the closing brace of the object [open, close]. */
static void insert_key(ith_buf *out, const ith_buf *text, int64_t open, int64_t close,
                       const char *key, const char *value)
{
    int64_t first = skip_space(text->data, open + 1), last = close;
    while (last > open + 1 && strchr(" \t\r\n", text->data[last - 1]))
        last--;
    append_span(out, text->data, 0, last);
    if (first < close) {
        ith_buf_putc(out, ',');
        append_span(out, text->data, open + 1, first);
    }
    ith_buf_printf(out, "\"%s\": %s", key, value);
    append_span(out, text->data, last, text->len);
}

static ith_status edit(ith_buf *out, const ith_buf *text, const char *path, const char *value,
                       ith_error *err)
{
    int64_t at = skip_space(text->data, 0);
    for (const char *key = path;;) {
        const char *dot = strchr(key, '.');
        int64_t key_len = dot ? dot - key : (int64_t)strlen(key), close = 0;
        span old = {0, 0};
        if (text->data[at] != '{')
            return ith_fail(err, ITH_ERR_FORMAT, "%s: not in an object", path);
        bool found = find_key(text->data, at, key, key_len, &old, &close);
        if (!dot && found) {
            append_span(out, text->data, 0, old.begin);
            ith_buf_puts(out, value);
            append_span(out, text->data, old.end, text->len);
        } else if (!dot) {
            insert_key(out, text, at, close, key, value);
        } else if (!found) {
            return ith_fail(err, ITH_ERR_FORMAT, "%s: %.*s is missing", path, (int)key_len, key);
        }
        if (!dot)
            return ith_buf_check(out, path, err);
        at = old.begin;
        key = dot + 1;
    }
}

ith_status ith_json_edit_set(ith_buf *text, const char *path, const char *value, ith_error *err)
{
    json_t *parsed = NULL;
    ITH_TRY(ith_json_parse(&parsed, text->data, text->len, path, err));
    json_decref(parsed);
    ith_buf out;
    ith_buf_init(&out, text->max_bytes);
    /* the parser skips a byte order mark; so does this */
    ith_buf body = *text;
    bool has_bom = text->len >= 3 && memcmp(text->data, "\xef\xbb\xbf", 3) == 0;
    if (has_bom) {
        body.data += 3;
        body.len -= 3;
        ith_buf_puts(&out, "\xef\xbb\xbf");
    }
    ith_status status = edit(&out, &body, path, value, err);
    if (status != ITH_OK) {
        ith_buf_deinit(&out);
        return status;
    }
    ith_buf_deinit(text);
    *text = out;
    return ITH_OK;
}
