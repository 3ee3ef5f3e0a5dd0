#!/usr/bin/env bash
# Goal: what `make install` leaves is complete, lies where DESTDIR and PREFIX say, and is enough to compile, link and
# run a program that embeds the library. Method: install into a staging folder, look for each file, move the tree,
# build embed.c through pkg-config there, and let it train and answer.
set -euo pipefail
build=$1 source=$2 cc=$3
command -v pkg-config >/dev/null || { echo "skipped: pkg-config is not here"; exit 77; }
pkg-config --exists jansson yaml-0.1 libpcre2-8 libutf8proc ||
    { echo "skipped: pkg-config does not know jansson, yaml-0.1, libpcre2-8 and libutf8proc"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }

DESTDIR=$work/stage cmake --install "$build" --prefix /opt/ithaca >"$work/install.log" || { cat "$work/install.log"; fail "install"; }
[ "$(ls -A "$work/stage")" = opt ] || fail "files outside PREFIX: $(ls -A "$work/stage")"
mv "$work/stage/opt/ithaca" "$work/moved"
for file in bin/ithaca include/ithaca.h share/man/man1/ithaca.1 share/bash-completion/completions/ithaca \
    share/zsh/site-functions/_ithaca share/fish/vendor_completions.d/ithaca.fish share/doc/ithaca/README.md share/doc/ithaca/docs/config.md; do
    [ -s "$work/moved/$file" ] || fail "$file is missing or empty"
done
library=$(find "$work/moved" -name libithaca.a)
pc=$(find "$work/moved" -name ithaca.pc)
[ -n "$library" ] && [ -n "$pc" ] || fail "libithaca.a or ithaca.pc is missing"

PKG_CONFIG_PATH=$(dirname "$pc")
export PKG_CONFIG_PATH
version=$(pkg-config --modversion ithaca)
[ "$("$work/moved/bin/ithaca" --version)" = "ithaca $version" ] ||
    fail "the program says '$("$work/moved/bin/ithaca" --version)', pkg-config '$version'"

# Strict flags: the header is for other people's compilers. C++ as well, where there is one.
read -r -a flags < <(pkg-config --cflags --libs ithaca)
"$cc" -std=c11 -Wall -Wextra -Wpedantic -Wstrict-prototypes -Werror "$source/tests/install/embed.c" -o "$work/embed" "${flags[@]}"
if command -v c++ >/dev/null; then
    echo '#include <ithaca.h>' | c++ -x c++ -std=c++11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$work/moved/include" - ||
        fail "the header is not C++"
fi

"$work/moved/bin/ithaca" init "$work/model" --size tiny --dtype float32 --learn "$source/demo/data/voyage.txt" --vocab-size 400 >/dev/null
"$work/embed" "$work/model" "$source/demo/data/questions.jsonl" "$work/out" "$version"
[ -s "$work/out/model.safetensors" ] || fail "the embedded run left no model"
