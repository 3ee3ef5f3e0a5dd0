/* sampler.h - the next token out of logits.
 *
 * Order of operations as in transformers: repetition penalty, then (when sampling) temperature,
 * top-k, top-p, min-p; then a draw with Philox keyed by (seed, stream, position), so that an answer
 * does not depend on what else is generated. Greedy (do_sample false, or temperature 0) takes the
 * largest, the lower id of equals. */
#ifndef ITH_GENERATE_SAMPLER_H
#define ITH_GENERATE_SAMPLER_H

#include "base/mem.h"

typedef struct {
    bool do_sample;
    double temperature;        /* > 0; 0 means greedy */
    int64_t top_k;             /* 0: off */
    double top_p;              /* 1: off */
    double min_p;              /* 0: off */
    double repetition_penalty; /* 1: off */
    uint64_t seed;
} ith_sampling;

/* Scratch for one vocabulary. */
typedef struct {
    float *values;
    int32_t *order;
    int64_t vocab_size;
} ith_sampler;

ith_status ith_sampler_init(ith_sampler *s, int64_t vocab_size, ith_error *err);
void ith_sampler_deinit(ith_sampler *s);
/* logits: [vocab_size]. past: ids of the sequence so far (prompt included), for the penalty. Fails
 * when no logit is finite. */
ith_status ith_sampler_next(ith_sampler *s, const ith_sampling *how, const float *logits,
                            const int32_t *past, int64_t num_past, uint64_t stream, int32_t *out,
                            ith_error *err);

#endif
