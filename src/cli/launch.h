/* launch.h - starting the ranks of a job on this machine. */
#ifndef ITH_CLI_LAUNCH_H
#define ITH_CLI_LAUNCH_H

#include "comm/comm.h"

/* Runs `mpirun -n RANKS <this program> COMMAND ARGUMENTS...`, or without mpirun or the plug-in for
 * MPI the ranks themselves, waits and ends this process with the exit code; returns only when
 * nothing starts. SIGINT and SIGTERM reach the ranks as ITH_SIGNAL_STOP: mpirun answers the
 * originals by killing its ranks within a second, which is too short for a checkpoint, but passes
 * this one on. SIGUSR1 is passed on as it is. */
#define ITH_SIGNAL_STOP SIGUSR2
ith_status ith_launch_ranks(int64_t ranks, const char *command, const char *const *arguments,
                            int num_arguments, ith_error *err);

/* Between two fixed points nobody can ask the others: one rank says what happened, all end. */
void ith_end_all_ranks(ith_comm *world, ith_status status, ith_error *err);

#endif
