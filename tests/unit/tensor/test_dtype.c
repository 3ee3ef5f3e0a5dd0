/* Goal: conversions between floating types are exact where they can be and round to nearest even
 * where they cannot. Method: all 65,536 half and bf16 values, boundaries and ties in double, names
 * and sizes of every type. */
#include "testing.h"

#include "tensor/dtype.h"

#include <math.h>

static uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static void test_names_and_sizes_go_both_ways(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t bytes;
    } rows[] = {{"F32", 4},     {"BF16", 2},        {"F16", 2},         {"F64", 8}, {"I64", 8},
                {"I32", 4},     {"I16", 2},         {"I8", 1},          {"U8", 1},  {"BOOL", 1},
                {"F8_E4M3", 1}, {"F8_E5M2", 1},     {"U16", 2},         {"U32", 4}, {"U64", 8},
                {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}, {"C64", 8}};
    assert_int_equal(sizeof rows / sizeof *rows, ITH_DTYPE_COUNT);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ith_dtype d = ITH_DTYPE_COUNT;
        if (!ith_dtype_from_name(rows[i].name, &d))
            fail_msg("%s is not known", rows[i].name);
        assert_string_equal(ith_dtype_name(d), rows[i].name);
        assert_int_equal(ith_dtype_bytes(d), rows[i].bytes);
    }
    ith_dtype kept = ITH_I8;
    assert_false(ith_dtype_from_name("f32", &kept));
    assert_false(ith_dtype_from_name("", &kept));
    assert_int_equal(kept, ITH_I8);
}

/* Value of a half by its definition. */
static double half_value(uint16_t x)
{
    int exponent = x >> 10 & 31, mantissa = x & 1023;
    double m = exponent ? 1024 + mantissa : mantissa;
    double v = exponent == 31 ? (mantissa ? (double)NAN : (double)INFINITY)
                              : ldexp(m, (exponent ? exponent : 1) - 25);
    return x & 0x8000 ? -v : v;
}

static void test_every_half_reads_right_and_comes_back(void **state)
{
    (void)state;
    for (uint32_t x = 0; x < 65536; x++) {
        float f = ith_f16_to_f32((uint16_t)x);
        double wanted = half_value((uint16_t)x);
        if (isnan(wanted)) {
            assert_true(isnan(f));
            assert_true((ith_f32_to_f16(f) & 0x7c00) == 0x7c00 && (ith_f32_to_f16(f) & 0x3ff));
            continue;
        }
        if ((double)f != wanted || (signbit(f) != 0) != (x >> 15 != 0))
            fail_msg("half %04x: %g, expected %g", x, (double)f, wanted);
        assert_int_equal(ith_f32_to_f16(f), x);
    }
}

/* Between each two neighbours: below the middle down, above it up, the middle itself to even. */
static void test_half_rounds_to_nearest_even(void **state)
{
    (void)state;
    for (uint16_t x = 0; x < 0x7bff; x++) {
        float middle = (float)((half_value(x) + half_value((uint16_t)(x + 1))) / 2);
        uint16_t even = x & 1 ? (uint16_t)(x + 1) : x;
        for (int sign = 0; sign < 2; sign++) {
            uint16_t s = sign ? 0x8000 : 0;
            float m = sign ? -middle : middle;
            uint16_t at = ith_f32_to_f16(m), below = ith_f32_to_f16(nextafterf(m, 0)),
                     above = ith_f32_to_f16(nextafterf(m, sign ? -INFINITY : INFINITY));
            if (at != (even | s) || below != (x | s) || above != ((x + 1) | s))
                fail_msg("around %04x: %04x %04x %04x", x | s, below, at, above);
        }
    }
    assert_int_equal(ith_f32_to_f16(65504), 0x7bff);
    assert_int_equal(ith_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(ith_f32_to_f16(65520), 0x7c00); /* the tie goes to infinity, as IEEE says */
    assert_int_equal(ith_f32_to_f16(-1e30f), 0xfc00);
    assert_int_equal(ith_f32_to_f16(2.9802322e-8f), 0); /* half of the smallest: to even */
    assert_int_equal(ith_f32_to_f16(2.9802326e-8f), 1);
    assert_int_equal(ith_f32_to_f16(-1e-30f), 0x8000);
}

static void test_bf16_every_value_ties_and_nan(void **state)
{
    (void)state;
    for (uint32_t x = 0; x < 65536; x++) {
        float f = ith_bf16_to_f32((uint16_t)x);
        assert_int_equal(bits_of(f), x << 16);
        uint16_t back = ith_f32_to_bf16(f);
        if (isnan(f))
            assert_true(isnan(ith_bf16_to_f32(back)) && (back & 0x40));
        else
            assert_int_equal(back, x);
        uint32_t tie = x << 16 | 0x8000; /* half way to the next */
        memcpy(&f, &tie, sizeof f);
        if (isnan(f)) {
            assert_true(isnan(ith_bf16_to_f32(ith_f32_to_bf16(f)))); /* low payload bits only */
            continue;
        }
        assert_int_equal(ith_f32_to_bf16(f), x & 1 ? x + 1 : x);
        tie--;
        memcpy(&f, &tie, sizeof f);
        assert_int_equal(ith_f32_to_bf16(f), x);
        tie += 2;
        memcpy(&f, &tie, sizeof f);
        assert_int_equal(ith_f32_to_bf16(f), x + 1);
    }
}

static void test_convert_all_pairs(void **state)
{
    (void)state;
    static const ith_dtype types[] = {ITH_F32, ITH_BF16, ITH_F16, ITH_F64};
    static const double values[5] = {0, -1.5, 0.0078125, 240, -0.25}; /* exact in every type */
    double from[5], to[5], back[5];
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            ith_convert(from, types[a], values, ITH_F64, 5);
            ith_convert(to, types[b], from, types[a], 5);
            ith_convert(back, ITH_F64, to, types[b], 5);
            if (memcmp(back, values, sizeof back) != 0)
                fail_msg("%s to %s: %g %g %g %g %g", ith_dtype_name(types[a]),
                         ith_dtype_name(types[b]), back[0], back[1], back[2], back[3], back[4]);
        }
    ith_convert(to, ITH_F32, values, ITH_F64, 0); /* nothing to do */
    int64_t ids[2] = {1, -1}, copy[2] = {0, 0};
    ith_convert(copy, ITH_I64, ids, ITH_I64, 2); /* the same type copies, whatever it is */
    assert_memory_equal(copy, ids, sizeof ids);
}

/* A double that is a tie for bf16 only after it was rounded to float: the direct answer differs. */
static void test_convert_f64_to_narrow_types_goes_through_f32(void **state)
{
    (void)state;
    double x = 1.00390625 + ldexp(1, -40); /* just above half way between 1 and 1 + 2^-7 */
    uint16_t bf16 = 0, f16 = 0;
    ith_convert(&bf16, ITH_BF16, &x, ITH_F64, 1);
    assert_int_equal(bf16, 0x3f80); /* documented: two roundings, as in torch */
    x = 1 + ldexp(1, -11) + ldexp(1, -40);
    ith_convert(&f16, ITH_F16, &x, ITH_F64, 1);
    assert_int_equal(f16, 0x3c00);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_and_sizes_go_both_ways),
        cmocka_unit_test(test_every_half_reads_right_and_comes_back),
        cmocka_unit_test(test_half_rounds_to_nearest_even),
        cmocka_unit_test(test_bf16_every_value_ties_and_nan),
        cmocka_unit_test(test_convert_all_pairs),
        cmocka_unit_test(test_convert_f64_to_narrow_types_goes_through_f32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
