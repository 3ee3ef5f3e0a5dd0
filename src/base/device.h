/* device.h - where memory lives and how it moves. The CPU is always there; a plug-in registers
 * others.
 *
 * Copies and fills are queued on the device's main stream in program order with the operators;
 * `sync` waits. Host buffers of upload and download may be reused after the next sync. On the CPU
 * everything is immediate. */
#ifndef ITH_BASE_DEVICE_H
#define ITH_BASE_DEVICE_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_device ith_device;
struct ith_device {
    const char *name; /* "cpu", "cuda:0" */
    void *state;
    /* Memory aligned to 256 bytes, not zeroed. */
    ith_status (*alloc)(ith_device *d, int64_t bytes, void **out, ith_error *err);
    void (*free)(ith_device *d, void *ptr);
    ith_status (*upload)(ith_device *d, void *dst, const void *src, int64_t bytes, ith_error *err);
    ith_status (*download)(ith_device *d, void *dst, const void *src, int64_t bytes,
                           ith_error *err);
    ith_status (*copy)(ith_device *d, void *dst, const void *src, int64_t bytes, ith_error *err);
    ith_status (*fill)(ith_device *d, void *dst, int byte, int64_t bytes, ith_error *err);
    ith_status (*sync)(ith_device *d, ith_error *err);
    /* Free and total bytes. */
    ith_status (*memory)(ith_device *d, int64_t *free_bytes, int64_t *total_bytes, ith_error *err);
    /* Optional (NULL: plain memory): host memory that copies fast and without waiting. */
    ith_status (*alloc_host)(ith_device *d, int64_t bytes, void **out, ith_error *err);
    void (*free_host)(ith_device *d, void *ptr);
    /* Optional (NULL): records stamp idx in stream order; milliseconds between two stamps, after a
     * sync. */
    ith_status (*stamp)(ith_device *d, int64_t idx, ith_error *err);
    ith_status (*elapsed)(ith_device *d, int64_t from, int64_t to, double *ms, ith_error *err);
};

/* The host itself; never destroyed. */
ith_device *ith_device_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
