/* run_program.h - runs the program and keeps what it wrote, for tests of commands. */
#ifndef ITH_TESTS_RUN_PROGRAM_H
#define ITH_TESTS_RUN_PROGRAM_H

#include "testing.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

typedef struct {
    int code; /* exit code, or 128 + signal */
    ith_buf out, err;
} program_run;

/* stdout_path: a file or device that gets the output instead of run.out, or NULL.
 * args: NULL-terminated, without the program's name. environment: extra NAME=value, or NULL. Free
 * with program_run_deinit. */
static inline program_run run_program_to(const char *const *args, const char *environment,
                                         const char *stdout_path)
{
    program_run run = {0};
    char *argv[64] = {0}, dir[4096], out_path[4200], err_path[4200];
    static char program[] = ITH_PROGRAM;
    argv[0] = program;
    for (int i = 0; args[i]; i++) {
        assert_true(i < 60);
        memcpy(&argv[i + 1], &args[i], sizeof argv[0]);
    }
    snprintf(dir, sizeof dir, "%s", temp_dir("run_program"));
    snprintf(out_path, sizeof out_path, "%s/out", dir);
    snprintf(err_path, sizeof err_path, "%s/err", dir);
    posix_spawn_file_actions_t actions;
    assert_int_equal(posix_spawn_file_actions_init(&actions), 0);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, stdout_path ? stdout_path : out_path,
                                     O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, err_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    extern char **environ;
    char *envp[512] = {0}, extra[4096];
    int n = 0;
    if (environment) { /* first wins in getenv */
        snprintf(extra, sizeof extra, "%s", environment);
        envp[n++] = extra;
    }
    for (int i = 0; environ[i] && n < 510; i++)
        envp[n++] = environ[i];
    pid_t pid = 0;
    int status = 0, spawned = posix_spawn(&pid, program, &actions, NULL, argv, envp);
    posix_spawn_file_actions_destroy(&actions);
    if (spawned != 0)
        fail_msg("cannot start %s: %s", program, strerror(spawned));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    run.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    ith_error err = {0};
    if (!stdout_path)
        assert_ok(ith_read_file(out_path, 0, &run.out, &err), err);
    assert_ok(ith_read_file(err_path, 0, &run.err, &err), err);
    return run;
}

static inline program_run run_program(const char *const *args, const char *environment)
{
    return run_program_to(args, environment, NULL);
}

static inline void program_run_deinit(program_run *run)
{
    ith_buf_deinit(&run->out);
    ith_buf_deinit(&run->err);
}

#endif
