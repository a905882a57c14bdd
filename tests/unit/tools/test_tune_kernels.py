"""The tuner takes no candidate whose result is another, and refuses a benchmark that shows none."""

import pytest
import torch

from kernels.fp8_quantize import quantize_rows_both_ways
from tools.tune_kernels import agrees, results


def test_results_are_copies_of_everything_returned():
    x = torch.randn(4, 256)
    both = quantize_rows_both_ways(x)
    found = results((x, both))
    assert [tuple(each.shape) for each in found] == [(4, 256), (4, 256), (4, 2), (256, 4), (256, 1)]
    x.zero_()
    assert found[0].norm() > 0


@pytest.mark.parametrize("nothing", [None, (), [None]])
def test_nothing_to_compare_is_refused(nothing):
    with pytest.raises(TypeError, match="has to return tensors"):
        results(nothing)


def test_agreement_is_up_to_rounding():
    want = results(torch.randn(64, 64))
    assert agrees([want[0] * 1.001], want)
    assert not agrees([want[0] * 1.1], want)
    assert not agrees([torch.full((64, 64), torch.nan)], want)
    with pytest.raises(ValueError):
        agrees([], want)
