/* cuda_libs.h - cuBLASLt, cuDNN and NCCL, opened at run time.
 *
 * Each is looked for by its name alone (LD_LIBRARY_PATH, the loader's cache), then in
 * /usr/local/cuda, then where pip puts it: the site-packages folders that belong to the python3
 * programs on PATH and to VIRTUAL_ENV and CONDA_PREFIX. */
#ifndef ITH_KERNELS_CUDA_CUDA_LIBS_H
#define ITH_KERNELS_CUDA_CUDA_LIBS_H

#include "base/mem.h"

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <cudnn.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every function we call: X(name). */
#define ITH_CUBLASLT_FUNCTIONS(X)                                                                  \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
    X(cublasLtGetVersion)                                                                          \
    X(cublasLtGetStatusString)                                                                     \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)                                                        \
    X(cublasLtMatmulAlgoGetHeuristic)

#define ITH_CUDNN_FUNCTIONS(X)                                                                     \
    X(cudnnCreate)                                                                                 \
    X(cudnnDestroy)                                                                                \
    X(cudnnSetStream)                                                                              \
    X(cudnnGetVersion)                                                                             \
    X(cudnnGetErrorString)                                                                         \
    X(cudnnGetLastErrorString)                                                                     \
    X(cudnnBackendCreateDescriptor)                                                                \
    X(cudnnBackendDestroyDescriptor)                                                               \
    X(cudnnBackendSetAttribute)                                                                    \
    X(cudnnBackendGetAttribute)                                                                    \
    X(cudnnBackendFinalize)                                                                        \
    X(cudnnBackendExecute)

#define ITH_FUNCTION_POINTER(name) __typeof__(&name) name;
typedef struct {
    ITH_CUBLASLT_FUNCTIONS(ITH_FUNCTION_POINTER)
    ITH_CUDNN_FUNCTIONS(ITH_FUNCTION_POINTER)
} ith_cuda_libs;
#undef ITH_FUNCTION_POINTER

/* Opens both, once per process; the libraries stay. */
ith_status ith_cuda_libs_open(const ith_cuda_libs **out, ith_error *err);

/* NCCL's few functions, declared here: its header is on few machines. X(result, name, arguments);
 * a result of type int is a ncclResult_t, 0 for success; comm is a ncclComm_t. */
typedef struct {
    char bytes[128]; /* ncclUniqueId */
} ith_nccl_id;
enum { ITH_NCCL_IN_PROGRESS = 7 };
#define ITH_NCCL_FUNCTIONS(X)                                                                      \
    X(int, ncclGetVersion, (int *version))                                                         \
    X(const char *, ncclGetErrorString, (int result))                                              \
    X(const char *, ncclGetLastError, (void *comm))                                                \
    X(int, ncclGetUniqueId, (ith_nccl_id * id))                                                    \
    X(int, ncclCommInitRank, (void **comm, int size, ith_nccl_id id, int rank))                    \
    X(int, ncclCommDestroy, (void *comm))                                                          \
    X(int, ncclCommGetAsyncError, (void *comm, int *result))                                       \
    X(int, ncclGroupStart, (void))                                                                 \
    X(int, ncclGroupEnd, (void))                                                                   \
    X(int, ncclSend,                                                                               \
      (const void *data, size_t count, int type, int peer, void *comm, cudaStream_t stream))       \
    X(int, ncclRecv,                                                                               \
      (void *data, size_t count, int type, int peer, void *comm, cudaStream_t stream))
#define ITH_NCCL_POINTER(result, name, arguments) result(*name) arguments;
typedef struct {
    ITH_NCCL_FUNCTIONS(ITH_NCCL_POINTER)
} ith_nccl;
#undef ITH_NCCL_POINTER

/* Opened once per process, when several GPUs work together; it stays. */
ith_status ith_nccl_open(const ith_nccl **out, ith_error *err);
/* File that a function of the library came from. */
const char *ith_cuda_libs_file(void *function);

#ifdef __cplusplus
}
#endif
#endif
