/* ulysses.h - sequence <-> heads: the exchange around attention (Jacobs et al. 2023).
 *
 * Outside attention a rank holds all heads of its slice of the tokens [S,H,Dh]; inside, its share
 * of the heads for all n tokens [n,Hme,Dh]. Slices are contiguous, so what arrives from rank 0, 1,
 * ... is in token order, and one cu_seqlens of all n tokens serves every rank. q, k and v travel in
 * one exchange, o in one; the gradients mirror them. Inside a ring (parallel/ring.h) all this holds
 * for the U neighbours of mesh->ulysses_size and the tokens of their ring slice, in its order.
 *
 * Heads. Up to num_key_value_heads ranks: rank r has kv heads [r*Hkv/P, (r+1)*Hkv/P) with their
 * query heads; counts may differ by one group. More ranks: several ranks share a kv head, which is
 * sent to each, and split its query heads; its gradient is the sum over them. Every rank has at
 * least one query head, so P <= num_attention_heads.
 *
 * Where devices take rows as they lie (direct), exchanges have a queue of their own: what a verb
 * gave may be read, and what it took overwritten or released, behind ith_ulysses_await. Elsewhere
 * the exchange is done when the verb returns, and await does nothing.
 *
 * Bytes that a rank sends, n divisible by P and even heads: (P-1)/P^2 * n * (2 dq + 2 dkv rep) * e
 * forward for qkv and o. With cp_size 1 nothing is copied: outputs are the inputs. Staging is
 * ITH_MEM_COMM, results are ITH_MEM_WORKSPACE; while the plan counts, nothing is sent. */
#ifndef ITH_PARALLEL_ULYSSES_H
#define ITH_PARALLEL_ULYSSES_H

#include "kernels/ops.h"
#include "parallel/mesh.h"

typedef struct {
    int64_t q_first, q_count, kv_first, kv_count;
} ith_head_share;

/* Views [rows, heads, Dh]; rows may be strided. */
typedef struct {
    ith_tensor q, k, v;
} ith_qkv;

#define ITH_HEAD_PARTS 5
/* What travels together: views [rows, heads, dim] of one type, rows may be strided. A part has the
 * query heads, or (kv) the key/value heads. Linear attention: value heads are the query heads, key
 * heads the kv heads, and per-head numbers are parts of dim 1. */
typedef struct {
    int count;
    int64_t q_heads, kv_heads; /* of all ranks */
    ith_tensor t[ITH_HEAD_PARTS];
    bool kv[ITH_HEAD_PARTS];
} ith_head_parts;

ith_head_share ith_ulysses_share(int64_t q_heads, int64_t kv_heads, int64_t cp_size, int64_t rank);
/* This rank's. */
ith_head_share ith_ulysses_own_share(const ith_mesh *mesh, int64_t q_heads, int64_t kv_heads);

bool ith_ulysses_is_direct(const ith_mesh *mesh, const ith_ctx *ctx, int64_t kv_heads);

/* n: tokens of the cp group. Room for what `in` is at the heads, `in` itself with one rank. The
 * columns of *out lie in the order of the parts. */
ith_status ith_ulysses_push_heads(const ith_mesh *mesh, ith_ctx *ctx, ith_mem_class where,
                                  const char *name, int64_t n, ith_qkv in, ith_qkv *out);
/* out: pushed by push_heads. */
ith_status ith_ulysses_to_heads(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_qkv in,
                                ith_qkv out);
/* Adjoint of to_heads: din from dout, which push_heads made for it. */
ith_status ith_ulysses_to_heads_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, ith_qkv din,
                                         ith_qkv dout);
/* The three verbs above for any parts. */
ith_status ith_ulysses_push_parts(const ith_mesh *mesh, ith_ctx *ctx, ith_mem_class where,
                                  const char *name, int64_t n, const ith_head_parts *in,
                                  ith_head_parts *out);
ith_status ith_ulysses_parts_to_heads(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                      const ith_head_parts *in, const ith_head_parts *out);
ith_status ith_ulysses_parts_to_heads_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                               const ith_head_parts *din,
                                               const ith_head_parts *dout);
/* o [n,Hme,Dh] of all tokens to out [S,Hq,Dh], pushed unless there is a tensor already. */
ith_status ith_ulysses_to_tokens(const ith_mesh *mesh, ith_ctx *ctx, int64_t n, int64_t q_heads,
                                 int64_t kv_heads, ith_tensor o, ith_tensor *out);
/* The same in two steps (direct): when rows of o of other ranks' tokens are there, and when this
 * rank's are, too. */
ith_status ith_ulysses_others_to_tokens(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                        int64_t kv_heads, ith_tensor o, ith_tensor out);
ith_status ith_ulysses_own_to_tokens(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                     int64_t kv_heads, ith_tensor o, ith_tensor out);
/* Adjoint of to_tokens: dout [S,Hq,Dh] to do [n,Hme,Dh], pushed. */
ith_status ith_ulysses_to_tokens_backward(const ith_mesh *mesh, ith_ctx *ctx, int64_t n,
                                          int64_t kv_heads, ith_tensor dout, ith_tensor *do_);
ith_status ith_ulysses_await(const ith_mesh *mesh, ith_ctx *ctx);

#endif
