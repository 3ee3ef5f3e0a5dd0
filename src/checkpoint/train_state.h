/* train_state.h - training checkpoints: OUTPUT_DIR/checkpoint-STEP/.
 *
 *     trainer_state.json       global_step, epoch, samples_seen, best_metric .., state
 *     GROUP.safetensors        one set of files per group of tensors (weights, adam_m, adam_v ..)
 *     hf_model/                a Hugging Face directory, when asked for
 *     CHECKPOINT_COMPLETE      written last: names and sizes of all files above
 *
 * Invariants:
 *  1. A save writes into checkpoint-STEP.tmp-PLACE-PID (file.h), syncs, writes
 *     CHECKPOINT_COMPLETE, and renames; whatever moment it is killed at, the last complete
 *     checkpoint stays.
 *  2. A checkpoint counts only when CHECKPOINT_COMPLETE is there and every file it lists has its
 *     size.
 *  3. The newest complete checkpoint is never deleted.
 *  4. Directories that this program did not write are never deleted, whatever their names, nor
 *     what another process is writing.
 *  5. Only rank 0 makes, renames and deletes directories; files hold whole tensors by name,
 *     whichever ranks wrote their parts. */
#ifndef ITH_CHECKPOINT_TRAIN_STATE_H
#define ITH_CHECKPOINT_TRAIN_STATE_H

#include "base/json.h"
#include "checkpoint/safetensors.h"

typedef struct {
    const char *name;
    ith_dtype dtype;
    int ndim;
    int64_t shape[ITH_ST_MAX_DIMS];
    void *data; /* contiguous; read by save, filled by load */
} ith_state_tensor;

typedef struct {
    const char *name; /* file stem: "master", "adam_m"; [a-z0-9_]+ */
    const ith_state_tensor *tensors;
    int64_t count;
    /* For tensors without data (they live on other ranks, or on a device): puts this rank's part of
     * tensor i. NULL when all have data, which rank 0 writes. */
    ith_status (*put)(void *arg, int64_t i, ith_st_writer *writer, ith_error *err);
    void *put_arg;
} ith_state_group;

typedef struct {
    int64_t global_step, samples_seen;
    double epoch;
    bool has_best;
    double best_metric;
    int64_t best_global_step;
} ith_train_progress;

typedef struct {
    ith_train_progress progress;
    const json_t *state; /* anything the caller needs to resume; NULL: none. Borrowed */
    const ith_state_group *groups;
    int num_groups;
    int64_t save_total_limit; /* complete checkpoints kept; 0: all */
    int64_t max_shard_bytes;  /* 0: the default of safetensors.h */
    ith_comm *ranks;          /* that save together; NULL: this process alone */
    /* save_ckpt_as_hf: makes a model directory at `dir` (collective, failures agreed); NULL: none
     */
    ith_status (*write_hf)(void *arg, const char *dir, ith_error *err);
    void *write_hf_arg;
} ith_train_save;

/* Saves OUTPUT_DIR/checkpoint-<global_step>, replacing one of the same step, then rotates. With
 * ranks: all call it, and return the failure of the lowest failing one. */
ith_status ith_train_state_save(const char *output_dir, const ith_train_save *save, ith_error *err);
/* Path of the newest complete checkpoint into `path`; empty when there is none. Damaged ones are
 * passed over with a warning (log subsystem "checkpoint"). */
ith_status ith_train_state_find_latest(const char *output_dir, ith_buf *path, ith_error *err);
/* Fails, naming the file, unless the checkpoint at `path` is complete. */
ith_status ith_train_state_check(const char *path, ith_error *err);
/* Checks, then reads progress and *state (caller frees with json_decref; NULL: not wanted) and
 * fills the data of every group. Names, dtypes and shapes must be exactly those of the files.
 * Groups on disk that are not asked for are left alone. On failure tensors may be partly filled. */
ith_status ith_train_state_load(const char *path, const ith_state_group *groups, int num_groups,
                                ith_train_progress *progress, json_t **state, ith_error *err);
/* The files of one group, for callers that read slices. */
ith_status ith_train_state_open_group(ith_st_reader **out, const char *path, const char *group,
                                      ith_error *err);
/* Deletes what a killed save left, incomplete checkpoints, then the oldest complete ones beyond
 * `limit` (0: none). ith_train_state_save does this by itself. */
ith_status ith_train_state_rotate(const char *output_dir, int64_t limit, ith_error *err);

#endif
