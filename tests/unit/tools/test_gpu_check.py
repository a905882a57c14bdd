"""launch/gpu_check.sh without a GPU: what it keeps, its order, and the programs that it ends."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron5d.tools import gpu_check
from megatron5d.tools.bench import BENCHMARKS, compare, layouts
from megatron5d.tools.bench.processes import NOT_REACHED, finish_program, start_program
from megatron5d.tools.gpu_check import Results, sanitizer_errors, start_sanitizers

FIGURES = {"ms": 2.0, "rate": 500.0, "unit": "TFLOP/s", "peak_bytes": 2**20}
WRONG = {"difference": 0.5, "right": False}


def test_both_files_are_complete_after_every_result(tmp_path):
    results = Results(tmp_path / "out")
    sections = set()
    for section, name, figures in [
        ("device", "facts", {"device": "a GPU", "capability": 90}),
        ("addmm", "big", {"in place": True, "difference": 1e-3}),
        ("reference", "row", {"ours": {"difference": 1e-3, "right": True}}),
        ("benchmarks", "row", {"ours": FIGURES}),
        ("benchmarks", "row", {"ours, by cudnn": FIGURES | {"ms": 1.0}}),
        ("training", "1b, bf16", {"layers": 16, "ours": {"mfu": 0.5}}),
        ("tuning", "swiglu", {"said": "a\nb | c"}),
    ]:
        results.add(section, name, figures)
        sections.add(section)
        written = json.loads((results.folder / "gpu_check.json").read_text())
        text = (results.folder / "gpu_check.md").read_text()
        assert written.keys() == sections
        assert text.count("\n## ") == len(sections) and name in text
    assert "| row | ours, by cudnn | 1.000 ms, 500 TFLOP/s, 1 MiB, ours is 0.50 x |" in text
    assert "said a / b / c" in text and "| row | ours | right, differs by 1.0e-03 |" in text
    assert not list(results.folder.glob("*.part"))


@pytest.mark.parametrize(
    ("section", "figures"),
    [
        ("reference", {"ours": WRONG}),
        ("addmm", {"in place": False}),
        ("losses", WRONG | {"kernels": [5.0], "plain": [5.5]}),
        ("layouts", WRONG),
        ("sanitizer", {"errors": 3}),
    ],
)
def test_a_wrong_result_is_noticed(section, figures, tmp_path):
    results = Results(tmp_path)
    right = {"ours": {"difference": 0.0, "right": True}, "ours, by fa4": {"unavailable": "x"}}
    results.add("reference", "good", right)
    assert results.all_right()
    results.add(section, "row", figures)
    assert not results.all_right()


def test_the_order_is_by_importance():
    rows = gpu_check.by_importance(list(BENCHMARKS))
    assert sorted(rows) == sorted(BENCHMARKS)
    assert rows[0].startswith("attention forward, causal, d 128")
    assert "4 heads over 1" in "".join(rows[:6])
    ordered = ("grouped GEMM, 64 experts", "RMSNorm forward 16384x4096", "GELU forward 8192x14336")
    assert [row for row in rows if row in ordered] == [*ordered]


def test_a_program_is_killed_with_its_children(tmp_path):
    mark = tmp_path / "started"
    # a child that lives keeps the output open, for longer than pytest's time limit
    child = ["sh", "-c", f"touch {mark}; exec sleep 600"]
    parent = f"import subprocess; print('begun', flush=True); subprocess.run({child})"
    program = start_program([sys.executable, "-c", parent])
    while not mark.exists():
        time.sleep(0.05)
    assert finish_program(program, time.monotonic()) == (None, "begun")
    assert finish_program(start_program(["sleep", "9"]), time.monotonic() - 1) == (None, "")
    printing = start_program([sys.executable, "-c", "print('a\\n\\nb'); raise SystemExit(3)"])
    assert finish_program(printing, time.monotonic() + 60) == (3, "b")


@pytest.mark.parametrize(
    ("summary", "figures"),
    [
        ("========= ERROR SUMMARY: 0 errors", {"errors": 0}),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", {"errors": 2}),
        ("no device", {"unavailable": "no device"}),
    ],
)
def test_errors_of_the_sanitizer_are_counted(summary, figures, tmp_path, monkeypatch):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\n[ "$1 $5 $6" = "--tool --run row" ] && echo "{summary}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    sanitizers = start_sanitizers(["row"])
    assert list(sanitizers) == ["memcheck: row", "racecheck: row"]
    for sanitizer in sanitizers.values():
        assert sanitizer_errors(sanitizer, time.monotonic() + 60) == figures
    program.unlink()
    assert start_sanitizers(["row"]) == {}


def test_every_variant_of_a_step_is_measured_and_the_peer_once(tmp_path, monkeypatch):
    commands = []

    def finish(command, deadline, lines=1):
        commands.append(command)
        if "8b" not in command:
            rows = {"rows": {"1b": {"ours": {"mfu": 0.5}}}}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(rows))
        return 1, "no memory"

    monkeypatch.setattr(gpu_check, "start_program", lambda command: command)
    monkeypatch.setattr(gpu_check, "finish_program", finish)
    results = Results(tmp_path)
    gpu_check.measure_training(results, time.monotonic() + 60)
    assert results.sections["training"] == {
        f"{case}, {dtype}, graphs {graph}": row
        for case, row in (("1b", {"ours": {"mfu": 0.5}}), ("8b", {"unavailable": "no memory"}))
        for dtype in ("bf16", "FP8")
        for graph in ("none", "phases")
    }
    # in bfloat16, of each model
    assert sum("--only" not in command for command in commands) == 2
    assert sum("precision.fp8=blockwise" in command for command in commands) == 4


def test_tasks_that_are_not_reached_share_a_line(tmp_path):
    results = Results(tmp_path)
    reports = {
        "addmm: a": {"in place": True},
        "reference: b": "died",
        "reference: c": NOT_REACHED,
        "reference: d": NOT_REACHED,
    }
    results.add_all(iter(reports.items()))
    assert results.sections["reference"] == {
        "b": {"unavailable": "died"},
        "not reached": {"rows": "c; d"},
    }


def test_differences():
    x = torch.randn(8, 8)
    assert compare.difference([x], [x]) == 0
    assert compare.difference([x * 1.1], [x]) == pytest.approx(0.1, rel=1e-3)
    assert compare.difference([x, x * torch.nan], [x, x]) == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would check this GPU")
def test_it_needs_a_gpu():
    command = ["bash", "launch/gpu_check.sh"]
    root = Path(__file__).parents[3]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and "torch finds none" in run.stderr


def test_losses_are_compared_with_the_plain_path(monkeypatch):
    pytest.importorskip("hydra")
    monkeypatch.setitem(compare.LOSSES, "small", "model=tiny train.seq_len=32 train.mbs=1")
    figures = compare.losses("small", "cpu")
    assert figures["right"] and figures["difference"] == 0
    assert figures["kernels"][-1] < figures["kernels"][0]
    assert gpu_check._in_words(figures).startswith("right, differs by 0.0e+00; kernels ")


@pytest.mark.slow
def test_several_ranks_are_compared_with_one(tmp_path, monkeypatch):
    """On the CPU, where ranks need no GPU to share."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(layouts, "DENSE", "model=tiny")
    small = "train.steps=2 train.gbs=2 train.seq_len=16 model.vocab_size=512"
    monkeypatch.setattr(layouts, "SMALL", small)
    dense = {
        "tp 2": (2, "parallel.tp=2"),
        "other": (1, "optim.lr=1.0"),
        "invalid": (2, "parallel.tp=3"),
    }
    monkeypatch.setattr(layouts, "LAYOUTS", {"dense": dense, "experts": {}})
    figures = dict(layouts.compared(tmp_path, time.monotonic() + 250))
    assert figures["dense, tp 2"]["right"] and figures["dense, other"]["right"] is False
    assert "[" in figures["dense, invalid"]["unavailable"], "the last line of the message"
    out_of_time = ("dense, one rank", {"unavailable": "out of time"})
    assert next(iter(layouts.compared(tmp_path, time.monotonic()))) == out_of_time
