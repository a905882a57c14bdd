"""tools/bench_train.py on a CPU: both sides train the same tokens; the figures are consistent."""

import functools
import json
import math
import multiprocessing
import sys
import time

import pytest
import torch

from megatron5d.tools import bench_train
from megatron5d.tools.bench import training
from megatron5d.tools.bench.processes import run_tasks
from megatron5d.tools.bench.training import configured


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the tool on a CPU; returns the row of the tiny model in its file."""
    # forked processes know what a test has replaced
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(bench_train, "run_tasks", functools.partial(run_tasks, context=context))

    def run(options):
        file = tmp_path / "figures.json"
        command = f"bench_train.py --model tiny --device cpu --seq-len 32 --json {file} {options}"
        monkeypatch.setattr(sys, "argv", command.split())
        assert bench_train.main() == 0
        return json.loads(file.read_text())["rows"]["tiny"]

    return run


def test_ours_is_measured(bench, capsys):
    row = bench("--mbs 2 --steps 2 --only ours --set log.peak_tflops=0.001")["ours"]
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(64) and row["steps"] == 2
    flops = bench_train.flops_per_token(configured(["model=tiny"]).model, 32)
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / 1e9)
    assert f"{row['tokens_per_s']:,.0f} tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["tiny", "tiny_qwen3_moe"])
def test_the_peer_is_the_same_model(model):
    """It has as many parameters, and its first loss is near that of guessing."""
    config, device = configured([f"model={model}", "train.seq_len=32"]), torch.device("cpu")
    parameters = training.transformers_model(config, device).parameters()
    assert sum(p.numel() for p in parameters) == bench_train.parameter_count(config.model)
    step = training.transformers_step(config, device, compiled=False)
    guessing = math.log(config.model.vocab_size)
    assert step(next(training.token_rows(config))) == pytest.approx(guessing, rel=0.05)


def test_a_model_has_as_many_layers_as_the_device_holds():
    config = configured(bench_train.CASES["8b"].split())
    target = bench_train.Target("sm_90")

    def needed(layers: int) -> int:
        smaller = bench_train._with_layers(config, layers)
        return bench_train.Forecaster(smaller, 1, target).rank(0).needed

    available = 80 * 10**9
    layers = bench_train.fitted(config, available, target).model.num_layers
    assert needed(layers) <= bench_train.MEMORY_SHARE * available < needed(layers + 1)
    assert bench_train.fitted(config, 10**12, target) == config
    assert bench_train.fitted(config, 0, target).model.num_layers == 1


def test_a_side_that_breaks_leaves_the_other_s_figures(bench, monkeypatch, capfd):
    def broken(config, device):
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setitem(bench_train.PROVIDERS, "transformers + compile", broken)
    row = bench("--mbs 2 --steps 1")
    assert row["transformers + compile"] == {"ended": "RuntimeError: no kernel"}
    assert row["ours"]["tokens_per_s"] > 0
    assert "for this device" in capfd.readouterr().err


def test_steps_so_far_count_and_sides_without_time_are_named(bench, monkeypatch, capsys):
    def slows_down(config, device):
        # three of warm-up, a timed one, and another that never ends
        losses = iter((4.0, 3.0, 2.0, 1.0))
        return lambda rows: next(losses, None) or time.sleep(60)

    monkeypatch.setitem(bench_train.PROVIDERS, "ours", slows_down)
    row = bench("--minutes 0.05")
    steps = {"steps": 1, "first_loss": 4.0, "last_loss": 1.0, "ended": "out of time"}
    assert steps.items() <= row["ours"].items()
    assert row["transformers + compile"] == {"ended": "not reached: out of time"}
    assert "after 1 steps: out of time" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured(bench, monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        yield None, {"device": "a GPU", "torch": "2"}
        yield "tiny: ours", {"layers": 2, "ours": {"ended": "ImportError: x"}}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_train, "run_tasks", interrupted)
    with pytest.raises(SystemExit, match="130"):
        bench("")
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert rows == {"tiny": {"layers": 2, "ours": {"ended": "ImportError: x"}}}
    assert "ImportError: x" in capsys.readouterr().out


def test_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_train.py", "1b"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_train.main() == 2
    assert "--device cpu" in capsys.readouterr().err


def test_an_invalid_override_is_rejected(bench, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench("--set parallel.tp=2")
    assert "parallel.tp" in capsys.readouterr().err
