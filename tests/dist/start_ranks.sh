#!/bin/sh
# Starts a program as N ranks by torchrun's variables, without any launcher.  start_ranks.sh N PROGRAM ARGUMENTS...
# ITH_FAULT_RANK gets ITH_FAULT=$ITH_FAULT_SPEC.
# Ends with the highest exit code.
ranks=$1; shift
: "${ITH_FAULT_RANK:=none}"
export WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-$((20000 + $$ % 12000))}
pids= code=0 rank=0
while [ $rank -lt "$ranks" ]; do
    [ "$rank" = "$ITH_FAULT_RANK" ] && export "ITH_FAULT=$ITH_FAULT_SPEC"
    RANK=$rank LOCAL_RANK=$rank "$@" &
    unset ITH_FAULT
    pids="$pids $!"
    rank=$((rank + 1))
done
for pid in $pids; do
    wait "$pid" || { got=$?; [ $got -gt $code ] && code=$got; }
done
exit $code
