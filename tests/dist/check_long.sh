#!/bin/sh
# Every layout of every family on 2, 4, 8 and 16 ranks, each twice: minutes, so `make check` runs a part of them.
# check_long.sh BUILD
set -u
build=$1
command -v mpirun >/dev/null || { echo "mpirun is not here"; exit 77; }
export ITH_MPI_PLUGIN="$PWD/$build/libithaca_mpi.so" ITH_THREADS=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
failures=0 log=$(mktemp)
for ranks in ${RANKS:-2 4 8 16}; do
    began=$(date +%s)
    if mpirun --oversubscribe --bind-to none -n "$ranks" "$build/tests/dist/test_families" all >"$log" 2>&1; then
        echo "$ranks ranks: every layout agrees, and again bit for bit ($(grep -c 'OK ] test_every_layout' "$log") ranks, $(($(date +%s) - began)) s)"
    else
        failures=$((failures + 1))
        echo "$ranks ranks: FAILED"
        grep -E "ERROR|error" "$log" | sort -u | head -5
    fi
done
rm -f "$log"
exit $((failures > 0))
