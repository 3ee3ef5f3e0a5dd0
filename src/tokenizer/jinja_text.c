/* jinja_text.c - text as Python sees it: code points, Unicode whitespace, case, formatting.
 * Strings are valid UTF-8 throughout: templates and JSON are checked when they come in. */
#include "tokenizer/jinja_internal.h"

#include "base/checked.h"
#include "base/utf8.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <utf8proc.h>

bool ith_jj_is_space(uint32_t c)
{
    if (c < 0x80)
        return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
           c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

uint32_t ith_jj_next_char(const char **p, const char *end)
{
    uint32_t c = 0;
    int len = ith_utf8_decode(*p, end, &c);
    *p += len ? len : 1;
    return len ? c : 0xfffd;
}

int64_t ith_jj_count_chars(const char *s, int64_t len)
{
    int64_t count = 0;
    for (int64_t i = 0; i < len; i++)
        count += ((unsigned char)s[i] & 0xc0) != 0x80;
    return count;
}

int64_t ith_jj_char_offset(const char *s, int64_t len, int64_t n)
{
    int64_t i = 0;
    while (i < len && n > 0) {
        for (i++; i < len && ((unsigned char)s[i] & 0xc0) == 0x80;)
            i++;
        n--;
    }
    return i;
}

/* Start of the code point that ends at s[end). */
static int64_t char_before(const char *s, int64_t end)
{
    do
        end--;
    while (end > 0 && ((unsigned char)s[end] & 0xc0) == 0x80);
    return end;
}

static bool in_set(uint32_t c, ith_jj_text chars)
{
    if (!chars.s)
        return ith_jj_is_space(c);
    for (const char *p = chars.s, *end = p + chars.len; p < end;)
        if (ith_jj_next_char(&p, end) == c)
            return true;
    return false;
}

ith_jj_text ith_jj_strip(ith_jj_text t, ith_jj_text chars, bool left, bool right)
{
    const char *p = t.s, *end = t.s + t.len;
    while (left && p < end) {
        const char *q = p;
        if (!in_set(ith_jj_next_char(&q, end), chars))
            break;
        p = q;
    }
    while (right && end > p) {
        const char *q = p + char_before(p, end - p), *at = q;
        if (!in_set(ith_jj_next_char(&at, end), chars))
            break;
        end = q;
    }
    return (ith_jj_text){p, end - p};
}

/* ---- case ------------------------------------------------------------------------------------ */

/* Case changes to several code points (Unicode SpecialCasing), as UTF-8. */
static const struct {
    uint32_t c;
    const char *upper, *title;
} special_upper[] = {
    {0x00df, "SS", "Ss"},
    {0x0149, "\xca\xbcN", "\xca\xbcN"},
    {0x01f0, "J\xcc\x8c", "J\xcc\x8c"},
    {0x0390, "\xce\x99\xcc\x88\xcc\x81", "\xce\x99\xcc\x88\xcc\x81"},
    {0x03b0, "\xce\xa5\xcc\x88\xcc\x81", "\xce\xa5\xcc\x88\xcc\x81"},
    {0x0587, "\xd4\xb5\xd5\x92", "\xd4\xb5\xd6\x82"},
    {0x1e96, "H\xcc\xb1", "H\xcc\xb1"},
    {0x1e97, "T\xcc\x88", "T\xcc\x88"},
    {0x1e98, "W\xcc\x8a", "W\xcc\x8a"},
    {0x1e99, "Y\xcc\x8a", "Y\xcc\x8a"},
    {0x1e9a, "A\xca\xbe", "A\xca\xbe"},
    {0xfb00, "FF", "Ff"},
    {0xfb01, "FI", "Fi"},
    {0xfb02, "FL", "Fl"},
    {0xfb03, "FFI", "Ffi"},
    {0xfb04, "FFL", "Ffl"},
    {0xfb05, "ST", "St"},
    {0xfb06, "ST", "St"},
};

static bool is_cased(uint32_t c)
{
    utf8proc_category_t cat = utf8proc_category((utf8proc_int32_t)c);
    return cat == UTF8PROC_CATEGORY_LU || cat == UTF8PROC_CATEGORY_LL ||
           cat == UTF8PROC_CATEGORY_LT ||
           utf8proc_toupper((utf8proc_int32_t)c) != (utf8proc_int32_t)c ||
           utf8proc_tolower((utf8proc_int32_t)c) != (utf8proc_int32_t)c;
}

static void emit_char(ith_jj_interp *in, uint32_t c)
{
    char bytes[4];
    ith_jj_emit(in, bytes, ith_utf8_encode(c, bytes));
}

static void emit_upper(ith_jj_interp *in, uint32_t c, bool title)
{
    for (size_t i = 0; c >= 0x80 && i < sizeof special_upper / sizeof special_upper[0]; i++)
        if (special_upper[i].c == c) {
            ith_jj_emit_text(in, title ? special_upper[i].title : special_upper[i].upper);
            return;
        }
    utf8proc_int32_t code = (utf8proc_int32_t)c;
    emit_char(in, (uint32_t)(title ? utf8proc_totitle(code) : utf8proc_toupper(code)));
}

static bool is_case_ignorable(uint32_t c)
{
    utf8proc_category_t cat = utf8proc_category((utf8proc_int32_t)c);
    return cat == UTF8PROC_CATEGORY_MN || cat == UTF8PROC_CATEGORY_ME ||
           cat == UTF8PROC_CATEGORY_CF || cat == UTF8PROC_CATEGORY_LM ||
           cat == UTF8PROC_CATEGORY_SK || c == '\'' || c == '.' || c == ':' || c == 0xb7 ||
           c == 0x2019 || c == '^' || c == '`' || c == 0x2018;
}

/* Sigma at p (its start) ends a word: a cased letter before it and none after. */
static bool is_final_sigma(ith_jj_text t, const char *p)
{
    const char *end = t.s + t.len, *q = p;
    bool before = false;
    while (q > t.s && !before) {
        q = t.s + char_before(t.s, q - t.s);
        const char *at = q;
        uint32_t c = ith_jj_next_char(&at, end);
        if (is_case_ignorable(c))
            continue;
        before = is_cased(c);
        break;
    }
    for (q = p + 2; before && q < end;) {
        uint32_t c = ith_jj_next_char(&q, end);
        if (!is_case_ignorable(c))
            return !is_cased(c);
    }
    return before;
}

static void emit_lower(ith_jj_interp *in, ith_jj_text t, const char *p, uint32_t c)
{
    if (c == 0x130)
        ith_jj_emit(in, "i\xcc\x87", 3);
    else if (c == 0x3a3)
        emit_char(in, is_final_sigma(t, p) ? 0x3c2 : 0x3c3);
    else
        emit_char(in, (uint32_t)utf8proc_tolower((utf8proc_int32_t)c));
}

void ith_jj_emit_case(ith_jj_interp *in, ith_jj_text t, ith_jj_case mode)
{
    bool after_cased = false;
    ith_jj_step_bytes(in, t.len * 8);
    for (const char *p = t.s, *end = t.s + t.len; p < end;) {
        const char *at = p;
        uint32_t c = ith_jj_next_char(&p, end);
        bool upper = mode == JJ_UPPER || (mode == JJ_TITLE_WORDS && !after_cased) ||
                     (mode == JJ_CAPITALIZE && at == t.s);
        if (mode == JJ_SWAPCASE)
            upper = utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LL;
        if (upper)
            emit_upper(in, c, mode == JJ_TITLE_WORDS || mode == JJ_CAPITALIZE);
        else
            emit_lower(in, t, at, c);
        after_cased = is_cased(c);
    }
}

bool ith_jj_is_printable(uint32_t c)
{
    if (c == ' ')
        return true;
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return false;
    default:
        return true;
    }
}

static bool is_letter(utf8proc_category_t cat)
{
    return cat >= UTF8PROC_CATEGORY_LU && cat <= UTF8PROC_CATEGORY_LO;
}

static bool has_class(uint32_t c, ith_jj_class cls)
{
    utf8proc_category_t cat = utf8proc_category((utf8proc_int32_t)c);
    bool decimal = cat == UTF8PROC_CATEGORY_ND;
    bool digit = decimal || c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 ||
                 (c >= 0x2074 && c <= 0x2079) || (c >= 0x2080 && c <= 0x2089) ||
                 (c >= 0x2460 && c <= 0x2468);
    switch (cls) {
    case JJ_ALPHA:
        return is_letter(cat);
    case JJ_DIGIT:
        return digit;
    case JJ_DECIMAL:
        return decimal;
    case JJ_NUMERIC:
        return digit || cat == UTF8PROC_CATEGORY_NL || cat == UTF8PROC_CATEGORY_NO;
    case JJ_ALNUM:
        return is_letter(cat) || digit || cat == UTF8PROC_CATEGORY_NL ||
               cat == UTF8PROC_CATEGORY_NO;
    default:
        return ith_jj_is_space(c);
    }
}

bool ith_jj_all_chars(ith_jj_text t, ith_jj_class cls)
{
    bool any = false;
    for (const char *p = t.s, *end = t.s + t.len; p < end;) {
        uint32_t c = ith_jj_next_char(&p, end);
        if (cls == JJ_IS_LOWER || cls == JJ_IS_UPPER) {
            utf8proc_category_t cat = utf8proc_category((utf8proc_int32_t)c);
            utf8proc_category_t good =
                cls == JJ_IS_LOWER ? UTF8PROC_CATEGORY_LL : UTF8PROC_CATEGORY_LU;
            if (cat == good)
                any = true;
            else if (cat == UTF8PROC_CATEGORY_LL || cat == UTF8PROC_CATEGORY_LU ||
                     cat == UTF8PROC_CATEGORY_LT)
                return false;
            continue;
        }
        if (!has_class(c, cls))
            return false;
        any = true;
    }
    return any;
}

const char *ith_jj_line_end(const char *p, const char *end, const char **next)
{
    while (p < end) {
        const char *q = p;
        uint32_t c = ith_jj_next_char(&q, end);
        if ((c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
            c == 0x2029) {
            *next = c == '\r' && q < end && *q == '\n' ? q + 1 : q;
            return p;
        }
        p = q;
    }
    *next = end;
    return end;
}

/* ---- searching ------------------------------------------------------------------------------- */

int64_t ith_jj_find(ith_jj_text hay, ith_jj_text needle, int64_t from)
{
    if (needle.len == 0)
        return from > hay.len ? -1 : from;
    if (needle.len > hay.len - from)
        return -1;
    /* memmem of ThreadSanitizer looks at all of the text each time */
    size_t left = (size_t)(hay.len - from);
    const char *at = needle.len == 1 ? memchr(hay.s + from, needle.s[0], left)
                                     : memmem(hay.s + from, left, needle.s, (size_t)needle.len);
    return at ? at - hay.s : -1;
}

int64_t ith_jj_rfind(ith_jj_text hay, ith_jj_text needle)
{
    for (int64_t i = hay.len - needle.len; i >= 0; i--)
        if (memcmp(hay.s + i, needle.s, (size_t)needle.len) == 0)
            return i;
    return -1;
}

void ith_jj_emit_replaced(ith_jj_interp *in, ith_jj_text t, ith_jj_text old, ith_jj_text with,
                          int64_t max_count)
{
    int64_t at = 0;
    ith_jj_step_bytes(in, t.len);
    for (int64_t n = 0; max_count < 0 || n < max_count; n++) {
        int64_t hit = ith_jj_find(t, old, at);
        if (hit < 0 || (old.len == 0 && n > 0 && at >= t.len))
            break;
        ith_jj_step(in, 1);
        if (old.len == 0) { /* between all code points, and at both ends */
            int64_t one = n == 0 ? 0 : ith_jj_char_offset(t.s + at, t.len - at, 1);
            ith_jj_emit(in, t.s + at, one);
            ith_jj_emit(in, with.s, with.len);
            at += one;
            continue;
        }
        ith_jj_emit(in, t.s + at, hit - at);
        ith_jj_emit(in, with.s, with.len);
        at = hit + old.len;
    }
    ith_jj_emit(in, t.s + at, t.len - at);
}

void ith_jj_emit_escaped(ith_jj_interp *in, ith_jj_text t)
{
    ith_jj_step_bytes(in, t.len);
    for (int64_t i = 0, from = 0; i <= t.len; i++) {
        const char *entity = NULL;
        switch (i < t.len ? t.s[i] : '\0') {
        case '&':
            entity = "&amp;";
            break;
        case '<':
            entity = "&lt;";
            break;
        case '>':
            entity = "&gt;";
            break;
        case '"':
            entity = "&#34;";
            break;
        case '\'':
            entity = "&#39;";
            break;
        default:
            break;
        }
        if (entity || i == t.len) {
            ith_jj_emit(in, t.s + from, i - from);
            ith_jj_emit_text(in, entity ? entity : "");
            from = i + 1;
        }
    }
}

/* ---- formatting ------------------------------------------------------------------------------ */

/* Flags, width, precision and conversion of one "%" or "{:}" field. */
typedef struct {
    bool left, zero, plus, blank, alternate, center, comma;
    char fill[4];
    int fill_len;
    int64_t width, precision; /* precision -1: none */
    char type;
} field_spec;

#define MAX_FIELD_WIDTH 10000

static const char *read_count(ith_jj_interp *in, const char *p, const char *end, int64_t *out)
{
    int64_t n = 0;
    for (; p < end && *p >= '0' && *p <= '9'; p++) {
        n = n * 10 + (*p - '0');
        if (n > MAX_FIELD_WIDTH)
            ith_jj_fail(in, "format: a width beyond %d", MAX_FIELD_WIDTH);
    }
    *out = n;
    return p;
}

/* Emits the captured field body padded to the width; numbers are padded after their sign. */
static void emit_padded(ith_jj_interp *in, const field_spec *spec, ith_jj_value body,
                        bool is_number)
{
    int64_t pad = spec->width - ith_jj_count_chars(body.u.s, body.len), sign = 0;
    bool zero = spec->zero && is_number && !spec->left && !spec->center;
    if (zero && body.len > 0 && (body.u.s[0] == '-' || body.u.s[0] == '+' || body.u.s[0] == ' '))
        sign = 1;
    pad = ith_max_i64(pad, 0);
    int64_t before = spec->left ? 0 : spec->center ? pad / 2 : pad;
    ith_jj_emit(in, body.u.s, sign);
    for (int64_t i = 0; i < before; i++)
        ith_jj_emit(in, zero ? "0" : spec->fill, zero ? 1 : spec->fill_len);
    ith_jj_emit(in, body.u.s + sign, body.len - sign);
    for (int64_t i = before; i < pad; i++)
        ith_jj_emit(in, spec->fill, spec->fill_len);
}

/* Digits of an unsigned number with commas, or as they are. */
static void emit_digits(ith_jj_interp *in, const char *digits, bool comma)
{
    size_t len = strcspn(digits, ".eE");
    for (size_t i = 0; i < len; i++) {
        ith_jj_emit(in, digits + i, 1);
        if (comma && (len - i - 1) % 3 == 0 && i + 1 < len)
            ith_jj_emit(in, ",", 1);
    }
    ith_jj_emit_text(in, digits + len);
}

static void emit_number_field(ith_jj_interp *in, const field_spec *spec, ith_jj_value v)
{
    char text[512];
    bool negative = false;
    if (strchr("dixXob", spec->type)) {
        if (v.kind == JJ_FLOAT && !(fabs(v.u.f) < 9.2e18))
            ith_jj_fail(in, "format: cannot convert %s to an integer",
                        isnan(v.u.f) ? "nan" : "inf");
        int64_t i = v.kind == JJ_FLOAT ? (int64_t)v.u.f : v.kind == JJ_BOOL ? v.u.b : v.u.i;
        uint64_t magnitude = i < 0 ? -(uint64_t)i : (uint64_t)i;
        negative = i < 0;
        if (spec->type == 'x' || spec->type == 'X') {
            snprintf(text, sizeof text, spec->type == 'x' ? "%" PRIx64 : "%" PRIX64, magnitude);
        } else if (spec->type == 'o') {
            snprintf(text, sizeof text, "%" PRIo64, magnitude);
        } else if (spec->type == 'b') {
            size_t n = 0;
            for (int bit = 63; bit >= 0; bit--)
                if (magnitude >> bit || bit == 0)
                    text[n++] = (char)('0' + (magnitude >> bit & 1));
            text[n] = '\0';
        } else {
            snprintf(text, sizeof text, "%" PRIu64, magnitude);
        }
    } else {
        double f = ith_jj_as_double(v);
        negative = signbit(f) && !isnan(f);
        int precision = spec->precision < 0 ? 6 : (int)ith_min_i64(spec->precision, 100);
        if (spec->type == '%')
            f *= 100;
        char format[] = {'%', '.', '*', spec->type == '%' ? 'f' : spec->type, '\0'};
        switch (format[3]) { /* a constant format for each, so that the compiler can check it */
        case 'f':
        case 'F':
            snprintf(text, sizeof text, "%.*f", precision, fabs(f));
            break;
        case 'e':
            snprintf(text, sizeof text, "%.*e", precision, fabs(f));
            break;
        case 'E':
            snprintf(text, sizeof text, "%.*E", precision, fabs(f));
            break;
        case 'G':
            snprintf(text, sizeof text, "%.*G", precision, fabs(f));
            break;
        default:
            snprintf(text, sizeof text, "%.*g", precision, fabs(f));
            break;
        }
    }
    int64_t begin = ith_jj_capture_begin(in);
    if (negative || spec->plus || spec->blank)
        ith_jj_emit(in, negative ? "-" : spec->plus ? "+" : " ", 1);
    if (spec->alternate && strchr("xXob", spec->type)) {
        char prefix[] = {'0', spec->type, '\0'};
        ith_jj_emit_text(in, prefix);
    }
    emit_digits(in, text, spec->comma);
    if (spec->type == '%')
        ith_jj_emit(in, "%", 1);
    emit_padded(in, spec, ith_jj_capture_end(in, begin), true);
}

static void emit_text_field(ith_jj_interp *in, const field_spec *spec, ith_jj_value text)
{
    if (spec->precision >= 0)
        text.len = ith_jj_char_offset(text.u.s, text.len, spec->precision);
    emit_padded(in, spec, text, false);
}

/* The argument of a %(name)s or %s field. */
static ith_jj_value percent_argument(ith_jj_interp *in, ith_jj_value args, ith_jj_text key,
                                     int64_t *used)
{
    if (key.s) {
        if (args.kind != JJ_DICT)
            ith_jj_fail(in, "format: %%(%.*s) needs a mapping", (int)ith_min_i64(key.len, 60),
                        key.s);
        ith_jj_value *found = ith_jj_dict_get(in, args.u.dict, ith_jj_str(key.s, key.len));
        if (!found)
            ith_jj_fail(in, "format: no key '%.*s'", (int)ith_min_i64(key.len, 60), key.s);
        return *found;
    }
    bool is_tuple = args.kind == JJ_LIST && args.u.list->flavor == JJ_SEQ_TUPLE;
    int64_t count = is_tuple ? args.u.list->count : 1, i = (*used)++;
    if (i >= count)
        ith_jj_fail(in, "format: not enough arguments, %lld given", (long long)count);
    return is_tuple ? args.u.list->items[i] : args;
}

static const char *percent_field(ith_jj_interp *in, const char *p, const char *end,
                                 ith_jj_value args, int64_t *used)
{
    field_spec spec = {.precision = -1, .fill = " ", .fill_len = 1};
    ith_jj_text key = {NULL, 0};
    if (p < end && *p == '(') {
        key.s = ++p;
        while (p < end && *p != ')')
            p++;
        key.len = p - key.s;
        p += p < end;
    }
    for (; p < end && *p && strchr("-0+ #", *p); p++) {
        spec.left |= *p == '-';
        spec.zero |= *p == '0';
        spec.plus |= *p == '+';
        spec.blank |= *p == ' ';
        spec.alternate |= *p == '#';
    }
    p = read_count(in, p, end, &spec.width);
    if (p < end && *p == '.')
        p = read_count(in, p + 1, end, &spec.precision);
    if (p == end)
        ith_jj_fail(in, "format: '%%' at the end of the format");
    spec.type = *p++;
    if (spec.type == '%') {
        ith_jj_emit(in, "%", 1);
        return p;
    }
    ith_jj_value v = percent_argument(in, args, key, used);
    if (spec.type == 's' || spec.type == 'r') {
        int64_t begin = ith_jj_capture_begin(in);
        if (spec.type == 's')
            ith_jj_emit_str(in, v);
        else
            ith_jj_emit_repr(in, v);
        emit_text_field(in, &spec, ith_jj_capture_end(in, begin));
        return p;
    }
    if (!strchr("diuxXofFeEgG", spec.type))
        ith_jj_fail(in, "format: conversion '%%%c' is not supported", spec.type);
    if (!ith_jj_is_number(v))
        ith_jj_fail(in, "format: %%%c needs a number, not %s", spec.type, ith_jj_type_name(v));
    if (spec.type == 'i' || spec.type == 'u')
        spec.type = 'd';
    emit_number_field(in, &spec, v);
    return p;
}

ith_jj_value ith_jj_percent_format(ith_jj_interp *in, ith_jj_value format, ith_jj_value args)
{
    int64_t begin = ith_jj_capture_begin(in), used = 0;
    const char *p = format.u.s, *end = p + format.len;
    while (p < end) {
        const char *q = memchr(p, '%', (size_t)(end - p));
        if (!q) {
            ith_jj_emit(in, p, end - p);
            break;
        }
        ith_jj_emit(in, p, q - p);
        p = percent_field(in, q + 1, end, args, &used);
    }
    bool is_tuple = args.kind == JJ_LIST && args.u.list->flavor == JJ_SEQ_TUPLE;
    if (used < (is_tuple                                       ? args.u.list->count
                : args.kind == JJ_DICT || args.kind == JJ_LIST ? 0
                                                               : 1))
        ith_jj_fail(in, "format: not all arguments converted during string formatting");
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), format.markup);
}

/* What stands before ':' in a replacement field: "", "0", "name", "a.b", "a[0]". */
static ith_jj_value brace_argument(ith_jj_interp *in, ith_jj_text path, const ith_jj_args *args,
                                   int64_t *next)
{
    int64_t head = 0;
    while (head < path.len && path.s[head] != '.' && path.s[head] != '[')
        head++;
    ith_jj_value v;
    bool digits = head > 0 && ith_jj_all_chars((ith_jj_text){path.s, head}, JJ_DECIMAL);
    if (head == 0 || digits) {
        int64_t i = 0;
        if (digits)
            read_count(in, path.s, path.s + head, &i);
        else
            i = (*next)++;
        if (i >= args->num_pos)
            ith_jj_fail(in, "format: no argument %lld", (long long)i);
        v = args->values[i];
    } else {
        int64_t k = 0;
        while (k < args->num_kw && !((int64_t)strlen(args->names[k]) == head &&
                                     memcmp(args->names[k], path.s, (size_t)head) == 0))
            k++;
        if (k == args->num_kw)
            ith_jj_fail(in, "format: no argument '%.*s'", (int)ith_min_i64(head, 60), path.s);
        v = args->values[args->num_pos + k];
    }
    for (int64_t i = head; i < path.len;) {
        bool is_item = path.s[i] == '[';
        int64_t from = ++i;
        while (i < path.len && (is_item ? path.s[i] != ']' : path.s[i] != '.' && path.s[i] != '['))
            i++;
        ith_jj_value key = ith_jj_str_copy(in, path.s + from, i - from);
        int64_t number = 0;
        if (is_item && ith_jj_all_chars((ith_jj_text){key.u.s, key.len}, JJ_DECIMAL)) {
            read_count(in, key.u.s, key.u.s + key.len, &number);
            key = ith_jj_int(number);
        }
        v = is_item ? ith_jj_getitem(in, v, key) : ith_jj_getattr(in, v, key.u.s);
        i += is_item;
    }
    return v;
}

static field_spec parse_brace_spec(ith_jj_interp *in, ith_jj_text t)
{
    field_spec spec = {.precision = -1, .fill = " ", .fill_len = 1};
    const char *p = t.s, *end = t.s + t.len;
    char align = '\0';
    if (p < end) {
        const char *q = p;
        ith_jj_next_char(&q, end);
        if (q < end && strchr("<>^", *q)) {
            spec.fill_len = (int)(q - p);
            memcpy(spec.fill, p, (size_t)spec.fill_len);
            align = *q;
            p = q + 1;
        } else if (strchr("<>^", *p)) {
            align = *p++;
        }
    }
    for (; p < end && *p && strchr("+- #0", *p); p++) {
        spec.plus |= *p == '+';
        spec.blank |= *p == ' ';
        spec.alternate |= *p == '#';
        spec.zero |= *p == '0' && !align;
    }
    p = read_count(in, p, end, &spec.width);
    if (p < end && *p == ',') {
        spec.comma = true;
        p++;
    }
    if (p < end && *p == '.')
        p = read_count(in, p + 1, end, &spec.precision);
    if (p < end)
        spec.type = *p++;
    if (p < end)
        ith_jj_fail(in, "format: specification '%.*s' is not supported",
                    (int)ith_min_i64(t.len, 60), t.s);
    spec.left = align == '<';
    spec.center = align == '^';
    if (align == '>')
        spec.zero = false;
    return spec;
}

static void emit_brace_field(ith_jj_interp *in, ith_jj_value v, char conversion,
                             ith_jj_text spec_text)
{
    field_spec spec = parse_brace_spec(in, spec_text);
    bool is_number =
        ith_jj_is_number(v) && !conversion && !(v.kind == JJ_BOOL && spec_text.len == 0);
    if (is_number && (spec.type || spec_text.len > 0) && spec.type != 's') {
        if (!spec.type && v.kind != JJ_FLOAT)
            spec.type = 'd';
        if (spec.type == 'n')
            spec.type = 'd';
        if (spec.type && !strchr("dxXobfFeEgG%", spec.type))
            ith_jj_fail(in, "format: type '%c' is not supported", spec.type);
        if (spec.type && (v.kind != JJ_FLOAT || !strchr("dxXob", spec.type))) {
            emit_number_field(in, &spec, v);
            return;
        }
        if (spec.type || spec.precision >= 0)
            ith_jj_fail(in, "format: this specification is not supported for a float");
    } else if (spec.type && spec.type != 's') {
        ith_jj_fail(in, "format: unknown type '%c' for %s", spec.type, ith_jj_type_name(v));
    }
    int64_t begin = ith_jj_capture_begin(in);
    if (conversion == 'r' || conversion == 'a')
        ith_jj_emit_repr(in, v);
    else
        ith_jj_emit_str(in, v);
    ith_jj_value text = ith_jj_capture_end(in, begin);
    if (is_number) { /* a float without type: right-aligned like all numbers */
        emit_padded(in, &spec, text, true);
        return;
    }
    if (!spec.center && !memchr(spec_text.s ? spec_text.s : "", '>', (size_t)spec_text.len))
        spec.left = true;
    emit_text_field(in, &spec, text);
}

ith_jj_value ith_jj_brace_format(ith_jj_interp *in, ith_jj_value format, const ith_jj_args *args)
{
    int64_t begin = ith_jj_capture_begin(in), next = 0;
    const char *p = format.u.s, *end = p + format.len;
    while (p < end) {
        if ((*p == '{' || *p == '}') && p + 1 < end && p[1] == *p) {
            ith_jj_emit(in, p, 1);
            p += 2;
            continue;
        }
        if (*p == '}')
            ith_jj_fail(in, "format: single '}' in the format");
        if (*p != '{') {
            ith_jj_emit(in, p++, 1);
            continue;
        }
        const char *close = memchr(p, '}', (size_t)(end - p));
        if (!close || memchr(p + 1, '{', (size_t)(close - p - 1)))
            ith_jj_fail(in, "format: '{' without its '}', or nested fields");
        const char *stop = p + 1;
        while (stop < close && *stop != ':' && *stop != '!')
            stop++;
        char conversion = '\0';
        ith_jj_text path = {p + 1, stop - p - 1}, spec = {close, 0};
        if (stop < close && *stop == '!') {
            conversion = stop + 1 < close ? stop[1] : '\0';
            stop += 2;
        }
        if (stop < close && *stop == ':')
            spec = (ith_jj_text){stop + 1, close - stop - 1};
        emit_brace_field(in, brace_argument(in, path, args, &next), conversion, spec);
        p = close + 1;
    }
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), format.markup);
}
