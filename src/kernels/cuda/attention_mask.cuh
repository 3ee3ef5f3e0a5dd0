/* attention_mask.cuh - which rows of the packed batch meet in attention: ith_keys_seen (ctx.h) on
 * the device, and its inverse. Nothing is stored: every row finds its own stretches. */
#ifndef ITH_KERNELS_CUDA_ATTENTION_MASK_CUH
#define ITH_KERNELS_CUDA_ATTENTION_MASK_CUH

#include "kernels/cuda/common.cuh"

/* Rows that a tensor has, and which of the batch the first of them is. */
struct attn_rows {
    int64_t first, count;
};

struct attn_mask {
    const int32_t *cu, *noisy, *position; /* noisy, position: NULL without noisy rows */
    int64_t num_docs;
    attn_rows q, k;
    int32_t block; /* >= 1 */
    bool causal;
};

static inline attn_mask mask_of(ith_seqs seqs, int64_t queries, int64_t keys, bool causal)
{
    attn_mask m = {};
    m.cu = (const int32_t *)seqs.cu_seqlens.data;
    m.noisy = (const int32_t *)seqs.noisy.data;
    m.position = (const int32_t *)seqs.position.data;
    m.num_docs = seqs.num_docs;
    m.q = {seqs.window ? seqs.q_first : 0, queries};
    m.k = {seqs.window ? seqs.k_first : 0, keys};
    m.block = (int32_t)ith_max_i64(seqs.block, 1);
    m.causal = causal;
    return m;
}

/* Rows of a tensor, [lo, hi) each: 0 in the document's noisy part, 1 in its clean part. */
struct stretches {
    int32_t lo[2], hi[2];
};

/* Last i with at[i] <= x, of n >= 1 ascending values with at[0] <= x. */
__device__ __forceinline__ int64_t last_not_above(const int32_t *at, int64_t n, int64_t x)
{
    int64_t lo = 0, hi = n;
    while (hi - lo > 1) {
        int64_t mid = (lo + hi) / 2;
        if (at[mid] <= x)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Keys of the batch that row t of it sees, or (of_key) rows that see key t. */
__device__ __forceinline__ stretches stretches_in_batch(const attn_mask &m, int64_t t, bool of_key)
{
    stretches r = {{0, 0}, {0, 0}};
    int64_t doc = last_not_above(m.cu, m.num_docs, t); /* empty documents lie before it */
    int32_t begin = m.cu[doc], len = m.cu[doc + 1] - begin, noisy = m.noisy ? m.noisy[doc] : 0;
    int32_t i = (int32_t)t - begin, b = m.block;
    r.lo[1] = noisy;
    r.hi[1] = len;
    if (i < noisy) { /* its own noisy block, both ways */
        r.lo[0] = i / b * b;
        r.hi[0] = min(r.lo[0] + b, noisy);
        r.hi[1] = of_key ? noisy : min(noisy + m.position[t] / b * b, len);
    } else if (of_key && m.causal) {
        r.lo[1] = noisy + (i - noisy) / b * b;
        if (noisy > 0) { /* noisy rows of later blocks: positions ascend */
            const int32_t *position = m.position + begin;
            int32_t next = (i - noisy) / b * b + b;
            r.lo[0] =
                position[0] >= next ? 0 : (int32_t)last_not_above(position, noisy, next - 1) + 1;
            r.hi[0] = noisy;
        }
    } else if (m.causal) {
        r.hi[1] = min(noisy + ((i - noisy) / b + 1) * b, len);
    }
    for (int part = 0; part < 2; part++) {
        r.lo[part] += begin;
        r.hi[part] += begin;
    }
    return r;
}

/* Keys that query t sees, or (of_key) queries that see key t, as rows of their tensors; empty past
 * the end. */
__device__ __forceinline__ stretches stretches_of(const attn_mask &m, int64_t t, bool of_key)
{
    const attn_rows own = of_key ? m.k : m.q, other = of_key ? m.q : m.k;
    stretches r = {{0, 0}, {0, 0}};
    if (t >= own.count)
        return r;
    r = stretches_in_batch(m, own.first + t, of_key);
    for (int part = 0; part < 2; part++) {
        r.lo[part] = max(r.lo[part] - (int32_t)other.first, 0);
        r.hi[part] = max(min(r.hi[part] - (int32_t)other.first, (int32_t)other.count), r.lo[part]);
    }
    return r;
}

#endif
