/* batch_media.c - see the header. Invariant: grids, pixels and media tokens are in the same order,
 * document after document. */
#include "data/batch_media.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

struct batch_media_task {
    const ith_media_item *item;
    const char *path;
    int64_t part, row; /* of its sample */
    float *pixels;
    bool wanted;
    ith_status status;
    ith_error err;
};
typedef struct batch_media_task task;

ith_status batch_media_create(batch_media *m, const ith_media *media, ith_pool *pool,
                              const ith_batch_limits *limits, ith_error *err)
{
    m->media = media;
    m->pool = pool;
    m->limits = *limits;
    int64_t row = ith_mul_bytes(ith_media_patch_width(media), 4);
    ITH_TRY(ith_alloc((void **)&m->mrope, ith_mul_bytes(limits->max_tokens, 12), "batch", err));
    ITH_TRY(ith_alloc((void **)&m->pixels, ith_mul_bytes(limits->max_patches, row),
                      "patches of a micro-batch", err));
    ITH_TRY(
        ith_alloc((void **)&m->grids, limits->max_grids * (int64_t)sizeof *m->grids, "batch", err));
    return ith_alloc_zero((void **)&m->tasks, limits->max_grids, sizeof *m->tasks, "batch", err);
}

void batch_media_destroy(batch_media *m)
{
    ith_free(m->mrope);
    ith_free(m->pixels);
    ith_free(m->grids);
    ith_free(m->tasks);
}

static void load_task(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const batch_media *m = arg;
    for (int64_t i = begin; i < end; i++) {
        task *t = &m->tasks[i];
        if (t->wanted)
            t->status = ith_media_load(m->media, t->item, t->path, t->pixels, &t->err);
    }
}

/* Tasks and grids of the documents; returns how many. */
static int64_t gather(batch_media *m, const ith_samples *samples, const ith_micro_batch *batch)
{
    int64_t count = 0, patches = 0, width = ith_media_patch_width(m->media);
    for (int64_t d = 0; d < batch->num_docs; d++) {
        ith_sample s = ith_samples_get(samples, batch->sample[d]);
        for (int64_t k = 0; k < s.num_media; k++, count++) {
            const ith_media_item *item = &s.media[k];
            ITH_ASSERT(count < m->limits.max_grids &&
                       patches + ith_grid_patches(item->grid) <= m->limits.max_patches);
            m->grids[count] = item->grid;
            m->tasks[count] = (task){.item = item,
                                     .path = ith_samples_media_path(samples, item),
                                     .part = s.part,
                                     .row = s.row,
                                     .pixels = m->pixels + patches * width};
            patches += ith_grid_patches(item->grid);
        }
    }
    return count;
}

/* The items with a frame of this rank. */
static void choose(batch_media *m, int64_t count)
{
    int64_t all = 0, at = 0;
    for (int64_t i = 0; i < count; i++)
        all += ith_grid_patches(m->grids[i]);
    for (int64_t i = 0; i < count; i++) {
        int64_t frame = (int64_t)m->grids[i].h * m->grids[i].w;
        m->tasks[i].wanted = m->ranks <= 1;
        for (int64_t t = 0; m->ranks > 1 && t < m->grids[i].t; t++, at += frame)
            m->tasks[i].wanted |= ith_frame_rank(at, frame, all, m->ranks) == m->rank;
    }
}

ith_status batch_media_fill(batch_media *m, const ith_samples *samples, ith_micro_batch *batch,
                            ith_error *err)
{
    int64_t count = gather(m, samples, batch);
    choose(m, count);
    batch->mrope = m->mrope;
    batch->pixels = m->pixels;
    batch->grids = m->grids;
    batch->num_grids = count;
    if (batch->num_tokens)
        ITH_WRAP(ith_mrope_positions(ith_media_ids(m->media), batch->ids, batch->cu_seqlens,
                                     batch->num_docs, m->grids, count, m->mrope, err),
                 err, "cache of tokenized data is damaged (remove it and start again)");
    ith_pool_for(m->pool, count, 1, load_task, m);
    for (int64_t i = 0; i < count; i++) {
        const task *t = &m->tasks[i];
        char where[PATH_MAX];
        if (t->status != ITH_OK)
            return ith_fail(err, t->status, "%s: %s",
                            ith_samples_where(samples, t->part, t->row, where, sizeof where),
                            t->err.text);
    }
    return ITH_OK;
}

static int compare_desc(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

int64_t batch_media_sum_largest(int64_t *values, int64_t n, int64_t k)
{
    int64_t sum = 0;
    qsort(values, (size_t)n, sizeof *values, compare_desc);
    for (int64_t i = 0; i < ith_min_i64(k, n); i++)
        sum += values[i];
    return sum;
}
