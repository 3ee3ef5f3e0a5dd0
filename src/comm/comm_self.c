/* comm_self.c - a group of one rank, and the way into a group of many.
 * Invariant: the plug-in is opened once and never closed, for MPI does not unload well. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/env.h"
#include "base/mem.h"
#include "base/plugin.h"
#include "comm/comm.h"
#include "comm/mpi_api.h"

static ith_status self_exchange(ith_comm *comm, const ith_exchange *x, ith_error *err)
{
    (void)comm;
    (void)err;
    ITH_ASSERT(x->send_bytes[0] == x->recv_bytes[0]);
    if (x->send_bytes[0])
        memmove((char *)x->recv + x->recv_at[0], (const char *)x->send + x->send_at[0],
                (size_t)x->send_bytes[0]);
    return ITH_OK;
}

static ith_status self_split(ith_comm *comm, int64_t color, void **state, int64_t *rank,
                             int64_t *size, ith_error *err)
{
    (void)comm;
    (void)color;
    (void)err;
    *state = NULL;
    *rank = 0;
    *size = 1;
    return ITH_OK;
}

static void self_close(ith_comm *comm)
{
    (void)comm;
}

static void self_abort(ith_comm *comm, int exit_code)
{
    (void)comm;
    (void)exit_code;
}

const ith_comm_driver ith_comm_driver_self = {"self", self_exchange, self_split, self_close,
                                              self_abort};

ith_status ith_comm_open_self(ith_comm **out, ith_error *err)
{
    return ith_comm_wrap(out, &ith_comm_driver_self, NULL, 0, 1, 0, err);
}

/* ---- a job of many ---- */

/* Number of ranks by a launcher's variable, 0 when it is not set. */
static long variable(const char *name)
{
    const char *text = getenv(name);
    return text && text[0] ? strtol(text, NULL, 10) : 0;
}

bool ith_comm_is_launched(void)
{
    /* Open MPI; PMI of MPICH, srun --mpi=pmi2; PMIx, whose namespace is set by every launcher. */
    return variable("OMPI_COMM_WORLD_SIZE") > 0 || variable("PMI_SIZE") > 0 ||
           getenv("PMIX_NAMESPACE") != NULL;
}

static ith_status open_mpi(ith_comm **out, double timeout_s, ith_error *err)
{
    void *handle = NULL;
    ith_mpi_open_fn *open = NULL;
    ith_mpi_api api = {ITH_MPI_ABI, ith_comm_wrap};
    ITH_TRY(ith_plugin_open(&handle, "libithaca_mpi.so", ith_env(ITH_ENV_MPI_PLUGIN), err));
    ITH_TRY(ith_plugin_symbol(handle, "ith_mpi_open", &open, err));
    return open(&api, out, timeout_s, err);
}

ith_status ith_comm_open_world(ith_comm **out, double timeout_s, ith_error *err)
{
    if (ith_comm_is_launched())
        ITH_WRAP(open_mpi(out, timeout_s, err), err, "this process is one rank of a job");
    else if (variable("WORLD_SIZE") > 1)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "WORLD_SIZE=%ld is set but no MPI launcher started this process (start "
                        "ranks with mpirun or srun, or give ranks=%ld)",
                        variable("WORLD_SIZE"), variable("WORLD_SIZE"));
    else
        ITH_TRY(ith_comm_open_self(out, err));
    return ITH_OK;
}
