/* test_export_trained.c - the directory a run writes: names, order, types and untrained bytes of
 * the source.
 * Method: one step with learning rate 0, so that trained tensors must come out as they went in, bit
 * for bit; then a real step, where they must move and the rest must not. */
#include "e2e/small_dir.h"

#include <math.h>

static char *base;

static ith_st_reader *open_dir(const char *name)
{
    ith_error err = {0};
    ith_st_reader *r = NULL;
    assert_ok(ith_st_open(&r, small_join(base, name), &err), err);
    return r;
}

/* Same names, shapes and types; returns how many differ in their bytes. */
static int compare_dirs(const char *a, const char *b, const char *left_out, const char **changed)
{
    ith_st_reader *x = open_dir(a), *y = open_dir(b);
    int differing = 0;
    int64_t left = 0;
    for (int64_t i = 0; i < ith_st_count(x); i++) {
        const ith_st_entry *e = ith_st_at(x, i), *f = ith_st_find(y, e->name);
        char text[2][128];
        if (left_out && strcmp(e->name, left_out) == 0) {
            left++;
            if (f)
                fail_msg("%s is written", e->name);
            continue;
        }
        if (!f)
            fail_msg("%s is missing in %s", e->name, b);
        if (e->dtype != f->dtype || !ith_st_has_shape(f, e->ndim, e->shape))
            fail_msg("%s: %s, was %s", e->name, ith_st_text(f, text[0], 128),
                     ith_st_text(e, text[1], 128));
        if (memcmp(e->data, f->data, (size_t)e->bytes) != 0) {
            differing++;
            if (changed)
                *changed = strcmp(e->name, "mtp.layers.0.eh_proj.weight") == 0 ||
                                   strcmp(e->name, "counter") == 0 ||
                                   strcmp(e->name, "model.layers.0.A_log") == 0
                               ? "an untrained tensor"
                               : *changed;
        }
    }
    if (ith_st_count(y) != ith_st_count(x) - left)
        fail_msg("%lld tensors, expected %lld", (long long)ith_st_count(y),
                 (long long)(ith_st_count(x) - left));
    ith_st_close(x);
    ith_st_close(y);
    return differing;
}

static void run(const char *model, const char *out, const char *more)
{
    small_job *j = small_job_create();
    assert_ok(small_job_run(j, base, model, "data.jsonl", out, more), j->err);
    assert_int_equal(j->result.steps, 1);
    small_job_destroy(j);
}

static const struct export_case {
    const char *name;
    const small_shape *shape;
    small_layout layout;
} cases[] = {
    {"dense_bf16", &small_dense, {.dtype = ITH_BF16, .extra = true}},
    {"dense_f32", &small_dense, {.dtype = ITH_F32, .extra = true, .shard_bytes = 40000}},
    {"dense_f16", &small_dense, {.dtype = ITH_F16}},
    {"tied", &small_tied, {.dtype = ITH_BF16}},
    {"tied_stored_head", &small_tied, {.dtype = ITH_BF16, .stored_head = true}},
    {"moe", &small_moe, {.dtype = ITH_BF16, .extra = true}},
    {"moe_fused", &small_moe, {.dtype = ITH_BF16, .fused = 1, .extra = true}},
    {"moe_swapped", &small_moe, {.dtype = ITH_F32, .fused = 2}},
};
#define NUM_CASES ((int)(sizeof cases / sizeof *cases))

static void test_export_without_a_change_is_bit_equal(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_CASES; i++) {
        const char *left_out = cases[i].layout.stored_head ? "lm_head.weight" : NULL;
        char out[64];
        snprintf(out, sizeof out, "%s-same", cases[i].name);
        /* f32 weights in the step: rounding f32 or f16 sources to bf16 is not their source's bits
         */
        bool wide = cases[i].layout.dtype != ITH_BF16;
        run(cases[i].name, out,
            wide ? "max_steps: 1\nlearning_rate: 0.0\nbf16: false\ndtype: float32\n"
                 : "max_steps: 1\nlearning_rate: 0.0\n");
        int differing = compare_dirs(cases[i].name, out, left_out, NULL);
        if (differing)
            fail_msg("%s: %d tensors changed at learning rate 0", cases[i].name, differing);
        static const char *const files[] = {"config.json", "generation_config.json",
                                            "tokenizer.json", "chat_template.jinja",
                                            "tokenizer_config.json"};
        for (int k = 0; k < 5; k++)
            assert_same_file(small_join(small_join(base, cases[i].name), files[k]),
                             small_join(small_join(base, out), files[k]));
    }
}

static void test_export_after_a_step_moves_what_is_trained(void **state)
{
    (void)state;
    for (int i = 0; i < NUM_CASES; i++) {
        const char *left_out = cases[i].layout.stored_head ? "lm_head.weight" : NULL,
                   *untrained = NULL;
        char out[64];
        snprintf(out, sizeof out, "%s-step", cases[i].name);
        run(cases[i].name, out, "max_steps: 1\nglobal_batch_size: 8\n");
        int differing = compare_dirs(cases[i].name, out, left_out, &untrained);
        if (untrained)
            fail_msg("%s: %s changed", cases[i].name, untrained);
        ith_st_reader *r = open_dir(cases[i].name);
        int trained = (int)ith_st_count(r) - (left_out ? 1 : 0) - (cases[i].layout.extra ? 3 : 0);
        ith_st_close(r);
        if (differing != trained)
            fail_msg("%s: %d of %d trained tensors changed", cases[i].name, differing, trained);
    }
}

/* A run on the three layouts of the same experts gives the same numbers. */
static void test_export_layouts_train_alike(void **state)
{
    (void)state;
    ith_error err = {0};
    static const char *const names[] = {"alike_each", "alike_fused", "alike_swapped"};
    float *w[3] = {NULL};
    int64_t n = 0;
    for (int k = 0; k < 3; k++) {
        small_shape shape = small_moe;
        shape.vocab = 320;
        small_make_model(small_join(base, names[k]), &shape,
                         &(small_layout){.dtype = ITH_F32, .fused = k});
        char out[64];
        snprintf(out, sizeof out, "%s-out", names[k]);
        run(names[k], out, "max_steps: 1\nbf16: false\n");
        ith_st_reader *r = open_dir(out);
        ith_hf_config config;
        ith_model *m = NULL;
        assert_ok(ith_hf_config_load(&config, small_join(base, out), &err), err);
        assert_ok(ith_model_create(&m, &config, ITH_F32, 1, &err), err);
        n = m->num_elements;
        w[k] = ith_calloc(n, 4);
        assert_non_null(w[k]);
        ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), NULL, &err);
        assert_ok(ith_model_load(m, &ctx, r, ith_tensor_1d(w[k], ITH_F32, n), ith_tensor_none()),
                  err);
        ith_model_destroy(m);
        ith_hf_config_deinit(&config);
        ith_st_close(r);
    }
    assert_memory_equal(w[0], w[1], (size_t)n * 4);
    assert_memory_equal(w[0], w[2], (size_t)n * 4);
    for (int k = 0; k < 3; k++)
        ith_free(w[k]);
}

/* A square fused tensor says nothing of its orientation: the other one does. */
/* `to` is `from` with `count` more tensors. */
static void copy_with(const char *from, const char *to, const ith_st_entry *more, int64_t count)
{
    static const char *const files[] = {"config.json", "generation_config.json", "tokenizer.json",
                                        "tokenizer_config.json", "chat_template.jinja"};
    static ith_st_entry all[256];
    ith_error err = {0};
    int64_t n = 0;
    assert_ok(ith_make_dirs(small_join(base, to), &err), err);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        assert_ok(ith_copy_file(small_join(small_join(base, from), files[i]),
                                small_join(small_join(base, to), files[i]), &err),
                  err);
    ith_st_reader *r = open_dir(from);
    for (; n < ith_st_count(r); n++)
        all[n] = *ith_st_at(r, n);
    for (int64_t i = 0; i < count; i++)
        all[n + i] = more[i];
    assert_ok(ith_st_write(small_join(base, to), all, n + count, NULL, &err), err);
    ith_st_close(r);
}

/* Experts of the layers in one form and those of a prediction head in the other (cases S67): what
 * is there is told tensor by tensor, and written as it was. */
static void test_experts_of_a_head_may_have_another_form(void **state)
{
    (void)state;
    static const float data[24] = {0.5f, -1.25f, 3};
    static char names[8][64];
    ith_st_entry each[8], fused[2];
    for (int e = 0; e < 8; e++) {
        snprintf(names[e], sizeof names[e], "mtp.layers.0.mlp.experts.%d.%s_proj.weight", e / 2,
                 e % 2 ? "down" : "gate");
        each[e] = (ith_st_entry){
            .name = names[e], .dtype = ITH_F32, .ndim = 2, .shape = {2, 3}, .data = data};
    }
    fused[0] = (ith_st_entry){.name = "mtp.layers.0.mlp.experts.gate_up_proj",
                              .dtype = ITH_F32,
                              .ndim = 3,
                              .shape = {2, 4, 3},
                              .data = data};
    fused[1] = fused[0];
    fused[1].name = "mtp.layers.0.mlp.experts.down_proj";
    copy_with("moe_fused", "fused_and_each", each, 8);
    copy_with("moe", "each_and_fused", fused, 2);
    static const char *const dirs[][2] = {{"fused_and_each", "fused_and_each-out"},
                                          {"each_and_fused", "each_and_fused-out"}};
    for (int i = 0; i < 2; i++) {
        run(dirs[i][0], dirs[i][1], "max_steps: 1\nlearning_rate: 0.0\n");
        int differing = compare_dirs(dirs[i][0], dirs[i][1], NULL, NULL);
        if (differing)
            fail_msg("%s: %d tensors changed", dirs[i][0], differing);
    }
}

/* A directory whose layers differ in the form of their experts loads and is written as it was. */
static void test_layers_may_differ_in_the_form_of_their_experts(void **state)
{
    (void)state;
    static ith_st_entry all[256];
    ith_error err = {0};
    int64_t n = 0;
    copy_with("moe", "mixed", NULL, 0);
    ith_st_reader *each = open_dir("moe"), *fused = open_dir("moe_fused");
    for (int64_t i = 0; i < ith_st_count(each); i++)
        if (!strstr(ith_st_at(each, i)->name, "layers.1.mlp.experts."))
            all[n++] = *ith_st_at(each, i);
    for (int64_t i = 0; i < ith_st_count(fused); i++)
        if (strstr(ith_st_at(fused, i)->name, "layers.1.mlp.experts."))
            all[n++] = *ith_st_at(fused, i);
    assert_true(n < ith_st_count(each) && n > ith_st_count(fused));
    assert_ok(ith_st_write(small_join(base, "mixed"), all, n, NULL, &err), err);
    ith_st_close(each);
    ith_st_close(fused);
    run("mixed", "mixed-out", "max_steps: 1\nlearning_rate: 0.0\n");
    assert_int_equal(compare_dirs("mixed", "mixed-out", NULL, NULL), 0);
}

static void test_load_square_experts(void **state)
{
    (void)state;
    ith_error err = {0};
    for (int square_down = 0; square_down < 2; square_down++) {
        small_shape shape = small_moe;
        shape.moe_inter = square_down ? shape.hidden : shape.hidden / 2;
        float *w[3];
        int64_t n = 0;
        for (int k = 0; k < 3; k++) {
            char name[64];
            snprintf(name, sizeof name, "square%d_%d", square_down, k);
            shape.vocab = 320;
            small_make_model(small_join(base, name), &shape,
                             &(small_layout){.dtype = ITH_F32, .fused = k});
            ith_hf_config config;
            ith_model *m = NULL;
            ith_st_reader *r = open_dir(name);
            assert_ok(ith_hf_config_load(&config, small_join(base, name), &err), err);
            assert_ok(ith_model_create(&m, &config, ITH_F32, 1, &err), err);
            n = m->num_elements;
            w[k] = ith_calloc(n, 4);
            assert_non_null(w[k]);
            ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), NULL, &err);
            assert_ok(
                ith_model_load(m, &ctx, r, ith_tensor_1d(w[k], ITH_F32, n), ith_tensor_none()),
                err);
            ith_model_destroy(m);
            ith_hf_config_deinit(&config);
            ith_st_close(r);
        }
        assert_memory_equal(w[0], w[1], (size_t)n * 4);
        assert_memory_equal(w[0], w[2], (size_t)n * 4);
        for (int k = 0; k < 3; k++)
            ith_free(w[k]);
    }
}

/* What is missing is named before the first step: one expert, the head of an untied model. */
static void test_load_names_what_is_missing(void **state)
{
    (void)state;
    static const struct {
        const char *from, *name;
    } missing[] = {{"moe", "model.layers.1.mlp.experts.3.up_proj.weight"},
                   {"moe_fused", "model.layers.0.mlp.experts.down_proj"},
                   {"dense_bf16", "lm_head.weight"},
                   {"dense_bf16", "model.layers.2.self_attn.q_norm.weight"}};
    for (int k = 0; k < 4; k++) {
        ith_error err = {0};
        ith_st_reader *r = open_dir(missing[k].from);
        static ith_st_entry kept[256];
        int64_t count = 0;
        for (int64_t i = 0; i < ith_st_count(r); i++)
            if (strcmp(ith_st_at(r, i)->name, missing[k].name) != 0)
                kept[count++] = *ith_st_at(r, i);
        assert_int_equal(count, ith_st_count(r) - 1);
        const char *dir = small_join(base, "missing");
        assert_ok(ith_st_write(dir, kept, count, NULL, &err), err);
        ith_hf_config config;
        ith_model *m = NULL;
        ith_st_reader *less = open_dir("missing");
        assert_ok(ith_hf_config_load(&config, small_join(base, missing[k].from), &err), err);
        assert_ok(ith_model_create(&m, &config, ITH_F32, 1, &err), err);
        float *w = ith_calloc(m->num_elements, 4);
        assert_non_null(w);
        ith_ctx ctx = ith_ctx_host(ith_backend_cpu(), NULL, &err);
        assert_fails(ith_model_load(m, &ctx, less, ith_tensor_1d(w, ITH_F32, m->num_elements),
                                    ith_tensor_none()),
                     err, ITH_ERR_FORMAT, missing[k].name);
        ith_free(w);
        ith_model_destroy(m);
        ith_hf_config_deinit(&config);
        ith_st_close(less);
        ith_st_close(r);
    }
}

/* save_dtype changes the main type only, and the config says so. */
static void test_export_save_dtype(void **state)
{
    (void)state;
    run("dense_bf16", "as_f32", "max_steps: 1\nsave_dtype: float32\n");
    ith_st_reader *r = open_dir("as_f32");
    assert_int_equal(ith_st_find(r, "model.norm.weight")->dtype, ITH_F32);
    assert_int_equal(ith_st_find(r, "counter")->dtype, ITH_I64);
    ith_st_close(r);
    ith_error err = {0};
    ith_hf_config config;
    assert_ok(ith_hf_config_load(&config, small_join(base, "as_f32"), &err), err);
    assert_true(config.has_dtype && config.dtype == ITH_F32);
    ith_hf_config_deinit(&config);
}

/* ---- requests that cannot work ---- */

static void assert_refused(const char *model, const char *data, const char *out, const char *more,
                           ith_status want, const char *text)
{
    small_job *j = small_job_create();
    assert_fails(small_job_run(j, base, model, data, out, more), j->err, want, text);
    small_job_destroy(j);
}

static void test_refused_before_training(void **state)
{
    (void)state;
    assert_refused("dense_bf16", "data.jsonl", "dense_bf16", "max_steps: 1\n", ITH_ERR_USAGE,
                   "output_dir");
    assert_refused("nowhere", "data.jsonl", "x", "max_steps: 1\n", ITH_ERR_USAGE,
                   "not a directory");
    small_shape narrow = small_dense; /* 211 rows, the tokenizer has 300 ids */
    small_make_model(small_join(base, "narrow"), &narrow, &(small_layout){.dtype = ITH_BF16});
    assert_refused("narrow", "data.jsonl", "x", "max_steps: 1\n", ITH_ERR_FORMAT,
                   "vocab_size of config.json is 211");
}

/* Fewer rows than one global batch: one step over what there is, not none. */
static void test_a_step_of_fewer_samples_than_the_batch(void **state)
{
    (void)state;
    small_job *j = small_job_create();
    small_make_data(small_join(base, "three.jsonl"), 3);
    assert_ok(small_job_run(j, base, "dense_bf16", "three.jsonl", "three",
                            "num_train_epochs: 1\nglobal_batch_size: 8\n"),
              j->err);
    assert_int_equal(j->result.steps, 1);
    assert_true(isfinite(j->result.first_loss) && j->seen.rows[0].grad_norm > 0);
    small_job_destroy(j);
}

/* Weights that say nothing give the loss of guessing: told once. */
static void test_guessing_is_told(void **state)
{
    (void)state;
    small_shape shape = small_tied;
    shape.vocab = 320;
    shape.init_range = "0.001";
    small_make_model(small_join(base, "blank"), &shape, &(small_layout){.dtype = ITH_F32});
    static const char *const models[] = {"blank", "dense_f32"};
    for (int k = 0; k < 2; k++) {
        small_job *j = small_job_create();
        assert_ok(small_job_run(j, base, models[k], "data.jsonl", "guess", "max_steps: 2\n"),
                  j->err);
        const char *told = strstr(j->seen.news.data, "guessing");
        if ((k == 0) != (told != NULL))
            fail_msg("%s, first loss %g: %s", models[k], j->result.first_loss, j->seen.news.data);
        small_job_destroy(j);
    }
}

/* A weight that is not a number: skip goes on and counts, stop ends the run with one line. */
static void test_nonfinite_policies(void **state)
{
    (void)state;
    small_job *j = small_job_create();
    small_shape shape = small_dense;
    shape.vocab = 320;
    small_make_model(small_join(base, "poisoned"), &shape, &(small_layout){.dtype = ITH_F32});
    char path[4096];
    snprintf(path, sizeof path, "%s", small_join(base, "poisoned/model.safetensors"));
    ith_st_reader *r = open_dir("poisoned");
    const ith_st_entry *norm = ith_st_find(r, "model.norm.weight"), *first = ith_st_at(r, 0);
    for (int64_t i = 0; i < ith_st_count(r); i++)
        if ((const char *)ith_st_at(r, i)->data < (const char *)first->data)
            first = ith_st_at(r, i);
    long at = (long)((const char *)norm->data - (const char *)first->data);
    ith_st_close(r);
    FILE *f = fopen(path, "r+b");
    unsigned char len[8];
    float nan = NAN;
    assert_non_null(f);
    assert_int_equal(fread(len, 1, 8, f), 8);
    long header = (long)len[0] + 256L * len[1] + 65536L * len[2];
    assert_int_equal(fseek(f, 8 + header + at, SEEK_SET), 0);
    assert_int_equal(fwrite(&nan, 4, 1, f), 1);
    assert_int_equal(fclose(f), 0);
    assert_ok(small_job_run(j, base, "poisoned", "data.jsonl", "skip",
                            "max_steps: 3\nnonfinite: skip\nverify: true\n"),
              j->err);
    assert_int_equal(j->result.skipped, 3);
    assert_non_null(strstr(j->seen.news.data, "3 skipped so far"));
    assert_non_null(strstr(j->seen.news.data, "verify: backward: gradient of "));
    assert_refused("poisoned", "data.jsonl", "stop", "max_steps: 3\nnonfinite: stop\n", ITH_ERR_RUN,
                   "step 1: gradients are not finite");
    assert_false(ith_path_exists(small_join(base, "stop/model.safetensors")));
    small_job_destroy(j);
}

static int setup(void **state)
{
    (void)state;
    base = small_setup("export");
    for (int i = 0; i < NUM_CASES; i++) {
        small_shape shape = *cases[i].shape;
        shape.vocab = 320;
        small_make_model(small_join(base, cases[i].name), &shape, &cases[i].layout);
    }
    small_make_data(small_join(base, "data.jsonl"), 23);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_teardown(base);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_export_without_a_change_is_bit_equal),
        cmocka_unit_test(test_export_after_a_step_moves_what_is_trained),
        cmocka_unit_test(test_export_layouts_train_alike),
        cmocka_unit_test(test_experts_of_a_head_may_have_another_form),
        cmocka_unit_test(test_layers_may_differ_in_the_form_of_their_experts),
        cmocka_unit_test(test_load_square_experts),
        cmocka_unit_test(test_load_names_what_is_missing),
        cmocka_unit_test(test_export_save_dtype),
        cmocka_unit_test(test_refused_before_training),
        cmocka_unit_test(test_a_step_of_fewer_samples_than_the_batch),
        cmocka_unit_test(test_guessing_is_told),
        cmocka_unit_test(test_nonfinite_policies),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
