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

# torch 2.13 renamed these two; earlier versions have only the old names.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

TEXT_BYTES = 128  # of a text that one rank sends the others

T = TypeVar("T")
Op = Callable[[Tensor, Axis], Tensor]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class CaptureTracker:
    """What a graph under capture has started and must have seen the end of before it ends
    itself."""

    def __init__(self) -> None:
        self._waits: list[weakref.WeakMethod] | None = None  # None = nothing is being captured

    def track(self, wait: Callable[[], object]) -> None:
        """Takes note of a method that waits for what has been started."""
        if self._waits is not None:
            self._waits.append(weakref.WeakMethod(wait))

    def run(self, work: Callable[[], T]) -> T:
        """Returns `work()`, once all that it has started has ended. Not nested."""
        self._waits = []
        try:
            result = work()
            for wait in self._waits:
                if (alive := wait()) is not None:
                    alive()
            return result
        finally:
            self._waits = None


# one in a process, whose threads share it: autograd runs backwards in threads of its own
CAPTURE = CaptureTracker()


class Pending:
    """A collective under way; `wait()` gives its result.

    Args:
        result: of the collective, once it has ended.
        work: its handle; None = it has ended.
        of: the collective and its axis, for the message if it fails.
    """

    def __init__(
        self,
        result: Tensor,
        work: Any = None,
        keep: Tensor | None = None,
        of: tuple[str, Axis] | None = None,
    ) -> None:
        self._result = result
        self._work, self._of = work, of
        self._keep = keep  # the input must outlive the transfer
        if work is not None:
            CAPTURE.track(self.wait)

    def wait(self) -> Tensor:
        """Waits for the result; may be called again. Raises CollectiveError: a rank of the axis is
        dead or hangs."""
        if self._work is not None:
            assert self._of is not None
            wait_for_work(self._work, *self._of)
        self._work = self._keep = None
        return self._result


def as_bytes(x: Tensor) -> Tensor:
    """Views FP8 as bytes: no backend sends it."""
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
    """Concatenates every rank's `x` along dim 0.

    Args:
        x: `[n, ...]`, the same shape on every rank.
        axis: in whose order the parts are joined.
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


def gather_objects(mine: Any, axis: Axis) -> list[Any]:
    """Gathers what JSON holds from each rank of the axis, in their order, for set-up; without a
    group all are `mine`.

    Comm: as `gather_json`, outside the ledger.
    """
    return [mine] * axis.size if axis.group is None else gather_json(mine, axis.group)


def broadcast_text(source: int, text: str, axis: Axis, device: torch.device) -> str:
    """Broadcasts a text of one rank of the axis, cut to `TEXT_BYTES` bytes, for messages.

    Args:
        source: its position on the axis.
        text: of this rank; only the source's is sent.
        device: on which collectives run.

    Comm: all_reduce of `TEXT_BYTES` elements.
    """
    letters = torch.zeros(TEXT_BYTES, dtype=torch.int32, device=device)
    if source == axis.rank:
        own = list(text.encode()[:TEXT_BYTES])
        letters[: len(own)] = torch.tensor(own, dtype=torch.int32)
    return bytes(filter(None, all_reduce(letters, axis).tolist())).decode(errors="replace")


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Runs `start_all_reduce` to its end: `x`, overwritten. Comm: all_reduce, 2·(n-1)/n·numel
    elements per rank."""
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
    """Returns this rank's equal share of dim 0; no communication."""
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


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.contiguous().clone(), axis)


def _own_rows(x: Tensor, axis: Axis) -> Tensor:
    return local_slice(x, axis).clone()  # a view would keep all of x in memory


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Passes `x` to every rank's own part of the work. Comm: none / all_reduce of the gradient."""
    return differentiable(x, axis, _same, _summed)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sums every rank's partial `x`. Comm: all_reduce / none."""
    return differentiable(x, axis, _summed, _same)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Gathers `[n, ...]` -> `[size·n, ...]`. Comm: all_gather / reduce_scatter."""
    return differentiable(x, axis, all_gather, reduce_scatter)


def reduce_scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Sums and scatters `[n, ...]` -> `[n/size, ...]`. Comm: reduce_scatter / all_gather."""
    return differentiable(x, axis, reduce_scatter, all_gather)


def scatter_to(x: Tensor, axis: Axis) -> Tensor:
    """Slices a replicated `[n, ...]` -> `[n/size, ...]`. Comm: none / all_gather."""
    return differentiable(x, axis, _own_rows, all_gather)


def gather_replicated(x: Tensor, axis: Axis) -> Tensor:
    """Gathers `[n, ...]` -> `[size·n, ...]` for work that every rank repeats. Comm: all_gather /
    none."""
    return differentiable(x, axis, all_gather, _own_rows)


class Shift:
    """A pending ring shift: this rank's tensor is sent to the next rank, the previous rank's
    received."""

    def __init__(self, sent: Tensor, received: Tensor, works: list, axis: Axis) -> None:
        self._sent, self._received, self._works, self._axis = sent, received, works, axis

    def wait(self) -> Tensor:
        """Waits for the previous rank's tensor; the one sent may be overwritten from now on. Raises
        CollectiveError: a rank of the ring is dead or hangs."""
        for work in self._works:
            wait_for_work(work, "shift", self._axis)
        return self._received


def start_shift(x: Tensor, axis: Axis, tag: int = 0, distance: int = 1) -> Shift:
    """Starts sending `x` to the rank `distance` ahead in the ring, and receiving that of the rank
    as far behind.

    Args:
        x: contiguous, the same shape on every rank; must not change until `wait`.
        axis: the ring; at least 2 ranks.
        tag: distinguishes concurrent shifts; every rank starts them in the same order.
        distance: negative = backwards; the same on every rank, no multiple of the axis' size.

    Comm: point to point, numel elements per rank.
    """
    assert distance % axis.size and x.is_contiguous()
    following = axis.ranks[(axis.rank + distance) % axis.size]
    previous = axis.ranks[(axis.rank - distance) % axis.size]
    received = torch.empty_like(x)
    axis.record("shift", x.numel(), x.element_size())
    if x.is_meta:
        return Shift(x, received, [], axis)
    sending = dist.P2POp(dist.isend, as_bytes(x), following, axis.group, tag)
    receiving = dist.P2POp(dist.irecv, as_bytes(received), previous, axis.group, tag)
    return Shift(x, received, dist.batch_isend_irecv([sending, receiving]), axis)
