#!/usr/bin/env bash
# Checks and measures the kernels on a new GPU (docs/kernels.md). Requires torch and Triton.
#   bash launch/gpu_check.sh [--minutes 9] [--out runs/gpu_check] [--write]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
exec "$python" tools/gpu_check.py "$@"
