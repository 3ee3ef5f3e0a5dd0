/* Goal: colours appear on a terminal only, and NO_COLOR switches them off. Method: the program's
 * stderr is a pseudo-terminal. */
#include "run_program.h"

/* What `ithaca banana` writes to a terminal with these variables. */
static void run_on_terminal(const char *term, const char *no_color, char *text, size_t size)
{
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0)
        skip();
    char slave[256], term_variable[64], color_variable[64];
    static char program[] = ITH_PROGRAM, argument[] = "banana";
    assert_int_equal(ptsname_r(master, slave, sizeof slave), 0);
    snprintf(term_variable, sizeof term_variable, "TERM=%s", term);
    snprintf(color_variable, sizeof color_variable, "NO_COLOR=%s", no_color);
    char *argv[] = {program, argument, NULL}, *envp[] = {term_variable, color_variable, NULL};
    posix_spawn_file_actions_t actions;
    pid_t pid = 0;
    int status = 0;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    posix_spawn_file_actions_addopen(&actions, 2, slave, O_WRONLY | O_NOCTTY, 0);
    int spawned = posix_spawn(&pid, program, &actions, NULL, argv, envp);
    posix_spawn_file_actions_destroy(&actions);
    assert_int_equal(spawned, 0);
    size_t used = 0;
    for (ssize_t got = 1; got > 0 && used + 1 < size; used += got > 0 ? (size_t)got : 0)
        got = read(master, text + used, size - 1 - used); /* EIO: the other end closed */
    text[used] = '\0';
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WEXITSTATUS(status), 2);
    close(master);
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
        char text[512];
        run_on_terminal(cases[i].term, cases[i].no_color, text, sizeof text);
        assert_string_equal(text, cases[i].expected);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_errors_are_coloured_on_a_terminal)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
