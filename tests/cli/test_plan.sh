#!/bin/sh
# ithaca plan without data: memory of one rank of a job that is not there, and the longest documents.  test_plan.sh ITHACA
set -u
ithaca=$1
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }
plan() { "$ithaca" plan --size 8b device=cpu "$@" 2>&1; }

# A published shape on eight ranks: its parameters, its scheme, a memory table.
text=$(plan --tokens 1048576 cp_size=8 zero_stage=3 recompute=full) || fail "--tokens ended with $?"
for row in "model: qwen3, 8.19e+09 parameters, 36 layers" "ranks: 8 = dp 1 x cp 8, of cp ulysses 8 x ring 1" \
    "AdamW m" "layer input .*x36" "at most 1048576 tokens in 1 document; of 36 layers 36 keep their input; head"; do
    echo "$text" | grep -q "$row" || fail "--tokens: no '$row'"
done

# The longest document fits, and a few percent more do not; more devices and less kept give longer ones.
table=$(plan --longest) || fail "--longest ended with $?"
[ "$(echo "$table" | grep -c " GB ")" = 8 ] || fail "--longest: not 8 rows"
echo "$table" | awk '$3 == "GB" { for (i = 4; i <= 5; i++) if ($i != "-") { if (old[$2, i] && $i < 1.9 * old[$2, i] - 1) bad = 1; old[$2, i] = $i }
    if ($4 != "-" && $4 >= $5) bad = 1 } END { exit bad }' || { fail "--longest: order"; echo "$table"; }
tokens=$(echo "$table" | awk '$1 == 8 && $2 == 80 { print $5 }')
bytes_of() {
    plan --tokens "$1" cp_size=8 zero_stage=3 recompute=full | sed -n 's/^memory on .*: \([0-9.]*\) GiB planned/\1/p'
}
fits=$(bytes_of "$tokens") more=$(bytes_of $((tokens + tokens / 50)))
awk -v a="$fits" -v b="$more" 'BEGIN { limit = 80 * 0.97e9 / 1073741824; exit !(a <= limit + 0.005 && a > 0.99 * limit && b > limit) }' ||
    fail "$tokens tokens in 80 GB: $fits GiB, and $more GiB for 2 % more"

# The plug-in counts for GPUs that are not there: inputs on the host make room, and their bytes are told.
if table=$("$ithaca" plan --size 8b --longest device=cuda 2>/dev/null); then
    echo "$table" | awk '$1 == 8 && $3 == "GB" { rows++; if (!($6 > $5 && $5 > $4 && $7 > 1 && $8 == "GB")) bad = 1 } END { exit bad || rows != 2 }' ||
        { fail "--longest of GPUs"; echo "$table"; }
    "$ithaca" plan --size 8b -n 1048576 cp_size=8 zero_stage=3 device=cuda 2>&1 |
        grep -q "^error: cuda:0: its memory is not known without it (give memory_limit)" ||
        "$ithaca" env 2>/dev/null | grep -q "NVIDIA" || fail "a GPU that is not there"
fi

# Without a device named the plan is for what is here, GPU or not.
"$ithaca" plan --size tiny -n 64 2>&1 | grep -q "^memory on .* planned" || fail "device: auto"

# A model directory serves as a shape does: only config.json is read.
work=$(mktemp -d) && mkdir "$work/model" || exit 1
cat >"$work/model/config.json" <<END
{"model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
END
"$ithaca" plan --tokens 4096 model="$work/model" device=cpu 2>&1 | grep -q "of 2 layers" || fail "model directory"

# A run: memory, time and what train would say come first, then the keys that were given, or all.
awk 'BEGIN { for (i = 0; i < 64; i++) printf "{\"instruction\": \"Say %d\", \"output\": \"The number %d is said.\"}\n", i, i * i }' >"$work/rows.jsonl"
"$ithaca" init "$work/tiny" --size tiny --dtype float32 --learn "$work/rows.jsonl" --vocab-size 300 2>/dev/null >/dev/null
cat >"$work/run.yaml" <<END
model: $work/tiny
train_dataset: $work/rows.jsonl
cutoff_len: 64
flash_attn: flash_attention_2
END
run() { "$ithaca" plan "$work/run.yaml" device=cpu "$@" 2>/dev/null; }
run >"$work/short" || fail "a run: ended with $?"
run --all-keys >"$work/long" || fail "a run, all keys: ended with $?"
[ "$(head -n 2 "$work/short" | cut -d ' ' -f 1 | tr -d '\n')" = "model:memory" ] || fail "a run: begins with $(head -n 2 "$work/short")"
for row in "time: about [0-9.e-]* s a step, [0-9:]* for 192 steps: " "longest sequence: " "chat template: " "data: 64 samples" "flash_attn: not needed" "^cutoff_len: 64$"; do
    grep -q "$row" "$work/short" || fail "a run: no '$row'"
done
! grep -q "^pack_window" "$work/short" && grep -q "^pack_window: " "$work/long" || fail "pack_window, which was not given"
[ "$(wc -l <"$work/long")" -gt $(($(wc -l <"$work/short") + 80)) ] || fail "--all-keys: not all"

# Its FLOP are those of a step: as many documents of as many tokens. Two epochs' worth in a step are twice one's.
flop() { run "$@" | sed -n 's/^time: .*steps*: \([0-9.e+]*\) FLOP.*/\1/p'; }
awk -v a="$(flop global_batch_size=8)" -v b="$(flop global_batch_size=16)" -v c="$(flop global_batch_size=8 recompute=full)" \
    'BEGIN { exit !(a > 0 && b > 1.98 * a && b < 2.02 * a && a == c) }' || fail "FLOP of a step"
run recompute=full | grep -q "and [0-9]*% of it again to recompute" || fail "recompute: not told"
rm -r "$work"

refused() { # TEXT arguments...
    want=$1; shift
    out=$("$ithaca" plan "$@" 2>&1)
    [ $? = 2 ] && echo "$out" | grep -q "^error: $want" || { fail "$*: no '$want'"; echo "$out"; }
}
refused "plan: give a configuration file, or --tokens or --longest"
refused "--size goes with --tokens or --longest" --size 8b x.yaml
refused "llada2_moe: batches of a diffusion model depend on its noise" --size tiny-llada2 --tokens 100
refused ".*cp_size: 64 is more than num_attention_heads 32" --size 8b --tokens 4096 cp_size=64 cp_mode=ulysses

[ $failures = 0 ] && echo "plans agree"
exit $((failures > 0))
