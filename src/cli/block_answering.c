/* block_answering.c - settings of the block decoder, and its drawing. */
#include "cli/block_answering.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/utf8.h"
#include "cli/terminal.h"
#include "model/llada2.h"

#define MASK_MARK "\033[2m_\033[0m"

ith_status ith_block_settings(const ith_answering *a, const ith_args *args, ith_block_how *how,
                              ith_error *err)
{
    static const char *const unused[] = {"top-k", "top-p", "min-p", "repetition-penalty"};
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++)
        if (ith_args_given(args, unused[i]))
            return ith_fail(err, ITH_ERR_USAGE,
                            "--%s does not work with %s (temperature, threshold and steps do)",
                            unused[i], a->hf.model_type);
    int64_t block = ith_args_int(args, "block-size"),
            mask = ith_llada2_mask_id(&a->hf, a->tokenizer);
    if (ith_args_given(args, "mask-id"))
        mask = ith_args_int(args, "mask-id");
    if (mask < 0 || mask >= a->hf.vocab_size)
        return ith_fail(err, ITH_ERR_USAGE, "the model names no mask token (give --mask-id)");
    *how = (ith_block_how){.block = block,
                           .steps =
                               ith_args_given(args, "steps") ? ith_args_int(args, "steps") : block,
                           .minimal_topk = ith_args_int(args, "minimal-topk"),
                           .threshold = ith_args_float(args, "threshold"),
                           .edit = ith_args_given(args, "edit-threshold"),
                           .edit_threshold = ith_args_float(args, "edit-threshold"),
                           .max_post_steps = ith_args_int(args, "max-post-steps"),
                           .max_new = a->max_new,
                           .mask_id = (int32_t)mask,
                           .stop_ids = a->stop_ids,
                           .num_stop_ids = a->num_stop_ids,
                           .early_stop = ith_args_flag(args, "early-stop"),
                           .temperature = a->sampling.do_sample ? a->sampling.temperature : 0,
                           .seed = a->sampling.seed};
    return ITH_OK;
}

ith_status ith_block_options_refuse(const ith_answering *a, const ith_args *args, ith_error *err)
{
    static const ith_option options[] = {ITH_BLOCK_OPTIONS};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (ith_args_given(args, options[i].name))
            return ith_fail(err, ITH_ERR_USAGE,
                            "--%s is for diffusion models, %s writes one token a step",
                            options[i].name, a->hf.model_type);
    return ITH_OK;
}

/* ---- drawing ---- */

/* Columns of a character: two of the wide blocks of East Asia and of emoji. */
static int width_of(uint32_t c)
{
    if (c < ' ' || (c >= 0x300 && c < 0x370) || c == 0x200d || (c >= 0xfe00 && c < 0xfe10))
        return 0;
    return (c >= 0x1100 && c < 0x1160) || (c >= 0x2e80 && c < 0xa4d0) ||
                   (c >= 0xac00 && c < 0xd7a4) || (c >= 0xf900 && c < 0xfb00) ||
                   (c >= 0xff00 && c < 0xff61) || (c >= 0x1f300 && c < 0x1fb00)
               ? 2
               : 1;
}

int ith_terminal_advance(const char *text, int64_t len, int width, int *column)
{
    int rows = 0;
    for (const char *p = text, *end = text + len; p < end;) {
        uint32_t c = 0;
        int n = ith_utf8_decode(p, end, &c), wide = n ? width_of(c) : 1;
        if (c == '\033') { /* a colour: no column */
            while (p < end && *p != 'm')
                p++;
            n = 1;
        } else if (c == '\n') {
            rows++;
            *column = 0;
        } else if (*column + wide > width) {
            rows++;
            *column = wide;
        } else {
            *column += wide;
        }
        p += n ? n : 1;
    }
    return rows;
}

/* Back to where the running block begins; what was drawn goes. */
static void erase(ith_block_view *v)
{
    fputc('\r', stdout);
    if (v->rows)
        printf("\033[%dA", v->rows);
    if (v->column)
        printf("\033[%dC", v->column);
    fputs("\033[J", stdout);
    v->rows = 0;
}

/* Prints text that begins in *column; rows and column after it. */
static int print_drawn(ith_block_view *v, const ith_buf *text, int *column)
{
    if (v->status == ITH_OK)
        v->status = ith_buf_check(text, "answer", &v->err);
    if (v->status != ITH_OK || text->len == 0)
        return 0;
    fwrite(text->data, 1, (size_t)text->len, stdout);
    return ith_terminal_advance(text->data, text->len, v->width, column);
}

static bool is_stop(const ith_answering *a, int32_t id)
{
    for (int i = 0; i < a->num_stop_ids; i++)
        if (a->stop_ids[i] == id)
            return true;
    return false;
}

/* Tokens up to `end`, or the first stop id, stay. */
static void settle(ith_block_view *v, int64_t end)
{
    ith_buf text = {0};
    erase(v);
    for (; v->settled < end && v->status == ITH_OK; v->settled++) {
        int32_t id = v->answer->row.ids[v->settled];
        if (is_stop(v->a, id))
            break;
        v->status = ith_token_stream_push(&v->stream, id, &text, &v->err);
    }
    (void)print_drawn(v, &text, &v->column);
    ith_buf_deinit(&text);
}

static void draw(ith_block_view *v)
{
    const int32_t *ids = v->answer->row.ids;
    ith_buf text = {0};
    int64_t end = v->begin + v->block;
    for (int64_t p = v->settled; p < end && v->status == ITH_OK;) {
        int64_t q = p;
        while (q < end && ids[q] != v->mask_id && !is_stop(v->a, ids[q]))
            q++;
        v->status = ith_tokenizer_decode(v->a->tokenizer, ids + p, q - p, true, &text, &v->err);
        if (q < end && ids[q] != v->mask_id)
            break; /* the end */
        if (q < end)
            ith_buf_puts(&text, MASK_MARK);
        p = q + 1;
    }
    erase(v);
    int column = v->column;
    v->rows = print_drawn(v, &text, &column);
    fflush(stdout);
    ith_buf_deinit(&text);
}

static void on_written(void *arg, int64_t i, int64_t position, int32_t id, double confidence,
                       int64_t step)
{
    ith_block_view *v = arg;
    (void)i, (void)id, (void)confidence, (void)step;
    if (v->begin < 0)
        v->settled = v->answer->prompt;
    else if (position >= v->begin + v->block)
        settle(v, v->begin + v->block);
    v->begin = position / v->block * v->block;
    draw(v);
}

void ith_block_view_begin(ith_block_view *v, const ith_answering *a, ith_block_how *how,
                          const ith_block_answer *answer)
{
    *v = (ith_block_view){.a = a,
                          .answer = answer,
                          .block = how->block,
                          .mask_id = how->mask_id,
                          .width = ith_terminal_columns(STDOUT_FILENO, 80),
                          .begin = -1};
    ith_token_stream_init(&v->stream, a->tokenizer, true);
    how->written = on_written;
    how->arg = v;
}

ith_status ith_block_view_end(ith_block_view *v, ith_error *err)
{
    ith_buf text = {0};
    if (v->status == ITH_OK)
        settle(v, v->answer->end);
    if (v->status == ITH_OK)
        v->status = ith_token_stream_flush(&v->stream, &text, &v->err);
    fwrite(text.data ? text.data : "", 1, (size_t)text.len, stdout);
    ith_buf_deinit(&text);
    return v->status == ITH_OK ? ITH_OK : ith_fail(err, v->status, "%s", v->err.text);
}
