/* delta_grads.cu - gradients of q, k, decay and beta of the gated delta rule, for all chunks at
 * once, on wgmma: bf16, heads of 128. The formulas are in delta_cuda.cuh, with the same names.
 *
 * A block takes a chunk of a key head and goes through its value heads, then the next one that is
 * left. Both warpgroups have all 64 tokens; each has a half of the columns, of gradients and of
 * masks. While the last sums of a value head are made, the next one's operands come in. */
#include "kernels/cuda/delta_fast.cuh"

enum { SIDES = 2, THREADS = SIDES * 128, SIDE = DIM / SIDES, MASK_SIDE = C / SIDES };
enum { TILE = C * DIM, SQUARE = C * C };

/* Of a chunk and key head. */
typedef struct {
    alignas(1024) bf16 q[TILE], k[TILE];
    float q_norm[C], k_norm[C];
} grads_pair;

/* What dg is made of, of each warp. */
typedef struct {
    float rows[SIDES][C], cols[4][C], reads[SIDES][C], writes[SIDES][C];
    double through[THREADS / 32];
} decay_sums;

typedef struct {
    grads_pair pair[2]; /* in the end dq and dk lie where q and k were */
    alignas(1024) bf16 dout[TILE], y[TILE], dr[TILE];
    bf16 s[DIM * DIM], ds[DIM * DIM];
    /* Np and Nk times the norms of k (columns), of q and k (rows) */
    bf16 np_k[SQUARE], np_q[SQUARE], nk_k[SQUARE], nk_t[SQUARE];
    log_sum sum[C];
    float gates[DELTA_BETA + 1][C];
    decay_sums sums[2];              /* of a value head and the next */
    float ends[2][SIDES][C];         /* dQ q, dK k */
    uint64_t rows_here, states_here; /* barriers of what comes from memory */
} grads_shared;

struct grads_args {
    delta_args a;
    CUtensorMap q, k, dout, dq, dk; /* of [T,H,D] as [H,T,D] */
    int64_t items;                  /* chunks of key heads */
};

/* What a block works on. */
struct grads_place {
    delta_chunk chunk;
    int64_t key, cell, key_cell; /* in scratch: of the chunk's first value head, of the key head */
};

__device__ __forceinline__ grads_place grads_place_of(const delta_args &a, int64_t item)
{
    int64_t keys = a.heads / a.group, c = item / keys;
    grads_place p = {a.chunks[a.first + c], item % keys, c * a.heads, item};
    return p;
}

/* ---- fragments: rows m + lane/4 (+ 8), columns 8 n + 2 (lane%4) + {0, 1} from `from` on ---- */

/* Where this lane's row of matrices of columns `from` + 16 k and on lies in a tile. */
__device__ __forceinline__ uint32_t matrices_at(const bf16 *tile, int m, int from, int k)
{
    int lane = (int)threadIdx.x % 32, row = m + lane % 16,
        piece = from % 64 / 8 + 2 * k + lane / 16;
    return shared_at(tile) +
           (uint32_t)(from / 64 * PIECE_BYTES + row * 128 + (piece ^ row % 8) * 16);
}

template <int N>
__device__ __forceinline__ void load_matrices(uint32_t (&x)[N][4], const bf16 *tile, int m,
                                              int from)
{
#pragma unroll
    for (int k = 0; k < N; k++)
        load_squares(x[k], matrices_at(tile, m, from, k));
}

template <int N>
__device__ __forceinline__ void store_matrices(bf16 *tile, const uint32_t (&x)[N][4], int m,
                                               int from)
{
#pragma unroll
    for (int k = 0; k < N; k++)
        store_squares(matrices_at(tile, m, from, k), x[k]);
}

typedef uint32_t side_units[SIDE / 16][4]; /* a warp's part of q or k, as in memory */

/* ---- loads: one thread starts them ---- */

__device__ __forceinline__ void fetch_tile(bf16 *to, const CUtensorMap *map, uint32_t bar,
                                           const grads_place &p, int64_t head)
{
    copy_box(shared_at(to), map, bar, 0, p.chunk.row, (int)head, 0);
    copy_box(shared_at(to) + PIECE_BYTES, map, bar, PIECE, p.chunk.row, (int)head, 0);
}

/* A value head's operands, with the pair's when it is the first. */
__device__ __forceinline__ void fetch(grads_shared *sh, grads_pair *pair, const grads_args &w,
                                      const grads_place &p, int64_t head)
{
    const delta_args &a = w.a;
    int64_t at = p.cell + head;
    uint32_t bar = shared_at(&sh->rows_here), states = shared_at(&sh->states_here);
    barrier_expect(bar, 3 * TILE_BYTES + sizeof sh->gates + sizeof sh->sum +
                            (pair ? 2 * TILE_BYTES + 2 * sizeof pair->q_norm : 0));
    if (pair) {
        fetch_tile(pair->q, &w.q, bar, p, p.key);
        fetch_tile(pair->k, &w.k, bar, p, p.key);
        copy_bytes(shared_at(pair->q_norm), a.norms + p.key_cell * 2 * C, 2 * sizeof pair->q_norm,
                   bar);
    }
    fetch_tile(sh->dout, &w.dout, bar, p, head);
    copy_bytes(shared_at(sh->y), (const bf16 *)a.y + at * TILE, TILE_BYTES, bar);
    copy_bytes(shared_at(sh->dr), (const bf16 *)a.dr + at * TILE, TILE_BYTES, bar);
    copy_bytes(shared_at(sh->gates), a.gates + at * DELTA_GATES * C, sizeof sh->gates, bar);
    copy_bytes(shared_at(sh->sum), (const log_sum *)a.sums + at * C, sizeof sh->sum, bar);
    barrier_expect(states, sizeof sh->s + sizeof sh->ds);
    copy_bytes(shared_at(sh->s), (const bf16 *)a.states + at * DIM * DIM, sizeof sh->s, states);
    copy_bytes(shared_at(sh->ds), (const bf16 *)a.dstates + at * DIM * DIM, sizeof sh->ds, states);
}

/* ---- products: queued, for a warpgroup's 64 rows ---- */

/* t = a b^T, rows first .. first + 8 N of b; both [.,DIM], b of any number of tiles. */
template <int N>
__device__ __forceinline__ void product_t(float (&t)[N][4], const bf16 *a, const bf16 *b, int first)
{
    uint64_t left = operand_at<true>(shared_at(a));
    uint64_t right = operand_at<true>(shared_at(b + first / C * TILE) + first % C * 128);
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint64_t at = k / 4 * (PIECE_BYTES >> 4) + k % 4 * NEXT_16<true>;
        wgmma<true, true>(t, left + at, right + at, k > 0);
    }
}

/* total += a b (TURN: a^T b) for a [C,C] and the columns of b from `half` on. */
template <bool TURN>
__device__ __forceinline__ void add_square(float (&total)[SIDE / 8][4], const bf16 *a,
                                           const bf16 *b, int half)
{
    uint64_t left = operand_at<!TURN>(shared_at(a));
    uint64_t right = operand_at<false>(shared_at(b) + half / 64 * PIECE_BYTES + half % 64 * 2);
#pragma unroll
    for (int k = 0; k < C / 16; k++)
        wgmma<!TURN, false>(total, left + k * NEXT_16<!TURN>, right + k * NEXT_16<false>, true);
}

/* ---- sums ---- */

/* total += f x, f by rows; returns row sums of f x times unit over the warp's columns. */
__device__ __forceinline__ float2 take(float (&total)[SIDE / 8][4], const float (&x)[SIDE / 8][4],
                                       const float (&f)[2], const side_units &unit)
{
    float dots[2] = {};
#pragma unroll
    for (int k = 0; k < SIDE / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int n = 2 * k + i / 2, r = i % 2;
            float2 u = both(unit[k][i]);
            float a = x[n][2 * r] * f[r], b = x[n][2 * r + 1] * f[r];
            total[n][2 * r] += a;
            total[n][2 * r + 1] += b;
            dots[r] += u.x * a + u.y * b;
        }
    return make_float2(group_sum(dots[0], 4), group_sum(dots[1], 4));
}

/* The same of a whole. */
__device__ __forceinline__ float2 dot_rows(const float (&total)[SIDE / 8][4],
                                           const side_units &unit)
{
    float dots[2] = {};
#pragma unroll
    for (int k = 0; k < SIDE / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int n = 2 * k + i / 2, r = i % 2;
            float2 u = both(unit[k][i]);
            dots[r] += u.x * total[n][2 * r] + u.y * total[n][2 * r + 1];
        }
    return make_float2(group_sum(dots[0], 4), group_sum(dots[1], 4));
}

__device__ __forceinline__ void put_rows(float *to, float2 dots, int m)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4;
    if (lane % 4 == 0) {
        to[m + g] = dots.x;
        to[m + g + 8] = dots.y;
    }
}

typedef float mask_part[MASK_SIDE / 8][4];

/* Np, Nk as operands; row and column sums of C; dbeta. qk, kk: products of the raw vectors, np, nk:
 * of dO and dR with Y. */
__device__ __forceinline__ void
make_masks(grads_shared *sh, decay_sums *sums, const grads_pair *pair, const delta_args &a,
           const delta_chunk &chunk, int64_t head, const mask_part &qk, const mask_part &kk,
           const mask_part &np, const mask_part &nk, int m, int half)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = (int)threadIdx.x / 32;
    log_sum row_sum[2];
    float row_beta[2], row_q[2], row_k[2], rows[2] = {}, diagonal[2] = {};
    uint32_t out[4][MASK_SIDE / 16][4]; /* np_k, np_q, nk_k, nk_t */
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = m + g + 8 * e;
        row_sum[e] = sh->sum[i];
        row_beta[e] = -sh->gates[DELTA_BETA][i];
        row_q[e] = pair->q_norm[i];
        row_k[e] = pair->k_norm[i];
    }
#pragma unroll
    for (int n = 0; n < MASK_SIDE / 8; n++) {
        int j0 = half + n * 8 + 2 * t;
        log_sum col_sum[2] = {sh->sum[j0], sh->sum[j0 + 1]};
        float2 beta = *(const float2 *)(sh->gates[DELTA_BETA] + j0);
        float2 k_norm = *(const float2 *)(pair->k_norm + j0);
        float col_beta[2] = {beta.x, beta.y}, col_k[2] = {k_norm.x, k_norm.y}, cols[2] = {};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int i = m + g + e * 8, at = n % 2 * 2 + e;
            float p[2] = {}, x[2] = {};
#pragma unroll
            for (int d = 0; d < 2; d++) {
                int j = j0 + d;
                float decay = decay_of(row_sum[e], col_sum[d]) * col_beta[d];
                diagonal[e] = j == i ? nk[n][2 * e + d] : diagonal[e];
                p[d] = j <= i ? np[n][2 * e + d] * decay : 0.0f;
                x[d] = j < i ? row_beta[e] * nk[n][2 * e + d] * decay : 0.0f;
                float carried = j < i ? col_k[d] * (p[d] * row_q[e] * qk[n][2 * e + d] +
                                                    x[d] * row_k[e] * kk[n][2 * e + d])
                                      : 0.0f;
                rows[e] += carried;
                cols[d] += carried;
            }
            out[0][n / 2][at] = two(p[0] * col_k[0], p[1] * col_k[1]);
            out[1][n / 2][at] = two(p[0] * row_q[e], p[1] * row_q[e]);
            out[2][n / 2][at] = two(x[0] * col_k[0], x[1] * col_k[1]);
            out[3][n / 2][at] = two(x[0] * row_k[e], x[1] * row_k[e]);
        }
#pragma unroll
        for (int d = 0; d < 2; d++) {
            for (int o = 4; o < 32; o <<= 1)
                cols[d] += __shfl_xor_sync(0xffffffffu, cols[d], o);
            if (g == 0)
                sums->cols[warp % 4][j0 + d] = cols[d];
        }
    }
    store_matrices(sh->np_k, out[0], m, half);
    store_matrices(sh->np_q, out[1], m, half);
    store_matrices(sh->nk_k, out[2], m, half);
    store_matrices(sh->nk_t, out[3], m, half);
    put_rows(sums->rows[warp / 4], make_float2(group_sum(rows[0], 4), group_sum(rows[1], 4)), m);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int i = m + g + 8 * e;
        if (i / MASK_SIDE == warp / 4 && i % 8 / 2 == t && i < chunk.rows)
            ((float *)a.dbeta.data)[(chunk.row + i) * a.dbeta.stride[0] + head] = diagonal[e];
    }
}

/* A thread's share of <S, dS>. */
__device__ __forceinline__ double state_dot(const grads_shared *sh)
{
    double total = 0;
#pragma unroll 4
    for (int e = (int)threadIdx.x; e < DIM * DIM / 8; e += THREADS) {
        float u[8], v[8], sum = 0;
        load_any<bf16, 8>(u, sh->s + e * 8);
        load_any<bf16, 8>(v, sh->ds + e * 8);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum += u[i] * v[i];
        total += (double)sum;
    }
    return group_sum(total, 32);
}

/* dg of a chunk from all sums, by one warp: two tokens a lane, from the last one. */
__device__ __forceinline__ void finish_decay(const decay_sums *sh, const delta_args &a,
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
    for (int w = 0; w < THREADS / 32; w++)
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

/* dx = norm (total - unit (unit . total)), to a tile; unit2: the square of the unit vector's
 * length, dots: unit . total without the norm. */
__device__ __forceinline__ void put_unit(bf16 *tile, const float (&total)[SIDE / 8][4],
                                         const side_units &unit, const float *norm,
                                         const float (*dots)[C], float unit2, int m, int half)
{
    int g = (int)threadIdx.x % 32 / 4;
    float n[2], f[2];
    side_units out;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = m + g + 8 * r;
        n[r] = norm[i];
        f[r] = -(dots[0][i] + dots[1][i]) * n[r] * n[r] * n[r] / unit2;
    }
#pragma unroll
    for (int k = 0; k < SIDE / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int c = 2 * k + i / 2, r = i % 2;
            float2 u = both(unit[k][i]);
            out[k][i] =
                two(n[r] * total[c][2 * r] + f[r] * u.x, n[r] * total[c][2 * r + 1] + f[r] * u.y);
        }
    store_matrices(tile, out, m, half);
}

/* A tile to a chunk's rows; the rows behind belong to another document. */
__device__ __forceinline__ void send_tile(const CUtensorMap &map, const ith_tensor &to,
                                          const bf16 *tile, const grads_place &p)
{
    if (p.chunk.rows == C) {
        if (threadIdx.x == 0)
            for (int piece = 0; piece < 2; piece++)
                store_box(&map, shared_at(tile) + (uint32_t)piece * PIECE_BYTES, piece * PIECE,
                          p.chunk.row, (int)p.key);
        return;
    }
    for (int e = (int)threadIdx.x; e < p.chunk.rows * (DIM / 8); e += THREADS) {
        int i = e / (DIM / 8), j = e % (DIM / 8) * 8;
        *(uint4 *)(head_row<bf16>(to, p.chunk.row + i, p.key) + j) =
            *(const uint4 *)(tile + place_of(i, j));
    }
}

/* dq, dk, dg, dbeta */
__global__ void __launch_bounds__(THREADS, 1) grads(const __grid_constant__ grads_args w)
{
    extern __shared__ __align__(1024) char shared[];
    grads_shared *sh = (grads_shared *)shared;
    const delta_args &a = w.a;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4;
    int side =
        __shfl_sync(0xffffffffu, warp / 4, 0); /* so that operands lie in uniform registers */
    int m = warp % 4 * 16, half = side * SIDE, mask = side * MASK_SIDE;
    int64_t item = blockIdx.x;
    uint32_t parity = 0;
    grads_place p = grads_place_of(a, item), next = p;
    if (threadIdx.x == 0) {
        barrier_init(shared_at(&sh->rows_here), 1);
        barrier_init(shared_at(&sh->states_here), 1);
        barrier_init_done();
        fetch(sh, &sh->pair[0], w, p, p.key * a.group);
    }
    __syncthreads();
    for (int turn = 0; item < w.items; turn ^= 1, p = next) {
        grads_pair *pair = &sh->pair[turn];
        float dq[SIDE / 8][4] = {}, dk[SIDE / 8][4] = {};
        side_units q, k;
        int64_t begin = p.key * a.group, end = begin + a.group;
        item += gridDim.x;
        if (item < w.items)
            next = grads_place_of(a, item);
        for (int64_t head = begin; head < end; head++, parity ^= 1) {
            decay_sums *sums = &sh->sums[parity];
            float x[3][SIDE / 8][4];
            mask_part qk, kk, np, nk;
            barrier_wait(shared_at(&sh->rows_here), parity);
            if (p.chunk.rows < C) {
                clear_rows<THREADS>(sh->dout, 2, p.chunk.rows);
                clear_rows<THREADS>(pair->q, 2, p.chunk.rows);
                clear_rows<THREADS>(pair->k, 2, p.chunk.rows);
                written_for_engines();
                __syncthreads();
            }
            wgmma_begin();
            product_t(qk, pair->q, pair->k, mask);
            product_t(kk, pair->k, pair->k, mask);
            product_t(np, sh->dout, sh->y, mask);
            product_t(nk, sh->dr, sh->y, mask);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_results(qk);
            wgmma_results(kk);
            wgmma_results(np);
            wgmma_results(nk);
            make_masks(sh, sums, pair, a, p.chunk, head, qk, kk, np, nk, m, mask);
            written_for_engines();
            barrier_wait(shared_at(&sh->states_here), parity);
            __syncthreads();
            wgmma_begin();
            product_t(x[0], sh->dout, sh->s, half);
            product_t(x[1], sh->dr, sh->s, half);
            product_t(x[2], sh->y, sh->ds, half);
            wgmma_commit();
            add_square<false>(dq, sh->np_k, pair->k, half);
            add_square<false>(dk, sh->nk_k, pair->k, half);
            add_square<true>(dk, sh->np_q, pair->q, half);
            add_square<true>(dk, sh->nk_t, pair->k, half);
            wgmma_commit();
            double through = state_dot(sh);
            if (lane == 0)
                sums->through[warp] = through;
            load_matrices(q, pair->q, m, half);
            load_matrices(k, pair->k, m, half);
            float last = sh->gates[DELTA_DECAY][C - 1], f[2], r[2], v[2], q_norm[2], k_norm[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int i = m + g + 8 * e;
                float beta = sh->gates[DELTA_BETA][i];
                f[e] = sh->gates[DELTA_DECAY][i];
                r[e] = -f[e] * beta;
                v[e] = sh->gates[DELTA_TAIL][i] * beta;
                q_norm[e] = pair->q_norm[i];
                k_norm[e] = pair->k_norm[i];
            }
            wgmma_wait<0>();
            wgmma_results(x[0]);
            wgmma_results(x[1]);
            wgmma_results(x[2]);
            wgmma_results(dq);
            wgmma_results(dk);
            __syncthreads();
            if (threadIdx.x == 0) { /* over what is read no more */
                written_for_engines();
                stores_wait_read();
                if (head + 1 < end)
                    fetch(sh, NULL, w, p, head + 1);
                else if (item < w.items)
                    fetch(sh, &sh->pair[turn ^ 1], w, next, next.key * a.group);
            }
            float2 q_read = take(dq, x[0], f, q), k_read = take(dk, x[1], r, k);
            float2 k_write = take(dk, x[2], v, k);
            put_rows(sums->reads[side],
                     make_float2(q_read.x * q_norm[0] + k_read.x * k_norm[0],
                                 q_read.y * q_norm[1] + k_read.y * k_norm[1]),
                     m);
            put_rows(sums->writes[side], make_float2(k_write.x * k_norm[0], k_write.y * k_norm[1]),
                     m);
            if (head + 1 == end) {
                put_rows(sh->ends[0][side], dot_rows(dq, q), m);
                put_rows(sh->ends[1][side], dot_rows(dk, k), m);
            }
            __syncthreads();
            if (warp == 0)
                finish_decay(sums, a, p.chunk, head, last);
        }
        put_unit(pair->q, dq, q, pair->q_norm, sh->ends[0], a.scale * a.scale, m, half);
        put_unit(pair->k, dk, k, pair->k_norm, sh->ends[1], 1.0f, m, half);
        written_for_engines();
        __syncthreads();
        send_tile(w.dq, a.dq, pair->q, p);
        send_tile(w.dk, a.dk, pair->k, p);
        if (threadIdx.x == 0)
            stores_end();
    }
    if (threadIdx.x == 0)
        stores_wait();
}

static cudaError_t launch(cudaStream_t stream, const grads_args *w)
{
    int bytes = (int)sizeof(grads_shared);
    cudaError_t code =
        cudaFuncSetAttribute(grads, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    grads<<<grid_of(w->items, 1, ITH_CUDA_SMS), THREADS, (size_t)bytes, stream>>>(*w);
    return code;
}

ith_status delta_fast_grads(ith_ctx *ctx, const delta_args *a)
{
    grads_args w;
    w.a = *a;
    w.items = a->count * (a->heads / a->group);
    ITH_TRY(delta_fast_map(ctx, &w.q, a->q));
    ITH_TRY(delta_fast_map(ctx, &w.k, a->k));
    ITH_TRY(delta_fast_map(ctx, &w.dout, a->do_));
    ITH_TRY(delta_fast_map(ctx, &w.dq, a->dq));
    ITH_TRY(delta_fast_map(ctx, &w.dk, a->dk));
    ITH_CUDA_TRY(ctx, launch(ith_cuda_stream(ctx), &w), a->q);
    return ITH_OK;
}
