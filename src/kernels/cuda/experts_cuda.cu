/* experts_cuda.cu - router, sort by expert, combination of expert rows.
 *
 * A warp owns a token in the router, so probabilities stay in registers. Sums run over slots or
 * lanes in a fixed order; nothing here uses floating-point atomics. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 128, WARPS = THREADS / 32, LANE_EXPERTS = 32, MAX_EXPERTS = 32 * LANE_EXPERTS };

__device__ __forceinline__ float warp_max(float x)
{
    for (int o = 16; o > 0; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

/* The larger value, the lower index among equals; idx -1: none. */
__device__ __forceinline__ void warp_best(float &value, int &idx)
{
    for (int o = 16; o > 0; o >>= 1) {
        float v = __shfl_xor_sync(0xffffffffu, value, o);
        int i = __shfl_xor_sync(0xffffffffu, idx, o);
        if (i >= 0 && (idx < 0 || v > value || (v == value && i < idx))) {
            value = v;
            idx = i;
        }
    }
}

/* Lane l holds experts l, l + 32, ... */
template <typename T, int ITEMS>
__global__ void router_fwd(float *__restrict__ topk_w, int32_t *__restrict__ topk_idx,
                           float *__restrict__ probs, const T *__restrict__ logits, int64_t rows,
                           int experts, int slots, int64_t logit_row, bool norm_topk)
{
    int lane = (int)threadIdx.x % 32;
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows)
        return;
    float p[ITEMS], max = -INFINITY, sum = 0, chosen = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int e = i * 32 + lane;
        p[i] = e < experts ? to_f32(logits[row * logit_row + e]) : -INFINITY;
        max = fmaxf(max, p[i]);
    }
    max = warp_max(max);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        p[i] = i * 32 + lane < experts ? expf(p[i] - max) : 0.0f;
        sum += p[i];
    }
    sum = group_sum(sum, 32);
    uint32_t taken = 0; /* bit i: expert i*32 + lane is chosen */
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int e = i * 32 + lane;
        p[i] /= sum;
        if (e < experts)
            probs[row * experts + e] = p[i];
        else
            taken |= 1u << i;
    }
    for (int s = 0; s < slots; s++) {
        float best = 0;
        int idx = -1;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (!(taken >> i & 1) && (idx < 0 || p[i] > best)) {
                best = p[i];
                idx = i * 32 + lane;
            }
        warp_best(best, idx);
        if (idx % 32 == lane)
            taken |= 1u << (idx / 32);
        chosen += best;
        if (lane == 0) {
            topk_idx[row * slots + s] = idx;
            topk_w[row * slots + s] = best;
        }
    }
    __syncwarp();
    for (int s = lane; s < slots; s += 32) {
        float w = topk_w[row * slots + s];
        topk_w[row * slots + s] = round_to<T>(norm_topk ? w / chosen : w);
    }
}

static ith_status router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                                 ith_tensor probs, ith_tensor logits, bool norm_topk)
{
    int64_t rows = logits.shape[0], experts = logits.shape[1], slots = topk_w.shape[1];
    if (rows == 0)
        return ITH_OK;
    if (experts > MAX_EXPERTS)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "%lld experts; the most is %d",
                        (long long)experts, MAX_EXPERTS);
    ITH_ASSERT(ith_is_contiguous(topk_w) && ith_is_contiguous(topk_idx) &&
               ith_is_contiguous(probs));
#define LAUNCH(ITEMS)                                                                              \
    router_fwd<T, ITEMS>                                                                           \
        <<<(unsigned)ith_div_ceil(rows, WARPS), THREADS, 0, ith_cuda_stream(ctx)>>>(               \
            (float *)topk_w.data, (int32_t *)topk_idx.data, (float *)probs.data,                   \
            (const T *)logits.data, rows, (int)experts, (int)slots, logits.stride[0], norm_topk)
    ITH_BY_TYPE(logits.dtype, {
        if (experts <= 256)
            LAUNCH(8);
        else
            LAUNCH(LANE_EXPERTS);
    });
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, logits);
}

/* Gradient of a softmax, p_e (dp_e - sum p dp): over all experts, or, when the chosen weights are
 * renormalised, over the chosen ones alone. */
template <typename T>
__global__ void router_bwd(T *__restrict__ dlogits, const float *__restrict__ dtopk_w,
                           const float *__restrict__ topk_w, const int32_t *__restrict__ topk_idx,
                           const float *__restrict__ probs, const float *__restrict__ fraction,
                           float aux_scale, int64_t rows, int experts, int slots,
                           int64_t dlogit_row, bool norm_topk)
{
    int lane = (int)threadIdx.x % 32;
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows)
        return;
    const float *p = probs + row * experts, *w = topk_w + row * slots, *dw = dtopk_w + row * slots;
    const int32_t *idx = topk_idx + row * slots;
    float mean = 0, balance = 0;
    for (int s = 0; s < slots; s++)
        mean += (norm_topk ? w[s] : p[idx[s]]) * dw[s];
    if (fraction) {
        for (int e = lane; e < experts; e += 32)
            balance += p[e] * fraction[e];
        balance = group_sum(balance, 32);
    }
    for (int e = lane; e < experts; e += 32) {
        float own = 0, weight = norm_topk ? 0.0f : p[e];
        for (int s = 0; s < slots; s++)
            if (idx[s] == e) {
                own = dw[s];
                weight = norm_topk ? w[s] : p[e];
            }
        float grad = weight * (own - mean);
        if (fraction)
            grad += aux_scale * p[e] * (fraction[e] - balance);
        dlogits[row * dlogit_row + e] = from_f32<T>(grad);
    }
}

static ith_status router_backward(ith_ctx *ctx, ith_tensor dlogits, ith_tensor dtopk_w,
                                  ith_tensor topk_w, ith_tensor topk_idx, ith_tensor probs,
                                  ith_tensor expert_fraction, float aux_scale, bool norm_topk)
{
    int64_t rows = probs.shape[0];
    if (rows == 0)
        return ITH_OK;
    ITH_ASSERT(ith_is_contiguous(topk_w) && ith_is_contiguous(topk_idx) &&
               ith_is_contiguous(probs) && ith_is_contiguous(dtopk_w));
    ITH_BY_TYPE(dlogits.dtype, router_bwd<T>
                <<<(unsigned)ith_div_ceil(rows, WARPS), THREADS, 0, ith_cuda_stream(ctx)>>>(
                    (T *)dlogits.data, (const float *)dtopk_w.data, (const float *)topk_w.data,
                    (const int32_t *)topk_idx.data, (const float *)probs.data,
                    (const float *)expert_fraction.data, aux_scale, rows, (int)probs.shape[1],
                    (int)topk_w.shape[1], dlogits.stride[0], norm_topk));
    return ITH_CUDA_LAUNCHED(ctx, dlogits);
}

/* ---- load ---- */

enum { LOAD_BLOCKS = ITH_CUDA_SMS };

/* partial[block][e]: sum over the block's own rows, in order. */
__global__ void load_parts(double *__restrict__ partial, const float *__restrict__ probs,
                           int64_t rows, int experts, int64_t prob_row)
{
    for (int e = (int)threadIdx.x; e < experts; e += (int)blockDim.x) {
        double sum = 0;
        for (int64_t t = blockIdx.x; t < rows; t += gridDim.x)
            sum += (double)probs[t * prob_row + e];
        partial[(int64_t)blockIdx.x * experts + e] = sum;
    }
}

__global__ void load_sums(float *fraction, float *mean_prob, const int32_t *__restrict__ offsets,
                          const double *__restrict__ partial, int blocks, int experts, float scale)
{
    int e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e >= experts)
        return;
    double sum = 0;
    for (int i = 0; i < blocks; i++)
        sum += partial[(int64_t)i * experts + e];
    fraction[e] += scale * (float)(offsets[e + 1] - offsets[e]);
    mean_prob[e] += (float)((double)scale * sum);
}

static int64_t expert_load_workspace(ith_ctx *ctx, ith_tensor fraction, ith_tensor mean_prob,
                                     ith_tensor offsets, ith_tensor probs, float scale)
{
    (void)ctx, (void)fraction, (void)mean_prob, (void)offsets, (void)scale;
    return ith_mul_bytes(LOAD_BLOCKS * probs.shape[1], (int64_t)sizeof(double));
}

static ith_status expert_load(ith_ctx *ctx, ith_tensor fraction, ith_tensor mean_prob,
                              ith_tensor offsets, ith_tensor probs, float scale)
{
    int experts = (int)probs.shape[1];
    double *partial = (double *)ctx->scratch;
    if (experts == 0)
        return ITH_OK;
    load_parts<<<LOAD_BLOCKS, 256, 0, ith_cuda_stream(ctx)>>>(
        partial, (const float *)probs.data, probs.shape[0], experts, probs.stride[0]);
    load_sums<<<grid_of(experts, 128, 1 << 16), 128, 0, ith_cuda_stream(ctx)>>>(
        (float *)fraction.data, (float *)mean_prob.data, (const int32_t *)offsets.data, partial,
        LOAD_BLOCKS, experts, scale);
    return ITH_CUDA_LAUNCHED(ctx, probs);
}

/* ---- sort ---- */

__global__ void divide(int32_t *x, int64_t n, int32_t by)
{
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n)
        x[i] /= by;
}

static int64_t expert_sort_workspace(ith_ctx *ctx, ith_tensor offsets, ith_tensor source,
                                     ith_tensor row_of, ith_tensor topk_idx)
{
    (void)ctx, (void)source, (void)row_of;
    return ith_bucket_sort_workspace_bytes(ith_numel(topk_idx), offsets.shape[0] - 1);
}

static ith_status expert_sort(ith_ctx *ctx, ith_tensor offsets, ith_tensor source,
                              ith_tensor row_of, ith_tensor topk_idx)
{
    int64_t experts = offsets.shape[0] - 1, n = ith_numel(topk_idx);
    if (experts > MAX_EXPERTS)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "%lld experts; the most is %d",
                        (long long)experts, MAX_EXPERTS);
    ITH_ASSERT(ith_is_contiguous(topk_idx) && ith_is_contiguous(row_of));
    ith_bucket_sort sort = {};
    sort.keys = (const int32_t *)topk_idx.data;
    sort.rank = (int32_t *)row_of.data;
    sort.out_value = (int32_t *)source.data;
    sort.bucket_begin = (int32_t *)offsets.data;
    sort.n = n;
    sort.num_buckets = experts;
    sort.mask = 0xffffffffu;
    ith_bucket_sort_launch(ith_cuda_stream(ctx), &sort, ctx->scratch);
    if (n > 0) /* pair -> token */
        divide<<<(unsigned)ith_div_ceil(n, 256), 256, 0, ith_cuda_stream(ctx)>>>(
            (int32_t *)source.data, n, (int32_t)topk_idx.shape[1]);
    return ITH_CUDA_LAUNCHED(ctx, topk_idx);
}

/* ---- combination ---- */

template <typename T, int N>
__global__ void combine_fwd(T *y, const T *base, const T *__restrict__ x,
                            const float *__restrict__ topk_w, const int32_t *__restrict__ row_of,
                            int64_t rows, int64_t width, int slots, int64_t y_row, int64_t base_row,
                            int64_t x_row)
{
    int64_t pieces = width / N, n = rows * pieces;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t t = i / pieces, d = (i - t * pieces) * N;
        float sum[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            sum[j] = 0;
        if (base)
            load_any<T, N>(sum, base + t * base_row + d);
        for (int s = 0; s < slots; s++) {
            float v[N], w = topk_w ? topk_w[t * slots + s] : 1.0f;
            load_f32<T, N>(v, x + row_of[t * slots + s] * x_row + d);
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[j] += w * v[j];
        }
        store_f32<T, N>(y + t * y_row + d, sum);
    }
}

static ith_status expert_combine(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                                 ith_tensor topk_w, ith_tensor row_of)
{
    int64_t rows = y.shape[0], width = y.shape[1], n = 16 / ith_dtype_bytes(y.dtype);
    if (rows * width == 0)
        return ITH_OK;
    ITH_ASSERT(ith_is_contiguous(row_of) && (is_absent(topk_w) || ith_is_contiguous(topk_w)));
    bool wide = rows_aligned(y, n) && rows_aligned(base, n) && rows_aligned(x, n);
#define LAUNCH(N)                                                                                  \
    combine_fwd<T, N><<<grid_of(rows *width, 256 * N, 1 << 20), 256, 0, ith_cuda_stream(ctx)>>>(   \
        (T *)y.data, (const T *)base.data, (const T *)x.data, (const float *)topk_w.data,          \
        (const int32_t *)row_of.data, rows, width, (int)row_of.shape[1], y.stride[0],              \
        base.stride[0], x.stride[0])
    ITH_BY_WIDTH(y.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, y);
}

/* A warp owns one (token, slot). A lane reads its place of x before it writes dx there. */
template <typename T, int N>
__global__ void combine_bwd(T *dx, float *__restrict__ dtopk_w, const T *__restrict__ dy,
                            const T *x, const float *__restrict__ topk_w,
                            const int32_t *__restrict__ row_of, int64_t pairs, int64_t width,
                            int slots, int64_t dx_row, int64_t dy_row, int64_t x_row)
{
    int64_t pair = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = (int)threadIdx.x % 32;
    if (pair >= pairs)
        return;
    int64_t t = pair / slots, row = row_of[pair];
    float w = topk_w[pair], dot = 0;
    for (int64_t d = lane * N; d < width; d += 32 * N) {
        float g[N], v[N];
        load_f32<T, N>(g, dy + t * dy_row + d);
        load_any<T, N>(v, x + row * x_row + d);
#pragma unroll
        for (int j = 0; j < N; j++) {
            dot += g[j] * v[j];
            g[j] *= w;
        }
        store_f32<T, N>(dx + row * dx_row + d, g);
    }
    dot = group_sum(dot, 32);
    if (lane == 0)
        dtopk_w[pair] = dot;
}

static ith_status expert_combine_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dtopk_w,
                                          ith_tensor dy, ith_tensor x, ith_tensor topk_w,
                                          ith_tensor row_of)
{
    int64_t pairs = ith_numel(row_of), width = dy.shape[1], n = 16 / ith_dtype_bytes(dy.dtype);
    if (pairs == 0)
        return ITH_OK;
    ITH_ASSERT(ith_is_contiguous(row_of) && ith_is_contiguous(topk_w) &&
               ith_is_contiguous(dtopk_w));
    bool wide = rows_aligned(dx, n) && rows_aligned(dy, n) && rows_aligned(x, n);
#define LAUNCH(N)                                                                                  \
    combine_bwd<T, N><<<(unsigned)ith_div_ceil(pairs, WARPS), THREADS, 0, ith_cuda_stream(ctx)>>>( \
        (T *)dx.data, (float *)dtopk_w.data, (const T *)dy.data, (const T *)x.data,                \
        (const float *)topk_w.data, (const int32_t *)row_of.data, pairs, width,                    \
        (int)row_of.shape[1], dx.stride[0], dy.stride[0], x.stride[0])
    ITH_BY_WIDTH(dy.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, dy);
}

void ith_cuda_fill_experts(struct ith_backend *b)
{
    b->router_forward.run = router_forward;
    b->router_backward.run = router_backward;
    b->expert_load.run = expert_load;
    b->expert_load.workspace = expert_load_workspace;
    b->expert_sort.run = expert_sort;
    b->expert_sort.workspace = expert_sort_workspace;
    b->expert_combine.run = expert_combine;
    b->expert_combine_backward.run = expert_combine_backward;
}
