/* cuda_libs.h - cuBLASLt and cuDNN, opened at run time.
 *
 * Each is looked for by its name alone (LD_LIBRARY_PATH, the loader's cache), then in
 * /usr/local/cuda, then where pip puts it: the site-packages folders that belong to the python3
 * programs on PATH and to VIRTUAL_ENV and CONDA_PREFIX. */
#ifndef ITH_KERNELS_CUDA_CUDA_LIBS_H
#define ITH_KERNELS_CUDA_CUDA_LIBS_H

#include "base/mem.h"

#include <cublasLt.h>
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
/* File that a function of the library came from. */
const char *ith_cuda_libs_file(void *function);

#ifdef __cplusplus
}
#endif
#endif
