/* thirds.h - a division of rows among three ranks that is not one stretch each. */
#ifndef ITH_TESTS_DATA_THIRDS_H
#define ITH_TESTS_DATA_THIRDS_H

#include <stdint.h>

/* Rank *arg of three has a third of each half of the rows; the last takes what is left. */
static inline void third_of_each_half(const void *arg, int64_t rows, int64_t ranges[4])
{
    int64_t k = *(const int64_t *)arg, half = rows / 2;
    for (int i = 0; i < 2; i++) {
        ranges[2 * i] = i * half + k * (half / 3);
        ranges[2 * i + 1] = k < 2 ? ranges[2 * i] + half / 3 : i ? rows : half;
    }
}

#endif
