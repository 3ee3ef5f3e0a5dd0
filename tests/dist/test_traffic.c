/* Goal: a step sends what docs/parallel.md says, to the byte, in that many exchanges, and nothing
 * else: no positions, no agreement, nothing per layer that is not in the table.
 * Method: models of three and of two layers make the same step; what the first sends more, over
 * all groups of ranks, is a layer's. What a micro-batch sends beside its layers is zero. */
#include "testing.h"

#include "base/rng.h"
#include "kernels/session.h"
#include "train/step.h"

static ith_comm *world;
static ith_error err;

enum {
    HIDDEN = 32,
    INTER = 64,
    Q = 8,
    KV = 2,
    DIM = 8,
    LIN_K = 4,
    LIN_V = 8,
    LIN_KD = 4,
    LIN_VD = 8
};
enum { MAX_TOKENS = 16 * 16 };

/* %s: linear or full; %d: layers */
static const char dense[] =
    "{\"model_type\": \"qwen3\", \"hidden_size\": 32, \"num_hidden_layers\": %d,"
    " \"intermediate_size\": 64, \"num_attention_heads\": 8, \"num_key_value_heads\": 2,"
    " \"head_dim\": 8, \"vocab_size\": 50, \"tie_word_embeddings\": true, \"rope_theta\": 10000.0}";
static const char linear[] =
    "{\"model_type\": \"qwen3_5_text\", \"hidden_size\": 32, \"num_hidden_layers\": %d,"
    " \"full_attention_interval\": 100, \"intermediate_size\": 64, \"num_attention_heads\": 8,"
    " \"num_key_value_heads\": 2, \"head_dim\": 8, \"linear_num_key_heads\": 4,"
    " \"linear_num_value_heads\": 8, \"linear_key_head_dim\": 4, \"linear_value_head_dim\": 8,"
    " \"linear_conv_kernel_dim\": 4, \"vocab_size\": 50, \"tie_word_embeddings\": true,"
    " \"rope_parameters\": {\"rope_theta\": 10000.0, \"partial_rotary_factor\": 0.5,"
    " \"mrope_section\": [1, 1, 0]}}";

#define KEEP_AUTO (-1) /* here: all there is to keep */

typedef struct {
    int64_t cp, ulysses;
    int zero, keep;
    ith_linear_cp linear_cp;
} layout;

typedef struct {
    int64_t bytes, exchanges;
} traffic;

/* What this rank has sent in all groups of the mesh. */
static traffic sent(const ith_mesh *m)
{
    const ith_comm *const groups[] = {m->world, m->cp};
    traffic t = {0, 0};
    for (int i = 0; i < 2; i++) {
        t.bytes += groups[i]->bytes_sent;
        t.exchanges += groups[i]->exchanges;
    }
    return t;
}

static traffic minus(traffic a, traffic b)
{
    return (traffic){a.bytes - b.bytes, a.exchanges - b.exchanges};
}

/* A micro-batch, the rest of the step, and this rank's and all elements of the last layer's block.
 */
typedef struct {
    traffic micro, rest;
    int64_t own, elements;
} step_traffic;

static ith_micro_batch one_document(int64_t n)
{
    static int32_t ids[MAX_TOKENS], positions[MAX_TOKENS], labels[MAX_TOKENS], cu[2];
    static float weights[MAX_TOKENS];
    for (int64_t i = 0; i < n; i++) {
        ids[i] = labels[i] = (int32_t)ith_rng_below(5, 1, (uint64_t)i, 50);
        positions[i] = (int32_t)i;
        weights[i] = 1;
    }
    cu[1] = (int32_t)n;
    return (ith_micro_batch){.ids = ids,
                             .position_ids = positions,
                             .labels = labels,
                             .cu_seqlens = cu,
                             .weights = weights,
                             .num_tokens = n,
                             .num_docs = 1,
                             .num_labels = n,
                             .weight_sum = (double)n};
}

static void measure(const char *config, int layers, layout l, int64_t n, step_traffic *out)
{
    char text[1024];
    ith_hf_config hf;
    ith_session session;
    ith_model *model = NULL;
    ith_step *step = NULL;
    ith_step_stats stats;
    ith_mesh mesh;
    snprintf(text, sizeof text, config, layers);
    assert_ok(ith_hf_config_parse(&hf, text, (int64_t)strlen(text), "config", &err), err);
    assert_ok(ith_mesh_open(&mesh, world, l.cp, &err), err);
    ith_mesh_set_ulysses(&mesh, l.ulysses, hf.linear_num_value_heads > 0);
    assert_ok(ith_session_open(&session, ITH_USE_CPU, 0, 1, false, &err), err);
    session.ctx.err = &err;
    assert_ok(ith_model_create(&model, &hf, ITH_F32, n, &err), err);
    ith_step_config c = {.mesh = &mesh,
                         .zero_stage = l.zero,
                         .max_tokens = n,
                         .max_docs = 1,
                         .max_labels = n,
                         .max_doc_tokens = n,
                         .training = true,
                         .keep = l.keep,
                         .linear_cp = l.linear_cp};
    assert_ok(ith_step_create(&step, model, &session.ctx, &c, false), err);
    ith_micro_batch b = one_document(n);
    traffic t0 = sent(&mesh);
    ith_step_begin(step, (double)n);
    assert_ok(ith_step_micro(step, &b), err);
    traffic t1 = sent(&mesh);
    assert_ok(ith_step_end(step, (ith_adamw_hyper){.step = 1}, &stats), err);
    out->micro = minus(t1, t0);
    out->rest = minus(sent(&mesh), t1);
    int64_t blocks[16];
    int64_t chunk[16];
    ith_model_blocks(model, blocks, chunk);
    out->elements = blocks[2] - blocks[1];
    out->own = model->shard ? ith_shard_slice(model->shard, 1, model->grad).shape[0] : 0;
    ith_step_destroy(step);
    ith_model_destroy(model);
    ith_session_close(&session);
    ith_hf_config_deinit(&hf);
    ith_mesh_close(&mesh);
}

/* A layer's part of the step in *layer, what is no layer's in *base. */
static void measure_layer(const char *config, layout l, int64_t n, step_traffic *layer,
                          step_traffic *base)
{
    step_traffic two, three;
    measure(config, 2, l, n, &two);
    measure(config, 3, l, n, &three);
    *layer = three;
    layer->micro = minus(three.micro, two.micro);
    layer->rest = minus(three.rest, two.rest);
    base->micro = minus(minus(two.micro, layer->micro), layer->micro);
    base->rest = minus(minus(two.rest, layer->rest), layer->rest);
}

static void same(traffic got, int64_t bytes, int64_t exchanges, const char *what, layout l)
{
    if (got.bytes != bytes || got.exchanges != exchanges)
        fail_msg("%s, %lld ranks, cp %lld, ulysses %lld, zero %d, keep %d: %lld bytes in %lld "
                 "exchanges, expected %lld in %lld",
                 what, (long long)world->size, (long long)l.cp, (long long)l.ulysses, l.zero,
                 l.keep, (long long)got.bytes, (long long)got.exchanges, (long long)bytes,
                 (long long)exchanges);
}

/* Forward: qkv to heads, o back. Backward: both again, unless all was kept; the gradient of o,
 * those of q, k and v. A ring: keys and values forward and backward, their gradients in f32; once
 * more where attention is made again. */
static void test_attention_sends_q_k_v_and_o(void **state)
{
    (void)state;
    const int64_t p = world->size, n = 16 * p, e = 4, dq = Q * DIM, dkv = KV * DIM;
    for (int64_t u = 1; u <= p && u <= Q; u++)
        for (int keep = KEEP_AUTO; keep <= ITH_KEEP_INPUT; keep++) {
            step_traffic layer, base;
            layout l = {p, u, 0, keep, ITH_LINEAR_AUTO};
            int64_t times = keep == KEEP_AUTO ? 4 : 6;
            if (p % u || (u > KV ? u % KV : KV % u))
                continue;
            measure_layer(dense, l, n, &layer, &base);
            int64_t r = p / u, rep = u > KV ? u / KV : 1, again = keep == ITH_KEEP_INPUT;
            int64_t heads = (u - 1) * n / u / p * times * (dq + dkv * rep) * e;
            int64_t round = (r - 1) * n / r * 2 * dkv * rep / u;
            same(layer.micro, heads + round * ((2 + again) * e + 4),
                 (u > 1 ? times : 0) + (3 + again) * (r - 1), "a layer", l);
            same(base.micro, 0, 0, "beside the layers", l);
        }
}

/* Convolution and gates have one exchange where attention has one, o is kept at the tokens. */
static void test_linear_layers_send_heads_or_states(void **state)
{
    (void)state;
    const int64_t p = world->size, e = 4, dv = LIN_V * LIN_VD, dk = LIN_K * LIN_KD;
    const int64_t rep = p > LIN_K ? p / LIN_K : 1;
    step_traffic layer, base, longer;
    if (p > LIN_V)
        return;
    layout l = {p, p, 0, ITH_KEEP_ATTENTION, ITH_LINEAR_HEADS};
    measure_layer(linear, l, 16 * p, &layer, &base);
    int64_t parts = dv + 2 * LIN_V + 2 * dk * rep;
    same(layer.micro, (p - 1) * 16 * (2 * parts + dv + dv + parts) * e / p, 5, "heads", l);
    same(base.micro, 0, 0, "beside the layers", l);
    l.linear_cp = ITH_LINEAR_STATES;
    measure_layer(linear, l, 8 * p, &layer, &base);
    measure_layer(linear, l, 16 * p, &longer, &base);
    same(longer.micro, layer.micro.bytes, layer.micro.exchanges, "states of a longer document", l);
    int64_t states = (p - 1) * LIN_V * LIN_KD * (LIN_KD + LIN_VD) * 4,
            halo = 3 * 3 * (dv + 2 * dk) * e; /* forward, again, and their gradients */
    if (layer.micro.bytes > states + halo)
        fail_msg("states: %lld bytes, at most %lld expected", (long long)layer.micro.bytes,
                 (long long)(states + halo));
    same(base.micro, 0, 0, "beside the layers", l);
}

/* W ranks, N elements of a layer, of which this one has `own`: what is gathered sends own to all
 * others, what is reduced all but own. */
static void test_zero_sends_weights_and_gradients(void **state)
{
    (void)state;
    const int64_t w = world->size, n = 16, e = 4;
    for (int zero = 1; zero <= 3; zero++) {
        step_traffic layer, base;
        layout l = {1, 1, zero, ITH_KEEP_ALL, ITH_LINEAR_AUTO};
        measure_layer(dense, l, n, &layer, &base);
        int64_t own = layer.own, all = layer.elements;
        int64_t gather = (w - 1) * own * e, reduce = (all - own) * 4;
        assert_true(own >= all / w - 128 && own <= all / w + 128);
        same(layer.micro, (zero > 1 ? reduce : 0) + (zero > 2 ? 2 * gather : 0),
             (zero > 1) + (zero > 2 ? 2 : 0), "a layer of a micro-batch", l);
        same(layer.rest, (zero == 1 ? reduce : 0) + (zero < 3 ? gather : 0),
             (zero == 1) + (zero < 3), "a layer of the rest", l);
    }
}

/* Stage 0: one sum of all gradients, 2 (W-1)/W 4N. */
static void test_one_sum_of_all_gradients(void **state)
{
    (void)state;
    const int64_t w = world->size;
    step_traffic layer, base;
    layout l = {1, 1, 0, ITH_KEEP_ALL, ITH_LINEAR_AUTO};
    measure_layer(dense, l, 16, &layer, &base);
    same(layer.micro, 0, 0, "a layer of a micro-batch", l);
    if (layer.elements % w == 0)
        same(layer.rest, 2 * (w - 1) * layer.elements / w * 4, 0, "a layer of the rest", l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_attention_sends_q_k_v_and_o),
                                       cmocka_unit_test(test_linear_layers_send_heads_or_states),
                                       cmocka_unit_test(test_zero_sends_weights_and_gradients),
                                       cmocka_unit_test(test_one_sum_of_all_gradients)};
    if (ith_comm_open_world(&world, 120, &err) != ITH_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    int failed = cmocka_run_group_tests_name("traffic", tests, NULL, NULL);
    ith_comm_close(world);
    return failed;
}
