/* cmd_generate.c - `ithaca generate`: answers to one prompt or to a file of prompts.
 *
 * Rows of a .jsonl file: {"messages": [...]} (and "tools"), or {"prompt": "..."}; lines of any
 * other file: one prompt each. Messages that end with the assistant's are a row of training data:
 * that answer is not shown to the model, but given back as "expected". One JSON object per row goes
 * to stdout in the order of the file: {"row", "answer", "tokens", "finish_reason"}. */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "cli/block_answering.h"
#include "cli/commands.h"
#include "cli/terminal.h"

#define ANSWER_TIMEOUT_S 18000 /* of a rank that does not end its round */

typedef struct {
    ith_ids *prompts;
    ith_media_list *media; /* beside each prompt */
    int64_t count, cap, cap_media, longest;
    const char *path; /* of the file of prompts, or NULL */
    const char **images, **videos;
    json_t *expected; /* per prompt: the text that its row has as answer, or null */
} prompt_list;

/* Where rows go: to stdout, of many ranks by rank 0, round by round in the order of the file.
 * Groups of cp_size ranks answer together; the first rank of each has the rows. */
typedef struct {
    ith_comm *world;
    int64_t cp_size, groups, group;
    ith_buf rows, record; /* of the running batch */
    ith_writer *file;     /* of --record, on rank 0; or NULL */
    bool records;
} row_output;

/* Answers of the running batch. */
typedef struct {
    const ith_answering *a;
    ith_ids *answers;
    bool *stopped;
    bool live; /* one prompt given on the command line: text appears as it comes */
    row_output *out;
    ith_token_stream stream;
    ith_buf text;
    ith_error *err;
    ith_status status;
    int64_t total;
} collector;

/* Takes media. expected: the answer in the data, or NULL. */
static ith_status add_prompt(prompt_list *l, const ith_answering *a, json_t *messages,
                             const json_t *tools, ith_media_list *media, const json_t *expected,
                             ith_error *err)
{
    json_t *text = json_is_string(expected) ? json_deep_copy(expected) : json_null();
    if (!text || json_array_append_new(l->expected, text) != 0)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for prompts");
    ITH_TRY(
        ith_grow((void **)&l->prompts, &l->cap, l->count + 1, sizeof *l->prompts, "prompts", err));
    ITH_TRY(ith_grow((void **)&l->media, &l->cap_media, l->count + 1, sizeof *l->media, "prompts",
                     err));
    l->prompts[l->count] = (ith_ids){0};
    ITH_TRY(ith_prompt_ids(a, messages, tools, &l->prompts[l->count], err));
    l->media[l->count] = *media;
    *media = (ith_media_list){0};
    l->longest = l->prompts[l->count].count > l->longest ? l->prompts[l->count].count : l->longest;
    l->count++;
    return ITH_OK;
}

static ith_status add_text(prompt_list *l, const ith_answering *a, const char *text, int64_t len,
                           ith_error *err)
{
    json_t *messages = json_array();
    ith_media_list media = {0};
    ith_status status = ITH_OK;
    if (a->system)
        status = ith_add_message(messages, "system", a->system, (int64_t)strlen(a->system), err);
    if (status == ITH_OK)
        status = ith_add_media_message(a, messages, text, len, l->images, l->videos, &media, err);
    if (status == ITH_OK)
        status = add_prompt(l, a, messages, NULL, &media, NULL, err);
    ith_media_list_deinit(&media);
    json_decref(messages);
    return status;
}

static bool has_media(const json_t *row)
{
    const json_t *messages = json_object_get(row, "messages");
    if (json_object_get(row, "images") || json_object_get(row, "videos"))
        return true;
    for (size_t i = 0; i < json_array_size(messages); i++)
        if (json_is_array(json_object_get(json_array_get(messages, i), "content")))
            return true;
    return false;
}

/* A row with content lists or columns of files: as in training data. */
static ith_status add_media_row(prompt_list *l, const ith_answering *a, const json_t *row,
                                const json_t *expected, ith_error *err)
{
    ith_converted c;
    ith_media_list media = {0};
    ITH_TRY(ith_convert_row(ITH_CONVERTER_CANONICAL, row, NULL, &c, err));
    ith_status status = ITH_OK;
    if (c.drop != ITH_DROP_NONE || !c.messages)
        status = ith_fail(err, ITH_ERR_FORMAT, "%s", c.detail);
    else if (c.has_media && !a->media)
        status = ith_fail(err, ITH_ERR_FORMAT, "%s reads text only", a->hf.model_type);
    else if (c.has_media)
        status = ith_media_prepare(a->media, c.messages, l->path, &media, err);
    if (status == ITH_OK)
        status = add_prompt(l, a, c.messages, c.tools, &media, expected, err);
    ith_media_list_deinit(&media);
    ith_converted_deinit(&c);
    return status;
}

/* The last message, taken out, when the assistant says it; else NULL. */
static json_t *take_answer(json_t *messages)
{
    size_t n = json_array_size(messages);
    json_t *last = json_array_get(messages, n ? n - 1 : 0);
    const char *role = json_string_value(json_object_get(last, "role"));
    if (!role || strcmp(role, "assistant") != 0 || n < 2)
        return NULL;
    json_incref(last);
    json_array_remove(messages, n - 1);
    return last;
}

static ith_status add_json_row(prompt_list *l, const ith_answering *a, const char *line,
                               int64_t len, ith_error *err)
{
    json_t *row = NULL;
    ITH_TRY(ith_json_parse(&row, line, len, "row", err));
    json_t *messages = json_object_get(row, "messages"), *prompt = json_object_get(row, "prompt");
    ith_media_list none = {0};
    ith_status status;
    if (json_is_array(messages)) {
        json_t *answer = take_answer(messages), *expected = json_object_get(answer, "content");
        if (has_media(row))
            status = add_media_row(l, a, row, expected, err);
        else
            status =
                add_prompt(l, a, messages, json_object_get(row, "tools"), &none, expected, err);
        json_decref(answer);
    } else if (json_is_string(prompt))
        status =
            add_text(l, a, json_string_value(prompt), (int64_t)json_string_length(prompt), err);
    else
        status = ith_fail(err, ITH_ERR_FORMAT,
                          "neither \"messages\" (an array) nor \"prompt\" (a text) is here");
    json_decref(row);
    return status;
}

static ith_status read_prompts(prompt_list *l, const ith_answering *a, const char *path,
                               ith_error *err)
{
    ith_map map;
    ITH_TRY(ith_map_open(&map, path, err));
    l->path = path;
    size_t name = strlen(path);
    bool json = name > 6 && strcmp(path + name - 6, ".jsonl") == 0;
    ith_status status = ITH_OK;
    int64_t number = 1;
    for (const char *p = map.data, *end = map.data + map.size; p < end && status == ITH_OK;
         number++) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        int64_t len = (nl ? nl : end) - p, text = len > 0 && p[len - 1] == '\r' ? len - 1 : len;
        if (text > 0)
            status = json ? add_json_row(l, a, p, text, err) : add_text(l, a, p, text, err);
        p += len + (nl != NULL);
    }
    ith_map_close(&map);
    return status == ITH_OK ? ITH_OK
                            : ith_wrap(err, status, "%s: line %lld", path, (long long)number - 1);
}

/* ---- rounds: every rank answers a batch, rank 0 gives what all of them wrote ---- */

/* The texts of all ranks, in their order, on rank 0. Collective. */
static ith_status gather_text(ith_comm *world, ith_buf *text, ith_error *err)
{
    int64_t *lists = NULL, n = world->size, total = 0;
    ith_buf all = {0};
    ith_status status = ith_alloc_zero((void **)&lists, 5 * n, sizeof *lists, "answers", err);
    ITH_TRY_OUT(ith_comm_agree(world, status, err));
    int64_t *bytes = lists + 4 * n;
    ITH_TRY_OUT(ith_comm_all_gather(world, bytes, &text->len, sizeof *bytes, err));
    for (int64_t r = 0; r < n; r++) {
        lists[n + r] = r == 0 ? text->len : 0; /* sent */
        lists[2 * n + r] = total;
        lists[3 * n + r] = world->rank == 0 ? bytes[r] : 0;
        total += bytes[r];
    }
    for (int64_t at = 0; world->rank == 0 && at < total; at++)
        ith_buf_putc(&all, ' ');
    ITH_TRY_OUT(ith_comm_agree(world, ith_buf_check(&all, "answers", err), err));
    ith_exchange x = {text->data, lists, lists + n, all.data, lists + 2 * n, lists + 3 * n};
    ITH_TRY_OUT(ith_comm_exchange(world, &x, err));
    ith_buf_clear(text);
    ith_buf_append(text, all.data, all.len);
    status = ith_comm_agree(world, ith_buf_check(text, "answers", err), err);
out:
    ith_buf_deinit(&all);
    ith_free(lists);
    return status;
}

static ith_status write_rows(row_output *o, ith_error *err)
{
    if (o->rows.len)
        ITH_TRY(ith_print(&o->rows, err));
    return o->file && o->record.len ? ith_writer_write(o->file, o->record.data, o->record.len, err)
                                    : ITH_OK;
}

/* After a batch; status: what came of it on this rank. */
static ith_status end_round(row_output *o, ith_status status, ith_error *err)
{
    ITH_TRY(ith_comm_agree(o->world, status, err));
    if (o->world->size > 1) {
        ITH_TRY(gather_text(o->world, &o->rows, err));
        if (o->records)
            ITH_TRY(gather_text(o->world, &o->record, err));
    }
    status = o->world->rank == 0 ? write_rows(o, err) : ITH_OK;
    ith_buf_clear(&o->rows);
    ith_buf_clear(&o->record);
    return ith_comm_agree(o->world, status, err);
}

/* Prompts of this group in the round that begins with prompt `first`. */
static int64_t share_of_round(const row_output *o, const prompt_list *l, int64_t first,
                              int64_t batch, int64_t *begin)
{
    *begin = ith_min_i64(first + o->group * batch, l->count);
    return ith_min_i64(batch, l->count - *begin);
}

/* What cannot be agreed, for the others are in the middle of a walk. */
static ith_status in_walk(row_output *o, bool exchange, ith_status status)
{
    o->world->broken |= exchange && status != ITH_OK;
    return status;
}

/* Prompts at a time on each group of ranks. */
static int64_t batch_of(const ith_args *args, const prompt_list *l, const row_output *o)
{
    return ith_min_i64(ith_args_int(args, "batch"), ith_div_ceil(l->count, o->groups));
}

static bool has_rows(const row_output *o)
{
    return o->world->rank % o->cp_size == 0;
}

static double seconds_since(const struct timespec *t0)
{
    struct timespec t1;
    clock_gettime(CLOCK_MONOTONIC, &t1);
    return (double)(t1.tv_sec - t0->tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0->tv_nsec);
}

static bool on_token(void *arg, int64_t i, int32_t id, bool is_stop)
{
    collector *c = arg;
    if (c->status != ITH_OK) /* of another sequence: it must not be forgotten */
        return false;
    c->total++;
    c->stopped[i] = is_stop;
    if (is_stop)
        return true;
    ith_ids *ids = &c->answers[i];
    void *grown = ids->ids;
    c->status = ith_grow(&grown, &ids->cap, ids->count + 1, 4, "answer", c->err);
    if (c->status != ITH_OK)
        return false;
    ids->ids = grown;
    ids->ids[ids->count++] = id;
    if (c->live) {
        ith_buf_clear(&c->text);
        c->status = ith_token_stream_push(&c->stream, id, &c->text, c->err);
        if (c->text.len)
            fwrite(c->text.data, 1, (size_t)c->text.len, stdout);
        fflush(stdout);
    }
    return c->status == ITH_OK;
}

/* False: out of memory. */
static bool add_expected(json_t *j, const json_t *expected)
{
    return j && (!json_is_string(expected) ||
                 json_object_set_new(j, "expected", json_deep_copy(expected)) == 0);
}

static ith_status put_answer(const collector *c, int64_t i, int64_t row, const json_t *expected,
                             ith_error *err)
{
    ith_buf text = {0}, line = {0};
    json_t *j = NULL;
    ith_status status = ith_tokenizer_decode(c->a->tokenizer, c->answers[i].ids,
                                             c->answers[i].count, true, &text, err);
    if (status == ITH_OK) {
        j = json_pack("{s:I, s:o, s:I, s:s}", "row", (json_int_t)row, "answer",
                      json_stringn(text.data ? text.data : "", (size_t)text.len), "tokens",
                      (json_int_t)c->answers[i].count, "finish_reason",
                      c->stopped[i] ? "stop" : "length");
        status = add_expected(j, expected)
                     ? ith_json_dump(j, true, &line, err)
                     : ith_fail(err, ITH_ERR_MEMORY, "out of memory for an answer");
    }
    if (status == ITH_OK) {
        ith_buf_putc(&line, '\n');
        ith_buf_append(&c->out->rows, line.data, line.len);
        status = ith_buf_check(&c->out->rows, "answers", err);
    }
    json_decref(j);
    ith_buf_deinit(&text);
    ith_buf_deinit(&line);
    return status;
}

/* The media of n prompts, one after the other; pixels and grids are the caller's to free. */
static ith_status batch_media(const ith_answering *a, const prompt_list *l, int64_t first,
                              int64_t n, ith_decoder_media *out, ith_error *err)
{
    ith_media_list all = {0};
    ith_status status = ITH_OK;
    float *pixels = NULL;
    ith_grid *grids = NULL;
    for (int64_t i = first; i < first + n; i++)
        ITH_TRY_OUT(ith_media_list_append(&all, &l->media[i], err));
    if (all.count)
        ITH_TRY_OUT(ith_load_media(a, &all, 0, all.count, &pixels, &grids, err));
    *out = (ith_decoder_media){pixels, grids, all.count};
out:
    ith_media_list_deinit(&all);
    return status;
}

/* Collective where the decoder's ranks exchange. */
static ith_status answer_batch(ith_decoder *d, collector *c, const ith_answering *a,
                               const prompt_list *l, int64_t first, int64_t n, ith_error *err)
{
    ith_decoder_media media = {0};
    bool exchange = d->ranks.exchange;
    ith_generate_options how = {a->sampling, a->stop_ids, a->num_stop_ids, a->max_new,
                                on_token,    c,           (uint64_t)first, &media};
    for (int64_t i = 0; i < n; i++) {
        c->answers[i].count = 0;
        c->stopped[i] = false;
    }
    ith_token_stream_init(&c->stream, a->tokenizer, true);
    ith_status status = batch_media(a, l, first, n, &media, err);
    ITH_TRY(exchange ? ith_comm_agree(c->out->world, status, err) : status);
    status = in_walk(c->out, exchange, ith_decoder_generate(d, l->prompts + first, n, &how, err));
    ith_free((void *)(uintptr_t)media.pixels);
    ith_free((void *)(uintptr_t)media.grids);
    ITH_TRY(status);
    ITH_TRY(c->status);
    if (c->live) {
        ith_buf_clear(&c->text);
        ITH_TRY(ith_token_stream_flush(&c->stream, &c->text, err));
        ith_buf_putc(&c->text, '\n');
        return ith_print(&c->text, err);
    }
    for (int64_t i = 0; i < n && has_rows(c->out); i++)
        ITH_TRY(
            put_answer(c, i, first + i + 1, json_array_get(l->expected, (size_t)(first + i)), err));
    return ITH_OK;
}

/* ---- diffusion models ---- */

/* A JSON row of an answer: for stdout, or for the record with ids and steps. Takes nothing. */
static ith_status put_block_answer(const ith_answering *a, const ith_block_answer *b, int64_t row,
                                   const json_t *expected, bool record, ith_buf *line,
                                   ith_error *err)
{
    ith_buf text = {0};
    int64_t n = b->end - b->prompt - b->stopped;
    ITH_TRY(ith_tokenizer_decode(a->tokenizer, b->row.ids + b->prompt, n, true, &text, err));
    json_t *j = json_pack("{s:I, s:o, s:I, s:I, s:s}", "row", (json_int_t)row, "answer",
                          json_stringn(text.data ? text.data : "", (size_t)text.len), "tokens",
                          (json_int_t)n, "forwards", (json_int_t)(b->steps + b->commits),
                          "finish_reason", b->stopped ? "stop" : "length");
    bool failed = !add_expected(j, expected);
    if (record) {
        json_t *ids = json_array(), *steps = json_array();
        for (int64_t p = 0; p < b->end; p++) {
            failed |= json_array_append_new(ids, json_integer(b->row.ids[p])) != 0;
            if (p >= b->prompt)
                failed |= json_array_append_new(steps, json_integer(b->revealed[p])) != 0;
        }
        failed |= json_object_set_new(j, "input_ids", ids) != 0;
        failed |= json_object_set_new(j, "prompt_lengths", json_integer(b->prompt)) != 0;
        failed |= json_object_set_new(j, "reveal_steps", steps) != 0;
    }
    ith_status status = failed ? ith_fail(err, ITH_ERR_MEMORY, "out of memory for an answer")
                               : ith_json_dump(j, true, line, err);
    ith_buf_putc(line, '\n');
    json_decref(j);
    ith_buf_deinit(&text);
    return status;
}

/* Where the answers of diffusion models go. */
typedef struct {
    bool live;  /* text of the only prompt; else a JSON row each */
    bool drawn; /* it stands on the terminal already */
    row_output *out;
    int64_t tokens, forwards;
} block_output;

static ith_status give_block_answer(const ith_answering *a, block_output *o,
                                    const ith_block_answer *b, int64_t row, const json_t *expected,
                                    int64_t block, ith_error *err)
{
    ith_buf *rows = &o->out->rows, line = {0};
    int64_t n = b->end - b->prompt - b->stopped;
    ith_status status = ITH_OK;
    o->tokens += n;
    o->forwards += b->steps + b->commits + (b->prompt >= block); /* its share of the prefill */
    if (!o->live)
        ITH_TRY_OUT(put_block_answer(a, b, row, expected, false, &line, err));
    else if (!o->drawn)
        ITH_TRY_OUT(
            ith_tokenizer_decode(a->tokenizer, b->row.ids + b->prompt, n, true, &line, err));
    if (o->live)
        ith_buf_putc(&line, '\n');
    ith_buf_append(rows, line.data, line.len);
    ITH_TRY_OUT(ith_buf_check(rows, "answers", err));
    if (!o->out->records)
        goto out;
    ith_buf_clear(&line);
    ITH_TRY_OUT(put_block_answer(a, b, row, expected, true, &line, err));
    ith_buf_append(&o->out->record, line.data, line.len);
    status = ith_buf_check(&o->out->record, "answers", err);
out:
    ith_buf_deinit(&line);
    return status;
}

static ith_status answer_block_batch(ith_block_decoder *d, const ith_answering *a,
                                     ith_block_how *how, const prompt_list *l, int64_t first,
                                     int64_t n, ith_block_answer *answers, block_output *o,
                                     ith_error *err)
{
    ith_block_view view;
    ITH_ASSERT(n == 0 || answers);
    how->first_stream = (uint64_t)first;
    if (o->drawn)
        ith_block_view_begin(&view, a, how, answers);
    ITH_TRY(in_walk(o->out, d->ranks.exchange,
                    ith_block_decoder_generate(d, l->prompts + first, n, how, answers, err)));
    ith_status status = o->drawn ? ith_block_view_end(&view, err) : ITH_OK;
    for (int64_t i = 0; i < n; i++) {
        if (status == ITH_OK && has_rows(o->out))
            status = give_block_answer(a, o, &answers[i], first + i + 1,
                                       json_array_get(l->expected, (size_t)(first + i)), how->block,
                                       err);
        ith_block_answer_deinit(&answers[i]);
    }
    return status;
}

static ith_status answer_blocks(const ith_answering *a, const ith_args *args, const prompt_list *l,
                                row_output *out, ith_error *err)
{
    ith_block_decoder d = {0};
    ith_block_how how;
    ith_block_answer *answers = NULL;
    ith_writer record = {.fd = -1};
    const char *record_path = ith_args_text(args, "record");
    bool live = ith_args_given(args, "prompt") && out->world->rank == 0;
    block_output o = {
        .live = live, .drawn = live && ith_terminal_colours(STDOUT_FILENO), .out = out};
    int64_t batch = batch_of(args, l, out);
    struct timespec t0;
    ith_status status = ith_block_settings(a, args, &how, err);
    if (status == ITH_OK)
        status = ith_alloc_zero((void **)&answers, batch, sizeof *answers, "answers", err);
    if (status == ITH_OK && record_path && out->world->rank == 0)
        status = ith_writer_open(&record, record_path, err);
    ITH_TRY_OUT(ith_comm_agree(out->world, status, err));
    out->records = record_path != NULL;
    out->file = record.fd >= 0 ? &record : NULL;
    ith_decoder_options options = ith_answering_decoder(
        a, args, batch, ith_block_row_len(l->longest, a->max_new, how.block), batch * l->longest);
    options.ranks = ith_answering_ranks(args, out->world, out->cp_size);
    ITH_TRY_OUT(ith_block_decoder_open(&d, args->positional[0], &options, how.block, err));
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (int64_t first = 0; first < l->count; first += batch * out->groups) {
        int64_t begin = 0, n = share_of_round(out, l, first, batch, &begin);
        status = answer_block_batch(&d, a, &how, l, begin, n, answers, &o, err);
        ITH_TRY_OUT(out->world->broken ? status : end_round(out, status, err));
    }
    if (out->file)
        ITH_TRY_OUT(ith_writer_commit(out->file, err));
    int64_t sums[2] = {o.tokens, o.forwards};
    ITH_TRY_OUT(ith_comm_all_reduce(out->world, sums, 2, ITH_I64, ITH_REDUCE_SUM, err));
    if (out->world->rank == 0)
        ith_log(ITH_LOG_INFO, "generate",
                "%lld prompt%s, %lld new tokens, %.2f tokens per forward, %.1f tok/s",
                (long long)l->count, l->count == 1 ? "" : "s", (long long)sums[0],
                (double)sums[0] / (double)ith_max_i64(sums[1], 1),
                (double)sums[0] / seconds_since(&t0));
out:
    out->file = NULL;
    ith_writer_abort(&record);
    ith_free(answers);
    ith_block_decoder_close(&d);
    return status;
}

/* The most that any batch needs. */
static ith_vision_limits media_limits(const prompt_list *l, int64_t batch)
{
    ith_vision_limits most = {0};
    for (int64_t first = 0; first < l->count; first += batch) {
        ith_vision_limits sizes = {0};
        for (int64_t i = first; i < first + batch && i < l->count; i++)
            ith_count_media(&l->media[i], 0, l->media[i].count, &sizes);
        most.max_patches = ith_max_i64(most.max_patches, sizes.max_patches);
        most.max_segments = ith_max_i64(most.max_segments, sizes.max_segments);
        most.max_segment_patches = ith_max_i64(most.max_segment_patches, sizes.max_segment_patches);
    }
    return most;
}

static ith_status answer_all(const ith_answering *a, const ith_args *args, const prompt_list *l,
                             row_output *out, ith_error *err)
{
    ith_decoder d = {0};
    collector c = {.a = a,
                   .err = err,
                   .live = ith_args_given(args, "prompt") && out->world->rank == 0,
                   .out = out};
    int64_t batch = batch_of(args, l, out);
    ith_decoder_options o =
        ith_answering_decoder(a, args, batch, l->longest + a->max_new, batch * l->longest);
    struct timespec t0;
    o.media = media_limits(l, batch);
    o.ranks = ith_answering_ranks(args, out->world, out->cp_size);
    ith_status status =
        ith_alloc_zero((void **)&c.answers, batch, sizeof *c.answers, "answers", err);
    if (status == ITH_OK)
        status = ith_alloc_zero((void **)&c.stopped, batch, sizeof *c.stopped, "answers", err);
    ITH_TRY_OUT(ith_comm_agree(out->world, status, err));
    ITH_TRY_OUT(ith_decoder_open(&d, args->positional[0], &o, err));
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (int64_t first = 0; first < l->count; first += batch * out->groups) {
        int64_t begin = 0, n = share_of_round(out, l, first, batch, &begin);
        status = answer_batch(&d, &c, a, l, begin, n, err);
        ITH_TRY_OUT(out->world->broken ? status : end_round(out, status, err));
    }
    ITH_TRY_OUT(ith_comm_all_reduce(out->world, &c.total, 1, ITH_I64, ITH_REDUCE_SUM, err));
    if (out->world->rank == 0)
        ith_log(ITH_LOG_INFO, "generate", "%lld prompt%s, %lld new tokens, %.1f tok/s",
                (long long)l->count, l->count == 1 ? "" : "s", (long long)c.total,
                (double)c.total / seconds_since(&t0));
out:
    for (int64_t i = 0; c.answers && i < batch; i++)
        ith_ids_free(&c.answers[i]);
    ith_free(c.answers);
    ith_free(c.stopped);
    ith_buf_deinit(&c.text);
    ith_decoder_close(&d);
    return status;
}

/* Everything before the weights. */
static ith_status read_request(const ith_args *args, ith_answering *a, prompt_list *l,
                               ith_error *err)
{
    const char *prompt = ith_args_text(args, "prompt");
    bool is_diffusion = a->hf.family == ITH_FAMILY_LLADA2;
    l->expected = json_array();
    ITH_TRY(ith_args_paths(args, "image", &l->images, err));
    ITH_TRY(ith_args_paths(args, "video", &l->videos, err));
    if (!prompt && (l->images[0] || l->videos[0]))
        return ith_fail(err, ITH_ERR_USAGE,
                        "generate: --image and --video go with --prompt (rows of a file name "
                        "theirs themselves)");
    ITH_TRY(prompt ? add_text(l, a, prompt, (int64_t)strlen(prompt), err)
                   : read_prompts(l, a, args->positional[1], err));
    if (ith_args_given(args, "record") && !is_diffusion)
        return ith_fail(err, ITH_ERR_USAGE,
                        "generate: --record is for diffusion models, %s writes one token a step",
                        a->hf.model_type);
    if (!is_diffusion)
        ITH_TRY(ith_block_options_refuse(a, args, err));
    return l->count ? ITH_OK
                    : ith_fail(err, ITH_ERR_FORMAT, "%s: no prompt in it", args->positional[1]);
}

static void free_prompts(prompt_list *l)
{
    for (int64_t i = 0; i < l->count; i++) {
        ith_ids_free(&l->prompts[i]);
        ith_media_list_deinit(&l->media[i]);
    }
    ith_free(l->prompts);
    ith_free(l->media);
    ith_free(l->images);
    ith_free(l->videos);
    json_decref(l->expected);
}

static ith_status generate(const ith_args *args, ith_comm *world, ith_error *err)
{
    ith_answering a = {0};
    prompt_list l = {0};
    row_output out = {.world = world, .cp_size = ith_args_int(args, "cp-size")};
    ith_status status = ITH_OK;
    out.groups = ith_max_i64(world->size / out.cp_size, 1);
    out.group = world->rank / out.cp_size;
    if (ith_args_given(args, "prompt") == (args->num_positional > 1))
        status = ith_fail(err, ITH_ERR_USAGE,
                          "generate: give either a file of prompts or --prompt TEXT");
    if (status == ITH_OK)
        status = ith_answering_check_ranks(args, "generate", err);
    if (status == ITH_OK && world->size % out.cp_size != 0)
        status = ith_fail(err, ITH_ERR_USAGE, "--cp-size: %lld does not divide the %lld ranks",
                          (long long)out.cp_size, (long long)world->size);
    if (status == ITH_OK && world->rank > 0)
        status = ith_log_set_levels("error", err);
    if (status == ITH_OK)
        status = ith_answering_open(&a, args->positional[0], args, err);
    if (status == ITH_OK)
        status = read_request(args, &a, &l, err);
    status = ith_comm_agree(world, status, err);
    if (status == ITH_OK)
        status = a.hf.family == ITH_FAMILY_LLADA2 ? answer_blocks(&a, args, &l, &out, err)
                                                  : answer_all(&a, args, &l, &out, err);
    free_prompts(&l);
    ith_buf_deinit(&out.rows);
    ith_buf_deinit(&out.record);
    ith_answering_close(&a);
    return status;
}

static ith_status run_generate(const ith_args *args, ith_error *err)
{
    return ith_answering_run(args, ANSWER_TIMEOUT_S, generate, err);
}

static const ith_option options[] = {{.name = "prompt",
                                      .letter = 'p',
                                      .type = ITH_OPTION_TEXT,
                                      .help = "One user message; its answer appears as text."},
                                     {.name = "batch",
                                      .letter = 'b',
                                      .type = ITH_OPTION_INT,
                                      .default_text = "8",
                                      .help = "Prompts at a time.",
                                      .min = 1,
                                      .max = 4096},
                                     ITH_ANSWERING_OPTIONS,
                                     {.name = "cp-size",
                                      .type = ITH_OPTION_INT,
                                      .default_text = "1",
                                      .help = "Ranks that share each prompt and its cache, cut "
                                              "along the sequence.",
                                      .min = 1,
                                      .max = 4096},
                                     ITH_RANK_OPTIONS,
                                     {.name = "record",
                                      .type = ITH_OPTION_PATH,
                                      .help = "Diffusion: write each answer with the step that "
                                              "wrote each token; `train` reads the file."},
                                     ITH_BLOCK_OPTIONS,
                                     {.name = NULL}};

const ith_command ith_cmd_generate = {
    .name = "generate",
    .arguments = "MODEL [FILE]",
    .summary = "Answer a prompt or a file of prompts",
    .details = "Rows of a .jsonl FILE hold \"messages\" or \"prompt\"; other files hold one prompt "
               "per line. Messages may hold images and videos as in training data.\n"
               "Writes one JSON object per prompt: row, answer, tokens, finish_reason.\n"
               "Diffusion models write blocks of tokens; forwards are reported, too.\n"
               "Under mpirun, srun or torchrun the prompts are dealt out over the ranks, or groups "
               "of --cp-size; rows come in the order of the file.\n",
    .options = options,
    .min_positional = 1,
    .max_positional = 2,
    .run = run_generate};
