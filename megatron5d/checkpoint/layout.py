"""Tensors of a checkpoint in global coordinates, as the rectangles that one rank holds.

A ShardedTensor has the global shape of a tensor and this rank's rectangles of it, as views of its
memory. So every layout can load what any other layout saved.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megatron5d.topology.shard_spec import Piece, ShardSpec, rectangles, spec_of

Dims = tuple[int, ...]  # an offset or a shape
# (name, offset, shape) -> values of that rectangle of a tensor
ReadRectangle = Callable[[str, Dims, Dims], Tensor]


class ShardedTensor:
    """The rectangles of a tensor that this rank reads or writes.

    Args:
        shape: of the global tensor.
        shards: (offset in the global tensor, view of this rank's memory) pairs.
        dtype: of the views; required because a rank may have none.
    """

    def __init__(
        self, shape: Sequence[int], shards: Iterable[tuple[Dims, Tensor]], dtype: torch.dtype
    ) -> None:
        self.shape, self.shards, self.dtype = torch.Size(shape), dict(shards), dtype

    def __repr__(self) -> str:
        extents = {offset: tuple(view.shape) for offset, view in self.shards.items()}
        return f"ShardedTensor({tuple(self.shape)}, {extents})"

    def values(self, offset: Dims) -> Tensor:
        """The shard at an offset, to be written."""
        return self.shards[offset]


ShardedTensors = dict[str, ShardedTensor]  # by key


class LazyTensor(ShardedTensor):
    """A tensor to be saved whose shards are computed when they are written, so that they are never
    all in memory.

    Args:
        shape: of the global tensor.
        extents: shape of each shard, by its offset in the global tensor.
        make: computes the values of the shard at an offset.
    """

    def __init__(
        self,
        shape: Sequence[int],
        extents: Mapping[Dims, Dims],
        dtype: torch.dtype,
        make: Callable[[Dims], Tensor],
    ) -> None:
        views = [
            (offset, torch.empty(extent, dtype=dtype, device="meta"))
            for offset, extent in extents.items()
        ]
        super().__init__(shape, views, dtype)
        self._make = make

    def values(self, offset: Dims) -> Tensor:
        return self._make(offset)


ParameterShards = list[tuple[ShardSpec, ShardedTensor]]


def slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The index of a rectangle."""
    return tuple(slice(start, start + size) for start, size in zip(offset, shape))


def overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], other_shape: Sequence[int]
) -> tuple[Dims, Dims, Dims] | None:
    """Intersection of two rectangles of a tensor, at `offset` and at `other`.

    Returns:
        Its offset in each of them, and its shape; None where it is empty.
    """
    begin = list(map(max, offset, other))
    ends = zip(offset, shape, other, other_shape)
    extent = tuple(min(a + m, b + n) - i for i, (a, m, b, n) in zip(begin, ends))
    if min(extent, default=1) <= 0:
        return None
    first, second = (tuple(i - o for i, o in zip(begin, start)) for start in (offset, other))
    return first, second, extent


class HostCopies:
    """Copies of tensors in host memory that is reused from save to save; pinned for tensors on a
    GPU."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, Dims], Tensor] = {}

    def copy(self, tensors: Mapping[str, ShardedTensor]) -> ShardedTensors:
        """Copies tensors. The copies are valid until the next call."""
        reusable, self._copies, copies = self._copies, {}, {}
        for key, tensor in tensors.items():
            for offset, view in tensor.shards.items():
                copy = reusable.pop((key, offset), None)
                if copy is None or (copy.shape, copy.dtype) != (view.shape, view.dtype):
                    copy = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.is_cuda)
                self._copies[key, offset] = copy.copy_(view.detach(), non_blocking=True)
            shards = [(offset, self._copies[key, offset]) for offset in tensor.shards]
            copies[key] = ShardedTensor(tensor.shape, shards, tensor.dtype)
        if any(copy.is_pinned() for copy in self._copies.values()):
            torch.cuda.current_stream().synchronize()
        return copies


class SliceSegment(Protocol):
    """A segment of one parameter within a flat slice (data_parallel.bucket.Segment is one)."""

    @property
    def spec(self) -> ShardSpec: ...

    @property
    def local(self) -> tuple[int, int]: ...

    @property
    def owned(self) -> tuple[int, int]: ...

    def pieces(self) -> list[tuple[Piece, tuple[int, int]]]: ...


def sharded_slice(
    segment: SliceSegment, flat: Tensor, *, writing: bool, share: tuple[int, int] | None = None
) -> ShardedTensor:
    """What a flat slice holds of a parameter, in global coordinates.

    Args:
        segment: the segment of the parameter within the slice.
        flat: the slice, of weights, master weights or a moment.
        writing: leave out pieces that another rank writes.
        share: element range of the slice to which the result is limited; None = all of it.
    """
    low, high = (0, flat.numel()) if share is None else share
    shards: list[tuple[Dims, Tensor]] = []
    shift = segment.owned[0] - segment.local[0]
    for piece, (first, last) in segment.pieces():
        start, stop = max(first, low), min(last, high)
        if start >= stop or (writing and not piece.owner):
            continue
        # index in the slice at which the piece begins; negative if the slice begins within it
        origin = piece.flat[0] + shift
        position = start
        for offset, extent in rectangles(piece.shape, start - origin, stop - origin):
            view = flat[position : position + prod(extent)].view(extent)
            shards.append((tuple(a + b for a, b in zip(piece.offset, offset)), view))
            position += prod(extent)
    return ShardedTensor(segment.spec.shape, shards, flat.dtype)


def sharded_parameter(parameter: Tensor) -> ShardedTensor:
    """A whole local parameter in global coordinates; sets rows that no piece covers to zero.

    Args:
        parameter: with a ShardSpec; a router's bias, too.
    """
    spec, values = spec_of(parameter), parameter.detach()
    if sum(piece.numel for piece in spec.pieces) < values.numel():
        values.zero_()
    shards = [
        (piece.offset, values[piece.row : piece.row + piece.shape[0]]) for piece in spec.pieces
    ]
    return ShardedTensor(spec.shape, shards, values.dtype)


def by_key(kind: str, tensors: Iterable[tuple[ShardSpec, ShardedTensor]]) -> ShardedTensors:
    """Tensors by `{kind}.{global name}`; shards of one parameter in several slices become one
    tensor.

    Args:
        kind: `model`, or `optim.` and a kind of the optimizer's tensors.
        tensors: (spec, tensor) of every segment.
    """
    keyed: ShardedTensors = {}
    for spec, tensor in tensors:
        key = f"{kind}.{spec.name}"
        if key in keyed:
            keyed[key].shards.update(tensor.shards)
        else:
            keyed[key] = tensor
    return keyed
