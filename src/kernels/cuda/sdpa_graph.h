/* sdpa_graph.h - cuDNN's attention forward as composite graphs, one plan per shape.
 *
 * A plan is compiled on the first use of its key (0.04 to 1 s) and kept for the life of the device.
 * Packed plans take any documents with at most `batch` of them and none longer than `seq`. */
#ifndef ITH_KERNELS_CUDA_SDPA_GRAPH_H
#define ITH_KERNELS_CUDA_SDPA_GRAPH_H

#include "kernels/cuda/cuda_internal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements between tokens and between heads. */
typedef struct {
    int64_t row, head;
} ith_sdpa_place;

/* All int64_t: compared as bytes. */
typedef struct {
    int64_t batch, seq, heads_q, heads_kv, head_dim;
    int64_t causal, packed;
    ith_sdpa_place q, k, v, o;
} ith_sdpa_key;

/* Names of the real tensors. RAGGED + i: offsets of the documents times ragged_stride[i]. */
enum {
    ITH_SDPA_NONE,
    ITH_SDPA_Q,
    ITH_SDPA_K,
    ITH_SDPA_V,
    ITH_SDPA_O,
    ITH_SDPA_LSE,     /* [T,Hq] f32, also without packing */
    ITH_SDPA_LENGTHS, /* [batch] I32 */
    ITH_SDPA_SCALE,   /* by value, on the host, from here on */
    ITH_SDPA_MASKED,
    ITH_SDPA_RAGGED,
    ITH_SDPA_MAX_RAGGED = 10,
    ITH_SDPA_NAMES = ITH_SDPA_RAGGED + ITH_SDPA_MAX_RAGGED
};

typedef struct {
    ith_sdpa_key key;
    cudnnBackendDescriptor_t plan;
    cudnnBackendDescriptor_t *descriptors; /* kept alive with the plan */
    int64_t num_descriptors;
    int64_t workspace_bytes, engine;
    int64_t names[ITH_SDPA_NAMES]; /* real tensors of the graph, each once */
    int num_names;
    int64_t ragged_stride[ITH_SDPA_MAX_RAGGED];
    int num_ragged;
} ith_sdpa_plan;

ith_status ith_sdpa_cache_create(ith_sdpa_cache **out, ith_error *err);
void ith_sdpa_cache_destroy(ith_sdpa_cache *cache, const ith_cuda_libs *libs);
ith_status ith_sdpa_plan_of(ith_ctx *ctx, const ith_sdpa_key *key, const ith_sdpa_plan **out);
/* data[name]: device memory of each real tensor that the plan has. */
ith_status ith_sdpa_execute(ith_ctx *ctx, const ith_sdpa_plan *plan, void *const *data, float scale,
                            void *workspace);
/* Builds a plan for an H200 that need not be there, as far as that goes. */
ith_status ith_sdpa_plan_offline(const ith_cuda_libs *libs, const ith_sdpa_key *key,
                                 ith_sdpa_plan *out, ith_error *err);
void ith_sdpa_plan_drop(ith_sdpa_plan *plan, const ith_cuda_libs *libs);

#ifdef __cplusplus
}
#endif
#endif
