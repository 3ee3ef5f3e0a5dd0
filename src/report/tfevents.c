/* tfevents.c - TensorBoard event files.
 * Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
 * Summary { repeated Value value = 1 }   Value { string tag = 1; float simple_value = 2 } */
#include "report/tfevents.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/file.h"

struct ith_tfevents {
    FILE *file;
    char *path;
};

uint32_t ith_crc32c(const void *data, int64_t len)
{
    const uint8_t *p = data;
    uint32_t crc = 0xffffffffu;
    for (int64_t i = 0; i < len; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0x82f63b78u & (0u - (crc & 1)));
    }
    return ~crc;
}

static uint32_t masked(const void *data, int64_t len)
{
    uint32_t crc = ith_crc32c(data, len);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static void put_le(ith_buf *b, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        ith_buf_putc(b, (char)(value >> (8 * i)));
}

static void put_varint(ith_buf *b, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        ith_buf_putc(b, (char)(value | 0x80));
    ith_buf_putc(b, (char)value);
}

static void put_bytes(ith_buf *b, int field, const void *data, int64_t len)
{
    put_varint(b, (uint64_t)field << 3 | 2);
    put_varint(b, (uint64_t)len);
    ith_buf_append(b, data, len);
}

/* Frames `event` and appends it to the file. */
static ith_status write_record(ith_tfevents *t, const ith_buf *event, ith_error *err)
{
    ith_buf r = {0};
    ITH_TRY(ith_buf_check(event, t->path, err));
    put_le(&r, (uint64_t)event->len, 8);
    ITH_TRY(ith_buf_check(&r, t->path, err));
    put_le(&r, masked(r.data, 8), 4);
    ith_buf_append(&r, event->data, event->len);
    put_le(&r, masked(event->data, event->len), 4);
    ith_status status = ith_buf_check(&r, t->path, err);
    if (status == ITH_OK &&
        (ith_fault_hit(ITH_FAULT_WRITE) ||
         fwrite(r.data, 1, (size_t)r.len, t->file) != (size_t)r.len || fflush(t->file) != 0))
        status = ith_fail(err, ITH_ERR_IO, "%s: cannot write: %s", t->path, strerror(errno));
    ith_buf_deinit(&r);
    return status;
}

static void begin_event(ith_buf *e, int64_t step)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    double wall = (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
    uint64_t bits;
    memcpy(&bits, &wall, sizeof bits);
    put_varint(e, 1 << 3 | 1);
    put_le(e, bits, 8);
    put_varint(e, 2 << 3);
    put_varint(e, (uint64_t)step);
}

ith_status ith_tfevents_open(ith_tfevents **out, const char *dir, ith_error *err)
{
    ITH_TRY(ith_make_dirs(dir, err));
    ith_tfevents *t = NULL;
    ITH_TRY(ith_alloc_zero((void **)&t, 1, sizeof *t, "event file", err));
    ith_buf path = {0}, event = {0};
    ith_buf_printf(&path, "%s/events.out.tfevents.%lld.ithaca", dir, (long long)time(NULL));
    ith_status status = ith_buf_check(&path, dir, err);
    t->path = path.data;
    if (status == ITH_OK) {
        t->file = ith_fault_hit(ITH_FAULT_WRITE) ? NULL : fopen(t->path, "ab");
        if (!t->file)
            status = ith_fail(err, ITH_ERR_IO, "%s: cannot create: %s", t->path, strerror(errno));
    }
    if (status == ITH_OK) {
        begin_event(&event, 0);
        put_bytes(&event, 3, "brain.Event:2", 13);
        status = write_record(t, &event, err);
    }
    ith_buf_deinit(&event);
    if (status != ITH_OK) {
        ith_tfevents_close(t);
        return status;
    }
    *out = t;
    return ITH_OK;
}

ith_status ith_tfevents_scalar(ith_tfevents *t, const char *tag, int64_t step, double value,
                               ith_error *err)
{
    if (!isfinite(value))
        return ITH_OK;
    ith_buf pair = {0}, summary = {0}, event = {0};
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    put_bytes(&pair, 1, tag, (int64_t)strlen(tag));
    put_varint(&pair, 2 << 3 | 5);
    put_le(&pair, bits, 4);
    put_bytes(&summary, 1, pair.data, pair.len);
    begin_event(&event, step);
    put_bytes(&event, 5, summary.data, summary.len);
    ith_status status = ith_buf_check(&event, t->path, err);
    if (status == ITH_OK)
        status = write_record(t, &event, err);
    ith_buf_deinit(&pair);
    ith_buf_deinit(&summary);
    ith_buf_deinit(&event);
    return status;
}

void ith_tfevents_close(ith_tfevents *t)
{
    if (!t)
        return;
    if (t->file)
        fclose(t->file);
    ith_free(t->path);
    ith_free(t);
}
