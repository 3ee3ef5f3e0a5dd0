/* json_rows.c - finds the rows of a JSON or JSON-lines file without parsing them.
 *
 * Invariants:
 *  1. Rows lie inside the file, in order, do not overlap, and are not empty.
 *  2. The scan is linear: each byte is looked at a constant number of times. */
#include "data/json_rows.h"

#include "base/checked.h"
#include "base/file.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

typedef struct {
    int64_t offset, len;
} row_range;

struct ith_rows {
    ith_map map; /* data NULL when the text is the caller's */
    const char *text;
    int64_t len;
    char *name;
    row_range *ranges;
    int64_t count, cap;
};

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* What ends a number or a word outside of strings. */
static bool is_punctuation(char c)
{
    return c == ',' || c == ':' || c == '[' || c == ']' || c == '{' || c == '}' || c == '"';
}

static ith_status add_row(ith_rows *r, const char *begin, const char *end, ith_error *err)
{
    ITH_ASSERT(begin >= r->text && begin < end && end <= r->text + r->len);
    ITH_TRY(ith_grow((void **)&r->ranges, &r->cap, r->count + 1, sizeof *r->ranges, "rows", err));
    r->ranges[r->count++] = (row_range){begin - r->text, end - begin};
    return ITH_OK;
}

static int64_t line_at(const ith_rows *r, const char *at)
{
    int64_t line = 1;
    for (const char *p = r->text; p < at; line++) {
        p = memchr(p, '\n', (size_t)(at - p));
        if (!p)
            break;
        p++;
    }
    return line;
}

/* Bytes from the start of the line, from 1. */
static int64_t column_at(const ith_rows *r, const char *at)
{
    const char *p = at;
    while (p > r->text && p[-1] != '\n')
        p--;
    return at - p + 1;
}

static ith_status fail_at(const ith_rows *r, const char *at, ith_error *err, const char *what)
{
    return ith_fail(err, ITH_ERR_FORMAT, "%s:%lld:%lld: row %lld: %s", r->name,
                    (long long)line_at(r, at), (long long)column_at(r, at), (long long)r->count + 1,
                    what);
}

static ith_status scan_lines(ith_rows *r, const char *p, ith_error *err)
{
    const char *end = r->text + r->len;
    while (p < end) {
        const char *lf = memchr(p, '\n', (size_t)(end - p));
        const char *stop = lf ? lf : end, *next = lf ? lf + 1 : end;
        while (p < stop && is_space(*p))
            p++;
        while (stop > p && is_space(stop[-1]))
            stop--;
        if (p < stop)
            ITH_TRY(add_row(r, p, stop, err));
        p = next;
    }
    return ITH_OK;
}

/* p stands behind an opening quote; returns the place behind the closing one, or NULL. A quote is
 * closing when an even number of backslashes stands before it; these runs do not overlap, so the
 * whole is linear. */
static const char *skip_string(const char *p, const char *end)
{
    const char *begin = p;
    while (p < end && (p = memchr(p, '"', (size_t)(end - p))) != NULL) {
        const char *q = p;
        while (q > begin && q[-1] == '\\')
            q--;
        if ((p - q) % 2 == 0)
            return p + 1;
        p++;
    }
    return NULL;
}

/* The place behind the value that begins at p, or NULL when it does not end. Brackets are counted
 * together: which closes which is for the parser to judge. */
static const char *skip_value(const char *p, const char *end)
{
    int64_t depth = 0;
    do {
        if (*p == '"') {
            p = skip_string(p + 1, end);
            if (!p)
                return NULL;
        } else if (*p == '{' || *p == '[') {
            depth++;
            p++;
        } else if (*p == '}' || *p == ']') {
            depth--;
            p++;
        } else if (depth > 0) {
            p++;
        } else {
            while (p < end && !is_space(*p) && !is_punctuation(*p))
                p++;
            return p;
        }
    } while (depth > 0 && p < end);
    return depth > 0 ? NULL : p;
}

static const char *skip_space(const char *p, const char *end)
{
    while (p < end && is_space(*p))
        p++;
    return p;
}

/* Elements of the array whose '[' is at p. */
static ith_status scan_array(ith_rows *r, const char *p, ith_error *err)
{
    const char *end = r->text + r->len;
    p = skip_space(p + 1, end);
    while (p < end && *p != ']') {
        if (*p == ',' || *p == ':' || *p == '}')
            return fail_at(r, p, err, "expected a JSON object");
        const char *stop = skip_value(p, end);
        if (!stop)
            return fail_at(r, p, err, "is not closed before the end of the file");
        ITH_TRY(add_row(r, p, stop, err));
        p = skip_space(stop, end);
        if (p < end && *p == ',') {
            p = skip_space(p + 1, end);
            if (p < end && *p == ']')
                return fail_at(r, p, err, "expected a JSON object after the comma");
        } else if (p < end && *p != ']') {
            return fail_at(r, p, err, "expected ',' or ']'");
        }
    }
    if (p >= end)
        return fail_at(r, p, err, "the array is not closed: the file seems cut off");
    p = skip_space(p + 1, end);
    return p == end ? ITH_OK : fail_at(r, p, err, "text after the end of the array");
}

/* Values that follow each other, white space between: JSON lines, or objects over many lines. */
static ith_status scan_values(ith_rows *r, const char *p, ith_error *err)
{
    const char *end = r->text + r->len;
    for (p = skip_space(p, end); p < end; p = skip_space(p, end)) {
        if (*p != '{')
            return fail_at(r, p, err, "expected a JSON object");
        const char *stop = skip_value(p, end);
        if (!stop)
            return fail_at(r, p, err, "is not closed before the end of the file");
        ITH_TRY(add_row(r, p, stop, err));
        p = stop;
    }
    return ITH_OK;
}

static ith_status scan(ith_rows *r, bool lines, ith_error *err)
{
    const char *p = r->text, *end = r->text + r->len;
    if (r->len >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0)
        p += 3;
    const char *first = skip_space(p, end);
    if (first < end && *first == '[')
        return scan_array(r, first, err);
    return lines ? scan_lines(r, p, err) : scan_values(r, p, err);
}

static bool has_suffix(const char *path, const char *suffix)
{
    size_t n = strlen(path), m = strlen(suffix);
    return n > m && strcasecmp(path + n - m, suffix) == 0;
}

static ith_status check_suffix(const char *path, bool *lines, ith_error *err)
{
    static const char *const tables[] = {".csv", ".tsv", ".parquet", ".arrow", ".feather"};
    *lines = has_suffix(path, ".jsonl") || has_suffix(path, ".ndjson");
    if (*lines || has_suffix(path, ".json"))
        return ITH_OK;
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        if (has_suffix(path, tables[i]))
            return ith_fail(err, ITH_ERR_UNSUPPORTED,
                            "%s: %s files are not read: convert it to .jsonl, one object per line",
                            path, tables[i]);
    if (has_suffix(path, ".gz") || has_suffix(path, ".zst") || has_suffix(path, ".bz2") ||
        has_suffix(path, ".zip"))
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "%s: compressed files are not read: unpack it first", path);
    if (has_suffix(path, ".txt"))
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "%s: raw text is for pre-training; fine-tuning needs conversations in "
                        ".json or .jsonl",
                        path);
    return ith_fail(err, ITH_ERR_USAGE, "%s: unknown kind of file (use .json or .jsonl)", path);
}

static ith_status rows_create(ith_rows **out, const char *name, ith_error *err)
{
    ith_rows *r = NULL;
    ITH_TRY(ith_alloc_zero((void **)&r, 1, sizeof *r, "rows", err));
    r->name = ith_strndup(name, (int64_t)strlen(name));
    if (!r->name) {
        ith_rows_close(r);
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", name);
    }
    *out = r;
    return ITH_OK;
}

/* The table grew by doubling; what is open for the whole run should not hold twice its size. */
static void trim_table(ith_rows *r)
{
    row_range *trimmed = r->count && r->count < r->cap
                             ? ith_realloc(r->ranges, r->count * (int64_t)sizeof *r->ranges)
                             : NULL;
    if (trimmed) {
        r->ranges = trimmed;
        r->cap = r->count;
    }
}

ith_status ith_rows_open_text(ith_rows **out, const char *text, int64_t len, const char *name,
                              bool lines, ith_error *err)
{
    ITH_ASSERT(len >= 0 && (text || len == 0));
    ith_rows *r = NULL;
    ITH_TRY(rows_create(&r, name, err));
    r->text = text ? text : "";
    r->len = len;
    ith_status status = scan(r, lines, err);
    if (status != ITH_OK) {
        ith_rows_close(r);
        return status;
    }
    *out = r;
    return ITH_OK;
}

ith_status ith_rows_open(ith_rows **out, const char *path, ith_error *err)
{
    bool lines = false;
    ITH_TRY(check_suffix(path, &lines, err));
    ith_rows *r = NULL;
    ITH_TRY(rows_create(&r, path, err));
    ith_status status = ith_map_open(&r->map, path, err);
    if (status == ITH_OK) {
        r->text = r->map.data;
        r->len = r->map.size;
        status = scan(r, lines, err);
    }
    if (status != ITH_OK) {
        ith_rows_close(r);
        return status;
    }
    trim_table(r);
    *out = r;
    return ITH_OK;
}

void ith_rows_close(ith_rows *rows)
{
    if (!rows)
        return;
    ith_map_close(&rows->map);
    ith_free(rows->ranges);
    ith_free(rows->name);
    ith_free(rows);
}

int64_t ith_rows_count(const ith_rows *rows)
{
    return rows->count;
}

int64_t ith_rows_bytes(const ith_rows *rows)
{
    return rows->len;
}

const char *ith_rows_name(const ith_rows *rows)
{
    return rows->name;
}

const char *ith_rows_text(const ith_rows *rows, int64_t i, int64_t *len)
{
    ITH_ASSERT(i >= 0 && i < rows->count);
    *len = rows->ranges[i].len;
    return rows->text + rows->ranges[i].offset;
}

int64_t ith_rows_line(const ith_rows *rows, int64_t i)
{
    ITH_ASSERT(i >= 0 && i < rows->count);
    return line_at(rows, rows->text + rows->ranges[i].offset);
}

const char *ith_rows_where(const ith_rows *rows, int64_t i, char *buf, size_t size)
{
    snprintf(buf, size, "%s: row %lld (line %lld)", rows->name, (long long)i + 1,
             (long long)ith_rows_line(rows, i));
    return buf;
}

/* Turns ":LINE:COLUMN: text" of the row alone into a place in the file. */
static ith_status syntax_error(const ith_rows *rows, int64_t i, const ith_error *inner,
                               ith_error *err)
{
    const char *at = rows->text + rows->ranges[i].offset;
    int line = 1, column = 1, used = 0;
    /* NOLINTNEXTLINE(cert-err34-c): numbers that we wrote ourselves */
    if (sscanf(inner->text, ":%d:%d: %n", &line, &column, &used) < 2)
        return ith_fail(err, inner->status, "%s: %s", rows->name, inner->text);
    int64_t file_column = line == 1 ? column_at(rows, at) + column - 1 : column;
    return ith_fail(err, inner->status, "%s:%lld:%lld: row %lld: %s", rows->name,
                    (long long)line_at(rows, at) + line - 1, (long long)file_column,
                    (long long)i + 1, inner->text + used);
}

ith_status ith_rows_parse(const ith_rows *rows, int64_t i, json_t **out, ith_error *err)
{
    int64_t len = 0;
    const char *text = ith_rows_text(rows, i, &len);
    if (len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "%s:%lld: row %lld begins with a byte order mark, which may stand at the "
                        "start of the file only",
                        rows->name, (long long)ith_rows_line(rows, i), (long long)i + 1);
    json_t *row = NULL;
    ith_error inner = {0};
    if (ith_json_parse(&row, text, len, "", &inner) != ITH_OK)
        return syntax_error(rows, i, &inner, err);
    if (!json_is_object(row)) {
        const char *found = ith_json_type_name(row);
        json_decref(row);
        return ith_fail(err, ITH_ERR_FORMAT, "%s:%lld: row %lld: found %s, expected a JSON object",
                        rows->name, (long long)ith_rows_line(rows, i), (long long)i + 1, found);
    }
    *out = row;
    return ITH_OK;
}
