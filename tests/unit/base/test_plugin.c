/* test_plugin.c - opening shared libraries at run time. */
#include "testing.h"

#include "base/plugin.h"

#include <math.h>

static ith_error err;

/* Goal: the error of a missing plug-in lists every place, on one line. */
static void test_plugin_missing_lists_places(void **state)
{
    (void)state;
    void *handle = NULL;
    assert_fails(ith_plugin_open(&handle, "libith_absent.so", NULL, &err), err, ITH_ERR_UNSUPPORTED,
                 "plug-in libith_absent.so is not here (looked for /");
    if (!strstr(err.text,
                "/../lib/ithaca/libith_absent.so, /usr/local/lib/ithaca/libith_absent.so)"))
        fail_msg("'%s' does not list the three places", err.text);
    assert_null(strchr(err.text, '\n'));
    assert_null(handle);
}

/* Goal: a file that is no library is refused with the loader's reason. */
static void test_plugin_wrong_file_gives_reason(void **state)
{
    (void)state;
    char path[4200];
    void *handle = NULL;
    snprintf(path, sizeof path, "%s/text.so", temp_dir("plugin"));
    assert_ok(ith_write_file(path, "hello", 5, &err), err);
    assert_fails(ith_plugin_open(&handle, "unused", path, &err), err, ITH_ERR_UNSUPPORTED,
                 "text.so");
    assert_null(handle);
}

/* Goal: functions of a library can be called; a name it lacks is an error and leaves the pointer.
 */
static void test_plugin_symbol_found_and_missing(void **state)
{
    (void)state;
    void *handle = NULL;
    double (*cosine)(double) = NULL;
    assert_ok(ith_plugin_open(&handle, "unused", "libm.so.6", &err), err);
    assert_ok(ith_plugin_symbol(handle, "cos", &cosine, &err), err);
    double got = cosine(0);
    if (got < 1 || got > 1)
        fail_msg("cos(0) = %g, expected 1", got);
    double (*before)(double) = cosine;
    assert_fails(ith_plugin_symbol(handle, "ith_no_such", &cosine, &err), err, ITH_ERR_UNSUPPORTED,
                 "the plug-in has no function ith_no_such");
    assert_true(cosine == before);
    ith_plugin_close(handle);
    ith_plugin_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plugin_missing_lists_places),
        cmocka_unit_test(test_plugin_wrong_file_gives_reason),
        cmocka_unit_test(test_plugin_symbol_found_and_missing),
    };
    return cmocka_run_group_tests_name("plugin", tests, NULL, NULL);
}
