/* trainer.h - a whole run: open everything, loop over optimizer steps, evaluate, save, resume,
 * export.
 *
 * The run is a function of its config: bit-equal when repeated on the same machine and layout, and
 * when interrupted and resumed. Errors of the request come before any weight is read. */
#ifndef ITH_TRAIN_TRAINER_H
#define ITH_TRAIN_TRAINER_H

#include "config/config.h"
#include "data/noise.h"
#include "kernels/session.h"
#include "report/run_report.h"
#include "train/step.h"

/* What the outside asks for between two steps. */
enum { ITH_POLL_STOP = 1, ITH_POLL_SAVE = 2 };

typedef struct {
    int (*poll)(void *arg); /* bits above; NULL: never */
    void (*row)(
        void *arg,
        const ith_report_row *row); /* every logged step and evaluation; NULL: nobody looks */
    void (*progress)(void *arg, const ith_report_row *row); /* every step, for a live line; NULL */
    void (*text)(void *arg,
                 const char *text); /* one line of news: "loading ...", "saved ..."; NULL */
    void *arg;
} ith_trainer_hooks;

/* Everything that is open during a run. `ith_trainer_open` without weights serves `ithaca plan` as
 * well. */
typedef struct {
    const ith_config *config;
    ith_config_layout layout;
    ith_hf_config hf;
    ith_tokenizer *tokenizer;
    ith_chat *chat;
    ith_media *media;                    /* of a model that sees; NULL: it reads text only */
    ith_samples *samples, *eval_samples; /* eval_samples may be NULL, or samples when split */
    ith_batcher *batcher, *eval_batcher;
    ith_noise_options noise; /* of a diffusion model */
    ith_noiser *noiser;      /* NULL: not one */
    int64_t *train_subset, *eval_subset;
    int64_t num_held_out; /* samples that eval_split_ratio holds out */
    json_t *eval_start;   /* state of eval_batcher before its first step */
    ith_session session;
    ith_pool *data_pool; /* threads that prepare data; NULL: those of the session */
    ith_model *model;
    ith_step *step;
    int64_t total_steps, steps_per_epoch;
    double matmul_rate; /* FLOP/s of this machine; 0: ith_trainer_run measures it */
    /* many ranks */
    ith_mesh mesh_store;
    const ith_mesh *mesh; /* NULL: one rank */
    int64_t links_bytes;  /* of the device, beside the plan, that exchanges between GPUs take */
    bool alone;           /* a failure between fixed points: the other ranks do not know of it */
} ith_trainer;

/* Config checks, model config, tokenizer, data, batches, memory plan. plan_only: no memory is
 * taken, no device needed. On failure everything is closed. */
ith_status ith_trainer_open(ith_trainer *t, const ith_config *config, bool plan_only,
                            const ith_trainer_hooks *hooks, ith_error *err);
/* The same on one rank of a job.
 * world: the ranks of the job, borrowed, NULL for one. All of them make the same calls; failures
 * are agreed at fixed points, so that every rank returns that of the lowest failing rank. A failure
 * in between sets `alone`: end the job (ith_comm_abort). Hooks of rank 0 speak; the others only
 * poll. */
ith_status ith_trainer_open_rank(ith_trainer *t, const ith_config *config, ith_comm *world,
                                 bool plan_only, const ith_trainer_hooks *hooks, ith_error *err);
/* A plan without data: one document of `tokens` tokens, every row labelled, on rank 0 of the job
 * that the config describes. hf_text: config.json (NULL: that of config->model). Nothing but the
 * step is there then. Diffusion models, whose batches depend on their noise, are refused. */
ith_status ith_trainer_open_document(ith_trainer *t, const ith_config *config, const char *hf_text,
                                     int64_t tokens, ith_error *err);
/* FLOP of an optimizer step, all ranks together, on average over an epoch; nothing is recomputed.
 */
ith_flops ith_trainer_step_flops(const ith_trainer *t);
/* "data: 17 samples (4 held out), ..", a line without its end. */
void ith_trainer_put_data(const ith_trainer *t, ith_buf *out);
void ith_trainer_close(ith_trainer *t);

typedef struct {
    int64_t steps, skipped;
    double first_loss, last_loss, eval_loss; /* NaN when there is none */
    bool stopped;                            /* by ITH_POLL_STOP, after saving */
    double seconds, tokens_per_s;
} ith_run_result;

/* The resolved config as output_dir/ithaca_config.yaml: what the run was, for people and for a
 * rerun. */
ith_status ith_trainer_store_config(const ith_config *config, ith_error *err);

/* Reads weights or resumes, trains, writes the model to output_dir. */
ith_status ith_trainer_run(ith_trainer *t, const ith_trainer_hooks *hooks, ith_run_result *out,
                           ith_error *err);

/* FLOP/s of matrix products that this ctx reaches on a large shape, measured (about half a second).
 * Of the CPU by the time its threads run, not by the clock: what others take from them is no
 * property of the machine. */
ith_status ith_measure_matmul_rate(ith_session *session, ith_dtype dtype, double *out);

#endif
