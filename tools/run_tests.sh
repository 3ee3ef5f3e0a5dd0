#!/usr/bin/env bash
# Runs every test of a build folder and closes with one line that counts them.
set -u
cd "$1" || exit 1
log=$(mktemp)
ctest --output-on-failure -j"$(nproc 2>/dev/null || echo 2)" 2>&1 | tee "$log" | grep -v "^ *Start " | grep -v "^Test project"
status=${PIPESTATUS[0]}
total=$(grep -c "Test *#[0-9]*:" "$log")
skipped=$(grep -c "Test *#.*\*\*\*Skipped" "$log")
passed=$(grep -c "Test *#.* Passed" "$log")
failed=$((total - passed - skipped))
rm -f "$log"
[ "$total" -gt 0 ] || { echo "error: no test was found" >&2; exit 1; }
echo "$passed passed, $failed failed, $skipped skipped"
exit "$status"
