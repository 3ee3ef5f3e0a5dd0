/* model_shard.c - a model whose buffers are cut among the ranks (parallel/shard.h): the gather and
 * release verbs of the walks, sums of gradients, and what each rank writes.
 *
 * Invariants:
 *  1. Every rank calls these in the same order.
 *  2. Parameters of a block that is not whole are bound to its window only between its verbs. */
#include "model/model.h"

#include <string.h>

typedef ith_tensor T;

/* ---- blocks ----
 * Embeddings, the layers, the rest, the f32 tail. With expert parallelism a layer of experts is
 * four blocks: what is before its experts, gate_up, down, and what is behind them. */

static bool has_expert_blocks(const ith_model *m, int64_t l)
{
    return m->config->layer_is_moe[l] && ith_ep_size(m->mesh) > 1;
}

/* First block of layer l; of l = number of layers, the one behind them. */
static int64_t layer_block(const ith_model *m, int64_t l)
{
    int64_t block = 1 + l;
    for (int64_t i = 0; i < l; i++)
        block += has_expert_blocks(m, i) ? 3 : 0;
    return block;
}

static int64_t rest_block(const ith_model *m)
{
    return layer_block(m, m->config->num_hidden_layers);
}

int64_t ith_model_num_blocks(const ith_model *m)
{
    return rest_block(m) + 1 + (m->num_elements > m->num_act);
}

/* No layer: embeddings, the rest, the f32 tail. The last two follow each other. */
static bool is_end(const ith_model *m, int64_t block)
{
    return block == 0 || block >= rest_block(m);
}

/* What is f32 in a bf16 model: its weights lie in w_f32. */
static bool is_tail(const ith_model *m, int64_t block)
{
    return block == rest_block(m) + 1;
}

/* Borders of the experts of a layer, and what an ep rank has of them. */
static void expert_blocks(const ith_model *m, int64_t l, int64_t *first, int64_t *chunk)
{
    const ith_param *p[] = {ith_layer_param(m, l, ITH_P_GATE_UP),
                            ith_layer_param(m, l, ITH_P_DOWN)};
    int64_t end = m->num_act;
    for (int64_t i = 0; i < m->num_params; i++) /* what follows down */
        if (m->params[i].first > p[1]->first)
            end = ith_min_i64(end, m->params[i].first);
    ITH_ASSERT(p[0]->first < p[1]->first);
    first[1] = p[0]->first;
    first[2] = p[1]->first;
    first[3] = end;
    for (int i = 0; i < 2; i++)
        chunk[1 + i] = p[i]->shape[0] / m->mesh->ep_size * p[i]->shape[1] * p[i]->shape[2];
}

void ith_model_blocks(const ith_model *m, int64_t *out, int64_t *chunk)
{
    int64_t layers = m->config->num_hidden_layers, rest = rest_block(m);
    memset(chunk, 0, (size_t)ith_model_num_blocks(m) * sizeof *chunk);
    out[0] = 0;
    for (int64_t l = 0; l < layers; l++) {
        int64_t first = m->num_elements, block = layer_block(m, l);
        for (int k = 0; k < ITH_LAYER_PARAMS; k++) {
            int32_t p = m->layer_param[l * ITH_LAYER_PARAMS + k];
            if (p >= 0 && k != ITH_P_ROUTER_BIAS) /* a buffer */
                first = ith_min_i64(first, m->params[p].first);
        }
        out[block] = first;
        ITH_ASSERT(first >= out[block - 1] && first > 0);
        if (has_expert_blocks(m, l))
            expert_blocks(m, l, out + block, chunk + block);
    }
    out[rest] = m->params[m->final_norm].first;
    out[rest + 1] = m->num_act;
    out[ith_model_num_blocks(m)] = m->num_elements;
    ITH_ASSERT(out[rest] >= out[rest - 1] && m->num_act > out[rest]);
}

void ith_model_set_mesh(ith_model *m, const ith_mesh *mesh)
{
    m->mesh = mesh;
    if (!mesh)
        return;
    m->linear_mesh = *mesh;
    ith_mesh_set_ulysses(&m->linear_mesh, mesh->cp_size, false);
}

ith_status ith_model_cut(ith_model *m, const ith_mesh *mesh, int zero_stage, ith_shard *shard,
                         ith_error *err)
{
    int64_t num_blocks, *blocks = NULL;
    ITH_ASSERT(ith_ep_size(mesh) == 1 || zero_stage == 3);
    ith_model_set_mesh(m, mesh);
    m->shard = NULL;
    m->zero_stage = 0;
    if (zero_stage == 0 || ith_world_size(mesh) == 1)
        return ITH_OK;
    num_blocks = ith_model_num_blocks(m);
    ITH_TRY(ith_alloc_zero((void **)&blocks, 2 * num_blocks + 1, sizeof *blocks, "blocks", err));
    ith_model_blocks(m, blocks, blocks + num_blocks + 1);
    ith_status status =
        ith_shard_init(shard, mesh, blocks, blocks + num_blocks + 1, num_blocks, err);
    ith_free(blocks);
    if (status != ITH_OK)
        return status;
    m->shard = shard;
    m->zero_stage = zero_stage;
    return ITH_OK;
}

static int64_t block_elements(const ith_model *m, int64_t block)
{
    return m->shard->block_first[block + 1] - m->shard->block_first[block];
}

/* A block that is no layer in a buffer of all of them. */
static T end_of(const ith_model *m, T ends, int64_t block)
{
    const int64_t *first = m->shard->block_first;
    int64_t at = block == 0 ? 0 : first[1] + first[block] - first[rest_block(m)];
    return ith_row_range(ends, at, at + block_elements(m, block));
}

static int64_t window_idx(const ith_model *m, int64_t layer)
{
    return layer % m->num_windows;
}

static void forget_gathered(ith_model *m)
{
    m->gathered[0] = m->gathered[1] = m->last_gathered = -1;
}

/* A block of a layer in the window of the whole layer. */
static T window_of(const ith_model *m, T window, int64_t block)
{
    int64_t at = 0, l = 0;
    while (layer_block(m, l + 1) <= block)
        l++;
    at = window_idx(m, l) * m->window_elements;
    for (int64_t b = layer_block(m, l); b < block; b++)
        at += ith_shard_window_elements(m->shard, b);
    return ith_row_range(window, at, at + ith_shard_window_elements(m->shard, block));
}

static int64_t window_elements(const ith_model *m, int64_t layer)
{
    int64_t n = 0;
    for (int64_t b = layer_block(m, layer); b < layer_block(m, layer + 1); b++)
        n += ith_shard_window_elements(m->shard, b);
    return n;
}

/* Parameters of a block to its window; experts to those of this rank. */
static void bind(ith_model *m, int64_t block, const T *w, const T *grad)
{
    int64_t first = m->shard->block_first[block], end = m->shard->block_first[block + 1];
    for (int64_t i = 0; i < m->num_params; i++) {
        ith_param *p = &m->params[i], own = *p;
        if (p->first < first || p->first >= end)
            continue;
        if (m->shard->chunk[block])
            own.shape[0] /= m->mesh->ep_size;
        if (w)
            p->w = ith_param_view(&own, *w, first);
        if (grad)
            p->grad = ith_param_view(&own, *grad, first);
    }
}

ith_status ith_model_place_sharded(ith_model *m, ith_ctx *ctx, bool training)
{
    int64_t blocks = ith_model_num_blocks(m), largest = 0, act_ends = 0, ends = 0;
    m->ends_w = m->ends_grad = m->window_w = m->window_grad = ith_tensor_none();
    if (m->zero_stage < 2)
        return ITH_OK;
    for (int64_t l = 0; l < m->config->num_hidden_layers; l++)
        largest = ith_max_i64(largest, window_elements(m, l));
    m->num_windows = ctx->device == ith_device_cpu() ? 1 : 2;
    m->window_elements = largest;
    forget_gathered(m);
    largest *= m->num_windows;
    for (int64_t b = 0; b < blocks; b++) {
        ends += is_end(m, b) ? block_elements(m, b) : 0;
        act_ends += is_end(m, b) && !is_tail(m, b) ? block_elements(m, b) : 0;
    }
    if (m->zero_stage >= 3) {
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WEIGHTS, "embeddings and head", m->dtype, 1, act_ends, 1,
                             1, 1, &m->ends_w));
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WEIGHTS, "gathered layer", m->dtype, 1, largest, 1, 1, 1,
                             &m->window_w));
    }
    if (training) {
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_GRADS, "gradients of embeddings and head", ITH_F32, 1,
                             ends, 1, 1, 1, &m->ends_grad));
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_GRADS, "gradients of a layer", ITH_F32, 1, largest, 1, 1,
                             1, &m->window_grad));
        ITH_TRY(ith_zero(ctx, m->ends_grad));
    }
    for (int64_t b = 0; b < blocks; b++) {
        bool binds_w = m->ends_w.ndim && !is_tail(m, b);
        T w = !binds_w       ? ith_tensor_none()
              : is_end(m, b) ? end_of(m, m->ends_w, b)
                             : window_of(m, m->window_w, b);
        T grad = !m->ends_grad.ndim ? m->ends_grad
                 : is_end(m, b)     ? end_of(m, m->ends_grad, b)
                                    : window_of(m, m->window_grad, b);
        bind(m, b, binds_w ? &w : NULL, m->ends_grad.ndim ? &grad : NULL);
    }
    return ITH_OK;
}

/* whole <- the slices of all ranks; whole holds exactly the window. */
static ith_status gather_block(ith_model *m, ith_ctx *ctx, int64_t block, T whole, bool beside)
{
    return ith_shard_gather(m->shard, ctx, block, whole, ith_shard_slice(m->shard, block, m->w),
                            beside);
}

/* Begins to fill the layer's window, which nobody reads any more. */
static ith_status fill_window(ith_model *m, ith_ctx *ctx, int64_t layer)
{
    int64_t w = window_idx(m, layer);
    if (m->gathered[w] == layer)
        return ITH_OK;
    m->gathered[w] = layer;
    ITH_TRY(ith_mesh_fork(m->mesh, ctx));
    for (int64_t b = layer_block(m, layer); b < layer_block(m, layer + 1); b++)
        ITH_TRY(gather_block(m, ctx, b, window_of(m, m->window_w, b), true));
    return ith_mesh_note(m->mesh, ctx, (int)(ITH_MARK_WEIGHTS + w));
}

ith_status ith_model_settle(ith_model *m, ith_ctx *ctx, int64_t layer)
{
    int64_t marks = m->config->num_hidden_layers + 1;
    ITH_ASSERT(layer < marks);
    ctx->shared = layer < m->shared_layers;
    if (layer < marks - m->unsettled || ith_ctx_counting(ctx))
        return ITH_OK;
    m->unsettled = marks - 1 - layer;
    return ctx->device->await(ctx->device, ITH_QUEUE_UPDATES, (int)layer, ctx->err);
}

ith_status ith_model_gather_layer(ith_model *m, ith_ctx *ctx, int64_t layer)
{
    ITH_TRY(ith_model_settle(m, ctx, layer));
    int64_t last = m->config->num_hidden_layers - 1;
    if (m->zero_stage < 3 || ith_ctx_counting(ctx))
        return ITH_OK;
    bool up = layer == 0 || (layer < last && layer > m->last_gathered);
    int64_t next = layer + (up ? 1 : -1);
    m->last_gathered = layer;
    ITH_TRY(fill_window(m, ctx, layer));
    ITH_TRY(ith_mesh_await(m->mesh, ctx, (int)(ITH_MARK_WEIGHTS + window_idx(m, layer))));
    return m->num_windows > 1 && next >= 0 && next <= last ? fill_window(m, ctx, next) : ITH_OK;
}

ith_status ith_model_open_grads(ith_model *m, ith_ctx *ctx, int64_t layer)
{
    if (m->zero_stage < 2)
        return ITH_OK;
    int64_t first = window_idx(m, layer) * m->window_elements;
    ITH_TRY(ith_mesh_await(m->mesh, ctx, (int)(ITH_MARK_GRADS + window_idx(m, layer))));
    return ith_zero(ctx, ith_row_range(m->window_grad, first, first + window_elements(m, layer)));
}

/* The own slice of the block's sum is added to the shard. */
static ith_status reduce_into_shard(ith_model *m, ith_ctx *ctx, int64_t block, T grad, bool beside)
{
    return ith_shard_reduce(m->shard, ctx, block, grad, ith_shard_slice(m->shard, block, m->grad),
                            beside);
}

ith_status ith_model_close_grads(ith_model *m, ith_ctx *ctx, int64_t layer)
{
    if (m->zero_stage < 2)
        return ITH_OK;
    ITH_TRY(ith_mesh_fork(m->mesh, ctx));
    for (int64_t b = layer_block(m, layer); b < layer_block(m, layer + 1); b++)
        ITH_TRY(reduce_into_shard(m, ctx, b, window_of(m, m->window_grad, b), true));
    return ith_mesh_note(m->mesh, ctx, (int)(ITH_MARK_GRADS + window_idx(m, layer)));
}

ith_status ith_model_reduce_grads(ith_model *m, ith_ctx *ctx)
{
    if (m->zero_stage == 0)
        return ith_mesh_sum_world(m->mesh, ctx, m->grad);
    for (int64_t w = 0; m->zero_stage >= 2 && w < m->num_windows; w++)
        ITH_TRY(ith_mesh_await(m->mesh, ctx, (int)(ITH_MARK_GRADS + w)));
    for (int64_t b = 0; b < ith_model_num_blocks(m); b++) {
        int64_t first = m->shard->block_first[b], end = m->shard->block_first[b + 1];
        if (m->zero_stage == 1)
            ITH_TRY(ith_shard_reduce(m->shard, ctx, b, ith_row_range(m->grad, first, end),
                                     ith_tensor_none(), false));
        else if (is_end(m, b))
            ITH_TRY(reduce_into_shard(m, ctx, b, end_of(m, m->ends_grad, b), false));
    }
    return m->zero_stage == 1 ? ITH_OK : ith_zero(ctx, m->ends_grad);
}

ith_tensor ith_model_weight_slice(const ith_model *m, int64_t block)
{
    if (!is_tail(m, block))
        return ith_shard_slice(m->shard, block, m->w);
    int64_t first = ith_shard_slice_first(m->shard, block) - m->num_act;
    int64_t n = m->shard->shard_first[block + 1] - m->shard->shard_first[block];
    return ith_row_range(m->w_f32, first, first + n);
}

/* t is whole: the own slice is in place. */
static ith_status gather_whole(ith_model *m, ith_ctx *ctx, int64_t block, T t)
{
    return ith_shard_gather(m->shard, ctx, block, t, ith_tensor_none(), false);
}

ith_status ith_model_refresh_weights(ith_model *m, ith_ctx *ctx)
{
    forget_gathered(m);
    for (int64_t b = 0; m->zero_stage > 0 && b < ith_model_num_blocks(m); b++) {
        int64_t first = m->shard->block_first[b], end = m->shard->block_first[b + 1];
        if (is_tail(m, b))
            ITH_TRY(gather_whole(m, ctx, b, m->w_f32));
        else if (m->zero_stage < 3)
            ITH_TRY(gather_whole(m, ctx, b, ith_row_range(m->w, first, end)));
        else if (is_end(m, b))
            ITH_TRY(gather_block(m, ctx, b, end_of(m, m->ends_w, b), false));
    }
    return ITH_OK;
}

/* ---- what this rank writes ---- */

/* First element of rank r's part of what all have whole. */
static int64_t part_first(const ith_model *m, int64_t r)
{
    int64_t ranks = ith_world_size(m->mesh), n = m->num_elements;
    return n / ranks * r + ith_min_i64(r, n % ranks);
}

int64_t ith_model_own_part(const ith_model *m, int64_t piece, int64_t *first)
{
    const ith_hf_piece *p = &m->pieces[piece];
    int64_t at = m->params[p->param].first + p->first, unused = 0;
    *first = 0;
    if (m->shard)
        return ith_shard_writes(m->shard, at, p->count)
                   ? ith_shard_overlap(m->shard, at, p->count, first, &unused)
                   : 0;
    int64_t rank = m->mesh && m->mesh->world ? m->mesh->world->rank : 0;
    int64_t begin = ith_max_i64(at, part_first(m, rank)),
            end = ith_min_i64(at + p->count, part_first(m, rank + 1));
    *first = begin - at;
    return ith_max_i64(0, end - begin);
}
