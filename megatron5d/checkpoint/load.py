"""Loads a checkpoint into any layout: every rank reads the rectangles it holds."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron5d.checkpoint.folder import (
    MANIFEST,
    fault_of,
    faults_of_newer,
    named_steps,
    newest,
    read_run,
    step_folder,
)
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.topology.agreement import first_failure

LISTED = 12  # tensors that do not fit and are named: the keys of the model that differ say more


def find_checkpoint(directory: str | None, resume: str, job: str = "") -> Path | None:
    """The folder a run starts from; None = new weights.

    Args:
        directory: checkpoint.dir.
        resume: checkpoint.resume: auto (newest whole one, if any), none, or a folder as of `whole_checkpoint`.
        job: as of `restarted_job`. The job goes on from what it has saved in `directory`, whatever `resume` says: with
            the same command it would otherwise begin at the same step again after every time limit.

    Raises:
        ValueError: a folder was named and holds no whole checkpoint.
    """
    own = newest(Path(directory)) if directory and (job or resume == "auto") else None
    if resume == "auto" or (own is not None and read_run(own).get("job") == job):
        return own
    return None if resume == "none" else whole_checkpoint(resume, "checkpoint.resume")


def agreed_checkpoint(directory: str | None, resume: str, job: str = "") -> Path | None:
    """`find_checkpoint`, the same on every rank; raises and communicates as `agreed`."""
    if (directory is None and resume == "auto") or (resume == "none" and not (job and directory)):
        return None
    return agreed(lambda: find_checkpoint(directory, resume, job))


def agreed(find: Callable[[], Path | None]) -> Path | None:
    """What rank 0 finds, on every rank, if all see the same there.

    Rank 0 alone asks for every file: a checkpoint may have one a rank, and of thousands of ranks that each ask for
    thousands of files no file system recovers. The others compare the list of files.

    Args:
        find: looks for a whole checkpoint.

    Raises:
        ValueError: as `find` on rank 0, or it may not look there; or a rank sees other checkpoints. On every rank.

    Comm: a broadcast of a path, and `first_failure`'s.
    """
    if not dist.is_initialized():
        return find()
    rank, answer = dist.get_rank(), list[Any]([None, None])
    if rank == 0:
        try:
            found = find()
            answer = [found, _seal(found)]
        except (ValueError, OSError) as error:
            answer = [str(error), None]
    dist.broadcast_object_list(answer, src=0)
    chosen, seal = answer
    if isinstance(chosen, str):
        raise ValueError(chosen)
    other = None
    try:
        here = chosen if rank == 0 or _seal(chosen) == seal else None
        if rank and chosen is None:
            here = find()
        if here != chosen:
            other = f"finds {here or 'none'}"
    except (ValueError, OSError) as error:  # who raised alone would leave the others waiting
        other = f"cannot look there: {error}"
    if failed := first_failure(other and f"on {socket.gethostname()} rank {rank} {other}"):
        raise ValueError(
            f"rank 0 goes on from {chosen or 'no checkpoint'}, and {failed.text}{failed.more}: the folders of "
            "checkpoints must be where all nodes see the same files"
        )
    return chosen


def _seal(folder: Path | None) -> int | None:
    """Tells one checkpoint from another; None where there is none."""
    try:
        return None if folder is None else zlib.crc32((folder / MANIFEST).read_bytes())
    except OSError:
        return None


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
        of_run = Path(folder, "checkpoints")
        meant = f": {of_run}?" if of_run.is_dir() else ""
        raise ValueError(f"{knob} = {folder}: {fault}; name the folder of a whole checkpoint, or of some{meant}")
    return Path(folder)


def certainly_none(folder: str | Path, knob: str) -> str | None:
    """Why `whole_checkpoint` will find nothing in a folder that is there; None where it may find something.

    Every rank asks, before any has met another, so that nothing is opened and few names are looked for.
    """
    directory = Path(folder)
    try:
        names = (directory, *(step_folder(directory, step) for step in reversed(named_steps(directory))))
        if any((name / MANIFEST).is_file() for name in names):
            return None
        whole_checkpoint(folder, knob)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def load_tensors(
    folder: Path,
    tensors: dict[str, ShardedTensor],
    differing: Sequence[str] = (),
    twin: Callable[[str], str | None] = lambda key: None,
) -> dict[str, tuple[str, torch.dtype]]:
    """Fills the parts of `tensors` from a checkpoint.

    Args:
        folder: a whole checkpoint.
        tensors: by key; their parts are written in place.
        differing: keys of the model that differ from the saved ones, as text; said where tensors do not fit.
        twin: another key under which the same values may be saved, in another dtype. It is read where the key itself
            is not saved, or in a narrower dtype than is wanted and than the twin's.

    Returns:
        By key of `tensors`: the key that was read, and the dtype in which it is saved.

    Raises:
        ValueError: keys or global shapes disagree, on every rank; lists the first of the first rank where they do, and
            counts its rest. Or a file cannot be read; names it.

    Comm: a broadcast of what lies where, and `first_failure`'s of what disagrees and of what cannot be read.
    """
    from megatron5d.checkpoint.storage import Reader, read  # DCP: a second that not every run pays

    reader = Reader(folder, alone=not dist.is_initialized())
    saved = reader.tensors()
    sources = {key: widest_source(key, twin(key), tensor.dtype, saved) for key, tensor in tensors.items()}
    faults = [f"missing in the checkpoint: {key}" for key, source in sources.items() if source is None]
    faults += [
        f"{key}: saved {tuple(saved[source].size)}, this model has {tuple(tensors[key].shape)}"
        for key, source in sources.items()
        if source is not None and saved[source].size != tensors[key].shape
    ]
    faults.sort(key=lambda fault: ("optim." in fault, fault))  # the optimiser's differ where the weights do
    shown = faults[:LISTED] + [f"and {len(faults) - LISTED} more"] * (len(faults) > LISTED)
    if failed := first_failure("\n  ".join(shown) or None):  # who raised alone would leave the others waiting
        raise ValueError("\n  ".join([f"{folder} does not fit this model:", *differing, failed.text]))
    own = {key: tensor for key, tensor in tensors.items() if sources[key] == key}
    twins = {source: tensors[key] for key, source in sources.items() if source is not None and source != key}
    read(reader, [part for part in (own, twins) if part])
    return {key: (source, saved[source].properties.dtype) for key, source in sources.items() if source is not None}


def widest_source(key: str, twin: str | None, wanted: torch.dtype, saved: Mapping[str, Any]) -> str | None:
    """The key that is read, of two with the same values: the first that is as wide as is wanted, else the wider one.

    Args:
        key: under which the values are wanted.
        twin: another one under which they may be saved; None = none.
        wanted: dtype.
        saved: what the checkpoint says of its tensors, by key.

    Returns:
        None where neither is saved.
    """
    found = [each for each in (key, twin) if each is not None and each in saved]
    width = {each: saved[each].properties.dtype.itemsize for each in found}
    enough = (each for each in found if width[each] >= wanted.itemsize)
    return next(enough, max(found, key=lambda each: width[each], default=None))
