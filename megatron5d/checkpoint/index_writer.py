"""Writes the index of a checkpoint on rank 0: in our form, and in that of
torch.distributed.checkpoint (DCP).

Importing DCP takes a second or more because it imports DTensor and sympy. Only this file does so.
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

from megatron5d.checkpoint.index import Tensors, write_index
from megatron5d.checkpoint.storage import gc_disabled
from megatron5d.checkpoint.tensor_file import Save


class IndexWriter:
    """The index of a checkpoint: which file holds which part of which tensor.

    A rank that has written the same parts to the same places as at the last save sends an empty
    message. If all do, the last index is written again: for thousands of ranks it takes seconds to
    build one.
    """

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._built: tuple[str, Metadata, list[WriteResult]] | None = None

    def write(self, folder: Path, messages: list[bytes], save: Save) -> None:
        """Writes `index.json` and `.metadata`.

        Args:
            messages: what `write` returned on each rank, by rank; b"" where it was the same at the
                last save.

        Raises:
            ValueError: the ranks' parts overlap, or do not fill a tensor.
        """
        with gc_disabled():
            if any(messages) or self._built is None:
                self._built = self.build(messages)
            text, metadata, places = self._built
            write_index(folder, save, text)
            writer = dcp.FileSystemWriter(folder)
            writer.set_up_storage_writer(True)
            writer.finish(metadata, [places])

    def build(self, messages: list[bytes]) -> tuple[str, Metadata, list[WriteResult]]:
        """Returns the index as text, DCP's metadata, and the places of all parts; arguments as in
        `write`."""
        self._messages = [
            new or old
            for new, old in itertools.zip_longest(messages, self._messages, fillvalue=b"")
        ]
        tensors: Tensors = {}
        plans, places = [], []
        for message in self._messages:
            items = []
            for (key, dtype, shape), row in json.loads(zlib.decompress(message)):
                tensors.setdefault(key, (dtype, shape, []))[2].append(row)
                offset, extent, *where = row
                index, properties = (
                    MetadataIndex(key, offset),
                    TensorProperties(dtype=getattr(torch, dtype)),
                )
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                places.append(WriteResult(index, where[2], _StorageInfo(*where)))
            plans.append(SavePlan(items))
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        _, metadata = planner.create_global_plan(plans)
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        return json.dumps(tensors, separators=(",", ":")), metadata, places
