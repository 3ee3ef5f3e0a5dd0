/* bpe_encode.c - from text to ids.
 *
 * added tokens -> NFC -> added tokens marked `normalized` -> split rules -> words -> merges.
 * Merging joins the pair of lowest rank, leftmost first, until no pair is in the table.
 *
 * Invariants:
 *  1. An encoding thread owns one ith_bpe_state for the length of a call, so the tokenizer itself
 *     stays read-only.
 *  2. The word cache stores whole keys: a hit is exact.
 *  3. Work is O(n log n) in the length of a word: words of more than SHORT_IDS pieces merge
 *     through a heap. */
#include "tokenizer/tokenizer_internal.h"

#define SHORT_IDS 48
#define CACHE_KEY_BYTES 31
#define CACHE_IDS 7
#define CACHE_SET_BITS 14
#define KEEP_NODES (1 << 20) /* larger scratch is freed after the call */

/* One cache line. key: the word, zero-padded, its length in the last byte (0: empty). */
typedef struct {
    uint64_t key[4];
    int32_t count;
    int32_t ids[CACHE_IDS];
} cache_slot;
_Static_assert(sizeof(cache_slot) == 64, "a slot is a cache line");

typedef struct {
    int32_t id, prev, next; /* id -1: joined to the left; prev, next -1: none */
} merge_node;

struct ith_bpe_state {
    ith_bpe_state *next;
    cache_slot *cache; /* sets of two slots, the newer first */
    ith_norm norm;
    ith_pieces pieces, other_pieces;
    ith_split_scratch split;
    merge_node *nodes;
    int64_t cap_nodes;
    uint64_t *heap; /* rank << 32 | position */
    int64_t heap_count, cap_heap;
};

/* Where the walk through one text stands. */
typedef struct {
    const ith_tokenizer *t;
    ith_bpe_state *s;
    ith_ids *out, *begins, *ends; /* begins, ends may be NULL */
    ith_error *err;
    const char *text;     /* segment being encoded, normalized */
    const char *text_end; /* its end */
    int64_t base;         /* place of the segment in the original text */
    bool changed;         /* s->norm maps the segment to the original */
    bool check_nfc;       /* some character of the text may need NFC */
} walk;

/* --- scratch --------------------------------------------------------------------------------- */

static void state_destroy(ith_bpe_state *s)
{
    if (!s)
        return;
    ith_free(s->cache);
    ith_norm_deinit(&s->norm);
    ith_free(s->pieces.pieces);
    ith_free(s->other_pieces.pieces);
    ith_split_scratch_deinit(&s->split);
    ith_free(s->nodes);
    ith_free(s->heap);
    ith_free(s);
}

static ith_status state_acquire(ith_bpe_states *states, ith_bpe_state **out, ith_error *err)
{
    pthread_mutex_lock(&states->mutex);
    ith_bpe_state *s = states->free_list;
    if (s)
        states->free_list = s->next;
    pthread_mutex_unlock(&states->mutex);
    if (!s) {
        const int64_t bytes = ((int64_t)2 << CACHE_SET_BITS) * (int64_t)sizeof(cache_slot);
        s = ith_calloc(1, (int64_t)sizeof *s);
        if (s)
            s->cache = ith_malloc_aligned(bytes, 64);
        if (!s || !s->cache) {
            state_destroy(s);
            return ith_fail(err, ITH_ERR_MEMORY, "out of memory for a tokenizer's word cache");
        }
        memset(s->cache, 0, (size_t)bytes);
    }
    *out = s;
    return ITH_OK;
}

static void state_release(ith_bpe_states *states, ith_bpe_state *s)
{
    if (s->cap_nodes > KEEP_NODES) {
        ith_free(s->nodes);
        ith_free(s->heap);
        s->nodes = NULL;
        s->heap = NULL;
        s->cap_nodes = s->cap_heap = 0;
    }
    pthread_mutex_lock(&states->mutex);
    s->next = states->free_list;
    states->free_list = s;
    pthread_mutex_unlock(&states->mutex);
}

void ith_bpe_states_deinit(ith_bpe_states *states)
{
    while (states->free_list) {
        ith_bpe_state *next = states->free_list->next;
        state_destroy(states->free_list);
        states->free_list = next;
    }
    pthread_mutex_destroy(&states->mutex);
}

/* --- merging --------------------------------------------------------------------------------- */

/* Merges n <= SHORT_IDS ids; returns how many are left. */
static int64_t merge_short(const ith_vocab *v, int32_t *ids, int64_t n)
{
    uint32_t rank[SHORT_IDS]; /* of the pair (i, i + 1) */
    int32_t joined[SHORT_IDS];
    for (int64_t i = 0; i + 1 < n; i++) {
        const ith_merge *m = ith_vocab_merge(v, ids[i], ids[i + 1]);
        rank[i] = m ? m->rank : ITH_NO_RANK;
        joined[i] = m ? m->id : -1;
    }
    while (n > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == ITH_NO_RANK)
            break;
        ids[best] = joined[best];
        n--;
        size_t rest = (size_t)(n - best - 1) * 4;
        memmove(ids + best + 1, ids + best + 2, rest);
        memmove(rank + best, rank + best + 1, rest);
        memmove(joined + best, joined + best + 1, rest);
        for (int64_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const ith_merge *m = ith_vocab_merge(v, ids[i], ids[i + 1]);
            rank[i] = m ? m->rank : ITH_NO_RANK;
            joined[i] = m ? m->id : -1;
        }
    }
    return n;
}

static void sift_down(uint64_t *heap, int64_t count, int64_t i)
{
    uint64_t value = heap[i];
    for (int64_t child; (child = 2 * i + 1) < count; i = child) {
        if (child + 1 < count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= value)
            break;
        heap[i] = heap[child];
    }
    heap[i] = value;
}

static void heap_push(ith_bpe_state *s, uint64_t value)
{
    int64_t i = s->heap_count++;
    ITH_ASSERT(s->heap_count <= s->cap_heap);
    for (; i > 0 && s->heap[(i - 1) / 2] > value; i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = value;
}

static const ith_merge *pair_at(const ith_vocab *v, const merge_node *nodes, int64_t i)
{
    return nodes[i].id < 0 || nodes[i].next < 0
               ? NULL
               : ith_vocab_merge(v, nodes[i].id, nodes[nodes[i].next].id);
}

static ith_status load_nodes(const ith_vocab *v, ith_bpe_state *s, const int32_t *ids, int64_t n,
                             ith_error *err)
{
    ITH_TRY(ith_grow((void **)&s->nodes, &s->cap_nodes, n, (int64_t)sizeof *s->nodes, "a long word",
                     err));
    /* A merge takes one entry out and puts at most two in; n - 1 merges, n - 1 first entries. */
    ITH_TRY(ith_grow((void **)&s->heap, &s->cap_heap, 2 * n, 8, "a long word", err));
    for (int64_t i = 0; i < n; i++)
        s->nodes[i] = (merge_node){ids[i], (int32_t)i - 1, i + 1 < n ? (int32_t)i + 1 : -1};
    s->heap_count = 0;
    for (int64_t i = 0; i < n; i++) {
        const ith_merge *m = pair_at(v, s->nodes, i);
        if (m)
            s->heap[s->heap_count++] = (uint64_t)m->rank << 32 | (uint64_t)i;
    }
    for (int64_t i = s->heap_count / 2 - 1; i >= 0; i--)
        sift_down(s->heap, s->heap_count, i);
    return ITH_OK;
}

/* Merges n ids, any number, in place. */
static ith_status merge_long(const ith_vocab *v, ith_bpe_state *s, int32_t *ids, int64_t n,
                             int64_t *left, ith_error *err)
{
    if (n > INT32_MAX)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "a word of %lld pieces; at most %d", (long long)n,
                        INT32_MAX);
    ITH_TRY(load_nodes(v, s, ids, n, err));
    merge_node *nodes = s->nodes;
    while (s->heap_count > 0) {
        uint64_t top = s->heap[0];
        s->heap[0] = s->heap[--s->heap_count];
        if (s->heap_count > 0)
            sift_down(s->heap, s->heap_count, 0);
        int32_t i = (int32_t)(top & UINT32_MAX);
        const ith_merge *m = pair_at(v, nodes, i);
        if (!m || m->rank != top >> 32)
            continue; /* one of the two has been merged since */
        int32_t right = nodes[i].next, prev = nodes[i].prev;
        nodes[i].id = m->id;
        nodes[i].next = nodes[right].next;
        nodes[right].id = -1;
        if (nodes[i].next >= 0)
            nodes[nodes[i].next].prev = i;
        if ((m = pair_at(v, nodes, i)))
            heap_push(s, (uint64_t)m->rank << 32 | (uint64_t)i);
        if (prev >= 0 && (m = pair_at(v, nodes, prev)))
            heap_push(s, (uint64_t)m->rank << 32 | (uint64_t)prev);
    }
    *left = 0;
    for (int64_t i = 0; i >= 0; i = nodes[i].next)
        ids[(*left)++] = nodes[i].id;
    return ITH_OK;
}

/* --- words ----------------------------------------------------------------------------------- */

static inline uint64_t load_tail(const char *p, int64_t n)
{
    uint64_t word = 0;
    memcpy(&word, p, (size_t)n);
    return word;
}

/* First n bytes of p as a word; `wide`: 8 bytes may be read. */
static inline uint64_t load_word(const char *p, int64_t n, bool wide)
{
    if (n >= 8 || wide) {
        uint64_t word;
        memcpy(&word, p, 8);
        return n >= 8 ? word : word & (((uint64_t)1 << (8 * n)) - 1);
    }
    return load_tail(p, n);
}

/* The set of two slots where a word belongs; fills key. */
static inline cache_slot *cache_find(ith_bpe_state *s, const char *p, int64_t n, const char *end,
                                     uint64_t key[4])
{
    bool wide = end - p >= 32;
    key[0] = load_word(p, n, wide);
    key[1] = n > 8 ? load_word(p + 8, n - 8, wide) : 0;
    key[2] = n > 16 ? load_word(p + 16, n - 16, wide) : 0;
    key[3] = (n > 24 ? load_word(p + 24, n - 24, wide) : 0) | (uint64_t)n << 56;
    uint64_t h = key[0] * 0x9e3779b97f4a7c15u ^ key[1] * 0xc2b2ae3d27d4eb4fu;
    h ^= key[2] * 0x165667b19e3779f9u ^ key[3] * 0xd6e8feb86659fd93u;
    h = (h ^ h >> 32) * 0xff51afd7ed558ccdu;
    return &s->cache[(h >> (64 - CACHE_SET_BITS)) * 2];
}

static inline bool key_equal(const cache_slot *slot, const uint64_t key[4])
{
    return ((slot->key[0] ^ key[0]) | (slot->key[1] ^ key[1]) | (slot->key[2] ^ key[2]) |
            (slot->key[3] ^ key[3])) == 0;
}

static ith_status merge_word(const walk *w, const char *p, int64_t n)
{
    ith_ids *out = w->out;
    if (w->t->ignore_merges) {
        int32_t id = ith_vocab_find(&w->t->vocab, p, n);
        if (id >= 0) {
            out->ids[out->count++] = id;
            return ITH_OK;
        }
    }
    const ith_vocab *v = &w->t->vocab;
    int32_t *ids = out->ids + out->count;
    int64_t made = ith_vocab_start(v, p, n, ids);
    if (made < 0) {
        while (v->byte_id[(unsigned char)*p] >= 0)
            p++;
        return ith_fail(w->err, ITH_ERR_FORMAT,
                        "byte 0x%02x of the text has no token in the vocabulary",
                        (unsigned char)*p);
    }
    if (made <= SHORT_IDS)
        made = merge_short(v, ids, made);
    else
        ITH_TRY(merge_long(v, w->s, ids, made, &made, w->err));
    out->count += made;
    return ITH_OK;
}

/* Offsets of the ids from `first` on, which are the word at p. */
static ith_status push_offsets(const walk *w, int64_t first, const char *p, const char *end)
{
    for (int64_t k = first; k < w->out->count; k++) {
        const char *begin = p;
        p += w->t->vocab.rows[w->out->ids[k]].len;
        const char *stop = p;
        while (ith_utf8_is_tail(*begin))
            begin--;
        while (stop < end && ith_utf8_is_tail(*stop))
            stop++;
        int64_t from = begin - w->text, to = stop - w->text;
        if (w->changed)
            ith_norm_map(&w->s->norm, from, to, &from, &to);
        if (w->begins)
            ITH_TRY(ith_ids_push(w->begins, (int32_t)(w->base + from), w->err));
        if (w->ends)
            ITH_TRY(ith_ids_push(w->ends, (int32_t)(w->base + to), w->err));
    }
    ITH_ASSERT(p == end);
    return ITH_OK;
}

static inline ith_status encode_word(const walk *w, const char *p, const char *end)
{
    ith_ids *out = w->out;
    int64_t n = end - p, first = out->count;
    if (out->cap - out->count < n)
        ITH_TRY(ith_grow((void **)&out->ids, &out->cap, out->count + n, 4, "token ids", w->err));
    if (n == 1 && w->t->vocab.byte_id[(unsigned char)*p] >= 0) {
        out->ids[out->count++] = w->t->vocab.byte_id[(unsigned char)*p];
    } else if (n <= CACHE_KEY_BYTES) {
        uint64_t key[4];
        cache_slot *set = cache_find(w->s, p, n, w->text_end, key);
        cache_slot *hit = key_equal(&set[0], key)   ? &set[0]
                          : key_equal(&set[1], key) ? &set[1]
                                                    : NULL;
        if (hit) {
            if (n >= CACHE_IDS) /* then there is room to copy all, which is faster */
                memcpy(out->ids + first, hit->ids, sizeof hit->ids);
            else
                for (int32_t i = 0; i < hit->count; i++)
                    out->ids[first + i] = hit->ids[i];
            out->count += hit->count;
        } else {
            ITH_TRY(merge_word(w, p, n));
            int64_t count = out->count - first;
            if (count <= CACHE_IDS) {
                set[1] = set[0];
                memcpy(set[0].key, key, sizeof key);
                set[0].count = (int32_t)count;
                memcpy(set[0].ids, out->ids + first, (size_t)count * 4);
            }
        }
    } else {
        ITH_TRY(merge_word(w, p, n));
    }
    return w->begins || w->ends ? push_offsets(w, first, p, end) : ITH_OK;
}

/* --- the walk -------------------------------------------------------------------------------- */

static ith_status split_by_rules(const walk *w, int64_t begin, int64_t end)
{
    const ith_tokenizer *t = w->t;
    ith_pieces *from = &w->s->pieces, *to = &w->s->other_pieces;
    ITH_TRY(ith_grow((void **)&from->pieces, &from->cap, 1, (int64_t)sizeof *from->pieces, "pieces",
                     w->err));
    from->pieces[0] = (ith_piece){begin, end};
    from->count = 1;
    for (int r = 0; r < t->num_rules; r++) {
        to->count = 0;
        for (int64_t i = 0; i < from->count; i++)
            ITH_TRY(ith_split_apply(&t->rules[r], t->classes, &w->s->split, w->text,
                                    from->pieces[i].begin, from->pieces[i].end, to, w->err));
        ith_pieces *swap = from;
        from = to;
        to = swap;
    }
    for (int64_t i = 0; i < from->count; i++)
        ITH_TRY(encode_word(w, w->text + from->pieces[i].begin, w->text + from->pieces[i].end));
    return ITH_OK;
}

/* Text without added tokens: w->text[begin, end). */
static ith_status encode_plain(const walk *w, int64_t begin, int64_t end)
{
    const ith_split_rule *rule = w->t->rules;
    if (begin >= end)
        return ITH_OK;
    if (w->t->num_rules != 1 || rule->kind != ITH_SPLIT_WORDS || rule->drop_matches)
        return split_by_rules(w, begin, end);
    const char *p = w->text + begin, *stop = w->text + end;
    for (const char *next; p < stop; p = next) {
        next = ith_split_word(rule, w->t->classes, p, stop);
        ITH_TRY(encode_word(w, p, next));
    }
    return ITH_OK;
}

static ith_status push_added(const walk *w, const ith_added_match *m)
{
    int64_t from = m->begin, to = m->end;
    if (w->changed)
        ith_norm_map(&w->s->norm, from, to, &from, &to);
    ITH_TRY(ith_ids_push(w->out, m->token->id, w->err));
    if (w->begins)
        ITH_TRY(ith_ids_push(w->begins, (int32_t)(w->base + from), w->err));
    return w->ends ? ith_ids_push(w->ends, (int32_t)(w->base + to), w->err) : ITH_OK;
}

/* Text between the added tokens of the raw pass; begins at `base` of the original. */
static ith_status encode_segment(walk *w, const char *text, int64_t len, int64_t base)
{
    bool safe = true;
    if (len <= 0)
        return ITH_OK;
    if (w->check_nfc && ith_norm_check(w->t->classes, text, len, &safe) < 0 && !safe) {
        ITH_TRY(ith_norm_nfc(&w->s->norm, w->t->classes, text, len, w->err));
        text = w->s->norm.text.data;
        len = w->s->norm.text.len;
    }
    w->changed = !safe;
    w->text = text;
    w->text_end = text + len;
    w->base = base;
    int64_t from = 0, taken = 0;
    for (ith_added_match m;
         ith_added_next(&w->t->norm_set, w->t->classes, text, len, from, taken, &m);
         from = m.resume) {
        ITH_TRY(encode_plain(w, taken, m.begin));
        ITH_TRY(push_added(w, &m));
        taken = ith_max_i64(taken, m.end);
    }
    return encode_plain(w, taken, len);
}

static ith_status encode_text(walk *w, const char *text, int64_t len)
{
    bool safe = true;
    int64_t bad = ith_norm_check(w->t->classes, text, len, &safe);
    if (bad >= 0)
        return ith_fail(w->err, ITH_ERR_FORMAT, "text to encode: byte %lld is not valid UTF-8",
                        (long long)bad);
    w->check_nfc = w->t->nfc && !safe;
    int64_t from = 0, taken = 0;
    for (ith_added_match m;
         ith_added_next(&w->t->raw_set, w->t->classes, text, len, from, taken, &m);
         from = m.resume) {
        ITH_TRY(encode_segment(w, text + taken, m.begin - taken, taken));
        w->changed = false;
        w->base = 0;
        ITH_TRY(push_added(w, &m));
        taken = ith_max_i64(taken, m.end);
    }
    return encode_segment(w, text + taken, len - taken, taken);
}

ith_status ith_tokenizer_encode_offsets(const ith_tokenizer *t, const char *text, int64_t len,
                                        ith_ids *out, ith_ids *begins, ith_ids *ends,
                                        ith_error *err)
{
    if ((begins || ends) && len > INT32_MAX)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "a text of %lld bytes with offsets; at most %d",
                        (long long)len, INT32_MAX);
    int64_t old[3] = {out->count, begins ? begins->count : 0, ends ? ends->count : 0};
    walk w = {.t = t, .out = out, .begins = begins, .ends = ends, .err = err};
    ITH_TRY(state_acquire(t->states, &w.s, err));
    ith_status status = len > 0 ? encode_text(&w, text, len) : ITH_OK;
    state_release(t->states, w.s);
    if (status != ITH_OK) {
        out->count = old[0];
        if (begins)
            begins->count = old[1];
        if (ends)
            ends->count = old[2];
    }
    return status;
}

ith_status ith_tokenizer_encode(const ith_tokenizer *t, const char *text, int64_t len, ith_ids *out,
                                ith_error *err)
{
    return ith_tokenizer_encode_offsets(t, text, len, out, NULL, NULL, err);
}
