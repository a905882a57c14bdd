#!/usr/bin/env bash
# The first minutes on a new GPU: what is right on it, how fast, beside what; see docs/kernels.md. Needs torch and Triton.
#   bash launch/gpu_check.sh [--minutes 9] [--out runs/gpu_check] [--write]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
exec "$python" tools/gpu_check.py "$@"
