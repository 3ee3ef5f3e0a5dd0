/* Goal: the reference means what the papers mean, not only what its own gradient says.
 * Method: numbers small enough to work out by hand, and properties every correct operator has. */
#include "testing.h"

#include "base/plan.h"
#include "base/rng.h"
#include "kernels/backend.h"

#include <math.h>

static ith_error err;

static ith_ctx ref(void)
{
    return ith_ctx_host(ith_backend_ref(), NULL, &err);
}

static ith_tensor f1(float *data, int64_t n)
{
    return ith_tensor_1d(data, ITH_F32, n);
}

static ith_tensor f2(float *data, int64_t rows, int64_t cols)
{
    return ith_tensor_2d(data, ITH_F32, rows, cols);
}

static ith_tensor f3(float *data, int64_t rows, int64_t heads, int64_t dim)
{
    return ith_tensor_3d(data, ITH_F32, rows, heads, dim);
}

static ith_tensor ints(int32_t *data, int64_t n)
{
    return ith_tensor_1d(data, ITH_I32, n);
}

static ith_tensor none(void)
{
    return ith_tensor_none();
}

static void near_values(const char *what, const float *got, const double *wanted, int n, double tol)
{
    for (int i = 0; i < n; i++)
        if (!(fabs((double)got[i] - wanted[i]) <= tol))
            fail_msg("%s[%d]: %.9g, expected %.9g", what, i, (double)got[i], wanted[i]);
}

/* ---- norms ---- */

static void test_rmsnorm_of_3_4(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float x[] = {1, 1}, residual[] = {2, 3}, sum[2], w[] = {1, 2}, y[2], rstd[1];
    double r = 1 / sqrt(12.5);
    assert_ok(ith_rmsnorm_forward(&ctx, f2(y, 1, 2), f2(sum, 1, 2), f1(rstd, 1), f2(x, 1, 2),
                                  f2(residual, 1, 2), f1(w, 2), 0, 0),
              err);
    near_values("sum", sum, (double[]){3, 4}, 2, 0);
    near_values("rstd", rstd, (double[]){r}, 1, 1e-7);
    near_values("y", y, (double[]){3 * r, 8 * r}, 2, 1e-6);
    assert_ok(ith_rmsnorm_forward(&ctx, f2(y, 1, 2), none(), f1(rstd, 1), f2(sum, 1, 2), none(),
                                  f1(w, 2), 2.5F, 1),
              err);
    r = 1 / sqrt(15.0);
    near_values("y, zero-centred", y, (double[]){6 * r, 12 * r}, 2, 1e-6);
}

/* In bf16 the plain norm rounds before the weight and after it; the zero-centred one only after. */
static void test_rmsnorm_bf16_rounds_where_the_models_do(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    enum { WIDTH = 64 };
    uint16_t x[WIDTH], w[WIDTH], w1[WIDTH], y[WIDTH];
    float rstd[1];
    int differ = 0;
    for (uint64_t i = 0; i < WIDTH; i++) {
        x[i] = ith_f32_to_bf16((float)ith_rng_normal(1, 1, i));
        w1[i] = ith_f32_to_bf16((float)ith_rng_normal(1, 2, i) / 4);
        w[i] = ith_f32_to_bf16(1 + ith_bf16_to_f32(w1[i]));
    }
    ith_tensor tx = ith_tensor_2d(x, ITH_BF16, 1, WIDTH), ty = ith_tensor_2d(y, ITH_BF16, 1, WIDTH);
    for (int offset = 0; offset < 2; offset++) {
        ith_tensor tw = ith_tensor_1d(offset ? w1 : w, ITH_BF16, WIDTH);
        assert_ok(ith_rmsnorm_forward(&ctx, ty, none(), f1(rstd, 1), tx, none(), tw, 1e-6F,
                                      (float)offset),
                  err);
        for (int i = 0; i < WIDTH; i++) {
            float n = ith_bf16_to_f32(x[i]) * rstd[0], factor = ith_bf16_to_f32(w[i]);
            uint16_t twice = ith_f32_to_bf16(factor * ith_bf16_to_f32(ith_f32_to_bf16(n)));
            uint16_t once = ith_f32_to_bf16(n * (1 + ith_bf16_to_f32(w1[i])));
            assert_int_equal(y[i], offset ? once : twice);
            differ += twice != once;
        }
    }
    assert_true(differ > 0); /* else the numbers prove nothing */
}

/* ---- RoPE ---- */

/* Position 1 is a quarter turn for frequency 0 and none for frequency 1; dims 4.. pass. */
static void test_rope_quarter_turn_in_half_split_form(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float c[] = {1, 1, 0, 1}, s[] = {0, 0, 1, 0}, q[] = {1, 2, 3, 4, 5}, k[] = {6, 7, 8, 9, 10};
    int32_t pos[] = {1};
    assert_ok(ith_qk_norm_rope_forward(&ctx, f3(q, 1, 1, 5), f3(k, 1, 1, 5), none(), none(),
                                       f3(q, 1, 1, 5), f3(k, 1, 1, 5), none(), none(), f2(c, 2, 2),
                                       f2(s, 2, 2), ints(pos, 1), 0, 0),
              err);
    near_values("q", q, (double[]){-3, 2, 1, 4, 5}, 5, 0);
    near_values("k", k, (double[]){-8, 7, 6, 9, 10}, 5, 0);
}

/* Frequencies 0..3 read the axes time, height, width, time. */
static void test_mrope_frequency_reads_its_axis(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float c[4 * 4], s[4 * 4], q[8] = {1, 1, 1, 1, 0, 0, 0, 0}, k[8] = {0}, out[8];
    for (int p = 0; p < 4; p++) {
        for (int i = 0; i < 4; i++) {
            c[p * 4 + i] = (float)p; /* no angle: the number shows which position was read */
            s[p * 4 + i] = 0;
        }
    }
    int32_t pos[] = {1, 2, 3};
    assert_ok(ith_qk_norm_rope_forward(&ctx, f3(out, 1, 1, 8), f3(k, 1, 1, 8), none(), none(),
                                       f3(q, 1, 1, 8), f3(k, 1, 1, 8), none(), none(), f2(c, 4, 4),
                                       f2(s, 4, 4), ith_tensor_2d(pos, ITH_I32, 3, 1), 0, 0),
              err);
    near_values("q", out, (double[]){1, 2, 3, 1, 0, 0, 0, 0}, 8, 0);
}

/* ---- attention ---- */

/* Scores of the second token are 0 and ln 3: weights 1/4 and 3/4 of values 4 and 8. */
static void test_attention_weights_one_and_three_quarters(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float q[] = {1, 1}, k[] = {0, (float)log(3.0)}, v[] = {4, 8}, o[2], lse[2];
    int32_t cu[] = {0, 2};
    ith_seqs seqs = {.cu_seqlens = ints(cu, 2), .cu_host = cu, .num_docs = 1, .max_len = 2};
    assert_ok(ith_attention_forward(&ctx, f3(o, 2, 1, 1), f2(lse, 2, 1), f3(q, 2, 1, 1),
                                    f3(k, 2, 1, 1), f3(v, 2, 1, 1), seqs, 1, true),
              err);
    near_values("o", o, (double[]){4, 7}, 2, 1e-6);
    near_values("lse", lse, (double[]){0, log(4.0)}, 2, 1e-6);
    assert_ok(ith_attention_forward(&ctx, f3(o, 2, 1, 1), f2(lse, 2, 1), f3(q, 2, 1, 1),
                                    f3(k, 2, 1, 1), f3(v, 2, 1, 1), seqs, 1, false),
              err);
    near_values("o, not causal", o, (double[]){7, 7}, 2, 1e-6);
}

/* [noisy; clean] of 4 tokens in blocks of 2, and of 5: which key each row sees, worked out by hand.
 * A key's weight shows in its own place of o: v is the unit matrix, all scores are 0. */
static void check_block_mask(int64_t len, int64_t block, const char *const *rows)
{
    ith_ctx ctx = ref();
    enum { MAX = 10 };
    float zero[MAX * MAX] = {0}, v[MAX * MAX] = {0}, o[MAX * MAX], lse[MAX];
    int32_t cu[] = {0, (int32_t)(2 * len)}, noisy[] = {(int32_t)len}, position[MAX];
    int64_t n = 2 * len, dim = 2 * len;
    for (int64_t i = 0; i < n; i++) {
        position[i] = (int32_t)(i % len);
        v[i * dim + i] = 1;
    }
    ith_seqs seqs = {.cu_seqlens = ints(cu, 2),
                     .cu_host = cu,
                     .num_docs = 1,
                     .max_len = n,
                     .block = block,
                     .noisy = ints(noisy, 1),
                     .position = ints(position, n),
                     .noisy_host = noisy,
                     .position_host = position};
    assert_ok(ith_attention_forward(&ctx, f3(o, n, 1, dim), f2(lse, n, 1), f3(zero, n, 1, dim),
                                    f3(zero, n, 1, dim), f3(v, n, 1, dim), seqs, 1, true),
              err);
    for (int64_t q = 0; q < n; q++)
        for (int64_t k = 0; k < n; k++)
            if ((o[q * dim + k] > 0) != (rows[q][k] == '1'))
                fail_msg("L=%d b=%d: row %d, key %d: weight %g, expected %c", (int)len, (int)block,
                         (int)q, (int)k, (double)o[q * dim + k], rows[q][k]);
}

static void test_block_diffusion_mask_by_hand(void **state)
{
    (void)state;
    static const char *const four[] = {"11000000", "11000000", "00111100", "00111100",
                                       "00001100", "00001100", "00001111", "00001111"};
    static const char *const five[] = {"1100000000", "1100000000", "0011011000", "0011011000",
                                       "0000111110", "0000011000", "0000011000", "0000011110",
                                       "0000011110", "0000011111"};
    check_block_mask(4, 2, four);
    check_block_mask(5, 2, five);
}

/* Pairs of query and key of [noisy; clean] rows: L (L + b) where b divides L, fewer rows in the
 * last block else. */
static void test_pairs_of_the_block_diffusion_mask(void **state)
{
    (void)state;
    static const int64_t cases[][3] = {{4, 2, 24},   {5, 2, 34},    {64, 32, 6144},
                                       {21, 4, 522}, {35, 8, 1490}, {2048, 32, 4259840}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t len = cases[i][0], pairs = 0;
        for (int64_t row = 0; row < 2 * len; row++) {
            ith_key_range r = ith_keys_seen(cases[i][1], true, 2 * len, len, row, row % len);
            pairs += r.hi[0] - r.lo[0] + r.hi[1] - r.lo[1];
        }
        if (pairs != cases[i][2])
            fail_msg("%d tokens in blocks of %d: %d pairs, expected %d", (int)len, (int)cases[i][1],
                     (int)pairs, (int)cases[i][2]);
    }
}

static void fill(float *x, int64_t n, uint64_t stream)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)ith_rng_normal(3, stream, (uint64_t)i);
}

enum { TOKENS = 9, HEADS = 4, KV_HEADS = 2, DIM = 6 };

/* A packed batch is its documents one by one, bit for bit. */
static void test_attention_packed_is_separate(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    static float q[TOKENS * HEADS * DIM], k[TOKENS * KV_HEADS * DIM], v[TOKENS * KV_HEADS * DIM];
    static float o[2][TOKENS * HEADS * DIM], lse[2][TOKENS * HEADS];
    fill(q, TOKENS * HEADS * DIM, 1);
    fill(k, TOKENS * KV_HEADS * DIM, 2);
    fill(v, TOKENS * KV_HEADS * DIM, 3);
    int32_t cu[] = {0, 4, 4, 5, 9}, single[] = {0, 0};
    ith_tensor tq = f3(q, TOKENS, HEADS, DIM), tk = f3(k, TOKENS, KV_HEADS, DIM);
    ith_tensor tv = f3(v, TOKENS, KV_HEADS, DIM);
    ith_seqs seqs = {.cu_seqlens = ints(cu, 5), .cu_host = cu, .num_docs = 4, .max_len = 4};
    assert_ok(ith_attention_forward(&ctx, f3(o[0], TOKENS, HEADS, DIM), f2(lse[0], TOKENS, HEADS),
                                    tq, tk, tv, seqs, 0.5F, true),
              err);
    for (int i = 0; i < 4; i++) {
        int64_t begin = cu[i], end = cu[i + 1];
        single[1] = (int32_t)(end - begin);
        ith_seqs one = {.cu_seqlens = ints(single, 2),
                        .cu_host = single,
                        .num_docs = 1,
                        .max_len = end - begin};
        assert_ok(
            ith_attention_forward(&ctx, ith_row_range(f3(o[1], TOKENS, HEADS, DIM), begin, end),
                                  ith_row_range(f2(lse[1], TOKENS, HEADS), begin, end),
                                  ith_row_range(tq, begin, end), ith_row_range(tk, begin, end),
                                  ith_row_range(tv, begin, end), one, 0.5F, true),
            err);
    }
    assert_memory_equal(o[0], o[1], sizeof o[0]);
    assert_memory_equal(lse[0], lse[1], sizeof lse[0]);
}

/* The last rows of a document by decode are those of forward; an idle sequence gives zeros. */
static void test_decode_is_the_end_of_forward(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    enum { CACHE = 12, NEW = 3 };
    static float q[TOKENS * HEADS * DIM], k[2 * CACHE * KV_HEADS * DIM];
    static float v[2 * CACHE * KV_HEADS * DIM], o[TOKENS * HEADS * DIM], lse[TOKENS * HEADS];
    static float q_new[2 * NEW * HEADS * DIM], o_new[2 * NEW * HEADS * DIM];
    static float lse_new[2 * NEW * HEADS];
    fill(q, TOKENS * HEADS * DIM, 1);
    fill(k, 2 * CACHE * KV_HEADS * DIM, 2);
    fill(v, 2 * CACHE * KV_HEADS * DIM, 3);
    int32_t cu[] = {0, TOKENS}, lengths[] = {TOKENS, 0};
    ith_seqs seqs = {.cu_seqlens = ints(cu, 2), .cu_host = cu, .num_docs = 1, .max_len = TOKENS};
    assert_ok(ith_attention_forward(&ctx, f3(o, TOKENS, HEADS, DIM), f2(lse, TOKENS, HEADS),
                                    f3(q, TOKENS, HEADS, DIM), f3(k, TOKENS, KV_HEADS, DIM),
                                    f3(v, TOKENS, KV_HEADS, DIM), seqs, 0.5F, true),
              err);
    memcpy(q_new, q + (TOKENS - NEW) * HEADS * DIM, sizeof q_new / 2);
    ith_tensor kc = ith_tensor_4d(k, ITH_F32, 4, 2, CACHE, KV_HEADS, DIM);
    ith_tensor vc = ith_tensor_4d(v, ITH_F32, 4, 2, CACHE, KV_HEADS, DIM);
    assert_ok(ith_attention_decode(&ctx, f3(o_new, 2 * NEW, HEADS, DIM),
                                   f2(lse_new, 2 * NEW, HEADS), f3(q_new, 2 * NEW, HEADS, DIM), kc, vc, ints(lengths, 2), 0.5F),
              err);
    assert_memory_equal(o_new, o + (TOKENS - NEW) * HEADS * DIM, sizeof o_new / 2);
    assert_memory_equal(lse_new, lse + (TOKENS - NEW) * HEADS, sizeof lse_new / 2);
    for (int i = NEW * HEADS * DIM; i < 2 * NEW * HEADS * DIM; i++)
        assert_true(o_new[i] == 0);
    for (int i = NEW * HEADS; i < 2 * NEW * HEADS; i++)
        assert_true(lse_new[i] == -INFINITY);
    /* a part of no key changes nothing, nor do two of them become anything */
    ith_tensor all = f3(o_new, NEW, HEADS, DIM), all_lse = f2(lse_new, NEW, HEADS);
    ith_tensor nothing = f3(o_new + NEW * HEADS * DIM, NEW, HEADS, DIM),
               nothing_lse = f2(lse_new + NEW * HEADS, NEW, HEADS);
    assert_ok(ith_attention_merge(&ctx, all, all_lse, nothing, nothing_lse), err);
    assert_memory_equal(o_new, o + (TOKENS - NEW) * HEADS * DIM, sizeof o_new / 2);
    assert_ok(ith_attention_merge(&ctx, nothing, nothing_lse, nothing, nothing_lse), err);
    for (int i = NEW * HEADS * DIM; i < 2 * NEW * HEADS * DIM; i++)
        assert_true(o_new[i] == 0);
    assert_ok(ith_attention_merge(&ctx, nothing, nothing_lse, all, all_lse), err);
    assert_memory_equal(o_new + NEW * HEADS * DIM, o_new, sizeof o_new / 2);
    assert_memory_equal(lse_new + NEW * HEADS, lse_new, sizeof lse_new / 2);
}

/* ---- products, SwiGLU, embedding ---- */

static void test_linear_adds_to_what_is_there(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float x[] = {1, 2}, w[] = {3, 4, 5, 6}, y[] = {100, 200}, dx[] = {10, 20}, dw[] = {1, 1, 1, 1};
    assert_ok(ith_linear_forward(&ctx, f2(y, 1, 2), f2(x, 1, 2), f2(w, 2, 2), true), err);
    near_values("y", y, (double[]){111, 217}, 2, 0);
    assert_ok(ith_linear_forward(&ctx, f2(y, 1, 2), f2(x, 1, 2), f2(w, 2, 2), false), err);
    near_values("y", y, (double[]){11, 17}, 2, 0);
    assert_ok(ith_linear_backward_input(&ctx, f2(dx, 1, 2), f2(x, 1, 2), f2(w, 2, 2), true), err);
    near_values("dx", dx, (double[]){23, 36}, 2, 0);
    assert_ok(ith_linear_backward_weight(&ctx, f2(dw, 2, 2), f2(y, 1, 2), f2(x, 1, 2)), err);
    near_values("dw", dw, (double[]){12, 23, 18, 35}, 4, 0);
}

static void test_swiglu_values_and_extremes(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float in[] = {0, 1, -1000, 1000, 5, 2, 7, 3}, h[4];
    assert_ok(ith_swiglu_forward(&ctx, f2(h, 1, 4), f2(in, 1, 8)), err);
    near_values("h", h, (double[]){0, 2 / (1 + exp(-1.0)), 0, 3000}, 4, 1e-6);
    float dh[] = {1, 1, 1, 1};
    assert_ok(ith_swiglu_backward(&ctx, f2(in, 1, 8), none(), f2(dh, 1, 4), f2(in, 1, 8)), err);
    double s = 1 / (1 + exp(-1.0));
    near_values("dgate_up", in, (double[]){2.5, 2 * s * (2 - s), 0, 3, 0, s, 0, 1000}, 8, 1e-6);
}

static void test_embedding_gradient_adds_repeated_words(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float dw[] = {1, 1, 1}, dy[] = {10, 20, 40};
    int32_t ids[] = {2, 0, 2};
    assert_ok(ith_embedding_backward(&ctx, f2(dw, 3, 1), f2(dy, 3, 1), ints(ids, 3)), err);
    near_values("dw", dw, (double[]){21, 1, 51}, 3, 0);
}

/* ---- loss ---- */

static void test_cross_entropy_of_uniform_logits_is_log_words(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    enum { WORDS = 151936 };
    float *logits = ith_calloc(WORDS, sizeof *logits);
    float row_loss[1], seeds[] = {0.5F};
    int32_t labels[] = {77};
    assert_non_null(logits);
    assert_ok(ith_cross_entropy(&ctx, f1(row_loss, 1), f2(logits, 1, WORDS), ints(labels, 1),
                                f1(seeds, 1), true),
              err);
    near_values("loss", row_loss, (double[]){11.931214}, 1, 2e-6);
    near_values("label", logits + 77, (double[]){-0.5 * (1 - 1.0 / WORDS)}, 1, 1e-7);
    near_values("other", logits + 78, (double[]){0.5 / WORDS}, 1, 1e-11);
    ith_free(logits);
}

/* Four rows of three words (cases S54): the mean by hand, with and without a gradient. */
static void test_cross_entropy_of_four_rows_by_hand(void **state)
{
    (void)state;
    static const float rows[12] = {-.1118F, .0162F, .0956F, -.1134F, .0088F, .1046F,
                                   -.1737F, .1315F, .0422F, -.0921F, .0728F, .0194F};
    const ith_backend *backends[] = {ith_backend_ref(), ith_backend_cpu()};
    for (int i = 0; i < 4; i++) {
        ith_ctx ctx = ith_ctx_host(backends[i / 2], NULL, &err);
        bool gradient = i % 2;
        float logits[12], loss[4], seeds[] = {.25F, .25F, .25F, .25F};
        int32_t labels[4] = {0};
        memcpy(logits, rows, sizeof logits);
        assert_ok(ith_cross_entropy(&ctx, f1(loss, 4), f2(logits, 4, 3), ints(labels, 4),
                                    gradient ? f1(seeds, 4) : none(), gradient),
                  err);
        float mean = (loss[0] + loss[1] + loss[2] + loss[3]) / 4;
        near_values("mean", &mean, (double[]){1.2258566}, 1, 3e-7);
        if (!gradient)
            assert_memory_equal(logits, rows, sizeof rows);
        else
            near_values("first row", logits, (double[]){-.17575054, .08438845, .09136208}, 3, 2e-7);
    }
}

static void test_cross_entropy_far_logits_do_not_overflow(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float logits[] = {1000, 0, -1000, 1000}, row_loss[2];
    int32_t labels[] = {1, 1};
    assert_ok(
        ith_cross_entropy(&ctx, f1(row_loss, 2), f2(logits, 2, 2), ints(labels, 2), none(), false),
        err);
    near_values("loss", row_loss, (double[]){1000, 0}, 2, 0);
}

/* Rows 1 and 3 of a small row of answers; the label of the second is not its likeliest word, so the
 * mean over the right ones is the entropy of the first. Loss 0.965522 + 2 * 1.150741. */
static void test_confident_cross_entropy_by_hand(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float logits[] = {0, 1, 2, 0, -1, 1, 0, 0, 0.5F, -1}, loss[2], confidence[2], right[2];
    float seeds[] = {0.5F, 0.5F}, ce[5], twice[5];
    int32_t labels[] = {2, 3};
    static const double dce[] = {0.040079, 0.108947, -0.203851, 0.040079, 0.014744},
                        dconf[] = {0.110058, 0.081275, -0.371369, 0.110058, 0.069977},
                        wrong[] = {0.201806, 0.074240, 0.074240, -0.377598, 0.027311};
    /* beta 2 times the mean over one row, by seeds of one half: a factor of 4 */
    assert_ok(ith_cross_entropy_confident(&ctx, f1(loss, 2), f1(confidence, 2), f1(right, 2),
                                          f2(logits, 2, 5), ints(labels, 2), f1(seeds, 2), 4.0F,
                                          true),
              err);
    near_values("right", right, (double[]){1, 0}, 2, 0);
    near_values("loss", loss, (double[]){0.523744, 1.407300}, 2, 1e-6);
    near_values("confidence", confidence, (double[]){4 * 1.150741, 0}, 2, 4e-6);
    double total = 0.5 * (double)(loss[0] + loss[1] + confidence[0] + confidence[1]);
    if (!(fabs(total - 3.267004) <= 2e-6))
        fail_msg("loss %.7f, by hand 3.267004", total);
    for (int i = 0; i < 5; i++) {
        ce[i] = logits[i] - (float)(2 * dconf[i]);
        twice[i] = logits[i] - (float)dce[i];
    }
    near_values("cross entropy gradient", ce, dce, 5, 3e-6);
    for (int i = 0; i < 5; i++)
        twice[i] *= 0.5F;
    near_values("confidence gradient", twice, dconf, 5, 2e-6);
    near_values("gradient of the wrong row", logits + 5, wrong, 5, 1e-6);
}

/* ---- experts ---- */

/* Which experts and which weights for scores s (as logits) and a bias: by hand. */
static void check_group_router(const char *what, int64_t experts, int64_t k, int64_t groups,
                               int64_t stay, const double *s, const float *bias,
                               const int32_t *experts_wanted, const double *weights_wanted)
{
    ith_ctx ctx = ref();
    float z[8], scores[8], w[2];
    int32_t idx[2];
    for (int64_t e = 0; e < experts; e++)
        z[e] = (float)log(s[e] / (1 - s[e]));
    ith_tensor ti = ith_tensor_2d(idx, ITH_I32, 1, k);
    ith_tensor tb = ith_tensor_1d((void *)(uintptr_t)bias, ITH_F32, experts);
    assert_ok(ith_group_router_forward(&ctx, f2(w, 1, k), ti, f2(scores, 1, experts),
                                       f2(z, 1, experts), tb, groups, stay, 2.5F),
              err);
    near_values(what, w, weights_wanted, (int)k, 1e-6);
    for (int64_t i = 0; i < k; i++)
        if (idx[i] != experts_wanted[i])
            fail_msg("%s: slot %d has expert %d, expected %d", what, (int)i, idx[i],
                     experts_wanted[i]);
}

static void test_group_router_by_hand(void **state)
{
    (void)state;
    check_group_router("bias serves the choice alone", 4, 2, 2, 2, (double[]){.5, .5, .5, .5},
                       (float[]){0, .1F, .2F, 0}, (int32_t[]){2, 1}, (double[]){1.25, 1.25});
    check_group_router("best expert in a group that is dropped", 8, 2, 4, 2,
                       (double[]){.5, .85, .8, .75, .95, .05, .3, .2},
                       (float[]){0, 0, 0, .2F, 0, 0, 0, 0}, (int32_t[]){3, 1},
                       (double[]){1.171875, 1.328125});
    check_group_router("dropped groups lose to negative scores", 8, 2, 4, 1,
                       (double[]){.9, .1, .3, .2, .2, .2, .1, .3},
                       (float[]){0, -.4F, 0, 0, 0, 0, 0, 0}, (int32_t[]){0, 1},
                       (double[]){2.25, .25});
    check_group_router("two largest of a group", 8, 2, 2, 1,
                       (double[]){.9, .15, .14, .13, .6, .5, .05, .05}, (float[8]){0},
                       (int32_t[]){4, 5}, (double[]){1.5 / 1.1, 1.25 / 1.1});
    check_group_router("one expert: its score is not divided", 4, 1, 2, 1,
                       (double[]){.2, .3, .6, .5}, (float[4]){0}, (int32_t[]){2}, (double[]){1.5});
    check_group_router("near tie: the larger by 1e-7", 4, 1, 1, 1,
                       (double[]){.5, .5000002, .5, .5000001}, (float[4]){0}, (int32_t[]){1},
                       (double[]){1.25});
}

static void test_router_probabilities_ties_and_near_ties(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float two[] = {2, 0}, w[2], probs[4];
    int32_t idx[2];
    ith_tensor ti = ith_tensor_2d(idx, ITH_I32, 1, 1);
    assert_ok(ith_router_forward(&ctx, f2(w, 1, 1), ti, f2(probs, 1, 2), f2(two, 1, 2), false),
              err);
    near_values("probs", probs, (double[]){0.88079708, 0.11920292}, 2, 1e-7);
    near_values("w", w, (double[]){0.88079708}, 1, 1e-7);
    float equal[] = {0.5F, 1, 1, 1};
    ti = ith_tensor_2d(idx, ITH_I32, 1, 2);
    assert_ok(ith_router_forward(&ctx, f2(w, 1, 2), ti, f2(probs, 1, 4), f2(equal, 1, 4), true),
              err);
    assert_int_equal(idx[0], 1);
    assert_int_equal(idx[1], 2);
    near_values("w", w, (double[]){0.5, 0.5}, 2, 1e-7);
    float close[] = {0.0F, 1.0F, 0.0F, 1.0000012F};
    ti = ith_tensor_2d(idx, ITH_I32, 1, 1);
    assert_ok(ith_router_forward(&ctx, f2(w, 1, 1), ti, f2(probs, 1, 4), f2(close, 1, 4), true),
              err);
    assert_int_equal(idx[0], 3);
}

/* The load balancing loss takes the probabilities of the router as they are (cases S70): two rows
 * of logits 2 and 0 give E * sum f p = 2 * 0.8808, and a second softmax would give 2 * 0.6817. */
static void test_balance_takes_probabilities_as_they_are(void **state)
{
    (void)state;
    const ith_backend *backends[] = {ith_backend_ref(), ith_backend_cpu()};
    for (int i = 0; i < 2; i++) {
        ith_ctx ctx = ith_ctx_host(backends[i], NULL, &err);
        float logits[] = {2, 0, 2, 0}, w[2], probs[4], fraction[2] = {0}, mean[2] = {0};
        int32_t idx[2], offsets[] = {0, 2, 2};
        double balance = 0;
        assert_ok(ith_router_forward(&ctx, f2(w, 2, 1), ith_tensor_2d(idx, ITH_I32, 2, 1),
                                     f2(probs, 2, 2), f2(logits, 2, 2), false),
                  err);
        assert_true(idx[0] == 0 && idx[1] == 0);
        assert_ok(ith_expert_load(&ctx, f1(fraction, 2), f1(mean, 2), ints(offsets, 3),
                                  f2(probs, 2, 2), 0.5F),
                  err);
        near_values("fraction", fraction, (double[]){1, 0}, 2, 0);
        near_values("mean", mean, (double[]){.88079708, .11920292}, 2, 1e-7);
        assert_ok(ith_dot_accumulate(&ctx, ith_tensor_1d(&balance, ITH_F64, 1), f1(fraction, 2),
                                     f1(mean, 2)),
                  err);
        if (!(fabs(2 * balance - 1.76159416) <= 2e-7))
            fail_msg("balance %.8f, expected 1.76159416", 2 * balance);
    }
}

static void test_expert_sort_by_hand(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    int32_t idx[] = {1, 0, 1, 2, 0, 1}, offsets[5], source[6], row_of[6];
    assert_ok(ith_expert_sort(&ctx, ints(offsets, 5), ints(source, 6),
                              ith_tensor_2d(row_of, ITH_I32, 3, 2),
                              ith_tensor_2d(idx, ITH_I32, 3, 2)),
              err);
    static const int32_t want_offsets[] = {0, 2, 5, 6, 6}, want_source[] = {0, 2, 0, 1, 2, 1};
    static const int32_t want_rows[] = {2, 0, 3, 5, 1, 4};
    assert_memory_equal(offsets, want_offsets, sizeof offsets);
    assert_memory_equal(source, want_source, sizeof source);
    assert_memory_equal(row_of, want_rows, sizeof row_of);
}

/* ---- optimizer ---- */

static ith_adamw_hyper hyper_of(float lr, float weight_decay, int64_t step)
{
    ith_adamw_hyper h = {lr, 0.9F, 0.999F, 1e-8F, weight_decay, step};
    return h;
}

/* From zero moments the corrected first step is lr * g/(|g| + eps): a sign. */
static void test_adamw_first_step_is_a_sign(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float w[] = {1, -2, 3}, m[3] = {0}, v[3] = {0}, g[] = {4, -1e-3F, 0}, scale[] = {0.5F};
    assert_ok(ith_adamw(&ctx, f1(w, 3), none(), f1(m, 3), f1(v, 3), f1(g, 3), f1(scale, 1),
                        hyper_of(0.01F, 0.1F, 1), 0, 0, true),
              err);
    double keep = 1 - 0.001;
    near_values("w", w,
                (double[]){keep - 0.01, -2 * keep + 0.01 * (5e-4 / (5e-4 + 1e-8)), 3 * keep}, 3,
                3e-7);
    near_values("m", m, (double[]){0.2, -5e-5, 0}, 3, 1e-7);
    near_values("v", v, (double[]){0.004, 2.5e-10, 0}, 3, 1e-7);
    near_values("grad", g, (double[]){0, 0, 0}, 3, 0);
}

/* Twenty steps against the published algorithm in double. */
static void test_adamw_follows_the_published_steps(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float w[1] = {0.7F}, master[1] = {0.7F}, m[1] = {0}, v[1] = {0}, g[1], scale[] = {1};
    double p = 0.7, dm = 0, dv = 0;
    for (int t = 1; t <= 20; t++) {
        double grad = sin(t * 1.7) + 0.3;
        g[0] = (float)grad;
        assert_ok(ith_adamw(&ctx, f1(w, 1), f1(master, 1), f1(m, 1), f1(v, 1), f1(g, 1),
                            f1(scale, 1), hyper_of(0.02F, 0.05F, t), 0, 0, false),
                  err);
        p *= 1 - 0.02 * 0.05;
        dm = 0.9 * dm + 0.1 * grad;
        dv = 0.999 * dv + 0.001 * grad * grad;
        p -= 0.02 * (dm / (1 - pow(0.9, t))) / (sqrt(dv / (1 - pow(0.999, t))) + 1e-8);
        near_values("p", master, &p, 1, 2e-6);
        assert_true(w[0] == master[0]);
    }
}

/* A step that is not finite changes nothing and clears the gradient. */
static void test_adamw_skips_when_scale_is_negative(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    float w[] = {1}, m[] = {2}, v[] = {3}, g[] = {NAN}, scale[] = {-1};
    assert_ok(ith_adamw(&ctx, f1(w, 1), none(), f1(m, 1), f1(v, 1), f1(g, 1), f1(scale, 1),
                        hyper_of(1, 1, 1), 0, 0, true),
              err);
    assert_true(w[0] == 1 && m[0] == 2 && v[0] == 3 && g[0] == 0);
}

enum { MANY = 20000 };

/* bf16 weights at 1 with lr 6e-4: nearest rounding would never move; the mean moves by 0.06. */
static void test_adamw_bf16_moves_by_stochastic_rounding(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    static uint16_t w[MANY];
    static float m[MANY], v[MANY], g[MANY];
    float scale[] = {1};
    for (int i = 0; i < MANY; i++)
        w[i] = ith_f32_to_bf16(1);
    assert_int_equal(ith_f32_to_bf16(1 - 6e-4F), w[0]);
    for (int t = 1; t <= 100; t++) {
        for (int i = 0; i < MANY; i++)
            g[i] = 1;
        assert_ok(ith_adamw(&ctx, ith_tensor_1d(w, ITH_BF16, MANY), none(), f1(m, MANY),
                            f1(v, MANY), f1(g, MANY), f1(scale, 1), hyper_of(6e-4F, 0, t), 7, 0,
                            true),
                  err);
    }
    double mean = 0;
    for (int i = 0; i < MANY; i++)
        mean += (double)ith_bf16_to_f32(w[i]) / MANY;
    if (!(fabs(mean - 0.94) < 5e-4))
        fail_msg("mean weight %.6f, expected 0.94 +- 0.0005", mean);
}

/* The rounding bits follow the element's place in the whole parameter, past 2^32 too. */
static void test_adamw_rounding_does_not_depend_on_sharding(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    enum { N = 64, CUT = 23 };
    const int64_t first = ((int64_t)1 << 33) + 5;
    uint16_t w[2][N];
    float m[2][N] = {{0}}, v[2][N] = {{0}}, g[2][N], scale[] = {1};
    for (uint64_t i = 0; i < N; i++) {
        w[0][i] = w[1][i] = ith_f32_to_bf16((float)ith_rng_normal(1, 1, i));
        g[0][i] = g[1][i] = (float)ith_rng_normal(1, 2, i);
    }
    uint16_t start = w[0][3];
    assert_ok(ith_adamw(&ctx, ith_tensor_1d(w[0], ITH_BF16, N), none(), f1(m[0], N), f1(v[0], N),
                        f1(g[0], N), f1(scale, 1), hyper_of(1e-3F, 0, 1), 7, first, false),
              err);
    for (int part = 0; part < 2; part++) {
        int64_t at = part ? CUT : 0, n = part ? N - CUT : CUT;
        assert_ok(ith_adamw(&ctx, ith_tensor_1d(w[1] + at, ITH_BF16, n), none(), f1(m[1] + at, n),
                            f1(v[1] + at, n), f1(g[1] + at, n), f1(scale, 1), hyper_of(1e-3F, 0, 1),
                            7, first + at, false),
                  err);
    }
    assert_memory_equal(w[0], w[1], sizeof w[0]);
    /* Element 3 by the contract: the same update in f32, then random bits and a cut. */
    float p[] = {ith_bf16_to_f32(start)}, m1[] = {0}, v1[] = {0};
    assert_ok(ith_adamw(&ctx, f1(p, 1), none(), f1(m1, 1), f1(v1, 1), f1(&g[0][3], 1), f1(scale, 1),
                        hyper_of(1e-3F, 0, 1), 7, 0, false),
              err);
    uint32_t bits, random[4];
    memcpy(&bits, p, sizeof bits);
    ith_philox(7, 1, (uint64_t)(first + 3), random);
    assert_int_equal(w[0][3], (bits + (random[0] & 0xffff)) >> 16);
}

static void test_clip_scale_cases(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    static const struct {
        double sumsq;
        float max_norm;
        double norm, scale;
    } rows[] = {{25, 1, 5, 1 / (5 + 1e-6)}, {25, 0, 5, 1},
                {0.25, 1, 0.5, 1},          {0, 1, 0, 1},
                {1e90, 1, HUGE_VAL, -1},    {HUGE_VAL, 0, HUGE_VAL, -1}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double sumsq = rows[i].sumsq;
        float norm[1], scale[1];
        assert_ok(ith_clip_scale(&ctx, f1(norm, 1), f1(scale, 1), ith_tensor_1d(&sumsq, ITH_F64, 1),
                                 rows[i].max_norm),
                  err);
        if (!isinf(rows[i].norm))
            near_values("norm", norm, &rows[i].norm, 1, 1e-6);
        near_values("scale", scale, &rows[i].scale, 1, 1e-7);
    }
    double nan_sum = (double)NAN;
    float norm[1], scale[1];
    assert_ok(
        ith_clip_scale(&ctx, f1(norm, 1), f1(scale, 1), ith_tensor_1d(&nan_sum, ITH_F64, 1), 1),
        err);
    assert_true(scale[0] == -1);
}

/* ---- planning ---- */

/* A counting plan sees the scratch of an operator without any tensor having memory. */
static void test_counting_touches_no_memory(void **state)
{
    (void)state;
    ith_ctx ctx = ref();
    assert_ok(ith_plan_create(&ctx.plan, ctx.device, &err), err);
    ith_tensor q = ith_tensor_3d(NULL, ITH_BF16, 100, 4, 64), kv = q;
    kv.shape[1] = 2;
    ith_tensor lse = ith_tensor_2d(NULL, ITH_F32, 100, 4);
    ith_seqs seqs = {.cu_seqlens = ith_tensor_1d(NULL, ITH_I32, 3),
                     .cu_host = NULL,
                     .num_docs = 2,
                     .max_len = 60};
    assert_ok(ith_attention_forward(&ctx, q, lse, q, kv, kv, seqs, 1, true), err);
    assert_int_equal(ith_plan_peak(ctx.plan, ITH_MEM_WORKSPACE), 256); /* 60 floats */
    assert_ok(ith_attention_backward(&ctx, q, kv, kv, q, q, kv, kv, q, lse, seqs, 1, true), err);
    assert_int_equal(ith_plan_peak(ctx.plan, ITH_MEM_WORKSPACE), (2 * 60 + 1) * 64 * 4);
    ith_plan_destroy(ctx.plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm_of_3_4),
        cmocka_unit_test(test_rmsnorm_bf16_rounds_where_the_models_do),
        cmocka_unit_test(test_rope_quarter_turn_in_half_split_form),
        cmocka_unit_test(test_mrope_frequency_reads_its_axis),
        cmocka_unit_test(test_attention_weights_one_and_three_quarters),
        cmocka_unit_test(test_attention_packed_is_separate),
        cmocka_unit_test(test_block_diffusion_mask_by_hand),
        cmocka_unit_test(test_pairs_of_the_block_diffusion_mask),
        cmocka_unit_test(test_decode_is_the_end_of_forward),
        cmocka_unit_test(test_linear_adds_to_what_is_there),
        cmocka_unit_test(test_swiglu_values_and_extremes),
        cmocka_unit_test(test_embedding_gradient_adds_repeated_words),
        cmocka_unit_test(test_cross_entropy_of_uniform_logits_is_log_words),
        cmocka_unit_test(test_cross_entropy_of_four_rows_by_hand),
        cmocka_unit_test(test_cross_entropy_far_logits_do_not_overflow),
        cmocka_unit_test(test_confident_cross_entropy_by_hand),
        cmocka_unit_test(test_router_probabilities_ties_and_near_ties),
        cmocka_unit_test(test_group_router_by_hand),
        cmocka_unit_test(test_balance_takes_probabilities_as_they_are),
        cmocka_unit_test(test_expert_sort_by_hand),
        cmocka_unit_test(test_adamw_first_step_is_a_sign),
        cmocka_unit_test(test_adamw_follows_the_published_steps),
        cmocka_unit_test(test_adamw_skips_when_scale_is_negative),
        cmocka_unit_test(test_adamw_bf16_moves_by_stochastic_rounding),
        cmocka_unit_test(test_adamw_rounding_does_not_depend_on_sharding),
        cmocka_unit_test(test_clip_scale_cases),
        cmocka_unit_test(test_counting_touches_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
