"""Results in bfloat16 beside those of torch's own kernels: at least as close to float64, up to the
luck of a draw."""

import pytest
import torch
import torch.nn.functional as F

from megatron5d import kernels
from megatron5d.kernels.activation import activate
from megatron5d.kernels.gemm import grouped_matmul

pytestmark = pytest.mark.hopper

LUCK = 1.05


def attention(q, k, v):
    return kernels.attention(q, k, v, scale=0.125)[0]


def torch_attention(q, k, v):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125).permute(2, 0, 1, 3)


def one_expert(x, weight):
    return grouped_matmul(x, weight[None], torch.tensor([0, x.shape[0]]))


LABELS = torch.arange(7)
OPERATIONS = {  # ours, torch's, shapes of the inputs
    "attention": (attention, torch_attention, [(129, 2, 2, 64)] * 3),
    "rms_norm": (
        lambda x, w: kernels.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        [(7, 4097), (4097,)],
    ),
    "layer_norm": (
        lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        [(7, 4097), (4097,), (4097,)],
    ),
    "swiglu": (
        lambda x: activate(x, "swiglu"),
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        [(127, 254)],
    ),
    "swiglu of experts": (
        lambda x, w: activate(x, "swiglu", w[:, 0]),
        lambda x, w: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1] * w,
        [(127, 254), (127, 1)],
    ),
    "gelu": (lambda x: activate(x, "gelu"), F.gelu, [(127, 129)]),
    "cross_entropy": (
        lambda z: kernels.cross_entropy(z, LABELS),
        lambda z: F.cross_entropy(z, LABELS, reduction="none"),
        [(7, 4097)],
    ),
    "grouped_matmul": (one_expert, lambda x, w: x @ w.t(), [(127, 136), (72, 136)]),
}


def errors(run, leaves, dy, wanted):
    """Relative errors of the output and of each gradient."""
    out = run(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, dy.to(out.dtype))]
    return [
        ((got.double() - want).norm() / want.norm()).item()
        for got, want in zip(found, wanted, strict=True)
    ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_at_least_as_close_as_torch(name):
    ours, theirs, shapes = OPERATIONS[name]
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes
    ]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = theirs(*wide)
    dy = torch.randn(exact.shape, generator=generator).bfloat16()
    wanted = [exact.detach(), *torch.autograd.grad(exact, wide, dy.double())]
    for mine, other in zip(
        errors(ours, leaves, dy, wanted), errors(theirs, leaves, dy, wanted), strict=True
    ):
        assert mine < 1e-2 and mine <= LUCK * other, (mine, other)
