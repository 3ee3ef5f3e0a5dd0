/* convert_internal.h - shared by the converters: one row on its way to canonical messages. */
#ifndef ITH_DATA_CONVERT_INTERNAL_H
#define ITH_DATA_CONVERT_INTERNAL_H

#include "data/convert.h"

typedef enum { MEDIA_IMAGE, MEDIA_VIDEO, MEDIA_AUDIO, MEDIA_KINDS } media_kind;

typedef struct {
    const json_t *row;
    const ith_convert_options *options;
    ith_converted *out;
    /* files of each kind in document order, and how many tags asked for one */
    json_t *files[MEDIA_KINDS]; /* array or string, borrowed; NULL: none */
    int64_t num_files[MEDIA_KINDS], num_tags[MEDIA_KINDS];
    bool has_columns; /* the row has a media column that is not null */
    ith_error *err;
} conversion;

/* Field of an object; null counts as absent. */
json_t *conv_get(const json_t *object, const char *key);
/* Drops the row: sets out->drop and its text, and returns a failure for ITH_TRY to forward. */
ith_status conv_drop(conversion *c, ith_drop drop, const char *fmt, ...) ITH_PRINTF(3, 4);
/* The row stays, something in it goes. */
void conv_note(conversion *c, ith_drop drop, const char *fmt, ...) ITH_PRINTF(3, 4);
ith_status conv_memory(conversion *c);
/* Drops the row unless value is a string; `field` names it. */
ith_status conv_want_text(conversion *c, const json_t *value, const char *field);

/* New message {role, content: [], loss_weight} at the end of list; *content is borrowed. */
ith_status conv_message(conversion *c, json_t *list, const char *role, double weight,
                        json_t **content);
/* Appends {type, value: text}; takes a reference of its own. */
ith_status conv_block(conversion *c, json_t *content, const char *type, json_t *text);
ith_status conv_block_text(conversion *c, json_t *content, const char *type, const char *text,
                           size_t len);

/* Reads the media columns of the row. */
ith_status conv_media_begin(conversion *c);
/* Every side of a preference row takes the files from the start. */
void conv_media_rewind(conversion *c);
/* Appends text as blocks, one media block in place of each tag. */
ith_status conv_media_text(conversion *c, json_t *content, json_t *text);
/* As many tags as files, or an error with both counts. */
ith_status conv_media_end(conversion *c);

ith_status conv_canonical(conversion *c);
ith_status conv_alpaca(conversion *c);
ith_status conv_sharegpt(conversion *c);
ith_status conv_pair(conversion *c);
ith_status conv_tokenid(conversion *c);

#endif
