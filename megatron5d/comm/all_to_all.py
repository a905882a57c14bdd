"""All-to-all over an axis, uneven all-gather and reduce-scatter, and all-to-all between two phases.

Shares along dim 0 that differ in size are gathered and reduce-scattered by one all-to-all, and
recorded as that: it takes uneven shares on every backend, and the terms are added in one fixed
order. A rank sends the same number of bytes as in a ring.

An `Exchange` starts in one phase and ends in a later one. Its gradient travels back in the same
way.

            phase A                          phase B
forward     start(x) -> handle               finish(handle) -> rows
backward    waits for the gradient of x      starts sending the gradient of the rows

A tensor that is still being received must not be in the autograd graph, whose engine could read it
too early. So the graph holds a handle of one element, and the rows are kept in the Exchange.
"""

import math
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.collectives import Pending, differentiable
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.topology.axis import Axis


def start_all_to_all(
    x: Tensor, axis: Axis, send: list[int] | None = None, receive: list[int] | None = None
) -> Pending:
    """Starts sending rows of `x` to every rank of the axis and receiving rows from each.

    Args:
        x: `[n, ...]`, rows for rank 0 first.
        send: rows for each rank; None = equal shares.
        receive: rows from each rank; None = equal shares.

    Returns:
        Pending of `[sum(receive), ...]`, rows of rank 0 first.

    Comm: all_to_all of the rows that this rank does not keep.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] if receive is None else sum(receive), *x.shape[1:]))
    num_kept = x.shape[0] // axis.size if send is None else send[axis.rank]
    axis.record("all_to_all", (x.shape[0] - num_kept) * math.prod(x.shape[1:]), x.element_size())
    if x.is_meta:
        return Pending(out, keep=x)
    work = dist.all_to_all_single(out, x, receive, send, group=axis.group, async_op=True)
    return Pending(out, work, keep=x, of=("all_to_all", axis))


def all_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Sends equal shares of the rows to each rank of the axis, differentiable.

    Comm: all_to_all / all_to_all.
    """
    return differentiable(x, axis, _all_to_all, _all_to_all)


def _all_to_all(x: Tensor, axis: Axis) -> Tensor:
    return start_all_to_all(x, axis).wait()


def gather_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """Gathers `[counts[rank], ...]` -> `[sum(counts), ...]`, rows of rank 0 first.

    Comm: all_gather / reduce_scatter, each as an all_to_all.
    """
    return differentiable(
        x, axis, partial(_gather, counts=counts), partial(_reduce_scatter, counts=counts)
    )


def reduce_scatter_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """Sums and scatters `[sum(counts), ...]` -> `[counts[rank], ...]`.

    Comm: reduce_scatter / all_gather, each as an all_to_all.
    """
    return differentiable(
        x, axis, partial(_reduce_scatter, counts=counts), partial(_gather, counts=counts)
    )


def _gather(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    copies = x.repeat(axis.size, *(1,) * (x.ndim - 1))
    return start_all_to_all(copies, axis, [x.shape[0]] * axis.size, counts).wait()


def _reduce_scatter(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    count = counts[axis.rank]
    terms = start_all_to_all(x, axis, counts, [count] * axis.size).wait()
    return terms.view(axis.size, count, *x.shape[1:]).sum(0)


class Codec(Protocol):
    """Encodes the rows that are sent; gradients are sent as they are."""

    def encode(self, rows: Tensor) -> Tensor: ...

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor: ...


class Exchange:
    """One all-to-all of rows, and its transpose.

    Args:
        send: rows for each rank.
        receive: rows from each rank.
        codec: of the rows, including those that stay on this rank, so that the numbers are the
            same on any layout.
    """

    def __init__(
        self, axis: Axis, send: list[int], receive: list[int], codec: Codec | None = None
    ) -> None:
        self.axis, self.send, self.receive, self.codec = axis, send, receive, codec
        self._is_identity = axis.size == 1 and codec is None
        self._dtype: torch.dtype | None = None  # of the rows
        self._started = False
        self._rows: Pending | None = None
        self._grad: Pending | None = None

    def start(self, x: Tensor) -> Tensor:
        """Starts sending the rows; when a phase is recomputed, nothing is sent again.

        Args:
            x: `[sum(send), ...]`, rows for rank 0 first.

        Returns:
            The handle for `finish`: one element; on an axis of size 1 without a codec x itself.

        Comm: all_to_all of the rows for other ranks / waits for the gradient of `finish`.
        """
        return x if self._is_identity else _Start.apply(x, self)

    def finish(self, handle: Tensor) -> Tensor:
        """Waits for the rows.

        Args:
            handle: from `start`, perhaps detached since.

        Returns:
            `[sum(receive), ...]`, rows of rank 0 first.

        Comm: none / all_to_all back.
        """
        if self._is_identity:
            return handle
        rows = _Finish.apply(handle, self)
        if torch.is_grad_enabled():
            self._rows = None  # kept without a graph, because a recomputation needs them
        return rows

    def repeat(self, x: Tensor) -> Tensor:
        """Receives the rows of `finish` a second time, from the input of `start`; no gradient.

        Comm: all_to_all.
        """
        return self._decode(self._start_rows(x).wait())

    def _start(self, x: Tensor) -> None:
        if not self._started:
            self._started = True
            self._dtype = x.dtype
            self._rows = self._start_rows(x)

    def _start_rows(self, x: Tensor) -> Pending:
        rows = x.detach() if self.codec is None else self.codec.encode(x.detach())
        return start_all_to_all(rows, self.axis, self.send, self.receive)

    def _wait(self) -> Tensor:
        assert self._rows is not None, "rows are received once where gradients are recorded"
        return self._decode(self._rows.wait().detach())

    def _decode(self, rows: Tensor) -> Tensor:
        if self.codec is None:
            return rows
        assert self._dtype is not None
        return self.codec.decode(rows, self._dtype)


class _Start(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        exchange._start(x)
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx, _):
        exchange = ctx.exchange
        assert exchange._grad is not None, "the gradient of the rows was never sent back"
        grad, exchange._grad = exchange._grad.wait(), None
        return grad, None


class _Finish(FirstOrderFunction):
    @staticmethod
    def forward(ctx, handle, exchange):
        ctx.exchange = exchange
        return exchange._wait()

    @staticmethod
    def backward(ctx, grad):
        exchange = ctx.exchange
        exchange._grad = start_all_to_all(grad, exchange.axis, exchange.receive, exchange.send)
        return grad.new_zeros(1), None
