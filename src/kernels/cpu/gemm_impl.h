/* gemm_impl.h - packing and the register tile of the matrix product. Part of level_impl.h.
 *
 * A panel of A is [kd][MR] dwords, a panel of B is [kd][NR]: the tile loop reads both front to
 * back, broadcasting MR values of A against NV vectors of B. A dword is one f32, or two bf16 of
 * consecutive k where the level multiplies pairs: by vdpbf16ps, or by AMX (amx_impl.h), whose
 * panels of A differ. */
#define NR (NV * VW)
#ifdef LEVEL_AMX
#define PAIRS_STEP 32 /* k of a packed pair operand is padded to a multiple of this */
#else
#define PAIRS_STEP 2
#endif

INLINE V tile_step(V acc, uint32_t a, V b, bool pairs)
{
#ifdef LEVEL_BF16_DOT
    if (pairs)
        return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int32_t)a),
                                   (__m512bh)b);
#else
    (void)pairs;
#endif
    float f;
    memcpy(&f, &a, sizeof f);
    return acc + v_set(f) * b;
}

/* m is a constant where this is inlined, so that the tile lives in registers. */
INLINE void tile(int m, int64_t kd, const uint32_t *restrict a, const float *restrict b,
                 float *restrict c, int64_t ldc, bool load, bool pairs)
{
    V acc[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            acc[i][j] = load ? v_load_f32(c + i * ldc + j * VW) : v_set(0.0f);
    for (int64_t k = 0; k < kd; k++, a += MR, b += NR) {
        V bv[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            bv[j] = v_load_f32(b + j * VW);
#pragma GCC unroll 16
        for (int i = 0; i < m; i++)
#pragma GCC unroll 4
            for (int j = 0; j < NV; j++)
                acc[i][j] = tile_step(acc[i][j], a[i], bv[j], pairs);
    }
#pragma GCC unroll 16
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            memcpy(c + i * ldc + j * VW, &acc[i][j], sizeof(V));
}

#define TILE_CASE(rows)                                                                            \
    case rows:                                                                                     \
        tile(rows, kd, a, b, c, ldc, load, pairs);                                                 \
        break;

INLINE void tile_any(int64_t m, int64_t kd, const uint32_t *a, const float *b, float *c,
                     int64_t ldc, bool load, bool pairs)
{
    switch (m) {
        TILE_CASE(1)
        TILE_CASE(2)
        TILE_CASE(3)
        TILE_CASE(4)
#if MR > 4
        TILE_CASE(5)
        TILE_CASE(6)
#endif
#if MR > 6
        TILE_CASE(7)
        TILE_CASE(8)
        TILE_CASE(9)
        TILE_CASE(10)
        TILE_CASE(11)
        TILE_CASE(12)
        TILE_CASE(13)
        TILE_CASE(14)
#endif
    default:
        ITH_ASSERT(m == 0);
    }
}

static void micro_f32(int64_t m, int64_t kd, const void *a, const void *b, float *c, int64_t ldc,
                      bool load)
{
    tile_any(m, kd, a, b, c, ldc, load, false);
}

/* ---- transposing packers ---- */

#if defined(__AVX512F__) && defined(__AVX512BW__)
/* 16 x 16 dwords in place. */
INLINE void transpose16(__m512i r[16])
{
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

/* Up to 16 dwords of one row from k on: pairs of bf16, widened bf16, or f32. */
INLINE __m512i load_dwords(const ith_cpu_matrix *src, int64_t row, int64_t k, int64_t count,
                           bool pairs)
{
    if (src->dtype == ITH_F32) {
        __mmask16 mask = (__mmask16)(count >= 16 ? 0xffffu : (1u << count) - 1u);
        return _mm512_maskz_loadu_epi32(mask, (const float *)src->data + row * src->ld + k);
    }
    const uint16_t *p = (const uint16_t *)src->data + row * src->ld + k;
    if (pairs) {
        __mmask32 mask = (__mmask32)(count >= 32 ? 0xffffffffu : (1u << count) - 1u);
        return _mm512_maskz_loadu_epi16(mask, p);
    }
    __mmask16 mask = (__mmask16)(count >= 16 ? 0xffffu : (1u << count) - 1u);
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16);
}

/* One panel of a k-contiguous source. A store of 16 lanes may spill into the next step's slot,
 * which is written later, or into the slack behind the panel. */
static void pack_rows(uint32_t *dst, int64_t width, const ith_cpu_matrix *src, int64_t r0,
                      int64_t rows, int64_t k0, int64_t k, bool pairs)
{
    int64_t per = pairs ? 2 : 1, kd = (k + per - 1) / per;
    for (int64_t i = 0; i < kd; i += 16) {
        int64_t steps = ith_min_i64(16, kd - i);
        for (int64_t base = 0; base < width; base += 16) {
            __m512i r[16];
            for (int64_t j = 0; j < 16; j++)
                r[j] = base + j < rows
                           ? load_dwords(src, r0 + base + j, k0 + i * per, k - i * per, pairs)
                           : _mm512_setzero_si512();
            transpose16(r);
            for (int64_t j = 0; j < steps; j++)
                _mm512_storeu_si512(dst + (i + j) * width + base, r[j]);
        }
    }
}

static void transpose(float *dst, int64_t width, const float *src, int64_t ld, int64_t rows,
                      int64_t k)
{
    for (int64_t i = 0; i < k; i += 16)
        for (int64_t base = 0; base < rows; base += 16) {
            __m512i r[16];
            __mmask16 cols = (__mmask16)(k - i >= 16 ? 0xffffu : (1u << (k - i)) - 1u);
            __mmask16 keep = (__mmask16)(rows - base >= 16 ? 0xffffu : (1u << (rows - base)) - 1u);
            for (int64_t j = 0; j < 16; j++)
                r[j] = base + j < rows ? _mm512_maskz_loadu_epi32(cols, src + (base + j) * ld + i)
                                       : _mm512_setzero_si512();
            transpose16(r);
            for (int64_t j = 0; j < ith_min_i64(16, k - i); j++)
                _mm512_mask_storeu_epi32(dst + (i + j) * width + base, keep, r[j]);
        }
}
#else
INLINE uint32_t f32_dword(const ith_cpu_matrix *src, int64_t at)
{
    uint32_t bits;
    if (src->dtype == ITH_BF16)
        return (uint32_t)((const uint16_t *)src->data)[at] << 16;
    memcpy(&bits, (const float *)src->data + at, sizeof bits);
    return bits;
}

static void pack_rows(uint32_t *dst, int64_t width, const ith_cpu_matrix *src, int64_t r0,
                      int64_t rows, int64_t k0, int64_t k, bool pairs)
{
    ITH_ASSERT(!pairs);
    for (int64_t r = 0; r < width; r++)
        for (int64_t i = 0; i < k; i++)
            dst[i * width + r] = r < rows ? f32_dword(src, (r0 + r) * src->ld + k0 + i) : 0;
}

static void transpose(float *dst, int64_t width, const float *src, int64_t ld, int64_t rows,
                      int64_t k)
{
    for (int64_t base = 0; base < k; base += 8)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = base; i < ith_min_i64(base + 8, k); i++)
                dst[i * width + r] = src[r * ld + i];
}
#endif

/* VW lanes of one k of a row-contiguous source, zero past n. */
INLINE VU lanes_at(const ith_cpu_matrix *src, int64_t at, int64_t n, bool bf16)
{
    return n <= 0 ? (VU)v_set(0.0f) : (VU)v_get(src->data, at, n, bf16);
}

/* One panel of a row-contiguous source: rows are copied (f32), widened, or interleaved in pairs. */
INLINE void pack_columns_as(uint32_t *dst, int64_t width, const ith_cpu_matrix *src, int64_t r0,
                            int64_t rows, int64_t k0, int64_t k, bool pairs, bool bf16)
{
    int64_t per = pairs ? 2 : 1, kd = (k + per - 1) / per;
    for (int64_t i = 0; i < kd; i++)
        for (int64_t base = 0; base < width; base += VW) {
            int64_t at = (k0 + i * per) * src->ld + r0 + base, n = rows - base;
            VU x = lanes_at(src, at, n, bf16);
            if (pairs) {
                VU hi = i * 2 + 1 < k ? lanes_at(src, at + src->ld, n, bf16) : (VU)v_set(0.0f);
                x = (x >> 16) | hi;
            }
            memcpy(dst + i * width + base, &x, sizeof x);
        }
}

/* Panels of `width` rows, each [kd][width] dwords. */
INLINE void pack(void *dst, int64_t width, const ith_cpu_matrix *src, int64_t r0, int64_t rows,
                 int64_t k0, int64_t k, bool pairs)
{
    int64_t filled = pairs ? (k + 1) / 2 : k, kd = pairs ? ith_round_up(k, PAIRS_STEP) / 2 : k;
    for (int64_t r = 0; r < rows; r += width) {
        uint32_t *panel = (uint32_t *)dst + r * kd;
        int64_t count = ith_min_i64(width, rows - r);
        if (src->k_contiguous)
            pack_rows(panel, width, src, r0 + r, count, k0, k, pairs);
        else if (src->dtype == ITH_F32)
            pack_columns_as(panel, width, src, r0 + r, count, k0, k, false, false);
        else if (pairs)
            pack_columns_as(panel, width, src, r0 + r, count, k0, k, true, true);
        else
            pack_columns_as(panel, width, src, r0 + r, count, k0, k, false, true);
        if (filled < kd)
            memset(panel + filled * width, 0, (size_t)((kd - filled) * width) * 4);
    }
}

static void pack_a_f32(void *dst, const ith_cpu_matrix *src, int64_t r0, int64_t rows, int64_t k0,
                       int64_t k)
{
    pack(dst, MR, src, r0, rows, k0, k, false);
}

static void pack_b_f32(void *dst, const ith_cpu_matrix *src, int64_t r0, int64_t rows, int64_t k0,
                       int64_t k)
{
    pack(dst, NR, src, r0, rows, k0, k, false);
}

static const ith_cpu_tile tile_f32 = {
    .mr = MR,
    .nr = NR,
    .k_per_dword = 1,
    .k_step = 1,
    .micro = micro_f32,
    .pack_a = pack_a_f32,
    .pack_b = pack_b_f32,
};

#if defined(LEVEL_BF16_DOT) || defined(LEVEL_AMX)
static void pack_b_bf16(void *dst, const ith_cpu_matrix *src, int64_t r0, int64_t rows, int64_t k0,
                        int64_t k)
{
    pack(dst, NR, src, r0, rows, k0, k, true);
}
#endif

#if defined(LEVEL_AMX)
#include "kernels/cpu/amx_impl.h"
#define TILE_BF16 &tile_amx
#elif defined(LEVEL_BF16_DOT)
static void pack_a_bf16(void *dst, const ith_cpu_matrix *src, int64_t r0, int64_t rows, int64_t k0,
                        int64_t k)
{
    pack(dst, MR, src, r0, rows, k0, k, true);
}

static void micro_bf16(int64_t m, int64_t kd, const void *a, const void *b, float *c, int64_t ldc,
                       bool load)
{
    tile_any(m, kd, a, b, c, ldc, load, true);
}

static const ith_cpu_tile tile_bf16 = {
    .mr = MR,
    .nr = NR,
    .k_per_dword = 2,
    .k_step = 2,
    .micro = micro_bf16,
    .pack_a = pack_a_bf16,
    .pack_b = pack_b_bf16,
};
#define TILE_BF16 &tile_bf16
#else
#define TILE_BF16 NULL
#endif

INLINE void store_row(void *y, const float *c, int64_t n, bool accumulate, bool bf16)
{
    for (int64_t i = 0; i < n; i += VW) {
        int64_t count = n - i;
        V x = v_get(c, i, count, false);
        if (accumulate)
            x = x + v_get(y, i, count, bf16);
        v_put(y, i, count, x, bf16);
    }
}

static void store_rows(void *y, ith_dtype dtype, int64_t y_ld, const float *c, int64_t ldc,
                       int64_t rows, int64_t n, bool accumulate)
{
    for (int64_t i = 0; i < rows; i++)
        if (dtype == ITH_F32)
            store_row((float *)y + i * y_ld, c + i * ldc, n, accumulate, false);
        else if (accumulate)
            store_row((uint16_t *)y + i * y_ld, c + i * ldc, n, true, true);
        else
            store_row((uint16_t *)y + i * y_ld, c + i * ldc, n, false, true);
}

/* ---- few rows: dot products straight from memory, four words of the weight at a time ---- */

INLINE void gemv_as(const ith_cpu_gemm *g, int64_t n0, int64_t n1, bool bf16)
{
    int64_t bytes = ith_dtype_bytes(g->a.dtype);
    for (int64_t n = n0; n < n1; n += 4)
        for (int64_t m = 0; m < g->m; m++) {
            const char *x = (const char *)g->a.data + m * g->a.ld * bytes;
            int64_t count = ith_min_i64(4, n1 - n);
            V acc[4] = {v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f)};
            const char *w[4];
            for (int64_t j = 0; j < 4; j++)
                w[j] = (const char *)g->b.data + (n + ith_min_i64(j, count - 1)) * g->b.ld * bytes;
            for (int64_t k = 0; k < g->k; k += VW) {
                V xv = v_get(x, k, g->k - k, bf16);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    acc[j] = acc[j] + xv * v_get(w[j], k, g->k - k, bf16);
            }
            float sums[4] = {v_sum(acc[0]), v_sum(acc[1]), v_sum(acc[2]), v_sum(acc[3])};
            char *y = (char *)g->y + (m * g->y_ld + n) * ith_dtype_bytes(g->y_dtype);
            store_rows(y, g->y_dtype, 0, sums, 0, 1, count, g->accumulate);
        }
}

static void gemv(const ith_cpu_gemm *g, int64_t n0, int64_t n1)
{
    if (g->a.dtype == ITH_BF16)
        gemv_as(g, n0, n1, true);
    else
        gemv_as(g, n0, n1, false);
}
