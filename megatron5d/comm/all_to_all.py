"""All-to-all over an axis; its transpose is the all-to-all back."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.collectives import Pending, differentiable
from megatron5d.topology.axis import Axis


def start_all_to_all(x: Tensor, axis: Axis, send: list[int] | None = None, receive: list[int] | None = None) -> Pending:
    """Deals the rows of `x` out over the axis and collects what the others deal to this rank.

    Args:
        x: `[n, ...]`, rows for rank 0 first.
        axis: among whom.
        send: rows for each rank; None = equal shares.
        receive: rows from each rank; None = equal shares.

    Returns:
        Pending of `[sum(receive), ...]`, rows of rank 0 first.

    Comm: all_to_all; sends the rows that are not this rank's own.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] if receive is None else sum(receive), *x.shape[1:]))
    own = x.shape[0] // axis.size if send is None else send[axis.rank]
    axis.record("all_to_all", (x.shape[0] - own) * math.prod(x.shape[1:]), x.element_size())
    if x.is_meta:
        return Pending(out, keep=x)
    work = dist.all_to_all_single(out, x, receive, send, group=axis.group, async_op=True)
    return Pending(out, work, keep=x, of=("all_to_all", axis))


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Equal shares of the rows to each rank of the axis, differentiable. Comm: all_to_all / all_to_all."""
    return differentiable(x, axis, _all_to_all, _all_to_all)


def _all_to_all(x: Tensor, axis: Axis) -> Tensor:
    return start_all_to_all(x, axis).wait()
