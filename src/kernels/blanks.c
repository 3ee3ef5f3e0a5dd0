/* blanks.c - finding a gradient among the blank ones. */
#include "kernels/blanks.h"

#include "kernels/backend.h"

/* The parameter that dw is, or is a part of, if it was blank until now. */
static const ith_blank *take(const ith_blanks *b, ith_tensor dw)
{
    if (!b || dw.ndim == 0)
        return NULL;
    int64_t at = (const char *)dw.data - b->base, low = 0, high = b->count;
    while (low < high) { /* the first that ends behind it */
        int64_t mid = low + (high - low) / 2;
        if (b->all[mid].end <= at)
            low = mid + 1;
        else
            high = mid;
    }
    ith_blank *p = &b->all[low];
    if (low == b->count || at < p->begin || !p->blank)
        return NULL;
    p->blank = false;
    return p;
}

static ith_status clear(ith_ctx *ctx, const ith_blank *p)
{
    return ctx->device->fill(ctx->device, ctx->blanks->base + p->begin, 0, p->end - p->begin,
                             ctx->err);
}

ith_status ith_blanks_clear(ith_ctx *ctx, ith_tensor dw)
{
    const ith_blank *p = take(ctx->blanks, dw);
    return p ? clear(ctx, p) : ITH_OK;
}

ith_status ith_blanks_overwrite(ith_ctx *ctx, ith_tensor dw, int64_t rows)
{
    const ith_blank *p = take(ctx->blanks, dw);
    ctx->overwrite = p && ctx->backend->overwrites && rows > 0 && ith_is_contiguous(dw) &&
                     ith_tensor_bytes(dw) == p->end - p->begin;
    return p && !ctx->overwrite ? clear(ctx, p) : ITH_OK;
}

ith_status ith_blanks_close(ith_ctx *ctx)
{
    for (int64_t i = 0; ctx->blanks && i < ctx->blanks->count; i++) {
        ith_blank *p = &ctx->blanks->all[i];
        if (p->blank)
            ITH_TRY(clear(ctx, p));
        p->blank = false;
    }
    return ITH_OK;
}
