/* head.c - final norm and head, for rows that need logits. */
#include "model/model.h"

ith_status ith_model_head_input(ith_model *m, ith_ctx *ctx, ith_tensor hidden, ith_tensor rows,
                                ith_tensor *x, ith_tensor *xn, ith_tensor *rstd)
{
    int64_t n = rows.shape[0], d = m->config->hidden_size;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "head input", m->dtype, 2, n, d, 1, 1, x));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "head input", m->dtype, 2, n, d, 1, 1, xn));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "norm statistics", ITH_F32, 1, n, 1, 1, 1, rstd));
    ITH_TRY(ith_gather_rows(ctx, *x, hidden, rows));
    ith_tensor none = ith_tensor_none();
    return ith_rmsnorm_forward(ctx, *xn, none, *rstd, *x, none, m->params[m->final_norm].w,
                               (float)m->config->rms_norm_eps, m->norm_offset);
}

ith_status ith_model_logits(ith_model *m, ith_ctx *ctx, ith_tensor logits, ith_tensor hidden,
                            ith_tensor rows)
{
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ith_tensor x, xn, rstd;
    ITH_TRY(ith_model_head_input(m, ctx, hidden, rows, &x, &xn, &rstd));
    ITH_TRY(ith_linear_forward(ctx, logits, xn, m->params[m->head].w, false));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}
