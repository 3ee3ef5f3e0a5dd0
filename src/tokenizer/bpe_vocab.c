/* bpe_vocab.c - tokens by id, ids by bytes, merges by pair, and the byte alphabet.
 *
 * Invariants:
 *  1. Both tables have a power of two of slots and stay at most 2/3 full, so a search ends.
 *  2. A token whose spelling leaves the byte alphabet (is_text) is not in the table by bytes: the
 *     bytes of another token may be the same, and merges never reach it. */
#include "tokenizer/tokenizer_internal.h"

/* The characters of bytes 0x00-0x20, 0x7f-0xa0 and 0xad are U+0100, U+0101 ...; all others stand
 * for themselves. */
uint32_t ith_alphabet_char(unsigned char byte)
{
    if (byte <= 0x20)
        return 0x100u + byte;
    if (byte >= 0x7f && byte <= 0xa0)
        return 0x100u + 0x21 + (byte - 0x7fu);
    return byte == 0xad ? 0x143 : byte;
}

static int alphabet_byte(uint32_t c)
{
    if (c >= 0x100)
        return c <= 0x120   ? (int)(c - 0x100)
               : c <= 0x142 ? (int)(c - 0x121 + 0x7f)
               : c == 0x143 ? 0xad
                            : -1;
    return c <= 0x20 || (c >= 0x7f && c <= 0xa0) || c == 0xad ? -1 : (int)c;
}

int64_t ith_alphabet_decode(const char *spelling, int64_t len, char *bytes)
{
    int64_t n = 0;
    for (const char *p = spelling, *end = p + len; p < end;) {
        uint32_t c = 0;
        int step = ith_utf8_decode(p, end, &c);
        int byte = step ? alphabet_byte(c) : -1;
        if (byte < 0)
            return -1;
        bytes[n++] = (char)byte;
        p += step;
    }
    return n;
}

uint64_t ith_hash_bytes(const char *p, int64_t len)
{
    uint64_t h = (uint64_t)len * 0x9e3779b97f4a7c15u, word;
    for (; len >= 8; p += 8, len -= 8) {
        memcpy(&word, p, 8);
        h = (h ^ word) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    word = 0;
    memcpy(&word, p, (size_t)len);
    h = (h ^ word) * 0xff51afd7ed558ccdu;
    return h ^ h >> 29;
}

static int64_t slots_for(int64_t count)
{
    int64_t slots = 1024;
    while (slots < count + count / 2)
        slots *= 2;
    return slots;
}

ith_status ith_vocab_init(ith_vocab *v, int64_t num_tokens, int64_t num_merges, ith_error *err)
{
    memset(v, 0, sizeof *v);
    ith_arena_init(&v->arena, 0);
    if (num_tokens > ITH_TOKEN_MAX_ID || num_merges > ITH_TOKEN_MAX_ID)
        return ith_fail(err, ITH_ERR_FORMAT, "%lld tokens and %lld merges; at most %lld",
                        (long long)num_tokens, (long long)num_merges, (long long)ITH_TOKEN_MAX_ID);
    v->num_slots = slots_for(num_tokens);
    v->num_merge_slots = slots_for(num_merges);
    ITH_TRY(ith_alloc((void **)&v->slots, ith_mul_bytes(v->num_slots, 4), "vocabulary", err));
    memset(v->slots, 0xff, (size_t)v->num_slots * 4);
    ITH_TRY(ith_alloc((void **)&v->merges,
                      ith_mul_bytes(v->num_merge_slots, (int64_t)sizeof *v->merges), "merges",
                      err));
    for (int64_t i = 0; i < v->num_merge_slots; i++)
        v->merges[i] = (ith_merge){-1, -1, ITH_NO_RANK, -1};
    return ITH_OK;
}

void ith_vocab_deinit(ith_vocab *v)
{
    ith_free(v->slots);
    ith_free(v->merges);
    ith_free(v->rows);
    ith_free(v->char_id);
    ith_arena_deinit(&v->arena);
    memset(v, 0, sizeof *v);
}

ith_status ith_vocab_row(ith_vocab *v, int64_t id, ith_token_row **out, ith_error *err)
{
    if (id < 0 || id >= ITH_TOKEN_MAX_ID)
        return ith_fail(err, ITH_ERR_FORMAT, "id %lld; ids are 0 to %lld", (long long)id,
                        (long long)ITH_TOKEN_MAX_ID - 1);
    ITH_TRY(ith_grow((void **)&v->rows, &v->cap_rows, id + 1, (int64_t)sizeof *v->rows,
                     "token rows", err));
    if (id >= v->num_rows) {
        memset(v->rows + v->num_rows, 0, (size_t)(id + 1 - v->num_rows) * sizeof *v->rows);
        v->num_rows = id + 1;
    }
    *out = &v->rows[id];
    return ITH_OK;
}

/* Slot that holds these bytes, or the free slot where they belong. */
static int32_t *find_slot(const ith_vocab *v, const char *bytes, int64_t len)
{
    uint64_t mask = (uint64_t)v->num_slots - 1;
    for (uint64_t i = ith_hash_bytes(bytes, len) & mask;; i = (i + 1) & mask) {
        int32_t *slot = &v->slots[i];
        if (*slot < 0 ||
            (v->rows[*slot].len == len && memcmp(v->rows[*slot].bytes, bytes, (size_t)len) == 0))
            return slot;
    }
}

int32_t ith_vocab_find(const ith_vocab *v, const char *bytes, int64_t len)
{
    return *find_slot(v, bytes, len);
}

int32_t ith_vocab_find_spelling(const ith_vocab *v, const char *spelling, int64_t len)
{
    char bytes[1024];
    if (len <= (int64_t)sizeof bytes) {
        int64_t n = ith_alphabet_decode(spelling, len, bytes);
        if (n >= 0)
            return ith_vocab_find(v, bytes, n);
    }
    for (int64_t id = 0; v->num_text > 0 && id < v->num_rows; id++) {
        const ith_token_row *row = &v->rows[id];
        if (row->bytes && row->is_text && row->len == len &&
            memcmp(row->bytes, spelling, (size_t)len) == 0)
            return (int32_t)id;
    }
    return -1;
}

ith_status ith_vocab_add(ith_vocab *v, const char *spelling, int64_t len, int64_t id,
                         ith_error *err)
{
    if (len > ITH_TOKEN_MAX_BYTES)
        return ith_fail(err, ITH_ERR_FORMAT, "token %lld has %lld bytes; at most %lld",
                        (long long)id, (long long)len, (long long)ITH_TOKEN_MAX_BYTES);
    if (3 * v->num_used >= 2 * v->num_slots)
        return ith_fail(err, ITH_ERR_FORMAT, "more tokens than counted");
    ith_token_row *row = NULL;
    ITH_TRY(ith_vocab_row(v, id, &row, err));
    if (row->bytes)
        return ith_fail(err, ITH_ERR_FORMAT, "id %lld of '%.*s' belongs to another token",
                        (long long)id, (int)len, spelling);
    char *bytes = ith_arena_alloc(&v->arena, len + 1);
    if (!bytes)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for token %lld", (long long)id);
    int64_t n = ith_alphabet_decode(spelling, len, bytes);
    if (n < 0) {
        memcpy(bytes, spelling, (size_t)len);
        bytes[len] = '\0';
        *row = (ith_token_row){.bytes = bytes, .len = (int32_t)len, .is_text = true};
        v->num_text++;
        return ITH_OK;
    }
    bytes[n] = '\0';
    int32_t *slot = find_slot(v, bytes, n);
    if (*slot >= 0)
        return ith_fail(err, ITH_ERR_FORMAT, "token '%.*s' twice, with ids %d and %lld", (int)len,
                        spelling, *slot, (long long)id);
    *row = (ith_token_row){.bytes = bytes, .len = (int32_t)n};
    *slot = (int32_t)id;
    v->num_used++;
    return ITH_OK;
}

ith_status ith_vocab_add_merge(ith_vocab *v, const char *left, int64_t left_len, const char *right,
                               int64_t right_len, ith_error *err)
{
    char bytes[4096];
    if (left_len + right_len > (int64_t)sizeof bytes)
        return ith_fail(err, ITH_ERR_FORMAT, "merge of %lld bytes; at most %lld",
                        (long long)(left_len + right_len), (long long)sizeof bytes);
    if (3 * v->num_merges >= 2 * v->num_merge_slots)
        return ith_fail(err, ITH_ERR_FORMAT, "more merges than counted");
    int64_t a = ith_alphabet_decode(left, left_len, bytes);
    int64_t b = a < 0 ? -1 : ith_alphabet_decode(right, right_len, bytes + a);
    int32_t left_id = a < 0 ? -1 : ith_vocab_find(v, bytes, a);
    int32_t right_id = b < 0 ? -1 : ith_vocab_find(v, bytes + a, b);
    int32_t id = b < 0 ? -1 : ith_vocab_find(v, bytes, a + b);
    if (left_id < 0 || right_id < 0 || id < 0)
        return ith_fail(err, ITH_ERR_FORMAT, "'%.*s' + '%.*s': %s is not in the vocabulary",
                        (int)left_len, left, (int)right_len, right,
                        left_id < 0    ? "the left part"
                        : right_id < 0 ? "the right part"
                                       : "the joined token");
    /* A pair given twice keeps the later rank, as in HF. */
    uint64_t mask = (uint64_t)v->num_merge_slots - 1, i = ith_hash_pair(left_id, right_id) & mask;
    while (v->merges[i].left >= 0 &&
           (v->merges[i].left != left_id || v->merges[i].right != right_id))
        i = (i + 1) & mask;
    v->merges[i] = (ith_merge){left_id, right_id, (uint32_t)v->num_merges++, id};
    return ITH_OK;
}

void ith_vocab_finish(ith_vocab *v)
{
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        v->byte_id[i] = ith_vocab_find(v, &byte, 1);
    }
}
