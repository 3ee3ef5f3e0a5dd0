/* mesh.c - the groups of a job. */
#include "parallel/mesh.h"

#include <string.h>

#include "base/mem.h"

/* Of a device group: parts of a reduction. Large enough for the full rate of a link. */
#define DEVICE_SCRATCH_BYTES ((int64_t)128 << 20)

ith_status ith_mesh_open(ith_mesh *mesh, ith_comm *world, int64_t cp_size, ith_error *err)
{
    ITH_ASSERT(cp_size >= 1 && world->size % cp_size == 0);
    ith_status status = ITH_OK;
    ith_mesh_imagine(mesh, world->size, cp_size);
    mesh->world = world;
    mesh->cp_rank = world->rank % cp_size;
    mesh->dp_rank = world->rank / cp_size;
    ITH_TRY(ith_alloc_zero((void **)&mesh->lists, 4 * cp_size, sizeof *mesh->lists, "mesh", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&mesh->pieces, 2 * ITH_MAX_PIECES * cp_size,
                               sizeof *mesh->pieces, "mesh", err));
    ITH_TRY_OUT(ith_comm_split(world, mesh->dp_rank, &mesh->cp, err));
    ith_mesh_close_device(mesh); /* the host's groups serve, until there are others */
    ITH_ASSERT(mesh->cp->rank == mesh->cp_rank && mesh->cp->size == mesh->cp_size);
    return ITH_OK;
out:
    ith_mesh_close(mesh);
    return status;
}

/* A group of the device for each of the host's: on the main queue and, beside (or, heads, where it
 * takes rows), on the other one. NULL: there is no such group. */
static ith_status open_groups(ith_comm *host, ith_device *device, bool beside, bool heads,
                              ith_comm *out[2], ith_error *err)
{
    ith_comm *own = NULL;
    if (!host)
        return ITH_OK;
    ITH_TRY(ith_comm_open_device(&own, host, device, false, err));
    out[0] = own;
    if (beside || (heads && own->takes_rows))
        ITH_TRY(ith_comm_open_device(&own, host, device, true, err));
    out[1] = own;
    return ITH_OK;
}

static void close_group(ith_comm *host, ith_comm **out)
{
    if (*out != host)
        ith_comm_close(*out);
    *out = host;
}

static void close_groups(ith_comm *host, ith_comm *out[2])
{
    if (out[1] == out[0])
        out[1] = host;
    close_group(host, &out[1]);
    close_group(host, &out[0]);
}

/* A group costs memory of the device: cp has one only where it is not the world. */
ith_status ith_mesh_open_device(ith_mesh *mesh, ith_device *device, bool beside, ith_error *err)
{
    ith_status status = ITH_OK;
    ITH_ASSERT(mesh->device_world[0] == mesh->world);
    beside |= ith_ring_size(mesh) > 1;
    bool heads = mesh->ulysses_size > 1, is_world = mesh->cp_size == mesh->world_size;
    ITH_TRY_OUT(
        open_groups(mesh->world, device, beside, heads && is_world, mesh->device_world, err));
    if (is_world)
        memcpy(mesh->device_cp, mesh->device_world, sizeof mesh->device_cp);
    else if (mesh->cp_size > 1)
        ITH_TRY_OUT(
            open_groups(mesh->cp, device, ith_ring_size(mesh) > 1, heads, mesh->device_cp, err));
    if (mesh->ep)
        ITH_TRY_OUT(ith_comm_open_device(&mesh->device_ep, mesh->ep, device, false, err));
    ITH_TRY_OUT(open_groups(mesh->edp, device, beside, false, mesh->device_edp, err));
    ITH_TRY_OUT(open_groups(mesh->shard, device, beside, false, mesh->device_shard, err));
    if (mesh->replicas)
        ITH_TRY_OUT(
            ith_comm_open_device(&mesh->device_replicas, mesh->replicas, device, false, err));
    return ITH_OK;
out:
    ith_mesh_close_device(mesh);
    return status;
}

void ith_mesh_close_device(ith_mesh *mesh)
{
    if (mesh->device_cp[0] == mesh->device_world[0])
        mesh->device_cp[0] = mesh->device_cp[1] = mesh->cp;
    close_groups(mesh->cp, mesh->device_cp);
    close_group(mesh->ep, &mesh->device_ep);
    close_group(mesh->replicas, &mesh->device_replicas);
    close_groups(mesh->shard, mesh->device_shard);
    close_groups(mesh->edp, mesh->device_edp);
    close_groups(mesh->world, mesh->device_world);
}

/* Groups of one queue share the memory: its exchanges and sums follow each other. */
ith_status ith_mesh_place(const ith_mesh *mesh, ith_ctx *ctx, bool beside)
{
    void *memory = NULL;
    if (ith_world_size(mesh) == 1 || ctx->device == ith_device_cpu())
        return ITH_OK;
    for (int q = 0; q < (beside ? 2 : 1); q++) {
        ITH_TRY(ith_plan_push(ctx->plan, ITH_MEM_COMM, "parts of reductions", DEVICE_SCRATCH_BYTES,
                              &memory, ctx->err));
        ith_comm *groups[] = {mesh->device_world[q], q == 0 ? mesh->device_cp[0] : NULL,
                              mesh->device_edp[q], mesh->device_shard[q],
                              q == 0 ? mesh->device_replicas : NULL};
        for (size_t i = 0; i < sizeof groups / sizeof *groups && !ith_ctx_counting(ctx); i++)
            if (groups[i] && groups[i]->driver->add_parts)
                ith_comm_set_scratch(groups[i], memory, DEVICE_SCRATCH_BYTES);
    }
    return ITH_OK;
}

bool ith_mesh_takes_rows(const ith_mesh *mesh, const ith_ctx *ctx)
{
    const ith_device_links *links = ctx->device->links;
    return mesh->device_cp[0] ? mesh->device_cp[0]->takes_rows
                              : links && links->ways[0]->exchange_rows;
}

/* The device when exchanges have a queue of their own, which runs. */
static ith_device *forks(const ith_mesh *mesh, const ith_ctx *ctx)
{
    bool beside = mesh && (mesh->device_world[1] != mesh->device_world[0] ||
                           mesh->device_cp[1] != mesh->device_cp[0]);
    return beside && !ith_ctx_counting(ctx) && ctx->device->fork ? ctx->device : NULL;
}

ith_status ith_mesh_fork(const ith_mesh *mesh, ith_ctx *ctx)
{
    ith_device *d = forks(mesh, ctx);
    return d ? d->fork(d, ITH_QUEUE_LINKS, ctx->err) : ITH_OK;
}

ith_status ith_mesh_note(const ith_mesh *mesh, ith_ctx *ctx, int mark)
{
    ith_device *d = forks(mesh, ctx);
    return d ? d->note(d, ITH_QUEUE_LINKS, mark, ctx->err) : ITH_OK;
}

ith_status ith_mesh_await(const ith_mesh *mesh, ith_ctx *ctx, int mark)
{
    ith_device *d = forks(mesh, ctx);
    return d ? d->await(d, ITH_QUEUE_LINKS, mark, ctx->err) : ITH_OK;
}

void ith_mesh_imagine(ith_mesh *mesh, int64_t world_size, int64_t cp_size)
{
    memset(mesh, 0, sizeof *mesh);
    mesh->world_size = world_size;
    mesh->cp_size = mesh->ulysses_size = cp_size;
    mesh->ep_size = 1;
    mesh->shard_size = world_size;
    mesh->dp_size = world_size / cp_size;
}

ith_status ith_mesh_set_experts(ith_mesh *mesh, int64_t ep_size, ith_error *err)
{
    ITH_ASSERT(ep_size >= 1 && mesh->world_size % ep_size == 0 && mesh->ep_size == 1);
    mesh->ep_size = ep_size;
    if (!mesh->world || ep_size == 1)
        return ITH_OK;
    ITH_TRY(
        ith_alloc_zero((void **)&mesh->ep_lists, 4 * ep_size, sizeof *mesh->ep_lists, "mesh", err));
    ITH_TRY(ith_comm_split(mesh->world, mesh->world->rank / ep_size, &mesh->ep, err));
    mesh->device_ep = mesh->ep;
    ITH_TRY(ith_comm_split(mesh->world, mesh->world->rank % ep_size, &mesh->edp, err));
    mesh->device_edp[0] = mesh->device_edp[1] = mesh->edp;
    return ITH_OK;
}

ith_status ith_mesh_set_shard(ith_mesh *mesh, int64_t shard_size, ith_error *err)
{
    ITH_ASSERT(shard_size >= 1 && mesh->world_size % shard_size == 0 && !mesh->shard);
    mesh->shard_size = shard_size;
    if (!mesh->world || shard_size == mesh->world_size)
        return ITH_OK;
    ITH_TRY(ith_comm_split(mesh->world, mesh->world->rank / shard_size, &mesh->shard, err));
    mesh->device_shard[0] = mesh->device_shard[1] = mesh->shard;
    ITH_TRY(ith_comm_split(mesh->world, mesh->world->rank % shard_size, &mesh->replicas, err));
    mesh->device_replicas = mesh->replicas;
    return ITH_OK;
}

void ith_mesh_set_ulysses(ith_mesh *mesh, int64_t ulysses_size, bool in_order)
{
    ITH_ASSERT(ulysses_size >= 1 && mesh->cp_size % ulysses_size == 0);
    mesh->ulysses_size = ulysses_size;
    mesh->in_order = in_order;
}

ith_mesh ith_mesh_alone(const ith_mesh *mesh)
{
    ith_mesh m = *mesh;
    m.dp_rank = mesh->dp_rank * mesh->cp_size + mesh->cp_rank;
    m.dp_size = mesh->world_size;
    m.cp_rank = 0;
    m.cp_size = m.ulysses_size = 1;
    m.cp = m.device_cp[0] = m.device_cp[1] = NULL;
    return m;
}

void ith_ring_stretches(const ith_mesh *mesh, int64_t n, int64_t r, ith_stretch out[2])
{
    int64_t size = ith_ring_size(mesh), at = 0;
    int64_t first = mesh ? ith_cp_first(mesh, n, r * mesh->ulysses_size) : 0;
    out[0] = (ith_stretch){first, ith_ring_rows(mesh, n, r)};
    out[1] = (ith_stretch){first + out[0].count, 0};
    if (size == 1 || mesh->in_order)
        return;
    for (int64_t i = 0; i < 2 * size; i++) {
        int64_t owner = i < size ? i : 2 * size - 1 - i, rows = ith_ring_rows(mesh, n, owner);
        int64_t count = i < size ? rows - rows / 2 : rows / 2;
        if (owner == r)
            out[i >= size] = (ith_stretch){at, count};
        at += count;
    }
}

void ith_cp_stretches(const ith_mesh *mesh, int64_t n, ith_stretch out[2])
{
    int64_t u = mesh ? mesh->ulysses_size : 1, at = 0;
    int64_t first = mesh ? ith_cp_first(mesh, n, ith_ring_rank(mesh) * u) : 0;
    int64_t begin = ith_cp_begin(mesh, n) - first, end = ith_cp_end(mesh, n) - first;
    ith_ring_stretches(mesh, n, ith_ring_rank(mesh), out);
    for (int i = 0; i < 2; i++) { /* the part of [begin, end) of the ring slice that it holds */
        int64_t low = ith_max_i64(begin - at, 0), high = ith_min_i64(end - at, out[i].count);
        at += out[i].count;
        out[i] = (ith_stretch){out[i].first + low, ith_max_i64(high - low, 0)};
    }
}

ith_status ith_mesh_agree(const ith_mesh *mesh, ith_status status, ith_error *err)
{
    return mesh && mesh->world ? ith_comm_agree(mesh->world, status, err) : status;
}

ith_status ith_mesh_max(const ith_mesh *mesh, int64_t *x, ith_error *err)
{
    if (!mesh || !mesh->world)
        return ITH_OK;
    return ith_comm_all_reduce(mesh->world, x, 1, ITH_I64, ITH_REDUCE_MAX, err);
}

void ith_mesh_close(ith_mesh *mesh)
{
    ith_mesh_close_device(mesh);
    ith_comm_close(mesh->cp);
    ith_comm_close(mesh->ep);
    ith_comm_close(mesh->edp);
    ith_comm_close(mesh->shard);
    ith_comm_close(mesh->replicas);
    ith_free(mesh->lists);
    ith_free(mesh->ep_lists);
    ith_free(mesh->pieces);
    memset(mesh, 0, sizeof *mesh);
}

static ith_status sum(ith_comm *comm, ith_ctx *ctx, ith_tensor t)
{
    ITH_ASSERT(ith_is_contiguous(t) && (t.dtype == ITH_F32 || t.dtype == ITH_F64));
    if (ith_ctx_counting(ctx) || comm->size == 1) /* an imagined mesh only counts */
        return ITH_OK;
    return ith_comm_all_reduce(comm, t.data, ith_numel(t), t.dtype, ITH_REDUCE_SUM, ctx->err);
}

ith_status ith_mesh_sum_cp(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor t)
{
    return ith_cp_size(mesh) > 1 ? sum(mesh->device_cp[0], ctx, t) : ITH_OK;
}

ith_status ith_mesh_sum_world(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor t)
{
    return mesh ? sum(mesh->device_world[0], ctx, t) : ITH_OK;
}
