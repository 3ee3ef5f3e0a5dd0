/* batching.h - which samples make which optimizer step, and their packed arrays.
 *
 * One optimizer step is a list of micro-batches. How samples are grouped follows LlamaFactory v1
 * (m = micro_batch_size, C = cutoff_len, A = grad_accum):
 *   normal, padding_free   A micro-batches of m samples
 *   dynamic_batching       samples in order while longest x count <= C*m; a micro-batch that fills
 *                          the budget closes at once
 *   dynamic_padding_free   samples in order while their sum <= C*m; closed by the sample that does
 *                          not fit
 *   packing                best-fit decreasing into micro-batches of C*m tokens, over windows of
 *                          pack_window samples; the order of micro-batches is shuffled
 * Whatever the grouping, a micro-batch is laid out packed: documents one after the other, no pad
 * tokens, borders in cu_seqlens, positions from 0 in each document, labels shifted per document.
 *
 * Order. The permutation of an epoch depends on (seed, epoch) alone, and so do the micro-batches; a
 * step is the next A * D of them, whatever D is. batch_deal.h deals them out to D groups of ranks
 * so that all have about as much work. Every rank has as many micro-batches in a step; some may be
 * empty (num_tokens 0).
 *
 * Ends. Without carry_over an epoch ends with a step of what is left: fewer micro-batches, or a
 * smaller one. Its gradient is right because weights are divided by the sum over the step, so
 * nothing is thrown away (LlamaFactory drops the rest). With carry_over (dynamic strategies under
 * max_steps, as LlamaFactory) a micro-batch may go on with the first samples of the next epoch.
 *
 * Media. A micro-batch carries the patches and grids of its images and videos, in the order of
 * their tokens, and three position rows. Files are read when it is filled, on the threads of the
 * pool; decoders allocate while they work.
 *
 * Resume. The state is small JSON; a batcher that loads it gives exactly what the other would have
 * given. Without media, no allocation after create. */
#ifndef ITH_DATA_BATCHING_H
#define ITH_DATA_BATCHING_H

#include "data/samples.h"
#include "image/grid.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Time of a rank, in FLOPs, for a document of n tokens: linear n + quadratic n^2, and patch p +
 * pair p^2 for each frame of p patches in it; cut over cp_size ranks, (that + exchange n) / cp_size.
 * round: for each micro-batch besides. */
typedef struct {
    double linear, quadratic, exchange, round;
    double patch, pair;
} ith_batch_work;

typedef struct {
    ith_batching strategy;
    int64_t micro_batch_size, cutoff_len, grad_accum;
    int64_t dp_rank, dp_size; /* groups of ranks; 0 of 1 for a single process */
    int64_t cp_rank, cp_size; /* ranks of a group; size 0: one */
    ith_batch_work work;      /* all 0: by tokens */
    bool keep_together;       /* a mean is taken over each micro-batch: its samples stay in it */
    ith_cp_whole whole;       /* documents of a slice's tokens that stay on one rank */
    /* Most tokens of a document of so many (noise.h), not less for more: limits, and who computes
     * what, go by these. NULL: the same. */
    int64_t (*padded)(const void *arg, int64_t tokens);
    const void *padded_arg;
    bool no_rows; /* documents are listed, their ids, positions, labels and weights not set */
    uint64_t seed;
    bool shuffle;
    bool carry_over;
    int64_t num_epochs;    /* 0: endless */
    int64_t pack_window;   /* samples; 0: 8192 */
    const int64_t *subset; /* entries to use, ascending; NULL: all. Copied. */
    int64_t num_subset;
    const ith_media *media; /* reads images and videos; NULL: micro-batches carry none */
    ith_pool *pool;         /* for them; may be NULL */
    /* Rows of a micro-batch of `tokens` that this rank works on: two ranges [begin, end) that do
     * not overlap. Of the others nothing is read, and ids, positions, labels and weights are not
     * set. NULL: all. */
    void (*own_rows)(const void *arg, int64_t tokens, int64_t ranges[4]);
    const void *own_arg;
    /* Ranks that share a micro-batch's frames out (grid.h): only what has frames of the own share
     * is read. 0 ranks: everything. */
    int64_t media_rank, media_ranks;
} ith_batcher_options;

/* Training batches of a config. layout gives dp_size and grad_accum. */
ith_batcher_options ith_batcher_options_from(const ith_config *config,
                                             const ith_config_layout *layout, int64_t dp_rank);
/* One pass in order without shuffling, for evaluation. */
ith_batcher_options ith_batcher_eval_options(const ith_config *config,
                                             const ith_config_layout *layout, int64_t dp_rank);

/* All memory belongs to the batcher and lasts until the next fill. T = num_tokens. */
typedef struct {
    int64_t num_tokens, num_docs, num_labels; /* num_labels: rows with a target */
    int32_t *ids;                             /* [T] */
    int32_t *position_ids;                    /* [T] from 0 in each document */
    int32_t *labels;     /* [T] target of row t, or -100; -100 in the last row of a document */
    int32_t *cu_seqlens; /* [num_docs + 1] */
    float *weights;      /* [T] weight of the target of row t, 0 without one */
    int64_t *sample;     /* [num_docs] entry number */
    double weight_sum;   /* of weights */
    bool whole;          /* of this rank alone; else its group shares it */
    int64_t num_read;    /* ids that were read for it */
    int32_t *noisy;      /* [num_docs] diffusion (noise.h): first rows that are noisy; else NULL */
    /* media; mrope NULL: none of it */
    int32_t *mrope;        /* [3,T] positions of time, height, width */
    const int32_t *frames; /* first row of each frame of them, in order (media.h) */
    const float *pixels;   /* patches of all images and videos, in the order of their tokens:
                              [patches, patch width]; of items that other ranks read only room */
    const ith_grid *grids; /* [num_grids] */
    int64_t num_grids;
} ith_micro_batch;

/* Most that one micro-batch, or one step of a rank, can hold, in any epoch; tokens are padded. */
typedef struct {
    int64_t max_tokens, max_docs, max_labels; /* of a micro-batch */
    int64_t max_doc_tokens;                   /* of a document */
    int64_t max_whole_tokens;                 /* of a micro-batch of one rank alone; 0: none */
    int64_t max_micro;                        /* micro-batches of a step */
    /* media of a micro-batch: items, patches, temporal patches, patches of one of these; of one of
     * a rank alone */
    int64_t max_grids, max_patches, max_segments, max_segment_patches;
    int64_t max_whole_patches, max_whole_segments;
} ith_batch_limits;

/* One optimizer step. Sums are over all micro-batches of all ranks. */
typedef struct {
    int64_t step;      /* from 0, over the whole run */
    int64_t epoch;     /* from 0, in which the step began */
    int64_t num_micro; /* of each rank */
    int64_t num_docs, num_tokens, num_labels;
    double weight_sum; /* C of the one gradient rule */
    bool epoch_end;    /* the last step of its epoch */
} ith_batch_step;

typedef struct ith_batcher ith_batcher;

/* samples must outlive the batcher. */
ith_status ith_batcher_create(ith_batcher **out, const ith_samples *samples,
                              const ith_batcher_options *options, ith_error *err);
void ith_batcher_destroy(ith_batcher *batcher); /* NULL is fine */
ith_batch_limits ith_batcher_limits(const ith_batcher *batcher);
/* Limits that hold for any data: known before the data is read. */
ith_batch_limits ith_batcher_limits_bound(const ith_batcher_options *options);

/* Optimizer steps of the first epoch (with carry_over: rounded up), and of all num_epochs (0 when
 * endless). Every rank gets the same. */
int64_t ith_batcher_steps_per_epoch(const ith_batcher *batcher);
int64_t ith_batcher_total_steps(const ith_batcher *batcher);

/* Another one than that of the options, before the first step. */
void ith_batcher_set_work(ith_batcher *batcher, ith_batch_work work);
/* Moves to the next step. False at the end of the last epoch. */
bool ith_batcher_next(ith_batcher *batcher, ith_batch_step *step);
/* Arrays of micro-batch j of the current step. Fails when the cache is damaged, or an image or
 * video cannot be read any more. */
ith_status ith_batcher_fill(ith_batcher *batcher, int64_t j, ith_micro_batch *out, ith_error *err);

/* Position after the current step as a JSON object (new), and back. Loading fails with one line
 * when data or settings are other ones than those of the state. */
ith_status ith_batcher_save(const ith_batcher *batcher, json_t **out, ith_error *err);
ith_status ith_batcher_load(ith_batcher *batcher, const json_t *state, ith_error *err);

/* How full the micro-batches of one epoch are. */
typedef struct {
    int64_t num_micro, num_docs, num_tokens, num_steps;
    int64_t capacity;      /* tokens a micro-batch may hold */
    int64_t padded_tokens; /* what padding to the longest would compute */
    double efficiency;     /* num_tokens / (num_micro * capacity) */
    double pad_efficiency; /* num_tokens / padded_tokens */
    int64_t sum_squares;   /* of document lengths: attention work */
    /* work of the busiest rank, summed over rounds: with micro-batches as they come, every document
     * cut over its group, and as they are dealt; of each rank, if it were even */
    double work_in_order, work_dealt, work_even;
} ith_batch_report;
/* Of epoch 0. The position stays; the step that was current is not any more. */
ith_batch_report ith_batcher_report(ith_batcher *batcher);

#ifdef __cplusplus
}
#endif
#endif
