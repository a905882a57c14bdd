#!/usr/bin/env bash
# Trains on this machine:  bash launch/local.sh N [--torchrun] [overrides...]
#
#   bash launch/local.sh 16 experiment=quickstart     16 ranks, on as many GPUs, else on CPUs
#   bash launch/local.sh 4 --torchrun parallel.tp=2   through torchrun (whose exit code is 0 or 1)
#
# The exit code is that of the rank that failed first: 0 finished, 2 configuration refused, 75
# stopped on a signal with a checkpoint saved. SIGTERM, SIGINT and SIGUSR1 reach every rank.
# PYTHON=... selects another interpreter, PROGRAM=... another program than pretrain.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if [ -n "${PYTHON:-}" ]; then
    if ! command -v "$python" >/dev/null; then
        echo "launch: PYTHON=$PYTHON is no executable interpreter" >&2
        exit 2
    fi
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

count_gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        # CUDA ignores all entries from a negative index on
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c . || true
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

gpus=$(count_gpus)
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt "$ranks" ]; then
    echo "launch: $ranks ranks but $gpus GPU(s): running on CPUs" >&2
    export CUDA_VISIBLE_DEVICES=
    gpus=0
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ "${1:-}" = --torchrun ]; then
    shift
    # by default torchrun does not forward USR1, and it kills ranks after 30 s, which is too short
    # for a last checkpoint
    export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
    export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-600}
    run=("$python" -m torch.distributed.run --standalone --nproc-per-node="$ranks")
    exec "${run[@]}" "$program" "$@"
fi
options=(--program "$program")
[ "$gpus" = 0 ] || options+=(--spawn)
exec "$python" "$root/launch/fork.py" "${options[@]}" "$ranks" "$@"
