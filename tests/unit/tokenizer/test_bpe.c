/* The parts of the tokenizer against plain references: split rules against PCRE2, merging against
 * the definition, NFC against utf8proc on the whole text, the alphabet against its inverse. */
#include "testing.h"

#include "tokenizer/tokenizer_internal.h"

#include <time.h>
#include <utf8proc.h>

static uint64_t rng_state = 88172645463325252u;

static uint32_t next_random(uint32_t below)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return (uint32_t)((rng_state >> 20) % below);
}

static uint8_t *fill_classes(void)
{
    uint8_t *table = ith_malloc(ITH_UC_TABLE_CHARS);
    assert_non_null(table);
    ith_uc_fill(table);
    return table;
}

/* Letters, contractions, white space of all kinds, marks, digits, jamo, signs, emoji; and any
 * character at all. Characters newer than Unicode 13 are left out when the libraries are the
 * reference: their tables may be older. */
static const uint32_t pool_chars[] = {
    'a',    'B',    's',     'S',     't',     'r',     'e',    'v',    'm',    'l',
    'L',    'd',    '\'',    '\'',    ' ',     ' ',     '\t',   '\n',   '\r',   0x0b,
    0x1c,   0x85,   0xa0,    0x180e,  0x2028,  0x3000,  '0',    '9',    0x663,  0xbd,
    0x2177, '.',    '<',     '|',     '=',     '_',     0xe9,   0x17f,  0x212a, 0x130,
    0x301,  0x323,  0x338,   0x345,   0x93c,   0xe33,   0xe31,  0x5b0,  0x5bc,  0x5d0,
    0x4f60, 0xff0c, 0xac00,  0x1100,  0x1161,  0x11a8,  0x958,  0xf900, 0x344,  0x1f600,
    0x200d, 0xfe0f, 0x1d15e, 0x2f800, 0xe0100, 0x30000, 0xfdd0, 0x0,
};

static void random_text(ith_buf *out, int max_chars, bool any)
{
    ith_buf_clear(out);
    int n = (int)next_random((uint32_t)max_chars);
    for (int i = 0; i < n; i++) {
        uint32_t c = pool_chars[next_random(sizeof pool_chars / sizeof pool_chars[0])];
        if (any && next_random(8) == 0)
            c = next_random(2) ? next_random(0x3000) : next_random(0x110000);
        if (c >= 0xd800 && c <= 0xdfff)
            c = '?';
        char bytes[4];
        ith_buf_append(out, bytes, ith_utf8_encode(c, bytes));
    }
    ith_buf_append(out, "", 0);
}

#define TAIL "|\\s+(?!\\S)|\\s+"
static const char *const word_patterns[] = {
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+" TAIL,
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" TAIL,
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" TAIL,
    "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*"
    "|\\s*[\\r\\n]" TAIL,
};

/* The hand-written matcher gives the pieces that the pattern gives in PCRE2. */
static void test_split_words_equals_pattern(void **state)
{
    (void)state;
    ith_error err = {0};
    uint8_t *classes = fill_classes();
    ith_split_scratch scratch = {0};
    ith_buf text = {0};
    for (int k = 0; k < 4; k++) {
        ith_split_rule fast = {0}, slow = {.text = word_patterns[k]};
        int64_t len = (int64_t)strlen(word_patterns[k]);
        assert_ok(ith_split_compile(&fast, word_patterns[k], len, false, &err), err);
        assert_ok(ith_split_compile(&slow, word_patterns[k], len, true, &err), err);
        assert_int_equal(fast.kind, ITH_SPLIT_WORDS);
        assert_int_equal(slow.kind, ITH_SPLIT_REGEX);
        ith_pieces a = {0}, b = {0};
        for (int round = 0; round < 20000; round++) {
            random_text(&text, 24, false);
            a.count = b.count = 0;
            assert_ok(ith_split_apply(&fast, classes, &scratch, text.data, 0, text.len, &a, &err),
                      err);
            assert_ok(ith_split_apply(&slow, classes, &scratch, text.data, 0, text.len, &b, &err),
                      err);
            if (a.count != b.count ||
                (a.count && memcmp(a.pieces, b.pieces, (size_t)a.count * sizeof *a.pieces) != 0))
                fail_msg("pattern %d, '%s': %ld and %ld pieces, first ends %ld and %ld", k,
                         text.data, (long)a.count, (long)b.count, (long)a.pieces[0].end,
                         (long)b.pieces[0].end);
        }
        ith_free(a.pieces);
        ith_free(b.pieces);
        ith_split_deinit(&fast);
        ith_split_deinit(&slow);
    }
    ith_split_scratch_deinit(&scratch);
    ith_buf_deinit(&text);
    ith_free(classes);
}

/* The pieces of one rule, joined with '/'. */
static void assert_pieces(ith_split_rule *rule, const char *text, const char *want)
{
    ith_error err = {0};
    uint8_t *classes = fill_classes();
    ith_split_scratch scratch = {0};
    ith_pieces pieces = {0};
    ith_buf got = {0};
    assert_ok(
        ith_split_apply(rule, classes, &scratch, text, 0, (int64_t)strlen(text), &pieces, &err),
        err);
    for (int64_t i = 0; i < pieces.count; i++) {
        ith_buf_puts(&got, i ? "/" : "");
        ith_buf_append(&got, text + pieces.pieces[i].begin,
                       pieces.pieces[i].end - pieces.pieces[i].begin);
    }
    assert_string_equal(got.data ? got.data : "", want);
    ith_buf_deinit(&got);
    ith_free(pieces.pieces);
    ith_split_scratch_deinit(&scratch);
    ith_free(classes);
}

static void test_split_other_rules(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        bool drop_matches, drop_gaps;
        const char *text, *want;
    } cases[] = {
        {"\\p{N}{1,3}", false, false, "a12345b", "a/123/45/b"},
        {"\\s", true, false, "a b\tc ", "a/b/c"},
        {"[a-z]+", false, true, "1ab2cd3", "ab/cd"},
        {"(?=x)", false, false, "axbx", "a/xb/x"}, /* empty matches cut */
        {"\\w+", false, false, "ab\xcc\x81 c_d!", "ab\xcc\x81/ /c_d/!"},
        {"\\S+", true, false, "ab cd", " "},
        {"[^\\s]+", true, false,
         "a\xe1\xa0\x8e"
         "b c",
         " "}, /* U+180E is no white space */
        {"(?i:k)", false, false, "aKb", "a/K/b"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ith_error err = {0};
        ith_split_rule rule = {.drop_matches = cases[i].drop_matches,
                               .drop_gaps = cases[i].drop_gaps,
                               .text = cases[i].pattern};
        assert_ok(ith_split_compile(&rule, cases[i].pattern, (int64_t)strlen(cases[i].pattern),
                                    false, &err),
                  err);
        assert_pieces(&rule, cases[i].text, cases[i].want);
        ith_split_deinit(&rule);
    }
    ith_split_rule fixed = {.kind = ITH_SPLIT_TEXT, .text = "--", .text_len = 2};
    assert_pieces(&fixed, "a--b---", "a/--/b/--/-");
    ith_split_rule digits = {.kind = ITH_SPLIT_DIGITS, .individual = true};
    assert_pieces(&digits, "a12b\xd9\xa3", "a/1/2/b/\xd9\xa3");
    digits.individual = false;
    assert_pieces(&digits, "a12b", "a/12/b");
}

/* Syntax that PCRE2 would read as something else is refused, and the pattern is quoted. */
static void test_split_refuses_other_meanings(void **state)
{
    (void)state;
    static const char *const patterns[] = {
        "[\\p{L}&&[^a]]", "[a[b]]",  "\\h+", "a\\b",  "[\\S]", "x{1,2}+",
        "(?m:.)",         "(*UCP)a", "\\",   "\\p{L", "[a",    "(a",
    };
    for (size_t i = 0; i < sizeof patterns / sizeof patterns[0]; i++) {
        ith_error err = {0};
        ith_split_rule rule = {0};
        ith_status status =
            ith_split_compile(&rule, patterns[i], (int64_t)strlen(patterns[i]), false, &err);
        if (status == ITH_OK || !strstr(err.text, patterns[i]))
            fail_msg("'%s': status %d, '%s'", patterns[i], (int)status, err.text);
        ith_split_deinit(&rule);
    }
}

/* A pattern that backtracks without end fails with a message, in bounded time. */
static void test_split_catastrophic_pattern_ends(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_split_rule rule = {.text = "(?:a|aa)+[!?]"};
    assert_ok(ith_split_compile(&rule, rule.text, (int64_t)strlen(rule.text), false, &err), err);
    char text[4001];
    memset(text, 'a', 4000);
    text[4000] = '\0';
    uint8_t *classes = fill_classes();
    ith_split_scratch scratch = {0};
    ith_pieces pieces = {0};
    assert_fails(ith_split_apply(&rule, classes, &scratch, text, 0, 4000, &pieces, &err), err,
                 ITH_ERR_RUN, "split pattern");
    ith_free(pieces.pieces);
    ith_split_scratch_deinit(&scratch);
    ith_split_deinit(&rule);
    ith_free(classes);
}

/* --- NFC ------------------------------------------------------------------------------------- */

static void test_nfc_equals_utf8proc(void **state)
{
    (void)state;
    ith_error err = {0};
    uint8_t *classes = fill_classes();
    ith_buf text = {0};
    ith_norm norm = {0};
    for (int round = 0; round < 100000; round++) {
        random_text(&text, 12, false);
        utf8proc_uint8_t *want = NULL;
        utf8proc_ssize_t len = utf8proc_map((const utf8proc_uint8_t *)text.data, text.len, &want,
                                            UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        assert_true(len >= 0);
        bool safe = false;
        assert_int_equal(ith_norm_check(classes, text.data, text.len, &safe), -1);
        assert_ok(ith_norm_nfc(&norm, classes, text.data, text.len, &err), err);
        bool equal = norm.text.len == len && memcmp(norm.text.data, want, (size_t)len) == 0;
        if (!equal || (safe && norm.num_changes))
            fail_msg("'%s': '%s', expected '%s'", text.data, norm.text.data, (char *)want);
        free(want);
    }
    ith_norm_deinit(&norm);
    ith_buf_deinit(&text);
    ith_free(classes);
}

/* Every normalized character maps to a range of the original whose NFC holds it. */
static void test_nfc_map_tiles_the_original(void **state)
{
    (void)state;
    ith_error err = {0};
    uint8_t *classes = fill_classes();
    ith_buf text = {0};
    ith_norm norm = {0};
    for (int round = 0; round < 20000; round++) {
        random_text(&text, 12, true);
        assert_ok(ith_norm_nfc(&norm, classes, text.data, text.len, &err), err);
        int64_t reached = 0;
        for (const char *p = norm.text.data, *end = p + norm.text.len; p < end;) {
            int64_t begin = p - norm.text.data, from = -1, to = -1;
            ith_utf8_next(&p);
            ith_norm_map(&norm, begin, p - norm.text.data, &from, &to);
            if (from > reached || to < reached || to <= from)
                fail_msg("'%s': character at %ld maps to [%ld, %ld) after %ld", text.data,
                         (long)begin, (long)from, (long)to, (long)reached);
            reached = to;
        }
        assert_int_equal(reached, text.len);
    }
    ith_norm_deinit(&norm);
    ith_buf_deinit(&text);
    ith_free(classes);
}

/* A text of marks only, in the worst order, is sorted in linear time. */
static void test_nfc_long_run_of_marks(void **state)
{
    (void)state;
    ith_error err = {0};
    uint8_t *classes = fill_classes();
    ith_buf text = {0};
    ith_norm norm = {0};
    for (int i = 0; i < 500000; i++)
        ith_buf_puts(&text, i % 2 ? "\xcc\xa3" : "\xcc\x81"); /* dot below (220), acute (230) */
    clock_t start = clock();
    assert_ok(ith_norm_nfc(&norm, classes, text.data, text.len, &err), err);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    assert_int_equal(norm.text.len, text.len);
    assert_memory_equal(norm.text.data, "\xcc\xa3\xcc\xa3", 4);
    assert_memory_equal(norm.text.data + norm.text.len - 4, "\xcc\x81\xcc\x81", 4);
    if (seconds > 20)
        fail_msg("%.1f s for 500,000 marks", seconds);
    ith_norm_deinit(&norm);
    ith_buf_deinit(&text);
    ith_free(classes);
}

static void test_invalid_utf8_is_found(void **state)
{
    (void)state;
    uint8_t *classes = fill_classes();
    static const struct {
        const char *text;
        int64_t at;
    } cases[] = {
        {"abcdefgh\xff", 8}, {"\xc0\x80", 0},         {"a\xed\xa0\x80", 1},
        {"\xe4\xbd", 0},     {"\xf4\x90\x80\x80", 0}, {"ok \xf0\x9f\x98\x80", -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool safe = false;
        assert_int_equal(
            ith_norm_check(classes, cases[i].text, (int64_t)strlen(cases[i].text), &safe),
            cases[i].at);
    }
    ith_free(classes);
}

/* --- merging --------------------------------------------------------------------------------- */

/* The definition: join the pair of lowest rank, leftmost first, until there is none. */
static int64_t merge_by_definition(const ith_vocab *v, const char *text, int64_t n, int32_t *ids)
{
    for (int64_t i = 0; i < n; i++)
        ids[i] = v->byte_id[(unsigned char)text[i]];
    for (;;) {
        const ith_merge *best = NULL;
        int64_t at = -1;
        for (int64_t i = 0; i + 1 < n; i++) {
            const ith_merge *m = ith_vocab_merge(v, ids[i], ids[i + 1]);
            if (m && (!best || m->rank < best->rank)) {
                best = m;
                at = i;
            }
        }
        if (!best)
            return n;
        ids[at] = best->id;
        memmove(ids + at + 1, ids + at + 2, (size_t)(n - at - 2) * 4);
        n--;
    }
}

/* Few letters in many orders: `wide` of two and three bytes, else of one. */
static void put_letter(ith_buf *text, bool wide)
{
    /* the first six: e4 .. 80, so that the border 80|e4 is more frequent than any character */
    static const char *const letters[] = {"\u4e00", "\u4e40", "\u4e80", "\u4ec0",
                                          "\u4f00", "\u4f40", "\u03b1", "\u0439",
                                          "a",      "\u9999", "\u3042", "\u5bb6"};
    if (wide)
        ith_buf_puts(text, letters[next_random(4) ? next_random(6) : next_random(12)]);
    else
        ith_buf_putc(text, (char)('a' + next_random(3) * next_random(2)));
}

static ith_tokenizer *learn_letters(const char *name, bool wide)
{
    ith_error err = {0};
    ith_buf text = {0};
    for (int i = 0; i < 20000; i++)
        if (next_random(9))
            put_letter(&text, wide);
        else
            ith_buf_putc(&text, ' ');
    const char *dir = temp_dir(name);
    assert_ok(ith_bpe_train(text.data, text.len, 600, NULL, 0, dir, &err), err);
    ith_tokenizer *t = NULL;
    assert_ok(ith_tokenizer_open(&t, dir, &err), err);
    ith_buf_deinit(&text);
    return t;
}

/* Short words (arrays), long words (heap), cached or not: all by the definition. */
static void check_merging(const ith_tokenizer *t, bool wide)
{
    ith_error err = {0};
    int32_t want[1200];
    ith_buf word = {0};
    ith_ids got = {0};
    for (int round = 0; round < 6000; round++) {
        int64_t n = 1 + (int64_t)next_random(round % 3 == 0 ? 390 : round % 3 == 1 ? 60 : 8);
        ith_buf_clear(&word);
        for (int64_t i = 0; i < n; i++)
            put_letter(&word, wide);
        int64_t num_want = merge_by_definition(&t->vocab, word.data, word.len, want);
        for (int pass = 0; pass < 2; pass++) {
            got.count = 0;
            assert_ok(ith_tokenizer_encode(t, word.data, word.len, &got, &err), err);
            if (got.count != num_want || memcmp(got.ids, want, (size_t)num_want * 4) != 0)
                fail_msg("word '%s', pass %d: %ld ids, expected %ld", word.data, pass,
                         (long)got.count, (long)num_want);
        }
    }
    ith_ids_free(&got);
    ith_buf_deinit(&word);
}

static void test_merging_equals_definition(void **state)
{
    (void)state;
    ith_tokenizer *t = learn_letters("letters", false);
    check_merging(t, false);
    ith_tokenizer_close(t);
}

/* Characters that are taken as a token from the start, and pairs of them at which some merge
 * crosses the border, so that they are not. */
static void test_merging_of_wide_characters_equals_definition(void **state)
{
    (void)state;
    ith_tokenizer *t = learn_letters("wide", true);
    int chars = 0, crossed = 0;
    assert_non_null(t->vocab.char_id);
    for (int c = 0; c < 0x10000; c++)
        chars += t->vocab.char_id[c] >= 0;
    for (int i = 0; i < 256 * 8; i++)
        crossed += t->vocab.crossed[i / 8][i % 8] != 0;
    if (chars < 4 || crossed == 0)
        fail_msg("%d characters are tokens, %d borders are crossed: nothing to see", chars,
                 crossed);
    check_merging(t, true);
    ith_tokenizer_close(t);
}

/* A word of millions of letters: not quadratic (that would take hours), and right. */
static void test_merging_long_word_is_fast(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_buf text = {0};
    for (int i = 0; i < 64; i++)
        ith_buf_puts(&text, "aaaaaaaa aaaa aa ");
    const char *dir = temp_dir("long-word");
    assert_ok(ith_bpe_train(text.data, text.len, 300, NULL, 0, dir, &err), err);
    ith_tokenizer *t = NULL;
    assert_ok(ith_tokenizer_open(&t, dir, &err), err);
    const int64_t n = 3000000;
    ith_buf_clear(&text);
    for (int64_t i = 0; i < n; i++)
        ith_buf_putc(&text, 'a');
    ith_ids ids = {0};
    clock_t start = clock();
    assert_ok(ith_tokenizer_encode(t, text.data, n, &ids, &err), err);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    int64_t bytes = 0;
    for (int64_t i = 0; i < ids.count; i++)
        bytes += t->vocab.rows[ids.ids[i]].len;
    assert_int_equal(bytes, n);
    int32_t want[1024];
    int64_t num_want = merge_by_definition(&t->vocab, text.data, 1024, want);
    assert_true(num_want > 16 && num_want <= 512);
    assert_memory_equal(ids.ids, want, (size_t)(num_want - 16) * 4); /* the end may differ */
    if (seconds > 60)
        fail_msg("%.1f s for %ld letters", seconds, (long)n);
    ith_ids_free(&ids);
    ith_buf_deinit(&text);
    ith_tokenizer_close(t);
}

/* --- small parts ----------------------------------------------------------------------------- */

static void test_alphabet_is_a_bijection(void **state)
{
    (void)state;
    bool seen[0x200] = {false};
    for (int byte = 0; byte < 256; byte++) {
        char spelling[4], back = 0;
        uint32_t c = ith_alphabet_char((unsigned char)byte);
        if (c > 0x1ff || c <= 0x20 || seen[c]) {
            fail_msg("byte %d: U+%04X", byte, c);
            return;
        }
        seen[c] = true;
        int len = ith_utf8_encode(c, spelling);
        assert_int_equal(ith_alphabet_decode(spelling, len, &back), 1);
        assert_int_equal((unsigned char)back, byte);
    }
    char out[8];
    assert_int_equal(ith_alphabet_decode(" ", 1, out), -1);
    assert_int_equal(ith_alphabet_decode("\xff", 1, out), -1);
    assert_int_equal(ith_alphabet_decode("\xe4\xbd\xa0", 3, out), -1);
}

static void test_classes_of_known_characters(void **state)
{
    (void)state;
    uint8_t *classes = fill_classes();
    static const struct {
        uint32_t c;
        uint8_t want;
    } cases[] = {
        {'a', ITH_UC_LETTER | ITH_UC_NFC_SAFE},
        {'5', ITH_UC_NUMBER | ITH_UC_NFC_SAFE},
        {'\n', ITH_UC_SPACE | ITH_UC_NEWLINE | ITH_UC_NFC_SAFE},
        {0x180e, ITH_UC_NFC_SAFE},
        {0x301, ITH_UC_MARK},
        {0xe9, ITH_UC_LETTER | ITH_UC_NFC_SAFE},
        {0x212b, ITH_UC_LETTER},                   /* a singleton: becomes U+00C5 */
        {0x1161, ITH_UC_LETTER},                   /* composes with what stands before */
        {0xa7cb, ITH_UC_LETTER | ITH_UC_NFC_SAFE}, /* of Unicode 16 */
        {0x1ac1, ITH_UC_MARK | ITH_UC_NFC_SAFE},   /* a mark that the HF library's NFC ignores */
        {0x323af, ITH_UC_LETTER | ITH_UC_NFC_SAFE},
        {0xe0100, ITH_UC_MARK | ITH_UC_NFC_SAFE},
        {0x10ffff, ITH_UC_NFC_SAFE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (ith_uc_class(classes, cases[i].c) != cases[i].want)
            fail_msg("U+%04X: class 0x%x, expected 0x%x", cases[i].c,
                     ith_uc_class(classes, cases[i].c), cases[i].want);
    ith_free(classes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_words_equals_pattern),
        cmocka_unit_test(test_split_other_rules),
        cmocka_unit_test(test_split_refuses_other_meanings),
        cmocka_unit_test(test_split_catastrophic_pattern_ends),
        cmocka_unit_test(test_nfc_equals_utf8proc),
        cmocka_unit_test(test_nfc_map_tiles_the_original),
        cmocka_unit_test(test_nfc_long_run_of_marks),
        cmocka_unit_test(test_invalid_utf8_is_found),
        cmocka_unit_test(test_merging_equals_definition),
        cmocka_unit_test(test_merging_of_wide_characters_equals_definition),
        cmocka_unit_test(test_merging_long_word_is_fast),
        cmocka_unit_test(test_alphabet_is_a_bijection),
        cmocka_unit_test(test_classes_of_known_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
