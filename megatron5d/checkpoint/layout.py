"""The tensors of a checkpoint in global coordinates, as rectangles that one rank holds.

A ShardedTensor has the global shape of a tensor, and the rectangles that this rank holds of it as views of its memory.
torch.distributed.checkpoint (DCP) reads and writes it through the protocol of checkpointable tensors, so every layout
can load what any other has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatron5d.topology.shard_spec import Piece, ShardSpec, rectangles, spec_of

if TYPE_CHECKING:  # DCP is slow to import, and a run that neither saves nor loads does not need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Rectangle = tuple[tuple[int, ...], Tensor]  # first index in the global tensor, local view


class ShardedTensor(torch.Tensor):
    """A tensor of the global shape without storage; `parts` are the rectangles that this rank reads or writes.

    Args:
        shape: global shape.
        parts: (offset in the global tensor, view of this rank's memory) pairs.
        dtype: of the views; also given on a rank without any.
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
        """A copy with its parts on the CPU, to be saved in the background."""
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
    """The part of a parameter that a flat slice holds, in global coordinates.

    Args:
        segment: the part of the parameter in the slice.
        flat: the slice, of weights, master weights or a moment.
        writing: leave out pieces that another rank writes.
    """
    parts: list[Rectangle] = []
    shift = segment.owned[0] - segment.local[0]
    for piece, (start, stop) in segment.pieces():
        if writing and not piece.owner:
            continue
        origin = piece.flat[0] + shift  # index in the slice at which the piece begins; may be negative
        at = start
        for offset, extent in rectangles(piece.shape, start - origin, stop - origin):
            view = flat[at : at + prod(extent)].view(extent)
            parts.append((tuple(a + b for a, b in zip(piece.offset, offset)), view))
            at += prod(extent)
    return ShardedTensor(segment.spec.shape, parts, flat.dtype)


def sharded_parameter(parameter: Tensor) -> ShardedTensor:
    """A whole local parameter in global coordinates; rows that no piece covers are set to zero.

    Args:
        parameter: with a ShardSpec, also the bias of a router.
    """
    spec, values = spec_of(parameter), parameter.detach()
    if sum(piece.numel for piece in spec.pieces) < values.numel():
        values.zero_()
    parts = [(piece.offset, values[piece.row : piece.row + piece.shape[0]]) for piece in spec.pieces]
    return ShardedTensor(spec.shape, parts, values.dtype)


def named(kind: str, tensors: Iterable[tuple[ShardSpec, ShardedTensor]]) -> dict[str, ShardedTensor]:
    """`{kind}.{global name}` -> tensor; parts of one parameter in several slices become one tensor.

    Args:
        kind: `model`, or `optim.` and a kind of the optimiser's tensors.
        tensors: (spec, tensor) of every segment.
    """
    found: dict[str, ShardedTensor] = {}
    for spec, tensor in tensors:
        key = f"{kind}.{spec.name}"
        if key in found:
            found[key].parts.update(tensor.parts)
        else:
            found[key] = tensor
    return found
