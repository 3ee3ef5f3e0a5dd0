/* test_model.c - parameters, their pieces, initial values, and the count of FLOP. */
#include "e2e/small_model.h"

#include <math.h>

static ith_model *open_model(const small_shape *shape)
{
    ith_error err = {0};
    ith_model *m = NULL;
    ith_hf_config *config = ith_calloc(1, sizeof *config); /* the model borrows it */
    ith_buf text = {0};
    assert_non_null(config);
    small_config_text(shape, &text);
    assert_ok(ith_hf_config_parse(config, text.data, text.len, "config.json", &err), err);
    assert_ok(ith_model_create(&m, config, ITH_F32, 1, &err), err);
    ith_buf_deinit(&text);
    return m;
}

static void close_model(ith_model *m)
{
    ith_hf_config *config = (ith_hf_config *)(uintptr_t)m->config;
    ith_model_destroy(m);
    ith_hf_config_deinit(config);
    ith_free(config);
}

static const small_shape *const shapes[] = {&small_dense, &small_tied, &small_moe, &small_moe_raw};

/* Every element of every parameter belongs to exactly one piece; names are unique; parameters
 * begin at multiples of 128 elements and do not overlap. */
static void test_model_pieces_cover_parameters(void **state)
{
    (void)state;
    for (int s = 0; s < 4; s++) {
        ith_model *m = open_model(shapes[s]);
        char *owner = ith_calloc(m->num_elements, 1);
        assert_non_null(owner);
        int64_t weights = 0;
        for (int64_t i = 0; i < m->num_pieces; i++) {
            const ith_hf_piece *p = &m->pieces[i];
            int64_t at = m->params[p->param].first + p->first;
            for (int64_t k = at; k < at + p->count; k++)
                if (owner[k]++)
                    fail_msg("%s: element %lld has two owners", p->hf_name, (long long)k);
            for (int64_t k = 0; k < i; k++)
                assert_string_not_equal(m->pieces[k].hf_name, p->hf_name);
            weights += p->count;
        }
        assert_int_equal(weights, m->num_weights);
        for (int64_t i = 0; i < m->num_params; i++) {
            const ith_param *p = &m->params[i];
            int64_t count = p->shape[0] * p->shape[1] * p->shape[2];
            assert_int_equal(p->first % 128, 0);
            for (int64_t k = p->first; k < p->first + count; k++)
                if (!owner[k])
                    fail_msg("%s: element %lld has no owner", p->name, (long long)k);
        }
        ith_free(owner);
        close_model(m);
    }
}

/* Names, as transformers writes them, and how many. */
static void test_model_names(void **state)
{
    (void)state;
    static const struct {
        int shape;
        const char *name;
        bool there;
    } want[] = {{0, "lm_head.weight", true},
                {1, "lm_head.weight", false},
                {0, "model.layers.2.self_attn.k_norm.weight", true},
                {0, "model.layers.0.mlp.gate_proj.weight", true},
                {2, "model.layers.0.mlp.gate_proj.weight", false},
                {2, "model.layers.1.mlp.gate.weight", true},
                {2, "model.layers.1.mlp.experts.7.down_proj.weight", true},
                {2, "model.layers.1.mlp.experts.8.down_proj.weight", false}};
    static const int64_t counts[] = {3 * 11 + 3, 2 * 11 + 2, 2 * (9 + 24) + 3, 2 * (9 + 24) + 2};
    for (int s = 0; s < 4; s++) {
        ith_model *m = open_model(shapes[s]);
        assert_int_equal(m->num_pieces, counts[s]);
        for (size_t k = 0; k < sizeof want / sizeof *want; k++) {
            bool found = false;
            for (int64_t i = 0; i < m->num_pieces; i++)
                found = found || strcmp(m->pieces[i].hf_name, want[k].name) == 0;
            if (want[k].shape == s && found != want[k].there)
                fail_msg("%s is %s", want[k].name, found ? "there" : "missing");
        }
        close_model(m);
    }
}

/* Initial values depend on (seed, name, element) alone: any cut gives the same; mean and spread are
 * those of initializer_range, norms are one. */
static void test_model_init_values(void **state)
{
    (void)state;
    ith_model *m = open_model(&small_moe);
    double sum = 0, squares = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < m->num_pieces; i++) {
        const ith_hf_piece *p = &m->pieces[i];
        float *whole = ith_malloc(p->count * 4), *part = ith_malloc(p->count * 4);
        assert_true(whole && part);
        ith_model_init_piece(m, p, 3, 0, p->count, whole);
        for (int64_t at = 0; at < p->count;) {
            int64_t k = 1 + at % 97;
            k = k > p->count - at ? p->count - at : k;
            ith_model_init_piece(m, p, 3, at, k, part + at);
            at += k;
        }
        assert_memory_equal(whole, part, (size_t)p->count * 4);
        for (int64_t k = 0; k < p->count; k++) {
            if (p->is_norm)
                assert_true(whole[k] == 1.0f);
            else {
                sum += (double)whole[k];
                squares += (double)whole[k] * (double)whole[k];
                n++;
            }
        }
        ith_model_init_piece(m, p, 4, 0, p->count, part);
        if (!p->is_norm)
            assert_memory_not_equal(whole, part, (size_t)p->count * 4);
        ith_free(whole);
        ith_free(part);
    }
    double mean = sum / (double)n, sd = sqrt(squares / (double)n - mean * mean);
    if (fabs(mean) > 0.15 * 5 / sqrt((double)n) || fabs(sd - 0.15) > 0.15 * 0.02)
        fail_msg("mean %g, spread %g of %lld values; expected 0 and 0.15", mean, sd, (long long)n);
    close_model(m);
}

/* 6 FLOP a weight and token in the products, 12 Dq a pair of causal attention and layer (half of
 * the square), 6 D V a labelled row. Worked out by hand. */
static void test_model_flops(void **state)
{
    (void)state;
    static const int32_t cu[] = {0, 10, 10, 16};
    ith_model *dense = open_model(&small_dense), *moe = open_model(&small_moe);
    /* dense: qkv 48 x 128, o 64 x 48, mlp 3 x 48 x 80 = 20736 a layer */
    ith_flops f = ith_model_flops(dense, cu, 3, 5);
    assert_true(f.linear == 6.0 * 20736 * 3 * 16);
    assert_true(f.attention == 12.0 * (100 + 36) / 2 * 64 * 3);
    assert_true(f.head == 6.0 * 48 * 211 * 5);
    assert_true(f.total == f.linear + f.attention + f.head);
    /* experts: 2 of 8 with 3 x 48 x 24 each, router 48 x 8 */
    f = ith_model_flops(moe, cu, 3, 0);
    assert_true(f.linear == 6.0 * (48 * 128 + 64 * 48 + 2 * 3 * 48 * 24 + 48 * 8) * 2 * 16);
    assert_true(f.head == 0);
    f = ith_model_flops(dense, cu, 0, 0);
    assert_true(f.total == 0);
    close_model(dense);
    close_model(moe);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_pieces_cover_parameters),
        cmocka_unit_test(test_model_names),
        cmocka_unit_test(test_model_init_values),
        cmocka_unit_test(test_model_flops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
