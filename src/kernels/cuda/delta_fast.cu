/* delta_fast.cu - the gated delta rule on tensor cores: bf16, heads of 128. The formulas are in
 * delta_cuda.cuh, with the same names.
 *
 * Products take bf16 operands and sum in f32 (m16n8k16). What enters them unrounded: q, k, v and dO
 * as they are, with norms and decays applied to rows of the result or of the other operand; what is
 * rounded: Z, P, D, the states and dR. The solve of Z is f32 on its 16 x 16 diagonal blocks and
 * tf32 beside them. Running states are f32 in registers.
 *
 * A scan block owns COLS columns of a state, 64 or, when that leaves multiprocessors idle, 32;
 * while it works on a chunk, the next one's operands come into the other half of its shared memory.
 * Rows behind the end of a chunk are zero. */
#include "kernels/cuda/delta_cuda.cuh"

enum { C = DELTA_C, DIM = 128, THREADS = 256 };

/* ---- tiles in shared memory: rows of ROW elements, their 16-byte pieces swizzled so that eight
 * rows of one piece lie in eight different banks ---- */

template <int ROW> __device__ __forceinline__ int place(int row, int piece)
{
    int at = ROW == 32 ? piece ^ ((row >> 1) & 3) : piece ^ (row & 7);
    return row * ROW + at * 8;
}

template <int ROW> __device__ __forceinline__ int place_of(int row, int col)
{
    return place<ROW>(row, col >> 3) + (col & 7);
}

__device__ __forceinline__ void copy16(void *to, const void *from, bool valid)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

/* Starts the copy of ROWS rows, zero from row n on. */
template <int WORKERS, int ROWS, int ROW>
__device__ __forceinline__ void copy_tile(bf16 *to, const bf16 *from, int64_t stride, int n)
{
    enum { PIECES = ROW / 8 };
#pragma unroll
    for (int e = 0; e < ROWS * PIECES / WORKERS; e++) {
        int i = e * WORKERS + (int)threadIdx.x, row = i / PIECES, piece = i % PIECES;
        copy16(to + place<ROW>(row, piece), from + (row < n ? row * stride : 0) + piece * 8,
               row < n);
    }
}

__device__ __forceinline__ void put2(bf16 *to, float x, float y)
{
    *reinterpret_cast<__nv_bfloat162 *>(to) = __floats2bfloat162_rn(x, y);
}

__device__ __forceinline__ float2 get2(const bf16 *from)
{
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(from));
}

/* ---- fragments. lane = 4 g + t holds of a 16 x 8 result: rows g, g + 8, columns 2t, 2t + 1 ----
 */

__device__ __forceinline__ void load4(uint32_t (&f)[4], const bf16 *at)
{
    uint32_t a = (uint32_t)__cvta_generic_to_shared(at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(a)
                 : "memory");
}

__device__ __forceinline__ void load4_t(uint32_t (&f)[4], const bf16 *at)
{
    uint32_t a = (uint32_t)__cvta_generic_to_shared(at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(a)
                 : "memory");
}

/* The left operand [16,16] at (m, k): of a tile [m][k], or transposed of a tile [k][m]. */
template <int ROW>
__device__ __forceinline__ void left(uint32_t (&f)[4], const bf16 *tile, int m, int k)
{
    int lane = (int)threadIdx.x % 32;
    load4(f, tile + place<ROW>(m + lane % 16, k / 8 + lane / 16));
}

template <int ROW>
__device__ __forceinline__ void left_t(uint32_t (&f)[4], const bf16 *tile, int m, int k)
{
    int lane = (int)threadIdx.x % 32, i = lane / 8;
    load4_t(f, tile + place<ROW>(k + lane % 8 + i / 2 * 8, m / 8 + i % 2));
}

/* The right operand [16,16] at (k, n), two of 8 columns: of a tile [k][n], or of its transpose
 * [n][k]. */
template <int ROW>
__device__ __forceinline__ void right(uint32_t (&f)[4], const bf16 *tile, int k, int n)
{
    int lane = (int)threadIdx.x % 32, i = lane / 8;
    load4_t(f, tile + place<ROW>(k + lane % 8 + i % 2 * 8, n / 8 + i / 2));
}

template <int ROW>
__device__ __forceinline__ void right_t(uint32_t (&f)[4], const bf16 *tile, int k, int n)
{
    int lane = (int)threadIdx.x % 32, i = lane / 8;
    load4(f, tile + place<ROW>(n + lane % 8 + i / 2 * 8, k / 8 + i % 2));
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d[0], d[1] += a b for two column tiles. */
__device__ __forceinline__ void mma2(float (&d0)[4], float (&d1)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[4])
{
    mma(d0, a, b[0], b[1]);
    mma(d1, a, b[2], b[3]);
}

/* total += a b (TURN: a^T b), rows m .. m + 15, columns half .. half + 8 N of b; a triangular
 * [C,C], b [C,COLS]. */
template <bool TURN, int COLS, int N>
__device__ __forceinline__ void add_triangle(float (&total)[N][4], const bf16 *a, const bf16 *b,
                                             int m, int half)
{
#pragma unroll
    for (int k = 0; k < C; k += 16) {
        if (TURN ? k < m : k > m)
            continue;
        uint32_t f[4], r[4];
        if (TURN)
            left_t<C>(f, a, m, k);
        else
            left<C>(f, a, m, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            right<COLS>(r, b, k, half + n * 8);
            mma2(total[n], total[n + 1], f, r);
        }
    }
}

__device__ __forceinline__ uint32_t tf32(float x)
{
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}

/* The same in tf32, [16,8] by [8,8]. */
__device__ __forceinline__ void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3,
                                         float b0, float b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(tf32(a0)), "r"(tf32(a1)), "r"(tf32(a2)), "r"(tf32(a3)), "r"(tf32(b0)),
                   "r"(tf32(b1)));
}

/* ---- Z and P ---- */

enum { PITCH = 68, INVERSE_PITCH = 20 };

typedef struct {
    float z[C * PITCH];               /* what lies above the diagonal blocks is not used */
    float inverse[C * INVERSE_PITCH]; /* (I + M beta)^-1 of the four diagonal blocks */
    double sum[C];
    float beta[C];
} prepare_head;

/* Two value heads are worked on at a time, when the products of keys and queries are made. */
typedef struct {
    union {
        struct {
            alignas(128) bf16 q[C * DIM], k[C * DIM];
        };
        prepare_head head[2];
    };
    float m[C * PITCH], q_norm[C], k_norm[C];
} prepare_shared;

/* A column of the inverse of a diagonal block, by forward substitution; 64 threads. */
__device__ __forceinline__ void invert_column(prepare_head *s, const float *m, int block, int col)
{
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sum = i == col ? 1.0f : 0.0f;
#pragma unroll
        for (int l = 0; l < i; l++)
            sum -= m[(block * 16 + i) * PITCH + block * 16 + l] * x[l];
        s->inverse[(block * 16 + i) * INVERSE_PITCH + col] = sum;
        x[i] = sum * s->beta[block * 16 + i];
    }
}

/* Columns [n, n + 8) of (I + M beta)^-1 M, block row by block row. One warp; nobody else touches
 * these columns of z. */
__device__ __forceinline__ void solve_columns(prepare_head *s, const float *whole, int n)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, first = n / 16 * 16;
    for (int row = first; row < C; row += 16) {
        const float *m = whole + (row + g) * PITCH,
                    *inverse = s->inverse + (row + g) * INVERSE_PITCH;
        float *z = s->z + (row + g) * PITCH + n + 2 * t;
        float r[4] = {m[n + 2 * t], m[n + 2 * t + 1], m[8 * PITCH + n + 2 * t],
                      m[8 * PITCH + n + 2 * t + 1]};
        for (int l = first + t; l < row; l += 8)
            mma_tf32(r, m[l], m[8 * PITCH + l], m[l + 4], m[8 * PITCH + l + 4],
                     -s->beta[l] * s->z[l * PITCH + n + g],
                     -s->beta[l + 4] * s->z[(l + 4) * PITCH + n + g]);
        z[0] = r[0];
        z[1] = r[1];
        z[8 * PITCH] = r[2];
        z[8 * PITCH + 1] = r[3];
        __syncwarp();
        r[0] = r[1] = r[2] = r[3] = 0;
#pragma unroll
        for (int l = 0; l < 16; l += 8)
            mma_tf32(r, inverse[l + t], inverse[8 * INVERSE_PITCH + l + t], inverse[l + t + 4],
                     inverse[8 * INVERSE_PITCH + l + t + 4], s->z[(row + l + t) * PITCH + n + g],
                     s->z[(row + l + t + 4) * PITCH + n + g]);
        __syncwarp();
        z[0] = r[0];
        z[1] = r[1];
        z[8 * PITCH] = r[2];
        z[8 * PITCH + 1] = r[3];
        __syncwarp();
    }
}

/* G of a chunk, by one warp: two tokens a lane, their gates given. */
__device__ __forceinline__ void cumulate(prepare_head *s, const float (&g)[2],
                                         const float (&beta)[2])
{
    int lane = (int)threadIdx.x % 32, i = 2 * lane;
    double sum = (double)g[0] + (double)g[1];
    for (int o = 1; o < 32; o <<= 1) {
        double below = __shfl_up_sync(0xffffffffu, sum, o);
        sum += lane >= o ? below : 0.0;
    }
    s->sum[i] = sum - (double)g[1];
    s->sum[i + 1] = sum;
    s->beta[i] = beta[0];
    s->beta[i + 1] = beta[1];
}

/* Norms, decays, Z and P.    grid: chunks, key heads */
__global__ void __launch_bounds__(THREADS, 3) prepare(const delta_args a)
{
    extern __shared__ __align__(128) char shared[];
    prepare_shared *s = (prepare_shared *)shared;
    int id = (int)threadIdx.x, warp = id / 32, lane = id % 32, g = lane / 4, t = lane % 4;
    int m = warp % 4 * 16, half = warp / 4 * 32; /* 16 rows and 32 columns of a warp */
    int64_t key = blockIdx.y, cell = (int64_t)blockIdx.x * a.heads, end = (key + 1) * a.group;
    delta_chunk c = a.chunks[a.first + blockIdx.x];
    copy_tile<THREADS, C, DIM>(s->q, head_row<bf16>(a.q, c.row, key), a.q.stride[0], c.rows);
    copy_tile<THREADS, C, DIM>(s->k, head_row<bf16>(a.k, c.row, key), a.k.stride[0], c.rows);
    copies_end();
    copies_wait();
    __syncthreads();
    float qk[4][4] = {}, kk[4][4] = {};
    for (int k = 0; k < DIM; k += 16) {
        uint32_t q_part[4], k_part[4], b[4];
        left<DIM>(q_part, s->q, m, k);
        left<DIM>(k_part, s->k, m, k);
#pragma unroll
        for (int n = 0; n < 4; n += 2)
            if (half + n * 8 <= m) {
                right_t<DIM>(b, s->k, k, half + n * 8);
                mma2(qk[n], qk[n + 1], q_part, b);
                mma2(kk[n], kk[n + 1], k_part, b);
            }
    }
    float *norms = a.norms + ((int64_t)blockIdx.x * (a.heads / a.group) + key) * 2 * C;
    for (int i = warp * 8; i < warp * 8 + 8; i++) {
        const bf16 *q = s->q + place_of<DIM>(i, lane * 4), *k = s->k + place_of<DIM>(i, lane * 4);
        float2 q0 = get2(q), q1 = get2(q + 2), k0 = get2(k), k1 = get2(k + 2);
        float qq = group_sum(q0.x * q0.x + q0.y * q0.y + q1.x * q1.x + q1.y * q1.y, 32);
        float sq = group_sum(k0.x * k0.x + k0.y * k0.y + k1.x * k1.x + k1.y * k1.y, 32);
        if (lane == 0) {
            norms[i] = s->q_norm[i] = a.scale / sqrtf(qq + 1e-6f);
            norms[C + i] = s->k_norm[i] = 1.0f / sqrtf(sq + 1e-6f);
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = m + g + e / 2 * 8, j = half + n * 8 + 2 * t + e % 2;
            qk[n][e] *= s->q_norm[i] * s->k_norm[j];
            s->m[i * PITCH + j] = j < i ? kk[n][e] * s->k_norm[i] * s->k_norm[j] : 0.0f;
        }
    for (int64_t head = key * a.group; head < end; head += 2) {
        int side = id / 128, own = id % 128; /* a half of the block works on each head */
        bool here = head + side < end;
        prepare_head *h = &s->head[side];
        int64_t at = cell + head + side;
        if (own < 32 && here) {
            float decay[2], beta[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int64_t row = c.row + 2 * lane + e;
                bool valid = 2 * lane + e < c.rows;
                decay[e] = valid ? stat_of(a.g, row, head + side) : 0.0f;
                beta[e] = valid ? stat_of(a.beta, row, head + side) : 0.0f;
            }
            cumulate(h, decay, beta);
        }
        __syncthreads();
        if (here && own < C) {
            invert_column(h, s->m, own / 16, own % 16);
        } else if (here) {
            int i = own - C;
            float *gates = a.gates + at * 3 * C;
            gates[i] = expf((float)h->sum[i]);
            gates[C + i] = expf((float)(h->sum[C - 1] - h->sum[i]));
            gates[2 * C + i] = h->beta[i];
            a.sums[at * C + i] = h->sum[i];
        }
        __syncthreads();
        if (here) { /* the longest and the shortest columns together */
            solve_columns(h, s->m, own / 32 * 8);
            solve_columns(h, s->m, C - 8 - own / 32 * 8);
        }
        __syncthreads();
        for (int64_t both = head; both < end && both < head + 2; both++) {
            bf16 *z = (bf16 *)a.z + (cell + both) * C * C, *p = (bf16 *)a.p + (cell + both) * C * C;
            h = &s->head[both - head];
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (half + n / 2 * 16 <= m)
#pragma unroll
                    for (int e = 0; e < 4; e += 2) {
                        int i = m + g + e / 2 * 8, j = half + n * 8 + 2 * t;
                        float e0 = j <= i ? expf((float)(h->sum[i] - h->sum[j])) : 0.0f;
                        float e1 = j + 1 <= i ? expf((float)(h->sum[i] - h->sum[j + 1])) : 0.0f;
                        float2 own_z = *(const float2 *)(h->z + i * PITCH + j);
                        put2(z + i * C + j, own_z.x * e0, own_z.y * e1);
                        put2(p + i * C + j, qk[n][e] * e0, qk[n][e + 1] * e1);
                    }
        }
        __syncthreads();
    }
}

/* ---- scans ---- */

template <int COLS> struct scan_stage {
    alignas(128) bf16 k[C * DIM], q[C * DIM];
    bf16 z[C * C], p[C * C];
    bf16 v[C * COLS]; /* backward: dO */
    float decay[C], tail[C], beta[C], q_norm[C], k_norm[C];
};

template <int COLS> struct scan_shared {
    scan_stage<COLS> stage[2];
    bf16 s[DIM * COLS];
    bf16 x[C * COLS], y[C * COLS], w[C * COLS];
};

/* What a scan block works on. */
typedef struct {
    int64_t head, key, col; /* col: its first column */
    delta_span span;
} scan_place;

__device__ __forceinline__ scan_place scan_place_of(const delta_args &a, int cols)
{
    scan_place p = {(int64_t)blockIdx.y, (int64_t)blockIdx.y / a.group, (int64_t)blockIdx.x * cols,
                    span_of(a, a.doc + blockIdx.z)};
    return p;
}

/* Starts the copies of chunk c; whole: q and p, too. v: of the values or of dO. */
template <int COLS>
__device__ __forceinline__ void fetch(scan_stage<COLS> *to, const delta_args &a,
                                      const scan_place &p, int64_t c, const delta_chunk &chunk,
                                      const ith_tensor &v, bool whole)
{
    int id = (int)threadIdx.x;
    int64_t at = (c - a.first) * a.heads + p.head;
    int64_t key_at = (c - a.first) * (a.heads / a.group) + p.key;
    copy_tile<THREADS, C, DIM>(to->k, head_row<bf16>(a.k, chunk.row, p.key), a.k.stride[0],
                               chunk.rows);
    copy_tile<THREADS, C, COLS>(to->v, head_row<bf16>(v, chunk.row, p.head) + p.col, v.stride[0],
                                chunk.rows);
    copy_tile<THREADS, C, C>(to->z, (const bf16 *)a.z + at * C * C, C, C);
    if (whole) {
        copy_tile<THREADS, C, DIM>(to->q, head_row<bf16>(a.q, chunk.row, p.key), a.q.stride[0],
                                   chunk.rows);
        copy_tile<THREADS, C, C>(to->p, (const bf16 *)a.p + at * C * C, C, C);
    }
    if (id < 3 * C / 4)
        copy16(to->decay + id * 4, a.gates + at * 3 * C + id * 4, true);
    else if (id >= 64 && id < 64 + 2 * C / 4)
        copy16(to->q_norm + (id - 64) * 4, a.norms + key_at * 2 * C + (id - 64) * 4, true);
    copies_end();
}

/* A warp's 16 rows of the state, N tiles of 8 columns, between registers and f32 memory [Dk,Dv]. */
template <int N>
__device__ __forceinline__ void load_state(float (&s)[N][4], const float *from, int64_t col)
{
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int64_t at = (int64_t)(row + e / 2 * 8) * DIM + col + n * 8 + lane % 4 * 2 + e % 2;
            s[n][e] = from ? from[at] : 0.0f;
        }
}

template <int N>
__device__ __forceinline__ void save_state(float *to, const float (&s)[N][4], int64_t col)
{
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[(int64_t)(row + e / 2 * 8) * DIM + col + n * 8 + lane % 4 * 2 + e % 2] = s[n][e];
}

/* The state as an operand. */
template <int N> __device__ __forceinline__ void round_state(bf16 *tile, const float (&s)[N][4])
{
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2)
            put2(tile + place_of<N * 8>(row + e / 2 * 8, n * 8 + lane % 4 * 2), s[n][e],
                 s[n][e + 1]);
}

/* The state tile to memory [Dk,Dv]. */
template <int COLS>
__device__ __forceinline__ void keep_state(bf16 *to, const bf16 *tile, int64_t col)
{
#pragma unroll
    for (int e = 0; e < DIM * COLS / 8 / THREADS; e++) {
        int i = e * THREADS + (int)threadIdx.x, row = i / (COLS / 8), piece = i % (COLS / 8);
        *(uint4 *)(to + (int64_t)row * DIM + col + piece * 8) =
            *(const uint4 *)(tile + place<COLS>(row, piece));
    }
}

/* O, the last state, and what backward wants of the states; OUT: with O.
 * grid: columns, value heads, documents */
template <int COLS, bool OUT> __global__ void __launch_bounds__(THREADS, 1) scan(const delta_args a)
{
    extern __shared__ __align__(128) char shared[];
    enum { TILES = COLS / 16, STATE_TILES = COLS / 8 }; /* of 8 columns, of a warp */
    scan_shared<COLS> *sh = (scan_shared<COLS> *)shared;
    int id = (int)threadIdx.x, warp = id / 32, lane = id % 32, g = lane / 4, t = lane % 4;
    int m = warp % 4 * 16, half = warp / 4 * (COLS / 2); /* a warp's part of [C,COLS] products */
    scan_place p = scan_place_of(a, COLS);
    int64_t size = (int64_t)DIM * DIM, doc = a.doc + blockIdx.z;
    float *state = state_of(a, a.state, doc, p.head);
    float s[STATE_TILES][4];
    load_state(s, p.span.cut_begin ? a.carried + p.head * size : state, p.col);
    round_state(sh->s, s);
    delta_chunk chunk = {}, next = {};
    if (p.span.begin < p.span.end) {
        next = a.chunks[p.span.begin];
        fetch(&sh->stage[0], a, p, p.span.begin, next, a.v, OUT);
    }
    for (int64_t c = p.span.begin; c < p.span.end; c++) {
        scan_stage<COLS> *in = &sh->stage[(c - p.span.begin) & 1];
        int64_t at = (c - a.first) * a.heads + p.head;
        chunk = next;
        if (c + 1 < p.span.end)
            next = a.chunks[c + 1];
        copies_wait();
        __syncthreads();
        if (a.states)
            keep_state<COLS>((bf16 *)a.states + at * size, sh->s, p.col);
        float ks[TILES][4] = {}, o[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < DIM; k += 16) {
            uint32_t f[4], q[4], b[4];
            left<DIM>(f, in->k, m, k);
            if (OUT)
                left<DIM>(q, in->q, m, k);
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                right<COLS>(b, sh->s, k, half + n * 8);
                mma2(ks[n], ks[n + 1], f, b);
                if (OUT)
                    mma2(o[n], o[n + 1], q, b);
            }
        }
        if (c + 1 < p.span.end)
            fetch(&sh->stage[(c + 1 - p.span.begin) & 1], a, p, c + 1, next, a.v, OUT);
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) { /* ks becomes X */
                int i = m + g + e / 2 * 8, place_at = place_of<COLS>(i, half + n * 8 + 2 * t);
                float2 v = get2(in->v + place_at);
                float f = in->decay[i] * in->k_norm[i];
                ks[n][e] = v.x - f * ks[n][e];
                ks[n][e + 1] = v.y - f * ks[n][e + 1];
                put2(sh->x + place_at, in->beta[i] * ks[n][e], in->beta[i] * ks[n][e + 1]);
            }
        __syncthreads();
        float zx[TILES][4] = {};
        add_triangle<false, COLS>(zx, in->z, sh->x, m, half);
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                int i = m + g + e / 2 * 8, j = half + n * 8 + 2 * t;
                float x = ks[n][e] - zx[n][e], y = ks[n][e + 1] - zx[n][e + 1];
                float f = in->beta[i], w = f * in->tail[i] * in->k_norm[i];
                if (OUT)
                    put2(sh->y + place_of<COLS>(i, j), f * x, f * y);
                put2(sh->w + place_of<COLS>(i, j), w * x, w * y);
                if (a.y)
                    put2((bf16 *)a.y + (at * C + i) * DIM + p.col + j, x, y);
            }
        __syncthreads();
        if (OUT) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int i = m + g + e / 2 * 8;
                    o[n][e] *= in->decay[i] * in->q_norm[i];
                }
            add_triangle<false, COLS>(o, in->p, sh->y, m, half);
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e += 2) {
                    int i = m + g + e / 2 * 8;
                    if (i < chunk.rows)
                        put2(head_row<bf16>(a.o, chunk.row + i, p.head) + p.col + half + n * 8 +
                                 2 * t,
                             o[n][e], o[n][e + 1]);
                }
        }
        float last = in->decay[C - 1];
#pragma unroll
        for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] *= last;
#pragma unroll
        for (int k = 0; k < C; k += 16) {
            uint32_t f[4], b[4];
            left_t<DIM>(f, in->k, warp * 16, k);
#pragma unroll
            for (int n = 0; n < STATE_TILES; n += 2) {
                right<COLS>(b, sh->w, k, n * 8);
                mma2(s[n], s[n + 1], f, b);
            }
        }
        round_state(sh->s, s);
    }
    if (p.span.cut_end)
        save_state(a.carry + p.head * size, s, p.col);
    else if (state && a.give_state)
        save_state(state, s, p.col);
}

/* dV, dR and dS, from the last chunk to the first.   grid as scan's */
template <int COLS> __global__ void __launch_bounds__(THREADS, 1) scan_back(const delta_args a)
{
    extern __shared__ __align__(128) char shared[];
    enum { TILES = COLS / 16, STATE_TILES = COLS / 8 }; /* of 8 columns, of a warp */
    scan_shared<COLS> *sh = (scan_shared<COLS> *)shared;
    int id = (int)threadIdx.x, warp = id / 32, lane = id % 32, g = lane / 4, t = lane % 4;
    int m = warp % 4 * 16, half = warp / 4 * (COLS / 2);
    scan_place p = scan_place_of(a, COLS);
    int64_t size = (int64_t)DIM * DIM;
    float s[STATE_TILES][4];
    float *gradient = state_of(a, a.dstate, a.doc + blockIdx.z, p.head);
    load_state(s, p.span.cut_end ? a.carried + p.head * size : gradient, p.col);
    round_state(sh->s, s);
    delta_chunk chunk = {}, next = {};
    if (p.span.begin < p.span.end) {
        next = a.chunks[p.span.end - 1];
        fetch(&sh->stage[0], a, p, p.span.end - 1, next, a.do_, true);
    }
    for (int64_t c = p.span.end - 1; c >= p.span.begin; c--) {
        scan_stage<COLS> *in = &sh->stage[(p.span.end - 1 - c) & 1];
        int64_t at = (c - a.first) * a.heads + p.head;
        chunk = next;
        if (c > p.span.begin)
            next = a.chunks[c - 1];
        copies_wait();
        __syncthreads();
        keep_state<COLS>((bf16 *)a.dstates + at * size, sh->s, p.col);
#pragma unroll
        for (int e = id; e < C * COLS / 8; e += THREADS) { /* y = e^G (norm) dO */
            int i = e / (COLS / 8), at = place<COLS>(i, e % (COLS / 8));
            float f = in->decay[i] * in->q_norm[i], x[8];
            load_any<bf16, 8>(x, in->v + at);
#pragma unroll
            for (int j = 0; j < 8; j++)
                x[j] *= f;
            store_f32<bf16, 8>(sh->y + at, x);
        }
        float d[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < DIM; k += 16) {
            uint32_t f[4], b[4];
            left<DIM>(f, in->k, m, k);
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                right<COLS>(b, sh->s, k, half + n * 8);
                mma2(d[n], d[n + 1], f, b);
            }
        }
        if (c > p.span.begin)
            fetch(&sh->stage[(p.span.end - c) & 1], a, p, c - 1, next, a.do_, true);
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int i = m + g + e / 2 * 8;
                d[n][e] *= in->tail[i] * in->k_norm[i];
            }
#pragma unroll
        for (int k = 0; k < C; k += 16)
            if (k >= m) {
                uint32_t f[4], b[4];
                left_t<C>(f, in->p, m, k);
#pragma unroll
                for (int n = 0; n < TILES; n += 2) {
                    right<COLS>(b, in->v, k, half + n * 8);
                    mma2(d[n], d[n + 1], f, b);
                }
            }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                int i = m + g + e / 2 * 8;
                put2(sh->x + place_of<COLS>(i, half + n * 8 + 2 * t), in->beta[i] * d[n][e],
                     in->beta[i] * d[n][e + 1]);
            }
        __syncthreads();
        float zx[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < C; k += 16)
            if (k >= m) {
                uint32_t f[4], b[4];
                left_t<C>(f, in->z, m, k);
#pragma unroll
                for (int n = 0; n < TILES; n += 2) {
                    right<COLS>(b, sh->x, k, half + n * 8);
                    mma2(zx[n], zx[n + 1], f, b);
                }
            }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                int i = m + g + e / 2 * 8, j = half + n * 8 + 2 * t;
                float x = d[n][e] - zx[n][e], y = d[n][e + 1] - zx[n][e + 1];
                float f = in->beta[i], w = -f * in->decay[i] * in->k_norm[i];
                put2(sh->w + place_of<COLS>(i, j), w * x, w * y);
                put2((bf16 *)a.dr + (at * C + i) * DIM + p.col + j, x, y);
                if (i < chunk.rows)
                    put2(head_row<bf16>(a.dv, chunk.row + i, p.head) + p.col + j, f * x, f * y);
            }
        __syncthreads();
        float last = in->decay[C - 1];
#pragma unroll
        for (int n = 0; n < STATE_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] *= last;
#pragma unroll
        for (int k = 0; k < C; k += 16) {
            uint32_t f[4], b[4];
            left_t<DIM>(f, in->q, warp * 16, k);
#pragma unroll
            for (int n = 0; n < STATE_TILES; n += 2) {
                right<COLS>(b, sh->y, k, n * 8);
                mma2(s[n], s[n + 1], f, b);
            }
            left_t<DIM>(f, in->k, warp * 16, k);
#pragma unroll
            for (int n = 0; n < STATE_TILES; n += 2) {
                right<COLS>(b, sh->w, k, n * 8);
                mma2(s[n], s[n + 1], f, b);
            }
        }
        round_state(sh->s, s);
    }
    if (p.span.cut_begin)
        save_state(a.carry + p.head * size, s, p.col);
    else if (gradient)
        save_state(gradient, s, p.col);
}

/* ---- the remaining gradients: each warp has 16 rows and a SIDE of the columns ---- */

enum { GRAD_THREADS = 256, SIDES = GRAD_THREADS / 128, SIDE = DIM / SIDES, MASK_SIDE = C / SIDES };

typedef struct {
    alignas(128) bf16 q[C * DIM], k[C * DIM];
    bf16 dout[C * DIM], y[C * DIM], dr[C * DIM];
    bf16 s[DIM * DIM], ds[DIM * DIM];
    /* Np and Nk times the norms of k (columns), of q and k (rows) */
    bf16 np_k[C * C], np_q[C * C], nk_k[C * C], nk_t[C * C];
    double sum[C];
    float decay[C], tail[C], beta[C], q_norm[C], k_norm[C];
    float rows[SIDES][C], cols[4][C], reads[SIDES][C], writes[SIDES][C]; /* of each warp */
    double through[GRAD_THREADS / 32];
} grads_shared;

/* t = a(tile [C,DIM]) b^T for a warp's 16 rows and columns. */
__device__ __forceinline__ void product_t(float (&t)[SIDE / 8][4], const bf16 *a, const bf16 *b,
                                          int m, int half)
{
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            t[n][e] = 0;
#pragma unroll
    for (int k = 0; k < DIM; k += 16) {
        uint32_t f[4], r[4];
        left<DIM>(f, a, m, k);
#pragma unroll
        for (int n = 0; n < SIDE / 8; n += 2) {
            right_t<DIM>(r, b, k, half + n * 8);
            mma2(t[n], t[n + 1], f, r);
        }
    }
}

/* Row sums of unit o x over a warp's columns, into out[row] of each row's first lane. unit: a
 * tile of vectors, norm: of rows. */
__device__ __forceinline__ void dot_rows(float (&dots)[2], const float (&x)[SIDE / 8][4],
                                         const bf16 *unit, const float *norm, int m, int half)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    dots[0] = dots[1] = 0;
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            float2 u = get2(unit + place_of<DIM>(m + g + e / 2 * 8, half + n * 8 + 2 * t));
            dots[e / 2] += u.x * x[n][e] + u.y * x[n][e + 1];
        }
    dots[0] = group_sum(dots[0], 4) * norm[m + g];
    dots[1] = group_sum(dots[1], 4) * norm[m + g + 8];
}

/* t scaled by rows, its dots with the unit vectors added to `dots`, itself to total. */
__device__ __forceinline__ void take(float (&total)[SIDE / 8][4], float *dots,
                                     float (&x)[SIDE / 8][4], float f0, float f1, const bf16 *unit,
                                     const float *norm, int m, int half, bool first)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4;
    float own[2];
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[n][e] *= e < 2 ? f0 : f1;
            total[n][e] += x[n][e];
        }
    dot_rows(own, x, unit, norm, m, half);
    if (lane % 4 == 0) {
        dots[m + g] = (first ? 0.0f : dots[m + g]) + own[0];
        dots[m + g + 8] = (first ? 0.0f : dots[m + g + 8]) + own[1];
    }
}

/* Np, Nk as operands; row and column sums of C; dbeta. qk, kk: products of the raw vectors. */
__device__ __forceinline__ void make_masks(grads_shared *sh, const delta_args &a,
                                           const delta_chunk &chunk, int64_t head,
                                           const float (&qk)[MASK_SIDE / 8][4],
                                           const float (&kk)[MASK_SIDE / 8][4], int m, int half)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = (int)threadIdx.x / 32;
    float np[MASK_SIDE / 8][4] = {}, nk[MASK_SIDE / 8][4] = {}, rows[2] = {},
                         cols[MASK_SIDE / 8][2] = {};
#pragma unroll
    for (int k = 0; k < DIM; k += 16) {
        uint32_t f[4], r[4], b[4];
        left<DIM>(f, sh->dout, m, k);
        left<DIM>(r, sh->dr, m, k);
#pragma unroll
        for (int n = 0; n < MASK_SIDE / 8; n += 2)
            if (half + n * 8 <= m) {
                right_t<DIM>(b, sh->y, k, half + n * 8);
                mma2(np[n], np[n + 1], f, b);
                mma2(nk[n], nk[n + 1], r, b);
            }
    }
#pragma unroll
    for (int n = 0; n < MASK_SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            int i = m + g + e / 2 * 8, j = half + n * 8 + 2 * t;
            float p[2], x[2];
#pragma unroll
            for (int d = 0; d < 2; d++) {
                float decay = j + d <= i ? expf((float)(sh->sum[i] - sh->sum[j + d])) : 0.0f;
                decay *= sh->beta[j + d];
                if (j + d == i && i < chunk.rows)
                    ((float *)a.dbeta.data)[(chunk.row + i) * a.dbeta.stride[0] + head] =
                        nk[n][e + d];
                p[d] = np[n][e + d] * decay;
                x[d] = j + d < i ? -sh->beta[i] * nk[n][e + d] * decay : 0.0f;
                float carried = j + d < i
                                    ? p[d] * sh->q_norm[i] * sh->k_norm[j + d] * qk[n][e + d] +
                                          x[d] * sh->k_norm[i] * sh->k_norm[j + d] * kk[n][e + d]
                                    : 0.0f;
                rows[e / 2] += carried;
                cols[n][d] += carried;
            }
            int at = place_of<C>(i, j);
            put2(sh->np_k + at, p[0] * sh->k_norm[j], p[1] * sh->k_norm[j + 1]);
            put2(sh->np_q + at, p[0] * sh->q_norm[i], p[1] * sh->q_norm[i]);
            put2(sh->nk_k + at, x[0] * sh->k_norm[j], x[1] * sh->k_norm[j + 1]);
            put2(sh->nk_t + at, x[0] * sh->k_norm[i], x[1] * sh->k_norm[i]);
        }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float sum = group_sum(rows[e], 4);
        if (t == 0)
            sh->rows[warp / 4][m + g + e * 8] = sum;
    }
#pragma unroll
    for (int n = 0; n < MASK_SIDE / 8; n++)
#pragma unroll
        for (int d = 0; d < 2; d++) {
            float sum = cols[n][d];
            for (int o = 4; o < 32; o <<= 1)
                sum += __shfl_xor_sync(0xffffffffu, sum, o);
            if (g == 0)
                sh->cols[warp % 4][half + n * 8 + 2 * t + d] = sum;
        }
}

/* dg of a chunk from all sums, by one warp: two tokens a lane, from the last one. */
__device__ __forceinline__ void finish_decay(grads_shared *sh, const delta_args &a,
                                             const delta_chunk &chunk, int64_t head, float last)
{
    int lane = (int)threadIdx.x % 32;
    double x[2], sum, writes = 0, through = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = C - 1 - 2 * lane - e;
        x[e] = 0;
        for (int w = 0; w < SIDES; w++) {
            x[e] += (double)sh->reads[w][i] - (double)sh->writes[w][i] + (double)sh->rows[w][i];
            writes += (double)sh->writes[w][i];
        }
        for (int w = 0; w < 4; w++)
            x[e] -= (double)sh->cols[w][i];
    }
    writes = group_sum(writes, 32);
    for (int w = 0; w < GRAD_THREADS / 32; w++)
        through += sh->through[w];
    sum = x[0] + x[1];
    for (int o = 1; o < 32; o <<= 1) {
        double above = __shfl_up_sync(0xffffffffu, sum, o);
        sum += lane >= o ? above : 0.0;
    }
    through = through * (double)last + writes;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = C - 1 - 2 * lane - e;
        if (i < chunk.rows)
            ((float *)a.dg.data)[(chunk.row + i) * a.dg.stride[0] + head] =
                (float)(through + (e == 0 ? sum - x[1] : sum));
    }
}

/* dx = norm (total - unit (unit . total)); unit2: the square of the unit vector's length. */
__device__ __forceinline__ void store_unit(const ith_tensor &out, const delta_chunk &chunk,
                                           int64_t key, const float (&total)[SIDE / 8][4],
                                           const bf16 *unit, const float *norm, float (*dots)[C],
                                           float unit2, int m, int half)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            int i = m + g + e / 2 * 8, j = half + n * 8 + 2 * t;
            float2 u = get2(unit + place_of<DIM>(i, j));
            float f = 0;
            for (int w = 0; w < SIDES; w++)
                f += dots[w][i];
            f *= norm[i] / unit2;
            if (i < chunk.rows)
                put2(head_row<bf16>(out, chunk.row + i, key) + j, norm[i] * (total[n][e] - u.x * f),
                     norm[i] * (total[n][e + 1] - u.y * f));
        }
}

/* Starts the copies of a value head's operands, the states last. */
__device__ __forceinline__ void fetch_head(grads_shared *sh, const delta_args &a,
                                           const delta_chunk &chunk, int64_t head)
{
    int id = (int)threadIdx.x;
    int64_t at = (int64_t)blockIdx.x * a.heads + head, size = (int64_t)DIM * DIM;
    copy_tile<GRAD_THREADS, C, DIM>(sh->dout, head_row<bf16>(a.do_, chunk.row, head),
                                    a.do_.stride[0], chunk.rows);
    copy_tile<GRAD_THREADS, C, DIM>(sh->y, (const bf16 *)a.y + at * C * DIM, DIM, C);
    copy_tile<GRAD_THREADS, C, DIM>(sh->dr, (const bf16 *)a.dr + at * C * DIM, DIM, C);
    if (id < 3 * C / 4)
        copy16(sh->decay + id * 4, a.gates + at * 3 * C + id * 4, true);
    else if (id >= 64 && id < 64 + C / 2)
        copy16(sh->sum + (id - 64) * 2, a.sums + at * C + (id - 64) * 2, true);
    copies_end();
    copy_tile<GRAD_THREADS, DIM, DIM>(sh->s, (const bf16 *)a.states + at * size, DIM, DIM);
    copy_tile<GRAD_THREADS, DIM, DIM>(sh->ds, (const bf16 *)a.dstates + at * size, DIM, DIM);
    copies_end();
}

/* dq, dk, dg, dbeta.   grid: chunks, key heads */
__global__ void __launch_bounds__(GRAD_THREADS, 1) grads(const delta_args a)
{
    extern __shared__ __align__(128) char shared[];
    grads_shared *sh = (grads_shared *)shared;
    int id = (int)threadIdx.x, warp = id / 32, lane = id % 32, g = lane / 4;
    int m = warp % 4 * 16, side = warp / 4, half = side * SIDE, mask = side * MASK_SIDE;
    int64_t key = blockIdx.y;
    delta_chunk chunk = a.chunks[a.first + blockIdx.x];
    float dq[SIDE / 8][4] = {}, dk[SIDE / 8][4] = {}, qk[MASK_SIDE / 8][4] = {},
                    kk[MASK_SIDE / 8][4] = {}, x[SIDE / 8][4], dots[2];
    copy_tile<GRAD_THREADS, C, DIM>(sh->q, head_row<bf16>(a.q, chunk.row, key), a.q.stride[0],
                                    chunk.rows);
    copy_tile<GRAD_THREADS, C, DIM>(sh->k, head_row<bf16>(a.k, chunk.row, key), a.k.stride[0],
                                    chunk.rows);
    if (id < 2 * C / 4)
        copy16(sh->q_norm + id * 4,
               a.norms + ((int64_t)blockIdx.x * (a.heads / a.group) + key) * 2 * C + id * 4, true);
    int64_t end = (key + 1) * a.group;
    fetch_head(sh, a, chunk, key * a.group);
    for (int64_t head = key * a.group; head < end; head++) {
        copies_wait_but_last();
        __syncthreads();
        if (head == key * a.group)
            for (int k = 0; k < DIM; k += 16) {
                uint32_t f[4], r[4], b[4];
                left<DIM>(f, sh->q, m, k);
                left<DIM>(r, sh->k, m, k);
#pragma unroll
                for (int n = 0; n < MASK_SIDE / 8; n += 2)
                    if (mask + n * 8 <= m) {
                        right_t<DIM>(b, sh->k, k, mask + n * 8);
                        mma2(qk[n], qk[n + 1], f, b);
                        mma2(kk[n], kk[n + 1], r, b);
                    }
            }
        make_masks(sh, a, chunk, head, qk, kk, m, mask);
        copies_wait();
        __syncthreads();
        float f0 = sh->decay[m + g], f1 = sh->decay[m + g + 8], last = sh->decay[C - 1];
        float b0 = sh->beta[m + g], b1 = sh->beta[m + g + 8];
        product_t(x, sh->dout, sh->s, m, half);
        take(dq, sh->reads[side], x, f0, f1, sh->q, sh->q_norm, m, half, true);
        product_t(x, sh->dr, sh->s, m, half);
        take(dk, sh->reads[side], x, -f0 * b0, -f1 * b1, sh->k, sh->k_norm, m, half, false);
        product_t(x, sh->y, sh->ds, m, half);
        take(dk, sh->writes[side], x, sh->tail[m + g] * b0, sh->tail[m + g + 8] * b1, sh->k,
             sh->k_norm, m, half, true);
        double through = 0;
#pragma unroll
        for (int e = id; e < DIM * DIM / 8; e += GRAD_THREADS) {
            float u[8], v[8], sum = 0;
            load_any<bf16, 8>(u, sh->s + e * 8);
            load_any<bf16, 8>(v, sh->ds + e * 8);
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum += u[i] * v[i];
            through += (double)sum;
        }
        through = group_sum(through, 32);
        if (lane == 0)
            sh->through[warp] = through;
        __syncthreads();
        if (head + 1 < end) /* over what is read no more */
            fetch_head(sh, a, chunk, head + 1);
        add_triangle<false, DIM>(dq, sh->np_k, sh->k, m, half);
        add_triangle<false, DIM>(dk, sh->nk_k, sh->k, m, half);
        add_triangle<true, DIM>(dk, sh->np_q, sh->q, m, half);
        add_triangle<true, DIM>(dk, sh->nk_t, sh->k, m, half);
        if (warp == 0)
            finish_decay(sh, a, chunk, head, last);
    }
    __syncthreads();
    dot_rows(dots, dq, sh->q, sh->q_norm, m, half);
    if (lane % 4 == 0) {
        sh->reads[side][m + g] = dots[0];
        sh->reads[side][m + g + 8] = dots[1];
    }
    dot_rows(dots, dk, sh->k, sh->k_norm, m, half);
    if (lane % 4 == 0) {
        sh->writes[side][m + g] = dots[0];
        sh->writes[side][m + g + 8] = dots[1];
    }
    __syncthreads();
    store_unit(a.dq, chunk, key, dq, sh->q, sh->q_norm, sh->reads, a.scale * a.scale, m, half);
    store_unit(a.dk, chunk, key, dk, sh->k, sh->k_norm, sh->writes, 1.0f, m, half);
}

/* ---- launches ---- */

template <typename S>
static cudaError_t launch(void (*kernel)(const delta_args), dim3 grid, cudaStream_t stream,
                          const delta_args *a, int threads = THREADS)
{
    cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(S));
    kernel<<<grid, threads, sizeof(S), stream>>>(*a);
    return code;
}

bool delta_fast_takes(ith_tensor t)
{
    return t.dtype == ITH_BF16 && t.shape[2] == DIM && rows_aligned(t, 8);
}

static dim3 chunk_grid(const delta_args *a)
{
    return dim3((unsigned)a->count, (unsigned)(a->heads / a->group));
}

static dim3 scan_grid(const delta_args *a, int64_t docs, int cols)
{
    return dim3((unsigned)(DIM / cols), (unsigned)a->heads, (unsigned)docs);
}

/* Blocks of 64 columns, two of a state, fill the device. */
static bool is_wide(const delta_args *a, int64_t docs)
{
    return 2 * a->heads * docs > ITH_CUDA_SMS;
}

cudaError_t delta_fast_prepare(cudaStream_t stream, const delta_args *a)
{
    return launch<prepare_shared>(prepare, chunk_grid(a), stream, a);
}

cudaError_t delta_fast_scan(cudaStream_t stream, const delta_args *a, int64_t docs)
{
    bool out = !is_absent(a->o);
    if (is_wide(a, docs))
        return launch<scan_shared<64>>(out ? scan<64, true> : scan<64, false>,
                                       scan_grid(a, docs, 64), stream, a);
    return launch<scan_shared<32>>(out ? scan<32, true> : scan<32, false>, scan_grid(a, docs, 32),
                                   stream, a);
}

cudaError_t delta_fast_scan_back(cudaStream_t stream, const delta_args *a, int64_t docs)
{
    if (is_wide(a, docs))
        return launch<scan_shared<64>>(scan_back<64>, scan_grid(a, docs, 64), stream, a);
    return launch<scan_shared<32>>(scan_back<32>, scan_grid(a, docs, 32), stream, a);
}

cudaError_t delta_fast_grads(cudaStream_t stream, const delta_args *a)
{
    return launch<grads_shared>(grads, chunk_grid(a), stream, a, GRAD_THREADS);
}
