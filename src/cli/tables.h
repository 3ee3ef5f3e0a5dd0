/* tables.h - text that several commands print: memory plan, progress rows, sizes. */
#ifndef ITH_CLI_TABLES_H
#define ITH_CLI_TABLES_H

#include "train/trainer.h"

/* "12.3 GiB", at least 8 bytes wide. */
const char *ith_format_bytes(int64_t bytes, char *out, size_t size);
/* "1:02:03", "0:12". */
void ith_format_time(double seconds, char *out, size_t size);
/* "step 10/200  loss 2.1234  grad 1.02  lr 1.0e-04  1234 tok/s  eta 0:12  mfu 51%  3.2 GiB". */
void ith_format_row(const ith_report_row *row, char *out, size_t size);
/* Class by class: planned bytes and the largest buffers alive at the peak. */
void ith_memory_table(const ith_trainer *t, ith_buf *out);

#endif
