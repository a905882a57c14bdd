"""Random masks, lengths, head dims, documents, experts and scales on the emulated GPU, against
float64.

MEGATRON5D_RANDOM=first:last chooses other numbers.
"""

import random
from unittest import mock

import pytest
import torch
from random_configs import numbers

from megatron5d import kernels
from megatron5d.kernels import gemm, tuning
from megatron5d.kernels.flash_attention import backward
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.fp8.gemm import fp8_matmul, fp8_matmul_reference, grouped_matmul_fp8
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import quantize_tensor

HAS_FP8 = "fp8_matmul" in tuning.table(tuning.architecture(torch.device("cpu")))


def attention(dice: random.Random):
    """Yields output, log-sum-exp and gradients of grouped heads with any mask; keys belong to the
    queries or to other ranks."""
    dim = dice.choice([16, 32, 40, 64, 80, 96, 128, 192, 256])
    v_dim = dice.choice([dim, dim, dim, 64, 128])
    groups, heads_a_group = dice.choice([1, 2]), dice.choice([1, 1, 2, 3, 8])
    b, s = dice.choice([1, 1, 2]), dice.randint(1, 300)
    t = dice.choice([s, s, s, dice.randint(1, 300)])
    rule = _attention_rule(dice, b, s, t)
    heads = groups * heads_a_group
    shapes = (s, b, heads, dim), (t, b, groups, dim), (t, b, groups, v_dim)
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    if has_sinks := dice.random() < 0.3:
        leaves.append(torch.randn(heads, requires_grad=True))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact, exact_lse = kernels.attention_reference(
        *wide[:3], AttentionRule(dim**-0.5, **rule), wide[3] if has_sinks else None
    )
    sinks = leaves[3] if has_sinks else None
    out, lse = kernels.attention(*leaves[:3], scale=dim**-0.5, sinks=sinks, **rule)
    dout = torch.randn(exact.shape).bfloat16()
    yield out, exact
    yield lse.exp(), exact_lse.exp()
    in_shares = dice.random() < 0.5
    with mock.patch.object(
        backward, "in_shares", lambda t, heads, width, processors: in_shares and width <= 128
    ):
        grads = torch.autograd.grad(out, leaves, dout)
    yield from zip(grads, torch.autograd.grad(exact, wide, dout.double()))


def _attention_rule(dice: random.Random, b: int, s: int, t: int) -> dict:
    rule = {"causal": dice.random() < 0.7, "softcap": dice.choice([0.0, 0.0, 3.0])}
    if dice.random() < 0.4:
        rule["window"] = dice.choice([1, 17, 64, 130])
    if dice.random() < 0.4:
        documents = torch.randint(0, dice.choice([2, 5, 40]), (b, max(s, t))).cumsum(1) // 3
        rule["documents"] = documents[:, :s]
        if s != t:
            rule["k_documents"] = documents[:, :t]
    if dice.random() < 0.3:
        rule["q_positions"] = torch.randperm(max(s, t))[:s]
        rule["k_positions"] = torch.randperm(max(s, t))[:t]
    return rule


def _offsets(dice: random.Random) -> torch.Tensor:
    """Offsets of experts, some of which have no rows."""
    counts = [dice.choice([0, 1, dice.randint(2, 200)]) for _ in range(dice.randint(1, 6))]
    return torch.tensor([0, *counts]).cumsum(0)


def grouped(dice: random.Random):
    """Yields the three GEMMs of experts."""
    offsets, n, k = _offsets(dice), 8 * dice.randint(1, 40), 8 * dice.randint(1, 40)
    rows, experts = int(offsets[-1]), len(offsets) - 1
    x, dy, weight = (torch.randn(s).bfloat16() for s in ((rows, k), (rows, n), (experts, n, k)))
    wide_x, wide_dy, wide_weight = x.double(), dy.double(), weight.double()
    y = gemm.grouped_matmul(x, weight, offsets)
    yield y, gemm.grouped_matmul_reference(wide_x, wide_weight, offsets)
    dx = gemm.grouped_input_grad(dy, weight, offsets)
    yield dx, gemm.grouped_matmul_reference(wide_dy, wide_weight.mT, offsets)
    exact = torch.zeros(experts, n, k, dtype=torch.float64)
    gemm.grouped_weight_grad_reference(wide_dy, wide_x, offsets, exact)
    for before, accumulate in ((torch.randn(experts, n, k), True), (torch.nan, False)):
        main_grad = torch.empty(experts, n, k)
        main_grad[:] = before
        gemm.grouped_weight_grad(dy, x, offsets, main_grad, accumulate=accumulate)
        yield main_grad, exact + before if accumulate else exact


def fp8(dice: random.Random):
    """Yields a GEMM with random kinds of scales, stored or added, and the experts' GEMM."""
    m, n, k = dice.randint(1, 300), dice.randint(1, 300), 16 * dice.randint(1, 30)
    quantizers = [quantize_rows, lambda x: quantize_blocks(x)[0], quantize_tensor]
    a, b = (dice.choice(quantizers)(torch.randn(size, k)) for size in (m, n))
    exact, into = fp8_matmul_reference(a, b, torch.float64), None
    if dice.random() < 0.5:
        into = torch.randn(m, n)
        exact += into
    yield fp8_matmul(a, b, out_dtype=torch.float32, into=into), exact
    offsets = _offsets(dice)
    x = quantize_rows(torch.randn(int(offsets[-1]), k))
    weight, _ = quantize_blocks(torch.randn(len(offsets) - 1, n, k))
    exact = gemm.grouped_matmul_reference(
        x.dequantize(torch.float64), weight.dequantize(torch.float64), offsets
    )
    yield grouped_matmul_fp8(x, weight, offsets, torch.float32), exact


@pytest.mark.parametrize("number", numbers("0:3"))
def test_agrees_with_float64(number):
    dice = random.Random(number)
    torch.manual_seed(number)
    kinds = [attention, grouped, fp8] if HAS_FP8 else [attention, grouped]
    for x, exact in kinds[number % len(kinds)](dice):
        assert x.shape == exact.shape and x.isfinite().all()
        error, size = (x.double() - exact.detach()).norm(), exact.norm()
        # Relative to numbers around 1 where all but rounding cancels: with a single visible key,
        # and for sinks, whose gradients are sums of rounded terms over queries.
        is_sum = exact.dim() == 1
        scale = max(size, exact.numel() ** 0.5) if size < 0.1 or is_sum else size
        assert error <= (2e-2 if is_sum else 1e-2) * scale, (number, error)
