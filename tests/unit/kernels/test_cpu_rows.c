/* test_cpu_rows.c - the vector exponential, and threads on the operators bound by memory. */
#include "cpu_testing.h"

/* Goal: relative error below 1e-7 over the whole range, right ends, NaN stays. Method: a walk over
 * the floats with a step that is no round number. */
static void test_exp_all_levels_accurate(void **state)
{
    (void)state;
    for (int l = 0; l < NUM_CPU_LEVELS; l++) {
        if (!cpu_level_set(cpu_levels[l]))
            continue;
        const ith_cpu_level *level = ith_cpu_level_get();
        double worst = 0;
        float worst_at = 0;
        for (float x = -87.3f; x < 88.7f; x += 0.000371f) {
            double want = exp((double)x), error = fabs((double)level->exp_at(x) - want) / want;
            if (error > worst) {
                worst = error;
                worst_at = x;
            }
        }
        if (!(worst < 1e-7))
            fail_msg("%s: exp(%.9g) is off by %.3g, at most 1e-7 allowed", level->name,
                     (double)worst_at, worst);
        assert_true(level->exp_at(0.0f) == 1.0f);
        assert_true(level->exp_at(-INFINITY) == 0.0f);
        assert_true(level->exp_at(-1000.0f) == 0.0f);
        assert_true(isinf(level->exp_at(89.0f)));
        assert_true(isinf(level->exp_at(INFINITY)));
        assert_true(isnan(level->exp_at(NAN)));
        assert_true(isnan(level->exp_at(-NAN)));
    }
    ith_cpu_level_set(NULL);
}

/* Outputs of one run of every operator whose sums cross rows or that splits rows. */
typedef struct {
    ith_tensor dx, dw, dq, dk, dq_w, dk_w, loss, logits, emb, sum, w, m, v;
} outputs;

static outputs run_all(ith_pool *pool)
{
    enum { T = 333, D = 72, HEADS = 3, DIM = 24, WORDS = 1001 };
    ith_error err = {0};
    ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), pool, &err);
    ith_tensor x = cpu_random(ITH_BF16, 2, T, D, 1, 3, 1),
               w = cpu_random(ITH_BF16, 1, D, 1, 1, 0, 2);
    ith_tensor dy = cpu_random(ITH_BF16, 2, T, D, 1, 0, 3), none = ith_tensor_none();
    ith_tensor y = cpu_tensor(ITH_BF16, 2, T, D, 1, 0), rstd = cpu_tensor(ITH_F32, 1, T, 1, 1, 0);
    ith_tensor q = cpu_random(ITH_BF16, 3, T, HEADS, DIM, 0, 4);
    ith_tensor k = cpu_random(ITH_BF16, 3, T, 1, DIM, 0, 5);
    ith_tensor qw = cpu_random(ITH_BF16, 1, DIM, 1, 1, 0, 6);
    ith_tensor cs = cpu_random(ITH_BF16, 2, T, DIM / 2, 1, 0, 7);
    ith_tensor qr = cpu_random(ITH_F32, 2, T, HEADS, 1, 0, 8);
    ith_tensor kr = cpu_random(ITH_F32, 2, T, 1, 1, 0, 9);
    ith_tensor ids = cpu_tensor(ITH_I32, 1, T, 1, 1, 0);
    ith_tensor seeds = cpu_random(ITH_F32, 1, T, 1, 1, 0, 10);
    ith_tensor grad = cpu_random(ITH_F32, 1, 200003, 1, 1, 0, 11);
    for (int i = 0; i < T; i++)
        ((int32_t *)ids.data)[i] = i * 7 % 40;
    outputs o = {.dx = cpu_tensor(ITH_BF16, 2, T, D, 1, 0),
                 .dw = cpu_random(ITH_F32, 1, D, 1, 1, 0, 20),
                 .dq = cpu_tensor(ITH_BF16, 3, T, HEADS, DIM, 0),
                 .dk = cpu_tensor(ITH_BF16, 3, T, 1, DIM, 0),
                 .dq_w = cpu_random(ITH_F32, 1, DIM, 1, 1, 0, 21),
                 .dk_w = cpu_random(ITH_F32, 1, DIM, 1, 1, 0, 22),
                 .loss = cpu_tensor(ITH_F32, 1, T, 1, 1, 0),
                 .logits = cpu_random(ITH_BF16, 2, T, WORDS, 1, 0, 23),
                 .emb = cpu_random(ITH_F32, 2, 40, D, 1, 0, 24),
                 .sum = cpu_random(ITH_F64, 1, 1, 1, 1, 0, 25),
                 .w = cpu_random(ITH_BF16, 1, 200003, 1, 1, 0, 26),
                 .m = cpu_random(ITH_BF16, 1, 200003, 1, 1, 0, 27),
                 .v = cpu_tensor(ITH_BF16, 1, 200003, 1, 1, 0)};
    memset(o.v.data, 0, (size_t)ith_tensor_bytes(o.v));
    float one = 1.0f;
    ith_adamw_hyper hyper = {1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f, 3};
    assert_ok(ith_rmsnorm_forward(&ctx, y, none, rstd, x, none, w, 1e-6f, 0.0f), err);
    assert_ok(ith_rmsnorm_backward(&ctx, o.dx, o.dw, dy, none, x, rstd, w, 0.0f), err);
    assert_ok(ith_qk_norm_rope_backward(&ctx, o.dq, o.dk, o.dq_w, o.dk_w, q, k, q, k, qr, kr, qw,
                                        qw, cs, cs, ids, 0.0f),
              err);
    assert_ok(ith_cross_entropy(&ctx, o.loss, o.logits, ids, seeds, true), err);
    assert_ok(ith_embedding_backward(&ctx, o.emb, dy, ids), err);
    assert_ok(ith_sumsq_accumulate(&ctx, o.sum, grad), err);
    assert_ok(ith_adamw(&ctx, o.w, none, o.m, o.v, grad, ith_tensor_1d(&one, ITH_F32, 1), hyper, 5,
                        0, true),
              err);
    void *all[] = {x.data,  w.data,  dy.data, y.data,  rstd.data, q.data,     k.data,
                   qw.data, cs.data, qr.data, kr.data, ids.data,  seeds.data, grad.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]);
    return o;
}

static void drop(outputs *o)
{
    ith_tensor *t = &o->dx;
    for (size_t i = 0; i < sizeof *o / sizeof *t; i++)
        ith_free(t[i].data);
}

/* Goal: 1, 2 and 3 threads leave the same bits in every output. */
static void test_rows_threads_same_bits(void **state)
{
    (void)state;
    ith_error err = {0};
    for (int l = 0; l < NUM_CPU_LEVELS; l++) {
        if (!cpu_level_set(cpu_levels[l]))
            continue;
        outputs one = run_all(NULL);
        for (int threads = 2; threads <= 3; threads++) {
            ith_pool *pool = NULL;
            assert_ok(ith_pool_create(&pool, threads, &err), err);
            outputs more = run_all(pool);
            const ith_tensor *a = &one.dx, *b = &more.dx;
            for (size_t i = 0; i < sizeof one / sizeof *a; i++)
                assert_same_bits(a[i], b[i], "threads");
            drop(&more);
            ith_pool_destroy(pool);
        }
        drop(&one);
    }
    ith_cpu_level_set(NULL);
}

/* Goal: names of levels. The best one of this machine is one it has; a wrong name changes
 * nothing. */
static void test_level_names(void **state)
{
    (void)state;
    assert_true(ith_cpu_level_set(NULL)); /* ITH_CPU may have chosen another */
    const char *best = ith_cpu_level_get()->name;
    assert_false(ith_cpu_level_set("avx1024"));
    assert_string_equal(ith_cpu_level_get()->name, best);
    assert_true(ith_cpu_level_set("generic"));
    assert_string_equal(ith_cpu_level_get()->name, "generic");
    assert_true(ith_cpu_level_set(NULL));
    assert_string_equal(ith_cpu_level_get()->name, best);
    assert_int_equal(strncmp(ith_backend_cpu_name(), best, strlen(best)), 0); /* AMX refused */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exp_all_levels_accurate),
        cmocka_unit_test(test_rows_threads_same_bits),
        cmocka_unit_test(test_level_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
