/* cut_cache.c - see the header. Invariant: every rank merges the same parts in the same order. */
#include "parallel/cut_cache.h"

#include "parallel/ulysses.h"

typedef ith_tensor T;

static int64_t part_elements(T o)
{
    return o.shape[0] * o.shape[1] * (o.shape[2] + 1);
}

/* Part of rank r. */
static void part_of(T all, T o, int64_t r, T *part, T *lse)
{
    float *at = (float *)all.data + r * part_elements(o);
    *part = ith_tensor_3d(at, ITH_F32, o.shape[0], o.shape[1], o.shape[2]);
    *lse = ith_tensor_2d(at + ith_numel(o), ITH_F32, o.shape[0], o.shape[1]);
}

ith_status ith_cache_parts_open(const ith_mesh *mesh, ith_ctx *ctx, T o, ith_cache_parts *p)
{
    *p = (ith_cache_parts){.o = o, .lse = ith_tensor_none()};
    if (ith_cp_size(mesh) == 1)
        return ITH_OK;
    p->mark = ith_plan_mark(ctx->plan, ITH_MEM_COMM);
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_COMM, "parts of attention", ITH_F32, 2, mesh->cp_size,
                         part_elements(o), 1, 1, &p->all));
    part_of(p->all, o, mesh->cp_rank, &p->o, &p->lse);
    return ITH_OK;
}

static ith_status merge(const ith_mesh *mesh, ith_ctx *ctx, T o, const ith_cache_parts *p)
{
    T sum, sum_lse, part, lse;
    part_of(p->all, o, 0, &sum, &sum_lse);
    for (int64_t r = 1; r < mesh->cp_size; r++) {
        part_of(p->all, o, r, &part, &lse);
        ITH_TRY(ith_attention_merge(ctx, sum, sum_lse, part, lse));
    }
    return ith_cast(ctx, ith_tensor_2d(o.data, o.dtype, o.shape[0], o.shape[1] * o.shape[2]),
                    ith_tensor_2d(sum.data, ITH_F32, o.shape[0], o.shape[1] * o.shape[2]));
}

/* Every rank's part on all. */
static ith_status exchange(const ith_mesh *mesh, ith_ctx *ctx, T o, const ith_cache_parts *p)
{
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    for (int64_t r = 0; r <= mesh->cp_size; r++)
        mesh->lists[r] = r * part_elements(o);
    return ith_comm_all_gather_v(mesh->device_cp[0], p->all.data, NULL, mesh->lists,
                                 (int64_t)sizeof(float), ctx->err);
}

ith_status ith_cache_parts_close(const ith_mesh *mesh, ith_ctx *ctx, T o, ith_cache_parts *p)
{
    if (ith_cp_size(mesh) == 1)
        return ITH_OK;
    ITH_TRY(exchange(mesh, ctx, o, p));
    ITH_TRY(merge(mesh, ctx, o, p));
    ith_plan_release(ctx->plan, ITH_MEM_COMM, p->mark);
    return ITH_OK;
}

ith_status ith_cut_cache_gather_states(const ith_mesh *mesh, ith_ctx *ctx, T whole, T own,
                                       int64_t key_heads)
{
    int64_t heads = whole.shape[1], size = whole.shape[2] * whole.shape[3];
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    for (int64_t r = 0; r < mesh->cp_size; r++)
        mesh->lists[r] = ith_ulysses_share(heads, key_heads, mesh->cp_size, r).q_first * size;
    mesh->lists[mesh->cp_size] = heads * size;
    ITH_ASSERT(ith_numel(own) == mesh->lists[mesh->cp_rank + 1] - mesh->lists[mesh->cp_rank]);
    return ith_comm_all_gather_v(mesh->device_cp[0], whole.data, own.data, mesh->lists,
                                 (int64_t)sizeof(float), ctx->err);
}

ith_status ith_cut_cache_gather_tail(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, T tail, T x)
{
    int64_t m = tail.shape[1], mark = ith_plan_mark(ctx->plan, ITH_MEM_WORKSPACE);
    int64_t begin = ith_cp_begin(mesh, n), end = ith_cp_end(mesh, n);
    int64_t from = ith_max_i64(begin, n - m);
    T sum; /* of one term each */
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WORKSPACE, "last rows", ITH_F32, 2, m, tail.shape[2], 1, 1,
                         &sum));
    ITH_TRY(ith_zero(ctx, sum));
    if (from < end && !ith_ctx_counting(ctx))
        ITH_TRY(ith_cast(ctx, ith_row_range(sum, from - (n - m), end - (n - m)),
                         ith_row_range(x, from - begin, end - begin)));
    ITH_TRY(ith_mesh_sum_cp(mesh, ctx, sum));
    ITH_TRY(ith_cast(ctx, ith_tensor_2d(tail.data, tail.dtype, m, tail.shape[2]), sum));
    ith_plan_release(ctx->plan, ITH_MEM_WORKSPACE, mark);
    return ITH_OK;
}
