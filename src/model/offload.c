/* offload.c - inputs of layers in host memory, copied while other layers work.
 *
 * Two staging buffers on the device take turns: layer l uses l % 2. Forward: x goes to the host
 * while layer l + 1 runs, and must be there before layer l + 2 writes the buffer. Backward: while
 * layer l runs, x of layer l - 1 comes. */
#include "model/blocks.h"

static bool on_host(const ith_model *m, int64_t l)
{
    return l >= 0 && m->keep[l] == ITH_KEEP_HOST;
}

ith_status ith_offload_open(ith_model *m, ith_ctx *ctx, int64_t t, bool training)
{
    int64_t layers = 0;
    for (int64_t l = 0; training && l < m->config->num_hidden_layers; l++)
        layers += on_host(m, l);
    m->offload = ith_tensor_none();
    m->offload_coming = -1;
    if (layers == 0)
        return ITH_OK;
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "host staging", m->dtype, 3, 2, t,
                        m->config->hidden_size, 1, &m->offload);
}

/* The last copy of the layer's buffer. */
static ith_status await_copy(ith_ctx *ctx, int64_t l)
{
    ith_device *d = ctx->device;
    return ith_ctx_counting(ctx) || !d->await
               ? ITH_OK
               : d->await(d, ITH_QUEUE_COPIES, (int)(l % 2), ctx->err);
}

ith_status ith_offload_stage(ith_model *m, ith_ctx *ctx, int64_t l)
{
    ith_layer_acts *a = &m->acts[l];
    ith_tensor slot = ith_row_range(m->offload, l % 2, l % 2 + 1);
    a->x = ith_tensor_2d(slot.data, slot.dtype, slot.shape[1], slot.shape[2]);
    ITH_TRY(ith_plan_push(ctx->plan, ITH_MEM_HOST, "layer input", ith_tensor_bytes(a->x),
                          &a->host_x, ctx->err));
    return await_copy(ctx, l);
}

static ith_status copy(ith_model *m, ith_ctx *ctx, int64_t l, bool to_host)
{
    const ith_layer_acts *a = &m->acts[l];
    ith_device *d = ctx->device;
    void *to = to_host ? a->host_x : a->x.data;
    const void *from = to_host ? a->x.data : a->host_x;
    int64_t bytes = ith_tensor_bytes(a->x);
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    if (!d->copy_beside)
        return to_host ? d->download(d, to, from, bytes, ctx->err)
                       : d->upload(d, to, from, bytes, ctx->err);
    ITH_TRY(d->fork(d, ITH_QUEUE_COPIES, ctx->err));
    ITH_TRY(d->copy_beside(d, to, from, bytes, to_host, ctx->err));
    return d->note(d, ITH_QUEUE_COPIES, (int)(l % 2), ctx->err);
}

ith_status ith_offload_save(ith_model *m, ith_ctx *ctx, int64_t l)
{
    return m->acts[l].host_x ? copy(m, ctx, l, true) : ITH_OK;
}

ith_status ith_offload_fetch(ith_model *m, ith_ctx *ctx, int64_t l)
{
    if (m->acts[l].host_x) {
        if (m->offload_coming != l)
            ITH_TRY(copy(m, ctx, l, false));
        ITH_TRY(await_copy(ctx, l));
    }
    if (!on_host(m, l - 1))
        return ITH_OK;
    m->offload_coming = l - 1;
    return copy(m, ctx, l - 1, false);
}
