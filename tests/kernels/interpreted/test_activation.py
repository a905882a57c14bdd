"""Activation kernels against torch in float64."""

from functools import partial

import pytest
import torch
from kernel_lab.accuracy import TOLERANCE, compare_with_float64

from megatron5d.kernels.activation import GATED, KINDS, activate, activation_reference

pytestmark = pytest.mark.alike


def input_of(kind, shape):
    """A random input of an activation whose output has this shape."""
    return torch.randn(*shape[:-1], shape[-1] * (2 if kind in GATED else 1))


def compare(kind, x):
    compare_with_float64(partial(activate, kind=kind), partial(activation_reference, kind=kind), x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 129), (1, 4097)])
def test_activations(shape, dtype, kind):
    """Inputs of the clamped kind exceed its limits, beyond which gradients are 0."""
    compare(kind, ((6 if kind == "swiglu_clamped" else 1) * input_of(kind, shape)).to(dtype))


def test_swiglu_of_strided_rows():
    compare("swiglu", torch.randn(6, 50)[:, 3:37])
    compare("swiglu", torch.randn(34, 6).t())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 258)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_experts(kind, shape, dtype):
    x, weights = input_of(kind, shape).to(dtype), torch.rand(shape[0], 2).to(dtype)[:, 1]
    compare_with_float64(
        lambda x, w: activate(x, kind, w),
        lambda x, w: activation_reference(x, kind) * w[:, None],
        x,
        weights,
        absolute=1e-6,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 129)])
def test_backward_over_the_input(kind, shape, is_weighted):
    """The same gradients to the bit, and no second backward."""
    leaf, dy = input_of(kind, shape).bfloat16().requires_grad_(), torch.randn(shape).bfloat16()
    weights = torch.rand(shape[0], requires_grad=True) if is_weighted else None
    leaves = [leaf, *([weights] if is_weighted else [])]
    expected = torch.autograd.grad(activate(leaf, kind, weights), leaves, dy)
    leaves[0] = x = leaf.clone()
    y = activate(x, kind, weights, overwrite=True)
    grads = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    assert all(map(torch.equal, grads, expected)) and grads[0].data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_only_a_contiguous_input_is_overwritten(is_weighted):
    strided = (torch.randn(4, 6).requires_grad_() * 1)[:, 1:5]
    contiguous = torch.randn(4, 4).requires_grad_() * 1
    for x in (strided, contiguous):
        before = x.detach().clone()
        activate(
            x, "swiglu", torch.rand(4) if is_weighted else None, overwrite=True
        ).sum().backward()
        assert torch.equal(x, before) == (x is strided)


def test_invalid_activations_are_rejected():
    x, weights = torch.randn(4, 6).requires_grad_(), torch.rand(4)
    with pytest.raises(ValueError, match="unknown activation 'relu': expected one of swiglu"):
        activate(x, "relu", weights)
    with pytest.raises(ValueError, match=r"one weight per row of x \(4, 6\) \(got \(3,\)\)"):
        activate(x, "swiglu", weights[:3])
    with pytest.raises(ValueError, match="would replace the leaf"):
        activate(x, "swiglu", weights, overwrite=True)
