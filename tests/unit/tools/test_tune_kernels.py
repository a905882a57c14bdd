"""The tuner takes no candidate with another result, and rejects a benchmark that returns none."""

import pytest
import torch

from megatron5d.kernels.fp8.quantize import quantize_blocks
from megatron5d.tools import tune_kernels
from megatron5d.tools.bench.harness import copies_of
from megatron5d.tools.bench.processes import NOT_REACHED
from megatron5d.tools.tune_kernels import agrees


def test_every_returned_tensor_is_copied():
    x = torch.randn(4, 256)
    copies = copies_of((x, quantize_blocks(x)))
    assert [tuple(copy.shape) for copy in copies] == [(4, 256), (4, 256), (1, 2), (256, 4), (2, 1)]
    x.zero_()
    assert copies[0].norm() > 0


@pytest.mark.parametrize("nothing", [None, (), [None]])
def test_nothing_to_compare_is_rejected(nothing):
    with pytest.raises(TypeError, match="has to return tensors"):
        copies_of(nothing)


def test_agreement_is_up_to_rounding():
    expected = [torch.randn(64, 64)]
    assert agrees([expected[0] * 1.001], expected)
    assert not agrees([expected[0] * 1.1], expected)
    assert not agrees([torch.full((64, 64), torch.nan)], expected)
    with pytest.raises(ValueError):
        agrees([], expected)


def test_the_best_is_written_even_if_the_search_breaks_off(monkeypatch):
    """Candidate n takes n ms, the present one 5, and 0 breaks the device."""

    class FakeSearch:
        present, call = {"BLOCK": 5}, None

        def __init__(self, operation, row):
            pass

        def ms(self, candidate):
            if candidate["BLOCK"] == 0:
                raise RuntimeError("broken")
            return float(candidate["BLOCK"])

    written = []
    for name, value in {
        "Search": FakeSearch,
        "median_ms": lambda calls: 5.0,
        "candidates": lambda *_: [{"BLOCK": n} for n in (7, 3, 0, 1)],
        "compiled": lambda operation, row, every_candidate, deadline: every_candidate,
        "write_entry": lambda architecture, *entry: written.append(entry),
    }.items():
        monkeypatch.setattr(tune_kernels, name, value)
    monkeypatch.setattr(tune_kernels.random.Random, "shuffle", lambda self, items: None)
    monkeypatch.setattr(tune_kernels.tuning, "architecture", lambda device: "sm_90")
    with pytest.raises(RuntimeError, match="broken"):
        tune_kernels.tune("swiglu", 1.0, False)
    assert written == [("swiglu", {"BLOCK": 5}, {"BLOCK": 3})]
    written.clear()
    tune_kernels.tune("swiglu", 0.0, False)
    assert written == []


def test_candidates_are_compiled_in_parallel(monkeypatch):
    """Those that fail are left out, and those whose process dies; those without time are tried."""
    every_candidate = [{"BLOCK": n} for n in range(24)]
    failures = {"3": False, "4": "its process died", "5": NOT_REACHED}

    def run(worker, numbers, silence_s, deadline):
        assert worker.args == ("swiglu", None, every_candidate)
        return ((number, failures.get(number, True)) for number in numbers)

    monkeypatch.setattr(tune_kernels, "run_tasks", run)
    monkeypatch.setattr(tune_kernels.os, "cpu_count", lambda: 6)
    compiled = tune_kernels.compiled("swiglu", None, every_candidate, 0.0)
    assert compiled == [c for c in every_candidate if c["BLOCK"] not in (3, 4)]
