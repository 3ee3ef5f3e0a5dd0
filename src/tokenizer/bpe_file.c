/* bpe_file.c - the files of a model directory into an open tokenizer.
 *
 * tokenizer.json when it is there; else vocab.json + merges.txt, whose split rule follows from
 * tokenizer_class or model_type. tokenizer_config.json adds tokens and names eos and pad; where it
 * is silent, added_tokens.json and special_tokens_map.json of older directories are read.
 *
 * Every setting that changes ids is either built or refused by name. */
#include "tokenizer/tokenizer_internal.h"

#include "base/file.h"
#include "base/hash.h"
#include "base/json.h"

#include <stdlib.h>

#include <utf8proc.h>

typedef struct {
    ith_tokenizer *t;
    const char *dir;
    ith_buf path; /* of the file being read, for errors */
    ith_sha256 hash;
    ith_error *err;
} loader;

static const char QWEN2_PATTERN[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
static const char QWEN35_PATTERN[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
static const char GPT2_PATTERN[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* --- small helpers over jansson -------------------------------------------------------------- */

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static bool true_at(const json_t *object, const char *key)
{
    return json_is_true(json_object_get(object, key));
}

static bool absent(const json_t *value)
{
    return !value || json_is_null(value) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

static ith_status unsupported(ith_error *err, const char *key, const json_t *value,
                              const char *right)
{
    ith_buf text = {0};
    ith_json_dump(value, true, &text, NULL);
    ith_fail(err, ITH_ERR_UNSUPPORTED, "%s: %.200s is not supported (%s)", key,
             text.data ? text.data : "?", right);
    ith_buf_deinit(&text);
    return ITH_ERR_UNSUPPORTED;
}

static ith_status wrong_type(ith_error *err, const char *key, const json_t *value,
                             const char *expected)
{
    return ith_fail(err, ITH_ERR_FORMAT, "%s: found %s, expected %s", key,
                    ith_json_type_name(value), expected);
}

static bool set_path(loader *l, const char *name)
{
    ith_path_join(&l->path, l->dir, name);
    return !l->path.failed && ith_path_exists(l->path.data);
}

static void hash_part(loader *l, const char *name, const char *data, int64_t len)
{
    ith_sha256_update(&l->hash, name, (int64_t)strlen(name) + 1);
    ith_sha256_update(&l->hash, &len, (int64_t)sizeof len);
    if (len)
        ith_sha256_update(&l->hash, data, len);
}

/* --- added tokens ---------------------------------------------------------------------------- */

static bool spelled(const ith_token_row *row, const ith_added_token *a)
{
    char bytes[1024];
    if (row->is_text || a->len > (int32_t)sizeof bytes)
        return row->len == a->len && memcmp(row->bytes, a->text, (size_t)a->len) == 0;
    int64_t n = ith_alphabet_decode(a->text, a->len, bytes);
    return n == row->len && memcmp(row->bytes, bytes, (size_t)n) == 0;
}

/* Adds one token; the same token once more is fine and keeps its first flags. */
static ith_status add_token(loader *l, ith_added_token a, int64_t id)
{
    ith_tokenizer *t = l->t;
    if (a.len == 0 || a.len > ITH_TOKEN_MAX_BYTES || strlen(a.text) != (size_t)a.len)
        return ith_fail(l->err, ITH_ERR_FORMAT,
                        "added token %lld: content of 1 to %lld bytes without NUL expected",
                        (long long)id, (long long)ITH_TOKEN_MAX_BYTES);
    for (int64_t i = 0; i < t->num_added; i++) {
        bool same_text = strcmp(t->added[i].text, a.text) == 0;
        if (same_text && t->added[i].id == id)
            return ITH_OK;
        if (same_text || t->added[i].id == id)
            return ith_fail(l->err, ITH_ERR_FORMAT,
                            "added token '%.100s' has id %lld, and '%.100s' has id %d", a.text,
                            (long long)id, t->added[i].text, t->added[i].id);
    }
    int32_t known = ith_vocab_find_spelling(&t->vocab, a.text, a.len);
    ith_token_row *row = NULL;
    ITH_TRY(ith_vocab_row(&t->vocab, id, &row, l->err));
    if (known >= 0 ? known != id : row->bytes && !spelled(row, &a))
        return ith_fail(l->err, ITH_ERR_FORMAT,
                        "added token '%.100s' has id %lld, which the vocabulary gives to %s",
                        a.text, (long long)id, known >= 0 ? "another token" : row->bytes);
    a.text = ith_arena_strndup(&t->vocab.arena, a.text, a.len);
    if (!a.text)
        return ith_fail(l->err, ITH_ERR_MEMORY, "out of memory for added tokens");
    a.id = (int32_t)id;
    if (!row->bytes)
        *row = (ith_token_row){.bytes = a.text, .len = a.len, .is_text = true};
    row->is_added = true;
    row->is_special = a.special;
    ITH_TRY(ith_grow((void **)&t->added, &t->cap_added, t->num_added + 1, (int64_t)sizeof *t->added,
                     "added tokens", l->err));
    t->added[t->num_added++] = a;
    return ITH_OK;
}

static ith_status add_token_object(loader *l, const json_t *object, int64_t id)
{
    const json_t *content = json_object_get(object, "content");
    if (!json_is_string(content))
        return wrong_type(l->err, "added token: content", content, "a string");
    const json_t *normalized = json_object_get(object, "normalized");
    bool special = true_at(object, "special");
    ith_added_token a = {
        .text = json_string_value(content),
        .len = (int32_t)ith_min_i64((int64_t)json_string_length(content), INT32_MAX),
        .special = special,
        .normalized = normalized ? json_is_true(normalized) : !special,
        .lstrip = true_at(object, "lstrip"),
        .rstrip = true_at(object, "rstrip"),
        .single_word = true_at(object, "single_word"),
    };
    return add_token(l, a, id);
}

static int compare_id(const void *a, const void *b)
{
    const ith_added_token *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* Sorts the added tokens and builds the two search sets. */
static ith_status finish_added(loader *l)
{
    ith_tokenizer *t = l->t;
    if (t->num_added)
        qsort(t->added, (size_t)t->num_added, sizeof *t->added, compare_id);
    ITH_TRY(ith_alloc_zero((void **)&t->raw_set.sorted, t->num_added, (int64_t)sizeof(void *),
                           "added tokens", l->err));
    ITH_TRY(ith_alloc_zero((void **)&t->norm_set.sorted, t->num_added, (int64_t)sizeof(void *),
                           "added tokens", l->err));
    ith_norm norm = {0};
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < t->num_added; i++) {
        ith_added_token *a = &t->added[i];
        a->match_text = a->text;
        a->match_len = a->len;
        if (a->normalized && t->nfc) {
            ITH_TRY_OUT(ith_norm_nfc(&norm, t->classes, a->text, a->len, l->err));
            a->match_text = ith_arena_strndup(&t->vocab.arena, norm.text.data, norm.text.len);
            a->match_len = (int32_t)norm.text.len;
            if (!a->match_text) {
                status = ith_fail(l->err, ITH_ERR_MEMORY, "out of memory for added tokens");
                goto out;
            }
        }
        ith_added_set *set = a->normalized ? &t->norm_set : &t->raw_set;
        set->sorted[set->count++] = a;
    }
    ith_added_set_finish(&t->raw_set);
    ith_added_set_finish(&t->norm_set);
out:
    ith_norm_deinit(&norm);
    return status;
}

/* --- tokenizer.json -------------------------------------------------------------------------- */

static ith_status add_rule(loader *l, ith_split_rule **out)
{
    if (l->t->num_rules == ITH_MAX_SPLIT_RULES)
        return ith_fail(l->err, ITH_ERR_UNSUPPORTED, "more than %d split rules",
                        ITH_MAX_SPLIT_RULES);
    *out = &l->t->rules[l->t->num_rules++];
    return ITH_OK;
}

static ith_status add_pattern(loader *l, ith_split_rule *rule, const char *pattern, int64_t len)
{
    rule->text = ith_arena_strndup(&l->t->vocab.arena, pattern, len);
    rule->text_len = len;
    if (!rule->text)
        return ith_fail(l->err, ITH_ERR_MEMORY, "out of memory for a split pattern");
    return ith_split_compile(rule, rule->text, len, false, l->err);
}

static ith_status read_split(loader *l, const json_t *object)
{
    ith_split_rule *rule = NULL;
    ITH_TRY(add_rule(l, &rule));
    const json_t *pattern = json_object_get(object, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex");
    const json_t *text = json_object_get(pattern, "String");
    const char *behavior = text_of(object, "behavior");
    bool invert = true_at(object, "invert");
    if (strcmp(behavior, "Removed") == 0) {
        rule->drop_matches = !invert;
        rule->drop_gaps = invert;
    } else if (strcmp(behavior, "Isolated") != 0) {
        return unsupported(l->err, "pre_tokenizer Split: behavior",
                           json_object_get(object, "behavior"), "use Isolated or Removed");
    }
    if (json_is_string(regex))
        return add_pattern(l, rule, json_string_value(regex), (int64_t)json_string_length(regex));
    if (!json_is_string(text) || json_string_length(text) == 0)
        return wrong_type(l->err, "pre_tokenizer Split: pattern", pattern,
                          "{\"Regex\": ...} or {\"String\": ...}");
    rule->kind = ITH_SPLIT_TEXT;
    rule->text_len = (int64_t)json_string_length(text);
    rule->text = ith_arena_strndup(&l->t->vocab.arena, json_string_value(text), rule->text_len);
    return rule->text ? ITH_OK
                      : ith_fail(l->err, ITH_ERR_MEMORY, "out of memory for a split pattern");
}

/* One pre-tokenizer that is not a sequence; *to_bytes: it maps bytes to the alphabet. */
static ith_status read_pre_tokenizer(loader *l, const json_t *object, bool *to_bytes)
{
    const char *type = text_of(object, "type");
    if (*to_bytes)
        return unsupported(l->err, "pre_tokenizer", object, "nothing may follow ByteLevel");
    if (strcmp(type, "Split") == 0)
        return read_split(l, object);
    ith_split_rule *rule = NULL;
    if (strcmp(type, "Digits") == 0) {
        ITH_TRY(add_rule(l, &rule));
        rule->kind = ITH_SPLIT_DIGITS;
        rule->individual = true_at(object, "individual_digits");
        return ITH_OK;
    }
    if (strcmp(type, "ByteLevel") != 0)
        return unsupported(l->err, "pre_tokenizer", object,
                           "use Split, Digits, ByteLevel, or a Sequence of them");
    *to_bytes = true;
    const json_t *prefix = json_object_get(object, "add_prefix_space");
    if (!prefix || json_is_true(prefix))
        return unsupported(l->err, "pre_tokenizer ByteLevel: add_prefix_space", json_true(),
                           "use false");
    const json_t *use_regex = json_object_get(object, "use_regex");
    if (use_regex && !json_is_true(use_regex))
        return ITH_OK;
    ITH_TRY(add_rule(l, &rule));
    return add_pattern(l, rule, GPT2_PATTERN, (int64_t)strlen(GPT2_PATTERN));
}

static ith_status read_pre_tokenizers(loader *l, const json_t *value)
{
    bool to_bytes = false;
    if (strcmp(text_of(value, "type"), "Sequence") == 0) {
        size_t i;
        const json_t *item;
        json_array_foreach(json_object_get(value, "pretokenizers"), i, item)
            ITH_TRY(read_pre_tokenizer(l, item, &to_bytes));
    } else if (!absent(value)) {
        ITH_TRY(read_pre_tokenizer(l, value, &to_bytes));
    }
    if (!to_bytes)
        return ith_fail(l->err, ITH_ERR_UNSUPPORTED,
                        "pre_tokenizer: no ByteLevel; only byte-level BPE is supported");
    return ITH_OK;
}

static ith_status read_normalizer(loader *l, const json_t *value)
{
    const char *type = text_of(value, "type");
    if (absent(value))
        return ITH_OK;
    if (strcmp(type, "NFC") == 0) {
        l->t->nfc = true;
        return ITH_OK;
    }
    const json_t *items = json_object_get(value, "normalizers"), *item;
    bool all = strcmp(type, "Sequence") == 0 && json_is_array(items);
    size_t i;
    json_array_foreach(items, i, item) all = all && strcmp(text_of(item, "type"), "NFC") == 0;
    if (!all)
        return unsupported(l->err, "normalizer", value, "use NFC or none");
    l->t->nfc = json_array_size(items) > 0;
    return ITH_OK;
}

static ith_status read_decoder(loader *l, const json_t *value)
{
    if (absent(value) || strcmp(text_of(value, "type"), "ByteLevel") == 0)
        return ITH_OK;
    const json_t *items = json_object_get(value, "decoders");
    if (json_array_size(items) == 1 &&
        strcmp(text_of(json_array_get(items, 0), "type"), "ByteLevel") == 0)
        return ITH_OK;
    return unsupported(l->err, "decoder", value, "use ByteLevel");
}

static ith_status read_model(loader *l, const json_t *model)
{
    const json_t *type = json_object_get(model, "type");
    if (!json_is_object(model))
        return wrong_type(l->err, "model", model, "an object");
    if (type && strcmp(text_of(model, "type"), "BPE") != 0)
        return unsupported(l->err, "model: type", type, "use BPE");
    static const char *const must_be_empty[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (int i = 0; i < 2; i++)
        if (!absent(json_object_get(model, must_be_empty[i])))
            return unsupported(l->err, must_be_empty[i], json_object_get(model, must_be_empty[i]),
                               "leave it empty");
    if (true_at(model, "byte_fallback"))
        return unsupported(l->err, "byte_fallback", json_true(),
                           "a byte-level vocabulary covers every byte");
    const json_t *dropout = json_object_get(model, "dropout");
    if (json_is_number(dropout) && json_number_value(dropout) > 0)
        return unsupported(l->err, "dropout", dropout, "ids would be random");
    l->t->ignore_merges = true_at(model, "ignore_merges");
    return ITH_OK;
}

static ith_status read_added_tokens(loader *l, const json_t *list)
{
    size_t i;
    const json_t *item;
    if (!absent(list) && !json_is_array(list))
        return wrong_type(l->err, "added_tokens", list, "an array");
    json_array_foreach(list, i, item)
    {
        const json_t *id = json_object_get(item, "id");
        if (!json_is_integer(id))
            return wrong_type(l->err, "added token: id", id, "an integer");
        ITH_TRY(add_token_object(l, item, json_integer_value(id)));
    }
    return ITH_OK;
}

static void put_blank(ith_buf *out, const char *text, int64_t len, bool in_place)
{
    for (int64_t i = 0; in_place && i < len; i++)
        ith_buf_putc(out, text[i] == '\n' ? '\n' : ' ');
}

/* Everything but what the scanner reads: the two spans are left empty, or, in place, filled with
 * blanks, so that places in errors are right. */
static ith_status parse_without(loader *l, const ith_map *map, ith_span vocab, ith_span merges,
                                bool in_place, json_t **out)
{
    ith_buf rest = {0};
    ith_span spans[2] = {vocab.begin < merges.begin ? vocab : merges,
                         vocab.begin < merges.begin ? merges : vocab};
    int64_t at = 0;
    for (int i = 0; i < 2; i++) {
        const char *c = map->data + spans[i].begin;
        if (spans[i].begin == spans[i].end || (*c != '{' && *c != '['))
            continue;
        ith_buf_append(&rest, map->data + at, spans[i].begin + 1 - at);
        at = spans[i].end - 1;
        put_blank(&rest, map->data + spans[i].begin + 1, at - spans[i].begin - 1, in_place);
    }
    ith_buf_append(&rest, map->data + at, map->size - at);
    ith_status status = ith_buf_check(&rest, "tokenizer.json", l->err);
    if (status == ITH_OK)
        status = ith_json_parse(out, rest.data, rest.len, l->path.data, l->err);
    ith_buf_deinit(&rest);
    return status;
}

static ith_status parse_rest(loader *l, const ith_map *map, ith_span vocab, ith_span merges,
                             json_t **out)
{
    ith_status status = parse_without(l, map, vocab, merges, false, out);
    if (status != ITH_ERR_FORMAT)
        return status;
    ith_error_clear(l->err);
    return parse_without(l, map, vocab, merges, true, out);
}

static ith_status read_tables(loader *l, const ith_map *map, ith_span vocab, ith_span merges)
{
    ith_vocab *v = &l->t->vocab;
    ITH_TRY(ith_vocab_init(v, ith_scan_count(map->data, vocab), ith_scan_count(map->data, merges),
                           l->err));
    ITH_TRY(ith_scan_vocab(v, map->data, vocab, l->path.data, l->err));
    return ith_scan_merges(v, map->data, merges, l->path.data, l->err);
}

static ith_status read_json_parts(loader *l, const json_t *root)
{
    ITH_TRY(read_model(l, json_object_get(root, "model")));
    ITH_TRY(read_normalizer(l, json_object_get(root, "normalizer")));
    ITH_TRY(read_pre_tokenizers(l, json_object_get(root, "pre_tokenizer")));
    ITH_TRY(read_decoder(l, json_object_get(root, "decoder")));
    return read_added_tokens(l, json_object_get(root, "added_tokens"));
}

static ith_status load_json(loader *l)
{
    ith_map map;
    json_t *root = NULL;
    ITH_TRY(ith_map_open(&map, l->path.data, l->err));
    ith_span vocab = {0}, merges = {0};
    bool found = ith_scan_find(map.data, map.size, &vocab, &merges);
    if (!found)
        vocab = merges = (ith_span){0};
    ith_status status;
    ITH_TRY_OUT(parse_rest(l, &map, vocab, merges, &root));
    if (!found || vocab.begin == vocab.end || merges.begin == merges.end) {
        /* What is wrong with the model itself says more than a missing key. */
        status = read_model(l, json_object_get(root, "model"));
        if (status == ITH_OK)
            status = ith_fail(l->err, ITH_ERR_FORMAT,
                              "model: one vocab and one merges expected (byte-level BPE)");
        ith_wrap(l->err, status, "%s", l->path.data);
        goto out;
    }
    hash_part(l, "tokenizer.json", map.data, map.size);
    ITH_TRY_OUT(read_tables(l, &map, vocab, merges));
    status = read_json_parts(l, root);
    if (status != ITH_OK)
        ith_wrap(l->err, status, "%s", l->path.data);
out:
    json_decref(root);
    ith_map_close(&map);
    return status;
}

/* --- vocab.json + merges.txt ----------------------------------------------------------------- */

static ith_status read_merges_line(loader *l, const char *line, int64_t len, int64_t number)
{
    const char *space = memchr(line, ' ', (size_t)len);
    ith_status status = ITH_ERR_FORMAT;
    if (!space || memchr(space + 1, ' ', (size_t)(line + len - space - 1)))
        ith_fail(l->err, status, "found '%.*s', expected two tokens with one space between",
                 (int)ith_min_i64(len, 100), line);
    else
        status = ith_vocab_add_merge(&l->t->vocab, line, space - line, space + 1,
                                     line + len - space - 1, l->err);
    return status == ITH_OK ? ITH_OK
                            : ith_wrap(l->err, status, "%s:%lld", l->path.data, (long long)number);
}

static ith_status read_merges(loader *l, const ith_map *map)
{
    const char *p = map->data, *end = p + map->size;
    for (int64_t number = 1; p < end; number++) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        const char *line = p;
        p = stop ? stop + 1 : end;
        int64_t len = (stop ? stop : end) - line;
        if (len > 0 && line[len - 1] == '\r')
            len--;
        if (len > 0 && !(number == 1 && len >= 8 && memcmp(line, "#version", 8) == 0))
            ITH_TRY(read_merges_line(l, line, len, number));
    }
    return ITH_OK;
}

static int64_t count_lines(const ith_map *map)
{
    int64_t lines = 1;
    for (int64_t i = 0; i < map->size; i++)
        lines += map->data[i] == '\n';
    return lines;
}

static ith_status load_vocab(loader *l)
{
    ith_map vocab = {0}, merges = {0};
    ITH_TRY(ith_map_open(&vocab, l->path.data, l->err));
    ith_status status = ITH_OK;
    set_path(l, "merges.txt");
    ITH_TRY_OUT(ith_map_open(&merges, l->path.data, l->err));
    ith_span span = {0, vocab.size};
    if (vocab.size >= 3 && memcmp(vocab.data, "\xef\xbb\xbf", 3) == 0)
        span.begin = 3;
    ITH_TRY_OUT(ith_vocab_init(&l->t->vocab, ith_scan_count(vocab.data, span), count_lines(&merges),
                               l->err));
    hash_part(l, "vocab.json", vocab.data, vocab.size);
    hash_part(l, "merges.txt", merges.data, merges.size);
    set_path(l, "vocab.json");
    ITH_TRY_OUT(ith_scan_vocab(&l->t->vocab, vocab.data, span, l->path.data, l->err));
    set_path(l, "merges.txt");
    status = read_merges(l, &merges);
out:
    ith_map_close(&vocab);
    ith_map_close(&merges);
    return status;
}

static const struct {
    const char *name; /* tokenizer_class without "Fast", or model_type */
    const char *pattern;
    bool nfc;
} known_classes[] = {
    {"Qwen2Tokenizer", QWEN2_PATTERN, true}, {"qwen2", QWEN2_PATTERN, true},
    {"qwen2_moe", QWEN2_PATTERN, true},      {"qwen3", QWEN2_PATTERN, true},
    {"qwen3_moe", QWEN2_PATTERN, true},      {"Qwen3_5Tokenizer", QWEN35_PATTERN, true},
    {"qwen3_5", QWEN35_PATTERN, true},       {"qwen3_5_text", QWEN35_PATTERN, true},
    {"qwen3_5_moe", QWEN35_PATTERN, true},   {"qwen3_5_moe_text", QWEN35_PATTERN, true},
    {"GPT2Tokenizer", GPT2_PATTERN, false},  {"gpt2", GPT2_PATTERN, false},
};

/* The split rule of a directory without tokenizer.json. */
static ith_status rule_of_class(loader *l, const char *name)
{
    size_t len = strlen(name);
    if (len > 4 && strcmp(name + len - 4, "Fast") == 0)
        len -= 4;
    for (size_t i = 0; i < sizeof known_classes / sizeof known_classes[0]; i++)
        if (strlen(known_classes[i].name) == len && memcmp(known_classes[i].name, name, len) == 0) {
            ith_split_rule *rule = NULL;
            l->t->nfc = known_classes[i].nfc;
            hash_part(l, "class", name, (int64_t)len);
            ITH_TRY(add_rule(l, &rule));
            return add_pattern(l, rule, known_classes[i].pattern,
                               (int64_t)strlen(known_classes[i].pattern));
        }
    return ith_fail(l->err, ITH_ERR_UNSUPPORTED,
                    "%s: vocab.json and merges.txt do not say how text is split, and neither does "
                    "tokenizer_class or model_type '%.100s'; put the model's tokenizer.json here",
                    l->dir, name);
}

/* --- tokenizer_config.json and the older files ----------------------------------------------- */

/* *out = NULL when the file is not there. */
static ith_status load_optional(loader *l, const char *name, json_t **out)
{
    *out = NULL;
    if (!set_path(l, name))
        return ITH_OK;
    ITH_TRY(ith_json_load(out, l->path.data, l->err));
    if (json_is_object(*out))
        return ITH_OK;
    ith_status status = ith_fail(l->err, ITH_ERR_FORMAT, "%s: found %s, expected an object",
                                 l->path.data, ith_json_type_name(*out));
    json_decref(*out);
    *out = NULL;
    return status;
}

static ith_status read_added_decoder(loader *l, const json_t *config)
{
    json_t *decoder = json_object_get(config, "added_tokens_decoder"), *value;
    const char *key;
    if (!absent(decoder) && !json_is_object(decoder))
        return wrong_type(l->err, "added_tokens_decoder", decoder, "an object");
    json_object_foreach(decoder, key, value)
    {
        char *end = NULL;
        long long id = key[0] >= '0' && key[0] <= '9' ? strtoll(key, &end, 10) : -1;
        if (id < 0 || *end)
            return ith_fail(l->err, ITH_ERR_FORMAT, "added_tokens_decoder: key '%.40s' is no id",
                            key);
        ITH_WRAP(add_token_object(l, value, id), l->err, "added_tokens_decoder");
    }
    return ITH_OK;
}

/* A token given as "text" or {"content": "text"}; NULL when absent. */
static const char *token_text(const json_t *value)
{
    return json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
}

static bool names_token(const json_t *object, const char *text)
{
    static const char *const keys[] = {"eos_token", "pad_token", "bos_token", "unk_token"};
    for (int i = 0; i < 4; i++) {
        const char *name = token_text(json_object_get(object, keys[i]));
        if (name && strcmp(name, text) == 0)
            return true;
    }
    size_t i;
    const json_t *item;
    json_array_foreach(json_object_get(object, "additional_special_tokens"), i, item)
    {
        const char *name = token_text(item);
        if (name && strcmp(name, text) == 0)
            return true;
    }
    return false;
}

/* added_tokens.json: {"text": id}; special are those that the other two files name. */
static ith_status read_added_json(loader *l, const json_t *config, const json_t *special_map)
{
    json_t *added, *value;
    const char *text;
    ITH_TRY(load_optional(l, "added_tokens.json", &added));
    ith_status status = ITH_OK;
    json_object_foreach(added, text, value)
    {
        ith_added_token a = {.text = text,
                             .len = (int32_t)ith_min_i64((int64_t)strlen(text), INT32_MAX),
                             .special =
                                 names_token(config, text) || names_token(special_map, text)};
        a.normalized = !a.special;
        status = json_is_integer(value) ? add_token(l, a, json_integer_value(value))
                                        : wrong_type(l->err, text, value, "an id");
        if (status != ITH_OK) {
            ith_wrap(l->err, status, "%s", l->path.data);
            break;
        }
    }
    json_decref(added);
    return status;
}

static ith_status find_named(loader *l, const char *key, const json_t *config, const json_t *map,
                             int32_t *out)
{
    const json_t *value = json_object_get(config, key);
    if (absent(value))
        value = json_object_get(map, key);
    if (absent(value))
        return ITH_OK;
    const char *text = token_text(value);
    if (!text)
        return wrong_type(l->err, key, value, "a string or an object with content");
    int32_t id = ith_tokenizer_find(l->t, text);
    if (id < 0)
        return ith_fail(l->err, ITH_ERR_FORMAT,
                        "%s: '%.100s' is neither an added token nor in the vocabulary", key, text);
    *out = id;
    return ITH_OK;
}

static ith_status read_config(loader *l, const json_t *config, const json_t *special_map,
                              bool from_vocab)
{
    if (true_at(config, "split_special_tokens"))
        return unsupported(l->err, "split_special_tokens", json_true(), "use false");
    if (from_vocab && true_at(config, "add_prefix_space"))
        return unsupported(l->err, "add_prefix_space", json_true(), "use false");
    ITH_TRY(read_added_decoder(l, config));
    if (from_vocab && absent(json_object_get(config, "added_tokens_decoder")))
        ITH_TRY(read_added_json(l, config, special_map));
    ITH_TRY(find_named(l, "eos_token", config, special_map, &l->t->eos));
    return find_named(l, "pad_token", config, special_map, &l->t->pad);
}

static ith_status class_from_files(loader *l, const json_t *config)
{
    const char *name = text_of(config, "tokenizer_class");
    json_t *model = NULL;
    if (!*name || strcmp(name, "PreTrainedTokenizerFast") == 0) {
        ITH_TRY(load_optional(l, "config.json", &model));
        name = text_of(model, "model_type");
    }
    ith_status status = rule_of_class(l, name);
    json_decref(model);
    return status;
}

static ith_status load_config(loader *l, bool from_vocab)
{
    json_t *config = NULL, *special_map = NULL;
    ith_status status;
    ITH_TRY_OUT(load_optional(l, "special_tokens_map.json", &special_map));
    ITH_TRY_OUT(load_optional(l, "tokenizer_config.json", &config));
    if (from_vocab)
        ITH_TRY_OUT(class_from_files(l, config));
    set_path(l, "tokenizer_config.json");
    status = read_config(l, config, special_map, from_vocab);
    if (status != ITH_OK)
        ith_wrap(l->err, status, "%s", l->path.data);
out:
    json_decref(config);
    json_decref(special_map);
    return status;
}

/* --- the whole ------------------------------------------------------------------------------- */

static void finish_hash(loader *l)
{
    ith_tokenizer *t = l->t;
    for (int64_t i = 0; i < t->num_added; i++) {
        const ith_added_token *a = &t->added[i];
        int32_t flags[] = {a->id, a->special, a->normalized, a->lstrip, a->rstrip, a->single_word};
        hash_part(l, a->text, (const char *)flags, (int64_t)sizeof flags);
    }
    for (int i = 0; i < t->num_rules; i++)
        if (t->rules[i].kind == ITH_SPLIT_REGEX) {
            char version[32];
            ith_split_version(version);
            hash_part(l, "regex unicode", version, (int64_t)strlen(version));
        }
    if (t->nfc)
        hash_part(l, "nfc unicode", utf8proc_unicode_version(),
                  (int64_t)strlen(utf8proc_unicode_version()));
    ith_sha256_hex(&l->hash, t->hash);
}

static ith_status load_all(loader *l)
{
    bool from_vocab = false;
    if (set_path(l, "tokenizer.json")) {
        ITH_TRY(load_json(l));
    } else if (set_path(l, "vocab.json")) {
        from_vocab = true;
        ITH_TRY(load_vocab(l));
    } else {
        ITH_TRY(ith_buf_check(&l->path, "path", l->err));
        return ith_fail(l->err, ITH_ERR_IO,
                        "%s: no tokenizer here (tokenizer.json, or vocab.json with merges.txt)",
                        l->dir);
    }
    ITH_TRY(load_config(l, from_vocab));
    ith_vocab_finish(&l->t->vocab);
    ITH_TRY(ith_vocab_find_chars(&l->t->vocab, l->err));
    ITH_TRY(finish_added(l));
    finish_hash(l);
    return ITH_OK;
}

ith_status ith_tokenizer_load(ith_tokenizer *t, const char *model_dir, ith_error *err)
{
    loader l = {.t = t, .dir = model_dir, .err = err};
    ith_sha256_init(&l.hash);
    static const char version[] = "ithaca byte-level BPE, 1";
    hash_part(&l, version, NULL, 0);
    ith_status status = load_all(&l);
    ith_buf_deinit(&l.path);
    return status;
}
