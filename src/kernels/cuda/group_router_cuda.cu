/* group_router_cuda.cu - the sigmoid router with groups: a warp owns a token and keeps its scores
 * in shared memory. 8 bytes per expert and token. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, MAX_EXPERTS = 1024, MAX_GROUPS = 32 };

struct group_args {
    int64_t rows, logit_row;
    int experts, slots, groups, topk_group;
    int lanes; /* of a warp that work on one group: a power of two */
    float scaling;
};

/* Order of floats as order of integers above 0. */
__device__ __forceinline__ uint32_t ordered(float x)
{
    uint32_t bits = __float_as_uint(x);
    return max(bits >> 31 ? ~bits : bits | 0x80000000u, 1u);
}

/* Bit g: group g stays, for fewer than topk_group come before it (larger, or equal and lower). A
 * power of two of lanes works on a group, beginning at different places: banks. */
__device__ __forceinline__ uint32_t groups_that_stay(const group_args &a, const float *biased,
                                                     int lane)
{
    int size = a.experts / a.groups, each = a.lanes, g = lane / each, sub = lane % each, before = 0;
    float best = -INFINITY, second = -INFINITY;
    for (int i = sub; i < size && g < a.groups; i += each) {
        float c = biased[g * size + (i + g * each) % size];
        second = fmaxf(second, fminf(best, c));
        best = fmaxf(best, c);
    }
    for (int o = each / 2; o > 0; o >>= 1) {
        float b = __shfl_xor_sync(0xffffffffu, best, o);
        float s = __shfl_xor_sync(0xffffffffu, second, o);
        second = fmaxf(fmaxf(second, s), fminf(best, b));
        best = fmaxf(best, b);
    }
    float own = size > 1 ? best + second : best; /* a group's score: its two largest */
    for (int other = 0; other < a.groups; other++) {
        float score = __shfl_sync(0xffffffffu, own, other * each);
        before += score > own || (score == own && other < g);
    }
    bool stays = g < a.groups && sub == 0 && before < a.topk_group;
    uint32_t stay = 0, at = __ballot_sync(0xffffffffu, stays);
    for (int i = 0; i < a.groups; i++)
        stay |= (at >> i * each & 1) << i;
    return stay;
}

/* Lane l holds experts l, l + 32, ... */
template <int ITEMS>
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
    uint32_t stay = groups_that_stay(a, biased, lane), key[ITEMS]; /* key 0: not to be chosen */
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int e = i * 32 + lane;
        bool free = e < a.experts && stay >> e / (a.experts / a.groups) & 1;
        key[i] = free ? ordered(biased[e]) : 0;
    }
    float sum = 1e-20f;
    for (int s = 0; s < a.slots; s++) {
        uint32_t best = 0, mine = UINT32_MAX;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            best = max(best, key[i]);
        best = __reduce_max_sync(0xffffffffu, best);
#pragma unroll
        for (int i = ITEMS - 1; i >= 0; i--)
            mine = key[i] == best ? (uint32_t)(i * 32 + lane) : mine;
        int e = (int)__reduce_min_sync(0xffffffffu, mine);
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            key[i] = i * 32 + lane == e ? 0 : key[i];
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
    group_args a = {};
    a.rows = logits.shape[0];
    a.logit_row = logits.stride[0];
    a.experts = (int)logits.shape[1];
    a.slots = (int)topk_w.shape[1];
    a.groups = (int)n_group;
    a.topk_group = (int)topk_group;
    for (a.lanes = 32; a.lanes * n_group > 32 && a.lanes > 1;)
        a.lanes /= 2;
    a.scaling = scaling;
    if (a.rows == 0)
        return ITH_OK;
    if (a.experts > MAX_EXPERTS || n_group > MAX_GROUPS)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED,
                        "%d experts in %d groups; the most is %d in %d", a.experts, a.groups,
                        MAX_EXPERTS, MAX_GROUPS);
    ITH_ASSERT(ith_is_contiguous(topk_w) && ith_is_contiguous(topk_idx) &&
               ith_is_contiguous(scores));
    size_t bytes = (size_t)(WARPS * 2 * a.experts) * sizeof(float);
#define LAUNCH(ITEMS)                                                                              \
    group_router_fwd<ITEMS>                                                                        \
        <<<(unsigned)ith_div_ceil(a.rows, WARPS), THREADS, bytes, ith_cuda_stream(ctx)>>>(         \
            a, (float *)topk_w.data, (int32_t *)topk_idx.data, (float *)scores.data,               \
            (const float *)logits.data, (const float *)bias.data)
    if (a.experts <= 256)
        LAUNCH(8);
    else
        LAUNCH(MAX_EXPERTS / 32);
#undef LAUNCH
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
    group_args a = {};
    a.rows = scores.shape[0];
    a.logit_row = dlogits.stride[0];
    a.experts = (int)scores.shape[1];
    a.slots = (int)topk_idx.shape[1];
    a.scaling = scaling;
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
