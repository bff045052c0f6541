#!/bin/sh
# From a fresh Debian or Ubuntu to a running server, or to a passing test run, in one command.
# See `deploy/bootstrap.sh --help`. What it prepares is kept in .venv beside deploy/, and nowhere
# else; once that is complete, a call costs a fraction of a second.
#
# Whoever is interrupted leaves .venv/bootstrap.partial behind, and the next call starts .venv
# afresh. Only .venv/bootstrap.stamp says that everything is there; it is written last, at once.
set -eu

called_from=$PWD

root=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "$0")")/.." && pwd -P)
venv=$root/.venv
log=$venv/bootstrap.log
stamp=$venv/bootstrap.stamp
partial=$venv/bootstrap.partial

build_core_minutes=16  # llama.cpp with all its CPU kernels, measured: 8 minutes on 2 cores
build_flags='-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON -DLLAVA_BUILD=OFF'

usage() {
    cat <<'END'
Usage: deploy/bootstrap.sh up [options of numaserve up]
       deploy/bootstrap.sh test [options of pytest]

up    prepare this checkout, then start the server: deploy/bootstrap.sh up --virtual-nodes 2
test  prepare this checkout with the test tools, then run linters, type checks and all tests

To prepare means: install missing system packages (with apt-get; sudo is used only when one is
missing), make .venv, install the Python packages. llama.cpp is compiled once, which takes
minutes; later calls find everything in place. It runs again when pyproject.toml, the checkout's
place or Python changes.

Environment: CMAKE_ARGS replaces the flags llama.cpp is built with (remove .venv to build again),
CMAKE_BUILD_PARALLEL_LEVEL limits the cores used for it.

Exit codes: 1 the checkout could not be prepared, 2 wrong usage; otherwise those of numaserve up,
or of the tests.
END
}

# say LINE...
say() {
    printf 'bootstrap: %s\n' "$@" >&2
}

die() {
    say "$@"
    exit 1
}

main() {
    case ${1:-} in
        up | test) mode=$1 && shift ;;
        -h | --help | help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
    is_prepared || prepare
    "run_$mode" "$@"
}

# --- what there is -------------------------------------------------------------------------------

# What an environment depends on; empty when .venv holds no working Python.
key() {
    python_is=$("$venv/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)' \
        2>/dev/null) || return 0
    { printf '%s\n' "$venv" "$python_is" && cat "$root/pyproject.toml"; } | sha256sum
}

is_prepared() {
    [ -s "$stamp" ] && read -r stamped_mode stamped_key <"$stamp" || return 1
    [ "$stamped_mode" = test ] || [ "$stamped_mode" = "$mode" ] || return 1
    [ "$stamped_key" = "$(key)" ] && has_numactl && loads "$venv/bin/python" libnuma.so.1
}

has_numactl() {
    command -v numactl >/dev/null
}

# has_compiler NAME...: whether one of them is there.
has_compiler() {
    for compiler; do
        [ -n "$compiler" ] && command -v "$compiler" >/dev/null && return 0
    done
    return 1
}

# loads PYTHON LIBRARY: whether the dynamic linker finds it.
loads() {
    "$1" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$2" 2>/dev/null
}

# Sets python and version to the first interpreter that will do.
find_python() {
    seen=
    for python in python3 python3.13 python3.12 python3.11; do
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
            2>/dev/null) || continue
        case $version in
            3.[0-9] | 3.10) seen="$seen$python is $version; " ;;
            *) return 0 ;;
        esac
    done
    die "Python 3.11 or newer is needed: ${seen:-there is no python3; }install one as python3," \
        "python3.13, python3.12 or python3.11. Debian 12, Ubuntu 24.04 and later have it:" \
        "    apt-get install python3 python3-venv"
}

# The Debian names of what is missing, on one line.
missing_packages() {
    set --
    has_numactl || set -- "$@" numactl
    loads "$python" libnuma.so.1 || set -- "$@" libnuma1
    has_compiler "${CC:-}" cc gcc clang || set -- "$@" gcc
    has_compiler "${CXX:-}" c++ g++ clang++ || set -- "$@" g++
    loads "$python" libgomp.so.1 || set -- "$@" libgomp1
    "$python" -c 'import ensurepip, venv' 2>/dev/null || set -- "$@" "python$version-venv"
    echo "$*"
}

# --- system packages -----------------------------------------------------------------------------

install_packages() {
    missing=$(missing_packages)
    [ -n "$missing" ] || return 0
    command="apt-get install -y --no-install-recommends $missing"
    command -v apt-get >/dev/null || die "missing here, by their Debian names: $missing." \
        "There is no apt-get: install the same with this system's package manager, for example" \
        "    dnf install numactl numactl-libs gcc gcc-c++ libgomp" "and call again."
    as_root=$(root_command) || die "missing here: $missing." \
        "$(why_no_root). Run this as root, then call again:" "    $command"
    say "installing system packages: $missing${as_root:+ (with sudo)}"
    # A broken list of some other source must not stop us: what counts is the install.
    apt_get update || say "apt-get update failed; trying with the lists that are there"
    # shellcheck disable=SC2086  # package names, one word each
    apt_get install -y --no-install-recommends $missing ||
        die "apt-get failed, see above. This has to work, as root:" "    $command"
    missing=$(missing_packages)
    [ -z "$missing" ] || die "installed, and still not found: $missing"
}

# Prints what makes a command run as root; fails when nothing does.
root_command() {
    [ "$(id -u)" != 0 ] || return 0
    command -v sudo >/dev/null || return 1
    sudo -n true 2>/dev/null || [ -t 0 ] || return 1
    echo sudo
}

why_no_root() {
    if command -v sudo >/dev/null; then
        echo 'sudo would ask for a password, and nobody is there to type it'
    else
        echo 'There is no sudo here'
    fi
}

apt_get() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" >&2
}

# --- the environment -----------------------------------------------------------------------------

prepare() {
    find_python
    install_packages
    mkdir -p "$venv"
    [ -w "$venv" ] || die "$venv belongs to $(stat -c %U "$venv"): call as that user, or remove it"
    exec 9>"$venv/bootstrap.lock"
    if ! flock -n 9; then
        say "another call is preparing this checkout; waiting for it"
        flock 9
    fi
    is_prepared || build_environment
    exec 9>&-
}

build_environment() {
    rm -f "$stamp"
    is_usable_venv || make_venv
    : >"$partial"
    case $mode in
        up) requirement=. ;;
        test) requirement='.[test]' ;;
    esac
    say "installing Python packages into .venv, log in $log"
    pip_install -e "$requirement"
    if [ -z "${CMAKE_ARGS:-}" ] && ! has_every_kernel; then
        # pip keeps wheels by name and version only: this one was built with other flags.
        say "pip's cache has a llama-cpp-python for one kind of CPU only; building it for all"
        pip_install --force-reinstall --no-deps --no-cache-dir "llama-cpp-python==$(llama_version)"
    fi
    rm -f "$partial"
    printf '%s %s\n' "$mode" "$(key)" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

is_usable_venv() {
    [ ! -e "$partial" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null &&
        grep -qF -- "$venv" "$venv/bin/activate"  # a moved one has commands that start nothing
}

make_venv() {
    : >"$partial"
    find "$venv/" -mindepth 1 -maxdepth 1 ! -name 'bootstrap.*' -exec rm -rf {} +
    "$python" -m venv "$venv" >"$log" 2>&1 || die "$python -m venv failed: $(cat "$log")"
}

has_every_kernel() {
    [ -n "$(find "$venv/lib" -name 'libggml-cpu-*.so' -print -quit)" ]
}

llama_version() {
    "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("llama-cpp-python"))'
}

# pip_install ARGUMENT...: pip install, in a process group of its own so that it can be ended whole.
pip_install() {
    cd "$root"
    scratch=$(mktemp -d)  # pip cleans up its own only when it may end in peace
    TMPDIR=$scratch CMAKE_ARGS=${CMAKE_ARGS:-$build_flags} \
        CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} \
        setsid "$venv/bin/python" -m pip install --verbose --no-input --disable-pip-version-check \
        "$@" >"$log" 2>&1 </dev/null &
    pip=$!
    trap 'interrupted 130' INT
    trap 'interrupted 143' TERM HUP PIPE
    watch_pip
    status=0
    wait "$pip" || status=$?
    trap - INT TERM HUP PIPE
    rm -rf "$scratch"
    cd "$called_from"
    [ "$status" != 0 ] || return 0
    # pip leaves an environment as it found it, unless it was killed.
    [ "$status" -gt 2 ] || rm -f "$partial"
    tail -n 30 "$log" >&2
    die "pip failed (exit code $status); the end of its log is above, all of it in $log"
}

interrupted() {
    kill -TERM "-$pip" 2>/dev/null || true  # dash's kill knows no --
    wait "$pip" 2>/dev/null || true
    rm -rf "$scratch"
    say "interrupted; the next call begins again" || true
    exit "$1"
}

# Says how far pip is until it ends: a live line on a terminal, else a line every half minute.
watch_pip() {
    began=$(date +%s)
    next_line_s=30
    told=
    while kill -0 "$pip" 2>/dev/null; do
        if [ -z "$told" ] && grep -q 'Running command Building wheel for llama' "$log"; then
            told=yes
            cores=$(nproc)
            minutes=$((build_core_minutes / cores + 1))
            say "building llama.cpp on $cores cores, about $minutes minutes, log in $log"
        fi
        spent_s=$(($(date +%s) - began))
        line=$(printf '%d:%02d  %s' "$((spent_s / 60))" "$((spent_s % 60))" "$(stage)")
        if [ -t 2 ]; then
            printf '\r\033[K  %s' "$line" >&2
        elif [ "$spent_s" -ge "$next_line_s" ]; then
            say "$line"
            next_line_s=$((spent_s + 30))
        fi
        sleep 0.2
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
}

# What the log says last: the compiler's progress, or what pip is doing.
stage() {
    tail -n 400 "$log" | sed -n \
        -e 's/^ *\[\([0-9]*\)\/\([0-9]*\)\] .*/compiling llama.cpp: \1 of \2 files/p' \
        -e 's/^ *\(Collecting [^ ]*\).*/\1/p' \
        -e 's/^ *\(Installing build dependencies\).*/\1/p' \
        -e 's/^ *\(Installing collected packages\).*/\1/p' | tail -n 1
}

# --- the two commands ----------------------------------------------------------------------------

run_up() {
    exec "$venv/bin/numaserve" up "$@"
}

# Everything runs, so that one call tells all that is wrong; pytest has the last word.
run_test() {
    cd "$root"
    PATH=$venv/bin:$PATH
    export PATH
    failed=
    check ruff check
    check ruff format --check
    check mypy gateway replica tests
    check lint-imports
    [ -z "$failed" ] || say "failed:$failed (see above). The tests run all the same"
    status=0
    pytest "$@" || status=$?
    [ "$status" != 0 ] || [ -z "$failed" ] || status=1
    exit "$status"
}

check() {
    "$@" || failed="$failed '$*'"
}

main "$@"
