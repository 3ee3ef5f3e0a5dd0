#!/usr/bin/env python3
"""Makes tests/golden/cases/sees*: reference vectors of small Qwen3.5 models with images and a video.

    tools/make_golden_qwen3_5.py [OUTPUT_FOLDER]

As make_golden.py, whose tape it uses: float64, documents one by one. The delta rule is its recurrence, token by
token. Patches are random numbers: what pictures become is tested elsewhere.
"""
import json
import math
import os
import sys

import numpy as np

from make_golden import Var, adamw, backward, const, f32, linear, mlp, norm_of, silu, softmax, write_safetensors

IMAGE, VIDEO, START, END = 60, 61, 62, 63


def concat(parts, axis):
    at = np.cumsum([0] + [p.data.shape[axis] for p in parts])

    def cut(i):
        return lambda g: np.take(g, range(at[i], at[i + 1]), axis)
    return Var(np.concatenate([p.data for p in parts], axis), tuple((p, cut(i)) for i, p in enumerate(parts)))


def sigmoid(x):
    return (const(1.0) + x.scale(-1.0).exp()).pow(-1.0)


def softplus(x):
    return (const(1.0) + x.exp()).log()


def gelu_tanh(x):
    inner = (x + (x * x * x).scale(0.044715)).scale(2 * math.sqrt(2 / math.pi))
    return x * sigmoid(inner)  # (1 + tanh(y)) / 2 = sigmoid(2 y)


def gelu_erf(x):
    cdf = 0.5 * (1 + np.vectorize(math.erf)(x.data / math.sqrt(2)))
    pdf = np.exp(-0.5 * x.data**2) / math.sqrt(2 * math.pi)
    return Var(x.data * cdf, ((x, lambda g: g * (cdf + x.data * pdf)),))


def rstd(x, eps):
    return ((x * x).sum(-1).scale(1.0 / x.data.shape[-1]) + const(eps)).pow(-0.5)


def norm1(x, w, eps):  # weights around zero
    return x * rstd(x, eps) * (w + const(1.0))


def layer_norm(x, w, b):
    n = x.data.shape[-1]
    d = x + x.sum(-1).scale(-1.0 / n)
    return d * ((d * d).sum(-1).scale(1.0 / n) + const(1e-6)).pow(-0.5) * w + b


def turn(x, angle):
    """x: [T, heads, dim]; pair (i, i + half) of the first 2*half dimensions turns by angle [T, half]."""
    half, dim = angle.shape[1], x.data.shape[-1]
    cos, sin = np.ones((angle.shape[0], 1, dim)), np.zeros((angle.shape[0], 1, dim))
    cos[:, 0, :2 * half] = np.concatenate([np.cos(angle)] * 2, -1)
    sin[:, 0, :2 * half] = np.concatenate([np.sin(angle)] * 2, -1)
    other = np.zeros((dim, dim))  # (a, b) -> (-b, a)
    for i in range(half):
        other[half + i, i], other[i, half + i] = -1, 1
    return x * const(cos) + (x @ const(other)) * const(sin)


def attend(q, k, v, mask, scale):
    """[T, heads, dim] each; mask [T, T] is added."""
    q, k, v = (x.swap(0, 1) for x in (q, k, v))
    return (softmax((q @ k.swap(-1, -2)).scale(scale) + const(mask)) @ v).swap(0, 1)


# ---- tower ----


def tower(media, w, v):
    d, heads, side = v["hidden_size"], v["num_heads"], int(math.isqrt(v["num_position_embeddings"]))
    rows, cols, segment, pixels = [], [], [], []
    for grid, values in media:
        t, h, wd = grid
        for frame in range(t):
            for y in range(0, h, 2):
                for x in range(0, wd, 2):
                    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
                        rows.append((y + dy, h))
                        cols.append((x + dx, wd))
            segment += [len(segment) and segment[-1] + 1] * (h * wd)
        pixels.append(values)
    n = len(rows)
    p = "model.visual."
    table = np.zeros((n, side * side))
    for i in range(n):
        sy = rows[i][0] * (side - 1) / max(rows[i][1] - 1, 1)
        sx = cols[i][0] * (side - 1) / max(cols[i][1] - 1, 1)
        for yy, wy in ((int(sy), 1 - sy % 1), (int(sy) + 1, sy % 1)):
            for xx, wx in ((int(sx), 1 - sx % 1), (int(sx) + 1, sx % 1)):
                table[i, min(yy, side - 1) * side + min(xx, side - 1)] += wy * wx
    x = linear(const(np.concatenate(pixels)), w[p + "patch_embed.proj.weight"].reshape(d, -1)) + \
        w[p + "patch_embed.proj.bias"] + const(table) @ w[p + "pos_embed.weight"]
    half = d // heads // 2
    freq = np.array([v["rope_parameters"]["rope_theta"]**(-2.0 * i / half) for i in range(half // 2)])
    angle = np.concatenate([np.outer([r for r, _ in rows], freq), np.outer([c for c, _ in cols], freq)], -1)
    segment = np.array(segment)
    mask = np.where(segment[:, None] == segment[None, :], 0.0, -1e30)
    for i in range(v["depth"]):
        b = f"{p}blocks.{i}."
        y = layer_norm(x, w[b + "norm1.weight"], w[b + "norm1.bias"])
        qkv = (linear(y, w[b + "attn.qkv.weight"]) + w[b + "attn.qkv.bias"]).reshape(n, 3, heads, d // heads)
        q, k, u = (qkv.take((slice(None), j)) for j in range(3))
        o = attend(turn(q, angle), turn(k, angle), u, mask, (d // heads)**-0.5).reshape(n, d)
        x = x + linear(o, w[b + "attn.proj.weight"]) + w[b + "attn.proj.bias"]
        y = layer_norm(x, w[b + "norm2.weight"], w[b + "norm2.bias"])
        y = gelu_tanh(linear(y, w[b + "mlp.linear_fc1.weight"]) + w[b + "mlp.linear_fc1.bias"])
        x = x + linear(y, w[b + "mlp.linear_fc2.weight"]) + w[b + "mlp.linear_fc2.bias"]
    m = p + "merger."
    y = layer_norm(x, w[m + "norm.weight"], w[m + "norm.bias"]).reshape(n // 4, 4 * d)
    y = gelu_erf(linear(y, w[m + "linear_fc1.weight"]) + w[m + "linear_fc1.bias"])
    return linear(y, w[m + "linear_fc2.weight"]) + w[m + "linear_fc2.bias"]


# ---- text ----


def positions_of(ids, media):
    rows, frames, at, i = np.zeros((3, len(ids)), int), [], 0, 0
    for (t, h, wd), _ in media:
        frames += [(h // 2, wd // 2)] * t
    while i < len(ids):
        if ids[i] not in (IMAGE, VIDEO):
            rows[:, i] = at
            at, i = at + 1, i + 1
            continue
        h, wd = frames.pop(0)
        for y in range(h):
            for x in range(wd):
                rows[:, i] = at, at + y, at + x
                i += 1
        at += max(h, wd)
    assert not frames
    return rows


def full_attention(x, w, p, t, positions):
    n, hq, hkv, dh = x.data.shape[0], t["num_attention_heads"], t["num_key_value_heads"], t["head_dim"]
    r, eps = t["rope_parameters"], t["rms_norm_eps"]
    qg = linear(x, w[p + "q_proj.weight"]).reshape(n, hq, 2, dh)
    q, gate = qg.take((slice(None), slice(None), 0)), qg.take((slice(None), slice(None), 1))
    q = norm1(q, w[p + "q_norm.weight"], eps)
    k = norm1(linear(x, w[p + "k_proj.weight"]).reshape(n, hkv, dh), w[p + "k_norm.weight"], eps)
    v = linear(x, w[p + "v_proj.weight"]).reshape(n, hkv, dh)
    half = int(dh * r["partial_rotary_factor"]) // 2
    angle = np.stack([positions[i % 3] * r["rope_theta"]**(-i / half) for i in range(half)], -1)
    of = np.arange(hq) // (hq // hkv)
    mask = np.where(np.tril(np.ones((n, n))) > 0, 0.0, -1e30)
    o = attend(turn(q, angle), turn(k, angle).take((slice(None), of)), v.take((slice(None), of)), mask, dh**-0.5)
    return linear((o * sigmoid(gate)).reshape(n, hq * dh), w[p + "o_proj.weight"])


def linear_attention(x, w, p, t):
    n, hk, hv = x.data.shape[0], t["linear_num_key_heads"], t["linear_num_value_heads"]
    dk, dv, taps = t["linear_key_head_dim"], t["linear_value_head_dim"], t["linear_conv_kernel_dim"]
    u, z = linear(x, w[p + "in_proj_qkv.weight"]), linear(x, w[p + "in_proj_z.weight"]).reshape(n, hv, dv)
    mixed = const(np.zeros((1, 1)))
    for j in range(taps):
        mixed = mixed + const(np.eye(n, k=j - taps + 1)) @ u * \
            w[p + "conv1d.weight"].take((slice(None), 0, j)).reshape(1, -1)
    mixed = silu(mixed)
    q = mixed.take((slice(None), slice(0, hk * dk))).reshape(n, hk, dk)
    k = mixed.take((slice(None), slice(hk * dk, 2 * hk * dk))).reshape(n, hk, dk)
    v = mixed.take((slice(None), slice(2 * hk * dk, None))).reshape(n, hv, dv)
    of = np.arange(hv) // (hv // hk)
    q, k = (y * ((y * y).sum(-1) + const(1e-6)).pow(-0.5) for y in (q, k))
    q, k = q.scale(dk**-0.5).take((slice(None), of)), k.take((slice(None), of))
    beta = sigmoid(linear(x, w[p + "in_proj_b.weight"]))
    decay = (softplus(linear(x, w[p + "in_proj_a.weight"]) + w[p + "dt_bias"]) *
             w[p + "A_log"].exp()).scale(-1.0).exp()
    state, out = const(np.zeros((hv, dk, dv))), []
    for i in range(n):
        qi, ki, vi = q.take((i,)).reshape(hv, 1, dk), k.take((i,)).reshape(hv, 1, dk), v.take((i,)).reshape(hv, 1, dv)
        state = state * decay.take((i,)).reshape(hv, 1, 1)
        delta = (vi + (ki @ state).scale(-1.0)) * beta.take((i,)).reshape(hv, 1, 1)
        state = state + ki.swap(1, 2) @ delta
        out.append((qi @ state).reshape(1, hv, dv))
    o = concat(out, 0)
    o = o * rstd(o, t["rms_norm_eps"]) * w[p + "norm.weight"] * silu(z)
    return linear(o.reshape(n, hv * dv), w[p + "out_proj.weight"])


def experts(x, w, p, t):
    n, k = x.data.shape[0], t["num_experts_per_tok"]
    probs = softmax(linear(x, w[p + "gate.weight"]))
    chosen = np.argsort(-probs.data, -1, kind="stable")[:, :k]
    weight = probs.take((np.arange(n)[:, None], chosen))
    weight = weight * weight.sum(-1).pow(-1.0)
    out = sigmoid(linear(x, w[p + "shared_expert_gate.weight"])) * mlp(x, w, p + "shared_expert.")
    for e in range(t["num_experts"]):
        rows, place = np.nonzero(chosen == e)
        if len(rows):
            spread = np.zeros((n, len(rows)))
            spread[rows, np.arange(len(rows))] = 1
            y = mlp(x.take((rows,)), w, f"{p}experts.{e}.")
            out = out + const(spread) @ (y * weight.take((rows, place)).reshape(-1, 1))
    return out


def logits_of(ids, media, w, c):
    t, ids = c["text_config"], np.asarray(ids)
    root, eps = "model.language_model.", t["rms_norm_eps"]
    x, places = w[root + "embed_tokens.weight"].take((ids,)), np.isin(ids, (IMAGE, VIDEO))
    if media:
        spread = np.zeros((len(ids), int(places.sum())))
        spread[np.nonzero(places)[0], np.arange(spread.shape[1])] = 1
        x = x * const(np.where(places, 0.0, 1.0)[:, None]) + const(spread) @ tower(media, w, c["vision_config"])
    positions = positions_of(ids, media)
    for layer, kind in enumerate(t["layer_types"]):
        p = f"{root}layers.{layer}."
        y = norm1(x, w[p + "input_layernorm.weight"], eps)
        x = x + (linear_attention(y, w, p + "linear_attn.", t) if kind == "linear_attention"
                 else full_attention(y, w, p + "self_attn.", t, positions))
        y = norm1(x, w[p + "post_attention_layernorm.weight"], eps)
        x = x + (experts(y, w, p + "mlp.", t) if t.get("num_experts") else mlp(y, w, p + "mlp."))
    head = w[root + "embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return linear(norm1(x, w[root + "norm.weight"], eps), head)


def run(documents, weights, c):
    """documents: (ids, labels, media), each on its own."""
    w = {k: Var(v) for k, v in weights.items()}
    valid = sum(int((labels[1:] >= 0).sum()) for _, labels, _ in documents)
    total, logits = const(np.zeros((1, 1))), []
    for ids, labels, media in documents:
        z = logits_of(ids, media, w, c)
        logits.append(z.data)
        rows = np.nonzero(labels[1:] >= 0)[0]
        if len(rows):
            picked = z.take((rows,))
            shifted = picked + const(-picked.data.max(-1, keepdims=True))
            target = shifted.take((np.arange(len(rows)), labels[1:][rows])).reshape(-1, 1)
            total = total + (shifted.exp().sum(-1).log() + target.scale(-1.0)).sum(0)
    loss = total.scale(1.0 / valid)
    backward(loss)
    grads = {k: np.zeros_like(v.data) if v.grad is None else v.grad for k, v in w.items()}
    return float(loss.data[0, 0]), np.concatenate(logits), grads


# ---- a case ----


def shapes_of(c):
    t, v = c["text_config"], c["vision_config"]
    d, dh, dk, dv = t["hidden_size"], t["head_dim"], t["linear_key_head_dim"], t["linear_value_head_dim"]
    q, kv = t["num_attention_heads"] * dh, t["num_key_value_heads"] * dh
    hk, hv, vd, f = t["linear_num_key_heads"], t["linear_num_value_heads"], v["hidden_size"], v["intermediate_size"]
    width = 2 * hk * dk + hv * dv
    s = {"model.language_model.embed_tokens.weight": (t["vocab_size"], d), "model.language_model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        s["lm_head.weight"] = (t["vocab_size"], d)
    for layer, kind in enumerate(t["layer_types"]):
        p = f"model.language_model.layers.{layer}."
        s.update({p + "input_layernorm.weight": (d,), p + "post_attention_layernorm.weight": (d,)})
        if kind == "linear_attention":
            a = p + "linear_attn."
            s.update({a + "in_proj_qkv.weight": (width, d), a + "in_proj_z.weight": (hv * dv, d),
                      a + "in_proj_b.weight": (hv, d), a + "in_proj_a.weight": (hv, d),
                      a + "conv1d.weight": (width, 1, t["linear_conv_kernel_dim"]), a + "A_log": (hv,),
                      a + "dt_bias": (hv,), a + "norm.weight": (dv,), a + "out_proj.weight": (d, hv * dv)})
        else:
            a = p + "self_attn."
            s.update({a + "q_proj.weight": (2 * q, d), a + "k_proj.weight": (kv, d), a + "v_proj.weight": (kv, d),
                      a + "o_proj.weight": (d, q), a + "q_norm.weight": (dh,), a + "k_norm.weight": (dh,)})
        parts = {"": t.get("intermediate_size")}
        if t.get("num_experts"):
            parts = {f"experts.{e}.": t["moe_intermediate_size"] for e in range(t["num_experts"])}
            parts["shared_expert."] = t["shared_expert_intermediate_size"]
            s.update({p + "mlp.gate.weight": (t["num_experts"], d), p + "mlp.shared_expert_gate.weight": (1, d)})
        for n, i in parts.items():
            s.update({p + f"mlp.{n}gate_proj.weight": (i, d), p + f"mlp.{n}up_proj.weight": (i, d),
                      p + f"mlp.{n}down_proj.weight": (d, i)})
    p = "model.visual."
    s.update({p + "patch_embed.proj.weight": (vd, 3, 2, v["patch_size"], v["patch_size"]),
              p + "pos_embed.weight": (v["num_position_embeddings"], vd)})
    pairs = {"merger.linear_fc1": (4 * vd, 4 * vd), "merger.linear_fc2": (d, 4 * vd), "merger.norm": (vd,)}
    for i in range(v["depth"]):
        b = f"blocks.{i}."
        pairs.update({b + "norm1": (vd,), b + "norm2": (vd,), b + "attn.qkv": (3 * vd, vd), b + "attn.proj": (vd, vd),
                      b + "mlp.linear_fc1": (f, vd), b + "mlp.linear_fc2": (vd, f)})
    for n, shape in pairs.items():
        s.update({p + n + ".weight": shape, p + n + ".bias": (shape[0],)})
    s[p + "patch_embed.proj.bias"] = (vd,)
    return s


def make_weights(c, rng):
    out = {}
    for name, shape in sorted(shapes_of(c).items()):
        x = 0.25 * rng.standard_normal(shape)
        if name.endswith("A_log"):
            x = np.log(rng.uniform(0.3, 4, shape))
        elif "visual" in name and "norm" in name and name.endswith("weight") or "linear_attn.norm" in name:
            x = 1 + x
        out[name] = x.astype(np.float32).astype(np.float64)
    return out


def document(rng, c, plan):
    """plan: a number of text tokens, or a grid: an image, or (t > 1) a video. Media are not trained."""
    ids, media, width = [], [], 6 * c["vision_config"]["patch_size"]**2
    for item in plan:
        if isinstance(item, int):
            ids += list(rng.integers(0, IMAGE, item))
            continue
        t, h, wd = item
        media.append((item, rng.uniform(-1, 1, (t * h * wd, width)).astype(np.float32).astype(np.float64)))
        for _ in range(t):
            ids += [7] * (t > 1) + [START] + [IMAGE if t == 1 else VIDEO] * (h * wd // 4) + [END]
    ids = np.array(ids)
    return ids, np.where((ids < IMAGE) & (rng.random(len(ids)) < 0.8), ids, -100), media


def media_arrays(documents, prefix=""):
    media = [m for _, _, list_ in documents for m in list_]
    return {prefix + "pixel_values": np.concatenate([p for _, p in media]).astype(np.float32),
            prefix + "image_grid_thw": np.array([g for g, _ in media], np.int64)}


def make_case(folder, seed, tied=False, **text):
    rng = np.random.default_rng(seed)
    moe = "num_experts" in text
    kind = "qwen3_5_moe" if moe else "qwen3_5"
    c = {"architectures": ["Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"],
         "model_type": kind, "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
         "vision_end_token_id": END, "tie_word_embeddings": tied, "dtype": "float32",
         "text_config": {"model_type": kind + "_text", "vocab_size": 64, "hidden_size": 24,
                         "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
                         "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "linear_num_key_heads": 2,
                         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
                         "linear_conv_kernel_dim": 4,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                             "partial_rotary_factor": 0.5, "mrope_interleaved": True,
                                             "mrope_section": [2, 1, 1]}, **text},
         "vision_config": {"model_type": kind + "_vision", "depth": 2, "hidden_size": 16, "num_heads": 2,
                           "intermediate_size": 28, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
                           "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
                           "num_position_embeddings": 25, "out_hidden_size": 24,
                           "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}}
    weights = make_weights(c, rng)
    one = document(rng, c, [3, (1, 4, 6), 5, (2, 2, 4), 9, (1, 2, 2), 14])
    many = [document(rng, c, plan) for plan in ([1], [4, (1, 6, 2), 6], [2], [(1, 4, 4), 3, (1, 2, 6), 8], [17])]
    loss, logits, grads = run([one], weights, c)
    packed_loss, packed_logits, packed_grads = run(many, weights, c)
    a = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
    after, a["losses"], a["grad_norms"] = adamw(weights, lambda p: run([one], p, c), a)
    answer, gap = list(one[0]), 1e9
    for _ in range(12):
        z = logits_of(answer, one[2], {k: Var(v) for k, v in weights.items()}, c).data[-1].copy()
        best = np.sort(z)[-2:]
        gap = min(gap, best[1] - best[0])
        answer.append(int(z.argmax()))
        assert answer[-1] < IMAGE, f"{folder}: greedy goes on with a media token"
    assert gap > 1e-3, f"{folder}: greedy choice hangs on {gap}"
    os.makedirs(f"{folder}/hf", exist_ok=True)
    with open(f"{folder}/hf/config.json", "w") as f:
        json.dump(c, f, indent=2)
        f.write("\n")
    with open(f"{folder}/ref.json", "w") as f:
        json.dump({"origin": f"tools/make_golden_qwen3_5.py, seed {seed}, numpy float64", "loss": loss,
                   "grad_norm": norm_of(grads), "packed_loss": packed_loss, "greedy_prompt": len(one[0]),
                   "adamw": a}, f, indent=2)
        f.write("\n")
    for name, tensors in (("hf", weights), ("grads", grads), ("grads_packed", packed_grads), ("after3", after)):
        write_safetensors(f"{folder}/{name}/model.safetensors", f32(tensors))
    packed, labels = (np.concatenate([doc[i] for doc in many]) for i in (0, 1))
    write_safetensors(f"{folder}/ref.safetensors", {
        "input_ids": one[0][None], "labels": one[1][None], "logits": logits[None].astype(np.float32),
        "packed_ids": packed[None], "packed_labels": labels[None], "packed_logits": packed_logits[None].astype(np.float32),
        "cu_seqlens": np.cumsum([0] + [len(doc[0]) for doc in many]).astype(np.int32),
        "greedy": np.array(answer)[None], **media_arrays([one]), **media_arrays(many, "packed_")})
    print(f"{folder}: loss {loss:.6f}, packed {packed_loss:.6f}, greedy gap {gap:.3g}")


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../tests/golden/cases")
    make_case(f"{root}/sees", 2, intermediate_size=36)
    make_case(f"{root}/sees_experts", 2, tied=True, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
              shared_expert_intermediate_size=20)


if __name__ == "__main__":
    main()
