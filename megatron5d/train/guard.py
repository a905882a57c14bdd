"""Decides which steps make no update, what a failed run prints, and takes memory snapshots.

A step makes no update if it has no target, a loss or gradient that is not finite, or too large a
gradient. A failed run prints one message if its user can fix the cause, else the traceback.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron5d.comm.collectives import all_reduce
from megatron5d.config.schema import Config, OptimConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.pipeline_parallel.executor import PipelineError
from megatron5d.topology.all_ranks import broadcast_text
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
    """Judges each step by figures that all ranks share, so that all ranks decide the same.

    Args:
        config: the policy: `on_nonfinite`, `skip_norm` and `max_skipped`.
        masked_by: names what can mask all targets of a global batch.
    """

    def __init__(
        self, config: OptimConfig, mesh: Mesh, buckets: Sequence[Bucket], masked_by: str
    ) -> None:
        self._config, self._mesh, self._buckets, self._masked_by = config, mesh, buckets, masked_by
        self.in_a_row = 0  # skipped steps since the last update; part of a checkpoint (Progress)

    def refuses(
        self,
        loss: float,
        grad_norm: float,
        share: Tensor,
        num_targets: int,
        samples: StepSamples | None,
    ) -> str | None:
        """Why this step makes no update; None if it does.

        Args:
            loss: mean over the global batch.
            grad_norm: before clipping.
            share: this rank's share of the sums behind `loss`.

        Raises:
            FloatingPointError: the run must stop here.

        Comm: none in a sound step; else two all_reduce over the world, of four numbers and a name.
        """
        config = self._config
        usable = num_targets > 0 and math.isfinite(loss) and math.isfinite(grad_norm)
        if usable and not 0 < config.skip_norm < grad_norm:
            self.in_a_row = 0
            return None
        reason = f"grad_norm = {grad_norm:.6g} is above optim.skip_norm = {config.skip_norm:g}"
        if num_targets == 0:
            reason = f"no target token in the global batch: {self._masked_by} masks all of its loss"
        elif not usable:
            reason = f"loss = {loss:.6g}, grad_norm = {grad_norm:.6g}; {self._origin(share)}"
        self.in_a_row += 1
        problem = f"{reason}, in {samples}" if samples else reason
        skip_it = f"skip it with data.skip_steps{f'=[{samples.step}]' if samples else ''}"
        if not usable and config.on_nonfinite == "stop":
            causes = "lower optim.lr or optim.clip, continue from an earlier checkpoint, "
            raise FloatingPointError(
                f"{problem}. The weights are those before this step. To continue: "
                f"{causes if num_targets else ''}{skip_it}, "
                "or skip all such steps with optim.on_nonfinite=skip"
            )
        if self.in_a_row > config.max_skipped:
            causes = "lower optim.lr, continue from an earlier checkpoint, "
            raise FloatingPointError(
                f"{problem}. {self.in_a_row} steps in a row made no update (optim.max_skipped = "
                f"{config.max_skipped}). To continue: {causes if num_targets else ''}{skip_it}, "
                "or raise optim.max_skipped"
            )
        return reason

    def _origin(self, share: Tensor) -> str:
        """The first ranks with a loss or a gradient that is not finite, and the parameter there."""
        world, sizes, names = self._mesh["world"], self._mesh.sizes, self._nonfinite_parameters()
        is_bad = [not bool(share.isfinite().all()), bool(names)]
        bad = torch.tensor(is_bad, device=share.device).double()
        firsts = all_reduce(-torch.where(bad > 0, world.rank, world.size).double(), world, "max")
        in_loss, in_grads = (round(-first) for first in firsts.tolist())
        num_loss, num_grads = (round(number) for number in all_reduce(bad, world).tolist())
        findings = []
        if num_loss:
            ranks, first = f"{num_loss} of {world.size} ranks", describe_rank(sizes, in_loss)
            findings.append(f"the loss of {ranks} is not finite, first on {first}")
        if num_grads:
            name = broadcast_text(in_grads, names[0] if names else "")
            ranks = f"{num_grads} rank{'' if num_grads == 1 else 's'}"
            first = describe_rank(sizes, in_grads)
            findings.append(f"gradients on {ranks} are not finite, first that of {name} on {first}")
        return "; ".join(findings) or "every gradient is finite, but the sum of squares overflows"

    def _nonfinite_parameters(self) -> list[str]:
        return [
            segment.spec.name
            for bucket in self._buckets
            if not bucket.frozen
            for segment in bucket.segments()
            if not bool(bucket.grad_slice[slice(*segment.owned)].isfinite().all())
        ]


_PACKAGE = Path(__file__).resolve().parents[1]


def crash_message(error: Exception, rank: int, world: int) -> str | None:
    """One message for the user; None where only the traceback helps.

    Users can fix problems of files, disks, other ranks, memory and numbers that are not finite, and
    the cause of a ValueError that our code raises: it names what is wrong. A ValueError that a
    library raises is a mistake of ours.
    """
    cause = cause_of(error)
    frames = traceback.extract_tb((cause or error).__traceback__)
    our_frames = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents]
    raised_by_us = bool(our_frames) and frames[-1] is our_frames[-1]
    for_user = isinstance(cause, OSError | FloatingPointError | torch.OutOfMemoryError)
    if not for_user and not (isinstance(cause, ValueError) and raised_by_us):
        return None
    location = ""
    if our_frames:
        file = Path(our_frames[-1].filename).relative_to(_PACKAGE.parent)
        location = f", in {file}:{our_frames[-1].lineno}"
    text = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    return (
        f"rank {rank} of {world} stops the run: {text}\n"
        f"  ({type(error).__name__}{location}; log.traceback=true shows the traceback)"
    )


def cause_of(error: Exception) -> BaseException | None:
    """The original error behind a PipelineError, which only adds the action."""
    return error.__cause__ if isinstance(error, PipelineError) else error


def ran_out_of_memory(error: Exception) -> bool:
    """Whether the device ran out of memory, in an action of the pipeline or elsewhere."""
    return isinstance(cause_of(error), torch.OutOfMemoryError)


def add_note(error: Exception, text: str) -> None:
    """Adds a line to the printed error, as `add_note` of Python 3.11 does."""
    vars(error)["__notes__"] = [*getattr(error, "__notes__", []), text]


_HISTORY = 100_000  # allocations that a snapshot remembers


@contextmanager
def memory_snapshots(config: Config, process: Process) -> Iterator[MemorySnapshots]:
    """Records allocations, and writes them to `log.memory_snapshot` when memory runs out."""
    snapshots = MemorySnapshots(config, process)
    try:
        yield snapshots
    except RuntimeError as error:
        if ran_out_of_memory(error):
            path = snapshots.dump("oom")
            add_note(error, f"allocations: {path or 'log.memory_snapshot=FOLDER records them'}")
        raise


class MemorySnapshots:
    """Memory snapshots of this rank's GPU, for https://pytorch.org/memory_viz."""

    def __init__(self, config: Config, process: Process) -> None:
        self.folder, self.step = config.log.memory_snapshot, config.log.memory_snapshot_step
        self.rank = process.rank
        self.active = self.folder is not None and process.device.type == "cuda"
        self.note = None
        if self.folder is not None and not self.active:
            self.note = "log.memory_snapshot requires a GPU: no snapshots on this CPU"
        if self.active:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    def after_step(self, step: int) -> None:
        """Writes the snapshot of `log.memory_snapshot_step`."""
        if step == self.step:
            self.dump(f"step{step}")

    def dump(self, name: str) -> Path | None:
        """Writes a snapshot and returns its path; None where none are taken."""
        if not self.active or self.folder is None:
            return None
        path = Path(self.folder) / f"rank{self.rank}_{name}.pickle"
        warn = partial(print, file=sys.stderr, flush=True)
        with harmless(f"log.memory_snapshot = {self.folder}", warn):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        return path
