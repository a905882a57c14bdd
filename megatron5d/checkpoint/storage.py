"""Writes tensors to files and reads them back with torch.distributed.checkpoint (DCP); reports damaged files.

Importing DCP takes a second or more because it imports DTensor and sympy. Only this file does so, and it is imported
only where a checkpoint is read or may be written.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import os
import warnings
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron5d.checkpoint.folder import METADATA, changed, newest_before
from megatron5d.checkpoint.index import INDEX, Tensors, read_index, read_pickled, write_index
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.tensor_file import HEADER_BYTES, Save, Window, check_item, header, save_of
from megatron5d.topology.all_ranks import first_failure, on_rank_0


class _MarkedFiles(FileSystem):
    """DCP's file system, except that a file which it writes begins with the name of its save."""

    def __init__(self, save: Save) -> None:
        self._header = header(save)

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            stream.write(self._header)
            yield stream


def write(folder: Path, tensors: dict[str, ShardedTensor], rank: int, save: Save) -> bytes:
    """Writes this rank's parts of tensors to its own file. No communication.

    DCP itself would gather all plans on one rank before the write, send plans back, and afterwards send the places of
    everything to every rank. Here no two ranks hold the same part (`writing` in train/state.py), so each rank's plan is
    final. Rank 0 checks in `Index.write` that all plans together make whole tensors.

    Args:
        folder: of one checkpoint.
        tensors: by key.
        rank: of this process; part of the file's name.
        save: what the file is part of, the same on every rank.

    Returns:
        For `Index.write`: which part was written where, as compressed JSON. A rank with nothing to write makes no file.

    Raises:
        OSError, RuntimeError: the file cannot be written (torch hides the former behind the latter).
    """
    planner, writer = _planner(), dcp.FileSystemWriter(folder)
    writer.fs = _MarkedFiles(save)
    planner.set_up_planner(dict(tensors))
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = planner.finish_plan(writer.prepare_local_plan(planner.create_local_plan()))
    places = {each.index: each.storage_data for each in writer.write_data(plan, planner).wait()} if plan.items else {}
    rows = []
    for item in plan.items:
        part, place = item.tensor_data, places[item.index]
        assert part is not None
        whole = [item.index.fqn, str(part.properties.dtype).removeprefix("torch."), list(part.size)]
        where = [place.relative_path, place.offset, place.length]
        rows.append([whole, [list(part.chunk.offsets), list(part.chunk.sizes), *where]])
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


def placed(message: bytes) -> Tensors:
    """Which part of which tensor lies where, from what `write` returns."""
    tensors: Tensors = {}
    for (key, dtype, shape), row in json.loads(zlib.decompress(message)):
        tensors.setdefault(key, (dtype, shape, []))[2].append(row)
    return tensors


class Index:
    """The index of a checkpoint: which file holds which part of which tensor. Used on rank 0, which writes it, once in
    our form and once in DCP's.

    A rank that has written the same parts to the same places as at the last save sends an empty message. If all do, the
    last index is written again: for thousands of ranks it takes seconds to build one.
    """

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._built: tuple[str, Metadata, list[WriteResult]] | None = None

    def write(self, folder: Path, messages: list[bytes], save: Save) -> None:
        """Writes `index.json` and `.metadata`.

        Args:
            folder: of the checkpoint.
            messages: what `write` returned on each rank, by rank; b"" where it was the same at the last save.
            save: what the files are part of.

        Raises:
            ValueError: the ranks' parts overlap, or do not fill a tensor.
        """
        with _nothing_collected():
            if any(messages) or self._built is None:
                self._built = self._build(messages)
            text, metadata, places = self._built
            write_index(folder, save, text)
            writer = dcp.FileSystemWriter(folder)
            writer.set_up_storage_writer(True)
            writer.finish(metadata, [places])

    def _build(self, messages: list[bytes]) -> tuple[str, Metadata, list[WriteResult]]:
        """The index as text, DCP's metadata, and the places of all parts."""
        self._messages = [new or old for new, old in itertools.zip_longest(messages, self._messages, fillvalue=b"")]
        tensors: Tensors = {}
        plans, places = [], []
        for message in self._messages:
            items = []
            for (key, dtype, shape), row in json.loads(zlib.decompress(message)):
                tensors.setdefault(key, (dtype, shape, []))[2].append(row)
                offset, extent, *where = row
                index, properties = MetadataIndex(key, offset), TensorProperties(dtype=getattr(torch, dtype))
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                places.append(WriteResult(index, where[2], _StorageInfo(*where)))
            plans.append(SavePlan(items))
        _, metadata = _planner().create_global_plan(plans)
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        return json.dumps(tensors, separators=(",", ":")), metadata, places


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Switches Python's garbage collector off: with a million objects that all stay alive it takes most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _planner() -> dcp.DefaultSavePlanner:
    """DCP's planner for tensors by key, which are neither nested nor sharded in DCP's own way."""
    return dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def read(reader: Reader, parts: Sequence[dict[str, ShardedTensor]]) -> None:
    """Fills the parts of tensors, all of which the checkpoint must hold.

    Args:
        reader: of the checkpoint.
        parts: tensors by key. A key that is read into two tensors is in two of the dicts.

    Raises:
        ValueError: on every rank, if a file is damaged or cannot be read; names the first such rank, and the file.

    Comm: as `first_failure` unless the reader is alone. DCP itself would gather every rank's plan on one rank, which
        would send it back unchanged.
    """
    fault = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP announces that a single process loads without a group
        try:
            for tensors in parts:
                dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            fault = next(str(cause) or type(cause).__name__ for cause, _ in error.failures.values())
    if failed := first_failure(fault, alone=reader.alone):
        raise ValueError(f"a checkpoint cannot be read: {failed}. {reader.advice()}")


class Reader(dcp.FileSystemReader):
    """DCP's reader that also checks what it reads, names a file that it cannot read, and reads `.metadata` only once.

    Each item of a file is an archive of torch.save, with a CRC-32 of everything in it. torch writes these checksums but
    does not check them. Here they are compared with the values in memory, once they have been read, so that no byte is
    read twice. A file names the save that wrote it, which must be that of the index: an item of another save is sound
    by itself. Damage in items that are not read is not noticed.

    Args:
        folder: a whole checkpoint.
        alone: this process reads for itself; False = every rank of the world reads this checkpoint.
    """

    def __init__(self, folder: Path, *, alone: bool = True) -> None:
        super().__init__(folder)
        self._folder, self.alone = folder, alone
        self._metadata: Metadata | None = None
        self.save: Save | None = None  # which the index names, once it is read
        self._sound: set[tuple[str, int]] = set()  # file and offset of the items whose checksum was right
        self._reading: Any = None  # where the item lies that is being read; for messages

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Returns DCP's metadata. Rank 0 reads the file once, for all ranks.

        Raises:
            ValueError: on every rank, if the file cannot be read, its checksum is wrong, or it is no metadata.

        Comm: unless alone, a broadcast of the file over the world, once.
        """
        if self._metadata is None:
            name, content = self._content() if self.alone else on_rank_0(self._content)
            with _nothing_collected():
                try:
                    if name == INDEX:
                        self.save, self._metadata = read_index(content)
                    else:
                        self._metadata = read_pickled(content)
                except ValueError as error:
                    raise ValueError(f"{self._folder / name} is refused: {error}. {self.advice()}") from error
        return self._metadata

    def _content(self) -> tuple[str, bytes]:
        """Name and content of the file of metadata: ours, or DCP's where there is none; raises as `read_metadata`."""
        name = INDEX if (self._folder / INDEX).exists() else METADATA
        try:
            fault = changed(self._folder, name)
            if not fault:
                return name, (self._folder / name).read_bytes()
        except OSError as error:
            fault = f"{self._folder / name} cannot be read: {error}"
        raise ValueError(f"{fault}. {self.advice()}")

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape, dtype and places of every tensor, by key."""
        entries = self.read_metadata().state_dict_metadata
        return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def advice(self) -> str:
        """For the message about a damaged checkpoint: which older one is whole."""
        try:
            earlier = newest_before(self._folder)
        except OSError as error:
            return f"Whether there is a whole checkpoint before it cannot be told: {error}"
        if earlier is None:
            return "There is no whole checkpoint before it"
        return (
            f"The newest whole one before it: checkpoint.resume={earlier}; auto takes it once {self._folder.name} is "
            "moved away"
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of a plan file by file, so that an error can name its file.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file is damaged.
        """
        wanted: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            wanted.setdefault(place.relative_path, {}).setdefault(place.offset, []).append(item)
        for name, items in wanted.items():
            self._reading = None
            try:
                with (self._folder / name).open("rb") as file:
                    self._check_save(file)
                    for _, requests in sorted(items.items()):
                        self._fill(file, requests, planner)
            except OSError as error:
                raise OSError(f"{self._folder / name}: {error}") from error
            except Exception as error:  # torch's own words for a damaged archive are about other things
                raise ValueError(f"{self._folder / name} {self._described(error)}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_save(self, file: IO[bytes]) -> None:
        """Makes sure that a file of tensors was written by the save that the index describes.

        Raises:
            ValueError: by another one, as in a folder into which files of two steps were copied.
        """
        found = save_of(file.read(HEADER_BYTES))
        if found != self.save:
            of, rest = (str(save) if save else "a save of an earlier version" for save in (found, self.save))
            raise _OtherSave(
                f"is of another checkpoint, or its first {HEADER_BYTES} bytes are damaged: it is of {of}, and "
                f"the folder of {rest}. Was the folder copied only in part? Copy all of it again"
            )

    def _fill(self, file: io.BufferedReader, requests: list[ReadItem], planner: LoadPlanner) -> None:
        """Reads one item and copies what is wanted of it; raises ValueError where it is damaged."""
        self._reading = place = self.storage_data[requests[0].storage_index]
        window = Window(file, place.offset, place.length)
        try:
            values = torch.load(cast(IO[bytes], window), map_location="cpu", weights_only=True)
        except Exception:
            check_item(window, None)
            self._sound.add((place.relative_path, place.offset))
            raise
        if (place.relative_path, place.offset) not in self._sound:
            check_item(window, values)
            self._sound.add((place.relative_path, place.offset))
        for request in requests:
            part = narrow_tensor_by_index(values, request.storage_offsets, request.lengths)
            target = planner.resolve_tensor(request).detach()
            if part.size() != target.size():
                raise ValueError(f"{tuple(part.size())} where {tuple(target.size())} is described")
            target.copy_(part)
            planner.commit_tensor(request, target)

    def _described(self, error: Exception) -> str:
        """Whether the item is damaged, or what else stopped the read of sound values (out of memory, for example)."""
        if isinstance(error, _OtherSave):
            return str(error)
        if self._reading is None:
            return f"cannot be read: {error}"
        start, stop = self._reading.offset, self._reading.offset + self._reading.length
        names = sorted({index.fqn for index, info in self.storage_data.items() if info == self._reading})
        where = f"bytes {start} to {stop}, part of {' and '.join(names)},"
        if (self._reading.relative_path, start) in self._sound:
            return f"cannot be read: {where} have the right CRC-32, but: {error}"
        return f"is damaged: {where} are not what was saved (CRC-32)"


class _OtherSave(ValueError):
    """A file of tensors is of another save than its folder."""
