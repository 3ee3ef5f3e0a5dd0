/* safetensors_reader.c - maps weight files and checks every claim of their headers.
 *
 * Invariants:
 *  1. An entry is published only after its range was checked against the file.
 *  2. Within a file the entries, sorted by offset, tile the data exactly: no overlap, no hole, no
 *     rest.
 *  3. A name stands once in the whole set. */
#include "checkpoint/safetensors.h"

#include "base/json.h"
#include "base/log.h"

#include <stdlib.h>

#define SAFETENSORS_SUFFIX ".safetensors"
#define INDEX_SUFFIX ".safetensors.index.json"

typedef struct {
    char *path;
    ith_map map;
    json_t *metadata; /* NULL: none */
} st_file;

struct ith_st_reader {
    st_file *files;
    int64_t num_files, files_cap;
    ith_st_entry *entries;
    int64_t count, cap;
    const ith_st_entry **by_name; /* sorted: look-ups stay logarithmic whatever the names are */
    ith_arena names;
};

int64_t ith_st_numel(const ith_st_entry *entry)
{
    int64_t n = 1;
    for (int i = 0; i < entry->ndim; i++)
        n = ith_mul_bytes(n, entry->shape[i]);
    return n;
}

bool ith_st_has_shape(const ith_st_entry *entry, int ndim, const int64_t *shape)
{
    return entry->ndim == ndim &&
           (ndim == 0 || memcmp(entry->shape, shape, (size_t)ndim * sizeof *shape) == 0);
}

static void shape_text(int ndim, const int64_t *shape, char *out, int64_t out_bytes)
{
    int64_t len = snprintf(out, (size_t)out_bytes, "[");
    for (int i = 0; i < ndim && len < out_bytes; i++)
        len += snprintf(out + len, (size_t)(out_bytes - len), "%s%lld", i ? ", " : "",
                        (long long)shape[i]);
    if (len < out_bytes)
        snprintf(out + len, (size_t)(out_bytes - len), "]");
}

const char *ith_st_text(const ith_st_entry *entry, char *out, int64_t out_bytes)
{
    shape_text(entry->ndim, entry->shape, out, out_bytes);
    size_t len = strlen(out);
    snprintf(out + len, (size_t)out_bytes - len, " %s", ith_dtype_name(entry->dtype));
    return out;
}

ith_tensor ith_st_view(const ith_st_entry *entry)
{
    ITH_ASSERT(entry->ndim >= 1 && entry->ndim <= ITH_MAX_DIMS);
    ith_tensor t = {(void *)(uintptr_t)entry->data, entry->dtype, entry->ndim, {1, 1, 1, 1}, {0}};
    int64_t stride = 1;
    for (int i = ITH_MAX_DIMS - 1; i >= 0; i--) {
        t.shape[i] = i < entry->ndim ? entry->shape[i] : 1;
        t.stride[i] = stride;
        stride *= t.shape[i];
    }
    return t;
}

/* ---- one header ---- */

/* A JSON integer >= 0. */
static bool get_size(const json_t *value, int64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *out = (int64_t)json_integer_value(value);
    return true;
}

static ith_status parse_dtype(const json_t *value, ith_dtype *out, ith_error *err)
{
    const char *name = json_string_value(value);
    if (name && ith_dtype_from_name(name, out))
        return ITH_OK;
    if (!name)
        return ith_fail(err, ITH_ERR_FORMAT, "dtype: found %s, expected a name like \"BF16\"",
                        ith_json_type_name(value));
    return ith_fail(err, ITH_ERR_UNSUPPORTED,
                    "dtype %.32s is not supported (F64 F32 F16 BF16, I64 I32 I16 I8, U64 U32 U16 "
                    "U8, BOOL, C64, F8_* are)",
                    name);
}

static ith_status parse_shape(const json_t *value, ith_st_entry *entry, ith_error *err)
{
    if (!json_is_array(value))
        return ith_fail(err, ITH_ERR_FORMAT, "shape: found %s, expected an array of sizes",
                        ith_json_type_name(value));
    size_t ndim = json_array_size(value);
    if (ndim > ITH_ST_MAX_DIMS)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "shape: %zu dimensions, at most %d are supported",
                        ndim, ITH_ST_MAX_DIMS);
    entry->ndim = (int)ndim;
    entry->bytes = ith_dtype_bytes(entry->dtype);
    for (size_t i = 0; i < ndim; i++) {
        const json_t *size = json_array_get(value, i);
        if (!get_size(size, &entry->shape[i]))
            return ith_fail(err, ITH_ERR_FORMAT, "shape[%zu]: expected an integer >= 0", i);
        if (!ith_mul_ok(entry->bytes, entry->shape[i], &entry->bytes))
            return ith_fail(err, ITH_ERR_FORMAT, "shape: its size does not fit 64 bits");
    }
    return ITH_OK;
}

/* One header row; data_size: bytes after the header. */
static ith_status parse_entry(const json_t *row, const char *data, int64_t data_size,
                              ith_st_entry *entry, ith_error *err)
{
    if (!json_is_object(row))
        return ith_fail(err, ITH_ERR_FORMAT, "found %s, expected an object",
                        ith_json_type_name(row));
    ITH_TRY(parse_dtype(json_object_get(row, "dtype"), &entry->dtype, err));
    ITH_TRY(parse_shape(json_object_get(row, "shape"), entry, err));
    const json_t *offsets = json_object_get(row, "data_offsets");
    int64_t begin = 0, end = 0;
    if (json_array_size(offsets) != 2 || !get_size(json_array_get(offsets, 0), &begin) ||
        !get_size(json_array_get(offsets, 1), &end) || begin > end)
        return ith_fail(err, ITH_ERR_FORMAT, "data_offsets: expected [begin, end], begin <= end");
    if (end > data_size)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "ends at byte %lld of the data, the file holds %lld (truncated?)",
                        (long long)end, (long long)data_size);
    if (end - begin != entry->bytes) {
        char text[256];
        return ith_fail(err, ITH_ERR_FORMAT, "%s needs %lld bytes, data_offsets span %lld",
                        ith_st_text(entry, text, sizeof text), (long long)entry->bytes,
                        (long long)(end - begin));
    }
    entry->data = data + begin;
    return ITH_OK;
}

static ith_status check_metadata(const json_t *metadata, ith_error *err)
{
    if (!json_is_object(metadata))
        return ith_fail(err, ITH_ERR_FORMAT, "__metadata__: found %s, expected an object",
                        ith_json_type_name(metadata));
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)metadata, key, value) if (
        !json_is_string(value)) return ith_fail(err, ITH_ERR_FORMAT,
                                                "__metadata__: %.64s: found %s, expected a string",
                                                key, ith_json_type_name(value));
    return ITH_OK;
}

/* By place in the file; empty tensors at one place by name, so that the order is total. */
static int compare_places(const void *a, const void *b)
{
    const ith_st_entry *x = a, *y = b;
    if (x->data != y->data)
        return (const char *)x->data < (const char *)y->data ? -1 : 1;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* The sorted entries of one file tile [data, data + data_size). */
static ith_status check_tiling(const ith_st_entry *entries, int64_t count, const char *data,
                               int64_t data_size, ith_error *err)
{
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = (const char *)entries[i].data - data;
        if (begin < at)
            return ith_fail(err, ITH_ERR_FORMAT, "%.200s overlaps %.200s", entries[i].name,
                            entries[i - 1].name);
        if (begin > at)
            return ith_fail(err, ITH_ERR_FORMAT, "%lld unused bytes before %.200s",
                            (long long)(begin - at), entries[i].name);
        at = begin + entries[i].bytes;
    }
    if (at != data_size)
        return ith_fail(err, ITH_ERR_FORMAT, "%lld bytes after the last tensor",
                        (long long)(data_size - at));
    return ITH_OK;
}

static ith_status add_rows(ith_st_reader *r, json_t *header, const char *data, int64_t data_size,
                           ith_error *err)
{
    st_file *file = &r->files[r->num_files - 1];
    int64_t first = r->count;
    const char *name;
    json_t *row;
    json_object_foreach(header, name, row)
    {
        if (strcmp(name, "__metadata__") == 0) {
            ITH_TRY(check_metadata(row, err));
            file->metadata = json_incref(row);
            continue;
        }
        ITH_TRY(ith_grow((void **)&r->entries, &r->cap, r->count + 1, sizeof *r->entries,
                         "tensor entries", err));
        ith_st_entry *entry = &r->entries[r->count];
        memset(entry, 0, sizeof *entry);
        ITH_WRAP(parse_entry(row, data, data_size, entry, err), err, "%.200s", name);
        entry->name = ith_arena_strndup(&r->names, name, (int64_t)strlen(name));
        if (!entry->name)
            return ith_fail(err, ITH_ERR_MEMORY, "out of memory: tensor names");
        entry->file_idx = r->num_files - 1;
        r->count++;
    }
    int64_t added = r->count - first;
    ith_st_entry *entries = added ? r->entries + first : NULL;
    if (added)
        qsort(entries, (size_t)added, sizeof *entries, compare_places);
    return check_tiling(entries, added, data, data_size, err);
}

/* What people put where a safetensors file should be. */
static ith_status explain_magic(const ith_map *map, ith_error *err)
{
    static const struct {
        const char *magic, *what;
    } known[] = {
        {"version https://git-lfs", "Git LFS pointer: fetch the file itself with git lfs pull"},
        {"PK\x03\x04", "zip, as torch.save writes"},
        {"GGUF", "GGUF"},
        {"<!DOCTYPE", "web page"},
        {"<html", "web page"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int64_t len = (int64_t)strlen(known[i].magic);
        if (map->size >= len && memcmp(map->data, known[i].magic, (size_t)len) == 0)
            return ith_fail(err, ITH_ERR_FORMAT, "not a safetensors file (%s)", known[i].what);
    }
    return ITH_OK;
}

static ith_status read_header(ith_st_reader *r, const ith_map *map, ith_error *err)
{
    ITH_TRY(explain_magic(map, err));
    if (map->size < 8)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "%lld bytes are too few for a safetensors file (truncated?)",
                        (long long)map->size);
    uint64_t len = 0;
    for (int i = 7; i >= 0; i--)
        len = len << 8 | (unsigned char)map->data[i];
    if (len > (uint64_t)map->size - 8)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "header of %llu bytes in a file of %lld: truncated, or not a safetensors "
                        "file",
                        (unsigned long long)len, (long long)map->size);
    if (len > (uint64_t)ITH_ST_MAX_HEADER_BYTES)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "header of %llu bytes, at most %lld are read",
                        (unsigned long long)len, (long long)ITH_ST_MAX_HEADER_BYTES);
    if (len == 0 || map->data[8] != '{')
        return ith_fail(err, ITH_ERR_FORMAT, "header does not begin with '{'");
    json_t *header = NULL;
    ITH_TRY(ith_json_parse_unique(&header, map->data + 8, (int64_t)len, "header", err));
    int64_t begin = 8 + (int64_t)len;
    ith_status status = add_rows(r, header, map->data + begin, map->size - begin, err);
    json_decref(header);
    return status;
}

/* ---- the set of files ---- */

static ith_status add_file(ith_st_reader *r, const char *path, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&r->files, &r->files_cap, r->num_files + 1, sizeof *r->files, "files",
                     err));
    st_file *file = &r->files[r->num_files];
    memset(file, 0, sizeof *file);
    file->path = ith_strndup(path, (int64_t)strlen(path));
    if (!file->path)
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path);
    r->num_files++; /* from here on close frees it */
    ITH_TRY(ith_map_open(&file->map, path, err));
    ITH_WRAP(read_header(r, &file->map, err), err, "%s", path);
    return ITH_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const ith_st_entry *const *)a)->name, (*(const ith_st_entry *const *)b)->name);
}

static ith_status build_names(ith_st_reader *r, ith_error *err)
{
    ITH_TRY(ith_alloc_zero((void **)&r->by_name, r->count + 1, sizeof *r->by_name, "tensor names",
                           err));
    for (int64_t i = 0; i < r->count; i++)
        r->by_name[i] = &r->entries[i];
    if (r->count)
        qsort(r->by_name, (size_t)r->count, sizeof *r->by_name, compare_names);
    for (int64_t i = 1; i < r->count; i++) {
        const ith_st_entry *a = r->by_name[i - 1], *b = r->by_name[i];
        if (strcmp(a->name, b->name) == 0)
            return ith_fail(err, ITH_ERR_FORMAT, "%s: %.200s is in %s as well",
                            r->files[ith_max_i64(a->file_idx, b->file_idx)].path, a->name,
                            r->files[ith_min_i64(a->file_idx, b->file_idx)].path);
    }
    return ITH_OK;
}

static int compare_strings(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Opens the distinct shards of a weight map in name order. */
static ith_status add_shards(ith_st_reader *r, json_t *weight_map, const char *dir, ith_error *err)
{
    const char **shards = NULL;
    ith_buf path = {0};
    int64_t count = 0;
    const char *name;
    json_t *value;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc_zero((void **)&shards, (int64_t)json_object_size(weight_map) + 1,
                               sizeof *shards, "shard names", err));
    json_object_foreach(weight_map, name, value)
    {
        const char *shard = json_string_value(value);
        if (!shard || !shard[0] || strlen(shard) != json_string_length(value) ||
            strchr(shard, '/')) {
            status =
                ith_fail(err, ITH_ERR_FORMAT,
                         "weight_map: %.200s: expected a file name in the same directory", name);
            goto out;
        }
        shards[count++] = shard;
    }
    if (count)
        qsort(shards, (size_t)count, sizeof *shards, compare_strings);
    for (int64_t i = 0; i < count; i++) {
        if (i && strcmp(shards[i], shards[i - 1]) == 0)
            continue;
        ith_path_join(&path, dir, shards[i]);
        ITH_TRY_OUT(ith_buf_check(&path, shards[i], err));
        ITH_TRY_OUT(add_file(r, path.data, err));
    }
out:
    ith_buf_deinit(&path);
    ith_free(shards);
    return status;
}

/* The index and the shards name the same tensors. One that only its shard names is loaded as the
 * Python library loads it, and told. */
static ith_status check_weight_map(const ith_st_reader *r, json_t *weight_map, ith_error *err)
{
    const char *name;
    json_t *value;
    json_object_foreach(weight_map, name, value)
    {
        const ith_st_entry *entry = ith_st_find(r, name);
        const char *shard = json_string_value(value);
        if (!entry || strcmp(ith_path_base(r->files[entry->file_idx].path), shard) != 0)
            return ith_fail(err, ITH_ERR_FORMAT, "weight_map: %.200s is not in %.200s", name,
                            shard);
    }
    for (int64_t i = 0; i < r->count; i++)
        if (!json_object_get(weight_map, r->entries[i].name))
            ith_log(ITH_LOG_WARN, "checkpoint", "%s: %s is not in the index",
                    r->files[r->entries[i].file_idx].path, r->entries[i].name);
    return ITH_OK;
}

static ith_status add_index(ith_st_reader *r, const char *path, ith_error *err)
{
    ith_map map = {NULL, 0};
    json_t *index = NULL;
    char *dir = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_map_open(&map, path, err));
    ITH_TRY_OUT(ith_json_parse_unique(&index, map.data, map.size, path, err));
    json_t *weight_map = json_object_get(index, "weight_map");
    if (!json_is_object(weight_map)) {
        status = ith_fail(err, ITH_ERR_FORMAT, "%s: weight_map: found %s, expected an object", path,
                          ith_json_type_name(weight_map));
        goto out;
    }
    dir = ith_strndup(path, ith_path_base(path) - path);
    if (!dir) {
        status = ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path);
        goto out;
    }
    ITH_TRY_OUT(add_shards(r, weight_map, dir, err));
    ITH_TRY_OUT(build_names(r, err));
    status = check_weight_map(r, weight_map, err);
    if (status != ITH_OK)
        ith_wrap(err, status, "%s", path);
out:
    ith_free(dir);
    json_decref(index);
    ith_map_close(&map);
    return status;
}

static bool ends_with(const char *text, const char *suffix)
{
    size_t len = strlen(text), suffix_len = strlen(suffix);
    return len >= suffix_len && strcmp(text + len - suffix_len, suffix) == 0;
}

static ith_status open_file_or_index(ith_st_reader **out, const char *path, ith_error *err)
{
    ith_st_reader *r = NULL;
    ITH_TRY(ith_alloc_zero((void **)&r, 1, sizeof *r, path, err));
    ith_arena_init(&r->names, 0);
    ith_status status;
    if (ends_with(path, ".index.json")) {
        status = add_index(r, path, err);
    } else {
        status = add_file(r, path, err);
        if (status == ITH_OK)
            status = build_names(r, err);
    }
    if (status != ITH_OK) {
        ith_st_close(r);
        return status;
    }
    *out = r;
    return ITH_OK;
}

ith_status ith_st_open_stem(ith_st_reader **out, const char *dir, const char *stem, ith_error *err)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, stem);
    int64_t stem_len = path.len;
    ith_buf_puts(&path, SAFETENSORS_SUFFIX);
    ith_status status = ith_buf_check(&path, stem, err);
    if (status == ITH_OK && !ith_path_exists(path.data)) {
        path.len = stem_len;
        ith_buf_puts(&path, INDEX_SUFFIX);
        status = ith_buf_check(&path, stem, err);
        if (status == ITH_OK && !ith_path_exists(path.data))
            status =
                ith_fail(err, ITH_ERR_IO,
                         "%s: neither %s" SAFETENSORS_SUFFIX " nor %s" INDEX_SUFFIX " is there",
                         dir, stem, stem);
    }
    if (status == ITH_OK)
        status = open_file_or_index(out, path.data, err);
    ith_buf_deinit(&path);
    return status;
}

ith_status ith_st_open(ith_st_reader **out, const char *path, ith_error *err)
{
    return ith_path_is_dir(path) ? ith_st_open_stem(out, path, "model", err)
                                 : open_file_or_index(out, path, err);
}

void ith_st_close(ith_st_reader *r)
{
    if (!r)
        return;
    for (int64_t i = 0; i < r->num_files; i++) {
        ith_free(r->files[i].path);
        ith_map_close(&r->files[i].map);
        json_decref(r->files[i].metadata);
    }
    ith_free(r->files);
    ith_free(r->entries);
    ith_free(r->by_name);
    ith_arena_deinit(&r->names);
    ith_free(r);
}

ith_status ith_st_read(const ith_st_reader *r, const ith_st_entry *entry, int64_t offset, void *out,
                       int64_t bytes, ith_error *err)
{
    const st_file *f = &r->files[entry->file_idx];
    ITH_ASSERT(offset >= 0 && bytes >= 0 && bytes <= entry->bytes - offset);
    return ith_read_at(f->path, (const char *)entry->data - f->map.data + offset, out, bytes, err);
}

int64_t ith_st_count(const ith_st_reader *r)
{
    return r->count;
}

const ith_st_entry *ith_st_at(const ith_st_reader *r, int64_t i)
{
    ITH_ASSERT(i >= 0 && i < r->count);
    return &r->entries[i];
}

const ith_st_entry *ith_st_find(const ith_st_reader *r, const char *name)
{
    int64_t low = 0, high = r->count;
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        int order = strcmp(name, r->by_name[mid]->name);
        if (order == 0)
            return r->by_name[mid];
        if (order < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

ith_status ith_st_need(const ith_st_reader *r, const char *name, int ndim, const int64_t *shape,
                       const char *why, const ith_st_entry **out, ith_error *err)
{
    const ith_st_entry *entry = ith_st_find(r, name);
    if (!entry)
        return ith_fail(err, ITH_ERR_FORMAT, "%s%s: tensor %.200s is missing",
                        r->num_files ? ith_path_base(r->files[0].path) : "weights",
                        r->num_files > 1 ? " and its shards" : "", name);
    if (!ith_st_has_shape(entry, ndim, shape)) {
        char found[256], wanted[256];
        shape_text(entry->ndim, entry->shape, found, sizeof found);
        shape_text(ndim, shape, wanted, sizeof wanted);
        return ith_fail(err, ITH_ERR_FORMAT, "%s: %.200s: shape %s, expected %s%s%s%s",
                        ith_path_base(r->files[entry->file_idx].path), name, found, wanted,
                        why ? " (" : "", why ? why : "", why ? ")" : "");
    }
    *out = entry;
    return ITH_OK;
}

int64_t ith_st_total_bytes(const ith_st_reader *r)
{
    int64_t total = 0;
    for (int64_t i = 0; i < r->count; i++)
        total += r->entries[i].bytes;
    return total;
}

int64_t ith_st_num_files(const ith_st_reader *r)
{
    return r->num_files;
}

const char *ith_st_file_path(const ith_st_reader *r, int64_t file_idx)
{
    ITH_ASSERT(file_idx >= 0 && file_idx < r->num_files);
    return r->files[file_idx].path;
}

const char *ith_st_metadata(const ith_st_reader *r, int64_t file_idx, const char *key)
{
    ITH_ASSERT(file_idx >= 0 && file_idx < r->num_files);
    return json_string_value(json_object_get(r->files[file_idx].metadata, key));
}
