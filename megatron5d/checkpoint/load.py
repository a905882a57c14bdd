"""Loads a checkpoint into any layout: every rank reads the rectangles it holds."""

from __future__ import annotations

import dataclasses
import io
import socket
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron5d.checkpoint.folder import METADATA, changed, fault_of, faults_of_newer, newest, newest_before
from megatron5d.checkpoint.layout import ShardedTensor

LISTED = 40  # tensors that do not fit and are named


def find_checkpoint(directory: str | None, resume: str) -> Path | None:
    """The folder a run starts from.

    Args:
        directory: checkpoint.dir.
        resume: checkpoint.resume: auto (newest whole one, if any), none, or a folder as of `whole_checkpoint`.

    Raises:
        ValueError: a folder was named and holds no whole checkpoint.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return newest(Path(directory)) if directory else None
    return whole_checkpoint(resume, "checkpoint.resume")


def agreed_checkpoint(directory: str | None, resume: str) -> Path | None:
    """`find_checkpoint`, the same on every rank: what rank 0 finds, where this rank sees it, too.

    Raises:
        ValueError: as find_checkpoint of rank 0, on every rank; or this rank sees other checkpoints than rank 0.

    Comm: a broadcast of a path over the world, where there may be a checkpoint.
    """
    if not dist.is_initialized() or resume == "none" or (resume == "auto" and directory is None):
        return find_checkpoint(directory, resume)
    answer: list[Path | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [find_checkpoint(directory, resume)]
        except ValueError as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer, src=0)
    chosen = answer[0]
    if isinstance(chosen, str):
        raise ValueError(chosen)
    if dist.get_rank() == 0:
        return chosen
    if chosen is None:
        here = find_checkpoint(directory, resume)
    else:
        here = find_checkpoint(None, str(chosen)) if chosen.is_dir() else None
    if here != chosen:
        raise ValueError(
            f"rank 0 goes on from {chosen or 'no checkpoint'}, and on {socket.gethostname()} rank {dist.get_rank()} "
            f"finds {here or 'none'}: checkpoint.dir and checkpoint.resume must be where all nodes see the same files"
        )
    return chosen


def whole_checkpoint(folder: str | Path, knob: str) -> Path:
    """The checkpoint that a folder is, or the newest whole one that it holds.

    Args:
        folder: one checkpoint, or a directory of them.
        knob: what it was given as, for the message.

    Raises:
        ValueError: it holds no whole checkpoint.
    """
    found = newest(Path(folder))
    if found is not None:
        return found
    torn = faults_of_newer(Path(folder))
    fault = torn[0] if torn else fault_of(Path(folder))
    if fault:
        raise ValueError(f"{knob} = {folder}: {fault}; name the folder of a whole checkpoint, or of some")
    return Path(folder)


def load_tensors(folder: Path, tensors: dict[str, ShardedTensor], differing: Sequence[str] = ()) -> None:
    """Fills the parts of `tensors` from a checkpoint.

    Args:
        folder: a whole checkpoint.
        tensors: by key; their parts are written in place.
        differing: keys of the model that differ from the saved ones, as text; said where tensors do not fit.

    Raises:
        ValueError: keys or global shapes disagree; lists the first and counts the rest. Or a file of tensors cannot
            be read; names it.

    Comm: DCP's planning over the world.
    """
    reader = Reader(folder)
    saved = reader.read_metadata().state_dict_metadata
    faults = [f"missing in the checkpoint: {key}" for key in tensors if key not in saved]
    for key, tensor in tensors.items():
        entry = saved.get(key)
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            faults.append(f"{key}: saved {tuple(entry.size)}, this model has {tuple(tensor.shape)}")
    if faults:
        shown = sorted(faults)[:LISTED] + [f"and {len(faults) - LISTED} more"] * (len(faults) > LISTED)
        raise ValueError("\n  ".join([f"{folder} does not fit this model:", *differing, *shown]))
    read(reader, tensors, alone=not dist.is_initialized())


def read(reader: Reader, tensors: dict[str, ShardedTensor], *, alone: bool) -> None:
    """Fills the parts of `tensors`, all of which the checkpoint has.

    Args:
        reader: of the checkpoint.
        tensors: by key.
        alone: this process reads for itself.

    Raises:
        ValueError: a file is damaged or cannot be read; names the first rank that met it, and the file.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP announces that a single process loads without a group
        try:
            dcp.load(dict(tensors), storage_reader=reader, no_dist=alone)
        except CheckpointException as error:
            raise ValueError(f"a checkpoint cannot be read: {failures_told(error)}. {reader.advice()}") from error


def failures_told(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed, and on how many it did."""
    rank, (cause, _) = min(error.failures.items())
    others = len(error.failures) - 1
    return f"rank {rank}: {cause}" + (f" (and {others} more ranks)" if others else "")


class Reader(dcp.FileSystemReader):
    """DCP's reader, which checks what it reads, names the file that it cannot read, and reads `.metadata` once: that of
    thousands of ranks is large.

    Each item of a file is an archive of torch.save, with a CRC-32 of everything in it. torch writes but does not check
    them; here they are, the first time that an item is read, whichever part of it is wanted: 2.6 GB/s of a core, beside
    1.4 GB/s of reading itself. What changed where nothing is read from is not noticed.

    Args:
        folder: a whole checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata: Metadata | None = None
        self._sound: set[tuple[str, int]] = set()  # file and offset of items that were checked
        self._reading: Any = None  # DCP's note of where the item lies that is read now

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """As DCP's, read once.

        Raises:
            ValueError: the file of metadata is not what was saved.
        """
        if self._metadata is None:
            fault = changed(self._folder, METADATA)
            if fault:
                raise ValueError(f"{fault}. {self.advice()}")
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def advice(self) -> str:
        """What to do where this checkpoint is damaged."""
        earlier = newest_before(self._folder)
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
