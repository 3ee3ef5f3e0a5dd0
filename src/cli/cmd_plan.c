/* cmd_plan.c - `ithaca plan`: what a run would do, before any weight is read. */
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/tables.h"
#include "cli/terminal.h"
#include "model/presets.h"

#define USABLE 0.97 /* of the named GB */

/* Of the time that products alone would take at the rate of a large one. */
#define EFFICIENCY 0.6

/* What the backward walk computes a second time, as a share of all. */
static double recomputed(const ith_trainer *t, const ith_flops *f)
{
    const ith_step *s = t->step;
    double layers = (double)t->hf.num_hidden_layers, products = layers - (double)s->layers_keep_all,
           attention = products - (double)s->layers_keep_attention;
    return (products * f->linear + attention * f->attention) / (3 * layers * f->total);
}

static void predict_time(ith_trainer *t, ith_buf *out)
{
    ith_error why = {0};
    ith_error *err = t->session.ctx.err;
    ith_flops f = ith_trainer_step_flops(t);
    double rate = 0, ranks = (double)t->layout.world_size;
    t->session.ctx.err = &why;
    ith_status status = ith_measure_matmul_rate(&t->session, t->model->dtype, &rate);
    t->session.ctx.err = err;
    if (status != ITH_OK) {
        ith_buf_printf(out, "time: not known without the device: %s\n", why.text);
        return;
    }
    char all[32], among[64] = "", again[64] = "";
    double more = recomputed(t, &f), seconds = f.total * (1 + more) / (rate * ranks * EFFICIENCY);
    ith_format_time(seconds * (double)t->total_steps, all, sizeof all);
    if (more > 0.005)
        snprintf(again, sizeof again, ", and %.0f%% of it again to recompute", 100 * more);
    if (ranks > 1)
        snprintf(among, sizeof among, " on each of %.0f ranks", ranks);
    ith_buf_printf(out,
                   "time: about %.2g s a step, %s for %lld step%s: %.2e FLOP a step (products "
                   "%.0f%%, attention %.0f%%, head %.0f%%)%s, at %.0f%% of the %.2e FLOP/s that a "
                   "large product reaches here undisturbed%s\n",
                   seconds, all, (long long)t->total_steps, t->total_steps == 1 ? "" : "s", f.total,
                   100 * f.linear / f.total, 100 * f.attention / f.total, 100 * f.head / f.total,
                   again, 100 * EFFICIENCY, rate, among);
}

static int64_t bytes_of(const ith_trainer *t, double gigabytes)
{
    return (int64_t)(gigabytes * USABLE * 1e9) - t->links_bytes;
}

/* The longest sequence for what is here, and for the memory of common devices. */
static ith_status longest(ith_trainer *t, ith_buf *out)
{
    static const double sizes[] = {24, 40, 80, 141};
    int64_t tokens = 0, limit = t->config->memory_limit, total = 0;
    if (limit == ITH_CONFIG_UNSET) {
        ITH_TRY(t->session.ctx.device->memory(t->session.ctx.device, &limit, &total,
                                              t->session.ctx.err));
        limit -= t->links_bytes;
    }
    ITH_TRY(ith_step_longest(t->step, limit, ITH_KEEP_INPUT, &tokens));
    char bytes[32];
    ith_buf_printf(out, "longest sequence: %lld tokens in the %s that may be used here;",
                   (long long)tokens, ith_format_bytes(limit, bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ITH_TRY(ith_step_longest(t->step, bytes_of(t, sizes[i]), ITH_KEEP_INPUT, &tokens));
        ith_buf_printf(out, "%s %lld in %.0f GB", i ? "," : "", (long long)tokens, sizes[i]);
    }
    ith_buf_puts(out, "\n");
    return ITH_OK;
}

static void add_line(void *arg, const char *text)
{
    ith_buf_printf(arg, "%s\n", text);
}

static ith_status plan(const ith_config *config, bool all_keys, ith_error *err)
{
    ith_trainer t;
    ith_buf out = {0}, said = {0};
    const ith_trainer_hooks hooks = {.text = add_line, .arg = &said};
    for (int i = 0; i < ith_config_num_notes(config); i++)
        add_line(&said, ith_config_note(config, i));
    ith_status status = ith_trainer_open(&t, config, true, &hooks, err);
    if (status == ITH_OK) {
        ith_buf_printf(&out, "model: %s, %.3g parameters, %lld layers, vocabulary %lld\n",
                       t.hf.model_type, (double)t.model->num_weights,
                       (long long)t.hf.num_hidden_layers, (long long)t.hf.vocab_size);
        ith_memory_table(&t, &out);
        ith_buf_puts(&out, "\n");
        status = longest(&t, &out);
        if (status == ITH_OK)
            predict_time(&t, &out);
        ith_trainer_close(&t);
    }
    ith_buf_printf(&out, "\n%s\n# %s\n", said.data ? said.data : "",
                   all_keys ? "All keys" : "Keys that were given (--all-keys shows all)");
    if (status == ITH_OK)
        status = ith_config_dump(config, all_keys, &out, err);
    if (status == ITH_OK)
        status = ith_print(&out, err);
    ith_buf_deinit(&out);
    ith_buf_deinit(&said);
    return status;
}

/* ---- without data ---- */

/* Of the shape --size names; NULL without it. Caller frees. */
static ith_status shape_text(const ith_args *args, char **out, ith_error *err)
{
    int preset = ith_args_word(args, "size");
    json_t *json = NULL;
    *out = NULL;
    if (preset < 0)
        return ITH_OK;
    ITH_TRY(ith_preset_config(preset, ith_preset_vocab_size(preset), -1, ITH_BF16, &json, err));
    *out = json_dumps(json, JSON_COMPACT);
    json_decref(json);
    return *out ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory for the shape");
}

/* The config of args, with `more` last. */
static ith_status load(ith_config *config, const ith_args *args, const char *const *more,
                       int num_more, ith_error *err)
{
    enum { MAX = 64 };
    const char *overrides[MAX];
    bool file = args->num_positional > 0 && !strchr(args->positional[0], '=');
    int n = 0;
    for (int i = file; i < args->num_positional && n < MAX - num_more; i++)
        overrides[n++] = args->positional[i];
    for (int i = 0; i < num_more; i++)
        overrides[n++] = more[i];
    return ith_config_load(config, file ? args->positional[0] : NULL, overrides, n, err);
}

static ith_status plan_document(const ith_args *args, const char *shape, ith_buf *out,
                                ith_error *err)
{
    ith_config config;
    ith_trainer t;
    int64_t tokens = ith_args_int(args, "tokens");
    ITH_TRY(load(&config, args, NULL, 0, err));
    ith_status status = ith_trainer_open_document(&t, &config, shape, tokens, err);
    if (status == ITH_OK) {
        ith_buf_printf(out, "model: %s, %.3g parameters, %lld layers, vocabulary %lld\n",
                       t.hf.model_type, (double)t.model->num_weights,
                       (long long)t.hf.num_hidden_layers, (long long)t.hf.vocab_size);
        if (t.mesh)
            ith_buf_printf(out, "ranks: %lld = dp %lld x cp %lld, of cp ulysses %lld x ring %lld\n",
                           (long long)t.mesh->world_size, (long long)t.mesh->dp_size,
                           (long long)t.mesh->cp_size, (long long)t.mesh->ulysses_size,
                           (long long)ith_ring_size(t.mesh));
        ith_memory_table(&t, out);
        ith_buf_puts(out, "\n");
        ith_trainer_close(&t);
    }
    ith_config_deinit(&config);
    return status;
}

/* The longest documents of one memory size; host: bytes that a device needs there for the last. */
static ith_status longest_row(ith_trainer *t, int devices, double gigabytes, ith_buf *out)
{
    static const ith_keep keeps[] = {ITH_KEEP_ATTENTION, ITH_KEEP_INPUT, ITH_KEEP_HOST};
    int count = t->session.cuda ? 3 : 2; /* the CPU is its own host */
    ith_buf_printf(out, "%7d %4.0f GB", devices, gigabytes);
    for (int k = 0; k < count; k++) {
        int64_t tokens = 0;
        ITH_TRY(ith_step_longest(t->step, bytes_of(t, gigabytes), keeps[k], &tokens));
        if (tokens)
            ith_buf_printf(out, " %11lld", (long long)tokens);
        else
            ith_buf_printf(out, " %11s", "-");
        if (tokens && keeps[k] == ITH_KEEP_HOST)
            ith_buf_printf(out, " %7.1f GB",
                           (double)ith_plan_peak(t->session.ctx.plan, ITH_MEM_HOST) / 1e9);
    }
    ith_buf_puts(out, "\n");
    return ITH_OK;
}

/* So many devices, each with a part of every sequence; what is not asked for is cut among them. */
static ith_status longest_rows(const ith_args *args, const char *shape, int devices, ith_buf *out,
                               ith_error *err)
{
    char cp[32];
    const char *more[] = {cp, "dp_size=1", "recompute=full", "memory_limit=80GB", "zero_stage=3"};
    ith_config config;
    ith_trainer t;
    snprintf(cp, sizeof cp, "cp_size=%d", devices);
    ITH_TRY(load(&config, args, NULL, 0, err));
    bool staged =
        ith_config_is_set(&config, "zero_stage") || ith_config_is_set(&config, "dist_config");
    ith_config_deinit(&config);
    ITH_TRY(load(&config, args, more, staged ? 4 : 5, err));
    ith_status status = ith_trainer_open_document(&t, &config, shape, 1024, err);
    if (status == ITH_OK) {
        status = longest_row(&t, devices, 80, out);
        if (status == ITH_OK)
            status = longest_row(&t, devices, 141, out);
        ith_trainer_close(&t);
    }
    ith_config_deinit(&config);
    return status;
}

static ith_status longest_table(const ith_args *args, const char *shape, ith_buf *out,
                                ith_error *err)
{
    ith_buf_printf(out,
                   "Tokens of the longest document, shared by all devices, in %.0f%% of their "
                   "memory, when layers keep\n"
                   "devices  memory   attention      inputs   (GPUs) inputs on the host, bytes "
                   "there for each\n",
                   100 * USABLE);
    for (int devices = 1; devices <= 8; devices *= 2)
        ITH_TRY(longest_rows(args, shape, devices, out, err));
    return ITH_OK;
}

static ith_status run_without_data(const ith_args *args, ith_error *err)
{
    char *shape = NULL;
    ith_buf out = {0};
    ITH_TRY(shape_text(args, &shape, err));
    ith_status status = ith_args_flag(args, "longest") ? longest_table(args, shape, &out, err)
                                                       : plan_document(args, shape, &out, err);
    if (status == ITH_OK)
        status = ith_print(&out, err);
    ith_free(shape);
    ith_buf_deinit(&out);
    return status;
}

static ith_status run_plan(const ith_args *args, ith_error *err)
{
    ith_config config;
    bool tokens = ith_args_given(args, "tokens"), table = ith_args_flag(args, "longest");
    if (tokens || table)
        return run_without_data(args, err);
    if (ith_args_given(args, "size"))
        return ith_fail(err, ITH_ERR_USAGE, "--size goes with --tokens or --longest");
    if (args->num_positional == 0)
        return ith_fail(err, ITH_ERR_USAGE,
                        "plan: give a configuration file, or --tokens or --longest");
    ITH_TRY(load(&config, args, NULL, 0, err));
    ith_status status = plan(&config, ith_args_flag(args, "all-keys"), err);
    ith_config_deinit(&config);
    return status;
}

static const ith_option options[] = {
    {.name = "tokens",
     .letter = 'n',
     .type = ITH_OPTION_INT,
     .help = "Plan one document of so many tokens; no data is read.",
     .min = 1,
     .max = 1 << 25},
    {.name = "longest",
     .letter = 'l',
     .type = ITH_OPTION_FLAG,
     .help =
         "Show the longest documents that fit 1 to 8 devices of 80 and 141 GB; no data is read."},
    {.name = "size",
     .letter = 's',
     .type = ITH_OPTION_WORD,
     .help = "With these two: a published shape instead of the model's.",
     .words = ith_preset_words},
    {.name = "all-keys",
     .letter = 'a',
     .type = ITH_OPTION_FLAG,
     .help = "Show every key of the resolved configuration, not only those that were given."},
    {.name = NULL}};

const ith_command ith_cmd_plan = {
    .name = "plan",
    .arguments = "[CONFIG] [key=value ...]",
    .summary = "Show memory, time and the resolved configuration before any weight is read",
    .details = "The memory table is made by walking the very step that train runs, on a backend "
               "that counts: neither the weights, nor the GPUs, nor the other ranks of the job are "
               "needed.\n"
               "  ithaca plan --size 8b -n 1048576 cp_size=8 zero_stage=3 device=cuda\n",
    .options = options,
    .min_positional = 0,
    .max_positional = -1,
    .takes_overrides = true,
    .run = run_plan};
