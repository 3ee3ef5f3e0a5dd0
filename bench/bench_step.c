/* bench_step.c - a whole training step of a real shape, random weights and tokens.
 *
 *     ithaca_bench_step [model=0.6b] [batch=4] [seq=4096] [device=auto|cpu|cuda] [steps=8] [warm=3]
 * [keep=auto|all|attention|input|host] [master=fp32|bf16] [dtype=bfloat16] [chunk=N] [vocab=N]
 * [threads=N] [profile=0|1] [csv=FILE] [memory=GIB] [plan=1] [json=1] [layers=N] [accum=1]
 * [block=32] [beside=1] [deterministic=0]
 *
 * A diffusion model (llada2-mini) trains rows of seq clean tokens by block diffusion, 0.3 to 0.8
 * of them masked; tokens per second count the clean ones. accum: micro-batches of a step; layers:
 * of the model, where all of them are too many. beside=0: updates end before the next step begins.
 *
 * Under mpirun the ranks share the work: [cp=1] ranks a sequence, of which [ulysses=cp] neighbours
 * exchange heads and the rest is a ring, the others other sequences; [zero=0]; [ep=1] ranks share
 * the experts of a layer (with zero=3). Tokens per second are those of all ranks; what rank 0 sends
 * in a step, and on CPUs how long its exchanges take, waiting for the others included, are told
 * apart.
 *
 * Every token is real (no padding) and labelled. Prints the median step, tokens per second, share
 * of the measured matmul rate and planned memory; with profile=1 the time by operator, its sum
 * beside the step. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/rng.h"
#include "kernels/profile.h"
#include "model/presets.h"
#include "train/diffusion.h"
#include "train/trainer.h"

typedef struct {
    char model[32], csv[256];
    int64_t batch, seq, steps, warm, chunk, vocab, memory_gib, cp, ulysses, zero, ep, layers, accum,
        block;
    int keep, threads;
    ith_use_device device;
    bool bf16_states, profile, plan, json, updates_first, deterministic;
    ith_dtype dtype;
} options;

static ith_error err;

static void check(ith_status status)
{
    if (status == ITH_OK)
        return;
    fprintf(stderr, "error: %s\n", err.text);
    exit(1);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool is(const char *arg, const char *key, const char **value)
{
    size_t n = strlen(key);
    if (strncmp(arg, key, n) != 0 || arg[n] != '=')
        return false;
    *value = arg + n + 1;
    return true;
}

static int word(const char *value, const char *words)
{
    size_t len = strlen(value);
    int idx = 0;
    for (const char *p = words; *p; idx++) {
        size_t n = strcspn(p, " ");
        if (n == len && memcmp(p, value, n) == 0)
            return idx;
        p += n + (p[n] == ' ');
    }
    fprintf(stderr, "error: %s is not one of: %s\n", value, words);
    exit(2);
}

static options parse(int argc, char **argv)
{
    options o = {.model = "0.6b",
                 .batch = 4,
                 .seq = 4096,
                 .steps = 8,
                 .warm = 3,
                 .cp = 1,
                 .accum = 1,
                 .block = 32,
                 .ep = 1,
                 .keep = -1,
                 .dtype = ITH_BF16};
    for (int i = 1; i < argc; i++) {
        const char *v = NULL, *a = argv[i];
        const struct {
            const char *key;
            int64_t *to;
        } numbers[] = {{"batch", &o.batch},       {"seq", &o.seq},       {"steps", &o.steps},
                       {"warm", &o.warm},         {"chunk", &o.chunk},   {"vocab", &o.vocab},
                       {"memory", &o.memory_gib}, {"cp", &o.cp},         {"ulysses", &o.ulysses},
                       {"zero", &o.zero},         {"layers", &o.layers}, {"accum", &o.accum},
                       {"block", &o.block},       {"ep", &o.ep}};
        bool found = false;
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
            if (is(a, numbers[k].key, &v)) {
                *numbers[k].to = strtoll(v, NULL, 10);
                found = true;
            }
        if (found)
            continue;
        if (is(a, "model", &v))
            snprintf(o.model, sizeof o.model, "%s", v);
        else if (is(a, "csv", &v))
            snprintf(o.csv, sizeof o.csv, "%s", v);
        else if (is(a, "threads", &v))
            o.threads = (int)strtol(v, NULL, 10);
        else if (is(a, "device", &v))
            o.device = (ith_use_device)word(v, "auto cpu cuda");
        else if (is(a, "keep", &v))
            o.keep = word(v, "auto all attention input host") - 1;
        else if (is(a, "master", &v))
            o.bf16_states = word(v, "fp32 bf16") == 1;
        else if (is(a, "dtype", &v))
            o.dtype = word(v, "bfloat16 float32") == 1 ? ITH_F32 : ITH_BF16;
        else if (is(a, "profile", &v))
            o.profile = *v == '1';
        else if (is(a, "beside", &v))
            o.updates_first = *v == '0';
        else if (is(a, "deterministic", &v))
            o.deterministic = *v == '1';
        else if (is(a, "plan", &v))
            o.plan = *v == '1';
        else if (is(a, "json", &v))
            o.json = *v == '1';
        else {
            fprintf(stderr, "error: %s is not an option (see the head of bench_step.c)\n", a);
            exit(2);
        }
    }
    return o;
}

/* A rank's shard: which tensor an element belongs to does not matter here. */
static void fill_shard(ith_ctx *ctx, ith_tensor flat, const char *values, int64_t n)
{
    int64_t size = ith_dtype_bytes(flat.dtype);
    for (int64_t done = 0; done < flat.shape[0]; done += n)
        check(ctx->device->upload(ctx->device, (char *)flat.data + done * size, values,
                                  ith_min_i64(n, flat.shape[0] - done) * size, &err));
}

/* Random weights, uploaded: the same million values over and over with ones in the norms. */
static void fill_weights(ith_model *m, ith_ctx *ctx, ith_tensor flat)
{
    enum { N = 1 << 20 };
    float *values = ith_malloc(N * 4);
    char *bytes = ith_malloc(N * 4), *ones = ith_malloc(N * 4);
    int64_t size = ith_dtype_bytes(flat.dtype);
    if (!flat.ndim)
        return;
    for (int64_t i = 0; i < N; i++)
        values[i] = (float)(0.02 * ith_rng_normal(1, 2, (uint64_t)i));
    ith_convert(bytes, flat.dtype, values, ITH_F32, N);
    for (int64_t i = 0; i < N; i++)
        values[i] = 1.0f;
    ith_convert(ones, flat.dtype, values, ITH_F32, N);
    bool shard = m->shard && flat.shape[0] == ith_shard_elements(m->shard);
    if (shard)
        fill_shard(ctx, flat, bytes, N);
    for (int64_t p = 0; !shard && p < m->num_pieces; p++) {
        const ith_hf_piece *piece = &m->pieces[p];
        for (int64_t done = 0; done < piece->count; done += N) {
            int64_t n = ith_min_i64(N, piece->count - done),
                    at = m->params[piece->param].first + piece->first + done;
            check(ctx->device->upload(ctx->device, (char *)flat.data + at * size,
                                      piece->is_norm ? ones : bytes, n * size, &err));
        }
    }
    check(ctx->device->sync(ctx->device, &err));
    ith_free(values);
    ith_free(bytes);
    ith_free(ones);
}

static ith_micro_batch make_batch(const options *o)
{
    int64_t n = o->batch * o->seq;
    ith_micro_batch b = {.num_tokens = n,
                         .num_docs = o->batch,
                         .num_labels = n - o->batch,
                         .weight_sum = (double)(n - o->batch)};
    b.ids = ith_malloc(n * 4);
    b.position_ids = ith_malloc(n * 4);
    b.labels = ith_malloc(n * 4);
    b.weights = ith_malloc(n * 4);
    b.cu_seqlens = ith_malloc((o->batch + 1) * 4);
    b.sample = ith_malloc(o->batch * 8);
    if (!b.ids || !b.position_ids || !b.labels || !b.weights || !b.cu_seqlens || !b.sample)
        exit(1);
    for (int64_t i = 0; i < n; i++) {
        b.ids[i] = (int32_t)ith_rng_below(3, 4, (uint64_t)i, o->vocab - 1); /* that is the mask */
        b.position_ids[i] = (int32_t)(i % o->seq);
    }
    for (int64_t i = 0; i < n; i++) {
        bool last = (i + 1) % o->seq == 0;
        b.labels[i] = last ? -100 : b.ids[i + 1];
        b.weights[i] = last ? 0.0f : 1.0f;
    }
    for (int64_t i = 0; i <= o->batch; i++)
        b.cu_seqlens[i] = (int32_t)(i * o->seq);
    for (int64_t i = 0; i < o->batch; i++)
        b.sample[i] = i;
    return b;
}

/* What this rank has sent, and how long that took, in all groups. */
typedef struct {
    double bytes, seconds;
} traffic;

static traffic traffic_of(const ith_mesh *m)
{
    traffic t = {0, 0};
    const ith_comm *const groups[] = {
        m->world,           m->cp,           m->ep,           m->edp,       m->device_world[0],
        m->device_world[1], m->device_cp[0], m->device_cp[1], m->device_ep, m->device_edp[0],
        m->device_edp[1]};
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        bool counted = !groups[i];
        for (size_t k = 0; k < i; k++) /* a group may serve as several */
            counted |= groups[k] == groups[i];
        if (!counted) {
            t.bytes += (double)groups[i]->bytes_sent;
            t.seconds += groups[i]->seconds;
        }
    }
    return t;
}

static void print_traffic(const ith_mesh *m, traffic before, int64_t steps, bool waits,
                          double step_ms)
{
    traffic t = traffic_of(m);
    double ms = 1e3 * (t.seconds - before.seconds) / (double)steps;
    printf("exchanges: rank 0 sends %.1f MiB a step",
           (t.bytes - before.bytes) / (double)steps / (1 << 20));
    if (waits)
        printf(", in %.1f ms (%.1f%%)", ms, 100 * ms / step_ms);
    printf("\n");
}

/* The same rows, noisy: [noisy; clean], a share of 0.3 to 0.8 of each masked. */
static ith_noiser *open_noise(const options *o, const ith_micro_batch *clean, ith_noise_options *n)
{
    ith_noiser *noiser = NULL;
    ith_batch_limits limits = {.max_tokens = clean->num_tokens,
                               .max_docs = clean->num_docs,
                               .max_labels = clean->num_tokens,
                               .max_doc_tokens = o->seq};
    *n = (ith_noise_options){.blocks = true,
                             .block_size = o->block,
                             .mask_id = (int32_t)o->vocab - 1,
                             .low = 0.3,
                             .high = 0.8,
                             .same_token = true,
                             .seed = 1};
    check(ith_noiser_create(&noiser, n, &limits, &err));
    return noiser;
}

static void make_noise(const options *o, ith_noiser *noiser, const ith_micro_batch *clean,
                       ith_micro_batch *out)
{
    ith_samples *samples = NULL;
    int64_t *lengths = ith_malloc(o->batch * 8);
    for (int64_t i = 0; lengths && i < o->batch; i++)
        lengths[i] = o->seq;
    check(ith_samples_from_arrays(&samples, o->batch, lengths, clean->ids, NULL, &err));
    check(ith_noiser_apply(noiser, samples, clean, 0, o->accum, out, &err));
    ith_samples_close(samples);
    ith_free(lengths);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void print_profile(const ith_profile *p, int64_t steps, double step_ms)
{
    double sum = 0;
    printf("%-32s %8s %10s %7s\n", "operator", "calls", "ms/step", "share");
    for (int i = 0; i < p->num_rows; i++) {
        sum += p->rows[i].ms / (double)steps;
        printf("%-32s %8.0f %10.3f %6.1f%%\n", p->rows[i].op,
               (double)p->rows[i].calls / (double)steps, p->rows[i].ms / (double)steps,
               100 * p->rows[i].ms / (double)steps / step_ms);
    }
    printf("%-32s %8s %10.3f of %.3f (%.1f%%)\n", "sum", "", sum, step_ms, 100 * sum / step_ms);
}

int main(int argc, char **argv)
{
    options o = parse(argc, argv);
    json_t *json = NULL;
    ith_hf_config hf;
    ith_session session;
    ith_model *model = NULL;
    ith_step *step = NULL;
    int preset = ith_preset_find(o.model);
    if (preset < 0) {
        fprintf(stderr, "error: model %s is not one of: %s\n", o.model, ith_preset_words);
        return 2;
    }
    bool diffusion = ith_preset_is_diffusion(preset);
    if (!o.vocab)
        o.vocab = diffusion ? 157184 : 151936;
    check(ith_preset_config(preset, o.vocab, -1, o.dtype, &json, &err));
    if (o.layers)
        json_object_set_new(json, "num_hidden_layers", json_integer(o.layers));
    char *text = json_dumps(json, 0);
    check(ith_hf_config_parse(&hf, text, (int64_t)strlen(text), "preset", &err));
    ith_comm *world = NULL;
    ith_mesh mesh_store = {0}, *mesh = NULL;
    check(ith_comm_open_world(&world, 120, &err));
    if (world->rank > 0 &&
        (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)))
        return 1;
    check(ith_session_open(&session, o.device, ith_narrow(world->local_rank), o.threads, o.plan,
                           &err));
    ith_ctx *ctx = &session.ctx;
    ctx->deterministic = o.deterministic;
    if (world->size > 1) {
        mesh = &mesh_store;
        check(ith_mesh_open(mesh, world, o.cp, &err));
        ith_mesh_set_ulysses(mesh, o.ulysses ? o.ulysses : o.cp, hf.linear_num_value_heads > 0);
        check(ith_mesh_set_experts(mesh, o.ep, &err));
        if (session.cuda)
            check(ith_mesh_open_device(mesh, ctx->device, o.zero >= 2, &err));
    }
    check(ith_model_create(&model, &hf, o.dtype, o.seq, &err));
    ith_micro_batch clean = make_batch(&o), b = clean;
    ith_batch_limits limits = {.max_tokens = clean.num_tokens,
                               .max_docs = clean.num_docs,
                               .max_labels = clean.num_labels,
                               .max_doc_tokens = o.seq};
    ith_noise_options noise = {0};
    ith_noiser *noiser = diffusion ? open_noise(&o, &clean, &noise) : NULL;
    if (noiser) {
        limits = ith_noiser_limits(noiser);
        make_noise(&o, noiser, &clean, &b);
    }
    ith_step_config c = {.mesh = mesh,
                         .zero_stage = ith_narrow(o.zero),
                         .max_tokens = limits.max_tokens,
                         .max_docs = limits.max_docs,
                         .max_labels = limits.max_labels,
                         .max_doc_tokens = limits.max_doc_tokens,
                         .block = diffusion ? o.block : 0,
                         .noisy = diffusion,
                         .chunk_rows = o.chunk,
                         .training = true,
                         .fp32_master = !o.bf16_states,
                         .bf16_moments = o.bf16_states,
                         .keep = o.keep,
                         .memory_limit = o.memory_gib << 30,
                         .max_grad_norm = 1.0f,
                         .updates_first = o.updates_first,
                         .seed = 1};
    int64_t free_bytes = 0, total_bytes = 0;
    if (!o.plan)
        check(ctx->device->memory(ctx->device, &free_bytes, &total_bytes, &err));
    double before = (double)(total_bytes - free_bytes) / (double)(1 << 30);
    double t0 = now_s();
    check(ith_step_create(&step, model, ctx, &c, o.plan));
    double planned = (double)ith_plan_total(ctx->plan) / (double)(1 << 30);
    printf("%s %lld x %lld on %s: planned %.2f GiB; layers keep all %lld, attention %lld, input "
           "%lld, host "
           "%lld; chunk %lld; opened in %.1f s\n",
           o.model, (long long)o.batch, (long long)o.seq, ctx->device->name, planned,
           (long long)step->layers_keep_all, (long long)step->layers_keep_attention,
           (long long)step->layers_keep_input,
           (long long)(hf.num_hidden_layers - step->layers_keep_all - step->layers_keep_attention -
                       step->layers_keep_input),
           (long long)step->config.chunk_rows, now_s() - t0);
    if (o.plan)
        return 0;
    fill_weights(model, ctx, model->w);
    fill_weights(model, ctx, step->master);
    check(ith_model_refresh_weights(model, ctx));
    double dp = mesh ? (double)mesh->dp_size : 1, parts = dp * (double)o.accum, rate = 0;
    double flops =
        parts * (diffusion ? ith_diffusion_flops(model, &noise, &b)
                           : ith_model_flops(model, b.cu_seqlens, b.num_docs, b.num_labels).total);
    double *ms = ith_malloc((o.steps + 1) * (int64_t)sizeof(double));
    ith_step_stats stats = {0};
    if (o.profile)
        check(ith_profile_create(&ctx->profile, &err));
    traffic before_steps = {0, 0};
    for (int64_t i = 0; i < o.warm + o.steps; i++) {
        if (i == o.warm && ctx->profile) {
            check(ith_profile_collect(ctx));
            ith_profile_reset(ctx->profile);
        }
        if (i == o.warm && mesh)
            before_steps = traffic_of(mesh);
        double start = now_s();
        ith_step_begin(step, b.weight_sum * parts);
        for (int64_t k = 0; k < o.accum; k++)
            check(ith_step_micro(step, &b));
        check(ith_step_end(step, (ith_adamw_hyper){1e-5f, 0.9f, 0.999f, 1e-8f, 0.01f, i + 1},
                           &stats));
        double took = 1e3 * (now_s() - start);
        if (ctx->profile && ctx->profile->calls > ITH_PROFILE_MAX_CALLS / 2)
            check(ith_profile_collect(ctx)); /* waits for updates beside */
        if (i >= o.warm)
            ms[i - o.warm] = took;
        if (!o.json)
            fprintf(stderr, "step %lld: %.2f ms, loss %.9g, grad norm %.9g%s\n", (long long)i + 1,
                    took, stats.loss, stats.grad_norm, stats.skipped ? ", SKIPPED" : "");
    }
    ith_profile *profile = ctx->profile;
    if (profile)
        check(ith_profile_collect(ctx));
    ctx->profile = NULL;
    qsort(ms, (size_t)o.steps, sizeof *ms, by_value);
    double median = ms[o.steps / 2], best = ms[0];
    if (mesh)
        print_traffic(mesh, before_steps, o.steps, !session.cuda, median);
    check(ctx->device->memory(ctx->device, &free_bytes, &total_bytes, &err));
    check(ith_measure_matmul_rate(&session, o.dtype, &rate));
    check(ith_comm_all_reduce(world, &rate, 1, ITH_F64, ITH_REDUCE_SUM, &err));
    double tok_s = parts * (double)clean.num_tokens / median * 1e3;
    printf("median %.2f ms, best %.2f ms: %.0f tok/s, %.1f TFLOP/s, %.1f%% of the measured %.1f; "
           "planned %.2f GiB, device in use %.2f GiB of which %.2f before the plan, loss %.4f\n",
           median, best, tok_s, flops / median * 1e-9, 100 * flops / median * 1e3 / rate,
           rate * 1e-12, planned, (double)(total_bytes - free_bytes) / (double)(1 << 30), before,
           stats.loss);
    if (profile)
        print_profile(profile, o.steps, median);
    if (o.json)
        printf("{\"name\": \"ithaca\", \"model\": \"%s\", \"step_ms\": %.3f, \"tok_s\": %.1f, "
               "\"peak_gib\": %.2f}\n",
               o.model, median, tok_s, planned);
    if (o.csv[0]) {
        FILE *f = fopen(o.csv, "a");
        if (f) {
            fprintf(f, "step,%s,%s,%lld,%lld,%s,%.3f,%.0f,%.2f,%.3g,%.3g\n", ctx->device->name,
                    o.model, (long long)o.batch, (long long)o.seq, o.bf16_states ? "bf16" : "fp32",
                    median, tok_s, planned, flops / median * 1e3, rate);
            fclose(f);
        }
    }
    ith_profile_destroy(profile);
    ith_noiser_destroy(noiser);
    ith_step_destroy(step);
    ith_model_destroy(model);
    ith_mesh_close(&mesh_store);
    ith_session_close(&session);
    ith_comm_close(world);
    ith_hf_config_deinit(&hf);
    json_decref(json);
    return 0;
}
