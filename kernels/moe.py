"""Moving tokens to their experts and back.

A token t chooses experts e[t, 1..k]. Rows are sorted by expert, stably, so that each expert sees its tokens in order:
    permute     row place[t, j] = x[t]
    unpermute   y[t] = sum_j row place[t, j]
They are each other's transposes, so each is the other's gradient. Nothing is kept for the backward:
the router's weights are applied in the experts (`activation.py`). Counts and offsets stay on the
device. Choices are sorted by counting, in two launches: programs count the experts of their
choices; then each adds up all counts, and those of the programs before it, and knows the place of
its first choice of every expert.
"""

from dataclasses import dataclass
from typing import Any

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
        place: `[n, k]` int64, the row of each choice.
        token: `[n·k]` int64, the token of each row.
        offsets: `[E + 1]` int32, where each expert's rows begin and end.
        choice: `[n·k]` int64, the choice of each row, counted over all tokens.
        live: bool `[rows]`, in slots: whether a row is a choice's; the others hold some token. A
            choice without a row has the place behind the last one. None = every choice has its row.
    """

    place: Tensor
    token: Tensor
    offsets: Tensor
    choice: Tensor
    live: Tensor | None = None


def permutation_reference(experts: Tensor, num_experts: int) -> Permutation:
    """Computes `permutation` in plain torch."""
    ordered, source = torch.sort(experts.flatten(), stable=True)
    place = torch.empty_like(source).scatter_(
        0, source, torch.arange(source.numel(), device=source.device)
    )
    bounds = torch.arange(num_experts + 1, device=source.device, dtype=ordered.dtype)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    return Permutation(place.view(experts.shape), source // experts.shape[1], offsets, source)


def permutation(experts: Tensor, num_experts: int) -> Permutation:
    """Sorts the choices by expert, stably, without a host synchronisation.

    Args:
        experts: `[n, k]` integers, each token's choices; `num_experts` where there is none, whose
            rows come last.
        num_experts: how many experts there are.

    Returns:
        The row of every choice, the token of every row, and the experts' offsets.
    """
    if not dispatch.runs_triton(experts):
        return permutation_reference(experts, num_experts)
    experts, count = experts.contiguous(), experts.numel()
    place, choice, token = torch.empty(3, count, dtype=torch.int64, device=experts.device).unbind()
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    config = tuning.select("moe_permutation", experts.device) | {
        "EXPERTS": next_power_of_2(num_experts + 1)
    }
    programs = cdiv(count, config["BLOCK"])
    counts = torch.empty(programs, config["EXPERTS"], dtype=torch.int32, device=experts.device)
    _count_kernel[(programs,)](experts, counts, count, **config)
    sizes = (count, programs, num_experts, experts.shape[1])
    _place_kernel[(programs,)](experts, counts, place, choice, token, offsets, *sizes, **config)
    return Permutation(place.view(experts.shape), token, offsets, choice)


@jit
def _members(experts_ptr, choice, count, EXPERTS: tl.constexpr):
    """Returns `[choices, EXPERTS]`: 1 where a choice is an expert's; choices from `count` on are
    nobody's."""
    expert = tl.load(experts_ptr + choice, choice < count, other=-1)
    return (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@jit(do_not_specialize=["count"])
def _count_kernel(
    experts_ptr, counts_ptr, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Counts the choices of each expert among BLOCK of them: `[programs, EXPERTS]`."""
    program = tl.program_id(0)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, BLOCK, ROWS):
        total += tl.sum(
            _members(experts_ptr, program * BLOCK + start + tl.arange(0, ROWS), count, EXPERTS), 0
        )
    tl.store(counts_ptr + program * EXPERTS + tl.arange(0, EXPERTS), total)


# one binary for all batches and routers
@jit(do_not_specialize=["count", "programs", "num_experts", "k"])
def _place_kernel(
    experts_ptr,
    counts_ptr,
    place_ptr,
    choice_ptr,
    token_ptr,
    offsets_ptr,
    count,
    programs,
    num_experts,
    k,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gives each of BLOCK choices its row, behind those of lower experts and those of its own that
    come earlier."""
    program = tl.program_id(0)
    lane = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    free = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        counts = tl.load(counts_ptr + row * EXPERTS + lane[None, :], row < programs, other=0)
        total += tl.sum(counts, 0)
        free += tl.sum(tl.where(row < program, counts, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if program == 0:
        tl.store(offsets_ptr + lane, begin, lane <= num_experts)
    free += begin
    for start in range(0, BLOCK, ROWS):
        choice = program * BLOCK + start + tl.arange(0, ROWS)
        mine = _members(experts_ptr, choice, count, EXPERTS)
        place = tl.sum(mine * (free[None, :] + tl.cumsum(mine, 0) - 1), 1)
        tl.store(place_ptr + choice, place, choice < count)
        tl.store(choice_ptr + place, choice, choice < count)
        tl.store(token_ptr + place, choice // k, choice < count)
        free += tl.sum(mine, 0)


@jit
def _gather_kernel(
    x_ptr,
    token_ptr,
    out_ptr,
    weights_ptr,
    choice_ptr,
    by_row_ptr,
    width,
    x_stride,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies out[r] = x[token[r]], and by_row[r] = weights[choice[r]]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.load(token_ptr + row) * x_stride + column, column < width)
    tl.store(out_ptr + row * width + column, x, column < width)
    if WEIGHTED:
        first = tl.program_id(1) == 0
        choice = tl.load(choice_ptr + row, first, other=0)
        tl.store(by_row_ptr + row, tl.load(weights_ptr + choice, first, other=0.0), first)


@jit(do_not_specialize=["num_rows"])  # which changes with every batch of tokens
def _combine_kernel(
    rows_ptr,
    place_ptr,
    out_ptr,
    by_row_ptr,
    weights_ptr,
    num_rows,
    width,
    rows_stride,
    WEIGHTED: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes out[t] = sum over j of rows[place[t, j]], in float32 in the order of the choices.

    And copies weights[t, j] = by_row[place[t, j]]. Rows that do not exist are zeros.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(place_ptr + token * K + j)
        live = (column < width) & (row < num_rows)
        total += load_float32(rows_ptr + row * rows_stride + column, live)
        if WEIGHTED:
            weight = tl.load(by_row_ptr + row, row < num_rows, other=0.0)
            tl.store(weights_ptr + token * K + j, weight, tl.program_id(1) == 0)
    tl.store(out_ptr + token * width + column, total, column < width)


def _gather(x: Tensor, token: Tensor, weights=None, where=None):
    """Returns the rows of tokens, and the weight `[n, k]` of each row's choice; 0 where a row is no
    choice's."""
    by_row: Any = None
    if not dispatch.runs_triton(x) or token.numel() == 0:
        rows, by_row = (
            x.index_select(0, token),
            None if weights is None else weights.take(where.choice),
        )
    else:
        x = rows_of(x)
        rows = torch.empty(token.numel(), x.shape[1], dtype=x.dtype, device=x.device)
        by_row = None if weights is None else torch.empty_like(token, dtype=weights.dtype)
        config = tuning.select("moe_permute", x.device)
        grid = (rows.shape[0], cdiv(x.shape[1], config["BLOCK"]))
        more = (x, token, x) if weights is None else (weights.contiguous(), where.choice, by_row)
        _gather_kernel[grid](
            x, token, rows, *more, x.shape[1], x.stride(0), WEIGHTED=weights is not None, **config
        )
    if weights is not None and where.live is not None:
        by_row.masked_fill_(~where.live, 0)
    return rows, by_row


def _combine(rows: Tensor, where: Permutation, by_row: Tensor | None = None):
    """Returns the sums of tokens' rows, and their choices' weights `[n, k]`; missing rows count as
    zeros."""
    n, k = where.place.shape
    if not dispatch.runs_triton(rows):
        missing = (n * k if where.live is None else len(where.live) + 1) - rows.shape[0]
        if missing > 0:
            rows = F.pad(rows, (0, 0, 0, missing))
            by_row = None if by_row is None else F.pad(by_row, (0, missing))
        picked = torch.embedding(rows, where.place).to(statistics_dtype(rows.dtype))
        return picked.sum(1).to(rows.dtype), None if by_row is None else by_row.take(where.place)
    rows = rows_of(rows)
    out = torch.empty(n, rows.shape[1], dtype=rows.dtype, device=rows.device)
    weights = None if by_row is None else torch.empty(n, k, dtype=by_row.dtype, device=rows.device)
    config = tuning.select("moe_permute", rows.device)
    grid = (n, cdiv(rows.shape[1], config["BLOCK"]))
    inputs = (
        rows,
        where.place,
        out,
        *((rows, out) if by_row is None else (by_row.contiguous(), weights)),
    )
    _combine_kernel[grid](
        *inputs, *rows.shape, rows.stride(0), WEIGHTED=by_row is not None, K=k, **config
    )
    return out, weights


class _Permute(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weights, where):
        ctx.where = where
        return _gather(x, where.token, weights, where)

    @staticmethod
    def backward(ctx, drows, by_row):
        return *_combine(drows, ctx.where, by_row), None


class _Unpermute(FirstOrderFunction):
    @staticmethod
    def forward(ctx, rows, where):
        ctx.where, ctx.num_rows = where, rows.shape[0]
        return _combine(rows, where)[0]

    @staticmethod
    def backward(ctx, dy):
        token, n = ctx.where.token, ctx.num_rows
        return _gather(dy, token if n == len(token) else token[:n])[0], None


def permute(x: Tensor, where: Permutation) -> Tensor:
    """Copies each token to the rows of its experts, differentiable.

    Args:
        x: `[n, h]`.
        where: from `permutation`.

    Returns:
        `[n·k, h]` sorted by expert.
    """
    return _Permute.apply(x, None, where)[0]


def permute_weighted(x: Tensor, weights: Tensor, where: Permutation) -> tuple[Tensor, Tensor]:
    """Copies as `permute` does, and choices' weights to their rows: `[n, h]`, `[n, k]` -> `[n·k,
    h]`, `[n·k]`."""
    return _Permute.apply(x, weights, where)


def unpermute(rows: Tensor, where: Permutation) -> Tensor:
    """Sums the rows of each token, differentiable.

    Args:
        rows: `[n·k, h]` sorted by expert; of fewer the first, and the others count as zeros.
        where: from `permutation`.

    Returns:
        `[n, h]` in the dtype of `rows`, summed in float32 (float64 for float64).
    """
    return _Unpermute.apply(rows, where)
