/* bench_scaling.c - what a step would take on many GPUs: docs/scaling.md.
 *
 *     ithaca_bench_scaling [seq=1048576]
 *
 * Nothing runs: FLOP and bytes of the formulas (ith_model_flops, ith_ring_bytes_per_token,
 * docs/parallel.md) over rates measured on one and two H200 (bench/results). First the steps that
 * were measured beside what the formula says of them, then steps of 8, 64 and 1,024 GPUs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"
#include "model/presets.h"

/* FLOP/s and byte/s of one GPU. */
#define PRODUCTS 670e12          /* sustained under the power limit */
#define ATTENTION_FORWARD 550e12 /* causal, heads of 128, 32,768 rows and more */
#define ATTENTION_BACKWARD 525e12
#define NVLINK 380e9 /* to GPUs of the same host, each way: 382 measured between two */
#define NETWORK 45e9 /* to other hosts: 90 % of 400 Gb/s a GPU; not measured here */
#define HOST_GPUS 8
/* Norms, RoPE, SwiGLU .. of a token, forward and backward: seconds over layers * hidden_size; of
 * the 0.6B step of 4 x 4,096 tokens, 21.4 ms. */
#define OTHERS (21.4e-3 / 16384 / 28 / 1024)
#define UPDATE 7.3e-12 /* AdamW of a parameter with its master copy, seconds */

typedef struct {
    const char *model;
    int64_t tokens, docs; /* of one group that shares a sequence: docs of them in a micro-batch */
    int64_t gpus, cp;
    double kept; /* share of the layers that keep attention; the others make all again */
    double all;  /* share that keeps all */
    double measured_s;
} layout;

typedef struct {
    double attention, products, others, heads, ring, shards, step;
    int64_t ulysses;
} times;

static ith_error err;

static void check(ith_status status)
{
    if (status != ITH_OK) {
        fprintf(stderr, "error: %s\n", err.text);
        exit(1);
    }
}

/* Seconds for bytes that one GPU sends evenly to the others of `group` neighbours. */
static double over_links(double bytes, int64_t group)
{
    double others = (double)(group - 1), near = (double)(ith_min_i64(group, HOST_GPUS) - 1);
    return group == 1
               ? 0
               : fmax(bytes * near / others / NVLINK, bytes * (others - near) / others / NETWORK);
}

static times step_of(const layout *l)
{
    ith_hf_config c;
    ith_model *m = NULL;
    json_t *json = NULL;
    int preset = ith_preset_find(l->model);
    check(ith_preset_config(preset, ith_preset_vocab_size(preset), -1, ITH_BF16, &json, &err));
    char *text = json_dumps(json, 0);
    check(ith_hf_config_parse(&c, text, (int64_t)strlen(text), "preset", &err));
    check(ith_model_create(&m, &c, ITH_BF16, 1, &err));
    int32_t cu[17] = {0};
    for (int64_t i = 0; i < l->docs; i++)
        cu[i + 1] = (int32_t)((i + 1) * (l->tokens / l->docs));
    ith_flops f = ith_model_flops(m, cu, l->docs, l->tokens);
    double cp = (double)l->cp, layers = (double)c.num_hidden_layers, n = (double)l->tokens;
    double again = 1 - l->all;
    times t = {0};
    t.attention = f.attention / 3 / cp *
                  ((1 + (1 - l->kept - l->all)) / ATTENTION_FORWARD + 2.5 / ATTENTION_BACKWARD);
    t.products = (f.linear / 3 * (3 + again) + f.head) / cp / PRODUCTS;
    t.others = OTHERS * n / cp * layers * (double)c.hidden_size * (1 + again / 2) +
               UPDATE * (double)m->num_weights / (double)l->gpus;
    t.ulysses = ith_ring_choose(c.num_attention_heads, c.num_key_value_heads, c.head_dim, l->cp, 2,
                                ITH_RING_AUTO, false);
    while (t.ulysses > HOST_GPUS) /* heads within a host, rings between hosts */
        t.ulysses /= 2;
    double u = (double)t.ulysses, r = cp / u, e = 2, kv = (double)c.num_key_value_heads;
    double dq = (double)(c.num_attention_heads * c.head_dim), dkv = kv * (double)c.head_dim;
    double rep = fmax(1, u / kv), made_again = 1 - l->kept - l->all;
    t.heads = over_links(layers * (u - 1) / u / cp * n * (6 * dq + 6 * dkv * rep) * e, t.ulysses);
    double round = (r - 1) / r * n * 2 * dkv * rep / u;
    t.ring = layers * round * ((2 + made_again) * e + 4) / (l->cp > HOST_GPUS ? NETWORK : NVLINK);
    double w = (double)l->gpus;
    t.shards = over_links((w - 1) / w * (double)m->num_weights * (2 * e + 4), l->gpus);
    double work = t.attention + t.products + t.others;
    t.step = work + t.heads + t.ring + fmax(0, t.shards - work); /* layers travel beside work */
    ith_model_destroy(m);
    ith_hf_config_deinit(&c);
    json_decref(json);
    ith_free(text);
    return t;
}

static void measured_rows(void)
{
    /* kept and all as `ithaca plan` says for the memory of those runs */
    static const layout rows[] = {
        {"0.6b", 16384, 4, 1, 1, 0, 1, 0.174},
        {"4b", 4096, 1, 1, 1, 0, 1, 0.234},
        {"4b", 16384, 1, 1, 1, 0, 0, 1.498},
        {"4b", 65536, 1, 1, 1, 28.0 / 36, 8.0 / 36, 11.39},
        {"4b", 131072, 1, 1, 1, 28.0 / 36, 0, 42.0},
        {"0.6b", 524288, 1, 1, 1, 1, 0, 210.8},
        {"4b", 65536, 1, 2, 2, 0, 1, 5.60},
    };
    printf(
        "| step | GPUs | attention | products | others | exchange | formula, s | measured, s | |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        times t = step_of(&rows[i]);
        printf("| Qwen3-%s, %lld x %lld | %lld | %.3g | %.3g | %.3g | %.3g | %.3g | %.3g | %+.0f "
               "%% |\n",
               rows[i].model, (long long)rows[i].docs, (long long)(rows[i].tokens / rows[i].docs),
               (long long)rows[i].gpus, t.attention, t.products, t.others, t.heads + t.ring, t.step,
               rows[i].measured_s, 100 * (t.step / rows[i].measured_s - 1));
    }
}

static void predicted_rows(const char *model, int64_t seq)
{
    static const int64_t sizes[][2] = {{8, 8}, {64, 8}, {64, 64}, {1024, 8}, {1024, 64}};
    double eight = 0;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t gpus = sizes[i][0], cp = sizes[i][1], dp = gpus / cp;
        times t = step_of(&(layout){model, seq, 1, gpus, cp, 0, 0, 0});
        double rate = (double)(seq * dp) / t.step / (double)gpus;
        eight = i ? eight : rate;
        printf("| Qwen3-%s | %lld = dp %lld x cp %lld (ulysses %lld x ring %lld) | %.1f | %.1f | "
               "%.2f | %.2f | %.1f | %.1f | %.0f | %.0f %% |\n",
               model, (long long)gpus, (long long)dp, (long long)cp, (long long)t.ulysses,
               (long long)(cp / t.ulysses), t.attention, t.products + t.others, t.heads, t.ring,
               t.shards, t.step, rate, 100 * rate / eight);
    }
}

int main(int argc, char **argv)
{
    int64_t seq = 1 << 20;
    if (argc > 1 && strncmp(argv[1], "seq=", 4) == 0)
        seq = strtoll(argv[1] + 4, NULL, 10);
    measured_rows();
    printf("\n| model | GPUs | attention, s | other work | heads | ring | shards, beside work | "
           "step | "
           "tokens/s of a GPU | of 8 GPUs' |\n"
           "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    predicted_rows("8b", seq);
    predicted_rows("32b", seq);
    return 0;
}
