"""Moving tokens to their experts and back, and choosing the experts.

A token t chooses experts e[t, 1..k]. Rows are sorted by expert, stably, so that each expert sees its tokens in order:
    permute     row place[t, j] = x[t]
    unpermute   y[t] = sum_j p[t, j] · row place[t, j]
They are each other's transposes (with p = 1), so each is the other's gradient. Counts and offsets stay on the device.
With p = 1 nothing is kept for the backward: weights may have been applied in the experts (`activation.py`).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import FirstOrderFunction, cdiv, jit, next_power_of_2, rows_of, statistics_dtype, tl


@dataclass(frozen=True)
class Permutation:
    """Where each choice of each token goes.

    Args:
        place: `[n, k]` int64, the row of each choice.
        token: `[n·k]` int64, the token of each row.
        offsets: `[E + 1]` int64, where each expert's rows begin and end.
        choice: `[n·k]` int64, the choice of each row, counted over all tokens.
        live: bool `[rows]`, in slots: whether a row is a choice's; the others hold some token. A choice without a row
            has the place behind the last one. None = every choice has its row.
    """

    place: Tensor
    token: Tensor
    offsets: Tensor
    choice: Tensor
    live: Tensor | None = None


def permutation(experts: Tensor, num_experts: int) -> Permutation:
    """Sorts the choices by expert, stably, without a host synchronisation.

    Args:
        experts: `[n, k]` integers, each token's choices.
        num_experts: how many experts there are.

    Returns:
        The row of every choice, the token of every row, and the experts' offsets.
    """
    narrow = torch.int16 if num_experts < 2**15 else torch.int32  # a radix sort passes over every byte of the keys
    ordered, source = torch.sort(experts.flatten().to(narrow), stable=True)
    place = torch.empty_like(source).scatter_(0, source, torch.arange(source.numel(), device=source.device))
    bounds = torch.arange(num_experts + 1, device=source.device, dtype=ordered.dtype)
    offsets = torch.searchsorted(ordered, bounds)
    return Permutation(place.view(experts.shape), source // experts.shape[1], offsets, source)


@jit
def _gather_kernel(x_ptr, token_ptr, scale_ptr, out_ptr, width, x_stride, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes out[r] = scale[r] · x[token[r]]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row)
    x = tl.load(x_ptr + token * x_stride + column, column < width, other=0.0)
    if HAS_SCALE:
        x = x.to(tl.float32) * tl.load(scale_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), column < width)


@jit(do_not_specialize=["num_rows"])  # which changes with every batch of tokens
def _combine_kernel(
    rows_ptr, place_ptr, probs_ptr, out_ptr, num_rows, width, rows_stride,
    HAS_PROBS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes out[t] = sum over j of p[t, j] · rows[place[t, j]], in float32 in the order of the choices.

    Rows that do not exist are zeros.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(place_ptr + token * K + j)
        live = (column < width) & (row < num_rows)
        x = tl.load(rows_ptr + row * rows_stride + column, live, other=0.0).to(tl.float32)
        if HAS_PROBS:
            x *= tl.load(probs_ptr + token * K + j).to(tl.float32)
        total += x
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), column < width)


@jit
def _row_dots_kernel(dy_ptr, rows_ptr, token_ptr, out_ptr, width, dy_stride, rows_stride, BLOCK: tl.constexpr):
    """Computes out[r] = dy[token[r]] · rows[r]: the gradient of each row's probability."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + token * dy_stride + column, column < width, other=0.0).to(tl.float32)
        total += dy * tl.load(rows_ptr + row * rows_stride + column, column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total, 0))


@jit
def _topk_kernel(scores_ptr, values_ptr, indices_ptr, num_experts, stride, K: tl.constexpr, EXPERTS: tl.constexpr):
    """Finds the K largest of a row, largest first; of equals the one with the lower index. NaN counts as infinity."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EXPERTS)
    scores = tl.load(scores_ptr + row * stride + lane, lane < num_experts, other=float("-inf")).to(tl.float32)
    # NaN equals nothing, so a row of it would choose an expert that does not exist, whose rows lie anywhere.
    order = tl.where(scores == scores, scores, float("inf"))
    taken = lane >= num_experts
    for j in tl.static_range(K):
        best = tl.max(tl.where(taken, float("-inf"), order), 0)
        # Among the free lanes, so that a row of -inf still yields K different experts.
        index = tl.min(tl.where((order == best) & ~taken, lane, EXPERTS), 0)
        value = tl.sum(tl.where(lane == index, scores, 0.0), 0)
        tl.store(values_ptr + row * K + j, value.to(values_ptr.dtype.element_ty))
        tl.store(indices_ptr + row * K + j, index.to(tl.int64))
        taken = taken | (lane == index)


def _gather(x: Tensor, token: Tensor, scale: Tensor | None) -> Tensor:
    """Returns the rows of some tokens, each times its scale (one for each row)."""
    if not dispatch.runs_triton(x) or token.numel() == 0:
        rows = x.index_select(0, token)
        return rows if scale is None else (rows.to(scale.dtype) * scale[:, None]).to(x.dtype)
    x = rows_of(x)
    out = torch.empty(token.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    config = tuning.select("moe_permute", x.device)
    grid = (out.shape[0], cdiv(x.shape[1], config["BLOCK"]))
    inputs = (x, token, x if scale is None else scale, out, x.shape[1], x.stride(0))
    _gather_kernel[grid](*inputs, HAS_SCALE=scale is not None, **config)
    return out


def _combine(rows: Tensor, where: Permutation, probs: Tensor | None) -> Tensor:
    """Combines rows into tokens, weighted by `probs` `[n, k]` or plainly summed; missing rows count as zeros."""
    n, k = where.place.shape
    if not dispatch.runs_triton(rows):
        needed = n * k if where.live is None else len(where.live) + 1
        if rows.shape[0] < needed:
            rows = F.pad(rows, (0, 0, 0, needed - rows.shape[0]))
        picked = rows[where.place].to(statistics_dtype(rows.dtype))
        weighted = picked if probs is None else picked * probs.to(picked.dtype)[..., None]
        return weighted.sum(1).to(rows.dtype)
    rows = rows_of(rows)
    out = torch.empty(n, rows.shape[1], dtype=rows.dtype, device=rows.device)
    config = tuning.select("moe_permute", rows.device)
    grid = (n, cdiv(rows.shape[1], config["BLOCK"]))
    inputs = (rows, where.place, rows if probs is None else probs.contiguous(), out)
    _combine_kernel[grid](*inputs, *rows.shape, rows.stride(0), HAS_PROBS=probs is not None, K=k, **config)
    return out


def _row_dots(dy: Tensor, rows: Tensor, token: Tensor) -> Tensor:
    """Computes the dot product of each row with its token's gradient."""
    if not dispatch.runs_triton(rows):
        wide = statistics_dtype(rows.dtype)
        return (dy[token].to(wide) * rows.to(wide)).sum(-1)
    dy, rows = rows_of(dy), rows_of(rows)
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    config = tuning.select("moe_permute", rows.device)
    _row_dots_kernel[(rows.shape[0],)](dy, rows, token, out, rows.shape[1], dy.stride(0), rows.stride(0), **config)
    return out


class _Permute(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return _gather(x, where.token, None)

    @staticmethod
    def backward(ctx, drows):
        return _combine(drows, ctx.where, None), None


class _Unpermute(FirstOrderFunction):
    @staticmethod
    def forward(ctx, rows, probs, where):
        ctx.where, ctx.num_rows = where, rows.shape[0]
        if probs is not None:
            ctx.save_for_backward(rows, probs)
        return _combine(rows, where, probs)

    @staticmethod
    def backward(ctx, dy):
        where, token = ctx.where, ctx.where.token[: ctx.num_rows]
        if not ctx.saved_tensors:
            return _gather(dy, token, None), None, None
        rows, probs = ctx.saved_tensors
        dots = F.pad(_row_dots(dy, rows, token), (0, where.token.numel() - ctx.num_rows))
        return _gather(dy, token, _by_row(probs, where)[: ctx.num_rows]), dots[where.place].to(probs.dtype), None


def _by_row(values: Tensor, where: Permutation) -> Tensor:
    """Computes `[n, k]` in the order of the choices -> `[rows]` in that of the rows; 0 where a row is no choice's."""
    by_row = values.take(where.choice)
    return by_row if where.live is None else by_row.masked_fill_(~where.live, 0)


class _PermuteChoices(FirstOrderFunction):
    @staticmethod
    def forward(ctx, values, where):
        ctx.where = where
        return _by_row(values, where)

    @staticmethod
    def backward(ctx, grad):
        return (grad if ctx.where.live is None else F.pad(grad, (0, 1))).take(ctx.where.place), None


def permute(x: Tensor, where: Permutation) -> Tensor:
    """Copies each token to the rows of its experts, differentiable.

    Args:
        x: `[n, h]`.
        where: from `permutation`.

    Returns:
        `[n·k, h]` sorted by expert.
    """
    return _Permute.apply(x, where)


def permute_choices(values: Tensor, where: Permutation) -> Tensor:
    """Brings a number for each choice, such as its weight, to the choice's row, differentiable.

    Args:
        values: `[n, k]`, in the order of each token's choices.
        where: from `permutation`.

    Returns:
        `[n·k]` sorted by expert.
    """
    return _PermuteChoices.apply(values, where)


def unpermute(rows: Tensor, where: Permutation, probs: Tensor | None = None) -> Tensor:
    """Adds up each token's rows, perhaps weighted by its probabilities, differentiable in both.

    Args:
        rows: `[n·k, h]` sorted by expert; of fewer the first, and the others count as zeros.
        where: from `permutation`.
        probs: `[n, k]`, in the order of the token's choices; None = 1, for which no rows are kept.

    Returns:
        `[n, h]` in the dtype of `rows`, summed in float32 (float64 for float64).
    """
    return _Unpermute.apply(rows, probs, where)


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Computes `top_k` without a gradient."""
    if dispatch.runs_triton(scores):
        scores = rows_of(scores)
        n, experts = scores.shape
        values = torch.empty(n, k, dtype=scores.dtype, device=scores.device)
        indices = torch.empty(n, k, dtype=torch.int64, device=scores.device)
        config = tuning.select("moe_topk", scores.device)
        lanes = {"K": k, "EXPERTS": next_power_of_2(experts)}
        _topk_kernel[(n,)](scores, values, indices, experts, scores.stride(0), **lanes, **config)
        return values, indices
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    return ordered[:, :k].contiguous(), order[:, :k].contiguous()


class _TopK(FirstOrderFunction):
    @staticmethod
    def forward(ctx, scores, k):
        values, indices = best(scores, k)
        ctx.save_for_backward(indices)
        ctx.num_experts = scores.shape[1]
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx, dvalues, _):
        (indices,) = ctx.saved_tensors
        dscores = dvalues.new_zeros(indices.shape[0], ctx.num_experts)
        return dscores.scatter_(1, indices, dvalues), None


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest scores of each token and their experts, differentiable in the scores.

    Args:
        scores: `[n, E]`, any floating dtype.
        k: how many experts a token chooses.

    Returns:
        values `[n, k]`, largest first, and experts `[n, k]` int64; of equal scores the lower expert wins, on every
        device.

    Raises:
        ValueError: k exceeds the number of experts.
    """
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"cannot choose {k} of {scores.shape[1]} experts")
    return _TopK.apply(scores, k)
