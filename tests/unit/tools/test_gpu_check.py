"""launch/gpu_check.sh without a GPU: what it keeps, in which order it goes, and what ends its
programs."""

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


def test_both_files_are_whole_after_every_result(tmp_path):
    results = Results(tmp_path / "out")
    steps = [
        ("device", "facts", {"device": "a GPU", "capability": 90}),
        ("addmm", "big", {"in place": True, "difference": 1e-3}),
        ("reference", "row", {"ours": {"difference": 1e-3, "right": True}}),
        ("benchmarks", "row", {"ours": FIGURES}),
        ("benchmarks", "row", {"ours, by cudnn": FIGURES | {"ms": 1.0}}),
        ("training", "1b, bf16", {"layers": 16, "ours": {"mfu": 0.5}}),
        ("tuning", "swiglu", {"said": "a\nb | c"}),
    ]
    for i, (section, name, figures) in enumerate(steps):
        results.add(section, name, figures)
        assert len(json.loads((results.folder / "gpu_check.json").read_text())) == len(
            {s for s, *_ in steps[: i + 1]}
        )
        text = (results.folder / "gpu_check.md").read_text()
        assert text.count("\n## ") == len({s for s, *_ in steps[: i + 1]}) and name in text
    assert "| row | ours, by cudnn | 1.000 ms, 500 TFLOP/s, 1 MiB, ours is 0.50 x |" in text
    assert "said a / b / c" in text and "| row | ours | right, differs by 1.0e-03 |" in text
    assert not list(results.folder.glob("*.part"))


@pytest.mark.parametrize(
    "section, figures",
    [
        ("reference", {"ours": {"difference": 0.5, "right": False}}),
        ("addmm", {"in place": False}),
        ("losses", {"difference": 0.5, "right": False, "kernels": [5.0], "plain": [5.5]}),
        ("layouts", {"difference": 0.5, "right": False}),
        ("sanitizer", {"errors": 3}),
    ],
)
def test_what_is_wrong_is_not_all_right(section, figures, tmp_path):
    results = Results(tmp_path)
    results.add(
        "reference",
        "sound",
        {"ours": {"difference": 0.0, "right": True}, "ours, by fa4": {"unavailable": "x"}},
    )
    assert results.all_right()
    results.add(section, "row", figures)
    assert not results.all_right()


def test_the_order_is_by_importance():
    rows = gpu_check.by_importance(list(BENCHMARKS))
    assert sorted(rows) == sorted(BENCHMARKS)
    assert rows[0].startswith("attention forward, causal, d 128") and "4 heads over 1" in "".join(
        rows[:6]
    )
    assert (
        rows.index("grouped GEMM, 64 experts")
        < rows.index("RMSNorm forward 16384x4096")
        < rows.index("GELU forward 8192x14336")
    )


def test_a_program_is_ended_with_its_children(tmp_path):
    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(mark)!r}).touch()"
    parent = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    code, said = finish_program(start_program([sys.executable, "-c", parent]), begin + 1.5)
    assert code is None and said == "begun" and time.monotonic() - begin < 4
    time.sleep(max(0.0, begin + 6 - time.monotonic()))
    assert not mark.exists()
    assert finish_program(start_program(["sleep", "9"]), time.monotonic() - 1) == (None, "")
    printing = [sys.executable, "-c", "print('a\\n\\nb'); raise SystemExit(3)"]
    assert finish_program(start_program(printing), time.monotonic() + 60) == (3, "b")


@pytest.mark.parametrize(
    "summary, found",
    [
        ("========= ERROR SUMMARY: 0 errors", {"errors": 0}),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", {"errors": 2}),
        ("no device", {"unavailable": "no device"}),
    ],
)
def test_the_sanitizer_is_sanitizer_errors(summary, found, tmp_path, monkeypatch):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\n[ "$1 $5 $6" = "--tool --run row" ] && echo "{summary}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    running = start_sanitizers(["row"])
    assert list(running) == ["memcheck: row", "racecheck: row"]
    assert all(sanitizer_errors(each, time.monotonic() + 60) == found for each in running.values())
    program.unlink()
    assert start_sanitizers(["row"]) == {}


def test_whole_steps_have_a_peer_once_and_every_variant(tmp_path, monkeypatch):
    commands = []

    def run(command, deadline, lines=1):
        commands.append(command)
        if "8b" not in command:
            Path(command[command.index("--json") + 1]).write_text(
                json.dumps({"rows": {"1b": {"ours": {"mfu": 0.5}}}})
            )
        return 1, "no memory"

    monkeypatch.setattr(gpu_check, "start_program", lambda command: command)
    monkeypatch.setattr(gpu_check, "finish_program", run)
    results = Results(tmp_path)
    gpu_check.measure_training(results, time.monotonic() + 60)
    found = results.sections["training"]
    assert len(found) == len(commands) >= 4 and {name.split(",")[0] for name in found} == {
        "1b",
        "8b",
    }
    assert sum("--only" not in command for command in commands) == 2, (
        "bfloat16 of each model, beside its peer"
    )
    assert all(
        ("ours" in row) if name.startswith("1b") else row == {"unavailable": "no memory"}
        for name, row in found.items()
    )
    assert any("precision.fp8=blockwise" in command for command in commands)


def test_what_is_not_reached_shares_a_line(tmp_path):
    results = Results(tmp_path)
    late = NOT_REACHED
    told = [
        ("addmm: a", {"in place": True}),
        ("reference: b", "died"),
        ("reference: c", late),
        ("reference: d", late),
    ]
    results.add_all(iter(told))
    assert results.sections["reference"] == {
        "b": {"unavailable": "died"},
        "not reached": {"rows": "c; d"},
    }


def test_differences():
    x = torch.randn(8, 8)
    assert compare.difference([x], [x]) == 0 and compare.difference(
        [x * 1.1], [x]
    ) == pytest.approx(0.1, rel=1e-3)
    assert compare.difference([x, x * torch.nan], [x, x]) == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would check this GPU")
def test_without_a_gpu_it_says_so():
    root = Path(__file__).parents[3]
    run = subprocess.run(
        ["bash", "launch/gpu_check.sh"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 2 and "torch finds none" in run.stderr


def test_losses_are_compared_with_the_plain_path(monkeypatch):
    pytest.importorskip("hydra")
    monkeypatch.setitem(compare.LOSSES, "small", ["model=tiny", "train.seq_len=32", "train.mbs=1"])
    found = compare.losses("small", "cpu")
    assert (
        found["right"] and found["difference"] == 0 and found["kernels"][-1] < found["kernels"][0]
    )
    assert gpu_check._in_words(found).startswith("right, differs by 0.0e+00; kernels ")


def test_several_ranks_are_compared_with_one(tmp_path, monkeypatch):
    """On the CPU, where ranks that share a GPU are ranks as ever."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(layouts, "DENSE", ["model=tiny"])
    monkeypatch.setattr(
        layouts,
        "SMALL",
        ["train.steps=2", "train.gbs=2", "train.seq_len=16", "model.vocab_size=512"],
    )
    tried = {
        "tp 2": (2, ["parallel.tp=2"]),
        "other": (1, ["optim.lr=1.0"]),
        "refused": (2, ["parallel.tp=3"]),
    }
    monkeypatch.setattr(layouts, "LAYOUTS", {"dense": tried, "experts": {}})
    found = dict(layouts.compared(tmp_path, time.monotonic() + 250))
    assert found["dense, tp 2"]["right"] and found["dense, other"]["right"] is False
    assert "[" in found["dense, refused"]["unavailable"], "the last line of the refusal"
    assert next(iter(layouts.compared(tmp_path, time.monotonic()))) == (
        "dense, one rank",
        {"unavailable": "out of time"},
    )
