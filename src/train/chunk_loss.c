/* chunk_loss.c - the head, a few rows at a time. */
#include "train/chunk_loss.h"

typedef ith_tensor T;

static T slice_1d(T t, int64_t begin, int64_t end)
{
    return ith_row_range(t, begin, end);
}

/* factor: of the entropies; c NULL: cross entropy alone. */
static ith_status loss_of_chunk(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t r0,
                                int64_t r1, const ith_confidence *c, float factor, T dhidden,
                                T row_loss, T hidden)
{
    const ith_param *head = &m->params[m->head], *norm = &m->params[m->final_norm];
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE), d = m->config->hidden_size;
    bool gradient = dhidden.ndim != 0;
    T rows = slice_1d(b->rows, r0, r1), seeds = slice_1d(b->seeds, r0, r1), x, xn, rstd, logits,
      dxn;
    ITH_TRY(ith_model_head_input(m, ctx, hidden, rows, &x, &xn, &rstd));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "logits", m->dtype, 2, r1 - r0,
                         m->config->vocab_size, 1, 1, &logits));
    ITH_TRY(ith_linear_forward(ctx, logits, xn, head->w, false));
    T loss = slice_1d(row_loss, r0, r1), labels = slice_1d(b->labels, r0, r1);
    if (c)
        ITH_TRY(ith_cross_entropy_confident(ctx, loss, slice_1d(c->row_confidence, r0, r1),
                                            slice_1d(c->right, r0, r1), logits, labels, seeds,
                                            factor, gradient));
    else
        ITH_TRY(ith_cross_entropy(ctx, loss, logits, labels, seeds, gradient));
    if (gradient) { /* logits are their gradient now */
        ITH_TRY(ith_linear_backward_weight(ctx, head->grad, logits, xn));
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "head input gradient", m->dtype, 2, r1 - r0, d,
                             1, 1, &dxn));
        ITH_TRY(ith_linear_backward_input(ctx, dxn, logits, head->w, false));
        ITH_TRY(ith_rmsnorm_backward(ctx, dxn, norm->grad, dxn, ith_tensor_none(), x, rstd, norm->w,
                                     m->norm_offset));
        ITH_TRY(ith_scatter_rows(ctx, dhidden, dxn, rows));
    }
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* All chunks but the last need the same memory: counting walks one of them and the last. */
static ith_status loss_of_chunks(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t chunk,
                                 const ith_confidence *c, float factor, T dhidden, T row_loss,
                                 T hidden)
{
    int64_t rows = b->num_rows, last = rows > 0 ? (ith_div_ceil(rows, chunk) - 1) * chunk : 0,
            next = ith_ctx_counting(ctx) ? ith_max_i64(last, chunk) : chunk;
    for (int64_t r0 = 0; r0 < rows; r0 += next)
        ITH_TRY(loss_of_chunk(m, ctx, b, r0, ith_min_i64(r0 + chunk, rows), c, factor, dhidden,
                              row_loss, hidden));
    return ITH_OK;
}

/* beta, or what makes the added loss a mean over the rows that are right. */
static ith_status factor_of(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t chunk,
                            const ith_confidence *c, T row_loss, T hidden, float *out)
{
    ith_device *d = ctx->device;
    double right = 0;
    *out = c->beta;
    if (!c->mean_of_right)
        return ITH_OK;
    ITH_TRY(loss_of_chunks(m, ctx, b, chunk, c, c->beta, ith_tensor_none(), row_loss, hidden));
    ITH_TRY(ith_zero(ctx, c->right_sum));
    ITH_TRY(ith_dot_accumulate(ctx, c->right_sum, slice_1d(c->right, 0, b->num_rows), b->seeds));
    ITH_TRY(ith_mesh_sum_cp(m->mesh, ctx, c->right_sum));
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    ITH_TRY(d->download(d, &right, c->right_sum.data, sizeof right, ctx->err));
    ITH_TRY(d->sync(d, ctx->err));
    *out = right > 0 ? (float)((double)c->beta * (double)b->share / right) : 0.0f;
    return ITH_OK;
}

ith_status ith_chunk_loss(ith_model *model, ith_ctx *ctx, const ith_batch *batch, int64_t chunk,
                          const ith_confidence *confidence, ith_tensor dhidden, ith_tensor loss_sum,
                          ith_tensor row_loss, ith_tensor hidden)
{
    ITH_ASSERT(chunk > 0);
    int64_t rows = batch->num_rows;
    const ith_confidence *c = dhidden.ndim && confidence->beta > 0 ? confidence : NULL;
    float factor = 0;
    if (dhidden.ndim && rows < batch->num_tokens)
        ITH_TRY(ith_zero(ctx, dhidden));
    if (c)
        ITH_TRY(factor_of(model, ctx, batch, chunk, c, row_loss, hidden, &factor));
    ITH_TRY(loss_of_chunks(model, ctx, batch, chunk, c, factor, dhidden, row_loss, hidden));
    if (c)
        ITH_TRY(
            ith_dot_accumulate(ctx, c->sum, slice_1d(c->row_confidence, 0, rows), batch->seeds));
    return ith_dot_accumulate(ctx, loss_sum, slice_1d(row_loss, 0, rows), batch->seeds);
}
