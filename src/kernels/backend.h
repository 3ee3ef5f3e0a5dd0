/* backend.h - the operator table. A backend fills entries; ops.h functions check shapes, give
 * scratch, and call.
 *
 * Every entry is a pair: `run` has the arguments of the public operator (see ops.h), `workspace`
 * has the same and says how much scratch run wants (NULL: none); it only computes, touching no
 * memory and no device, for the plan is made on machines without one. Scratch is ctx->scratch
 * during run, 256-byte aligned. The CPU table starts full of reference functions and fast ones
 * overwrite entries. A CUDA table with a missing entry is a clear error, never a silent copy to the
 * host. While the plan is counting, run is not called. */
#ifndef ITH_KERNELS_BACKEND_H
#define ITH_KERNELS_BACKEND_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ITH_OP(name, ...)                                                                          \
    struct {                                                                                       \
        ith_status (*run)(ith_ctx * ctx, __VA_ARGS__);                                             \
        int64_t (*workspace)(ith_ctx * ctx, __VA_ARGS__);                                          \
    } name

typedef ith_tensor ith_t_; /* short, for the table only */

struct ith_backend {
    const char *name; /* "ref", "cpu", "cuda" */
    ITH_OP(embedding_forward, ith_t_ y, ith_t_ ids, ith_t_ w);
    ITH_OP(embedding_backward, ith_t_ dw, ith_t_ dy, ith_t_ ids);
    ITH_OP(rmsnorm_forward, ith_t_ y, ith_t_ sum, ith_t_ rstd, ith_t_ x, ith_t_ residual, ith_t_ w,
           float eps, float w_offset);
    ITH_OP(rmsnorm_backward, ith_t_ dx, ith_t_ dw, ith_t_ dy, ith_t_ dres, ith_t_ x, ith_t_ rstd,
           ith_t_ w, float w_offset);
    ITH_OP(qk_norm_rope_forward, ith_t_ q_out, ith_t_ k_out, ith_t_ q_rstd, ith_t_ k_rstd, ith_t_ q,
           ith_t_ k, ith_t_ q_w, ith_t_ k_w, ith_t_ cos, ith_t_ sin, ith_t_ position_ids, float eps,
           float w_offset);
    ITH_OP(qk_norm_rope_backward, ith_t_ dq, ith_t_ dk, ith_t_ dq_w, ith_t_ dk_w, ith_t_ dq_out,
           ith_t_ dk_out, ith_t_ q, ith_t_ k, ith_t_ q_rstd, ith_t_ k_rstd, ith_t_ q_w, ith_t_ k_w,
           ith_t_ cos, ith_t_ sin, ith_t_ position_ids, float w_offset);
    ITH_OP(linear_forward, ith_t_ y, ith_t_ x, ith_t_ w, bool accumulate);
    ITH_OP(linear_backward_input, ith_t_ dx, ith_t_ dy, ith_t_ w, bool accumulate);
    ITH_OP(linear_backward_weight, ith_t_ dw, ith_t_ dy, ith_t_ x);
    ITH_OP(attention_forward, ith_t_ o, ith_t_ lse, ith_t_ q, ith_t_ k, ith_t_ v, ith_seqs seqs,
           float scale, bool causal);
    ITH_OP(attention_backward, ith_t_ dq, ith_t_ dk, ith_t_ dv, ith_t_ do_, ith_t_ q, ith_t_ k,
           ith_t_ v, ith_t_ o, ith_t_ lse, ith_seqs seqs, float scale, bool causal);
    ITH_OP(attention_merge, ith_t_ o, ith_t_ lse, ith_t_ part_o, ith_t_ part_lse);
    ITH_OP(attention_decode, ith_t_ o, ith_t_ lse, ith_t_ q, ith_t_ k_cache, ith_t_ v_cache,
           ith_t_ lengths, float scale);
    ITH_OP(swiglu_forward, ith_t_ h, ith_t_ gate_up);
    ITH_OP(swiglu_backward, ith_t_ dgate_up, ith_t_ h, ith_t_ dh, ith_t_ gate_up);
    ITH_OP(gather_rows, ith_t_ y, ith_t_ x, ith_t_ idx);
    ITH_OP(scatter_rows, ith_t_ y, ith_t_ x, ith_t_ idx);
    ITH_OP(list_ranges, ith_t_ index, ith_t_ first, ith_t_ offsets);
    ITH_OP(add, ith_t_ y, ith_t_ a, ith_t_ b);
    ITH_OP(cast, ith_t_ y, ith_t_ x);
    ITH_OP(zero, ith_t_ y);
    ITH_OP(cross_entropy, ith_t_ row_loss, ith_t_ logits, ith_t_ labels, ith_t_ seeds,
           bool gradient);
    ITH_OP(cross_entropy_confident, ith_t_ row_loss, ith_t_ row_confidence, ith_t_ right,
           ith_t_ logits, ith_t_ labels, ith_t_ seeds, float confidence, bool gradient);
    ITH_OP(choose_ids, ith_t_ ids, ith_t_ probability, ith_t_ logits, ith_t_ draws, float scale,
           int64_t barred);
    ITH_OP(dot_accumulate, ith_t_ out, ith_t_ a, ith_t_ b);
    ITH_OP(router_forward, ith_t_ topk_w, ith_t_ topk_idx, ith_t_ probs, ith_t_ logits,
           bool norm_topk);
    ITH_OP(router_backward, ith_t_ dlogits, ith_t_ dtopk_w, ith_t_ topk_w, ith_t_ topk_idx,
           ith_t_ probs, ith_t_ expert_fraction, float aux_scale, bool norm_topk);
    ITH_OP(group_router_forward, ith_t_ topk_w, ith_t_ topk_idx, ith_t_ scores, ith_t_ logits,
           ith_t_ bias, int64_t n_group, int64_t topk_group, float scaling);
    ITH_OP(group_router_backward, ith_t_ dlogits, ith_t_ dtopk_w, ith_t_ topk_idx, ith_t_ scores,
           float scaling);
    ITH_OP(expert_load, ith_t_ fraction, ith_t_ mean_prob, ith_t_ offsets, ith_t_ probs,
           float scale);
    ITH_OP(expert_sort, ith_t_ offsets, ith_t_ source, ith_t_ row_of, ith_t_ topk_idx);
    ITH_OP(grouped_linear_forward, ith_t_ y, ith_t_ x, ith_t_ w, ith_t_ offsets);
    ITH_OP(grouped_linear_backward_input, ith_t_ dx, ith_t_ dy, ith_t_ w, ith_t_ offsets);
    ITH_OP(grouped_linear_backward_weight, ith_t_ dw, ith_t_ dy, ith_t_ x, ith_t_ offsets);
    ITH_OP(expert_combine, ith_t_ y, ith_t_ base, ith_t_ x, ith_t_ topk_w, ith_t_ row_of);
    ITH_OP(expert_combine_backward, ith_t_ dx, ith_t_ dtopk_w, ith_t_ dy, ith_t_ x, ith_t_ topk_w,
           ith_t_ row_of);
    ITH_OP(conv1d_silu_forward, ith_t_ y, ith_t_ x, ith_t_ w, ith_t_ history, ith_seqs seqs);
    ITH_OP(conv1d_silu_backward, ith_t_ dx, ith_t_ dw, ith_t_ dy, ith_t_ x, ith_t_ w,
           ith_seqs seqs);
    ITH_OP(gdn_gates_forward, ith_t_ g, ith_t_ beta, ith_t_ a, ith_t_ b, ith_t_ a_log,
           ith_t_ dt_bias);
    ITH_OP(gdn_gates_backward, ith_t_ da, ith_t_ db, ith_t_ da_log, ith_t_ ddt_bias, ith_t_ dg,
           ith_t_ dbeta, ith_t_ a, ith_t_ b, ith_t_ a_log, ith_t_ dt_bias);
    ITH_OP(gated_delta_rule_forward, ith_t_ o, ith_t_ q, ith_t_ k, ith_t_ v, ith_t_ g, ith_t_ beta,
           ith_t_ state, ith_seqs seqs, float scale);
    ITH_OP(gated_delta_rule_backward, ith_t_ dq, ith_t_ dk, ith_t_ dv, ith_t_ dg, ith_t_ dbeta,
           ith_t_ dstate, ith_t_ do_, ith_t_ q, ith_t_ k, ith_t_ v, ith_t_ g, ith_t_ beta,
           ith_t_ state, ith_seqs seqs, float scale);
    ITH_OP(gated_rmsnorm_forward, ith_t_ y, ith_t_ x, ith_t_ z, ith_t_ w, float eps);
    ITH_OP(gated_rmsnorm_backward, ith_t_ dx, ith_t_ dz, ith_t_ dw, ith_t_ dy, ith_t_ x, ith_t_ z,
           ith_t_ w, float eps);
    ITH_OP(sigmoid_gate_forward, ith_t_ y, ith_t_ x, ith_t_ gate);
    ITH_OP(sigmoid_gate_backward, ith_t_ dx, ith_t_ dgate, ith_t_ dy, ith_t_ x, ith_t_ gate);
    ITH_OP(row_gate_forward, ith_t_ y, ith_t_ base, ith_t_ x, ith_t_ gate);
    ITH_OP(row_gate_backward, ith_t_ dx, ith_t_ dgate, ith_t_ dy, ith_t_ x, ith_t_ gate);
    ITH_OP(layernorm_forward, ith_t_ y, ith_t_ mean, ith_t_ rstd, ith_t_ x, ith_t_ w, ith_t_ b,
           float eps);
    ITH_OP(layernorm_backward, ith_t_ dx, ith_t_ dw, ith_t_ db, ith_t_ dy, ith_t_ dres, ith_t_ x,
           ith_t_ mean, ith_t_ rstd, ith_t_ w);
    ITH_OP(bias_add, ith_t_ y, ith_t_ b);
    ITH_OP(bias_backward, ith_t_ db, ith_t_ dy);
    ITH_OP(gelu_forward, ith_t_ y, ith_t_ x, bool approximate);
    ITH_OP(gelu_backward, ith_t_ dx, ith_t_ dy, ith_t_ x, bool approximate);
    ITH_OP(sumsq_accumulate, ith_t_ out, ith_t_ x);
    ITH_OP(clip_scale, ith_t_ norm, ith_t_ scale, ith_t_ sumsq, float max_norm);
    ITH_OP(adamw, ith_t_ w, ith_t_ master, ith_t_ m, ith_t_ v, ith_t_ grad, ith_t_ scale,
           ith_adamw_hyper hyper, uint64_t seed, int64_t first, bool zero_grad);
    bool overwrites; /* weight products know ctx->overwrite */
};

/* Plain C, single-threaded, F32/BF16/F64: the meaning of every operator. */
const ith_backend *ith_backend_ref(void);
/* The reference with the fast CPU functions this machine can run over it (ITH_CPU chooses lower
 * levels). */
const ith_backend *ith_backend_cpu(void);
/* Level in use: "ref", "generic", "avx2", "avx512", "avx512bf16". */
const char *ith_backend_cpu_name(void);

/* A ctx for tests and tools: backend over the CPU, no plan. */
ith_ctx ith_ctx_host(const ith_backend *backend, ith_pool *pool, ith_error *err);

#ifdef __cplusplus
}
#endif
#endif
