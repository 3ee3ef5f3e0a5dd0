/* amx_impl.h - the tile of bf16 products on AMX: 2 x 2 tiles of 16 x 16 sums. Part of level_impl.h.
 *
 * A tile register holds 16 rows of 64 bytes. tdpbf16ps adds to 16 x 16 sums the products of 16 rows
 * of A, 32 bf16 of k each, and of 16 pairs of B, each the pairs of 16 columns. So a panel of A is
 * [kd/16][32 rows][16 dwords]; a panel of B is that of the other levels, [kd][32]. tdpbf16ps, like
 * vdpbf16ps, takes subnormals for zero.
 *
 * The shape of the registers is set per thread (begin) for as long as it runs tiles, and given back
 * (end): libraries that use AMX on the same thread set their own. A signal handler finds and leaves
 * the registers as the kernel saved them. */
#define AMX_ROWS 32

/* Palette 1: eight registers of 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_shape __attribute__((aligned(64))) = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static void amx_begin(void)
{
    _tile_loadconfig(&amx_shape);
}

static void amx_end(void)
{
    _tile_release();
}

/* 16 or 32 rows; registers 0..3 hold sums, 4 and 5 rows of A, 6 and 7 columns of B. A panel of A
 * meets many of B: those are loaded past the first cache (5 % of a product). */
INLINE void amx_tiles(bool both, int64_t kd, const uint32_t *a, const uint32_t *b, float *c,
                      int64_t ldc, bool load)
{
    const int64_t a_step = 64, b_step = NR * 4, c_step = ldc * 4;
    __asm__ volatile("" ::: "memory"); /* gcc 12 does not know that tile loads read memory */
    if (load) {
        _tile_loadd(0, c, c_step);
        _tile_loadd(1, c + 16, c_step);
        if (both) {
            _tile_loadd(2, c + 16 * ldc, c_step);
            _tile_loadd(3, c + 16 * ldc + 16, c_step);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < kd; k += 16, a += 16 * AMX_ROWS, b += 16 * NR) {
        _tile_loadd(4, a, a_step);
        _tile_stream_loadd(6, b, b_step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, b + 16, b_step);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, a + 256, a_step);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_step);
    _tile_stored(1, c + 16, c_step);
    if (both) {
        _tile_stored(2, c + 16 * ldc, c_step);
        _tile_stored(3, c + 16 * ldc + 16, c_step);
    }
}

static void amx_micro(int64_t m, int64_t kd, const void *a, const void *b, float *c, int64_t ldc,
                      bool load)
{
    if (m == AMX_ROWS) {
        amx_tiles(true, kd, a, b, c, ldc, load);
        return;
    }
    float part[AMX_ROWS * NR] __attribute__((aligned(64)));
    memset(part, 0, sizeof part);
    for (int64_t i = 0; load && i < m; i++)
        memcpy(part + i * NR, c + i * ldc, NR * 4);
    if (m > 16)
        amx_tiles(true, kd, a, b, part, NR, load);
    else
        amx_tiles(false, kd, a, b, part, NR, load);
    for (int64_t i = 0; i < m; i++)
        memcpy(c + i * ldc, part + i * NR, NR * 4);
}

/* 32 rows of 32 k of a panel of A where memory runs along the rows; what lies past the end is zero.
 * Interleaving two k leaves the dwords of rows 8q..8q+3 and of rows 8q+4..8q+7 in quarter q. */
INLINE void amx_pack_columns(uint32_t *dst, const ith_cpu_matrix *src, int64_t row, int64_t rows,
                             int64_t k0, int64_t k)
{
    const uint16_t *p = (const uint16_t *)src->data + k0 * src->ld + row;
    __mmask32 mask = (__mmask32)(rows >= 32 ? 0xffffffffu : (1u << rows) - 1u);
    __m512i lo[16], hi[16];
    for (int64_t j = 0; j < 16; j++) {
        __m512i x = _mm512_setzero_si512(), y = x;
        if (2 * j < k)
            x = _mm512_maskz_loadu_epi16(mask, p + 2 * j * src->ld);
        if (2 * j + 1 < k)
            y = _mm512_maskz_loadu_epi16(mask, p + (2 * j + 1) * src->ld);
        lo[j] = _mm512_unpacklo_epi16(x, y);
        hi[j] = _mm512_unpackhi_epi16(x, y);
    }
    transpose16(lo);
    transpose16(hi);
    for (int64_t j = 0; j < 16; j++) {
        uint32_t *at = dst + (j / 4 * 8 + j % 4) * 16;
        _mm512_storeu_si512(at, lo[j]);
        _mm512_storeu_si512(at + 4 * 16, hi[j]);
    }
}

static void amx_pack_a(void *dst, const ith_cpu_matrix *src, int64_t r0, int64_t rows, int64_t k0,
                       int64_t k)
{
    uint32_t *out = dst;
    for (int64_t r = 0; r < rows; r += AMX_ROWS)
        for (int64_t i = 0; i < k; i += PAIRS_STEP, out += 16 * AMX_ROWS) {
            if (!src->k_contiguous) {
                amx_pack_columns(out, src, r0 + r, rows - r, k0 + i, k - i);
                continue;
            }
            for (int64_t j = 0; j < AMX_ROWS; j++)
                _mm512_storeu_si512(out + j * 16,
                                    r + j < rows ? load_dwords(src, r0 + r + j, k0 + i, k - i, true)
                                                 : _mm512_setzero_si512());
        }
}

static const ith_cpu_tile tile_amx = {
    .mr = AMX_ROWS,
    .nr = NR,
    .k_per_dword = 2,
    .k_step = PAIRS_STEP,
    .micro = amx_micro,
    .pack_a = amx_pack_a,
    .pack_b = pack_b_bf16,
    .begin = amx_begin,
    .end = amx_end,
};
