"""All-gather and reduce-scatter along dim 0 whose shares differ in size, each the other's transpose.

Both run as one all-to-all, which takes uneven shares on every backend and adds up in one fixed order; a rank sends as
many bytes as a ring would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron5d.comm.all_to_all import start_all_to_all
from megatron5d.topology.axis import Axis


def gather_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """`[counts[rank], ...]` -> `[sum(counts), ...]`, rows of rank 0 first. Comm: all_gather / reduce_scatter."""
    return x if axis.size == 1 else _GatherRows.apply(x, axis, counts)


def reduce_scatter_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """Partial `[sum(counts), ...]` -> summed `[counts[rank], ...]`. Comm: reduce_scatter / all_gather."""
    return x if axis.size == 1 else _ReduceScatterRows.apply(x, axis, counts)


def _gather(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    copies = x.repeat(axis.size, *(1,) * (x.ndim - 1))
    return start_all_to_all(copies, axis, [x.shape[0]] * axis.size, counts).wait()


def _reduce_scatter(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    own = counts[axis.rank]
    terms = start_all_to_all(x, axis, counts, [own] * axis.size).wait()
    return terms.view(axis.size, own, *x.shape[1:]).sum(0)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, counts):
        ctx.axis, ctx.counts = axis, counts
        return _gather(x, axis, counts)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.axis, ctx.counts), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, counts):
        ctx.axis, ctx.counts = axis, counts
        return _reduce_scatter(x, axis, counts)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, ctx.axis, ctx.counts), None, None
