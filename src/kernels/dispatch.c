/* dispatch.c - the public operators: check shapes, give scratch, call the backend.
 *
 * Invariants:
 *  1. While the plan counts, scratch is counted and nothing else happens.
 *  2. Scratch is released before the operator returns: on a stream the next operator may reuse it,
 *     for it runs later in the same order.
 *  3. Without a plan (tests) scratch comes from the device for the length of the call, and the
 *     call waits. */
#include "kernels/dispatch_internal.h"

ith_status ith_ctx_push(ith_ctx *ctx, ith_mem_class c, const char *name, ith_dtype dtype, int ndim,
                        int64_t d0, int64_t d1, int64_t d2, int64_t d3, ith_tensor *out)
{
    ith_tensor t = ith_tensor_4d(NULL, dtype, ndim, d0, d1, d2, d3);
    if (ndim < 4)
        t = ndim == 1 ? ith_tensor_1d(NULL, dtype, d0)
                      : (ndim == 2 ? ith_tensor_2d(NULL, dtype, d0, d1)
                                   : ith_tensor_3d(NULL, dtype, d0, d1, d2));
    ITH_TRY(ith_plan_push(ctx->plan, c, name, ith_tensor_bytes(t), &t.data, ctx->err));
    *out = t;
    return ITH_OK;
}

void ith_ctx_enter(ith_ctx *ctx, ith_queue queue, bool few)
{
    ITH_ASSERT(!ctx->beside && !ith_ctx_counting(ctx));
    ctx->beside = true;
    ctx->few = few;
    ctx->device->enter(ctx->device, queue);
}

void ith_ctx_leave(ith_ctx *ctx)
{
    ITH_ASSERT(ctx->beside);
    ctx->device->leave(ctx->device);
    ctx->beside = ctx->few = false;
}

ith_ctx ith_ctx_host(const ith_backend *backend, ith_pool *pool, ith_error *err)
{
    ith_ctx ctx = {.backend = backend, .device = ith_device_cpu(), .pool = pool, .err = err};
    return ctx;
}

ith_status ith_scratch_begin(ith_ctx *ctx, const char *op, int64_t bytes, int64_t *mark)
{
    ITH_ASSERT(bytes == 0 || !ctx->beside);
    ctx->scratch = NULL;
    ctx->scratch_bytes = bytes;
    *mark = 0;
    if (ctx->plan) {
        *mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
        return bytes
                   ? ith_plan_push(ctx->plan, ITH_MEM_WORKSPACE, op, bytes, &ctx->scratch, ctx->err)
                   : ITH_OK;
    }
    return bytes ? ctx->device->alloc(ctx->device, bytes, &ctx->scratch, ctx->err) : ITH_OK;
}

void ith_scratch_end(ith_ctx *ctx, int64_t mark)
{
    if (ctx->plan) {
        ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    } else if (ctx->scratch) {
        (void)ctx->device->sync(ctx->device, ctx->err);
        ctx->device->free(ctx->device, ctx->scratch);
    }
    ctx->scratch = NULL;
    ctx->scratch_bytes = 0;
}

/* A failed stamp shows as a failed sync soon enough. */
void ith_op_stamp(ith_ctx *ctx, const char *op, bool end)
{
    if (ctx->profile)
        (void)ith_profile_stamp(ctx, op, end);
}

ith_status ith_embedding_forward(ith_ctx *ctx, ith_tensor y, ith_tensor ids, ith_tensor w)
{
    ITH_ASSERT(is_act(y) && y.dtype == w.dtype && ids.dtype == ITH_I32);
    ITH_ASSERT(w.ndim == 2 && ids.ndim == 1 && is(y, 2, ids.shape[0], w.shape[1], 0));
    RUN(embedding_forward, y, ids, w);
}

ith_status ith_embedding_backward(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor ids)
{
    ITH_ASSERT(is_act(dy) && is_stat(dw, dy) && ids.dtype == ITH_I32);
    ITH_ASSERT(dw.ndim == 2 && ids.ndim == 1 && is(dy, 2, ids.shape[0], dw.shape[1], 0));
    ITH_TRY(ith_blanks_clear(ctx, dw));
    RUN(embedding_backward, dw, dy, ids);
}

ith_status ith_rmsnorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor sum, ith_tensor rstd,
                               ith_tensor x, ith_tensor residual, ith_tensor w, float eps,
                               float w_offset)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && is_stat(rstd, x) && is(rstd, 1, x.shape[0], 0, 0));
    ITH_ASSERT(absent(y) || (y.dtype == x.dtype && is(y, 2, x.shape[0], x.shape[1], 0)));
    ITH_ASSERT(absent(residual) ||
               (residual.dtype == x.dtype && is(residual, 2, x.shape[0], x.shape[1], 0)));
    ITH_ASSERT(absent(sum) == absent(residual));
    ITH_ASSERT(absent(sum) || (sum.dtype == x.dtype && is(sum, 2, x.shape[0], x.shape[1], 0)));
    ITH_ASSERT(w.dtype == x.dtype && is(w, 1, x.shape[1], 0, 0));
    RUN(rmsnorm_forward, y, sum, rstd, x, residual, w, eps, w_offset);
}

ith_status ith_rmsnorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                ith_tensor dres, ith_tensor x, ith_tensor rstd, ith_tensor w,
                                float w_offset)
{
    ITH_ASSERT(is_act(x) && x.ndim == 2 && is_stat(rstd, x) && is(rstd, 1, x.shape[0], 0, 0));
    ITH_ASSERT(dx.dtype == x.dtype && is(dx, 2, x.shape[0], x.shape[1], 0));
    ITH_ASSERT(dy.dtype == x.dtype && is(dy, 2, x.shape[0], x.shape[1], 0));
    ITH_ASSERT(absent(dres) || (dres.dtype == x.dtype && is(dres, 2, x.shape[0], x.shape[1], 0)));
    ITH_ASSERT(absent(dw) || (is_stat(dw, x) && is(dw, 1, x.shape[1], 0, 0)));
    ITH_ASSERT(w.dtype == x.dtype && is(w, 1, x.shape[1], 0, 0));
    ITH_TRY(ith_blanks_clear(ctx, dw));
    RUN(rmsnorm_backward, dx, dw, dy, dres, x, rstd, w, w_offset);
}

/* The arguments that both directions of qk_norm_rope share. */
static bool rope_args_fit(ith_tensor q, ith_tensor k, ith_tensor q_rstd, ith_tensor k_rstd,
                          ith_tensor q_w, ith_tensor k_w, ith_tensor cos, ith_tensor sin,
                          ith_tensor position_ids)
{
    int64_t tokens = q.shape[0], head_dim = q.shape[2];
    bool norm = !absent(q_w);
    return is_act(q) && q.ndim == 3 && k.ndim == 3 && k.dtype == q.dtype && k.shape[0] == tokens &&
           k.shape[2] == head_dim && absent(k_w) == !norm && absent(q_rstd) == !norm &&
           absent(k_rstd) == !norm &&
           (!norm ||
            (is(q_w, 1, head_dim, 0, 0) && is(k_w, 1, head_dim, 0, 0) &&
             is(q_rstd, 2, tokens, q.shape[1], 0) && is(k_rstd, 2, tokens, k.shape[1], 0))) &&
           cos.ndim == 2 && cos.dtype == q.dtype && 2 * cos.shape[1] <= head_dim &&
           is(sin, 2, cos.shape[0], cos.shape[1], 0) && position_ids.dtype == ITH_I32 &&
           (is(position_ids, 1, tokens, 0, 0) || is(position_ids, 2, 3, tokens, 0));
}

ith_status ith_qk_norm_rope_forward(ith_ctx *ctx, ith_tensor q_out, ith_tensor k_out,
                                    ith_tensor q_rstd, ith_tensor k_rstd, ith_tensor q,
                                    ith_tensor k, ith_tensor q_w, ith_tensor k_w, ith_tensor cos,
                                    ith_tensor sin, ith_tensor position_ids, float eps,
                                    float w_offset)
{
    ITH_ASSERT(rope_args_fit(q, k, q_rstd, k_rstd, q_w, k_w, cos, sin, position_ids));
    ITH_ASSERT(is(q_out, 3, q.shape[0], q.shape[1], q.shape[2]) &&
               is(k_out, 3, k.shape[0], k.shape[1], k.shape[2]));
    RUN(qk_norm_rope_forward, q_out, k_out, q_rstd, k_rstd, q, k, q_w, k_w, cos, sin, position_ids,
        eps, w_offset);
}

ith_status ith_qk_norm_rope_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dq_w,
                                     ith_tensor dk_w, ith_tensor dq_out, ith_tensor dk_out,
                                     ith_tensor q, ith_tensor k, ith_tensor q_rstd,
                                     ith_tensor k_rstd, ith_tensor q_w, ith_tensor k_w,
                                     ith_tensor cos, ith_tensor sin, ith_tensor position_ids,
                                     float w_offset)
{
    ITH_ASSERT(rope_args_fit(q, k, q_rstd, k_rstd, q_w, k_w, cos, sin, position_ids));
    ITH_ASSERT(is(dq, 3, q.shape[0], q.shape[1], q.shape[2]) &&
               is(dk, 3, k.shape[0], k.shape[1], k.shape[2]));
    ITH_ASSERT(is(dq_out, 3, q.shape[0], q.shape[1], q.shape[2]) &&
               is(dk_out, 3, k.shape[0], k.shape[1], k.shape[2]));
    ITH_ASSERT(absent(dq_w) == absent(dk_w) &&
               (absent(dq_w) || (is(dq_w, 1, q.shape[2], 0, 0) && is_stat(dq_w, q))));
    ITH_TRY(ith_blanks_clear(ctx, dq_w));
    ITH_TRY(ith_blanks_clear(ctx, dk_w));
    RUN(qk_norm_rope_backward, dq, dk, dq_w, dk_w, dq_out, dk_out, q, k, q_rstd, k_rstd, q_w, k_w,
        cos, sin, position_ids, w_offset);
}

ith_status ith_linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                              bool accumulate)
{
    ITH_ASSERT(is_act(x) && w.dtype == x.dtype && (y.dtype == x.dtype || y.dtype == ITH_F32));
    ITH_ASSERT(x.ndim == 2 && w.ndim == 2 && is(w, 2, w.shape[0], x.shape[1], 0));
    ITH_ASSERT(is(y, 2, x.shape[0], w.shape[0], 0));
    RUN(linear_forward, y, x, w, accumulate);
}

ith_status ith_linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor w,
                                     bool accumulate)
{
    ITH_ASSERT(is_act(dy) && w.dtype == dy.dtype && dx.dtype == dy.dtype);
    ITH_ASSERT(dy.ndim == 2 && w.ndim == 2 && is(w, 2, dy.shape[1], w.shape[1], 0));
    ITH_ASSERT(is(dx, 2, dy.shape[0], w.shape[1], 0));
    RUN(linear_backward_input, dx, dy, w, accumulate);
}

ith_status ith_linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor x)
{
    ITH_ASSERT(is_act(dy) && x.dtype == dy.dtype && is_stat(dw, dy));
    ITH_ASSERT(dy.ndim == 2 && x.ndim == 2 && x.shape[0] == dy.shape[0]);
    ITH_ASSERT(is(dw, 2, dy.shape[1], x.shape[1], 0));
    ITH_TRY(ith_blanks_overwrite(ctx, dw, dy.shape[0]));
    RUN(linear_backward_weight, dw, dy, x);
}

static bool attention_args_fit(ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor lse,
                               ith_seqs seqs)
{
    return is_act(q) && q.ndim == 3 && k.ndim == 3 && k.dtype == q.dtype && v.dtype == q.dtype &&
           k.shape[2] == q.shape[2] && is(v, 3, k.shape[0], k.shape[1], k.shape[2]) &&
           q.shape[1] % k.shape[1] == 0 && is_stat(lse, q) &&
           (seqs.window || k.shape[0] == q.shape[0]) && is(lse, 2, q.shape[0], q.shape[1], 0) &&
           seqs.num_docs >= 0 && seqs.cu_seqlens.dtype == ITH_I32 &&
           is(seqs.cu_seqlens, 1, seqs.num_docs + 1, 0, 0) &&
           (absent(seqs.noisy) ||
            (seqs.noisy.dtype == ITH_I32 && is(seqs.noisy, 1, seqs.num_docs, 0, 0) &&
             seqs.position.dtype == ITH_I32 &&
             (seqs.window || is(seqs.position, 1, q.shape[0], 0, 0))));
}

/* As the inputs, or f32: a part of a sum. */
static bool is_part(ith_tensor t, ith_tensor q)
{
    return t.dtype == q.dtype || is_stat(t, q);
}

ith_status ith_attention_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                 ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                 bool causal)
{
    ITH_ASSERT(attention_args_fit(q, k, v, lse, seqs));
    ITH_ASSERT(is_part(o, q) && is(o, 3, q.shape[0], q.shape[1], q.shape[2]));
    ITH_ASSERT(causal || !ith_seqs_have_blocks(seqs));
    RUN(attention_forward, o, lse, q, k, v, seqs, scale, causal);
}

ith_status ith_attention_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                  ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                  ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                  bool causal)
{
    ITH_ASSERT(attention_args_fit(q, k, v, lse, seqs));
    ITH_ASSERT(is(dq, 3, q.shape[0], q.shape[1], q.shape[2]) &&
               is(dk, 3, k.shape[0], k.shape[1], k.shape[2]));
    ITH_ASSERT(is(dv, 3, k.shape[0], k.shape[1], k.shape[2]) &&
               is(o, 3, q.shape[0], q.shape[1], q.shape[2]));
    ITH_ASSERT(is(do_, 3, q.shape[0], q.shape[1], q.shape[2]));
    ITH_ASSERT(is_part(dq, q) && is_part(dk, q) && is_part(dv, q));
    ITH_ASSERT(causal || !ith_seqs_have_blocks(seqs));
    RUN(attention_backward, dq, dk, dv, do_, q, k, v, o, lse, seqs, scale, causal);
}

ith_status ith_attention_merge(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor part_o,
                               ith_tensor part_lse)
{
    ITH_ASSERT(o.ndim == 3 && o.dtype == part_o.dtype && o.dtype != ITH_BF16);
    ITH_ASSERT(is(part_o, 3, o.shape[0], o.shape[1], o.shape[2]));
    ITH_ASSERT(is(lse, 2, o.shape[0], o.shape[1], 0) && is(part_lse, 2, o.shape[0], o.shape[1], 0));
    ITH_ASSERT(lse.dtype == o.dtype && part_lse.dtype == o.dtype);
    RUN(attention_merge, o, lse, part_o, part_lse);
}

ith_status ith_attention_decode(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                ith_tensor k_cache, ith_tensor v_cache, ith_tensor lengths,
                                float scale)
{
    ITH_ASSERT(is_act(q) && q.ndim == 3 && k_cache.ndim == 4 && v_cache.ndim == 4 &&
               lengths.dtype == ITH_I32);
    ITH_ASSERT(is(o, 3, q.shape[0], q.shape[1], q.shape[2]) &&
               is(lengths, 1, k_cache.shape[0], 0, 0));
    ITH_ASSERT(q.shape[0] % k_cache.shape[0] == 0 && q.shape[1] % k_cache.shape[2] == 0);
    ITH_ASSERT(absent(lse) ? o.dtype == q.dtype
                           : is_stat(o, q) && is_stat(lse, q) && ith_is_contiguous(lse) &&
                                 is(lse, 2, q.shape[0], q.shape[1], 0));
    RUN(attention_decode, o, lse, q, k_cache, v_cache, lengths, scale);
}

ith_status ith_swiglu_forward(ith_ctx *ctx, ith_tensor h, ith_tensor gate_up)
{
    ITH_ASSERT(is_act(h) && gate_up.dtype == h.dtype && h.ndim == 2);
    ITH_ASSERT(is(gate_up, 2, h.shape[0], 2 * h.shape[1], 0));
    RUN(swiglu_forward, h, gate_up);
}

ith_status ith_swiglu_backward(ith_ctx *ctx, ith_tensor dgate_up, ith_tensor h, ith_tensor dh,
                               ith_tensor gate_up)
{
    ITH_ASSERT(is_act(dh) && gate_up.dtype == dh.dtype && dgate_up.dtype == dh.dtype &&
               dh.ndim == 2);
    ITH_ASSERT(is(gate_up, 2, dh.shape[0], 2 * dh.shape[1], 0) &&
               is(dgate_up, 2, dh.shape[0], 2 * dh.shape[1], 0));
    ITH_ASSERT(absent(h) || (h.dtype == dh.dtype && is(h, 2, dh.shape[0], dh.shape[1], 0)));
    RUN(swiglu_backward, dgate_up, h, dh, gate_up);
}

ith_status ith_gather_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    ITH_ASSERT(x.ndim == 2 && y.dtype == x.dtype && idx.dtype == ITH_I32 && idx.ndim == 1);
    ITH_ASSERT(is(y, 2, idx.shape[0], x.shape[1], 0));
    RUN(gather_rows, y, x, idx);
}

ith_status ith_scatter_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    ITH_ASSERT(y.ndim == 2 && y.dtype == x.dtype && idx.dtype == ITH_I32 && idx.ndim == 1);
    ITH_ASSERT(is(x, 2, idx.shape[0], y.shape[1], 0));
    RUN(scatter_rows, y, x, idx);
}

ith_status ith_list_ranges(ith_ctx *ctx, ith_tensor index, ith_tensor first, ith_tensor offsets)
{
    ITH_ASSERT(index.dtype == ITH_I32 && index.ndim == 1 && first.dtype == ITH_I32 &&
               first.ndim == 1);
    ITH_ASSERT(offsets.dtype == ITH_I32 && is(offsets, 1, first.shape[0] + 1, 0, 0));
    RUN(list_ranges, index, first, offsets);
}

static bool same_shape(ith_tensor a, ith_tensor b)
{
    return a.ndim == b.ndim && memcmp(a.shape, b.shape, sizeof a.shape) == 0;
}

ith_status ith_add(ith_ctx *ctx, ith_tensor y, ith_tensor a, ith_tensor b)
{
    ITH_ASSERT(is_act(y) && a.dtype == y.dtype && b.dtype == y.dtype && same_shape(y, a) &&
               same_shape(y, b));
    RUN(add, y, a, b);
}

ith_status ith_cast(ith_ctx *ctx, ith_tensor y, ith_tensor x)
{
    ITH_ASSERT(is_act(y) && is_act(x) && same_shape(y, x));
    RUN(cast, y, x);
}

ith_status ith_zero(ith_ctx *ctx, ith_tensor y)
{
    RUN(zero, y);
}

ith_status ith_cross_entropy(ith_ctx *ctx, ith_tensor row_loss, ith_tensor logits,
                             ith_tensor labels, ith_tensor seeds, bool gradient)
{
    ITH_ASSERT(is_act(logits) && logits.ndim == 2 && labels.dtype == ITH_I32 &&
               is(labels, 1, logits.shape[0], 0, 0));
    ITH_ASSERT(is_stat(row_loss, logits) && is(row_loss, 1, logits.shape[0], 0, 0));
    ITH_ASSERT(!gradient || (is_stat(seeds, logits) && is(seeds, 1, logits.shape[0], 0, 0)));
    RUN(cross_entropy, row_loss, logits, labels, seeds, gradient);
}

ith_status ith_cross_entropy_confident(ith_ctx *ctx, ith_tensor row_loss, ith_tensor row_confidence,
                                       ith_tensor right, ith_tensor logits, ith_tensor labels,
                                       ith_tensor seeds, float confidence, bool gradient)
{
    int64_t m = logits.shape[0];
    ITH_ASSERT(is_act(logits) && logits.ndim == 2 && labels.dtype == ITH_I32 &&
               is(labels, 1, m, 0, 0));
    ITH_ASSERT(is_stat(row_loss, logits) && is(row_loss, 1, m, 0, 0));
    ITH_ASSERT(is_stat(row_confidence, logits) && is(row_confidence, 1, m, 0, 0));
    ITH_ASSERT(is_stat(right, logits) && is(right, 1, m, 0, 0));
    ITH_ASSERT(!gradient || (is_stat(seeds, logits) && is(seeds, 1, m, 0, 0)));
    RUN(cross_entropy_confident, row_loss, row_confidence, right, logits, labels, seeds, confidence,
        gradient);
}

ith_status ith_choose_ids(ith_ctx *ctx, ith_tensor ids, ith_tensor probability, ith_tensor logits,
                          ith_tensor draws, float scale, int64_t barred)
{
    int64_t rows = logits.shape[0];
    ITH_ASSERT(is_act(logits) && logits.ndim == 2 && logits.shape[1] > 1);
    ITH_ASSERT(barred < logits.shape[1]);
    ITH_ASSERT(ids.dtype == ITH_I32 && is(ids, 1, rows, 0, 0));
    ITH_ASSERT(is_stat(probability, logits) && is(probability, 1, rows, 0, 0));
    ITH_ASSERT(absent(draws) || (is_stat(draws, logits) && is(draws, 1, rows, 0, 0)));
    RUN(choose_ids, ids, probability, logits, draws, scale, barred);
}

ith_status ith_dot_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b)
{
    ITH_ASSERT(out.dtype == ITH_F64 && is(out, 1, 1, 0, 0) && a.ndim == 1 &&
               (absent(b) || is(b, 1, a.shape[0], 0, 0)));
    RUN(dot_accumulate, out, a, b);
}

ith_status ith_router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                              ith_tensor probs, ith_tensor logits, bool norm_topk)
{
    ITH_ASSERT(is_act(logits) && logits.ndim == 2 && topk_idx.dtype == ITH_I32 && topk_w.ndim == 2);
    ITH_ASSERT(is_stat(probs, logits) && is(probs, 2, logits.shape[0], logits.shape[1], 0));
    ITH_ASSERT(is_stat(topk_w, logits) && is(topk_w, 2, logits.shape[0], topk_w.shape[1], 0));
    ITH_ASSERT(is(topk_idx, 2, topk_w.shape[0], topk_w.shape[1], 0) &&
               topk_w.shape[1] <= logits.shape[1]);
    RUN(router_forward, topk_w, topk_idx, probs, logits, norm_topk);
}

ith_status ith_router_backward(ith_ctx *ctx, ith_tensor dlogits, ith_tensor dtopk_w,
                               ith_tensor topk_w, ith_tensor topk_idx, ith_tensor probs,
                               ith_tensor expert_fraction, float aux_scale, bool norm_topk)
{
    ITH_ASSERT(is_act(dlogits) && is(dlogits, 2, probs.shape[0], probs.shape[1], 0) &&
               topk_idx.dtype == ITH_I32);
    ITH_ASSERT(is(topk_w, 2, probs.shape[0], topk_w.shape[1], 0) &&
               is(dtopk_w, 2, topk_w.shape[0], topk_w.shape[1], 0));
    ITH_ASSERT(is(topk_idx, 2, topk_w.shape[0], topk_w.shape[1], 0));
    ITH_ASSERT(absent(expert_fraction) || is(expert_fraction, 1, probs.shape[1], 0, 0));
    RUN(router_backward, dlogits, dtopk_w, topk_w, topk_idx, probs, expert_fraction, aux_scale,
        norm_topk);
}

ith_status ith_group_router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                                    ith_tensor scores, ith_tensor logits, ith_tensor bias,
                                    int64_t n_group, int64_t topk_group, float scaling)
{
    int64_t tokens = logits.shape[0], experts = logits.shape[1], k = topk_w.shape[1];
    ITH_ASSERT(logits.ndim == 2 && topk_w.ndim == 2 && topk_idx.dtype == ITH_I32);
    ITH_ASSERT(scores.dtype == logits.dtype && is(scores, 2, tokens, experts, 0));
    ITH_ASSERT(topk_w.dtype == logits.dtype && is(topk_w, 2, tokens, k, 0) &&
               is(topk_idx, 2, tokens, k, 0));
    ITH_ASSERT(absent(bias) || (bias.dtype == logits.dtype && is(bias, 1, experts, 0, 0)));
    ITH_ASSERT(n_group > 0 && experts % n_group == 0 && topk_group > 0 && topk_group <= n_group &&
               k > 0 && k <= topk_group * (experts / n_group));
    RUN(group_router_forward, topk_w, topk_idx, scores, logits, bias, n_group, topk_group, scaling);
}

ith_status ith_group_router_backward(ith_ctx *ctx, ith_tensor dlogits, ith_tensor dtopk_w,
                                     ith_tensor topk_idx, ith_tensor scores, float scaling)
{
    ITH_ASSERT(is_act(dlogits) && is(dlogits, 2, scores.shape[0], scores.shape[1], 0));
    ITH_ASSERT(dtopk_w.dtype == scores.dtype && topk_idx.dtype == ITH_I32 &&
               is(dtopk_w, 2, scores.shape[0], topk_idx.shape[1], 0) &&
               is(topk_idx, 2, scores.shape[0], topk_idx.shape[1], 0));
    RUN(group_router_backward, dlogits, dtopk_w, topk_idx, scores, scaling);
}

ith_status ith_expert_load(ith_ctx *ctx, ith_tensor fraction, ith_tensor mean_prob,
                           ith_tensor offsets, ith_tensor probs, float scale)
{
    ITH_ASSERT(probs.ndim == 2 && is(fraction, 1, probs.shape[1], 0, 0) &&
               is(mean_prob, 1, probs.shape[1], 0, 0));
    ITH_ASSERT(offsets.dtype == ITH_I32 && is(offsets, 1, probs.shape[1] + 1, 0, 0));
    RUN(expert_load, fraction, mean_prob, offsets, probs, scale);
}

ith_status ith_expert_sort(ith_ctx *ctx, ith_tensor offsets, ith_tensor source, ith_tensor row_of,
                           ith_tensor topk_idx)
{
    ITH_ASSERT(topk_idx.ndim == 2 && offsets.ndim == 1 && offsets.shape[0] >= 2);
    ITH_ASSERT(is(source, 1, topk_idx.shape[0] * topk_idx.shape[1], 0, 0));
    ITH_ASSERT(is(row_of, 2, topk_idx.shape[0], topk_idx.shape[1], 0));
    RUN(expert_sort, offsets, source, row_of, topk_idx);
}

ith_status ith_grouped_linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                      ith_tensor offsets)
{
    ITH_ASSERT(is_act(x) && y.dtype == x.dtype && w.dtype == x.dtype && w.ndim == 3 && x.ndim == 2);
    ITH_ASSERT(x.shape[1] == w.shape[2] && is(y, 2, x.shape[0], w.shape[1], 0) &&
               is(offsets, 1, w.shape[0] + 1, 0, 0));
    RUN(grouped_linear_forward, y, x, w, offsets);
}

ith_status ith_grouped_linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy,
                                             ith_tensor w, ith_tensor offsets)
{
    ITH_ASSERT(is_act(dy) && dx.dtype == dy.dtype && w.dtype == dy.dtype && w.ndim == 3 &&
               dy.ndim == 2);
    ITH_ASSERT(dy.shape[1] == w.shape[1] && is(dx, 2, dy.shape[0], w.shape[2], 0));
    ITH_ASSERT(is(offsets, 1, w.shape[0] + 1, 0, 0));
    RUN(grouped_linear_backward_input, dx, dy, w, offsets);
}

ith_status ith_grouped_linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy,
                                              ith_tensor x, ith_tensor offsets)
{
    ITH_ASSERT(is_act(dy) && x.dtype == dy.dtype && is_stat(dw, dy) && dw.ndim == 3 &&
               dy.ndim == 2 && x.ndim == 2);
    ITH_ASSERT(dw.shape[1] == dy.shape[1] && dw.shape[2] == x.shape[1] &&
               dy.shape[0] == x.shape[0]);
    ITH_ASSERT(is(offsets, 1, dw.shape[0] + 1, 0, 0));
    ITH_TRY(ith_blanks_overwrite(ctx, dw, dy.shape[0]));
    RUN(grouped_linear_backward_weight, dw, dy, x, offsets);
}

ith_status ith_expert_combine(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                              ith_tensor topk_w, ith_tensor row_of)
{
    ITH_ASSERT(is_act(y) && x.dtype == y.dtype && y.ndim == 2 &&
               is(x, 2, x.shape[0], y.shape[1], 0));
    ITH_ASSERT(row_of.ndim == 2 && row_of.shape[0] == y.shape[0] && row_of.dtype == ITH_I32);
    ITH_ASSERT(absent(base) || (base.dtype == y.dtype && is(base, 2, y.shape[0], y.shape[1], 0)));
    ITH_ASSERT(absent(topk_w) || is(topk_w, 2, row_of.shape[0], row_of.shape[1], 0));
    RUN(expert_combine, y, base, x, topk_w, row_of);
}

ith_status ith_expert_combine_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dtopk_w,
                                       ith_tensor dy, ith_tensor x, ith_tensor topk_w,
                                       ith_tensor row_of)
{
    ITH_ASSERT(is_act(dy) && x.dtype == dy.dtype && dx.dtype == dy.dtype && dy.ndim == 2);
    ITH_ASSERT(same_shape(dx, x) && x.shape[1] == dy.shape[1] && row_of.ndim == 2 &&
               row_of.shape[0] == dy.shape[0]);
    ITH_ASSERT(is(topk_w, 2, row_of.shape[0], row_of.shape[1], 0) && same_shape(dtopk_w, topk_w));
    RUN(expert_combine_backward, dx, dtopk_w, dy, x, topk_w, row_of);
}

ith_status ith_sumsq_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor x)
{
    ITH_ASSERT(out.dtype == ITH_F64 && is(out, 1, 1, 0, 0) && ith_is_contiguous(x));
    RUN(sumsq_accumulate, out, x);
}

ith_status ith_clip_scale(ith_ctx *ctx, ith_tensor norm, ith_tensor scale, ith_tensor sumsq,
                          float max_norm)
{
    ITH_ASSERT(sumsq.dtype == ITH_F64 && norm.dtype == ITH_F32 && scale.dtype == ITH_F32);
    RUN(clip_scale, norm, scale, sumsq, max_norm);
}

ith_status ith_adamw(ith_ctx *ctx, ith_tensor w, ith_tensor master, ith_tensor m, ith_tensor v,
                     ith_tensor grad, ith_tensor scale, ith_adamw_hyper hyper, uint64_t seed,
                     int64_t first, bool zero_grad)
{
    ITH_ASSERT(ith_numel(w) == ith_numel(grad) && ith_numel(m) == ith_numel(w) &&
               ith_numel(v) == ith_numel(w));
    ITH_ASSERT(absent(master) || ith_numel(master) == ith_numel(w));
    ITH_ASSERT(hyper.step >= 1 && grad.dtype == ITH_F32 && scale.dtype == ITH_F32);
    RUN(adamw, w, master, m, v, grad, scale, hyper, seed, first, zero_grad);
}
