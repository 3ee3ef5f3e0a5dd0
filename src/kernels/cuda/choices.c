/* choices.c - what was measured once on this machine, kept in a text file, so that a re-run makes
 * the same choices and its bits are the same.
 *
 * A line is "key = 8 words sum", words and sum in hexadecimal. The sum is over key and words: a
 * line that was cut or edited does not count. */
#include "kernels/cuda/cuda_internal.h"

#include "base/env.h"
#include "base/file.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE_BYTES (4 << 20)

struct ith_choices {
    ith_buf path, text;
};

/* ITH_CACHE, $XDG_CACHE_HOME/ithaca or ~/.cache/ithaca; empty: there is none. */
static void cache_dir(ith_buf *dir)
{
    const char *asked = ith_env(ITH_ENV_CACHE), *xdg = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (asked)
        ith_buf_puts(dir, strcmp(asked, "off") == 0 ? "" : asked);
    else if (xdg && xdg[0])
        ith_buf_printf(dir, "%s/ithaca", xdg);
    else if (home && home[0])
        ith_buf_printf(dir, "%s/.cache/ithaca", home);
}

/* The file as it is now; a missing one is empty. */
static ith_status read_text(ith_choices *c, ith_error *err)
{
    ith_buf_clear(&c->text);
    if (!ith_path_exists(c->path.data))
        return ITH_OK;
    return ith_read_file(c->path.data, MAX_FILE_BYTES, &c->text, err);
}

static ith_status open_in(ith_choices *c, const char *dir, const char *name, ith_error *err)
{
    ITH_TRY(ith_make_dirs(dir, err));
    ith_path_join(&c->path, dir, name);
    ITH_TRY(ith_buf_check(&c->path, "cache file name", err));
    return read_text(c, err);
}

ith_status ith_choices_open(ith_choices **out, const char *name, ith_error *err)
{
    void *memory = NULL;
    ith_buf dir = {0};
    ith_error local = {0};
    *out = NULL;
    cache_dir(&dir);
    ith_status status = ith_buf_check(&dir, "cache folder", err);
    if (status == ITH_OK)
        status = ith_alloc_zero(&memory, 1, (int64_t)sizeof(ith_choices), "kept choices", err);
    if (status != ITH_OK || dir.len == 0) {
        ith_buf_deinit(&dir);
        ith_free(memory);
        return status;
    }
    ith_choices *c = memory;
    if (open_in(c, dir.data, name, &local) != ITH_OK) {
        ith_log(ITH_LOG_WARN, "cuda", "matrix algorithms are not measured: %s", local.text);
        ith_choices_close(c);
        c = NULL;
    }
    ith_buf_deinit(&dir);
    *out = c;
    return ITH_OK;
}

void ith_choices_close(ith_choices *c)
{
    if (!c)
        return;
    ith_buf_deinit(&c->path);
    ith_buf_deinit(&c->text);
    ith_free(c);
}

static uint64_t sum_of(const char *key, size_t len, const uint64_t *value)
{
    uint64_t sum = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < len; i++)
        sum = (sum ^ (unsigned char)key[i]) * 1099511628211u;
    for (int i = 0; i < ITH_CHOICE_WORDS; i++)
        sum = (sum ^ value[i]) * 1099511628211u;
    return sum;
}

/* at: past "key = ". */
static bool parse_value(const char *at, const char *key, uint64_t value[ITH_CHOICE_WORDS])
{
    uint64_t words[ITH_CHOICE_WORDS + 1];
    for (int i = 0; i <= ITH_CHOICE_WORDS; i++) {
        char *end = NULL;
        words[i] = strtoull(at, &end, 16);
        if (end == at || *end != (i < ITH_CHOICE_WORDS ? ' ' : '\n'))
            return false;
        at = end + 1;
    }
    if (words[ITH_CHOICE_WORDS] != sum_of(key, strlen(key), words))
        return false;
    memcpy(value, words, ITH_CHOICE_WORDS * sizeof *value);
    return true;
}

bool ith_choices_find(const ith_choices *c, const char *key, uint64_t value[ITH_CHOICE_WORDS])
{
    size_t len = strlen(key);
    const char *line = c->text.len > 0 ? c->text.data : NULL;
    for (; line && *line; line = strchr(line, '\n'), line += line != NULL)
        if (strncmp(line, key, len) == 0 && strncmp(line + len, " = ", 3) == 0 &&
            parse_value(line + len + 3, key, value))
            return true;
    return false;
}

ith_status ith_choices_keep(ith_choices *c, const char *key, const uint64_t value[ITH_CHOICE_WORDS],
                            ith_error *err)
{
    ITH_TRY(read_text(c, err)); /* another process may have added to it */
    if (c->text.len > 0 && c->text.data[c->text.len - 1] != '\n')
        ith_buf_putc(&c->text, '\n'); /* cut short: that line does not count */
    ith_buf_printf(&c->text, "%s = ", key);
    for (int i = 0; i < ITH_CHOICE_WORDS; i++)
        ith_buf_printf(&c->text, "%" PRIx64 " ", value[i]);
    ith_buf_printf(&c->text, "%" PRIx64 "\n", sum_of(key, strlen(key), value));
    ITH_TRY(ith_buf_check(&c->text, "kept choices", err));
    return ith_write_file(c->path.data, c->text.data, c->text.len, err);
}
