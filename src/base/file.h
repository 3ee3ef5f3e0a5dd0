/* file.h - files and directories.
 *
 * Writes are atomic: bytes go to "<path>.tmp-<place>-<pid>" (place: of this host and its space of
 * process numbers, 8 hexadecimal digits), commit syncs it, renames it over <path> and syncs the
 * directory; a crash leaves either the old file or the new one. Errors name the path and
 * the reason. */
#ifndef ITH_BASE_FILE_H
#define ITH_BASE_FILE_H

#include "base/mem.h"

#ifdef __cplusplus
extern "C" {
#endif

bool ith_path_exists(const char *path);
bool ith_path_is_dir(const char *path);
/* "dir/name" into buf (cleared first); an absolute name stands alone. */
void ith_path_join(ith_buf *buf, const char *dir, const char *name);
/* Part after the last '/'. */
const char *ith_path_base(const char *path);
/* mkdir -p. */
ith_status ith_make_dirs(const char *path, ith_error *err);
/* Removes a file or a directory tree; a missing path is fine. Does not follow links. */
ith_status ith_remove_tree(const char *path, ith_error *err);
/* Names in a directory (without . and ..), sorted bytewise; free with ith_names_free. */
typedef struct {
    char **names;
    int64_t count;
} ith_names;
ith_status ith_list_dir(const char *path, ith_names *out, ith_error *err);
void ith_names_free(ith_names *names);
/* Size and modification time (nanoseconds since 1970). Any out may be NULL. */
ith_status ith_file_stat(const char *path, int64_t *size, int64_t *mtime_ns, ith_error *err);

/* Appends a whole file of at most max_bytes (0: no limit) to buf. */
ith_status ith_read_file(const char *path, int64_t max_bytes, ith_buf *buf, ith_error *err);

/* Read-only mapping. An empty file gives data = "", size = 0. */
typedef struct {
    const char *data;
    int64_t size;
} ith_map;
ith_status ith_map_open(ith_map *map, const char *path, ith_error *err);
void ith_map_close(ith_map *map);

/* Bytes [offset, offset + bytes) of a file, which must be there. Unlike a mapping it leaves no
 * pages in the process. */
ith_status ith_read_at(const char *path, int64_t offset, void *out, int64_t bytes, ith_error *err);

/* Atomic file writer, buffered. After a failed write only abort is allowed; abort after commit does
 * nothing. */
typedef struct {
    int fd; /* -1 when closed */
    char *path, *tmp_path;
    char *buffer;
    int64_t buffered, written, on_the_way;
} ith_writer;
ith_status ith_writer_open(ith_writer *w, const char *path, ith_error *err);
ith_status ith_writer_write(ith_writer *w, const void *data, int64_t len, ith_error *err);
ith_status ith_writer_commit(ith_writer *w, ith_error *err);
void ith_writer_abort(ith_writer *w);
/* ".tmp-<place>-<pid>" of this process: what follows the name of a file or directory that is being
 * written. */
#define ITH_TMP_TAG_BYTES 32
void ith_tmp_tag(char tag[ITH_TMP_TAG_BYTES]);
/* Whether NAME.tmp-PLACE-PID can be removed: its writer is this process, or one of this place that
 * is no more. Those of other hosts and containers stay: only they know whether the writer lives. */
bool ith_tmp_is_left(const char *name);
/* Removes the regular files of a directory that killed writers left. A missing directory is fine.
 */
ith_status ith_remove_leftovers(const char *dir, ith_error *err);
/* Whole file at once. */
ith_status ith_write_file(const char *path, const void *data, int64_t len, ith_error *err);
/* A file of known size that is filled piece by piece, in any order, by one process or by several:
 * create makes it (zeros, synced), open takes the one that is there, close syncs what was written.
 * After a failure only abandon is allowed, which does nothing after close. */
typedef struct {
    int fd; /* -1 when closed */
    char *path;
} ith_range_file;
ith_status ith_range_create(ith_range_file *f, const char *path, int64_t bytes, ith_error *err);
ith_status ith_range_open(ith_range_file *f, const char *path, ith_error *err);
ith_status ith_range_write(ith_range_file *f, int64_t at, const void *data, int64_t bytes,
                           ith_error *err);
ith_status ith_range_close(ith_range_file *f, ith_error *err);
void ith_range_abandon(ith_range_file *f);
/* fsync of a directory. */
ith_status ith_sync_dir(const char *path, ith_error *err);
/* rename(2) then sync of the target's directory. */
ith_status ith_rename(const char *from, const char *to, ith_error *err);
/* Copies a regular file atomically. */
ith_status ith_copy_file(const char *from, const char *to, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
