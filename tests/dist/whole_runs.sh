# whole_runs.sh - what the tests of whole runs begin with: read by them (`. whole_runs.sh`) with their own arguments
# ITHACA WORK_DIR. Sets ithaca, work (made anew), start and failures.
set -u
ithaca=$1 work=$2 start=$(cd "$(dirname "$0")/../dist" && pwd)/start_ranks.sh
rm -rf "$work" && mkdir -p "$work" || exit 1
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }
need_mpirun() { command -v mpirun >/dev/null || { echo "mpirun is not here"; exit 77; }; }
finish() { # TEXT when nothing failed
    [ $failures = 0 ] && echo "$1"
    exit $((failures > 0))
}

# data.jsonl: COUNT rows. QUESTION and ANSWER are formats of one number, that of the row and FACTOR times it.
questions() { # COUNT QUESTION ANSWER FACTOR
    row=0
    while [ $row -lt "$1" ]; do
        # shellcheck disable=SC2059
        printf "{\"messages\": [{\"role\": \"user\", \"content\": \"$2\"}, {\"role\": \"assistant\", \"content\": \"$3\"}]}\n" \
            $row $((row * $4))
        row=$((row + 1))
    done >"$work/data.jsonl"
}
# book.txt to learn a tokenizer from; for awk programs that make rows: words "word" of which there are n
words='srand(7); n = split("the ship of ulysses sails home over dark water while winds sing old songs of the sea", word, " ")'
write_book() {
    awk "BEGIN { $words
        for (i = 0; i < 400; i++) { s = \"\"; for (j = 0; j < 12; j++) s = s word[int(rand() * n) + 1] \" \"; print s } }" >"$work/book.txt"
}
# config.json of a small Qwen3.5 with experts
qwen3_5_moe() { # DTYPE LAYERS
    cat <<END
{"model_type": "qwen3_5_moe_text", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": $2, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
 "linear_key_head_dim": 16, "linear_value_head_dim": 16, "rms_norm_eps": 1e-6, "torch_dtype": "$1",
 "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
END
}
learn=$work/data.jsonl vocab_size=300
init() { # NAME OPTION...: a new model
    made=$1; shift
    "$ithaca" init "$work/$made" "$@" --learn "$learn" --vocab-size $vocab_size >/dev/null 2>&1 || { echo "init of $made failed"; exit 1; }
}
# run.yaml: the given lines, and of these what they do not have
run_yaml() { # "key: value"...
    printf '%s\n' "$@" "train_dataset: $work/data.jsonl" "micro_batch_size: 1" "global_batch_size: 8" "cutoff_len: 128" \
        "learning_rate: 1.0e-3" "report_to: none" "device: cpu" "threads: 1" | awk -F: '!seen[$1]++' >"$work/run.yaml"
}
train() { # NAME MODEL key=value...
    out=$work/$1 of=$work/$2; shift 2
    timeout 120 "$ithaca" train "$work/run.yaml" "model=$of" "output_dir=$out" "$@" >"$out.out" 2>&1
}
job() { # RANKS NAME key=value...: over TCP, without a launcher
    ranks=$1 name=$2; shift 2
    timeout 100 "$start" "$ranks" "$ithaca" train "$work/run.yaml" "output_dir=$work/$name" "$@" >"$work/$name.out" 2>&1
}
one_line() { # NAME TEXT: the run told one error, which begins with TEXT
    [ "$(grep -c '^error: ' "$work/$1.out")" = 1 ] || { fail "$1: not one error line"; tail -3 "$work/$1.out"; }
    grep -q "^error: $2" "$work/$1.out" || { fail "$1: no '$2'"; tail -3 "$work/$1.out"; }
}
# Runs in the background that do not end by themselves, their first step, and their processes in order of age.
endless="max_steps=100000 save_steps=100000 eval_strategy=no eval_split_ratio=0 eval_steps=null"
await_step() { # NAME
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        sleep 0.5
        grep -q "^step " "$work/$1.out" 2>/dev/null && break
    done
}
processes() { pgrep -f "^$ithaca train .*output_dir=$work/$1"; } # NAME
# Process WHICH of the run NAME, which is $!, gets SIGNAL after its first step: the run fails, within SECONDS.
lose() { # NAME WHICH SIGNAL SECONDS
    waiter=$!
    await_step "$1"
    victim=$(processes "$1" | sed -n "$2p")
    began=$(date +%s)
    [ -n "$victim" ] && kill "-$3" "$victim"
    for _ in 1 2 3 4 5 6 7 8 9 10; do # a stopped one is ended when the others have spoken
        grep -q "^error" "$work/$1.out" && [ "$(processes "$1" | wc -l)" -le 1 ] && break
        sleep 1
    done
    [ -n "$victim" ] && kill -KILL "$victim" 2>/dev/null
    wait $waiter && fail "$1: exit code is 0"
    [ $(($(date +%s) - began)) -le "$4" ] || fail "$1: ended late"
}
# Losses and norms of the run NAME against those of the run ONE, 1e-5 relative; evaluations, 1e-6; counts, equal.
same() { # NAME ONE
    for key in loss grad_norm aux_loss eval_loss tokens labels epoch total_steps; do
        for run in "$1" "$2"; do
            grep -o "\"$key\": *[-0-9.e+]*" "$work/$run/trainer_log.jsonl" | sed 's/.*: *//' >"$work/$run.$key"
        done
        [ "${key#*_}" = loss ] && ! [ -s "$work/$2.$key" ] && ! [ -s "$work/$1.$key" ] && continue
        paste "$work/$2.$key" "$work/$1.$key" | awk -v key="$key" '
            BEGIN { bound = key == "eval_loss" ? 1e-6 : key ~ /loss|norm/ ? 1e-5 : 0 }
            { d = $1 - $2; if (d < 0) d = -d
              if (NF != 2 || d > bound * ($1 < 0 ? -$1 : $1)) { bad = 1; print key, $1, $2 } }
            END { exit bad || NR == 0 }' || fail "$1: $key differs from $2"
    done
}
