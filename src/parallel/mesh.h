/* mesh.h - how the ranks of a job divide the work.
 *
 * world = dp x cp, cp innermost: rank = dp_rank * cp_size + cp_rank, so the ranks that exchange
 * most are neighbours. The ranks of a cp group hold slices of the same tokens; the groups hold
 * different micro-batches. A NULL mesh, everywhere, is one rank: every verb then does nothing. */
#ifndef ITH_PARALLEL_MESH_H
#define ITH_PARALLEL_MESH_H

#include "base/checked.h"
#include "comm/comm.h"
#include "kernels/ctx.h"

typedef struct {
    ith_comm *world, *dp, *cp; /* world is borrowed; all NULL in an imagined mesh */
    int64_t world_size, dp_size, cp_size, dp_rank, cp_rank;
    int64_t *lists; /* [4 * cp_size] of the exchanges of ulysses.c */
} ith_mesh;

/* Collective over world. cp_size divides the number of ranks (checked with the config). */
ith_status ith_mesh_open(ith_mesh *mesh, ith_comm *world, int64_t cp_size, ith_error *err);
void ith_mesh_close(ith_mesh *mesh); /* also of a zeroed one */
/* Rank 0 of a job that is not there: sizes only, for plans. */
void ith_mesh_imagine(ith_mesh *mesh, int64_t world_size, int64_t cp_size);
/* The largest of all ranks; in an imagined mesh, or without one, x itself. */
ith_status ith_mesh_max(const ith_mesh *mesh, int64_t *x, ith_error *err);

static inline int64_t ith_cp_size(const ith_mesh *mesh)
{
    return mesh ? mesh->cp_size : 1;
}

static inline int64_t ith_world_size(const ith_mesh *mesh)
{
    return mesh ? mesh->world_size : 1;
}

/* First token of rank r's slice of n tokens: slices are contiguous, differ by at most one token,
 * and need no padding. */
static inline int64_t ith_cp_first(const ith_mesh *mesh, int64_t n, int64_t r)
{
    return mesh ? n / mesh->cp_size * r + ith_min_i64(r, n % mesh->cp_size) : (r ? n : 0);
}

static inline int64_t ith_cp_begin(const ith_mesh *mesh, int64_t n)
{
    return mesh ? ith_cp_first(mesh, n, mesh->cp_rank) : 0;
}

static inline int64_t ith_cp_end(const ith_mesh *mesh, int64_t n)
{
    return mesh ? ith_cp_first(mesh, n, mesh->cp_rank + 1) : n;
}

/* t (F32 or F64) becomes the sum over the ranks of the cp group, or of all ranks. While the plan
 * counts: nothing. */
ith_status ith_mesh_sum_cp(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor t);
ith_status ith_mesh_sum_world(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor t);

#endif
