#!/usr/bin/env python3
"""Makes tests/golden/cases/*: reference vectors of small Qwen3 models, in float64 with numpy alone.

    tools/make_golden.py [OUTPUT_FOLDER]

An implementation of its own, written from the papers and the published model code's formulas: a tape of
elementary operations gives the gradients; packed documents are run one by one, so that packing is checked
against the absence of packing. The layout is described in tests/golden/golden_check.c. Everything follows
from the seeds below; the files are float32. Needs numpy, for making the files only.
"""
import json
import math
import os
import sys

import numpy as np

# ---- a tape of operations ----


class Var:
    def __init__(self, data, parents=()):
        self.data, self.parents, self.grad = np.asarray(data, np.float64), parents, None

    def __add__(self, o):
        return Var(self.data + o.data, ((self, lambda g: g), (o, lambda g: g)))

    def __mul__(self, o):
        return Var(self.data * o.data, ((self, lambda g: g * o.data), (o, lambda g: g * self.data)))

    def __matmul__(self, o):
        return Var(self.data @ o.data, ((self, lambda g: g @ np.swapaxes(o.data, -1, -2)),
                                        (o, lambda g: np.swapaxes(self.data, -1, -2) @ g)))

    def scale(self, s):
        return Var(self.data * s, ((self, lambda g: g * s),))

    def pow(self, p):
        return Var(self.data**p, ((self, lambda g: g * p * self.data**(p - 1)),))

    def exp(self):
        y = np.exp(self.data)
        return Var(y, ((self, lambda g: g * y),))

    def log(self):
        return Var(np.log(self.data), ((self, lambda g: g / self.data),))

    def sum(self, axis):
        return Var(self.data.sum(axis, keepdims=True),
                   ((self, lambda g: np.broadcast_to(g, self.data.shape)),))

    def reshape(self, *shape):
        return Var(self.data.reshape(shape), ((self, lambda g: g.reshape(self.data.shape)),))

    def swap(self, a, b):
        return Var(np.swapaxes(self.data, a, b), ((self, lambda g: np.swapaxes(g, a, b)),))

    def take(self, index):
        def back(g):
            d = np.zeros_like(self.data)
            np.add.at(d, index, g)
            return d
        return Var(self.data[index], ((self, back),))


def const(x):
    return Var(x)


def backward(root):
    order, seen = [], set()

    def visit(v):
        stack = [(v, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack.extend((p, False) for p, _ in node.parents)
    visit(root)
    root.grad = np.ones_like(root.data)
    for node in reversed(order):
        for parent, fn in node.parents:
            g = fn(node.grad)
            while g.ndim > parent.data.ndim:  # undo broadcasting
                g = g.sum(0)
            for axis, n in enumerate(parent.data.shape):
                if n == 1 and g.shape[axis] != 1:
                    g = g.sum(axis, keepdims=True)
            parent.grad = g if parent.grad is None else parent.grad + g


# ---- the model ----


def rms_norm(x, w, eps):
    square = (x * x).sum(-1).scale(1.0 / x.data.shape[-1])
    return x * (square + const(eps)).pow(-0.5) * w


def linear(x, w):
    return x @ w.swap(-1, -2)


def softmax(x):
    e = (x + const(-x.data.max(-1, keepdims=True))).exp()
    return e * e.sum(-1).pow(-1.0)


def silu(x):
    return x * (const(1.0) + x.scale(-1.0).exp()).pow(-1.0)


def frequencies(c):
    dim, theta = c["head_dim"], c["rope_theta"]
    base = np.array([theta**(-2.0 * i / dim) for i in range(dim // 2)])
    s = c.get("rope_scaling")
    if not s:
        return base, 1.0
    if s["rope_type"] == "linear":
        return base / s["factor"], 1.0
    context = s["original_max_position_embeddings"]

    def turns(n):  # the dimension that turns n times within the context
        return dim * math.log(context / (n * 2 * math.pi)) / (2 * math.log(theta))
    low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return base * (1 - ramp) + base / s["factor"] * ramp, 0.1 * math.log(s["factor"]) + 1


def rope(x, c):
    """x: [T, heads, head_dim]"""
    freq, attention_factor = frequencies(c)
    angle = np.outer(np.arange(x.data.shape[0]), freq)[:, None, :]
    cos, sin = np.cos(angle) * attention_factor, np.sin(angle) * attention_factor
    half = c["head_dim"] // 2
    turned = np.zeros((c["head_dim"], c["head_dim"]))  # (a, b) -> (-b, a)
    turned[half:, :half] = -np.eye(half)
    turned[:half, half:] = np.eye(half)
    return x * const(np.concatenate([cos, cos], -1)) + \
        (x @ const(turned)) * const(np.concatenate([sin, sin], -1))


def attention(x, w, p, c):
    t, hq, hkv, dh = x.data.shape[0], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    eps = c["rms_norm_eps"]
    q = rms_norm(linear(x, w[p + "q_proj.weight"]).reshape(t, hq, dh), w[p + "q_norm.weight"], eps)
    k = rms_norm(linear(x, w[p + "k_proj.weight"]).reshape(t, hkv, dh), w[p + "k_norm.weight"], eps)
    v = linear(x, w[p + "v_proj.weight"]).reshape(t, hkv, dh)
    of = np.arange(hq) // (hq // hkv)  # key-value head of each query head
    q = rope(q, c).swap(0, 1)
    k = rope(k, c).take((slice(None), of)).swap(0, 1)
    v = v.take((slice(None), of)).swap(0, 1)
    mask = np.where(np.tril(np.ones((t, t))) > 0, 0.0, -1e30)
    weights = softmax((q @ k.swap(-1, -2)).scale(dh**-0.5) + const(mask))
    return linear((weights @ v).swap(0, 1).reshape(t, hq * dh), w[p + "o_proj.weight"])


def mlp(x, w, p):
    return linear(silu(linear(x, w[p + "gate_proj.weight"])) * linear(x, w[p + "up_proj.weight"]),
                  w[p + "down_proj.weight"])


def experts(x, w, p, c):
    t, k = x.data.shape[0], c["num_experts_per_tok"]
    probs = softmax(linear(x, w[p + "gate.weight"]))
    chosen = np.argsort(-probs.data, -1, kind="stable")[:, :k]
    weight = probs.take((np.arange(t)[:, None], chosen))
    if c["norm_topk_prob"]:
        weight = weight * weight.sum(-1).pow(-1.0)
    out = const(np.zeros(x.data.shape))
    for e in range(c["num_experts"]):
        rows, place = np.nonzero(chosen == e)
        if len(rows) == 0:
            continue
        y = mlp(x.take((rows,)), w, f"{p}experts.{e}.") * weight.take((rows, place)).reshape(-1, 1)
        spread = np.zeros((t, len(rows)))
        spread[rows, np.arange(len(rows))] = 1
        out = out + const(spread) @ y
    return out


def logits_of(ids, w, c):
    x = w["model.embed_tokens.weight"].take((np.asarray(ids),))
    for layer in range(c["num_hidden_layers"]):
        p, eps = f"model.layers.{layer}.", c["rms_norm_eps"]
        x = x + attention(rms_norm(x, w[p + "input_layernorm.weight"], eps), w, p + "self_attn.", c)
        n = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        x = x + (experts(n, w, p + "mlp.", c) if c.get("num_experts") else mlp(n, w, p + "mlp."))
    head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return linear(rms_norm(x, w["model.norm.weight"], c["rms_norm_eps"]), head)


def loss_of(documents, w, c):
    """documents: (ids, labels), each on its own. Returns loss, logits of all rows."""
    valid = sum(int((labels[1:] >= 0).sum()) for _, labels in documents)
    total, all_logits = const(np.zeros((1, 1))), []
    for ids, labels in documents:
        z = logits_of(ids, w, c)
        all_logits.append(z.data)
        rows = np.nonzero(labels[1:] >= 0)[0]
        if len(rows) == 0:
            continue
        picked = z.take((rows,))
        shifted = picked + const(-picked.data.max(-1, keepdims=True))
        target = shifted.take((np.arange(len(rows)), labels[1:][rows])).reshape(-1, 1)
        total = total + (shifted.exp().sum(-1).log() + target.scale(-1.0)).sum(0)
    return total.scale(1.0 / valid), np.concatenate(all_logits)


# ---- files ----


def write_safetensors(path, tensors):
    kinds = {"float32": "F32", "int32": "I32", "int64": "I64"}
    header, at, blobs = {"__metadata__": {"format": "pt"}}, 0, []
    for name in sorted(tensors):
        a = np.ascontiguousarray(tensors[name])
        header[name] = {"dtype": kinds[str(a.dtype)], "shape": list(a.shape),
                        "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
        blobs.append(a.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def f32(d):
    return {k: v.astype(np.float32) for k, v in d.items()}


def make_weights(c, rng):
    d, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], \
        c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], d)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes.update({p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,),
                       p + "self_attn.q_proj.weight": (q, d), p + "self_attn.k_proj.weight": (kv, d),
                       p + "self_attn.v_proj.weight": (kv, d), p + "self_attn.o_proj.weight": (d, q),
                       p + "self_attn.q_norm.weight": (c["head_dim"],),
                       p + "self_attn.k_norm.weight": (c["head_dim"],)})
        if c.get("num_experts"):
            shapes[p + "mlp.gate.weight"] = (c["num_experts"], d)
        names = [f"experts.{e}." for e in range(c.get("num_experts", 0))] or [""]
        i = c["moe_intermediate_size"] if c.get("num_experts") else c["intermediate_size"]
        for n in names:
            shapes.update({p + f"mlp.{n}gate_proj.weight": (i, d), p + f"mlp.{n}up_proj.weight": (i, d),
                           p + f"mlp.{n}down_proj.weight": (d, i)})
    return {k: (1 + 0.3 * rng.standard_normal(s) if "norm" in k else 0.2 * rng.standard_normal(s))
            .astype(np.float32).astype(np.float64) for k, s in sorted(shapes.items())}


def run(documents, weights, c):
    w = {k: Var(v) for k, v in weights.items()}
    loss, logits = loss_of(documents, w, c)
    backward(loss)
    grads = {k: np.zeros_like(v.data) if v.grad is None else v.grad for k, v in w.items()}
    return float(loss.data[0, 0]), logits, grads


def norm_of(grads):
    return math.sqrt(sum(float((g * g).sum()) for g in grads.values()))


def adamw(weights, step, a):
    """Three updates; step(weights) gives loss, logits, grads."""
    p, m, v = dict(weights), {}, {}
    losses, norms = [], []
    for t in range(1, 4):
        loss, _, grads = step(p)
        norm = norm_of(grads)
        clip = min(1.0, a["max_grad_norm"] / (norm + 1e-6))
        losses.append(loss)
        norms.append(norm)
        for k, g in grads.items():
            g = g * clip
            m[k] = a["betas"][0] * m.get(k, 0) + (1 - a["betas"][0]) * g
            v[k] = a["betas"][1] * v.get(k, 0) + (1 - a["betas"][1]) * g * g
            move = m[k] / (1 - a["betas"][0]**t) / \
                (np.sqrt(v[k] / (1 - a["betas"][1]**t)) + a["eps"])
            p[k] = p[k] * (1 - a["lr"] * a["weight_decay"]) - a["lr"] * move
    return p, losses, norms


def greedy(weights, c, prompt, new):
    w, ids, gap = {k: Var(v) for k, v in weights.items()}, list(prompt), 1e9
    for _ in range(new):
        z = logits_of(ids, w, c).data[-1]
        best = np.sort(z)[-2:]
        gap = min(gap, best[1] - best[0])
        ids.append(int(z.argmax()))
    return np.array(ids), gap


def make_case(folder, seed, **change):
    rng = np.random.default_rng(seed)
    moe = "num_experts" in change
    c = {"architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
         "model_type": "qwen3_moe" if moe else "qwen3", "vocab_size": 72, "hidden_size": 24,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 40, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
         "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False,
         "torch_dtype": "float32", **change}
    weights = make_weights(c, rng)
    n, prompt = 61, 7
    ids, lengths = rng.integers(0, c["vocab_size"], n), [1, 19, 2, 33, 12]
    labels = np.where(rng.random(n) < 0.7, ids, -100)
    packed = rng.integers(0, c["vocab_size"], sum(lengths))
    packed_labels = np.where(rng.random(len(packed)) < 0.7, packed, -100)
    cu = np.cumsum([0] + lengths)
    documents = [(packed[a:b], packed_labels[a:b]) for a, b in zip(cu, cu[1:])]
    loss, logits, grads = run([(ids, labels)], weights, c)
    packed_loss, packed_logits, packed_grads = run(documents, weights, c)
    a = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
    after, a["losses"], a["grad_norms"] = adamw(
        weights, lambda p: run([(ids, labels)], p, c), a)
    answer, gap = greedy(weights, c, ids[:prompt], 16)
    assert gap > 1e-3, f"{folder}: greedy choice hangs on {gap}"
    os.makedirs(f"{folder}/hf", exist_ok=True)
    with open(f"{folder}/hf/config.json", "w") as f:
        json.dump(c, f, indent=2)
        f.write("\n")
    with open(f"{folder}/ref.json", "w") as f:
        json.dump({"origin": f"tools/make_golden.py, seed {seed}, numpy float64",
                   "loss": loss, "grad_norm": norm_of(grads), "packed_loss": packed_loss,
                   "greedy_prompt": prompt, "adamw": a}, f, indent=2)
        f.write("\n")
    write_safetensors(f"{folder}/hf/model.safetensors", f32(weights))
    write_safetensors(f"{folder}/grads/model.safetensors", f32(grads))
    write_safetensors(f"{folder}/grads_packed/model.safetensors", f32(packed_grads))
    write_safetensors(f"{folder}/after3/model.safetensors", f32(after))
    write_safetensors(f"{folder}/ref.safetensors", {
        "input_ids": ids[None].astype(np.int64), "labels": labels[None].astype(np.int64),
        "logits": logits[None].astype(np.float32), "packed_ids": packed[None].astype(np.int64),
        "packed_labels": packed_labels[None].astype(np.int64), "cu_seqlens": cu.astype(np.int32),
        "packed_logits": packed_logits[None].astype(np.float32),
        "greedy": answer[None].astype(np.int64)})
    print(f"{folder}: loss {loss:.6f}, packed {packed_loss:.6f}, greedy gap {gap:.3g}")


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__),
                                                             "../tests/golden/cases")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    make_case(f"{root}/dense_yarn", 1, rope_scaling=yarn)
    make_case(f"{root}/tied_linear", 12, tie_word_embeddings=True, num_key_value_heads=1, head_dim=8,
              rope_scaling={"rope_type": "linear", "factor": 2.0})
    make_case(f"{root}/experts", 3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
              norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    make_case(f"{root}/experts_raw", 4, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=16,
              norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[],
              tie_word_embeddings=True, num_attention_heads=6, num_key_value_heads=6, head_dim=8)


if __name__ == "__main__":
    main()
