#!/usr/bin/env bash
# The demo behind `make demo`: builds the program, makes a small model, fine-tunes it on demo/data, and lets it
# answer; then the same with a diffusion model. It fails when an answer differs from the data. Everything it makes lies in the build folder.
#   BUILD, JOBS, CMAKE_ARGS   as the Makefile sets them
#   ITHACA=PROGRAM            uses a built program instead of building one
#   DEMO_ARGS="key=value .."  changes keys of demo/train.yaml
#   DEMO_DATA=DIRECTORY       other data than demo/data (the same file names)
#   DEMO_SIZE=tiny            another size of ithaca init
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-build-demo}
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
run=$build/run
data=${DEMO_DATA:-demo/data}
started=$SECONDS

say() { printf '\n== %s\n' "$*"; }
die() {
    printf '\nDEMO FAILED: %s\n' "$*" >&2
    exit 1
}

# ---- the program
if [ -n "${ITHACA:-}" ]; then
    ithaca=$ITHACA
else
    say "1/5 building the program in $build"
    ithaca=$build/ithaca
    mkdir -p "$build"
    # shellcheck disable=SC2086
    cmake -S . -B "$build" ${CMAKE_ARGS:--DITH_TESTS=OFF -DITH_CUDA=off} >"$build/configure.log" 2>&1 ||
        { cat "$build/configure.log" >&2; die "cmake found something missing"; }
    cmake --build "$build" -j"$jobs" --target ithaca >"$build/build.log" 2>&1 ||
        { tail -n 40 "$build/build.log" >&2; die "the build stopped ($build/build.log)"; }
fi
[ -x "$ithaca" ] || die "no program at $ithaca"
built=$SECONDS

# ---- a model directory with random weights, and a tokenizer learned from our own text
say "2/5 making a small Qwen3 model with random weights, and learning its tokenizer"
rm -rf "$run"
mkdir -p "$run"
cat "$data"/voyage.txt "$data"/questions.jsonl "$data"/conversations.jsonl >"$run/tokenizer_text.txt"
"$ithaca" init "$run/model" --size "${DEMO_SIZE:-small}" --dtype float32 --vocab-size 1024 --learn "$run/tokenizer_text.txt"

# ---- fine-tuning
say "3/5 fine-tuning it on $data (configuration: demo/train.yaml)"
# shellcheck disable=SC2086
"$ithaca" train demo/train.yaml model="$run/model" train_dataset="$data/data.yaml" output_dir="$run/trained" \
    device=cpu ${DEMO_ARGS:-}
trained=$SECONDS
for file in config.json model.safetensors tokenizer.json chat_template.jinja trainer_log.jsonl loss_curve.svg; do
    [ -s "$run/trained/$file" ] || die "training left no $file in $run/trained"
done

# ---- questions
say "4/5 asking the trained model (greedy decoding)"
answer_of() { # the answer that the data gives to a question
    sed -n 's/^{"instruction": "'"$1"'", "input": "", "output": "\(.*\)"}$/\1/p' "$data/questions.jsonl"
}
ask() {
    local expected got
    expected=$(answer_of "$1")
    [ -n "$expected" ] || die "'$1' is not in $data/questions.jsonl"
    got=$("$ithaca" generate "$run/trained" --prompt "$1" --do-sample false -n 80 --device cpu 2>"$run/generate.log") ||
        { cat "$run/generate.log" >&2; die "ithaca generate failed"; }
    printf '   you     %s\n   model   %s\n' "$1" "$got"
    [ "$got" = "$expected" ] || die "the data says: $expected"
}
ask "What is ithaca?"
ask "What is the dog of Ulysses called?"

# All questions at once: a count, for it shows how much of the data the model holds.
sed 's/^{"instruction": \(".*"\), "input": "", "output": ".*"}$/{"prompt": \1}/' "$data/questions.jsonl" >"$run/prompts.jsonl"
sed 's/^{"instruction": ".*", "input": "", "output": "\(.*\)"}$/\1/' "$data/questions.jsonl" >"$run/expected.txt"
"$ithaca" generate "$run/trained" "$run/prompts.jsonl" --do-sample false -n 80 --batch 16 --device cpu \
    >"$run/answers.jsonl" 2>"$run/generate.log" || { cat "$run/generate.log" >&2; die "ithaca generate failed"; }
total=$(wc -l <"$run/expected.txt")
right=$(sed 's/^.*"answer": *"\(.*\)", *"tokens".*$/\1/' "$run/answers.jsonl" | paste -d '\n' - "$run/expected.txt" |
    awk 'NR % 2 { got = $0; next } got == $0 { n++ } END { print n + 0 }')
printf '   all     %d of %d answers equal to the data, word for word\n' "$right" "$total"

# ---- a diffusion model, which writes many tokens at a time
say "5/5 the same with a small diffusion model (LLaDA2; configuration: demo/diffusion.yaml)"
head -n 24 "$data/questions.jsonl" | sed \
    's/^{"instruction": \(".*"\), "input": "", "output": \(".*"\)}$/{"messages": [{"role": "user", "content": \1}, {"role": "assistant", "content": \2}]}/' \
    >"$run/rows.jsonl"
"$ithaca" init "$run/diffusion" --size tiny-llada2 --dtype float32 --vocab-size 1024 --learn "$run/tokenizer_text.txt" \
    hidden_size=128 moe_intermediate_size=64 initializer_range=0.05
"$ithaca" train demo/diffusion.yaml model="$run/diffusion" train_dataset="$run/rows.jsonl" output_dir="$run/diffused" device=cpu
"$ithaca" generate "$run/diffused" "$run/rows.jsonl" --block-size 16 --threshold 0.9 -n 80 --device cpu \
    >"$run/diffused.jsonl" 2>"$run/generate.log" || { cat "$run/generate.log" >&2; die "ithaca generate failed"; }
# Rows whose answer is the expected one, all tokens, all forwards.
read -r same tokens forwards < <(awk '
    { match($0, /"tokens": [0-9]+/); tokens += substr($0, RSTART + 10, RLENGTH - 10)
      match($0, /"forwards": [0-9]+/); forwards += substr($0, RSTART + 12, RLENGTH - 12)
      answer = $0; sub(/^.*"answer": "/, "", answer); sub(/", "tokens": .*$/, "", answer)
      expected = $0; sub(/^.*"expected": "/, "", expected); sub(/"}$/, "", expected)
      same += answer == expected }
    END { print same, tokens, forwards }' "$run/diffused.jsonl")
rows=$(wc -l <"$run/rows.jsonl")
printf '   all     %d of %d answers equal to the data, %d tokens in %d forwards\n' "$same" "$rows" "$tokens" "$forwards"
[ $((10 * same)) -ge $((9 * rows)) ] || die "the diffusion model holds $same of $rows answers"
[ $((2 * forwards)) -lt "$tokens" ] || die "$forwards forwards for $tokens tokens"

lies() { printf '  %-42s %s' "$1" "$2"; }
number() { sed -n "s/.*\"$1\": *\([0-9.e+-]*\).*/\1/p" "$2"; }
first=$(number loss "$run/trained/trainer_log.jsonl" | head -n 1)
last=$(number loss "$run/trained/trainer_log.jsonl" | tail -n 1)

cat <<PAGE

----------------------------------------------------------------------------------------------------
What happened
  A ${DEMO_SIZE:-small} Qwen3 model was made with random weights; its tokenizer was learned from
  $data. It was fine-tuned on $total questions and a few longer conversations, whole conversations
  packed side by side. The loss went from $(printf %.2f "$first") to $(printf %.4f "$last").
  A small LLaDA2 learned $rows of the questions by masking parts of the answers. It writes a block of masks
  at a time: $tokens tokens in $forwards forwards.
  Build $((built - started)) s, first training $((trained - built)) s, all of it $((SECONDS - started)) s.

Where things lie
$(lies "$run/model/" "the model before, as a Hugging Face directory")
$(lies "$run/trained/" "the model after; other programs read it as it is")
$(lies "$run/diffused/" "the diffusion model after")
$(lies "$run/trained/loss_curve.svg" "the loss, for a browser")
$(lies "$run/trained/trainer_log.jsonl" "one line for each logged step; runs/ is for TensorBoard")
$(lies "$run/trained/ithaca_config.yaml" "every key of the run, resolved")
$(lies "demo/train.yaml, $data/" "what the run was asked for, and its data")

What to do next
  talk with the model     $ithaca chat $run/trained
  watch blocks resolve    $ithaca chat $run/diffused --block-size 16
  look at its data        $ithaca data demo/train.yaml model=$run/model
  see memory and time     $ithaca plan demo/train.yaml model=$run/model
  take a real model       hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B
                          (or, with git-lfs: git clone https://huggingface.co/Qwen/Qwen3-0.6B)
    see its memory        $ithaca plan demo/train.yaml model=Qwen3-0.6B output_dir=mine
    fine-tune it          $ithaca train demo/train.yaml model=Qwen3-0.6B output_dir=mine \\
                              learning_rate=1e-5 num_train_epochs=3
    ask it                $ithaca generate mine --prompt "What is ithaca?"
  take your data          train_dataset=FILE, or a list of data sets like demo/data/data.yaml
  Every key of a configuration is in docs/config.md; \`$ithaca help\` lists the commands.
----------------------------------------------------------------------------------------------------
PAGE
