/* delta_scan.h - linear attention over slices of the tokens: states pass between the ranks.
 *
 * The other way round the cp group (ulysses.h gives each rank some heads of all tokens): a rank
 * runs convolution and gated delta rule on its own tokens, all heads. Two things cross a border
 * between slices within a document: the last K-1 inputs of the convolution, and the state. Over a
 * stretch of tokens the state is an affine function of the one before it, per head:
 *     S_out = A S_in + B        A [Dk,Dk] = product over its tokens of alpha (I - beta k k^T)
 * Where a document begins, B is its last state. A rank that lies within one document runs the rule
 * for B and once more, from the identity and with v = 0, for A; then all compose what the ranks
 * before them have sent, and run. Backward is the same from the end: dS_in = A^T dS_out + C, C from
 * a run with dS_out = 0.
 *
 * A rank within one document runs the rule three times forward and twice backward, the others once;
 * to each other rank of its document it sends Hv Dk (Dk + Dv) numbers in f32 each way, however long
 * that is. States are f32; exact up to rounding. */
#ifndef ITH_PARALLEL_DELTA_SCAN_H
#define ITH_PARALLEL_DELTA_SCAN_H

#include "kernels/ops.h"
#include "parallel/mesh.h"

typedef enum { ITH_LINEAR_AUTO, ITH_LINEAR_HEADS, ITH_LINEAR_STATES } ith_linear_cp;

/* Sizes of linear layers and of the largest micro-batch of a group. */
typedef struct {
    int64_t tokens, max_doc_tokens;
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t element_bytes;
} ith_linear_shape;

/* Passing states costs less time than exchanging heads, or is the only way (more ranks than value
 * heads). Bytes that a rank sends for a layer, forward and backward, with layers made again:
 *     heads   (P-1)/P^2 n e (5 Hv Dv + 6 Hv + 6 Hk Dk rep)
 *     states  (P-1) Hv Dk (Dk + Dv) 4
 * and FLOP that only states need, where a document is longer than a slice of T = n/P: one run of
 * the rule (A besides, with P > 2) and one of its backward: T Hv Dk (24.5 Dv + 7 Dk [P > 2]).
 * flop_per_byte: what a rank computes while it sends a byte. */
bool ith_delta_scan_pays(int64_t cp_size, const ith_linear_shape *shape, double flop_per_byte);

/* A slice of T tokens and the documents in it. */
typedef struct {
    int64_t first; /* tokens of the document that began before the slice; 0: none */
    int64_t last;  /* tokens of the document that goes on behind it; 0: none */
    bool through;  /* they are the same one, and all of the slice */
    int64_t halo;  /* rows before the slice that the first document has, at most K-1 */
    /* documents of halo + T rows; of the first tokens; between; of the last tokens */
    ith_seqs conv, head, whole, tail;
} ith_slice_docs;

/* Elements of the lists of such a slice. */
static inline int64_t ith_slice_list_size(int64_t num_docs)
{
    return 2 * (num_docs + 1) + 4;
}

/* This rank's slice of the documents cu [num_docs + 1] of its group; taps K. Fills `host`; `device`
 * [ith_slice_list_size(num_docs)] I32 gets the same from the caller. */
void ith_slice_docs_find(const ith_mesh *mesh, int64_t taps, const int32_t *cu, int64_t num_docs,
                         int32_t *host, ith_tensor device, ith_slice_docs *out);
/* One that needs the most memory, for counting. */
void ith_slice_docs_largest(int64_t taps, int64_t tokens, int64_t num_docs, int64_t max_doc_tokens,
                            ith_tensor device, ith_slice_docs *out);

/* x: [halo + T, C], the rows of the ranks before come into its first rows. seqs: of the group.
 * backward: the first rows of dx are added to their owners'. */
ith_status ith_slice_halo(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                          int64_t taps, ith_seqs seqs, ith_tensor x);
ith_status ith_slice_halo_backward(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                                   int64_t taps, ith_seqs seqs, ith_tensor dx);

/* Operands of the delta rule (ops.h), T rows. */
typedef struct {
    ith_tensor q, k, v, g, beta;
    float scale;
} ith_delta_in;

typedef struct {
    ith_tensor dq, dk, dv, dg, dbeta;
} ith_delta_gradient;

/* o as one rank would have it. state [1,Hv,Dk,Dv] f32: the first document's state before the slice,
 * map [1,Hv,Dk,Dk] f32: A of a slice within one document; both are written, or, when known, read:
 * nothing is exchanged then. */
ith_status ith_delta_scan_forward(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                                  ith_seqs seqs, ith_tensor o, ith_tensor state, ith_tensor map,
                                  const ith_delta_in *in, bool known);
ith_status ith_delta_scan_backward(const ith_mesh *mesh, ith_ctx *ctx, const ith_slice_docs *docs,
                                   ith_seqs seqs, const ith_delta_gradient *d, ith_tensor do_,
                                   const ith_delta_in *in, ith_tensor state, ith_tensor map);

#endif
