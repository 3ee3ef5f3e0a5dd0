/* test_step.c - one optimizer step gives the same numbers however it is cut, laid out or
 * recomputed.
 * Method: the same documents go through two layouts; loss, every gradient and the updated weights
 * are compared, bit for bit where the order of sums is the same, else within 1e-5 relative norm of
 * each parameter in float32. */
#include "e2e/small_model.h"

#include <math.h>

#include "kernels/cpu/cpu_internal.h"

static const int64_t lengths[] = {5, 1, 17, 3, 30, 2, 64, 9};
#define DOCS ((int64_t)(sizeof lengths / sizeof *lengths))

/* What a step leaves behind: loss, gradients before the update, weights after it. */
typedef struct {
    double loss, norm;
    float *grad, *w, *row_loss;
    int64_t num, bytes, inputs; /* bytes planned; layers that keep their input on the device */
} outcome;

static void outcome_free(outcome *o)
{
    ith_free(o->grad);
    ith_free(o->w);
    ith_free(o->row_loss);
}

/* How a step is run. */
typedef struct {
    ith_dtype dtype;
    int threads, keep;
    int64_t chunk, mlp_tile, per_micro; /* per_micro: documents of a micro-batch; 0: all */
    bool weighted, unfilled;            /* unfilled: limits larger than the batch */
    ith_device *device;                 /* see small_open_on */
    int64_t limit;                      /* of its memory, with keep -1 */
} how;

static const ith_adamw_hyper hyper = {1e-2f, 0.9f, 0.99f, 1e-8f, 0.01f, 1};

static outcome run_step(const small_shape *shape, how h)
{
    int64_t per = h.per_micro ? h.per_micro : DOCS;
    ith_micro_batch whole = small_batch(lengths, DOCS, 0, shape->vocab, false, h.weighted);
    ith_step_config c = small_limits(&whole);
    c.keep = h.keep;
    c.chunk_rows = h.chunk;
    c.max_grad_norm = 0.5f;
    c.memory_limit = h.limit;
    if (h.unfilled) {
        c.max_tokens += 77;
        c.max_docs += 3;
        c.max_labels += 11;
    }
    small_run r;
    small_open_on(&r, shape, h.dtype, h.threads, &c, h.device);
    if (h.mlp_tile)
        r.model->mlp_tile = h.mlp_tile;
    for (int64_t i = 0; i < r.model->num_params; i++) /* a step begins with whatever was there */
        memset(r.model->params[i].grad.data, 0xff,
               (size_t)ith_tensor_bytes(r.model->params[i].grad));
    ith_step_begin(r.step, whole.weight_sum);
    for (int64_t i = 0; i < DOCS; i += per) {
        int64_t n = i + per > DOCS ? DOCS - i : per;
        ith_micro_batch b = small_batch(lengths + i, n, i, shape->vocab, false, h.weighted);
        assert_ok(ith_step_micro(r.step, &b), r.err);
        small_batch_free(&b);
    }
    assert_ok(ith_step_reduce(r.step), r.err);
    outcome o = {.loss = small_loss(&r), .num = r.model->num_elements};
    o.grad = small_floats(&r, r.model->grad);
    o.row_loss = small_floats(&r, r.step->row_loss);
    ith_step_stats stats;
    assert_ok(ith_step_end(r.step, hyper, &stats), r.err);
    assert_false(stats.skipped);
    o.norm = stats.grad_norm;
    o.w = small_floats(&r, r.step->master.ndim ? r.step->master : r.model->w);
    o.bytes = ith_plan_total(r.session.ctx.plan);
    o.inputs = r.step->layers_keep_input;
    small_batch_free(&whole);
    small_close(&r);
    return o;
}

static void assert_near(double a, double b, double bound, const char *what)
{
    double error = fabs(a - b) / fmax(fabs(b), 1e-30);
    if (!(error <= bound))
        fail_msg("%s: %.9g and %.9g differ by %.3g, bound %.3g", what, a, b, error, bound);
}

static void assert_bits(const float *a, const float *b, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], 4) != 0)
            fail_msg("%s: element %lld is %.9g and %.9g", what, (long long)i, (double)a[i],
                     (double)b[i]);
}

static void assert_same_bits(const outcome *a, const outcome *b, const char *what)
{
    if (memcmp(&a->loss, &b->loss, 8) != 0)
        fail_msg("%s: losses %.17g and %.17g", what, a->loss, b->loss);
    assert_bits(a->grad, b->grad, a->num, what);
    assert_bits(a->w, b->w, a->num, what);
}

/* Loss, norm, and each parameter's gradient within `bound`. */
static void assert_close(const small_shape *shape, const outcome *a, const outcome *b, double bound,
                         const char *what)
{
    assert_near(a->loss, b->loss, bound, what);
    assert_near(a->norm, b->norm, bound, what);
    ith_error err = {0};
    ith_hf_config config;
    ith_model *m = NULL;
    ith_buf text = {0};
    small_config_text(shape, &text);
    assert_ok(ith_hf_config_parse(&config, text.data, text.len, "config.json", &err), err);
    assert_ok(ith_model_create(&m, &config, ITH_F32, 64, &err), err);
    for (int64_t i = 0; i < m->num_params; i++) {
        const ith_param *p = &m->params[i];
        double diff = 0, norm = 0;
        for (int64_t k = p->first; k < p->first + p->shape[0] * p->shape[1] * p->shape[2]; k++) {
            double d = (double)a->grad[k] - (double)b->grad[k];
            diff += d * d;
            norm += (double)b->grad[k] * (double)b->grad[k];
        }
        double error = sqrt(diff) / fmax(sqrt(norm), 1e-30);
        if (!(norm > 0) || !(error <= bound))
            fail_msg("%s: gradient of %s: relative error %.3g (norm %.3g), bound %.3g", what,
                     p->name, error, sqrt(norm), bound);
    }
    ith_model_destroy(m);
    ith_hf_config_deinit(&config);
    ith_buf_deinit(&text);
}

static const struct {
    const char *name;
    const small_shape *shape;
} shapes[] = {{"dense", &small_dense},
              {"tied", &small_tied},
              {"experts, normalized", &small_moe},
              {"experts, not normalized, tied", &small_moe_raw}};
#define NUM_SHAPES ((int)(sizeof shapes / sizeof *shapes))

/* All documents in one packed micro-batch = one micro-batch for each = two or three in each. */
static void test_step_packed_equals_separate(void **state)
{
    (void)state;
    for (int s = 0; s < NUM_SHAPES; s++)
        for (int weighted = 0; weighted < 2; weighted++) {
            how h = {.dtype = ITH_F32, .threads = 2, .weighted = weighted};
            outcome packed = run_step(shapes[s].shape, h);
            for (int64_t per = 1; per <= 3; per++) {
                h.per_micro = per;
                outcome cut = run_step(shapes[s].shape, h);
                assert_close(shapes[s].shape, &cut, &packed, 1e-5, shapes[s].name);
                outcome_free(&cut);
            }
            outcome_free(&packed);
        }
}

/* In bf16 each product rounds its output once whatever the layout: the losses stay within a few
 * bf16 roundings (2^-8) averaged over the rows; gradients are sums in f32 of rounded terms. */
static void test_step_packed_equals_separate_bf16(void **state)
{
    (void)state;
    for (int s = 0; s < 2; s++) { /* experts: a rounding may choose another expert */
        how h = {.dtype = ITH_BF16, .threads = 2};
        outcome packed = run_step(shapes[s].shape, h);
        h.per_micro = 1;
        outcome cut = run_step(shapes[s].shape, h);
        assert_close(shapes[s].shape, &cut, &packed, 2e-2, shapes[s].name);
        outcome_free(&cut);
        outcome_free(&packed);
    }
}

static void test_step_any_chunk_size_is_the_same(void **state)
{
    (void)state;
    static const int64_t chunks[] = {1, 7, 64, 1000000000};
    for (int s = 0; s < NUM_SHAPES; s++) {
        how h = {.dtype = ITH_F32, .threads = 2, .weighted = true};
        outcome chosen = run_step(shapes[s].shape, h);
        for (int k = 0; k < 4; k++) {
            h.chunk = chunks[k];
            outcome o = run_step(shapes[s].shape, h);
            assert_close(shapes[s].shape, &o, &chosen, 1e-6, shapes[s].name);
            outcome_free(&o);
        }
        outcome_free(&chosen);
    }
}

/* The value of the weighted step is computed by hand from the losses of its rows: sum of w_i l_i
 * over sum of w_i. Two halves, one of weight 0.25 and one of 2, so ignored weights show. */
static void test_step_weights_weigh(void **state)
{
    (void)state;
    how h = {.dtype = ITH_F32, .threads = 2, .weighted = true};
    outcome o = run_step(&small_dense, h), plain;
    ith_micro_batch b = small_batch(lengths, DOCS, 0, small_dense.vocab, false, true);
    double sum = 0, unweighted = 0;
    int64_t row = 0;
    for (int64_t t = 0; t < b.num_tokens; t++)
        if (b.labels[t] >= 0) {
            unweighted += (double)o.row_loss[row];
            sum += (double)b.weights[t] * (double)o.row_loss[row++];
        }
    assert_near(o.loss, sum / b.weight_sum, 1e-6, "weighted loss");
    h.weighted = false;
    plain = run_step(&small_dense, h);
    assert_near(plain.loss, unweighted / (double)row, 1e-6, "plain loss");
    if (fabs(plain.loss - o.loss) < 1e-3)
        fail_msg("weights change nothing: %.9g and %.9g", plain.loss, o.loss);
    small_batch_free(&b);
    outcome_free(&o);
    outcome_free(&plain);
}

static void test_step_recompute_is_bit_equal(void **state)
{
    (void)state;
    static const ith_dtype types[] = {ITH_F32, ITH_BF16};
    for (int s = 0; s < NUM_SHAPES; s++)
        for (int d = 0; d < 2; d++) {
            how h = {.dtype = types[d], .threads = 2, .keep = ITH_KEEP_ALL};
            outcome all = run_step(shapes[s].shape, h);
            for (int keep = ITH_KEEP_ATTENTION; keep <= ITH_KEEP_HOST; keep++) {
                h.keep = keep;
                outcome o = run_step(shapes[s].shape, h);
                assert_same_bits(&o, &all, shapes[s].name);
                outcome_free(&o);
            }
            outcome_free(&all);
        }
}

/* Inputs of layers on the device, on the host, and by the plan some here and some there. */
static void test_step_inputs_on_the_host_are_bit_equal(void **state)
{
    (void)state;
    ith_device device = *ith_device_cpu();
    small_shape deep = small_dense;
    deep.layers = 6;
    how h = {.dtype = ITH_BF16, .threads = 2, .keep = ITH_KEEP_INPUT, .device = &device};
    outcome here = run_step(&deep, h), there, both;
    h.keep = ITH_KEEP_HOST;
    there = run_step(&deep, h);
    assert_same_bits(&there, &here, "on the host");
    assert_true(there.bytes < here.bytes);
    h.keep = -1;
    h.limit = (here.bytes + there.bytes) / 2;
    both = run_step(&deep, h);
    assert_same_bits(&both, &here, "here and there");
    if (both.inputs <= 0 || both.inputs >= deep.layers || both.bytes > h.limit)
        fail_msg("%lld of %lld layers here, %lld bytes of %lld", (long long)both.inputs,
                 (long long)deep.layers, (long long)both.bytes, (long long)h.limit);
    outcome_free(&here);
    outcome_free(&there);
    outcome_free(&both);
}

/* Unused room in the planned buffers changes nothing. */
static void test_step_larger_limits_are_bit_equal(void **state)
{
    (void)state;
    how h = {.dtype = ITH_BF16, .threads = 2};
    outcome tight = run_step(&small_moe, h);
    h.unfilled = true;
    outcome loose = run_step(&small_moe, h);
    assert_same_bits(&loose, &tight, "larger limits");
    outcome_free(&tight);
    outcome_free(&loose);
}

static void test_step_threads_are_bit_equal(void **state)
{
    (void)state;
    static const char *const levels[] = {"generic", "avx2", "avx512", "avx512bf16", "amx"};
    static const ith_dtype types[] = {ITH_F32, ITH_BF16};
    for (int l = 0; l < 5; l++) {
        if (!ith_cpu_level_set(levels[l])) {
            print_message("level %s is not on this machine\n", levels[l]);
            continue;
        }
        for (int s = 0; s < NUM_SHAPES; s++)
            for (int d = 0; d < 2; d++) {
                how h = {.dtype = types[d], .threads = 1};
                outcome one = run_step(shapes[s].shape, h);
                for (int threads = 2; threads <= 3; threads++) {
                    h.threads = threads;
                    outcome more = run_step(shapes[s].shape, h);
                    assert_same_bits(&more, &one, levels[l]);
                    outcome_free(&more);
                }
                outcome_free(&one);
            }
    }
    ith_cpu_level_set(NULL);
}

/* Tiles of the MLP change which rows one product call sees and the order in which the gradient of
 * its weights is summed: rounding of f32 sums, 1e-5. */
static void test_step_mlp_tiles_agree(void **state)
{
    (void)state;
    static const int64_t tiles[] = {1, 16, 50, 130};
    how h = {.dtype = ITH_F32, .threads = 2};
    outcome whole = run_step(&small_dense, h);
    for (int k = 0; k < 4; k++)
        for (int keep = ITH_KEEP_ALL; keep <= ITH_KEEP_INPUT; keep++) {
            h.mlp_tile = tiles[k];
            h.keep = keep;
            outcome o = run_step(&small_dense, h);
            assert_close(&small_dense, &o, &whole, 1e-5, "mlp tile");
            outcome_free(&o);
        }
    outcome_free(&whole);
}

/* A document's losses do not depend on what it is packed with, nor on its place. */
static void test_step_documents_do_not_see_each_other(void **state)
{
    (void)state;
    static const int64_t left[] = {13, 21}, right[] = {40, 21};
    float *loss[2];
    int64_t begin[2], num = 0;
    for (int k = 0; k < 2; k++) {
        const int64_t *len = k ? right : left;
        ith_micro_batch a = small_batch(len, 1, k ? 50 : 30, small_dense.vocab, true, false),
                        b = small_batch(len + 1, 1, 77, small_dense.vocab, true, false),
                        both = small_batch(len, 2, 0, small_dense.vocab, true, false);
        memcpy(both.ids, a.ids, (size_t)a.num_tokens * 4);
        memcpy(both.labels, a.labels, (size_t)a.num_tokens * 4);
        memcpy(both.ids + a.num_tokens, b.ids, (size_t)b.num_tokens * 4);
        memcpy(both.labels + a.num_tokens, b.labels, (size_t)b.num_tokens * 4);
        ith_step_config c = small_limits(&both);
        small_run r;
        small_open(&r, &small_dense, ITH_F32, 2, &c);
        ith_step_begin(r.step, both.weight_sum);
        assert_ok(ith_step_micro(r.step, &both), r.err);
        loss[k] = small_floats(&r, r.step->row_loss);
        begin[k] = a.num_labels;
        num = b.num_labels;
        small_close(&r);
        small_batch_free(&a);
        small_batch_free(&b);
        small_batch_free(&both);
    }
    assert_int_equal(num, 20);
    for (int64_t i = 0; i < num; i++)
        assert_near((double)loss[1][begin[1] + i], (double)loss[0][begin[0] + i], 1e-5,
                    "loss of the shared document");
    ith_free(loss[0]);
    ith_free(loss[1]);
}

/* Planned bytes are the high-water mark of a full batch, for every class; and no allocation happens
 * between the first micro-batch and the end of the step. */
static void test_step_memory_is_planned_exactly(void **state)
{
    (void)state;
    for (int s = 0; s < NUM_SHAPES; s++)
        for (int keep = ITH_KEEP_ALL; keep <= ITH_KEEP_INPUT; keep++) {
            ith_micro_batch b = small_batch(lengths, DOCS, 0, 211, true, false);
            ith_step_config c = small_limits(&b);
            c.keep = keep;
            c.chunk_rows = 16;
            small_run r;
            small_open(&r, shapes[s].shape, ITH_BF16, 2, &c);
            int64_t before = ith_alloc_count();
            ith_adamw_hyper h = hyper;
            for (h.step = 1; h.step <= 3; h.step++) {
                ith_step_stats stats;
                ith_step_begin(r.step, b.weight_sum);
                assert_ok(ith_step_micro(r.step, &b), r.err);
                assert_ok(ith_step_end(r.step, h, &stats), r.err);
                double loss = 0;
                assert_ok(ith_step_eval(r.step, &b, &loss), r.err);
            }
            assert_int_equal(ith_alloc_count(), before);
            for (int k = 0; k < ITH_MEM_CLASSES; k++) {
                int64_t planned = ith_plan_peak(r.session.ctx.plan, (ith_mem_class)k),
                        high = ith_plan_high(r.session.ctx.plan, (ith_mem_class)k);
                if (planned != high)
                    fail_msg("%s, keep %d: %s: planned %lld, used %lld", shapes[s].name, keep,
                             ith_mem_class_name((ith_mem_class)k), (long long)planned,
                             (long long)high);
            }
            small_close(&r);
            small_batch_free(&b);
        }
}

/* The loss of an evaluation is that of training before its update, and leaves the next step alone:
 * with and without evaluations the weights are the same bits. */
static void test_step_eval_changes_nothing(void **state)
{
    (void)state;
    ith_micro_batch b = small_batch(lengths, DOCS, 0, 211, false, true);
    ith_step_config c = small_limits(&b);
    float *w[2];
    double losses[2][3], eval = 0;
    int64_t n = 0;
    for (int with = 0; with < 2; with++) {
        small_run r;
        small_open(&r, &small_dense, ITH_F32, 2, &c);
        ith_adamw_hyper h = hyper;
        for (h.step = 1; h.step <= 3; h.step++) {
            ith_step_stats stats;
            if (with) {
                eval = 0;
                assert_ok(ith_step_eval(r.step, &b, &eval), r.err);
            }
            ith_step_begin(r.step, b.weight_sum);
            assert_ok(ith_step_micro(r.step, &b), r.err);
            assert_ok(ith_step_end(r.step, h, &stats), r.err);
            losses[with][h.step - 1] = stats.loss;
            if (with)
                assert_near(eval / b.weight_sum, stats.loss, 1e-6, "evaluation");
        }
        w[with] = small_floats(&r, r.model->w);
        n = r.model->num_elements;
        small_close(&r);
    }
    for (int i = 0; i < 3; i++)
        assert_true(losses[0][i] == losses[1][i]);
    assert_bits(w[0], w[1], n, "weights with and without evaluation");
    ith_free(w[0]);
    ith_free(w[1]);
    small_batch_free(&b);
}

/* No labelled row: loss 0, gradient 0, no NaN; an empty micro-batch is nothing at all. */
static void test_step_without_labels_is_zero(void **state)
{
    (void)state;
    for (int s = 0; s < NUM_SHAPES; s++) {
        ith_micro_batch b = small_batch(lengths, DOCS, 0, 211, true, false), none = {0};
        ith_step_config c = small_limits(&b);
        for (int64_t t = 0; t < b.num_tokens; t++) {
            b.labels[t] = -100;
            b.weights[t] = 0;
        }
        small_run r;
        small_open(&r, shapes[s].shape, ITH_F32, 2, &c);
        ith_step_begin(r.step, 0);
        assert_ok(ith_step_micro(r.step, &b), r.err);
        assert_ok(ith_step_micro(r.step, &none), r.err);
        float *grad = small_floats(&r, r.model->grad);
        for (int64_t i = 0; i < r.model->num_elements; i++)
            if (grad[i] != 0)
                fail_msg("gradient %lld is %g, expected 0", (long long)i, (double)grad[i]);
        ith_step_stats stats;
        assert_ok(ith_step_end(r.step, hyper, &stats), r.err);
        assert_true(stats.loss == 0 && stats.grad_norm == 0 && !stats.skipped);
        ith_free(grad);
        small_close(&r);
        small_batch_free(&b);
    }
}

/* A weight that is not a number: the step is skipped, weights and moments stay as they are, and a
 * sound step afterwards goes on from bad gradients. */
static void test_step_skips_what_is_not_finite(void **state)
{
    (void)state;
    static const ith_dtype types[] = {ITH_F32, ITH_BF16};
    for (int d = 0; d < 2; d++) {
        ith_micro_batch b = small_batch(lengths, DOCS, 0, 211, true, false);
        ith_step_config c = small_limits(&b);
        c.max_grad_norm = 1.0f;
        small_run r;
        small_open(&r, &small_dense, types[d], 2, &c);
        ith_device *dev = r.session.ctx.device;
        int64_t size = ith_dtype_bytes(types[d]), n = r.model->num_elements;
        const ith_param *p = ith_layer_param(r.model, 1, ITH_P_DOWN);
        char *at = (char *)p->w.data + 5 * size, sound[4], poison[4] = {0};
        float nan = NAN;
        ith_convert(poison, types[d], &nan, ITH_F32, 1);
        assert_ok(dev->download(dev, sound, at, size, &r.err), r.err);
        assert_ok(dev->upload(dev, at, poison, size, &r.err), r.err);
        float *w0 = small_floats(&r, r.model->w), *m0 = small_floats(&r, r.step->m);
        ith_step_stats stats;
        ith_step_begin(r.step, b.weight_sum);
        assert_ok(ith_step_micro(r.step, &b), r.err);
        assert_ok(ith_step_end(r.step, hyper, &stats), r.err);
        assert_true(stats.skipped);
        float *w1 = small_floats(&r, r.model->w), *m1 = small_floats(&r, r.step->m);
        assert_bits(w0, w1, n, "weights of a skipped step");
        assert_bits(m0, m1, n, "moments of a skipped step");
        assert_ok(dev->upload(dev, at, sound, size, &r.err), r.err);
        ith_step_begin(r.step, b.weight_sum);
        assert_ok(ith_step_micro(r.step, &b), r.err);
        assert_ok(ith_step_end(r.step, hyper, &stats), r.err);
        assert_true(!stats.skipped && isfinite(stats.loss) && stats.grad_norm > 0);
        float *all[] = {w0, w1, m0, m1};
        for (int i = 0; i < 4; i++)
            ith_free(all[i]);
        small_close(&r);
        small_batch_free(&b);
    }
}

/* bf16 weights with an f32 master move by less than a bf16 step at a time, and do arrive. */
static void test_step_master_keeps_small_updates(void **state)
{
    (void)state;
    ith_micro_batch b = small_batch(lengths, DOCS, 0, 211, true, false);
    ith_step_config c = small_limits(&b);
    small_run r;
    small_open(&r, &small_dense, ITH_BF16, 2, &c);
    const ith_param *norm = &r.model->params[r.model->final_norm];
    float *w0 = small_floats(&r, norm->w);
    ith_adamw_hyper h = {2e-4f, 0.9f, 0.99f, 1e-8f, 0.0f, 1};
    for (h.step = 1; h.step <= 60; h.step++) {
        ith_step_stats stats;
        ith_step_begin(r.step, b.weight_sum);
        assert_ok(ith_step_micro(r.step, &b), r.err);
        assert_ok(ith_step_end(r.step, h, &stats), r.err);
    }
    float *w1 = small_floats(&r, norm->w);
    int moved = 0;
    for (int64_t i = 0; i < norm->shape[0]; i++)
        moved += w0[i] != w1[i];
    if (moved < norm->shape[0] / 2)
        fail_msg("%d of %lld norm weights moved in 60 steps", moved, (long long)norm->shape[0]);
    ith_free(w0);
    ith_free(w1);
    small_close(&r);
    small_batch_free(&b);
}

/* The plan keeps as much as the limit allows: less memory, fewer layers kept, the same numbers. */
static void test_step_limit_chooses_what_is_kept(void **state)
{
    (void)state;
    ith_micro_batch b = small_batch(lengths, DOCS, 0, 211, true, false);
    ith_step_config c = small_limits(&b);
    int64_t bytes[3];
    for (int keep = ITH_KEEP_ALL; keep <= ITH_KEEP_INPUT; keep++) {
        small_run r;
        c.keep = keep;
        small_open(&r, &small_dense, ITH_F32, 2, &c);
        bytes[keep] = ith_plan_total(r.session.ctx.plan);
        small_close(&r);
    }
    assert_true(bytes[ITH_KEEP_ALL] > bytes[ITH_KEEP_ATTENTION]);
    assert_true(bytes[ITH_KEEP_ATTENTION] > bytes[ITH_KEEP_INPUT]);
    c.keep = -1;
    for (int64_t limit = bytes[ITH_KEEP_INPUT]; limit <= bytes[ITH_KEEP_ALL];
         limit += (bytes[ITH_KEEP_ALL] - bytes[ITH_KEEP_INPUT]) / 5) {
        small_run r;
        c.memory_limit = limit;
        small_open(&r, &small_dense, ITH_F32, 2, &c);
        int64_t total = ith_plan_total(r.session.ctx.plan);
        if (total > limit)
            fail_msg("planned %lld, limit %lld", (long long)total, (long long)limit);
        small_close(&r);
    }
    small_batch_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_step_packed_equals_separate),
        cmocka_unit_test(test_step_packed_equals_separate_bf16),
        cmocka_unit_test(test_step_any_chunk_size_is_the_same),
        cmocka_unit_test(test_step_weights_weigh),
        cmocka_unit_test(test_step_recompute_is_bit_equal),
        cmocka_unit_test(test_step_inputs_on_the_host_are_bit_equal),
        cmocka_unit_test(test_step_larger_limits_are_bit_equal),
        cmocka_unit_test(test_step_threads_are_bit_equal),
        cmocka_unit_test(test_step_mlp_tiles_agree),
        cmocka_unit_test(test_step_documents_do_not_see_each_other),
        cmocka_unit_test(test_step_memory_is_planned_exactly),
        cmocka_unit_test(test_step_eval_changes_nothing),
        cmocka_unit_test(test_step_without_labels_is_zero),
        cmocka_unit_test(test_step_skips_what_is_not_finite),
        cmocka_unit_test(test_step_master_keeps_small_updates),
        cmocka_unit_test(test_step_limit_chooses_what_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
