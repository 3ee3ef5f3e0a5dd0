/* delta_cuda.cuh - the gated delta rule in chunks: the formulas, and what its kernels share.
 *
 * A chunk is up to 64 tokens of one document. With G the running sum of g in the chunk, E[i,j] =
 * e^(G_i - G_j) for j <= i, k and q unit vectors (q times scale), S the state that the chunk meets:
 *     M = k_i k_j, j < i     Z = E o ((I + M beta)^-1 M)     P = (q_i k_j) E_ij, j <= i
 *     X = V - e^G (K S)      Y = X - Z (beta X)              D = beta Y
 *     O = e^G (Q S) + P D    S <- e^Gn S + (e^(Gn-G) K)^T D
 * Z[i,j] = E_ij k_i^T prod_{j<l<i} (I - beta_l k_l k_l^T) k_j is bounded by 1, Y is v minus what
 * the token read. Backward, dS the gradient of the state behind the chunk, then before it:
 *     dD = P^T dO + e^(Gn-G) (K dS)      dR = dD - Z^T (beta dD)      dV = beta dR
 *     dS <- e^Gn dS + Q^T (e^G dO) - K^T (e^G dV)                     dbeta_i = dR_i Y_i
 *     Np = tril(dO D^T) o E    Nk = -stril(dV D^T) o E                (gradients of q k, k k)
 *     dQ = e^G dO S^T + Np K   dK = -e^G dV S^T + e^(Gn-G) D dS^T + Np^T Q + (Nk + Nk^T) K
 *     C = Np o (Q K^T) + Nk o (K K^T), j < i                          (what E carries)
 *     dg_t = e^Gn <S, dS> + sum_u c_u + sum_{u>=t} (r_u - c_u + sum_j C_uj - sum_j C_ju)
 *            r_u = q_u (e^G dO S^T)_u - k_u (e^G dV S^T)_u,   c_u = k_u (e^(Gn-G) D dS^T)_u
 * dS needs no S, so both states run through the chunks in narrow columns, side by side, and all
 * the rest is done for all chunks at once. The sums of dg are in double, for they cancel.
 *
 * Chunks are worked on in stretches of at most STRETCH_CHUNKS, which bounds the scratch; a state
 * that crosses into another stretch is carried in f32. */
#ifndef ITH_KERNELS_CUDA_DELTA_CUDA_CUH
#define ITH_KERNELS_CUDA_DELTA_CUDA_CUH

#include "kernels/cuda/common.cuh"

enum { DELTA_C = 64 }; /* tokens of a chunk */

/* Factors of a chunk's tokens. The last three are with the vectors' norms, for the tensor cores:
 * e^G / |k|, scale e^G / |q|, e^(Gn-G) / |k|. */
enum {
    DELTA_DECAY,
    DELTA_TAIL,
    DELTA_BETA,
    DELTA_READ_K,
    DELTA_READ_Q,
    DELTA_WRITE_K,
    DELTA_GATES
};

typedef struct {
    int32_t row, rows; /* first token, tokens */
} delta_chunk;

/* What both ways of doing it take. Scratch of chunk c lies at c - first. */
typedef struct {
    ith_tensor o, q, k, v, g, beta, state; /* o: forward */
    ith_tensor dq, dk, dv, dg, dbeta, do_; /* backward */
    ith_tensor dstate;
    bool give_state;      /* state receives the last S */
    int64_t heads, group; /* value heads, and how many share a key head */
    int dim_k, dim_v;
    float scale;
    const delta_chunk *chunks; /* of all documents */
    const int32_t *doc_chunks; /* [num_docs + 1] first chunk of a document */
    int64_t first, count;      /* the stretch */
    int64_t doc;               /* its first document: blockIdx.z is counted from it */
    void *z, *p;               /* [count,heads,C,C] */
    float *gates;              /* [count,heads,DELTA_GATES,C] e^G, e^(Gn-G), beta ... */
    double *sums;              /* [count,heads,C] G */
    float *norms;              /* [count,heads/group,2,C] scale / |q|, 1 / |k| */
    void *states, *dstates;    /* [count,heads,Dk,Dv] at entry, gradient behind; NULL: not kept */
    void *y, *dr;              /* [count,heads,C,Dv] */
    const float *carried;      /* [heads,Dk,Dv] of the document that the stretch's begin cuts */
    float *carry;              /* of the one that its end cuts; for dS the ends are swapped */
    bool carry_only;           /* nothing else is wanted of this stretch */
    /* A document's chunks are walked in so many pieces at once: first each from zero and for its
     * map (S behind = map S before + end), then from the entries that follow from these. */
    int64_t pieces;               /* 1: in one go */
    float *entries, *ends, *maps; /* [docs,pieces,heads,Dk,Dv] */
} delta_args;

/* Element 0 of a head's row. */
template <typename T>
__host__ __device__ __forceinline__ T *head_row(const ith_tensor &t, int64_t row, int64_t head)
{
    return (T *)t.data + row * t.stride[0] + head * t.stride[1];
}

/* A head's state of a document in memory [num_docs,Hv,Dk,Dv]; NULL: absent. */
__device__ __forceinline__ float *state_of(const delta_args &a, const ith_tensor &t, int64_t doc,
                                           int64_t head)
{
    return t.ndim ? (float *)t.data + (doc * a.heads + head) * a.dim_k * a.dim_v : NULL;
}

__device__ __forceinline__ float stat_of(const ith_tensor &t, int64_t row, int64_t head)
{
    return ((const float *)t.data)[row * t.stride[0] + head];
}

/* The chunks of a document in the stretch. */
typedef struct {
    int64_t begin, end;
    bool cut_begin, cut_end; /* the document goes on outside */
} delta_span;
__device__ __forceinline__ delta_span span_of(const delta_args &a, int64_t doc)
{
    int64_t begin = a.doc_chunks[doc], end = a.doc_chunks[doc + 1], last = a.first + a.count;
    delta_span s = {begin < a.first ? a.first : begin, end < last ? end : last,
                    begin<a.first, end> last};
    return s;
}

/* One stretch; docs: how many documents it meets. The plain way keeps f32 in scratch. */
cudaError_t delta_plain_prepare(cudaStream_t stream, ith_dtype dtype, const delta_args *a);
cudaError_t delta_plain_scan(cudaStream_t stream, ith_dtype dtype, const delta_args *a,
                             int64_t docs);
cudaError_t delta_plain_scan_back(cudaStream_t stream, ith_dtype dtype, const delta_args *a,
                                  int64_t docs);
cudaError_t delta_plain_grads(cudaStream_t stream, ith_dtype dtype, const delta_args *a);
/* Token by token, for a few new tokens of each of `docs` documents. */
void delta_plain_decode(cudaStream_t stream, ith_dtype dtype, const delta_args *a,
                        const int32_t *cu_seqlens, int64_t docs);
/* The same on tensor cores, bf16 in scratch; every [T,H,D] operand must be one that it takes. */
bool delta_fast_takes(ith_tensor t);
ith_status delta_fast_prepare(ith_ctx *ctx, const delta_args *a);
ith_status delta_fast_scan(ith_ctx *ctx, const delta_args *a, int64_t docs);
ith_status delta_fast_scan_back(ith_ctx *ctx, const delta_args *a, int64_t docs);
ith_status delta_fast_grads(ith_ctx *ctx, const delta_args *a);
enum { DELTA_MOST_K = 192 }; /* dim_k: three tiles of gradients in shared memory */

#endif
