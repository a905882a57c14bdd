"""RMSNorm and LayerNorm kernels against torch in float64."""

import pytest
import torch
import torch.nn.functional as F

import kernels
from kernels import normalization

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
SHAPES = [(1, 1), (5, 7), (3, 2, 127), (33, 129), (6, 4097)]


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def check(x, weight, bias, run, exact):
    """Output and gradients of `run` on x, weight, bias (low precision) against `exact` on their float64 copies."""
    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    y, want = run(*leaves), exact(*wide)
    dy = torch.randn(want.shape).to(x.dtype)
    assert y.dtype == x.dtype and y.shape == want.shape
    tolerance = TOLERANCE[x.dtype]
    assert relative(y, want) < tolerance
    grads, wanted = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, wide, dy.double())
    for got, expected, leaf in zip(grads, wanted, leaves):
        assert got.dtype == leaf.dtype
        assert (got.double() - expected).norm() < 2 * tolerance * expected.norm() + 1e-5, "gradient"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    width = shape[-1:]
    check(x, weight, None, lambda x, w: kernels.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, width, w, 1e-5))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_layer_norm(shape, has_bias):
    x, weight = torch.randn(shape) + 3, torch.randn(shape[-1])
    bias = torch.randn(shape[-1]) if has_bias else None
    width = shape[-1:]
    run = lambda x, w, b=None: kernels.layer_norm(x, w, b, 1e-5)  # noqa: E731
    check(x, weight, bias, run, lambda x, w, b=None: F.layer_norm(x, width, w, b, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm_passes_both_gradients(dtype):
    x, residual, weight = (torch.randn(s).to(dtype).requires_grad_() for s in ((9, 33), (9, 33), (33,)))
    wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    y, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    want_total = wide[0] + wide[1]
    want = F.rms_norm(want_total, (33,), wide[2], 1e-5)
    assert torch.equal(total, x + residual) and relative(y, want) < 2 * TOLERANCE[dtype]
    dy, dtotal = torch.randn(9, 33).to(dtype), torch.randn(9, 33).to(dtype)
    grads = torch.autograd.grad([y, total], [x, residual, weight], [dy, dtotal])
    wanted = torch.autograd.grad([want, want_total], wide, [dy.double(), dtotal.double()])
    for got, expected in zip(grads, wanted):
        assert relative(got, expected) < 2 * TOLERANCE[dtype]


def test_a_transposed_input_and_gradient():
    x, weight = torch.randn(33, 5).t(), torch.randn(33)
    check(x, weight, None, lambda x, w: kernels.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (33,), w, 1e-5))
    sliced = torch.randn(5, 80)[:, 7:40]
    check(sliced, weight, None, lambda x, w: kernels.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (33,), w, 1e-5))


def test_empty():
    assert kernels.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


def test_the_kernel_really_runs(monkeypatch):
    monkeypatch.setattr(normalization, "_forward_kernel", None)
    with pytest.raises(TypeError):
        kernels.rms_norm(torch.randn(3, 8), torch.ones(8), 1e-5)
