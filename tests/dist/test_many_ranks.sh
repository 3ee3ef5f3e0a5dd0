#!/bin/sh
# Whole runs on several ranks: the same losses, gradient norms and evaluation as on one, a checkpoint that goes on with
# any number of ranks, and one message when something is wrong.  test_many_ranks.sh ITHACA WORK_DIR
. "$(dirname "$0")/whole_runs.sh"
need_mpirun
write_book
awk "BEGIN { $words"'
    for (i = 0; i < 50; i++) {
        q = a = ""; nq = 3 + int(rand() * 20); na = 2 + int(rand() * 40)
        for (j = 0; j < nq; j++) q = q word[int(rand() * n) + 1] " "
        for (j = 0; j < na; j++) a = a word[int(rand() * n) + 1] " "
        printf "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"value\":\"%s\"}],\"loss_weight\":0.0},", q
        printf "{\"role\":\"assistant\",\"content\":[{\"type\":\"text\",\"value\":\"%s\"}],\"loss_weight\":1.0}]}\n", a
    } }' >"$work/data.jsonl"
learn=$work/book.txt vocab_size=400
init model -s tiny --dtype float32
run_yaml "model: $work/model" "dtype: float32" "bf16: false" "cutoff_len: 256" "max_steps: 4" "eval_split_ratio: 0.1" "eval_strategy: steps" \
    "eval_steps: 2" "save_steps: 2"
run() { # NAME key=value...
    name=$1; shift
    train "$name" model "$@"
}
# said NAME key=value...: the log names the degrees and the stage that were asked for
said() {
    run=$1; shift
    for key in "$@"; do
        case $key in
            dp_size=*) text="= dp ${key#*=} x" ;;
            cp_size=*) text="x cp ${key#*=} " ;;
            zero_stage=*) text="zero_stage ${key#*=} " ;;
            cp_mode=ring) text="attention: ulysses 1 x ring " ;;
            *) continue ;;
        esac
        grep -q "ranks: .*$text" "$work/$run.out" || { fail "$run: $key is not in use"; grep "ranks: " "$work/$run.out"; }
    done
}

run one || { cat "$work/one.out"; exit 1; }
grep -q '"loss"' "$work/one/trainer_log.jsonl" || { echo "no loss in trainer_log.jsonl"; exit 1; }
for layout in "dp2 dp_size=2" "cp2 cp_size=2" "cp3 cp_size=3" "cp4 cp_size=4" "dp2cp2 dp_size=2 cp_size=2" "dp8 ranks=8" \
    "ring3 cp_size=3 cp_mode=ring" "hybrid cp_size=8" "ringzero dp_size=2 cp_size=2 cp_mode=ring zero_stage=3" \
    "whole micro_batch_size=8" "accumulated dp_size=2 micro_batch_size=2 batching_strategy=padding_free" \
    "chunks cp_size=2 chunk_loss_size=7" "again cp_size=3 cp_mode=ring" "recompute cp_size=2 recompute=full" "verify dp_size=2 verify=true" "zero1 dp_size=2 zero_stage=1" \
    "zero2 dp_size=2 cp_size=2 zero_stage=2" "zero3 dp_size=2 cp_size=2 zero_stage=3" "zero3dp8 ranks=8 zero_stage=3" "copies dp_size=4 zero_stage=2 mp_replicate_size=2" \
    "whole2 cp_size=2 cp_whole_documents=always" "whole2x2 dp_size=2 cp_size=2 cp_whole_documents=always zero_stage=3" \
    "wholering cp_size=2 cp_mode=ring cp_whole_documents=always zero_stage=1 micro_batch_size=2" "wholenever cp_size=2 cp_whole_documents=never"; do
    # shellcheck disable=SC2086
    set -- $layout
    run "$@" || { fail "$layout ended with $?"; tail -3 "$work/$1.out"; continue; }
    same "$1" one
    said "$@"
done

# Stage 2 sums whole gradients once a step where they fit, and each micro-batch's where they do not.
grep -q "room for whole gradients" "$work/zero2.out" || fail "zero2: gradients are cut although there is room"
planned=$("$ithaca" plan "$work/run.yaml" dp_size=2 cp_size=2 zero_stage=2 2>/dev/null | sed -n 's/^memory on .*: \([0-9.]*\) MiB planned.*/\1/p')
run narrow dp_size=2 cp_size=2 zero_stage=2 "memory_limit=$(awk -v m="$planned" 'BEGIN { printf "%d", m * 1048576 - 65536 }')" ||
    { fail "narrow ended with $?"; tail -2 "$work/narrow.out"; }
! grep -q "room for whole gradients" "$work/narrow.out" || fail "narrow: whole gradients do not fit"
same narrow one

cmp -s "$work/ring3/model.safetensors" "$work/again/model.safetensors" || fail "ring3: a second run has other bits"
grep -q "attention: ulysses 4 x ring 2" "$work/hybrid.out" || { fail "hybrid: other scheme"; grep "^ranks" "$work/hybrid.out"; }

grep -q "documents of up to [0-9]* tokens stay whole on one rank$" "$work/whole2.out" || fail "whole2: nothing stays whole"

# Tokens are made by one rank and mapped by the others; with a cache of one's own nothing lies in output_dir.
[ "$(ls "$work/dp8/tokenized" | wc -l)" = 1 ] || fail "dp8: $(ls "$work/dp8/tokenized" | wc -l) files of tokens"
run cached dp_size=4 "data_cache_dir=$work/cache" || fail "cached ended with $?"
same cached one
[ "$(ls "$work/cache" | wc -l)" = 1 ] && [ ! -e "$work/cached/tokenized" ] || fail "cached: not one file, in data_cache_dir"

# A checkpoint goes on with other layouts and stages: the second half has the same losses.
for layout in "cp2 resume1 ranks=1" "cp2 resume4 cp_size=4" "cp3 resume2x2 dp_size=2 cp_size=2" "zero3 unzero ranks=1" \
    "zero3 rezero cp_size=3 zero_stage=2" "one zeroed dp_size=2 cp_size=2 zero_stage=3" "copies onecopy dp_size=2 zero_stage=3" "whole2 wholeresumed dp_size=2 cp_size=2 zero_stage=2 cp_whole_documents=always"; do
    # shellcheck disable=SC2086
    set -- $layout
    from=$1
    shift
    mkdir -p "$work/$1" && cp -r "$work/$from/checkpoint-2" "$work/$1/" && cp "$work/$from/trainer_log.jsonl" "$work/$1/"
    run "$@" resume_from_checkpoint=auto || { fail "$layout ended with $?"; tail -3 "$work/$1.out"; continue; }
    grep -q "resumed .*checkpoint-2" "$work/$1.out" || fail "$1: did not resume"
    same "$1" one
done
for name in cp3 zero3; do # rank 0 has put the shards together: the same tensors as of one rank, up to rounding
    [ "$(stat -c %s "$work/$name/model.safetensors")" = "$(stat -c %s "$work/one/model.safetensors")" ] || fail "$name: model.safetensors"
done

# Wrong requests: exit 2 (1 for a run that failed), and one line, once.
wrong() {
    code=$1 text=$2; shift 2
    run wrong "$@"
    got=$?
    [ $got = "$code" ] || fail "$*: exit code $got, expected $code"
    one_line wrong ".*$text"
}
wrong 2 "cp_size: 8 is more than num_attention_heads 4" cp_size=8 cp_mode=ulysses
wrong 2 "cp_mode: hybrid with cp_size 2" cp_size=2 cp_mode=hybrid
wrong 2 "cp_size: 2 does not divide the number of processes 3" ranks=3 cp_size=2
wrong 2 "mp_shard_size: 3 \* mp_replicate_size is not the number of processes 4 (use 2)" ranks=4 mp_replicate_size=2 mp_shard_size=3
wrong 2 "cp_whole_documents: always: one rank has every document whole (use auto)" ranks=2 cp_whole_documents=always
wrong 2 "nowhere.jsonl" ranks=2 train_dataset=/nowhere.jsonl
wrong 1 "cannot create directory" ranks=2 output_dir=/proc/nowhere

# Without MPI: torchrun's variables, and ranks that train starts itself.
WORLD_SIZE=2 RANK=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 wrong 2 "RANK: found 2 with WORLD_SIZE=2 (use 0 to 1)"
WORLD_SIZE=2 RANK=0 wrong 2 "MASTER_ADDR: not given"
mkdir -p "$work/bin" && for tool in sh timeout sed grep paste awk rm; do ln -sf "$(command -v $tool)" "$work/bin/"; done
whole_path=$PATH PATH=$work/bin
run tcp dp_size=2 cp_size=2 zero_stage=2 || { fail "tcp ended with $?"; cat "$work/tcp.out"; }
wrong 2 "nowhere.jsonl" ranks=2 train_dataset=/nowhere.jsonl
PATH=$whole_path
grep -q "over tcp" "$work/tcp.out" || fail "tcp: not over tcp"
same tcp one
(export ITH_MPI_PLUGIN="$work/no-plug-in.so" && run bare dp_size=2 cp_size=2 zero_stage=2) || { fail "bare ended with $?"; cat "$work/bare.out"; }
grep -q "over tcp" "$work/bare.out" || fail "bare: mpirun, but no plug-in: not over tcp"
same bare one

# A plan of one rank of the job, without starting it.
"$ithaca" plan "$work/run.yaml" "output_dir=$work/plan" cp_size=4 dp_size=2 zero_stage=3 >"$work/plan.out" 2>&1 ||
    fail "plan ended with $?"
for row in "ulysses blocks" "gradients of a layer"; do
    grep -q "$row" "$work/plan.out" || fail "plan: no row '$row'"
done

# SIGTERM saves and stops; a killed rank ends the others.
# shellcheck disable=SC2086
run term ranks=2 $endless &
waiter=$!
await_step term
parent=$(processes term | head -1)
[ -n "$parent" ] && kill -TERM "$parent"
wait $waiter
[ $? = 1 ] || fail "SIGTERM: exit code is not 1"
grep -q "stopped by a signal after saving" "$work/term.out" || { fail "SIGTERM: not told"; tail -3 "$work/term.out"; }
ls -d "$work"/term/checkpoint-* >/dev/null 2>&1 || fail "SIGTERM: no checkpoint"
# shellcheck disable=SC2086
run kill ranks=2 $endless &
lose kill '$' KILL 20

# The same without MPI, and a rank that stops answering.
# shellcheck disable=SC2086
job 2 left $endless &
lose left '$' KILL 20
one_line left ".*rank [01] has left the job"
# shellcheck disable=SC2086
job 2 silent $endless dist_timeout=2 &
lose silent '$' STOP 20
one_line silent ".*rank [01] does not answer since 2 s (dist_timeout)"

# One rank runs out of memory anywhere: its own line, once, from rank 0; nobody waits.
head -3 "$work/data.jsonl" >"$work/few.jsonl"
hit=0
for n in 1600 1900 2100 2180 2200 2210 2215 2220 2225 2230 2235 2240 2245 2250 2255 2260 2270 2280 2300; do
    ITH_FAULT_RANK=1 ITH_FAULT_SPEC=alloc:$n job 2 fault "train_dataset=$work/few.jsonl" global_batch_size=2 zero_stage=2 \
        max_steps=2 dist_timeout=20 eval_strategy=no eval_split_ratio=0 save_steps=null eval_steps=null
    code=$?
    [ $code = 0 ] && continue
    hit=$((hit + 1))
    [ $code = 1 ] || fail "alloc:$n ended with $code"
    one_line fault "rank 1: "
    ! grep -q "left the job\|not answer" "$work/fault.out" || fail "alloc:$n: the others speak, too"
done
[ $hit -ge 10 ] || fail "only $hit faults hit"

finish "all layouts agree"
