/* shard.c - slices of blocks.
 * Invariant: cuts depend on the block and the number of ranks alone. */
#include "parallel/shard.h"

#include <string.h>

#include "base/mem.h"
#include "kernels/ops.h"

#define CUT_ALIGN 128 /* elements, as parameters are placed */

/* First element, of so many, of the slice of rank r of `ranks`. */
static int64_t cut(int64_t elements, int64_t ranks, int64_t r)
{
    int64_t units = elements / CUT_ALIGN;
    return r == ranks ? elements : (units / ranks * r + ith_min_i64(r, units % ranks)) * CUT_ALIGN;
}

static int64_t block_elements(const ith_shard *s, int64_t block)
{
    return s->block_first[block + 1] - s->block_first[block];
}

static int64_t own_rank(const ith_shard *s)
{
    return s->mesh->world ? s->mesh->world->rank : 0;
}

/* Window of rank r in a block: *first element behind the block's, *own and *ranks among those that
 * share it; returns its elements. */
static int64_t window(const ith_shard *s, int64_t block, int64_t r, int64_t *first, int64_t *own,
                      int64_t *ranks)
{
    int64_t ep = s->chunk[block] ? s->mesh->ep_size : 1, e = r % ep;
    *own = s->chunk[block] ? r / ep : r % s->mesh->shard_size;
    *ranks = s->chunk[block] ? s->mesh->world_size / ep : s->mesh->shard_size;
    *first = e * s->chunk[block];
    return e + 1 < ep ? s->chunk[block] : block_elements(s, block) - *first;
}

bool ith_shard_is_copy(const ith_shard *s, int64_t block)
{
    return !s->chunk[block] && own_rank(s) >= s->mesh->shard_size;
}

/* Elements [*begin, *end) of a block are rank r's slice. */
static void slice_of(const ith_shard *s, int64_t block, int64_t r, int64_t *begin, int64_t *end)
{
    int64_t first, own, ranks, n = window(s, block, r, &first, &own, &ranks);
    *begin = first + cut(n, ranks, own);
    *end = first + cut(n, ranks, own + 1);
}

ith_status ith_shard_init(ith_shard *s, const ith_mesh *mesh, const int64_t *block_first,
                          const int64_t *chunk, int64_t num_blocks, ith_error *err)
{
    int64_t world = mesh->world_size, rank = mesh->world ? mesh->world->rank : 0;
    ith_status status = ITH_OK;
    memset(s, 0, sizeof *s);
    s->mesh = mesh;
    s->num_blocks = num_blocks;
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->block_first, num_blocks + 1, 8, "blocks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->shard_first, num_blocks + 1, 8, "blocks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->chunk, num_blocks, 8, "blocks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->cuts, world + 1, 8, "blocks", err));
    memcpy(s->block_first, block_first, (size_t)(num_blocks + 1) * 8);
    if (chunk)
        memcpy(s->chunk, chunk, (size_t)num_blocks * 8);
    for (int64_t b = 0; b < num_blocks; b++) {
        int64_t n = block_elements(s, b), begin, end;
        ITH_ASSERT(n >= 0 && n % CUT_ALIGN == 0);
        ITH_ASSERT(s->chunk[b] * mesh->ep_size <= n);
        slice_of(s, b, rank, &begin, &end);
        s->shard_first[b + 1] = s->shard_first[b] + end - begin;
    }
    return ITH_OK;
out:
    ith_shard_deinit(s);
    return status;
}

void ith_shard_deinit(ith_shard *s)
{
    ith_free(s->block_first);
    ith_free(s->shard_first);
    ith_free(s->chunk);
    ith_free(s->cuts);
    memset(s, 0, sizeof *s);
}

int64_t ith_shard_elements(const ith_shard *s)
{
    return s->shard_first[s->num_blocks];
}

int64_t ith_shard_slice_first(const ith_shard *s, int64_t block)
{
    int64_t begin, end;
    slice_of(s, block, own_rank(s), &begin, &end);
    return s->block_first[block] + begin;
}

int64_t ith_shard_window_first(const ith_shard *s, int64_t block)
{
    int64_t first, own, ranks;
    (void)window(s, block, own_rank(s), &first, &own, &ranks);
    return s->block_first[block] + first;
}

int64_t ith_shard_window_elements(const ith_shard *s, int64_t block)
{
    int64_t first, own, ranks;
    return window(s, block, own_rank(s), &first, &own, &ranks);
}

ith_tensor ith_shard_slice(const ith_shard *s, int64_t block, ith_tensor t)
{
    if (!t.ndim)
        return t;
    int64_t n = s->shard_first[block + 1] - s->shard_first[block], last = s->num_blocks;
    bool whole = t.shape[0] == s->block_first[last] || t.shape[0] == s->block_first[last - 1];
    ITH_ASSERT(t.ndim == 1 && (whole || t.shape[0] == s->shard_first[last] ||
                               t.shape[0] == s->shard_first[last - 1]));
    int64_t first = whole ? ith_shard_slice_first(s, block) : s->shard_first[block];
    return ith_row_range(t, first, first + n);
}

/* Cuts of the window among the ranks that share it; returns these. */
static ith_comm *fill_cuts(ith_shard *s, int64_t block, bool beside, int64_t *me)
{
    int64_t first, ranks, n = window(s, block, own_rank(s), &first, me, &ranks);
    for (int64_t r = 0; r <= ranks; r++)
        s->cuts[r] = cut(n, ranks, r);
    return s->chunk[block]  ? s->mesh->device_edp[beside]
           : s->mesh->shard ? s->mesh->device_shard[beside]
                            : s->mesh->device_world[beside];
}

ith_status ith_shard_reduce(ith_shard *s, ith_ctx *ctx, int64_t block, ith_tensor t,
                            ith_tensor into, bool beside)
{
    int64_t me = 0;
    bool copies = !s->chunk[block] && s->mesh->replicas;
    /* The addition behind the sum over copies is an operator: all of it on the main queue. */
    ith_comm *comm = fill_cuts(s, block, beside && !copies, &me);
    ITH_ASSERT(t.ndim == 1 && t.dtype == ITH_F32 &&
               t.shape[0] == ith_shard_window_elements(s, block));
    ith_tensor own = ith_row_range(t, s->cuts[me], s->cuts[me + 1]);
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    ITH_TRY(ith_comm_reduce_scatter_v(comm, t.data, s->cuts, ITH_F32, ITH_REDUCE_SUM,
                                      into.ndim && !copies ? into.data : NULL, ctx->err));
    if (!copies)
        return ITH_OK;
    ITH_TRY(ith_comm_all_reduce(s->mesh->device_replicas, own.data, own.shape[0], ITH_F32,
                                ITH_REDUCE_SUM, ctx->err));
    return into.ndim && own.shape[0] > 0 ? ith_add(ctx, into, into, own) : ITH_OK;
}

ith_status ith_shard_gather(ith_shard *s, ith_ctx *ctx, int64_t block, ith_tensor t, ith_tensor own,
                            bool beside)
{
    int64_t me = 0;
    ITH_ASSERT(t.ndim == 1 && t.shape[0] == ith_shard_window_elements(s, block));
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    ith_comm *comm = fill_cuts(s, block, beside, &me);
    return ith_comm_all_gather_v(comm, t.data, own.ndim ? own.data : NULL, s->cuts,
                                 ith_dtype_bytes(t.dtype), ctx->err);
}

static int64_t block_of(const ith_shard *s, int64_t first, int64_t n)
{
    int64_t b = 0;
    while (first >= s->block_first[b + 1])
        b++;
    ITH_ASSERT(first >= s->block_first[b] && first + n <= s->block_first[b + 1]);
    return b;
}

int64_t ith_shard_overlap(const ith_shard *s, int64_t first, int64_t n, int64_t *from, int64_t *at)
{
    int64_t block = block_of(s, first, n), begin, end;
    slice_of(s, block, own_rank(s), &begin, &end);
    begin += s->block_first[block];
    end += s->block_first[block];
    int64_t low = ith_max_i64(first, begin), high = ith_min_i64(first + n, end);
    *from = low - first;
    *at = s->shard_first[block] + low - begin;
    return ith_max_i64(0, high - low);
}

bool ith_shard_writes(const ith_shard *s, int64_t first, int64_t n)
{
    return !ith_shard_is_copy(s, block_of(s, first, n));
}

ith_comm *ith_shard_replicas(const ith_shard *s, int64_t first, int64_t n)
{
    return s->chunk[block_of(s, first, n)] ? NULL : s->mesh->replicas;
}
