"""Compares kernels with float64, and FP8 results bit by bit."""

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def relative_error(x: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of `expected`."""
    x, expected = x.detach().double(), expected.detach().double()
    return float((x - expected).norm() / expected.norm().clamp_min(1e-30))


def compare_with_float64(run, exact, *inputs: Tensor, absolute: float = 0.0) -> None:
    """Asserts that outputs and gradients of `run` are those of `exact` on float64 copies.

    Args:
        inputs: of the dtype whose tolerance holds; they become leaves.
        absolute: error that is allowed beyond the relative one.
    """
    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    outputs, expected = run(*leaves), exact(*wide)
    if isinstance(outputs, Tensor):
        outputs, expected = (outputs,), (expected,)
    douts = [torch.randn(y.shape).to(y.dtype) for y in outputs]
    grads = torch.autograd.grad(outputs, leaves, douts, allow_unused=True)
    wide_douts = [dout.double() for dout in douts]
    expected_grads = torch.autograd.grad(expected, wide, wide_douts, allow_unused=True)
    for x, exact_x in zip((*outputs, *grads), (*expected, *expected_grads), strict=True):
        assert (x is None) == (exact_x is None)
        if x is not None:
            assert x.shape == exact_x.shape and x.dtype == inputs[0].dtype
            limit = TOLERANCE[x.dtype] * exact_x.norm() + absolute
            assert (x.double() - exact_x).norm() <= limit, relative_error(x, exact_x)


def same_bits(x: Tensor, expected: Tensor) -> bool:
    """Whether two FP8 tensors have the same shape, dtype and bytes, NaN included."""
    return x.dtype == expected.dtype and torch.equal(
        x.view(torch.uint8), expected.view(torch.uint8)
    )


def assert_same_quantized(x, expected) -> None:
    """Asserts that two `Quantized` have the same values and scales, bit by bit."""
    assert same_bits(x.values, expected.values) and torch.equal(x.scales, expected.scales)
    assert x.rows_per_scale == expected.rows_per_scale
