/* replay_main.c - runs one fuzz target over files, without a fuzzer.
 *
 * Arguments: files and directories (not searched deeper). Up to 256 prefixes of each are run as
 * well: a truncated input is the commonest damage. Each input lies in its own block, so that
 * AddressSanitizer sees a read past its end. A crash names its input: it is printed first.
 *
 * A file NAME.pack holds many inputs, each behind its length (4 bytes, little-endian), that are run
 * as they are:
 *     replay_NAME --pack FILE.pack DIR      writes the files of DIR into one, in order of names
 *     replay_NAME --unpack FILE.pack DIR    writes each into DIR again */
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

/* ---- packs ---- */

typedef ith_status on_input(void *arg, const char *data, int64_t len, int64_t index,
                            ith_error *err);

static ith_status read_pack(const char *path, on_input *visit, void *arg, ith_error *err)
{
    ith_buf text = {0};
    ith_status status = ith_read_file(path, 0, &text, err);
    for (int64_t at = 0, i = 0; at < text.len && status == ITH_OK; i++) {
        int64_t len = 0;
        for (int k = 3; k >= 0 && text.len - at >= 4; k--)
            len = len << 8 | (unsigned char)text.data[at + k];
        at += 4;
        if (len > text.len - at)
            status = ith_fail(err, ITH_ERR_FORMAT, "%s: input %lld is cut", path, (long long)i);
        else
            status = visit(arg, text.data + at, len, i, err);
        at += len;
    }
    ith_buf_deinit(&text);
    return status;
}

static ith_status run_packed(void *arg, const char *data, int64_t len, int64_t index,
                             ith_error *err)
{
    printf("%s: %lld\n", (const char *)arg, (long long)index);
    fflush(stdout);
    return run_bytes(data, len, err);
}

static ith_status unpack_input(void *arg, const char *data, int64_t len, int64_t index,
                               ith_error *err)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%05lld", (const char *)arg, (long long)index);
    return ith_write_file(path, data, len, err);
}

static ith_status pack_directory(const char *file, const char *dir, ith_error *err)
{
    ith_names names;
    ith_buf pack = {0}, path = {0}, text = {0};
    ITH_TRY(ith_list_dir(dir, &names, err));
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < names.count && status == ITH_OK; i++) {
        ith_path_join(&path, dir, names.names[i]);
        ith_buf_clear(&text);
        status = ith_buf_check(&path, dir, err);
        if (status == ITH_OK)
            status = ith_read_file(path.data, INT32_MAX, &text, err);
        for (int k = 0; k < 4; k++)
            ith_buf_putc(&pack, (char)(text.len >> 8 * k & 0xff));
        ith_buf_append(&pack, text.data, text.len);
    }
    if (status == ITH_OK)
        status = ith_buf_check(&pack, file, err);
    if (status == ITH_OK)
        status = ith_write_file(file, pack.data, pack.len, err);
    ith_buf_deinit(&pack);
    ith_buf_deinit(&path);
    ith_buf_deinit(&text);
    ith_names_free(&names);
    return status;
}

static bool is_pack(const char *path)
{
    size_t len = strlen(path);
    return len > 5 && strcmp(path + len - 5, ".pack") == 0;
}

/* ---- files ---- */

static ith_status run_file(char *path, ith_error *err)
{
    if (is_pack(path))
        return read_pack(path, run_packed, path, err);
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

/* Packs or unpacks; with no such wish *done stays false. */
static ith_status pack(int argc, char **argv, bool *done, ith_error *err)
{
    bool packs = argc == 4 && strcmp(argv[1], "--pack") == 0;
    *done = packs || (argc == 4 && strcmp(argv[1], "--unpack") == 0);
    if (packs)
        return pack_directory(argv[2], argv[3], err);
    return *done ? read_pack(argv[2], unpack_input, argv[3], err) : ITH_OK;
}

int main(int argc, char **argv)
{
    ith_error err = {0};
    bool done = false;
    if (pack(argc, argv, &done, &err) != ITH_OK) {
        fprintf(stderr, "error: %s\n", err.text);
        return 1;
    }
    if (done)
        return 0;
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
