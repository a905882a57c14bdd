"""Stages whose compute is a timed wait: the real executor and its messages, with more ranks than
cores.

A waiting rank needs no core. The time of Python and the network between two actions is part of
every measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.ledger import Exposure
from megatron5d.comm.p2p import TensorMeta
from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.executor import Executor, open_flows
from megatron5d.pipeline_parallel.program import OPS, Action, Program
from megatron5d.topology.axis import Axis

FORM = TensorMeta((4,), torch.float64)
FORMS = [FORM] * 64  # one for each stage of any test


class Timing(NamedTuple):
    """When an action ran, on time.perf_counter, the same clock for all processes of a machine."""

    action: Action
    start: float  # its input has arrived
    end: float  # its output is ready


@dataclass
class Record:
    """The actions that a rank's stages have run, and the activations that they hold."""

    activations: float = 0.0
    peak: float = 0.0
    timeline: list[Timing] = field(default_factory=list)

    def add(self, amount: float) -> None:
        self.activations += amount
        self.peak = max(self.peak, self.activations)


def take_priority() -> None:
    """Lets this rank's threads, which do next to nothing, run before all others when they wake."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def wait_until(moment: float) -> float:
    """Sleeps until the moment; returns it, or the time now if it has passed."""
    now = time.perf_counter()
    if moment > now:
        time.sleep(moment - now)
    return max(moment, now)


class TimedPass:
    """An action of two steps, the halves of its compute; the second ends with its output."""

    def __init__(self, halves: Iterator[Tensor | None]) -> None:
        self._halves, self._num_left = halves, 2
        self.state: Tensor | None = None

    def advance(self) -> bool:
        self.state, self._num_left = next(self._halves), self._num_left - 1
        return self._num_left > 0


@dataclass
class TimedStage:
    """A stage with the times of `costs`; its values are numbers that name their origin.

    Compute is in two halves around the all-to-all, which runs while no action computes, or under a
    partner's compute.
    """

    number: int
    costs: StageCosts
    unit_s: float
    record: Record
    in_flight: set[int] = field(default_factory=set)

    phases = (None,)  # not an empty stage

    def begin(self, op: str, microbatch: int, x: Tensor | None, batch, split: bool) -> TimedPass:
        """An action of a Stage, whose steps are waits."""
        return TimedPass(self._steps(op, microbatch, x))

    def _steps(self, op: str, microbatch: int, x: Tensor | None) -> Iterator[Tensor | None]:
        if op == "F":
            self.record.add(float(self.costs.activation[self.number]))
            self.in_flight.add(microbatch)
        if op != "W":
            self._check(x, microbatch, self.number - 1 if op == "F" else self.number + 1)
        index, begin = OPS.index(op), time.perf_counter()
        compute = float(self.costs.compute[index, self.number]) * self.unit_s
        a2a = float(self.costs.a2a[index, self.number]) * self.unit_s
        sent = wait_until(time.perf_counter() + compute / 2)
        yield None
        arrived = wait_until(sent + a2a)
        end = wait_until(arrived + compute / 2)
        self.record.timeline.append(Timing(Action(op, self.number, microbatch), begin, end))
        if op in "BW":
            self._release(microbatch)
        origin = [float(self.number), float(microbatch), 0.0, 0.0]
        yield None if op == "W" else torch.tensor(origin, dtype=FORM.dtype)

    def prefetch(self, op: str) -> None:
        pass

    def _release(self, microbatch: int) -> None:
        self.in_flight.remove(microbatch)
        self.record.add(-float(self.costs.activation[self.number]))

    def _check(self, value: Tensor | None, microbatch: int, origin: int) -> None:
        if origin >= 0:
            assert value is not None and value[:2].tolist() == [origin, microbatch], (
                self.number,
                microbatch,
                value,
            )

    def evaluate(self, x: Tensor | None, batch) -> Tensor | None:
        *_, y = self._steps("F", batch, x)
        self._release(batch)
        return y

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)


def timed_executor(
    program: Program,
    axis: Axis,
    costs: Costs,
    unit_s: float,
    waits: Exposure | None = None,
    training: bool = True,
) -> tuple[Executor, Record]:
    """One rank's executor over timed stages, with open channels; without torch's checks, which take
    time."""
    dist.set_debug_level(dist.DebugLevel.OFF)
    record = Record()
    stage_costs = costs.of(program.placement)
    stages = {
        key: TimedStage(key[1], stage_costs, unit_s, record)
        for key in program.placement.stages_of(axis.rank)
    }
    channels = open_flows(program.placement, axis)
    return Executor(program, axis.rank, stages, channels, training=training, waits=waits), record


def last_gradient(batch, y: Tensor) -> Tensor:
    """The loss of timed stages: the gradient names a stage after the last."""
    grad = y.clone()
    grad[0] += 1
    return grad


def run_timed(executor: Executor, record: Record) -> list[Timing]:
    """Runs the Program once; returns the times of this rank's actions."""
    record.timeline.clear()
    executor.run(range(executor.program.num_microbatches), last_gradient, FORMS)
    return record.timeline
