"""How far ranks in 16 bits may be from fp64: also where nothing is finite, and where FP8 was asked
for."""

import math
from math import inf, nan

import pytest
import torch

from megatron5d.config.schema import Config, PrecisionConfig
from megatron5d.parity.rounding import in_16_bits, rounding_differences
from megatron5d.parity.run import RankRecord
from megatron5d.parity.variants import faults_of


def record(loss: float, first: float) -> RankRecord:
    gradient = ("weight", (0,), torch.full((4096,), first, dtype=torch.float64))
    return RankRecord(
        figures=[{"loss": loss}], gradients=[[gradient]], weights=[[], []], specs={"weight": None}
    )  # type: ignore[dict-item]


def judged(here: RankRecord, alone: RankRecord) -> list[float]:
    return [
        each.relative for each in rounding_differences([here, alone], alone, record(1.0, 1.0), 2.0)
    ]


def test_times_as_far_as_one_process():
    assert judged(record(1.03, 1.3), record(1.01, 1.1)) == pytest.approx([3, 3 / math.exp(4 / 64)])


@pytest.mark.parametrize("wrong", [nan, inf])
def test_what_is_not_finite_is_never_equal(wrong):
    bad, good = record(wrong, wrong), record(1.01, 1.1)
    assert judged(bad, bad) == judged(good, bad) == judged(bad, good) == [inf, inf]


def test_nothing_that_8_bits_alone_have_is_left():
    """Its knobs are refused without them."""
    asked = PrecisionConfig(
        "bf16", "blockwise", fp8_skip_first=1, fp8_gather=False, grad_dtype="bf16"
    )
    config = in_16_bits(Config(precision=PrecisionConfig("fp64")), asked)
    assert config.precision == PrecisionConfig("bf16", grad_dtype="bf16") and not faults_of(
        config, 1
    )
