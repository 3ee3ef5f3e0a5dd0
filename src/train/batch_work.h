/* batch_work.h - which rank computes what of a run: the options of its batches, from the shapes of
 * model and job. */
#ifndef ITH_TRAIN_BATCH_WORK_H
#define ITH_TRAIN_BATCH_WORK_H

#include "checkpoint/hf_config.h"
#include "data/noise.h"
#include "model/model.h"

typedef struct {
    const ith_config *config;
    const ith_config_layout *layout;
    const ith_hf_config *hf; /* hidden_size 0: not known, tokens alone count */
    const ith_samples *samples;
    const ith_noise_options *noise; /* of a diffusion model, else NULL; outlives the batcher */
    double flop_per_byte;           /* of the device, see step.h */
    bool sums_once;                 /* zero_stage 2: gradients are summed once a step */
} ith_run_shape;

/* Coefficient of the load balancing loss; 0: none. */
double ith_aux_coef(const ith_config *config, const ith_hf_config *hf);
/* Whether a mean is taken over each micro-batch: what is in one must not depend on ranks. */
bool ith_keeps_micro_batches(const ith_config *config, const ith_hf_config *hf);
/* What a document costs a rank. */
ith_batch_work ith_batch_work_of(const ith_run_shape *run);
/* FLOP of all samples once, each as long as it is; *tower: of their images and videos beside it. */
ith_flops ith_epoch_flops(const ith_run_shape *run, double *tower);
/* Sets what decides who computes which document: cp_size, work, whole, padded, and of training
 * keep_together. */
void ith_deal_options(const ith_run_shape *run, bool training, ith_batcher_options *out);

#endif
