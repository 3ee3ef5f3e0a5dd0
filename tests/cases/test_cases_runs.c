/* Whole runs that came out wrong elsewhere: too few rows, accumulation, wide vocabularies, weights
 * that are missing, dtypes that change, memory that grows. */
#include "cases.h"

#include <math.h>
#include <sys/wait.h>

static int setup(void **state)
{
    (void)state;
    return case_setup("cases_runs");
}

static ith_error err;

/* Trains the model directory `model` (below the root) with more lines of config into out. */
static ith_status run(const char *model, const char *out, const char *more, small_seen *seen,
                      ith_run_result *result)
{
    ith_config c;
    memset(seen, 0, sizeof *seen);
    small_config(&c, small_join(case_root, model), small_join(case_root, "data.jsonl"),
                 small_join(case_root, out), more);
    ith_status status = small_train(&c, seen, result, &err);
    ith_config_deinit(&c);
    ith_buf_deinit(&seen->news);
    return status;
}

static void run_ok(const char *model, const char *out, const char *more, small_seen *seen,
                   ith_run_result *result)
{
    if (run(model, out, more, seen, result) != ITH_OK)
        fail_msg("%s: %s", more, err.text);
}

/* 12 rows (all_turns: 12 samples) in global batches of 8 and 32: the last, or only, step holds what
 * is left. */
static void test_rows_that_do_not_fill_a_batch_are_trained(void **state)
{
    (void)state;
    static small_seen seen;
    ith_run_result r;
    run_ok("model", "few", "num_train_epochs: 1\nglobal_batch_size: 32\n", &seen, &r);
    assert_int_equal(r.steps, 1);
    assert_true(isfinite(r.last_loss) && r.last_loss > 0);
    run_ok("model", "few", "num_train_epochs: 2\nglobal_batch_size: 8\n", &seen, &r);
    assert_int_equal(r.steps, 4);
}

/* Goal: loss and gradient norm of a step do not depend on how its rows are cut into micro-batches,
 * nor on the chunk of the loss; rows have different lengths and the last step is a short one. */
static void test_any_cut_of_a_step_is_the_same_step(void **state)
{
    (void)state;
    static const char *const cuts[] = {
        "micro_batch_size: 5\nglobal_batch_size: 5\n",
        "micro_batch_size: 1\nglobal_batch_size: 5\n",
        "micro_batch_size: 1\nglobal_batch_size: 5\nchunk_loss_size: 1000000000\n",
        "micro_batch_size: 5\nglobal_batch_size: 5\nchunk_loss_size: 3\n"};
    static small_seen first, other;
    ith_run_result r;
    for (int i = 0; i < 4; i++) {
        char more[300];
        snprintf(more, sizeof more, "%snum_train_epochs: 1\ndtype: float32\n", cuts[i]);
        small_seen *s = i ? &other : &first;
        run_ok("model", "cut", more, s, &r);
        assert_int_equal(s->num_rows, 3);
        for (int k = 0; i && k < 3; k++) {
            double dl = fabs(s->rows[k].loss / first.rows[k].loss - 1),
                   dn = fabs(s->rows[k].grad_norm / first.rows[k].grad_norm - 1);
            if (!(dl < 2e-5) || !(dn < 2e-4))
                fail_msg("%sstep %d: loss %.9g, whole %.9g; norm %.9g, whole %.9g", cuts[i], k + 1,
                         s->rows[k].loss, first.rows[k].loss, s->rows[k].grad_norm,
                         first.rows[k].grad_norm);
        }
    }
}

/* Warm-up counts optimizer steps: with a quarter of 8 steps the peak is reached at step 2, whatever
 * the accumulation. The k-th update takes the rate after k - 1 steps. */
static void test_warmup_counts_optimizer_steps(void **state)
{
    (void)state;
    static small_seen seen[2];
    static const char *const accumulate[] = {"", "micro_batch_size: 1\nglobal_batch_size: 2\n"};
    ith_run_result r;
    for (int i = 0; i < 2; i++) {
        char more[300];
        snprintf(more, sizeof more,
                 "%smax_steps: 8\nlr_scheduler_config: {name: linear, warmup_ratio: 0.25}\n",
                 accumulate[i]);
        run_ok("model", "warm", more, &seen[i], &r);
        assert_int_equal(seen[i].num_rows, 8);
        int peak = 0;
        for (int k = 1; k < 8; k++)
            if (seen[i].rows[k].learning_rate > seen[i].rows[peak].learning_rate)
                peak = k;
        if (peak != 2)
            fail_msg("accumulation %d: the highest rate is that of update %d, expected 3", i + 1,
                     peak + 1);
        assert_true(fabs(seen[i].rows[2].learning_rate - 1e-2) < 1e-9);
    }
}

/* Evaluation between steps leaves no trace in the training losses. */
static void test_evaluation_changes_no_training_loss(void **state)
{
    (void)state;
    static small_seen plain, with;
    ith_run_result r;
    char more[4400];
    run_ok("model", "eval", "max_steps: 6\n", &plain, &r);
    snprintf(more, sizeof more, "max_steps: 6\neval_dataset: %s\neval_steps: 2\n",
             small_join(case_root, "data.jsonl"));
    run_ok("model", "eval", more, &with, &r);
    int k = 0, evals = 0;
    for (int i = 0; i < with.num_rows; i++) {
        if (with.rows[i].is_eval) {
            evals++;
            continue;
        }
        assert_true(k < plain.num_rows);
        if (with.rows[i].loss != plain.rows[k].loss)
            fail_msg("step %d: %.17g with evaluation, %.17g without", k + 1, with.rows[i].loss,
                     plain.rows[k].loss);
        k++;
    }
    assert_int_equal(k, 6);
    assert_true(evals >= 3);
}

static ith_st_reader *open_weights(const char *dir)
{
    ith_st_reader *r = NULL;
    assert_ok(ith_st_open(&r, small_join(case_root, dir), &err), err);
    return r;
}

/* Goal: a run in float32 on bf16 weights gives back every name, shape and type of the source: the
 * embedding with all its rows (20 more than the tokenizer knows), what was kept in F32, and what no
 * model of ours knows bit for bit; in as many bytes. */
static void test_output_has_names_shapes_and_types_of_the_source(void **state)
{
    (void)state;
    static small_seen seen;
    ith_run_result r;
    small_shape shape = small_dense;
    shape.vocab = 320;
    small_make_model(small_join(case_root, "extra"), &shape,
                     &(small_layout){.dtype = ITH_BF16, .extra = true});
    run_ok("extra", "typed", "max_steps: 1\ndtype: float32\n", &seen, &r);
    ith_st_reader *a = open_weights("extra"), *b = open_weights("typed");
    assert_int_equal(ith_st_count(a), ith_st_count(b));
    assert_int_equal(ith_st_total_bytes(a), ith_st_total_bytes(b));
    int changed = 0;
    for (int64_t i = 0; i < ith_st_count(a); i++) {
        const ith_st_entry *x = ith_st_at(a, i), *y = ith_st_find(b, x->name);
        if (!y || x->dtype != y->dtype || !ith_st_has_shape(y, x->ndim, x->shape))
            fail_msg("%s is another one, or missing", x->name);
        int64_t bytes = ith_st_numel(x) * ith_dtype_bytes(x->dtype);
        bool same = memcmp(x->data, y->data, (size_t)bytes) == 0;
        bool foreign = strncmp(x->name, "mtp.", 4) == 0 || strstr(x->name, "A_log") ||
                       strcmp(x->name, "counter") == 0;
        if (foreign && !same)
            fail_msg("%s: not trained, but changed", x->name);
        changed += !same;
    }
    assert_true(changed > 10);
    ith_st_close(a);
    ith_st_close(b);
}

/* `to` is `from` without the tensors whose names contain `part`. */
static void copy_without(const char *from, const char *to, const char *part)
{
    static const char *const files[] = {"config.json", "tokenizer.json", "tokenizer_config.json",
                                        "chat_template.jinja"};
    static ith_st_entry kept[256];
    int64_t count = 0;
    assert_ok(ith_make_dirs(small_join(case_root, to), &err), err);
    for (int i = 0; i < 4; i++)
        assert_ok(ith_copy_file(small_join(small_join(case_root, from), files[i]),
                                small_join(small_join(case_root, to), files[i]), &err),
                  err);
    ith_st_reader *r = open_weights(from);
    for (int64_t i = 0; i < ith_st_count(r); i++)
        if (!strstr(ith_st_at(r, i)->name, part))
            kept[count++] = *ith_st_at(r, i);
    assert_ok(ith_st_write(small_join(case_root, to), kept, count, NULL, &err), err);
    ith_st_close(r);
}

/* A tensor that is not there is named; it never stays random. */
static void test_missing_weights_are_named(void **state)
{
    (void)state;
    static small_seen seen;
    ith_run_result r;
    small_shape moe = small_moe, tied = small_tied;
    moe.vocab = tied.vocab = 320;
    small_make_model(small_join(case_root, "moe"), &moe, &(small_layout){.dtype = ITH_BF16});
    copy_without("moe", "moe_short", "layers.1.mlp.experts.3.up_proj");
    if (run("moe_short", "lost", "max_steps: 1\n", &seen, &r) == ITH_OK ||
        !strstr(err.text, "model.layers.1.mlp.experts.3.up_proj.weight"))
        fail_msg("'%s' does not name the expert", err.text);
    copy_without("model", "headless", "lm_head.weight");
    if (run("headless", "lost", "max_steps: 1\n", &seen, &r) == ITH_OK ||
        !strstr(err.text, "lm_head.weight") || !strstr(err.text, "tie_word_embeddings"))
        fail_msg("'%s' does not name lm_head.weight and the key that would do without", err.text);
    small_make_model(small_join(case_root, "tied"), &tied, &(small_layout){.dtype = ITH_BF16});
    run_ok("tied", "tied_out", "max_steps: 1\n", &seen, &r);
    ith_st_reader *out = open_weights("tied_out");
    assert_null(ith_st_find(out, "lm_head.weight"));
    ith_st_close(out);
}

/* A config that is not that of the weights is told by tensor and key. */
static void test_other_shapes_name_the_keys(void **state)
{
    (void)state;
    static const char *const changes[][3] = {
        {"\"vocab_size\": 320", "\"vocab_size\": 384",
         "model.embed_tokens.weight: shape [320, 48], expected [384, 48] (vocab_size, "
         "hidden_size)"},
        {"\"intermediate_size\": 80", "\"intermediate_size\": 96",
         "mlp.gate_proj.weight: shape [80, 48], expected [96, 48] (intermediate_size, "
         "hidden_size)"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4",
         "self_attn.k_proj.weight: shape [32, 48], expected [64, 48] (num_key_value_heads, "
         "head_dim, "
         "hidden_size)"}};
    static small_seen seen;
    ith_run_result r;
    copy_without("model", "other", "no such tensor");
    for (int i = 0; i < 3; i++) {
        ith_buf text = {0}, changed = {0};
        assert_ok(ith_read_file(small_join(case_root, "model/config.json"), 0, &text, &err), err);
        const char *at = strstr(text.data, changes[i][0]);
        assert_non_null(at);
        ith_buf_append(&changed, text.data, at - text.data);
        ith_buf_puts(&changed, changes[i][1]);
        ith_buf_puts(&changed, at + strlen(changes[i][0]));
        small_write(case_root, "other/config.json", changed.data);
        if (run("other", "lost", "max_steps: 1\n", &seen, &r) == ITH_OK ||
            !strstr(err.text, changes[i][2]))
            fail_msg("'%s' is not in: %s", changes[i][2], err.text);
        ith_buf_deinit(&text);
        ith_buf_deinit(&changed);
    }
}

/* Bytes planned on the device for one document of `tokens`. */
static int64_t planned(const char *model, int64_t tokens, const char *more)
{
    ith_buf row = {0}, text = {0};
    ith_config c;
    ith_trainer t;
    ith_buf_puts(&row,
                 "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\","
                 "\"content\":\"");
    for (int64_t i = 0; i < tokens; i++)
        ith_buf_puts(&row, "1 ");
    ith_buf_puts(&row, "\"}]}\n");
    assert_ok(ith_write_file(small_join(case_root, "long.jsonl"), row.data, row.len, &err), err);
    ith_buf_printf(&text,
                   "model: %s/%s\ntrain_dataset: %s/long.jsonl\noutput_dir: %s/x\ndevice: cpu\n"
                   "threads: 2\ncutoff_len: %lld\nmax_steps: 1\nmemory_limit: 1TiB\n%s",
                   case_root, model, case_root, case_root, (long long)tokens, more);
    assert_ok(ith_config_parse(&c, text.data, text.len, "t.yaml", NULL, 0, &err), err);
    assert_ok(ith_trainer_open(&t, &c, true, NULL, &err), err);
    assert_int_equal(t.step->config.max_tokens, tokens);
    int64_t bytes = ith_plan_total(t.session.ctx.plan);
    ith_trainer_close(&t);
    ith_config_deinit(&c);
    ith_buf_deinit(&row);
    ith_buf_deinit(&text);
    return bytes;
}

/* The logits of a long document are never there at once, and the load balancing loss keeps counts,
 * not one number per token, layer, choice and expert. */
static void test_long_documents_need_no_quadratic_or_whole_logits(void **state)
{
    (void)state;
    small_shape wide = small_tied, moe = small_moe;
    wide.vocab = 151936;
    wide.layers = 1;
    moe.vocab = 320;
    small_make_model(small_join(case_root, "wide"), &wide, &(small_layout){.dtype = ITH_BF16});
    int64_t tokens = 32768, logits = tokens * wide.vocab * 4;
    int64_t bytes = planned("wide", tokens, "");
    if (bytes > logits / 8)
        fail_msg("%lld bytes planned; the logits alone would be %lld", (long long)bytes,
                 (long long)logits);
    small_make_model(small_join(case_root, "moe2"), &moe, &(small_layout){.dtype = ITH_BF16});
    int64_t off = planned("moe2", 4 * tokens, "router_aux_loss_coef: 0.0\n"),
            on = planned("moe2", 4 * tokens, "router_aux_loss_coef: 0.01\n");
    int64_t probabilities = 4 * tokens * moe.experts * 4 * moe.layers;
    if (on - off > 2 * probabilities)
        fail_msg("the load balancing loss adds %lld bytes, router probabilities are %lld",
                 (long long)(on - off), (long long)probabilities);
}

/* Counts of 128 experts in 48 layers for 131,072 tokens with 8 choices each (cases S71): as one hot
 * rows over all layers 48 GiB, here what the router of a layer has anyway. */
static void test_balance_of_many_experts_needs_little(void **state)
{
    (void)state;
    small_shape big = small_moe;
    ith_buf text = {0};
    big.vocab = 320;
    small_make_model(small_join(case_root, "many"), &big, &(small_layout){.dtype = ITH_BF16});
    big.hidden = 16;
    big.layers = 48;
    big.experts = 128;
    big.topk = 8;
    big.moe_inter = 8;
    small_config_text(&big, &text);
    small_write(case_root, "many/config.json", text.data);
    ith_buf_deinit(&text);
    int64_t off = planned("many", 131072, "router_aux_loss_coef: 0.0\n"),
            on = planned("many", 131072, "router_aux_loss_coef: 0.01\n");
    if (on - off > (int64_t)1 << 28)
        fail_msg("the load balancing loss adds %lld bytes", (long long)(on - off));
}

static int64_t half_written(const char *dir)
{
    ith_names names;
    int64_t count = 0;
    assert_ok(ith_list_dir(small_join(case_root, dir), &names, &err), err);
    for (int64_t i = 0; i < names.count; i++)
        count += strstr(names.names[i], ".tmp-") != NULL;
    ith_names_free(&names);
    return count;
}

/* What a killed run was writing goes when the next one opens the folder; a note of the user's
 * stays. */
static void test_half_written_files_of_a_killed_run_go(void **state)
{
    (void)state;
    static small_seen seen;
    static const char *const left[] = {"left/trainer_log.jsonl", "left/tokenized/samples-0.bin"};
    static const char *const in[] = {"left", "left/tokenized"};
    ith_run_result r;
    assert_ok(ith_make_dirs(small_join(case_root, "left/tokenized"), &err), err);
    pid_t child = fork();
    if (child == 0) {
        ith_writer w;
        for (int i = 0; i < 2; i++)
            if (ith_writer_open(&w, small_join(case_root, left[i]), &err) != ITH_OK)
                _exit(1);
        _exit(0);
    }
    int ended = 1;
    assert_true(child > 0 && waitpid(child, &ended, 0) == child && ended == 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(half_written(in[i]), 1);
    case_write("left/note.tmp", "mine");
    run_ok("model", "left", "max_steps: 1\n", &seen, &r);
    for (int i = 0; i < 2; i++)
        assert_int_equal(half_written(in[i]), 0);
    assert_true(ith_path_exists(small_join(case_root, "left/note.tmp")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_that_do_not_fill_a_batch_are_trained),
        cmocka_unit_test(test_any_cut_of_a_step_is_the_same_step),
        cmocka_unit_test(test_warmup_counts_optimizer_steps),
        cmocka_unit_test(test_evaluation_changes_no_training_loss),
        cmocka_unit_test(test_output_has_names_shapes_and_types_of_the_source),
        cmocka_unit_test(test_missing_weights_are_named),
        cmocka_unit_test(test_other_shapes_name_the_keys),
        cmocka_unit_test(test_long_documents_need_no_quadratic_or_whole_logits),
        cmocka_unit_test(test_balance_of_many_experts_needs_little),
        cmocka_unit_test(test_half_written_files_of_a_killed_run_go),
    };
    return cmocka_run_group_tests(tests, setup, case_teardown);
}
