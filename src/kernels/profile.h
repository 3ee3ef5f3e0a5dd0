/* profile.h - time by operator. Hung into ctx->profile, the dispatcher stamps the device's clock
 * around every call.
 *
 * A device with `stamp` (CUDA events) is not slowed down; on others each call waits for the device.
 */
#ifndef ITH_KERNELS_PROFILE_H
#define ITH_KERNELS_PROFILE_H

#include "kernels/ctx.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ITH_PROFILE_MAX_CALLS 65536 /* per collect */
#define ITH_PROFILE_MAX_OPS 64

typedef struct {
    const char *op;
    int64_t calls;
    double ms;
} ith_profile_row;

struct ith_profile {
    const char **names; /* of the calls since the last collect */
    double *host_ms;    /* devices without stamp: time of each stamp */
    int64_t calls;
    ith_profile_row rows[ITH_PROFILE_MAX_OPS];
    int num_rows;
    int64_t lost; /* calls beyond the maximum */
};

ith_status ith_profile_create(ith_profile **out, ith_error *err);
void ith_profile_destroy(ith_profile *p);
/* Before (end false) and after (end true) an operator. */
ith_status ith_profile_stamp(ith_ctx *ctx, const char *op, bool end);
/* Waits for the device and adds the stamped calls to rows; sorted by time. */
ith_status ith_profile_collect(ith_ctx *ctx);
void ith_profile_reset(ith_profile *p);

#ifdef __cplusplus
}
#endif
#endif
