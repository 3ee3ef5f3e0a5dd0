/* comm_self.c - a group of one rank, and the way into a group of many.
 * Invariant: the plug-in is opened once and never closed, for MPI does not unload well. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/env.h"
#include "base/mem.h"
#include "base/plugin.h"
#include "comm/comm.h"
#include "comm/comm_tcp.h"
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

const ith_comm_driver ith_comm_driver_self = {"self",     self_exchange, self_split, self_close,
                                              self_abort, NULL,          NULL,       NULL};

ith_status ith_comm_open_self(ith_comm **out, ith_error *err)
{
    return ith_comm_wrap(out, &ith_comm_driver_self, NULL, 0, 1, 0, err);
}

/* ---- a job of many ---- */

/* A launcher's variable as a number, -1 when it is not set. */
static int64_t variable(const char *name)
{
    const char *text = getenv(name);
    return text && text[0] ? strtoll(text, NULL, 10) : -1;
}

/* Open MPI; PMI of MPICH, srun --mpi=pmi2; PMIx, whose namespace is set by every launcher. */
static bool launched_by_mpi(void)
{
    return variable("OMPI_COMM_WORLD_SIZE") > 0 || variable("PMI_SIZE") > 0 ||
           getenv("PMIX_NAMESPACE") != NULL;
}

bool ith_comm_is_launched(void)
{
    return launched_by_mpi() || variable("WORLD_SIZE") > 1;
}

/* The variables of torchrun. With its agent a store of torch listens at MASTER_PORT: rank 0 takes
 * the port above. */
static ith_status open_tcp(ith_comm **out, ith_error *err)
{
    int64_t rank = variable("RANK"), size = variable("WORLD_SIZE"), port = variable("MASTER_PORT");
    const char *address = getenv("MASTER_ADDR"), *store = getenv("TORCHELASTIC_USE_AGENT_STORE");
    char text[24];
    if (rank < 0 || rank >= size)
        return ith_fail(err, ITH_ERR_USAGE, "RANK: found %s with WORLD_SIZE=%lld (use 0 to %lld)",
                        getenv("RANK") ? getenv("RANK") : "nothing", (long long)size,
                        (long long)size - 1);
    if (!address || port <= 0 || port > 65534)
        return ith_fail(err, ITH_ERR_USAGE,
                        "%s: not given or no port, with WORLD_SIZE=%lld (set MASTER_ADDR and "
                        "MASTER_PORT, where rank 0 listens; or start the ranks with mpirun, srun "
                        "or ranks=%lld)",
                        address ? "MASTER_PORT" : "MASTER_ADDR", (long long)size, (long long)size);
    port += store && strcmp(store, "True") == 0;
    snprintf(text, sizeof text, "%lld", (long long)port);
    return ith_comm_open_tcp(out, rank, size, address, text, err);
}

static ith_status open_plugin(void **handle, ith_error *err)
{
    return ith_plugin_open(handle, "libithaca_mpi.so", ith_env(ITH_ENV_MPI_PLUGIN), err);
}

bool ith_comm_has_mpi(void)
{
    void *handle = NULL;
    ith_error ignored = {0};
    if (open_plugin(&handle, &ignored) != ITH_OK)
        return false;
    ith_plugin_close(handle);
    return true;
}

static ith_status open_mpi(ith_comm **out, double timeout_s, ith_error *err)
{
    void *handle = NULL;
    ith_mpi_open_fn *open = NULL;
    ith_mpi_api api = {ITH_MPI_ABI, ith_comm_wrap};
    ITH_TRY(open_plugin(&handle, err));
    ITH_TRY(ith_plugin_symbol(handle, "ith_mpi_open", &open, err));
    return open(&api, out, timeout_s, err);
}

ith_status ith_comm_open_world(ith_comm **out, double timeout_s, ith_error *err)
{
    if (launched_by_mpi())
        ITH_WRAP(open_mpi(out, timeout_s, err), err, "this process is one rank of a job");
    else if (ith_comm_is_launched())
        ITH_TRY(open_tcp(out, err));
    else if (variable("SLURM_STEP_NUM_TASKS") > 1) /* each would do the whole work */
        return ith_fail(err, ITH_ERR_USAGE,
                        "srun started %lld tasks that do not know of each other (use srun "
                        "--mpi=pmix)",
                        (long long)variable("SLURM_STEP_NUM_TASKS"));
    else
        ITH_TRY(ith_comm_open_self(out, err));
    (*out)->timeout_s = timeout_s;
    return ITH_OK;
}
