#!/usr/bin/env bash
# From nothing to a trained model:  bash launch/quickstart.sh [overrides...]
#
# Installs into .venv, trains a tokenizer on the sources of Python's standard library, writes them
# as token files, trains a small mixture of experts on 16 processes of this machine with tp, cp, pp,
# dp and ep at once (conf/experiment/quickstart.yaml), and shows the result. Takes a few minutes on
# two cores. Tokenizer and data are kept in runs/quickstart/data; each call trains a new model in
# runs/quickstart/run-<n>.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
start=$SECONDS
bash launch/setup.sh run
python=.venv/bin/python
data=runs/quickstart/data
corpus=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
excluded=(test tests idle_test site-packages dist-packages __pycache__)
files=(--input "$corpus" --glob '*.py' --exclude "${excluded[@]}")

if [ ! -s $data/tokenizer.model ]; then
    echo "== a tokenizer, from $corpus"
    "$python" tools/tokenizer.py train "${files[@]}" --vocab-size 512 --out $data/tokenizer
fi
if [ ! -s $data/stdlib_train.idx ]; then
    echo "== token files"
    "$python" tools/preprocess.py "${files[@]}" --tokenizer $data/tokenizer.model --append-eod \
        --valid-fraction 0.05 --out $data/stdlib
fi

number=1
until error=$(mkdir runs/quickstart/run-$number 2>&1); do
    # if the folder does not exist, the next one could not be made either
    [ -e runs/quickstart/run-$number ] || { echo "quickstart: $error" >&2; exit 1; }
    number=$((number + 1))
done
run=runs/quickstart/run-$number
echo "== training on 16 processes, in $run"
bash launch/local.sh 16 experiment=quickstart log.dir=$run "$@"

echo "== the result"
"$python" tools/visualize.py loss $run --out $run/loss.png
"$python" tools/visualize.py report $run --out $run/report.html
echo "== a sample"
"$python" tools/generate.py --checkpoint $run/checkpoints --prompt 'def ' --max-tokens 100 \
    --temperature 0.7
cat <<DONE
== $run, after $((SECONDS - start)) s
   config.yaml    the complete configuration
   metrics.jsonl  one JSON object per step
   loss.png       the loss curve
   report.html    the run on one page: layout, communication, ranks, memory, pipeline, curves
   checkpoints/   resume: bash launch/local.sh 16 experiment=quickstart log.dir=$run train.steps=300
   wandb/         an offline W&B run: wandb sync $run/wandb/offline-run-*
DONE
