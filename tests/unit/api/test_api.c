/* test_api.c - include/ithaca.h on a tiny model: answers, stops, hooks, and what its errors say. */
#include <ithaca.h>

#include <math.h>

#include "testing.h"

#include "checkpoint/model_dir.h"
#include "model/model.h"
#include "model/presets.h"
#include "tokenizer/tokenizer.h"

static const char corpus[] =
    "Ulysses set sail for Ithaca with twelve ships. The sea had other plans. The ships sailed on, "
    "and the sea was wide. Who sailed with Ulysses? Twelve ships sailed with Ulysses. Where did "
    "the ships sail? The ships sailed home over the wide sea, home to Ithaca.\n";

static char model_path[4096], data_path[4096], out_path[4096];

static void write_weights(const ith_model *m, const char *dir, ith_error *err)
{
    ith_st_entry *tensors = calloc((size_t)m->num_pieces, sizeof *tensors);
    ith_st_writer *w = NULL;
    assert_non_null(tensors);
    for (int64_t i = 0; i < m->num_pieces; i++) {
        tensors[i] = (ith_st_entry){
            .name = m->pieces[i].hf_name, .dtype = ITH_F32, .ndim = m->pieces[i].ndim};
        memcpy(tensors[i].shape, m->pieces[i].shape, sizeof m->pieces[i].shape);
    }
    assert_ok(ith_st_writer_create(&w, dir, tensors, m->num_pieces, NULL, err), *err);
    for (int64_t i = ith_st_writer_next(w); i >= 0; i = ith_st_writer_next(w)) {
        float *values = malloc((size_t)m->pieces[i].count * sizeof *values);
        assert_non_null(values);
        ith_model_init_piece(m, &m->pieces[i], 7, 0, m->pieces[i].count, values);
        assert_ok(ith_st_writer_push(w, values, m->pieces[i].count * 4, err), *err);
        free(values);
    }
    assert_ok(ith_st_writer_commit(w, err), *err);
    ith_st_writer_destroy(w);
    free(tensors);
}

static void write_text(const char *dir, const char *name, const char *text, ith_error *err)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_ok(ith_write_file(path, text, (int64_t)strlen(text), err), *err);
}

/* A model directory, and a data set of one conversation repeated. */
static int setup(void **state)
{
    static const char *const special[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    const char *dir = temp_dir("api");
    ith_error err = {0};
    ith_tokenizer *tok = NULL;
    json_t *json = NULL;
    ith_hf_config config = {0};
    ith_model *model = NULL;
    (void)state;
    snprintf(model_path, sizeof model_path, "%.4000s/model", dir);
    snprintf(data_path, sizeof data_path, "%.4000s/data.jsonl", dir);
    snprintf(out_path, sizeof out_path, "%.4000s/out", dir);
    assert_ok(ith_make_dirs(model_path, &err), err);
    assert_ok(ith_bpe_train(corpus, (int64_t)sizeof corpus - 1, 320, special, 3, model_path, &err),
              err);
    assert_ok(ith_tokenizer_open(&tok, model_path, &err), err);
    int64_t vocab = ith_tokenizer_size(tok);
    int32_t eos = ith_tokenizer_find(tok, "<|im_end|>");
    ith_tokenizer_close(tok);
    assert_ok(ith_preset_config(ith_preset_find("tiny"), vocab, eos, ITH_F32, &json, &err), err);
    char *text = json_dumps(json, 0);
    json_decref(json);
    assert_ok(ith_hf_config_parse(&config, text, (int64_t)strlen(text), "config.json", &err), err);
    assert_ok(ith_model_create(&model, &config, ITH_F32, 1, &err), err);
    write_weights(model, model_path, &err);
    write_text(model_path, "config.json", text, &err);
    ith_free(text);
    ith_model_destroy(model);
    ith_hf_config_deinit(&config);
    ith_buf rows = {0};
    for (int i = 0; i < 8; i++)
        ith_buf_puts(&rows, "{\"instruction\": \"Who sailed with Ulysses?\", \"input\": \"\", "
                            "\"output\": \"Twelve ships.\"}\n");
    write_text(dir, "data.jsonl", rows.data, &err);
    ith_buf_deinit(&rows);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ith_error err = {0};
    *strrchr(model_path, '/') = '\0';
    assert_ok(ith_remove_tree(model_path, &err), err);
    return 0;
}

/* ---- training ---- */

typedef struct {
    int64_t calls, evals, last_step, stop_after;
    int news;
    double last_loss;
} observed;

static void on_progress(void *arg, const ithaca_progress *p)
{
    observed *o = arg;
    if (p->is_eval) {
        o->evals++;
        assert_true(isfinite(p->loss) && p->grad_norm == 0 && isnan(p->mfu));
        return;
    }
    o->calls++;
    o->last_step = p->step;
    o->last_loss = p->loss;
    assert_true(p->total_steps > 0 && p->step <= p->total_steps && p->peak_bytes > 0);
}

static int on_poll(void *arg)
{
    observed *o = arg;
    return o->stop_after && o->last_step >= o->stop_after ? ITHACA_STOP : ITHACA_GO_ON;
}

static void on_news(void *arg, const char *line)
{
    observed *o = arg;
    assert_true(line[0] != '\0');
    o->news++;
}

static ithaca_status train(observed *o, const char *more, ithaca_train_result *out,
                           ithaca_error *err)
{
    char keys[3][4200];
    snprintf(keys[0], sizeof keys[0], "model=%s", model_path);
    snprintf(keys[1], sizeof keys[1], "train_dataset=%s", data_path);
    snprintf(keys[2], sizeof keys[2], "output_dir=%s", out_path);
    const char *overrides[] = {keys[0],          keys[1],      keys[2],
                               "max_steps=6",    "bf16=false", "device=cpu",
                               "report_to=none", "threads=1",  more};
    ithaca_train_hooks hooks = {on_poll, on_progress, on_news, o};
    return ithaca_train(NULL, overrides, more ? 9 : 8, &hooks, out, err);
}

/* Each step is told, results agree with what was told, and no hook is needed. */
static void test_train_reports_every_step(void **state)
{
    (void)state;
    observed o = {0};
    ithaca_train_result r;
    ithaca_error err;
    if (train(&o, "eval_split_ratio=0.3", &r, &err) != ITHACA_OK)
        fail_msg("%s", err.text);
    assert_string_equal(err.text, "");
    assert_int_equal(o.calls, 6);
    assert_int_equal(r.steps, 6);
    assert_true(o.evals > 0 && o.news > 0);
    assert_true(r.last_loss == o.last_loss && r.last_loss < r.first_loss && isfinite(r.eval_loss));
    const char *overrides[] = {"train_dataset=/nowhere"};
    assert_int_equal(ithaca_train(NULL, overrides, 1, NULL, NULL, NULL), ITHACA_WRONG);
}

/* Stop and resume = the uninterrupted run, bit for bit. */
static void test_train_stopped_goes_on_to_the_same_loss(void **state)
{
    (void)state;
    observed whole = {0}, first = {.stop_after = 2}, second = {0};
    ithaca_train_result r = {.steps = -1};
    ithaca_error err;
    assert_int_equal(train(&whole, NULL, &r, &err), ITHACA_OK);
    double wanted = r.last_loss;
    assert_int_equal(train(&first, NULL, &r, &err), ITHACA_STOPPED);
    assert_int_equal(r.steps, 2);
    assert_non_null(strstr(err.text, "resume_from_checkpoint=auto"));
    assert_int_equal(train(&second, "resume_from_checkpoint=auto", &r, &err), ITHACA_OK);
    assert_int_equal(r.steps, 4);
    if (r.last_loss != wanted)
        fail_msg("loss after resume %.17g, uninterrupted %.17g", r.last_loss, wanted);
}

static void test_train_unknown_key_names_the_nearest(void **state)
{
    (void)state;
    observed o = {0};
    ithaca_train_result r = {.steps = -1};
    ithaca_error err;
    assert_int_equal(train(&o, "learning_rat=1", &r, &err), ITHACA_WRONG);
    if (!strstr(err.text, "learning_rate"))
        fail_msg("'%s' does not name learning_rate", err.text);
    assert_int_equal(r.steps, -1); /* untouched */
}

static int num_logged;
static void on_log(void *arg, ithaca_log_level level, const char *text)
{
    assert_ptr_equal(arg, &num_logged);
    assert_true(level >= ITHACA_DEBUG && level <= ITHACA_ERROR && text[0]);
    num_logged++;
}

static void test_log_goes_to_the_callback_until_taken_away(void **state)
{
    (void)state;
    observed o = {0};
    ithaca_set_log(on_log, &num_logged);
    assert_int_equal(train(&o, "max_steps=1", NULL, NULL), ITHACA_OK);
    int seen = num_logged;
    assert_true(seen > 0);
    ithaca_set_log(NULL, NULL);
    assert_int_equal(train(&o, "max_steps=1", NULL, NULL), ITHACA_OK);
    assert_int_equal(num_logged, seen);
}

/* ---- generation ---- */

typedef struct {
    char text[4096];
    size_t len;
    int pieces, most; /* most > 0: no more pieces than that */
} written;

static bool on_text(void *arg, const char *text, size_t len)
{
    written *w = arg;
    assert_true(len > 0 && w->len + len < sizeof w->text);
    memcpy(w->text + w->len, text, len);
    w->len += len;
    w->text[w->len] = '\0';
    return ++w->pieces != w->most;
}

static ithaca_model *open_model(int64_t context)
{
    ithaca_model_options options;
    ithaca_model *model = NULL;
    ithaca_error err;
    ithaca_model_options_init(&options);
    options.context = context;
    options.device = "cpu";
    options.threads = 1;
    if (ithaca_model_open(&model, model_path, &options, &err) != ITHACA_OK)
        fail_msg("%s", err.text);
    return model;
}

/* The same question and seed give the same answer, after another question as well. */
static void test_chat_same_question_same_answer(void **state)
{
    (void)state;
    const ithaca_message question = {"user", "Who sailed with Ulysses?"},
                         other = {"user", "Where did the ships sail?"};
    ithaca_model *m = open_model(256);
    ithaca_sampling s;
    ithaca_answer a, b;
    written first = {0}, between = {0}, again = {0};
    ithaca_error err;
    ithaca_sampling_init(m, &s);
    s.max_new_tokens = 12;
    s.do_sample = true;
    s.temperature = 1.0;
    assert_int_equal(ithaca_chat(m, &question, 1, &s, on_text, &first, &a, &err), ITHACA_OK);
    assert_int_equal(ithaca_chat(m, &other, 1, &s, on_text, &between, NULL, &err), ITHACA_OK);
    assert_int_equal(ithaca_chat(m, &question, 1, &s, on_text, &again, &b, &err), ITHACA_OK);
    assert_string_equal(first.text, again.text);
    assert_int_equal(a.new_tokens, b.new_tokens);
    assert_true(a.prompt_tokens > 8 && a.new_tokens <= 12);
    ithaca_model_close(m);
}

/* A callback that has enough ends the answer; the context ends it as well. */
static void test_complete_ends_where_it_is_told(void **state)
{
    (void)state;
    ithaca_model *m = open_model(24);
    ithaca_sampling s;
    ithaca_answer a;
    written few = {.most = 2}, all = {0};
    ithaca_error err;
    ithaca_sampling_init(m, &s);
    assert_int_equal(ithaca_complete(m, "The ships", &s, on_text, &few, &a, &err), ITHACA_OK);
    assert_int_equal(few.pieces, 2);
    assert_false(a.stopped);
    assert_int_equal(ithaca_complete(m, "The ships", &s, on_text, &all, &a, &err), ITHACA_OK);
    assert_true(a.stopped || a.prompt_tokens + a.new_tokens == 24);
    assert_int_equal(ithaca_complete(m, "The ships", NULL, NULL, NULL, NULL, NULL), ITHACA_OK);
    ithaca_model_close(m);
}

static void test_prompt_that_cannot_be_answered_is_refused(void **state)
{
    (void)state;
    ithaca_model *m = open_model(16);
    ithaca_sampling s;
    ithaca_error err;
    ithaca_answer a = {.new_tokens = -1};
    const ithaca_message bad = {"user", NULL};
    assert_int_equal(ithaca_complete(m, corpus, NULL, NULL, NULL, &a, &err), ITHACA_WRONG);
    assert_non_null(strstr(err.text, "a context of 16 leaves no room"));
    assert_int_equal(ithaca_complete(m, "", NULL, NULL, NULL, &a, &err), ITHACA_WRONG);
    assert_non_null(strstr(err.text, "the prompt is empty"));
    assert_int_equal(ithaca_chat(m, &bad, 1, NULL, NULL, NULL, &a, &err), ITHACA_WRONG);
    assert_non_null(strstr(err.text, "message 1: role and content"));
    ithaca_sampling_init(m, &s);
    s.max_new_tokens = 0;
    assert_int_equal(ithaca_complete(m, "The", &s, NULL, NULL, &a, &err), ITHACA_WRONG);
    assert_int_equal(a.new_tokens, -1); /* untouched */
    ithaca_model_close(m);
}

static void test_open_says_what_is_wrong(void **state)
{
    (void)state;
    ithaca_model_options options;
    ithaca_model *model = NULL;
    ithaca_error err;
    ithaca_model_options_init(&options);
    options.device = "tpu";
    assert_int_equal(ithaca_model_open(&model, model_path, &options, &err), ITHACA_WRONG);
    assert_non_null(strstr(err.text, "device: 'tpu' (use auto, cpu or cuda)"));
    assert_int_not_equal(ithaca_model_open(&model, "/nowhere", NULL, &err), ITHACA_OK);
    assert_non_null(strstr(err.text, "/nowhere"));
    assert_null(model);
    ithaca_model_close(NULL);
}

/* Every allocation that opening makes may fail: one text each time, no leak (under ASan). */
static void test_open_failing_allocations_leave_nothing(void **state)
{
    (void)state;
    ithaca_model_options options;
    ithaca_model_options_init(&options);
    options.context = 16;
    options.device = "cpu";
    options.threads = 1;
    int64_t n = 1;
    for (bool done = false; !done; n += 1 + n / 40) {
        ithaca_model *model = NULL;
        ithaca_error err;
        ith_fault_set(ITH_FAULT_ALLOC, n);
        ithaca_status status = ithaca_model_open(&model, model_path, &options, &err);
        done = ith_fault_count(ITH_FAULT_ALLOC) < n;
        ith_fault_set(ITH_FAULT_ALLOC, 0);
        if (status == ITHACA_OK ? !model : (model || !err.text[0]))
            fail_msg("allocation %lld: status %d, text '%s'", (long long)n, (int)status, err.text);
        ithaca_model_close(model);
    }
    assert_true(n > 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_train_reports_every_step),
        cmocka_unit_test(test_train_stopped_goes_on_to_the_same_loss),
        cmocka_unit_test(test_train_unknown_key_names_the_nearest),
        cmocka_unit_test(test_log_goes_to_the_callback_until_taken_away),
        cmocka_unit_test(test_chat_same_question_same_answer),
        cmocka_unit_test(test_complete_ends_where_it_is_told),
        cmocka_unit_test(test_prompt_that_cannot_be_answered_is_refused),
        cmocka_unit_test(test_open_says_what_is_wrong),
        cmocka_unit_test(test_open_failing_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
