"""`plugins=[FILE.py]`: an attention, an activation and a schedule that the repository does not have,
in a run, in tools, and on resume."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from guide_examples import ROOT, example
from runs import write_corpus

MODEL = ["model.attention=differential", "model.activation=squared_relu", "precision.dtype=fp64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    for name in ("attention", "activation", "schedule"):
        (folder / f"{name}.py").write_text(example(name))
    write_corpus(folder / "corpus", vocab_size=256)
    return folder


PLUGINS = "plugins=[attention.py,activation.py,schedule.py]"


def run(folder: Path, program: str, *words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / program), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_every_dimension_gives_the_numbers_of_one_process(folder):
    layout = ["parallel.tp=2", "parallel.sp=true", "parallel.cp=2", "parallel.pp=2"]
    words = [PLUGINS, *MODEL, *layout, "pipeline.schedule=one_at_a_time"]
    verdict = run(folder, "tools/parity.py", "--world", "8", "--json", *words)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert json.loads(verdict.stdout)["verdict"] == "equal"


def test_the_planner_and_the_report_read_it(folder):
    words = ["--world", "8", PLUGINS, *MODEL[:2], "parallel.tp=2", "parallel.cp=2"]
    memory = run(folder, "tools/plan.py", "memory", *words)
    assert "activations/DifferentialAttention" in memory.stdout, memory.stderr
    report = run(folder, "tools/visualize.py", "report", *words, "-o", "report.html")
    assert report.returncode == 0, report.stderr
    assert '"name":"weights"' in (folder / "report.html").read_text()


def test_a_run_records_its_plugins_and_is_not_resumed_without_them(folder):
    words = [*MODEL, "data.train=[corpus]", "train.gbs=2", "train.seq_len=32", "log.dir=r"]
    first = run(folder, "pretrain.py", PLUGINS, "train.steps=2", *words)
    assert first.returncode == 0, first.stderr
    assert (folder / "r/code/attention.py").read_text() == example("attention")
    again = run(folder, "pretrain.py", PLUGINS, "train.steps=3", *words)
    assert "resumed at step 2" in again.stdout + again.stderr
    bare = ["data.train=[corpus]", "train.gbs=2", "train.seq_len=32", "log.dir=r"]
    refused = run(folder, "pretrain.py", "train.steps=4", *bare)
    assert refused.returncode == 2
    assert "activation.py, attention.py, schedule.py" in refused.stderr


@pytest.mark.parametrize(
    ("source", "reason"),
    [(None, "there is no broken.py"), ("1/0", "broken.py cannot be loaded: ZeroDivisionError")],
)
def test_a_file_that_cannot_be_run_is_the_only_fault(folder, source, reason):
    (folder / "broken.py").unlink(missing_ok=True)
    if source is not None:
        (folder / "broken.py").write_text(source)
    words = ["plugins=[broken.py]", "model.attention=new", "data.train=[corpus]"]
    refused = run(folder, "pretrain.py", *words)
    assert refused.returncode == 2
    assert "1 fault" in refused.stderr and reason in refused.stderr
