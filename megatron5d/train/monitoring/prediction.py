"""What planning expects of a run, as data, and the first steps' measurements beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron5d.comm.collectives import all_reduce
from megatron5d.train.build import Run
from megatron5d.train.step import StepResult

_SMALL = 1e-3  # of all bytes: an axis that carries less carries counts and norms, which nobody predicts


@dataclass(frozen=True)
class Prediction:
    """What is expected of a run; on ranks other than 0 the peak alone.

    Args:
        peak_tflops: of one device, for MFU; None = unknown.
        step_s: seconds of a step; None = not predicted.
        mfu: of such a step.
        bubble: for each pipeline rank, the fraction of a step in which it waits; empty = not predicted.
        sent: for each pipeline rank, axis -> bytes that it sends in a step.
        memory: for each pipeline rank, bytes that its tensors take at most.
        report: lines for the beginning of the log.
    """

    peak_tflops: float | None = None
    step_s: float | None = None
    mfu: float | None = None
    bubble: Sequence[float] = ()
    sent: Sequence[Mapping[str, int]] = ()
    memory: Sequence[int] = ()
    report: Sequence[str] = ()

    def record(self, pp_rank: int) -> dict[str, Any]:
        """Returns what stands in every record of a pipeline rank beside what is measured."""
        found: dict[str, Any] = {"memory_predicted_gb": self.memory[pp_rank] / 1e9 if self.memory else None}
        if self.step_s is not None:
            found |= {"step_time_predicted_s": self.step_s, "mfu_predicted": self.mfu}
        if len(self.bubble) > 1:
            found["bubble_predicted"] = self.bubble[pp_rank]
        return found


def compare_step(run: Run, predicted: Prediction, result: StepResult, sent: Mapping[str, int]) -> str | None:
    """Returns what one step has taken and sent beside what was predicted, as text; None where nothing was.

    Args:
        run: on every rank.
        predicted: for it.
        result: of the step.
        sent: axis -> bytes that this rank has sent in it.

    Comm: all_reduce over the world of a number for every pipeline rank, where there are several.
    """
    pp, process = run.mesh["pp"], run.process
    lines = []
    if predicted.sent and (axes := _compared(sent, predicted.sent[pp.rank])):
        lines.append(f"  bytes that rank 0 sent: {axes}")
    if pp.size > 1:
        bubble = torch.zeros(pp.size, dtype=torch.float64, device=process.device)
        bubble[pp.rank] = result.bubble * pp.size / process.world
        measured = all_reduce(bubble, run.mesh["world"]).tolist()
        if predicted.bubble:
            each = ", ".join(f"{found:.1%} ({told:.1%})" for found, told in zip(measured, predicted.bubble))
            cores = os.cpu_count() or 1
            shared = f"; {process.world} ranks share {cores} core{'' if cores == 1 else 's'}"
            lines.append(
                f"  bubble by pipeline rank: {each}"
                + (shared if process.device.type != "cuda" and cores < process.world else "")
            )
    return "\n".join([f"measured of step {run.progress.step} (predicted):", *lines]) if lines else None


def compare_memory(run: Run, predicted: Prediction) -> str | None:
    """Returns the memory that tensors have taken at most beside what was predicted, as text; None on a CPU.

    Comm: all_reduce over the world of a number for every pipeline rank, on GPUs.
    """
    pp, device = run.mesh["pp"], run.process.device
    if run.config.log.memory_check == "off" or device.type != "cuda":  # a CPU's allocator counts nothing
        return None
    most = torch.zeros(pp.size, dtype=torch.float64, device=device)
    most[pp.rank] = torch.cuda.max_memory_allocated(device)
    measured = all_reduce(most, run.mesh["world"], "max").tolist()
    lines = [
        f"  pp {rank}: predicted {told / 2**30:.2f} GiB, measured {found / 2**30:.2f} GiB ({told / found - 1:+.1%})"
        for rank, (told, found) in enumerate(zip(predicted.memory, measured))
    ]
    return "\n".join(["memory allocated at most, by pipeline rank:", *lines])


def _compared(sent: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    """Returns the bytes of each axis, the one that carries the most first."""
    least = _SMALL * sum(sent.values())
    axes = [axis for axis in {*sent, *predicted} if max(sent.get(axis, 0), predicted.get(axis, 0)) > least]
    axes.sort(key=lambda axis: (-sent.get(axis, 0), axis))
    return ", ".join(f"{axis} {_size(sent.get(axis, 0))} ({_size(predicted.get(axis, 0))})" for axis in axes)


def _size(num_bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"
