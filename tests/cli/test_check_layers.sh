#!/bin/sh
# Goal: tools/check_layers finds each kind of fault and passes a clean tree.
# Method: a small tree with one fault at a time; the exact finding is compared.
# Arguments: the script, a directory to work in.
set -u
tool=$1 dir=$2/check_layers_tree
failures=0

fresh() {
    rm -rf "$dir"
    mkdir -p "$dir/src/base" "$dir/src/tensor" "$dir/src/config" "$dir/src/kernels/cuda" \
        "$dir/src/comm" "$dir/src/cli" "$dir/tests" "$dir/bench" "$dir/tools" "$dir/include"
    echo 'int base;' >"$dir/src/base/base.h"
    echo 'int hidden;' >"$dir/src/base/b_internal.h"
    echo 'int t;' >"$dir/src/tensor/tensor.h"
    printf '#include "base/base.h"\n#include <cuda_runtime.h>\n' >"$dir/src/kernels/cuda/k.cu"
    printf '#include <mpi.h>\n' >"$dir/src/comm/comm_mpi.c"
    printf '/* free(x), exit(1)\n * abort() */\nconst char *s = "printf(1) /* ";\n' >"$dir/src/base/text.c"
    printf '#include "tensor/tensor.h"\nvoid f(void) { exit(1); }\n' >"$dir/src/cli/c.c"
    printf 'void f(void) { ith_free(p); q->free(p); }\n' >"$dir/src/config/calls.c"
}

# check NAME FILE TEXT EXPECTED: the file with this text gives exactly this finding.
check() {
    fresh
    printf '%b' "$3" >"$dir/$2"
    found=$("$tool" "$dir" 2>&1)
    code=$?
    if [ "$found" != "$4" ] || [ $code -ne 1 ]; then
        printf '%s: exit %s\n  found    %s\n  expected %s\n' "$1" "$code" "$found" "$4"
        failures=$((failures + 1))
    fi
}

fresh
found=$("$tool" "$dir" 2>&1)
code=$?
if [ -n "$found" ] || [ $code -ne 0 ]; then
    printf 'clean tree: exit %s, %s\n' "$code" "$found"
    failures=1
fi
"$tool" "$dir/tests" >/dev/null 2>&1
[ $? -eq 2 ] || { echo 'a folder without src: exit code is not 2'; failures=$((failures + 1)); }

check higher src/base/x.c '\n#include "cli/c.h"\n' \
    'src/base/x.c:2: base (level 0) includes cli/c.h (level 6)
src/base/x.c:2: "cli/c.h": no such file'
check equal src/config/x.c '#include "tensor/tensor.h"\n' \
    'src/config/x.c:1: config (level 1) includes tensor/tensor.h (level 1)'
check absent src/config/x.c '#include "base/nothing.h"\n' \
    'src/config/x.c:1: "base/nothing.h": no such file'
check bare src/base/x.c '#include "base.h"\n' 'src/base/x.c:1: "base.h": write the folder too'
check internal src/config/x.c '#include "base/b_internal.h"\n' \
    'src/config/x.c:1: base/b_internal.h stays inside its folder'
check mpi src/comm/x.c '#include <mpi.h>\n' 'src/comm/x.c:1: mpi.h belongs in comm_mpi.c'
check nccl src/kernels/cuda/x.cu '#include <nccl.h>\n' \
    'src/kernels/cuda/x.cu:1: nccl.h belongs in comm_nccl.c'
check cuda src/kernels/x.c '#include <cublasLt.h>\n' \
    'src/kernels/x.c:1: cublasLt.h belongs in kernels/cuda/ or comm_nccl.c'
check names tests/base.h '\n' 'tests/base.h:1: file name already used by src/base/base.h'
check banned src/base/x.c 'void f(void) {\n    strcpy (a, b);\n}\n' 'src/base/x.c:2: strcpy() is banned'
check ending src/base/x.c 'void f(void) { exit(1); }\n' \
    'src/base/x.c:1: exit() belongs in src/cli/ (return an ith_status, or use ith_log)'
check heap src/base/x.c 'void f(void) { a = 1; free(p); }\n' \
    'src/base/x.c:1: free() goes around base/mem.h (use ith_free)'
check folder src/base/x.c '#include "nowhere/x.h"\n' \
    'src/base/x.c:1: "nowhere/x.h": no such folder in src/'

rm -rf "$dir"
[ $failures -eq 0 ] && echo 'check_layers: ok'
exit $((failures > 0))
