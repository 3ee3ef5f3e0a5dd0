/* ref.c - the reference table: picks float or double by the type of the data, and holds the
 * operators that only move bytes. */
#include "kernels/ref/ref_internal.h"

/* The operator under both types; `key` names the argument whose type decides. */
#define PICK_RUN(op, key, params, args)                                                            \
    static ith_status op params                                                                    \
    {                                                                                              \
        return (key).dtype == ITH_F64 ? ith_ref_f64.op.run args : ith_ref_f32.op.run args;         \
    }
#define PICK_WORKSPACE(op, key, params, args)                                                      \
    static int64_t op##_workspace params                                                           \
    {                                                                                              \
        return (key).dtype == ITH_F64 ? ith_ref_f64.op.workspace args                              \
                                      : ith_ref_f32.op.workspace args;                             \
    }
#define PICK(op, key, params, args)                                                                \
    PICK_RUN(op, key, params, args)                                                                \
    PICK_WORKSPACE(op, key, params, args)

PICK_RUN(embedding_backward, dy, (ith_ctx * ctx, ith_t_ dw, ith_t_ dy, ith_t_ ids),
         (ctx, dw, dy, ids))
PICK_RUN(rmsnorm_forward, x,
         (ith_ctx * ctx, ith_t_ y, ith_t_ sum, ith_t_ rstd, ith_t_ x, ith_t_ residual, ith_t_ w,
          float eps, float w_offset),
         (ctx, y, sum, rstd, x, residual, w, eps, w_offset))
PICK_RUN(rmsnorm_backward, x,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dw, ith_t_ dy, ith_t_ dres, ith_t_ x, ith_t_ rstd,
          ith_t_ w, float w_offset),
         (ctx, dx, dw, dy, dres, x, rstd, w, w_offset))
PICK_RUN(qk_norm_rope_forward, q,
         (ith_ctx * ctx, ith_t_ q_out, ith_t_ k_out, ith_t_ q_rstd, ith_t_ k_rstd, ith_t_ q,
          ith_t_ k, ith_t_ q_w, ith_t_ k_w, ith_t_ cos, ith_t_ sin, ith_t_ position_ids, float eps,
          float w_offset),
         (ctx, q_out, k_out, q_rstd, k_rstd, q, k, q_w, k_w, cos, sin, position_ids, eps, w_offset))
PICK_RUN(qk_norm_rope_backward, q,
         (ith_ctx * ctx, ith_t_ dq, ith_t_ dk, ith_t_ dq_w, ith_t_ dk_w, ith_t_ dq_out,
          ith_t_ dk_out, ith_t_ q, ith_t_ k, ith_t_ q_rstd, ith_t_ k_rstd, ith_t_ q_w, ith_t_ k_w,
          ith_t_ cos, ith_t_ sin, ith_t_ position_ids, float w_offset),
         (ctx, dq, dk, dq_w, dk_w, dq_out, dk_out, q, k, q_rstd, k_rstd, q_w, k_w, cos, sin,
          position_ids, w_offset))
PICK_RUN(linear_forward, x, (ith_ctx * ctx, ith_t_ y, ith_t_ x, ith_t_ w, bool accumulate),
         (ctx, y, x, w, accumulate))
PICK_RUN(linear_backward_input, dy,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dy, ith_t_ w, bool accumulate),
         (ctx, dx, dy, w, accumulate))
PICK_RUN(linear_backward_weight, dy, (ith_ctx * ctx, ith_t_ dw, ith_t_ dy, ith_t_ x),
         (ctx, dw, dy, x))
PICK(attention_forward, q,
     (ith_ctx * ctx, ith_t_ o, ith_t_ lse, ith_t_ q, ith_t_ k, ith_t_ v, ith_seqs seqs, float scale,
      bool causal),
     (ctx, o, lse, q, k, v, seqs, scale, causal))
PICK(attention_backward, q,
     (ith_ctx * ctx, ith_t_ dq, ith_t_ dk, ith_t_ dv, ith_t_ do_, ith_t_ q, ith_t_ k, ith_t_ v,
      ith_t_ o, ith_t_ lse, ith_seqs seqs, float scale, bool causal),
     (ctx, dq, dk, dv, do_, q, k, v, o, lse, seqs, scale, causal))
PICK_RUN(attention_merge, o, (ith_ctx * ctx, ith_t_ o, ith_t_ lse, ith_t_ part_o, ith_t_ part_lse),
         (ctx, o, lse, part_o, part_lse))
PICK(attention_decode, q,
     (ith_ctx * ctx, ith_t_ o, ith_t_ lse, ith_t_ q, ith_t_ k_cache, ith_t_ v_cache, ith_t_ lengths,
      float scale),
     (ctx, o, lse, q, k_cache, v_cache, lengths, scale))
PICK_RUN(swiglu_forward, h, (ith_ctx * ctx, ith_t_ h, ith_t_ gate_up), (ctx, h, gate_up))
PICK_RUN(swiglu_backward, dh, (ith_ctx * ctx, ith_t_ dgate_up, ith_t_ h, ith_t_ dh, ith_t_ gate_up),
         (ctx, dgate_up, h, dh, gate_up))
PICK_RUN(add, y, (ith_ctx * ctx, ith_t_ y, ith_t_ a, ith_t_ b), (ctx, y, a, b))
PICK_RUN(cross_entropy, logits,
         (ith_ctx * ctx, ith_t_ row_loss, ith_t_ logits, ith_t_ labels, ith_t_ seeds,
          bool gradient),
         (ctx, row_loss, logits, labels, seeds, gradient))
PICK_RUN(cross_entropy_confident, logits,
         (ith_ctx * ctx, ith_t_ row_loss, ith_t_ row_confidence, ith_t_ right, ith_t_ logits,
          ith_t_ labels, ith_t_ seeds, float confidence, bool gradient),
         (ctx, row_loss, row_confidence, right, logits, labels, seeds, confidence, gradient))
PICK_RUN(choose_ids, logits,
         (ith_ctx * ctx, ith_t_ ids, ith_t_ probability, ith_t_ logits, ith_t_ draws, float scale,
          int64_t barred),
         (ctx, ids, probability, logits, draws, scale, barred))
PICK_RUN(router_forward, logits,
         (ith_ctx * ctx, ith_t_ topk_w, ith_t_ topk_idx, ith_t_ probs, ith_t_ logits,
          bool norm_topk),
         (ctx, topk_w, topk_idx, probs, logits, norm_topk))
PICK_RUN(group_router_forward, logits,
         (ith_ctx * ctx, ith_t_ topk_w, ith_t_ topk_idx, ith_t_ scores, ith_t_ logits, ith_t_ bias,
          int64_t n_group, int64_t topk_group, float scaling),
         (ctx, topk_w, topk_idx, scores, logits, bias, n_group, topk_group, scaling))
PICK_RUN(group_router_backward, scores,
         (ith_ctx * ctx, ith_t_ dlogits, ith_t_ dtopk_w, ith_t_ topk_idx, ith_t_ scores,
          float scaling),
         (ctx, dlogits, dtopk_w, topk_idx, scores, scaling))
PICK_RUN(expert_load, probs,
         (ith_ctx * ctx, ith_t_ fraction, ith_t_ mean_prob, ith_t_ offsets, ith_t_ probs,
          float scale),
         (ctx, fraction, mean_prob, offsets, probs, scale))
PICK_RUN(router_backward, dlogits,
         (ith_ctx * ctx, ith_t_ dlogits, ith_t_ dtopk_w, ith_t_ topk_w, ith_t_ topk_idx,
          ith_t_ probs, ith_t_ expert_fraction, float aux_scale, bool norm_topk),
         (ctx, dlogits, dtopk_w, topk_w, topk_idx, probs, expert_fraction, aux_scale, norm_topk))
PICK_RUN(grouped_linear_forward, x, (ith_ctx * ctx, ith_t_ y, ith_t_ x, ith_t_ w, ith_t_ offsets),
         (ctx, y, x, w, offsets))
PICK_RUN(grouped_linear_backward_input, dy,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dy, ith_t_ w, ith_t_ offsets), (ctx, dx, dy, w, offsets))
PICK_RUN(grouped_linear_backward_weight, dy,
         (ith_ctx * ctx, ith_t_ dw, ith_t_ dy, ith_t_ x, ith_t_ offsets), (ctx, dw, dy, x, offsets))
PICK_RUN(expert_combine, y,
         (ith_ctx * ctx, ith_t_ y, ith_t_ base, ith_t_ x, ith_t_ topk_w, ith_t_ row_of),
         (ctx, y, base, x, topk_w, row_of))
PICK_RUN(expert_combine_backward, dy,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dtopk_w, ith_t_ dy, ith_t_ x, ith_t_ topk_w,
          ith_t_ row_of),
         (ctx, dx, dtopk_w, dy, x, topk_w, row_of))
PICK_RUN(conv1d_silu_forward, y,
         (ith_ctx * ctx, ith_t_ y, ith_t_ x, ith_t_ w, ith_t_ history, ith_seqs seqs),
         (ctx, y, x, w, history, seqs))
PICK_RUN(conv1d_silu_backward, dy,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dw, ith_t_ dy, ith_t_ x, ith_t_ w, ith_seqs seqs),
         (ctx, dx, dw, dy, x, w, seqs))
PICK_RUN(gdn_gates_forward, a,
         (ith_ctx * ctx, ith_t_ g, ith_t_ beta, ith_t_ a, ith_t_ b, ith_t_ a_log, ith_t_ dt_bias),
         (ctx, g, beta, a, b, a_log, dt_bias))
PICK_RUN(gdn_gates_backward, a,
         (ith_ctx * ctx, ith_t_ da, ith_t_ db, ith_t_ da_log, ith_t_ ddt_bias, ith_t_ dg,
          ith_t_ dbeta, ith_t_ a, ith_t_ b, ith_t_ a_log, ith_t_ dt_bias),
         (ctx, da, db, da_log, ddt_bias, dg, dbeta, a, b, a_log, dt_bias))
PICK(gated_delta_rule_forward, q,
     (ith_ctx * ctx, ith_t_ o, ith_t_ q, ith_t_ k, ith_t_ v, ith_t_ g, ith_t_ beta, ith_t_ state,
      ith_seqs seqs, float scale),
     (ctx, o, q, k, v, g, beta, state, seqs, scale))
PICK(gated_delta_rule_backward, q,
     (ith_ctx * ctx, ith_t_ dq, ith_t_ dk, ith_t_ dv, ith_t_ dg, ith_t_ dbeta, ith_t_ dstate,
      ith_t_ do_, ith_t_ q, ith_t_ k, ith_t_ v, ith_t_ g, ith_t_ beta, ith_t_ state, ith_seqs seqs,
      float scale),
     (ctx, dq, dk, dv, dg, dbeta, dstate, do_, q, k, v, g, beta, state, seqs, scale))
PICK_RUN(gated_rmsnorm_forward, x,
         (ith_ctx * ctx, ith_t_ y, ith_t_ x, ith_t_ z, ith_t_ w, float eps), (ctx, y, x, z, w, eps))
PICK_RUN(gated_rmsnorm_backward, x,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dz, ith_t_ dw, ith_t_ dy, ith_t_ x, ith_t_ z, ith_t_ w,
          float eps),
         (ctx, dx, dz, dw, dy, x, z, w, eps))
PICK_RUN(sigmoid_gate_forward, x, (ith_ctx * ctx, ith_t_ y, ith_t_ x, ith_t_ gate),
         (ctx, y, x, gate))
PICK_RUN(sigmoid_gate_backward, x,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dgate, ith_t_ dy, ith_t_ x, ith_t_ gate),
         (ctx, dx, dgate, dy, x, gate))
PICK_RUN(row_gate_forward, x, (ith_ctx * ctx, ith_t_ y, ith_t_ base, ith_t_ x, ith_t_ gate),
         (ctx, y, base, x, gate))
PICK_RUN(row_gate_backward, x,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dgate, ith_t_ dy, ith_t_ x, ith_t_ gate),
         (ctx, dx, dgate, dy, x, gate))
PICK_RUN(layernorm_forward, x,
         (ith_ctx * ctx, ith_t_ y, ith_t_ mean, ith_t_ rstd, ith_t_ x, ith_t_ w, ith_t_ b,
          float eps),
         (ctx, y, mean, rstd, x, w, b, eps))
PICK_RUN(layernorm_backward, x,
         (ith_ctx * ctx, ith_t_ dx, ith_t_ dw, ith_t_ db, ith_t_ dy, ith_t_ dres, ith_t_ x,
          ith_t_ mean, ith_t_ rstd, ith_t_ w),
         (ctx, dx, dw, db, dy, dres, x, mean, rstd, w))
PICK_RUN(bias_add, y, (ith_ctx * ctx, ith_t_ y, ith_t_ b), (ctx, y, b))
PICK_RUN(bias_backward, dy, (ith_ctx * ctx, ith_t_ db, ith_t_ dy), (ctx, db, dy))
PICK_RUN(gelu_forward, x, (ith_ctx * ctx, ith_t_ y, ith_t_ x, bool approximate),
         (ctx, y, x, approximate))
PICK_RUN(gelu_backward, x, (ith_ctx * ctx, ith_t_ dx, ith_t_ dy, ith_t_ x, bool approximate),
         (ctx, dx, dy, x, approximate))
PICK_RUN(adamw, w,
         (ith_ctx * ctx, ith_t_ w, ith_t_ master, ith_t_ m, ith_t_ v, ith_t_ grad, ith_t_ scale,
          ith_adamw_hyper hyper, uint64_t seed, int64_t first, bool zero_grad),
         (ctx, w, master, m, v, grad, scale, hyper, seed, first, zero_grad))

/* Address of element n in row-major order. */
static char *address(ith_tensor t, int64_t n)
{
    int64_t at = 0;
    for (int d = t.ndim - 1; d >= 0; d--) {
        at += n % t.shape[d] * t.stride[d];
        n /= t.shape[d];
    }
    return (char *)t.data + at * ith_dtype_bytes(t.dtype);
}

static int32_t *int_at(ith_tensor t, int64_t n)
{
    ITH_ASSERT_SLOW(t.dtype == ITH_I32);
    return (int32_t *)(void *)address(t, n);
}

static void copy_row(ith_tensor to, int64_t to_row, ith_tensor from, int64_t from_row)
{
    ITH_ASSERT(to_row >= 0 && to_row < to.shape[0] && from_row >= 0 && from_row < from.shape[0]);
    int64_t size = ith_dtype_bytes(to.dtype);
    memcpy((char *)to.data + to_row * to.stride[0] * size,
           (const char *)from.data + from_row * from.stride[0] * size,
           (size_t)(to.shape[1] * size));
}

static ith_status gather_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    (void)ctx;
    for (int64_t i = 0; i < idx.shape[0]; i++)
        copy_row(y, i, x, *int_at(idx, i));
    return ITH_OK;
}

static ith_status embedding_forward(ith_ctx *ctx, ith_tensor y, ith_tensor ids, ith_tensor w)
{
    return gather_rows(ctx, y, w, ids);
}

static ith_status scatter_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx)
{
    (void)ctx;
    for (int64_t i = 0; i < idx.shape[0]; i++)
        copy_row(y, *int_at(idx, i), x, i);
    return ITH_OK;
}

static ith_status list_ranges(ith_ctx *ctx, ith_tensor index, ith_tensor first, ith_tensor offsets)
{
    (void)ctx;
    for (int64_t g = 0; g < first.shape[0]; g++)
        for (int32_t at = *int_at(offsets, g), i = 0; at + i < *int_at(offsets, g + 1); i++)
            *int_at(index, at + i) = *int_at(first, g) + i;
    return ITH_OK;
}

static ith_status cast(ith_ctx *ctx, ith_tensor y, ith_tensor x)
{
    (void)ctx;
    for (int64_t i = 0; i < ith_numel(y); i++)
        ith_convert(address(y, i), y.dtype, address(x, i), x.dtype, 1);
    return ITH_OK;
}

static ith_status zero(ith_ctx *ctx, ith_tensor y)
{
    (void)ctx;
    for (int64_t i = 0; i < ith_numel(y); i++)
        memset(address(y, i), 0, (size_t)ith_dtype_bytes(y.dtype));
    return ITH_OK;
}

/* Counting sort. While rows are dealt out, offsets[e] is the next free row of expert e; afterwards
 * it is the begin of e + 1, so the list is moved up by one. */
static ith_status expert_sort(ith_ctx *ctx, ith_tensor offsets, ith_tensor source,
                              ith_tensor row_of, ith_tensor topk_idx)
{
    (void)ctx;
    int64_t experts = offsets.shape[0] - 1, pairs = ith_numel(topk_idx);
    for (int64_t e = 0; e <= experts; e++)
        *int_at(offsets, e) = 0;
    for (int64_t i = 0; i < pairs; i++) {
        int64_t e = *int_at(topk_idx, i);
        ITH_ASSERT(e >= 0 && e < experts);
        *int_at(offsets, e + 1) += 1;
    }
    for (int64_t e = 0; e < experts; e++)
        *int_at(offsets, e + 1) += *int_at(offsets, e);
    for (int64_t i = 0; i < pairs; i++) {
        int32_t row = (*int_at(offsets, *int_at(topk_idx, i)))++;
        *int_at(row_of, i) = row;
        *int_at(source, row) = (int32_t)(i / topk_idx.shape[1]);
    }
    for (int64_t e = experts; e > 0; e--)
        *int_at(offsets, e) = *int_at(offsets, e - 1);
    *int_at(offsets, 0) = 0;
    return ITH_OK;
}

/* These are in double whatever the type of their inputs. */
static ith_status dot_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b)
{
    return ith_ref_f64.dot_accumulate.run(ctx, out, a, b);
}

static ith_status sumsq_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor x)
{
    return ith_ref_f64.sumsq_accumulate.run(ctx, out, x);
}

static ith_status clip_scale(ith_ctx *ctx, ith_tensor norm, ith_tensor scale, ith_tensor sumsq,
                             float max_norm)
{
    return ith_ref_f64.clip_scale.run(ctx, norm, scale, sumsq, max_norm);
}

const ith_backend *ith_backend_ref(void)
{
    static const ith_backend table = {
        .name = "ref",
        .embedding_forward = {embedding_forward, NULL},
        .embedding_backward = {embedding_backward, NULL},
        .rmsnorm_forward = {rmsnorm_forward, NULL},
        .rmsnorm_backward = {rmsnorm_backward, NULL},
        .qk_norm_rope_forward = {qk_norm_rope_forward, NULL},
        .qk_norm_rope_backward = {qk_norm_rope_backward, NULL},
        .linear_forward = {linear_forward, NULL},
        .linear_backward_input = {linear_backward_input, NULL},
        .linear_backward_weight = {linear_backward_weight, NULL},
        .attention_forward = {attention_forward, attention_forward_workspace},
        .attention_backward = {attention_backward, attention_backward_workspace},
        .attention_merge = {attention_merge, NULL},
        .attention_decode = {attention_decode, attention_decode_workspace},
        .swiglu_forward = {swiglu_forward, NULL},
        .swiglu_backward = {swiglu_backward, NULL},
        .gather_rows = {gather_rows, NULL},
        .scatter_rows = {scatter_rows, NULL},
        .list_ranges = {list_ranges, NULL},
        .add = {add, NULL},
        .cast = {cast, NULL},
        .zero = {zero, NULL},
        .cross_entropy = {cross_entropy, NULL},
        .cross_entropy_confident = {cross_entropy_confident, NULL},
        .choose_ids = {choose_ids, NULL},
        .dot_accumulate = {dot_accumulate, NULL},
        .router_forward = {router_forward, NULL},
        .router_backward = {router_backward, NULL},
        .group_router_forward = {group_router_forward, NULL},
        .group_router_backward = {group_router_backward, NULL},
        .expert_load = {expert_load, NULL},
        .expert_sort = {expert_sort, NULL},
        .grouped_linear_forward = {grouped_linear_forward, NULL},
        .grouped_linear_backward_input = {grouped_linear_backward_input, NULL},
        .grouped_linear_backward_weight = {grouped_linear_backward_weight, NULL},
        .expert_combine = {expert_combine, NULL},
        .expert_combine_backward = {expert_combine_backward, NULL},
        .conv1d_silu_forward = {conv1d_silu_forward, NULL},
        .conv1d_silu_backward = {conv1d_silu_backward, NULL},
        .gdn_gates_forward = {gdn_gates_forward, NULL},
        .gdn_gates_backward = {gdn_gates_backward, NULL},
        .gated_delta_rule_forward = {gated_delta_rule_forward, gated_delta_rule_forward_workspace},
        .gated_delta_rule_backward = {gated_delta_rule_backward,
                                      gated_delta_rule_backward_workspace},
        .gated_rmsnorm_forward = {gated_rmsnorm_forward, NULL},
        .gated_rmsnorm_backward = {gated_rmsnorm_backward, NULL},
        .sigmoid_gate_forward = {sigmoid_gate_forward, NULL},
        .sigmoid_gate_backward = {sigmoid_gate_backward, NULL},
        .row_gate_forward = {row_gate_forward, NULL},
        .row_gate_backward = {row_gate_backward, NULL},
        .layernorm_forward = {layernorm_forward, NULL},
        .layernorm_backward = {layernorm_backward, NULL},
        .bias_add = {bias_add, NULL},
        .bias_backward = {bias_backward, NULL},
        .gelu_forward = {gelu_forward, NULL},
        .gelu_backward = {gelu_backward, NULL},
        .sumsq_accumulate = {sumsq_accumulate, NULL},
        .clip_scale = {clip_scale, NULL},
        .adamw = {adamw, NULL},
    };
    return &table;
}
