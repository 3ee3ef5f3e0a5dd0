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

typedef struct {
    grads_pair pair[2];
    alignas(1024) bf16 dout[TILE], y[TILE], dr[TILE];
    bf16 s[DIM * DIM], ds[DIM * DIM];
    /* Np and Nk times the norms of k (columns), of q and k (rows) */
    bf16 np_k[SQUARE], np_q[SQUARE], nk_k[SQUARE], nk_t[SQUARE];
    log_sum sum[C];
    float gates[DELTA_BETA + 1][C];
    float rows[SIDES][C], cols[4][C], reads[SIDES][C], writes[SIDES][C]; /* of each warp */
    double through[THREADS / 32];
    uint64_t rows_here, states_here; /* barriers of what comes from memory */
} grads_shared;

struct grads_args {
    delta_args a;
    CUtensorMap q, k, dout; /* of [T,H,D] as [H,T,D] */
    int64_t items;          /* chunks of key heads */
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

__device__ __forceinline__ float2 get2(const bf16 *from)
{
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(from));
}

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

/* Row sums of unit o x over a warp's columns. unit: a tile of vectors, norm: of its rows. */
__device__ __forceinline__ void dot_rows(float (&dots)[2], const float (&x)[SIDE / 8][4],
                                         const bf16 *unit, const float *norm, int m, int half)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    dots[0] = dots[1] = 0;
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            float2 u = get2(unit + place_of(m + g + e / 2 * 8, half + n * 8 + 2 * t));
            dots[e / 2] += u.x * x[n][e] + u.y * x[n][e + 1];
        }
    dots[0] = group_sum(dots[0], 4) * norm[m + g];
    dots[1] = group_sum(dots[1], 4) * norm[m + g + 8];
}

/* x scaled by rows, itself added to total. */
__device__ __forceinline__ void take(float (&total)[SIDE / 8][4], float (&x)[SIDE / 8][4],
                                     const float (&f)[2])
{
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[n][e] *= f[e / 2];
            total[n][e] += x[n][e];
        }
}

__device__ __forceinline__ void put_rows(float *to, const float (&dots)[2], int m)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4;
    if (lane % 4 == 0) {
        to[m + g] = dots[0];
        to[m + g + 8] = dots[1];
    }
}

typedef float mask_part[MASK_SIDE / 8][4];

/* Np, Nk as operands; row and column sums of C; dbeta. qk, kk: products of the raw vectors, np, nk:
 * of dO and dR with Y. */
__device__ __forceinline__ void make_masks(grads_shared *sh, const grads_pair *pair,
                                           const delta_args &a, const delta_chunk &chunk,
                                           int64_t head, const mask_part &qk, const mask_part &kk,
                                           const mask_part &np, const mask_part &nk, int m,
                                           int half)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = (int)threadIdx.x / 32;
    log_sum row_sum[2];
    float row_beta[2], row_q[2], row_k[2], rows[2] = {};
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
            int i = m + g + e * 8, at = place_of(i, j0);
            float p[2] = {}, x[2] = {};
#pragma unroll
            for (int d = 0; d < 2; d++) {
                int j = j0 + d;
                float decay = decay_of(row_sum[e], col_sum[d]) * col_beta[d];
                if (j == i && i < chunk.rows)
                    ((float *)a.dbeta.data)[(chunk.row + i) * a.dbeta.stride[0] + head] =
                        nk[n][2 * e + d];
                if (j <= i)
                    p[d] = np[n][2 * e + d] * decay;
                if (j < i) {
                    x[d] = row_beta[e] * nk[n][2 * e + d] * decay;
                    float carried = col_k[d] * (p[d] * row_q[e] * qk[n][2 * e + d] +
                                                x[d] * row_k[e] * kk[n][2 * e + d]);
                    rows[e] += carried;
                    cols[d] += carried;
                }
            }
            put2(sh->np_k + at, p[0] * col_k[0], p[1] * col_k[1]);
            put2(sh->np_q + at, p[0] * row_q[e], p[1] * row_q[e]);
            put2(sh->nk_k + at, x[0] * col_k[0], x[1] * col_k[1]);
            put2(sh->nk_t + at, x[0] * row_k[e], x[1] * row_k[e]);
        }
#pragma unroll
        for (int d = 0; d < 2; d++) {
            for (int o = 4; o < 32; o <<= 1)
                cols[d] += __shfl_xor_sync(0xffffffffu, cols[d], o);
            if (g == 0)
                sh->cols[warp % 4][j0 + d] = cols[d];
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++)
        rows[e] = group_sum(rows[e], 4);
    put_rows(sh->rows[warp / 4], rows, m);
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

/* dx = norm (total - unit (unit . total)); unit2: the square of the unit vector's length. */
__device__ __forceinline__ void store_unit(const ith_tensor &out, const delta_chunk &chunk,
                                           int64_t key, const float (&total)[SIDE / 8][4],
                                           const bf16 *unit, const float *norm, float (*dots)[C],
                                           float unit2, int m, int half)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        int i = m + g + e / 2 * 8;
        float f = 0;
        for (int w = 0; w < SIDES; w++)
            f += dots[w][i];
        f *= norm[i] / unit2;
#pragma unroll
        for (int n = 0; n < SIDE / 8; n++) {
            int j = half + n * 8 + 2 * t;
            float2 u = get2(unit + place_of(i, j));
            if (i < chunk.rows)
                put2(head_row<bf16>(out, chunk.row + i, key) + j, norm[i] * (total[n][e] - u.x * f),
                     norm[i] * (total[n][e + 1] - u.y * f));
        }
    }
}

/* dq, dk, dg, dbeta */
__global__ void __launch_bounds__(THREADS, 1) grads(const __grid_constant__ grads_args w)
{
    extern __shared__ __align__(1024) char shared[];
    grads_shared *sh = (grads_shared *)shared;
    const delta_args &a = w.a;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4;
    int m = warp % 4 * 16, side = warp / 4, half = side * SIDE, mask = side * MASK_SIDE;
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
        float dq[SIDE / 8][4] = {}, dk[SIDE / 8][4] = {}, dots[2];
        int64_t begin = p.key * a.group, end = begin + a.group;
        item += gridDim.x;
        if (item < w.items)
            next = grads_place_of(a, item);
        for (int64_t head = begin; head < end; head++, parity ^= 1) {
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
            make_masks(sh, pair, a, p.chunk, head, qk, kk, np, nk, m, mask);
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
                sh->through[warp] = through;
            float last = sh->gates[DELTA_DECAY][C - 1], f[2], r[2], v[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int i = m + g + 8 * e;
                float beta = sh->gates[DELTA_BETA][i];
                f[e] = sh->gates[DELTA_DECAY][i];
                r[e] = -f[e] * beta;
                v[e] = sh->gates[DELTA_TAIL][i] * beta;
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
                if (head + 1 < end)
                    fetch(sh, NULL, w, p, head + 1);
                else if (item < w.items)
                    fetch(sh, &sh->pair[turn ^ 1], w, next, next.key * a.group);
            }
            take(dq, x[0], f);
            take(dk, x[1], r);
            take(dk, x[2], v);
            float reads[2], more[2];
            dot_rows(reads, x[0], pair->q, pair->q_norm, m, half);
            dot_rows(more, x[1], pair->k, pair->k_norm, m, half);
            reads[0] += more[0];
            reads[1] += more[1];
            put_rows(sh->reads[side], reads, m);
            dot_rows(more, x[2], pair->k, pair->k_norm, m, half);
            put_rows(sh->writes[side], more, m);
            __syncthreads();
            if (warp == 0)
                finish_decay(sh, a, p.chunk, head, last);
        }
        __syncthreads();
        dot_rows(dots, dq, pair->q, pair->q_norm, m, half);
        put_rows(sh->reads[side], dots, m);
        dot_rows(dots, dk, pair->k, pair->k_norm, m, half);
        put_rows(sh->writes[side], dots, m);
        written_for_engines();
        __syncthreads();
        store_unit(a.dq, p.chunk, p.key, dq, pair->q, pair->q_norm, sh->reads, a.scale * a.scale, m,
                   half);
        store_unit(a.dk, p.chunk, p.key, dk, pair->k, pair->k_norm, sh->writes, 1.0f, m, half);
    }
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
    ITH_CUDA_TRY(ctx, launch(ith_cuda_stream(ctx), &w), a->q);
    return ITH_OK;
}
