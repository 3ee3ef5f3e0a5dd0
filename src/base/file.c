/* file.c - files and directories over POSIX calls.
 *
 * Invariants:
 *  1. Every read and write passes ith_fault_hit.
 *  2. A writer never touches its final path before commit.
 *  3. No descriptor or temporary file survives abort. */
#include "base/file.h"

#include "base/checked.h"
#include "base/hash.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define WRITER_BUFFER_BYTES ((int64_t)1 << 20)
#define WRITER_AHEAD_BYTES ((int64_t)16 << 20) /* on their way to the disk before the sync */

static ith_status io_fail(ith_error *err, const char *path, const char *what)
{
    return ith_fail(err, ITH_ERR_IO, "%s: %s: %s", path, what, strerror(errno));
}

bool ith_path_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

bool ith_path_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

void ith_path_join(ith_buf *buf, const char *dir, const char *name)
{
    ith_buf_clear(buf);
    if (name[0] != '/' && dir[0]) {
        ith_buf_puts(buf, dir);
        if (dir[strlen(dir) - 1] != '/')
            ith_buf_putc(buf, '/');
    }
    ith_buf_puts(buf, name);
}

const char *ith_path_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

ith_status ith_make_dirs(const char *path, ith_error *err)
{
    char *copy = ith_strndup(path, (int64_t)strlen(path));
    if (!copy)
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path);
    ith_status status = ITH_OK;
    for (char *p = copy + 1; status == ITH_OK; p++) {
        if (*p != '/' && *p != '\0')
            continue;
        char saved = *p;
        *p = '\0';
        if (mkdir(copy, 0777) != 0 && !(errno == EEXIST && ith_path_is_dir(copy)))
            status = errno == EEXIST
                         ? ith_fail(err, ITH_ERR_IO, "%s: is there, and is no directory", copy)
                         : io_fail(err, copy, "cannot create directory");
        *p = saved;
        if (saved == '\0')
            break;
    }
    ith_free(copy);
    return status;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

void ith_names_free(ith_names *names)
{
    for (int64_t i = 0; i < names->count; i++)
        ith_free(names->names[i]);
    ith_free(names->names);
    names->names = NULL;
    names->count = 0;
}

ith_status ith_list_dir(const char *path, ith_names *out, ith_error *err)
{
    DIR *dir = opendir(path);
    if (!dir)
        return io_fail(err, path, "cannot open directory");
    ith_names names = {NULL, 0};
    int64_t cap = 0;
    ith_status status = ITH_OK;
    for (struct dirent *entry; status == ITH_OK && (entry = readdir(dir));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        status =
            ith_grow((void **)&names.names, &cap, names.count + 1, sizeof(char *), "names", err);
        if (status != ITH_OK)
            break;
        names.names[names.count] = ith_strndup(entry->d_name, (int64_t)strlen(entry->d_name));
        if (!names.names[names.count])
            status = ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path);
        else
            names.count++;
    }
    closedir(dir);
    if (status != ITH_OK) {
        ith_names_free(&names);
        return status;
    }
    if (names.count)
        qsort(names.names, (size_t)names.count, sizeof(char *), compare_names);
    *out = names;
    return ITH_OK;
}

/* Depth is bounded by the path length limit of the system. */
ith_status ith_remove_tree(const char *path, ith_error *err)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return errno == ENOENT ? ITH_OK : io_fail(err, path, "cannot stat");
    if (!S_ISDIR(st.st_mode))
        return unlink(path) == 0 ? ITH_OK : io_fail(err, path, "cannot remove");
    ith_names names;
    ITH_TRY(ith_list_dir(path, &names, err));
    ith_buf child = {0};
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < names.count && status == ITH_OK; i++) {
        ith_path_join(&child, path, names.names[i]);
        status = ith_buf_check(&child, path, err);
        if (status == ITH_OK)
            status = ith_remove_tree(child.data, err);
    }
    ith_buf_deinit(&child);
    ith_names_free(&names);
    if (status == ITH_OK && rmdir(path) != 0)
        status = io_fail(err, path, "cannot remove directory");
    return status;
}

ith_status ith_file_stat(const char *path, int64_t *size, int64_t *mtime_ns, ith_error *err)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return io_fail(err, path, "cannot stat");
    if (size)
        *size = st.st_size;
    if (mtime_ns)
        *mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    return ITH_OK;
}

/* open(2) for reading; refuses directories. */
static ith_status open_read(const char *path, int *out_fd, int64_t *out_size, ith_error *err)
{
    int fd = ith_fault_hit(ITH_FAULT_READ) ? (errno = EIO, -1) : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return io_fail(err, path, "cannot open");
    struct stat st;
    if (fstat(fd, &st) != 0 || S_ISDIR(st.st_mode)) {
        if (S_ISDIR(st.st_mode))
            errno = EISDIR;
        ith_status status = io_fail(err, path, "cannot read");
        close(fd);
        return status;
    }
    *out_fd = fd;
    *out_size = st.st_size;
    return ITH_OK;
}

ith_status ith_read_file(const char *path, int64_t max_bytes, ith_buf *buf, ith_error *err)
{
    int fd = -1;
    int64_t size = 0, total = 0;
    ITH_TRY(open_read(path, &fd, &size, err));
    ith_status status = ITH_OK;
    char *chunk = NULL;
    ITH_TRY_OUT(ith_alloc((void **)&chunk, 65536, path, err));
    for (;;) {
        ssize_t got = ith_fault_hit(ITH_FAULT_READ) ? (errno = EIO, -1) : read(fd, chunk, 65536);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            status = io_fail(err, path, "cannot read");
            goto out;
        }
        if (got == 0)
            break;
        total += got;
        if (max_bytes && total > max_bytes) {
            status = ith_fail(err, ITH_ERR_FORMAT, "%s: larger than %lld bytes", path,
                              (long long)max_bytes);
            goto out;
        }
        ith_buf_append(buf, chunk, got);
    }
    ith_buf_append(buf, "", 0);
    status = ith_buf_check(buf, path, err);
out:
    ith_free(chunk);
    close(fd);
    return status;
}

ith_status ith_read_at(const char *path, int64_t offset, void *out, int64_t bytes, ith_error *err)
{
    int fd = -1;
    int64_t size = 0, done = 0;
    ITH_TRY(open_read(path, &fd, &size, err));
    ith_status status = ITH_OK;
    while (done < bytes && status == ITH_OK) {
        ssize_t got = ith_fault_hit(ITH_FAULT_READ)
                          ? (errno = EIO, -1)
                          : pread(fd, (char *)out + done, (size_t)(bytes - done), offset + done);
        if (got < 0 && errno != EINTR)
            status = io_fail(err, path, "cannot read");
        if (got == 0)
            status = ith_fail(err, ITH_ERR_IO, "%s: ends after %lld bytes, expected %lld more",
                              path, (long long)(offset + done), (long long)(bytes - done));
        done += ith_max_i64(got, 0);
    }
    close(fd);
    return status;
}

ith_status ith_map_open(ith_map *map, const char *path, ith_error *err)
{
    int fd = -1;
    int64_t size = 0;
    ITH_TRY(open_read(path, &fd, &size, err));
    const void *data = "";
    if (size > 0) {
        data = ith_fault_hit(ITH_FAULT_READ)
                   ? (errno = EIO, MAP_FAILED)
                   : mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) {
            ith_status status = io_fail(err, path, "cannot map");
            close(fd);
            return status;
        }
    }
    close(fd);
    map->data = data;
    map->size = size;
    return ITH_OK;
}

void ith_map_close(ith_map *map)
{
    if (map->size > 0)
        munmap((void *)(uintptr_t)map->data, (size_t)map->size);
    map->data = NULL;
    map->size = 0;
}

/* Tells this host and its space of process numbers from others that share a directory: a PID says
 * something in its own space only, and containers may share a host name. */
static unsigned this_place(void)
{
    char host[256] = "";
    struct stat space = {0};
    ith_hash64 h;
    (void)gethostname(host, sizeof host - 1);
    (void)stat("/proc/self/ns/pid", &space);
    ith_hash64_init(&h);
    ith_hash64_update(&h, host, (int64_t)strlen(host));
    ith_hash64_update(&h, &space.st_ino, sizeof space.st_ino);
    return (unsigned)(ith_hash64_value(&h) & 0xffffffffU);
}

void ith_tmp_tag(char tag[ITH_TMP_TAG_BYTES])
{
    snprintf(tag, ITH_TMP_TAG_BYTES, ".tmp-%08x-%ld", this_place(), (long)getpid());
}

/* The PID of "NAME.tmp-PLACE-PID" as a writer of this place spells it; 0: another name. */
static long writer_of(const char *name)
{
    char place[ITH_TMP_TAG_BYTES];
    const char *tail = NULL;
    snprintf(place, sizeof place, ".tmp-%08x-", this_place());
    for (const char *p = name; (p = strstr(p, place)); p++)
        tail = p;
    if (!tail || tail == name)
        return 0;
    const char *digits = tail + strlen(place);
    size_t len = strspn(digits, "0123456789");
    if (len == 0 || len > 10 || digits[len] != '\0' || digits[0] == '0')
        return 0;
    long pid = strtol(digits, NULL, 10);
    return pid <= INT_MAX ? pid : 0;
}

bool ith_tmp_is_left(const char *name)
{
    long pid = writer_of(name);
    return pid && (pid == getpid() || (kill((pid_t)pid, 0) != 0 && errno == ESRCH));
}

ith_status ith_writer_open(ith_writer *w, const char *path, ith_error *err)
{
    char tag[ITH_TMP_TAG_BYTES];
    memset(w, 0, sizeof *w);
    w->fd = -1;
    int64_t len = (int64_t)strlen(path);
    w->path = ith_strndup(path, len);
    w->tmp_path = ith_malloc(len + ITH_TMP_TAG_BYTES);
    w->buffer = ith_malloc(WRITER_BUFFER_BYTES);
    if (w->tmp_path)
        w->tmp_path[0] = '\0';
    if (!w->path || !w->tmp_path || !w->buffer) {
        ith_writer_abort(w);
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path);
    }
    ith_tmp_tag(tag);
    snprintf(w->tmp_path, (size_t)(len + ITH_TMP_TAG_BYTES), "%s%s", path, tag);
    w->fd = ith_fault_hit(ITH_FAULT_WRITE)
                ? (errno = EIO, -1)
                : open(w->tmp_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0) {
        ith_status status = io_fail(err, w->tmp_path, "cannot create");
        ith_writer_abort(w);
        return status;
    }
    return ITH_OK;
}

static ith_status write_all(ith_writer *w, const char *data, int64_t len, ith_error *err)
{
    while (len > 0) {
        ssize_t put = ith_fault_hit(ITH_FAULT_WRITE)
                          ? (errno = ENOSPC, -1)
                          : write(w->fd, data, (size_t)ith_min_i64(len, (int64_t)1 << 30));
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return io_fail(err, w->tmp_path, "cannot write");
        data += put;
        len -= put;
        w->written += put;
        if (w->written - w->on_the_way >= WRITER_AHEAD_BYTES) { /* a hint, nothing else */
            (void)sync_file_range(w->fd, w->on_the_way, w->written - w->on_the_way,
                                  SYNC_FILE_RANGE_WRITE);
            w->on_the_way = w->written;
        }
    }
    return ITH_OK;
}

static ith_status flush(ith_writer *w, ith_error *err)
{
    int64_t len = w->buffered;
    w->buffered = 0;
    return write_all(w, w->buffer, len, err);
}

ith_status ith_writer_write(ith_writer *w, const void *data, int64_t len, ith_error *err)
{
    ITH_ASSERT(w->fd >= 0 && len >= 0);
    if (len > WRITER_BUFFER_BYTES - w->buffered)
        ITH_TRY(flush(w, err));
    if (len >= WRITER_BUFFER_BYTES)
        return write_all(w, data, len, err);
    if (len)
        memcpy(w->buffer + w->buffered, data, (size_t)len);
    w->buffered += len;
    return ITH_OK;
}

ith_status ith_sync_dir(const char *path, ith_error *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return io_fail(err, path, "cannot open directory");
    /* Some file systems refuse fsync on directories; the rename is then as durable as they make it.
     */
    int failed = fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP;
    ith_status status = failed ? io_fail(err, path, "cannot sync") : ITH_OK;
    close(fd);
    return status;
}

ith_status ith_rename(const char *from, const char *to, ith_error *err)
{
    if (ith_fault_hit(ITH_FAULT_WRITE) ? (errno = EIO, true) : rename(from, to) != 0)
        return io_fail(err, to, "cannot rename into place");
    const char *base = ith_path_base(to);
    if (base == to)
        return ith_sync_dir(".", err);
    char *dir = ith_strndup(to, base == to + 1 ? 1 : base - to - 1);
    if (!dir)
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", to);
    ith_status status = ith_sync_dir(dir, err);
    ith_free(dir);
    return status;
}

ith_status ith_writer_commit(ith_writer *w, ith_error *err)
{
    ITH_ASSERT(w->fd >= 0);
    ITH_TRY(flush(w, err));
    if (ith_fault_hit(ITH_FAULT_WRITE) ? (errno = EIO, true) : fsync(w->fd) != 0)
        return io_fail(err, w->tmp_path, "cannot sync");
    int failed = close(w->fd) != 0;
    w->fd = -1;
    if (failed)
        return io_fail(err, w->tmp_path, "cannot close");
    ITH_TRY(ith_rename(w->tmp_path, w->path, err));
    ith_free(w->tmp_path);
    w->tmp_path = NULL;
    ith_writer_abort(w);
    return ITH_OK;
}

void ith_writer_abort(ith_writer *w)
{
    if (w->fd >= 0)
        close(w->fd);
    if (w->tmp_path && w->tmp_path[0]) /* never committed */
        unlink(w->tmp_path);
    ith_free(w->path);
    ith_free(w->tmp_path);
    ith_free(w->buffer);
    memset(w, 0, sizeof *w);
    w->fd = -1;
}

ith_status ith_write_file(const char *path, const void *data, int64_t len, ith_error *err)
{
    ith_writer w;
    ITH_TRY(ith_writer_open(&w, path, err));
    ith_status status = ith_writer_write(&w, data, len, err);
    if (status == ITH_OK)
        status = ith_writer_commit(&w, err);
    ith_writer_abort(&w);
    return status;
}

ith_status ith_remove_leftovers(const char *dir, ith_error *err)
{
    ith_names names;
    ith_buf path = {0};
    ith_status status = ITH_OK;
    if (!ith_path_is_dir(dir))
        return ITH_OK;
    ITH_TRY(ith_list_dir(dir, &names, err));
    for (int64_t i = 0; i < names.count && status == ITH_OK; i++) {
        struct stat st;
        if (!ith_tmp_is_left(names.names[i]) || writer_of(names.names[i]) == getpid())
            continue;
        ith_path_join(&path, dir, names.names[i]);
        status = ith_buf_check(&path, dir, err);
        if (status == ITH_OK && lstat(path.data, &st) == 0 && S_ISREG(st.st_mode) &&
            unlink(path.data) != 0 && errno != ENOENT)
            status = io_fail(err, path.data, "cannot remove");
    }
    ith_buf_deinit(&path);
    ith_names_free(&names);
    return status;
}

/* ---- files filled in any order ---- */

static ith_status range_open(ith_range_file *f, const char *path, int flags, ith_error *err)
{
    f->path = ith_strndup(path, (int64_t)strlen(path));
    f->fd = -1;
    if (!f->path)
        return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory", path);
    f->fd = ith_fault_hit(ITH_FAULT_WRITE) ? (errno = EIO, -1)
                                           : open(path, O_WRONLY | O_CLOEXEC | flags, 0666);
    if (f->fd >= 0)
        return ITH_OK;
    ith_status status = io_fail(err, path, flags ? "cannot create" : "cannot open");
    ith_range_abandon(f);
    return status;
}

ith_status ith_range_create(ith_range_file *f, const char *path, int64_t bytes, ith_error *err)
{
    ITH_TRY(range_open(f, path, O_CREAT | O_TRUNC, err));
    if (ith_fault_hit(ITH_FAULT_WRITE) ? (errno = ENOSPC, true) : ftruncate(f->fd, bytes) != 0)
        return io_fail(err, path, "cannot write");
    return ITH_OK;
}

ith_status ith_range_open(ith_range_file *f, const char *path, ith_error *err)
{
    return range_open(f, path, 0, err);
}

ith_status ith_range_write(ith_range_file *f, int64_t at, const void *data, int64_t bytes,
                           ith_error *err)
{
    ITH_ASSERT(f->fd >= 0 && at >= 0 && bytes >= 0);
    const char *from = data;
    while (bytes > 0) {
        size_t n = (size_t)ith_min_i64(bytes, (int64_t)1 << 30);
        ssize_t put =
            ith_fault_hit(ITH_FAULT_WRITE) ? (errno = ENOSPC, -1) : pwrite(f->fd, from, n, at);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return io_fail(err, f->path, "cannot write");
        from += put;
        at += put;
        bytes -= put;
    }
    return ITH_OK;
}

ith_status ith_range_close(ith_range_file *f, ith_error *err)
{
    ITH_ASSERT(f->fd >= 0);
    if (ith_fault_hit(ITH_FAULT_WRITE) ? (errno = EIO, true) : fsync(f->fd) != 0)
        return io_fail(err, f->path, "cannot sync");
    int failed = close(f->fd) != 0;
    f->fd = -1;
    ith_status status = failed ? io_fail(err, f->path, "cannot close") : ITH_OK;
    ith_range_abandon(f);
    return status;
}

void ith_range_abandon(ith_range_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    ith_free(f->path);
    f->path = NULL;
    f->fd = -1;
}

ith_status ith_copy_file(const char *from, const char *to, ith_error *err)
{
    ith_map map;
    ITH_TRY(ith_map_open(&map, from, err));
    ith_status status = ith_write_file(to, map.data, map.size, err);
    ith_map_close(&map);
    return status;
}
