/* verify.c - checks at points of a step. */
#include "train/verify.h"

#include <math.h>
#include <string.h>

#include "train/trainer_internal.h"

#define CHUNK_ELEMENTS ((int64_t)1 << 18)

/* What a check sees: n elements of piece i from `first` on, of one or two flat buffers. */
typedef ith_status (*check_chunk)(void *arg, const ith_hf_piece *piece, int64_t first, int64_t n,
                                  const char *a, const char *b, ith_error *err);

/* Calls check for all pieces. b may be absent. */
static ith_status walk(ith_trainer *t, ith_tensor a, ith_tensor b, check_chunk check, void *arg,
                       ith_error *err)
{
    char *mem = NULL;
    ITH_TRY(ith_alloc((void **)&mem, CHUNK_ELEMENTS * 8, "verify", err));
    ith_status status = ITH_OK;
    for (int64_t i = 0; i < t->model->num_pieces; i++) {
        const ith_hf_piece *p = &t->model->pieces[i];
        for (int64_t done = 0; done < p->count;) {
            int64_t n = ith_min_i64(CHUNK_ELEMENTS, p->count - done);
            ith_ctx *ctx = &t->session.ctx;
            char *second = mem + CHUNK_ELEMENTS * 4;
            ITH_TRY_OUT(ith_model_download(t->model, ctx, a, i, done, n, mem));
            if (b.ndim)
                ITH_TRY_OUT(ith_model_download(t->model, ctx, b, i, done, n, second));
            ITH_TRY_OUT(check(arg, p, done, n, mem, second, err));
            done += n;
        }
    }
out:
    ith_free(mem);
    return status;
}

typedef struct {
    const ith_trainer_hooks *hooks;
    bool first, told, seen; /* seen: the running piece has an element that is not zero */
    int64_t missing;
    char names[512];
} gradient_check;

static void note_missing(gradient_check *g, const char *name)
{
    size_t len = strlen(g->names), more = strlen(name) + 2;
    if (len + more < sizeof g->names - 8)
        snprintf(g->names + len, sizeof g->names - len, "%s%s", len ? ", " : "", name);
    else if (len && g->names[len - 1] != '.')
        snprintf(g->names + len, sizeof g->names - len, " ...");
    g->missing++;
}

static ith_status check_gradient(void *arg, const ith_hf_piece *piece, int64_t first, int64_t n,
                                 const char *a, const char *b, ith_error *err)
{
    (void)b;
    (void)err;
    gradient_check *g = arg;
    const float *grad = (const float *)(const void *)a;
    g->seen = first > 0 && g->seen;
    for (int64_t i = 0; i < n; i++) {
        g->seen = g->seen || grad[i] != 0.0f;
        if (!isfinite(grad[i]) && !g->told) {
            g->told = true;
            ith_trainer_say(g->hooks, "verify: gradient of %s: element %lld is %g", piece->hf_name,
                            (long long)(first + i), (double)grad[i]);
        }
    }
    if (g->first && !g->seen && first + n == piece->count)
        note_missing(g, piece->hf_name);
    return ITH_OK;
}

ith_status ith_verify_gradients(ith_trainer *t, bool first, const ith_trainer_hooks *hooks,
                                ith_error *err)
{
    gradient_check g = {.hooks = hooks, .first = first};
    ITH_TRY(walk(t, t->model->grad, ith_tensor_none(), check_gradient, &g, err));
    if (g.missing)
        ith_trainer_say(hooks, "verify: %lld tensors got no gradient in the first step: %s",
                        (long long)g.missing, g.names);
    else if (first)
        ith_trainer_say(hooks, "verify: all %lld tensors got a gradient in the first step",
                        (long long)t->model->num_pieces);
    return ITH_OK;
}

static ith_status check_cleared(void *arg, const ith_hf_piece *piece, int64_t first, int64_t n,
                                const char *a, const char *b, ith_error *err)
{
    (void)arg;
    (void)b;
    const float *grad = (const float *)(const void *)a;
    for (int64_t i = 0; i < n; i++)
        if (!(grad[i] == 0.0f))
            return ith_fail(err, ITH_ERR_RUN,
                            "verify: gradient of %s: element %lld is %g after the update, not 0",
                            piece->hf_name, (long long)(first + i), (double)grad[i]);
    return ITH_OK;
}

static ith_status check_rounded(void *arg, const ith_hf_piece *piece, int64_t first, int64_t n,
                                const char *a, const char *b, ith_error *err)
{
    const ith_model *model = arg;
    const uint16_t *w = (const uint16_t *)(const void *)a;
    const float *master = (const float *)(const void *)b;
    if (model->params[piece->param].is_f32) {
        if (memcmp(a, b, (size_t)n * 4) != 0)
            return ith_fail(err, ITH_ERR_RUN, "verify: %s: differs from its f32 master",
                            piece->hf_name);
        return ITH_OK;
    }
    for (int64_t i = 0; i < n; i++)
        if (w[i] != ith_f32_to_bf16(master[i]))
            return ith_fail(err, ITH_ERR_RUN,
                            "verify: %s: element %lld is %g, its f32 master %.9g rounds to %g",
                            piece->hf_name, (long long)(first + i), (double)ith_bf16_to_f32(w[i]),
                            (double)master[i], (double)ith_bf16_to_f32(ith_f32_to_bf16(master[i])));
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

ith_status ith_verify_update(ith_trainer *t, ith_error *err)
{
    if (t->step->blanks.count)
        ITH_TRY(spoil_gradients(t, err));
    else
        ITH_TRY(walk(t, t->model->grad, ith_tensor_none(), check_cleared, NULL, err));
    if (!t->step->master.ndim)
        return ITH_OK;
    return walk(t, t->model->w, t->step->master, check_rounded, t->model, err);
}
