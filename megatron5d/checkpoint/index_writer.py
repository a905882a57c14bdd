"""Writes the index of a checkpoint on rank 0: in our form, and in that of
torch.distributed.checkpoint (DCP).

Only this file imports DCP, which takes a second or more because it imports DTensor and sympy.
"""

import itertools
import json
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron5d.checkpoint.index import Tensors, gc_disabled, write_index
from megatron5d.checkpoint.tensor_file import Save


class IndexWriter:
    """The index of a checkpoint: which file holds which shard of which tensor.

    A rank whose shards lie in the same places as at the last save sends an empty message. If all
    ranks do, the last index is written again: for thousands of ranks it takes seconds to build.
    """

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._built: tuple[str, Metadata, list[WriteResult]] | None = None

    def write(self, folder: Path, messages: list[bytes], save: Save) -> None:
        """Writes `index.json` and `.metadata`.

        Args:
            messages: what `RankWriter.finish` returned, by rank; b"" = the same as at the last
                save.

        Raises:
            ValueError: the ranks' shards overlap, or do not fill a tensor.
        """
        with gc_disabled():
            if any(messages) or self._built is None:
                self._built = self.build(messages)
            text, metadata, results = self._built
            write_index(folder, save, text)
            writer = dcp.FileSystemWriter(folder)
            writer.set_up_storage_writer(True)
            writer.finish(metadata, [results])

    def build(self, messages: list[bytes]) -> tuple[str, Metadata, list[WriteResult]]:
        """The index as text, DCP's metadata, and the places of all shards; arguments and errors as
        in `write`."""
        pairs = itertools.zip_longest(messages, self._messages, fillvalue=b"")
        self._messages = [message or last for message, last in pairs]
        tensors: Tensors = {}
        plans, results = [], []
        for message in self._messages:
            items = []
            for (key, dtype, shape), row in json.loads(zlib.decompress(message)):
                tensors.setdefault(key, (dtype, shape, []))[2].append(row)
                offset, extent, file, start, length = row
                index = MetadataIndex(key, offset)
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))
                properties = TensorProperties(dtype=getattr(torch, dtype))
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                results.append(WriteResult(index, length, _StorageInfo(file, start, length)))
            plans.append(SavePlan(items))
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _, metadata = planner.create_global_plan(plans)
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        return json.dumps(tensors, separators=(",", ":")), metadata, results
