"""One training step of LLaDA2-mini's shape as dFactory computes it, in PyTorch on one GPU, random weights.

    llada2.py [--layers 8] [--rows 8] [--seq 2048] [--steps 4] [--variants dense:1:ckpt,flex:1:ckpt,...]
    llada2.py --golden DIR [--device cpu]      loss and gradient norm of reference vectors instead

A variant is attention:rows of a micro-batch:ckpt|keep. dFactory's own is dense:1:ckpt; the others are kinder to it.
What is kept of dFactory: rows [noisy; clean] of 2 x seq tokens, block mask of 32; f32 weights, cast to bf16 layer by
layer, gradients summed in f32; router in f32; tokens sorted by expert, grouped products, head and f32 logits on all
2 x seq rows; cross entropy over the masked tokens of a micro-batch, mean over micro-batches; clip 1, fused AdamW with
decay on all. In its favour: no FSDP copies (one GPU), fused RMSNorm, grouped products by CUTLASS
(torch grouped_mm) in place of Triton's, attention by flex_attention as well as by SDPA with the dense mask.
Prints one JSON line for each variant. Nothing of ithaca needs torch.
"""
import argparse
import functools
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

MINI = dict(vocab_size=157184, hidden_size=2048, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=4,
            head_dim=128, intermediate_size=5120, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
            num_shared_experts=1, first_k_dense_replace=1, n_group=8, topk_group=4, routed_scaling_factor=2.5,
            rms_norm_eps=1e-6, rope_theta=600000.0, partial_rotary_factor=0.5)


def weight(*shape):
    return nn.Parameter(torch.empty(*shape).normal_(0, 0.02))


class Named(nn.Module):
    """Parameters and buffers under the names of the published files."""

    def __init__(self, **tensors):
        super().__init__()
        for name, t in tensors.items():
            self.register_parameter(name, t) if isinstance(t, nn.Parameter) else self.register_buffer(name, t)


def matrix(*shape):
    return Named(weight=weight(*shape))


def ones(n):
    return Named(weight=nn.Parameter(torch.ones(n)))


class Mlp(nn.Module):
    def __init__(self, c, width):
        super().__init__()
        self.gate_proj, self.up_proj = matrix(width, c.hidden_size), matrix(width, c.hidden_size)
        self.down_proj = matrix(c.hidden_size, width)

    def forward(self, x, cast):
        mid = F.silu(F.linear(x, cast(self.gate_proj.weight))) * F.linear(x, cast(self.up_proj.weight))
        return F.linear(mid, cast(self.down_proj.weight))


def grouped(x, w, ends):
    """x [S,K], sorted by expert, times w [E,N,K] -> [S,N]; ends [E]: end of each expert's rows."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)
    begins = [0] + ends.tolist()
    return torch.cat([F.linear(x[begins[e]:begins[e + 1]], w[e]) for e in range(len(ends))])


class Moe(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        e, width = c.num_experts, c.moe_intermediate_size
        self.gate = Named(weight=weight(e, c.hidden_size), expert_bias=torch.zeros(e))
        self.experts = Named(gate_proj=weight(e, width, c.hidden_size), up_proj=weight(e, width, c.hidden_size),
                             down_proj=weight(e, c.hidden_size, width))
        self.shared_experts = Mlp(c, width * c.num_shared_experts)

    def route(self, x):
        c = self.c
        scores = torch.sigmoid(F.linear(x.float(), self.gate.weight.float()))
        biased = scores.detach() + self.gate.expert_bias
        groups = biased.view(len(x), c.n_group, -1)
        kept = groups.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        dropped = torch.ones(len(x), c.n_group, dtype=torch.bool, device=x.device).scatter_(1, kept, False)
        chosen = groups.masked_fill(dropped[..., None], float("-inf")).flatten(1).topk(c.num_experts_per_tok, -1).indices
        w = scores.gather(1, chosen)
        if c.num_experts_per_tok > 1:
            w = w / (w.sum(-1, keepdim=True) + 1e-20)
        return chosen, w * c.routed_scaling_factor

    def forward(self, x, cast):
        chosen, w = self.route(x)
        k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.c.num_experts).cumsum(0).to(torch.int32)
        rows = x[order // k]
        e = self.experts
        mid = F.silu(grouped(rows, cast(e.gate_proj), ends)) * grouped(rows, cast(e.up_proj), ends)
        mid = mid * w.flatten()[order, None].to(mid.dtype)
        out = grouped(mid, cast(e.down_proj), ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return out[back].view(len(x), k, -1).sum(1) + self.shared_experts(x, cast)


def norm(x, w, eps):
    return F.rms_norm(x, w.weight.shape, w.weight.to(x.dtype), eps)


class Layer(nn.Module):
    def __init__(self, c, idx):
        super().__init__()
        self.c = c
        hq, hkv, hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.input_layernorm, self.post_attention_layernorm = ones(c.hidden_size), ones(c.hidden_size)
        self.attention = nn.Module()
        self.attention.query_key_value = matrix((hq + 2 * hkv) * hd, c.hidden_size)
        self.attention.dense = matrix(c.hidden_size, hq * hd)
        self.attention.query_layernorm, self.attention.key_layernorm = ones(hd), ones(hd)
        self.mlp = Mlp(c, c.intermediate_size) if idx < c.first_k_dense_replace else Moe(c)

    def forward(self, h, rope, attend, dtype):
        c = self.c
        cast = lambda w: w.to(dtype)  # what the all-gather of a layer does
        b, t, _ = h.shape
        hq, hkv, hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        a, eps = self.attention, c.rms_norm_eps
        qkv = F.linear(norm(h, self.input_layernorm, eps), cast(a.query_key_value.weight))
        q, k, v = qkv.view(b, t, hq + 2 * hkv, hd).transpose(1, 2).split([hq, hkv, hkv], 1)
        q, k = rotate(norm(q, a.query_layernorm, eps), *rope), rotate(norm(k, a.key_layernorm, eps), *rope)
        o = attend(q, k, v).transpose(1, 2).reshape(b, t, hq * hd)
        h = h + F.linear(o, cast(a.dense.weight))
        m = norm(h, self.post_attention_layernorm, eps).view(b * t, -1)
        return h + self.mlp(m, cast).view(b, t, -1)


def rotate(x, cos, sin):
    r, rest = x[..., :cos.shape[-1]], x[..., cos.shape[-1]:]
    a, b = r.chunk(2, -1)
    return torch.cat([r * cos + torch.cat([-b, a], -1) * sin, rest], -1)


class Llada2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.model = nn.Module()
        self.model.word_embeddings, self.lm_head = matrix(c.vocab_size, c.hidden_size), matrix(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.model.norm = ones(c.hidden_size)

    def forward(self, ids, positions, attend, dtype, recompute):
        c = self.c
        rd = int(c.head_dim * c.partial_rotary_factor)
        freq = c.rope_theta ** -(torch.arange(0, rd, 2, device=ids.device).float() / rd)
        angle = (positions[:, None].float() * freq).repeat(1, 2)
        rope = angle.cos().to(dtype), angle.sin().to(dtype)
        h = F.embedding(ids, self.model.word_embeddings.weight.to(dtype))
        for layer in self.model.layers:
            if recompute:
                h = checkpoint(layer, h, rope, attend, dtype, use_reentrant=False)
            else:
                h = layer(h, rope, attend, dtype)
        return F.linear(norm(h, self.model.norm, c.rms_norm_eps), self.lm_head.weight.to(dtype)).float()


def allowed(q, k, seq, block):
    """Of [noisy; clean] rows: a noisy block sees itself and the clean blocks before it, a clean one those up to it."""
    q_clean, k_clean, q_block, k_block = q >= seq, k >= seq, q % seq // block, k % seq // block
    return (~q_clean & ~k_clean & (q_block == k_block)) | (~q_clean & k_clean & (q_block > k_block)) | \
        (q_clean & k_clean & (q_block >= k_block))


@functools.cache
def attention(kind, seq, block, device, dtype):
    at = torch.arange(2 * seq, device=device)
    if kind == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        mask = create_block_mask(lambda b, h, q, k: allowed(q, k, seq, block), None, None, 2 * seq, 2 * seq, device)
        return functools.partial(torch.compile(flex_attention), block_mask=mask, enable_gqa=True)
    mask = torch.zeros(2 * seq, 2 * seq, device=device, dtype=dtype)
    mask.masked_fill_(~allowed(at[:, None], at[None, :], seq, block), float("-inf"))

    def dense(q, k, v):
        g = q.shape[1] // k.shape[1]
        return F.scaled_dot_product_attention(q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1), mask)
    return dense


def loss_of(model, noisy, clean, labels, kind, block, dtype, recompute):
    seq = clean.shape[1]
    positions = torch.arange(seq, device=clean.device).repeat(2)
    attend = attention(kind, seq, block, clean.device, dtype)
    logits = model(torch.cat([noisy, clean], 1), positions, attend, dtype, recompute)[:, :seq]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.flatten(), ignore_index=-100)


def noise(clean, mask_id):
    t = torch.empty(len(clean), 1, device=clean.device).uniform_(0.3, 0.8)
    hit = torch.rand(clean.shape, device=clean.device) < t
    return clean.masked_fill(hit, mask_id), clean.masked_fill(~hit, -100)


def step(model, optimizer, args, kind, micro, recompute):
    parts = args.rows // micro
    loss = 0
    for _ in range(parts):
        clean = torch.randint(0, args.vocab - 1, (micro, args.seq), device="cuda")
        noisy, labels = noise(clean, args.vocab - 1)
        part = loss_of(model, noisy, clean, labels, kind, 32, torch.bfloat16, recompute) / parts
        part.backward()
        loss += part.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # experts without a token have a zero gradient, not none
    return loss


def measure(model, optimizer, args, kind, micro, recompute):
    times = []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(model, optimizer, args, kind, micro, recompute)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = statistics.median(times[1:])
    return {"step_ms": round(median * 1e3, 1), "tok_s": round(args.rows * args.seq / median),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "loss": round(loss, 3)}


def golden(args):
    from safetensors.torch import load_file
    config = json.load(open(f"{args.golden}/hf/config.json"))
    ref, r = json.load(open(f"{args.golden}/ref.json")), load_file(f"{args.golden}/ref.safetensors")
    model, hf = Llada2(argparse.Namespace(**{**MINI, **config})), load_file(f"{args.golden}/hf/model.safetensors")
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        each = [hf[name.replace("experts.", f"experts.{e}.") + ".weight"] for e in range(len(p))] if p.dim() == 3 else None
        p.data.copy_(torch.stack(each) if each else hf[name])
    model.to(args.device)
    at = lambda key: r[key].to(args.device)
    loss = loss_of(model, at("noisy"), at("clean"), at("labels"), "dense", ref["block_size"], torch.float32, False)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    print(json.dumps({"loss": loss.item(), "reference": ref["loss"], "grad_norm": norm, "reference_norm": ref["grad_norm"]}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=MINI["vocab_size"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--variants", default="dense:1:ckpt,flex:1:ckpt,flex:1:keep,flex:2:ckpt")
    parser.add_argument("--golden")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.golden:
        return golden(args)
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Llada2(argparse.Namespace(**{**MINI, "num_hidden_layers": args.layers, "vocab_size": args.vocab}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, fused=True)
    for variant in args.variants.split(","):
        kind, micro, keep = variant.split(":")
        row = {"name": "dFactory in PyTorch", "model": "llada2-mini", "layers": args.layers, "variant": variant}
        try:
            row |= measure(model, optimizer, args, kind, int(micro), keep == "ckpt")
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
            optimizer.zero_grad(set_to_none=True)
        print(json.dumps(row), flush=True)


main()
