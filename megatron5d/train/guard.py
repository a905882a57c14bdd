"""Steps whose update is not made: without a target, a loss or gradient that is not finite, or too
large a gradient.

And what is printed when a run breaks: one message if its reader can mend it, the call stack if we
must; and snapshots of a GPU's memory, for the usual viewer.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron5d.comm.collectives import all_reduce, broadcast_text
from megatron5d.config.schema import Config, OptimConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.pipeline_parallel.executor import PipelineError
from megatron5d.topology.grid import describe_rank
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.process import Process
from megatron5d.train.monitoring.writers import harmless


class StepSamples(NamedTuple):
    """A step, counted from 1, and the numbers of its samples."""

    step: int
    samples: range

    def __str__(self) -> str:
        return f"step {self.step} (samples {self.samples.start} to {self.samples.stop - 1})"


class Guard:
    """Judges each step by numbers that all ranks have, so that all of them do the same.

    Args:
        config: `on_nonfinite`, `skip_norm` and `max_skipped` say what is done.
        masked_by: what may leave a global batch without a target.
    """

    def __init__(
        self, config: OptimConfig, mesh: Mesh, buckets: Sequence[Bucket], masked_by: str
    ) -> None:
        self._config, self._mesh, self._buckets, self._masked_by = config, mesh, buckets, masked_by
        self.in_a_row = 0  # refused steps since the last update; a checkpoint keeps it (Progress)

    def refuses(
        self,
        loss: float,
        grad_norm: float,
        share: Tensor,
        num_targets: int,
        where: StepSamples | None,
    ) -> str | None:
        """Returns why the update of this step is to be left out; None where it is to be made.

        Args:
            loss: mean over the global batch.
            grad_norm: before clipping.
            share: this rank's part of the sums that `loss` comes from.

        Raises:
            FloatingPointError: the run is to stop here.

        Comm: nothing in a sound step; else two all_reduce over the world, of four numbers and of a
            name.
        """
        config = self._config
        usable = num_targets > 0 and math.isfinite(loss) and math.isfinite(grad_norm)
        if usable and not 0 < config.skip_norm < grad_norm:
            self.in_a_row = 0
            return None
        reason = f"grad_norm = {grad_norm:.6g} is above optim.skip_norm = {config.skip_norm:g}"
        if num_targets == 0:
            reason = f"the global batch has no target token: all of its loss is masked, by {self._masked_by}"
        elif not usable:
            reason = f"loss = {loss:.6g}, grad_norm = {grad_norm:.6g}; {self._origin(share)}"
        self.in_a_row += 1
        told = f"{reason}, in {where}" if where else reason
        this_step = f"data.skip_steps=[{where.step}]" if where else "data.skip_steps"
        if not usable and config.on_nonfinite == "stop":
            lower = (
                "Lower optim.lr or optim.clip, continue from an earlier checkpoint, leave"
                if num_targets
                else "Leave"
            )
            raise FloatingPointError(
                f"{told}. The weights are as before this step. {lower} this step out with {this_step}, or leave all "
                "such steps out with optim.on_nonfinite=skip"
            )
        if self.in_a_row > config.max_skipped:
            lower = "lower optim.lr, continue from an earlier checkpoint, " if num_targets else ""
            raise FloatingPointError(
                f"{told}. This is step {self.in_a_row} in a row without an update, optim.max_skipped = "
                f"{config.max_skipped}: {lower}leave steps out with {this_step}, or raise optim.max_skipped"
            )
        return reason

    def _origin(self, share: Tensor) -> str:
        """Returns the first ranks that hold something that is not finite, and the first parameter
        there."""
        world, sizes, names = self._mesh["world"], self._mesh.sizes, self._nonfinite_parameters()
        bad = torch.tensor(
            [not bool(share.isfinite().all()), bool(names)], device=share.device
        ).double()
        firsts = all_reduce(-torch.where(bad > 0, world.rank, world.size).double(), world, "max")
        in_loss, in_grads = (round(-first) for first in firsts.tolist())
        num_loss, num_grads = (round(number) for number in all_reduce(bad, world).tolist())
        faults = []
        if num_loss:
            of = f"{num_loss} of {world.size} ranks"
            faults.append(
                f"the loss of {of} is not finite, first of {describe_rank(sizes, in_loss)}"
            )
        if num_grads:
            name = broadcast_text(in_grads, names[0] if names else "", world, share.device)
            held = f"{num_grads} rank{'' if num_grads == 1 else 's'}"
            faults.append(
                f"gradients on {held} are not finite, first on {describe_rank(sizes, in_grads)} that of {name}"
            )
        return "; ".join(faults) or "every gradient is finite, and their squares overflow"

    def _nonfinite_parameters(self) -> list[str]:
        return [
            segment.spec.name
            for bucket in self._buckets
            if not bucket.frozen
            for segment in bucket.segments()
            if not bool(bucket.grad_slice[slice(*segment.owned)].isfinite().all())
        ]


_OURS = Path(__file__).resolve().parents[1]


def crash_message(error: Exception, rank: int, world: int) -> str | None:
    """Returns one message for the user; None where only the call stack helps.

    Files, disks, other ranks, memory that ran out and numbers that are no longer finite are for the
    user, and so is a ValueError of our own: it says what is wrong with what. One that comes out of
    a library is a mistake of ours.
    """
    cause = cause_of(error)
    frames = traceback.extract_tb((cause or error).__traceback__)
    ours = [frame for frame in frames if _OURS in Path(frame.filename).parents]
    said_by_us = bool(ours) and frames[-1] is ours[-1]
    for_the_user = OSError | FloatingPointError | torch.OutOfMemoryError
    if not isinstance(cause, for_the_user) and not (isinstance(cause, ValueError) and said_by_us):
        return None
    place = (
        f", in {Path(ours[-1].filename).relative_to(_OURS.parent)}:{ours[-1].lineno}"
        if ours
        else ""
    )
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


_HISTORY = 100_000  # allocations that a snapshot remembers


@contextmanager
def memory_snapshots(config: Config, process: Process) -> Iterator[MemorySnapshots]:
    """Records allocations inside this context; `log.memory_snapshot` gets them when memory runs
    out."""
    snapshots = MemorySnapshots(config, process)
    try:
        yield snapshots
    except RuntimeError as error:
        if ran_out_of_memory(error):
            path = snapshots.dump("oom")
            add_note(error, f"what was allocated: {path or 'log.memory_snapshot=FOLDER writes it'}")
        raise


class MemorySnapshots:
    """Memory snapshots of this rank's GPU, for https://pytorch.org/memory_viz."""

    def __init__(self, config: Config, process: Process) -> None:
        self.folder, self.step, self.rank = (
            config.log.memory_snapshot,
            config.log.memory_snapshot_step,
            process.rank,
        )
        self.active = self.folder is not None and process.device.type == "cuda"
        self.note = None
        if self.folder is not None and not self.active:
            self.note = "log.memory_snapshot is for GPUs: on this CPU none will be taken"
        if self.active:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    def after_step(self, step: int) -> None:
        """Takes the one that was asked for."""
        if step == self.step:
            self.dump(f"step{step}")

    def dump(self, name: str) -> Path | None:
        """Writes what is remembered; None where nothing is."""
        if not self.active or self.folder is None:
            return None
        path = Path(self.folder) / f"rank{self.rank}_{name}.pickle"
        with harmless(
            f"log.memory_snapshot = {self.folder}",
            lambda text: print(text, file=sys.stderr, flush=True),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        return path
