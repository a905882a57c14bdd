"""FP8 quantizers against their definition, and GEMMs against the dequantized GEMM in float64."""

import itertools
import math
from functools import partial

import pytest
import torch
from kernel_lab.accuracy import assert_same_quantized, relative_error

from megatron5d import kernels
from megatron5d.kernels.activation import activate, activation_reference
from megatron5d.kernels.fp8 import gemm, norm_swiglu
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
# Hopper's tensor cores keep 14 bits of a sum.
FP8_SUMS = 1e-5 if torch.get_default_device().type == "cpu" else 5e-4
POWERS = {"powers_of_two": True}


def assert_by_definition(q, x, height, dtype=E4M3, powers_of_two=False):
    """Compares bit by bit with scale = amax / largest, optionally rounded up to 2^n, and values =
    nearest FP8 value of x · 1/scale, for each group of 128 columns of `height` rows."""
    largest = torch.finfo(dtype).max
    assert q.values.dtype == dtype and q.rows_per_scale == height
    assert q.scales.shape == (-(-x.shape[0] // height), -(-x.shape[1] // 128))
    for i, j in itertools.product(*map(range, q.scales.shape)):
        group = (slice(i * height, (i + 1) * height), slice(j * 128, (j + 1) * 128))
        amax = x[group].float().abs().max()
        scale = amax / torch.tensor(largest) if amax > 0 else torch.tensor(1.0)
        if powers_of_two and amax > 0:
            scale = torch.tensor(2.0 ** math.ceil(math.log2(scale)))
        values = (x[group].float() * (1 / scale)).clamp(-largest, largest).to(dtype)
        assert q.scales[i, j] == scale
        assert torch.equal(q.values[group].float(), values.float())


@pytest.mark.alike
@pytest.mark.parametrize("dtype, powers_of_two", [(E4M3, False), (E4M3, True), (E5M2, False)])
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (129, 127), (200, 300), (5, 1025)])
def test_quantizers(shape, dtype, powers_of_two):
    x = torch.randn(shape).bfloat16() * torch.logspace(-3, 3, shape[1])
    x[0, 0] = 0
    options = {"dtype": dtype, "powers_of_two": powers_of_two}
    for matrix in (x, x.t()):
        assert_by_definition(quantize_rows(matrix, **options), matrix, 1, **options)
    q, transposed = quantize_blocks(x, **options)
    assert_by_definition(q, x, 128, **options)
    assert_by_definition(transposed, x.t(), 128, **options)
    for stack, matrices in zip(
        quantize_blocks(torch.stack([x, 2 * x]), **options), ((x, 2 * x), (x.t(), 2 * x.t()))
    ):
        for values, scales, matrix in zip(stack.values, stack.scales, matrices):
            assert_by_definition(Quantized(values, scales, 128), matrix, 128, **options)


# x (the largest first), scale and values: scale = amax / 448, largest e4m3 448, smallest 2^-9
BFLOAT16_MAX = 3.3895313892515355e38
BY_HAND = {
    "all equal": ([7.0] * 3, 2.0**-6, [448.0] * 3),
    "ties to even": (
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
    "largest bfloat16": ([BFLOAT16_MAX, 1.0], BFLOAT16_MAX / 448, [448.0, 0.0]),
}
BY_HAND_POWERS = {
    "all equal": BY_HAND["all equal"],
    "just above a power": ([7.03125, 1.0], 2.0**-5, [224.0, 32.0]),  # 225 lies between 224 and 240
    "float32 subnormals": ([2.0**-130], 2.0**-108, [0.0]),  # 2^-100 / 448 = 2^-108.8, rounded up
    "zeros": BY_HAND["zeros"],
    "largest bfloat16": ([BFLOAT16_MAX], 2.0**120, [256.0]),  # 255 between 240 and 256
}


@pytest.mark.alike
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("table", [BY_HAND, BY_HAND_POWERS])
def test_cases_by_hand(table, is_plain):
    for x, scale, values in table.values():
        row = torch.tensor([x])
        options = {"powers_of_two": table is BY_HAND_POWERS}
        rows = quantize_reference(row, 1, **options) if is_plain else quantize_rows(row, **options)
        blocks = (
            quantize_reference(row, 128, **options)
            if is_plain
            else quantize_blocks(row, **options)[0]
        )
        for q in (rows, blocks, quantize_tensor(row, **options)):
            assert q.scales.item() == torch.tensor(scale, dtype=torch.float32).item(), x
            assert q.values.float().tolist() == [values], x


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_spoils_its_group_only(value, is_plain):
    x = torch.ones(130, 260)
    x[129, 130] = value
    rows = quantize_reference(x, 1) if is_plain else quantize_rows(x)
    blocks = quantize_reference(x, 128) if is_plain else quantize_blocks(x)[0]
    is_spoilt = torch.zeros(130, 260, dtype=torch.bool)
    is_spoilt[129, 128:256] = True
    assert torch.equal(rows.values.float().isnan(), is_spoilt) and rows.scales[129, 1] == 1
    is_spoilt[128:, 128:256] = True
    assert torch.equal(blocks.values.float().isnan(), is_spoilt) and blocks.scales.isfinite().all()
    assert quantize_tensor(x).values.float().isnan().all()
    y = fp8_matmul(rows, blocks)
    assert y[129].isnan().all() and not y[:128, :128].isnan().any()


@pytest.mark.alike
@pytest.mark.parametrize("counts", [None, [130, 0, 5, 128]])
@pytest.mark.parametrize("options", [{}, POWERS, {"keep_scales": True}])
def test_transpose(counts, options):
    rows, columns = 263, 150
    offsets = None if counts is None else torch.tensor([0, *counts]).cumsum(0)
    x = quantize_rows(torch.randn(rows, columns) * torch.logspace(-2, 2, columns))
    if "keep_scales" in options:
        x = Quantized(x.values, torch.full_like(x.scales, 0.75), 1)
    transposed = fp8_transpose(x, offsets, **options)
    reference = fp8_transpose_reference(x, offsets, **options)
    assert transposed.values.shape == reference.values.shape
    assert transposed.values.shape == (columns, 128 * transposed.scales.shape[1])
    bounds, group = [0, rows] if counts is None else offsets.tolist(), 0
    for first, last in zip(bounds, bounds[1:]):
        end = group + -(-(last - first) // 128)
        expert, expert_reference = (
            Quantized(q.values[:, group * 128 : end * 128], q.scales[:, group:end], 1)
            for q in (transposed, reference)
        )
        assert_same_quantized(expert, expert_reference)
        wide = x.dequantize()[first:last].t()
        padded = torch.nn.functional.pad(wide, (0, -wide.shape[1] % 128))
        if "keep_scales" in options:
            assert torch.equal(expert.dequantize(), padded)
        else:
            assert_by_definition(expert, padded, 1, **options)
        group = end


@pytest.mark.alike
def test_powers_of_two_lose_nothing_when_transposed():
    """Values within the FP8 range of each other, of 4 significant bits, survive both groupings."""
    x = torch.randint(8, 16, (128, 128)).float() * 2.0 ** torch.randint(-3, 3, (128, 128))
    rows = quantize_rows(x, **POWERS)
    assert torch.equal(rows.dequantize(), x)
    assert torch.equal(fp8_transpose(rows, **POWERS).dequantize(), x.t())
    assert torch.equal(quantize_rows(rows.dequantize(), **POWERS).dequantize(), x)


@pytest.mark.interpreted
@pytest.mark.alike
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, POWERS])
@pytest.mark.parametrize("rows, width", [(1, 1), (7, 130), (5, 384)])
def test_fused_kernels_equal_separate_ones(rows, width, options, dtype, monkeypatch):
    """Bit by bit, and near the plain path, whose exponentials differ in the last bit.

    Rows of 384 are too wide for the fused norms here.
    """
    monkeypatch.setattr(norm_swiglu, "MAX_WIDTH", 256)
    gate_up, probs = torch.randn(rows, 2 * width).to(dtype), torch.rand(rows)
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, width), (width,), (width,)))
    rms, (_, rstd) = norm_quantized(x, weight, None, 1e-5, centered=False, **options)
    layer, statistics = norm_quantized(x, weight, bias, 1e-5, centered=True, **options)
    cases = [
        (
            swiglu_quantized(gate_up, weights=weights, **options),
            activate(gate_up, "swiglu", weights),
            activation_reference(gate_up, "swiglu", weights),
        )
        for weights in (None, probs)
    ] + [
        (rms, kernels.rms_norm(x, weight, 1e-5), kernels.rms_norm_reference(x, weight, 1e-5)),
        (
            layer,
            kernels.layer_norm(x, weight, bias, 1e-5),
            kernels.layer_norm_reference(x, weight, bias, 1e-5),
        ),
    ]
    for fused, separate, plain in cases:
        assert_same_quantized(fused, quantize_rows(separate, **options))
        reference = quantize_reference(plain, 1, **options)
        assert relative_error(fused.dequantize(), reference.dequantize()) < 0.02
    torch.testing.assert_close(rstd, torch.rsqrt(x.float().square().mean(1) + 1e-5))
    variance, mean = torch.var_mean(x.float(), 1, correction=0)
    torch.testing.assert_close(statistics, (mean, torch.rsqrt(variance + 1e-5)))


@pytest.mark.alike
@pytest.mark.parametrize("options", [{}, POWERS, {"dtype": E5M2}])
@pytest.mark.parametrize("rows, width", [(3, 128), (130, 256), (5, 144)])
def test_gradient_of_swiglu_both_ways(rows, width, options):
    """Bit by bit the backward, its quantization and the transpose of that; also of slices."""
    gate_up = torch.randn(rows, 2 * width + 16).bfloat16()[:, 8:-8]
    dy = 1e-3 * torch.randn(rows, width + 8).bfloat16()[:, 8:]
    dy[-1, 3], gate_up[0, -1] = 0.0, torch.nan
    by_rows = quantize_rows(kernels.activation_backward(dy, gate_up, "swiglu")[0], **options)
    transposed = fp8_transpose(by_rows, powers_of_two=options.get("powers_of_two", False))
    fused = swiglu_backward_quantized(dy[None], gate_up[None], **options)
    for q, expected in zip(fused, (by_rows, transposed)):
        assert_same_quantized(q, expected)
        assert q.scales.stride() == expected.scales.stride()
    assert fused[0].values.float().isnan().sum() == 128


@pytest.mark.alike
@pytest.mark.parametrize("rows, width", [(3, 7), (5, 130)])
def test_backwards_without_the_forward(rows, width):
    sizes = (2, rows, 2 * width), (2, rows, width), (width,), (width,)
    gate_up, x, weight, bias = (torch.randn(size, requires_grad=True) for size in sizes)
    dy, dx = torch.randn(2, rows, width), torch.randn(2, rows, width)
    (dgate_up,) = torch.autograd.grad(activate(gate_up, "swiglu"), gate_up, dy)
    assert torch.equal(kernels.activation_backward(dy, gate_up.detach(), "swiglu")[0], dgate_up)
    for centered, leaves in ((False, (x, weight)), (True, (x, weight, bias))):
        b = bias if centered else None
        with torch.no_grad():
            _, statistics = norm_quantized(x, weight, b, 1e-5, centered=centered)
            grads = kernels.norm_backward(dy, x, weight, b, 1e-5, statistics, dx, centered=centered)
        norm = kernels.add_layer_norm if centered else kernels.add_rms_norm
        outputs = norm(x, None, *leaves[1:], 1e-5)
        # Two compiled kernels need not add in the same order.
        expected = torch.autograd.grad(outputs, leaves, [dy, dx])
        torch.testing.assert_close(grads[: len(leaves)], expected)
        assert centered or grads[2] is None


KINDS = {
    "tensorwise": (quantize_tensor, quantize_tensor),
    "forward": (quantize_rows, lambda w: quantize_blocks(w)[0]),
    "weight_gradient": (quantize_rows, quantize_rows),
    "mixed_formats": (partial(quantize_rows, dtype=E5M2), lambda w: quantize_blocks(w)[0]),
    "powers_of_two": (
        partial(quantize_rows, **POWERS),
        lambda w: quantize_blocks(w, **POWERS)[0],
    ),
}
SIZES = [(3, 5, 144), (7, 130, 144), (129, 127, 256), (200, 260, 400)]  # share one binary
SMALLEST = [("forward", (1, 1, 16)), ("weight_gradient", (1, 1, 16))]


@pytest.mark.parametrize("kind, size", [*SMALLEST, *itertools.product(KINDS, SIZES)])
def test_matmul(kind, size):
    (m, n, k), (quantize_a, quantize_b) = size, KINDS[kind]
    spread = torch.logspace(-2, 2, k)
    a, b = quantize_a(torch.randn(m, k) * spread), quantize_b(torch.randn(n, k) / spread)
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    y = fp8_matmul(a, b, out_dtype=torch.float32)
    assert relative_error(y, exact) < FP8_SUMS
    assert relative_error(fp8_matmul(a, b), exact) < 5e-3
    main_grad = torch.randn(m, n)
    before = main_grad.double()
    assert fp8_matmul(a, b, into=main_grad) is main_grad
    error = (main_grad.double() - before - exact).norm()
    assert error < FP8_SUMS * exact.norm() + 1e-6 * before.norm()
    assert torch.equal(fp8_matmul(a, b, into=torch.full((m, n), torch.nan), accumulate=False), y)


def test_blockwise_is_closer_than_tensorwise_where_scales_differ():
    spread = torch.logspace(-4, 4, 528)
    x, w = torch.randn(65, 528) * spread, torch.randn(65, 528) / spread
    exact = x.double() @ w.double().t()
    blockwise, tensorwise = (
        relative_error(fp8_matmul(KINDS[kind][0](x), KINDS[kind][1](w)), exact)
        for kind in ("forward", "tensorwise")
    )
    assert blockwise < 0.5 * tensorwise


def test_invalid_operands_are_rejected():
    a, b = quantize_rows(torch.randn(4, 128)), quantize_rows(torch.randn(4, 256))
    with pytest.raises(ValueError, match="must have the same last dim"):
        fp8_matmul(a, b)
    with pytest.raises(ValueError, match="into must be contiguous"):
        fp8_matmul(a, a, into=torch.zeros(4, 5))
    with pytest.raises(ValueError, match="must be even"):
        swiglu_quantized(torch.zeros(2, 5))


def test_the_kernel_runs(monkeypatch):
    monkeypatch.setattr(gemm, "_fp8_matmul_kernel", None)
    with pytest.raises(TypeError, match="NoneType"):
        fp8_matmul(quantize_rows(torch.randn(4, 128)), quantize_rows(torch.randn(4, 128)))
