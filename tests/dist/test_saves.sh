#!/bin/sh
# Saves of several ranks: the files of one rank bit for bit from any layout; a rank killed at any write of a save, and a
# full disk on any rank, leave a checkpoint that goes on; a directory that not all ranks see is told.
#     test_saves.sh ITHACA WORK_DIR
. "$(dirname "$0")/whole_runs.sh"
need_mpirun
questions 16 "Where is harbour %d?" "Behind cape %d." 3
init dense -s tiny --dtype float32
qwen3_5_moe bfloat16 2 >"$work/experts.json"
init experts --config "$work/experts.json"
run_yaml "max_steps: 2" "save_steps: 2"

# from NAME: the directory NAME begins with the checkpoint of the run $1 and its log.
from() {
    rm -rf "${work:?}/$2" && mkdir -p "$work/$2" && cp -r "$work/$1/checkpoint-2" "$work/$2/" && cp "$work/$1/trainer_log.jsonl" "$work/$2/"
}

# What one rank saved is written again by many, without a step in between: the model, bit for bit.
for kind in dense experts; do
    train "$kind-one" $kind save_ckpt_as_hf=true max_shard_size=100000 || { fail "$kind-one"; tail -3 "$work/$kind-one.out"; continue; }
    for layout in "dp2 ranks=2" "zero1 ranks=2 zero_stage=1" "zero2 ranks=4 zero_stage=2" "zero3 ranks=4 zero_stage=3" \
        "copies ranks=4 zero_stage=2 mp_replicate_size=2" "ep2 ranks=4 zero_stage=3 ep_size=2"; do
        # shellcheck disable=SC2086
        set -- $layout
        name=$kind-$1; shift
        [ "$kind" = dense ] && [ "${name#*-}" = ep2 ] && continue
        from "$kind-one" "$name"
        train "$name" $kind resume_from_checkpoint=auto max_shard_size=100000 "$@" || { fail "$name"; tail -3 "$work/$name.out"; continue; }
        for file in "$work/$kind-one"/model*; do
            cmp -s "$file" "$work/$name/${file##*/}" || fail "$name: ${file##*/} has other bits"
        done
    done
    [ -f "$work/$kind-one/model.safetensors.index.json" ] || fail "$kind-one: not in several files"
done

# A rank killed at the n-th write: the other ends in seconds, the checkpoint of before, or the new one, goes on.
lost() { # RANK FAULT NAME key=value...
    rank=$1 fault=$2 name=$3; shift 3
    began=$(date +%s)
    ITH_FAULT_RANK=$rank ITH_FAULT_SPEC=$fault job 2 "$name" "model=$work/dense" max_steps=4 resume_from_checkpoint=auto \
        dist_timeout=20 "$@"
    code=$?
    [ $(($(date +%s) - began)) -le 20 ] || fail "$fault on rank $rank: ended late"
    ls -d "$work/$name"/checkpoint-[24] >/dev/null 2>&1 || fail "$fault on rank $rank: no checkpoint is left"
    return $code
}
train steady dense max_steps=4 ranks=2 zero_stage=3 dtype=float32 bf16=false || { fail steady; tail -3 "$work/steady.out"; }
train base dense ranks=2 zero_stage=3 dtype=float32 bf16=false || fail base
goes_on() { # NAME WHAT: the run ends as if nothing had been
    train "$1" dense max_steps=4 resume_from_checkpoint=auto dtype=float32 bf16=false ranks=2 zero_stage=3 ||
        { fail "$2: does not go on"; tail -3 "$work/$1.out"; return; }
    cmp -s "$work/$1/model.safetensors" "$work/steady/model.safetensors" || fail "$2: other weights"
    [ -z "$(ls -d "$work/$1"/checkpoint-*.tmp-* "$work/$1"/.*.tmp-* 2>/dev/null)" ] || fail "$2: leftovers"
}
killed=0
for rank in 0 1; do
    for n in 2 5 8 11 14 17 20 26 32 38 44 50; do
        from base killed
        lost $rank kill:$n killed dtype=float32 bf16=false zero_stage=3 && continue
        killed=$((killed + 1))
        [ $((n % 3)) = 2 ] && [ $rank = 1 ] && ! grep -q "^error: .*rank 1 has left the job" "$work/killed.out" &&
            { fail "kill:$n on rank $rank: not told"; cat "$work/killed.out"; }
        [ $((n % 4)) = 2 ] && goes_on killed "kill:$n on rank $rank"
    done
done
[ $killed -ge 8 ] || fail "only $killed kills hit a save"
goes_on killed "the last kill"

# A full disk on one rank: one line with its number and the file, and the same.
full=0
for rank in 0 1; do
    for n in 1 3 6 10 15 20 30 40; do
        from base full
        lost $rank write:$n full dtype=float32 bf16=false zero_stage=3
        [ $? = 1 ] || continue
        full=$((full + 1))
        [ $rank = 0 ] && one_line full "" || one_line full "rank 1: .*$work/full/"
    done
done
[ $full -ge 6 ] || fail "only $full writes failed"
goes_on full "full disk"
if mkdir -p "$work/small" && mount -t tmpfs -o size=1m none "$work/small" 2>/dev/null; then
    timeout 60 "$ithaca" train "$work/run.yaml" "model=$work/dense" "output_dir=$work/small/run" ranks=2 zero_stage=2 >"$work/small.out" 2>&1
    [ $? = 1 ] && [ "$(grep -c '^error: .*No space left' "$work/small.out")" = 1 ] || { fail "a small disk"; tail -3 "$work/small.out"; }
    umount "$work/small"
fi

# Ranks that see different directories under the same name.
mkdir -p "$work/cwd0" "$work/cwd1"
# shellcheck disable=SC2016
timeout 60 "$start" 2 sh -c 'cd "$1/cwd$RANK" && shift && exec "$@"' sh "$work" "$ithaca" train "$work/run.yaml" "model=$work/dense" \
    output_dir=out >"$work/apart.out" 2>&1
[ $? = 2 ] && [ "$(grep -c '^error: ' "$work/apart.out")" = 1 ] && grep -q "^error: rank 1: output_dir: out: .*share" "$work/apart.out" ||
    { fail "directories apart"; tail -3 "$work/apart.out"; }

finish "every save is whole"
