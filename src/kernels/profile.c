/* profile.c - time by operator. Call i has stamps 2i and 2i + 1. */
#include "kernels/profile.h"

#include "base/mem.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

ith_status ith_profile_create(ith_profile **out, ith_error *err)
{
    ith_profile *p = NULL;
    ITH_TRY(ith_alloc_zero((void **)&p, 1, sizeof *p, "profile", err));
    p->names = ith_calloc(ITH_PROFILE_MAX_CALLS, sizeof *p->names);
    p->host_ms = ith_calloc(2 * ITH_PROFILE_MAX_CALLS, sizeof *p->host_ms);
    if (!p->names || !p->host_ms) {
        ith_profile_destroy(p);
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for the profile");
    }
    *out = p;
    return ITH_OK;
}

void ith_profile_destroy(ith_profile *p)
{
    if (!p)
        return;
    ith_free(p->names);
    ith_free(p->host_ms);
    ith_free(p);
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

ith_status ith_profile_stamp(ith_ctx *ctx, const char *op, bool end)
{
    ith_profile *p = ctx->profile;
    if (p->calls == ITH_PROFILE_MAX_CALLS) {
        p->lost += end;
        return ITH_OK;
    }
    int64_t idx = 2 * p->calls + end;
    if (ctx->device->stamp) {
        ITH_TRY(ctx->device->stamp(ctx->device, idx, ctx->err));
    } else {
        ITH_TRY(ctx->device->sync(ctx->device, ctx->err));
        p->host_ms[idx] = now_ms();
    }
    p->names[p->calls] = op;
    p->calls += end;
    return ITH_OK;
}

static ith_profile_row *row_of(ith_profile *p, const char *op)
{
    for (int i = 0; i < p->num_rows; i++)
        if (strcmp(p->rows[i].op, op) == 0)
            return &p->rows[i];
    if (p->num_rows == ITH_PROFILE_MAX_OPS)
        return NULL;
    p->rows[p->num_rows] = (ith_profile_row){op, 0, 0};
    return &p->rows[p->num_rows++];
}

static int by_time(const void *a, const void *b)
{
    const ith_profile_row *x = a, *y = b;
    return x->ms < y->ms ? 1 : (x->ms > y->ms ? -1 : strcmp(x->op, y->op));
}

ith_status ith_profile_collect(ith_ctx *ctx)
{
    ith_profile *p = ctx->profile;
    ITH_TRY(ctx->device->sync(ctx->device, ctx->err));
    for (int64_t i = 0; i < p->calls; i++) {
        double ms = p->host_ms[2 * i + 1] - p->host_ms[2 * i];
        if (ctx->device->stamp)
            ITH_TRY(ctx->device->elapsed(ctx->device, 2 * i, 2 * i + 1, &ms, ctx->err));
        ith_profile_row *row = row_of(p, p->names[i]);
        if (row) {
            row->calls++;
            row->ms += ms;
        }
    }
    p->calls = 0;
    qsort(p->rows, (size_t)p->num_rows, sizeof *p->rows, by_time);
    return ITH_OK;
}

void ith_profile_reset(ith_profile *p)
{
    p->calls = p->lost = p->num_rows = 0;
}
