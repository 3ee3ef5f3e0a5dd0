/* dataset_index.c - the list of samples of a data set.
 *
 * Rows are read in batches of pieces; a piece is a fixed number of rows with its own results, and
 * results are joined in order. Invariant: list, drops and the error that wins do not depend on the
 * number of threads. */
#include "base/checked.h"
#include "base/rng.h"
#include "data/dataset_internal.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_ROWS 64
#define BATCH_PIECES 256

typedef struct {
    ith_dataset_sample *samples;
    int64_t count, cap;
    ith_drops drops;
    ith_status status;
    ith_error err;
} index_piece;

typedef struct {
    const ith_dataset *dataset;
    int64_t part, first_row; /* of the batch */
    index_piece *pieces;
} index_batch;

int64_t ith_dataset_row_bytes(const ith_dataset *d, int64_t part, int64_t row)
{
    int64_t local = 0, len = 0;
    const dataset_file *file = dataset_find_file(&d->parts[part], row, &local);
    ith_rows_text(file->rows, local, &len);
    return len;
}

const char *ith_dataset_row_file(const ith_dataset *d, int64_t part, int64_t row)
{
    int64_t local = 0;
    return dataset_find_file(&d->parts[part], row, &local)->path;
}

ith_status ith_dataset_read(const ith_dataset *d, int64_t part, int64_t row, ith_converted *out,
                            ith_error *err)
{
    ITH_ASSERT(d->loaded && part >= 0 && part < d->num_parts);
    const dataset_part *p = &d->parts[part];
    int64_t local = 0;
    const dataset_file *file = dataset_find_file(p, row, &local);
    json_t *parsed = NULL;
    ITH_TRY(ith_rows_parse(file->rows, local, &parsed, err));
    ith_convert_options options = {.separator = p->info.separator};
    ith_status status = ith_convert_row(p->info.converter, parsed, &options, out, err);
    json_decref(parsed);
    if (status != ITH_OK) {
        char where[PATH_MAX];
        return ith_wrap(err, status, "%s", ith_rows_where(file->rows, local, where, sizeof where));
    }
    return ITH_OK;
}

static ith_status add_sample(index_piece *piece, int64_t part, int64_t row, int64_t cut)
{
    ITH_TRY(ith_grow((void **)&piece->samples, &piece->cap, piece->count + 1,
                     sizeof *piece->samples, "samples", &piece->err));
    piece->samples[piece->count++] = (ith_dataset_sample){row, ith_narrow(part), ith_narrow(cut)};
    return ITH_OK;
}

static void count_drops(index_piece *piece, int64_t part, int64_t row, const ith_converted *c)
{
    for (int k = ITH_DROP_MESSAGE_TAG; k < ITH_DROP_COUNT; k++) {
        for (int64_t i = 0; i < c->num_messages_dropped[k]; i++)
            ith_drops_add(&piece->drops, (ith_drop)k, part, row,
                          c->message_detail[k - ITH_DROP_MESSAGE_TAG]);
    }
    if (c->drop != ITH_DROP_NONE)
        ith_drops_add(&piece->drops, c->drop, part, row, c->detail);
}

/* The samples of one converted row. */
static ith_status index_messages(const ith_dataset *d, index_piece *piece, int64_t part,
                                 int64_t row, const ith_converted *c)
{
    if (c->has_media && !d->options.allow_media) {
        ith_drops_add(&piece->drops, ITH_DROP_MEDIA, part, row, "");
        return ITH_OK;
    }
    int64_t num_assistant = 0, num_supervised = 0;
    for (size_t i = 0; i < json_array_size(c->messages); i++) {
        const json_t *message = json_array_get(c->messages, i);
        const char *role = json_string_value(json_object_get(message, "role"));
        num_assistant += role && strcmp(role, "assistant") == 0;
        if (!ith_message_is_supervised(message))
            continue;
        num_supervised++;
        if (!d->options.all_turns)
            ITH_TRY(add_sample(piece, part, row, (int64_t)i + 1));
    }
    if (num_supervised == 0)
        ith_drops_add(&piece->drops, num_assistant ? ITH_DROP_NO_WEIGHT : ITH_DROP_NO_ASSISTANT,
                      part, row, "");
    else if (d->options.all_turns)
        ITH_TRY(add_sample(piece, part, row, 0));
    return ITH_OK;
}

static ith_status index_row(const ith_dataset *d, index_piece *piece, int64_t part, int64_t row)
{
    ith_converted converted;
    ITH_TRY(ith_dataset_read(d, part, row, &converted, &piece->err));
    count_drops(piece, part, row, &converted);
    ith_status status = ITH_OK;
    if (converted.drop == ITH_DROP_NONE && converted.input_ids)
        status = add_sample(piece, part, row, 0);
    else if (converted.drop == ITH_DROP_NONE)
        status = index_messages(d, piece, part, row, &converted);
    ith_converted_deinit(&converted);
    return status;
}

static void index_task(void *arg, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const index_batch *batch = arg;
    index_piece *piece = &batch->pieces[begin / PIECE_ROWS];
    for (int64_t i = begin; i < end && piece->status == ITH_OK; i++)
        piece->status = index_row(batch->dataset, piece, batch->part, batch->first_row + i);
}

static ith_status join_piece(ith_dataset *d, const index_piece *piece, ith_error *err)
{
    if (piece->status != ITH_OK)
        return ith_fail(err, piece->status, "%s", piece->err.text);
    ITH_TRY(ith_grow((void **)&d->samples, &d->cap_samples, d->num_samples + piece->count,
                     sizeof *d->samples, "samples", err));
    if (piece->count)
        memcpy(d->samples + d->num_samples, piece->samples,
               (size_t)piece->count * sizeof *d->samples);
    d->num_samples += piece->count;
    ith_drops_merge(&d->drops, &piece->drops);
    return ITH_OK;
}

static ith_status index_batch_run(ith_dataset *d, index_batch *batch, int64_t num_rows,
                                  ith_pool *pool, ith_error *err)
{
    int64_t num_pieces = ith_div_ceil(num_rows, PIECE_ROWS);
    for (int64_t i = 0; i < num_pieces; i++) {
        index_piece *piece = &batch->pieces[i];
        piece->count = 0;
        piece->status = ITH_OK;
        memset(&piece->drops, 0, sizeof piece->drops);
        ith_error_clear(&piece->err);
    }
    ith_pool_for(pool, num_rows, PIECE_ROWS, index_task, batch);
    for (int64_t i = 0; i < num_pieces; i++)
        ITH_TRY(join_piece(d, &batch->pieces[i], err));
    return ITH_OK;
}

static ith_status index_part(ith_dataset *d, index_batch *batch, ith_pool *pool, ith_error *err)
{
    ith_dataset_part *info = &d->parts[batch->part].info;
    int64_t before = d->num_samples;
    for (int64_t row = 0; row < info->num_rows; row += PIECE_ROWS * BATCH_PIECES) {
        batch->first_row = row;
        int64_t n = ith_min_i64(PIECE_ROWS * BATCH_PIECES, info->num_rows - row);
        ITH_TRY(index_batch_run(d, batch, n, pool, err));
    }
    info->num_samples = d->num_samples - before;
    return ITH_OK;
}

static int compare_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

ith_status ith_dataset_draw(int64_t n, int64_t k, uint64_t seed, uint64_t stream, int64_t *out,
                            ith_error *err)
{
    ITH_ASSERT(n >= 0 && k >= 0 && (n > 0 || k == 0));
    if (k == 0)
        return ITH_OK;
    int64_t rounds = k / n, rest = k % n, *order = NULL;
    ITH_TRY(ith_alloc((void **)&order, n * 8, "sampling", err));
    ith_rng_permutation(seed, stream, n, order);
    for (int64_t r = 0; r < rounds; r++)
        for (int64_t i = 0; i < n; i++)
            out[r * n + i] = i;
    memcpy(out + rounds * n, order, (size_t)rest * 8);
    ith_free(order);
    qsort(out, (size_t)k, 8, compare_i64);
    return ITH_OK;
}

/* Samples first .. first + n of a part, chosen by size, then by weight. */
static ith_status draw_part(ith_dataset *d, ith_dataset_part *info, int64_t first, ith_error *err)
{
    int64_t n = info->num_samples, sized = info->size >= 0 && n ? info->size : n;
    int64_t count = info->weight >= 0 ? (int64_t)((double)sized * info->weight) : sized;
    int64_t *by_size = NULL, *out = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_grow((void **)&d->drawn, &d->cap_drawn, d->num_drawn + count, 8, "samples", err));
    out = d->drawn + d->num_drawn;
    uint64_t stream = ith_rng_stream(info->name);
    ITH_TRY_OUT(ith_alloc((void **)&by_size, sized * 8, "sampling", err));
    if (info->size >= 0 && n)
        ITH_TRY_OUT(ith_dataset_draw(n, sized, d->options.seed, stream, by_size, err));
    else
        for (int64_t i = 0; i < n; i++)
            by_size[i] = i;
    if (info->weight >= 0) {
        ITH_TRY_OUT(ith_dataset_draw(sized, count, d->options.seed, stream + 1, out, err));
        for (int64_t i = 0; i < count; i++)
            out[i] = by_size[out[i]];
    } else if (count) {
        memcpy(out, by_size, (size_t)count * 8);
    }
    for (int64_t i = 0; i < count; i++)
        out[i] += first;
    info->num_drawn = count;
    d->num_drawn += count;
out:
    ith_free(by_size);
    return status;
}

/* Forgets the samples that nothing draws: they need no tokens. */
static ith_status keep_drawn(ith_dataset *d, ith_error *err)
{
    int64_t *number = NULL, count = 0;
    ITH_TRY(ith_alloc_zero((void **)&number, d->num_samples, 8, "samples", err));
    for (int64_t i = 0; i < d->num_drawn; i++)
        number[d->drawn[i]] = 1;
    for (int64_t i = 0; i < d->num_samples; i++) {
        if (!number[i])
            continue;
        d->samples[count] = d->samples[i];
        number[i] = count++;
    }
    for (int64_t i = 0; i < d->num_drawn; i++)
        d->drawn[i] = number[d->drawn[i]];
    d->num_samples = count;
    ith_free(number);
    return ITH_OK;
}

ith_status ith_dataset_index(ith_dataset *d, ith_pool *pool, ith_error *err)
{
    ITH_ASSERT(d->num_samples == 0 && !d->drawn);
    ITH_TRY(ith_dataset_load(d, err));
    index_batch batch = {.dataset = d};
    ITH_TRY(
        ith_alloc_zero((void **)&batch.pieces, BATCH_PIECES, sizeof *batch.pieces, "index", err));
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < d->num_parts && status == ITH_OK; i++) {
        int64_t first = d->num_samples;
        batch.part = i;
        status = index_part(d, &batch, pool, err);
        if (status == ITH_OK)
            status = draw_part(d, &d->parts[i].info, first, err);
    }
    for (int64_t i = 0; i < BATCH_PIECES; i++)
        ith_free(batch.pieces[i].samples);
    ith_free(batch.pieces);
    return status == ITH_OK ? keep_drawn(d, err) : status;
}

const ith_drops *ith_dataset_drops(const ith_dataset *d)
{
    return &d->drops;
}

int64_t ith_dataset_num_samples(const ith_dataset *d)
{
    return d->num_samples;
}

const ith_dataset_sample *ith_dataset_samples(const ith_dataset *d)
{
    return d->samples;
}

int64_t ith_dataset_num_drawn(const ith_dataset *d)
{
    return d->num_drawn;
}

const int64_t *ith_dataset_drawn(const ith_dataset *d)
{
    return d->drawn;
}
