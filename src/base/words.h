/* words.h - lists of words in one text, divided by blanks. */
#ifndef ITH_BASE_WORDS_H
#define ITH_BASE_WORDS_H

#include <string.h>

/* Word idx of the list and its length; NULL behind the last. */
static inline const char *ith_word(const char *words, int idx, int *len)
{
    const char *p = words;
    for (int i = 0;; i++) {
        p += strspn(p, " ");
        *len = (int)strcspn(p, " ");
        if (*len == 0)
            return NULL;
        if (i == idx)
            return p;
        p += *len;
    }
}

#endif
