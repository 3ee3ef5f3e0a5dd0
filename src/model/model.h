/* model.h - a model as the trainer sees it: parameters, and the walk forwards and backwards.
 *
 * A family (qwen3.c) declares its parameters and the Hugging Face tensors they are made of, and
 * gives three walks: forward, backward, decode. Parameters live in flat buffers, one element range
 * each: w in the type of the step, grad in f32; the optimizer's buffers have the same layout
 * (train/optimizer.h).
 *
 * Memory. All tensors of a walk are pushed onto the plan of the ctx: saved activations on
 * ITH_MEM_ACTIVATIONS, what one layer needs for a moment on ITH_MEM_WORKSPACE. The same code counts
 * and runs. What a layer keeps from forward to backward is ith_keep; the rest is computed again.
 * The results do not depend on it, bit for bit. */
#ifndef ITH_MODEL_MODEL_H
#define ITH_MODEL_MODEL_H

#include "checkpoint/hf_config.h"
#include "checkpoint/safetensors.h"
#include "kernels/ops.h"
#include "parallel/cut_cache.h"
#include "parallel/delta_scan.h"
#include "parallel/shard.h"
#include "parallel/ring.h"

/* A parameter. Matrices that one product serves are one parameter: qkv = rows of q, k, v; gate_up =
 * rows of gate, up. */
typedef struct {
    const char *name; /* "layers.3.qkv" */
    int ndim;
    int64_t shape[3];
    int64_t first;      /* its first element in the flat buffers; a multiple of 64 */
    bool is_f32;        /* in f32 in a bf16 model (A_log): behind all others */
    bool is_frozen;     /* see ith_model_freeze */
    ith_tensor w, grad; /* views, set by ith_model_place; grad absent when not training */
} ith_param;

#define ITH_PIECE_DIMS 5

/* ITH_INIT_A_LOG: log of a uniform number in (0, 16). */
typedef enum { ITH_INIT_NORMAL, ITH_INIT_ZEROS, ITH_INIT_ONES, ITH_INIT_A_LOG } ith_init;

/* A Hugging Face tensor: elements [first, first + count) of a parameter, in the same order. */
typedef struct {
    const char *hf_name;
    int ndim;
    int64_t shape[ITH_PIECE_DIMS];
    int32_t param;
    int64_t first, count;
    bool is_norm;  /* initialised with ones */
    ith_init init; /* how, when it is no norm of ones */
} ith_hf_piece;

/* A vector that is read and never trained (the selection bias of a router): kept in f32 here, and
 * copied through in its own type when a model is written. */
typedef struct {
    const char *hf_name;
    int64_t first, count;
    bool may_lack; /* absent from the file: zeros */
} ith_hf_buffer;

/* What a layer keeps between forward and backward. */
typedef enum {
    ITH_KEEP_ALL, /* x, qkv, attention output and LSE, middle residual, gate_up: only cheap things
                     again */
    ITH_KEEP_ATTENTION, /* x, attention output and LSE: products again, attention not */
    ITH_KEEP_INPUT,     /* x: the whole layer again */
    ITH_KEEP_HOST /* x, in host memory: the whole layer again, and no activation on the device */
} ith_keep;

/* Saved tensors of one layer; absent ones are made again in backward. S = T * num_experts_per_tok.
 * Inside attention a rank of a context-parallel group has its share of the heads for all N tokens
 * of the group (parallel/ulysses.h), or of its ring slice (parallel/ring.h); alone, N = T and Ha =
 * Hq. */
typedef struct {
    ith_tensor x;          /* [T,D] residual stream at the layer's entry */
    ith_tensor qkv;        /* [T,(Hq+2Hkv)*Dh] before norm and RoPE */
    ith_tensor o, lse;     /* [N,Ha,Dh], [N,Ha] f32 */
    ith_tensor x2;         /* [T,D] residual stream after attention */
    ith_tensor gate_up;    /* [T,2I], experts: [S,2Im] */
    ith_tensor state, map; /* linear layers that pass states: see delta_scan.h */
    bool knows_state;
    ith_tensor shared_gate_up, shared_out, shared_gate; /* shared expert: [T,2Is], [T,D], [T,1] */
    ith_tensor probs, topk_w, topk_idx, offsets, source, row_of,
        expert_out; /* experts, see ops.h */
    /* what norms and RoPE make, when the layer keeps it: [T,D], [T], [T,Hq], [T,Hkv] .. */
    ith_tensor n1, rstd1, q_rstd, k_rstd, n2, rstd2;
    ith_qkv heads;           /* then also what attention reads, */
    ith_tensor o_tokens;     /* and, of a group, its output at the tokens [T,Hq,Dh] */
    int64_t mark, host_mark; /* of ITH_MEM_ACTIVATIONS and ITH_MEM_HOST at the layer's entry */
    void *host_x; /* ITH_KEEP_HOST: x in host memory; the view x is one of the staging buffers */
} ith_layer_acts;

/* Images and videos of a micro-batch on the device; see vision.h. Under context parallelism a rank
 * encodes its share of the frames, and its rows of the text read F features of any rank's. */
typedef struct {
    int64_t num_patches;                /* N of this rank; 0: none */
    int64_t group_features;             /* of the cp group; 0: nothing to do */
    const int64_t *encoded, *read;      /* [cp_size + 1] borders in the group's features, host */
    ith_tensor pixels;                  /* [N, patch width] act */
    ith_tensor corners, corner_weights; /* [N,4] I32, f32: of the position table */
    ith_tensor cos, sin;                /* [N, head_dim/2] act */
    ith_tensor order, order4;           /* 0, 1, 2, ..: [N] and [4N] I32 */
    ith_seqs segments;                  /* one for each temporal patch */
    ith_tensor rows;                    /* [F] I32 own rows of the text that features replace */
} ith_vision_batch;

/* A micro-batch on the device: packed rows without padding. Under context parallelism rows, ids and
 * positions are this rank's slice [T] of the N tokens of its group, and seqs describes all N. */
typedef struct {
    int64_t num_tokens;
    int64_t group_tokens; /* N */
    /* [T] I32; positions count from 0 in each document. With media: positions [3,T]. */
    ith_tensor ids, position_ids;
    ith_seqs seqs;
    bool bidirectional;      /* every row sees its whole document; else causal, by seqs' blocks */
    int64_t num_rows;        /* M: rows with a label */
    ith_tensor rows, labels; /* [M] I32: row, and its target (already shifted) */
    ith_tensor seeds; /* [M] f32: weight / C, C = sum of weights over the whole optimizer step */
    float share; /* sum of the seeds: this micro-batch's part of the step; scales the balancing loss
                  */
    ith_vision_batch vision;
    ith_slice_docs slice; /* of a model that passes states */
} ith_batch;

/* What generation keeps of past tokens: keys and values of the A attention layers; of the G linear
 * layers (Gated DeltaNet) the last inputs of the convolution and the state. Among the ranks of a cp
 * group keys and values are cut (parallel/cut_cache.h): a prefill is of one sequence, in slices of
 * the model's mesh; in any other call each rank has all new tokens. */
typedef struct {
    const ith_mesh *mesh;    /* of the group; NULL: one rank */
    int64_t first;           /* the sequence of a cut prefill */
    int64_t batch, capacity; /* capacity: rows of a sequence on this rank */
    ith_tensor k, v;         /* [A, B*C, Hkv, Dh] act */
    ith_tensor conv;         /* [G*B, K-1, conv width] act; absent when G = 0 */
    ith_tensor state;        /* [G*B, Hv, Dk, Dv] f32; absent when G = 0 */
    ith_tensor lengths;      /* I32 rows in use, the tokens of the running call included: [B]; of a
                                family that decodes whole blocks [B*n], one for each of n queries */
} ith_kv_cache;

typedef struct ith_model ith_model;

/* Parts of a model that keep their weights. */
typedef struct {
    bool vision_tower, merger, language_model;
} ith_model_parts;

typedef struct {
    ith_family family;
    /* Declares parameters and pieces (ith_model_add_*). */
    ith_status (*declare)(ith_model *model, ith_error *err);
    /* hidden [T,D] (before the final norm) for the batch; where the batch names labelled rows, a
     * family may leave the others as they are. training: saves what backward needs. */
    ith_status (*forward)(ith_model *model, ith_ctx *ctx, const ith_batch *batch, bool training,
                          ith_tensor hidden);
    /* Gradients of all parameters (+=) from dhidden [T,D], which is overwritten. Releases the saved
     * activations. */
    ith_status (*backward)(ith_model *model, ith_ctx *ctx, const ith_batch *batch,
                           ith_tensor dhidden);
    /* hidden [n,D] of n new tokens (B sequences, n/B each, seqs over them); appends to the cache.
     * rows: [n] I32 cache rows b*C + position (of a cut cache: its next row). prefill: the cache
     * held nothing before. */
    ith_status (*decode)(ith_model *model, ith_ctx *ctx, const ith_batch *batch,
                         ith_kv_cache *cache, ith_tensor rows, bool prefill, ith_tensor hidden);
} ith_model_family;

struct ith_model {
    const ith_hf_config *config; /* borrowed */
    const ith_model_family *family;
    const ith_mesh *mesh; /* borrowed; NULL: one rank */
    ith_mesh linear_mesh; /* of linear layers: mesh without a ring */
    ith_dtype dtype;      /* of w and activations: F32 or BF16 */
    ith_arena arena;      /* names */
    ith_param *params;
    ith_hf_piece *pieces;
    ith_hf_buffer *buffer_list;
    int64_t num_params, cap_params, num_pieces, cap_pieces, num_buffers, cap_buffers;
    int64_t num_buffer_elements;
    int64_t num_elements;            /* of the flat buffers, gaps included */
    int64_t num_act;                 /* the first of them, in the model's type; the rest is f32 */
    int64_t num_weights;             /* real parameters */
    int32_t embed, final_norm, head; /* parameter indices; head == embed when tied */
    int32_t *layer_param;            /* [L * ITH_LAYER_PARAMS], -1 absent */

    /* placed. What zero_stage cuts is this rank's shard of the flat layout: grad from 2 on, w in 3;
     * then the blocks that are no layer (embeddings, norm, vision tower, head) are whole in
     * `ends_*`, and layer l is for a while in window l % num_windows of `window_*`: one, or two
     * where a device exchanges a layer while it computes another. w_f32 is small and always whole.
     */
    ith_tensor w, grad; /* [num_act] act, [num_elements] f32; or [shard elements] */
    ith_tensor w_f32;   /* [num_elements - num_act] f32; absent when that is 0 */
    ith_tensor ends_w, ends_grad, window_w, window_grad;
    ith_shard *shard;      /* borrowed; NULL: nothing is cut */
    int zero_stage;        /* 0 without shard */
    int64_t unsettled;     /* the last so many marks of an update beside, see ith_model_settle */
    int64_t shared_layers; /* of a walk: whose products leave room for an update (ctx->shared) */
    int64_t num_windows, window_elements;
    int64_t gathered[2], last_gathered; /* layer in each window of w, -1: none; of the last call */
    ith_tensor buffers;                 /* [num_buffer_elements] f32; absent when there is none */
    int64_t max_positions;
    ith_tensor rope_cos, rope_sin; /* [max_positions, rd/2] act */

    bool has_vision;       /* the tower is part of the model (else its tensors only pass through) */
    int32_t *vision_param; /* parameter indices, see vision.c */
    ith_model_parts frozen;
    ith_tensor vision_x; /* saved inputs of its blocks */
    int64_t vision_mark;

    bool passes_states; /* linear layers of a cp group work on their tokens, else on their heads */

    float norm_offset; /* of the layer norms: 0, or 1 where weights are stored around zero */

    /* a walk */
    ith_keep *keep;    /* [L] */
    bool *keep_normed; /* [L] of layers that keep all: what norms and RoPE make, too (qwen3) */
    /* Load balancing loss of experts, coef * E * sum_e fraction[e]*mean_prob[e] over the rows of
     * all MoE layers; coef 0: off. Its gradient goes into the routers scaled by batch.share. */
    float aux_coef;
    ith_tensor expert_fraction,
        expert_mean_prob; /* [E] f32 of the running micro-batch; absent when off */
    int64_t mlp_tile;     /* rows of a dense MLP at a time; 0: all */
    ith_layer_acts *acts; /* [L] */
    ith_tensor offload;   /* [2,T,D] staging of layers that keep x on the host; absent: none does */
    int64_t offload_coming;   /* the layer whose x was sent for */
    ith_tensor stream, delta; /* [T,D] buffers */
    ith_tensor residual;      /* [T,D]: the stream between two layers is residual + delta; a view of
                                 stream or of x2 */
};

/* Indices into layer_param. */
enum {
    ITH_P_INPUT_NORM,
    ITH_P_QKV, /* all that one product makes of the normed input */
    ITH_P_Q_NORM,
    ITH_P_K_NORM,
    ITH_P_O,
    ITH_P_POST_NORM,
    ITH_P_GATE_UP, /* dense or [E,2Im,D] */
    ITH_P_DOWN,    /* dense or [E,D,Im] */
    ITH_P_ROUTER,
    ITH_P_ROUTER_BIAS,    /* a buffer */
    ITH_P_SHARED_GATE_UP, /* shared experts */
    ITH_P_SHARED_DOWN,
    ITH_P_SHARED_GATE,
    ITH_P_CONV, /* Gated DeltaNet; QKV and O are its projections */
    ITH_P_A_LOG,
    ITH_P_DT_BIAS,
    ITH_P_GDN_NORM,
    ITH_LAYER_PARAMS
};

/* Life cycle: create, place (counting and again for real), load, walk, destroy. config must outlive
 * the model. max_positions: rows of the RoPE table, at least the longest document. */
ith_status ith_model_create(ith_model **out, const ith_hf_config *config, ith_dtype dtype,
                            int64_t max_positions, ith_error *err);
/* The same with the vision tower, which the config must have. */
ith_status ith_model_create_multimodal(ith_model **out, const ith_hf_config *config,
                                       ith_dtype dtype, int64_t max_positions, ith_error *err);
void ith_model_destroy(ith_model *model);
/* Before place: these parts are not trained. Their gradients count for nothing; those of the tower
 * are not even computed. Fails when nothing is left. */
ith_status ith_model_freeze(ith_model *model, ith_model_parts parts, ith_error *err);
/* The next elements [*begin, *end) of the flat buffers, at or after `at`, that are trained; false:
 * there are none. */
bool ith_model_next_trained(const ith_model *model, int64_t at, int64_t *begin, int64_t *end);
/* Pushes weights, RoPE tables and (training) gradients; fills the tables when not counting. */
ith_status ith_model_place(ith_model *model, ith_ctx *ctx, bool training);
/* Reads every piece into one or two flat buffers of the model's layout (w and master, or m; the
 * second may be absent). Tied models ignore a stored lm_head. Experts are accepted per
 * expert, fused in either orientation, or stacked by projection. */
ith_status ith_model_load(ith_model *model, ith_ctx *ctx, const ith_st_reader *reader,
                          ith_tensor flat, ith_tensor second);
/* Where a piece lies in a model directory. Element (r, c) of it (c counts all but the first
 * dimension) is element first + r * row_stride + c * col_stride of the entry: its own tensor, or a
 * fused one of all experts, of which each expert has `block` elements. */
typedef struct {
    const ith_st_entry *entry;
    int64_t first, block, row_stride, col_stride;
    bool fused;
} ith_piece_source;
ith_status ith_model_find_source(const ith_hf_piece *piece, const ith_st_reader *reader,
                                 ith_piece_source *out, ith_error *err);
/* Its two parts: what is trained, and the buffers, which a training checkpoint does not hold. */
ith_status ith_model_load_pieces(ith_model *model, ith_ctx *ctx, const ith_st_reader *reader,
                                 ith_tensor flat, ith_tensor second);
ith_status ith_model_load_buffers(ith_model *model, ith_ctx *ctx, const ith_st_reader *reader);

/* ---- many ranks: model_shard.c ---- */

/* The ranks of its walks; NULL: one. */
void ith_model_set_mesh(ith_model *model, const ith_mesh *mesh);
/* set_mesh, and what zero_stage cuts is cut: before place. Fills *shard, which the caller deinits;
 * nothing to do for stage 0 or one rank. */
ith_status ith_model_cut(ith_model *model, const ith_mesh *mesh, int zero_stage, ith_shard *shard,
                         ith_error *err);

/* An update that runs beside (ITH_QUEUE_UPDATES) notes mark l behind what layer l has, and mark L
 * behind what follows the layers. settle: the main queue goes on behind mark `layer`, and so
 * behind all before it; nothing to wait for when no update is on its way. Walks settle their
 * layers, which also says whether the layer's products leave room. */
ith_status ith_model_settle(ith_model *model, ith_ctx *ctx, int64_t layer);
static inline ith_status ith_model_settle_all(ith_model *model, ith_ctx *ctx)
{
    return ith_model_settle(model, ctx, model->config->num_hidden_layers);
}
/* The verbs of a walk. Stage 3: the weights of layer l are gathered into its window, and where
 * there are two, those of the layer that the walk needs next begin to be. */
ith_status ith_model_gather_layer(ith_model *model, ith_ctx *ctx, int64_t layer);
/* Stages 2 and 3: gradients of layer l go to its window, which begins with zeros; close sums them
 * over the ranks into the shard; ith_model_reduce_grads sees that all of that is done. */
ith_status ith_model_open_grads(ith_model *model, ith_ctx *ctx, int64_t layer);
ith_status ith_model_close_grads(ith_model *model, ith_ctx *ctx, int64_t layer);
/* Once a step: what is not summed over all ranks yet. Stage 0: all of grad. Stage 1: the own slices
 * of grad are sums then. */
ith_status ith_model_reduce_grads(ith_model *model, ith_ctx *ctx);
/* After the shards of the weights changed: the whole copies follow. */
ith_status ith_model_refresh_weights(ith_model *model, ith_ctx *ctx);
/* Blocks of the flat layout: embeddings, layers, the rest of the model's type (norm, vision tower,
 * head), and what is f32 in a bf16 model; out: their borders, [blocks + 1]. */
int64_t ith_model_num_blocks(const ith_model *model);
void ith_model_blocks(const ith_model *model, int64_t *out, int64_t *chunk);
/* This rank's slice of a block's weights, wherever they are. */
ith_tensor ith_model_weight_slice(const ith_model *model, int64_t block);
/* For ith_model_place: buffers and views of stages 2 and 3. */
ith_status ith_model_place_sharded(ith_model *model, ith_ctx *ctx, bool training);
/* When all ranks write a buffer together: this rank's part of piece i, elements [*first, *first +
 * n) of it; returns n. Every element is in the part of one rank, which has it. */
int64_t ith_model_own_part(const ith_model *model, int64_t piece, int64_t *first);
/* What this rank has of piece i in a buffer, copies included: elements [*first, *first + n);
 * returns n. slice: of a whole buffer, only the slice that the shard gives this rank. */
int64_t ith_model_piece_here(const ith_model *model, ith_tensor flat, bool slice, int64_t piece,
                             int64_t *first);
/* The ranks that have the same of it; NULL: this one alone. */
ith_comm *ith_model_piece_holders(const ith_model *model, ith_tensor flat, bool slice,
                                  int64_t piece);
/* The weights of piece i, [count], where they are whole on this rank; else absent. */
ith_tensor ith_model_whole_piece(const ith_model *model, int64_t piece);
/* Element `first` of piece i in a buffer, which this rank has. */
void *ith_model_address(const ith_model *model, ith_tensor flat, int64_t piece, int64_t first);

/* Type of a piece in a flat buffer: f32 parameters of model->w lie in model->w_f32. */
ith_dtype ith_model_piece_dtype(const ith_model *model, ith_tensor flat, int64_t piece);
/* Contents of piece i of a flat buffer, elements [first, first + n) of the piece, in the buffer's
 * type, to host memory. Of a buffer that is cut, elements that this rank has. */
ith_status ith_model_download(const ith_model *model, ith_ctx *ctx, ith_tensor flat, int64_t piece,
                              int64_t first, int64_t n, void *out);

/* Rows of hidden [T,D] gathered into *x and normed into *xn [M,D], *rstd [M]: pushed onto the
 * workspace. */
ith_status ith_model_head_input(ith_model *model, ith_ctx *ctx, ith_tensor hidden, ith_tensor rows,
                                ith_tensor *x, ith_tensor *xn, ith_tensor *rstd);
/* logits [M,V] act of the rows: what generation reads. */
ith_status ith_model_logits(ith_model *model, ith_ctx *ctx, ith_tensor logits, ith_tensor hidden,
                            ith_tensor rows);

/* Pushes what generation keeps of `batch` sequences of `capacity` tokens. lengths and mesh are
 * the caller's. */
ith_status ith_model_place_cache(ith_model *model, ith_ctx *ctx, int64_t batch, int64_t capacity,
                                 ith_kv_cache *cache);

/* For families. The name formats take the layer number. */
ith_status ith_model_add_param(ith_model *model, const char *name, int ndim, int64_t d0, int64_t d1,
                               int64_t d2, int32_t *out, ith_error *err);
ith_status ith_model_add_piece(ith_model *model, const char *hf_name, int32_t param, int64_t first,
                               int ndim, int64_t d0, int64_t d1, int64_t d2, bool is_norm,
                               ith_error *err);
/* *out: index into buffer_list. */
ith_status ith_model_add_buffer(ith_model *model, const char *hf_name, int64_t count, bool may_lack,
                                int32_t *out, ith_error *err);
/* The parameter added last is kept in f32. */
void ith_model_set_f32(ith_model *model);
/* The piece added last is initialised like that. */
void ith_model_set_init(ith_model *model, ith_init init);
const char *ith_model_text(ith_model *model, const char *fmt, ...)
    ITH_PRINTF(2, 3); /* NULL: out of memory */

/* The parameter's view of a buffer whose element 0 is element `base` of the flat layout. */
ith_tensor ith_param_view(const ith_param *param, ith_tensor buffer, int64_t base);

static inline const ith_param *ith_layer_param(const ith_model *model, int64_t layer, int which)
{
    int32_t idx = model->layer_param[layer * ITH_LAYER_PARAMS + which];
    ITH_ASSERT(idx >= 0);
    return &model->params[idx];
}

static inline ith_tensor ith_layer_buffer(const ith_model *model, int64_t layer, int which)
{
    int32_t idx = model->layer_param[layer * ITH_LAYER_PARAMS + which];
    ITH_ASSERT(idx >= 0 && idx < model->num_buffers);
    const ith_hf_buffer *b = &model->buffer_list[idx];
    return ith_row_range(model->buffers, b->first, b->first + b->count);
}

extern const ith_model_family ith_family_qwen3;
extern const ith_model_family ith_family_qwen3_5;
extern const ith_model_family ith_family_llada2;

/* Random weights as transformers makes them: normal(0, initializer_range), norms 1. Keyed by (seed,
 * tensor name, element), so they do not depend on layout or order. Writes element [first, first +
 * n) of the piece as f32. */
void ith_model_init_piece(const ith_model *model, const ith_hf_piece *piece, uint64_t seed,
                          int64_t first, int64_t n, float *out);

/* cos and sin of RoPE for positions [0, n), n x rd/2 values each, rounded to dtype (spec: angle and
 * functions in f32 of exact products, then rounded to the activation type). Yarn and linear scaling
 * as config says. */
void ith_rope_table(const ith_rope_config *rope, int64_t head_dim, int64_t max_position_embeddings,
                    int64_t n, ith_dtype dtype, void *cos, void *sin);
int64_t ith_rope_dim(const ith_rope_config *rope, int64_t head_dim);

/* FLOP of one training step over documents of these lengths (3 x forward; attention causal half
 * counted once), and its parts. labelled: rows that reach the head. last_row: linear part of one
 * row behind the attention of the last layer. */
typedef struct {
    double linear, attention, head, total, last_row;
} ith_flops;
ith_flops ith_model_flops(const ith_model *model, const int32_t *cu_seqlens, int64_t num_docs,
                          int64_t labelled);
/* pairs: of a query with a key that it sees. */
ith_flops ith_config_flops(const ith_hf_config *config, double tokens, double pairs,
                           double labelled);

#endif
