/* hash.c - SHA-256, by the instructions of the CPU where it has them, and XXH64. */
#include "base/hash.h"

#include "base/checked.h"

#include <string.h>

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotr(uint32_t x, int n)
{
    return (x >> n) | (x << (32 - n));
}

/* A round leaves all but two of its eight words where they are, under the next name. */
static void compress_plain(uint32_t state[8], const uint8_t *p, int64_t blocks)
{
    for (; blocks > 0; blocks--, p += 64) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
                   (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
        for (int i = 16; i < 64; i++) {
            uint32_t a = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
            uint32_t b = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + a + w[i - 7] + b;
        }
        memcpy(s, state, sizeof s);
#define S(n) s[((n)-i) & 7]
        for (int i = 0; i < 64; i++) {
            uint32_t e1 = rotr(S(4), 6) ^ rotr(S(4), 11) ^ rotr(S(4), 25);
            uint32_t t1 = S(7) + e1 + ((S(4) & S(5)) ^ (~S(4) & S(6))) + K[i] + w[i];
            uint32_t e0 = rotr(S(0), 2) ^ rotr(S(0), 13) ^ rotr(S(0), 22);
            uint32_t t2 = e0 + ((S(0) & S(1)) ^ (S(0) & S(2)) ^ (S(1) & S(2)));
            S(3) += t1;
            S(7) = t1 + t2;
        }
#undef S
        for (int i = 0; i < 8; i++)
            state[i] += s[i];
    }
}

#ifdef __x86_64__
static bool has_instructions(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (b >> 29 & 1);
}

/* Four rounds at a time; m holds the last 16 words of the schedule. */
__attribute__((target("sha,sse4.1"))) static void
compress_instructions(uint32_t state[8], const uint8_t *p, int64_t blocks)
{
#define WORD(i) (int)state[i]
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef = _mm_set_epi32(WORD(0), WORD(1), WORD(4), WORD(5)),
            cdgh = _mm_set_epi32(WORD(2), WORD(3), WORD(6), WORD(7)), m[4] = {abef};
#undef WORD
    for (; blocks > 0; blocks--, p += 64) {
        __m128i abef_before = abef, cdgh_before = cdgh;
        for (int i = 0; i < 16; i++) {
            __m128i *now = &m[i & 3], newest = m[(i + 3) & 3];
            if (i < 4) {
                *now = _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i));
                *now = _mm_shuffle_epi8(*now, swap);
            } else {
                *now = _mm_sha256msg1_epu32(*now, m[(i + 1) & 3]);
                *now = _mm_add_epi32(*now, _mm_alignr_epi8(newest, m[(i + 2) & 3], 4));
                *now = _mm_sha256msg2_epu32(*now, newest);
            }
            __m128i k = _mm_loadu_si128((const __m128i *)(const void *)(K + 4 * i));
            k = _mm_add_epi32(k, *now);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, k);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(k, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    uint32_t out[8];
    _mm_storeu_si128((__m128i *)(void *)out, abef);
    _mm_storeu_si128((__m128i *)(void *)(out + 4), cdgh);
    static const uint8_t from[8] = {3, 2, 7, 6, 1, 0, 5, 4};
    for (int i = 0; i < 8; i++)
        state[i] = out[from[i]];
}
#endif

static void compress(ith_sha256 *h, const uint8_t *p, int64_t blocks)
{
#ifdef __x86_64__
    if (h->instructions) {
        compress_instructions(h->state, p, blocks);
        return;
    }
#endif
    compress_plain(h->state, p, blocks);
}

void ith_sha256_init(ith_sha256 *h)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, start, sizeof start);
    h->total = 0;
    h->instructions = false;
#ifdef __x86_64__
    h->instructions = has_instructions();
#endif
}

void ith_sha256_update(ith_sha256 *h, const void *data, int64_t len)
{
    const uint8_t *p = data;
    while (len > 0) {
        int64_t at = (int64_t)(h->total % 64), n = ith_min_i64(64 - at, len);
        if (n == 64) {
            n = len - len % 64;
            compress(h, p, n / 64);
        } else {
            memcpy(h->block + at, p, (size_t)n);
            if (at + n == 64)
                compress(h, h->block, 1);
        }
        h->total += (uint64_t)n;
        p += n;
        len -= n;
    }
}

void ith_sha256_hex(ith_sha256 *h, char out[65])
{
    uint64_t bits = h->total * 8;
    uint8_t pad[72] = {0x80};
    int64_t pad_len = (int64_t)((h->total % 64 < 56 ? 56 : 120) - h->total % 64);
    for (int i = 0; i < 8; i++)
        pad[pad_len + i] = (uint8_t)(bits >> (56 - 8 * i));
    ith_sha256_update(h, pad, pad_len + 8);
    for (int i = 0; i < 32; i++) {
        uint32_t byte = (h->state[i / 4] >> (24 - 8 * (i % 4))) & 255;
        out[2 * i] = "0123456789abcdef"[byte >> 4];
        out[2 * i + 1] = "0123456789abcdef"[byte & 15];
    }
    out[64] = '\0';
}

/* ---- XXH64 ---- */

static const uint64_t prime[5] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u,
                                  0x85EBCA77C2B2AE63u, 0x27D4EB2F165667C5u};

static uint64_t rotate_left(uint64_t x, int n)
{
    return (x << n) | (x >> (64 - n));
}

static uint64_t read_u64(const uint8_t *p)
{
    uint64_t x = 0;
    memcpy(&x, p, sizeof x); /* the machines we build for are little-endian */
    return x;
}

static uint64_t hash64_round(uint64_t lane, uint64_t input)
{
    return rotate_left(lane + input * prime[1], 31) * prime[0];
}

static void hash64_stripe(ith_hash64 *h, const uint8_t *p)
{
    for (int i = 0; i < 4; i++)
        h->lane[i] = hash64_round(h->lane[i], read_u64(p + 8 * i));
}

void ith_hash64_init(ith_hash64 *h)
{
    memset(h, 0, sizeof *h);
    h->lane[0] = prime[0] + prime[1];
    h->lane[1] = prime[1];
    h->lane[3] = 0 - prime[0];
}

void ith_hash64_update(ith_hash64 *h, const void *data, int64_t len)
{
    const uint8_t *p = data;
    size_t left = (size_t)len, held = (size_t)(h->total % 32);
    h->total += (uint64_t)len;
    if (held) {
        size_t take = 32 - held < left ? 32 - held : left;
        memcpy(h->rest + held, p, take);
        p += take;
        left -= take;
        if (held + take < 32)
            return;
        hash64_stripe(h, h->rest);
    }
    for (; left >= 32; p += 32, left -= 32)
        hash64_stripe(h, p);
    if (left)
        memcpy(h->rest, p, left);
}

uint64_t ith_hash64_value(const ith_hash64 *h)
{
    uint64_t x = prime[4];
    size_t held = (size_t)(h->total % 32);
    const uint8_t *p = h->rest;
    if (h->total >= 32) {
        x = rotate_left(h->lane[0], 1) + rotate_left(h->lane[1], 7) + rotate_left(h->lane[2], 12) +
            rotate_left(h->lane[3], 18);
        for (int i = 0; i < 4; i++)
            x = (x ^ hash64_round(0, h->lane[i])) * prime[0] + prime[3];
    }
    x += h->total;
    for (; held >= 8; held -= 8, p += 8)
        x = rotate_left(x ^ hash64_round(0, read_u64(p)), 27) * prime[0] + prime[3];
    if (held >= 4) {
        uint32_t word = 0;
        memcpy(&word, p, sizeof word);
        x = rotate_left(x ^ (word * prime[0]), 23) * prime[1] + prime[2];
        held -= 4;
        p += 4;
    }
    for (; held; held--, p++)
        x = rotate_left(x ^ (*p * prime[4]), 11) * prime[0];
    x = (x ^ (x >> 33)) * prime[1];
    x = (x ^ (x >> 29)) * prime[2];
    return x ^ (x >> 32);
}
