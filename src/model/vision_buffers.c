/* vision_buffers.c - see the header.
 *
 * Invariants:
 *  1. The walk that counts and the one that runs use the same views, cut to the batch.
 *  2. Every rank of a cp group computes the same shares. */
#include "model/vision_buffers.h"

typedef ith_tensor T;

#define VALUES_PER_PIECE 65536

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

/* Patches that one of cp ranks encodes at most; see share_out. */
static int64_t largest_share(ith_vision_limits l, int64_t cp)
{
    return cp == 1 ? l.max_patches
                   : ith_min_i64(l.max_patches,
                                 ith_div_ceil(l.max_patches, cp) + l.max_segment_patches);
}

/* What the next micro-batch is at most: of a rank alone, or shared by `ranks`. */
static ith_vision_limits limits_now(const ith_vision_buffers *b, const ith_model *m)
{
    ith_vision_limits l = b->limits;
    if (ith_cp_size(m->mesh) < b->ranks) {
        l.max_patches = l.max_whole_patches;
        l.max_segments = l.max_whole_segments;
    }
    return l;
}

ith_status ith_vision_buffers_place(ith_vision_buffers *b, const ith_model *m, ith_ctx *ctx,
                                    ith_vision_limits limits)
{
    int64_t half = m->has_vision ? half_dim(m) : 0, cp = ith_cp_size(m->mesh);
    *b = (ith_vision_buffers){.limits = limits, .ranks = cp};
    if (!m->has_vision || limits.max_patches == 0)
        return ITH_OK;
    int64_t n = ith_max_i64(largest_share(limits, cp), limits.max_whole_patches);
    int64_t segments = ith_max_i64(limits.max_segments, limits.max_whole_segments);
    int64_t features = features_of(m, ith_max_i64(limits.max_patches, limits.max_whole_patches));
    int64_t width = ith_vision_patch_width(&m->config->vision), size = ith_dtype_bytes(m->dtype);
    ITH_TRY(push(ctx, m->dtype, n, width, &b->pixels));
    ITH_TRY(push(ctx, ITH_I32, n, 4, &b->corners));
    ITH_TRY(push(ctx, ITH_F32, n, 4, &b->corner_weights));
    ITH_TRY(push(ctx, m->dtype, n, half, &b->cos));
    ITH_TRY(push(ctx, m->dtype, n, half, &b->sin));
    ITH_TRY(push(ctx, ITH_I32, 4 * n, 0, &b->order));
    ITH_TRY(push(ctx, ITH_I32, segments + 1, 0, &b->cu_seqlens));
    ITH_TRY(push(ctx, ITH_I32, features, 0, &b->rows));
    ITH_TRY(push_host(ctx, n * 16, &b->host.corners));
    ITH_TRY(push_host(ctx, n * 16, &b->host.corner_weights));
    ITH_TRY(push_host(ctx, n * half * 4, &b->host.cos));
    ITH_TRY(push_host(ctx, n * half * 4, &b->host.sin));
    ITH_TRY(push_host(ctx, (segments + 1) * 4, &b->host.cu_seqlens));
    ITH_TRY(push_host(ctx, n * 16, &b->host_order));
    ITH_TRY(push_host(ctx, features * 4 + 4, &b->host_rows));
    ITH_TRY(push_host(ctx, segments * (int64_t)sizeof *b->own, &b->own));
    ITH_TRY(push_host(ctx, (cp + 1) * 8, &b->encoded));
    ITH_TRY(push_host(ctx, (cp + 1) * 8, &b->read));
    return push_host(ctx, n * ith_max_i64(width, half) * size, &b->host_typed);
}

static ith_vision_batch bind(const ith_vision_buffers *b, int64_t n, int64_t segments,
                             int64_t max_len, const int32_t *cu, int64_t features, int64_t rows)
{
    ith_vision_batch v = {.num_patches = n,
                          .group_features = features,
                          .encoded = b->encoded,
                          .read = b->read,
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
                          .rows = ith_row_range(b->rows, 0, rows)};
    return v;
}

ith_vision_batch ith_vision_buffers_largest(const ith_vision_buffers *b, const ith_model *m)
{
    if (!b->pixels.ndim)
        return (ith_vision_batch){0};
    ith_vision_limits l = limits_now(b, m);
    int64_t features = features_of(m, l.max_patches);
    return bind(b, largest_share(l, ith_cp_size(m->mesh)), l.max_segments, l.max_segment_patches,
                NULL, features, features);
}

typedef struct {
    char *to;
    ith_dtype dtype;
    const float *from;
} conversion;

static void convert_range(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const conversion *c = arg;
    ith_convert(c->to + begin * ith_dtype_bytes(c->dtype), c->dtype, c->from + begin, ITH_F32,
                end - begin);
}

/* f32 values in the model's type, through the staging buffer. */
static ith_status upload_typed(ith_vision_buffers *b, ith_ctx *ctx, T to, const float *values)
{
    ith_device *d = ctx->device;
    ITH_TRY(d->sync(d, ctx->err));
    conversion c = {b->host_typed, to.dtype, values};
    ith_pool_for(ctx->pool, ith_numel(to), VALUES_PER_PIECE, convert_range, &c);
    return d->upload(d, to.data, b->host_typed, ith_tensor_bytes(to), ctx->err);
}

/* The frames of this rank (grid.h) into b->own, and b->encoded; *first patch, returns how many. */
static int64_t share_out(ith_vision_buffers *b, const ith_model *m, const ith_micro_batch *batch,
                         int64_t patches, int64_t *first)
{
    int64_t cp = ith_cp_size(m->mesh), me = cp > 1 ? m->mesh->cp_rank : 0, at = 0, owner = 0;
    int64_t count = 0;
    b->encoded[0] = 0;
    *first = 0;
    for (int64_t i = 0; i < batch->num_grids; i++) {
        ith_grid g = batch->grids[i];
        int64_t frame = (int64_t)g.h * g.w;
        for (int64_t t = 0; t < g.t; t++, at += frame) {
            int64_t rank = ith_frame_rank(at, frame, patches, cp);
            while (owner < rank)
                b->encoded[++owner] = features_of(m, at);
            if (rank != me)
                continue;
            *first = count ? *first : at;
            b->own[count++] = (ith_grid){1, g.h, g.w};
        }
    }
    while (owner < cp)
        b->encoded[++owner] = features_of(m, patches);
    return count;
}

/* Rows of this rank's slice that features replace into b->host_rows, and b->read. */
static int64_t find_rows(ith_vision_buffers *b, const ith_model *m, const ith_micro_batch *batch)
{
    int64_t cp = ith_cp_size(m->mesh), me = cp > 1 ? m->mesh->cp_rank : 0, rows = 0;
    for (int64_t r = 0; r <= cp; r++)
        b->read[r] = 0;
    for (int64_t i = 0, frame = 0; i < batch->num_grids; i++) {
        ith_grid g = batch->grids[i];
        int64_t size = features_of(m, (int64_t)g.h * g.w);
        for (int64_t t = 0; t < g.t; t++, frame++) {
            int64_t first = batch->frames[frame], end = first + size;
            ITH_ASSERT(first >= 0 && end <= batch->num_tokens);
            for (int64_t r = 0; r < cp; r++) {
                int64_t begin = ith_cp_first(m->mesh, batch->num_tokens, r),
                        from = ith_max_i64(first, begin),
                        to = ith_min_i64(end, ith_cp_first(m->mesh, batch->num_tokens, r + 1));
                b->read[r + 1] += ith_max_i64(to - from, 0);
                for (int64_t k = from; r == me && k < to; k++)
                    b->host_rows[rows++] = (int32_t)(k - begin);
            }
        }
    }
    for (int64_t r = 0; r < cp; r++)
        b->read[r + 1] += b->read[r];
    return rows;
}

ith_status ith_vision_buffers_fill(ith_vision_buffers *b, const ith_model *m, ith_ctx *ctx,
                                   const ith_micro_batch *batch, ith_vision_batch *out)
{
    ith_device *d = ctx->device;
    int64_t n = 0, segments = 0, first = 0;
    *out = (ith_vision_batch){0};
    for (int64_t i = 0; i < batch->num_grids; i++) {
        n += ith_grid_patches(batch->grids[i]);
        segments += batch->grids[i].t;
    }
    if (n == 0)
        return ITH_OK;
    ith_vision_limits limits = limits_now(b, m);
    ITH_ASSERT(n <= limits.max_patches && segments <= limits.max_segments);
    ITH_TRY(d->sync(d, ctx->err));
    int64_t features = features_of(m, n), grids = share_out(b, m, batch, n, &first);
    int64_t rows = find_rows(b, m, batch);
    ITH_ASSERT(b->read[ith_cp_size(m->mesh)] == features);
    ith_vision_lay_out(&m->config->vision, b->own, grids, ctx->pool, &b->host);
    n = b->host.cu_seqlens[grids];
    ITH_ASSERT(b->host.max_len <= b->limits.max_segment_patches);
    ITH_ASSERT(n <= largest_share(limits, ith_cp_size(m->mesh)));
    for (int64_t i = 0; i < 4 * n; i++)
        b->host_order[i] = (int32_t)i;
    *out = bind(b, n, grids, b->host.max_len, b->host.cu_seqlens, features, rows);
    ITH_TRY(upload_typed(b, ctx, out->pixels,
                         batch->pixels + first * ith_vision_patch_width(&m->config->vision)));
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
