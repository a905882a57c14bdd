"""Loads a checkpoint into any layout: every rank reads the rectangles it holds."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron5d.checkpoint.folder import fault_of, faults_of_newer, newest
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
        ValueError: as find_checkpoint of rank 0, on every rank; rank 0 may not look there; or this rank sees other
            checkpoints than rank 0.

    Comm: a broadcast of a path over the world, where there may be a checkpoint.
    """
    if not dist.is_initialized() or resume == "none" or (resume == "auto" and directory is None):
        return find_checkpoint(directory, resume)
    answer: list[Path | str | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [find_checkpoint(directory, resume)]
        except (ValueError, OSError) as error:
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
        ValueError: keys or global shapes disagree, here or on another rank; lists the first and counts the rest. Or a
            file of tensors cannot be read; names it.

    Comm: an all-gather of what disagrees, DCP's planning, both over the world.
    """
    from megatron5d.checkpoint.storage import Reader, read  # DCP: a second that not every run pays

    reader = Reader(folder)
    saved = reader.tensors()
    faults = [f"missing in the checkpoint: {key}" for key in tensors if key not in saved]
    faults += [
        f"{key}: saved {tuple(saved[key].size)}, this model has {tuple(tensor.shape)}"
        for key, tensor in tensors.items()
        if key in saved and saved[key].size != tensor.shape
    ]
    alone = not dist.is_initialized()
    if not alone:  # who raised alone would leave the others waiting for it to read
        told: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(told, faults)
        faults = sorted({fault for rank in told for fault in rank})
    if faults:
        shown = sorted(faults)[:LISTED] + [f"and {len(faults) - LISTED} more"] * (len(faults) > LISTED)
        raise ValueError("\n  ".join([f"{folder} does not fit this model:", *differing, *shown]))
    read(reader, tensors, alone=alone)
