/* replay_main.c - runs one fuzz target over files, without a fuzzer.
 *
 * Arguments: files and directories (not searched deeper). Up to 256 prefixes of each are run as
 * well: a truncated input is the commonest damage. Each input lies in its own block, so that
 * AddressSanitizer sees a read past its end. A crash names its input: it is printed first. */
#include "base/file.h"

#include <stdio.h>
#include <string.h>

#define MAX_PREFIXES 256

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int64_t num_inputs;

static ith_status run_bytes(const char *data, int64_t len, ith_error *err)
{
    uint8_t *block = NULL;
    ITH_TRY(ith_alloc((void **)&block, len, "input", err));
    if (len)
        memcpy(block, data, (size_t)len);
    LLVMFuzzerTestOneInput(block, (size_t)len);
    num_inputs++;
    ith_free(block);
    return ITH_OK;
}

static ith_status run_file(const char *path, ith_error *err)
{
    ith_buf text = {0};
    printf("%s\n", path);
    fflush(stdout);
    ith_status status = ith_read_file(path, 0, &text, err);
    int64_t step = text.len / MAX_PREFIXES + 1;
    for (int64_t len = 0; len < text.len && status == ITH_OK; len += step)
        status = run_bytes(text.data, len, err);
    if (status == ITH_OK)
        status = run_bytes(text.data, text.len, err);
    ith_buf_deinit(&text);
    return status;
}

static ith_status run_directory(const char *dir, ith_error *err)
{
    ith_names names;
    ith_buf path = {0};
    ITH_TRY(ith_list_dir(dir, &names, err));
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < names.count && status == ITH_OK; i++) {
        ith_path_join(&path, dir, names.names[i]);
        status = ith_buf_check(&path, dir, err);
        if (status == ITH_OK && !ith_path_is_dir(path.data))
            status = run_file(path.data, err);
    }
    ith_buf_deinit(&path);
    ith_names_free(&names);
    return status;
}

int main(int argc, char **argv)
{
    ith_error err = {0};
    for (int i = 1; i < argc; i++) {
        ith_status status =
            ith_path_is_dir(argv[i]) ? run_directory(argv[i], &err) : run_file(argv[i], &err);
        if (status != ITH_OK) {
            fprintf(stderr, "error: %s\n", err.text);
            return 1;
        }
    }
    printf("%lld inputs\n", (long long)num_inputs);
    if (num_inputs == 0)
        fprintf(stderr, "error: no input: give files or a corpus directory\n");
    return num_inputs == 0;
}
