/* bpe_norm.c - NFC with a map back to the original bytes.
 *
 * A character that is a starter and never joins what stands before it (ITH_UC_NFC_SAFE) is a border
 * that no composition crosses. So only stretches that hold an unsafe character go through utf8proc:
 * from the safe character before it to the next safe one. */
#include "tokenizer/tokenizer_internal.h"

#include <utf8proc.h>

int64_t ith_norm_check(const uint8_t *classes, const char *text, int64_t len, bool *nfc_safe)
{
    const char *p = text, *end = text + len;
    uint8_t all = ITH_UC_NFC_SAFE;
    while (p < end) {
        uint64_t word;
        while (end - p >= 8 && (memcpy(&word, p, 8), (word & 0x8080808080808080u) == 0))
            p += 8;
        if (p >= end)
            break;
        if ((unsigned char)*p < 0x80) {
            p++;
            continue;
        }
        uint32_t c = 0;
        int step = ith_utf8_decode(p, end, &c);
        if (step == 0)
            return p - text;
        all &= ith_uc_class(classes, c);
        p += step;
    }
    *nfc_safe = all != 0;
    return -1;
}

static int combining_class(int32_t c)
{
    return utf8proc_get_property(c)->combining_class & 0xff;
}

static ith_status add_change(ith_norm *norm, int64_t begin, int64_t end, int64_t orig_begin,
                             int64_t orig_end, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&norm->changes, &norm->cap_changes, norm->num_changes + 1,
                     (int64_t)sizeof *norm->changes, "normalization map", err));
    norm->changes[norm->num_changes++] = (ith_norm_change){begin, end, orig_begin, orig_end};
    return ITH_OK;
}

/* Canonical ordering: stable by combining class within each run of non-starters. Counting, because
 * a hostile run may be the whole text. */
static ith_status order_marks(ith_norm *norm, int64_t from, ith_error *err)
{
    int64_t n = norm->num_chars;
    ITH_TRY(ith_grow((void **)&norm->sorted, &norm->cap_sorted, n, 4, "normalization", err));
    for (int64_t i = from; i < n;) {
        int64_t first[257] = {0}, run = i;
        while (run < n && combining_class(norm->chars[run]))
            first[combining_class(norm->chars[run++]) + 1]++;
        if (run - i > 1) {
            for (int k = 0; k < 256; k++)
                first[k + 1] += first[k];
            for (int64_t k = i; k < run; k++)
                norm->sorted[first[combining_class(norm->chars[k])]++] = norm->chars[k];
            memcpy(norm->chars + i, norm->sorted, (size_t)(run - i) * 4);
        }
        i = run + 1;
    }
    return ITH_OK;
}

/* NFC of one stretch, appended; `at`: its place in the original text; fixed: 1 when its first
 * character is safe and stays first, whatever class utf8proc gives it. */
static ith_status compose(ith_norm *norm, const char *text, int64_t len, int64_t at, int fixed,
                          ith_error *err)
{
    norm->num_chars = 0;
    for (const char *p = text; p < text + len;) {
        /* The longest canonical decomposition has 4 characters; one more for reencoding's NUL. */
        ITH_TRY(ith_grow((void **)&norm->chars, &norm->cap_chars, norm->num_chars + 8, 4,
                         "normalization", err));
        int boundary = 0;
        utf8proc_ssize_t n = utf8proc_decompose_char(
            (utf8proc_int32_t)ith_utf8_next(&p), norm->chars + norm->num_chars, 8,
            UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &boundary);
        ITH_ASSERT(n > 0 && n <= 8);
        norm->num_chars += n;
    }
    ITH_TRY(order_marks(norm, fixed, err));
    utf8proc_ssize_t n =
        utf8proc_normalize_utf32(norm->chars, norm->num_chars, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    ITH_ASSERT(n >= 0 && n <= norm->num_chars);
    int64_t begin = norm->text.len;
    for (utf8proc_ssize_t i = 0; i < n; i++) {
        char out[4];
        ith_buf_append(&norm->text, out, ith_utf8_encode((uint32_t)norm->chars[i], out));
    }
    ITH_TRY(ith_buf_check(&norm->text, "normalized text", err));
    int64_t new_len = norm->text.len - begin;
    if (new_len == len && memcmp(norm->text.data + begin, text, (size_t)len) == 0)
        return ITH_OK;
    return add_change(norm, begin, norm->text.len, at, at + len, err);
}

ith_status ith_norm_nfc(ith_norm *norm, const uint8_t *classes, const char *text, int64_t len,
                        ith_error *err)
{
    ith_buf_clear(&norm->text);
    norm->num_changes = 0;
    const char *end = text + len, *copied = text, *safe = text;
    for (const char *p = text; p < end;) {
        const char *here = p;
        if (ith_uc_class(classes, ith_utf8_next(&p)) & ITH_UC_NFC_SAFE) {
            safe = here;
            continue;
        }
        const char *stop = p;
        while (p < end) {
            stop = p;
            if (ith_uc_class(classes, ith_utf8_next(&p)) & ITH_UC_NFC_SAFE)
                break;
            stop = p;
        }
        ith_buf_append(&norm->text, copied, safe - copied);
        ITH_TRY(compose(norm, safe, stop - safe, safe - text, safe < here, err));
        copied = p = stop;
        safe = stop;
    }
    ith_buf_append(&norm->text, copied, end - copied);
    return ith_buf_check(&norm->text, "normalized text", err);
}

void ith_norm_deinit(ith_norm *norm)
{
    ith_buf_deinit(&norm->text);
    ith_free(norm->changes);
    ith_free(norm->chars);
    ith_free(norm->sorted);
    memset(norm, 0, sizeof *norm);
}

/* The last change that begins at or before `at`, NULL when there is none. */
static const ith_norm_change *change_before(const ith_norm *norm, int64_t at)
{
    int64_t low = 0, high = norm->num_changes;
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        if (norm->changes[mid].begin <= at)
            low = mid + 1;
        else
            high = mid;
    }
    return low ? &norm->changes[low - 1] : NULL;
}

void ith_norm_map(const ith_norm *norm, int64_t begin, int64_t end, int64_t *orig_begin,
                  int64_t *orig_end)
{
    ITH_ASSERT(begin < end);
    const ith_norm_change *c = change_before(norm, begin);
    *orig_begin = !c ? begin : begin < c->end ? c->orig_begin : begin - c->end + c->orig_end;
    c = change_before(norm, end - 1);
    *orig_end = !c ? end : end - 1 < c->end ? c->orig_end : end - c->end + c->orig_end;
}
