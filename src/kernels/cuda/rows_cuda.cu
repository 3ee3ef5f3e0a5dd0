/* rows_cuda.cu - copies of rows, element-wise add and cast, and the embedding's gradient.
 *
 * Row copies move bytes, so one kernel serves every type: 16 bytes per access when rows allow it.
 * The embedding's gradient sorts tokens by id (stable, three passes of eight bits), then one block
 * per distinct id adds its rows in order of t: the same bits on every run. */
#include "kernels/cuda/common.cuh"

enum { THREADS = 256, AHEAD = 16 };

/* ---- gather and scatter ---- */

/* dst[dst_idx[i] or i] = src[src_idx[i] or i], rows of `units` words of type W; strides in words. A
 * block's y walks rows, so that no thread divides. */
template <typename W>
__global__ void copy_rows(W *__restrict__ dst, const W *__restrict__ src,
                          const int32_t *__restrict__ dst_idx, const int32_t *__restrict__ src_idx,
                          int64_t rows, int64_t units, int64_t dst_stride, int64_t src_stride)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows)
        return;
    int64_t to = dst_idx ? dst_idx[row] : row, from = src_idx ? src_idx[row] : row;
#pragma unroll 4
    for (int64_t unit = threadIdx.x; unit < units; unit += blockDim.x)
        dst[to * dst_stride + unit] = src[from * src_stride + unit];
}

/* Threads along a row, and rows per block. */
static dim3 row_block(int64_t units)
{
    unsigned x = 1;
    while (x < THREADS && x < units)
        x *= 2;
    return dim3(x, THREADS / x);
}

typedef struct {
    void *dst;
    int64_t dst_stride; /* bytes */
    const void *src;
    int64_t src_stride, bytes, rows;
    const int32_t *dst_idx, *src_idx; /* NULL: rows in order */
} row_copy;

template <typename W> static void launch_words(cudaStream_t stream, const row_copy &c)
{
    int64_t word = (int64_t)sizeof(W), units = c.bytes / word;
    dim3 block = row_block(units);
    copy_rows<W><<<(unsigned)ith_div_ceil(c.rows, block.y), block, 0, stream>>>(
        (W *)c.dst, (const W *)c.src, c.dst_idx, c.src_idx, c.rows, units, c.dst_stride / word,
        c.src_stride / word);
}

/* The widest word in which everything is whole. */
static void launch_copy(cudaStream_t stream, const row_copy &c)
{
    uint64_t all = (uint64_t)(uintptr_t)c.dst | (uint64_t)(uintptr_t)c.src |
                   (uint64_t)(c.bytes | c.dst_stride | c.src_stride);
    if (c.rows <= 0 || c.bytes <= 0)
        return;
    if (all % 16 == 0)
        launch_words<uint4>(stream, c);
    else if (all % 4 == 0)
        launch_words<uint32_t>(stream, c);
    else if (all % 2 == 0)
        launch_words<uint16_t>(stream, c);
    else
        launch_words<uint8_t>(stream, c);
}

void ith_cuda_copy_rows(cudaStream_t stream, void *dst, int64_t dst_stride, const void *src,
                        int64_t src_stride, int64_t bytes, int64_t rows)
{
    launch_copy(stream, {dst, dst_stride, src, src_stride, bytes, rows, NULL, NULL});
}

static ith_status copy_by_index(ith_ctx *ctx, ith_tensor dst, ith_tensor src,
                                const int32_t *dst_idx, const int32_t *src_idx, int64_t rows)
{
    int64_t size = ith_dtype_bytes(dst.dtype);
    launch_copy(ith_cuda_stream(ctx),
                {dst.data, dst.stride[0] * size, src.data, src.stride[0] * size,
                 dst.shape[1] * size, rows, dst_idx, src_idx});
    return ITH_CUDA_LAUNCHED(ctx, dst);
}

static ith_status embedding_forward(ith_ctx *ctx, ith_tensor y, ith_tensor ids, ith_tensor w)
{
    return copy_by_index(ctx, y, w, NULL, (const int32_t *)ids.data, y.shape[0]);
}

static ith_status gather_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    return copy_by_index(ctx, y, x, NULL, (const int32_t *)idx.data, y.shape[0]);
}

static ith_status scatter_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    return copy_by_index(ctx, y, x, (const int32_t *)idx.data, NULL, x.shape[0]);
}

/* A block for each range. */
static __global__ void fill_ranges(int32_t *index, const int32_t *first, const int32_t *offsets)
{
    int32_t g = (int32_t)blockIdx.x, at = offsets[g], n = offsets[g + 1] - at, from = first[g];
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += (int32_t)blockDim.x)
        index[at + i] = from + i;
}

static ith_status list_ranges(ith_ctx *ctx, ith_tensor index, ith_tensor first, ith_tensor offsets)
{
    if (index.shape[0] == 0)
        return ITH_OK;
    fill_ranges<<<(unsigned)first.shape[0], 256, 0, ith_cuda_stream(ctx)>>>(
        (int32_t *)index.data, (const int32_t *)first.data, (const int32_t *)offsets.data);
    return ITH_CUDA_LAUNCHED(ctx, index);
}

/* ---- element-wise, any strides ---- */

/* Row-major shape with the element strides of up to three tensors, in units of N elements along the
 * last dimension. */
struct walk {
    int64_t shape[ITH_MAX_DIMS], stride[3][ITH_MAX_DIMS];
    int64_t count;
};

static walk walk_of(ith_tensor y, ith_tensor a, ith_tensor b, int64_t per)
{
    const ith_tensor *t[3] = {&y, &a, &b};
    walk w = {};
    int lead = ITH_MAX_DIMS - y.ndim;
    w.count = ith_numel(y) / per;
    for (int d = 0; d < ITH_MAX_DIMS; d++) {
        bool real = d >= lead, last = d == ITH_MAX_DIMS - 1;
        w.shape[d] = real ? (last ? y.shape[d - lead] / per : y.shape[d - lead]) : 1;
        for (int i = 0; i < 3; i++)
            w.stride[i][d] = !real ? 0 : last ? per : t[i]->stride[d - lead];
    }
    return w;
}

__device__ __forceinline__ void walk_at(const walk &w, int64_t n, int64_t (&at)[3])
{
    at[0] = at[1] = at[2] = 0;
#pragma unroll
    for (int d = ITH_MAX_DIMS - 1; d >= 0; d--) {
        int64_t q = n / w.shape[d], r = n - q * w.shape[d];
#pragma unroll
        for (int i = 0; i < 3; i++)
            at[i] += r * w.stride[i][d];
        n = q;
    }
}

template <typename T, int N> __global__ void add_kernel(walk w, T *y, const T *a, const T *b)
{
    for (int64_t n = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; n < w.count;
         n += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[3];
        float x[N], z[N];
        walk_at(w, n, at);
        load_any<T, N>(x, a + at[1]);
        load_any<T, N>(z, b + at[2]);
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] += z[i];
        store_f32<T, N>(y + at[0], x);
    }
}

template <typename Y, typename X, int N> __global__ void cast_kernel(walk w, Y *y, const X *x)
{
    for (int64_t n = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; n < w.count;
         n += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[3];
        float v[N];
        walk_at(w, n, at);
        load_any<X, N>(v, x + at[1]);
        store_f32<Y, N>(y + at[0], v);
    }
}

/* A contiguous tensor as one row, so that the walk divides little. */
static ith_tensor flat_if_contiguous(ith_tensor t, bool flat)
{
    return flat ? ith_tensor_1d(t.data, t.dtype, ith_numel(t)) : t;
}

template <typename T, int N>
static void launch_add(ith_ctx *ctx, ith_tensor y, ith_tensor a, ith_tensor b)
{
    walk w = walk_of(y, a, b, N);
    add_kernel<T, N><<<grid_of(w.count, THREADS, 1 << 20), THREADS, 0, ith_cuda_stream(ctx)>>>(
        w, (T *)y.data, (const T *)a.data, (const T *)b.data);
}

static ith_status add(ith_ctx *ctx, ith_tensor y, ith_tensor a, ith_tensor b)
{
    if (ith_numel(y) == 0)
        return ITH_OK;
    bool flat = ith_is_contiguous(y) && ith_is_contiguous(a) && ith_is_contiguous(b);
    y = flat_if_contiguous(y, flat);
    a = flat_if_contiguous(a, flat);
    b = flat_if_contiguous(b, flat);
    ITH_BY_TYPE(y.dtype, {
        if (rows_aligned(y, WIDE<T>) && rows_aligned(a, WIDE<T>) && rows_aligned(b, WIDE<T>))
            launch_add<T, WIDE<T>>(ctx, y, a, b);
        else
            launch_add<T, 1>(ctx, y, a, b);
    });
    return ITH_CUDA_LAUNCHED(ctx, y);
}

template <typename Y, typename X> static void launch_cast(ith_ctx *ctx, ith_tensor y, ith_tensor x)
{
    bool wide = rows_aligned(y, 4) && rows_aligned(x, 4);
    walk w = walk_of(y, x, x, wide ? 4 : 1);
    unsigned grid = grid_of(w.count, THREADS, 1 << 20);
    if (wide)
        cast_kernel<Y, X, 4>
            <<<grid, THREADS, 0, ith_cuda_stream(ctx)>>>(w, (Y *)y.data, (const X *)x.data);
    else
        cast_kernel<Y, X, 1>
            <<<grid, THREADS, 0, ith_cuda_stream(ctx)>>>(w, (Y *)y.data, (const X *)x.data);
}

static ith_status cast(ith_ctx *ctx, ith_tensor y, ith_tensor x)
{
    if (ith_numel(y) == 0)
        return ITH_OK;
    bool flat = ith_is_contiguous(y) && ith_is_contiguous(x);
    y = flat_if_contiguous(y, flat);
    x = flat_if_contiguous(x, flat);
    if (y.dtype == ITH_F32 && x.dtype == ITH_BF16)
        launch_cast<float, bf16>(ctx, y, x);
    else if (y.dtype == ITH_BF16 && x.dtype == ITH_F32)
        launch_cast<bf16, float>(ctx, y, x);
    else if (y.dtype == ITH_BF16)
        launch_cast<bf16, bf16>(ctx, y, x);
    else
        launch_cast<float, float>(ctx, y, x);
    return ITH_CUDA_LAUNCHED(ctx, y);
}

static ith_status zero(ith_ctx *ctx, ith_tensor y)
{
    int64_t size = ith_dtype_bytes(y.dtype), rows = y.shape[0];
    if (ith_numel(y) == 0)
        return ITH_OK;
    if (ith_is_contiguous(y)) {
        ITH_CUDA_TRY(
            ctx, cudaMemsetAsync(y.data, 0, (size_t)ith_tensor_bytes(y), ith_cuda_stream(ctx)), y);
        return ITH_OK;
    }
    int64_t width = ith_numel(y) / rows; /* rows may be strided, what lies in a row may not */
    ITH_CUDA_TRY(ctx,
                 cudaMemset2DAsync(y.data, (size_t)(y.stride[0] * size), 0, (size_t)(width * size),
                                   (size_t)rows, ith_cuda_stream(ctx)),
                 y);
    return ITH_OK;
}

/* ---- embedding gradient ---- */

/* End of the run of equal ids that begins at `first`. */
__device__ __forceinline__ int64_t run_end(const int32_t *ids, int64_t first, int64_t n)
{
    int32_t id = ids[first];
    int64_t lo = first, hi = n; /* ids[lo] is in the run, ids[hi] is not */
    for (int64_t step = 1; lo + step < n; step *= 2) {
        if (ids[lo + step] != id) {
            hi = lo + step;
            break;
        }
        lo += step;
    }
    while (hi - lo > 1) {
        int64_t mid = (lo + hi) / 2;
        if (ids[mid] == id)
            lo = mid;
        else
            hi = mid;
    }
    return hi;
}

/* One block per place of the sorted order; those that start a run of equal ids add the whole run,
 * AHEAD rows in flight, in order of the token. */
template <typename T, int N>
__global__ void add_runs(float *__restrict__ dw, const T *__restrict__ dy,
                         const int32_t *__restrict__ ids, const int32_t *__restrict__ tokens,
                         int64_t n, int64_t width, int64_t dw_stride, int64_t dy_stride)
{
    int64_t first = blockIdx.x;
    int32_t id = ids[first];
    if (first > 0 && ids[first - 1] == id)
        return;
    int64_t end = run_end(ids, first, n);
    for (int64_t d = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * N; d < width;
         d += (int64_t)gridDim.y * blockDim.x * N) {
        float *out = dw + id * dw_stride + d;
        float sum[N];
        load_any<float, N>(sum, out);
        for (int64_t i = first; i < end; i += AHEAD) {
            vec<T, N> x[AHEAD];
            int64_t left = end - i;
#pragma unroll
            for (int a = 0; a < AHEAD; a++) /* past the end the last row again: no branches */
                x[a] = *reinterpret_cast<const vec<T, N> *>(
                    dy + tokens[a < left ? i + a : end - 1] * dy_stride + d);
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    sum[j] = a < left ? sum[j] + to_f32(x[a].v[j]) : sum[j];
        }
        store_f32<float, N>(out, sum);
    }
}

enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

static int64_t embedding_backward_workspace(ith_ctx *ctx, ith_tensor dw, ith_tensor dy,
                                            ith_tensor ids)
{
    (void)ctx, (void)dw, (void)dy;
    int64_t n = ids.shape[0];
    return 4 * ith_round_up(n * 4, 256) +
           ith_round_up(ith_bucket_sort_workspace_bytes(n, DIGITS), 256);
}

/* Sorts (id, token) by id, stable: least significant digit first. */
static void sort_by_id(cudaStream_t stream, ith_carve *scratch, const int32_t *ids, int64_t n,
                       int64_t vocab, const int32_t **sorted_ids, const int32_t **sorted_tokens)
{
    int32_t *keys[2], *values[2];
    for (int i = 0; i < 2; i++) {
        keys[i] = (int32_t *)ith_carve_take(scratch, n * 4);
        values[i] = (int32_t *)ith_carve_take(scratch, n * 4);
    }
    void *work = ith_carve_take(scratch, ith_bucket_sort_workspace_bytes(n, DIGITS));
    const int32_t *from_keys = ids, *from_values = NULL;
    int side = 0;
    for (int shift = 0; shift == 0 || vocab > (int64_t)1 << shift; shift += DIGIT_BITS) {
        ith_bucket_sort pass = {};
        pass.keys = from_keys;
        pass.values = from_values;
        pass.out_key = keys[side];
        pass.out_value = values[side];
        pass.n = n;
        pass.num_buckets = DIGITS;
        pass.shift = shift;
        pass.mask = DIGITS - 1;
        ith_bucket_sort_launch(stream, &pass, work);
        from_keys = keys[side];
        from_values = values[side];
        side = 1 - side;
    }
    *sorted_ids = from_keys;
    *sorted_tokens = from_values;
}

static ith_status embedding_backward(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor ids)
{
    int64_t n = ids.shape[0], width = dw.shape[1];
    if (n == 0)
        return ITH_OK;
    cudaStream_t stream = ith_cuda_stream(ctx);
    ith_carve scratch = ith_carve_begin(ctx);
    const int32_t *sorted_ids = NULL, *tokens = NULL;
    sort_by_id(stream, &scratch, (const int32_t *)ids.data, n, dw.shape[0], &sorted_ids, &tokens);
    ITH_BY_TYPE(dy.dtype, {
        bool wide = rows_aligned(dw, 4) && rows_aligned(dy, 4);
        dim3 grid((unsigned)n, grid_of(width, wide ? 128 * 4 : 128, 8));
        if (wide)
            add_runs<T, 4><<<grid, 128, 0, stream>>>((float *)dw.data, (const T *)dy.data,
                                                     sorted_ids, tokens, n, width, dw.stride[0],
                                                     dy.stride[0]);
        else
            add_runs<T, 1><<<grid, 128, 0, stream>>>((float *)dw.data, (const T *)dy.data,
                                                     sorted_ids, tokens, n, width, dw.stride[0],
                                                     dy.stride[0]);
    });
    return ITH_CUDA_LAUNCHED(ctx, dw);
}

void ith_cuda_fill_rows(struct ith_backend *b)
{
    b->embedding_forward.run = embedding_forward;
    b->embedding_backward.run = embedding_backward;
    b->embedding_backward.workspace = embedding_backward_workspace;
    b->gather_rows.run = gather_rows;
    b->scatter_rows.run = scatter_rows;
    b->list_ranges.run = list_ranges;
    b->add.run = add;
    b->cast.run = cast;
    b->zero.run = zero;
}
