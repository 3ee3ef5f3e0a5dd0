/* batch_plan.c - composition rules of the batching strategies.
 *
 * Invariants:
 *  1. Without carry_over every document of the epoch is in exactly one micro-batch.
 *  2. The permutation depends on seed and epoch alone, not on the strategy. */
#include "data/batch_plan.h"

#include "base/checked.h"
#include "base/rng.h"

#include <string.h>

static bool is_dynamic(ith_batching strategy)
{
    return strategy == ITH_BATCHING_DYNAMIC || strategy == ITH_BATCHING_DYNAMIC_PADDING_FREE;
}

ith_status batch_plan_create(batch_plan *plan, const batch_plan_options *options, int64_t max_carry,
                             ith_error *err)
{
    memset(plan, 0, sizeof *plan);
    plan->options = *options;
    const batch_plan_options *o = &plan->options;
    ITH_ASSERT(o->count > 0 && o->budget > 0);
    plan->order_cap = o->count + max_carry;
    ith_status status = ITH_OK;
    int64_t n = o->count;
    ITH_TRY_OUT(ith_alloc((void **)&plan->order, plan->order_cap * 8, "epoch order", err));
    ITH_TRY_OUT(
        ith_alloc((void **)&plan->micro_begin, (plan->order_cap + 2) * 8, "micro-batches", err));
    if (o->strategy == ITH_BATCHING_PACKING) {
        int64_t window = plan->options.window = ith_min_i64(o->window, n);
        ITH_TRY_OUT(ith_alloc((void **)&plan->permutation, n * 8, "epoch order", err));
        ITH_TRY_OUT(ith_best_fit_create(&plan->fit, o->budget, window, err));
        ITH_TRY_OUT(ith_alloc((void **)&plan->bin_begin, (n + 1) * 8, "packing", err));
        ITH_TRY_OUT(ith_alloc((void **)&plan->bin_order, n * 8, "packing", err));
        ITH_TRY_OUT(ith_alloc((void **)&plan->window_docs, window * 16, "packing", err));
        ITH_TRY_OUT(ith_alloc((void **)&plan->window_begin, (window + 1) * 8, "packing", err));
        ITH_TRY_OUT(ith_alloc((void **)&plan->window_lengths, window * 4, "packing", err));
    }
    return ITH_OK;
out:
    batch_plan_destroy(plan);
    return status;
}

void batch_plan_destroy(batch_plan *plan)
{
    ith_free(plan->permutation);
    ith_free(plan->order);
    ith_free(plan->micro_begin);
    ith_best_fit_destroy(plan->fit);
    ith_free(plan->bin_begin);
    ith_free(plan->bin_order);
    ith_free(plan->window_docs);
    ith_free(plan->window_begin);
    ith_free(plan->window_lengths);
    memset(plan, 0, sizeof *plan);
}

static void permute(const batch_plan_options *o, const char *what, int64_t epoch, int64_t n,
                    int64_t *out)
{
    if (o->shuffle) {
        ith_rng_permutation(o->seed, ith_rng_stream(what) + (uint64_t)epoch, n, out);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        out[i] = i;
}

/* A micro-batch that is being filled under a token budget. */
typedef struct {
    bool padded; /* counts what padding to the longest would compute */
    int64_t budget, count, longest, sum;
} filling;

static int64_t filled(const filling *f, int64_t count, int64_t longest, int64_t sum)
{
    return f->padded ? count * longest : sum;
}

/* Adds a document. True when a micro-batch closed before it; *closes_after: one closed with it. */
static bool fill_add(filling *f, int64_t length, bool *closes_after)
{
    int64_t longest = ith_max_i64(f->longest, length);
    bool over = f->count > 0 && filled(f, f->count + 1, longest, f->sum + length) > f->budget;
    if (over)
        *f = (filling){f->padded, f->budget, 0, 0, 0};
    f->longest = ith_max_i64(f->longest, length);
    f->sum += length;
    f->count++;
    *closes_after = f->padded && f->count * f->longest >= f->budget;
    if (*closes_after)
        *f = (filling){f->padded, f->budget, 0, 0, 0};
    return over;
}

static filling fill_begin(const batch_plan_options *o)
{
    return (filling){o->strategy == ITH_BATCHING_DYNAMIC, o->budget, 0, 0, 0};
}

static void build_dynamic(batch_plan *plan)
{
    const batch_plan_options *o = &plan->options;
    filling f = fill_begin(o);
    plan->num_micro = 0;
    plan->micro_begin[0] = 0;
    for (int64_t i = 0; i < plan->num_order; i++) {
        bool after = false;
        if (fill_add(&f, o->lengths[plan->order[i]], &after))
            plan->micro_begin[++plan->num_micro] = i;
        if (after)
            plan->micro_begin[++plan->num_micro] = i + 1;
    }
    if (f.count > 0 && !o->carry_over)
        plan->micro_begin[++plan->num_micro] = plan->num_order;
}

static void build_counted(batch_plan *plan)
{
    const batch_plan_options *o = &plan->options;
    int64_t m = o->micro_batch_size;
    plan->num_micro = ith_div_ceil(plan->num_order, m);
    for (int64_t j = 0; j <= plan->num_micro; j++)
        plan->micro_begin[j] = ith_min_i64(j * m, plan->num_order);
}

/* Groups the permutation by bins, window after window, in place; returns the number of bins. */
static int64_t pack_windows(batch_plan *plan)
{
    const batch_plan_options *o = &plan->options;
    int64_t num_bins = 0;
    for (int64_t begin = 0; begin < o->count; begin += o->window) {
        int64_t n = ith_min_i64(o->window, o->count - begin);
        int64_t *docs = plan->window_docs, *placed = plan->window_docs + o->window;
        memcpy(docs, plan->permutation + begin, (size_t)n * 8);
        for (int64_t i = 0; i < n; i++)
            plan->window_lengths[i] = (int32_t)o->lengths[docs[i]];
        int64_t bins =
            ith_best_fit_run(plan->fit, plan->window_lengths, n, placed, plan->window_begin);
        for (int64_t i = 0; i < n; i++)
            plan->permutation[begin + i] = docs[placed[i]];
        for (int64_t b = 0; b < bins; b++)
            plan->bin_begin[num_bins++] = begin + plan->window_begin[b];
    }
    plan->bin_begin[num_bins] = o->count;
    return num_bins;
}

static void build_packed(batch_plan *plan, int64_t epoch)
{
    const batch_plan_options *o = &plan->options;
    int64_t num_bins = pack_windows(plan);
    permute(o, "bin order", epoch, num_bins, plan->bin_order);
    plan->num_order = plan->num_micro = 0;
    for (int64_t i = 0; i < num_bins; i++) {
        int64_t bin = plan->bin_order[i], begin = plan->bin_begin[bin];
        int64_t n = plan->bin_begin[bin + 1] - begin;
        plan->micro_begin[plan->num_micro++] = plan->num_order;
        memcpy(plan->order + plan->num_order, plan->permutation + begin, (size_t)n * 8);
        plan->num_order += n;
    }
    plan->micro_begin[plan->num_micro] = plan->num_order;
}

void batch_plan_build(batch_plan *plan, int64_t epoch, const int64_t *carry, int64_t num_carry)
{
    const batch_plan_options *o = &plan->options;
    if (o->strategy == ITH_BATCHING_PACKING) {
        permute(o, "epoch order", epoch, o->count, plan->permutation);
        build_packed(plan, epoch);
        return;
    }
    ITH_ASSERT(num_carry == 0 || o->carry_over);
    if (num_carry)
        memmove(plan->order, carry, (size_t)num_carry * 8);
    permute(o, "epoch order", epoch, o->count, plan->order + num_carry);
    plan->num_order = num_carry + o->count;
    if (is_dynamic(o->strategy))
        build_dynamic(plan);
    else
        build_counted(plan);
}
