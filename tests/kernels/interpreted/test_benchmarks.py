"""Every row of the benchmarks and every space of the tuner runs, in small, without a GPU."""

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
MISSING = (RuntimeError, NotImplementedError, ImportError, ValueError)
"""Errors of other providers whose kernels, or packages, are missing."""
DEFAULTED = {"num_warps", "num_stages"}  # for which every launch has a default


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Compiles nothing, and lets kernels follow addresses (their own tests check the bounds)."""
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
    outputs = {}
    for provider, call in calls.items():
        try:
            outputs[provider] = call()
        except MISSING:
            assert not provider.startswith("ours"), provider
    if "forward" in name:  # the same result, in any layout
        norms = {
            provider: sum(float(x.norm() ** 2) for x in copies_of(output))
            for provider, output in outputs.items()
        }
        assert len(norms) > 1 and max(norms.values()) < 1.02 * min(norms.values()), norms


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
            constants = candidates(operation)[0].keys() - DEFAULTED
            assert any(entry["config"].keys() - DEFAULTED == constants for entry in entries), (
                path.stem,
                operation,
            )


def test_only_one_entry_is_rewritten(tmp_path, monkeypatch):
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
def test_ours_equals_the_plain_path(name):
    """As launch/gpu_check.sh compares them."""
    device = torch.get_default_device().type
    rows = gpu_check.reference(name, device, tiny=True, repeats=3 if device == "cuda" else 0)
    ours = {provider: row for provider, row in rows.items() if ", by " not in provider}
    assert ours and all(row["right"] for row in ours.values()), rows


@pytest.mark.parametrize("fault", ["other bits each time", "wrong by a twentieth"])
def test_a_faulty_kernel_is_not_right(fault, monkeypatch):
    original, calls = kernels.activate, []

    def faulty(x, kind):
        calls.append(x)
        factor = 1.05 if dispatch.runs_triton(x) else 1.0
        return original(x, kind) * (1 + len(calls) / 128 if "bits" in fault else factor)

    monkeypatch.setattr(kernels, "activate", faulty)
    device = torch.get_default_device().type
    row = gpu_check.reference("SwiGLU forward 8192x14336", device, tiny=True)["ours"]
    assert row["right"] is False
    assert row["same bits"] is False if "bits" in fault else 0.04 < row["difference"] < 0.06
