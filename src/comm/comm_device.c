/* comm_device.c - groups over the links of devices. The ranks meet through their host group, which
 * also ends the job when a device group is lost. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/env.h"
#include "base/log.h"
#include "base/mem.h"
#include "comm/comm.h"

typedef struct {
    ith_device *device;
    ith_comm *host;
    const ith_device_way *way;
    void *group; /* of the way */
} device_state;

static ith_status device_exchange(ith_comm *comm, const ith_exchange *x, ith_error *err)
{
    device_state *s = comm->state;
    return s->way->exchange(s->device, s->group, x, err);
}

static ith_status device_exchange_rows(ith_comm *comm, const ith_strided *send,
                                       const ith_strided *recv, int64_t pieces, ith_error *err)
{
    device_state *s = comm->state;
    return s->way->exchange_rows(s->device, s->group, send, recv, pieces, err);
}

static ith_status device_add(ith_comm *comm, void *to, bool add, const void *own, int64_t stride,
                             int64_t n, ith_dtype dtype, ith_error *err)
{
    device_state *s = comm->state;
    return s->device->links->add_parts(s->device, s->group, to, add, own, comm->scratch, stride, n,
                                       dtype == ITH_F64, err);
}

static ith_status device_split(ith_comm *comm, int64_t color, void **state, int64_t *rank,
                               int64_t *size, ith_error *err)
{
    (void)comm, (void)color, (void)state, (void)rank, (void)size;
    return ith_fail(err, ITH_ERR_UNSUPPORTED, "groups of devices are opened on a split host group");
}

static void device_close(ith_comm *comm)
{
    device_state *s = comm->state;
    if (s->group)
        s->way->close_group(s->device, s->group);
    ith_free(s);
}

static void device_abort(ith_comm *comm, int exit_code)
{
    device_state *s = comm->state;
    ith_comm_abort(s->host, exit_code);
}

/* On the links' thread: what is queued will never end, and with it the thread that waits for it. So
 * this process ends here, after the others were told. */
static void lost(void *arg, const char *why)
{
    ith_comm *host = arg;
    ith_log(ITH_LOG_ERROR, "comm", "rank %lld of %lld: %s", (long long)host->rank,
            (long long)host->size, why);
    ith_comm_abort(host, ith_exit_code(ITH_ERR_RUN));
    (void)kill(getpid(), SIGKILL);
}

/* Ranks with this rank's device, of which there may be one. A device may have several numbers, so
 * it is told by its uuid. */
static ith_status count_sharers(const ith_comm *host, const ith_device *device,
                                const unsigned char *all, int64_t *sharers, ith_error *err)
{
    enum { N = ITH_DEVICE_UUID_BYTES };
    const unsigned char *own = all + host->rank * N;
    *sharers = 0;
    for (int64_t r = 0; r < host->size; r++) {
        if (memcmp(all + r * N, own, N) != 0)
            continue;
        if (r < host->rank && !ith_env_truthy(ITH_ENV_SHARE_GPU))
            return ith_fail(err, ITH_ERR_USAGE,
                            "ranks %lld and %lld have the same GPU, %s (use at most as many ranks "
                            "as a machine has)",
                            (long long)r, (long long)host->rank, device->name);
        ++*sharers;
    }
    return ITH_OK;
}

static ith_status check_devices(ith_comm *host, ith_device *device, int64_t *sharers,
                                ith_error *err)
{
    unsigned char own[ITH_DEVICE_UUID_BYTES] = {0}, *all = host->scratch;
    ith_status status = ITH_OK;
    ITH_ASSERT(host->size * (int64_t)sizeof own <= host->scratch_bytes);
    if (device->links)
        status = device->links->identify(device, own, err);
    else
        status = ith_fail(err, ITH_ERR_UNSUPPORTED, "%s works alone (use 1 rank)", device->name);
    ITH_TRY(ith_comm_agree(host, status, err));
    ITH_TRY(ith_comm_all_gather(host, all, own, sizeof own, err));
    return ith_comm_agree(host, count_sharers(host, device, all, sharers, err), err);
}

static const ith_comm_driver driver = {
    "device",     device_exchange, device_split,         device_close,
    device_abort, device_add,      device_exchange_rows, NULL};

/* Opens s->group by one way, on all ranks or on none. */
static ith_status open_by(device_state *s, const ith_device_way *way, bool last, bool beside,
                          ith_error *err)
{
    char id[ITH_DEVICE_GROUP_ID_BYTES] = "";
    ith_comm *host = s->host;
    ith_status status = host->rank == 0 ? way->new_group(s->device, id, err) : ITH_OK;
    ITH_TRY(ith_comm_agree(host, status, err));
    ITH_TRY(ith_comm_broadcast(host, id, sizeof id, 0, err));
    status = way->open_group(s->device, id, host->rank, host->size, beside, host->timeout_s, lost,
                             host, &s->group, err);
    if (status != ITH_OK && last) /* the others may wait for this rank for ever */
        lost(host, err->text);
    s->way = way;
    return ith_comm_agree(host, status, err);
}

static ith_status open_first(device_state *s, bool beside, ith_error *err)
{
    enum { NUM_WAYS = sizeof s->device->links->ways / sizeof *s->device->links->ways };
    const char *wanted = ith_env(ITH_ENV_LINKS);
    ith_status status = ITH_OK;
    for (int i = 0; i < NUM_WAYS; i++) {
        const ith_device_way *way = s->device->links->ways[i];
        if (!way || (wanted && strcmp(wanted, way->name) != 0))
            continue;
        ith_error_clear(err);
        bool last = wanted || i + 1 == NUM_WAYS;
        status = open_by(s, way, last, beside, err);
        if (status == ITH_OK)
            return ITH_OK;
        if (s->group)
            way->close_group(s->device, s->group);
        s->group = NULL;
        if (!last && s->host->rank == 0)
            ith_log(ITH_LOG_INFO, "comm", "GPUs do not exchange by %s: %s", way->name, err->text);
    }
    return status != ITH_OK
               ? status
               : ith_fail(err, ITH_ERR_USAGE, "ITH_LINKS: found %s (use peer or nccl)", wanted);
}

ith_status ith_comm_open_device(ith_comm **out, ith_comm *host, ith_device *device, bool beside,
                                ith_error *err)
{
    device_state *s = NULL;
    ith_status status = ITH_OK;
    int64_t sharers = 1;
    if (host->size > 1)
        ITH_TRY(check_devices(host, device, &sharers, err));
    ITH_TRY(ith_alloc_zero((void **)&s, 1, sizeof *s, "device group", err));
    s->device = device;
    s->host = host;
    ITH_TRY_OUT(open_first(s, beside, err));
    ITH_TRY_OUT(ith_comm_wrap(out, &driver, s, host->rank, host->size, host->timeout_s, err));
    (*out)->takes_rows = s->way->exchange_rows != NULL;
    (*out)->sharers = sharers;
    return ITH_OK;
out:
    if (s->group)
        s->way->close_group(device, s->group);
    ith_free(s);
    return status;
}

const char *ith_comm_way(const ith_comm *comm)
{
    const device_state *s = comm->state;
    return comm->driver == &driver ? s->way->name : comm->driver->name;
}
