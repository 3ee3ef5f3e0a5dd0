/* grouped_cuda.cu - products per expert: y = x w[e]^T, dx = dy w[e], dw[e] += dy^T x.
 *
 * Row counts live on the device only: a first kernel lists the row tiles of all experts, and the
 * product's grid is as large as the list can get (rows/TILE + experts), tiles past its end leave.
 * Two kernels: tensor cores (mma.sync, bf16, 16-byte aligned rows, 128x128 tiles, cp.async ring)
 * and plain fp32 arithmetic for everything else, which also serves dense products that cuBLASLt
 * refuses. NEEDSWORK: wgmma and TMA would double the first. */
#include "kernels/cuda/common.cuh"

/* Operands as the kernels see them: c[i,j] (+)= sum_k a(i,k) b(k,j), strides in elements. `rows`
 * says what an expert's rows are: the i of c and a, or the k of a and b. */
struct product {
    const void *a, *b;
    void *c;
    int64_t a_i, a_k, b_k, b_j, c_i; /* c's columns are contiguous */
    int64_t b_group, c_group;        /* matrix of the next expert; 0: shared */
    int64_t n, inner;                /* columns; inner size, unless rows are inner */
    int64_t m;                       /* rows of c, when an expert's rows are inner */
    bool accumulate;
};

struct row_tile {
    int32_t group, begin, end, pad; /* group -1: none */
};

enum { ROW_TILE_MIN = 64 };

__global__ void list_tiles(row_tile *tiles, int64_t num_tiles, const int32_t *offsets,
                           int64_t num_groups, int32_t rows, int32_t tile)
{
    __shared__ int32_t begin[1024 + 1];
    int e = (int)threadIdx.x;
    int32_t lo = 0, hi = rows;
    if (offsets && e < num_groups) {
        lo = offsets[e];
        hi = offsets[e + 1];
    }
    int32_t mine = e < num_groups ? (hi - lo + tile - 1) / tile : 0;
    begin[e] = mine;
    __syncthreads();
    for (int step = 1; step < (int)blockDim.x; step *= 2) {
        int32_t add = e >= step ? begin[e - step] : 0;
        __syncthreads();
        begin[e] += add;
        __syncthreads();
    }
    int32_t first = begin[e] - mine, total = begin[blockDim.x - 1];
    for (int32_t i = 0; i < mine; i++) {
        int32_t at = lo + i * tile;
        tiles[first + i] = {e, at, at + tile < hi ? at + tile : hi, 0};
    }
    for (int64_t i = total + e; i < num_tiles; i += blockDim.x)
        tiles[i] = {-1, 0, 0, 0};
}

/* ---- plain arithmetic ---- */

enum { BLOCK = 64, DEPTH = 16 };

/* Loads a BLOCK x DEPTH tile of (i,k) into to[k][i]; the faster of i and k runs along the threads.
 */
template <typename T>
__device__ __forceinline__ void load_tile(float (*to)[BLOCK + 4], const T *from, int64_t s_i,
                                          int64_t s_k, int64_t i0, int64_t i_end, int64_t k0,
                                          int64_t k_end)
{
    for (int n = (int)threadIdx.x; n < BLOCK * DEPTH; n += 256) {
        int i = s_k == 1 ? n / DEPTH : n % BLOCK, k = s_k == 1 ? n % DEPTH : n / BLOCK;
        bool in = i0 + i < i_end && k0 + k < k_end;
        to[k][i] = in ? to_f32(from[(i0 + i) * s_i + (k0 + k) * s_k]) : 0.0f;
    }
}

/* ROWS_INNER: an expert's rows are summed over. 16 x 16 threads, 4 x 4 results each. */
template <typename T, typename C, bool ROWS_INNER>
__global__ void __launch_bounds__(256)
    product_plain(product p, const row_tile *__restrict__ tiles,
                  const int32_t *__restrict__ offsets, int32_t rows)
{
    __shared__ float a[DEPTH][BLOCK + 4], b[DEPTH][BLOCK + 4];
    int64_t j0 = (int64_t)blockIdx.x * BLOCK, i0, i_end, k_begin = 0, k_end = p.inner, group;
    if (ROWS_INNER) {
        group = blockIdx.z;
        i0 = (int64_t)blockIdx.y * BLOCK;
        i_end = p.m;
        k_begin = offsets ? offsets[group] : 0;
        k_end = offsets ? offsets[group + 1] : rows;
    } else {
        row_tile t = tiles[blockIdx.y];
        if (t.group < 0)
            return;
        group = t.group;
        i0 = t.begin;
        i_end = t.end;
    }
    const T *pb = (const T *)p.b + group * p.b_group;
    C *pc = (C *)p.c + group * p.c_group;
    float sum[4][4] = {};
    int ti = (int)threadIdx.x / 16 * 4, tj = (int)threadIdx.x % 16 * 4;
    for (int64_t k = k_begin; k < k_end; k += DEPTH) {
        load_tile<T>(a, (const T *)p.a, p.a_i, p.a_k, i0, i_end, k, k_end);
        load_tile<T>(b, pb, p.b_j, p.b_k, j0, p.n, k, k_end);
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < DEPTH; kk++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] += a[kk][ti + i] * b[kk][tj + j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (i0 + ti + i < i_end && j0 + tj + j < p.n) {
                C *c = pc + (i0 + ti + i) * p.c_i + j0 + tj + j;
                *c = from_f32<C>(sum[i][j] + (p.accumulate ? to_f32(*c) : 0.0f));
            }
}

/* ---- tensor cores ---- */

enum { TILE = 128, STEP = 32, STAGES = 4, TILE_BYTES = TILE * STEP * 2 };

__device__ __forceinline__ void copy_16(uint32_t to, const void *from, bool in)
{
    int bytes = in ? 16 : 0; /* the rest is filled with zeros */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

/* Shared-memory address of a 16-byte piece. K_FAST: rows of 32 k (64 bytes), one per i; otherwise
 * rows of 128 i (256 bytes), one per k. Pieces are swizzled so that eight rows hit all banks. */
template <bool K_FAST>
__device__ __forceinline__ uint32_t piece_at(uint32_t base, int row, int piece)
{
    return K_FAST ? base + row * 64 + ((piece ^ (row >> 1 & 3)) << 4)
                  : base + row * 256 + ((piece ^ (row & 7)) << 4);
}

/* What one thread fetches of an operand: two pieces of every tile, 64 rows (K_FAST) or 16 k apart.
 * Addresses are made once and move on by `step` elements. */
template <bool K_FAST> struct fetcher {
    const bf16 *at[2];
    bool in[2];
    int k[2]; /* inside the tile */
    uint32_t to[2];
    int64_t step;

    __device__ __forceinline__ fetcher(const bf16 *from, int64_t major, int64_t i0, int64_t i_end,
                                       int64_t k0)
    {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            int p = (int)threadIdx.x + n * 256;
            int row = K_FAST ? p / 4 : p / 16, piece = K_FAST ? p % 4 : p % 16;
            int64_t i = i0 + (K_FAST ? row : piece * 8);
            k[n] = K_FAST ? piece * 8 : row;
            in[n] = i < i_end;
            at[n] = from + (K_FAST ? (in[n] ? i : i0) * major + k0 + k[n]
                                   : (k0 + k[n]) * major + (in[n] ? i : i0));
            to[n] = piece_at<K_FAST>(0, row, piece);
        }
        step = K_FAST ? STEP : STEP * major;
    }

    /* The next tile, of which `left` k exist. */
    __device__ __forceinline__ void fetch(uint32_t tile, int left)
    {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            bool live = in[n] && k[n] < left;
            copy_16(tile + to[n], at[n], live); /* reads nothing when not live */
            at[n] += step;
        }
    }
};

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at, bool transposed)
{
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(at));
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The 64 x 32 part of a warp, one STEP of the inner index. */
template <bool A_K_FAST, bool B_K_FAST>
__device__ __forceinline__ void step_product(float (&c)[4][4][4], uint32_t a_tile, uint32_t b_tile,
                                             int wi, int wj, int lane)
{
#pragma unroll
    for (int kk = 0; kk < STEP; kk += 16) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = wi + i * 16;
            load_matrices(a[i],
                          A_K_FAST ? piece_at<true>(a_tile, at + (lane & 15), kk / 8 + (lane >> 4))
                                   : piece_at<false>(a_tile, kk + (lane & 7) + (lane >> 4) * 8,
                                                     at / 8 + (lane >> 3 & 1)),
                          !A_K_FAST);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int at = wj + j * 16;
            load_matrices(b[j],
                          B_K_FAST
                              ? piece_at<true>(b_tile, at + (lane & 7) + (lane >> 4) * 8,
                                               kk / 8 + (lane >> 3 & 1))
                              : piece_at<false>(b_tile, kk + (lane & 15), at / 8 + (lane >> 4)),
                          !B_K_FAST);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

/* Results leave in pairs of columns; p.n is even. */
template <typename C>
__device__ __forceinline__ void write_result(C *to, float x, float y, bool accumulate)
{
    if (accumulate) {
        x += to_f32(to[0]);
        y += to_f32(to[1]);
    }
    vec<C, 2> out = {{from_f32<C>(x), from_f32<C>(y)}};
    *reinterpret_cast<vec<C, 2> *>(to) = out;
}

template <typename C, bool A_K_FAST, bool B_K_FAST, bool ROWS_INNER>
__global__ void __launch_bounds__(256, 2)
    product_mma(product p, const row_tile *__restrict__ tiles, const int32_t *__restrict__ offsets)
{
    extern __shared__ __align__(128) char shared[];
    int64_t j0 = (int64_t)blockIdx.x * TILE, i0, i_end, k_begin = 0, k_end = p.inner, group;
    if (ROWS_INNER) {
        group = blockIdx.z;
        i0 = (int64_t)blockIdx.y * TILE;
        i_end = p.m;
        k_begin = offsets[group];
        k_end = offsets[group + 1];
        if (k_begin == k_end && p.accumulate)
            return;
    } else {
        row_tile t = tiles[blockIdx.y];
        if (t.group < 0)
            return;
        group = t.group;
        i0 = t.begin;
        i_end = t.end;
    }
    const bf16 *pa = (const bf16 *)p.a, *pb = (const bf16 *)p.b + group * p.b_group;
    int64_t a_major = A_K_FAST ? p.a_i : p.a_k, b_major = B_K_FAST ? p.b_j : p.b_k;
    uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int wi = warp / 4 * 64, wj = warp % 4 * 32;
    int inner = (int)(k_end - k_begin), steps = (inner + STEP - 1) / STEP;
    fetcher<A_K_FAST> a(pa, a_major, i0, i_end, k_begin);
    fetcher<B_K_FAST> b(pb, b_major, j0, p.n, k_begin);
    float c[4][4][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        uint32_t to = base + s * 2 * TILE_BYTES;
        if (s < steps) {
            a.fetch(to, inner - s * STEP);
            b.fetch(to + TILE_BYTES, inner - s * STEP);
        }
        asm volatile("cp.async.commit_group;");
    }
    for (int s = 0; s < steps; s++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads(); /* stage s is there, and stage s - 1 is free */
        int next = s + STAGES - 1;
        uint32_t to = base + next % STAGES * 2 * TILE_BYTES;
        if (next < steps) {
            a.fetch(to, inner - next * STEP);
            b.fetch(to + TILE_BYTES, inner - next * STEP);
        }
        asm volatile("cp.async.commit_group;");
        uint32_t at = base + s % STAGES * 2 * TILE_BYTES;
        step_product<A_K_FAST, B_K_FAST>(c, at, at + TILE_BYTES, wi, wj, lane);
    }
    C *pc = (C *)p.c + group * p.c_group;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int64_t row = i0 + wi + i * 16 + h * 8 + lane / 4;
                int64_t col = j0 + wj + j * 8 + lane % 4 * 2;
                if (row < i_end && col < p.n)
                    write_result<C>(pc + row * p.c_i + col, c[i][j][2 * h], c[i][j][2 * h + 1],
                                    p.accumulate);
            }
}

/* ---- host ---- */

static product product_of(const ith_grouped *g)
{
    const ith_tensor *out = &g->out, *a = &g->a, *b = &g->b;
    product p = {};
    int w0 = b->ndim - 2, o0 = out->ndim - 2, o1 = out->ndim - 1;
    p.a = a->data;
    p.b = b->data;
    p.c = out->data;
    p.c_i = out->stride[o0];
    p.n = out->shape[o1];
    p.m = out->shape[o0];
    p.accumulate = g->accumulate;
    p.a_i = g->kind == ITH_GROUPED_WEIGHT ? 1 : a->stride[0];
    p.a_k = g->kind == ITH_GROUPED_WEIGHT ? a->stride[0] : 1;
    p.b_k = g->kind == ITH_GROUPED_FORWARD ? 1 : b->stride[w0];
    p.b_j = g->kind == ITH_GROUPED_FORWARD ? b->stride[w0] : 1;
    p.inner = g->kind == ITH_GROUPED_WEIGHT ? a->shape[0] : a->shape[1];
    p.b_group = b->ndim == 3 ? b->stride[0] : 0;
    p.c_group = out->ndim == 3 ? out->stride[0] : 0;
    return p;
}

static bool fits_mma(const ith_grouped *g)
{
    bool weight = g->kind == ITH_GROUPED_WEIGHT;
    return g->offsets && g->a.dtype == ITH_BF16 && g->out.dtype == (weight ? ITH_F32 : ITH_BF16) &&
           g->accumulate == weight && rows_aligned(g->a, 8) && rows_aligned(g->b, 8) &&
           rows_aligned(g->out, 2);
}

static ith_status run_mma(ith_ctx *ctx, const ith_grouped *g, const product &p, dim3 grid,
                          const row_tile *tiles)
{
    cudaStream_t stream = ith_cuda_stream(ctx);
    int bytes = STAGES * 2 * TILE_BYTES;
#define LAUNCH(...)                                                                                \
    do {                                                                                           \
        ITH_CUDA_TRY(                                                                              \
            ctx,                                                                                   \
            cudaFuncSetAttribute(__VA_ARGS__, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), \
            g->out);                                                                               \
        (__VA_ARGS__)<<<grid, 256, (size_t)bytes, stream>>>(p, tiles, g->offsets);                 \
    } while (0)
    if (g->kind == ITH_GROUPED_FORWARD)
        LAUNCH(product_mma<bf16, true, true, false>);
    else if (g->kind == ITH_GROUPED_INPUT)
        LAUNCH(product_mma<bf16, true, false, false>);
    else
        LAUNCH(product_mma<float, false, false, true>);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, g->out);
}

template <typename T, typename C>
static void run_plain(ith_ctx *ctx, const ith_grouped *g, const product &p, dim3 grid,
                      const row_tile *tiles)
{
    if (g->kind == ITH_GROUPED_WEIGHT)
        product_plain<T, C, true>
            <<<grid, 256, 0, ith_cuda_stream(ctx)>>>(p, tiles, g->offsets, (int32_t)g->a.shape[0]);
    else
        product_plain<T, C, false>
            <<<grid, 256, 0, ith_cuda_stream(ctx)>>>(p, tiles, g->offsets, (int32_t)g->a.shape[0]);
}

int64_t ith_grouped_workspace_bytes(int64_t rows, int64_t num_groups)
{
    return ith_mul_bytes(ith_div_ceil(rows, ROW_TILE_MIN) + num_groups, (int64_t)sizeof(row_tile));
}

ith_status ith_grouped_run(ith_ctx *ctx, const ith_grouped *g)
{
    int64_t rows = g->a.shape[0];
    if (rows == 0 || ith_numel(g->out) == 0)
        return ITH_OK;
    if (g->num_groups > 1024)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "%lld experts; the most is 1024",
                        (long long)g->num_groups);
    product p = product_of(g);
    bool mma = fits_mma(g), inner = g->kind == ITH_GROUPED_WEIGHT;
    int64_t tile = mma ? (int64_t)TILE : (int64_t)BLOCK;
    row_tile *tiles = (row_tile *)ctx->scratch;
    int64_t num_tiles = ith_div_ceil(rows, tile) + g->num_groups;
    dim3 grid((unsigned)ith_div_ceil(p.n, tile),
              (unsigned)(inner ? ith_div_ceil(p.m, tile) : num_tiles),
              (unsigned)(inner ? g->num_groups : 1));
    if (!inner)
        list_tiles<<<1, (unsigned)ith_round_up(g->num_groups, 32), 0, ith_cuda_stream(ctx)>>>(
            tiles, num_tiles, g->offsets, g->num_groups, (int32_t)rows, (int32_t)tile);
    if (mma)
        return run_mma(ctx, g, p, grid, tiles);
    if (g->a.dtype == ITH_F32)
        run_plain<float, float>(ctx, g, p, grid, tiles);
    else if (g->out.dtype == ITH_F32)
        run_plain<bf16, float>(ctx, g, p, grid, tiles);
    else
        run_plain<bf16, bf16>(ctx, g, p, grid, tiles);
    return ITH_CUDA_LAUNCHED(ctx, g->out);
}

static ith_status run(ith_ctx *ctx, ith_grouped_kind kind, ith_tensor out, ith_tensor a,
                      ith_tensor b, ith_tensor offsets, bool accumulate)
{
    ith_grouped g = {};
    g.kind = kind;
    g.out = out;
    g.a = a;
    g.b = b;
    g.offsets = (const int32_t *)offsets.data;
    g.num_groups = offsets.shape[0] - 1;
    g.accumulate = accumulate;
    return ith_grouped_run(ctx, &g);
}

static int64_t grouped_linear_workspace(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                        ith_tensor offsets)
{
    (void)ctx, (void)y, (void)w;
    return ith_grouped_workspace_bytes(x.shape[0], offsets.shape[0] - 1);
}

static ith_status grouped_linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                         ith_tensor offsets)
{
    return run(ctx, ITH_GROUPED_FORWARD, y, x, w, offsets, false);
}

static ith_status grouped_linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy,
                                                ith_tensor w, ith_tensor offsets)
{
    return run(ctx, ITH_GROUPED_INPUT, dx, dy, w, offsets, false);
}

static ith_status grouped_linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy,
                                                 ith_tensor x, ith_tensor offsets)
{
    return run(ctx, ITH_GROUPED_WEIGHT, dw, dy, x, offsets, true);
}

void ith_cuda_fill_grouped(struct ith_backend *b)
{
    b->grouped_linear_forward.run = grouped_linear_forward;
    b->grouped_linear_forward.workspace = grouped_linear_workspace;
    b->grouped_linear_backward_input.run = grouped_linear_backward_input;
    b->grouped_linear_backward_input.workspace = grouped_linear_workspace;
    b->grouped_linear_backward_weight.run = grouped_linear_backward_weight;
    b->grouped_linear_backward_weight.workspace = grouped_linear_workspace;
}
