/* jinja_lex.c - template text to tokens, with Jinja2's whitespace rules.
 *
 * trim_blocks: one newline after a block or comment tag goes. lstrip_blocks: blanks between the
 * line's start and a block or comment tag go. "-" strips all whitespace on its side, "+" switches
 * the two rules off there. */
#include "tokenizer/jinja_internal.h"

#include "base/utf8.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    ith_jj_compiler *c;
    const char *p, *end;
    int32_t line;
} lexer;

static ith_jj_token *add_token(lexer *lx, ith_jj_token_type type)
{
    ith_jj_compiler *c = lx->c;
    if (c->num_tokens == c->cap_tokens) {
        int64_t cap = c->cap_tokens ? c->cap_tokens * 2 : 256;
        ith_jj_token *grown = ith_jj_compiler_alloc(c, cap * (int64_t)sizeof *grown);
        if (c->num_tokens)
            memcpy(grown, c->tokens, (size_t)c->num_tokens * sizeof *grown);
        c->tokens = grown;
        c->cap_tokens = cap;
    }
    ith_jj_token *token = &c->tokens[c->num_tokens++];
    memset(token, 0, sizeof *token);
    token->type = type;
    token->line = lx->line;
    return token;
}

/* Moves on to q, counting lines. */
static void advance(lexer *lx, const char *q)
{
    for (; lx->p < q; lx->p++)
        lx->line += *lx->p == '\n';
}

static bool looking_at(const lexer *lx, const char *p, const char *text)
{
    size_t len = strlen(text);
    return (size_t)(lx->end - p) >= len && memcmp(p, text, len) == 0;
}

static const char *skip_space(const lexer *lx, const char *p)
{
    while (p < lx->end) {
        const char *q = p;
        if (!ith_jj_is_space(ith_jj_next_char(&q, lx->end)))
            break;
        p = q;
    }
    return p;
}

/* Length of an end tag ("%}", "#}", "}}") at p with its sign and what it swallows, or 0. */
static int64_t end_tag(const lexer *lx, const char *p, const char *tag)
{
    bool is_block = tag[0] != '}';
    const char *q = p;
    char sign = '\0';
    if (q < lx->end && (*q == '-' || (is_block && *q == '+')))
        sign = *q++;
    if (!looking_at(lx, q, tag))
        return 0;
    q += 2;
    if (sign == '-')
        q = skip_space(lx, q);
    else if (is_block && sign != '+' && q < lx->end && *q == '\n')
        q++;
    return q - p;
}

/* Emits text before a tag that has this sign. */
static void add_text(lexer *lx, const char *begin, const char *end, char sign, bool is_variable)
{
    ith_jj_text text = {begin, end - begin};
    bool line_starting = begin == lx->c->src || begin[-1] == '\n';
    if (sign == '-') {
        text = ith_jj_strip(text, (ith_jj_text){NULL, 0}, false, true);
    } else if (sign != '+' && !is_variable) {
        int64_t line_at = text.len;
        while (line_at > 0 && text.s[line_at - 1] != '\n')
            line_at--;
        ith_jj_text rest = {text.s + line_at, text.len - line_at};
        if ((line_at > 0 || line_starting) &&
            ith_jj_strip(rest, (ith_jj_text){NULL, 0}, true, false).len == 0)
            text.len = line_at;
    }
    if (text.len > 0)
        add_token(lx, JJ_TOK_TEXT)->text = text;
    advance(lx, end);
}

/* Value of the hexadecimal digits p[0..n), or -1. */
static int64_t hex_digits(const char *p, const char *end, int n)
{
    int64_t value = 0;
    if (end - p < n)
        return -1;
    for (int i = 0; i < n; i++) {
        if (!isxdigit((unsigned char)p[i]))
            return -1;
        int digit = p[i] <= '9' ? p[i] - '0' : (p[i] | 32) - 'a' + 10;
        value = value * 16 + digit;
    }
    return value;
}

/* One escape after the backslash at p[-1]; writes to *to, returns the position after it. */
static const char *unescape_one(lexer *lx, const char *p, const char *end, char **to)
{
    static const char letters[] = "abfnrtv\\'\"", values[] = "\a\b\f\n\r\t\v\\'\"";
    const char *at = p < end ? memchr(letters, *p, sizeof letters - 1) : NULL;
    if (at) {
        *(*to)++ = values[at - letters];
        return p + 1;
    }
    if (p < end && *p == '\n')
        return p + 1;
    int digits = p == end ? 0 : *p == 'x' ? 2 : *p == 'u' ? 4 : *p == 'U' ? 8 : 0;
    int64_t code = -1;
    const char *next = p + 1;
    if (digits) {
        code = hex_digits(p + 1, end, digits);
        next += digits;
        if (code < 0)
            ith_jj_syntax_fail(lx->c, lx->line, "string: \\%c needs %d hexadecimal digits", *p,
                               digits);
    } else if (p < end && *p >= '0' && *p <= '7') {
        code = 0;
        for (next = p; next < end && next < p + 3 && *next >= '0' && *next <= '7'; next++)
            code = code * 8 + (*next - '0');
    } else if (p < end && *p == 'N') {
        ith_jj_syntax_fail(lx->c, lx->line, "string: \\N{...} names are not supported, use \\u");
    } else {
        *(*to)++ = '\\';
        return p;
    }
    if (code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff))
        ith_jj_syntax_fail(lx->c, lx->line, "string: \\%c: U+%04llX is not a character", *p,
                           (long long)code);
    *to += ith_utf8_encode((uint32_t)code, *to);
    return next;
}

static void lex_string(lexer *lx)
{
    char quote = *lx->p;
    const char *body = lx->p + 1, *q = body;
    while (q < lx->end && *q != quote)
        q += *q == '\\' ? 2 : 1;
    if (q >= lx->end)
        ith_jj_syntax_fail(lx->c, lx->line, "string: no closing %c", quote);
    char *text = ith_jj_compiler_alloc(lx->c, q - body + 1), *to = text;
    for (const char *p = body; p < q;) {
        if (*p != '\\')
            *to++ = *p++;
        else
            p = unescape_one(lx, p + 1, q, &to);
    }
    add_token(lx, JJ_TOK_STRING)->text = (ith_jj_text){text, to - text};
    advance(lx, q + 1);
}

/* Digits with single underscores between them; returns the end. */
static const char *skip_digits(const char *p, const char *end)
{
    while (p < end && (isdigit((unsigned char)*p) ||
                       (*p == '_' && p + 1 < end && isdigit((unsigned char)p[1]))))
        p++;
    return p;
}

static void lex_number(lexer *lx)
{
    const char *p = lx->p, *q = skip_digits(p, lx->end);
    bool is_float = false;
    int base = 10;
    bool after_dot = p > lx->c->src && p[-1] == '.';
    if (p + 1 < lx->end && *p == '0' && memchr("xXoObB", p[1], 6)) {
        base = (p[1] | 32) == 'x' ? 16 : (p[1] | 32) == 'o' ? 8 : 2;
        for (q = p + 2; q < lx->end && (isxdigit((unsigned char)*q) || *q == '_');)
            q++;
    } else if (!after_dot) {
        const char *r = q;
        if (r + 1 < lx->end && *r == '.' && isdigit((unsigned char)r[1])) {
            r = skip_digits(r + 1, lx->end);
            is_float = true;
        }
        const char *e = r;
        if (e < lx->end && (*e | 32) == 'e') {
            e += e + 1 < lx->end && (e[1] == '+' || e[1] == '-') ? 2 : 1;
            if (e < lx->end && isdigit((unsigned char)*e)) {
                r = skip_digits(e, lx->end);
                is_float = true;
            }
        }
        q = r;
    }
    char digits[64];
    size_t n = 0;
    for (const char *r = base == 10 ? p : p + 2; r < q; r++)
        if (*r != '_') {
            if (n == sizeof digits - 1)
                ith_jj_syntax_fail(lx->c, lx->line, "number: more than 63 digits");
            digits[n++] = *r;
        }
    digits[n] = '\0';
    ith_jj_token *token = add_token(lx, is_float ? JJ_TOK_FLOAT : JJ_TOK_INT);
    char *stop = digits;
    if (is_float)
        token->f = strtod(digits, &stop);
    else if (n > 0)
        token->i = strtoll(digits, &stop, base);
    if (n == 0 || *stop || (!is_float && token->i == INT64_MAX))
        ith_jj_syntax_fail(lx->c, lx->line, "number: '%.*s' is not one, or beyond 64 bits",
                           (int)(q - p), p);
    advance(lx, q);
}

static bool name_char(char ch)
{
    return isalnum((unsigned char)ch) || ch == '_' || (unsigned char)ch >= 0x80;
}

/* Bracket nesting inside a tag: end tags within brackets do not end it. */
static void balance(lexer *lx, char ch, char *stack, int *depth)
{
    if (memchr("([{", ch, 3)) {
        if (*depth == JJ_MAX_NESTING)
            ith_jj_syntax_fail(lx->c, lx->line, "brackets: more than %d levels", JJ_MAX_NESTING);
        stack[(*depth)++] = ch == '(' ? ')' : ch == '[' ? ']' : '}';
    } else if (memchr(")]}", ch, 3)) {
        if (*depth == 0)
            ith_jj_syntax_fail(lx->c, lx->line, "expression: '%c' without its opening bracket", ch);
        if (stack[--*depth] != ch)
            ith_jj_syntax_fail(lx->c, lx->line, "expression: '%c' found, '%c' expected", ch,
                               stack[*depth]);
    }
}

static void lex_operator(lexer *lx, char *stack, int *depth)
{
    static const char *const operators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++) {
        if (!looking_at(lx, lx->p, operators[i]))
            continue;
        if (!operators[i][1])
            balance(lx, *lx->p, stack, depth);
        ith_jj_token *token = add_token(lx, JJ_TOK_OP);
        token->text = (ith_jj_text){operators[i], (int64_t)strlen(operators[i])};
        lx->p += token->text.len;
        return;
    }
    ith_jj_syntax_fail(lx->c, lx->line, "expression: unexpected character '%c'", *lx->p);
}

/* From after the opening "{{" or "{%" to after its end tag. */
static void lex_tag(lexer *lx, const char *tag)
{
    char stack[JJ_MAX_NESTING];
    int depth = 0;
    int32_t begin_line = lx->line;
    for (;;) {
        int64_t end_len = depth == 0 ? end_tag(lx, lx->p, tag) : 0;
        if (end_len) {
            add_token(lx, tag[0] == '}' ? JJ_TOK_VAR_END : JJ_TOK_BLOCK_END);
            advance(lx, lx->p + end_len);
            return;
        }
        const char *after_space = skip_space(lx, lx->p);
        if (after_space > lx->p) {
            advance(lx, after_space);
            continue;
        }
        if (lx->p >= lx->end)
            ith_jj_syntax_fail(lx->c, begin_line, "tag: the template ends before '%s'", tag);
        if (isdigit((unsigned char)*lx->p)) {
            lex_number(lx);
        } else if (*lx->p == '"' || *lx->p == '\'') {
            lex_string(lx);
        } else if (name_char(*lx->p)) {
            const char *q = lx->p;
            while (q < lx->end && name_char(*q))
                q++;
            const char *name = ith_jj_intern(lx->c, lx->p, q - lx->p);
            add_token(lx, JJ_TOK_NAME)->text = (ith_jj_text){name, q - lx->p};
            lx->p = q;
        } else {
            lex_operator(lx, stack, &depth);
        }
    }
}

/* "{% raw %}" at p (after "{%" and sign): the position after it, or NULL. */
static const char *raw_begin(const lexer *lx, const char *p, const char *word, bool is_end)
{
    p = skip_space(lx, p);
    if (!looking_at(lx, p, word))
        return NULL;
    p = skip_space(lx, p + strlen(word));
    if (is_end) {
        int64_t len = end_tag(lx, p, "%}");
        return len ? p + len : NULL;
    }
    if (looking_at(lx, p, "-%}"))
        return skip_space(lx, p + 3);
    return looking_at(lx, p, "%}") ? p + 2 : NULL;
}

static char tag_sign(const lexer *lx, const char *p)
{
    return p < lx->end && (*p == '-' || *p == '+') ? *p : '\0';
}

static void lex_raw(lexer *lx, const char *body)
{
    int32_t begin_line = lx->line;
    advance(lx, body);
    for (const char *q = body; q < lx->end; q++) {
        if (!looking_at(lx, q, "{%"))
            continue;
        char sign = tag_sign(lx, q + 2);
        const char *after = raw_begin(lx, q + 2 + (sign != '\0'), "endraw", true);
        if (after) {
            add_text(lx, body, q, sign, false);
            advance(lx, after);
            return;
        }
    }
    ith_jj_syntax_fail(lx->c, begin_line, "raw: no endraw");
}

static void lex_comment(lexer *lx)
{
    int32_t begin_line = lx->line;
    for (const char *q = lx->p; q < lx->end; q++) {
        int64_t len = end_tag(lx, q, "#}");
        if (len) {
            advance(lx, q + len);
            return;
        }
    }
    ith_jj_syntax_fail(lx->c, begin_line, "comment: no closing '#}'");
}

void ith_jj_tokenize(ith_jj_compiler *c)
{
    lexer lx = {.c = c, .p = c->src, .end = c->end, .line = 1};
    while (lx.p < lx.end) {
        const char *q = lx.p;
        while (q < lx.end && !(q[0] == '{' && q + 1 < lx.end && memchr("{%#", q[1], 3)))
            q++;
        if (q == lx.end) {
            add_token(&lx, JJ_TOK_TEXT)->text = (ith_jj_text){lx.p, q - lx.p};
            advance(&lx, q);
            break;
        }
        char kind = q[1], sign = tag_sign(&lx, q + 2);
        add_text(&lx, lx.p, q, sign, kind == '{');
        const char *inside = q + 2 + (sign != '\0');
        const char *raw = kind == '%' ? raw_begin(&lx, inside, "raw", false) : NULL;
        if (raw) {
            lex_raw(&lx, raw);
            continue;
        }
        lx.p = inside;
        if (kind == '#') {
            lex_comment(&lx);
            continue;
        }
        add_token(&lx, kind == '{' ? JJ_TOK_VAR_BEGIN : JJ_TOK_BLOCK_BEGIN);
        lex_tag(&lx, kind == '{' ? "}}" : "%}");
    }
    add_token(&lx, JJ_TOK_EOF);
}
