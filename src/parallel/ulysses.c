/* ulysses.c - packing, one exchange, unpacking.
 * Where links of devices take rows (ith_mesh_takes_rows) neither packs, and the exchange has a
 * queue of its own.
 *
 * Invariants:
 *  1. A block between two ranks is [tokens of the slice owner, heads of the head owner], in both
 *     directions, so an exchange and its adjoint send the same bytes back.
 *  2. The head owner never packs: its side is whole rows. */
#include "parallel/ulysses.h"

#include <string.h>

typedef ith_tensor T;

/* Among the neighbours that exchange heads. */
static int64_t own_rank(const ith_mesh *mesh)
{
    return mesh->cp_rank % mesh->ulysses_size;
}

ith_head_share ith_ulysses_share(int64_t q_heads, int64_t kv_heads, int64_t cp_size, int64_t rank)
{
    int64_t group = ith_div_exact(q_heads, kv_heads);
    ITH_ASSERT(cp_size >= 1 && rank >= 0 && rank < cp_size && cp_size <= q_heads);
    if (cp_size <= kv_heads) {
        int64_t first = rank * kv_heads / cp_size, end = (rank + 1) * kv_heads / cp_size;
        return (ith_head_share){first * group, (end - first) * group, first, end - first};
    }
    int64_t kv = rank * kv_heads / cp_size, first_rank = ith_div_ceil(kv * cp_size, kv_heads);
    int64_t ranks = ith_div_ceil((kv + 1) * cp_size, kv_heads) - first_rank, i = rank - first_rank;
    int64_t begin = i * group / ranks, end = (i + 1) * group / ranks;
    ITH_ASSERT(end > begin);
    return (ith_head_share){kv * group + begin, end - begin, kv, 1};
}

ith_head_share ith_ulysses_own_share(const ith_mesh *mesh, int64_t q_heads, int64_t kv_heads)
{
    return mesh ? ith_ulysses_share(q_heads, kv_heads, mesh->ulysses_size, own_rank(mesh))
                : (ith_head_share){0, q_heads, 0, kv_heads};
}

/* ---- rows ---- */

typedef struct {
    char *dst;
    const char *src;
    int64_t dst_stride, src_stride, bytes; /* of a row */
} row_copy;

static void copy_rows_task(void *arg, int64_t begin, int64_t end, int thread)
{
    const row_copy *c = arg;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        memcpy(c->dst + i * c->dst_stride, c->src + i * c->src_stride, (size_t)c->bytes);
}

/* 2-D views of one type and shape, rows of any stride. */
static ith_status copy_rows(ith_ctx *ctx, T dst, T src)
{
    int64_t size = ith_dtype_bytes(dst.dtype);
    ITH_ASSERT(dst.ndim == 2 && src.ndim == 2 && dst.dtype == src.dtype);
    ITH_ASSERT(dst.shape[0] == src.shape[0] && dst.shape[1] == src.shape[1]);
    row_copy c = {dst.data, src.data, dst.stride[0] * size, src.stride[0] * size,
                  dst.shape[1] * size};
    if (dst.shape[0] == 0 || c.bytes == 0)
        return ITH_OK;
    if (ctx->device->copy_rows)
        return ctx->device->copy_rows(ctx->device, c.dst, c.dst_stride, c.src, c.src_stride,
                                      c.bytes, dst.shape[0], ctx->err);
    ith_pool_for(ctx->pool, dst.shape[0], ith_max_i64(1, 65536 / c.bytes), copy_rows_task, &c);
    return ITH_OK;
}

/* Heads [first, first + count) of [rows, H, Dh] as 2-D columns. */
static T head_cols(T t, int64_t first, int64_t count)
{
    ITH_ASSERT(t.ndim == 3 && t.stride[1] == t.shape[2] && t.stride[2] == 1);
    T all = {
        t.data, t.dtype, 2, {t.shape[0], t.shape[1] * t.shape[2], 1, 1}, {t.stride[0], 1, 1, 1}};
    return ith_col_range(all, first * t.shape[2], (first + count) * t.shape[2]);
}

/* [rows, H, Dh] without gaps as [rows, H * Dh]. */
static T as_rows(T t)
{
    return head_cols(t, 0, t.shape[1]);
}

/* ---- blocks between ranks ---- */

_Static_assert(ITH_HEAD_PARTS <= ITH_MAX_PIECES, "a part is a piece of an exchange");

typedef struct {
    const ith_mesh *mesh;
    int64_t n, tokens; /* of the group, of this rank */
    int64_t q_heads, kv_heads;
    ith_dtype dtype;
    int count;
    struct {
        int64_t dim;
        bool kv;
    } part[ITH_HEAD_PARTS];
} layout;

static layout make_layout(const ith_mesh *mesh, int64_t n, int64_t tokens, const ith_head_parts *p)
{
    layout l = {mesh, n, tokens, p->q_heads, p->kv_heads, p->t[0].dtype, p->count, {{0, false}}};
    for (int i = 0; i < p->count; i++) {
        ITH_ASSERT(p->t[i].ndim == 3 && p->t[i].dtype == l.dtype);
        l.part[i].dim = p->t[i].shape[2];
        l.part[i].kv = p->kv[i];
    }
    return l;
}

static ith_head_share share_of(const layout *l, int64_t rank)
{
    return ith_ulysses_share(l->q_heads, l->kv_heads, l->mesh->ulysses_size, rank);
}

/* Heads of part i in a share: *first of all of them, and how many. */
static int64_t heads_of(const layout *l, const ith_head_share *s, int i, int64_t *first)
{
    *first = l->part[i].kv ? s->kv_first : s->q_first;
    return l->part[i].kv ? s->kv_count : s->q_count;
}

/* Columns of a block before part i. */
static int64_t column_of(const layout *l, const ith_head_share *s, int i)
{
    int64_t width = 0, first;
    for (int k = 0; k < i; k++)
        width += heads_of(l, s, k, &first) * l->part[k].dim;
    return width;
}

static int64_t block_width(const layout *l, const ith_head_share *s)
{
    return column_of(l, s, l->count);
}

static int64_t own_width(const layout *l)
{
    ith_head_share s = share_of(l, own_rank(l->mesh));
    return block_width(l, &s);
}

/* Columns of the blocks of ranks [0, j). */
static int64_t width_before(const layout *l, int64_t j)
{
    int64_t width = 0;
    for (int64_t i = 0; i < j; i++) {
        ith_head_share s = share_of(l, i);
        width += block_width(l, &s);
    }
    return width;
}

/* Block of rank j in the staging: [tokens, width_j]. */
static T staged_block(const layout *l, T staging, int64_t j, ith_head_share *share)
{
    *share = share_of(l, j);
    char *data = (char *)staging.data + l->tokens * width_before(l, j) * ith_dtype_bytes(l->dtype);
    return ith_tensor_2d(data, l->dtype, l->tokens, block_width(l, share));
}

/* Part i of a block, heads [from, from + count) of the share's, as columns. */
static T block_heads(const layout *l, const ith_head_share *s, T block, int i, int64_t from,
                     int64_t count)
{
    int64_t dim = l->part[i].dim, at = column_of(l, s, i) + from * dim;
    return ith_col_range(block, at, at + count * dim);
}

/* ---- without packing: rows of the one side go where they belong on the other ---- */

/* Kv heads that ranks share come back as a sum, which needs a place of its own. */
bool ith_ulysses_is_direct(const ith_mesh *mesh, const ith_ctx *ctx, int64_t kv_heads)
{
    return ith_ulysses_size(mesh) > 1 && ith_ring_size(mesh) == 1 &&
           mesh->ulysses_size <= kv_heads && ith_mesh_takes_rows(mesh, ctx);
}

static ith_strided rows_of(T cols)
{
    int64_t size = ith_dtype_bytes(cols.dtype);
    return (ith_strided){cols.data, cols.stride[0] * size, cols.shape[1] * size, cols.shape[0]};
}

/* Both sides of part i of the block of rank j. parts: of this rank's tokens, all heads; rows [n,
 * own width]: of all tokens, own heads. */
static void sides_of(const layout *l, const T *parts, T rows, int64_t j, int i, T *tokens_side,
                     T *heads_side)
{
    ith_head_share theirs = share_of(l, j), mine = share_of(l, own_rank(l->mesh));
    int64_t head, count = heads_of(l, &theirs, i, &head);
    T block =
        ith_row_range(rows, ith_cp_first(l->mesh, l->n, j), ith_cp_first(l->mesh, l->n, j + 1));
    *tokens_side = head_cols(parts[i], head, count);
    count = heads_of(l, &mine, i, &head);
    *heads_side = block_heads(l, &mine, block, i, 0, count);
}

/* parts -> rows (to_heads), or back: what goes to others and comes from them. */
static ith_status exchange_direct(const layout *l, ith_ctx *ctx, const T *parts, T rows,
                                  bool to_heads)
{
    const ith_mesh *m = l->mesh;
    ith_strided *tokens_side = m->pieces, *heads_side = m->pieces + ITH_MAX_PIECES * m->cp_size;
    for (int64_t j = 0, k = 0; j < m->cp_size; j++)
        for (int i = 0; i < l->count; i++, k++) {
            T a, b;
            sides_of(l, parts, rows, j, i, &a, &b);
            tokens_side[k] = rows_of(a);
            heads_side[k] = rows_of(b);
            if (j == own_rank(m))
                tokens_side[k].rows = heads_side[k].rows = 0;
        }
    ITH_TRY(ith_mesh_fork(m, ctx));
    ITH_TRY(ith_comm_exchange_rows(m->device_cp[1], to_heads ? tokens_side : heads_side,
                                   to_heads ? heads_side : tokens_side, l->count, ctx->err));
    return ith_mesh_note(m, ctx, ITH_MARK_HEADS);
}

/* The own block, on the main queue meanwhile. */
static ith_status copy_own(const layout *l, ith_ctx *ctx, const T *parts, T rows, bool to_heads)
{
    for (int i = 0; i < l->count; i++) {
        T a, b;
        sides_of(l, parts, rows, own_rank(l->mesh), i, &a, &b);
        ITH_TRY(copy_rows(ctx, to_heads ? b : a, to_heads ? a : b));
    }
    return ITH_OK;
}

static ith_status go_directly(const layout *l, ith_ctx *ctx, const T *parts, T rows, bool to_heads)
{
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    ITH_TRY(exchange_direct(l, ctx, parts, rows, to_heads));
    return copy_own(l, ctx, parts, rows, to_heads);
}

ith_status ith_ulysses_await(const ith_mesh *mesh, ith_ctx *ctx)
{
    return ith_ulysses_size(mesh) > 1 ? ith_mesh_await(mesh, ctx, ITH_MARK_HEADS) : ITH_OK;
}

/* ---- with packing ---- */

/* staging -> rows [n, own width] (to_heads), or back. */
static ith_status exchange(const layout *l, ith_ctx *ctx, T staging, T rows, bool to_heads)
{
    const ith_mesh *m = l->mesh;
    int64_t size = ith_dtype_bytes(l->dtype), width = own_width(l), p = m->cp_size;
    int64_t first = ith_ring_rank(m) * m->ulysses_size, row0 = ith_cp_first(m, l->n, first);
    int64_t *staged_at = m->lists, *staged_bytes = m->lists + p, *rows_at = m->lists + 2 * p,
            *rows_bytes = m->lists + 3 * p;
    memset(m->lists, 0, (size_t)(4 * p) * sizeof *m->lists);
    for (int64_t j = first; j < first + m->ulysses_size; j++) {
        ith_head_share s;
        T block = staged_block(l, staging, j - first, &s);
        staged_at[j] = (const char *)block.data - (const char *)staging.data;
        staged_bytes[j] = ith_tensor_bytes(block);
        rows_at[j] = (ith_cp_first(m, l->n, j) - row0) * width * size;
        rows_bytes[j] = (ith_cp_first(m, l->n, j + 1) - ith_cp_first(m, l->n, j)) * width * size;
    }
    ith_exchange forth = {staging.data, staged_at, staged_bytes, rows.data, rows_at, rows_bytes};
    ith_exchange back = {rows.data, rows_at, rows_bytes, staging.data, staged_at, staged_bytes};
    return ith_comm_exchange(m->device_cp[0], to_heads ? &forth : &back, ctx->err);
}

static ith_status push_staging(const layout *l, ith_ctx *ctx, T *out)
{
    return ith_ctx_push(ctx, ITH_MEM_COMM, "ulysses blocks", l->dtype, 1,
                        l->tokens * width_before(l, l->mesh->ulysses_size), 1, 1, 1, out);
}

/* This rank's heads of every part as views of rows [n, own width]. */
static void head_views(const layout *l, T rows, ith_head_parts *out)
{
    ith_head_share s = share_of(l, own_rank(l->mesh));
    for (int i = 0; i < l->count; i++) {
        int64_t first, count = heads_of(l, &s, i, &first);
        out->t[i] = ith_split_heads(block_heads(l, &s, rows, i, 0, count), count);
    }
}

/* ---- the verbs ---- */

ith_status ith_ulysses_push_parts(const ith_mesh *mesh, ith_ctx *ctx, ith_mem_class where,
                                  const char *name, int64_t n, const ith_head_parts *in,
                                  ith_head_parts *out)
{
    *out = *in;
    if (ith_ulysses_size(mesh) == 1)
        return ITH_OK;
    layout l = make_layout(mesh, n, in->t[0].shape[0], in);
    T rows;
    ITH_TRY(ith_ctx_push(ctx, where, name, l.dtype, 2, ith_ring_own_rows(mesh, ctx, n),
                         own_width(&l), 1, 1, &rows));
    head_views(&l, rows, out);
    return ITH_OK;
}

/* What push_parts pushed. */
static T rows_behind(const layout *l, const ith_head_parts *heads)
{
    ITH_ASSERT(heads->t[0].stride[0] == own_width(l));
    return ith_tensor_2d(heads->t[0].data, l->dtype, heads->t[0].shape[0], own_width(l));
}

ith_status ith_ulysses_parts_to_heads(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                      const ith_head_parts *in, const ith_head_parts *out)
{
    if (ith_ulysses_size(mesh) == 1)
        return ITH_OK;
    layout l = make_layout(mesh, n, in->t[0].shape[0], in);
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM);
    T staging, rows = rows_behind(&l, out);
    if (ith_ulysses_is_direct(mesh, ctx, l.kv_heads))
        return go_directly(&l, ctx, in->t, rows, true);
    ITH_TRY(push_staging(&l, ctx, &staging));
    if (!ith_ctx_counting(ctx)) {
        for (int64_t j = 0; j < mesh->ulysses_size; j++) {
            ith_head_share s;
            T block = staged_block(&l, staging, j, &s);
            for (int i = 0; i < l.count; i++) {
                int64_t first, count = heads_of(&l, &s, i, &first);
                ITH_TRY(copy_rows(ctx, block_heads(&l, &s, block, i, 0, count),
                                  head_cols(in->t[i], first, count)));
            }
        }
        ITH_TRY(exchange(&l, ctx, staging, rows, true));
    }
    ith_plan_release(ctx->plan, ITH_MEM_COMM, mark);
    return ITH_OK;
}

/* Gradients from block j: the first rank that holds a head writes, the others add. */
static ith_status unpack_gradient(const layout *l, ith_ctx *ctx, const ith_head_share *s, T block,
                                  const ith_head_parts *din, int64_t next_kv)
{
    for (int i = 0; i < l->count; i++) {
        int64_t first, count = heads_of(l, s, i, &first);
        for (int64_t h = 0; h < count; h++) {
            int64_t step = l->part[i].kv ? 1 : count;
            T from = block_heads(l, s, block, i, h, step),
              to = head_cols(din->t[i], first + h, step);
            if (l->part[i].kv && first + h < next_kv)
                ITH_TRY(ith_add(ctx, to, to, from));
            else
                ITH_TRY(copy_rows(ctx, to, from));
            h += step - 1;
        }
    }
    return ITH_OK;
}

ith_status ith_ulysses_parts_to_heads_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                               const ith_head_parts *din,
                                               const ith_head_parts *dout)
{
    if (ith_ulysses_size(mesh) == 1)
        return ITH_OK;
    layout l = make_layout(mesh, n, din->t[0].shape[0], din);
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM), next_kv = 0;
    T staging, rows = rows_behind(&l, dout);
    if (ith_ulysses_is_direct(mesh, ctx, l.kv_heads))
        return go_directly(&l, ctx, din->t, rows, false);
    ITH_TRY(push_staging(&l, ctx, &staging));
    if (!ith_ctx_counting(ctx)) {
        ITH_TRY(exchange(&l, ctx, staging, rows, false));
        for (int64_t j = 0; j < mesh->ulysses_size; j++) {
            ith_head_share s;
            T block = staged_block(&l, staging, j, &s);
            ITH_TRY(unpack_gradient(&l, ctx, &s, block, din, next_kv));
            next_kv = s.kv_first + s.kv_count;
        }
    }
    ith_plan_release(ctx->plan, ITH_MEM_COMM, mark);
    return ITH_OK;
}

static ith_head_parts parts_of(ith_qkv x)
{
    ith_head_parts p = {3, x.q.shape[1], x.k.shape[1], {x.q, x.k, x.v}, {false, true, true}};
    return p;
}

static ith_qkv qkv_of(const ith_head_parts *p)
{
    return (ith_qkv){p->t[0], p->t[1], p->t[2]};
}

ith_status ith_ulysses_push_heads(const ith_mesh *mesh, ith_ctx *ctx, ith_mem_class where,
                                  const char *name, int64_t n, ith_qkv in, ith_qkv *out)
{
    ith_head_parts from = parts_of(in), to;
    ITH_TRY(ith_ulysses_push_parts(mesh, ctx, where, name, n, &from, &to));
    *out = qkv_of(&to);
    return ITH_OK;
}

ith_status ith_ulysses_to_heads(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_qkv in,
                                ith_qkv out)
{
    ith_head_parts from = parts_of(in), to = parts_of(out);
    return ith_ulysses_parts_to_heads(mesh, ctx, n, &from, &to);
}

ith_status ith_ulysses_to_heads_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_qkv din,
                                         ith_qkv dout)
{
    ith_head_parts to = parts_of(din), from = parts_of(dout);
    return ith_ulysses_parts_to_heads_backward(mesh, ctx, n, &to, &from);
}

ith_status ith_ulysses_to_tokens(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, int64_t q_heads,
                                 int64_t kv_heads, ith_tensor o, ith_tensor *out)
{
    if (ith_ulysses_size(mesh) == 1) {
        *out = o;
        return ITH_OK;
    }
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM);
    int64_t tokens = ith_ctx_counting(ctx) ? ith_div_ceil(n, mesh->cp_size)
                                           : ith_cp_end(mesh, n) - ith_cp_begin(mesh, n);
    ith_head_parts part = {1, q_heads, kv_heads, {o}, {false}};
    layout l = make_layout(mesh, n, tokens, &part);
    T staging;
    ITH_ASSERT(ith_is_contiguous(o) && o.shape[0] == ith_ring_own_rows(mesh, ctx, n));
    if (!out->ndim)
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "attention output of own tokens", l.dtype, 3,
                             tokens, q_heads, o.shape[2], 1, out));
    if (ith_ulysses_is_direct(mesh, ctx, l.kv_heads))
        return go_directly(&l, ctx, out, as_rows(o), false);
    ITH_TRY(push_staging(&l, ctx, &staging));
    if (!ith_ctx_counting(ctx)) {
        ITH_TRY(exchange(&l, ctx, staging, o, false));
        for (int64_t j = 0; j < mesh->ulysses_size; j++) {
            ith_head_share s;
            T block = staged_block(&l, staging, j, &s);
            ITH_TRY(copy_rows(ctx, head_cols(*out, s.q_first, s.q_count), block));
        }
    }
    ith_plan_release(ctx->plan, ITH_MEM_COMM, mark);
    return ITH_OK;
}

static layout layout_of_o(const ith_mesh *mesh, int64_t n, int64_t kv_heads, T out)
{
    ith_head_parts part = {1, out.shape[1], kv_heads, {out}, {false}};
    return make_layout(mesh, n, out.shape[0], &part);
}

ith_status ith_ulysses_others_to_tokens(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                        int64_t kv_heads, ith_tensor o, ith_tensor out)
{
    layout l = layout_of_o(mesh, n, kv_heads, out);
    return ith_ctx_counting(ctx) ? ITH_OK : exchange_direct(&l, ctx, &out, as_rows(o), false);
}

ith_status ith_ulysses_own_to_tokens(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                     int64_t kv_heads, ith_tensor o, ith_tensor out)
{
    layout l = layout_of_o(mesh, n, kv_heads, out);
    return ith_ctx_counting(ctx) ? ITH_OK : copy_own(&l, ctx, &out, as_rows(o), false);
}

ith_status ith_ulysses_to_tokens_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                          int64_t kv_heads, ith_tensor dout, ith_tensor *do_)
{
    if (ith_ulysses_size(mesh) == 1) {
        *do_ = dout;
        return ITH_OK;
    }
    int64_t mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM);
    ith_head_parts part = {1, dout.shape[1], kv_heads, {dout}, {false}};
    layout l = make_layout(mesh, n, dout.shape[0], &part);
    ith_head_share own = share_of(&l, own_rank(mesh));
    T staging;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "attention output gradient of all tokens", l.dtype,
                         3, ith_ring_own_rows(mesh, ctx, n), own.q_count, dout.shape[2], 1, do_));
    if (ith_ulysses_is_direct(mesh, ctx, l.kv_heads))
        return go_directly(&l, ctx, &dout, as_rows(*do_), true);
    ITH_TRY(push_staging(&l, ctx, &staging));
    if (!ith_ctx_counting(ctx)) {
        for (int64_t j = 0; j < mesh->ulysses_size; j++) {
            ith_head_share s;
            T block = staged_block(&l, staging, j, &s);
            ITH_TRY(copy_rows(ctx, block, head_cols(dout, s.q_first, s.q_count)));
        }
        ITH_TRY(exchange(&l, ctx, staging, *do_, true));
    }
    ith_plan_release(ctx->plan, ITH_MEM_COMM, mark);
    return ITH_OK;
}
