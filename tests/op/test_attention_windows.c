/* Goal: windows of an attention put together are the attention, whatever its mask: outputs and
 * statistics merged, gradients added. Method: packed documents under every kind of mask, cut at
 * every third of their rows and elsewhere, on the reference in double and on the CPU in f32. */
#include "testing.h"

#include <math.h>

#include "base/rng.h"
#include "kernels/backend.h"

enum { ROWS = 47, HQ = 4, HKV = 2, DIM = 5, MAX_CUTS = 5 };

/* Lengths 12, 1, 0, 34; of those the first 4, 0, 0, 16 rows may be noisy: blocks of 4. */
static const int32_t cu[] = {0, 12, 13, 13, 47}, noisy[] = {4, 0, 0, 16};
static int32_t position[ROWS];
static ith_error err;

static void fill_positions(void)
{
    for (int d = 0; d < 4; d++)
        for (int32_t i = cu[d]; i < cu[d + 1]; i++) {
            int32_t row = i - cu[d];
            position[i] = row < noisy[d] ? row : row - noisy[d];
        }
}

static ith_tensor heads(ith_dtype dtype, int64_t count, uint64_t seed)
{
    int64_t n = ROWS * count * DIM;
    void *data = ith_calloc(n, 8);
    for (int64_t i = 0; i < n && seed; i++) {
        float x = (float)ith_rng_normal(seed, 1, (uint64_t)i);
        if (dtype == ITH_F64)
            ((double *)data)[i] = (double)x;
        else
            ((float *)data)[i] = x;
    }
    return ith_tensor_3d(data, dtype, ROWS, count, DIM);
}

static double value(ith_tensor t, int64_t i)
{
    return t.dtype == ITH_F64 ? ((const double *)t.data)[i] : (double)((const float *)t.data)[i];
}

static void agree(ith_tensor a, ith_tensor b, const char *what)
{
    double bound = a.dtype == ITH_F64 ? 1e-12 : 2e-5;
    for (int64_t i = 0; i < ith_numel(a); i++)
        if (!(fabs(value(a, i) - value(b, i)) <= bound * (1 + fabs(value(b, i)))))
            fail_msg("%s of %s: element %lld is %.9g, whole %.9g", what, ith_dtype_name(a.dtype),
                     (long long)i, value(a, i), value(b, i));
}

static ith_tensor flat(ith_tensor t)
{
    return ith_tensor_2d(t.data, t.dtype, t.shape[0], t.shape[1] * DIM);
}

typedef struct {
    ith_tensor q, k, v, do_, o, lse, dq, dk, dv;
} attention;

static attention make(ith_dtype dtype)
{
    attention a = {.q = heads(dtype, HQ, 1),
                   .k = heads(dtype, HKV, 2),
                   .v = heads(dtype, HKV, 3),
                   .do_ = heads(dtype, HQ, 4),
                   .o = heads(dtype, HQ, 0),
                   .dq = heads(dtype, HQ, 0),
                   .dk = heads(dtype, HKV, 0),
                   .dv = heads(dtype, HKV, 0)};
    a.lse = ith_tensor_2d(ith_calloc(ROWS * HQ, 8), dtype, ROWS, HQ);
    return a;
}

static void release(attention *a)
{
    ith_tensor *all[] = {&a->q, &a->k, &a->v, &a->do_, &a->o, &a->lse, &a->dq, &a->dk, &a->dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]->data);
}

/* A stretch of queries against each stretch of keys, its own first. */
static void run_windows(ith_ctx *ctx, attention *a, const attention *whole, ith_seqs seqs,
                        bool causal, const int64_t *cuts, int64_t num)
{
    ith_dtype dtype = a->q.dtype;
    attention part = make(dtype);
    seqs.window = true;
    for (int64_t i = 0; i < num; i++)
        for (int64_t s = 0; s < num; s++) {
            int64_t j = (i + s) % num, q0 = cuts[i], q1 = cuts[i + 1], k0 = cuts[j],
                    k1 = cuts[j + 1];
            ith_tensor q = ith_row_range(a->q, q0, q1), k = ith_row_range(a->k, k0, k1);
            ith_tensor v = ith_row_range(a->v, k0, k1), o = ith_row_range(a->o, q0, q1);
            ith_tensor lse = ith_row_range(a->lse, q0, q1);
            ith_tensor part_o = s ? ith_row_range(part.o, q0, q1) : o,
                       part_lse = s ? ith_row_range(part.lse, q0, q1) : lse;
            seqs.q_first = q0;
            seqs.k_first = k0;
            assert_ok(ith_attention_forward(ctx, part_o, part_lse, q, k, v, seqs, 0.3F, causal),
                      err);
            if (s)
                assert_ok(ith_attention_merge(ctx, o, lse, part_o, part_lse), err);
            ith_tensor dq = ith_row_range(part.dq, q0, q1), dk = ith_row_range(part.dk, k0, k1),
                       dv = ith_row_range(part.dv, k0, k1);
            assert_ok(ith_attention_backward(ctx, dq, dk, dv, ith_row_range(a->do_, q0, q1), q, k,
                                             v, ith_row_range(whole->o, q0, q1),
                                             ith_row_range(whole->lse, q0, q1), seqs, 0.3F, causal),
                      err);
            ith_tensor sums[] = {ith_row_range(a->dq, q0, q1), ith_row_range(a->dk, k0, k1),
                                 ith_row_range(a->dv, k0, k1)};
            const ith_tensor parts[] = {dq, dk, dv};
            for (int n = 0; n < 3; n++)
                assert_ok(ith_add(ctx, flat(sums[n]), flat(sums[n]), flat(parts[n])), err);
        }
    release(&part);
}

static void check(ith_ctx *ctx, ith_dtype dtype, ith_seqs seqs, bool causal)
{
    static const int64_t cuts[][MAX_CUTS + 1] = {
        {0, 24, 47}, {0, 12, 13, 30, 47}, {0, 1, 2, 16, 46, 47}, {0, 47}};
    static const int64_t nums[] = {2, 4, 5, 1};
    attention whole = make(dtype);
    assert_ok(ith_attention_forward(ctx, whole.o, whole.lse, whole.q, whole.k, whole.v, seqs, 0.3F,
                                    causal),
              err);
    assert_ok(ith_attention_backward(ctx, whole.dq, whole.dk, whole.dv, whole.do_, whole.q, whole.k,
                                     whole.v, whole.o, whole.lse, seqs, 0.3F, causal),
              err);
    for (int c = 0; c < 4; c++) {
        attention a = make(dtype);
        run_windows(ctx, &a, &whole, seqs, causal, cuts[c], nums[c]);
        agree(a.o, whole.o, "o");
        agree(a.lse, whole.lse, "lse");
        agree(a.dq, whole.dq, "dq");
        agree(a.dk, whole.dk, "dk");
        agree(a.dv, whole.dv, "dv");
        release(&a);
    }
    release(&whole);
}

static void check_all_masks(const ith_backend *backend, ith_dtype dtype)
{
    ith_ctx ctx = ith_ctx_host(backend, NULL, &err);
    const ith_tensor borders = {(void *)(uintptr_t)cu, ITH_I32, 1, {5, 1, 1, 1}, {1, 1, 1, 1}};
    ith_seqs seqs = {.cu_seqlens = borders, .cu_host = cu, .num_docs = 4, .max_len = 34};
    fill_positions();
    check(&ctx, dtype, seqs, false);
    check(&ctx, dtype, seqs, true);
    seqs.block = 4;
    check(&ctx, dtype, seqs, true);
    seqs.noisy_host = noisy;
    seqs.position_host = position;
    seqs.noisy = (ith_tensor){(void *)(uintptr_t)noisy, ITH_I32, 1, {4, 1, 1, 1}, {1, 1, 1, 1}};
    seqs.position = (ith_tensor){position, ITH_I32, 1, {ROWS, 1, 1, 1}, {1, 1, 1, 1}};
    check(&ctx, dtype, seqs, true);
}

static void test_windows_of_the_reference_are_the_attention(void **state)
{
    (void)state;
    check_all_masks(ith_backend_ref(), ITH_F64);
}

static void test_windows_on_the_cpu_are_the_attention(void **state)
{
    (void)state;
    check_all_masks(ith_backend_cpu(), ITH_F32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_windows_of_the_reference_are_the_attention),
        cmocka_unit_test(test_windows_on_the_cpu_are_the_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
