/* nccl_cuda.c - the way over NCCL, which is opened at run time: any GPUs, any machines.
 *
 * Invariants:
 *  1. An exchange is one NCCL group.
 *  2. All connections are made when the group is opened, so that what is free then is free.
 *  3. The library's own variables (NCCL_*) hold. */
#include "kernels/cuda/links_cuda.h"

#include <string.h>

#define NCCL_BYTE 1 /* ncclUint8 */
#define OVERHEAD ((int64_t)1 << 30)

typedef struct {
    ith_cuda_group group; /* first, for the functions of links_cuda.h */
    const ith_nccl *nccl;
    ith_cuda_driver driver;
    void *comm;      /* NULL until all ranks have joined */
    uint32_t *words; /* begun, ended */
} nccl_group;

static ith_status check_nccl(const ith_nccl *nccl, void *comm, int code, const char *what,
                             ith_error *err)
{
    if (code == 0)
        return ITH_OK;
    const char *more = nccl->ncclGetLastError(comm);
    return ith_fail(err, ITH_ERR_RUN, "NCCL: %s: %s%s%s", what, nccl->ncclGetErrorString(code),
                    more && more[0] ? ": " : "", more ? more : "");
}

static ith_status new_group(ith_device *d, char id[ITH_DEVICE_GROUP_ID_BYTES], ith_error *err)
{
    const ith_nccl *nccl = NULL;
    ith_nccl_id made;
    (void)d;
    ITH_TRY(ith_nccl_open(&nccl, err));
    ITH_TRY(check_nccl(nccl, NULL, nccl->ncclGetUniqueId(&made), "unique id", err));
    memcpy(id, made.bytes, sizeof made.bytes);
    return ITH_OK;
}

static const char *broken(const ith_cuda_group *group)
{
    const nccl_group *g = (const nccl_group *)group;
    int state = 0;
    if (!g->comm || g->nccl->ncclCommGetAsyncError(g->comm, &state) != 0 || state == 0 ||
        state == ITH_NCCL_IN_PROGRESS)
        return NULL;
    return g->nccl->ncclGetErrorString(state);
}

/* ---- exchanges ---- */

static ith_status mark(nccl_group *g, volatile uint32_t *word, ith_error *err)
{
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)word;
    return g->driver.write((CUstream)g->group.stream, at, g->group.count, 0) == CUDA_SUCCESS
               ? ITH_OK
               : ith_fail(err, ITH_ERR_RUN, "the stream cannot write to host memory");
}

static int post(const nccl_group *g, const ith_exchange *x)
{
    int rank = g->group.rank, size = g->group.size, code = g->nccl->ncclGroupStart();
    for (int i = 1; code == 0 && i < size; i++) {
        int to = (rank + i) % size, from = (rank + size - i) % size;
        if (x->send_bytes[to] > 0)
            code =
                g->nccl->ncclSend((const char *)x->send + x->send_at[to], (size_t)x->send_bytes[to],
                                  NCCL_BYTE, to, g->comm, g->group.stream);
        if (code == 0 && x->recv_bytes[from] > 0)
            code =
                g->nccl->ncclRecv((char *)x->recv + x->recv_at[from], (size_t)x->recv_bytes[from],
                                  NCCL_BYTE, from, g->comm, g->group.stream);
    }
    int ended = g->nccl->ncclGroupEnd();
    return code ? code : ended;
}

static ith_status exchange(ith_device *d, void *group, const ith_exchange *x, ith_error *err)
{
    nccl_group *g = group;
    int64_t moved = 0;
    (void)ith_cuda_use(d->state);
    ITH_TRY(ith_cuda_copy_own(&g->group, x, err));
    for (int j = 0; j < g->group.size; j++)
        moved += j == g->group.rank ? 0 : x->send_bytes[j] + x->recv_bytes[j];
    if (moved == 0)
        return ITH_OK;
    g->group.count++;
    ITH_TRY(mark(g, g->group.begun, err));
    ITH_TRY(check_nccl(g->nccl, g->comm, post(g, x), "exchange", err));
    return mark(g, g->group.ended, err);
}

/* A byte to and from everyone. */
static ith_status connect_all(nccl_group *g, ith_error *err)
{
    ith_device *d = &g->group.cuda->device;
    ith_status status = ITH_OK;
    int size = g->group.size;
    void *bytes = NULL;
    int64_t *lists = NULL;
    ITH_TRY(ith_alloc_zero((void **)&lists, 2 * size, sizeof *lists, "NCCL group", err));
    for (int j = 0; j < size; j++) {
        lists[j] = j;
        lists[size + j] = 1;
    }
    ITH_TRY_OUT(d->alloc(d, 2 * size, &bytes, err));
    ith_exchange x = {bytes, lists, lists + size, (char *)bytes + size, lists, lists + size};
    ITH_TRY_OUT(exchange(d, g, &x, err));
    ITH_TRY_OUT(ith_cuda_link_check(cudaStreamSynchronize(g->group.stream), "first exchange", err));
out:
    if (bytes)
        d->free(d, bytes);
    ith_free(lists);
    return status;
}

/* ---- open and close ---- */

static void close_group(ith_device *d, void *group)
{
    nccl_group *g = group;
    (void)d;
    ith_cuda_group_unwatch(&g->group);
    if (g->comm) {
        (void)cudaStreamSynchronize(g->group.stream);
        (void)g->nccl->ncclCommDestroy(g->comm);
    }
    if (g->words)
        (void)cudaFreeHost(g->words);
    ith_free(g);
}

static ith_status join(nccl_group *g, const char id[ITH_DEVICE_GROUP_ID_BYTES], ith_error *err)
{
    ith_nccl_id meeting;
    void *comm = NULL;
    memcpy(meeting.bytes, id, sizeof meeting.bytes);
    *g->group.begun = ++g->group.count;
    int code = g->nccl->ncclCommInitRank(&comm, g->group.size, meeting, g->group.rank);
    ITH_TRY(check_nccl(g->nccl, NULL, code, "opening a group", err));
    pthread_mutex_lock(&g->group.mutex);
    g->comm = comm;
    *g->group.ended = g->group.count;
    pthread_mutex_unlock(&g->group.mutex);
    return connect_all(g, err);
}

static ith_status open_group(ith_device *d, const char id[ITH_DEVICE_GROUP_ID_BYTES], int64_t rank,
                             int64_t size, bool beside, double timeout_s,
                             void (*lost)(void *, const char *), void *arg, void **group,
                             ith_error *err)
{
    nccl_group *g = NULL;
    void *words = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&g, 1, sizeof *g, "NCCL group", err));
    ith_cuda_group_init(&g->group, d, rank, size, beside, timeout_s, lost, arg);
    ITH_TRY_OUT(ith_nccl_open(&g->nccl, err));
    ITH_TRY_OUT(ith_cuda_driver_open(&g->driver, err));
    ITH_TRY_OUT(ith_cuda_link_check(
        cudaHostAlloc(&words, 2 * sizeof *g->words, cudaHostAllocMapped), "host memory", err));
    g->words = words;
    g->words[0] = g->words[1] = 0;
    g->group.begun = &g->words[0];
    g->group.ended = &g->words[1];
    g->group.broken = broken;
    ITH_TRY_OUT(ith_cuda_group_watch(&g->group, err));
    ITH_TRY_OUT(join(g, id, err));
    *group = g;
    return ITH_OK;
out:
    close_group(d, g);
    return status;
}

const ith_device_way ith_cuda_way_nccl = {.name = "nccl",
                                          .new_group = new_group,
                                          .open_group = open_group,
                                          .close_group = close_group,
                                          .exchange = exchange,
                                          .overhead_bytes = OVERHEAD};
