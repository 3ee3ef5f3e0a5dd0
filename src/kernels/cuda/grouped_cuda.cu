/* grouped_cuda.cu - products per expert: y = x w[e]^T, dx = dy w[e], dw[e] += dy^T x.
 *
 * Row counts live on the device only: a first kernel lists the row tiles of all experts. Two
 * kernels: tensor cores (wgmma, bf16, 16-byte aligned rows), and plain fp32 arithmetic for
 * everything else, which also serves dense products that cuBLASLt refuses. */
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/tensor_map.h"

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

/* A block makes tiles of 128 x 256 results: a thread of the first warpgroup fetches pieces of both
 * operands into a ring of stages, the two others multiply them, 64 rows each. Blocks stay until
 * all tiles are made. Two blocks of a cluster may SHARE an operand: each fetches half for both. */
enum { TILE_I = 128, TILE_J = 256 };
enum { A_PIECES = TILE_I / PIECE, PIECES = A_PIECES + TILE_J / PIECE, OUT_PIECES = 2 };
enum { STAGE_BYTES = PIECES * PIECE_BYTES, OUT_BYTES = OUT_PIECES * PIECE_BYTES };
enum { WARPGROUP = 128, CONSUMERS = 2 * WARPGROUP };
enum { STAGES = 4, SHARED_BYTES = STAGES * STAGE_BYTES + 2 * OUT_BYTES + 1024 };
enum { DEALT = 4 }; /* units known ahead, at most */
enum sharing { SHARE_NOTHING, SHARE_A, SHARE_B };

struct tiled_product {
    CUtensorMap a_map, b_map, c_map;
    product p;
    row_tile *tiles;        /* of rows; absent when an expert's rows are inner */
    const int32_t *offsets; /* [groups + 1] */
    int32_t *dealt;         /* units given out, 0 at first */
    int64_t num_units;      /* most of them */
    int32_t i_units, j_units;
};

/* What a block does at a time; rank: its place in the cluster, whose blocks have tiles side by side
 * (SHARE_A) or one over the other. */
struct unit {
    int32_t group, i0, i_end, j0, k0, k_end;
};

template <bool ROWS_INNER, sharing SHARE>
__device__ __forceinline__ bool find_unit(unit &u, const tiled_product &t, int32_t n, int rank)
{
    constexpr int WIDTH = SHARE == SHARE_A ? 2 * TILE_J : TILE_J;
    constexpr int HEIGHT = SHARE == SHARE_B ? 2 * TILE_I : TILE_I;
    int j_rest = SHARE == SHARE_A ? rank * TILE_J : 0,
        i_rest = SHARE == SHARE_B ? rank * TILE_I : 0;
    int32_t upper = n / t.j_units, j0 = n % t.j_units * WIDTH + j_rest;
    if (n >= t.num_units)
        return false;
    if (ROWS_INNER) {
        int32_t group = upper / t.i_units, i0 = upper % t.i_units * HEIGHT + i_rest;
        u = {group, i0, (int32_t)t.p.m, j0, t.offsets[group], t.offsets[group + 1]};
        return true;
    }
    row_tile rows = t.tiles[upper];
    u = {rows.group, rows.begin, rows.end, j0, 0, (int32_t)t.p.inner};
    return rows.group >= 0;
}

/* Shared-memory addresses: pieces and their 8-byte barriers; units dealt, likewise. */
struct ring {
    uint32_t stages, full, empty;
    uint32_t dealt, known, read;
};

/* A thread of the first block of a cluster takes units in their order, for all its blocks: so all
 * that is made at a time on the whole chip lies close together, and operands are read from memory
 * once. (Blocks with units of their own drift apart.) */
template <bool ROWS_INNER, sharing SHARE>
__device__ void deal_units(const tiled_product &t, const ring &r)
{
    constexpr uint32_t BLOCKS = SHARE == SHARE_NOTHING ? 1 : 2;
    bool more = true;
    for (uint32_t turn = 0; more; turn++) {
        uint32_t slot = turn % DEALT;
        unit u;
        barrier_wait_cluster(r.read + slot * 8, turn / DEALT % 2 ^ 1);
        int32_t n = atomicAdd(t.dealt, 1);
        more = find_unit<ROWS_INNER, SHARE>(u, t, n, 0);
        for (uint32_t rank = 0; rank < BLOCKS; rank++)
            store_arrive_at(r.dealt + slot * 4, n, r.known + slot * 8, rank);
    }
}

/* Called by one thread (LANES 1) or all of a warp (32), which have read before its first one
 * arrives. racecheck does not follow that and says that units are read while the next ones come;
 * with every lane arriving by itself it says nothing. */
template <int LANES> __device__ __forceinline__ int32_t dealt_unit(const ring &r, uint32_t &turn)
{
    uint32_t slot = turn % DEALT;
    int32_t n;
    barrier_wait_cluster(r.known + slot * 8, turn++ / DEALT % 2);
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(n) : "r"(r.dealt + slot * 4) : "memory");
    if (LANES == 32)
        __syncwarp();
    if (LANES == 1 || threadIdx.x % 32 == 0)
        barrier_arrive_at(r.read + slot * 8, 0);
    return n;
}

template <bool K_MAJOR>
__device__ __forceinline__ void fetch_piece(uint32_t to, const CUtensorMap *map, uint32_t bar,
                                            int outer, int k, int group, uint16_t blocks)
{
    copy_box(to, map, bar, K_MAJOR ? k : outer, K_MAJOR ? outer : k, group, blocks);
}

/* What a tile will be added to comes into L2 shortly before, in the last steps. */
__device__ __forceinline__ void prefetch_results(const tiled_product &t, const unit &u, int left)
{
    constexpr int ACROSS = TILE_J / 32, STEPS = 8, EACH = ACROSS * TILE_I / PIECE / STEPS;
    for (int i = left * EACH; left < STEPS && i < (left + 1) * EACH; i++)
        prefetch_box(&t.c_map, u.j0 + i % ACROSS * 32, u.i0 + i / ACROSS * PIECE, u.group);
}

template <bool A_K, bool B_K, bool ROWS_INNER, sharing SHARE>
__device__ void fetch_tiles(const tiled_product &t, const ring &r, int rank)
{
    uint32_t turn = 0, dealt = 0;
    unit u;
    while (find_unit<ROWS_INNER, SHARE>(u, t, dealt_unit<1>(r, dealt), rank))
        for (int k = u.k0; k < u.k_end; k += PIECE, turn++) {
            uint32_t stage = turn % STAGES, full = r.full + stage * 8;
            uint32_t to = r.stages + stage * STAGE_BYTES;
            if (ROWS_INNER && t.p.accumulate)
                prefetch_results(t, u, (u.k_end - k - 1) / PIECE);
            barrier_wait(r.empty + stage * 8, turn / STAGES % 2 ^ 1);
            barrier_expect(full, STAGE_BYTES);
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                bool is_a = i < A_PIECES, shared = SHARE == (is_a ? SHARE_A : SHARE_B);
                int j = is_a ? i : i - A_PIECES, half = is_a ? j : j / 2;
                uint16_t blocks = shared ? 3 : 0;
                if (shared && half != rank)
                    continue;
                if (is_a)
                    fetch_piece<A_K>(to + i * PIECE_BYTES, &t.a_map, full, u.i0 + j * PIECE, k, 0,
                                     blocks);
                else
                    fetch_piece<B_K>(to + i * PIECE_BYTES, &t.b_map, full, u.j0 + j * PIECE, k,
                                     ROWS_INNER ? 0 : u.group, blocks);
            }
        }
}

/* A warp has read a stage. */
template <sharing SHARE> __device__ __forceinline__ void release_stage(uint32_t empty)
{
    uint32_t lane = threadIdx.x % 32;
    if (SHARE == SHARE_NOTHING && lane == 0)
        barrier_arrive(empty);
    if (SHARE != SHARE_NOTHING && lane < 2)
        barrier_arrive_at(empty, lane);
}

/* The last rows of a stage belong to the next expert. */
__device__ __forceinline__ void clear_rows(uint32_t stage, int from)
{
    int per_row = PIECES * 8;
    for (int n = (int)threadIdx.x - WARPGROUP; n < (PIECE - from) * per_row; n += CONSUMERS) {
        int row = from + n / per_row, piece = n % per_row / 8;
        uint32_t at = stage + piece * PIECE_BYTES + row * 128 + n % 8 * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    written_for_engines();
    join_threads<CONSUMERS>(1);
}

/* Where the 64 x 256 results of a warpgroup go: row i0, column j0 of group's matrix. */
struct results {
    uint32_t stage;                /* OUT_PIECES pieces of shared memory of its own */
    int group, i0, j0, rows, cols; /* rows, cols: how many exist from there on */
};

/* What rows there are of a piece whose first column is j0 + col0. */
__device__ __forceinline__ void write_rows(const tiled_product &t, const results &to,
                                           uint32_t piece, int col0)
{
    bf16 *out = (bf16 *)t.p.c + to.i0 * t.p.c_i + to.j0 + col0;
    for (int n = (int)threadIdx.x % WARPGROUP; n < to.rows * 8; n += WARPGROUP) {
        int row = n / 8, chunk = n % 8;
        uint32_t at = piece + row * 128 + (chunk ^ row % 8) * 16;
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at)
                     : "memory");
        if (col0 + chunk * 8 < to.cols)
            *reinterpret_cast<uint4 *>(out + row * t.p.c_i + chunk * 8) = v;
    }
}

/* bf16 by way of shared memory, a piece of 64 columns at a time: the copy engine takes it while
 * threads fill the next. Where rows of the next expert follow, threads write what it must not. */
__device__ __forceinline__ void send_bf16(const tiled_product &t, const results &to,
                                          const float (&c)[TILE_J / 2])
{
    int me = (int)threadIdx.x % WARPGROUP, lane = me % 32, bar = (int)threadIdx.x / WARPGROUP + 1;
    int row = me / 32 * 16 + lane % 16, right = lane / 16; /* whose address this lane gives */
#pragma unroll
    for (int p = 0; p < TILE_J / PIECE; p++) {
        uint32_t piece = to.stage + p % OUT_PIECES * PIECE_BYTES;
        if (me == 0)
            stores_wait_read<OUT_PIECES - 1>();
        join_threads<WARPGROUP>(bar); /* this piece is free again */
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            uint32_t v[4], at = piece + row * 128 + ((j + right) ^ (row % 8)) * 16;
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = two(c[32 * p + 4 * j + 2 * i], c[32 * p + 4 * j + 2 * i + 1]);
            store_squares(at, v);
        }
        written_for_engines();
        join_threads<WARPGROUP>(bar);
        if (me == 0 && to.rows >= PIECE)
            store_box(&t.c_map, piece, to.j0 + p * PIECE, to.i0, 0);
        if (me == 0)
            stores_end(); /* of nothing, too: the wait above counts */
        if (to.rows < PIECE)
            write_rows(t, to, piece, p * PIECE);
    }
}

/* f32, a piece of 32 columns at a time: while the copy engine writes or adds it, threads fill the
 * next. Each element is added to once, so the sum has one order. */
__device__ __forceinline__ void send_f32(const tiled_product &t, const results &to,
                                         const float (&c)[TILE_J / 2])
{
    int me = (int)threadIdx.x % WARPGROUP, bar = (int)threadIdx.x / WARPGROUP + 1;
    int first = me / 32 * 16 + me % 32 / 4, quarter = me % 4;
    bool odd = first % 2;
#pragma unroll
    for (int n = 0; n < TILE_J / 32; n++) {
        uint32_t piece = to.stage + n % OUT_PIECES * PIECE_BYTES;
        int col = to.j0 + n * 32;
        if (me == 0)
            stores_wait_read<OUT_PIECES - 1>();
        join_threads<WARPGROUP>(bar); /* this piece is free again */
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                /* Odd rows begin two groups of columns later: their banks are then free. */
                int group = odd ? i ^ 2 : i, row = first + 8 * h, from = 4 * (4 * n + i) + 2 * h;
                int chunk = group * 2 + quarter / 2, other = 4 * (4 * n + (i ^ 2)) + 2 * h;
                uint32_t at = piece + row * 128 + (chunk ^ row % 8) * 16;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + quarter % 2 * 8),
                             "f"(odd ? c[other] : c[from]), "f"(odd ? c[other + 1] : c[from + 1])
                             : "memory");
            }
        written_for_engines();
        join_threads<WARPGROUP>(bar);
        if (me != 0)
            continue;
        if (to.rows > 0 && t.p.accumulate)
            add_box(&t.c_map, piece, col, to.i0, to.group);
        else if (to.rows > 0)
            store_box(&t.c_map, piece, col, to.i0, to.group);
        stores_end(); /* of nothing, too: the wait above counts */
    }
}

template <bool A_K, bool B_K, bool ROWS_INNER, sharing SHARE>
__device__ void multiply_tiles(const tiled_product &t, const ring &r, int rank)
{
    int warpgroup = (int)threadIdx.x / WARPGROUP - 1;
    uint32_t turn = 0, dealt = 0;
    unit u;
    while (find_unit<ROWS_INNER, SHARE>(u, t, dealt_unit<32>(r, dealt), rank)) {
        bool any = u.k0 < u.k_end;
        if (!ROWS_INNER && u.i_end - u.i0 <= warpgroup * PIECE) { /* lets the stages go by */
            for (int k = u.k0; k < u.k_end; k += PIECE, turn++) {
                barrier_wait(r.full + turn % STAGES * 8, turn / STAGES % 2);
                release_stage<SHARE>(r.empty + turn % STAGES * 8);
            }
            continue;
        }
        float c[TILE_J / 2] = {};
        for (int k = u.k0; k < u.k_end; k += PIECE, turn++) {
            uint32_t stage = turn % STAGES, at = r.stages + stage * STAGE_BYTES;
            barrier_wait(r.full + stage * 8, turn / STAGES % 2);
            if (ROWS_INNER && u.k_end - k < PIECE)
                clear_rows(at, u.k_end - k);
            uint64_t a = operand_at<A_K>(at + warpgroup * PIECE_BYTES),
                     b = operand_at<B_K>(at + A_PIECES * PIECE_BYTES);
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < PIECE / 16; i++)
                wgmma_64x256<A_K, B_K>(c, a + i * NEXT_16<A_K>, b + i * NEXT_16<B_K>);
            wgmma_commit();
            wgmma_wait<1>(); /* the stage before is free */
            if (k > u.k0)
                release_stage<SHARE>(r.empty + (turn - 1) % STAGES * 8);
        }
        wgmma_wait<0>();
        wgmma_results(c);
        if (any)
            release_stage<SHARE>(r.empty + (turn - 1) % STAGES * 8);
        else if (t.p.accumulate)
            continue;
        int i0 = u.i0 + warpgroup * PIECE;
        results to = {r.stages + STAGES * STAGE_BYTES + warpgroup * OUT_BYTES,
                      u.group,
                      i0,
                      u.j0,
                      u.i_end - i0,
                      (int)t.p.n - u.j0};
        if constexpr (ROWS_INNER)
            send_f32(t, to, c);
        else
            send_bf16(t, to, c);
    }
    if (threadIdx.x % WARPGROUP == 0)
        stores_wait();
}

template <bool A_K, bool B_K, bool ROWS_INNER, sharing SHARE>
__global__ void __launch_bounds__(WARPGROUP + CONSUMERS, 1)
    __cluster_dims__(SHARE == SHARE_NOTHING ? 1 : 2, 1, 1)
        product_wgmma(const __grid_constant__ tiled_product t)
{
    extern __shared__ char raw[];
    constexpr int BLOCKS = SHARE == SHARE_NOTHING ? 1 : 2;
    __shared__ uint64_t full[STAGES], empty[STAGES], known[DEALT], read[DEALT];
    __shared__ int32_t dealt[DEALT];
    int rank = (int)blockIdx.x % BLOCKS;
    ring r = {(shared_at(raw) + 1023) & ~1023u,
              shared_at(full),
              shared_at(empty),
              shared_at(dealt),
              shared_at(known),
              shared_at(read)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(r.full + i * 8, 1);
            barrier_init(r.empty + i * 8, BLOCKS * CONSUMERS / 32);
        }
        for (int i = 0; i < DEALT; i++) {
            barrier_init(r.known + i * 8, 1);
            barrier_init(r.read + i * 8, BLOCKS * (1 + CONSUMERS / 32)); /* who fetches, warps */
        }
        barrier_init_done();
    }
    cluster_sync();
    if (threadIdx.x < WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0)
            fetch_tiles<A_K, B_K, ROWS_INNER, SHARE>(t, r, rank);
        if (threadIdx.x == 32 && rank == 0)
            deal_units<ROWS_INNER, SHARE>(t, r);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply_tiles<A_K, B_K, ROWS_INNER, SHARE>(t, r, rank);
    }
    if (BLOCKS > 1) /* the other may still write here */
        cluster_sync();
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

static bool fits_wgmma(const ith_grouped *g)
{
    bool weight = g->kind == ITH_GROUPED_WEIGHT;
    return g->offsets && g->a.dtype == ITH_BF16 && g->out.dtype == (weight ? ITH_F32 : ITH_BF16) &&
           (weight || !g->accumulate) && rows_aligned(g->a, 8) && rows_aligned(g->b, 8) &&
           rows_aligned(g->out, 8) && ith_numel(g->a) > 0 && ith_numel(g->b) > 0;
}

template <bool A_K, bool B_K, bool ROWS_INNER, sharing SHARE>
static ith_status launch_wgmma(ith_ctx *ctx, const ith_grouped *g, tiled_product &t)
{
    auto kernel = product_wgmma<A_K, B_K, ROWS_INNER, SHARE>;
    int64_t rows = g->a.shape[0], num_tiles = ith_div_ceil(rows, TILE_I) + g->num_groups;
    cudaStream_t stream = ith_cuda_stream(ctx);
    t.j_units = (int32_t)ith_div_ceil(t.p.n, TILE_J * (SHARE == SHARE_A ? 2 : 1));
    t.i_units = (int32_t)ith_div_ceil(t.p.m, TILE_I * (SHARE == SHARE_B ? 2 : 1));
    t.num_units = (ROWS_INNER ? g->num_groups * t.i_units : num_tiles) * t.j_units;
    if (!ROWS_INNER)
        list_tiles<<<1, (unsigned)ith_round_up(g->num_groups, 32), 0, stream>>>(
            t.tiles, num_tiles, g->offsets, g->num_groups, (int32_t)rows, TILE_I);
    ITH_CUDA_TRY(ctx, cudaMemsetAsync(t.dealt, 0, sizeof *t.dealt, stream), g->out);
    ITH_CUDA_TRY(
        ctx,
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES),
        g->out);
    kernel<<<ITH_CUDA_SMS, WARPGROUP + CONSUMERS, SHARED_BYTES, stream>>>(t);
    return ITH_CUDA_LAUNCHED(ctx, g->out);
}

/* Clusters where their two tiles both exist. */
static ith_status run_wgmma(ith_ctx *ctx, const ith_grouped *g, const product &p)
{
    tiled_product t;
    bool even_i = ith_div_ceil(p.m, TILE_I) % 2 == 0, even_j = ith_div_ceil(p.n, TILE_J) % 2 == 0;
    t.p = p;
    t.tiles = (row_tile *)ctx->scratch;
    t.dealt = (int32_t *)(t.tiles + ith_div_ceil(g->a.shape[0], ROW_TILE_MIN) + g->num_groups);
    t.offsets = g->offsets;
    ITH_TRY(ith_cuda_tensor_map(ctx, &t.a_map, g->a));
    ITH_TRY(ith_cuda_tensor_map(ctx, &t.b_map, g->b));
    ITH_TRY(ith_cuda_tensor_map(ctx, &t.c_map, g->out));
    if (g->kind == ITH_GROUPED_FORWARD)
        return even_j ? launch_wgmma<true, true, false, SHARE_A>(ctx, g, t)
                      : launch_wgmma<true, true, false, SHARE_NOTHING>(ctx, g, t);
    if (g->kind == ITH_GROUPED_INPUT)
        return even_j ? launch_wgmma<true, false, false, SHARE_A>(ctx, g, t)
                      : launch_wgmma<true, false, false, SHARE_NOTHING>(ctx, g, t);
    return even_i ? launch_wgmma<false, false, true, SHARE_B>(ctx, g, t)
                  : launch_wgmma<false, false, true, SHARE_NOTHING>(ctx, g, t);
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
    return ith_mul_bytes(ith_div_ceil(rows, ROW_TILE_MIN) + num_groups + 1,
                         (int64_t)sizeof(row_tile)); /* and the counter of units */
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
    bool inner = g->kind == ITH_GROUPED_WEIGHT;
    if (fits_wgmma(g))
        return run_wgmma(ctx, g, p);
    row_tile *tiles = (row_tile *)ctx->scratch;
    int64_t num_tiles = ith_div_ceil(rows, BLOCK) + g->num_groups;
    dim3 grid((unsigned)ith_div_ceil(p.n, BLOCK),
              (unsigned)(inner ? ith_div_ceil(p.m, BLOCK) : num_tiles),
              (unsigned)(inner ? g->num_groups : 1));
    if (!inner)
        list_tiles<<<1, (unsigned)ith_round_up(g->num_groups, 32), 0, ith_cuda_stream(ctx)>>>(
            tiles, num_tiles, g->offsets, g->num_groups, (int32_t)rows, BLOCK);
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
    return run(ctx, ITH_GROUPED_WEIGHT, dw, dy, x, offsets, !ctx->overwrite);
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
