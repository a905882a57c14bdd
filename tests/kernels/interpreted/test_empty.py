"""No tokens, no rows, no tensors: every operation gives an empty result and gradients of zero, and
launches nothing."""

import pytest
import torch

from megatron5d import kernels
from megatron5d.kernels import moe
from megatron5d.kernels.fp8.gemm import fp8_matmul, grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.norm_swiglu import norm_quantized, swiglu_quantized
from megatron5d.kernels.fp8.quantize import Quantized, quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import amax_of, quantize_tensor_both_ways
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.gemm import grouped_matmul, grouped_weight_grad
from megatron5d.kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step, squared_norm


def leaf(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype).requires_grad_()


def tables(tokens, half):
    return torch.zeros(tokens, 1, half), torch.zeros(tokens, 1, half)


DIFFERENTIABLE = {  # operation, leaves, the shape of its first output
    "rms_norm": (lambda x, w: kernels.rms_norm(x, w, 1e-5), [(0, 8), (8,)], (0, 8)),
    "layer_norm": (lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5), [(0, 8), (8,), (8,)], (0, 8)),
    "add_rms_norm": (
        lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-5),
        [(0, 8), (0, 8), (8,)],
        (0, 8),
    ),
    "add_layer_norm": (
        lambda x, r, w, b: kernels.add_layer_norm(x, r, w, b, 1e-5),
        [(0, 8), (0, 8), (8,), (8,)],
        (0, 8),
    ),
    "swiglu": (lambda x: kernels.activate(x, "swiglu"), [(0, 3, 10)], (0, 3, 5)),
    "gelu": (lambda x: kernels.activate(x, "gelu"), [(0, 3)], (0, 3)),
    "swiglu of experts": (
        lambda x, w: kernels.activate(x, "swiglu", w),
        [(0, 10), (0,)],
        (0, 5),
    ),
    "rope": (
        lambda q, k: kernels.apply_rope(q, k, *tables(0, 4)),
        [(0, 2, 3, 8), (0, 2, 1, 8)],
        (0, 2, 3, 8),
    ),
    "rope of a projection": (
        lambda x: kernels.apply_rope_to_projection(x * 1, (1, 1), *tables(0, 4)),
        [(0, 2, 3, 8)],
        (0, 2, 1, 8),
    ),
    "attention": (
        lambda q, k, v: kernels.attention(q, k, v, scale=1.0),
        [(0, 2, 4, 16), (0, 2, 2, 16), (0, 2, 2, 16)],
        (0, 2, 4, 16),
    ),
    "attention without keys": (
        lambda q, k, v: kernels.attention(q, k, v, scale=1.0),
        [(3, 2, 4, 16), (0, 2, 2, 16), (0, 2, 2, 16)],
        (3, 2, 4, 16),
    ),
    "cross_entropy": (
        lambda z: kernels.cross_entropy(z, torch.zeros(0, dtype=torch.int64)),
        [(0, 9)],
        (0,),
    ),
    "grouped_matmul": (
        lambda x, w: grouped_matmul(x, w, torch.zeros(3, dtype=torch.int64)),
        [(0, 16), (2, 8, 16)],
        (0, 8),
    ),
    "permute": (
        lambda x: moe.permute(x, moe.permutation(torch.zeros(0, 2, dtype=torch.int64), 4)),
        [(0, 8)],
        (0, 8),
    ),
    "unpermute": (
        lambda x: moe.unpermute(x, moe.permutation(torch.zeros(3, 2).long(), 4)),
        [(0, 8)],
        (3, 8),
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_differentiable(name):
    run, shapes, want = DIFFERENTIABLE[name]
    leaves = [leaf(*shape) for shape in shapes]
    out = run(*leaves)
    out = out if isinstance(out, torch.Tensor) else out[0]
    assert out.shape == want and not out.any()
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves, allow_unused=True)):
        assert grad is None or (grad.shape == x.shape and not grad.any())


@pytest.mark.fp8
def test_fp8():
    x, weight, offsets = (
        torch.zeros(0, 256),
        torch.randn(130, 256),
        torch.zeros(3, dtype=torch.int64),
    )
    rows = quantize_rows(x)
    assert rows.values.shape == (0, 256)
    whole, whole_transposed = quantize_tensor_both_ways(x)
    assert whole.values.shape == (0, 256) and whole_transposed.values.shape == (256, 0)
    assert amax_of(x) == 0 and whole.scales.item() == 1
    blocks = quantize_blocks(weight)[0]
    assert fp8_matmul(rows, blocks).shape == (0, 130)
    assert fp8_transpose(rows).values.shape == (256, 0)
    assert swiglu_quantized(torch.zeros(0, 512)).values.shape == (0, 256)
    for centered in (False, True):
        assert norm_quantized(x, torch.ones(256), None, 1e-5, centered=centered)[
            0
        ].values.shape == (
            0,
            256,
        )
    stack = Quantized(torch.stack([blocks.values] * 2), torch.stack([blocks.scales] * 2), 128)
    assert grouped_matmul_fp8(rows, stack, offsets).shape == (0, 130)
    main = torch.ones(2, 130, 256)
    grouped_weight_grad(torch.zeros(0, 130).bfloat16(), x.bfloat16(), offsets, main)
    dy = fp8_transpose(quantize_rows(torch.zeros(0, 130)), offsets)
    grouped_weight_grad_fp8(dy, fp8_transpose(rows, offsets), offsets, main)
    assert bool((main == 1).all())
    grouped_weight_grad(
        torch.zeros(0, 130).bfloat16(), x.bfloat16(), offsets, main, accumulate=False
    )
    assert not main.any()
    grouped_weight_grad_fp8(
        dy, fp8_transpose(rows, offsets), offsets, main.fill_(1), accumulate=False
    )
    assert not main.any()


def test_many_tensors_of_nothing():
    names = ("master", "grad", "exp_avg", "exp_avg_sq")
    settings, one = AdamWSettings(0.1, 0.9, 0.9, 1e-8, 1), torch.ones(())
    for shapes in ([], [(0,)]):
        table = TensorTable(**{name: [torch.zeros(s) for s in shapes] for name in names})
        adamw_step(table, settings, one, torch.zeros(len(shapes)))
        assert squared_norm(table).item() == 0
