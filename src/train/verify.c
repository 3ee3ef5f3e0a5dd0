/* verify.c - checks at points of a step.
 *
 * Invariants:
 *  1. Every rank takes part in the same exchanges, whatever it found: findings are agreed at the
 *     end of a point.
 *  2. A view is a buffer as one kind of group has it; its copies are compared within the group. */
#include "train/verify.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "train/trainer_internal.h"

#define CHUNK_ELEMENTS ((int64_t)1 << 18)

/* A buffer as it lies here, whole or this rank's shard. */
typedef enum {
    ITH_VIEW_ALL,   /* what is here */
    ITH_VIEW_SLICE, /* of a whole buffer, the slice that ZeRO gives this rank */
    ITH_VIEW_WHOLE  /* weights that are whole here, beside their shards too */
} view_kind;

typedef struct {
    const char *name; /* for people */
    ith_tensor flat;
    view_kind kind;
} view;

static int64_t num_pieces(const ith_verifier *v)
{
    return v->t->model->num_pieces;
}

/* Elements [*first, *first + n) of piece i are in the view; returns n. */
static int64_t span_of(const ith_verifier *v, const view *w, int64_t i, int64_t *first)
{
    const ith_model *m = v->t->model;
    *first = 0;
    if (w->kind == ITH_VIEW_WHOLE)
        return ith_model_whole_piece(m, i).ndim ? m->pieces[i].count : 0;
    return ith_model_piece_here(m, w->flat, w->kind == ITH_VIEW_SLICE, i, first);
}

/* Ranks that have the same elements; NULL: none. */
static ith_comm *holders_of(const ith_verifier *v, const view *w, int64_t i)
{
    const ith_mesh *mesh = v->t->mesh;
    if (w->kind == ITH_VIEW_WHOLE)
        return mesh ? mesh->world : NULL;
    return ith_model_piece_holders(v->t->model, w->flat, w->kind == ITH_VIEW_SLICE, i);
}

static ith_status download(const ith_verifier *v, const view *w, int64_t i, int64_t first,
                           int64_t n, void *out)
{
    ith_ctx *ctx = &v->t->session.ctx;
    if (w->kind != ITH_VIEW_WHOLE)
        return ith_model_download(v->t->model, ctx, w->flat, i, first, n, out);
    ith_tensor piece = ith_model_whole_piece(v->t->model, i);
    int64_t size = ith_dtype_bytes(piece.dtype);
    ITH_TRY(ctx->device->download(ctx->device, out, (const char *)piece.data + first * size,
                                  n * size, ctx->err));
    return ctx->device->sync(ctx->device, ctx->err);
}

static ith_dtype dtype_of(const ith_verifier *v, const view *w, int64_t i)
{
    return ith_model_piece_dtype(v->t->model, w->flat, i);
}

/* ---- copies ---- */

/* Weights and optimizer state; returns how many, at most ITH_VERIFY_VIEWS. */
static int list_state(const ith_verifier *v, view *out)
{
    const ith_step *s = v->t->step;
    const ith_model *m = v->t->model;
    const view all[ITH_VERIFY_VIEWS] = {{"weight", m->w, ITH_VIEW_ALL},
                                        {"weight", m->w, ITH_VIEW_WHOLE},
                                        {"f32 master", s->master, ITH_VIEW_ALL},
                                        {"AdamW m", s->m, ITH_VIEW_ALL},
                                        {"AdamW v", s->v, ITH_VIEW_ALL}};
    int n = 0;
    for (int i = 0; i < ITH_VERIFY_VIEWS; i++)
        if (all[i].flat.ndim && (all[i].kind != ITH_VIEW_WHOLE || m->zero_stage >= 3))
            out[n++] = all[i];
    return n;
}

static ith_status hash_view(ith_verifier *v, const view *w, uint64_t *sums)
{
    for (int64_t i = 0; i < num_pieces(v); i++) {
        int64_t begin = 0, count = span_of(v, w, i, &begin),
                size = ith_dtype_bytes(dtype_of(v, w, i));
        ith_hash64 hash;
        ith_hash64_init(&hash);
        for (int64_t done = 0, n; done < count; done += n) {
            n = ith_min_i64(CHUNK_ELEMENTS, count - done);
            ITH_TRY(download(v, w, i, begin + done, n, v->chunk));
            ith_hash64_update(&hash, v->chunk, n * size);
        }
        sums[i] = ith_hash64_value(&hash);
    }
    return ITH_OK;
}

/* The first piece that this group's first rank has otherwise; -1: none. Collective over it. */
static ith_status find_other(ith_verifier *v, const view *w, ith_comm *group, const uint64_t *sums,
                             int64_t *out, ith_error *err)
{
    size_t bytes = (size_t)num_pieces(v) * sizeof *sums;
    *out = -1;
    if (!group)
        return ITH_OK;
    memcpy(v->theirs, sums, bytes);
    ITH_TRY(ith_comm_broadcast(group, v->theirs, (int64_t)bytes, 0, err));
    for (int64_t i = 0; i < num_pieces(v) && *out < 0; i++)
        if (holders_of(v, w, i) == group && v->theirs[i] != sums[i])
            *out = i;
    return ITH_OK;
}

/* Copies of a view are the same bits; sums: its hashes, filled here. */
static ith_status compare_copies(ith_verifier *v, const char *point, const view *w, uint64_t *sums,
                                 ith_error *err)
{
    const ith_mesh *mesh = v->t->mesh;
    ith_status status = hash_view(v, w, sums); /* its text is in the ctx's error */
    int64_t other = -1, among = -1;
    if (mesh && mesh->world) {
        ITH_TRY(find_other(v, w, mesh->world, sums, &other, err));
        ITH_TRY(find_other(v, w, mesh->replicas, sums, &among, err));
    }
    if (status != ITH_OK)
        return status;
    int64_t i = other >= 0 ? other : among,
            rank = other >= 0 || !mesh || !mesh->world ? 0 : mesh->world->rank % mesh->shard_size;
    return i < 0 ? ITH_OK
                 : ith_fail(err, ITH_ERR_RUN, "verify: %s: %s: %s differs from that of rank %lld",
                            point, v->t->model->pieces[i].hf_name, w->name, (long long)rank);
}

/* All of the state; `keep`: its hashes are those to come, else they must be those of before. */
static ith_status compare_state(ith_verifier *v, const char *point, bool keep, ith_error *err)
{
    view views[ITH_VERIFY_VIEWS];
    ith_status status = ITH_OK;
    int n = list_state(v, views);
    for (int k = 0; k < n; k++) {
        uint64_t *before = v->sums + k * num_pieces(v), *sums = keep ? before : v->now;
        ith_error why = {0};
        ith_status one = compare_copies(v, point, &views[k], sums, &why);
        for (int64_t i = 0; one == ITH_OK && !keep && v->has_sums && i < num_pieces(v); i++)
            if (sums[i] != before[i])
                one = ith_fail(&why, ITH_ERR_RUN,
                               "verify: %s: %s: %s is not what the last update left", point,
                               v->t->model->pieces[i].hf_name, views[k].name);
        if (one != ITH_OK && status == ITH_OK)
            status = ith_fail(err, one, "%s", why.text);
    }
    v->has_sums |= keep;
    return status;
}

/* ---- values ---- */

/* The first gradient that is not finite; piece < 0: none. */
typedef struct {
    int64_t piece, element;
    double value;
} finding;

static ith_status look_at_gradients(ith_verifier *v, const view *w, finding *bad)
{
    *bad = (finding){-1, 0, 0};
    for (int64_t i = 0; i < num_pieces(v); i++) {
        int64_t begin = 0, count = span_of(v, w, i, &begin);
        v->present[i] = 0;
        for (int64_t done = 0, n; done < count; done += n) {
            n = ith_min_i64(CHUNK_ELEMENTS, count - done);
            ITH_TRY(download(v, w, i, begin + done, n, v->chunk));
            const float *grad = (const float *)(const void *)v->chunk;
            for (int64_t k = 0; k < n; k++) {
                v->present[i] |= grad[k] != 0.0f;
                if (!isfinite(grad[k]) && bad->piece < 0)
                    *bad = (finding){i, begin + done + k, (double)grad[k]};
            }
        }
    }
    return ITH_OK;
}

/* Rank 0 tells what the lowest rank found. Collective. */
static ith_status tell_finding(ith_verifier *v, const char *point, const finding *mine,
                               ith_error *err)
{
    ith_comm *world = ith_trainer_ranks(v->t);
    finding found = *mine;
    int64_t rank = mine->piece < 0 ? INT64_MIN : world ? -world->rank : 0;
    if (world) {
        int64_t lowest = rank;
        ITH_TRY(ith_comm_all_reduce(world, &lowest, 1, ITH_I64, ITH_REDUCE_MAX, err));
        rank = lowest;
        if (rank != INT64_MIN)
            ITH_TRY(ith_comm_broadcast(world, &found, sizeof found, -rank, err));
    }
    if (rank == INT64_MIN)
        return ITH_OK;
    char where[32] = "";
    if (world)
        snprintf(where, sizeof where, "rank %lld: ", (long long)-rank);
    ith_trainer_say(v->hooks, "verify: %s: %sgradient of %s: element %lld is %g", point, where,
                    v->t->model->pieces[found.piece].hf_name, (long long)found.element,
                    found.value);
    return ITH_OK;
}

static ith_status tell_missing(ith_verifier *v, ith_error *err)
{
    ith_comm *world = ith_trainer_ranks(v->t);
    char names[512] = "";
    int64_t missing = 0;
    if (world)
        ITH_TRY(
            ith_comm_all_reduce(world, v->present, num_pieces(v), ITH_I64, ITH_REDUCE_MAX, err));
    for (int64_t i = 0; i < num_pieces(v); i++) {
        const char *name = v->t->model->pieces[i].hf_name;
        size_t len = strlen(names);
        if (v->present[i])
            continue;
        missing++;
        if (len + strlen(name) + 2 < sizeof names - 8)
            snprintf(names + len, sizeof names - len, "%s%s", len ? ", " : "", name);
        else if (len && names[len - 1] != '.')
            snprintf(names + len, sizeof names - len, " ...");
    }
    if (missing)
        ith_trainer_say(v->hooks, "verify: %lld tensors got no gradient in the first step: %s",
                        (long long)missing, names);
    else
        ith_trainer_say(v->hooks, "verify: all %lld tensors got a gradient in the first step",
                        (long long)num_pieces(v));
    return ITH_OK;
}

static ith_status check_cleared(ith_verifier *v, ith_error *err)
{
    const view grad = {"gradient", v->t->model->grad, ITH_VIEW_ALL};
    for (int64_t i = 0; i < num_pieces(v); i++) {
        int64_t begin = 0, count = span_of(v, &grad, i, &begin);
        for (int64_t done = 0, n; done < count; done += n) {
            n = ith_min_i64(CHUNK_ELEMENTS, count - done);
            ITH_TRY(download(v, &grad, i, begin + done, n, v->chunk));
            const float *g = (const float *)(const void *)v->chunk;
            for (int64_t k = 0; k < n; k++)
                if (!(g[k] == 0.0f))
                    return ith_fail(err, ITH_ERR_RUN,
                                    "verify: update: gradient of %s: element %lld is %g after "
                                    "the update, not 0",
                                    v->t->model->pieces[i].hf_name, (long long)(begin + done + k),
                                    (double)g[k]);
        }
    }
    return ITH_OK;
}

/* n weights from element `first` of piece i, and their master. */
static ith_status check_rounded(const ith_verifier *v, int64_t i, int64_t first, int64_t n,
                                const char *weights, const float *master, ith_error *err)
{
    const ith_model *m = v->t->model;
    const ith_hf_piece *p = &m->pieces[i];
    const uint16_t *w = (const uint16_t *)(const void *)weights;
    bool is_f32 = m->params[p->param].is_f32;
    if (is_f32 && memcmp(weights, master, (size_t)n * 4) != 0)
        return ith_fail(err, ITH_ERR_RUN, "verify: update: %s: differs from its f32 master",
                        p->hf_name);
    for (int64_t k = 0; k < n && !is_f32; k++)
        if (w[k] != ith_f32_to_bf16(master[k]))
            return ith_fail(
                err, ITH_ERR_RUN,
                "verify: update: %s: element %lld is %g, its f32 master %.9g rounds to %g",
                p->hf_name, (long long)(first + k), (double)ith_bf16_to_f32(w[k]),
                (double)master[k], (double)ith_bf16_to_f32(ith_f32_to_bf16(master[k])));
    return ITH_OK;
}

static ith_status check_master(ith_verifier *v, ith_error *err)
{
    const view w = {"weight", v->t->model->w, ITH_VIEW_ALL},
               master = {"f32 master", v->t->step->master, ITH_VIEW_ALL};
    char *second = v->chunk + CHUNK_ELEMENTS * 4;
    if (!master.flat.ndim)
        return ITH_OK;
    for (int64_t i = 0; i < num_pieces(v); i++) {
        int64_t begin = 0, count = span_of(v, &master, i, &begin);
        for (int64_t done = 0, n; done < count; done += n) {
            n = ith_min_i64(CHUNK_ELEMENTS, count - done);
            ITH_TRY(download(v, &w, i, begin + done, n, v->chunk));
            ITH_TRY(download(v, &master, i, begin + done, n, second));
            ITH_TRY(check_rounded(v, i, begin + done, n, v->chunk,
                                  (const float *)(const void *)second, err));
        }
    }
    return ITH_OK;
}

/* Gradients become NaN: what the next step neither writes nor clears shows. */
static ith_status spoil_gradients(const ith_trainer *t, ith_error *err)
{
    ith_device *d = t->session.ctx.device;
    for (int64_t i = 0; i < t->model->num_params; i++) {
        ith_tensor grad = t->model->params[i].grad;
        ITH_TRY(d->fill(d, grad.data, 0xff, ith_tensor_bytes(grad), err));
    }
    return ITH_OK;
}

/* ---- faults, for tests ---- */

/* An element of the embedding becomes another one on this rank. */
static ith_status plant_weight(const ith_verifier *v, ith_error *err)
{
    ith_device *d = v->t->session.ctx.device;
    const ith_model *m = v->t->model;
    int64_t i = 0;
    if (!ith_fault_hit(ITH_FAULT_VERIFY))
        return ITH_OK;
    while (m->pieces[i].param != m->embed)
        i++;
    ITH_TRY(d->fill(d, ith_model_whole_piece(m, i).data, 0x3e, 2, err));
    return d->sync(d, err);
}

/* An element of the first gradient that is here becomes 1, where others have a copy, or NaN. */
static ith_status plant_gradient(const ith_verifier *v, const view *w, bool compared,
                                 ith_error *err)
{
    ith_ctx *ctx = &v->t->session.ctx;
    int64_t i = 0, first = 0;
    if (!ith_fault_hit(ITH_FAULT_VERIFY))
        return ITH_OK;
    while (span_of(v, w, i, &first) == 0)
        i++;
    float value = compared && holders_of(v, w, i) ? 1.0f : NAN;
    ITH_TRY(ctx->device->upload(ctx->device, ith_model_address(v->t->model, w->flat, i, first),
                                &value, sizeof value, err));
    return ctx->device->sync(ctx->device, err);
}

/* ---- points ---- */

ith_status ith_verifier_open(ith_verifier *v, ith_trainer *t, const ith_trainer_hooks *hooks,
                             ith_error *err)
{
    *v = (ith_verifier){.t = t, .hooks = hooks};
    int64_t n = num_pieces(v);
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc_zero((void **)&v->sums, (ITH_VERIFY_VIEWS + 2) * n, 8, "verify", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&v->present, n, 8, "verify", err));
    ITH_TRY_OUT(ith_alloc((void **)&v->chunk, CHUNK_ELEMENTS * 8, "verify", err));
    v->now = v->sums + ITH_VERIFY_VIEWS * n;
    v->theirs = v->now + n;
out:
    status = ith_trainer_agree(t, status, err);
    if (status != ITH_OK)
        ith_verifier_close(v);
    return status;
}

void ith_verifier_close(ith_verifier *v)
{
    ith_free(v->sums);
    ith_free(v->present);
    ith_free(v->chunk);
    *v = (ith_verifier){0};
}

ith_status ith_verify_begin(ith_verifier *v, ith_error *err)
{
    ITH_TRY(ith_trainer_agree(v->t, plant_weight(v, err), err));
    return ith_trainer_agree(v->t, compare_state(v, "begin", false, err), err);
}

ith_status ith_verify_backward(ith_verifier *v, ith_error *err)
{
    const view grad = {"gradient", v->t->model->grad, ITH_VIEW_ALL};
    finding bad = {-1, 0, 0};
    ith_status status = ith_blanks_close(&v->t->session.ctx);
    if (status == ITH_OK)
        status = plant_gradient(v, &grad, false, err);
    if (status == ITH_OK)
        status = look_at_gradients(v, &grad, &bad);
    ITH_TRY(ith_trainer_agree(v->t, status, err));
    return tell_finding(v, "backward", &bad, err);
}

ith_status ith_verify_reduce(ith_verifier *v, bool first, ith_error *err)
{
    const view grad = {"gradient", v->t->model->grad,
                       v->t->model->zero_stage == 1 ? ITH_VIEW_SLICE : ITH_VIEW_ALL};
    finding bad = {-1, 0, 0};
    ith_status status = plant_gradient(v, &grad, true, err);
    if (status == ITH_OK)
        status = look_at_gradients(v, &grad, &bad);
    ITH_TRY(ith_trainer_agree(v->t, status, err));
    ITH_TRY(tell_finding(v, "reduce", &bad, err));
    if (first)
        ITH_TRY(tell_missing(v, err));
    return ith_trainer_agree(v->t, compare_copies(v, "reduce", &grad, v->now, err), err);
}

ith_status ith_verify_update(ith_verifier *v, ith_error *err)
{
    ith_status status = ith_step_settle(v->t->step);
    if (status == ITH_OK)
        status = v->t->step->blanks.count ? spoil_gradients(v->t, err) : check_cleared(v, err);
    if (status == ITH_OK)
        status = check_master(v, err);
    if (status == ITH_OK)
        status = plant_weight(v, err);
    ITH_TRY(ith_trainer_agree(v->t, status, err));
    return ith_trainer_agree(v->t, compare_state(v, "update", true, err), err);
}
