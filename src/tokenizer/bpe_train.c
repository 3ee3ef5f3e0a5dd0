/* bpe_train.c - learning a byte-level BPE.
 *
 * The text becomes distinct words with counts. Each step joins the pair with the largest count,
 * ties to the smaller ids, in every word that holds it. Only words on the pair's list are touched;
 * the heap of pairs is corrected lazily: an entry whose count is out of date is put back with the
 * right one when it comes up.
 *
 * Invariants:
 *  1. A pair's count is the sum over words of (count of the word) x (places in it).
 *  2. Nothing depends on addresses or hash order. */
#include "tokenizer/tokenizer_internal.h"

#include "base/file.h"
#include "base/json.h"

static const char QWEN3_PATTERN[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

typedef struct {
    const char *text;
    int64_t begin; /* symbols[begin .. begin + len) */
    int32_t byte_len, len;
    int64_t count;
} train_word;

typedef struct {
    int32_t left, right;
    int64_t count;
    int32_t *words; /* words that held it at some time, each once in a row */
    int64_t num_words, cap_words;
} train_pair;

typedef struct {
    int64_t count;
    int32_t pair;
} heap_entry;

typedef struct {
    int32_t *slots; /* index + 1, 0 free */
    int64_t num_slots;
} index_table;

typedef struct {
    train_word *words;
    int64_t num_words, cap_words;
    index_table word_table, pair_table;
    int32_t *symbols;
    int64_t num_symbols, cap_symbols;
    train_pair *pairs;
    int64_t num_pairs, cap_pairs;
    heap_entry *heap;
    int64_t heap_count, cap_heap;
    int32_t *merges; /* left, right */
    int64_t num_merges, cap_merges;
    ith_vocab vocab;
    uint8_t *classes;
    ith_norm norm;
    ith_error *err;
} trainer;

/* --- words and pairs by hash ----------------------------------------------------------------- */

static uint64_t word_hash(const trainer *tr, int64_t i)
{
    return ith_hash_bytes(tr->words[i].text, tr->words[i].byte_len);
}

static uint64_t pair_hash(const trainer *tr, int64_t i)
{
    return ith_hash_pair(tr->pairs[i].left, tr->pairs[i].right);
}

/* Keeps a table at most half full for `count` + 1 entries. */
static ith_status table_reserve(trainer *tr, index_table *table, int64_t count,
                                uint64_t (*hash)(const trainer *, int64_t))
{
    if (2 * (count + 1) <= table->num_slots)
        return ITH_OK;
    int64_t num_slots = table->num_slots ? 2 * table->num_slots : 4096;
    int32_t *slots = NULL;
    ITH_TRY(ith_alloc_zero((void **)&slots, num_slots, 4, "BPE training", tr->err));
    for (int64_t i = 0; i < count; i++) {
        uint64_t at = hash(tr, i) & (uint64_t)(num_slots - 1);
        while (slots[at])
            at = (at + 1) & (uint64_t)(num_slots - 1);
        slots[at] = (int32_t)i + 1;
    }
    ith_free(table->slots);
    *table = (index_table){slots, num_slots};
    return ITH_OK;
}

static ith_status count_word(trainer *tr, const char *text, int64_t len)
{
    if (len > INT32_MAX || tr->num_words == INT32_MAX)
        return ith_fail(tr->err, ITH_ERR_UNSUPPORTED, "training text: a word of %lld bytes",
                        (long long)len);
    ITH_TRY(table_reserve(tr, &tr->word_table, tr->num_words, word_hash));
    uint64_t mask = (uint64_t)tr->word_table.num_slots - 1;
    uint64_t at = ith_hash_bytes(text, len) & mask;
    for (; tr->word_table.slots[at]; at = (at + 1) & mask) {
        train_word *word = &tr->words[tr->word_table.slots[at] - 1];
        if (word->byte_len == len && memcmp(word->text, text, (size_t)len) == 0) {
            word->count++;
            return ITH_OK;
        }
    }
    ITH_TRY(ith_grow((void **)&tr->words, &tr->cap_words, tr->num_words + 1,
                     (int64_t)sizeof *tr->words, "training words", tr->err));
    ITH_TRY(ith_grow((void **)&tr->symbols, &tr->cap_symbols, tr->num_symbols + len, 4,
                     "training symbols", tr->err));
    tr->words[tr->num_words++] = (train_word){text, tr->num_symbols, (int32_t)len, (int32_t)len, 1};
    tr->word_table.slots[at] = (int32_t)tr->num_words;
    for (int64_t i = 0; i < len; i++)
        tr->symbols[tr->num_symbols++] = tr->vocab.byte_id[(unsigned char)text[i]];
    return ITH_OK;
}

static ith_status find_pair(trainer *tr, int32_t left, int32_t right, int32_t *out)
{
    ITH_TRY(table_reserve(tr, &tr->pair_table, tr->num_pairs, pair_hash));
    uint64_t mask = (uint64_t)tr->pair_table.num_slots - 1;
    uint64_t at = ith_hash_pair(left, right) & mask;
    for (; tr->pair_table.slots[at]; at = (at + 1) & mask) {
        const train_pair *pair = &tr->pairs[tr->pair_table.slots[at] - 1];
        if (pair->left == left && pair->right == right) {
            *out = tr->pair_table.slots[at] - 1;
            return ITH_OK;
        }
    }
    ITH_ASSERT(tr->num_pairs < INT32_MAX);
    ITH_TRY(ith_grow((void **)&tr->pairs, &tr->cap_pairs, tr->num_pairs + 1,
                     (int64_t)sizeof *tr->pairs, "training pairs", tr->err));
    tr->pairs[tr->num_pairs++] = (train_pair){.left = left, .right = right};
    tr->pair_table.slots[at] = (int32_t)tr->num_pairs;
    *out = (int32_t)tr->num_pairs - 1;
    return ITH_OK;
}

/* --- the heap: largest count first, then the smaller pair ------------------------------------ */

static bool before(const trainer *tr, heap_entry a, heap_entry b)
{
    if (a.count != b.count)
        return a.count > b.count;
    const train_pair *x = &tr->pairs[a.pair], *y = &tr->pairs[b.pair];
    return x->left != y->left ? x->left < y->left : x->right < y->right;
}

static ith_status heap_add(trainer *tr, int32_t pair)
{
    ITH_TRY(ith_grow((void **)&tr->heap, &tr->cap_heap, tr->heap_count + 1,
                     (int64_t)sizeof *tr->heap, "training heap", tr->err));
    heap_entry entry = {tr->pairs[pair].count, pair};
    int64_t i = tr->heap_count++;
    for (; i > 0 && before(tr, entry, tr->heap[(i - 1) / 2]); i = (i - 1) / 2)
        tr->heap[i] = tr->heap[(i - 1) / 2];
    tr->heap[i] = entry;
    return ITH_OK;
}

static heap_entry heap_take(trainer *tr)
{
    heap_entry top = tr->heap[0], last = tr->heap[--tr->heap_count];
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < tr->heap_count; i = child) {
        if (child + 1 < tr->heap_count && before(tr, tr->heap[child + 1], tr->heap[child]))
            child++;
        if (!before(tr, tr->heap[child], last))
            break;
        tr->heap[i] = tr->heap[child];
    }
    tr->heap[i] = last;
    return top;
}

/* --- merging --------------------------------------------------------------------------------- */

/* Adds sign x count of each place of the word to its pairs; new pairs remember the word. `joined`:
 * only pairs that hold this id can be new (-1: any). */
static ith_status count_pairs(trainer *tr, int32_t word_idx, int sign, int32_t joined)
{
    const train_word word = tr->words[word_idx];
    for (int64_t i = word.begin; i + 1 < word.begin + word.len; i++) {
        int32_t left = tr->symbols[i], right = tr->symbols[i + 1], p = 0;
        ITH_TRY(find_pair(tr, left, right, &p));
        train_pair *pair = &tr->pairs[p];
        pair->count += sign * word.count;
        if (sign < 0 || (joined >= 0 && left != joined && right != joined) ||
            (pair->num_words > 0 && pair->words[pair->num_words - 1] == word_idx))
            continue;
        ITH_TRY(ith_grow((void **)&pair->words, &pair->cap_words, pair->num_words + 1, 4,
                         "training pairs", tr->err));
        pair->words[pair->num_words++] = word_idx;
    }
    return ITH_OK;
}

/* Joins left + right in one word, from the left. */
static bool join_word(trainer *tr, int32_t word_idx, int32_t left, int32_t right, int32_t joined)
{
    train_word *word = &tr->words[word_idx];
    int32_t *s = tr->symbols + word->begin, kept = 0;
    for (int32_t i = 0; i < word->len; i++) {
        bool hit = s[i] == left && i + 1 < word->len && s[i + 1] == right;
        s[kept++] = hit ? joined : s[i];
        i += hit;
    }
    bool changed = kept != word->len;
    word->len = kept;
    return changed;
}

static bool has_pair(const trainer *tr, int32_t word_idx, int32_t left, int32_t right)
{
    const train_word *word = &tr->words[word_idx];
    const int32_t *s = tr->symbols + word->begin;
    for (int32_t i = 0; i + 1 < word->len; i++)
        if (s[i] == left && s[i + 1] == right)
            return true;
    return false;
}

static ith_status push_joined_pairs(trainer *tr, int64_t first_pair)
{
    for (int64_t p = first_pair; p < tr->num_pairs; p++)
        if (tr->pairs[p].count > 1)
            ITH_TRY(heap_add(tr, (int32_t)p));
    return ITH_OK;
}

/* Every pair with the joined id is new when the id is; then it lies behind first_pair. When two
 * merges spell the same token, older pairs with its id grow too and are put on the heap again. */
static ith_status join_pair(trainer *tr, int32_t pair_idx, int32_t joined, bool is_new)
{
    train_pair pair = tr->pairs[pair_idx];
    int64_t first_pair = tr->num_pairs;
    for (int64_t k = 0; k < pair.num_words; k++) {
        int32_t w = pair.words[k];
        if (!has_pair(tr, w, pair.left, pair.right))
            continue;
        ITH_TRY(count_pairs(tr, w, -1, joined));
        bool changed = join_word(tr, w, pair.left, pair.right, joined);
        ITH_ASSERT(changed);
        ITH_TRY(count_pairs(tr, w, 1, joined));
    }
    ITH_ASSERT(tr->pairs[pair_idx].count == 0);
    for (int64_t p = 0; !is_new && p < first_pair; p++)
        if (tr->pairs[p].count > 1 && (tr->pairs[p].left == joined || tr->pairs[p].right == joined))
            ITH_TRY(heap_add(tr, (int32_t)p));
    return push_joined_pairs(tr, first_pair);
}

/* Id for left + right: a new token, or the one that is spelled so already. */
static ith_status joined_token(trainer *tr, int32_t left, int32_t right, int32_t *id, bool *is_new)
{
    const ith_token_row *a = &tr->vocab.rows[left], *b = &tr->vocab.rows[right];
    ith_buf bytes = {0}, spelling = {0};
    ith_buf_append(&bytes, a->bytes, a->len);
    ith_buf_append(&bytes, b->bytes, b->len);
    ith_status status = ith_buf_check(&bytes, "a token", tr->err);
    *is_new = false;
    if (status == ITH_OK && (*id = ith_vocab_find(&tr->vocab, bytes.data, bytes.len)) < 0) {
        for (int64_t i = 0; i < bytes.len; i++) {
            char out[4];
            int len = ith_utf8_encode(ith_alphabet_char((unsigned char)bytes.data[i]), out);
            ith_buf_append(&spelling, out, len);
        }
        *is_new = true;
        *id = (int32_t)tr->vocab.num_rows;
        status = ith_buf_check(&spelling, "a token", tr->err);
        if (status == ITH_OK)
            status = ith_vocab_add(&tr->vocab, spelling.data, spelling.len, *id, tr->err);
    }
    ith_buf_deinit(&bytes);
    ith_buf_deinit(&spelling);
    return status;
}

static ith_status learn(trainer *tr, int64_t num_tokens)
{
    for (int64_t w = 0; w < tr->num_words; w++)
        ITH_TRY(count_pairs(tr, (int32_t)w, 1, -1));
    ITH_TRY(push_joined_pairs(tr, 0));
    while (tr->vocab.num_rows < num_tokens && tr->heap_count > 0) {
        heap_entry top = heap_take(tr);
        train_pair pair = tr->pairs[top.pair];
        if (pair.count != top.count) {
            if (pair.count > 1 && pair.count < top.count)
                ITH_TRY(heap_add(tr, top.pair));
            continue;
        }
        int64_t len = (int64_t)tr->vocab.rows[pair.left].len + tr->vocab.rows[pair.right].len;
        if (len > 1024) /* a hostile run; no reader needs such a token */
            continue;
        int32_t id = 0;
        bool is_new = false;
        ITH_TRY(joined_token(tr, pair.left, pair.right, &id, &is_new));
        ITH_TRY(ith_grow((void **)&tr->merges, &tr->cap_merges, tr->num_merges + 2, 4, "merges",
                         tr->err));
        tr->merges[tr->num_merges++] = pair.left;
        tr->merges[tr->num_merges++] = pair.right;
        ITH_TRY(join_pair(tr, top.pair, id, is_new));
    }
    return ITH_OK;
}

/* --- reading the text ------------------------------------------------------------------------ */

/* Bytes get ids in the order of their characters in the alphabet, as in published vocabularies. */
static ith_status add_bytes(trainer *tr, int64_t num_tokens)
{
    ITH_TRY(ith_vocab_init(&tr->vocab, num_tokens, 0, tr->err));
    for (uint32_t c = 0; c < 0x144; c++)
        for (int byte = 0; byte < 256; byte++)
            if (ith_alphabet_char((unsigned char)byte) == c) {
                char out[4];
                int len = ith_utf8_encode(c, out);
                ITH_TRY(ith_vocab_add(&tr->vocab, out, len, tr->vocab.num_rows, tr->err));
            }
    ITH_ASSERT(tr->vocab.num_rows == 256);
    ith_vocab_finish(&tr->vocab);
    return ITH_OK;
}

static ith_status read_words(trainer *tr, const char *text, int64_t len)
{
    bool safe = true;
    ITH_TRY(ith_alloc((void **)&tr->classes, ITH_UC_TABLE_CHARS, "character classes", tr->err));
    ith_uc_fill(tr->classes);
    int64_t bad = ith_norm_check(tr->classes, text, len, &safe);
    if (bad >= 0)
        return ith_fail(tr->err, ITH_ERR_FORMAT, "training text: byte %lld is not valid UTF-8",
                        (long long)bad);
    if (!safe) {
        ITH_TRY(ith_norm_nfc(&tr->norm, tr->classes, text, len, tr->err));
        text = tr->norm.text.data;
        len = tr->norm.text.len;
    }
    ith_split_rule rule = {0};
    ITH_TRY(
        ith_split_compile(&rule, QWEN3_PATTERN, (int64_t)strlen(QWEN3_PATTERN), false, tr->err));
    ITH_ASSERT(rule.kind == ITH_SPLIT_WORDS);
    for (const char *p = text, *end = text + len, *next; p < end; p = next) {
        next = ith_split_word(&rule, tr->classes, p, end);
        ITH_TRY(count_word(tr, p, next - p));
    }
    return ITH_OK;
}

/* --- writing --------------------------------------------------------------------------------- */

static void put_string(ith_buf *out, const char *text, int64_t len)
{
    ith_buf_putc(out, '"');
    for (int64_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\')
            ith_buf_putc(out, '\\');
        if (c < 0x20)
            ith_buf_printf(out, "\\u%04x", c);
        else
            ith_buf_putc(out, (char)c);
    }
    ith_buf_putc(out, '"');
}

static void put_token(ith_buf *out, const trainer *tr, int32_t id)
{
    const ith_token_row *row = &tr->vocab.rows[id];
    ith_buf_putc(out, '"');
    for (int32_t i = 0; i < row->len; i++) {
        char bytes[4];
        uint32_t c = ith_alphabet_char((unsigned char)row->bytes[i]);
        if (c == '"' || c == '\\')
            ith_buf_putc(out, '\\');
        ith_buf_append(out, bytes, ith_utf8_encode(c, bytes));
    }
    ith_buf_putc(out, '"');
}

static bool is_special(const char *text)
{
    size_t len = strlen(text);
    return len > 4 && memcmp(text, "<|", 2) == 0 && memcmp(text + len - 2, "|>", 2) == 0;
}

static void put_added(ith_buf *out, const char *text, bool with_id, int64_t id)
{
    ith_buf_putc(out, '{');
    if (with_id)
        ith_buf_printf(out, "\"id\": %lld, ", (long long)id);
    ith_buf_puts(out, "\"content\": ");
    put_string(out, text, (int64_t)strlen(text));
    ith_buf_printf(out,
                   ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                   "\"normalized\": false, \"special\": %s}",
                   is_special(text) ? "true" : "false");
}

static void put_tokenizer(ith_buf *out, const trainer *tr, const char *const *special, int64_t n)
{
    static const char byte_level[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                                     "\"trim_offsets\": false, \"use_regex\": false}";
    ith_buf_puts(out, "{\n\"version\": \"1.0\",\n\"truncation\": null,\n\"padding\": null,\n"
                      "\"added_tokens\": [");
    for (int64_t i = 0; i < n; i++) {
        ith_buf_puts(out, i ? ",\n" : "\n");
        put_added(out, special[i], true, tr->vocab.num_rows + i);
    }
    ith_buf_puts(out, "],\n\"normalizer\": {\"type\": \"NFC\"},\n\"pre_tokenizer\": {\"type\": "
                      "\"Sequence\", \"pretokenizers\": [\n{\"type\": \"Split\", \"pattern\": "
                      "{\"Regex\": ");
    put_string(out, QWEN3_PATTERN, (int64_t)strlen(QWEN3_PATTERN));
    ith_buf_printf(out,
                   "}, \"behavior\": \"Isolated\", \"invert\": false},\n%s]},\n"
                   "\"post_processor\": %s,\n\"decoder\": %s,\n",
                   byte_level, byte_level, byte_level);
    ith_buf_puts(out, "\"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
                      "\"continuing_subword_prefix\": \"\", \"end_of_word_suffix\": \"\", "
                      "\"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": false,\n"
                      "\"vocab\": {");
    for (int64_t id = 0; id < tr->vocab.num_rows; id++) {
        ith_buf_puts(out, id ? ",\n" : "\n");
        put_token(out, tr, (int32_t)id);
        ith_buf_printf(out, ": %lld", (long long)id);
    }
    ith_buf_puts(out, "},\n\"merges\": [");
    for (int64_t i = 0; i < tr->num_merges; i += 2) {
        ith_buf_puts(out, i ? ",\n[" : "\n[");
        put_token(out, tr, tr->merges[i]);
        ith_buf_puts(out, ", ");
        put_token(out, tr, tr->merges[i + 1]);
        ith_buf_putc(out, ']');
    }
    ith_buf_puts(out, "]}\n}\n");
}

/* "key": "text" with the token that is `wanted`, else the first; null without tokens. */
static void put_named(ith_buf *out, const char *key, const char *wanted, const char *const *special,
                      int64_t n)
{
    const char *found = n ? special[0] : NULL;
    for (int64_t i = 0; i < n; i++)
        if (strcmp(special[i], wanted) == 0)
            found = special[i];
    ith_buf_printf(out, "\"%s\": ", key);
    if (found)
        put_string(out, found, (int64_t)strlen(found));
    else
        ith_buf_puts(out, "null");
    ith_buf_puts(out, ",\n");
}

static void put_config(ith_buf *out, const trainer *tr, const char *const *special, int64_t n)
{
    ith_buf_puts(out, "{\n\"add_bos_token\": false,\n\"add_prefix_space\": false,\n"
                      "\"added_tokens_decoder\": {");
    for (int64_t i = 0; i < n; i++) {
        ith_buf_printf(out, "%s\n\"%lld\": ", i ? "," : "", (long long)(tr->vocab.num_rows + i));
        put_added(out, special[i], false, 0);
    }
    ith_buf_puts(out, "},\n\"bos_token\": null,\n\"clean_up_tokenization_spaces\": false,\n");
    put_named(out, "eos_token", "<|im_end|>", special, n);
    put_named(out, "pad_token", "<|endoftext|>", special, n);
    ith_buf_puts(out, "\"errors\": \"replace\",\n\"model_max_length\": 131072,\n"
                      "\"split_special_tokens\": false,\n"
                      "\"tokenizer_class\": \"Qwen2Tokenizer\",\n\"unk_token\": null\n}\n");
}

static ith_status write_part(trainer *tr, const char *dir, const char *name, ith_buf *data)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    ith_status status = ith_buf_check(data, name, tr->err);
    if (status == ITH_OK)
        status = ith_buf_check(&path, name, tr->err);
    if (status == ITH_OK)
        status = ith_write_file(path.data, data->data, data->len, tr->err);
    ith_buf_deinit(&path);
    return status;
}

static ith_status write_files(trainer *tr, const char *dir, const char *const *special, int64_t n)
{
    ith_buf data = {0};
    ITH_TRY(ith_make_dirs(dir, tr->err));
    put_config(&data, tr, special, n);
    ith_status status = write_part(tr, dir, "tokenizer_config.json", &data);
    ith_buf_clear(&data);
    put_tokenizer(&data, tr, special, n);
    if (status == ITH_OK)
        status = write_part(tr, dir, "tokenizer.json", &data);
    ith_buf_deinit(&data);
    return status;
}

/* --- the whole ------------------------------------------------------------------------------- */

static ith_status check_special(const trainer *tr, const char *const *special, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t len = (int64_t)strlen(special[i]);
        if (len == 0)
            return ith_fail(tr->err, ITH_ERR_USAGE, "special token %lld is empty", (long long)i);
        for (int64_t k = 0; k < i; k++)
            if (strcmp(special[i], special[k]) == 0)
                return ith_fail(tr->err, ITH_ERR_USAGE, "special token '%.100s' is given twice",
                                special[i]);
        if (ith_vocab_find_spelling(&tr->vocab, special[i], len) >= 0)
            return ith_fail(tr->err, ITH_ERR_USAGE,
                            "special token '%.100s' is spelled like a learned token", special[i]);
    }
    return ITH_OK;
}

static void trainer_deinit(trainer *tr)
{
    for (int64_t i = 0; i < tr->num_pairs; i++)
        ith_free(tr->pairs[i].words);
    ith_free(tr->pairs);
    ith_free(tr->words);
    ith_free(tr->symbols);
    ith_free(tr->heap);
    ith_free(tr->merges);
    ith_free(tr->word_table.slots);
    ith_free(tr->pair_table.slots);
    ith_free(tr->classes);
    ith_norm_deinit(&tr->norm);
    ith_vocab_deinit(&tr->vocab);
}

ith_status ith_bpe_train(const char *text, int64_t len, int64_t vocab_size,
                         const char *const *special, int64_t num_special, const char *out_dir,
                         ith_error *err)
{
    int64_t num_tokens = vocab_size - num_special;
    if (num_special < 0 || num_tokens < 256 || vocab_size > ITH_TOKEN_MAX_ID)
        return ith_fail(
            err, ITH_ERR_USAGE,
            "vocab_size %lld: expected %lld (256 bytes and %lld special tokens) to %lld",
            (long long)vocab_size, (long long)(256 + num_special), (long long)num_special,
            (long long)ITH_TOKEN_MAX_ID);
    trainer tr = {.err = err};
    ith_status status;
    ITH_TRY_OUT(add_bytes(&tr, num_tokens));
    ITH_TRY_OUT(read_words(&tr, text, len));
    ITH_TRY_OUT(learn(&tr, num_tokens));
    ITH_TRY_OUT(check_special(&tr, special, num_special));
    ITH_TRY_OUT(write_files(&tr, out_dir, special, num_special));
out:
    trainer_deinit(&tr);
    return status;
}
