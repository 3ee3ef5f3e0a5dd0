/* test_cpu_attention.c - flash attention of every CPU level against the reference in double. */
#include "cpu_testing.h"

typedef struct {
    ith_tensor q, k, v, o, lse, dq, dk, dv, do_;
} attention;

typedef struct {
    int64_t hq, hkv, dim;
    int num_docs;
    int32_t cu[6];
    bool causal;
} attention_case;

/* Odd sizes, one token, empty documents, more than one key block and query tile, groups. */
static const attention_case cases[] = {
    {1, 1, 1, 1, {0, 1}, true},
    {2, 1, 5, 3, {0, 3, 3, 10}, true},
    {4, 2, 16, 4, {0, 1, 130, 131, 200}, true},
    {6, 2, 32, 2, {0, 300, 333}, true},
    {2, 2, 64, 1, {0, 270}, true},
    {8, 1, 20, 2, {0, 65, 140}, false},
    {3, 3, 128, 1, {0, 257}, false},
};

static ith_seqs seqs_of(const int32_t *cu, int num_docs)
{
    union {
        const int32_t *in;
        void *out;
    } p = {cu};
    ith_seqs s = {.cu_seqlens = ith_tensor_1d(p.out, ITH_I32, num_docs + 1),
                  .cu_host = cu,
                  .num_docs = num_docs};
    for (int i = 0; i < num_docs; i++)
        s.max_len = ith_max_i64(s.max_len, cu[i + 1] - cu[i]);
    return s;
}

static attention make(const attention_case *c, ith_dtype act, int64_t pad)
{
    int64_t t = c->cu[c->num_docs];
    attention a = {
        .q = cpu_random(act, 3, t, c->hq, c->dim, pad, 1),
        .k = cpu_random(act, 3, t, c->hkv, c->dim, pad, 2),
        .v = cpu_random(act, 3, t, c->hkv, c->dim, pad, 3),
        .do_ = cpu_random(act, 3, t, c->hq, c->dim, pad, 4),
        .o = cpu_tensor(act, 3, t, c->hq, c->dim, pad),
        .dq = cpu_tensor(act, 3, t, c->hq, c->dim, pad),
        .dk = cpu_tensor(act, 3, t, c->hkv, c->dim, pad),
        .dv = cpu_tensor(act, 3, t, c->hkv, c->dim, pad),
        .lse = cpu_tensor(act == ITH_F64 ? ITH_F64 : ITH_F32, 2, t, c->hq, 1, 0),
    };
    return a;
}

static attention in_double(const attention *a)
{
    attention d = {.q = cpu_copy(a->q, ITH_F64),
                   .k = cpu_copy(a->k, ITH_F64),
                   .v = cpu_copy(a->v, ITH_F64),
                   .do_ = cpu_copy(a->do_, ITH_F64),
                   .o = cpu_copy(a->o, ITH_F64),
                   .dq = cpu_copy(a->dq, ITH_F64),
                   .dk = cpu_copy(a->dk, ITH_F64),
                   .dv = cpu_copy(a->dv, ITH_F64),
                   .lse = cpu_copy(a->lse, ITH_F64)};
    return d;
}

static void drop(attention *a)
{
    ith_tensor *all[] = {&a->q, &a->k, &a->v, &a->o, &a->lse, &a->dq, &a->dk, &a->dv, &a->do_};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ith_free(all[i]->data);
}

static void run(attention *a, const ith_backend *backend, ith_pool *pool, ith_seqs seqs,
                float scale, bool causal)
{
    ith_error err = {0};
    ith_ctx ctx = ith_ctx_host(backend, pool, &err);
    assert_ok(ith_attention_forward(&ctx, a->o, a->lse, a->q, a->k, a->v, seqs, scale, causal),
              err);
    assert_ok(ith_attention_backward(&ctx, a->dq, a->dk, a->dv, a->do_, a->q, a->k, a->v, a->o,
                                     a->lse, seqs, scale, causal),
              err);
}

/* Goal: output, lse and gradients of each level are those of the reference in double. */
static void test_attention_all_levels_match_double(void **state)
{
    (void)state;
    static const ith_dtype acts[] = {ITH_F32, ITH_BF16};
    for (int l = 0; l < NUM_CPU_LEVELS; l++)
        for (int i = 0; i < 2 && cpu_level_set(cpu_levels[l]); i++)
            for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
                const attention_case *c = &cases[n];
                float scale = 1.0f / sqrtf((float)c->dim);
                attention a = make(c, acts[i], n % 2 ? 3 : 0), d = in_double(&a);
                run(&a, ith_backend_cpu(), NULL, seqs_of(c->cu, c->num_docs), scale, c->causal);
                run(&d, ith_backend_ref(), NULL, seqs_of(c->cu, c->num_docs), scale, c->causal);
                /* bf16: outputs, P and dS are rounded, 2^-9 each; one token leaves dq, dk zero. */
                double bound = acts[i] == ITH_BF16 ? 6e-5 : 1e-11;
                assert_near(a.o, d.o, bound, "o");
                assert_near(a.lse, d.lse, acts[i] == ITH_BF16 ? 1e-9 : 1e-12, "lse");
                assert_near(a.dv, d.dv, bound, "dv");
                if (c->cu[c->num_docs] > 1) {
                    assert_near(a.dq, d.dq, bound, "dq");
                    assert_near(a.dk, d.dk, bound, "dk");
                }
                drop(&a);
                drop(&d);
            }
    ith_cpu_level_set(NULL);
}

/* Goal: threads do not change a bit; a packed document equals the same document alone. */
static void test_attention_threads_and_packing_same_bits(void **state)
{
    (void)state;
    ith_error err = {0};
    const attention_case c = {4, 2, 48, 3, {0, 150, 151, 420}, true};
    for (int l = 0; l < NUM_CPU_LEVELS; l++) {
        if (!cpu_level_set(cpu_levels[l]))
            continue;
        ith_pool *pool = NULL;
        assert_ok(ith_pool_create(&pool, 2, &err), err);
        attention one = make(&c, ITH_BF16, 0), two = make(&c, ITH_BF16, 0);
        attention alone = make(&c, ITH_BF16, 0);
        run(&one, ith_backend_cpu(), NULL, seqs_of(c.cu, 3), 0.2f, true);
        run(&two, ith_backend_cpu(), pool, seqs_of(c.cu, 3), 0.2f, true);
        for (int doc = 0; doc < 3; doc++) {
            int64_t b = c.cu[doc], e = c.cu[doc + 1];
            attention part = {.q = ith_row_range(alone.q, b, e),
                              .k = ith_row_range(alone.k, b, e),
                              .v = ith_row_range(alone.v, b, e),
                              .o = ith_row_range(alone.o, b, e),
                              .dq = ith_row_range(alone.dq, b, e),
                              .dk = ith_row_range(alone.dk, b, e),
                              .dv = ith_row_range(alone.dv, b, e),
                              .do_ = ith_row_range(alone.do_, b, e),
                              .lse = ith_row_range(alone.lse, b, e)};
            int32_t cu[] = {0, (int32_t)(e - b)};
            run(&part, ith_backend_cpu(), NULL, seqs_of(cu, 1), 0.2f, true);
        }
        const ith_tensor sets[][3] = {{one.o, two.o, alone.o},
                                      {one.dq, two.dq, alone.dq},
                                      {one.dk, two.dk, alone.dk},
                                      {one.dv, two.dv, alone.dv}};
        for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
            assert_same_bits(sets[i][0], sets[i][1], "two threads");
            assert_same_bits(sets[i][0], sets[i][2], "documents alone");
        }
        drop(&one);
        drop(&two);
        drop(&alone);
        ith_pool_destroy(pool);
    }
    ith_cpu_level_set(NULL);
}

/* Goal: decoding equals the reference in double, with several new queries and unequal lengths. */
static void test_attention_decode_matches_double(void **state)
{
    (void)state;
    ith_error err = {0};
    static const ith_dtype acts[] = {ITH_F32, ITH_BF16};
    const int64_t batch = 3, queries = 2, rows = 200, hq = 6, hkv = 2, dim = 40;
    int32_t lengths_data[] = {2, 77, 200};
    ith_tensor lengths = ith_tensor_1d(lengths_data, ITH_I32, batch);
    for (int l = 0; l < NUM_CPU_LEVELS; l++)
        for (int i = 0; i < 2 && cpu_level_set(cpu_levels[l]); i++) {
            ith_tensor q = cpu_random(acts[i], 3, batch * queries, hq, dim, 0, 1);
            ith_tensor k = cpu_random(acts[i], 2, batch * rows, hkv * dim, 1, 0, 2);
            ith_tensor v = cpu_random(acts[i], 2, batch * rows, hkv * dim, 1, 0, 3);
            ith_tensor o = cpu_tensor(acts[i], 3, batch * queries, hq, dim, 4);
            ith_tensor qd = cpu_copy(q, ITH_F64), kd = cpu_copy(k, ITH_F64);
            ith_tensor vd = cpu_copy(v, ITH_F64), od = cpu_copy(o, ITH_F64);
            ith_ctx fast = ith_ctx_host(ith_backend_cpu(), NULL, &err);
            ith_ctx slow = ith_ctx_host(ith_backend_ref(), NULL, &err);
            assert_ok(ith_attention_decode(&fast, o, ith_tensor_none(), q,
                                           ith_tensor_4d(k.data, acts[i], 4, batch, rows, hkv, dim),
                                           ith_tensor_4d(v.data, acts[i], 4, batch, rows, hkv, dim),
                                           lengths, 0.3f),
                      err);
            assert_ok(ith_attention_decode(
                          &slow, od, ith_tensor_none(), qd,
                          ith_tensor_4d(kd.data, ITH_F64, 4, batch, rows, hkv, dim),
                          ith_tensor_4d(vd.data, ITH_F64, 4, batch, rows, hkv, dim), lengths, 0.3f),
                      err);
            assert_near(o, od, cpu_bound(acts[i]), "decode");
            void *all[] = {q.data, k.data, v.data, o.data, qd.data, kd.data, vd.data, od.data};
            for (size_t j = 0; j < sizeof all / sizeof *all; j++)
                ith_free(all[j]);
        }
    ith_cpu_level_set(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_all_levels_match_double),
        cmocka_unit_test(test_attention_threads_and_packing_same_bits),
        cmocka_unit_test(test_attention_decode_matches_double),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
