/* test_cpu_gemm.c - matrix products of every CPU level against sums in double. */
#include "cpu_testing.h"

typedef struct {
    int64_t t, n, k, pad;
} gemm_case;

/* Tile edges, one row (dot products), odd sums, more than one stretch and more than one block. */
static const gemm_case cases[] = {
    {1, 1, 1, 0},    {1, 37, 65, 3},  {3, 100, 129, 0},  {5, 33, 7, 1},     {14, 32, 16, 0},
    {29, 70, 33, 5}, {64, 64, 64, 0}, {40, 45, 1100, 3}, {17, 300, 530, 0}, {530, 48, 20, 2},
};

static void product(ith_tensor y, ith_tensor a, bool a_t, ith_tensor b, bool b_t, bool add)
{
    int64_t k = a.shape[a_t ? 0 : 1];
    for (int64_t i = 0; i < y.shape[0]; i++)
        for (int64_t j = 0; j < y.shape[1]; j++) {
            double sum = add ? cpu_get(y, i * y.shape[1] + j) : 0;
            for (int64_t l = 0; l < k; l++)
                sum += cpu_get(a, a_t ? l * a.shape[1] + i : i * k + l) *
                       cpu_get(b, b_t ? j * k + l : l * b.shape[1] + j);
            cpu_put(y, i * y.shape[1] + j, sum);
        }
}

static void check(const gemm_case *c, ith_dtype act, ith_pool *pool)
{
    ith_error err = {0};
    ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), pool, &err);
    ith_tensor x = cpu_random(act, 2, c->t, c->k, 1, c->pad, 1);
    ith_tensor w = cpu_random(act, 2, c->n, c->k, 1, c->pad, 2);
    ith_tensor dy = cpu_random(act, 2, c->t, c->n, 1, c->pad, 3);
    for (int add = 0; add < 2; add++)
        for (int f32 = 0; f32 < 2; f32++) {
            ith_dtype out = f32 ? ITH_F32 : act;
            ith_tensor y = cpu_random(out, 2, c->t, c->n, 1, c->pad, 4);
            ith_tensor want = cpu_copy(y, ITH_F64);
            product(want, x, false, w, true, add);
            assert_ok(ith_linear_forward(&ctx, y, x, w, add), err);
            assert_near(y, want, cpu_bound(out), "forward");
            ith_free(y.data);
            ith_free(want.data);
        }
    for (int add = 0; add < 2; add++) {
        ith_tensor dx = cpu_random(act, 2, c->t, c->k, 1, c->pad, 5);
        ith_tensor want = cpu_copy(dx, ITH_F64);
        product(want, dy, false, w, false, add);
        assert_ok(ith_linear_backward_input(&ctx, dx, dy, w, add), err);
        assert_near(dx, want, cpu_bound(act), "backward_input");
        ith_free(dx.data);
        ith_free(want.data);
    }
    ith_tensor dw = cpu_random(ITH_F32, 2, c->n, c->k, 1, c->pad, 6);
    ith_tensor want = cpu_copy(dw, ITH_F64);
    product(want, dy, true, x, false, true);
    assert_ok(ith_linear_backward_weight(&ctx, dw, dy, x), err);
    assert_near(dw, want, 1e-11, "backward_weight");
    ith_free(dw.data);
    ith_free(want.data);
    ith_free(x.data);
    ith_free(w.data);
    ith_free(dy.data);
}

/* Goal: each level computes the three products for all shapes, types, strides and flags. */
static void test_gemm_all_levels_match_double(void **state)
{
    (void)state;
    for (int l = 0; l < NUM_CPU_LEVELS; l++) {
        if (!cpu_level_set(cpu_levels[l])) {
            print_message("this machine has no %s\n", cpu_levels[l]);
            continue;
        }
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            check(&cases[i], ITH_F32, NULL);
            check(&cases[i], ITH_BF16, NULL);
        }
    }
    ith_cpu_level_set(NULL);
}

/* Goal: 1, 2 and 3 threads give the same bits, though blocks differ. */
static void test_gemm_threads_same_bits(void **state)
{
    (void)state;
    ith_error err = {0};
    for (int l = 0; l < NUM_CPU_LEVELS; l++) {
        if (!cpu_level_set(cpu_levels[l]))
            continue;
        ith_tensor x = cpu_random(ITH_BF16, 2, 150, 1300, 1, 0, 1);
        ith_tensor w = cpu_random(ITH_BF16, 2, 260, 1300, 1, 0, 2);
        ith_tensor one = cpu_tensor(ITH_BF16, 2, 150, 260, 1, 0), dw_one = {0};
        for (int threads = 1; threads <= 3; threads++) {
            ith_pool *pool = NULL;
            assert_ok(ith_pool_create(&pool, threads, &err), err);
            ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), pool, &err);
            ith_tensor y = cpu_tensor(ITH_BF16, 2, 150, 260, 1, 0);
            ith_tensor dw = cpu_random(ITH_F32, 2, 260, 1300, 1, 0, 7);
            assert_ok(ith_linear_forward(&ctx, y, x, w, false), err);
            assert_ok(ith_linear_backward_weight(&ctx, dw, y, x), err);
            if (threads == 1) {
                memcpy(one.data, y.data, (size_t)ith_tensor_bytes(y));
                dw_one = dw;
            } else {
                assert_same_bits(y, one, "forward");
                assert_same_bits(dw, dw_one, "backward_weight");
                ith_free(dw.data);
            }
            ith_free(y.data);
            ith_pool_destroy(pool);
        }
        ith_free(x.data);
        ith_free(w.data);
        ith_free(one.data);
        ith_free(dw_one.data);
    }
    ith_cpu_level_set(NULL);
}

/* Goal: grouped products equal a plain product per expert; empty, tiny and large experts. */
static void test_gemm_grouped_matches_double(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), NULL, &err);
    int32_t offsets_data[] = {0, 0, 3, 4, 60, 60, 75};
    ith_tensor offsets = ith_tensor_1d(offsets_data, ITH_I32, 7);
    const int64_t rows = 75, n = 50, k = 37, experts = 6;
    static const ith_dtype acts[] = {ITH_F32, ITH_BF16};
    for (int l = 0; l < NUM_CPU_LEVELS; l++)
        for (int i = 0; i < 2 && cpu_level_set(cpu_levels[l]); i++) {
            ith_tensor x = cpu_random(acts[i], 2, rows, k, 1, 1, 1);
            ith_tensor w = cpu_random(acts[i], 3, experts, n, k, 0, 2);
            ith_tensor dy = cpu_random(acts[i], 2, rows, n, 1, 0, 3);
            ith_tensor y = cpu_tensor(acts[i], 2, rows, n, 1, 3), y_want = cpu_copy(y, ITH_F64);
            ith_tensor dx = cpu_tensor(acts[i], 2, rows, k, 1, 0), dx_want = cpu_copy(dx, ITH_F64);
            ith_tensor dw = cpu_random(ITH_F32, 3, experts, n, k, 0, 4);
            ith_tensor dw_want = cpu_copy(dw, ITH_F64);
            for (int64_t e = 0; e < experts; e++) {
                int64_t r0 = offsets_data[e], r1 = offsets_data[e + 1];
                ith_tensor we = ith_tensor_2d((char *)w.data + e * n * k * ith_dtype_bytes(w.dtype),
                                              w.dtype, n, k);
                ith_tensor dwe = ith_tensor_2d((double *)dw_want.data + e * n * k, ITH_F64, n, k);
                product(ith_row_range(y_want, r0, r1), ith_row_range(x, r0, r1), false, we, true,
                        false);
                product(ith_row_range(dx_want, r0, r1), ith_row_range(dy, r0, r1), false, we, false,
                        false);
                product(dwe, ith_row_range(dy, r0, r1), true, ith_row_range(x, r0, r1), false,
                        true);
            }
            assert_ok(ith_grouped_linear_forward(&ctx, y, x, w, offsets), err);
            assert_ok(ith_grouped_linear_backward_input(&ctx, dx, dy, w, offsets), err);
            assert_ok(ith_grouped_linear_backward_weight(&ctx, dw, dy, x, offsets), err);
            assert_near(y, y_want, cpu_bound(acts[i]), "grouped forward");
            assert_near(dx, dx_want, cpu_bound(acts[i]), "grouped backward_input");
            assert_near(dw, dw_want, 1e-11, "grouped backward_weight");
            void *all[] = {x.data,  w.data,       dy.data, y.data,      y_want.data,
                           dx.data, dx_want.data, dw.data, dw_want.data};
            for (size_t j = 0; j < sizeof all / sizeof *all; j++)
                ith_free(all[j]);
        }
    ith_cpu_level_set(NULL);
}

/* Goal: scratch planned for the most rows is enough for fewer. Method: the bytes of every product
 * for growing numbers of rows, of columns and of threads; none is below one before it. */
static void test_gemm_scratch_grows_with_rows(void **state)
{
    (void)state;
    ith_error err = {0};
    const ith_backend *b = ith_backend_cpu();
    for (int threads = 1; threads <= 8; threads *= 2) {
        ith_pool *pool = NULL;
        assert_ok(ith_pool_create(&pool, threads, &err), err);
        ith_ctx ctx = ith_ctx_host(b, pool, &err);
        for (int64_t n = 48; n <= 3000; n = n * 5 / 2) {
            int64_t before[3] = {0, 0, 0};
            for (int64_t t = 1; t < 2500; t += 1 + t / 60) {
                ith_tensor x = ith_tensor_2d(NULL, ITH_BF16, t, 64),
                           w = ith_tensor_2d(NULL, ITH_BF16, n, 64),
                           y = ith_tensor_2d(NULL, ITH_BF16, t, n),
                           dw = ith_tensor_2d(NULL, ITH_F32, n, 64);
                int64_t now[3] = {b->linear_forward.workspace(&ctx, y, x, w, false),
                                  b->linear_backward_input.workspace(&ctx, x, y, w, false),
                                  b->linear_backward_weight.workspace(&ctx, dw, y, x)};
                for (int i = 0; i < 3; i++) {
                    if (now[i] < before[i])
                        fail_msg("product %d, %ld rows, %ld columns, %d threads: %ld bytes, fewer "
                                 "rows needed %ld",
                                 i, (long)t, (long)n, threads, (long)now[i], (long)before[i]);
                    before[i] = now[i];
                }
            }
        }
        ith_pool_destroy(pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemm_all_levels_match_double),
        cmocka_unit_test(test_gemm_threads_same_bits),
        cmocka_unit_test(test_gemm_grouped_matches_double),
        cmocka_unit_test(test_gemm_scratch_grows_with_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
