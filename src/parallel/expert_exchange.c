/* expert_exchange.c - the schedule of rounds, and the exchange of each.
 * A rank's queue is all rows for its experts: by expert, then by the rank that brings them, then in
 * its order. Round c takes rows [c * most, (c + 1) * most) of every queue.
 *
 * Invariants:
 *  1. Of one rank's rows, what a round takes for another rank is one stretch: rows of a rank are
 *     sorted as the queue is. So a block of an exchange is a range of rows, never packed.
 *  2. The host makes the schedule: a call waits once for the counts of its device, and for what a
 *     round uploads before it queues the round. */
#include "parallel/expert_exchange.h"

#include <string.h>

#include "base/device.h"

typedef ith_tensor T;

typedef struct {
    const ith_mesh *mesh;
    ith_ctx *ctx;
    int64_t ranks, experts, own_experts; /* P, E, E/P */
    int64_t most;                        /* rows of a round */
    int32_t *counts;                     /* [P, E+1] offsets of every rank, host */
    /* Of the running round: where the rows of an own expert that a rank brings begin among those
     * that arrived, [E/P * P], and where they belong, [E/P * P + 1]; rows of an expert, [E/P + 1].
     * One block on the host and one on the device. */
    int32_t *host_tables;
    T tables, index;                  /* [most] */
    T arrived[ITH_EXPERT_INPUTS];     /* [most,D] in the order of ranks */
    T sorted[ITH_EXPERT_INPUTS], out; /* [most,D] in the order of experts */
} rounds;

/* Rows of expert e that rank r brings. */
static int64_t count_of(const rounds *x, int64_t r, int64_t e)
{
    const int32_t *offsets = x->counts + r * (x->experts + 1);
    return offsets[e + 1] - offsets[e];
}

static int64_t queue_length(const rounds *x, int64_t owner)
{
    int64_t n = 0;
    for (int64_t r = 0; r < x->ranks; r++)
        for (int64_t e = 0; e < x->own_experts; e++)
            n += count_of(x, r, owner * x->own_experts + e);
    return n;
}

/* What round c takes from rank r for rank owner: rows [*first, *first + returned) of r's. */
static int64_t stretch_of(const rounds *x, int64_t owner, int64_t r, int64_t c, int64_t *first)
{
    int64_t at = 0, begin = c * x->most, end = begin + x->most, n = 0;
    *first = 0;
    for (int64_t e = owner * x->own_experts; e < (owner + 1) * x->own_experts; e++)
        for (int64_t s = 0; s < x->ranks; s++) {
            int64_t count = count_of(x, s, e);
            int64_t low = ith_max_i64(begin, at), high = ith_min_i64(end, at + count);
            if (s == r && low < high) {
                if (n == 0)
                    *first = x->counts[r * (x->experts + 1) + e] + low - at;
                n += high - low;
            }
            at += count;
        }
    return n;
}

static int64_t num_ranges(const rounds *x)
{
    return x->own_experts * x->ranks;
}

static int64_t tables_size(const rounds *x)
{
    return 2 * num_ranges(x) + 1 + x->own_experts + 1;
}

/* The tables of the running round as the owner sees it; returns its rows. */
static int64_t fill_tables(const rounds *x, int64_t c)
{
    int64_t me = x->mesh->ep->rank, at = 0, n = 0, begin = c * x->most, end = begin + x->most;
    int64_t *next = x->mesh->ep_lists, before = 0, first, ranges = num_ranges(x);
    int32_t *arrived = x->host_tables, *sorted = arrived + ranges, *offsets = sorted + ranges + 1;
    for (int64_t r = 0; r < x->ranks; r++) { /* where the next row of rank r arrived */
        next[r] = before;
        before += stretch_of(x, me, r, c, &first);
    }
    for (int64_t e = 0; e < x->own_experts; e++) {
        offsets[e] = (int32_t)n;
        for (int64_t r = 0; r < x->ranks; r++) {
            int64_t count = count_of(x, r, me * x->own_experts + e);
            int64_t low = ith_max_i64(begin, at), high = ith_min_i64(end, at + count);
            int64_t rows = ith_max_i64(high - low, 0);
            *arrived++ = (int32_t)next[r];
            *sorted++ = (int32_t)n;
            next[r] += rows;
            n += rows;
            at += count;
        }
    }
    *sorted = offsets[x->own_experts] = (int32_t)n;
    return n;
}

/* Rows of round c between here and all others: `mine` are this rank's, `theirs` those that arrived.
 */
static ith_status exchange(const rounds *x, int64_t c, T mine, T theirs, bool forth)
{
    int64_t p = x->ranks, me = x->mesh->ep->rank, before = 0, *lists = x->mesh->ep_lists;
    int64_t row = mine.shape[1] * ith_dtype_bytes(mine.dtype);
    ITH_ASSERT(ith_is_contiguous(mine) && ith_is_contiguous(theirs));
    for (int64_t r = 0; r < p; r++) {
        int64_t first, n = stretch_of(x, r, me, c, &first);
        lists[r] = first * row;
        lists[p + r] = n * row;
        n = stretch_of(x, me, r, c, &first);
        lists[2 * p + r] = before * row;
        lists[3 * p + r] = n * row;
        before += n;
    }
    ith_exchange out = {mine.data, lists, lists + p, theirs.data, lists + 2 * p, lists + 3 * p};
    ith_exchange back = {theirs.data, lists + 2 * p, lists + 3 * p, mine.data, lists, lists + p};
    return ith_comm_exchange(x->mesh->device_ep, forth ? &out : &back, x->ctx->err);
}

static ith_status push_host(rounds *x, int64_t count, int32_t **out)
{
    void *memory = NULL;
    ITH_TRY(ith_plan_push(x->ctx->plan, ITH_MEM_HOST, "rows of experts", count * 4, &memory,
                          x->ctx->err));
    *out = memory;
    return ITH_OK;
}

/* Offsets of all ranks, and the rows of a round: the same everywhere. */
static ith_status gather_counts(rounds *x, T offsets, int64_t rows)
{
    ith_device *d = x->ctx->device;
    int64_t n = x->experts + 1;
    int32_t *own = x->counts + x->mesh->ep->rank * n;
    if (rows > 0)
        ITH_TRY(d->download(d, own, offsets.data, n * 4, x->ctx->err));
    else /* offsets of no rows were never written */
        memset(own, 0, (size_t)n * 4);
    ITH_TRY(d->sync(d, x->ctx->err));
    ITH_TRY(ith_comm_all_gather(x->mesh->ep, x->counts, own, n * 4, x->ctx->err));
    for (int64_t r = 0; r < x->ranks; r++)
        rows = ith_max_i64(rows, x->counts[r * n + x->experts]);
    x->most = rows + rows / 4;
    return ITH_OK;
}

static ith_status open_rounds(rounds *x, const ith_mesh *mesh, ith_ctx *ctx, const T *in,
                              int num_in, T offsets)
{
    *x = (rounds){.mesh = mesh, .ctx = ctx, .ranks = mesh->ep_size};
    x->experts = offsets.shape[0] - 1;
    x->own_experts = ith_div_exact(x->experts, x->ranks);
    x->most = in[0].shape[0] + in[0].shape[0] / 4;
    ITH_TRY(push_host(x, x->ranks * (x->experts + 1), &x->counts));
    if (!ith_ctx_counting(ctx))
        ITH_TRY(gather_counts(x, offsets, in[0].shape[0]));
    ITH_TRY(push_host(x, tables_size(x), &x->host_tables));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "rows of experts", ITH_I32, 1, x->most, 1, 1, 1,
                         &x->index));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "rows of experts", ITH_I32, 1, tables_size(x), 1,
                         1, 1, &x->tables));
    for (int i = 0; i < num_in; i++) {
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_COMM, "tokens of experts", in[i].dtype, 2, x->most,
                             in[i].shape[1], 1, 1, &x->arrived[i]));
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "tokens of experts", in[i].dtype, 2, x->most,
                             in[i].shape[1], 1, 1, &x->sorted[i]));
    }
    return ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "output of experts", in[0].dtype, 2, x->most,
                        in[0].shape[1], 1, 1, &x->out);
}

/* Elements of the tables on the device: see rounds. */
static T round_offsets(const rounds *x)
{
    int64_t at = 2 * num_ranges(x) + 1;
    return ith_row_range(x->tables, at, at + x->own_experts + 1);
}

/* The tables of round c, and from them the place of every row. */
static ith_status begin_round(rounds *x, int64_t c, int64_t *rows)
{
    ith_ctx *ctx = x->ctx;
    ith_device *d = ctx->device;
    int64_t n = num_ranges(x);
    *rows = fill_tables(x, c);
    ITH_TRY(d->upload(d, x->tables.data, x->host_tables, tables_size(x) * 4, ctx->err));
    ITH_TRY(d->sync(d, ctx->err)); /* the next round, or another call, writes them */
    return ith_list_ranges(ctx, ith_row_range(x->index, 0, *rows), ith_row_range(x->tables, 0, n),
                           ith_row_range(x->tables, n, 2 * n + 1));
}

static ith_status run_round(rounds *x, int64_t c, const T *in, int num_in, T out,
                            ith_expert_function f, void *arg)
{
    ith_ctx *ctx = x->ctx;
    int64_t n = 0;
    ITH_TRY(begin_round(x, c, &n));
    ith_expert_round round = {.offsets = round_offsets(x), .out = ith_row_range(x->out, 0, n)};
    T index = ith_row_range(x->index, 0, n), back = ith_row_range(x->arrived[0], 0, n);
    for (int i = 0; i < num_in; i++) {
        T arrived = ith_row_range(x->arrived[i], 0, n);
        round.in[i] = ith_row_range(x->sorted[i], 0, n);
        ITH_TRY(exchange(x, c, in[i], arrived, true));
        ITH_TRY(ith_gather_rows(ctx, round.in[i], arrived, index));
    }
    ITH_TRY(f(arg, ctx, &round));
    ITH_TRY(ith_scatter_rows(ctx, back, round.out, index));
    return exchange(x, c, out, back, false);
}

ith_status ith_expert_rounds(const ith_mesh *mesh, ith_ctx *ctx, const T *in, int num_in, T offsets,
                             T out, ith_expert_function f, void *arg)
{
    static const ith_mem_class classes[] = {ITH_MEM_WORKSPACE, ITH_MEM_COMM, ITH_MEM_HOST};
    int64_t marks[3], count = 1;
    rounds x;
    ITH_ASSERT(num_in >= 1 && num_in <= ITH_EXPERT_INPUTS);
    for (int i = 0; i < 3; i++)
        marks[i] = ith_plan_mark(ctx->plan, classes[i]);
    ITH_TRY(open_rounds(&x, mesh, ctx, in, num_in, offsets));
    if (ith_ctx_counting(ctx)) {
        ith_expert_round most = {{x.sorted[0], x.sorted[1]}, round_offsets(&x), x.out};
        ITH_TRY(f(arg, ctx, &most));
    } else {
        for (int64_t r = 0; r < x.ranks; r++)
            count = ith_max_i64(count, ith_div_ceil(queue_length(&x, r), ith_max_i64(x.most, 1)));
        for (int64_t c = 0; c < count; c++)
            ITH_TRY(run_round(&x, c, in, num_in, out, f, arg));
    }
    for (int i = 0; i < 3; i++)
        ith_plan_release(ctx->plan, classes[i], marks[i]);
    return ITH_OK;
}
