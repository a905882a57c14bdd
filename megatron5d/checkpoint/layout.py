"""What a checkpoint is made of: tensors in global coordinates, each held here as a few rectangles.

A ShardedTensor is the global tensor as one rank sees it: its global shape, and the rectangles that the rank holds as
views of its own memory. torch.distributed.checkpoint (DCP) reads and writes it through the protocol of checkpointable
tensors, so any layout loads what any other saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatron5d.topology.shard import Piece, ShardSpec, rectangles, spec_of

if TYPE_CHECKING:  # DCP has been imported where it asks a tensor; what never saves or loads does without
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Rectangle = tuple[tuple[int, ...], Tensor]  # first index in the global tensor, local view


class ShardedTensor(torch.Tensor):
    """A tensor of the global shape without storage; `rectangles` are what this rank reads or writes of it.

    Args:
        shape: global shape.
        parts: (offset, view) pairs.
        dtype: of the views, for a rank that holds none.
    """

    parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], parts: Sequence[Rectangle], dtype: torch.dtype) -> ShardedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        tensor.parts = dict(parts)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"a ShardedTensor has no storage to run {func} on; use its parts")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedTensor({tuple(self.shape)}, {[(o, tuple(v.shape)) for o, v in self.parts.items()]})"

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offset), view.size()),
                    properties=TensorProperties(dtype=view.dtype),
                    size=self.size(),
                ),
            )
            for offset, view in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offset), view.size()) for offset, view in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]

    def staged(self) -> ShardedTensor:
        """The same with its parts copied to the CPU, for a save that goes on while training does."""
        parts = [(offset, view.to("cpu", copy=True)) for offset, view in self.parts.items()]
        return ShardedTensor(self.shape, parts, self.dtype)


class HeldSlice(Protocol):
    """A segment of one parameter within a flat slice (data_parallel.buckets.Segment is one)."""

    @property
    def spec(self) -> ShardSpec: ...

    @property
    def local(self) -> tuple[int, int]: ...

    @property
    def owned(self) -> tuple[int, int]: ...

    def pieces(self) -> list[tuple[Piece, tuple[int, int]]]: ...


def sharded_slice(segment: HeldSlice, flat: Tensor, *, writing: bool) -> ShardedTensor:
    """The global tensor of a parameter, as far as a flat slice holds it.

    Args:
        segment: where the parameter lies in the slice.
        flat: the slice: weights, master weights or a moment.
        writing: leave out copies that another rank writes.
    """
    parts: list[Rectangle] = []
    shift = segment.owned[0] - segment.local[0]
    for piece, (start, stop) in segment.pieces():
        if writing and not piece.owner:
            continue
        origin = piece.flat[0] + shift  # where the piece would begin in the slice's numbering
        at = start
        for offset, extent in rectangles(piece.shape, start - origin, stop - origin):
            view = flat[at : at + prod(extent)].view(extent)
            parts.append((tuple(a + b for a, b in zip(piece.offset, offset)), view))
            at += prod(extent)
    return ShardedTensor(segment.spec.shape, parts, flat.dtype)


def sharded_parameter(parameter: Tensor) -> ShardedTensor:
    """The global tensor of a local parameter that lies here as it is; rows that no piece covers become zero.

    Args:
        parameter: with a ShardSpec; a router's bias is one too.
    """
    spec, values = spec_of(parameter), parameter.detach()
    if sum(piece.numel for piece in spec.pieces) < values.numel():
        values.zero_()
    parts = [(piece.offset, values[piece.row : piece.row + piece.shape[0]]) for piece in spec.pieces]
    return ShardedTensor(spec.shape, parts, values.dtype)


def named(kind: str, tensors: Iterable[tuple[ShardSpec, ShardedTensor]]) -> dict[str, ShardedTensor]:
    """`{kind}.{global name}` -> tensor; the segments of a parameter that lies in several slices are joined."""
    found: dict[str, ShardedTensor] = {}
    for spec, tensor in tensors:
        key = f"{kind}.{spec.name}"
        if key in found:
            found[key].parts.update(tensor.parts)
        else:
            found[key] = tensor
    return found
