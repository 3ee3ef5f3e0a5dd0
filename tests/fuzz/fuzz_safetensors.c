/* links: ith_checkpoint */
/* Weight files: whatever the bytes are, opening fails with one line of text or every entry can be
 * read and looked up. The file lies in the working directory. */
#include "checkpoint/safetensors.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile unsigned sink;

static void read_everything(const ith_st_reader *r)
{
    unsigned sum = 0;
    int64_t total = 0;
    for (int64_t i = 0; i < ith_st_count(r); i++) {
        const ith_st_entry *entry = ith_st_at(r, i);
        ITH_ASSERT(ith_st_find(r, entry->name) == entry);
        ITH_ASSERT(entry->bytes == ith_st_numel(entry) * ith_dtype_bytes(entry->dtype));
        for (int64_t k = 0; k < entry->bytes; k++)
            sum += ((const unsigned char *)entry->data)[k];
        total += entry->bytes;
        char text[64];
        sum += (unsigned)ith_st_text(entry, text, sizeof text)[0];
    }
    ITH_ASSERT(total == ith_st_total_bytes(r));
    sink = sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char path[64];
    if (!path[0]) /* not synced: a fuzzer runs thousands a second */
        snprintf(path, sizeof path, "fuzz-%ld.safetensors", (long)getpid());
    FILE *file = fopen(path, "wb");
    ITH_ASSERT(file && fwrite(data, 1, size, file) == size);
    ITH_ASSERT(fclose(file) == 0);
    ith_st_reader *r = NULL;
    ith_error err = {0};
    if (ith_st_open(&r, path, &err) == ITH_OK) {
        read_everything(r);
        ith_st_close(r);
    } else {
        ITH_ASSERT(!r && err.text[0]);
    }
    unlink(path);
    return 0;
}
