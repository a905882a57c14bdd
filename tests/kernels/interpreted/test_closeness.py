"""bfloat16 results at least as close to float64 as those of torch's own kernels, up to chance."""

import pytest
import torch
import torch.nn.functional as F
from kernel_lab.accuracy import relative_error

from megatron5d import kernels
from megatron5d.kernels.gemm import grouped_matmul

pytestmark = pytest.mark.hopper

CHANCE = 1.05


def attention(q, k, v):
    return kernels.attention(q, k, v, scale=0.125)[0]


def torch_attention(q, k, v):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125).permute(2, 0, 1, 3)


def torch_swiglu(x, weights=None):
    gate, up = x.chunk(2, -1)
    y = F.silu(gate) * up
    return y if weights is None else y * weights


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
    "swiglu": (lambda x: kernels.activate(x, "swiglu"), torch_swiglu, [(127, 254)]),
    "swiglu of experts": (
        lambda x, w: kernels.activate(x, "swiglu", w[:, 0]),
        torch_swiglu,
        [(127, 254), (127, 1)],
    ),
    "gelu": (lambda x: kernels.activate(x, "gelu"), F.gelu, [(127, 129)]),
    "cross_entropy": (
        lambda z: kernels.cross_entropy(z, LABELS),
        lambda z: F.cross_entropy(z, LABELS, reduction="none"),
        [(7, 4097)],
    ),
    "grouped_matmul": (one_expert, lambda x, w: x @ w.t(), [(127, 136), (72, 136)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_at_least_as_close_as_torch(name):
    ours, torch_operation, shapes = OPERATIONS[name]
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes
    ]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    dy = torch.randn(torch_operation(*wide).shape, generator=generator).bfloat16()

    def results(run, leaves):
        y = run(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    exact = results(torch_operation, wide)
    for x, torch_x, exact_x in zip(results(ours, leaves), results(torch_operation, leaves), exact):
        error, torch_error = relative_error(x, exact_x), relative_error(torch_x, exact_x)
        assert error < 1e-2 and error <= CHANCE * torch_error, (error, torch_error)
