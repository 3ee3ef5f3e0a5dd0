/* rows_impl.h - norms, rotary embedding, activations, loss, experts' rows, optimizer: all bound by
 * memory. Part of level_impl.h.
 *
 * Each operator is a task over rows (or elements); its arguments are tensors in ith_cpu_rows.t, in
 * the order named at each function. Where a sum runs over rows (weight gradients) the rows are cut
 * into ITH_CPU_PARTS fixed parts, whatever the threads; rows.c adds the parts in order. */

INLINE char *row_at(ith_tensor t, int64_t i)
{
    return (char *)t.data + i * t.stride[0] * ith_dtype_bytes(t.dtype);
}

INLINE bool present(ith_tensor t)
{
    return t.ndim != 0;
}

/* Calls body with the activation type as a constant. */
#define BY_TYPE(tensor, body)                                                                      \
    if ((tensor).dtype == ITH_BF16)                                                                \
        body(a, begin, end, true);                                                                 \
    else                                                                                           \
        body(a, begin, end, false)
#define ROWS_TASK(name, tensor, body)                                                              \
    static void name(void *arg, int64_t begin, int64_t end, int thread)                            \
    {                                                                                              \
        const ith_cpu_rows *a = arg;                                                               \
        (void)thread;                                                                              \
        BY_TYPE(a->t[tensor], body);                                                               \
    }

/* ---- RMSNorm: y, sum, rstd, x, residual, w; f: eps, w_offset ---- */

INLINE void rmsnorm_forward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t width = a->t[3].shape[1];
    V offset = v_set(a->f[1]);
    for (int64_t t = begin; t < end; t++) {
        const char *x = row_at(a->t[3], t);
        if (present(a->t[4])) {
            const char *res = row_at(a->t[4], t);
            char *sum = row_at(a->t[1], t);
            for (int64_t d = 0; d < width; d += VW)
                v_put(sum, d, width - d,
                      v_get(x, d, width - d, bf16) + v_get(res, d, width - d, bf16), bf16);
            x = sum;
        }
        V squares = v_set(0.0f);
        for (int64_t d = 0; d < width; d += VW) {
            V v = v_get(x, d, width - d, bf16);
            squares = squares + v * v;
        }
        float r = 1.0f / sqrtf(v_sum(squares) / (float)width + a->f[0]);
        ((float *)a->t[2].data)[t * a->t[2].stride[0]] = r;
        if (!present(a->t[0]))
            continue;
        char *y = row_at(a->t[0], t);
        for (int64_t d = 0; d < width; d += VW) {
            V w = v_get(a->t[5].data, d, width - d, bf16);
            V normed = v_get(x, d, width - d, bf16) * v_set(r);
            V out = a->f[1] == 0.0f ? w * v_rounded(normed, bf16) : normed * (offset + w);
            v_put(y, d, width - d, out, bf16);
        }
    }
}
ROWS_TASK(rmsnorm_forward, 3, rmsnorm_forward_as)

/* dx, dy, dres, x, rstd, w; f: w_offset; flag: weight gradient into part sums [parts, width].
 * Indices are parts of i[0] rows. */
INLINE void rmsnorm_backward_row(const ith_cpu_rows *a, int64_t t, float *dw, bool bf16)
{
    int64_t width = a->t[3].shape[1];
    const char *x = row_at(a->t[3], t), *dy = row_at(a->t[1], t);
    const char *dres = present(a->t[2]) ? row_at(a->t[2], t) : NULL;
    char *dx = row_at(a->t[0], t);
    V r = v_set(((const float *)a->t[4].data)[t * a->t[4].stride[0]]);
    V offset = v_set(a->f[0]), dot = v_set(0.0f);
    for (int64_t d = 0; d < width; d += VW) {
        V h = v_get(dy, d, width - d, bf16) * (offset + v_get(a->t[5].data, d, width - d, bf16));
        dot = dot + h * (v_get(x, d, width - d, bf16) * r);
    }
    V mean = v_set(v_sum(dot) / (float)width);
    for (int64_t d = 0; d < width; d += VW) {
        V grad = v_get(dy, d, width - d, bf16), xh = v_get(x, d, width - d, bf16) * r;
        V h = grad * (offset + v_get(a->t[5].data, d, width - d, bf16));
        V out = r * (h - xh * mean);
        if (dres)
            out = out + v_get(dres, d, width - d, bf16);
        if (dw)
            v_put(dw, d, width - d, v_get(dw, d, width - d, false) + grad * xh, false);
        v_put(dx, d, width - d, out, bf16);
    }
}

INLINE void rmsnorm_backward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t width = a->t[3].shape[1];
    for (int64_t part = begin; part < end; part++) {
        float *dw = a->flag ? (float *)(void *)a->scratch + part * width : NULL;
        if (dw)
            memset(dw, 0, (size_t)width * 4);
        int64_t last = ith_min_i64((part + 1) * a->i[0], a->t[3].shape[0]);
        for (int64_t t = part * a->i[0]; t < last; t++)
            rmsnorm_backward_row(a, t, dw, bf16);
    }
}
ROWS_TASK(rmsnorm_backward, 3, rmsnorm_backward_as)

/* ---- per-head norm and rotary embedding ---- */

/* cos and sin of one token. */
INLINE void rope_angles(ith_tensor cos, ith_tensor sin, ith_tensor ids, int64_t t, float *c,
                        float *s, bool bf16)
{
    int64_t half = cos.shape[1];
    const int32_t *p = ids.data;
    if (ids.ndim == 1) {
        int64_t at = p[t * ids.stride[0]];
        ITH_ASSERT(at >= 0 && at < cos.shape[0]);
        for (int64_t i = 0; i < half; i += VW) {
            v_put(c, i, half - i, v_get(row_at(cos, at), i, half - i, bf16), false);
            v_put(s, i, half - i, v_get(row_at(sin, at), i, half - i, bf16), false);
        }
        return;
    }
    for (int64_t i = 0; i < half; i++) { /* three position axes, interleaved over frequencies */
        int64_t at = p[i % 3 * ids.stride[0] + t * ids.stride[1]];
        ITH_ASSERT(at >= 0 && at < cos.shape[0]);
        c[i] = v_load_part(row_at(cos, at), i, 1, 0.0f, bf16)[0];
        s[i] = v_load_part(row_at(sin, at), i, 1, 0.0f, bf16)[0];
    }
}

INLINE char *head_at(ith_tensor x, int64_t t, int64_t h)
{
    return (char *)x.data + (t * x.stride[0] + h * x.stride[1]) * ith_dtype_bytes(x.dtype);
}

INLINE V norm_factors(ith_tensor w, int64_t d, int64_t n, float offset, bool bf16)
{
    return present(w) ? v_set(offset) + v_get(w.data, d, n, bf16) : v_set(1.0f);
}

INLINE void rope_head(char *out, const char *x, float *rstd, int64_t dim, ith_tensor w,
                      int64_t half, const float *c, const float *s, float eps, float offset,
                      bool bf16)
{
    float n[ITH_CPU_MAX_DIM];
    V squares = v_set(0.0f), r = v_set(1.0f);
    for (int64_t d = 0; d < dim; d += VW) {
        V v = v_get(x, d, dim - d, bf16);
        squares = squares + v * v;
    }
    if (present(w)) {
        *rstd = 1.0f / sqrtf(v_sum(squares) / (float)dim + eps);
        r = v_set(*rstd);
    }
    for (int64_t d = 0; d < dim; d += VW) {
        V v = v_get(x, d, dim - d, bf16);
        if (present(w)) {
            V xh = offset == 0.0f ? v_rounded(v * r, bf16) : v * r;
            v = v_rounded(xh * norm_factors(w, d, dim - d, offset, bf16), bf16);
        }
        v_put(n, d, dim - d, v, false);
    }
    for (int64_t i = 0; i < half; i += VW) {
        V lo = v_get(n, i, half - i, false), hi = v_get(n + half, i, half - i, false);
        V cos = v_get(c, i, half - i, false), sin = v_get(s, i, half - i, false);
        v_put(out, i, half - i, lo * cos - hi * sin, bf16);
        v_put(out, half + i, half - i, hi * cos + lo * sin, bf16);
    }
    for (int64_t d = 2 * half; d < dim; d += VW)
        v_put(out, d, dim - d, v_get(n, d, dim - d, false), bf16);
}

/* q_out, k_out, q_rstd, k_rstd, q, k, q_w, k_w; cos, sin, ids in t[8], t[9], ids. */
INLINE void rope_forward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    float c[ITH_CPU_MAX_DIM / 2], s[ITH_CPU_MAX_DIM / 2], unused;
    int64_t half = a->t[8].shape[1];
    for (int64_t t = begin; t < end; t++) {
        rope_angles(a->t[8], a->t[9], a->ids, t, c, s, bf16);
        for (int side = 0; side < 2; side++) {
            ith_tensor out = a->t[side], rstd = a->t[2 + side], x = a->t[4 + side];
            for (int64_t h = 0; h < x.shape[1]; h++)
                rope_head(head_at(out, t, h), head_at(x, t, h),
                          present(rstd) ? (float *)(void *)head_at(rstd, t, h) : &unused,
                          x.shape[2], a->t[6 + side], half, c, s, a->f[0], a->f[1], bf16);
        }
    }
}
ROWS_TASK(rope_forward, 4, rope_forward_as)

INLINE void rope_head_backward(char *dx, const char *dy, const char *x, float rstd, int64_t dim,
                               ith_tensor w, float *dw, int64_t half, const float *c,
                               const float *s, float offset, bool bf16)
{
    float g[ITH_CPU_MAX_DIM];
    for (int64_t i = 0; i < half; i += VW) {
        V lo = v_get(dy, i, half - i, bf16), hi = v_get(dy, half + i, half - i, bf16);
        V cos = v_get(c, i, half - i, false), sin = v_get(s, i, half - i, false);
        v_put(g, i, half - i, lo * cos + hi * sin, false);
        v_put(g + half, i, half - i, hi * cos - lo * sin, false);
    }
    for (int64_t d = 2 * half; d < dim; d += VW)
        v_put(g, d, dim - d, v_get(dy, d, dim - d, bf16), false);
    if (!present(w)) {
        for (int64_t d = 0; d < dim; d += VW)
            v_put(dx, d, dim - d, v_get(g, d, dim - d, false), bf16);
        return;
    }
    V dot = v_set(0.0f), r = v_set(rstd);
    for (int64_t d = 0; d < dim; d += VW)
        dot = dot + v_get(g, d, dim - d, false) * norm_factors(w, d, dim - d, offset, bf16) *
                        (v_get(x, d, dim - d, bf16) * r);
    V mean = v_set(v_sum(dot) / (float)dim);
    for (int64_t d = 0; d < dim; d += VW) {
        V grad = v_get(g, d, dim - d, false), xh = v_get(x, d, dim - d, bf16) * r;
        V out = r * (grad * norm_factors(w, d, dim - d, offset, bf16) - xh * mean);
        if (dw)
            v_put(dw, d, dim - d, v_get(dw, d, dim - d, false) + grad * xh, false);
        v_put(dx, d, dim - d, out, bf16);
    }
}

/* dq, dk, dq_out, dk_out, q, k, q_w, k_w; more: q_rstd, k_rstd. Indices are parts of i[0] rows;
 * flag: part sums [parts, 2, dim]. */
INLINE void rope_backward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    float c[ITH_CPU_MAX_DIM / 2], s[ITH_CPU_MAX_DIM / 2];
    int64_t half = a->t[8].shape[1], dim = a->t[4].shape[2];
    for (int64_t part = begin; part < end; part++) {
        float *sums = a->flag ? (float *)(void *)a->scratch + part * 2 * dim : NULL;
        if (sums)
            memset(sums, 0, (size_t)(2 * dim) * 4);
        int64_t last = ith_min_i64((part + 1) * a->i[0], a->t[4].shape[0]);
        for (int64_t t = part * a->i[0]; t < last; t++) {
            rope_angles(a->t[8], a->t[9], a->ids, t, c, s, bf16);
            for (int side = 0; side < 2; side++) {
                ith_tensor x = a->t[4 + side], rstd = a->more[side];
                for (int64_t h = 0; h < x.shape[1]; h++)
                    rope_head_backward(
                        head_at(a->t[side], t, h), head_at(a->t[2 + side], t, h), head_at(x, t, h),
                        present(rstd) ? *(float *)(void *)head_at(rstd, t, h) : 1.0f, dim,
                        a->t[6 + side], sums ? sums + side * dim : NULL, half, c, s, a->f[0], bf16);
            }
        }
    }
}
ROWS_TASK(rope_backward, 4, rope_backward_as)

/* ---- SwiGLU ---- */

INLINE V v_sigmoid(V x)
{
    return v_set(1.0f) / (v_set(1.0f) + v_exp(v_set(0.0f) - x));
}

/* h, gate_up */
INLINE void swiglu_forward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t width = a->t[0].shape[1];
    for (int64_t t = begin; t < end; t++) {
        char *h = row_at(a->t[0], t);
        const char *in = row_at(a->t[1], t);
        for (int64_t i = 0; i < width; i += VW) {
            V gate = v_get(in, i, width - i, bf16), up = v_get(in, width + i, width - i, bf16);
            v_put(h, i, width - i, v_rounded(gate * v_sigmoid(gate), bf16) * up, bf16);
        }
    }
}
ROWS_TASK(swiglu_forward, 0, swiglu_forward_as)

/* dgate_up, h, dh, gate_up; one vector is read whole before it is written, for they may alias. */
INLINE void swiglu_backward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t width = a->t[2].shape[1];
    V one = v_set(1.0f);
    for (int64_t t = begin; t < end; t++) {
        char *out = row_at(a->t[0], t), *h = present(a->t[1]) ? row_at(a->t[1], t) : NULL;
        const char *dh = row_at(a->t[2], t), *in = row_at(a->t[3], t);
        for (int64_t i = 0; i < width; i += VW) {
            int64_t n = width - i;
            V gate = v_get(in, i, n, bf16), up = v_get(in, width + i, n, bf16);
            V grad = v_get(dh, i, n, bf16), s = v_sigmoid(gate), silu = gate * s;
            v_put(out, i, n, grad * up * (s * (one + gate * (one - s))), bf16);
            v_put(out, width + i, n, grad * silu, bf16);
            if (h)
                v_put(h, i, n, v_rounded(silu, bf16) * up, bf16);
        }
    }
}
ROWS_TASK(swiglu_backward, 2, swiglu_backward_as)

/* ---- elements: y, a, b (of a cast y, x) as rows of i[0] elements; embedding gradient: dw, dy, ids
 * ---- */

INLINE void add_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < a->i[0]; i += VW) {
            int64_t n = a->i[0] - i;
            V sum = v_get(row_at(a->t[1], t), i, n, bf16) + v_get(row_at(a->t[2], t), i, n, bf16);
            v_put(row_at(a->t[0], t), i, n, sum, bf16);
        }
}
ROWS_TASK(add, 0, add_as)

INLINE void cast_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool to_bf16, bool bf16)
{
    for (int64_t t = begin; t < end; t++) {
        char *out = row_at(a->t[0], t);
        const char *in = row_at(a->t[1], t);
        for (int64_t i = 0; i < a->i[0]; i += VW)
            v_put(out, i, a->i[0] - i, v_get(in, i, a->i[0] - i, bf16), to_bf16);
    }
}

static void cast(void *arg, int64_t begin, int64_t end, int thread)
{
    const ith_cpu_rows *a = arg;
    (void)thread;
    if (a->t[0].dtype == ITH_BF16)
        cast_as(a, begin, end, true, a->t[1].dtype == ITH_BF16);
    else
        cast_as(a, begin, end, false, a->t[1].dtype == ITH_BF16);
}

/* Columns [begin, end) of all rows, in order of rows. */
INLINE void embedding_backward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    const int32_t *ids = a->t[2].data;
    for (int64_t t = 0; t < a->t[1].shape[0]; t++) {
        int64_t id = ids[t * a->t[2].stride[0]];
        ITH_ASSERT(id >= 0 && id < a->t[0].shape[0]);
        char *dw = row_at(a->t[0], id);
        for (int64_t d = begin; d < end; d += VW)
            v_put(dw, d, end - d,
                  v_get(dw, d, end - d, false) + v_get(row_at(a->t[1], t), d, end - d, bf16),
                  false);
    }
}
ROWS_TASK(embedding_backward, 1, embedding_backward_as)

/* ---- cross entropy: row_loss, logits, labels, seeds; flag: gradient ---- */

#define LOSS_BLOCK 2048 /* elements summed in f32 before they enter a double */

/* Sum of e^((x - top) * scale). */
INLINE double exp_sum(const char *x, int64_t n, V top, V scale, bool bf16)
{
    double total = 0;
    for (int64_t b = 0; b < n; b += LOSS_BLOCK) {
        int64_t last = ith_min_i64(b + LOSS_BLOCK, n);
        V sum = v_set(0.0f), sum2 = v_set(0.0f);
        int64_t i = b;
        for (; i + 2 * VW <= last; i += 2 * VW) {
            sum = sum + v_exp((v_load(x, i, bf16) - top) * scale);
            sum2 = sum2 + v_exp((v_load(x, i + VW, bf16) - top) * scale);
        }
        for (; i < last; i += VW) {
            int64_t count = last - i;
            V v = count >= VW ? v_load(x, i, bf16)
                              : v_load_part(x, i, count, -__builtin_inff(), bf16);
            sum = sum + v_exp((v - top) * scale);
        }
        total += (double)v_sum(sum + sum2);
    }
    return total;
}

INLINE float row_max(const char *x, int64_t words, bool bf16)
{
    int64_t i = 0;
    V top = v_set(-__builtin_inff());
    for (; i + VW <= words; i += VW)
        top = v_max(top, v_load(x, i, bf16));
    if (i < words)
        top = v_max(top, v_load_part(x, i, words - i, -__builtin_inff(), bf16));
    return v_max_lane(top);
}

INLINE void cross_entropy_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t words = a->t[1].shape[1];
    for (int64_t r = begin; r < end; r++) {
        char *x = row_at(a->t[1], r);
        int64_t label = ((const int32_t *)a->t[2].data)[r * a->t[2].stride[0]];
        ITH_ASSERT(label >= 0 && label < words);
        float max = row_max(x, words, bf16), at_label = v_load_part(x, label, 1, 0.0f, bf16)[0];
        float lse = max + (float)log(exp_sum(x, words, v_set(max), v_set(1.0f), bf16));
        ((float *)a->t[0].data)[r * a->t[0].stride[0]] = lse - at_label;
        if (!a->flag)
            continue;
        float seed = ((const float *)a->t[3].data)[r * a->t[3].stride[0]];
        for (int64_t i = 0; i < words; i += VW) {
            V p = v_exp(v_get(x, i, words - i, bf16) - v_set(lse));
            v_put(x, i, words - i, p * v_set(seed), bf16);
        }
        V p = v_exp(v_set(at_label - lse));
        v_store_part(x, label, 1, (p - v_set(1.0f)) * v_set(seed), bf16);
    }
}
ROWS_TASK(cross_entropy, 1, cross_entropy_as)

/* Sum of e^(x - max) (x - max). */
INLINE double exp_weighted_sum(const char *x, int64_t words, float max, bool bf16)
{
    double total = 0;
    for (int64_t i = 0; i < words;) {
        int64_t last = i + LOSS_BLOCK < words ? i + LOSS_BLOCK : words;
        V sum = v_set(0.0f);
        for (; i < last; i += VW) {
            V v = last - i >= VW ? v_load(x, i, bf16)
                                 : v_load_part(x, i, last - i, -__builtin_inff(), bf16);
            V e = v_max(v - v_set(max), v_set(-100.0f)); /* -inf is no number times zero */
            sum = sum + v_exp(e) * e;
        }
        total += (double)v_sum(sum);
    }
    return total;
}

/* row_loss, logits, labels, seeds, row_confidence, right; f[0]: confidence; flag: gradient.
 * H = log sum - mean and log p + H = x - max - mean, with mean = sum of p (x - max). */
INLINE void cross_entropy_confident_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t words = a->t[1].shape[1];
    for (int64_t r = begin; r < end; r++) {
        char *x = row_at(a->t[1], r);
        int64_t label = ((const int32_t *)a->t[2].data)[r * a->t[2].stride[0]];
        ITH_ASSERT(label >= 0 && label < words);
        float max = row_max(x, words, bf16), at_label = v_load_part(x, label, 1, 0.0f, bf16)[0];
        double sum = exp_sum(x, words, v_set(max), v_set(1.0f), bf16);
        bool right = at_label >= max;
        float log_sum = (float)log(sum), c = right ? a->f[0] : 0.0f;
        float mean = right ? (float)(exp_weighted_sum(x, words, max, bf16) / sum) : 0.0f;
        ((float *)a->t[0].data)[r * a->t[0].stride[0]] = max + log_sum - at_label;
        ((float *)a->t[4].data)[r * a->t[4].stride[0]] = c * (log_sum - mean);
        ((float *)a->t[5].data)[r * a->t[5].stride[0]] = right;
        if (!a->flag)
            continue;
        V seed = v_set(((const float *)a->t[3].data)[r * a->t[3].stride[0]]), top = v_set(max);
        for (int64_t i = 0; i < words; i += VW) {
            V e = v_max(v_get(x, i, words - i, bf16) - top, v_set(-100.0f));
            V p = v_exp(e - v_set(log_sum));
            v_put(x, i, words - i, (p - v_set(c) * p * (e - v_set(mean))) * seed, bf16);
        }
        V e = v_set(at_label) - top, p = v_exp(e - v_set(log_sum));
        V at = p - v_set(1.0f) - v_set(c) * p * (e - v_set(mean));
        v_store_part(x, label, 1, at * seed, bf16);
    }
}
ROWS_TASK(cross_entropy_confident, 1, cross_entropy_confident_as)

/* ---- ids, probability, logits, draws (data NULL: none); f[0]: scale, i[0]: barred ---- */

INLINE float word_at(const char *x, int64_t i, bool bf16)
{
    /* cppcheck-suppress invalidPointerCast ; x points at either, and bf16 says at which */
    return bf16 ? ith_bf16_to_f32(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

/* The first word but `barred` that has this value; 0 or 1 when none has (no number). */
INLINE int64_t first_with(const char *x, int64_t words, float value, int64_t barred, bool bf16)
{
    for (int64_t i = 0; i < words; i++)
        if (word_at(x, i, bf16) == value && i != barred)
            return i;
    return barred == 0;
}

/* e^((x - max) * scale) of words, but `barred`, summed until it exceeds `until`. */
INLINE int64_t drawn_word(const char *x, int64_t words, float max, float scale, double until,
                          int64_t barred, bool bf16)
{
    double seen = 0;
    int64_t drawn = barred == 0;
    for (int64_t i = 0; i < words && seen <= until; i++) {
        double e = (double)expf((word_at(x, i, bf16) - max) * scale);
        if (i == barred || !(e > 0))
            continue;
        seen += e;
        drawn = i;
    }
    return drawn;
}

INLINE void choose_ids_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t words = a->t[2].shape[1], barred = a->i[0], size = bf16 ? 2 : 4;
    float scale = a->f[0];
    for (int64_t r = begin; r < end; r++) {
        const char *x = row_at(a->t[2], r);
        float top = row_max(x, barred < 0 ? words : barred, bf16), max = top;
        if (barred >= 0) {
            top = fmaxf(top, row_max(x + (barred + 1) * size, words - barred - 1, bf16));
            max = fmaxf(top, word_at(x, barred, bf16));
        }
        double sum = exp_sum(x, words, v_set(max), v_set(scale), bf16);
        float draw = a->t[3].data ? ((const float *)a->t[3].data)[r * a->t[3].stride[0]] : -1.0f;
        int64_t id = 0;
        if (draw >= 0) {
            double out = barred < 0 ? 0 : (double)expf((word_at(x, barred, bf16) - max) * scale);
            id = drawn_word(x, words, max, scale, (double)draw * (sum - out), barred, bf16);
        } else {
            id = first_with(x, words, top, barred, bf16);
        }
        ((int32_t *)a->t[0].data)[r * a->t[0].stride[0]] = (int32_t)id;
        ((float *)a->t[1].data)[r * a->t[1].stride[0]] =
            (float)((double)expf((word_at(x, id, bf16) - max) * scale) / sum);
    }
}
ROWS_TASK(choose_ids, 2, choose_ids_as)

/* ---- sums in double: a, b; indices are parts of i[0] elements, each leaves one double ---- */

INLINE VD to_double(const float *p)
{
    VF f;
    memcpy(&f, p, sizeof f);
    return __builtin_convertvector(f, VD);
}

static void dot(void *arg, int64_t begin, int64_t end, int thread)
{
    const ith_cpu_rows *a = arg;
    (void)thread;
    const int step = VW / 2;
    const float *x = a->t[0].data, *y = present(a->t[1]) ? a->t[1].data : NULL;
    int64_t n = ith_numel(a->t[0]);
    for (int64_t part = begin; part < end; part++) {
        int64_t i = part * a->i[0], last = ith_min_i64(i + a->i[0], n);
        VD sums[4] = {{0}};
        for (; i + 4 * step <= last; i += 4 * step)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                VD v = to_double(x + i + j * step);
                sums[j] = sums[j] + (y ? v * to_double(y + i + j * step) : v);
            }
        double total = 0;
        VD all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        for (int j = 0; j < step; j++)
            total += all[j];
        for (; i < last; i++)
            total += (double)x[i] * (y ? (double)y[i] : 1.0);
        ((double *)(void *)a->scratch)[part] = total;
    }
}

/* ---- experts: y, base, x, topk_w, row_of ---- */

INLINE float weight_of(ith_tensor w, int64_t t, int64_t s)
{
    return present(w) ? ((const float *)w.data)[t * w.stride[0] + s] : 1.0f;
}

INLINE void combine_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t width = a->t[0].shape[1], k = a->t[4].shape[1];
    for (int64_t t = begin; t < end; t++) {
        const int32_t *rows = (const int32_t *)(const void *)row_at(a->t[4], t);
        for (int64_t d = 0; d < width; d += VW) {
            int64_t n = width - d;
            V sum = present(a->t[1]) ? v_get(row_at(a->t[1], t), d, n, bf16) : v_set(0.0f);
            for (int64_t s = 0; s < k; s++)
                sum = sum +
                      v_set(weight_of(a->t[3], t, s)) * v_get(row_at(a->t[2], rows[s]), d, n, bf16);
            v_put(row_at(a->t[0], t), d, n, sum, bf16);
        }
    }
}
ROWS_TASK(combine, 0, combine_as)

/* dx, dtopk_w, dy, x, topk_w, row_of; dx may be x, vector by vector. */
INLINE void combine_backward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t width = a->t[2].shape[1], k = a->t[5].shape[1];
    for (int64_t t = begin; t < end; t++) {
        const int32_t *rows = (const int32_t *)(const void *)row_at(a->t[5], t);
        float *dw = (float *)(void *)row_at(a->t[1], t);
        for (int64_t s = 0; s < k; s++) {
            const char *x = row_at(a->t[3], rows[s]), *dy = row_at(a->t[2], t);
            char *dx = row_at(a->t[0], rows[s]);
            V w = v_set(weight_of(a->t[4], t, s)), sum = v_set(0.0f);
            for (int64_t d = 0; d < width; d += VW) {
                V grad = v_get(dy, d, width - d, bf16);
                sum = sum + grad * v_get(x, d, width - d, bf16);
                v_put(dx, d, width - d, w * grad, bf16);
            }
            dw[s] = v_sum(sum);
        }
    }
}
ROWS_TASK(combine_backward, 2, combine_backward_as)

/* Softmax over E and the k best: topk_w, topk_idx, probs, logits; flag: norm_topk. */
INLINE void router_forward_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool bf16)
{
    int64_t experts = a->t[3].shape[1], k = a->t[0].shape[1];
    for (int64_t t = begin; t < end; t++) {
        bool taken[ITH_CPU_MAX_EXPERTS] = {false};
        const char *x = row_at(a->t[3], t);
        float *p = (float *)(void *)row_at(a->t[2], t), *w = (float *)(void *)row_at(a->t[0], t);
        int32_t *idx = (int32_t *)(void *)row_at(a->t[1], t);
        V top = v_set(-__builtin_inff());
        for (int64_t e = 0; e < experts; e += VW)
            top = v_max(top, experts - e >= VW
                                 ? v_load(x, e, bf16)
                                 : v_load_part(x, e, experts - e, -__builtin_inff(), bf16));
        V max = v_set(v_max_lane(top));
        V sum = v_set((float)exp_sum(x, experts, max, v_set(1.0f), bf16));
        for (int64_t e = 0; e < experts; e += VW)
            v_put(p, e, experts - e, v_exp(v_get(x, e, experts - e, bf16) - max) / sum, false);
        float chosen = 0.0f;
        for (int64_t s = 0; s < k; s++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++)
                if (!taken[e] && (best < 0 || p[e] > p[best]))
                    best = e;
            /* cppcheck-suppress negativeIndex ; k <= experts: one is left */
            taken[best] = true;
            idx[s] = (int32_t)best;
            chosen += p[best];
        }
        for (int64_t s = 0; s < k; s++)
            w[s] = v_rounded(v_set(a->flag ? p[idx[s]] / chosen : p[idx[s]]), bf16)[0];
    }
}
ROWS_TASK(router_forward, 3, router_forward_as)

/* ---- AdamW: w, master, m, v, grad; f: scale; i: first, stochastic; elements ---- */

/* One vector. stochastic: the cut-off part of w decides by chance whether it is rounded up. */
INLINE void adamw_vector(const ith_cpu_rows *a, int64_t i, int64_t n, bool stochastic, bool w16,
                         bool m16)
{
    const ith_cpu_adamw *f = &a->adamw;
    void *p_data = present(a->t[1]) ? a->t[1].data : a->t[0].data;
    bool p16 = !present(a->t[1]) && w16;
    /* Rounded as the reference rounds: the update is the same bits on every level. */
    V g = v_mul(v_set(a->f[0]), v_get(a->t[4].data, i, n, false));
    V m = v_mul(v_set(f->beta1), v_get(a->t[2].data, i, n, m16)) + v_mul(v_set(f->rest1), g);
    V v = v_mul(v_set(f->beta2), v_get(a->t[3].data, i, n, m16)) +
          v_mul(v_mul(v_set(f->rest2), g), g);
    V denominator = v_mul(v_sqrt(v), v_set(f->v_factor)) + v_set(f->eps);
    V p = v_mul(v_get(p_data, i, n, p16), v_set(f->decay)) -
          v_mul(v_set(f->step_size), m) / denominator;
    v_put(a->t[2].data, i, n, m, m16);
    v_put(a->t[3].data, i, n, v, m16);
    if (stochastic) {
        VU bits = (VU)p, add = v_philox(a->seed, (uint64_t)a->i[2], (uint64_t)(a->i[0] + i));
        VU finite = (VU)((bits & 0x7f800000u) != (VU)v_set(__builtin_inff()));
        p = (V)((bits + (add & 0xffffu & finite)) & (0xffff0000u | ~finite));
    }
    if (present(a->t[1]))
        v_put(p_data, i, n, p, false);
    v_put(a->t[0].data, i, n, p, w16);
    if (a->flag)
        v_put(a->t[4].data, i, n, v_set(0.0f), false);
}

INLINE void adamw_as(const ith_cpu_rows *a, int64_t begin, int64_t end, bool w16, bool m16)
{
    for (int64_t i = begin; i < end; i += VW)
        adamw_vector(a, i, end - i, a->i[1] != 0, w16, m16);
}

static void adamw(void *arg, int64_t begin, int64_t end, int thread)
{
    const ith_cpu_rows *a = arg;
    (void)thread;
    bool w16 = a->t[0].dtype == ITH_BF16, m16 = a->t[2].dtype == ITH_BF16;
    if (w16 && m16)
        adamw_as(a, begin, end, true, true);
    else if (w16)
        adamw_as(a, begin, end, true, false);
    else if (m16)
        adamw_as(a, begin, end, false, true);
    else
        adamw_as(a, begin, end, false, false);
}

#define ROWS_TABLE                                                                                 \
    .rmsnorm_forward = rmsnorm_forward, .rmsnorm_backward = rmsnorm_backward,                      \
    .rope_forward = rope_forward, .rope_backward = rope_backward,                                  \
    .swiglu_forward = swiglu_forward, .swiglu_backward = swiglu_backward, .add = add,              \
    .cast = cast, .cross_entropy = cross_entropy,                                                  \
    .cross_entropy_confident = cross_entropy_confident, .choose_ids = choose_ids, .dot = dot,      \
    .embedding_backward = embedding_backward, .combine = combine,                                  \
    .combine_backward = combine_backward, .router_forward = router_forward, .adamw = adamw,
