"""SwiGLU, GELU and RoPE kernels against torch in float64."""

from functools import partial

import pytest
import torch

from megatron5d import kernels
from megatron5d.kernels.activation import GATED, KINDS, activation_reference, weighted_activation

pytestmark = pytest.mark.alike
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
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 14), (2, 254), (2, 258), (1, 8194)])
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

    compare(
        run(kernels.apply_rope, torch.float32),
        run(kernels.apply_rope_reference, torch.float64),
        q,
        k,
    )


def test_rope_of_views_into_one_qkv():
    qkv = torch.randn(4, 2, 3 * 6, 16)
    angle = torch.randn(4, 1, 8)
    q, k, _ = qkv.split(6, dim=2)
    got = kernels.apply_rope(q, k, angle.cos(), angle.sin())
    want = kernels.apply_rope_reference(q, k, angle.cos(), angle.sin())
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["geglu_tanh", "swiglu_clamped"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 5, 14), (2, 258)])
def test_gated(shape, dtype, kind):
    """The clamp's with values of up to 20: beyond its limits, where a gradient is 0."""
    run = partial(kernels.activate, kind=kind)
    compare(
        run,
        lambda x: activation_reference(x, None, kind),
        ((6 if kind == "swiglu_clamped" else 1) * torch.randn(shape)).to(dtype),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 14), (2, 258)])
def test_activations_backward_over_their_input(kind, shape):
    leaf = torch.randn(shape).bfloat16().requires_grad_()
    dy = torch.randn(*shape[:-1], shape[-1] // (2 if kind in GATED else 1)).bfloat16()
    (want,) = torch.autograd.grad(kernels.activate(leaf, kind), leaf, dy)
    held = leaf.clone()
    got = torch.autograd.grad(kernels.activate(held, kind, True), held, dy, retain_graph=True)[0]
    assert torch.equal(got, want) and got.data_ptr() == held.data_ptr()
    y = kernels.activate(held, kind, True)
    y.backward(dy, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
    with pytest.raises(ValueError, match="the leaf"):
        kernels.activate(leaf, kind, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, width", [(1, 1), (5, 7), (3, 258)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_experts(kind, rows, width, dtype):
    """Times a weight of each row, against float64; and over their input, to the bit."""
    x = torch.randn(rows, width * (2 if kind in GATED else 1)).to(dtype).requires_grad_()
    # not side by side
    weights, dy = torch.rand(rows, 2)[:, 1].requires_grad_(), torch.randn(rows, width).to(dtype)
    y = weighted_activation(x, weights, kind)
    found = (y, *torch.autograd.grad(y, (x, weights), dy))
    wide = [each.detach().double().requires_grad_() for each in (x, weights)]
    exact = kernels.activate(wide[0], kind) * wide[1][:, None]
    wanted = (exact, *torch.autograd.grad(exact, wide, dy.double()))
    for got, want in zip(found, wanted):
        assert (got.double() - want).norm() < (
            1e-5 if dtype == torch.float32 else 1e-2
        ) * want.norm() + 1e-6
    held = x.clone()
    again = torch.autograd.grad(weighted_activation(held, weights, kind, True), (held, weights), dy)
    assert all(map(torch.equal, again, found[1:])) and again[0].data_ptr() == held.data_ptr()


def test_activations_of_experts_refuse():
    x, weights = torch.randn(4, 6).requires_grad_(), torch.rand(4)
    for bad in ((x, weights, "relu"), (x, weights[:3], "swiglu"), (x, weights, "swiglu", True)):
        with pytest.raises(ValueError, match=r"not 'relu'|\(3,\) weights|the leaf"):
            weighted_activation(*bad)
    part = x.detach()[:, 1:5].requires_grad_() * 1  # a block of its own: written over
    before, slice_of = part.detach().clone(), (x * 1)[:, 1:5]
    for each in (part, slice_of):
        weighted_activation(each, weights, "swiglu", overwrite=True).sum().backward(
            retain_graph=True
        )
    assert torch.equal(slice_of, before) and not torch.equal(part, before)


def test_swiglu_of_a_slice_is_never_overwritten():
    whole = torch.randn(6, 50).requires_grad_()
    part = (whole * 1)[:, 3:37]
    before = part.detach().clone()
    kernels.swiglu(part, overwrite=True).sum().backward()
    assert torch.equal(part, before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "a, g, d, half, tables", [(4, 1, 16, 8, 1), (17, 2, 10, 3, 2), (1, 1, 2, 1, 2)]
)
def test_rope_of_a_projection(interleaved, a, g, d, half, tables):
    """Bit for bit what copies give, forward and backward, and the gradients that come in stay as
    they are."""
    x, angle = (
        torch.randn(5, 2, a + 2 * g, d).bfloat16().requires_grad_(),
        torch.randn(5, tables, half),
    )
    tables = angle.cos(), angle.sin()
    q, k, v = x.split([a, g, g], dim=2)
    want = *kernels.apply_rope(q, k, *tables, interleaved), v
    dy = [torch.randn(each.transpose(0, 2).shape).bfloat16().transpose(0, 2) for each in want]
    (d_want,) = torch.autograd.grad(want, x, dy)
    held = (x * 1).flatten(2)  # a view, as a layer's output is
    got = kernels.apply_rope_to_projection(held.unflatten(2, (-1, d)), (a, g), *tables, interleaved)
    assert got[0].data_ptr() == held.data_ptr() and all(map(torch.equal, got, want))
    kept = [each.clone() for each in dy]
    assert torch.equal(torch.autograd.grad(got, x, dy)[0], d_want) and all(
        map(torch.equal, dy, kept)
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "a, g, d, half, tables", [(4, 1, 24, 4, 1), (17, 2, 10, 3, 2), (1, 1, 2, 1, 2)]
)
def test_rope_of_the_ends(interleaved, a, g, d, half, tables):
    """The same bits as of a rotated copy beside what passes, forward and backward."""
    q, k = (
        torch.randn(5, 2, a, d).bfloat16().requires_grad_(),
        torch.randn(5, 2, g, 2 * half).bfloat16(),
    )
    k, angle = (
        k.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        torch.randn(5, tables, half),
    )
    tables = angle.cos(), angle.sin()
    ends, k_want = kernels.apply_rope(q[..., d - 2 * half :], k, *tables, interleaved)
    want = torch.cat((q[..., : d - 2 * half], ends), -1), k_want
    dy = [torch.randn(each.transpose(0, 2).shape).bfloat16().transpose(0, 2) for each in want]
    d_want = torch.autograd.grad(want, (q, k), dy)
    held = (q * 1).flatten(2)
    got = kernels.apply_rope_to_ends(held.unflatten(2, (-1, d)), k, *tables, interleaved)
    assert got[0].data_ptr() == held.data_ptr() and all(map(torch.equal, got, want))
    kept = [each.clone() for each in dy]
    assert all(map(torch.equal, torch.autograd.grad(got, (q, k), dy), d_want)) and all(
        map(torch.equal, dy, kept)
    )
    plain_q, plain_k = (x.detach().double() for x in (q, k))
    found = kernels.apply_rope_to_ends(plain_q, plain_k, *tables, interleaved)
    assert found[0].data_ptr() == plain_q.data_ptr()
    for one, other in zip(found, want):
        torch.testing.assert_close(one.bfloat16(), other, rtol=1e-2, atol=1e-2)


def test_rope_of_a_projection_where_it_is_not_allowed():
    angle = torch.randn(5, 1, 4)
    x = torch.randn(5, 2, 3, 8, requires_grad=True)

    def rotate(y, heads=(1, 1)):
        return kernels.apply_rope_to_projection(y, heads, angle.cos(), angle.sin())

    with pytest.raises(ValueError, match="leaf"):
        rotate(x)
    held = x * 1
    squares = held * held  # needs held
    rotate(held)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()
    with pytest.raises(ValueError, match="shares memory"):
        rotate(torch.randn(5, 1, 3, 8).expand(5, 2, 3, 8))
    k = torch.randn(5, 2, 1, 8)
    with pytest.raises(ValueError, match="leaf"):
        kernels.apply_rope_to_ends(x, k, angle.cos(), angle.sin())
    with pytest.raises(ValueError, match="rotating all of k requires heads of the rotary dim, 6"):
        kernels.apply_rope_to_ends(x * 1, k, angle.cos()[..., :3], angle.sin()[..., :3])
    with pytest.raises(ValueError, match="2 heads of q and 1 each of k and v require 4"):
        rotate(x * 1, (2, 1))
