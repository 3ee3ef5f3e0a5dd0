/* links: ith_tokenizer */
/* fuzz_tokenizer.c - a hostile tokenizer.json, then a hostile text.
 *
 * Input: a tokenizer.json, a NUL byte, and a text. What opens must encode any valid text, offsets
 * must lie in the text, and decoding must end. Without a NUL the input is both. A small vocabulary
 * learned once encodes every text as well. */
#include "base/file.h"
#include "tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char dir[256];
static ith_tokenizer *small;

static void remove_dir(void)
{
    ith_tokenizer_close(small);
    ith_remove_tree(dir, NULL);
}

static bool prepare(void)
{
    if (dir[0])
        return small != NULL;
    const char *base = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/fuzz-tokenizer-%ld", base ? base : "/tmp", (long)getpid());
    static const char text[] = "the thin thing then that this the then 12 12 aaaa aaaa";
    static const char *const special[] = {"<|end|>", "<t>"};
    if (ith_bpe_train(text, (int64_t)sizeof text - 1, 280, special, 2, dir, NULL) != ITH_OK ||
        ith_tokenizer_open(&small, dir, NULL) != ITH_OK)
        return false;
    atexit(remove_dir);
    return true;
}

static void use(const ith_tokenizer *t, const char *text, int64_t len)
{
    ith_error err = {0};
    ith_ids ids = {0}, begins = {0}, ends = {0};
    ith_buf out = {0};
    if (ith_tokenizer_encode_offsets(t, text, len, &ids, &begins, &ends, &err) == ITH_OK) {
        ITH_ASSERT(ids.count == begins.count && ids.count == ends.count);
        for (int64_t i = 0; i < ids.count; i++)
            ITH_ASSERT(begins.ids[i] >= 0 && begins.ids[i] < ends.ids[i] && ends.ids[i] <= len &&
                       ids.ids[i] >= 0 && ids.ids[i] < ith_tokenizer_size(t));
        ITH_ASSERT(ith_tokenizer_decode(t, ids.ids, ids.count, false, &out, &err) == ITH_OK);
    } else {
        ITH_ASSERT(ids.count == 0 && err.text[0]);
    }
    ith_ids_free(&ids);
    ith_ids_free(&begins);
    ith_ids_free(&ends);
    ith_buf_deinit(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!prepare())
        return 0;
    const char *file = (const char *)data;
    const char *nul = size ? memchr(file, 0, size) : NULL;
    int64_t file_len = nul ? nul - file : (int64_t)size;
    const char *text = nul ? nul + 1 : file;
    int64_t text_len = nul ? (int64_t)size - file_len - 1 : (int64_t)size;
    use(small, text, text_len);
    if (file_len == 0)
        return 0;
    ith_buf path = {0};
    ith_error err = {0};
    ith_path_join(&path, dir, "tokenizer.json");
    FILE *f = fopen(path.data, "wb"); /* not ith_write_file: its sync would take most of the time */
    ITH_ASSERT(f && fwrite(file, 1, (size_t)file_len, f) == (size_t)file_len && fclose(f) == 0);
    ith_buf_deinit(&path);
    ith_path_join(&path, dir, "tokenizer_config.json");
    ith_remove_tree(path.data, NULL);
    ith_buf_deinit(&path);
    ith_tokenizer *t = NULL;
    if (ith_tokenizer_open(&t, dir, &err) == ITH_OK) {
        use(t, text, text_len);
        ith_tokenizer_close(t);
    } else {
        ITH_ASSERT(err.text[0]);
    }
    return 0;
}
