"""What is printed when a run breaks: one message if its reader can mend it, the call stack if we must."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from megatron5d.pipeline_parallel.executor import PipelineError

_OURS = Path(__file__).resolve().parents[1]


def crash_message(error: Exception, rank: int, world: int) -> str | None:
    """Returns one message for the user; None where only the call stack helps.

    Files, disks, other ranks, memory that ran out and numbers that are no longer finite are for the user, and so is a
    ValueError of our own: it says what is wrong with what. One that comes out of a library is a mistake of ours.

    Args:
        error: that ends this rank.
        rank: of this process.
        world: number of ranks.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if _OURS in Path(frame.filename).parents]
    said_by_us = bool(ours) and frames[-1] is ours[-1]
    for_the_user = OSError | FloatingPointError | torch.OutOfMemoryError
    if not isinstance(cause_of(error), for_the_user) and not (isinstance(error, ValueError) and said_by_us):
        return None
    place = f", in {Path(ours[-1].filename).relative_to(_OURS.parent)}:{ours[-1].lineno}" if ours else ""
    said = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    return (
        f"rank {rank} of {world} stops the run: {said}\n  ({type(error).__name__}{place}; log.traceback=true shows "
        "the calls that led there)"
    )


def cause_of(error: Exception) -> BaseException | None:
    """Returns what went wrong, without the pipeline's word of where."""
    return error.__cause__ if isinstance(error, PipelineError) else error


def ran_out_of_memory(error: Exception) -> bool:
    """Returns whether the device's memory ran out, in an action of the pipeline or elsewhere."""
    return isinstance(cause_of(error), torch.OutOfMemoryError)


def add_note(error: Exception, text: str) -> None:
    """Adds a line to what is printed of an error, as `add_note` of Python 3.11 does."""
    error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
