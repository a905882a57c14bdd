"""The tuner takes no candidate whose result is another, and refuses a benchmark that shows none."""

import pytest
import torch

from megatron5d.kernels.fp8.quantize import quantize_blocks
from megatron5d.tools import tune_kernels
from megatron5d.tools.bench.harness import copies_of
from megatron5d.tools.bench.processes import NOT_REACHED
from megatron5d.tools.tune_kernels import agrees


def test_results_are_copies_of_everything_returned():
    x = torch.randn(4, 256)
    both = quantize_blocks(x)
    found = copies_of((x, both))
    assert [tuple(each.shape) for each in found] == [(4, 256), (4, 256), (1, 2), (256, 4), (2, 1)]
    x.zero_()
    assert found[0].norm() > 0


@pytest.mark.parametrize("nothing", [None, (), [None]])
def test_nothing_to_compare_is_refused(nothing):
    with pytest.raises(TypeError, match="has to return tensors"):
        copies_of(nothing)


def test_agreement_is_up_to_rounding():
    want = copies_of(torch.randn(64, 64))
    assert agrees([want[0] * 1.001], want)
    assert not agrees([want[0] * 1.1], want)
    assert not agrees([torch.full((64, 64), torch.nan)], want)
    with pytest.raises(ValueError):
        agrees([], want)


@pytest.fixture
def search(monkeypatch):
    """Candidates of one value; the present one takes 5 ms, any other its value, and 0 breaks the
    device."""

    class Fake:
        present, call = {"BLOCK": 5}, None

        def __init__(self, operation, row):
            self.operation = operation

        def ms(self, candidate):
            if candidate["BLOCK"] == 0:
                raise RuntimeError("broken")
            return float(candidate["BLOCK"])

    written = []
    monkeypatch.setattr(tune_kernels, "Search", Fake)
    monkeypatch.setattr(tune_kernels, "median_ms", lambda calls: 5.0)
    monkeypatch.setattr(tune_kernels, "compiled", lambda operation, row, every, until: every)
    monkeypatch.setattr(tune_kernels, "write_entry", lambda *entry: written.append(entry[1:]))
    monkeypatch.setattr(tune_kernels.tuning, "architecture", lambda device: "sm_90")
    return written


def test_the_best_is_written_also_where_the_search_breaks_off(search, monkeypatch):
    monkeypatch.setattr(tune_kernels.random.Random, "shuffle", lambda self, every: None)
    monkeypatch.setattr(
        tune_kernels, "candidates", lambda *of: [{"BLOCK": n} for n in (7, 3, 0, 1)]
    )
    with pytest.raises(RuntimeError, match="broken"):
        tune_kernels.tune("swiglu", 1.0, False)
    assert search == [("swiglu", {"BLOCK": 5}, {"BLOCK": 3})]
    search.clear()
    tune_kernels.tune("swiglu", 0.0, False)
    assert search == []


def test_candidates_are_compiled_side_by_side(monkeypatch):
    """Those that fail are left out; one whose process dies takes no other along; what the time ran
    out for is tried."""
    every = [{"BLOCK": n} for n in range(24)]

    def follow(worker, mine, silence_s, deadline):
        assert worker.args == ("swiglu", None, every)
        for number in mine:
            yield (
                number,
                {3: False, 4: "its process has died", 5: NOT_REACHED}.get(int(number), True),
            )

    monkeypatch.setattr(tune_kernels, "run_tasks", follow)
    monkeypatch.setattr(tune_kernels.os, "cpu_count", lambda: 6)
    assert tune_kernels.compiled("swiglu", None, every, 0.0) == [
        c for c in every if c["BLOCK"] not in (3, 4)
    ]
