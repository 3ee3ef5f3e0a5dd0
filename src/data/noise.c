/* noise.c - masks tokens and lays out the rows of diffusion training.
 * Invariants: 1. nothing is allocated after create. 2. A document's noisy rows are whole blocks in
 * order. 3. Rows left out are read by no loss row. */
#include "data/noise.h"

#include "base/checked.h"
#include "base/rng.h"

struct ith_noiser {
    ith_noise_options options;
    ith_batch_limits limits;
    int64_t max_len; /* tokens of one sample, padding included */
    /* one sample */
    int32_t *x0, *xt, *target;
    float *weights;
    double *u;
    bool *may;
    int32_t *stray;       /* NULL: options.random is 0 */
    double factor;        /* of the weights being put */
    const int32_t *steps; /* of a trajectory; NULL: not one */
    /* the batch being made */
    ith_micro_batch out;
};

static int64_t padded_len(const ith_noise_options *o, int64_t len)
{
    if (o->padding == ITH_PAD_FULL)
        return ith_max_i64(len, o->full_len);
    if (o->padding == ITH_PAD_NONE)
        return len;
    return o->padding == ITH_PAD_END ? len + 1 : ith_round_up(len + 1, o->block_size);
}

static ith_batch_limits limits_of(const ith_noise_options *o, const ith_batch_limits *clean)
{
    int64_t halves = o->blocks ? 2 : 1, copies = o->complementary ? 2 : 1;
    int64_t extra = padded_len(o, clean->max_doc_tokens) - clean->max_doc_tokens;
    int64_t tokens = clean->max_tokens + clean->max_docs * ith_max_i64(extra, 0);
    if (o->padding == ITH_PAD_BLOCK)
        tokens = clean->max_tokens + clean->max_docs * o->block_size;
    if (o->padding == ITH_PAD_FULL)
        tokens = ith_max_i64(clean->max_tokens, clean->max_docs * o->full_len);
    ith_batch_limits l = *clean;
    l.max_tokens = tokens * halves * copies;
    l.max_docs = clean->max_docs * copies;
    l.max_labels = ith_max_i64(tokens * copies, 1);
    l.max_doc_tokens = padded_len(o, clean->max_doc_tokens) * halves;
    return l;
}

ith_status ith_noiser_create(ith_noiser **out, const ith_noise_options *options,
                             const ith_batch_limits *clean, ith_error *err)
{
    ith_noiser *n = NULL;
    ith_status status = ITH_OK;
    ITH_ASSERT(options->low >= 0 && options->low <= options->high && options->high <= 1);
    ITH_ASSERT(options->block_size > 0 || !options->blocks);
    ITH_ASSERT(options->random <= 0 || options->vocab_size > 1);
    ITH_TRY(ith_alloc_zero((void **)&n, 1, sizeof *n, "noise", err));
    n->options = *options;
    n->limits = limits_of(options, clean);
    n->max_len = padded_len(options, clean->max_doc_tokens);
    n->factor = 1;
    int64_t len = n->max_len, rows = n->limits.max_tokens, docs = n->limits.max_docs;
    ITH_TRY_OUT(ith_alloc((void **)&n->x0, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->xt, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->target, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->weights, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->u, len * 8, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->may, len, "noise", err));
    if (options->random > 0)
        ITH_TRY_OUT(ith_alloc((void **)&n->stray, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->out.ids, rows * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->out.position_ids, rows * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->out.labels, rows * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->out.weights, rows * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->out.cu_seqlens, (docs + 1) * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->out.noisy, (docs + 1) * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->out.sample, (docs + 1) * 8, "noise", err));
    *out = n;
    return ITH_OK;
out:
    ith_noiser_destroy(n);
    return status;
}

void ith_noiser_destroy(ith_noiser *n)
{
    if (!n)
        return;
    void *parts[] = {n->x0,         n->xt,          n->target,
                     n->weights,    n->u,           n->may,
                     n->stray,      n->out.ids,     n->out.position_ids,
                     n->out.labels, n->out.weights, n->out.cu_seqlens,
                     n->out.noisy,  n->out.sample,  n};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        ith_free(parts[i]);
}

ith_batch_limits ith_noiser_limits(const ith_noiser *n)
{
    return n->limits;
}

/* ---- rows of a document ---- */

void ith_noiser_begin(ith_noiser *n)
{
    ith_micro_batch *b = &n->out;
    b->num_tokens = b->num_docs = b->num_labels = 0;
    b->weight_sum = 0;
    b->cu_seqlens[0] = 0;
}

static void put_row(ith_noiser *n, int32_t id, int64_t position, int32_t label, float weight)
{
    ith_micro_batch *b = &n->out;
    int64_t t = b->num_tokens++;
    ITH_ASSERT(t < n->limits.max_tokens);
    b->ids[t] = id;
    b->position_ids[t] = (int32_t)position;
    b->labels[t] = label;
    b->weights[t] = label >= 0 ? (float)((double)weight * n->factor) : 0;
    b->num_labels += label >= 0;
    b->weight_sum += (double)b->weights[t];
}

/* Token whose target row i carries; len: none. */
static int64_t target_of(const ith_noise_options *o, int64_t i)
{
    return o->same_token ? i : i + 1;
}

void ith_noiser_add(ith_noiser *n, const int32_t *x0, const int32_t *xt, const int32_t *target,
                    const float *weights, int64_t len, int64_t sample)
{
    const ith_noise_options *o = &n->options;
    ith_micro_batch *out = &n->out;
    int64_t first = out->num_tokens, b = o->blocks ? o->block_size : ith_max_i64(len, 1), last = -1;
    ITH_ASSERT(len <= n->max_len && out->num_docs < n->limits.max_docs);
    for (int64_t begin = 0; begin < len; begin += b) {
        int64_t end = ith_min_i64(begin + b, len);
        bool live = o->keep_all;
        for (int64_t i = begin; i < end; i++)
            live |= target_of(o, i) < len && target[target_of(o, i)] >= 0;
        if (!live)
            continue;
        last = begin;
        for (int64_t i = begin; i < end; i++) {
            int64_t j = target_of(o, i);
            put_row(n, xt[i], i, j < len ? target[j] : -100, j < len ? weights[j] : 0);
        }
    }
    if (last < 0) /* nothing to learn here */
        return;
    int64_t noisy = out->num_tokens - first, clean = o->keep_all ? len : last;
    for (int64_t i = 0; o->blocks && i < clean; i++)
        put_row(n, x0[i], i, -100, 0);
    out->noisy[out->num_docs] = o->blocks ? (int32_t)noisy : 0;
    out->sample[out->num_docs] = sample;
    out->cu_seqlens[++out->num_docs] = (int32_t)out->num_tokens;
}

void ith_noiser_end(ith_noiser *n, ith_micro_batch *out)
{
    *out = n->out;
    if (!n->options.blocks)
        out->noisy = NULL;
}

/* ---- drawing ---- */

int64_t ith_noise_tokens(const ith_noise_options *o, const int32_t *x0, const bool *may,
                         const double *u, const int32_t *stray, double t, bool other, int64_t len,
                         int32_t *xt, int32_t *target)
{
    int64_t targets = 0;
    for (int64_t i = 0; i < len; i++) {
        /* a clean mask token is a masked one, as in dFactory */
        bool hit = may[i] && ((u[i] < t) != other || x0[i] == o->mask_id);
        bool replaced = may[i] && !hit && stray && stray[i] >= 0;
        xt[i] = hit ? o->mask_id : replaced ? stray[i] : x0[i];
        target[i] = hit || replaced ? x0[i] : -100;
        targets += target[i] >= 0;
    }
    return targets;
}

int64_t ith_noise_states(const ith_noise_options *o, const int32_t *x0, const bool *may,
                         const int32_t *steps, int64_t from, int64_t to, int64_t len, int32_t *xt,
                         int32_t *target)
{
    int64_t targets = 0;
    for (int64_t i = 0; i < len; i++) {
        bool masked = may[i] && steps[i] >= from, hit = masked && steps[i] < to;
        xt[i] = masked ? o->mask_id : x0[i];
        target[i] = hit ? x0[i] : -100;
        targets += hit;
    }
    return targets;
}

void ith_noise_draw_states(int64_t num_steps, double u, int64_t *from, int64_t *to)
{
    ITH_ASSERT(num_steps > 0);
    int64_t pairs = num_steps * (num_steps + 1) / 2, i = 0,
            k = ith_min_i64((int64_t)(u * (double)pairs), pairs - 1);
    for (; k >= num_steps - i; i++)
        k -= num_steps - i;
    *from = i;
    *to = i + 1 + k;
}

/* Sample d of a batch with its padding: x0, may, weights. Returns its length. */
static int64_t take_sample(ith_noiser *n, const ith_samples *samples, const ith_micro_batch *clean,
                           int64_t d)
{
    const ith_noise_options *o = &n->options;
    int64_t begin = clean->cu_seqlens[d], len = clean->cu_seqlens[d + 1] - begin;
    for (int64_t i = 0; i < len; i++) { /* row i - 1 of the clean batch carries token i */
        n->x0[i] = clean->ids[begin + i];
        n->may[i] = i > 0 && clean->labels[begin + i - 1] >= 0;
        n->weights[i] = n->may[i] ? clean->weights[begin + i - 1] : 0;
    }
    bool cut = false;
    n->steps = NULL;
    if (samples) {
        ith_sample s = ith_samples_get(samples, clean->sample[d]);
        cut = s.full_tokens > s.num_tokens;
        n->steps = s.steps;
    }
    if (n->steps)
        return len;
    bool ends = len > 0 && n->may[len - 1] && !cut;
    int64_t total = ends || o->padding == ITH_PAD_FULL ? padded_len(o, len) : len;
    if (o->padding == ITH_PAD_END && len > 0 && n->x0[len - 1] == o->end_id)
        total = len;
    float weight = 1;
    for (int64_t i = 0; i < len; i++)
        weight = n->may[i] ? n->weights[i] : weight;
    for (int64_t i = len; i < total; i++) {
        n->x0[i] = o->end_id;
        n->may[i] = true;
        n->weights[i] = weight;
    }
    return total;
}

/* One copy of a sample; returns its part of C. */
static double add_copy(ith_noiser *n, double t, bool other, int64_t len, int64_t sample)
{
    const ith_noise_options *o = &n->options;
    double before = n->out.weight_sum, all = 0, ratio = other ? 1 - t : t;
    bool inverse = o->weight == ITH_WEIGHT_INVERSE;
    (void)ith_noise_tokens(o, n->x0, n->may, n->u, n->stray, t, other, len, n->xt, n->target);
    n->factor = inverse && ratio > 0 ? 1 / ratio : 1; /* ratio 0 masks nothing */
    ith_noiser_add(n, n->x0, n->xt, n->target, n->weights, len, sample);
    n->factor = 1;
    for (int64_t i = 0; i < len; i++)
        all += n->may[i] ? (double)n->weights[i] : 0;
    return inverse ? all : n->out.weight_sum - before;
}

/* A sample of a trajectory; returns its part of C. */
static double add_states(ith_noiser *n, double u, int64_t len, int64_t sample)
{
    double before = n->out.weight_sum;
    int64_t num_steps = 1, from = 0, to = 0;
    for (int64_t i = 0; i < len; i++)
        num_steps = ith_max_i64(num_steps, n->may[i] ? (int64_t)n->steps[i] + 1 : 0);
    ith_noise_draw_states(num_steps, u, &from, &to);
    (void)ith_noise_states(&n->options, n->x0, n->may, n->steps, from, to, len, n->xt, n->target);
    ith_noiser_add(n, n->x0, n->xt, n->target, n->weights, len, sample);
    return n->out.weight_sum - before;
}

/* The ids that would replace the sample's tokens, -1 where none would. */
static void draw_strays(ith_noiser *n, int64_t epoch, int64_t sample, int64_t len)
{
    const ith_noise_options *o = &n->options;
    uint64_t stream =
        ith_rng_u64(o->seed, ith_rng_stream("random tokens") + (uint64_t)epoch, (uint64_t)sample);
    for (int64_t i = 0; n->stray && i < len; i++) {
        bool hit = ith_rng_uniform(o->seed, stream, 2 * (uint64_t)i) < o->random;
        int64_t id = ith_rng_below(o->seed, stream, 2 * (uint64_t)i + 1, o->vocab_size - 1);
        n->stray[i] = hit ? (int32_t)(id + (id >= o->mask_id)) : -1;
    }
}

void ith_noiser_apply(ith_noiser *n, const ith_samples *samples, const ith_micro_batch *clean,
                      int64_t epoch, int64_t num_micro, ith_micro_batch *out)
{
    const ith_noise_options *o = &n->options;
    double part = 0;
    ith_noiser_begin(n);
    for (int64_t d = 0; d < clean->num_docs; d++) {
        int64_t sample = clean->sample[d], len = take_sample(n, samples, clean, d);
        uint64_t stream = ith_rng_u64(o->seed, ith_rng_stream("diffusion noise") + (uint64_t)epoch,
                                      (uint64_t)sample);
        double draw = ith_rng_uniform(o->seed, stream, 0), t = o->low + (o->high - o->low) * draw;
        if (n->steps) {
            part += add_states(n, draw, len, sample);
            continue;
        }
        for (int64_t i = 0; i < len; i++)
            n->u[i] = ith_rng_uniform(o->seed, stream, (uint64_t)i + 1);
        draw_strays(n, epoch, sample, len);
        part += add_copy(n, t, false, len, sample);
        if (o->complementary)
            part += add_copy(n, t, true, len, sample);
    }
    if (o->per_micro_batch && n->out.weight_sum > 0) {
        double scale = 1 / (n->out.weight_sum * (double)num_micro);
        for (int64_t i = 0; i < n->out.num_tokens; i++)
            n->out.weights[i] = (float)((double)n->out.weights[i] * scale);
        part = 1 / (double)num_micro;
    }
    ith_noiser_end(n, out);
    out->weight_sum = part;
}
