"""SwiGLU, GELU and RoPE kernels against torch in float64."""

from functools import partial

import pytest
import torch

from megatron5d import kernels
from megatron5d.kernels.activation import GATED, KINDS, activate, activation_reference

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


def input_of(kind, shape):
    """A random input of an activation with outputs of this shape."""
    return torch.randn(*shape[:-1], shape[-1] * (2 if kind in GATED else 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 129), (1, 4097)])
def test_activations(shape, dtype, kind):
    """Inputs of the clamped kind exceed its limits, beyond which gradients are 0."""
    x = (6 if kind == "swiglu_clamped" else 1) * input_of(kind, shape)
    compare(partial(activate, kind=kind), partial(activation_reference, kind=kind), x.to(dtype))


def test_swiglu_of_a_slice():
    swiglu, reference = (partial(run, kind="swiglu") for run in (activate, activation_reference))
    compare(swiglu, reference, torch.randn(6, 50)[:, 3:37])
    compare(swiglu, reference, torch.randn(34, 6).t())


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (2, 129)])
def test_activations_backward_over_their_input(kind, shape):
    leaf, dy = input_of(kind, shape).bfloat16().requires_grad_(), torch.randn(shape).bfloat16()
    (expected,) = torch.autograd.grad(activate(leaf, kind), leaf, dy)
    x = leaf.clone()
    y = activate(x, kind, overwrite=True)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert torch.equal(dx, expected) and dx.data_ptr() == x.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 258)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_experts(kind, shape, dtype):
    """Times a weight per row, against float64; and written over their input, to the bit."""
    x, dy = input_of(kind, shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    weights = torch.rand(shape[0], 2)[:, 1].requires_grad_()  # strided
    y = activate(x, kind, weights)
    results = (y, *torch.autograd.grad(y, (x, weights), dy))
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weights)]
    exact = activate(wide[0], kind) * wide[1][:, None]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    exact_grads = torch.autograd.grad(exact, wide, dy.double())
    for result, expected in zip(results, (exact, *exact_grads)):
        assert (result.double() - expected).norm() < tolerance * expected.norm() + 1e-6
    copy = x.clone()
    in_place = torch.autograd.grad(
        activate(copy, kind, weights, overwrite=True), (copy, weights), dy
    )
    assert (
        all(map(torch.equal, in_place, results[1:])) and in_place[0].data_ptr() == copy.data_ptr()
    )


def test_invalid_activations_are_rejected():
    x, weights = torch.randn(4, 6).requires_grad_(), torch.rand(4)
    with pytest.raises(ValueError, match="unknown activation 'relu': expected one of swiglu"):
        activate(x, "relu", weights)
    with pytest.raises(ValueError, match=r"one weight per row of x \(4, 6\) \(got \(3,\)\)"):
        activate(x, "swiglu", weights[:3])
    with pytest.raises(ValueError, match="would replace the leaf"):
        activate(x, "swiglu", weights, overwrite=True)


@pytest.mark.parametrize("weights", [None, torch.ones(4)])
def test_only_a_contiguous_input_is_overwritten(weights):
    strided = (torch.randn(4, 6).requires_grad_() * 1)[:, 1:5]
    contiguous = torch.randn(4, 4).requires_grad_() * 1
    for x in (strided, contiguous):
        before = x.detach().clone()
        activate(x, "swiglu", weights, overwrite=True).sum().backward()
        assert torch.equal(x, before) == (x is strided)


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
