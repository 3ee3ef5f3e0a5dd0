/* main.c - the program: picks the command, prints its failure, gives the exit code (0 done, 1 the
 * run failed, 2 the request was wrong). */
#include "base/env.h"
#include "cli/commands.h"
#include "cli/terminal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static ith_status dispatch(int argc, char *const *argv, ith_error *err)
{
    ITH_TRY(ith_env_apply(err));
    const char *name = argc > 1 ? argv[1] : NULL;
    if (!name) {
        ITH_TRY(ith_print_page(ith_write_overview, err));
        return ith_fail(err, ITH_ERR_USAGE, "a command is missing (ithaca train CONFIG trains)");
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        name = "help";
    else if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0)
        name = "version";
    const ith_command *command = ith_find_command(name);
    if (!command)
        return ith_fail_unknown_command(name, err);
    return ith_run_command(command, argc - 2, argv + 2, err);
}

int main(int argc, char **argv)
{
    ith_error err = {0};
    ith_terminal_init();
    ith_status status = dispatch(argc, argv, &err);
    /* A full disk or closed pipe shows only here. */
    if (fflush(stdout) != 0 && status == ITH_OK)
        status = ith_fail(&err, ITH_ERR_IO, "stdout: cannot write: %s", strerror(errno));
    if (status != ITH_OK)
        ith_terminal_error(&err);
    return ith_exit_code(status);
}
