/* gdn_impl.h - Gated DeltaNet on vectors: the delta rule in chunks, convolution, gated norm, gates.
 * Part of level_impl.h.
 *
 * A task of the delta rule is one key head of one document, with all value heads that share it. For
 * a chunk of n <= 64 tokens that meets the state S, G the running sum of g within the chunk,
 * E[i,j] = exp(G_i - G_j) for j <= i:
 *     L = beta_i (k_i k_j) E_ij, j < i      P = (q_i k_j) E_ij, j <= i       (q carries the scale)
 *     X = V - e^G (K S)     D = (I + L)^-1 (beta X)     O = e^G (Q S) + P D
 *     S <- e^Gn S + (e^(Gn-G) K)^T D
 * Backward walks the chunks from the last to the first; the states at their entry are made again, a
 * stretch of GDN_STRETCH chunks at a time, from the states at the stretches' first chunks. */

#define GDN_C 64
#define GDN_STRETCH 64

#if VW >= 16
#define MM_ROWS 8
#else
#define MM_ROWS 4
#endif

/* c[m,n] (+)= sum_p a(i,p) b[p,j], a(i,p) = a[i*a_rs + p*a_cs]; columns in whole vectors. */
INLINE void mm_tile(int rows, int cols, float *c, int64_t ldc, const float *a, int64_t a_rs,
                    int64_t a_cs, const float *b, int64_t ldb, int64_t k, bool add)
{
    V acc[MM_ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < cols; j++)
            acc[i][j] = add ? v_load_f32(c + i * ldc + j * VW) : v_set(0.0f);
    for (int64_t p = 0; p < k; p++) {
        V row[2];
#pragma GCC unroll 2
        for (int j = 0; j < cols; j++)
            row[j] = v_load_f32(b + p * ldb + j * VW);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            V x = v_set(a[i * a_rs + p * a_cs]);
#pragma GCC unroll 2
            for (int j = 0; j < cols; j++)
                acc[i][j] = acc[i][j] + x * row[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < cols; j++)
            memcpy(c + i * ldc + j * VW, &acc[i][j], sizeof(V));
}

static void mm(float *c, int64_t ldc, const float *a, int64_t a_rs, int64_t a_cs, const float *b,
               int64_t ldb, int64_t m, int64_t n, int64_t k, bool add)
{
    for (int64_t j = 0; j < n; j += 2 * VW) {
        bool pair = n - j > VW;
        int64_t i = 0;
        for (; i + MM_ROWS <= m; i += MM_ROWS) {
            if (pair)
                mm_tile(MM_ROWS, 2, c + i * ldc + j, ldc, a + i * a_rs, a_rs, a_cs, b + j, ldb, k,
                        add);
            else
                mm_tile(MM_ROWS, 1, c + i * ldc + j, ldc, a + i * a_rs, a_rs, a_cs, b + j, ldb, k,
                        add);
        }
        for (; i < m; i++) {
            if (pair)
                mm_tile(1, 2, c + i * ldc + j, ldc, a + i * a_rs, a_rs, a_cs, b + j, ldb, k, add);
            else
                mm_tile(1, 1, c + i * ldc + j, ldc, a + i * a_rs, a_rs, a_cs, b + j, ldb, k, add);
        }
    }
}

/* Everything of one task. Rows of [n,..] matrices are ldk, ldv or GDN_C apart; what lies between a
 * row's end and its distance is zero. */
typedef struct {
    const ith_cpu_delta *a;
    int64_t dk, dv, ldk, ldv, group, key_head;
    int64_t t0, n; /* the chunk */
    bool bf16;
    float *qn, *kn, *kt;        /* scaled unit q, unit k, k transposed [dk,C] */
    float *q_norm, *k_norm;     /* [C] 1 / length */
    float *kk, *qk;             /* [n,C] */
    float *v, *x, *d, *ks, *qs; /* [n,dv]; d = D */
    float *e, *l, *p;           /* [n,C]; l = -L */
    /* [C] G as the sum of two floats (strong decay makes it large, and near ones differ little),
     * e^G, beta, e^(Gn-G) */
    float *sum, *low, *decay, *beta, *tail;
    float *kh;     /* [n,dk] e^(Gn-G) K */
    float *states; /* [group][dk,dv] running */
    /* backward */
    float *heads, *inner; /* [stretches][group], [GDN_STRETCH][group] states */
    float *ds;            /* [group] gradient of the state behind the chunk */
    float *dout, *dd, *gx, *st, *dst, *dt, *dp, *dl, *dqs, *dks; /* see delta_backward_head */
    double *dsum; /* [C] gradient of G: large terms that cancel */
    float *dbeta; /* [C] */
} delta_task;

/* Lays the task out in base (NULL: only counts); returns bytes. */
static int64_t delta_layout(const ith_cpu_delta *a, delta_task *w, char *base, bool backward)
{
    int64_t at = 0;
    *w = (delta_task){.a = a,
                      .dk = a->k.shape[2],
                      .dv = a->v.shape[2],
                      .ldk = ith_round_up(a->k.shape[2], VW),
                      .ldv = ith_round_up(a->v.shape[2], VW),
                      .group = a->v.shape[1] / a->k.shape[1],
                      .bf16 = a->q.dtype == ITH_BF16};
    int64_t c = GDN_C, size = w->dk * w->ldv;
#define PART(name, count)                                                                          \
    do {                                                                                           \
        w->name = base ? (float *)(void *)(base + at) : NULL;                                      \
        at += ith_round_up((count)*4, 64);                                                         \
    } while (0)
    PART(qn, c * w->ldk);
    PART(kn, c * w->ldk);
    PART(kt, w->dk * c);
    PART(q_norm, c);
    PART(k_norm, c);
    PART(kk, c * c);
    PART(qk, c * c);
    PART(v, c * w->ldv);
    PART(x, c * w->ldv);
    PART(d, c * w->ldv);
    PART(ks, c * w->ldv);
    PART(qs, c * w->ldv);
    PART(e, c * c);
    PART(l, c * c);
    PART(p, c * c);
    PART(sum, c);
    PART(low, c);
    PART(decay, c);
    PART(beta, c);
    PART(tail, c);
    PART(kh, c * w->ldk);
    PART(states, w->group * size);
    if (backward) {
        int64_t chunks = ith_div_ceil(a->seqs.max_len, c);
        PART(heads, ith_div_ceil(chunks, GDN_STRETCH) * w->group * size);
        PART(inner, ith_min_i64(chunks, GDN_STRETCH) * w->group * size);
        PART(ds, w->group * size);
        PART(dout, c * w->ldv);
        PART(dd, c * w->ldv);
        PART(gx, c * w->ldv);
        PART(st, w->dv * w->ldk);
        PART(dst, w->dv * w->ldk);
        PART(dt, w->dv * c);
        PART(dp, c * c);
        PART(dl, c * c);
        PART(dqs, c * w->ldk);
        PART(dks, c * w->ldk);
        PART(dbeta, c);
        w->dsum = base ? (double *)(void *)(base + at) : NULL;
        at += c * 8;
    }
#undef PART
    return ith_round_up(at, 256);
}

static int64_t delta_bytes(const ith_cpu_delta *a, bool backward)
{
    delta_task w;
    return delta_layout(a, &w, NULL, backward);
}

/* out[cols, rows padded to ld] = in^T; the padding is zero. */
static void delta_transpose(float *out, int64_t ld, const float *in, int64_t ldi, int64_t rows,
                            int64_t cols)
{
    for (int64_t c0 = 0; c0 < cols; c0 += 16)
        for (int64_t r = 0; r < ld; r++)
            for (int64_t c = c0; c < ith_min_i64(c0 + 16, cols); c++)
                out[c * ld + r] = r < rows ? in[r * ldi + c] : 0.0f;
}

INLINE float row_dot(const float *x, const float *y, int64_t ld)
{
    V sum = v_set(0.0f);
    for (int64_t d = 0; d < ld; d += VW)
        sum = sum + v_load_f32(x + d) * v_load_f32(y + d);
    return v_sum(sum);
}

/* y[0..ld) (+)= f * x */
INLINE void row_axpy(float *y, const float *x, float f, int64_t ld, bool add)
{
    for (int64_t d = 0; d < ld; d += VW) {
        V r = v_set(f) * v_load_f32(x + d);
        if (add)
            r = r + v_load_f32(y + d);
        memcpy(y + d, &r, sizeof r);
    }
}

/* One head vector as f32, padded with zeros. */
INLINE void load_head_row(float *out, ith_tensor t, int64_t row, int64_t h, int64_t ld, bool bf16)
{
    const char *x = head_at(t, row, h);
    for (int64_t d = 0; d < ld; d += VW) {
        V r = v_get(x, d, t.shape[2] - d, bf16);
        memcpy(out + d, &r, sizeof r);
    }
}

INLINE void store_head_row(ith_tensor t, int64_t row, int64_t h, const float *in, bool bf16)
{
    char *y = head_at(t, row, h);
    for (int64_t d = 0; d < t.shape[2]; d += VW)
        v_put(y, d, t.shape[2] - d, v_load_f32(in + d), bf16);
}

INLINE float delta_unit(float *out, float *norm, int64_t ld, float scale)
{
    float r = 1.0f / sqrtf(row_dot(out, out, ld) + 1e-6f);
    row_axpy(out, out, r * scale, ld, false);
    return *norm = r;
}

/* What the value heads of the chunk share. */
static void delta_load_keys(delta_task *w, int64_t t0, int64_t n)
{
    const ith_cpu_delta *a = w->a;
    w->t0 = t0;
    w->n = n;
    for (int64_t i = 0; i < n; i++) {
        float *q = w->qn + i * w->ldk, *k = w->kn + i * w->ldk;
        load_head_row(q, a->q, t0 + i, w->key_head, w->ldk, w->bf16);
        load_head_row(k, a->k, t0 + i, w->key_head, w->ldk, w->bf16);
        delta_unit(q, &w->q_norm[i], w->ldk, a->scale);
        delta_unit(k, &w->k_norm[i], w->ldk, 1.0f);
    }
    delta_transpose(w->kt, GDN_C, w->kn, w->ldk, n, w->dk);
    mm(w->kk, GDN_C, w->kn, w->ldk, 1, w->kt, GDN_C, n, ith_round_up(n, VW), w->dk, false);
    mm(w->qk, GDN_C, w->qn, w->ldk, 1, w->kt, GDN_C, n, ith_round_up(n, VW), w->dk, false);
}

INLINE float stat_at(ith_tensor t, int64_t row, int64_t col)
{
    return ((const float *)t.data)[row * t.stride[0] + col * t.stride[1]];
}

/* v, decays, E, -L and P of one value head. */
static void delta_load_head(delta_task *w, int64_t head)
{
    const ith_cpu_delta *a = w->a;
    double sum = 0;
    for (int64_t i = 0; i < w->n; i++) {
        load_head_row(w->v + i * w->ldv, a->v, w->t0 + i, head, w->ldv, w->bf16);
        sum += (double)stat_at(a->g, w->t0 + i, head);
        w->sum[i] = (float)sum;
        w->low[i] = (float)(sum - (double)w->sum[i]);
        w->beta[i] = stat_at(a->beta, w->t0 + i, head);
    }
    for (int64_t i = w->n; i < GDN_C; i++) {
        w->sum[i] = w->sum[w->n - 1];
        w->low[i] = w->low[w->n - 1];
    }
    V last = v_set(w->sum[w->n - 1]), last_low = v_set(w->low[w->n - 1]);
    for (int64_t i = 0; i < GDN_C; i += VW) {
        V g = v_load_f32(w->sum + i), low = v_load_f32(w->low + i), e = v_exp(g + low);
        V t = v_exp((last - g) + (last_low - low));
        memcpy(w->decay + i, &e, sizeof e);
        memcpy(w->tail + i, &t, sizeof t);
    }
    const VI lane = v_lanes();
    for (int64_t i = 0; i < w->n; i++) {
        for (int64_t j = 0; j < w->n; j += VW) {
            VI col = lane + (int32_t)j;
            V e = v_exp((v_set(w->sum[i]) - v_load_f32(w->sum + j)) +
                        (v_set(w->low[i]) - v_load_f32(w->low + j)));
            e = v_select(col > (int32_t)i, v_set(0.0f), e);
            V l = v_set(-w->beta[i]) * v_load_f32(w->kk + i * GDN_C + j) * e;
            l = v_select(col >= (int32_t)i, v_set(0.0f), l);
            V p = v_load_f32(w->qk + i * GDN_C + j) * e;
            memcpy(w->e + i * GDN_C + j, &e, sizeof e);
            memcpy(w->l + i * GDN_C + j, &l, sizeof l);
            memcpy(w->p + i * GDN_C + j, &p, sizeof p);
        }
    }
}

/* ks, x and d from the state. */
static void delta_solve(delta_task *w, const float *s)
{
    int64_t n = w->n, ldv = w->ldv;
    mm(w->ks, ldv, w->kn, w->ldk, 1, s, ldv, n, ldv, w->dk, false);
    for (int64_t i = 0; i < n; i++) {
        float *x = w->x + i * ldv;
        memcpy(x, w->v + i * ldv, (size_t)ldv * 4);
        row_axpy(x, w->ks + i * ldv, -w->decay[i], ldv, true);
        row_axpy(w->d + i * ldv, x, w->beta[i], ldv, false);
    }
    for (int64_t b = 0; b < n; b += MM_ROWS) {
        int64_t rows = ith_min_i64(MM_ROWS, n - b);
        mm(w->d + b * ldv, ldv, w->l + b * GDN_C, GDN_C, 1, w->d, ldv, rows, ldv, b, true);
        for (int64_t i = b + 1; i < b + rows; i++)
            for (int64_t j = b; j < i; j++)
                row_axpy(w->d + i * ldv, w->d + j * ldv, w->l[i * GDN_C + j], ldv, true);
    }
}

/* (I + L^T)^-1 in place. */
static void delta_solve_back(const delta_task *w, float *r)
{
    int64_t n = w->n, ldv = w->ldv;
    for (int64_t b = (n - 1) / MM_ROWS * MM_ROWS; b >= 0; b -= MM_ROWS) {
        int64_t end = ith_min_i64(b + MM_ROWS, n);
        mm(r + b * ldv, ldv, w->l + end * GDN_C + b, 1, GDN_C, r + end * ldv, ldv, end - b, ldv,
           n - end, true);
        for (int64_t i = end - 2; i >= b; i--)
            for (int64_t j = i + 1; j < end; j++)
                row_axpy(r + i * ldv, r + j * ldv, w->l[j * GDN_C + i], ldv, true);
    }
}

/* The state behind the chunk. */
static void delta_advance(delta_task *w, float *s)
{
    for (int64_t i = 0; i < w->n; i++)
        row_axpy(w->kh + i * w->ldk, w->kn + i * w->ldk, w->tail[i], w->ldk, false);
    for (int64_t i = 0; i < w->dk; i++)
        row_axpy(s + i * w->ldv, s + i * w->ldv, w->decay[w->n - 1], w->ldv, false);
    mm(s, w->ldv, w->kh, 1, w->ldk, w->d, w->ldv, w->dk, w->ldv, w->n, true);
}

static void delta_out(delta_task *w, const float *s, int64_t head)
{
    int64_t n = w->n, ldv = w->ldv;
    mm(w->qs, ldv, w->qn, w->ldk, 1, s, ldv, n, ldv, w->dk, false);
    for (int64_t i = 0; i < n; i++)
        row_axpy(w->qs + i * ldv, w->qs + i * ldv, w->decay[i], ldv, false);
    mm(w->qs, ldv, w->p, GDN_C, 1, w->d, ldv, n, ldv, n, true);
    for (int64_t i = 0; i < n; i++)
        store_head_row(w->a->o, w->t0 + i, head, w->qs + i * ldv, w->bf16);
}

/* State of a value head between memory [dk,dv] and the padded copy. */
static void delta_copy_state(const delta_task *w, float *padded, float *plain, bool in)
{
    for (int64_t i = 0; i < w->dk; i++) {
        if (in) {
            memset(padded + i * w->ldv, 0, (size_t)w->ldv * 4);
            memcpy(padded + i * w->ldv, plain + i * w->dv, (size_t)w->dv * 4);
        } else {
            memcpy(plain + i * w->dv, padded + i * w->ldv, (size_t)w->dv * 4);
        }
    }
}

/* States of the task's value heads between memory [num_docs,Hv,dk,dv] (absent: zeros) and the
 * padded copies. */
static void delta_copy_states(const delta_task *w, float *padded, ith_tensor memory, int64_t doc,
                              bool in)
{
    int64_t size = w->dk * w->ldv, first = doc * w->a->v.shape[1] + w->key_head * w->group;
    if (in && !memory.ndim)
        memset(padded, 0, (size_t)(w->group * size) * 4);
    for (int64_t h = 0; memory.ndim && h < w->group; h++)
        delta_copy_state(w, padded + h * size, (float *)memory.data + (first + h) * w->dk * w->dv,
                         in);
}

static void delta_forward(void *arg, int64_t first, int64_t last, int thread)
{
    const ith_cpu_delta *a = arg;
    delta_task w;
    delta_layout(a, &w, a->scratch + thread * a->thread_bytes, false);
    int64_t size = w.dk * w.ldv, key_heads = a->k.shape[1];
    for (int64_t idx = first; idx < last; idx++) {
        int64_t doc = idx / key_heads, begin = a->seqs.cu_host[doc], end = a->seqs.cu_host[doc + 1];
        w.key_head = idx % key_heads;
        delta_copy_states(&w, w.states, a->state, doc, true);
        for (int64_t t = begin; t < end; t += GDN_C) {
            delta_load_keys(&w, t, ith_min_i64(GDN_C, end - t));
            for (int64_t h = 0; h < w.group; h++) {
                delta_load_head(&w, w.key_head * w.group + h);
                delta_solve(&w, w.states + h * size);
                delta_out(&w, w.states + h * size, w.key_head * w.group + h);
                delta_advance(&w, w.states + h * size);
            }
        }
        delta_copy_states(&w, w.states, a->state, doc, false);
    }
}

/* Runs w->states over chunks [c0, c1) of the document; keep: their entry states are copied there,
 * one every `every` chunks. */
static void delta_run_states(delta_task *w, int64_t begin, int64_t end, int64_t c0, int64_t c1,
                             float *keep, int64_t every)
{
    int64_t size = w->dk * w->ldv, all = w->group * size;
    for (int64_t c = c0; c < c1; c++) {
        int64_t t = begin + c * GDN_C;
        if ((c - c0) % every == 0)
            memcpy(keep + (c - c0) / every * all, w->states, (size_t)all * 4);
        if (c + 1 == c1)
            break;
        delta_load_keys(w, t, ith_min_i64(GDN_C, end - t));
        for (int64_t h = 0; h < w->group; h++) {
            delta_load_head(w, w->key_head * w->group + h);
            delta_solve(w, w->states + h * size);
            delta_advance(w, w->states + h * size);
        }
    }
}

/* dp = tril(dO D^T), dl = -stril(dR D^T); into dsum what E carries, into dbeta what L carries; then
 * dp becomes dP E and dl becomes beta dL E. */
static void delta_backward_masks(delta_task *w)
{
    const VI lane = v_lanes();
    for (int64_t i = 0; i < w->n; i++) {
        V betas = v_set(0.0f);
        VD rows[2] = {{0}, {0}};
        for (int64_t j = 0; j < w->n; j += VW) {
            int64_t at = i * GDN_C + j;
            V e = v_load_f32(w->e + at), p = v_load_f32(w->p + at);
            V dp = v_load_f32(w->dp + at) * e;
            V dl = v_select(lane + (int32_t)j >= (int32_t)i, v_set(0.0f),
                            v_set(0.0f) - v_load_f32(w->dl + at) * e);
            V strength = dl * v_load_f32(w->kk + at); /* dL (k k) E */
            V carried = v_load_f32(w->dp + at) * p + v_set(w->beta[i]) * strength;
            dl = dl * v_set(w->beta[i]);
            betas = betas + strength;
            for (int half = 0; half < 2; half++) {
                VF part;
                VD cols;
                memcpy(&part, (const char *)&carried + half * (int)sizeof part, sizeof part);
                memcpy(&cols, w->dsum + j + half * VW / 2, sizeof cols);
                VD wide = __builtin_convertvector(part, VD);
                rows[half] = rows[half] + wide;
                cols = cols - wide;
                memcpy(w->dsum + j + half * VW / 2, &cols, sizeof cols);
            }
            memcpy(w->dp + at, &dp, sizeof dp);
            memcpy(w->dl + at, &dl, sizeof dl);
        }
        for (int lane_idx = 0; lane_idx < VW / 2; lane_idx++)
            w->dsum[i] += rows[0][lane_idx] + rows[1][lane_idx];
        w->dbeta[i] += v_sum(betas);
    }
}

/* One value head of the chunk, s its entry state. In: ds behind the chunk; out: before it. Adds to
 * dqs (of the scaled unit q) and dks (of the unit k). */
static void delta_backward_head(delta_task *w, const float *s, float *ds, int64_t head)
{
    const ith_cpu_delta *a = w->a;
    int64_t n = w->n, ldk = w->ldk, ldv = w->ldv, cols = ith_round_up(n, VW);
    double through = 0;
    delta_load_head(w, head);
    delta_solve(w, s);
    mm(w->qs, ldv, w->qn, ldk, 1, s, ldv, n, ldv, w->dk, false);
    delta_transpose(w->st, ldk, s, ldv, w->dk, w->dv);
    delta_transpose(w->dst, ldk, ds, ldv, w->dk, w->dv);
    delta_transpose(w->dt, GDN_C, w->d, ldv, n, w->dv);
    memset(w->dsum, 0, GDN_C * 8);
    /* dd: gradient of D = P^T dO + (e^(Gn-G) K) dS, then of beta X */
    for (int64_t i = 0; i < n; i++) {
        load_head_row(w->dout + i * ldv, a->do_, w->t0 + i, head, ldv, w->bf16);
        row_axpy(w->kh + i * ldk, w->kn + i * ldk, w->tail[i], ldk, false);
    }
    mm(w->dd, ldv, w->kh, ldk, 1, ds, ldv, n, ldv, w->dk, false);
    for (int64_t i = 0; i < n; i++) {
        float c = row_dot(w->d + i * ldv, w->dd + i * ldv, ldv);
        w->dsum[i] -= (double)c;
        through += (double)c;
    }
    mm(w->dd, ldv, w->p, 1, GDN_C, w->dout, ldv, n, ldv, n, true);
    delta_solve_back(w, w->dd);
    mm(w->dp, GDN_C, w->dout, ldv, 1, w->dt, GDN_C, n, cols, w->dv, false);
    mm(w->dl, GDN_C, w->dd, ldv, 1, w->dt, GDN_C, n, cols, w->dv, false);
    for (int64_t i = 0; i < n; i++)
        w->dbeta[i] = row_dot(w->dd + i * ldv, w->x + i * ldv, ldv);
    delta_backward_masks(w);
    for (int64_t i = 0; i < w->dk; i++)
        through += (double)(w->decay[n - 1] * row_dot(s + i * ldv, ds + i * ldv, ldv));
    w->dsum[n - 1] += through;
    /* e^(Gn-G) D against dS; then dout becomes e^G dO, gx is the gradient of K S */
    for (int64_t i = 0; i < n; i++) {
        float *dx = w->dd + i * ldv, *gx = w->gx + i * ldv, *out = w->dout + i * ldv;
        row_axpy(w->d + i * ldv, w->d + i * ldv, w->tail[i], ldv, false);
        row_axpy(dx, dx, w->beta[i], ldv, false);
        store_head_row(a->dv, w->t0 + i, head, dx, w->bf16);
        row_axpy(gx, dx, -w->decay[i], ldv, false);
        row_axpy(out, out, w->decay[i], ldv, false);
        w->dsum[i] +=
            (double)row_dot(out, w->qs + i * ldv, ldv) + (double)row_dot(gx, w->ks + i * ldv, ldv);
    }
    mm(w->dqs, ldk, w->dout, ldv, 1, w->st, ldk, n, ldk, w->dv, true);
    mm(w->dqs, ldk, w->dp, GDN_C, 1, w->kn, ldk, n, ldk, n, true);
    mm(w->dks, ldk, w->gx, ldv, 1, w->st, ldk, n, ldk, w->dv, true);
    mm(w->dks, ldk, w->d, ldv, 1, w->dst, ldk, n, ldk, w->dv, true);
    mm(w->dks, ldk, w->dp, 1, GDN_C, w->qn, ldk, n, ldk, n, true);
    mm(w->dks, ldk, w->dl, GDN_C, 1, w->kn, ldk, n, ldk, n, true);
    mm(w->dks, ldk, w->dl, 1, GDN_C, w->kn, ldk, n, ldk, n, true);
    for (int64_t i = 0; i < w->dk; i++)
        row_axpy(ds + i * ldv, ds + i * ldv, w->decay[n - 1], ldv, false);
    mm(ds, ldv, w->qn, 1, ldk, w->dout, ldv, w->dk, ldv, n, true);
    mm(ds, ldv, w->kn, 1, ldk, w->gx, ldv, w->dk, ldv, n, true);
    double sum = 0;
    for (int64_t i = n - 1; i >= 0; i--) {
        sum += w->dsum[i];
        ((float *)a->dg.data)[(w->t0 + i) * a->dg.stride[0] + head * a->dg.stride[1]] = (float)sum;
        ((float *)a->dbeta.data)[(w->t0 + i) * a->dbeta.stride[0] + head * a->dbeta.stride[1]] =
            w->dbeta[i];
    }
}

/* dx = r (dy - y (y dy)), y the unit vector; `unit` carries scale, dy is of unit*scale. */
INLINE void delta_unit_backward(ith_tensor dx, int64_t row, int64_t h, float *dy, const float *unit,
                                float r, float scale, int64_t ld, bool bf16)
{
    float dot = row_dot(unit, dy, ld) / scale;
    row_axpy(dy, dy, scale, ld, false);
    row_axpy(dy, unit, -dot, ld, true);
    row_axpy(dy, dy, r, ld, false);
    store_head_row(dx, row, h, dy, bf16);
}

static void delta_backward_chunk(delta_task *w, int64_t t, int64_t n, const float *entry)
{
    const ith_cpu_delta *a = w->a;
    int64_t size = w->dk * w->ldv;
    delta_load_keys(w, t, n);
    memset(w->dqs, 0, (size_t)(n * w->ldk) * 4);
    memset(w->dks, 0, (size_t)(n * w->ldk) * 4);
    for (int64_t h = 0; h < w->group; h++)
        delta_backward_head(w, entry + h * size, w->ds + h * size, w->key_head * w->group + h);
    for (int64_t i = 0; i < n; i++) {
        delta_unit_backward(a->dq, t + i, w->key_head, w->dqs + i * w->ldk, w->qn + i * w->ldk,
                            w->q_norm[i], a->scale, w->ldk, w->bf16);
        delta_unit_backward(a->dk, t + i, w->key_head, w->dks + i * w->ldk, w->kn + i * w->ldk,
                            w->k_norm[i], 1.0f, w->ldk, w->bf16);
    }
}

static void delta_backward(void *arg, int64_t first, int64_t last, int thread)
{
    const ith_cpu_delta *a = arg;
    delta_task w;
    delta_layout(a, &w, a->scratch + thread * a->thread_bytes, true);
    int64_t all = w.group * w.dk * w.ldv, key_heads = a->k.shape[1];
    for (int64_t idx = first; idx < last; idx++) {
        int64_t doc = idx / key_heads, begin = a->seqs.cu_host[doc], end = a->seqs.cu_host[doc + 1];
        int64_t chunks = ith_div_ceil(end - begin, GDN_C);
        w.key_head = idx % key_heads;
        delta_copy_states(&w, w.states, a->state, doc, true);
        delta_copy_states(&w, w.ds, a->dstate, doc, true);
        if (chunks > GDN_STRETCH)
            delta_run_states(&w, begin, end, 0, (chunks - 1) / GDN_STRETCH * GDN_STRETCH + 1,
                             w.heads, GDN_STRETCH);
        for (int64_t c0 = (chunks - 1) / GDN_STRETCH * GDN_STRETCH; c0 >= 0 && chunks;
             c0 -= GDN_STRETCH) {
            int64_t c1 = ith_min_i64(c0 + GDN_STRETCH, chunks);
            if (chunks > GDN_STRETCH)
                memcpy(w.states, w.heads + c0 / GDN_STRETCH * all, (size_t)all * 4);
            delta_run_states(&w, begin, end, c0, c1, w.inner, 1);
            for (int64_t c = c1 - 1; c >= c0; c--)
                delta_backward_chunk(&w, begin + c * GDN_C,
                                     ith_min_i64(GDN_C, end - begin - c * GDN_C),
                                     w.inner + (c - c0) * all);
        }
        delta_copy_states(&w, w.ds, a->dstate, doc, false);
    }
}

/* ---- convolution: y, x, w [C,K], history; seqs; i: columns of a piece. Pieces of channels. ----
 */

/* A piece is CONV_VECTORS vectors of channels: rows are long apart, so each is read in lines. */
#define CONV_VECTORS 8
#define CONV_LANES ((int64_t)CONV_VECTORS * VW)
#define CONV_MAX_TAPS 8

typedef struct {
    V taps[CONV_MAX_TAPS];
    V dc[CONV_MAX_TAPS], dw[CONV_MAX_TAPS]; /* backward: dc[i] of row t + i */
    int64_t c, lanes;
} conv_vector;

/* The vectors of a piece with their taps; returns how many. */
INLINE int64_t conv_vectors(const ith_cpu_rows *a, int64_t piece, conv_vector *v, bool bf16)
{
    ith_tensor w = a->t[2];
    int64_t count = 0, width = a->t[1].shape[1];
    int64_t end = ith_min_i64((piece + 1) * CONV_LANES, width);
    for (int64_t c = piece * CONV_LANES; c < end; c += VW, count++) {
        v[count].c = c;
        v[count].lanes = ith_min_i64(VW, width - c);
        for (int64_t j = 0; j < w.shape[1]; j++) {
            v[count].taps[j] = v[count].dw[j] = v_set(0.0f);
            for (int64_t i = 0; i < v[count].lanes; i++)
                v[count].taps[j][i] = v_load_part(row_at(w, c + i), j, 1, 0.0f, bf16)[0];
        }
    }
    return count;
}

INLINE V conv_sum(const ith_cpu_rows *a, const conv_vector *v, int64_t doc, int64_t begin,
                  int64_t t, bool bf16)
{
    int64_t k = a->t[2].shape[1];
    V sum = v_set(0.0f);
    for (int64_t j = 0; j < k; j++) {
        int64_t row = t - k + 1 + j;
        if (row >= begin)
            sum = sum + v->taps[j] * v_get(row_at(a->t[1], row), v->c, v->lanes, bf16);
        else if (present(a->t[3]))
            sum = sum + v->taps[j] *
                            v_get(head_at(a->t[3], doc, k - 1 + row - begin), v->c, v->lanes, bf16);
    }
    return sum;
}

INLINE void conv_forward_as(const ith_cpu_rows *a, int64_t first, int64_t last, bool bf16)
{
    int64_t k = a->t[2].shape[1];
    conv_vector v[CONV_VECTORS];
    for (int64_t piece = first; piece < last; piece++) {
        int64_t count = conv_vectors(a, piece, v, bf16);
        for (int64_t doc = 0; doc < a->seqs.num_docs; doc++) {
            int64_t begin = a->seqs.cu_host[doc], end = a->seqs.cu_host[doc + 1];
            for (int64_t t = begin; t < end; t++)
                for (int64_t i = 0; i < count; i++) {
                    V x = conv_sum(a, &v[i], doc, begin, t, bf16);
                    v_put(row_at(a->t[0], t), v[i].c, v[i].lanes, x * v_sigmoid(x), bf16);
                }
            for (int64_t r = 0; present(a->t[3]) && r < k - 1; r++) {
                int64_t row = end - k + 1 + r;
                for (int64_t i = 0; i < count; i++) {
                    V x = v_get(row >= begin ? row_at(a->t[1], row)
                                             : head_at(a->t[3], doc, k - 1 + row - begin),
                                v[i].c, v[i].lanes, bf16);
                    v_put(head_at(a->t[3], doc, r), v[i].c, v[i].lanes, x, bf16);
                }
            }
        }
    }
}
ROWS_TASK(conv_forward, 1, conv_forward_as)

/* dx in t[0], x, w, absent history, dy in t[4]: one row of one vector, from the last row on. */
INLINE void conv_backward_row(const ith_cpu_rows *a, conv_vector *v, int64_t begin, int64_t t,
                              bool bf16)
{
    int64_t k = a->t[2].shape[1];
    V x = conv_sum(a, v, 0, begin, t, bf16), s = v_sigmoid(x), sum = v_set(0.0f);
    for (int64_t j = k - 1; j > 0; j--)
        v->dc[j] = v->dc[j - 1];
    v->dc[0] =
        v_get(row_at(a->t[4], t), v->c, v->lanes, bf16) * s * (v_set(1.0f) + x * (v_set(1.0f) - s));
    for (int64_t i = 0; i < k; i++)
        sum = sum + v->taps[k - 1 - i] * v->dc[i];
    for (int64_t j = ith_max_i64(0, k - 1 - (t - begin)); j < k; j++)
        v->dw[j] =
            v->dw[j] + v->dc[0] * v_get(row_at(a->t[1], t - k + 1 + j), v->c, v->lanes, bf16);
    v_put(row_at(a->t[0], t), v->c, v->lanes, sum, bf16);
}

/* dw in t[5], may be absent. */
INLINE void conv_backward_as(const ith_cpu_rows *a, int64_t first, int64_t last, bool bf16)
{
    int64_t k = a->t[2].shape[1];
    conv_vector v[CONV_VECTORS];
    for (int64_t piece = first; piece < last; piece++) {
        int64_t count = conv_vectors(a, piece, v, bf16);
        for (int64_t doc = 0; doc < a->seqs.num_docs; doc++) {
            int64_t begin = a->seqs.cu_host[doc], end = a->seqs.cu_host[doc + 1];
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = 0; j < k; j++)
                    v[i].dc[j] = v_set(0.0f);
            for (int64_t t = end - 1; t >= begin; t--)
                for (int64_t i = 0; i < count; i++)
                    conv_backward_row(a, &v[i], begin, t, bf16);
        }
        for (int64_t i = 0; present(a->t[5]) && i < count; i++)
            for (int64_t lane = 0; lane < v[i].lanes; lane++)
                for (int64_t j = 0; j < k; j++)
                    ((float *)(void *)row_at(a->t[5], v[i].c + lane))[j] += v[i].dw[j][lane];
    }
}
ROWS_TASK(conv_backward, 1, conv_backward_as)

/* ---- gated RMSNorm: y, x, z, w (f32); f: eps ---- */

INLINE float head_rstd(const char *x, int64_t dim, float eps, bool bf16)
{
    V squares = v_set(0.0f);
    for (int64_t d = 0; d < dim; d += VW) {
        V v = v_get(x, d, dim - d, bf16);
        squares = squares + v * v;
    }
    return 1.0f / sqrtf(v_sum(squares) / (float)dim + eps);
}

INLINE void gated_norm_forward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t dim = a->t[1].shape[2];
    for (int64_t t = begin; t < end; t++) {
        for (int64_t h = 0; h < a->t[1].shape[1]; h++) {
            const char *x = head_at(a->t[1], t, h), *z = head_at(a->t[2], t, h);
            char *y = head_at(a->t[0], t, h);
            V r = v_set(head_rstd(x, dim, a->f[0], bf16));
            for (int64_t d = 0; d < dim; d += VW) {
                V gate = v_get(z, d, dim - d, bf16);
                V normed = v_get(a->t[3].data, d, dim - d, false) *
                           v_rounded(v_get(x, d, dim - d, bf16) * r, bf16);
                v_put(y, d, dim - d, normed * (gate * v_sigmoid(gate)), bf16);
            }
        }
    }
}
ROWS_TASK(gated_norm_forward, 1, gated_norm_forward_as)

INLINE void gated_norm_backward_head(const ith_cpu_rows *a, int64_t t, int64_t h, float *dw,
                                     bool bf16)
{
    int64_t dim = a->t[3].shape[2];
    const char *dy = head_at(a->t[2], t, h), *x = head_at(a->t[3], t, h),
               *z = head_at(a->t[4], t, h);
    char *dx = head_at(a->t[0], t, h), *dz = head_at(a->t[1], t, h);
    V r = v_set(head_rstd(x, dim, a->f[0], bf16)), dot = v_set(0.0f);
    for (int64_t d = 0; d < dim; d += VW) {
        V gate = v_get(z, d, dim - d, bf16);
        dot = dot + v_get(dy, d, dim - d, bf16) * (gate * v_sigmoid(gate)) *
                        v_get(a->t[5].data, d, dim - d, false) * (v_get(x, d, dim - d, bf16) * r);
    }
    V mean = v_set(v_sum(dot) / (float)dim);
    for (int64_t d = 0; d < dim; d += VW) {
        V gate = v_get(z, d, dim - d, bf16), s = v_sigmoid(gate);
        V grad = v_get(dy, d, dim - d, bf16), w = v_get(a->t[5].data, d, dim - d, false);
        V xh = v_get(x, d, dim - d, bf16) * r, e = grad * gate * s;
        if (dw)
            v_put(dw, d, dim - d, v_get(dw, d, dim - d, false) + e * xh, false);
        v_put(dz, d, dim - d, grad * w * xh * s * (v_set(1.0f) + gate * (v_set(1.0f) - s)), bf16);
        v_put(dx, d, dim - d, r * (e * w - xh * mean), bf16);
    }
}

/* dx, dz, dy, x, z, w; flag: weight gradient into part sums. Indices are parts of i[0] rows. */
INLINE void gated_norm_backward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t dim = a->t[3].shape[2];
    for (int64_t part = begin; part < end; part++) {
        float *dw = a->flag ? (float *)(void *)a->scratch + part * dim : NULL;
        if (dw)
            memset(dw, 0, (size_t)dim * 4);
        int64_t last = ith_min_i64((part + 1) * a->i[0], a->t[3].shape[0]);
        for (int64_t t = part * a->i[0]; t < last; t++)
            for (int64_t h = 0; h < a->t[3].shape[1]; h++)
                gated_norm_backward_head(a, t, h, dw, bf16);
    }
}
ROWS_TASK(gated_norm_backward, 3, gated_norm_backward_as)

/* ---- sigmoid gate: y, x, gate; backward: dx, dgate, dy, x, gate ---- */

INLINE void sigmoid_gate_forward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t dim = a->t[1].shape[2];
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < a->t[1].shape[1]; h++)
            for (int64_t d = 0; d < dim; d += VW) {
                V gate = v_get(head_at(a->t[2], t, h), d, dim - d, bf16);
                V x = v_get(head_at(a->t[1], t, h), d, dim - d, bf16);
                v_put(head_at(a->t[0], t, h), d, dim - d, x * v_rounded(v_sigmoid(gate), bf16),
                      bf16);
            }
}
ROWS_TASK(sigmoid_gate_forward, 1, sigmoid_gate_forward_as)

INLINE void sigmoid_gate_backward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t dim = a->t[3].shape[2];
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < a->t[3].shape[1]; h++)
            for (int64_t d = 0; d < dim; d += VW) {
                V s = v_sigmoid(v_get(head_at(a->t[4], t, h), d, dim - d, bf16));
                V grad = v_get(head_at(a->t[2], t, h), d, dim - d, bf16);
                V x = v_get(head_at(a->t[3], t, h), d, dim - d, bf16);
                v_put(head_at(a->t[1], t, h), d, dim - d, grad * x * s * (v_set(1.0f) - s), bf16);
                v_put(head_at(a->t[0], t, h), d, dim - d, grad * s, bf16);
            }
}
ROWS_TASK(sigmoid_gate_backward, 3, sigmoid_gate_backward_as)

#define GDN_TABLE                                                                                  \
    .delta_forward = delta_forward, .delta_backward = delta_backward, .delta_bytes = delta_bytes,  \
    .conv_forward = conv_forward, .conv_backward = conv_backward,                                  \
    .gated_norm_forward = gated_norm_forward, .gated_norm_backward = gated_norm_backward,          \
    .sigmoid_gate_forward = sigmoid_gate_forward, .sigmoid_gate_backward = sigmoid_gate_backward,  \
    .conv_lanes = CONV_LANES, .conv_max_taps = CONV_MAX_TAPS
