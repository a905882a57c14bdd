"""The tensors of a checkpoint in global coordinates, as rectangles that one rank holds.

A ShardedTensor has the global shape of a tensor, and the rectangles that this rank holds of it as
views of its memory, so every layout can load what any other has saved.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megatron5d.topology.shard_spec import Piece, ShardSpec, rectangles, spec_of

Rectangle = tuple[tuple[int, ...], Tensor]  # first index in the global tensor, local view


class ShardedTensor:
    """The rectangles of a tensor that this rank reads or writes.

    Args:
        parts: (offset in the global tensor, view of this rank's memory) pairs.
        dtype: of the views; also given on a rank without any.
    """

    def __init__(
        self, shape: Sequence[int], parts: Iterable[Rectangle], dtype: torch.dtype
    ) -> None:
        self.shape, self.shards, self.dtype = torch.Size(shape), dict(parts), dtype

    def __repr__(self) -> str:
        return f"ShardedTensor({tuple(self.shape)}, {[(o, tuple(v.shape)) for o, v in self.shards.items()]})"

    def values(self, offset: tuple[int, ...]) -> Tensor:
        """Returns the part at an offset, to be written."""
        return self.shards[offset]


def overlap(
    at: Sequence[int], shape: Sequence[int], other: Sequence[int], extent: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Returns begin and end of what two rectangles of a tensor share, of `shape` and `extent`; None
    for nothing."""
    begin = list(map(max, at, other))
    end = [min(a + m, b + n) for a, m, b, n in zip(at, shape, other, extent)]
    return (begin, end) if all(first < last for first, last in zip(begin, end)) else None


class HostCopies:
    """Copies of tensors in host memory, which is kept for the next ones; pinned where they come
    from a GPU."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """Copies tensors, and returns the copies. They are valid until the next call."""
        last, self._copies, taken = self._copies, {}, {}
        for key, tensor in tensors.items():
            for offset, view in tensor.shards.items():
                copy = last.pop((key, offset), None)
                if copy is None or (copy.shape, copy.dtype) != (view.shape, view.dtype):
                    copy = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.is_cuda)
                self._copies[key, offset] = copy.copy_(view.detach(), non_blocking=True)
            parts = [(offset, self._copies[key, offset]) for offset in tensor.shards]
            taken[key] = ShardedTensor(tensor.shape, parts, tensor.dtype)
        if any(copy.is_pinned() for copy in self._copies.values()):
            torch.cuda.current_stream().synchronize()
        return taken


class HeldSlice(Protocol):
    """A segment of one parameter within a flat slice (data_parallel.bucket.Segment is one)."""

    @property
    def spec(self) -> ShardSpec: ...

    @property
    def local(self) -> tuple[int, int]: ...

    @property
    def owned(self) -> tuple[int, int]: ...

    def pieces(self) -> list[tuple[Piece, tuple[int, int]]]: ...


def sharded_slice(
    segment: HeldSlice, flat: Tensor, *, writing: bool, share: tuple[int, int] | None = None
) -> ShardedTensor:
    """Returns the part of a parameter that a flat slice holds, in global coordinates.

    Args:
        segment: the part of the parameter in the slice.
        flat: the slice, of weights, master weights or a moment.
        writing: leave out pieces that another rank writes.
        share: range of the slice that is wanted; None = all of it.
    """
    low, high = (0, flat.numel()) if share is None else share
    parts: list[Rectangle] = []
    shift = segment.owned[0] - segment.local[0]
    for piece, (first, last) in segment.pieces():
        start, stop = max(first, low), min(last, high)
        if start >= stop or (writing and not piece.owner):
            continue
        # index in the slice at which the piece begins; may be negative
        origin = piece.flat[0] + shift
        at = start
        for offset, extent in rectangles(piece.shape, start - origin, stop - origin):
            view = flat[at : at + prod(extent)].view(extent)
            parts.append((tuple(a + b for a, b in zip(piece.offset, offset)), view))
            at += prod(extent)
    return ShardedTensor(segment.spec.shape, parts, flat.dtype)


def sharded_parameter(parameter: Tensor) -> ShardedTensor:
    """Returns a whole local parameter in global coordinates; rows that no piece covers are set to
    zero.

    Args:
        parameter: with a ShardSpec, also the bias of a router.
    """
    spec, values = spec_of(parameter), parameter.detach()
    if sum(piece.numel for piece in spec.pieces) < values.numel():
        values.zero_()
    parts = [
        (piece.offset, values[piece.row : piece.row + piece.shape[0]]) for piece in spec.pieces
    ]
    return ShardedTensor(spec.shape, parts, values.dtype)


def by_key(
    kind: str, tensors: Iterable[tuple[ShardSpec, ShardedTensor]]
) -> dict[str, ShardedTensor]:
    """Returns the tensors by `{kind}.{global name}`; parts of one parameter in several slices
    become one tensor.

    Args:
        kind: `model`, or `optim.` and a kind of the optimiser's tensors.
        tensors: (spec, tensor) of every segment.
    """
    found: dict[str, ShardedTensor] = {}
    for spec, tensor in tensors:
        key = f"{kind}.{spec.name}"
        if key in found:
            found[key].shards.update(tensor.shards)
        else:
            found[key] = tensor
    return found
