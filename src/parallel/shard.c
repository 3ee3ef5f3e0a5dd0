/* shard.c - slices of blocks.
 * Invariant: cuts depend on the block and the number of ranks alone. */
#include "parallel/shard.h"

#include <string.h>

#include "base/mem.h"

#define CUT_ALIGN 128 /* elements, as parameters are placed */

/* First element, in the block, of rank r's slice. */
static int64_t cut(int64_t elements, int64_t world, int64_t r)
{
    int64_t units = elements / CUT_ALIGN;
    return (units / world * r + ith_min_i64(r, units % world)) * CUT_ALIGN;
}

static int64_t block_elements(const ith_shard *s, int64_t block)
{
    return s->block_first[block + 1] - s->block_first[block];
}

ith_status ith_shard_init(ith_shard *s, const ith_mesh *mesh, const int64_t *block_first,
                          int64_t num_blocks, ith_error *err)
{
    int64_t world = mesh->world_size, rank = mesh->world ? mesh->world->rank : 0;
    ith_status status = ITH_OK;
    memset(s, 0, sizeof *s);
    s->mesh = mesh;
    s->num_blocks = num_blocks;
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->block_first, num_blocks + 1, 8, "blocks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->shard_first, num_blocks + 1, 8, "blocks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->cuts, world + 1, 8, "blocks", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&s->lists, 4 * world, 8, "blocks", err));
    memcpy(s->block_first, block_first, (size_t)(num_blocks + 1) * 8);
    for (int64_t b = 0; b < num_blocks; b++) {
        int64_t n = block_elements(s, b);
        ITH_ASSERT(n >= 0 && n % CUT_ALIGN == 0);
        s->shard_first[b + 1] = s->shard_first[b] + cut(n, world, rank + 1) - cut(n, world, rank);
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
    ith_free(s->cuts);
    ith_free(s->lists);
    memset(s, 0, sizeof *s);
}

int64_t ith_shard_elements(const ith_shard *s)
{
    return s->shard_first[s->num_blocks];
}

static int64_t own_rank(const ith_shard *s)
{
    return s->mesh->world ? s->mesh->world->rank : 0;
}

int64_t ith_shard_slice_first(const ith_shard *s, int64_t block)
{
    return s->block_first[block] + cut(block_elements(s, block), s->mesh->world_size, own_rank(s));
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

static void fill_cuts(ith_shard *s, int64_t block)
{
    for (int64_t r = 0; r <= s->mesh->world_size; r++)
        s->cuts[r] = cut(block_elements(s, block), s->mesh->world_size, r);
}

ith_status ith_shard_reduce(ith_shard *s, ith_ctx *ctx, int64_t block, ith_tensor t,
                            ith_tensor *own)
{
    int64_t me = own_rank(s);
    ITH_ASSERT(t.ndim == 1 && t.dtype == ITH_F32 && t.shape[0] == block_elements(s, block));
    fill_cuts(s, block);
    *own = ith_row_range(t, s->cuts[me], s->cuts[me + 1]);
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    return ith_comm_reduce_scatter_v(s->mesh->world, t.data, s->cuts, ITH_F32, ITH_REDUCE_SUM,
                                     ctx->err);
}

ith_status ith_shard_gather(ith_shard *s, ith_ctx *ctx, int64_t block, ith_tensor t)
{
    ITH_ASSERT(t.ndim == 1 && t.shape[0] == block_elements(s, block));
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    fill_cuts(s, block);
    return ith_comm_all_gather_v(s->mesh->world, t.data, s->cuts, ith_dtype_bytes(t.dtype),
                                 ctx->err);
}

static int64_t block_of(const ith_shard *s, int64_t first, int64_t n)
{
    int64_t b = 0;
    while (first >= s->block_first[b + 1])
        b++;
    ITH_ASSERT(first >= s->block_first[b] && first + n <= s->block_first[b + 1]);
    return b;
}

/* Part of elements [first, first + n) that rank r has: *from behind first. */
static int64_t part_of_rank(const ith_shard *s, int64_t block, int64_t r, int64_t first, int64_t n,
                            int64_t *from)
{
    int64_t elements = block_elements(s, block), world = s->mesh->world_size;
    int64_t begin = s->block_first[block] + cut(elements, world, r),
            end = s->block_first[block] + cut(elements, world, r + 1);
    int64_t low = ith_max_i64(first, begin), high = ith_min_i64(first + n, end);
    *from = low - first;
    return ith_max_i64(0, high - low);
}

int64_t ith_shard_overlap(const ith_shard *s, int64_t first, int64_t n, int64_t *from, int64_t *at)
{
    int64_t block = block_of(s, first, n);
    int64_t count = part_of_rank(s, block, own_rank(s), first, n, from);
    *at = s->shard_first[block] + first + *from - ith_shard_slice_first(s, block);
    return count;
}

ith_status ith_shard_fetch(ith_shard *s, ith_ctx *ctx, ith_tensor t, int64_t first, int64_t n,
                           void *out)
{
    int64_t world = s->mesh->world_size, me = own_rank(s), size = ith_dtype_bytes(t.dtype);
    int64_t block = block_of(s, first, n), from = 0, at = 0;
    int64_t mine = ith_shard_overlap(s, first, n, &from, &at);
    int64_t *send_at = s->lists, *send_bytes = send_at + world, *recv_at = send_bytes + world,
            *recv_bytes = recv_at + world;
    ITH_ASSERT(t.shape[0] == ith_shard_elements(s));
    for (int64_t r = 0; r < world; r++) {
        send_at[r] = mine ? at * size : 0;
        send_bytes[r] = r == 0 ? mine * size : 0;
        recv_at[r] = recv_bytes[r] = 0;
        if (me == 0) {
            recv_bytes[r] = part_of_rank(s, block, r, first, n, &from) * size;
            recv_at[r] = recv_bytes[r] ? from * size : 0;
        }
    }
    ith_exchange x = {t.data, send_at, send_bytes, out, recv_at, recv_bytes};
    return ith_comm_exchange(s->mesh->world, &x, ctx->err);
}
