/* links: ith_tokenizer */
/* fuzz_tokenizer.c - hostile files of a tokenizer, then a hostile text.
 *
 * Input: parts between NUL bytes. Two: a tokenizer.json and a text. Three or four: a vocab.json, a
 * text, a merges.txt, and a tokenizer_config.json. One: it is tokenizer.json and text. What opens
 * must encode any valid text, offsets must lie in the text, and decoding must end. A small
 * vocabulary learned once encodes every text as well. */
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

/* Not ith_write_file: its sync would take most of the time. A part that is absent has no file. */
static void write_part(const char *name, const char *text, int64_t len)
{
    ith_buf path = {0};
    ith_path_join(&path, dir, name);
    unlink(path.data);
    if (text) {
        FILE *f = fopen(path.data, "wb");
        ITH_ASSERT(f && fwrite(text, 1, (size_t)len, f) == (size_t)len && fclose(f) == 0);
    }
    ith_buf_deinit(&path);
}

enum { FILE_PART, TEXT_PART, MERGES_PART, CONFIG_PART, NUM_PARTS };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0 || !prepare())
        return 0;
    const char *parts[NUM_PARTS] = {(const char *)data}, *end = (const char *)data + size;
    int64_t lens[NUM_PARTS] = {0};
    for (int i = 0; i < NUM_PARTS && parts[i]; i++) {
        const char *nul = i + 1 < NUM_PARTS ? memchr(parts[i], 0, (size_t)(end - parts[i])) : NULL;
        lens[i] = (nul ? nul : end) - parts[i];
        if (nul)
            parts[i + 1] = nul + 1;
    }
    int text_part = parts[TEXT_PART] ? TEXT_PART : FILE_PART;
    use(small, parts[text_part], lens[text_part]);
    if (lens[FILE_PART] == 0)
        return 0;
    bool pair = parts[MERGES_PART] != NULL;
    write_part("tokenizer.json", pair ? NULL : parts[FILE_PART], lens[FILE_PART]);
    write_part("vocab.json", pair ? parts[FILE_PART] : NULL, lens[FILE_PART]);
    write_part("merges.txt", parts[MERGES_PART], lens[MERGES_PART]);
    write_part("tokenizer_config.json", parts[CONFIG_PART], lens[CONFIG_PART]);
    ith_tokenizer *t = NULL;
    ith_error err = {0};
    if (ith_tokenizer_open(&t, dir, &err) == ITH_OK) {
        use(t, parts[text_part], lens[text_part]);
        ith_tokenizer_close(t);
    } else {
        ITH_ASSERT(err.text[0]);
    }
    return 0;
}
