"""tools/bench_kernels.py without a GPU: whatever fails, crashes or hangs, the figures of the others
are there."""

import functools
import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
from libraries_on_cpu import counted, on_cpu

from megatron5d import kernels
from megatron5d.kernels import choice, tuning
from megatron5d.kernels.choice import AttentionRequest
from megatron5d.tools import bench_kernels
from megatron5d.tools.bench import harness as measure
from megatron5d.tools.bench.harness import Benchmark
from megatron5d.tools.bench.processes import run_tasks
from megatron5d.tools.bench_kernels import write_orders

FIGURES = {"ms": 1.0, "rate": 500.0, "unit": "GB/s", "peak_bytes": 0}
LIMITS = {"device": "a GPU", "torch": "2", "limits": {"GB/s": 1000.0, "TFLOP/s": 100.0}}


def row(make) -> Benchmark:
    return Benchmark(make, lambda: 1e9, "GB/s", {}, {})


def fails():
    raise RuntimeError("no such kernel\nand much more")


def says_nothing():
    raise AssertionError


@pytest.fixture
def quick(monkeypatch):
    """A call takes a millisecond; the device is sound."""
    monkeypatch.setattr(
        bench_kernels, "median_ms", lambda calls, repeats: [call() for call in calls] and 1.0
    )
    monkeypatch.setattr(bench_kernels, "peak_bytes", lambda call: 2**20)
    monkeypatch.setattr(bench_kernels, "device_is_lost", lambda: False)
    return monkeypatch


def test_a_provider_that_fails_says_why_and_the_others_have_figures(quick):
    calls = {"theirs": fails, "mute": says_nothing, "ours": lambda: 0}
    found = dict(bench_kernels.measure(row(lambda device: calls), 2, 5))
    assert found["theirs"] == {"unavailable": "RuntimeError: no such kernel"}
    assert found["mute"] == {"unavailable": "AssertionError: "}
    assert found["ours"] == {"ms": 1.0, "rate": 1000.0, "unit": "GB/s", "peak_bytes": 2**20}
    assert dict(bench_kernels.measure(row(lambda device: fails()), 2, 5)) == {
        "inputs": {"unavailable": "RuntimeError: no such kernel"}
    }


def test_nothing_is_measured_on_a_broken_device(quick):
    quick.setattr(bench_kernels, "device_is_lost", lambda: True)
    measured = bench_kernels.measure(row(lambda device: {"theirs": fails, "ours": lambda: 0}), 1, 5)
    assert next(measured)[0] == "theirs"
    with pytest.raises(RuntimeError, match="no such kernel"):
        next(measured)


def test_a_device_that_the_inputs_have_broken_ends_the_process(quick):
    """The next one has a sound device; in this one every row behind would fail."""
    quick.setattr(bench_kernels, "device_is_lost", lambda: True)
    measured = bench_kernels.measure(row(lambda device: fails()), 1, 5)
    assert next(measured)[0] == "inputs"
    with pytest.raises(RuntimeError, match="no such kernel"):
        next(measured)


def troubled(names, tell):
    """A worker some of whose pieces end it."""
    tell((None, LIMITS))
    for name in names:
        tell((name, {"ours": FIGURES}))
        if name == "crashes":
            os._exit(1)
        if name == "hangs":
            time.sleep(60)
        tell((name,))


def test_the_rows_behind_a_crash_and_a_hang_are_measured(tmp_path, capsys):
    names, file = ["crashes", "sound", "hangs", "last"], tmp_path / "figures.json"
    begin = time.monotonic()
    told = run_tasks(troubled, names, 1.0, begin + 50, multiprocessing.get_context("fork"))
    bench_kernels.report(told, file)
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == names and all(row["ours"]["rate"] == 500.0 for row in rows.values())
    assert rows["crashes"]["the rest"] == {"unavailable": "its process died"}
    assert rows["hangs"]["the rest"] == {"unavailable": "no result for 1 s"}
    assert "the rest" not in rows["sound"] and "the rest" not in rows["last"]
    printed = capsys.readouterr().out
    assert (
        printed.count("a GPU, torch 2: copy 1000 GB/s") == 1
        and printed.count("50.0% of limit") == 4
    )


def test_what_the_time_does_not_suffice_for_is_named(tmp_path):
    told = run_tasks(
        troubled, ["hangs", "last"], 30.0, time.monotonic() + 1, multiprocessing.get_context("fork")
    )
    assert [(name, reason) for name, reason in told if isinstance(reason, str)] == [
        ("hangs", "out of time"),
        ("last", "not reached: out of time"),
    ]


def test_the_file_holds_every_figure_before_the_next_one_is_asked_for(tmp_path):
    file = tmp_path / "figures.json"

    def told():
        yield None, LIMITS
        for name, provider in (("a", "ours"), ("a", "theirs"), ("b", "ours")):
            yield name, {provider: {"unavailable": "x"}}
            assert json.loads(file.read_text())["rows"][name][provider] == {"unavailable": "x"}

    bench_kernels.report(told(), file)


def test_an_interrupt_leaves_what_was_measured(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        yield None, LIMITS
        yield "a", {"ours": FIGURES}
        raise KeyboardInterrupt

    file = tmp_path / "figures.json"
    monkeypatch.setattr(bench_kernels, "run_tasks", interrupted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["bench_kernels.py", "--json", str(file)])
    assert bench_kernels.main() == 130
    assert json.loads(file.read_text())["rows"]["a"]["ours"]["rate"] == 500.0
    assert "50.0% of limit" in capsys.readouterr().out


def notes_an_interrupt(names, tell):
    os.kill(os.getpid(), signal.SIGINT)
    tell((names[0], "alive"))
    tell((names[0],))


def test_a_worker_leaves_an_interrupt_to_its_parent():
    """Ctrl-C reaches both; a worker that died of it first would be replaced by another one."""
    told = run_tasks(
        notes_an_interrupt, ["a"], 10.0, time.monotonic() + 10, multiprocessing.get_context("fork")
    )
    assert list(told) == [("a", "alive")]


def test_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_kernels.py", "rmsnorm forward", "--list"])
    assert bench_kernels.main() == 0 and "RMSNorm forward 4096x18432" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["bench_kernels.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main() == 2


class Device:
    """What `median_ms` asks of torch, without a GPU: notes for how many cycles it is told to
    wait."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, other):
            return 1.0

    def __init__(self):
        self.cuda, self.uint8, self.waited = self, torch.uint8, []

    def empty(self, size, dtype, device):
        return torch.empty(1)

    def synchronize(self):
        pass

    def _sleep(self, cycles):
        self.waited.append(cycles)


def test_the_device_waits_until_a_call_is_launched(monkeypatch):
    """Otherwise the time of a small kernel would be the host's."""
    device = Device()
    monkeypatch.setattr(measure, "torch", device)
    assert measure.median_ms([lambda: time.sleep(0.002)], 3) == 1.0
    # an H200 at its fastest
    assert len(device.waited) == 3 and min(device.waited) >= 0.002 * 1.98e9


def timed(way, key, times):
    """The figures of a row: ours, and ours by libraries."""
    ours = {"ms": times["triton"], "way": way, "key": key}
    return {"ours": ours} | {
        f"ours, by {name}": {"ms": ms} for name, ms in times.items() if name != "triton"
    }


def test_the_order_of_libraries_follows_from_the_figures(monkeypatch, tmp_path):
    """The fastest of the nearest larger shape; no bound where nothing larger was measured."""
    monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
    shape = {"window": 0, "heads": 32, "queries": 8192}
    rows = {
        "wide": timed(
            "attention_forward",
            {"head_dim": 128, **shape},
            {"triton": 2.0, "cudnn": 1.0, "fa4": 1.5},
        ),
        "narrow": timed(
            "attention_forward", {"head_dim": 64, **shape}, {"triton": 1.0, "cudnn": 1.2}
        ),
        "failed": {"ours": {"unavailable": "x"}, "ours, by torch": {"unavailable": "y"}},
        "not reached": {"rows": "cross-entropy, both ways"},
    }
    rows["narrow"]["ours, by fa4"] = {"unavailable": "not installed"}
    file = write_orders(rows, 90)
    assert json.loads(file.read_text()) == {
        "attention_forward": [
            {"up_to": {"head_dim": 64}, "config": {"order": ["triton", "cudnn"]}},
            {"config": {"order": ["cudnn", "fa4", "triton"]}},
        ]
    }
    tuning.table.cache_clear()
    wide = AttentionRequest(90, False, torch.bfloat16, (99999, 4, 64, 128), (99999, 4, 8, 128), 128)
    assert choice.order_of(wide) == ["cudnn", "fa4", "triton"]
    assert choice.order_of(wide._replace(q_shape=(64, 1, 1, 64), value_dim=64)) == [
        "triton",
        "cudnn",
    ]
    assert choice.order_of(wide._replace(capability=100)) is None
    tuning.table.cache_clear()
    assert write_orders({"failed": rows["failed"]}, 90) is None


def test_a_row_is_measured_by_each_library(quick):
    """On a library that does not take the call, the row says so and the others have figures."""
    with on_cpu():
        x = torch.randn(24, 2, 4, 32, dtype=torch.float64)
        calls = {
            "ours": functools.partial(kernels.attention, x, x, x, scale=0.2),
            "theirs": lambda: 0,
        }
        named = Benchmark(lambda device: calls, lambda: 1e9, "GB/s", {}, {}, {"ours": "attention"})
        found = dict(bench_kernels.measure(named, 1, 5))
        assert list(found) == ["ours", "theirs", "ours, by cudnn", "ours, by fa4"]
        assert counted()["cudnn forward"] == counted()["fa4 forward"] == 1
        assert found["ours"]["way"] == "attention_forward" and found["ours"]["key"]["queries"] == 24
        documents = torch.zeros(2, 24, dtype=torch.int32)
        calls["ours"] = functools.partial(calls["ours"], documents=documents)
        found = dict(bench_kernels.measure(named, 1, 5))
    assert (
        found["ours, by fa4"]["unavailable"].startswith("ValueError: fa4: it does not take")
        and "ms" in found["ours"]
    )
