#!/usr/bin/env bash
# The test suite:  bash launch/test.sh [--all | --nightly] [pytest arguments]
#
#   bash launch/test.sh                       a sample of every package, in minutes
#   bash launch/test.sh --all                 all tests that do not depend on the machine's speed
#   bash launch/test.sh --nightly             also comparisons of times and full products of cases
#   bash launch/test.sh tests/parity -k sp    the tests that pytest's arguments select
#
# Makes .venv first where it is missing or out of date (launch/setup.sh). No GPU is needed.
# Starts one pytest worker per core plus one, because workers often wait; `-n 0` runs all tests in
# one process. More in docs/testing.md.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tier=sample
case ${1:-} in
    --all | --nightly) tier=${1#--} && shift ;;
    ?*) tier=all ;;
esac
bash "$root/launch/setup.sh" all
cd "$root"
export OMP_NUM_THREADS=1 MEGATRON5D_TESTS=${MEGATRON5D_TESTS:-$tier}
# otherwise several hundred processes would each compile the modules that they import
unset PYTHONDONTWRITEBYTECODE
workers=$(($(env -u OMP_NUM_THREADS nproc) + 1))
exec .venv/bin/python -m pytest --numprocesses "$workers" --maxprocesses 8 --dist worksteal "$@"
