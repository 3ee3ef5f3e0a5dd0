#!/bin/sh
# Whole runs on two GPUs, or on two ranks that share one: the same losses, gradient norms and weights as on one, and
# one message when a rank dies or hangs.  test_many_gpus.sh ITHACA WORK_DIR [MODEL SIZES].  Skips (77) where there is no
# GPU; without mpirun ranks meet over TCP.
. "$(dirname "$0")/../dist/whole_runs.sh"
sizes=${3:-tiny tiny-moe tiny-llada2}
"$ithaca" env 2>/dev/null | grep -q '^ *cuda:0:' || { echo "a GPU is not here"; exit 77; }
shared=false
"$ithaca" env 2>/dev/null | grep -q '^ *cuda:1:' || shared=true
write_book
awk "BEGIN { $words"'
    for (i = 0; i < 48; i++) {
        s = ""; for (j = 0; j < 5 + int(rand() * 60); j++) s = s word[int(rand() * n) + 1] " "
        printf "{\"messages\":[{\"role\":\"user\",\"content\":\"sing\"},{\"role\":\"assistant\",\"content\":\"%s\"}]}\n", s
    } }' >"$work/data.jsonl"
learn=$work/book.txt vocab_size=400
run_yaml "dtype: float32" "bf16: false" "cutoff_len: 256" "max_steps: 5" "device: cuda" "threads: 0"

# More ranks than GPUs are refused, unless a test asks for it.
if $shared; then
    init refused -s tiny --dtype float32
    train refused-run refused dp_size=2 && fail "two ranks on one GPU: exit code is 0"
    grep -q "error: rank 1: ranks 0 and 1 have the same GPU, cuda:0 (use at most as many ranks as a machine has)" \
        "$work/refused-run.out" || { fail "two ranks on one GPU: not told"; tail -3 "$work/refused-run.out"; }
    export ITH_SHARE_GPU=1
fi

for size in $sizes; do
    init "$size" -s "$size" --dtype float32
    train $size-one $size || { cat "$work/$size-one.out"; exit 1; }
    case $size in *moe | *llada2) experts="zero3ep dp_size=2 zero_stage=3 ep_size=2" ;; *) experts="" ;; esac
    for layout in "cp2 cp_size=2" "dp2 dp_size=2" "zero1 dp_size=2 zero_stage=1" "zero2 cp_size=2 zero_stage=2" \
        "zero3 dp_size=2 zero_stage=3" "zero3cp cp_size=2 zero_stage=3 recompute=full" "$experts"; do
        [ -n "$layout" ] || continue
        # shellcheck disable=SC2086
        set -- $layout
        name=$size-$1; shift
        train "$name" $size "$@" || { fail "$layout ended with $?"; tail -3 "$work/$name.out"; continue; }
        same "$name" $size-one
    done
    # The same bits again.
    train $size-again $size dp_size=2 zero_stage=3
    cmp -s "$work/$size-zero3/model.safetensors" "$work/$size-again/model.safetensors" ||
        fail "$size: a run on two GPUs again gives other weights"
done

# A rank that dies, and one that hangs, end the run.
end_with() {
    train "$1" tiny ranks=2 max_steps=10000000 dist_timeout=5 save_steps=null &
    waiter=$!
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        sleep 0.5
        grep -q "^step " "$work/$1.out" 2>/dev/null && break
    done
    victim=$(pgrep -f "^$ithaca train .*output_dir=$work/$1" | tail -1)
    began=$(date +%s)
    kill "-$2" "$victim"
    wait $waiter && fail "$1: exit code is 0"
    took=$(($(date +%s) - began))
    kill -KILL "$victim" 2>/dev/null
    echo "$1: ended after $took s: $(grep -a "^error" "$work/$1.out" | head -1)"
    [ $took -le "$3" ] || fail "$1: the others ended late"
}
end_with killed KILL 10
end_with hung STOP 20
grep -q "does not answer since 5 s (dist_timeout)" "$work/hung.out" || { fail "hung: not told"; tail -5 "$work/hung.out"; }

finish "all layouts agree"
