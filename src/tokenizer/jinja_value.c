/* jinja_value.c - values: making, comparing, iterating, and their str(), repr() and JSON text. */
#include "tokenizer/jinja_internal.h"

#include "base/checked.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ith_jj_value ith_jj_cstr(const char *s)
{
    return ith_jj_str(s, (int64_t)strlen(s));
}

ith_jj_value ith_jj_str_copy(ith_jj_interp *in, const char *s, int64_t len)
{
    char *copy = ith_jj_alloc(in, len + 1);
    if (len)
        memcpy(copy, s, (size_t)len);
    ith_jj_step_bytes(in, len);
    return ith_jj_str(copy, len);
}

ith_jj_value ith_jj_undefined(ith_jj_interp *in, const char *fmt, ...)
{
    char text[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    ith_jj_value v = ith_jj_str_copy(in, text, (int64_t)strlen(text));
    v.kind = JJ_UNDEFINED;
    return v;
}

ith_jj_value ith_jj_list_new(ith_jj_interp *in, int64_t cap, ith_jj_flavor flavor)
{
    ith_jj_list *list = ith_jj_alloc(in, sizeof *list);
    list->items = ith_jj_alloc(in, ith_mul_bytes(cap, sizeof(ith_jj_value)));
    list->flavor = flavor;
    ith_jj_step(in, cap / 4);
    return (ith_jj_value){.kind = JJ_LIST, .u.list = list};
}

/* ---- dict ------------------------------------------------------------------------------------ */

ith_jj_value ith_jj_dict_new(ith_jj_interp *in)
{
    return (ith_jj_value){.kind = JJ_DICT, .u.dict = ith_jj_alloc(in, sizeof(ith_jj_dict))};
}

/* Equal values have equal hashes: 1, 1.0 and true are one key, as in Python. */
static uint64_t hash_value(ith_jj_interp *in, ith_jj_value v)
{
    uint64_t h = 14695981039346656037u;
    if (v.kind == JJ_STR) {
        for (int64_t i = 0; i < v.len; i++)
            h = (h ^ (unsigned char)v.u.s[i]) * 1099511628211u;
        ith_jj_step_bytes(in, v.len);
        return h;
    }
    if (ith_jj_is_number(v)) {
        double f = ith_jj_as_double(v) + 0.0;
        memcpy(&h, &f, sizeof h);
    } else if (v.kind == JJ_LIST && v.u.list->flavor == JJ_SEQ_TUPLE) {
        ith_jj_enter(in);
        for (int64_t i = 0; i < v.u.list->count; i++)
            h = (h ^ hash_value(in, v.u.list->items[i])) * 1099511628211u;
        ith_jj_leave(in);
    } else if (v.kind != JJ_NONE && v.kind != JJ_UNDEFINED) {
        ith_jj_fail(in, "dict: unhashable type: '%s'", ith_jj_type_name(v));
    }
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdu;
    return h ^ h >> 33;
}

static void index_put(ith_jj_dict *dict, uint64_t hash, int64_t entry)
{
    uint64_t mask = (uint64_t)dict->index_cap - 1, slot = hash & mask;
    while (dict->index[slot])
        slot = (slot + 1) & mask;
    dict->index[slot] = (int32_t)entry + 1;
}

static int64_t dict_find(ith_jj_interp *in, const ith_jj_dict *dict, ith_jj_value key)
{
    if (!dict->index) {
        for (int64_t i = 0; i < dict->count; i++)
            if (dict->keys[i].kind == key.kind
                    ? ith_jj_equal(in, dict->keys[i], key)
                    : ith_jj_is_number(key) && ith_jj_equal(in, dict->keys[i], key))
                return i;
        return -1;
    }
    uint64_t mask = (uint64_t)dict->index_cap - 1, slot = hash_value(in, key) & mask;
    for (; dict->index[slot]; slot = (slot + 1) & mask) {
        int64_t i = dict->index[slot] - 1;
        ith_jj_step(in, 1);
        if (ith_jj_equal(in, dict->keys[i], key))
            return i;
    }
    return -1;
}

ith_jj_value *ith_jj_dict_get(ith_jj_interp *in, const ith_jj_dict *dict, ith_jj_value key)
{
    if (key.kind != JJ_STR)
        hash_value(in, key); /* fails for what cannot be a key */
    int64_t i = dict_find(in, dict, key);
    return i < 0 ? NULL : &dict->values[i];
}

ith_jj_value *ith_jj_dict_get_text(ith_jj_interp *in, const ith_jj_dict *dict, const char *key)
{
    return ith_jj_dict_get(in, dict, ith_jj_cstr(key));
}

static void dict_grow(ith_jj_interp *in, ith_jj_dict *dict)
{
    int64_t cap = dict->cap ? dict->cap * 2 : 8;
    ith_jj_value *keys = ith_jj_alloc(in, ith_mul_bytes(cap, sizeof *keys));
    ith_jj_value *values = ith_jj_alloc(in, ith_mul_bytes(cap, sizeof *values));
    if (dict->count) {
        ITH_ASSERT(dict->keys && dict->values);
        memcpy(keys, dict->keys, (size_t)dict->count * sizeof *keys);
        memcpy(values, dict->values, (size_t)dict->count * sizeof *values);
    }
    dict->keys = keys;
    dict->values = values;
    dict->cap = cap;
    if (cap <= 8)
        return;
    dict->index_cap = cap * 2;
    dict->index = ith_jj_alloc(in, ith_mul_bytes(dict->index_cap, sizeof *dict->index));
    for (int64_t i = 0; i < dict->count; i++)
        index_put(dict, hash_value(in, keys[i]), i);
}

void ith_jj_dict_set(ith_jj_interp *in, ith_jj_dict *dict, ith_jj_value key, ith_jj_value value)
{
    ith_jj_value *found = ith_jj_dict_get(in, dict, key);
    if (found) {
        *found = value;
        return;
    }
    if (dict->count == dict->cap)
        dict_grow(in, dict);
    ITH_ASSERT(dict->keys && dict->values);
    if (dict->index)
        index_put(dict, hash_value(in, key), dict->count);
    dict->keys[dict->count] = key;
    dict->values[dict->count++] = value;
}

/* ---- from JSON ------------------------------------------------------------------------------- */

ith_jj_value ith_jj_from_json(ith_jj_interp *in, const json_t *json)
{
    switch (json_typeof(json)) {
    case JSON_NULL:
        return ith_jj_none();
    case JSON_TRUE:
    case JSON_FALSE:
        return ith_jj_bool(json_is_true(json));
    case JSON_INTEGER:
        return ith_jj_int(json_integer_value(json));
    case JSON_REAL:
        return ith_jj_float(json_real_value(json));
    case JSON_STRING:
        return ith_jj_str(json_string_value(json), (int64_t)json_string_length(json));
    default:
        break;
    }
    ith_jj_enter(in);
    ith_jj_value v;
    if (json_is_array(json)) {
        int64_t n = (int64_t)json_array_size(json);
        v = ith_jj_list_new(in, n, JJ_SEQ_LIST);
        for (int64_t i = 0; i < n; i++)
            v.u.list->items[i] = ith_jj_from_json(in, json_array_get(json, (size_t)i));
        v.u.list->count = n;
    } else {
        v = ith_jj_dict_new(in);
        /* jansson's iterators take a non-const object but do not change it */
        union {
            const json_t *c;
            json_t *m;
        } obj = {.c = json};
        const char *key;
        json_t *member;
        json_object_foreach(obj.m, key, member)
            ith_jj_dict_set(in, v.u.dict, ith_jj_cstr(key), ith_jj_from_json(in, member));
    }
    ith_jj_leave(in);
    return v;
}

/* ---- questions ------------------------------------------------------------------------------- */

bool ith_jj_truth(ith_jj_value v)
{
    switch (v.kind) {
    case JJ_UNDEFINED:
    case JJ_NONE:
        return false;
    case JJ_BOOL:
        return v.u.b;
    case JJ_INT:
        return v.u.i != 0;
    case JJ_FLOAT:
        return v.u.f != 0;
    case JJ_STR:
        return v.len > 0;
    case JJ_LIST:
        return v.u.list->count > 0 || v.u.list->flavor == JJ_SEQ_GENERATOR;
    case JJ_DICT:
        return v.u.dict->count > 0;
    case JJ_LOOP:
        return v.u.loop->length > 0;
    default:
        return true;
    }
}

bool ith_jj_is_number(ith_jj_value v)
{
    return v.kind == JJ_BOOL || v.kind == JJ_INT || v.kind == JJ_FLOAT;
}

double ith_jj_as_double(ith_jj_value v)
{
    return v.kind == JJ_FLOAT ? v.u.f : v.kind == JJ_BOOL ? (double)v.u.b : (double)v.u.i;
}

static int64_t as_int(ith_jj_value v)
{
    return v.kind == JJ_BOOL ? v.u.b : v.u.i;
}

static int compare_numbers(ith_jj_value a, ith_jj_value b)
{
    if (a.kind != JJ_FLOAT && b.kind != JJ_FLOAT)
        return as_int(a) < as_int(b) ? -1 : as_int(a) > as_int(b);
    double x = ith_jj_as_double(a), y = ith_jj_as_double(b);
    return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2; /* 2: not comparable, NaN */
}

static int compare_text(ith_jj_value a, ith_jj_value b)
{
    int64_t n = ith_min_i64(a.len, b.len);
    int c = n ? memcmp(a.u.s, b.u.s, (size_t)n) : 0;
    return c ? c : a.len < b.len ? -1 : a.len > b.len;
}

static bool equal_dicts(ith_jj_interp *in, const ith_jj_dict *a, const ith_jj_dict *b)
{
    if (a->count != b->count)
        return false;
    for (int64_t i = 0; i < a->count; i++) {
        ith_jj_value *other = ith_jj_dict_get(in, b, a->keys[i]);
        if (!other || !ith_jj_equal(in, a->values[i], *other))
            return false;
    }
    return true;
}

static bool equal_lists(ith_jj_interp *in, const ith_jj_list *a, const ith_jj_list *b)
{
    if (a == b)
        return true;
    if (a->flavor != b->flavor || a->flavor == JJ_SEQ_GENERATOR || a->count != b->count)
        return false;
    for (int64_t i = 0; i < a->count; i++)
        if (!ith_jj_equal(in, a->items[i], b->items[i]))
            return false;
    return true;
}

bool ith_jj_equal(ith_jj_interp *in, ith_jj_value a, ith_jj_value b)
{
    ith_jj_step(in, 1);
    if (ith_jj_is_number(a) && ith_jj_is_number(b))
        return compare_numbers(a, b) == 0;
    if (a.kind != b.kind)
        return false;
    bool equal = true;
    switch (a.kind) {
    case JJ_UNDEFINED:
    case JJ_NONE:
        return true;
    case JJ_STR:
        ith_jj_step_bytes(in, a.len == b.len ? a.len : 0);
        return a.len == b.len && (a.len == 0 || memcmp(a.u.s, b.u.s, (size_t)a.len) == 0);
    case JJ_LIST:
    case JJ_DICT:
        ith_jj_enter(in);
        equal = a.kind == JJ_LIST ? equal_lists(in, a.u.list, b.u.list)
                                  : equal_dicts(in, a.u.dict, b.u.dict);
        ith_jj_leave(in);
        return equal;
    default:
        return a.u.list == b.u.list;
    }
}

int ith_jj_order(ith_jj_interp *in, ith_jj_value a, ith_jj_value b, const char *op)
{
    ith_jj_step(in, 1);
    ith_jj_refuse_undefined(in, a);
    ith_jj_refuse_undefined(in, b);
    if (ith_jj_is_number(a) && ith_jj_is_number(b))
        return compare_numbers(a, b);
    if (a.kind == JJ_STR && b.kind == JJ_STR) {
        ith_jj_step_bytes(in, ith_min_i64(a.len, b.len));
        return compare_text(a, b);
    }
    if (a.kind != JJ_LIST || b.kind != JJ_LIST || a.u.list->flavor != b.u.list->flavor ||
        a.u.list->flavor > JJ_SEQ_TUPLE)
        ith_jj_fail(in, "comparison: '%s' not supported between '%s' and '%s'", op,
                    ith_jj_type_name(a), ith_jj_type_name(b));
    const ith_jj_list *x = a.u.list, *y = b.u.list;
    int result = 0;
    ith_jj_enter(in);
    int64_t n = ith_min_i64(x->count, y->count), i = 0;
    while (i < n && ith_jj_equal(in, x->items[i], y->items[i]))
        i++;
    if (i < n)
        result = ith_jj_order(in, x->items[i], y->items[i], op);
    else
        result = x->count < y->count ? -1 : x->count > y->count;
    ith_jj_leave(in);
    return result;
}

bool ith_jj_contains(ith_jj_interp *in, ith_jj_value container, ith_jj_value item)
{
    if (container.kind == JJ_STR) {
        if (item.kind != JJ_STR)
            ith_jj_fail(in, "in: 'in <string>' requires string as left operand, not %s",
                        ith_jj_type_name(item));
        ith_jj_step_bytes(in, container.len);
        return ith_jj_find((ith_jj_text){container.u.s, container.len},
                           (ith_jj_text){item.u.s, item.len}, 0) >= 0;
    }
    if (container.kind == JJ_DICT)
        return ith_jj_dict_get(in, container.u.dict, item) != NULL;
    if (container.kind != JJ_LIST && container.kind != JJ_UNDEFINED)
        ith_jj_fail(in, "in: argument of type '%s' is not iterable", ith_jj_type_name(container));
    ith_jj_list list = ith_jj_iterate(in, container);
    for (int64_t i = 0; i < list.count; i++)
        if (ith_jj_equal(in, list.items[i], item))
            return true;
    return false;
}

const char *ith_jj_type_name(ith_jj_value v)
{
    static const char *const names[] = {
        [JJ_UNDEFINED] = "Undefined", [JJ_NONE] = "NoneType",
        [JJ_BOOL] = "bool",           [JJ_INT] = "int",
        [JJ_FLOAT] = "float",         [JJ_STR] = "str",
        [JJ_LIST] = "list",           [JJ_DICT] = "dict",
        [JJ_NAMESPACE] = "Namespace", [JJ_MACRO] = "Macro",
        [JJ_BUILTIN] = "function",    [JJ_METHOD] = "method",
        [JJ_LOOP] = "LoopContext",    [JJ_CYCLER] = "Cycler",
        [JJ_JOINER] = "Joiner",
    };
    static const char *const flavors[] = {"list", "tuple", "range", "dict view", "generator"};
    if (v.kind == JJ_STR && v.markup)
        return "Markup";
    return v.kind == JJ_LIST ? flavors[v.u.list->flavor] : names[v.kind];
}

/* ---- iterating ------------------------------------------------------------------------------- */

static ith_jj_list characters(ith_jj_interp *in, ith_jj_value v)
{
    ith_jj_value list = ith_jj_list_new(in, ith_jj_count_chars(v.u.s, v.len), JJ_SEQ_LIST);
    for (const char *p = v.u.s, *end = p + v.len; p < end;) {
        const char *from = p;
        ith_jj_next_char(&p, end);
        list.u.list->items[list.u.list->count++] = ith_jj_str(from, p - from);
    }
    ith_jj_step(in, list.u.list->count);
    return *list.u.list;
}

ith_jj_list ith_jj_iterate(ith_jj_interp *in, ith_jj_value v)
{
    ith_jj_list list = {0};
    switch (v.kind) {
    case JJ_UNDEFINED:
        return list;
    case JJ_STR:
        return characters(in, v);
    case JJ_DICT:
        list.items = v.u.dict->keys;
        list.count = v.u.dict->count;
        return list;
    case JJ_LIST:
        list = *v.u.list;
        list.items += list.pos;
        list.count -= list.pos;
        if (list.flavor == JJ_SEQ_GENERATOR)
            v.u.list->pos = v.u.list->count;
        return list;
    default:
        ith_jj_fail(in, "iteration: '%s' object is not iterable", ith_jj_type_name(v));
    }
}

/* Python's slice.indices(): start and stop clipped to [0, n] (or [-1, n-1] going down). */
static void slice_bounds(ith_jj_interp *in, int64_t n, ith_jj_value start, ith_jj_value stop,
                         int64_t step, int64_t *first, int64_t *last)
{
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    int64_t ends[2] = {step < 0 ? high : low, step < 0 ? low : high};
    ith_jj_value given[2] = {start, stop};
    for (int k = 0; k < 2; k++) {
        if (given[k].kind == JJ_NONE)
            continue;
        int64_t i = ith_jj_want_int(in, "slice", given[k]);
        if (i < 0)
            i = i < -n ? low : ith_max_i64(i + n, low);
        ends[k] = ith_min_i64(i, high);
    }
    *first = ends[0];
    *last = ends[1];
}

static int64_t slice_count(int64_t first, int64_t last, int64_t step)
{
    if (step > 0)
        return first < last ? (last - first - 1) / step + 1 : 0;
    /* cppcheck-suppress zerodivcond ; callers refuse a step of 0 */
    return first > last ? (int64_t)(((uint64_t)(first - last) - 1) / (0 - (uint64_t)step)) + 1 : 0;
}

static ith_jj_value slice_text(ith_jj_interp *in, ith_jj_value v, int64_t first, int64_t count,
                               int64_t step)
{
    if (step == 1 || count == 0) {
        int64_t begin = count ? ith_jj_char_offset(v.u.s, v.len, first) : 0;
        int64_t len = ith_jj_char_offset(v.u.s + begin, v.len - begin, count);
        return ith_jj_with_markup(ith_jj_str(v.u.s + begin, len), v.markup);
    }
    ith_jj_list chars = characters(in, v);
    int64_t begin = ith_jj_capture_begin(in);
    for (int64_t k = 0, i = first; k < count; k++, i += k < count ? step : 0)
        ith_jj_emit(in, chars.items[i].u.s, chars.items[i].len);
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), v.markup);
}

ith_jj_value ith_jj_sequence_slice(ith_jj_interp *in, ith_jj_value v, ith_jj_value start,
                                   ith_jj_value stop, ith_jj_value step)
{
    int64_t by = step.kind == JJ_NONE ? 1 : ith_jj_want_int(in, "slice", step), first, last;
    bool is_list = v.kind == JJ_LIST && v.u.list->flavor <= JJ_SEQ_RANGE;
    if (by == 0)
        ith_jj_fail(in, "slice: the step is 0");
    if (v.kind == JJ_UNDEFINED)
        ith_jj_refuse_undefined(in, v);
    if (v.kind == JJ_DICT)
        ith_jj_fail(in, "slice: a mapping cannot be sliced");
    if (!is_list && v.kind != JJ_STR)
        return ith_jj_undefined(in, "slice of '%s' object", ith_jj_type_name(v));
    int64_t n = is_list ? v.u.list->count : ith_jj_count_chars(v.u.s, v.len);
    ith_jj_step_bytes(in, is_list ? 0 : v.len);
    slice_bounds(in, n, start, stop, by, &first, &last);
    int64_t count = slice_count(first, last, by);
    if (!is_list)
        return slice_text(in, v, first, count, by);
    ith_jj_value out =
        ith_jj_list_new(in, count, v.u.list->flavor == JJ_SEQ_TUPLE ? JJ_SEQ_TUPLE : JJ_SEQ_LIST);
    for (int64_t k = 0, i = first; k < count; k++, i += k < count ? by : 0)
        out.u.list->items[k] = v.u.list->items[i];
    out.u.list->count = count;
    return out;
}

/* ---- text of values -------------------------------------------------------------------------- */

/* Shortest digits that read back as f, laid out as Python's repr(float). */
void ith_jj_emit_double(ith_jj_interp *in, double f, bool json)
{
    char text[64], digits[32];
    if (isnan(f) || isinf(f)) {
        const char *name = isnan(f) ? (json ? "NaN" : "nan") : (json ? "Infinity" : "inf");
        ith_jj_emit_text(in, f < 0 ? "-" : "");
        ith_jj_emit_text(in, name);
        return;
    }
    int precision = 0;
    do
        snprintf(text, sizeof text, "%.*e", precision, fabs(f));
    while (strtod(text, NULL) != fabs(f) && ++precision < 17);
    int exponent = (int)strtol(strchr(text, 'e') + 1, NULL, 10), n = 0;
    for (const char *p = text; *p != 'e'; p++)
        if (*p != '.')
            digits[n++] = *p;
    digits[n] = '\0';
    char out[64];
    if (exponent >= 16 || exponent < -4)
        snprintf(out, sizeof out, "%c%s%se%c%02d", digits[0], n > 1 ? "." : "", digits + 1,
                 exponent < 0 ? '-' : '+', abs(exponent));
    else if (exponent < 0)
        snprintf(out, sizeof out, "0.%.*s%s", -exponent - 1, "0000", digits);
    else if (n <= exponent + 1)
        snprintf(out, sizeof out, "%s%.*s.0", digits, exponent + 1 - n, "0000000000000000");
    else
        snprintf(out, sizeof out, "%.*s.%s", exponent + 1, digits, digits + exponent + 1);
    ith_jj_emit_text(in, signbit(f) ? "-" : "");
    ith_jj_emit_text(in, out);
}

static void emit_text_repr(ith_jj_interp *in, ith_jj_value v)
{
    bool has_single = v.len && memchr(v.u.s, '\'', (size_t)v.len);
    char quote = has_single && !memchr(v.u.s, '"', (size_t)v.len) ? '"' : '\'';
    ith_jj_step_bytes(in, v.len * 8);
    ith_jj_emit(in, &quote, 1);
    for (const char *p = v.u.s, *end = p + v.len; p < end;) {
        const char *from = p;
        uint32_t c = ith_jj_next_char(&p, end);
        char escape[16];
        if (c == (uint32_t)quote || c == '\\')
            snprintf(escape, sizeof escape, "\\%c", (int)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(escape, sizeof escape, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (!ith_jj_is_printable(c))
            snprintf(escape, sizeof escape,
                     c < 0x100     ? "\\x%02x"
                     : c < 0x10000 ? "\\u%04x"
                                   : "\\U%08x",
                     (unsigned)c);
        else {
            ith_jj_emit(in, from, p - from);
            continue;
        }
        ith_jj_emit_text(in, escape);
    }
    ith_jj_emit(in, &quote, 1);
}

static void emit_list_repr(ith_jj_interp *in, const ith_jj_list *list)
{
    if (list->flavor == JJ_SEQ_RANGE) {
        ith_jj_emit_text(in, list->type_name);
        return;
    }
    if (list->flavor == JJ_SEQ_GENERATOR) {
        ith_jj_emit_text(in, "<generator object>");
        return;
    }
    bool is_tuple = list->flavor == JJ_SEQ_TUPLE;
    if (list->flavor == JJ_SEQ_VIEW) {
        ith_jj_emit_text(in, list->type_name);
        ith_jj_emit(in, "(", 1);
    }
    ith_jj_emit(in, is_tuple ? "(" : "[", 1);
    for (int64_t i = 0; i < list->count; i++) {
        ith_jj_emit(in, ", ", i ? 2 : 0);
        ith_jj_emit_repr(in, list->items[i]);
    }
    ith_jj_emit(in, ",", is_tuple && list->count == 1);
    ith_jj_emit(in, is_tuple ? ")" : "]", 1);
    ith_jj_emit(in, ")", list->flavor == JJ_SEQ_VIEW);
}

static void emit_dict_repr(ith_jj_interp *in, const ith_jj_dict *dict)
{
    ith_jj_emit(in, "{", 1);
    for (int64_t i = 0; i < dict->count; i++) {
        ith_jj_emit(in, ", ", i ? 2 : 0);
        ith_jj_emit_repr(in, dict->keys[i]);
        ith_jj_emit(in, ": ", 2);
        ith_jj_emit_repr(in, dict->values[i]);
    }
    ith_jj_emit(in, "}", 1);
}

static void emit_integer(ith_jj_interp *in, int64_t i)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)i);
    ith_jj_emit_text(in, text);
}

void ith_jj_emit_repr(ith_jj_interp *in, ith_jj_value v)
{
    ith_jj_enter(in);
    ith_jj_step(in, 1);
    switch (v.kind) {
    case JJ_UNDEFINED:
        ith_jj_emit_text(in, "Undefined");
        break;
    case JJ_NONE:
        ith_jj_emit_text(in, "None");
        break;
    case JJ_BOOL:
        ith_jj_emit_text(in, v.u.b ? "True" : "False");
        break;
    case JJ_INT:
        emit_integer(in, v.u.i);
        break;
    case JJ_FLOAT:
        ith_jj_emit_double(in, v.u.f, false);
        break;
    case JJ_STR:
        ith_jj_emit_text(in, v.markup ? "Markup(" : "");
        emit_text_repr(in, v);
        ith_jj_emit_text(in, v.markup ? ")" : "");
        break;
    case JJ_LIST:
        emit_list_repr(in, v.u.list);
        break;
    case JJ_DICT:
        emit_dict_repr(in, v.u.dict);
        break;
    case JJ_NAMESPACE:
        ith_jj_emit_text(in, "<Namespace ");
        emit_dict_repr(in, v.u.dict);
        ith_jj_emit_text(in, ">");
        break;
    default:
        ith_jj_emit_text(in, "<");
        ith_jj_emit_text(in, ith_jj_type_name(v));
        ith_jj_emit_text(in, ">");
        break;
    }
    ith_jj_leave(in);
}

void ith_jj_emit_str(ith_jj_interp *in, ith_jj_value v)
{
    if (v.kind == JJ_STR)
        ith_jj_emit(in, v.u.s, v.len);
    else if (v.kind != JJ_UNDEFINED)
        ith_jj_emit_repr(in, v);
}

ith_jj_value ith_jj_to_str(ith_jj_interp *in, ith_jj_value v)
{
    if (v.kind == JJ_STR)
        return v;
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_str(in, v);
    return ith_jj_capture_end(in, begin);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

typedef struct {
    ith_jj_interp *in;
    ith_jj_text item, key; /* separators */
    bool has_indent, ascii, sort_keys;
    ith_jj_text indent;
    int64_t level;
} json_writer;

static void write_text(json_writer *w, ith_jj_value v)
{
    ith_jj_interp *in = w->in;
    const char *p = v.u.s, *end = p + v.len, *from = p;
    ith_jj_step_bytes(in, v.len);
    ith_jj_emit(in, "\"", 1);
    while (p < end) {
        const char *at = p;
        unsigned char ch = (unsigned char)*p;
        if (ch >= 0x20 && ch != '"' && ch != '\\' && (ch < 0x7f || !w->ascii)) {
            p++;
            continue;
        }
        ith_jj_emit(in, from, at - from);
        uint32_t c = ith_jj_next_char(&p, end);
        static const char plain[] = "\"\\\n\r\t\f\b", letters[] = "\"\\nrtfb";
        const char *hit = c ? strchr(plain, (int)(c < 0x80 ? c : 1)) : NULL;
        char escape[16];
        if (hit)
            snprintf(escape, sizeof escape, "\\%c", letters[hit - plain]);
        else if (c < 0x10000)
            snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
        else
            snprintf(escape, sizeof escape, "\\u%04x\\u%04x",
                     (unsigned)(0xd800 + ((c - 0x10000) >> 10)),
                     (unsigned)(0xdc00 + ((c - 0x10000) & 0x3ff)));
        ith_jj_emit_text(in, escape);
        from = p;
    }
    ith_jj_emit(in, from, end - from);
    ith_jj_emit(in, "\"", 1);
}

static void write_newline(json_writer *w)
{
    if (!w->has_indent)
        return;
    ith_jj_emit(w->in, "\n", 1);
    for (int64_t i = 0; i < w->level; i++)
        ith_jj_emit(w->in, w->indent.s, w->indent.len);
}

static void write_scalar(json_writer *w, ith_jj_value v)
{
    switch (v.kind) {
    case JJ_NONE:
        ith_jj_emit_text(w->in, "null");
        break;
    case JJ_BOOL:
        ith_jj_emit_text(w->in, v.u.b ? "true" : "false");
        break;
    case JJ_INT:
        emit_integer(w->in, v.u.i);
        break;
    case JJ_FLOAT:
        ith_jj_emit_double(w->in, v.u.f, true);
        break;
    case JJ_STR:
        write_text(w, v);
        break;
    default:
        ith_jj_fail(w->in, "tojson: Object of type %s is not JSON serializable",
                    ith_jj_type_name(v));
    }
}

static void write_key(json_writer *w, ith_jj_value key)
{
    if (key.kind == JJ_STR) {
        write_text(w, key);
        return;
    }
    if (!ith_jj_is_number(key) && key.kind != JJ_NONE)
        ith_jj_fail(w->in, "tojson: keys must be str, int, float, bool or None, not %s",
                    ith_jj_type_name(key));
    ith_jj_emit(w->in, "\"", 1);
    write_scalar(w, key);
    ith_jj_emit(w->in, "\"", 1);
}

/* Entry numbers in the order of their keys (insertion sort on short lists would do, but objects of
 * foreign size come here: a merge sort). */
static void sort_entries(ith_jj_interp *in, const ith_jj_dict *dict, int64_t *order,
                         int64_t *scratch, int64_t n)
{
    if (n < 2)
        return;
    int64_t half = n / 2, i = 0, j = half, k = 0;
    sort_entries(in, dict, order, scratch, half);
    sort_entries(in, dict, order + half, scratch, n - half);
    while (i < half && j < n)
        scratch[k++] = ith_jj_order(in, dict->keys[order[j]], dict->keys[order[i]], "<") < 0
                           ? order[j++]
                           : order[i++];
    while (i < half)
        scratch[k++] = order[i++];
    memcpy(order, scratch, (size_t)k * sizeof *order);
}

static void write_value(json_writer *w, ith_jj_value v);

static void write_object(json_writer *w, const ith_jj_dict *dict)
{
    int64_t *order = NULL;
    if (w->sort_keys) {
        order = ith_jj_alloc(w->in, ith_mul_bytes(dict->count * 2, sizeof *order));
        for (int64_t i = 0; i < dict->count; i++)
            order[i] = i;
        sort_entries(w->in, dict, order, order + dict->count, dict->count);
    }
    ith_jj_emit(w->in, "{", 1);
    w->level++;
    for (int64_t i = 0; i < dict->count; i++) {
        int64_t e = order ? order[i] : i;
        if (i)
            ith_jj_emit(w->in, w->item.s, w->item.len);
        write_newline(w);
        write_key(w, dict->keys[e]);
        ith_jj_emit(w->in, w->key.s, w->key.len);
        write_value(w, dict->values[e]);
    }
    w->level--;
    if (dict->count)
        write_newline(w);
    ith_jj_emit(w->in, "}", 1);
}

static void write_array(json_writer *w, const ith_jj_list *list)
{
    ith_jj_emit(w->in, "[", 1);
    w->level++;
    for (int64_t i = 0; i < list->count; i++) {
        if (i)
            ith_jj_emit(w->in, w->item.s, w->item.len);
        write_newline(w);
        write_value(w, list->items[i]);
    }
    w->level--;
    if (list->count)
        write_newline(w);
    ith_jj_emit(w->in, "]", 1);
}

static void write_value(json_writer *w, ith_jj_value v)
{
    ith_jj_enter(w->in);
    ith_jj_step(w->in, 1);
    if (v.kind == JJ_DICT)
        write_object(w, v.u.dict);
    else if (v.kind == JJ_LIST && v.u.list->flavor <= JJ_SEQ_TUPLE)
        write_array(w, v.u.list);
    else
        write_scalar(w, v);
    ith_jj_leave(w->in);
}

void ith_jj_emit_json(ith_jj_interp *in, ith_jj_value v, ith_jj_value indent,
                      ith_jj_value separators, bool ascii, bool sort_keys)
{
    static const char blanks[] = "                                ";
    json_writer w = {.in = in, .item = {", ", 2}, .key = {": ", 2}, .ascii = ascii};
    w.sort_keys = sort_keys;
    w.has_indent = indent.kind == JJ_STR || ith_jj_is_number(indent);
    if (indent.kind == JJ_STR)
        w.indent = (ith_jj_text){indent.u.s, indent.len};
    else if (w.has_indent)
        w.indent =
            (ith_jj_text){blanks, ith_min_i64(ith_max_i64(ith_jj_want_int(in, "tojson", indent), 0),
                                              (int64_t)sizeof blanks - 1)};
    if (w.has_indent)
        w.item.len = 1;
    if (separators.kind == JJ_LIST && separators.u.list->count == 2) {
        ith_jj_text item = ith_jj_want_str(in, "tojson", separators.u.list->items[0]);
        w.key = ith_jj_want_str(in, "tojson", separators.u.list->items[1]);
        w.item = item;
    } else if (separators.kind != JJ_NONE && separators.kind != JJ_UNDEFINED) {
        ith_jj_fail(in, "tojson: separators must be a pair");
    }
    write_value(&w, v);
}
