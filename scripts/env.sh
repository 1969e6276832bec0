# Sourced: `source scripts/env.sh || exit 1`. Makes .venv with torch, megatron-core and this package, and puts it first in PATH.
# Nothing is done when .venv is up to date. Your pip settings (index, proxy, cache) are respected.
#   RRFP_PYTHON=/path/to/python3.12   use this interpreter to make .venv

RRFP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RRFP_PACKAGES=("torch==2.13.*" "megatron-core==0.19.2")
RRFP_DISK_GB=8 # a CUDA build of torch with its libraries

rrfp_say() { echo "[rrfp] $*" >&2; }

rrfp_find_python() {
    local candidate
    for candidate in ${RRFP_PYTHON:+"$RRFP_PYTHON"} python3.12 python3.13 python3 ~/.pyenv/versions/3.1[23]*/bin/python3; do
        # a pyenv shim may exist and yet not run, so ask it
        if "$candidate" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    rrfp_say "no Python 3.12 or 3.13 found: install one, or name it with RRFP_PYTHON=/path/to/python3.12"
    return 1
}

rrfp_install() { # $1: log file, the rest: arguments of pip install
    local log=$1
    shift
    if "$RRFP_ROOT/.venv/bin/python" -m pip install --disable-pip-version-check "$@" 2>&1 | tee -a "$log" |
        { grep --line-buffered -E '^ *(Collecting|Downloading|Installing|Obtaining|Successfully|ERROR)' >&2 || true; }
        [ "${PIPESTATUS[0]}" -eq 0 ]; then
        return 0
    elif grep -q "No space left on device" "$log"; then
        rrfp_say "the disk is full: torch and its libraries need about $RRFP_DISK_GB GB in $RRFP_ROOT/.venv, TMPDIR a part of it"
    elif grep -qE "ConnectionError|Temporary failure|is unreachable|Connection re|timed out|Proxy|versions: none" "$log"; then
        rrfp_say "the package index can't be reached, or lacks a package: check the network and pip's settings (pip config list)"
    else
        tail -n 5 "$log" >&2
        rrfp_say "pip install $* failed; the whole output is in $log"
    fi
    return 1
}

rrfp_setup() {
    local venv=$RRFP_ROOT/.venv python stamp free log
    stamp="$(cksum <"$RRFP_ROOT/setup.py") ${RRFP_PACKAGES[*]} $RRFP_ROOT"
    [ "$(cat "$venv/rrfp-stamp" 2>/dev/null)" = "$stamp" ] && return 0
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        python=$(rrfp_find_python) || return 1
        free=$(($(df -Pk "$RRFP_ROOT" | awk 'NR == 2 { print $4 }') / 1048576))
        if [ "$free" -lt "$RRFP_DISK_GB" ]; then
            rrfp_say "$RRFP_ROOT has $free GB left: torch and its libraries need about $RRFP_DISK_GB GB"
            return 1
        fi
        rrfp_say "making .venv with $python ($("$python" -V))"
        if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
            rm -rf "$venv"
            rrfp_say "$python can't make a virtual environment: it lacks venv or pip (Debian: apt-get install python3-venv)"
            return 1
        fi
    elif ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        rrfp_say ".venv has no pip: remove $venv and run this again"
        return 1
    fi
    log=$venv/rrfp-install.log
    : >"$log"
    rrfp_say "installing ${RRFP_PACKAGES[*]} and this package into .venv (once; about 3 GB to download, a minute or more)"
    # compat: a .pth entry, so that `import rrfp` works from the folder above a checkout named rrfp, too
    rrfp_install "$log" "${RRFP_PACKAGES[@]}" --config-settings editable_mode=compat -e "$RRFP_ROOT[test,plot,megatron]" || return 1
    rm -f "$venv/rrfp-stamp" # a copied .venv may share it by a hard link
    echo "$stamp" >"$venv/rrfp-stamp"
    rrfp_say "ready"
}

rrfp_setup || return 1
export PATH="$RRFP_ROOT/.venv/bin:$PATH"
