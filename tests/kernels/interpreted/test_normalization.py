"""RMSNorm and LayerNorm kernels against torch in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron5d import kernels
from megatron5d.kernels import norm as normalization

pytestmark = [pytest.mark.alike, pytest.mark.interpreted]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
# the last with the kernels of wide rows
SHAPES = [(1, 1), (5, 7), (3, 2, 127), (33, 129), (3, 1000), (9, 4097)]


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def check(x, weight, bias, run, exact):
    """Output and gradients of `run` on x, weight, bias (low precision) against `exact` on their
    float64 copies."""
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
    check(
        x,
        weight,
        None,
        lambda x, w: kernels.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, width, w, 1e-5),
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_layer_norm(shape, has_bias):
    x, weight = torch.randn(shape) + 3, torch.randn(shape[-1])
    bias = torch.randn(shape[-1]) if has_bias else None
    width = shape[-1:]
    run = lambda x, w, b=None: kernels.layer_norm(x, w, b, 1e-5)  # noqa: E731
    check(x, weight, bias, run, lambda x, w, b=None: F.layer_norm(x, width, w, b, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("width", [100, 1500])
def test_the_stream_beside_the_norm(width, added, centered, dtype):
    """With a residual, and without one; gradients of both results, and of either alone. Wide rows
    have their kernel."""
    names = ["x", *(["residual"] if added else []), "weight", *(["bias"] if centered else [])]
    leaves = {
        n: torch.randn((width,) if n in ("weight", "bias") else (3, 3, width)).to(dtype)
        for n in names
    }
    leaves = {n: t.requires_grad_() for n, t in leaves.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in leaves.items()}
    x, residual, weight, bias = (leaves.get(n) for n in ("x", "residual", "weight", "bias"))
    if centered:
        y, total = kernels.add_layer_norm(x, residual, weight, bias, 1e-5)
    else:
        y, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    want_total = wide["x"] + wide["residual"] if added else wide["x"] * 1
    exact = F.layer_norm if centered else F.rms_norm
    want = exact(
        want_total, (width,), *(wide[n] for n in names if n in ("weight", "bias")), eps=1e-5
    )
    assert (
        torch.equal(total, x + residual if added else x)
        and relative(y, want) < 2 * TOLERANCE[dtype]
    )
    dy, dtotal = torch.randn(y.shape).to(dtype), torch.randn(y.shape).to(dtype)
    for ours, theirs, grads in (
        ([y, total], [want, want_total], [dy, dtotal]),
        ([y], [want], [dy]),
        ([total], [want_total], [dtotal]),
    ):
        how = {"retain_graph": True, "allow_unused": True}
        got = torch.autograd.grad(ours, list(leaves.values()), grads, **how)
        wanted = torch.autograd.grad(
            theirs, list(wide.values()), [g.double() for g in grads], **how
        )
        for one, expected in zip(got, wanted, strict=True):
            assert (one is None) == (expected is None)
            assert one is None or relative(one, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("width", [18432, 4099])
def test_wide_rows_far_from_zero(width):
    """A mean of the squares less the square of the mean would be off by a tenth here, and one of a
    single lane too."""
    x = (torch.randn(2, width) + torch.linspace(1000, 1010, width)).requires_grad_()
    weight, bias = torch.randn(width), torch.randn(width)
    y, want = (
        norm(x.double() if wide else x, wide)
        for norm, wide in (
            (lambda x, _: kernels.layer_norm(x, weight, bias, 1e-5), False),
            (lambda x, _: F.layer_norm(x, (width,), weight.double(), bias.double(), 1e-5), True),
        )
    )
    assert relative(y, want) < 5e-5
    dy = torch.randn(2, width)
    got, wanted = (torch.autograd.grad(out, x, dy.to(out.dtype))[0] for out in (y, want))
    assert relative(got, wanted) < 1e-4


def test_a_transposed_input_and_gradient():
    x, weight = torch.randn(33, 5).t(), torch.randn(33)
    check(
        x,
        weight,
        None,
        lambda x, w: kernels.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, (33,), w, 1e-5),
    )
    sliced = torch.randn(5, 80)[:, 7:40]
    check(
        sliced,
        weight,
        None,
        lambda x, w: kernels.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, (33,), w, 1e-5),
    )


def test_empty():
    assert kernels.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


@pytest.mark.parametrize("kernel, width", [("_forward_kernel", 8), ("_wide_forward_kernel", 20000)])
def test_the_kernel_really_runs(kernel, width, monkeypatch):
    monkeypatch.setattr(normalization, kernel, None)
    with pytest.raises(TypeError, match="NoneType"):
        kernels.rms_norm(torch.randn(3, width), torch.ones(width), 1e-5)
