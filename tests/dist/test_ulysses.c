/* The exchange around attention on values that name their token, head and place: exact for every
 * head count, also those that the ranks do not divide, and for any number of tokens. */
#include "testing.h"

#include "kernels/backend.h"
#include "parallel/ulysses.h"
#include "twin.h"

static ith_comm *world;
static ith_mesh mesh;
static ith_device *device;
static ith_error err;

typedef struct {
    int64_t q_heads, kv_heads;
} heads;

static const heads all_heads[] = {{32, 8}, {16, 2}, {9, 3}, {14, 2}, {6, 2},
                                  {8, 1},  {4, 4},  {8, 8}, {40, 8}};
static const int64_t all_tokens[] = {24, 7, 1};
#define DIM 4

static float value(int part, int64_t token, int64_t head, int64_t d)
{
    return (float)(((token * 40 + head) * 3 + part) * DIM + d);
}

/* Every head is someone's, in order; kv heads are those of the query heads; nobody has none. */
static void test_shares_cover_all_heads(void **state)
{
    (void)state;
    for (size_t c = 0; c < sizeof all_heads / sizeof *all_heads; c++)
        for (int64_t p = 1; p <= all_heads[c].q_heads; p++) {
            int64_t next = 0, group = all_heads[c].q_heads / all_heads[c].kv_heads;
            for (int64_t r = 0; r < p; r++) {
                ith_head_share s =
                    ith_ulysses_share(all_heads[c].q_heads, all_heads[c].kv_heads, p, r);
                assert_int_equal(s.q_first, next);
                assert_true(s.q_count > 0 && s.kv_count > 0 && s.q_count % s.kv_count == 0);
                assert_int_equal(s.kv_first, s.q_first / group);
                assert_int_equal(s.kv_first + s.kv_count - 1, (next + s.q_count - 1) / group);
                next += s.q_count;
            }
            assert_int_equal(next, all_heads[c].q_heads);
        }
}

/* ---- one layer's exchanges ---- */

typedef struct {
    ith_ctx ctx;
    int64_t n, begin, tokens, sent;
    heads h;
    ith_head_share own;
    ith_qkv in, all, dall, din;
    ith_tensor o, o_back, do_, do_all;
} layer;

static void push(layer *x, int64_t rows, int64_t count, ith_tensor *out)
{
    assert_ok(
        ith_ctx_push(&x->ctx, ITH_MEM_ACTIVATIONS, "test", ITH_F32, 3, rows, count, DIM, 1, out),
        err);
}

static float *at(ith_tensor t, int64_t row, int64_t head, int64_t d)
{
    return (float *)t.data + row * t.stride[0] + head * t.stride[1] + d;
}

static void fill(ith_tensor t, int part, int64_t first_token, int64_t first_head, float scale)
{
    for (int64_t i = 0; i < t.shape[0]; i++)
        for (int64_t h = 0; h < t.shape[1]; h++)
            for (int64_t d = 0; d < DIM; d++)
                *at(t, i, h, d) = scale * value(part, first_token + i, first_head + h, d);
}

/* scale_of gives the factor that each head's values must have. */
static void check(const layer *x, ith_tensor t, int part, int64_t first_token, int64_t first_head,
                  float (*scale_of)(const layer *x, int64_t head), const char *what)
{
    for (int64_t i = 0; i < t.shape[0]; i++)
        for (int64_t h = 0; h < t.shape[1]; h++)
            for (int64_t d = 0; d < DIM; d++) {
                float want =
                    scale_of(x, first_head + h) * value(part, first_token + i, first_head + h, d);
                if (*at(t, i, h, d) != want)
                    fail_msg("rank %lld, heads %lld/%lld, n %lld: %s[%lld,%lld,%lld] is %g, "
                             "expected %g",
                             (long long)world->rank, (long long)x->h.q_heads,
                             (long long)x->h.kv_heads, (long long)x->n, what, (long long)i,
                             (long long)h, (long long)d, (double)*at(t, i, h, d), (double)want);
            }
}

static float once(const layer *x, int64_t head)
{
    (void)x;
    (void)head;
    return 1;
}

/* Rank r sends (r + 1) times the value as gradient of each kv head it holds. */
static float sum_of_replicas(const layer *x, int64_t head)
{
    float sum = 0;
    for (int64_t r = 0; r < world->size; r++) {
        ith_head_share s = ith_ulysses_share(x->h.q_heads, x->h.kv_heads, world->size, r);
        sum += head >= s.kv_first && head < s.kv_first + s.kv_count ? (float)(r + 1) : 0;
    }
    return sum;
}

/* In the groups of both queues. */
static int64_t bytes_sent(void)
{
    ith_comm *const *cp = mesh.device_cp;
    return cp[0]->bytes_sent + (cp[1] != cp[0] ? cp[1]->bytes_sent : 0);
}

static void walk(layer *x)
{
    bool runs = !ith_ctx_counting(&x->ctx);
    int64_t rows = runs ? x->tokens : ith_div_ceil(x->n, world->size);
    push(x, rows, x->h.q_heads, &x->in.q);
    push(x, rows, x->h.kv_heads, &x->in.k);
    push(x, rows, x->h.kv_heads, &x->in.v);
    push(x, rows, x->h.q_heads, &x->din.q);
    push(x, rows, x->h.kv_heads, &x->din.k);
    push(x, rows, x->h.kv_heads, &x->din.v);
    push(x, rows, x->h.q_heads, &x->do_);
    push(x, x->n, x->own.q_count, &x->o);
    if (runs) {
        fill(x->in.q, 0, x->begin, 0, 1);
        fill(x->in.k, 1, x->begin, 0, 1);
        fill(x->in.v, 2, x->begin, 0, 1);
        fill(x->do_, 1, x->begin, 0, 1);
        fill(x->o, 2, 0, x->own.q_first, 1);
    }
    x->o_back = ith_tensor_none();
    x->sent = bytes_sent();
    bool direct = ith_ulysses_is_direct(&mesh, &x->ctx, x->h.kv_heads);
    assert_ok(
        ith_ulysses_push_heads(&mesh, &x->ctx, ITH_MEM_WORKSPACE, "heads", x->n, x->in, &x->all),
        err);
    assert_ok(ith_ulysses_to_heads(&mesh, &x->ctx, x->n, x->in, x->all), err);
    if (direct) {
        push(x, rows, x->h.q_heads, &x->o_back);
        assert_ok(
            ith_ulysses_others_to_tokens(&mesh, &x->ctx, x->n, x->h.kv_heads, x->o, x->o_back),
            err);
        assert_ok(ith_ulysses_own_to_tokens(&mesh, &x->ctx, x->n, x->h.kv_heads, x->o, x->o_back),
                  err);
    } else {
        assert_ok(ith_ulysses_to_tokens(&mesh, &x->ctx, x->n, x->h.q_heads, x->h.kv_heads, x->o,
                                        &x->o_back),
                  err);
    }
    x->sent = bytes_sent() - x->sent;
    assert_ok(
        ith_ulysses_to_tokens_backward(&mesh, &x->ctx, x->n, x->h.kv_heads, x->do_, &x->do_all),
        err);
    assert_ok(
        ith_ulysses_push_heads(&mesh, &x->ctx, ITH_MEM_WORKSPACE, "heads", x->n, x->din, &x->dall),
        err);
    if (world->size == 1) /* dall is din: attention would write there */
        x->dall = x->din;
    if (runs) {
        fill(x->dall.q, 0, 0, x->own.q_first, 1);
        fill(x->dall.k, 1, 0, x->own.kv_first, (float)(world->rank + 1));
        fill(x->dall.v, 2, 0, x->own.kv_first, (float)(world->rank + 1));
    }
    assert_ok(ith_ulysses_to_heads_backward(&mesh, &x->ctx, x->n, x->din, x->dall), err);
    assert_ok(ith_ulysses_await(&mesh, &x->ctx), err);
}

static void check_layer(const layer *x)
{
    check(x, x->all.q, 0, 0, x->own.q_first, once, "q");
    check(x, x->all.k, 1, 0, x->own.kv_first, once, "k");
    check(x, x->all.v, 2, 0, x->own.kv_first, once, "v");
    check(x, x->o_back, 2, x->begin, 0, once, "o");
    check(x, x->do_all, 1, 0, x->own.q_first, once, "do");
    check(x, x->din.q, 0, x->begin, 0, once, "dq");
    check(x, x->din.k, 1, x->begin, 0, sum_of_replicas, "dk");
    check(x, x->din.v, 2, x->begin, 0, sum_of_replicas, "dv");
}

/* Bytes of the forward exchanges, where the ranks divide everything:
 * (P-1)/P^2 * n * (2 dq + 2 dkv rep) * e */
static void check_bytes(const layer *x)
{
    int64_t p = world->size, rep = p > x->h.kv_heads ? p / x->h.kv_heads : 1;
    bool even = x->n % p == 0 && x->h.q_heads % p == 0 &&
                (x->h.kv_heads % p == 0 || p % x->h.kv_heads == 0);
    int64_t want = (p - 1) * x->n / p * (2 * x->h.q_heads + 2 * x->h.kv_heads * rep) * DIM * 4 / p;
    if (even && x->sent != want)
        fail_msg("heads %lld/%lld, %lld ranks: %lld bytes sent, formula %lld",
                 (long long)x->h.q_heads, (long long)x->h.kv_heads, (long long)p,
                 (long long)x->sent, (long long)want);
}

static void run_layer(heads h, int64_t n)
{
    layer x = {.n = n, .h = h, .begin = ith_cp_begin(&mesh, n)};
    x.tokens = ith_cp_end(&mesh, n) - x.begin;
    x.own = ith_ulysses_own_share(&mesh, h.q_heads, h.kv_heads);
    x.ctx = ith_ctx_host(ith_backend_ref(), NULL, &err);
    x.ctx.device = device;
    assert_ok(ith_plan_create(&x.ctx.plan, x.ctx.device, &err), err);
    walk(&x);
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        ith_plan_release(x.ctx.plan, (ith_mem_class)c, 0);
    assert_ok(ith_plan_commit(x.ctx.plan, &err), err);
    walk(&x);
    check_layer(&x);
    check_bytes(&x);
    if (n % world->size == 0)
        for (int c = 0; c < ITH_MEM_CLASSES; c++)
            assert_int_equal(ith_plan_high(x.ctx.plan, (ith_mem_class)c),
                             ith_plan_peak(x.ctx.plan, (ith_mem_class)c));
    ith_plan_destroy(x.ctx.plan);
}

static void run_all(void)
{
    for (size_t c = 0; c < sizeof all_heads / sizeof *all_heads; c++)
        for (size_t i = 0; i < sizeof all_tokens / sizeof *all_tokens; i++)
            if (world->size <= all_heads[c].q_heads)
                run_layer(all_heads[c], all_tokens[i]);
}

static void test_exchanges_are_exact(void **state)
{
    (void)state;
    run_all();
}

/* ---- parts of other kinds: q, k of 3, v of 4, and two numbers per query head ---- */

enum { PARTS = 5, TOKENS = 11 };
static const int64_t part_dim[PARTS] = {3, 3, DIM, 1, 1};
static const bool part_kv[PARTS] = {true, true, false, false, false};

static void push_parts(layer *x, int64_t rows, int64_t q_heads, int64_t kv_heads,
                       ith_head_parts *out)
{
    *out = (ith_head_parts){.count = PARTS, .q_heads = x->h.q_heads, .kv_heads = x->h.kv_heads};
    for (int i = 0; i < PARTS; i++) {
        out->kv[i] = part_kv[i];
        assert_ok(ith_ctx_push(&x->ctx, ITH_MEM_ACTIVATIONS, "test", ITH_F32, 3, rows,
                               part_kv[i] ? kv_heads : q_heads, part_dim[i], 1, &out->t[i]),
                  err);
    }
}

/* Every value of the parts tells where it is from, times scale_of its kv head; written or demanded.
 */
static void each_value(const layer *x, const ith_head_parts *p, int64_t first_token,
                       const ith_head_share *share, float (*scale_of)(const layer *x, int64_t head),
                       bool write)
{
    for (int i = 0; i < PARTS; i++)
        for (int64_t t = 0; t < p->t[i].shape[0]; t++)
            for (int64_t h = 0; h < p->t[i].shape[1]; h++)
                for (int64_t d = 0; d < part_dim[i]; d++) {
                    int64_t head = h + (part_kv[i] ? share->kv_first : share->q_first);
                    float want = value(i % 3, first_token + t, head + i / 3, d);
                    want *= part_kv[i] && scale_of ? scale_of(x, head) : 1;
                    if (write)
                        *at(p->t[i], t, h, d) = want;
                    else if (*at(p->t[i], t, h, d) != want)
                        fail_msg("rank %lld, part %d, token %lld, head %lld: %g, expected %g",
                                 (long long)world->rank, i, (long long)(first_token + t),
                                 (long long)head, (double)*at(p->t[i], t, h, d), (double)want);
                }
}

static float own_factor(const layer *x, int64_t head)
{
    (void)x;
    (void)head;
    return (float)(world->rank + 1);
}

static void walk_parts(layer *x)
{
    bool runs = !ith_ctx_counting(&x->ctx);
    ith_head_share all = {0, x->h.q_heads, 0, x->h.kv_heads};
    ith_head_parts in, there, dthere, din;
    int64_t rows = runs ? x->tokens : ith_div_ceil(x->n, world->size);
    push_parts(x, rows, x->h.q_heads, x->h.kv_heads, &in);
    push_parts(x, rows, x->h.q_heads, x->h.kv_heads, &din);
    if (runs)
        each_value(x, &in, x->begin, &all, NULL, true);
    assert_ok(ith_ulysses_push_parts(&mesh, &x->ctx, ITH_MEM_WORKSPACE, "heads", x->n, &in, &there),
              err);
    assert_ok(ith_ulysses_parts_to_heads(&mesh, &x->ctx, x->n, &in, &there), err);
    assert_ok(ith_ulysses_await(&mesh, &x->ctx), err);
    assert_ok(
        ith_ulysses_push_parts(&mesh, &x->ctx, ITH_MEM_WORKSPACE, "heads", x->n, &din, &dthere),
        err);
    if (runs) {
        each_value(x, &there, 0, &x->own, NULL, false);
        each_value(x, &dthere, 0, &x->own, own_factor, true);
    }
    assert_ok(ith_ulysses_parts_to_heads_backward(&mesh, &x->ctx, x->n, &din, &dthere), err);
    assert_ok(ith_ulysses_await(&mesh, &x->ctx), err);
    if (runs)
        each_value(x, &din, x->begin, &all, sum_of_replicas, false);
}

static void run_parts(void)
{
    for (size_t c = 0; c < sizeof all_heads / sizeof *all_heads; c++) {
        layer x = {.n = TOKENS, .h = all_heads[c], .begin = ith_cp_begin(&mesh, TOKENS)};
        if (world->size > x.h.q_heads)
            continue;
        x.tokens = ith_cp_end(&mesh, x.n) - x.begin;
        x.own = ith_ulysses_own_share(&mesh, x.h.q_heads, x.h.kv_heads);
        x.ctx = ith_ctx_host(ith_backend_ref(), NULL, &err);
        x.ctx.device = device;
        assert_ok(ith_plan_create(&x.ctx.plan, x.ctx.device, &err), err);
        walk_parts(&x);
        for (int k = 0; k < ITH_MEM_CLASSES; k++)
            ith_plan_release(x.ctx.plan, (ith_mem_class)k, 0);
        assert_ok(ith_plan_commit(x.ctx.plan, &err), err);
        walk_parts(&x);
        ith_plan_destroy(x.ctx.plan);
    }
}

static void test_parts_of_other_kinds(void **state)
{
    (void)state;
    run_parts();
}

/* Goal: rows that links of devices take as they lie arrive where packed ones do. */
static void test_exchanges_of_rows_are_exact(void **state)
{
    (void)state;
    ith_device twin = twin_device(world, false);
    if (world->size == 1)
        skip();
    device = &twin;
    assert_ok(ith_mesh_open_device(&mesh, device, false, &err), err);
    assert_true(mesh.device_cp[0]->takes_rows);
    run_all();
    run_parts();
    ith_mesh_close_device(&mesh);
    device = ith_device_cpu();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares_cover_all_heads),
        cmocka_unit_test(test_exchanges_are_exact),
        cmocka_unit_test(test_parts_of_other_kinds),
        cmocka_unit_test(test_exchanges_of_rows_are_exact),
    };
    device = ith_device_cpu();
    if (ith_comm_open_world(&world, 120, &err) != ITH_OK ||
        ith_mesh_open(&mesh, world, world->size, &err) != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    int failed = cmocka_run_group_tests_name("ulysses", tests, NULL, NULL);
    ith_mesh_close(&mesh);
    ith_comm_close(world);
    return failed;
}
