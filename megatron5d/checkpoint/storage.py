"""Tensors to files and back through torch.distributed.checkpoint (DCP); what is read is checked, and damage named.

Importing DCP takes a second or more, for it brings DTensor and sympy: this file, the only one that does, is imported
where a checkpoint is read or may be written, and nowhere else.
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
from megatron5d.topology.agreement import first_failure, on_rank_0


def write(folder: Path, tensors: dict[str, ShardedTensor], rank: int) -> bytes:
    """Writes what this rank has of some tensors.

    DCP would send every rank's plan to one, and a plan back, before anything is written, and the places of everything
    to every rank afterwards. Here a rank has nothing that another one has (`writing` in train/state.py), so that its
    own plan is final; that all plans together make whole tensors, rank 0 sees when it lists them (`list_places`).

    Args:
        folder: of one checkpoint.
        tensors: by key.
        rank: of this process; in the name of its file.

    Returns:
        What is written where, for `list_places`. A rank with nothing to write makes no file.
    """
    planner, writer = _planner(), dcp.FileSystemWriter(folder)
    planner.set_up_planner(dict(tensors))
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = planner.finish_plan(writer.prepare_local_plan(planner.create_local_plan()))
    places = writer.write_data(plan, planner).wait() if plan.items else []
    return zlib.compress(pickle.dumps((plan.items, places)), 1)


class Index:
    """What lies where in a checkpoint, on the rank that writes `.metadata`.

    Ranks that write the same tensors to the same places as the last time say so with an empty note: of thousands of
    ranks it takes seconds to put their notes together.
    """

    def __init__(self) -> None:
        self._notes: list[bytes] = []
        self._found: tuple[Metadata, list[list[WriteResult]]] | None = None

    def write(self, folder: Path, notes: list[bytes]) -> None:
        """Writes `.metadata`.

        Args:
            folder: of the checkpoint.
            notes: from `write` on every rank, in their order; b"" where it is the last one's.

        Raises:
            ValueError: the ranks' parts overlap, or do not fill a tensor.
        """
        with _nothing_collected():
            if any(notes) or self._found is None:
                self._found = self._put_together(notes)
            writer = dcp.FileSystemWriter(folder)
            writer.set_up_storage_writer(True)
            writer.finish(*self._found)

    def _put_together(self, notes: list[bytes]) -> tuple[Metadata, list[list[WriteResult]]]:
        self._notes = [new or old for new, old in itertools.zip_longest(notes, self._notes, fillvalue=b"")]
        parts = [pickle.loads(zlib.decompress(note)) for note in self._notes]
        _, metadata = _planner().create_global_plan([SavePlan(items) for items, _ in parts])
        metadata.planner_data = {key: (key,) for key in metadata.state_dict_metadata}
        return metadata, [places for _, places in parts]


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Within, Python looks for no garbage: among a million objects that all stay, it looks in vain for most of the
    time that they take."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _planner() -> dcp.DefaultSavePlanner:
    """For tensors by key, which are neither nested nor sharded in DCP's own way."""
    return dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def read(reader: Reader, parts: Sequence[dict[str, ShardedTensor]]) -> None:
    """Fills the parts of tensors, all of which the checkpoint has.

    Args:
        reader: of the checkpoint.
        parts: tensors by key; what shall be read twice is in two of them.

    Raises:
        ValueError: a file is damaged or cannot be read; names the first rank that met it, and the file.

    Comm: unless the reader is alone, `first_failure`'s. DCP would gather every rank's plan on one, which sends it back
        unchanged.
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
    """DCP's reader, which checks what it reads, names the file that it cannot read, and reads `.metadata` once: that of
    thousands of ranks is large.

    Each item of a file is an archive of torch.save, with a CRC-32 of everything in it. torch writes but does not check
    them; here they are, the first time that an item is read, whichever part of it is wanted: 2.6 GB/s of a core, beside
    1.4 GB/s of reading itself. What changed where nothing is read from is not noticed.

    Args:
        folder: a whole checkpoint.
        alone: this process reads for itself; False = every rank of the world reads this checkpoint.
    """

    def __init__(self, folder: Path, *, alone: bool = True) -> None:
        super().__init__(folder)
        self._folder, self.alone = folder, alone
        self._metadata: Metadata | None = None
        self._sound: set[tuple[str, int]] = set()  # file and offset of items that were checked
        self._reading: Any = None  # DCP's note of where the item lies that is read now

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """As DCP's, read once, and by rank 0 for all.

        Raises:
            ValueError: the file of metadata cannot be read or is not what was saved; on every rank.

        Comm: unless alone a broadcast of the file over the world.
        """
        if self._metadata is None:
            content = self._content() if self.alone else on_rank_0(self._content)
            with _nothing_collected():
                self._metadata = pickle.loads(content)
        return self._metadata

    def _content(self) -> bytes:
        """Of the file of metadata."""
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
        """What to do where this checkpoint is damaged."""
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
        """As DCP's, file by file, so that a fault names its file.

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
                raise ValueError(f"{self._folder / name} {self._fault_told(error)}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """The bytes of one item, checked."""
        self._reading = sinfo
        place = (sinfo.relative_path, sinfo.offset)
        if place not in self._sound:
            with zipfile.ZipFile(_Window(file, sinfo.offset, sinfo.length)) as archive:
                if record := archive.testzip():
                    raise ValueError(f"the CRC-32 of {record} is another")
            self._sound.add(place)
        return super()._slice_file(file, sinfo)

    def _fault_told(self, error: Exception) -> str:
        """Damage, or what else stopped a read of sound values (no memory for them, a damaged header before them)."""
        if self._reading is None:
            return f"cannot be read: {error}"
        start, stop = self._reading.offset, self._reading.offset + self._reading.length
        names = sorted({index.fqn for index, info in self.storage_data.items() if info == self._reading})
        where = f"bytes {start} to {stop}, part of {' and '.join(names)},"
        if (self._reading.relative_path, start) in self._sound:
            return f"cannot be read: {where} have the right CRC-32, but: {error}"
        return f"is damaged: {where} are not what was saved (CRC-32)"


class _Window(io.RawIOBase):
    """Some bytes of an open file, as a file; it is read in place, an item may be large.

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
