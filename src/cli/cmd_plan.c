/* cmd_plan.c - `ithaca plan`: what a run would do, before any weight is read. */
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/tables.h"
#include "cli/terminal.h"
#include "model/presets.h"

#define USABLE 0.97 /* of the named GB */

static ith_status on_this_machine(ith_trainer *t, ith_buf *out)
{
    const ith_step_config *c = &t->step->config;
    int64_t docs = ith_max_i64(1, c->max_tokens / ith_max_i64(c->max_doc_tokens, 1)),
            len = c->max_tokens / docs;
    ith_buf cu = {0};
    for (int64_t i = 0; i <= docs; i++) {
        int32_t at = (int32_t)(i * len);
        ith_buf_append(&cu, &at, sizeof at);
    }
    ITH_TRY(ith_buf_check(&cu, "plan", t->session.ctx.err));
    ith_flops f = ith_model_flops(t->model, (const int32_t *)(const void *)cu.data, docs,
                                  ith_min_i64(c->max_labels, docs * len));
    ith_buf_deinit(&cu);
    double rate = 0;
    if (ith_measure_matmul_rate(&t->session, t->model->dtype, &rate) != ITH_OK) {
        ith_error_clear(t->session.ctx.err);
        return ITH_OK;
    }
    ith_buf_printf(
        out,
        "time: %.3g FLOP for a full micro-batch (products %.0f%%, attention %.0f%%, head %.0f%%); "
        "this machine multiplies "
        "at %.3g FLOP/s: %.3g s at its rate, %.3g s at 60%% of it; %lld micro-batch%s a step\n",
        f.total, 100 * f.linear / f.total, 100 * f.attention / f.total, 100 * f.head / f.total,
        rate, f.total / rate, f.total / rate / 0.6, (long long)t->layout.grad_accum,
        t->layout.grad_accum == 1 ? "" : "es");
    return ITH_OK;
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

static ith_status plan(const ith_config *config, ith_error *err)
{
    ith_trainer t;
    ith_buf out = {0};
    ITH_TRY(ith_config_dump(config, &out, err));
    ith_buf_puts(&out, "\n");
    ith_status status = ith_trainer_open(&t, config, true, NULL, err);
    if (status == ITH_OK) {
        ith_buf_printf(&out, "model: %s, %.3g parameters, %lld layers, vocabulary %lld\n",
                       t.hf.model_type, (double)t.model->num_weights,
                       (long long)t.hf.num_hidden_layers, (long long)t.hf.vocab_size);
        ith_trainer_put_data(&t, &out);
        ith_buf_puts(&out, "\n");
        ith_memory_table(&t, &out);
        ith_buf_puts(&out, "\n");
        if (status == ITH_OK)
            status = longest(&t, &out);
        if (status == ITH_OK)
            status = on_this_machine(&t, &out);
        ith_trainer_close(&t);
    }
    if (status == ITH_OK)
        status = ith_print(&out, err);
    ith_buf_deinit(&out);
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
    ith_status status = plan(&config, err);
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
    {.name = NULL}};

const ith_command ith_cmd_plan = {
    .name = "plan",
    .arguments = "[CONFIG] [key=value ...]",
    .summary = "Show the resolved configuration, memory and time before any weight is read",
    .details = "The memory table is made by walking the very step that train runs, on a backend "
               "that counts: neither the weights, nor the GPUs, nor the other ranks of the job are "
               "needed.\n"
               "  ithaca plan --size 8b -n 1048576 cp_size=8 zero_stage=3 device=cuda\n",
    .options = options,
    .min_positional = 0,
    .max_positional = -1,
    .takes_overrides = true,
    .run = run_plan};
