/* shard.h - flat buffers cut among the ranks: ZeRO (Rajbhandari et al. 2020).
 *
 * The flat layout of a model is a row of blocks: embeddings, one per layer, the rest. Every block
 * is cut into one slice per rank, so that a block is gathered or reduced by all ranks at once; the
 * shard of a rank is its slices, one after the other. A tensor is whole or a shard, told apart by
 * its size; it may end before the last block (whose elements then have another type). Sums are in
 * rank order, in double: the slices of a reduce-scatter have the bits of an all-reduce. All calls
 * but the views are collective over the world; while the plan counts, nothing is sent. */
#ifndef ITH_PARALLEL_SHARD_H
#define ITH_PARALLEL_SHARD_H

#include "parallel/mesh.h"

/* Expert parallelism: a block of experts is first cut by expert among the ep ranks, then each chunk
 * among the ranks that share it; what a rank gathers and reduces, its window, is one chunk. Of
 * other blocks the window is the block. */
typedef struct {
    const ith_mesh *mesh;
    int64_t num_blocks;
    int64_t *chunk;       /* [num_blocks] elements of an ep rank's experts; 0: not by expert */
    int64_t *block_first; /* [num_blocks + 1] elements of the flat layout */
    int64_t *shard_first; /* [num_blocks + 1] where a block's slice begins in the shard */
    int64_t *cuts;        /* [world + 1] of the running call */
} ith_shard;

/* block_first and chunk are copied; borders are multiples of 128 elements, and so are cuts of what
 * is not cut by expert. chunk may be NULL: no experts. */
ith_status ith_shard_init(ith_shard *shard, const ith_mesh *mesh, const int64_t *block_first,
                          const int64_t *chunk, int64_t num_blocks, ith_error *err);
void ith_shard_deinit(ith_shard *shard);
/* Elements of this rank's shard. */
int64_t ith_shard_elements(const ith_shard *shard);

/* This rank's slice of a block, in a whole tensor or in a shard; absent of an absent tensor. */
ith_tensor ith_shard_slice(const ith_shard *shard, int64_t block, ith_tensor t);
/* The slice is that of a lower rank too (mesh->shard_size): sums over the world leave it out. */
bool ith_shard_is_copy(const ith_shard *shard, int64_t block);
/* First element of it in the flat layout. */
int64_t ith_shard_slice_first(const ith_shard *shard, int64_t block);

/* First element of the window in the flat layout, and its size. */
int64_t ith_shard_window_first(const ith_shard *shard, int64_t block);
int64_t ith_shard_window_elements(const ith_shard *shard, int64_t block);

/* t holds exactly the window (a view, or a buffer of its own): the own slice becomes the sum over
 * all ranks that share it (f32); or `into`, the slice of a shard, grows by it (absent: no). beside:
 * on the mesh's other queue. */
ith_status ith_shard_reduce(ith_shard *shard, ith_ctx *ctx, int64_t block, ith_tensor t,
                            ith_tensor into, bool beside);
/* t, which holds exactly the window, is filled from the slices of all ranks that share it; own:
 * this rank's (absent: it is in t). */
ith_status ith_shard_gather(ith_shard *shard, ith_ctx *ctx, int64_t block, ith_tensor t,
                            ith_tensor own, bool beside);
/* The part of [first, first + n) that is in this rank's shard: *from elements behind first, *at in
 * the shard; returns how many, 0 for none. The range is within one block. */
int64_t ith_shard_overlap(const ith_shard *shard, int64_t first, int64_t n, int64_t *from,
                          int64_t *at);

/* Of a range within one block: no lower rank has this rank's part of it, too. */
bool ith_shard_writes(const ith_shard *shard, int64_t first, int64_t n);

/* Of a range within one block: the ranks that have the same part of it; NULL: this one alone. */
ith_comm *ith_shard_replicas(const ith_shard *shard, int64_t first, int64_t n);

#endif
