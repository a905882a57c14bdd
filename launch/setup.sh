#!/usr/bin/env bash
# Makes .venv and installs megatron5d into it:  bash launch/setup.sh [run|all]
#
#   run   the requirements of training     all   also those of data tools, tests and linters
#
# Versions are pinned in launch/constraints.txt. A second call returns at once unless the pins or
# pyproject.toml have changed. PYTHON=... selects the interpreter (3.10 or newer) that .venv is made
# from. No GPU is needed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
scope=${1:-run}
case $scope in
    run) extras="" ;;
    all) extras="[data,dev,docs,search]" ;;
    *) echo "setup: '$scope' is neither run nor all" >&2; exit 2 ;;
esac

inputs() { cat "$root/pyproject.toml" "$root/launch/constraints.txt" <(echo "$root"); }
stamp=$(inputs | sha256sum | cut -c1-16)
has_installed() { [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$stamp" ]; }
if has_installed "$scope" || has_installed all; then
    exit 0
fi

exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null; then flock 9; fi # concurrent set-ups would break each other

make_venv() {
    local python=${PYTHON:-python3} log
    local hint="set PYTHON=... to Python 3.10 or newer"
    command -v "$python" >/dev/null || { echo "setup: no $python; $hint" >&2; exit 1; }
    "$python" - "$hint" <<'CHECK'
import sys
if sys.version_info < (3, 10):
    sys.exit(f"setup: {sys.executable} is Python {sys.version.split()[0]}; {sys.argv[1]}")
CHECK
    echo "setup: making .venv with $("$python" --version)"
    if ! log=$("$python" -m venv "$venv" 2>&1); then
        echo "$log" >&2
        echo "setup: $python lacks the venv module (on Debian: apt install python3-venv)" >&2
        exit 1
    fi
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
compile() { # in the background on all cores; pip would compile everything on one core
    local site='import sysconfig; print(sysconfig.get_path("purelib"))'
    (cd "$("$venv/bin/python" -c "$site")"
        "$venv/bin/python" -m compileall -q -j 0 "$@" >/dev/null || true) &
}
pip --version >/dev/null 2>&1 || make_venv

start=$SECONDS
# an older pip takes half a minute longer to read long indices
pip install --no-compile "pip>=24.1" || true
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
cp "$root/launch/constraints.txt" "$pins"
echo "setup: installing torch ($(grep '^torch==' "$pins"))"
pip install --no-compile --constraint <(grep -v '^triton==' "$pins") torch
compile torch sympy
if "$venv/bin/python" -c "
from importlib.metadata import requires
raise SystemExit(not any(line.startswith('triton') for line in requires('torch')))"; then
    sed -i '/^triton==/d' "$pins" # a CUDA build of torch requires its own version
fi
echo "setup: installing megatron5d$extras and its requirements"
pip install --no-compile --constraint "$pins" --editable "$root$extras"
compile triton numpy omegaconf hydra yaml
if [ "$scope" = all ]; then
    # numba caches the compiled search on disk, so that no later search waits for it
    echo "setup: compiling the schedule search"
    search=("$root/tools/schedule.py" search --pp 2 --microbatches 2 --evaluations 1)
    "$venv/bin/python" "${search[@]}" >/dev/null
fi
wait
echo "$stamp" >"$venv/.installed-$scope"
echo "setup: done in $((SECONDS - start)) s"
