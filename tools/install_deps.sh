#!/usr/bin/env bash
# Installs what the build needs and finds missing (Debian 12, Ubuntu 22.04 and later). Root or sudo.
# --program: only what the program itself needs, neither tests nor optional libraries.
# Required: compiler, CMake, libyaml, jansson, PCRE2, utf8proc, cmocka (tests). Optional: oneDNN, Open MPI, libpng,
# libjpeg-turbo, libwebp.
set -eu
missing=""
need() { # need PACKAGE FILE...: any of the files present means installed
    pkg=$1; shift
    for f in "$@"; do
        for g in $f; do [ -e "$g" ] && return 0; done
    done
    missing="$missing $pkg"
}
command -v cc >/dev/null || missing="$missing build-essential"
command -v make >/dev/null || missing="$missing make"
command -v cmake >/dev/null || missing="$missing cmake"
command -v pkg-config >/dev/null || missing="$missing pkg-config"
need libyaml-dev /usr/include/yaml.h /usr/local/include/yaml.h
need libjansson-dev /usr/include/jansson.h /usr/local/include/jansson.h
need libpcre2-dev /usr/include/pcre2.h /usr/local/include/pcre2.h
need libutf8proc-dev /usr/include/utf8proc.h /usr/local/include/utf8proc.h
[ "${1:-}" = --program ] || need libcmocka-dev /usr/include/cmocka.h /usr/local/include/cmocka.h
optional=""
have_optional() { pkg=$1; shift; for f in "$@"; do for g in $f; do [ -e "$g" ] && return 0; done; done; optional="$optional $pkg"; }
[ "${1:-}" = --program ] || have_optional libdnnl-dev /usr/include/dnnl.h "/usr/include/oneapi/dnnl/dnnl.h"
[ "${1:-}" = --program ] || have_optional libopenmpi-dev /usr/include/mpi.h "/usr/include/*/mpi.h" "/usr/lib/*/openmpi/include/mpi.h"
have_optional openmpi-bin /usr/bin/mpirun /usr/local/bin/mpirun
have_optional libpng-dev /usr/include/png.h /usr/local/include/png.h
have_optional libjpeg-dev /usr/include/jpeglib.h /usr/local/include/jpeglib.h
have_optional libwebp-dev /usr/include/webp/decode.h /usr/local/include/webp/decode.h
[ -z "$missing$optional" ] && exit 0
if ! command -v apt-get >/dev/null; then
    [ -z "$missing" ] && exit 0
    echo "error: these packages are missing and apt-get is not here:$missing" >&2
    exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
[ -z "$sudo" ] || command -v sudo >/dev/null || { echo "error: run as root to install:$missing" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
echo "installing:$missing$optional" >&2
$sudo apt-get update -qq
[ -z "$missing" ] || $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
[ -z "$optional" ] || $sudo apt-get install -y -qq --no-install-recommends $optional >/dev/null ||
    echo "note: optional packages not installed:$optional" >&2
