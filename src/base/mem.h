/* mem.h - heap memory, growable buffers, bump arenas.
 *
 * All heap memory of the program goes through ith_malloc and friends, so that tests can make the
 * n-th allocation fail (ith_fault_set) and count allocations inside the step loop
 * (ith_alloc_count). */
#ifndef ITH_BASE_MEM_H
#define ITH_BASE_MEM_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NULL on failure. Size 0 gives a unique pointer. Thread-safe. Memory of ith_malloc_aligned is
 * freed with ith_free as well; `alignment` is a power of two. */
void *ith_malloc(int64_t bytes);
void *ith_calloc(int64_t count, int64_t size);
void *ith_realloc(void *ptr, int64_t bytes);
void *ith_malloc_aligned(int64_t bytes, int64_t alignment);
void ith_free(void *ptr);
char *ith_strndup(const char *text, int64_t len);
/* Like ith_malloc / ith_calloc, with an error text naming what was wanted. */
ith_status ith_alloc(void **out, int64_t bytes, const char *what, ith_error *err);
ith_status ith_alloc_zero(void **out, int64_t count, int64_t size, const char *what,
                          ith_error *err);
/* Grows *ptr (elements of `size` bytes) so that it can hold `need` elements; doubles, starting
 * at 16. */
ith_status ith_grow(void **ptr, int64_t *cap, int64_t need, int64_t size, const char *what,
                    ith_error *err);
/* Number of successful allocations since start. */
int64_t ith_alloc_count(void);

/* Fault injection for tests. kind: operations counted from now; the n-th (1-based) of that kind
 * fails, n = 0 switches off. Also set by ITH_FAULT=alloc:N, read:N, write:N. ITH_FAULT_KILL: the
 * n-th write ends the process, as SIGKILL does. ITH_FAULT_VERIFY: see train/verify.h. */
typedef enum {
    ITH_FAULT_ALLOC,
    ITH_FAULT_READ,
    ITH_FAULT_WRITE,
    ITH_FAULT_KILL,
    ITH_FAULT_VERIFY,
    ITH_FAULT_KINDS,
    ITH_FAULT_FAILURES = ITH_FAULT_KILL /* the kinds before are operations that fail */
} ith_fault_kind;
void ith_fault_set(ith_fault_kind kind, int64_t n);
/* Counts one operation; true when it must fail. */
bool ith_fault_hit(ith_fault_kind kind);
/* Operations of that kind counted since the last ith_fault_set of it. */
int64_t ith_fault_count(ith_fault_kind kind);

/* Growable byte buffer. Always NUL-terminated after a write. The first failure (memory or the
 * stated maximum) sticks: later calls do nothing, and ith_buf_check reports it. Zero-initialise, or
 * ith_buf_init. */
typedef struct {
    char *data;
    int64_t len;
    int64_t cap;
    int64_t max_bytes; /* 0: 2^40 */
    ith_status failed;
} ith_buf;

void ith_buf_init(ith_buf *buf, int64_t max_bytes);
void ith_buf_deinit(ith_buf *buf);
void ith_buf_clear(ith_buf *buf); /* len = 0, keeps memory, clears the failure */
void ith_buf_append(ith_buf *buf, const void *data, int64_t len);
void ith_buf_puts(ith_buf *buf, const char *text);
void ith_buf_putc(ith_buf *buf, char c);
void ith_buf_printf(ith_buf *buf, const char *fmt, ...) ITH_PRINTF(2, 3);
ith_status ith_buf_check(const ith_buf *buf, const char *what, ith_error *err);

/* Chunked bump arena for parsed data: everything is freed together. Memory is zeroed, aligned
 * to 16. */
typedef struct ith_arena_chunk ith_arena_chunk;
typedef struct {
    ith_arena_chunk *head;
    int64_t used_bytes;
    int64_t max_bytes;
} ith_arena;

void ith_arena_init(ith_arena *arena, int64_t max_bytes); /* 0: 2^40 */
void ith_arena_deinit(ith_arena *arena);
void *ith_arena_alloc(ith_arena *arena, int64_t bytes); /* NULL on failure */
char *ith_arena_strndup(ith_arena *arena, const char *text, int64_t len);

#ifdef __cplusplus
}
#endif
#endif
