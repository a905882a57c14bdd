"""No tokens, rows or tensors: results are empty, gradients zero, and nothing is launched."""

import pytest
import torch

from megatron5d import kernels
from megatron5d.kernels import moe
from megatron5d.kernels.fp8.gemm import fp8_matmul, grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.norm_swiglu import norm_quantized, swiglu_quantized
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import amax_of, quantize_tensor_both_ways
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.gemm import grouped_matmul, grouped_weight_grad
from megatron5d.kernels.multi_tensor import (
    ADAMW_COLUMNS,
    AdamWSettings,
    TensorTable,
    adamw_step,
    squared_norm,
)

ROPE = torch.zeros(0, 1, 4), torch.zeros(0, 1, 4)  # cos and sin
OPERATIONS = {  # operation, shapes of the leaves and of its first output
    "rms_norm": (lambda x, w: kernels.rms_norm(x, w, 1e-5), [(0, 8), (8,)], (0, 8)),
    "layer_norm": (lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5), [(0, 8), (8,), (8,)], (0, 8)),
    "add_rms_norm": (
        lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-5)[0],
        [(0, 8), (0, 8), (8,)],
        (0, 8),
    ),
    "add_layer_norm": (
        lambda x, r, w, b: kernels.add_layer_norm(x, r, w, b, 1e-5)[0],
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
        lambda q, k: kernels.apply_rope(q, k, *ROPE)[0],
        [(0, 2, 3, 8), (0, 2, 1, 8)],
        (0, 2, 3, 8),
    ),
    "rope of a projection": (
        lambda x: kernels.apply_rope_to_projection(x * 1, (1, 1), *ROPE)[0],
        [(0, 2, 3, 8)],
        (0, 2, 1, 8),
    ),
    "attention": (
        lambda q, k, v: kernels.attention(q, k, v, scale=1.0)[0],
        [(0, 2, 4, 16), (0, 2, 2, 16), (0, 2, 2, 16)],
        (0, 2, 4, 16),
    ),
    "attention without keys": (
        lambda q, k, v: kernels.attention(q, k, v, scale=1.0)[0],
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_differentiable_operations(name):
    run, shapes, shape = OPERATIONS[name]
    leaves = [torch.randn(s).bfloat16().requires_grad_() for s in shapes]
    y = run(*leaves)
    assert y.shape == shape and not y.any()
    for x, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves, allow_unused=True)):
        assert grad is None or (grad.shape == x.shape and not grad.any())


@pytest.mark.fp8
def test_fp8():
    x, offsets = torch.zeros(0, 256), torch.zeros(3, dtype=torch.int64)
    rows = quantize_rows(x)
    assert rows.values.shape == (0, 256)
    q, transposed = quantize_tensor_both_ways(x)
    assert q.values.shape == (0, 256) and transposed.values.shape == (256, 0)
    assert amax_of(x) == 0 and q.scales.item() == 1
    assert fp8_transpose(rows).values.shape == (256, 0)
    assert swiglu_quantized(torch.zeros(0, 512)).values.shape == (0, 256)
    for centered in (False, True):
        normal, _ = norm_quantized(x, torch.ones(256), None, 1e-5, centered=centered)
        assert normal.values.shape == (0, 256)
    assert fp8_matmul(rows, quantize_blocks(torch.randn(130, 256))[0]).shape == (0, 130)
    experts, _ = quantize_blocks(torch.randn(2, 130, 256))
    assert grouped_matmul_fp8(rows, experts, offsets).shape == (0, 130)


@pytest.mark.fp8
@pytest.mark.parametrize("accumulate", [True, False])
def test_weight_grads_of_experts(accumulate):
    dy, x, offsets = torch.zeros(0, 130), torch.zeros(0, 256), torch.zeros(3, dtype=torch.int64)
    fp8_operands = (fp8_transpose(quantize_rows(rows), offsets) for rows in (dy, x))
    for weight_grad, operands in (
        (grouped_weight_grad, (dy.bfloat16(), x.bfloat16())),
        (grouped_weight_grad_fp8, fp8_operands),
    ):
        main_grad = torch.ones(2, 130, 256)
        weight_grad(*operands, offsets, main_grad, accumulate=accumulate)
        assert (main_grad == int(accumulate)).all()


@pytest.mark.parametrize("shapes", [[], [(0,)]])
def test_tables_of_tensors(shapes):
    settings, factor = AdamWSettings(0.1, 0.9, 0.9, 1e-8, 1), torch.ones(())
    table = TensorTable(**{name: [torch.zeros(s) for s in shapes] for name in ADAMW_COLUMNS})
    adamw_step(table, settings, factor, torch.zeros(len(shapes)))
    assert squared_norm(table).item() == 0
