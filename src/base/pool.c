/* pool.c - thread pool with one parallel loop at a time.
 *
 * Invariants:
 *  1. A loop is published under the mutex and ends when every piece was taken and every worker has
 *     left it.
 *  2. Workers spin briefly before they sleep, for a step consists of thousands of short loops. */
#include "base/pool.h"

#include "base/checked.h"
#include "base/env.h"
#include "base/mem.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define SPIN_ROUNDS 4000

struct ith_pool {
    int num_threads;
    pthread_t *threads;
    int started;
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    atomic_llong generation; /* one more for every loop */
    bool stop;
    ith_task task;
    void *arg;
    int64_t n, grain;
    atomic_llong next; /* first index not handed out */
    atomic_int inside; /* workers that have not left the loop */
};

typedef struct {
    ith_pool *pool;
    int index;
} worker_arg;

static _Thread_local bool inside_task;

static void work(ith_pool *pool, int thread)
{
    inside_task = true;
    for (;;) {
        int64_t begin = atomic_fetch_add(&pool->next, pool->grain);
        if (begin >= pool->n)
            break;
        pool->task(pool->arg, begin, ith_min_i64(begin + pool->grain, pool->n), thread);
    }
    inside_task = false;
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *worker(void *param)
{
    worker_arg self = *(worker_arg *)param;
    ith_free(param);
    ith_pool *pool = self.pool;
    long long seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPIN_ROUNDS && atomic_load(&pool->generation) == seen; spin++)
            relax();
        pthread_mutex_lock(&pool->mutex);
        while (atomic_load(&pool->generation) == seen && !pool->stop)
            pthread_cond_wait(&pool->wake, &pool->mutex);
        bool stop = pool->stop;
        seen = atomic_load(&pool->generation);
        pthread_mutex_unlock(&pool->mutex);
        if (stop)
            return NULL;
        work(pool, self.index);
        if (atomic_fetch_sub(&pool->inside, 1) == 1) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

/* ITH_THREADS, else the cores this process may use. */
ith_status ith_pool_default_threads(int *out, ith_error *err)
{
    const char *text = ith_env(ITH_ENV_THREADS);
    cpu_set_t set;
    if (text) {
        char *end = NULL;
        long value = strtol(text, &end, 10);
        if (*end || value < 1 || value > 4096)
            return ith_fail(err, ITH_ERR_USAGE,
                            "ITH_THREADS: found '%.40s' (use an integer from 1 to 4096)", text);
        *out = (int)value;
    } else {
        *out = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                           : (int)sysconf(_SC_NPROCESSORS_ONLN);
    }
    return ITH_OK;
}

ith_status ith_pool_create(ith_pool **out, int num_threads, ith_error *err)
{
    if (num_threads <= 0)
        ITH_TRY(ith_pool_default_threads(&num_threads, err));
    if (num_threads < 1)
        num_threads = 1;
    ith_pool *pool = NULL;
    ITH_TRY(ith_alloc_zero((void **)&pool, 1, sizeof *pool, "thread pool", err));
    pool->num_threads = num_threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    ith_status status =
        ith_alloc_zero((void **)&pool->threads, num_threads, sizeof(pthread_t), "threads", err);
    for (int i = 1; i < num_threads && status == ITH_OK; i++) {
        worker_arg *param = ith_malloc(sizeof *param);
        if (!param) {
            status = ith_fail(err, ITH_ERR_MEMORY, "out of memory for thread %d", i);
            break;
        }
        *param = (worker_arg){pool, i};
        if (pthread_create(&pool->threads[pool->started], NULL, worker, param) != 0) {
            ith_free(param);
            status = ith_fail(err, ITH_ERR_MEMORY, "cannot start thread %d of %d", i, num_threads);
            break;
        }
        pool->started++;
    }
    if (status != ITH_OK) {
        ith_pool_destroy(pool);
        return status;
    }
    *out = pool;
    return ITH_OK;
}

void ith_pool_destroy(ith_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->started; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->done);
    ith_free(pool->threads);
    ith_free(pool);
}

int ith_pool_threads(const ith_pool *pool)
{
    return pool ? pool->num_threads : 1;
}

void ith_pool_for(ith_pool *pool, int64_t n, int64_t grain, ith_task task, void *arg)
{
    ITH_ASSERT(grain > 0);
    if (n <= 0)
        return;
    if (!pool || pool->started == 0 || n <= grain || inside_task) {
        for (int64_t begin = 0; begin < n; begin += grain)
            task(arg, begin, ith_min_i64(begin + grain, n), 0);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->task = task;
    pool->arg = arg;
    pool->n = n;
    pool->grain = grain;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->inside, pool->started);
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    work(pool, 0);
    for (int spin = 0; spin < SPIN_ROUNDS && atomic_load(&pool->inside) > 0; spin++)
        relax();
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(&pool->inside) > 0)
        pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}
