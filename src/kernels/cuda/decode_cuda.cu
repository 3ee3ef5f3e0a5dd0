/* decode_cuda.cu - attention of a few new queries against a cache.
 *
 * Bound by reading the cache. Where sequences and kv heads are too few to fill the device, a cache
 * is cut into pieces: each gives o and lse of its own, f32, and a second kernel joins them in
 * order. Shapes alone say how many pieces there are; a sequence's length is divided evenly among
 * them. Two ways:
 *
 * Tensor cores, for bf16 and heads of 64, 128 or 256 in 16-byte aligned rows: a block serves all
 * query heads of a kv head (of all queries that share a cache), so the cache is read once. Its
 * warps take 16 keys each in turn, through a ring of shared memory of their own, and never wait
 * for each other; what they have is joined in order at the end. S^T = K q^T, O^T = V^T P^T: rows
 * of queries are the columns, 8 a tile. P enters the second product as a sum of two bf16, so
 * nothing is lost beside f32 arithmetic.
 *
 * Plain, for the rest: a block owns one query and head; groups of lanes take keys in turn, each
 * with its own running softmax. */
#include "kernels/cuda/hopper.cuh"

enum { THREADS = 256, MAX_DIM = 512 };             /* of a block; of a head */
enum { PIECE_KEYS = 128, MAX_PIECES = 1024 };      /* a piece has no fewer of the capacity */
enum { WARPS = 4, STEP = 16, RING_BYTES = 24576 }; /* STEP: keys a warp takes; ring: of a warp */

struct decode_args {
    int caches, rows;    /* rows of queries for each */
    int queries;         /* of a length; the last of them sees all of it */
    int heads, kv_heads; /* of rows */
    int64_t o_row, o_head, o_piece, lse_piece;
    int64_t q_row, q_head;
    int64_t k_cache, k_row, k_head, v_cache, v_row, v_head;
    int dim, pieces, group; /* group: lanes per key, of the plain way */
    float scale;
    const int32_t *lengths;
    void *o;
    float *lse; /* NULL: not wanted, o is act */
};

/* How many rows of its cache query `row` sees; may be negative. */
__device__ __forceinline__ int seen_by(const decode_args &a, int row)
{
    return a.lengths[row / a.queries] - (a.queries - 1 - row % a.queries);
}

struct span {
    int begin, end;
};

/* Of n rows of a cache, those of a piece. */
__device__ __forceinline__ span piece_of(const decode_args &a, int n, int piece)
{
    int turn = WARPS * STEP, each = ((n + a.pieces - 1) / a.pieces + turn - 1) / turn * turn;
    int64_t begin = (int64_t)piece * each;
    span s = {n, n};
    if (begin < n) {
        s.begin = (int)begin;
        s.end = n - s.begin < each ? n : s.begin + each;
    }
    return s;
}

template <typename T>
__device__ __forceinline__ void put(const decode_args &a, int64_t row, int64_t head, int piece,
                                    int d, float value)
{
    int64_t at = piece * a.o_piece + row * a.o_row + head * a.o_head + d;
    if (a.lse) /* a part: f32 */
        ((float *)a.o)[at] = value;
    else
        ((T *)a.o)[at] = from_f32<T>(value);
}

__device__ __forceinline__ void put_lse(const decode_args &a, int64_t row, int64_t head, int piece,
                                        float value)
{
    if (a.lse)
        a.lse[piece * a.lse_piece + row * a.heads + head] = value;
}

/* ---- plain ---- */

/* grid: rows of all caches, heads, pieces */
template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    decode_plain(const decode_args a, const T *__restrict__ q, const T *__restrict__ k,
                 const T *__restrict__ v)
{
    extern __shared__ float shared[]; /* per group: dim values, then max, sum */
    int groups = THREADS / a.group, g = (int)threadIdx.x / a.group;
    int lane = (int)threadIdx.x % a.group, dim = a.dim, piece = (int)blockIdx.z;
    int row = (int)blockIdx.x, h = (int)blockIdx.y, cache = row / a.rows;
    int kv = h / (a.heads / a.kv_heads);
    span keys = piece_of(a, max(seen_by(a, row), 0), piece);
    const T *kb = k + cache * a.k_cache + kv * a.k_head;
    const T *vb = v + cache * a.v_cache + kv * a.v_head;
    float x[ITEMS][N], acc[ITEMS][N] = {}, max = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int d = (i * a.group + lane) * N;
        if (d < dim)
            load_f32<T, N>(x[i], q + row * a.q_row + h * a.q_head + d);
    }
    for (int64_t j0 = keys.begin; j0 < keys.end; j0 += groups) { /* all lanes shuffle */
        int64_t j = j0 + g;
        bool live = j < keys.end;
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
    bool any = keys.begin < keys.end;
    float top = -INFINITY, total = 0;
    for (int i = 0; i < groups; i++)
        top = fmaxf(top, shared[i * (dim + 2) + dim]);
    for (int i = 0; i < groups && any; i++)
        total += shared[i * (dim + 2) + dim + 1] * expf(shared[i * (dim + 2) + dim] - top);
    for (int d = (int)threadIdx.x; d < dim; d += THREADS) {
        float value = 0;
        for (int i = 0; i < groups && any; i++)
            value += shared[i * (dim + 2) + d] * expf(shared[i * (dim + 2) + dim] - top);
        put<T>(a, row, h, piece, d, any ? value / total : 0.0f);
    }
    if (threadIdx.x == 0)
        put_lse(a, row, h, piece, any ? top + logf(total) : -INFINITY);
}

/* ---- tensor cores ---- */

/* Rows of queries of a block: 8 TILES. */
template <int DIM, int TILES> struct decode_shared {
    static constexpr int HALF_BYTES = STEP * DIM * 2; /* keys or values of a step */
    static constexpr int HALVES = RING_BYTES / HALF_BYTES, ROWS = 8 * TILES;
    static constexpr int WIDTH = DIM + 4; /* other banks for every second row */
    bf16 q[ROWS][DIM];
    union {
        char ring[WARPS][HALVES][HALF_BYTES];
        float o[WARPS][ROWS][WIDTH];
    };
    float top[WARPS][ROWS], sum[WARPS][ROWS];
};

/* c [16,8] += a [16,16] b [16,8]. Lane l has of c rows l/4 and 8 further, columns 2 (l%4) and the
 * next; of b inner indices 2 (l%4), the next, and 8 further, column l/4. */
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The transpose of a square of 8 x 8 bf16, two of a row in each lane. */
__device__ __forceinline__ uint32_t turned(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* What the lanes that share l%4 have. */
__device__ __forceinline__ float column_max(float x)
{
    for (int o = 4; o < 32; o *= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

__device__ __forceinline__ float column_sum(float x)
{
    for (int o = 4; o < 32; o *= 2)
        x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

/* 16 bytes, or zeros. */
__device__ __forceinline__ void copy_or_clear(uint32_t to, const void *from, bool copy)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(copy ? 16 : 0)
                 : "memory");
}

/* A block's rows are (query, head of the group) in that order, from `first` on. */
template <int DIM, int TILES> struct decode_block {
    const decode_args &a;
    int cache, kv, first, piece, per_query;

    __device__ bool exists(int r) const
    {
        return first + r < a.rows * per_query;
    }
    __device__ int row(int r) const
    {
        return cache * a.rows + (first + r) / per_query;
    }
    __device__ int head(int r) const
    {
        return kv * per_query + (first + r) % per_query;
    }
    __device__ int seen(int r, int else_) const
    {
        return exists(r) ? seen_by(a, row(r)) : else_;
    }
};

/* The block's rows; they are part of the first group of copies. */
template <int DIM, int TILES>
__device__ __forceinline__ void fetch_queries(const decode_block<DIM, TILES> &b, uint32_t to,
                                              const bf16 *q)
{
    constexpr int CHUNKS = DIM / 8;
    for (int n = (int)threadIdx.x; n < 8 * TILES * CHUNKS; n += WARPS * 32) {
        int r = n / CHUNKS, chunk = n % CHUNKS;
        bool in = b.exists(r);
        const bf16 *from = in ? q + b.row(r) * b.a.q_row + b.head(r) * b.a.q_head + chunk * 8 : q;
        copy_or_clear(to + (uint32_t)(r * DIM * 2 + (chunk ^ r % 8) * 16), from, in);
    }
}

/* Keys (half h even) or values of the warp's step h / 2, of those before `end`. Each call closes a
 * group of copies. */
template <int DIM, int TILES>
__device__ __forceinline__ void fetch_half(const decode_block<DIM, TILES> &b, uint32_t ring,
                                           const bf16 *k, const bf16 *v, span keys, int h)
{
    constexpr int CHUNKS = DIM / 8, HALVES = decode_shared<DIM, TILES>::HALVES;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int key = keys.begin + (h / 2 * WARPS + warp) * STEP;
    const bf16 *from = h % 2 ? v : k;
    int64_t stride = h % 2 ? b.a.v_row : b.a.k_row;
    uint32_t to = ring + (uint32_t)(h % HALVES * decode_shared<DIM, TILES>::HALF_BYTES);
    if (key < keys.end)
#pragma unroll
        for (int i = 0; i < STEP * CHUNKS / 32; i++) {
            int row = (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
            bool in = key + row < keys.end;
            copy_or_clear(to + (uint32_t)(row * DIM * 2 + (chunk ^ row % 8) * 16),
                          from + (in ? key + row : key) * stride + chunk * 8, in);
        }
    copies_end();
}

/* A warp's share of a piece: O^T unscaled, and top and sum (of this lane's keys) of each row, in
 * units of log 2. */
template <int DIM, int TILES>
__device__ __forceinline__ void walk_keys(const decode_block<DIM, TILES> &b, uint32_t ring,
                                          uint32_t q, const bf16 *k, const bf16 *v, span keys,
                                          float (&o)[DIM / 16][TILES][4], float (&top)[TILES][2],
                                          float (&sum)[TILES][2])
{
    typedef decode_shared<DIM, TILES> shared;
    constexpr int HALVES = shared::HALVES;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int seen[TILES][2], all = keys.end; /* all: what every row sees */
    float scale = b.a.scale * 1.44269504f;
    for (int h = 0; h < HALVES - 1; h++)
        fetch_half(b, ring, k, v, keys, h);
    copies_wait<HALVES - 2>();
    __syncthreads(); /* queries are here */
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            seen[n][i] = b.seen(8 * n + lane % 4 * 2 + i, keys.end);
            top[n][i] = -INFINITY;
            sum[n][i] = 0;
            all = min(all, seen[n][i]);
        }
    /* Where the row of squares begins whose address this lane gives, and its 16 bytes there. */
    uint32_t bank = (uint32_t)lane % 8, square = (uint32_t)lane / 8;
    uint32_t q_at = q + bank * DIM * 2, q_chunk = square;
    uint32_t k_at = (bank + square % 2 * 8) * DIM * 2, k_chunk = square / 2;
    uint32_t v_at = (bank + square / 2 * 8) * DIM * 2, v_chunk = square % 2;
    int h = 0;
    for (int key = keys.begin + warp * STEP; key < keys.end; key += WARPS * STEP, h += 2) {
        float s[TILES][4] = {};
        uint32_t p[TILES][2], rest[TILES][2];
        copies_wait<HALVES - 2>();
        __syncwarp();
        fetch_half(b, ring, k, v, keys, h + HALVES - 1);
        uint32_t half = ring + (uint32_t)(h % HALVES * shared::HALF_BYTES);
#pragma unroll
        for (int d = 0; d < DIM / 8; d += 4) {
            uint32_t f[2][4], x[4];
            load_squares(f[0], half + k_at + ((d + k_chunk) ^ bank) * 16);
            load_squares(f[1], half + k_at + ((d + 2 + k_chunk) ^ bank) * 16);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                load_squares(x, q_at + n * 8 * DIM * 2 + ((d + q_chunk) ^ bank) * 16);
                multiply_add(s[n], f[0], x[0], x[1]);
                multiply_add(s[n], f[1], x[2], x[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            float back[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[n][i] *= scale;
                s[n][2 + i] *= scale;
                if (key + STEP > all) {
                    s[n][i] = key + lane / 4 < seen[n][i] ? s[n][i] : -INFINITY;
                    s[n][2 + i] = key + lane / 4 + 8 < seen[n][i] ? s[n][2 + i] : -INFINITY;
                }
                float most = fmaxf(top[n][i], column_max(fmaxf(s[n][i], s[n][2 + i])));
                float base = most == -INFINITY ? 0.0f : most;
                back[i] = power_of_two(top[n][i] - base);
                s[n][i] = power_of_two(s[n][i] - base);
                s[n][2 + i] = power_of_two(s[n][2 + i] - base);
                sum[n][i] = sum[n][i] * back[i] + (s[n][i] + s[n][2 + i]);
                top[n][i] = most;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t high = two(s[n][2 * i], s[n][2 * i + 1]);
                float2 had = both(high);
                p[n][i] = turned(high);
                rest[n][i] = turned(two(s[n][2 * i] - had.x, s[n][2 * i + 1] - had.y));
            }
#pragma unroll
            for (int d = 0; d < DIM / 16; d++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    o[d][n][e] *= back[e % 2];
        }
        copies_wait<HALVES - 2>();
        __syncwarp();
        fetch_half(b, ring, k, v, keys, h + HALVES);
        half = ring + (uint32_t)((h + 1) % HALVES * shared::HALF_BYTES);
#pragma unroll
        for (int d = 0; d < DIM / 16; d++) {
            uint32_t f[4];
            load_squares<true>(f, half + v_at + ((2 * d + v_chunk) ^ bank) * 16);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                multiply_add(o[d][n], f, p[n][0], p[n][1]);
                multiply_add(o[d][n], f, rest[n][0], rest[n][1]);
            }
        }
    }
}

/* grid: caches x blocks of rows x pieces, kv heads */
template <int DIM, int TILES>
__global__ void __launch_bounds__(WARPS * 32, 2)
    decode_fast(const decode_args a, const bf16 *__restrict__ q, const bf16 *__restrict__ k,
                const bf16 *__restrict__ v)
{
    extern __shared__ __align__(1024) char raw[];
    typedef decode_shared<DIM, TILES> shared;
    constexpr int ROWS = shared::ROWS;
    auto *sh = (shared *)raw;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int per_query = a.heads / a.kv_heads, at = (int)blockIdx.x / a.pieces;
    int blocks = (a.rows * per_query + ROWS - 1) / ROWS, piece = (int)blockIdx.x % a.pieces;
    decode_block<DIM, TILES> b = {a,     at / blocks, (int)blockIdx.y, at % blocks * ROWS,
                                  piece, per_query};
    int most = 0;
    for (int r = 0; r < ROWS; r++)
        most = max(most, b.seen(r, 0));
    span keys = piece_of(a, most, b.piece);
    float o[DIM / 16][TILES][4] = {}, top[TILES][2], sum[TILES][2];
    fetch_queries(b, shared_at(sh->q), q);
    walk_keys(b, shared_at(sh->ring[warp]), shared_at(sh->q),
              k + b.cache * a.k_cache + b.kv * a.k_head, v + b.cache * a.v_cache + b.kv * a.v_head,
              keys, o, top, sum);
    __syncthreads(); /* the rings become places for results */
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = 8 * n + lane % 4 * 2 + i;
            sum[n][i] = column_sum(sum[n][i]);
            if (lane < 4) {
                sh->top[warp][r] = top[n][i];
                sh->sum[warp][r] = sum[n][i];
            }
#pragma unroll
            for (int d = 0; d < DIM / 16; d++) {
                sh->o[warp][r][d * 16 + lane / 4] = o[d][n][i];
                sh->o[warp][r][d * 16 + lane / 4 + 8] = o[d][n][2 + i];
            }
        }
    __syncthreads();
    for (int r = 0; r < ROWS && b.exists(r); r++) {
        float highest = -INFINITY, total = 0, share[WARPS];
        for (int w = 0; w < WARPS; w++)
            highest = fmaxf(highest, sh->top[w][r]);
        bool any = highest > -INFINITY;
        for (int w = 0; w < WARPS; w++) {
            share[w] = any ? power_of_two(sh->top[w][r] - highest) : 0.0f;
            total += share[w] * sh->sum[w][r];
        }
        for (int d = (int)threadIdx.x; d < DIM; d += WARPS * 32) {
            float value = 0;
            for (int w = 0; w < WARPS; w++)
                value += share[w] * sh->o[w][r][d];
            put<bf16>(a, b.row(r), b.head(r), b.piece, d, any ? value / total : 0.0f);
        }
        if (threadIdx.x == 0)
            put_lse(a, b.row(r), b.head(r), b.piece,
                    any ? (highest + log2f(total)) * 0.693147181f : -INFINITY);
    }
}

/* ---- pieces ---- */

/* a: where the pieces lie, f32; to: where the result goes. Warps take pieces in turn, a lane has
 * one of 32 columns. grid: rows of all caches, heads, columns */
template <typename T>
__global__ void __launch_bounds__(THREADS) join_pieces(const decode_args a, const decode_args to)
{
    enum { JOINERS = THREADS / 32 };
    __shared__ float share[MAX_PIECES], part[JOINERS][32], most[JOINERS], sums[JOINERS];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, d = (int)blockIdx.z * 32 + lane;
    int64_t row = blockIdx.x, h = blockIdx.y;
    const float *lse = a.lse + row * a.heads + h;
    const float *o = (const float *)a.o + row * a.o_row + h * a.o_head + d;
    float top = -INFINITY, sum = 0, value = 0;
    for (int p = (int)threadIdx.x; p < a.pieces; p += THREADS) {
        share[p] = lse[p * a.lse_piece];
        top = fmaxf(top, share[p]);
    }
    for (int s = 16; s > 0; s /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, s));
    if (lane == 0)
        most[warp] = top;
    __syncthreads();
    for (int w = 0; w < JOINERS; w++)
        top = fmaxf(top, most[w]);
    bool any = top > -INFINITY;
    for (int p = (int)threadIdx.x; p < a.pieces; p += THREADS) {
        share[p] = any ? expf(share[p] - top) : 0.0f;
        sum += share[p];
    }
    sum = group_sum(sum, 32);
    if (lane == 0)
        sums[warp] = sum;
    __syncthreads();
    if (d < a.dim)
#pragma unroll 8
        for (int p = warp; p < a.pieces; p += JOINERS)
            value += share[p] * o[p * a.o_piece];
    part[warp][lane] = value;
    __syncthreads();
    if (warp > 0 || d >= a.dim)
        return;
    sum = value = 0;
    for (int w = 0; w < JOINERS; w++) {
        value += part[w][lane];
        sum += sums[w];
    }
    put<T>(to, row, h, 0, d, any ? value / sum : 0.0f);
    if (d == 0)
        put_lse(to, row, h, 0, any ? top + logf(sum) : -INFINITY);
}

/* ---- host ---- */

typedef struct {
    bool fast;
    int64_t tiles, blocks; /* of query rows, where fast; blocks of all caches and kv heads */
    int64_t pieces;
} decode_way;

/* Pieces that fill the device, of a useful size. */
static int64_t pieces_of(int64_t blocks, int64_t at_once, int64_t capacity)
{
    int64_t most = ith_min_i64(ith_div_ceil(capacity, PIECE_KEYS), MAX_PIECES);
    return ith_max_i64(ith_min_i64(at_once / ith_max_i64(blocks, 1), most), 1);
}

static decode_args args_of(ith_tensor o, ith_tensor lse, ith_tensor q, ith_tensor k, ith_tensor v,
                           ith_tensor lengths, float scale)
{
    decode_args a = {};
    bool shared = k.stride[0] == 0 && v.stride[0] == 0; /* all queries have one cache */
    ITH_ASSERT(q.shape[0] * q.shape[1] <= INT32_MAX);
    a.caches = shared ? 1 : (int)k.shape[0];
    a.rows = (int)q.shape[0] / a.caches;
    a.queries = (int)(q.shape[0] / k.shape[0]);
    a.heads = (int)q.shape[1];
    a.kv_heads = (int)k.shape[2];
    a.dim = (int)q.shape[2];
    a.pieces = 1;
    a.o_row = o.stride[0];
    a.o_head = o.stride[1];
    a.q_row = q.stride[0];
    a.q_head = q.stride[1];
    a.k_cache = k.stride[0];
    a.k_row = k.stride[1];
    a.k_head = k.stride[2];
    a.v_cache = v.stride[0];
    a.v_row = v.stride[1];
    a.v_head = v.stride[2];
    a.scale = scale;
    a.lengths = (const int32_t *)lengths.data;
    a.o = o.data;
    a.lse = lse.ndim ? (float *)lse.data : NULL;
    return a;
}

static decode_way fast_way(const decode_args *a, int64_t capacity)
{
    int64_t rows = (int64_t)a->rows * (a->heads / a->kv_heads);
    decode_way w = {true, 0, 0, 0};
    w.tiles = rows <= 8 ? 1 : a->dim > 128 ? 2 : 4;
    w.blocks = a->caches * ith_div_ceil(rows, 8 * w.tiles);
    w.pieces = pieces_of(w.blocks * a->kv_heads, 2 * ITH_CUDA_SMS, capacity);
    return w;
}

static decode_way plain_way(const decode_args *a, int64_t capacity)
{
    decode_way w = {false, 0, (int64_t)a->caches * a->rows, 0};
    w.pieces = pieces_of(w.blocks * a->heads, 4 * ITH_CUDA_SMS, capacity);
    return w;
}

static bool fits_fast(ith_tensor q, ith_tensor k, ith_tensor v)
{
    int64_t dim = q.shape[2];
    return q.dtype == ITH_BF16 && (dim == 64 || dim == 128 || dim == 256) && rows_aligned(q, 8) &&
           rows_aligned(k, 8) && rows_aligned(v, 8);
}

/* Of the way that wants more: alignment is not known yet. */
int64_t ith_cuda_attention_decode_workspace(ith_ctx *ctx, ith_tensor o, ith_tensor lse,
                                            ith_tensor q, ith_tensor k_cache, ith_tensor v_cache,
                                            ith_tensor lengths, float scale)
{
    (void)ctx;
    decode_args a = args_of(o, lse, q, k_cache, v_cache, lengths, scale);
    int64_t capacity = k_cache.shape[1];
    int64_t pieces = ith_max_i64(fast_way(&a, capacity).pieces, plain_way(&a, capacity).pieces);
    if (pieces == 1)
        return 0;
    return ith_mul_bytes(pieces * q.shape[0] * q.shape[1],
                         (q.shape[2] + 1) * (int64_t)sizeof(float));
}

template <int DIM, int TILES>
static cudaError_t launch_fast(cudaStream_t stream, const decode_args *a, const decode_way *w,
                               const bf16 *q, const bf16 *k, const bf16 *v)
{
    int bytes = (int)sizeof(decode_shared<DIM, TILES>);
    dim3 grid((unsigned)(w->blocks * w->pieces), (unsigned)a->kv_heads);
    cudaError_t code = cudaFuncSetAttribute(decode_fast<DIM, TILES>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    decode_fast<DIM, TILES><<<grid, WARPS * 32, (size_t)bytes, stream>>>(*a, q, k, v);
    return code;
}

static ith_status run_fast(ith_ctx *ctx, const decode_args *a, const decode_way *w, ith_tensor q,
                           ith_tensor k, ith_tensor v)
{
    auto launch = a->dim == 64    ? (w->tiles == 1 ? launch_fast<64, 1> : launch_fast<64, 4>)
                  : a->dim == 128 ? (w->tiles == 1 ? launch_fast<128, 1> : launch_fast<128, 4>)
                                  : (w->tiles == 1 ? launch_fast<256, 1> : launch_fast<256, 2>);
    ITH_CUDA_TRY(ctx,
                 launch(ith_cuda_stream(ctx), a, w, (const bf16 *)q.data, (const bf16 *)k.data,
                        (const bf16 *)v.data),
                 q);
    return ITH_CUDA_LAUNCHED(ctx, q);
}

static ith_status run_plain(ith_ctx *ctx, decode_args *a, ith_tensor q, ith_tensor k, ith_tensor v)
{
    int64_t n = 16 / ith_dtype_bytes(q.dtype);
    bool wide = rows_aligned(q, n) && rows_aligned(k, n) && rows_aligned(v, n);
    for (a->group = 1; a->group < 32 && a->group * (wide ? n : 1) < a->dim;)
        a->group *= 2;
    dim3 grid((unsigned)q.shape[0], (unsigned)q.shape[1], (unsigned)a->pieces);
    size_t bytes = (size_t)(THREADS / a->group * (a->dim + 2)) * sizeof(float);
#define LAUNCH(N)                                                                                  \
    decode_plain<T, N, MAX_DIM / 32 / N><<<grid, THREADS, bytes, ith_cuda_stream(ctx)>>>(          \
        *a, (const T *)q.data, (const T *)k.data, (const T *)v.data)
    ITH_BY_WIDTH(q.dtype, wide, LAUNCH);
#undef LAUNCH
    return ITH_CUDA_LAUNCHED(ctx, q);
}

ith_status ith_cuda_attention_decode(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                     ith_tensor k_cache, ith_tensor v_cache, ith_tensor lengths,
                                     float scale)
{
    if (ith_numel(q) == 0)
        return ITH_OK;
    if (q.shape[2] > MAX_DIM)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "head_dim %lld; the most is %d",
                        (long long)q.shape[2], MAX_DIM);
    decode_args to = args_of(o, lse, q, k_cache, v_cache, lengths, scale), a = to;
    bool fast = fits_fast(q, k_cache, v_cache);
    decode_way w = fast ? fast_way(&a, k_cache.shape[1]) : plain_way(&a, k_cache.shape[1]);
    a.pieces = (int)w.pieces;
    if (a.pieces > 1) {
        a.o_head = a.dim;
        a.o_row = (int64_t)a.heads * a.o_head;
        a.o_piece = q.shape[0] * a.o_row;
        a.lse_piece = q.shape[0] * a.heads;
        a.o = ctx->scratch;
        a.lse = (float *)ctx->scratch + a.pieces * a.o_piece;
    }
    ITH_TRY(fast ? run_fast(ctx, &a, &w, q, k_cache, v_cache)
                 : run_plain(ctx, &a, q, k_cache, v_cache));
    if (a.pieces == 1)
        return ITH_OK;
    dim3 grid((unsigned)q.shape[0], (unsigned)q.shape[1], (unsigned)ith_div_ceil(a.dim, 32));
    ITH_BY_TYPE(q.dtype, (join_pieces<T><<<grid, THREADS, 0, ith_cuda_stream(ctx)>>>(a, to)));
    return ITH_CUDA_LAUNCHED(ctx, q);
}
