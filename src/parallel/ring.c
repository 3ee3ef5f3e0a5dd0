/* ring.c - stretches against stretches, while keys and values go round.
 *
 * Invariants:
 *  1. A stretch meets its own keys first, of which every query sees one at least (itself), so it
 *     has a finite lse before anything is merged.
 *  2. A pass sends to the next ring rank and receives from the one before, while a device
 *     computes; the gradient of a rank's keys goes the same way, one step behind them, and ends at
 *     home.
 *  3. While the plan counts, one pair of the largest stretches stands for all. */
#include "parallel/ring.h"

#include <string.h>

typedef ith_tensor T;

/* ---- what goes where ---- */

static T as_2d(T t)
{
    ITH_ASSERT(t.ndim == 3 && t.stride[1] == t.shape[2]);
    T r = {t.data, t.dtype, 2, {t.shape[0], t.shape[1] * t.shape[2], 1, 1}, {t.stride[0], 1, 1, 1}};
    return r;
}

/* [rows, 2 * width] as keys and values. */
static void split_kv(T both, int64_t heads, T *k, T *v)
{
    int64_t width = both.shape[1] / 2;
    *k = ith_split_heads(ith_col_range(both, 0, width), heads);
    *v = ith_split_heads(ith_col_range(both, width, 2 * width), heads);
}

typedef struct {
    const ith_mesh *mesh;
    ith_ctx *ctx;
    int64_t n, rows; /* of the group, of this ring slice */
    ith_qkv x;
    ith_seqs seqs;
    float scale;
    bool causal;
} ring;

static ring ring_of(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_qkv x, ith_seqs seqs,
                    float scale, bool causal)
{
    ring r = {mesh, ctx, n, x.q.shape[0], x, seqs, scale, causal};
    r.seqs.window = true;
    return r;
}

static int64_t rank_at(const ith_mesh *mesh, int64_t step)
{
    int64_t size = ith_ring_size(mesh);
    return (ith_ring_rank(mesh) + size - step) % size;
}

/* Sends `out` to the next ring rank and receives `in` from the one before, beside what is computed
 * until the mark is awaited; contiguous rows. */
static ith_status pass(const ring *r, T out, T in, int mark)
{
    const ith_mesh *m = r->mesh;
    int64_t u = m->ulysses_size, own = m->cp_rank % u, *lists = m->lists, p = m->cp_size;
    int64_t next = (ith_ring_rank(m) + 1) % ith_ring_size(m) * u + own;
    int64_t before = rank_at(m, 1) * u + own;
    ITH_ASSERT(ith_is_contiguous(out) && ith_is_contiguous(in));
    memset(lists, 0, (size_t)(4 * p) * sizeof *lists);
    lists[p + next] = ith_tensor_bytes(out);
    lists[3 * p + before] = ith_tensor_bytes(in);
    ith_exchange x = {out.data, lists, lists + p, in.data, lists + 2 * p, lists + 3 * p};
    ITH_TRY(ith_mesh_fork(m, r->ctx));
    ITH_TRY(ith_comm_exchange(m->device_cp[1], &x, r->ctx->err));
    return ith_mesh_note(m, r->ctx, mark);
}

/* ---- a pair of stretches ---- */

/* Rows [q_first, q_end) of this ring slice against rows [k_first, k_end) of another one. */
typedef struct {
    int64_t q_first, q_end, k_first, k_end;
    bool own;      /* a stretch and its own keys */
    ith_seqs seqs; /* the window */
} pair;

/* Whether any row of stretch q may see one of stretch k. */
static bool meet(const ring *r, ith_stretch q, ith_stretch k)
{
    int64_t first = ith_max_i64(q.first, k.first),
            last = ith_min_i64(q.first + q.count, k.first + k.count) - 1, d = 0;
    if (q.count == 0 || k.count == 0)
        return false;
    if (first <= last) /* a stretch and itself */
        return true;
    if (r->causal && !ith_seqs_have_blocks(r->seqs) && k.first > q.first)
        return false;
    while (r->seqs.cu_host[d + 1] <= last)
        d++;
    return first < r->seqs.cu_host[d + 1];
}

/* Stretch q (rows from q_row of this slice) against stretch k (rows from k_row of that of another
 * ring rank). */
static pair pair_of(const ring *r, ith_stretch q, int64_t q_row, ith_stretch k, int64_t k_row)
{
    pair p = {q_row, q_row + q.count, k_row, k_row + k.count, q.first == k.first, r->seqs};
    p.seqs.q_first = q.first;
    p.seqs.k_first = k.first;
    return p;
}

typedef ith_status (*pair_function)(ring *r, const pair *p, void *arg);

/* All pairs of this slice with that of ring rank `other`. */
static ith_status for_pairs(ring *r, int64_t other, pair_function f, void *arg)
{
    ith_stretch q[2], k[2];
    if (ith_ctx_counting(r->ctx)) { /* the largest pairs there are */
        int64_t rows = r->mesh->in_order ? r->rows : ith_div_ceil(r->rows, 2);
        for (int own = 0; own < 2; own++) {
            pair p = pair_of(r, (ith_stretch){0, rows}, 0, (ith_stretch){!own, rows}, 0);
            ITH_TRY(f(r, &p, arg));
        }
        return ITH_OK;
    }
    ith_ring_stretches(r->mesh, r->n, ith_ring_rank(r->mesh), q);
    ith_ring_stretches(r->mesh, r->n, other, k);
    for (int i = 0; i < 2; i++)
        for (int n = 0; n < 2; n++) {
            int j = n ? 1 - i : i;
            pair p = pair_of(r, q[i], i ? q[0].count : 0, k[j], j ? k[0].count : 0);
            if (meet(r, q[i], k[j]))
                ITH_TRY(f(r, &p, arg));
        }
    return ITH_OK;
}

/* ---- forward ---- */

typedef struct {
    T k, v;   /* of the running step */
    T o, lse; /* f32 */
} forward_pass;

static ith_status forward_pair(ring *r, const pair *p, void *arg)
{
    forward_pass *f = arg;
    ith_ctx *ctx = r->ctx;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE), rows = p->q_end - p->q_first;
    T q = ith_row_range(r->x.q, p->q_first, p->q_end), o, lse;
    T k = ith_row_range(f->k, p->k_first, p->k_end), v = ith_row_range(f->v, p->k_first, p->k_end);
    T sum = ith_row_range(f->o, p->q_first, p->q_end),
      sum_lse = ith_row_range(f->lse, p->q_first, p->q_end);
    if (p->own)
        return ith_attention_forward(ctx, sum, sum_lse, q, k, v, p->seqs, r->scale, r->causal);
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "part of attention", ITH_F32, 3, rows, q.shape[1],
                         q.shape[2], 1, &o));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "part of attention", ITH_F32, 2, rows, q.shape[1],
                         1, 1, &lse));
    ITH_TRY(ith_attention_forward(ctx, o, lse, q, k, v, p->seqs, r->scale, r->causal));
    ITH_TRY(ith_attention_merge(ctx, sum, sum_lse, o, lse));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* Two buffers of keys and values, as many rows as the largest slice; own ones packed in the first.
 */
static ith_status push_kv(ring *r, ith_dtype dtype, int64_t rows, T *buffers)
{
    int64_t width = 2 * r->x.k.shape[1] * r->x.k.shape[2];
    for (int i = 0; i < 2; i++)
        ITH_TRY(ith_ctx_push(r->ctx, ITH_MEM_COMM, "keys and values of the ring", dtype, 2, rows,
                             width, 1, 1, &buffers[i]));
    return ITH_OK;
}

static ith_status pack_kv(ring *r, T both)
{
    int64_t width = both.shape[1] / 2;
    T own = ith_row_range(both, 0, r->rows);
    ITH_TRY(ith_cast(r->ctx, ith_col_range(own, 0, width), as_2d(r->x.k)));
    return ith_cast(r->ctx, ith_col_range(own, width, 2 * width), as_2d(r->x.v));
}

/* Rows of the slice that ring rank `rank` holds. */
static T rows_of(const ring *r, T t, int64_t rank)
{
    return ith_row_range(t, 0, ith_ring_rows(r->mesh, r->n, rank));
}

/* While the plan counts: one, which stands for all. */
static int64_t num_steps(const ring *r)
{
    return ith_ctx_counting(r->ctx) ? 1 : ith_ring_size(r->mesh);
}

/* Behind the keys of step s those of the next one are fetched, if there is one. */
static ith_status fetch_kv(const ring *r, const T *kv, int64_t s)
{
    if (s + 1 == num_steps(r))
        return ITH_OK;
    return pass(r, rows_of(r, kv[s % 2], rank_at(r->mesh, s)),
                rows_of(r, kv[(s + 1) % 2], rank_at(r->mesh, s + 1)), ITH_MARK_KEYS);
}

static int64_t most_rows(const ring *r)
{
    return ith_ctx_counting(r->ctx) ? r->rows : ith_ring_most_rows(r->mesh, r->n);
}

ith_status ith_ring_attention_forward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, T o, T lse,
                                      ith_qkv x, ith_seqs seqs, float scale, bool causal)
{
    ring r = ring_of(mesh, ctx, n, x, seqs, scale, causal);
    T kv[2];
    forward_pass f = {.k = x.k, .v = x.v, .o = o, .lse = lse};
    if (ith_ring_size(mesh) == 1)
        return ith_attention_forward(ctx, o, lse, x.q, x.k, x.v, seqs, scale, causal);
    int64_t marks[] = {ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE),
                       ith_plan_mark(ctx->plan, ITH_MEM_COMM)};
    ITH_TRY(push_kv(&r, x.k.dtype, most_rows(&r), kv));
    if (o.dtype != ITH_F32)
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "attention sum", ITH_F32, 3, o.shape[0],
                             o.shape[1], o.shape[2], 1, &f.o));
    ITH_TRY(pack_kv(&r, kv[0]));
    for (int64_t s = 0; s < num_steps(&r); s++) {
        if (s > 0)
            split_kv(rows_of(&r, kv[s % 2], rank_at(mesh, s)), x.k.shape[1], &f.k, &f.v);
        ITH_TRY(fetch_kv(&r, kv, s));
        ITH_TRY(for_pairs(&r, rank_at(mesh, s), forward_pair, &f));
        ITH_TRY(ith_mesh_await(mesh, ctx, ITH_MARK_KEYS));
    }
    if (o.dtype != ITH_F32)
        ITH_TRY(ith_cast(ctx, o, f.o));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, marks[0]);
    ith_plan_release(ctx->plan, ITH_MEM_COMM, marks[1]);
    return ITH_OK;
}

/* ---- backward ---- */

typedef struct {
    T k, v; /* of the running step */
    T o, lse, do_;
    T dq, dk, dv; /* f32 sums */
    bool travels; /* dk and dv may not have arrived */
} backward_pass;

static ith_status await_sums(const ring *r, backward_pass *b)
{
    ITH_TRY(b->travels ? ith_mesh_await(r->mesh, r->ctx, ITH_MARK_KEY_GRADS) : ITH_OK);
    b->travels = false;
    return ITH_OK;
}

static ith_status add_rows(ith_ctx *ctx, T sum, int64_t first, int64_t end, T part)
{
    T rows = as_2d(ith_row_range(sum, first, end));
    return ith_add(ctx, rows, rows, as_2d(part));
}

static ith_status backward_pair(ring *r, const pair *p, void *arg)
{
    backward_pass *b = arg;
    ith_ctx *ctx = r->ctx;
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    int64_t q0 = p->q_first, q1 = p->q_end, k0 = p->k_first, k1 = p->k_end;
    T q = ith_row_range(r->x.q, q0, q1), k = ith_row_range(b->k, k0, k1), dq, dk, dv;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "part of a gradient", ITH_F32, 3, q.shape[0],
                         q.shape[1], q.shape[2], 1, &dq));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "part of a gradient", ITH_F32, 3, k.shape[0],
                         k.shape[1], k.shape[2], 1, &dk));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "part of a gradient", ITH_F32, 3, k.shape[0],
                         k.shape[1], k.shape[2], 1, &dv));
    ITH_TRY(ith_attention_backward(ctx, dq, dk, dv, ith_row_range(b->do_, q0, q1), q, k,
                                   ith_row_range(b->v, k0, k1), ith_row_range(b->o, q0, q1),
                                   ith_row_range(b->lse, q0, q1), p->seqs, r->scale, r->causal));
    ITH_TRY(add_rows(ctx, b->dq, q0, q1, dq));
    ITH_TRY(await_sums(r, b));
    ITH_TRY(add_rows(ctx, b->dk, k0, k1, dk));
    ITH_TRY(add_rows(ctx, b->dv, k0, k1, dv));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}

/* Own queries against the keys of all ring ranks; gradients of keys travel behind these, and own
 * ones come home to `own`. */
static ith_status go_round(ring *r, backward_pass *b, const T *kv, const T *dkv, T own)
{
    const ith_mesh *mesh = r->mesh;
    int64_t heads = r->x.k.shape[1];
    T sum = own;
    for (int64_t s = 0; s < num_steps(r); s++) {
        int64_t rank = rank_at(mesh, s);
        if (s > 0) {
            sum = rows_of(r, dkv[s % 2], rank);
            split_kv(rows_of(r, kv[s % 2], rank), heads, &b->k, &b->v);
        }
        split_kv(sum, heads, &b->dk, &b->dv);
        if (s <= 1)
            ITH_TRY(ith_zero(r->ctx, sum));
        b->travels = s > 1;
        ITH_TRY(fetch_kv(r, kv, s));
        ITH_TRY(for_pairs(r, rank, backward_pair, b));
        ITH_TRY(await_sums(r, b));
        if (s > 0) {
            T next = rows_of(r, dkv[(s + 1) % 2], rank_at(mesh, s + 1));
            ITH_TRY(pass(r, sum, next, ITH_MARK_KEY_GRADS));
            sum = next;
        }
        ITH_TRY(ith_mesh_await(mesh, r->ctx, ITH_MARK_KEYS));
    }
    if (ith_ctx_counting(r->ctx))
        return ITH_OK;
    ITH_TRY(ith_mesh_await(mesh, r->ctx, ITH_MARK_KEY_GRADS));
    return ith_add(r->ctx, own, own, sum);
}

ith_status ith_ring_attention_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_qkv dx,
                                       T do_, ith_qkv x, T o, T lse, ith_seqs seqs, float scale,
                                       bool causal)
{
    ring r = ring_of(mesh, ctx, n, x, seqs, scale, causal);
    T kv[2], dkv[2], own;
    backward_pass b = {.k = x.k, .v = x.v, .o = o, .lse = lse, .do_ = do_};
    if (ith_ring_size(mesh) == 1)
        return ith_attention_backward(ctx, dx.q, dx.k, dx.v, do_, x.q, x.k, x.v, o, lse, seqs,
                                      scale, causal);
    int64_t marks[] = {ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE),
                       ith_plan_mark(ctx->plan, ITH_MEM_COMM)};
    int64_t width = x.k.shape[1] * x.k.shape[2];
    ITH_TRY(push_kv(&r, x.k.dtype, most_rows(&r), kv));
    ITH_TRY(push_kv(&r, ITH_F32, most_rows(&r), dkv));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "gradient sum", ITH_F32, 3, r.rows, x.q.shape[1],
                         x.q.shape[2], 1, &b.dq));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "gradient sum", ITH_F32, 2, r.rows, 2 * width, 1,
                         1, &own));
    ITH_TRY(ith_zero(ctx, b.dq));
    ITH_TRY(pack_kv(&r, kv[0]));
    ITH_TRY(go_round(&r, &b, kv, dkv, own));
    ITH_TRY(ith_cast(ctx, as_2d(dx.q), as_2d(b.dq)));
    ITH_TRY(ith_cast(ctx, as_2d(dx.k), ith_col_range(own, 0, width)));
    ITH_TRY(ith_cast(ctx, as_2d(dx.v), ith_col_range(own, width, 2 * width)));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, marks[0]);
    ith_plan_release(ctx->plan, ITH_MEM_COMM, marks[1]);
    return ITH_OK;
}

/* ---- the choice ---- */

double ith_ring_bytes_per_token(int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                                int64_t cp_size, int64_t ulysses_size, int64_t e)
{
    double u = (double)ulysses_size, rings = (double)ith_div_exact(cp_size, ulysses_size);
    double dq = (double)(q_heads * head_dim), dkv = (double)(kv_heads * head_dim);
    double rep = ulysses_size > kv_heads ? u / (double)kv_heads : 1;
    double heads = (u - 1) / u / (double)cp_size * (2 * dq + 2 * dkv * rep) * (double)e;
    double around = (rings - 1) / rings * 2 * dkv * rep / u;
    return 2 * heads + around * (double)e + around * (double)(e + 4);
}

/* Most query heads of a rank, as a multiple of the mean. */
static double unevenness(int64_t q_heads, int64_t kv_heads, int64_t u)
{
    int64_t most = 0;
    for (int64_t r = 0; r < u; r++)
        most = ith_max_i64(most, ith_ulysses_share(q_heads, kv_heads, u, r).q_count);
    return (double)most * (double)u / (double)q_heads;
}

int64_t ith_ring_choose(int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t cp_size,
                        int64_t e, ith_ring_wish wish, bool in_order)
{
    int64_t best = 0;
    double least = 0;
    for (int64_t u = ith_min_i64(cp_size, q_heads); u >= 1; u--) { /* of equals the shortest ring */
        bool wanted = wish == ITH_RING_NEVER  ? u == cp_size
                      : wish == ITH_RING_ONLY ? u == 1
                      : wish == ITH_RING_MIXED
                          ? u > 1 && u < cp_size
                          : in_order || unevenness(q_heads, kv_heads, u) <= 1.15;
        if (cp_size % u != 0 || !wanted) /* NOLINT(clang-analyzer-core.DivideZero): u >= 1 */
            continue;
        double cost = in_order
                          ? unevenness(q_heads, kv_heads, u) * (2 - (double)u / (double)cp_size)
                          : ith_ring_bytes_per_token(q_heads, kv_heads, head_dim, cp_size, u, e);
        if (!best || cost < least) {
            best = u;
            least = cost;
        }
    }
    return best;
}
