/* utf8.h - strict UTF-8 (no surrogates, no overlong forms, at most U+10FFFF). */
#ifndef ITH_BASE_UTF8_H
#define ITH_BASE_UTF8_H

#include "base/status.h"

/* Decodes one code point at p (p < end). Returns its length 1..4, or 0 when the bytes are not valid
 * UTF-8. */
static inline int ith_utf8_decode(const char *p, const char *end, uint32_t *out)
{
    const unsigned char *s = (const unsigned char *)p;
    int64_t room = end - p;
    if (room >= 1 && s[0] < 0x80) {
        *out = s[0];
        return 1;
    }
    if (room >= 2 && s[0] >= 0xc2 && s[0] < 0xe0 && (s[1] & 0xc0) == 0x80) {
        *out = (uint32_t)(s[0] & 0x1f) << 6 | (s[1] & 0x3f);
        return 2;
    }
    if (room >= 3 && (s[0] & 0xf0) == 0xe0 && (s[1] & 0xc0) == 0x80 && (s[2] & 0xc0) == 0x80) {
        uint32_t c = (uint32_t)(s[0] & 0x0f) << 12 | (uint32_t)(s[1] & 0x3f) << 6 | (s[2] & 0x3f);
        *out = c;
        return c >= 0x800 && (c < 0xd800 || c > 0xdfff) ? 3 : 0;
    }
    if (room >= 4 && (s[0] & 0xf8) == 0xf0 && (s[1] & 0xc0) == 0x80 && (s[2] & 0xc0) == 0x80 &&
        (s[3] & 0xc0) == 0x80) {
        uint32_t c = (uint32_t)(s[0] & 0x07) << 18 | (uint32_t)(s[1] & 0x3f) << 12 |
                     (uint32_t)(s[2] & 0x3f) << 6 | (s[3] & 0x3f);
        *out = c;
        return c >= 0x10000 && c <= 0x10ffff ? 4 : 0;
    }
    return 0;
}

/* Encodes c (a valid scalar value) into out; returns the length. */
static inline int ith_utf8_encode(uint32_t c, char out[4])
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3f));
        out[2] = (char)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3f));
    out[2] = (char)(0x80 | (c >> 6 & 0x3f));
    out[3] = (char)(0x80 | (c & 0x3f));
    return 4;
}

#endif
