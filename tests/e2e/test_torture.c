/* test_torture.c - the n-th allocation, read or write fails, for every n of a small run.
 *
 * Goal: one line that says what failed, or the right result; never a crash, a leak, an open file
 * or a half-written result. After a failed training the newest checkpoint is whole, and a resumed
 * run writes the very model that an undisturbed run writes. Method: everything runs in this
 * process, so that AddressSanitizer sees each leak. `test_torture all [train [2/8]]` tries every n
 * (the second eighth of them: several processes share the work), without it allocations and reads
 * are sampled (writes never are); `test_torture train alloc 4849` tries one (for gdb: break
 * ith_fault_hit if fault_seen[kind] + 1 == fault_at[kind]). */
#include "e2e/small_dir.h"

#include <dirent.h>
#include <fcntl.h>

#include "checkpoint/train_state.h"
#include "cli/commands.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

static char *base;
static bool every;
static int64_t part = 1, parts = 1;
/* of one try */
static const char *only_kind;
static int64_t only_n;
static const char *const kind_names[] = {"allocation", "read", "write"};

/* ---- what is tortured ---- */

/* Commands print to stdout: into a file here. */
static ith_status run_quietly(const char *command, int argc, char *const *argv, ith_error *err)
{
    fflush(stdout);
    int kept = dup(STDOUT_FILENO),
        file = open(small_join(base, "stdout"), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(kept >= 0 && file >= 0 && dup2(file, STDOUT_FILENO) >= 0);
    close(file);
    ith_status status = ith_run_command(ith_find_command(command), argc, argv, err);
    fflush(stdout);
    assert_true(dup2(kept, STDOUT_FILENO) >= 0);
    close(kept);
    return status;
}

static ith_status do_init(ith_error *err)
{
    char dir[4096], learn[4096];
    snprintf(dir, sizeof dir, "%s", small_join(base, "init"));
    snprintf(learn, sizeof learn, "%s", small_join(base, "text"));
    char a[] = "--learn", b[] = "--vocab-size", c[] = "300", d[] = "--size", e[] = "tiny";
    char *argv[] = {dir, a, learn, b, c, d, e};
    return run_quietly("init", 7, argv, err);
}

static const char train_more[] = "num_train_epochs: 1\nglobal_batch_size: 3\nsave_steps: 1\n"
                                 "save_total_limit: 2\neval_split_ratio: 0.3\neval_strategy: "
                                 "steps\neval_steps: 2\nthreads: 1\nverify: true\n";

static ith_status train_with(const char *model, const char *more, ith_error *err)
{
    ith_config c;
    ith_run_result result;
    small_seen *seen = calloc(1, sizeof *seen); /* not ith_calloc: the test's own */
    ith_buf text = {0};
    ith_status status = ITH_OK;
    ith_buf_printf(&text,
                   "model: %s\ntrain_dataset: %s\noutput_dir: %s\ndevice: cpu\ncutoff_len: 64\n"
                   "train_on: all_turns\nlearning_rate: 1.0e-2\ndata_cache_dir: %s\n%s%s",
                   small_join(base, model), small_join(base, "data.jsonl"), small_join(base, "out"),
                   small_join(base, "cache"), train_more, more);
    ITH_TRY_OUT(ith_buf_check(&text, "test", err));
    ITH_TRY_OUT(ith_config_parse(&c, text.data, text.len, "test.yaml", NULL, 0, err));
    ith_trainer_hooks hooks = {small_on_poll, small_on_row, NULL, NULL, seen};
    ith_trainer t;
    status = ith_trainer_open(&t, &c, false, &hooks, err);
    if (status == ITH_OK) {
        t.matmul_rate = 1e9;
        status = ith_trainer_run(&t, &hooks, &result, err);
        ith_trainer_close(&t);
    }
    ith_config_deinit(&c);
out:
    ith_buf_deinit(&text);
    free(seen);
    return status;
}

static ith_status do_train(ith_error *err)
{
    return train_with("dense", "report_to: [tensorboard]\nsave_ckpt_as_hf: true\n", err);
}

static ith_status do_train_experts(ith_error *err)
{
    return train_with("moe", "report_to: []\nbf16: false\n", err);
}

static ith_status do_resume(ith_error *err)
{
    return train_with("dense", "report_to: []\nresume_from_checkpoint: auto\n", err);
}

static ith_status do_export(ith_error *err)
{
    char from[4096], to[4096], a[] = "--dtype", b[] = "float32";
    snprintf(from, sizeof from, "%s", small_join(base, "dense"));
    snprintf(to, sizeof to, "%s", small_join(base, "exported"));
    char *argv[] = {from, to, a, b};
    return run_quietly("export", 4, argv, err);
}

static ith_status do_generate(ith_error *err)
{
    char model[4096], prompts[4096];
    snprintf(model, sizeof model, "%s", small_join(base, "dense"));
    snprintf(prompts, sizeof prompts, "%s", small_join(base, "prompts.jsonl"));
    char a[] = "--max-new-tokens", b[] = "4", c[] = "--device", d[] = "cpu";
    char *argv[] = {model, prompts, a, b, c, d};
    return run_quietly("generate", 6, argv, err);
}

/* ---- how ---- */

static int open_files(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static void no_leak(const char *what, int64_t n)
{
#if defined(__SANITIZE_ADDRESS__)
    if (__lsan_do_recoverable_leak_check())
        fail_msg("%s %lld: memory leaked (above)", what, (long long)n);
#else
    (void)what;
    (void)n;
#endif
}

static void remove_all(const char *const *names)
{
    ith_error err = {0};
    for (int i = 0; names[i]; i++)
        assert_ok(ith_remove_tree(small_join(base, names[i]), &err), err);
}

typedef struct {
    const char *name;
    ith_status (*run)(ith_error *err);
    const char *fresh[4]; /* removed before each run */
    /* called after a failure, with faults off; NULL: nothing to check */
    void (*after)(const char *what, int64_t n);
    int64_t samples; /* of allocations and reads, when not all */
    /* A fault may be survived (a list of names for people that is cut short, an old checkpoint that
     * stays); then these files are those of an undisturbed run. */
    const char *results[3];
} victim;

static const char *reference_of(const victim *v, int i)
{
    char name[64];
    snprintf(name, sizeof name, "reference of %s %d", v->name, i);
    return small_join(base, name);
}

static bool same_file(const char *a, const char *b)
{
    ith_error err = {0};
    ith_buf x = {0}, y = {0};
    bool same = ith_read_file(a, 0, &x, &err) == ITH_OK &&
                ith_read_file(b, 0, &y, &err) == ITH_OK && x.len == y.len &&
                (x.len == 0 || memcmp(x.data, y.data, (size_t)x.len) == 0);
    ith_buf_deinit(&x);
    ith_buf_deinit(&y);
    return same;
}

/* All of them are told before the test fails. */
static int complaints;
#define COMPLAIN(...) (complaints++, print_error(__VA_ARGS__))

static void torture_at(const victim *v, ith_fault_kind kind, int64_t n, int files)
{
    ith_error err = {0};
    char what[64];
    snprintf(what, sizeof what, "%s, %s", v->name, kind_names[kind]);
    remove_all(v->fresh);
    ith_fault_set(kind, n);
    ith_status status = v->run(&err);
    bool hit = ith_fault_count(kind) >= n;
    ith_fault_set(kind, 0);
    if (!hit)
        return; /* a run on several threads may do a few less */
    for (int i = 0; status == ITH_OK && v->results[i]; i++)
        if (!same_file(small_join(base, v->results[i]), reference_of(v, i)))
            COMPLAIN("%s %lld: the run says all is well, and %s is not right\n", what, (long long)n,
                     v->results[i]);
    if (status != ITH_OK && (!err.text[0] || strchr(err.text, '\n')))
        COMPLAIN("%s %lld: not one line: '%s'\n", what, (long long)n, err.text);
    if (open_files() != files)
        COMPLAIN("%s %lld: %d files stay open (%s)\n", what, (long long)n, open_files() - files,
                 err.text);
    no_leak(what, n);
    if (v->after)
        v->after(what, n);
}

static void torture(const victim *v)
{
    ith_error err = {0};
    int64_t counts[ITH_FAULT_FAILURES];
    int files = open_files();
    for (int pass = 0; pass < 2; pass++) { /* the first warms what is done once per process */
        remove_all(v->fresh);
        for (int k = 0; k < ITH_FAULT_FAILURES; k++)
            ith_fault_set((ith_fault_kind)k, 0);
        assert_ok(v->run(&err), err);
        for (int k = 0; k < ITH_FAULT_FAILURES; k++)
            counts[k] = ith_fault_count((ith_fault_kind)k);
        for (int i = 0; v->results[i]; i++)
            assert_ok(ith_copy_file(small_join(base, v->results[i]), reference_of(v, i), &err),
                      err);
    }
    for (int k = 0; k < ITH_FAULT_FAILURES; k++) {
        int64_t stride = 1;
        if (!every && k != ITH_FAULT_WRITE && counts[k] > v->samples)
            stride = counts[k] / v->samples;
        int64_t tried = 0;
        for (int64_t n = 1 + (part - 1) * stride; n <= counts[k] && !only_kind; n += parts * stride)
            torture_at(v, (ith_fault_kind)k, n, files), tried++;
        print_message("%s: %lld of %lld %ss tried\n", v->name, (long long)tried,
                      (long long)counts[k], kind_names[k]);
        if (only_kind && strncmp(only_kind, kind_names[k], strlen(only_kind)) == 0)
            torture_at(v, (ith_fault_kind)k, only_n, files);
    }
    int told = complaints;
    complaints = 0;
    if (told)
        fail_msg("%s: %d faults went wrong (above)", v->name, told);
}

/* The newest checkpoint of a failed training is whole; going on from it gives the model of the
 * undisturbed run. */
static void check_resumable(const char *what, int64_t n)
{
    static int64_t calls;
    ith_error err = {0};
    ith_buf path = {0};
    const char *out = small_join(base, "out");
    if (ith_path_is_dir(out)) {
        if (ith_train_state_find_latest(out, &path, &err) != ITH_OK)
            fail_msg("%s %lld: %s", what, (long long)n, err.text);
        if (path.len && ith_train_state_check(path.data, &err) != ITH_OK)
            fail_msg("%s %lld: %s", what, (long long)n, err.text);
    }
    if (path.len && (every || calls++ % 4 == 0)) {
        if (do_resume(&err) != ITH_OK)
            fail_msg("%s %lld: does not resume: %s", what, (long long)n, err.text);
        assert_same_file(small_join(base, "reference/model.safetensors"),
                         small_join(base, "out/model.safetensors"));
        ith_names names;
        assert_ok(ith_list_dir(small_join(base, "out"), &names, &err), err);
        for (int64_t i = 0; i < names.count; i++)
            /* a whole one that only lacked its final name is what was resumed */
            if (strstr(names.names[i], ".tmp-") && !strstr(path.data, names.names[i]))
                fail_msg("%s %lld: %s is left", what, (long long)n, names.names[i]);
        ith_names_free(&names);
    }
    ith_buf_deinit(&path);
}

/* A model that could not be written is not taken for one. */
static void check_exported(const char *what, int64_t n)
{
    ith_error err = {0};
    ith_st_reader *reader = NULL;
    const char *dir = small_join(base, "exported");
    if (!ith_path_exists(small_join(dir, "model.safetensors")))
        return;
    if (ith_st_open(&reader, dir, &err) != ITH_OK)
        fail_msg("%s %lld: half a file: %s", what, (long long)n, err.text);
    ith_st_close(reader);
}

static const char *const train_fresh[] = {"out", "cache", NULL};

static void test_torture_init(void **state)
{
    (void)state;
    torture(&(victim){
        "init", do_init, {"init"}, NULL, 150, {"init/model.safetensors", "init/tokenizer.json"}});
}

static void test_torture_train(void **state)
{
    (void)state;
    ith_error err = {0};
    remove_all(train_fresh);
    assert_ok(do_train(&err), err);
    assert_ok(ith_rename(small_join(base, "out"), small_join(base, "reference"), &err), err);
    torture(&(victim){
        "train", do_train, {"out", "cache"}, check_resumable, 150, {"out/model.safetensors"}});
}

static void test_torture_train_experts(void **state)
{
    (void)state;
    torture(&(victim){
        "train experts", do_train_experts, {"out", "cache"}, NULL, 60, {"out/model.safetensors"}});
}

/* Faults while resuming leave what was resumed from. */
static void test_torture_resume(void **state)
{
    (void)state;
    ith_error err = {0};
    remove_all(train_fresh);
    assert_ok(do_train(&err), err);
    if (!ith_path_exists(small_join(base, "reference"))) { /* this test alone */
        assert_ok(ith_make_dirs(small_join(base, "reference"), &err), err);
        assert_ok(ith_copy_file(small_join(base, "out/model.safetensors"),
                                small_join(base, "reference/model.safetensors"), &err),
                  err);
    }
    assert_ok(ith_remove_tree(small_join(base, "out/model.safetensors"), &err), err);
    torture(
        &(victim){"resume", do_resume, {"cache"}, check_resumable, 100, {"out/model.safetensors"}});
}

static void test_torture_export(void **state)
{
    (void)state;
    torture(&(victim){"export",
                      do_export,
                      {"exported"},
                      check_exported,
                      150,
                      {"exported/model.safetensors", "exported/config.json"}});
}

static void test_torture_generate(void **state)
{
    (void)state;
    torture(&(victim){"generate", do_generate, {NULL}, NULL, 150, {"stdout"}});
}

static int setup(void **state)
{
    (void)state;
    base = small_setup("torture");
    small_shape shape = small_tied, moe = small_moe;
    shape.vocab = moe.vocab = 320;
    shape.layers = moe.layers = 1;
    small_make_model(small_join(base, "dense"), &shape,
                     &(small_layout){.dtype = ITH_BF16, .extra = true, .shard_bytes = 60000});
    small_make_model(small_join(base, "moe"), &moe, &(small_layout){.dtype = ITH_F32, .fused = 2});
    small_make_data(small_join(base, "data.jsonl"), 13);
    small_write(base, "text", small_text);
    small_write(base, "prompts.jsonl", "{\"prompt\": \"Who\"}\n{\"prompt\": \"The red fox\"}\n");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    small_teardown(base);
    return 0;
}

int main(int argc, char **argv)
{
    every = argc > 1 && strcmp(argv[1], "all") == 0;
    static char filter[64];
    if (argc > 2) {
        snprintf(filter, sizeof filter, "test_torture_%s", argv[every ? 2 : 1]);
        cmocka_set_test_filter(filter);
    }
    if (every && argc > 3) {
        char *end = argv[3];
        part = strtoll(argv[3], &end, 10);
        parts = *end == '/' ? strtoll(end + 1, NULL, 10) : 0;
        if (part < 1 || part > parts)
            return fprintf(stderr, "'%s' is no part (1/8 to 8/8)\n", argv[3]), 2;
    } else if (argc > 3) {
        only_kind = argv[2];
        only_n = strtoll(argv[3], NULL, 10);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_torture_init),          cmocka_unit_test(test_torture_train),
        cmocka_unit_test(test_torture_train_experts), cmocka_unit_test(test_torture_resume),
        cmocka_unit_test(test_torture_export),        cmocka_unit_test(test_torture_generate),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
