/* Goal: a diffusion run keeps the rules of every other run (resume, accumulation, expert layouts,
 * nothing lost), and what it learned comes out of the decoder in fewer forwards than tokens.
 * Method: a tiny LLaDA2 with a selection bias that matters, trained through the trainer. */
#include "e2e/small_dir.h"

#include <math.h>

#include "checkpoint/experts.h"
#include "generate/block_decoder.h"
#include "model/llada2.h"
#include "model/presets.h"

static char *base;

enum { BLOCK = 8 };

/* A selection bias that changes the choice of experts. */
static void bias_values(float *out, int64_t n)
{
    for (int64_t e = 0; e < n; e++)
        out[e] = 0.05f * (float)((e * 5) % 7) - 0.1f;
}

static void make_llada2(const char *dir)
{
    static const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>",
                                          "<|mask|>"};
    static ith_st_entry tensors[256];
    ith_error err = {0};
    ith_hf_config config;
    ith_model *m = NULL;
    json_t *json = NULL;
    ith_buf text = {0};
    assert_ok(ith_make_dirs(dir, &err), err);
    assert_ok(ith_preset_config(ith_preset_find("tiny-llada2"), 320, -1, ITH_F32, &json, &err),
              err);
    json_object_set_new(json, "initializer_range", json_real(0.1));
    assert_ok(ith_json_dump(json, false, &text, &err), err);
    json_decref(json);
    assert_ok(ith_write_file(small_join(dir, "config.json"), text.data, text.len, &err), err);
    assert_ok(ith_hf_config_parse(&config, text.data, text.len, "config.json", &err), err);
    assert_ok(ith_model_create(&m, &config, ITH_F32, 1, &err), err);
    int64_t count = small_tensors(m, &(small_layout){.dtype = ITH_F32}, tensors);
    for (int64_t i = 0; i < m->num_buffers; i++) {
        float values[64];
        bias_values(values, m->buffer_list[i].count);
        small_put_tensor(&tensors[count++], m->buffer_list[i].hf_name, ITH_F32, 1,
                         &m->buffer_list[i].count, values);
    }
    assert_ok(ith_st_write(dir, tensors, count, NULL, &err), err);
    for (int64_t i = 0; i < count; i++)
        ith_free((void *)(uintptr_t)tensors[i].data);
    assert_ok(ith_bpe_train(small_text, (int64_t)sizeof small_text - 1, 300, special, 4, dir, &err),
              err);
    small_write(dir, "chat_template.jinja",
                "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + "
                "'<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- "
                "'<|im_start|>assistant\\n' }}{%- endif %}");
    ith_model_destroy(m);
    ith_hf_config_deinit(&config);
    ith_buf_deinit(&text);
}

static int setup(void **state)
{
    (void)state;
    base = small_setup("diffusion");
    make_llada2(small_join(base, "m"));
    small_make_data(small_join(base, "data.jsonl"), 16);
    small_write(
        base, "facts.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Who crosses?\"}, "
        "{\"role\": \"assistant\", \"content\": \"The red fox crosses the river.\"}]}\n"
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Who sleeps?\"}, "
        "{\"role\": \"assistant\", \"content\": \"The grey owl sleeps in the tower.\"}]}\n");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_teardown(base);
    return 0;
}

#define DIFFUSION                                                                                  \
    "bf16: false\ndiffusion_config: {name: block_diffusion, block_size: 8, noise_range_high: 1.0"

/* One run; rows of the log in seen. */
static void train_on(const char *data, const char *model, const char *out, const char *more,
                     small_seen *seen)
{
    ith_error err = {0};
    ith_config c;
    ith_run_result result;
    memset(seen, 0, sizeof *seen);
    small_config(&c, model, small_join(base, data), out, more);
    assert_ok(small_train(&c, seen, &result, &err), err);
    ith_config_deinit(&c);
    ith_buf_deinit(&seen->news);
}

static void train(const char *model, const char *out, const char *more, small_seen *seen)
{
    train_on("data.jsonl", model, out, more, seen);
}

static void test_resumed_noise_is_the_same_noise(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_config c;
    ith_run_result result;
    static small_seen seen;
    char whole[1200], cut[1200];
    snprintf(whole, sizeof whole, "%s/whole", base);
    snprintf(cut, sizeof cut, "%s/cut", base);
    static const char more[] = DIFFUSION "}\nnum_train_epochs: 2\nglobal_batch_size: 4\n";
    train(small_join(base, "m"), whole, more, &seen);
    memset(&seen, 0, sizeof seen);
    seen.poll_at = 3;
    seen.poll_bits = ITH_POLL_STOP;
    small_config(&c, small_join(base, "m"), small_join(base, "data.jsonl"), cut, more);
    assert_ok(small_train(&c, &seen, &result, &err), err);
    ith_config_deinit(&c);
    ith_buf_deinit(&seen.news);
    train(small_join(base, "m"), cut,
          DIFFUSION "}\nnum_train_epochs: 2\nglobal_batch_size: 4\nresume_from_checkpoint: auto\n",
          &seen);
    assert_same_file(small_join(whole, "model.safetensors"), small_join(cut, "model.safetensors"));
}

static void test_accumulation_does_not_change_loss_or_gradient(void **state)
{
    (void)state;
    static small_seen a, b;
    train(small_join(base, "m"), small_join(base, "acc1"),
          DIFFUSION "}\nmax_steps: 2\nglobal_batch_size: 4\nmicro_batch_size: 1\n", &a);
    train(small_join(base, "m"), small_join(base, "acc4"),
          DIFFUSION "}\nmax_steps: 2\nglobal_batch_size: 4\nmicro_batch_size: 4\n", &b);
    for (int i = 0; i < 2; i++)
        if (!(fabs(a.rows[i].loss - b.rows[i].loss) <= 1e-5 * fabs(a.rows[i].loss)) ||
            !(fabs(a.rows[i].grad_norm - b.rows[i].grad_norm) <= 1e-4 * a.rows[i].grad_norm))
            fail_msg("step %d: loss %.9g norm %.9g, in one micro-batch %.9g and %.9g", i + 1,
                     a.rows[i].loss, a.rows[i].grad_norm, b.rows[i].loss, b.rows[i].grad_norm);
}

/* The mean over all masked tokens is one of the step, however it is cut; the mean over the right
 * ones of the only micro-batch is that times masked over right, a whole number of them. */
static void test_confidence_is_a_loss_of_the_whole_step(void **state)
{
    (void)state;
    static small_seen seen[4];
    static const char *const how[] = {
        "confidence_beta: 1.5}\nmicro_batch_size: 1\n",
        "confidence_beta: 1.5}\nmicro_batch_size: 2\n",
        "confidence_beta: 1.5, normalizer: micro_batch}\nmicro_batch_size: 2\n"};
    char from[1200];
    snprintf(from, sizeof from, "%s/half", base);
    train_on("facts.jsonl", small_join(base, "m"), from,
             DIFFUSION "}\nmax_steps: 40\nglobal_batch_size: 2\n",
             &seen[3]); /* so that some tokens are right */
    for (int i = 0; i < 3; i++) {
        char more[400];
        snprintf(more, sizeof more, DIFFUSION ", %smax_steps: 2\nglobal_batch_size: 2\n", how[i]);
        train_on("facts.jsonl", from, small_join(base, "sure"), more, &seen[i]);
    }
    for (int i = 0; i < 2; i++) {
        const ith_report_row *x = &seen[0].rows[i], *y = &seen[1].rows[i];
        if (!(x->aux_loss > 0) || !(fabs(x->aux_loss - y->aux_loss) <= 1e-5 * x->aux_loss) ||
            !(fabs(x->grad_norm - y->grad_norm) <= 1e-4 * x->grad_norm))
            fail_msg("step %d: confidence %.9g norm %.9g, in one micro-batch %.9g and %.9g", i + 1,
                     x->aux_loss, x->grad_norm, y->aux_loss, y->grad_norm);
    }
    const ith_report_row *y = &seen[1].rows[0];
    double right = y->aux_loss / seen[2].rows[0].aux_loss * (double)y->labels;
    if (!(right > 0.99) || fabs(right - round(right)) > 1e-3 || right > (double)y->labels)
        fail_msg("%.6f right tokens of %lld", right, (long long)y->labels);
}

static void test_merged_experts_train_to_the_same_bytes(void **state)
{
    (void)state;
    static small_seen seen;
    ith_error err = {0};
    ith_experts_report r;
    static const char more[] = DIFFUSION ", complementary: true, loss_weight: inverse}\n"
                                         "max_steps: 3\nglobal_batch_size: 2\n";
    char merged[1200], apart[1200], back[1200], source[1200];
    snprintf(source, sizeof source, "%s/m", base);
    snprintf(merged, sizeof merged, "%s/merged", base);
    snprintf(apart, sizeof apart, "%s/from-apart", base);
    snprintf(back, sizeof back, "%s/back", base);
    assert_ok(ith_experts_convert(source, merged, true, 0, &r, &err), err);
    train(source, apart, more, &seen);
    train(merged, small_join(base, "from-merged"), more, &seen);
    assert_ok(ith_experts_convert(small_join(base, "from-merged"), back, false, 0, &r, &err), err);
    assert_same_file(small_join(apart, "model.safetensors"), small_join(back, "model.safetensors"));
    /* the selection bias: neither trained nor converted */
    ith_st_reader *reader = NULL;
    assert_ok(ith_st_open(&reader, apart, &err), err);
    const ith_st_entry *e = ith_st_find(reader, "model.layers.2.mlp.gate.expert_bias");
    float values[8];
    assert_true(e && e->dtype == ITH_F32 && e->bytes == 32);
    bias_values(values, 8);
    assert_memory_equal(e->data, values, 32);
    ith_st_close(reader);
}

/* Bytes planned for one answer of `tokens`. */
static int64_t planned_bytes(int64_t tokens)
{
    ith_buf row = {0};
    ith_error err = {0};
    ith_config c;
    ith_trainer t;
    char more[200];
    ith_buf_puts(&row, "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, "
                       "{\"role\": \"assistant\", \"content\": \"");
    for (int64_t i = 0; i < tokens; i++)
        ith_buf_puts(&row, "1 ");
    ith_buf_puts(&row, "\"}]}\n");
    assert_ok(ith_write_file(small_join(base, "long.jsonl"), row.data, row.len, &err), err);
    snprintf(more, sizeof more, DIFFUSION "}\nmax_steps: 1\nmemory_limit: 1TiB\n");
    small_config(&c, small_join(base, "m"), small_join(base, "long.jsonl"), small_join(base, "no"),
                 more);
    c.cutoff_len = tokens;
    assert_ok(ith_trainer_open(&t, &c, true, NULL, &err), err);
    assert_true(t.step->config.max_tokens >= 2 * tokens);
    int64_t bytes = ith_plan_total(t.session.ctx.plan);
    ith_trainer_close(&t);
    ith_config_deinit(&c);
    ith_buf_deinit(&row);
    return bytes;
}

/* The mask of [noisy; clean] is never stored (cases S81): a byte a pair would be 4 GiB here. */
static void test_twice_the_length_plans_twice_the_memory(void **state)
{
    (void)state;
    int64_t half = planned_bytes(16384), whole = planned_bytes(32768);
    if ((double)whole > 2.05 * (double)half || whole >= (int64_t)2 << 30)
        fail_msg("%lld bytes for 32768 tokens, %lld for 16384", (long long)whole, (long long)half);
}

static void test_nothing_masked_is_a_step_of_zero(void **state)
{
    (void)state;
    static small_seen seen;
    train(small_join(base, "m"), small_join(base, "zero"),
          "bf16: false\ndiffusion_config: {name: random_mask, noise_range_low: 0, "
          "noise_range_high: 0}\nmax_steps: 1\n",
          &seen);
    assert_true(seen.rows[0].loss == 0 && seen.rows[0].grad_norm == 0);
}

static void test_what_does_not_fit_is_refused(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_config c;
    ith_run_result result;
    static small_seen seen;
    small_shape shape = small_dense;
    shape.vocab = 320;
    small_make_model(small_join(base, "causal"), &shape, &(small_layout){.dtype = ITH_F32});
    small_config(&c, small_join(base, "causal"), small_join(base, "data.jsonl"),
                 small_join(base, "no"), DIFFUSION "}\n");
    assert_fails(small_train(&c, &seen, &result, &err), err, ITH_ERR_USAGE,
                 "qwen3 is not a diffusion model");
    ith_config_deinit(&c);
    ith_error_clear(&err);
    small_config(&c, small_join(base, "m"), small_join(base, "data.jsonl"), small_join(base, "no"),
                 "router_aux_loss_coef: 0.1\n");
    assert_fails(small_train(&c, &seen, &result, &err), err, ITH_ERR_USAGE,
                 "balances its experts without a loss");
    ith_config_deinit(&c);
    ith_block_decoder d;
    ith_decoder_options o = {
        .device = ITH_USE_CPU, .threads = 1, .batch = 1, .capacity = 8, .max_append = 8};
    ith_error_clear(&err);
    assert_fails(ith_block_decoder_open(&d, small_join(base, "causal"), &o, 8, &err), err,
                 ITH_ERR_USAGE, "not a diffusion model");
}

/* Prompt of one user message. */
static void prompt_of(const ith_tokenizer *tok, const char *question, ith_ids *out)
{
    ith_error err = {0};
    char text[256];
    snprintf(text, sizeof text, "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n",
             question);
    assert_ok(ith_tokenizer_encode(tok, text, (int64_t)strlen(text), out, &err), err);
}

static void check_answers(const char *dir, const char *const *questions, const char *const *answers)
{
    ith_error err = {0};
    ith_tokenizer *tok = NULL;
    ith_block_decoder d;
    ith_block_answer out[2];
    ith_ids prompts[2] = {{0}, {0}};
    assert_ok(ith_tokenizer_open(&tok, dir, &err), err);
    int32_t stop = ith_tokenizer_find(tok, "<|im_end|>");
    for (int i = 0; i < 2; i++)
        prompt_of(tok, questions[i], &prompts[i]);
    int64_t longest = ith_max_i64(prompts[0].count, prompts[1].count);
    ith_decoder_options o = {.device = ITH_USE_CPU,
                             .threads = 1,
                             .batch = 2,
                             .capacity = ith_block_row_len(longest, 48, BLOCK),
                             .max_append = 2 * longest};
    assert_ok(ith_block_decoder_open(&d, dir, &o, BLOCK, &err), err);
    ith_block_how how = {.block = BLOCK,
                         .steps = BLOCK,
                         .minimal_topk = 1,
                         .threshold = 0.9,
                         .max_new = 48,
                         .mask_id = (int32_t)ith_llada2_mask_id(&d.hf, tok),
                         .stop_ids = &stop,
                         .num_stop_ids = 1};
    assert_ok(ith_block_decoder_generate(&d, prompts, 2, &how, out, &err), err);
    for (int i = 0; i < 2; i++) {
        ith_buf text = {0};
        int64_t tokens = out[i].end - out[i].prompt;
        assert_ok(
            ith_tokenizer_decode(tok, out[i].row.ids + out[i].prompt, tokens, true, &text, &err),
            err);
        assert_string_equal(text.data ? text.data : "", answers[i]);
        if (out[i].steps + out[i].commits >= tokens)
            fail_msg("%lld forwards for %lld tokens", (long long)(out[i].steps + out[i].commits),
                     (long long)tokens);
        ith_buf_deinit(&text);
        ith_block_answer_deinit(&out[i]);
        ith_ids_free(&prompts[i]);
    }
    ith_block_decoder_close(&d);
    ith_tokenizer_close(tok);
}

static void test_what_was_learned_is_written_in_fewer_forwards_than_tokens(void **state)
{
    (void)state;
    static const char *const questions[] = {"Who crosses?", "Who sleeps?"};
    static const char *const answers[] = {"The red fox crosses the river.",
                                          "The grey owl sleeps in the tower."};
    ith_error err = {0};
    ith_config c;
    ith_run_result result;
    static small_seen seen;
    small_config(&c, small_join(base, "m"), small_join(base, "facts.jsonl"),
                 small_join(base, "learned"),
                 DIFFUSION "}\nmax_steps: 250\nglobal_batch_size: 2\nmicro_batch_size: 2\n"
                           "lr_scheduler_config: {name: cosine}\nlogging_steps: 250\n");
    memset(&seen, 0, sizeof seen);
    assert_ok(small_train(&c, &seen, &result, &err), err);
    ith_config_deinit(&c);
    ith_buf_deinit(&seen.news);
    check_answers(small_join(base, "learned"), questions, answers);
}

enum { MASK_ROW = 319 }; /* any id does for a model that was not trained */

/* One block after a prompt of 3 tokens, by a model that knows nothing; edits: at this threshold, or
 * -1 for none. */
static ith_block_answer write_block(ith_block_decoder *d, int32_t first, double edits, int64_t post)
{
    ith_error err = {0};
    int32_t prompt[] = {first, 22, 33};
    ith_ids prompts = {.ids = prompt, .count = 3};
    ith_block_answer a;
    ith_block_how how = {.block = BLOCK,
                         .steps = BLOCK,
                         .minimal_topk = 1,
                         .threshold = 2,
                         .max_new = BLOCK - 3,
                         .edit = edits >= 0,
                         .edit_threshold = edits,
                         .max_post_steps = post,
                         .mask_id = MASK_ROW};
    assert_ok(ith_block_decoder_generate(d, &prompts, 1, &how, &a, &err), err);
    assert_memory_equal(a.row.ids, prompt, sizeof prompt);
    return a;
}

/* The likeliest id but the mask at row p of the last forward, and its probability. */
static int32_t likeliest(const ith_block_decoder *d, int64_t p, double *probability)
{
    int64_t vocab = d->hf.vocab_size, mask = MASK_ROW, best = 0;
    const float *z = (const float *)d->logits.data + p * vocab;
    double sum = 0;
    for (int64_t v = 0; v < vocab; v++)
        best = v != mask && z[v] > z[best] ? v : best;
    for (int64_t v = 0; v < vocab; v++)
        sum += exp((double)z[v] - (double)z[best]);
    *probability = 1 / sum;
    return (int32_t)best;
}

/* At rest: at every written token the likeliest id, or none likely enough. */
static void check_rest(const ith_block_decoder *d, const ith_block_answer *a, double threshold)
{
    for (int64_t p = 3; p < BLOCK; p++) {
        double probability = 0;
        int32_t best = likeliest(d, p, &probability);
        if (a->row.ids[p] != best && probability > threshold)
            fail_msg("threshold %g, position %d: id %d, the model says %d with %g", threshold,
                     (int)p, (int)a->row.ids[p], (int)best, probability);
    }
}

/* Edits that nothing is likely enough for change no token, and cost one look. Others go on until
 * the block is what the model says of it, by its own logits, which the test reads; or, where the
 * model goes round in a circle, until the last post step. */
static void test_edits_end_in_what_the_model_says(void **state)
{
    (void)state;
    enum { POST = 40 };
    ith_error err = {0};
    ith_block_decoder d;
    ith_decoder_options o = {
        .device = ITH_USE_CPU, .threads = 1, .batch = 1, .capacity = BLOCK, .max_append = 8};
    assert_ok(ith_block_decoder_open(&d, small_join(base, "m"), &o, BLOCK, &err), err);
    int rests = 0, edits = 0;
    for (int32_t first = 0; first < 24; first++) {
        ith_block_answer plain = write_block(&d, first, -1, POST),
                         never = write_block(&d, first, 1, POST),
                         none = write_block(&d, first, 0, 0);
        assert_int_equal(plain.steps, 3); /* quotas of 2, 2, 1 */
        assert_int_equal(never.steps, 4);
        assert_int_equal(none.steps, 3);
        assert_int_equal(plain.edits + never.edits, 0);
        assert_memory_equal(plain.row.ids, never.row.ids, BLOCK * 4);
        for (int k = 0; k < 2; k++) {
            double threshold = k ? 0.02 : 0;
            ith_block_answer a = write_block(&d, first, threshold, POST);
            assert_true(a.steps <= 3 + POST);
            if (a.steps < 3 + POST) {
                check_rest(&d, &a, threshold);
                rests++;
                edits += a.edits > 0;
            }
            ith_block_answer_deinit(&a);
        }
        ith_block_answer_deinit(&plain);
        ith_block_answer_deinit(&never);
        ith_block_answer_deinit(&none);
    }
    if (rests < 10 || edits < 5)
        fail_msg("%d of 48 blocks came to rest, %d of them edited", rests, edits);
    ith_block_decoder_close(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_resumed_noise_is_the_same_noise),
        cmocka_unit_test(test_accumulation_does_not_change_loss_or_gradient),
        cmocka_unit_test(test_confidence_is_a_loss_of_the_whole_step),
        cmocka_unit_test(test_merged_experts_train_to_the_same_bytes),
        cmocka_unit_test(test_twice_the_length_plans_twice_the_memory),
        cmocka_unit_test(test_nothing_masked_is_a_step_of_zero),
        cmocka_unit_test(test_what_does_not_fit_is_refused),
        cmocka_unit_test(test_edits_end_in_what_the_model_says),
        cmocka_unit_test(test_what_was_learned_is_written_in_fewer_forwards_than_tokens),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
