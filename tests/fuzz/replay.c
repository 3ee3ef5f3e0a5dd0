/* replay.c - runs a fuzz target over the files of a corpus, without a fuzzer: part of make check.
 */
#include "base/file.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static ith_status replay(const char *dir, const char *name, ith_error *err)
{
    ith_buf path = {0}, text = {0};
    ith_path_join(&path, dir, name);
    ith_status status = ith_buf_check(&path, dir, err);
    if (status == ITH_OK)
        status = ith_read_file(path.data, 0, &text, err);
    if (status == ITH_OK) {
        /* A copy of the exact size, so that a sanitizer sees a read past the end. */
        uint8_t *exact = ith_malloc(text.len);
        for (int64_t i = 0; exact && i < text.len; i++)
            exact[i] = (uint8_t)text.data[i];
        if (exact)
            LLVMFuzzerTestOneInput(exact, (size_t)text.len);
        ith_free(exact);
    }
    ith_buf_deinit(&path);
    ith_buf_deinit(&text);
    return status;
}

int main(int argc, char **argv)
{
    int64_t count = 0;
    ith_error err = {0};
    for (int i = 1; i < argc; i++) {
        ith_names names;
        ith_status status = ith_list_dir(argv[i], &names, &err);
        for (int64_t k = 0; status == ITH_OK && k < names.count; k++, count++)
            status = replay(argv[i], names.names[k], &err);
        if (status != ITH_OK) {
            fprintf(stderr, "error: %s\n", err.text);
            return 1;
        }
        ith_names_free(&names);
    }
    printf("%lld inputs\n", (long long)count);
    return count > 0 ? 0 : 1;
}
