/* attention_cpu.c - attention entries of the CPU table: scratch and tasks; the work is in
 * attention_impl.h. */
#include <math.h>

#include "kernels/cpu/cpu_internal.h"

/* Columns of a tile: enough to pay for packing its keys. */
#define TILE_COLUMNS 256

static int64_t q_block_of(ith_tensor q, ith_tensor k)
{
    int64_t group = ith_div_exact(q.shape[1], k.shape[1]);
    return ith_max_i64(32, ith_round_up(ith_div_ceil(TILE_COLUMNS, group), 32));
}

static int64_t forward_bytes(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q, ith_tensor k,
                             ith_tensor v, ith_seqs seqs, float scale, bool causal)
{
    if (q.dtype == ITH_F64)
        return ith_backend_ref()->attention_forward.workspace(ctx, o, lse, q, k, v, seqs, scale,
                                                              causal);
    ith_cpu_attention a = {.q = q, .k = k, .v = v, .seqs = seqs, .q_block = q_block_of(q, k)};
    return ith_cpu_level_get()->attention_bytes(&a, false) * ith_pool_threads(ctx->pool);
}

static ith_status forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q, ith_tensor k,
                          ith_tensor v, ith_seqs seqs, float scale, bool causal)
{
    if (q.dtype == ITH_F64)
        return ith_backend_ref()->attention_forward.run(ctx, o, lse, q, k, v, seqs, scale, causal);
    const ith_cpu_level *level = ith_cpu_level_get();
    ith_cpu_attention a = {.o = o,
                           .lse = lse,
                           .q = q,
                           .k = k,
                           .v = v,
                           .seqs = seqs,
                           .scale = scale,
                           .causal = causal,
                           .q_block = q_block_of(q, k),
                           .scratch = ctx->scratch};
    a.thread_bytes = level->attention_bytes(&a, false);
    ITH_ASSERT(ctx->scratch_bytes >= a.thread_bytes * ith_pool_threads(ctx->pool));
    int64_t tiles = 0;
    for (int64_t doc = 0; doc < seqs.num_docs; doc++) {
        ith_document d = ith_cpu_document(&a, doc);
        tiles += ith_div_ceil(d.q_hi - d.q_lo, a.q_block);
    }
    ith_pool_for(ctx->pool, tiles * k.shape[1], 1, level->attention_forward, &a);
    return ITH_OK;
}

static int64_t backward_bytes(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                              ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                              ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale, bool causal)
{
    if (q.dtype == ITH_F64)
        return ith_backend_ref()->attention_backward.workspace(ctx, dq, dk, dv, do_, q, k, v, o,
                                                               lse, seqs, scale, causal);
    ith_cpu_attention a = {.q = q, .k = k, .v = v, .seqs = seqs, .q_block = q_block_of(q, k)};
    return ith_cpu_level_get()->attention_bytes(&a, true) * ith_pool_threads(ctx->pool);
}

static ith_status backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                           ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor o,
                           ith_tensor lse, ith_seqs seqs, float scale, bool causal)
{
    if (q.dtype == ITH_F64)
        return ith_backend_ref()->attention_backward.run(ctx, dq, dk, dv, do_, q, k, v, o, lse,
                                                         seqs, scale, causal);
    const ith_cpu_level *level = ith_cpu_level_get();
    ith_cpu_attention a = {.o = o,
                           .lse = lse,
                           .q = q,
                           .k = k,
                           .v = v,
                           .dq = dq,
                           .dk = dk,
                           .dv = dv,
                           .do_ = do_,
                           .seqs = seqs,
                           .scale = scale,
                           .causal = causal,
                           .q_block = q_block_of(q, k),
                           .scratch = ctx->scratch};
    a.thread_bytes = level->attention_bytes(&a, true);
    ITH_ASSERT(ctx->scratch_bytes >= a.thread_bytes * ith_pool_threads(ctx->pool));
    ith_pool_for(ctx->pool, seqs.num_docs * k.shape[1], 1, level->attention_backward, &a);
    return ITH_OK;
}

typedef struct {
    float *o, *lse;
    const float *part_o, *part_lse;
    int64_t dim;
} merge;

/* Index = row * Hq + head. */
static void merge_heads(void *arg, int64_t begin, int64_t end, int thread)
{
    const merge *m = arg;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float x = m->lse[i], y = m->part_lse[i], max = x > y ? x : y;
        float a = x == max ? 1 : expf(x - max), b = y == max ? 1 : expf(y - max);
        float *restrict o = m->o + i * m->dim;
        const float *restrict p = m->part_o + i * m->dim;
        for (int64_t d = 0; d < m->dim; d++)
            o[d] = (a * o[d] + b * p[d]) / (a + b);
        m->lse[i] = max + logf(a + b);
    }
}

static ith_status merge_parts(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor part_o,
                              ith_tensor part_lse)
{
    if (o.dtype == ITH_F64 || !ith_is_contiguous(o) || !ith_is_contiguous(part_o) ||
        !ith_is_contiguous(lse) || !ith_is_contiguous(part_lse))
        return ith_backend_ref()->attention_merge.run(ctx, o, lse, part_o, part_lse);
    merge m = {o.data, lse.data, part_o.data, part_lse.data, o.shape[2]};
    ith_pool_for(ctx->pool, o.shape[0] * o.shape[1], 64, merge_heads, &m);
    return ITH_OK;
}

static int64_t decode_bytes(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                            ith_tensor k_cache, ith_tensor v_cache, ith_tensor lengths, float scale)
{
    if (q.dtype == ITH_F64)
        return ith_backend_ref()->attention_decode.workspace(ctx, o, lse, q, k_cache, v_cache,
                                                             lengths, scale);
    return ith_round_up(q.shape[2] * 4, 256) * ith_pool_threads(ctx->pool);
}

static ith_status decode(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                         ith_tensor k_cache, ith_tensor v_cache, ith_tensor lengths, float scale)
{
    if (q.dtype == ITH_F64)
        return ith_backend_ref()->attention_decode.run(ctx, o, lse, q, k_cache, v_cache, lengths,
                                                       scale);
    ith_cpu_attention a = {.o = o,
                           .lse = lse,
                           .q = q,
                           .k = k_cache,
                           .v = v_cache,
                           .lengths = lengths,
                           .scale = scale,
                           .scratch = ctx->scratch,
                           .thread_bytes = ith_round_up(q.shape[2] * 4, 256)};
    ith_pool_for(ctx->pool, q.shape[0] * q.shape[1], 1, ith_cpu_level_get()->attention_decode, &a);
    return ITH_OK;
}

void ith_cpu_fill_attention(ith_backend *b)
{
    b->attention_forward.run = forward;
    b->attention_forward.workspace = forward_bytes;
    b->attention_backward.run = backward;
    b->attention_backward.workspace = backward_bytes;
    b->attention_merge.run = merge_parts;
    b->attention_decode.run = decode;
    b->attention_decode.workspace = decode_bytes;
}
