#!/usr/bin/env bash
# Installs the project into .venv from any state of the machine: no uv, no Python 3.12, no Mesa. Run it by `make setup`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv BOOTSTRAP=.bootstrap PYTHON_VERSION=3.12
readonly MESA_PACKAGES=(libegl1 libgl1 libgles2 libegl-mesa0 libgl1-mesa-dri)

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# A candidate counts only if it really runs: a pyenv shim may exist without the version behind it.
runs_uv() { [[ -n "$1" ]] && "$1" --version >/dev/null 2>&1; }
runs_python() {
    [[ -n "$1" ]] && "$1" -c "
import sys, ssl, ctypes, bz2, lzma, sqlite3
sys.exit('$PYTHON_VERSION' != '%d.%d' % sys.version_info[:2])" >/dev/null 2>&1
}

install_uv() {
    local python
    for python in python3 /usr/bin/python3 "$@"; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || continue
        # A folder of its own, never the system's packages: works where these are externally managed (PEP 668).
        if "$python" -m venv "$BOOTSTRAP" >/dev/null 2>&1 && "$BOOTSTRAP/bin/python" -m pip install --quiet uv >&2; then
            echo "$PWD/$BOOTSTRAP/bin/uv" && return
        fi
        rm -rf "$BOOTSTRAP"
        if "$python" -m pip install --quiet --target "$BOOTSTRAP" uv >&2; then
            echo "$PWD/$BOOTSTRAP/bin/uv" && return
        fi
    done
    return 1
}

find_uv() {
    local candidate
    for candidate in "${UV:-}" "$(type -P uv || true)" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" "$PWD/$BOOTSTRAP/bin/uv"; do
        runs_uv "$candidate" && echo "$candidate" && return
    done
    say "no uv on this machine, installing one into $BOOTSTRAP"
    install_uv "$@"
}

python_candidates() {
    type -P -a "python$PYTHON_VERSION" python3 || true
    local root
    local -a roots=("${PYENV_ROOT:-}" "$(pyenv root 2>/dev/null || true)" "$HOME/.pyenv")
    # With another HOME and no PYENV_ROOT, pyenv does not know its own versions; its shims on PATH lie beside them.
    while read -r root; do roots+=("${root%/shims/*}"); done < <(type -P -a python3 python | grep /shims/ || true)
    for root in "${roots[@]}"; do
        [[ -n "$root" ]] && compgen -G "$root/versions/$PYTHON_VERSION*/bin/python" | sort -rV || true
    done
}

find_python() {
    local candidate
    while read -r candidate; do
        runs_python "$candidate" && echo "$candidate" && return
    done < <(python_candidates)
    return 1
}

make_environment() {
    runs_python "$VENV/bin/python" && return
    if [[ -n "$1" ]]; then
        say "Python: $1"
        "$UV" venv --quiet --clear --python "$1" "$VENV"
    else
        say "no Python $PYTHON_VERSION on this machine, uv looks for one or downloads it"
        "$UV" venv --quiet --clear --python "$PYTHON_VERSION" "$VENV"
    fi
}

as_root() {
    if [[ $EUID -eq 0 ]]; then "$@"; else sudo -n "$@"; fi
}

ensure_rendering() {
    "$VENV/bin/python" scripts/probe_rendering.py && return
    local advice="apt-get update && apt-get install -y --no-install-recommends ${MESA_PACKAGES[*]}"
    say "neither EGL nor OSMesa can draw a picture, installing Mesa"
    if ! type -P apt-get >/dev/null || ! as_root true 2>/dev/null; then
        fail "expected software OpenGL, found none and may not install it. Run as root: $advice"
    fi
    as_root apt-get update -qq || say "apt-get update failed, trying with the lists at hand"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${MESA_PACKAGES[@]}" >&2 ||
        fail "installing Mesa failed. Run as root: $advice"
    "$VENV/bin/python" scripts/probe_rendering.py || fail "Mesa is installed, and still neither EGL nor OSMesa can draw a picture"
}

main() {
    export HOME="${HOME:-$PWD/$BOOTSTRAP/home}"
    # uv brings certificates of its own; a network with its own root is known to the system's only.
    [[ ! -s /etc/ssl/certs/ca-certificates.crt ]] || export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
    local python
    python="$(find_python || true)"
    UV="$(find_uv "$python")" || fail "expected uv or a Python with pip, found neither. Install one: apt-get install python3-venv"
    say "uv: $("$UV" --version)"
    make_environment "$python"
    say "installing the packages of constraints.txt (a few GB the first time)"
    "$UV" pip install --quiet --python "$VENV/bin/python" --constraints constraints.txt --overrides overrides.txt --editable '.[dev]'
    ensure_rendering
    say "done"
}

main
