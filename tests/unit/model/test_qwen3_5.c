/* Goal: Qwen3.5 on random weights: packed documents are as good as separate ones, what a layer
 * keeps changes no bit, decoding goes on where prefill ended, positions of images are those of the
 * model. Method: small models with both kinds of layers, dense and with experts, on the CPU
 * backend; every walk is counted first and then run in the planned memory. */
#include "testing.h"

#include "base/rng.h"
#include "kernels/session.h"
#include "model/vision.h"

#include <math.h>

static const char dense_text[] =
    "{\"model_type\": \"qwen3_5_text\", \"vocab_size\": 50, \"hidden_size\": 24,"
    " \"num_hidden_layers\": 3, \"layer_types\": [\"linear_attention\", \"full_attention\","
    " \"linear_attention\"], \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
    " \"head_dim\": 16, \"intermediate_size\": 40, \"linear_num_key_heads\": 2,"
    " \"linear_num_value_heads\": 4, \"linear_key_head_dim\": 8, \"linear_value_head_dim\": 12,"
    " \"linear_conv_kernel_dim\": 3, \"tie_word_embeddings\": true, \"rope_parameters\":"
    " {\"rope_theta\": 10000.0, \"partial_rotary_factor\": 0.5, \"mrope_section\": [2, 1, 1]}}";
static const char moe_text[] =
    "{\"model_type\": \"qwen3_5_moe_text\", \"vocab_size\": 50, \"hidden_size\": 24,"
    " \"num_hidden_layers\": 2, \"full_attention_interval\": 2, \"num_attention_heads\": 2,"
    " \"num_key_value_heads\": 2, \"head_dim\": 16, \"linear_num_key_heads\": 2,"
    " \"linear_num_value_heads\": 2, \"linear_key_head_dim\": 8, \"linear_value_head_dim\": 8,"
    " \"num_experts\": 5, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 12,"
    " \"shared_expert_intermediate_size\": 20}";

/* A model in planned memory. Everything is done twice: counted, then run. */
typedef struct {
    ith_error err;
    ith_hf_config config;
    ith_session session;
    ith_model *model;
} rig;

static void rig_open(rig *r, const char *text, ith_dtype dtype, ith_keep keep)
{
    memset(r, 0, sizeof *r);
    assert_ok(ith_hf_config_parse(&r->config, text, (int64_t)strlen(text), "config", &r->err),
              r->err);
    assert_ok(ith_session_open(&r->session, ITH_USE_CPU, 0, 2, false, &r->err), r->err);
    assert_ok(ith_model_create(&r->model, &r->config, dtype, 256, &r->err), r->err);
    for (int64_t l = 0; l < r->config.num_hidden_layers; l++)
        r->model->keep[l] = keep;
    r->model->mlp_tile = 5;
}

static void rig_close(rig *r)
{
    ith_model_destroy(r->model);
    ith_session_close(&r->session);
    ith_hf_config_deinit(&r->config);
}

/* Random weights, the zero-centred norms too. */
static void fill_weights(rig *r)
{
    ith_model *m = r->model;
    float values[4096];
    for (int64_t i = 0; i < m->num_pieces; i++) {
        const ith_hf_piece *p = &m->pieces[i];
        ith_tensor w = m->params[p->param].w;
        assert_in_range(p->count, 1, 4096);
        ith_model_init_piece(m, p, 3, 0, p->count, values);
        for (int64_t k = 0; k < p->count; k++)
            values[k] = values[k] * 4 + (p->init == ITH_INIT_ZEROS ? 0.1f * sinf((float)k) : 0.0f);
        ith_convert((char *)w.data + p->first * ith_dtype_bytes(w.dtype), w.dtype, values, ITH_F32,
                    p->count);
    }
}

static ith_tensor push(rig *r, ith_dtype dtype, int64_t rows, int64_t cols)
{
    ith_tensor t;
    assert_ok(ith_ctx_push(&r->session.ctx, ITH_MEM_ACTIVATIONS, "test", dtype, cols ? 2 : 1, rows,
                           cols ? cols : 1, 1, 1, &t),
              r->err);
    return t;
}

/* A batch of packed documents; arrays in planned memory, filled when it is real. */
static ith_batch push_batch(rig *r, const int32_t *ids, const int32_t *cu, int64_t docs)
{
    int64_t n = cu[docs], max_len = 0;
    ith_batch b = {.num_tokens = n, .group_tokens = n, .ids = push(r, ITH_I32, n, 0)};
    b.position_ids = push(r, ITH_I32, n, 0);
    ith_tensor borders = push(r, ITH_I32, docs + 1, 0);
    bool real = !ith_ctx_counting(&r->session.ctx);
    for (int64_t d = 0; d < docs; d++) {
        max_len = ith_max_i64(max_len, cu[d + 1] - cu[d]);
        for (int32_t t = cu[d]; real && t < cu[d + 1]; t++)
            ((int32_t *)b.position_ids.data)[t] = t - cu[d];
    }
    if (real) {
        memcpy(b.ids.data, ids, (size_t)n * 4);
        memcpy(borders.data, cu, (size_t)(docs + 1) * 4);
    }
    b.seqs = (ith_seqs){.cu_seqlens = borders, .cu_host = cu, .num_docs = docs, .max_len = max_len};
    return b;
}

static void end_pass(rig *r, int pass)
{
    if (pass)
        return;
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        ith_plan_release(r->session.ctx.plan, (ith_mem_class)c, 0);
    assert_ok(ith_plan_commit(r->session.ctx.plan, &r->err), r->err);
}

static int32_t token_of(int64_t doc, int64_t t)
{
    return (int32_t)ith_rng_below(5, (uint64_t)doc, (uint64_t)t, 50);
}

/* Hidden states and gradients of documents first_doc.. of these lengths; dhidden depends on
 * document, position and column alone. */
static void run_documents(const char *text, ith_dtype dtype, ith_keep keep, int64_t first_doc,
                          const int64_t *lengths, int64_t docs, float *hidden_out, double *grad_sum,
                          float *grad_out)
{
    rig r;
    int32_t ids[256], cu[16] = {0};
    for (int64_t d = 0; d < docs; d++) {
        for (int64_t t = 0; t < lengths[d]; t++)
            ids[cu[d] + t] = token_of(first_doc + d, t);
        cu[d + 1] = cu[d] + (int32_t)lengths[d];
    }
    rig_open(&r, text, dtype, keep);
    ith_ctx *ctx = &r.session.ctx;
    ith_model *m = r.model;
    int64_t width = r.config.hidden_size;
    for (int pass = 0; pass < 2; pass++) {
        assert_ok(ith_model_place(m, ctx, true), r.err);
        if (pass)
            fill_weights(&r);
        ith_batch b = push_batch(&r, ids, cu, docs);
        ith_tensor hidden = push(&r, dtype, b.num_tokens, width);
        ith_tensor dhidden = push(&r, dtype, b.num_tokens, width);
        assert_ok(m->family->forward(m, ctx, &b, true, hidden), r.err);
        for (int64_t d = 0; pass && d < docs; d++)
            for (int64_t i = 0; i < lengths[d] * width; i++) {
                double value = ith_rng_normal(8, (uint64_t)(first_doc + d), (uint64_t)i);
                int64_t size = ith_dtype_bytes(dtype);
                ith_convert((char *)dhidden.data + (cu[d] * width + i) * size, dtype, &value,
                            ITH_F64, 1);
            }
        if (pass)
            ith_convert(hidden_out, ITH_F32, hidden.data, dtype, ith_numel(hidden));
        assert_ok(m->family->backward(m, ctx, &b, dhidden), r.err);
        end_pass(&r, pass);
    }
    for (int64_t i = 0; i < m->num_elements; i++) {
        if (grad_sum)
            grad_sum[i] += (double)((float *)m->grad.data)[i];
        if (grad_out)
            grad_out[i] = ((float *)m->grad.data)[i];
    }
    rig_close(&r);
}

enum { MAX_ELEMENTS = 1 << 16, MAX_HIDDEN = 256 * 24 };

static void check_packed(const char *text)
{
    static const int64_t lengths[] = {1, 5, 70, 1, 2, 64};
    static float packed[MAX_HIDDEN], alone[MAX_HIDDEN], grad[MAX_ELEMENTS];
    static double sum[MAX_ELEMENTS];
    memset(sum, 0, sizeof sum);
    memset(grad, 0, sizeof grad);
    run_documents(text, ITH_F32, ITH_KEEP_ALL, 0, lengths, 6, packed, NULL, grad);
    int64_t at = 0;
    for (int64_t d = 0; d < 6; d++) {
        run_documents(text, ITH_F32, ITH_KEEP_ALL, d, &lengths[d], 1, alone + at, sum, NULL);
        at += lengths[d] * 24;
    }
    double worst = 0, diff = 0, norm = 0;
    for (int64_t i = 0; i < at; i++)
        worst = fmax(worst, fabs((double)packed[i] - (double)alone[i]));
    for (int64_t i = 0; i < MAX_ELEMENTS; i++) {
        diff += ((double)grad[i] - sum[i]) * ((double)grad[i] - sum[i]);
        norm += sum[i] * sum[i];
    }
    if (!(worst < 1e-4) || !(diff < 1e-9 * norm) || norm == 0)
        fail_msg("packed: hidden states differ by %g, gradients by %g of %g", worst, sqrt(diff),
                 sqrt(norm));
}

static void test_packed_documents_are_as_separate_ones(void **state)
{
    (void)state;
    check_packed(dense_text);
    check_packed(moe_text);
}

static void test_what_is_kept_changes_no_bit(void **state)
{
    (void)state;
    static const int64_t lengths[] = {3, 1, 66};
    static float hidden[2][MAX_HIDDEN], grad[2][MAX_ELEMENTS];
    for (int i = 0; i < 4; i++) {
        const char *text = i % 2 ? moe_text : dense_text;
        ith_dtype dtype = i / 2 ? ITH_BF16 : ITH_F32;
        memset(grad, 0, sizeof grad);
        run_documents(text, dtype, ITH_KEEP_ALL, 0, lengths, 3, hidden[0], NULL, grad[0]);
        for (int keep = ITH_KEEP_ATTENTION; keep <= ITH_KEEP_HOST; keep++) {
            run_documents(text, dtype, (ith_keep)keep, 0, lengths, 3, hidden[1], NULL, grad[1]);
            assert_memory_equal(hidden[0], hidden[1], 70 * 24 * 4);
            assert_memory_equal(grad[0], grad[1], sizeof grad[0]);
        }
    }
}

/* ---- decoding ---- */

enum { SEQUENCES = 2, CAPACITY = 132 };

static void close_to(const float *a, const float *b, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        if (!(fabsf(a[i] - b[i]) <= 2e-4f))
            fail_msg("%s: element %lld is %g, the whole forward gives %g", what, (long long)i,
                     (double)a[i], (double)b[i]);
}

/* One call of decode with counts[b] new tokens behind len[b]. out: [tokens, width]. */
static void decode_call(rig *r, ith_kv_cache *cache, const int64_t *len, const int64_t *counts,
                        bool prefill, float *out)
{
    int32_t ids[256], cu[SEQUENCES + 1] = {0};
    bool real = !ith_ctx_counting(&r->session.ctx);
    for (int64_t s = 0; s < SEQUENCES; s++) {
        for (int64_t t = 0; t < counts[s]; t++)
            ids[cu[s] + t] = token_of(s, len[s] + t);
        cu[s + 1] = cu[s] + (int32_t)counts[s];
    }
    ith_batch b = push_batch(r, ids, cu, SEQUENCES);
    ith_tensor rows = push(r, ITH_I32, b.num_tokens, 0);
    ith_tensor hidden = push(r, ITH_F32, b.num_tokens, r->config.hidden_size);
    for (int64_t s = 0; real && s < SEQUENCES; s++) {
        for (int64_t t = 0; t < counts[s]; t++) {
            ((int32_t *)b.position_ids.data)[cu[s] + t] = (int32_t)(len[s] + t);
            ((int32_t *)rows.data)[cu[s] + t] = (int32_t)(s * CAPACITY + len[s] + t);
        }
        ((int32_t *)cache->lengths.data)[s] = (int32_t)(len[s] + counts[s]);
    }
    assert_ok(r->model->family->decode(r->model, &r->session.ctx, &b, cache, rows, prefill, hidden),
              r->err);
    if (real)
        memcpy(out, hidden.data, (size_t)ith_tensor_bytes(hidden));
}

/* Prefill of `start` tokens, then one, three, one. */
static void check_decoding(const char *text, const int64_t *start)
{
    static const int64_t one[] = {1, 1}, three[] = {3, 3};
    const int64_t total[] = {start[0] + 5, start[1] + 5};
    static float whole[SEQUENCES][MAX_HIDDEN], out[MAX_HIDDEN];
    for (int64_t s = 0; s < SEQUENCES; s++)
        run_documents(text, ITH_F32, ITH_KEEP_ALL, s, &total[s], 1, whole[s], NULL, NULL);
    rig r;
    rig_open(&r, text, ITH_F32, ITH_KEEP_ALL);
    int64_t width = r.config.hidden_size;
    for (int pass = 0; pass < 2; pass++) {
        ith_kv_cache cache = {0};
        int64_t len[SEQUENCES] = {0};
        assert_ok(ith_model_place(r.model, &r.session.ctx, false), r.err);
        if (pass)
            fill_weights(&r);
        assert_ok(ith_model_place_cache(r.model, &r.session.ctx, SEQUENCES, CAPACITY, &cache),
                  r.err);
        cache.lengths = push(&r, ITH_I32, SEQUENCES, 0);
        for (int call = 0; call < 4; call++) { /* prefill, one by one, three at a time, one */
            const int64_t *counts = call == 0 ? start : call == 2 ? three : one;
            decode_call(&r, &cache, len, counts, call == 0, out);
            for (int64_t s = 0, at = 0; s < SEQUENCES; at += counts[s] * width, s++) {
                if (pass)
                    close_to(out + at, whole[s] + len[s] * width, counts[s] * width,
                             call ? "continued" : "prefill");
                len[s] += counts[s];
            }
        }
        end_pass(&r, pass);
    }
    rig_close(&r);
}

/* Prefill and the steps behind it end before, on and behind the stretches of the delta rule. */
static void test_decoding_goes_on_where_prefill_ended(void **state)
{
    (void)state;
    static const int64_t starts[][SEQUENCES] = {{67, 2},   {62, 63},  {64, 61},  {126, 1},
                                                {127, 60}, {65, 125}, {121, 120}};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        check_decoding(dense_text, starts[i]);
    check_decoding(moe_text, starts[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_packed_documents_are_as_separate_ones),
        cmocka_unit_test(test_what_is_kept_changes_no_bit),
        cmocka_unit_test(test_decoding_goes_on_where_prefill_ended),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
