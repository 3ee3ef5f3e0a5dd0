/* links_cuda.c - groups of GPUs: the watch and sums; nccl_cuda.c and peer_cuda.c
 * are the ways. */
#include "kernels/cuda/links_cuda.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define WATCH_MS 250 /* between two looks */

ith_status ith_cuda_link_check(cudaError_t code, const char *what, ith_error *err)
{
    return code == cudaSuccess
               ? ITH_OK
               : ith_fail(err, ITH_ERR_RUN, "%s: %s", what, cudaGetErrorString(code));
}

double ith_cuda_now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static ith_status identify(ith_device *d, unsigned char uuid[ITH_DEVICE_UUID_BYTES], ith_error *err)
{
    const ith_cuda *cuda = d->state;
    struct cudaDeviceProp props;
    ITH_TRY(ith_cuda_link_check(cudaGetDeviceProperties(&props, cuda->index), "device", err));
    _Static_assert(sizeof props.uuid == ITH_DEVICE_UUID_BYTES, "uuid");
    memcpy(uuid, &props.uuid, sizeof props.uuid);
    return ITH_OK;
}

static ith_status find(const char *name, void *function, ith_error *err)
{
    enum cudaDriverEntryPointQueryResult found;
    void *address = NULL;
    ITH_TRY(ith_cuda_link_check(
        cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found), name,
        err));
    if (found != cudaDriverEntryPointSuccess || !address)
        return ith_fail(err, ITH_ERR_UNSUPPORTED, "the CUDA driver has no %s", name);
    memcpy(function, &address, sizeof address);
    return ITH_OK;
}

ith_status ith_cuda_driver_open(ith_cuda_driver *out, ith_error *err)
{
    ITH_TRY(find("cuStreamWriteValue32", &out->write, err));
    ITH_TRY(find("cuStreamWaitValue32", &out->wait, err));
    return find("cuPointerGetAttributes", &out->attributes, err);
}

/* ---- the watch ---- */

/* What is wrong with the group, if something is. begun: the exchange seen at the look before, since
 * when it has been running. */
static bool is_lost(const ith_cuda_group *g, uint32_t *begun, double *since, char *why, size_t size)
{
    uint32_t now_begun = *g->begun;
    const char *broken = g->broken ? g->broken(g) : NULL;
    if (broken) {
        snprintf(why, size, "%s", broken);
        return true;
    }
    if (now_begun == *g->ended || now_begun != *begun) {
        *begun = now_begun;
        *since = ith_cuda_now_s();
        return false;
    }
    snprintf(why, size, "another rank does not answer since %.0f s (dist_timeout)", g->timeout_s);
    return g->timeout_s > 0 && ith_cuda_now_s() - *since > g->timeout_s;
}

static void *watch(void *arg)
{
    ith_cuda_group *g = arg;
    char why[256];
    uint32_t begun = 0;
    double since = ith_cuda_now_s();
    (void)ith_cuda_use(g->cuda);
    pthread_mutex_lock(&g->mutex);
    while (!g->closing) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += WATCH_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        (void)pthread_cond_timedwait(&g->wake, &g->mutex, &until);
        if (!g->closing && is_lost(g, &begun, &since, why, sizeof why)) {
            g->lost(g->arg, why);
            break;
        }
    }
    pthread_mutex_unlock(&g->mutex);
    return NULL;
}

void ith_cuda_group_init(ith_cuda_group *g, ith_device *d, int64_t rank, int64_t size, bool beside,
                         double timeout_s, void (*lost)(void *, const char *), void *arg)
{
    g->cuda = ith_cuda_use(d->state);
    g->rank = ith_narrow(rank);
    g->size = ith_narrow(size);
    g->timeout_s = timeout_s;
    g->lost = lost;
    g->arg = arg;
    g->stream = beside ? g->cuda->queues[ITH_QUEUE_LINKS].stream : g->cuda->stream;
}

ith_status ith_cuda_group_watch(ith_cuda_group *g, ith_error *err)
{
    pthread_mutex_init(&g->mutex, NULL);
    pthread_cond_init(&g->wake, NULL);
    int failed = pthread_create(&g->thread, NULL, watch, g);
    if (failed)
        return ith_fail(err, ITH_ERR_RUN, "cannot start a thread: %s", strerror(failed));
    g->watched = true;
    return ITH_OK;
}

void ith_cuda_group_unwatch(ith_cuda_group *g)
{
    (void)ith_cuda_use(g->cuda);
    if (!g->watched)
        return;
    pthread_mutex_lock(&g->mutex);
    g->closing = true;
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->mutex);
    pthread_join(g->thread, NULL);
    pthread_cond_destroy(&g->wake);
    pthread_mutex_destroy(&g->mutex);
    g->watched = false;
}

/* ---- blocks and sums ---- */

ith_status ith_cuda_copy_own(const ith_cuda_group *g, const ith_exchange *x, ith_error *err)
{
    int64_t own = x->send_bytes[g->rank];
    ITH_ASSERT(own == x->recv_bytes[g->rank]);
    if (own == 0)
        return ITH_OK;
    return ith_cuda_link_check(cudaMemcpyAsync((char *)x->recv + x->recv_at[g->rank],
                                               (const char *)x->send + x->send_at[g->rank],
                                               (size_t)own, cudaMemcpyDeviceToDevice, g->stream),
                               "own block", err);
}

static ith_status add_parts(ith_device *d, void *group, void *to, bool add, const void *own,
                            const void *parts, int64_t stride, int64_t n, bool wide, ith_error *err)
{
    const ith_cuda_group *g = group;
    ith_cuda_parts p = {to, own, parts, stride, n, g->rank, g->size, wide, add};
    (void)ith_cuda_use(d->state);
    if (n > 0)
        ith_cuda_add_parts(g->stream, &p);
    return ith_cuda_link_check(cudaGetLastError(), "sum over ranks", err);
}

const ith_device_links ith_cuda_links = {
    .ways = {&ith_cuda_way_peer, &ith_cuda_way_nccl}, .identify = identify, .add_parts = add_parts};
