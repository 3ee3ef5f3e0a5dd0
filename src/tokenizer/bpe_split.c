/* bpe_split.c - split rules: text into the pieces that merges never cross.
 *
 * The patterns of the Qwen, Llama 3 and Bailing families differ in two points only and have a
 * hand-written matcher (ITH_SPLIT_WORDS); any other pattern runs in PCRE2. Files hold patterns in
 * Oniguruma's Ruby syntax. Where PCRE2 reads the same text differently it is rewritten (\s, \S, \w,
 * \W) or refused with the pattern quoted (set operations and nested classes, \h, \b, interval
 * followed by +): a pattern is never read as something else.
 *
 * NEEDSWORK: in patterns that are not known ones, \p{...} follows the Unicode version of the linked
 * PCRE2 (Debian 12: 14.0), HF follows 16.0: letters and digits added since split differently there.
 * The version is part of ith_tokenizer_hash.
 *
 * Invariants: pieces come in order, do not overlap, are not empty and end on characters. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer/tokenizer_internal.h"

#include <pcre2.h>

#define MAX_PATTERN_BYTES (1 << 16)
#define JIT_STACK_BYTES (8 << 20)
/* Bounds backtracking; the real patterns need a few steps per character. */
#define MATCH_LIMIT 50000000u

/* Known patterns, written as they stand in the files. Those with possessive quantifiers split the
 * same way: nothing that follows them could use what they give back. */
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define SPACES "|\\s+(?!\\S)|\\s+"
static const struct {
    const char *pattern;
    bool marks;
    int max_digits;
} known_patterns[] = {
    {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
                  "|\\s*[\\r\\n]+" SPACES,
     false, 1}, /* Qwen2, Qwen3 */
    {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
                  "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" SPACES,
     true, 1}, /* Qwen3.5 */
    {CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
                  "|\\s*[\\r\\n]+" SPACES,
     false, 3}, /* Llama 3 */
    {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*"
     "|\\s*[\\r\\n]" SPACES,
     false, 1}, /* Bailing (Ling, LLaDA2) */
};

/* --- the hand-written matcher ---------------------------------------------------------------- */

/* Length of 's 't 're 've 'm 'll 'd in any case at p (an apostrophe), 0 when there is none. U+017F
 * (long s) is an s in another case. */
static int contraction(const char *p, const char *end)
{
    int64_t room = end - p;
    if (room < 2)
        return 0;
    char a = (char)(p[1] | 0x20);
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    if (room < 3)
        return 0;
    if (p[1] == '\xc5' && p[2] == '\xbf')
        return 3;
    char b = (char)(p[2] | 0x20);
    return (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

static inline uint8_t class_at(const uint8_t *classes, const char *p, const char **next)
{
    *next = p;
    return ith_uc_class(classes, ith_utf8_next(next));
}

static const char *skip_class(const uint8_t *classes, const char *p, const char *end,
                              uint8_t wanted)
{
    for (const char *next; p < end && (class_at(classes, p, &next) & wanted); p = next)
        ;
    return p;
}

/* A run of white space from p: through its last CR or LF when it has one; else all of it at the end
 * of the text; else all but its last character, which may begin the next piece; at least one. */
static const char *white_space(const uint8_t *classes, const char *p, const char *end)
{
    const char *newline = NULL, *last = p, *run = p, *next;
    for (; run < end; run = next) {
        uint8_t c = class_at(classes, run, &next);
        if (!(c & ITH_UC_SPACE))
            break;
        if (c & ITH_UC_NEWLINE)
            newline = next;
        last = run;
    }
    if (newline)
        return newline;
    return run == end || last == p ? run : last;
}

const char *ith_split_word(const ith_split_rule *rule, const uint8_t *classes, const char *p,
                           const char *end)
{
    const uint8_t word = rule->marks ? ITH_UC_LETTER | ITH_UC_MARK : ITH_UC_LETTER;
    const uint8_t not_sign = word | ITH_UC_NUMBER | ITH_UC_SPACE;
    const char *next, *after = NULL;
    uint8_t c = class_at(classes, p, &next), c2 = ITH_UC_SPACE;
    if (c & word)
        return skip_class(classes, next, end, word);
    if (*p == '\'') {
        int len = contraction(p, end);
        if (len)
            return p + len;
    }
    if (c & ITH_UC_NUMBER) {
        for (int n = 1; n < rule->max_digits && next < end; n++) {
            if (!(class_at(classes, next, &after) & ITH_UC_NUMBER))
                break;
            next = after;
        }
        return next;
    }
    if (next < end) {
        c2 = class_at(classes, next, &after);
        if ((c2 & word) && !(c & ITH_UC_NEWLINE))
            return skip_class(classes, after, end, word);
    }
    if (!(c & ITH_UC_SPACE) || (*p == ' ' && next < end && !(c2 & not_sign))) {
        while (next < end && !(class_at(classes, next, &after) & not_sign))
            next = after;
        while (next < end && (*next == '\r' || *next == '\n'))
            next++;
        return next;
    }
    return white_space(classes, p, end);
}

/* --- Oniguruma's syntax for PCRE2 ------------------------------------------------------------ */

#define SPACE_SET "\\t-\\r\\x{85}\\p{Z}"
#define WORD_SET                                                                                   \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}"                    \
    "\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}"

static ith_status refuse(ith_error *err, const char *pattern, int64_t at, const char *what)
{
    return ith_fail(err, ITH_ERR_UNSUPPORTED,
                    "split pattern '%.300s': %s at character %lld is not supported", pattern, what,
                    (long long)at + 1);
}

/* One escape at p[*i] (a backslash); moves *i behind it. */
static ith_status rewrite_escape(const char *p, int64_t len, int64_t *i, bool in_class,
                                 ith_buf *out, ith_error *err)
{
    int64_t at = *i;
    char c = p[at + 1];
    if (at + 1 >= len)
        return refuse(err, p, at, "a backslash at the end");
    *i += 2;
    if (c == 's' || c == 'w') {
        const char *set = c == 's' ? SPACE_SET : WORD_SET;
        ith_buf_printf(out, in_class ? "%s" : "[%s]", set);
        return ITH_OK;
    }
    if ((c == 'S' || c == 'W') && !in_class) {
        ith_buf_printf(out, "[^%s]", c == 'S' ? SPACE_SET : WORD_SET);
        return ITH_OK;
    }
    if (strchr("hHRXKGgkQEBbWcC", c) || (in_class && c == 'S'))
        return refuse(err, p, at, in_class ? "this escape in a class" : "this escape");
    ith_buf_append(out, p + at, 2);
    if ((c == 'p' || c == 'P' || c == 'x') && *i < len && p[*i] == '{') {
        const char *close = memchr(p + *i, '}', (size_t)(len - *i));
        if (!close)
            return refuse(err, p, at, "an open brace");
        ith_buf_append(out, p + *i, close + 1 - (p + *i));
        *i = close + 1 - p;
    }
    return ITH_OK;
}

/* The group head at p[i] == '(': inline options other than i and x mean something else in Ruby. */
static ith_status check_group(const char *p, int64_t len, int64_t i, ith_error *err)
{
    if (i + 2 >= len || p[i + 1] != '?' || strchr(":=!<>#", p[i + 2]))
        return i + 1 < len && p[i + 1] == '*' ? refuse(err, p, i, "a verb") : ITH_OK;
    for (int64_t k = i + 2; k < len && p[k] != ':' && p[k] != ')'; k++)
        if (!strchr("ix-", p[k]))
            return refuse(err, p, i, "this group");
    return ITH_OK;
}

static ith_status rewrite(const char *p, int64_t len, ith_buf *out, ith_error *err)
{
    bool in_class = false, interval = false; /* the last item was {n,m} */
    int64_t class_begin = 0;
    for (int64_t i = 0; i < len;) {
        char c = p[i];
        bool was_interval = interval;
        interval = false;
        if (c == '\\') {
            ITH_TRY(rewrite_escape(p, len, &i, in_class, out, err));
            continue;
        }
        if (in_class) {
            if (c == '&' && i + 1 < len && p[i + 1] == '&')
                return refuse(err, p, i, "a set intersection (&&)");
            if (c == '[')
                return refuse(err, p, i, "a class within a class");
            if (c == ']' && i > class_begin)
                in_class = false;
        } else if (c == '[') {
            in_class = true;
            class_begin = i + 1 < len && p[i + 1] == '^' ? i + 2 : i + 1;
            ith_buf_append(out, p + i, class_begin - i);
            i = class_begin;
            continue;
        } else if (c == '(') {
            ITH_TRY(check_group(p, len, i, err));
        } else if (c == '}') {
            interval = true;
        } else if (c == '+' && was_interval) {
            return refuse(err, p, i, "+ after an interval");
        }
        ith_buf_putc(out, c);
        i++;
    }
    return ith_buf_check(out, "split pattern", err);
}

static void *pcre_alloc(size_t bytes, void *arg)
{
    (void)arg;
    return ith_malloc((int64_t)bytes);
}

static void pcre_free(void *ptr, void *arg)
{
    (void)arg;
    ith_free(ptr);
}

static ith_status compile_regex(ith_split_rule *rule, const char *pattern, int64_t len,
                                ith_error *err)
{
    ith_buf text = {0};
    pcre2_general_context *general = NULL;
    pcre2_compile_context *context = NULL;
    ith_status status = rewrite(pattern, len, &text, err);
    if (status != ITH_OK)
        goto out;
    status = ITH_ERR_MEMORY;
    general = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
    context = general ? pcre2_compile_context_create(general) : NULL;
    if (!context) {
        ith_fail(err, status, "out of memory for a split pattern");
        goto out;
    }
    int code = 0;
    PCRE2_SIZE at = 0;
    pcre2_code *compiled = pcre2_compile(
        (PCRE2_SPTR)text.data, (PCRE2_SIZE)text.len,
        PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &at, context);
    if (!compiled) {
        PCRE2_UCHAR message[160] = "";
        pcre2_get_error_message(code, message, sizeof message);
        status = code == PCRE2_ERROR_NOMEMORY || code == PCRE2_ERROR_HEAP_FAILED ? ITH_ERR_MEMORY
                                                                                 : ITH_ERR_FORMAT;
        ith_fail(err, status, "split pattern '%.300s': %s", pattern, (const char *)message);
        goto out;
    }
    /* Without JIT (not built for this processor) matching is slower and the same. */
    pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
    rule->kind = ITH_SPLIT_REGEX;
    rule->code = compiled;
    status = ITH_OK;
out:
    pcre2_compile_context_free(context);
    pcre2_general_context_free(general);
    ith_buf_deinit(&text);
    return status;
}

ith_status ith_split_compile(ith_split_rule *rule, const char *pattern, int64_t len,
                             bool force_regex, ith_error *err)
{
    if (len == 0 || len > MAX_PATTERN_BYTES || memchr(pattern, 0, (size_t)len))
        return ith_fail(err, ITH_ERR_FORMAT,
                        "split pattern of %lld bytes; 1 to %d bytes without NUL", (long long)len,
                        MAX_PATTERN_BYTES);
    for (size_t i = 0; !force_regex && i < sizeof known_patterns / sizeof known_patterns[0]; i++)
        if (strlen(known_patterns[i].pattern) == (size_t)len &&
            memcmp(known_patterns[i].pattern, pattern, (size_t)len) == 0) {
            rule->kind = ITH_SPLIT_WORDS;
            rule->marks = known_patterns[i].marks;
            rule->max_digits = known_patterns[i].max_digits;
            return ITH_OK;
        }
    return compile_regex(rule, pattern, len, err);
}

void ith_split_deinit(ith_split_rule *rule)
{
    pcre2_code_free(rule->code);
    rule->code = NULL;
}

void ith_split_version(char out[32])
{
    memset(out, 0, 32);
    char text[64] = "";
    if (pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, NULL) <= (int)sizeof text)
        pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, text);
    memcpy(out, text, 31);
}

/* --- applying a rule ------------------------------------------------------------------------- */

static ith_status add_piece(ith_pieces *out, int64_t begin, int64_t end, ith_error *err)
{
    if (begin == end)
        return ITH_OK;
    ITH_ASSERT(begin < end);
    ITH_TRY(ith_grow((void **)&out->pieces, &out->cap, out->count + 1, (int64_t)sizeof *out->pieces,
                     "pieces", err));
    out->pieces[out->count++] = (ith_piece){begin, end};
    return ITH_OK;
}

/* The gap [*done, begin), then the match [begin, end). */
static ith_status add_match(const ith_split_rule *rule, ith_pieces *out, int64_t *done,
                            int64_t begin, int64_t end, ith_error *err)
{
    if (!rule->drop_gaps)
        ITH_TRY(add_piece(out, *done, begin, err));
    if (!rule->drop_matches)
        ITH_TRY(add_piece(out, begin, end, err));
    *done = end;
    return ITH_OK;
}

static ith_status open_scratch(ith_split_scratch *s, ith_error *err)
{
    if (s->match_data)
        return ITH_OK;
    ith_split_scratch made = {0};
    pcre2_general_context *general = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
    if (general) {
        made.match_data = pcre2_match_data_create(1, general);
        made.match_context = pcre2_match_context_create(general);
        made.jit_stack = pcre2_jit_stack_create(32 << 10, JIT_STACK_BYTES, general);
        pcre2_general_context_free(general);
    }
    if (!made.match_data || !made.match_context) {
        ith_split_scratch_deinit(&made);
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for matching a split pattern");
    }
    pcre2_set_match_limit(made.match_context, MATCH_LIMIT);
    if (made.jit_stack)
        pcre2_jit_stack_assign(made.match_context, NULL, made.jit_stack);
    *s = made;
    return ITH_OK;
}

void ith_split_scratch_deinit(ith_split_scratch *s)
{
    pcre2_match_data_free(s->match_data);
    pcre2_match_context_free(s->match_context);
    pcre2_jit_stack_free(s->jit_stack);
    memset(s, 0, sizeof *s);
}

/* Matches as the HF library walks them: an empty match right behind the last one is stepped over.
 */
static ith_status apply_regex(const ith_split_rule *rule, ith_split_scratch *s, const char *text,
                              int64_t len, int64_t base, ith_pieces *out, ith_error *err)
{
    ITH_TRY(open_scratch(s, err));
    int64_t from = 0, done = base, last_end = -1;
    while (from <= len) {
        int rc = pcre2_match(rule->code, (PCRE2_SPTR)text, (PCRE2_SIZE)len, (PCRE2_SIZE)from,
                             PCRE2_NO_UTF_CHECK, s->match_data, s->match_context);
        if (rc == PCRE2_ERROR_NOMATCH)
            break;
        if (rc < 0) {
            PCRE2_UCHAR message[160] = "";
            pcre2_get_error_message(rc, message, sizeof message);
            return ith_fail(err, ITH_ERR_RUN, "split pattern '%.300s' at byte %lld of the text: %s",
                            rule->text, (long long)(base + from), (const char *)message);
        }
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(s->match_data);
        int64_t begin = (int64_t)range[0], end = (int64_t)range[1];
        if (begin == end && end == last_end) {
            from++;
            while (from < len && ith_utf8_is_tail(text[from]))
                from++;
            continue;
        }
        ITH_TRY(add_match(rule, out, &done, base + begin, base + end, err));
        from = last_end = end;
    }
    return add_match(rule, out, &done, base + len, base + len, err);
}

static ith_status apply_text(const ith_split_rule *rule, const char *text, int64_t len,
                             int64_t base, ith_pieces *out, ith_error *err)
{
    int64_t done = base;
    for (const char *p = text, *end = text + len, *hit;
         (hit = memmem(p, (size_t)(end - p), rule->text, (size_t)rule->text_len)) != NULL;) {
        p = hit + rule->text_len;
        ITH_TRY(add_match(rule, out, &done, base + (hit - text), base + (p - text), err));
    }
    return add_match(rule, out, &done, base + len, base + len, err);
}

static ith_status apply_digits(const ith_split_rule *rule, const uint8_t *classes, const char *text,
                               int64_t len, int64_t base, ith_pieces *out, ith_error *err)
{
    int64_t done = base;
    for (const char *p = text, *end = text + len; p < end;) {
        const char *begin = p;
        if (!(ith_uc_class(classes, ith_utf8_next(&p)) & ITH_UC_NUMBER))
            continue;
        if (!rule->individual)
            p = skip_class(classes, p, end, ITH_UC_NUMBER);
        ITH_TRY(add_match(rule, out, &done, base + (begin - text), base + (p - text), err));
    }
    return add_match(rule, out, &done, base + len, base + len, err);
}

ith_status ith_split_apply(const ith_split_rule *rule, const uint8_t *classes,
                           ith_split_scratch *scratch, const char *text, int64_t begin, int64_t end,
                           ith_pieces *out, ith_error *err)
{
    const char *p = text + begin, *stop = text + end;
    switch (rule->kind) {
    case ITH_SPLIT_REGEX:
        return apply_regex(rule, scratch, p, end - begin, begin, out, err);
    case ITH_SPLIT_TEXT:
        return apply_text(rule, p, end - begin, begin, out, err);
    case ITH_SPLIT_DIGITS:
        return apply_digits(rule, classes, p, end - begin, begin, out, err);
    case ITH_SPLIT_WORDS:
        break;
    }
    for (const char *next; p < stop; p = next) {
        next = ith_split_word(rule, classes, p, stop);
        /* These patterns match every character, so there are no gaps. */
        if (!rule->drop_matches)
            ITH_TRY(add_piece(out, p - text, next - text, err));
    }
    return ITH_OK;
}
