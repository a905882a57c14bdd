"""Stages whose compute is a timed wait: the true executor and its messages, with more ranks than
cores.

A waiting rank needs no core. What Python and the network take between two actions is part of what
is measured.
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
FORMS = [FORM] * 64  # of as many stages as any test has


class Timing(NamedTuple):
    """When one action ran, on the clock of time.perf_counter (one clock for all processes of a
    machine)."""

    action: Action
    start: float  # its input was there
    end: float  # its output was asked for


@dataclass
class Held:
    """What a rank's stages have done, activations and deferred weight gradients that they hold, the
    most ever held."""

    now: float = 0.0
    peak: float = 0.0
    timeline: list[Timing] = field(default_factory=list)

    def add(self, amount: float) -> None:
        self.now += amount
        self.peak = max(self.peak, self.now)


def may_come_first() -> bool:
    """Says whether `come_first` is allowed here."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        return False
    return True


def come_first() -> None:
    """Lets this rank's threads, which do next to nothing, run before all others as soon as they
    wake."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def wait_until(moment: float) -> float:
    """Sleeps until the moment, and returns it, or what time it is if that is later already."""
    now = time.perf_counter()
    if moment > now:
        time.sleep(moment - now)
    return max(moment, now)


class TimedPass:
    """An action of two steps: the halves of its compute, of which the second ends with what the
    action passes on."""

    def __init__(self, halves: Iterator[Tensor | None]) -> None:
        self._halves, self._left = halves, 2
        self.state: Tensor | None = None

    def advance(self) -> bool:
        self.state, self._left = next(self._halves), self._left - 1
        return self._left > 0


@dataclass
class TimedStage:
    """A stage with the times of `costs`; values travel through it as numbers that name their
    origin.

    Compute is in two halves around the all-to-all, which runs while nobody computes, or under a
    partner's compute.
    """

    number: int
    costs: StageCosts
    unit_s: float
    held: Held
    in_flight: set[int] = field(default_factory=set)

    phases = (None,)  # not an empty stage

    def begin(self, op: str, microbatch: int, x: Tensor | None, batch, split: bool) -> TimedPass:
        """An action of a Stage, whose steps are waits."""
        steps = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}[
            op
        ]
        return TimedPass(steps(op, microbatch, x))

    def _phases(self, op: str, microbatch: int) -> Iterator[None]:
        index, begin = OPS.index(op), time.perf_counter()
        compute = float(self.costs.compute[index, self.number]) * self.unit_s
        a2a = float(self.costs.a2a[index, self.number]) * self.unit_s
        sent = wait_until(time.perf_counter() + compute / 2)
        yield
        arrived = wait_until(sent + a2a)
        end = wait_until(arrived + compute / 2)
        self.held.timeline.append(Timing(Action(op, self.number, microbatch), begin, end))

    def _forward(self, op: str, microbatch: int, x: Tensor | None) -> Iterator[Tensor]:
        self.held.add(float(self.costs.activation[self.number]))
        self.in_flight.add(microbatch)
        self._check(x, microbatch, self.number - 1 if self.number else None)
        for _ in self._phases(op, microbatch):
            yield torch.empty(0)
        yield torch.tensor([float(self.number), float(microbatch), 0.0, 0.0], dtype=FORM.dtype)

    def _backward(self, op: str, microbatch: int, grad: Tensor) -> Iterator[Tensor | None]:
        self._check(grad, microbatch, self.number + 1)
        for _ in self._phases(op, microbatch):
            yield None
        if op == "B":
            self._release(microbatch)
        yield torch.tensor([float(self.number), float(microbatch), 0.0, 0.0], dtype=FORM.dtype)

    def _weights(self, op: str, microbatch: int, _: None) -> Iterator[None]:
        yield from self._phases(op, microbatch)
        self._release(microbatch)
        yield None

    def prefetch(self, op: str) -> None:
        pass

    def _release(self, microbatch: int) -> None:
        self.in_flight.remove(microbatch)
        self.held.add(-float(self.costs.activation[self.number]))

    def _check(self, value: Tensor | None, microbatch: int, origin: int | None) -> None:
        if origin is not None:
            assert value is not None and value[:2].tolist() == [origin, microbatch], (
                self.number,
                microbatch,
                value,
            )

    def evaluate(self, x: Tensor | None, batch) -> Tensor:
        *_, y = self._forward("F", batch, x)
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
) -> tuple[Executor, Held]:
    """One rank's executor over timed stages, with its channels open; without torch's checks, which
    cost time."""
    dist.set_debug_level(dist.DebugLevel.OFF)
    held = Held()
    stage_costs = costs.of(program.placement)
    stages = {
        key: TimedStage(key[1], stage_costs, unit_s, held)
        for key in program.placement.stages_of(axis.rank)
    }
    channels = open_flows(program.placement, axis)
    return Executor(program, axis.rank, stages, channels, training=training, waits=waits), held


def last_gradient(batch, y: Tensor) -> Tensor:
    """The loss of timed stages: the gradient names a stage beyond the last."""
    grad = y.clone()
    grad[0] += 1
    return grad


def run_timed(executor: Executor, held: Held) -> list[Timing]:
    """Runs the Program once and returns the times of this rank's actions."""
    held.timeline.clear()
    executor.run(range(executor.program.num_microbatches), last_gradient, FORMS)
    return held.timeline
