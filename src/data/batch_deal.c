/* batch_deal.c - heaviest items first, each to the lightest place that takes it; then places of
 * about equal work make a round.
 *
 * Invariants:
 *  1. Every document of the step is in exactly one micro-batch.
 *  2. Nothing but lengths and options decides. */
#include "data/batch_deal.h"

#include "base/checked.h"

#include <stdlib.h>
#include <string.h>

#define TRIES 16 /* rounds of ranks that are tried at least: 1, 2, 4, .. */

/* What is dealt: a document, or all those of a micro-batch that stay together. */
typedef struct {
    int64_t first, count, tokens; /* documents [first, first + count) of the step */
    double squares, media;        /* of their lengths; work of their images */
} item;

/* Items on their way to places; a place becomes a micro-batch. */
typedef struct {
    int64_t *items;  /* [n] numbers */
    int64_t *next;   /* [n] the one placed before it at the same place, -1: none */
    int64_t *last;   /* [places] last one placed, -1: none */
    int64_t *tokens; /* [places] */
    int64_t *count;  /* [places] documents */
    double *load;    /* [places] work */
    int64_t n, places;
} placing;

typedef struct {
    double load;
    int64_t place;
} ranked;

struct batch_deal_scratch {
    placing cut, whole;
    batch_list other_cut, other_whole; /* a schedule that is tried */
    const batch_list *step;
    item *items;       /* [max_docs] in the order of the step */
    int64_t *all;      /* [max_docs] their numbers, most work first */
    bool *placed;      /* [max_docs] */
    ranked *ranked;    /* [places, or max_docs if there are more] */
    double *total;     /* [ranks] work so far */
    int64_t *place_of; /* [ranks] in this round */
};

typedef struct {
    int64_t tokens, docs;
    double linear, quadratic;
} place_limits;

static int64_t num_ranks(const batch_deal_options *o)
{
    return o->groups * o->cp_size;
}

static int64_t group_rounds(const batch_deal_options *o)
{
    return ith_div_ceil(o->max_micro, o->groups);
}

/* A document finds no room only where every place is more than half full, and a rank's share is at
 * least half of what a group's micro-batch has for it. */
static int64_t rank_rounds(const batch_deal_options *o)
{
    return o->rank_docs ? 4 * group_rounds(o) + 2 : 0;
}

int64_t batch_deal_max_rounds(const batch_deal_options *o)
{
    return group_rounds(o) + rank_rounds(o);
}

static ith_status alloc_list(batch_list *list, int64_t docs, int64_t micro, ith_error *err)
{
    ITH_TRY(ith_alloc((void **)&list->docs, docs * 8, "dealing", err));
    return ith_alloc((void **)&list->begin, (micro + 1) * 8, "dealing", err);
}

static void free_list(batch_list *list)
{
    ith_free(list->docs);
    ith_free(list->begin);
}

static ith_status alloc_placing(placing *p, int64_t docs, int64_t places, ith_error *err)
{
    ITH_TRY(ith_alloc((void **)&p->items, docs * 8, "dealing", err));
    ITH_TRY(ith_alloc((void **)&p->next, docs * 8, "dealing", err));
    ITH_TRY(ith_alloc((void **)&p->last, places * 8, "dealing", err));
    ITH_TRY(ith_alloc((void **)&p->tokens, places * 8, "dealing", err));
    ITH_TRY(ith_alloc((void **)&p->count, places * 8, "dealing", err));
    return ith_alloc((void **)&p->load, places * 8, "dealing", err);
}

static void free_placing(placing *p)
{
    ith_free(p->items);
    ith_free(p->next);
    ith_free(p->last);
    ith_free(p->tokens);
    ith_free(p->count);
    ith_free(p->load);
}

ith_status batch_deal_create(batch_deal *deal, const batch_deal_options *options, ith_error *err)
{
    memset(deal, 0, sizeof *deal);
    deal->options = *options;
    const batch_deal_options *o = &deal->options;
    int64_t docs = o->max_docs, groups = group_rounds(o) * o->groups,
            ranks = rank_rounds(o) * num_ranks(o), places = ith_max_i64(groups, ranks);
    struct batch_deal_scratch *s = NULL;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc_zero((void **)&deal->scratch, 1, sizeof *s, "dealing", err));
    s = deal->scratch;
    ITH_TRY_OUT(alloc_list(&deal->cut, docs, groups, err));
    ITH_TRY_OUT(alloc_placing(&s->cut, docs, groups, err));
    if (ranks) {
        ITH_TRY_OUT(alloc_list(&deal->whole, docs, ranks, err));
        ITH_TRY_OUT(alloc_list(&s->other_cut, docs, groups, err));
        ITH_TRY_OUT(alloc_list(&s->other_whole, docs, ranks, err));
        ITH_TRY_OUT(alloc_placing(&s->whole, docs, ranks, err));
    }
    ITH_TRY_OUT(ith_alloc((void **)&s->items, docs * (int64_t)sizeof *s->items, "dealing", err));
    ITH_TRY_OUT(ith_alloc((void **)&s->all, docs * 8, "dealing", err));
    ITH_TRY_OUT(ith_alloc((void **)&s->placed, docs, "dealing", err));
    ITH_TRY_OUT(ith_alloc((void **)&s->ranked,
                          ith_max_i64(places, docs) * (int64_t)sizeof *s->ranked, "dealing", err));
    ITH_TRY_OUT(ith_alloc((void **)&s->total, num_ranks(o) * 8, "dealing", err));
    ITH_TRY_OUT(ith_alloc((void **)&s->place_of, num_ranks(o) * 8, "dealing", err));
    return ITH_OK;
out:
    batch_deal_destroy(deal);
    return status;
}

void batch_deal_destroy(batch_deal *deal)
{
    struct batch_deal_scratch *s = deal->scratch;
    free_list(&deal->cut);
    free_list(&deal->whole);
    if (s) {
        free_list(&s->other_cut);
        free_list(&s->other_whole);
        free_placing(&s->cut);
        free_placing(&s->whole);
        ith_free(s->items);
        ith_free(s->all);
        ith_free(s->placed);
        ith_free(s->ranked);
        ith_free(s->total);
        ith_free(s->place_of);
    }
    ith_free(s);
    memset(deal, 0, sizeof *deal);
}

/* ---- places ---- */

static double work_of(const place_limits *l, const item *x)
{
    return l->linear * (double)x->tokens + l->quadratic * x->squares + x->media;
}

/* Where documents are cut over the group: its work, that of a rank is a part. */
static place_limits of_groups(const batch_deal_options *o)
{
    return (place_limits){o->group_tokens, o->group_docs, o->work.linear + o->work.exchange,
                          o->work.quadratic};
}

static place_limits of_ranks(const batch_deal_options *o)
{
    return (place_limits){o->rank_tokens, o->rank_docs, o->work.linear, o->work.quadratic};
}

static void clear_places(placing *p, int64_t first, int64_t end)
{
    for (int64_t i = first; i < end; i++) {
        p->last[i] = -1;
        p->tokens[i] = p->count[i] = 0;
        p->load[i] = 0;
    }
}

static void put(placing *p, const place_limits *l, int64_t i, const item *x, int64_t place)
{
    p->next[i] = p->last[place];
    p->last[place] = i;
    p->tokens[place] += x->tokens;
    p->count[place] += x->count;
    p->load[place] += work_of(l, x);
}

static bool has_room(const batch_deal *d, const placing *p, const place_limits *l, const item *x,
                     int64_t place)
{
    return p->tokens[place] + x->tokens <= l->tokens && p->count[place] + x->count <= l->docs &&
           !(d->options.keep_together && p->count[place]);
}

/* Items [begin, end) of p, most work first, each to the lightest of places [first, last) that has
 * room. False: one finds none. */
static bool spread(const batch_deal *d, placing *p, const place_limits *l, int64_t begin,
                   int64_t end, int64_t first, int64_t last)
{
    clear_places(p, first, last);
    p->places = last;
    for (int64_t i = begin; i < end; i++) {
        int64_t best = -1;
        const item *x = &d->scratch->items[p->items[i]];
        for (int64_t k = first; k < last; k++)
            if (has_room(d, p, l, x, k) && (best < 0 || p->load[k] < p->load[best]))
                best = k;
        if (best < 0)
            return false;
        put(p, l, i, x, best);
    }
    return true;
}

static int compare_ranked(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->load != y->load)
        return x->load < y->load ? 1 : -1;
    return (x->place > y->place) - (x->place < y->place);
}

/* Places that hold something, heaviest first; returns how many. */
static int64_t rank_places(batch_deal *d, const placing *p)
{
    ranked *r = d->scratch->ranked;
    int64_t n = 0;
    for (int64_t i = 0; i < p->places; i++)
        if (p->last[i] >= 0)
            r[n++] = (ranked){p->load[i], i};
    qsort(r, (size_t)n, sizeof *r, compare_ranked);
    return n;
}

/* The one of `width` that has least so far and nothing in this round. */
static int64_t next_owner(const struct batch_deal_scratch *s, int64_t width)
{
    int64_t best = -1;
    for (int64_t i = 0; i < width; i++)
        if (s->place_of[i] < 0 && (best < 0 || s->total[i] < s->total[best]))
            best = i;
    return best;
}

/* place -1: an empty micro-batch. */
static void append(const struct batch_deal_scratch *s, const placing *p, int64_t place,
                   batch_list *out)
{
    int64_t end = out->begin[out->num] + (place >= 0 ? p->count[place] : 0);
    for (int64_t i = place >= 0 ? p->last[place] : -1, k = end; i >= 0; i = p->next[i]) {
        const item *x = &s->items[p->items[i]];
        k -= x->count;
        memcpy(out->docs + k, s->step->docs + x->first, (size_t)x->count * 8);
    }
    out->begin[++out->num] = end;
}

/* Places become micro-batches, those of about equal work a round of `width`, in which the heavier
 * ones are for those who had less. Returns the work of the heaviest, summed over rounds. */
static double lay_out(batch_deal *d, const placing *p, int64_t width, batch_list *out,
                      int64_t *rounds)
{
    struct batch_deal_scratch *s = d->scratch;
    int64_t n = rank_places(d, p);
    double sum = 0;
    *rounds = ith_div_ceil(n, width);
    out->num = 0;
    out->begin[0] = 0;
    memset(s->total, 0, (size_t)width * 8);
    for (int64_t first = 0; first < n; first += width) {
        sum += s->ranked[first].load;
        memset(s->place_of, 0xff, (size_t)width * 8);
        for (int64_t i = first; i < ith_min_i64(first + width, n); i++) {
            int64_t owner = next_owner(s, width);
            s->place_of[owner] = s->ranked[i].place;
            s->total[owner] += s->ranked[i].load;
        }
        for (int64_t owner = 0; owner < width; owner++)
            append(s, p, s->place_of[owner], out);
    }
    return sum;
}

/* ---- rounds of groups ---- */

static item item_of(const batch_deal *d, const batch_list *step, int64_t first, int64_t end)
{
    item x = {.first = first, .count = end - first};
    for (int64_t i = first; i < end; i++) {
        int64_t n = d->options.lengths[step->docs[i]];
        x.tokens += n;
        x.squares += (double)n * (double)n;
        x.media += d->options.media ? d->options.media[step->docs[i]] : 0;
    }
    return x;
}

/* The items of the step, and their numbers by work; of equal ones the earlier is first. Returns how
 * many. */
static int64_t take_items(batch_deal *d, const batch_list *step)
{
    struct batch_deal_scratch *s = d->scratch;
    place_limits limits = of_ranks(&d->options);
    bool together = d->options.keep_together;
    int64_t n = together ? step->num : step->begin[step->num];
    s->step = step;
    for (int64_t i = 0; i < n; i++) {
        s->items[i] = together ? item_of(d, step, step->begin[i], step->begin[i + 1])
                               : item_of(d, step, i, i + 1);
        s->ranked[i] = (ranked){work_of(&limits, &s->items[i]), i};
    }
    qsort(s->ranked, (size_t)n, sizeof *s->ranked, compare_ranked);
    for (int64_t i = 0; i < n; i++)
        s->all[i] = s->ranked[i].place;
    return n;
}

/* Micro-batches as the strategy made them. */
static void keep_micro_batches(batch_deal *d, const batch_list *step, int64_t num_items)
{
    placing *p = &d->scratch->cut;
    place_limits limits = of_groups(&d->options);
    p->n = num_items;
    clear_places(p, 0, step->num);
    p->places = step->num;
    for (int64_t i = 0, k = 0; i < num_items; i++) {
        const item *x = &d->scratch->items[i];
        while (x->first >= step->begin[k + 1])
            k++;
        p->items[i] = i;
        put(p, &limits, i, x, k);
    }
}

/* A round takes the heaviest documents that are left, as many as its micro-batches hold. */
static void regroup(batch_deal *d, int64_t num_items)
{
    const batch_deal_options *o = &d->options;
    placing *p = &d->scratch->cut;
    place_limits limits = of_groups(o);
    p->n = num_items;
    memcpy(p->items, d->scratch->all, (size_t)p->n * 8);
    for (int64_t i = 0, k = 0; i < p->n; i += o->groups * o->group_docs, k += o->groups) {
        int64_t end = ith_min_i64(i + o->groups * o->group_docs, p->n);
        bool fits = spread(d, p, &limits, i, end, k, k + o->groups);
        ITH_ASSERT(fits); /* as many as the longest documents of all are allowed in one */
    }
}

static void copy_list(batch_list *to, const batch_list *from)
{
    to->num = from->num;
    memcpy(to->begin, from->begin, (size_t)(from->num + 1) * 8);
    memcpy(to->docs, from->docs, (size_t)from->begin[from->num] * 8);
}

static void swap_lists(batch_list *a, batch_list *b)
{
    batch_list other = *a;
    *a = *b;
    *b = other;
}

static double sum_loads(const placing *p)
{
    double sum = 0;
    for (int64_t k = 0; k < p->places; k++)
        sum += p->load[k];
    return sum;
}

/* Every document cut over its group. */
static void deal_groups(batch_deal *d, const batch_list *step, int64_t num_items)
{
    const batch_deal_options *o = &d->options;
    placing *p = &d->scratch->cut;
    if (o->regroup && o->groups > 1)
        regroup(d, num_items);
    else
        keep_micro_batches(d, step, num_items);
    d->busiest = lay_out(d, p, o->groups, &d->cut, &d->group_rounds) / (double)o->cp_size;
    if (o->groups == 1) /* all rounds are its own: in the order they came */
        copy_list(&d->cut, step);
    d->mean = sum_loads(p) / (double)num_ranks(o);
    d->rank_rounds = 0;
    d->busiest += o->work.round * (double)d->group_rounds;
    d->mean += o->work.round * (double)d->group_rounds;
}

/* ---- rounds of ranks ---- */

/* Spreads all documents of p over the fewest rounds of `width`, at least `rounds`, that hold them.
 */
static bool spread_over_rounds(const batch_deal *d, placing *p, const place_limits *l,
                               int64_t width, int64_t rounds, int64_t max_rounds)
{
    int64_t tokens = 0;
    for (int64_t i = 0; i < p->n; i++)
        tokens += d->scratch->items[p->items[i]].tokens;
    rounds = ith_max_i64(rounds, ith_div_ceil(tokens, width * l->tokens));
    rounds = ith_max_i64(rounds, ith_div_ceil(p->n, width * l->docs));
    for (; rounds <= max_rounds; rounds++)
        if (spread(d, p, l, 0, p->n, 0, rounds * width))
            return true;
    return false;
}

/* The busiest of a round's places, and the work of the next one. */
static int64_t find_busiest(const placing *p, const ranked *round, int64_t n, double *second)
{
    int64_t busiest = round[0].place;
    *second = 0;
    for (int64_t i = 1; i < n; i++) {
        int64_t place = round[i].place;
        bool is_more = p->load[place] > p->load[busiest];
        double less = p->load[is_more ? busiest : place];
        busiest = is_more ? place : busiest;
        *second = less > *second ? less : *second;
    }
    return busiest;
}

/* Takes the lightest item off the busiest rank, to be cut, as long as that is shorter. */
static void trim_round(const batch_deal *d, placing *p, const ranked *round, int64_t n)
{
    const batch_deal_options *o = &d->options;
    place_limits whole = of_ranks(o), cut = of_groups(o);
    for (;;) {
        double second = 0;
        int64_t busiest = find_busiest(p, round, n, &second), last = p->last[busiest];
        if (last < 0)
            return;
        const item *x = &d->scratch->items[p->items[last]];
        double rest = p->count[busiest] > x->count ? p->load[busiest] - work_of(&whole, x) : 0;
        double gain = p->load[busiest] - (rest > second ? rest : second);
        if (gain <= work_of(&cut, x) / (double)num_ranks(o))
            return;
        p->last[busiest] = p->next[last];
        p->count[busiest] -= x->count;
        p->tokens[busiest] -= x->tokens;
        p->load[busiest] = rest;
    }
}

/* A round that is longer than the same documents are cut is none. */
static void drop_round(const batch_deal *d, placing *p, const ranked *round, int64_t n)
{
    const batch_deal_options *o = &d->options;
    double second = 0, shared = 0, most = p->load[find_busiest(p, round, n, &second)];
    for (int64_t i = 0; i < n; i++)
        shared += p->load[round[i].place] + o->work.exchange * (double)p->tokens[round[i].place];
    for (int64_t i = 0; i < n && shared / (double)num_ranks(o) <= most; i++)
        clear_places(p, round[i].place, round[i].place + 1);
}

static void trim(batch_deal *d, placing *p)
{
    int64_t n = rank_places(d, p), width = num_ranks(&d->options);
    for (int64_t first = 0; first < n; first += width) {
        const ranked *round = d->scratch->ranked + first;
        trim_round(d, p, round, ith_min_i64(width, n - first));
        drop_round(d, p, round, ith_min_i64(width, n - first));
    }
}

/* What is placed nowhere is cut, all in order of work. */
static void collect_cut(batch_deal *d, int64_t num_items)
{
    struct batch_deal_scratch *s = d->scratch;
    placing *cut = &s->cut, *p = &s->whole;
    cut->n = 0;
    memset(s->placed, 0, (size_t)num_items);
    for (int64_t k = 0; k < p->places; k++)
        for (int64_t i = p->last[k]; i >= 0; i = p->next[i])
            s->placed[p->items[i]] = true;
    for (int64_t i = 0; i < num_items; i++)
        if (!s->placed[s->all[i]])
            cut->items[cut->n++] = s->all[i];
}

/* Items that fit one rank stay whole, in at least so many rounds, but for those that are trimmed.
 * False: none does, or it does not work out. */
static bool place_whole(batch_deal *d, int64_t num_items, int64_t rounds, bool trims)
{
    const batch_deal_options *o = &d->options;
    struct batch_deal_scratch *s = d->scratch;
    placing *p = &s->whole;
    place_limits ranks = of_ranks(o), groups = of_groups(o);
    p->n = 0;
    for (int64_t i = 0; i < num_items; i++)
        if (s->items[s->all[i]].tokens <= o->rank_tokens)
            p->items[p->n++] = s->all[i];
    if (p->n == 0 || !spread_over_rounds(d, p, &ranks, num_ranks(o), rounds, rank_rounds(o)))
        return false;
    if (trims)
        trim(d, p);
    collect_cut(d, num_items);
    s->cut.places = 0;
    return s->cut.n < num_items &&
           (s->cut.n == 0 ||
            spread_over_rounds(d, &s->cut, &groups, o->groups, 1, group_rounds(o)));
}

/* Takes the schedule with rounds of ranks where it is the shorter one. */
static void deal_ranks(batch_deal *d, int64_t num_items, int64_t min_rounds, bool trims)
{
    const batch_deal_options *o = &d->options;
    struct batch_deal_scratch *s = d->scratch;
    int64_t group_rounds = 0, rank_rounds = 0;
    if (!place_whole(d, num_items, min_rounds, trims))
        return;
    double busiest =
        lay_out(d, &s->cut, o->groups, &s->other_cut, &group_rounds) / (double)o->cp_size;
    busiest += lay_out(d, &s->whole, num_ranks(o), &s->other_whole, &rank_rounds);
    double rounds = o->work.round * (double)(group_rounds + rank_rounds);
    if (!o->whole_always && busiest + rounds >= d->busiest)
        return;
    swap_lists(&d->cut, &s->other_cut);
    swap_lists(&d->whole, &s->other_whole);
    d->group_rounds = group_rounds;
    d->rank_rounds = rank_rounds;
    d->busiest = busiest + rounds;
    d->mean = (sum_loads(&s->cut) + sum_loads(&s->whole)) / (double)num_ranks(o) + rounds;
}

void batch_deal_step(batch_deal *d, const batch_list *step)
{
    ITH_ASSERT(step->num > 0 && step->num <= d->options.max_micro &&
               step->begin[step->num] <= d->options.max_docs);
    int64_t num_items = take_items(d, step);
    deal_groups(d, step, num_items);
    if (!d->options.rank_docs)
        return;
    deal_ranks(d, num_items, 1, false);
    for (int64_t rounds = 1; !d->options.whole_always && rounds <= TRIES; rounds *= 2)
        deal_ranks(d, num_items, rounds, true);
}
