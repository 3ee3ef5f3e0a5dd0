/* launch.c - the ranks of a run on one machine: under mpirun where it and the plug-in for MPI are,
 * else as children of this process that meet over sockets (comm/comm_tcp.h). */
#include "cli/launch.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "cli/terminal.h"

#define MAX_OPTIONS 16
#define NOT_STARTED 127
#define GRACE_S 10 /* for the other ranks, when one has failed */

static volatile sig_atomic_t target; /* of kill: a process, or less a group of them; 0: none */

static void pass_on(int number)
{
    if (target != 0)
        kill((pid_t)target, number == SIGUSR1 ? SIGUSR1 : ITH_SIGNAL_STOP);
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
    target = pid;
    install();
    while (waitpid(pid, &state, 0) < 0 && errno == EINTR)
        continue;
    *code = WIFEXITED(state) ? WEXITSTATUS(state) : 1;
    return ITH_OK;
}

/* ---- without mpirun ---- */

/* A port that is free now. */
static ith_status free_port(int64_t *port, ith_error *err)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof any;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bool ok = fd >= 0 && bind(fd, (struct sockaddr *)&any, len) == 0 &&
              getsockname(fd, (struct sockaddr *)&any, &len) == 0;
    ith_status status = ok ? ITH_OK : ith_fail(err, ITH_ERR_IO, "port: %s", strerror(errno));
    *port = ntohs(any.sin_port);
    if (fd >= 0)
        close(fd);
    return status;
}

static void set_number(const char *name, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    setenv(name, text, 1);
}

/* All in one process group of their own, named by the first. */
static ith_status start_ranks(int64_t ranks, char *const *argv, pid_t *pids, ith_error *err)
{
    int64_t port = 0;
    ITH_TRY(free_port(&port, err));
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", port);
    set_number("WORLD_SIZE", ranks);
    set_number("LOCAL_WORLD_SIZE", ranks);
    fflush(NULL);
    for (int64_t r = 0; r < ranks; r++) {
        set_number("RANK", r);
        set_number("LOCAL_RANK", r);
        pid_t pid = fork();
        if (pid < 0) {
            int code = errno;
            if (r > 0)
                kill(-pids[0], SIGKILL);
            return ith_fail(err, ITH_ERR_RUN, "cannot start process %lld of %lld: %s",
                            (long long)r + 1, (long long)ranks, strerror(code));
        }
        if (pid == 0) {
            setpgid(0, r > 0 ? pids[0] : 0);
            execv(argv[0], argv);
            _exit(NOT_STARTED);
        }
        pids[r] = pid;
        setpgid(pid, pids[0]);
    }
    return ITH_OK;
}

/* Exit code of rank 0; of another one when that is 0 or was killed. A rank that a signal ended
 * before the others could miss it says nothing, nor do they: it is an error here. */
static ith_status wait_ranks(int64_t ranks, const pid_t *pids, int *code, ith_error *err)
{
    int state = 0, first_signal = 0;
    int64_t lost = -1;
    bool told = false; /* a rank ended with an exit code of its own */
    time_t failed_at = 0;
    *code = 0;
    for (int64_t left = ranks; left > 0;) {
        pid_t pid = waitpid(-pids[0], &state, *code ? WNOHANG : 0);
        if (pid == 0) {
            if (time(NULL) - failed_at > GRACE_S)
                kill(-pids[0], SIGKILL);
            nanosleep(&(struct timespec){0, 50000000}, NULL);
            continue;
        }
        if (pid < 0 && errno == EINTR)
            continue;
        if (pid < 0)
            break;
        left--;
        int own = WIFEXITED(state) ? WEXITSTATUS(state) : 1;
        told |= WIFEXITED(state) && own;
        if (own && !*code)
            failed_at = time(NULL);
        for (int64_t r = 0; r < ranks && !*code; r++)
            if (pids[r] == pid && WIFSIGNALED(state)) {
                lost = r;
                first_signal = WTERMSIG(state);
            }
        *code = own && (!*code || (pid == pids[0] && WIFEXITED(state))) ? own : *code;
    }
    return told || lost < 0 ? ITH_OK
                            : ith_fail(err, ITH_ERR_RUN, "rank %lld: ended by signal %d (%s)",
                                       (long long)lost, first_signal, strsignal(first_signal));
}

static ith_status run_ranks(int64_t ranks, char *const *argv, int *code, ith_error *err)
{
    pid_t *pids = NULL;
    ITH_TRY(ith_alloc_zero((void **)&pids, ranks, sizeof *pids, "ranks", err));
    ith_status status = start_ranks(ranks, argv, pids, err);
    if (status == ITH_OK) {
        target = -pids[0];
        install();
        status = wait_ranks(ranks, pids, code, err);
    }
    ith_free(pids);
    return status;
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
    int first = n;
    argv[n++] = self;
    argv[n++] = borrowed(command);
    for (int i = 0; i < num_arguments; i++)
        argv[n++] = borrowed(arguments[i]);
    bool has_mpi = ith_comm_has_mpi();
    ith_status status = has_mpi ? run_child(argv, &code, err) : ITH_OK;
    if (status == ITH_OK && (!has_mpi || code == NOT_STARTED))
        status = run_ranks(ranks, argv + first, &code, err);
    ith_free(argv);
    if (status == ITH_OK)
        exit(code);
    return status;
}

void ith_end_all_ranks(ith_comm *world, ith_status status, ith_error *err)
{
    if (ith_comm_last_words(world, err)) {
        ith_terminal_error(err);
        fflush(stderr);
    }
    ith_comm_abort(world, ith_exit_code(status));
    _exit(ith_exit_code(status));
}
