/* peer_cuda.c - the way between the GPUs of one machine: every rank's copy engine pushes its blocks
 * straight into the others' memory.
 *
 * The ranks meet in a page of shared memory, in which each has a seat. Exchange k of a group:
 *   host    posts where the blocks for this rank go (allocation and offset), waits for the posts of
 *           the others, and maps allocations it has not seen yet (CUDA IPC)
 *   stream  writes ready = k: the places are free now; for each other rank waits for its ready = k,
 *           copies the block, writes done[rank] = k there; waits for done = k of the others
 *
 * Invariants:
 *  1. All ranks of a group make the same exchanges.
 *  2. A rank posts exchange k + 1 only after it has read all posts of k, so that two posts per
 *     seat are enough.
 *  3. An allocation is known by the driver's number of it, which is never used again. */
#include "kernels/cuda/links_cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { MAX_RANKS = 16, MAX_ALLOCATIONS = 32 };
#define JOIN_S 20.0 /* for all ranks to open a group */
#define IDLE_POLLS 200

typedef struct {
    int32_t allocation; /* of the receiver */
    int64_t offset, stride;
} place;

typedef struct {
    unsigned long long number; /* the driver's */
    cudaIpcMemHandle_t handle;
} allocation;

enum { AWAY, SEATED, FAILED };

/* Each word that streams write has a line of its own. */
typedef struct {
    _Alignas(64) _Atomic int state;
    _Atomic uint32_t posted;
    _Atomic int num_allocations;
    place places[2][MAX_RANKS][ITH_MAX_PIECES]; /* [exchange % 2][rank that sends] */
    allocation allocations[MAX_ALLOCATIONS];
    _Alignas(64) volatile uint32_t ready;
    _Alignas(64) volatile uint32_t ended;
    struct {
        _Alignas(64) volatile uint32_t of; /* block of rank r is here */
    } done[MAX_RANKS];
} seat;

typedef struct {
    ith_cuda_group group; /* first, for the functions of links_cuda.h */
    ith_cuda_driver driver;
    seat *seats; /* [size], shared */
    int64_t bytes;
    char *seen_by_gpu; /* address of seats for the stream */
    bool registered;
    void *mapped[MAX_RANKS][MAX_ALLOCATIONS];
    struct {
        unsigned long long number;
        char *base;
    } own[MAX_ALLOCATIONS];
} peer_group;

static ith_status refused(ith_error *err, const char *what)
{
    return ith_fail(err, ITH_ERR_UNSUPPORTED, "%s: %s", what, strerror(errno));
}

static ith_status new_group(ith_device *d, char id[ITH_DEVICE_GROUP_ID_BYTES], ith_error *err)
{
    uint64_t random = 0;
    (void)d;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return refused(err, "random number");
    snprintf(id, ITH_DEVICE_GROUP_ID_BYTES, "/ithaca-%016llx", (unsigned long long)random);
    return ITH_OK;
}

/* ---- streams ---- */

static CUdeviceptr for_gpu(const peer_group *g, const volatile void *word)
{
    return (CUdeviceptr)(uintptr_t)(g->seen_by_gpu +
                                    ((const volatile char *)word - (const char *)g->seats));
}

static ith_status stream_write(const peer_group *g, volatile uint32_t *word, ith_error *err)
{
    return g->driver.write((CUstream)g->group.stream, for_gpu(g, word), g->group.count, 0) ==
                   CUDA_SUCCESS
               ? ITH_OK
               : ith_fail(err, ITH_ERR_RUN, "the stream cannot write to host memory");
}

static ith_status stream_wait(const peer_group *g, volatile uint32_t *word, ith_error *err)
{
    return g->driver.wait((CUstream)g->group.stream, for_gpu(g, word), g->group.count,
                          CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS
               ? ITH_OK
               : ith_fail(err, ITH_ERR_RUN, "the stream cannot wait for host memory");
}

/* ---- places ---- */

/* Where `at` lies among this rank's allocations, which the others can map. */
static ith_status find_place(peer_group *g, const void *at, place *out, ith_error *err)
{
    unsigned long long number = 0;
    CUdeviceptr base = 0;
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                   CU_POINTER_ATTRIBUTE_RANGE_START_ADDR};
    void *values[] = {&number, &base};
    seat *own = &g->seats[g->group.rank];
    int n = atomic_load_explicit(&own->num_allocations, memory_order_relaxed), i = 0;
    if (g->driver.attributes(2, which, values, (CUdeviceptr)(uintptr_t)at) != CUDA_SUCCESS)
        return ith_fail(err, ITH_ERR_RUN, "exchange: the driver does not know the memory");
    while (i < n && g->own[i].number != number)
        i++;
    if (i == n) {
        if (n == MAX_ALLOCATIONS)
            return ith_fail(err, ITH_ERR_RUN, "exchange: more than %d allocations",
                            MAX_ALLOCATIONS);
        g->own[i].number = own->allocations[i].number = number;
        g->own[i].base = (char *)(uintptr_t)base; /* NOLINT(performance-no-int-to-ptr) */
        ITH_TRY(
            ith_cuda_link_check(cudaIpcGetMemHandle(&own->allocations[i].handle, g->own[i].base),
                                "memory for the other GPUs", err));
        atomic_store_explicit(&own->num_allocations, n + 1, memory_order_release);
    }
    *out = (place){i, (const char *)at - g->own[i].base, 0};
    return ITH_OK;
}

static ith_status map(peer_group *g, int rank, place at, char **out, ith_error *err)
{
    void **mapped = &g->mapped[rank][at.allocation];
    if (!*mapped)
        ITH_TRY(ith_cuda_link_check(
            cudaIpcOpenMemHandle(mapped, g->seats[rank].allocations[at.allocation].handle,
                                 cudaIpcMemLazyEnablePeerAccess),
            "memory of another GPU", err));
    *out = (char *)*mapped + at.offset;
    return ITH_OK;
}

/* ---- exchanges ---- */

static ith_status silent(const peer_group *g, double seconds, ith_error *err)
{
    return ith_fail(err, ITH_ERR_RUN,
                    "rank %d of %d: another rank does not answer since %.0f s (dist_timeout)",
                    g->group.rank, g->group.size, seconds);
}

/* Until the rank's host has come to this exchange. */
static ith_status await_post(const peer_group *g, int rank, double timeout_s, ith_error *err)
{
    double since = 0;
    for (int64_t polls = 0;; polls++) {
        uint32_t posted = atomic_load_explicit(&g->seats[rank].posted, memory_order_acquire);
        if ((int32_t)(posted - g->group.count) >= 0)
            return ITH_OK;
        if (polls < IDLE_POLLS)
            continue;
        sched_yield();
        if (polls % 1024 != 0)
            continue;
        since = since > 0 ? since : ith_cuda_now_s();
        if (atomic_load(&g->seats[rank].state) == FAILED ||
            (timeout_s > 0 && ith_cuda_now_s() - since > timeout_s))
            return silent(g, timeout_s, err);
    }
}

static int64_t bytes_of(const ith_strided *r, int64_t pieces)
{
    int64_t sum = 0;
    for (int64_t p = 0; p < pieces; p++)
        sum += r[p].bytes * r[p].rows;
    return sum;
}

static ith_status copy(const peer_group *g, char *to, int64_t stride, const ith_strided *from,
                       ith_error *err)
{
    size_t bytes = (size_t)from->bytes, rows = (size_t)from->rows;
    bool dense = from->rows == 1 || (stride == from->bytes && from->stride == from->bytes);
    if (bytes == 0 || rows == 0)
        return ITH_OK;
    return ith_cuda_link_check(
        dense ? cudaMemcpyAsync(to, from->at, bytes * rows, cudaMemcpyDefault, g->group.stream)
              : cudaMemcpy2DAsync(to, (size_t)stride, from->at, (size_t)from->stride, bytes, rows,
                                  cudaMemcpyDefault, g->group.stream),
        "copy between GPUs", err);
}

static ith_status push(peer_group *g, int to, const ith_strided *send, int64_t pieces,
                       double timeout_s, ith_error *err)
{
    seat *theirs = &g->seats[to];
    ITH_TRY(await_post(g, to, timeout_s, err)); /* invariant 2: of every rank, bytes or none */
    if (bytes_of(send, pieces) == 0)
        return ITH_OK;
    ITH_TRY(stream_wait(g, &theirs->ready, err));
    for (int64_t p = 0; p < pieces; p++) {
        place at = theirs->places[g->group.count % 2][g->group.rank][p];
        char *memory = NULL;
        if (bytes_of(&send[p], 1) == 0)
            continue;
        ITH_TRY(map(g, to, at, &memory, err));
        ITH_TRY(copy(g, memory, at.stride, &send[p], err));
    }
    return stream_write(g, &theirs->done[g->group.rank].of, err);
}

/* send, recv: [size * pieces]. */
static ith_status exchange_within(peer_group *g, const ith_strided *send, const ith_strided *recv,
                                  int64_t pieces, double timeout_s, ith_error *err)
{
    int rank = g->group.rank, size = g->group.size;
    uint32_t k = ++g->group.count;
    (void)ith_cuda_use(g->group.cuda);
    seat *own = &g->seats[rank];
    for (int64_t i = 0; i < size * pieces; i++) {
        place *at = &own->places[k % 2][i / pieces][i % pieces];
        if (i / pieces == rank || bytes_of(&recv[i], 1) == 0)
            continue;
        ITH_TRY(find_place(g, recv[i].at, at, err));
        at->stride = recv[i].stride;
    }
    atomic_store_explicit(&own->posted, k, memory_order_release);
    ITH_TRY(stream_write(g, &own->ready, err));
    for (int i = 1; i < size; i++) {
        int to = (rank + i) % size;
        ITH_TRY(push(g, to, send + to * pieces, pieces, timeout_s, err));
    }
    for (int64_t i = rank * pieces; i < (rank + 1) * pieces; i++)
        if (send[i].at != recv[i].at)
            ITH_TRY(copy(g, recv[i].at, recv[i].stride, &send[i], err));
    for (int j = 0; j < size; j++)
        if (j != rank && bytes_of(recv + j * pieces, pieces) > 0)
            ITH_TRY(stream_wait(g, &own->done[j].of, err));
    return stream_write(g, &own->ended, err);
}

static ith_status exchange_blocks(peer_group *g, const ith_exchange *x, double timeout_s,
                                  ith_error *err)
{
    ith_strided send[MAX_RANKS], recv[MAX_RANKS];
    union {
        const void *in;
        char *out;
    } from = {.in = x->send}; /* only read */
    for (int j = 0; j < g->group.size; j++) {
        send[j] = (ith_strided){from.out + x->send_at[j], 0, x->send_bytes[j], 1};
        recv[j] = (ith_strided){(char *)x->recv + x->recv_at[j], 0, x->recv_bytes[j], 1};
    }
    return exchange_within(g, send, recv, 1, timeout_s, err);
}

static ith_status exchange(ith_device *d, void *group, const ith_exchange *x, ith_error *err)
{
    peer_group *g = group;
    (void)d;
    return exchange_blocks(g, x, g->group.timeout_s, err);
}

static ith_status exchange_rows(ith_device *d, void *group, const ith_strided *send,
                                const ith_strided *recv, int64_t pieces, ith_error *err)
{
    peer_group *g = group;
    (void)d;
    return exchange_within(g, send, recv, pieces, g->group.timeout_s, err);
}

/* ---- open and close ---- */

static void close_group(ith_device *d, void *group)
{
    peer_group *g = group;
    (void)d;
    ith_cuda_group_unwatch(&g->group);
    if (g->group.stream)
        (void)cudaStreamSynchronize(g->group.stream);
    for (int r = 0; r < MAX_RANKS; r++)
        for (int i = 0; i < MAX_ALLOCATIONS; i++)
            if (g->mapped[r][i])
                (void)cudaIpcCloseMemHandle(g->mapped[r][i]);
    if (g->registered)
        (void)cudaHostUnregister(g->seats);
    if (g->seats)
        munmap(g->seats, (size_t)g->bytes);
    ith_free(g);
}

/* The page, which every rank may be the first to make; rank 0 removes its name when all have it. */
static ith_status open_page(peer_group *g, const char *name, ith_error *err)
{
    void *memory = NULL, *seen = NULL;
    g->bytes = ith_round_up(g->group.size * (int64_t)sizeof(seat), 4096);
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0)
        return refused(err, "shared memory");
    bool sized = ftruncate(file, g->bytes) == 0;
    memory = mmap(NULL, (size_t)g->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (!sized || memory == MAP_FAILED)
        return refused(err, "shared memory");
    g->seats = memory;
    ITH_TRY(ith_cuda_link_check(cudaHostRegister(memory, (size_t)g->bytes, cudaHostRegisterMapped),
                                "shared memory for the GPU", err));
    g->registered = true;
    ITH_TRY(ith_cuda_link_check(cudaHostGetDevicePointer(&seen, memory, 0),
                                "shared memory for the GPU", err));
    g->seen_by_gpu = seen;
    return ITH_OK;
}

/* All ranks are of this machine, or one is missing after JOIN_S. */
static ith_status take_seat(peer_group *g, ith_error *err)
{
    double since = ith_cuda_now_s();
    atomic_store(&g->seats[g->group.rank].state, SEATED);
    for (int r = 0; r < g->group.size; r++)
        for (int state = AWAY; state != SEATED;) {
            state = atomic_load(&g->seats[r].state);
            if (state == FAILED || ith_cuda_now_s() - since > JOIN_S)
                return ith_fail(err, ITH_ERR_UNSUPPORTED,
                                "rank %d is not on this machine, or cannot share memory", r);
            if (state == AWAY)
                usleep(1000);
        }
    return ITH_OK;
}

/* A number to and from everyone: GPUs without a path between them say so here. */
static ith_status greet(peer_group *g, ith_error *err)
{
    ith_device *d = &g->group.cuda->device;
    ith_status status = ITH_OK;
    int size = g->group.size, numbers[2 * MAX_RANKS] = {0};
    int64_t at[MAX_RANKS], bytes[MAX_RANKS], all = size * (int64_t)sizeof *numbers;
    char *memory = NULL;
    for (int j = 0; j < size; j++) {
        numbers[j] = 100 * g->group.rank + j + 1;
        at[j] = j * (int64_t)sizeof *numbers;
        bytes[j] = sizeof *numbers;
    }
    ITH_TRY(d->alloc(d, 2 * all, (void **)&memory, err));
    ith_exchange x = {memory, at, bytes, memory + all, at, bytes};
    ITH_TRY_OUT(ith_cuda_link_check(
        cudaMemcpyAsync(memory, numbers, (size_t)all, cudaMemcpyHostToDevice, g->group.stream),
        "greeting", err));
    ITH_TRY_OUT(exchange_blocks(g, &x, JOIN_S, err));
    ITH_TRY_OUT(ith_cuda_link_check(
        cudaMemcpyAsync(numbers, x.recv, (size_t)all, cudaMemcpyDeviceToHost, g->group.stream),
        "greeting", err));
    ITH_TRY_OUT(ith_cuda_link_check(cudaStreamSynchronize(g->group.stream), "greeting", err));
    for (int j = 0; j < size; j++)
        if (numbers[j] != 100 * j + g->group.rank + 1)
            status = ith_fail(err, ITH_ERR_UNSUPPORTED, "GPU of rank %d does not reach that of %d",
                              j, g->group.rank);
out:
    d->free(d, memory);
    return status;
}

static ith_status join(peer_group *g, const char *name, ith_error *err)
{
    ITH_TRY(ith_cuda_driver_open(&g->driver, err));
    ITH_TRY(open_page(g, name, err));
    g->group.begun = &g->seats[g->group.rank].ready;
    g->group.ended = &g->seats[g->group.rank].ended;
    ITH_TRY(take_seat(g, err));
    ITH_TRY(greet(g, err));
    return ith_cuda_group_watch(&g->group, err);
}

/* So that no stream waits for this rank: the others find wrong numbers, and refuse too. */
static void give_up(peer_group *g)
{
    seat *own = &g->seats[g->group.rank];
    own->ready = g->group.count;
    for (int j = 0; j < g->group.size; j++)
        g->seats[j].done[g->group.rank].of = g->group.count;
    atomic_store(&own->state, FAILED);
}

static ith_status open_group(ith_device *d, const char id[ITH_DEVICE_GROUP_ID_BYTES], int64_t rank,
                             int64_t size, bool beside, double timeout_s,
                             void (*lost)(void *, const char *), void *arg, void **group,
                             ith_error *err)
{
    peer_group *g = NULL;
    ith_status status = ITH_OK;
    if (size > MAX_RANKS)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "%lld ranks (use at most %d)", (long long)size,
                        MAX_RANKS);
    ITH_TRY(ith_alloc_zero((void **)&g, 1, sizeof *g, "group of GPUs", err));
    ith_cuda_group_init(&g->group, d, rank, size, beside, timeout_s, lost, arg);
    status = join(g, id, err);
    if (status != ITH_OK && g->seats)
        give_up(g);
    if (rank == 0 || status != ITH_OK)
        (void)shm_unlink(id);
    if (status != ITH_OK)
        goto out;
    *group = g;
    return ITH_OK;
out:
    close_group(d, g);
    return status;
}

const ith_device_way ith_cuda_way_peer = {.name = "peer",
                                          .new_group = new_group,
                                          .open_group = open_group,
                                          .close_group = close_group,
                                          .exchange = exchange,
                                          .exchange_rows = exchange_rows};
