/* golden_train.c - logits, losses, gradients, memory and AdamW of a batch against the reference. */
#include "golden.h"

#include <math.h>
#include <string.h>

#include "kernels/backend.h"

/* A model opened for a run on its part of a batch. */
typedef struct {
    ith_session session;
    ith_mesh *mesh;
    ith_model *model;
    ith_step *step;
    ith_micro_batch mine;
    int32_t *origin; /* of each of its tokens in the whole batch */
} bench;

static void open_bench(bench *b, const golden *g, const options *o, const ith_micro_batch *batch,
                       mask_kind mask, double max_grad_norm)
{
    memset(b, 0, sizeof *b);
    b->mine = deal(batch, o->mesh, &b->origin);
    if (batch->num_grids)
        add_media(g, batch, o->mesh, &b->mine);
    die_on(ith_session_open(&b->session, o->device, (int)o->mesh->world->local_rank, o->threads,
                            false, &golden_err));
    b->mesh = o->mesh;
    if (b->session.cuda && o->mesh->world_size > 1)
        die_on(ith_mesh_open_device(o->mesh, b->session.ctx.device, o->zero >= 2, &golden_err));
    if (o->reference)
        b->session.ctx.backend = ith_backend_ref();
    hook_routes(o, &b->session.ctx);
    int64_t positions = ith_max_i64(batch->num_tokens, GREEDY_CAPACITY);
    die_on(
        batch->num_grids
            ? ith_model_create_multimodal(&b->model, &g->config, o->dtype, positions, &golden_err)
            : ith_model_create(&b->model, &g->config, o->dtype, positions, &golden_err));
    ith_step_config c = {.mesh = o->mesh,
                         .zero_stage = o->zero,
                         .max_tokens = batch->num_tokens,
                         .vision = vision_limits(batch),
                         .max_docs = batch->num_docs,
                         .max_labels = ith_max_i64(batch->num_labels, 1),
                         .max_doc_tokens = batch->num_tokens,
                         .chunk_rows = o->chunk,
                         .training = true,
                         .fp32_master = true,
                         .keep = o->keep,
                         .max_grad_norm = (float)max_grad_norm,
                         .block = mask.block,
                         .noisy = batch->noisy != NULL,
                         .bidirectional = mask.bidirectional};
    die_on(ith_step_create(&b->step, b->model, &b->session.ctx, &c, false));
    die_on(ith_model_load(b->model, &b->session.ctx, g->weights, b->model->w, b->step->master));
    die_on(ith_model_refresh_weights(b->model, &b->session.ctx));
}

static void close_bench(bench *b)
{
    ith_step_destroy(b->step);
    ith_model_destroy(b->model);
    ith_mesh_close_device(b->mesh);
    ith_session_close(&b->session);
    free_batch(&b->mine);
    ith_free(b->origin);
}

/* Contents of a flat buffer as f32, whichever ranks have it: whole on every rank. */
static float *whole(bench *b, ith_tensor flat)
{
    ith_model *m = b->model;
    ith_shard *s = m->shard;
    ith_ctx *ctx = &b->session.ctx;
    if (!s)
        return floats(ctx, flat);
    bool is_shard = flat.shape[0] != m->num_elements;
    float *mine = floats(ctx, flat), *out = ith_calloc(m->num_elements, 4);
    for (int64_t block = 0; block < s->num_blocks; block++) {
        int64_t slice = ith_shard_slice_first(s, block),
                n = s->shard_first[block + 1] - s->shard_first[block];
        memcpy(out + slice, mine + (is_shard ? s->shard_first[block] : slice), (size_t)n * 4);
    }
    die_on(ith_comm_all_reduce(b->mesh->world, out, m->num_elements, ITH_F32, ITH_REDUCE_SUM,
                               &golden_err));
    ith_free(mine);
    return out;
}

/* What is of all tokens of the group -> this rank's. */
static void upload_own(ith_device *d, void *to, const int32_t *all, const ith_stretch *own)
{
    die_on(d->upload(d, to, all + own[0].first, own[0].count * 4, &golden_err));
    die_on(d->upload(d, (int32_t *)to + own[0].count, all + own[1].first, own[1].count * 4,
                     &golden_err));
}

/* Forward of the batch in the plan's memory that backward would use; logits of all rows against the
 * reference. */
static void check_logits(bench *b, const options *o, mask_kind mask, const ith_st_entry *want,
                         results *r, const char *what)
{
    const ith_micro_batch *batch = &b->mine;
    ith_stretch own[2];
    ith_cp_stretches(o->mesh, batch->num_tokens, own);
    ith_ctx *ctx = &b->session.ctx;
    ith_model *m = b->model;
    int64_t n = 0, v = m->config->vocab_size;
    ith_vision_buffers vision;
    /* Logits of all rows are not part of a training step: a plan of their own. */
    ith_plan *kept = ctx->plan, *plan = NULL;
    ith_tensor hidden = {0}, logits = {0}, rows = {0}, ids = {0}, pos = {0}, all_pos = {0},
               cu = {0}, noisy = {0}, slices = {0};
    int64_t list_size = ith_slice_list_size(batch->num_docs);
    int32_t *host_lists = ith_malloc(list_size * 4);
    ctx->plan = NULL;
    die_on(ith_plan_create(&plan, ctx->device, &golden_err));
    ctx->plan = plan;
    for (int pass = 0; pass < 2; pass++) {
        n = pass ? own[0].count + own[1].count : ith_div_ceil(batch->num_tokens, o->mesh->cp_size);
        int64_t marks[ITH_MEM_CLASSES];
        for (int c = 0; c < ITH_MEM_CLASSES; c++)
            marks[c] = ith_plan_mark(plan, (ith_mem_class)c);
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "ids", ITH_I32, 1, n, 1, 1, 1, &ids));
        int64_t axes = m->has_vision ? 3 : 1;
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "pos", ITH_I32, 1, axes * n, 1, 1, 1, &pos));
        die_on(ith_vision_buffers_place(&vision, m, ctx, vision_limits(batch)));
        ith_vision_batch media = ith_vision_buffers_largest(&vision, m);
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "rows", ITH_I32, 1, n, 1, 1, 1, &rows));
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "cu", ITH_I32, 1, batch->num_docs + 1, 1, 1,
                            1, &cu));
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "slices", ITH_I32, 1, list_size, 1, 1, 1,
                            &slices));
        if (batch->noisy) {
            die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "noisy", ITH_I32, 1, batch->num_docs, 1,
                                1, 1, &noisy));
            die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "pos of all", ITH_I32, 1,
                                batch->num_tokens, 1, 1, 1, &all_pos));
        }
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "hidden", m->dtype, 2, n,
                            m->config->hidden_size, 1, 1, &hidden));
        die_on(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "logits", m->dtype, 2, n, v, 1, 1, &logits));
        if (pass) {
            int32_t *all = ith_malloc(n * 4 + 4);
            for (int64_t i = 0; i < n; i++)
                all[i] = (int32_t)i;
            ith_device *d = ctx->device;
            upload_own(d, ids.data, batch->ids, own);
            for (int64_t axis = 0; axis < axes; axis++)
                upload_own(d, (int32_t *)pos.data + axis * n,
                           batch->mrope ? batch->mrope + axis * batch->num_tokens
                                        : batch->position_ids,
                           own);
            die_on(ith_vision_buffers_fill(&vision, m, ctx, batch, &media));
            die_on(d->upload(d, rows.data, all, n * 4, &golden_err));
            die_on(
                d->upload(d, cu.data, batch->cu_seqlens, (batch->num_docs + 1) * 4, &golden_err));
            if (batch->noisy) {
                die_on(d->upload(d, noisy.data, batch->noisy, batch->num_docs * 4, &golden_err));
                die_on(d->upload(d, all_pos.data, batch->position_ids, batch->num_tokens * 4,
                                 &golden_err));
            }
            die_on(d->sync(d, &golden_err));
            ith_free(all);
        }
        int64_t max_len = 0;
        for (int64_t i = 0; i < batch->num_docs; i++)
            max_len = ith_max_i64(max_len, batch->cu_seqlens[i + 1] - batch->cu_seqlens[i]);
        ith_batch dev = {.num_tokens = n,
                         .group_tokens = batch->num_tokens,
                         .ids = ids,
                         .position_ids = axes == 3 ? ith_tensor_2d(pos.data, ITH_I32, 3, n) : pos,
                         .vision = media,
                         .seqs = {.cu_seqlens = cu,
                                  .cu_host = batch->cu_seqlens,
                                  .num_docs = batch->num_docs,
                                  .max_len = max_len,
                                  .block = mask.block},
                         .bidirectional = mask.bidirectional};
        if (batch->noisy) {
            dev.seqs.noisy = noisy;
            dev.seqs.position = all_pos;
            dev.seqs.noisy_host = batch->noisy;
            dev.seqs.position_host = batch->position_ids;
        }
        int64_t taps = m->config->linear_conv_kernel_dim;
        if (m->passes_states && pass == 0)
            ith_slice_docs_largest(taps, n, batch->num_docs, max_len, slices, &dev.slice);
        if (m->passes_states && pass == 1) {
            ith_slice_docs_find(o->mesh, taps, batch->cu_seqlens, batch->num_docs, host_lists,
                                slices, &dev.slice);
            die_on(ctx->device->upload(ctx->device, slices.data, host_lists, list_size * 4,
                                       &golden_err));
        }
        die_on(m->family->forward(m, ctx, &dev, false, hidden));
        die_on(ith_model_logits(m, ctx, logits, hidden, rows));
        if (pass == 0) {
            for (int c = 0; c < ITH_MEM_CLASSES; c++)
                ith_plan_release(plan, (ith_mem_class)c, marks[c]);
            die_on(ith_plan_commit(plan, &golden_err));
        }
    }
    float *got = floats(ctx, logits);
    const float *from_run = o->draw ? true_values(o, got, n * v) : NULL;
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < n * v; i++) {
        int64_t at =
            i / v < own[0].count ? own[0].first + i / v : own[1].first + i / v - own[0].count;
        int64_t row = b->origin[at];
        if (row * v >= ith_st_numel(want)) /* diffusion: only the noisy rows */
            continue;
        float ref = 0;
        memcpy(&ref, from_run ? from_run + i : (const float *)want->data + row * v + i % v, 4);
        double diff = fabs((double)got[i] - (double)ref);
        worst = diff > worst || isnan(diff) ? diff : worst;
        largest = from_run ? fmax(largest, fabs((double)ref)) : largest;
    }
    for (int64_t i = 0; i < ith_st_numel(want) && !from_run; i++) {
        float ref = 0;
        memcpy(&ref, (const char *)want->data + i * 4, 4);
        largest = fmax(largest, fabs((double)ref));
    }
    record(r, largest > 0 ? worst / largest : worst, 2e-5, "%s logits", what);
    ith_free(got);
    ith_free(host_lists);
    ctx->plan = kept;
    ith_plan_destroy(plan);
}

static void check_pieces(bench *b, const options *o, bool other_weights, ith_tensor flat,
                         const char *dir, const char *sub, double bound, results *r)
{
    ith_buf path = {0};
    ith_st_reader *reader = NULL;
    ith_path_join(&path, dir, sub);
    die_on(ith_st_open(&reader, path.data, &golden_err));
    float *all = whole(b, flat);
    for (int64_t i = 0; i < b->model->num_pieces; i++) {
        const ith_hf_piece *p = &b->model->pieces[i];
        const ith_st_entry *want = NULL;
        die_on(ith_st_need(reader, p->hf_name, p->ndim, p->shape, NULL, &want, &golden_err));
        const float *got = all + b->model->params[p->param].first + p->first;
        double e = other_weights ? rel_norm(got, (const char *)true_values(o, got, p->count),
                                            ITH_F32, p->count)
                                 : rel_norm(got, want->data, want->dtype, p->count);
        record(r, e, bound, "%s %s", sub, p->hf_name);
    }
    ith_free(all);
    ith_st_close(reader);
    ith_buf_deinit(&path);
}

void check_batch(const golden *g, const options *o, const ith_micro_batch *batch, mask_kind mask,
                 const char *what, const ith_st_entry *logits, double loss, const char *grads,
                 results *r)
{
    bench b;
    open_bench(&b, g, o, batch, mask, 0);
    if (logits)
        check_logits(&b, o, mask, logits, r, what);
    if (isnan(loss)) {
        close_bench(&b);
        return;
    }
    ith_step_begin(b.step, batch->weight_sum);
    die_on(ith_step_micro(b.step, &b.mine));
    die_on(ith_step_reduce(b.step));
    double got = 0;
    ith_ctx *ctx = &b.session.ctx;
    die_on(
        ctx->device->download(ctx->device, &got, b.step->loss_sum.data, sizeof got, &golden_err));
    die_on(ctx->device->sync(ctx->device, &golden_err));
    loss = true_number(o, o->draw > 0, got, loss);
    record(r, fabs(got - loss) / fabs(loss), 1e-5, "%s loss", what);
    if (grads)
        check_pieces(&b, o, o->draw > 0, b.model->grad, g->dir, grads, 1e-4, r);
    record_scores(o, what, r);
    for (int c = 0; c < ITH_MEM_CLASSES;
         c++) /* the batch is as large as planned: no byte more, no byte less */
        record(r,
               (double)(c != ITH_MEM_OPTIMIZER && ith_plan_high(ctx->plan, (ith_mem_class)c) >
                                                      ith_plan_peak(ctx->plan, (ith_mem_class)c)),
               0, "planned memory of %s, %s", what, ith_mem_class_name((ith_mem_class)c));
    close_bench(&b);
}

static double number_or(const json_t *json, double otherwise)
{
    return json ? json_number_value(json) : otherwise;
}

/* Of all gradients together, of the running step. */
static void check_all_gradients(bench *b, const options *o, int step, results *r)
{
    float *all = whole(b, b->model->grad);
    int64_t n = b->model->num_elements;
    record(r, rel_norm(all, (const char *)true_values(o, all, n), ITH_F32, n), 0,
           "adamw step %d gradients", step);
    ith_free(all);
}

/* All runs go on from the weights of the float32 run, rounded (the moments stay their own): AdamW
 * makes a sign of a gradient near zero, so that runs in bf16 part at once, and the next step would
 * be compared with that of another model. */
static void meet(bench *b, const golden *g, const options *o)
{
    const ith_model *m = b->model;
    float *all = o->kind == RUN_LEADS ? whole(b, m->w) : NULL;
    for (int64_t i = 0; all && i < m->num_elements; i++)
        all[i] = ith_bf16_to_f32(ith_f32_to_bf16(all[i]));
    int64_t count = ith_st_count(g->weights);
    ith_st_entry *of_file = ith_malloc(count * (int64_t)sizeof *of_file);
    if (!of_file)
        exit(1);
    for (int64_t i = 0; i < count; i++)
        of_file[i] = *ith_st_at(g->weights, i);
    for (int64_t i = 0; i < m->num_pieces; i++) {
        const ith_hf_piece *p = &m->pieces[i];
        const ith_st_entry *e = NULL;
        die_on(ith_st_need(g->weights, p->hf_name, p->ndim, p->shape, NULL, &e, &golden_err));
        ith_st_entry *given = (ith_st_entry *)(uintptr_t)e;
        given->data =
            true_values(o, all ? all + m->params[p->param].first + p->first : NULL, p->count);
        given->dtype = ITH_F32;
        given->bytes = p->count * 4;
    }
    die_on(ith_model_load(b->model, &b->session.ctx, g->weights, m->w, b->step->master));
    die_on(ith_model_refresh_weights(b->model, &b->session.ctx));
    for (int64_t i = 0; i < count; i++)
        *(ith_st_entry *)(uintptr_t)ith_st_at(g->weights, i) = of_file[i];
    ith_free(of_file);
    ith_free(all);
}

void check_adamw(const golden *g, const options *o, const ith_micro_batch *batch, mask_kind mask,
                 results *r)
{
    const json_t *a = json_object_get(g->json, "adamw");
    ith_adamw_hyper h = {(float)number(a, "lr"),
                         (float)number_or(json_array_get(json_object_get(a, "betas"), 0), 0.9),
                         (float)number_or(json_array_get(json_object_get(a, "betas"), 1), 0.999),
                         (float)number_or(json_object_get(a, "eps"), 1e-8),
                         (float)number(a, "weight_decay"),
                         0};
    bench b;
    open_bench(&b, g, o, batch, mask, number(a, "max_grad_norm"));
    bool other = o->kind != RUN_ALONE; /* after the first step: see meet */
    for (int64_t i = 0; i < 3; i++) {
        ith_step_stats stats;
        h.step = i + 1;
        ith_step_begin(b.step, batch->weight_sum);
        die_on(ith_step_micro(b.step, &b.mine));
        die_on(ith_step_reduce(b.step));
        if (other)
            check_all_gradients(&b, o, (int)i + 1, r);
        die_on(ith_step_end(b.step, h, &stats));
        die_on(ith_step_settle(b.step));
        double loss = json_number_value(json_array_get(json_object_get(a, "losses"), (size_t)i));
        double norm =
            json_number_value(json_array_get(json_object_get(a, "grad_norms"), (size_t)i));
        loss = true_number(o, i ? other : o->draw > 0, stats.loss, loss);
        norm = true_number(o, i ? other : o->draw > 0, stats.grad_norm, norm);
        record(r, fabs(stats.grad_norm - norm) / norm, i ? 3e-3 : 1e-5, "adamw step %d grad norm",
               (int)i + 1);
        record(r, fabs(stats.loss - loss) / loss, i ? 3e-3 : 1e-5, "adamw step %d loss",
               (int)i + 1);
        if (other && i < 2)
            meet(&b, g, o);
    }
    /* A rank whose slice is one token shorter, whose group has no document, whose share of the
     * images or (diffusion: the last layer runs on those rows) of the labels is not the largest
     * possible, that passes states and has no document from end to end of its slice, or (in a ring)
     * no document from stretch to stretch, uses less.
     */
    bool full =
        o->mesh->dp_size == 1 && batch->num_tokens % o->mesh->cp_size == 0 &&
        (o->mesh->cp_size == 1 || !(ith_ring_size(o->mesh) > 1 || batch->num_grids || mask.block ||
                                    mask.bidirectional || b.model->passes_states));
    /* Where the head's workspace is the largest, fewer labels use less of it. */
    int64_t most_labels =
        ith_min_i64(batch->num_labels, ith_div_ceil(batch->num_tokens, o->mesh->cp_size));
    for (int c = 0; c < ITH_MEM_CLASSES; c++) {
        const ith_plan *plan = b.session.ctx.plan;
        int64_t planned = ith_plan_peak(plan, (ith_mem_class)c),
                high = ith_plan_high(plan, (ith_mem_class)c);
        bool equal = full && (c != ITH_MEM_WORKSPACE || b.mine.num_labels == most_labels);
        record(r, equal ? fabs((double)(planned - high)) : fmax(0, (double)(high - planned)), 0,
               "planned = used, %s", ith_mem_class_name((ith_mem_class)c));
    }
    check_pieces(&b, o, other, b.step->master.ndim ? b.step->master : b.model->w, g->dir, "after3",
                 1e-3, r);
    record_scores(o, "adamw", r);
    close_bench(&b);
}
