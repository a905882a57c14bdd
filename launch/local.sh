#!/usr/bin/env bash
# Trains on this machine:  bash launch/local.sh N [--torchrun] [overrides...]
#
#   bash launch/local.sh 16 experiment=quickstart         16 ranks, on GPUs where there are as many, else on CPUs
#   bash launch/local.sh 4 --torchrun parallel.tp=2       the same through torchrun (whose exit code is 0 or 1)
#
# Ends with the exit code of the rank that failed first: 0 finished, 2 configuration refused, 75 stopped on a signal
# with a checkpoint saved. SIGTERM, SIGINT and SIGUSR1 reach every rank. PYTHON=... and PROGRAM=... choose
# another interpreter and another program than pretrain.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if [ -n "${PYTHON:-}" ]; then
    command -v "$python" >/dev/null || { echo "launch: PYTHON=$PYTHON is no interpreter that can be run" >&2; exit 2; }
else
    [ -x "$python" ] || python=$(command -v python3)
fi
program=${PROGRAM:-$root/pretrain.py}

if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
ranks=$1
shift

gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c . || true # CUDA stops at an index below 0
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

found=$(gpus)
if [ "$found" -gt 0 ] && [ "$found" -lt "$ranks" ]; then
    echo "launch: $ranks ranks but $found GPU(s): running on CPUs" >&2
    export CUDA_VISIBLE_DEVICES=
    found=0
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ "${1:-}" = --torchrun ]; then
    shift
    # it passes USR1 on only where told to, and kills ranks after 30 s, which a last checkpoint may well take
    export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
    export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-600}
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$ranks" "$program" "$@"
elif [ "$found" -gt 0 ]; then
    exec "$python" "$root/launch/fork.py" --spawn --program "$program" "$ranks" "$@"
else
    exec "$python" "$root/launch/fork.py" --program "$program" "$ranks" "$@"
fi
