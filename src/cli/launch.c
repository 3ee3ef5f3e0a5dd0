/* launch.c - mpirun as a child, with the options that a run on one machine needs. */
#include "cli/launch.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"

#define MAX_OPTIONS 16
#define NOT_STARTED 127

static volatile sig_atomic_t child;

static void pass_on(int number)
{
    if (child > 0)
        kill((pid_t)child, number == SIGUSR1 ? SIGUSR1 : ITH_SIGNAL_STOP);
}

static void install(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGUSR1};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = pass_on;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sigaction(numbers[i], &action, NULL);
}

/* execvp takes strings it does not write to. */
static char *borrowed(const char *text)
{
    union {
        const char *in;
        char *out;
    } u = {.in = text};
    return u.out;
}

/* Exit code of argv run as a child of its own process group, so that a terminal's interrupt comes
 * here only. */
static ith_status run_child(char *const *argv, int *code, ith_error *err)
{
    int state = 0;
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0)
        return ith_fail(err, ITH_ERR_RUN, "cannot start a process: %s", strerror(errno));
    if (pid == 0) {
        setpgid(0, 0);
        execvp(argv[0], argv);
        _exit(NOT_STARTED);
    }
    child = pid;
    install();
    while (waitpid(pid, &state, 0) < 0 && errno == EINTR)
        continue;
    *code = WIFEXITED(state) ? WEXITSTATUS(state) : 1;
    return ITH_OK;
}

ith_status ith_launch_ranks(int64_t ranks, const char *command, const char *const *arguments,
                            int num_arguments, ith_error *err)
{
    char self[PATH_MAX], count[24];
    char **argv = NULL;
    int n = 0, code = 0;
    ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
    if (len <= 0)
        return ith_fail(err, ITH_ERR_IO, "/proc/self/exe: cannot find this program: %s",
                        strerror(errno));
    self[len] = '\0';
    ITH_TRY(ith_alloc_zero((void **)&argv, MAX_OPTIONS + num_arguments + 1, sizeof *argv,
                           "arguments of mpirun", err));
    snprintf(count, sizeof count, "%lld", (long long)ranks);
    /* Threads of a rank are placed by the system; more ranks than cores are the user's choice. */
    static const char *const options[] = {"mpirun", "--quiet", "--bind-to", "none",
                                          "--oversubscribe"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        argv[n++] = borrowed(options[i]);
    if (geteuid() == 0)
        argv[n++] = borrowed("--allow-run-as-root");
    argv[n++] = borrowed("-n");
    argv[n++] = count;
    argv[n++] = self;
    argv[n++] = borrowed(command);
    for (int i = 0; i < num_arguments; i++)
        argv[n++] = borrowed(arguments[i]);
    ith_status status = run_child(argv, &code, err);
    ith_free(argv);
    if (status == ITH_OK && code != NOT_STARTED)
        exit(code);
    if (status != ITH_OK)
        return status;
    return ith_fail(err, ITH_ERR_UNSUPPORTED,
                    "ranks: %lld processes are started by mpirun, which is not here (install Open "
                    "MPI, or use 1)",
                    (long long)ranks);
}
