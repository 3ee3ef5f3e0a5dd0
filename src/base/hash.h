/* hash.h - SHA-256 (FIPS 180-4), for cache keys and file identity. */
#ifndef ITH_BASE_HASH_H
#define ITH_BASE_HASH_H

#include "base/status.h"

typedef struct {
    uint32_t state[8];
    uint64_t total;
    uint8_t block[64];
} ith_sha256;

void ith_sha256_init(ith_sha256 *h);
void ith_sha256_update(ith_sha256 *h, const void *data, int64_t len);
/* 64 hexadecimal digits and NUL. */
void ith_sha256_hex(ith_sha256 *h, char out[65]);

#endif
