/* pool.h - a fixed set of threads and one parallel loop.
 *
 * The index range is cut into pieces of `grain` indices whatever the number of threads, so that a
 * task that sums within its piece gives the same bits for 1 and n threads. Pieces are handed out in
 * order. */
#ifndef ITH_BASE_POOL_H
#define ITH_BASE_POOL_H

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ith_pool ith_pool;

/* Handles indices [begin, end), one piece. thread: 0 .. ith_pool_threads - 1, for per-thread
 * scratch. */
typedef void (*ith_task)(void *arg, int64_t begin, int64_t end, int thread);

/* num_threads <= 0: ITH_THREADS, or all cores this process may use. */
ith_status ith_pool_create(ith_pool **out, int num_threads, ith_error *err);
/* What num_threads 0 means. */
ith_status ith_pool_default_threads(int *out, ith_error *err);
void ith_pool_destroy(ith_pool *pool);
int ith_pool_threads(const ith_pool *pool); /* pool may be NULL: 1 */
/* Runs task over [0, n) in pieces; returns when all are done. The caller works too. No nesting: a
 * call from within a task runs serially. pool may be NULL. Makes no allocation. */
void ith_pool_for(ith_pool *pool, int64_t n, int64_t grain, ith_task task, void *arg);

#ifdef __cplusplus
}
#endif
#endif
