#!/bin/sh
# How jobs end when a rank fails: one line in all, of the first cause, within seconds; and what `verify: true` finds.
#     test_ends.sh ITHACA WORK_DIR
. "$(dirname "$0")/whole_runs.sh"
questions 16 "Who steers ship %d?" "Pilot %d does." 5
init model -s tiny
init experts -s tiny-moe
run_yaml "model: $work/model" "max_steps: 3"

# Tasks of srun without MPI would all be rank 0 of 1 and write the same files.
SLURM_STEP_NUM_TASKS=2 "$ithaca" train "$work/run.yaml" "output_dir=$work/tasks" >"$work/tasks.out" 2>&1
[ $? = 2 ] || fail "tasks of srun: not refused"
one_line tasks "srun started 2 tasks that do not know of each other"

# verify: on any stage and mesh a difference is found at the point where it is.
verify() { # RANKS LAYOUT
    ranks=$1; shift
    job "$ranks" sound verify=true "$@" || { fail "verify $*: a sound run ends with $?"; tail -2 "$work/sound.out"; }
    grep -q "all [0-9]* tensors got a gradient" "$work/sound.out" || fail "verify $*: gradients are not counted"
    ! grep -q "is nan\|differs" "$work/sound.out" || { fail "verify $*: found what is not there"; grep verify "$work/sound.out"; }
    for point in "1 begin: .*weight differs from that of rank 0" "2 backward: rank 1: gradient of .*: element [0-9]* is nan" \
        "3 reduce: .*\(gradient differs from that of rank\|gradient of .* is nan\)" "4 update: .*weight differs from that of rank 0" \
        "5 begin: .*weight differs from that of rank 0"; do
        export ITH_FAULT_RANK=1 ITH_FAULT_SPEC=verify:"${point%% *}"
        job "$ranks" planted verify=true "$@"
        unset ITH_FAULT_RANK ITH_FAULT_SPEC
        grep -q "verify: ${point#* }" "$work/planted.out" || { fail "verify $* ${point%%:*}: not found"; tail -2 "$work/planted.out"; }
        grep -q "rank [1-3]: \|rank 1: verify" "$work/planted.out" || fail "verify $* ${point%%:*}: no rank"
        [ "$(grep -c '^error: ' "$work/planted.out")" -le 1 ] || fail "verify $* ${point%%:*}: many lines"
    done
}
verify 2 zero_stage=0
verify 2 cp_size=2 zero_stage=1
verify 2 zero_stage=2 dtype=float32 bf16=false
verify 2 cp_size=2 zero_stage=3
verify 4 zero_stage=2 mp_replicate_size=2
verify 2 zero_stage=3 ep_size=2 "model=$work/experts"
verify 4 zero_stage=3 ep_size=2 "model=$work/experts"

# A rank is killed, and one is stopped: of three that are left one tells it.
# shellcheck disable=SC2086
job 4 killed $endless &
lose killed 3 KILL 15
one_line killed "rank [0-3]: rank [0-3] has left the job"
# shellcheck disable=SC2086
job 4 stopped $endless dist_timeout=2 &
lose stopped 3 STOP 15
one_line stopped "rank [0-3]: rank [0-3] does not answer since 2 s (dist_timeout)"

# A row that cannot be read on one rank alone: its line, once.
ITH_FAULT_RANK=2 ITH_FAULT_SPEC=read:3 job 4 unread
[ $? = 1 ] || fail "unread: exit code"
one_line unread "rank 2: "

# A gradient that is NaN on one rank: all stop, or all go on.
for stage in 0 3; do
    export ITH_FAULT_RANK=1 ITH_FAULT_SPEC=verify:2
    job 2 nan verify=true zero_stage=$stage nonfinite=stop
    [ $? = 1 ] || fail "nan, stage $stage: exit code"
    one_line nan "step 1: gradients are not finite"
    job 2 nan verify=true zero_stage=$stage nonfinite=skip || fail "nan, stage $stage: skip ended with $?"
    unset ITH_FAULT_RANK ITH_FAULT_SPEC
    [ "$(grep -c "step 1: gradients are not finite, no update" "$work/nan.out")" = 1 ] || { fail "nan: not skipped"; tail -2 "$work/nan.out"; }
done

# A rank that is not there when the others meet: told after the time that was given.
began=$(date +%s)
WORLD_SIZE=2 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 12000)) ITH_MEETING_TIMEOUT=2 timeout 60 \
    "$ithaca" train "$work/run.yaml" "output_dir=$work/alone" >"$work/alone.out" 2>&1
[ $? = 1 ] || fail "alone: exit code"
[ $(($(date +%s) - began)) -le 10 ] || fail "alone: ended late"
one_line alone "waiting for the other ranks: no answer in time (ITH_MEETING_TIMEOUT)"
ITH_MEETING_TIMEOUT=soon job 2 soon
grep -q "^error: .*ITH_MEETING_TIMEOUT: found soon" "$work/soon.out" || { fail "ITH_MEETING_TIMEOUT=soon"; tail -1 "$work/soon.out"; }

# A rank that dies before the meeting, of ranks that train started itself: told by their parent, in seconds.
mkdir -p "$work/bin" && for tool in sh timeout sed grep paste awk rm; do ln -sf "$(command -v $tool)" "$work/bin/"; done
began=$(date +%s)
# shellcheck disable=SC2086
(PATH=$work/bin && "$ithaca" train "$work/run.yaml" "output_dir=$work/early" ranks=2 $endless >"$work/early.out" 2>&1) &
waiter=$!
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
    victim=$(processes early | sed -n 2p)
    [ -n "$victim" ] && break
done
[ -n "$victim" ] && kill -KILL "$victim"
wait $waiter && fail "early: exit code is 0"
[ $(($(date +%s) - began)) -le 25 ] || fail "early: ended late"
one_line early ""

finish "every end is told once"
