#!/usr/bin/env bash
# Files of dFactory as they are, rows as its GSM8K script writes them, on one and on two ranks: the same losses and norms,
# a model with every tensor of the source; a model that is none of diffusion is refused.
#   test_dfactory.sh PROGRAM [FILE.yaml ..]   (absent files are left out)
set -euo pipefail
ithaca=$1
shift
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
cat >"$dir/own.yaml" <<Y
model:
  config_path: m
  model_path: m
  attn_implementation: sdpa
  moe_implementation: fused
data:
  train_path: rows.jsonl
  data_type: conversation
  dataloader_type: native
  max_seq_len: 256
  text_keys: messages
  noise_range_low: 0.3
  noise_range_high: 0.8
train:
  output_dir: out
  data_parallel_mode: fsdp2
  global_batch_size: 8
  micro_batch_size: 1
  lr: 1.0e-3
  lr_decay_style: cosine
  weight_decay: 0.1
  init_device: meta
  enable_fsdp_offload: true
  block_diffusion_mode: true
  block_size: 32
  same_token_labels: true
  use_wandb: false
Y
files=("$dir/own.yaml")
for file in "$@"; do
    [ ! -e "$file" ] || files+=("$(realpath "$file")")
done
cd "$dir"
for i in {3..26}; do
    printf '{"messages": [{"role": "user", "content": "Anna has %d apples and buys %d more. How many has she?"}, {"role": "assistant", "content": "She has %d + %d = <<%d+%d=%d>>%d apples.\\n#### %d"}]}\n' \
        "$i" $((2 * i)) "$i" $((2 * i)) "$i" $((2 * i)) $((3 * i)) $((3 * i)) $((3 * i))
done >rows.jsonl
"$ithaca" init m --size tiny-llada2 --dtype float32 --vocab-size 400 --learn rows.jsonl >/dev/null
"$ithaca" init causal --size tiny --vocab-size 400 --learn rows.jsonl >/dev/null
values() { grep -o "\"$1\": *[-0-9.e+]*" "$2/trainer_log.jsonl" | sed 's/.*: *//'; }
for file in "${files[@]}"; do
    name=$(basename "$file" .yaml)
    run=("$ithaca" train "$file" model.model_path=m model.config_path=m model.tokenizer_path=m data.train_path=rows.jsonl
        data.max_seq_len=256 train.enable_mixed_precision=false device=cpu threads=1)
    "${run[@]}" "train.output_dir=$name-1" >log 2>&1 || { tail -3 log >&2; fail "$name on one rank"; }
    "${run[@]}" "train.output_dir=$name-2" nproc=2 >log 2>&1 || { tail -3 log >&2; fail "$name on two ranks"; }
    for key in loss grad_norm; do
        paste <(values $key "$name-1") <(values $key "$name-2") | awk '
            { d = $1 - $2; if (d < 0) d = -d; if (NF != 2 || d > 1e-5 * $1) { bad = 1; print } }
            END { exit bad || NR == 0 }' || fail "$name: $key of two ranks differs from that of one"
    done
    [ "$(wc -c <"$name-1/model.safetensors")" -eq "$(wc -c <m/model.safetensors)" ] || fail "$name: tensors are missing"
done
"$ithaca" train own.yaml model.model_path=causal model.config_path=causal device=cpu 2>log && fail "a causal model was trained"
grep -q "qwen3 is not a diffusion model" log || { cat log >&2; fail "another error"; }
echo "${#files[@]} files on one and on two ranks"
