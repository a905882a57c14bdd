"""What a step is expected to take and to send, shown beside what the first steps have taken and sent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron5d.comm.collectives import all_reduce
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.simulate import simulate, waiting_shares
from megatron5d.planning.auto_schedule import run_costs
from megatron5d.planning.predict import bytes_on, step_on
from megatron5d.planning.step_time import StepCost
from megatron5d.train.build import Run
from megatron5d.train.pipeline_layout import PipelinePlan, micro_batch_counts
from megatron5d.train.step import StepResult

_SMALL = 1e-3  # of all bytes: an axis that carries less carries counts and norms, which nobody predicts


class Expectation:
    """Predicts steps, and compares.

    Args:
        run: whose steps are meant.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cost: StepCost | None = None
        self.bubble: Sequence[float] = ()  # by pipeline rank, see `waiting_shares`
        self.sent: Sequence[Mapping[str, int]] = ()  # by pipeline rank: axis -> bytes

    def predict(self) -> str | None:
        """Predicts a step; what to tell of it. On rank 0, and nothing while the batch grows.

        Times are predicted of GPUs that planning/clusters.py knows; elsewhere the bubble is of passes that take as long as
        their FLOPs.
        """
        run, config = self.run, self.run.config
        if config.train.gbs_ramp is not None:
            return None
        program = run.plan.program_of(micro_batch_counts(config, run.process.world)[-1])
        if config.parallel.pp > 1:
            self.bubble = expected_bubble(config, run.plan, program)
        try:
            self.sent = bytes_on(config, run.process.world, run.plan)
        except Exception as error:  # a layer that needs values cannot be counted; it trains all the same
            return f"what a step sends is not predicted: {type(error).__name__}: {error}"
        if run.process.device.type != "cuda":
            return None
        cost = step_on(torch.cuda.get_device_name(run.process.device), config, run.process.world, run.plan)
        if not isinstance(cost, StepCost):
            return cost
        self.cost, self.bubble = cost, cost.bubble
        return f"predicted: {cost.step_s:.3g} s a step, MFU {cost.mfu:.1%}; experts evenly loaded (docs/planning.md)"

    def record(self) -> dict[str, Any]:
        """What stands in every record beside what is measured."""
        found: dict[str, Any] = {}
        if self.cost is not None:
            found |= {"step_time_predicted_s": self.cost.step_s, "mfu_predicted": self.cost.mfu}
        if self.bubble and self.run.config.parallel.pp > 1:
            found["bubble_predicted"] = self.bubble[self.run.mesh["pp"].rank]
        return found

    def beside(self, result: StepResult, sent: Mapping[str, int]) -> str | None:
        """What one step has taken and sent, beside what was predicted; None where nothing was. On every rank.

        Args:
            result: of the step.
            sent: axis -> bytes that this rank has sent in it.

        Comm: all_reduce over the world of a number for every pipeline rank, where there are several.
        """
        run, pp = self.run, self.run.mesh["pp"]
        bubble = torch.zeros(pp.size, dtype=torch.float64, device=run.process.device)
        if pp.size > 1:
            bubble[pp.rank] = result.bubble * pp.size / run.process.world
            bubble = all_reduce(bubble, run.mesh["world"])
        lines = []
        if self.sent and (axes := _told(sent, self.sent[pp.rank])):
            lines.append(f"  bytes that rank 0 sent: {axes}")
        if self.bubble and pp.size > 1:
            each = ", ".join(f"{found:.1%} ({told:.1%})" for found, told in zip(bubble.tolist(), self.bubble))
            lines.append(f"  bubble by pipeline rank: {each}{self._in_turns()}")
        return "\n".join([f"measured of step {run.progress.step} (predicted):", *lines]) if lines else None

    def _in_turns(self) -> str:
        """Why ranks on a CPU wait longer than their schedule makes them."""
        cores, process = os.cpu_count() or 1, self.run.process
        if process.device.type == "cuda" or cores >= process.world:
            return ""
        return f"; {process.world} ranks take turns on {cores} core{'' if cores == 1 else 's'}"


def expected_bubble(config: Config, plan: PipelinePlan, program: Program) -> list[float]:
    """Of every pipeline rank, see `waiting_shares`.

    Args:
        config: of the run.
        plan: deals the layers; `pipeline.schedule=auto` may have found another split than the configuration has.
        program: of a step.
    """
    dealt = replace(config, pipeline=replace(config.pipeline, layout=list(plan.layout)))
    return waiting_shares(program, simulate(program, run_costs(dealt).of(program.placement)))


def _told(sent: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    """Axis by axis, the one that carries the most first."""
    least = _SMALL * sum(sent.values())
    axes = [axis for axis in {*sent, *predicted} if max(sent.get(axis, 0), predicted.get(axis, 0)) > least]
    axes.sort(key=lambda axis: (-sent.get(axis, 0), axis))
    return ", ".join(f"{axis} {_size(sent.get(axis, 0))} ({_size(predicted.get(axis, 0))})" for axis in axes)


def _size(num_bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"
