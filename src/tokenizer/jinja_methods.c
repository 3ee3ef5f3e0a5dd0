/* jinja_methods.c - methods of strings, dicts, lists and helpers, and the global functions.
 * What would change a value is refused, as in the immutable sandbox. */
#include "tokenizer/jinja_internal.h"

#include "base/checked.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static ith_jj_text text_of(ith_jj_value v)
{
    return (ith_jj_text){v.u.s, v.len};
}

static void no_arguments(ith_jj_interp *in, const char *what, const ith_jj_args *args)
{
    static const char *const none[] = {NULL};
    ith_jj_bind(in, what, args, none, 0);
}

static void push_item(ith_jj_value list, ith_jj_value item)
{
    list.u.list->items[list.u.list->count++] = item;
}

static bool is_given(const ith_jj_bound *b, int i)
{
    return b->given[i] && b->v[i].kind != JJ_NONE;
}

/* ---- case and classes ------------------------------------------------------------------------ */

static ith_jj_value cased(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                          const char *what, ith_jj_case mode)
{
    no_arguments(in, what, args);
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_case(in, text_of(self), mode);
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), self.markup);
}

#define CASE_METHOD(NAME, MODE)                                                                    \
    static ith_jj_value str_##NAME(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)  \
    {                                                                                              \
        return cased(in, self, args, "method '" #NAME "'", MODE);                                  \
    }
CASE_METHOD(upper, JJ_UPPER)
CASE_METHOD(lower, JJ_LOWER)
CASE_METHOD(title, JJ_TITLE_WORDS)
CASE_METHOD(capitalize, JJ_CAPITALIZE)
CASE_METHOD(swapcase, JJ_SWAPCASE)

#define CLASS_METHOD(NAME, CLASS)                                                                  \
    static ith_jj_value str_##NAME(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)  \
    {                                                                                              \
        no_arguments(in, "method '" #NAME "'", args);                                              \
        ith_jj_step_bytes(in, self.len * 8);                                                       \
        return ith_jj_bool(ith_jj_all_chars(text_of(self), CLASS));                                \
    }
CLASS_METHOD(isalpha, JJ_ALPHA)
CLASS_METHOD(isdigit, JJ_DIGIT)
CLASS_METHOD(isdecimal, JJ_DECIMAL)
CLASS_METHOD(isnumeric, JJ_NUMERIC)
CLASS_METHOD(isalnum, JJ_ALNUM)
CLASS_METHOD(isspace, JJ_SPACE)
CLASS_METHOD(islower, JJ_IS_LOWER)
CLASS_METHOD(isupper, JJ_IS_UPPER)

/* ---- stripping, affixes, searching ----------------------------------------------------------- */

static ith_jj_value stripped(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                             const char *what, bool left, bool right)
{
    static const char *const params[] = {"chars", NULL};
    ith_jj_bound b = ith_jj_bind(in, what, args, params, 0);
    ith_jj_text chars = {NULL, 0};
    if (is_given(&b, 0))
        chars = ith_jj_want_str(in, what, b.v[0]);
    ith_jj_text t = ith_jj_strip(text_of(self), chars, left, right);
    ith_jj_step_bytes(in, (self.len - t.len + 1) * (chars.len + 1));
    return ith_jj_with_markup(ith_jj_str(t.s, t.len), self.markup);
}

static ith_jj_value str_strip(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return stripped(in, self, args, "method 'strip'", true, true);
}

static ith_jj_value str_lstrip(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return stripped(in, self, args, "method 'lstrip'", true, false);
}

static ith_jj_value str_rstrip(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return stripped(in, self, args, "method 'rstrip'", false, true);
}

/* self[start:end] in code points, as the optional arguments of find, count, startswith. *begin: its
 * byte offset. */
static ith_jj_text window(ith_jj_interp *in, ith_jj_value self, ith_jj_value start,
                          ith_jj_value end, int64_t *begin)
{
    ith_jj_value none = ith_jj_none();
    bool plain = start.kind <= JJ_NONE && end.kind <= JJ_NONE;
    ith_jj_value part = plain
                            ? self
                            : ith_jj_sequence_slice(in, self, start.kind <= JJ_NONE ? none : start,
                                                    end.kind <= JJ_NONE ? none : end, none);
    *begin = part.len ? part.u.s - self.u.s : self.len;
    if (plain)
        *begin = 0;
    return text_of(part);
}

static bool has_affix(ith_jj_text t, ith_jj_text affix, bool at_end)
{
    if (affix.len > t.len)
        return false;
    return affix.len == 0 ||
           memcmp(t.s + (at_end ? t.len - affix.len : 0), affix.s, (size_t)affix.len) == 0;
}

static ith_jj_value affix_test(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                               const char *what, bool at_end)
{
    static const char *const params[] = {"affix", "start", "end", NULL};
    ith_jj_bound b = ith_jj_bind(in, what, args, params, 1);
    int64_t begin;
    ith_jj_text t = window(in, self, b.v[1], b.v[2], &begin);
    if (b.v[0].kind == JJ_LIST && b.v[0].u.list->flavor == JJ_SEQ_TUPLE) {
        for (int64_t i = 0; i < b.v[0].u.list->count; i++)
            if (has_affix(t, ith_jj_want_str(in, what, b.v[0].u.list->items[i]), at_end))
                return ith_jj_bool(true);
        return ith_jj_bool(false);
    }
    ith_jj_text affix = ith_jj_want_str(in, what, b.v[0]);
    ith_jj_step_bytes(in, affix.len);
    return ith_jj_bool(has_affix(t, affix, at_end));
}

static ith_jj_value str_startswith(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return affix_test(in, self, args, "method 'startswith'", false);
}

static ith_jj_value str_endswith(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return affix_test(in, self, args, "method 'endswith'", true);
}

static ith_jj_value remove_affix(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                                 const char *what, bool at_end)
{
    static const char *const params[] = {"affix", NULL};
    ith_jj_text affix = ith_jj_want_str(in, what, ith_jj_bind(in, what, args, params, 1).v[0]);
    if (has_affix(text_of(self), affix, at_end)) {
        self.len -= affix.len;
        self.u.s += at_end ? 0 : affix.len;
    }
    return self;
}

static ith_jj_value str_removeprefix(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return remove_affix(in, self, args, "method 'removeprefix'", false);
}

static ith_jj_value str_removesuffix(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return remove_affix(in, self, args, "method 'removesuffix'", true);
}

static ith_jj_value search(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                           const char *what, bool from_right, bool must_be_there)
{
    static const char *const params[] = {"sub", "start", "end", NULL};
    ith_jj_bound b = ith_jj_bind(in, what, args, params, 1);
    int64_t begin;
    ith_jj_text needle = ith_jj_want_str(in, what, b.v[0]),
                t = window(in, self, b.v[1], b.v[2], &begin);
    ith_jj_step_bytes(in, self.len);
    if (from_right && needle.len > 0)
        ith_jj_step(in, t.len / 8);
    int64_t at = from_right ? ith_jj_rfind(t, needle) : ith_jj_find(t, needle, 0);
    if (at < 0 && must_be_there)
        ith_jj_fail(in, "%s: substring not found", what);
    return ith_jj_int(at < 0 ? -1 : ith_jj_count_chars(self.u.s, begin + at));
}

static ith_jj_value str_find(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return search(in, self, args, "method 'find'", false, false);
}

static ith_jj_value str_rfind(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return search(in, self, args, "method 'rfind'", true, false);
}

static ith_jj_value str_index(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return search(in, self, args, "method 'index'", false, true);
}

static ith_jj_value str_rindex(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return search(in, self, args, "method 'rindex'", true, true);
}

static ith_jj_value str_count(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    static const char *const params[] = {"sub", "start", "end", NULL};
    ith_jj_bound b = ith_jj_bind(in, "method 'count'", args, params, 1);
    int64_t begin, count = 0;
    ith_jj_text needle = ith_jj_want_str(in, "method 'count'", b.v[0]);
    ith_jj_text t = window(in, self, b.v[1], b.v[2], &begin);
    ith_jj_step_bytes(in, t.len);
    if (needle.len == 0)
        return ith_jj_int(ith_jj_count_chars(t.s, t.len) + 1);
    for (int64_t at = 0; (at = ith_jj_find(t, needle, at)) >= 0; at += needle.len)
        count++;
    return ith_jj_int(count);
}

static ith_jj_value str_replace(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    static const char *const params[] = {"old", "new", "count", NULL};
    ith_jj_bound b = ith_jj_bind(in, "method 'replace'", args, params, 2);
    ith_jj_text old = ith_jj_want_str(in, "method 'replace'", b.v[0]);
    ith_jj_text with = ith_jj_want_str(in, "method 'replace'", b.v[1]);
    int64_t count = b.given[2] ? ith_jj_want_int(in, "method 'replace'", b.v[2]) : -1;
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_replaced(in, text_of(self), old, with, count);
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), self.markup);
}

/* ---- splitting and joining ------------------------------------------------------------------- */

static void push_part(ith_jj_interp *in, ith_jj_value *list, int64_t *cap, ith_jj_value part)
{
    ith_jj_list *l = list->u.list;
    if (l->count == *cap) {
        *cap = *cap ? *cap * 2 : 8;
        ith_jj_value *grown = ith_jj_alloc(in, ith_mul_bytes(*cap, sizeof *grown));
        if (l->count)
            memcpy(grown, l->items, (size_t)l->count * sizeof *grown);
        l->items = grown;
    }
    ith_jj_step(in, 1);
    l->items[l->count++] = part;
}

static void reverse_items(ith_jj_list *list)
{
    for (int64_t i = 0, j = list->count - 1; i < j; i++, j--) {
        ith_jj_value swap = list->items[i];
        list->items[i] = list->items[j];
        list->items[j] = swap;
    }
}

/* Runs of whitespace separate; leading and trailing ones vanish. */
static void split_spaces(ith_jj_interp *in, ith_jj_value *out, ith_jj_text t, int64_t max,
                         bool from_right)
{
    int64_t cap = 0;
    ith_jj_text blank = {NULL, 0};
    for (int64_t n = 0;; n++) {
        t = ith_jj_strip(t, blank, !from_right, from_right);
        if (t.len == 0)
            return;
        if (max >= 0 && n >= max) {
            push_part(in, out, &cap, ith_jj_str(t.s, t.len));
            return;
        }
        const char *end = t.s + t.len, *p = from_right ? end : t.s;
        while (from_right ? p > t.s : p < end) {
            const char *q = p;
            if (from_right) {
                do
                    q--;
                while (q > t.s && ((unsigned char)*q & 0xc0) == 0x80);
            }
            const char *next = q;
            if (ith_jj_is_space(ith_jj_next_char(&next, end)))
                break;
            p = from_right ? q : next;
        }
        ith_jj_text word = from_right ? (ith_jj_text){p, end - p} : (ith_jj_text){t.s, p - t.s};
        push_part(in, out, &cap, ith_jj_str(word.s, word.len));
        t = from_right ? (ith_jj_text){t.s, p - t.s} : (ith_jj_text){p, end - p};
    }
}

static void split_at(ith_jj_interp *in, ith_jj_value *out, ith_jj_text t, ith_jj_text sep,
                     int64_t max, bool from_right)
{
    int64_t cap = 0;
    for (int64_t n = 0; max < 0 || n < max; n++) {
        int64_t at = from_right ? ith_jj_rfind(t, sep) : ith_jj_find(t, sep, 0);
        if (at < 0)
            break;
        int64_t after = at + sep.len;
        ith_jj_text part =
            from_right ? (ith_jj_text){t.s + after, t.len - after} : (ith_jj_text){t.s, at};
        push_part(in, out, &cap, ith_jj_str(part.s, part.len));
        t = from_right ? (ith_jj_text){t.s, at} : (ith_jj_text){t.s + after, t.len - after};
    }
    push_part(in, out, &cap, ith_jj_str(t.s, t.len));
}

static ith_jj_value split(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                          const char *what, bool from_right)
{
    static const char *const params[] = {"sep", "maxsplit", NULL};
    ith_jj_bound b = ith_jj_bind(in, what, args, params, 0);
    int64_t max = b.given[1] ? ith_jj_want_int(in, what, b.v[1]) : -1;
    ith_jj_value out = ith_jj_list_new(in, 0, JJ_SEQ_LIST);
    ith_jj_step_bytes(in, self.len);
    if (!is_given(&b, 0)) {
        split_spaces(in, &out, text_of(self), max, from_right);
    } else {
        ith_jj_text sep = ith_jj_want_str(in, what, b.v[0]);
        if (sep.len == 0)
            ith_jj_fail(in, "%s: empty separator", what);
        split_at(in, &out, text_of(self), sep, max, from_right);
    }
    if (from_right)
        reverse_items(out.u.list);
    for (int64_t i = 0; i < out.u.list->count; i++)
        out.u.list->items[i].markup = self.markup;
    return out;
}

static ith_jj_value str_split(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return split(in, self, args, "method 'split'", false);
}

static ith_jj_value str_rsplit(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return split(in, self, args, "method 'rsplit'", true);
}

static ith_jj_value partition(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                              const char *what, bool from_right)
{
    static const char *const params[] = {"sep", NULL};
    ith_jj_text sep = ith_jj_want_str(in, what, ith_jj_bind(in, what, args, params, 1).v[0]);
    ith_jj_text t = text_of(self);
    if (sep.len == 0)
        ith_jj_fail(in, "%s: empty separator", what);
    ith_jj_step_bytes(in, t.len);
    int64_t at = from_right ? ith_jj_rfind(t, sep) : ith_jj_find(t, sep, 0);
    ith_jj_value out = ith_jj_list_new(in, 3, JJ_SEQ_TUPLE), empty = ith_jj_cstr("");
    push_item(out, at >= 0 ? ith_jj_str(t.s, at) : from_right ? empty : self);
    push_item(out, at >= 0 ? ith_jj_str(sep.s, sep.len) : empty);
    push_item(out, at >= 0      ? ith_jj_str(t.s + at + sep.len, t.len - at - sep.len)
                   : from_right ? self
                                : empty);
    return out;
}

static ith_jj_value str_partition(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return partition(in, self, args, "method 'partition'", false);
}

static ith_jj_value str_rpartition(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return partition(in, self, args, "method 'rpartition'", true);
}

static ith_jj_value str_splitlines(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    static const char *const params[] = {"keepends", NULL};
    ith_jj_bound b = ith_jj_bind(in, "method 'splitlines'", args, params, 0);
    ith_jj_value out = ith_jj_list_new(in, 0, JJ_SEQ_LIST);
    int64_t cap = 0;
    for (const char *p = self.u.s, *end = p + self.len; p < end;) {
        const char *next, *stop = ith_jj_line_end(p, end, &next);
        push_part(in, &out, &cap, ith_jj_str(p, (ith_jj_truth(b.v[0]) ? next : stop) - p));
        p = next;
    }
    return out;
}

static ith_jj_value str_join(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    static const char *const params[] = {"iterable", NULL};
    ith_jj_list list = ith_jj_iterate(in, ith_jj_bind(in, "method 'join'", args, params, 1).v[0]);
    int64_t begin = ith_jj_capture_begin(in);
    for (int64_t i = 0; i < list.count; i++) {
        ith_jj_text part = ith_jj_want_str(in, "method 'join'", list.items[i]);
        ith_jj_emit(in, self.u.s, i ? self.len : 0);
        ith_jj_emit(in, part.s, part.len);
        ith_jj_step(in, 1);
    }
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), self.markup);
}

/* ---- padding and formatting ------------------------------------------------------------------ */

static ith_jj_value padded(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                           const char *what, char side)
{
    static const char *const params[] = {"width", "fillchar", NULL};
    ith_jj_bound b = ith_jj_bind(in, what, args, params, 1);
    int64_t width = ith_jj_want_int(in, what, b.v[0]),
            pad = width - ith_jj_count_chars(self.u.s, self.len);
    ith_jj_text fill = b.given[1] ? ith_jj_want_str(in, what, b.v[1]) : (ith_jj_text){" ", 1};
    if (ith_jj_count_chars(fill.s, fill.len) != 1)
        ith_jj_fail(in, "%s: the fill character must be exactly one character long", what);
    if (pad <= 0)
        return self;
    int64_t before = side == 'r' ? pad : side == 'l' ? 0 : pad / 2 + (pad & width & 1);
    int64_t begin = ith_jj_capture_begin(in);
    for (int64_t i = 0; i <= pad; i++) {
        if (i == before)
            ith_jj_emit(in, self.u.s, self.len);
        if (i < pad)
            ith_jj_emit(in, fill.s, fill.len);
        ith_jj_step(in, 1);
    }
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), self.markup);
}

static ith_jj_value str_ljust(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return padded(in, self, args, "method 'ljust'", 'l');
}

static ith_jj_value str_rjust(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return padded(in, self, args, "method 'rjust'", 'r');
}

static ith_jj_value str_center(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return padded(in, self, args, "method 'center'", 'c');
}

static ith_jj_value str_zfill(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    bool has_sign = self.len > 0 && (self.u.s[0] == '-' || self.u.s[0] == '+');
    ith_jj_value body = ith_jj_str(self.u.s + has_sign, self.len - has_sign);
    ith_jj_args inner = *args;
    ith_jj_value values[2] = {args->num_pos == 1 ? args->values[0] : ith_jj_none(),
                              ith_jj_cstr("0")};
    if (args->num_pos != 1 || args->num_kw > 0)
        ith_jj_fail(in, "method 'zfill': takes exactly one argument");
    values[0] =
        ith_jj_int(ith_max_i64(ith_jj_want_int(in, "method 'zfill'", values[0]), 1) - has_sign);
    inner.values = values;
    inner.num_pos = 2;
    ith_jj_value digits = padded(in, body, &inner, "method 'zfill'", 'r');
    return has_sign ? ith_jj_concat(in, ith_jj_str(self.u.s, 1), digits) : digits;
}

static ith_jj_value str_format(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return ith_jj_brace_format(in, self, args);
}

/* ---- dict and list --------------------------------------------------------------------------- */

static ith_jj_value dict_view(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args,
                              const char *what, const char *type_name, int part)
{
    no_arguments(in, what, args);
    const ith_jj_dict *d = self.u.dict;
    ith_jj_value out = ith_jj_list_new(in, d->count, JJ_SEQ_VIEW);
    out.u.list->type_name = type_name;
    for (int64_t i = 0; i < d->count; i++) {
        if (part < 2) {
            push_item(out, part ? d->values[i] : d->keys[i]);
            continue;
        }
        ith_jj_value pair = ith_jj_list_new(in, 2, JJ_SEQ_TUPLE);
        push_item(pair, d->keys[i]);
        push_item(pair, d->values[i]);
        push_item(out, pair);
    }
    return out;
}

static ith_jj_value dict_keys(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return dict_view(in, self, args, "method 'keys'", "dict_keys", 0);
}

static ith_jj_value dict_values(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return dict_view(in, self, args, "method 'values'", "dict_values", 1);
}

static ith_jj_value dict_items(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    return dict_view(in, self, args, "method 'items'", "dict_items", 2);
}

static ith_jj_value dict_get(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    static const char *const params[] = {"key", "default", NULL};
    ith_jj_bound b = ith_jj_bind(in, "method 'get'", args, params, 1);
    ith_jj_value *found = ith_jj_dict_get(in, self.u.dict, b.v[0]);
    return found ? *found : b.given[1] ? b.v[1] : ith_jj_none();
}

static ith_jj_value dict_copy(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    no_arguments(in, "method 'copy'", args);
    ith_jj_value out = ith_jj_dict_new(in);
    for (int64_t i = 0; i < self.u.dict->count; i++)
        ith_jj_dict_set(in, out.u.dict, self.u.dict->keys[i], self.u.dict->values[i]);
    return out;
}

static ith_jj_value list_count(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    static const char *const params[] = {"value", NULL};
    ith_jj_bound b = ith_jj_bind(in, "method 'count'", args, params, 1);
    int64_t count = 0;
    for (int64_t i = 0; i < self.u.list->count; i++)
        count += ith_jj_equal(in, self.u.list->items[i], b.v[0]);
    return ith_jj_int(count);
}

static ith_jj_value list_index(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    static const char *const params[] = {"value", NULL};
    ith_jj_bound b = ith_jj_bind(in, "method 'index'", args, params, 1);
    for (int64_t i = 0; i < self.u.list->count; i++)
        if (ith_jj_equal(in, self.u.list->items[i], b.v[0]))
            return ith_jj_int(i);
    ith_jj_fail(in, "method 'index': the value is not in the list");
}

static ith_jj_value list_copy(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    no_arguments(in, "method 'copy'", args);
    return ith_jj_sequence_slice(in, self, ith_jj_none(), ith_jj_none(), ith_jj_none());
}

/* ---- loop, cycler ---------------------------------------------------------------------------- */

static ith_jj_value loop_cycle(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    if (args->num_pos == 0 || args->num_kw > 0)
        ith_jj_fail(in, "method 'cycle': no items for cycling given");
    return args->values[self.u.loop->index0 % args->num_pos];
}

static ith_jj_value loop_changed(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    ith_jj_loop *loop = self.u.loop;
    bool same = loop->has_changed && loop->num_changed == args->num_pos;
    for (int64_t i = 0; same && i < args->num_pos; i++)
        same = ith_jj_equal(in, loop->changed[i], args->values[i]);
    loop->has_changed = true;
    loop->changed = args->values;
    loop->num_changed = args->num_pos;
    return ith_jj_bool(!same);
}

static ith_jj_value cycler_next(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    no_arguments(in, "method 'next'", args);
    ith_jj_list *list = self.u.cycle;
    ith_jj_value v = list->items[list->pos];
    list->pos = (list->pos + 1) % list->count;
    return v;
}

static ith_jj_value cycler_reset(ith_jj_interp *in, ith_jj_value self, const ith_jj_args *args)
{
    no_arguments(in, "method 'reset'", args);
    self.u.cycle->pos = 0;
    return ith_jj_none();
}

/* ---- tables ---------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    ith_jj_method_fn fn;
} named_method;

static const named_method str_methods[] = {
    {"capitalize", str_capitalize},
    {"casefold", str_lower},
    {"center", str_center},
    {"count", str_count},
    {"endswith", str_endswith},
    {"find", str_find},
    {"format", str_format},
    {"index", str_index},
    {"isalnum", str_isalnum},
    {"isalpha", str_isalpha},
    {"isdecimal", str_isdecimal},
    {"isdigit", str_isdigit},
    {"islower", str_islower},
    {"isnumeric", str_isnumeric},
    {"isspace", str_isspace},
    {"isupper", str_isupper},
    {"join", str_join},
    {"ljust", str_ljust},
    {"lower", str_lower},
    {"lstrip", str_lstrip},
    {"partition", str_partition},
    {"removeprefix", str_removeprefix},
    {"removesuffix", str_removesuffix},
    {"replace", str_replace},
    {"rfind", str_rfind},
    {"rindex", str_rindex},
    {"rjust", str_rjust},
    {"rpartition", str_rpartition},
    {"rsplit", str_rsplit},
    {"rstrip", str_rstrip},
    {"split", str_split},
    {"splitlines", str_splitlines},
    {"startswith", str_startswith},
    {"strip", str_strip},
    {"swapcase", str_swapcase},
    {"title", str_title},
    {"upper", str_upper},
    {"zfill", str_zfill},
    {NULL, NULL},
};

static const named_method dict_methods[] = {
    {"copy", dict_copy}, {"get", dict_get},       {"items", dict_items},
    {"keys", dict_keys}, {"values", dict_values}, {NULL, NULL},
};
static const named_method list_methods[] = {
    {"copy", list_copy},
    {"count", list_count},
    {"index", list_index},
    {NULL, NULL},
};
static const named_method tuple_methods[] = {
    {"count", list_count},
    {"index", list_index},
    {NULL, NULL},
};
static const named_method loop_methods[] = {
    {"changed", loop_changed},
    {"cycle", loop_cycle},
    {NULL, NULL},
};
static const named_method cycler_methods[] = {
    {"next", cycler_next},
    {"reset", cycler_reset},
    {NULL, NULL},
};

static const named_method *methods_of(ith_jj_value self)
{
    switch (self.kind) {
    case JJ_STR:
        return str_methods;
    case JJ_DICT:
        return dict_methods;
    case JJ_LOOP:
        return loop_methods;
    case JJ_CYCLER:
        return cycler_methods;
    case JJ_LIST:
        return self.u.list->flavor == JJ_SEQ_LIST    ? list_methods
               : self.u.list->flavor <= JJ_SEQ_RANGE ? tuple_methods
                                                     : NULL;
    default:
        return NULL;
    }
}

ith_jj_method_fn ith_jj_find_method(ith_jj_value self, const char *name)
{
    const named_method *row = methods_of(self);
    for (; row && row->name; row++)
        if (strcmp(row->name, name) == 0)
            return row->fn;
    return NULL;
}

bool ith_jj_is_mutator(ith_jj_value self, const char *name)
{
    static const char *const of_list[] = {"append", "clear",  "pop",    "reverse", "insert",
                                          "sort",   "extend", "remove", NULL};
    static const char *const of_dict[] = {"clear", "pop", "popitem", "setdefault", "update", NULL};
    const char *const *names = NULL;
    if (self.kind == JJ_LIST && self.u.list->flavor == JJ_SEQ_LIST)
        names = of_list;
    else if (self.kind == JJ_DICT)
        names = of_dict;
    for (; names && *names; names++)
        if (strcmp(*names, name) == 0)
            return true;
    return false;
}

/* ---- global functions ------------------------------------------------------------------------ */

static ith_jj_value global_range(ith_jj_interp *in, const ith_jj_args *args)
{
    int64_t n[3] = {0, 0, 1}, given = args->num_pos;
    if (given < 1 || given > 3 || args->num_kw > 0)
        ith_jj_fail(in, "call 'range': takes 1 to 3 integers");
    for (int64_t i = 0; i < given; i++)
        n[given == 1 ? 1 : i] = ith_jj_want_int(in, "call 'range'", args->values[i]);
    if (n[2] == 0)
        ith_jj_fail(in, "call 'range': the step is 0");
    uint64_t span = n[2] > 0 ? (n[0] < n[1] ? (uint64_t)n[1] - (uint64_t)n[0] : 0)
                             : (n[0] > n[1] ? (uint64_t)n[0] - (uint64_t)n[1] : 0);
    uint64_t step = n[2] > 0 ? (uint64_t)n[2] : 0 - (uint64_t)n[2];
    /* cppcheck-suppress zerodivcond ; a step of 0 was refused */
    uint64_t count = span / step + (span % step != 0);
    if (count > JJ_MAX_RANGE)
        ith_jj_fail_as(in, ITH_ERR_MEMORY, "call 'range': more than %d numbers", JJ_MAX_RANGE);
    ith_jj_value out = ith_jj_list_new(in, (int64_t)count, JJ_SEQ_RANGE);
    for (uint64_t i = 0; i < count; i++)
        push_item(out, ith_jj_int((int64_t)((uint64_t)n[0] + i * (uint64_t)n[2])));
    char name[96];
    if (n[2] == 1)
        snprintf(name, sizeof name, "range(%lld, %lld)", (long long)n[0], (long long)n[1]);
    else
        snprintf(name, sizeof name, "range(%lld, %lld, %lld)", (long long)n[0], (long long)n[1],
                 (long long)n[2]);
    out.u.list->type_name = ith_jj_str_copy(in, name, (int64_t)strlen(name)).u.s;
    return out;
}

/* dict(mapping or pairs, **more), also the arguments of namespace(). */
static ith_jj_value make_dict(ith_jj_interp *in, const ith_jj_args *args, const char *what)
{
    ith_jj_value out = ith_jj_dict_new(in);
    if (args->num_pos > 1)
        ith_jj_fail(in, "%s: takes at most 1 positional argument", what);
    if (args->num_pos == 1 && args->values[0].kind == JJ_DICT) {
        const ith_jj_dict *d = args->values[0].u.dict;
        for (int64_t i = 0; i < d->count; i++)
            ith_jj_dict_set(in, out.u.dict, d->keys[i], d->values[i]);
    } else if (args->num_pos == 1) {
        ith_jj_list list = ith_jj_iterate(in, args->values[0]);
        for (int64_t i = 0; i < list.count; i++) {
            ith_jj_list pair = ith_jj_iterate(in, list.items[i]);
            if (pair.count != 2)
                ith_jj_fail(in, "%s: element %lld has length %lld, 2 is required", what,
                            (long long)i, (long long)pair.count);
            ith_jj_dict_set(in, out.u.dict, pair.items[0], pair.items[1]);
        }
    }
    for (int64_t i = 0; i < args->num_kw; i++)
        ith_jj_dict_set(in, out.u.dict, ith_jj_cstr(args->names[i]),
                        args->values[args->num_pos + i]);
    return out;
}

static ith_jj_value global_dict(ith_jj_interp *in, const ith_jj_args *args)
{
    return make_dict(in, args, "call 'dict'");
}

static ith_jj_value global_namespace(ith_jj_interp *in, const ith_jj_args *args)
{
    ith_jj_value v = make_dict(in, args, "call 'namespace'");
    for (int64_t i = 0; i < v.u.dict->count; i++) {
        ith_jj_value key = v.u.dict->keys[i];
        if (key.kind == JJ_STR && key.len > 0 && key.u.s[0] == '_')
            ith_jj_fail(in, "call 'namespace': attribute '%.*s' may not begin with '_'",
                        (int)ith_min_i64(key.len, 60), key.u.s);
    }
    v.kind = JJ_NAMESPACE;
    return v;
}

static ith_jj_value global_cycler(ith_jj_interp *in, const ith_jj_args *args)
{
    if (args->num_pos == 0 || args->num_kw > 0)
        ith_jj_fail(in, "call 'cycler': at least one item has to be provided");
    ith_jj_value v = ith_jj_list_new(in, args->num_pos, JJ_SEQ_LIST);
    for (int64_t i = 0; i < args->num_pos; i++)
        push_item(v, args->values[i]);
    return (ith_jj_value){.kind = JJ_CYCLER, .u.cycle = v.u.list};
}

static ith_jj_value global_joiner(ith_jj_interp *in, const ith_jj_args *args)
{
    static const char *const params[] = {"sep", NULL};
    ith_jj_bound b = ith_jj_bind(in, "call 'joiner'", args, params, 0);
    ith_jj_value v = ith_jj_list_new(in, 1, JJ_SEQ_LIST);
    push_item(v, b.given[0] ? b.v[0] : ith_jj_cstr(", "));
    return (ith_jj_value){.kind = JJ_JOINER, .u.list = v.u.list};
}

static ith_jj_value global_raise(ith_jj_interp *in, const ith_jj_args *args)
{
    static const char *const params[] = {"message", NULL};
    ith_jj_value text = ith_jj_to_str(in, ith_jj_bind(in, "raise_exception", args, params, 1).v[0]);
    ith_jj_fail(in, "raise_exception: %.*s", (int)ith_min_i64(text.len, 900), text.u.s);
}

static ith_jj_value global_strftime(ith_jj_interp *in, const ith_jj_args *args)
{
    static const char *const params[] = {"format", NULL};
    ith_jj_text format =
        ith_jj_want_str(in, "strftime_now", ith_jj_bind(in, "strftime_now", args, params, 1).v[0]);
    char spec[256], text[1024];
    time_t now = in->now ? (time_t)in->now : time(NULL);
    struct tm tm;
    if (format.len == 0)
        return ith_jj_cstr("");
    if (format.len >= (int64_t)sizeof spec)
        ith_jj_fail(in, "strftime_now: a format of more than %zu bytes", sizeof spec - 1);
    memcpy(spec, format.s, (size_t)format.len);
    spec[format.len] = '\0';
    if (!localtime_r(&now, &tm))
        ith_jj_fail(in, "strftime_now: the clock cannot be read");
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored                                                                     \
    "-Wformat-nonliteral" /* the template's format; strftime is bounded */
#endif
    size_t len = strftime(text, sizeof text, spec, &tm);
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
    return ith_jj_str_copy(in, text, (int64_t)len);
}

static const ith_jj_builtin globals[] = {
    {"cycler", global_cycler},         {"dict", global_dict},
    {"joiner", global_joiner},         {"namespace", global_namespace},
    {"raise_exception", global_raise}, {"range", global_range},
    {"strftime_now", global_strftime},
};

const ith_jj_builtin *ith_jj_find_global(const char *name)
{
    for (size_t i = 0; i < sizeof globals / sizeof globals[0]; i++)
        if (strcmp(globals[i].name, name) == 0)
            return &globals[i];
    return NULL;
}
