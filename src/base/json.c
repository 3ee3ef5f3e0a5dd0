/* json.c - jansson wrapper. */
#include "base/json.h"

#include "base/checked.h"
#include "base/file.h"

#include <pthread.h>
#include <string.h>

/* jansson's lexer ignores a failed allocation: it drops a byte of the string, and when that byte
 * is the closing quote it reads and writes beyond its buffers. So a failure is noted, told after
 * the parse, and the allocation tried once more. NEEDSWORK: when the second try fails as well,
 * jansson is on its own. */
static _Thread_local bool alloc_failed;

static void *json_alloc(size_t bytes)
{
    void *ptr = ith_malloc((int64_t)bytes);
    if (ptr)
        return ptr;
    alloc_failed = true;
    return ith_malloc((int64_t)bytes);
}

/* Once: rows are parsed by many threads. */
static pthread_once_t alloc_once = PTHREAD_ONCE_INIT;

static void set_alloc_funcs(void)
{
    json_set_alloc_funcs(json_alloc, ith_free);
}

/* jansson drops some raw NUL bytes between tokens: no JSON text holds any. */
static ith_status refuse_nul(const char *text, int64_t len, const char *name, ith_error *err)
{
    const char *nul = len > 0 ? memchr(text, '\0', (size_t)len) : NULL;
    if (!nul)
        return ITH_OK;
    int line = 1, column = 1;
    for (const char *p = text; p < nul; p++) {
        column = *p == '\n' ? 1 : column + 1;
        line += *p == '\n';
    }
    return ith_fail(err, ITH_ERR_FORMAT, "%s:%d:%d: a NUL byte is not JSON", name, line, column);
}

static bool is_blank(const char *text, int64_t len)
{
    int64_t i = 0;
    while (i < len && (text[i] == ' ' || (text[i] >= '\t' && text[i] <= '\r')))
        i++;
    return i == len;
}

static ith_status parse(json_t **out, const char *text, int64_t len, const char *name, size_t flags,
                        ith_error *err)
{
    pthread_once(&alloc_once, set_alloc_funcs);
    alloc_failed = false;
    if (len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
        text += 3;
        len -= 3;
    }
    ITH_TRY(refuse_nul(text, len, name, err));
    if (is_blank(text, len))
        return ith_fail(err, ITH_ERR_FORMAT, "%s: empty, expected JSON", name);
    json_error_t json_err;
    flags |= JSON_DECODE_ANY | JSON_ALLOW_NUL;
    json_t *value = json_loadb(text ? text : "", (size_t)len, flags, &json_err);
    bool exact = flags & JSON_REJECT_DUPLICATES; /* file formats: no integer may change */
    if (!value && !exact && json_error_code(&json_err) == json_error_numeric_overflow)
        value = json_loadb(text, (size_t)len, flags | JSON_DECODE_INT_AS_REAL, &json_err);
    if (alloc_failed) {
        json_decref(value);
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", name);
    }
    if (!value) {
        ith_status status = json_error_code(&json_err) == json_error_out_of_memory ? ITH_ERR_MEMORY
                                                                                   : ITH_ERR_FORMAT;
        return ith_fail(err, status, "%s:%d:%d: %s", name, json_err.line, json_err.column,
                        json_err.text);
    }
    *out = value;
    return ITH_OK;
}

ith_status ith_json_parse(json_t **out, const char *text, int64_t len, const char *name,
                          ith_error *err)
{
    return parse(out, text, len, name, 0, err);
}

ith_status ith_json_parse_unique(json_t **out, const char *text, int64_t len, const char *name,
                                 ith_error *err)
{
    return parse(out, text, len, name, JSON_REJECT_DUPLICATES, err);
}

ith_status ith_json_load(json_t **out, const char *path, ith_error *err)
{
    ith_map map;
    ITH_TRY(ith_map_open(&map, path, err));
    ith_status status = ith_json_parse(out, map.data, map.size, path, err);
    ith_map_close(&map);
    return status;
}

const char *ith_json_type_name(const json_t *value)
{
    if (!value)
        return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "object";
    case JSON_ARRAY:
        return "array";
    case JSON_STRING:
        return "string";
    case JSON_INTEGER:
        return "integer";
    case JSON_REAL:
        return "number";
    case JSON_NULL:
        return "null";
    default:
        return "boolean";
    }
}

static int dump_to_buf(const char *data, size_t len, void *arg)
{
    ith_buf_append(arg, data, (int64_t)len);
    return ((ith_buf *)arg)->failed ? -1 : 0;
}

ith_status ith_json_dump(const json_t *value, bool spaced, ith_buf *out, ith_error *err)
{
    size_t flags = JSON_ENCODE_ANY | (spaced ? 0 : JSON_COMPACT);
    alloc_failed = false;
    if (json_dump_callback(value, dump_to_buf, out, flags) != 0) {
        ITH_TRY(ith_buf_check(out, "json", err));
        if (alloc_failed)
            return ith_fail(err, ITH_ERR_MEMORY, "out of memory to write JSON");
        return ith_fail(err, ITH_ERR_FORMAT, "value cannot be written as JSON");
    }
    return ITH_OK;
}

void ith_json_append_string(ith_buf *out, const char *text, int64_t len)
{
    ith_buf_putc(out, '"');
    for (int64_t i = 0, run = 0; i <= len; i++) {
        unsigned char c = i < len ? (unsigned char)text[i] : '"';
        if (i < len && c >= 0x20 && c != '"' && c != '\\')
            continue;
        ith_buf_append(out, text + run, i - run);
        run = i + 1;
        if (i == len)
            break;
        if (c == '"' || c == '\\')
            ith_buf_printf(out, "\\%c", c);
        else if (c == '\n')
            ith_buf_puts(out, "\\n");
        else
            ith_buf_printf(out, "\\u%04x", (unsigned)c);
    }
    ith_buf_putc(out, '"');
}
