/* mem.c - heap wrappers with fault injection, growable buffers, bump arenas.
 *
 * Invariants:
 *  1. Fault counters are atomic, so any thread may allocate.
 *  2. A buffer that failed never changes. */
#include "base/mem.h"

#include "base/checked.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MAX_BYTES ((int64_t)1 << 40)

static atomic_llong alloc_count;
static atomic_llong fault_at[ITH_FAULT_KINDS];
static atomic_llong fault_seen[ITH_FAULT_KINDS];

void ith_fault_set(ith_fault_kind kind, int64_t n)
{
    atomic_store(&fault_seen[kind], 0);
    atomic_store(&fault_at[kind], n);
}

bool ith_fault_hit(ith_fault_kind kind)
{
    if (kind == ITH_FAULT_WRITE && ith_fault_hit(ITH_FAULT_KILL))
        raise(SIGKILL);
    long long seen = atomic_fetch_add(&fault_seen[kind], 1) + 1;
    return seen == atomic_load(&fault_at[kind]);
}

int64_t ith_fault_count(ith_fault_kind kind)
{
    return atomic_load(&fault_seen[kind]);
}

int64_t ith_alloc_count(void)
{
    return atomic_load(&alloc_count);
}

static void *counted(void *ptr)
{
    if (ptr)
        atomic_fetch_add(&alloc_count, 1);
    return ptr;
}

void *ith_malloc(int64_t bytes)
{
    if (bytes < 0 || ith_fault_hit(ITH_FAULT_ALLOC))
        return NULL;
    return counted(malloc(bytes ? (size_t)bytes : 1));
}

void *ith_calloc(int64_t count, int64_t size)
{
    if (count < 0 || size < 0 || ith_fault_hit(ITH_FAULT_ALLOC))
        return NULL;
    return counted(calloc(count ? (size_t)count : 1, size ? (size_t)size : 1));
}

void *ith_realloc(void *ptr, int64_t bytes)
{
    if (bytes < 0 || ith_fault_hit(ITH_FAULT_ALLOC))
        return NULL;
    return counted(realloc(ptr, bytes ? (size_t)bytes : 1));
}

void *ith_malloc_aligned(int64_t bytes, int64_t alignment)
{
    ITH_ASSERT(alignment > 0 && (alignment & (alignment - 1)) == 0);
    if (bytes < 0 || ith_fault_hit(ITH_FAULT_ALLOC))
        return NULL;
    int64_t rounded = ith_round_up(ith_max_i64(bytes, 1), alignment);
    return counted(aligned_alloc((size_t)alignment, (size_t)rounded));
}

void ith_free(void *ptr)
{
    free(ptr);
}

char *ith_strndup(const char *text, int64_t len)
{
    char *copy = ith_malloc(len + 1);
    if (copy) {
        memcpy(copy, text, (size_t)len);
        copy[len] = '\0';
    }
    return copy;
}

ith_status ith_alloc(void **out, int64_t bytes, const char *what, ith_error *err)
{
    void *ptr = ith_malloc(bytes);
    if (!ptr)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: %lld bytes for %s", (long long)bytes,
                        what);
    *out = ptr;
    return ITH_OK;
}

ith_status ith_alloc_zero(void **out, int64_t count, int64_t size, const char *what, ith_error *err)
{
    void *ptr = ith_calloc(count, size);
    if (!ptr)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: %lld x %lld bytes for %s",
                        (long long)count, (long long)size, what);
    *out = ptr;
    return ITH_OK;
}

ith_status ith_grow(void **ptr, int64_t *cap, int64_t need, int64_t size, const char *what,
                    ith_error *err)
{
    if (need <= *cap)
        return ITH_OK;
    int64_t new_cap = ith_max_i64(need, ith_max_i64(16, *cap * 2)), bytes = 0;
    void *grown = ith_mul_ok(new_cap, size, &bytes) ? ith_realloc(*ptr, bytes) : NULL;
    if (!grown)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: %lld %s", (long long)new_cap, what);
    *ptr = grown;
    *cap = new_cap;
    return ITH_OK;
}

void ith_buf_init(ith_buf *buf, int64_t max_bytes)
{
    memset(buf, 0, sizeof *buf);
    buf->max_bytes = max_bytes;
}

void ith_buf_deinit(ith_buf *buf)
{
    ith_free(buf->data);
    ith_buf_init(buf, buf->max_bytes);
}

void ith_buf_clear(ith_buf *buf)
{
    buf->len = 0;
    buf->failed = ITH_OK;
    if (buf->data)
        buf->data[0] = '\0';
}

/* Room for `len` more bytes and the NUL. */
static bool buf_reserve(ith_buf *buf, int64_t len)
{
    if (buf->failed)
        return false;
    int64_t max = buf->max_bytes ? buf->max_bytes : DEFAULT_MAX_BYTES, need = 0;
    if (!ith_add_ok(buf->len + 1, len, &need) || need > max + 1) {
        buf->failed = ITH_ERR_MEMORY;
        return false;
    }
    if (need > buf->cap) {
        int64_t cap = ith_max_i64(need, ith_max_i64(64, buf->cap * 2));
        char *grown = ith_realloc(buf->data, cap);
        if (!grown) {
            buf->failed = ITH_ERR_MEMORY;
            return false;
        }
        buf->data = grown;
        buf->cap = cap;
    }
    return true;
}

void ith_buf_append(ith_buf *buf, const void *data, int64_t len)
{
    ITH_ASSERT(len >= 0);
    if (!buf_reserve(buf, len))
        return;
    if (len)
        memcpy(buf->data + buf->len, data, (size_t)len);
    buf->len += len;
    buf->data[buf->len] = '\0';
}

void ith_buf_puts(ith_buf *buf, const char *text)
{
    ith_buf_append(buf, text, (int64_t)strlen(text));
}

void ith_buf_putc(ith_buf *buf, char c)
{
    ith_buf_append(buf, &c, 1);
}

void ith_buf_printf(ith_buf *buf, const char *fmt, ...)
{
    va_list args, copy;
    va_start(args, fmt);
    va_copy(copy, args);
    int len = vsnprintf(NULL, 0, fmt, copy);
    va_end(copy);
    if (len >= 0 && buf_reserve(buf, len)) {
        vsnprintf(buf->data + buf->len, (size_t)len + 1, fmt, args);
        buf->len += len;
    }
    va_end(args);
}

ith_status ith_buf_check(const ith_buf *buf, const char *what, ith_error *err)
{
    if (!buf->failed)
        return ITH_OK;
    return ith_fail(err, ITH_ERR_MEMORY, "%s: out of memory, or more than %lld bytes", what,
                    (long long)(buf->max_bytes ? buf->max_bytes : DEFAULT_MAX_BYTES));
}

struct ith_arena_chunk {
    ith_arena_chunk *next;
    int64_t used, cap;
    _Alignas(16) char data[];
};

void ith_arena_init(ith_arena *arena, int64_t max_bytes)
{
    arena->head = NULL;
    arena->used_bytes = 0;
    arena->max_bytes = max_bytes ? max_bytes : DEFAULT_MAX_BYTES;
}

void ith_arena_deinit(ith_arena *arena)
{
    for (ith_arena_chunk *chunk = arena->head; chunk;) {
        ith_arena_chunk *next = chunk->next;
        ith_free(chunk);
        chunk = next;
    }
    arena->head = NULL;
    arena->used_bytes = 0;
}

void *ith_arena_alloc(ith_arena *arena, int64_t bytes)
{
    if (bytes < 0 || bytes > arena->max_bytes - arena->used_bytes)
        return NULL;
    int64_t rounded = ith_round_up(ith_max_i64(bytes, 1), 16);
    ith_arena_chunk *chunk = arena->head;
    if (!chunk || rounded > chunk->cap - chunk->used) {
        int64_t cap = ith_max_i64(rounded, 16384);
        chunk = ith_calloc(1, (int64_t)sizeof *chunk + cap);
        if (!chunk)
            return NULL;
        chunk->cap = cap;
        chunk->next = arena->head;
        arena->head = chunk;
    }
    void *ptr = chunk->data + chunk->used;
    chunk->used += rounded;
    arena->used_bytes += rounded;
    return ptr;
}

char *ith_arena_strndup(ith_arena *arena, const char *text, int64_t len)
{
    char *copy = ith_arena_alloc(arena, len + 1);
    if (copy)
        memcpy(copy, text, (size_t)len);
    return copy;
}
