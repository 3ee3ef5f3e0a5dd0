/* rng.c - Philox4x32-10 and what is drawn from it. */
#include "base/rng.h"

#include <math.h>

void ith_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)counter_lo, c1 = (uint32_t)(counter_lo >> 32);
    uint32_t c2 = (uint32_t)counter_hi, c3 = (uint32_t)(counter_hi >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

uint64_t ith_rng_u64(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t w[4];
    ith_philox(seed, stream, index, w);
    return ((uint64_t)w[1] << 32) | w[0];
}

double ith_rng_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    return (double)(ith_rng_u64(seed, stream, index) >> 11) * 0x1p-53;
}

double ith_rng_normal(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t w[4];
    ith_philox(seed, stream, index, w);
    uint64_t a = ((uint64_t)w[1] << 32) | w[0], b = ((uint64_t)w[3] << 32) | w[2];
    double u = ((double)(a >> 11) + 1.0) * 0x1p-53, v = (double)(b >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586476925 * v);
}

int64_t ith_rng_below(uint64_t seed, uint64_t stream, uint64_t index, int64_t n)
{
    ITH_ASSERT(n > 0);
    __extension__ typedef unsigned __int128 u128;
    return (int64_t)(((u128)ith_rng_u64(seed, stream, index) * (u128)n) >> 64);
}

void ith_rng_permutation(uint64_t seed, uint64_t stream, int64_t n, int64_t *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = ith_rng_below(seed, stream, (uint64_t)i, i + 1), tmp = out[i];
        out[i] = out[j];
        out[j] = tmp;
    }
}

uint64_t ith_rng_stream(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
    return hash;
}
