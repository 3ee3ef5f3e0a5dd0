"""The gated delta rule of flash-linear-attention and ours in turn, on one GPU, and the ratio of their times.

    delta_rule.py BENCH_CUDA TOKENS:DOC:KEY_HEADS:VALUE_HEADS ... [--rounds N]

Heads of 128, bf16, q and k normalized inside the operator, documents of DOC tokens. Both are timed as a host clock around
many calls and one wait, after warm-up (theirs with its autotuning). Lines for forward, backward and both: milliseconds and
the ratio. In the end theirs replayed as a CUDA graph, which has no host in it. Needs torch and fla-core.

fla refuses its backward under Triton 3.4 to 3.7.0 on Hopper, where one of its kernels gives wrong gradients. Its time is
the same; that refusal is switched off here, and nothing but the time is taken.
"""
import argparse
import re
import statistics
import subprocess
import time

import fla.ops.common.chunk_o
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True


def clock(f, calls):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        f()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / calls


def timed(f):
    for _ in range(3):
        f()
    once = clock(f, 3)
    return clock(f, max(5, min(200, int(60 / once))))


def graphed(f):
    """f replayed without the host."""
    for _ in range(3):
        f()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return timed(graph.replay)


def calls(tokens, doc, key_heads, value_heads):
    """Their forward, and forward with backward."""
    batch, dim = tokens // doc, 128
    make = lambda heads: torch.randn(batch, doc, heads, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v, do = make(key_heads), make(key_heads), make(value_heads), make(value_heads)
    g = -0.3 * torch.rand(batch, doc, value_heads, device="cuda")
    beta = torch.rand(batch, doc, value_heads, device="cuda").bfloat16()
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    run = lambda: chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    def forward():
        with torch.no_grad():
            run()

    def both():
        torch.autograd.grad(run(), inputs, do)

    return {"forward": forward, "both": both}


def theirs(sizes):
    return {key: timed(f) for key, f in calls(*sizes).items()}


def ours(bench, tokens, doc, key_heads, value_heads):
    text = subprocess.run([bench, f"T={tokens}", f"DOC={doc}", f"keys={key_heads}", f"values={value_heads}",
                           "only=gdn delta rule"], capture_output=True, text=True, check=True).stdout
    us = {name: float(t) for name, t in re.findall(r"gdn delta rule (\w+)\s+([\d.]+) us", text)}
    return {"forward": us["forward"] / 1e3, "both": (us["forward"] + us["backward"]) / 1e3}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    shapes = {text: [int(x) for x in text.split(":")] for text in args.shapes}
    mine = {}
    for shape, sizes in shapes.items():
        rows = [(ours(args.bench, *sizes), theirs(sizes)) for _ in range(args.rounds)]
        a, b = ({key: statistics.median(row[side][key] for row in rows) for key in ("forward", "both")} for side in (0, 1))
        for times in (a, b):
            times["backward"] = times["both"] - times["forward"]
        for key in ("forward", "backward", "both"):
            print(f"{shape} {key}: ithaca {a[key]:.3f} ms, fla {b[key]:.3f} ms: {b[key] / a[key]:.2f}x", flush=True)
        mine[shape] = a
        torch.cuda.empty_cache()
    for shape, sizes in shapes.items():  # last, for a capture that fails takes the device with it
        for key, f in calls(*sizes).items():
            b = graphed(f)
            print(f"{shape} {key}: fla as a graph {b:.3f} ms: {b / mine[shape][key]:.2f}x", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
