"""Writes tensors to files and reads them back with torch.distributed.checkpoint (DCP); reports damaged files.

Importing DCP takes a second or more because it imports DTensor and sympy. Only this file does so, and it is imported
only where a checkpoint is read or may be written.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import itertools
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron5d.checkpoint.folder import METADATA, changed, newest_before
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.topology.all_ranks import first_failure, on_rank_0


def write(folder: Path, tensors: dict[str, ShardedTensor], rank: int) -> bytes:
    """Writes this rank's parts of tensors to its own file. No communication.

    DCP itself would gather all plans on one rank before the write, send plans back, and afterwards send the places of
    everything to every rank. Here no two ranks hold the same part (`writing` in train/state.py), so each rank's plan is
    final. Rank 0 checks in `Index.write` that all plans together make whole tensors.

    Args:
        folder: of one checkpoint.
        tensors: by key.
        rank: of this process; part of the file's name.

    Returns:
        For `Index.write`: which part was written where, compressed. A rank with nothing to write makes no file.

    Raises:
        OSError, RuntimeError: the file cannot be written (torch hides the former behind the latter).
    """
    planner, writer = _planner(), dcp.FileSystemWriter(folder)
    planner.set_up_planner(dict(tensors))
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = planner.finish_plan(writer.prepare_local_plan(planner.create_local_plan()))
    places = writer.write_data(plan, planner).wait() if plan.items else []
    return zlib.compress(pickle.dumps((plan.items, places)), 1)


class Index:
    """The index of a checkpoint: which file holds which part of which tensor. Used on rank 0, which writes `.metadata`.

    A rank that has written the same parts to the same places as at the last save sends an empty message. If all do, the
    last index is written again: for thousands of ranks it takes seconds to build one.
    """

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._built: tuple[Metadata, list[list[WriteResult]]] | None = None

    def write(self, folder: Path, messages: list[bytes]) -> None:
        """Writes `.metadata`.

        Args:
            folder: of the checkpoint.
            messages: what `write` returned on each rank, by rank; b"" where it was the same at the last save.

        Raises:
            ValueError: the ranks' parts overlap, or do not fill a tensor.
        """
        with _nothing_collected():
            if any(messages) or self._built is None:
                self._built = self._build(messages)
            writer = dcp.FileSystemWriter(folder)
            writer.set_up_storage_writer(True)
            writer.finish(*self._built)

    def _build(self, messages: list[bytes]) -> tuple[Metadata, list[list[WriteResult]]]:
        """DCP's metadata, and the places of each rank's parts."""
        self._messages = [new or old for new, old in itertools.zip_longest(messages, self._messages, fillvalue=b"")]
        parts = [pickle.loads(zlib.decompress(message)) for message in self._messages]
        _, metadata = _planner().create_global_plan([SavePlan(items) for items, _ in parts])
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        return metadata, [places for _, places in parts]


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
    does not check them. Here the whole item is checked the first time that any part of it is read, at 2.6 GB/s per core
    (reading itself runs at 1.4 GB/s). Damage in items that are not read is not noticed.

    Args:
        folder: a whole checkpoint.
        alone: this process reads for itself; False = every rank of the world reads this checkpoint.
    """

    def __init__(self, folder: Path, *, alone: bool = True) -> None:
        super().__init__(folder)
        self._folder, self.alone = folder, alone
        self._metadata: Metadata | None = None
        self._sound: set[tuple[str, int]] = set()  # file and offset of the items whose checksum was right
        self._reading: Any = None  # where the item lies that is being read; for messages

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Returns DCP's metadata. Rank 0 reads the file once, for all ranks.

        Raises:
            ValueError: on every rank, if the file cannot be read or its checksum is wrong.

        Comm: unless alone, a broadcast of the file over the world, once.
        """
        if self._metadata is None:
            content = self._content() if self.alone else on_rank_0(self._content)
            with _nothing_collected():
                self._metadata = pickle.loads(content)
        return self._metadata

    def _content(self) -> bytes:
        """The content of the file of metadata; raises as `read_metadata`."""
        try:
            fault = changed(self._folder, METADATA)
            if not fault:
                return (self._folder / METADATA).read_bytes()
        except OSError as error:
            fault = f"{self._folder / METADATA} cannot be read: {error}"
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
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in wanted.items():
            self._reading = None
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner).wait()
            except OSError as error:
                raise OSError(f"{self._folder / name}: {error}") from error
            except Exception as error:  # torch's own words for a damaged archive are about other things
                raise ValueError(f"{self._folder / name} {self._described(error)}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """Returns the bytes of one item as a file, after checking them."""
        self._reading = sinfo
        place = (sinfo.relative_path, sinfo.offset)
        if place not in self._sound:
            with zipfile.ZipFile(_Window(file, sinfo.offset, sinfo.length)) as archive:
                if record := archive.testzip():
                    raise ValueError(f"the CRC-32 of {record} is another")
            self._sound.add(place)
        return super()._slice_file(file, sinfo)

    def _described(self, error: Exception) -> str:
        """Whether the item is damaged, or what else stopped the read of sound values (out of memory, for example)."""
        if self._reading is None:
            return f"cannot be read: {error}"
        start, stop = self._reading.offset, self._reading.offset + self._reading.length
        names = sorted({index.fqn for index, info in self.storage_data.items() if info == self._reading})
        where = f"bytes {start} to {stop}, part of {' and '.join(names)},"
        if (self._reading.relative_path, start) in self._sound:
            return f"cannot be read: {where} have the right CRC-32, but: {error}"
        return f"is damaged: {where} are not what was saved (CRC-32)"


class _Window(io.RawIOBase):
    """A stretch of an open file as a file of its own. It is not copied, because an item may be large.

    Args:
        file: open for reading.
        start: first byte.
        length: bytes.
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:  # where a damaged archive may point
            raise ValueError(f"byte {at} is before the window")
        self._at = at
        return at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found
