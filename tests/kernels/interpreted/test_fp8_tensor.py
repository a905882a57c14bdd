"""One scale for a tensor: the kernels' bits are those of plain torch, whatever the tensor holds and
however it lies."""

import math

import pytest
import torch

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


def same(got, want):
    """Shape, layout, dtype and every bit."""
    assert (
        got.values.is_contiguous()
        and got.values.dtype == want.values.dtype
        and got.rows_per_scale == 0
    )
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)


def check(x, dtype=E4M3, **how):
    """Maximum, values, transpose, and values for a maximum of other ranks, beyond which x
    saturates."""
    assert dispatch.runs_triton(x) and torch.equal(amax_of(x), amax_reference(x))
    want = quantize_tensor_reference(x, dtype, **how)
    same(quantize_tensor(x, dtype, **how), want)
    straight, transposed = quantize_tensor_both_ways(x, dtype, **how)
    same(straight, want)
    assert transposed.values.is_contiguous() and torch.equal(transposed.scales, want.scales)
    assert torch.equal(transposed.values.view(torch.uint8), want.values.view(torch.uint8).t())
    for factor in (0.25, 3.0):
        amax = amax_reference(x) * factor
        same(
            quantize_tensor(x, dtype, amax=amax, **how),
            quantize_tensor_reference(x, dtype, amax=amax, **how),
        )


@pytest.mark.parametrize(
    "dtype, eight, powers_of_two",
    [(torch.bfloat16, E4M3, True), (torch.bfloat16, E5M2, False), (torch.float16, E4M3, False)],
)
def test_values(dtype, eight, powers_of_two):
    x = (torch.randn(65, 131) * torch.logspace(-4, 2, 131)).to(dtype)
    x[0, :3] = torch.tensor([0.0, -0.0, x.max() / 448])
    # the last element of the last tile, and negative, is the largest
    x[64, 130] = -x.abs().max() - 1
    check(x, eight, powers_of_two=powers_of_two)


@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (130, 5)])
def test_odd_shapes(shape):
    check(torch.randn(shape))


SPECIAL = {
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


@pytest.mark.parametrize("dtype, eight", [(torch.bfloat16, E5M2), (torch.float32, E4M3)])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_numbers(name, dtype, eight):
    common, last = SPECIAL[name]
    x = torch.full((65, 66), common, dtype=dtype)
    x[64, 65] = last
    check(x, eight)
    if not math.isfinite(last):
        q = quantize_tensor(x)
        assert amax_of(x) == math.inf and q.values.float().isnan().all() and q.scales.item() == 1


def test_layouts():
    """Tokens in several dims; rows apart, transposed, every other column, one row repeated; a
    vector and a number."""
    x = torch.randn(6, 4, 40)
    want = quantize_tensor_reference(x)
    assert quantize_tensor(x).values.shape == x.shape
    same(quantize_tensor(x), want)
    wide = torch.randn(70, 140)
    for part in (wide[:, 3:80], wide.t(), wide[:, ::2], wide[:1].expand(9, -1)):
        check(part)
    assert amax_of(wide[0]) == wide[0].abs().max() and amax_of(wide[0, 0]) == wide[0, 0].abs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (70, 131), (3, 64)])
def test_by_row(shape, dtype):
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(dtype)
    x[0], x[-1, -1] = 0, -x.abs().max() - 1
    if shape[0] > 3:
        x[1, 100], x[2, 0], x[3] = math.nan, -math.inf, 2.0**-130
    assert torch.equal(amax_of_rows(x), amax_of_rows_reference(x))
    for amax in (
        amax_of_rows(x),
        amax_of(x[-1]).expand(shape[0]).clone().index_fill_(0, torch.tensor(0), math.inf),
    ):
        for eight, how in ((E4M3, {"powers_of_two": True}), (E5M2, {})):
            got, want = (
                quantize_by_row(x, amax, eight, **how),
                quantize_by_row_reference(x, amax, eight, **how),
            )
            assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(
                got[1], want[1]
            )
            for i, largest in enumerate(amax):  # a row is a tensor whose maximum is given
                row = quantize_tensor_reference(x[i : i + 1], eight, amax=largest, **how)
                assert torch.equal(got[0][i].view(torch.uint8), row.values[0].view(torch.uint8))
                assert got[1][i] == row.scales


def test_a_maximum_that_is_none_is_refused():
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
def test_bytes_are_transposed(shape):
    values = torch.randint(256, shape, dtype=torch.uint8).view(E4M3)  # every byte, NaN too
    got = transpose_values(values)
    assert dispatch.runs_triton(values) and got.is_contiguous() and got.dtype == E4M3
    assert torch.equal(got.view(torch.uint8), values.view(torch.uint8).mT)
    part = values[..., 1:]  # a view
    assert torch.equal(transpose_values(part).view(torch.uint8), part.view(torch.uint8).mT)
