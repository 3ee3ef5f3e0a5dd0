/* safetensors_writer.c - tensors into one file or shards with an index, by one process or many.
 *
 * Invariants:
 *  1. Everything lies in a staging directory inside the target until commit, so a failed or killed
 *     write leaves the target's files alone.
 *  2. Bytes and their places depend on the declared tensors, the options and the data only.
 *  3. A sharded set becomes loadable with its index, the last file.
 *  4. Rank 0 makes files with their headers and moves them; all fill them. */
#include "checkpoint/safetensors.h"

#include "base/json.h"

#include <ctype.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct {
    int64_t begin, end; /* range in `order`, and in declared order */
    int64_t bytes, header_bytes;
} st_shard;

struct ith_st_writer {
    char *dir; /* NULL: plan only */
    char *stem;
    ith_buf stage;         /* the staging directory; empty when not made */
    ith_buf metadata;      /* JSON text */
    ith_st_entry *tensors; /* as declared */
    int64_t *order;        /* order[k]: index of the k-th tensor in the files */
    int64_t *shard_of;     /* of tensor i */
    int64_t *data_at;      /* its first byte behind the header of its shard */
    int64_t count;
    st_shard *shards;
    int64_t num_shards;
    ith_arena names;
    ith_comm *ranks; /* borrowed; NULL: alone */

    int64_t cursor, cursor_bytes; /* of push: next tensor in `order`, its bytes so far */
    int64_t bytes_put;            /* by this rank */
    bool has_met;
    int64_t open_shard; /* that `file` is; -1: none */
    ith_range_file file;
};

/* Sort key of the Python library's writer: its list of types, widest last. */
static const unsigned char dtype_rank[ITH_DTYPE_COUNT] = {
    [ITH_BOOL] = 0,        [ITH_U8] = 1,          [ITH_I8] = 2,   [ITH_F8_E5M2] = 3,
    [ITH_F8_E4M3] = 4,     [ITH_F8_E8M0] = 5,     [ITH_I16] = 8,  [ITH_U16] = 9,
    [ITH_F8_E4M3FNUZ] = 6, [ITH_F8_E5M2FNUZ] = 7, [ITH_F16] = 10, [ITH_BF16] = 11,
    [ITH_I32] = 12,        [ITH_U32] = 13,        [ITH_F32] = 14, [ITH_C64] = 15,
    [ITH_F64] = 16,        [ITH_I64] = 17,        [ITH_U64] = 18,
};

/* "stem.safetensors" or "stem-00002-of-00005.safetensors". */
static void shard_name(ith_buf *out, const ith_st_writer *w, int64_t shard_idx)
{
    if (w->num_shards == 1)
        ith_buf_printf(out, "%s.safetensors", w->stem);
    else
        ith_buf_printf(out, "%s-%05lld-of-%05lld.safetensors", w->stem, (long long)shard_idx + 1,
                       (long long)w->num_shards);
}

/* ---- plan ---- */

static ith_status copy_tensor(ith_st_writer *w, ith_st_entry *to, const ith_st_entry *from,
                              ith_error *err)
{
    ITH_ASSERT(from->name && from->ndim >= 0 && from->ndim <= ITH_ST_MAX_DIMS);
    *to = *from;
    to->bytes = ith_dtype_bytes(from->dtype);
    for (int i = 0; i < from->ndim; i++)
        if (from->shape[i] < 0 || !ith_mul_ok(to->bytes, from->shape[i], &to->bytes))
            return ith_fail(err, ITH_ERR_FORMAT, "%.200s: bad shape", from->name);
    if (strcmp(from->name, "__metadata__") == 0)
        return ith_fail(err, ITH_ERR_FORMAT, "a tensor cannot be named __metadata__");
    to->name = ith_arena_strndup(&w->names, from->name, (int64_t)strlen(from->name));
    to->data = NULL;
    return to->name ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory: tensor names");
}

static ith_status plan_shards(ith_st_writer *w, int64_t max_bytes, ith_error *err)
{
    int64_t cap = 0, begin = 0, bytes = 0;
    for (int64_t i = 0; i <= w->count; i++) {
        bool full = i < w->count && i > begin && w->tensors[i].bytes &&
                    w->tensors[i].bytes > max_bytes - bytes;
        if (full || i == w->count) {
            ITH_TRY(ith_grow((void **)&w->shards, &cap, w->num_shards + 1, sizeof *w->shards,
                             "shards", err));
            w->shards[w->num_shards++] = (st_shard){.begin = begin, .end = i, .bytes = bytes};
            begin = i;
            bytes = 0;
        }
        if (i < w->count && !ith_add_ok(bytes, w->tensors[i].bytes, &bytes))
            return ith_fail(err, ITH_ERR_FORMAT, "tensors do not fit 64 bits of size");
    }
    return ITH_OK;
}

static int compare_file_order(const void *a, const void *b, void *arg)
{
    const ith_st_entry *x = (const ith_st_entry *)arg + *(const int64_t *)a;
    const ith_st_entry *y = (const ith_st_entry *)arg + *(const int64_t *)b;
    int rank = dtype_rank[y->dtype] - dtype_rank[x->dtype];
    return rank ? rank : strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b, void *arg)
{
    const ith_st_entry *tensors = arg;
    return strcmp(tensors[*(const int64_t *)a].name, tensors[*(const int64_t *)b].name);
}

/* Fills `order`; a name declared twice is found on the way. */
static ith_status plan_order(ith_st_writer *w, ith_error *err)
{
    ITH_TRY(
        ith_alloc((void **)&w->order, w->count * (int64_t)sizeof *w->order, "tensor order", err));
    for (int64_t i = 0; i < w->count; i++)
        w->order[i] = i;
    if (!w->count)
        return ITH_OK;
    qsort_r(w->order, (size_t)w->count, sizeof *w->order, compare_names, w->tensors);
    for (int64_t i = 1; i < w->count; i++)
        if (strcmp(w->tensors[w->order[i]].name, w->tensors[w->order[i - 1]].name) == 0)
            return ith_fail(err, ITH_ERR_FORMAT, "tensor %.200s is declared twice",
                            w->tensors[w->order[i]].name);
    for (int64_t i = 0; i < w->count; i++)
        w->order[i] = i;
    for (int64_t s = 0; s < w->num_shards; s++)
        qsort_r(w->order + w->shards[s].begin, (size_t)(w->shards[s].end - w->shards[s].begin),
                sizeof *w->order, compare_file_order, w->tensors);
    return ITH_OK;
}

static ith_status plan_metadata(ith_st_writer *w, const char *const *metadata, ith_error *err)
{
    static const char *const standard[] = {"format", "pt", NULL};
    if (!metadata)
        metadata = standard;
    ith_buf_putc(&w->metadata, '{');
    for (int i = 0; metadata[i]; i += 2) {
        ITH_ASSERT(metadata[i + 1]);
        if (i)
            ith_buf_putc(&w->metadata, ',');
        ith_json_append_string(&w->metadata, metadata[i], (int64_t)strlen(metadata[i]));
        ith_buf_putc(&w->metadata, ':');
        ith_json_append_string(&w->metadata, metadata[i + 1], (int64_t)strlen(metadata[i + 1]));
    }
    ith_buf_putc(&w->metadata, '}');
    return ith_buf_check(&w->metadata, "metadata", err);
}

/* The whole header of a shard, padded; fills the places of its tensors. */
static ith_status make_header(ith_st_writer *w, int64_t shard_idx, ith_buf *out, ith_error *err)
{
    const st_shard *shard = &w->shards[shard_idx];
    int64_t at = 0;
    ith_buf_clear(out);
    ith_buf_printf(out, "%8s{\"__metadata__\":%s", "", w->metadata.data);
    for (int64_t k = shard->begin; k < shard->end; k++) {
        const ith_st_entry *t = &w->tensors[w->order[k]];
        w->data_at[w->order[k]] = at;
        w->shard_of[w->order[k]] = shard_idx;
        ith_buf_putc(out, ',');
        ith_json_append_string(out, t->name, (int64_t)strlen(t->name));
        ith_buf_printf(out, ":{\"dtype\":\"%s\",\"shape\":[", ith_dtype_name(t->dtype));
        for (int i = 0; i < t->ndim; i++)
            ith_buf_printf(out, "%s%lld", i ? "," : "", (long long)t->shape[i]);
        ith_buf_printf(out, "],\"data_offsets\":[%lld,%lld]}", (long long)at,
                       (long long)(at + t->bytes));
        at += t->bytes;
    }
    ITH_ASSERT(at == shard->bytes);
    ith_buf_putc(out, '}');
    while (out->failed == ITH_OK && out->len % 8)
        ith_buf_putc(out, ' ');
    ITH_TRY(ith_buf_check(out, "header", err));
    for (int i = 0; i < 8; i++)
        out->data[i] = (char)((uint64_t)(out->len - 8) >> (8 * i));
    return ITH_OK;
}

static ith_status plan_places(ith_st_writer *w, ith_error *err)
{
    ith_buf header = {0};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc_zero((void **)&w->shard_of, w->count, 8, "tensor places", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&w->data_at, w->count, 8, "tensor places", err));
    for (int64_t s = 0; s < w->num_shards; s++) {
        ITH_TRY_OUT(make_header(w, s, &header, err));
        w->shards[s].header_bytes = header.len;
    }
out:
    ith_buf_deinit(&header);
    return status;
}

static ith_status plan(ith_st_writer *w, const char *dir, const ith_st_entry *tensors,
                       int64_t count, const ith_st_options *options, ith_error *err)
{
    const char *stem = options && options->stem ? options->stem : "model";
    int64_t max_bytes =
        options && options->max_shard_bytes ? options->max_shard_bytes : ITH_ST_SHARD_BYTES;
    ITH_ASSERT(count >= 0 && max_bytes > 0);
    w->stem = ith_strndup(stem, (int64_t)strlen(stem));
    w->dir = dir ? ith_strndup(dir, (int64_t)strlen(dir)) : NULL;
    if (!w->stem || (dir && !w->dir))
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: writer of %s", stem);
    ITH_TRY(ith_alloc_zero((void **)&w->tensors, count, sizeof *w->tensors, "tensors", err));
    for (int64_t i = 0; i < count; i++)
        ITH_TRY(copy_tensor(w, &w->tensors[i], &tensors[i], err));
    w->count = count;
    ITH_TRY(plan_shards(w, max_bytes, err));
    ITH_TRY(plan_order(w, err));
    ITH_TRY(plan_metadata(w, options ? options->metadata : NULL, err));
    return plan_places(w, err);
}

/* ---- staging directory: DIR/.STEM.tmp-PLACE-PID (file.h), of rank 0 ---- */

static bool is_leader(const ith_st_writer *w)
{
    return !w->ranks || w->ranks->rank == 0;
}

static ith_status remove_leftovers(const ith_st_writer *w, ith_error *err)
{
    ith_names names;
    ith_buf prefix = {0}, path = {0};
    ITH_TRY(ith_list_dir(w->dir, &names, err));
    ith_buf_printf(&prefix, ".%s.tmp-", w->stem);
    ith_status status = ith_buf_check(&prefix, w->dir, err);
    for (int64_t i = 0; i < names.count && status == ITH_OK; i++) {
        if (strncmp(names.names[i], prefix.data, (size_t)prefix.len) != 0 ||
            !ith_tmp_is_left(names.names[i]))
            continue;
        ith_path_join(&path, w->dir, names.names[i]);
        status = ith_buf_check(&path, w->dir, err);
        if (status == ITH_OK)
            status = ith_remove_tree(path.data, err);
    }
    ith_buf_deinit(&path);
    ith_buf_deinit(&prefix);
    ith_names_free(&names);
    return status;
}

static ith_status name_stage(ith_st_writer *w, const char *tag, ith_error *err)
{
    ith_buf_printf(&w->stage, "%s/.%s%s", w->dir, w->stem, tag);
    ith_status status = ith_buf_check(&w->stage, w->dir, err);
    if (status != ITH_OK)
        ith_buf_deinit(&w->stage);
    return status;
}

static ith_status shard_path(const ith_st_writer *w, int64_t shard_idx, ith_buf *out,
                             ith_error *err)
{
    ith_buf_clear(out);
    ith_buf_printf(out, "%s/", w->stage.data);
    shard_name(out, w, shard_idx);
    return ith_buf_check(out, "shard name", err);
}

/* Every file in its size, header written. */
static ith_status make_files(ith_st_writer *w, ith_error *err)
{
    ith_buf path = {0}, header = {0};
    ith_range_file f = {.fd = -1};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_make_dirs(w->dir, err));
    ITH_TRY_OUT(remove_leftovers(w, err));
    ITH_TRY_OUT(ith_make_dirs(w->stage.data, err));
    for (int64_t s = 0; s < w->num_shards; s++) {
        ITH_TRY_OUT(make_header(w, s, &header, err));
        ITH_TRY_OUT(shard_path(w, s, &path, err));
        ITH_TRY_OUT(ith_range_create(&f, path.data, header.len + w->shards[s].bytes, err));
        ITH_TRY_OUT(ith_range_write(&f, 0, header.data, header.len, err));
        ITH_TRY_OUT(ith_range_close(&f, err));
    }
out:
    ith_range_abandon(&f);
    ith_buf_deinit(&path);
    ith_buf_deinit(&header);
    return status;
}

ith_status ith_st_writer_create(ith_st_writer **out, const char *dir, const ith_st_entry *tensors,
                                int64_t count, const ith_st_options *options, ith_error *err)
{
    ith_st_writer *w = NULL;
    ith_comm *ranks = options ? options->ranks : NULL;
    char tag[ITH_TMP_TAG_BYTES];
    ith_tmp_tag(tag);
    if (dir && ranks)
        ITH_TRY(ith_comm_broadcast(ranks, tag, sizeof tag, 0, err));
    ith_status status = ith_alloc_zero((void **)&w, 1, sizeof *w, "weights writer", err);
    if (w) {
        ith_arena_init(&w->names, 0);
        w->ranks = ranks;
        w->open_shard = w->file.fd = -1;
        status = plan(w, dir, tensors, count, options, err);
        if (status == ITH_OK && dir)
            status = name_stage(w, tag, err);
        if (status == ITH_OK && dir && is_leader(w))
            status = make_files(w, err);
    }
    status = ith_comm_agree(ranks, status, err);
    if (status != ITH_OK) {
        ith_st_writer_destroy(w);
        return status;
    }
    *out = w;
    return ITH_OK;
}

/* ---- data ---- */

int64_t ith_st_writer_at(const ith_st_writer *w, int64_t k)
{
    ITH_ASSERT(k >= 0 && k < w->count);
    return w->order[k];
}

static ith_status close_shard(ith_st_writer *w, ith_error *err)
{
    if (w->open_shard < 0)
        return ITH_OK;
    w->open_shard = -1;
    ith_status status = ith_range_close(&w->file, err);
    ith_range_abandon(&w->file);
    return status;
}

static ith_status open_shard(ith_st_writer *w, int64_t shard_idx, ith_error *err)
{
    ith_buf path = {0};
    if (w->open_shard == shard_idx)
        return ITH_OK;
    ith_status status = close_shard(w, err);
    if (status == ITH_OK)
        status = shard_path(w, shard_idx, &path, err);
    if (status == ITH_OK)
        status = ith_range_open(&w->file, path.data, err);
    if (status == ITH_OK)
        w->open_shard = shard_idx;
    ith_buf_deinit(&path);
    return status;
}

ith_status ith_st_writer_put(ith_st_writer *w, int64_t i, int64_t at, const void *data,
                             int64_t bytes, ith_error *err)
{
    ITH_ASSERT(i >= 0 && i < w->count && !w->has_met);
    ITH_ASSERT(at >= 0 && bytes >= 0 && at + bytes <= w->tensors[i].bytes);
    w->bytes_put += bytes;
    if (!w->dir || bytes == 0)
        return ITH_OK;
    int64_t s = w->shard_of[i];
    ITH_TRY(open_shard(w, s, err));
    return ith_range_write(&w->file, w->shards[s].header_bytes + w->data_at[i] + at, data, bytes,
                           err);
}

int64_t ith_st_writer_next(const ith_st_writer *w)
{
    int64_t k = w->cursor;
    while (k < w->count && w->tensors[w->order[k]].bytes == 0)
        k++;
    return k < w->count ? w->order[k] : -1;
}

ith_status ith_st_writer_push(ith_st_writer *w, const void *data, int64_t bytes, ith_error *err)
{
    int64_t i = ith_st_writer_next(w);
    if (bytes == 0)
        return ITH_OK;
    ITH_ASSERT(bytes > 0 && i >= 0 && !w->ranks);
    ITH_TRY(ith_st_writer_put(w, i, w->cursor_bytes, data, bytes, err));
    w->cursor_bytes += bytes;
    if (w->cursor_bytes < w->tensors[i].bytes)
        return ITH_OK;
    while (w->order[w->cursor++] != i)
        continue;
    w->cursor_bytes = 0;
    return ITH_OK;
}

static ith_status check_all_put(ith_st_writer *w, ith_error *err)
{
    int64_t bytes = w->bytes_put, total = ith_st_writer_total_bytes(w);
    if (w->ranks)
        ITH_TRY(ith_comm_all_reduce(w->ranks, &bytes, 1, ITH_I64, ITH_REDUCE_SUM, err));
    return bytes == total
               ? ITH_OK
               : ith_fail(err, ITH_ERR_RUN, "%s: %lld of %lld bytes were written by all ranks",
                          w->stem, (long long)bytes, (long long)total);
}

ith_status ith_st_writer_meet(ith_st_writer *w, ith_status status, ith_error *err)
{
    ITH_ASSERT(!w->has_met);
    if (status == ITH_OK)
        status = close_shard(w, err);
    ITH_TRY(ith_comm_agree(w->ranks, status, err));
    ITH_TRY(check_all_put(w, err));
    w->has_met = true;
    return ITH_OK;
}

/* ---- commit ---- */

static ith_status write_index(const ith_st_writer *w, ith_error *err)
{
    int64_t *by_name = NULL;
    ith_buf text = {0}, path = {0};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc((void **)&by_name, w->count * (int64_t)sizeof *by_name, "index", err));
    for (int64_t i = 0; i < w->count; i++)
        by_name[i] = i;
    qsort_r(by_name, (size_t)w->count, sizeof *by_name, compare_names, w->tensors);
    ith_buf_printf(&text,
                   "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n  \"weight_map\": {",
                   (long long)ith_st_writer_total_bytes(w));
    for (int64_t k = 0; k < w->count; k++) {
        const char *name = w->tensors[by_name[k]].name;
        ith_buf_puts(&text, k ? ",\n    " : "\n    ");
        ith_json_append_string(&text, name, (int64_t)strlen(name));
        ith_buf_puts(&text, ": \"");
        shard_name(&text, w, w->shard_of[by_name[k]]);
        ith_buf_putc(&text, '"');
    }
    ith_buf_puts(&text, "\n  }\n}\n");
    ith_buf_printf(&path, "%s/%s.safetensors.index.json", w->stage.data, w->stem);
    ITH_TRY_OUT(ith_buf_check(&text, "index", err));
    ITH_TRY_OUT(ith_buf_check(&path, "index", err));
    status = ith_write_file(path.data, text.data, text.len, err);
out:
    ith_buf_deinit(&path);
    ith_buf_deinit(&text);
    ith_free(by_name);
    return status;
}

/* "STEM-ddddd-of-ddddd.safetensors" */
static bool is_shard_of(const char *name, const char *stem)
{
    size_t len = strlen(stem);
    if (strncmp(name, stem, len) != 0)
        return false;
    static const char pattern[] = "-ddddd-of-ddddd.safetensors";
    name += len;
    for (size_t i = 0; i < sizeof pattern; i++) /* the NUL, too */
        if (i < 15 && pattern[i] == 'd' ? !isdigit((unsigned char)name[i]) : name[i] != pattern[i])
            return false;
    return true;
}

static ith_status remove_in(const char *dir, const char *name, ith_error *err)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    ith_status status = ith_buf_check(&path, name, err);
    if (status == ITH_OK)
        status = ith_remove_tree(path.data, err);
    ith_buf_deinit(&path);
    return status;
}

/* Removes STEM.safetensors (unless it is new), the index, and, with `shards`, old shards. */
static ith_status remove_old(const ith_st_writer *w, bool shards, ith_error *err)
{
    ith_buf name = {0};
    ith_names names = {NULL, 0};
    ith_status status = ITH_OK;
    if (shards) {
        ITH_TRY_OUT(ith_list_dir(w->dir, &names, err));
        for (int64_t i = 0; i < names.count; i++) {
            if (!is_shard_of(names.names[i], w->stem))
                continue;
            bool is_new = false;
            for (int64_t s = 0; s < w->num_shards && !is_new; s++) {
                ith_buf_clear(&name);
                shard_name(&name, w, s);
                ITH_TRY_OUT(ith_buf_check(&name, "shard name", err));
                is_new = strcmp(name.data, names.names[i]) == 0;
            }
            if (!is_new)
                ITH_TRY_OUT(remove_in(w->dir, names.names[i], err));
        }
        goto out;
    }
    ith_buf_printf(&name, "%s.safetensors.index.json", w->stem);
    ITH_TRY_OUT(ith_buf_check(&name, "index", err));
    ITH_TRY_OUT(remove_in(w->dir, name.data, err));
    if (w->num_shards > 1) {
        ith_buf_clear(&name);
        ith_buf_printf(&name, "%s.safetensors", w->stem);
        ITH_TRY_OUT(ith_buf_check(&name, "weights", err));
        ITH_TRY_OUT(remove_in(w->dir, name.data, err));
    }
out:
    ith_names_free(&names);
    ith_buf_deinit(&name);
    return status;
}

static ith_status move_in(const ith_st_writer *w, const char *name, ith_error *err)
{
    ith_buf from = {0}, to = {0};
    ith_path_join(&from, w->stage.data, name);
    ith_path_join(&to, w->dir, name);
    ith_status status = ith_buf_check(&from, name, err);
    if (status == ITH_OK)
        status = ith_buf_check(&to, name, err);
    if (status == ITH_OK)
        status = ith_rename(from.data, to.data, err);
    ith_buf_deinit(&from);
    ith_buf_deinit(&to);
    return status;
}

static ith_status move_all(const ith_st_writer *w, ith_error *err)
{
    ith_buf name = {0};
    ith_status status = ITH_OK;
    for (int64_t s = 0; s < w->num_shards; s++) {
        ith_buf_clear(&name);
        shard_name(&name, w, s);
        ITH_TRY_OUT(ith_buf_check(&name, "shard name", err));
        ITH_TRY_OUT(move_in(w, name.data, err));
    }
    if (w->num_shards > 1) {
        ith_buf_clear(&name);
        ith_buf_printf(&name, "%s.safetensors.index.json", w->stem);
        ITH_TRY_OUT(ith_buf_check(&name, "index", err));
        status = move_in(w, name.data, err);
    }
out:
    ith_buf_deinit(&name);
    return status;
}

static ith_status place(ith_st_writer *w, ith_error *err)
{
    bool sharded = w->num_shards > 1;
    if (sharded) {
        ITH_TRY(write_index(w, err));
        /* Old and new shards may share names: without an index no reader takes a mixture. */
        ITH_TRY(remove_old(w, false, err));
        ITH_TRY(ith_sync_dir(w->dir, err));
    }
    ITH_TRY(move_all(w, err));
    if (!sharded) /* readers prefer the single file, which is in place now */
        ITH_TRY(remove_old(w, false, err));
    ITH_TRY(remove_old(w, true, err));
    ITH_TRY(ith_remove_tree(w->stage.data, err));
    ith_buf_deinit(&w->stage);
    return ith_sync_dir(w->dir, err);
}

ith_status ith_st_writer_commit(ith_st_writer *w, ith_error *err)
{
    if (!w->has_met)
        ITH_TRY(ith_st_writer_meet(w, ITH_OK, err));
    return ith_comm_agree(w->ranks, w->dir && is_leader(w) ? place(w, err) : ITH_OK, err);
}

void ith_st_writer_destroy(ith_st_writer *w)
{
    if (!w)
        return;
    ith_range_abandon(&w->file);
    if (w->stage.len && is_leader(w)) {
        ith_error ignored = {0}; /* a leftover is removed by the next writer */
        ith_remove_tree(w->stage.data, &ignored);
    }
    ith_buf_deinit(&w->stage);
    ith_buf_deinit(&w->metadata);
    ith_free(w->dir);
    ith_free(w->stem);
    ith_free(w->tensors);
    ith_free(w->order);
    ith_free(w->shard_of);
    ith_free(w->data_at);
    ith_free(w->shards);
    ith_arena_deinit(&w->names);
    ith_free(w);
}

int64_t ith_st_writer_num_files(const ith_st_writer *w)
{
    return w->num_shards;
}

int64_t ith_st_writer_total_bytes(const ith_st_writer *w)
{
    int64_t total = 0;
    for (int64_t s = 0; s < w->num_shards; s++)
        total += w->shards[s].bytes;
    return total;
}

ith_status ith_st_write(const char *dir, const ith_st_entry *tensors, int64_t count,
                        const ith_st_options *options, ith_error *err)
{
    ith_st_writer *w = NULL;
    ITH_TRY(ith_st_writer_create(&w, dir, tensors, count, options, err));
    ith_status status = ITH_OK;
    for (int64_t i; status == ITH_OK && (i = ith_st_writer_next(w)) >= 0;)
        status = ith_st_writer_push(w, tensors[i].data, w->tensors[i].bytes, err);
    if (status == ITH_OK)
        status = ith_st_writer_commit(w, err);
    ith_st_writer_destroy(w);
    return status;
}
