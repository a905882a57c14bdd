"""Every row of the table of speeds and every space of the tuner runs, small and without a GPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from kernel_lab.bounds import allowed

from megatron5d import kernels
from megatron5d.kernels import dispatch, tuning
from megatron5d.tools import gpu_check, tune_kernels
from megatron5d.tools.bench import BENCHMARKS
from megatron5d.tools.bench.harness import copies_of
from megatron5d.tools.tune_kernels import SPACE, Search, candidates

pytestmark = pytest.mark.interpreted
LACKING = (RuntimeError, NotImplementedError, ImportError, ValueError)
"""What providers other than ours raise where their kernels, or Liger, are not."""
NOTHING = {"num_warps", "num_stages"}  # of a configuration, what every launch has a default for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing is compiled; kernels that follow addresses may (their own tests check the bounds)."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    allowed.append((0, 2**63))
    yield
    allowed.pop()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_provider_runs_or_says_why_not(name):
    benchmark = BENCHMARKS[name]
    assert benchmark.work_of_a_call > 0 and benchmark.sizes.keys() == benchmark.tiny.keys()
    calls = benchmark.calls("cpu", tiny=True)
    assert any(provider.startswith("ours") for provider in calls)
    made = {}
    for provider, call in calls.items():
        try:
            made[provider] = call()
        except LACKING:
            assert not provider.startswith("ours"), provider
    if "forward" in name:  # the same result, in whatever layout
        size = {
            provider: sum(float(each.norm() ** 2) for each in copies_of(out))
            for provider, out in made.items()
        }
        assert len(size) > 1 and max(size.values()) < 1.02 * min(size.values()), size


@pytest.mark.parametrize("operation", SPACE)
def test_every_space_is_searched(operation, monkeypatch):
    monkeypatch.setattr(tune_kernels, "median_ms", lambda calls, repeats=1: 1.0)
    search = Search(operation, device="cpu", tiny=True)
    assert search.ms(candidates(operation)[0]) == 1.0, "a candidate runs and gives the same result"


def test_spaces_and_tables_have_the_same_operations_and_constants():
    for path in tuning.DIRECTORY.glob("*.json"):
        table = tuning.table(path.stem)
        assert table.keys() - SPACE.keys() == set(), path.stem
        for operation, entries in table.items():
            constants = candidates(operation)[0].keys() - NOTHING
            assert any(entry["config"].keys() - NOTHING == constants for entry in entries), (
                path.stem,
                operation,
            )


def test_an_entry_is_rewritten_and_nothing_else(tmp_path, monkeypatch):
    for path in tuning.DIRECTORY.glob("sm_*.json"):
        (tmp_path / path.name).write_text(path.read_text())
        monkeypatch.setattr(tuning, "DIRECTORY", tmp_path)
        before = json.loads(path.read_text())
        present = before["swiglu"][0]["config"]
        tune_kernels.write_entry(path.stem, "swiglu", present, present)
        assert (tmp_path / path.name).read_text() == path.read_text()
        tune_kernels.write_entry(path.stem, "swiglu", present, {"BLOCK": 1})
        before["swiglu"][0]["config"] = {"BLOCK": 1}
        assert json.loads((tmp_path / path.name).read_text()) == before
        monkeypatch.undo()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_ours_equals_the_plain_path(name):
    """As launch/gpu_check.sh compares them."""
    device = torch.get_default_device().type
    found = gpu_check.reference(name, device, tiny=True, repeats=3 if device == "cuda" else 0)
    assert found and all(
        row["right"] for provider, row in found.items() if ", by " not in provider
    ), found


def test_a_kernel_with_other_bits_each_time_is_not_right(monkeypatch):
    original, calls = kernels.activate, []

    def changing(x, kind):
        calls.append(x)
        return original(x, kind) * (1 + len(calls) / 128)

    monkeypatch.setattr(kernels, "activate", changing)
    found = gpu_check.reference(
        "SwiGLU forward 8192x14336", torch.get_default_device().type, tiny=True
    )
    assert found["ours"]["right"] is False and found["ours"]["same bits"] is False


def test_a_wrong_kernel_is_not_right(monkeypatch):
    """A call of Triton's whose result is off by a twentieth."""
    original = kernels.activate

    def wrong(x, kind):
        return original(x, kind) * (1.05 if dispatch.runs_triton(x) else 1.0)

    monkeypatch.setattr(kernels, "activate", wrong)
    found = gpu_check.reference(
        "SwiGLU forward 8192x14336", torch.get_default_device().type, tiny=True
    )
    assert found["ours"]["right"] is False and 0.04 < found["ours"]["difference"] < 0.06
