/* media_tokens.c - where the tokens of images and videos stand, and their positions. */
#include "data/media.h"

#include <string.h>

#include "base/checked.h"

int64_t ith_media_features(const ith_media_tokens *tokens, ith_grid grid)
{
    return ith_grid_patches(grid) / (tokens->merge * tokens->merge);
}

/* From the first to the last token of the next item at or after `from`, timestamps between the
 * frames of a video included. */
static ith_status next_span(const ith_media_tokens *tokens, const int32_t *ids, int64_t n,
                            int64_t from, const ith_media_item *item, int64_t *begin, int64_t *end,
                            ith_error *err)
{
    int32_t id = item->num_frames ? tokens->video : tokens->image;
    int64_t frame = ith_media_features(tokens, item->grid) / item->grid.t, t = from;
    for (int32_t k = 0; k < item->grid.t; k++) {
        int64_t found = 0;
        while (t < n && !ith_is_media_token(tokens, ids[t]))
            t++;
        *begin = k == 0 ? t : *begin;
        while (t + found < n && ids[t + found] == id)
            found++;
        t += found;
        if (found != frame)
            return ith_fail(err, ITH_ERR_FORMAT, "%s of %lld tokens: the text has %lld",
                            item->num_frames ? "a frame" : "an image", (long long)frame,
                            (long long)found);
    }
    *end = t;
    return ITH_OK;
}

ith_status ith_media_cut(const ith_media_tokens *tokens, const int32_t *ids, int64_t n,
                         int64_t from, int64_t limit, const ith_media_item *items,
                         int64_t num_items, int64_t *end, int64_t *num, ith_error *err)
{
    int64_t at = from, cut = ith_min_i64(from + limit, n), begin = 0, stop = 0;
    for (*num = 0; *num < num_items; ++*num, at = stop) {
        ITH_TRY(next_span(tokens, ids, n, at, &items[*num], &begin, &stop, err));
        if (stop <= cut)
            continue;
        if (begin < cut)
            cut = begin;
        if (begin == cut && begin > from && ids[begin - 1] == tokens->vision_start)
            cut--;
        break;
    }
    for (int64_t t = at; *num == num_items && t < n; t++)
        if (ith_is_media_token(tokens, ids[t]))
            return ith_fail(err, ITH_ERR_FORMAT,
                            "token %lld stands for an image or video, and none is left of %lld",
                            (long long)t, (long long)num_items);
    *end = cut;
    return ITH_OK;
}

/* The next frame of the items, in features. */
typedef struct {
    const ith_grid *grids;
    int64_t num_grids, item, frame;
} frame_walk;

static bool next_frame(frame_walk *w, int64_t merge, int64_t *rows, int64_t *cols)
{
    if (w->item >= w->num_grids)
        return false;
    ith_grid g = w->grids[w->item];
    *rows = g.h / merge;
    *cols = g.w / merge;
    if (++w->frame == g.t) {
        w->frame = 0;
        w->item++;
    }
    return true;
}

ith_status ith_media_find(const ith_media_tokens *tokens, const int32_t *ids,
                          const int32_t *cu_seqlens, int64_t num_docs, const ith_grid *grids,
                          int64_t num_grids, int32_t *frames, ith_error *err)
{
    int64_t rows = 0, cols = 0, n = 0;
    frame_walk walk = {grids, num_grids, 0, 0};
    for (int64_t doc = 0; doc < num_docs; doc++)
        for (int64_t i = cu_seqlens[doc]; i < cu_seqlens[doc + 1];) {
            if (!ith_is_media_token(tokens, ids[i])) {
                i++;
                continue;
            }
            if (!next_frame(&walk, tokens->merge, &rows, &cols))
                return ith_fail(err, ITH_ERR_FORMAT,
                                "document %lld, token %lld: a media token, but the row has only "
                                "%lld images and videos",
                                (long long)doc, (long long)(i - cu_seqlens[doc]),
                                (long long)num_grids);
            frames[n++] = (int32_t)i;
            for (int64_t k = 0; k < rows * cols; k++, i++)
                if (i >= cu_seqlens[doc + 1] || !ith_is_media_token(tokens, ids[i]))
                    return ith_fail(err, ITH_ERR_FORMAT,
                                    "document %lld, token %lld: %lld media tokens, the image has "
                                    "%lld features",
                                    (long long)doc, (long long)(i - cu_seqlens[doc]), (long long)k,
                                    (long long)(rows * cols));
        }
    if (walk.item != num_grids)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "%lld images and videos, but media tokens for %lld of them",
                        (long long)num_grids, (long long)walk.item);
    return ITH_OK;
}

/* Rows that are set, of three rows of `total`. */
typedef struct {
    int64_t ranges[4], total;
    int32_t *positions;
} own_positions;

/* Positions of rows [begin, end): at + their number; of a frame of `cols` columns, (at, at + row,
 * at + column). cols 0: text. */
static void set_positions(const own_positions *own, int64_t begin, int64_t end, int32_t at,
                          int64_t cols)
{
    int32_t *row_t = own->positions, *row_h = row_t + own->total, *row_w = row_h + own->total;
    for (int i = 0; i < 4; i += 2) {
        int64_t first = ith_max_i64(begin, own->ranges[i]),
                last = ith_min_i64(end, own->ranges[i + 1]);
        for (int64_t t = first; t < last; t++) {
            int64_t k = t - begin;
            row_t[t] = at + (int32_t)(cols ? 0 : k);
            row_h[t] = at + (int32_t)(cols ? k / cols : k);
            row_w[t] = at + (int32_t)(cols ? k % cols : k);
        }
    }
}

void ith_mrope_positions(int64_t merge, const int32_t *cu_seqlens, int64_t num_docs,
                         const ith_grid *grids, int64_t num_grids, const int32_t *frames,
                         const int64_t *ranges, int32_t *positions)
{
    own_positions own = {{0, cu_seqlens[num_docs], 0, 0}, cu_seqlens[num_docs], positions};
    frame_walk walk = {grids, num_grids, 0, 0};
    int64_t rows = 0, cols = 0, k = 0;
    bool more = next_frame(&walk, merge, &rows, &cols);
    if (ranges)
        memcpy(own.ranges, ranges, sizeof own.ranges);
    for (int64_t doc = 0; doc < num_docs; doc++) {
        int64_t i = cu_seqlens[doc], end = cu_seqlens[doc + 1];
        int32_t at = 0;
        for (; more && frames[k] < end; k++, more = next_frame(&walk, merge, &rows, &cols)) {
            set_positions(&own, i, frames[k], at, 0);
            at += frames[k] - (int32_t)i;
            i = frames[k] + rows * cols;
            set_positions(&own, frames[k], i, at, cols);
            at += (int32_t)ith_max_i64(rows, cols);
        }
        set_positions(&own, i, end, at, 0);
    }
}
