#!/usr/bin/env bash
# Our step and the peer's in turn, on one GPU, and the ratio of their medians.
#     compare.sh BUILD MODEL TOKENS BATCH [ROUNDS]
set -eu
build=$1 model=$2 tokens=$3 batch=$4 rounds=${5:-2}
here=$(dirname "$0")
ours=() theirs=()
for _ in $(seq "$rounds"); do
    ours+=("$("$build"/bench/ithaca_bench_step model="$model" seq="$tokens" batch="$batch" device=cuda json=1 steps=12 2>/dev/null | tail -1)")
    theirs+=("$(python3 "$here"/peer.py "$model" "$tokens" "$batch" 2>/dev/null | tail -1)")
done
printf '%s\n' "${ours[@]}" "${theirs[@]}"
python3 - "${ours[@]}" "${theirs[@]}" <<'PY'
import json, statistics, sys
rows = [json.loads(a) for a in sys.argv[1:]]
of = lambda ours: statistics.median(r["tok_s"] for r in rows if (r["name"] == "ithaca") == ours)
print(f"ithaca {of(True):.0f} tok/s, peer {of(False):.0f} tok/s: {of(True) / of(False):.2f}x")
PY
