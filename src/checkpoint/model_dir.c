/* model_dir.c - config and side files by copy, weights by merging the caller's tensors with the
 * source's.
 *
 * Invariants:
 *  1. Every source tensor is written once, from the caller or bit for bit from the file; the one
 *     exception is a tied duplicate.
 *  2. The source directory is never written to. */
#include "checkpoint/model_dir.h"

#include "base/json.h"
#include "base/log.h"
#include "checkpoint/hf_config.h"
#include "checkpoint/json_edit.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <sys/stat.h>

#define CHUNK_ELEMENTS ((int64_t)1 << 16)

/* ---- side files ---- */

bool ith_model_dir_is_side_file(const char *name)
{
    static const char *const patterns[] = {
        "generation_config.json",
        "tokenizer*",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template*",
        "*.jinja",
        "*preprocessor_config.json",
        "processor_config.json",
        "configuration.json",
        "*.tiktoken",
        "*.py",
        "LICENSE*",
        "NOTICE*",
        "USE_POLICY*",
    };
    /* editors and our own writers leave such names behind */
    if (name[0] == '.' || strstr(name, ".tmp-") || name[strlen(name) - 1] == '~')
        return false;
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (fnmatch(patterns[i], name, 0) == 0)
            return true;
    return false;
}

static bool has_file(const char *dir, const char *name)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    bool has = path.data && !path.failed && ith_path_exists(path.data);
    ith_buf_deinit(&path);
    return has;
}

ith_status ith_model_dir_check(const char *dir, int parts, ith_error *err)
{
    static const struct {
        int part;
        const char *one, *other, *missing;
    } wanted[] = {
        {ITH_DIR_CONFIG, "config.json", "config.json", "no config.json (is it a model directory?)"},
        {ITH_DIR_TOKENIZER, "tokenizer.json", "vocab.json",
         "no tokenizer (tokenizer.json, or vocab.json with merges.txt)"},
        {ITH_DIR_WEIGHTS, "model.safetensors", "model.safetensors.index.json",
         "no weights (model.safetensors, or shards with model.safetensors.index.json)"}};
    if (!ith_path_is_dir(dir))
        return ith_fail(err, ITH_ERR_USAGE, "%s: %s (give a model directory)", dir,
                        ith_path_exists(dir) ? "found a file" : "no such directory");
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if ((parts & wanted[i].part) && !has_file(dir, wanted[i].one) &&
            !has_file(dir, wanted[i].other))
            return ith_fail(err, ITH_ERR_USAGE, "%s: %s", dir, wanted[i].missing);
    return ITH_OK;
}

/* Sets every dtype key that the object has. nested: key of the object, NULL for the top. */
static ith_status set_dtype_keys(ith_buf *text, const json_t *object, const char *nested,
                                 const char *value, bool *found, ith_error *err)
{
    static const char *const keys[] = {"dtype", "torch_dtype"};
    for (int i = 0; i < 2; i++) {
        if (!json_object_get(object, keys[i]))
            continue;
        char path[256];
        snprintf(path, sizeof path, "%s%s%s", nested ? nested : "", nested ? "." : "", keys[i]);
        ITH_TRY(ith_json_edit_set(text, path, value, err));
        *found = true;
    }
    return ITH_OK;
}

static ith_status edit_dtype(ith_buf *text, const json_t *root, ith_dtype dtype, ith_error *err)
{
    const char *name = ith_hf_dtype_name(dtype), *key;
    if (!name)
        return ith_fail(err, ITH_ERR_USAGE,
                        "weights cannot be written as %s (F32, BF16, F16 or F64)",
                        ith_dtype_name(dtype));
    char value[32];
    json_t *child;
    bool found = false;
    snprintf(value, sizeof value, "\"%s\"", name);
    ITH_TRY(set_dtype_keys(text, root, NULL, value, &found, err));
    json_object_foreach((json_t *)(uintptr_t)root, key, child)
    {
        if (json_is_object(child) && !strchr(key, '.') && strlen(key) < 128)
            ITH_TRY(set_dtype_keys(text, child, key, value, &found, err));
    }
    /* every version of transformers understands this spelling */
    return found ? ITH_OK : ith_json_edit_set(text, "torch_dtype", value, err);
}

static ith_status copy_config(const char *from, const char *to, bool set_dtype, ith_dtype dtype,
                              ith_error *err)
{
    ith_buf text = {0};
    json_t *root = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_read_file(from, 0, &text, err));
    ITH_TRY_OUT(ith_json_parse(&root, text.data, text.len, from, err));
    if (!json_is_object(root)) {
        status = ith_fail(err, ITH_ERR_FORMAT, "%s: found %s, expected an object", from,
                          ith_json_type_name(root));
        goto out;
    }
    if (set_dtype) {
        status = edit_dtype(&text, root, dtype, err);
        if (status != ITH_OK) {
            ith_wrap(err, status, "%s", from);
            goto out;
        }
    }
    status = ith_write_file(to, text.data, text.len, err);
out:
    json_decref(root);
    ith_buf_deinit(&text);
    return status;
}

/* Copies matching regular files of a directory; a missing directory is fine. */
static ith_status copy_side_files(const char *source, const char *out_dir, ith_error *err)
{
    ith_names names = {NULL, 0};
    ith_buf from = {0}, to = {0};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_list_dir(source, &names, err));
    for (int64_t i = 0; i < names.count; i++) {
        if (!ith_model_dir_is_side_file(names.names[i]))
            continue;
        ith_path_join(&from, source, names.names[i]);
        ith_path_join(&to, out_dir, names.names[i]);
        ITH_TRY_OUT(ith_buf_check(&from, source, err));
        ITH_TRY_OUT(ith_buf_check(&to, out_dir, err));
        if (!ith_path_is_dir(from.data))
            ITH_TRY_OUT(ith_copy_file(from.data, to.data, err));
    }
out:
    ith_buf_deinit(&to);
    ith_buf_deinit(&from);
    ith_names_free(&names);
    return status;
}

/* transformers keeps named templates in a folder of their own. */
static ith_status copy_template_folder(const char *source, const char *out_dir, ith_error *err)
{
    ith_buf from = {0}, to = {0};
    ith_path_join(&from, source, "additional_chat_templates");
    ith_path_join(&to, out_dir, "additional_chat_templates");
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_buf_check(&from, source, err));
    ITH_TRY_OUT(ith_buf_check(&to, out_dir, err));
    if (!ith_path_is_dir(from.data))
        goto out;
    ITH_TRY_OUT(ith_make_dirs(to.data, err));
    status = copy_side_files(from.data, to.data, err);
out:
    ith_buf_deinit(&to);
    ith_buf_deinit(&from);
    return status;
}

static ith_status refuse_source(const char *source, const char *out_dir, ith_error *err)
{
    struct stat x, y; /* two names of one directory */
    if (stat(source, &x) == 0 && stat(out_dir, &y) == 0 && x.st_dev == y.st_dev &&
        x.st_ino == y.st_ino)
        return ith_fail(err, ITH_ERR_USAGE,
                        "%s is the directory the model was read from: write to another one",
                        out_dir);
    return ITH_OK;
}

ith_status ith_model_dir_copy_files(const char *source, const char *out_dir, bool set_dtype,
                                    ith_dtype dtype, ith_error *err)
{
    ITH_TRY(refuse_source(source, out_dir, err));
    ITH_TRY(ith_make_dirs(out_dir, err));
    ITH_TRY(copy_side_files(source, out_dir, err));
    ITH_TRY(copy_template_folder(source, out_dir, err));
    ith_buf from = {0}, to = {0};
    ith_path_join(&from, source, "config.json");
    ith_path_join(&to, out_dir, "config.json");
    ith_status status = ith_buf_check(&from, source, err);
    if (status == ITH_OK)
        status = ith_buf_check(&to, out_dir, err);
    if (status == ITH_OK)
        status = copy_config(from.data, to.data, set_dtype, dtype, err);
    ith_buf_deinit(&to);
    ith_buf_deinit(&from);
    return status;
}

/* ---- weights ---- */

/* Where the data of an output tensor comes from. */
typedef struct {
    int64_t caller_idx;        /* >= 0: the caller's */
    const ith_st_entry *entry; /* else: this one of the source */
} model_source;

typedef struct {
    const ith_model_write *write;
    const int64_t *by_name; /* the caller's tensors, sorted */
    ith_st_entry *out;      /* declared for the writer */
    model_source *from;
    int64_t count, num_copied;
} model_plan;

struct ith_model_sink {
    ith_st_writer *writer;
    int64_t tensor; /* of the writer, current */
    ith_dtype from, to;
    char *aligned; /* CHUNK_ELEMENTS of the widest type, for sources at odd addresses */
    char *converted;
};

static bool is_float(ith_dtype dtype)
{
    return dtype == ITH_F32 || dtype == ITH_BF16 || dtype == ITH_F16 || dtype == ITH_F64;
}

static ith_dtype main_dtype(const ith_st_reader *weights)
{
    int64_t bytes[ITH_DTYPE_COUNT] = {0};
    ith_dtype best = ITH_F32;
    for (int64_t i = 0; i < ith_st_count(weights); i++)
        bytes[ith_st_at(weights, i)->dtype] += ith_st_at(weights, i)->bytes;
    for (int d = 0; d < ITH_DTYPE_COUNT; d++)
        if (is_float((ith_dtype)d) && bytes[d] > bytes[best])
            best = (ith_dtype)d;
    return best;
}

static int compare_caller(const void *a, const void *b, void *arg)
{
    const ith_st_entry *tensors = arg;
    return strcmp(tensors[*(const int64_t *)a].name, tensors[*(const int64_t *)b].name);
}

/* Index of the caller's tensor of that name, -1 when it has none. */
static int64_t find_caller(const model_plan *p, const char *name)
{
    int64_t low = 0, high = p->write->count;
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        int order = strcmp(name, p->write->tensors[p->by_name[mid]].name);
        if (order == 0)
            return p->by_name[mid];
        if (order < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return -1;
}

static bool ends_with(const char *text, const char *suffix)
{
    size_t len = strlen(text), suffix_len = strlen(suffix);
    return len >= suffix_len && strcmp(text + len - suffix_len, suffix) == 0;
}

/* The model ties its head to an embedding that the caller changes: a stored head is stale. */
static ith_status has_stale_head(const model_plan *p, bool *out, ith_error *err)
{
    bool holds_embedding = false;
    for (int64_t i = 0; i < p->write->count; i++)
        holds_embedding |= ends_with(p->write->tensors[i].name, "embed_tokens.weight");
    *out = false;
    if (!holds_embedding || find_caller(p, "lm_head.weight") >= 0)
        return ITH_OK;
    ith_buf path = {0};
    json_t *root = NULL;
    ith_path_join(&path, p->write->source, "config.json");
    ith_status status = ith_buf_check(&path, p->write->source, err);
    if (status == ITH_OK)
        status = ith_json_load(&root, path.data, err);
    if (status == ITH_OK)
        *out = json_is_true(json_object_get(root, "tie_word_embeddings"));
    json_decref(root);
    ith_buf_deinit(&path);
    return status;
}

static ith_status plan_tensor(model_plan *p, const ith_st_entry *shape, ith_dtype dtype,
                              int64_t caller_idx, const ith_st_entry *entry, ith_error *err)
{
    ith_dtype given = caller_idx >= 0 ? p->write->tensors[caller_idx].dtype : entry->dtype;
    if (given != dtype && !(is_float(given) && is_float(dtype)))
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "%.200s: %s cannot be written as %s", shape->name,
                        ith_dtype_name(given), ith_dtype_name(dtype));
    p->out[p->count] = *shape;
    p->out[p->count].dtype = dtype;
    p->from[p->count] = (model_source){caller_idx, entry};
    p->count++;
    return ITH_OK;
}

/* The source's tensors in their order, then the caller's that are new. */
static ith_status plan_tensors(model_plan *p, ith_error *err)
{
    const ith_model_write *w = p->write;
    int64_t num_source = w->weights ? ith_st_count(w->weights) : 0;
    ith_dtype main = w->weights ? main_dtype(w->weights) : ITH_F32;
    bool stale_head = false;
    if (w->weights)
        ITH_TRY(has_stale_head(p, &stale_head, err));
    for (int64_t i = 0; i < num_source; i++) {
        const ith_st_entry *entry = ith_st_at(w->weights, i);
        int64_t caller_idx = find_caller(p, entry->name);
        if (caller_idx < 0 && stale_head && strcmp(entry->name, "lm_head.weight") == 0) {
            ith_log(ITH_LOG_INFO, "checkpoint",
                    "lm_head.weight is not written: tie_word_embeddings makes it the embedding");
            continue;
        }
        if (caller_idx >= 0 &&
            !ith_st_has_shape(entry, w->tensors[caller_idx].ndim, w->tensors[caller_idx].shape)) {
            char ours[256], theirs[256];
            return ith_fail(err, ITH_ERR_FORMAT, "%s: %.200s: shape is %s, %s is to be written",
                            ith_st_file_path(w->weights, entry->file_idx), entry->name,
                            ith_st_text(entry, theirs, sizeof theirs),
                            ith_st_text(&w->tensors[caller_idx], ours, sizeof ours));
        }
        ith_dtype dtype = w->set_dtype && entry->dtype == main ? w->dtype : entry->dtype;
        ITH_TRY(plan_tensor(p, entry, dtype, caller_idx, entry, err));
        p->num_copied += caller_idx < 0;
    }
    for (int64_t i = 0; i < w->count; i++) {
        const ith_st_entry *t = &w->tensors[i];
        if (w->weights && ith_st_find(w->weights, t->name))
            continue;
        ith_dtype dtype = w->set_dtype && is_float(t->dtype) ? w->dtype : t->dtype;
        ITH_TRY(plan_tensor(p, t, dtype, i, NULL, err));
    }
    return ITH_OK;
}

ith_status ith_model_put(ith_model_sink *s, int64_t first, const void *data, int64_t n,
                         ith_error *err)
{
    int64_t size = ith_dtype_bytes(s->from), size_to = ith_dtype_bytes(s->to);
    ITH_ASSERT(first >= 0 && n >= 0);
    if (s->from == s->to)
        return ith_st_writer_put(s->writer, s->tensor, first * size, data, n * size, err);
    for (int64_t done = 0, some; done < n; done += some) {
        some = ith_min_i64(CHUNK_ELEMENTS, n - done);
        const char *piece = (const char *)data + done * size;
        if ((uintptr_t)piece % (uintptr_t)size) {
            memcpy(s->aligned, piece, (size_t)(some * size));
            piece = s->aligned;
        }
        ith_convert(s->converted, s->to, piece, s->from, some);
        ITH_TRY(ith_st_writer_put(s->writer, s->tensor, (first + done) * size_to, s->converted,
                                  some * size_to, err));
    }
    return ITH_OK;
}

/* What all ranks have: an equal part each. */
static ith_status put_part(const ith_comm *ranks, const ith_st_entry *t, ith_model_sink *sink,
                           ith_error *err)
{
    int64_t n = ith_st_numel(t), rank = ranks ? ranks->rank : 0, size = ranks ? ranks->size : 1;
    int64_t first = n / size * rank + ith_min_i64(rank, n % size);
    return ith_model_put(sink, first, (const char *)t->data + first * ith_dtype_bytes(t->dtype),
                         n / size + (rank < n % size), err);
}

static ith_status write_tensor(const model_plan *p, int64_t i, ith_model_sink *sink, ith_error *err)
{
    const model_source *from = &p->from[i];
    const ith_st_entry *t =
        from->caller_idx >= 0 ? &p->write->tensors[from->caller_idx] : from->entry;
    sink->tensor = i;
    sink->from = t->dtype;
    sink->to = p->out[i].dtype;
    if (from->caller_idx >= 0 && p->write->put)
        ITH_WRAP(p->write->put(p->write->put_arg, from->caller_idx, sink, err), err, "%.200s",
                 t->name);
    else
        ITH_TRY(put_part(p->write->ranks, t, sink, err));
    return ITH_OK;
}

static void say_written(const model_plan *p, const char *out_dir, const ith_st_writer *writer)
{
    ith_log(ITH_LOG_INFO, "checkpoint",
            "%s: %lld tensors (%lld copied from the source), %lld "
            "bytes, %lld file(s)",
            out_dir, (long long)p->count, (long long)p->num_copied,
            (long long)ith_st_writer_total_bytes(writer),
            (long long)ith_st_writer_num_files(writer));
}

/* Collective. sink: with its buffers. */
static ith_status write_files(const ith_model_write *write, const char *out_dir, ith_error *err)
{
    ITH_TRY(ith_model_dir_copy_files(write->source, out_dir, write->set_dtype, write->dtype, err));
    if (!write->chat_template)
        return ITH_OK;
    ith_buf path = {0};
    ith_path_join(&path, out_dir, "chat_template.jinja"); /* readers take it before any other */
    ith_status status = ith_buf_check(&path, out_dir, err);
    if (status == ITH_OK)
        status = ith_write_file(path.data, write->chat_template,
                                (int64_t)strlen(write->chat_template), err);
    ith_buf_deinit(&path);
    return status;
}

static ith_status write_weights(const model_plan *p, const char *out_dir, ith_model_sink *sink,
                                ith_error *err)
{
    const ith_model_write *write = p->write;
    ith_comm *ranks = write->ranks;
    bool leads = !ranks || ranks->rank == 0;
    ith_st_options options = {.max_shard_bytes = write->max_shard_bytes, .ranks = ranks};
    ITH_TRY(ith_st_writer_create(&sink->writer, out_dir, p->out, p->count, &options, err));
    ith_status status = ITH_OK;
    for (int64_t k = 0; k < p->count && status == ITH_OK; k++)
        status = write_tensor(p, ith_st_writer_at(sink->writer, k), sink, err);
    ITH_TRY(ith_st_writer_meet(sink->writer, status, err));
    if (leads) /* after the long part, so that a full disk leaves the old model whole */
        status = write_files(write, out_dir, err);
    ITH_TRY(ith_comm_agree(ranks, status, err));
    ITH_TRY(ith_st_writer_commit(sink->writer, err));
    if (leads)
        say_written(p, out_dir, sink->writer);
    return ITH_OK;
}

/* Everything before the first file. */
static ith_status prepare(model_plan *plan, int64_t *by_name, const char *out_dir,
                          ith_model_sink *sink, ith_error *err)
{
    const ith_model_write *write = plan->write;
    int64_t max = write->count + (write->weights ? ith_st_count(write->weights) : 0);
    ITH_TRY(ith_alloc((void **)&sink->aligned, CHUNK_ELEMENTS * 8, "conversion", err));
    ITH_TRY(ith_alloc((void **)&sink->converted, CHUNK_ELEMENTS * 8, "conversion", err));
    ITH_TRY(ith_alloc((void **)&plan->out, max * (int64_t)sizeof *plan->out, "tensors", err));
    ITH_TRY(ith_alloc((void **)&plan->from, max * (int64_t)sizeof *plan->from, "tensors", err));
    for (int64_t i = 0; i < write->count; i++)
        by_name[i] = i;
    if (write->count)
        qsort_r(by_name, (size_t)write->count, sizeof *by_name, compare_caller,
                (void *)(uintptr_t)write->tensors);
    plan->by_name = by_name;
    ITH_TRY(refuse_source(write->source, out_dir, err));
    return plan_tensors(plan, err); /* all mistakes before the first file */
}

ith_status ith_model_dir_write(const char *out_dir, const ith_model_write *write, ith_error *err)
{
    model_plan plan;
    ith_model_sink sink;
    int64_t *by_name = NULL;
    memset(&plan, 0, sizeof plan);
    memset(&sink, 0, sizeof sink);
    plan.write = write;
    ith_status status =
        ith_alloc((void **)&by_name, write->count * (int64_t)sizeof *by_name, "names", err);
    if (status == ITH_OK)
        status = prepare(&plan, by_name, out_dir, &sink, err);
    status = ith_comm_agree(write->ranks, status, err);
    if (status == ITH_OK)
        status = write_weights(&plan, out_dir, &sink, err);
    ith_st_writer_destroy(sink.writer);
    ith_free(sink.aligned);
    ith_free(sink.converted);
    ith_free(plan.from);
    ith_free(plan.out);
    ith_free(by_name);
    return status;
}
