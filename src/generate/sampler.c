/* sampler.c - greedy and random choice of the next token. */
#include "generate/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"

ith_status ith_sampler_init(ith_sampler *s, int64_t vocab_size, ith_error *err)
{
    memset(s, 0, sizeof *s);
    s->vocab_size = vocab_size;
    ITH_TRY(ith_alloc((void **)&s->values, vocab_size * 4, "sampler", err));
    ith_status status = ith_alloc((void **)&s->order, vocab_size * 4, "sampler", err);
    if (status != ITH_OK)
        ith_sampler_deinit(s);
    return status;
}

void ith_sampler_deinit(ith_sampler *s)
{
    ith_free(s->values);
    ith_free(s->order);
    memset(s, 0, sizeof *s);
}

/* Once per id, however often it occurred: positive logits are divided, negative ones multiplied. */
static void penalize(ith_sampler *s, double penalty, const int32_t *past, int64_t num_past,
                     const float *logits)
{
    for (int64_t i = 0; i < num_past; i++) {
        if (past[i] < 0 || past[i] >= s->vocab_size)
            continue;
        float x = logits[past[i]]; /* from the input: a repeated id gives the same value again */
        s->values[past[i]] = (float)(x > 0 ? (double)x / penalty : (double)x * penalty);
    }
}

static int32_t largest(const float *values, int64_t n)
{
    int32_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(values[i]) && (best < 0 || values[i] > values[best]))
            best = (int32_t)i;
    return best;
}

/* Larger value first, lower id first among equals. `sort_values` is per thread: qsort has no
 * argument. */
static _Thread_local const float *sort_values;

static int by_value(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    if (sort_values[x] != sort_values[y])
        return sort_values[x] > sort_values[y] ? -1 : 1;
    return x < y ? -1 : 1;
}

/* Number of leading entries of the sorted order that stay after top-k, top-p and min-p; probs:
 * their weights. */
static int64_t keep_count(const ith_sampler *s, const ith_sampling *how, int64_t n, double total)
{
    double top = 1.0 / total, sum = 0; /* weights are exp(x - max): the largest is 1 */
    int64_t kept = 0;
    for (; kept < n; kept++) {
        double p = exp((double)s->values[s->order[kept]] - (double)s->values[s->order[0]]) / total;
        if (kept && ((how->top_p < 1 && sum >= how->top_p) || p < how->min_p * top))
            break;
        sum += p;
    }
    return kept;
}

static int32_t draw(ith_sampler *s, const ith_sampling *how, uint64_t stream, uint64_t position)
{
    int64_t n = 0;
    for (int64_t i = 0; i < s->vocab_size; i++)
        if (isfinite(s->values[i]))
            s->order[n++] = (int32_t)i;
    sort_values = s->values;
    qsort(s->order, (size_t)n, sizeof *s->order, by_value);
    if (how->top_k > 0)
        n = ith_min_i64(n, how->top_k);
    double max = (double)s->values[s->order[0]], total = 0, kept_total = 0;
    for (int64_t i = 0; i < n; i++)
        total += exp((double)s->values[s->order[i]] - max);
    n = keep_count(s, how, n, total);
    for (int64_t i = 0; i < n; i++)
        kept_total += exp((double)s->values[s->order[i]] - max);
    double u = ith_rng_uniform(how->seed, stream, position) * kept_total;
    for (int64_t i = 0; i + 1 < n; i++) {
        u -= exp((double)s->values[s->order[i]] - max);
        if (u < 0)
            return s->order[i];
    }
    return s->order[n - 1];
}

ith_status ith_sampler_next(ith_sampler *s, const ith_sampling *how, const float *logits,
                            const int32_t *past, int64_t num_past, uint64_t stream, int32_t *out,
                            ith_error *err)
{
    memcpy(s->values, logits, (size_t)s->vocab_size * 4);
    if (how->repetition_penalty != 1.0)
        penalize(s, how->repetition_penalty, past, num_past, logits);
    int32_t best = largest(s->values, s->vocab_size);
    if (best < 0)
        return ith_fail(err, ITH_ERR_RUN,
                        "no logit is finite after %lld tokens (are the weights damaged?)",
                        (long long)num_past);
    if (!how->do_sample || how->temperature <= 0) {
        *out = best;
        return ITH_OK;
    }
    for (int64_t i = 0; i < s->vocab_size; i++)
        s->values[i] = (float)((double)s->values[i] / how->temperature);
    *out = draw(s, how, stream, (uint64_t)num_past);
    return ITH_OK;
}
