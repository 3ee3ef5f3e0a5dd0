/* noise.h - batches of diffusion training: which tokens are masked, and the rows that are computed.
 *
 * A sample of L tokens x0, of which some (the answer) may be masked: one mask probability t is
 * drawn for the sample, uniform in [low, high); token i is masked when u_i < t. xt is x0 with
 * mask_id there. The draws depend on (seed, epoch, sample, token) alone: not on ranks, batches or a
 * resume. Nor do they need the tokens: a rank that shares a batch with others lays it out from the
 * lengths and trained runs of its samples, and reads the ids of its own rows. (A token that is
 * mask_id in the data counts as masked: a sample that has one is read whole.)
 *
 * Block diffusion lays a document out as [noisy; clean] (ctx.h has the mask) and leaves out what
 * changes neither the loss nor a gradient: noisy blocks without a loss row, and clean blocks from
 * the last noisy one on. Random masking is xt alone, every row seeing all of its document. A loss
 * row is the row of a masked token, or with shifted labels the row before it.
 *
 * Token editing (LLaDA2.1): of the tokens that may be masked and are not, a share `random` is
 * replaced by ids drawn from all but mask_id (now and then the own one) and has its own as target,
 * as a masked one has. The clean half stays clean.
 *
 * A recorded trajectory (samples.h) is trained by path distillation instead of drawn masks. Its
 * state m holds what the decoder had written before step m, of N steps; two states i < j are drawn
 * uniformly from 0..N. xt is state i, the targets are the tokens written from i on and before j:
 * what the decoder needed j - i steps for is to be written in one. Nothing is padded, and both
 * weights count the targets.
 *
 * The weights follow the one gradient rule: weight_sum of a batch is its part of C.
 *   ONE      C counts masked (and replaced) tokens
 *   INVERSE  a masked token weighs 1/t, C counts all tokens that may be masked (the ELBO per token)
 * per_micro_batch is dFactory's arithmetic instead: a mean in each micro-batch, then the mean over
 * micro-batches; weight_sum is then 1 / num_micro, and C is 1. A batch without a masked token is
 * zero in every mode. */
#ifndef ITH_DATA_NOISE_H
#define ITH_DATA_NOISE_H

#include "data/batching.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What follows a sample that ends with a trained token: nothing, one end token, end tokens to the
 * end of its block, or end tokens to full_len (dFactory). All of them may be masked. */
typedef enum { ITH_PAD_NONE, ITH_PAD_END, ITH_PAD_BLOCK, ITH_PAD_FULL } ith_noise_padding;
typedef enum { ITH_WEIGHT_ONE, ITH_WEIGHT_INVERSE } ith_noise_weight;

typedef struct {
    bool blocks; /* block diffusion; else random masking over the whole sequence */
    int64_t block_size;
    int32_t mask_id, end_id; /* end_id is not used with ITH_PAD_NONE */
    double low, high;        /* 0 <= low <= high <= 1 */
    double random;           /* share of unmasked tokens replaced, 0..1 */
    int64_t vocab_size;      /* of the ids that replace them; used when random > 0 */
    bool complementary;      /* a second copy of each sample, masked where the first is not */
    bool same_token;         /* row i predicts token i; else token i + 1 */
    ith_noise_weight weight;
    ith_noise_padding padding;
    int64_t full_len;
    bool per_micro_batch;
    bool keep_all; /* leave nothing out (to compare) */
    uint64_t seed;
    /* As in ith_batcher_options, of the rows of a batch that goes out. */
    void (*own_rows)(const void *arg, int64_t rows, int64_t ranges[4]);
    const void *own_arg;
} ith_noise_options;

/* Most tokens of a sample of len with what follows it; as `padded` of ith_batcher_options. */
int64_t ith_noise_padded(const void *noise_options, int64_t len);

typedef struct ith_noiser ith_noiser;

/* clean: limits of the batches that come in, in padded tokens. */
ith_status ith_noiser_create(ith_noiser **out, const ith_noise_options *options,
                             const ith_batch_limits *clean, ith_error *err);
void ith_noiser_destroy(ith_noiser *n); /* NULL is fine */
/* Limits of the batches that go out. */
ith_batch_limits ith_noiser_limits(const ith_noiser *n);

/* The noisy batch of the documents of `clean`, of which sample and whole are read (a sample that
 * was cut gets no end token). samples were opened with this mask_id, or have no such id. num_micro:
 * micro-batches of the step, over all ranks. Positions are set for all rows. out lasts until the
 * next call; its num_tokens is 0 when nothing is masked. Fails when the cache is damaged. */
ith_status ith_noiser_apply(ith_noiser *n, const ith_samples *samples, const ith_micro_batch *clean,
                            int64_t epoch, int64_t num_micro, ith_micro_batch *out, ith_error *err);
/* Its weight_sum alone: no row is set, and ids are read only where a sample has mask_id, or to see
 * whether it ends with end_id. */
double ith_noiser_weight(ith_noiser *n, const ith_samples *samples, const ith_micro_batch *clean,
                         int64_t epoch, int64_t num_micro);

/* Document by document, for inputs that are noisy already: x0, xt [len]; target [len]: x0 where it
 * is to be predicted, else -100; weights [len]. */
void ith_noiser_begin(ith_noiser *n);
void ith_noiser_add(ith_noiser *n, const int32_t *x0, const int32_t *xt, const int32_t *target,
                    const float *weights, int64_t len, int64_t sample);
void ith_noiser_end(ith_noiser *n, ith_micro_batch *out);

/* What becomes of the tokens of one sample from its draws u [len] and t. stands [len]: the id in
 * place of a token, -1: its own; hit [len]: it is to be predicted. may: which tokens may be masked;
 * stray [len]: the id that replaces an unmasked token, -1: none (NULL: nowhere). x0 NULL: none of
 * its ids is mask_id. u and stray are read where `may` is true. With `other`, the complement.
 * Returns the number of hits. */
int64_t ith_noise_tokens(const ith_noise_options *o, const int32_t *x0, const bool *may,
                         const double *u, const int32_t *stray, double t, bool other, int64_t len,
                         int32_t *stands, bool *hit);

/* The same for states `from` and `to` of a trajectory with steps [len]. */
int64_t ith_noise_states(const ith_noise_options *o, const bool *may, const int32_t *steps,
                         int64_t from, int64_t to, int64_t len, int32_t *stands, bool *hit);
/* States 0 <= *from < *to <= num_steps, all pairs alike, from u uniform in [0, 1). */
void ith_noise_draw_states(int64_t num_steps, double u, int64_t *from, int64_t *to);

#ifdef __cplusplus
}
#endif
#endif
