/* best_fit.c - best-fit decreasing with a bitmap over the room left.
 *
 * Invariants:
 *  1. Bit c of level 0 is set exactly when a bin with c tokens of room is in list head[c]; bit w
 *     of level k + 1 when word w of level k is not zero.
 *  2. Between runs all lists are empty. */
#include "data/best_fit.h"

#include "base/checked.h"

#include <stdlib.h>
#include <string.h>

#define MAX_LEVELS 11 /* 64^11 > 2^63 */

struct ith_best_fit {
    int64_t capacity, window;
    uint64_t *level[MAX_LEVELS];
    int num_levels;
    int32_t *head;    /* [capacity + 1] first bin with that much room, -1: none */
    int32_t *next;    /* [window] next bin with the same room */
    int32_t *bin_of;  /* [window] by document */
    int64_t *room;    /* [window] by bin */
    uint64_t *sorted; /* [window] (capacity - length) << 32 | document */
};

ith_status ith_best_fit_create(ith_best_fit **out, int64_t capacity, int64_t window, ith_error *err)
{
    ITH_ASSERT(capacity > 0 && capacity < INT32_MAX && window > 0 && window < INT32_MAX);
    ith_best_fit *fit = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc_zero((void **)&fit, 1, sizeof *fit, "packing", err));
    fit->capacity = capacity;
    fit->window = window;
    for (int64_t bits = capacity + 1; status == ITH_OK; bits = ith_div_ceil(bits, 64)) {
        int64_t words = ith_div_ceil(bits, 64);
        ITH_TRY_OUT(
            ith_alloc_zero((void **)&fit->level[fit->num_levels], words, 8, "packing", err));
        fit->num_levels++;
        if (words == 1)
            break;
    }
    ITH_TRY_OUT(ith_alloc((void **)&fit->head, (capacity + 1) * 4, "packing", err));
    memset(fit->head, 0xff, (size_t)(capacity + 1) * 4);
    ITH_TRY_OUT(ith_alloc((void **)&fit->next, window * 4, "packing", err));
    ITH_TRY_OUT(ith_alloc((void **)&fit->bin_of, window * 4, "packing", err));
    ITH_TRY_OUT(ith_alloc((void **)&fit->room, window * 8, "packing", err));
    ITH_TRY_OUT(ith_alloc((void **)&fit->sorted, window * 8, "packing", err));
    *out = fit;
    return ITH_OK;
out:
    ith_best_fit_destroy(fit);
    return status;
}

void ith_best_fit_destroy(ith_best_fit *fit)
{
    if (!fit)
        return;
    for (int i = 0; i < fit->num_levels; i++)
        ith_free(fit->level[i]);
    ith_free(fit->head);
    ith_free(fit->next);
    ith_free(fit->bin_of);
    ith_free(fit->room);
    ith_free(fit->sorted);
    ith_free(fit);
}

static void insert_bin(ith_best_fit *fit, int32_t bin)
{
    int64_t c = fit->room[bin];
    fit->next[bin] = fit->head[c];
    fit->head[c] = bin;
    for (int i = 0; i < fit->num_levels; i++, c >>= 6)
        fit->level[i][c >> 6] |= (uint64_t)1 << (c & 63);
}

/* Takes the first bin out of the list of room c. */
static int32_t remove_bin(ith_best_fit *fit, int64_t c)
{
    int32_t bin = fit->head[c];
    fit->head[c] = fit->next[bin];
    if (fit->head[c] >= 0)
        return bin;
    for (int i = 0; i < fit->num_levels; i++, c >>= 6) {
        fit->level[i][c >> 6] &= ~((uint64_t)1 << (c & 63));
        if (fit->level[i][c >> 6])
            break;
    }
    return bin;
}

/* Least room >= c that some bin has, or -1: up until a word has a bit at or behind ours, then down
 * along first bits. */
static int64_t find_room(const ith_best_fit *fit, int64_t c)
{
    int64_t bits = fit->capacity + 1;
    int i = 0;
    for (;; i++) {
        if (i == fit->num_levels || c >= bits)
            return -1;
        uint64_t word = fit->level[i][c >> 6] & ~(uint64_t)0 << (c & 63);
        if (word) {
            c = (c & ~(int64_t)63) + __builtin_ctzll(word);
            break;
        }
        c = (c >> 6) + 1;
        bits = ith_div_ceil(bits, 64);
    }
    while (i-- > 0)
        c = c * 64 + __builtin_ctzll(fit->level[i][c]);
    return c;
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int64_t ith_best_fit_run(ith_best_fit *fit, const int32_t *lengths, int64_t n, int64_t *placed,
                         int64_t *bin_begin)
{
    ITH_ASSERT(n >= 0 && n <= fit->window);
    for (int64_t i = 0; i < n; i++) {
        ITH_ASSERT(lengths[i] > 0 && lengths[i] <= fit->capacity);
        fit->sorted[i] = (uint64_t)(fit->capacity - lengths[i]) << 32 | (uint64_t)i;
    }
    qsort(fit->sorted, (size_t)n, 8, compare_u64);
    int32_t num_bins = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t doc = (int64_t)(fit->sorted[i] & 0xffffffffu);
        int64_t c = find_room(fit, lengths[doc]);
        int32_t bin = c >= 0 ? remove_bin(fit, c) : num_bins++;
        fit->room[bin] = (c >= 0 ? c : fit->capacity) - lengths[doc];
        fit->bin_of[doc] = bin;
        insert_bin(fit, bin);
    }
    for (int32_t b = 0; b < num_bins; b++)
        while (fit->head[fit->room[b]] >= 0)
            remove_bin(fit, fit->room[b]);
    /* Counting sort by bin, longest first within each. */
    memset(bin_begin, 0, (size_t)(num_bins + 1) * 8);
    for (int64_t i = 0; i < n; i++)
        bin_begin[fit->bin_of[i] + 1]++;
    for (int32_t b = 0; b < num_bins; b++)
        bin_begin[b + 1] += bin_begin[b];
    for (int32_t b = 0; b < num_bins; b++)
        fit->room[b] = bin_begin[b];
    for (int64_t i = 0; i < n; i++) {
        int64_t doc = (int64_t)(fit->sorted[i] & 0xffffffffu);
        placed[fit->room[fit->bin_of[doc]]++] = doc;
    }
    return num_bins;
}
