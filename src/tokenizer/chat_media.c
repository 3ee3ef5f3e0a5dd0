/* chat_media.c - what stands in a rendered conversation for its images and videos.
 * Invariant: blocks and placeholders meet in document order, one for one. */
#include <string.h>

#include "tokenizer/chat_internal.h"

/* A placeholder at byte `at` of the rendered text made it longer by `by`. */
typedef struct {
    int64_t at, by;
} shift;

typedef struct {
    const ith_buf *from;
    int64_t done; /* bytes of it that are in `to` */
    ith_buf to;
    shift *shifts;
    int64_t count, cap, num_blocks;
} expansion;

/* Copies up to the next placeholder of the block, and the block's text; *met false: there is none
 * left. */
static ith_status expand_block(expansion *x, const json_t *block, bool *met, ith_error *err)
{
    const char *placeholder = json_string_value(json_object_get(block, "placeholder"));
    const json_t *text = json_object_get(block, "text");
    if (!placeholder || !json_is_string(text))
        return ITH_OK;
    int64_t len = (int64_t)strlen(placeholder), new_len = (int64_t)json_string_length(text);
    const char *rest = x->from->data + x->done;
    const char *found =
        x->from->len ? memmem(rest, (size_t)(x->from->len - x->done), placeholder, (size_t)len)
                     : NULL;
    x->num_blocks++;
    *met = found != NULL;
    if (!found)
        return ITH_OK;
    ITH_TRY(ith_grow((void **)&x->shifts, &x->cap, x->count + 1, sizeof *x->shifts, "media", err));
    x->shifts[x->count++] = (shift){found - x->from->data, new_len - len};
    ith_buf_append(&x->to, rest, found - rest);
    ith_buf_append(&x->to, json_string_value(text), new_len);
    x->done = found - x->from->data + len;
    return ITH_OK;
}

static int64_t moved(const expansion *x, int64_t offset)
{
    int64_t by = 0;
    for (int64_t i = 0; i < x->count && x->shifts[i].at < offset; i++)
        by += x->shifts[i].by;
    return offset + by;
}

static ith_status expand_all(expansion *x, const json_t *messages, bool whole, ith_error *err)
{
    bool met = true;
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *content = json_object_get(json_array_get(messages, i), "content");
        for (size_t k = 0; json_is_array(content) && k < json_array_size(content) && met; k++)
            ITH_TRY(expand_block(x, json_array_get(content, k), &met, err));
    }
    if (whole && !met)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "messages: the chat template shows %lld of their images and videos, not "
                        "all (does it know content lists?)",
                        (long long)x->count);
    return ITH_OK;
}

ith_status ith_chat_expand_media(const json_t *messages, bool whole, ith_buf *text,
                                 ith_jinja_span *spans, int64_t num_spans, ith_error *err)
{
    expansion x = {.from = text};
    ith_status status = expand_all(&x, messages, whole, err);
    if (status == ITH_OK && x.count) {
        ith_buf_append(&x.to, text->data + x.done, text->len - x.done);
        status = ith_buf_check(&x.to, "media", err);
    }
    if (status == ITH_OK && x.count) {
        for (int64_t i = 0; i < num_spans; i++) {
            spans[i].begin = moved(&x, spans[i].begin);
            spans[i].end = moved(&x, spans[i].end);
        }
        ith_buf old = *text;
        *text = x.to;
        x.to = old;
    }
    ith_buf_deinit(&x.to);
    ith_free(x.shifts);
    return status;
}
