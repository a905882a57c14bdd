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
from megatron5d.kernels.fp8 import gemm as fp8_gemm
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import quantize_tensor

FP8 = "fp8_matmul" in tuning.table(tuning.architecture(torch.device("cpu")))


def attention(dice: random.Random):
    """Output and gradients: of grouped heads, with any mask, of keys that are the queries' own or
    of other ranks."""
    dim = dice.choice([16, 32, 40, 64, 80, 96, 128, 192, 256])
    v_dim = dice.choice([dim, dim, dim, 64, 128])
    groups, share, b = dice.choice([1, 2]), dice.choice([1, 1, 2, 3, 8]), dice.choice([1, 1, 2])
    s = dice.randint(1, 300)
    t = dice.choice([s, s, s, dice.randint(1, 300)])
    rule = {"causal": dice.random() < 0.7, "softcap": dice.choice([0.0, 0.0, 3.0])}
    rule |= {"window": dice.choice([1, 17, 64, 130])} if dice.random() < 0.4 else {}
    if dice.random() < 0.4:
        cuts = torch.randint(0, dice.choice([2, 5, 40]), (b, max(s, t))).cumsum(1) // 3
        rule |= {"documents": cuts[:, :s]} | ({"k_documents": cuts[:, :t]} if s != t else {})
    if dice.random() < 0.3:
        rule |= {
            "q_positions": torch.randperm(max(s, t))[:s],
            "k_positions": torch.randperm(max(s, t))[:t],
        }
    q, k, v = (
        torch.randn(n, b, h, d).bfloat16().requires_grad_()
        for n, h, d in ((s, groups * share, dim), (t, groups, dim), (t, groups, v_dim))
    )
    sinks = torch.randn(groups * share, requires_grad=True) if dice.random() < 0.3 else None
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    plain = AttentionRule(
        dim**-0.5,
        rule["causal"],
        rule.get("window"),
        rule["softcap"],
        rule.get("documents"),
        rule.get("k_documents"),
        rule.get("q_positions"),
        rule.get("k_positions"),
    )
    want, want_lse = kernels.attention_reference(
        *wide[:3], plain, wide[3] if sinks is not None else None
    )
    got, lse = kernels.attention(q, k, v, scale=plain.scale, sinks=sinks, **rule)
    dout = torch.randn(want.shape).bfloat16()
    yield got, want
    yield lse.exp(), want_lse.exp()
    shares = dice.random() < 0.5
    with mock.patch.object(
        backward, "in_shares", lambda t, heads, width, processors: shares and width <= 128
    ):
        got = torch.autograd.grad(got, leaves, dout)
    yield from zip(got, torch.autograd.grad(want, wide, dout.double()))


def _offsets(dice: random.Random) -> torch.Tensor:
    """Of rows sorted by expert, of which some have none."""
    counts = [dice.choice([0, 1, dice.randint(2, 200)]) for _ in range(dice.randint(1, 6))]
    return torch.tensor([0, *counts]).cumsum(0)


def grouped(dice: random.Random):
    """The three GEMMs of experts."""
    offsets, n, k = _offsets(dice), 8 * dice.randint(1, 40), 8 * dice.randint(1, 40)
    rows, experts = int(offsets[-1]), len(offsets) - 1
    x, dy, weight = torch.randn(rows, k), torch.randn(rows, n), torch.randn(experts, n, k)
    x, dy, weight = x.bfloat16(), dy.bfloat16(), weight.bfloat16()
    yield (
        gemm.grouped_matmul(x, weight, offsets),
        gemm.grouped_matmul_reference(x.double(), weight.double(), offsets),
    )
    transposed = weight.double().transpose(1, 2)
    yield (
        gemm.grouped_input_grad(dy, weight, offsets),
        gemm.grouped_matmul_reference(dy.double(), transposed, offsets),
    )
    grad = torch.randn(experts, n, k)
    before = grad.double()
    want = before.clone()
    gemm.grouped_weight_grad(dy, x, offsets, grad)
    gemm.grouped_weight_grad_reference(dy.double(), x.double(), offsets, want)
    yield grad, want
    gemm.grouped_weight_grad(
        dy, x, offsets, alone := torch.full_like(grad, torch.nan), accumulate=False
    )
    yield alone, want - before


def fp8(dice: random.Random):
    """A GEMM of each pair of scales, written or added, and the experts' GEMM."""
    m, n, k = dice.randint(1, 300), dice.randint(1, 300), 16 * dice.randint(1, 30)
    ways = {
        "rows": quantize_rows,
        "blocks": lambda x: quantize_blocks(x)[0],
        "tensor": quantize_tensor,
    }
    a, b = (
        ways[dice.choice(["rows", "blocks", "tensor"])](torch.randn(size, k)) for size in (m, n)
    )
    into = torch.randn(m, n) if dice.random() < 0.5 else None
    want = fp8_gemm.fp8_matmul_reference(a, b, torch.float64) + (
        0 if into is None else into.double()
    )
    yield fp8_gemm.fp8_matmul(a, b, out_dtype=torch.float32, into=into), want
    offsets = _offsets(dice)
    x, weight = (
        quantize_rows(torch.randn(int(offsets[-1]), k)),
        quantize_blocks(torch.randn(len(offsets) - 1, n, k))[0],
    )
    exact = gemm.grouped_matmul_reference(
        x.dequantize(torch.float64), weight.dequantize(torch.float64), offsets
    )
    yield fp8_gemm.grouped_matmul_fp8(x, weight, offsets, torch.float32), exact


@pytest.mark.parametrize("number", numbers("0:3"))
def test_agrees_with_float64(number):
    dice = random.Random(number)
    torch.manual_seed(number)
    kinds = [attention, grouped, fp8] if FP8 else [attention, grouped]
    for got, want in kinds[number % len(kinds)](dice):
        assert got.shape == want.shape and bool(got.isfinite().all())
        error, size = (got.double() - want.detach()).norm(), want.norm()
        # 16 bits; of numbers around 1 where all but rounding cancels: one visible key, sinks (whose
        # gradients are sums of rounded terms over queries)
        summed = want.dim() == 1
        scale = max(size, want.numel() ** 0.5) if size < 0.1 or summed else size
        assert error <= (2e-2 if summed else 1e-2) * scale, (number, error)
