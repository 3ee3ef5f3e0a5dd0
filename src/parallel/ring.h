/* ring.h - attention over sequences that no rank holds: keys and values go round (Liu et al. 2023),
 * with Ulysses inside (parallel/ulysses.h).
 *
 * A context-parallel group of P ranks is R rings of U neighbours: after the exchange of a ring
 * rank's U neighbours each has its share of the heads for the tokens of its ring slice, and keys
 * and values of the same heads pass through the R ring ranks. U = P is Ulysses alone, U = 1 a ring
 * alone.
 *
 * Causal work is balanced by cutting the tokens into 2R stretches: ring rank r has stretches r and
 * 2R-1-r (mesh.h says which tokens), so every rank sees the same number of keys; with [noisy;
 * clean] documents, too. A mesh in_order has one contiguous stretch a rank instead, for layers that
 * want that; then the last ranks work up to 2 - 1/R times the mean. What a pair of stretches
 * computes is a window of the batch under its mask (ctx.h). Parts are merged by their log-sum-exp in f32; gradients of
 * keys and values travel in f32 and come home. Documents are those of the cu_seqlens of all tokens.
 *
 * Bytes that a rank sends, n tokens, e bytes, dkv = kv heads of its share * head_dim:
 *     forward (R-1)/R * n * 2 dkv * e      backward (R-1)/R * n * 2 dkv * (e + 4) */
#ifndef ITH_PARALLEL_RING_H
#define ITH_PARALLEL_RING_H

#include "parallel/ulysses.h"

/* As ith_attention_forward and ith_attention_backward for the rows of this rank's ring
 * slice [m,H,Dh]; seqs describes all n tokens of the group. With R = 1 they are these operators. */
ith_status ith_ring_attention_forward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_tensor o,
                                      ith_tensor lse, ith_qkv x, ith_seqs seqs, float scale,
                                      bool causal);
ith_status ith_ring_attention_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_qkv dx,
                                       ith_tensor do_, ith_qkv x, ith_tensor o, ith_tensor lse,
                                       ith_seqs seqs, float scale, bool causal);

/* How a group is cut: U. */
typedef enum { ITH_RING_AUTO, ITH_RING_NEVER, ITH_RING_ONLY, ITH_RING_MIXED } ith_ring_wish;
/* Bytes that a rank sends for a token of the group in forward and backward of a layer, e bytes an
 * element. */
double ith_ring_bytes_per_token(int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                                int64_t cp_size, int64_t ulysses_size, int64_t e);
/* The U that sends least among those the wish allows (MIXED: neither 1 nor P), whose heads are even
 * to 15 %; 0: none. in_order: work outweighs bytes, so the U whose busiest rank works least. */
int64_t ith_ring_choose(int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t cp_size,
                        int64_t e, ith_ring_wish wish, bool in_order);

#endif
