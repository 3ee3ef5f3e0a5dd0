/* cmd_train.c - `ithaca train`: a configuration becomes a model directory. Step 1 of 8 of a
 * training step (train/step.h). */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "cli/commands.h"
#include "cli/launch.h"
#include "cli/terminal.h"
#include "cli/tables.h"
#include "train/trainer.h"

static volatile sig_atomic_t stop_wanted, save_wanted;

static void on_signal(int number)
{
    if (number == SIGUSR1) {
        save_wanted = 1;
        return;
    }
    if (stop_wanted) { /* asked twice: leave at once; what is on disk is whole */
        signal(number, SIG_DFL);
        raise(number);
    }
    stop_wanted = 1;
}

static void install_signals(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    sigaction(ITH_SIGNAL_STOP, &action, NULL);
}

static int poll_signals(void *arg)
{
    (void)arg;
    int bits = (stop_wanted ? ITH_POLL_STOP : 0) | (save_wanted ? ITH_POLL_SAVE : 0);
    save_wanted = 0;
    return bits;
}

static void clear_live_line(void)
{
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

static void on_text(void *arg, const char *text)
{
    (void)arg;
    clear_live_line();
    ith_log(ITH_LOG_INFO, "train", "%s", text);
}

/* The live line of a terminal; a log gets the rows only. */
static void on_progress(void *arg, const ith_report_row *row)
{
    (void)arg;
    if (!isatty(STDERR_FILENO))
        return;
    char text[256];
    ith_format_row(row, text, sizeof text);
    /* a wrapped line would not be cleared as a whole */
    fprintf(stderr, "\r\033[K%.*s", ith_terminal_columns(STDERR_FILENO, sizeof text) - 1, text);
    fflush(stderr);
}

static void on_row(void *arg, const ith_report_row *row)
{
    (void)arg;
    char text[256];
    ith_format_row(row, text, sizeof text);
    clear_live_line();
    ith_log(ITH_LOG_INFO, "train", "%s", text);
}

static ith_status train(const ith_config *config, ith_comm *world, ith_error *err)
{
    bool speaks = world->rank == 0;
    if (!speaks)
        ITH_TRY(ith_log_set_levels("error", err));
    ith_trainer_hooks hooks = {poll_signals, speaks ? on_row : NULL, speaks ? on_progress : NULL,
                               speaks ? on_text : NULL, NULL};
    ith_trainer t;
    ith_run_result result;
    for (int i = 0; speaks && i < ith_config_num_notes(config); i++)
        ith_log(ITH_LOG_INFO, "config", "%s", ith_config_note(config, i));
    ITH_TRY(ith_trainer_open_rank(&t, config, world, false, &hooks, err));
    ith_buf table = {0};
    ith_memory_table(&t, &table);
    if (speaks)
        ith_log(ITH_LOG_INFO, "train", "%s", table.data ? table.data : "");
    ith_buf_deinit(&table);
    ith_status status = speaks ? ith_trainer_store_config(config, err) : ITH_OK;
    status = ith_comm_agree(world, status, err);
    if (status == ITH_OK) {
        install_signals();
        status = ith_trainer_run(&t, &hooks, &result, err);
    }
    if (speaks)
        clear_live_line();
    if (status != ITH_OK && (t.alone || world->broken))
        ith_end_all_ranks(world, status, err);
    if (status == ITH_OK && result.stopped)
        status =
            ith_fail(err, ITH_ERR_INTERRUPTED,
                     "stopped by a signal after saving; go on with resume_from_checkpoint=auto");
    if (status == ITH_OK && speaks)
        printf("%lld step%s, loss %.4f -> %.4f, %.1f s; model and log in %s\n",
               (long long)result.steps, result.steps == 1 ? "" : "s", result.first_loss,
               result.last_loss, result.seconds, config->output_dir);
    ith_trainer_close(&t);
    return status;
}

static ith_status load_and_train(const ith_args *args, ith_comm *world, ith_error *err)
{
    ith_config config;
    ith_status status = ith_config_load(&config, args->positional[0], args->positional + 1,
                                        args->num_positional - 1, err);
    bool loaded = status == ITH_OK;
    status = ith_comm_agree(world, status, err);
    if (status != ITH_OK) {
        if (loaded)
            ith_config_deinit(&config);
        return status;
    }
    world->timeout_s = (double)config.dist_timeout;
    if (ith_config_ranks(&config) > 1 && !ith_comm_is_launched()) {
        status = ith_config_check_supported(&config, err);
        if (status == ITH_OK)
            status = ith_launch_ranks(ith_config_ranks(&config), "train", args->positional,
                                      args->num_positional, err);
    } else {
        status = train(&config, world, err);
    }
    ith_config_deinit(&config);
    return status;
}

static ith_status run_train(const ith_args *args, ith_error *err)
{
    ith_comm *world = NULL;
    ITH_TRY(ith_comm_open_world(&world, 0, err));
    ith_status status = load_and_train(args, world, err);
    if (status != ITH_OK && world->broken)
        ith_end_all_ranks(world, status, err);
    /* The failure is agreed: rank 0 tells it and gives the exit code. An exit code of another rank
     * would make the launcher end rank 0 before it has spoken. */
    if (world->rank > 0)
        status = ITH_OK;
    ith_comm_close(world);
    return status;
}

const ith_command ith_cmd_train = {
    .name = "train",
    .arguments = "CONFIG [key=value ...]",
    .summary = "Fine-tune a model",
    .details = "CONFIG is a file of LlamaFactory v1, dFactory or TRL (.yaml, .json); key=value "
               "replaces keys of it, nested ones with a dot. `ithaca help --config-markdown` lists "
               "all keys, `ithaca plan CONFIG` shows what they become.\n"
               "Writes to output_dir: the model as a Hugging Face directory, trainer_log.jsonl, "
               "loss_curve.svg, checkpoints.\n"
               "Several processes train together under mpirun, srun or torchrun, or with ranks=N "
               "(docs/parallel.md).\n"
               "SIGINT and SIGTERM save a checkpoint and stop; SIGUSR1 saves and goes on.\n",
    .min_positional = 1,
    .max_positional = -1,
    .takes_overrides = true,
    .run = run_train};
