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
    ith_comm *world, *cp; /* world is borrowed; both NULL in an imagined mesh */
    /* The same ranks, for memory of the device: [0] on its main queue, [1] on the other one, if
     * there are two. On the CPU, world and cp themselves. */
    ith_comm *device_world[2], *device_cp[2];
    int64_t world_size, dp_size, cp_size, dp_rank, cp_rank;
    /* Expert parallelism: groups of ep_size neighbours of the world share the experts of a layer;
     * edp are the ranks with the same experts. 1 and NULL: none. */
    int64_t ep_size;
    ith_comm *ep, *edp;
    ith_comm *device_ep, *device_edp[2];
    int64_t *ep_lists; /* [4 * ep_size] of the exchanges of expert_exchange.c */
    /* What ZeRO cuts is cut among shard_size neighbours of the world, and copied to the others:
     * replicas are the ranks with the same slice. All of the world and NULL: no copies. */
    int64_t shard_size;
    ith_comm *shard, *replicas;
    ith_comm *device_shard[2], *device_replicas;
    int64_t ulysses_size; /* neighbours of cp that exchange heads; cp_size over it is a ring */
    bool in_order;        /* slices are contiguous in a ring, too */
    int64_t *lists;       /* [4 * cp_size] of the exchanges of ulysses.c */
    ith_strided *pieces;  /* [2 * ITH_MAX_PIECES * cp_size] likewise */
} ith_mesh;

/* Collective over world. cp_size divides the number of ranks (checked with the config). */
ith_status ith_mesh_open(ith_mesh *mesh, ith_comm *world, int64_t cp_size, ith_error *err);
/* Collective, after the sizes are set and before the first verb: the ranks work on this device, not
 * on the CPU. beside: layers will be exchanged while others compute. The device must outlive what
 * was opened. */
ith_status ith_mesh_open_device(ith_mesh *mesh, ith_device *device, bool beside, ith_error *err);
void ith_mesh_close_device(ith_mesh *mesh); /* ith_mesh_close does it too */
/* Pushes what exchanges of the device need for reductions; nothing on the CPU. beside: as opened.
 */
ith_status ith_mesh_place(const ith_mesh *mesh, ith_ctx *ctx, bool beside);
void ith_mesh_close(ith_mesh *mesh); /* also of a zeroed one */
/* Collective over world, after open: ep_size divides the number of ranks. Of an imagined mesh,
 * sizes. */
ith_status ith_mesh_set_experts(ith_mesh *mesh, int64_t ep_size, ith_error *err);
/* Collective over world, after open: shard_size divides the number of ranks. */
ith_status ith_mesh_set_shard(ith_mesh *mesh, int64_t shard_size, ith_error *err);
/* Neighbours that exchange heads: divides cp_size; until then all of it. in_order: see above. */
void ith_mesh_set_ulysses(ith_mesh *mesh, int64_t ulysses_size, bool in_order);
/* Rank 0 of a job that is not there: sizes only, for plans. */
void ith_mesh_imagine(ith_mesh *mesh, int64_t world_size, int64_t cp_size);
/* A fixed point: all ranks get the failure of the lowest failing one (ith_comm_agree); in an
 * imagined mesh, or without one, status itself. */
ith_status ith_mesh_agree(const ith_mesh *mesh, ith_status status, ith_error *err);
/* The largest of all ranks; in an imagined mesh, or without one, x itself. */
ith_status ith_mesh_max(const ith_mesh *mesh, int64_t *x, ith_error *err);

/* The same ranks, each with micro-batches of its own: sequences are not shared. A view. */
ith_mesh ith_mesh_alone(const ith_mesh *mesh);

static inline int64_t ith_cp_size(const ith_mesh *mesh)
{
    return mesh ? mesh->cp_size : 1;
}

/* Neighbours that exchange heads. */
static inline int64_t ith_ulysses_size(const ith_mesh *mesh)
{
    return mesh ? mesh->ulysses_size : 1;
}

static inline int64_t ith_ep_size(const ith_mesh *mesh)
{
    return mesh ? mesh->ep_size : 1;
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

/* ---- rings: parallel/ring.h ----
 * Slices of a group are stretches of the tokens in ring order: of 2R stretches that follow each
 * other, ring rank r has r and then 2R-1-r, and its ranks have contiguous parts of these. With R =
 * 1, and in a mesh in_order, ring order is the order of the tokens. */

static inline int64_t ith_ring_size(const ith_mesh *mesh)
{
    return mesh ? mesh->cp_size / mesh->ulysses_size : 1;
}

static inline int64_t ith_ring_rank(const ith_mesh *mesh)
{
    return mesh ? mesh->cp_rank / mesh->ulysses_size : 0;
}

/* Tokens of ring rank r, of n of the group. */
static inline int64_t ith_ring_rows(const ith_mesh *mesh, int64_t n, int64_t r)
{
    return mesh ? ith_cp_first(mesh, n, (r + 1) * mesh->ulysses_size) -
                      ith_cp_first(mesh, n, r * mesh->ulysses_size)
                : n;
}

/* The most that any ring rank may have. */
static inline int64_t ith_ring_most_rows(const ith_mesh *mesh, int64_t n)
{
    return ith_ring_size(mesh) == 1 ? n : ith_div_ceil(n, mesh->cp_size) * mesh->ulysses_size;
}

/* Those of this rank; while the plan counts, the most. */
static inline int64_t ith_ring_own_rows(const ith_mesh *mesh, const ith_ctx *ctx, int64_t n)
{
    return ith_ctx_counting(ctx) ? ith_ring_most_rows(mesh, n)
                                 : ith_ring_rows(mesh, n, ith_ring_rank(mesh));
}

/* Tokens that follow each other. */
typedef struct {
    int64_t first, count;
} ith_stretch;
/* The two stretches of ring rank r; in the order of the tokens the second is empty. */
void ith_ring_stretches(const ith_mesh *mesh, int64_t n, int64_t r, ith_stretch out[2]);
/* Tokens of this rank's slice, in its order; either may be empty. */
void ith_cp_stretches(const ith_mesh *mesh, int64_t n, ith_stretch out[2]);

/* Whether the ranks of a cp group exchange rows as they lie, without packing them. In an imagined
 * mesh: whether they will when the device's first way works. */
bool ith_mesh_takes_rows(const ith_mesh *mesh, const ith_ctx *ctx);

/* The two queues: exchanges of groups [1] follow what was queued before the last fork; await: what
 * is queued from now on follows what was beside at note(mark). Where there is one queue only, and
 * while the plan counts: nothing. */
enum {
    ITH_MARK_WEIGHTS = 0, /* + window: a layer is gathered */
    ITH_MARK_GRADS = 2,   /* + window: its gradients are summed */
    ITH_MARK_KEYS = 4,    /* of a ring */
    ITH_MARK_KEY_GRADS = 5,
    ITH_MARK_HEADS = 6 /* the last exchange of heads */
};
ith_status ith_mesh_fork(const ith_mesh *mesh, ith_ctx *ctx);
ith_status ith_mesh_note(const ith_mesh *mesh, ith_ctx *ctx, int mark);
ith_status ith_mesh_await(const ith_mesh *mesh, ith_ctx *ctx, int mark);

/* t (F32 or F64, of the device) becomes the sum over the ranks of the cp group, or of all ranks.
 * While the plan counts: nothing. */
ith_status ith_mesh_sum_cp(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor t);
ith_status ith_mesh_sum_world(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor t);

#endif
