/* delta_scan.c - spans of slices, the halo, and the composition of maps.
 *
 * Invariants:
 *  1. Every rank knows the spans of all: who sends what follows from cu_seqlens alone.
 *  2. Every rank takes part in every exchange, or none. */
#include "parallel/delta_scan.h"

#include <string.h>

typedef ith_tensor T;

bool ith_delta_scan_pays(int64_t cp_size, const ith_linear_shape *s, double flop_per_byte)
{
    double p = (double)cp_size, n = (double)s->tokens, t = n / p;
    double hv = (double)s->value_heads, dk = (double)s->key_dim, dv = (double)s->value_dim;
    double rep = (double)ith_max_i64(1, cp_size / s->key_heads), hk = (double)s->key_heads;
    double heads = (p - 1) / (p * p) * n * (double)s->element_bytes *
                   (5 * hv * dv + 6 * hv + 6 * hk * dk * rep);
    double states = (p - 1) * hv * dk * (dk + dv) * 4;
    double extra =
        (double)s->max_doc_tokens > t ? t * hv * dk * (24.5 * dv + (cp_size > 2 ? 7 * dk : 0)) : 0;
    return cp_size > s->value_heads || states + extra / flop_per_byte < heads;
}

/* ---- spans ---- */

typedef struct {
    int64_t begin, end; /* tokens of the group */
    int64_t first, last, halo;
    bool through;
} span;

/* The document that token t is in. */
static int64_t document_of(const int32_t *cu, int64_t num_docs, int64_t t)
{
    int64_t low = 0, high = num_docs; /* cu[low] <= t < cu[high] */
    while (high - low > 1) {
        int64_t mid = low + (high - low) / 2;
        if (cu[mid] <= t)
            low = mid;
        else
            high = mid;
    }
    return low;
}

static span span_of(const ith_mesh *mesh, int64_t taps, const int32_t *cu, int64_t num_docs,
                    int64_t rank)
{
    int64_t n = cu[num_docs];
    span s = {.begin = ith_cp_first(mesh, n, rank), .end = ith_cp_first(mesh, n, rank + 1)};
    if (s.begin == s.end)
        return s;
    int64_t head = document_of(cu, num_docs, s.begin), tail = document_of(cu, num_docs, s.end - 1);
    if (cu[head] < s.begin) {
        s.first = ith_min_i64(cu[head + 1], s.end) - s.begin;
        s.halo = ith_min_i64(taps - 1, s.begin - cu[head]);
    }
    if (cu[tail + 1] > s.end)
        s.last = s.end - ith_max_i64(cu[tail], s.begin);
    s.through = head == tail && s.first > 0 && s.last > 0;
    return s;
}

static span span_in(const ith_mesh *mesh, ith_seqs seqs, int64_t rank)
{
    return span_of(mesh, 1, seqs.cu_host, seqs.num_docs, rank);
}

/* Whether any border of slices lies within a document, or any slice. Every rank says the same. */
static void look_at_all(const ith_mesh *mesh, ith_seqs seqs, bool *any_cut, bool *any_through)
{
    *any_cut = *any_through = false;
    for (int64_t r = 0; r < mesh->cp_size; r++) {
        span s = span_in(mesh, seqs, r);
        *any_cut |= s.first > 0;
        *any_through |= s.through;
    }
}

static ith_seqs list(int32_t *host, T device, int64_t at, int64_t docs)
{
    ith_seqs s = {.cu_seqlens = ith_row_range(device, at, at + docs + 1),
                  .cu_host = host + at,
                  .num_docs = docs};
    for (int64_t i = 0; i < docs; i++)
        s.max_len = ith_max_i64(s.max_len, host[at + i + 1] - host[at + i]);
    return s;
}

void ith_slice_docs_find(const ith_mesh *mesh, int64_t taps, const int32_t *cu, int64_t num_docs,
                         int32_t *host, T device, ith_slice_docs *out)
{
    span s = span_of(mesh, taps, cu, num_docs, mesh->cp_rank);
    int64_t conv = 0, whole = 0, whole_at = num_docs + 1, head_at = 2 * whole_at,
            tail_at = head_at + 2;
    int64_t from = s.begin + s.first, to = s.end - s.last;
    memset(host, 0, (size_t)ith_slice_list_size(num_docs) * sizeof *host);
    for (int64_t d = 0; d < num_docs; d++) {
        int64_t begin = ith_max_i64(cu[d], s.begin), end = ith_min_i64(cu[d + 1], s.end);
        if (begin >= end)
            continue;
        host[++conv] = (int32_t)(s.halo + end - s.begin);
        if (begin >= from && end <= to)
            host[whole_at + ++whole] = (int32_t)(end - from);
    }
    host[head_at + 1] = (int32_t)s.first;
    host[tail_at + 1] = (int32_t)s.last;
    *out = (ith_slice_docs){.first = s.first,
                            .last = s.last,
                            .through = s.through,
                            .halo = s.halo,
                            .conv = list(host, device, 0, conv),
                            .head = list(host, device, head_at, s.first > 0),
                            .whole = list(host, device, whole_at, whole),
                            .tail = list(host, device, tail_at, s.last > 0)};
}

void ith_slice_docs_largest(int64_t taps, int64_t tokens, int64_t num_docs, int64_t max_doc_tokens,
                            T device, ith_slice_docs *out)
{
    int64_t longest = ith_min_i64(tokens, max_doc_tokens);
    ith_seqs one = {.cu_seqlens = ith_row_range(device, 0, 2), .num_docs = 1, .max_len = longest};
    ith_seqs many = {.cu_seqlens = ith_row_range(device, 0, num_docs + 1),
                     .num_docs = num_docs,
                     .max_len = longest};
    *out = (ith_slice_docs){.first = tokens,
                            .last = tokens,
                            .through = true,
                            .halo = taps - 1,
                            .conv = many,
                            .head = one,
                            .whole = many,
                            .tail = one};
    out->conv.max_len += taps - 1;
}

/* ---- the halo ---- */

/* Rows of the halo of rank j that rank i has: *from rows behind the halo's first. */
static int64_t halo_part(const span *i, const span *j, int64_t *from)
{
    int64_t begin = j->begin - j->halo, low = ith_max_i64(begin, i->begin),
            high = ith_min_i64(j->begin, i->end);
    *from = low - begin;
    return ith_max_i64(0, high - low);
}

/* The exchange of a halo: `sent` holds rows that others need, behind each other by rank, `kept` the
 * own halo. Forward sends `sent`, backward `kept`. */
typedef struct {
    const ith_mesh *mesh;
    int64_t taps;
    ith_seqs seqs;
    T sent, kept;
    span own;
    bool any_cut; /* there is something to exchange */
} halo;

static ith_status open_halo(halo *h, ith_ctx *ctx, T x)
{
    int64_t rows = h->taps - 1, width = x.shape[1];
    /* Short slices: a row is needed by up to K-1 ranks. */
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_COMM, "convolution inputs of other ranks", x.dtype, 2,
                         rows * rows, width, 1, 1, &h->sent));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_COMM, "convolution inputs of other ranks", x.dtype, 2, rows,
                         width, 1, 1, &h->kept));
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    bool any_through;
    h->own = span_of(h->mesh, h->taps, h->seqs.cu_host, h->seqs.num_docs, h->mesh->cp_rank);
    look_at_all(h->mesh, h->seqs, &h->any_cut, &any_through);
    return ITH_OK;
}

static ith_status copy_row(ith_ctx *ctx, T to, int64_t to_row, T from, int64_t from_row)
{
    int64_t size = ith_dtype_bytes(to.dtype);
    return ctx->device->copy(ctx->device, (char *)to.data + to_row * to.stride[0] * size,
                             (const char *)from.data + from_row * from.stride[0] * size,
                             to.shape[1] * size, ctx->err);
}

/* What this rank has of others' halos: rows [*row, ..) of its slice, block behind block in `sent`.
 */
static int64_t part_for(const halo *h, int64_t rank, int64_t *row)
{
    span other = span_of(h->mesh, h->taps, h->seqs.cu_host, h->seqs.num_docs, rank);
    int64_t from, n = rank > h->mesh->cp_rank ? halo_part(&h->own, &other, &from) : 0;
    *row = n ? other.begin - other.halo + from - h->own.begin : 0;
    return n;
}

static ith_status exchange_halo(const halo *h, ith_ctx *ctx, bool forward)
{
    const ith_mesh *m = h->mesh;
    int64_t p = m->cp_size, size = h->sent.shape[1] * ith_dtype_bytes(h->sent.dtype), at = 0, row;
    int64_t *sent_at = m->lists, *sent_bytes = m->lists + p, *kept_at = m->lists + 2 * p,
            *kept_bytes = m->lists + 3 * p;
    for (int64_t j = 0; j < p; j++) {
        span other = span_of(m, h->taps, h->seqs.cu_host, h->seqs.num_docs, j);
        int64_t n = part_for(h, j, &row), from = 0;
        int64_t kept = j < m->cp_rank ? halo_part(&other, &h->own, &from) : 0;
        sent_at[j] = at * size;
        sent_bytes[j] = n * size;
        kept_at[j] = kept ? from * size : 0;
        kept_bytes[j] = kept * size;
        at += n;
    }
    ITH_ASSERT(at <= h->sent.shape[0]);
    ith_exchange forth = {h->sent.data, sent_at, sent_bytes, h->kept.data, kept_at, kept_bytes};
    ith_exchange back = {h->kept.data, kept_at, kept_bytes, h->sent.data, sent_at, sent_bytes};
    return ith_comm_exchange(m->device_cp[0], forward ? &forth : &back, ctx->err);
}

ith_status ith_slice_halo(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                          int64_t taps, ith_seqs seqs, T x)
{
    halo h = {.mesh = mesh, .taps = taps, .seqs = seqs};
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM), at = 0, row;
    ITH_TRY(open_halo(&h, ctx, x));
    if (h.any_cut) {
        for (int64_t j = 0; j < mesh->cp_size; j++)
            for (int64_t i = 0, n = part_for(&h, j, &row); i < n; i++)
                ITH_TRY(copy_row(ctx, h.sent, at++, x, docs->halo + row + i));
        ITH_TRY(exchange_halo(&h, ctx, true));
        for (int64_t i = 0; i < docs->halo; i++)
            ITH_TRY(copy_row(ctx, x, i, h.kept, i));
    }
    ith_plan_release(ctx->plan, ITH_MEM_COMM, mark);
    return ITH_OK;
}

ith_status ith_slice_halo_backward(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                                   int64_t taps, ith_seqs seqs, T dx)
{
    halo h = {.mesh = mesh, .taps = taps, .seqs = seqs};
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM), at = 0, row;
    ITH_TRY(open_halo(&h, ctx, dx));
    if (h.any_cut) {
        for (int64_t i = 0; i < docs->halo; i++)
            ITH_TRY(copy_row(ctx, h.kept, i, dx, i));
        ITH_TRY(exchange_halo(&h, ctx, false));
        for (int64_t j = 0; j < mesh->cp_size; j++) {
            int64_t n = part_for(&h, j, &row);
            if (!n)
                continue;
            T rows = ith_row_range(dx, docs->halo + row, docs->halo + row + n);
            ITH_TRY(ith_add(ctx, rows, rows, ith_row_range(h.sent, at, at + n)));
            at += n;
        }
    }
    ith_plan_release(ctx->plan, ITH_MEM_COMM, mark);
    return ITH_OK;
}

/* ---- maps and states of other ranks ---- */

/* The ranks of a chain behind (step 1) or before (-1) `rank`, as far as the document goes on: the
 * last of them. */
static int64_t chain_end(const ith_mesh *mesh, ith_seqs seqs, int64_t rank, int64_t step)
{
    int64_t r = rank + step;
    while (span_in(mesh, seqs, r).through)
        r += step;
    ITH_ASSERT(r >= 0 && r < mesh->cp_size);
    return r;
}

/* Rank `to` wants what `from` has, in this direction. */
static bool wants(const ith_mesh *mesh, ith_seqs seqs, int64_t to, int64_t from, int64_t step)
{
    span s = span_in(mesh, seqs, to);
    if ((from - to) * step <= 0 || (step < 0 ? s.first : s.last) == 0)
        return false;
    return (chain_end(mesh, seqs, to, step) - from) * step >= 0;
}

/* What the ranks of a chain have sent: B (or C) and, of ranks within one document, A. */
typedef struct {
    T offset, map; /* [P, Hv, Dk, Dv], [P, Hv, Dk, Dk] f32 */
} received;

static ith_status push_state(ith_ctx *ctx, ith_mem_class where, const char *name, int64_t count,
                             const ith_delta_in *in, int64_t width, T *out)
{
    return ith_ctx_push(ctx, where, name, ITH_F32, 4, count, in->v.shape[1], in->k.shape[2], width,
                        out);
}

static T one_of(T all, int64_t i)
{
    T t = ith_row_range(all, i, i + 1);
    return ith_tensor_4d(t.data, t.dtype, 4, 1, t.shape[1], t.shape[2], t.shape[3]);
}

/* Block `mine` of every rank to those that want it, from ranks within one document only or all. */
static ith_status spread(const ith_mesh *mesh, ith_ctx *ctx, ith_seqs seqs, T mine, T all,
                         bool maps, int64_t step)
{
    int64_t p = mesh->cp_size, me = mesh->cp_rank, bytes = ith_tensor_bytes(mine);
    int64_t *send_at = mesh->lists, *send_bytes = mesh->lists + p, *recv_at = mesh->lists + 2 * p,
            *recv_bytes = mesh->lists + 3 * p;
    for (int64_t j = 0; j < p; j++) {
        bool has = !maps || span_in(mesh, seqs, me).through;
        bool other_has = !maps || span_in(mesh, seqs, j).through;
        send_at[j] = 0;
        send_bytes[j] = has && wants(mesh, seqs, j, me, step) ? bytes : 0;
        recv_at[j] = j * bytes;
        recv_bytes[j] = other_has && wants(mesh, seqs, me, j, step) ? bytes : 0;
    }
    ith_exchange x = {mine.data, send_at, send_bytes, all.data, recv_at, recv_bytes};
    return ith_comm_exchange(mesh->device_cp[0], &x, ctx->err);
}

static ith_status copy_all(ith_ctx *ctx, T to, T from)
{
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    return ctx->device->copy(ctx->device, to.data, from.data, ith_tensor_bytes(from), ctx->err);
}

static T head_of(T t, int64_t h)
{
    int64_t size = t.shape[2] * t.shape[3];
    return ith_tensor_2d((float *)t.data + h * size, ITH_F32, t.shape[2], t.shape[3]);
}

/* out = map out + offset (or map^T): one rank further. `swap` [1,Hv,Dk,Dv] is scratch. */
static ith_status compose(ith_ctx *ctx, T out, T swap, T map, T offset, bool transposed)
{
    ITH_TRY(copy_all(ctx, swap, out));
    ITH_TRY(copy_all(ctx, out, offset));
    for (int64_t h = 0; h < out.shape[1]; h++) {
        T y = head_of(out, h), a = head_of(map, h), s = head_of(swap, h);
        ITH_TRY(transposed ? ith_linear_backward_weight(ctx, y, a, s)
                           : ith_linear_backward_input(ctx, y, a, s, true));
    }
    return ITH_OK;
}

/* out: the state that comes in over the border (step -1), or the gradient (step 1), from what this
 * rank and the others have. Scratch of the operators is counted with the same calls. */
static ith_status pass(const ith_mesh *mesh, ith_ctx *ctx, ith_seqs seqs, const ith_delta_in *in,
                       T mine, T map, int64_t step, T out)
{
    received r;
    T swap;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM), p = mesh->cp_size, dk = in->k.shape[2],
            dv = in->v.shape[2];
    ITH_TRY(push_state(ctx, ITH_MEM_COMM, "states of other ranks", p, in, dv, &r.offset));
    ITH_TRY(push_state(ctx, ITH_MEM_COMM, "states of other ranks", p, in, dk, &r.map));
    ITH_TRY(push_state(ctx, ITH_MEM_COMM, "states of other ranks", 1, in, dv, &swap));
    if (ith_ctx_counting(ctx)) { /* the operators' scratch */
        ITH_TRY(compose(ctx, out, swap, one_of(r.map, 0), one_of(r.offset, 0), step > 0));
    } else {
        bool any_cut, any_through;
        span s = span_in(mesh, seqs, mesh->cp_rank);
        look_at_all(mesh, seqs, &any_cut, &any_through);
        if (any_cut)
            ITH_TRY(spread(mesh, ctx, seqs, mine, r.offset, false, step));
        if (any_through)
            ITH_TRY(spread(mesh, ctx, seqs, map, r.map, true, step));
        if ((step < 0 ? s.first : s.last) > 0) {
            int64_t end = chain_end(mesh, seqs, mesh->cp_rank, step);
            ITH_TRY(copy_all(ctx, out, one_of(r.offset, end)));
            for (int64_t j = end - step; j != mesh->cp_rank; j -= step)
                ITH_TRY(compose(ctx, out, swap, one_of(r.map, j), one_of(r.offset, j), step > 0));
        }
    }
    ith_plan_release(ctx->plan, ITH_MEM_COMM, mark);
    return ITH_OK;
}

/* ---- the rule on a range of rows ---- */

static ith_status forward_range(ith_ctx *ctx, T o, const ith_delta_in *in, int64_t r0, int64_t r1,
                                T state, ith_seqs seqs)
{
    if (r0 == r1)
        return ITH_OK;
    return ith_gated_delta_rule_forward(ctx, ith_row_range(o, r0, r1), ith_row_range(in->q, r0, r1),
                                        ith_row_range(in->k, r0, r1), ith_row_range(in->v, r0, r1),
                                        ith_row_range(in->g, r0, r1),
                                        ith_row_range(in->beta, r0, r1), state, seqs, in->scale);
}

static ith_status backward_range(ith_ctx *ctx, const ith_delta_gradient *d, T dstate, T do_,
                                 const ith_delta_in *in, int64_t r0, int64_t r1, T state,
                                 ith_seqs seqs)
{
    if (r0 == r1)
        return ITH_OK;
    return ith_gated_delta_rule_backward(
        ctx, ith_row_range(d->dq, r0, r1), ith_row_range(d->dk, r0, r1),
        ith_row_range(d->dv, r0, r1), ith_row_range(d->dg, r0, r1), ith_row_range(d->dbeta, r0, r1),
        dstate, ith_row_range(do_, r0, r1), ith_row_range(in->q, r0, r1),
        ith_row_range(in->k, r0, r1), ith_row_range(in->v, r0, r1), ith_row_range(in->g, r0, r1),
        ith_row_range(in->beta, r0, r1), state, seqs, in->scale);
}

/* Identity matrices into map, through host memory. */
static ith_status set_identity(ith_ctx *ctx, T map)
{
    void *data = NULL;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_HOST), dk = map.shape[2];
    ITH_TRY(ith_plan_push(ctx->plan, ITH_MEM_HOST, "state map", ith_tensor_bytes(map), &data,
                          ctx->err));
    if (!ith_ctx_counting(ctx)) {
        float *host = data;
        memset(host, 0, (size_t)ith_tensor_bytes(map));
        for (int64_t i = 0; i < map.shape[1] * dk; i++)
            host[i * dk + i % dk] = 1;
        ITH_TRY(ctx->device->upload(ctx->device, map.data, host, ith_tensor_bytes(map), ctx->err));
        ITH_TRY(ctx->device->sync(ctx->device, ctx->err));
    }
    ith_plan_release(ctx->plan, ITH_MEM_HOST, mark);
    return ITH_OK;
}

/* map = A of the slice: the rule from the identity with v = 0. */
static ith_status make_map(ith_ctx *ctx, const ith_slice_docs *docs, const ith_delta_in *in, T map)
{
    int64_t t = in->v.shape[0], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    ith_delta_in x = *in;
    T o;
    ITH_TRY(set_identity(ctx, map));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "state map", in->v.dtype, 3, t, in->v.shape[1],
                         in->k.shape[2], 1, &x.v));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "state map", in->v.dtype, 3, t, in->v.shape[1],
                         in->k.shape[2], 1, &o));
    ITH_TRY(ith_zero(ctx, x.v));
    ITH_TRY(forward_range(ctx, o, &x, 0, t, map, docs->head));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

ith_status ith_delta_scan_forward(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                                  ith_seqs seqs, T o, T state, T map, const ith_delta_in *in,
                                  bool known)
{
    bool counting = ith_ctx_counting(ctx); /* every run with all rows */
    int64_t t = in->v.shape[0], last = t - docs->last, from = counting ? 0 : docs->first,
            to = counting ? t : last, mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T moving; /* a state that runs along */
    ITH_TRY(push_state(ctx, ITH_MEM_WORKSPACE, "state", 1, in, in->v.shape[2], &moving));
    if (!docs->through || counting)
        ITH_TRY(forward_range(ctx, o, in, from, to, ith_tensor_none(), docs->whole));
    if (docs->last) { /* B */
        ITH_TRY(ith_zero(ctx, moving));
        if (!docs->through || !known || counting)
            ITH_TRY(forward_range(ctx, o, in, last, t, moving, docs->tail));
    }
    if (docs->through && !known)
        ITH_TRY(make_map(ctx, docs, in, map));
    if (!known)
        ITH_TRY(pass(mesh, ctx, seqs, in, moving, map, -1, state));
    if (docs->first) {
        ITH_TRY(copy_all(ctx, moving, state));
        ITH_TRY(forward_range(ctx, o, in, 0, docs->first, moving, docs->head));
    }
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

ith_status ith_delta_scan_backward(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                                   ith_seqs seqs, const ith_delta_gradient *d, T do_,
                                   const ith_delta_in *in, T state, T map)
{
    bool counting = ith_ctx_counting(ctx);
    int64_t t = in->v.shape[0], last = t - docs->last, from = counting ? 0 : docs->first,
            to = counting ? t : last, mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    T none = ith_tensor_none(), moving, dlast;
    ITH_TRY(push_state(ctx, ITH_MEM_WORKSPACE, "state gradient", 1, in, in->v.shape[2], &moving));
    ITH_TRY(push_state(ctx, ITH_MEM_WORKSPACE, "state gradient", 1, in, in->v.shape[2], &dlast));
    if (!docs->through || counting)
        ITH_TRY(backward_range(ctx, d, none, do_, in, from, to, none, docs->whole));
    if (docs->first) { /* C; within one document the other gradients are not final */
        ITH_TRY(ith_zero(ctx, moving));
        ITH_TRY(backward_range(ctx, d, moving, do_, in, 0, docs->first, state, docs->head));
    }
    ITH_TRY(pass(mesh, ctx, seqs, in, moving, map, 1, dlast));
    if (docs->last)
        ITH_TRY(backward_range(ctx, d, dlast, do_, in, last, t, docs->through ? state : none,
                               docs->tail));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}
