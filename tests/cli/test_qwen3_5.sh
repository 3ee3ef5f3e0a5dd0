#!/usr/bin/env bash
# A Qwen3.5 from nothing to an answer, dense and with experts, in bf16: init, train, resume, generate.
# Demands: the f32 tensors (A_log, the gated norm) are f32 in every file, heads of multi-token prediction (mtp.*) arrive
# bit for bit, a rate of 0 leaves every byte, the resumed run writes the bytes of the uninterrupted one,
# two answers are equal.
#   test_qwen3_5.sh PROGRAM
set -euo pipefail
ithaca=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

for i in $(seq 1 40); do
    printf '{"messages": [{"role": "user", "content": "How much is %d and one?"}, {"role": "assistant", "content": "It is %d."}]}\n' \
        "$i" $((i + 1))
done >"$dir/data.jsonl"

config() {
    local kind=qwen3_5_text more='"intermediate_size": 128, "tie_word_embeddings": true'
    if [ "$1" = tiny-3.5-moe ]; then
        kind=qwen3_5_moe_text
        more='"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48'
    fi
    printf '{"model_type": "%s", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", %s}' \
        $kind "$more"
}

# f32 tensors of a model directory, as many as linear layers times two
count_f32() {
    cat "$1"/*.safetensors | grep -a -o '"[^"]*linear_attn.\(A_log\|norm.weight\)": *{"dtype": *"F32"' | wc -l
}

# A second file of weights with a tensor that no layer uses, and the index of both: a stand-in for published directories.
add_mtp() {
    local one=model-00001-of-00002.safetensors two=model-00002-of-00002.safetensors names
    local header='{"mtp.norm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}'
    mv "$1/model.safetensors" "$1/$one"
    { printf "\\x$(printf %x ${#header})\0\0\0\0\0\0\0"; printf '%sMtpBytes' "$header"; } >"$1/$two"
    names=$(head -c 100000 "$1/$one" | grep -a -o '"[^"]*": *{ *"dtype"' | sed "s/: *{.*/: \"$one\",/")
    printf '{"metadata": {}, "weight_map": {%s "mtp.norm.weight": "%s"}}\n' "$names" $two \
        >"$1/model.safetensors.index.json"
}

for size in tiny-3.5 tiny-3.5-moe; do
    config $size >"$dir/$size.json"
    "$ithaca" init --config "$dir/$size.json" --learn "$dir/data.jsonl" --vocab-size 300 "$dir/$size" >/dev/null
    [ "$(count_f32 "$dir/$size")" = 6 ] || fail "$size: init wrote $(count_f32 "$dir/$size") f32 tensors, not 6"
    printf '{}\n' >"$dir/empty.yaml"
    "$ithaca" train "$dir/empty.yaml" "model=$dir/$size" "train_dataset=$dir/data.jsonl" cutoff_len=128 max_steps=1 \
        learning_rate=0 "output_dir=$dir/$size-same" >"$dir/log" 2>&1 || fail "$size: $(tail -n 3 "$dir/log")"
    cmp "$dir/$size/model.safetensors" "$dir/$size-same/model.safetensors" ||
        fail "$size: weights that no step changed are other ones"
    add_mtp "$dir/$size"
    keys=("model=$dir/$size" "train_dataset=$dir/data.jsonl" cutoff_len=128 micro_batch_size=2 batching_strategy=packing
        max_steps=4 save_steps=2 learning_rate=0.002 verify=true)
    "$ithaca" train "$dir/empty.yaml" "${keys[@]}" "output_dir=$dir/$size-out" >"$dir/log" 2>&1 ||
        fail "$size: $(tail -n 3 "$dir/log")"
    [ "$(count_f32 "$dir/$size-out")" = 6 ] || fail "$size: the export holds other f32 tensors"
    grep -a -q MtpBytes "$dir/$size-out"/*.safetensors || fail "$size: mtp.norm.weight did not arrive"
    cp "$dir/$size-out"/model*.safetensors "$dir/whole"
    rm -rf "$dir/$size-out/checkpoint-4"
    "$ithaca" train "$dir/empty.yaml" "${keys[@]}" "output_dir=$dir/$size-out" \
        "resume_from_checkpoint=$dir/$size-out/checkpoint-2" >"$dir/log" 2>&1 || fail "$size: $(tail -n 3 "$dir/log")"
    cmp "$dir/whole" "$dir/$size-out"/model*.safetensors || fail "$size: the resumed run differs"
    one=$("$ithaca" generate "$dir/$size-out" --prompt "How much is 3 and one?" -n 12 --temperature 0 2>/dev/null)
    two=$("$ithaca" generate "$dir/$size-out" --prompt "How much is 3 and one?" -n 12 --temperature 0 2>/dev/null)
    [ "$one" = "$two" ] || fail "$size: two answers: $one / $two"
done
echo ok
