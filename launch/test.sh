#!/usr/bin/env bash
# The test-suite:  bash launch/test.sh [pytest arguments]
#
#   bash launch/test.sh                       everything
#   bash launch/test.sh tests/parity -k sp    some of it
#
# Makes .venv first where it is missing or out of date (launch/setup.sh). No GPU is needed.
# A pytest process per core, and one more for while another waits: they share the tests out, and run those marked
# `alone` with nothing beside them (tests/conftest.py). `-n 0` among the arguments runs everything in one process.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/setup.sh" all
cd "$root"
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # several hundred processes would each compile the modules that they import
exec .venv/bin/python -m pytest --numprocesses $(($(env -u OMP_NUM_THREADS nproc) + 1)) --maxprocesses 8 --dist worksteal "$@"
