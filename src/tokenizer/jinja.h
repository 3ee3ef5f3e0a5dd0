/* jinja.h - the template language of Hugging Face chat templates.
 *
 * What Python's Jinja2 3.1 prints in the environment that transformers sets up (trim_blocks,
 * lstrip_blocks, loop controls, tojson without ASCII escapes, raise_exception, strftime_now, the
 * {% generation %} block, immutable sandbox), we print, byte for byte. Not there: include, import,
 * extends, recursive loops, filters that escape for the web; each is refused by name.
 *
 * Templates come with downloaded models and are not trusted: steps, memory, output, depth are
 * bounded, they see nothing but their context, and they cannot change it.
 *
 * Errors: "name:LINE: construct: what", e.g. "chat_template.jinja:12: filter 'lenght': unknown".
 * A compiled template is immutable: any number of threads may render it at once. */
#ifndef ITH_TOKENIZER_JINJA_H
#define ITH_TOKENIZER_JINJA_H

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_jinja ith_jinja;

/* text[0..len) must be UTF-8; it is copied. name: for error texts. */
ith_status ith_jinja_compile(ith_jinja **out, const char *text, int64_t len, const char *name,
                             ith_error *err);
void ith_jinja_free(ith_jinja *jinja);
/* True when the template text uses this name as a variable (e.g. "enable_thinking"). */
bool ith_jinja_uses(const ith_jinja *jinja, const char *name);
/* True when the template has a {% generation %} block. */
bool ith_jinja_has_generation(const ith_jinja *jinja);

/* Output bytes [begin, end) and the message they belong to: index into the tracked list, or -1. */
typedef struct {
    int64_t begin, end, message;
} ith_jinja_span;

/* Where things went in the output. Zero-initialise; ith_jinja_trace_deinit frees the spans.
 * generation: the {% generation %} blocks, in output order.
 * items: what each pass of a loop over (a slice of) the tracked list printed, in output order;
 *        passes that print nothing are left out, and so are loops inside such a pass. */
typedef struct {
    ith_jinja_span *generation, *items;
    int64_t num_generation, cap_generation, num_items, cap_items;
} ith_jinja_trace;
void ith_jinja_trace_deinit(ith_jinja_trace *trace);

/* Zero fields take the default. max_steps counts nodes visited plus 1/32 of the bytes moved. */
typedef struct {
    int64_t max_steps;        /* 100 million + 64 per byte of the context */
    int64_t max_memory_bytes; /* 256 MiB + 16 times the context */
    int64_t max_output_bytes; /* 64 MiB + 4 times the context */
    int64_t now;              /* seconds since 1970 for strftime_now; 0: the clock */
    const char *track;        /* context variable (an array) whose items the trace follows */
    ith_jinja_trace *trace;   /* filled when not NULL */
    int64_t *steps;           /* steps taken, when not NULL */
} ith_jinja_options;

/* Renders with the members of `context` (an object) as variables and appends to out. options may be
 * NULL. On failure out holds what was there before. */
ith_status ith_jinja_render(const ith_jinja *jinja, const json_t *context,
                            const ith_jinja_options *options, ith_buf *out, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
