/* trainer_export.c - the trained weights as a Hugging Face directory, in the layout of the source.
 * Invariant: a tensor that the source has under another name or order (fused experts) is written
 * under that name and in that order; every trained piece is written exactly once. */
#include <string.h>

#include "checkpoint/model_dir.h"
#include "train/trainer_internal.h"

#define STAGING_ELEMENTS ((int64_t)1 << 20)

typedef struct {
    ith_trainer *t;
    ith_tensor flat;           /* what is written: the master where there is one */
    ith_piece_source *sources; /* [num_pieces] */
    ith_st_entry *tensors;     /* [count] of the output */
    int64_t *first_piece;      /* [count] */
    int64_t count;
    char *staging; /* STAGING_ELEMENTS in the type of flat */
    char *block;   /* an expert of the largest fused tensor */
} exporter;

/* Elements [first, first + n) of piece i, in pieces of the staging buffer, to `out`. */
static ith_status fetch(exporter *x, int64_t i, int64_t first, int64_t n, char *out)
{
    int64_t size = ith_dtype_bytes(ith_model_piece_dtype(x->t->model, x->flat, i));
    for (int64_t done = 0; done < n; done += STAGING_ELEMENTS)
        ITH_TRY(ith_model_download(x->t->model, &x->t->session.ctx, x->flat, i, first + done,
                                   ith_min_i64(STAGING_ELEMENTS, n - done), out + done * size));
    return ITH_OK;
}

/* This rank's part of a piece whose rows follow each other in the output. */
static ith_status put_straight(exporter *x, int64_t i, ith_model_sink *sink, ith_error *err)
{
    int64_t first = 0, count = ith_model_own_part(x->t->model, i, &first);
    for (int64_t done = 0, n; done < count; done += n) {
        n = ith_min_i64(STAGING_ELEMENTS, count - done);
        ITH_TRY(fetch(x, i, first + done, n, x->staging));
        ITH_TRY(ith_model_put(sink, x->sources[i].first + first + done, x->staging, n, err));
    }
    return ITH_OK;
}

/* This rank's part of a piece that lies across the output: runs of every column. */
static ith_status put_runs(exporter *x, int64_t i, ith_model_sink *sink, ith_error *err)
{
    const ith_hf_piece *p = &x->t->model->pieces[i];
    const ith_piece_source *s = &x->sources[i];
    int64_t size = ith_dtype_bytes(x->flat.dtype), cols = p->count / p->shape[0];
    int64_t first = 0, n = ith_model_own_part(x->t->model, i, &first);
    if (n == 0)
        return ITH_OK;
    ITH_TRY(fetch(x, i, first, n, x->block));
    for (int64_t c = 0; c < cols; c++) {
        int64_t low = ith_div_ceil(ith_max_i64(0, first - c), cols), at = low * cols + c, run = 0;
        for (; at < first + n; at += cols, run++)
            memcpy(x->staging + run * size, x->block + (at - first) * size, (size_t)size);
        ITH_ASSERT(run <= STAGING_ELEMENTS);
        ITH_TRY(ith_model_put(sink, s->first + c * s->col_stride + low, x->staging, run, err));
    }
    return ITH_OK;
}

/* Puts piece i into its place in the expert's block. */
static ith_status place_piece(exporter *x, int64_t i)
{
    const ith_hf_piece *p = &x->t->model->pieces[i];
    const ith_piece_source *s = &x->sources[i];
    int64_t size = ith_dtype_bytes(x->flat.dtype), cols = p->count / p->shape[0];
    for (int64_t done = 0; done < p->count;) {
        int64_t n = ith_min_i64(STAGING_ELEMENTS, p->count - done);
        ITH_TRY(fetch(x, i, done, n, x->staging));
        for (int64_t k = 0; k < n; k++) {
            int64_t row = (done + k) / cols, col = (done + k) % cols;
            int64_t at = s->first % s->block + row * s->row_stride + col * s->col_stride;
            memcpy(x->block + at * size, x->staging + k * size, (size_t)size);
        }
        done += n;
    }
    return ITH_OK;
}

/* Pieces [i, *end) are those of one expert in a fused tensor; true when all of them are this
 * rank's. */
static bool owns_block(const exporter *x, int64_t i, int64_t *end)
{
    const ith_piece_source *s = &x->sources[i];
    bool owns = true;
    int64_t first = 0, filled = 0;
    for (*end = i; filled < s->block; ++*end) {
        const ith_piece_source *other = &x->sources[*end];
        ITH_ASSERT(other->entry == s->entry && other->first / s->block == s->first / s->block);
        int64_t count = x->t->model->pieces[*end].count;
        owns &= ith_model_own_part(x->t->model, *end, &first) == count;
        filled += count;
    }
    return owns;
}

/* One expert of a fused tensor whose matrices lie across: at once where it is all here. */
static ith_status put_expert(exporter *x, int64_t i, ith_model_sink *sink, int64_t *end,
                             ith_error *err)
{
    const ith_piece_source *s = &x->sources[i];
    bool whole = owns_block(x, i, end);
    for (int64_t k = i; k < *end; k++)
        ITH_TRY(whole ? place_piece(x, k) : put_runs(x, k, sink, err));
    return whole ? ith_model_put(sink, s->first / s->block * s->block, x->block, s->block, err)
                 : ITH_OK;
}

static ith_status put_tensor(void *arg, int64_t i, ith_model_sink *sink, ith_error *err)
{
    exporter *x = arg;
    const ith_piece_source *first = &x->sources[x->first_piece[i]];
    int64_t k = x->first_piece[i];
    if (!first->fused)
        return put_straight(x, k, sink, err);
    while (k < x->t->model->num_pieces) {
        if (x->sources[k].entry != first->entry)
            k++;
        else if (first->col_stride == 1)
            ITH_TRY(put_straight(x, k++, sink, err));
        else
            ITH_TRY(put_expert(x, k, sink, &k, err));
    }
    return ITH_OK;
}

/* The output's tensors: one for each piece, one for all pieces of a fused tensor. */
static ith_status list_tensors(exporter *x, const ith_st_reader *reader, ith_error *err)
{
    const ith_model *m = x->t->model;
    int64_t largest = 0;
    for (int64_t i = 0; i < m->num_pieces; i++) {
        const ith_hf_piece *p = &m->pieces[i];
        ith_piece_source *s = &x->sources[i];
        ITH_TRY(ith_model_find_source(p, reader, s, err));
        bool begins = !s->fused || s->first == 0;
        if (!begins)
            continue;
        x->tensors[x->count] = (ith_st_entry){.name = s->entry->name,
                                              .dtype = ith_model_piece_dtype(m, x->flat, i),
                                              .ndim = s->entry->ndim};
        memcpy(x->tensors[x->count].shape, s->entry->shape, sizeof s->entry->shape);
        x->first_piece[x->count++] = i;
        if (s->fused && s->entry->shape[0] != m->config->num_experts)
            return ith_fail(err, ITH_ERR_FORMAT, "%s: %lld experts, num_experts is %lld",
                            s->entry->name, (long long)s->entry->shape[0],
                            (long long)m->config->num_experts);
        if (s->fused && s->col_stride != 1)
            largest = ith_max_i64(largest, s->block);
    }
    return ith_alloc((void **)&x->block, largest * ith_dtype_bytes(x->flat.dtype), "staging", err);
}

static ith_status open_exporter(exporter *x, ith_st_reader **reader, ith_error *err)
{
    int64_t n = x->t->model->num_pieces;
    ITH_TRY(ith_alloc((void **)&x->staging, STAGING_ELEMENTS * 4, "staging", err));
    ITH_TRY(ith_alloc_zero((void **)&x->tensors, n, sizeof *x->tensors, "tensor list", err));
    ITH_TRY(ith_alloc_zero((void **)&x->sources, n, sizeof *x->sources, "tensor list", err));
    ITH_TRY(
        ith_alloc_zero((void **)&x->first_piece, n, sizeof *x->first_piece, "tensor list", err));
    ITH_TRY(ith_st_open(reader, x->t->config->model, err));
    return list_tensors(x, *reader, err);
}

ith_status ith_trainer_export(ith_trainer *t, const char *dir, ith_error *err)
{
    const ith_model *m = t->model;
    const ith_config *c = t->config;
    exporter x = {.t = t, .flat = t->step->master.ndim ? t->step->master : m->w};
    ith_st_reader *reader = NULL;
    ith_status status = ith_step_settle(t->step);
    if (status == ITH_OK)
        status = open_exporter(&x, &reader, err);
    status = ith_trainer_agree(t, status, err);
    if (status != ITH_OK)
        goto out;
    ith_model_write w = {.source = c->model,
                         .weights = reader,
                         .tensors = x.tensors,
                         .count = x.count,
                         .put = put_tensor,
                         .put_arg = &x,
                         .chat_template = ith_chat_custom(t->chat),
                         .ranks = ith_trainer_ranks(t),
                         .set_dtype = c->save_dtype != ITH_DTYPE_AUTO,
                         .dtype = c->save_dtype == ITH_DTYPE_F32
                                      ? ITH_F32
                                      : (c->save_dtype == ITH_DTYPE_F16 ? ITH_F16 : ITH_BF16),
                         .max_shard_bytes = c->max_shard_size > 0 ? c->max_shard_size : 0};
    status = ith_model_dir_write(dir, &w, err);
out:
    ith_st_close(reader);
    ith_free(x.tensors);
    ith_free(x.sources);
    ith_free(x.first_piece);
    ith_free(x.staging);
    ith_free(x.block);
    return status;
}
