/* noise.c - masks tokens and lays out the rows of diffusion training.
 *
 * Invariants:
 *  1. Nothing is allocated after create.
 *  2. A document's noisy rows are whole blocks in order.
 *  3. Rows left out are read by no loss row.
 *  4. How a batch is laid out does not depend on which rows are the own ones. */
#include "data/noise.h"

#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/rng.h"

struct ith_noiser {
    ith_noise_options options;
    ith_batch_limits limits;
    int64_t max_len; /* tokens of one sample, padding included */
    /* one sample */
    const int32_t *ids; /* [num_ids]; end_id follows */
    int64_t num_ids;
    int32_t max_id;       /* of all samples */
    int32_t *x0;          /* of one that has mask_id */
    bool has_mask;        /* it does */
    const int32_t *steps; /* of a trajectory; NULL: not one */
    bool *may, *hit;
    int32_t *stands;
    float *weights;
    double *u;
    int32_t *stray; /* NULL: options.random is 0 */
    double factor;  /* of the weights being put */
    /* the batch being made */
    int64_t ranges[4]; /* rows that are set */
    int64_t damaged;   /* a sample with an id that cannot be, -1: none */
    ith_micro_batch out;
};

int64_t ith_noise_padded(const void *noise_options, int64_t len)
{
    const ith_noise_options *o = noise_options;
    if (o->padding == ITH_PAD_FULL)
        return ith_max_i64(len, o->full_len);
    if (o->padding == ITH_PAD_NONE)
        return len;
    return o->padding == ITH_PAD_END ? len + 1 : ith_round_up(len + 1, o->block_size);
}

static ith_batch_limits limits_of(const ith_noise_options *o, const ith_batch_limits *clean)
{
    int64_t halves = o->blocks ? 2 : 1, copies = o->complementary ? 2 : 1;
    ith_batch_limits l = *clean;
    l.max_tokens = clean->max_tokens * halves * copies;
    l.max_whole_tokens = clean->max_whole_tokens * halves * copies;
    l.max_docs = clean->max_docs * copies;
    l.max_labels = ith_max_i64(clean->max_tokens * copies, 1);
    l.max_doc_tokens = clean->max_doc_tokens * halves;
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
    n->max_len = clean->max_doc_tokens;
    n->factor = 1;
    int64_t len = n->max_len, rows = n->limits.max_tokens, docs = n->limits.max_docs;
    ITH_TRY_OUT(ith_alloc((void **)&n->x0, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->stands, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->weights, len * 4, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->u, len * 8, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->may, len, "noise", err));
    ITH_TRY_OUT(ith_alloc((void **)&n->hit, len, "noise", err));
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
    void *parts[] = {n->x0,         n->stands,      n->weights,
                     n->u,          n->may,         n->hit,
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

static void set_own(ith_noiser *n, int64_t begin, int64_t end)
{
    memcpy(n->ranges, (int64_t[4]){begin, end, 0, 0}, sizeof n->ranges);
}

static bool is_own(const ith_noiser *n, int64_t row)
{
    return (row >= n->ranges[0] && row < n->ranges[1]) ||
           (row >= n->ranges[2] && row < n->ranges[3]);
}

static void begin_batch(ith_noiser *n)
{
    ith_micro_batch *b = &n->out;
    b->num_tokens = b->num_docs = b->num_labels = b->num_read = 0;
    b->weight_sum = 0;
    b->cu_seqlens[0] = 0;
    n->damaged = -1;
}

void ith_noiser_begin(ith_noiser *n)
{
    begin_batch(n);
    set_own(n, 0, INT64_MAX);
}

/* Token i of the sample, or what follows it. */
static int32_t read_token(ith_noiser *n, int64_t i, int64_t sample)
{
    if (i >= n->num_ids)
        return n->options.end_id;
    n->out.num_read++;
    if (n->ids[i] < 0 || n->ids[i] > n->max_id)
        n->damaged = sample;
    return n->ids[i];
}

/* The row of token i, noisy or clean; target: the token whose id it predicts, -1: none. */
static void put_row(ith_noiser *n, int64_t i, bool noisy, int64_t target, int64_t sample)
{
    ith_micro_batch *b = &n->out;
    int64_t t = b->num_tokens++;
    ITH_ASSERT(t < n->limits.max_tokens);
    float weight = target >= 0 ? (float)((double)n->weights[target] * n->factor) : 0;
    b->position_ids[t] = (int32_t)i;
    b->num_labels += target >= 0;
    b->weight_sum += (double)weight;
    if (!is_own(n, t))
        return;
    b->ids[t] = noisy && n->stands[i] >= 0 ? n->stands[i] : read_token(n, i, sample);
    b->labels[t] = target >= 0 ? read_token(n, target, sample) : ITH_LABEL_IGNORE;
    b->weights[t] = weight;
}

/* Token whose id row i predicts, -1: none. */
static int64_t target_of(const ith_noiser *n, int64_t i, int64_t len)
{
    int64_t j = n->options.same_token ? i : i + 1;
    return j < len && n->hit[j] ? j : -1;
}

/* The sample at hand, of which stands, hit and weights say what becomes of it. */
static void put_document(ith_noiser *n, int64_t len, int64_t sample)
{
    const ith_noise_options *o = &n->options;
    ith_micro_batch *out = &n->out;
    int64_t first = out->num_tokens, b = o->blocks ? o->block_size : ith_max_i64(len, 1), last = -1;
    ITH_ASSERT(len <= n->max_len && out->num_docs < n->limits.max_docs);
    for (int64_t begin = 0; begin < len; begin += b) {
        int64_t end = ith_min_i64(begin + b, len);
        bool live = o->keep_all;
        for (int64_t i = begin; i < end; i++)
            live |= target_of(n, i, len) >= 0;
        if (!live)
            continue;
        last = begin;
        for (int64_t i = begin; i < end; i++)
            put_row(n, i, true, target_of(n, i, len), sample);
    }
    if (last < 0) /* nothing to learn here */
        return;
    int64_t noisy = out->num_tokens - first, clean = o->keep_all ? len : last;
    for (int64_t i = 0; o->blocks && i < clean; i++)
        put_row(n, i, false, -1, sample);
    out->noisy[out->num_docs] = o->blocks ? (int32_t)noisy : 0;
    out->sample[out->num_docs] = sample;
    out->cu_seqlens[++out->num_docs] = (int32_t)out->num_tokens;
}

void ith_noiser_add(ith_noiser *n, const int32_t *x0, const int32_t *xt, const int32_t *target,
                    const float *weights, int64_t len, int64_t sample)
{
    ITH_ASSERT(len <= n->max_len);
    n->ids = x0;
    n->num_ids = len;
    n->max_id = INT32_MAX;
    for (int64_t i = 0; i < len; i++) {
        ITH_ASSERT(target[i] < 0 || target[i] == x0[i]);
        n->stands[i] = xt[i];
        n->hit[i] = target[i] >= 0;
        n->weights[i] = weights[i];
    }
    put_document(n, len, sample);
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
                         int32_t *stands, bool *hit)
{
    int64_t hits = 0;
    for (int64_t i = 0; i < len; i++) {
        /* a clean mask token is a masked one, as in dFactory */
        bool masked = may[i] && ((u[i] < t) != other || (x0 && x0[i] == o->mask_id));
        bool replaced = may[i] && !masked && stray && stray[i] >= 0;
        stands[i] = masked ? o->mask_id : replaced ? stray[i] : -1;
        hit[i] = masked || replaced;
        hits += hit[i];
    }
    return hits;
}

int64_t ith_noise_states(const ith_noise_options *o, const bool *may, const int32_t *steps,
                         int64_t from, int64_t to, int64_t len, int32_t *stands, bool *hit)
{
    int64_t hits = 0;
    for (int64_t i = 0; i < len; i++) {
        bool masked = may[i] && steps[i] >= from;
        stands[i] = masked ? o->mask_id : -1;
        hit[i] = masked && steps[i] < to;
        hits += hit[i];
    }
    return hits;
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

/* A sample with its padding: ids, may, weights. Returns its length. */
static int64_t take_sample(ith_noiser *n, const ith_samples *samples, int64_t sample)
{
    const ith_noise_options *o = &n->options;
    ith_sample s = ith_samples_get(samples, sample);
    int64_t len = s.num_tokens, total = len;
    float weight = 1;
    n->ids = s.ids;
    n->num_ids = len;
    n->steps = s.steps;
    n->has_mask = s.has_mask;
    ITH_ASSERT(len <= n->max_len);
    memset(n->may, 0, (size_t)len);
    for (int64_t r = 0; r < s.num_runs; r++) /* nothing predicts the first token */
        for (int64_t i = ith_max_i64(s.runs[r].begin, 1); i < s.runs[r].end; i++) {
            n->may[i] = true;
            n->weights[i] = weight = s.runs[r].weight;
        }
    bool ends = n->may[len - 1] && s.full_tokens <= len;
    if (s.steps || (!ends && o->padding != ITH_PAD_FULL))
        return len;
    if (o->padding != ITH_PAD_END || read_token(n, len - 1, sample) != o->end_id)
        total = ith_noise_padded(o, len);
    ITH_ASSERT(total <= n->max_len);
    for (int64_t i = len; i < total; i++) {
        n->may[i] = true;
        n->weights[i] = weight;
    }
    return total;
}

/* Its ids, where they decide what is masked. */
static const int32_t *read_masks(ith_noiser *n, int64_t len, int64_t sample)
{
    for (int64_t i = 0; n->has_mask && i < len; i++)
        n->x0[i] = read_token(n, i, sample);
    return n->has_mask ? n->x0 : NULL;
}

/* One copy of a sample; returns its part of C. */
static double add_copy(ith_noiser *n, double t, bool other, int64_t len, int64_t sample)
{
    const ith_noise_options *o = &n->options;
    double before = n->out.weight_sum, all = 0, ratio = other ? 1 - t : t;
    bool inverse = o->weight == ITH_WEIGHT_INVERSE;
    (void)ith_noise_tokens(o, read_masks(n, len, sample), n->may, n->u, n->stray, t, other, len,
                           n->stands, n->hit);
    n->factor = inverse && ratio > 0 ? 1 / ratio : 1; /* ratio 0 masks nothing */
    put_document(n, len, sample);
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
    (void)ith_noise_states(&n->options, n->may, n->steps, from, to, len, n->stands, n->hit);
    put_document(n, len, sample);
    return n->out.weight_sum - before;
}

/* u of the tokens that may be masked, and the ids that would replace them, -1 where none would. */
static void draw_tokens(ith_noiser *n, uint64_t stream, int64_t epoch, int64_t sample, int64_t len)
{
    const ith_noise_options *o = &n->options;
    uint64_t strays =
        ith_rng_u64(o->seed, ith_rng_stream("random tokens") + (uint64_t)epoch, (uint64_t)sample);
    for (int64_t i = 0; i < len; i++) {
        if (!n->may[i])
            continue;
        n->u[i] = ith_rng_uniform(o->seed, stream, (uint64_t)i + 1);
        if (!n->stray)
            continue;
        bool hit = ith_rng_uniform(o->seed, strays, 2 * (uint64_t)i) < o->random;
        int64_t id = ith_rng_below(o->seed, strays, 2 * (uint64_t)i + 1, o->vocab_size - 1);
        n->stray[i] = hit ? (int32_t)(id + (id >= o->mask_id)) : -1;
    }
}

/* All documents; returns their part of C. */
static double lay_out(ith_noiser *n, const ith_samples *samples, const ith_micro_batch *clean,
                      int64_t epoch)
{
    const ith_noise_options *o = &n->options;
    double part = 0;
    begin_batch(n);
    n->max_id = ith_samples_max_id(samples);
    for (int64_t d = 0; d < clean->num_docs; d++) {
        int64_t sample = clean->sample[d], len = take_sample(n, samples, sample);
        uint64_t stream = ith_rng_u64(o->seed, ith_rng_stream("diffusion noise") + (uint64_t)epoch,
                                      (uint64_t)sample);
        double draw = ith_rng_uniform(o->seed, stream, 0), t = o->low + (o->high - o->low) * draw;
        if (n->steps) {
            part += add_states(n, draw, len, sample);
            continue;
        }
        draw_tokens(n, stream, epoch, sample, len);
        part += add_copy(n, t, false, len, sample);
        if (o->complementary)
            part += add_copy(n, t, true, len, sample);
    }
    return part;
}

static bool is_mean(const ith_noiser *n)
{
    return n->options.per_micro_batch && n->out.weight_sum > 0;
}

double ith_noiser_weight(ith_noiser *n, const ith_samples *samples, const ith_micro_batch *clean,
                         int64_t epoch, int64_t num_micro)
{
    set_own(n, 0, 0);
    double part = lay_out(n, samples, clean, epoch);
    return is_mean(n) ? 1 / (double)num_micro : part;
}

ith_status ith_noiser_apply(ith_noiser *n, const ith_samples *samples, const ith_micro_batch *clean,
                            int64_t epoch, int64_t num_micro, ith_micro_batch *out, ith_error *err)
{
    const ith_noise_options *o = &n->options;
    if (o->own_rows && !clean->whole) {
        (void)ith_noiser_weight(n, samples, clean, epoch, num_micro);
        o->own_rows(o->own_arg, n->out.num_tokens, n->ranges);
    } else {
        set_own(n, 0, INT64_MAX);
    }
    double part = lay_out(n, samples, clean, epoch);
    if (n->damaged >= 0)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "cache of tokenized data is damaged (an id of sample %" PRId64
                        " cannot be): remove it and start again",
                        n->damaged);
    if (is_mean(n)) {
        double scale = 1 / (n->out.weight_sum * (double)num_micro);
        for (int r = 0; r < 4; r += 2)
            for (int64_t t = n->ranges[r]; t < ith_min_i64(n->ranges[r + 1], n->out.num_tokens);
                 t++)
                n->out.weights[t] = (float)((double)n->out.weights[t] * scale);
        part = 1 / (double)num_micro;
    }
    ith_noiser_end(n, out);
    out->weight_sum = part;
    out->whole = clean->whole;
    return ITH_OK;
}
