/* Goal: colours appear on a terminal only, and NO_COLOR switches them off. Method: the program's
 * stderr is a pseudo-terminal. */
#include "run_program.h"

#include <sys/ioctl.h>

/* What the program writes to a terminal of so many columns (0: not known); returns its exit code.
 * args: NULL-terminated. */
static int run_on_terminal(const char *const *args, const char *const *environment, int columns,
                           char *text, size_t size)
{
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0)
        skip();
    struct winsize window = {.ws_row = 24, .ws_col = (unsigned short)columns};
    assert_int_equal(ioctl(master, TIOCSWINSZ, &window), 0);
    char slave[256];
    static char program[] = ITH_PROGRAM;
    assert_int_equal(ptsname_r(master, slave, sizeof slave), 0);
    char *argv[16] = {program}, *envp[8] = {0};
    for (int i = 0; args[i]; i++)
        memcpy(&argv[i + 1], &args[i], sizeof argv[0]);
    for (int i = 0; environment[i]; i++)
        memcpy(&envp[i], &environment[i], sizeof envp[0]);
    posix_spawn_file_actions_t actions;
    pid_t pid = 0;
    int status = 0;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, slave, O_WRONLY | O_NOCTTY, 0);
    int spawned = posix_spawn(&pid, program, &actions, NULL, argv, envp);
    posix_spawn_file_actions_destroy(&actions);
    assert_int_equal(spawned, 0);
    size_t used = 0;
    for (ssize_t got = 1; got > 0 && used + 1 < size; used += got > 0 ? (size_t)got : 0)
        got = read(master, text + used, size - 1 - used); /* EIO: the other end closed */
    text[used] = '\0';
    assert_int_equal(waitpid(pid, &status, 0), pid);
    close(master);
    return WEXITSTATUS(status);
}

static void test_errors_are_coloured_on_a_terminal(void **state)
{
    (void)state;
    static const char plain[] = "error: banana: unknown command (ithaca help lists all)\r\n";
    static const char coloured[] =
        "\033[31merror: \033[0mbanana: unknown command (ithaca help lists all)\r\n";
    static const struct {
        const char *term, *no_color, *expected;
    } cases[] = {{"xterm", "", coloured}, {"xterm", "1", plain}, {"dumb", "", plain}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512], term[64], no_color[64];
        snprintf(term, sizeof term, "TERM=%s", cases[i].term);
        snprintf(no_color, sizeof no_color, "NO_COLOR=%s", cases[i].no_color);
        const char *args[] = {"banana", NULL}, *environment[] = {term, no_color, NULL};
        assert_int_equal(run_on_terminal(args, environment, 0, text, sizeof text), 2);
        assert_string_equal(text, cases[i].expected);
    }
}

static void write_rows(const char *path)
{
    ith_error err = {0};
    ith_buf rows = {0};
    for (int i = 0; i < 40; i++)
        ith_buf_printf(&rows, "{\"instruction\": \"Count to %d\", \"output\": \"%d it is.\"}\n", i,
                       i);
    assert_ok(ith_write_file(path, rows.data, rows.len, &err), err);
    ith_buf_deinit(&rows);
}

/* A live line as wide as the terminal would wrap, and only its last row would be cleared. */
static void test_the_live_line_is_not_wider_than_the_terminal(void **state)
{
    (void)state;
    char dir[4096], model[4200], rows[4200], data[4300], out[4300], source[4300];
    snprintf(dir, sizeof dir, "%s", temp_dir("live"));
    snprintf(model, sizeof model, "%s/model", dir);
    snprintf(rows, sizeof rows, "%s/rows.jsonl", dir);
    snprintf(source, sizeof source, "model=%s", model);
    snprintf(data, sizeof data, "train_dataset=%s", rows);
    snprintf(out, sizeof out, "output_dir=%s/out", dir);
    write_rows(rows);
    const char *init[] = {"init", model,          "--size", "tiny", "--learn",
                          rows,   "--vocab-size", "300",    NULL};
    program_run made = run_program(init, NULL);
    assert_int_equal(made.code, 0);
    program_run_deinit(&made);
    char config[4300];
    ith_error err = {0};
    snprintf(config, sizeof config, "%s/c.yaml", dir);
    assert_ok(ith_write_file(config, "{}", 2, &err), err);
    const char *args[] = {"train",           config,       source, data, out, "max_steps=5",
                          "logging_steps=5", "device=cpu", NULL};
    const char *environment[] = {"TERM=xterm", NULL};
    static char text[65536];
    assert_int_equal(run_on_terminal(args, environment, 40, text, sizeof text), 0);
    int lines = 0;
    for (const char *p = text; (p = strstr(p, "\r\033[Kstep ")); lines++) {
        size_t len = strcspn(p += 4, "\r\n");
        if (p[len + 1] != '\n' && len > 39)
            fail_msg("%zu columns of 40: %.*s", len, (int)len, p);
    }
    assert_true(lines >= 5);
    assert_ok(ith_remove_tree(dir, &err), err);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors_are_coloured_on_a_terminal),
        cmocka_unit_test(test_the_live_line_is_not_wider_than_the_terminal)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
