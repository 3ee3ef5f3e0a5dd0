/* json.h - jansson with our errors, limits and UTF-8 rules. Objects keep the order of the file.
 *
 * Positions in errors: "name:line:column: text". A BOM at byte 0 is skipped. NUL inside strings is
 * allowed
 * (\u0000). Integers beyond 64 bits become reals. */
#ifndef ITH_BASE_JSON_H
#define ITH_BASE_JSON_H

#include "base/mem.h"

#include <jansson.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Parses exactly one JSON value from text[0..len). Caller frees with json_decref. */
ith_status ith_json_parse(json_t **out, const char *text, int64_t len, const char *name,
                          ith_error *err);
/* For file formats: a key that stands twice in one object (jansson keeps the last) and an integer
 * beyond 64 bits are errors. */
ith_status ith_json_parse_unique(json_t **out, const char *text, int64_t len, const char *name,
                                 ith_error *err);
ith_status ith_json_load(json_t **out, const char *path, ith_error *err);
/* "null", "true/false" as "boolean", "integer", "number", "string", "array", "object": for error
 * texts. */
const char *ith_json_type_name(const json_t *value);
/* Compact dump (", " and ": " separators when spaced, as Python's json.dumps), UTF-8 kept, order
 * kept. */
ith_status ith_json_dump(const json_t *value, bool spaced, ith_buf *out, ith_error *err);

/* Appends text as a JSON string with its quotes; UTF-8 kept. */
void ith_json_append_string(ith_buf *out, const char *text, int64_t len);

#ifdef __cplusplus
}
#endif
#endif
