#!/usr/bin/env python3
"""Makes tests/golden/cases/llada2: reference vectors of a small LLaDA2, in float64 with numpy alone.

    tools/make_golden_llada2.py [OUTPUT_FOLDER]

What vectors made elsewhere may leave out is in it: a length that is no multiple of the block, groups of three
experts, two shared experts, no dense layer, the padding row, and decoding with edits. Decoding has no cache here:
every forward is over the whole row. The layout is that of docs/golden.md.
"""
import json
import os
import sys

import numpy as np

from make_golden import Var, adamw, backward, const, f32, linear, mlp, norm_of, rms_norm, softmax, write_safetensors

C = {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": 60, "hidden_size": 20,
     "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
     "head_dim": 12, "rms_norm_eps": 1e-6, "rope_theta": 600000.0, "partial_rotary_factor": 0.5, "num_experts": 9,
     "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 12, "num_shared_experts": 2,
     "first_k_dense_replace": 0, "routed_scaling_factor": 2.5, "score_function": "sigmoid", "use_bias": False,
     "use_qkv_bias": False, "use_qk_norm": True, "norm_topk_prob": True, "moe_router_enable_expert_bias": True,
     "attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0, "tie_word_embeddings": False,
     "pad_token_id": 2, "eos_token_id": 2, "max_position_embeddings": 2048, "torch_dtype": "float32"}
BLOCK, MASK, PROMPT, LENGTH, SEED = 4, 59, 6, 21, 6

margin = {"router": 1e9}  # smallest distance between what was chosen and what was not


def rope(x, positions):
    """x: [T, heads, head_dim]; the first part of each head turns"""
    dh, rd = C["head_dim"], int(C["head_dim"] * C["partial_rotary_factor"])
    half = rd // 2
    angle = np.outer(positions, C["rope_theta"]**(-2.0 * np.arange(half) / rd))[:, None, :]
    still = np.ones(angle.shape[:2] + (dh - rd,))
    cos = np.concatenate([np.cos(angle), np.cos(angle), still], -1)
    sin = np.concatenate([np.sin(angle), np.sin(angle), 0 * still], -1)
    turned = np.zeros((dh, dh))
    turned[half:rd, :half] = -np.eye(half)
    turned[:half, half:rd] = np.eye(half)
    return x * const(cos) + (x @ const(turned)) * const(sin)


def attention(x, w, p, positions, allowed):
    t, hq, hkv, dh = x.data.shape[0], C["num_attention_heads"], C["num_key_value_heads"], C["head_dim"]
    qkv = linear(x, w[p + "query_key_value.weight"]).reshape(t, hq + 2 * hkv, dh)
    part = [qkv.take((slice(None), np.arange(a, b))) for a, b in ((0, hq), (hq, hq + hkv), (hq + hkv, hq + 2 * hkv))]
    q = rope(rms_norm(part[0], w[p + "query_layernorm.weight"], C["rms_norm_eps"]), positions)
    k = rope(rms_norm(part[1], w[p + "key_layernorm.weight"], C["rms_norm_eps"]), positions)
    of = (slice(None), np.arange(hq) // (hq // hkv))
    q, k, v = q.swap(0, 1), k.take(of).swap(0, 1), part[2].take(of).swap(0, 1)
    weights = softmax((q @ k.swap(-1, -2)).scale(dh**-0.5) + const(np.where(allowed, 0.0, -1e30)))
    return linear((weights @ v).swap(0, 1).reshape(t, hq * dh), w[p + "dense.weight"])


def choose(s, bias):
    """The experts of one token."""
    c = s + bias
    groups = c.reshape(C["n_group"], -1)
    score = np.sort(groups, -1)[:, -2:].sum(-1)
    order = np.argsort(-score, kind="stable")
    keep = np.repeat(np.isin(np.arange(C["n_group"]), order[:C["topk_group"]]), groups.shape[1])
    c = np.where(keep, c, -np.inf)
    best = np.argsort(-c, kind="stable")
    k = C["num_experts_per_tok"]
    margin["router"] = min(margin["router"], c[best[k - 1]] - c[best[k]],
                           score[order[C["topk_group"] - 1]] - score[order[C["topk_group"]]])
    return best[:k]


def experts(x, w, p):
    t = x.data.shape[0]
    s = (const(1.0) + linear(x, w[p + "gate.weight"]).scale(-1.0).exp()).pow(-1.0)
    chosen = np.array([choose(row, w[p + "gate.expert_bias"].data) for row in s.data])
    weight = s.take((np.arange(t)[:, None], chosen))
    weight = (weight * (weight.sum(-1) + const(1e-20)).pow(-1.0)).scale(C["routed_scaling_factor"])
    out = mlp(x, w, p + "shared_experts.")
    for e in range(C["num_experts"]):
        rows, place = np.nonzero(chosen == e)
        if len(rows):
            y = mlp(x.take((rows,)), w, f"{p}experts.{e}.") * weight.take((rows, place)).reshape(-1, 1)
            spread = np.zeros((t, len(rows)))
            spread[rows, np.arange(len(rows))] = 1
            out = out + const(spread) @ y
    return out


def logits_of(w, ids, positions, allowed):
    x = w["model.word_embeddings.weight"].take((np.asarray(ids),))
    for layer in range(C["num_hidden_layers"]):
        p, eps = f"model.layers.{layer}.", C["rms_norm_eps"]
        x = x + attention(rms_norm(x, w[p + "input_layernorm.weight"], eps), w, p + "attention.", positions, allowed)
        x = x + experts(rms_norm(x, w[p + "post_attention_layernorm.weight"], eps), w, p + "mlp.")
    return linear(rms_norm(x, w["model.norm.weight"], C["rms_norm_eps"]), w["lm_head.weight"])


def noisy_and_clean(length):
    """Which row of [noisy; clean] sees which."""
    half, block = np.repeat([0, 1], length), np.tile(np.arange(length) // BLOCK, 2)
    hq, hk, bq, bk = half[:, None], half[None], block[:, None], block[None]
    return ((hq == 0) & (hk == 0) & (bq == bk)) | ((hq == 0) & (hk == 1) & (bq > bk)) | \
        ((hq == 1) & (hk == 1) & (bq >= bk))


def block_causal(length):
    block = np.arange(length) // BLOCK
    return block[:, None] >= block[None]


def cross_entropy(z, labels):
    rows = np.nonzero(labels >= 0)[0]
    picked = z.take((rows,))
    shifted = picked + const(-picked.data.max(-1, keepdims=True))
    target = shifted.take((np.arange(len(rows)), labels[rows])).reshape(-1, 1)
    return (shifted.exp().sum(-1).log() + target.scale(-1.0)).sum(0).scale(1.0 / len(rows))


def variables(weights):
    return {k: Var(v) for k, v in weights.items()}


def train(weights, clean, noisy, labels):
    w, n = variables(weights), len(clean)
    z = logits_of(w, np.concatenate([noisy, clean]), np.tile(np.arange(n), 2), noisy_and_clean(n))
    z = z.take((np.arange(n),))
    loss = cross_entropy(z, labels)
    backward(loss)
    grads = {k: np.zeros_like(v.data) if v.grad is None else v.grad for k, v in w.items() if "expert_bias" not in k}
    grads["model.word_embeddings.weight"][C["pad_token_id"]] = 0
    return float(loss.data[0, 0]), z.data, grads


def candidates(weights, row, begin, end, scale):
    """Likeliest id but the mask id at each position of the block, and its probability."""
    z = logits_of(variables(weights), row[:end], np.arange(end), block_causal(end)).data[begin:] * scale
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    z[:, MASK] = -np.inf
    order = np.sort(z, -1)
    margin["logit"] = min(margin["logit"], (order[:, -1] - order[:, -2]).min())
    best = z.argmax(-1)
    return best, p[np.arange(len(best)), best]


def decode(weights, prompt, name, scale, steps, threshold, edit=None, post=0, new=10):
    total = -(-(len(prompt) + new) // BLOCK) * BLOCK
    row = np.concatenate([prompt, np.full(total - len(prompt), MASK)])
    trace, cached, edits, stopped = [], 1, 0, None
    margin.update(logit=1e9, router=1e9, confidence=1e9)
    for begin in range(len(prompt) // BLOCK * BLOCK, total, BLOCK):
        end, step, posted = begin + BLOCK, 0, 0
        while True:
            masked = np.nonzero(row[begin:end] == MASK)[0]
            best, confidence = candidates(weights, row, begin, end, scale)
            quota = BLOCK // steps + (step < BLOCK % steps)
            order = masked[np.argsort(-confidence[masked], kind="stable")]
            sure = [i for i in order if threshold is not None and confidence[i] > threshold]
            take = sure if len(sure) >= quota else list(order[:quota])
            changed = [i for i in range(max(len(prompt) - begin, 0), BLOCK) if edit is not None and
                       row[begin + i] not in (MASK, best[i]) and confidence[i] > edit]
            for limit, among in ((threshold, masked), (edit, range(BLOCK))):
                if limit is not None:
                    margin["confidence"] = min([margin["confidence"]] + [abs(confidence[i] - limit) for i in among])
            rest = [i for i in order if i not in take]
            if rest and take and not len(sure) >= quota:
                margin["confidence"] = min(margin["confidence"], confidence[take[-1]] - confidence[rest[0]])
            accepted = [[int(begin + i), int(best[i]), float(confidence[i])] for i in take + changed]
            for position, token, _ in accepted:
                row[position] = token
            trace.append({"accepted": accepted})
            step += 1
            posted += len(masked) == 0
            edits += len(changed)
            if (row[begin:end] == MASK).any() or (edit is not None and accepted and posted < post):
                continue
            break
        found = np.nonzero(row[len(prompt):end] == C["eos_token_id"])[0]
        if len(found):
            stopped = begin // BLOCK
        if len(found) or end == total:
            break
        cached += bool(accepted)  # a commit, unless the last forward was of the final tokens
    answer = row[len(prompt):len(prompt) + new]
    stop = np.nonzero(answer == C["eos_token_id"])[0]
    assert min(margin["logit"], margin["router"]) > 1e-4 and margin["confidence"] > 2e-5, (name, margin)
    print(f"  {name}: {len(trace)} forwards, {edits} edits, margins {margin}")
    return {"name": name, "prompt": prompt.tolist(), "block_length": BLOCK, "mask_id": MASK,
            "eos_id": C["eos_token_id"], "gen_length": new, "head_scale": scale, "threshold": threshold,
            "steps": steps, "edit_threshold": edit, "max_post_steps": post, "edits": edits,
            "generated": answer[:stop[0] + 1 if len(stop) else new].tolist(), "sequence": row.tolist(),
            "stopped_at_block": stopped, "forwards": len(trace), "forwards_with_cache": cached + len(trace) + 1,
            "trace": trace}


def make_weights(rng):
    c, d = C, C["hidden_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.word_embeddings.weight": (c["vocab_size"], d), "lm_head.weight": (c["vocab_size"], d),
              "model.norm.weight": (d,)}
    for layer in range(c["num_hidden_layers"]):
        p, i = f"model.layers.{layer}.", c["moe_intermediate_size"]
        shapes.update({p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,),
                       p + "attention.query_key_value.weight": (q + 2 * kv, d), p + "attention.dense.weight": (d, q),
                       p + "attention.query_layernorm.weight": (c["head_dim"],),
                       p + "attention.key_layernorm.weight": (c["head_dim"],),
                       p + "mlp.gate.weight": (c["num_experts"], d), p + "mlp.gate.expert_bias": (c["num_experts"],)})
        for name, width in [(f"experts.{e}.", i) for e in range(c["num_experts"])] + \
                [("shared_experts.", i * c["num_shared_experts"])]:
            shapes.update({p + f"mlp.{name}gate_proj.weight": (width, d), p + f"mlp.{name}up_proj.weight": (width, d),
                           p + f"mlp.{name}down_proj.weight": (d, width)})
    return {k: (1 + 0.3 * rng.standard_normal(s) if "norm" in k else 0.3 * rng.standard_normal(s))
            .astype(np.float32).astype(np.float64) for k, s in sorted(shapes.items())}


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__),
                                                                "../tests/golden/cases/llada2")
    rng = np.random.default_rng(SEED)
    weights = make_weights(rng)
    clean = rng.integers(3, MASK, LENGTH)
    clean[[4, 9, 16]] = C["pad_token_id"]
    masked = (rng.random(LENGTH) < 0.5) & (np.arange(LENGTH) >= PROMPT - 1)
    masked[8:12] = False  # a block without a loss row
    noisy, labels = np.where(masked, MASK, clean), np.where(masked, clean, -100)
    positions = np.arange(LENGTH)
    loss, logits, grads = train(weights, clean, noisy, labels)
    causal = logits_of(variables(weights), noisy, positions, block_causal(LENGTH)).data
    everything = logits_of(variables(weights), noisy, positions, np.ones((LENGTH, LENGTH), bool))
    full_loss = float(cross_entropy(everything, labels).data[0, 0])
    a = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}
    biases = {k: v for k, v in weights.items() if "expert_bias" in k}
    trained = {k: v for k, v in weights.items() if k not in biases}
    after, a["losses"], a["grad_norms"] = adamw(trained, lambda p: train({**p, **biases}, clean, noisy, labels), a)
    assert margin["router"] > 1e-4, margin
    prompt = rng.integers(3, MASK, PROMPT)
    runs = [decode(weights, prompt, "threshold", 8, BLOCK, 0.6),
            decode(weights, prompt, "three steps", 1, 3, None),
            decode(weights, prompt, "edits", 8, BLOCK, 0.6, 0.3, 16),
            decode(weights, prompt, "edits, one post step", 8, 2, None, 0.2, 1),
            decode(weights, np.append(prompt, prompt[:2]), "edits after whole blocks", 8, BLOCK, 0.5, 0.5, 16)]
    assert sum(r["edits"] for r in runs) > 3
    os.makedirs(f"{folder}/hf", exist_ok=True)
    for name, value in [("hf/config.json", C), ("decode.json", {"runs": runs}),
                        ("ref.json", {"origin": f"tools/make_golden_llada2.py, seed {SEED}, numpy float64",
                                      "n": LENGTH, "block_size": BLOCK, "mask_id": MASK, "loss": loss,
                                      "grad_norm": norm_of(grads), "loss_full_bidirectional": full_loss, "adamw": a})]:
        with open(f"{folder}/{name}", "w") as f:
            json.dump(value, f, indent=1)
            f.write("\n")
    write_safetensors(f"{folder}/hf/model.safetensors", f32(weights))
    write_safetensors(f"{folder}/grads/model.safetensors", f32(grads))
    write_safetensors(f"{folder}/after3/model.safetensors", f32({**after, **biases}))
    row = {"clean": clean, "noisy": noisy, "labels": labels}
    write_safetensors(f"{folder}/ref.safetensors", {
        **{k: v[None].astype(np.int64) for k, v in row.items()}, "noisy_logits": logits[None].astype(np.float32),
        "block_causal_logits": causal[None].astype(np.float32),
        "full_logits": everything.data[None].astype(np.float32)})
    print(f"{folder}: loss {loss:.6f}, all see all {full_loss:.6f}")


if __name__ == "__main__":
    main()
