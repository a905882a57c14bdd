"""One FP8 scale per tensor or row: kernels give plain torch's bits for any values and layout."""

import math

import pytest
import torch
from kernel_lab.accuracy import assert_same_quantized, same_bits

from megatron5d.kernels import dispatch
from megatron5d.kernels.fp8.quantize import E4M3, E5M2
from megatron5d.kernels.fp8.quantize_tensor import (
    amax_of,
    amax_of_rows,
    amax_of_rows_reference,
    amax_reference,
    quantize_by_row,
    quantize_by_row_reference,
    quantize_tensor,
    quantize_tensor_both_ways,
    quantize_tensor_reference,
)
from megatron5d.kernels.fp8.transpose import transpose_values

pytestmark = [pytest.mark.fp8, pytest.mark.alike, pytest.mark.interpreted]


def check(x, dtype=E4M3, **options):
    """Compares amax, values, the transpose, and values for other maxima, at which x saturates."""
    assert dispatch.runs_triton(x) and torch.equal(amax_of(x), amax_reference(x))
    expected = quantize_tensor_reference(x, dtype, **options)
    q, transposed = quantize_tensor_both_ways(x, dtype, **options)
    assert_same_quantized(q, expected)
    assert same_bits(transposed.values, expected.values.t())
    assert transposed.values.is_contiguous() and torch.equal(transposed.scales, expected.scales)
    for amax in (None, amax_reference(x) * 0.25, amax_reference(x) * 3.0):
        q = quantize_tensor(x, dtype, amax=amax, **options)
        assert_same_quantized(q, quantize_tensor_reference(x, dtype, amax=amax, **options))
        assert q.values.is_contiguous()


@pytest.mark.parametrize(
    "dtype, fp8, powers_of_two",
    [(torch.bfloat16, E4M3, True), (torch.bfloat16, E5M2, False), (torch.float16, E4M3, False)],
)
def test_values(dtype, fp8, powers_of_two):
    x = (torch.randn(65, 131) * torch.logspace(-4, 2, 131)).to(dtype)
    x[0, :3] = torch.tensor([0.0, -0.0, x.max() / 448])
    x[64, 130] = -x.abs().max() - 1  # the largest is the last element of the last tile
    check(x, fp8, powers_of_two=powers_of_two)


@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (130, 5)])
def test_odd_shapes(shape):
    check(torch.randn(shape))


SPECIAL = {  # all values but the last, and the last
    "zeros": (0.0, -0.0),
    "all equal": (7.0, 7.0),
    "subnormal": (2.0**-133, -(2.0**-130)),
    "subnormal and not": (1.0, 2.0**-130),
    "FP8 subnormals": (448.0, 2.5 * 2.0**-9),
    "the largest bfloat16": (3.3895313892515355e38, 1.0),
    "NaN": (1.0, math.nan),
    "infinity": (0.0, math.inf),
    "minus infinity": (1.0, -math.inf),
}


@pytest.mark.parametrize("dtype, fp8", [(torch.bfloat16, E5M2), (torch.float32, E4M3)])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers(name, dtype, fp8):
    common, last = SPECIAL[name]
    x = torch.full((65, 66), common, dtype=dtype)
    x[64, 65] = last
    check(x, fp8)
    if not math.isfinite(last):
        q = quantize_tensor(x)
        assert amax_of(x) == math.inf and q.values.float().isnan().all() and q.scales.item() == 1


def test_layouts():
    """More than two dims, strided rows, a transpose, strided columns, one repeated row, a vector
    and a number."""
    x = torch.randn(6, 4, 40)
    assert_same_quantized(quantize_tensor(x), quantize_tensor_reference(x))
    wide = torch.randn(70, 140)
    for view in (wide[:, 3:80], wide.t(), wide[:, ::2], wide[:1].expand(9, -1)):
        check(view)
    assert amax_of(wide[0]) == wide[0].abs().max() and amax_of(wide[0, 0]) == wide[0, 0].abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (70, 131), (3, 64)])
def test_by_row(shape, dtype):
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(dtype)
    x[0], x[-1, -1] = 0, -x.abs().max() - 1
    if shape[0] > 3:
        x[1, 100], x[2, 0], x[3] = math.nan, -math.inf, 2.0**-130
    assert torch.equal(amax_of_rows(x), amax_of_rows_reference(x))
    shared = amax_of(x[-1]).expand(shape[0]).clone()
    shared[0] = math.inf
    for amax in (amax_of_rows(x), shared):
        for fp8, options in ((E4M3, {"powers_of_two": True}), (E5M2, {})):
            values, scales = quantize_by_row(x, amax, fp8, **options)
            expected = quantize_by_row_reference(x, amax, fp8, **options)
            assert same_bits(values, expected[0]) and torch.equal(scales, expected[1])
            for i, row_amax in enumerate(amax):  # a row is a tensor with a given maximum
                row = quantize_tensor_reference(x[i : i + 1], fp8, amax=row_amax, **options)
                assert same_bits(values[i], row.values[0]) and scales[i] == row.scales


def test_invalid_maxima_are_rejected():
    x = torch.ones(2, 3)
    for amax in (torch.ones(2), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")):
        with pytest.raises(
            ValueError, match=r"amax of x \(2, 3\) must have 1 float32 elements on c"
        ):
            quantize_tensor(x, amax=amax)
    for amax in (torch.ones(()), torch.ones(3), torch.ones(2).double()):
        with pytest.raises(ValueError, match="must have 2 float32 elements on c"):
            quantize_by_row(x, amax)
    with pytest.raises(ValueError, match="expected a matrix"):
        quantize_tensor_both_ways(torch.ones(2, 3, 4))


@pytest.mark.parametrize("shape", [(130, 257), (1, 5), (3, 129, 64)])
def test_transpose_of_every_byte(shape):
    values = torch.randint(256, shape, dtype=torch.uint8).view(E4M3)
    assert dispatch.runs_triton(values)
    for matrices in (values, values[..., 1:]):
        transposed = transpose_values(matrices)
        assert transposed.is_contiguous() and same_bits(transposed, matrices.mT)
