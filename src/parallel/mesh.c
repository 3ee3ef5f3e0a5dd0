/* mesh.c - the groups of a job. */
#include "parallel/mesh.h"

#include <string.h>

#include "base/mem.h"

ith_status ith_mesh_open(ith_mesh *mesh, ith_comm *world, int64_t cp_size, ith_error *err)
{
    ITH_ASSERT(cp_size >= 1 && world->size % cp_size == 0);
    ith_status status = ITH_OK;
    ith_mesh_imagine(mesh, world->size, cp_size);
    mesh->world = world;
    mesh->cp_rank = world->rank % cp_size;
    mesh->dp_rank = world->rank / cp_size;
    ITH_TRY(ith_alloc_zero((void **)&mesh->lists, 4 * cp_size, sizeof *mesh->lists, "mesh", err));
    ITH_TRY_OUT(ith_comm_split(world, mesh->dp_rank, &mesh->cp, err));
    ITH_TRY_OUT(ith_comm_split(world, mesh->cp_rank, &mesh->dp, err));
    ITH_ASSERT(mesh->cp->rank == mesh->cp_rank && mesh->cp->size == mesh->cp_size);
    ITH_ASSERT(mesh->dp->rank == mesh->dp_rank && mesh->dp->size == mesh->dp_size);
    return ITH_OK;
out:
    ith_mesh_close(mesh);
    return status;
}

void ith_mesh_imagine(ith_mesh *mesh, int64_t world_size, int64_t cp_size)
{
    memset(mesh, 0, sizeof *mesh);
    mesh->world_size = world_size;
    mesh->cp_size = cp_size;
    mesh->dp_size = world_size / cp_size;
}

ith_status ith_mesh_max(const ith_mesh *mesh, int64_t *x, ith_error *err)
{
    if (!mesh || !mesh->world)
        return ITH_OK;
    return ith_comm_all_reduce(mesh->world, x, 1, ITH_I64, ITH_REDUCE_MAX, err);
}

void ith_mesh_close(ith_mesh *mesh)
{
    ith_comm_close(mesh->cp);
    ith_comm_close(mesh->dp);
    ith_free(mesh->lists);
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
    return mesh ? sum(mesh->cp, ctx, t) : ITH_OK;
}

ith_status ith_mesh_sum_world(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor t)
{
    return mesh ? sum(mesh->world, ctx, t) : ITH_OK;
}
