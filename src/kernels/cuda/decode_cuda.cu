/* decode_cuda.cu - attention of a few new queries against a cache.
 *
 * A block owns one query and head. Groups of lanes take keys in turn, each with its own running
 * softmax; the groups' results are joined in order at the end. Bound by reading the cache once per
 * kv head (L2 serves the other query heads of a group). NEEDSWORK: long caches with few sequences
 * leave multiprocessors idle; split the keys over blocks. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256, MAX_DIM = 512 };

struct decode_args {
    int64_t queries; /* per sequence */
    int64_t heads, kv_heads, dim;
    int64_t o_row, o_head, q_row, q_head;
    int64_t k_seq, k_row, k_head, v_seq, v_row, v_head;
    int group; /* lanes per key */
    float scale;
};

template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    decode(decode_args a, void *__restrict__ o, float *__restrict__ lse, const T *__restrict__ q,
           const T *__restrict__ k, const T *__restrict__ v, const int32_t *__restrict__ lengths)
{
    extern __shared__ float shared[]; /* per group: dim values, then max, sum */
    int groups = THREADS / a.group, g = (int)threadIdx.x / a.group;
    int lane = (int)threadIdx.x % a.group, dim = (int)a.dim;
    int64_t row = blockIdx.x, h = blockIdx.y, b = row / a.queries;
    int64_t kv = h / (a.heads / a.kv_heads);
    int64_t n = lengths[b] - (a.queries - 1 - row % a.queries);
    const T *kb = k + b * a.k_seq + kv * a.k_head, *vb = v + b * a.v_seq + kv * a.v_head;
    float x[ITEMS][N], acc[ITEMS][N] = {}, max = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int d = (i * a.group + lane) * N;
        if (d < dim)
            load_f32<T, N>(x[i], q + row * a.q_row + h * a.q_head + d);
    }
    for (int64_t j0 = 0; j0 < n; j0 += groups) { /* all lanes take part in the shuffles */
        int64_t j = j0 + g;
        bool live = j < n;
        float s = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= dim || !live)
                break;
            float y[N];
            load_f32<T, N>(y, kb + j * a.k_row + d);
#pragma unroll
            for (int m = 0; m < N; m++)
                s += x[i][m] * y[m];
        }
        s = group_sum(s, a.group) * a.scale;
        if (!live)
            continue;
        float top = fmaxf(max, s), back = expf(max - top), p = expf(s - top);
        sum = sum * back + p;
        max = top;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int d = (i * a.group + lane) * N;
            if (d >= dim)
                break;
            float y[N];
            load_f32<T, N>(y, vb + j * a.v_row + d);
#pragma unroll
            for (int m = 0; m < N; m++)
                acc[i][m] = acc[i][m] * back + p * y[m];
        }
    }
    float *own = shared + g * (dim + 2);
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int m = 0; m < N; m++) {
            int d = (i * a.group + lane) * N + m;
            if (d < dim)
                own[d] = acc[i][m];
        }
    if (lane == 0) {
        own[dim] = max;
        own[dim + 1] = sum;
    }
    __syncthreads();
    float top = -INFINITY, total = 0;
    for (int i = 0; i < groups; i++)
        top = fmaxf(top, shared[i * (dim + 2) + dim]);
    for (int i = 0; i < groups && n > 0; i++)
        total += shared[i * (dim + 2) + dim + 1] * expf(shared[i * (dim + 2) + dim] - top);
    for (int d = (int)threadIdx.x; d < dim; d += THREADS) {
        float value = 0;
        for (int i = 0; i < groups && n > 0; i++)
            value += shared[i * (dim + 2) + d] * expf(shared[i * (dim + 2) + dim] - top);
        value = n > 0 ? value / total : 0.0f;
        int64_t at = row * a.o_row + h * a.o_head + d;
        if (lse) /* a part: f32 */
            ((float *)o)[at] = value;
        else
            ((T *)o)[at] = from_f32<T>(value);
    }
    if (lse && threadIdx.x == 0)
        lse[row * a.heads + h] = n > 0 ? top + logf(total) : -INFINITY;
}

static decode_args args_of(ith_tensor o, ith_tensor q, ith_tensor k, ith_tensor v, float scale)
{
    decode_args a = {};
    a.queries = q.shape[0] / k.shape[0];
    a.heads = q.shape[1];
    a.kv_heads = k.shape[2];
    a.dim = q.shape[2];
    a.o_row = o.stride[0];
    a.o_head = o.stride[1];
    a.q_row = q.stride[0];
    a.q_head = q.stride[1];
    a.k_seq = k.stride[0];
    a.k_row = k.stride[1];
    a.k_head = k.stride[2];
    a.v_seq = v.stride[0];
    a.v_row = v.stride[1];
    a.v_head = v.stride[2];
    a.scale = scale;
    return a;
}

ith_status ith_cuda_attention_decode(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                     ith_tensor k_cache, ith_tensor v_cache, ith_tensor lengths,
                                     float scale)
{
    if (ith_numel(q) == 0)
        return ITH_OK;
    int64_t n = 16 / ith_dtype_bytes(q.dtype);
    bool wide = rows_aligned(q, n) && rows_aligned(k_cache, n) && rows_aligned(v_cache, n);
    decode_args a = args_of(o, q, k_cache, v_cache, scale);
    if (a.dim > MAX_DIM)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "head_dim %lld; the most is %d",
                        (long long)a.dim, MAX_DIM);
    for (a.group = 1; a.group < 32 && a.group * (wide ? n : 1) < a.dim;)
        a.group *= 2;
    dim3 grid((unsigned)q.shape[0], (unsigned)q.shape[1]);
    size_t bytes = (size_t)(THREADS / a.group * (a.dim + 2)) * sizeof(float);
#define LAUNCH(N)                                                                                  \
    decode<T, N, MAX_DIM / 32 / N><<<grid, THREADS, bytes, ith_cuda_stream(ctx)>>>(                \
        a, o.data, lse.ndim ? (float *)lse.data : NULL, (const T *)q.data,                         \
        (const T *)k_cache.data, (const T *)v_cache.data, (const int32_t *)lengths.data)
    ITH_BY_WIDTH(q.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, q);
}
