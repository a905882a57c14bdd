"""RMSNorm and LayerNorm kernels against torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from kernel_lab.accuracy import TOLERANCE, compare_with_float64, relative_error

from megatron5d import kernels
from megatron5d.kernels import norm as normalization

pytestmark = [pytest.mark.alike, pytest.mark.interpreted]
EPS = 1e-5
# The last shape takes the kernels for wide rows.
SHAPES = [(1, 1), (5, 7), (3, 2, 127), (33, 129), (3, 1000), (9, 4097)]


def compare_rms_norm(x, weight):
    compare_with_float64(
        lambda x, w: kernels.rms_norm(x, w, EPS),
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        x,
        weight,
        absolute=1e-5,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype):
    compare_rms_norm(torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype))


def test_rms_norm_of_strided_rows():
    compare_rms_norm(torch.randn(33, 5).t(), torch.randn(33))
    compare_rms_norm(torch.randn(5, 80)[:, 7:40], torch.randn(33))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_layer_norm(shape, has_bias):
    compare_with_float64(
        lambda x, w, b=None: kernels.layer_norm(x, w, b, EPS),
        lambda x, w, b=None: F.layer_norm(x, w.shape, w, b, EPS),
        torch.randn(shape) + 3,
        *torch.randn(1 + has_bias, shape[-1]).unbind(),
        absolute=1e-5,
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("width", [100, 1500])
def test_norm_and_residual_stream(width, has_residual, centered, dtype):
    """Gradients of the norm and the stream, of the norm alone, and of the stream alone."""
    streams = [torch.randn(3, 3, width).to(dtype) for _ in range(1 + has_residual)]
    weights = [torch.randn(width).to(dtype) for _ in range(1 + centered)]

    def run(x, *leaves):
        residual = leaves[0] if has_residual else None
        norm = kernels.add_layer_norm if centered else kernels.add_rms_norm
        y, stream = norm(x, residual, *leaves[has_residual:], EPS)
        assert torch.equal(stream, x + residual if has_residual else x)
        return y, stream

    def exact(x, *leaves):
        stream = x + leaves[0] if has_residual else x * 1
        norm = F.layer_norm if centered else F.rms_norm
        return norm(stream, (width,), *leaves[has_residual:], eps=EPS), stream

    for used in (slice(0, 2), slice(0, 1), slice(1, 2)):
        compare_with_float64(
            lambda *leaves, used=used: run(*leaves)[used],
            lambda *leaves, used=used: exact(*leaves)[used],
            *(x.detach() for x in (*streams, *weights)),
            absolute=1e-5,
        )


@pytest.mark.parametrize("width", [18432, 4099])
def test_wide_rows_far_from_zero(width):
    """mean(x²) - mean(x)² would be off by a tenth here, even if each lane had its own mean."""
    x = (torch.randn(2, width) + torch.linspace(1000, 1010, width)).requires_grad_()
    weight, bias, wide = torch.randn(width), torch.randn(width), x.detach().double()
    y = kernels.layer_norm(x, weight, bias, EPS)
    exact = F.layer_norm(wide.requires_grad_(), (width,), weight.double(), bias.double(), EPS)
    assert relative_error(y, exact) < 5e-5
    dy = torch.randn(2, width)
    (dx,), (exact_dx,) = (
        torch.autograd.grad(out, leaf, dy.to(out.dtype)) for out, leaf in ((y, x), (exact, wide))
    )
    assert relative_error(dx, exact_dx) < 1e-4


@pytest.mark.parametrize("kernel, width", [("_forward_kernel", 8), ("_wide_forward_kernel", 20000)])
def test_the_kernel_runs(kernel, width, monkeypatch):
    monkeypatch.setattr(normalization, kernel, None)
    with pytest.raises(TypeError, match="NoneType"):
        kernels.rms_norm(torch.randn(3, width), torch.ones(width), EPS)
