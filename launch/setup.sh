#!/usr/bin/env bash
# Makes .venv and installs megatron5d into it:  bash launch/setup.sh [run|all]
#
#   run   what training needs            all   and what the data tools, the test-suite and the linters need
#
# Pins are in launch/constraints.txt. Done again it takes no time unless the pins or pyproject.toml have changed.
# PYTHON=... chooses the interpreter (3.10 or newer) that .venv is made from. A GPU is not needed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
what=${1:-run}
case $what in
    run) extras="" ;;
    all) extras="[data,dev,docs,search]" ;;
    *) echo "setup: '$what' is neither run nor all" >&2; exit 2 ;;
esac

stamp=$(cat "$root/pyproject.toml" "$root/launch/constraints.txt" <(echo "$root") | sha256sum | cut -c1-16)
have() { [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$stamp" ]; }
if have "$what" || have all; then
    exit 0
fi

exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null; then flock 9; fi # two set-ups at once would break each other

make_venv() {
    local python=${PYTHON:-python3} log
    command -v "$python" >/dev/null || { echo "setup: no $python; set PYTHON=... to Python 3.10 or newer" >&2; exit 1; }
    "$python" - <<'CHECK'
import sys
if sys.version_info < (3, 10):
    sys.exit(f"setup: {sys.executable} is Python {sys.version.split()[0]}; set PYTHON=... to Python 3.10 or newer")
CHECK
    echo "setup: making .venv with $("$python" --version)"
    if ! log=$("$python" -m venv "$venv" 2>&1); then
        echo "$log" >&2
        echo "setup: $python cannot make virtual environments (on Debian: apt install python3-venv)" >&2
        exit 1
    fi
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
compile() { # while pip, told not to, installs: it would compile on one core, and what nobody imports as well
    (cd "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        "$venv/bin/python" -m compileall -q -j 0 "$@" >/dev/null || true) &
}
pip --version >/dev/null 2>&1 || make_venv

began=$SECONDS
pip install --no-compile "pip>=24.1" || true # an older one takes half a minute more to read long indices
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
cp "$root/launch/constraints.txt" "$pins"
echo "setup: installing torch ($(grep '^torch==' "$pins"))"
pip install --no-compile --constraint <(grep -v '^triton==' "$pins") torch
compile torch sympy
if "$venv/bin/python" -c "
from importlib.metadata import requires
raise SystemExit(not any(line.startswith('triton') for line in requires('torch')))"; then
    sed -i '/^triton==/d' "$pins" # a CUDA build of torch insists on its own
fi
echo "setup: installing megatron5d$extras and what it needs"
pip install --no-compile --constraint "$pins" --editable "$root$extras"
compile triton numpy omegaconf hydra yaml
if [ "$what" = all ]; then
    echo "setup: compiling the search for schedules" # numba keeps it on disk, and no later search waits for it
    "$venv/bin/python" "$root/tools/schedule.py" search --pp 2 --microbatches 2 --evaluations 1 >/dev/null
fi
wait
echo "$stamp" >"$venv/.installed-$what"
echo "setup: done in $((SECONDS - began)) s"
