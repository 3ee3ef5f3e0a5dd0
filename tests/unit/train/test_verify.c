/* test_verify.c - the checks of `verify: true` see what they are there for.
 * Method: a sound step passes; then one gradient, one weight is changed behind their back. */
#include "e2e/small_model.h"

#include <math.h>

#include "train/verify.h"

static char news[4096];

static void on_text(void *arg, const char *text)
{
    (void)arg;
    size_t len = strlen(news);
    snprintf(news + len, sizeof news - len, "%s\n", text);
}

static const ith_trainer_hooks hooks = {.text = on_text};

/* The parts of a trainer that the checks look at. */
static ith_trainer trainer_of(small_run *r)
{
    ith_trainer t = {.session = r->session, .model = r->model, .step = r->step};
    return t;
}

static void poke(small_run *r, ith_tensor flat, int64_t element, float value)
{
    ith_device *d = r->session.ctx.device;
    char bytes[8];
    int64_t size = ith_dtype_bytes(flat.dtype);
    ith_convert(bytes, flat.dtype, &value, ITH_F32, 1);
    assert_ok(d->upload(d, (char *)flat.data + element * size, bytes, size, &r->err), r->err);
    assert_ok(d->sync(d, &r->err), r->err);
}

static void assert_news(const char *part)
{
    if (!strstr(news, part))
        fail_msg("'%s' is not told: '%s'", part, news);
}

static void test_verify_of_a_step(void **state)
{
    (void)state;
    static const int64_t lengths[] = {30, 40};
    static const ith_dtype types[] = {ITH_F32, ITH_BF16};
    for (int d = 0; d < 2; d++) {
        ith_micro_batch b = small_batch(lengths, 2, 0, 211, true, false);
        ith_step_config c = small_limits(&b);
        ith_adamw_hyper h = {1e-3f, 0.9f, 0.99f, 1e-8f, 0.0f, 1};
        ith_step_stats stats;
        small_run r;
        small_open(&r, &small_dense, types[d], 2, &c);
        ith_trainer t = trainer_of(&r);
        ith_verifier v;
        assert_ok(ith_verifier_open(&v, &t, &hooks, &r.err), r.err);
        const ith_param *o = ith_layer_param(r.model, 1, ITH_P_O);
        news[0] = '\0';
        assert_ok(ith_verify_begin(&v, &r.err), r.err);
        ith_step_begin(r.step, b.weight_sum);
        assert_ok(ith_step_micro(r.step, &b), r.err);
        assert_ok(ith_verify_backward(&v, &r.err), r.err);
        assert_string_equal(news, "");
        assert_ok(ith_verify_reduce(&v, true, &r.err), r.err);
        assert_news("all 36 tensors got a gradient");
        /* a tensor without a gradient, and one that is not a number */
        news[0] = '\0';
        for (int64_t i = 0; i < o->shape[0] * o->shape[1]; i++)
            poke(&r, r.model->grad, o->first + i, 0.0f);
        poke(&r, r.model->grad, r.model->params[r.model->final_norm].first + 2, INFINITY);
        assert_ok(ith_verify_backward(&v, &r.err), r.err);
        assert_news("verify: backward: gradient of model.norm.weight: element 2 is inf");
        assert_ok(ith_verify_reduce(&v, true, &r.err), r.err);
        assert_news("1 tensors got no gradient in the first step: model.layers.1.self_attn.o_proj");
        assert_news("verify: reduce: gradient of model.norm.weight: element 2 is inf");
        assert_ok(ith_step_end(r.step, h, &stats), r.err);
        assert_true(stats.skipped);
        assert_ok(ith_verify_update(&v, &r.err), r.err);
        /* the check spoils the gradients, and the next step writes every one anew */
        float *grad = small_floats(&r, r.model->grad);
        assert_true(isnan(grad[o->first + 7]));
        ith_free(grad);
        news[0] = '\0';
        ith_step_begin(r.step, b.weight_sum);
        assert_ok(ith_step_micro(r.step, &b), r.err);
        assert_ok(ith_step_reduce(r.step), r.err);
        assert_ok(ith_verify_reduce(&v, true, &r.err), r.err);
        assert_string_equal(news, "verify: all 36 tensors got a gradient in the first step\n");
        if (types[d] == ITH_BF16) {
            poke(&r, r.step->master, o->first + 9, 3.0f);
            assert_fails(ith_verify_update(&v, &r.err), r.err, ITH_ERR_RUN,
                         "verify: update: model.layers.1.self_attn.o_proj.weight: element 9");
        }
        /* what changes between two steps */
        poke(&r, r.step->m, o->first + 3, 5.0f);
        assert_fails(ith_verify_begin(&v, &r.err), r.err, ITH_ERR_RUN,
                     "verify: begin: model.layers.1.self_attn.o_proj.weight: ");
        ith_verifier_close(&v);
        small_close(&r);
        small_batch_free(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_verify_of_a_step)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
