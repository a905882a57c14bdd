"""Weights without an optimiser: loaded into plain parameters, read by rectangle, or saved as they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron5d.checkpoint.layout import ShardedTensor, named, sharded_parameter
from megatron5d.checkpoint.load import load_tensors, widest_source
from megatron5d.topology.shard_spec import spec_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

PREFIX = "model."  # the key of a weight in a checkpoint is this and its global name


@torch.no_grad()
def load_weights(parameters: Iterable[Tensor], folder: Path) -> None:
    """Fills local parameters from a whole checkpoint, whatever layout saved it. Padding rows become zero.

    Args:
        parameters: local tensors with a ShardSpec; they keep their dtype.
        folder: a whole checkpoint; its optimiser state is not read.

    Raises:
        ValueError: names or global shapes disagree.

    Comm: as `load_tensors`.
    """
    load_tensors(folder, named("model", ((spec_of(each), sharded_parameter(each)) for each in parameters)))


class SavedWeights:
    """The weights of a whole checkpoint, read a rectangle at a time by one process.

    Args:
        folder: a whole checkpoint.
        wanted: dtype in which the weights will be used; None = the dtype in which the weights are saved.
        twin: as in `load_tensors`. Without it the weights themselves are read, even where masters are saved.
    """

    def __init__(
        self, folder: Path, wanted: torch.dtype | None = None, twin: Callable[[str], str | None] = lambda key: None
    ) -> None:
        from megatron5d.checkpoint.storage import Reader, read

        self._reader, self._read = Reader(folder), read
        saved = self._reader.tensors()
        self._keys = {
            key.removeprefix(PREFIX): widest_source(key, twin(key), wanted or entry.properties.dtype, saved) or key
            for key, entry in saved.items()
            if key.startswith(PREFIX)
        }
        self.tensors = {name: saved[key] for name, key in self._keys.items()}

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset` of a global tensor, in the dtype in which it is saved."""
        entry = self.tensors[name]
        values = torch.empty(tuple(shape), dtype=entry.properties.dtype)
        tensor = ShardedTensor(entry.size, [(tuple(offset), values)], values.dtype)
        self._read(self._reader, [{self._keys[name]: tensor}])
        return values


class LazyTensor(ShardedTensor):
    """A tensor to be saved whose parts are computed when they are written, so that they are never all in memory."""

    make: Callable[[tuple[int, ...]], Tensor]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.make(tuple(index.offset))


def lazy_tensor(
    shape: Sequence[int],
    parts: dict[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    make: Callable[[tuple[int, ...]], Tensor],
) -> LazyTensor:
    """Makes a LazyTensor.

    Args:
        shape: global shape.
        parts: the shape of each part, by its offset in the global tensor.
        dtype: of the parts.
        make: computes the values of the part at an offset.
    """
    views = [(offset, torch.empty(extent, dtype=dtype, device="meta")) for offset, extent in parts.items()]
    tensor = LazyTensor(shape, views, dtype)
    tensor.make = make
    return tensor
