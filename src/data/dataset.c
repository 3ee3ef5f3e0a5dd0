/* dataset.c - which files a data set consists of.
 *
 * Invariants:
 *  1. Every part has at least one file, and every file exists when open returns.
 *  2. Rows of a part are numbered through its files in order. */
#include "data/dataset.h"

#include "base/checked.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "config/yaml.h"
#include "data/dataset_internal.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define HASH_WHOLE_BYTES ((int64_t)256 << 20)
#define HASH_PIECES 64
#define HASH_PIECE_BYTES ((int64_t)1 << 20)

static bool has_suffix(const char *text, const char *suffix)
{
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

static bool is_yaml(const char *path)
{
    return has_suffix(path, ".yaml") || has_suffix(path, ".yml");
}

static ith_status new_part(ith_dataset *d, const char *name, dataset_part **out, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&d->parts, &d->cap_parts, d->num_parts + 1, sizeof *d->parts,
                     "data sets", err));
    dataset_part *part = &d->parts[d->num_parts];
    memset(part, 0, sizeof *part);
    part->info.size = -1;
    part->info.weight = -1;
    part->info.name = ith_arena_strndup(&d->arena, name, (int64_t)strlen(name));
    if (!part->info.name)
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", name);
    d->num_parts++;
    *out = part;
    return ITH_OK;
}

static ith_status add_file(dataset_part *part, const char *path, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&part->files, &part->cap_files, part->info.num_files + 1,
                     sizeof *part->files, "files", err));
    dataset_file *file = &part->files[part->info.num_files];
    memset(file, 0, sizeof *file);
    file->path = ith_strndup(path, (int64_t)strlen(path));
    if (!file->path)
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path);
    part->info.num_files++;
    return ITH_OK;
}

/* All .json and .jsonl files of a folder. */
static ith_status add_folder(dataset_part *part, const char *path, ith_error *err)
{
    ith_names names = {0};
    ith_buf full = {0};
    int64_t ignored = 0;
    ith_status status = ith_list_dir(path, &names, err);
    for (int64_t i = 0; i < names.count && status == ITH_OK; i++) {
        const char *name = names.names[i];
        if (name[0] == '.' || (!has_suffix(name, ".json") && !has_suffix(name, ".jsonl"))) {
            ignored++;
            continue;
        }
        ith_path_join(&full, path, name);
        status = ith_buf_check(&full, path, err);
        if (status == ITH_OK)
            status = add_file(part, full.data, err);
    }
    if (status == ITH_OK && part->info.num_files == 0)
        status = ignored
                     ? ith_fail(err, ITH_ERR_USAGE,
                                "%s: the folder has no .json or .jsonl file (%" PRId64 " others)",
                                path, ignored)
                     : ith_fail(err, ITH_ERR_USAGE, "%s: the folder is empty", path);
    else if (status == ITH_OK && ignored)
        ith_log(ITH_LOG_INFO, "data", "%s: %" PRId64 " other files are not read", path, ignored);
    ith_buf_deinit(&full);
    ith_names_free(&names);
    return status;
}

static ith_status add_path(dataset_part *part, const char *path, ith_error *err)
{
    return ith_path_is_dir(path) ? add_folder(part, path, err) : add_file(part, path, err);
}

static ith_status not_local(const char *name, ith_error *err)
{
    return ith_fail(err, ITH_ERR_USAGE,
                    "%s: no such file or folder; data sets are not fetched from a hub: download it "
                    "first and give its path",
                    name);
}

/* dir becomes the folder of path, "" for the working folder. */
static void parent_of(const char *path, char *dir, size_t size)
{
    const char *base = ith_path_base(path);
    size_t n = (size_t)(base - path);
    n = n > 1 ? n - 1 : n;
    snprintf(dir, size, "%.*s", (int)ith_min_i64((int64_t)n, (int64_t)size - 1), path);
}

/* Where a path of a dataset-info file is; NULL when nowhere. */
static const char *find_path(const char *info, const char *path, ith_buf *found)
{
    char folder[PATH_MAX], above[PATH_MAX + 4];
    ith_path_join(found, "", path);
    if (!found->failed && ith_path_exists(found->data))
        return found->data;
    if (path[0] == '/')
        return NULL;
    parent_of(info, folder, sizeof folder);
    snprintf(above, sizeof above, "%s%s..", folder, folder[0] ? "/" : "");
    const char *const tries[][2] = {{folder, path}, {above, path}, {folder, ith_path_base(path)}};
    for (size_t i = 0; i < sizeof tries / sizeof tries[0]; i++) {
        ith_path_join(found, tries[i][0], tries[i][1]);
        if (!found->failed && ith_path_exists(found->data)) {
            ith_log(ITH_LOG_INFO, "data", "%s: %s is read from %s", info, path, found->data);
            return found->data;
        }
    }
    return NULL;
}

static const char *const entry_keys[] = {"path", "source", "split",     "converter",
                                         "size", "weight", "streaming", "separator"};
static const char *const older_keys[] = {"file_name",   "hf_hub_url", "ms_hub_url", "dataset",
                                         "script_url",  "formatting", "columns",    "tags",
                                         "num_samples", "subset",     "folder",     "ranking"};

static ith_status check_entry_keys(const ith_yaml_node *entry, const char *name, ith_error *err)
{
    for (int64_t i = 0; i < entry->count; i++) {
        const ith_yaml_node *key = entry->pairs[i].key;
        for (size_t k = 0; k < sizeof older_keys / sizeof older_keys[0]; k++)
            if (strcmp(key->text, older_keys[k]) == 0)
                return ith_yaml_fail(key, err,
                                     "%s: %s belongs to the older dataset_info.json; here an entry "
                                     "has path, converter, size and weight",
                                     name, key->text);
    }
    return ith_yaml_check_keys(entry, name, entry_keys,
                               (int)(sizeof entry_keys / sizeof entry_keys[0]), err);
}

/* A key that may be absent or null. */
static const ith_yaml_node *given(const ith_yaml_node *entry, const char *key)
{
    const ith_yaml_node *node = ith_yaml_find(entry, key);
    return node && !ith_yaml_is_null(node) ? node : NULL;
}

static ith_status read_choices(ith_dataset *d, const ith_yaml_node *entry, dataset_part *part,
                               ith_error *err)
{
    const ith_yaml_node *node;
    const char *text = NULL;
    if ((node = given(entry, "converter")) != NULL) {
        ITH_TRY(ith_yaml_get_string(node, "converter", &text, err));
        if (!ith_converter_from_name(text, &part->given))
            return ith_yaml_fail(node, err,
                                 "converter: found '%s' (alpaca, sharegpt, pair, canonical or "
                                 "nothing)",
                                 text);
    }
    if ((node = given(entry, "separator")) != NULL) {
        ITH_TRY(ith_yaml_get_string(node, "separator", &text, err));
        part->info.separator = ith_arena_strndup(&d->arena, text, (int64_t)strlen(text));
        if (!part->info.separator)
            return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", part->info.name);
    }
    if ((node = given(entry, "size")) != NULL)
        ITH_TRY(ith_yaml_get_int(node, "size", 1, INT32_MAX, &part->info.size, err));
    if ((node = given(entry, "weight")) != NULL)
        ITH_TRY(ith_yaml_get_float(node, "weight", 0, 1e6, &part->info.weight, err));
    if ((node = given(entry, "split")) != NULL) {
        ITH_TRY(ith_yaml_get_string(node, "split", &text, err));
        if (strcmp(text, "train") != 0)
            return ith_yaml_fail(node, err,
                                 "split: found '%s'; a local file has the split train only: give "
                                 "the file of that split as path",
                                 text);
    }
    return ITH_OK;
}

static ith_status read_location(const ith_yaml_node *entry, const char *info, dataset_part *part,
                                ith_error *err)
{
    const char *path = NULL, *source = "";
    const ith_yaml_node *path_node = given(entry, "path"), *source_node = given(entry, "source");
    if (!path_node)
        return ith_yaml_fail(entry, err, "%s: path is missing", part->info.name);
    ITH_TRY(ith_yaml_get_string(path_node, "path", &path, err));
    if (source_node) {
        ITH_TRY(ith_yaml_get_string(source_node, "source", &source, err));
        if (strcmp(source, "local") != 0 && strcmp(source, "hf_hub") != 0 &&
            strcmp(source, "ms_hub") != 0)
            return ith_yaml_fail(source_node, err, "source: found '%s' (local, hf_hub or ms_hub)",
                                 source);
    }
    ith_buf found = {0};
    const char *where = find_path(info, path, &found);
    ith_status status = ITH_OK;
    if (where)
        status = add_path(part, where, err);
    else if (strcmp(source, "local") == 0)
        status = ith_yaml_fail(path_node, err,
                               "%s: no such file or folder (looked from the working folder, and "
                               "beside %s)",
                               path, info);
    else
        status = ith_wrap(err, not_local(path, err), "%s:%d:%d: %s", path_node->file,
                          path_node->line, path_node->column, part->info.name);
    ith_buf_deinit(&found);
    return status;
}

/* Rows are always read on demand, so streaming changes nothing; what contradicts is refused as
 * LlamaFactory does. */
static ith_status read_streaming(const ith_yaml_node *entry, int *before, ith_error *err)
{
    const ith_yaml_node *node = given(entry, "streaming");
    bool streaming = false;
    if (node)
        ITH_TRY(ith_yaml_get_bool(node, "streaming", &streaming, err));
    if (*before >= 0 && *before != streaming)
        return ith_yaml_fail(node ? node : entry, err,
                             "streaming: all data sets of a file must have the same value");
    if (streaming && *before < 0)
        ith_log(ITH_LOG_INFO, "data", "streaming: not needed, rows are read on demand anyway");
    *before = streaming;
    return ITH_OK;
}

static ith_status read_info(ith_dataset *d, const char *info, const ith_yaml_node *root,
                            ith_error *err)
{
    ITH_TRY(ith_yaml_get_map(root, "dataset-info file", err));
    if (root->count == 0)
        return ith_yaml_fail(root, err, "the file names no data set");
    int streaming = -1;
    for (int64_t i = 0; i < root->count; i++) {
        const ith_yaml_node *key = root->pairs[i].key, *entry = root->pairs[i].value;
        dataset_part *part = NULL;
        ITH_TRY(ith_yaml_get_map(entry, key->text, err));
        ITH_TRY(check_entry_keys(entry, key->text, err));
        ITH_TRY(new_part(d, key->text, &part, err));
        ITH_TRY(read_location(entry, info, part, err));
        ITH_TRY(read_choices(d, entry, part, err));
        ITH_TRY(read_streaming(entry, &streaming, err));
    }
    return ITH_OK;
}

static ith_status open_any(ith_dataset *d, const char *path, ith_error *err)
{
    if (!ith_path_exists(path))
        return not_local(path, err);
    if (is_yaml(path)) {
        ith_yaml yaml;
        ITH_TRY(ith_yaml_load(&yaml, path, err));
        ith_status status = read_info(d, path, yaml.root, err);
        ith_yaml_deinit(&yaml);
        return status;
    }
    dataset_part *part = NULL;
    ITH_TRY(new_part(d, "default", &part, err));
    return add_path(part, path, err);
}

ith_status ith_dataset_open(ith_dataset **out, const char *path, const ith_dataset_options *options,
                            ith_error *err)
{
    ith_dataset *d = NULL;
    ITH_TRY(ith_alloc_zero((void **)&d, 1, sizeof *d, "data set", err));
    ith_arena_init(&d->arena, 0);
    d->options = *options;
    ith_status status = open_any(d, path, err);
    if (status != ITH_OK) {
        ith_dataset_close(d);
        return status;
    }
    *out = d;
    return ITH_OK;
}

void ith_dataset_close(ith_dataset *d)
{
    if (!d)
        return;
    for (int64_t i = 0; i < d->num_parts; i++) {
        dataset_part *part = &d->parts[i];
        for (int64_t f = 0; f < part->info.num_files; f++) {
            ith_rows_close(part->files[f].rows);
            ith_free(part->files[f].path);
        }
        ith_free(part->files);
    }
    ith_free(d->parts);
    ith_free(d->samples);
    ith_free(d->drawn);
    ith_arena_deinit(&d->arena);
    ith_free(d);
}

/* The format of a part is that of its first row. */
static ith_status detect(dataset_part *part, ith_error *err)
{
    const ith_rows *rows = NULL;
    for (int64_t f = 0; f < part->info.num_files && !rows; f++)
        if (ith_rows_count(part->files[f].rows) > 0)
            rows = part->files[f].rows;
    if (!rows)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: no row in it", part->files[0].path);
    json_t *row = NULL;
    char where[PATH_MAX];
    ITH_TRY(ith_rows_parse(rows, 0, &row, err));
    ith_status status = ith_convert_detect(row, part->given, &part->info.converter, err);
    bool preference = ith_row_is_preference(row);
    json_decref(row);
    if (status != ITH_OK)
        return ith_wrap(err, status, "%s", ith_rows_where(rows, 0, where, sizeof where));
    if (preference || part->info.converter == ITH_CONVERTER_PAIR)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "%s: preference data (chosen and rejected answers); supervised fine-tuning "
                        "needs conversations",
                        ith_rows_where(rows, 0, where, sizeof where));
    if (part->given == ITH_CONVERTER_AUTO && part->info.converter != ITH_CONVERTER_CANONICAL)
        ith_log(ITH_LOG_INFO, "data", "%s: no converter given; the keys are those of %s",
                ith_rows_name(rows), ith_converter_name(part->info.converter));
    return ITH_OK;
}

ith_status ith_dataset_load(ith_dataset *d, ith_error *err)
{
    if (d->loaded)
        return ITH_OK;
    for (int64_t i = 0; i < d->num_parts; i++) {
        dataset_part *part = &d->parts[i];
        part->info.num_rows = 0;
        for (int64_t f = 0; f < part->info.num_files; f++) {
            dataset_file *file = &part->files[f];
            if (!file->rows)
                ITH_TRY(ith_rows_open(&file->rows, file->path, err));
            file->first_row = part->info.num_rows;
            part->info.num_rows += ith_rows_count(file->rows);
        }
        ITH_TRY(detect(part, err));
    }
    d->loaded = true;
    return ITH_OK;
}

const dataset_file *dataset_find_file(const dataset_part *part, int64_t row, int64_t *local)
{
    ITH_ASSERT(row >= 0 && row < part->info.num_rows);
    int64_t low = 0, high = part->info.num_files - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (part->files[middle].first_row <= row)
            low = middle;
        else
            high = middle - 1;
    }
    /* Files without rows share their first_row with the next one: the last of these has the row. */
    *local = row - part->files[low].first_row;
    return &part->files[low];
}

int64_t ith_dataset_num_parts(const ith_dataset *d)
{
    return d->num_parts;
}

const ith_dataset_part *ith_dataset_part_at(const ith_dataset *d, int64_t i)
{
    ITH_ASSERT(i >= 0 && i < d->num_parts);
    return &d->parts[i].info;
}

const char *ith_dataset_where(const ith_dataset *d, int64_t part, int64_t row, char *buf,
                              size_t size)
{
    ITH_ASSERT(part >= 0 && part < d->num_parts);
    if (!d->loaded) {
        snprintf(buf, size, "%s: row %" PRId64, d->parts[part].info.name, row + 1);
        return buf;
    }
    int64_t local = 0;
    const dataset_file *file = dataset_find_file(&d->parts[part], row, &local);
    return ith_rows_where(file->rows, local, buf, size);
}

static void hash_text(ith_sha256 *h, const char *text)
{
    /* With the NUL: texts next to each other stay apart. */
    ith_sha256_update(h, text, (int64_t)strlen(text) + 1);
}

static ith_status hash_file(ith_sha256 *h, const char *path, ith_error *err)
{
    ith_map map = {0};
    int64_t mtime_ns = 0;
    char line[80];
    ITH_TRY(ith_file_stat(path, NULL, &mtime_ns, err));
    ITH_TRY(ith_map_open(&map, path, err));
    snprintf(line, sizeof line, "file %" PRId64, map.size);
    hash_text(h, line);
    if (map.size <= HASH_WHOLE_BYTES) {
        ith_sha256_update(h, map.data, map.size);
    } else {
        snprintf(line, sizeof line, "time %" PRId64, mtime_ns);
        hash_text(h, line);
        for (int64_t i = 0; i < HASH_PIECES; i++) {
            int64_t at = (map.size - HASH_PIECE_BYTES) / (HASH_PIECES - 1) * i;
            ith_sha256_update(h, map.data + at, HASH_PIECE_BYTES);
        }
        ith_sha256_update(h, map.data + map.size - HASH_PIECE_BYTES, HASH_PIECE_BYTES);
    }
    ith_map_close(&map);
    return ITH_OK;
}

ith_status ith_dataset_identity(const ith_dataset *d, char out_hex[65], ith_error *err)
{
    ith_sha256 h;
    char line[160];
    ith_sha256_init(&h);
    snprintf(line, sizeof line, "all_turns %d media %d seed %" PRIu64 " parts %" PRId64,
             d->options.all_turns, d->options.allow_media, d->options.seed, d->num_parts);
    hash_text(&h, line);
    for (int64_t i = 0; i < d->num_parts; i++) {
        const ith_dataset_part *info = &d->parts[i].info;
        hash_text(&h, info->name);
        hash_text(&h, ith_converter_name(d->parts[i].given));
        hash_text(&h, info->separator ? info->separator : "");
        snprintf(line, sizeof line, "separator %d size %" PRId64 " weight %a files %" PRId64,
                 info->separator != NULL, info->size, info->weight, info->num_files);
        hash_text(&h, line);
        for (int64_t f = 0; f < info->num_files; f++)
            ITH_TRY(hash_file(&h, d->parts[i].files[f].path, err));
    }
    ith_sha256_hex(&h, out_hex);
    return ITH_OK;
}
