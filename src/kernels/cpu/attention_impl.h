/* attention_impl.h - flash attention on the tiles of gemm_impl.h. Part of level_impl.h.
 *
 * A tile holds q_block positions of all query heads of one kv head ("columns", head-major, each
 * head padded to NR) against KV_BLOCK keys ("rows"). Scores are kept transposed, S[key][column]: a
 * vector holds 16 queries, so maxima, sums and rescaling need no work across lanes, and two rows of
 * probabilities, rounded and interleaved, are the packed operand of the next product.
 *
 * Forward  S = K Q',  P = exp(S - m),  O' += V' P        one task: a q tile of a kv head
 * Backward S = K Q', dP = V dO', dS = P (dP - delta),     one task: a kv head of a document;
 *          dQ' += K' dS,  dV += P dO,  dK += dS Q          dK and dV wait in f32 in scratch
 *
 * Memory is linear in tokens. Sums over keys run in order of keys, those over queries in order of
 * queries, whatever the threads do. Where the level multiplies bf16 pairs, P and dS are rounded to
 * bf16 before the second products, as on GPUs. */
#define KV_BLOCK 128

typedef struct {
    const ith_cpu_tile *tile;
    bool pairs, bf16;
    int64_t dim, group;
    ith_document doc;
    int64_t q_begin, k_begin;   /* rows of q and of k where the document begins, or would */
    int64_t kv_head, pad, cols; /* pad: columns of one head; cols = group * pad */
    int64_t ld; /* of rows of cols: a vector more, for cols is a power of two as a rule, and one
                   column of many rows would share a few sets of the cache */
    int64_t i0, num_q; /* query positions of this tile, within the document */
    int64_t kd_dim, dim_ld;
    int64_t noisy; /* rows of the document's noisy part */
    /* Keys that a query position sees: [lo[i], hi[i]), noisy stretch, then clean one: [2*pad]. Of a
     * stretch: all keys that any of them sees, and those that all of them see. */
    int32_t *lo, *hi;
    int64_t any_lo[2], any_hi[2], all_lo[2], all_hi[2];
    float *s, *dp, *out;                    /* [KV_BLOCK, ld] twice, [dim, ld] */
    float *max, *sum;                       /* [cols]; backward: lse and delta */
    float *rows;                            /* [pad, dim] */
    uint32_t *qp, *dop, *kp, *vp, *ktp, *p; /* packed operands */
    uint32_t *q_of, *do_of, *side;          /* backward: packed by queries; transposed P or dS */
    void *pt, *dst; /* backward: P and dS, [KV_BLOCK, ld] of the operand type */
    float *dk, *dv; /* backward: [k_hi - k_lo, dim_ld] */
} flash;

/* Packed dwords of n summed rows. */
INLINE int64_t operand_kd(const flash *f, int64_t n)
{
    return f->pairs ? ith_round_up(n, PAIRS_STEP) / 2 : n;
}

static int64_t flash_layout(const ith_cpu_attention *a, flash *f, char *base, bool backward)
{
    int64_t dim = a->q.shape[2], at = 0;
    int64_t keys = a->seqs.window ? ith_min_i64(a->seqs.max_len, a->k.shape[0]) : a->seqs.max_len;
    f->bf16 = a->q.dtype == ITH_BF16;
    const ith_cpu_tile *pairs = TILE_BF16;
    f->pairs = f->bf16 && pairs;
    f->tile = f->pairs ? pairs : &tile_f32;
    f->dim = dim;
    f->group = a->q.shape[1] / a->k.shape[1];
    f->pad = ith_round_up(a->q_block, NR);
    f->cols = f->group * f->pad;
    f->ld = f->cols + VW;
    f->kd_dim = operand_kd(f, dim);
    f->dim_ld = ith_round_up(dim, NR);
    int64_t rows_kd = operand_kd(f, KV_BLOCK), q_kd = operand_kd(f, f->pad);
    int64_t kv_mr = ith_round_up(KV_BLOCK, f->tile->mr), dim_mr = ith_round_up(dim, f->tile->mr);
#define PART(field, dwords)                                                                        \
    f->field = base ? (void *)(base + at) : NULL;                                                  \
    at += ith_round_up(((dwords) + ITH_CPU_PACK_SLACK) * 4, 64)
    PART(s, KV_BLOCK * f->ld);
    PART(out, dim * f->ld);
    PART(max, f->cols);
    PART(sum, f->cols);
    PART(rows, f->pad * dim);
    PART(lo, 2 * f->pad);
    PART(hi, 2 * f->pad);
    PART(qp, f->cols * f->kd_dim);
    PART(kp, kv_mr * f->kd_dim);
    PART(p, f->cols * rows_kd);
    PART(vp, ith_max_i64(dim_mr * rows_kd, kv_mr * f->kd_dim));
    if (backward) {
        PART(dp, KV_BLOCK * f->ld);
        PART(dop, f->cols * f->kd_dim);
        PART(ktp, dim_mr * rows_kd);
        PART(q_of, f->group * f->dim_ld * q_kd);
        PART(do_of, f->group * f->dim_ld * q_kd);
        PART(side, kv_mr * q_kd);
        PART(pt, KV_BLOCK * f->ld);
        PART(dst, KV_BLOCK * f->ld);
        PART(dk, keys * f->dim_ld);
        PART(dv, keys * f->dim_ld);
    }
#undef PART
    return at;
}

static int64_t attention_bytes(const ith_cpu_attention *a, bool backward)
{
    flash f = {0};
    return ith_round_up(flash_layout(a, &f, NULL, backward), 256);
}

/* Head h of rows [t0, ..) as a matrix: by rows (summed over the head), or by columns (summed over
 * the rows). */
INLINE ith_cpu_matrix head_matrix(ith_tensor t, int64_t t0, int64_t h, bool by_rows)
{
    const char *data = t.data;
    ith_cpu_matrix m = {data + (t0 * t.stride[0] + h * t.stride[1]) * ith_dtype_bytes(t.dtype),
                        t.dtype, t.stride[0], by_rows};
    return m;
}

/* c[rows, cols] (+)= a b from packed panels. */
INLINE void flash_product(const flash *f, int64_t rows, int64_t cols, int64_t kd, const uint32_t *a,
                          const uint32_t *b, float *c, int64_t ldc, bool load)
{
    const int64_t mr = f->tile->mr;
    for (int64_t r = 0; r < rows; r += mr)
        for (int64_t n = 0; n < cols; n += NR)
            f->tile->micro(ith_min_i64(mr, rows - r), kd, a + r * kd, b + n * kd, c + r * ldc + n,
                           ldc, load);
}

/* Columns of this tile from one of q or dO. Heads are padded with zeros. */
static void flash_pack_columns(const flash *f, uint32_t *dst, ith_tensor t)
{
    memset(dst, 0, (size_t)(f->cols * f->kd_dim) * 4);
    for (int64_t g = 0; g < f->group; g++) {
        ith_cpu_matrix m = head_matrix(t, f->q_begin + f->i0, f->kv_head * f->group + g, true);
        f->tile->pack_b(dst + g * f->pad * f->kd_dim, &m, 0, f->num_q, 0, f->dim);
    }
}

/* Two rows of operands (second one may be absent) into the packed form, one vector wide. */
INLINE void flash_put(const flash *f, uint32_t *dst, int64_t kd, int64_t row, int64_t c, V lo, V hi)
{
    uint32_t *panel = dst + c / NR * NR * kd + c % NR;
    if (f->pairs) {
        VU both = v_pairs(lo, hi);
        memcpy(panel + row / 2 * NR, &both, sizeof both);
    } else {
        memcpy(panel + row * NR, &lo, sizeof lo);
        if (row + 1 < kd)
            memcpy(panel + (row + 1) * NR, &hi, sizeof hi);
    }
}

/* Zeros in what the operand's n rows leave of its kd dwords, one vector wide. */
INLINE void flash_put_padding(const flash *f, uint32_t *dst, int64_t kd, int64_t n, int64_t c)
{
    for (int64_t row = ith_round_up(n, 2); f->pairs && row < 2 * kd; row += 2)
        flash_put(f, dst, kd, row, c, v_set(0.0f), v_set(0.0f));
}

/* Where a document lies, and its noisy rows. */
static void flash_document(const ith_cpu_attention *a, flash *f, int64_t doc)
{
    f->doc = ith_cpu_document(a, doc);
    f->q_begin = f->doc.begin - a->seqs.q_first;
    f->k_begin = f->doc.begin - a->seqs.k_first;
    f->noisy = a->seqs.noisy_host ? a->seqs.noisy_host[doc] : 0;
}

/* Limits of the tile's query positions; padding repeats the last one, so that it never looks at
 * keys of its own. */
static void flash_limits(const ith_cpu_attention *a, flash *f)
{
    const ith_document *d = &f->doc;
    for (int part = 0; part < 2; part++) {
        f->any_lo[part] = f->all_hi[part] = d->k_hi;
        f->any_hi[part] = f->all_lo[part] = d->k_lo;
    }
    for (int64_t i = 0; i < f->pad; i++) {
        int64_t row = f->i0 + ith_min_i64(i, f->num_q - 1);
        int64_t position = row < f->noisy ? a->seqs.position_host[d->begin + row] : 0;
        ith_key_range r = ith_keys_seen(a->seqs.block, a->causal, d->len, f->noisy, row, position);
        for (int part = 0; part < 2; part++) {
            r.lo[part] = ith_max_i64(r.lo[part], d->k_lo);
            r.hi[part] = ith_min_i64(r.hi[part], d->k_hi);
            f->lo[part * f->pad + i] = (int32_t)r.lo[part];
            f->hi[part * f->pad + i] = (int32_t)r.hi[part];
            f->all_lo[part] = ith_max_i64(f->all_lo[part], r.lo[part]);
            f->all_hi[part] = ith_min_i64(f->all_hi[part], r.hi[part]);
            if (r.lo[part] >= r.hi[part])
                continue;
            f->any_lo[part] = ith_min_i64(f->any_lo[part], r.lo[part]);
            f->any_hi[part] = ith_max_i64(f->any_hi[part], r.hi[part]);
        }
    }
}

/* Lanes of column c that do not see key j. */
INLINE VI flash_hidden(const flash *f, int part, int64_t c, int64_t j)
{
    VI lo, hi, key = v_seti((int32_t)j);
    memcpy(&lo, f->lo + part * f->pad + c % f->pad, sizeof lo);
    memcpy(&hi, f->hi + part * f->pad + c % f->pad, sizeof hi);
    return (key < lo) | (key >= hi);
}

/* Online softmax of n rows, VW columns: scaled and masked scores, new maximum, P, rescaled sum
 * and output. */
static void flash_softmax(const flash *f, int part, int64_t j0, int64_t n, int64_t c, float scale,
                          bool masked, bool first)
{
    const V none = v_set(-__builtin_inff());
    V top = first ? none : v_load_f32(f->max + c), old = top;
    for (int64_t j = 0; j < n; j++) {
        float *at = f->s + j * f->ld + c;
        V x = v_load_f32(at) * v_set(scale);
        if (masked)
            x = v_select(flash_hidden(f, part, c, j0 + j), none, x);
        memcpy(at, &x, sizeof x);
        top = v_max(top, x);
    }
    /* A query that has seen no key yet: -inf - -inf is no number. */
    V base = masked ? v_select(top == none, v_set(0.0f), top) : top;
    V alpha = first ? v_set(0.0f) : v_exp(old - base);
    V sum = first ? v_set(0.0f) : v_load_f32(f->sum + c) * alpha;
    int64_t kd = operand_kd(f, n);
    for (int64_t j = 0; j < n; j += 2) {
        V lo = v_exp(v_load_f32(f->s + j * f->ld + c) - base), hi = v_set(0.0f);
        if (j + 1 < n)
            hi = v_exp(v_load_f32(f->s + (j + 1) * f->ld + c) - base);
        sum = sum + (lo + hi);
        flash_put(f, f->p, kd, j, c, lo, hi);
    }
    flash_put_padding(f, f->p, kd, n, c);
    memcpy(f->max + c, &top, sizeof top);
    memcpy(f->sum + c, &sum, sizeof sum);
    VI same = old == top;
    int changed = 0;
    for (int i = 0; i < VW; i++)
        changed |= !same[i];
    if (first || !changed)
        return;
    for (int64_t d = 0; d < f->dim; d++) {
        float *at = f->out + d * f->ld + c;
        V x = v_load_f32(at) * alpha;
        memcpy(at, &x, sizeof x);
    }
}

/* Head h of rows [t0, t0+rows) = c[rows, dim]. */
static void store_head(ith_tensor t, int64_t t0, int64_t h, const float *c, int64_t ldc,
                       int64_t rows)
{
    char *y = t.data;
    store_rows(y + (t0 * t.stride[0] + h * t.stride[1]) * ith_dtype_bytes(t.dtype), t.dtype,
               t.stride[0], c, ldc, rows, t.shape[2], false);
}

/* out[dim, ld] to rows of a tensor. */
static void flash_store(const flash *f, ith_tensor t)
{
    for (int64_t g = 0; g < f->group; g++) {
        transpose(f->rows, f->dim, f->out + g * f->pad, f->ld, f->dim, f->num_q);
        store_head(t, f->q_begin + f->i0, f->kv_head * f->group + g, f->rows, f->dim, f->num_q);
    }
}

/* One block of keys against the tile. */
static void flash_forward_block(const ith_cpu_attention *a, flash *f, int part, int64_t j0,
                                int64_t n, bool first)
{
    int64_t kd = operand_kd(f, n);
    ith_cpu_matrix k = head_matrix(a->k, f->k_begin + j0, f->kv_head, true);
    ith_cpu_matrix v = head_matrix(a->v, f->k_begin + j0, f->kv_head, false);
    f->tile->pack_a(f->kp, &k, 0, n, 0, f->dim);
    f->tile->pack_a(f->vp, &v, 0, f->dim, 0, n);
    flash_product(f, n, f->cols, f->kd_dim, f->kp, f->qp, f->s, f->ld, false);
    bool masked = j0 < f->all_lo[part] || j0 + n > f->all_hi[part];
    for (int64_t c = 0; c < f->cols; c += VW)
        flash_softmax(f, part, j0, n, c, a->scale, masked, first);
    flash_product(f, f->dim, f->cols, kd, f->vp, f->p, f->out, f->ld, !first);
}

/* No key of the window for the whole tile. */
static void flash_sees_nothing(flash *f)
{
    memset(f->out, 0, (size_t)(f->dim * f->ld) * 4);
    for (int64_t c = 0; c < f->cols; c++) {
        f->max[c] = -__builtin_inff();
        f->sum[c] = 0.0f;
    }
}

static void flash_forward_tile(const ith_cpu_attention *a, flash *f)
{
    bool first = true;
    flash_limits(a, f);
    flash_pack_columns(f, f->qp, a->q);
    for (int part = 0; part < 2; part++)
        for (int64_t j0 = f->any_lo[part]; j0 < f->any_hi[part]; j0 += KV_BLOCK) {
            int64_t n = ith_min_i64(KV_BLOCK, f->any_hi[part] - j0);
            flash_forward_block(a, f, part, j0, n, first);
            first = false;
        }
    if (first)
        flash_sees_nothing(f);
    for (int64_t d = 0; d < f->dim; d++)
        for (int64_t c = 0; c < f->cols; c += VW) {
            V sum = v_load_f32(f->sum + c), x = v_load_f32(f->out + d * f->ld + c);
            x = v_select(sum == v_set(0.0f), x, x / sum); /* of a query without keys: 0 */
            memcpy(f->out + d * f->ld + c, &x, sizeof x);
        }
    flash_store(f, a->o);
    for (int64_t g = 0; g < f->group; g++)
        for (int64_t i = 0; i < f->num_q; i++) {
            int64_t c = g * f->pad + i, h = f->kv_head * f->group + g;
            ((float *)a->lse.data)[(f->q_begin + f->i0 + i) * a->q.shape[1] + h] =
                f->max[c] + logf(f->sum[c]);
        }
}

/* Index = tile * Hkv + kv head; tiles are counted through the documents. */
static void attention_forward(void *arg, int64_t begin, int64_t end, int thread)
{
    const ith_cpu_attention *a = arg;
    flash f = {0};
    flash_layout(a, &f, a->scratch + thread * a->thread_bytes, false);
    if (f.tile->begin)
        f.tile->begin();
    for (int64_t index = begin; index < end; index++) {
        int64_t tile_idx = index / a->k.shape[1], doc = 0;
        f.kv_head = index % a->k.shape[1];
        for (;; doc++) {
            flash_document(a, &f, doc);
            int64_t tiles = ith_div_ceil(f.doc.q_hi - f.doc.q_lo, a->q_block);
            if (tile_idx < tiles)
                break;
            tile_idx -= tiles;
        }
        f.i0 = f.doc.q_lo + tile_idx * a->q_block;
        f.num_q = ith_min_i64(a->q_block, f.doc.q_hi - f.i0);
        flash_forward_tile(a, &f);
    }
    if (f.tile->end)
        f.tile->end();
}

/* ---- backward ---- */

/* lse and delta = sum_d dO*O of each column; padding gets lse = inf, so that its P is 0. */
static void flash_load_stats(const ith_cpu_attention *a, flash *f)
{
    for (int64_t g = 0; g < f->group; g++)
        for (int64_t i = 0; i < f->pad; i++) {
            int64_t c = g * f->pad + i, h = f->kv_head * f->group + g;
            int64_t t = f->q_begin + f->i0 + i;
            f->max[c] = __builtin_inff();
            f->sum[c] = 0.0f;
            if (i >= f->num_q)
                continue;
            ith_cpu_matrix o = head_matrix(a->o, t, h, true);
            ith_cpu_matrix grad = head_matrix(a->do_, t, h, true);
            V sum = v_set(0.0f);
            for (int64_t d = 0; d < f->dim; d += VW)
                sum = sum + v_get(o.data, d, f->dim - d, f->bf16) *
                                v_get(grad.data, d, f->dim - d, f->bf16);
            f->max[c] = ((const float *)a->lse.data)[t * a->q.shape[1] + h];
            f->sum[c] = v_sum(sum);
        }
}

/* P and dS of n rows, VW columns, in both forms. */
static void flash_gradient(const flash *f, int part, int64_t j0, int64_t n, int64_t c, float scale,
                           bool masked)
{
    V lse = v_load_f32(f->max + c), delta = v_load_f32(f->sum + c);
    int64_t kd = operand_kd(f, n);
    for (int64_t j = 0; j < n; j += 2) {
        V ds[2] = {v_set(0.0f), v_set(0.0f)};
        for (int64_t i = j; i < ith_min_i64(j + 2, n); i++) {
            int64_t at = i * f->ld + c;
            V p = v_exp(v_load_f32(f->s + at) * v_set(scale) - lse);
            if (masked)
                p = v_select(flash_hidden(f, part, c, j0 + i), v_set(0.0f), p);
            ds[i - j] = p * (v_load_f32(f->dp + at) - delta) * v_set(scale);
            v_store_operand(f->pt, at, p, f->pairs);
            v_store_operand(f->dst, at, ds[i - j], f->pairs);
        }
        flash_put(f, f->p, kd, j, c, ds[0], ds[1]);
    }
    flash_put_padding(f, f->p, kd, n, c);
}

/* sum[n, dim] += x[n, columns] * rows of q or dO, one head after the other. */
static void flash_add_rows(const flash *f, const void *x, const uint32_t *rows, float *sum,
                           int64_t n)
{
    int64_t kd = operand_kd(f, f->num_q);
    for (int64_t g = 0; g < f->group; g++) {
        ith_cpu_matrix m = {(const char *)x + g * f->pad * (f->pairs ? 2 : 4),
                            f->pairs ? ITH_BF16 : ITH_F32, f->ld, true};
        f->tile->pack_a(f->side, &m, 0, n, 0, f->num_q);
        flash_product(f, n, f->dim_ld, kd, f->side, rows + g * f->dim_ld * kd, sum, f->dim_ld,
                      true);
    }
}

static void flash_backward_block(const ith_cpu_attention *a, flash *f, int part, int64_t j0,
                                 int64_t n, bool first)
{
    int64_t kd = operand_kd(f, n);
    ith_cpu_matrix k = head_matrix(a->k, f->k_begin + j0, f->kv_head, true);
    ith_cpu_matrix v = head_matrix(a->v, f->k_begin + j0, f->kv_head, true);
    f->tile->pack_a(f->kp, &k, 0, n, 0, f->dim);
    f->tile->pack_a(f->vp, &v, 0, n, 0, f->dim);
    k.k_contiguous = false;
    f->tile->pack_a(f->ktp, &k, 0, f->dim, 0, n);
    flash_product(f, n, f->cols, f->kd_dim, f->kp, f->qp, f->s, f->ld, false);
    flash_product(f, n, f->cols, f->kd_dim, f->vp, f->dop, f->dp, f->ld, false);
    bool masked = j0 < f->all_lo[part] || j0 + n > f->all_hi[part];
    for (int64_t c = 0; c < f->cols; c += VW)
        flash_gradient(f, part, j0, n, c, a->scale, masked);
    flash_product(f, f->dim, f->cols, kd, f->ktp, f->p, f->out, f->ld, !first);
    int64_t at = (j0 - f->doc.k_lo) * f->dim_ld;
    flash_add_rows(f, f->pt, f->do_of, f->dv + at, n);
    flash_add_rows(f, f->dst, f->q_of, f->dk + at, n);
}

static void flash_backward_tile(const ith_cpu_attention *a, flash *f)
{
    int64_t q_kd = operand_kd(f, f->num_q);
    bool first = true;
    flash_limits(a, f);
    flash_load_stats(a, f);
    flash_pack_columns(f, f->qp, a->q);
    flash_pack_columns(f, f->dop, a->do_);
    for (int64_t g = 0; g < f->group; g++) {
        int64_t h = f->kv_head * f->group + g;
        ith_cpu_matrix q = head_matrix(a->q, f->q_begin + f->i0, h, false);
        ith_cpu_matrix grad = head_matrix(a->do_, f->q_begin + f->i0, h, false);
        f->tile->pack_b(f->q_of + g * f->dim_ld * q_kd, &q, 0, f->dim, 0, f->num_q);
        f->tile->pack_b(f->do_of + g * f->dim_ld * q_kd, &grad, 0, f->dim, 0, f->num_q);
    }
    for (int part = 0; part < 2; part++)
        for (int64_t j0 = f->any_lo[part]; j0 < f->any_hi[part]; j0 += KV_BLOCK) {
            int64_t n = ith_min_i64(KV_BLOCK, f->any_hi[part] - j0);
            flash_backward_block(a, f, part, j0, n, first);
            first = false;
        }
    if (first)
        memset(f->out, 0, (size_t)(f->dim * f->ld) * 4);
    flash_store(f, a->dq);
}

/* Index = document * Hkv + kv head. */
static void attention_backward(void *arg, int64_t begin, int64_t end, int thread)
{
    const ith_cpu_attention *a = arg;
    flash f = {0};
    flash_layout(a, &f, a->scratch + thread * a->thread_bytes, true);
    if (f.tile->begin)
        f.tile->begin();
    for (int64_t index = begin; index < end; index++) {
        int64_t doc = index / a->k.shape[1];
        f.kv_head = index % a->k.shape[1];
        flash_document(a, &f, doc);
        if (f.doc.k_lo == f.doc.k_hi && f.doc.q_lo == f.doc.q_hi)
            continue;
        int64_t keys = f.doc.k_hi - f.doc.k_lo;
        memset(f.dk, 0, (size_t)(keys * f.dim_ld) * 4);
        memset(f.dv, 0, (size_t)(keys * f.dim_ld) * 4);
        for (f.i0 = f.doc.q_lo; f.i0 < f.doc.q_hi; f.i0 += a->q_block) {
            f.num_q = ith_min_i64(a->q_block, f.doc.q_hi - f.i0);
            flash_backward_tile(a, &f);
        }
        store_head(a->dk, f.k_begin + f.doc.k_lo, f.kv_head, f.dk, f.dim_ld, keys);
        store_head(a->dv, f.k_begin + f.doc.k_lo, f.kv_head, f.dv, f.dim_ld, keys);
    }
    if (f.tile->end)
        f.tile->end();
}

/* ---- decoding: a few queries against the cache, bound by reading it ---- */

#define DECODE_BLOCK 64

/* One query head: scores of a block of keys, then the weighted rows of v. sum: [dim]. */
INLINE void decode_block(const void *q, const char *k, const char *v, int64_t k_step,
                         int64_t v_step, int64_t n, int64_t dim, float scale, float *sum,
                         float *max, float *total, bool bf16)
{
    float p[DECODE_BLOCK];
    float top = *max;
    for (int64_t j = 0; j < n; j++) {
        V x = v_set(0.0f);
        for (int64_t d = 0; d < dim; d += VW)
            x = x + v_get(q, d, dim - d, bf16) * v_get(k + j * k_step, d, dim - d, bf16);
        p[j] = scale * v_sum(x);
        top = p[j] > top || p[j] != p[j] ? p[j] : top;
    }
    float alpha = v_exp(v_set(*max - top))[0];
    *max = top;
    for (int64_t j = n; j < DECODE_BLOCK; j++)
        p[j] = -__builtin_inff();
    V added = v_set(0.0f);
    for (int64_t j = 0; j < DECODE_BLOCK; j += VW) {
        V x = v_exp(v_load_f32(p + j) - v_set(top));
        memcpy(p + j, &x, sizeof x);
        added = added + x;
    }
    *total = *total * alpha + v_sum(added);
    for (int64_t d = 0; d < dim; d += VW) {
        V x = v_get(sum, d, dim - d, false) * v_set(alpha);
        for (int64_t j = 0; j < n; j++)
            x = x + v_set(p[j]) * v_get(v + j * v_step, d, dim - d, bf16);
        v_put(sum, d, dim - d, x, false);
    }
}

INLINE void decode_head(const ith_cpu_attention *a, int64_t r, int64_t h, float *sum, bool bf16)
{
    int64_t dim = a->q.shape[2], queries = a->q.shape[0] / a->k.shape[0], b = r / queries;
    int64_t size = bf16 ? 2 : 4, kv = h / (a->q.shape[1] / a->k.shape[2]);
    int64_t n = ((const int32_t *)a->lengths.data)[b] - (queries - 1 - r % queries);
    const char *q = (const char *)a->q.data + (r * a->q.stride[0] + h * a->q.stride[1]) * size;
    const char *k = (const char *)a->k.data + (b * a->k.stride[0] + kv * a->k.stride[2]) * size;
    const char *v = (const char *)a->v.data + (b * a->v.stride[0] + kv * a->v.stride[2]) * size;
    int64_t k_step = a->k.stride[1] * size, v_step = a->v.stride[1] * size;
    float max = -__builtin_inff(), total = 0.0f;
    memset(sum, 0, (size_t)dim * 4);
    for (int64_t j = 0; j < n; j += DECODE_BLOCK)
        decode_block(q, k + j * k_step, v + j * v_step, k_step, v_step,
                     ith_min_i64(DECODE_BLOCK, n - j), dim, a->scale, sum, &max, &total, bf16);
    bool part = a->lse.ndim != 0; /* then o is f32 */
    char *o = (char *)a->o.data +
              (r * a->o.stride[0] + h * a->o.stride[1]) * (part ? (int64_t)sizeof(float) : size);
    V factor = v_set(total == 0.0f ? 0.0f : 1.0f / total); /* sees nothing: zero */
    for (int64_t d = 0; d < dim; d += VW)
        v_put(o, d, dim - d, v_get(sum, d, dim - d, false) * factor, bf16 && !part);
    if (part)
        ((float *)a->lse.data)[r * a->q.shape[1] + h] = n > 0 ? max + logf(total) : max;
}

/* Index = query row * Hq + query head. */
static void attention_decode(void *arg, int64_t begin, int64_t end, int thread)
{
    const ith_cpu_attention *a = arg;
    float *sum = (float *)(void *)(a->scratch + thread * a->thread_bytes);
    for (int64_t i = begin; i < end; i++)
        if (a->q.dtype == ITH_BF16)
            decode_head(a, i / a->q.shape[1], i % a->q.shape[1], sum, true);
        else
            decode_head(a, i / a->q.shape[1], i % a->q.shape[1], sum, false);
}
