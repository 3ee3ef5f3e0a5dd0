/* tokenizer_internal.h - the parts of an open tokenizer. Only for src/tokenizer/.
 *
 * tokenizer.c    life cycle, lookup, decode
 * bpe_file.c     tokenizer.json, vocab + merges, tokenizer_config.json -> a filled ith_tokenizer
 * bpe_scan.c     fast strict reader of the two big JSON values (vocab, merges)
 * bpe_vocab.c    token rows, bytes -> id, pair -> merge, the byte alphabet
 * bpe_added.c    added tokens in the text
 * bpe_norm.c     NFC with a map back to the original bytes
 * bpe_split.c    split rules: hand-written for the known ones, PCRE2 for the rest
 * bpe_encode.c   the walk from text to ids, word cache, merging
 * bpe_unicode.c  general categories (Unicode 16)
 * bpe_train.c    learning merges
 * stream.c       streaming decode */
#ifndef ITH_TOKENIZER_INTERNAL_H
#define ITH_TOKENIZER_INTERNAL_H

#include "tokenizer/tokenizer.h"

#include "base/checked.h"
#include "base/utf8.h"

#include <pthread.h>
#include <string.h>

/* Ids are dense in practice; the limit keeps a hostile id from reserving memory. */
#define ITH_TOKEN_MAX_ID ((int64_t)1 << 22)
#define ITH_TOKEN_MAX_BYTES ((int64_t)1 << 16)
#define ITH_MAX_SPLIT_RULES 16

/* --- Unicode classes ------------------------------------------------------------------------- */

enum {
    ITH_UC_LETTER = 1,   /* general category L* */
    ITH_UC_MARK = 2,     /* M* */
    ITH_UC_NUMBER = 4,   /* N* */
    ITH_UC_SPACE = 8,    /* White_Space */
    ITH_UC_NEWLINE = 16, /* CR, LF */
    ITH_UC_NFC_SAFE = 32 /* NFC leaves it alone and it never joins what stands before it */
};
#define ITH_UC_TABLE_CHARS 0x30000 /* planes 0-2; what lies above is in ith_uc_class_high */

/* Fills table[ITH_UC_TABLE_CHARS]. NFC_SAFE comes from the linked utf8proc, which does the
 * composing. */
void ith_uc_fill(uint8_t *table);
uint8_t ith_uc_class_high(uint32_t c);
static inline uint8_t ith_uc_class(const uint8_t *table, uint32_t c)
{
    return c < ITH_UC_TABLE_CHARS ? table[c] : ith_uc_class_high(c);
}
/* A word character in the sense of \w (UTS 18). */
bool ith_uc_is_word(uint32_t c);
/* The character at p, which starts one of a text known to be valid. */
static inline uint32_t ith_utf8_next(const char **p)
{
    const unsigned char *s = (const unsigned char *)*p;
    if (s[0] < 0x80) {
        *p += 1;
        return s[0];
    }
    if (s[0] < 0xe0) {
        *p += 2;
        return (uint32_t)(s[0] & 0x1f) << 6 | (s[1] & 0x3f);
    }
    if (s[0] < 0xf0) {
        *p += 3;
        return (uint32_t)(s[0] & 0x0f) << 12 | (uint32_t)(s[1] & 0x3f) << 6 | (s[2] & 0x3f);
    }
    *p += 4;
    return (uint32_t)(s[0] & 0x07) << 18 | (uint32_t)(s[1] & 0x3f) << 12 |
           (uint32_t)(s[2] & 0x3f) << 6 | (s[3] & 0x3f);
}
static inline bool ith_utf8_is_tail(char c)
{
    return ((unsigned char)c & 0xc0) == 0x80;
}
/* Length of the maximal ill-formed subpart at p (Unicode 3.9), 0 when [p, end) may yet become one
 * character. Precondition: no valid character starts at p. */
int ith_utf8_bad_length(const char *p, const char *end);

/* --- vocabulary ------------------------------------------------------------------------------ */

typedef struct {
    const char *bytes; /* NULL: no token has this id */
    int32_t len;
    bool is_added, is_special;
    bool is_text; /* spelled with characters outside the byte alphabet: merges never reach it */
} ith_token_row;

typedef struct {
    int32_t left, right; /* left -1: free slot */
    uint32_t rank;
    int32_t id;
} ith_merge;
#define ITH_NO_RANK UINT32_MAX

typedef struct {
    ith_arena arena;
    ith_token_row *rows;
    int64_t num_rows, cap_rows;
    int64_t num_text; /* rows of the file with is_text */
    int32_t *slots;   /* bytes -> id, open addressing; -1 free */
    int64_t num_slots, num_used;
    ith_merge *merges; /* open addressing */
    int64_t num_merge_slots, num_merges;
    int32_t byte_id[256];     /* -1: no token for this byte */
    int32_t *char_id;         /* [0x10000], -1: begin with bytes; NULL: always */
    uint32_t crossed[256][8]; /* bit [a][b]: a merge crosses the border of two characters here */
} ith_vocab;

ith_status ith_vocab_init(ith_vocab *v, int64_t num_tokens, int64_t num_merges, ith_error *err);
void ith_vocab_deinit(ith_vocab *v);
/* Adds a token by its spelling in the file. Fails on a second token of this spelling or id. */
ith_status ith_vocab_add(ith_vocab *v, const char *spelling, int64_t len, int64_t id,
                         ith_error *err);
/* Adds the merge of two spellings with the next rank; both and their join must be tokens. */
ith_status ith_vocab_add_merge(ith_vocab *v, const char *left, int64_t left_len, const char *right,
                               int64_t right_len, ith_error *err);
/* Sets byte_id; called once after the last token. */
void ith_vocab_finish(ith_vocab *v);
/* Finds the characters that may be taken as tokens from the start (bpe_chars.c); after the last
 * merge. */
ith_status ith_vocab_find_chars(ith_vocab *v, ith_error *err);
/* What merging a word of whole characters begins with: at most n ids; returns their number, -1 when
 * a byte has no token. */
int64_t ith_vocab_start(const ith_vocab *v, const char *text, int64_t n, int32_t *ids);
/* Row for an id, grown as needed. */
ith_status ith_vocab_row(ith_vocab *v, int64_t id, ith_token_row **out, ith_error *err);
int32_t ith_vocab_find(const ith_vocab *v, const char *bytes, int64_t len);
int32_t ith_vocab_find_spelling(const ith_vocab *v, const char *spelling, int64_t len);
/* Byte alphabet (GPT-2): bytes as printable characters. Returns the number of bytes written to
 * bytes[len], -1 when a character is outside the alphabet. */
int64_t ith_alphabet_decode(const char *spelling, int64_t len, char *bytes);
uint32_t ith_alphabet_char(unsigned char byte);
uint64_t ith_hash_bytes(const char *p, int64_t len);

static inline uint64_t ith_hash_pair(int32_t left, int32_t right)
{
    uint64_t x = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    x *= 0x9e3779b97f4a7c15u;
    return x ^ x >> 32;
}

static inline const ith_merge *ith_vocab_merge(const ith_vocab *v, int32_t left, int32_t right)
{
    uint64_t mask = (uint64_t)v->num_merge_slots - 1;
    for (uint64_t i = ith_hash_pair(left, right) & mask;; i = (i + 1) & mask) {
        const ith_merge *m = &v->merges[i];
        if (m->left == left && m->right == right)
            return m;
        if (m->left < 0)
            return NULL;
    }
}

/* --- added tokens ---------------------------------------------------------------------------- */

typedef struct {
    const char *text;       /* NUL-terminated */
    const char *match_text; /* text, or its NFC form when normalized */
    int32_t len, match_len, id;
    bool special, normalized, lstrip, rstrip, single_word;
} ith_added_token;

/* The added tokens of one pass (raw text, or normalized text), sorted bytewise by match_text. */
typedef struct {
    const ith_added_token **sorted;
    int64_t count;
    bool starts[256];
} ith_added_set;

typedef struct {
    const ith_added_token *token;
    int64_t begin, end; /* with the white space that lstrip and rstrip take */
    int64_t resume;     /* where the search goes on: the end of the token itself */
} ith_added_match;

/* Sorts set->sorted[0 .. count). */
void ith_added_set_finish(ith_added_set *set);
/* Leftmost longest added token at or after `from`; taken: end of the previous match. */
bool ith_added_next(const ith_added_set *set, const uint8_t *classes, const char *text, int64_t len,
                    int64_t from, int64_t taken, ith_added_match *out);

/* --- normalization --------------------------------------------------------------------------- */

/* normalized [begin, end) came from original [orig_begin, orig_end). Between two changes both run
 * in step. */
typedef struct {
    int64_t begin, end, orig_begin, orig_end;
} ith_norm_change;

typedef struct {
    ith_buf text;
    ith_norm_change *changes;
    int64_t num_changes, cap_changes;
    int32_t *chars, *sorted; /* scratch: code points of one stretch */
    int64_t num_chars, cap_chars, cap_sorted;
} ith_norm;

/* Offset of the first byte that is not valid UTF-8, -1 when all are; *nfc_safe: NFC changes
 * nothing for sure. */
int64_t ith_norm_check(const uint8_t *classes, const char *text, int64_t len, bool *nfc_safe);
/* NFC of valid text into norm (cleared first). */
ith_status ith_norm_nfc(ith_norm *norm, const uint8_t *classes, const char *text, int64_t len,
                        ith_error *err);
void ith_norm_deinit(ith_norm *norm);
/* Original range of the normalized characters [begin, end). */
void ith_norm_map(const ith_norm *norm, int64_t begin, int64_t end, int64_t *orig_begin,
                  int64_t *orig_end);

/* --- split rules ----------------------------------------------------------------------------- */

typedef struct {
    int64_t begin, end;
} ith_piece;

typedef struct {
    ith_piece *pieces;
    int64_t count, cap;
} ith_pieces;

typedef enum {
    ITH_SPLIT_WORDS, /* hand-written, see ith_split_word */
    ITH_SPLIT_REGEX, /* PCRE2 */
    ITH_SPLIT_TEXT,  /* a fixed string */
    ITH_SPLIT_DIGITS /* every number character alone, or runs of them */
} ith_split_kind;

typedef struct {
    ith_split_kind kind;
    bool marks;        /* WORDS: marks are word characters (Qwen3.5) */
    int max_digits;    /* WORDS: numbers per piece */
    bool drop_matches; /* behavior Removed */
    bool drop_gaps;    /* behavior Removed with invert */
    bool individual;   /* DIGITS */
    void *code;        /* REGEX: pcre2_code */
    const char *text;  /* TEXT, and the source of REGEX */
    int64_t text_len;
} ith_split_rule;

/* Fills a rule from a pattern in Oniguruma (Ruby) syntax. force_regex: PCRE2 even when the pattern
 * is a known one (tests compare both). */
ith_status ith_split_compile(ith_split_rule *rule, const char *pattern, int64_t len,
                             bool force_regex, ith_error *err);
void ith_split_deinit(ith_split_rule *rule);
/* End of the piece that starts at p (p < end) by a WORDS rule. */
const char *ith_split_word(const ith_split_rule *rule, const uint8_t *classes, const char *p,
                           const char *end);
/* Per-thread scratch of REGEX rules. */
typedef struct {
    void *match_data, *match_context, *jit_stack;
} ith_split_scratch;
void ith_split_scratch_deinit(ith_split_scratch *scratch);
/* Appends the pieces of text[begin, end) by one rule. */
ith_status ith_split_apply(const ith_split_rule *rule, const uint8_t *classes,
                           ith_split_scratch *scratch, const char *text, int64_t begin, int64_t end,
                           ith_pieces *out, ith_error *err);
/* Unicode version of the regex library, for cache keys. */
void ith_split_version(char out[32]);

/* --- the whole ------------------------------------------------------------------------------- */

typedef struct ith_bpe_state ith_bpe_state; /* scratch of one encoding thread */

typedef struct {
    pthread_mutex_t mutex;
    ith_bpe_state *free_list;
} ith_bpe_states;

struct ith_tokenizer {
    ith_vocab vocab;
    bool nfc, ignore_merges;
    ith_split_rule rules[ITH_MAX_SPLIT_RULES];
    int num_rules;
    ith_added_token *added; /* sorted by id */
    int64_t num_added, cap_added;
    ith_added_set raw_set, norm_set;
    uint8_t *classes;
    int32_t eos, pad;
    char hash[65];
    ith_bpe_states *states;
};

void ith_bpe_states_deinit(ith_bpe_states *states);
/* bpe_file.c: fills a zeroed t whose vocab is not yet initialised. */
ith_status ith_tokenizer_load(ith_tokenizer *t, const char *model_dir, ith_error *err);

/* bpe_scan.c: the two big values inside tokenizer.json. */
typedef struct {
    int64_t begin, end; /* begin == end: not there */
} ith_span;
/* Finds model.vocab and model.merges. False when the text is not shaped like JSON. */
bool ith_scan_find(const char *text, int64_t len, ith_span *vocab, ith_span *merges);
/* Number of elements at the top level of the array or object in span (an upper bound). */
int64_t ith_scan_count(const char *text, ith_span span);
/* Read an object of ids / an array of merges into v. Errors begin with
 * name:line:column. */
ith_status ith_scan_vocab(ith_vocab *v, const char *text, ith_span span, const char *name,
                          ith_error *err);
ith_status ith_scan_merges(ith_vocab *v, const char *text, ith_span span, const char *name,
                           ith_error *err);

#endif
