/* golden_reference.c - what the files of a directory say, and micro-batches of it. */
#include "golden.h"

#include <string.h>

const ith_st_entry *entry_of(const golden *g, const char *name)
{
    return ith_st_find(g->ref, name);
}

int32_t *ints(const ith_st_entry *e)
{
    int64_t n = ith_st_numel(e);
    int32_t *out = ith_malloc(n * 4 + 4);
    if (!out)
        exit(1);
    for (int64_t i = 0; i < n; i++) {
        int64_t wide = 0;
        if (e->dtype == ITH_I64)
            memcpy(&wide, (const char *)e->data + i * 8, 8);
        else
            memcpy(&out[i], (const char *)e->data + i * 4, 4);
        if (e->dtype == ITH_I64)
            out[i] = (int32_t)wide;
    }
    return out;
}

ith_micro_batch batch_of(const int32_t *ids, const int32_t *labels, const int32_t *cu, int64_t docs)
{
    ith_micro_batch b = {.num_tokens = cu[docs], .num_docs = docs};
    int64_t n = b.num_tokens;
    b.ids = ith_malloc(n * 4);
    b.position_ids = ith_malloc(n * 4);
    b.labels = ith_malloc(n * 4);
    b.weights = ith_malloc(n * 4);
    b.cu_seqlens = ith_malloc((docs + 1) * 4);
    memcpy(b.ids, ids, (size_t)n * 4);
    memcpy(b.cu_seqlens, cu, (size_t)(docs + 1) * 4);
    for (int64_t d = 0; d < docs; d++)
        for (int32_t t = cu[d]; t < cu[d + 1]; t++) {
            b.position_ids[t] = t - cu[d];
            b.labels[t] = t + 1 < cu[d + 1] ? labels[t + 1] : -100;
            b.weights[t] = b.labels[t] >= 0 ? 1.0f : 0.0f;
            b.num_labels += b.labels[t] >= 0;
        }
    b.weight_sum = (double)b.num_labels;
    return b;
}

ith_micro_batch deal(const ith_micro_batch *all, const ith_mesh *mesh, int32_t **origin)
{
    ith_micro_batch b = {0};
    int64_t n = all->num_tokens;
    b.ids = ith_malloc(n * 4);
    b.position_ids = ith_malloc(n * 4);
    b.labels = ith_malloc(n * 4);
    b.weights = ith_malloc(n * 4);
    b.cu_seqlens = ith_malloc((all->num_docs + 1) * 4);
    *origin = ith_malloc(n * 4);
    b.noisy = all->noisy ? ith_malloc(all->num_docs * 4 + 4) : NULL;
    b.cu_seqlens[0] = 0;
    for (int64_t d = 0; d < all->num_docs; d++) {
        if (d % mesh->dp_size != mesh->dp_rank)
            continue;
        for (int32_t t = all->cu_seqlens[d]; t < all->cu_seqlens[d + 1]; t++) {
            int64_t to = b.num_tokens++;
            b.ids[to] = all->ids[t];
            b.position_ids[to] = all->position_ids[t];
            b.labels[to] = all->labels[t];
            b.weights[to] = all->weights[t];
            b.num_labels += all->labels[t] >= 0;
            (*origin)[to] = t;
        }
        if (all->noisy)
            b.noisy[b.num_docs] = all->noisy[d];
        b.cu_seqlens[++b.num_docs] = (int32_t)b.num_tokens;
    }
    b.weight_sum = (double)b.num_labels;
    return b;
}

static int64_t count_media(const golden *g, const ith_micro_batch *b, int64_t doc)
{
    int64_t n = 0;
    for (int32_t t = b->cu_seqlens[doc]; t < b->cu_seqlens[doc + 1]; t++)
        n += b->ids[t] == g->config.image_token_id || b->ids[t] == g->config.video_token_id;
    return n;
}

void add_media(const golden *g, const ith_micro_batch *all, const ith_mesh *mesh,
               ith_micro_batch *b)
{
    bool packed = all->num_docs > 1;
    const ith_st_entry *pixels = entry_of(g, packed ? "packed_pixel_values" : "pixel_values"),
                       *grid = entry_of(g, packed ? "packed_image_grid_thw" : "image_grid_thw");
    if (!pixels)
        return;
    int64_t num_grids = ith_st_numel(grid) / 3, next = 0, at = 0;
    int64_t side = g->config.vision.spatial_merge_size,
            width = ith_vision_patch_width(&g->config.vision), kept = 0;
    int32_t *thw = ints(grid);
    ith_grid *grids = ith_malloc(num_grids * (int64_t)sizeof *grids + 1);
    float *values = ith_malloc(ith_st_numel(pixels) * 4);
    b->mrope = ith_malloc(3 * b->num_tokens * 4 + 4);
    if (!values || !b->mrope || !grids)
        exit(1);
    for (int64_t d = 0; d < all->num_docs; d++) {
        int64_t left = count_media(g, all, d) * side * side;
        bool mine = d % mesh->dp_size == mesh->dp_rank;
        for (; left > 0 && next < num_grids; next++) {
            ith_grid item = {thw[3 * next], thw[3 * next + 1], thw[3 * next + 2]};
            int64_t n = ith_grid_patches(item);
            if (mine) {
                memcpy(values + kept * width, (const float *)pixels->data + at * width,
                       (size_t)(n * width) * 4);
                grids[b->num_grids++] = item;
            }
            kept += mine ? n : 0;
            at += n;
            left -= n;
        }
    }
    ith_free(thw);
    b->grids = grids;
    b->pixels = values;
    const ith_media_tokens tokens = {.image = (int32_t)g->config.image_token_id,
                                     .video = (int32_t)g->config.video_token_id,
                                     .merge = g->config.vision.spatial_merge_size};
    int32_t *frames = ith_malloc(b->num_tokens * 4 + 4);
    die_on(ith_media_find(&tokens, b->ids, b->cu_seqlens, b->num_docs, b->grids, b->num_grids,
                          frames, &golden_err));
    ith_mrope_positions(tokens.merge, b->cu_seqlens, b->num_docs, b->grids, b->num_grids, frames,
                        NULL, b->mrope);
    b->frames = frames;
}

void free_batch(ith_micro_batch *b)
{
    ith_free((void *)(uintptr_t)b->pixels);
    ith_free((void *)(uintptr_t)b->grids);
    ith_free((void *)(uintptr_t)b->frames);
    ith_free(b->mrope);
    ith_free(b->ids);
    ith_free(b->position_ids);
    ith_free(b->labels);
    ith_free(b->weights);
    ith_free(b->cu_seqlens);
    ith_free((void *)(uintptr_t)b->noisy);
}

ith_vision_limits vision_limits(const ith_micro_batch *batch)
{
    ith_vision_limits limits = {0};
    for (int64_t i = 0; i < batch->num_grids; i++) {
        limits.max_patches += ith_grid_patches(batch->grids[i]);
        limits.max_segments += batch->grids[i].t;
        limits.max_segment_patches =
            ith_max_i64(limits.max_segment_patches, (int64_t)batch->grids[i].h * batch->grids[i].w);
    }
    return limits;
}

double number(const json_t *json, const char *key)
{
    return json_number_value(json_object_get(json, key));
}

int32_t *json_ints(const json_t *list, int64_t *count)
{
    *count = (int64_t)json_array_size(list);
    int32_t *out = ith_malloc(*count * 4 + 4);
    if (!out)
        exit(1);
    for (int64_t i = 0; i < *count; i++)
        out[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return out;
}
