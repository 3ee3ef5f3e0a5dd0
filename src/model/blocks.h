/* blocks.h - the parts of a decoder layer that families share; qwen3.c holds them.
 *
 * They read m->norm_offset and the usual entries of layer_param, and work on m->acts[l]. */
#ifndef ITH_MODEL_BLOCKS_H
#define ITH_MODEL_BLOCKS_H

#include "model/model.h"

/* The stream (m->residual, m->delta) = (embeddings, 0), and the vectors of the balancing loss. */
ith_status ith_block_open(ith_model *m, ith_ctx *ctx, const ith_batch *b, bool training);
/* The balance is that of all tokens of the group: after the last layer. */
ith_status ith_block_sum_balance(const ith_model *m, ith_ctx *ctx);
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
