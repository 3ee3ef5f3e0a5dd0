/* device.c - the host as a device. */
#include "base/device.h"

#include "base/file.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static ith_status cpu_alloc(ith_device *d, int64_t bytes, void **out, ith_error *err)
{
    (void)d;
    void *ptr = ith_malloc_aligned(bytes, 4096);
    if (!ptr)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory: %lld bytes on the CPU",
                        (long long)bytes);
    *out = ptr;
    return ITH_OK;
}

static void cpu_free(ith_device *d, void *ptr)
{
    (void)d;
    ith_free(ptr);
}

static ith_status cpu_copy(ith_device *d, void *dst, const void *src, int64_t bytes, ith_error *err)
{
    (void)d;
    (void)err;
    if (bytes > 0)
        memmove(dst, src, (size_t)bytes);
    return ITH_OK;
}

static ith_status cpu_fill(ith_device *d, void *dst, int byte, int64_t bytes, ith_error *err)
{
    (void)d;
    (void)err;
    if (bytes > 0)
        memset(dst, byte, (size_t)bytes);
    return ITH_OK;
}

static ith_status cpu_sync(ith_device *d, ith_error *err)
{
    (void)d;
    (void)err;
    return ITH_OK;
}

static ith_status cpu_memory(ith_device *d, int64_t *free_bytes, int64_t *total_bytes,
                             ith_error *err)
{
    (void)d;
    (void)err;
    int64_t page = sysconf(_SC_PAGESIZE);
    *free_bytes = sysconf(_SC_AVPHYS_PAGES) * page;
    *total_bytes = sysconf(_SC_PHYS_PAGES) * page;
    ith_buf text = {0}; /* what the system could free counts as free */
    if (ith_read_file("/proc/meminfo", 0, &text, NULL) == ITH_OK) {
        const char *line = strstr(text.data, "MemAvailable:");
        if (line)
            *free_bytes = strtoll(line + 13, NULL, 10) * 1024;
    }
    ith_buf_deinit(&text);
    return ITH_OK;
}

ith_device *ith_device_cpu(void)
{
    static ith_device cpu = {.name = "cpu",
                             .alloc = cpu_alloc,
                             .free = cpu_free,
                             .upload = cpu_copy,
                             .download = cpu_copy,
                             .copy = cpu_copy,
                             .fill = cpu_fill,
                             .sync = cpu_sync,
                             .memory = cpu_memory};
    return &cpu;
}
