/* optimizer_cuda.cu - gradient clipping and AdamW.
 *
 * Every operation of AdamW is rounded by itself (the __f*_rn intrinsics forbid contraction), in the
 * order that ops.h states, so all backends give the same bits. 30 bytes per parameter with an fp32
 * master and moments, 16 with bf16 weights and moments. */
#include "kernels/cuda/hopper.cuh"

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
    bool plain; /* eps and v_factor lie where plain_div needs them */
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

/* 2^LOW <= |x| < 2^HIGH. */
template <int LOW, int HIGH> __device__ __forceinline__ bool within(float x)
{
    return (__float_as_uint(x) & 0x7fffffffu) - ((uint32_t)(LOW + 127) << 23) <
           ((uint32_t)(HIGH - LOW) << 23);
}

/* What __fsqrt_rn and __fdiv_rn do where nothing under- or overflows on the way, without their
 * branches: the same bits. */
__device__ __forceinline__ float plain_sqrt(float x)
{
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    float root = __fmul_rn(x, r);
    return __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(r, 0.5f), root);
}

__device__ __forceinline__ float plain_div(float x, float y)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
    r = __fmaf_rn(r, __fmaf_rn(-y, r, 1.0f), r);
    float quotient = __fmul_rn(x, r);
    return __fmaf_rn(r, __fmaf_rn(-y, quotient, x), quotient);
}

/* New parameters p and moments m, v, unrounded; g before it is scaled. */
template <int N>
__device__ __forceinline__ void update(const adamw_args &a, float scale, float (&p)[N],
                                       float (&m)[N], float (&v)[N], const float (&g)[N])
{
    float step[N], change[N];
    bool plain = a.plain;
#pragma unroll
    for (int j = 0; j < N; j++) {
        float scaled = __fmul_rn(scale, g[j]);
        m[j] = __fadd_rn(__fmul_rn(a.beta1, m[j]), __fmul_rn(a.rest1, scaled));
        v[j] = __fadd_rn(__fmul_rn(a.beta2, v[j]), __fmul_rn(__fmul_rn(a.rest2, scaled), scaled));
        step[j] = __fmul_rn(a.step_size, m[j]);
        plain = plain && within<-100, 60>(v[j]) && within<-76, 40>(step[j]);
        change[j] = plain_div(step[j], __fadd_rn(__fmul_rn(plain_sqrt(v[j]), a.v_factor), a.eps));
    }
    if (!plain)
#pragma unroll
        for (int j = 0; j < N; j++)
            change[j] =
                __fdiv_rn(step[j], __fadd_rn(__fmul_rn(__fsqrt_rn(v[j]), a.v_factor), a.eps));
#pragma unroll
    for (int j = 0; j < N; j++)
        p[j] = __fsub_rn(__fmul_rn(p[j], a.decay), change[j]);
}

/* Element i and those behind it. */
template <typename W, typename M, int N>
__device__ __forceinline__ void store(const adamw_args &a, W *w, float *master, M *m, M *v,
                                      int64_t i, const float (&p)[N], const float (&mm)[N],
                                      const float (&vv)[N])
{
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
            update<N>(a, scale, p, mm, vv, g);
            store<W, M, N>(a, w, master, m, v, i, p, mm, vv);
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

/* The same by few blocks, each on a multiprocessor of its own: the copy engine brings the next
 * tiles while one is worked on, for the loads of the threads alone do not keep up. P: what p is
 * read from, master or w. */
template <typename W, typename M, typename P> struct few {
    enum {
        THREADS = 1024,
        TILE = THREADS * 4,
        STAGES = 3,
        STAGE_BYTES = TILE * (int)(sizeof(float) + sizeof(P) + 2 * sizeof(M)),
        BYTES = STAGES * STAGE_BYTES
    };
};

template <typename W, typename M, typename P>
__global__ void __launch_bounds__(1024, 1)
    adamw_few(adamw_args a, W *w, float *master, M *m, M *v, const float *grad,
              const float *__restrict__ scale_at, int64_t n)
{
    typedef few<W, M, P> L;
    extern __shared__ __align__(128) char stages[];
    __shared__ uint64_t full[L::STAGES];
    const P *from = sizeof(P) == sizeof(float) && master ? (const P *)master : (const P *)w;
    float scale = scale_at[0];
    int64_t stride = (int64_t)gridDim.x * L::TILE, next = blockIdx.x * (int64_t)L::TILE;
    auto bring = [&](int stage) {
        if (next < n) {
            uint32_t count = (uint32_t)(n - next < L::TILE ? n - next : L::TILE),
                     to = shared_at(stages + stage * L::STAGE_BYTES), bar = shared_at(full + stage);
            barrier_expect(bar, count * (uint32_t)(sizeof(float) + sizeof(P) + 2 * sizeof(M)));
            copy_bytes(to, grad + next, count * 4, bar);
            copy_bytes(to += L::TILE * 4, from + next, count * (uint32_t)sizeof(P), bar);
            copy_bytes(to += L::TILE * sizeof(P), m + next, count * (uint32_t)sizeof(M), bar);
            copy_bytes(to + L::TILE * sizeof(M), v + next, count * (uint32_t)sizeof(M), bar);
        }
        next += stride;
    };
    if (scale < 0)
        return;
    if (threadIdx.x == 0) {
        for (int s = 0; s < L::STAGES; s++)
            barrier_init(shared_at(full + s), 1);
        barrier_init_done();
        for (int s = 0; s < L::STAGES; s++)
            bring(s);
    }
    __syncthreads();
    int stage = 0;
    uint32_t parity = 0;
    for (int64_t tile = blockIdx.x * (int64_t)L::TILE; tile < n; tile += stride) {
        int64_t i = tile + threadIdx.x * 4;
        const char *at = stages + stage * L::STAGE_BYTES;
        float g[4] = {0}, p[4] = {0}, mm[4] = {0}, vv[4] = {0};
        barrier_wait(shared_at(full + stage), parity);
        if (i < n) {
            load_any<float, 4>(g, (const float *)at + threadIdx.x * 4);
            load_any<P, 4>(p, (const P *)(at += L::TILE * 4) + threadIdx.x * 4);
            load_any<M, 4>(mm, (const M *)(at += L::TILE * sizeof(P)) + threadIdx.x * 4);
            load_any<M, 4>(vv, (const M *)(at + L::TILE * sizeof(M)) + threadIdx.x * 4);
        }
        __syncthreads();
        if (threadIdx.x == 0)
            bring(stage);
        if (i < n) {
            update<4>(a, scale, p, mm, vv, g);
            store<W, M, 4>(a, w, master, m, v, i, p, mm, vv);
        }
        stage = stage + 1 < L::STAGES ? stage + 1 : 0;
        parity ^= stage == 0;
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
    a.plain = a.eps >= 0x1p-40f && a.eps <= 1 && a.v_factor >= 1 && a.v_factor <= 1024;
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

template <typename W, typename M, typename P>
static ith_status launch_few(ith_ctx *ctx, const adamw_args &a, ith_tensor w, ith_tensor master,
                             ith_tensor m, ith_tensor v, ith_tensor grad, ith_tensor scale)
{
    typedef few<W, M, P> L;
    int64_t n = ith_numel(w);
    ITH_CUDA_TRY(ctx,
                 cudaFuncSetAttribute(adamw_few<W, M, P>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, L::BYTES),
                 w);
    unsigned grid = grid_of(n, L::TILE, ith_cuda_of(ctx)->few_sms);
    adamw_few<W, M, P><<<grid, L::THREADS, L::BYTES, ith_cuda_stream(ctx)>>>(
        a, (W *)w.data, (float *)master.data, (M *)m.data, (M *)v.data, (const float *)grad.data,
        (const float *)scale.data, n);
    return ITH_OK;
}

/* Copies of the engine are multiples of 16 bytes. */
static bool fits_few(const adamw_args &a, ith_tensor w, ith_tensor master, ith_tensor m,
                     ith_tensor v, ith_tensor grad)
{
    return !a.zero_grad && ith_numel(w) % 8 == 0 && aligned_16(w) && aligned_16(master) &&
           aligned_16(m) && aligned_16(v) && aligned_16(grad);
}

template <typename W, typename M>
static ith_status run_typed(ith_ctx *ctx, const adamw_args &a, ith_tensor w, ith_tensor master,
                            ith_tensor m, ith_tensor v, ith_tensor grad, ith_tensor scale)
{
    if (!ctx->few || !fits_few(a, w, master, m, v, grad))
        launch<W, M>(ith_cuda_stream(ctx), a, w, master, m, v, grad, scale);
    else if (is_absent(master))
        ITH_TRY((launch_few<W, M, W>(ctx, a, w, master, m, v, grad, scale)));
    else
        ITH_TRY((launch_few<W, M, float>(ctx, a, w, master, m, v, grad, scale)));
    return ITH_CUDA_LAUNCHED(ctx, w);
}

static ith_status adamw(ith_ctx *ctx, ith_tensor w, ith_tensor master, ith_tensor m, ith_tensor v,
                        ith_tensor grad, ith_tensor scale, ith_adamw_hyper hyper, uint64_t seed,
                        int64_t first, bool zero_grad)
{
    if (ith_numel(w) == 0)
        return ITH_OK;
    ITH_ASSERT(m.dtype == v.dtype);
    adamw_args a = args_of(hyper, seed, first, zero_grad);
    ITH_BY_TYPE(w.dtype, {
        if (m.dtype == ITH_BF16)
            return run_typed<T, bf16>(ctx, a, w, master, m, v, grad, scale);
        return run_typed<T, float>(ctx, a, w, master, m, v, grad, scale);
    });
}

void ith_cuda_fill_optimizer(struct ith_backend *b)
{
    b->clip_scale.run = clip_scale;
    b->adamw.run = adamw;
}
