"""SwiGLU, GELU and RoPE kernels against torch in float64."""

import pytest
import torch

import kernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def relative(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def compare(run, reference, *inputs):
    """Output and gradient of a kernel against the reference on float64 copies."""
    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got, want = run(*leaves), reference(*wide)
    got, want = ([y] if isinstance(y, torch.Tensor) else list(y) for y in (got, want))
    douts = [torch.randn(y.shape).to(y.dtype) for y in got]
    tolerance = TOLERANCE[inputs[0].dtype]
    grads = torch.autograd.grad(got, leaves, douts)
    wanted = torch.autograd.grad(want, wide, [d.double() for d in douts])
    for a, b in (*zip(got, want), *zip(grads, wanted)):
        assert a.shape == b.shape and a.dtype == inputs[0].dtype
        assert relative(a, b) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 14), (2, 254), (2, 258)])
def test_swiglu(shape, dtype):
    compare(kernels.swiglu, kernels.swiglu_reference, torch.randn(shape).to(dtype))


def test_swiglu_of_a_slice():
    compare(kernels.swiglu, kernels.swiglu_reference, torch.randn(6, 50)[:, 3:37])
    compare(kernels.swiglu, kernels.swiglu_reference, torch.randn(34, 6).t())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 43), (4097,)])
def test_gelu(shape, dtype, approximate):
    run = lambda x: kernels.gelu(x, approximate)  # noqa: E731
    compare(run, lambda x: kernels.gelu_reference(x, approximate), torch.randn(shape).to(dtype))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "a, g, d, k_dim, half, batch_of_table",
    [(4, 2, 16, 16, 8, 1), (7, 1, 10, 8, 3, 2), (5, 5, 24, 12, 6, 2), (1, 1, 2, 2, 1, 1)],
)
def test_rope(interleaved, dtype, a, g, d, k_dim, half, batch_of_table):
    s, b = 5, 2
    q, k = torch.randn(s, b, a, d).to(dtype), torch.randn(s, b, g, k_dim).to(dtype)
    angle = torch.randn(s, batch_of_table, half)

    def run(op, dtype):
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return lambda q, k: op(q, k, cos, sin, interleaved)

    compare(run(kernels.apply_rope, torch.float32), run(kernels.apply_rope_reference, torch.float64), q, k)


def test_rope_of_views_into_one_qkv():
    qkv = torch.randn(4, 2, 3 * 6, 16)
    angle = torch.randn(4, 1, 8)
    q, k, _ = qkv.split(6, dim=2)
    got = kernels.apply_rope(q, k, angle.cos(), angle.sin())
    want = kernels.apply_rope_reference(q, k, angle.cos(), angle.sin())
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
