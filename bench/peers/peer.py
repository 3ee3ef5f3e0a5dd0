"""One training step of the stack that people use today, timed: transformers and Liger on one GPU, random weights.

    peer.py MODEL TOKENS BATCH [--precision master|bf16] [--compile] [--checkpoint] [--steps N]

Prints one JSON line: step_ms, tok_s, peak_gib. Needs torch, transformers and liger-kernel; nothing of ithaca needs them.
"""
import argparse
import contextlib
import json
import statistics
import time

import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, apply_liger_kernel_to_qwen3
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES = {  # hidden, layers, heads, kv heads, mlp
    "0.6b": (1024, 28, 16, 8, 3072),
    "1.7b": (2048, 28, 16, 8, 6144),
    "4b": (2560, 36, 32, 8, 9728),
}


def build(args):
    hidden, layers, heads, kv, mlp = SHAPES[args.model]
    config = Qwen3Config(vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv, head_dim=128, intermediate_size=mlp, tie_word_embeddings=True,
                         rope_theta=1e6, max_position_embeddings=1 << 21, use_cache=False)
    config._attn_implementation = "sdpa"
    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False, cross_entropy=False)
    torch.set_default_dtype(torch.float32 if args.precision == "master" else torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if args.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if args.compile:
        model.model.forward = torch.compile(model.model.forward)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("tokens", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("--precision", choices=["master", "bf16"], default="master")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(1)
    model = build(args)
    loss_of = LigerFusedLinearCrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    autocast = torch.autocast("cuda", torch.bfloat16) if args.precision == "master" else contextlib.nullcontext()
    times = []
    for _ in range(args.steps + 3):
        ids = torch.randint(0, 151936, (args.batch, args.tokens), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with autocast, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            loss = loss_of(model.lm_head.weight, hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = statistics.median(times[3:])
    print(json.dumps({"name": "transformers+liger" + ("+compile" if args.compile else ""), "model": args.model,
                      "precision": args.precision, "step_ms": round(median * 1e3, 1),
                      "tok_s": round(args.tokens * args.batch / median),
                      "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}), flush=True)


main()
