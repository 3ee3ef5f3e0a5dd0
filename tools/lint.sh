#!/usr/bin/env bash
# Layers, cppcheck and clang-tidy; the tools that are not here are named and left out.
set -u
build=$1
status=0
tools/check_layers || status=1
if command -v cppcheck >/dev/null; then
    cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --library=tools/cppcheck.cfg --error-exitcode=1 --suppress=missingIncludeSystem \
        -I src -D_GNU_SOURCE src 2>&1 || status=1
else
    echo "lint: cppcheck is not here"
fi
if command -v clang-tidy >/dev/null; then
    # One file at a time: of several its checker of va_list mistakes all but the first.
    find src -name '*.c' | xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p "$build" 2>/dev/null | grep -E "warning:|error:" && status=1
else
    echo "lint: clang-tidy is not here"
fi
exit $status
