"""Grouped GEMMs, permutation and top-k against loops over single tokens and experts."""

import pytest
import torch

from megatron5d.kernels import gemm as grouped
from megatron5d.kernels import moe, routing
from megatron5d.kernels.fp8.gemm import (
    grouped_matmul_fp8,
    grouped_weight_grad_fp8,
    grouped_weight_grad_fp8_reference,
)
from megatron5d.kernels.fp8.quantize import Quantized, quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.providers.torch_gemm import clear_rest

# Hopper's tensor cores keep 14 bits of a sum
FP8_SUMS = 1e-5 if torch.get_default_device().type == "cpu" else 5e-4
COUNTS = [[5, 0, 130, 1], [0, 0, 0, 7], [64, 64, 64, 64], [1], [0, 200]]


def relative(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("n, k", [(48, 72), (200, 136)])
def test_grouped_matmul(counts, n, k):
    rows, experts = sum(counts) + 3, len(counts)  # three rows of padding
    x, weight = torch.randn(rows, k).bfloat16(), torch.randn(experts, n, k).bfloat16()
    offsets = torch.tensor([0, *counts]).cumsum(0)
    wide_x, wide_w = x.double().requires_grad_(), weight.double().requires_grad_()
    bounds = offsets.tolist()
    parts = [wide_x[lo:hi] @ w.t() for lo, hi, w in zip(bounds, bounds[1:], wide_w)]
    want = torch.cat([*parts, wide_x[bounds[-1] :, :1] * torch.zeros(1, n)])
    got = grouped.grouped_matmul(x.requires_grad_(), weight.requires_grad_(), offsets)
    assert relative(got, want) < 5e-3 and not got[bounds[-1] :].any()
    dy = torch.randn(rows, n).bfloat16()
    dy[bounds[-1] :] = 0
    grads = torch.autograd.grad(got, (x, weight), dy)
    for one, expected in zip(grads, torch.autograd.grad(want, (wide_x, wide_w), dy.double())):
        assert relative(one, expected) < 5e-3
    assert not grads[1][[i for i, count in enumerate(counts) if count == 0]].any()


@pytest.mark.parametrize("counts", [[5, 0, 70], [0, 0], [64]])
def test_rows_past_the_last_offset_are_zeros(counts, monkeypatch):
    """Whatever their memory held: none of them, one, and more than a tile."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(float("nan"))
    )
    offsets, weight = (
        torch.tensor([0, *counts]).cumsum(0),
        torch.randn(len(counts), 40, 72).bfloat16(),
    )
    for padding in (0, 1, 200):
        x = torch.randn(sum(counts) + padding, 72).bfloat16()
        for y in (
            grouped.grouped_matmul(x, weight, offsets),
            grouped.grouped_input_grad(x[:, :40].contiguous(), weight, offsets),
        ):
            assert (
                y.isfinite().all() and not y[sum(counts) :].any() and y[: sum(counts)].any(1).all()
            )


def test_weight_grad_adds_and_ignores_the_neighbours_infinities():
    dy, x = torch.randn(140, 32).bfloat16(), torch.randn(140, 48).bfloat16()
    dy[70:], x[70:] = float("inf"), float("nan")
    main = torch.ones(1, 32, 48)
    grouped.grouped_weight_grad(dy, x, torch.tensor([0, 70]), main)
    want = dy[:70].double().t() @ x[:70].double()
    assert relative(main - 1, want) < 1e-5
    grouped.grouped_weight_grad(
        dy, x, torch.tensor([0, 70]), main.fill_(float("nan")), accumulate=False
    )
    assert relative(main, want) < 1e-5


def test_the_neighbours_infinite_weights_stay_theirs():
    weight, offsets = torch.randn(3, 40, 72).bfloat16(), torch.tensor([0, 5, 5, 9])
    weight[1] = float("inf")  # an expert without tokens
    assert grouped.grouped_matmul(torch.randn(9, 72).bfloat16(), weight, offsets).isfinite().all()
    assert (
        grouped.grouped_input_grad(torch.randn(9, 40).bfloat16(), weight, offsets).isfinite().all()
    )


@pytest.mark.fp8
def test_grouped_fp8():
    counts, n, k = [70, 0, 3], 200, 272
    offsets = torch.tensor([0, *counts]).cumsum(0)
    x = quantize_rows(torch.randn(sum(counts), k))
    blocks = [quantize_blocks(torch.randn(n, k))[0] for _ in counts]
    values = torch.stack([b.values.view(torch.uint8) for b in blocks]).view(torch.float8_e4m3fn)
    weight = Quantized(values, torch.stack([b.scales for b in blocks]), 128)
    got = grouped_matmul_fp8(x, weight, offsets, torch.float32)
    bounds = offsets.tolist()
    wide = x.dequantize(torch.float64)
    want = torch.cat(
        [
            wide[lo:hi] @ b.dequantize(torch.float64).t()
            for lo, hi, b in zip(bounds, bounds[1:], blocks)
        ]
    )
    assert relative(got, want) < FP8_SUMS


@pytest.mark.fp8
@pytest.mark.parametrize("counts", [[130, 0, 5], [0, 0, 1]])
def test_grouped_fp8_weight_grad(counts):
    n, k = 70, 130
    offsets = torch.tensor([0, *counts]).cumsum(0)
    rows = sum(counts) + 2  # two rows of padding, which must count nowhere
    dy, x = (fp8_transpose(quantize_rows(torch.randn(rows, width)), offsets) for width in (n, k))
    for main in (torch.randn(len(counts), n, k), torch.randn(len(counts), n, k).bfloat16()):
        want = main.double()
        grouped_weight_grad_fp8_reference(dy, x, offsets, want)
        before = main.double()
        grouped_weight_grad_fp8(dy, x, offsets, main)
        tolerance = FP8_SUMS if main.dtype == torch.float32 else 5e-3
        assert (main.double() - want).norm() < tolerance * want.norm()
        assert torch.equal(main.double()[1], before[1])  # an expert without tokens
        grouped_weight_grad_fp8(dy, x, offsets, main.fill_(float("nan")), accumulate=False)
        assert (main.double() - (want - before)).norm() < tolerance * want.norm() and not main[
            1
        ].any()
    with pytest.raises(ValueError, match="weight gradient"):
        grouped_weight_grad_fp8(x, dy, offsets, main)


@pytest.mark.alike
@pytest.mark.parametrize(
    "n, k, experts", [(1, 1, 1), (7, 2, 5), (20, 3, 4), (700, 2, 3), (150, 8, 256), (64, 1, 40)]
)
def test_choices_are_sorted_stably(n, k, experts):
    """Several programs, experts without a choice, and choices that no expert has (they come
    last)."""
    chosen = torch.randint(0, experts + 1, (n, k))
    where = moe.permutation(chosen, experts)
    order = sorted(range(n * k), key=chosen.flatten().tolist().__getitem__)
    assert where.choice_of_row.tolist() == order and where.token_of_row.tolist() == [
        choice // k for choice in order
    ]
    assert where.row_of_choice.flatten()[where.choice_of_row].tolist() == list(range(n * k))
    ends = [int((chosen < expert).sum()) for expert in range(experts + 1)]
    assert where.offsets.tolist() == ends and where.offsets.dtype == torch.int32
    plain = moe.permutation_reference(chosen, experts)
    for name in ("row_of_choice", "token_of_row", "offsets", "choice_of_row"):
        one, other = getattr(where, name), getattr(plain, name)
        assert torch.equal(one, other) and one.dtype == other.dtype


@pytest.mark.alike
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "n, k, experts, h",
    [(1, 1, 1, 1), (7, 2, 5, 127), (20, 3, 4, 129), (3, 2, 300, 8), (1, 1, 1, 4097)],
)
def test_permute_and_back(n, k, experts, h, dtype):
    choices = torch.stack([torch.randperm(experts)[:k] for _ in range(n)])
    where = moe.permutation(choices, experts)
    x, weights = torch.randn(n, h).to(dtype).requires_grad_(), torch.rand(n, k).requires_grad_()
    rows, by_row = moe.permute_weighted(x, weights, where)
    order = sorted((int(e), t, j) for t in range(n) for j, e in enumerate(choices[t]))
    assert torch.equal(rows, x[[t for _, t, _ in order]]) and torch.equal(
        rows, moe.permute(x, where)
    )
    assert by_row.tolist() == [weights[t, j].item() for _, t, j in order]
    y = moe.unpermute(rows * 2, where)
    assert relative(y, 2 * k * x.detach().double()) < (1e-6 if dtype == torch.float32 else 5e-3)
    dy, drow = torch.randn(n, h).to(dtype), torch.randn(n * k)
    dx, dweights = torch.autograd.grad((y, by_row), (x, weights), (dy, drow))
    assert relative(dx, 2 * k * dy.double()) < (1e-6 if dtype == torch.float32 else 1e-2)
    for row, (_, t, j) in enumerate(order):
        assert dweights[t, j] == drow[row]


@pytest.mark.alike
@pytest.mark.parametrize("missing", [0, 5, 40])
def test_rows_that_never_came_count_as_zeros(missing):
    n, k, h = 20, 2, 130
    where = moe.permutation(torch.randint(0, 5, (n, k)), 5)
    rows = torch.randn(n * k - missing, h).requires_grad_()
    want = torch.cat((rows, torch.zeros(missing, h)))[where.row_of_choice].sum(1)
    y = moe.unpermute(rows, where)
    torch.testing.assert_close(y, want)
    dy = torch.randn(n, h)
    torch.testing.assert_close(
        torch.autograd.grad(y, rows, dy), torch.autograd.grad(want, rows, dy)
    )


@pytest.mark.alike
def test_nothing_is_kept_for_the_backward():
    """No row: the weights are applied in the experts."""
    kept = []
    where = moe.permutation(torch.randint(0, 5, (20, 2)), 5)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        moe.unpermute(moe.permute(torch.randn(20, 8).requires_grad_(), where), where)
    assert not kept


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "kind, normalized, scale",
    [
        ("softmax", False, 1.0),
        ("softmax", True, 1.0),
        ("sigmoid", True, 2.5),
        ("sigmoid", False, 1.0),
    ],
)
@pytest.mark.parametrize(
    "n, experts, k",
    [
        pytest.param(1, 1, 1, marks=pytest.mark.hopper),
        pytest.param(9, 7, 3, marks=pytest.mark.hopper),
        (5, 64, 8),
    ],
)
def test_route(n, experts, k, kind, normalized, scale, biased, forced):
    logits, dweights = torch.randn(n, experts).requires_grad_(), torch.randn(n, k)
    bias = torch.randn(experts) if biased else None
    given = torch.stack([torch.randperm(experts)[:k] for _ in range(n)]) if forced else None
    chosen, weights = routing.route(logits, k, kind, normalized, scale, bias, given)
    wide = logits.detach().double().requires_grad_()
    scores = wide.softmax(1) if kind == "softmax" else wide.sigmoid()
    order = (scores if bias is None else scores + bias).topk(k)[1] if given is None else given
    assert torch.equal(chosen, order)
    want = scores.gather(1, order)
    want = scale * (want / want.sum(1, keepdim=True) if normalized else want)
    assert relative(weights, want) < 1e-6
    (got,), (expected,) = (
        torch.autograd.grad(weights, logits, dweights),
        torch.autograd.grad(want, wide, dweights.double()),
    )
    assert (got.double() - expected).norm() <= 2e-6 * expected.norm() + 1e-6


@pytest.mark.parametrize(
    "n, experts, k", [(1, 1, 1), (9, 7, 3), (5, 64, 8), (4, 12, 12), (3, 129, 17)]
)
def test_top_experts(n, experts, k):
    scores = torch.randn(n, experts)
    assert torch.equal(routing.top_experts(scores, k), scores.topk(k)[1])


def test_ties_and_impossible_scores():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0], [float("-inf")] * 4])
    assert routing.top_experts(scores, 3).tolist() == [[1, 2, 0], [0, 1, 2]]
    # experts that exist, and NaN continues
    scores = torch.tensor([[float("nan")] * 3, [5.0, float("nan"), 7.0]])
    assert routing.top_experts(scores, 2).tolist() == [[0, 1], [1, 2]]
    assert scores.sort(dim=1, descending=True, stable=True)[1][:, :2].tolist() == [[0, 1], [1, 2]]
    chosen, weights = routing.route(scores, 2, "softmax", True, 1.0)
    assert chosen.tolist() == [[0, 1], [0, 1]] and weights.isnan().all()


@pytest.mark.alike
@pytest.mark.parametrize("last", [0, 5, 16, 17, 40])
def test_rows_past_the_last_expert_are_cleared(last):
    """As after a library's grouped GEMM, which leaves there what there was; nothing else is
    touched."""
    y = torch.full((40, 1030), torch.nan, dtype=torch.bfloat16)
    y[:last] = 3.0
    offsets = torch.tensor([0, last // 2, last], dtype=torch.int32)
    assert clear_rest(y, offsets) is y
    assert (y[:last] == 3.0).all() and (y[last:] == 0).all()
