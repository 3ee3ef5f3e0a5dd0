/* Goal: the fast CPU operators compute what the reference says, and the same bits for one thread
 * and two. Method: every case of the bench, in F32 and BF16. */
#include "testing.h"

#include "op_cases.h"

static void check_all(ith_dtype dtype)
{
    static ith_error err;
    ith_pool *pool = NULL;
    assert_ok(ith_pool_create(&pool, 2, &err), err);
    ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), pool, &err);
    int bad = 0;
    for (int64_t i = 0; i < op_case_count(); i++) {
        const op_case *c = op_case_at(i);
        char text[256];
        op_case_text(c, text, sizeof text);
        op_result result = {0};
        assert_ok(op_bench_check(c, 1, &ctx, dtype, &result), err);
        if (!result.ok) {
            print_error("%s %s: %s %s %g, bound %g\n", ith_dtype_name(dtype), text, result.output,
                        result.text, result.error, result.bound);
            bad++;
        }
    }
    ith_pool_destroy(pool);
    assert_int_equal(bad, 0);
}

static void test_cpu_f32_agrees_with_double(void **state)
{
    (void)state;
    check_all(ITH_F32);
}

static void test_cpu_bf16_is_as_good_as_the_plain_reference(void **state)
{
    (void)state;
    check_all(ITH_BF16);
}

static void test_cpu_one_and_two_threads_give_the_same_bits(void **state)
{
    (void)state;
    static ith_error err;
    ith_pool *one = NULL, *two = NULL;
    assert_ok(ith_pool_create(&one, 1, &err), err);
    assert_ok(ith_pool_create(&two, 2, &err), err);
    ith_ctx a = ith_ctx_host(ith_backend_cpu(), one, &err);
    ith_ctx b = ith_ctx_host(ith_backend_cpu(), two, &err);
    int bad = 0;
    for (int64_t i = 0; i < 2 * op_case_count(); i++) {
        const op_case *c = op_case_at(i / 2);
        char text[256];
        op_case_text(c, text, sizeof text);
        op_result result = {0};
        ith_dtype dtype = i % 2 ? ITH_BF16 : ITH_F32;
        assert_ok(op_bench_same_bits(c, 2, &a, &b, dtype, &result), err);
        if (!result.ok) {
            print_error("%s %s: %s\n", ith_dtype_name(dtype), text, result.text);
            bad++;
        }
    }
    ith_pool_destroy(one);
    ith_pool_destroy(two);
    assert_int_equal(bad, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu_f32_agrees_with_double),
        cmocka_unit_test(test_cpu_bf16_is_as_good_as_the_plain_reference),
        cmocka_unit_test(test_cpu_one_and_two_threads_give_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
