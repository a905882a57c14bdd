"""Collectives over an axis, blocking or pending, and each differentiable one beside its transpose.

forward              backward             named
identity             all_reduce           copy_to
all_reduce           identity             reduce_from
all_gather           reduce_scatter       gather_from
reduce_scatter       all_gather           reduce_scatter_to
slice                all_gather           scatter_to
all_gather           slice                gather_replicated

All of them are the identity on an axis of size 1. Gathers and scatters run along dim 0, the
sequence of `[s, b, h]`. `start_shift` passes a tensor around a ring. On the meta device they
allocate their outputs and send nothing (planning/memory/trace.py).
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.failures import wait_for_work
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.topology.all_ranks import gather_json
from megatron5d.topology.axis import Axis

# torch 2.13 renamed these two; earlier versions have only the old names
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

T = TypeVar("T")
Op = Callable[[Tensor, Axis], Tensor]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class CaptureTracker:
    """Collectives that a CUDA graph under capture has started, and has to wait for at its end."""

    def __init__(self) -> None:
        self._waits: list[weakref.WeakMethod] | None = None  # None = nothing is being captured

    def track(self, wait: Callable[[], object]) -> None:
        """Adds a method that waits for a started collective."""
        if self._waits is not None:
            self._waits.append(weakref.WeakMethod(wait))

    def run(self, work: Callable[[], T]) -> T:
        """Calls `work` and waits for all that it has started; not nested."""
        self._waits = []
        try:
            result = work()
            for reference in self._waits:
                if (wait := reference()) is not None:
                    wait()
            return result
        finally:
            self._waits = None


# one per process, shared by its threads: autograd runs backwards in separate threads
CAPTURE = CaptureTracker()


class Pending:
    """A collective in progress; `wait()` gives its result.

    Args:
        result: of the collective, once it has ended.
        works: its handles; empty = it has ended.
        keep: its input, which must outlive the transfer.
        of: the collective and its axis, for the message if it fails.
    """

    def __init__(
        self,
        result: Tensor,
        *works: Any,
        keep: Tensor | None = None,
        of: tuple[str, Axis] | None = None,
    ) -> None:
        self._result, self._works, self._keep, self._of = result, works, keep, of
        if works:
            CAPTURE.track(self.wait)

    def wait(self) -> Tensor:
        """Waits for the result; may be called again.

        Raises:
            CollectiveError: a rank of the axis is dead or hangs.
        """
        for work in self._works:
            assert self._of is not None
            wait_for_work(work, *self._of)
        self._works, self._keep = (), None
        return self._result


def as_bytes(x: Tensor) -> Tensor:
    """Views FP8 as bytes, because no backend sends FP8."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else x


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Reduces `x` in place over the axis.

    Args:
        x: any shape, contiguous; overwritten.
        axis: ranks that hold a term each.
        op: "sum", "max" or "min".

    Comm: all_reduce, 2·(n-1)/n·numel elements per rank.
    """
    if axis.size == 1:
        return Pending(x)
    axis.record("all_reduce", 2 * (axis.size - 1) * x.numel() // axis.size, x.element_size())
    if x.is_meta:
        return Pending(x)
    work = dist.all_reduce(x, op=_OPS[op], group=axis.group, async_op=True)
    return Pending(x, work, of=("all_reduce", axis))


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """Concatenates every rank's `x` along dim 0, in the order of the axis.

    Args:
        x: `[n, ...]`, the same shape on every rank.
        out: `[size·n, ...]` to write into; None allocates.

    Comm: all_gather, (size-1)·numel elements per rank.
    """
    if axis.size == 1:
        return Pending(x if out is None or out.data_ptr() == x.data_ptr() else out.copy_(x))
    x = x.contiguous()
    if out is None:
        out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    axis.record("all_gather", (axis.size - 1) * x.numel(), x.element_size())
    if x.is_meta:
        return Pending(out, keep=x)
    work = _all_gather_single(as_bytes(out), as_bytes(x), group=axis.group, async_op=True)
    return Pending(out, work, keep=x, of=("all_gather", axis))


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Sums `x` over the axis and keeps this rank's equal share of dim 0.

    Args:
        x: `[n, ...]`, n divisible by the size.
        axis: ranks that hold a term each.

    Returns:
        Pending of `[n/size, ...]`.

    Comm: reduce_scatter, (size-1)/size·numel elements per rank.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty(axis.divide(x.shape[0], "dim 0 of a reduce_scatter"), *x.shape[1:])
    axis.record("reduce_scatter", (axis.size - 1) * out.numel(), x.element_size())
    if x.is_meta:
        return Pending(out, keep=x)
    work = _reduce_scatter_single(out, x, group=axis.group, async_op=True)
    return Pending(out, work, keep=x, of=("reduce_scatter", axis))


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Gathers a JSON value from each rank of the axis, in their order, for set-up.

    Without a group, `value` stands for that of every rank.

    Comm: as `gather_json`, outside the ledger.
    """
    return [value] * axis.size if axis.group is None else gather_json(value, axis.group)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Runs `start_all_reduce` to its end: `x`, overwritten.

    Comm: all_reduce, 2·(n-1)/n·numel elements per rank.
    """
    return start_all_reduce(x, axis, op).wait()


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Runs `start_all_gather` to its end: `[n, ...]` -> `[size·n, ...]`.

    Comm: all_gather, (size-1)·numel elements per rank.
    """
    return start_all_gather(x, axis).wait()


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Runs `start_reduce_scatter` to its end: `[n, ...]` -> `[n/size, ...]`.

    Comm: reduce_scatter, (size-1)/size·numel elements per rank.
    """
    return start_reduce_scatter(x, axis).wait()


def local_slice(x: Tensor, axis: Axis) -> Tensor:
    """This rank's equal share of dim 0; no communication."""
    n = axis.divide(x.shape[0], "dim 0 of a slice")
    return x[axis.rank * n : (axis.rank + 1) * n]


def gather_last_dim(x: Tensor, axis: Axis) -> Tensor:
    """Concatenates every rank's `x` along its last dim (for reports and tools, not differentiable).

    Comm: all_gather, (size-1)·numel elements per rank.
    """
    return all_gather(x.movedim(-1, 0), axis).movedim(0, -1)


class _Differentiable(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, axis: Axis, op: Op, transpose: Op):
        ctx.axis, ctx.transpose = axis, transpose
        return op(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return ctx.transpose(grad, ctx.axis), None, None, None


def differentiable(x: Tensor, axis: Axis, op: Op, transpose: Op) -> Tensor:
    """Applies `op(x, axis)`, whose backward is `transpose`; x itself on an axis of size 1."""
    return x if axis.size == 1 else _Differentiable.apply(x, axis, op, transpose)


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.contiguous().clone(), axis)


def _slice(x: Tensor, axis: Axis) -> Tensor:
    return local_slice(x, axis).clone()  # a view would keep all of x in memory


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Copies a replicated `x` into each rank's part of the work.

    Comm: none / all_reduce of the gradient.
    """
    return differentiable(x, axis, _identity, _sum)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sums every rank's partial `x`.

    Comm: all_reduce / none.
    """
    return differentiable(x, axis, _sum, _identity)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Gathers `[n, ...]` -> `[size·n, ...]`.

    Comm: all_gather / reduce_scatter.
    """
    return differentiable(x, axis, all_gather, reduce_scatter)


def reduce_scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Sums and scatters `[n, ...]` -> `[n/size, ...]`.

    Comm: reduce_scatter / all_gather.
    """
    return differentiable(x, axis, reduce_scatter, all_gather)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Slices a replicated `[n, ...]` -> `[n/size, ...]`.

    Comm: none / all_gather.
    """
    return differentiable(x, axis, _slice, all_gather)


def gather_replicated(x: Tensor, axis: Axis) -> Tensor:
    """Gathers `[n, ...]` -> `[size·n, ...]` for work that every rank repeats.

    Comm: all_gather / none.
    """
    return differentiable(x, axis, all_gather, _slice)


def start_shift(x: Tensor, axis: Axis, tag: int = 0, distance: int = 1) -> Pending:
    """Starts sending `x` to the rank `distance` positions later in the ring, and receiving from the
    rank `distance` positions earlier.

    Args:
        x: contiguous, the same shape on every rank; must not change until `wait`.
        axis: the ring; at least 2 ranks.
        tag: distinguishes concurrent shifts; every rank starts them in the same order.
        distance: negative = backwards; the same on every rank, no multiple of the axis' size.

    Returns:
        Pending of the received tensor.

    Comm: point to point, numel elements per rank.
    """
    assert distance % axis.size and x.is_contiguous()
    destination = axis.ranks[(axis.rank + distance) % axis.size]
    source = axis.ranks[(axis.rank - distance) % axis.size]
    received = torch.empty_like(x)
    axis.record("shift", x.numel(), x.element_size())
    if x.is_meta:
        return Pending(received, keep=x)
    send = dist.P2POp(dist.isend, as_bytes(x), destination, axis.group, tag)
    receive = dist.P2POp(dist.irecv, as_bytes(received), source, axis.group, tag)
    works = dist.batch_isend_irecv([send, receive])
    return Pending(received, *works, keep=x, of=("shift", axis))
