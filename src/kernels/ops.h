/* ops.h - every operator: what it computes, on which shapes, with which rounding.
 *
 * Conventions. T rows (packed tokens), D width, Hq/Hkv query and key/value heads, Dh head size, V
 * words, E experts, k experts per token, S = T*k expert rows. `act` is the activation type, F32 or
 * BF16 (the reference also takes F64); "f32" scalars and statistics are F64 when act is F64.
 * Products are accumulated in f32 or wider and rounded once. Outputs come first, then what is saved
 * for backward, then inputs, weights, scalars. Activation gradients overwrite; parameter gradients
 * (dw, f32) accumulate (+=). Outputs and scratch alias no input unless said so. Rows of 2-D views
 * may be strided; the last dimension is contiguous. T = 0 is legal everywhere and does nothing.
 * Index tensors are I32 on the device. All calls are asynchronous on CUDA, in program order.
 * Errors: shapes and types are assertions (a bug); the status reports what a device can fail. */
#ifndef ITH_KERNELS_OPS_H
#define ITH_KERNELS_OPS_H

#include "kernels/ctx.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- embedding ---- */
/* y[t,:] = w[ids[t],:]
 * y: [T,D] act   ids: [T], in range (checked upstream)   w: [V,D] act */
ith_status ith_embedding_forward(ith_ctx *ctx, ith_tensor y, ith_tensor ids, ith_tensor w);
/* dw[ids[t],:] += dy[t,:]
 * dw: [V,D] f32   Deterministic: rows of one id are added in order of t. */
ith_status ith_embedding_backward(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor ids);

/* ---- RMSNorm (Zhang & Sennrich 2019) ---- */
/*     s = x (+ residual)    sum[t,:] = s rounded to act    rstd[t] = 1/sqrt(mean(sum^2) + eps)
 *     y = w * round(sum*rstd)        w_offset = 0 (Qwen3)
 *     y = round(sum*rstd*(1 + w))    w_offset = 1 (Qwen3.5, weights around zero)
 * y, sum, x, residual: [T,D] act   rstd: [T] f32   w: [D] act
 * residual and sum may both be absent (plain norm); sum may alias x or residual; y may be absent
 * (only sum and rstd). */
ith_status ith_rmsnorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor sum, ith_tensor rstd,
                               ith_tensor x, ith_tensor residual, ith_tensor w, float eps,
                               float w_offset);
/*     h = dy*(w_offset + w)    xh = x*rstd
 *     dx = rstd*(h - xh*mean(h*xh)) (+ dres)    dw[d] += sum_t dy*xh
 * dx, dy, x, dres: [T,D] act   dw: [D] f32, may be absent (frozen)
 * dres may be absent; dx may alias dres or dy. Deterministic: dw is summed in a fixed order. */
ith_status ith_rmsnorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                ith_tensor dres, ith_tensor x, ith_tensor rstd, ith_tensor w,
                                float w_offset);

/* ---- per-head RMSNorm of q and k, then RoPE (Su et al. 2021, half-split form) ---- */
/* For each head vector u of length Dh, i < rd/2 and p = position_ids[t]:
 *     n = norm(u; w, eps) rounded to act, as in the plain norm: w_offset = 0 rounds twice
 *     y[i] = n[i]*cos[p,i] - n[i+rd/2]*sin[p,i]
 *     y[i+rd/2] = n[i+rd/2]*cos[p,i] + n[i]*sin[p,i]        the rest passes
 * q_out, q: [T,Hq,Dh] act   k_out, k: [T,Hkv,Dh] act   q_rstd: [T,Hq] f32   k_rstd: [T,Hkv] f32
 * q_w, k_w: [Dh] act, both absent: no norm (then rstd is absent too)   cos, sin: [P,rd/2] act
 * position_ids: [T] I32 in [0,P), or [3,T] for interleaved mRoPE: frequency i reads row i % 3
 * (time, height, width), the only sections that the config reader lets through; any other
 * assignment: tables of T rows made by the caller, and position_ids = 0..T-1.
 * Head views may be strided rows of one qkv buffer; q_out and k_out may alias q and k. */
ith_status ith_qk_norm_rope_forward(ith_ctx *ctx, ith_tensor q_out, ith_tensor k_out,
                                    ith_tensor q_rstd, ith_tensor k_rstd, ith_tensor q,
                                    ith_tensor k, ith_tensor q_w, ith_tensor k_w, ith_tensor cos,
                                    ith_tensor sin, ith_tensor position_ids, float eps,
                                    float w_offset);
/* Adjoint: dq, dk (may alias dq_out, dk_out) from dq_out, dk_out; dq_w, dk_w: [Dh] f32 += (absent:
 * frozen or no norm). */
ith_status ith_qk_norm_rope_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dq_w,
                                     ith_tensor dk_w, ith_tensor dq_out, ith_tensor dk_out,
                                     ith_tensor q, ith_tensor k, ith_tensor q_rstd,
                                     ith_tensor k_rstd, ith_tensor q_w, ith_tensor k_w,
                                     ith_tensor cos, ith_tensor sin, ith_tensor position_ids,
                                     float w_offset);

/* ---- matrix products ---- */
/* y = x w^T (+ y when accumulate)
 * y: [T,N] act or f32   x: [T,K] act   w: [N,K] act   2TNK FLOP */
ith_status ith_linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                              bool accumulate);
/* dx = dy w (+ dx when accumulate)     dx: [T,K] act   dy: [T,N] act */
ith_status ith_linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor w,
                                     bool accumulate);
/* dw += dy^T x                         dw: [N,K] f32 */
ith_status ith_linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy, ith_tensor x);

/* ---- attention over packed documents, grouped queries (flash form: no [T,T] memory) ---- */
/* Query head h reads kv head h / (Hq/Hkv):
 *     o = softmax(scale * q k^T) v    lse = log sum exp
 * Key j is seen by query i of the same document always, or (causal) when j <= i; with block masks
 * in seqs (ctx.h) when ith_keys_seen says so, computed from indices and never built. Keys outside
 * are not touched on the CPU.
 * o, q: [T,Hq,Dh] act   k, v: [T,Hkv,Dh] act   lse: [T,Hq] f32 values, in a layout that is the
 * backend's own (contiguous memory of T*Hq elements)
 * Parts of an attention over several ranks: with a window in seqs, q and k (K rows) are any rows of
 * the batch, under any mask; a query that sees none of these keys has o = 0 and lse = -inf. All
 * results may be f32 beside BF16 inputs; rows of lse are [Hq] each. */
ith_status ith_attention_forward(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                 ith_tensor k, ith_tensor v, ith_seqs seqs, float scale,
                                 bool causal);
/* dq, dk, dv from do_ (gradient of o).  Views may be strided rows of one dqkv buffer. Not aliased
 * with inputs. */
ith_status ith_attention_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                  ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                  ith_tensor o, ith_tensor lse, ith_seqs seqs, float scale,
                                  bool causal);
/* Softmax over the keys of two parts from those of each:
 *     m = max(lse, part_lse)    a = e^(lse - m)    b = e^(part_lse - m)
 *     o = (a*o + b*part_o) / (a + b)    lse = m + log(a + b)
 * A part of no key has lse = -inf and o = 0; so has the result when both are of none.
 * o, part_o: [T,Hq,Dh] f32   lse, part_lse: [T,Hq] f32 */
ith_status ith_attention_merge(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor part_o,
                               ith_tensor part_lse);
/* One or more new queries per sequence against its cache. Causal among the new ones; a query that
 * sees no row (length 0: an idle sequence) gives 0.
 * q, o: [B*n,Hq,Dh] act, n queries per sequence, its last positions
 * k_cache, v_cache: [B,C,Hkv,Dh] act   lengths: [B] I32 valid cache rows including the new ones
 * lse: absent; or [B*n,Hq] f32, and o is f32 then: a part of a cache that several ranks hold, for
 * ith_attention_merge */
ith_status ith_attention_decode(ith_ctx *ctx, ith_tensor o, ith_tensor lse, ith_tensor q,
                                ith_tensor k_cache, ith_tensor v_cache, ith_tensor lengths,
                                float scale);

/* ---- SwiGLU ---- */
/* h = silu(gate)*up        silu is rounded to act, then the product
 * gate_up: [T,2I] act, gate in columns [0,I)   h: [T,I] act */
ith_status ith_swiglu_forward(ith_ctx *ctx, ith_tensor h, ith_tensor gate_up);
/* dgate_up (may alias gate_up) from dh; h is made again when present (for the weight gradient of
 * down_proj). h may alias dh. */
ith_status ith_swiglu_backward(ith_ctx *ctx, ith_tensor dgate_up, ith_tensor h, ith_tensor dh,
                               ith_tensor gate_up);

/* ---- rows and elements ---- */
/* y[i,:] = x[idx[i],:]    y: [M,D]   x: [T,D]   idx: [M] */
ith_status ith_gather_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx);
/* y[idx[i],:] = x[i,:]    idx has no repeats; other rows of y stay */
ith_status ith_scatter_rows(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor idx);
/* index[offsets[g] + i] = first[g] + i: the rows of G ranges, one range after the other.
 * index: [N]   first: [G]   offsets: [G+1], rising from 0 to N; all I32 */
ith_status ith_list_ranges(ith_ctx *ctx, ith_tensor index, ith_tensor first, ith_tensor offsets);
/* y = a + b, rounded once; y may alias either */
ith_status ith_add(ith_ctx *ctx, ith_tensor y, ith_tensor a, ith_tensor b);
/* y = x with conversion between F32, BF16 (F64 in the reference) */
ith_status ith_cast(ith_ctx *ctx, ith_tensor y, ith_tensor x);
/* All elements zero. */
ith_status ith_zero(ith_ctx *ctx, ith_tensor y);

/* ---- cross entropy, gradient in the same pass ---- */
/*     lse[i] = log sum exp logits[i,:] (f32)    row_loss[i] = lse[i] - logits[i,labels[i]]
 *     when gradient: logits[i,:] <- (softmax - onehot) * seeds[i], rounded to act
 * logits: [M,V] act or f32 (in place)   row_loss, seeds: [M] f32   labels: [M] I32 in [0,V)
 * seeds may be absent without gradient. */
ith_status ith_cross_entropy(ith_ctx *ctx, ith_tensor row_loss, ith_tensor logits,
                             ith_tensor labels, ith_tensor seeds, bool gradient);
/* The same with confidence-aware training (CAP, dParallel): rows whose label is the likeliest id
 * already (a tie counts) are to become surer. With p = softmax(logits[i,:]):
 *     H_i = -sum_v p_v log p_v
 *     right[i] = logits[i,labels[i]] >= max(logits[i,:]), 1 or 0
 *     row_confidence[i] = right[i] * confidence * H_i
 *     when gradient: logits[i,v] <- the above - right[i]*confidence*seeds[i] * p_v (log p_v + H_i)
 * The choice passes no gradient. row_confidence, right: [M] f32 */
ith_status ith_cross_entropy_confident(ith_ctx *ctx, ith_tensor row_loss, ith_tensor row_confidence,
                                       ith_tensor right, ith_tensor logits, ith_tensor labels,
                                       ith_tensor seeds, float confidence, bool gradient);
/* Which id stands at each row, of diffusion decoding. With z = logits[t,:]:
 *     e_v = exp((z_v - max z) * scale)    S = sum_v e_v over all ids
 *     ids[t] = the id but `barred` with the largest z (ties: lower id); with draws[t] >= 0, in
 *              [0,1]: the first id but `barred` at which the sum of e over ids but `barred`
 *              exceeds draws[t] * (S - e_barred)
 *     probability[t] = e_ids[t] / S, summed in double
 * ids: [T] I32   probability: [T] f32   logits: [T,V] act, V > 1   draws: [T] f32, may be absent
 * barred: an id, or -1 */
ith_status ith_choose_ids(ith_ctx *ctx, ith_tensor ids, ith_tensor probability, ith_tensor logits,
                          ith_tensor draws, float scale, int64_t barred);
/* out[0] += sum_i a[i]*b[i] in double, fixed order
 * b may be absent (plain sum).   out: [1] F64   a, b: [n] f32 */
ith_status ith_dot_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor a, ith_tensor b);

/* ---- experts ---- */
/*     probs = softmax(logits) in f32    topk_idx: the k largest (ties: lower index)
 *     topk_w = their probs, divided by their sum when norm_topk, rounded to act
 * probs: [T,E] f32   topk_w: [T,k] f32   topk_idx: [T,k] I32   logits: [T,E] act */
ith_status ith_router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                              ith_tensor probs, ith_tensor logits, bool norm_topk);
/* dlogits: [T,E] act, from dtopk_w: [T,k] f32. When expert_fraction f (f_e = assignments/N): [E]
 * f32 is present, the load balancing loss adds
 *     aux_scale * p*(f - sum p f)        aux_scale = aux_coef*E/N times the loss seed */
ith_status ith_router_backward(ith_ctx *ctx, ith_tensor dlogits, ith_tensor dtopk_w,
                               ith_tensor topk_w, ith_tensor topk_idx, ith_tensor probs,
                               ith_tensor expert_fraction, float aux_scale, bool norm_topk);
/* Sigmoid router with groups (LLaDA2, DeepSeek-V3):
 *     s = sigmoid(logits) in f32    c = s + bias
 *     topk_w = scaling * s / (sum of the chosen s + 1e-20); for k = 1 scaling * s
 * The E experts form n_group stretches; a group's score is the sum of its two largest c; the
 * topk_group best groups stay; of their experts the k largest c are chosen (ties: lower index, of
 * groups as of experts). The bias serves the choice alone.
 * topk_w: [T,k] f32   topk_idx: [T,k] I32   scores: [T,E] f32 = s
 * logits: [T,E] f32   bias: [E] f32, may be absent (0) */
ith_status ith_group_router_forward(ith_ctx *ctx, ith_tensor topk_w, ith_tensor topk_idx,
                                    ith_tensor scores, ith_tensor logits, ith_tensor bias,
                                    int64_t n_group, int64_t topk_group, float scaling);
/* With S = sum of the chosen s + 1e-20:
 *     ds = scaling * (dtopk_w / S - sum_j dtopk_w_j s_j / S^2); for k = 1 scaling * dtopk_w
 *     dlogits = ds * s * (1 - s), zero where not chosen
 * dlogits: [T,E] act   The choice passes no gradient. */
ith_status ith_group_router_backward(ith_ctx *ctx, ith_tensor dlogits, ith_tensor dtopk_w,
                                     ith_tensor topk_idx, ith_tensor scores, float scaling);
/*     fraction[e] += scale * (offsets[e+1] - offsets[e])
 *     mean_prob[e] += scale * sum_t probs[t,e], fixed order
 * The two vectors of the load balancing loss E * sum_e fraction[e]*mean_prob[e] when scale = 1/N,
 * N = rows of all MoE layers.   fraction, mean_prob: [E] f32   offsets: [E+1] I32   probs: [T,E]
 * f32 */
ith_status ith_expert_load(ith_ctx *ctx, ith_tensor fraction, ith_tensor mean_prob,
                           ith_tensor offsets, ith_tensor probs, float scale);
/* Sorts the T*k (token, slot) pairs by expert, stable. No host round trip.
 * offsets: [E+1] I32, expert e owns rows [offsets[e], offsets[e+1])   source: [S] I32, token of a
 * row row_of: [T,k] I32, row of a (token, slot) */
ith_status ith_expert_sort(ith_ctx *ctx, ith_tensor offsets, ith_tensor source, ith_tensor row_of,
                           ith_tensor topk_idx);
/* For each expert e, on its rows:
 *     y = x w[e]^T
 * y: [S,N] act   x: [S,K] act   w: [E,N,K] act
 * Rows from offsets[E] on belong to nobody and stay as they are. */
ith_status ith_grouped_linear_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                      ith_tensor offsets);
ith_status ith_grouped_linear_backward_input(ith_ctx *ctx, ith_tensor dx, ith_tensor dy,
                                             ith_tensor w, ith_tensor offsets);
/* dw[e] += dy^T x over the rows of e      dw: [E,N,K] f32 */
ith_status ith_grouped_linear_backward_weight(ith_ctx *ctx, ith_tensor dw, ith_tensor dy,
                                              ith_tensor x, ith_tensor offsets);
/* y[t,:] = base[t,:] + sum_s topk_w[t,s] * x[row_of[t,s],:]
 * Slots in order, f32 sum, one rounding. topk_w absent: weights 1 (the adjoint of the gather). base
 * may be absent (0) or alias y.   y, base: [T,D]   x: [S,D] */
ith_status ith_expert_combine(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                              ith_tensor topk_w, ith_tensor row_of);
/* dx[row_of[t,s],:] = topk_w[t,s]*dy[t,:]    dtopk_w[t,s] = sum_d dy[t,d]*x[row_of[t,s],d]
 * dx may alias x. */
ith_status ith_expert_combine_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dtopk_w,
                                       ith_tensor dy, ith_tensor x, ith_tensor topk_w,
                                       ith_tensor row_of);

/* ---- Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024) ---- */
/* Causal depthwise convolution within each document, then SiLU:
 *     c[t,ch] = sum_{j<K} w[ch,j] * x[t-K+1+j, ch]        y = silu(c), rounded once
 * Rows before a document's first are its history, oldest first; zeros when history is absent.
 * y, x: [T,C] act   w: [C,K] act   history: [num_docs,K-1,C] act, overwritten with the last K-1
 * inputs of each document (decoding goes on from there)   2TCK FLOP */
ith_status ith_conv1d_silu_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor w,
                                   ith_tensor history, ith_seqs seqs);
/* dx, dy: [T,C] act, not aliased   dw: [C,K] f32 +=, may be absent.   c is made again from x. */
ith_status ith_conv1d_silu_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor dy,
                                    ith_tensor x, ith_tensor w, ith_seqs seqs);
/*     g = -exp(a_log) * softplus(a + dt_bias), f32; softplus(x) = x above 20
 *     beta = sigmoid(b) rounded to act, kept in f32
 * g, beta: [T,H] f32   a, b: [T,H] act   a_log: [H] f32   dt_bias: [H] act */
ith_status ith_gdn_gates_forward(ith_ctx *ctx, ith_tensor g, ith_tensor beta, ith_tensor a,
                                 ith_tensor b, ith_tensor a_log, ith_tensor dt_bias);
/* da, db: [T,H] act   da_log, ddt_bias: [H] f32 +=, may be absent   dg, dbeta: [T,H] f32. */
ith_status ith_gdn_gates_backward(ith_ctx *ctx, ith_tensor da, ith_tensor db, ith_tensor da_log,
                                  ith_tensor ddt_bias, ith_tensor dg, ith_tensor dbeta,
                                  ith_tensor a, ith_tensor b, ith_tensor a_log, ith_tensor dt_bias);
/* The gated delta rule, per document and value head h, with unit vectors of key head h / (Hv/Hk):
 *     qn = q / sqrt(sum q^2 + 1e-6)       kn = k / sqrt(sum k^2 + 1e-6)            (f32)
 *     S' = exp(g_t) S      delta = beta_t * (v_t - S'^T kn)      S = S' + kn delta^T
 *     o_t = scale * S^T qn
 * S [Dk,Dv] starts at zero, or at state, which is then overwritten with the last S of the document.
 * o, v: [T,Hv,Dv] act   q, k: [T,Hk,Dk] act   g, beta: [T,Hv] f32
 * state: [num_docs,Hv,Dk,Dv] f32, may be absent   7*T*Hv*Dk*Dv FLOP
 * S, unit vectors and all sums are f32. */
ith_status ith_gated_delta_rule_forward(ith_ctx *ctx, ith_tensor o, ith_tensor q, ith_tensor k,
                                        ith_tensor v, ith_tensor g, ith_tensor beta,
                                        ith_tensor state, ith_seqs seqs, float scale);
/* dq, dk (summed over the value heads of a key head), dv: act, may be strided
 * dg, dbeta: [T,Hv] f32   state, dstate: [num_docs,Hv,Dk,Dv] f32
 * state: the S at which documents start, as in forward (not written); absent: zero. dstate: in, the
 * gradient of the last S; out, that of state; absent: nobody reads the last S. States are made
 * again: nothing is saved by forward. No aliases. */
ith_status ith_gated_delta_rule_backward(ith_ctx *ctx, ith_tensor dq, ith_tensor dk, ith_tensor dv,
                                         ith_tensor dg, ith_tensor dbeta, ith_tensor dstate,
                                         ith_tensor do_, ith_tensor q, ith_tensor k, ith_tensor v,
                                         ith_tensor g, ith_tensor beta, ith_tensor state,
                                         ith_seqs seqs, float scale);
/* Per head vector:
 *     y = w * round(x * rstd) * silu(z), rounded once more        rstd = 1/sqrt(mean(x^2) + eps)
 * y, x, z: [T,H,D] act   w: [D] f32 (plain, near 1) */
ith_status ith_gated_rmsnorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor z,
                                     ith_tensor w, float eps);
/* dx, dz: [T,H,D] act; dx may alias dy   dw: [D] f32 +=, may be absent.   rstd is made again. */
ith_status ith_gated_rmsnorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dz, ith_tensor dw,
                                      ith_tensor dy, ith_tensor x, ith_tensor z, ith_tensor w,
                                      float eps);

/* ---- gates ---- */
/* y = x * round(sigmoid(gate))     y, x, gate: [T,H,D] act; y may alias x */
ith_status ith_sigmoid_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, ith_tensor gate);
/* dx = dy * s,  dgate = dy * x * s * (1 - s).   dx may alias dy. */
ith_status ith_sigmoid_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate, ith_tensor dy,
                                     ith_tensor x, ith_tensor gate);
/* y[t,:] = base[t,:] + round(sigmoid(gate[t])) * x[t,:]
 * y, base, x: [T,D] act   gate: [T,1] act   y may alias base. */
ith_status ith_row_gate_forward(ith_ctx *ctx, ith_tensor y, ith_tensor base, ith_tensor x,
                                ith_tensor gate);
/* dx[t,:] = s * dy[t,:];  dgate[t] = sum_d dy*x * s*(1-s).   dx may alias x. */
ith_status ith_row_gate_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dgate, ith_tensor dy,
                                 ith_tensor x, ith_tensor gate);

/* ---- for vision towers ---- */
/* y = (x - mean) * rstd * w + b     y, x: [T,D] act   mean, rstd: [T] f32   w, b: [D] act */
ith_status ith_layernorm_forward(ith_ctx *ctx, ith_tensor y, ith_tensor mean, ith_tensor rstd,
                                 ith_tensor x, ith_tensor w, ith_tensor b, float eps);
/* dx (+ dres, may be absent); dx may alias dy or dres.   dw, db: [D] f32 +=, absent together. */
ith_status ith_layernorm_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dw, ith_tensor db,
                                  ith_tensor dy, ith_tensor dres, ith_tensor x, ith_tensor mean,
                                  ith_tensor rstd, ith_tensor w);
/* y[t,:] += b, in place     y: [T,D] act   b: [D] act.      Adjoint: db[d] += sum_t dy[t,d], f32 */
ith_status ith_bias_add(ith_ctx *ctx, ith_tensor y, ith_tensor b);
ith_status ith_bias_backward(ith_ctx *ctx, ith_tensor db, ith_tensor dy);
/*     y = x/2 (1 + erf(x/sqrt 2))
 *     approximate: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
 * y, x: [T,D] act   y may alias x, dx may alias dy. */
ith_status ith_gelu_forward(ith_ctx *ctx, ith_tensor y, ith_tensor x, bool approximate);
ith_status ith_gelu_backward(ith_ctx *ctx, ith_tensor dx, ith_tensor dy, ith_tensor x,
                             bool approximate);

/* ---- optimizer ---- */
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    int64_t step; /* 1 for the first update */
} ith_adamw_hyper;
/* out[0] += sum x^2 in double, fixed order.   x: any shape, contiguous, f32 */
ith_status ith_sumsq_accumulate(ith_ctx *ctx, ith_tensor out, ith_tensor x);
/* norm[0] = sqrt(sumsq[0])    scale[0] = finite ? min(1, max_norm/(norm + 1e-6)) : -1
 * max_norm <= 0: no clipping.   sumsq: [1] F64   norm, scale: [1] F32
 * On the device: no host round trip between gradients and update. */
ith_status ith_clip_scale(ith_ctx *ctx, ith_tensor norm, ith_tensor scale, ith_tensor sumsq,
                          float max_norm);
/* Loshchilov & Hutter 2019, as torch.optim.AdamW. scale[0] < 0: nothing changes; else
 *     g = scale[0]*grad    m = b1 m + (1-b1) g    v = b2 v + (1-b2) g^2
 *     p = p*(1 - lr*wd) - lr * (m/(1-b1^t)) / (sqrt(v/(1-b2^t)) + eps)
 * p is `master` when present (f32; then w = round(master)), else w itself (f32, or BF16 with
 * stochastic rounding keyed by (seed, step, element)). m, v: f32 or BF16   grad: f32, set to zero
 * when zero_grad (also when scale[0] < 0). All contiguous, n elements. first: index of element 0 in
 * the whole parameter (rounding must not depend on sharding).
 *
 * All backends give the same bits: f32, each operation rounded by itself (no fused multiply-add,
 * IEEE division and square root), in this order, with the new m and v before they are rounded to
 * their type:
 *     g  = scale*grad
 *     m' = b1*m + (1-b1)*g                 v' = b2*v + ((1-b2)*g)*g
 *     p' = p*decay - (step_size*m') / (sqrt(v')*v_factor + eps)
 * where 1-b1, 1-b2, decay = 1 - lr*wd, step_size = lr/(1 - b1^t) and v_factor = 1/sqrt(1 - b2^t)
 * are made on the host in double from the float hyper-parameters, then rounded to f32.
 * Stochastic rounding of element i: r = low 16 bits of word 0 of ith_philox(key = seed, counter_hi
 * = step, counter_lo = first + i); w = (bits(p') + r) >> 16; a p' that is not finite rounds to
 * nearest. */
ith_status ith_adamw(ith_ctx *ctx, ith_tensor w, ith_tensor master, ith_tensor m, ith_tensor v,
                     ith_tensor grad, ith_tensor scale, ith_adamw_hyper hyper, uint64_t seed,
                     int64_t first, bool zero_grad);

#ifdef __cplusplus
}
#endif
#endif
