#!/usr/bin/env bash
# A LLaDA2 from nothing to parallel decoding: init, train, record, distil, chat.
# Demands: trajectories of slow decoding, trained on by path distillation, let the model write the same answers in
# fewer forwards than before, and than as many steps of plain training do; after confidence-aware training, too, they
# are fewer than before (how it compares with the same steps without it, some forwards, depends on rounding: it is
# told); a conversation ends in the same text.
#   test_diffusion.sh PROGRAM
set -euo pipefail
ithaca=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

things=(mast oar sail rudder anchor keel rope deck)
places=("stands in the middle of the ship" "lies beside the bench" "hangs from the yard" "turns at the stern"
    "waits under the bow" "runs from end to end" "holds the sail against the wind" "was washed this morning")
for i in "${!things[@]}"; do
    printf '{"messages": [{"role": "user", "content": "Where is the %s?"}, {"role": "assistant", "content": "The %s %s, and it has been there since the ship left the harbour of Ithaca."}]}\n' \
        "${things[i]}" "${things[i]}" "${places[i]}"
done >rows.jsonl
"$ithaca" init model --size tiny-llada2 --dtype float32 --vocab-size 400 --learn rows.jsonl initializer_range=0.1 >/dev/null
cat >run.yaml <<Y
model: model
train_dataset: rows.jsonl
bf16: false
device: cpu
diffusion_config: {name: block_diffusion, block_size: 16, noise_range_low: 0.0, noise_range_high: 0.5}
cutoff_len: 128
global_batch_size: 4
micro_batch_size: 4
max_steps: 150
learning_rate: 1e-3
lr_scheduler_config: {name: cosine}
optim_config: {name: adamw, beta2: 0.99, weight_decay: 0}
report_to: []
logging_steps: 50
Y
train() { "$ithaca" train run.yaml "$@" >log 2>&1 || { cat log >&2; fail "train $*"; }; }
record() { # MODEL OUTPUT [option ..]
    "$ithaca" generate "$1" rows.jsonl --block-size 16 -n 64 --device cpu --record "$2" "${@:3}" >answers 2>log ||
        { cat log >&2; fail "generate $*"; }
    grep -q "tokens per forward" log || fail "no tokens per forward in the log"
}
right() { # rows whose answer is the one of the data
    awk -F'"' '{ for (i = 2; i < NF; i += 2) { if ($i == "answer") a = $(i + 2); if ($i == "expected") e = $(i + 2) } }
        a == e' "$1"
}
forwards() { # of the rows FILE that are right in good.jsonl
    awk 'match($0, /"row": [0-9]+/) { row = substr($0, RSTART + 7, RLENGTH - 7) } FNR == NR { good[row]; next }
        row in good && match($0, /"forwards": [0-9]+/) { n += substr($0, RSTART + 12, RLENGTH - 12) }
        END { print n + 0 }' good.jsonl "$1"
}

train output_dir=taught max_steps=600 learning_rate=5e-3
record taught slow.jsonl --threshold 2 # one token a step
right slow.jsonl >good.jsonl
good=$(wc -l <good.jsonl)
[ "$good" -ge 4 ] || fail "only $good of ${#things[@]} answers are right, one token at a time"
record taught taught.jsonl
train model=taught output_dir=more
record more more.jsonl
train model=taught output_dir=distilled train_dataset=good.jsonl
grep -q "path distillation: $good of $good samples are trajectories" log || fail "the run does not say what it trains on"
record distilled distilled.jsonl
before=$(forwards taught.jsonl) plain=$(forwards more.jsonl) after=$(forwards distilled.jsonl)
[ "$after" -lt "$before" ] && [ "$after" -lt "$plain" ] ||
    fail "forwards: $before, $plain after more training, $after after path distillation"
kept=$(right distilled.jsonl | grep -c -F -f <(grep -o '"row": [0-9]*,' good.jsonl)) || true
[ "$kept" = "$good" ] || fail "$kept of $good distilled answers are right"

train model=taught output_dir=sure diffusion_config.confidence_beta=2
grep -q "confidence loss: 2 times" log || fail "the run does not say that it trains confidence"
grep -q '"aux_loss": [0-9.e-]*,' sure/trainer_log.jsonl || fail "no confidence loss in the log"
record sure sure.jsonl
sure=$(forwards sure.jsonl)
[ "$sure" -lt "$before" ] || fail "forwards: $before before, $sure after confidence-aware training"

# a conversation in a pipe, and on a terminal, where a block is drawn again and again
answer=$(sed -n '1s/.*"answer": "\([^"]*\)".*/\1/p' distilled.jsonl)
talk=$(echo "Where is the mast?" | "$ithaca" chat distilled --block-size 16 -n 64 --device cpu --context 128 2>/dev/null)
[ "$talk" = "$answer" ] || fail "chat says '$talk', generate '$answer'"
if script -qec true /dev/null >/dev/null 2>&1; then
    script -qec "stty cols 40; '$ithaca' generate distilled --prompt 'Where is the mast?' --block-size 16 -n 64 --device cpu" \
        /dev/null 2>/dev/null </dev/null >screen || fail "generate on a terminal"
    grep -q -F "${answer: -12}" screen || fail "the answer does not end on the screen"
    grep -q $'\033\\[2m_' screen || fail "no masks were drawn"
fi

# without a word of it in the file: block diffusion
grep -v ^diffusion_config run.yaml >plain.yaml
"$ithaca" train plain.yaml output_dir=plain max_steps=1 2>log || { cat log; fail "no diffusion_config"; }

# trajectories are for diffusion models
"$ithaca" init causal --size tiny --dtype float32 --vocab-size 400 --learn rows.jsonl >/dev/null
"$ithaca" train run.yaml model=causal train_dataset=good.jsonl output_dir=no diffusion_config=null 2>log && fail "trained"
grep -q "^error: .*train_dataset: $good samples are trajectories of a diffusion model, and qwen3 is none" log || { cat log; fail "another error"; }
"$ithaca" generate causal rows.jsonl --record no.jsonl 2>log && fail "recorded"
grep -q "^error: generate: --record is for diffusion models, qwen3 writes one token a step" log || { cat log; fail "another error"; }
[ ! -e no.jsonl ] || fail "a record of nothing"
for asked in "generate causal --prompt x --threshold 0.9" "chat causal --early-stop"; do
    # shellcheck disable=SC2086
    "$ithaca" $asked </dev/null >/dev/null 2>log && fail "$asked went on"
    grep -q "^error: .*is for diffusion models, qwen3 writes one token a step" log || { cat log; fail "another error"; }
done
echo "forwards of $good answers: $before taught, $plain more training, $after distilled, $sure confidence-aware"
