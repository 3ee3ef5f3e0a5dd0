/* chat_internal.h - what chat*.c share. */
#ifndef ITH_TOKENIZER_CHAT_INTERNAL_H
#define ITH_TOKENIZER_CHAT_INTERNAL_H

#include "tokenizer/chat.h"

typedef struct {
    const char *text;
    int64_t len;
} ith_special_text;

/* What a template prints before an answer, found at open with conversations of our own: the
 * generation prompt with thinking off, on, not said, and what stands before an earlier answer.
 * Empty where the template does not print it. */
enum { ITH_HEADER_THINK_OFF, ITH_HEADER_THINK_ON, ITH_HEADER_UNSET, ITH_HEADER_EARLIER };
#define ITH_NUM_HEADERS 4
typedef struct {
    ith_buf text[ITH_NUM_HEADERS];
} ith_headers;

struct ith_chat {
    ith_jinja *plain, *tool_use; /* tool_use: for conversations with tools, or NULL */
    bool plain_reads_text_args;  /* the template tells string arguments from mappings */
    bool tool_use_reads_text_args;
    ith_headers plain_headers, tool_use_headers;
    json_t *special_names;      /* bos_token, eos_token ... as template variables */
    ith_special_text *specials; /* special added tokens of two or more characters, longest first */
    int64_t num_specials;
    bool first_byte[256];     /* of any of them */
    const ith_tokenizer *tok; /* borrowed, may be NULL */
    char *source;
    char *custom; /* text of a custom template, else NULL */
    char hash[65];
};

/* jansson's getters and reference counts take non-const values but do not change them. */
static inline json_t *ith_json_unconst(const json_t *json)
{
    union {
        const json_t *c;
        json_t *m;
    } u = {.c = json};
    return u.m;
}

/* json_object_set_new and json_array_append_new with our error. value NULL: out of memory. */
ith_status ith_json_put(json_t *object, const char *key, json_t *value, ith_error *err);
ith_status ith_json_push(json_t *array, json_t *value, ith_error *err);

/* chat_encode.c: fills headers; a template that refuses the probes leaves them empty. */
ith_status ith_chat_probe_headers(const ith_chat *chat, const json_t *tools, ith_headers *h,
                                  ith_error *err);

/* chat_media.c: text with, in place of each placeholder, what the media block of canonical
 * `messages` says stands for it (chat.h); bounds of spans move along. whole: every block must be
 * met, else the text may end before some. */
ith_status ith_chat_expand_media(const json_t *messages, bool whole, ith_buf *text,
                                 ith_jinja_span *spans, int64_t num_spans, ith_error *err);

/* chat_escape.c: text with U+200B after the first character of each special token written in it. */
ith_status ith_chat_escape(const ith_chat *chat, const char *text, int64_t len, ith_buf *out,
                           ith_error *err);
/* A deep copy with all strings and keys escaped. */
ith_status ith_chat_escape_json(const ith_chat *chat, const json_t *value, json_t **out,
                                ith_error *err);

#endif
