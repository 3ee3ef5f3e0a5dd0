/* links_cuda.h - what the ways between GPUs share: the group, its watch, the driver's stream
 * operations. */
#ifndef ITH_KERNELS_CUDA_LINKS_CUDA_H
#define ITH_KERNELS_CUDA_LINKS_CUDA_H

#include "kernels/cuda/cuda_internal.h"

#include <cuda.h>
#include <pthread.h>

/* A dead or stuck peer of the same machine is reported by nobody: a thread per group watches two
 * words in host memory, to which the stream itself writes the number of the exchange that begins
 * and of the one that ended. */
typedef struct ith_cuda_group ith_cuda_group;
struct ith_cuda_group {
    ith_cuda *cuda;
    cudaStream_t stream; /* the main one, or the one beside it */
    int rank, size;
    uint32_t count; /* of exchanges */
    volatile uint32_t *begun, *ended;
    double timeout_s;
    void (*lost)(void *, const char *);
    void *arg;
    /* Optional: an error that the way itself knows of, NULL for none. */
    const char *(*broken)(const ith_cuda_group *g);
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    bool watched, closing;
};

/* Driver functions on streams, found at run time. */
typedef struct {
    CUresult (*write)(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags);
    CUresult (*wait)(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags);
    CUresult (*attributes)(unsigned count, CUpointer_attribute *which, void **values,
                           CUdeviceptr at);
} ith_cuda_driver;

ith_status ith_cuda_driver_open(ith_cuda_driver *out, ith_error *err);
/* Fills all but the words and `broken`. */
void ith_cuda_group_init(ith_cuda_group *g, ith_device *d, int64_t rank, int64_t size, bool beside,
                         double timeout_s, void (*lost)(void *, const char *), void *arg);
/* With the words at zero: the watch begins. */
ith_status ith_cuda_group_watch(ith_cuda_group *g, ith_error *err);
void ith_cuda_group_unwatch(ith_cuda_group *g);
/* The own block of an exchange. */
ith_status ith_cuda_copy_own(const ith_cuda_group *g, const ith_exchange *x, ith_error *err);
ith_status ith_cuda_link_check(cudaError_t code, const char *what, ith_error *err);
double ith_cuda_now_s(void);

extern const ith_device_way ith_cuda_way_peer, ith_cuda_way_nccl;

#endif
