/* run_report.h - what a run leaves for people and programs in its output folder.
 *
 *     trainer_log.jsonl     one JSON object per logged step or evaluation, with the keys of
 *                           LlamaFactory (epoch, step, loss, grad_norm, learning_rate) and ours
 *     trainer_state.json    global_step, epoch, log_history, ..: as transformers writes it
 *     runs/events.out.tfevents.*    TensorBoard scalars, when asked for
 *     loss_curve.svg        loss, its running mean, evaluation loss, learning rate
 *
 * The log is appended and flushed at once; state and curve are written at saves and at close.
 *
 * After a resume, rows of later steps than the resumed one are removed from the log (they will come
 * again). */
#ifndef ITH_REPORT_RUN_REPORT_H
#define ITH_REPORT_RUN_REPORT_H

#include "base/mem.h"

typedef struct {
    int64_t step, total_steps; /* optimizer steps; total 0: unknown */
    double epoch;              /* with fraction */
    bool is_eval;
    double loss;     /* training: mean over the steps since the last row; evaluation: eval_loss */
    double aux_loss; /* trained beside loss: balance of experts, confidence; 0: nothing is */
    double grad_norm, learning_rate;
    double tokens_per_s,
        mfu; /* mfu: share of the machine's measured matmul rate, 0..1; NaN: unknown */
    double step_ms;
    int64_t tokens, labels; /* of the steps since the last row */
    int64_t peak_bytes;     /* device memory of the plan in use */
    double elapsed_s;       /* since the start of the run */
    int64_t skipped;        /* steps skipped for non-finite gradients, so far */
} ith_report_row;

typedef struct ith_run_report ith_run_report;

/* resume_step: 0 starts anew (an old log is replaced), else the step the run goes on from. */
ith_status ith_run_report_open(ith_run_report **out, const char *output_dir, int64_t resume_step,
                               bool tensorboard, ith_error *err);
ith_status ith_run_report_add(ith_run_report *report, const ith_report_row *row, ith_error *err);
/* Writes trainer_state.json and loss_curve.svg for the rows so far. */
ith_status ith_run_report_write(ith_run_report *report, ith_error *err);
/* Writes, closes; NULL is fine. */
ith_status ith_run_report_close(ith_run_report *report, ith_error *err);

#endif
