/* attention_tiles.cu - attention on tensor cores under every mask of ith_seqs: bf16, head sizes up
 * to 256, any row stride that is 16-byte aligned. No atomics: the bits never vary.
 *
 * A block is one warpgroup. It owns 64 or 128 rows of a head and walks tiles of 64 rows of the
 * other side through two stages of shared memory; only tiles that some of its rows see are visited.
 * Forward and dq own queries; dk and dv own keys and sum over the query heads of their kv head.
 * Products are wgmma: what one leaves in registers is the next one's left operand. Products
 * computed: 2 forward, 7 backward (cuDNN's 5, for it adds dq up with atomics). Two blocks share a
 * multiprocessor, so that one multiplies while the other weighs. */
#include "kernels/cuda/attention_mask.cuh"
#include "kernels/cuda/hopper.cuh"

enum { WARPS = 4, THREADS = 32 * WARPS, OTHER = 64, MAX_DIM = 256 };

#define LOG2_E 1.4426950408889634f

/* One tensor [T,heads,dim]; strides in elements. Results may be parts of a sum: f32. */
struct head_rows {
    bf16 *data;
    int64_t row, head;
};

struct tiles_args {
    attn_mask mask;
    head_rows q, k, v, o, do_, dq, dk, dv;
    float *lse, *delta; /* [T,Hq] */
    int32_t q_heads, group, dim;
    float scale;
    bool parts; /* results are f32 */
};

/* ---- products ----
 * Results: rows 16 warp + lane/4 and 8 below (half 0 and 1), columns 8 n + 2 (lane%4) and the next
 * of c[n], c[n][2 half], c[n][2 half + 1]. Operands in shared memory are panels of 64 columns, rows
 * of 128 bytes, whose 16-byte pieces are permuted: piece i of row r lies at i ^ (r % 8). */

/* Where a matrix lies, in the words of the hardware: bytes / 16; 128-byte swizzle, 8 rows every
 * 1024 bytes. panel: bytes between panels, for matrices whose columns are columns of the result. */
__device__ __forceinline__ uint64_t matrix_at(uint32_t at, uint32_t panel)
{
    return (uint64_t)(at >> 4) | (uint64_t)(panel >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

#define C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define C16(i) C4(i), C4(i + 1), C4(i + 2), C4(i + 3)
#define LIST32                                                                                     \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
    "%25,%26,%27,%28,%29,%30,%31"
#define LIST40 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define LIST64                                                                                     \
    LIST40 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60," \
           "%61,%62,%63"

#define LIST128                                                                                    \
    LIST64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84," \
           "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104," \
           "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121," \
           "%122,%123,%124,%125,%126,%127"

/* c (+)= A B^T, A: 64 rows, B: 64 rows, 16 columns of both. */
__device__ __forceinline__ void multiply(float (&c)[8][4], uint64_t a, uint64_t b, int add)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LIST32
                 "}, %32, %33, p, 1, 1, 0, 0;}"
                 : C16(0), C16(4)
                 : "l"(a), "l"(b), "r"(add));
}

/* c += a B, a: 64 rows of registers, B: 16 rows, 8 * (size of c) columns. */
__device__ __forceinline__ void multiply_add(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LIST32
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                 : C16(0), C16(4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

__device__ __forceinline__ void multiply_add(float (&c)[10][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %45, 0; "
                 "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" LIST40
                 "}, {%40,%41,%42,%43}, %44, p, 1, 1, 1;}"
                 : C16(0), C16(4), C4(8), C4(9)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

__device__ __forceinline__ void multiply_add(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LIST64
                 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
                 : C16(0), C16(4), C16(8), C16(12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

__device__ __forceinline__ void multiply_add(float (&c)[32][4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" LIST128
                 "}, {%128,%129,%130,%131}, %132, p, 1, 1, 1;}"
                 : C16(0), C16(4), C16(8), C16(12), C16(16), C16(20), C16(24), C16(28)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

/* Reads of c stay behind the wait before this. */
template <int N> __device__ __forceinline__ void settle(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : C4(n)::"memory");
}

/* Two units in the last place: far below the rounding of weights to bf16. */
__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t two(float lo, float hi)
{
    __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&x);
}

/* ---- tiles in shared memory ---- */

template <int D> constexpr int PANELS = (D + 63) / 64;
/* Elements of 64 rows, and bytes of a panel of them. Tiles of more rows are several of these. */
template <int D> constexpr int TILE = PANELS<D> * 64 * 64;
enum { PANEL_BYTES = 64 * 64 * 2 };

/* Rows [row0, row0 + 64) of one head; zeros from `end` and from dim on. */
template <int D>
__device__ __forceinline__ void fetch_rows(bf16 *to, const head_rows &t, int64_t head, int32_t row0,
                                           int32_t end, int dim)
{
    const bf16 *from = t.data + head * t.head;
    for (int n = (int)threadIdx.x; n < 64 * (D / 8); n += THREADS) {
        int r = n / (D / 8), c = n % (D / 8);
        uint32_t at =
            shared_at(to) + (uint32_t)(c / 8 * PANEL_BYTES + r * 128 + (c % 8 ^ r % 8) * 16);
        bool live = row0 + r < end && c * 8 < dim;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at),
                     "l"(live ? from + (row0 + r) * t.row + c * 8 : from), "r"(live ? 16 : 0)
                     : "memory");
    }
}

/* Queues c = A B^T for tiles A and B. */
template <int D>
__device__ __forceinline__ void product(float (&c)[OTHER / 8][4], uint32_t a, uint32_t b)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t at = (uint32_t)(k / 4 * PANEL_BYTES + k % 4 * 32);
        multiply(c, matrix_at(a + at, 16), matrix_at(b + at, 16), k > 0);
    }
}

/* Results as left operands. */
typedef uint32_t left_operands[OTHER / 16][4];

__device__ __forceinline__ void as_left(left_operands &a, const float (&x)[OTHER / 8][4])
{
#pragma unroll
    for (int k = 0; k < OTHER / 16; k++) {
        a[k][0] = two(x[2 * k][0], x[2 * k][1]);
        a[k][1] = two(x[2 * k][2], x[2 * k][3]);
        a[k][2] = two(x[2 * k + 1][0], x[2 * k + 1][1]);
        a[k][3] = two(x[2 * k + 1][2], x[2 * k + 1][3]);
    }
}

/* Queues acc += a B for a tile B. */
template <int D>
__device__ __forceinline__ void add_product(float (&acc)[D / 8][4], const left_operands &a,
                                            uint32_t b)
{
#pragma unroll
    for (int k = 0; k < OTHER / 16; k++)
        multiply_add(acc, a[k], matrix_at(b + (uint32_t)k * 16 * 128, PANEL_BYTES));
}

/* Own rows: factor * acc of the row's half (0: lane/4, 1: 8 below). */
template <int D>
__device__ __forceinline__ void store_rows(const head_rows &t, int64_t head, int64_t row, int lane,
                                           int half, const float (&acc)[D / 8][4], float factor,
                                           int dim, bool part)
{
    int64_t at = row * t.row + head * t.head + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float x = acc[n][2 * half] * factor, y = acc[n][2 * half + 1] * factor;
        if (n * 8 < dim && part)
            *reinterpret_cast<float2 *>(reinterpret_cast<float *>(t.data) + at + n * 8) = {x, y};
        else if (n * 8 < dim)
            *reinterpret_cast<uint32_t *>(t.data + at + n * 8) = two(x, y);
    }
}

/* ---- the walk ---- */

/* What rows see of a part: [any_lo, any_hi) holds all of it, and all rows see [all_lo, all_hi). */
struct bounds {
    int32_t any_lo, any_hi, all_lo, all_hi;
};

/* Tiles of both parts, one after the other. */
struct walk {
    int32_t begin[2], end[2], count[2];
};

struct tile {
    int32_t begin, end;
    int part;
};

__device__ __forceinline__ tile tile_at(const walk &w, int32_t i)
{
    if (i < w.count[0])
        return {w.begin[0] + i * OTHER, w.end[0], 0};
    return {w.begin[1] + (i - w.count[0]) * OTHER, w.end[1], 1};
}

/* Fills own[ROWS]; m-th 16 rows of a warp: from 64 m + 16 warp on. The warp's bounds and the
 * block's walk. All threads. */
template <int ROWS>
__device__ __forceinline__ walk plan_walk(stretches *own, bounds (&mine)[2], const attn_mask &mask,
                                          int32_t row0, bool of_key)
{
    __shared__ bounds all[WARPS][2];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    int at = lane / 16 % (ROWS / 64) * 64 + warp * 16 + lane % 16;
    stretches s = stretches_of(mask, row0 + at, of_key);
    bool live = row0 + at < (of_key ? mask.k.count : mask.q.count);
    own[at] = s;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        bool some = s.hi[part] > s.lo[part];
        mine[part].any_lo = __reduce_min_sync(0xffffffffu, some ? s.lo[part] : INT32_MAX);
        mine[part].any_hi = __reduce_max_sync(0xffffffffu, some ? s.hi[part] : 0);
        mine[part].all_lo = __reduce_max_sync(0xffffffffu, live ? s.lo[part] : 0);
        mine[part].all_hi = __reduce_min_sync(0xffffffffu, live ? s.hi[part] : INT32_MAX);
        if (lane == 0)
            all[warp][part] = mine[part];
    }
    __syncthreads();
    walk w;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        int32_t lo = INT32_MAX, hi = 0;
        for (int i = 0; i < WARPS; i++) {
            lo = min(lo, all[i][part].any_lo);
            hi = max(hi, all[i][part].any_hi);
        }
        w.begin[part] = lo;
        w.end[part] = hi;
        w.count[part] = hi > lo ? (hi - lo + OTHER - 1) / OTHER : 0;
    }
    return w;
}

/* Every row of the warp sees the whole tile. */
__device__ __forceinline__ bool covers(const bounds (&b)[2], const tile &t)
{
    bounds of = t.part ? b[1] : b[0]; /* constant indices: registers */
    return t.begin >= of.all_lo && t.begin + OTHER <= of.all_hi;
}

/* s = value where the row of own[first + lane/4 (+ 8)] does not see the column. column0: of s[0].
 */
__device__ __forceinline__ void hide(float (&s)[OTHER / 8][4], const stretches *own, int part,
                                     int32_t column0, int lane, float value)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int32_t lo = own[lane / 4 + 8 * half].lo[part], hi = own[lane / 4 + 8 * half].hi[part];
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int32_t c = column0 + n * 8 + lane % 4 * 2 + j;
                if (c < lo || c >= hi)
                    s[n][2 * half + j] = value;
            }
    }
}

/* ---- forward ---- */

/* Over the four lanes of a row. */
__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Scores of 16 rows become weights; top, sum (this lane's share) and acc follow the new maximum. */
template <int D>
__device__ __forceinline__ void weigh(float (&s)[OTHER / 8][4], float (&acc)[D / 8][4],
                                      float (&top)[2], float (&sum)[2], float scale_log2)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = top[half], added = 0;
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
            max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        max = quad_max(max);
        float base = max == -INFINITY ? 0.0f : max * scale_log2;
        float back = power_of_two(top[half] * scale_log2 - base);
        top[half] = max;
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float p = power_of_two(s[n][2 * half + j] * scale_log2 - base);
                s[n][2 * half + j] = p;
                added += p;
            }
        sum[half] = sum[half] * back + added;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            acc[n][2 * half] *= back;
            acc[n][2 * half + 1] *= back;
        }
    }
}

/* Panels begin at multiples of 1024 bytes. */
__device__ __forceinline__ bf16 *align_tiles(char *memory)
{
    return reinterpret_cast<bf16 *>(memory + (1024 - shared_at(memory) % 1024) % 1024);
}

/* Of so many tiles. */
template <int D> static constexpr size_t shared_bytes(int tiles)
{
    return 1024 + (size_t)(tiles * TILE<D>)*sizeof(bf16);
}

/* Blocks of a multiprocessor, and groups of 64 rows that a block owns in forward: what registers
 * and shared memory hold. */
template <int D> constexpr int BLOCKS = D > 128 ? 1 : 2;
template <int D> constexpr int GROUPS = D > 128 ? 1 : 2;

template <int D>
__global__ void __launch_bounds__(THREADS, BLOCKS<D>)
    tiles_forward(const __grid_constant__ tiles_args a)
{
    constexpr int M = GROUPS<D>, ROWS = 64 * M;
    extern __shared__ char memory[];
    __shared__ stretches own[ROWS];
    bf16 *tiles = align_tiles(memory), *stages = tiles + M * TILE<D>;
    int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16;
    int32_t row0 = (int32_t)(gridDim.x - 1 - blockIdx.x) * ROWS; /* the longest walks first */
    int32_t h = (int32_t)blockIdx.y, kv = h / a.group;
    bounds mine[2];
    walk w = plan_walk<ROWS>(own, mine, a.mask, row0, false);
    int32_t total = w.count[0] + w.count[1];
    for (int m = 0; m < M; m++)
        fetch_rows<D>(tiles + m * TILE<D>, a.q, h, row0 + 64 * m, (int32_t)a.mask.q.count, a.dim);
    auto fetch = [&](int32_t i) {
        bf16 *to = stages + i % 2 * 2 * TILE<D>;
        if (i < total) {
            tile t = tile_at(w, i);
            fetch_rows<D>(to, a.k, kv, t.begin, t.end, a.dim);
            fetch_rows<D>(to + TILE<D>, a.v, kv, t.begin, t.end, a.dim);
        }
        copies_end();
    };
    uint32_t qs = shared_at(tiles);
    float acc[M][D / 8][4] = {}, top[M][2], sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++)
        top[m][0] = top[m][1] = -INFINITY;
    fetch(0);
    for (int32_t i = 0; i < total; i++) {
        fetch(i + 1);
        copies_wait_but_last();
        written_for_engines();
        __syncthreads();
        tile t = tile_at(w, i);
        uint32_t ks = shared_at(stages + i % 2 * 2 * TILE<D>), vs = ks + TILE<D> * 2;
        bool hidden = !covers(mine, t);
        float s[M][OTHER / 8][4];
        left_operands p[M];
        wgmma_begin();
#pragma unroll
        for (int m = 0; m < M; m++) {
            product<D>(s[m], qs + m * TILE<D> * 2, ks);
            wgmma_commit();
        }
#pragma unroll
        for (int m = 0; m < M; m++) { /* the other half multiplies while this one weighs */
            wgmma_wait<M - 1>();
            settle(s[m]);
            if (hidden)
                hide(s[m], own + m * 64 + first, t.part, t.begin, lane, -INFINITY);
            weigh<D>(s[m], acc[m], top[m], sum[m], a.scale * LOG2_E);
            as_left(p[m], s[m]);
            wgmma_begin();
            add_product<D>(acc[m], p[m], vs);
            wgmma_commit();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < M; m++)
            settle(acc[m]);
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t row = row0 + m * 64 + first + lane / 4 + 8 * half;
            float all = quad_sum(sum[m][half]);
            if (row >= a.mask.q.count)
                continue;
            store_rows<D>(a.o, h, row, lane, half, acc[m], all > 0 ? 1.0f / all : 0.0f, a.dim,
                          a.parts);
            if (lane % 4 == 0)
                a.lse[row * a.q_heads + h] = top[m][half] * a.scale + logf(all);
        }
}

/* ---- backward ---- */

/* delta[t,h] = sum_d do*o: 16 lanes each, 8 elements a lane at a time. */
__global__ void tiles_delta(const __grid_constant__ tiles_args a)
{
    int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    int d = (int)threadIdx.x % 16 * 8;
    bool live = at < a.mask.q.count * a.q_heads;
    int64_t t = at / a.q_heads, h = at - t * a.q_heads;
    float sum = 0;
    for (; live && d < a.dim; d += 128) {
        float x[8], y[8];
        load_f32<bf16, 8>(x, a.do_.data + t * a.do_.row + h * a.do_.head + d);
        load_f32<bf16, 8>(y, a.o.data + t * a.o.row + h * a.o.head + d);
#pragma unroll
        for (int j = 0; j < 8; j++)
            sum += x[j] * y[j];
    }
    sum = group_sum(sum, 16);
    if (live && threadIdx.x % 16 == 0)
        a.delta[at] = sum;
}

template <int D>
__global__ void __launch_bounds__(THREADS, BLOCKS<D>) tiles_dq(const __grid_constant__ tiles_args a)
{
    extern __shared__ char memory[];
    __shared__ stretches own[64];
    bf16 *tiles = align_tiles(memory), *stages = tiles + 2 * TILE<D>;
    int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16;
    int32_t row0 = (int32_t)(gridDim.x - 1 - blockIdx.x) * 64;
    int32_t h = (int32_t)blockIdx.y, kv = h / a.group;
    bounds mine[2];
    walk w = plan_walk<64>(own, mine, a.mask, row0, false);
    int32_t total = w.count[0] + w.count[1], tokens = (int32_t)a.mask.q.count;
    fetch_rows<D>(tiles, a.q, h, row0, tokens, a.dim);
    fetch_rows<D>(tiles + TILE<D>, a.do_, h, row0, tokens, a.dim);
    auto fetch = [&](int32_t i) {
        bf16 *to = stages + i % 2 * 2 * TILE<D>;
        if (i < total) {
            tile t = tile_at(w, i);
            fetch_rows<D>(to, a.k, kv, t.begin, t.end, a.dim);
            fetch_rows<D>(to + TILE<D>, a.v, kv, t.begin, t.end, a.dim);
        }
        copies_end();
    };
    uint32_t qs = shared_at(tiles), gs = qs + TILE<D> * 2;
    float acc[D / 8][4] = {}, lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = row0 + first + lane / 4 + 8 * half;
        lse[half] = row < tokens ? a.lse[row * a.q_heads + h] * LOG2_E : 0.0f;
        delta[half] = row < tokens ? a.delta[row * a.q_heads + h] : 0.0f;
    }
    fetch(0);
    for (int32_t i = 0; i < total; i++) {
        fetch(i + 1);
        copies_wait_but_last();
        written_for_engines();
        __syncthreads();
        tile t = tile_at(w, i);
        uint32_t ks = shared_at(stages + i % 2 * 2 * TILE<D>);
        float s[OTHER / 8][4], dp[OTHER / 8][4];
        left_operands ds;
        wgmma_begin();
        product<D>(s, qs, ks);
        wgmma_commit();
        product<D>(dp, gs, ks + TILE<D> * 2);
        wgmma_commit();
        wgmma_wait<1>();
        settle(s);
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[n][j] = power_of_two(s[n][j] * (a.scale * LOG2_E) - lse[j / 2]);
        if (!covers(mine, t))
            hide(s, own + first, t.part, t.begin, lane, 0.0f);
        wgmma_wait<0>();
        settle(dp);
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[n][j] *= dp[n][j] - delta[j / 2];
        as_left(ds, s);
        wgmma_begin();
        add_product<D>(acc, ds, ks);
        wgmma_commit();
        wgmma_wait<0>();
        settle(acc);
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = row0 + first + lane / 4 + 8 * half;
        if (row < tokens)
            store_rows<D>(a.dq, h, row, lane, half, acc, a.scale, a.dim, a.parts);
    }
}

/* Columns of scores are queries here. Registers hold both gradients of heads up to 128; wider ones
 * are made one by one. */
template <int D, bool DK, bool DV>
__global__ void __launch_bounds__(THREADS, BLOCKS<D>)
    tiles_dkv(const __grid_constant__ tiles_args a)
{
    extern __shared__ char memory[];
    __shared__ stretches own[64];
    __shared__ float stats[2][2][OTHER]; /* lse and delta of a stage */
    bf16 *tiles = align_tiles(memory), *stages = tiles + 2 * TILE<D>;
    int lane = (int)threadIdx.x % 32, first = (int)threadIdx.x / 32 * 16;
    int32_t row0 = (int32_t)blockIdx.x * 64, kv = (int32_t)blockIdx.y;
    bounds mine[2];
    walk w = plan_walk<64>(own, mine, a.mask, row0, true);
    int32_t each = w.count[0] + w.count[1], total = each * a.group;
    int32_t tokens = (int32_t)a.mask.k.count;
    fetch_rows<D>(tiles, a.k, kv, row0, tokens, a.dim);
    fetch_rows<D>(tiles + TILE<D>, a.v, kv, row0, tokens, a.dim);
    auto fetch = [&](int32_t i) {
        bf16 *to = stages + i % 2 * 2 * TILE<D>;
        if (i < total) {
            int32_t h = kv * a.group + i / each;
            tile t = tile_at(w, i % each);
            fetch_rows<D>(to, a.q, h, t.begin, t.end, a.dim);
            fetch_rows<D>(to + TILE<D>, a.do_, h, t.begin, t.end, a.dim);
            int64_t row = t.begin + (int32_t)threadIdx.x % OTHER;
            const float *from = threadIdx.x < OTHER ? a.lse : a.delta;
            float *at = &stats[i % 2][threadIdx.x / OTHER][threadIdx.x % OTHER];
            if (row < t.end)
                copy_ahead(at, from + row * a.q_heads + h);
            else
                *at = 0;
        }
        copies_end();
    };
    uint32_t ks = shared_at(tiles), vs = ks + TILE<D> * 2;
    float dk[DK ? D / 8 : 1][4] = {}, dv[DV ? D / 8 : 1][4] = {};
    fetch(0);
    for (int32_t i = 0; i < total; i++) {
        fetch(i + 1);
        copies_wait_but_last();
        written_for_engines();
        __syncthreads();
        tile t = tile_at(w, i % each);
        uint32_t qs = shared_at(stages + i % 2 * 2 * TILE<D>), gs = qs + TILE<D> * 2;
        const float *lse = stats[i % 2][0] + lane % 4 * 2, *delta = lse + OTHER;
        float p[OTHER / 8][4], ds[OTHER / 8][4];
        left_operands left_p, left_ds;
        wgmma_begin();
        product<D>(p, ks, qs);
        wgmma_commit();
        if constexpr (DK)
            product<D>(ds, vs, gs);
        wgmma_commit();
        wgmma_wait<1>();
        settle(p);
#pragma unroll
        for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                p[n][j] = power_of_two(p[n][j] * (a.scale * LOG2_E) - lse[n * 8 + j % 2] * LOG2_E);
        if (!covers(mine, t))
            hide(p, own + first, t.part, t.begin, lane, 0.0f);
        if constexpr (DV) {
            as_left(left_p, p);
            wgmma_begin();
            add_product<D>(dv, left_p, gs);
        }
        wgmma_commit();
        if constexpr (DK) {
            wgmma_wait<1>();
            settle(ds);
#pragma unroll
            for (int n = 0; n < OTHER / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    ds[n][j] = (ds[n][j] - delta[n * 8 + j % 2]) * p[n][j];
            as_left(left_ds, ds);
            wgmma_begin();
            add_product<D>(dk, left_ds, qs);
            wgmma_commit();
        }
        wgmma_wait<0>();
        settle(dv);
        settle(dk);
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = row0 + first + lane / 4 + 8 * half;
        if (row >= tokens)
            continue;
        if constexpr (DK)
            store_rows<D>(a.dk, kv, row, lane, half, dk, a.scale, a.dim, a.parts);
        if constexpr (DV)
            store_rows<D>(a.dv, kv, row, lane, half, dv, 1.0f, a.dim, a.parts);
    }
}

/* ---- host ---- */

bool ith_attention_tiles_fit(ith_tensor t)
{
    return (t.dtype == ITH_BF16 || t.dtype == ITH_F32) && t.shape[2] % 8 == 0 &&
           t.shape[2] <= MAX_DIM && t.stride[2] == 1 && (uintptr_t)t.data % 16 == 0 &&
           t.stride[0] % 8 == 0 && t.stride[1] % 8 == 0 && t.shape[0] <= INT32_MAX / 2;
}

static head_rows rows_of(ith_tensor t)
{
    return {(bf16 *)t.data, t.stride[0], t.stride[1]};
}

static tiles_args args_of(ith_tensor q, ith_tensor k, ith_tensor v, ith_tensor o, ith_tensor lse,
                          ith_seqs seqs, float scale, bool causal)
{
    tiles_args a = {};
    a.mask = mask_of(seqs, q.shape[0], k.shape[0], causal);
    a.parts = o.dtype != q.dtype;
    a.q = rows_of(q);
    a.k = rows_of(k);
    a.v = rows_of(v);
    a.o = rows_of(o);
    a.lse = (float *)lse.data;
    a.q_heads = (int32_t)q.shape[1];
    a.group = (int32_t)(q.shape[1] / k.shape[1]);
    a.dim = (int32_t)q.shape[2];
    a.scale = scale;
    return a;
}

/* The smallest tile that holds a head. */
#define BY_DIM(dim, F)                                                                             \
    do {                                                                                           \
        if ((dim) <= 64)                                                                           \
            F(64);                                                                                 \
        else if ((dim) <= 80)                                                                      \
            F(80);                                                                                 \
        else if ((dim) <= 128)                                                                     \
            F(128);                                                                                \
        else                                                                                       \
            F(256);                                                                                \
    } while (0)

#define LAUNCH(KERNEL, each, rows, heads, bytes)                                                   \
    do {                                                                                           \
        ITH_CUDA_TRY(ctx,                                                                          \
                     cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,     \
                                          (int)(bytes)),                                           \
                     q);                                                                           \
        if ((rows) > 0)                                                                            \
            KERNEL<<<dim3((unsigned)ith_div_ceil(rows, each), (unsigned)(heads)), THREADS, bytes,  \
                     ith_cuda_stream(ctx)>>>(a);                                                   \
    } while (0)

ith_status ith_attention_tiles_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                       ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                       bool causal)
{
    tiles_args a = args_of(q, k, v, o, lse, seqs, scale, causal);
#define RUN(D)                                                                                     \
    LAUNCH(tiles_forward<D>, 64 * GROUPS<D>, a.mask.q.count, a.q_heads,                            \
           shared_bytes<D>(4 + GROUPS<D>))
    BY_DIM(a.dim, RUN);
#undef RUN
    return ITH_CUDA_LAUNCHED(ctx, q);
}

template <int D>
static ith_status backward_of(ith_ctx *ctx, const tiles_args &a, ith_tensor q, int64_t kv_heads)
{
    LAUNCH(tiles_dq<D>, 64, a.mask.q.count, a.q_heads, shared_bytes<D>(6));
    if constexpr (D <= 128) {
        LAUNCH((tiles_dkv<D, true, true>), 64, a.mask.k.count, kv_heads, shared_bytes<D>(6));
    } else {
        LAUNCH((tiles_dkv<D, true, false>), 64, a.mask.k.count, kv_heads, shared_bytes<D>(6));
        LAUNCH((tiles_dkv<D, false, true>), 64, a.mask.k.count, kv_heads, shared_bytes<D>(6));
    }
    return ITH_CUDA_LAUNCHED(ctx, q);
}

ith_status ith_attention_tiles_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                        ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                        ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                        bool causal, float *delta)
{
    tiles_args a = args_of(q, k, v, o, lse, seqs, scale, causal);
    a.do_ = rows_of(do_);
    a.dq = rows_of(dq);
    a.dk = rows_of(dk);
    a.dv = rows_of(dv);
    a.delta = delta;
    a.parts = dq.dtype != q.dtype;
    tiles_delta<<<(unsigned)ith_div_ceil(a.mask.q.count * a.q_heads, 8), THREADS, 0,
                  ith_cuda_stream(ctx)>>>(a);
#define RUN(D) return backward_of<D>(ctx, a, q, k.shape[1])
    BY_DIM(a.dim, RUN);
#undef RUN
}
