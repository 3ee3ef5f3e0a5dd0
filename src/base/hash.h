/* hash.h - SHA-256 (FIPS 180-4), for cache keys and file identity. */
#ifndef ITH_BASE_HASH_H
#define ITH_BASE_HASH_H

#include "base/status.h"

typedef struct {
    uint32_t state[8];
    uint64_t total;
    uint8_t block[64];
    bool instructions; /* of the CPU; what init finds, and tests take away */
} ith_sha256;

void ith_sha256_init(ith_sha256 *h);
void ith_sha256_update(ith_sha256 *h, const void *data, int64_t len);
/* 64 hexadecimal digits and NUL. */
void ith_sha256_hex(ith_sha256 *h, char out[65]);

/* XXH64 (Y. Collet), seed 0: tells changed bytes, not forged ones; many times faster. */
typedef struct {
    uint64_t lane[4], total;
    uint8_t rest[32];
} ith_hash64;

void ith_hash64_init(ith_hash64 *h);
void ith_hash64_update(ith_hash64 *h, const void *data, int64_t len);
uint64_t ith_hash64_value(const ith_hash64 *h);

#endif
