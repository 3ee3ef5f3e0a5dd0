/* optimizer_cuda.cu - gradient clipping and AdamW.
 *
 * Every operation of AdamW is rounded by itself (the __f*_rn intrinsics forbid contraction), in the
 * order that ops.h states, so all backends give the same bits. 30 bytes per parameter with an fp32
 * master and moments, 16 with bf16 weights and moments. */
#include "kernels/cuda/common.cuh"

#include <math.h>

enum { THREADS = 256 };

__global__ void clip(float *norm, float *scale, const double *__restrict__ sumsq, float max_norm)
{
    double length = sqrt(sumsq[0]), factor = 1;
    if (!isfinite((float)length))
        factor = -1;
    else if (max_norm > 0 && (double)max_norm < length + 1e-6)
        factor = (double)max_norm / (length + 1e-6);
    norm[0] = (float)length;
    scale[0] = (float)factor;
}

static ith_status clip_scale(ith_ctx *ctx, ith_tensor norm, ith_tensor scale, ith_tensor sumsq,
                             float max_norm)
{
    clip<<<1, 1, 0, ith_cuda_stream(ctx)>>>((float *)norm.data, (float *)scale.data,
                                            (const double *)sumsq.data, max_norm);
    return ITH_CUDA_LAUNCHED(ctx, sumsq);
}

struct adamw_args {
    float beta1, rest1, beta2, rest2; /* rest = 1 - beta */
    float decay, step_size, v_factor, eps;
    uint64_t seed, step, first;
    bool zero_grad;
};

/* Word 0 of ith_philox. */
__device__ __forceinline__ uint32_t philox_word(uint64_t key, uint64_t hi, uint64_t lo)
{
    uint32_t c0 = (uint32_t)lo, c1 = (uint32_t)(lo >> 32), c2 = (uint32_t)hi,
             c3 = (uint32_t)(hi >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32_t n0 = __umulhi(0xCD9E8D57u, c2) ^ c1 ^ k0, n2 = __umulhi(0xD2511F53u, c0) ^ c3 ^ k1;
        c1 = 0xCD9E8D57u * c2;
        c3 = 0xD2511F53u * c0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

/* value as bf16, up with the probability of the part that is cut off. */
__device__ __forceinline__ bf16 stochastic(float value, uint32_t random)
{
    if (!isfinite(value))
        return __float2bfloat16_rn(value);
    return __ushort_as_bfloat16((uint16_t)((__float_as_uint(value) + (random & 0xffffu)) >> 16));
}

/* The new parameter; m and v become the new moments, unrounded. */
__device__ __forceinline__ float update(const adamw_args &a, float p, float &m, float &v, float g)
{
    m = __fadd_rn(__fmul_rn(a.beta1, m), __fmul_rn(a.rest1, g));
    v = __fadd_rn(__fmul_rn(a.beta2, v), __fmul_rn(__fmul_rn(a.rest2, g), g));
    float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), a.v_factor), a.eps);
    return __fsub_rn(__fmul_rn(p, a.decay), __fdiv_rn(__fmul_rn(a.step_size, m), denominator));
}

/* N elements per thread; W: type of w, M: of m and v; master may be NULL. */
template <typename W, typename M, int N>
__global__ void adamw_kernel(adamw_args a, W *__restrict__ w, float *__restrict__ master,
                             M *__restrict__ m, M *__restrict__ v, float *__restrict__ grad,
                             const float *__restrict__ scale_at, int64_t n)
{
    float scale = scale_at[0];
    for (int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * N; i < n;
         i += (int64_t)gridDim.x * blockDim.x * N) {
        if (scale >= 0) {
            float g[N], p[N], mm[N], vv[N];
            load_any<float, N>(g, grad + i);
            load_any<M, N>(mm, m + i);
            load_any<M, N>(vv, v + i);
            if (master)
                load_any<float, N>(p, master + i);
            else
                load_any<W, N>(p, w + i);
#pragma unroll
            for (int j = 0; j < N; j++)
                p[j] = update(a, p[j], mm[j], vv[j], __fmul_rn(scale, g[j]));
            store_f32<M, N>(m + i, mm);
            store_f32<M, N>(v + i, vv);
            if (master)
                store_f32<float, N>(master + i, p);
            if (master || sizeof(W) == 4) {
                store_f32<W, N>(w + i, p);
            } else {
                vec<bf16, N> out;
#pragma unroll
                for (int j = 0; j < N; j++)
                    out.v[j] = stochastic(p[j], philox_word(a.seed, a.step, a.first + i + j));
                *reinterpret_cast<vec<bf16, N> *>(w + i) = out;
            }
        }
        if (a.zero_grad) {
            float none[N];
#pragma unroll
            for (int j = 0; j < N; j++)
                none[j] = 0;
            store_f32<float, N>(grad + i, none);
        }
    }
}

static adamw_args args_of(ith_adamw_hyper h, uint64_t seed, int64_t first, bool zero_grad)
{
    double b1 = (double)h.beta1, b2 = (double)h.beta2, lr = (double)h.lr, step = (double)h.step;
    adamw_args a;
    a.beta1 = h.beta1;
    a.rest1 = (float)(1 - b1);
    a.beta2 = h.beta2;
    a.rest2 = (float)(1 - b2);
    a.decay = (float)(1 - lr * (double)h.weight_decay);
    a.step_size = (float)(lr / (1 - pow(b1, step)));
    a.v_factor = (float)(1 / sqrt(1 - pow(b2, step)));
    a.eps = h.eps;
    a.seed = seed;
    a.step = (uint64_t)h.step;
    a.first = (uint64_t)first;
    a.zero_grad = zero_grad;
    return a;
}

static bool aligned_16(ith_tensor t)
{
    return is_absent(t) || (uintptr_t)t.data % 16 == 0;
}

template <typename W, typename M>
static void launch(cudaStream_t stream, const adamw_args &a, ith_tensor w, ith_tensor master,
                   ith_tensor m, ith_tensor v, ith_tensor grad, ith_tensor scale)
{
    int64_t n = ith_numel(w);
    bool wide = n % 4 == 0 && aligned_16(w) && aligned_16(master) && aligned_16(m) &&
                aligned_16(v) && aligned_16(grad);
    unsigned grid = grid_of(n, THREADS * (wide ? 4 : 1), 1 << 20);
    if (wide)
        adamw_kernel<W, M, 4><<<grid, THREADS, 0, stream>>>(
            a, (W *)w.data, (float *)master.data, (M *)m.data, (M *)v.data, (float *)grad.data,
            (const float *)scale.data, n);
    else
        adamw_kernel<W, M, 1><<<grid, THREADS, 0, stream>>>(
            a, (W *)w.data, (float *)master.data, (M *)m.data, (M *)v.data, (float *)grad.data,
            (const float *)scale.data, n);
}

static ith_status adamw(ith_ctx *ctx, ith_tensor w, ith_tensor master, ith_tensor m, ith_tensor v,
                        ith_tensor grad, ith_tensor scale, ith_adamw_hyper hyper, uint64_t seed,
                        int64_t first, bool zero_grad)
{
    if (ith_numel(w) == 0)
        return ITH_OK;
    ITH_ASSERT(m.dtype == v.dtype);
    adamw_args a = args_of(hyper, seed, first, zero_grad);
    cudaStream_t stream = ith_cuda_stream(ctx);
    ITH_BY_TYPE(w.dtype, {
        if (m.dtype == ITH_BF16)
            launch<T, bf16>(stream, a, w, master, m, v, grad, scale);
        else
            launch<T, float>(stream, a, w, master, m, v, grad, scale);
    });
    return ITH_CUDA_LAUNCHED(ctx, w);
}

void ith_cuda_fill_optimizer(struct ith_backend *b)
{
    b->clip_scale.run = clip_scale;
    b->adamw.run = adamw;
}
