/* bpe_scan.c - the two big values of tokenizer.json, read without building a tree.
 *
 * A tokenizer.json of 11 MB holds 300,000 small JSON values in model.vocab and model.merges; as a
 * tree they cost most of the loading time. This reader finds the two spans, reads them strictly
 * (UTF-8, escapes, commas), and leaves everything else to base/json.h. */
#include "tokenizer/tokenizer_internal.h"

typedef struct {
    const char *text;
    int64_t at, end;
    ith_buf scratch;  /* strings with escapes, decoded */
    const char *name; /* of the file, for errors */
    ith_error *err;
} scanner;

static bool is_blank(char c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

static void skip_blank(scanner *s)
{
    while (s->at < s->end && is_blank(s->text[s->at]))
        s->at++;
}

static bool skip_string(scanner *s)
{
    ITH_ASSERT(s->text[s->at] == '"');
    for (s->at++; s->at < s->end; s->at++) {
        if (s->text[s->at] == '\\')
            s->at++;
        else if (s->text[s->at] == '"') {
            s->at++;
            return true;
        }
    }
    return false;
}

/* Steps over one value by counting brackets; what is inside is checked by whoever reads it. */
static bool skip_value(scanner *s, ith_span *out)
{
    skip_blank(s);
    out->begin = s->at;
    int64_t depth = 0;
    while (s->at < s->end) {
        char c = s->text[s->at];
        if (c == '"') {
            if (!skip_string(s))
                return false;
        } else if (depth == 0 && (c == ',' || c == '}' || c == ']')) {
            break;
        } else {
            depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
            s->at++;
            if (depth > 0 || (c != '}' && c != ']'))
                continue;
        }
        if (depth == 0)
            break;
    }
    out->end = s->at;
    return depth == 0 && out->end > out->begin;
}

typedef struct wanted {
    const char *key;
    ith_span *out;
    const struct wanted *inner; /* keys wanted of the object that it is */
    int num_inner;
} wanted;

static bool find_keys(scanner *s, const wanted *keys, int num_keys);

/* The value at s->at, of a wanted key or of another one (NULL). */
static bool find_value(scanner *s, const wanted *key)
{
    ith_span value;
    skip_blank(s);
    if (key && key->out->end > key->out->begin)
        return false; /* twice */
    value.begin = s->at;
    if (key && key->inner && s->at < s->end && s->text[s->at] == '{') {
        if (!find_keys(s, key->inner, key->num_inner))
            return false;
        value.end = s->at;
    } else if (!skip_value(s, &value)) {
        return false;
    }
    if (key)
        *key->out = value;
    return true;
}

/* Spans of the wanted keys of the object at s->at, which ends up behind it. */
static bool find_keys(scanner *s, const wanted *keys, int num_keys)
{
    skip_blank(s);
    if (s->at >= s->end || s->text[s->at++] != '{')
        return false;
    for (;;) {
        skip_blank(s);
        if (s->at < s->end && s->text[s->at] == '}') {
            s->at++;
            return true;
        }
        int64_t key = s->at + 1;
        if (s->at >= s->end || s->text[s->at] != '"' || !skip_string(s))
            return false;
        int64_t key_len = s->at - 1 - key;
        const wanted *found = NULL;
        for (int i = 0; i < num_keys; i++)
            if ((int64_t)strlen(keys[i].key) == key_len &&
                memcmp(keys[i].key, s->text + key, (size_t)key_len) == 0)
                found = &keys[i];
        skip_blank(s);
        if (s->at >= s->end || s->text[s->at++] != ':' || !find_value(s, found))
            return false;
        skip_blank(s);
        if (s->at < s->end && s->text[s->at] == ',')
            s->at++;
    }
}

bool ith_scan_find(const char *text, int64_t len, ith_span *vocab, ith_span *merges)
{
    *vocab = *merges = (ith_span){0};
    ith_span model = {0};
    scanner s = {.text = text, .end = len};
    if (len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        s.at = 3;
    const wanted inner[] = {{"vocab", vocab, NULL, 0}, {"merges", merges, NULL, 0}};
    const wanted top = {"model", &model, inner, 2};
    return find_keys(&s, &top, 1);
}

int64_t ith_scan_count(const char *text, ith_span span)
{
    int64_t count = 1, depth = 0;
    scanner s = {.text = text, .at = span.begin, .end = span.end};
    while (s.at < s.end) {
        char c = text[s.at];
        if (c == '"') {
            if (!skip_string(&s))
                break;
            continue;
        }
        depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
        count += c == ',' && depth == 1;
        s.at++;
    }
    return count;
}

/* Puts "file:line:column" before the text of a failure at byte `at`. */
static ith_status fail_at(const scanner *s, int64_t at, ith_status status)
{
    int64_t line = 1, begin = 0;
    for (int64_t i = 0; i < at; i++)
        if (s->text[i] == '\n') {
            line++;
            begin = i + 1;
        }
    return ith_wrap(s->err, status, "%s:%lld:%lld", s->name, (long long)line,
                    (long long)(at - begin + 1));
}

static ith_status expected(const scanner *s, const char *what)
{
    ith_fail(s->err, ITH_ERR_FORMAT, "expected %s", what);
    return fail_at(s, s->at < s->end ? s->at : s->end, ITH_ERR_FORMAT);
}

static bool accept(scanner *s, char c)
{
    skip_blank(s);
    if (s->at >= s->end || s->text[s->at] != c)
        return false;
    s->at++;
    return true;
}

static int hex4(const scanner *s, int64_t at)
{
    int value = 0;
    if (at + 4 > s->end)
        return -1;
    for (int64_t i = at; i < at + 4; i++) {
        char c = s->text[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* The escape at s->at (a backslash) into scratch. */
static ith_status read_escape(scanner *s)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    char c = s->at + 1 < s->end ? s->text[s->at + 1] : '\0';
    const char *found = c ? strchr(names, c) : NULL;
    if (found) {
        ith_buf_putc(&s->scratch, values[found - names]);
        s->at += 2;
        return ITH_OK;
    }
    int code = c == 'u' ? hex4(s, s->at + 2) : -1;
    uint32_t value = (uint32_t)code;
    int64_t used = 6;
    if (code >= 0xd800 && code <= 0xdbff && s->at + 7 < s->end && s->text[s->at + 6] == '\\' &&
        s->text[s->at + 7] == 'u') {
        int low = hex4(s, s->at + 8);
        if (low >= 0xdc00 && low <= 0xdfff) {
            value = 0x10000 + ((uint32_t)(code - 0xd800) << 10) + (uint32_t)(low - 0xdc00);
            used = 12;
        }
    }
    if (code < 0 || (value >= 0xd800 && value <= 0xdfff))
        return expected(s, "an escape of JSON");
    char out[4];
    ith_buf_append(&s->scratch, out, ith_utf8_encode(value, out));
    s->at += used;
    return ITH_OK;
}

/* A string; *out points into the text, or into scratch when it has escapes. */
static ith_status read_string(scanner *s, const char **out, int64_t *len)
{
    if (!accept(s, '"'))
        return expected(s, "a string");
    int64_t begin = s->at, copied = begin;
    ith_buf_clear(&s->scratch);
    while (s->at < s->end && s->text[s->at] != '"') {
        unsigned char c = (unsigned char)s->text[s->at];
        if (c == '\\') {
            ith_buf_append(&s->scratch, s->text + copied, s->at - copied);
            ITH_TRY(read_escape(s));
            copied = s->at;
            continue;
        }
        uint32_t code = 0;
        int step =
            c >= 0x80 ? ith_utf8_decode(s->text + s->at, s->text + s->end, &code) : c >= 0x20;
        if (step == 0)
            return expected(s, c < 0x20 ? "no control character in a string" : "UTF-8");
        s->at += step;
    }
    if (s->at >= s->end)
        return expected(s, "a closing quote");
    if (copied > begin) {
        ith_buf_append(&s->scratch, s->text + copied, s->at - copied);
        ITH_TRY(ith_buf_check(&s->scratch, "a string", s->err));
        *out = s->scratch.data;
        *len = s->scratch.len;
    } else {
        *out = s->text + begin;
        *len = s->at - begin;
    }
    s->at++;
    return ITH_OK;
}

static ith_status read_id(scanner *s, int64_t *out)
{
    skip_blank(s);
    int64_t value = 0, begin = s->at;
    while (s->at < s->end && s->text[s->at] >= '0' && s->text[s->at] <= '9' && value < INT32_MAX)
        value = value * 10 + (s->text[s->at++] - '0');
    if (s->at == begin || value > INT32_MAX)
        return expected(s, "a token id");
    *out = value;
    return ITH_OK;
}

static ith_status vocab_entries(scanner *s, ith_vocab *v)
{
    if (!accept(s, '{'))
        return expected(s, "an object of tokens and ids");
    if (accept(s, '}'))
        return ITH_OK;
    do {
        const char *spelling = NULL;
        int64_t len = 0, id = 0;
        skip_blank(s);
        int64_t at = s->at;
        ITH_TRY(read_string(s, &spelling, &len));
        if (!accept(s, ':'))
            return expected(s, "':'");
        ITH_TRY(read_id(s, &id));
        ith_status status = ith_vocab_add(v, spelling, len, id, s->err);
        if (status != ITH_OK)
            return fail_at(s, at, status);
    } while (accept(s, ','));
    return accept(s, '}') ? ITH_OK : expected(s, "',' or '}'");
}

/* "a b" or ["a", "b"]. */
static ith_status merge_entry(scanner *s, ith_vocab *v)
{
    const char *left = NULL, *right = NULL;
    int64_t left_len = 0, right_len = 0;
    skip_blank(s);
    int64_t at = s->at;
    ith_buf first = {0};
    ith_status status = ITH_OK;
    if (accept(s, '[')) {
        ITH_TRY_OUT(read_string(s, &left, &left_len));
        if (left == s->scratch.data) { /* the second string would overwrite it */
            ith_buf_append(&first, left, left_len);
            ITH_TRY_OUT(ith_buf_check(&first, "a merge", s->err));
            left = first.data;
        }
        ITH_TRY_OUT(accept(s, ',') ? ITH_OK : expected(s, "','"));
        ITH_TRY_OUT(read_string(s, &right, &right_len));
        ITH_TRY_OUT(accept(s, ']') ? ITH_OK : expected(s, "']'"));
    } else {
        ITH_TRY_OUT(read_string(s, &left, &left_len));
        ITH_ASSERT(left);
        right = memchr(left, ' ', (size_t)left_len);
        if (!right || memchr(right + 1, ' ', (size_t)(left + left_len - right - 1))) {
            ith_fail(s->err, ITH_ERR_FORMAT, "a merge is two tokens with one space between");
            status = fail_at(s, at, ITH_ERR_FORMAT);
            goto out;
        }
        right_len = left + left_len - ++right;
        left_len = right - 1 - left;
    }
    status = ith_vocab_add_merge(v, left, left_len, right, right_len, s->err);
    if (status != ITH_OK)
        fail_at(s, at, status);
out:
    ith_buf_deinit(&first);
    return status;
}

static ith_status merge_entries(scanner *s, ith_vocab *v)
{
    if (!accept(s, '['))
        return expected(s, "an array of merges");
    if (accept(s, ']'))
        return ITH_OK;
    do
        ITH_TRY(merge_entry(s, v));
    while (accept(s, ','));
    return accept(s, ']') ? ITH_OK : expected(s, "',' or ']'");
}

ith_status ith_scan_vocab(ith_vocab *v, const char *text, ith_span span, const char *name,
                          ith_error *err)
{
    scanner s = {.text = text, .at = span.begin, .end = span.end, .name = name, .err = err};
    ith_status status = vocab_entries(&s, v);
    ith_buf_deinit(&s.scratch);
    return status;
}

ith_status ith_scan_merges(ith_vocab *v, const char *text, ith_span span, const char *name,
                           ith_error *err)
{
    scanner s = {.text = text, .at = span.begin, .end = span.end, .name = name, .err = err};
    ith_status status = merge_entries(&s, v);
    ith_buf_deinit(&s.scratch);
    return status;
}
