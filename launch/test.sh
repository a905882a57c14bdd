#!/usr/bin/env bash
# The test-suite:  bash launch/test.sh [pytest arguments]
#
#   bash launch/test.sh                       everything
#   bash launch/test.sh tests/parity -k sp    some of it
#
# Makes .venv first where it is missing or out of date (launch/setup.sh). No GPU is needed.
# One pytest process: tests of several ranks keep the cores busy by themselves, and some hold measured times to
# predicted ones, which a second process would spoil.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/setup.sh" all
cd "$root"
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest "$@"
