/* bpe_chars.c - which characters are one token before any word is looked at.
 *
 * Merges of bytes make most characters of three bytes a token first; starting there saves two of
 * three searches. It changes no id when
 * 1. a merge comes after those that made its two parts, in the table: then merges are applied in
 *    the order of their ranks, and what is done early at one place is done at all;
 * 2. the bytes of the character, merged alone, become this one token;
 * 3. no merge joins a piece of a character to something beyond the character's border, at the two
 *    borders of this one. The pairs of bytes at which some merge does are kept in `crossed`.
 * Where one of them fails the encoder starts from bytes, as without this table. */
#include "tokenizer/tokenizer_internal.h"

#define NUM_CHARS 0x10000

/* Whole characters only. */
static bool is_whole(const char *p, int64_t len)
{
    for (const char *end = p + len; p < end;) {
        uint32_t c;
        int n = ith_utf8_decode(p, end, &c);
        if (n <= 0)
            return false;
        p += n;
    }
    return true;
}

static void set_crossed(ith_vocab *v, unsigned char a, unsigned char b)
{
    v->crossed[a][b / 32] |= (uint32_t)1 << b % 32;
}

static void mark_crossings(ith_vocab *v, const ith_token_row *left, const ith_token_row *right)
{
    if (is_whole(left->bytes, left->len) && is_whole(right->bytes, right->len))
        return;
    unsigned char before = (unsigned char)left->bytes[0];
    for (int64_t i = 1; i < left->len + right->len; i++) {
        char c = i < left->len ? left->bytes[i] : right->bytes[i - left->len];
        if (!ith_utf8_is_tail(c))
            set_crossed(v, before, (unsigned char)c);
        before = (unsigned char)c;
    }
}

/* made_at: for each token the last rank that makes it; ITH_NO_RANK: none. */
static bool is_in_order(const ith_vocab *v, const uint32_t *made_at)
{
    for (int64_t i = 0; i < v->num_merge_slots; i++) {
        const ith_merge *m = &v->merges[i];
        for (int side = 0; side < 2 && m->left >= 0; side++) {
            uint32_t made = made_at[side ? m->right : m->left];
            if (made != ITH_NO_RANK && made >= m->rank)
                return false;
        }
    }
    return true;
}

/* The one token that the bytes of a character become, -1: they stay several. */
static int32_t merged_char(const ith_vocab *v, const char *bytes, int n)
{
    int32_t ids[4];
    ITH_ASSERT(n >= 1 && n <= 4);
    for (int i = 0; i < n; i++)
        if ((ids[i] = v->byte_id[(unsigned char)bytes[i]]) < 0)
            return -1;
    while (n > 1) {
        const ith_merge *best = NULL;
        int at = 0;
        for (int i = 0; i + 1 < n; i++) {
            const ith_merge *m = ith_vocab_merge(v, ids[i], ids[i + 1]);
            if (m && (!best || m->rank < best->rank)) {
                best = m;
                at = i;
            }
        }
        if (!best)
            return -1;
        ids[at] = best->id;
        memmove(ids + at + 1, ids + at + 2, (size_t)(n - at - 2) * sizeof *ids);
        n--;
    }
    return ids[0];
}

static void fill_char_ids(ith_vocab *v)
{
    for (int64_t c = 0; c < NUM_CHARS; c++)
        v->char_id[c] = -1;
    for (int64_t id = 0; id < v->num_rows; id++) {
        const ith_token_row *row = &v->rows[id];
        uint32_t c = 0;
        if (!row->bytes || row->is_text || row->len < 2 || row->len > 3 ||
            ith_utf8_decode(row->bytes, row->bytes + row->len, &c) != row->len || c >= NUM_CHARS)
            continue;
        if (merged_char(v, row->bytes, row->len) == id)
            v->char_id[c] = (int32_t)id;
    }
}

ith_status ith_vocab_find_chars(ith_vocab *v, ith_error *err)
{
    uint32_t *made_at = NULL;
    ITH_TRY(ith_alloc((void **)&made_at, v->num_rows * 4, "ranks of tokens", err));
    memset(made_at, 0xff, (size_t)v->num_rows * 4);
    for (int64_t i = 0; i < v->num_merge_slots; i++) {
        const ith_merge *m = &v->merges[i];
        if (m->left < 0)
            continue;
        if (made_at[m->id] == ITH_NO_RANK || made_at[m->id] < m->rank)
            made_at[m->id] = m->rank;
        mark_crossings(v, &v->rows[m->left], &v->rows[m->right]);
    }
    bool in_order = is_in_order(v, made_at);
    ith_free(made_at);
    if (!in_order)
        return ITH_OK;
    ITH_TRY(ith_alloc((void **)&v->char_id, NUM_CHARS * 4, "tokens of characters", err));
    fill_char_ids(v);
    return ITH_OK;
}

static bool is_crossed(const ith_vocab *v, char a, char b)
{
    unsigned char x = (unsigned char)a, y = (unsigned char)b;
    return v->crossed[x][y / 32] >> y % 32 & 1;
}

int64_t ith_vocab_start(const ith_vocab *v, const char *text, int64_t n, int32_t *ids)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n;) {
        unsigned char lead = (unsigned char)text[i];
        int64_t len = lead < 0xc2 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
        int32_t id = -1;
        if (v->char_id && (len == 2 || len == 3) && i + len <= n) {
            uint32_t c = (unsigned char)text[i + 1] & 0x3f;
            c = len == 2
                    ? (uint32_t)(lead & 0x1f) << 6 | c
                    : (uint32_t)(lead & 0xf) << 12 | c << 6 | ((unsigned char)text[i + 2] & 0x3f);
            id = v->char_id[c];
            if (id >= 0 && ((i > 0 && is_crossed(v, text[i - 1], text[i])) ||
                            (i + len < n && is_crossed(v, text[i + len - 1], text[i + len]))))
                id = -1;
        }
        if (id >= 0) {
            ids[count++] = id;
            i += len;
            continue;
        }
        for (int64_t end = ith_min_i64(i + len, n); i < end; i++)
            if ((ids[count++] = v->byte_id[(unsigned char)text[i]]) < 0)
                return -1;
    }
    return count;
}
