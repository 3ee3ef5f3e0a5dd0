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
    int64_t patches = ith_max_i64(limits->max_patches, limits->max_whole_patches);
    int64_t frames = ith_max_i64(limits->max_segments, limits->max_whole_segments);
    ITH_TRY(ith_alloc((void **)&m->mrope, ith_mul_bytes(limits->max_tokens, 12), "batch", err));
    ITH_TRY(ith_alloc((void **)&m->pixels, ith_mul_bytes(patches, row), "patches of a micro-batch",
                      err));
    ITH_TRY(ith_alloc((void **)&m->frames, frames * 4, "batch", err));
    ITH_TRY(
        ith_alloc((void **)&m->grids, limits->max_grids * (int64_t)sizeof *m->grids, "batch", err));
    return ith_alloc_zero((void **)&m->tasks, limits->max_grids, sizeof *m->tasks, "batch", err);
}

void batch_media_destroy(batch_media *m)
{
    ith_free(m->mrope);
    ith_free(m->pixels);
    ith_free(m->grids);
    ith_free(m->frames);
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

static ith_status fail_damaged(int64_t entry, ith_error *err)
{
    return ith_fail(err, ITH_ERR_FORMAT,
                    "cache of tokenized data is damaged (the images of sample %lld are not where "
                    "its tokens for them are): remove it and start again",
                    (long long)entry);
}

/* Features of a frame. */
static int64_t frame_size(const batch_media *m, ith_grid grid)
{
    return ith_media_features(ith_media_ids(m->media), grid) / grid.t;
}

/* Adds the frames of an item of a document whose rows not yet taken are [*free, end). */
static bool place_frames(batch_media *m, const int32_t *frames, ith_grid grid, int64_t begin,
                         int64_t *free, int64_t end, int64_t *num_frames)
{
    for (int32_t t = 0; t < grid.t; t++) {
        int64_t first = begin + frames[t];
        if (first < *free || first > end - frame_size(m, grid))
            return false;
        m->frames[(*num_frames)++] = (int32_t)first;
        *free = first + frame_size(m, grid);
    }
    return true;
}

/* Tasks, grids and frames of the documents; *out: how many items. */
static ith_status gather(batch_media *m, const ith_samples *samples, const ith_micro_batch *batch,
                         int64_t *out, ith_error *err)
{
    const ith_batch_limits *l = &m->limits;
    int64_t count = 0, patches = 0, frames = 0, width = ith_media_patch_width(m->media);
    for (int64_t d = 0; d < batch->num_docs; d++) {
        ith_sample s = ith_samples_get(samples, batch->sample[d]);
        int64_t begin = batch->cu_seqlens[d], free = begin;
        for (int64_t k = 0; k < s.num_media; k++, count++) {
            const ith_media_item *item = &s.media[k];
            ITH_ASSERT(count < l->max_grids);
            ITH_ASSERT(patches + ith_grid_patches(item->grid) <=
                       (batch->whole ? l->max_whole_patches : l->max_patches));
            ITH_ASSERT(frames + item->grid.t <=
                       (batch->whole ? l->max_whole_segments : l->max_segments));
            m->grids[count] = item->grid;
            m->tasks[count] = (task){.item = item,
                                     .path = ith_samples_media_path(samples, item),
                                     .part = s.part,
                                     .row = s.row,
                                     .pixels = m->pixels + patches * width};
            patches += ith_grid_patches(item->grid);
            if (!place_frames(m, ith_samples_media_frames(samples, item), item->grid, begin, &free,
                              batch->cu_seqlens[d + 1], &frames))
                return fail_damaged(batch->sample[d], err);
        }
    }
    *out = count;
    return ITH_OK;
}

/* Of the rows whose ids are here those of frames, and no others, have a token for media. */
static ith_status check_ids(const batch_media *m, const int64_t ranges[4],
                            const ith_micro_batch *batch, int64_t count, ith_error *err)
{
    const ith_media_tokens *tokens = ith_media_ids(m->media);
    int64_t rows = 0, inside = 0, all = 0, frame = 0;
    for (int64_t i = 0; i < count; i++)
        for (int32_t t = 0; t < m->grids[i].t; t++, frame++)
            for (int r = 0; r < 4; r += 2) {
                int64_t row = ith_max_i64(ranges[r], m->frames[frame]);
                int64_t end = m->frames[frame] + frame_size(m, m->grids[i]);
                for (; row < ith_min_i64(ranges[r + 1], end); row++, rows++)
                    inside += ith_is_media_token(tokens, batch->ids[row]);
            }
    for (int r = 0; r < 4; r += 2)
        for (int64_t row = ranges[r]; row < ranges[r + 1]; row++)
            all += ith_is_media_token(tokens, batch->ids[row]);
    return inside == rows && all == rows ? ITH_OK : fail_damaged(batch->sample[0], err);
}

/* The items with a frame of this rank. */
static void choose(batch_media *m, int64_t count, bool whole)
{
    int64_t all = 0, at = 0, ranks = whole ? 1 : m->ranks;
    for (int64_t i = 0; i < count; i++)
        all += ith_grid_patches(m->grids[i]);
    for (int64_t i = 0; i < count; i++) {
        int64_t frame = (int64_t)m->grids[i].h * m->grids[i].w;
        m->tasks[i].wanted = ranks <= 1;
        for (int64_t t = 0; ranks > 1 && t < m->grids[i].t; t++, at += frame)
            m->tasks[i].wanted |= ith_frame_rank(at, frame, all, ranks) == m->rank;
    }
}

ith_status batch_media_fill(batch_media *m, const ith_samples *samples, const int64_t ranges[4],
                            ith_micro_batch *batch, ith_error *err)
{
    int64_t count = 0;
    ITH_TRY(gather(m, samples, batch, &count, err));
    ITH_TRY(check_ids(m, ranges, batch, count, err));
    choose(m, count, batch->whole);
    batch->mrope = m->mrope;
    batch->pixels = m->pixels;
    batch->grids = m->grids;
    batch->num_grids = count;
    batch->frames = m->frames;
    ith_mrope_positions(ith_media_ids(m->media)->merge, batch->cu_seqlens, batch->num_docs,
                        m->grids, count, m->frames, ranges, m->mrope);
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
