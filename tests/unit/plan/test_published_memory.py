"""Megatron's recorded peaks at real model sizes, predicted as if our code had run the same layouts.

published_memory.csv holds facts from Megatron-LM's own functional tests (tests/functional_tests/test_cases, golden
values of memory allocated and of the peak, in 10⁹ bytes, on the last pipeline stage; configurations beside them).
Where the files do not say on how many GPUs a run was made, it is the number that explains its allocated bytes.
"""

import csv
import statistics
from pathlib import Path

import pytest

from megatron5d.config.load import load_config
from megatron5d.train.forecast import Forecaster, Target

RUNS = list(csv.DictReader((Path(__file__).parent / "published_memory.csv").read_text().splitlines()))
UNFUSED_LOSS = 4  # bytes a logit: without loss fusion Megatron keeps a softmax in fp32 beside the logits in bf16


@pytest.fixture(scope="module")
def errors():
    """run -> relative errors of (what stays, the peak)."""
    found = {}
    for run in RUNS:
        config = load_config([*run["overrides"].split(), "precision.dtype=bf16"])
        last = Forecaster(config, int(run["world"]), Target("sm_90")).rank(config.parallel.pp - 1)
        logits = config.train.mbs * config.train.seq_len * config.model.vocab_size // config.parallel.tp
        peak = last.allocated + (0 if int(run["fused_loss"]) else UNFUSED_LOSS * logits)
        truth = float(run["allocated_gb"]) * 1e9, float(run["peak_gb"]) * 1e9
        found[run["run"]] = last.resident / truth[0] - 1, peak / truth[1] - 1
    print("\n".join(f"{run}: stays {a:+.1%}, peak {b:+.1%}" for run, (a, b) in found.items()))
    return found


def test_what_stays(errors):
    assert statistics.median(abs(stays) for stays, _ in errors.values()) < 0.03
    assert all(abs(stays) < 0.07 for stays, _ in errors.values())


def test_peaks(errors):
    assert statistics.median(abs(peak) for _, peak in errors.values()) < 0.05
    assert all(abs(peak) < 0.20 for _, peak in errors.values())
