/* mpi_api.h - what the program and libithaca_mpi.so tell each other. Stays inside comm/. */
#ifndef ITH_COMM_MPI_API_H
#define ITH_COMM_MPI_API_H

#include "comm/comm.h"

/* Both sides must be of one build: the version and the layout of what they share. */
#define ITH_MPI_ABI (ITH_VERSION " comm 3")

typedef struct {
    const char *abi;
    /* Memory of the group comes from the program, so that it is counted and can be made to fail. */
    ith_status (*wrap)(ith_comm **out, const ith_comm_driver *driver, void *state, int64_t rank,
                       int64_t size, double timeout_s, ith_error *err);
} ith_mpi_api;

typedef ith_status ith_mpi_open_fn(const ith_mpi_api *api, ith_comm **out, double timeout_s,
                                   ith_error *err);

#endif
