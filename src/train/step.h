/* step.h - one optimizer step: micro-batches, accumulate, clip, update. Follow it in eight files:
 *
 *  1. cli/cmd_train.c     config, memory plan, open everything
 *  2. train/step.c        micro-batches, accumulate, clip, update
 *  3. data/batching.c     tokens, labels, positions, cu_seqlens of the next micro-batch
 *  4. model/qwen3.c       forward downwards; backward below it, in mirrored order
 *  5. train/chunk_loss.c  head and cross entropy in chunks, f32 gradient sums
 *  6. kernels/ops.h       what each operator computes; dispatch.c checks shapes and gives scratch
 *  7. kernels/cpu, cuda   the fast operators
 *  8. base/plan.c         the memory all of it lives in
 *
 * The one gradient rule: seeds are weight / C, C the sum of weights over the whole optimizer step,
 * all micro-batches and ranks; gradients are summed. So loss, norm and update do not depend on how
 * the step was cut. */
#ifndef ITH_TRAIN_STEP_H
#define ITH_TRAIN_STEP_H

#include "data/batching.h"
#include "kernels/blanks.h"
#include "model/model.h"
#include "model/vision_buffers.h"
#include "train/chunk_loss.h"

typedef struct {
    const ith_mesh *mesh; /* borrowed; NULL: one rank */
    int zero_stage;       /* 1: optimizer cut among the ranks; 2: gradients too; 3: weights too */
    bool accumulates;     /* several micro-batches a step: gradients of stage 2 stay whole, and are
                             summed once a step, where the plan has room (model->zero_stage 1) */
    /* of a micro-batch; under context parallelism of the whole one, which the group shares */
    int64_t max_tokens, max_docs, max_labels, max_doc_tokens;
    int64_t max_whole_tokens; /* of a micro-batch of one rank alone, at most a slice; 0: none */
    ith_vision_limits vision; /* of a model with a tower */
    int64_t chunk_rows;       /* rows of logits at a time; 0: chosen */
    bool training;            /* false: evaluation only, no gradients, no optimizer */
    bool evaluates;           /* ith_step_eval will be called between steps */
    bool fp32_master;         /* f32 copy of bf16 weights (ignored when the model is f32) */
    bool bf16_moments;        /* m, v in bf16 */
    int keep;                 /* ith_keep, or -1: the fastest that fits memory_limit */
    int64_t memory_limit;     /* bytes on the device; 0: what is free there */
    float max_grad_norm;      /* <= 0: no clipping */
    uint64_t seed;            /* of stochastic rounding */
    ith_linear_cp linear_cp;  /* how linear layers share a sequence */
    int64_t block;            /* of the attention mask, see ith_seqs; 0: causal */
    bool noisy;               /* batches are [noisy; clean] */
    bool bidirectional;       /* rows see their whole document */
    float confidence_beta;    /* of confidence-aware training; 0: off */
    bool mean_of_right;       /* its mean is over the right rows of a micro-batch (chunk_loss.h) */
    bool updates_first;       /* no update runs beside the next forward walk: the same numbers */
} ith_step_config;

typedef struct {
    double loss;      /* sum of weight * cross entropy / C over the step */
    double grad_norm; /* before clipping */
    double aux_loss; /* what is trained beside loss: load balancing loss times its coefficient, mean
                        over the micro-batches; confidence loss times its own */
    bool skipped;    /* non-finite gradients: nothing was updated */
} ith_step_stats;

typedef struct ith_step {
    ith_model *model;
    ith_ctx *ctx;
    ith_step_config config;
    /* what the plan chose, from the last layer down; the rest keeps its input on the host */
    int64_t layers_keep_all, layers_keep_attention, layers_keep_input;
    ith_mesh alone;     /* of micro-batches of one rank */
    bool passes_states; /* the model does, where ranks share a sequence */
    ith_shard shard;
    ith_blanks blanks; /* parameters; none where gradients are cut among the ranks */
    int64_t *blocks;   /* borders of ith_model_blocks; NULL: updates do not run beside */
    /* flat optimizer buffers, whole or (zero_stage > 0) this rank's shard; master absent for f32
     * models */
    ith_tensor master, m, v;
    /* device: batch, accumulators */
    ith_batch batch;
    ith_vision_buffers vision;
    ith_confidence confidence;
    ith_tensor ids, position_ids, group_position_ids, cu_seqlens, noisy, rows, labels, seeds,
        row_loss;
    ith_tensor slice_lists; /* of a model that passes states */
    int32_t *host_slice_lists;
    ith_tensor loss_sum, balance_sum, sumsq, norm, scale;
    /* host staging */
    int32_t *host_rows, *host_labels;
    float *host_seeds;
    double weight_sum; /* C of the running step */
    int64_t num_micro; /* micro-batches of it so far, those of a group on its first rank */
    bool walked;       /* this rank had one */
    bool reduced;      /* gradients and sums of it are those of all ranks */
} ith_step;

/* FLOPs that a rank computes while it sends a byte to another one of its machine. */
double ith_flop_per_byte(const ith_device *device);

/* Plans (ctx->plan must be counting), commits, places. After it the ctx allocates nothing. With
 * plan_only it stops before the commit: for the memory table. */
ith_status ith_step_create(ith_step **out, ith_model *model, ith_ctx *ctx,
                           const ith_step_config *config, bool plan_only);
/* Tokens of the longest single document, every row labelled, whose step fits `limit` bytes, every
 * layer keeping `keep`; 0: none. For steps made with plan_only; the plan then holds that step. */
ith_status ith_step_longest(const ith_step *step, int64_t limit, ith_keep keep, int64_t *out);
void ith_step_destroy(ith_step *step);

/* Many ranks: all of them call the functions below in the same order; the ranks of a cp group with
 * the same micro-batch, of which each works on its slice, or all ranks of the job with whole ones
 * (ith_micro_batch), each its own. An empty micro-batch is legal.
 * weight_sum: C over all micro-batches of the optimizer step (all ranks). */
void ith_step_begin(ith_step *step, double weight_sum);
/* Forward, loss, backward of one micro-batch; gradients are added. */
ith_status ith_step_micro(ith_step *step, const ith_micro_batch *batch);
/* Sums gradients and losses over all ranks; ith_step_end does it when nobody did. */
ith_status ith_step_reduce(ith_step *step);
/* Clip, update. hyper.step counts real updates. Weights and optimizer may still change behind it,
 * beside the next step's forward walk, which waits for each layer: who reads or writes them
 * otherwise settles first. */
ith_status ith_step_end(ith_step *step, ith_adamw_hyper hyper, ith_step_stats *out);
/* What the device is given from now on sees the whole update. */
ith_status ith_step_settle(ith_step *step);
/* Loss of a micro-batch without gradients: *loss += sum of weight * cross entropy over the rows of
 * this rank; weights are in the batch. Add it over the ranks. */
ith_status ith_step_eval(ith_step *step, const ith_micro_batch *batch, double *loss);

#endif
