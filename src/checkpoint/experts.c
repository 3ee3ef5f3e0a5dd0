/* experts.c - merge and split of expert weights as a stream.
 *
 * Invariants:
 *  1. Every source tensor goes into exactly one output tensor or several whole slices of it: bytes
 *     in = bytes out.
 *  2. A shard below the partial directory that has a record was read back and is right.
 *  3. No model file stands in the output before all shards are right. */
#include "checkpoint/experts.h"

#include "base/checked.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/pool.h"
#include "checkpoint/model_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PIECE_BYTES ((int64_t)8 << 20)
#define PARTIAL ".experts.partial"

/* An output tensor: `count` source entries one after the other, or a slice of one. */
typedef struct {
    ith_st_entry entry;     /* name, dtype, shape */
    int64_t first_source;   /* in sources */
    int64_t count;          /* of sources */
    int64_t offset, length; /* bytes of a slice; of whole entries: 0, their size */
} output;

typedef struct {
    const char *source, *out_dir;
    bool merge;
    int64_t max_shard_bytes;
    ith_st_reader *reader;
    ith_arena names;
    output *outputs;
    int64_t num_outputs, cap_outputs;
    const ith_st_entry **sources;
    int64_t num_sources, cap_sources;
    int64_t *shard_begin; /* [num_shards + 1] into outputs */
    int64_t num_shards;
    uint64_t *hashes; /* [num_outputs] of what was written */
    char key[65];     /* of source and settings */
    ith_buf partial, path;
    ith_experts_report report;
} converter;

/* ---- names ---- */

typedef struct {
    int stem;    /* length of "PREFIX.mlp.experts" */
    long expert; /* -1: all of them */
    char proj[16];
} expert_name;

static bool is_proj(const char *text, size_t len)
{
    return (len == 9 && memcmp(text, "gate_proj", 9) == 0) ||
           (len == 7 && memcmp(text, "up_proj", 7) == 0) ||
           (len == 9 && memcmp(text, "down_proj", 9) == 0);
}

/* "...mlp.experts.3.up_proj.weight", or "...mlp.experts.up_proj" (some write ".weight" after it).
 */
static bool parse_name(const char *name, expert_name *out)
{
    static const char middle[] = ".mlp.experts.";
    const char *at = strstr(name, middle);
    if (!at)
        return false;
    const char *rest = at + sizeof middle - 1;
    out->stem = (int)(rest - 1 - name);
    out->expert = -1;
    if (*rest >= '0' && *rest <= '9') {
        char *end = NULL;
        out->expert = strtol(rest, &end, 10);
        if (*end != '.' || out->expert > 65535)
            return false;
        rest = end + 1;
    }
    size_t len = strcspn(rest, ".");
    const char *tail = rest + len;
    bool weight = strcmp(tail, ".weight") == 0;
    if (!is_proj(rest, len) || (out->expert >= 0 ? !weight : !weight && *tail))
        return false;
    snprintf(out->proj, sizeof out->proj, "%.*s", (int)len, rest);
    return true;
}

/* ---- the plan ---- */

static ith_status out_of_memory(ith_error *err)
{
    return ith_fail(err, ITH_ERR_MEMORY, "out of memory for tensor names");
}

static ith_status add_source(converter *c, const ith_st_entry *entry, ith_error *err)
{
    void *sources = (void *)c->sources;
    ith_status status = ith_grow(&sources, &c->cap_sources, c->num_sources + 1,
                                 (int64_t)sizeof *c->sources, "tensors", err);
    c->sources = sources;
    ITH_TRY(status);
    c->sources[c->num_sources++] = entry;
    return ITH_OK;
}

static ith_status add_output(converter *c, const output *o, ith_error *err)
{
    void *outputs = c->outputs;
    ith_status status = ith_grow(&outputs, &c->cap_outputs, c->num_outputs + 1,
                                 (int64_t)sizeof *c->outputs, "tensors", err);
    c->outputs = outputs;
    ITH_TRY(status);
    if (!o->entry.name)
        return out_of_memory(err);
    c->outputs[c->num_outputs++] = *o;
    return ITH_OK;
}

static ith_status plan_copy(converter *c, const ith_st_entry *e, ith_error *err)
{
    output o = {.entry = *e, .first_source = c->num_sources, .count = 1, .length = e->bytes};
    ITH_TRY(add_source(c, e, err));
    return add_output(c, &o, err);
}

static const char *name_of(converter *c, const char *text)
{
    return ith_arena_strndup(&c->names, text, (int64_t)strlen(text));
}

/* All experts of the projection that expert 0 stands for; the others come with it. */
static ith_status plan_merge(converter *c, const ith_st_entry *e, const expert_name *n,
                             int64_t num_experts, ith_error *err)
{
    char name[512], text[96], other_text[96];
    if (n->expert != 0) {
        snprintf(name, sizeof name, "%.*s.0.%s.weight", n->stem, e->name, n->proj);
        return ith_st_find(c->reader, name) && n->expert < num_experts
                   ? ITH_OK
                   : ith_fail(err, ITH_ERR_FORMAT, "%s: %s (num_experts is %lld)", e->name,
                              n->expert < num_experts ? "expert 0 beside it is missing"
                                                      : "one expert too many",
                              (long long)num_experts);
    }
    if (e->ndim >= ITH_ST_MAX_DIMS)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: too many dimensions", e->name);
    snprintf(name, sizeof name, "%.*s.%s", n->stem, e->name, n->proj);
    output o = {.entry = {.name = name_of(c, name), .dtype = e->dtype, .ndim = e->ndim + 1},
                .first_source = c->num_sources,
                .count = num_experts,
                .length = e->bytes};
    o.entry.shape[0] = num_experts;
    memcpy(o.entry.shape + 1, e->shape, (size_t)e->ndim * sizeof *e->shape);
    for (int64_t i = 0; i < num_experts; i++) {
        snprintf(name, sizeof name, "%.*s.%lld.%s.weight", n->stem, e->name, (long long)i, n->proj);
        const ith_st_entry *expert = ith_st_find(c->reader, name);
        if (!expert)
            return ith_fail(err, ITH_ERR_FORMAT, "tensor %s is missing (num_experts is %lld)", name,
                            (long long)num_experts);
        if (expert->dtype != e->dtype || !ith_st_has_shape(expert, e->ndim, e->shape))
            return ith_fail(err, ITH_ERR_FORMAT, "%s: %s, but expert 0 is %s", name,
                            ith_st_text(expert, text, sizeof text),
                            ith_st_text(e, other_text, sizeof other_text));
        ITH_TRY(add_source(c, expert, err));
    }
    c->report.num_changed++;
    return add_output(c, &o, err);
}

static ith_status plan_split(converter *c, const ith_st_entry *e, const expert_name *n,
                             int64_t num_experts, ith_error *err)
{
    char text[96];
    if (e->ndim < 2 || e->shape[0] != num_experts)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: shape %s, expected [%lld, ..] (num_experts)",
                        e->name, ith_st_text(e, text, sizeof text), (long long)num_experts);
    int64_t each = e->bytes / num_experts;
    for (int64_t i = 0; i < num_experts; i++) {
        char name[512];
        snprintf(name, sizeof name, "%.*s.%lld.%s.weight", n->stem, e->name, (long long)i, n->proj);
        if (ith_st_find(c->reader, name))
            return ith_fail(err, ITH_ERR_FORMAT, "%s stands beside %s", name, e->name);
        output o = {.entry = {.name = name_of(c, name), .dtype = e->dtype, .ndim = e->ndim - 1},
                    .first_source = c->num_sources,
                    .count = 1,
                    .offset = i * each,
                    .length = each};
        memcpy(o.entry.shape, e->shape + 1, (size_t)(e->ndim - 1) * sizeof *e->shape);
        ITH_TRY(add_output(c, &o, err));
        c->report.num_changed++;
    }
    return add_source(c, e, err);
}

static ith_status read_num_experts(converter *c, int64_t *out, ith_error *err)
{
    json_t *json = NULL;
    ith_path_join(&c->path, c->source, "config.json");
    ITH_TRY(ith_buf_check(&c->path, "config.json", err));
    ITH_TRY(ith_json_load(&json, c->path.data, err));
    const json_t *value = json_object_get(json, "num_experts");
    *out = json_is_integer(value) ? json_integer_value(value) : 0;
    json_decref(json);
    if (*out < 1 || *out > 65536)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: num_experts is missing (no experts to convert)",
                        c->path.data);
    return ITH_OK;
}

static ith_status plan_tensors(converter *c, ith_error *err)
{
    int64_t num_experts = 0, bytes = 0;
    ITH_TRY(read_num_experts(c, &num_experts, err));
    c->report.num_in = ith_st_count(c->reader);
    for (int64_t i = 0; i < c->report.num_in; i++) {
        const ith_st_entry *e = ith_st_at(c->reader, i);
        expert_name n;
        bool expert = parse_name(e->name, &n);
        if (strstr(e->name, ".mlp.experts.gate_up_proj"))
            return ith_fail(err, ITH_ERR_UNSUPPORTED,
                            "%s: gate and up in one tensor is neither layout", e->name);
        if (expert && c->merge == (n.expert >= 0))
            ITH_TRY(c->merge ? plan_merge(c, e, &n, num_experts, err)
                             : plan_split(c, e, &n, num_experts, err));
        else
            ITH_TRY(plan_copy(c, e, err));
    }
    if (c->report.num_changed == 0)
        return ith_fail(err, ITH_ERR_USAGE, "%s: nothing to %s, the experts are %s already",
                        c->source, c->merge ? "merge" : "split", c->merge ? "merged" : "apart");
    for (int64_t i = 0; i < c->num_outputs; i++)
        bytes += c->outputs[i].count * c->outputs[i].length;
    c->report.num_out = c->num_outputs;
    c->report.bytes = bytes;
    ITH_ASSERT(bytes == ith_st_total_bytes(c->reader));
    return ITH_OK;
}

static ith_status plan_shards(converter *c, ith_error *err)
{
    ITH_TRY(ith_alloc_zero((void **)&c->shard_begin, c->num_outputs + 1,
                           (int64_t)sizeof *c->shard_begin, "shards", err));
    int64_t filled = 0;
    c->num_shards = 1;
    for (int64_t i = 0; i < c->num_outputs; i++) {
        int64_t bytes = c->outputs[i].count * c->outputs[i].length;
        if (filled > 0 && filled + bytes > c->max_shard_bytes) {
            c->shard_begin[c->num_shards++] = i;
            filled = 0;
        }
        filled += bytes;
    }
    c->shard_begin[c->num_shards] = c->num_outputs;
    c->report.num_files = c->num_shards;
    return ITH_OK;
}

/* Hash over all that decides the output's bytes, the data of the source by size and time. */
static ith_status make_key(converter *c, ith_error *err)
{
    ith_sha256 hash;
    ith_sha256_init(&hash);
    ith_buf text = {0};
    ith_buf_printf(&text, "%d %lld\n", (int)c->merge, (long long)c->max_shard_bytes);
    for (int64_t i = 0; i < c->num_outputs; i++)
        ith_buf_printf(&text, "%s %d %lld\n", c->outputs[i].entry.name,
                       (int)c->outputs[i].entry.dtype, (long long)c->outputs[i].length);
    for (int64_t i = 0; i < ith_st_num_files(c->reader); i++) {
        int64_t size = 0, mtime = 0;
        ith_status status = ith_file_stat(ith_st_file_path(c->reader, i), &size, &mtime, err);
        if (status != ITH_OK) {
            ith_buf_deinit(&text);
            return status;
        }
        ith_buf_printf(&text, "%lld %lld\n", (long long)size, (long long)mtime);
    }
    ith_status status = ith_buf_check(&text, "tensor names", err);
    if (status == ITH_OK)
        ith_sha256_update(&hash, text.data, text.len);
    ith_sha256_hex(&hash, c->key);
    ith_buf_deinit(&text);
    return status;
}

/* ---- shards ---- */

/* Hashes a stretch of an entry in pieces; with a writer, pushes it, too. */
static ith_status pass_stretch(const ith_st_reader *reader, const ith_st_entry *e, int64_t offset,
                               int64_t bytes, char *piece, ith_hash64 *hash, ith_st_writer *w,
                               ith_error *err)
{
    for (int64_t at = 0; at < bytes; at += PIECE_BYTES) {
        int64_t n = ith_min_i64(PIECE_BYTES, bytes - at);
        ITH_TRY(ith_st_read(reader, e, offset + at, piece, n, err));
        ith_hash64_update(hash, piece, n);
        if (w)
            ITH_TRY(ith_st_writer_push(w, piece, n, err));
    }
    return ITH_OK;
}

static ith_status push_output(const converter *c, const output *o, ith_st_writer *w, char *piece,
                              uint64_t *out, ith_error *err)
{
    ith_hash64 hash;
    ith_hash64_init(&hash);
    for (int64_t k = 0; k < o->count; k++)
        ITH_TRY(pass_stretch(c->reader, c->sources[o->first_source + k], o->offset, o->length,
                             piece, &hash, w, err));
    *out = ith_hash64_value(&hash);
    return ITH_OK;
}

static void shard_name(const converter *c, int64_t shard, char *out, size_t size)
{
    if (c->num_shards == 1)
        snprintf(out, size, "model.safetensors");
    else
        snprintf(out, size, "model-%05lld-of-%05lld.safetensors", (long long)shard + 1,
                 (long long)c->num_shards);
}

/* The partial shard's file and record. */
typedef struct {
    char stem[32];
    ith_buf file, record;
} shard_paths;

static ith_status make_paths(const converter *c, int64_t shard, shard_paths *out, ith_error *err)
{
    char name[64];
    snprintf(out->stem, sizeof out->stem, "part-%05lld", (long long)shard + 1);
    snprintf(name, sizeof name, "%s.safetensors", out->stem);
    ith_path_join(&out->file, c->partial.data, name);
    snprintf(name, sizeof name, "%s.done", out->stem);
    ith_path_join(&out->record, c->partial.data, name);
    ITH_TRY(ith_buf_check(&out->file, "path", err));
    return ith_buf_check(&out->record, "path", err);
}

static void free_paths(shard_paths *p)
{
    ith_buf_deinit(&p->file);
    ith_buf_deinit(&p->record);
}

static ith_status write_shard(converter *c, int64_t shard, char *piece, ith_error *err)
{
    int64_t begin = c->shard_begin[shard], count = c->shard_begin[shard + 1] - begin;
    ith_st_entry *entries = NULL;
    ith_st_writer *w = NULL;
    shard_paths paths = {0};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(make_paths(c, shard, &paths, err));
    ith_st_options options = {.stem = paths.stem, .max_shard_bytes = INT64_MAX};
    ITH_TRY_OUT(ith_alloc_zero((void **)&entries, count, (int64_t)sizeof *entries, "tensors", err));
    for (int64_t i = 0; i < count; i++)
        entries[i] = c->outputs[begin + i].entry;
    ITH_TRY_OUT(ith_st_writer_create(&w, c->partial.data, entries, count, &options, err));
    for (int64_t i; (i = ith_st_writer_next(w)) >= 0;)
        ITH_TRY_OUT(push_output(c, &c->outputs[begin + i], w, piece, &c->hashes[begin + i], err));
    status = ith_st_writer_commit(w, err);
out:
    ith_st_writer_destroy(w);
    ith_free(entries);
    free_paths(&paths);
    return status;
}

/* Reads a finished shard back: the hash of each tensor must be that of what was pushed. */
static ith_status compare_shard(const converter *c, int64_t shard, const char *path, char *piece,
                                ith_error *err)
{
    ith_st_reader *reader = NULL;
    ITH_TRY(ith_st_open(&reader, path, err));
    ith_status status = ITH_OK;
    for (int64_t i = c->shard_begin[shard]; i < c->shard_begin[shard + 1]; i++) {
        const ith_st_entry *e = ith_st_find(reader, c->outputs[i].entry.name);
        ith_hash64 hash;
        ith_hash64_init(&hash);
        if (e)
            ITH_TRY_OUT(pass_stretch(reader, e, 0, e->bytes, piece, &hash, NULL, err));
        if (!e || ith_hash64_value(&hash) != c->hashes[i]) {
            status = ith_fail(err, ITH_ERR_IO, "%s: %s: read back other bytes than were written",
                              path, c->outputs[i].entry.name);
            goto out;
        }
    }
out:
    ith_st_close(reader);
    return status;
}

static ith_status verify_shard(const converter *c, int64_t shard, char *piece, ith_error *err)
{
    shard_paths paths = {0};
    ith_status status = make_paths(c, shard, &paths, err);
    if (status == ITH_OK)
        status = compare_shard(c, shard, paths.file.data, piece, err);
    if (status == ITH_OK)
        status = ith_write_file(paths.record.data, c->key, (int64_t)strlen(c->key), err);
    free_paths(&paths);
    return status;
}

/* A record of this very conversion stands beside the shard. */
static ith_status is_done(const converter *c, int64_t shard, bool *out, ith_error *err)
{
    shard_paths paths = {0};
    ith_buf text = {0};
    ith_status status = make_paths(c, shard, &paths, err);
    *out = false;
    if (status == ITH_OK && ith_path_exists(paths.record.data)) {
        status = ith_read_file(paths.record.data, 4096, &text, err);
        *out = status == ITH_OK && text.len == (int64_t)strlen(c->key) &&
               memcmp(text.data, c->key, (size_t)text.len) == 0;
    }
    if (*out && !ith_path_exists(paths.file.data)) { /* moved in already, before a kill */
        char name[64];
        shard_name(c, shard, name, sizeof name);
        ith_path_join(&paths.file, c->out_dir, name);
        *out = !paths.file.failed && ith_path_exists(paths.file.data);
    }
    ith_buf_deinit(&text);
    free_paths(&paths);
    return status;
}

/* Two jobs at a time: a shard is written while the one before it is read back. */
typedef struct {
    converter *c;
    int64_t shard[2]; /* to write, to read back; -1: none */
    char *piece[2];   /* [PIECE_BYTES] each */
    ith_status status[2];
    ith_error err[2];
} shard_jobs;

static void shard_task(void *arg, int64_t begin, int64_t end, int thread)
{
    shard_jobs *j = arg;
    (void)thread;
    for (int64_t k = begin; k < end; k++) {
        j->status[k] = ITH_OK;
        if (j->shard[k] >= 0)
            j->status[k] = k == 0 ? write_shard(j->c, j->shard[k], j->piece[k], &j->err[k])
                                  : verify_shard(j->c, j->shard[k], j->piece[k], &j->err[k]);
    }
}

static ith_status run_shards(converter *c, shard_jobs *j, ith_pool *pool, ith_error *err)
{
    ith_status status = ITH_OK;
    j->shard[1] = -1;
    for (int64_t s = 0; s <= c->num_shards && status == ITH_OK; s++) {
        bool write = false, done = false;
        if (s < c->num_shards) {
            status = is_done(c, s, &done, err);
            write = status == ITH_OK && !done;
            c->report.num_kept += done;
        }
        j->shard[0] = write ? s : -1;
        ith_pool_for(pool, 2, 1, shard_task, j); /* also what is pending after an error */
        for (int k = 0; k < 2; k++)
            if (status == ITH_OK && j->status[k] != ITH_OK)
                status = ith_fail(err, j->status[k], "%s", j->err[k].text);
        j->shard[1] = j->shard[0];
    }
    return status;
}

static ith_status convert_shards(converter *c, ith_error *err)
{
    ith_pool *pool = NULL;
    shard_jobs *j = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_pool_create(&pool, 2, err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&j, 1, (int64_t)sizeof *j, "shards", err));
    j->c = c;
    for (int k = 0; k < 2; k++)
        ITH_TRY_OUT(ith_alloc((void **)&j->piece[k], PIECE_BYTES, "shards", err));
    status = run_shards(c, j, pool, err);
out:
    for (int k = 0; j && k < 2; k++)
        ith_free(j->piece[k]);
    ith_free(j);
    ith_pool_destroy(pool);
    return status;
}

/* ---- the end ---- */

static ith_status write_index(converter *c, ith_error *err)
{
    json_t *map = json_object(), *root = NULL;
    ith_buf text = {0};
    char name[64];
    bool failed = !map;
    for (int64_t s = 0; s < c->num_shards && !failed; s++) {
        shard_name(c, s, name, sizeof name);
        for (int64_t i = c->shard_begin[s]; i < c->shard_begin[s + 1] && !failed; i++)
            failed = json_object_set_new(map, c->outputs[i].entry.name, json_string(name)) != 0;
    }
    if (!failed)
        root = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)c->report.bytes,
                         "weight_map", map);
    json_decref(map);
    ith_status status = root ? ith_json_dump(root, false, &text, err) : out_of_memory(err);
    json_decref(root);
    ith_path_join(&c->path, c->out_dir, "model.safetensors.index.json");
    if (status == ITH_OK)
        status = ith_buf_check(&c->path, "index", err);
    if (status == ITH_OK)
        status = ith_write_file(c->path.data, text.data, text.len, err);
    ith_buf_deinit(&text);
    return status;
}

static ith_status move_shard(const converter *c, int64_t shard, ith_error *err)
{
    char name[64];
    shard_paths paths = {0};
    ith_buf to = {0};
    shard_name(c, shard, name, sizeof name);
    ith_path_join(&to, c->out_dir, name);
    ith_status status = make_paths(c, shard, &paths, err);
    if (status == ITH_OK)
        status = ith_buf_check(&to, "path", err);
    if (status == ITH_OK && ith_path_exists(paths.file.data))
        status = ith_rename(paths.file.data, to.data, err);
    ith_buf_deinit(&to);
    free_paths(&paths);
    return status;
}

static ith_status finish(converter *c, ith_error *err)
{
    ITH_TRY(ith_model_dir_copy_files(c->source, c->out_dir, false, ITH_BF16, err));
    for (int64_t s = 0; s < c->num_shards; s++)
        ITH_TRY(move_shard(c, s, err));
    if (c->num_shards > 1)
        ITH_TRY(write_index(c, err));
    return ith_remove_tree(c->partial.data, err);
}

/* The output may be absent, empty, or what an earlier call left. */
static ith_status check_out_dir(converter *c, ith_error *err)
{
    struct stat a, b;
    if (stat(c->source, &a) == 0 && stat(c->out_dir, &b) == 0 && a.st_dev == b.st_dev &&
        a.st_ino == b.st_ino)
        return ith_fail(err, ITH_ERR_USAGE, "%s is the source itself (give another directory)",
                        c->out_dir);
    ith_path_join(&c->partial, c->out_dir, PARTIAL);
    ITH_TRY(ith_buf_check(&c->partial, "path", err));
    if (ith_path_is_dir(c->out_dir) && !ith_path_is_dir(c->partial.data)) {
        ith_names names;
        ITH_TRY(ith_list_dir(c->out_dir, &names, err));
        bool empty = names.count == 0;
        ith_names_free(&names);
        if (!empty)
            return ith_fail(err, ITH_ERR_USAGE, "%s is not empty (give a new directory)",
                            c->out_dir);
    }
    return ith_make_dirs(c->partial.data, err);
}

ith_status ith_experts_convert(const char *source, const char *out_dir, bool merge,
                               int64_t max_shard_bytes, ith_experts_report *report, ith_error *err)
{
    converter c = {.source = source,
                   .out_dir = out_dir,
                   .merge = merge,
                   .max_shard_bytes = max_shard_bytes > 0 ? max_shard_bytes : ITH_ST_SHARD_BYTES};
    ith_status status = ITH_OK;
    ith_arena_init(&c.names, 0);
    ITH_TRY_OUT(ith_st_open(&c.reader, source, err));
    ITH_TRY_OUT(plan_tensors(&c, err));
    ITH_TRY_OUT(plan_shards(&c, err));
    ITH_TRY_OUT(make_key(&c, err));
    ITH_TRY_OUT(check_out_dir(&c, err)); /* all mistakes of the request before the first file */
    ITH_TRY_OUT(ith_alloc_zero((void **)&c.hashes, c.num_outputs, (int64_t)sizeof *c.hashes,
                               "tensors", err));
    ITH_TRY_OUT(convert_shards(&c, err));
    ITH_TRY_OUT(finish(&c, err));
    *report = c.report;
out:
    ith_st_close(c.reader);
    ith_arena_deinit(&c.names);
    ith_free(c.outputs);
    ith_free((void *)c.sources);
    ith_free(c.shard_begin);
    ith_free(c.hashes);
    ith_buf_deinit(&c.partial);
    ith_buf_deinit(&c.path);
    return status;
}
