/* Goal: what was saved comes back bit for bit, and no failure, kill or leftover costs the last good
 * checkpoint. Method: a small state saved and loaded; every failing write, allocation and read; the
 * directory as kills at each stage leave it. */
#include "testing.h"

#include "base/log.h"
#include "checkpoint/train_state.h"

static char out_dir[4200];
static char warnings[4096];

static void keep_warnings(ith_log_level level, const char *subsystem, const char *text, void *arg)
{
    (void)subsystem;
    (void)arg;
    size_t len = strlen(warnings);
    if (level == ITH_LOG_WARN)
        snprintf(warnings + len, sizeof warnings - len, "%s\n", text);
}

static int set_up(void **state)
{
    (void)state;
    snprintf(out_dir, sizeof out_dir, "%s", temp_dir("train-state"));
    warnings[0] = '\0';
    ith_log_set_sink(keep_warnings, NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    ith_log_set_sink(NULL, NULL);
    return 0;
}

static const char *in_dir(const char *name)
{
    static char path[4][4600];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", out_dir, name);
    return path[turn];
}

/* A model of two tensors and Adam's moments. */
typedef struct {
    float w[6], b[3], m[6];
    uint16_t half[4];
    ith_state_tensor master[2], adam[2];
    ith_state_group groups[2];
} sample;

static void make_sample(sample *s, int salt)
{
    for (int i = 0; i < 6; i++) {
        s->w[i] = (float)(salt * 100 + i) / 7;
        s->m[i] = (float)(salt - i) * 1e-20f;
    }
    for (int i = 0; i < 3; i++)
        s->b[i] = (float)-salt;
    for (int i = 0; i < 4; i++)
        s->half[i] = (uint16_t)(salt * 4 + i);
    s->master[0] = (ith_state_tensor){"w", ITH_F32, 2, {2, 3}, s->w};
    s->master[1] = (ith_state_tensor){"b", ITH_F32, 1, {3}, s->b};
    s->adam[0] = (ith_state_tensor){"w", ITH_F32, 2, {2, 3}, s->m};
    s->adam[1] = (ith_state_tensor){"h", ITH_BF16, 1, {4}, s->half};
    s->groups[0] = (ith_state_group){"master", s->master, 2, NULL, NULL};
    s->groups[1] = (ith_state_group){"adam_m", s->adam, 2, NULL, NULL};
}

static ith_train_save save_of(const sample *s, int64_t step)
{
    ith_train_save save = {.groups = s->groups, .num_groups = 2};
    save.progress.global_step = step;
    save.progress.samples_seen = step * 8;
    save.progress.epoch = (double)step / 3;
    return save;
}

static ith_status do_save(int64_t step, int64_t limit, ith_error *err)
{
    sample s;
    make_sample(&s, (int)step);
    ith_train_save save = save_of(&s, step);
    save.save_total_limit = limit;
    return ith_train_state_save(out_dir, &save, err);
}

static void assert_loads(const char *path, int64_t step)
{
    ith_error err = {0};
    sample got, wanted;
    ith_train_progress progress;
    make_sample(&got, -1);
    make_sample(&wanted, (int)step);
    assert_ok(ith_train_state_load(path, got.groups, 2, &progress, NULL, &err), err);
    assert_int_equal(progress.global_step, step);
    assert_memory_equal(got.w, wanted.w, sizeof got.w);
    assert_memory_equal(got.b, wanted.b, sizeof got.b);
    assert_memory_equal(got.m, wanted.m, sizeof got.m);
    assert_memory_equal(got.half, wanted.half, sizeof got.half);
}

/* The newest complete checkpoint is that of `step` (-1: none), and it loads. */
static void assert_latest(int64_t step)
{
    ith_error err = {0};
    ith_buf path = {0};
    assert_ok(ith_train_state_find_latest(out_dir, &path, &err), err);
    if (step < 0)
        assert_string_equal(path.data, "");
    else
        assert_loads(path.data, step);
    ith_buf_deinit(&path);
}

/* Names in the output directory, joined by blanks. */
static void assert_dirs(const char *wanted)
{
    ith_error err = {0};
    ith_names names;
    ith_buf text = {0};
    ith_buf_puts(&text, "");
    assert_ok(ith_list_dir(out_dir, &names, &err), err);
    for (int64_t i = 0; i < names.count; i++)
        ith_buf_printf(&text, "%s%s", i ? " " : "", names.names[i]);
    ith_names_free(&names);
    assert_string_equal(text.data, wanted);
    ith_buf_deinit(&text);
}

static void put(const char *name, const char *text)
{
    ith_error err = {0};
    assert_ok(ith_write_file(in_dir(name), text, (int64_t)strlen(text), &err), err);
}

static void test_save_and_load_are_bit_equal(void **state)
{
    (void)state;
    ith_error err = {0};
    sample s, got;
    make_sample(&s, 3);
    make_sample(&got, 0);
    ith_train_save save = save_of(&s, 20);
    save.progress.has_best = true;
    save.progress.best_metric = 0.1;
    save.progress.best_global_step = 10;
    json_t *opaque = NULL, *back = NULL;
    static const char text[] =
        "{\"rng\": [1, 18446744073709551], \"order\": {\"epoch\": 2}, \"name\": \"\\u00e9\"}";
    assert_ok(ith_json_parse(&opaque, text, (int64_t)strlen(text), "state", &err), err);
    save.state = opaque;
    save.max_shard_bytes = 13; /* several shards per group */
    assert_ok(ith_train_state_save(out_dir, &save, &err), err);
    assert_dirs("checkpoint-20");
    assert_true(ith_path_exists(in_dir("checkpoint-20/master-00002-of-00002.safetensors")));
    ith_train_progress progress;
    assert_ok(ith_train_state_load(in_dir("checkpoint-20"), got.groups, 2, &progress, &back, &err),
              err);
    assert_memory_equal(got.w, s.w, sizeof s.w);
    assert_memory_equal(got.half, s.half, sizeof s.half);
    assert_memory_equal(&progress.epoch, &save.progress.epoch, sizeof(double));
    assert_true(progress.has_best && progress.best_metric == 0.1);
    assert_int_equal(progress.best_global_step, 10);
    assert_int_equal(progress.samples_seen, 160);
    assert_true(json_equal(opaque, back));
    json_decref(opaque);
    json_decref(back);
    ith_st_reader *r = NULL; /* slices of one group */
    assert_ok(ith_train_state_open_group(&r, in_dir("checkpoint-20"), "adam_m", &err), err);
    assert_int_equal(ith_st_count(r), 2);
    ith_st_close(r);
}

static void test_load_names_what_does_not_fit(void **state)
{
    (void)state;
    ith_error err = {0};
    sample s;
    ith_train_progress p;
    assert_ok(do_save(5, 0, &err), err);
    const char *path = in_dir("checkpoint-5");
    make_sample(&s, 0);
    s.master[0].shape[1] = 4;
    assert_fails(ith_train_state_load(path, s.groups, 2, &p, NULL, &err), err, ITH_ERR_FORMAT,
                 "master.safetensors: w: shape [2, 3], expected [2, 4]");
    make_sample(&s, 0);
    s.adam[1].dtype = ITH_F16;
    assert_fails(ith_train_state_load(path, s.groups, 2, &p, NULL, &err), err, ITH_ERR_FORMAT,
                 "adam_m.safetensors: h: dtype BF16, expected F16");
    make_sample(&s, 0);
    s.master[1].name = "c";
    assert_fails(ith_train_state_load(path, s.groups, 2, &p, NULL, &err), err, ITH_ERR_FORMAT,
                 "tensor c is missing");
    make_sample(&s, 0);
    s.groups[0].count = 1;
    assert_fails(ith_train_state_load(path, s.groups, 2, &p, NULL, &err), err, ITH_ERR_FORMAT,
                 "master.safetensors: 2 tensors, expected 1");
    make_sample(&s, 0);
    s.groups[1].name = "adam_v";
    assert_fails(ith_train_state_load(path, s.groups, 2, &p, NULL, &err), err, ITH_ERR_IO,
                 "neither adam_v.safetensors nor");
    make_sample(&s, 0);
    assert_fails(ith_train_state_load(in_dir("checkpoint-6"), s.groups, 2, &p, NULL, &err), err,
                 ITH_ERR_IO, "checkpoint-6: no such checkpoint directory");
}

static void test_damaged_checkpoints_are_passed_over_with_a_warning(void **state)
{
    (void)state;
    ith_error err = {0};
    static const struct {
        const char *file, *text, *warning;
    } damage[] = {
        {"checkpoint-20/master.safetensors", "short", "master.safetensors: 5 bytes, "},
        {"checkpoint-20/trainer_state.json", NULL, "trainer_state.json is missing"},
        {"checkpoint-20/CHECKPOINT_COMPLETE", NULL,
         "CHECKPOINT_COMPLETE is missing: the save did not end"},
        {"checkpoint-20/CHECKPOINT_COMPLETE", "", "CHECKPOINT_COMPLETE: empty, expected JSON"},
        {"checkpoint-20/CHECKPOINT_COMPLETE", "{}", "holds no list of files"},
    };
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        set_up(NULL);
        assert_ok(do_save(10, 0, &err), err);
        assert_ok(do_save(20, 0, &err), err);
        assert_latest(20);
        assert_string_equal(warnings, "");
        if (damage[i].text)
            put(damage[i].file, damage[i].text);
        else
            assert_ok(ith_remove_tree(in_dir(damage[i].file), &err), err);
        assert_latest(10);
        if (!strstr(warnings, damage[i].warning))
            fail_msg("warned '%s', expected '%s'", warnings, damage[i].warning);
        sample s;
        ith_train_progress p;
        make_sample(&s, 0);
        assert_fails(ith_train_state_load(in_dir("checkpoint-20"), s.groups, 2, &p, NULL, &err),
                     err, ITH_ERR_FORMAT, damage[i].warning);
        assert_ok(do_save(20, 0, &err), err); /* the leftover is replaced */
        assert_latest(20);
    }
    ith_buf path = {0};
    assert_ok(ith_train_state_find_latest(in_dir("nowhere"), &path, &err), err);
    assert_string_equal(path.data, "");
    ith_buf_deinit(&path);
}

static void test_rotation_keeps_the_newest(void **state)
{
    (void)state;
    ith_error err = {0};
    for (int64_t step = 1; step <= 12; step++)
        assert_ok(do_save(step, 3, &err), err);
    assert_dirs("checkpoint-10 checkpoint-11 checkpoint-12");
    assert_ok(ith_train_state_rotate(out_dir, 1, &err), err);
    assert_dirs("checkpoint-12");
    assert_ok(do_save(9, 1, &err), err); /* a run begun anew: the newest step stays */
    assert_dirs("checkpoint-12");
    assert_ok(ith_train_state_rotate(out_dir, 0, &err), err);
    assert_latest(12);
}

static void test_rotation_deletes_only_what_is_ours(void **state)
{
    (void)state;
    ith_error err = {0};
    static const char *const dirs[] = {
        "checkpoint-3", "checkpoint-4", "checkpoint-5", "checkpoint-best", "checkpoint-", "other"};
    char left[256], busy[256];
    snprintf(left, sizeof left, "%s", named_by("checkpoint-7", false));
    snprintf(busy, sizeof busy, "%s", named_by("checkpoint-6", true)); /* another run writes it */
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++)
        assert_ok(ith_make_dirs(in_dir(dirs[i]), &err), err);
    assert_ok(ith_make_dirs(in_dir(left), &err), err);
    assert_ok(ith_make_dirs(in_dir(busy), &err), err);
    put("checkpoint-3/trainer_state.json", "{\"global_step\": 3}"); /* of another trainer */
    put("checkpoint-4/trainer_state.json", "{\"format\": \"ithaca-checkpoint-1\"}");
    put("checkpoint-5/model.bin", "x");
    char shard[300];
    snprintf(shard, sizeof shard, "%s/master.safetensors", left);
    put(shard, "x");
    put("checkpoint-8", "a file");
    assert_ok(ith_train_state_rotate(out_dir, 1, &err), err); /* nothing better is there yet */
    assert_true(ith_path_exists(in_dir("checkpoint-4")));
    assert_ok(do_save(6, 1, &err), err);
    assert_true(ith_path_is_dir(in_dir(busy)));
    assert_ok(ith_remove_tree(in_dir(busy), &err), err);
    assert_dirs(
        "checkpoint- checkpoint-3 checkpoint-5 checkpoint-6 checkpoint-8 checkpoint-best other");
    assert_latest(6);
    assert_fails(do_save(5, 1, &err), err, ITH_ERR_USAGE,
                 "checkpoint-5 exists and was not written by this program");
    assert_true(ith_path_exists(in_dir("checkpoint-5/model.bin")));
}

static void test_kill_between_two_renames_loses_nothing(void **state)
{
    (void)state;
    ith_error err = {0};
    assert_ok(do_save(10, 1, &err), err);
    char left[256], from[4400];
    snprintf(left, sizeof left, "%s", named_by("checkpoint-10", false));
    snprintf(from, sizeof from, "%s", in_dir("checkpoint-10"));
    assert_ok(ith_rename(from, in_dir(left), &err), err);
    assert_latest(10); /* complete under a .tmp- name: found */
    assert_ok(ith_train_state_rotate(out_dir, 1, &err), err);
    assert_latest(10); /* and the only one: kept */
    assert_ok(do_save(10, 1, &err), err);
    assert_dirs("checkpoint-10");         /* now it is a twin */
    assert_ok(do_save(10, 1, &err), err); /* saved again at the same step */
    assert_latest(10);
    assert_dirs("checkpoint-10");
}

/* The n-th write, allocation or read of a save fails, for every n, over what the failures before it
 * left. again: the newest step is saved once more; else the next one. */
static void check_faults(ith_fault_kind kind, bool again)
{
    ith_error err = {0};
    int64_t newest = 1;
    set_up(NULL);
    assert_ok(do_save(newest, 1, &err), err);
    for (int64_t n = 1;; n++) {
        ith_error why = {0};
        ith_error_clear(&err);
        ith_fault_set(kind, n);
        ith_status status = do_save(again ? newest : newest + 1, 1, &err);
        int64_t seen = ith_fault_count(kind);
        ith_fault_set(kind, 0);
        if (status != ITH_OK && !err.text[0])
            fail_msg("n %lld: no text", (long long)n);
        ith_buf path = {0};
        assert_ok(ith_train_state_find_latest(out_dir, &path, &why), why);
        if (!path.len)
            fail_msg("n %lld: after '%s' no checkpoint is left", (long long)n, err.text);
        sample got;
        ith_train_progress p;
        make_sample(&got, 0);
        assert_ok(ith_train_state_load(path.data, got.groups, 2, &p, NULL, &why), why);
        assert_loads(path.data, p.global_step);
        ith_buf_deinit(&path);
        int64_t done = newest + !again;
        if (status == ITH_OK ? p.global_step != done
                             : p.global_step != newest && p.global_step != done)
            fail_msg("n %lld: status %d, newest %lld", (long long)n, (int)status,
                     (long long)p.global_step);
        newest = p.global_step;
        /* a failed rotation leaves old ones; unchecked, each would lengthen the next rotation */
        assert_ok(ith_train_state_rotate(out_dir, 1, &why), why);
        if (seen < n) {
            assert_int_equal(status, ITH_OK);
            break;
        }
    }
    char wanted[64];
    snprintf(wanted, sizeof wanted, "checkpoint-%lld", (long long)newest);
    assert_dirs(wanted); /* the last save cleaned up */
}

static void test_every_failing_operation_of_a_save_leaves_a_good_checkpoint(void **state)
{
    (void)state;
    static const ith_fault_kind kinds[] = {ITH_FAULT_WRITE, ITH_FAULT_ALLOC, ITH_FAULT_READ};
    for (int k = 0; k < 3; k++) {
        check_faults(kinds[k], false);
        check_faults(kinds[k], true);
    }
}

static void test_every_failing_operation_of_a_load_is_one_error(void **state)
{
    (void)state;
    ith_error err = {0};
    assert_ok(do_save(10, 1, &err), err);
    static const ith_fault_kind kinds[] = {ITH_FAULT_ALLOC, ITH_FAULT_READ};
    for (int k = 0; k < 2; k++)
        for (int64_t n = 1;; n++) {
            sample got;
            ith_train_progress p;
            json_t *opaque = NULL;
            make_sample(&got, 0);
            ith_error_clear(&err);
            ith_fault_set(kinds[k], n);
            ith_status status =
                ith_train_state_load(in_dir("checkpoint-10"), got.groups, 2, &p, &opaque, &err);
            int64_t seen = ith_fault_count(kinds[k]);
            ith_fault_set(kinds[k], 0);
            if (seen < n) {
                assert_int_equal(status, ITH_OK);
                json_decref(opaque);
                break;
            }
            if (status == ITH_OK || !err.text[0])
                fail_msg("kind %d, n %lld: status %d, '%s'", k, (long long)n, (int)status,
                         err.text);
        }
}

static ith_status put_tensor(void *arg, int64_t i, ith_st_writer *writer, ith_error *err)
{
    const sample *s = arg;
    return i == 0 ? ith_st_writer_put(writer, i, 0, s->w, sizeof s->w, err)
                  : ith_st_writer_put(writer, i, 0, s->b, sizeof s->b, err);
}

static ith_status write_hf(void *arg, const char *dir, ith_error *err)
{
    char path[4700];
    ITH_TRY(ith_make_dirs(dir, err));
    snprintf(path, sizeof path, "%s/%s", dir, (const char *)arg);
    return ith_write_file(path, "{}", 2, err);
}

static void test_put_tensors_and_hf_directory(void **state)
{
    (void)state;
    ith_error err = {0};
    sample s;
    make_sample(&s, 40);
    ith_train_save save = save_of(&s, 40);
    s.master[0].data = s.master[1].data = NULL;
    s.groups[0].put = put_tensor;
    s.groups[0].put_arg = &s;
    static char name[] = "config.json";
    save.write_hf = write_hf;
    save.write_hf_arg = name;
    assert_ok(ith_train_state_save(out_dir, &save, &err), err);
    assert_latest(40);
    assert_ok(ith_remove_tree(in_dir("checkpoint-40/hf_model/config.json"), &err), err);
    assert_fails(ith_train_state_check(in_dir("checkpoint-40"), &err), err, ITH_ERR_FORMAT,
                 "hf_model/config.json is missing");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_save_and_load_are_bit_equal, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_load_names_what_does_not_fit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_damaged_checkpoints_are_passed_over_with_a_warning,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rotation_keeps_the_newest, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rotation_deletes_only_what_is_ours, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_kill_between_two_renames_loses_nothing, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(
            test_every_failing_operation_of_a_save_leaves_a_good_checkpoint, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_every_failing_operation_of_a_load_is_one_error, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_put_tensors_and_hf_directory, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
