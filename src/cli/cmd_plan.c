/* cmd_plan.c - `ithaca plan`: what a run would do, before any weight is read. */
#include <stdio.h>

#include "cli/commands.h"
#include "cli/tables.h"
#include "cli/terminal.h"

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
        "at %.3g FLOP/s: %.3g s at its rate, %.3g s at 60%% of it; %lld micro-batches a step\n",
        f.total, 100 * f.linear / f.total, 100 * f.attention / f.total, 100 * f.head / f.total,
        rate, f.total / rate, f.total / rate / 0.6, (long long)t->layout.grad_accum);
    return ITH_OK;
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
    ITH_TRY(ith_step_longest(t->step, limit, &tokens));
    char bytes[32];
    ith_buf_printf(out, "longest sequence: %lld tokens in the %s that may be used here;",
                   (long long)tokens, ith_format_bytes(limit, bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) { /* 97 % of the named GB */
        ITH_TRY(ith_step_longest(t->step, (int64_t)(sizes[i] * 0.97e9) - t->links_bytes, &tokens));
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
        ith_buf_printf(&out,
                       "data: %lld samples, %lld tokens (%lld trained), %lld steps per epoch, %lld "
                       "steps in all\n",
                       (long long)ith_samples_count(t.samples),
                       (long long)ith_samples_num_tokens(t.samples),
                       (long long)ith_samples_num_labels(t.samples), (long long)t.steps_per_epoch,
                       (long long)t.total_steps);
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

static ith_status run_plan(const ith_args *args, ith_error *err)
{
    ith_config config;
    ITH_TRY(ith_config_load(&config, args->positional[0], args->positional + 1,
                            args->num_positional - 1, err));
    ith_status status = plan(&config, err);
    ith_config_deinit(&config);
    return status;
}

const ith_command ith_cmd_plan = {
    .name = "plan",
    .arguments = "CONFIG [key=value ...]",
    .summary = "Show the resolved configuration, memory and time before any weight is read",
    .details = "The memory table is made by walking the very step that train runs, on a backend "
               "that counts.\n",
    .min_positional = 1,
    .max_positional = -1,
    .takes_overrides = true,
    .run = run_plan};
