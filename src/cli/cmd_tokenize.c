/* cmd_tokenize.c - `ithaca tokenize`: text to ids and back. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/model_dir.h"
#include "cli/commands.h"
#include "tokenizer/tokenizer.h"

/* Numbers between blanks, commas and brackets. */
static ith_status parse_ids(const char *text, const ith_tokenizer *t, ith_ids *out, ith_error *err)
{
    for (const char *p = text; *p;) {
        if (strchr(" ,[]\t\r\n", *p)) {
            p++;
            continue;
        }
        if (*p < '0' || *p > '9')
            return ith_fail(err, ITH_ERR_USAGE, "tokenize: found '%.*s', expected token ids",
                            (int)strcspn(p, " ,[]\t\r\n"), p);
        char *end = NULL;
        errno = 0;
        long long id = strtoll(p, &end, 10);
        if (errno || id >= ith_tokenizer_size(t))
            return ith_fail(err, ITH_ERR_USAGE, "tokenize: id %.*s is not below %lld",
                            (int)(end - p), p, (long long)ith_tokenizer_size(t));
        void *grown = out->ids;
        ITH_TRY(ith_grow(&grown, &out->cap, out->count + 1, 4, "ids", err));
        out->ids = grown;
        out->ids[out->count++] = (int32_t)id;
        p = end;
    }
    return ITH_OK;
}

/* One line per token: id, bytes as text with escapes, and whether it is special. */
static ith_status show(const ith_tokenizer *t, const ith_ids *ids, bool as_table, ith_buf *out,
                       ith_error *err)
{
    for (int64_t i = 0; i < ids->count; i++) {
        const char *bytes = NULL;
        int64_t len = 0;
        bool added = false, special = false;
        if (!as_table) {
            ith_buf_printf(out, "%s%d", i ? " " : "", (int)ids->ids[i]);
            continue;
        }
        ITH_TRY(ith_tokenizer_token(t, ids->ids[i], &bytes, &len, &added, &special));
        ith_buf_printf(out, "%8d  \"", (int)ids->ids[i]);
        for (int64_t k = 0; k < len; k++) {
            unsigned char c = (unsigned char)bytes[k];
            if (c < 0x20 || c == '"' || c == '\\' || c >= 0x7f)
                ith_buf_printf(out, "\\x%02x", c);
            else
                ith_buf_putc(out, (char)c);
        }
        ith_buf_printf(out, "\"%s\n", special ? "  special" : (added ? "  added" : ""));
    }
    if (!as_table)
        ith_buf_putc(out, '\n');
    return ith_buf_check(out, "ids", err);
}

static ith_status tokenize(const ith_args *args, const ith_tokenizer *t, ith_error *err)
{
    ith_buf text = {0}, out = {0};
    ith_ids ids = {0};
    ith_status status = ITH_OK;
    if (args->num_positional > 1)
        ith_buf_puts(&text, args->positional[1]);
    else
        status = ith_read_stdin(&text, err);
    if (status == ITH_OK && ith_args_flag(args, "decode")) {
        status = parse_ids(text.data ? text.data : "", t, &ids, err);
        if (status == ITH_OK)
            status = ith_tokenizer_decode(t, ids.ids, ids.count,
                                          ith_args_flag(args, "skip-special"), &out, err);
        ith_buf_putc(&out, '\n');
    } else if (status == ITH_OK) {
        status = ith_tokenizer_encode(t, text.data ? text.data : "", text.len, &ids, err);
        if (status == ITH_OK && ith_args_flag(args, "count"))
            ith_buf_printf(&out, "%lld\n", (long long)ids.count);
        else if (status == ITH_OK)
            status = show(t, &ids, ith_args_flag(args, "table"), &out, err);
    }
    if (status == ITH_OK)
        status = ith_print(&out, err);
    ith_ids_free(&ids);
    ith_buf_deinit(&text);
    ith_buf_deinit(&out);
    return status;
}

static ith_status run_tokenize(const ith_args *args, ith_error *err)
{
    ith_tokenizer *t = NULL;
    ITH_TRY(ith_model_dir_check(args->positional[0], ITH_DIR_TOKENIZER, err));
    ITH_TRY(ith_tokenizer_open(&t, args->positional[0], err));
    ith_status status = tokenize(args, t, err);
    ith_tokenizer_close(t);
    return status;
}

static const ith_option options[] = {
    {.name = "decode",
     .letter = 'd',
     .type = ITH_OPTION_FLAG,
     .help = "TEXT holds ids; print the text they spell."},
    {.name = "skip-special",
     .type = ITH_OPTION_FLAG,
     .help = "With --decode: leave out special tokens."},
    {.name = "table",
     .letter = 't',
     .type = ITH_OPTION_FLAG,
     .help = "One line per token with its bytes."},
    {.name = "count", .letter = 'c', .type = ITH_OPTION_FLAG, .help = "Only the number of tokens."},
    {.name = NULL}};

const ith_command ith_cmd_tokenize = {.name = "tokenize",
                                      .arguments = "MODEL [TEXT]",
                                      .summary = "Turn text into token ids, or back",
                                      .details = "Without TEXT, stdin is read.\n",
                                      .options = options,
                                      .min_positional = 1,
                                      .max_positional = 2,
                                      .run = run_tokenize};
