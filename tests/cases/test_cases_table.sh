#!/usr/bin/env bash
# docs/cases.md: S01 to S112 stand there once each, in order, and every test it names exists.
#   test_cases_table.sh SOURCE_DIR
set -u
cd "$1" || exit 1
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }
found=$(sed -n 's/^| \(S[0-9]*\) | .* | .* |$/\1/p' docs/cases.md)
wanted=$(for i in $(seq 1 112); do printf 'S%02d\n' "$i"; done)
[ "$found" = "$wanted" ] || fail "numbers: $(diff <(echo "$found") <(echo "$wanted") | grep '[<>]' | head -3)"
for name in $(grep -o '`[a-z_0-9/.]*`' docs/cases.md | tr -d '`' | sort -u); do
    case $name in
        test_*.sh) [ -x "tests/cases/$name" ] || fail "$name is not there" ;;
        test_*) [ "$(grep -rhow "$name" tests --include="*.c" | wc -l)" -ge 2 ] || fail "no test runs $name" ;; # made, and run
        tests/*) [ -e "$name" ] || fail "$name is not there" ;;
    esac
done
for number in $(grep -rhoE 'cases (S[0-9]+(, )?)+' tests --include='*.c' | grep -oE 'S[0-9]+' | sort -u); do
    echo "$wanted" | grep -qx "$number" || fail "a comment names $number"
done
exit $((failures > 0))
