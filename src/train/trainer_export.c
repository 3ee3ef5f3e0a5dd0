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

static ith_status push_piece(exporter *x, int64_t i, ith_model_sink *sink, ith_error *err)
{
    int64_t size = ith_dtype_bytes(ith_model_piece_dtype(x->t->model, x->flat, i)),
            count = x->t->model->pieces[i].count;
    for (int64_t done = 0; done < count;) {
        int64_t n = ith_min_i64(STAGING_ELEMENTS, count - done);
        ITH_TRY(
            ith_model_download(x->t->model, &x->t->session.ctx, x->flat, i, done, n, x->staging));
        ITH_TRY(ith_model_push(sink, x->staging, n * size, err));
        done += n;
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
        ITH_TRY(
            ith_model_download(x->t->model, &x->t->session.ctx, x->flat, i, done, n, x->staging));
        for (int64_t k = 0; k < n; k++) {
            int64_t row = (done + k) / cols, col = (done + k) % cols;
            int64_t at = s->first % s->block + row * s->row_stride + col * s->col_stride;
            memcpy(x->block + at * size, x->staging + k * size, (size_t)size);
        }
        done += n;
    }
    return ITH_OK;
}

/* All experts of a fused tensor, one after the other. */
static ith_status push_fused(exporter *x, int64_t first, ith_model_sink *sink, ith_error *err)
{
    const ith_piece_source *s = &x->sources[first];
    int64_t size = ith_dtype_bytes(x->flat.dtype), filled = 0;
    for (int64_t i = first; i < x->t->model->num_pieces; i++) {
        if (x->sources[i].entry != s->entry)
            continue;
        ITH_TRY(place_piece(x, i));
        filled += x->t->model->pieces[i].count;
        if (filled == s->block) {
            ITH_TRY(ith_model_push(sink, x->block, s->block * size, err));
            filled = 0;
        }
    }
    ITH_ASSERT(filled == 0);
    return ITH_OK;
}

static ith_status push_tensor(void *arg, int64_t i, ith_model_sink *sink, ith_error *err)
{
    exporter *x = arg;
    int64_t first = x->first_piece[i];
    return x->sources[first].fused ? push_fused(x, first, sink, err)
                                   : push_piece(x, first, sink, err);
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
        if (s->fused)
            largest = ith_max_i64(largest, s->block);
    }
    return ith_alloc((void **)&x->block, largest * ith_dtype_bytes(x->flat.dtype), "staging", err);
}

ith_status ith_trainer_export(ith_trainer *t, const char *dir, ith_error *err)
{
    const ith_model *m = t->model;
    const ith_config *c = t->config;
    exporter x = {.t = t, .flat = t->step->master.ndim ? t->step->master : m->w};
    ith_st_reader *reader = NULL;
    ith_status status = ITH_OK;
    int64_t n = m->num_pieces;
    ITH_TRY_OUT(ith_alloc((void **)&x.staging, STAGING_ELEMENTS * 4, "staging", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&x.tensors, n, sizeof *x.tensors, "tensor list", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&x.sources, n, sizeof *x.sources, "tensor list", err));
    ITH_TRY_OUT(
        ith_alloc_zero((void **)&x.first_piece, n, sizeof *x.first_piece, "tensor list", err));
    ITH_TRY_OUT(ith_st_open(&reader, c->model, err));
    ITH_TRY_OUT(list_tensors(&x, reader, err));
    ith_model_write w = {.source = c->model,
                         .weights = reader,
                         .tensors = x.tensors,
                         .count = x.count,
                         .push = push_tensor,
                         .push_arg = &x,
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
