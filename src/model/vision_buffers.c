/* vision_buffers.c - see the header. Invariant: the walk that counts and the one that runs use the
 * same views, cut to the batch. */
#include "model/vision_buffers.h"

typedef ith_tensor T;

static int64_t half_dim(const ith_model *m)
{
    return m->config->vision.hidden_size / m->config->vision.num_heads / 2;
}

static int64_t features_of(const ith_model *m, int64_t patches)
{
    int64_t side = m->config->vision.spatial_merge_size;
    return patches / (side * side);
}

static ith_status push(ith_ctx *ctx, ith_dtype dtype, int64_t rows, int64_t cols, T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "media", dtype, cols ? 2 : 1, rows,
                        cols ? cols : 1, 1, 1, out);
}

static ith_status push_host(ith_ctx *ctx, int64_t bytes, void *out)
{
    void *data = NULL;
    ITH_TRY(ith_plan_push(ctx->plan, ITH_MEM_HOST, "media staging", bytes, &data, ctx->err));
    memcpy(out, &data, sizeof data);
    return ITH_OK;
}

ith_status ith_vision_buffers_place(ith_vision_buffers *b, const ith_model *m, ith_ctx *ctx,
                                    ith_vision_limits limits)
{
    *b = (ith_vision_buffers){.limits = limits};
    int64_t n = limits.max_patches, half = m->has_vision ? half_dim(m) : 0;
    if (!m->has_vision || n == 0)
        return ITH_OK;
    int64_t width = ith_vision_patch_width(&m->config->vision), size = ith_dtype_bytes(m->dtype);
    ITH_TRY(push(ctx, m->dtype, n, width, &b->pixels));
    ITH_TRY(push(ctx, ITH_I32, n, 4, &b->corners));
    ITH_TRY(push(ctx, ITH_F32, n, 4, &b->corner_weights));
    ITH_TRY(push(ctx, m->dtype, n, half, &b->cos));
    ITH_TRY(push(ctx, m->dtype, n, half, &b->sin));
    ITH_TRY(push(ctx, ITH_I32, 4 * n, 0, &b->order));
    ITH_TRY(push(ctx, ITH_I32, limits.max_segments + 1, 0, &b->cu_seqlens));
    ITH_TRY(push(ctx, ITH_I32, features_of(m, n), 0, &b->rows));
    ITH_TRY(push_host(ctx, n * 16, &b->host.corners));
    ITH_TRY(push_host(ctx, n * 16, &b->host.corner_weights));
    ITH_TRY(push_host(ctx, n * half * 4, &b->host.cos));
    ITH_TRY(push_host(ctx, n * half * 4, &b->host.sin));
    ITH_TRY(push_host(ctx, (limits.max_segments + 1) * 4, &b->host.cu_seqlens));
    ITH_TRY(push_host(ctx, n * 16, &b->host_order));
    ITH_TRY(push_host(ctx, features_of(m, n) * 4 + 4, &b->host_rows));
    return push_host(ctx, n * ith_max_i64(width, half) * size, &b->host_typed);
}

static ith_vision_batch bind(const ith_vision_buffers *b, const ith_model *m, int64_t n,
                             int64_t segments, int64_t max_len, const int32_t *cu)
{
    ith_vision_batch v = {.num_patches = n,
                          .pixels = ith_row_range(b->pixels, 0, n),
                          .corners = ith_row_range(b->corners, 0, n),
                          .corner_weights = ith_row_range(b->corner_weights, 0, n),
                          .cos = ith_row_range(b->cos, 0, n),
                          .sin = ith_row_range(b->sin, 0, n),
                          .order = ith_row_range(b->order, 0, n),
                          .order4 = ith_row_range(b->order, 0, 4 * n),
                          .segments = {.cu_seqlens = ith_row_range(b->cu_seqlens, 0, segments + 1),
                                       .cu_host = cu,
                                       .num_docs = segments,
                                       .max_len = max_len},
                          .rows = ith_row_range(b->rows, 0, features_of(m, n))};
    return v;
}

ith_vision_batch ith_vision_buffers_largest(const ith_vision_buffers *b, const ith_model *m)
{
    if (!b->pixels.ndim)
        return (ith_vision_batch){0};
    return bind(b, m, b->limits.max_patches, b->limits.max_segments, b->limits.max_segment_patches,
                NULL);
}

/* f32 values in the model's type, through the staging buffer. */
static ith_status upload_typed(ith_vision_buffers *b, ith_ctx *ctx, T to, const float *values)
{
    ith_device *d = ctx->device;
    ITH_TRY(d->sync(d, ctx->err));
    ith_convert(b->host_typed, to.dtype, values, ITH_F32, ith_numel(to));
    return d->upload(d, to.data, b->host_typed, ith_tensor_bytes(to), ctx->err);
}

static bool is_media(const ith_hf_config *c, int32_t id)
{
    return id >= 0 && (id == c->image_token_id || id == c->video_token_id);
}

ith_status ith_vision_buffers_fill(ith_vision_buffers *b, const ith_model *m, ith_ctx *ctx,
                                   const ith_micro_batch *batch, ith_vision_batch *out)
{
    ith_device *d = ctx->device;
    int64_t n = 0, rows = 0, segments = 0;
    *out = (ith_vision_batch){0};
    for (int64_t i = 0; i < batch->num_grids; i++) {
        n += ith_grid_patches(batch->grids[i]);
        segments += batch->grids[i].t;
    }
    if (n == 0)
        return ITH_OK;
    ITH_ASSERT(n <= b->limits.max_patches && segments <= b->limits.max_segments);
    ITH_TRY(d->sync(d, ctx->err));
    ith_vision_lay_out(&m->config->vision, batch->grids, batch->num_grids, &b->host);
    ITH_ASSERT(b->host.max_len <= b->limits.max_segment_patches);
    for (int64_t t = 0; t < batch->num_tokens; t++)
        if (is_media(m->config, batch->ids[t])) {
            ITH_ASSERT(rows < features_of(m, n));
            b->host_rows[rows++] = (int32_t)t;
        }
    ITH_ASSERT(rows == features_of(m, n)); /* ith_mrope_positions has checked it */
    for (int64_t i = 0; i < 4 * n; i++)
        b->host_order[i] = (int32_t)i;
    *out = bind(b, m, n, segments, b->host.max_len, b->host.cu_seqlens);
    ITH_TRY(upload_typed(b, ctx, out->pixels, batch->pixels));
    ITH_TRY(upload_typed(b, ctx, out->cos, b->host.cos));
    ITH_TRY(upload_typed(b, ctx, out->sin, b->host.sin));
    const struct {
        T to;
        const void *from;
    } plain[] = {{out->corners, b->host.corners},
                 {out->corner_weights, b->host.corner_weights},
                 {out->order4, b->host_order},
                 {out->segments.cu_seqlens, b->host.cu_seqlens},
                 {out->rows, b->host_rows}};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
        ITH_TRY(
            d->upload(d, plain[i].to.data, plain[i].from, ith_tensor_bytes(plain[i].to), ctx->err));
    return ITH_OK;
}
