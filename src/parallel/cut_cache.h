/* cut_cache.h - what generation keeps of a sequence, cut among the ranks of a cp group.
 *
 * A prompt goes through the model in slices (ulysses.h, ring.h), and the keys and values of a slice
 * stay where they were made. From then on every rank walks all new tokens, whole; only attention
 * meets the cache part by part: each rank attends to its rows, all tell each other what they got,
 * and all merge the parts in rank order, so that they go on with the same bits. Of linear layers,
 * whose state is small, each rank has all.
 *
 * Bytes that a rank sends for a layer and a new token: (P-1) Hq (Dh + 1) 4. */
#ifndef ITH_PARALLEL_CUT_CACHE_H
#define ITH_PARALLEL_CUT_CACHE_H

#include "kernels/ops.h"
#include "parallel/mesh.h"

/* Attention of new rows over such a cache: open, ith_attention_decode into o and lse, close. Of one
 * rank o is the result itself, and lse is absent. */
typedef struct {
    ith_tensor o, lse; /* this rank's part, f32 */
    ith_tensor all;    /* [P, rows * Hq * (Dh + 1)] f32: o and lse of every rank */
    int64_t mark;
} ith_cache_parts;

/* o: [rows,Hq,Dh] act, where the result goes. Parts are ITH_MEM_COMM. */
ith_status ith_cache_parts_open(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor o,
                                ith_cache_parts *p);
/* Collective over the group. */
ith_status ith_cache_parts_close(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor o,
                                 ith_cache_parts *p);

/* whole [1,Hv,Dk,Dv] from each rank's value heads, own [1,Hme,Dk,Dv] as ith_ulysses_share deals
 * them; f32. Collective; while the plan counts, nothing. */
ith_status ith_cut_cache_gather_states(const ith_mesh *mesh, ith_ctx *ctx, ith_tensor whole,
                                       ith_tensor own, int64_t key_heads);
/* tail [1,m,W] act = the last m of n rows, zeros before the first one; x [T,W] act: this rank's
 * slice of them, of contiguous ones. Collective. */
ith_status ith_cut_cache_gather_tail(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_tensor tail,
                                     ith_tensor x);

#endif
