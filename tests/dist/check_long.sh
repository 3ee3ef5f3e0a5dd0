#!/bin/sh
# Every layout of every family on 2, 4, 8 and 16 ranks, each twice: minutes, so `make check` runs a part of them. Over
# TCP, whose ranks sleep while they wait: there are more of them than cores.  check_long.sh BUILD
set -u
build=$1
export ITH_THREADS=1
failures=0 log=$(mktemp)
for ranks in ${RANKS:-2 4 8 16}; do
    began=$(date +%s)
    if "$(dirname "$0")/start_ranks.sh" "$ranks" "$build/tests/dist/test_families" all >"$log" 2>&1; then
        echo "$ranks ranks: every layout agrees, and again bit for bit ($(($(date +%s) - began)) s)"
    else
        failures=$((failures + 1))
        echo "$ranks ranks: FAILED"
        grep -E "ERROR|error" "$log" | sort -u | head -5
    fi
done
rm -f "$log"
exit $((failures > 0))
