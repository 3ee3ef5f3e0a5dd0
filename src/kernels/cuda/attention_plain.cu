/* attention_plain.cu - flash attention in plain fp32 arithmetic, for fp32 tensors and for those
 * that nothing faster takes. Any head size up to 512, any row stride; memory O(T).
 *
 * A block owns ROWS rows of one head and walks tiles of COLS rows of the other side; 16 lanes share
 * a row. Rows of one tile may belong to several documents: every row carries its own stretches,
 * and the walk covers their unions. Backward makes the weights again from lse, once for dk and dv
 * (a block owns keys and sums over the query heads of its kv head) and once for dq: no atomics, so
 * the bits never vary. lse and delta are [T,Hq]. */
#include "kernels/cuda/attention_mask.cuh"

enum { ROWS = 16, LANES = 16, COLS = 32, THREADS = ROWS * LANES, MAX_DIM = 512 };

struct attn_args {
    int64_t q_heads, kv_heads, dim;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head, do_row, do_head;
    int64_t dq_row, dq_head, dk_row, dk_head, dv_row, dv_head;
    attn_mask mask;
    float scale;
    bool parts; /* results are f32 */
};

struct range {
    int32_t begin, end;
};

/* The union of the rows' stretches of one part; own[] is filled. All threads. */
__device__ __forceinline__ range union_of(const stretches *own, int part)
{
    range all = {0, 0};
    for (int i = 0; i < ROWS; i++)
        if (own[i].hi[part] > own[i].lo[part]) {
            bool first = all.end <= all.begin;
            all.begin = first ? own[i].lo[part] : min(all.begin, own[i].lo[part]);
            all.end = max(all.end, own[i].hi[part]);
        }
    return all;
}

/* Fills own[]: the stretches of the block's rows. All threads. */
__device__ __forceinline__ void find_stretches(stretches *own, const attn_mask &mask, int64_t row0,
                                               bool of_key)
{
    if (threadIdx.x < ROWS)
        own[threadIdx.x] = stretches_of(mask, row0 + threadIdx.x, of_key);
    __syncthreads();
}

/* to[row][d] = from[row0 + row, head, d] in f32, zero past the end; rows of `pitch` floats. */
template <typename T>
__device__ __forceinline__ void load_rows(float *to, int pitch, const T *from, int64_t row0,
                                          int64_t end, int rows, int64_t row_stride, int dim)
{
    for (int n = (int)threadIdx.x; n < rows * dim; n += THREADS) {
        int r = n / dim, d = n - r * dim;
        to[r * pitch + d] = row0 + r < end ? to_f32(from[(row0 + r) * row_stride + d]) : 0.0f;
    }
}

__device__ __forceinline__ float lanes_max(float x)
{
    for (int o = LANES / 2; o > 0; o >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

__device__ __forceinline__ float dot_of(const float *a, const float *b, int dim)
{
    float sum = 0;
    for (int d = 0; d < dim; d++)
        sum += a[d] * b[d];
    return sum;
}

/* acc[i] += sum over the tile's columns of weight[row][col] * tile[col][lane + 16 i]. */
template <int ITEMS>
__device__ __forceinline__ void add_weighted(float (&acc)[ITEMS], const float *weight,
                                             const float *tile, int pitch, int lane, int dim)
{
    for (int c = 0; c < COLS; c++) {
        float w = weight[c];
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (lane + i * LANES < dim)
                acc[i] += w * tile[c * pitch + lane + i * LANES];
    }
}

/* to + at: of type T, or (part) f32. */
template <typename T, int ITEMS>
__device__ __forceinline__ void store_row(void *to, int64_t at, bool part,
                                          const float (&acc)[ITEMS], float factor, int lane,
                                          int dim)
{
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int64_t d = lane + i * LANES;
        if (d < dim && part)
            ((float *)to)[at + d] = acc[i] * factor;
        else if (d < dim)
            ((T *)to)[at + d] = from_f32<T>(acc[i] * factor);
    }
}

template <typename T, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    plain_forward(attn_args a, void *__restrict__ o, float *__restrict__ lse,
                  const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v)
{
    extern __shared__ float shared[];
    __shared__ stretches all_rows[ROWS];
    __shared__ float weight[ROWS][COLS];
    int dim = (int)a.dim, pitch = dim + 1, r = (int)threadIdx.x / LANES;
    int lane = (int)threadIdx.x % LANES;
    float *qs = shared, *ks = qs + ROWS * pitch, *vs = ks + COLS * pitch;
    int64_t row0 = (int64_t)blockIdx.x * ROWS, row = row0 + r, h = blockIdx.y;
    int64_t kv = h / (a.q_heads / a.kv_heads);
    find_stretches(all_rows, a.mask, row0, false);
    const stretches own = all_rows[r];
    load_rows<T>(qs, pitch, q + h * a.q_head, row0, a.mask.q.count, ROWS, a.q_row, dim);
    float acc[ITEMS] = {}, max = -INFINITY, sum = 0;
    for (int part = 0; part < 2; part++) {
        range all = union_of(all_rows, part);
        for (int32_t c0 = all.begin; c0 < all.end; c0 += COLS) {
            __syncthreads();
            load_rows<T>(ks, pitch, k + kv * a.k_head, c0, all.end, COLS, a.k_row, dim);
            load_rows<T>(vs, pitch, v + kv * a.v_head, c0, all.end, COLS, a.v_row, dim);
            __syncthreads();
            float s[2], top = max;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int32_t c = c0 + lane + i * LANES;
                bool seen = c >= own.lo[part] && c < own.hi[part];
                s[i] = seen ? a.scale * dot_of(qs + r * pitch, ks + (lane + i * LANES) * pitch, dim)
                            : -INFINITY;
                top = fmaxf(top, s[i]);
            }
            top = lanes_max(top);
            float back = top == -INFINITY ? 1.0f : expf(max - top), added = 0;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float p = s[i] == -INFINITY ? 0.0f : expf(s[i] - top);
                weight[r][lane + i * LANES] = p;
                added += p;
            }
            sum = sum * back + group_sum(added, LANES);
            max = top;
            __syncwarp();
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                acc[i] *= back;
            add_weighted<ITEMS>(acc, weight[r], vs, pitch, lane, dim);
        }
    }
    if (row >= a.mask.q.count)
        return;
    store_row<T, ITEMS>(o, row * a.o_row + h * a.o_head, a.parts, acc, sum > 0 ? 1.0f / sum : 0.0f,
                        lane, dim);
    if (lane == 0)
        lse[row * a.q_heads + h] = max + logf(sum);
}

/* delta[t,h] = sum_d do*o, a warp each. */
template <typename T>
__global__ void plain_delta(attn_args a, float *__restrict__ delta, const T *__restrict__ do_,
                            const T *__restrict__ o)
{
    int64_t at = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
    int lane = (int)threadIdx.x % 32;
    if (at >= a.mask.q.count * a.q_heads)
        return;
    int64_t t = at / a.q_heads, h = at - t * a.q_heads;
    float sum = 0;
    for (int d = lane; d < a.dim; d += 32)
        sum += to_f32(do_[t * a.do_row + h * a.do_head + d]) *
               to_f32(o[t * a.o_row + h * a.o_head + d]);
    sum = group_sum(sum, 32);
    if (lane == 0)
        delta[at] = sum;
}

template <typename T, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    plain_dq(attn_args a, void *__restrict__ dq, const T *__restrict__ do_, const T *__restrict__ q,
             const T *__restrict__ k, const T *__restrict__ v, const float *__restrict__ lse,
             const float *__restrict__ delta)
{
    extern __shared__ float shared[];
    __shared__ stretches all_rows[ROWS];
    __shared__ float weight[ROWS][COLS];
    int dim = (int)a.dim, pitch = dim + 1, r = (int)threadIdx.x / LANES;
    int lane = (int)threadIdx.x % LANES;
    float *qs = shared, *gs = qs + ROWS * pitch, *ks = gs + ROWS * pitch, *vs = ks + COLS * pitch;
    int64_t row0 = (int64_t)blockIdx.x * ROWS, row = row0 + r, h = blockIdx.y;
    int64_t kv = h / (a.q_heads / a.kv_heads);
    find_stretches(all_rows, a.mask, row0, false);
    const stretches own = all_rows[r];
    load_rows<T>(qs, pitch, q + h * a.q_head, row0, a.mask.q.count, ROWS, a.q_row, dim);
    load_rows<T>(gs, pitch, do_ + h * a.do_head, row0, a.mask.q.count, ROWS, a.do_row, dim);
    bool live = row < a.mask.q.count;
    float own_lse = live ? lse[row * a.q_heads + h] : 0.0f;
    float own_delta = live ? delta[row * a.q_heads + h] : 0.0f, acc[ITEMS] = {};
    for (int part = 0; part < 2; part++) {
        range all = union_of(all_rows, part);
        for (int32_t c0 = all.begin; c0 < all.end; c0 += COLS) {
            __syncthreads();
            load_rows<T>(ks, pitch, k + kv * a.k_head, c0, all.end, COLS, a.k_row, dim);
            load_rows<T>(vs, pitch, v + kv * a.v_head, c0, all.end, COLS, a.v_row, dim);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int at = lane + i * LANES;
                float ds = 0;
                if (c0 + at >= own.lo[part] && c0 + at < own.hi[part]) {
                    float s = dot_of(qs + r * pitch, ks + at * pitch, dim);
                    float dp = dot_of(gs + r * pitch, vs + at * pitch, dim);
                    ds = expf(a.scale * s - own_lse) * (dp - own_delta) * a.scale;
                }
                weight[r][at] = ds;
            }
            __syncwarp();
            add_weighted<ITEMS>(acc, weight[r], ks, pitch, lane, dim);
        }
    }
    if (live)
        store_row<T, ITEMS>(dq, row * a.dq_row + h * a.dq_head, a.parts, acc, 1.0f, lane, dim);
}

template <typename T, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    plain_dkv(attn_args a, void *__restrict__ dk, void *__restrict__ dv, const T *__restrict__ do_,
              const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
              const float *__restrict__ lse, const float *__restrict__ delta)
{
    extern __shared__ float shared[];
    __shared__ stretches all_rows[ROWS];
    __shared__ float weight_k[ROWS][COLS], weight_v[ROWS][COLS];
    int dim = (int)a.dim, pitch = dim + 1, r = (int)threadIdx.x / LANES;
    int lane = (int)threadIdx.x % LANES;
    float *ks = shared, *vs = ks + ROWS * pitch, *qs = vs + ROWS * pitch, *gs = qs + COLS * pitch;
    int64_t row0 = (int64_t)blockIdx.x * ROWS, row = row0 + r, kv = blockIdx.y;
    int64_t group = a.q_heads / a.kv_heads;
    find_stretches(all_rows, a.mask, row0, true);
    const stretches own = all_rows[r];
    load_rows<T>(ks, pitch, k + kv * a.k_head, row0, a.mask.k.count, ROWS, a.k_row, dim);
    load_rows<T>(vs, pitch, v + kv * a.v_head, row0, a.mask.k.count, ROWS, a.v_row, dim);
    float acc_k[ITEMS] = {}, acc_v[ITEMS] = {};
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        for (int part = 0; part < 2; part++) {
            range all = union_of(all_rows, part);
            for (int32_t c0 = all.begin; c0 < all.end; c0 += COLS) {
                __syncthreads();
                load_rows<T>(qs, pitch, q + h * a.q_head, c0, all.end, COLS, a.q_row, dim);
                load_rows<T>(gs, pitch, do_ + h * a.do_head, c0, all.end, COLS, a.do_row, dim);
                __syncthreads();
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int at = lane + i * LANES;
                    int64_t t = c0 + at;
                    float p = 0, ds = 0;
                    if (t >= own.lo[part] && t < own.hi[part]) {
                        float s = dot_of(qs + at * pitch, ks + r * pitch, dim);
                        float dp = dot_of(gs + at * pitch, vs + r * pitch, dim);
                        p = expf(a.scale * s - lse[t * a.q_heads + h]);
                        ds = p * (dp - delta[t * a.q_heads + h]) * a.scale;
                    }
                    weight_v[r][at] = p;
                    weight_k[r][at] = ds;
                }
                __syncwarp();
                add_weighted<ITEMS>(acc_k, weight_k[r], qs, pitch, lane, dim);
                add_weighted<ITEMS>(acc_v, weight_v[r], gs, pitch, lane, dim);
            }
        }
    }
    if (row >= a.mask.k.count)
        return;
    store_row<T, ITEMS>(dk, row * a.dk_row + kv * a.dk_head, a.parts, acc_k, 1.0f, lane, dim);
    store_row<T, ITEMS>(dv, row * a.dv_row + kv * a.dv_head, a.parts, acc_v, 1.0f, lane, dim);
}

static attn_args args_of(ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor o, ith_seqs seqs,
                         float scale, bool causal)
{
    attn_args a = {};
    a.q_heads = q.shape[1];
    a.kv_heads = k.shape[1];
    a.dim = q.shape[2];
    a.q_row = q.stride[0];
    a.q_head = q.stride[1];
    a.k_row = k.stride[0];
    a.k_head = k.stride[1];
    a.v_row = v.stride[0];
    a.v_head = v.stride[1];
    a.o_row = o.stride[0];
    a.o_head = o.stride[1];
    a.mask = mask_of(seqs, q.shape[0], k.shape[0], causal);
    a.parts = o.dtype != q.dtype;
    a.scale = scale;
    return a;
}

static ith_status check_dim(ith_ctx *ctx, ith_tensor q)
{
    if (q.shape[2] > MAX_DIM)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "head_dim %lld; the most is %d",
                        (long long)q.shape[2], MAX_DIM);
    return ITH_OK;
}

/* Launches KERNEL with `tiles` shared rows of dim + 1 floats. */
#define LAUNCH(KERNEL, rows, heads, shared_rows, ...)                                              \
    do {                                                                                           \
        size_t bytes_ = (size_t)((shared_rows) * (a.dim + 1)) * sizeof(float);                     \
        ITH_CUDA_TRY(ctx,                                                                          \
                     cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,     \
                                          (int)bytes_),                                            \
                     q);                                                                           \
        if ((rows) > 0)                                                                            \
            KERNEL<<<dim3((unsigned)ith_div_ceil(rows, ROWS), (unsigned)(heads)), THREADS, bytes_, \
                     ith_cuda_stream(ctx)>>>(a, __VA_ARGS__);                                      \
    } while (0)

template <typename T, int ITEMS>
static ith_status forward_of(ith_ctx *ctx, const attn_args &a, ith_tensor o, ith_tensor lse,
                             ith_tensor q, ith_tensor k, ith_tensor v)
{
    LAUNCH((plain_forward<T, ITEMS>), a.mask.q.count, a.q_heads, ROWS + 2 * COLS, o.data,
           (float *)lse.data, (const T *)q.data, (const T *)k.data, (const T *)v.data);
    return ITH_CUDA_LAUNCHED(ctx, q);
}

template <typename T, int ITEMS>
static ith_status backward_of(ith_ctx *ctx, const attn_args &a, ith_tensor dq, ith_tensor dk,
                              ith_tensor dv, ith_tensor do_, ith_tensor q, ith_tensor k,
                              ith_tensor v, ith_tensor o, ith_tensor lse, float *delta)
{
    plain_delta<T>
        <<<(unsigned)ith_div_ceil(a.mask.q.count * a.q_heads, 4), 128, 0, ith_cuda_stream(ctx)>>>(
            a, delta, (const T *)do_.data, (const T *)o.data);
    LAUNCH((plain_dq<T, ITEMS>), a.mask.q.count, a.q_heads, 2 * ROWS + 2 * COLS, dq.data,
           (const T *)do_.data, (const T *)q.data, (const T *)k.data, (const T *)v.data,
           (const float *)lse.data, delta);
    LAUNCH((plain_dkv<T, ITEMS>), a.mask.k.count, a.kv_heads, 2 * ROWS + 2 * COLS, dk.data, dv.data,
           (const T *)do_.data, (const T *)q.data, (const T *)k.data, (const T *)v.data,
           (const float *)lse.data, delta);
    return ITH_CUDA_LAUNCHED(ctx, q);
}

ith_status ith_attention_plain_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                       ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                       bool causal)
{
    ITH_TRY(check_dim(ctx, q));
    attn_args a = args_of(q, k, v, o, seqs, scale, causal);
    ITH_BY_TYPE(q.dtype, {
        if (a.dim <= 128)
            return forward_of<T, 8>(ctx, a, o, lse, q, k, v);
        return forward_of<T, MAX_DIM / LANES>(ctx, a, o, lse, q, k, v);
    });
}

ith_status ith_attention_plain_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                        ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                        ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                        bool causal, float *delta)
{
    ITH_TRY(check_dim(ctx, q));
    attn_args a = args_of(q, k, v, o, seqs, scale, causal);
    a.do_row = do_.stride[0];
    a.do_head = do_.stride[1];
    a.dq_row = dq.stride[0];
    a.dq_head = dq.stride[1];
    a.dk_row = dk.stride[0];
    a.dk_head = dk.stride[1];
    a.dv_row = dv.stride[0];
    a.dv_head = dv.stride[1];
    a.parts = dq.dtype != q.dtype;
    ITH_BY_TYPE(q.dtype, {
        if (a.dim <= 128)
            return backward_of<T, 8>(ctx, a, dq, dk, dv, do_, q, k, v, o, lse, delta);
        return backward_of<T, MAX_DIM / LANES>(ctx, a, dq, dk, dv, do_, q, k, v, o, lse, delta);
    });
}
