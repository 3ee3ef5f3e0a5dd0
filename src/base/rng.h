/* rng.h - counter-based random numbers: Philox4x32-10 (Salmon et al. 2011).
 *
 * A value depends on (seed, stream, index) alone, so it is the same for any number of threads or
 * ranks and after a resume. stream separates uses (weight init, epoch order, sampling, diffusion
 * noise ...). */
#ifndef ITH_BASE_RNG_H
#define ITH_BASE_RNG_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Four 32-bit words for one counter value. */
void ith_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo, uint32_t out[4]);
/* 64 random bits. */
uint64_t ith_rng_u64(uint64_t seed, uint64_t stream, uint64_t index);
/* Uniform in [0, 1) with 53 bits. */
double ith_rng_uniform(uint64_t seed, uint64_t stream, uint64_t index);
/* Standard normal (Box-Muller). */
double ith_rng_normal(uint64_t seed, uint64_t stream, uint64_t index);
/* Uniform in [0, n), n > 0, without bias worth naming (128-bit multiply). */
int64_t ith_rng_below(uint64_t seed, uint64_t stream, uint64_t index, int64_t n);
/* Fisher-Yates permutation of 0..n-1. */
void ith_rng_permutation(uint64_t seed, uint64_t stream, int64_t n, int64_t *out);
/* FNV-1a of a text, to name streams. */
uint64_t ith_rng_stream(const char *name);

#ifdef __cplusplus
}
#endif
#endif
