/* Goal: every backward operator is the gradient of its forward.
 * Method: in double on the reference. The loss is sum_i <out_i, dout_i> with random fixed dout;
 * central differences of it are compared with what backward gives, for every element of every input
 * on tiny shapes, and along random directions through all inputs at once on larger ones. */
#include "testing.h"

#include "base/rng.h"
#include "kernels/backend.h"

#include <math.h>

enum { MAX_TENSORS = 8, MAX_PARAMS = 8 };

typedef struct grad_case grad_case;
struct grad_case {
    const char *name;
    ith_ctx ctx;
    ith_error err;
    ith_arena arena;
    uint64_t drawn; /* random tensors made so far */
    int num_in, num_out;
    ith_tensor in[MAX_TENSORS], grad[MAX_TENSORS];
    ith_tensor out[MAX_TENSORS], dout[MAX_TENSORS];
    ith_tensor saved[MAX_TENSORS]; /* whatever the case keeps between forward and backward */
    ith_seqs seqs;
    int64_t p[MAX_PARAMS];
    ith_status (*forward)(grad_case *g);
    ith_status (*backward)(grad_case *g);
};

/* ---- tensors ---- */

static ith_tensor new_tensor(grad_case *g, ith_dtype dtype, int ndim, int64_t a, int64_t b,
                             int64_t c)
{
    ith_tensor t = ith_tensor_4d(NULL, dtype, ndim, a, b, c, 1);
    if (ndim == 1)
        t = ith_tensor_1d(NULL, dtype, a);
    else if (ndim == 2)
        t = ith_tensor_2d(NULL, dtype, a, b);
    else
        t = ith_tensor_3d(NULL, dtype, a, b, c);
    t.data = ith_arena_alloc(&g->arena, ith_tensor_bytes(t) + 8);
    assert_non_null(t.data);
    return t;
}

static ith_tensor random_tensor(grad_case *g, int ndim, int64_t a, int64_t b, int64_t c)
{
    ith_tensor t = new_tensor(g, ITH_F64, ndim, a, b, c);
    uint64_t stream = g->drawn++;
    for (int64_t i = 0; i < ith_numel(t); i++)
        ((double *)t.data)[i] = ith_rng_normal(99, stream, (uint64_t)i);
    return t;
}

/* An input and the place of its gradient. */
static ith_tensor add_in(grad_case *g, int ndim, int64_t a, int64_t b, int64_t c)
{
    ITH_ASSERT(g->num_in < MAX_TENSORS);
    ith_tensor t = random_tensor(g, ndim, a, b, c);
    g->in[g->num_in] = t;
    g->grad[g->num_in++] = new_tensor(g, ITH_F64, ndim, a, b, c);
    return t;
}

/* An output and the random gradient that comes back for it. */
static ith_tensor add_out(grad_case *g, int ndim, int64_t a, int64_t b, int64_t c)
{
    ITH_ASSERT(g->num_out < MAX_TENSORS);
    g->dout[g->num_out] = random_tensor(g, ndim, a, b, c);
    return g->out[g->num_out++] = new_tensor(g, ITH_F64, ndim, a, b, c);
}

static ith_tensor int_tensor(grad_case *g, int64_t n, const int32_t *values)
{
    ith_tensor t = new_tensor(g, ITH_I32, 1, n, 1, 1);
    memcpy(t.data, values, (size_t)n * sizeof *values);
    return t;
}

static ith_tensor none(void)
{
    return ith_tensor_none();
}

static double *doubles(ith_tensor t)
{
    return t.data;
}

static double inner(ith_tensor a, ith_tensor b)
{
    double sum = 0;
    assert_int_equal(ith_numel(a), ith_numel(b));
    for (int64_t i = 0; i < ith_numel(a); i++)
        sum += doubles(a)[i] * doubles(b)[i];
    return sum;
}

/* ---- the check ---- */

static void case_begin(grad_case *g, const char *name, ith_status (*forward)(grad_case *),
                       ith_status (*backward)(grad_case *))
{
    *g = (grad_case){.name = name, .forward = forward, .backward = backward};
    ith_arena_init(&g->arena, 0);
    g->ctx = ith_ctx_host(ith_backend_ref(), NULL, &g->err);
}

static double loss(grad_case *g)
{
    assert_ok(g->forward(g), g->err);
    double sum = 0;
    for (int i = 0; i < g->num_out; i++)
        sum += inner(g->out[i], g->dout[i]);
    return sum;
}

static void compare(const grad_case *g, const char *what, int64_t at, double got, double wanted,
                    double scale)
{
    if (!(fabs(got - wanted) <= 2e-8 * (1 + scale)))
        fail_msg("%s, %s %lld: backward gives %.12g, differences give %.12g", g->name, what,
                 (long long)at, got, wanted);
}

static const double step = 1e-5;

static void check_elements(grad_case *g)
{
    static const char *const names[] = {"input 0", "input 1", "input 2", "input 3",
                                        "input 4", "input 5", "input 6", "input 7"};
    for (int i = 0; i < g->num_in; i++) {
        double scale = 0;
        for (int64_t n = 0; n < ith_numel(g->in[i]); n++)
            scale = fmax(scale, fabs(doubles(g->grad[i])[n]));
        for (int64_t n = 0; n < ith_numel(g->in[i]); n++) {
            double *x = &doubles(g->in[i])[n], kept = *x;
            *x = kept + step;
            double up = loss(g);
            *x = kept - step;
            double down = loss(g);
            *x = kept;
            compare(g, names[i], n, doubles(g->grad[i])[n], (up - down) / (2 * step), scale);
        }
    }
}

/* Moves all inputs along direction k by `by` and returns <grad, direction>. */
static double move(grad_case *g, uint64_t k, double by)
{
    double slope = 0;
    for (int i = 0; i < g->num_in; i++) {
        for (int64_t n = 0; n < ith_numel(g->in[i]); n++) {
            double u = ith_rng_normal(1000 + k, (uint64_t)i, (uint64_t)n);
            doubles(g->in[i])[n] += by * u;
            slope += doubles(g->grad[i])[n] * u;
        }
    }
    return slope;
}

static void check_directions(grad_case *g)
{
    double size = 0;
    for (int i = 0; i < g->num_in; i++)
        size += inner(g->grad[i], g->grad[i]);
    for (uint64_t k = 0; k < 4; k++) {
        double slope = move(g, k, step / 4);
        double up = loss(g);
        move(g, k, -step / 2);
        double down = loss(g);
        move(g, k, step / 4);
        compare(g, "direction", (int64_t)k, slope, (up - down) / (step / 2), sqrt(size));
    }
}

static void case_end(grad_case *g, bool tiny)
{
    loss(g);
    assert_ok(g->backward(g), g->err);
    if (tiny)
        check_elements(g);
    check_directions(g);
    ith_arena_deinit(&g->arena);
}

/* ---- embedding ---- */

static ith_status embedding_fwd(grad_case *g)
{
    return ith_embedding_forward(&g->ctx, g->out[0], g->saved[0], g->in[0]);
}

static ith_status embedding_bwd(grad_case *g)
{
    return ith_embedding_backward(&g->ctx, g->grad[0], g->dout[0], g->saved[0]);
}

static void test_embedding_gradient(void **state)
{
    (void)state;
    static const int32_t ids[] = {3, 0, 3, 3, 1};
    grad_case g;
    case_begin(&g, "embedding", embedding_fwd, embedding_bwd);
    add_in(&g, 2, 4, 3, 1);
    add_out(&g, 2, 5, 3, 1);
    g.saved[0] = int_tensor(&g, 5, ids);
    case_end(&g, true);
}

/* ---- RMSNorm: in x, w, residual; out y, sum ---- */

static float offset_of(const grad_case *g)
{
    return (float)g->p[0];
}

static ith_status rmsnorm_fwd(grad_case *g)
{
    bool residual = g->num_in == 3;
    return ith_rmsnorm_forward(&g->ctx, g->out[0], residual ? g->out[1] : none(), g->saved[0],
                               g->in[0], residual ? g->in[2] : none(), g->in[1], 1e-6F,
                               offset_of(g));
}

static ith_status rmsnorm_bwd(grad_case *g)
{
    bool residual = g->num_in == 3;
    ITH_TRY(ith_rmsnorm_backward(&g->ctx, g->grad[0], g->grad[1], g->dout[0],
                                 residual ? g->dout[1] : none(), residual ? g->out[1] : g->in[0],
                                 g->saved[0], g->in[1], offset_of(g)));
    if (residual)
        memcpy(g->grad[2].data, g->grad[0].data, (size_t)ith_tensor_bytes(g->grad[0]));
    return ITH_OK;
}

static void test_rmsnorm_gradient(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {40, 64}};
    for (int i = 0; i < 12; i++) {
        int64_t rows = shapes[i / 4][0], width = shapes[i / 4][1];
        grad_case g;
        case_begin(&g, i & 1 ? "rmsnorm, w_offset 1" : "rmsnorm, w_offset 0", rmsnorm_fwd,
                   rmsnorm_bwd);
        g.p[0] = i & 1;
        add_in(&g, 2, rows, width, 1);
        add_in(&g, 1, width, 1, 1);
        add_out(&g, 2, rows, width, 1);
        g.saved[0] = new_tensor(&g, ITH_F64, 1, rows, 1, 1);
        if (i & 2) {
            add_in(&g, 2, rows, width, 1);
            add_out(&g, 2, rows, width, 1);
        }
        case_end(&g, width < 64);
    }
}

/* ---- the residual stream of a block: s = x + r; y = norm(s); z = y W^T; s' = z + s; y' = norm(s')
 * in x, r, w, W, w'; out y', s' ---- */

static ith_status stream_fwd(grad_case *g)
{
    ITH_TRY(ith_rmsnorm_forward(&g->ctx, g->saved[0], g->saved[1], g->saved[2], g->in[0], g->in[1],
                                g->in[2], 1e-6F, 0));
    ITH_TRY(ith_linear_forward(&g->ctx, g->saved[3], g->saved[0], g->in[3], false));
    return ith_rmsnorm_forward(&g->ctx, g->out[0], g->out[1], g->saved[4], g->saved[3], g->saved[1],
                               g->in[4], 1e-6F, 0);
}

/* The gradient of the stream lives in grad[0] throughout, as in the models. */
static ith_status stream_bwd(grad_case *g)
{
    ITH_TRY(ith_rmsnorm_backward(&g->ctx, g->grad[0], g->grad[4], g->dout[0], g->dout[1], g->out[1],
                                 g->saved[4], g->in[4], 0));
    ITH_TRY(ith_linear_backward_weight(&g->ctx, g->grad[3], g->grad[0], g->saved[0]));
    ITH_TRY(ith_linear_backward_input(&g->ctx, g->saved[5], g->grad[0], g->in[3], false));
    ITH_TRY(ith_rmsnorm_backward(&g->ctx, g->grad[0], g->grad[2], g->saved[5], g->grad[0],
                                 g->saved[1], g->saved[2], g->in[2], 0));
    memcpy(g->grad[1].data, g->grad[0].data, (size_t)ith_tensor_bytes(g->grad[0]));
    return ITH_OK;
}

static void test_residual_stream_gradient(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        int64_t rows = large ? 20 : 2, width = large ? 33 : 3;
        grad_case g;
        case_begin(&g, "residual stream", stream_fwd, stream_bwd);
        add_in(&g, 2, rows, width, 1);
        add_in(&g, 2, rows, width, 1);
        add_in(&g, 1, width, 1, 1);
        add_in(&g, 2, width, width, 1);
        add_in(&g, 1, width, 1, 1);
        add_out(&g, 2, rows, width, 1);
        add_out(&g, 2, rows, width, 1);
        for (int i = 0; i < 6; i++)
            g.saved[i] = i == 2 || i == 4 ? new_tensor(&g, ITH_F64, 1, rows, 1, 1)
                                          : new_tensor(&g, ITH_F64, 2, rows, width, 1);
        case_end(&g, !large);
    }
}

/* ---- q/k norm and RoPE: in q, k, (q_w, k_w); out q', k'; saved rstd x2, cos, sin, positions ----
 */

static ith_status rope_fwd(grad_case *g)
{
    bool norm = g->num_in == 4;
    return ith_qk_norm_rope_forward(&g->ctx, g->out[0], g->out[1], norm ? g->saved[0] : none(),
                                    norm ? g->saved[1] : none(), g->in[0], g->in[1],
                                    norm ? g->in[2] : none(), norm ? g->in[3] : none(), g->saved[2],
                                    g->saved[3], g->saved[4], 1e-6F, offset_of(g));
}

static ith_status rope_bwd(grad_case *g)
{
    bool norm = g->num_in == 4;
    return ith_qk_norm_rope_backward(
        &g->ctx, g->grad[0], g->grad[1], norm ? g->grad[2] : none(), norm ? g->grad[3] : none(),
        g->dout[0], g->dout[1], g->in[0], g->in[1], norm ? g->saved[0] : none(),
        norm ? g->saved[1] : none(), norm ? g->in[2] : none(), norm ? g->in[3] : none(),
        g->saved[2], g->saved[3], g->saved[4], offset_of(g));
}

enum { NUM_POSITIONS = 50 };

static void make_angles(grad_case *g, int64_t tokens, int64_t half, bool axes)
{
    ith_tensor c = g->saved[2] = new_tensor(g, ITH_F64, 2, NUM_POSITIONS, half, 1);
    ith_tensor s = g->saved[3] = new_tensor(g, ITH_F64, 2, NUM_POSITIONS, half, 1);
    for (int64_t i = 0; i < NUM_POSITIONS * half; i++) {
        double angle = (double)(i / half) * pow(100, -(double)(i % half) / (double)half);
        doubles(c)[i] = cos(angle);
        doubles(s)[i] = sin(angle);
    }
    ith_tensor ids =
        axes ? new_tensor(g, ITH_I32, 2, 3, tokens, 1) : new_tensor(g, ITH_I32, 1, tokens, 1, 1);
    for (int64_t i = 0; i < ith_numel(ids); i++)
        ((int32_t *)ids.data)[i] = (int32_t)ith_rng_below(5, 5, (uint64_t)i, NUM_POSITIONS);
    g->saved[4] = ids;
}

static void test_qk_norm_rope_gradient(void **state)
{
    (void)state;
    /* T Hq Hkv Dh rd */
    static const int64_t shapes[][5] = {{1, 1, 1, 2, 2}, {2, 3, 1, 10, 8}, {9, 4, 2, 64, 32}};
    for (int i = 0; i < 24; i++) {
        const int64_t *s = shapes[i / 8];
        bool norm = i & 1, offset = i & 2, axes = i & 4;
        grad_case g;
        case_begin(&g, norm ? "qk_norm_rope" : "rope alone", rope_fwd, rope_bwd);
        g.p[0] = offset;
        add_in(&g, 3, s[0], s[1], s[3]);
        add_in(&g, 3, s[0], s[2], s[3]);
        if (norm) {
            add_in(&g, 1, s[3], 1, 1);
            add_in(&g, 1, s[3], 1, 1);
        }
        add_out(&g, 3, s[0], s[1], s[3]);
        add_out(&g, 3, s[0], s[2], s[3]);
        g.saved[0] = new_tensor(&g, ITH_F64, 2, s[0], s[1], 1);
        g.saved[1] = new_tensor(&g, ITH_F64, 2, s[0], s[2], 1);
        make_angles(&g, s[0], s[4] / 2, axes);
        case_end(&g, s[3] < 64);
    }
}

/* ---- matrix product ---- */

static ith_status linear_fwd(grad_case *g)
{
    return ith_linear_forward(&g->ctx, g->out[0], g->in[0], g->in[1], false);
}

static ith_status linear_bwd(grad_case *g)
{
    ITH_TRY(ith_linear_backward_input(&g->ctx, g->grad[0], g->dout[0], g->in[1], false));
    return ith_linear_backward_weight(&g->ctx, g->grad[1], g->dout[0], g->in[0]);
}

static void test_linear_gradient(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 4, 5}, {1, 7, 2}, {30, 41, 52}};
    for (int i = 0; i < 4; i++) {
        grad_case g;
        case_begin(&g, "linear", linear_fwd, linear_bwd);
        add_in(&g, 2, shapes[i][0], shapes[i][2], 1);
        add_in(&g, 2, shapes[i][1], shapes[i][2], 1);
        add_out(&g, 2, shapes[i][0], shapes[i][1], 1);
        case_end(&g, i < 3);
    }
}

/* ---- attention ---- */

static ith_status attention_fwd(grad_case *g)
{
    return ith_attention_forward(&g->ctx, g->out[0], g->saved[0], g->in[0], g->in[1], g->in[2],
                                 g->seqs, 0.4F, g->p[0] != 0);
}

static ith_status attention_bwd(grad_case *g)
{
    return ith_attention_backward(&g->ctx, g->grad[0], g->grad[1], g->grad[2], g->dout[0], g->in[0],
                                  g->in[1], g->in[2], g->out[0], g->saved[0], g->seqs, 0.4F,
                                  g->p[0] != 0);
}

static void check_attention(int64_t num_docs, const int32_t *cu, int64_t hkv, int64_t group,
                            int64_t dim, bool causal, bool tiny)
{
    int64_t tokens = cu[num_docs];
    grad_case g;
    case_begin(&g, causal ? "attention, causal" : "attention, full", attention_fwd, attention_bwd);
    g.p[0] = causal;
    add_in(&g, 3, tokens, hkv * group, dim);
    add_in(&g, 3, tokens, hkv, dim);
    add_in(&g, 3, tokens, hkv, dim);
    add_out(&g, 3, tokens, hkv * group, dim);
    g.saved[0] = new_tensor(&g, ITH_F64, 2, tokens, hkv * group, 1);
    g.seqs.num_docs = num_docs;
    g.seqs.cu_seqlens = int_tensor(&g, num_docs + 1, cu);
    g.seqs.cu_host = cu;
    for (int64_t i = 0; i < num_docs; i++)
        g.seqs.max_len = ith_max_i64(g.seqs.max_len, cu[i + 1] - cu[i]);
    case_end(&g, tiny);
}

static void test_attention_gradient(void **state)
{
    (void)state;
    static const int32_t one[] = {0, 1}, packed[] = {0, 1, 1, 5, 7}, longer[] = {0, 37, 38, 60};
    for (int causal = 0; causal < 2; causal++) {
        check_attention(1, one, 1, 1, 2, causal, true);
        for (int64_t group = 1; group <= 3; group++) {
            check_attention(4, packed, 2, group, 3, causal, true);
            check_attention(3, longer, 2, group, 16, causal, false);
        }
    }
}

/* Block masks: packed documents [noisy; clean] with every `keep`-th block noisy; 0: none is. */
static void check_attention_blocks(int64_t block, int64_t keep, int64_t dim, bool tiny)
{
    static const int32_t tiny_lens[] = {5, 0, 1, 4}, lens[] = {37, 1, 24};
    int64_t num_docs = tiny ? 4 : 3, rows = 0;
    int32_t cu[5] = {0}, noisy[4] = {0}, position[256];
    grad_case g;
    case_begin(&g, "attention, blocks", attention_fwd, attention_bwd);
    g.p[0] = 1;
    for (int64_t i = 0; i < num_docs; i++) {
        int32_t len = tiny ? tiny_lens[i] : lens[i];
        for (int32_t p = 0; p < len && keep; p++)
            if (p / block % keep == 0) {
                position[rows++] = p;
                noisy[i]++;
            }
        for (int32_t p = 0; p < len; p++)
            position[rows++] = p;
        cu[i + 1] = (int32_t)rows;
        g.seqs.max_len = ith_max_i64(g.seqs.max_len, len + noisy[i]);
    }
    add_in(&g, 3, rows, 4, dim);
    add_in(&g, 3, rows, 2, dim);
    add_in(&g, 3, rows, 2, dim);
    add_out(&g, 3, rows, 4, dim);
    g.saved[0] = new_tensor(&g, ITH_F64, 2, rows, 4, 1);
    g.seqs.num_docs = num_docs;
    g.seqs.block = block;
    g.seqs.cu_seqlens = int_tensor(&g, num_docs + 1, cu);
    g.seqs.cu_host = cu;
    if (keep) {
        g.seqs.noisy = int_tensor(&g, num_docs, noisy);
        g.seqs.position = int_tensor(&g, rows, position);
        g.seqs.noisy_host = noisy;
        g.seqs.position_host = position;
    }
    case_end(&g, tiny);
}

static void test_attention_blocks_gradient(void **state)
{
    (void)state;
    for (int64_t keep = 0; keep < 3; keep++) {
        check_attention_blocks(2, keep, 3, true);
        check_attention_blocks(4, keep, 3, true);
        check_attention_blocks(8, keep, 16, false);
    }
}

/* ---- SwiGLU ---- */

static ith_status swiglu_fwd(grad_case *g)
{
    return ith_swiglu_forward(&g->ctx, g->out[0], g->in[0]);
}

static ith_status swiglu_bwd(grad_case *g)
{
    ITH_TRY(ith_swiglu_backward(&g->ctx, g->grad[0], g->saved[0], g->dout[0], g->in[0]));
    assert_memory_equal(g->saved[0].data, g->out[0].data, (size_t)ith_tensor_bytes(g->out[0]));
    return ITH_OK;
}

static void test_swiglu_gradient(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        int64_t rows = large ? 31 : 3, width = large ? 65 : 4;
        grad_case g;
        case_begin(&g, "swiglu", swiglu_fwd, swiglu_bwd);
        add_in(&g, 2, rows, 2 * width, 1);
        add_out(&g, 2, rows, width, 1);
        g.saved[0] = new_tensor(&g, ITH_F64, 2, rows, width, 1);
        case_end(&g, !large);
    }
}

/* ---- cross entropy: dout is the seeds ---- */

static ith_status cross_entropy_run(grad_case *g, ith_tensor logits, bool gradient)
{
    memcpy(logits.data, g->in[0].data, (size_t)ith_tensor_bytes(logits));
    return ith_cross_entropy(&g->ctx, g->out[0], logits, g->saved[1], g->dout[0], gradient);
}

static ith_status cross_entropy_fwd(grad_case *g)
{
    return cross_entropy_run(g, g->saved[0], false);
}

static ith_status cross_entropy_bwd(grad_case *g)
{
    return cross_entropy_run(g, g->grad[0], true);
}

/* One loss of two parts: row_loss and row_confidence under the same seeds. */
static ith_status confident_run(grad_case *g, ith_tensor logits, bool gradient)
{
    int64_t rows = logits.shape[0];
    double loss[20], more[20], right[20];
    memcpy(logits.data, g->in[0].data, (size_t)ith_tensor_bytes(logits));
    ITH_TRY(ith_cross_entropy_confident(
        &g->ctx, ith_tensor_1d(loss, ITH_F64, rows), ith_tensor_1d(more, ITH_F64, rows),
        ith_tensor_1d(right, ITH_F64, rows), logits, g->saved[1], g->dout[0], 1.75F, gradient));
    for (int64_t i = 0; i < rows; i++)
        doubles(g->out[0])[i] = loss[i] + more[i];
    return ITH_OK;
}

static ith_status confident_fwd(grad_case *g)
{
    return confident_run(g, g->saved[0], false);
}

static ith_status confident_bwd(grad_case *g)
{
    return confident_run(g, g->grad[0], true);
}

/* Even rows have the likeliest word as label, well ahead of the others: the choice stays. */
static void test_cross_entropy_confident_gradient(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {4, 7}, {20, 400}};
    for (int i = 0; i < 3; i++) {
        int64_t rows = shapes[i][0], words = shapes[i][1];
        int32_t labels[20];
        grad_case g;
        case_begin(&g, "cross_entropy_confident", confident_fwd, confident_bwd);
        add_in(&g, 2, rows, words, 1);
        for (int64_t n = 0; n < rows; n++) {
            double *row = doubles(g.in[0]) + n * words;
            int64_t best = 0;
            for (int64_t j = 1; j < words; j++)
                best = row[j] > row[best] ? j : best;
            row[best] += 0.1;
            labels[n] = (int32_t)(n % 2 == 0 ? best : (best + 1) % words);
        }
        add_out(&g, 1, rows, 1, 1);
        g.saved[0] = new_tensor(&g, ITH_F64, 2, rows, words, 1);
        g.saved[1] = int_tensor(&g, rows, labels);
        case_end(&g, i < 2);
    }
}

static void test_cross_entropy_gradient(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {4, 7}, {20, 400}};
    for (int i = 0; i < 3; i++) {
        int64_t rows = shapes[i][0], words = shapes[i][1];
        int32_t labels[20];
        for (int64_t n = 0; n < rows; n++)
            labels[n] = (int32_t)ith_rng_below(8, 8, (uint64_t)n, words);
        grad_case g;
        case_begin(&g, "cross_entropy", cross_entropy_fwd, cross_entropy_bwd);
        add_in(&g, 2, rows, words, 1);
        add_out(&g, 1, rows, 1, 1);
        doubles(g.dout[0])[rows - 1] = rows > 1 ? 0 : 1; /* a row without loss */
        g.saved[0] = new_tensor(&g, ITH_F64, 2, rows, words, 1);
        g.saved[1] = int_tensor(&g, rows, labels);
        case_end(&g, i < 2);
    }
}

/* ---- router: out topk_w, and probs for the load balance term (dout[1] = aux_scale * fraction) */

static ith_status router_fwd(grad_case *g)
{
    return ith_router_forward(&g->ctx, g->out[0], g->saved[0], g->out[1], g->in[0], g->p[0] != 0);
}

static ith_status router_bwd(grad_case *g)
{
    return ith_router_backward(&g->ctx, g->grad[0], g->dout[0], g->out[0], g->saved[0], g->out[1],
                               g->p[1] ? g->saved[1] : none(), 0.5F, g->p[0] != 0);
}

/* p: groups, groups that stay; saved[2]: bias. */
static ith_status group_router_fwd(grad_case *g)
{
    return ith_group_router_forward(&g->ctx, g->out[0], g->saved[0], g->saved[1], g->in[0],
                                    g->saved[2], g->p[0], g->p[1], 2.5F);
}

static ith_status group_router_bwd(grad_case *g)
{
    return ith_group_router_backward(&g->ctx, g->grad[0], g->dout[0], g->saved[0], g->saved[1],
                                     2.5F);
}

static void test_group_router_gradient(void **state)
{
    (void)state;
    /* T E k groups stay */
    static const int64_t shapes[][5] = {
        {1, 2, 1, 1, 1}, {3, 8, 2, 4, 2}, {4, 6, 3, 2, 1}, {20, 64, 8, 8, 4}};
    for (int i = 0; i < 4; i++) {
        const int64_t *s = shapes[i];
        grad_case g;
        case_begin(&g, "group router", group_router_fwd, group_router_bwd);
        g.p[0] = s[3];
        g.p[1] = s[4];
        add_in(&g, 2, s[0], s[1], 1);
        add_out(&g, 2, s[0], s[2], 1);
        g.saved[0] = new_tensor(&g, ITH_I32, 2, s[0], s[2], 1);
        g.saved[1] = new_tensor(&g, ITH_F64, 2, s[0], s[1], 1);
        g.saved[2] = random_tensor(&g, 1, s[1], 1, 1);
        case_end(&g, s[1] < 64);
    }
}

static void test_router_gradient(void **state)
{
    (void)state;
    /* T E k */
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 6, 2}, {3, 4, 4}, {20, 64, 8}};
    for (int i = 0; i < 16; i++) {
        const int64_t *s = shapes[i / 4];
        grad_case g;
        case_begin(&g, i & 1 ? "router, weights renormalised" : "router", router_fwd, router_bwd);
        g.p[0] = i & 1;
        g.p[1] = i & 2;
        add_in(&g, 2, s[0], s[1], 1);
        add_out(&g, 2, s[0], s[2], 1);
        add_out(&g, 2, s[0], s[1], 1);
        g.saved[0] = new_tensor(&g, ITH_I32, 2, s[0], s[2], 1);
        g.saved[1] = random_tensor(&g, 1, s[1], 1, 1);
        for (int64_t n = 0; n < s[0] * s[1]; n++)
            doubles(g.dout[1])[n] = g.p[1] ? 0.5 * doubles(g.saved[1])[n % s[1]] : 0;
        case_end(&g, s[1] < 64);
    }
}

/* ---- experts: a whole MoE block, and its parts ----
 * in x [T,D], router [E,D], gate_up [E,2I,D], down [E,D,I], base [T,D]; out y [T,D]. */

typedef struct {
    ith_tensor logits, w, idx, probs, offsets, source, row_of, rows, gate_up, h, out;
    ith_tensor dout, dh, dgate_up, drows, dw, dlogits;
} moe_tensors;

static moe_tensors moe_state;

static ith_status moe_fwd(grad_case *g)
{
    moe_tensors *m = &moe_state;
    ith_ctx *ctx = &g->ctx;
    ITH_TRY(ith_linear_forward(ctx, m->logits, g->in[0], g->in[1], false));
    ITH_TRY(ith_router_forward(ctx, m->w, m->idx, m->probs, m->logits, true));
    ITH_TRY(ith_expert_sort(ctx, m->offsets, m->source, m->row_of, m->idx));
    ITH_TRY(ith_gather_rows(ctx, m->rows, g->in[0], m->source));
    ITH_TRY(ith_grouped_linear_forward(ctx, m->gate_up, m->rows, g->in[2], m->offsets));
    ITH_TRY(ith_swiglu_forward(ctx, m->h, m->gate_up));
    ITH_TRY(ith_grouped_linear_forward(ctx, m->out, m->h, g->in[3], m->offsets));
    return ith_expert_combine(ctx, g->out[0], g->in[4], m->out, m->w, m->row_of);
}

static ith_status moe_bwd(grad_case *g)
{
    moe_tensors *m = &moe_state;
    ith_ctx *ctx = &g->ctx;
    ITH_TRY(ith_expert_combine_backward(ctx, m->dout, m->dw, g->dout[0], m->out, m->w, m->row_of));
    ITH_TRY(ith_grouped_linear_backward_weight(ctx, g->grad[3], m->dout, m->h, m->offsets));
    ITH_TRY(ith_grouped_linear_backward_input(ctx, m->dh, m->dout, g->in[3], m->offsets));
    ITH_TRY(ith_swiglu_backward(ctx, m->dgate_up, none(), m->dh, m->gate_up));
    ITH_TRY(ith_grouped_linear_backward_weight(ctx, g->grad[2], m->dgate_up, m->rows, m->offsets));
    ITH_TRY(ith_grouped_linear_backward_input(ctx, m->drows, m->dgate_up, g->in[2], m->offsets));
    ITH_TRY(ith_router_backward(ctx, m->dlogits, m->dw, m->w, m->idx, m->probs, none(), 0, true));
    ITH_TRY(ith_linear_backward_weight(ctx, g->grad[1], m->dlogits, g->in[0]));
    ITH_TRY(ith_linear_backward_input(ctx, g->grad[0], m->dlogits, g->in[1], false));
    ITH_TRY(ith_expert_combine(ctx, g->grad[0], g->grad[0], m->drows, none(), m->row_of));
    memcpy(g->grad[4].data, g->dout[0].data, (size_t)ith_tensor_bytes(g->grad[4]));
    return ITH_OK;
}

static void make_moe(grad_case *g, int64_t tokens, int64_t experts, int64_t k, int64_t width,
                     int64_t inter)
{
    int64_t rows = tokens * k;
    add_in(g, 2, tokens, width, 1);
    add_in(g, 2, experts, width, 1);
    add_in(g, 3, experts, 2 * inter, width);
    add_in(g, 3, experts, width, inter);
    add_in(g, 2, tokens, width, 1);
    add_out(g, 2, tokens, width, 1);
    moe_tensors *m = &moe_state;
    m->logits = new_tensor(g, ITH_F64, 2, tokens, experts, 1);
    m->dlogits = new_tensor(g, ITH_F64, 2, tokens, experts, 1);
    m->probs = new_tensor(g, ITH_F64, 2, tokens, experts, 1);
    m->w = new_tensor(g, ITH_F64, 2, tokens, k, 1);
    m->dw = new_tensor(g, ITH_F64, 2, tokens, k, 1);
    m->idx = new_tensor(g, ITH_I32, 2, tokens, k, 1);
    m->row_of = new_tensor(g, ITH_I32, 2, tokens, k, 1);
    m->offsets = new_tensor(g, ITH_I32, 1, experts + 1, 1, 1);
    m->source = new_tensor(g, ITH_I32, 1, rows, 1, 1);
    m->rows = new_tensor(g, ITH_F64, 2, rows, width, 1);
    m->drows = new_tensor(g, ITH_F64, 2, rows, width, 1);
    m->out = new_tensor(g, ITH_F64, 2, rows, width, 1);
    m->dout = new_tensor(g, ITH_F64, 2, rows, width, 1);
    m->gate_up = new_tensor(g, ITH_F64, 2, rows, 2 * inter, 1);
    m->dgate_up = new_tensor(g, ITH_F64, 2, rows, 2 * inter, 1);
    m->h = new_tensor(g, ITH_F64, 2, rows, inter, 1);
    m->dh = new_tensor(g, ITH_F64, 2, rows, inter, 1);
}

static void test_moe_block_gradient(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        grad_case g;
        case_begin(&g, "moe block", moe_fwd, moe_bwd);
        if (large)
            make_moe(&g, 30, 16, 4, 12, 10);
        else
            make_moe(&g, 3, 4, 2, 2, 2); /* some expert gets no token */
        case_end(&g, !large);
    }
}

/* ---- adjoint identities, exact on small integers ---- */

static void fill_integers(ith_tensor t, uint64_t stream)
{
    for (int64_t i = 0; i < ith_numel(t); i++)
        doubles(t)[i] = (double)ith_rng_below(31, stream, (uint64_t)i, 17) - 8;
}

/* <gather x, y> = <x, combine y>, <scatter x, y> = <x, gather y>. */
static void test_moves_are_adjoint(void **state)
{
    (void)state;
    grad_case g;
    case_begin(&g, "moves", NULL, NULL);
    int64_t tokens = 19, experts = 6, k = 3, width = 5, rows = tokens * k;
    ith_tensor idx = new_tensor(&g, ITH_I32, 2, tokens, k, 1);
    for (int64_t i = 0; i < rows; i++)
        ((int32_t *)idx.data)[i] = (int32_t)((i / k * 5 + i % k) % experts);
    ith_tensor offsets = new_tensor(&g, ITH_I32, 1, experts + 1, 1, 1);
    ith_tensor source = new_tensor(&g, ITH_I32, 1, rows, 1, 1);
    ith_tensor row_of = new_tensor(&g, ITH_I32, 2, tokens, k, 1);
    ith_tensor x = new_tensor(&g, ITH_F64, 2, tokens, width, 1);
    ith_tensor x2 = new_tensor(&g, ITH_F64, 2, tokens, width, 1);
    ith_tensor y = new_tensor(&g, ITH_F64, 2, rows, width, 1);
    ith_tensor y2 = new_tensor(&g, ITH_F64, 2, rows, width, 1);
    fill_integers(x, 1);
    fill_integers(y, 2);
    assert_ok(ith_expert_sort(&g.ctx, offsets, source, row_of, idx), g.err);
    assert_ok(ith_gather_rows(&g.ctx, y2, x, source), g.err);
    assert_ok(ith_expert_combine(&g.ctx, x2, none(), y, none(), row_of), g.err);
    assert_true(inner(y2, y) == inner(x, x2));

    int32_t order[19];
    for (int64_t i = 0; i < tokens; i++)
        order[i] = (int32_t)(i * 3); /* no repeats */
    ith_tensor to = int_tensor(&g, tokens, order);
    assert_ok(ith_zero(&g.ctx, y2), g.err);
    assert_ok(ith_scatter_rows(&g.ctx, y2, x, to), g.err);
    assert_ok(ith_gather_rows(&g.ctx, x2, y, to), g.err);
    assert_true(inner(y2, y) == inner(x, x2));
    ith_arena_deinit(&g.arena);
}

/* ---- Gated DeltaNet ---- */

/* Documents of length 5, 1, 0, 2 in tiny cases; longer ones cross the stretches of the reference.
 */
static const int32_t tiny_docs[] = {0, 5, 6, 6, 8}, large_docs[] = {0, 70, 71, 71, 150};

static int64_t make_docs(grad_case *g, bool large)
{
    const int32_t *cu = large ? large_docs : tiny_docs;
    g->seqs = (ith_seqs){.cu_seqlens = int_tensor(g, 5, cu),
                         .cu_host = cu,
                         .num_docs = 4,
                         .max_len = large ? 79 : 5};
    return cu[4];
}

static ith_status conv_fwd(grad_case *g)
{
    return ith_conv1d_silu_forward(&g->ctx, g->out[0], g->in[0], g->in[1], none(), g->seqs);
}

static ith_status conv_bwd(grad_case *g)
{
    return ith_conv1d_silu_backward(&g->ctx, g->grad[0], g->grad[1], g->dout[0], g->in[0], g->in[1],
                                    g->seqs);
}

static void test_conv1d_silu_gradient(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        bool large = i == 3;
        int64_t taps = i == 0 ? 1 : i == 1 ? 2 : 4;
        grad_case g;
        case_begin(&g, "conv1d_silu", conv_fwd, conv_bwd);
        int64_t tokens = make_docs(&g, large), width = large ? 9 : 3;
        add_in(&g, 2, tokens, width, 1);
        add_in(&g, 2, width, taps, 1);
        add_out(&g, 2, tokens, width, 1);
        case_end(&g, !large);
    }
}

static ith_status gdn_gates_fwd(grad_case *g)
{
    return ith_gdn_gates_forward(&g->ctx, g->out[0], g->out[1], g->in[0], g->in[1], g->in[2],
                                 g->in[3]);
}

static ith_status gdn_gates_bwd(grad_case *g)
{
    return ith_gdn_gates_backward(&g->ctx, g->grad[0], g->grad[1], g->grad[2], g->grad[3],
                                  g->dout[0], g->dout[1], g->in[0], g->in[1], g->in[2], g->in[3]);
}

static void test_gdn_gates_gradient(void **state)
{
    (void)state;
    grad_case g;
    case_begin(&g, "gdn_gates", gdn_gates_fwd, gdn_gates_bwd);
    add_in(&g, 2, 4, 3, 1);
    add_in(&g, 2, 4, 3, 1);
    add_in(&g, 1, 3, 1, 1);
    add_in(&g, 1, 3, 1, 1);
    add_out(&g, 2, 4, 3, 1);
    add_out(&g, 2, 4, 3, 1);
    doubles(g.in[0])[2] = 25; /* above the threshold of softplus */
    case_end(&g, true);
}

/* [num_docs, 4, dk, dv] as the 3-D input or output that it is here. */
static ith_tensor delta_state(const grad_case *g, ith_tensor t)
{
    return ith_tensor_4d(t.data, t.dtype, 4, g->seqs.num_docs, 4, t.shape[1], t.shape[2]);
}

/* in q, k, v, g, beta, first state; out o, last state */
static ith_status delta_fwd(grad_case *g)
{
    memcpy(g->out[1].data, g->in[5].data, (size_t)ith_tensor_bytes(g->in[5]));
    return ith_gated_delta_rule_forward(&g->ctx, g->out[0], g->in[0], g->in[1], g->in[2], g->in[3],
                                        g->in[4], delta_state(g, g->out[1]), g->seqs, 0.7F);
}

static ith_status delta_bwd(grad_case *g)
{
    memcpy(g->grad[5].data, g->dout[1].data, (size_t)ith_tensor_bytes(g->dout[1]));
    return ith_gated_delta_rule_backward(&g->ctx, g->grad[0], g->grad[1], g->grad[2], g->grad[3],
                                         g->grad[4], delta_state(g, g->grad[5]), g->dout[0],
                                         g->in[0], g->in[1], g->in[2], g->in[3], g->in[4],
                                         delta_state(g, g->in[5]), g->seqs, 0.7F);
}

static void test_gated_delta_rule_gradient(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        grad_case g;
        case_begin(&g, "gated_delta_rule", delta_fwd, delta_bwd);
        int64_t tokens = make_docs(&g, large), dk = large ? 6 : 2, dv = large ? 5 : 3;
        add_in(&g, 3, tokens, 2, dk);
        add_in(&g, 3, tokens, 2, dk);
        add_in(&g, 3, tokens, 4, dv);
        add_in(&g, 2, tokens, 4, 1);
        add_in(&g, 2, tokens, 4, 1);
        add_in(&g, 3, g.seqs.num_docs * 4, dk, dv);
        add_out(&g, 3, tokens, 4, dv);
        add_out(&g, 3, g.seqs.num_docs * 4, dk, dv);
        for (int64_t i = 0; i < tokens * 4; i++) { /* decay at most 1, write strength in (0, 1) */
            doubles(g.in[3])[i] = -0.3 * fabs(doubles(g.in[3])[i]);
            doubles(g.in[4])[i] = 1 / (1 + exp(doubles(g.in[4])[i]));
        }
        case_end(&g, !large);
    }
}

static ith_status gated_norm_fwd(grad_case *g)
{
    return ith_gated_rmsnorm_forward(&g->ctx, g->out[0], g->in[0], g->in[1], g->in[2], 1e-6F);
}

static ith_status gated_norm_bwd(grad_case *g)
{
    return ith_gated_rmsnorm_backward(&g->ctx, g->grad[0], g->grad[1], g->grad[2], g->dout[0],
                                      g->in[0], g->in[1], g->in[2], 1e-6F);
}

static void test_gated_rmsnorm_gradient(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        grad_case g;
        case_begin(&g, "gated_rmsnorm", gated_norm_fwd, gated_norm_bwd);
        int64_t tokens = large ? 20 : 2, heads = large ? 4 : 2, dim = large ? 16 : 3;
        add_in(&g, 3, tokens, heads, dim);
        add_in(&g, 3, tokens, heads, dim);
        add_in(&g, 1, dim, 1, 1);
        add_out(&g, 3, tokens, heads, dim);
        case_end(&g, !large);
    }
}

static ith_status sigmoid_gate_fwd(grad_case *g)
{
    return ith_sigmoid_gate_forward(&g->ctx, g->out[0], g->in[0], g->in[1]);
}

static ith_status sigmoid_gate_bwd(grad_case *g)
{
    return ith_sigmoid_gate_backward(&g->ctx, g->grad[0], g->grad[1], g->dout[0], g->in[0],
                                     g->in[1]);
}

static ith_status row_gate_fwd(grad_case *g)
{
    return ith_row_gate_forward(&g->ctx, g->out[0], g->in[2], g->in[0], g->in[1]);
}

static ith_status row_gate_bwd(grad_case *g)
{
    memcpy(g->grad[2].data, g->dout[0].data, (size_t)ith_tensor_bytes(g->dout[0]));
    return ith_row_gate_backward(&g->ctx, g->grad[0], g->grad[1], g->dout[0], g->in[0], g->in[1]);
}

static void test_gate_gradients(void **state)
{
    (void)state;
    grad_case g;
    case_begin(&g, "sigmoid_gate", sigmoid_gate_fwd, sigmoid_gate_bwd);
    add_in(&g, 3, 3, 2, 4);
    add_in(&g, 3, 3, 2, 4);
    add_out(&g, 3, 3, 2, 4);
    case_end(&g, true);
    case_begin(&g, "row_gate", row_gate_fwd, row_gate_bwd);
    add_in(&g, 2, 3, 5, 1);
    add_in(&g, 2, 3, 1, 1);
    add_in(&g, 2, 3, 5, 1);
    add_out(&g, 2, 3, 5, 1);
    case_end(&g, true);
}

/* ---- vision ---- */

static ith_status layernorm_fwd(grad_case *g)
{
    return ith_layernorm_forward(&g->ctx, g->out[0], g->saved[0], g->saved[1], g->in[0], g->in[1],
                                 g->in[2], 1e-6F);
}

static ith_status layernorm_bwd(grad_case *g)
{
    return ith_layernorm_backward(&g->ctx, g->grad[0], g->grad[1], g->grad[2], g->dout[0], none(),
                                  g->in[0], g->saved[0], g->saved[1], g->in[1]);
}

static void test_layernorm_gradient(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        int64_t rows = large ? 30 : 2, width = large ? 40 : 4;
        grad_case g;
        case_begin(&g, "layernorm", layernorm_fwd, layernorm_bwd);
        add_in(&g, 2, rows, width, 1);
        add_in(&g, 1, width, 1, 1);
        add_in(&g, 1, width, 1, 1);
        add_out(&g, 2, rows, width, 1);
        g.saved[0] = new_tensor(&g, ITH_F64, 1, rows, 1, 1);
        g.saved[1] = new_tensor(&g, ITH_F64, 1, rows, 1, 1);
        case_end(&g, !large);
    }
}

/* A biased activation: gelu(x + b). */
static ith_status gelu_fwd(grad_case *g)
{
    memcpy(g->saved[0].data, g->in[0].data, (size_t)ith_tensor_bytes(g->in[0]));
    ITH_TRY(ith_bias_add(&g->ctx, g->saved[0], g->in[1]));
    return ith_gelu_forward(&g->ctx, g->out[0], g->saved[0], g->p[0] != 0);
}

static ith_status gelu_bwd(grad_case *g)
{
    ITH_TRY(ith_gelu_backward(&g->ctx, g->grad[0], g->dout[0], g->saved[0], g->p[0] != 0));
    return ith_bias_backward(&g->ctx, g->grad[1], g->grad[0]);
}

static void test_gelu_and_bias_gradient(void **state)
{
    (void)state;
    for (int tanh_form = 0; tanh_form < 2; tanh_form++) {
        grad_case g;
        case_begin(&g, tanh_form ? "gelu, tanh" : "gelu, erf", gelu_fwd, gelu_bwd);
        g.p[0] = tanh_form;
        add_in(&g, 2, 5, 4, 1);
        add_in(&g, 1, 4, 1, 1);
        add_out(&g, 2, 5, 4, 1);
        g.saved[0] = new_tensor(&g, ITH_F64, 2, 5, 4, 1);
        case_end(&g, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_embedding_gradient),
        cmocka_unit_test(test_rmsnorm_gradient),
        cmocka_unit_test(test_residual_stream_gradient),
        cmocka_unit_test(test_qk_norm_rope_gradient),
        cmocka_unit_test(test_linear_gradient),
        cmocka_unit_test(test_attention_gradient),
        cmocka_unit_test(test_attention_blocks_gradient),
        cmocka_unit_test(test_swiglu_gradient),
        cmocka_unit_test(test_cross_entropy_gradient),
        cmocka_unit_test(test_cross_entropy_confident_gradient),
        cmocka_unit_test(test_router_gradient),
        cmocka_unit_test(test_group_router_gradient),
        cmocka_unit_test(test_moe_block_gradient),
        cmocka_unit_test(test_moves_are_adjoint),
        cmocka_unit_test(test_conv1d_silu_gradient),
        cmocka_unit_test(test_gdn_gates_gradient),
        cmocka_unit_test(test_gated_delta_rule_gradient),
        cmocka_unit_test(test_gated_rmsnorm_gradient),
        cmocka_unit_test(test_gate_gradients),
        cmocka_unit_test(test_layernorm_gradient),
        cmocka_unit_test(test_gelu_and_bias_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
