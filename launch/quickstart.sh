#!/usr/bin/env bash
# From nothing to a trained model:  bash launch/quickstart.sh [overrides...]
#
# Installs into .venv, trains a tokenizer on the sources of Python's standard library, writes them as token files, trains
# a small mixture of experts over 16 processes on this machine, tp, cp, pp, dp and ep at once
# (conf/experiment/quickstart.yaml), and shows what came out. A few minutes on two cores. Tokenizer and data are kept in
# runs/quickstart/data; each call trains anew, in runs/quickstart/run-<n>.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
began=$SECONDS
bash launch/setup.sh run
python=.venv/bin/python
data=runs/quickstart/data
corpus=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
files=(--input "$corpus" --glob '*.py' --exclude test tests idle_test site-packages dist-packages __pycache__)

if [ ! -s $data/tokenizer.model ]; then
    echo "== a tokenizer, from $corpus"
    "$python" tools/tokenizer.py train "${files[@]}" --vocab-size 512 --out $data/tokenizer
fi
if [ ! -s $data/stdlib_train.idx ]; then
    echo "== token files"
    "$python" tools/preprocess.py "${files[@]}" --tokenizer $data/tokenizer.model --append-eod --valid-fraction 0.05 --out $data/stdlib
fi

number=1
until said=$(mkdir runs/quickstart/run-$number 2>&1); do
    [ -e runs/quickstart/run-$number ] || { echo "quickstart: $said" >&2; exit 1; } # nor could the next one be made
    number=$((number + 1))
done
run=runs/quickstart/run-$number
echo "== training on 16 processes, in $run"
bash launch/local.sh 16 experiment=quickstart log.dir=$run "$@"

echo "== the result"
"$python" tools/visualize.py loss $run --out $run/loss.png
"$python" tools/visualize.py report $run --out $run/report.html
echo "== a sample"
"$python" tools/generate.py --checkpoint $run/checkpoints --prompt 'def ' --max-tokens 100 --temperature 0.7
cat <<DONE
== $run, after $((SECONDS - began)) s
   config.yaml       the whole configuration
   metrics.jsonl     one JSON object a step
   loss.png          the loss curve
   report.html       the run on one page: what each dimension cuts and sends, ranks, memory, pipeline, curves
   checkpoints/      resume: bash launch/local.sh 16 experiment=quickstart log.dir=$run train.steps=300
   wandb/            an offline W&B run: wandb sync $run/wandb/offline-run-*
DONE
