"""tools/bench_kernels.py without a GPU: whatever fails, crashes or hangs, the other figures are
there."""

import functools
import json
import multiprocessing
import os
import signal
import sys
import time
from unittest import mock

import pytest
import torch
from libraries_on_cpu import counted, on_cpu

from megatron5d import kernels
from megatron5d.kernels import choice, tuning
from megatron5d.kernels.choice import AttentionRequest
from megatron5d.tools import bench_kernels
from megatron5d.tools.bench import harness
from megatron5d.tools.bench.harness import Benchmark
from megatron5d.tools.bench.processes import run_tasks
from megatron5d.tools.bench_kernels import measure, write_orders

FIGURES = {"ms": 1.0, "rate": 500.0, "unit": "GB/s", "peak_bytes": 0}
FACTS = {"device": "a GPU", "torch": "2", "limits": {"GB/s": 1000.0, "TFLOP/s": 100.0}}
run_forked = functools.partial(run_tasks, context=multiprocessing.get_context("fork"))


def benchmark(make, families=()) -> Benchmark:
    return Benchmark(lambda device: make(), lambda: 1e9, "GB/s", {}, {}, dict(families))


def fail():
    raise RuntimeError("no such kernel\nand much more")


def fail_silently():
    raise AssertionError


@pytest.fixture
def quick(monkeypatch):
    """A call takes a millisecond; the device works."""
    monkeypatch.setattr(
        bench_kernels, "median_ms", lambda calls, repeats: [call() for call in calls] and 1.0
    )
    monkeypatch.setattr(bench_kernels, "peak_bytes", lambda call: 2**20)
    monkeypatch.setattr(bench_kernels, "device_is_lost", lambda: False)
    return monkeypatch


def test_a_provider_that_fails_is_listed_and_the_others_have_figures(quick):
    calls = {"theirs": fail, "silent": fail_silently, "ours": lambda: 0}
    assert dict(measure(benchmark(lambda: calls), 2, 5)) == {
        "theirs": {"unavailable": "RuntimeError: no such kernel"},
        "silent": {"unavailable": "AssertionError: "},
        "ours": {"ms": 1.0, "rate": 1000.0, "unit": "GB/s", "peak_bytes": 2**20},
    }
    no_inputs = {"inputs": {"unavailable": "RuntimeError: no such kernel"}}
    assert dict(measure(benchmark(fail), 2, 5)) == no_inputs


@pytest.mark.parametrize(
    ("make", "failing"), [(lambda: {"theirs": fail, "ours": lambda: 0}, "theirs"), (fail, "inputs")]
)
def test_a_broken_device_ends_the_process(quick, make, failing):
    """In this process every further row would fail; the next one has a working device."""
    quick.setattr(bench_kernels, "device_is_lost", lambda: True)
    figures = measure(benchmark(make), 1, 5)
    assert next(figures)[0] == failing
    with pytest.raises(RuntimeError, match="no such kernel"):
        next(figures)


def unreliable_worker(names, send):
    """A worker that some tasks end."""
    send((None, FACTS))
    for name in names:
        send((name, {"ours": FIGURES}))
        if name == "crashes":
            os._exit(1)
        if name == "hangs":
            time.sleep(60)
        send((name,))


def test_rows_after_a_crash_and_a_hang_are_measured(tmp_path, capsys):
    names, file = ["crashes", "works", "hangs", "last"], tmp_path / "figures.json"
    bench_kernels.report(run_forked(unreliable_worker, names, 1.0, time.monotonic() + 50), file)
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == names
    rests = {
        "crashes": {"the rest": {"unavailable": "its process died"}},
        "hangs": {"the rest": {"unavailable": "no result for 1 s"}},
    }
    assert all(row == {"ours": FIGURES} | rests.get(name, {}) for name, row in rows.items())
    printed = capsys.readouterr().out
    assert printed.count("a GPU, torch 2: copy 1000 GB/s") == 1
    assert printed.count("50.0% of limit") == 4


def test_tasks_for_which_no_time_is_left_are_named():
    results = run_forked(unreliable_worker, ["hangs", "last"], 30.0, time.monotonic() + 1)
    assert [(name, reason) for name, reason in results if isinstance(reason, str)] == [
        ("hangs", "out of time"),
        ("last", "not reached: out of time"),
    ]


def test_the_file_has_every_figure_before_the_next_one_is_measured(tmp_path):
    file = tmp_path / "figures.json"

    def results():
        yield None, FACTS
        for name, provider in (("a", "ours"), ("a", "theirs"), ("b", "ours")):
            yield name, {provider: {"unavailable": "x"}}
            assert json.loads(file.read_text())["rows"][name][provider] == {"unavailable": "x"}

    bench_kernels.report(results(), file)


def test_an_interrupt_keeps_what_was_measured(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        yield None, FACTS
        yield "a", {"ours": FIGURES}
        raise KeyboardInterrupt

    file = tmp_path / "figures.json"
    monkeypatch.setattr(bench_kernels, "run_tasks", interrupted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--json", str(file)])
    with pytest.raises(SystemExit, match="130"):
        bench_kernels.main()
    assert json.loads(file.read_text())["rows"] == {"a": {"ours": FIGURES}}
    assert "50.0% of limit" in capsys.readouterr().out


def interrupted_worker(names, send):
    os.kill(os.getpid(), signal.SIGINT)
    send((names[0], "alive"))
    send((names[0],))


def test_a_worker_leaves_an_interrupt_to_its_parent():
    """Ctrl-C reaches both; a worker that it ended first would be replaced by another one."""
    results = run_forked(interrupted_worker, ["a"], 10.0, time.monotonic() + 10)
    assert list(results) == [("a", "alive")]


def test_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "rmsnorm forward", "--list"])
    assert bench_kernels.main() == 0 and "RMSNorm forward 4096x18432" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main() == 2


def test_the_device_waits_until_a_call_is_launched(monkeypatch):
    """Otherwise the time of a small kernel would be the host's."""
    device = mock.MagicMock()
    device.cuda.Event().elapsed_time.return_value = 1.0
    monkeypatch.setattr(harness, "torch", device)
    assert harness.median_ms([lambda: time.sleep(0.002)], 3) == 1.0
    waits = [call.args[0] for call in device.cuda._sleep.call_args_list]
    # cycles of an H200 at its fastest
    assert len(waits) == 3 and min(waits) >= 0.002 * 1.98e9


def timed(key, times):
    """The row of an attention whose times by library are given."""
    key |= {"window": 0, "heads": 32, "queries": 8192}
    ours = {"ms": times.pop("triton"), "way": "attention_forward", "key": key}
    return {"ours": ours} | {f"ours, by {name}": {"ms": ms} for name, ms in times.items()}


@pytest.fixture
def empty_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    tuning.table.cache_clear()
    yield
    tuning.table.cache_clear()


def test_the_order_of_libraries_follows_from_the_figures(empty_tables):
    """The fastest for the nearest larger shape; no bound where nothing larger was measured."""
    narrow = timed({"head_dim": 64}, {"triton": 1.0, "cudnn": 1.2})
    rows = {
        "wide": timed({"head_dim": 128}, {"triton": 2.0, "cudnn": 1.0, "fa4": 1.5}),
        "narrow": narrow | {"ours, by fa4": {"unavailable": "not installed"}},
        "failed": {"ours": {"unavailable": "x"}, "ours, by torch": {"unavailable": "y"}},
        "not reached": {"rows": "cross-entropy, both ways"},
    }
    table = json.loads(write_orders(rows, 90).read_text())
    assert table["attention_forward"] == [
        {"up_to": {"head_dim": 64}, "config": {"order": ["triton", "cudnn"]}},
        {"config": {"order": ["cudnn", "fa4", "triton"]}},
    ]
    wide = AttentionRequest(90, False, torch.bfloat16, (99999, 4, 64, 128), (99999, 4, 8, 128), 128)
    assert choice.measured_order(wide) == ["cudnn", "fa4", "triton"]
    small = wide._replace(q_shape=(64, 1, 1, 64), value_dim=64)
    assert choice.measured_order(small) == ["triton", "cudnn"]
    assert choice.measured_order(wide._replace(capability=100)) is None
    assert write_orders({"failed": rows["failed"]}, 90) is None


def test_a_row_is_measured_by_each_library(quick):
    """A library that does not support the call is listed, and the others have figures."""
    x = torch.randn(24, 2, 4, 32, dtype=torch.float64)
    documents = torch.zeros(2, 24, dtype=torch.int32)

    def figures(**options):
        attention = functools.partial(kernels.attention, x, x, x, scale=0.2, **options)
        calls = {"ours": attention, "theirs": lambda: 0}
        row = benchmark(lambda: dict(calls), {"ours": "attention"})
        return dict(measure(row, 1, 5))

    with on_cpu():
        supported = figures()
        assert counted()["cudnn forward"] == counted()["fa4 forward"] == 1
        unsupported = figures(documents=documents)
    assert list(supported) == ["ours", "theirs", "ours, by cudnn", "ours, by fa4"]
    assert supported["ours"]["way"] == "attention_forward"
    assert supported["ours"]["key"]["queries"] == 24
    reason = unsupported["ours, by fa4"]["unavailable"]
    assert reason.startswith("ValueError: fa4: it does not support") and "ms" in unsupported["ours"]
