"""Moves tokens to their experts and back.

A token t chooses experts e[t, 1..k]. Rows are sorted by expert, stably, so that each expert
receives its tokens in order:
    permute     row row_of_choice[t, j] = x[t]
    unpermute   y[t] = sum_j row row_of_choice[t, j]
Each is the transpose of the other, and so its gradient. Nothing is kept for the backward, because
the router's weights are applied in the experts (`activation.py`). Counts and offsets stay on the
device.

Choices are sorted by counting, in two launches. First, each program counts the experts among its
choices. Then each program adds up all counts and those of the programs before it, and so knows the
row of its first choice of every expert.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import (
    FirstOrderFunction,
    cdiv,
    jit,
    load_float32,
    next_power_of_2,
    rows_of,
    statistics_dtype,
    tl,
)


@dataclass(frozen=True)
class Permutation:
    """Where each choice of each token goes.

    Args:
        row_of_choice: `[n, k]` int64. A choice without a row has the number of rows.
        token_of_row: `[n·k]` int64.
        offsets: `[E + 1]` int32, where each expert's rows begin and end.
        choice_of_row: `[n·k]` int64, the row's choice, counted over all tokens.
        filled: bool `[rows]`, whether a row belongs to a choice, if each expert has a fixed number
            of rows; the other rows hold an arbitrary token. None = every choice has its row.
    """

    row_of_choice: Tensor
    token_of_row: Tensor
    offsets: Tensor
    choice_of_row: Tensor
    filled: Tensor | None = None


def permutation_reference(experts: Tensor, num_experts: int) -> Permutation:
    """Computes `permutation` in plain torch."""
    sorted_experts, choice_of_row = torch.sort(experts.flatten(), stable=True)
    rows = torch.arange(choice_of_row.numel(), device=experts.device)
    row_of_choice = torch.empty_like(choice_of_row).scatter_(0, choice_of_row, rows)
    bounds = torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    offsets = torch.searchsorted(sorted_experts, bounds, out_int32=True)
    token_of_row = choice_of_row // experts.shape[1]
    return Permutation(row_of_choice.view(experts.shape), token_of_row, offsets, choice_of_row)


def permutation(experts: Tensor, num_experts: int) -> Permutation:
    """Sorts the choices by expert, stably, without a host synchronization.

    Args:
        experts: `[n, k]` integers, each token's choices; `num_experts` for no expert, whose rows
            come last.
        num_experts: number of experts.
    """
    if not dispatch.runs_triton(experts):
        return permutation_reference(experts, num_experts)
    experts, count = experts.contiguous(), experts.numel()
    row_of_choice, choice_of_row, token_of_row = experts.new_empty(3, count, dtype=torch.int64)
    offsets = experts.new_empty(num_experts + 1, dtype=torch.int32)
    config = tuning.select("moe_permutation", experts.device)
    config["EXPERTS"] = next_power_of_2(num_experts + 1)
    programs = cdiv(count, config["BLOCK"])
    counts = experts.new_empty(programs, config["EXPERTS"], dtype=torch.int32)
    _count_kernel[(programs,)](experts, counts, count, **config)
    outputs = (row_of_choice, choice_of_row, token_of_row, offsets)
    sizes = (count, programs, num_experts, experts.shape[1])
    _place_kernel[(programs,)](experts, counts, *outputs, *sizes, **config)
    return Permutation(row_of_choice.view(experts.shape), token_of_row, offsets, choice_of_row)


@jit
def _one_hot(experts_ptr, choice, count, EXPERTS: tl.constexpr):
    """Loads `[choices, EXPERTS]`, 1 at a choice's expert; choices from `count` on have none."""
    expert = tl.load(experts_ptr + choice, choice < count, other=-1)
    return (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@jit(do_not_specialize=["count"])
def _count_kernel(
    experts_ptr, counts_ptr, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Counts the choices of each expert among BLOCK choices, into `[programs, EXPERTS]`."""
    program = tl.program_id(0)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, BLOCK, ROWS):
        choice = program * BLOCK + start + tl.arange(0, ROWS)
        total += tl.sum(_one_hot(experts_ptr, choice, count, EXPERTS), 0)
    tl.store(counts_ptr + program * EXPERTS + tl.arange(0, EXPERTS), total)


# No specialization: one binary for all batches and routers.
@jit(do_not_specialize=["count", "programs", "num_experts", "k"])
def _place_kernel(
    experts_ptr,
    counts_ptr,
    row_of_choice_ptr,
    choice_of_row_ptr,
    token_of_row_ptr,
    offsets_ptr,
    count,
    programs,
    num_experts,
    k,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Assigns BLOCK choices their rows, after those of lower experts and of earlier choices of the
    same expert."""
    program = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    # All choices of each expert, and those of the programs before this one.
    total = tl.zeros((EXPERTS,), tl.int32)
    next_row = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, programs, ROWS):
        other = start + tl.arange(0, ROWS)[:, None]
        counts = tl.load(counts_ptr + other * EXPERTS + lane[None, :], other < programs, other=0)
        total += tl.sum(counts, 0)
        next_row += tl.sum(tl.where(other < program, counts, 0), 0)
    # An expert's rows begin after those of all lower experts.
    begin = tl.cumsum(total, 0) - total
    if program == 0:
        tl.store(offsets_ptr + lane, begin, lane <= num_experts)
    next_row += begin
    for start in range(0, BLOCK, ROWS):
        choice = program * BLOCK + start + tl.arange(0, ROWS)
        one_hot = _one_hot(experts_ptr, choice, count, EXPERTS)
        # A choice follows the earlier choices of its expert, in this block and in this tile.
        row = tl.sum(one_hot * (next_row[None, :] + tl.cumsum(one_hot, 0) - 1), 1)
        tl.store(row_of_choice_ptr + choice, row, choice < count)
        tl.store(choice_of_row_ptr + row, choice, choice < count)
        tl.store(token_of_row_ptr + row, choice // k, choice < count)
        next_row += tl.sum(one_hot, 0)


@jit
def _gather_kernel(
    x_ptr,
    token_ptr,
    out_ptr,
    weights_ptr,
    choice_ptr,
    row_weights_ptr,
    width,
    x_stride,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies out[r] = x[token[r]], and row_weights[r] = weights[choice[r]]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # No `other`: lanes outside the mask are not stored either.
    x = tl.load(x_ptr + tl.load(token_ptr + row) * x_stride + column, column < width)
    tl.store(out_ptr + row * width + column, x, column < width)
    if WEIGHTED:
        first = tl.program_id(1) == 0
        choice = tl.load(choice_ptr + row, first, other=0)
        tl.store(row_weights_ptr + row, tl.load(weights_ptr + choice, first, other=0.0), first)


@jit(do_not_specialize=["num_rows"])  # it changes with every batch of tokens
def _combine_kernel(
    rows_ptr,
    row_ptr,
    out_ptr,
    row_weights_ptr,
    weights_ptr,
    num_rows,
    width,
    rows_stride,
    WEIGHTED: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes out[t] = sum over j of rows[row[t, j]], in float32 in the order of the choices, and
    copies weights[t, j] = row_weights[row[t, j]].

    Rows from `num_rows` on count as zeros.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(row_ptr + token * K + j)
        mask = (column < width) & (row < num_rows)
        total += load_float32(rows_ptr + row * rows_stride + column, mask)
        if WEIGHTED:
            weight = tl.load(row_weights_ptr + row, row < num_rows, other=0.0)
            tl.store(weights_ptr + token * K + j, weight, tl.program_id(1) == 0)
    tl.store(out_ptr + token * width + column, total, column < width)


def _gather(
    x: Tensor, token: Tensor, weights: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Copies the rows of x of some tokens.

    Args:
        weights: all weights, and the choices whose weights are copied as well.
    """
    if not dispatch.runs_triton(x) or token.numel() == 0:
        return x.index_select(0, token), None if weights is None else weights[0].take(weights[1])
    x = rows_of(x)
    rows, row_weights = x.new_empty(token.numel(), x.shape[1]), None
    pointers = (x, token, x)  # not read
    if weights is not None:
        row_weights = weights[0].new_empty(token.numel())
        pointers = (weights[0].contiguous(), weights[1], row_weights)
    config = tuning.select("moe_permute", x.device)
    grid = (rows.shape[0], cdiv(x.shape[1], config["BLOCK"]))
    config["WEIGHTED"] = weights is not None
    _gather_kernel[grid](x, token, rows, *pointers, x.shape[1], x.stride(0), **config)
    return rows, row_weights


def _combine(
    rows: Tensor, order: Permutation, row_weights: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Sums each token's rows, and copies rows' weights to choices `[n, k]`; missing rows count as
    zeros."""
    n, k = order.row_of_choice.shape
    if not dispatch.runs_triton(rows):
        num_rows = n * k if order.filled is None else len(order.filled) + 1
        # A choice without a row reads the zeros after the last row.
        if (missing := num_rows - rows.shape[0]) > 0:
            rows = F.pad(rows, (0, 0, 0, missing))
            row_weights = None if row_weights is None else F.pad(row_weights, (0, missing))
        by_choice = torch.embedding(rows, order.row_of_choice).to(statistics_dtype(rows.dtype))
        weights = None if row_weights is None else row_weights.take(order.row_of_choice)
        return by_choice.sum(1).to(rows.dtype), weights
    rows = rows_of(rows)
    out, weights = rows.new_empty(n, rows.shape[1]), None
    pointers = (rows, out)  # not read
    if row_weights is not None:
        weights = row_weights.new_empty(n, k)
        pointers = (row_weights.contiguous(), weights)
    config = tuning.select("moe_permute", rows.device)
    grid = (n, cdiv(rows.shape[1], config["BLOCK"]))
    config |= {"WEIGHTED": row_weights is not None, "K": k}
    sizes = (*rows.shape, rows.stride(0))
    _combine_kernel[grid](rows, order.row_of_choice, out, *pointers, *sizes, **config)
    return out, weights


class _Permute(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weights, order):
        ctx.order = order
        weighted = None if weights is None else (weights, order.choice_of_row)
        rows, row_weights = _gather(x, order.token_of_row, weighted)
        if row_weights is not None and order.filled is not None:
            row_weights.masked_fill_(~order.filled, 0)
        return rows, row_weights

    @staticmethod
    def backward(ctx, drows, drow_weights):
        return *_combine(drows, ctx.order, drow_weights), None


class _Unpermute(FirstOrderFunction):
    @staticmethod
    def forward(ctx, rows, order):
        ctx.order, ctx.num_rows = order, rows.shape[0]
        return _combine(rows, order)[0]

    @staticmethod
    def backward(ctx, dy):
        token = ctx.order.token_of_row
        return _gather(dy, token if len(token) == ctx.num_rows else token[: ctx.num_rows])[0], None


def permute(x: Tensor, order: Permutation) -> Tensor:
    """Copies each token to the rows of its experts, differentiable.

    Args:
        x: `[n, h]`.
        order: from `permutation`.

    Returns:
        `[n·k, h]` sorted by expert.
    """
    return _Permute.apply(x, None, order)[0]


def permute_weighted(x: Tensor, weights: Tensor, order: Permutation) -> tuple[Tensor, Tensor]:
    """Copies tokens as `permute` does, and the weights of choices to their rows, differentiable.

    Args:
        x: `[n, h]`.
        weights: `[n, k]`.
        order: from `permutation`.

    Returns:
        `[n·k, h]` and `[n·k]`, sorted by expert.
    """
    return _Permute.apply(x, weights, order)


def unpermute(rows: Tensor, order: Permutation) -> Tensor:
    """Sums the rows of each token, differentiable.

    Args:
        rows: `[n·k, h]` sorted by expert, or only the first of them: missing rows count as zeros.
        order: from `permutation`.

    Returns:
        `[n, h]` in the dtype of `rows`, summed in float32 (float64 for float64).
    """
    return _Unpermute.apply(rows, order)
