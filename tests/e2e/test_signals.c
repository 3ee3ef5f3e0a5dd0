/* test_signals.c - what the program does when it is told to stop.
 * Method: start `ithaca train` on a run that would take for ever, wait for its first log row, send
 * a signal, look at exit code, messages and files. */
#include "e2e/small_dir.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>

#include "checkpoint/train_state.h"

static char *base;

/* Starts the program; its stderr goes to `log`. */
static pid_t start(const char *config, const char *override, const char *log)
{
    static char program[] = ITH_PROGRAM, command[] = "train";
    char a[4096], b[256];
    snprintf(a, sizeof a, "%s", config);
    snprintf(b, sizeof b, "%s", override ? override : "seed=42");
    char *argv[] = {program, command, a, b, NULL};
    extern char **environ;
    posix_spawn_file_actions_t actions;
    pid_t pid = 0;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(posix_spawn(&pid, program, &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, 20000000}, NULL);
}

/* Exit code, or 128 + signal; fails after two minutes. */
static int wait_for(pid_t pid)
{
    for (int i = 0; i < 6000; i++) {
        int status = 0;
        pid_t got = waitpid(pid, &status, WNOHANG);
        if (got == pid)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        nap();
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fail_msg("the program does not end");
    return -1;
}

static int64_t num_rows(const char *out)
{
    ith_buf text = {0};
    ith_error err = {0};
    int64_t n = 0;
    const char *path = small_join(out, "trainer_log.jsonl");
    if (ith_path_exists(path) && ith_read_file(path, 0, &text, &err) == ITH_OK)
        for (int64_t i = 0; i < text.len; i++)
            n += text.data[i] == '\n';
    ith_buf_deinit(&text);
    return n;
}

/* Until the log has `rows` rows; the program must be alive. */
static void wait_rows(pid_t pid, const char *out, int64_t rows)
{
    for (int i = 0; i < 6000; i++) {
        if (num_rows(out) >= rows)
            return;
        if (waitpid(pid, NULL, WNOHANG) == pid)
            fail_msg("the program ended before row %lld", (long long)rows);
        nap();
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    fail_msg("no row %lld", (long long)rows);
}

static void write_config(const char *name, const char *more)
{
    ith_buf text = {0};
    ith_error err = {0};
    char out[64], file[64];
    snprintf(out, sizeof out, "out-%s", name);
    snprintf(file, sizeof file, "%s.yaml", name);
    ith_buf_printf(&text,
                   "model: %s\ntrain_dataset: %s\noutput_dir: %s\ndevice: cpu\nthreads: 2\n"
                   "train_on: all_turns\ncutoff_len: 96\nreport_to: []\n%s",
                   small_join(base, "model"), small_join(base, "data.jsonl"), small_join(base, out),
                   more);
    assert_ok(ith_write_file(small_join(base, file), text.data, text.len, &err), err);
    ith_buf_deinit(&text);
}

static int64_t count_text(const char *path, const char *part)
{
    ith_buf text = {0};
    ith_error err = {0};
    int64_t n = 0;
    assert_ok(ith_read_file(path, 0, &text, &err), err);
    for (const char *p = text.data; p && (p = strstr(p, part)); p++)
        n++;
    ith_buf_deinit(&text);
    return n;
}

static void stop_and_resume(const char *name, int number)
{
    ith_error err = {0};
    ith_buf path = {0};
    char out[4096], config[4096], log[4096];
    snprintf(out, sizeof out, "%s/out-%s", base, name);
    snprintf(config, sizeof config, "%s/%s.yaml", base, name);
    snprintf(log, sizeof log, "%s/%s.log", base, name);
    write_config(name, "max_steps: 1000000\nresume_from_checkpoint: auto\n");
    pid_t pid = start(config, NULL, log);
    wait_rows(pid, out, 2);
    assert_int_equal(kill(pid, number), 0);
    assert_int_equal(wait_for(pid), 1);
    assert_int_equal(count_text(log, "stopped by a signal after saving"), 1);
    assert_ok(ith_train_state_find_latest(out, &path, &err), err);
    assert_true(path.len > 0);
    assert_ok(ith_train_state_check(path.data, &err), err);
    assert_false(ith_path_exists(small_join(out, "model.safetensors")));
    int64_t step = strtoll(strrchr(path.data, '-') + 1, NULL, 10);
    assert_int_equal(num_rows(out), step); /* the step that ran was finished and logged */
    char override[64];
    snprintf(override, sizeof override, "max_steps=%lld", (long long)step + 2);
    assert_int_equal(wait_for(start(config, override, log)), 0);
    assert_int_equal(num_rows(out), step + 2);
    assert_true(ith_path_exists(small_join(out, "model.safetensors")));
    ith_buf_deinit(&path);
}

static void test_signal_term_saves_and_stops(void **state)
{
    (void)state;
    stop_and_resume("term", SIGTERM);
}

static void test_signal_int_saves_and_stops(void **state)
{
    (void)state;
    stop_and_resume("int", SIGINT);
}

static void test_signal_usr1_saves_and_goes_on(void **state)
{
    (void)state;
    ith_error err = {0};
    ith_buf path = {0};
    char out[4096], config[4096], log[4096];
    snprintf(out, sizeof out, "%s/out-usr1", base);
    snprintf(config, sizeof config, "%s/usr1.yaml", base);
    snprintf(log, sizeof log, "%s/usr1.log", base);
    write_config("usr1", "max_steps: 1000000\n");
    pid_t pid = start(config, NULL, log);
    for (int64_t k = 1; k <= 2; k++) {
        wait_rows(pid, out, num_rows(out) + 2);
        assert_int_equal(kill(pid, SIGUSR1), 0);
        for (int i = 0; i < 3000 && count_text(log, "saved ") < k; i++)
            nap();
        assert_int_equal(count_text(log, "saved "), k);
    }
    wait_rows(pid, out, num_rows(out) + 2);
    assert_ok(ith_train_state_find_latest(out, &path, &err), err);
    assert_true(path.len > 0);
    assert_int_equal(kill(pid, SIGTERM), 0);
    assert_int_equal(wait_for(pid), 1);
    ith_buf_deinit(&path);
}

/* The one step of this run takes seconds; asked twice, the program does not wait for it. */
static void test_signal_twice_leaves_at_once(void **state)
{
    (void)state;
    char out[4096], config[4096], log[4096];
    snprintf(out, sizeof out, "%s/out-twice", base);
    snprintf(config, sizeof config, "%s/twice.yaml", base);
    snprintf(log, sizeof log, "%s/twice.log", base);
    write_config("twice", "max_steps: 3\nglobal_batch_size: 4000\n");
    pid_t pid = start(config, NULL, log);
    for (int i = 0; i < 3000 && !ith_path_exists(small_join(out, "trainer_log.jsonl")); i++)
        nap();
    assert_int_equal(kill(pid, SIGINT), 0);
    nap();
    nap();
    assert_int_equal(waitpid(pid, NULL, WNOHANG), 0); /* once: it finishes its step first */
    assert_int_equal(kill(pid, SIGINT), 0);
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    assert_int_equal(wait_for(pid), 128 + SIGINT);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    if (t1.tv_sec - t0.tv_sec > 1)
        fail_msg("left %lld s after the second signal", (long long)(t1.tv_sec - t0.tv_sec));
    assert_int_equal(num_rows(out), 0);
}

static int setup(void **state)
{
    (void)state;
    base = small_setup("signals");
    small_shape shape = small_dense;
    shape.vocab = 320;
    small_make_model(small_join(base, "model"), &shape, &(small_layout){.dtype = ITH_BF16});
    small_make_data(small_join(base, "data.jsonl"), 5000);
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
        cmocka_unit_test(test_signal_term_saves_and_stops),
        cmocka_unit_test(test_signal_int_saves_and_stops),
        cmocka_unit_test(test_signal_usr1_saves_and_goes_on),
        cmocka_unit_test(test_signal_twice_leaves_at_once),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
