/* jinja_tests.c - the tests of Jinja2 (`is defined`, `is string`, ..). */
#include "tokenizer/jinja_internal.h"

/* Tests of the value's kind alone. */
typedef enum {
    IS_DEFINED,
    IS_UNDEFINED,
    IS_NONE,
    IS_STRING,
    IS_MAPPING,
    IS_ITERABLE,
    IS_SEQUENCE,
    IS_NUMBER,
    IS_INTEGER,
    IS_FLOAT,
    IS_BOOLEAN,
    IS_TRUE,
    IS_FALSE,
    IS_CALLABLE,
    IS_ESCAPED
} kind_test;

static bool has_kind(ith_jj_value v, kind_test test)
{
    bool is_list = v.kind == JJ_LIST || v.kind == JJ_STR || v.kind == JJ_DICT;
    switch (test) {
    case IS_DEFINED:
        return v.kind != JJ_UNDEFINED;
    case IS_UNDEFINED:
        return v.kind == JJ_UNDEFINED;
    case IS_NONE:
        return v.kind == JJ_NONE;
    case IS_STRING:
        return v.kind == JJ_STR;
    case IS_MAPPING:
        return v.kind == JJ_DICT;
    case IS_ITERABLE: /* an undefined value iterates over nothing, so Jinja says yes */
        return is_list || v.kind == JJ_UNDEFINED || v.kind == JJ_LOOP;
    case IS_SEQUENCE:
        return (is_list && !(v.kind == JJ_LIST && v.u.list->flavor > JJ_SEQ_RANGE)) ||
               v.kind == JJ_UNDEFINED;
    case IS_NUMBER:
        return ith_jj_is_number(v);
    case IS_INTEGER:
        return v.kind == JJ_INT;
    case IS_FLOAT:
        return v.kind == JJ_FLOAT;
    case IS_BOOLEAN:
        return v.kind == JJ_BOOL;
    case IS_TRUE:
        return v.kind == JJ_BOOL && v.u.b;
    case IS_FALSE:
        return v.kind == JJ_BOOL && !v.u.b;
    case IS_CALLABLE:
        return v.kind == JJ_MACRO || v.kind == JJ_BUILTIN || v.kind == JJ_METHOD ||
               v.kind == JJ_JOINER || v.kind == JJ_UNDEFINED || v.kind == JJ_LOOP;
    default:
        return v.kind == JJ_STR && v.markup;
    }
}

#define KIND_TEST(NAME, KIND)                                                                      \
    static ith_jj_value test_##NAME(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)    \
    {                                                                                              \
        ith_jj_no_arguments(in, "test '" #NAME "'", args);                                         \
        return ith_jj_bool(has_kind(v, KIND));                                                     \
    }
KIND_TEST(defined, IS_DEFINED)
KIND_TEST(undefined, IS_UNDEFINED)
KIND_TEST(none, IS_NONE)
KIND_TEST(string, IS_STRING)
KIND_TEST(mapping, IS_MAPPING)
KIND_TEST(iterable, IS_ITERABLE)
KIND_TEST(sequence, IS_SEQUENCE)
KIND_TEST(number, IS_NUMBER)
KIND_TEST(integer, IS_INTEGER)
KIND_TEST(float, IS_FLOAT)
KIND_TEST(boolean, IS_BOOLEAN)
KIND_TEST(true, IS_TRUE)
KIND_TEST(false, IS_FALSE)
KIND_TEST(callable, IS_CALLABLE)
KIND_TEST(escaped, IS_ESCAPED)

#define COMPARE_TEST(NAME, CMP)                                                                    \
    static ith_jj_value test_##NAME(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)    \
    {                                                                                              \
        static const char *const params[] = {"other", NULL};                                       \
        ith_jj_bound b = ith_jj_bind(in, "test '" #NAME "'", args, params, 1);                     \
        return ith_jj_bool(ith_jj_compare(in, CMP, v, b.v[0]));                                    \
    }
COMPARE_TEST(eq, JJ_EQ)
COMPARE_TEST(ne, JJ_NE)
COMPARE_TEST(lt, JJ_LT)
COMPARE_TEST(le, JJ_LE)
COMPARE_TEST(gt, JJ_GT)
COMPARE_TEST(ge, JJ_GE)
COMPARE_TEST(in, JJ_IN)

static bool has_remainder(ith_jj_interp *in, ith_jj_value v, ith_jj_value by, ith_jj_value wanted)
{
    return ith_jj_equal(in, ith_jj_binary(in, JJ_MOD, v, by), wanted);
}

static ith_jj_value test_odd(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "test 'odd'", args);
    return ith_jj_bool(has_remainder(in, v, ith_jj_int(2), ith_jj_int(1)));
}

static ith_jj_value test_even(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "test 'even'", args);
    return ith_jj_bool(has_remainder(in, v, ith_jj_int(2), ith_jj_int(0)));
}

static ith_jj_value test_divisibleby(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"num", NULL};
    ith_jj_bound b = ith_jj_bind(in, "test 'divisibleby'", args, params, 1);
    return ith_jj_bool(has_remainder(in, v, b.v[0], ith_jj_int(0)));
}

/* Python's "is": the same object. Small values are one object each. */
static ith_jj_value test_sameas(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    static const char *const params[] = {"other", NULL};
    ith_jj_value o = ith_jj_bind(in, "test 'sameas'", args, params, 1).v[0];
    if (v.kind != o.kind)
        return ith_jj_bool(false);
    if (v.kind == JJ_STR)
        return ith_jj_bool(v.len == o.len && (v.u.s == o.u.s || v.len < 2) &&
                           ith_jj_equal(in, v, o));
    if (v.kind < JJ_STR)
        return ith_jj_bool(ith_jj_equal(in, v, o));
    return ith_jj_bool(v.u.list == o.u.list);
}

static ith_jj_value test_lower(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "test 'lower'", args);
    ith_jj_value s = ith_jj_to_str(in, v);
    return ith_jj_bool(ith_jj_all_chars((ith_jj_text){s.u.s, s.len}, JJ_IS_LOWER));
}

static ith_jj_value test_upper(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "test 'upper'", args);
    ith_jj_value s = ith_jj_to_str(in, v);
    return ith_jj_bool(ith_jj_all_chars((ith_jj_text){s.u.s, s.len}, JJ_IS_UPPER));
}

static ith_jj_value test_filter(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "test 'filter'", args);
    ith_jj_text name = ith_jj_want_str(in, "test 'filter'", v);
    return ith_jj_bool(ith_jj_find_filter(ith_jj_str_copy(in, name.s, name.len).u.s) != NULL);
}

static ith_jj_value test_test(ith_jj_interp *in, ith_jj_value v, const ith_jj_args *args)
{
    ith_jj_no_arguments(in, "test 'test'", args);
    ith_jj_text name = ith_jj_want_str(in, "test 'test'", v);
    return ith_jj_bool(ith_jj_find_test(ith_jj_str_copy(in, name.s, name.len).u.s) != NULL);
}

static const ith_jj_named_fn tests[] = {
    {"!=", test_ne},
    {"<", test_lt},
    {"<=", test_le},
    {"==", test_eq},
    {">", test_gt},
    {">=", test_ge},
    {"boolean", test_boolean},
    {"callable", test_callable},
    {"defined", test_defined},
    {"divisibleby", test_divisibleby},
    {"eq", test_eq},
    {"equalto", test_eq},
    {"escaped", test_escaped},
    {"even", test_even},
    {"false", test_false},
    {"filter", test_filter},
    {"float", test_float},
    {"ge", test_ge},
    {"greaterthan", test_gt},
    {"gt", test_gt},
    {"in", test_in},
    {"integer", test_integer},
    {"iterable", test_iterable},
    {"le", test_le},
    {"lessthan", test_lt},
    {"lower", test_lower},
    {"lt", test_lt},
    {"mapping", test_mapping},
    {"ne", test_ne},
    {"none", test_none},
    {"number", test_number},
    {"odd", test_odd},
    {"sameas", test_sameas},
    {"sequence", test_sequence},
    {"string", test_string},
    {"test", test_test},
    {"true", test_true},
    {"undefined", test_undefined},
    {"upper", test_upper},
    {NULL, NULL},
};

ith_jj_filter_fn ith_jj_find_test(const char *name)
{
    return ith_jj_find_named(tests, name);
}
