/* loss_cuda.cu - cross entropy of logit rows in place, and sums over vectors in double.
 *
 * A cluster of blocks owns a row and holds it in shared memory: maximum and sum are joined over the
 * blocks, then logits become gradients, so a row is read and written once (4V bytes). With
 * confidence a block owns a row and reads it twice. Sums over vectors: a constant number of blocks,
 * each with its own contiguous part, joined in order: the same bits on every run. */
#include "kernels/cuda/common.cuh"

#include <cooperative_groups.h>

enum { ROW_THREADS = 1024, SUM_BLOCKS = ITH_CUDA_SMS * 8, SUM_THREADS = 256 };
enum { PART_BLOCKS = 8, PART_THREADS = 256, MOST_SHARED = 224 << 10 };

/* Running log-sum-exp: the sum of e^(x - max) over what was seen. */
struct running {
    float max, sum;
};

/* f32 logits get the exact exponential; bf16 ones cannot tell it from the fast one. */
template <typename T> __device__ __forceinline__ float exp_of(float x)
{
    return sizeof(T) == 2 ? __expf(x) : expf(x);
}

__device__ __forceinline__ running join(running a, running b)
{
    float max = fmaxf(a.max, b.max);
    if (max == -INFINITY) /* nothing seen, or only -inf */
        return {max, a.sum + b.sum};
    return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
}

__device__ __forceinline__ running join_block(running r)
{
    __shared__ running part[32];
    for (int o = 16; o > 0; o >>= 1)
        r = join(r,
                 {__shfl_xor_sync(0xffffffffu, r.max, o), __shfl_xor_sync(0xffffffffu, r.sum, o)});
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = r;
    __syncthreads();
    r = part[0];
    for (int i = 1; i < ROW_THREADS / 32; i++)
        r = join(r, part[i]);
    return r;
}

/* log sum exp of a row, in all threads. */
template <typename T, int N>
__device__ __forceinline__ running row_running(const T *at, int64_t words)
{
    running r = {-INFINITY, 0};
    for (int64_t j = threadIdx.x * N; j < words; j += ROW_THREADS * N) {
        float x[N], top;
        load_any<T, N>(x, at + j);
        top = x[0];
#pragma unroll
        for (int i = 1; i < N; i++)
            top = fmaxf(top, x[i]);
        if (top > r.max) {
            r.sum *= exp_of<T>(r.max - top);
            r.max = top;
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            r.sum += x[i] == -INFINITY ? 0.0f : exp_of<T>(x[i] - r.max);
    }
    return join_block(r);
}

/* Finite, so that e^(-inf - max) is 0 whatever was seen. */
#define LOWEST (-1.0e38f)

/* e^(x - from). f32 logits get the exact exponential; bf16 ones cannot tell it from the fast one.
 */
template <typename T> __device__ __forceinline__ float exp_from(float x, float from)
{
    constexpr float LOG2_E = 1.4426950408889634f;
    if (sizeof(T) == 4)
        return expf(x - from);
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"((x - from) * LOG2_E));
    return power;
}

/* Over groups of `width` lanes; all of them get it. */
__device__ __forceinline__ running join_lanes(running r, int width)
{
    float max = r.max;
    for (int o = width / 2; o > 0; o >>= 1)
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, o));
    return {max, group_sum(r.sum * expf(r.max - max), width)};
}

/* part: elements of a row that one block holds. */
template <typename T, int N>
__global__ void __cluster_dims__(PART_BLOCKS, 1, 1) __launch_bounds__(PART_THREADS)
    cross_entropy_rows(float *__restrict__ row_loss, T *logits, const int32_t *__restrict__ labels,
                       const float *__restrict__ seeds, int64_t words, int64_t stride, int64_t part,
                       bool gradient)
{
    extern __shared__ __align__(16) char shared[];
    __shared__ running warps[PART_THREADS / 32], parts[PART_BLOCKS];
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    int64_t row = blockIdx.x / PART_BLOCKS, begin = blockIdx.x % PART_BLOCKS * part;
    int n = (int)(words - begin < part ? words - begin : part), me = (int)threadIdx.x;
    int label = (int)(labels[row] - begin); /* among the part's, or not */
    T *at = logits + row * stride + begin, *held = reinterpret_cast<T *>(shared);
    for (int j = me * N; j < n; j += PART_THREADS * N)
        copy_ahead(reinterpret_cast<vec<T, N> *>(held + j), at + j);
    copies_end();
    copies_wait(); /* a thread works on what it copied itself */
    running r = {LOWEST, 0};
    for (int j = me * N; j < n; j += PART_THREADS * N) {
        float x[N], top;
        load_any<T, N>(x, held + j);
        top = x[0];
#pragma unroll
        for (int i = 1; i < N; i++)
            top = fmaxf(top, x[i]);
        if (top > r.max) {
            r.sum *= exp_from<T>(r.max, top);
            r.max = top;
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            r.sum += exp_from<T>(x[i], r.max);
    }
    r = join_lanes(r, 32);
    if (me % 32 == 0)
        warps[me / 32] = r;
    __syncthreads();
    if (me < 32) {
        r = join_lanes(warps[me % (PART_THREADS / 32)], PART_THREADS / 32);
        if (me < PART_BLOCKS)
            *cluster.map_shared_rank(&parts[blockIdx.x % PART_BLOCKS], me) = r;
    }
    cluster.sync();
    r = join_lanes(parts[me % PART_BLOCKS], PART_BLOCKS);
    float lse = r.max + logf(r.sum);
    bool mine = label >= 0 && label < n && label / N % PART_THREADS == me;
    float at_label = mine ? to_f32(held[label]) : 0.0f;
    if (mine)
        row_loss[row] = lse - at_label;
    if (!gradient)
        return;
    float seed = seeds[row];
    for (int j = me * N; j < n; j += PART_THREADS * N) {
        float x[N];
        load_any<T, N>(x, held + j);
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = exp_from<T>(x[i], lse) * seed;
        store_f32<T, N>(at + j, x);
    }
    if (mine)
        at[label] = from_f32<T>((exp_from<T>(at_label, lse) - 1.0f) * seed);
}

static ith_status cross_entropy(ith_ctx *ctx, ith_tensor row_loss, ith_tensor logits,
                                ith_tensor labels, ith_tensor seeds, bool gradient)
{
    if (logits.shape[0] == 0)
        return ITH_OK;
    int64_t size = ith_dtype_bytes(logits.dtype), words = logits.shape[1];
    bool wide = rows_aligned(logits, 16 / size);
    int64_t part = ith_round_up(ith_div_ceil(words, PART_BLOCKS), 16 / size), bytes = part * size;
    if (bytes > MOST_SHARED)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "vocab_size %lld; the most is %lld",
                        (long long)words, (long long)(PART_BLOCKS * MOST_SHARED / size));
#define LAUNCH(N)                                                                                  \
    do {                                                                                           \
        auto kernel = cross_entropy_rows<T, N>;                                                    \
        ITH_CUDA_TRY(                                                                              \
            ctx,                                                                                   \
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), \
            logits);                                                                               \
        kernel<<<(unsigned)(logits.shape[0] * PART_BLOCKS), PART_THREADS, (size_t)bytes,           \
                 ith_cuda_stream(ctx)>>>((float *)row_loss.data, (T *)logits.data,                 \
                                         (const int32_t *)labels.data, (const float *)seeds.data,  \
                                         words, logits.stride[0], part, gradient);                 \
    } while (0)
    ITH_BY_WIDTH(logits.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, logits);
}

/* A third read, for the entropy, only where the label is the likeliest: H = log sum - mean and
 * log p + H = x - max - mean, with mean = sum of p (x - max). */
template <typename T, int N>
__global__ void __launch_bounds__(ROW_THREADS)
    confident_rows(float *__restrict__ row_loss, float *__restrict__ row_confidence,
                   float *__restrict__ right, T *logits, const int32_t *__restrict__ labels,
                   const float *__restrict__ seeds, int64_t words, int64_t stride, float confidence,
                   bool gradient)
{
    int64_t row = blockIdx.x;
    T *at = logits + row * stride;
    int32_t label = labels[row];
    running r = row_running<T, N>(at, words);
    float log_sum = logf(r.sum), at_label = to_f32(at[label]), mean = 0;
    bool is_right = at_label >= r.max;
    float c = is_right ? confidence : 0.0f;
    for (int64_t j = threadIdx.x * N; is_right && j < words; j += ROW_THREADS * N) {
        float x[N];
        load_any<T, N>(x, at + j);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float e = fmaxf(x[i] - r.max, -100.0f); /* -inf is no number times zero */
            mean += exp_of<T>(e) * e;
        }
    }
    mean = block_sum<ROW_THREADS>(mean) / r.sum; /* by now all have read the label's logit */
    if (threadIdx.x == 0) {
        row_loss[row] = r.max + log_sum - at_label;
        row_confidence[row] = c * (log_sum - mean);
        right[row] = is_right ? 1.0f : 0.0f;
    }
    if (!gradient)
        return;
    float seed = seeds[row];
    int64_t pieces = words / N;
    for (int64_t n = pieces - 1 - threadIdx.x; n >= 0; n -= ROW_THREADS) {
        float x[N];
        load_any<T, N>(x, at + n * N);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float e = fmaxf(x[i] - r.max, -100.0f), p = exp_of<T>(e - log_sum);
            x[i] = (p - (n * N + i == label ? 1.0f : 0.0f) - c * p * (e - mean)) * seed;
        }
        store_f32<T, N>(at + n * N, x);
    }
}

static ith_status cross_entropy_confident(ith_ctx *ctx, ith_tensor row_loss,
                                          ith_tensor row_confidence, ith_tensor right,
                                          ith_tensor logits, ith_tensor labels, ith_tensor seeds,
                                          float confidence, bool gradient)
{
    if (logits.shape[0] == 0)
        return ITH_OK;
    bool wide = rows_aligned(logits, 16 / ith_dtype_bytes(logits.dtype));
#define LAUNCH(N)                                                                                  \
    confident_rows<T, N><<<(unsigned)logits.shape[0], ROW_THREADS, 0, ith_cuda_stream(ctx)>>>(     \
        (float *)row_loss.data, (float *)row_confidence.data, (float *)right.data,                 \
        (T *)logits.data, (const int32_t *)labels.data, (const float *)seeds.data,                 \
        logits.shape[1], logits.stride[0], confidence, gradient)
    ITH_BY_WIDTH(logits.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, logits);
}

/* ---- choice of ids ---- */

struct best_word {
    float value;
    int64_t id; /* lower wins among equals */
};

__device__ __forceinline__ best_word better(best_word a, best_word b)
{
    return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

__device__ __forceinline__ best_word best_of_block(best_word w)
{
    __shared__ best_word part[ROW_THREADS / 32];
    for (int o = 16; o > 0; o >>= 1)
        w = better(
            w, {__shfl_xor_sync(0xffffffffu, w.value, o), __shfl_xor_sync(0xffffffffu, w.id, o)});
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = w;
    __syncthreads();
    for (int i = 0; i < ROW_THREADS / 32; i++)
        w = better(w, part[i]);
    __syncthreads();
    return w;
}

/* The word of draw * (sum over all but `barred`): every thread sums a stretch of the row, one walks
 * over the stretches and then over the words of one. */
template <typename T>
__device__ int64_t drawn_word(const T *at, int64_t words, float max, float scale, double until,
                              int64_t barred)
{
    __shared__ double stretch[ROW_THREADS];
    __shared__ int64_t drawn;
    int64_t each = (words + ROW_THREADS - 1) / ROW_THREADS, begin = threadIdx.x * each;
    double sum = 0;
    for (int64_t j = begin; j < begin + each && j < words; j++)
        sum += j == barred ? 0.0 : (double)expf((to_f32(at[j]) - max) * scale);
    stretch[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double seen = 0;
        int last = 0; /* the stretch that the draw falls into; the last with a weight if none */
        for (int i = 0; i < ROW_THREADS && seen <= until; i++)
            if (stretch[i] > 0) {
                seen += stretch[i];
                last = i;
            }
        seen -= stretch[last];
        drawn = barred == 0;
        for (int64_t j = last * each; j < (last + 1) * each && j < words && seen <= until; j++) {
            double e = (double)expf((to_f32(at[j]) - max) * scale);
            if (j == barred || !(e > 0))
                continue;
            seen += e;
            drawn = j;
        }
    }
    __syncthreads();
    return drawn;
}

template <typename T, int N>
__global__ void __launch_bounds__(ROW_THREADS)
    choose_rows(int32_t *__restrict__ ids, float *__restrict__ probability,
                const T *__restrict__ logits, const float *__restrict__ draws, int64_t words,
                int64_t stride, float scale, int64_t barred)
{
    int64_t row = blockIdx.x;
    const T *at = logits + row * stride;
    best_word best = {-INFINITY, words};
    for (int64_t j = threadIdx.x * N; j < words; j += ROW_THREADS * N) {
        float x[N];
        load_any<T, N>(x, at + j);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (j + i != barred)
                best = better(best, {x[i], j + i});
    }
    best = best_of_block(best);
    if (best.id == words) /* no number in the row */
        best.id = barred == 0;
    float out = barred < 0 ? -INFINITY : to_f32(at[barred]), max = fmaxf(best.value, out);
    double sum = 0;
    for (int64_t j = threadIdx.x * N; j < words; j += ROW_THREADS * N) {
        float x[N];
        load_any<T, N>(x, at + j);
#pragma unroll
        for (int i = 0; i < N; i++)
            sum += (double)expf((x[i] - max) * scale);
    }
    sum = block_sum<ROW_THREADS>(sum);
    float draw = draws ? draws[row] : -1.0f;
    int64_t id = best.id;
    if (draw >= 0) {
        double allowed = sum - (barred < 0 ? 0.0 : (double)expf((out - max) * scale));
        id = drawn_word(at, words, max, scale, (double)draw * allowed, barred);
    }
    if (threadIdx.x == 0) {
        ids[row] = (int32_t)id;
        probability[row] = (float)((double)expf((to_f32(at[id]) - max) * scale) / sum);
    }
}

static ith_status choose_ids(ith_ctx *ctx, ith_tensor ids, ith_tensor probability,
                             ith_tensor logits, ith_tensor draws, float scale, int64_t barred)
{
    if (logits.shape[0] == 0)
        return ITH_OK;
    bool wide = rows_aligned(logits, 16 / ith_dtype_bytes(logits.dtype));
#define LAUNCH(N)                                                                                  \
    choose_rows<T, N><<<(unsigned)logits.shape[0], ROW_THREADS, 0, ith_cuda_stream(ctx)>>>(        \
        (int32_t *)ids.data, (float *)probability.data, (const T *)logits.data,                    \
        is_absent(draws) ? NULL : (const float *)draws.data, logits.shape[1], logits.stride[0],    \
        scale, barred)
    ITH_BY_WIDTH(logits.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, logits);
}

/* ---- sums ---- */

/* partial[block] = sum over the block's part of a*b, a*a (SQUARE) or a. */
template <bool SQUARE>
__global__ void sum_parts(double *__restrict__ partial, const float *__restrict__ a,
                          const float *__restrict__ b, int64_t n, int64_t per_block)
{
    int64_t begin = blockIdx.x * per_block, end = begin + per_block < n ? begin + per_block : n;
    double sum = 0;
    int64_t i = begin + threadIdx.x * 4;
    bool wide = ((uintptr_t)a | (uintptr_t)b) % 16 == 0; /* begin is a multiple of 4 */
    for (; wide && i + 3 < end; i += SUM_THREADS * 4) {
        float4 x = *(const float4 *)(a + i);
        float4 y = SQUARE ? x : b ? *(const float4 *)(b + i) : make_float4(1, 1, 1, 1);
        sum += (double)x.x * y.x + (double)x.y * y.y + (double)x.z * y.z + (double)x.w * y.w;
    }
    for (; i < end; i += SUM_THREADS * 4)
        for (int64_t j = i; j < i + 4 && j < end; j++)
            sum += (double)a[j] * (SQUARE ? a[j] : b ? b[j] : 1.0f);
    sum = block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = sum;
}

__global__ void sum_partials(double *out, const double *__restrict__ partial, int count)
{
    double sum = 0;
    for (int i = (int)threadIdx.x; i < count; i += SUM_THREADS)
        sum += partial[i];
    sum = block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0)
        out[0] += sum;
}

static ith_status accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor a, const float *b,
                             bool square)
{
    int64_t n = ith_numel(a);
    if (n == 0)
        return ITH_OK;
    double *partial = (double *)ctx->scratch;
    int64_t per_block = ith_round_up(ith_div_ceil(n, SUM_BLOCKS), SUM_THREADS * 4);
    unsigned blocks = (unsigned)ith_div_ceil(n, per_block);
    cudaStream_t stream = ith_cuda_stream(ctx);
    if (square)
        sum_parts<true><<<blocks, SUM_THREADS, 0, stream>>>(partial, (const float *)a.data, NULL, n,
                                                            per_block);
    else
        sum_parts<false>
            <<<blocks, SUM_THREADS, 0, stream>>>(partial, (const float *)a.data, b, n, per_block);
    sum_partials<<<1, SUM_THREADS, 0, stream>>>((double *)out.data, partial, (int)blocks);
    return ITH_CUDA_LAUNCHED(ctx, a);
}

static int64_t dot_workspace(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b)
{
    (void)ctx, (void)out, (void)a, (void)b;
    return SUM_BLOCKS * (int64_t)sizeof(double);
}

static ith_status dot_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b)
{
    return accumulate(ctx, out, a, is_absent(b) ? NULL : (const float *)b.data, false);
}

static int64_t sumsq_workspace(ith_ctx *ctx, ith_tensor out, ith_tensor x)
{
    (void)ctx, (void)out, (void)x;
    return SUM_BLOCKS * (int64_t)sizeof(double);
}

static ith_status sumsq_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor x)
{
    return accumulate(ctx, out, x, NULL, true);
}

void ith_cuda_fill_loss(struct ith_backend *b)
{
    b->cross_entropy.run = cross_entropy;
    b->cross_entropy_confident.run = cross_entropy_confident;
    b->choose_ids.run = choose_ids;
    b->dot_accumulate.run = dot_accumulate;
    b->dot_accumulate.workspace = dot_workspace;
    b->sumsq_accumulate.run = sumsq_accumulate;
    b->sumsq_accumulate.workspace = sumsq_workspace;
}
