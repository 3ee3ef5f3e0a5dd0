/* trainer_internal.h - parts of trainer.c. */
#ifndef ITH_TRAIN_TRAINER_INTERNAL_H
#define ITH_TRAIN_TRAINER_INTERNAL_H

#include "train/trainer.h"

/* Sums since the last logged row. */
typedef struct {
    double loss_sum, seconds, flops;
    int64_t steps, tokens, labels;
} ith_unlogged;

/* Where a run stands between two steps; all of it is saved. */
typedef struct {
    int64_t step;    /* optimizer steps done, skipped ones included */
    int64_t updates; /* AdamW's t: real updates */
    int64_t samples, skipped;
    double epoch;
    double best_eval; /* NaN: none yet */
    int64_t best_step;
    ith_unlogged unlogged;
} ith_run_position;

void ith_trainer_say(const ith_trainer_hooks *hooks, const char *fmt, ...) ITH_PRINTF(2, 3);

/* A fixed point: every rank brings its status, all get that of the lowest failing rank. */
ith_status ith_trainer_agree(const ith_trainer *t, ith_status status, ith_error *err);
/* Rank 0 speaks, and writes what no other rank has a part of. */
static inline bool ith_trainer_is_first(const ith_trainer *t)
{
    return !t->mesh || !t->mesh->world || t->mesh->world->rank == 0;
}

/* The ranks of the job; NULL: one. */
static inline ith_comm *ith_trainer_ranks(const ith_trainer *t)
{
    return t->mesh ? t->mesh->world : NULL;
}

/* Makes output_dir; every rank must see what rank 0 writes there, and half-written files of killed
 * runs go. */
ith_status ith_trainer_open_output(const ith_trainer *t, ith_error *err);

/* Weights from the model directory. */
ith_status ith_trainer_load_weights(ith_trainer *t, ith_error *err);
/* OUTPUT_DIR/checkpoint-<step>, atomically. Of all ranks, like ith_trainer_export: each writes what
 * it has, failures are agreed. */
ith_status ith_trainer_save(ith_trainer *t, const ith_run_position *at, ith_error *err);
/* path: a checkpoint directory. */
ith_status ith_trainer_resume(ith_trainer *t, const char *path, ith_run_position *at,
                              ith_error *err);
/* A complete Hugging Face directory at `dir`. */
ith_status ith_trainer_export(ith_trainer *t, const char *dir, ith_error *err);

#endif
