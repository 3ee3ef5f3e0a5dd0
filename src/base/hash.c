/* hash.c - SHA-256. */
#include "base/hash.h"

#include "base/checked.h"

#include <string.h>

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

static void compress(ith_sha256 *h, const uint8_t *p)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
               (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
        uint32_t b = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
        w[i] = w[i - 16] + a + w[i - 7] + b;
    }
    memcpy(s, h->state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e1 = rotr(s[4], 6) ^ rotr(s[4], 11) ^ rotr(s[4], 25);
        uint32_t t1 = s[7] + e1 + ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
        uint32_t e0 = rotr(s[0], 2) ^ rotr(s[0], 13) ^ rotr(s[0], 22);
        uint32_t t2 = e0 + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        h->state[i] += s[i];
}

void ith_sha256_init(ith_sha256 *h)
{
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(h->state, start, sizeof start);
    h->total = 0;
}

void ith_sha256_update(ith_sha256 *h, const void *data, int64_t len)
{
    const uint8_t *p = data;
    while (len > 0) {
        int64_t at = (int64_t)(h->total % 64), n = ith_min_i64(64 - at, len);
        memcpy(h->block + at, p, (size_t)n);
        h->total += (uint64_t)n;
        p += n;
        len -= n;
        if (at + n == 64)
            compress(h, h->block);
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
