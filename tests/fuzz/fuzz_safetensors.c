/* links: ith_checkpoint */
/* Weight files: whatever the bytes are, opening fails with one line of text or every entry can be
 * read and looked up. Bytes that begin as JSON are the index of a directory with two shards. The
 * files lie in the working directory. */
#include "checkpoint/safetensors.h"

#include "base/file.h"

#include <stdio.h>
#include <stdlib.h>
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

/* Not synced: a fuzzer runs thousands a second. */
static void write_bytes(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    ITH_ASSERT(file && fwrite(data, 1, size, file) == size);
    ITH_ASSERT(fclose(file) == 0);
}

#define SHARD(name) "{\"" name "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}"

/* Tensors a and b, in a.safetensors and b.safetensors: made once. */
static void write_shards(const char *dir)
{
    static const char *const headers[] = {SHARD("a"), SHARD("b")};
    for (int i = 0; i < 2; i++) {
        unsigned char file[128] = {(unsigned char)strlen(headers[i])};
        char path[128];
        memcpy(file + 8, headers[i], strlen(headers[i]));
        snprintf(path, sizeof path, "%s/%c.safetensors", dir, 'a' + i);
        write_bytes(path, file, 8 + strlen(headers[i]) + 4);
    }
}

static char dir[64], path[128], index_path[128];

static void remove_files(void)
{
    ith_remove_tree(dir, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "fuzz-%ld", (long)getpid());
        snprintf(path, sizeof path, "%s/one.safetensors", dir);
        snprintf(index_path, sizeof index_path, "%s/model.safetensors.index.json", dir);
        ITH_ASSERT(ith_make_dirs(dir, NULL) == ITH_OK);
        atexit(remove_files);
        write_shards(dir);
    }
    bool is_index = size > 1 && data[0] == '{' && data[1] != 0;
    const char *chosen = is_index ? index_path : path;
    write_bytes(chosen, data, size);
    ith_st_reader *r = NULL;
    ith_error err = {0};
    if (ith_st_open(&r, chosen, &err) == ITH_OK) {
        read_everything(r);
        ith_st_close(r);
    } else {
        ITH_ASSERT(!r && err.text[0]);
    }
    return 0;
}
