/* Goal: the reference in F32 and BF16 holds the bounds that it sets for others, and its memory
 * behaviour is that of ops.h. Method: every case of the bench on the reference itself. */
#include "testing.h"

#include "op_cases.h"

static void check_all(ith_dtype dtype)
{
    static ith_error err;
    ith_ctx ctx = ith_ctx_host(ith_backend_ref(), NULL, &err);
    int bad = 0;
    for (int64_t i = 0; i < op_case_count(); i++) {
        char text[256];
        op_case_text(op_case_at(i), text, sizeof text);
        op_result result = {0};
        assert_ok(op_bench_check(op_case_at(i), 1, &ctx, dtype, &result), err);
        if (!result.ok) {
            print_error("%s %s: %s %s %g, bound %g\n", ith_dtype_name(dtype), text, result.output,
                        result.text, result.error, result.bound);
            bad++;
        }
    }
    assert_int_equal(bad, 0);
}

static void test_ref_f32_agrees_with_double(void **state)
{
    (void)state;
    check_all(ITH_F32);
}

static void test_ref_bf16_keeps_memory_rules(void **state)
{
    (void)state;
    check_all(ITH_BF16);
}

/* ---- the bench itself: each kind of fault is seen ---- */

static ith_status (*honest)(ith_ctx *ctx, ith_tensor y, ith_tensor a, ith_tensor b);
enum { WRONG_VALUE, WRITES_OUTSIDE, WRITES_INPUT, LEAVES_OUT, CHANGES };
static int fault;
static int calls;

static ith_status faulty_add(ith_ctx *ctx, ith_tensor y, ith_tensor a, ith_tensor b)
{
    float kept = ith_numel(y) > 1 ? ((float *)y.data)[1] : 0;
    ITH_TRY(honest(ctx, y, a, b));
    if (ith_numel(y) < 2)
        return ITH_OK;
    float *values = y.data;
    if (fault == WRONG_VALUE)
        values[1] *= 1.0001F;
    else if (fault == WRITES_OUTSIDE)
        values[y.shape[1]] = 0;
    else if (fault == WRITES_INPUT)
        ((float *)b.data)[0] += 1;
    else if (fault == LEAVES_OUT)
        memcpy(&values[1], &kept, sizeof kept);
    else
        values[1] += (float)(calls++ % 2);
    return ITH_OK;
}

static void test_bench_sees_every_fault(void **state)
{
    (void)state;
    static const char *const wanted[] = {"", "written outside the view", "input changed",
                                         "not written", "two runs differ"};
    static ith_error err;
    static ith_backend broken;
    broken = *ith_backend_ref();
    honest = broken.add.run;
    broken.add.run = faulty_add;
    ith_ctx ctx = ith_ctx_host(&broken, NULL, &err);
    for (int64_t i = 0; i < op_case_count(); i++) {
        const op_case *c = op_case_at(i);
        /* rows with a gap, y apart from its inputs */
        if (strcmp(c->family->name, "add") != 0 || c->params[2] != 3 || c->params[3] != 0)
            continue;
        for (int f = WRONG_VALUE; f <= CHANGES; f++) {
            fault = f;
            op_result result = {0};
            assert_ok(op_bench_check(c, 1, &ctx, ITH_F32, &result), err);
            assert_false(result.ok);
            if (!strstr(result.text, wanted[f]))
                fail_msg("fault %d: '%s', expected '%s'", f, result.text, wanted[f]);
        }
        return;
    }
    fail_msg("the bench has no case of add with a gap between rows");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ref_f32_agrees_with_double),
        cmocka_unit_test(test_ref_bf16_keeps_memory_rules),
        cmocka_unit_test(test_bench_sees_every_fault),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
