#!/usr/bin/env bash
# Goal: the demo works with this build, and says so loudly when the model answers wrongly. Method: demo/run.sh over a
# few of its questions and a tiny model; then with one step, which cannot be enough.
set -euo pipefail
ithaca=$1 source=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { cat "$work/log" >&2; echo "FAILED: $*" >&2; exit 1; }

mkdir "$work/data"
cp "$source"/demo/data/{voyage.txt,data.yaml} "$work/data"
questions=$source/demo/data/questions.jsonl
{ head -n 8 "$questions"; tail -n 2 "$questions"; } >"$work/data/questions.jsonl"
head -n 1 "$source/demo/data/conversations.jsonl" >"$work/data/conversations.jsonl"

# A data.yaml outside the working folder finds its files beside itself.
export ITHACA=$ithaca BUILD=$work DEMO_DATA=$work/data DEMO_SIZE=tiny
DEMO_ARGS="max_steps=150 learning_rate=5e-3" "$source/demo/run.sh" >"$work/log" 2>&1 || fail "the demo ended with $?"
total=$(wc -l <"$work/data/questions.jsonl")
grep -q " of $total answers equal to the data" "$work/log" || fail "no count of answers"
right=$(sed -n 's/^ *all *\([0-9]*\) of .* word for word$/\1/p' "$work/log")
[ "$right" -ge $((total * 9 / 10)) ] || fail "$right of $total answers are right"
grep -q " of $total answers equal to the data, [0-9]* tokens in [0-9]* forwards" "$work/log" || fail "no diffusion part"
for file in loss_curve.svg trainer_log.jsonl trainer_state.json ithaca_config.yaml model.safetensors; do
    [ -s "$work/run/trained/$file" ] || fail "$file is missing"
done

DEMO_ARGS="max_steps=1" "$source/demo/run.sh" >"$work/log" 2>&1 && fail "one step was said to be enough"
grep -q "DEMO FAILED: the data says:" "$work/log" || fail "the reason is not told"
echo "$right of $total answers right; one step refused"
