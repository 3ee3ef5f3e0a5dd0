"""One training step of the stack that people use today, timed: transformers and Liger on one GPU, random weights; for
Qwen3.5 with flash-linear-attention's delta rule, convolution and gated norm.

    peer.py MODEL TOKENS BATCH [--precision master|bf16] [--compile] [--checkpoint] [--steps N]

Prints one JSON line: step_ms, tok_s, peak_gib. Needs torch, transformers, liger-kernel and flash-linear-attention; nothing of
ithaca needs them.
"""
import argparse
import contextlib
import json
import statistics
import time

import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {  # hidden, layers, heads, kv heads, mlp
    "0.6b": (1024, 28, 16, 8, 3072),
    "1.7b": (2048, 28, 16, 8, 6144),
    "4b": (2560, 36, 32, 8, 9728),
}


SHAPES_3_5 = {  # hidden, layers, heads, kv heads, mlp, key heads, value heads
    "qwen3.5-0.8b": (1024, 24, 8, 2, 3584, 16, 16),
    "qwen3.5-4b": (2560, 32, 16, 4, 9216, 16, 32),
}


def qwen3(name):
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers import Qwen3Config, Qwen3ForCausalLM
    hidden, layers, heads, kv, mlp = SHAPES[name]
    apply_liger_kernel_to_qwen3(fused_linear_cross_entropy=False, cross_entropy=False)
    return Qwen3ForCausalLM, Qwen3Config(
        vocab_size=151936, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
        head_dim=128, intermediate_size=mlp, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=1 << 21,
        use_cache=False)


def use_fla(modeling):
    """transformers takes these operators from the hub's kernels; here they come from the package itself."""
    import fla.ops.common.chunk_o
    from fla.modules import FusedRMSNormGated
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    # fla refuses its backward where Triton compiles it wrongly (3.4.0 to 3.7.0); its time is the same.
    fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True

    class Norm(FusedRMSNormGated):
        def __init__(self, hidden_size, eps=1e-6, **_):
            super().__init__(hidden_size, eps=eps, activation="silu")

    def convolution(x, weight, bias=None, activation=None, **_):
        return causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)

    def delta_rule(q, k, v, g, beta, **more):
        kept = {key: more.get(key) for key in ("initial_state", "cu_seqlens")}
        return chunk_gated_delta_rule(q, k, v, g, beta.to(q.dtype), use_qk_l2norm_in_kernel=True, **kept)

    modeling.causal_conv1d_fn = convolution
    modeling.torch_chunk_gated_delta_rule = delta_rule
    modeling.Qwen3_5RMSNormGated = Norm


def qwen3_5(name):
    import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_5
    from transformers.models.qwen3_5 import Qwen3_5TextConfig
    hidden, layers, heads, kv, mlp, key_heads, value_heads = SHAPES_3_5[name]
    apply_liger_kernel_to_qwen3_5(fused_linear_cross_entropy=False, cross_entropy=False)
    use_fla(modeling)
    return modeling.Qwen3_5ForCausalLM, Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
        head_dim=256, intermediate_size=mlp, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads,
        tie_word_embeddings=True, max_position_embeddings=1 << 21, use_cache=False)


def build(args):
    make, config = qwen3(args.model) if args.model in SHAPES else qwen3_5(args.model)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.float32 if args.precision == "master" else torch.bfloat16)
    with torch.device("cuda"):
        model = make(config)
    torch.set_default_dtype(torch.float32)
    if args.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if args.compile:
        model.model.forward = torch.compile(model.model.forward)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=[*SHAPES, *SHAPES_3_5])
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
        ids = torch.randint(0, model.config.vocab_size, (args.batch, args.tokens), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with autocast, sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            loss = loss_of(model.lm_head.weight, hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median = statistics.median(times[3:])
    name = "transformers+liger" + ("" if args.model in SHAPES else "+fla") + ("+compile" if args.compile else "")
    print(json.dumps({"name": name, "model": args.model,
                      "precision": args.precision, "step_ms": round(median * 1e3, 1),
                      "tok_s": round(args.tokens * args.batch / median),
                      "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}), flush=True)


main()
