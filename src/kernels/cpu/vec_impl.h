/* vec_impl.h - vectors of VW floats through the compilers' vector extension, so that one source
 * serves every level. Part of level_impl.h. */
typedef float V __attribute__((vector_size(4 * VW)));
typedef int32_t VI __attribute__((vector_size(4 * VW)));
typedef uint32_t VU __attribute__((vector_size(4 * VW)));
typedef uint16_t VH __attribute__((vector_size(2 * VW)));
typedef double VD __attribute__((vector_size(4 * VW))); /* VW/2 doubles: one register */
typedef float VF __attribute__((vector_size(2 * VW)));  /* VW/2 floats */

#define INLINE static inline __attribute__((always_inline))

/* x in all lanes. Filling lane by lane would be compiled as written; x - 0 is x, NaN and -0
 * included. */
INLINE V v_set(float x)
{
    const V zero = {0};
    return x - zero;
}

INLINE VI v_seti(int32_t x)
{
    const VI zero = {0};
    return x - zero;
}

/* 0, 1, 2 ... */
INLINE VI v_lanes(void)
{
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    VI v;
    memcpy(&v, lanes, sizeof v);
    return v;
}

INLINE V v_select(VI mask, V yes, V no)
{
    return (V)(((VI)yes & mask) | ((VI)no & ~mask));
}

/* The larger; a NaN in b is passed over (whoever takes a maximum exponentiates every value after
 * it, and there the NaN shows). */
INLINE V v_max(V a, V b)
{
#if defined(__AVX512F__)
    return (V)_mm512_max_ps((__m512)b, (__m512)a);
#else
    return v_select(b > a, b, a);
#endif
}

INLINE V v_load_f32(const float *p)
{
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE V v_widen(VH h)
{
    return (V)(__builtin_convertvector(h, VU) << 16);
}

/* To bf16, nearest even, NaN stays NaN; in the low half of each lane. */
INLINE VU v_round_bits(V x)
{
    VU bits = (VU)x;
    VU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    VU nan = (VU)(x != x);
    return (((bits >> 16) | 0x40u) & nan) | (rounded & ~nan);
}

/* The value after rounding to the activation type. */
INLINE V v_rounded(V x, bool bf16)
{
    return bf16 ? (V)(v_round_bits(x) << 16) : x;
}

/* Element i.. of an F32 or BF16 array; bf16 is a constant where this is inlined. */
INLINE V v_load(const void *p, int64_t i, bool bf16)
{
    if (!bf16)
        return v_load_f32((const float *)p + i);
    VH h;
    memcpy(&h, (const uint16_t *)p + i, sizeof h);
    return v_widen(h);
}

INLINE void v_store(void *p, int64_t i, V x, bool bf16)
{
    if (!bf16) {
        memcpy((float *)p + i, &x, sizeof x);
        return;
    }
    VH h = __builtin_convertvector(v_round_bits(x), VH);
    memcpy((uint16_t *)p + i, &h, sizeof h);
}

/* n < VW elements, the other lanes `fill`. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE V v_load_part(const void *p, int64_t i, int64_t n, float fill, bool bf16)
{
    __mmask16 mask = (__mmask16)((1u << n) - 1);
    if (!bf16)
        return (V)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, (const float *)p + i);
    VH h = (VH)_mm256_maskz_loadu_epi16(mask, (const uint16_t *)p + i);
    return (V)_mm512_mask_mov_ps(_mm512_set1_ps(fill), mask, (__m512)v_widen(h));
}

INLINE void v_store_part(void *p, int64_t i, int64_t n, V x, bool bf16)
{
    __mmask16 mask = (__mmask16)((1u << n) - 1);
    if (!bf16)
        _mm512_mask_storeu_ps((float *)p + i, mask, (__m512)x);
    else
        _mm256_mask_storeu_epi16((uint16_t *)p + i, mask,
                                 (__m256i) __builtin_convertvector(v_round_bits(x), VH));
}
#else
INLINE V v_load_part(const void *p, int64_t i, int64_t n, float fill, bool bf16)
{
    float lanes[VW];
    for (int64_t j = 0; j < VW; j++)
        lanes[j] = j < n ? (bf16 ? ith_bf16_to_f32(((const uint16_t *)p)[i + j])
                                 : ((const float *)p)[i + j])
                         : fill;
    return v_load_f32(lanes);
}

INLINE void v_store_part(void *p, int64_t i, int64_t n, V x, bool bf16)
{
    for (int64_t j = 0; j < n; j++)
        if (bf16)
            ((uint16_t *)p)[i + j] = ith_f32_to_bf16(x[j]);
        else
            ((float *)p)[i + j] = x[j];
}
#endif

/* Operands of hardware products of bf16 pairs, which take subnormals for zero; so may rounding. */
#ifdef __AVX512BF16__
INLINE VU v_pairs(V lo, V hi)
{
    static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo);
    return (VU)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)both);
}

INLINE void v_store_operand(void *p, int64_t i, V x, bool bf16)
{
    if (bf16)
        _mm256_storeu_si256((void *)((uint16_t *)p + i), (__m256i)_mm512_cvtneps_pbh((__m512)x));
    else
        v_store(p, i, x, false);
}
#else
INLINE VU v_pairs(V lo, V hi)
{
    return v_round_bits(lo) | (v_round_bits(hi) << 16);
}

INLINE void v_store_operand(void *p, int64_t i, V x, bool bf16)
{
    v_store(p, i, x, bf16);
}
#endif

/* Any count 1..VW: full vectors take the short way. */
INLINE V v_get(const void *p, int64_t i, int64_t n, bool bf16)
{
    return n >= VW ? v_load(p, i, bf16) : v_load_part(p, i, n, 0.0f, bf16);
}

INLINE void v_put(void *p, int64_t i, int64_t n, V x, bool bf16)
{
    if (n >= VW)
        v_store(p, i, x, bf16);
    else
        v_store_part(p, i, n, x, bf16);
}

INLINE V v_sqrt(V x)
{
#if defined(__AVX512F__)
    return (V)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (V)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < VW; i++)
        x[i] = sqrtf(x[i]);
    return x;
#endif
}

/* A product that is rounded before it is added to anything: where the bits must be those of the
 * reference, which fuses nothing. */
INLINE V v_mul(V a, V b)
{
    V p = a * b;
#if defined(__AVX512F__)
    __asm__("" : "+v"(p));
#elif defined(__x86_64__)
    __asm__("" : "+x"(p));
#elif defined(__aarch64__)
    __asm__("" : "+w"(p));
#endif
    return p;
}

/* Sum of the lanes, halves first. */
INLINE float v_sum(V x)
{
    float lanes[VW];
    memcpy(lanes, &x, sizeof x);
    for (int half = VW / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

INLINE float v_max_lane(V x)
{
    float best = x[0];
    for (int i = 1; i < VW; i++)
        best = x[i] > best || x[i] != x[i] ? x[i] : best;
    return best;
}

/* p(r) = e^r for |r| <= ln2/2: degree 7, the first two terms exact. */
INLINE V v_exp_part(V r)
{
    V p = v_set(1.9841270e-4f);
    p = p * r + v_set(1.3888889e-3f);
    p = p * r + v_set(8.3333333e-3f);
    p = p * r + v_set(4.1666667e-2f);
    p = p * r + v_set(1.6666667e-1f);
    p = p * r + v_set(0.5f);
    p = (p * r) * r + r;
    return p + v_set(1.0f);
}

/* exp = 2^n p(r), relative error below 1e-7; infinity above 88.73; NaN stays. */
#if defined(__AVX512F__)
INLINE V v_exp(V x)
{
    /* max and min hand on their second operand when one is NaN. */
    __m512 z = _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);
    z = _mm512_min_ps(_mm512_set1_ps(110.0f), z);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(z, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), z);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682030941723e-6f), r);
    return (V)_mm512_scalef_ps((__m512)v_exp_part((V)r), n);
}
#else
INLINE V v_exp(V x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    VI low = x<v_set(-87.33654f), high = x> v_set(88.72283f);
    V z = v_select(low, v_set(0.0f), v_select(high, v_set(0.0f), x));
    V shifted = z * v_set(1.44269504088896341f) + v_set(magic);
    V n = shifted - v_set(magic);
    V r = z - n * v_set(0.693145751953125f);
    r = r - n * v_set(1.42860682030941723e-6f);
    V p = v_exp_part(r);
    /* 2^n in two factors, for n may be 128. */
    VI ni = (VI)shifted - (VI)v_set(magic);
    VI half = ni >> 1;
    V y = p * (V)((half + 127) << 23) * (V)((ni - half + 127) << 23);
    y = v_select(high, v_set(__builtin_inff()), y);
    return v_select(low, v_set(0.0f), y);
}
#endif

/* ---- Philox4x32-10, first word (base/rng.c), VW counters at once ---- */

typedef uint64_t VQ __attribute__((vector_size(4 * VW)));

/* Products of the low halves of 64-bit lanes. */
INLINE VQ v_mul_low(VQ a, VQ b)
{
#if defined(__AVX512F__)
    return (VQ)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (VQ)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

INLINE void v_mul_wide(VU a, uint32_t b, VU *hi, VU *lo)
{
    VQ factor = {0};
    factor = factor + b;
    VQ even = v_mul_low((VQ)a, factor), odd = v_mul_low((VQ)a >> 32, factor);
    VQ low = {0};
    low = low + 0xffffffffu;
    *lo = (VU)((even & low) | (odd << 32));
    *hi = (VU)((even >> 32) | (odd & ~low));
}

/* Words of counters (hi, lo), (hi, lo+1), ... */
INLINE VU v_philox(uint64_t key, uint64_t hi, uint64_t lo)
{
    VU c2, c3, zero = {0}, lanes = (VU)v_lanes();
    VU c0 = lanes + (uint32_t)lo, c1 = zero + (uint32_t)(lo >> 32);
    c1 = c1 - (VU)(c0 < lanes); /* carry: true is -1 */
    c2 = zero + (uint32_t)hi;
    c3 = zero + (uint32_t)(hi >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        VU h0, l0, h1, l1;
        v_mul_wide(c0, 0xD2511F53u, &h0, &l0);
        v_mul_wide(c2, 0xCD9E8D57u, &h1, &l1);
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}
