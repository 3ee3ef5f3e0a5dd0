#!/usr/bin/env bash
# Fuzzes every reader of foreign bytes with clang's libFuzzer, each for SECONDS (default 60), our inputs and those of
# earlier runs as the start, the words of tests/fuzz/dict to build with.
# A crash is left as crash-* in the build folder, with a non-zero exit: put it into tests/fuzz/corpus/NAME and mend it.
set -u
seconds=${1:-60}
command -v clang >/dev/null || { echo "error: clang is not here (apt-get install clang)" >&2; exit 1; }
cmake -S . -B build-fuzz -DCMAKE_C_COMPILER=clang -DITH_FUZZ=ON -DITH_CUDA=off -DCMAKE_BUILD_TYPE=Debug >build-fuzz.configure.log 2>&1 ||
    { cat build-fuzz.configure.log; exit 1; }
names=$(ls tests/fuzz/fuzz_*.c | sed 's#.*/##; s#\.c$##')
# shellcheck disable=SC2086
cmake --build build-fuzz -j"$(nproc)" --target $names ${names//fuzz_/replay_} || exit 1
status=0
for name in $names; do
    corpus=build-fuzz/corpus/$name
    mkdir -p "$corpus"
    pack=tests/fuzz/found/${name#fuzz_}.pack
    [ ! -e "$pack" ] || build-fuzz/tests/fuzz/replay_"${name#fuzz_}" --unpack "$pack" "$corpus" || exit 1
    echo "$name: $seconds s"
    (cd build-fuzz && find . -name "$name" -type f -perm -u+x | head -1 | xargs -I{} {} -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=25 \
        -dict="../tests/fuzz/dict/${name#fuzz_}.dict" -print_final_stats=1 "corpus/$name" "../tests/fuzz/corpus/${name#fuzz_}" 2>&1 | grep -E "stat::number_of_executed|ERROR|SUMMARY|Test unit") || true
    ls build-fuzz/crash-* build-fuzz/timeout-* build-fuzz/oom-* >/dev/null 2>&1 && status=1
done
exit $status
