/* trainer.c - the loop over optimizer steps.
 *
 * Invariants:
 *  1. A checkpoint is the state between two steps; nothing else is carried over.
 *  2. Files appear whole or not at all.
 *  3. A run that did no step is an error. */
#include "train/trainer.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "checkpoint/train_state.h"
#include "model/vision.h"
#include "train/schedule.h"
#include "train/diffusion.h"
#include "train/trainer_internal.h"
#include "train/verify.h"

typedef struct {
    ith_trainer *t;
    const ith_trainer_hooks *hooks;
    ith_run_report *report;
    ith_run_position at;
    double matmul_rate; /* FLOP/s; NaN unknown */
    double start_s;
    int64_t save_steps;    /* 0: only at the end */
    int64_t num_micro;     /* with tokens, of the running step, over all ranks: for diffusion */
    ith_verifier verifier; /* of `verify: true` */
    ith_run_result result;
} run;

static double seconds_of(clockid_t clock)
{
    struct timespec ts;
    clock_gettime(clock, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static double now_s(void)
{
    return seconds_of(CLOCK_MONOTONIC);
}

/* Seconds until now of a call that began at `clock` and `cpu`, as if its threads had had a core
 * each. */
static double undisturbed_s(const ith_session *s, double clock, double cpu)
{
    double elapsed = now_s() - clock,
           used = (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu) / ith_pool_threads(s->pool);
    return s->cuda ? elapsed : fmin(elapsed, used);
}

ith_status ith_measure_matmul_rate(ith_session *session, ith_dtype dtype, double *out)
{
    ith_ctx ctx = session->ctx;
    ctx.plan = NULL; /* memory of its own, given back */
    int64_t n = session->cuda ? 8192 : 1024, bytes = n * n * ith_dtype_bytes(dtype);
    void *mem[3] = {NULL, NULL, NULL};
    ith_status status = ITH_OK;
    double best = 0, end = 0;
    for (int i = 0; i < 3; i++) {
        ITH_TRY_OUT(ctx.device->alloc(ctx.device, bytes, &mem[i], ctx.err));
        ITH_TRY_OUT(ctx.device->fill(ctx.device, mem[i], 0x3c, bytes, ctx.err));
    }
    ith_tensor y = ith_tensor_2d(mem[0], dtype, n, n), x = ith_tensor_2d(mem[1], dtype, n, n),
               w = ith_tensor_2d(mem[2], dtype, n, n);
    end = now_s() + 0.4;
    for (int i = 0; i < 3 || now_s() < end; i++) {
        double clock = now_s(), cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
        ITH_TRY_OUT(ith_linear_forward(&ctx, y, x, w, false));
        ITH_TRY_OUT(ctx.device->sync(ctx.device, ctx.err));
        double rate = 2.0 * (double)n * (double)n * (double)n / undisturbed_s(session, clock, cpu);
        best = i > 0 && rate > best ? rate : best;
    }
    *out = best;
out:
    for (int i = 0; i < 3; i++)
        if (mem[i])
            ctx.device->free(ctx.device, mem[i]);
    return status;
}

static ith_report_row row_now(const run *r, double loss, double norm, double lr)
{
    const ith_unlogged *u = &r->at.unlogged;
    const ith_plan *plan = r->t->session.ctx.plan;
    int64_t bytes = 0;
    for (int c = 0; c < ITH_MEM_CLASSES; c++)
        bytes += c == ITH_MEM_HOST ? 0 : ith_plan_high(plan, (ith_mem_class)c);
    double s = u->seconds > 0 ? u->seconds : (double)NAN, rate = u->flops / s;
    return (ith_report_row){.step = r->at.step,
                            .total_steps = r->t->total_steps,
                            .epoch = r->at.epoch,
                            .loss = loss,
                            .grad_norm = norm,
                            .learning_rate = lr,
                            .tokens_per_s = (double)u->tokens / s,
                            .mfu = rate / fmax(rate, r->matmul_rate),
                            .step_ms = 1e3 * s / (double)ith_max_i64(u->steps, 1),
                            .tokens = u->tokens,
                            .labels = u->labels,
                            .peak_bytes = bytes,
                            .elapsed_s = now_s() - r->start_s,
                            .skipped = r->at.skipped};
}

static ith_status log_step(run *r, const ith_step_stats *stats, double lr)
{
    const ith_trainer_hooks *h = r->hooks;
    ith_unlogged *u = &r->at.unlogged;
    bool last = r->at.step >= r->t->total_steps;
    ith_report_row live = row_now(r, stats->loss, stats->grad_norm, lr);
    live.aux_loss = stats->aux_loss;
    if (h && h->progress)
        h->progress(h->arg, &live);
    if (r->at.step % ith_max_i64(r->t->config->logging_steps, 1) != 0 && !last)
        return ITH_OK;
    ith_report_row row = row_now(r, u->loss_sum / (double)u->steps, stats->grad_norm, lr);
    row.aux_loss = stats->aux_loss;
    if (u->seconds > 0) /* a step that was faster than the product says what the machine can do */
        r->matmul_rate = fmax(r->matmul_rate, u->flops / u->seconds);
    if (h && h->row)
        h->row(h->arg, &row);
    memset(u, 0, sizeof *u);
    return !r->report ? ITH_OK : ith_run_report_add(r->report, &row, r->t->session.ctx.err);
}

/* What ranks add up. */
typedef struct {
    double weight_sum, tokens, labels, flops, loss;
} totals;

static ith_status sum_over(ith_comm *comm, totals *s, ith_error *err)
{
    return ith_comm_all_reduce(comm, s, (int64_t)(sizeof *s / sizeof(double)), ITH_F64,
                               ITH_REDUCE_SUM, err);
}

/* A failure that the other ranks cannot know of: the call is, or may be, in the middle of an
 * exchange. */
static ith_status alone(ith_trainer *t, ith_status status)
{
    t->alone |= status != ITH_OK && t->mesh;
    return status;
}

/* Whether this rank counts a micro-batch: one of those that share it. */
static bool is_counted_here(const ith_trainer *t, const ith_micro_batch *b)
{
    return b->whole || !t->mesh || t->mesh->cp_rank == 0;
}

/* FLOPs of the tower for the images of a whole micro-batch. */
static double media_flops(const ith_trainer *t, const ith_micro_batch *b)
{
    double sum = 0;
    if (b->num_grids == 0)
        return 0;
    ith_vision_flops f = ith_vision_flops_of(&t->hf.vision, t->config->freeze_vision_tower);
    for (int64_t i = 0; i < b->num_grids; i++) {
        double frame = (double)b->grids[i].h * b->grids[i].w;
        sum += b->grids[i].t * frame * (f.patch + f.pair * frame);
    }
    return sum;
}

static void count_batch(const run *r, const ith_micro_batch *b, totals *mine)
{
    const ith_trainer *t = r->t;
    if (!is_counted_here(t, b))
        return;
    mine->weight_sum += b->weight_sum;
    mine->tokens += (double)b->num_tokens;
    mine->labels += (double)b->num_labels;
    mine->flops += t->noiser
                       ? ith_diffusion_flops(t->model, &t->noise, b)
                       : ith_model_flops(t->model, b->cu_seqlens, b->num_docs, b->num_labels).total;
    mine->flops += media_flops(t, b);
}

/* A pretrained model does better than chance: weights that were not found would not. */
static void tell_guessing(const run *r, double loss)
{
    double chance = log((double)r->t->hf.vocab_size);
    if (fabs(loss - chance) <= 0.01 * chance)
        ith_trainer_say(
            r->hooks,
            "the first loss, %.4f, is that of guessing (ln vocab_size = %.4f): fine for "
            "random weights, not for trained ones",
            loss, chance);
}

/* Micro-batch j of the current step as the model sees it: with its noise, of a diffusion model. */
static ith_status fill_micro(run *r, const ith_batch_step *bs, int64_t j, ith_micro_batch *out,
                             ith_error *err)
{
    ith_micro_batch clean;
    ITH_TRY(ith_batcher_fill(r->t->batcher, j, r->t->noiser ? &clean : out, err));
    return !r->t->noiser ? ITH_OK
                         : ith_noiser_apply(r->t->noiser, r->t->samples, &clean, bs->epoch,
                                            r->num_micro, out, err);
}

static ith_status count_micro(run *r, const ith_batch_step *bs, ith_error *err)
{
    r->num_micro = 0;
    for (int64_t j = 0; j < bs->num_micro; j++) {
        ith_micro_batch b;
        ITH_TRY(ith_batcher_fill(r->t->batcher, j, &b, err));
        r->num_micro += b.num_tokens > 0 && is_counted_here(r->t, &b);
    }
    return ITH_OK;
}

static ith_status noisy_weight(run *r, const ith_batch_step *bs, double *out, ith_error *err)
{
    double sum = 0;
    for (int64_t j = 0; j < bs->num_micro; j++) {
        ith_micro_batch b;
        ITH_TRY(ith_batcher_fill(r->t->batcher, j, &b, err));
        if (is_counted_here(r->t, &b))
            sum += ith_noiser_weight(r->t->noiser, r->t->samples, &b, bs->epoch, r->num_micro);
    }
    *out = sum;
    return ITH_OK;
}

/* C. Noise decides what is trained, so a diffusion model's is counted first. */
static ith_status weight_of_step(run *r, const ith_batch_step *bs, double *out, ith_error *err)
{
    ith_trainer *t = r->t;
    *out = bs->weight_sum;
    if (!t->noiser)
        return ITH_OK;
    ITH_TRY(ith_trainer_agree(t, count_micro(r, bs, err), err));
    if (t->mesh)
        ITH_TRY(alone(t, ith_comm_all_reduce(t->mesh->world, &r->num_micro, 1, ITH_I64,
                                             ITH_REDUCE_SUM, err)));
    ITH_TRY(ith_trainer_agree(t, noisy_weight(r, bs, out, err), err));
    return !t->mesh ? ITH_OK
                    : alone(t, ith_comm_all_reduce(t->mesh->world, out, 1, ITH_F64, ITH_REDUCE_SUM,
                                                   err));
}

static ith_status micro_batches(run *r, const ith_batch_step *bs, totals *mine, ith_error *err)
{
    ith_trainer *t = r->t;
    for (int64_t j = 0; j < bs->num_micro; j++) {
        ith_micro_batch b = {0};
        ITH_TRY(ith_trainer_agree(t, fill_micro(r, bs, j, &b, err), err));
        ITH_TRY(alone(t, ith_step_micro(t->step, &b)));
        count_batch(r, &b, mine);
    }
    return ITH_OK;
}

/* One optimizer step out of the batcher. */
static ith_status train_step(run *r, const ith_batch_step *bs, ith_error *err)
{
    ith_trainer *t = r->t;
    const ith_config *c = t->config;
    ith_unlogged *u = &r->at.unlogged;
    totals done = {0};
    double weight_sum = 0, t0 = now_s(),
           lr = ith_schedule_rate(&c->lr_scheduler, c->learning_rate, r->at.step, t->total_steps);
    ITH_TRY(weight_of_step(r, bs, &weight_sum, err));
    if (t->noiser && weight_sum <= 0)
        ith_trainer_say(r->hooks, "step %lld: no token is masked, nothing to learn in it",
                        (long long)r->at.step + 1);
    if (t->noiser && t->noise.per_micro_batch) /* the batches' weights are means already */
        weight_sum = 1;
    if (c->verify)
        ITH_TRY(ith_verify_begin(&r->verifier, err));
    ith_step_begin(t->step, weight_sum);
    ITH_TRY(micro_batches(r, bs, &done, err));
    if (c->verify)
        ITH_TRY(ith_verify_backward(&r->verifier, err));
    if (t->mesh)
        ITH_TRY(alone(t, sum_over(t->mesh->world, &done, err)));
    u->tokens += (int64_t)done.tokens;
    u->labels += (int64_t)done.labels;
    u->flops += done.flops;
    ith_adamw_hyper h = {(float)lr,           (float)c->optim.beta1,        (float)c->optim.beta2,
                         (float)c->optim.eps, (float)c->optim.weight_decay, r->at.updates + 1};
    ith_step_stats stats;
    ITH_TRY(alone(t, ith_step_reduce(t->step)));
    if (c->verify)
        ITH_TRY(ith_verify_reduce(&r->verifier, r->result.steps == 0, err));
    ITH_TRY(alone(t, ith_step_end(t->step, h, &stats)));
    if (c->verify)
        ITH_TRY(ith_verify_update(&r->verifier, err));
    u->seconds += now_s() - t0;
    u->steps++;
    u->loss_sum += stats.loss;
    r->at.step++;
    r->at.samples += bs->num_docs;
    double in_epoch =
        t->steps_per_epoch > 0 ? fmod((double)(r->at.step - 1), (double)t->steps_per_epoch) + 1 : 0;
    r->at.epoch = bs->epoch_end
                      ? (double)(bs->epoch + 1)
                      : (double)bs->epoch + in_epoch / (double)ith_max_i64(t->steps_per_epoch, 1);
    r->at.updates += !stats.skipped;
    r->at.skipped += stats.skipped;
    if (r->result.steps++ == 0)
        r->result.first_loss = stats.loss;
    if (r->at.step == 1)
        tell_guessing(r, stats.loss);
    r->result.last_loss = stats.loss;
    if (stats.skipped && c->nonfinite == ITH_NONFINITE_STOP)
        return ith_fail(err, ITH_ERR_RUN,
                        "step %lld: gradients are not finite (loss %g); nothing was updated in it",
                        (long long)r->at.step, stats.loss);
    if (stats.skipped)
        ith_trainer_say(r->hooks,
                        "step %lld: gradients are not finite, no update (%lld skipped so far)",
                        (long long)r->at.step, (long long)r->at.skipped);
    return ith_trainer_agree(t, log_step(r, &stats, lr), err);
}

/* Noise of evaluation: the same masks in every one. */
static ith_status fill_eval(const ith_trainer *t, int64_t j, ith_micro_batch *out, ith_error *err)
{
    ith_micro_batch clean;
    ITH_TRY(ith_batcher_fill(t->eval_batcher, j, t->noiser ? &clean : out, err));
    return !t->noiser ? ITH_OK
                      : ith_noiser_apply(t->noiser, t->eval_samples, &clean, ITH_EVAL_EPOCH_NOISE,
                                         1, out, err);
}

/* Mean loss per weight over the evaluation set. */
static ith_status evaluate(run *r, ith_error *err)
{
    ith_trainer *t = r->t;
    double t0 = now_s();
    totals sum = {0};
    ith_batch_step bs;
    ITH_TRY(ith_batcher_load(t->eval_batcher, t->eval_start, err));
    while (ith_batcher_next(t->eval_batcher, &bs)) {
        for (int64_t j = 0; j < bs.num_micro; j++) {
            ith_micro_batch b = {0};
            ITH_TRY(ith_trainer_agree(t, fill_eval(t, j, &b, err), err));
            ITH_TRY(alone(t, ith_step_eval(t->step, &b, &sum.loss)));
            count_batch(r, &b, &sum);
        }
    }
    if (t->mesh)
        ITH_TRY(alone(t, sum_over(t->mesh->world, &sum, err)));
    double mean = sum.weight_sum > 0 ? sum.loss / sum.weight_sum : (double)NAN;
    ith_report_row row = row_now(r, mean, 0, 0);
    row.is_eval = true;
    row.tokens = (int64_t)sum.tokens;
    row.labels = (int64_t)sum.labels;
    row.step_ms = 1e3 * (now_s() - t0);
    row.tokens_per_s = sum.tokens / (now_s() - t0);
    row.mfu = (double)NAN;
    r->result.eval_loss = mean;
    if (isnan(r->at.best_eval) || mean < r->at.best_eval) {
        r->at.best_eval = mean;
        r->at.best_step = r->at.step;
    }
    if (r->hooks && r->hooks->row)
        r->hooks->row(r->hooks->arg, &row);
    return r->report ? ith_run_report_add(r->report, &row, err) : ITH_OK;
}

static ith_status save(run *r, ith_error *err)
{
    double t0 = now_s();
    ith_status status = r->report ? ith_run_report_write(r->report, err) : ITH_OK;
    ITH_TRY(ith_trainer_agree(r->t, status, err));
    ITH_TRY(ith_trainer_save(r->t, &r->at, err));
    ith_trainer_say(r->hooks, "saved %s/checkpoint-%lld in %.1f s", r->t->config->output_dir,
                    (long long)r->at.step, now_s() - t0);
    return ITH_OK;
}

/* What the outside asks of any rank; all ranks get the same answer. */
static ith_status poll_all(run *r, int *asked, ith_error *err)
{
    int bits = r->hooks && r->hooks->poll ? r->hooks->poll(r->hooks->arg) : 0;
    int64_t each[2] = {bits & ITH_POLL_STOP, bits & ITH_POLL_SAVE};
    if (r->t->mesh)
        ITH_TRY(alone(
            r->t, ith_comm_all_reduce(r->t->mesh->world, each, 2, ITH_I64, ITH_REDUCE_MAX, err)));
    *asked = (int)(each[0] | each[1]);
    return ITH_OK;
}

static ith_status loop(run *r, ith_error *err)
{
    ith_trainer *t = r->t;
    const ith_config *c = t->config;
    while (r->at.step < t->total_steps) {
        ith_batch_step bs;
        if (!ith_batcher_next(t->batcher, &bs))
            break;
        ITH_TRY(train_step(r, &bs, err));
        bool last = r->at.step >= t->total_steps;
        bool eval_due = c->eval_strategy == ITH_EVAL_EPOCH ? bs.epoch_end
                                                           : (c->eval_strategy == ITH_EVAL_STEPS &&
                                                              r->at.step % c->eval_steps == 0);
        if (t->eval_batcher && (eval_due || (last && c->eval_strategy != ITH_EVAL_NO)))
            ITH_TRY(ith_trainer_agree(t, evaluate(r, err), err));
        int asked = 0;
        ITH_TRY(poll_all(r, &asked, err));
        bool due = r->save_steps > 0 && r->at.step % r->save_steps == 0;
        if (due || (asked && !last))
            ITH_TRY(save(r, err));
        if ((asked & ITH_POLL_STOP) && !last) {
            r->result.stopped = true;
            return ITH_OK;
        }
    }
    return ITH_OK;
}

/* What an earlier end left half written or half removed, and checkpoints beyond the limit. A save
 * would take them along, but a run that was at its end saves no more. */
static void remove_leftovers(const ith_trainer *t, const ith_trainer_hooks *hooks)
{
    ith_error err = {0};
    const ith_config *c = t->config;
    int64_t limit = c->save_total_limit == ITH_CONFIG_UNSET ? 0 : c->save_total_limit;
    if (ith_trainer_is_first(t) && ith_train_state_rotate(c->output_dir, limit, &err) != ITH_OK)
        ith_trainer_say(hooks, "old checkpoints stay: %s", err.text);
}

/* Weights from the model or from a checkpoint, as the config asks. */
static ith_status begin(run *r, ith_error *err)
{
    ith_trainer *t = r->t;
    const char *from = t->config->resume_from_checkpoint;
    ith_buf path = {0};
    ith_status status = ITH_OK;
    if (from && strcmp(from, "auto") == 0) {
        status = ith_train_state_find_latest(t->config->output_dir, &path, err);
        if (status == ITH_OK && path.len == 0)
            ith_trainer_say(r->hooks, "no complete checkpoint in %s: starting anew",
                            t->config->output_dir);
    } else if (from) {
        ith_buf_puts(&path, from);
    }
    if (status == ITH_OK)
        status = ith_buf_check(&path, "resume_from_checkpoint", err);
    if (status == ITH_OK && path.len) {
        status = ith_trainer_resume(t, path.data, &r->at, err);
        if (status == ITH_OK)
            ith_trainer_say(r->hooks, "resumed %s", path.data);
        if (status == ITH_OK && strcmp(from, "auto") == 0) /* then it is the newest one */
            remove_leftovers(t, r->hooks);
    } else if (status == ITH_OK) {
        status = ith_trainer_load_weights(t, err);
    }
    ith_buf_deinit(&path);
    return status;
}

ith_status ith_trainer_run(ith_trainer *t, const ith_trainer_hooks *hooks, ith_run_result *out,
                           ith_error *err)
{
    const ith_config *c = t->config;
    run r = {.t = t, .hooks = hooks, .start_s = now_s(), .matmul_rate = (double)NAN};
    r.at.best_eval = r.result.eval_loss = r.result.first_loss = r.result.last_loss = (double)NAN;
    if (c->save_steps != ITH_CONFIG_UNSET)
        r.save_steps = c->save_steps;
    if (!isnan(c->save_epochs))
        r.save_steps = ith_max_i64(1, (int64_t)((double)t->steps_per_epoch * c->save_epochs));
    ITH_TRY(ith_trainer_open_output(t, err));
    if (t->matmul_rate <= 0)
        ITH_TRY(ith_trainer_agree(
            t, ith_measure_matmul_rate(&t->session, t->model->dtype, &t->matmul_rate), err));
    r.matmul_rate = t->matmul_rate;
    if (t->mesh) /* measured on all at once, as they will run */
        ITH_TRY(alone(t, ith_comm_all_reduce(t->mesh->world, &r.matmul_rate, 1, ITH_F64,
                                             ITH_REDUCE_SUM, err)));
    ITH_TRY(ith_trainer_agree(t, begin(&r, err), err));
    ITH_TRY(alone(t, ith_model_refresh_weights(t->model, &t->session.ctx)));
    ith_status status = ITH_OK;
    if (ith_trainer_is_first(t))
        status = ith_run_report_open(&r.report, c->output_dir, r.at.step,
                                     c->report_to & ITH_REPORT_TENSORBOARD, err);
    status = ith_trainer_agree(t, status, err);
    if (status == ITH_OK && c->verify)
        status = ith_verifier_open(&r.verifier, t, hooks, err);
    r.start_s = now_s();
    if (status == ITH_OK)
        status = loop(&r, err);
    ith_verifier_close(&r.verifier);
    if (status == ITH_OK && r.at.step == 0)
        status = ith_fail(err, ITH_ERR_RUN, "no optimizer step was done");
    if (status == ITH_OK && !r.result.stopped) {
        status = ith_trainer_export(t, c->output_dir, err);
        ith_trainer_say(
            hooks, status == ITH_OK ? "wrote the model to %s" : "could not write the model to %s",
            c->output_dir);
    }
    ith_status closed =
        r.report ? ith_run_report_close(r.report, status == ITH_OK ? err : NULL) : ITH_OK;
    if (status == ITH_OK)
        status = ith_trainer_agree(t, closed, err);
    r.result.seconds = now_s() - r.start_s;
    r.result.skipped = r.at.skipped;
    *out = r.result;
    return status;
}
