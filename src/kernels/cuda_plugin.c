/* cuda_plugin.c - opens libithaca_cuda.so and forwards to it.
 * Invariant: the handle is opened once and never closed, for CUDA libraries do not unload well. */
#include "kernels/cuda_plugin.h"

#include "base/env.h"
#include "base/plugin.h"
#include "kernels/cuda/cuda_api.h"

#include <string.h>

typedef struct {
    void *handle; /* NULL: not opened yet */
    ith_status (*open)(ith_ctx *ctx, int index, bool counting_only);
    void (*close)(ith_ctx *ctx);
    ith_status (*describe)(ith_buf *out, ith_error *err);
} cuda_plugin;

static cuda_plugin plugin;

static ith_status resolve(cuda_plugin *p, ith_error *err)
{
    void (*abi)(char out[96]) = NULL;
    char ours[96], theirs[96];
    ITH_TRY(ith_plugin_symbol(p->handle, "ith_cuda_abi", &abi, err));
    ith_cuda_abi_text(ours);
    abi(theirs);
    if (strcmp(ours, theirs) != 0)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "the CUDA plug-in is of another build (it says '%s', this program '%s')",
                        theirs, ours);
    ITH_TRY(ith_plugin_symbol(p->handle, "ith_cuda_open", &p->open, err));
    ITH_TRY(ith_plugin_symbol(p->handle, "ith_cuda_close", &p->close, err));
    return ith_plugin_symbol(p->handle, "ith_cuda_describe", &p->describe, err);
}

static ith_status load(ith_error *err)
{
    if (plugin.handle)
        return ITH_OK;
    cuda_plugin p = {0};
    ITH_TRY(ith_plugin_open(&p.handle, "libithaca_cuda.so", ith_env(ITH_ENV_CUDA_PLUGIN), err));
    ith_status status = resolve(&p, err);
    if (status != ITH_OK) {
        ith_plugin_close(p.handle);
        return status;
    }
    plugin = p;
    return ITH_OK;
}

ith_status ith_ctx_open_cuda(ith_ctx *ctx, int index, bool counting_only)
{
    ITH_TRY(load(ctx->err));
    return plugin.open(ctx, index, counting_only);
}

void ith_ctx_close_cuda(ith_ctx *ctx)
{
    if (plugin.handle && ctx->state)
        plugin.close(ctx);
}

ith_status ith_cuda_env_text(ith_buf *out, ith_error *err)
{
    ITH_TRY(load(err));
    return plugin.describe(out, err);
}
