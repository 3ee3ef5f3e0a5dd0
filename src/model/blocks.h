/* blocks.h - the parts of a decoder layer that families share (attention_block.c, expert_mlp.c,
 * offload.c, qwen3.c) and the walk around it (walk.c); delta_block.h has another mixer.
 *
 * They read m->norm_offset and the usual entries of layer_param, and work on m->acts[l]. */
#ifndef ITH_MODEL_BLOCKS_H
#define ITH_MODEL_BLOCKS_H

#include "model/model.h"

/* ---- short forms of what every walk writes ---- */

/* [rows, cols], [rows, heads, dim] and [rows] on a class of memory. */
static inline ith_status ith_push(ith_ctx *ctx, ith_mem_class where, const char *name,
                                  ith_dtype dtype, int64_t rows, int64_t cols, ith_tensor *out)
{
    return ith_ctx_push(ctx, where, name, dtype, 2, rows, cols, 1, 1, out);
}

static inline ith_status ith_push_heads(ith_ctx *ctx, ith_mem_class where, const char *name,
                                        ith_dtype dtype, int64_t rows, int64_t heads, int64_t dim,
                                        ith_tensor *out)
{
    return ith_ctx_push(ctx, where, name, dtype, 3, rows, heads, dim, 1, out);
}

static inline ith_status ith_push_rows(ith_ctx *ctx, ith_mem_class where, const char *name,
                                       ith_dtype dtype, int64_t rows, ith_tensor *out)
{
    return ith_ctx_push(ctx, where, name, dtype, 1, rows, 1, 1, 1, out);
}

/* Contiguous [T,H,Dh] as [T, H Dh]. */
static inline ith_tensor ith_heads_2d(ith_tensor t)
{
    ITH_ASSERT(ith_is_contiguous(t));
    return ith_tensor_2d(t.data, t.dtype, t.shape[0], t.shape[1] * t.shape[2]);
}

/* Of scores: 1 / sqrt(dim). */
static inline float ith_score_scale(int64_t dim)
{
    return (float)(1.0 / __builtin_sqrt((double)dim));
}

static inline int64_t ith_num_moe_layers(const ith_hf_config *c)
{
    int64_t n = 0;
    for (int64_t l = 0; l < c->num_hidden_layers; l++)
        n += c->layer_is_moe[l];
    return n;
}

/* ---- the walk: what lies around the layers of any family (walk.c) ---- */

/* The stream (m->residual, m->delta) = (embeddings, 0), and no balancing loss. */
ith_status ith_walk_open(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training);
/* The vectors of the balancing loss, when it is on; sum: the balance is that of all tokens of the
 * group, after the last layer. */
ith_status ith_walk_open_balance(ith_model *m, ith_ctx *ctx, bool training);
ith_status ith_walk_sum_balance(const ith_model *m, ith_ctx *ctx);

/* A layer begins with its acts. x2 of a layer that does not keep it is `stream`: the next norm
 * reads it before it is written again. Evaluation keeps nothing; its x is `stream`, too (the norm
 * adds in place). */
ith_status ith_walk_push_input(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               bool training);

/* A family's part of layer l. dx: in, the gradient of what the layer gives; out, that of x. */
typedef ith_status (*ith_layer_forward)(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                        bool training);
typedef ith_status (*ith_layer_backward)(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                         ith_tensor dx);
typedef ith_status (*ith_layer_decode)(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                       ith_kv_cache *cache, ith_tensor rows, bool prefill);
/* All layers, each with its weights gathered, its workspace released behind it, and what it does
 * not keep forgotten; backward, its gradients summed where they are cut. */
ith_status ith_walk_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training,
                            ith_layer_forward layer);
ith_status ith_walk_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, ith_tensor dx,
                             ith_layer_backward layer);
ith_status ith_walk_decode(ith_model *m, ith_ctx *ctx, const ith_batch *b, ith_kv_cache *cache,
                           ith_tensor rows, bool prefill, ith_layer_decode layer);

/* ---- parts of a layer ---- */

/* Parameters of a layer whose experts are separate matrices in the file, gate_up and down. */
ith_status ith_block_declare_experts(ith_model *m, int64_t l, ith_error *err);

/* What the mixer of a layer reads, attention or Gated DeltaNet; in the layer's workspace, or what
 * acts kept. Heads are this rank's, of all N tokens of its group. */
typedef struct {
    ith_tensor n1, rstd1; /* absent: not made yet */
    /* Attention: q and k after norm and RoPE, all heads of this rank's tokens (absent where heads
     * were kept); what travelled. */
    ith_tensor q, k, q_rstd, k_rstd;
    ith_qkv heads;
    /* Gated DeltaNet: what convolution and gates read, and make. */
    ith_tensor u, b, a, conv, g, beta;
    ith_tensor o; /* output of this rank's tokens, all heads; absent: not there yet */
    /* Attention backward: gradients of o at the heads; of q', k' and v at the tokens. */
    ith_tensor do_heads;
    ith_qkv dtokens;
} ith_mixer_in;

/* What one product makes of n1 = norm(x) for t tokens: room for it, and where a linear layer wants
 * that, for the rows in front. */
ith_status ith_block_push_projection(ith_model *m, ith_ctx *ctx, ith_mem_class where, int64_t l,
                                     int64_t t, ith_tensor *out);
/* in->n1 and a->qkv. forward: x = residual + delta, which gives a->x, too; else x is there, and
 * only what was not kept is made again, by the same operators: the same bits. */
ith_status ith_block_project(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                             bool forward, ith_mixer_in *in);
/* dproj: gradient of the projection. dx: in, what reaches x past the mixer; out, all of x's
 * gradient. in->n1 is overwritten. */
ith_status ith_block_project_backward(ith_model *m, ith_ctx *ctx, int64_t l, ith_mixer_in *in,
                                      ith_tensor dproj, ith_tensor dx);

/* Attention of a layer with a norm on each head of q and k:
 *   [q | k | v] = n1 Wqkv^T   q', k' = rope(norm_head(q, k))   o = attention(q', k', v)
 * Views of the projection; where each head of q has a gate, that lies behind it. */
ith_qkv ith_block_split_qkv(const ith_hf_config *c, ith_tensor qkv);
/* What acts may keep of t tokens of n of the group, behind a->qkv: the statistics of q' and k', and
 * what attention reads; of several ranks also its output at the tokens, so that nothing is
 * exchanged again. */
ith_status ith_block_push_attention_in(ith_model *m, ith_ctx *ctx, ith_layer_acts *a, int64_t t,
                                       int64_t n);
/* a->o and a->lse of the ring slice of n tokens of the group, this rank's heads. */
ith_status ith_block_push_attention_out(ith_model *m, ith_ctx *ctx, ith_mem_class where,
                                        ith_layer_acts *a, int64_t n);
/* Everything of `in` but o. forward: see ith_block_project. */
ith_status ith_block_attention_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  bool forward, ith_mixer_in *in);
/* a->o and a->lse (pushed on the workspace when absent) from in->heads, and in->o. */
ith_status ith_block_attend(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                            ith_mixer_in *in);
/* For backward: in->o, making a->o and what it reads again when it was not kept. */
ith_status ith_block_output_again(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  ith_mixer_in *in);
/* Backward in three parts; between two of them an exchange is on its way, beside what is queued
 * there. do_ [T,Hq,Dh], the gradient of in->o, must stay till the second, dproj is complete behind
 * the third; of gates nothing. */
ith_status ith_block_output_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b,
                                     ith_mixer_in *in, ith_tensor do_);
ith_status ith_block_attend_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     ith_mixer_in *in, ith_tensor dproj);
ith_status ith_block_qk_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                 const ith_mixer_in *in, ith_tensor dproj);

/* Decoding. Layers below l of its kind, full attention or linear: its place in a cache. */
int64_t ith_block_cache_index(const ith_hf_config *c, int64_t l);
/* k and v of these tokens become rows `rows` of layer l of the cache, whose k and v,
 * [rows, Hkv, Dh], come back. */
ith_status ith_block_fill_cache(ith_model *m, ith_ctx *ctx, int64_t l, const ith_kv_cache *cache,
                                const ith_mixer_in *in, ith_tensor rows, ith_tensor *k,
                                ith_tensor *v);
/* The same, a->o and in->o: each new row sees its sequence up to itself. */
ith_status ith_block_attend_cache(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  const ith_kv_cache *cache, ith_tensor rows, bool prefill,
                                  ith_mixer_in *in);

/* Dense layers. x2 = x + o_out and m->delta = MLP(norm(x2)), in tiles; backward: dx in, the
 * gradient of the layer's output; out, that of x2. */
ith_status ith_block_mlp_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                 ith_tensor o_out);
ith_status ith_block_mlp_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  ith_tensor dx);
/* Expert layers: the tensors they need on a class of memory; routing and experts from n2 = norm(x2)
 * up to a->expert_out; dn2 from dy, the gradient of the combined output. */
ith_status ith_block_push_experts(ith_model *m, ith_ctx *ctx, ith_mem_class where,
                                  ith_layer_acts *a, int64_t t);
ith_status ith_block_experts_forward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                     ith_tensor n2, bool count_load);
ith_status ith_block_experts_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                      ith_tensor dn2, ith_tensor dy, ith_tensor n2);
/* The experts behind any router (expert_mlp.c), here or on other ranks: a->gate_up and
 * a->expert_out of `rows` sorted rows; a->expert_out from n2 and the routing in acts; dn2, the
 * gradient through the experts, from a->expert_out, which holds the gradient of itself then. */
ith_status ith_block_push_expert_rows(ith_model *m, ith_ctx *ctx, ith_mem_class where,
                                      ith_layer_acts *a, int64_t rows);
ith_status ith_block_expert_mlp_forward(ith_model *m, ith_ctx *ctx, int64_t l, ith_tensor n2);
ith_status ith_block_expert_mlp_backward(ith_model *m, ith_ctx *ctx, int64_t l, ith_tensor dn2,
                                         ith_tensor n2);
/* Layers that keep x on the host. open: the staging of a walk over t tokens. stage: gives layer l
 * its x, which may be written from then on. save: x is complete. fetch: before anything of layer
 * l's backward; x of layer l - 1 begins to come. Layers that keep it elsewhere only fetch ahead. */
ith_status ith_offload_open(ith_model *m, ith_ctx *ctx, int64_t t, bool training);
ith_status ith_offload_stage(ith_model *m, ith_ctx *ctx, int64_t l);
ith_status ith_offload_save(ith_model *m, ith_ctx *ctx, int64_t l);
ith_status ith_offload_fetch(ith_model *m, ith_ctx *ctx, int64_t l);

#endif
