"""RoPE kernels against torch in float64."""

import pytest
import torch
from kernel_lab.accuracy import TOLERANCE, compare_with_float64

from megatron5d import kernels

pytestmark = pytest.mark.alike


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

    compare_with_float64(
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
