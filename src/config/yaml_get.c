/* yaml_get.c - typed values out of a YAML tree, with positions in every complaint. */
#include "base/checked.h"
#include "base/utf8.h"
#include "config/yaml_internal.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

const ith_yaml_node *ith_yaml_find(const ith_yaml_node *map, const char *key)
{
    ITH_ASSERT(map->kind == ITH_YAML_MAP);
    for (int64_t i = 0; i < map->count; i++)
        if (strcmp(map->pairs[i].key->text, key) == 0)
            return map->pairs[i].value;
    return NULL;
}

bool ith_yaml_is_null(const ith_yaml_node *node)
{
    return node->kind == ITH_YAML_SCALAR && node->type == ITH_YAML_NULL;
}

ith_status ith_yaml_fail(const ith_yaml_node *node, ith_error *err, const char *fmt, ...)
{
    char text[ITH_ERROR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (node->line == 0)
        return ith_fail(err, ITH_ERR_USAGE, "%s: %s", node->file, text);
    return ith_fail(err, ITH_ERR_USAGE, "%s:%d:%d: %s", node->file, node->line, node->column, text);
}

const char *ith_yaml_describe(const ith_yaml_node *node, char *buf, size_t size)
{
    enum { SHOWN_BYTES = 40 };
    if (node->kind == ITH_YAML_MAP || node->kind == ITH_YAML_SEQ) {
        snprintf(buf, size, "%s", node->kind == ITH_YAML_MAP ? "a map" : "a list");
        return buf;
    }
    if (node->type == ITH_YAML_NULL) {
        snprintf(buf, size, "nothing (null)");
        return buf;
    }
    /* Cut at a code point, and keep the message on one line. */
    char shown[SHOWN_BYTES + 4] = {0};
    int len = 0;
    for (const char *p = node->text, *end = p + node->len; p < end;) {
        uint32_t c = 0;
        int bytes = ith_utf8_decode(p, end, &c);
        if (bytes == 0 || len + bytes > SHOWN_BYTES) {
            memcpy(shown + len, "...", 3);
            break;
        }
        if (c < 0x20 || c == 0x7f)
            shown[len] = ' ';
        else
            memcpy(shown + len, p, (size_t)bytes);
        len += bytes;
        p += bytes;
    }
    if (node->type == ITH_YAML_STR)
        snprintf(buf, size, "text '%s'", shown);
    else
        snprintf(buf, size, "%s", shown);
    return buf;
}

static ith_status fail_wanted(const ith_yaml_node *node, const char *what, const char *wanted,
                              ith_error *err)
{
    char found[80];
    return ith_yaml_fail(node, err, "%s: found %s (use %s)", what,
                         ith_yaml_describe(node, found, sizeof found), wanted);
}

ith_status ith_yaml_get_bool(const ith_yaml_node *node, const char *what, bool *out, ith_error *err)
{
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on"};
    if (node->kind == ITH_YAML_SCALAR && node->type == ITH_YAML_BOOL) {
        *out = node->bool_value;
        return ITH_OK;
    }
    if (node->kind == ITH_YAML_SCALAR && node->quoted)
        for (int i = 0; i < 6; i++)
            if (strcasecmp(node->text, words[i]) == 0) {
                *out = i % 2 == 1;
                return ITH_OK;
            }
    return fail_wanted(node, what, "true or false", err);
}

ith_status ith_yaml_get_int(const ith_yaml_node *node, const char *what, int64_t min, int64_t max,
                            int64_t *out, ith_error *err)
{
    char wanted[96];
    if (min == INT64_MIN && max == INT64_MAX)
        snprintf(wanted, sizeof wanted, "an integer");
    else if (max == INT64_MAX)
        snprintf(wanted, sizeof wanted, "an integer >= %lld", (long long)min);
    else
        snprintf(wanted, sizeof wanted, "an integer from %lld to %lld", (long long)min,
                 (long long)max);
    ith_yaml_node value = *node;
    if (node->kind == ITH_YAML_SCALAR && node->quoted)
        ith_yaml_resolve_plain(&value);
    if (value.kind != ITH_YAML_SCALAR || value.type != ITH_YAML_INT || value.int_value < min ||
        value.int_value > max)
        return fail_wanted(node, what, wanted, err);
    *out = value.int_value;
    return ITH_OK;
}

ith_status ith_yaml_get_float(const ith_yaml_node *node, const char *what, double min, double max,
                              double *out, ith_error *err)
{
    char wanted[96];
    bool any_min = min<-1e300, any_max = max> 1e300;
    if (any_min && any_max)
        snprintf(wanted, sizeof wanted, "a number");
    else if (any_max)
        snprintf(wanted, sizeof wanted, "a number >= %g", min);
    else
        snprintf(wanted, sizeof wanted, "a number from %g to %g", min, max);
    double value = 0;
    bool is_number = false;
    if (node->kind == ITH_YAML_SCALAR && node->type == ITH_YAML_INT) {
        value = node->float_value;
        is_number = true;
    } else if (node->kind == ITH_YAML_SCALAR && node->type != ITH_YAML_NULL &&
               node->type != ITH_YAML_BOOL && (int64_t)strlen(node->text) == node->len) {
        is_number = ith_yaml_parse_float(node->text, &value);
    }
    if (!is_number || value < min || value > max)
        return fail_wanted(node, what, wanted, err);
    *out = value;
    return ITH_OK;
}

ith_status ith_yaml_get_string(const ith_yaml_node *node, const char *what, const char **out,
                               ith_error *err)
{
    if (node->kind != ITH_YAML_SCALAR || node->type == ITH_YAML_NULL)
        return fail_wanted(node, what, "text", err);
    if ((int64_t)strlen(node->text) != node->len)
        return ith_yaml_fail(node, err, "%s: found a NUL character (remove it)", what);
    *out = node->text;
    return ITH_OK;
}

ith_status ith_yaml_get_map(const ith_yaml_node *node, const char *what, ith_error *err)
{
    return node->kind == ITH_YAML_MAP ? ITH_OK : fail_wanted(node, what, "a map", err);
}

ith_status ith_yaml_get_seq(const ith_yaml_node *node, const char *what, ith_error *err)
{
    return node->kind == ITH_YAML_SEQ ? ITH_OK : fail_wanted(node, what, "a list", err);
}

ith_status ith_yaml_check_keys(const ith_yaml_node *map, const char *what, const char *const *names,
                               int num_names, ith_error *err)
{
    ITH_TRY(ith_yaml_get_map(map, what ? what : "this file", err));
    for (int64_t i = 0; i < map->count; i++) {
        const ith_yaml_node *key = map->pairs[i].key;
        bool known = false;
        for (int k = 0; k < num_names && !known; k++)
            known = strcmp(names[k], key->text) == 0;
        if (known)
            continue;
        const char *near = ith_nearest_name(key->text, names, num_names);
        const char *dot = what ? "." : "";
        if (near)
            return ith_yaml_fail(key, err, "%s%s%.60s: unknown key (did you mean %s?)",
                                 what ? what : "", dot, key->text, near);
        return ith_yaml_fail(key, err, "%s%s%.60s: unknown key", what ? what : "", dot, key->text);
    }
    return ITH_OK;
}

void ith_yaml_write_string(ith_buf *out, const char *text)
{
    static const char safe[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-";
    int64_t len = (int64_t)strlen(text);
    ith_yaml_node node = {.text = text, .len = len};
    double number = 0;
    ith_yaml_resolve_plain(&node);
    if (node.type == ITH_YAML_STR && text[strspn(text, safe)] == '\0' && text[0] != '-' &&
        !ith_yaml_parse_float(text, &number)) {
        ith_buf_puts(out, text);
        return;
    }
    ith_buf_putc(out, '"');
    for (const char *p = text, *end = text + len; p < end;) {
        uint32_t c = 0;
        int bytes = ith_utf8_decode(p, end, &c);
        if (bytes == 0) { /* not UTF-8: keep the byte visible rather than write a broken file */
            c = 0xfffd;
            bytes = 1;
        }
        if (c == '"' || c == '\\')
            ith_buf_printf(out, "\\%c", (char)c);
        else if (c == '\n')
            ith_buf_puts(out, "\\n");
        else if (c < 0x20 || (c >= 0x7f && c < 0xa0))
            ith_buf_printf(out, "\\x%02x", (unsigned)c);
        else if (c == 0x2028 || c == 0x2029 || c == 0xfeff || c == 0xffff || c == 0xfffe)
            ith_buf_printf(out, "\\U%08x", (unsigned)c);
        else
            ith_buf_append(out, p, bytes);
        p += bytes;
    }
    ith_buf_putc(out, '"');
}

/* Edit distance with swaps of neighbours (optimal string alignment), words of at most 63 bytes. */
static int edit_distance(const char *a, int a_len, const char *b, int b_len)
{
    int rows[3][64];
    int *before = rows[0], *last = rows[1], *now = rows[2];
    for (int j = 0; j <= b_len; j++)
        last[j] = j;
    for (int i = 1; i <= a_len; i++) {
        now[0] = i;
        for (int j = 1; j <= b_len; j++) {
            int best = last[j - 1] + (a[i - 1] != b[j - 1]);
            if (last[j] + 1 < best)
                best = last[j] + 1;
            if (now[j - 1] + 1 < best)
                best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            now[j] = best;
        }
        int *spare = before;
        before = last;
        last = now;
        now = spare;
    }
    return last[b_len];
}

const char *ith_nearest_name(const char *word, const char *const *names, int num_names)
{
    const char *best = NULL;
    size_t word_len = strlen(word);
    if (word_len == 0 || word_len > 63)
        return NULL;
    int best_distance = 1 + (int)word_len / 3;
    for (int i = 0; i < num_names; i++) {
        size_t len = strlen(names[i]);
        if (len == 0 || len > 63)
            continue;
        int distance = edit_distance(word, (int)word_len, names[i], (int)len);
        if (distance < best_distance) {
            best = names[i];
            best_distance = distance;
        }
    }
    return best;
}
