/* Goal: operators reach rows beyond 2^31 elements and beyond 4 GiB, as long sequences have them.
 * Method: matrices whose rows lie 2^30 elements apart in memory that is only promised; every result
 * must have the bits of the same call on rows side by side. */
#include "testing.h"

#include "kernels/backend.h"

#include <sys/mman.h>

enum { ROWS = 5, MAX_MATRICES = 12, MAX_COLS = 256 };
#define FAR_STRIDE ((int64_t)1 << 30)

static ith_error err;
static float *far_memory;
static int32_t order[ROWS] = {4, 0, 3, 2, 1}, borders[] = {0, 2, ROWS};

/* What does not grow with rows times columns. */
typedef struct {
    float rows[3][ROWS], heads[2 * ROWS], weights[64];
} near_data;

static ith_tensor rows_of(float *x)
{
    return ith_tensor_1d(x, ITH_F32, ROWS);
}

static ith_tensor column_of(float *x)
{
    return ith_tensor_2d(x, ITH_F32, ROWS, 1);
}

static ith_tensor index_rows(void)
{
    return ith_tensor_1d(order, ITH_I32, ROWS);
}

static ith_seqs two_documents(void)
{
    return (ith_seqs){.cu_seqlens = ith_tensor_1d(borders, ITH_I32, 3),
                      .cu_host = borders,
                      .num_docs = 2,
                      .max_len = 3};
}

static ith_status norm(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    ith_tensor w = ith_tensor_1d(n->weights, ITH_F32, 8), rstd = rows_of(n->rows[0]);
    ITH_TRY(ith_rmsnorm_forward(ctx, m[0], m[1], rstd, m[2], m[3], w, 1e-6F, 0));
    return ith_rmsnorm_backward(ctx, m[4], ith_tensor_none(), m[5], ith_tensor_none(), m[1], rstd,
                                w, 0);
}

static ith_status product(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    (void)n;
    ITH_TRY(ith_linear_forward(ctx, m[0], m[1], m[2], false));
    ITH_TRY(ith_linear_backward_input(ctx, m[3], m[0], m[2], false));
    return ith_linear_backward_weight(ctx, m[4], m[0], m[1]);
}

static ith_status attention(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    ith_tensor lse = ith_tensor_2d(n->heads, ITH_F32, ROWS, 2), t[8];
    for (int i = 0; i < 8; i++) /* o q k v do dq dk dv: 2 query heads, 1 kv head */
        t[i] = ith_split_heads(m[i], m[i].shape[1] / 8);
    ITH_TRY(ith_attention_forward(ctx, t[0], lse, t[1], t[2], t[3], two_documents(), 0.4F, true));
    return ith_attention_backward(ctx, t[5], t[6], t[7], t[4], t[1], t[2], t[3], t[0], lse,
                                  two_documents(), 0.4F, true);
}

static ith_status delta_rule(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    ith_tensor g = column_of(n->rows[0]), beta = column_of(n->rows[1]), t[8];
    float dg[ROWS], dbeta[ROWS];
    for (int i = 0; i < 8; i++)
        t[i] = ith_split_heads(m[i], 1);
    for (int i = 0; i < ROWS; i++) {
        n->rows[0][i] = -0.1F * (float)(i + 1);
        n->rows[1][i] = 0.5F;
    }
    ITH_TRY(ith_gated_delta_rule_forward(ctx, t[0], t[1], t[2], t[3], g, beta, ith_tensor_none(),
                                         two_documents(), 0.4F));
    return ith_gated_delta_rule_backward(ctx, t[5], t[6], t[7], column_of(dg), column_of(dbeta),
                                         ith_tensor_none(), t[4], t[1], t[2], t[3], g, beta,
                                         ith_tensor_none(), two_documents(), 0.4F);
}

static ith_status convolution(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    ith_tensor w = ith_tensor_2d(n->weights, ITH_F32, 8, 4);
    float dw[32] = {0};
    ITH_TRY(ith_conv1d_silu_forward(ctx, m[0], m[1], w, ith_tensor_none(), two_documents()));
    return ith_conv1d_silu_backward(ctx, m[2], ith_tensor_2d(dw, ITH_F32, 8, 4), m[3], m[1], w,
                                    two_documents());
}

static ith_status words(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    (void)n;
    ITH_TRY(ith_embedding_forward(ctx, m[0], index_rows(), m[1]));
    return ith_embedding_backward(ctx, m[2], m[0], index_rows());
}

static ith_status moves(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    (void)n;
    ITH_TRY(ith_gather_rows(ctx, m[0], m[1], index_rows()));
    ITH_TRY(ith_scatter_rows(ctx, m[2], m[0], index_rows()));
    ITH_TRY(ith_add(ctx, m[3], m[0], m[1]));
    return ith_zero(ctx, m[0]);
}

static ith_status swiglu(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    (void)n;
    ITH_TRY(ith_swiglu_forward(ctx, m[0], m[1]));
    return ith_swiglu_backward(ctx, m[2], ith_tensor_none(), m[0], m[1]);
}

static ith_status loss(ith_ctx *ctx, const ith_tensor *m, near_data *n)
{
    for (int i = 0; i < ROWS; i++)
        n->rows[1][i] = 0.25F;
    return ith_cross_entropy(ctx, rows_of(n->rows[0]), m[0], index_rows(), rows_of(n->rows[1]),
                             true);
}

static const struct {
    const char *name;
    ith_status (*run)(ith_ctx *ctx, const ith_tensor *m, near_data *n);
    int64_t cols[MAX_MATRICES];
} ops[] = {
    {"rmsnorm", norm, {8, 8, 8, 8, 8, 8}},
    {"linear", product, {ROWS, 8, 8, 8, 8}},
    {"attention", attention, {16, 16, 8, 8, 16, 16, 8, 8}},
    {"gated delta rule", delta_rule, {8, 8, 8, 8, 8, 8, 8, 8}},
    {"convolution", convolution, {8, 8, 8, 8}},
    {"embedding", words, {8, 8, 8}},
    {"rows", moves, {8, 8, 8, 8}},
    {"swiglu", swiglu, {8, 16, 16}},
    {"cross entropy", loss, {7}},
};

/* The matrices of an operator beside each other in rows of `stride` elements, filled alike. */
static int64_t lay(float *base, int64_t stride, const int64_t *cols, ith_tensor *m)
{
    int64_t at = 0;
    for (int i = 0; i < MAX_MATRICES && cols[i]; at += cols[i++])
        m[i] = ith_col_range(ith_tensor_2d(base, ITH_F32, ROWS, stride), at, at + cols[i]);
    assert_true(at <= MAX_COLS);
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t c = 0; c < at; c++)
            base[r * stride + c] = (float)((r * 37 + c * 11) % 23) / 16 - 0.6F;
    return at;
}

static void check(const ith_backend *backend, size_t i)
{
    static float near_memory[ROWS * MAX_COLS];
    near_data data[2];
    ith_tensor m[MAX_MATRICES];
    ith_ctx ctx = ith_ctx_host(backend, NULL, &err);
    int64_t cols = 0;
    memset(data, 0, sizeof data);
    for (int k = 0; k < 2; k++) {
        for (int w = 0; w < 64; w++)
            data[k].weights[w] = 0.1F * (float)(w % 7) - 0.2F;
        cols = lay(k ? far_memory : near_memory, k ? FAR_STRIDE : MAX_COLS, ops[i].cols, m);
        assert_ok(ops[i].run(&ctx, m, &data[k]), err);
    }
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t c = 0; c < cols; c++)
            if (memcmp(&far_memory[r * FAR_STRIDE + c], &near_memory[r * MAX_COLS + c], 4) != 0)
                fail_msg("%s: row %d, column %d is %g, side by side %g", ops[i].name, (int)r,
                         (int)c, (double)far_memory[r * FAR_STRIDE + c],
                         (double)near_memory[r * MAX_COLS + c]);
    assert_memory_equal(&data[0], &data[1], sizeof data[0]);
}

static void test_rows_far_apart_have_the_same_bits(void **state)
{
    (void)state;
    size_t bytes = (size_t)((ROWS - 1) * FAR_STRIDE + MAX_COLS) * 4;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        print_message("[   SKIP   ] no address space of %zu bytes\n", bytes);
        skip();
    }
    far_memory = memory;
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        check(ith_backend_ref(), i);
        check(ith_backend_cpu(), i);
    }
    munmap(memory, bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows_far_apart_have_the_same_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
