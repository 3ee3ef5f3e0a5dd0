/* tfevents.h - TensorBoard event files: TFRecord framing (length, masked CRC32C) around Event
 * protocol buffers. */
#ifndef ITH_REPORT_TFEVENTS_H
#define ITH_REPORT_TFEVENTS_H

#include "base/mem.h"

typedef struct ith_tfevents ith_tfevents;

/* Creates DIR/events.out.tfevents.<seconds>.ithaca; DIR is made. */
ith_status ith_tfevents_open(ith_tfevents **out, const char *dir, ith_error *err);
/* One scalar; non-finite values are skipped (TensorBoard draws none). Flushed at once. */
ith_status ith_tfevents_scalar(ith_tfevents *t, const char *tag, int64_t step, double value,
                               ith_error *err);
void ith_tfevents_close(ith_tfevents *t);

/* CRC-32C (Castagnoli) of len bytes. */
uint32_t ith_crc32c(const void *data, int64_t len);

#endif
