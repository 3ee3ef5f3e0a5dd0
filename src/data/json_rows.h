/* json_rows.h - JSON and JSON-lines files as numbered rows, parsed one at a time.
 *
 * The file is mapped, never loaded: opening it builds a table of (offset, length), 16 bytes a row.
 *   .jsonl, .json whose first character is not '[': lines end at LF only (one CR before it is
 *     stripped; U+2028, U+2029, U+0085 are text), blank lines are no rows. A .json file of values
 *     that span lines is read too.
 *   first character '[': the elements of that array, found without parsing them.
 * A byte order mark is skipped at byte 0 of the file and nowhere else. Every row is judged on its
 * own: fields that nobody reads may hold anything. An open file is immutable: any number of threads
 * may parse rows of it. */
#ifndef ITH_DATA_JSON_ROWS_H
#define ITH_DATA_JSON_ROWS_H

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_rows ith_rows;

/* csv, parquet, arrow and txt files are refused with one line that says what to do. */
ith_status ith_rows_open(ith_rows **out, const char *path, ith_error *err);
/* The same over memory that outlives the rows; `name` is copied. lines: a .jsonl file. */
ith_status ith_rows_open_text(ith_rows **out, const char *text, int64_t len, const char *name,
                              bool lines, ith_error *err);
void ith_rows_close(ith_rows *rows); /* NULL is fine */

int64_t ith_rows_count(const ith_rows *rows);
int64_t ith_rows_bytes(const ith_rows *rows); /* of the whole file */
const char *ith_rows_name(const ith_rows *rows);
/* The text of row i (from 0), without surrounding white space; not NUL-terminated. */
const char *ith_rows_text(const ith_rows *rows, int64_t i, int64_t *len);
/* Line of the file (from 1) on which row i begins. Reads the file up to there: for messages. */
int64_t ith_rows_line(const ith_rows *rows, int64_t i);
/* "FILE: row 3 (line 4)" with i = 2 into buf, shortened to its size; returns buf. */
const char *ith_rows_where(const ith_rows *rows, int64_t i, char *buf, size_t size);
/* Row i as a JSON object; errors "FILE:LINE:COLUMN: ...". The caller frees it with json_decref. */
ith_status ith_rows_parse(const ith_rows *rows, int64_t i, json_t **out, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
