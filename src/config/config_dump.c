/* config_dump.c - the config as YAML and the key table as a page. */
#include "config/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Shortest decimal that reads back as the same double; with a point, so that YAML 1.1 readers take
 * it for a number. */
static void write_double(double value, ith_buf *out)
{
    char text[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    const char *exponent = strchr(text, 'e');
    if (strchr(text, '.'))
        ith_buf_puts(out, text);
    else if (exponent)
        ith_buf_printf(out, "%.*s.0%s", (int)(exponent - text), text, exponent);
    else
        ith_buf_printf(out, "%s.0", text);
}

static void write_list(const ith_config_list *list, bool nullable, ith_buf *out)
{
    if (list->count == 0 && nullable) {
        ith_buf_puts(out, "null");
        return;
    }
    ith_buf_putc(out, '[');
    for (int64_t i = 0; i < list->count; i++) {
        ith_buf_puts(out, i ? ", " : "");
        ith_yaml_write_string(out, list->items[i]);
    }
    ith_buf_putc(out, ']');
}

static void write_flags(const config_row *row, int64_t flags, ith_buf *out)
{
    int len = 0, shown = 0;
    ith_buf_putc(out, '[');
    for (int i = 0;; i++) {
        const char *word = ith_word(row->words, i, &len);
        if (!word)
            break;
        if (flags >> i & 1)
            ith_buf_printf(out, "%s%.*s", shown++ ? ", " : "", len, word);
    }
    ith_buf_putc(out, ']');
}

static void write_text(const char *text, ith_buf *out)
{
    if (text)
        ith_yaml_write_string(out, text);
    else
        ith_buf_puts(out, "null");
}

static void write_enum(const config_row *row, const void *field, ith_buf *out)
{
    int value = 0, len = 0;
    const char *word = NULL;
    if (row->words) {
        memcpy(&value, field, sizeof value);
        word = value >= 0 ? ith_word(row->words, value, &len) : NULL;
        ith_buf_printf(out, "%.*s", word && *word != '-' ? len : 4,
                       word && *word != '-' ? word : "null");
    } else {
        memcpy(&word, field, sizeof word);
        write_text(word, out);
    }
}

void ith_config_write_value(const ith_config *config, int idx, ith_buf *out)
{
    const config_row *row = &ith_config_rows[idx];
    const void *field = ith_config_field_const(config, idx);
    const double *numbers = field;
    const char *text = NULL;
    switch (row->kind) {
    case KEY_BOOL:
        ith_buf_puts(out, *(const bool *)field ? "true" : "false");
        break;
    case KEY_INT:
    case KEY_SIZE:
        if (*(const int64_t *)field == ITH_CONFIG_UNSET)
            ith_buf_puts(out, "null");
        else
            ith_buf_printf(out, "%lld", (long long)*(const int64_t *)field);
        break;
    case KEY_FLOAT:
        if (isnan(numbers[0]))
            ith_buf_puts(out, "null");
        else
            write_double(numbers[0], out);
        break;
    case KEY_FLOAT2:
        ith_buf_putc(out, '[');
        write_double(numbers[0], out);
        ith_buf_puts(out, ", ");
        write_double(numbers[1], out);
        ith_buf_putc(out, ']');
        break;
    case KEY_TEXT:
        memcpy(&text, field, sizeof text);
        write_text(text, out);
        break;
    case KEY_ENUM:
    case KEY_PLUGIN:
        write_enum(row, field, out);
        break;
    case KEY_FLAGS:
        write_flags(row, *(const int64_t *)field, out);
        break;
    case KEY_LIST:
    case KEY_PATHS:
        write_list(field, row->nullable, out);
        break;
    }
}

ith_status ith_config_differs(const ith_config *config, int idx, bool *out, ith_error *err)
{
    ith_buf value = {0};
    ith_config_write_value(config, idx, &value);
    ith_status status = ith_buf_check(&value, "configuration", err);
    if (status == ITH_OK)
        *out = strcmp(value.data, ith_config_rows[idx].default_text) != 0;
    ith_buf_deinit(&value);
    return status;
}

/* Whether a key, or one of its map, was given. */
static bool is_given(const ith_config *config, int idx)
{
    bool given = false;
    for (int i = 0; i < ith_config_num_rows; i++)
        given |= (i == idx || ith_config_plugin_of(i) == idx) && config->origin->given[i].value;
    return given;
}

ith_status ith_config_dump(const ith_config *config, bool all, ith_buf *out, ith_error *err)
{
    const char *section = "";
    for (int i = 0; i < ith_config_num_rows; i++) {
        const config_row *row = &ith_config_rows[i];
        if (!ith_config_row_applies(config, i) || !(all || is_given(config, i)))
            continue;
        if (all && strcmp(section, row->section) != 0)
            ith_buf_printf(out, "%s# %s\n", *section ? "\n" : "", row->section);
        section = row->section;
        const char *dot = strchr(row->name, '.');
        if (dot)
            ith_buf_printf(out, "  %s:", dot + 1);
        else
            ith_buf_printf(out, "%s:", row->name);
        ith_buf value = {0};
        ith_config_write_value(config, i, &value);
        bool is_map = row->kind == KEY_PLUGIN && value.data && strcmp(value.data, "null") != 0;
        ith_buf_printf(out, "%s%s\n", is_map ? "\n  name: " : " ", value.data ? value.data : "");
        if (value.failed)
            out->failed = value.failed;
        ith_buf_deinit(&value);
    }
    return ith_buf_check(out, "configuration dump", err);
}

static void write_status(const config_row *row, ith_buf *out)
{
    if (row->status == ITH_KEY_NOT_NEEDED)
        ith_buf_printf(out, " *Not needed: %s.*", row->why);
    else if (row->status == ITH_KEY_NOT_YET)
        ith_buf_printf(out, " *Not built yet: %s.*", row->why);
    if (row->plugins)
        ith_buf_printf(out, " (name: %s)", row->plugins);
}

void ith_config_markdown(ith_buf *out)
{
    ith_buf_puts(
        out,
        "# Configuration keys\n"
        "\n"
        "Generated by `ithaca help --config-markdown` from the key table; do not edit.\n"
        "\n"
        "A configuration is a YAML or JSON file in the LlamaFactory v1 form: flat keys, and maps "
        "with"
        " a `name` for\n"
        "the keys that end in `_config` (a map may also be given as a JSON text). Arguments"
        " `key=value` after the file\n"
        "replace values; `optim_config.beta2=0.95` reaches into a map. `ithaca plan CONFIG` prints"
        " those that were given as they are\n"
        "understood, with `--all-keys` all of them.\n"
        "\n"
        "Files of dFactory and VeOmni (`model: data: train:`) and of TRL (`model_name_or_path`, "
        "with"
        " accelerate's\n"
        "`parallelism_config_*`) are read too, with their own defaults; `plan` shows what became of"
        " them.\n"
        "\n"
        "- A map needs its `name`, except where the default is not null (`optim_config: {beta2: "
        "0.95}`"
        " is adamw).\n"
        "- Unknown keys are errors; with `ALLOW_EXTRA_KEYS=1` unknown top-level keys are ignored.\n"
        "- Numbers may be written in any usual way: `1e-5`, `1.0e-5`, `.1`, `\"1e-5\"`.\n"
        "- A key marked *not needed* is accepted, checked and reported once; it changes nothing.\n"
        "- A key marked *not built yet* is read, and refused when it asks for more than its"
        " default.\n");
    const char *section = "";
    for (int i = 0; i < ith_config_num_rows; i++) {
        const config_row *row = &ith_config_rows[i];
        char type[400];
        if (strcmp(section, row->section) != 0)
            ith_buf_printf(out,
                           "\n## %s\n\n| key | takes | default | meaning |\n"
                           "| --- | --- | --- | --- |\n",
                           row->section);
        section = row->section;
        ith_buf_printf(out, "| `%s` | %s | `%s` | %s", row->name,
                       ith_config_key_type(i, type, sizeof type), row->default_text, row->help);
        write_status(row, out);
        ith_buf_puts(out, " |\n");
    }
}
