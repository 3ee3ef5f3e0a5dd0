/* delta_states.cu - the walks of the gated delta rule along the chunks, on wgmma: bf16, heads of
 * 128. The formulas are in delta_cuda.cuh, with the same names.
 *
 * A warpgroup owns 64 columns of a state and computes everything transposed: rows of its results
 * are columns of the state. So S^T, X^T, D^T and O^T never leave its registers: what one product
 * leaves there is the next one's left operand, and the right ones (K, Q, Z, P) are tiles that the
 * copy engine brings, some chunks ahead. Results leave through tiles of shared memory, again by the
 * copy engine. A warpgroup waits for nothing but its own products. States are f32; an operand made
 * of one is rounded to bf16. */
#include "kernels/cuda/delta_fast.cuh"

enum { COLS = 64, GROUP_THREADS = 128 }; /* of a state, of a warpgroup */

/* OUTPUTS: O. STATES: what backward wants of the states. BACK: dV, dR, dS. */
enum walk_kind { OUTPUTS, STATES, BACK };

/* ---- stages ---- */

template <bool WHOLE> struct queries {
};
template <> struct queries<true> {
    char q[TILE_BYTES], p[SQUARE_BYTES];
};

/* What a chunk needs, 1024-byte aligned; v: values, or dO. */
template <int GROUPS, bool WHOLE> struct stage : queries<WHOLE> {
    char k[TILE_BYTES], z[SQUARE_BYTES], v[GROUPS][SQUARE_BYTES];
    alignas(1024) float gates[DELTA_GATES][C];
};

template <int GROUPS, walk_kind KIND> struct walk_shared {
    static constexpr bool WHOLE = KIND != STATES;
    static constexpr int STAGES = KIND == BACK && GROUPS > 1 ? 2 : 3;
    static constexpr int RESULTS = KIND == OUTPUTS ? 1 : KIND == STATES ? 3 : 4;
    stage<GROUPS, WHOLE> stages[STAGES];
    char results[GROUPS][RESULTS][SQUARE_BYTES]; /* on their way to memory */
    uint64_t full[STAGES], free[STAGES];
};

/* Maps of [T,H,D] operands as [H,T,D]; v: values or dO, o: O or dV. */
struct walk_args {
    delta_args a;
    bool trial; /* pieces from zero and their maps; nothing else is written */
    CUtensorMap k, q, v, o;
};

/* What a block works on: chunks first, first + step, ... of `count`. */
struct walk_place {
    int64_t head, key, col; /* col: its first column */
    int64_t first, step;
    int count;
    bool map;           /* from the identity, without values or dO, for the map of a piece */
    const float *entry; /* [Dk,Dv], NULL: zero */
    float *exit;        /* NULL: not wanted */
};

/* Where a document of the stretch begins and ends: state, gradient, or what other stretches made
 * and want. */
template <bool BACK>
__device__ __forceinline__ const float *document_entry(const delta_args &a, const delta_span &span,
                                                       int64_t doc, int64_t head)
{
    if (BACK ? span.cut_end : span.cut_begin)
        return a.carried + head * DIM * DIM;
    return state_of(a, BACK ? a.dstate : a.state, doc, head);
}

template <bool BACK>
__device__ __forceinline__ float *document_exit(const delta_args &a, const delta_span &span,
                                                int64_t doc, int64_t head)
{
    if (BACK ? span.cut_begin : span.cut_end)
        return a.carry + head * DIM * DIM;
    return BACK || a.give_state ? state_of(a, BACK ? a.dstate : a.state, doc, head) : NULL;
}

/* False: nothing to do. */
template <int GROUPS, walk_kind KIND>
__device__ __forceinline__ bool find_place(walk_place &p, const walk_args &w)
{
    const delta_args &a = w.a;
    constexpr bool IS_BACK = KIND == BACK;
    int64_t z = blockIdx.z, walks = w.trial && !IS_BACK ? 2 : 1;
    int64_t piece = z / walks % a.pieces, doc = z / walks / a.pieces;
    delta_span span = span_of(a, a.doc + doc);
    int64_t each = (span.end - span.begin + a.pieces - 1) / a.pieces;
    int64_t begin = span.begin + piece * each, end = begin + each;
    begin = begin < span.end ? begin : span.end;
    end = end < span.end ? end : span.end;
    bool is_first = piece == (IS_BACK ? a.pieces - 1 : 0); /* of those that are walked in turn */
    bool is_last = piece == (IS_BACK ? 0 : a.pieces - 1);
    int64_t head = blockIdx.y, cell = ((doc * a.pieces + piece) * a.heads + head) * DIM * DIM;
    p.head = head;
    p.key = head / a.group;
    p.col = (int64_t)blockIdx.x * GROUPS * COLS;
    p.first = IS_BACK ? end - 1 : begin;
    p.step = IS_BACK ? -1 : 1;
    p.count = (int)(end - begin);
    p.map = z % walks == 1;
    p.entry = NULL;
    if (a.pieces > 1 && !w.trial)
        p.entry = a.entries + cell;
    else if (is_first)
        p.entry = document_entry<IS_BACK>(a, span, a.doc + doc, head);
    if (!w.trial)
        p.exit = is_last ? document_exit<IS_BACK>(a, span, a.doc + doc, head) : NULL;
    else
        p.exit = (p.map ? a.maps : a.ends) + cell;
    return !w.trial || ((!is_last || a.carry_only) && !(is_first && p.map));
}

template <int GROUPS, walk_kind KIND>
__device__ __forceinline__ void open_stages(walk_shared<GROUPS, KIND> *sh)
{
    if (threadIdx.x == 0) {
        for (int s = 0; s < sh->STAGES; s++) {
            barrier_init(shared_at(&sh->full[s]), 1);
            barrier_init(shared_at(&sh->free[s]), GROUPS * 4);
        }
        barrier_init_done();
    }
    __syncthreads();
}

/* Stages are taken in turn; `turn` is the parity of a stage's next phase. */
struct stage_turn {
    int stage;
    uint32_t turn;
};
template <int STAGES> __device__ __forceinline__ void advance(stage_turn &t)
{
    bool wraps = t.stage + 1 == STAGES;
    t.stage = wraps ? 0 : t.stage + 1;
    t.turn ^= wraps;
}

/* One thread: the copies of all chunks, each as soon as a stage is free. */
template <int GROUPS, walk_kind KIND>
__device__ __forceinline__ void feed(walk_shared<GROUPS, KIND> *sh, const walk_args &w,
                                     const walk_place &p)
{
    const delta_args &a = w.a;
    const delta_chunk *chunk = a.chunks + p.first;
    int64_t at = (p.first - a.first) * a.heads + p.head;
    stage_turn t = {0, 1};
    int row = p.count ? chunk->row : 0;
    for (int i = 0; i < p.count; i++) {
        chunk += p.step;
        int next = i + 1 < p.count ? chunk->row : 0;
        auto *to = &sh->stages[t.stage];
        uint32_t bar = shared_at(&sh->full[t.stage]), k = shared_at(to->k);
        constexpr uint32_t GATE_BYTES = sizeof to->gates;
        if (i >= sh->STAGES)
            barrier_wait(shared_at(&sh->free[t.stage]), t.turn);
        barrier_expect(bar, (sh->WHOLE ? 2 : 1) * (TILE_BYTES + SQUARE_BYTES) +
                                GROUPS * SQUARE_BYTES + GATE_BYTES);
        copy_box(k, &w.k, bar, 0, row, (int)p.key, 0);
        copy_box(k + PIECE_BYTES, &w.k, bar, PIECE, row, (int)p.key, 0);
        for (int g = 0; g < GROUPS; g++)
            copy_box(shared_at(to->v[g]), &w.v, bar, (int)p.col + g * COLS, row, (int)p.head, 0);
        copy_bytes(shared_at(to->gates), a.gates + at * DELTA_GATES * C, GATE_BYTES, bar);
        if constexpr (walk_shared<GROUPS, KIND>::WHOLE) {
            uint32_t q = shared_at(to->q);
            copy_box(q, &w.q, bar, 0, row, (int)p.key, 0);
            copy_box(q + PIECE_BYTES, &w.q, bar, PIECE, row, (int)p.key, 0);
            copy_bytes(shared_at(to->p), (const bf16 *)a.p + at * C * C, SQUARE_BYTES, bar);
        }
        copy_bytes(shared_at(to->z), (const bf16 *)a.z + at * C * C, SQUARE_BYTES, bar);
        row = next;
        at += p.step * a.heads;
        advance<walk_shared<GROUPS, KIND>::STAGES>(t);
    }
}

/* A stage has come; what lies behind the end of its chunk becomes zero. */
template <int GROUPS, walk_kind KIND>
__device__ __forceinline__ void enter_stage(walk_shared<GROUPS, KIND> *sh, const stage_turn &t,
                                            int rows)
{
    auto *in = &sh->stages[t.stage];
    barrier_wait(shared_at(&sh->full[t.stage]), t.turn);
    if (rows < C) {
        clear_rows<GROUPS * GROUP_THREADS>(in->k, 2, rows);
        clear_rows<GROUPS * GROUP_THREADS>(in->v[0], GROUPS, rows);
        if constexpr (walk_shared<GROUPS, KIND>::WHOLE)
            clear_rows<GROUPS * GROUP_THREADS>(in->q, 2, rows);
        written_for_engines();
        join_threads<GROUPS * GROUP_THREADS>(GROUPS + 1);
    }
}

/* A warp's lanes have read before its first one arrives: __syncwarp orders them. racecheck does not
 * follow that and may say that gates are read while the next ones come; with every lane arriving
 * by itself it says nothing. */
template <int GROUPS, walk_kind KIND>
__device__ __forceinline__ void leave_stage(walk_shared<GROUPS, KIND> *sh, stage_turn &t)
{
    written_for_engines(); /* what was cleared */
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        barrier_arrive(shared_at(&sh->free[t.stage]));
    advance<walk_shared<GROUPS, KIND>::STAGES>(t);
}

/* ---- fragments ---- */

/* Results as left operands. */
template <int N>
__device__ __forceinline__ void as_left(uint32_t (&f)[N / 2][4], const float (&x)[N][4])
{
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            f[k][i] = two(x[2 * k + i / 2][i % 2 * 2], x[2 * k + i / 2][i % 2 * 2 + 1]);
}

/* Two values that columns 8 n + 2 (lane%4) and the next share. */
__device__ __forceinline__ float2 column2(const float *of, int n)
{
    return *reinterpret_cast<const float2 *>(of + 8 * n + (int)threadIdx.x % 4 * 2);
}

/* Where the squares of the transpose of a tile [C,COLS] lie that are a warp's left operand k. */
__device__ __forceinline__ uint32_t turned_at(const char *tile, int k)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % 4;
    int row = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    return shared_at(tile) + (uint32_t)(k * 16 * 128 + row * 128 + (piece ^ row % 8) * 16);
}

__device__ __forceinline__ void load_turned(uint32_t (&f)[C / 16][4], const char *tile)
{
#pragma unroll
    for (int k = 0; k < C / 16; k++)
        load_squares<true>(f[k], turned_at(tile, k));
}

/* Left operands back to tiles [C,COLS], N / 4 of them. */
template <int N> __device__ __forceinline__ void put_turned(char *tiles, const uint32_t (&f)[N][4])
{
#pragma unroll
    for (int k = 0; k < N; k++)
        store_squares<true>(turned_at(tiles, k), f[k]);
}

/* The threads of this warpgroup. */
__device__ __forceinline__ void join_group()
{
    join_threads<GROUP_THREADS>((int)threadIdx.x / GROUP_THREADS + 1);
}

/* One of them starts the stores. */
__device__ __forceinline__ bool is_sender()
{
    return threadIdx.x % GROUP_THREADS == 0;
}

/* Tiles that left earlier may be written again, those of the last LEFT groups of stores aside. */
template <int LEFT> __device__ __forceinline__ void results_free()
{
    if (is_sender())
        stores_wait_read<LEFT>();
    join_group();
}

__device__ __forceinline__ void results_written()
{
    written_for_engines();
    join_group();
}

/* A tile to `rows` rows of memory from `row` on; the rows behind belong to another document. */
__device__ __forceinline__ void send_rows(const CUtensorMap &map, const ith_tensor &to,
                                          const char *tile, int64_t row, int rows, int64_t head,
                                          int64_t col)
{
    if (rows == C) {
        if (is_sender())
            store_box(&map, shared_at(tile), (int)col, (int)row, (int)head);
        return;
    }
    for (int e = (int)threadIdx.x % GROUP_THREADS; e < rows * 8; e += GROUP_THREADS) {
        int i = e / 8, piece = e % 8;
        *(uint4 *)(head_row<bf16>(to, row + i, head) + col + piece * 8) =
            *(const uint4 *)(tile + i * 128 + (piece ^ i % 8) * 16);
    }
}

/* A warpgroup's columns of a state, as left operands, through two tiles to the state's piece `to`
 * and the one below. */
__device__ __forceinline__ void send_state(bf16 *to, char *tiles,
                                           const uint32_t (&left)[DIM / 16][4])
{
    results_free<1>();
    put_turned(tiles, left);
    results_written();
    if (!is_sender())
        return;
    store_bytes(to, shared_at(tiles), SQUARE_BYTES);
    store_bytes(to + 2 * C * COLS, shared_at(tiles + SQUARE_BYTES), SQUARE_BYTES);
    stores_end();
}

/* A warpgroup's columns of a state in f32 memory [Dk,Dv], from `col` on; s is the transpose. */
__device__ __forceinline__ void load_state(float (&s)[DIM / 8][4], const walk_place &p, int64_t col)
{
    int lane = (int)threadIdx.x % 32;
    int64_t j0 = col + (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int64_t i = n * 8 + lane % 4 * 2 + e % 2, j = j0 + e / 2 * 8;
            s[n][e] = p.map ? (i == j ? 1.0f : 0.0f) : p.entry ? p.entry[i * DIM + j] : 0.0f;
        }
}

__device__ __forceinline__ void save_state(float *to, const float (&s)[DIM / 8][4])
{
    int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < DIM / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[(int64_t)(n * 8 + lane % 4 * 2 + e % 2) * DIM + row + e / 2 * 8] = s[n][e];
}

/* ---- products: queued, c [64,8N] (+)= f B for a tile B ---- */

/* B = K^T or Q^T of a tile [C,DIM]. */
__device__ __forceinline__ void times_turned(float (&c)[C / 8][4], const uint32_t (&f)[DIM / 16][4],
                                             const char *tile)
{
    uint64_t b = operand_at<true>(shared_at(tile));
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
        wgmma<true>(c, f[k], b + (uint64_t)(k / 4 * (PIECE_BYTES >> 4)) + k % 4 * NEXT_16<true>,
                    k > 0);
}

/* Of a tile [C,C] or its transpose; ADD: to c. */
template <bool TURN, bool ADD>
__device__ __forceinline__ void times_square(float (&c)[C / 8][4], const uint32_t (&f)[C / 16][4],
                                             const char *tile)
{
    uint64_t b = operand_at<TURN>(shared_at(tile));
#pragma unroll
    for (int k = 0; k < C / 16; k++)
        wgmma<TURN>(c, f[k], b + k * NEXT_16<TURN>, ADD || k > 0);
}

/* B = a tile [C,DIM], added. */
__device__ __forceinline__ void times_rows(float (&c)[DIM / 8][4], const uint32_t (&f)[C / 16][4],
                                           const char *tile)
{
    uint64_t b = operand_at<false>(shared_at(tile));
#pragma unroll
    for (int k = 0; k < C / 16; k++)
        wgmma<false>(c, f[k], b + k * NEXT_16<false>, true);
}

/* ---- walks ---- */

/* A warpgroup's part of OUTPUTS and STATES. */
template <int GROUPS, walk_kind KIND>
__device__ __forceinline__ void walk(walk_shared<GROUPS, KIND> *sh, const walk_args &w,
                                     const walk_place &p)
{
    constexpr bool OUT = KIND == OUTPUTS;
    const delta_args &a = w.a;
    int group = (int)threadIdx.x / GROUP_THREADS;
    int64_t size = (int64_t)DIM * DIM, col = p.col + group * COLS, side = col / COLS;
    char(*results)[SQUARE_BYTES] = sh->results[group];
    float s[DIM / 8][4];
    uint32_t d[C / 16][4]; /* D^T, and what is on its way out */
    load_state(s, p, col);
    delta_chunk chunk = {}, next = {};
    if (p.count)
        next = a.chunks[p.first];
    /* O of the chunk before leaves under the first products of the next. */
    auto send = [&] {
        results_free<0>();
        put_turned(results[0], d);
        results_written();
        send_rows(w.o, a.o, results[0], chunk.row, chunk.rows, p.head, col);
        stores_end();
    };
    int64_t at = (p.first - a.first) * a.heads + p.head;
    stage_turn t = {};
    for (int i = 0; i < p.count; i++, at += a.heads) {
        const auto *in = &sh->stages[t.stage];
        const float(*gates)[C] = in->gates;
        uint32_t left[DIM / 16][4], f[C / 16][4];
        float x[C / 8][4], o[C / 8][4];
        as_left(left, s);
        enter_stage(sh, t, next.rows);
        wgmma_begin();
        times_turned(x, left, in->k);
        wgmma_commit();
        if constexpr (OUT) {
            times_turned(o, left, in->q);
            wgmma_commit();
            if (i > 0)
                send();
        }
        chunk = next;
        if (i + 1 < p.count)
            next = a.chunks[p.first + i + 1];
        load_turned(f, in->v[group]);
        if (!OUT && a.states && !w.trial)
            send_state((bf16 *)a.states + at * size + side * C * COLS, results[0], left);
        wgmma_wait<OUT ? 1 : 0>();
        wgmma_results(x);
#pragma unroll
        for (int n = 0; n < C / 8; n++) { /* x becomes X^T */
            float2 read = column2(gates[DELTA_READ_K], n), beta = column2(gates[DELTA_BETA], n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t &own = f[n / 2][n % 2 * 2 + h];
                float2 v = !OUT && p.map ? make_float2(0, 0) : both(own);
                x[n][2 * h] = v.x - read.x * x[n][2 * h];
                x[n][2 * h + 1] = v.y - read.y * x[n][2 * h + 1];
                own = two(-beta.x * x[n][2 * h], -beta.y * x[n][2 * h + 1]);
            }
        }
        wgmma_begin();
        times_square<true, true>(x, f, in->z);
        wgmma_commit();
        float last = gates[DELTA_DECAY][C - 1];
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] *= last;
        wgmma_wait<0>();
        wgmma_results(x); /* Y^T */
        if (OUT)
            wgmma_results(o);
#pragma unroll
        for (int n = 0; n < C / 8; n++) {
            float2 beta = column2(gates[DELTA_BETA], n), write = column2(gates[DELTA_WRITE_K], n);
            float2 read = column2(gates[DELTA_READ_Q], n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float y0 = beta.x * x[n][2 * h], y1 = beta.y * x[n][2 * h + 1];
                d[n / 2][n % 2 * 2 + h] = two(y0, y1);
                f[n / 2][n % 2 * 2 + h] = two(write.x * y0, write.y * y1);
                if (OUT) {
                    o[n][2 * h] *= read.x;
                    o[n][2 * h + 1] *= read.y;
                }
            }
        }
        wgmma_begin();
        times_rows(s, f, in->k);
        wgmma_commit();
        if constexpr (OUT) {
            times_square<true, true>(o, d, in->p);
            wgmma_commit();
        } else if (a.y && !w.trial) {
            results_free<1>();
            as_left(d, x);
            put_turned(results[2], d);
            results_written();
            if (is_sender()) {
                store_bytes((bf16 *)a.y + (at * 2 + side) * C * COLS, shared_at(results[2]),
                            SQUARE_BYTES);
                stores_end();
            }
        }
        wgmma_wait<0>();
        wgmma_results(s);
        leave_stage(sh, t);
        if constexpr (OUT) {
            wgmma_results(o);
            as_left(d, o);
        }
    }
    if (OUT && p.count)
        send();
    if (p.exit)
        save_state(p.exit + col, s);
    stores_wait();
}

/* A warpgroup's part of BACK. */
template <int GROUPS>
__device__ __forceinline__ void walk_back(walk_shared<GROUPS, BACK> *sh, const walk_args &w,
                                          const walk_place &p)
{
    const delta_args &a = w.a;
    int group = (int)threadIdx.x / GROUP_THREADS;
    int64_t size = (int64_t)DIM * DIM, col = p.col + group * COLS, side = col / COLS;
    char(*results)[SQUARE_BYTES] = sh->results[group];
    float s[DIM / 8][4];
    load_state(s, p, col);
    delta_chunk chunk = {}, next = {};
    if (p.count)
        next = a.chunks[p.first];
    int64_t at = (p.first - a.first) * a.heads + p.head;
    stage_turn t = {};
    for (int i = 0; i < p.count; i++, at -= a.heads) {
        const auto *in = &sh->stages[t.stage];
        const float(*gates)[C] = in->gates;
        uint32_t left[DIM / 16][4], f[C / 16][4], r[C / 16][4];
        float d[C / 8][4], x[C / 8][4];
        chunk = next;
        if (i + 1 < p.count)
            next = a.chunks[p.first - i - 1];
        as_left(left, s);
        enter_stage(sh, t, chunk.rows);
        load_turned(f, in->v[group]);
        float last = gates[DELTA_DECAY][C - 1];
#pragma unroll
        for (int n = 0; n < DIM / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[n][e] *= last;
        wgmma_begin();
        times_turned(d, left, in->k);
        times_square<false, false>(x, f, in->p);
        wgmma_commit();
#pragma unroll
        for (int n = 0; n < C / 8; n++) {
            float2 read = column2(gates[DELTA_READ_Q], n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float2 g = both(f[n / 2][n % 2 * 2 + h]);
                r[n / 2][n % 2 * 2 + h] = two(read.x * g.x, read.y * g.y);
            }
        }
        wgmma_begin();
        times_rows(s, r, in->q);
        wgmma_commit();
        if (!w.trial)
            send_state((bf16 *)a.dstates + at * size + side * C * COLS, results[0], left);
        wgmma_wait<1>();
        wgmma_results(d);
        wgmma_results(x);
#pragma unroll
        for (int n = 0; n < C / 8; n++) { /* d becomes dD^T */
            float2 write = column2(gates[DELTA_WRITE_K], n), beta = column2(gates[DELTA_BETA], n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                d[n][2 * h] = x[n][2 * h] + write.x * d[n][2 * h];
                d[n][2 * h + 1] = x[n][2 * h + 1] + write.y * d[n][2 * h + 1];
                f[n / 2][n % 2 * 2 + h] = two(-beta.x * d[n][2 * h], -beta.y * d[n][2 * h + 1]);
            }
        }
        wgmma_begin();
        times_square<false, true>(d, f, in->z);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_results(d); /* dR^T */
        wgmma_results(s);
#pragma unroll
        for (int n = 0; n < C / 8; n++) {
            float2 read = column2(gates[DELTA_READ_K], n), beta = column2(gates[DELTA_BETA], n);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float v0 = beta.x * d[n][2 * h], v1 = beta.y * d[n][2 * h + 1];
                r[n / 2][n % 2 * 2 + h] = two(v0, v1);
                f[n / 2][n % 2 * 2 + h] = two(-read.x * v0, -read.y * v1);
            }
        }
        wgmma_begin();
        times_rows(s, f, in->k);
        wgmma_commit();
        if (!w.trial) {
            results_free<1>();
            put_turned(results[3], r);
            as_left(r, d);
            put_turned(results[2], r);
            results_written();
            if (is_sender())
                store_bytes((bf16 *)a.dr + (at * 2 + side) * C * COLS, shared_at(results[2]),
                            SQUARE_BYTES);
            send_rows(w.o, a.dv, results[3], chunk.row, chunk.rows, p.head, col);
            stores_end();
        }
        wgmma_wait<0>();
        wgmma_results(s);
        leave_stage(sh, t);
    }
    if (p.exit)
        save_state(p.exit + col, s);
    stores_wait();
}

/* One and two groups share 512. With one group, too: where a block asks for registers the compiler
 * keeps addresses of operands in uniform registers, else it moves them there before every product.
 */
enum { FEED_REGISTERS = 40, WALK_REGISTERS = 232 };

/* grid: column blocks, value heads, documents x pieces (x 2 with maps) */
template <int GROUPS, walk_kind KIND>
__global__ void __launch_bounds__((GROUPS + 1) * GROUP_THREADS, 1)
    walk_chunks(const __grid_constant__ walk_args w)
{
    extern __shared__ __align__(1024) char shared[];
    auto *sh = (walk_shared<GROUPS, KIND> *)shared;
    walk_place p;
    if (!find_place<GROUPS, KIND>(p, w))
        return;
    open_stages(sh);
    if (threadIdx.x >= GROUPS * GROUP_THREADS) {
        registers_give<FEED_REGISTERS>();
        if (threadIdx.x == GROUPS * GROUP_THREADS)
            feed(sh, w, p);
    } else {
        registers_take<WALK_REGISTERS>();
        if constexpr (KIND == BACK)
            walk_back(sh, w, p);
        else
            walk(sh, w, p);
    }
}

/* ---- from piece to piece ---- */

enum { CHAIN_COLS = 16, CHAIN_THREADS = 256, CHAIN_LOADS = DIM * DIM / 4 / CHAIN_THREADS };

/* A thread makes two rows, `first` and `first` + `apart`, and four columns. */
typedef struct {
    float map[DIM][DIM + 4], s[DIM][CHAIN_COLS];
} chain_shared;

__device__ __forceinline__ void add_times(float4 &to, float f, const float4 &x)
{
    to.x += f * x.x;
    to.y += f * x.y;
    to.z += f * x.z;
    to.w += f * x.w;
}

/* out += map s; TURN: map^T s, for rows that lie side by side. */
template <bool TURN>
__device__ __forceinline__ void add_map(float4 (&out)[2], const chain_shared *sh, int row,
                                        int apart, int col)
{
#pragma unroll 4
    for (int k = 0; k < DIM; k += 4) {
        float f[2][4];
        if constexpr (TURN) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 pair = *(const float2 *)&sh->map[k + j][row];
                f[0][j] = pair.x;
                f[1][j] = pair.y;
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; r++)
                load_any<float, 4>(f[r], &sh->map[row + r * apart][k]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 x = *(const float4 *)&sh->s[k + j][col];
            add_times(out[0], f[0][j], x);
            add_times(out[1], f[1][j], x);
        }
    }
}

/* Entries of all pieces in f32: S <- map S + end; BACK: map^T, from the last. The first one is
 * copied, for the last walk may write where it lies. A map comes while the one before is at work.
 * grid: columns of the state, value heads, documents */
template <bool BACK>
__global__ void __launch_bounds__(CHAIN_THREADS) chain_pieces(const delta_args a)
{
    extern __shared__ __align__(1024) char shared[];
    chain_shared *sh = (chain_shared *)shared;
    constexpr int APART = BACK ? 1 : DIM / 2;
    int id = (int)threadIdx.x, col = id % 4 * 4, row = id / 4 * (BACK ? 2 : 1);
    int64_t head = blockIdx.y, size = (int64_t)DIM * DIM, step = BACK ? -1 : 1;
    int64_t at = (int64_t)blockIdx.x * CHAIN_COLS + col;
    delta_span span = span_of(a, a.doc + blockIdx.z);
    const float *entry = document_entry<BACK>(a, span, a.doc + blockIdx.z, head);
    int64_t turns = a.carry_only && span.cut_end ? a.pieces : a.pieces - 1;
    int64_t piece = (int64_t)blockIdx.z * a.pieces + (BACK ? a.pieces - 1 : 0);
    float4 next[CHAIN_LOADS], out[2];
    auto place = [&](float *of, int64_t p, int r) {
        return (float4 *)(of + (p * a.heads + head) * size + (row + r * APART) * DIM + at);
    };
#pragma unroll
    for (int r = 0; r < 2; r++)
        *place(a.entries, piece, r) = entry
                                          ? *(const float4 *)(entry + (row + r * APART) * DIM + at)
                                          : make_float4(0, 0, 0, 0);
    for (int64_t n = 0; n < turns; n++, piece += step) {
        for (int r = 0; r < 2; r++)
            out[r] = *place(a.ends, piece, r);
        if (n > 0) { /* the first one began as it should */
            for (int i = 0; i < CHAIN_LOADS; i++)
                *(float4 *)&sh->map[i * (CHAIN_THREADS / 32) + id / 32][id % 32 * 4] = next[i];
            __syncthreads();
        }
        if (n + 1 < turns) {
            const float4 *map = (const float4 *)(a.maps + ((piece + step) * a.heads + head) * size);
            for (int i = 0; i < CHAIN_LOADS; i++)
                next[i] = map[i * CHAIN_THREADS + id];
        }
        if (n > 0)
            add_map<BACK>(out, sh, row, APART, col);
        __syncthreads();
        for (int r = 0; r < 2; r++) {
            *(float4 *)&sh->s[row + r * APART][col] = out[r];
            if (n + 1 < a.pieces)
                *place(a.entries, piece + step, r) = out[r];
            else
                *(float4 *)(a.carry + head * size + (row + r * APART) * DIM + at) = out[r];
        }
    }
}

/* ---- launches ---- */

template <int GROUPS, walk_kind KIND>
static cudaError_t launch(cudaStream_t stream, const walk_args *w, int64_t docs)
{
    int bytes = (int)sizeof(walk_shared<GROUPS, KIND>);
    int64_t walks = docs * w->a.pieces * (w->trial && KIND != BACK ? 2 : 1);
    dim3 grid((unsigned)(DIM / (GROUPS * COLS)), (unsigned)w->a.heads, (unsigned)walks);
    cudaError_t code = cudaFuncSetAttribute(walk_chunks<GROUPS, KIND>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    walk_chunks<GROUPS, KIND><<<grid, (GROUPS + 1) * GROUP_THREADS, (size_t)bytes, stream>>>(*w);
    return code;
}

/* A block owns a whole state where these fill half the device or more, else half a state. */
template <walk_kind KIND> static ith_status walk_all(ith_ctx *ctx, const walk_args *w, int64_t docs)
{
    bool wide = 2 * w->a.heads * docs * w->a.pieces > ITH_CUDA_SMS;
    ITH_CUDA_TRY(ctx,
                 wide ? (launch<2, KIND>(ith_cuda_stream(ctx), w, docs))
                      : (launch<1, KIND>(ith_cuda_stream(ctx), w, docs)),
                 w->a.q);
    return ITH_OK;
}

/* TRIAL: how pieces are walked to learn their ends and maps. */
template <walk_kind KIND, walk_kind TRIAL>
static ith_status start(ith_ctx *ctx, const delta_args *a, int64_t docs, ith_tensor v, ith_tensor o)
{
    walk_args w;
    w.a = *a;
    w.trial = false;
    ITH_TRY(delta_fast_map(ctx, &w.k, a->k));
    ITH_TRY(delta_fast_map(ctx, &w.q, a->q));
    ITH_TRY(delta_fast_map(ctx, &w.v, v));
    if (!is_absent(o))
        ITH_TRY(delta_fast_map(ctx, &w.o, o));
    if (a->pieces > 1) {
        dim3 grid(DIM / CHAIN_COLS, (unsigned)a->heads, (unsigned)docs);
        w.trial = true;
        ITH_TRY(walk_all<TRIAL>(ctx, &w, docs));
        int bytes = (int)sizeof(chain_shared);
        ITH_CUDA_TRY(ctx,
                     cudaFuncSetAttribute(chain_pieces<KIND == BACK>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                     a->q);
        chain_pieces<KIND == BACK>
            <<<grid, CHAIN_THREADS, (size_t)bytes, ith_cuda_stream(ctx)>>>(*a);
        w.trial = false;
        if (a->carry_only)
            return ITH_OK;
    }
    return walk_all<KIND>(ctx, &w, docs);
}

ith_status delta_fast_scan(ith_ctx *ctx, const delta_args *a, int64_t docs)
{
    return is_absent(a->o) ? start<STATES, STATES>(ctx, a, docs, a->v, a->o)
                           : start<OUTPUTS, STATES>(ctx, a, docs, a->v, a->o);
}

ith_status delta_fast_scan_back(ith_ctx *ctx, const delta_args *a, int64_t docs)
{
    return start<BACK, BACK>(ctx, a, docs, a->do_, a->dv);
}
