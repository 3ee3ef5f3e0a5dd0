/* json_edit.h - changes one value in a JSON text and leaves every other byte alone.
 *
 * A config that is parsed and printed again loses what a reader of diffs cares for: 1e-06 becomes
 * 9.9999999999999995e-07, spacing and escapes change. */
#ifndef ITH_CHECKPOINT_JSON_EDIT_H
#define ITH_CHECKPOINT_JSON_EDIT_H

#include "base/mem.h"

/* Sets `path` ("dtype", "text_config.dtype"; keys without '.' or escapes) to `value`, itself JSON
 * text. A missing last key is added at the end of its object, spaced like the keys before it; a
 * missing object on the way is an error. text must be valid JSON; it is unchanged on failure. */
ith_status ith_json_edit_set(ith_buf *text, const char *path, const char *value, ith_error *err);

#endif
