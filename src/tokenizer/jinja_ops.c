/* jinja_ops.c - Python's operators on template values. Integers have 64 bits: what would not fit is
 * an error, not a wrong number. */
#include "tokenizer/jinja_internal.h"

#include "base/checked.h"

#include <math.h>
#include <string.h>

static const char *op_text(ith_jj_op op)
{
    switch (op) {
    case JJ_ADD:
        return "+";
    case JJ_SUB:
        return "-";
    case JJ_MUL:
        return "*";
    case JJ_DIV:
        return "/";
    case JJ_FLOORDIV:
        return "//";
    case JJ_MOD:
        return "%";
    default:
        return "**";
    }
}

void ith_jj_refuse_undefined(ith_jj_interp *in, ith_jj_value v)
{
    if (v.kind == JJ_UNDEFINED)
        ith_jj_fail(in, "%.*s", (int)ith_min_i64(v.len, 250), v.u.s);
}

static int64_t as_int(ith_jj_value v)
{
    return v.kind == JJ_BOOL ? v.u.b : v.u.i;
}

static _Noreturn void too_large(ith_jj_interp *in, ith_jj_op op)
{
    ith_jj_fail(in, "'%s': the result is beyond 64 bits", op_text(op));
}

static double floor_mod(double a, double b)
{
    double m = fmod(a, b);
    if (m != 0 && (m < 0) != (b < 0))
        m += b;
    return m != 0 ? m : copysign(0.0, b);
}

static ith_jj_value power(ith_jj_interp *in, ith_jj_value a, ith_jj_value b)
{
    if (a.kind == JJ_FLOAT || b.kind == JJ_FLOAT || as_int(b) < 0) {
        double x = ith_jj_as_double(a), y = ith_jj_as_double(b);
        if (x == 0 && y < 0)
            ith_jj_fail(in, "'**': 0.0 cannot be raised to a negative power");
        if (x < 0 && y != floor(y))
            ith_jj_fail(in, "'**': a negative number to a fractional power");
        double result = pow(x, y);
        if (isinf(result) && !isinf(x) && !isinf(y))
            ith_jj_fail(in, "'**': the result is too large");
        return ith_jj_float(result);
    }
    int64_t base = as_int(a), exponent = as_int(b), result = 1;
    while (exponent > 0) {
        if (exponent & 1 && !ith_mul_ok(result, base, &result))
            too_large(in, JJ_POW);
        exponent >>= 1;
        if (exponent > 0 && !ith_mul_ok(base, base, &base))
            too_large(in, JJ_POW);
    }
    return ith_jj_int(result);
}

static ith_jj_value float_op(ith_jj_interp *in, ith_jj_op op, double x, double y)
{
    if ((op == JJ_DIV || op == JJ_FLOORDIV || op == JJ_MOD) && y == 0)
        ith_jj_fail(in, "'%s': division by zero", op_text(op));
    switch (op) {
    case JJ_ADD:
        return ith_jj_float(x + y);
    case JJ_SUB:
        return ith_jj_float(x - y);
    case JJ_MUL:
        return ith_jj_float(x * y);
    case JJ_DIV:
        return ith_jj_float(x / y);
    case JJ_FLOORDIV: {
        double mod = floor_mod(x, y), div = (x - mod) / y;
        double down = floor(div);
        return ith_jj_float(div == 0 ? copysign(0.0, x / y) : div - down > 0.5 ? down + 1 : down);
    }
    default:
        return ith_jj_float(floor_mod(x, y));
    }
}

static ith_jj_value int_op(ith_jj_interp *in, ith_jj_op op, int64_t x, int64_t y)
{
    int64_t r = 0;
    bool ok = true;
    if ((op == JJ_FLOORDIV || op == JJ_MOD) && y == 0)
        ith_jj_fail(in, "'%s': division by zero", op_text(op));
    if (op == JJ_ADD)
        ok = ith_add_ok(x, y, &r);
    else if (op == JJ_SUB)
        ok = !__builtin_sub_overflow(x, y, &r);
    else if (op == JJ_MUL)
        ok = ith_mul_ok(x, y, &r);
    else if (op == JJ_MOD)
        r = y == -1 ? 0 : x % y + (x % y != 0 && (x % y < 0) != (y < 0) ? y : 0);
    else if (y == -1)
        ok = !__builtin_sub_overflow((int64_t)0, x, &r);
    else
        r = x / y - (x % y != 0 && (x < 0) != (y < 0));
    if (!ok)
        too_large(in, op);
    return ith_jj_int(r);
}

static ith_jj_value number_op(ith_jj_interp *in, ith_jj_op op, ith_jj_value a, ith_jj_value b)
{
    if (op == JJ_POW)
        return power(in, a, b);
    if (op == JJ_DIV || a.kind == JJ_FLOAT || b.kind == JJ_FLOAT)
        return float_op(in, op, ith_jj_as_double(a), ith_jj_as_double(b));
    return int_op(in, op, as_int(a), as_int(b));
}

static ith_jj_value escaped(ith_jj_interp *in, ith_jj_value v)
{
    int64_t begin = ith_jj_capture_begin(in);
    ith_jj_emit_escaped(in, (ith_jj_text){v.u.s, v.len});
    return ith_jj_with_markup(ith_jj_capture_end(in, begin), true);
}

/* A string that is built by repeated + grows in place, so that templates which collect their output
 * in a variable stay linear. Safe because strings are immutable and only the one that ends at the
 * tail's end may extend it. */
ith_jj_value ith_jj_concat(ith_jj_interp *in, ith_jj_value a, ith_jj_value b)
{
    bool markup = a.markup || b.markup;
    if (markup && !a.markup)
        a = escaped(in, a);
    if (markup && !b.markup)
        b = escaped(in, b);
    if (b.len == 0)
        return ith_jj_with_markup(a, markup);
    int64_t total = a.len + b.len;
    if (!in->tail || a.len == 0 || a.u.s + a.len != in->tail + in->tail_used ||
        b.len > in->tail_cap - in->tail_used) {
        int64_t cap = total * 2 + 32;
        char *fresh = ith_jj_alloc(in, cap);
        if (a.len)
            memcpy(fresh, a.u.s, (size_t)a.len);
        ith_jj_step_bytes(in, a.len);
        in->tail = fresh;
        in->tail_cap = cap;
        in->tail_used = a.len;
        a.u.s = fresh;
    }
    memcpy(in->tail + in->tail_used, b.u.s, (size_t)b.len);
    in->tail_used += b.len;
    ith_jj_step_bytes(in, b.len);
    return ith_jj_with_markup(ith_jj_str(a.u.s, total), markup);
}

static ith_jj_value join_lists(ith_jj_interp *in, const ith_jj_list *a, const ith_jj_list *b)
{
    ith_jj_value out = ith_jj_list_new(in, a->count + b->count, a->flavor);
    if (a->count)
        memcpy(out.u.list->items, a->items, (size_t)a->count * sizeof *a->items);
    if (b->count)
        memcpy(out.u.list->items + a->count, b->items, (size_t)b->count * sizeof *b->items);
    out.u.list->count = a->count + b->count;
    return out;
}

static ith_jj_value repeat(ith_jj_interp *in, ith_jj_value v, int64_t times)
{
    int64_t total = 0, n = v.kind == JJ_STR ? v.len : v.u.list->count;
    times = ith_max_i64(times, 0);
    if (!ith_mul_ok(n, times, &total) || total > ((int64_t)1 << 40))
        ith_jj_fail_as(in, ITH_ERR_MEMORY, "'*': %lld repeats of %lld elements are too many",
                       (long long)times, (long long)n);
    if (v.kind == JJ_STR) {
        char *out = ith_jj_alloc(in, total + 1);
        for (int64_t i = 0; i < times && n > 0; i++)
            memcpy(out + i * n, v.u.s, (size_t)n);
        ith_jj_step_bytes(in, total);
        return ith_jj_with_markup(ith_jj_str(out, total), v.markup);
    }
    ith_jj_value out = ith_jj_list_new(in, total, v.u.list->flavor);
    for (int64_t i = 0; i < times && n > 0; i++)
        memcpy(out.u.list->items + i * n, v.u.list->items, (size_t)n * sizeof(ith_jj_value));
    out.u.list->count = total;
    return out;
}

static bool is_sequence(ith_jj_value v)
{
    return v.kind == JJ_LIST && v.u.list->flavor <= JJ_SEQ_TUPLE;
}

ith_jj_value ith_jj_binary(ith_jj_interp *in, ith_jj_op op, ith_jj_value a, ith_jj_value b)
{
    if (a.kind == JJ_STR && op == JJ_MOD) {
        return ith_jj_percent_format(in, a, b);
    }
    ith_jj_refuse_undefined(in, a);
    ith_jj_refuse_undefined(in, b);
    if (ith_jj_is_number(a) && ith_jj_is_number(b))
        return number_op(in, op, a, b);
    if (op == JJ_ADD && a.kind == JJ_STR && b.kind == JJ_STR)
        return ith_jj_concat(in, a, b);
    if (op == JJ_ADD && is_sequence(a) && is_sequence(b) && a.u.list->flavor == b.u.list->flavor)
        return join_lists(in, a.u.list, b.u.list);
    if (op == JJ_MUL) {
        ith_jj_value seq = a.kind == JJ_STR || is_sequence(a) ? a : b,
                     times = seq.kind == a.kind ? b : a;
        if ((seq.kind == JJ_STR || is_sequence(seq)) &&
            (times.kind == JJ_INT || times.kind == JJ_BOOL))
            return repeat(in, seq, as_int(times));
    }
    ith_jj_fail(in, "'%s': unsupported between '%s' and '%s'", op_text(op), ith_jj_type_name(a),
                ith_jj_type_name(b));
}

bool ith_jj_compare(ith_jj_interp *in, ith_jj_cmp cmp, ith_jj_value a, ith_jj_value b)
{
    static const char *const texts[] = {"==", "!=", "<", "<=", ">", ">="};
    switch (cmp) {
    case JJ_EQ:
        return ith_jj_equal(in, a, b);
    case JJ_NE:
        return !ith_jj_equal(in, a, b);
    case JJ_IN:
        return ith_jj_contains(in, b, a);
    case JJ_NOT_IN:
        return !ith_jj_contains(in, b, a);
    default:
        break;
    }
    int order = ith_jj_order(in, a, b, texts[cmp]);
    if (order == 2) /* NaN */
        return false;
    return cmp == JJ_LT   ? order < 0
           : cmp == JJ_LE ? order <= 0
           : cmp == JJ_GT ? order > 0
                          : order >= 0;
}
