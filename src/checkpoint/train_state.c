/* train_state.c - saves, finds, loads and rotates training checkpoints.
 * Invariants: see train_state.h. How they are kept: a directory gets its final name by one rename,
 * when it is complete and synced; it leaves by a rename to a .tmp- name before anything in it is
 * removed. The .tmp- name tells whose it is (file.h): that of a writer that may live is let alone.
 * So a final name without CHECKPOINT_COMPLETE is damage or somebody else's, and a complete
 * directory under a .tmp- name (killed between two renames) is as good as any. */
#include "checkpoint/train_state.h"

#include "base/log.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>

#define MARKER "CHECKPOINT_COMPLETE"
#define STATE_FILE "trainer_state.json"
#define FORMAT "ithaca-checkpoint-1"
#define PREFIX "checkpoint-"
#define MAX_DEPTH 8

static ith_status join(ith_buf *out, const char *dir, const char *name, ith_error *err)
{
    ith_path_join(out, dir, name);
    return ith_buf_check(out, dir, err);
}

/* ---- CHECKPOINT_COMPLETE: {"files":{NAME:BYTES,..}} ---- */

/* Appends "prefix/name":bytes of every regular file below dir. Our own directories, so the depth is
 * known. */
static ith_status list_files(ith_buf *out, const char *dir, const char *prefix, int depth,
                             ith_error *err)
{
    if (depth > MAX_DEPTH)
        return ith_fail(err, ITH_ERR_IO, "%s: more than %d directories deep", dir, MAX_DEPTH);
    ith_names names = {NULL, 0};
    ith_buf path = {0}, name = {0};
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_list_dir(dir, &names, err));
    for (int64_t i = 0; i < names.count; i++) {
        ITH_TRY_OUT(join(&path, dir, names.names[i], err));
        ITH_TRY_OUT(join(&name, prefix, names.names[i], err));
        if (ith_path_is_dir(path.data)) {
            ITH_TRY_OUT(list_files(out, path.data, name.data, depth + 1, err));
            continue;
        }
        int64_t size = 0;
        ITH_TRY_OUT(ith_file_stat(path.data, &size, NULL, err));
        ith_buf_puts(out, out->data[out->len - 1] == '{' ? "\n" : ",\n");
        ith_json_append_string(out, name.data, name.len);
        ith_buf_printf(out, ": %lld", (long long)size);
        ITH_TRY_OUT(ith_buf_check(out, MARKER, err));
    }
out:
    ith_buf_deinit(&name);
    ith_buf_deinit(&path);
    ith_names_free(&names);
    return status;
}

static ith_status write_marker(const char *dir, ith_error *err)
{
    ith_buf text = {0}, path = {0};
    ith_buf_puts(&text, "{\"files\": {");
    ith_status status = ith_buf_check(&text, MARKER, err);
    if (status == ITH_OK)
        status = list_files(&text, dir, "", 0, err);
    ith_buf_puts(&text, "\n}}\n");
    if (status == ITH_OK)
        status = ith_buf_check(&text, MARKER, err);
    if (status == ITH_OK)
        status = join(&path, dir, MARKER, err);
    if (status == ITH_OK)
        status = ith_write_file(path.data, text.data, text.len, err);
    ith_buf_deinit(&path);
    ith_buf_deinit(&text);
    return status;
}

static ith_status check_files(const char *dir, json_t *files, ith_error *err)
{
    if (!json_is_object(files))
        return ith_fail(err, ITH_ERR_FORMAT, "%s: " MARKER " holds no list of files", dir);
    ith_buf path = {0};
    ith_status status = ITH_OK;
    const char *name;
    json_t *bytes;
    json_object_foreach(files, name, bytes)
    {
        int64_t size = -1;
        ITH_TRY_OUT(join(&path, dir, name, err));
        if (!ith_path_exists(path.data)) {
            status = ith_fail(err, ITH_ERR_FORMAT, "%s is missing", path.data);
            goto out;
        }
        ITH_TRY_OUT(ith_file_stat(path.data, &size, NULL, err));
        if (!json_is_integer(bytes) || json_integer_value(bytes) != size) {
            status = ith_fail(err, ITH_ERR_FORMAT, "%s: %lld bytes, %lld were saved", path.data,
                              (long long)size, (long long)json_integer_value(bytes));
            goto out;
        }
    }
out:
    ith_buf_deinit(&path);
    return status;
}

ith_status ith_train_state_check(const char *path, ith_error *err)
{
    ith_buf marker = {0};
    json_t *root = NULL;
    ith_status status = join(&marker, path, MARKER, err);
    if (status == ITH_OK && !ith_path_is_dir(path))
        status = ith_fail(err, ITH_ERR_IO, "%s: no such checkpoint directory", path);
    if (status == ITH_OK && !ith_path_exists(marker.data))
        status =
            ith_fail(err, ITH_ERR_FORMAT, "%s: " MARKER " is missing: the save did not end", path);
    if (status == ITH_OK)
        status = ith_json_load(&root, marker.data, err);
    if (status == ITH_OK)
        status = check_files(path, json_object_get(root, "files"), err);
    json_decref(root);
    ith_buf_deinit(&marker);
    return status;
}

/* ---- directories of an output directory ---- */

typedef struct {
    char *path;
    int64_t step;
    bool is_tmp, is_complete, is_ours; /* ours: may be removed */
} found_dir;

typedef struct {
    found_dir *dirs;
    int64_t count, cap;
} found_list;

/* "checkpoint-20" or "checkpoint-20.tmp-TEXT". */
static bool parse_name(const char *name, int64_t *step, bool *is_tmp)
{
    if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
        return false;
    const char *p = name + strlen(PREFIX);
    int64_t value = 0;
    if (!isdigit((unsigned char)*p))
        return false;
    for (; isdigit((unsigned char)*p); p++)
        if (!ith_mul_ok(value, 10, &value) || !ith_add_ok(value, *p - '0', &value))
            return false;
    *step = value;
    *is_tmp = strncmp(p, ".tmp-", 5) == 0;
    return *is_tmp || *p == '\0';
}

/* Does a file of this directory bear our stamp? The marker's list, or the state's format. */
static ith_status has_stamp(const char *dir, bool *out, ith_error *err)
{
    static const char *const files[] = {MARKER, STATE_FILE};
    ith_buf path = {0};
    ith_status status = ITH_OK;
    *out = false;
    for (int i = 0; i < 2 && !*out; i++) {
        json_t *root = NULL;
        ith_error why = {0};
        ITH_TRY_OUT(join(&path, dir, files[i], err));
        if (!ith_path_exists(path.data))
            continue;
        status = ith_json_load(&root, path.data, &why);
        const char *format = json_string_value(json_object_get(root, "format"));
        *out = i == 0 ? json_is_object(json_object_get(root, "files"))
                      : format && strcmp(format, FORMAT) == 0;
        json_decref(root);
        if (status != ITH_OK && status != ITH_ERR_FORMAT) {
            ith_fail(err, status, "%s", why.text);
            goto out;
        }
        status = ITH_OK;
    }
out:
    ith_buf_deinit(&path);
    return status;
}

/* Damage makes a checkpoint incomplete. Failing to look (a read error, no memory) is an error: who
 * cannot read must not judge what to delete. */
static ith_status examine(found_dir *dir, ith_error *err)
{
    ith_error why = {0};
    ith_status status = ith_train_state_check(dir->path, &why);
    if (status != ITH_OK && status != ITH_ERR_FORMAT)
        return ith_fail(err, status, "%s", why.text);
    dir->is_complete = status == ITH_OK;
    dir->is_ours = dir->is_tmp ? ith_tmp_is_left(ith_path_base(dir->path)) : dir->is_complete;
    if (!dir->is_complete && !dir->is_tmp)
        ith_log(ITH_LOG_WARN, "checkpoint", "passed over: %s", why.text);
    if (dir->is_tmp && !dir->is_ours)
        ith_log(ITH_LOG_WARN, "checkpoint",
                "%s stays, for another process may be writing it; remove it if none is", dir->path);
    return dir->is_ours || dir->is_tmp ? ITH_OK : has_stamp(dir->path, &dir->is_ours, err);
}

static void free_list(found_list *list)
{
    for (int64_t i = 0; i < list->count; i++)
        ith_free(list->dirs[i].path);
    ith_free(list->dirs);
    memset(list, 0, sizeof *list);
}

/* Newest first; the final name before a .tmp- one. */
static int compare_dirs(const void *a, const void *b)
{
    const found_dir *x = a, *y = b;
    if (x->step != y->step)
        return x->step > y->step ? -1 : 1;
    if (x->is_tmp != y->is_tmp)
        return x->is_tmp ? 1 : -1;
    return strcmp(x->path, y->path);
}

/* All checkpoint directories, newest first. examined: is_complete and is_ours are set. */
static ith_status list_checkpoints(const char *output_dir, found_list *list, bool examined,
                                   ith_error *err)
{
    ith_names names = {NULL, 0};
    ith_buf path = {0};
    ith_status status = ITH_OK;
    if (!ith_path_is_dir(output_dir))
        return ITH_OK;
    ITH_TRY_OUT(ith_list_dir(output_dir, &names, err));
    for (int64_t i = 0; i < names.count; i++) {
        found_dir dir = {0};
        ITH_TRY_OUT(join(&path, output_dir, names.names[i], err));
        if (!parse_name(names.names[i], &dir.step, &dir.is_tmp) || !ith_path_is_dir(path.data))
            continue;
        ITH_TRY_OUT(ith_grow((void **)&list->dirs, &list->cap, list->count + 1, sizeof *list->dirs,
                             "checkpoints", err));
        dir.path = ith_strndup(path.data, path.len);
        if (!dir.path) {
            status = ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path.data);
            goto out;
        }
        list->dirs[list->count++] = dir;
        if (examined)
            ITH_TRY_OUT(examine(&list->dirs[list->count - 1], err));
    }
    if (list->count)
        qsort(list->dirs, (size_t)list->count, sizeof *list->dirs, compare_dirs);
out:
    ith_buf_deinit(&path);
    ith_names_free(&names);
    if (status != ITH_OK)
        free_list(list);
    return status;
}

ith_status ith_train_state_find_latest(const char *output_dir, ith_buf *path, ith_error *err)
{
    found_list list = {0};
    ITH_TRY(list_checkpoints(output_dir, &list, false, err));
    const char *found = "";
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < list.count && status == ITH_OK && !found[0]; i++) {
        status = examine(&list.dirs[i], err); /* the newest usually is: the others are not read */
        if (status == ITH_OK && list.dirs[i].is_complete)
            found = list.dirs[i].path;
    }
    if (status == ITH_OK) {
        ith_buf_clear(path);
        ith_buf_puts(path, found);
        status = ith_buf_check(path, "checkpoint path", err);
    }
    free_list(&list);
    return status;
}

/* ---- rotation ---- */

/* "OUTPUT/checkpoint-20.tmp-del.tmp-PLACE-PID" for "OUTPUT/checkpoint-20". */
static ith_status move_aside(const char *path, ith_buf *aside, ith_error *err)
{
    char tag[ITH_TMP_TAG_BYTES];
    ith_tmp_tag(tag);
    ith_buf_clear(aside);
    ith_buf_printf(aside, "%s.tmp-del%s", path, tag);
    ITH_TRY(ith_buf_check(aside, path, err));
    ITH_TRY(ith_remove_tree(aside->data, err));
    return ith_rename(path, aside->data, err);
}

/* The marker goes first, so that a half-removed directory never counts. */
static ith_status remove_marked(const char *path, ith_error *err)
{
    ith_buf marker = {0};
    ith_status status = join(&marker, path, MARKER, err);
    if (status == ITH_OK)
        status = ith_remove_tree(marker.data, err);
    if (status == ITH_OK)
        status = ith_remove_tree(path, err);
    ith_buf_deinit(&marker);
    return status;
}

static ith_status remove_checkpoint(const found_dir *dir, ith_error *err)
{
    if (dir->is_tmp)
        return remove_marked(dir->path, err);
    ith_buf aside = {0};
    ith_status status = move_aside(dir->path, &aside, err);
    if (status == ITH_OK)
        status = remove_marked(aside.data, err);
    ith_buf_deinit(&aside);
    return status;
}

ith_status ith_train_state_rotate(const char *output_dir, int64_t limit, ith_error *err)
{
    ITH_ASSERT(limit >= 0);
    found_list list = {0};
    ITH_TRY(list_checkpoints(output_dir, &list, true, err));
    int64_t complete = 0, newest_step = -1;
    for (int64_t i = 0; i < list.count && newest_step < 0; i++)
        if (list.dirs[i].is_complete)
            newest_step = list.dirs[i].step;
    ith_status status = ITH_OK;
    /* Incomplete ones before any complete one; none at all while nothing better is there. */
    for (int64_t i = 0; i < list.count && status == ITH_OK && newest_step >= 0; i++)
        if (list.dirs[i].is_ours && !list.dirs[i].is_complete)
            status = remove_checkpoint(&list.dirs[i], err);
    int64_t last_step = -1;
    for (int64_t i = 0; i < list.count && status == ITH_OK; i++) {
        if (!list.dirs[i].is_complete)
            continue;
        bool is_twin = list.dirs[i].step == last_step; /* a .tmp- of a step that is in place */
        last_step = list.dirs[i].step;
        complete += !is_twin;
        if (list.dirs[i].is_ours && (is_twin || (limit && complete > limit)))
            status = remove_checkpoint(&list.dirs[i], err);
    }
    free_list(&list);
    return status;
}

/* ---- saving ---- */

static ith_status write_state_file(const char *dir, const ith_train_save *save, ith_error *err)
{
    const ith_train_progress *p = &save->progress;
    ith_buf text = {0}, path = {0};
    bool has_best = p->has_best && isfinite(p->best_metric);
    ith_buf_printf(&text,
                   "{\"format\": \"" FORMAT "\", \"global_step\": %lld, \"epoch\": %.17g, "
                   "\"samples_seen\": %lld",
                   (long long)p->global_step, p->epoch, (long long)p->samples_seen);
    if (has_best)
        ith_buf_printf(&text, ", \"best_metric\": %.17g, \"best_global_step\": %lld",
                       p->best_metric, (long long)p->best_global_step);
    ith_buf_puts(&text, ", \"groups\": [");
    for (int g = 0; g < save->num_groups; g++)
        ith_buf_printf(&text, "%s\"%s\"", g ? ", " : "", save->groups[g].name);
    ith_buf_puts(&text, "], \"state\": ");
    ith_status status = ITH_OK;
    if (save->state)
        status = ith_json_dump(save->state, true, &text, err);
    else
        ith_buf_puts(&text, "null");
    ith_buf_puts(&text, "}\n");
    if (status == ITH_OK)
        status = ith_buf_check(&text, STATE_FILE, err);
    if (status == ITH_OK)
        status = join(&path, dir, STATE_FILE, err);
    if (status == ITH_OK)
        status = ith_write_file(path.data, text.data, text.len, err);
    ith_buf_deinit(&path);
    ith_buf_deinit(&text);
    return status;
}

static ith_st_entry as_entry(const ith_state_tensor *t)
{
    ith_st_entry entry = {.name = t->name, .dtype = t->dtype, .ndim = t->ndim, .data = t->data};
    memcpy(entry.shape, t->shape, sizeof entry.shape);
    entry.bytes = ith_mul_bytes(ith_st_numel(&entry), ith_dtype_bytes(t->dtype));
    return entry;
}

static bool leads(const ith_train_save *save)
{
    return !save->ranks || save->ranks->rank == 0;
}

/* This rank's parts of all tensors. */
static ith_status put_tensors(const ith_state_group *group, bool is_leader, ith_st_writer *writer,
                              ith_error *err)
{
    for (int64_t k = 0; k < group->count; k++) {
        int64_t i = ith_st_writer_at(writer, k);
        const ith_st_entry entry = as_entry(&group->tensors[i]);
        ITH_ASSERT(entry.data || group->put);
        if (!entry.data)
            ITH_TRY(group->put(group->put_arg, i, writer, err));
        else if (is_leader)
            ITH_TRY(ith_st_writer_put(writer, i, 0, entry.data, entry.bytes, err));
    }
    return ITH_OK;
}

/* Collective. */
static ith_status write_group(const char *dir, const ith_state_group *group,
                              const ith_train_save *save, ith_error *err)
{
    ith_st_options options = {
        .stem = group->name, .max_shard_bytes = save->max_shard_bytes, .ranks = save->ranks};
    ith_st_entry *entries = NULL;
    ith_st_writer *writer = NULL;
    ith_status status =
        ith_alloc((void **)&entries, group->count * (int64_t)sizeof *entries, group->name, err);
    ITH_TRY_OUT(ith_comm_agree(save->ranks, status, err));
    for (int64_t i = 0; i < group->count; i++)
        entries[i] = as_entry(&group->tensors[i]);
    ITH_TRY_OUT(ith_st_writer_create(&writer, dir, entries, group->count, &options, err));
    status = put_tensors(group, leads(save), writer, err);
    ITH_TRY_OUT(ith_st_writer_meet(writer, status, err));
    status = ith_st_writer_commit(writer, err);
out:
    ith_st_writer_destroy(writer);
    ith_free(entries);
    return status;
}

static void check_group_names(const ith_train_save *save)
{
    for (int g = 0; g < save->num_groups; g++) {
        const char *name = save->groups[g].name;
        ITH_ASSERT(name[0] && strcmp(name, "trainer_state") != 0);
        for (const char *p = name; *p; p++)
            ITH_ASSERT(islower((unsigned char)*p) || isdigit((unsigned char)*p) || *p == '_');
    }
}

/* Collective: the groups, and the model directory, in the directory `tmp`. */
static ith_status fill(const char *tmp, const ith_train_save *save, ith_error *err)
{
    for (int g = 0; g < save->num_groups; g++)
        ITH_TRY(write_group(tmp, &save->groups[g], save, err));
    if (!save->write_hf)
        return ITH_OK;
    ith_buf dir = {0};
    ith_status status = join(&dir, tmp, "hf_model", err);
    status = ith_comm_agree(save->ranks, status, err);
    if (status == ITH_OK)
        status = save->write_hf(save->write_hf_arg, dir.data, err);
    ith_buf_deinit(&dir);
    return status;
}

/* Gives a complete directory its final name; one of the same step is moved aside and removed. */
static ith_status place(const char *tmp, const char *path, ith_error *err)
{
    ith_buf aside = {0};
    ith_status status = ITH_OK;
    if (ith_path_exists(path))
        ITH_TRY_OUT(move_aside(path, &aside, err));
    ITH_TRY_OUT(ith_rename(tmp, path, err));
    if (aside.len)
        ITH_TRY_OUT(remove_marked(aside.data, err));
out:
    ith_buf_deinit(&aside);
    return status;
}

/* What stands under the final name must be ours to replace. */
static ith_status refuse_foreign(const char *path, ith_error *err)
{
    if (!ith_path_exists(path))
        return ITH_OK;
    found_dir dir = {0};
    ith_buf copy = {0};
    ith_buf_puts(&copy, path);
    ith_status status = ith_buf_check(&copy, path, err);
    dir.path = copy.data;
    if (status == ITH_OK)
        status = examine(&dir, err);
    if (status == ITH_OK && !dir.is_ours)
        status = ith_fail(err, ITH_ERR_USAGE,
                          "%s exists and was not written by this program: move it away, or choose "
                          "another output_dir",
                          path);
    ith_buf_deinit(&copy);
    return status;
}

/* The directory that is filled, and what rank 0 alone writes first. */
static ith_status begin_save(const char *output_dir, const char *path, const char *tmp,
                             const ith_train_save *save, ith_error *err)
{
    ITH_TRY(ith_make_dirs(output_dir, err));
    ITH_TRY(refuse_foreign(path, err));
    ITH_TRY(ith_remove_tree(tmp, err));
    ITH_TRY(ith_make_dirs(tmp, err));
    return write_state_file(tmp, save, err);
}

/* All is there and synced: from the marker on it counts. */
static ith_status end_save(const char *path, const char *tmp, ith_error *err)
{
    ITH_TRY(write_marker(tmp, err));
    return place(tmp, path, err);
}

ith_status ith_train_state_save(const char *output_dir, const ith_train_save *save, ith_error *err)
{
    ITH_ASSERT(save->progress.global_step >= 0 && isfinite(save->progress.epoch));
    check_group_names(save);
    ith_buf path = {0}, tmp = {0};
    char tag[ITH_TMP_TAG_BYTES];
    ith_status status = ITH_OK;
    ith_tmp_tag(tag);
    if (save->ranks)
        ITH_TRY_OUT(ith_comm_broadcast(save->ranks, tag, sizeof tag, 0, err));
    ith_buf_printf(&path, "%s/" PREFIX "%lld", output_dir, (long long)save->progress.global_step);
    ith_buf_printf(&tmp, "%s%s", path.data ? path.data : "", tag);
    status = ith_buf_check(&path, output_dir, err);
    if (status == ITH_OK)
        status = ith_buf_check(&tmp, output_dir, err);
    if (status == ITH_OK && leads(save))
        status = begin_save(output_dir, path.data, tmp.data, save, err);
    status = ith_comm_agree(save->ranks, status, err);
    if (status == ITH_OK)
        status = fill(tmp.data, save, err);
    if (status == ITH_OK) /* agreed: every rank has written and synced its parts */
        status = ith_comm_agree(save->ranks,
                                leads(save) ? end_save(path.data, tmp.data, err) : ITH_OK, err);
    if (!leads(save))
        goto out;
    ith_error ignored = {0}; /* the first error counts; leftovers go with the next save */
    if (status != ITH_OK && tmp.data)
        ith_remove_tree(tmp.data, &ignored);
    /* The checkpoint is there: an old one that cannot be deleted does not end the run. */
    if (status == ITH_OK &&
        ith_train_state_rotate(output_dir, save->save_total_limit, &ignored) != ITH_OK)
        ith_log(ITH_LOG_WARN, "checkpoint", "old checkpoints stay: %s", ignored.text);
out:
    ith_buf_deinit(&tmp);
    ith_buf_deinit(&path);
    return status;
}

/* ---- loading ---- */

static ith_status get_int(const json_t *root, const char *key, int64_t *out, ith_error *err)
{
    const json_t *value = json_object_get(root, key);
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: expected an integer >= 0", key);
    *out = (int64_t)json_integer_value(value);
    return ITH_OK;
}

static ith_status read_progress(const json_t *root, ith_train_progress *p, ith_error *err)
{
    const char *format = json_string_value(json_object_get(root, "format"));
    if (!format || strcmp(format, FORMAT) != 0)
        return ith_fail(err, ITH_ERR_FORMAT, "format: found \"%.64s\", expected \"" FORMAT "\"",
                        format ? format : "nothing");
    memset(p, 0, sizeof *p);
    ITH_TRY(get_int(root, "global_step", &p->global_step, err));
    ITH_TRY(get_int(root, "samples_seen", &p->samples_seen, err));
    if (!json_is_number(json_object_get(root, "epoch")))
        return ith_fail(err, ITH_ERR_FORMAT, "epoch: expected a number");
    p->epoch = json_number_value(json_object_get(root, "epoch"));
    const json_t *best = json_object_get(root, "best_metric");
    p->has_best = json_is_number(best);
    p->best_metric = json_number_value(best);
    return p->has_best ? get_int(root, "best_global_step", &p->best_global_step, err) : ITH_OK;
}

static ith_status read_tensors(const ith_st_reader *r, const ith_state_group *group, ith_error *err)
{
    for (int64_t i = 0; i < group->count; i++) {
        const ith_state_tensor *t = &group->tensors[i];
        const ith_st_entry *entry = NULL;
        ITH_TRY(ith_st_need(r, t->name, t->ndim, t->shape, NULL, &entry, err));
        if (entry->dtype != t->dtype)
            return ith_fail(err, ITH_ERR_FORMAT, "%s: %.200s: dtype %s, expected %s",
                            ith_st_file_path(r, entry->file_idx), t->name,
                            ith_dtype_name(entry->dtype), ith_dtype_name(t->dtype));
    }
    if (ith_st_count(r) != group->count)
        return ith_fail(err, ITH_ERR_FORMAT, "%s: %lld tensors, expected %lld",
                        ith_st_file_path(r, 0), (long long)ith_st_count(r),
                        (long long)group->count);
    for (int64_t i = 0; i < group->count; i++) {
        const ith_st_entry *entry = ith_st_find(r, group->tensors[i].name);
        if (entry->bytes)
            memcpy(group->tensors[i].data, entry->data, (size_t)entry->bytes);
    }
    return ITH_OK;
}

ith_status ith_train_state_open_group(ith_st_reader **out, const char *path, const char *group,
                                      ith_error *err)
{
    return ith_st_open_stem(out, path, group, err);
}

static ith_status read_group(const char *path, const ith_state_group *group, ith_error *err)
{
    ith_st_reader *r = NULL;
    ITH_TRY(ith_train_state_open_group(&r, path, group->name, err));
    ith_status status = read_tensors(r, group, err);
    ith_st_close(r);
    return status;
}

ith_status ith_train_state_load(const char *path, const ith_state_group *groups, int num_groups,
                                ith_train_progress *progress, json_t **state, ith_error *err)
{
    ith_train_progress read;
    ith_buf file = {0};
    json_t *root = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_train_state_check(path, err));
    ITH_TRY_OUT(join(&file, path, STATE_FILE, err));
    ITH_TRY_OUT(ith_json_load(&root, file.data, err));
    status = read_progress(root, &read, err);
    if (status != ITH_OK) {
        ith_wrap(err, status, "%s", file.data);
        goto out;
    }
    for (int g = 0; g < num_groups; g++)
        ITH_TRY_OUT(read_group(path, &groups[g], err));
    *progress = read;
    if (state)
        *state = json_incref(json_object_get(root, "state"));
out:
    json_decref(root);
    ith_buf_deinit(&file);
    return status;
}
