/* delta_plain.cu - the gated delta rule in plain f32 arithmetic: any head sizes, f32 and bf16. The
 * formulas are in delta_cuda.cuh, with the same names. */
#include "kernels/cuda/delta_cuda.cuh"

enum { C = DELTA_C, THREADS = 256, COLS = 64 /* of a state, per block */ };

/* out(i, j, sum_p a(i,p) b(p,j)) for an [m,n] tile; the same thread gets the same (i,j) in calls of
 * the same m and n. */
template <typename A, typename B, typename Out>
__device__ __forceinline__ void product(int m, int n, int k, A a, B b, Out out)
{
    int mt = (m + 3) / 4, nt = (n + 3) / 4;
    for (int tile = (int)threadIdx.x; tile < mt * nt; tile += THREADS) {
        int i0 = tile / nt, j0 = tile % nt;
        float sum[4][4] = {};
        for (int p = 0; p < k; p++) {
            float x[4], y[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                x[r] = i0 + r * mt < m ? a(i0 + r * mt, p) : 0.0f;
                y[r] = j0 + r * nt < n ? b(p, j0 + r * nt) : 0.0f;
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < 4; s++)
                    sum[r][s] += x[r] * y[s];
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int s = 0; s < 4; s++)
                if (i0 + r * mt < m && j0 + s * nt < n)
                    out(i0 + r * mt, j0 + s * nt, sum[r][s]);
    }
}

/* One chunk of one value head. */
template <typename T> struct chunk_view {
    const T *q, *k;
    int64_t q_row, k_row, row; /* strides; first token */
    int n;
    const float *q_norm, *k_norm, *decay, *tail, *beta;
    const double *sum; /* G */
    float *z, *p;
    int64_t head, at; /* at: of (chunk, head) in scratch */

    __device__ __forceinline__ chunk_view(const delta_args &a, int64_t c, int64_t h)
    {
        int64_t key = h / a.group, key_at = (c - a.first) * (a.heads / a.group) + key;
        row = a.chunks[c].row;
        n = a.chunks[c].rows;
        head = h;
        at = (c - a.first) * a.heads + h;
        q = head_row<T>(a.q, row, key);
        k = head_row<T>(a.k, row, key);
        q_row = a.q.stride[0];
        k_row = a.k.stride[0];
        q_norm = a.norms + key_at * 2 * C;
        k_norm = q_norm + C;
        decay = a.gates + at * DELTA_GATES * C;
        tail = decay + C;
        beta = tail + C;
        sum = a.sums + at * C;
        z = (float *)a.z + at * C * C;
        p = (float *)a.p + at * C * C;
    }
    /* unit vectors, q with the scale */
    __device__ __forceinline__ float qu(int i, int d) const
    {
        return to_f32(q[i * q_row + d]) * q_norm[i];
    }
    __device__ __forceinline__ float ku(int i, int d) const
    {
        return to_f32(k[i * k_row + d]) * k_norm[i];
    }
};

template <typename T> __device__ __forceinline__ float row_norm(const T *x, int dim)
{
    float squares = 0;
    for (int d = (int)threadIdx.x % 32; d < dim; d += 32)
        squares += to_f32(x[d]) * to_f32(x[d]);
    return 1.0f / sqrtf(group_sum(squares, 32) + 1e-6f);
}

/* Norms, decays, Z and P.    grid: chunks, value heads */
template <typename T> __global__ void __launch_bounds__(THREADS) prepare(const delta_args a)
{
    __shared__ float m[C][C + 1], z[C][C + 1], beta[C], q_norm[C], k_norm[C];
    __shared__ double sum[C];
    chunk_view<T> v(a, a.first + blockIdx.x, blockIdx.y);
    int n = v.n, warp = (int)threadIdx.x / 32, i = (int)threadIdx.x;
    if (i == 0) {
        double total = 0;
        for (int r = 0; r < n; r++)
            sum[r] = total += (double)stat_of(a.g, v.row + r, v.head);
    }
    if (i < n)
        beta[i] = stat_of(a.beta, v.row + i, v.head);
    for (int r = warp; r < n; r += THREADS / 32) {
        float q = row_norm(v.q + r * v.q_row, a.dim_k) * a.scale;
        float k = row_norm(v.k + r * v.k_row, a.dim_k);
        q_norm[r] = q;
        k_norm[r] = k;
    }
    __syncthreads();
    if (i < n) {
        float *gates = a.gates + v.at * DELTA_GATES * C;
        gates[i] = expf((float)sum[i]);
        gates[C + i] = expf((float)(sum[n - 1] - sum[i]));
        gates[2 * C + i] = beta[i];
        a.sums[v.at * C + i] = sum[i];
        if (v.head % a.group == 0) {
            ((float *)v.q_norm)[i] = q_norm[i];
            ((float *)v.k_norm)[i] = k_norm[i];
        }
    }
    auto k_at = [&](int p, int j) { return to_f32(v.k[j * v.k_row + p]); };
    product(
        n, n, a.dim_k, [&](int r, int p) { return k_at(p, r); }, k_at,
        [&](int r, int j, float x) { m[r][j] = j < r ? x * k_norm[r] * k_norm[j] : 0.0f; });
    product(
        n, n, a.dim_k, [&](int r, int p) { return to_f32(v.q[r * v.q_row + p]); }, k_at,
        [&](int r, int j, float x) {
            float e = j <= r ? expf((float)(sum[r] - sum[j])) : 0.0f;
            v.p[r * C + j] = j <= r ? x * q_norm[r] * k_norm[j] * e : 0.0f;
        });
    for (int r = 0; r < n; r++) {
        __syncthreads();
        if (i < r) {
            float x = m[r][i];
            for (int l = i + 1; l < r; l++)
                x -= m[r][l] * beta[l] * z[l][i];
            z[r][i] = x;
        }
    }
    __syncthreads();
    for (int e = i; e < n * n; e += THREADS) {
        int r = e / n, j = e % n;
        v.z[r * C + j] = j < r ? z[r][j] * expf((float)(sum[r] - sum[j])) : 0.0f;
    }
}

/* Columns [begin, begin + n) of a value head's state. */
struct column_range {
    int begin, n;
};
__device__ __forceinline__ column_range columns_of(const delta_args &a)
{
    int begin = (int)blockIdx.x * COLS;
    column_range c = {begin, a.dim_v - begin < COLS ? a.dim_v - begin : COLS};
    return c;
}

/* Copies columns of a state between memory [Dk,Dv] and shared memory [Dk,COLS]. */
__device__ __forceinline__ void load_state(const delta_args &a, float *s, const float *from,
                                           column_range c)
{
    for (int e = (int)threadIdx.x; e < a.dim_k * c.n; e += THREADS) {
        int i = e / c.n, j = e % c.n;
        s[i * COLS + j] = from ? from[(int64_t)i * a.dim_v + c.begin + j] : 0.0f;
    }
    __syncthreads();
}

__device__ __forceinline__ void save_state(const delta_args &a, float *to, const float *s,
                                           column_range c)
{
    for (int e = (int)threadIdx.x; e < a.dim_k * c.n; e += THREADS) {
        int i = e / c.n, j = e % c.n;
        to[(int64_t)i * a.dim_v + c.begin + j] = s[i * COLS + j];
    }
}

static size_t scan_shared(const delta_args *a)
{
    return ((size_t)a->dim_k * COLS + 2 * C * COLS) * sizeof(float);
}

/* O, the last state, and what backward wants of the states.   grid: columns, value heads, documents
 */
template <typename T> __global__ void __launch_bounds__(THREADS) scan(const delta_args a)
{
    extern __shared__ float shared[];
    float *s = shared, *x = s + a.dim_k * COLS, *y = x + C * COLS;
    int64_t head = blockIdx.y, doc = a.doc + blockIdx.z, size = (int64_t)a.dim_k * a.dim_v;
    delta_span span = span_of(a, doc);
    column_range c = columns_of(a);
    float *state = state_of(a, a.state, doc, head);
    load_state(a, s, span.cut_begin ? a.carried + head * size : state, c);
    for (int64_t at = span.begin; at < span.end; at++) {
        chunk_view<T> v(a, at, head);
        int n = v.n;
        if (a.states)
            save_state(a, (float *)a.states + v.at * size, s, c);
        product(
            n, c.n, a.dim_k, [&](int i, int p) { return v.ku(i, p); },
            [&](int p, int j) { return s[p * COLS + j]; },
            [&](int i, int j, float sum) {
                float value = to_f32(head_row<T>(a.v, v.row + i, head)[c.begin + j]);
                x[i * COLS + j] = value - v.decay[i] * sum;
            });
        __syncthreads();
        product(
            n, c.n, n, [&](int i, int p) { return v.z[i * C + p] * v.beta[p]; },
            [&](int p, int j) { return x[p * COLS + j]; },
            [&](int i, int j, float sum) {
                float r = x[i * COLS + j] - sum;
                y[i * COLS + j] = v.beta[i] * r;
                if (a.y)
                    ((float *)a.y)[(v.at * C + i) * a.dim_v + c.begin + j] = r;
            });
        __syncthreads(); /* y is D */
        if (a.o.ndim) {
            product(
                n, c.n, a.dim_k, [&](int i, int p) { return v.qu(i, p); },
                [&](int p, int j) { return s[p * COLS + j]; },
                [&](int i, int j, float sum) { x[i * COLS + j] = v.decay[i] * sum; });
            product(
                n, c.n, n, [&](int i, int p) { return v.p[i * C + p]; },
                [&](int p, int j) { return y[p * COLS + j]; },
                [&](int i, int j, float sum) {
                    head_row<T>(a.o, v.row + i, head)[c.begin + j] =
                        from_f32<T>(x[i * COLS + j] + sum);
                });
            __syncthreads();
        }
        product(
            a.dim_k, c.n, n, [&](int i, int p) { return v.ku(p, i) * v.tail[p]; },
            [&](int p, int j) { return y[p * COLS + j]; },
            [&](int i, int j, float sum) {
                s[i * COLS + j] = v.decay[n - 1] * s[i * COLS + j] + sum;
            });
        __syncthreads();
    }
    if (span.cut_end)
        save_state(a, a.carry + head * size, s, c);
    else if (state && a.give_state)
        save_state(a, state, s, c);
}

/* dV, dR and dS, from the last chunk to the first.   grid as scan's */
template <typename T> __global__ void __launch_bounds__(THREADS) scan_back(const delta_args a)
{
    extern __shared__ float shared[];
    float *s = shared, *d = s + a.dim_k * COLS, *r = d + C * COLS;
    int64_t head = blockIdx.y, doc = a.doc + blockIdx.z, size = (int64_t)a.dim_k * a.dim_v;
    delta_span span = span_of(a, doc);
    column_range c = columns_of(a);
    float *gradient = state_of(a, a.dstate, doc, head);
    load_state(a, s, span.cut_end ? a.carried + head * size : gradient, c);
    for (int64_t at = span.end - 1; at >= span.begin; at--) {
        chunk_view<T> v(a, at, head);
        int n = v.n;
        auto grad = [&](int p, int j) {
            return to_f32(head_row<T>(a.do_, v.row + p, head)[c.begin + j]);
        };
        save_state(a, (float *)a.dstates + v.at * size, s, c);
        product(
            n, c.n, a.dim_k, [&](int i, int p) { return v.ku(i, p); },
            [&](int p, int j) { return s[p * COLS + j]; },
            [&](int i, int j, float sum) { d[i * COLS + j] = v.tail[i] * sum; });
        product(
            n, c.n, n, [&](int i, int p) { return v.p[p * C + i]; }, grad,
            [&](int i, int j, float sum) { d[i * COLS + j] += sum; });
        __syncthreads();
        product(
            n, c.n, n, [&](int i, int p) { return v.z[p * C + i] * v.beta[p]; },
            [&](int p, int j) { return d[p * COLS + j]; },
            [&](int i, int j, float sum) {
                float x = d[i * COLS + j] - sum, dv = v.beta[i] * x;
                ((float *)a.dr)[(v.at * C + i) * a.dim_v + c.begin + j] = x;
                head_row<T>(a.dv, v.row + i, head)[c.begin + j] = from_f32<T>(dv);
                r[i * COLS + j] = v.decay[i] * dv;
            });
        __syncthreads();
        product(
            a.dim_k, c.n, n, [&](int i, int p) { return v.qu(p, i) * v.decay[p]; }, grad,
            [&](int i, int j, float sum) {
                s[i * COLS + j] = v.decay[n - 1] * s[i * COLS + j] + sum;
            });
        product(
            a.dim_k, c.n, n, [&](int i, int p) { return v.ku(p, i); },
            [&](int p, int j) { return r[p * COLS + j]; },
            [&](int i, int j, float sum) { s[i * COLS + j] -= sum; });
        __syncthreads();
    }
    if (span.cut_begin)
        save_state(a, a.carry + head * size, s, c);
    else if (gradient)
        save_state(a, gradient, s, c);
}

/* dots[i] += unit_i . tile_i and total += tile, a warp per row; both sides synced. */
template <typename Unit>
__device__ __forceinline__ void take(float *total, float *dots, const float *tile, int n, int dim,
                                     Unit unit)
{
    __syncthreads();
    for (int i = (int)threadIdx.x / 32; i < n; i += THREADS / 32) {
        float dot = 0;
        for (int d = (int)threadIdx.x % 32; d < dim; d += 32) {
            dot += unit(i, d) * tile[i * dim + d];
            total[i * dim + d] += tile[i * dim + d];
        }
        dot = group_sum(dot, 32);
        if (threadIdx.x % 32 == 0)
            dots[i] += dot;
    }
    __syncthreads();
}

static size_t grads_shared(const delta_args *a)
{
    return (3 * (size_t)C * a->dim_k + 3 * C * C) * sizeof(float);
}

/* dq, dk, dg, dbeta.   grid: chunks, key heads */
template <typename T> __global__ void __launch_bounds__(THREADS) grads(const delta_args a)
{
    extern __shared__ float shared[];
    int dim = a.dim_k, id = (int)threadIdx.x;
    float *dq = shared, *dk = dq + C * dim, *tile = dk + C * dim;
    float *np = tile + C * dim, *nk = np + C * C, *carried = nk + C * C;
    __shared__ float reads[C], writes[C];
    __shared__ double sum[C]; /* gradient of G */
    int64_t key = blockIdx.y, size = (int64_t)dim * a.dim_v;
    for (int e = id; e < 2 * C * dim; e += THREADS)
        dq[e] = 0; /* and dk */
    for (int64_t head = key * a.group; head < (key + 1) * a.group; head++) {
        chunk_view<T> v(a, a.first + blockIdx.x, head);
        int n = v.n;
        const float *s = (const float *)a.states + v.at * size;
        const float *ds = (const float *)a.dstates + v.at * size;
        const float *y = (const float *)a.y + v.at * C * a.dim_v;
        const float *dr = (const float *)a.dr + v.at * C * a.dim_v;
        auto grad = [&](int i, int p) { return to_f32(head_row<T>(a.do_, v.row + i, head)[p]); };
        auto y_at = [&](int p, int j) { return y[(int64_t)j * a.dim_v + p]; };
        auto dr_at = [&](int i, int p) { return dr[(int64_t)i * a.dim_v + p]; };
        auto qu = [&](int i, int d) { return v.qu(i, d); };
        auto ku = [&](int i, int d) { return v.ku(i, d); };
        auto ku_at = [&](int p, int j) { return v.ku(j, p); };
        __syncthreads();
        if (id < C)
            reads[id] = writes[id] = 0;
        __syncthreads();
        product(n, n, a.dim_v, grad, y_at, [&](int i, int j, float x) {
            np[i * C + j] = j <= i ? x * v.beta[j] * expf((float)(v.sum[i] - v.sum[j])) : 0.0f;
        });
        product(n, n, a.dim_v, dr_at, y_at, [&](int i, int j, float x) {
            float e = j < i ? expf((float)(v.sum[i] - v.sum[j])) : 0.0f;
            nk[i * C + j] = j < i ? -v.beta[i] * x * v.beta[j] * e : 0.0f;
            if (i == j)
                ((float *)a.dbeta.data)[(v.row + i) * a.dbeta.stride[0] + head] = x;
        });
        product(n, n, dim, qu, ku_at, [&](int i, int j, float x) {
            carried[i * C + j] = j < i ? np[i * C + j] * x : 0.0f;
        });
        product(n, n, dim, ku, ku_at,
                [&](int i, int j, float x) { carried[i * C + j] += nk[i * C + j] * x; });
        product(
            n, dim, a.dim_v, grad, [&](int p, int j) { return s[(int64_t)j * a.dim_v + p]; },
            [&](int i, int j, float x) { tile[i * dim + j] = v.decay[i] * x; });
        take(dq, reads, tile, n, dim, qu);
        product(
            n, dim, a.dim_v, dr_at, [&](int p, int j) { return s[(int64_t)j * a.dim_v + p]; },
            [&](int i, int j, float x) { tile[i * dim + j] = -v.decay[i] * v.beta[i] * x; });
        take(dk, reads, tile, n, dim, ku);
        product(
            n, dim, a.dim_v, [&](int i, int p) { return y_at(p, i); },
            [&](int p, int j) { return ds[(int64_t)j * a.dim_v + p]; },
            [&](int i, int j, float x) { tile[i * dim + j] = v.tail[i] * v.beta[i] * x; });
        take(dk, writes, tile, n, dim, ku);
        product(
            n, dim, n, [&](int i, int p) { return np[i * C + p]; }, ku,
            [&](int i, int j, float x) { dq[i * dim + j] += x; });
        product(
            n, dim, n, [&](int i, int p) { return np[p * C + i]; }, qu,
            [&](int i, int j, float x) { dk[i * dim + j] += x; });
        product(
            n, dim, n, [&](int i, int p) { return nk[i * C + p] + nk[p * C + i]; }, ku,
            [&](int i, int j, float x) { dk[i * dim + j] += x; });
        double through = 0;
        for (int64_t e = id; e < size; e += THREADS)
            through += (double)(s[e] * ds[e]);
        through = block_sum<THREADS>(through) * (double)v.decay[n - 1];
        if (id < n) {
            double x = (double)reads[id] - (double)writes[id];
            for (int j = 0; j < n; j++)
                x += (double)carried[id * C + j] - (double)carried[j * C + id];
            sum[id] = x;
        }
        __syncthreads();
        if (id == 0) {
            for (int i = 0; i < n; i++)
                through += (double)writes[i];
            for (int i = n - 1; i >= 0; i--) {
                through += sum[i];
                ((float *)a.dg.data)[(v.row + i) * a.dg.stride[0] + head] = (float)through;
            }
        }
    }
    __syncthreads();
    chunk_view<T> v(a, a.first + blockIdx.x, key * a.group);
    for (int i = id / 32; i < v.n; i += THREADS / 32) {
        float q_dot = 0, k_dot = 0, q_norm = v.q_norm[i], k_norm = v.k_norm[i];
        for (int d = id % 32; d < dim; d += 32) {
            q_dot += v.qu(i, d) * dq[i * dim + d];
            k_dot += v.ku(i, d) * dk[i * dim + d];
        }
        q_dot = group_sum(q_dot, 32) / (a.scale * a.scale); /* qu carries scale */
        k_dot = group_sum(k_dot, 32);
        for (int d = id % 32; d < dim; d += 32) {
            head_row<T>(a.dq, v.row + i, key)[d] =
                from_f32<T>(q_norm * (dq[i * dim + d] - v.qu(i, d) * q_dot));
            head_row<T>(a.dk, v.row + i, key)[d] =
                from_f32<T>(k_norm * (dk[i * dim + d] - v.ku(i, d) * k_dot));
        }
    }
}

/* The recurrence itself: 32 columns by 8 groups of rows, the state in registers.
 * grid: columns / 32, value heads, documents */
enum { GROUPS = THREADS / 32, GROUP_ROWS = 32 };

template <typename T>
__global__ void __launch_bounds__(THREADS) decode(const delta_args a, const int32_t *cu_seqlens)
{
    __shared__ float q[GROUPS * GROUP_ROWS], k[GROUPS * GROUP_ROWS], part[2][GROUPS][32];
    int col = (int)(blockIdx.x * 32 + threadIdx.x % 32), group = (int)threadIdx.x / 32;
    int rows = (a.dim_k + GROUPS - 1) / GROUPS, row = group * rows, lane = (int)threadIdx.x % 32;
    int64_t head = blockIdx.y, key = head / a.group, doc = blockIdx.z;
    int64_t begin = cu_seqlens[doc], end = cu_seqlens[doc + 1];
    float *state = a.state.ndim ? (float *)a.state.data +
                                      ((doc * a.heads + head) * a.dim_k + row) * a.dim_v + col
                                : NULL;
    float s[GROUP_ROWS];
    bool mine = col < a.dim_v;
    if (rows > a.dim_k - row)
        rows = a.dim_k - row;
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++)
        s[i] = state && mine && i < rows ? state[(int64_t)i * a.dim_v] : 0.0f;
    for (int64_t t = begin; t < end; t++) {
        int d = (int)threadIdx.x;
        float x = d < a.dim_k ? to_f32(head_row<T>(a.q, t, key)[d]) : 0.0f;
        float w = d < a.dim_k ? to_f32(head_row<T>(a.k, t, key)[d]) : 0.0f;
        float alpha = expf(stat_of(a.g, t, head)), read = 0, out = 0;
        q[d] = x * (a.scale / sqrtf(block_sum<THREADS>(x * x) + 1e-6f));
        k[d] = w / sqrtf(block_sum<THREADS>(w * w) + 1e-6f);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < GROUP_ROWS; i++)
            if (i < rows) {
                s[i] *= alpha;
                read += s[i] * k[row + i];
            }
        part[0][group][lane] = read;
        __syncthreads();
        read = 0;
        for (int i = 0; i < GROUPS; i++)
            read += part[0][i][lane];
        float value = mine ? to_f32(head_row<T>(a.v, t, head)[col]) : 0.0f;
        float delta = stat_of(a.beta, t, head) * (value - read);
#pragma unroll
        for (int i = 0; i < GROUP_ROWS; i++)
            if (i < rows) {
                s[i] += k[row + i] * delta;
                out += s[i] * q[row + i];
            }
        part[1][group][lane] = out;
        __syncthreads();
        if (group == 0 && mine) {
            for (int i = 1; i < GROUPS; i++)
                out += part[1][i][lane];
            head_row<T>(a.o, t, head)[col] = from_f32<T>(out);
        }
    }
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++)
        if (state && mine && i < rows)
            state[(int64_t)i * a.dim_v] = s[i];
}

cudaError_t delta_plain_prepare(cudaStream_t stream, ith_dtype dtype, const delta_args *a)
{
    dim3 grid((unsigned)a->count, (unsigned)a->heads);
    ITH_BY_TYPE(dtype, (prepare<T><<<grid, THREADS, 0, stream>>>(*a)));
    return cudaSuccess;
}

static dim3 scan_grid(const delta_args *a, int64_t docs)
{
    return dim3((unsigned)ith_div_ceil(a->dim_v, COLS), (unsigned)a->heads, (unsigned)docs);
}

#define MORE_SHARED(kernel, bytes)                                                                 \
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes))

cudaError_t delta_plain_scan(cudaStream_t stream, ith_dtype dtype, const delta_args *a,
                             int64_t docs)
{
    cudaError_t code;
    ITH_BY_TYPE(dtype, {
        code = MORE_SHARED(scan<T>, scan_shared(a));
        scan<T><<<scan_grid(a, docs), THREADS, scan_shared(a), stream>>>(*a);
    });
    return code;
}

cudaError_t delta_plain_scan_back(cudaStream_t stream, ith_dtype dtype, const delta_args *a,
                                  int64_t docs)
{
    cudaError_t code;
    ITH_BY_TYPE(dtype, {
        code = MORE_SHARED(scan_back<T>, scan_shared(a));
        scan_back<T><<<scan_grid(a, docs), THREADS, scan_shared(a), stream>>>(*a);
    });
    return code;
}

cudaError_t delta_plain_grads(cudaStream_t stream, ith_dtype dtype, const delta_args *a)
{
    cudaError_t code;
    dim3 grid((unsigned)a->count, (unsigned)(a->heads / a->group));
    ITH_BY_TYPE(dtype, {
        code = MORE_SHARED(grads<T>, grads_shared(a));
        grads<T><<<grid, THREADS, grads_shared(a), stream>>>(*a);
    });
    return code;
}

void delta_plain_decode(cudaStream_t stream, ith_dtype dtype, const delta_args *a,
                        const int32_t *cu_seqlens, int64_t docs)
{
    dim3 grid((unsigned)ith_div_ceil(a->dim_v, 32), (unsigned)a->heads, (unsigned)docs);
    ITH_BY_TYPE(dtype, (decode<T><<<grid, THREADS, 0, stream>>>(*a, cu_seqlens)));
}
