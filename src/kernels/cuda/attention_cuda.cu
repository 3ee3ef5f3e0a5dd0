/* attention_cuda.cu - attention over packed documents: which way it is computed, and the memory.
 *
 * bf16 goes to our specialised warps or, in forward where cuDNN is faster, there: documents of one
 * length as a batch, others packed, with offsets made on the device from cu_seqlens. What neither
 * takes (f32, odd strides) goes to the plain kernels.
 *
 * Invariants:
 *  1. lse is [T,Hq] on every way, so forward and backward may take different ones.
 *  2. Workspace is an upper bound over all ways, for the plan is made before documents are known;
 *     more documents than PLANNED_DOCS and than the plan's batch had are an error of the plan. */
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/sdpa_graph.h"

enum { PLANNED_DOCS = 1024, LIBRARY_SLACK_BYTES = 16 << 20 };

ith_status ith_cuda_attention_decode(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                     ith_tensor k_cache, ith_tensor v_cache, ith_tensor lengths,
                                     float scale);
int64_t ith_cuda_attention_decode_workspace(ith_ctx *ctx, ith_tensor o, ith_tensor lse,
                                            ith_tensor q, ith_tensor k_cache, ith_tensor v_cache,
                                            ith_tensor lengths, float scale);

typedef enum { WAY_PLAIN, WAY_STREAM, WAY_BATCH, WAY_PACKED } way;

/* Sizes in steps of a quarter of a power of two: few plans for many shapes, at most 25% more. */
static int64_t bucket(int64_t n)
{
    int64_t step = 1;
    while (step * 8 < n)
        step *= 2;
    return n <= 4 ? ith_max_i64(n, 1) : ith_round_up(n, step);
}

/* cuDNN reads and writes 16 bytes at once. Measured on an H200: faster with wide heads only. */
static bool fits_cudnn(ith_tensor t)
{
    return t.dtype == ITH_BF16 && t.shape[2] % 16 == 0 && t.shape[2] > 128 && t.shape[2] <= 256 &&
           t.stride[2] == 1 && (uintptr_t)t.data % 16 == 0 && t.stride[0] % 8 == 0 &&
           t.stride[1] % 8 == 0;
}

/* Length that all documents share, when batches of them are worth a plan; 0: none. */
static int64_t common_length(ith_seqs seqs)
{
    if (!seqs.cu_host || seqs.num_docs < 1)
        return 0;
    int64_t len = seqs.cu_host[1] - seqs.cu_host[0];
    for (int64_t i = 1; i < seqs.num_docs; i++)
        if (seqs.cu_host[i + 1] - seqs.cu_host[i] != len)
            return 0;
    return len % 128 == 0 || seqs.num_docs == 1 ? len : 0;
}

static bool all_fit(bool (*fits)(ith_tensor), const ith_tensor *t, int count)
{
    for (int i = 0; i < count; i++)
        if (!fits(t[i]))
            return false;
    return true;
}

static bool is_stream(const ith_tensor *t, int count)
{
    return t[0].dtype == ITH_BF16 && all_fit(ith_attention_stream_fits, t, count);
}

static bool is_library(const ith_tensor *t, int count, ith_seqs seqs)
{
    return !seqs.window && !ith_seqs_have_blocks(seqs) && all_fit(fits_cudnn, t, count);
}

static way forward_way(ith_tensor o, ith_tensor q, ith_tensor k, ith_tensor v, ith_seqs seqs)
{
    ith_tensor all[] = {q, k, v, o};
    if (is_library(all, 4, seqs))
        return common_length(seqs) > 0 ? WAY_BATCH : WAY_PACKED;
    return is_stream(all, 4) ? WAY_STREAM : WAY_PLAIN;
}

static ith_sdpa_place place_of(ith_tensor t)
{
    ith_sdpa_place p = {t.stride[0], t.stride[1]};
    return p;
}

static ith_sdpa_key key_of(ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor o, ith_seqs seqs,
                           bool causal, way how)
{
    ith_sdpa_key key = {};
    key.packed = how == WAY_PACKED;
    key.batch = key.packed ? bucket(seqs.num_docs) : seqs.num_docs;
    key.seq = key.packed ? bucket(ith_div_ceil(seqs.max_len, 128)) * 128 : common_length(seqs);
    key.heads_q = q.shape[1];
    key.heads_kv = k.shape[1];
    key.head_dim = q.shape[2];
    key.causal = causal;
    key.q = place_of(q);
    key.k = place_of(k);
    key.v = place_of(v);
    key.o = place_of(o);
    return key;
}

struct strides {
    int64_t v[ITH_SDPA_MAX_RAGGED];
};

/* offsets[i][d] = first row of document d * stride i; documents past the last are empty. */
__global__ void make_offsets(int64_t *__restrict__ offsets, int32_t *__restrict__ lengths,
                             const int32_t *__restrict__ cu, int64_t num_docs, int64_t batch,
                             strides s, int num_strides)
{
    int64_t d = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (d > batch)
        return;
    int64_t at = cu[d < num_docs ? d : num_docs];
    for (int i = 0; i < num_strides; i++)
        offsets[i * (batch + 1) + d] = at * s.v[i];
    if (d < batch)
        lengths[d] = d < num_docs ? cu[d + 1] - (int32_t)at : 0;
}

static int64_t offsets_bytes(int64_t batch)
{
    return ith_round_up(ITH_SDPA_MAX_RAGGED * (batch + 1) * 8, 256) + ith_round_up(batch * 4, 256);
}

static int64_t most_docs(ith_seqs seqs)
{
    return bucket(ith_max_i64(seqs.num_docs, PLANNED_DOCS));
}

static void add_offsets(ith_ctx *ctx, ith_carve *scratch, const ith_sdpa_plan *plan, ith_seqs seqs,
                        void **data)
{
    int64_t batch = plan->key.batch;
    if (!plan->key.packed)
        return;
    int64_t *offsets = (int64_t *)ith_carve_take(scratch, ITH_SDPA_MAX_RAGGED * (batch + 1) * 8);
    int32_t *lengths = (int32_t *)ith_carve_take(scratch, batch * 4);
    strides s;
    for (int i = 0; i < ITH_SDPA_MAX_RAGGED; i++) {
        s.v[i] = plan->ragged_stride[i];
        data[ITH_SDPA_RAGGED + i] = offsets + i * (batch + 1);
    }
    data[ITH_SDPA_LENGTHS] = lengths;
    make_offsets<<<(unsigned)ith_div_ceil(batch + 1, 256), 256, 0, ith_cuda_stream(ctx)>>>(
        offsets, lengths, (const int32_t *)seqs.cu_seqlens.data, seqs.num_docs, batch, s,
        plan->num_ragged);
}

static ith_status run_plan(ith_ctx *ctx, ith_carve *scratch, const ith_sdpa_plan *plan, void **data,
                           float scale, ith_tensor named)
{
    char shape[96];
    int64_t left = scratch->size - scratch->used;
    if (plan->workspace_bytes > left)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED,
                        "%s: cuDNN engine %lld wants %lld bytes of workspace, %lld were planned",
                        ith_tensor_text(named, shape, sizeof shape), (long long)plan->engine,
                        (long long)plan->workspace_bytes, (long long)left);
    void *workspace = ith_carve_take(scratch, plan->workspace_bytes);
    ITH_WRAP(ith_sdpa_execute(ctx, plan, data, scale, workspace), ctx->err, "%s",
             ith_tensor_text(named, shape, sizeof shape));
    return ITH_CUDA_LAUNCHED(ctx, named);
}

static void add_forward_data(void **data, ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor o,
                             ith_tensor lse)
{
    data[ITH_SDPA_Q] = q.data;
    data[ITH_SDPA_K] = k.data;
    data[ITH_SDPA_V] = v.data;
    data[ITH_SDPA_O] = o.data;
    data[ITH_SDPA_LSE] = lse.data;
}

static int64_t attention_forward_workspace(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                           ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                           bool causal)
{
    (void)ctx, (void)lse, (void)scale, (void)causal;
    ith_tensor all[] = {q, k, v, o};
    if (q.shape[0] == 0 || !is_library(all, 4, seqs))
        return 0;
    return offsets_bytes(most_docs(seqs)) + LIBRARY_SLACK_BYTES;
}

static ith_status attention_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                    ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                    bool causal)
{
    if (ith_numel(q) == 0)
        return ITH_OK;
    way how = forward_way(o, q, k, v, seqs);
    if (how == WAY_PLAIN)
        return ith_attention_plain_forward(ctx, o, lse, q, k, v, seqs, scale, causal);
    if (how == WAY_STREAM)
        return ith_attention_stream_forward(ctx, o, lse, q, k, v, seqs, scale, causal);
    ith_sdpa_key key = key_of(q, k, v, o, seqs, causal, how);
    const ith_sdpa_plan *plan = NULL;
    ITH_TRY(ith_sdpa_plan_of(ctx, &key, &plan));
    ith_carve scratch = ith_carve_begin(ctx);
    void *data[ITH_SDPA_NAMES] = {NULL};
    add_forward_data(data, q, k, v, o, lse);
    add_offsets(ctx, &scratch, plan, seqs, data);
    return run_plan(ctx, &scratch, plan, data, scale, q);
}

/* ---- backward ---- */

static bool is_stream_backward(ith_tensor dq, ith_tensor dk, ith_tensor dv, ith_tensor do_,
                               ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor o)
{
    ith_tensor all[] = {q, k, v, o, do_, dq, dk, dv};
    return is_stream(all, 8);
}

static int64_t attention_backward_workspace(ith_ctx *ctx, ith_tensor dq, ith_tensor dk,
                                            ith_tensor dv, ith_tensor do_, ith_tensor q,
                                            ith_tensor k, ith_tensor v, ith_tensor o,
                                            ith_tensor lse, ith_seqs seqs, float scale, bool causal)
{
    (void)scale, (void)causal;
    if (is_stream_backward(dq, dk, dv, do_, q, k, v, o))
        return q.shape[0] > 0 ? ith_attention_stream_workspace(ctx, q, k, seqs) : 0;
    return ith_round_up(ith_mul_bytes(ith_numel(lse), 4), 256);
}

/* Of keys that no query is here for. */
static ith_status zero_heads(ith_ctx *ctx, ith_tensor t)
{
    size_t size = (size_t)ith_dtype_bytes(t.dtype);
    for (int64_t h = 0; ith_numel(t) > 0 && h < t.shape[1]; h++)
        ITH_CUDA_TRY(ctx,
                     cudaMemset2DAsync((char *)t.data + (size_t)(h * t.stride[1]) * size,
                                       (size_t)t.stride[0] * size, 0, (size_t)t.shape[2] * size,
                                       (size_t)t.shape[0], ith_cuda_stream(ctx)),
                     t);
    return ITH_OK;
}

static ith_status attention_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                     ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                     ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                     bool causal)
{
    if (ith_numel(q) == 0) {
        ITH_TRY(zero_heads(ctx, dk));
        return zero_heads(ctx, dv);
    }
    ITH_ASSERT(o.dtype == q.dtype && dk.dtype == dq.dtype && dv.dtype == dq.dtype);
    ith_carve scratch = ith_carve_begin(ctx);
    if (is_stream_backward(dq, dk, dv, do_, q, k, v, o))
        return ith_attention_stream_backward(ctx, dq, dk, dv, do_, q, k, v, o, lse, seqs, scale,
                                             causal, &scratch);
    float *delta = (float *)ith_carve_take(&scratch, ith_numel(lse) * 4);
    return ith_attention_plain_backward(ctx, dq, dk, dv, do_, q, k, v, o, lse, seqs, scale, causal,
                                        delta);
}

/* ---- parts ---- */

/* A warp for a query head. */
__global__ void merge_parts(float *__restrict__ o, float *__restrict__ lse,
                            const float *__restrict__ part_o, const float *__restrict__ part_lse,
                            int64_t rows, int64_t heads, int64_t dim, int64_t o_row, int64_t o_head,
                            int64_t part_row, int64_t part_head)
{
    int64_t at = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
    int lane = (int)threadIdx.x % 32;
    if (at >= rows * heads)
        return;
    int64_t t = at / heads, h = at - t * heads;
    float own = lse[at], other = part_lse[at], max = fmaxf(own, other);
    float a = own == max ? 1.0f : expf(own - max), b = other == max ? 1.0f : expf(other - max);
    float all = a + b;
    __syncwarp();
    if (lane == 0)
        lse[at] = max + logf(all);
    for (int64_t d = lane; d < dim; d += 32) {
        float *to = o + t * o_row + h * o_head + d;
        *to = (a * *to + b * part_o[t * part_row + h * part_head + d]) / all;
    }
}

static ith_status attention_merge(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor part_o,
                                  ith_tensor part_lse)
{
    int64_t rows = o.shape[0], heads = o.shape[1];
    if (ith_numel(o) == 0)
        return ITH_OK;
    merge_parts<<<(unsigned)ith_div_ceil(rows * heads, 8), 256, 0, ith_cuda_stream(ctx)>>>(
        (float *)o.data, (float *)lse.data, (const float *)part_o.data,
        (const float *)part_lse.data, rows, heads, o.shape[2], o.stride[0], o.stride[1],
        part_o.stride[0], part_o.stride[1]);
    return ITH_CUDA_LAUNCHED(ctx, o);
}

void ith_cuda_fill_attention(struct ith_backend *b)
{
    b->attention_merge.run = attention_merge;
    b->attention_forward.run = attention_forward;
    b->attention_forward.workspace = attention_forward_workspace;
    b->attention_backward.run = attention_backward;
    b->attention_backward.workspace = attention_backward_workspace;
    b->attention_decode.run = ith_cuda_attention_decode;
    b->attention_decode.workspace = ith_cuda_attention_decode_workspace;
}
