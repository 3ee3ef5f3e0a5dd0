/* delta_block.h - Gated DeltaNet of a layer, forward and backward, on one rank or many:
 *
 *     [u | z | b | a] = n1 Win^T    [q | k | v] = silu(conv(u))    g, beta = gates(a, b)
 *     o = delta_rule(q, k, v, g, beta)
 *
 * The projection is ith_block_project; what is made of o and z is the model's.
 *
 * Many ranks: u, b and a go to the ranks by heads, for all tokens of the group
 * (parallel/ulysses.h); of a model that passes states they stay, and the rows of u before the
 * slice come (parallel/delta_scan.h). Convolution and state begin at zero in every document. */
#ifndef ITH_MODEL_DELTA_BLOCK_H
#define ITH_MODEL_DELTA_BLOCK_H

#include "model/blocks.h"

static inline int64_t ith_delta_value_width(const ith_hf_config *c)
{
    return c->linear_num_value_heads * c->linear_value_head_dim;
}

static inline int64_t ith_delta_conv_width(const ith_hf_config *c)
{
    return 2 * c->linear_num_key_heads * c->linear_key_head_dim + ith_delta_value_width(c);
}

/* Views of the projection: [T, conv width], [T, Hv, Dv], [T, Hv], [T, Hv]. */
typedef struct {
    ith_tensor u, z, b, a;
} ith_delta_views;

ith_delta_views ith_delta_split(const ith_hf_config *c, ith_tensor projection);
/* Rows in front of the projection of layer l for those of u before the slice. */
int64_t ith_delta_room(const ith_model *m, int64_t l);
/* What a layer that passes states keeps of them, whatever else it keeps. */
ith_status ith_delta_push_states(ith_model *m, ith_ctx *ctx, ith_mem_class where,
                                 ith_layer_acts *a);
/* a->o: all heads of t tokens. */
ith_status ith_delta_push_out(ith_model *m, ith_ctx *ctx, ith_mem_class where, ith_layer_acts *a,
                              int64_t t);
/* u to beta of `in` from a->qkv. */
ith_status ith_delta_mixer_in(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                              ith_mixer_in *in);
/* a->o (pushed on the workspace when absent), all heads of this rank's tokens. */
ith_status ith_delta_mix(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                         const ith_mixer_in *in);
/* dproj but for z, from do_ [T,Hv,Dv], the gradient of a->o. */
ith_status ith_delta_mix_backward(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                                  const ith_mixer_in *in, ith_tensor do_, ith_tensor dproj);
/* mixer_in and mix, going on from what the cache has of the layer, which follows. */
ith_status ith_delta_mix_cache(ith_model *m, ith_ctx *ctx, const ith_batch *b, int64_t l,
                               const ith_kv_cache *cache, ith_mixer_in *in);

#endif
