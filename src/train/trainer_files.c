/* trainer_files.c - weights in, checkpoints in and out, the finished model directory.
 * Invariant: everything on disk is by Hugging Face tensor name, so a checkpoint does not depend on
 * flat layouts. */
#include <math.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "checkpoint/model_dir.h"
#include "checkpoint/train_state.h"
#include "train/trainer_internal.h"

#define STAGING_BYTES ((int64_t)4 << 20)

ith_status ith_trainer_store_config(const ith_config *config, ith_error *err)
{
    ith_buf text = {0}, path = {0};
    ith_status status = ith_config_dump(config, true, &text, err);
    ith_path_join(&path, config->output_dir, "ithaca_config.yaml");
    if (status == ITH_OK)
        status = ith_buf_check(&path, "output_dir", err);
    if (status == ITH_OK)
        status = ith_make_dirs(config->output_dir, err);
    if (status == ITH_OK)
        status = ith_write_file(path.data, text.data, text.len, err);
    ith_buf_deinit(&text);
    ith_buf_deinit(&path);
    return status;
}

/* output_dir, and the tokens that ranks share in it, without what a killed run was writing. */
static ith_status make_output(const char *dir, bool cleans, ith_error *err)
{
    ith_buf tokens = {0};
    ITH_TRY(ith_make_dirs(dir, err));
    if (!cleans)
        return ITH_OK;
    ith_path_join(&tokens, dir, "tokenized");
    ith_status status = ith_buf_check(&tokens, "output_dir", err);
    if (status == ITH_OK)
        status = ith_remove_leftovers(dir, err);
    if (status == ITH_OK)
        status = ith_remove_leftovers(tokens.data, err);
    ith_buf_deinit(&tokens);
    return status;
}

ith_status ith_trainer_open_output(const ith_trainer *t, ith_error *err)
{
    const char *dir = t->config->output_dir;
    ith_comm *ranks = ith_trainer_ranks(t);
    ITH_TRY(ith_trainer_agree(t, make_output(dir, ith_trainer_is_first(t), err), err));
    if (!ranks)
        return ITH_OK;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t mark[2] = {getpid(), now.tv_nsec};
    ITH_TRY(ith_comm_broadcast(ranks, mark, sizeof mark, 0, err));
    ith_buf path = {0};
    ith_buf_printf(&path, "%s/.ranks-%lld-%lld", dir, (long long)mark[0], (long long)mark[1]);
    ith_status status = ith_buf_check(&path, dir, err);
    if (status == ITH_OK && ranks->rank == 0)
        status = ith_write_file(path.data, "", 0, err);
    status = ith_trainer_agree(t, status, err);
    if (status == ITH_OK) {
        if (!ith_path_exists(path.data))
            status = ith_fail(err, ITH_ERR_USAGE,
                              "output_dir: %s: what rank 0 writes is not here (give a directory "
                              "that all hosts share)",
                              dir);
        status = ith_trainer_agree(t, status, err);
    }
    ith_error ignored = {0};
    if (ranks->rank == 0 && path.data)
        ith_remove_tree(path.data, &ignored);
    ith_buf_deinit(&path);
    return status;
}

ith_status ith_trainer_load_weights(ith_trainer *t, ith_error *err)
{
    ith_st_reader *reader = NULL;
    ITH_TRY(ith_st_open(&reader, t->config->model, err));
    ith_status status =
        ith_model_load(t->model, &t->session.ctx, reader, t->model->w, t->step->master);
    ith_st_close(reader);
    return status == ITH_OK ? ITH_OK : ith_wrap(err, status, "%s", t->config->model);
}

/* What a put callback reads: one flat buffer. */
typedef struct {
    ith_trainer *t;
    ith_tensor flat;
    char *staging;
} flat_source;

/* This rank's part of piece i. */
static ith_status put_state(void *arg, int64_t i, ith_st_writer *writer, ith_error *err)
{
    const flat_source *s = arg;
    ith_model *m = s->t->model;
    int64_t size = ith_dtype_bytes(ith_model_piece_dtype(m, s->flat, i)), first = 0;
    int64_t count = ith_model_own_part(m, i, &first);
    for (int64_t done = 0, n; done < count; done += n) {
        n = ith_min_i64(STAGING_BYTES / size, count - done);
        ITH_TRY(ith_model_download(m, &s->t->session.ctx, s->flat, i, first + done, n, s->staging));
        ITH_TRY(ith_st_writer_put(writer, i, (first + done) * size, s->staging, n * size, err));
    }
    return ITH_OK;
}

static ith_status write_hf(void *arg, const char *dir, ith_error *err)
{
    return ith_trainer_export(arg, dir, err);
}

/* The groups of a checkpoint: weights (master where there is one), m, v. */
#define NUM_GROUPS 3
typedef struct {
    ith_state_group groups[NUM_GROUPS];
    flat_source sources[NUM_GROUPS];
    ith_state_tensor *tensors[NUM_GROUPS];
    char *staging;
} group_list;

static void free_groups(group_list *g)
{
    for (int i = 0; i < NUM_GROUPS; i++)
        ith_free(g->tensors[i]);
    ith_free(g->staging);
}

static ith_status make_groups(ith_trainer *t, group_list *g, ith_error *err)
{
    static const char *const names[NUM_GROUPS] = {"weights", "adam_m", "adam_v"};
    const ith_step *s = t->step;
    const ith_tensor flats[NUM_GROUPS] = {s->master.ndim ? s->master : t->model->w, s->m, s->v};
    memset(g, 0, sizeof *g);
    ITH_TRY(ith_alloc((void **)&g->staging, STAGING_BYTES, "staging", err));
    for (int k = 0; k < NUM_GROUPS; k++) {
        ITH_TRY(ith_alloc_zero((void **)&g->tensors[k], t->model->num_pieces, sizeof **g->tensors,
                               "tensor list", err));
        for (int64_t i = 0; i < t->model->num_pieces; i++) {
            const ith_hf_piece *p = &t->model->pieces[i];
            g->tensors[k][i] =
                (ith_state_tensor){.name = p->hf_name,
                                   .dtype = ith_model_piece_dtype(t->model, flats[k], i),
                                   .ndim = p->ndim};
            memcpy(g->tensors[k][i].shape, p->shape, sizeof p->shape);
        }
        g->sources[k] = (flat_source){t, flats[k], g->staging};
        g->groups[k] = (ith_state_group){names[k], g->tensors[k], t->model->num_pieces, put_state,
                                         &g->sources[k]};
    }
    return ITH_OK;
}

static ith_status pack_state(ith_trainer *t, const ith_run_position *at, json_t **out,
                             ith_error *err)
{
    json_t *data = NULL;
    ITH_TRY(ith_batcher_save(t->batcher, &data, err));
    *out = json_pack(
        "{s:I, s:I, s:O, s:{s:o, s:f, s:f, s:I, s:I, s:I}}", "updates", (json_int_t)at->updates,
        "skipped", (json_int_t)at->skipped, "data", data, "unlogged", "loss_sum",
        isfinite(at->unlogged.loss_sum) ? json_real(at->unlogged.loss_sum) : json_null(), "seconds",
        at->unlogged.seconds, "flops", at->unlogged.flops, "steps", (json_int_t)at->unlogged.steps,
        "tokens", (json_int_t)at->unlogged.tokens, "labels", (json_int_t)at->unlogged.labels);
    json_decref(data);
    return *out ? ITH_OK : ith_fail(err, ITH_ERR_MEMORY, "out of memory for the training state");
}

ith_status ith_trainer_save(ith_trainer *t, const ith_run_position *at, ith_error *err)
{
    group_list g;
    json_t *state = NULL;
    ith_status status = make_groups(t, &g, err);
    if (status == ITH_OK)
        status = ith_step_settle(t->step);
    if (status == ITH_OK)
        status = pack_state(t, at, &state, err);
    status = ith_trainer_agree(t, status, err);
    if (status == ITH_OK) {
        ith_train_save save = {
            .progress = {at->step, at->samples, at->epoch, !isnan(at->best_eval),
                         isnan(at->best_eval) ? 0.0 : at->best_eval, at->best_step},
            .state = state,
            .groups = g.groups,
            .num_groups = NUM_GROUPS,
            .save_total_limit =
                t->config->save_total_limit == ITH_CONFIG_UNSET ? 0 : t->config->save_total_limit,
            .ranks = ith_trainer_ranks(t),
            .write_hf = t->config->save_ckpt_as_hf ? write_hf : NULL,
            .write_hf_arg = t};
        status = ith_train_state_save(t->config->output_dir, &save, err);
    }
    json_decref(state);
    free_groups(&g);
    return status;
}

static ith_status load_group(ith_trainer *t, const char *path, const char *group, ith_tensor flat,
                             ith_tensor second, ith_error *err)
{
    ith_st_reader *reader = NULL;
    ITH_TRY(ith_train_state_open_group(&reader, path, group, err));
    ith_status status = ith_model_load_pieces(t->model, &t->session.ctx, reader, flat, second);
    ith_st_close(reader);
    return status == ITH_OK ? ITH_OK : ith_wrap(err, status, "%s: %s", path, group);
}

static ith_unlogged read_unlogged(const json_t *j)
{
    const json_t *loss = json_object_get(j, "loss_sum");
    return (ith_unlogged){json_is_null(loss) ? (double)NAN : json_number_value(loss),
                          json_number_value(json_object_get(j, "seconds")),
                          json_number_value(json_object_get(j, "flops")),
                          json_integer_value(json_object_get(j, "steps")),
                          json_integer_value(json_object_get(j, "tokens")),
                          json_integer_value(json_object_get(j, "labels"))};
}

/* What is not trained is not in a checkpoint. */
static ith_status load_buffers(ith_trainer *t, ith_error *err)
{
    ith_st_reader *reader = NULL;
    if (t->model->num_buffers == 0)
        return ITH_OK;
    ITH_TRY(ith_st_open(&reader, t->config->model, err));
    ith_status status = ith_model_load_buffers(t->model, &t->session.ctx, reader);
    ith_st_close(reader);
    return status;
}

ith_status ith_trainer_resume(ith_trainer *t, const char *path, ith_run_position *at,
                              ith_error *err)
{
    ith_train_progress p;
    json_t *state = NULL;
    ITH_TRY(ith_train_state_load(path, NULL, 0, &p, &state, err));
    ith_status status = ith_batcher_load(t->batcher, json_object_get(state, "data"), err);
    if (status == ITH_OK)
        *at = (ith_run_position){.step = p.global_step,
                                 .updates = json_integer_value(json_object_get(state, "updates")),
                                 .skipped = json_integer_value(json_object_get(state, "skipped")),
                                 .samples = p.samples_seen,
                                 .epoch = p.epoch,
                                 .best_eval = p.has_best ? p.best_metric : (double)NAN,
                                 .best_step = p.best_global_step};
    if (status == ITH_OK)
        at->unlogged = read_unlogged(json_object_get(state, "unlogged"));
    json_decref(state);
    if (status != ITH_OK)
        return ith_wrap(err, status, "%s", path);
    ITH_TRY(load_group(t, path, "weights", t->model->w, t->step->master, err));
    ITH_TRY(load_buffers(t, err));
    ITH_TRY(load_group(t, path, "adam_m", t->step->m, ith_tensor_none(), err));
    return load_group(t, path, "adam_v", t->step->v, ith_tensor_none(), err);
}
