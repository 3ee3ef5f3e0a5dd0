/* api_train.c - the part of include/ithaca.h that trains, with version, log and errors. */
#include <math.h>
#include <stdio.h>

#include "api/api_internal.h"
#include "base/log.h"
#include "train/trainer.h"

const char *ithaca_version(void)
{
    return ITH_VERSION;
}

ithaca_status ith_api_status(ith_status status, const ith_error *from, ithaca_error *to)
{
    if (to)
        snprintf(to->text, sizeof to->text, "%s", status == ITH_OK ? "" : from->text);
    if (status == ITH_OK)
        return ITHACA_OK;
    if (status == ITH_ERR_INTERRUPTED)
        return ITHACA_STOPPED;
    return ith_exit_code(status) == 2 ? ITHACA_WRONG : ITHACA_FAILED;
}

/* ---- log: one function for the whole process, as the sink below it ---- */

static struct {
    void (*log)(void *arg, ithaca_log_level level, const char *text);
    void *arg;
} user_log;

static void sink(ith_log_level level, const char *subsystem, const char *text, void *arg)
{
    static const ithaca_log_level levels[] = {[ITH_LOG_DEBUG] = ITHACA_DEBUG,
                                              [ITH_LOG_INFO] = ITHACA_INFO,
                                              [ITH_LOG_WARN] = ITHACA_WARN,
                                              [ITH_LOG_ERROR] = ITHACA_ERROR};
    (void)subsystem;
    (void)arg;
    user_log.log(user_log.arg, levels[level], text);
}

void ithaca_set_log(void (*log)(void *arg, ithaca_log_level level, const char *text), void *arg)
{
    user_log.log = log;
    user_log.arg = arg;
    ith_log_set_sink(log ? sink : NULL, NULL);
}

/* ---- training ---- */

static int on_poll(void *arg)
{
    const ithaca_train_hooks *h = arg;
    int asked = h->poll ? h->poll(h->arg) : 0;
    return (asked & ITHACA_STOP ? ITH_POLL_STOP : 0) | (asked & ITHACA_SAVE ? ITH_POLL_SAVE : 0);
}

static void on_progress(void *arg, const ith_report_row *row)
{
    const ithaca_train_hooks *h = arg;
    if (!h->progress)
        return;
    ithaca_progress p = {.step = row->step,
                         .total_steps = row->total_steps,
                         .epoch = row->epoch,
                         .is_eval = row->is_eval,
                         .loss = row->loss,
                         .grad_norm = row->is_eval ? 0 : row->grad_norm,
                         .learning_rate = row->is_eval ? 0 : row->learning_rate,
                         .tokens_per_s = row->tokens_per_s,
                         .mfu = row->is_eval ? (double)NAN : row->mfu,
                         .peak_bytes = row->peak_bytes,
                         .elapsed_s = row->elapsed_s};
    h->progress(h->arg, &p);
}

/* Training rows came by on_progress already, each step. */
static void on_row(void *arg, const ith_report_row *row)
{
    if (row->is_eval)
        on_progress(arg, row);
}

static void on_news(void *arg, const char *text)
{
    const ithaca_train_hooks *h = arg;
    if (h->news)
        h->news(h->arg, text);
}

static ith_status run(const ith_config *config, ithaca_train_hooks *hooks, ith_run_result *result,
                      ith_error *err)
{
    ith_trainer_hooks h = {on_poll, on_row, on_progress, on_news, hooks};
    ith_trainer t;
    for (int i = 0; i < ith_config_num_notes(config); i++)
        ith_log(ITH_LOG_INFO, "config", "%s", ith_config_note(config, i));
    ITH_TRY(ith_trainer_open(&t, config, false, &h, err));
    ith_status status = ith_trainer_store_config(config, err);
    if (status == ITH_OK)
        status = ith_trainer_run(&t, &h, result, err);
    ith_trainer_close(&t);
    return status;
}

ithaca_status ithaca_train(const char *config_path, const char *const *overrides, int num_overrides,
                           const ithaca_train_hooks *hooks, ithaca_train_result *out,
                           ithaca_error *err)
{
    ith_error e = {0};
    ith_config config;
    ith_run_result r;
    ithaca_train_hooks own = {0};
    if (hooks)
        own = *hooks;
    ith_status status = ith_config_load(&config, config_path, overrides, num_overrides, &e);
    if (status != ITH_OK)
        return ith_api_status(status, &e, err);
    status = run(&config, &own, &r, &e);
    ith_config_deinit(&config);
    if (status == ITH_OK && out)
        *out = (ithaca_train_result){.steps = r.steps,
                                     .skipped = r.skipped,
                                     .first_loss = r.first_loss,
                                     .last_loss = r.last_loss,
                                     .eval_loss = r.eval_loss,
                                     .seconds = r.seconds};
    if (status == ITH_OK && r.stopped)
        status = ith_fail(&e, ITH_ERR_INTERRUPTED,
                          "stopped after saving; go on with resume_from_checkpoint=auto");
    return ith_api_status(status, &e, err);
}
