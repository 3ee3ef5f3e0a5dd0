/* cuda_plugin.h - the CUDA backend as the program sees it: no CUDA header, no CUDA library needed.
 *
 * libithaca_cuda.so is opened on the first call (ITH_CUDA_PLUGIN names another file) and stays for
 * the life of the process. Without it, or without what it needs, calls fail with one line. */
#ifndef ITH_KERNELS_CUDA_PLUGIN_H
#define ITH_KERNELS_CUDA_PLUGIN_H

#include "base/mem.h"
#include "kernels/ctx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes ctx a context on CUDA device `index`: fills backend, device and state. ctx->err is set by
 * the caller; ctx->deterministic is read by every operator. counting_only: for plans on machines
 * without a driver; nothing but counting is possible then. Not thread-safe. */
ith_status ith_ctx_open_cuda(ith_ctx *ctx, int index, bool counting_only);
/* Waits, then frees what open made. A context that was not opened is fine. */
void ith_ctx_close_cuda(ith_ctx *ctx);
/* Lines for `ithaca env`: driver, devices, versions and paths of the libraries. */
ith_status ith_cuda_env_text(ith_buf *out, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
