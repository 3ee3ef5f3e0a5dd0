/* session.h - a device opened for work: threads, operator table, planned memory, in one ctx.
 *
 * Life cycle: open, work through `ctx`, close. The session must not move while it is open. */
#ifndef ITH_KERNELS_SESSION_H
#define ITH_KERNELS_SESSION_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ITH_USE_AUTO, ITH_USE_CPU, ITH_USE_CUDA } ith_use_device;

typedef struct {
    ith_ctx ctx;
    ith_pool *pool;
    bool cuda;
} ith_session;

/* AUTO: CUDA when the plug-in loads and a device is there, else the CPU. plan_only: the ctx
 * counts and never runs, and CUDA needs no driver (its memory is not known then). threads <= 0: all
 * cores. A GPU that is here and that AUTO cannot take is told in a warning. err stays the error
 * chain of the ctx. The plan starts counting. */
ith_status ith_session_open(ith_session *s, ith_use_device use, int index, int threads,
                            bool plan_only, ith_error *err);
/* A new plan, counting, after the old one is destroyed with all memory of the session. */
ith_status ith_session_new_plan(ith_session *s);
void ith_session_close(ith_session *s);

#ifdef __cplusplus
}
#endif
#endif
