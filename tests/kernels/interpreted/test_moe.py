"""Grouped GEMMs, permutation and routing against loops over single tokens and experts."""

from itertools import pairwise

import pytest
import torch
from kernel_lab.accuracy import TOLERANCE, relative_error

from megatron5d.kernels import gemm, moe, routing
from megatron5d.kernels.fp8.gemm import (
    grouped_matmul_fp8,
    grouped_weight_grad_fp8,
    grouped_weight_grad_fp8_reference,
)
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.providers.torch_gemm import clear_padding

# Hopper's tensor cores keep 14 bits of a sum.
FP8_SUMS = 1e-5 if torch.get_default_device().type == "cpu" else 5e-4
COUNTS = [[5, 0, 130, 1], [0, 0, 0, 7], [64, 64, 64, 64], [1], [0, 200]]


def offsets_of(counts):
    return torch.tensor([0, *counts]).cumsum(0)


def bfloat16(*shape):
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("n, k", [(48, 72), (200, 136)])
def test_grouped_matmul(counts, n, k):
    num_rows, padding = sum(counts), 3
    x, weight = bfloat16(num_rows + padding, k), bfloat16(len(counts), n, k)
    dy = bfloat16(num_rows + padding, n)
    dy[num_rows:] = 0
    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bounds = offsets_of(counts).tolist()
    rows = [wide_x[lo:hi] @ w.t() for (lo, hi), w in zip(pairwise(bounds), wide_weight)]
    exact = torch.cat([*rows, wide_x[num_rows:, :1] * torch.zeros(1, n)])
    y = gemm.grouped_matmul(x.requires_grad_(), weight.requires_grad_(), offsets_of(counts))
    assert relative_error(y, exact) < 5e-3 and not y[num_rows:].any()
    grads = torch.autograd.grad(y, (x, weight), dy)
    exact_grads = torch.autograd.grad(exact, (wide_x, wide_weight), dy.double())
    for grad, exact_grad in zip(grads, exact_grads):
        assert relative_error(grad, exact_grad) < 5e-3
    assert not grads[1][torch.tensor(counts) == 0].any()


@pytest.fixture
def nan_in_new_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("counts", [[5, 0, 70], [0, 0], [64]])
@pytest.mark.parametrize("padding", [0, 1, 200])
def test_rows_past_the_last_offset_are_zeros(counts, padding):
    offsets, weight, num_rows = offsets_of(counts), bfloat16(len(counts), 40, 72), sum(counts)
    for y in (
        gemm.grouped_matmul(bfloat16(num_rows + padding, 72), weight, offsets),
        gemm.grouped_input_grad(bfloat16(num_rows + padding, 40), weight, offsets),
    ):
        assert y.isfinite().all() and not y[num_rows:].any() and y[:num_rows].any(1).all()


def test_weight_grad_ignores_the_neighbors_infinities():
    dy, x, offsets = bfloat16(140, 32), bfloat16(140, 48), torch.tensor([0, 70])
    dy[70:], x[70:] = float("inf"), float("nan")
    exact = dy[:70].double().t() @ x[:70].double()
    main_grad = torch.ones(1, 32, 48)
    gemm.grouped_weight_grad(dy, x, offsets, main_grad)
    assert relative_error(main_grad[0] - 1, exact) < 1e-5
    main_grad.fill_(float("nan"))
    gemm.grouped_weight_grad(dy, x, offsets, main_grad, accumulate=False)
    assert relative_error(main_grad[0], exact) < 1e-5


def test_the_neighbors_infinite_weights_are_ignored():
    weight, offsets = bfloat16(3, 40, 72), torch.tensor([0, 5, 5, 9])
    weight[1] = float("inf")  # an expert without tokens
    assert gemm.grouped_matmul(bfloat16(9, 72), weight, offsets).isfinite().all()
    assert gemm.grouped_input_grad(bfloat16(9, 40), weight, offsets).isfinite().all()


@pytest.mark.fp8
def test_grouped_fp8():
    counts, n, k = [70, 0, 3], 200, 272
    x, weight = quantize_rows(torch.randn(sum(counts), k)), torch.randn(len(counts), n, k)
    blocks, offsets = quantize_blocks(weight)[0], offsets_of(counts)
    wide, wide_weight = x.dequantize(torch.float64), blocks.dequantize(torch.float64)
    exact = gemm.grouped_matmul_reference(wide, wide_weight, offsets)
    assert relative_error(grouped_matmul_fp8(x, blocks, offsets, torch.float32), exact) < FP8_SUMS


@pytest.mark.fp8
@pytest.mark.parametrize("counts", [[130, 0, 5], [0, 0, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_fp8_weight_grad(counts, dtype):
    n, k, offsets = 70, 130, offsets_of(counts)
    num_rows = sum(counts) + 2  # two rows of padding, which must not count
    dy, x = (
        fp8_transpose(quantize_rows(torch.randn(num_rows, width)), offsets) for width in (n, k)
    )
    main_grad = torch.randn(len(counts), n, k).to(dtype)
    before, exact = main_grad.double(), main_grad.double()
    grouped_weight_grad_fp8_reference(dy, x, offsets, exact)
    grouped_weight_grad_fp8(dy, x, offsets, main_grad)
    tolerance = FP8_SUMS if dtype == torch.float32 else 5e-3
    assert relative_error(main_grad, exact) < tolerance
    assert torch.equal(main_grad[1].double(), before[1])  # an expert without tokens
    grouped_weight_grad_fp8(dy, x, offsets, main_grad.fill_(float("nan")), accumulate=False)
    assert (main_grad.double() - (exact - before)).norm() < tolerance * exact.norm()
    assert not main_grad[1].any()
    with pytest.raises(ValueError, match=r"requires dy \[n, G·128\]"):
        grouped_weight_grad_fp8(x, dy, offsets, main_grad)


@pytest.mark.alike
@pytest.mark.parametrize(
    "n, k, experts", [(1, 1, 1), (7, 2, 5), (20, 3, 4), (700, 2, 3), (150, 8, 256), (64, 1, 40)]
)
def test_choices_are_sorted_stably(n, k, experts):
    """Several programs, experts without a choice, and choices of no expert, which come last."""
    choices = torch.randint(0, experts + 1, (n, k))
    order = moe.permutation(choices, experts)
    sorted_choices = sorted(range(n * k), key=choices.flatten().tolist().__getitem__)
    assert order.choice_of_row.tolist() == sorted_choices
    assert order.token_of_row.tolist() == [choice // k for choice in sorted_choices]
    assert order.row_of_choice.flatten()[order.choice_of_row].tolist() == list(range(n * k))
    assert order.offsets.tolist() == [int((choices < e).sum()) for e in range(experts + 1)]
    reference = moe.permutation_reference(choices, experts)
    for name in ("row_of_choice", "token_of_row", "offsets", "choice_of_row"):
        field, expected = getattr(order, name), getattr(reference, name)
        assert torch.equal(field, expected) and field.dtype == expected.dtype


@pytest.mark.alike
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "n, k, experts, h",
    [(1, 1, 1, 1), (7, 2, 5, 127), (20, 3, 4, 129), (3, 2, 300, 8), (1, 1, 1, 4097)],
)
def test_permute_and_unpermute(n, k, experts, h, dtype):
    choices = torch.stack([torch.randperm(experts)[:k] for _ in range(n)])
    order = moe.permutation(choices, experts)
    x, weights = torch.randn(n, h).to(dtype).requires_grad_(), torch.rand(n, k).requires_grad_()
    rows, row_weights = moe.permute_weighted(x, weights, order)
    _, tokens, choice = zip(*sorted((int(choices[t, j]), t, j) for t in range(n) for j in range(k)))
    assert torch.equal(rows, x[list(tokens)]) and torch.equal(rows, moe.permute(x, order))
    assert torch.equal(row_weights, weights[tokens, choice])
    y = moe.unpermute(rows * 2, order)
    assert relative_error(y, 2 * k * x) < TOLERANCE[dtype]
    dy, drow_weights = torch.randn(n, h).to(dtype), torch.randn(n * k)
    dx, dweights = torch.autograd.grad((y, row_weights), (x, weights), (dy, drow_weights))
    assert relative_error(dx, 2 * k * dy.double()) < 2 * TOLERANCE[dtype]
    assert torch.equal(dweights[tokens, choice], drow_weights)


@pytest.mark.alike
@pytest.mark.parametrize("missing", [0, 5, 40])
def test_missing_rows_count_as_zeros(missing):
    n, k, h = 20, 2, 130
    order = moe.permutation(torch.randint(0, 5, (n, k)), 5)
    rows = torch.randn(n * k - missing, h).requires_grad_()
    expected = torch.cat((rows, torch.zeros(missing, h)))[order.row_of_choice].sum(1)
    y, dy = moe.unpermute(rows, order), torch.randn(n, h)
    torch.testing.assert_close(y, expected)
    drows, expected_drows = (torch.autograd.grad(out, rows, dy) for out in (y, expected))
    torch.testing.assert_close(drows, expected_drows)


@pytest.mark.alike
def test_nothing_is_kept_for_the_backward():
    """The weights are applied in the experts, so no row is needed."""
    saved = []
    order = moe.permutation(torch.randint(0, 5, (20, 2)), 5)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        moe.unpermute(moe.permute(torch.randn(20, 8).requires_grad_(), order), order)
    assert not saved


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("is_biased", [False, True])
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
def test_route(n, experts, k, kind, normalized, scale, is_biased, is_forced):
    logits, dweights = torch.randn(n, experts).requires_grad_(), torch.randn(n, k)
    bias = torch.randn(experts) if is_biased else None
    forced = torch.stack([torch.randperm(experts)[:k] for _ in range(n)]) if is_forced else None
    indices, weights = routing.route(logits, k, kind, normalized, scale, bias, forced)
    wide = logits.detach().double().requires_grad_()
    scores = wide.softmax(1) if kind == "softmax" else wide.sigmoid()
    expected = (scores if bias is None else scores + bias).topk(k)[1] if forced is None else forced
    assert torch.equal(indices, expected)
    exact = scores.gather(1, expected)
    exact = scale * (exact / exact.sum(1, keepdim=True) if normalized else exact)
    assert relative_error(weights, exact) < 1e-6
    (dlogits,) = torch.autograd.grad(weights, logits, dweights)
    (exact_dlogits,) = torch.autograd.grad(exact, wide, dweights.double())
    error = (dlogits.double() - exact_dlogits).norm()
    assert error <= 2e-6 * exact_dlogits.norm() + 1e-6


@pytest.mark.parametrize(
    "n, experts, k", [(1, 1, 1), (9, 7, 3), (5, 64, 8), (4, 12, 12), (3, 129, 17)]
)
def test_top_experts(n, experts, k):
    scores = torch.randn(n, experts)
    assert torch.equal(routing.top_experts(scores, k), scores.topk(k)[1])


def test_ties_and_scores_that_are_not_finite():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0], [float("-inf")] * 4])
    assert routing.top_experts(scores, 3).tolist() == [[1, 2, 0], [0, 1, 2]]
    # NaN chooses existing experts, and its weights are NaN.
    scores = torch.tensor([[float("nan")] * 3, [5.0, float("nan"), 7.0]])
    assert routing.top_experts(scores, 2).tolist() == [[0, 1], [1, 2]]
    assert scores.sort(dim=1, descending=True, stable=True)[1][:, :2].tolist() == [[0, 1], [1, 2]]
    indices, weights = routing.route(scores, 2, "softmax", True, 1.0)
    assert indices.tolist() == [[0, 1], [0, 1]] and weights.isnan().all()


def best_of(scores, k):
    return scores.sort(dim=1, descending=True, stable=True)[1][:, :k]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_last_bits_of_equal_scores_do_not_choose(kind):
    """Scores on either side of any border of rounding, and negative ones."""
    values = torch.tensor([-3.0, 0.5, 1.0, 1.5])[torch.randint(4, (200, 24))]
    nearly = values * (1 + torch.randint(-2, 3, values.shape) * 2.0**-23)
    assert torch.equal(routing.top_experts(nearly, 5), best_of(values, 5))
    chosen, _ = routing.route(nearly / 8, 5, kind, True, 1.0)
    assert torch.equal(chosen, best_of(values, 5))
    apart = values * (1 + 2.0**-18 * torch.arange(24))
    assert torch.equal(routing.top_experts(apart, 5), best_of(apart, 5))


@pytest.mark.alike
@pytest.mark.parametrize("last", [0, 5, 16, 17, 40])
def test_clear_rest(last):
    """As after a library's grouped GEMM, which leaves rows past the last expert uninitialized."""
    y = torch.full((40, 1030), torch.nan, dtype=torch.bfloat16)
    y[:last] = 3.0
    offsets = torch.tensor([0, last // 2, last], dtype=torch.int32)
    assert clear_padding(y, offsets) is y
    assert (y[:last] == 3.0).all() and (y[last:] == 0).all()
