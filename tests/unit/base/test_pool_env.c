/* Goal: ITH_THREADS sets the default number of threads and nothing else. Method: pools with and
 * without the variable. */
#include "testing.h"

#include "base/pool.h"

static int threads_of(int wanted)
{
    ith_pool *pool = NULL;
    ith_error err = {0};
    assert_ok(ith_pool_create(&pool, wanted, &err), err);
    int got = ith_pool_threads(pool);
    ith_pool_destroy(pool);
    return got;
}

static void test_variable_is_the_default(void **state)
{
    (void)state;
    setenv("ITH_THREADS", "3", 1);
    assert_int_equal(threads_of(0), 3);
    assert_int_equal(threads_of(2), 2);
    setenv("ITH_THREADS", "", 1);
    assert_true(threads_of(0) >= 1);
    unsetenv("ITH_THREADS");
}

static void test_wrong_values_are_named(void **state)
{
    (void)state;
    static const char *const wrong[] = {"0", "-1", "two", "3x", "5000"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ith_pool *pool = NULL;
        ith_error err = {0};
        char expected[80];
        setenv("ITH_THREADS", wrong[i], 1);
        snprintf(expected, sizeof expected,
                 "ITH_THREADS: found '%s' (use an integer from 1 to 4096)", wrong[i]);
        assert_fails(ith_pool_create(&pool, 0, &err), err, ITH_ERR_USAGE, expected);
        assert_null(pool);
    }
    unsetenv("ITH_THREADS");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_variable_is_the_default),
        cmocka_unit_test(test_wrong_values_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
