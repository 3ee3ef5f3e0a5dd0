/* samples_cache.c - the file of tokenized samples.
 *
 *   header   64 bytes: magic, zeros
 *   ids      int32, all stored samples one after the other, padded to 8 bytes
 *   runs     {int32 begin, end; float weight}, padded to 8
 *   table    stored_sample
 *   entries  int64
 *   media    ith_media_item
 *   frames   int32, first token of each frame of the media; padded to 8
 *   paths    of the media, each with its NUL; padded to 8
 *   text     JSON: names of the parts, dropped rows by reason; padded to 8
 *   footer   208 bytes: counts, key, SHA-256 of everything behind the ids (itself as zeros)
 * Little-endian. The footer comes last because the counts are known last, so that ids can be
 * written while they are made. */
#include "base/checked.h"
#include "base/hash.h"
#include "data/samples_internal.h"

#include <inttypes.h>
#include <string.h>

#define CACHE_MAGIC "ITHSAMP3"
#define HEADER_BYTES 64

typedef struct {
    char magic[8];
    int64_t num_ids, num_runs, num_stored, num_entries, text_bytes;
    int32_t max_id, reserved;
    char key[64], digest[64]; /* hexadecimal */
    int64_t num_media, path_bytes, num_frames;
} cache_footer;
static_assert(sizeof(cache_footer) == 208, "the layout of the cache file");

void samples_cache_path(ith_buf *out, const char *dir, const char *key)
{
    char name[64];
    snprintf(name, sizeof name, "samples-%.24s.bin", key);
    ith_path_join(out, dir, name);
}

ith_status samples_cache_begin(ith_writer *writer, const char *path, ith_error *err)
{
    char header[HEADER_BYTES] = CACHE_MAGIC;
    ITH_TRY(ith_writer_open(writer, path, err));
    ith_status status = ith_writer_write(writer, header, HEADER_BYTES, err);
    if (status != ITH_OK)
        ith_writer_abort(writer);
    return status;
}

static ith_status describe(const ith_samples *s, ith_buf *out, ith_error *err)
{
    json_t *root = json_object(), *parts = json_array(), *drops = json_array();
    bool failed = json_object_set_new(root, "parts", parts) != 0;
    failed |= json_object_set_new(root, "drops", drops) != 0;
    failed |= json_object_set_new(root, "rows", json_integer(s->num_rows)) != 0;
    failed |= json_object_set_new(root, "candidates", json_integer(s->num_candidates)) != 0;
    for (int64_t i = 0; i < s->num_parts && !failed; i++)
        failed |= json_array_append_new(parts, json_string(s->part_names[i])) != 0;
    for (int k = 1; k < ITH_DROP_COUNT && !failed; k++) {
        const ith_drop_row *d = &s->drops.rows[k];
        if (d->count == 0)
            continue;
        json_t *item = json_object();
        failed |= json_object_set_new(item, "reason", json_integer(k)) != 0;
        failed |= json_object_set_new(item, "count", json_integer(d->count)) != 0;
        failed |= json_object_set_new(item, "part", json_integer(d->dataset)) != 0;
        failed |= json_object_set_new(item, "row", json_integer(d->row)) != 0;
        /* Details are cut to a size, perhaps within a character: not valid as JSON text. */
        json_t *detail = json_string(d->detail), *where = json_string(s->where[k]);
        if (detail)
            failed |= json_object_set_new(item, "detail", detail) != 0;
        if (where)
            failed |= json_object_set_new(item, "where", where) != 0;
        failed |= json_array_append_new(drops, item) != 0;
    }
    ith_status status = failed ? ith_fail(err, ITH_ERR_MEMORY, "out of memory for the cache")
                               : ith_json_dump(root, false, out, err);
    json_decref(root);
    while (status == ITH_OK && !out->failed && out->len % 8)
        ith_buf_putc(out, ' ');
    return status == ITH_OK ? ith_buf_check(out, "cache", err) : status;
}

static ith_status put(ith_writer *w, ith_sha256 *h, const void *data, int64_t bytes, ith_error *err)
{
    static const char zeros[8];
    int64_t pad = ith_round_up(bytes, 8) - bytes;
    ith_sha256_update(h, data, bytes);
    ith_sha256_update(h, zeros, pad);
    ITH_TRY(ith_writer_write(w, data, bytes, err));
    return ith_writer_write(w, zeros, pad, err);
}

ith_status samples_cache_finish(const ith_samples *s, ith_writer *w, ith_error *err)
{
    static const char zeros[8];
    cache_footer footer = {.magic = CACHE_MAGIC,
                           .num_ids = s->num_ids,
                           .num_runs = s->num_runs,
                           .num_stored = s->num_stored,
                           .num_entries = s->num_entries,
                           .max_id = s->max_id,
                           .num_media = s->num_media,
                           .path_bytes = s->path_bytes,
                           .num_frames = s->num_frames};
    ith_buf text = {0};
    ith_sha256 h;
    char digest[65];
    ith_status status = ITH_OK;
    ith_sha256_init(&h);
    ITH_TRY_OUT(describe(s, &text, err));
    ITH_TRY_OUT(ith_writer_write(w, zeros, s->num_ids % 2 * 4, err));
    ITH_TRY_OUT(put(w, &h, s->runs, s->num_runs * (int64_t)sizeof *s->runs, err));
    ITH_TRY_OUT(put(w, &h, s->table, s->num_stored * (int64_t)sizeof *s->table, err));
    ITH_TRY_OUT(put(w, &h, s->entries, s->num_entries * 8, err));
    ITH_TRY_OUT(put(w, &h, s->media, s->num_media * (int64_t)sizeof *s->media, err));
    ITH_TRY_OUT(put(w, &h, s->frames, s->num_frames * 4, err));
    ITH_TRY_OUT(put(w, &h, s->paths, s->path_bytes, err));
    ITH_TRY_OUT(put(w, &h, text.data, text.len, err));
    footer.text_bytes = text.len;
    memcpy(footer.key, s->key, 64);
    ith_sha256_update(&h, &footer, sizeof footer);
    ith_sha256_hex(&h, digest);
    memcpy(footer.digest, digest, 64);
    ITH_TRY_OUT(ith_writer_write(w, &footer, sizeof footer, err));
    status = ith_writer_commit(w, err);
out:
    ith_buf_deinit(&text);
    return status;
}

/* Adds a section of count elements to the offset; false when it cannot be inside a file. */
static bool section(int64_t *offset, int64_t count, int64_t size)
{
    int64_t bytes = 0;
    if (count < 0 || !ith_mul_ok(count, size, &bytes) || bytes > INT64_MAX - 8)
        return false;
    return ith_add_ok(*offset, ith_round_up(bytes, 8), offset);
}

typedef struct {
    int64_t ids, runs, table, entries, media, frames, paths, text, footer; /* offsets */
} cache_layout;

static bool lay_out(const cache_footer *f, int64_t file_bytes, cache_layout *l)
{
    int64_t at = HEADER_BYTES;
    l->ids = at;
    bool ok = section(&at, f->num_ids, 4);
    l->runs = at;
    ok = ok && section(&at, f->num_runs, (int64_t)sizeof(ith_sample_run));
    l->table = at;
    ok = ok && section(&at, f->num_stored, (int64_t)sizeof(stored_sample));
    l->entries = at;
    ok = ok && section(&at, f->num_entries, 8);
    l->media = at;
    ok = ok && section(&at, f->num_media, (int64_t)sizeof(ith_media_item));
    l->frames = at;
    ok = ok && section(&at, f->num_frames, 4);
    l->paths = at;
    ok = ok && section(&at, f->path_bytes, 1);
    l->text = at;
    ok = ok && section(&at, f->text_bytes, 1);
    l->footer = at;
    return ok && at == file_bytes - (int64_t)sizeof *f && f->num_entries > 0 && f->max_id >= 0;
}

static int64_t get_count(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_integer(value) && json_integer_value(value) >= 0 ? json_integer_value(value) : 0;
}

static ith_status read_drop(ith_samples *s, const json_t *item, ith_error *err)
{
    int64_t k = get_count(item, "reason");
    if (k < 1 || k >= ITH_DROP_COUNT || s->where[k])
        return ITH_OK;
    ith_drop_row *d = &s->drops.rows[k];
    d->count = get_count(item, "count");
    d->dataset = get_count(item, "part");
    d->row = get_count(item, "row");
    const char *detail = json_string_value(json_object_get(item, "detail"));
    const char *where = json_string_value(json_object_get(item, "where"));
    snprintf(d->detail, sizeof d->detail, "%s", detail ? detail : "");
    where = where ? where : "?";
    s->where[k] = ith_strndup(where, (int64_t)strlen(where));
    return s->where[k] ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory for the cache");
}

static ith_status read_text(ith_samples *s, const char *text, int64_t len, ith_error *err)
{
    json_t *root = NULL;
    ITH_TRY(ith_json_parse(&root, text, len, "cache", err));
    s->num_rows = get_count(root, "rows");
    s->num_candidates = get_count(root, "candidates");
    const json_t *drops = json_object_get(root, "drops");
    ith_status status = ITH_OK;
    memset(&s->drops, 0, sizeof s->drops);
    for (int k = 0; k < ITH_DROP_COUNT; k++) {
        ith_free(s->where[k]);
        s->where[k] = NULL;
    }
    for (size_t i = 0; i < json_array_size(drops) && status == ITH_OK; i++)
        status = read_drop(s, json_array_get(drops, i), err);
    json_decref(root);
    return status;
}

/* What makes a file unusable, or NULL. */
static const char *check_file(const ith_samples *s, const ith_map *map, cache_footer *footer,
                              cache_layout *layout)
{
    if (map->size < HEADER_BYTES + (int64_t)sizeof *footer ||
        memcmp(map->data, CACHE_MAGIC, 8) != 0)
        return "not a file of tokenized data";
    memcpy(footer, map->data + map->size - sizeof *footer, sizeof *footer);
    if (memcmp(footer->magic, CACHE_MAGIC, 8) != 0 || !lay_out(footer, map->size, layout))
        return "cut off or damaged";
    if (memcmp(footer->key, s->key, 64) != 0)
        return "made of other data or settings";
    ith_sha256 h;
    char digest[65];
    ith_sha256_init(&h);
    ith_sha256_update(&h, map->data + layout->runs, layout->footer - layout->runs);
    cache_footer blank = *footer;
    memset(blank.digest, 0, sizeof blank.digest);
    ith_sha256_update(&h, &blank, sizeof blank);
    ith_sha256_hex(&h, digest);
    return memcmp(footer->digest, digest, 64) == 0 ? NULL : "damaged";
}

ith_status samples_cache_open(ith_samples *s, const char *path, bool *valid, ith_error *err)
{
    ith_map map = {0};
    cache_footer footer;
    cache_layout layout;
    *valid = false;
    ITH_TRY(ith_map_open(&map, path, err));
    const char *why = check_file(s, &map, &footer, &layout);
    if (why) {
        ith_fail(err, ITH_ERR_FORMAT, "%s: %s", path, why);
        ith_map_close(&map);
        return ITH_OK;
    }
    char *base = (char *)(uintptr_t)map.data; /* read-only; the pointers serve heap memory too */
    s->map = map;
    s->ids = (int32_t *)(void *)(base + layout.ids);
    s->runs = (ith_sample_run *)(void *)(base + layout.runs);
    s->table = (stored_sample *)(void *)(base + layout.table);
    s->entries = (int64_t *)(void *)(base + layout.entries);
    s->media = (ith_media_item *)(void *)(base + layout.media);
    s->frames = (int32_t *)(void *)(base + layout.frames);
    s->paths = base + layout.paths;
    s->num_media = footer.num_media;
    s->num_frames = footer.num_frames;
    s->path_bytes = footer.path_bytes;
    s->num_ids = footer.num_ids;
    s->num_runs = footer.num_runs;
    s->num_stored = footer.num_stored;
    s->num_entries = footer.num_entries;
    s->max_id = footer.max_id;
    ith_status status = read_text(s, base + layout.text, footer.text_bytes, err);
    if (status == ITH_OK)
        status = samples_sum(s, err);
    if (status == ITH_OK) {
        *valid = true;
        return ITH_OK;
    }
    samples_release(s);
    return status == ITH_ERR_FORMAT ? ITH_OK : status;
}
