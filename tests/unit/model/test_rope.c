/* test_rope.c - rotary tables against the formulas: default, linear, YaRN.
 * The YaRN numbers were computed with a few lines of Python from the paper (dim 16, theta 10000,
 * factor 4, original context 4096, beta 32 and 1). */
#include "testing.h"

#include <math.h>

#include "model/model.h"

#define DIM 16
#define HALF (DIM / 2)

/* Row p of the table must be cos and sin of p * freq, times the attention factor. */
static void assert_table(const ith_rope_config *rope, const double *freq, double attention_factor)
{
    enum { ROWS = 4100 };
    static float c[ROWS * HALF], s[ROWS * HALF];
    static const int64_t rows[] = {0, 1, 2, 257, 4095, 4099};
    ith_rope_table(rope, DIM, 4096, ROWS, ITH_F32, c, s);
    for (int r = 0; r < 6; r++)
        for (int i = 0; i < HALF; i++) {
            /* the frequency is f32: at row p the angle is off by up to p * 2^-24 relative */
            double angle = (double)rows[r] * freq[i], bound = 1e-6 + angle * 1.2e-7;
            double got[2] = {(double)c[rows[r] * HALF + i], (double)s[rows[r] * HALF + i]};
            double want[2] = {cos(angle) * attention_factor, sin(angle) * attention_factor};
            for (int k = 0; k < 2; k++)
                if (!(fabs(got[k] - want[k]) <= bound))
                    fail_msg("row %lld, pair %d, %s: %.9g, expected %.9g", (long long)rows[r], i,
                             k ? "sin" : "cos", got[k], want[k]);
        }
}

static ith_rope_config base_rope(void)
{
    return (ith_rope_config){.type = ITH_ROPE_DEFAULT,
                             .theta = 10000,
                             .partial_rotary_factor = 1,
                             .factor = 1,
                             .beta_fast = 32,
                             .beta_slow = 1,
                             .truncate = true,
                             .attention_factor = 1};
}

static void test_rope_default(void **state)
{
    (void)state;
    ith_rope_config rope = base_rope();
    double freq[HALF];
    for (int i = 0; i < HALF; i++)
        freq[i] = pow(10000, -2.0 * i / DIM);
    assert_table(&rope, freq, 1);
    assert_int_equal(ith_rope_dim(&rope, DIM), DIM);
    rope.partial_rotary_factor = 0.25;
    assert_int_equal(ith_rope_dim(&rope, 256), 64);
}

static void test_rope_linear(void **state)
{
    (void)state;
    ith_rope_config rope = base_rope();
    rope.type = ITH_ROPE_LINEAR;
    rope.factor = 8;
    double freq[HALF];
    for (int i = 0; i < HALF; i++)
        freq[i] = pow(10000, -2.0 * i / DIM) / 8;
    assert_table(&rope, freq, 1);
}

static void test_rope_yarn(void **state)
{
    (void)state;
    static const double truncated[HALF] = {
        1.0,     0.31622776601683794,  0.1,     0.02569350598886808,
        0.00625, 0.001383496476323666, 0.00025, 7.905694150420948e-05};
    static const double exact[HALF] = {1.0,
                                       0.31622776601683794,
                                       0.1,
                                       0.02861360881198889,
                                       0.006556971521129435,
                                       0.0012856320307266882,
                                       0.00025,
                                       7.905694150420948e-05};
    ith_rope_config rope = base_rope();
    rope.type = ITH_ROPE_YARN;
    rope.factor = 4;
    rope.original_max_position_embeddings = 4096;
    rope.attention_factor = 1.138629436111989; /* 0.1 ln 4 + 1 */
    assert_table(&rope, truncated, 1.138629436111989);
    rope.truncate = false;
    assert_table(&rope, exact, 1.138629436111989);
    rope.truncate = true;
    rope.original_max_position_embeddings = 0; /* then max_position_embeddings, 4096 here */
    assert_table(&rope, truncated, 1.138629436111989);
}

/* The attention factor of a config that names none. */
static void test_rope_yarn_from_config(void **state)
{
    (void)state;
    static const char text[] =
        "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"qwen3\", \"vocab_size\": 64,"
        " \"hidden_size\": 32, \"num_hidden_layers\": 1, \"num_attention_heads\": 2,"
        " \"num_key_value_heads\": 1, \"head_dim\": 16, \"intermediate_size\": 32,"
        " \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, \"max_position_embeddings\": 16384,"
        " \"tie_word_embeddings\": true, \"hidden_act\": \"silu\","
        " \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0,"
        " \"original_max_position_embeddings\": 4096}}";
    ith_error err = {0};
    ith_hf_config c;
    assert_ok(ith_hf_config_parse(&c, text, (int64_t)sizeof text - 1, "config.json", &err), err);
    assert_int_equal(c.rope.type, ITH_ROPE_YARN);
    if (fabs(c.rope.attention_factor - 1.138629436111989) > 1e-12)
        fail_msg("attention factor %.15g, expected 1.13862943611199", c.rope.attention_factor);
    ith_hf_config_deinit(&c);
}

/* Far positions stay apart, in bf16 tables as well: the angle is a f32 product, only its cosine is
 * rounded. */
static void test_rope_far_positions_differ(void **state)
{
    (void)state;
    enum { ROWS = 131074 };
    ith_rope_config rope = base_rope();
    rope.theta = 1e6;
    uint16_t *c = ith_malloc((int64_t)ROWS * HALF * 2), *s = ith_malloc((int64_t)ROWS * HALF * 2);
    assert_true(c && s);
    ith_rope_table(&rope, DIM, 40960, ROWS, ITH_BF16, c, s);
    static const int64_t pairs[][2] = {{256, 257}, {131071, 131072}, {131072, 131073}};
    for (int k = 0; k < 3; k++) {
        const uint16_t *a = c + pairs[k][0] * HALF, *b = c + pairs[k][1] * HALF;
        if (memcmp(a, b, HALF * 2) == 0)
            fail_msg("positions %lld and %lld are the same", (long long)pairs[k][0],
                     (long long)pairs[k][1]);
        double want = cos((double)pairs[k][0]), got = (double)ith_bf16_to_f32(a[0]);
        if (fabs(got - want) > 1.0 / 256)
            fail_msg("position %lld: cos is %g, expected %g", (long long)pairs[k][0], got, want);
    }
    ith_free(c);
    ith_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rope_default),
        cmocka_unit_test(test_rope_linear),
        cmocka_unit_test(test_rope_yarn),
        cmocka_unit_test(test_rope_yarn_from_config),
        cmocka_unit_test(test_rope_far_positions_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
