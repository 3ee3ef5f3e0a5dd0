/* jinja_filters.c - the filters of Jinja2 that chat templates have a use for. */
#include "tokenizer/jinja_internal.h"

#include "base/checked.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- arguments ------------------------------------------------------------------------------- */

ith_jj_bound ith_jj_bind(ith_jj_interp *in, const char *what, const ith_jj_args *args,
                         const char *const *params, int64_t num_required)
{
    ith_jj_bound b = {0};
    int64_t n = 0;
    while (params[n])
        n++;
    ITH_ASSERT(n <= JJ_MAX_PARAMS);
    if (args->num_pos > n)
        ith_jj_fail(in, "%s: takes at most %lld argument(s), %lld given", what, (long long)n,
                    (long long)args->num_pos);
    for (int64_t i = 0; i < args->num_pos; i++) {
        b.v[i] = args->values[i];
        b.given[i] = true;
    }
    for (int64_t k = 0; k < args->num_kw; k++) {
        int64_t i = 0;
        while (i < n && strcmp(params[i], args->names[k]) != 0)
            i++;
        if (i == n || b.given[i])
            ith_jj_fail(in, "%s: argument '%s' is %s", what, args->names[k],
                        i == n ? "unknown" : "given twice");
        b.v[i] = args->values[args->num_pos + k];
        b.given[i] = true;
    }
    for (int64_t i = 0; i < num_required; i++)
        if (!b.given[i])
            ith_jj_fail(in, "%s: argument '%s' is missing", what, params[i]);
    return b;
}

int64_t ith_jj_want_int(ith_jj_interp *in, const char *what, ith_jj_value v)
{
    ith_jj_refuse_undefined(in, v);
    if (v.kind != JJ_INT && v.kind != JJ_BOOL)
        ith_jj_fail(in, "%s: an integer is needed, not %s", what, ith_jj_type_name(v));
    return v.kind == JJ_INT ? v.u.i : v.u.b;
}

ith_jj_text ith_jj_want_str(ith_jj_interp *in, const char *what, ith_jj_value v)
{
    ith_jj_refuse_undefined(in, v);
    if (v.kind != JJ_STR)
        ith_jj_fail(in, "%s: a string is needed, not %s", what, ith_jj_type_name(v));
    return (ith_jj_text){v.u.s, v.len};
}

void ith_jj_no_arguments(ith_jj_interp *in, const char *what, const ith_jj_args *args)
{
    static const char *const none[] = {NULL};
    ith_jj_bind(in, what, args, none, 0);
}

/* Attribute path "a.b.0" of an item, as jinja's make_attrgetter. */
static ith_jj_value get_path(ith_jj_interp *in, ith_jj_value item, ith_jj_value path)
{
    if (path.kind != JJ_STR)
        return ith_jj_getitem(in, item, path);
    for (int64_t at = 0; at <= path.len;) {
        int64_t dot = ith_jj_find((ith_jj_text){path.u.s, path.len}, (ith_jj_text){".", 1}, at);
        int64_t end = dot < 0 ? path.len : dot;
        ith_jj_value key = ith_jj_str_copy(in, path.u.s + at, end - at);
        if (ith_jj_all_chars((ith_jj_text){key.u.s, key.len}, JJ_DECIMAL))
            key = ith_jj_int(strtoll(key.u.s, NULL, 10));
        item = ith_jj_getitem(in, item, key);
        at = end + 1;
    }
    return item;
}

static bool is_missing(ith_jj_value v)
{
    return v.kind == JJ_UNDEFINED || v.kind == JJ_NONE;
}

static ith_jj_value lowered(ith_jj_interp *in, ith_jj_value v)
{
    if (v.kind != JJ_STR)
        return v;
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_case(in, (ith_jj_text){v.u.s, v.len}, JJ_LOWER);
    return ith_jj_capture_end(in, begin);
}

static void push_item(ith_jj_value list, ith_jj_value item)
{
    list.u.list->items[list.u.list->count++] = item;
}

/* ---- text filters ---------------------------------------------------------------------------- */

static ith_jj_value change_case(ith_jj_interp *in, ith_jj_value v, ith_jj_case mode)
{
    ith_jj_value s = ith_jj_to_str(in, v);
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_case(in, (ith_jj_text){s.u.s, s.len}, mode);
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), s.markup);
}

static ith_jj_value filter_upper(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'upper'", args);
    return change_case(in, v, JJ_UPPER);
}

static ith_jj_value filter_lower(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'lower'", args);
    return change_case(in, v, JJ_LOWER);
}

static ith_jj_value filter_capitalize(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'capitalize'", args);
    return change_case(in, v, JJ_CAPITALIZE);
}

/* Words begin after runs of "-", "(", "{", "[", "<" and whitespace. */
static ith_jj_value filter_title(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'title'", args);
    ith_jj_value s = ith_jj_to_str(in, v);
    int64_t begin = ith_jj_capture_begin(in);
    bool in_word = false;
    for (const char *p = s.u.s, *end = p + s.len; p < end;) {
        const char *from = p;
        uint32_t c = ith_jj_next_char(&p, end);
        bool separates = ith_jj_is_space(c) || (c < 0x80 && c && strchr("-({[<", (int)c));
        if (separates || !in_word) {
            ith_jj_emit_case(in, (ith_jj_text){from, p - from}, JJ_UPPER);
            in_word = !separates;
            continue;
        }
        while (p < end) { /* the rest of the word at once, for the final sigma */
            const char *q = p;
            c = ith_jj_next_char(&q, end);
            if (ith_jj_is_space(c) || (c < 0x80 && c && strchr("-({[<", (int)c)))
                break;
            p = q;
        }
        ith_jj_emit_case(in, (ith_jj_text){from, p - from}, JJ_LOWER);
    }
    return ith_jj_capture_end(in, begin);
}

static ith_jj_value filter_trim(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"chars", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'trim'", args, params, 0);
    ith_jj_text chars = {NULL, 0};
    if (b.given[0] && b.v[0].kind != JJ_NONE)
        chars = ith_jj_want_str(in, "filter 'trim'", b.v[0]);
    ith_jj_value s = ith_jj_to_str(in, v);
    ith_jj_text t = ith_jj_strip((ith_jj_text){s.u.s, s.len}, chars, true, true);
    ith_jj_step_bytes(in, s.len - t.len);
    return ith_jj_with_markup(ith_jj_str(t.s, t.len), s.markup);
}

static ith_jj_value filter_replace(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"old", "new", "count", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'replace'", args, params, 2);
    ith_jj_value s = ith_jj_to_str(in, v), old = ith_jj_to_str(in, b.v[0]),
                 with = ith_jj_to_str(in, b.v[1]);
    int64_t count = is_missing(b.v[2]) ? -1 : ith_jj_want_int(in, "filter 'replace'", b.v[2]);
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_replaced(in, (ith_jj_text){s.u.s, s.len}, (ith_jj_text){old.u.s, old.len},
                         (ith_jj_text){with.u.s, with.len}, count);
    return ith_jj_capture_end(in, begin);
}

static ith_jj_value filter_escape(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'escape'", args);
    ith_jj_value s = ith_jj_to_str(in, v);
    if (s.markup)
        return s;
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_escaped(in, (ith_jj_text){s.u.s, s.len});
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), true);
}

static ith_jj_value filter_safe(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'safe'", args);
    return ith_jj_with_markup(ith_jj_to_str(in, v), true);
}

static ith_jj_value filter_string(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'string'", args);
    return ith_jj_to_str(in, v);
}

static ith_jj_value filter_indent(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"width", "first", "blank", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'indent'", args, params, 0);
    ith_jj_value s = ith_jj_to_str(in, v), pad = b.v[0];
    if (!b.given[0] || pad.kind != JJ_STR) {
        int64_t width = b.given[0] ? ith_jj_want_int(in, "filter 'indent'", pad) : 4;
        pad = ith_jj_binary(in, JJ_MUL, ith_jj_cstr(" "), ith_jj_int(width));
    }
    int64_t begin = ith_jj_capture_begin(in);
    const char *p = s.u.s, *end = p + s.len;
    bool is_first = true, ends_with_break = s.len == 0;
    while (p < end || ends_with_break) {
        const char *next = end, *stop = p < end ? ith_jj_line_end(p, end, &next) : end;
        bool wanted = is_first ? ith_jj_truth(b.v[1]) : ith_jj_truth(b.v[2]) || stop > p;
        ith_jj_emit(in, "\n", !is_first);
        ith_jj_emit(in, pad.u.s, wanted ? pad.len : 0);
        ith_jj_emit(in, p, stop - p);
        ith_jj_step(in, 1);
        if (p == end)
            break;
        ends_with_break = next == end && next > stop;
        is_first = false;
        p = next;
    }
    return ith_jj_capture_end(in, begin);
}

static ith_jj_value filter_wordcount(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'wordcount'", args);
    ith_jj_value s = ith_jj_to_str(in, v);
    int64_t count = 0;
    bool in_word = false;
    ith_jj_step_bytes(in, s.len * 8);
    for (const char *p = s.u.s, *end = p + s.len; p < end;) {
        const char *from = p;
        ith_jj_next_char(&p, end);
        bool is_word = *from == '_' || ith_jj_all_chars((ith_jj_text){from, p - from}, JJ_ALNUM);
        count += is_word && !in_word;
        in_word = is_word;
    }
    return ith_jj_int(count);
}

static ith_jj_value filter_truncate(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"length", "killwords", "end", "leeway", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'truncate'", args, params, 0);
    int64_t length = b.given[0] ? ith_jj_want_int(in, "filter 'truncate'", b.v[0]) : 255;
    int64_t leeway = is_missing(b.v[3]) ? 5 : ith_jj_want_int(in, "filter 'truncate'", b.v[3]);
    ith_jj_value s = ith_jj_to_str(in, v),
                 tail = b.given[2] ? ith_jj_to_str(in, b.v[2]) : ith_jj_cstr("...");
    int64_t keep = length - ith_jj_count_chars(tail.u.s, tail.len);
    if (keep < 0 || leeway < 0)
        ith_jj_fail(in, "filter 'truncate': the length is too small");
    if (ith_jj_count_chars(s.u.s, s.len) <= length + leeway)
        return s;
    ith_jj_text t = {s.u.s, ith_jj_char_offset(s.u.s, s.len, keep)};
    int64_t blank = ith_jj_truth(b.v[1]) ? -1 : ith_jj_rfind(t, (ith_jj_text){" ", 1});
    if (blank >= 0)
        t.len = blank;
    return ith_jj_concat(in, ith_jj_str(t.s, t.len), tail);
}

static ith_jj_value filter_center(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"width", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'center'", args, params, 0);
    ith_jj_value s = ith_jj_to_str(in, v);
    ith_jj_args one = {.values = b.v, .num_pos = 1};
    if (!b.given[0])
        b.v[0] = ith_jj_int(80);
    return ith_jj_find_method(s, "center")(in, s, &one);
}

static ith_jj_value filter_format(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_value operand = ith_jj_list_new(in, args->num_pos, JJ_SEQ_TUPLE);
    for (int64_t i = 0; i < args->num_pos; i++)
        push_item(operand, args->values[i]);
    if (args->num_kw > 0) {
        if (args->num_pos > 0)
            ith_jj_fail(in, "filter 'format': positional or keyword arguments, not both");
        operand = ith_jj_dict_new(in);
        for (int64_t i = 0; i < args->num_kw; i++)
            ith_jj_dict_set(in, operand.u.dict, ith_jj_cstr(args->names[i]), args->values[i]);
    }
    return ith_jj_percent_format(in, ith_jj_to_str(in, v), operand);
}

static ith_jj_value filter_tojson(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"ensure_ascii", "indent", "separators", "sort_keys", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'tojson'", args, params, 0);
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_json(in, v, b.v[1], b.given[2] ? b.v[2] : ith_jj_none(), ith_jj_truth(b.v[0]),
                     ith_jj_truth(b.v[3]));
    return ith_jj_capture_end(in, begin);
}

/* ---- number filters -------------------------------------------------------------------------- */

/* Python's int(text, base) and float(text): false when the text is not one. Underscores may stand
 * between digits. */
static bool clean_number(ith_jj_text t, char *buf, size_t size)
{
    t = ith_jj_strip(t, (ith_jj_text){NULL, 0}, true, true);
    size_t n = 0;
    for (int64_t i = 0; i < t.len; i++) {
        bool digit_before = i > 0 && isalnum((unsigned char)t.s[i - 1]);
        bool digit_after = i + 1 < t.len && isalnum((unsigned char)t.s[i + 1]);
        if (t.s[i] == '_' && digit_before && digit_after)
            continue;
        if (n + 1 >= size || t.s[i] == '_' || t.s[i] == '\0')
            return false;
        buf[n++] = t.s[i];
    }
    buf[n] = '\0';
    return n > 0 && !isspace((unsigned char)buf[0]);
}

static bool text_to_double(ith_jj_text t, double *out)
{
    char buf[400], *stop;
    if (!clean_number(t, buf, sizeof buf))
        return false;
    if (strchr(buf, 'x') || strchr(buf, 'X') || strchr(buf, '('))
        return false;
    *out = strtod(buf, &stop);
    return *stop == '\0';
}

static bool text_to_int(ith_jj_text t, int base, int64_t *out)
{
    char buf[80], *p = buf, *stop;
    if (!clean_number(t, buf, sizeof buf))
        return false;
    bool negative = *p == '-';
    p += *p == '-' || *p == '+';
    const char *prefix = base == 16 ? "xX" : base == 8 ? "oO" : base == 2 ? "bB" : "";
    if (p[0] == '0' && p[1] && strchr(prefix, p[1]))
        p += 2;
    if (!isalnum((unsigned char)*p))
        return false;
    if (base == 16 && p[0] == '0' && (p[1] | 32) == 'x')
        return false;
    *out = strtoll(p, &stop, base);
    if (*stop || *out == INT64_MAX)
        return false;
    if (negative)
        *out = -*out;
    return true;
}

static bool double_to_int(double f, int64_t *out)
{
    if (!(fabs(f) < 9.2e18))
        return false;
    *out = (int64_t)f;
    return true;
}

static ith_jj_value filter_int(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"default", "base", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'int'", args, params, 0);
    int64_t base = b.given[1] ? ith_jj_want_int(in, "filter 'int'", b.v[1]) : 10, i = 0;
    double f = 0;
    ith_jj_refuse_undefined(in, v);
    if (base < 2 || base > 36)
        ith_jj_fail(in, "filter 'int': base %lld, it must be 2 to 36", (long long)base);
    ith_jj_text t = {v.u.s, v.len};
    if (v.kind == JJ_INT || v.kind == JJ_BOOL)
        return ith_jj_int(v.kind == JJ_INT ? v.u.i : v.u.b);
    if (v.kind == JJ_FLOAT && double_to_int(v.u.f, &i))
        return ith_jj_int(i);
    if (v.kind == JJ_STR && text_to_int(t, (int)base, &i))
        return ith_jj_int(i);
    if (v.kind == JJ_STR && text_to_double(t, &f) && double_to_int(f, &i))
        return ith_jj_int(i);
    return b.given[0] ? b.v[0] : ith_jj_int(0);
}

static ith_jj_value filter_float(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"default", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'float'", args, params, 0);
    double f = 0;
    ith_jj_refuse_undefined(in, v);
    if (ith_jj_is_number(v))
        return ith_jj_float(ith_jj_as_double(v));
    if (v.kind == JJ_STR && text_to_double((ith_jj_text){v.u.s, v.len}, &f))
        return ith_jj_float(f);
    return b.given[0] ? b.v[0] : ith_jj_float(0);
}

static ith_jj_value filter_abs(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'abs'", args);
    ith_jj_refuse_undefined(in, v);
    if (!ith_jj_is_number(v))
        ith_jj_fail(in, "filter 'abs': a number is needed, not %s", ith_jj_type_name(v));
    if (v.kind == JJ_FLOAT)
        return ith_jj_float(fabs(v.u.f));
    int64_t i = v.kind == JJ_BOOL ? v.u.b : v.u.i;
    return i < 0 ? ith_jj_binary(in, JJ_SUB, ith_jj_int(0), ith_jj_int(i)) : ith_jj_int(i);
}

static ith_jj_value round_int(ith_jj_interp *in, int64_t i, int64_t precision)
{
    int64_t unit = 1;
    if (precision >= 0)
        return ith_jj_int(i);
    if (precision < -18)
        return ith_jj_int(0);
    for (int64_t k = precision; k < 0; k++)
        unit *= 10;
    int64_t rest = i % unit, down = i - rest;
    if (rest < 0) {
        rest += unit;
        down -= unit;
    }
    bool up = rest > unit - rest || (rest == unit - rest && down / unit % 2 != 0);
    return up ? ith_jj_binary(in, JJ_ADD, ith_jj_int(down), ith_jj_int(unit)) : ith_jj_int(down);
}

static ith_jj_value filter_round(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"precision", "method", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'round'", args, params, 0);
    int64_t precision = b.given[0] ? ith_jj_want_int(in, "filter 'round'", b.v[0]) : 0;
    ith_jj_value method = b.given[1] ? b.v[1] : ith_jj_cstr("common");
    ith_jj_refuse_undefined(in, v);
    bool is_ceil = ith_jj_equal(in, method, ith_jj_cstr("ceil"));
    if (!ith_jj_is_number(v))
        ith_jj_fail(in, "filter 'round': a number is needed, not %s", ith_jj_type_name(v));
    if (precision > 300 || precision < -300)
        ith_jj_fail(in, "filter 'round': precision %lld", (long long)precision);
    if (is_ceil || ith_jj_equal(in, method, ith_jj_cstr("floor"))) {
        double scale = pow(10, (double)precision), x = ith_jj_as_double(v) * scale;
        return ith_jj_float((is_ceil ? ceil(x) : floor(x)) / scale);
    }
    if (!ith_jj_equal(in, method, ith_jj_cstr("common")))
        ith_jj_fail(in, "filter 'round': method must be common, ceil or floor");
    if (v.kind != JJ_FLOAT)
        return round_int(in, v.kind == JJ_BOOL ? v.u.b : v.u.i, precision);
    if (precision < 0) {
        double scale = pow(10, (double)-precision);
        return ith_jj_float(rint(v.u.f / scale) * scale);
    }
    char text[700]; /* exact decimal rounding: 309 digits, the point, 300 more */
    snprintf(text, sizeof text, "%.*f", (int)precision, v.u.f);
    return ith_jj_float(strtod(text, NULL));
}

/* ---- sequence filters ------------------------------------------------------------------------ */

static ith_jj_value filter_length(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'length'", args);
    switch (v.kind) {
    case JJ_UNDEFINED:
        return ith_jj_int(0);
    case JJ_STR:
        ith_jj_step_bytes(in, v.len);
        return ith_jj_int(ith_jj_count_chars(v.u.s, v.len));
    case JJ_DICT:
        return ith_jj_int(v.u.dict->count);
    case JJ_LOOP:
        return ith_jj_int(v.u.loop->length);
    case JJ_LIST:
        if (v.u.list->flavor != JJ_SEQ_GENERATOR)
            return ith_jj_int(v.u.list->count);
        break;
    default:
        break;
    }
    ith_jj_fail(in, "filter 'length': object of type '%s' has no len()", ith_jj_type_name(v));
}

static ith_jj_value filter_default(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"default_value", "boolean", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'default'", args, params, 0);
    bool replace = v.kind == JJ_UNDEFINED || (ith_jj_truth(b.v[1]) && !ith_jj_truth(v));
    return !replace ? v : b.given[0] ? b.v[0] : ith_jj_cstr("");
}

static ith_jj_value filter_first(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'first'", args);
    ith_jj_list *generator =
        v.kind == JJ_LIST && v.u.list->flavor == JJ_SEQ_GENERATOR ? v.u.list : NULL;
    int64_t pos = generator ? generator->pos : 0;
    if (v.kind == JJ_STR && v.len > 0)
        return ith_jj_getitem(in, v, ith_jj_int(0));
    ith_jj_list list = ith_jj_iterate(in, v);
    if (generator)
        generator->pos = ith_min_i64(pos + 1, generator->count);
    return list.count > 0 ? list.items[0]
                          : ith_jj_undefined(in, "No first item, sequence was empty.");
}

static ith_jj_value filter_last(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'last'", args);
    if (v.kind == JJ_LIST && v.u.list->flavor == JJ_SEQ_GENERATOR)
        ith_jj_fail(in, "filter 'last': 'generator' object is not reversible");
    if (v.kind == JJ_STR && v.len > 0)
        return ith_jj_getitem(in, v, ith_jj_int(-1));
    ith_jj_list list = ith_jj_iterate(in, v);
    return list.count > 0 ? list.items[list.count - 1]
                          : ith_jj_undefined(in, "No last item, sequence was empty.");
}

static ith_jj_value filter_list(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'list'", args);
    ith_jj_list list = ith_jj_iterate(in, v);
    ith_jj_value out = ith_jj_list_new(in, list.count, JJ_SEQ_LIST);
    for (int64_t i = 0; i < list.count; i++)
        push_item(out, list.items[i]);
    return out;
}

static ith_jj_value filter_items(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'items'", args);
    if (v.kind != JJ_DICT && v.kind != JJ_UNDEFINED)
        ith_jj_fail(in, "filter 'items': can only get item pairs from a mapping, not from %s",
                    ith_jj_type_name(v));
    int64_t n = v.kind == JJ_DICT ? v.u.dict->count : 0;
    ith_jj_value out = ith_jj_list_new(in, n, JJ_SEQ_GENERATOR);
    for (int64_t i = 0; i < n; i++) {
        ith_jj_value pair = ith_jj_list_new(in, 2, JJ_SEQ_TUPLE);
        push_item(pair, v.u.dict->keys[i]);
        push_item(pair, v.u.dict->values[i]);
        push_item(out, pair);
    }
    return out;
}

static ith_jj_value filter_join(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"d", "attribute", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'join'", args, params, 0);
    ith_jj_value between = b.given[0] ? ith_jj_to_str(in, b.v[0]) : ith_jj_cstr("");
    ith_jj_list list = ith_jj_iterate(in, v);
    int64_t begin = ith_jj_capture_begin(in);
    for (int64_t i = 0; i < list.count; i++) {
        ith_jj_emit(in, between.u.s, i ? between.len : 0);
        ith_jj_emit_str(in,
                        is_missing(b.v[1]) ? list.items[i] : get_path(in, list.items[i], b.v[1]));
        ith_jj_step(in, 1);
    }
    return ith_jj_capture_end(in, begin);
}

static ith_jj_value filter_reverse(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "filter 'reverse'", args);
    if (v.kind == JJ_STR)
        return ith_jj_sequence_slice(in, v, ith_jj_none(), ith_jj_none(), ith_jj_int(-1));
    ith_jj_list list = ith_jj_iterate(in, v);
    ith_jj_value out = ith_jj_list_new(in, list.count, JJ_SEQ_GENERATOR);
    for (int64_t i = list.count; i > 0; i--)
        push_item(out, list.items[i - 1]);
    return out;
}

/* Stable merge sort of items by keys. */
static void sort_by(ith_jj_interp *in, ith_jj_value *keys, ith_jj_value *items,
                    ith_jj_value *scratch, int64_t n, bool reverse)
{
    if (n < 2)
        return;
    int64_t half = n / 2, i = 0, j = half, k = 0;
    sort_by(in, keys, items, scratch, half, reverse);
    sort_by(in, keys + half, items + half, scratch, n - half, reverse);
    while (i < half || j < n) {
        bool right = i == half;
        if (i < half && j < n)
            right = reverse ? ith_jj_order(in, keys[i], keys[j], "<") < 0
                            : ith_jj_order(in, keys[j], keys[i], "<") < 0;
        int64_t from = right ? j++ : i++;
        scratch[2 * k] = keys[from];
        scratch[2 * k++ + 1] = items[from];
    }
    for (k = 0; k < n; k++) {
        keys[k] = scratch[2 * k];
        items[k] = scratch[2 * k + 1];
    }
}

/* attribute: missing, a path, or several separated by commas. */
static ith_jj_value sort_key(ith_jj_interp *in, ith_jj_value item, ith_jj_value attribute,
                             bool case_sensitive)
{
    if (is_missing(attribute))
        return case_sensitive ? item : lowered(in, item);
    ith_jj_text path = {attribute.u.s, attribute.len};
    if (attribute.kind != JJ_STR || ith_jj_find(path, (ith_jj_text){",", 1}, 0) < 0) {
        ith_jj_value v = get_path(in, item, attribute);
        return case_sensitive ? v : lowered(in, v);
    }
    ith_jj_value key = ith_jj_list_new(in, path.len + 1, JJ_SEQ_LIST);
    for (int64_t at = 0; at <= path.len;) {
        int64_t comma = ith_jj_find(path, (ith_jj_text){",", 1}, at),
                end = comma < 0 ? path.len : comma;
        ith_jj_value v = get_path(in, item, ith_jj_str(path.s + at, end - at));
        push_item(key, case_sensitive ? v : lowered(in, v));
        at = end + 1;
    }
    return key;
}

static ith_jj_value sorted(ith_jj_interp *in, ith_jj_list list, ith_jj_value attribute,
                           bool case_sensitive, bool reverse)
{
    int64_t n = list.count;
    ith_jj_value out = ith_jj_list_new(in, n, JJ_SEQ_LIST);
    ith_jj_value *keys = ith_jj_alloc(in, ith_mul_bytes(n, sizeof *keys));
    ith_jj_value *scratch = ith_jj_alloc(in, ith_mul_bytes(2 * n, sizeof *scratch));
    for (int64_t i = 0; i < n; i++) {
        push_item(out, list.items[i]);
        keys[i] = sort_key(in, list.items[i], attribute, case_sensitive);
    }
    sort_by(in, keys, out.u.list->items, scratch, n, reverse);
    return out;
}

static ith_jj_value filter_sort(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"reverse", "case_sensitive", "attribute", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'sort'", args, params, 0);
    return sorted(in, ith_jj_iterate(in, v), b.v[2], ith_jj_truth(b.v[1]), ith_jj_truth(b.v[0]));
}

static ith_jj_value filter_dictsort(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"case_sensitive", "by", "reverse", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'dictsort'", args, params, 0);
    ith_jj_refuse_undefined(in, v);
    bool by_value = b.given[1] && ith_jj_equal(in, b.v[1], ith_jj_cstr("value"));
    if (b.given[1] && !by_value && !ith_jj_equal(in, b.v[1], ith_jj_cstr("key")))
        ith_jj_fail(in, "filter 'dictsort': by must be 'key' or 'value'");
    ith_jj_args none = {0};
    ith_jj_list pairs = ith_jj_iterate(in, filter_items(in, v, &none));
    return sorted(in, pairs, ith_jj_int(by_value), ith_jj_truth(b.v[0]), ith_jj_truth(b.v[2]));
}

static ith_jj_value filter_unique(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"case_sensitive", "attribute", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'unique'", args, params, 0);
    ith_jj_list list = ith_jj_iterate(in, v);
    ith_jj_value out = ith_jj_list_new(in, list.count, JJ_SEQ_GENERATOR),
                 seen = ith_jj_dict_new(in);
    for (int64_t i = 0; i < list.count; i++) {
        ith_jj_value key = sort_key(in, list.items[i], b.v[1], ith_jj_truth(b.v[0]));
        if (ith_jj_dict_get(in, seen.u.dict, key))
            continue;
        ith_jj_dict_set(in, seen.u.dict, key, ith_jj_bool(true));
        push_item(out, list.items[i]);
    }
    return out;
}

static ith_jj_value extreme(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args,
                            const char *what, bool max)
{
    static const char *const params[] = {"case_sensitive", "attribute", NULL};
    ith_jj_bound b = ith_jj_bind(in, what, args, params, 0);
    ith_jj_list list = ith_jj_iterate(in, v);
    if (list.count == 0)
        return ith_jj_undefined(in, "No aggregated item, sequence was empty.");
    ith_jj_value best = list.items[0], best_key = sort_key(in, best, b.v[1], ith_jj_truth(b.v[0]));
    for (int64_t i = 1; i < list.count; i++) {
        ith_jj_value key = sort_key(in, list.items[i], b.v[1], ith_jj_truth(b.v[0]));
        if (max ? ith_jj_compare(in, JJ_GT, key, best_key)
                : ith_jj_compare(in, JJ_LT, key, best_key)) {
            best = list.items[i];
            best_key = key;
        }
    }
    return best;
}

static ith_jj_value filter_max(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    return extreme(in, v, args, "filter 'max'", true);
}

static ith_jj_value filter_min(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    return extreme(in, v, args, "filter 'min'", false);
}

static ith_jj_value filter_sum(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"attribute", "start", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'sum'", args, params, 0);
    ith_jj_list list = ith_jj_iterate(in, v);
    ith_jj_value total = b.given[1] ? b.v[1] : ith_jj_int(0);
    for (int64_t i = 0; i < list.count; i++)
        total =
            ith_jj_binary(in, JJ_ADD, total,
                          is_missing(b.v[0]) ? list.items[i] : get_path(in, list.items[i], b.v[0]));
    return total;
}

static ith_jj_value filter_batch(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"linecount", "fill_with", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'batch'", args, params, 1);
    int64_t size = ith_jj_want_int(in, "filter 'batch'", b.v[0]);
    ith_jj_list list = ith_jj_iterate(in, v);
    if (size < 1)
        ith_jj_fail(in, "filter 'batch': size %lld", (long long)size);
    ith_jj_value out = ith_jj_list_new(in, ith_div_ceil(list.count, size), JJ_SEQ_GENERATOR);
    for (int64_t i = 0; i < list.count; i += size) {
        bool fill = !is_missing(b.v[1]);
        int64_t n = fill ? size : ith_min_i64(size, list.count - i);
        ith_jj_value row = ith_jj_list_new(in, n, JJ_SEQ_LIST);
        for (int64_t k = 0; k < n; k++)
            push_item(row, i + k < list.count ? list.items[i + k] : b.v[1]);
        push_item(out, row);
    }
    return out;
}

/* Pairs (key, items with that key), in the order of the keys. */
static ith_jj_value filter_groupby(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"attribute", "default", "case_sensitive", NULL};
    ith_jj_bound b = ith_jj_bind(in, "filter 'groupby'", args, params, 1);
    ith_jj_value all = sorted(in, ith_jj_iterate(in, v), b.v[0], ith_jj_truth(b.v[2]), false);
    ith_jj_list *list = all.u.list;
    ith_jj_value out = ith_jj_list_new(in, list->count, JJ_SEQ_LIST);
    for (int64_t i = 0, n; i < list->count; i += n) {
        ith_jj_value key = sort_key(in, list->items[i], b.v[0], ith_jj_truth(b.v[2]));
        for (n = 1; i + n < list->count; n++)
            if (!ith_jj_equal(in, key,
                              sort_key(in, list->items[i + n], b.v[0], ith_jj_truth(b.v[2]))))
                break;
        ith_jj_value group = ith_jj_list_new(in, n, JJ_SEQ_LIST),
                     pair = ith_jj_list_new(in, 2, JJ_SEQ_TUPLE);
        for (int64_t k = 0; k < n; k++)
            push_item(group, list->items[i + k]);
        push_item(pair, get_path(in, list->items[i], b.v[0]));
        push_item(pair, group);
        push_item(out, pair);
    }
    return out;
}

/* ---- map, select and friends ----------------------------------------------------------------- */

/* Arguments without the first `skip` positional ones. */
static ith_jj_args drop_args(const ith_jj_args *args, int64_t skip)
{
    ith_jj_args rest = *args;
    rest.values += skip;
    rest.num_pos -= skip;
    return rest;
}

static ith_jj_value filter_map(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_list list = ith_jj_iterate(in, v);
    ith_jj_value out = ith_jj_list_new(in, list.count, JJ_SEQ_GENERATOR);
    if (args->num_pos == 0) {
        static const char *const params[] = {"attribute", "default", NULL};
        ith_jj_bound b = ith_jj_bind(in, "filter 'map'", args, params, 1);
        for (int64_t i = 0; i < list.count; i++) {
            ith_jj_value item = get_path(in, list.items[i], b.v[0]);
            push_item(out, item.kind == JJ_UNDEFINED && b.given[1] ? b.v[1] : item);
        }
        return out;
    }
    ith_jj_value name = ith_jj_to_str(in, args->values[0]);
    ith_jj_filter_fn fn = ith_jj_find_filter(ith_jj_str_copy(in, name.u.s, name.len).u.s);
    if (!fn)
        ith_jj_fail(in, "filter 'map': no filter named '%.*s'", (int)ith_min_i64(name.len, 60),
                    name.u.s);
    ith_jj_args rest = drop_args(args, 1);
    ith_jj_enter(in);
    for (int64_t i = 0; i < list.count; i++) {
        ith_jj_step(in, 1);
        push_item(out, fn(in, list.items[i], &rest));
    }
    ith_jj_leave(in);
    return out;
}

static ith_jj_value select_items(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args,
                                 const char *what, bool by_attribute, bool wanted)
{
    ith_jj_list list = ith_jj_iterate(in, v);
    ith_jj_value out = ith_jj_list_new(in, list.count, JJ_SEQ_GENERATOR);
    ith_jj_args rest = *args;
    ith_jj_filter_fn test = NULL;
    if (by_attribute && args->num_pos == 0)
        ith_jj_fail(in, "%s: the attribute is missing", what);
    if (args->num_pos > by_attribute) {
        ith_jj_value name = ith_jj_to_str(in, args->values[by_attribute]);
        test = ith_jj_find_test(ith_jj_str_copy(in, name.u.s, name.len).u.s);
        if (!test)
            ith_jj_fail(in, "%s: no test named '%.*s'", what, (int)ith_min_i64(name.len, 60),
                        name.u.s);
        rest = drop_args(args, by_attribute + 1);
    }
    for (int64_t i = 0; i < list.count; i++) {
        ith_jj_value item = list.items[i];
        ith_jj_step(in, 1);
        if (by_attribute)
            item = get_path(in, item, args->values[0]);
        if (ith_jj_truth(test ? test(in, item, &rest) : item) == wanted)
            push_item(out, list.items[i]);
    }
    return out;
}

static ith_jj_value filter_select(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    return select_items(in, v, args, "filter 'select'", false, true);
}

static ith_jj_value filter_reject(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    return select_items(in, v, args, "filter 'reject'", false, false);
}

static ith_jj_value filter_selectattr(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    return select_items(in, v, args, "filter 'selectattr'", true, true);
}

static ith_jj_value filter_rejectattr(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    return select_items(in, v, args, "filter 'rejectattr'", true, false);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static const ith_jj_named_fn filters[] = {
    {"abs", filter_abs},
    {"batch", filter_batch},
    {"capitalize", filter_capitalize},
    {"center", filter_center},
    {"count", filter_length},
    {"d", filter_default},
    {"default", filter_default},
    {"dictsort", filter_dictsort},
    {"e", filter_escape},
    {"escape", filter_escape},
    {"first", filter_first},
    {"float", filter_float},
    {"format", filter_format},
    {"groupby", filter_groupby},
    {"indent", filter_indent},
    {"int", filter_int},
    {"items", filter_items},
    {"join", filter_join},
    {"last", filter_last},
    {"length", filter_length},
    {"list", filter_list},
    {"lower", filter_lower},
    {"map", filter_map},
    {"max", filter_max},
    {"min", filter_min},
    {"reject", filter_reject},
    {"rejectattr", filter_rejectattr},
    {"replace", filter_replace},
    {"reverse", filter_reverse},
    {"round", filter_round},
    {"safe", filter_safe},
    {"select", filter_select},
    {"selectattr", filter_selectattr},
    {"sort", filter_sort},
    {"string", filter_string},
    {"sum", filter_sum},
    {"title", filter_title},
    {"tojson", filter_tojson},
    {"trim", filter_trim},
    {"truncate", filter_truncate},
    {"unique", filter_unique},
    {"upper", filter_upper},
    {"wordcount", filter_wordcount},
    {NULL, NULL},
};

ith_jj_filter_fn ith_jj_find_named(const ith_jj_named_fn *table, const char *name)
{
    for (; table->name; table++)
        if (strcmp(table->name, name) == 0)
            return table->fn;
    return NULL;
}

ith_jj_filter_fn ith_jj_find_filter(const char *name)
{
    return ith_jj_find_named(filters, name);
}
