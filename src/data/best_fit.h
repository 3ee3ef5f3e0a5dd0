/* best_fit.h - best-fit decreasing bin packing of one window of documents. Stays inside data/.
 *
 * Documents are placed longest first, each into the open bin with the least room that still takes
 * it, or into a new one. Bins are found through a bitmap of the room they have left, in constant
 * time, so a window of n documents costs its sort. Ties go to the earlier document and to the bin
 * used last: the result depends on the lengths alone. */
#ifndef ITH_DATA_BEST_FIT_H
#define ITH_DATA_BEST_FIT_H

#include "base/mem.h"

typedef struct ith_best_fit ith_best_fit;

/* Bins of `capacity` tokens, at most `window` documents per run. */
ith_status ith_best_fit_create(ith_best_fit **out, int64_t capacity, int64_t window,
                               ith_error *err);
void ith_best_fit_destroy(ith_best_fit *fit); /* NULL is fine */
/* lengths[i] in 1..capacity. Fills placed[n] with document numbers, bin after bin, and
 * bin_begin[0 .. bins] with where each bin begins in it; returns the number of bins. No allocation.
 */
int64_t ith_best_fit_run(ith_best_fit *fit, const int32_t *lengths, int64_t n, int64_t *placed,
                         int64_t *bin_begin);

#endif
