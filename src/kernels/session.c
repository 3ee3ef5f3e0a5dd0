/* session.c - opening a device. */
#include "kernels/session.h"

#include "base/file.h"
#include "base/log.h"
#include "kernels/cuda_plugin.h"

#include <string.h>

ith_status ith_session_open(ith_session *s, ith_use_device use, int index, int threads,
                            bool plan_only, ith_error *err)
{
    memset(s, 0, sizeof *s);
    ITH_TRY(ith_pool_create(&s->pool, threads, err));
    s->ctx = ith_ctx_host(ith_backend_cpu(), s->pool, err);
    if (use != ITH_USE_CPU) {
        ith_error why = {0};
        ith_ctx cuda = {.pool = s->pool, .err = &why};
        ith_status status = ith_ctx_open_cuda(&cuda, index, false);
        if (status != ITH_OK && use == ITH_USE_CUDA) { /* a plan goes without; else it is told */
            cuda.err = err;
            status = ith_ctx_open_cuda(&cuda, index, plan_only);
        }
        if (status == ITH_OK) {
            s->ctx = cuda;
            s->ctx.err = err;
            s->cuda = true;
        } else if (use == ITH_USE_CUDA) {
            ith_session_close(s);
            return ith_wrap(err, status, "device cuda");
        } else if (ith_path_exists("/dev/nvidiactl")) { /* a GPU is here, and left alone */
            ith_log(ITH_LOG_WARN, "device", "no GPU is used: %s", why.text);
        }
    }
    ith_status status = ith_plan_create(&s->ctx.plan, s->ctx.device, err);
    if (status != ITH_OK)
        ith_session_close(s);
    return status;
}

ith_status ith_session_new_plan(ith_session *s)
{
    ith_plan_destroy(s->ctx.plan);
    s->ctx.plan = NULL;
    return ith_plan_create(&s->ctx.plan, s->ctx.device, s->ctx.err);
}

void ith_session_close(ith_session *s)
{
    ith_plan_destroy(s->ctx.plan);
    s->ctx.plan = NULL;
    if (s->cuda)
        ith_ctx_close_cuda(&s->ctx);
    s->cuda = false;
    ith_pool_destroy(s->pool);
    s->pool = NULL;
}
