/* group_router_cuda.cu - the sigmoid router with groups: a warp owns a token and keeps its scores
 * in shared memory. 8 bytes per expert and token. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, MAX_EXPERTS = 1024, MAX_GROUPS = 32 };

struct group_args {
    int64_t rows, logit_row;
    int experts, slots, groups, topk_group;
    float scaling;
};

/* Sum of the two largest biased scores of a group. Lanes begin at different places: banks. */
__device__ __forceinline__ float group_score(const float *biased, int size, int first)
{
    float best = -INFINITY, second = -INFINITY;
    for (int i = 0; i < size; i++) {
        float c = biased[(first + i) % size];
        second = fmaxf(second, fminf(best, c));
        best = fmaxf(best, c);
    }
    return size > 1 ? best + second : best;
}

/* Bit g: group g stays, for fewer than topk_group come before it (larger, or equal and lower). */
__device__ __forceinline__ uint32_t groups_that_stay(const group_args &a, const float *biased,
                                                     int lane)
{
    int size = a.experts / a.groups, before = 0;
    float own = lane < a.groups ? group_score(biased + lane * size, size, lane % size) : 0.0f;
    for (int g = 0; g < a.groups; g++) {
        float score = __shfl_sync(0xffffffffu, own, g);
        before += score > own || (score == own && g < lane);
    }
    return __ballot_sync(0xffffffffu, lane < a.groups && before < a.topk_group);
}

/* The lane's best free expert of the groups that stay; then the warp's. -1: none. */
__device__ __forceinline__ int best_expert(const group_args &a, const float *biased, uint32_t stay,
                                           uint32_t taken, int lane)
{
    int size = a.experts / a.groups, idx = -1;
    float best = 0;
    for (int i = 0; i * 32 + lane < a.experts; i++) {
        int e = i * 32 + lane;
        if ((taken >> i & 1) || !(stay >> (e / size) & 1))
            continue;
        if (idx < 0 || biased[e] > best) {
            best = biased[e];
            idx = e;
        }
    }
    for (int o = 16; o > 0; o >>= 1) {
        float c = __shfl_xor_sync(0xffffffffu, best, o);
        int e = __shfl_xor_sync(0xffffffffu, idx, o);
        if (e >= 0 && (idx < 0 || c > best || (c == best && e < idx))) {
            best = c;
            idx = e;
        }
    }
    return idx;
}

__global__ void group_router_fwd(group_args a, float *__restrict__ topk_w,
                                 int32_t *__restrict__ topk_idx, float *__restrict__ scores,
                                 const float *__restrict__ logits, const float *__restrict__ bias)
{
    extern __shared__ float shared[];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int64_t row = (int64_t)blockIdx.x * WARPS + warp;
    float *score = shared + warp * 2 * a.experts, *biased = score + a.experts;
    if (row >= a.rows)
        return;
    for (int e = lane; e < a.experts; e += 32) {
        float s = 1.0f / (1.0f + expf(-logits[row * a.logit_row + e]));
        scores[row * a.experts + e] = score[e] = s;
        biased[e] = s + (bias ? bias[e] : 0.0f);
    }
    __syncwarp();
    uint32_t stay = groups_that_stay(a, biased, lane), taken = 0;
    float sum = 1e-20f;
    for (int s = 0; s < a.slots; s++) {
        int e = best_expert(a, biased, stay, taken, lane);
        if (e % 32 == lane)
            taken |= 1u << (e / 32);
        sum += score[e];
        if (lane == 0)
            topk_idx[row * a.slots + s] = e;
    }
    __syncwarp();
    for (int s = lane; s < a.slots; s += 32) {
        float own = score[topk_idx[row * a.slots + s]];
        topk_w[row * a.slots + s] = (a.slots > 1 ? own / sum : own) * a.scaling;
    }
}

static ith_status group_router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                                       ith_tensor scores, ith_tensor logits, ith_tensor bias,
                                       int64_t n_group, int64_t topk_group, float scaling)
{
    group_args a = {
        logits.shape[0], logits.stride[0], (int)logits.shape[1], (int)topk_w.shape[1], (int)n_group,
        (int)topk_group, scaling};
    if (a.rows == 0)
        return ITH_OK;
    if (a.experts > MAX_EXPERTS || n_group > MAX_GROUPS)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED,
                        "%d experts in %d groups; the most is %d in %d", a.experts, a.groups,
                        MAX_EXPERTS, MAX_GROUPS);
    ITH_ASSERT(ith_is_contiguous(topk_w) && ith_is_contiguous(topk_idx) &&
               ith_is_contiguous(scores));
    size_t bytes = (size_t)(WARPS * 2 * a.experts) * sizeof(float);
    group_router_fwd<<<(unsigned)ith_div_ceil(a.rows, WARPS), THREADS, bytes,
                       ith_cuda_stream(ctx)>>>(a, (float *)topk_w.data, (int32_t *)topk_idx.data,
                                               (float *)scores.data, (const float *)logits.data,
                                               (const float *)bias.data);
    return ITH_CUDA_LAUNCHED(ctx, logits);
}

template <typename T>
__global__ void
group_router_bwd(group_args a, T *__restrict__ dlogits, const float *__restrict__ dtopk_w,
                 const int32_t *__restrict__ topk_idx, const float *__restrict__ scores)
{
    int lane = (int)threadIdx.x % 32;
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= a.rows)
        return;
    const float *score = scores + row * a.experts, *dw = dtopk_w + row * a.slots;
    const int32_t *idx = topk_idx + row * a.slots;
    float sum = 1e-20f, dot = 0;
    for (int s = 0; s < a.slots; s++) {
        sum += score[idx[s]];
        dot += score[idx[s]] * dw[s];
    }
    for (int e = lane; e < a.experts; e += 32) {
        float grad = 0, own = score[e];
        for (int s = 0; s < a.slots; s++)
            if (idx[s] == e) {
                float ds = a.slots > 1 ? dw[s] / sum - dot / (sum * sum) : dw[s];
                grad = a.scaling * ds * own * (1.0f - own);
            }
        dlogits[row * a.logit_row + e] = from_f32<T>(grad);
    }
}

static ith_status group_router_backward(ith_ctx *ctx, ith_tensor dlogits, ith_tensor dtopk_w,
                                        ith_tensor topk_idx, ith_tensor scores, float scaling)
{
    group_args a = {
        scores.shape[0], dlogits.stride[0], (int)scores.shape[1], (int)topk_idx.shape[1], 1, 1,
        scaling};
    if (a.rows == 0)
        return ITH_OK;
    ITH_ASSERT(ith_is_contiguous(dtopk_w) && ith_is_contiguous(topk_idx) &&
               ith_is_contiguous(scores));
    ITH_BY_TYPE(dlogits.dtype, group_router_bwd<T>
                <<<(unsigned)ith_div_ceil(a.rows, WARPS), THREADS, 0, ith_cuda_stream(ctx)>>>(
                    a, (T *)dlogits.data, (const float *)dtopk_w.data,
                    (const int32_t *)topk_idx.data, (const float *)scores.data));
    return ITH_CUDA_LAUNCHED(ctx, dlogits);
}

void ith_cuda_fill_group_router(struct ith_backend *b)
{
    b->group_router_forward.run = group_router_forward;
    b->group_router_backward.run = group_router_backward;
}
