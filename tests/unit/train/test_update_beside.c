/* test_update_beside.c - updates beside the next forward walk change nothing, and nobody reads too
 * early.
 * Method: a device that is the CPU with queues. What an update beside wrote is taken away when it
 * is noted and poison lies in its place until the mark is awaited, so that a reader that does not
 * wait ends with NaN; gradients it reads must not have changed by then. Losses, norms, weights and
 * moments of some steps equal those of the plain CPU, bit for bit. */
#include "e2e/small_model.h"

#include <math.h>

#include "kernels/backend.h"

#define MARKS 8
#define BUFFERS 5 /* weights, master, m, v, gradients */

typedef struct {
    ith_device device;
    const small_run *run;
    char *late[MARKS][BUFFERS]; /* what lies behind a mark that nobody awaited; NULL: nothing */
    int64_t notes, waits;       /* updates hidden; those that had to be awaited */
    int64_t few;                /* of them, on few processors */
    bool inside;
} late_device;

static late_device *late_of(ith_device *d)
{
    return (late_device *)d; /* its first member */
}

/* Elements of a buffer that the update behind a mark is about: layer `mark`, or what follows the
 * layers. */
static ith_tensor behind(const late_device *l, int64_t mark, int buffer)
{
    const ith_step *s = l->run->step;
    const ith_tensor all[BUFFERS] = {s->model->w, s->master, s->m, s->v, s->model->grad};
    int64_t first = s->blocks[1 + mark], end = s->blocks[2 + mark];
    return all[buffer].ndim ? ith_row_range(all[buffer], first, end) : all[buffer];
}

static ith_status late_fork(ith_device *d, ith_queue queue, ith_error *err)
{
    (void)d, (void)queue, (void)err;
    return ITH_OK;
}

static ith_status late_note(ith_device *d, ith_queue queue, int mark, ith_error *err)
{
    late_device *l = late_of(d);
    (void)err;
    if (queue != ITH_QUEUE_UPDATES)
        return ITH_OK;
    assert_true(l->inside && mark < MARKS);
    for (int i = 0; i < BUFFERS; i++) {
        ith_tensor t = behind(l, mark, i);
        if (!t.ndim)
            continue;
        assert_null(l->late[mark][i]); /* the last update was awaited before this one */
        l->late[mark][i] = ith_malloc(ith_tensor_bytes(t));
        assert_non_null(l->late[mark][i]);
        memcpy(l->late[mark][i], t.data, (size_t)ith_tensor_bytes(t));
        if (i < BUFFERS - 1)
            memset(t.data, 0xff, (size_t)ith_tensor_bytes(t));
    }
    l->notes++;
    l->few += l->run->session.ctx.few;
    return ITH_OK;
}

static ith_status late_await(ith_device *d, ith_queue queue, int mark, ith_error *err)
{
    late_device *l = late_of(d);
    (void)err;
    for (int m = 0; queue == ITH_QUEUE_UPDATES && m <= mark; m++) {
        l->waits += l->late[m][0] != NULL;
        for (int i = 0; i < BUFFERS; i++) {
            ith_tensor t = behind(l, m, i);
            if (!l->late[m][i])
                continue;
            if (i < BUFFERS - 1)
                memcpy(t.data, l->late[m][i], (size_t)ith_tensor_bytes(t));
            else if (memcmp(t.data, l->late[m][i], (size_t)ith_tensor_bytes(t)) != 0)
                fail_msg("gradients behind mark %d changed before the update was awaited", m);
            ith_free(l->late[m][i]);
            l->late[m][i] = NULL;
        }
    }
    return ITH_OK;
}

static ith_status late_copy_beside(ith_device *d, void *dst, const void *src, int64_t bytes,
                                   bool to_host, ith_error *err)
{
    (void)to_host;
    return d->copy(d, dst, src, bytes, err);
}

static void late_enter(ith_device *d, ith_queue queue)
{
    assert_true(queue == ITH_QUEUE_UPDATES && !late_of(d)->inside);
    late_of(d)->inside = true;
}

static void late_leave(ith_device *d)
{
    assert_true(late_of(d)->inside);
    late_of(d)->inside = false;
}

static void late_init(late_device *l)
{
    memset(l, 0, sizeof *l);
    l->device = *ith_device_cpu();
    l->device.fork = late_fork;
    l->device.note = late_note;
    l->device.await = late_await;
    l->device.copy_beside = late_copy_beside;
    l->device.enter = late_enter;
    l->device.leave = late_leave;
}

/* ---- products that leave room ---- */

static const ith_backend *plain_backend;
static int64_t products, products_shared;

static ith_status count_product(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                bool accumulate)
{
    products++;
    products_shared += ctx->shared;
    return plain_backend->linear_forward.run(ctx, y, x, w, accumulate);
}

/* ---- runs ---- */

enum { STEPS = 5, SKIPPED = 2, EMPTY = 3 };
static const int64_t lengths[] = {9, 1, 30, 4};

typedef struct {
    ith_dtype dtype;
    int keep;
    bool accumulates, bf16_states;
} how;

typedef struct {
    double loss[STEPS], norm[STEPS], eval[STEPS];
    float *state[4]; /* weights but those in f32 beside others, master or NULL, m, v */
    int64_t n[4];
} outcome;

static void outcome_free(outcome *o)
{
    for (int i = 0; i < 4; i++)
        ith_free(o->state[i]);
}

/* One step; its third has a weight that is no number, its fourth no token. */
static void one_step(small_run *r, how h, int step, int64_t updates, outcome *o)
{
    ith_step_stats stats;
    int64_t n = h.accumulates ? 2 : 4;
    double sum = 0;
    ith_micro_batch b[2];
    for (int i = 0; i * n < 4; i++) {
        b[i] = small_batch(lengths + i * n, n, 4 * step + i * n, 211, true, false);
        sum += b[i].weight_sum;
    }
    ith_step_begin(r->step, sum);
    for (int i = 0; i * n < 4; i++) {
        if (step == SKIPPED)
            b[i].weights[2] = NAN;
        if (step != EMPTY)
            assert_ok(ith_step_micro(r->step, &b[i]), r->err);
        small_batch_free(&b[i]);
    }
    ith_adamw_hyper hyper = {1e-2f, 0.9f, 0.99f, 1e-8f, 0.01f, updates};
    assert_ok(ith_step_end(r->step, hyper, &stats), r->err);
    assert_true(stats.skipped == (step == SKIPPED));
    o->loss[step] = stats.loss;
    o->norm[step] = stats.grad_norm;
}

static outcome run(const small_shape *shape, how h, late_device *late)
{
    outcome o = {0};
    ith_micro_batch whole = small_batch(lengths, 4, 0, 211, true, false);
    ith_step_config c = small_limits(&whole);
    c.max_grad_norm = 0.5f;
    c.keep = h.keep;
    c.fp32_master = !h.bf16_states;
    c.bf16_moments = h.bf16_states;
    small_run r;
    if (late)
        late_init(late);
    small_open_on(&r, shape, h.dtype, 2, &c, late ? &late->device : NULL);
    if (late) {
        late->run = &r;
        assert_non_null(r.step->blocks);
    }
    for (int step = 0; step < STEPS; step++) {
        one_step(&r, h, step, step < SKIPPED ? step + 1 : step, &o);
        if (step == 0 || step == STEPS - 2)
            assert_ok(ith_step_eval(r.step, &whole, &o.eval[step]), r.err);
    }
    assert_ok(ith_step_settle(r.step), r.err);
    const ith_tensor state[4] = {r.model->w, r.step->master, r.step->m, r.step->v};
    for (int i = 0; i < 4; i++) {
        o.state[i] = state[i].ndim ? small_floats(&r, state[i]) : NULL;
        o.n[i] = state[i].ndim ? ith_numel(state[i]) : 0;
    }
    small_batch_free(&whole);
    small_close(&r);
    return o;
}

static void assert_equal(const outcome *a, const outcome *b, const char *what)
{
    static const char *const names[] = {"weights", "master", "m", "v"};
    for (int i = 0; i < STEPS; i++) {
        bool nan = i == SKIPPED;
        if ((!nan && memcmp(&a->loss[i], &b->loss[i], 8) != 0) ||
            (!nan && memcmp(&a->norm[i], &b->norm[i], 8) != 0) ||
            memcmp(&a->eval[i], &b->eval[i], 8) != 0)
            fail_msg("%s, step %d: loss %.17g and %.17g, norm %.9g and %.9g, eval %.17g and %.17g",
                     what, i + 1, a->loss[i], b->loss[i], a->norm[i], b->norm[i], a->eval[i],
                     b->eval[i]);
    }
    for (int k = 0; k < 4; k++)
        for (int64_t i = 0; i < a->n[k]; i++)
            if (memcmp(&a->state[k][i], &b->state[k][i], 4) != 0 || !isfinite(a->state[k][i]))
                fail_msg("%s: %s, element %lld is %.9g and %.9g", what, names[k], (long long)i,
                         (double)a->state[k][i], (double)b->state[k][i]);
}

static void test_update_beside_is_bit_equal(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        const small_shape *shape;
        how h;
    } cases[] = {
        {"dense, bf16", &small_dense, {ITH_BF16, ITH_KEEP_ALL, false, false}},
        {"dense, f32, two micro-batches", &small_dense, {ITH_F32, ITH_KEEP_ALL, true, false}},
        {"tied, bf16 states", &small_tied, {ITH_BF16, ITH_KEEP_ATTENTION, false, true}},
        {"tied, two micro-batches", &small_tied, {ITH_BF16, ITH_KEEP_INPUT, true, false}},
        {"states, f32", &small_linear, {ITH_F32, ITH_KEEP_ALL, false, false}},
        {"states, bf16", &small_linear, {ITH_BF16, ITH_KEEP_ALL, true, false}},
        {"experts, inputs on the host", &small_moe, {ITH_BF16, ITH_KEEP_HOST, true, false}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        late_device late;
        outcome plain = run(cases[i].shape, cases[i].h, NULL),
                beside = run(cases[i].shape, cases[i].h, &late);
        assert_equal(&beside, &plain, cases[i].name);
        int64_t expected = STEPS * cases[i].shape->layers; /* layers but the first, and the rest */
        if (late.notes != expected || late.waits != expected)
            fail_msg("%s: %lld updates beside, %lld awaited, expected %lld", cases[i].name,
                     (long long)late.notes, (long long)late.waits, (long long)expected);
        outcome_free(&plain);
        outcome_free(&beside);
    }
}

/* Asked not to, or where ranks cut what is updated, nothing runs beside. */
static void test_update_first_has_no_marks(void **state)
{
    (void)state;
    ith_micro_batch whole = small_batch(lengths, 4, 0, 211, true, false);
    ith_step_config c = small_limits(&whole);
    c.updates_first = true;
    late_device late;
    late_init(&late);
    late.device.update_tokens = 1;
    small_run r;
    outcome o = {0};
    small_open_on(&r, &small_dense, ITH_BF16, 1, &c, &late.device);
    late.run = &r;
    one_step(&r, (how){ITH_BF16, ITH_KEEP_ALL, false, false}, 0, 1, &o);
    assert_null(r.step->blocks);
    assert_int_equal(late.notes, 0);
    small_close(&r);
    small_batch_free(&whole);
}

/* In the first micro-batch of a step the products of as many layers leave room as few processors
 * update meanwhile: 44 tokens at most, so 2 of 3 layers for 20, all for 44, and none for more, when
 * the update takes all processors. */
static void test_update_beside_products_leave_room(void **state)
{
    (void)state;
    static const struct {
        int64_t update_tokens, layers;
    } cases[] = {{0, 0}, {20, 2}, {44, 3}, {45, 0}};
    ith_micro_batch whole = small_batch(lengths, 4, 0, 211, true, false);
    assert_int_equal(whole.num_tokens, 44);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ith_step_config c = small_limits(&whole);
        late_device late;
        small_run r;
        outcome o = {0};
        late_init(&late);
        late.device.update_tokens = cases[i].update_tokens;
        small_open_on(&r, &small_dense, ITH_BF16, 1, &c, &late.device);
        late.run = &r;
        plain_backend = r.session.ctx.backend;
        ith_backend counting = *plain_backend;
        counting.linear_forward.run = count_product;
        r.session.ctx.backend = &counting;
        products = products_shared = 0;
        one_step(&r, (how){ITH_BF16, ITH_KEEP_ALL, true, false}, 0, 1, &o);
        assert_false(r.session.ctx.shared);
        /* qkv, o, gate_up and down of a layer; the head; in both micro-batches */
        assert_int_equal(products, 2 * (4 * 3 + 1));
        if (products_shared != 4 * cases[i].layers)
            fail_msg("%lld products leave room when an update takes the time of %lld tokens, "
                     "expected %lld",
                     (long long)products_shared, (long long)cases[i].update_tokens,
                     (long long)(4 * cases[i].layers));
        if (late.few != (cases[i].layers ? late.notes : 0))
            fail_msg("%lld of %lld updates on few processors", (long long)late.few,
                     (long long)late.notes);
        assert_ok(ith_step_settle(r.step), r.err);
        small_close(&r);
    }
    small_batch_free(&whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_update_beside_is_bit_equal),
        cmocka_unit_test(test_update_first_has_no_marks),
        cmocka_unit_test(test_update_beside_products_leave_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
