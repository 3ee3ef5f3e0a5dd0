/* delta_fast.cu - norms, decays, Z and P of the gated delta rule on tensor cores: bf16, heads of
 * 128. The formulas are in delta_cuda.cuh, with the same names.
 *
 * A block is one warpgroup: a chunk of a key head. K K^T and Q K^T are made once (wgmma); then its
 * value heads follow, two at a time. The solve of Z is f32 on its 16 x 16 diagonal blocks and tf32
 * beside them: a warp has 16 columns of Z and goes down the block rows, transposed, so that what a
 * product leaves in registers is the left operand of the next. The warp with most to do for one
 * head has least to do for the other. */
#include "kernels/cuda/delta_fast.cuh"

enum { THREADS = 128, BLOCK = 16, BLOCKS = C / BLOCK, PITCH = 72, INVERSE_PITCH = 20 };

typedef struct {
    union {
        alignas(1024) bf16 q[C * DIM];
        bf16 z[2][C * C]; /* when the products are made */
    };
    union {
        alignas(1024) bf16 k[C * DIM];
        float inverse[2][C * INVERSE_PITCH]; /* (I + M beta)^-1 of the diagonal blocks */
        bf16 p[2][C * C];                    /* when Z is made */
    };
    float m[C * PITCH];
    log_sum sum[2][C];
    float beta[2][C], squares[2][C], q_norm[C], k_norm[C];
    uint64_t here;
} prepare_shared;

struct prepare_args {
    delta_args a;
    CUtensorMap q, k; /* of [T,H,D] as [H,T,D] */
};

/* ---- products ---- */

typedef float square_part[C / 8][4]; /* as wgmma leaves it */

/* out = a k^T, queued */
__device__ __forceinline__ void product_t(square_part &out, const bf16 *a, const bf16 *k)
{
    uint64_t left = operand_at<true>(shared_at(a)), right = operand_at<true>(shared_at(k));
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) {
        uint64_t at = i / 4 * (PIECE_BYTES >> 4) + i % 4 * NEXT_16<true>;
        wgmma<true, true>(out, left + at, right + at, i > 0);
    }
}

/* Squared length of half a row: thread t has half t / 64 of row t % 64. */
__device__ __forceinline__ float half_square(const bf16 *tile)
{
    int row = (int)threadIdx.x % C, half = (int)threadIdx.x / C;
    float sum = 0;
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
        float x[8];
        load_any<bf16, 8>(x, tile + half * (C * 64) + row * 64 + (piece ^ row % 8) * 8);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum += x[i] * x[i];
    }
    return sum;
}

/* Rounded to tf32, halves away from zero; the product leaves the 13 bits below alone. */
__device__ __forceinline__ uint32_t tf32(float x)
{
    return __float_as_uint(x) + 0x1000;
}

/* A result as left operand: its columns 2t, 2t + 1 are the inner indices t, t + 4 of the product;
 * times f, of the same two. */
__device__ __forceinline__ void as_left(uint32_t (&a)[4], const float (&x)[4], float2 f)
{
    a[0] = tf32(x[0] * f.x);
    a[1] = tf32(x[2] * f.x);
    a[2] = tf32(x[1] * f.y);
    a[3] = tf32(x[3] * f.y);
}

/* d [16,8] += a b [8,8] */
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], float2 b)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(tf32(b.x)), "r"(tf32(b.y)));
}

__device__ __forceinline__ float2 pair_at(const float *p)
{
    return *reinterpret_cast<const float2 *>(p);
}

/* ---- one of two value heads: `own` ---- */

/* G of a chunk, by one warp: two tokens a lane. */
__device__ __forceinline__ void cumulate(prepare_shared *s, const delta_args &a,
                                         const delta_chunk &c, int64_t head, int own)
{
    int lane = (int)threadIdx.x % 32, i = 2 * lane;
    float g[2], beta[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        bool valid = i + e < c.rows;
        g[e] = valid ? stat_of(a.g, c.row + i + e, head) : 0.0f;
        beta[e] = valid ? stat_of(a.beta, c.row + i + e, head) : 0.0f;
    }
    double sum = (double)g[0] + (double)g[1];
    for (int o = 1; o < 32; o <<= 1) {
        double below = __shfl_up_sync(0xffffffffu, sum, o);
        sum += lane >= o ? below : 0.0;
    }
    s->sum[own][i] = log_sum_of(sum - (double)g[1]);
    s->sum[own][i + 1] = log_sum_of(sum);
    s->beta[own][i] = beta[0];
    s->beta[own][i + 1] = beta[1];
}

__device__ __forceinline__ void store_gates(const prepare_shared *s, const delta_args &a,
                                            int64_t at, int own, int i)
{
    float *gates = a.gates + at * DELTA_GATES * C + i;
    log_sum sum = s->sum[own][i];
    float decay = power_of_two(sum.high + sum.low), tail = decay_of(s->sum[own][C - 1], sum);
    gates[DELTA_DECAY * C] = decay;
    gates[DELTA_TAIL * C] = tail;
    gates[DELTA_BETA * C] = s->beta[own][i];
    gates[DELTA_READ_K * C] = decay * s->k_norm[i];
    gates[DELTA_READ_Q * C] = decay * s->q_norm[i];
    gates[DELTA_WRITE_K * C] = tail * s->k_norm[i];
    ((log_sum *)a.sums)[at * C + i] = sum;
}

/* Column `at` of the inverses of the diagonal blocks, by forward substitution. */
__device__ __forceinline__ void invert_column(prepare_shared *s, int own, int at)
{
    int first = at / BLOCK * BLOCK, col = at % BLOCK;
    const float *m = s->m + first * PITCH + first, *beta = s->beta[own] + first;
    float sums[BLOCK], x[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        sums[i] = i == col ? 1.0f : 0.0f;
#pragma unroll
        for (int l = 0; l < i; l += 4) {
            float4 row = *reinterpret_cast<const float4 *>(m + i * PITCH + l);
            sums[i] -= row.x * x[l];
            if (l + 1 < i)
                sums[i] -= row.y * x[l + 1];
            if (l + 2 < i)
                sums[i] -= row.z * x[l + 2];
            if (l + 3 < i)
                sums[i] -= row.w * x[l + 3];
        }
        x[i] = sums[i] * beta[i];
    }
    float *inverse = s->inverse[own] + first * INVERSE_PITCH + col;
#pragma unroll
    for (int i = 0; i < BLOCK; i++)
        inverse[i * INVERSE_PITCH] = sums[i];
}

/* Block (row, col) of Z from its transpose, with the decay. */
__device__ __forceinline__ void store_block(prepare_shared *s, int own, const float (&zt)[2][4],
                                            int row, int col)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t f[4] = {};
    if (row >= col) {
        const log_sum *rows = s->sum[own] + row * BLOCK + 2 * t;
        const log_sum *cols = s->sum[own] + col * BLOCK + g;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int i = row * BLOCK + h * 8 + 2 * t;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = col * BLOCK + e * 8 + g;
                float x = zt[h][2 * e] * decay_of(rows[h * 8], cols[e * 8]);
                float y = zt[h][2 * e + 1] * decay_of(rows[h * 8 + 1], cols[e * 8]);
                f[2 * h + e] = two(j < i ? x : 0.0f, j < i + 1 ? y : 0.0f);
            }
        }
    }
    int to = row * BLOCK + lane / 16 * 8 + lane % 8, piece = 2 * col + lane / 8 % 2;
    store_squares<true>(shared_at(s->z[own] + to * 64 + (piece ^ to % 8) * 8), f);
}

/* Block column `col` of Z = E o ((I + M beta)^-1 M), by one warp, block row by block row. */
__device__ __forceinline__ void solve(prepare_shared *s, int own, int col)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t done[BLOCKS][2][4]; /* - beta times the rows above, without the decay */
#pragma unroll
    for (int row = 0; row < BLOCKS; row++) {
        float zt[2][4] = {};
        if (row >= col) {
            const float *m = s->m + row * BLOCK * PITCH;
            const float *inverse = s->inverse[own] + row * BLOCK * INVERSE_PITCH;
            float rest[2][4];
            uint32_t left[4];
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    rest[h][e] = m[(h * 8 + 2 * t + e % 2) * PITCH + col * BLOCK + e / 2 * 8 + g];
#pragma unroll
            for (int l = 0; l < row; l++)
                if (l >= col)
#pragma unroll
                    for (int k = 0; k < 2; k++)
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            mma_tf32(rest[h], done[l][k],
                                     pair_at(m + (h * 8 + g) * PITCH + l * BLOCK + k * 8 + 2 * t));
#pragma unroll
            for (int k = 0; k < 2; k++) {
                as_left(left, rest[k], make_float2(1, 1));
#pragma unroll
                for (int h = 0; h < 2; h++)
                    mma_tf32(zt[h], left,
                             pair_at(inverse + (h * 8 + g) * INVERSE_PITCH + k * 8 + 2 * t));
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float2 beta = pair_at(s->beta[own] + row * BLOCK + k * 8 + 2 * t);
                as_left(done[row][k], zt[k], make_float2(-beta.x, -beta.y));
            }
        }
        store_block(s, own, zt, row, col);
    }
}

/* P from Q K^T of unit vectors. */
__device__ __forceinline__ void store_p(prepare_shared *s, int own, const square_part &qk)
{
    int lane = (int)threadIdx.x % 32, m = (int)threadIdx.x / 32 * 16, g = lane / 4, t = lane % 4;
    log_sum rows[2] = {s->sum[own][m + g], s->sum[own][m + g + 8]};
    uint32_t at = shared_at(s->p[own]) + (uint32_t)(m + lane % 16) * 128;
#pragma unroll
    for (int k = 0; k < C / 16; k++) {
        uint32_t f[4] = {};
        if (k * 16 <= m) { /* not above the diagonal */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int n = 2 * k + i / 2, row = m + g + i % 2 * 8, j = n * 8 + 2 * t;
                float x = qk[n][i % 2 * 2] * decay_of(rows[i % 2], s->sum[own][j]);
                float y = qk[n][i % 2 * 2 + 1] * decay_of(rows[i % 2], s->sum[own][j + 1]);
                f[i] = two(j <= row ? x : 0.0f, j + 1 <= row ? y : 0.0f);
            }
        }
        store_squares(at + (uint32_t)(2 * k + lane / 16 ^ lane % 8) * 16, f);
    }
}

/* ---- the kernel ---- */

/* 1 / the length of a vector, from its square. */
__device__ __forceinline__ float norm_of(float square)
{
    return rsqrtf(square + 1e-6f);
}

/* Norms of all rows; M; qk: Q K^T of unit vectors, q times the scale. */
__device__ __forceinline__ void make_products(prepare_shared *s, const delta_args &a, int64_t at,
                                              square_part &qk)
{
    square_part kk;
    int id = (int)threadIdx.x, lane = id % 32, m = id / 32 * 16, g = lane / 4, t = lane % 4;
    wgmma_begin();
    product_t(qk, s->q, s->k);
    product_t(kk, s->k, s->k);
    wgmma_commit();
    s->squares[id / C][id % C] = half_square(s->q);
    wgmma_wait<0>();
    wgmma_results(qk);
    wgmma_results(kk);
#pragma unroll
    for (int r = 0; r < 2; r++) { /* squares of k lie on the diagonal */
        float square = 0;
#pragma unroll
        for (int n = r; n < C / 8; n += 2)
            if (n / 2 * 16 == m)
                square = g % 2 ? kk[n][2 * r + 1] : kk[n][2 * r];
        if (t == g / 2)
            s->k_norm[m + g + 8 * r] = norm_of(square);
    }
    __syncthreads();
    float q_row[2], k_row[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = m + g + 8 * r;
        q_row[r] = a.scale * norm_of(s->squares[0][row] + s->squares[1][row]);
        k_row[r] = s->k_norm[row];
    }
    if (t == 0) {
        float *out = a.norms + at * 2 * C + m + g;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            s->q_norm[m + g + 8 * r] = out[8 * r] = q_row[r];
            out[C + 8 * r] = k_row[r];
        }
    }
#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        int col = n * 8 + 2 * t;
        float2 norms = pair_at(s->k_norm + col);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = m + g + r * 8;
            qk[n][2 * r] *= q_row[r] * norms.x;
            qk[n][2 * r + 1] *= q_row[r] * norms.y;
            float x = kk[n][2 * r] * (k_row[r] * norms.x);
            float y = kk[n][2 * r + 1] * (k_row[r] * norms.y);
            *reinterpret_cast<float2 *>(s->m + row * PITCH + col) =
                make_float2(col < row ? x : 0.0f, col + 1 < row ? y : 0.0f);
        }
    }
}

/* Norms, decays, Z and P.    grid: key heads, chunks: blocks at work together read whole rows */
__global__ void __launch_bounds__(THREADS, 4) prepare(const __grid_constant__ prepare_args w)
{
    extern __shared__ __align__(1024) char shared[];
    prepare_shared *s = (prepare_shared *)shared;
    const delta_args &a = w.a;
    int id = (int)threadIdx.x, warp = id / 32;
    int64_t key = blockIdx.x, cell = (int64_t)blockIdx.y * a.heads, end = (key + 1) * a.group;
    delta_chunk c = a.chunks[a.first + blockIdx.y];
    if (id == 0) {
        uint32_t bar = shared_at(&s->here);
        barrier_init(bar, 1);
        barrier_init_done();
        barrier_expect(bar, 2 * TILE_BYTES);
        for (int half = 0; half < 2; half++) {
            copy_box(shared_at(s->q) + half * PIECE_BYTES, &w.q, bar, half * PIECE, c.row, (int)key,
                     0);
            copy_box(shared_at(s->k) + half * PIECE_BYTES, &w.k, bar, half * PIECE, c.row, (int)key,
                     0);
        }
    }
    if (warp < 2 && key * a.group + warp < end)
        cumulate(s, a, c, key * a.group + warp, warp);
    __syncthreads();
    barrier_wait(shared_at(&s->here), 0);
    if (c.rows < C) {
        clear_rows<THREADS>(s->q, 2, c.rows);
        clear_rows<THREADS>(s->k, 2, c.rows);
        written_for_engines();
        __syncthreads();
    }
    square_part qk;
    make_products(s, a, (int64_t)blockIdx.y * (a.heads / a.group) + key, qk);
    for (int64_t head = key * a.group; head < end; head += 2) {
        int heads = head + 1 < end ? 2 : 1, own = id / C;
        if (head > key * a.group && warp < heads)
            cumulate(s, a, c, head + warp, warp);
        __syncthreads();
        if (own < heads) {
            invert_column(s, own, id % C);
            store_gates(s, a, cell + head + own, own, id % C);
        }
        __syncthreads();
        for (int h = 0; h < heads; h++)
            solve(s, h, h ? BLOCKS - 1 - warp : warp);
        __syncthreads();
        for (int h = 0; h < heads; h++)
            store_p(s, h, qk);
        written_for_engines();
        __syncthreads();
        if (id == 0) {
            for (int h = 0; h < heads; h++) {
                int64_t at = (cell + head + h) * C * C;
                store_bytes((bf16 *)a.z + at, shared_at(s->z[h]), SQUARE_BYTES);
                store_bytes((bf16 *)a.p + at, shared_at(s->p[h]), SQUARE_BYTES);
            }
            stores_end();
            stores_wait_read();
        }
        __syncthreads();
    }
}

/* ---- launches ---- */

bool delta_fast_takes(ith_tensor t)
{
    return t.dtype == ITH_BF16 && t.shape[2] == DIM && rows_aligned(t, 8);
}

static cudaError_t launch(cudaStream_t stream, const prepare_args *w)
{
    int bytes = (int)sizeof(prepare_shared);
    cudaError_t code =
        cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    dim3 grid((unsigned)(w->a.heads / w->a.group), (unsigned)w->a.count);
    prepare<<<grid, THREADS, (size_t)bytes, stream>>>(*w);
    return code;
}

ith_status delta_fast_prepare(ith_ctx *ctx, const delta_args *a)
{
    prepare_args w;
    w.a = *a;
    ITH_TRY(delta_fast_map(ctx, &w.q, a->q));
    ITH_TRY(delta_fast_map(ctx, &w.k, a->k));
    ITH_CUDA_TRY(ctx, launch(ith_cuda_stream(ctx), &w), a->q);
    return ITH_OK;
}
