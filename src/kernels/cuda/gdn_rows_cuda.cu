/* gdn_rows_cuda.cu - what Gated DeltaNet does beside the delta rule: causal convolution with SiLU,
 * gates, gated RMSNorm. All are bound by memory. Sums over rows: a block sums its own rows, then
 * the blocks' sums are added in order of the block; block counts are constants. */
#include "kernels/cuda/common.cuh"

/* Within a few units in the last place. e^-x = inf gives 0, as it should. */
__device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

/* ---- convolution: a thread owns N channels of a run of rows and slides a window along it; while
 * it works on AHEAD rows, the next ones come. Where these lie within a document nothing is asked
 * ---- */

enum { CONV_THREADS = 128, CONV_RUN = 64, CONV_RUNS = 64, AHEAD = 4, MOST_TAPS = 16 };

struct conv_args {
    int64_t rows, width, docs, run; /* run: rows of a thread */
    int64_t y, x, dy;               /* row strides, elements; y: dx in backward */
    int64_t history, history_doc;   /* strides of a row and of a document */
    int taps;
    const int32_t *cu_seqlens;
};

/* Four taps are known when compiled; MOST_TAPS stands for any number. */
template <int K> __device__ __forceinline__ int taps_of(const conv_args &a)
{
    return K < MOST_TAPS ? K : a.taps;
}

/* The document of row t: the last one that begins at or before it. */
__device__ __forceinline__ int64_t doc_of(const conv_args &a, int64_t t)
{
    int64_t low = 0, high = a.docs;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (a.cu_seqlens[middle] <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* w[j][i]: tap j of channel c + i. Four taps of N channels lie side by side and are aligned. */
template <typename T, int N, int K>
__device__ __forceinline__ void load_taps(float (&out)[K][N], const T *w, int64_t c, int taps)
{
    if constexpr (K < MOST_TAPS && N > 1) {
        alignas(16) T all[N * K];
#pragma unroll
        for (int i = 0; i < N * K; i += WIDE<T>)
            *reinterpret_cast<vec<T, WIDE<T>> *>(all + i) =
                *reinterpret_cast<const vec<T, WIDE<T>> *>(w + c * K + i);
#pragma unroll
        for (int j = 0; j < K; j++)
#pragma unroll
            for (int i = 0; i < N; i++)
                out[j][i] = to_f32(all[i * K + j]);
    } else {
#pragma unroll
        for (int j = 0; j < K; j++)
#pragma unroll
            for (int i = 0; i < N; i++)
                out[j][i] = j < taps ? to_f32(w[(c + i) * taps + j]) : 0.0f;
    }
}

/* Input row t of document doc, which begins at `begin`; before it: from history, or zero. */
template <typename T, int N>
__device__ __forceinline__ void load_input(float (&out)[N], const conv_args &a, const T *x,
                                           const T *history, int64_t doc, int64_t begin, int64_t t,
                                           int64_t c, int taps)
{
    if (t >= begin)
        load_any<T, N>(out, x + t * a.x + c);
    else if (history && t >= begin - taps + 1)
        load_any<T, N>(out, history + doc * a.history_doc + (taps - 1 + t - begin) * a.history + c);
    else
#pragma unroll
        for (int i = 0; i < N; i++)
            out[i] = 0;
}

template <typename T, int N>
__device__ __forceinline__ void unpack(float (&out)[N], const vec<T, N> &x)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        out[i] = to_f32(x.v[i]);
}

/* The next row x comes into the window, whose last used row it becomes, and y leaves it. */
template <typename T, int N, int K>
__device__ __forceinline__ void slide(float (&window)[K][N], const float (&taps)[K][N],
                                      const vec<T, N> &x, T *y, int used)
{
    float sum[N] = {};
#pragma unroll
    for (int j = 0; j < K; j++)
        if (j + 1 == used)
            unpack<T, N>(window[j], x);
#pragma unroll
    for (int j = 0; j < K; j++)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (j < used)
                sum[i] += taps[j][i] * window[j][i];
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] *= sigmoid(sum[i]);
    store_f32<T, N>(y, sum);
#pragma unroll
    for (int j = 0; j + 1 < K; j++)
#pragma unroll
        for (int i = 0; i < N; i++)
            window[j][i] = window[j + 1][i];
}

/* window[j] is row t - taps + 1 + j. */
template <typename T, int N, int K>
__global__ void __launch_bounds__(CONV_THREADS)
    conv_forward(conv_args a, T *__restrict__ y, const T *__restrict__ x, const T *__restrict__ w,
                 const T *__restrict__ history)
{
    int64_t c = ((int64_t)blockIdx.x * CONV_THREADS + threadIdx.x) * N;
    int64_t first = (int64_t)blockIdx.y * a.run;
    int64_t last = first + a.run < a.rows ? first + a.run : a.rows;
    int used = taps_of<K>(a);
    if (c >= a.width || first >= last)
        return;
    float taps[K][N], window[K][N];
    vec<T, N> rows[AHEAD], ahead[AHEAD];
    load_taps<T, N, K>(taps, w, c, used);
    int64_t doc = doc_of(a, first), begin = a.cu_seqlens[doc], end = a.cu_seqlens[doc + 1];
    bool fresh = true; /* the window is of another document */
#pragma unroll
    for (int r = 0; r < AHEAD; r++)
        if (first + r < last)
            ahead[r] = *reinterpret_cast<const vec<T, N> *>(x + (first + r) * a.x + c);
    for (int64_t from = first; from < last; from += AHEAD) {
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            rows[r] = ahead[r];
            if (from + AHEAD + r < last)
                ahead[r] = *reinterpret_cast<const vec<T, N> *>(x + (from + AHEAD + r) * a.x + c);
        }
        if (!fresh && from + AHEAD <= (end < last ? end : last)) {
#pragma unroll
            for (int r = 0; r < AHEAD; r++)
                slide<T, N, K>(window, taps, rows[r], y + (from + r) * a.y + c, used);
            continue;
        }
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            int64_t t = from + r;
            if (t >= last)
                break;
            while (t >= end) {
                doc++;
                begin = end;
                end = a.cu_seqlens[doc + 1];
                fresh = true;
            }
            if (fresh)
#pragma unroll
                for (int j = 0; j < K; j++)
                    if (j + 1 < used)
                        load_input<T, N>(window[j], a, x, history, doc, begin, t - used + 1 + j, c,
                                         used);
            fresh = false;
            slide<T, N, K>(window, taps, rows[r], y + t * a.y + c, used);
        }
    }
}

/* history <- the last taps - 1 inputs, oldest first: a row is read before it is overwritten. */
template <typename T> __global__ void conv_keep(conv_args a, T *history, const T *x)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, doc = blockIdx.y;
    int64_t begin = a.cu_seqlens[doc], end = a.cu_seqlens[doc + 1];
    if (c >= a.width)
        return;
    T *own = history + doc * a.history_doc + c;
    for (int64_t r = 0; r + 1 < a.taps; r++) {
        int64_t t = end - a.taps + 1 + r;
        own[r * a.history] =
            t >= begin ? x[t * a.x + c] : own[(a.taps - 1 + t - begin) * a.history];
    }
}

/* What a thread carries from a row to the one before: the window of inputs from row t - taps + 1
 * on; dc[i], the gradient of the sum at row t + i; and the sums of dw. */
template <int N, int K> struct conv_back {
    float taps[K][N], window[K][N], dc[K][N], dw[K][N];
};

/* Goes to row t, whose oldest input is x; OWN: the row is of this run, else only dc is wanted. */
template <bool OWN, typename T, int N, int K>
__device__ __forceinline__ void slide_back(conv_back<N, K> &s, const float (&x)[N],
                                           const vec<T, N> &dy, T *dx, int used)
{
    float sum[N] = {}, grad[N];
    unpack<T, N>(grad, dy);
#pragma unroll
    for (int i = 0; i < N; i++)
        s.window[0][i] = x[i];
#pragma unroll
    for (int j = 0; j < K; j++)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (j < used)
                sum[i] += s.taps[j][i] * s.window[j][i];
#pragma unroll
    for (int i = 0; i < N; i++) {
        float f = sigmoid(sum[i]);
        s.dc[0][i] = grad[i] * (f + sum[i] * (f - f * f));
    }
    if (OWN) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] = 0;
#pragma unroll
            for (int j = 0; j < K; j++)
                if (j < used)
                    s.dw[j][i] += s.dc[0][i] * s.window[j][i];
#pragma unroll
            for (int j = 0; j < K; j++)
#pragma unroll
                for (int e = 0; e < K; e++)
                    if (e == used - 1 - j)
                        sum[i] += s.taps[j][i] * s.dc[e][i];
        }
        store_f32<T, N>(dx, sum);
    }
}

/* Room for the row before; fresh: it is of another document. */
template <int N, int K> __device__ __forceinline__ void shift_back(conv_back<N, K> &s, bool fresh)
{
#pragma unroll
    for (int j = K - 1; j > 0; j--)
#pragma unroll
        for (int i = 0; i < N; i++) {
            s.window[j][i] = s.window[j - 1][i];
            s.dc[j][i] = fresh ? 0.0f : s.dc[j - 1][i];
        }
}

/* Rows t of dy and t - taps + 1 of x for t = from, from - 1, ... */
template <typename T, int N>
__device__ __forceinline__ void load_back(vec<T, N> (&inputs)[AHEAD], vec<T, N> (&grads)[AHEAD],
                                          const conv_args &a, const T *x, const T *dy, int64_t from,
                                          int64_t first, int64_t c, int used)
{
#pragma unroll
    for (int r = 0; r < AHEAD; r++) {
        int64_t t = from - r, oldest = t - used + 1;
        if (t >= first)
            grads[r] = *reinterpret_cast<const vec<T, N> *>(dy + t * a.dy + c);
        if (t >= first && oldest >= 0)
            inputs[r] = *reinterpret_cast<const vec<T, N> *>(x + oldest * a.x + c);
    }
}

/* From the run's last row down, taps - 1 rows of the next run first.
 * partial: [runs, width * taps] or NULL. */
template <typename T, int N, int K>
__global__ void __launch_bounds__(CONV_THREADS, 4)
    conv_backward(conv_args a, T *__restrict__ dx, float *__restrict__ partial,
                  const T *__restrict__ dy, const T *__restrict__ x, const T *__restrict__ w)
{
    int64_t c = ((int64_t)blockIdx.x * CONV_THREADS + threadIdx.x) * N;
    int64_t first = (int64_t)blockIdx.y * a.run;
    int64_t last = first + a.run < a.rows ? first + a.run : a.rows;
    int used = taps_of<K>(a);
    if (c >= a.width)
        return;
    conv_back<N, K> s = {};
    load_taps<T, N, K>(s.taps, w, c, used);
    int64_t top = last + used - 2 < a.rows ? last + used - 2 : a.rows - 1;
    int64_t doc = doc_of(a, top), begin = a.cu_seqlens[doc];
    int64_t from = first < last ? top : first - 1;
    bool fresh = true; /* the window is of another document */
    vec<T, N> inputs[AHEAD], grads[AHEAD], next_inputs[AHEAD], next_grads[AHEAD];
    load_back<T, N>(next_inputs, next_grads, a, x, dy, from, first, c, used);
    for (; from >= first; from -= AHEAD) {
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            inputs[r] = next_inputs[r];
            grads[r] = next_grads[r];
        }
        load_back<T, N>(next_inputs, next_grads, a, x, dy, from - AHEAD, first, c, used);
        int64_t lowest = from - AHEAD + 1;
        if (!fresh && from < last && lowest >= first && lowest - used + 1 >= begin) {
#pragma unroll
            for (int r = 0; r < AHEAD; r++) {
                float input[N];
                unpack<T, N>(input, inputs[r]);
                shift_back(s, false);
                slide_back<true, T, N, K>(s, input, grads[r], dx + (from - r) * a.y + c, used);
            }
            continue;
        }
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            int64_t t = from - r;
            float input[N] = {};
            if (t < first)
                break;
            while (t < begin) {
                doc--;
                begin = a.cu_seqlens[doc];
                fresh = true;
            }
            shift_back(s, fresh);
            if (fresh)
#pragma unroll
                for (int j = 1; j < K; j++)
                    if (j < used)
                        load_input<T, N>(s.window[j], a, x, (const T *)NULL, doc, begin,
                                         t - used + 1 + j, c, used);
            fresh = false;
            if (t - used + 1 >= begin)
                unpack<T, N>(input, inputs[r]);
            if (t < last)
                slide_back<true, T, N, K>(s, input, grads[r], dx + t * a.y + c, used);
            else /* another run's row */
                slide_back<false, T, N, K>(s, input, grads[r], NULL, used);
        }
    }
    if (partial)
#pragma unroll
        for (int j = 0; j < K; j++)
#pragma unroll
            for (int i = 0; i < N; i++)
                if (j < used)
                    partial[((int64_t)blockIdx.y * a.width + c + i) * used + j] = s.dw[j][i];
}

/* Calls F(N, K). */
#define BY_TAPS(taps, wide, F)                                                                     \
    do {                                                                                           \
        if ((taps) == 4 && (wide))                                                                 \
            F(4, 4);                                                                               \
        else if ((taps) == 4)                                                                      \
            F(1, 4);                                                                               \
        else                                                                                       \
            F(1, MOST_TAPS);                                                                       \
    } while (0)

static ith_status check_taps(ith_ctx *ctx, ith_tensor w)
{
    if (w.shape[1] > MOST_TAPS)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "%lld taps; the most is %d",
                        (long long)w.shape[1], MOST_TAPS);
    return ITH_OK;
}

static conv_args conv_args_of(ith_tensor y, ith_tensor x, ith_tensor w, ith_tensor dy,
                              ith_tensor history, ith_seqs seqs, int64_t run)
{
    conv_args a = {x.shape[0],
                   x.shape[1],
                   seqs.num_docs,
                   run,
                   y.stride[0],
                   x.stride[0],
                   dy.stride[0],
                   history.stride[1],
                   history.stride[0],
                   (int)w.shape[1],
                   (const int32_t *)seqs.cu_seqlens.data};
    return a;
}

/* Taps of a channel lie side by side. */
static ith_status conv1d_silu_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                      ith_tensor history, ith_seqs seqs)
{
    int64_t run = ith_max_i64(CONV_RUN, ith_div_ceil(x.shape[0], 1 << 15)); /* grids end at 2^16 */
    conv_args a = conv_args_of(y, x, w, y, history, seqs, run);
    int64_t n = 4;
    bool wide = rows_aligned(y, n) && rows_aligned(x, n) && rows_aligned(history, n) &&
                (uintptr_t)w.data % 16 == 0;
    ITH_TRY(check_taps(ctx, w));
    ITH_ASSERT(ith_is_contiguous(w));
    if (x.shape[0] == 0 || x.shape[1] == 0)
        return ITH_OK;
#define LAUNCH(N, K)                                                                               \
    conv_forward<T, N, K><<<dim3((unsigned)ith_div_ceil(a.width, CONV_THREADS *N),                 \
                                 (unsigned)ith_div_ceil(a.rows, run)),                             \
                            CONV_THREADS, 0, ith_cuda_stream(ctx)>>>(                              \
        a, (T *)y.data, (const T *)x.data, (const T *)w.data, (const T *)history.data)
    ITH_BY_TYPE(x.dtype, {
        BY_TAPS(a.taps, wide, LAUNCH);
        if (!is_absent(history))
            conv_keep<T><<<dim3((unsigned)ith_div_ceil(a.width, CONV_THREADS), (unsigned)a.docs),
                           CONV_THREADS, 0, ith_cuda_stream(ctx)>>>(a, (T *)history.data,
                                                                    (const T *)x.data);
    });
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static int64_t conv_runs(ith_tensor x)
{
    return ith_min_i64(CONV_RUNS, ith_div_ceil(x.shape[0], CONV_RUN));
}

static int64_t conv1d_silu_backward_workspace(ith_ctx *ctx, ith_tensor dx, ith_tensor dw,
                                              ith_tensor dy, ith_tensor x, ith_tensor w,
                                              ith_seqs seqs)
{
    (void)ctx, (void)dx, (void)dy, (void)seqs;
    return is_absent(dw) ? 0 : ith_mul_bytes(conv_runs(x) * ith_numel(w), 4);
}

static ith_status conv1d_silu_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                       ith_tensor x, ith_tensor w, ith_seqs seqs)
{
    if (x.shape[0] == 0 || x.shape[1] == 0)
        return ITH_OK;
    int64_t runs = conv_runs(x), n = 4;
    conv_args a =
        conv_args_of(dx, x, w, dy, ith_tensor_none(), seqs, ith_div_ceil(x.shape[0], runs));
    bool wide = rows_aligned(dx, n) && rows_aligned(dy, n) && rows_aligned(x, n) &&
                (uintptr_t)w.data % 16 == 0;
    float *partial = is_absent(dw) ? NULL : (float *)ctx->scratch;
    ITH_TRY(check_taps(ctx, w));
    ITH_ASSERT(ith_is_contiguous(w) && (is_absent(dw) || ith_is_contiguous(dw)));
#define LAUNCH(N, K)                                                                               \
    conv_backward<T, N, K>                                                                         \
        <<<dim3((unsigned)ith_div_ceil(a.width, CONV_THREADS *N), (unsigned)runs), CONV_THREADS,   \
           0, ith_cuda_stream(ctx)>>>(a, (T *)dx.data, partial, (const T *)dy.data,                \
                                      (const T *)x.data, (const T *)w.data)
    ITH_BY_TYPE(x.dtype, {
        if (a.taps == 4 && wide)
            LAUNCH(4, 4);
        else if (a.taps == 4)
            LAUNCH(1, 4);
        else
            LAUNCH(1, MOST_TAPS);
    });
#undef LAUNCH
    if (partial) {
        ith_columns sum = {(float *)dw.data, partial, runs};
        ith_cuda_add_columns(ith_cuda_stream(ctx), &sum, 1, a.width * a.taps);
    }
    return ITH_CUDA_LAUNCHED(ctx, x);
}

/* ---- gates ---- */

enum { GATE_THREADS = 256, GATE_BLOCKS = ITH_CUDA_SMS * 2, GATE_LANES = 8 };

struct gate_args {
    int64_t rows, heads;
    int64_t g, beta, a, b, da, db; /* row strides, elements; g, beta: dg, dbeta in backward */
};

__device__ __forceinline__ float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

template <typename T>
__global__ void gates_fwd(gate_args s, float *__restrict__ g, float *__restrict__ beta,
                          const T *__restrict__ a, const T *__restrict__ b,
                          const float *__restrict__ a_log, const T *__restrict__ dt_bias)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < s.rows * s.heads;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t t = i / s.heads, h = i % s.heads;
        g[t * s.g + h] = -expf(a_log[h]) * softplus(to_f32(a[t * s.a + h]) + to_f32(dt_bias[h]));
        beta[t * s.beta + h] = round_to<T>(sigmoid(to_f32(b[t * s.b + h])));
    }
}

/* 32 heads by GATE_LANES rows; partial: [2][blocks, heads] of da_log and ddt_bias, or NULL. */
template <typename T>
__global__ void __launch_bounds__(GATE_THREADS)
    gates_bwd(gate_args s, T *__restrict__ da, T *__restrict__ db, float *__restrict__ partial,
              const float *__restrict__ dg, const float *__restrict__ dbeta,
              const T *__restrict__ a, const T *__restrict__ b, const float *__restrict__ a_log,
              const T *__restrict__ dt_bias)
{
    __shared__ float part[2][GATE_LANES][33];
    int lane = (int)threadIdx.x % 32, slot = (int)threadIdx.x / 32;
    int64_t h = (int64_t)blockIdx.y * 32 + lane;
    float logs = 0, biases = 0;
    if (h < s.heads) {
        float rate = -expf(a_log[h]), bias = to_f32(dt_bias[h]);
        for (int64_t t = (int64_t)blockIdx.x * GATE_LANES + slot; t < s.rows;
             t += (int64_t)gridDim.x * GATE_LANES) {
            float x = to_f32(a[t * s.a + h]) + bias, grad = dg[t * s.g + h];
            float through = rate * (x > 20.0f ? 1.0f : sigmoid(x)) * grad;
            float open = round_to<T>(sigmoid(to_f32(b[t * s.b + h])));
            da[t * s.da + h] = from_f32<T>(through);
            db[t * s.db + h] = from_f32<T>(dbeta[t * s.beta + h] * open * (1.0f - open));
            logs += rate * softplus(x) * grad;
            biases += through;
        }
    }
    part[0][slot][lane] = logs;
    part[1][slot][lane] = biases;
    __syncthreads();
    if (slot < 2 && partial && h < s.heads) {
        float sum = 0;
        for (int i = 0; i < GATE_LANES; i++)
            sum += part[slot][i][lane];
        partial[((int64_t)slot * gridDim.x + blockIdx.x) * s.heads + h] = sum;
    }
}

static ith_status gdn_gates_forward(ith_ctx *ctx, ith_tensor g, ith_tensor beta, ith_tensor a,
                                    ith_tensor b, ith_tensor a_log, ith_tensor dt_bias)
{
    gate_args s = {a.shape[0],  a.shape[1],  g.stride[0], beta.stride[0],
                   a.stride[0], b.stride[0], 0,           0};
    if (s.rows * s.heads == 0)
        return ITH_OK;
    ITH_BY_TYPE(a.dtype,
                (gates_fwd<T><<<grid_of(s.rows * s.heads, GATE_THREADS, 1 << 20), GATE_THREADS, 0,
                                ith_cuda_stream(ctx)>>>(
                    s, (float *)g.data, (float *)beta.data, (const T *)a.data, (const T *)b.data,
                    (const float *)a_log.data, (const T *)dt_bias.data)));
    return ITH_CUDA_LAUNCHED(ctx, a);
}

static int64_t gate_blocks(ith_tensor a)
{
    return ith_min_i64(GATE_BLOCKS, ith_div_ceil(a.shape[0], GATE_LANES));
}

static int64_t gdn_gates_backward_workspace(ith_ctx *ctx, ith_tensor da, ith_tensor db,
                                            ith_tensor da_log, ith_tensor ddt_bias, ith_tensor dg,
                                            ith_tensor dbeta, ith_tensor a, ith_tensor b,
                                            ith_tensor a_log, ith_tensor dt_bias)
{
    (void)ctx, (void)da, (void)db, (void)dg, (void)dbeta, (void)b, (void)a_log, (void)dt_bias;
    return is_absent(da_log) && is_absent(ddt_bias)
               ? 0
               : ith_mul_bytes(2 * gate_blocks(a) * a.shape[1], 4);
}

static ith_status gdn_gates_backward(ith_ctx *ctx, ith_tensor da, ith_tensor db, ith_tensor da_log,
                                     ith_tensor ddt_bias, ith_tensor dg, ith_tensor dbeta,
                                     ith_tensor a, ith_tensor b, ith_tensor a_log,
                                     ith_tensor dt_bias)
{
    gate_args s = {a.shape[0],  a.shape[1],  dg.stride[0], dbeta.stride[0],
                   a.stride[0], b.stride[0], da.stride[0], db.stride[0]};
    if (s.rows * s.heads == 0)
        return ITH_OK;
    bool sums = !is_absent(da_log) || !is_absent(ddt_bias);
    int64_t blocks = gate_blocks(a);
    float *partial = sums ? (float *)ctx->scratch : NULL;
    dim3 grid((unsigned)blocks, (unsigned)ith_div_ceil(s.heads, 32));
    ITH_BY_TYPE(a.dtype, (gates_bwd<T><<<grid, GATE_THREADS, 0, ith_cuda_stream(ctx)>>>(
                             s, (T *)da.data, (T *)db.data, partial, (const float *)dg.data,
                             (const float *)dbeta.data, (const T *)a.data, (const T *)b.data,
                             (const float *)a_log.data, (const T *)dt_bias.data)));
    ith_columns all[] = {{(float *)da_log.data, partial, blocks},
                         {(float *)ddt_bias.data, partial + blocks * s.heads, blocks}};
    if (!is_absent(da_log))
        ith_cuda_add_columns(ith_cuda_stream(ctx), &all[0], 1, s.heads);
    if (!is_absent(ddt_bias))
        ith_cuda_add_columns(ith_cuda_stream(ctx), &all[1], 1, s.heads);
    return ITH_CUDA_LAUNCHED(ctx, a);
}

/* ---- gated RMSNorm: LANES lanes own a head of a token, a lane N elements by ITEMS of it; a warp
 * works on GROUP rounds of heads at once: all are read before the first is worked on, and before
 * any is written ---- */

enum { NORM_WARPS = 8, NORM_BLOCKS = ITH_CUDA_SMS * 4, GROUP = 2 };

struct gated_args {
    ith_tensor y, x, z, dy, dx, dz; /* y: forward; dy, dx, dz: backward */
    float eps;
};

/* Where a warp is: `rounds` of its heads make a token. */
template <int LANES> struct gated_place {
    int64_t t, h;
    __device__ __forceinline__ gated_place(int64_t turn, int64_t heads)
    {
        constexpr int HEADS = 32 / LANES * GROUP;
        int64_t rounds = (heads + HEADS - 1) / HEADS;
        t = turn / rounds;
        h = turn % rounds * HEADS + (int)threadIdx.x % 32 / LANES;
    }
};

/* Elements of head h of row t, zero behind the vector's end and the last head. */
template <int ITEMS, int LANES, typename T, int N>
__device__ __forceinline__ void load_vector(vec<T, N> (&x)[ITEMS], const ith_tensor &from,
                                            int64_t t, int64_t h)
{
    const T *vector = (const T *)from.data + t * from.stride[0] + h * from.stride[1];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = (int64_t)(i * LANES + (int)threadIdx.x % LANES) * N;
        x[i] = d < from.shape[2] && h < from.shape[1]
                   ? *reinterpret_cast<const vec<T, N> *>(vector + d)
                   : vec<T, N>{};
    }
}

template <int ITEMS, typename T, int N>
__device__ __forceinline__ void unpack_all(float (&out)[ITEMS][N], const vec<T, N> (&x)[ITEMS])
{
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        unpack<T, N>(out[i], x[i]);
}

template <typename T, int N, int ITEMS, int LANES>
__device__ __forceinline__ void store_vector(const ith_tensor &to, int64_t t, int64_t h,
                                             const float (&x)[ITEMS][N])
{
    T *vector = (T *)to.data + t * to.stride[0] + h * to.stride[1];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = (int64_t)(i * LANES + (int)threadIdx.x % LANES) * N;
        if (d < to.shape[2] && h < to.shape[1])
            store_f32<T, N>(vector + d, x[i]);
    }
}

/* w, zero behind its end. */
template <int N, int ITEMS, int LANES>
__device__ __forceinline__ void load_weight(float (&f)[ITEMS][N], const float *w, int64_t dim)
{
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int j = 0; j < N; j++) {
            int64_t d = (int64_t)(i * LANES + (int)threadIdx.x % LANES) * N + j;
            f[i][j] = d < dim ? w[d] : 0.0f;
        }
}

template <int N, int ITEMS, int LANES>
__device__ __forceinline__ float rstd_of(const float (&x)[ITEMS][N], int64_t dim, float eps)
{
    float squares = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            squares += x[i][j] * x[i][j];
    return rsqrtf(group_sum(squares, LANES) / (float)dim + eps);
}

template <typename T, int N, int ITEMS, int LANES>
__global__ void __launch_bounds__(NORM_WARPS * 32, 4)
    gated_fwd(gated_args a, const float *w, int64_t turns)
{
    int64_t dim = a.x.shape[2];
    float f[ITEMS][N];
    load_weight<N, ITEMS, LANES>(f, w, dim);
    for (int64_t turn = (int64_t)blockIdx.x * NORM_WARPS + threadIdx.x / 32; turn < turns;
         turn += (int64_t)gridDim.x * NORM_WARPS) {
        gated_place<LANES> p(turn, a.x.shape[1]);
        vec<T, N> xs[GROUP][ITEMS], zs[GROUP][ITEMS];
#pragma unroll
        for (int v = 0; v < GROUP; v++) {
            load_vector<ITEMS, LANES>(xs[v], a.x, p.t, p.h + v * (32 / LANES));
            load_vector<ITEMS, LANES>(zs[v], a.z, p.t, p.h + v * (32 / LANES));
        }
#pragma unroll
        for (int v = 0; v < GROUP; v++) {
            float x[ITEMS][N], z[ITEMS][N];
            unpack_all(x, xs[v]);
            unpack_all(z, zs[v]);
            float r = rstd_of<N, ITEMS, LANES>(x, dim, a.eps);
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    x[i][j] = f[i][j] * round_to<T>(x[i][j] * r) * (z[i][j] * sigmoid(z[i][j]));
            store_vector<T, N, ITEMS, LANES>(a.y, p.t, p.h + v * (32 / LANES), x);
        }
    }
}

/* partial: [blocks, dim] of dw, or NULL. */
template <typename T, int N, int ITEMS, int LANES>
__global__ void __launch_bounds__(NORM_WARPS * 32)
    gated_bwd(gated_args a, float *__restrict__ partial, const float *__restrict__ w, int64_t turns)
{
    __shared__ float joined[NORM_WARPS][32 * N * ITEMS];
    int64_t dim = a.x.shape[2];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float dw[ITEMS][N] = {}, f[ITEMS][N];
    load_weight<N, ITEMS, LANES>(f, w, dim);
    for (int64_t turn = (int64_t)blockIdx.x * NORM_WARPS + warp; turn < turns;
         turn += (int64_t)gridDim.x * NORM_WARPS) {
        gated_place<LANES> p(turn, a.x.shape[1]);
        vec<T, N> xs[GROUP][ITEMS], zs[GROUP][ITEMS], gs[GROUP][ITEMS];
#pragma unroll
        for (int v = 0; v < GROUP; v++) {
            int64_t h = p.h + v * (32 / LANES);
            load_vector<ITEMS, LANES>(xs[v], a.x, p.t, h);
            load_vector<ITEMS, LANES>(zs[v], a.z, p.t, h);
            load_vector<ITEMS, LANES>(gs[v], a.dy, p.t, h);
        }
#pragma unroll
        for (int v = 0; v < GROUP; v++) {
            float x[ITEMS][N], z[ITEMS][N], g[ITEMS][N], dot = 0;
            unpack_all(x, xs[v]);
            unpack_all(z, zs[v]);
            unpack_all(g, gs[v]);
            float r = rstd_of<N, ITEMS, LANES>(x, dim, a.eps);
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
#pragma unroll
                for (int j = 0; j < N; j++) {
                    float gate = z[i][j], s = sigmoid(gate), xh = x[i][j] * r;
                    float through = g[i][j] * gate * s, grad = g[i][j] * f[i][j];
                    dw[i][j] += through * xh;
                    through *= f[i][j];
                    dot += through * xh;
                    x[i][j] = xh;
                    g[i][j] = through;
                    z[i][j] = grad * xh * (s + gate * (s - s * s));
                }
            float mean = group_sum(dot, LANES) / (float)dim;
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    g[i][j] = r * (g[i][j] - x[i][j] * mean);
            store_vector<T, N, ITEMS, LANES>(a.dx, p.t, p.h + v * (32 / LANES), g);
            store_vector<T, N, ITEMS, LANES>(a.dz, p.t, p.h + v * (32 / LANES), z);
        }
    }
    if (!partial)
        return;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            joined[warp][(i * 32 + lane) * N + j] = dw[i][j];
    __syncthreads();
    for (int64_t d = threadIdx.x; d < dim; d += NORM_WARPS * 32) {
        float sum = 0;
        for (int i = 0; i < NORM_WARPS; i++)
            for (int own = 0; own < 32; own += LANES) /* item, lane, element of the lane */
                sum += joined[i][(d / N / LANES * 32 + own + d / N % LANES) * N + d % N];
        partial[blockIdx.x * dim + d] = sum;
    }
}

/* Calls F(N, ITEMS, LANES). wide: rows start at 16-byte aligned addresses. */
#define BY_DIM(dim, wide, F)                                                                       \
    do {                                                                                           \
        if ((wide) && (dim) <= 128)                                                                \
            F(WIDE<T>, 1, 128 / WIDE<T>);                                                          \
        else                                                                                       \
            F(1, 8, 32);                                                                           \
    } while (0)

template <int LANES> static int64_t norm_turns(ith_tensor x)
{
    return x.shape[0] * ith_div_ceil(x.shape[1], 32 / LANES * GROUP);
}

static ith_status check_dim(ith_ctx *ctx, ith_tensor x)
{
    if (x.shape[2] > 256)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "heads of %lld elements; the most is 256",
                        (long long)x.shape[2]);
    return ITH_OK;
}

static ith_status gated_rmsnorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor z,
                                        ith_tensor w, float eps)
{
    gated_args a = {y, x, z, ith_tensor_none(), ith_tensor_none(), ith_tensor_none(), eps};
    ITH_TRY(check_dim(ctx, x));
    if (x.shape[0] * x.shape[1] == 0)
        return ITH_OK;
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    bool wide = rows_aligned(y, n) && rows_aligned(x, n) && rows_aligned(z, n);
#define LAUNCH(N, ITEMS, LANES)                                                                    \
    gated_fwd<T, N, ITEMS, LANES>                                                                  \
        <<<grid_of(norm_turns<LANES>(x), NORM_WARPS, INT32_MAX), NORM_WARPS * 32, 0,               \
           ith_cuda_stream(ctx)>>>(a, (const float *)w.data, norm_turns<LANES>(x))
    ITH_BY_TYPE(x.dtype, BY_DIM(x.shape[2], wide, LAUNCH));
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, x);
}

static int64_t gated_rmsnorm_backward_workspace(ith_ctx *ctx, ith_tensor dx, ith_tensor dz,
                                                ith_tensor dw, ith_tensor dy, ith_tensor x,
                                                ith_tensor z, ith_tensor w, float eps)
{
    (void)ctx, (void)dx, (void)dz, (void)dy, (void)z, (void)w, (void)eps;
    return is_absent(dw) ? 0 : ith_mul_bytes(NORM_BLOCKS * x.shape[2], 4);
}

static ith_status gated_rmsnorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dz, ith_tensor dw,
                                         ith_tensor dy, ith_tensor x, ith_tensor z, ith_tensor w,
                                         float eps)
{
    int64_t blocks = ith_min_i64(x.shape[0], NORM_BLOCKS);
    gated_args a = {ith_tensor_none(), x, z, dy, dx, dz, eps};
    ITH_TRY(check_dim(ctx, x));
    if (x.shape[0] * x.shape[1] == 0)
        return ITH_OK;
    int64_t n = 16 / ith_dtype_bytes(x.dtype);
    bool wide = rows_aligned(dx, n) && rows_aligned(dz, n) && rows_aligned(dy, n) &&
                rows_aligned(x, n) && rows_aligned(z, n);
    float *partial = is_absent(dw) ? NULL : (float *)ctx->scratch;
#define LAUNCH(N, ITEMS, LANES)                                                                    \
    gated_bwd<T, N, ITEMS, LANES><<<(unsigned)blocks, NORM_WARPS * 32, 0, ith_cuda_stream(ctx)>>>( \
        a, partial, (const float *)w.data, norm_turns<LANES>(x))
    ITH_BY_TYPE(x.dtype, BY_DIM(x.shape[2], wide, LAUNCH));
#undef LAUNCH
    if (partial) {
        ith_columns sum = {(float *)dw.data, partial, blocks};
        ith_cuda_add_columns(ith_cuda_stream(ctx), &sum, 1, x.shape[2]);
    }
    return ITH_CUDA_LAUNCHED(ctx, x);
}

void ith_cuda_fill_gdn_rows(struct ith_backend *b)
{
    b->conv1d_silu_forward.run = conv1d_silu_forward;
    b->conv1d_silu_backward.run = conv1d_silu_backward;
    b->conv1d_silu_backward.workspace = conv1d_silu_backward_workspace;
    b->gdn_gates_forward.run = gdn_gates_forward;
    b->gdn_gates_backward.run = gdn_gates_backward;
    b->gdn_gates_backward.workspace = gdn_gates_backward_workspace;
    b->gated_rmsnorm_forward.run = gated_rmsnorm_forward;
    b->gated_rmsnorm_backward.run = gated_rmsnorm_backward;
    b->gated_rmsnorm_backward.workspace = gated_rmsnorm_backward_workspace;
}
