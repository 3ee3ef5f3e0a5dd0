/* config.c - from a file and key=value arguments to an ith_config.
 * Steps: parse; tell the dialect; spread the tree over the rows of the key table (later arguments
 * replace earlier values); read every row, given or default (config_values.c); check combinations
 * (config_check.c). User mistakes are collected and reported together, in file order. */
#include "config/config.h"

#include "base/env.h"
#include "base/file.h"
#include "config/config_load.h"
#include "config/yaml_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- problems ---- */

ith_status ith_config_add_problem(config_problems *problems, const ith_yaml_node *where,
                                  ith_status status, ith_error *err)
{
    if (status == ITH_OK)
        return ITH_OK;
    if (status != ITH_ERR_USAGE && status != ITH_ERR_UNSUPPORTED)
        return ith_fail(problems->err, status, "%s", err->text);
    void *items = problems->items;
    ith_error grow_err = {0};
    ith_status grown =
        ith_grow(&items, &problems->cap, problems->count + 1, (int64_t)sizeof *problems->items,
                 "configuration errors", &grow_err);
    problems->items = items;
    char *text = grown == ITH_OK && err ? ith_strndup(err->text, (int64_t)strlen(err->text)) : NULL;
    ith_error_clear(err);
    if (!text)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory while reading the configuration");
    problems->items[problems->count++] =
        (config_problem){where && where->line ? where->line : INT32_MAX,
                         where && where->line ? where->column : 0, text};
    return ITH_OK;
}

static int by_position(const void *a, const void *b)
{
    const config_problem *x = a, *y = b;
    if (x->line != y->line)
        return x->line < y->line ? -1 : 1;
    return x->column < y->column ? -1 : x->column > y->column;
}

/* All problems as one failure, a line each; as many as fit, the rest counted. */
static ith_status report_problems(config_problems *problems, ith_error *err)
{
    if (problems->count == 0)
        return ITH_OK;
    qsort(problems->items, (size_t)problems->count, sizeof *problems->items, by_position);
    ith_buf text = {0};
    int64_t shown = 0;
    for (; shown < problems->count; shown++) {
        const char *line = problems->items[shown].text;
        if (shown && text.len + (int64_t)strlen(line) > ITH_ERROR_TEXT_BYTES - 64)
            break;
        ith_buf_printf(&text, "%s%s", shown ? "\n" : "", line);
    }
    if (shown < problems->count)
        ith_buf_printf(&text, "\n... and %lld more", (long long)(problems->count - shown));
    ith_status status = ith_buf_check(&text, "configuration errors", err);
    if (status == ITH_OK)
        status = ith_fail(err, ITH_ERR_USAGE, "%s", text.data);
    ith_buf_deinit(&text);
    return status;
}

static void free_problems(config_problems *problems)
{
    for (int64_t i = 0; i < problems->count; i++)
        ith_free(problems->items[i].text);
    ith_free(problems->items);
}

/* ---- dialect ---- */

typedef struct {
    const char *key, *kind, *advice;
} foreign_key;

/* Keys that show at once that a file is written for something else. */
static const foreign_key foreign_keys[] = {
    {"finetuning_type", "a LlamaFactory v0 file", "write it with LlamaFactory v1 keys"},
    {"stage", "a LlamaFactory v0 file", "write it with LlamaFactory v1 keys"},
    {"distributed_type", "an accelerate file",
     "it starts programs; its parallelism_config_* sizes go into a TRL file"},
};

static bool has_map(const ith_yaml_node *root, const char *key)
{
    const ith_yaml_node *value = ith_yaml_find(root, key);
    return value && value->kind == ITH_YAML_MAP;
}

/* dFactory and VeOmni files have sections; TRL files name the model as transformers does. */
static const ith_dialect *dialect_of(const ith_yaml_node *root)
{
    if (has_map(root, "model") || has_map(root, "train") || has_map(root, "data"))
        return &ith_dialect_dfactory;
    if (ith_yaml_find(root, "model_name_or_path") || ith_yaml_find(root, "dataset_name"))
        return &ith_dialect_trl;
    return NULL;
}

/* The dialect is told by its keys; the ones that are not read yet end here. */
static ith_status check_dialect(const ith_yaml_node *root, ith_error *err)
{
    for (size_t i = 0; i < sizeof foreign_keys / sizeof *foreign_keys; i++)
        for (int64_t k = 0; k < root->count; k++) {
            const ith_yaml_node *key = root->pairs[k].key;
            if (strcmp(key->text, foreign_keys[i].key) != 0)
                continue;
            ith_yaml_fail(key, err, "%s: this is %s (%s)", key->text, foreign_keys[i].kind,
                          foreign_keys[i].advice);
            if (err)
                err->status = ITH_ERR_UNSUPPORTED;
            return ITH_ERR_UNSUPPORTED;
        }
    return ITH_OK;
}

/* ---- unknown keys ---- */

static const struct {
    const char *from, *to;
} renamed_keys[] = {
    {"evaluation_strategy", "eval_strategy"},
    {"per_device_train_batch_size", "micro_batch_size"},
    {"per_device_eval_batch_size", "micro_batch_size"},
    {"max_seq_length", "cutoff_len"},
    {"max_length", "cutoff_len"},
    {"max_seq_len", "cutoff_len"},
    {"lr", "learning_rate"},
    {"optim_config.lr", "learning_rate"},
    {"lr_scheduler_type", "lr_scheduler_config.name"},
    {"warmup_ratio", "lr_scheduler_config.warmup_ratio"},
    {"warmup_steps", "lr_scheduler_config.warmup_steps"},
    {"adam_beta1", "optim_config.beta1"},
    {"adam_beta2", "optim_config.beta2"},
    {"adam_epsilon", "optim_config.eps"},
    {"weight_decay", "optim_config.weight_decay"},
    {"optim", "optim_config.name"},
    {"gradient_checkpointing", "enable_activation_checkpointing"},
    {"epochs", "num_train_epochs"},
    {"dataset", "train_dataset"},
    {"val_size", "eval_split_ratio"},
    {"dataloader_num_workers", "nproc"},
    {"preprocessing_num_workers", "nproc"},
    {"template", "custom_chat_template"},
    {"packing", "batching_strategy: packing"},
    {"sequence_parallel_size", "cp_size"},
    {"sp_size", "cp_size"},
    {"expert_parallel_size", "ep_size"},
    {"pad_to_multiple_of", "not needed: slices of a sequence need no padding"},
    {"deepspeed", "dist_config: {name: deepspeed, config_file: ...}"},
    {"fp16", "bf16"},
};

static ith_status fail_unknown(const config_loader *l, const ith_yaml_node *key, const char *name,
                               ith_error *err)
{
    const ith_dialect *d = l->dialect;
    for (size_t i = 0; i < sizeof renamed_keys / sizeof *renamed_keys; i++)
        if (strcmp(renamed_keys[i].from, name) == 0)
            return ith_yaml_fail(key, err, "%s: unknown key (here it is %s)", name,
                                 renamed_keys[i].to);
    const char *names[ITH_MAX_CONFIG_KEYS + ITH_MAX_DIALECT_KEYS];
    int num_names = 0;
    for (int i = 0; d && i < d->num_keys; i++)
        names[num_names++] = d->keys[i].name;
    for (int i = 0; i < ith_config_num_rows; i++)
        names[num_names++] = ith_config_rows[i].name;
    const char *near = ith_nearest_name(name, names, num_names);
    if (near)
        return ith_yaml_fail(key, err, "%.80s: unknown key (did you mean %s?)", name, near);
    return ith_yaml_fail(key, err, "%.80s: unknown key (docs/config.md lists all)", name);
}

/* ---- spreading the tree over the rows ---- */

/* Takes over *yaml, also when it fails. */
static ith_status keep_yaml(config_loader *l, ith_yaml *yaml)
{
    struct ith_config_origin *origin = l->origin;
    void *extra = origin->extra;
    ith_status status = ith_grow(&extra, &origin->cap_extra, origin->num_extra + 1,
                                 (int64_t)sizeof *origin->extra, "configuration", l->err);
    origin->extra = extra;
    if (status == ITH_OK)
        origin->extra[origin->num_extra++] = *yaml;
    else
        ith_yaml_deinit(yaml);
    return status;
}

static void clear_plugin(config_loader *l, int plugin)
{
    for (int i = 0; i < ith_config_num_rows; i++)
        if (i == plugin || ith_config_plugin_of(i) == plugin)
            l->origin->given[i] = (config_given){0};
}

static ith_status give_plugin(config_loader *l, int plugin, const ith_yaml_node *key,
                              const ith_yaml_node *value);

/* name: the full key, at most 200 bytes. */
static ith_status give(config_loader *l, const char *name, const ith_yaml_node *key,
                       const ith_yaml_node *value)
{
    ith_error err = {0};
    size_t len = strlen(name);
    int idx = ith_config_find_row(name, len);
    if (idx >= 0 && ith_config_rows[idx].kind == KEY_PLUGIN)
        return give_plugin(l, idx, key, value);
    const char *dot = strchr(name, '.');
    int plugin = dot ? ith_config_find_row(name, (size_t)(dot - name)) : -1;
    if (idx < 0 && plugin >= 0 && strcmp(dot, ".name") == 0)
        idx = plugin;
    if (idx >= 0) {
        l->origin->given[idx] = (config_given){key, value};
        return ITH_OK;
    }
    if (plugin < 0 && !dot && ith_env_truthy(ITH_ENV_ALLOW_EXTRA_KEYS))
        return ITH_OK;
    return ith_config_add_problem(&l->problems, key, fail_unknown(l, key, name, &err), &err);
}

static ith_status give_map(config_loader *l, int plugin, const ith_yaml_node *map)
{
    for (int64_t i = 0; i < map->count; i++) {
        char name[256];
        snprintf(name, sizeof name, "%s.%.200s", ith_config_rows[plugin].name,
                 map->pairs[i].key->text);
        ITH_TRY(give(l, name, map->pairs[i].key, map->pairs[i].value));
    }
    return ITH_OK;
}

/* null, a map, a JSON text, or (ours) the bare name. A map merges into what was given before. */
static ith_status give_plugin(config_loader *l, int plugin, const ith_yaml_node *key,
                              const ith_yaml_node *value)
{
    ith_error err = {0};
    const char *name = ith_config_rows[plugin].name;
    if (value->kind == ITH_YAML_MAP && value->count > 0)
        return give_map(l, plugin, value);
    if (ith_yaml_is_null(value)) {
        clear_plugin(l, plugin);
        return ITH_OK;
    }
    if (value->kind == ITH_YAML_SCALAR && value->type == ITH_YAML_STR && value->text[0] == '{') {
        ith_yaml json = {0};
        ith_status status = ith_yaml_parse_at(&json, value->text, value->len, name, value, &err);
        if (status == ITH_OK) {
            ITH_TRY(keep_yaml(l, &json));
            return give_plugin(l, plugin, key, json.root);
        }
        return ith_config_add_problem(&l->problems, value, status, &err);
    }
    char found[80];
    ith_status status =
        ith_yaml_fail(value, &err, "%s: found %s (use a map with a name)", name,
                      value->kind == ITH_YAML_MAP ? "an empty map"
                                                  : ith_yaml_describe(value, found, sizeof found));
    return ith_config_add_problem(&l->problems, value, status, &err);
}

/* ---- files of other programs ---- */

static ith_status keep_note(config_loader *l, const char *text, const char **place)
{
    char *kept = ith_arena_strndup(&l->origin->arena, text, (int64_t)strlen(text));
    if (!kept)
        return ith_fail(l->err, ITH_ERR_MEMORY, "out of memory while reading the configuration");
    *place = kept;
    return ITH_OK;
}

static ith_status append_note(config_loader *l, const char *text)
{
    struct ith_config_origin *origin = l->origin;
    void *notes = origin->notes;
    ith_status status = ith_grow(&notes, &origin->cap_notes, origin->num_notes + 1,
                                 (int64_t)sizeof *origin->notes, "configuration", l->err);
    origin->notes = notes;
    ITH_TRY(status);
    ITH_TRY(keep_note(l, text, &origin->notes[origin->num_notes]));
    origin->num_notes++;
    return ITH_OK;
}

/* Keys for one reason share a line, at the place of the first. */
static ith_status add_note(config_loader *l, const ith_yaml_node *where, const char *name,
                           const char *why)
{
    char reason[256], text[1024];
    ith_error note = {0};
    int len = snprintf(reason, sizeof reason, ": not needed: %s", why);
    for (int64_t i = 0; i < l->origin->num_notes; i++) {
        const char *old = l->origin->notes[i];
        int kept = (int)strlen(old) - len;
        if (kept < 0 || strcmp(old + kept, reason) != 0 ||
            snprintf(text, sizeof text, "%.*s, %s%s", kept, old, name, reason) >= (int)sizeof text)
            continue;
        return keep_note(l, text, &l->origin->notes[i]);
    }
    ith_yaml_fail(where, &note, "%s%s", name, reason);
    return append_note(l, note.text);
}

/* A value written by us that stands at the place of `where`. */
static ith_status give_text(config_loader *l, const char *to, const ith_yaml_node *where,
                            const char *text)
{
    ith_yaml yaml = {0};
    ITH_TRY(ith_yaml_parse_at(&yaml, text, (int64_t)strlen(text), where->file, where, l->err));
    ITH_TRY(keep_yaml(l, &yaml));
    return give(l, to, where, yaml.root);
}

/* `only` as a number or a word, or one of several words ("a or b"); lists of one count as their
 * item. */
static bool is_value(const ith_yaml_node *node, const char *only)
{
    if (node->kind == ITH_YAML_SEQ && node->count == 1)
        node = node->items[0];
    double wanted = 0, found = 0;
    if (node->kind != ITH_YAML_SCALAR)
        return false;
    for (const char *word = only, *end; word; word = end ? end + 4 : NULL) {
        end = strstr(word, " or ");
        size_t len = end ? (size_t)(end - word) : strlen(word);
        if (strlen(node->text) == len && memcmp(node->text, word, len) == 0)
            return true;
    }
    return ith_yaml_parse_float(only, &wanted) &&
           ith_yaml_get_float(node, "", -1e300, 1e300, &found, NULL) == ITH_OK && found == wanted;
}

static const ith_dialect_key *find_foreign(const ith_dialect *d, const char *name)
{
    for (int i = 0; i < d->num_keys; i++)
        if (strcmp(d->keys[i].name, name) == 0)
            return &d->keys[i];
    return NULL;
}

static ith_status fail_foreign(config_loader *l, const ith_yaml_node *key, const char *name)
{
    const ith_dialect *d = l->dialect;
    const char *names[ITH_MAX_DIALECT_KEYS];
    ith_error err = {0};
    ITH_ASSERT(d->num_keys <= ITH_MAX_DIALECT_KEYS);
    for (int i = 0; i < d->num_keys; i++)
        names[i] = d->keys[i].name;
    const char *near = ith_nearest_name(name, names, d->num_keys);
    ith_status status =
        near ? ith_yaml_fail(key, &err, "%.80s: unknown key (did you mean %s?)", name, near)
             : ith_yaml_fail(key, &err, "%.80s: unknown key of %s files", name, d->name);
    return ith_config_add_problem(&l->problems, key, status, &err);
}

/* Our keys, written by us, as if they stood at `where`. */
static ith_status give_keys(config_loader *l, const ith_yaml_node *where, const char *text,
                            const char *name)
{
    ith_yaml yaml = {0};
    ITH_TRY(where
                ? ith_yaml_parse_at(&yaml, text, (int64_t)strlen(text), where->file, where, l->err)
                : ith_yaml_parse(&yaml, text, (int64_t)strlen(text), name, l->err));
    ITH_TRY(keep_yaml(l, &yaml));
    for (int64_t i = 0; i < yaml.root->count; i++)
        ITH_TRY(give(l, yaml.root->pairs[i].key->text, where ? where : yaml.root->pairs[i].key,
                     yaml.root->pairs[i].value));
    return ITH_OK;
}

static ith_status give_choice(config_loader *l, const ith_dialect_key *k, const ith_yaml_node *key,
                              const ith_yaml_node *value)
{
    char found[80], wanted[200];
    int used = 0;
    ith_error err = {0};
    for (const ith_dialect_choice *c = k->choices; c->value; c++) {
        bool on = false, is_bool = ith_yaml_get_bool(value, "", &on, NULL) == ITH_OK;
        if (is_value(value, c->value) || (is_bool && strcmp(c->value, on ? "true" : "false") == 0))
            return c->keys ? give_keys(l, key, c->keys, NULL) : ITH_OK;
        if (used < (int)sizeof wanted)
            used += snprintf(wanted + used, sizeof wanted - (size_t)used, "%s%s",
                             c == k->choices ? "" : ", ", c->value);
    }
    ith_status status = ith_yaml_fail(value, &err, "%s: found %s (use %s%s%s)", k->name,
                                      ith_yaml_describe(value, found, sizeof found), wanted,
                                      k->note ? ": " : "", k->note ? k->note : "");
    return ith_config_add_problem(&l->problems, value, status, &err);
}

/* Two keys of the file that mean the same here. */
static ith_status refuse_twice(config_loader *l, const ith_dialect_key *k, const ith_yaml_node *key,
                               bool *refused)
{
    int idx = ith_config_find_row(k->to, strlen(k->to));
    const ith_yaml_node *other = idx >= 0 ? l->origin->given[idx].key : NULL;
    ith_error err = {0};
    *refused =
        other && other != key && other->line && key->line && strcmp(other->file, key->file) == 0;
    if (!*refused)
        return ITH_OK;
    ith_status status =
        ith_yaml_fail(key, &err, "%s: found beside %s of line %d (keep one of them)", k->name,
                      other->text, other->line);
    return ith_config_add_problem(&l->problems, key, status, &err);
}

/* name: "train.lr". */
static ith_status give_foreign(config_loader *l, const char *name, const ith_yaml_node *key,
                               const ith_yaml_node *value)
{
    const ith_dialect_key *k = find_foreign(l->dialect, name);
    double number = 0;
    bool refused = false;
    if (!k)
        return fail_foreign(l, key, name);
    if (k->is_lr_min) {
        l->lr_min = value;
        return ITH_OK;
    }
    if (k->skip_if && is_value(value, k->skip_if))
        return ITH_OK;
    if (k->choices[0].value)
        return give_choice(l, k, key, value);
    if (!k->to)
        return add_note(l, key, name, k->note);
    ITH_TRY(refuse_twice(l, k, key, &refused));
    if (refused)
        return ITH_OK;
    if (k->note)
        ITH_TRY(add_note(l, key, name, k->note));
    if (k->null_if && is_value(value, k->null_if))
        return give_text(l, k->to, key, "null");
    if (k->whole && ith_yaml_get_float(value, "", -1e9, 1e9, &number, NULL) == ITH_OK &&
        number == floor(number)) {
        char text[24];
        snprintf(text, sizeof text, "%.0f", number);
        return give_text(l, k->to, key, text);
    }
    return give(l, k->to, key, value);
}

/* One section, or a flat file; late: the keys that are read last. */
static ith_status give_section(config_loader *l, const char *section, const ith_yaml_node *map,
                               bool late)
{
    for (int64_t i = 0; i < map->count; i++) {
        const ith_yaml_node *key = map->pairs[i].key, *value = map->pairs[i].value;
        char name[256];
        snprintf(name, sizeof name, "%.40s%s%.200s", section, *section ? "." : "", key->text);
        const ith_dialect_key *k = find_foreign(l->dialect, name);
        if (!*section && strcmp(name, "parallelism_config") == 0 && value->kind == ITH_YAML_MAP)
            ITH_TRY(give_section(l, "", value, late));
        else if ((k && k->late) == late)
            ITH_TRY(give_foreign(l, name, key, value));
    }
    return ITH_OK;
}

static ith_status give_foreign_file(config_loader *l, const ith_yaml_node *root)
{
    ITH_TRY(give_keys(l, NULL, l->dialect->defaults, "defaults of another program"));
    if (l->dialect->differs) {
        ith_error note = {0};
        ith_yaml_fail(root, &note, "read as %s: %s", l->dialect->name, l->dialect->differs);
        ITH_TRY(append_note(l, note.text));
    }
    for (int late = 0; late < 2; late++) {
        if (l->dialect == &ith_dialect_trl) {
            ITH_TRY(give_section(l, "", root, late));
            continue;
        }
        for (int64_t s = 0; s < root->count; s++) {
            const ith_yaml_node *section = root->pairs[s].key, *map = root->pairs[s].value;
            if (map->kind == ITH_YAML_MAP)
                ITH_TRY(give_section(l, section->text, map, late));
            else if (!late)
                ITH_TRY(fail_foreign(l, section, section->text));
        }
    }
    return ITH_OK;
}

/* lr_min is a rate there, a part of the rate here; a constant rate has none. */
static ith_status give_lr_min(config_loader *l)
{
    int rate_row = ith_config_find_row("learning_rate", strlen("learning_rate"));
    int name_row = ith_config_find_row("lr_scheduler_config", strlen("lr_scheduler_config"));
    int ratio_row = ith_config_find_row("lr_scheduler_config.min_lr_ratio",
                                        strlen("lr_scheduler_config.min_lr_ratio"));
    const ith_yaml_node *style = l->origin->given[name_row].value;
    double rate = 0, least = ITH_DFACTORY_LR_MIN;
    ith_error err = {0};
    if (!style || style->kind != ITH_YAML_SCALAR || strcmp(style->text, "constant") == 0 ||
        l->origin->given[ratio_row].value)
        return ITH_OK;
    if (l->lr_min) {
        ith_status status = ith_yaml_get_float(l->lr_min, "train.lr_min", 0, 1e300, &least, &err);
        if (status != ITH_OK)
            return ith_config_add_problem(&l->problems, l->lr_min, status, &err);
    }
    const ith_yaml_node *where = l->origin->given[rate_row].value;
    if (ith_yaml_get_float(where, "", 0, 1e300, &rate, NULL) != ITH_OK || rate <= 0)
        return ITH_OK; /* reading the rate tells what is wrong with it */
    char text[40];
    snprintf(text, sizeof text, "%.17g", least < rate ? least / rate : 1.0);
    return give_text(l, "lr_scheduler_config.min_lr_ratio", l->lr_min ? l->lr_min : style, text);
}

static ith_status give_file(config_loader *l)
{
    const ith_yaml_node *root = l->origin->file.root;
    if (ith_yaml_is_null(root))
        return ITH_OK;
    ITH_TRY(ith_yaml_get_map(root, "this file", l->err));
    ITH_TRY(check_dialect(root, l->err));
    l->dialect = dialect_of(root);
    if (l->dialect)
        return give_foreign_file(l, root);
    for (int64_t i = 0; i < root->count; i++) {
        const ith_yaml_node *key = root->pairs[i].key;
        ith_error err = {0};
        if (strchr(key->text, '.') || strlen(key->text) > 200) {
            ITH_TRY(ith_config_add_problem(&l->problems, key, fail_unknown(l, key, key->text, &err),
                                           &err));
            continue;
        }
        ITH_TRY(give(l, key->text, key, root->pairs[i].value));
    }
    return ITH_OK;
}

/* key=value; the value is YAML. Leading dashes are fine: --learning_rate=1e-5. */
static ith_status give_override(config_loader *l, const char *text)
{
    const char *key = text + strspn(text, "-"), *equals = strchr(key, '=');
    if (!equals || equals == key || equals - key > 200)
        return ith_fail(l->err, ITH_ERR_USAGE, "'%.200s': not key=value", text);
    ith_yaml yaml = {0};
    char name[256];
    snprintf(name, sizeof name, "%.*s", (int)(equals - key), key);
    ith_yaml_node *where = ith_arena_alloc(&l->origin->arena, (int64_t)sizeof *where);
    char *argument = ith_arena_strndup(&l->origin->arena, "command line", 12);
    if (!where || !argument)
        return ith_fail(l->err, ITH_ERR_MEMORY, "out of memory while reading arguments");
    *where = (ith_yaml_node){.file = argument, .text = argument};
    ith_error err = {0};
    ith_status status =
        ith_yaml_parse_at(&yaml, equals + 1, (int64_t)strlen(equals + 1), argument, where, &err);
    if (status != ITH_OK) {
        ith_wrap(&err, status, "%s", name);
        return ith_config_add_problem(&l->problems, NULL, status, &err);
    }
    ITH_TRY(keep_yaml(l, &yaml));
    if (l->dialect && ith_config_find_row(name, strlen(name)) < 0 && find_foreign(l->dialect, name))
        return give_foreign(l, name, where, yaml.root);
    return give(l, name, where, yaml.root);
}

/* ---- notes ---- */

/* One note for a map, none for its single keys. */
static ith_status add_notes(config_loader *l)
{
    for (int i = 0; i < ith_config_num_rows; i++) {
        bool differs = false;
        if (ith_config_rows[i].status != ITH_KEY_NOT_NEEDED || !l->origin->given[i].key ||
            ith_config_plugin_of(i) >= 0)
            continue;
        ITH_TRY(ith_config_differs(&l->config, i, &differs, l->err));
        if (differs)
            ITH_TRY(add_note(l, l->origin->given[i].key, ith_config_rows[i].name,
                             ith_config_rows[i].why));
    }
    return ITH_OK;
}

/* outputs/<8 random hexadecimal digits>, as LlamaFactory names it. */
static ith_status name_output_dir(config_loader *l)
{
    if (l->config.output_dir)
        return ITH_OK;
    uint32_t bits = 0;
    if (getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits)
        return ith_fail(l->err, ITH_ERR_IO, "output_dir: no random name could be made (give one)");
    char name[32];
    int len = snprintf(name, sizeof name, "outputs/%08x", (unsigned)bits);
    return ith_config_copy_text(l, name, (size_t)len, &l->config.output_dir);
}

static ith_status load(config_loader *l, const char *const *overrides, int num_overrides)
{
    ITH_TRY(give_file(l));
    for (int i = 0; i < num_overrides; i++)
        ITH_TRY(give_override(l, overrides[i]));
    if (l->dialect == &ith_dialect_dfactory)
        ITH_TRY(give_lr_min(l));
    ITH_TRY(ith_config_read_rows(l));
    if (l->problems.count == 0)
        ITH_TRY(ith_config_check_together(&l->config, &l->problems));
    ITH_TRY(report_problems(&l->problems, l->err));
    ITH_TRY(name_output_dir(l));
    return add_notes(l);
}

/* ---- life cycle ---- */

static void destroy_origin(struct ith_config_origin *origin)
{
    if (!origin)
        return;
    ith_yaml_deinit(&origin->file);
    for (int64_t i = 0; i < origin->num_extra; i++)
        ith_yaml_deinit(&origin->extra[i]);
    ith_free(origin->extra);
    ith_free(origin->notes);
    ith_arena_deinit(&origin->arena);
    ith_free(origin);
}

/* Takes over *file. */
static ith_status load_yaml(ith_config *out, ith_yaml *file, const char *const *overrides,
                            int num_overrides, ith_error *err)
{
    config_loader *l = NULL;
    struct ith_config_origin *origin = NULL;
    ith_status status =
        ith_alloc_zero((void **)&origin, 1, (int64_t)sizeof *origin, "configuration", err);
    if (status == ITH_OK) {
        ith_arena_init(&origin->arena, 0);
        status = ith_alloc_zero((void **)&l, 1, (int64_t)sizeof *l, "configuration", err);
    }
    if (status == ITH_OK) {
        origin->file = *file;
        l->origin = l->config.origin = origin;
        l->err = l->problems.err = err;
        status = load(l, overrides, num_overrides);
        free_problems(&l->problems);
    } else {
        ith_yaml_deinit(file);
    }
    if (status == ITH_OK)
        *out = l->config;
    else
        destroy_origin(origin);
    ith_free(l);
    return status;
}

ith_status ith_config_parse(ith_config *out, const char *text, int64_t len, const char *name,
                            const char *const *overrides, int num_overrides, ith_error *err)
{
    ith_yaml file = {0};
    ITH_TRY(ith_yaml_parse(&file, text, len, name, err));
    return load_yaml(out, &file, overrides, num_overrides, err);
}

ith_status ith_config_load(ith_config *out, const char *path, const char *const *overrides,
                           int num_overrides, ith_error *err)
{
    if (!path)
        return ith_config_parse(out, "", 0, "command line", overrides, num_overrides, err);
    if (!ith_path_exists(path) || ith_path_is_dir(path))
        return ith_fail(err, ITH_ERR_USAGE, "%s: %s (give a YAML or JSON file)", path,
                        ith_path_is_dir(path) ? "found a directory" : "no such file");
    ith_yaml file = {0};
    ITH_TRY(ith_yaml_load(&file, path, err));
    return load_yaml(out, &file, overrides, num_overrides, err);
}

void ith_config_deinit(ith_config *config)
{
    destroy_origin(config->origin);
    *config = (ith_config){0};
}
