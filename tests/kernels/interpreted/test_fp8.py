"""FP8 quantisers against their definition, and GEMMs against the dequantised GEMM in float64."""

import itertools
import math

import pytest
import torch

from megatron5d import kernels
from megatron5d.kernels.fp8 import gemm as module
from megatron5d.kernels.fp8 import norm_swiglu as fp8_fused
from megatron5d.kernels.fp8.gemm import fp8_matmul
from megatron5d.kernels.fp8.norm_swiglu import (
    norm_quantized,
    swiglu_backward_quantized,
    swiglu_quantized,
)
from megatron5d.kernels.fp8.quantize import (
    E4M3,
    E5M2,
    Quantized,
    quantize_blocks,
    quantize_reference,
    quantize_rows,
)
from megatron5d.kernels.fp8.quantize_tensor import quantize_tensor
from megatron5d.kernels.fp8.transpose import fp8_transpose, fp8_transpose_reference

pytestmark = pytest.mark.fp8
# Hopper's tensor cores keep 14 bits of a sum
FP8_SUMS = 1e-5 if torch.get_default_device().type == "cpu" else 5e-4


def by_definition(x, height, dtype, powers_of_two=False):
    """Group by group: scale = amax / largest, perhaps up to 2^n; values = nearest FP8 value of x ·
    1/scale."""
    rows, columns = x.shape
    values, scales = torch.empty(rows, columns), torch.empty(-(-rows // height), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * height, (i + 1) * height), slice(j * 128, (j + 1) * 128))
            amax = x[block].float().abs().max()
            scale = amax / torch.tensor(torch.finfo(dtype).max) if amax > 0 else torch.tensor(1.0)
            if powers_of_two and amax > 0:
                scale = torch.tensor(2.0 ** math.ceil(math.log2(scale)))
            largest = torch.finfo(dtype).max
            scales[i, j] = scale
            values[block] = (
                (x[block].float() * (1 / scale)).clamp(-largest, largest).to(dtype).float()
            )
    return values, scales


def agree(got, x, height, dtype, powers_of_two=False):
    """Bit by bit: what the kernels on a GPU, the interpreter and the plain path all promise."""
    values, scales = by_definition(x, height, dtype, powers_of_two)
    assert got.values.dtype == dtype
    assert torch.equal(got.scales, scales) and torch.equal(got.values.float(), values)


@pytest.mark.alike
@pytest.mark.parametrize("dtype, powers_of_two", [(E4M3, False), (E4M3, True), (E5M2, False)])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (129, 127), (200, 300), (5, 1025)])
def test_quantisers(shape, dtype, powers_of_two):
    x = torch.randn(shape).bfloat16() * torch.logspace(-3, 3, shape[1])
    x[0, 0] = 0
    how = {"powers_of_two": powers_of_two}
    agree(quantize_rows(x, dtype, **how), x, 1, dtype, **how)
    agree(quantize_rows(x.t(), dtype, **how), x.t(), 1, dtype, **how)
    straight, transposed = quantize_blocks(x, dtype, **how)
    agree(straight, x, 128, dtype, **how)
    assert torch.equal(transposed.values.float(), straight.values.float().t()) and torch.equal(
        transposed.scales, straight.scales.t()
    )
    stack, transposed_stack = quantize_blocks(torch.stack([x, 2 * x]), dtype, **how)  # experts
    agree(Quantized(stack.values[1], stack.scales[1], 128), 2 * x, 128, dtype, **how)
    assert torch.equal(transposed_stack.values[1].float(), stack.values[1].float().t())
    assert torch.equal(transposed_stack.scales[0], transposed.scales)


# x (the largest first), the scale and the values by hand: scale = amax / 448, largest e4m3 448,
# smallest 2^-9
BY_HAND = {
    "all equal": ([7.0] * 3, 2.0**-6, [448.0] * 3),
    # ties to even
    "grid": (
        [448.0, 15.0, 1.0625, -1.1875, 17.0, 19.0],
        1.0,
        [448.0, 15.0, 1.0, -1.25, 16.0, 20.0],
    ),
    "below the smallest": (
        [448.0, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, -(2.0**-11)],
        1.0,
        [448.0, 2**-9, 0, 2**-9, 0],
    ),
    "FP8 subnormals": (
        [448.0, 3 * 2.0**-9, 2.5 * 2.0**-9, 7 * 2.0**-9],
        1.0,
        [448.0, 3 * 2**-9, 2**-8, 7 * 2**-9],
    ),
    # 448·2^-30 is below the smallest
    "float32 subnormals": ([2.0**-130, 2.0**-140], 2.0**-100 / 448, [0.0, 0.0]),
    "zeros": ([0.0, -0.0], 1.0, [0.0, 0.0]),
    "largest bfloat16": ([3.3895313892515355e38, 1.0], 3.3895313892515355e38 / 448, [448.0, 0.0]),
}
BY_HAND_POWERS = {
    "all equal": ([7.0] * 3, 2.0**-6, [448.0] * 3),
    "just above a power": ([7.03125, 1.0], 2.0**-5, [224.0, 32.0]),  # 225 lies between 224 and 240
    "float32 subnormals": ([2.0**-130], 2.0**-108, [0.0]),  # 2^-100 / 448 = 2^-108.8, rounded up
    "zeros": ([0.0], 1.0, [0.0]),
    "largest bfloat16": ([3.3895313892515355e38], 2.0**120, [256.0]),  # 255 between 240 and 256
}


@pytest.mark.alike
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("table", [BY_HAND, BY_HAND_POWERS])
def test_cases_by_hand(table, plain):
    for x, scale, values in table.values():
        row = torch.tensor([x])
        how = {"powers_of_two": table is BY_HAND_POWERS}
        rows = quantize_reference(row, 1, **how) if plain else quantize_rows(row, **how)
        blocks = quantize_reference(row, 128, **how) if plain else quantize_blocks(row, **how)[0]
        for got in (rows, blocks, quantize_tensor(row, **how)):
            assert got.scales.item() == torch.tensor(scale, dtype=torch.float32).item(), x
            assert got.values.float().tolist() == [values], x


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_spoils_its_group_and_no_other(bad, plain):
    x = torch.ones(130, 260)
    x[129, 130] = bad
    rows = quantize_reference(x, 1) if plain else quantize_rows(x)
    blocks = quantize_reference(x, 128) if plain else quantize_blocks(x)[0]
    want = torch.zeros(130, 260, dtype=torch.bool)
    want[129, 128:256] = True
    assert torch.equal(rows.values.float().isnan(), want) and bool((rows.scales[129, 1] == 1).all())
    want[128:, 128:256] = True
    assert torch.equal(blocks.values.float().isnan(), want) and bool(blocks.scales.isfinite().all())
    assert quantize_tensor(x).values.float().isnan().all()
    assert (
        bool(fp8_matmul(rows, blocks).isnan()[129].all())
        and not fp8_matmul(rows, blocks)[:128, :128].isnan().any()
    )


@pytest.mark.alike
@pytest.mark.parametrize("counts", [None, [130, 0, 5, 128]])
@pytest.mark.parametrize("how", [{}, {"powers_of_two": True}, {"keep_scales": True}])
def test_transposed(counts, how):
    rows, columns = 263, 150
    offsets = None if counts is None else torch.tensor([0, *counts]).cumsum(0)
    x = quantize_rows(torch.randn(rows, columns) * torch.logspace(-2, 2, columns))
    if "keep_scales" in how:
        x = Quantized(x.values, torch.full_like(x.scales, 0.75), 1)
    got, want = fp8_transpose(x, offsets, **how), fp8_transpose_reference(x, offsets, **how)
    assert got.values.shape == want.values.shape == (columns, 128 * got.scales.shape[1])
    bounds, group = [0, rows] if counts is None else offsets.tolist(), 0
    for first, last in zip(bounds, bounds[1:]):
        end = group + -(-(last - first) // 128)
        tokens = slice(group * 128, end * 128)
        assert torch.equal(got.values[:, tokens].float(), want.values[:, tokens].float())
        assert torch.equal(got.scales[:, group:end], want.scales[:, group:end])
        wide = x.dequantize()[first:last].t()
        if "keep_scales" in how:
            mine = Quantized(got.values[:, tokens], got.scales[:, group:end], 1).dequantize()
            assert torch.equal(mine[:, : last - first], wide) and not mine[:, last - first :].any()
        else:
            padded = torch.nn.functional.pad(wide, (0, -wide.shape[1] % 128))
            agree(
                Quantized(got.values[:, tokens], got.scales[:, group:end], 1),
                padded,
                1,
                E4M3,
                **how,
            )
        group = end


@pytest.mark.alike
def test_powers_of_two_lose_nothing_when_transposed():
    """Values within the FP8 range of each other survive both groupings: what bfloat16 held in 4
    bits stays."""
    x = torch.randint(8, 16, (128, 128)).float() * 2.0 ** torch.randint(-3, 3, (128, 128))
    rows = quantize_rows(x, powers_of_two=True)
    assert torch.equal(rows.dequantize(), x)
    assert torch.equal(fp8_transpose(rows, powers_of_two=True).dequantize(), x.t())
    again = quantize_rows(rows.dequantize(), powers_of_two=True)
    assert torch.equal(again.dequantize(), x)


@pytest.mark.interpreted
@pytest.mark.alike
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", [(1, 1), (7, 130), (5, 384)])
def test_fused_is_one_after_the_other(rows, width, dtype, monkeypatch):
    """Bit by bit what the two kernels give, and near the plain path, whose exponentials differ in
    the last bit.

    Rows of 384 are too wide for the fused norms here.
    """
    monkeypatch.setattr(fp8_fused, "MAX_WIDTH", 256)
    gate_up, weights = torch.randn(rows, 2 * width).to(dtype), torch.rand(rows)
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, width), (width,), (width,)))
    for how in ({}, {"powers_of_two": True}):
        got, want = (
            swiglu_quantized(gate_up, **how),
            quantize_rows(kernels.activate(gate_up, "swiglu"), **how),
        )
        assert torch.equal(got.scales, want.scales) and torch.equal(
            got.values.float(), want.values.float()
        )
        near(got, quantize_reference(kernels.activation_reference(gate_up, "swiglu"), 1, **how))
        got = swiglu_quantized(gate_up, weights=weights, **how)
        want = quantize_rows(kernels.activate(gate_up, "swiglu", weights), **how)
        assert torch.equal(got.scales, want.scales) and torch.equal(
            got.values.float(), want.values.float()
        )
        got, (_, inverse) = norm_quantized(x, weight, None, 1e-5, centered=False, **how)
        plain = kernels.rms_norm_reference(x, weight, 1e-5)
        want = quantize_rows(kernels.rms_norm(x, weight, 1e-5), **how)
        assert torch.equal(got.scales, want.scales) and torch.equal(
            got.values.float(), want.values.float()
        )
        near(got, quantize_reference(plain, 1, **how))
        torch.testing.assert_close(inverse, torch.rsqrt(x.float().square().mean(1) + 1e-5))
        got, statistics = norm_quantized(x, weight, bias, 1e-5, centered=True, **how)
        want = quantize_rows(kernels.layer_norm(x, weight, bias, 1e-5), **how)
        assert torch.equal(got.scales, want.scales) and torch.equal(
            got.values.float(), want.values.float()
        )
        near(got, quantize_reference(kernels.layer_norm_reference(x, weight, bias, 1e-5), 1, **how))
        variance, mean = torch.var_mean(x.float(), 1, correction=0)
        torch.testing.assert_close(statistics, (mean, torch.rsqrt(variance + 1e-5)))
    with pytest.raises(ValueError, match="even"):
        swiglu_quantized(torch.zeros(2, 5))


@pytest.mark.alike
@pytest.mark.parametrize("how", [{}, {"powers_of_two": True}, {"dtype": E5M2}])
@pytest.mark.parametrize("rows, width", [(3, 128), (130, 256), (5, 144)])
def test_a_gradient_of_swiglu_is_quantised_both_ways_at_once(rows, width, how):
    """Bit by bit the backward, its quantisation and the transpose of that, one after the other;
    also of slices."""
    gate_up, dy = (
        torch.randn(rows, 2 * width + 16).bfloat16(),
        1e-3 * torch.randn(rows, width + 8).bfloat16(),
    )
    gate_up, dy = gate_up[:, 8:-8], dy[:, 8:]
    dy[-1, 3], gate_up[0, -1] = 0.0, torch.nan
    straight = quantize_rows(kernels.activation_backward(dy, gate_up, "swiglu")[0], **how)
    turned = fp8_transpose(straight, powers_of_two=how.get("powers_of_two", False))
    got = swiglu_backward_quantized(dy[None], gate_up[None], **how)
    for mine, wanted in zip(got, (straight, turned)):
        assert (
            torch.equal(mine.scales, wanted.scales)
            and mine.scales.stride() == wanted.scales.stride()
        )
        assert torch.equal(mine.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert got[0].values.float().isnan().sum() == 128


@pytest.mark.alike
@pytest.mark.parametrize("rows, width", [(3, 7), (5, 130)])
def test_backwards_without_the_forward_are_those_with_it(rows, width):
    sizes = (2, rows, 2 * width), (2, rows, width), (width,), (width,)
    gate_up, x, weight, bias = (torch.randn(size, requires_grad=True) for size in sizes)
    dy, dx = torch.randn(2, rows, width), torch.randn(2, rows, width)
    (wanted,) = torch.autograd.grad(kernels.activate(gate_up, "swiglu"), gate_up, dy)
    assert torch.equal(kernels.activation_backward(dy, gate_up.detach(), "swiglu")[0], wanted)
    with torch.no_grad():
        biases = {False: None, True: bias}
        ours, centered = (
            kernels.norm_backward(
                dy,
                x,
                weight,
                b,
                1e-5,
                norm_quantized(x, weight, b, 1e-5, centered=c)[1],
                dx,
                centered=c,
            )
            for c, b in biases.items()
        )
    assert ours[2] is None
    wanted = torch.autograd.grad(kernels.add_rms_norm(x, None, weight, 1e-5), [x, weight], [dy, dx])
    # two compiled kernels need not add in the same order
    torch.testing.assert_close(ours[:2], wanted)
    wanted = torch.autograd.grad(
        kernels.add_layer_norm(x, None, weight, bias, 1e-5), [x, weight, bias], [dy, dx]
    )
    torch.testing.assert_close(centered, wanted)


def near(got, want):
    error = (got.dequantize() - want.dequantize()).norm() / want.dequantize().norm()
    assert error < 0.02, error


KINDS = {
    "tensorwise": (quantize_tensor, quantize_tensor),
    "forward": (quantize_rows, lambda w: quantize_blocks(w)[0]),
    "weight_gradient": (quantize_rows, quantize_rows),
    "mixed_formats": (lambda x: quantize_rows(x, E5M2), lambda w: quantize_blocks(w)[0]),
    "powers_of_two": (
        lambda x: quantize_rows(x, powers_of_two=True),
        lambda w: quantize_blocks(w, powers_of_two=True)[0],
    ),
}


SIZES = [(3, 5, 144), (7, 130, 144), (129, 127, 256), (200, 260, 400)]  # of one binary
SMALLEST = [("forward", (1, 1, 16)), ("weight_gradient", (1, 1, 16))]


@pytest.mark.parametrize("kind, size", [*SMALLEST, *itertools.product(KINDS, SIZES)])
def test_matmul(kind, size):
    (m, n, k), (left, right) = size, KINDS[kind]
    spread = torch.logspace(-2, 2, k)
    a, b = left(torch.randn(m, k) * spread), right(torch.randn(n, k) / spread)
    want = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    got = fp8_matmul(a, b, out_dtype=torch.float32)
    assert (got.double() - want).norm() < FP8_SUMS * want.norm()
    assert (fp8_matmul(a, b).double() - want).norm() < 5e-3 * want.norm()
    main = torch.randn(m, n)
    before = main.double()
    assert fp8_matmul(a, b, into=main) is main
    assert (main.double() - before - want).norm() < FP8_SUMS * want.norm() + 1e-6 * before.norm()
    assert torch.equal(fp8_matmul(a, b, into=torch.full((m, n), torch.nan), accumulate=False), got)


def test_blockwise_is_closer_than_tensorwise_where_scales_differ():
    x, w = (
        torch.randn(65, 528) * torch.logspace(-4, 4, 528),
        torch.randn(65, 528) / torch.logspace(-4, 4, 528),
    )
    want = x.double() @ w.double().t()
    error = {
        name: (fp8_matmul(KINDS[name][0](x), KINDS[name][1](w)).double() - want).norm()
        for name in KINDS
    }
    assert error["forward"] < 0.5 * error["tensorwise"]


def test_what_does_not_fit_is_refused():
    a, b = quantize_rows(torch.randn(4, 128)), quantize_rows(torch.randn(4, 256))
    with pytest.raises(ValueError, match="contract"):
        fp8_matmul(a, b)
    with pytest.raises(ValueError, match="into"):
        fp8_matmul(a, a, into=torch.zeros(4, 5))


def test_the_kernel_really_runs(monkeypatch):
    monkeypatch.setattr(module, "_fp8_matmul_kernel", None)
    with pytest.raises(TypeError, match="NoneType"):
        fp8_matmul(quantize_rows(torch.randn(4, 128)), quantize_rows(torch.randn(4, 128)))
