/* config_values.c - values of the rows of the key table: from nodes that were given, or defaults.
 */
#include "config/config_load.h"

#include "config/yaml_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

static ith_status out_of_memory(config_loader *l)
{
    return ith_fail(l->err, ITH_ERR_MEMORY, "out of memory while reading the configuration");
}

static ith_status fail_type(const ith_yaml_node *node, int idx, ith_error *err)
{
    char found[80], wanted[400];
    return ith_yaml_fail(node, err, "%s: found %s (use %s)", ith_config_rows[idx].name,
                         ith_yaml_describe(node, found, sizeof found),
                         ith_config_key_type(idx, wanted, sizeof wanted));
}

static bool in_range(const config_row *row, double value)
{
    return (row->min_open ? value > row->min : value >= row->min) &&
           (row->max_open ? value < row->max : value <= row->max);
}

static int find_word(const char *words, const char *text, size_t text_len)
{
    int len = 0;
    for (int i = 0;; i++) {
        const char *word = ith_word(words, i, &len);
        if (!word)
            return -1;
        if (*word != '-' && (size_t)len == text_len && memcmp(word, text, text_len) == 0)
            return i;
    }
}

static bool is_scalar(const ith_yaml_node *node)
{
    return node->kind == ITH_YAML_SCALAR && (int64_t)strlen(node->text) == node->len;
}

ith_status ith_config_copy_text(config_loader *l, const char *text, size_t len, const char **out)
{
    *out = ith_arena_strndup(&l->origin->arena, text, (int64_t)len);
    return *out ? ITH_OK : out_of_memory(l);
}

static bool read_int(const config_row *row, const ith_yaml_node *node, int64_t *out)
{
    int64_t value = 0;
    if (ith_yaml_get_int(node, "", INT64_MIN, INT64_MAX, &value, NULL) != ITH_OK ||
        !in_range(row, (double)value))
        return false;
    if (row->words) { /* a set of integers */
        char digits[32];
        int len = snprintf(digits, sizeof digits, "%lld", (long long)value);
        if (find_word(row->words, digits, (size_t)len) < 0)
            return false;
    }
    *out = value;
    return true;
}

/* 16GiB, 4GB, 512 MB, 1.5TiB, 4096 -> bytes. */
static bool read_size(const config_row *row, const ith_yaml_node *node, int64_t *out)
{
    static const struct {
        const char *unit;
        double bytes;
    } units[] = {{"", 1},      {"b", 1},        {"kb", 1e3},     {"mb", 1e6},     {"gb", 1e9},
                 {"tb", 1e12}, {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30}, {"tib", 0x1p40}};
    if (!is_scalar(node))
        return false;
    size_t digits = strspn(node->text, "0123456789.");
    char number[64];
    double value = 0;
    if (digits == 0 || digits >= sizeof number)
        return false;
    memcpy(number, node->text, digits);
    number[digits] = '\0';
    if (!ith_yaml_parse_float(number, &value))
        return false;
    const char *unit = node->text + digits;
    unit += strspn(unit, " ");
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (strcasecmp(unit, units[i].unit) == 0) {
            value *= units[i].bytes;
            if (!in_range(row, value))
                return false;
            *out = (int64_t)value;
            return true;
        }
    return false;
}

static bool read_flags(const config_row *row, const ith_yaml_node *node, int64_t *out)
{
    int64_t flags = 0;
    if (is_scalar(node) && (strcmp(node->text, "none") == 0 || ith_yaml_is_null(node))) {
        *out = 0;
        return true;
    }
    for (int64_t i = 0; i < (node->kind == ITH_YAML_SEQ ? node->count : 1); i++) {
        const ith_yaml_node *item = node->kind == ITH_YAML_SEQ ? node->items[i] : node;
        int bit = is_scalar(item) ? find_word(row->words, item->text, strlen(item->text)) : -1;
        if (bit < 0)
            return false;
        flags |= (int64_t)1 << bit;
    }
    *out = flags;
    return true;
}

static bool read_float2(const config_row *row, const ith_yaml_node *node, double out[2])
{
    double values[2] = {0, 0};
    if (node->kind != ITH_YAML_SEQ || node->count != 2)
        return false;
    for (int i = 0; i < 2; i++)
        if (ith_yaml_get_float(node->items[i], "", -(double)INFINITY, (double)INFINITY, &values[i],
                               NULL) != ITH_OK ||
            !in_range(row, values[i]))
            return false;
    memcpy(out, values, sizeof values);
    return true;
}

/* Items of a sequence, or of one text: at commas for KEY_LIST, as a whole for KEY_PATHS. */
static ith_status read_list(config_loader *l, int idx, const ith_yaml_node *node, ith_error *err,
                            ith_config_list *out)
{
    bool split = ith_config_rows[idx].kind == KEY_LIST && node->kind == ITH_YAML_SCALAR;
    int64_t room = node->kind == ITH_YAML_SEQ ? node->count : 1;
    for (const char *p = node->text; split && *p; p++)
        room += *p == ',';
    ith_config_list list = {0};
    list.items = ith_arena_alloc(&l->origin->arena, room * (int64_t)sizeof *list.items);
    if (!list.items)
        return out_of_memory(l);
    for (int64_t i = 0; node->kind == ITH_YAML_SEQ && i < node->count; i++) {
        const ith_yaml_node *item = node->items[i];
        if (!is_scalar(item) || ith_yaml_is_null(item))
            return fail_type(item, idx, err);
        ITH_TRY(ith_config_copy_text(l, item->text, strlen(item->text), &list.items[list.count++]));
    }
    if (node->kind == ITH_YAML_SEQ) {
        *out = list;
        return ITH_OK;
    }
    if (!is_scalar(node))
        return fail_type(node, idx, err);
    for (const char *p = node->text; *p;) {
        p += strspn(p, " ");
        size_t len = split ? strcspn(p, ",") : strlen(p), used = len;
        while (used > 0 && p[used - 1] == ' ')
            used--;
        if (used > 0)
            ITH_TRY(ith_config_copy_text(l, p, used, &list.items[list.count++]));
        p += len + (p[len] == ',');
    }
    *out = list;
    return ITH_OK;
}

static ith_status read_plugin_name(config_loader *l, int idx, const ith_yaml_node *node,
                                   ith_error *err)
{
    const config_row *row = &ith_config_rows[idx];
    char found[80], wanted[400];
    if (!row->words) {
        const char *name = NULL;
        if (!is_scalar(node) || ith_yaml_is_null(node))
            return ith_yaml_fail(node, err, "%s.name: found %s (use text)", row->name,
                                 ith_yaml_describe(node, found, sizeof found));
        ITH_TRY(ith_config_copy_text(l, node->text, strlen(node->text), &name));
        memcpy(ith_config_field(&l->config, idx), &name, sizeof name);
        return ITH_OK;
    }
    int value = is_scalar(node) ? find_word(row->words, node->text, strlen(node->text)) : -1;
    if (value < 0) {
        const char *type = ith_config_key_type(idx, wanted, sizeof wanted);
        const char *colon = strchr(type, ':');
        return ith_yaml_fail(node, err, "%s.name: found %s (use%s)", row->name,
                             ith_yaml_describe(node, found, sizeof found),
                             colon ? colon + 1 : " a name");
    }
    memcpy(ith_config_field(&l->config, idx), &value, sizeof value);
    return ITH_OK;
}

static ith_status read_null(config_loader *l, int idx, const ith_yaml_node *node, ith_error *err)
{
    const config_row *row = &ith_config_rows[idx];
    void *field = ith_config_field(&l->config, idx);
    if (!row->nullable)
        return fail_type(node, idx, err);
    if (row->kind == KEY_INT || row->kind == KEY_SIZE) {
        *(int64_t *)field = ITH_CONFIG_UNSET;
    } else if (row->kind == KEY_FLOAT) {
        *(double *)field = (double)NAN;
    } else if (row->kind == KEY_TEXT) {
        const char *none = NULL;
        memcpy(field, &none, sizeof none);
    } else if (row->kind == KEY_ENUM) {
        int unset = -1;
        memcpy(field, &unset, sizeof unset);
    } else if (row->kind == KEY_FLAGS) {
        *(int64_t *)field = 0;
    } else if (row->kind == KEY_LIST || row->kind == KEY_PATHS) {
        *(ith_config_list *)field = (ith_config_list){0};
    }
    return ITH_OK;
}

static ith_status read_value(config_loader *l, int idx, const ith_yaml_node *node, ith_error *err)
{
    const config_row *row = &ith_config_rows[idx];
    void *field = ith_config_field(&l->config, idx);
    const char *text = NULL;
    int word = 0;
    bool ok = false;
    if (row->kind == KEY_PLUGIN)
        return read_plugin_name(l, idx, node, err);
    if (ith_yaml_is_null(node) && !(row->kind == KEY_FLAGS))
        return read_null(l, idx, node, err);
    switch (row->kind) {
    case KEY_BOOL:
        ok = ith_yaml_get_bool(node, "", (bool *)field, NULL) == ITH_OK;
        break;
    case KEY_INT:
        ok = read_int(row, node, (int64_t *)field);
        break;
    case KEY_FLOAT:
        ok = ith_yaml_get_float(node, "", -(double)INFINITY, (double)INFINITY, (double *)field,
                                NULL) == ITH_OK &&
             in_range(row, *(double *)field);
        break;
    case KEY_FLOAT2:
        ok = read_float2(row, node, (double *)field);
        break;
    case KEY_SIZE:
        ok = read_size(row, node, (int64_t *)field);
        break;
    case KEY_FLAGS:
        ok = read_flags(row, node, (int64_t *)field);
        break;
    case KEY_ENUM:
        word = is_scalar(node) ? find_word(row->words, node->text, strlen(node->text)) : -1;
        ok = word >= 0;
        if (ok)
            memcpy(field, &word, sizeof word);
        break;
    case KEY_TEXT:
        ITH_TRY(ith_yaml_get_string(node, row->name, &text, err));
        ITH_TRY(ith_config_copy_text(l, text, strlen(text), &text));
        memcpy(field, &text, sizeof text);
        return ITH_OK;
    case KEY_LIST:
    case KEY_PATHS:
        return read_list(l, idx, node, err, (ith_config_list *)field);
    case KEY_PLUGIN:
        break;
    }
    return ok ? ITH_OK : fail_type(node, idx, err);
}

/* Defaults are YAML texts and take the same way as the user's values. */
static ith_status read_default(config_loader *l, int idx, ith_error *err)
{
    const char *text = ith_config_rows[idx].default_text;
    if (text[0] == '[') {
        ith_yaml yaml = {0};
        ITH_TRY(ith_yaml_parse(&yaml, text, (int64_t)strlen(text), "default", err));
        ith_status status = read_value(l, idx, yaml.root, err);
        ith_yaml_deinit(&yaml);
        return status;
    }
    ith_yaml_node node = {.file = "default", .text = text, .len = (int64_t)strlen(text)};
    ith_yaml_resolve_plain(&node);
    if (ith_config_rows[idx].kind == KEY_PLUGIN && node.type == ITH_YAML_NULL)
        return ITH_OK; /* zero: the "-" word, or no name */
    return read_value(l, idx, &node, err);
}

static ith_status read_row(config_loader *l, int idx)
{
    const config_given *given = &l->origin->given[idx];
    ith_error err = {0};
    ith_status status = ITH_OK;
    if (given->value) {
        status = read_value(l, idx, given->value, &err);
    } else {
        status = read_default(l, idx, &err);
        ITH_ASSERT(status == ITH_OK || status == ITH_ERR_MEMORY);
    }
    if (status == ITH_ERR_MEMORY)
        return ith_fail(l->err, status, "%s",
                        err.text[0] ? err.text : "out of memory while reading the configuration");
    return ith_config_add_problem(&l->problems, given->value, status, &err);
}

/* A key of a map whose name was not given, or names another plugin. Without any name the model may
 * still decide on one (diffusion_config), so the keys have their defaults. */
static ith_status refuse_row(config_loader *l, int idx)
{
    const config_given *given = &l->origin->given[idx];
    const config_row *row = &ith_config_rows[idx];
    int plugin = ith_config_plugin_of(idx);
    const ith_yaml_node *name = l->origin->given[plugin].value;
    bool unnamed = !name && strcmp(ith_config_rows[plugin].default_text, "null") == 0;
    if (!given->value)
        return unnamed ? read_row(l, idx) : ITH_OK;
    ith_error err = {0};
    ith_status status = ITH_OK;
    if (unnamed)
        status = ith_yaml_fail(given->key, &err, "%s: %s has no name (add name: %s)", row->name,
                               ith_config_rows[plugin].name, row->plugins ? row->plugins : "...");
    else
        status = ith_yaml_fail(given->key, &err, "%s: belongs to name: %s, not to %s", row->name,
                               row->plugins ? row->plugins : "...",
                               name ? name->text : ith_config_rows[plugin].default_text);
    return ith_config_add_problem(&l->problems, given->key, status, &err);
}

ith_status ith_config_read_rows(config_loader *l)
{
    for (int i = 0; i < ith_config_num_rows; i++)
        if (ith_config_rows[i].kind == KEY_PLUGIN)
            ITH_TRY(read_row(l, i));
    bool names_ok = l->problems.count == 0;
    for (int i = 0; i < ith_config_num_rows; i++) {
        if (ith_config_rows[i].kind == KEY_PLUGIN)
            continue;
        if (ith_config_row_applies(&l->config, i))
            ITH_TRY(read_row(l, i));
        else if (names_ok)
            ITH_TRY(refuse_row(l, i));
    }
    return ITH_OK;
}
