/* stream.c - bytes of tokens to text: whole, or token by token.
 *
 * Invariant: `pending` is the beginning of a character that the next byte may continue; a stream
 * and a whole decode run the same code, so they agree. */
#include "tokenizer/tokenizer_internal.h"

#define REPLACEMENT "\xef\xbf\xbd"

/* Appends bytes, replacing what is not UTF-8; returns how many bytes at the end may yet become a
 * character and were left out. */
static int64_t append_valid(ith_buf *out, const char *bytes, int64_t len)
{
    const char *p = bytes, *end = bytes + len, *good = p;
    while (p < end) {
        uint32_t c;
        int step = ith_utf8_decode(p, end, &c);
        if (step) {
            p += step;
            continue;
        }
        ith_buf_append(out, good, p - good);
        int bad = ith_utf8_bad_length(p, end);
        if (bad == 0)
            return end - p;
        ith_buf_puts(out, REPLACEMENT);
        p += bad;
        good = p;
    }
    ith_buf_append(out, good, p - good);
    return 0;
}

void ith_token_stream_init(ith_token_stream *s, const ith_tokenizer *t, bool skip_special)
{
    memset(s, 0, sizeof *s);
    s->tokenizer = t;
    s->skip_special = skip_special;
}

/* Completes the pending bytes from the front of a token; returns how many it took. */
static int64_t finish_pending(ith_token_stream *s, const char *bytes, int64_t len, ith_buf *out)
{
    int64_t used = 0;
    while (s->num_pending > 0 && used < len) {
        s->pending[s->num_pending++] = bytes[used++];
        uint32_t c;
        if (ith_utf8_decode(s->pending, s->pending + s->num_pending, &c)) {
            ith_buf_append(out, s->pending, s->num_pending);
            s->num_pending = 0;
        } else if (ith_utf8_bad_length(s->pending, s->pending + s->num_pending)) {
            /* The last byte does not continue it: it is read again as a beginning. */
            ith_buf_puts(out, REPLACEMENT);
            s->num_pending = 0;
            used--;
        }
    }
    return used;
}

ith_status ith_token_stream_push(ith_token_stream *s, int32_t id, ith_buf *out, ith_error *err)
{
    const char *bytes;
    int64_t len;
    bool special;
    if (id < 0)
        return ith_fail(err, ITH_ERR_USAGE, "token id %d is negative", id);
    if (ith_tokenizer_token(s->tokenizer, id, &bytes, &len, NULL, &special) != ITH_OK ||
        (special && s->skip_special))
        return ITH_OK;
    int64_t used = finish_pending(s, bytes, len, out);
    int64_t left = append_valid(out, bytes + used, len - used);
    ITH_ASSERT(left <= 3 && (left == 0 || s->num_pending == 0));
    if (left) {
        memcpy(s->pending, bytes + len - left, (size_t)left);
        s->num_pending = (int)left;
    }
    return ith_buf_check(out, "decoded text", err);
}

ith_status ith_token_stream_flush(ith_token_stream *s, ith_buf *out, ith_error *err)
{
    if (s->num_pending > 0)
        ith_buf_puts(out, REPLACEMENT);
    s->num_pending = 0;
    return ith_buf_check(out, "decoded text", err);
}

ith_status ith_tokenizer_decode(const ith_tokenizer *t, const int32_t *ids, int64_t n,
                                bool skip_special, ith_buf *out, ith_error *err)
{
    ith_token_stream s;
    ith_token_stream_init(&s, t, skip_special);
    for (int64_t i = 0; i < n; i++)
        ITH_TRY(ith_token_stream_push(&s, ids[i], out, err));
    return ith_token_stream_flush(&s, out, err);
}
