/* bpe_added.c - finding added tokens in a text.
 *
 * Leftmost, then longest. Patterns are sorted bytewise; walking the text narrows the range of
 * patterns that share the bytes read so far, so the cost at one position is the length of the walk
 * times the logarithm of the number of patterns, and only bytes that start a pattern begin one. */
#include "tokenizer/tokenizer_internal.h"

#include <stdlib.h>

static int compare_text(const void *a, const void *b)
{
    const ith_added_token *x = *(const ith_added_token *const *)a;
    const ith_added_token *y = *(const ith_added_token *const *)b;
    int order = memcmp(x->match_text, y->match_text,
                       (size_t)(x->match_len < y->match_len ? x->match_len : y->match_len));
    return order ? order : x->match_len - y->match_len;
}

void ith_added_set_finish(ith_added_set *set)
{
    if (set->count)
        qsort(set->sorted, (size_t)set->count, sizeof *set->sorted, compare_text);
    memset(set->starts, 0, sizeof set->starts);
    for (int64_t i = 0; i < set->count; i++)
        set->starts[(unsigned char)set->sorted[i]->match_text[0]] = true;
}

/* First index in [low, high) whose byte at `depth` is >= byte (> byte when above). All have more
 * than depth bytes. */
static int64_t bound(const ith_added_set *set, int64_t low, int64_t high, int32_t depth,
                     unsigned char byte, bool above)
{
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        unsigned char here = (unsigned char)set->sorted[mid]->match_text[depth];
        if (here < byte || (above && here == byte))
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static const ith_added_token *longest_at(const ith_added_set *set, const char *text, int64_t room)
{
    const ith_added_token *found = NULL;
    int64_t low = 0, high = set->count;
    for (int32_t depth = 0; depth < room; depth++) {
        low = bound(set, low, high, depth, (unsigned char)text[depth], false);
        high = bound(set, low, high, depth, (unsigned char)text[depth], true);
        if (low < high && set->sorted[low]->match_len == depth + 1)
            found = set->sorted[low++];
        if (low >= high)
            break;
    }
    return found;
}

static const char *char_before(const char *text, const char *p)
{
    do
        p--;
    while (p > text && ith_utf8_is_tail(*p));
    return p;
}

static bool word_before(const char *text, int64_t at)
{
    if (at == 0)
        return false;
    const char *p = char_before(text, text + at);
    return ith_uc_is_word(ith_utf8_next(&p));
}

static bool word_after(const char *text, int64_t at, int64_t len)
{
    const char *p = text + at;
    return at < len && ith_uc_is_word(ith_utf8_next(&p));
}

/* Takes white space on the sides the token asks for. */
static void strip(const uint8_t *classes, const char *text, int64_t len, int64_t taken,
                  ith_added_match *m)
{
    while (m->token->lstrip && m->begin > taken) {
        const char *before = char_before(text, text + m->begin), *p = before;
        if (!(ith_uc_class(classes, ith_utf8_next(&p)) & ITH_UC_SPACE))
            break;
        m->begin = before - text;
    }
    while (m->token->rstrip && m->end < len) {
        const char *p = text + m->end;
        if (!(ith_uc_class(classes, ith_utf8_next(&p)) & ITH_UC_SPACE))
            break;
        m->end = p - text;
    }
}

bool ith_added_next(const ith_added_set *set, const uint8_t *classes, const char *text, int64_t len,
                    int64_t from, int64_t taken, ith_added_match *out)
{
    if (set->count == 0)
        return false;
    for (int64_t i = from; i < len; i++) {
        if (!set->starts[(unsigned char)text[i]])
            continue;
        const ith_added_token *token = longest_at(set, text + i, len - i);
        if (!token)
            continue;
        int64_t end = i + token->match_len;
        if (token->single_word && (word_before(text, i) || word_after(text, end, len))) {
            i = end - 1; /* refused, but its text is not searched again (as in HF) */
            continue;
        }
        *out = (ith_added_match){token, i, end, end};
        strip(classes, text, len, taken, out);
        return true;
    }
    return false;
}
