"""tools/bench_train.py on a CPU: both sides train the same tokens, and the figures belong
together."""

import functools
import json
import math
import multiprocessing
import time

import pytest
import torch

from megatron5d.tools import bench_train
from megatron5d.tools.bench.processes import run_tasks


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Sides are measured in a process that knows what a test has replaced."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(bench_train, "run_tasks", functools.partial(run_tasks, context=context))


def test_ours_is_measured(monkeypatch, tmp_path, capsys):
    out = tmp_path / "figures.json"
    command = f"--model tiny --device cpu --seq-len 32 --mbs 2 --steps 2 --only ours --json {out}"
    monkeypatch.setattr(
        "sys.argv", ["bench_train.py", *command.split(), "--set", "log.peak_tflops=0.001"]
    )
    assert bench_train.main() == 0
    row = json.loads(out.read_text())["rows"]["tiny"]["ours"]
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(64) and row["steps"] == 2
    config = bench_train.configured(["model=tiny"])
    flops = bench_train.flops_per_token(config.model, 32)
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * flops / 1e9)
    assert f"{row['tokens_per_s']:,.0f} tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["tiny", "tiny_qwen3_moe"])
def test_the_peer_is_the_same_model(monkeypatch, model):
    """As many parameters, and a first loss near that of guessing."""
    monkeypatch.setattr(torch, "compile", lambda module: module)
    config = bench_train.configured([f"model={model}", "train.seq_len=32"])
    step = bench_train.transformers_step(config, torch.device("cpu"))
    held = sum(
        p.numel()
        for p in step.__closure__[
            step.__code__.co_freevars.index("model")
        ].cell_contents.parameters()
    )
    assert held == bench_train.parameter_count(config.model)
    assert step(next(bench_train.token_rows(config))) == pytest.approx(
        math.log(config.model.vocab_size), rel=0.05
    )


def test_a_model_has_as_many_layers_as_the_device_holds():
    config = bench_train.configured(bench_train.CASES["8b"])
    target = bench_train.Target("sm_90")

    def needed(layers: int) -> int:
        return (
            bench_train.Forecaster(bench_train._with_layers(config, layers), 1, target)
            .rank(0)
            .needed
        )

    have = 80 * 10**9
    layers = bench_train.fitted(config, have, target).model.num_layers
    assert needed(layers) <= bench_train.MEMORY_SHARE * have < needed(layers + 1)
    assert bench_train.fitted(config, 10**12, target) == config
    assert bench_train.fitted(config, 0, target).model.num_layers == 1


def measured_tiny(monkeypatch, out, options):
    """The tiny model's row of the JSON file that the benchmark writes on a CPU."""
    command = f"--model tiny --device cpu --seq-len 32 {options} --json {out}"
    monkeypatch.setattr("sys.argv", ["bench_train.py", *command.split()])
    assert bench_train.main() == 0
    return json.loads(out.read_text())["rows"]["tiny"]


def test_a_side_that_breaks_leaves_the_other_s_figures(monkeypatch, tmp_path, capfd):
    def broken(config, device):
        raise RuntimeError("no kernel\nfor this device")

    out = tmp_path / "figures.json"
    monkeypatch.setitem(bench_train.PROVIDERS, "transformers + compile", broken)
    row = measured_tiny(monkeypatch, out, "--mbs 2 --steps 1")
    assert (
        row["transformers + compile"] == {"ended": "RuntimeError: no kernel"}
        and row["ours"]["tokens_per_s"] > 0
    )
    assert "for this device" in capfd.readouterr().err


def test_what_the_time_does_not_suffice_for_is_named_and_the_steps_so_far_count(
    monkeypatch, tmp_path, capsys
):
    def slows_down(config, device):
        # three of warm-up, a timed one, and another that takes for ever
        losses = iter((4.0, 3.0, 2.0, 1.0))
        return lambda rows: next(losses, None) or time.sleep(60)

    out = tmp_path / "figures.json"
    monkeypatch.setitem(bench_train.PROVIDERS, "ours", slows_down)
    row = measured_tiny(monkeypatch, out, "--minutes 0.05")
    assert (row["ours"]["steps"], row["ours"]["first_loss"], row["ours"]["last_loss"]) == (
        1,
        4.0,
        1.0,
    )
    assert row["ours"]["ended"] == "out of time"
    assert row["transformers + compile"] == {"ended": "not reached: out of time"}
    assert "after 1 steps: out of time" in capsys.readouterr().out


def test_an_interrupt_leaves_what_was_measured(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        yield None, {"device": "a GPU", "torch": "2"}
        yield "tiny: ours", {"layers": 2, "ours": {"ended": "ImportError: x"}}
        raise KeyboardInterrupt

    out = tmp_path / "figures.json"
    monkeypatch.setattr(bench_train, "run_tasks", interrupted)
    monkeypatch.setattr(
        "sys.argv", ["bench_train.py", "--model", "tiny", "--device", "cpu", "--json", str(out)]
    )
    assert bench_train.main() == 130
    assert json.loads(out.read_text())["rows"] == {
        "tiny": {"layers": 2, "ours": {"ended": "ImportError: x"}}
    }
    assert "ImportError: x" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_train.py", "1b"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_train.main() == 2
    assert "--device cpu" in capsys.readouterr().err


def test_an_unlawful_setting_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["bench_train.py", "1b", "--device", "cpu", "--set", "parallel.tp=2"]
    )
    with pytest.raises(SystemExit) as left:
        bench_train.main()
    assert left.value.code == 2
    assert "parallel.tp" in capsys.readouterr().err
