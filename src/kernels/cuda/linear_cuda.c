/* linear_cuda.c - the dense products: cuBLASLt, or the plain kernel where cuBLASLt has none.
 *
 * cuBLAS is column-major, so our row-major y = x w^T is its y^T [N,T] = (w^T)^T x^T: operands swap
 * places and each row stride becomes a leading dimension. */
#include "kernels/cuda/cuda_internal.h"

static ith_status product(ith_ctx *ctx, const ith_matmul *p, const ith_grouped *plain)
{
    bool done = false;
    if (p->m == 0 || p->n == 0)
        return ITH_OK;
    if (p->k == 0) { /* an empty sum */
        ITH_ASSERT(p->accumulate);
        return ITH_OK;
    }
    ITH_TRY(ith_matmul_run(ctx, p, plain->a, &done));
    return done ? ITH_OK : ith_grouped_run(ctx, plain);
}

/* A row of one element may carry any stride; cuBLAS wants at least its length. */
static int64_t leading(ith_tensor t)
{
    return ith_max_i64(t.stride[0], ith_max_i64(t.shape[1], 1));
}

static ith_status linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                 bool accumulate)
{
    ith_matmul p = {.m = w.shape[0],
                    .n = x.shape[0],
                    .k = x.shape[1],
                    .transpose_a = true,
                    .accumulate = accumulate,
                    .a = w.data,
                    .b = x.data,
                    .d = y.data,
                    .lda = leading(w),
                    .ldb = leading(x),
                    .ldd = leading(y),
                    .in = x.dtype,
                    .out = y.dtype,
                    .sms = ctx->shared ? ITH_CUDA_SMS - ith_cuda_of(ctx)->few_sms : 0};
    ith_grouped plain = {.kind = ITH_GROUPED_FORWARD,
                         .out = y,
                         .a = x,
                         .b = w,
                         .num_groups = 1,
                         .accumulate = accumulate};
    return product(ctx, &p, &plain);
}

static ith_status linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor w,
                                        bool accumulate)
{
    ith_matmul p = {.m = w.shape[1],
                    .n = dy.shape[0],
                    .k = w.shape[0],
                    .accumulate = accumulate,
                    .a = w.data,
                    .b = dy.data,
                    .d = dx.data,
                    .lda = leading(w),
                    .ldb = leading(dy),
                    .ldd = leading(dx),
                    .in = dy.dtype,
                    .out = dx.dtype};
    ith_grouped plain = {.kind = ITH_GROUPED_INPUT,
                         .out = dx,
                         .a = dy,
                         .b = w,
                         .num_groups = 1,
                         .accumulate = accumulate};
    return product(ctx, &p, &plain);
}

static ith_status linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor x)
{
    ith_matmul p = {.m = x.shape[1],
                    .n = dy.shape[1],
                    .k = x.shape[0],
                    .transpose_b = true,
                    .accumulate = !ctx->overwrite,
                    .a = x.data,
                    .b = dy.data,
                    .d = dw.data,
                    .lda = leading(x),
                    .ldb = leading(dy),
                    .ldd = leading(dw),
                    .in = dy.dtype,
                    .out = dw.dtype};
    ith_grouped plain = {.kind = ITH_GROUPED_WEIGHT,
                         .out = dw,
                         .a = dy,
                         .b = x,
                         .num_groups = 1,
                         .accumulate = !ctx->overwrite};
    return product(ctx, &p, &plain);
}

/* The plain kernel's tile list is far smaller than cuBLASLt's workspace, up to 2^28 rows. */
static int64_t forward_workspace(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                 bool accumulate)
{
    (void)ctx, (void)y, (void)x, (void)w, (void)accumulate;
    return ITH_MATMUL_WORKSPACE_BYTES;
}

static int64_t weight_workspace(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor x)
{
    (void)ctx, (void)dw, (void)dy, (void)x;
    return ITH_MATMUL_WORKSPACE_BYTES;
}

void ith_cuda_fill_linear(struct ith_backend *b)
{
    b->linear_forward.run = linear_forward;
    b->linear_forward.workspace = forward_workspace;
    b->linear_backward_input.run = linear_backward_input;
    b->linear_backward_input.workspace = forward_workspace;
    b->linear_backward_weight.run = linear_backward_weight;
    b->linear_backward_weight.workspace = weight_workspace;
}
