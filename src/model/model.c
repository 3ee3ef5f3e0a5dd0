/* model.c - parameters: declared, placed in flat buffers, read from files.
 *
 * Invariants:
 *  1. Every element of a parameter belongs to exactly one piece.
 *  2. Flat offsets are multiples of PARAM_ALIGN elements; the gaps stay zero in every buffer.
 *  3. Parameters that stay f32 lie behind all others, so each type is one stretch. */
#include "model/model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/rng.h"
#include "model/delta_block.h"

#define PARAM_ALIGN 128 /* elements: 256 bytes of bf16 */
#define STAGING_ELEMENTS ((int64_t)1 << 20)

const char *ith_model_text(ith_model *model, const char *fmt, ...)
{
    char text[256];
    va_list args;
    va_start(args, fmt);
    int len = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    ITH_ASSERT(len >= 0 && len < (int)sizeof text);
    return ith_arena_strndup(&model->arena, text, len);
}

ith_status ith_model_add_param(ith_model *model, const char *name, int ndim, int64_t d0, int64_t d1,
                               int64_t d2, int32_t *out, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&model->params, &model->cap_params, model->num_params + 1,
                     sizeof *model->params, "parameters", err));
    if (!name)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for parameter names");
    ith_param *p = &model->params[model->num_params];
    memset(p, 0, sizeof *p);
    p->name = name;
    p->ndim = ndim;
    p->shape[0] = d0;
    p->shape[1] = ndim > 1 ? d1 : 1;
    p->shape[2] = ndim > 2 ? d2 : 1;
    model->num_weights += p->shape[0] * p->shape[1] * p->shape[2];
    *out = (int32_t)model->num_params++;
    return ITH_OK;
}

ith_status ith_model_add_piece(ith_model *model, const char *hf_name, int32_t param, int64_t first,
                               int ndim, int64_t d0, int64_t d1, int64_t d2, bool is_norm,
                               ith_error *err)
{
    ITH_TRY(ith_grow((void **)&model->pieces, &model->cap_pieces, model->num_pieces + 1,
                     sizeof *model->pieces, "tensor names", err));
    if (!hf_name)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for tensor names");
    ith_hf_piece piece = {hf_name, ndim,           {d0, ndim > 1 ? d1 : 1, ndim > 2 ? d2 : 1},
                          param,   first,          0,
                          is_norm, ITH_INIT_NORMAL};
    piece.count = piece.shape[0] * piece.shape[1] * piece.shape[2];
    const ith_param *p = &model->params[param];
    ITH_ASSERT(first >= 0 && first + piece.count <= p->shape[0] * p->shape[1] * p->shape[2]);
    model->pieces[model->num_pieces++] = piece;
    return ITH_OK;
}

void ith_model_set_f32(ith_model *model)
{
    model->params[model->num_params - 1].is_f32 = model->dtype != ITH_F32;
}

void ith_model_set_init(ith_model *model, ith_init init)
{
    model->pieces[model->num_pieces - 1].init = init;
}

/* Gives every parameter its place: those of the model's type, then those that stay f32. */
static void assign_places(ith_model *model)
{
    for (int f32 = 0; f32 < 2; f32++) {
        for (int64_t i = 0; i < model->num_params; i++) {
            ith_param *p = &model->params[i];
            if (p->is_f32 != (f32 != 0))
                continue;
            p->first = model->num_elements;
            model->num_elements =
                ith_round_up(p->first + p->shape[0] * p->shape[1] * p->shape[2], PARAM_ALIGN);
        }
        if (!f32)
            model->num_act = model->num_elements;
    }
}

static bool begins_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

ith_status ith_model_freeze(ith_model *model, ith_model_parts parts, ith_error *err)
{
    int64_t begin = 0, end = 0;
    model->frozen = parts;
    for (int64_t i = 0; i < model->num_params; i++) {
        ith_param *p = &model->params[i];
        p->is_frozen = begins_with(p->name, "model.visual.merger.") ? parts.merger
                       : begins_with(p->name, "model.visual.")      ? parts.vision_tower
                                                                    : parts.language_model;
    }
    return ith_model_next_trained(model, 0, &begin, &end)
               ? ITH_OK
               : ith_fail(err, ITH_ERR_USAGE,
                          "all parts of the model are frozen: nothing is trained");
}

bool ith_model_next_trained(const ith_model *model, int64_t at, int64_t *begin, int64_t *end)
{
    int64_t from = model->num_elements, to = model->num_elements;
    for (int64_t i = 0; i < model->num_params; i++) {
        const ith_param *p = &model->params[i];
        int64_t stop =
            ith_round_up(p->first + p->shape[0] * p->shape[1] * p->shape[2], PARAM_ALIGN);
        if (!p->is_frozen && stop > at)
            from = ith_min_i64(from, ith_max_i64(p->first, at));
    }
    for (int64_t i = 0; i < model->num_params; i++) {
        const ith_param *p = &model->params[i];
        if (p->is_frozen && p->first >= from && p->first < to)
            to = p->first;
    }
    *begin = from;
    *end = to;
    return from < model->num_elements;
}

static const ith_model_family *family_of(ith_family family)
{
    if (family == ITH_FAMILY_QWEN3_5 || family == ITH_FAMILY_QWEN3_5_MOE)
        return &ith_family_qwen3_5;
    return family == ITH_FAMILY_LLADA2 ? &ith_family_llada2 : &ith_family_qwen3;
}

ith_status ith_model_add_buffer(ith_model *model, const char *hf_name, int64_t count, bool may_lack,
                                int32_t *out, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&model->buffer_list, &model->cap_buffers, model->num_buffers + 1,
                     sizeof *model->buffer_list, "tensor names", err));
    if (!hf_name)
        return ith_fail(err, ITH_ERR_MEMORY, "out of memory for tensor names");
    ith_hf_buffer b = {hf_name, model->num_buffer_elements, count, may_lack};
    model->num_buffer_elements = ith_round_up(b.first + count, PARAM_ALIGN);
    *out = (int32_t)model->num_buffers;
    model->buffer_list[model->num_buffers++] = b;
    return ITH_OK;
}

static ith_status create(ith_model **out, const ith_hf_config *config, ith_dtype dtype,
                         int64_t max_positions, bool has_vision, ith_error *err)
{
    ITH_ASSERT(dtype == ITH_F32 || dtype == ITH_BF16);
    ith_status status = ITH_OK;
    ith_model *model = NULL;
    ITH_TRY(ith_alloc_zero((void **)&model, 1, sizeof *model, "model", err));
    ith_arena_init(&model->arena, 0);
    model->config = config;
    model->family = family_of(config->family);
    model->dtype = dtype;
    model->max_positions = max_positions;
    model->has_vision = has_vision;
    int64_t layers = config->num_hidden_layers;
    ITH_TRY_OUT(ith_alloc_zero((void **)&model->keep, layers, sizeof *model->keep, "layers", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&model->keep_normed, layers, sizeof *model->keep_normed,
                               "layers", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&model->acts, layers, sizeof *model->acts, "layers", err));
    ITH_TRY_OUT(ith_alloc_zero((void **)&model->layer_param, layers * ITH_LAYER_PARAMS,
                               sizeof(int32_t), "layers", err));
    for (int64_t i = 0; i < layers * ITH_LAYER_PARAMS; i++)
        model->layer_param[i] = -1;
    ITH_TRY_OUT(model->family->declare(model, err));
    assign_places(model);
    *out = model;
    return ITH_OK;
out:
    ith_model_destroy(model);
    return status;
}

ith_status ith_model_create(ith_model **out, const ith_hf_config *config, ith_dtype dtype,
                            int64_t max_positions, ith_error *err)
{
    return create(out, config, dtype, max_positions, false, err);
}

ith_status ith_model_create_multimodal(ith_model **out, const ith_hf_config *config,
                                       ith_dtype dtype, int64_t max_positions, ith_error *err)
{
    if (!config->vision.hidden_size)
        return ith_fail(err, ITH_ERR_UNSUPPORTED,
                        "model_type %s without vision_config sees nothing", config->model_type);
    return create(out, config, dtype, max_positions, true, err);
}

void ith_model_destroy(ith_model *model)
{
    if (!model)
        return;
    ith_free(model->params);
    ith_free(model->pieces);
    ith_free(model->buffer_list);
    ith_free(model->keep);
    ith_free(model->keep_normed);
    ith_free(model->acts);
    ith_free(model->layer_param);
    ith_free(model->vision_param);
    ith_arena_deinit(&model->arena);
    ith_free(model);
}

/* Only model->w is cut in two by type. */
static bool is_in_w_f32(const ith_model *model, const ith_param *p, ith_tensor flat)
{
    return p->first >= model->num_act && flat.data == model->w.data;
}

/* Element `at` of a parameter in a flat buffer. */
static char *address_in(const ith_model *model, const ith_param *p, ith_tensor flat, int64_t at,
                        ith_dtype *dtype)
{
    bool apart = is_in_w_f32(model, p, flat);
    *dtype = apart ? ITH_F32 : flat.dtype;
    int64_t first = p->first + at - (apart ? model->num_act : 0);
    return (char *)(apart ? model->w_f32.data : flat.data) + first * ith_dtype_bytes(*dtype);
}

ith_dtype ith_model_piece_dtype(const ith_model *model, ith_tensor flat, int64_t piece)
{
    ith_dtype dtype;
    address_in(model, &model->params[model->pieces[piece].param], flat, 0, &dtype);
    return dtype;
}

ith_tensor ith_param_view(const ith_param *p, ith_tensor flat, int64_t base)
{
    if (!flat.ndim)
        return flat;
    void *data = (char *)flat.data + (p->first - base) * ith_dtype_bytes(flat.dtype);
    if (p->ndim == 1)
        return ith_tensor_1d(data, flat.dtype, p->shape[0]);
    if (p->ndim == 2)
        return ith_tensor_2d(data, flat.dtype, p->shape[0], p->shape[1]);
    return ith_tensor_3d(data, flat.dtype, p->shape[0], p->shape[1], p->shape[2]);
}

static ith_status fill_rope(ith_model *model, ith_ctx *ctx)
{
    const ith_hf_config *c = model->config;
    int64_t bytes = ith_tensor_bytes(model->rope_cos);
    char *host = NULL;
    ith_status status = ITH_OK;
    ITH_TRY(ith_alloc((void **)&host, 2 * bytes, "RoPE table", ctx->err));
    ith_rope_table(&c->rope, c->head_dim, c->max_position_embeddings, model->max_positions,
                   model->dtype, host, host + bytes);
    ITH_TRY_OUT(ctx->device->upload(ctx->device, model->rope_cos.data, host, bytes, ctx->err));
    ITH_TRY_OUT(
        ctx->device->upload(ctx->device, model->rope_sin.data, host + bytes, bytes, ctx->err));
    ITH_TRY_OUT(ctx->device->sync(ctx->device, ctx->err));
out:
    ith_free(host);
    return status;
}

ith_status ith_model_place(ith_model *model, ith_ctx *ctx, bool training)
{
    int64_t half = ith_rope_dim(&model->config->rope, model->config->head_dim) / 2;
    const ith_shard *cut = model->shard;
    int64_t num_f32 = model->num_elements - model->num_act;
    int64_t shard = cut ? ith_shard_elements(cut) : 0;
    int64_t shard_w = cut ? cut->shard_first[cut->num_blocks - (num_f32 > 0)] : 0;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WEIGHTS, "weights", model->dtype, 1,
                         model->zero_stage >= 3 ? shard_w : model->num_act, 1, 1, 1, &model->w));
    model->w_f32 = ith_tensor_none();
    if (num_f32)
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WEIGHTS, "weights kept in f32", ITH_F32, 1, num_f32, 1, 1,
                             1, &model->w_f32));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WEIGHTS, "rope table", model->dtype, 2, model->max_positions,
                         half, 1, 1, &model->rope_cos));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WEIGHTS, "rope table", model->dtype, 2, model->max_positions,
                         half, 1, 1, &model->rope_sin));
    model->grad = ith_tensor_none();
    if (training)
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_GRADS, "gradients", ITH_F32, 1,
                             model->zero_stage >= 2 ? shard : model->num_elements, 1, 1, 1,
                             &model->grad));
    model->buffers = ith_tensor_none();
    if (model->num_buffers)
        ITH_TRY(ith_ctx_push(ctx, ITH_MEM_WEIGHTS, "buffers", ITH_F32, 1,
                             model->num_buffer_elements, 1, 1, 1, &model->buffers));
    for (int64_t i = 0; i < model->num_params; i++) {
        const ith_param *p = &model->params[i];
        bool apart = p->first >= model->num_act;
        model->params[i].w =
            ith_param_view(p, apart ? model->w_f32 : model->w, apart ? model->num_act : 0);
        model->params[i].grad = ith_param_view(p, model->grad, 0);
    }
    ITH_TRY(ith_model_place_sharded(model, ctx, training));
    if (ith_ctx_counting(ctx))
        return ITH_OK;
    ITH_TRY(ith_zero(ctx, model->w));
    if (num_f32)
        ITH_TRY(ith_zero(ctx, model->w_f32));
    if (training)
        ITH_TRY(ith_zero(ctx, model->grad));
    if (model->num_buffers)
        ITH_TRY(ith_zero(ctx, model->buffers));
    return fill_rope(model, ctx);
}

/* Fused experts of one layer: gate_up [E,2I,D] and down [E,D,I], or both with the last two
 * dimensions swapped. Of a square tensor the other one tells which. */
static ith_status is_swapped(const ith_hf_piece *piece, bool down, const ith_st_entry *fused,
                             const ith_st_entry *other, bool *out, ith_error *err)
{
    int64_t rows = piece->shape[0], cols = piece->shape[1], all_rows = down ? rows : 2 * rows;
    bool straight = fused->ndim == 3 && fused->shape[1] == all_rows && fused->shape[2] == cols;
    bool swapped = fused->ndim == 3 && fused->shape[1] == cols && fused->shape[2] == all_rows;
    if (!straight && !swapped) {
        char text[96];
        return ith_fail(err, ITH_ERR_FORMAT, "%s: shape %s, expected [num_experts, %lld, %lld]",
                        fused->name, ith_st_text(fused, text, sizeof text), (long long)all_rows,
                        (long long)cols);
    }
    *out = !straight;
    if (straight && swapped && other && other->ndim == 3)
        /* gate_up: D columns, down: I columns; swapped ones end with 2I and D */
        *out = other->shape[2] == (down ? 2 * cols : cols);
    return ITH_OK;
}

/* The expert's slice of STEM.PROJ [E, rows, cols]: all experts of one projection stacked, as
 * dFactory trains them. */
static ith_status find_merged(const ith_hf_piece *piece, const ith_st_reader *reader, int stem,
                              long long expert, ith_piece_source *out, bool *found, ith_error *err)
{
    char name[256], text[96];
    const char *proj = piece->hf_name + stem + 1; /* "3.gate_proj.weight" */
    proj += strcspn(proj, ".") + 1;
    snprintf(name, sizeof name, "%.*s.%.*s", stem, piece->hf_name, (int)strcspn(proj, "."), proj);
    const ith_st_entry *merged = ith_st_find(reader, name);
    if (!merged)
        return ITH_OK;
    int64_t rows = piece->shape[0], cols = piece->shape[1];
    if (merged->ndim != 3 || merged->shape[1] != rows || merged->shape[2] != cols ||
        expert >= merged->shape[0])
        return ith_fail(err, ITH_ERR_FORMAT, "%s: shape %s, expected [num_experts, %lld, %lld]",
                        name, ith_st_text(merged, text, sizeof text), (long long)rows,
                        (long long)cols);
    *out = (ith_piece_source){.entry = merged,
                              .first = expert * rows * cols,
                              .block = rows * cols,
                              .row_stride = cols,
                              .col_stride = 1,
                              .fused = true};
    *found = true;
    return ITH_OK;
}

static ith_status find_fused(const ith_hf_piece *piece, const char *experts,
                             const ith_st_reader *reader, ith_piece_source *out, ith_error *err)
{
    char name[256], other[256];
    long long expert = strtoll(experts + strlen(".mlp.experts."), NULL, 10);
    bool down = strstr(experts, ".down_proj.") != NULL, up = strstr(experts, ".up_proj.") != NULL;
    int stem = (int)(experts - piece->hf_name) + (int)strlen(".mlp.experts");
    snprintf(name, sizeof name, "%.*s.%s", stem, piece->hf_name,
             down ? "down_proj" : "gate_up_proj");
    snprintf(other, sizeof other, "%.*s.%s", stem, piece->hf_name,
             down ? "gate_up_proj" : "down_proj");
    const ith_st_entry *fused = ith_st_find(reader, name);
    if (!fused) {
        bool found = false;
        ITH_TRY(find_merged(piece, reader, stem, expert, out, &found, err));
        if (found)
            return ITH_OK;
    }
    if (!fused)
        return ith_fail(err, ITH_ERR_FORMAT, "tensor %s is missing, and so is the fused form %s",
                        piece->hf_name, name);
    bool swapped = false;
    ITH_TRY(is_swapped(piece, down, fused, ith_st_find(reader, other), &swapped, err));
    if (expert >= fused->shape[0])
        return ith_fail(err, ITH_ERR_FORMAT, "%s: %lld experts, expert %lld is needed", name,
                        (long long)fused->shape[0], expert);
    int64_t rows = piece->shape[0], cols = piece->shape[1], all_rows = down ? rows : 2 * rows;
    *out = (ith_piece_source){.entry = fused,
                              .first = expert * all_rows * cols,
                              .block = all_rows * cols,
                              .row_stride = swapped ? 1 : cols,
                              .col_stride = swapped ? all_rows : 1,
                              .fused = true};
    if (up)
        out->first += rows * out->row_stride;
    return ITH_OK;
}

/* Keys of config.json that set the shape of a tensor, for messages. */
static const char *keys_of_shape(const char *name)
{
    static const char *const keys[][2] = {
        {".linear_attn.", "linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, "
                          "linear_value_head_dim"},
        {"embed_tokens.", "vocab_size, hidden_size"},
        {"lm_head.", "vocab_size, hidden_size"},
        {".q_norm.", "head_dim"},
        {".k_norm.", "head_dim"},
        {"norm.", "hidden_size"},
        {".q_proj.", "num_attention_heads, head_dim, hidden_size"},
        {".o_proj.", "num_attention_heads, head_dim, hidden_size"},
        {".k_proj.", "num_key_value_heads, head_dim, hidden_size"},
        {".v_proj.", "num_key_value_heads, head_dim, hidden_size"},
        {".mlp.experts.", "moe_intermediate_size, hidden_size"},
        {".mlp.gate.", "num_experts, hidden_size"},
        {".shared_expert.", "shared_expert_intermediate_size, hidden_size"},
        {".mlp.", "intermediate_size, hidden_size"}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strstr(name, keys[i][0]))
            return keys[i][1];
    return NULL;
}

static ith_status find_by_name(const ith_hf_piece *piece, const ith_st_reader *reader,
                               ith_piece_source *out, ith_error *err)
{
    const char *experts = strstr(piece->hf_name, ".mlp.experts."),
               *proj = experts ? strrchr(experts, '.') : NULL;
    const ith_st_entry *entry = ith_st_find(reader, piece->hf_name);
    if (!entry && experts && strcmp(proj, ".weight") == 0)
        return find_fused(piece, experts, reader, out, err);
    if (!entry && strcmp(piece->hf_name, "lm_head.weight") == 0)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "tensor lm_head.weight is missing, and tie_word_embeddings of config.json "
                        "is false");
    ITH_TRY(ith_st_need(reader, piece->hf_name, piece->ndim, piece->shape,
                        keys_of_shape(piece->hf_name), &entry, err));
    *out = (ith_piece_source){.entry = entry,
                              .block = piece->count,
                              .row_stride = piece->count / piece->shape[0],
                              .col_stride = 1};
    return ITH_OK;
}

/* Text models are stored alone (model.) or inside one that sees (model.language_model.); some
 * writers put lm_head below model. */
static bool other_name(const char *name, char *out, size_t out_bytes)
{
    static const char *const pairs[][2] = {{"model.language_model.", "model."},
                                           {"model.", "model.language_model."},
                                           {"lm_head.", "model.lm_head."}};
    for (int i = 0; i < 3; i++) {
        size_t len = strlen(pairs[i][0]);
        if (strncmp(name, pairs[i][0], len) == 0 && strlen(name) + 32 < out_bytes) {
            snprintf(out, out_bytes, "%s%s", pairs[i][1], name + len);
            return true;
        }
    }
    return false;
}

ith_status ith_model_find_source(const ith_hf_piece *piece, const ith_st_reader *reader,
                                 ith_piece_source *out, ith_error *err)
{
    char name[256];
    ith_hf_piece other = *piece;
    ith_error unused = {0};
    if (!ith_st_find(reader, piece->hf_name) && other_name(piece->hf_name, name, sizeof name)) {
        other.hf_name = name;
        if (ith_st_find(reader, name))
            return find_by_name(&other, reader, out, err);
        if (find_by_name(&other, reader, out, &unused) == ITH_OK) /* fused experts */
            return ITH_OK;
    }
    return find_by_name(piece, reader, out, err);
}

/* Elements [first, first + n) of the piece out of its source, in the file's type. */
static void read_source(const ith_hf_piece *piece, const ith_piece_source *s, int64_t first,
                        int64_t n, char *out)
{
    int64_t size = ith_dtype_bytes(s->entry->dtype), cols = piece->count / piece->shape[0];
    const char *data = (const char *)s->entry->data + s->first * size;
    if (s->col_stride == 1) { /* rows of a fused tensor follow each other as well */
        memcpy(out, data + first * size, (size_t)(n * size));
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t row = (first + i) / cols, col = (first + i) % cols;
        memcpy(out + i * size, data + (row * s->row_stride + col * s->col_stride) * size,
               (size_t)size);
    }
}

/* The parameter lies in this buffer as far as this rank's shard has it. */
static bool is_cut(const ith_model *model, const ith_param *p, ith_tensor flat)
{
    return model->shard && flat.shape[0] != model->num_elements &&
           flat.shape[0] != model->num_act && !is_in_w_f32(model, p, flat);
}

static ith_status load_piece(ith_model *model, ith_ctx *ctx, const ith_hf_piece *piece,
                             const ith_st_reader *reader, ith_tensor flat, ith_tensor second,
                             char *staging)
{
    ith_piece_source source;
    ITH_TRY(ith_model_find_source(piece, reader, &source, ctx->err));
    ith_dtype dtype = source.entry->dtype;
    if (dtype != ITH_BF16 && dtype != ITH_F32 && dtype != ITH_F16 && dtype != ITH_F64)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED,
                        "tensor %s has type %s; BF16, F16, F32 and F64 can be trained",
                        source.entry->name, ith_dtype_name(dtype));
    const ith_param *param = &model->params[piece->param];
    char *raw = staging, *wide = staging + STAGING_ELEMENTS * 8;
    int64_t begin = 0, wanted = piece->count, unused = 0;
    if (is_cut(model, param, flat) && (!second.ndim || is_cut(model, param, second)))
        wanted =
            ith_shard_overlap(model->shard, param->first + piece->first, wanted, &begin, &unused);
    for (int64_t done = begin; done < begin + wanted;) {
        int64_t n = ith_min_i64(STAGING_ELEMENTS, begin + wanted - done);
        read_source(piece, &source, done, n, raw);
        ith_tensor targets[2] = {flat, second};
        for (int t = 0; t < 2; t++) {
            if (!targets[t].ndim)
                continue;
            if (is_cut(model, param, targets[t])) { /* the part that is here */
                int64_t size_to = ith_dtype_bytes(targets[t].dtype), from = 0, to = 0;
                int64_t at = param->first + piece->first + done;
                int64_t count = ith_shard_overlap(model->shard, at, n, &from, &to);
                if (count == 0)
                    continue;
                ith_convert(wide, targets[t].dtype, raw, dtype, n);
                ITH_TRY(ctx->device->upload(ctx->device, (char *)targets[t].data + to * size_to,
                                            wide + from * size_to, count * size_to, ctx->err));
            } else {
                ith_dtype to;
                char *target = address_in(model, param, targets[t], piece->first + done, &to);
                ith_convert(wide, to, raw, dtype, n);
                ITH_TRY(ctx->device->upload(ctx->device, target, wide, n * ith_dtype_bytes(to),
                                            ctx->err));
            }
            ITH_TRY(ctx->device->sync(ctx->device, ctx->err)); /* `wide` is reused */
        }
        done += n;
    }
    return ITH_OK;
}

static ith_status load_buffer(ith_model *model, ith_ctx *ctx, const ith_hf_buffer *b,
                              const ith_st_reader *reader)
{
    const ith_st_entry *entry = NULL;
    char *raw = NULL;
    ITH_TRY(ith_st_need(reader, b->hf_name, 1, &b->count, "num_experts", &entry, ctx->err));
    if (entry->dtype != ITH_F32 && entry->dtype != ITH_BF16 && entry->dtype != ITH_F16 &&
        entry->dtype != ITH_F64)
        return ith_fail(ctx->err, ITH_ERR_UNSUPPORTED, "tensor %s has type %s, not a float type",
                        entry->name, ith_dtype_name(entry->dtype));
    ITH_TRY(ith_alloc((void **)&raw, b->count * 12, "buffers", ctx->err));
    float *wide = (float *)(void *)(raw + b->count * 8);
    memcpy(raw, entry->data, (size_t)(b->count * ith_dtype_bytes(entry->dtype)));
    ith_convert(wide, ITH_F32, raw, entry->dtype, b->count);
    ith_status status = ctx->device->upload(ctx->device, (float *)model->buffers.data + b->first,
                                            wide, b->count * 4, ctx->err);
    if (status == ITH_OK)
        status = ctx->device->sync(ctx->device, ctx->err);
    ith_free(raw);
    return status;
}

ith_status ith_model_load_buffers(ith_model *model, ith_ctx *ctx, const ith_st_reader *reader)
{
    for (int64_t i = 0; i < model->num_buffers; i++) {
        const ith_hf_buffer *b = &model->buffer_list[i];
        if (!b->may_lack || ith_st_find(reader, b->hf_name))
            ITH_TRY(load_buffer(model, ctx, b, reader));
    }
    return ITH_OK;
}

ith_status ith_model_load_pieces(ith_model *model, ith_ctx *ctx, const ith_st_reader *reader,
                                 ith_tensor flat, ith_tensor second)
{
    char *staging = NULL;
    ITH_TRY(ith_alloc((void **)&staging, STAGING_ELEMENTS * 16, "staging", ctx->err));
    ith_status status = ith_zero(ctx, flat); /* the gaps between parameters */
    if (status == ITH_OK && second.ndim)
        status = ith_zero(ctx, second);
    if (status == ITH_OK && model->w_f32.ndim && flat.data == model->w.data)
        status = ith_zero(ctx, model->w_f32);
    for (int64_t i = 0; i < model->num_pieces && status == ITH_OK; i++)
        status = load_piece(model, ctx, &model->pieces[i], reader, flat, second, staging);
    ith_free(staging);
    return status;
}

ith_status ith_model_load(ith_model *model, ith_ctx *ctx, const ith_st_reader *reader,
                          ith_tensor flat, ith_tensor second)
{
    ITH_TRY(ith_model_load_pieces(model, ctx, reader, flat, second));
    return ith_model_load_buffers(model, ctx, reader);
}

int64_t ith_model_piece_here(const ith_model *model, ith_tensor flat, bool slice, int64_t piece,
                             int64_t *first)
{
    const ith_hf_piece *p = &model->pieces[piece];
    const ith_param *param = &model->params[p->param];
    int64_t unused = 0;
    *first = 0;
    if (!is_cut(model, param, flat) && !(slice && model->shard))
        return p->count;
    return ith_shard_overlap(model->shard, param->first + p->first, p->count, first, &unused);
}

ith_comm *ith_model_piece_holders(const ith_model *model, ith_tensor flat, bool slice,
                                  int64_t piece)
{
    const ith_hf_piece *p = &model->pieces[piece];
    const ith_param *param = &model->params[p->param];
    if (!model->mesh)
        return NULL;
    if (!is_cut(model, param, flat) && !(slice && model->shard))
        return model->mesh->world;
    return ith_shard_replicas(model->shard, param->first + p->first, p->count);
}

ith_tensor ith_model_whole_piece(const ith_model *model, int64_t piece)
{
    const ith_hf_piece *p = &model->pieces[piece];
    const ith_param *param = &model->params[p->param];
    ith_dtype dtype;
    if (!is_cut(model, param, model->w))
        return ith_tensor_1d(address_in(model, param, model->w, p->first, &dtype),
                             ith_model_piece_dtype(model, model->w, piece), p->count);
    const char *ends = model->ends_w.data, *at = param->w.data;
    if (!ends || at < ends || at >= ends + ith_tensor_bytes(model->ends_w))
        return ith_tensor_none();
    dtype = model->ends_w.dtype;
    return ith_tensor_1d((char *)param->w.data + p->first * ith_dtype_bytes(dtype), dtype,
                         p->count);
}

void *ith_model_address(const ith_model *model, ith_tensor flat, int64_t piece, int64_t first)
{
    const ith_hf_piece *p = &model->pieces[piece];
    const ith_param *param = &model->params[p->param];
    ith_dtype dtype;
    int64_t behind = 0, at = 0;
    if (!is_cut(model, param, flat))
        return address_in(model, param, flat, p->first + first, &dtype);
    int64_t here =
        ith_shard_overlap(model->shard, param->first + p->first + first, 1, &behind, &at);
    ITH_ASSERT(here == 1 && behind == 0);
    return (char *)flat.data + at * ith_dtype_bytes(flat.dtype);
}

ith_status ith_model_download(const ith_model *model, ith_ctx *ctx, ith_tensor flat, int64_t piece,
                              int64_t first, int64_t n, void *out)
{
    const ith_hf_piece *p = &model->pieces[piece];
    int64_t begin = 0, here = ith_model_piece_here(model, flat, false, piece, &begin);
    ITH_ASSERT(first >= begin && n >= 0 && first + n <= begin + here && here <= p->count);
    if (n == 0)
        return ITH_OK;
    const void *from = ith_model_address(model, flat, piece, first);
    int64_t size = ith_dtype_bytes(ith_model_piece_dtype(model, flat, piece));
    ITH_TRY(ctx->device->download(ctx->device, out, from, n * size, ctx->err));
    return ctx->device->sync(ctx->device, ctx->err);
}

void ith_model_init_piece(const ith_model *model, const ith_hf_piece *piece, uint64_t seed,
                          int64_t first, int64_t n, float *out)
{
    uint64_t stream = ith_rng_stream(piece->hf_name);
    double range = model->config->initializer_range;
    ith_init init = piece->is_norm ? ITH_INIT_ONES : piece->init;
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)(first + i);
        if (init == ITH_INIT_NORMAL)
            out[i] = (float)(range * ith_rng_normal(seed, stream, at));
        else if (init == ITH_INIT_A_LOG)
            out[i] = (float)log(16.0 * (1.0 - ith_rng_uniform(seed, stream, at)));
        else
            out[i] = init == ITH_INIT_ONES ? 1.0f : 0.0f;
    }
}

ith_status ith_model_place_cache(ith_model *model, ith_ctx *ctx, int64_t batch, int64_t capacity,
                                 ith_kv_cache *cache)
{
    const ith_hf_config *c = model->config;
    int64_t linear = 0, rows = batch * capacity;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        linear += c->layer_is_linear[l];
    cache->batch = batch;
    cache->capacity = capacity;
    int64_t layers = c->num_hidden_layers - linear;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "KV cache", model->dtype, 4, layers, rows,
                         c->num_key_value_heads, c->head_dim, &cache->k));
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "KV cache", model->dtype, 4, layers, rows,
                         c->num_key_value_heads, c->head_dim, &cache->v));
    cache->conv = cache->state = ith_tensor_none();
    if (!linear)
        return ITH_OK;
    ITH_TRY(ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "convolution inputs", model->dtype, 3,
                         linear * batch, c->linear_conv_kernel_dim - 1, ith_delta_conv_width(c), 1,
                         &cache->conv));
    return ith_ctx_push(ctx, ITH_MEM_ACTIVATIONS, "Gated DeltaNet state", ITH_F32, 4,
                        linear * batch, c->linear_num_value_heads, c->linear_key_head_dim,
                        c->linear_value_head_dim, &cache->state);
}

ith_flops ith_model_flops(const ith_model *model, const int32_t *cu_seqlens, int64_t num_docs,
                          int64_t labelled)
{
    double tokens = num_docs ? cu_seqlens[num_docs] : 0, pairs = 0;
    for (int64_t i = 0; i < num_docs; i++) {
        double len = cu_seqlens[i + 1] - cu_seqlens[i];
        pairs += len * len / 2.0;
    }
    return ith_config_flops(model->config, tokens, pairs, (double)labelled);
}

ith_flops ith_config_flops(const ith_hf_config *c, double tokens, double pairs, double labelled)
{
    double weights = 0, mlp = 0;
    double d = (double)c->hidden_size, q = (double)(c->num_attention_heads * c->head_dim);
    double kv = (double)(c->num_key_value_heads * c->head_dim),
           layers = (double)c->num_hidden_layers;
    double vd = (double)(c->linear_num_value_heads * c->linear_value_head_dim), recurrence = 0;
    double kd = (double)(c->linear_num_key_heads * c->linear_key_head_dim);
    /* a gate beside every query */
    bool gated = c->family == ITH_FAMILY_QWEN3_5 || c->family == ITH_FAMILY_QWEN3_5_MOE;
    for (int64_t l = 0; l < c->num_hidden_layers; l++) {
        if (c->layer_is_linear[l]) {
            weights += d * (2 * kd + 3 * vd + 2 * (double)c->linear_num_value_heads) +
                       (double)c->linear_conv_kernel_dim * (2 * kd + vd);
            recurrence += 7 * vd * (double)c->linear_key_head_dim * tokens;
            layers--;
        } else {
            weights += d * ((gated ? 2 : 1) * q + 2 * kv) + q * d;
        }
        mlp = c->layer_is_moe[l]
                  ? 3 * d *
                            (double)(c->moe_intermediate_size *
                                     (c->num_experts_per_tok + c->num_shared_experts)) +
                        d * (double)c->num_experts +
                        3 * d * (double)c->shared_expert_intermediate_size
                  : 3 * d * (double)c->intermediate_size;
        weights += mlp;
    }
    ith_flops f = {6 * weights * tokens, 3 * 4 * pairs * q * layers + 3 * recurrence,
                   6 * d * (double)c->vocab_size * labelled, 0, 6 * (q * d + mlp)};
    f.total = f.linear + f.attention + f.head;
    return f;
}
