"""Attention of one layer under the block diffusion mask, ours beside PyTorch's, in one run on one GPU.

    attention.py BENCH_CUDA [--lengths 4096,16384] [--block 32] [--no-dense]

A sequence of L clean tokens is 2L rows, [noisy; clean]: a noisy row sees its own noisy block and the clean blocks before
it, a clean row the clean blocks up to its own. 16 query and 4 key heads of 128, bf16. Peers: flex_attention with the
block mask, compiled; scaled_dot_product_attention with a dense mask and repeated keys, as dFactory calls it; and, for
the rate that the mask is held against, causal scaled_dot_product_attention of cuDNN over L tokens. TFLOP/s count pairs
that the mask allows, backward 2.5 times forward. Needs torch and a CUDA plug-in (ITH_CUDA_PLUGIN); prints a table.
"""
import argparse
import re
import statistics
import subprocess

import torch
import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

HEADS, KV_HEADS, DIM = 16, 4, 128
torch._functorch.config.donated_buffer = False  # backward is timed again and again


def milliseconds(call, rounds=20):
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def both_ways(attention, rows):
    """Milliseconds of attention(q, k, v) and of its backward."""
    q, k, v = (torch.randn(1, h, rows, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for h in (HEADS, KV_HEADS, KV_HEADS))
    out = attention(q, k, v)
    grad = torch.randn_like(out)
    with torch.no_grad():
        forward = milliseconds(lambda: attention(q, k, v))
    backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return forward, backward


def sees(length, block):
    def mask(b, h, q, kv):
        q_block, kv_block = q % length // block, kv % length // block
        own = (q < length) & (kv < length) & (q_block == kv_block)
        before = (q < length) & (kv >= length) & (kv_block < q_block)
        clean = (q >= length) & (kv >= length) & (kv_block <= q_block)
        return own | before | clean
    return mask


def flex(length, block):
    mask = create_block_mask(sees(length, block), None, None, 2 * length, 2 * length, device="cuda")
    compiled = torch.compile(flex_attention)
    return both_ways(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), 2 * length)


def dense(length, block):
    at = torch.arange(2 * length, device="cuda")
    mask = sees(length, block)(None, None, at[:, None], at[None, :])
    mask = torch.zeros(mask.shape, device="cuda", dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))

    def attention(q, k, v):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return both_ways(attention, 2 * length)


def causal(length):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return both_ways(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), length)


def tried(peer, *shape):
    """A peer's times; None where it needs more memory than there is."""
    try:
        return peer(*shape)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def ours(bench, length):
    text = subprocess.run([bench, f"T={2 * length}", f"DOC={length}", "only=diffusion"], check=True,
                          capture_output=True, text=True).stdout
    return tuple(float(re.search(rf"block diffusion {way}\s+([\d.]+) us", text)[1]) / 1e3 for way in ("fwd", "bwd"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--no-dense", action="store_true")
    args = parser.parse_args()
    for length in map(int, args.lengths.split(",")):
        pairs = length * (length + args.block)
        rows = {"ours": (ours(args.bench, length), pairs), "flex": (tried(flex, length, args.block), pairs),
                "cuDNN causal": (tried(causal, length), length * (length + 1) / 2)}
        if not args.no_dense:
            rows["dense mask"] = tried(dense, length, args.block), pairs
        again = ours(args.bench, length)
        rows["ours"] = tuple(map(statistics.mean, zip(rows["ours"][0], again))), pairs
        mine = rows["ours"][0]
        for name, (times, seen) in rows.items():
            if times is None:
                print(f"L {length:6} {name:13} out of memory", flush=True)
                continue
            flop = 4 * HEADS * DIM * seen
            rates = [factor * flop / ms / 1e9 for factor, ms in zip((1, 2.5), times)]
            line = f"L {length:6} {name:13} ms {times[0]:8.3f} {times[1]:8.3f}  TFLOP/s {rates[0]:5.0f} {rates[1]:5.0f}"
            if seen != pairs:
                share = [f * 4 * HEADS * DIM * pairs / ms / 1e9 / r for f, ms, r in zip((1, 2.5), mine, rates)]
                line += f"  ours at {share[0]:.2f} {share[1]:.2f} of its rate"
            elif name != "ours":
                line += f"  ours is {times[0] / mine[0]:.2f}x {times[1] / mine[1]:.2f}x as fast"
            print(line, flush=True)


if __name__ == "__main__":
    main()
