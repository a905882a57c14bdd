"""Loads a checkpoint into any layout: every rank reads the rectangles it holds."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron5d.checkpoint.folder import fault_of, faults_of_newer, newest
from megatron5d.checkpoint.layout import ShardedTensor


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


def load_tensors(folder: Path, tensors: dict[str, ShardedTensor]) -> None:
    """Fills the parts of `tensors` from a checkpoint.

    Args:
        folder: a whole checkpoint.
        tensors: by key; their parts are written in place.

    Raises:
        ValueError: keys or global shapes disagree; lists all of them. Or a file of tensors cannot be read; names it.

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
        raise ValueError(f"{folder} does not fit this model:\n  " + "\n  ".join(sorted(faults)))
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
            raise ValueError(
                f"a checkpoint cannot be read: {failures_told(error)}. Take an earlier one: a run does so with "
                "checkpoint.resume=FOLDER"
            ) from error


def failures_told(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed, and on how many it did."""
    rank, (cause, _) = min(error.failures.items())
    others = len(error.failures) - 1
    return f"rank {rank}: {cause}" + (f" (and {others} more ranks)" if others else "")


class Reader(dcp.FileSystemReader):
    """DCP's reader, which names the file that it cannot read, and reads `.metadata` once: that of thousands of ranks
    is large."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args, **kwargs) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in wanted.items():
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner).wait()
            except OSError as error:
                raise OSError(f"{Path(self.path) / name}: {error}") from error
            except Exception as error:  # torch's own words for a damaged archive are about other things
                raise ValueError(f"{Path(self.path) / name} is damaged, it holds no tensors of DCP") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done
