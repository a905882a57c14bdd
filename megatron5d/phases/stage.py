"""One stage of the model at run time: a list of phases, run forward and backward micro-batch by
micro-batch.

Every phase is a small autograd graph of its own, cut off at its input (saved_phase.py). That gives
the actions of a schedule without surgery on graphs:

    F   run the phases, keep each one's input and graph
    B   per phase, last to first: gradient of the input, and weight gradients at once
    I   per phase, last to first: gradient of the input; what phases hand to `defer` (the weight-gradient GEMMs) is kept
    W   per phase, last to first: the kept weight gradients

The steps of an action are data, made once a stage (`steps_of`). A `Pass` runs them one at a time,
so that two micro-batches can be interleaved, the communication of one under the compute of the
other. Between the phases of a stage goes a tensor or a tuple; its floating-point tensors have
gradients, everything else (indices, plans, None) is passed on as it is. Between stages goes one
tensor. Neighbouring phases of one recompute group (ActivationPolicy.group) keep only the input of
the first of them, and run once more, in B or I, communication included.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron5d.phases.offload import HostCopy
from megatron5d.phases.phase import MicroBatch, NoHooks, Phase, PhaseHooks
from megatron5d.phases.saved_phase import InFlight, Step, map_tensors, on_device
from megatron5d.phases.wgrad import run_now


class StageGraphs(Protocol):
    """Replays a stage's phases from captured graphs (pipeline_parallel/phase_graphs.py)."""

    def open(self, phases: Sequence[Phase], batch: MicroBatch, split: bool) -> InFlight:
        """The state of a micro-batch whose phases are captured or replayed."""
        ...

    @property
    def captures(self) -> bool:
        """Whether a micro-batch of this step will be captured."""
        ...

    def start_step(self, num_microbatches: int, eager: bool = False) -> None:
        """Begins a step, which runs without graphs if `eager`."""
        ...

    def release(self) -> None:
        """Destroys all graphs."""
        ...


def steps_of(phases: Sequence[Phase]) -> dict[str, list[Step]]:
    """Returns the steps of every op; a recompute group runs forward once more before its backward,
    in B and in I."""
    forward: list[Step] = []
    backward: list[Step] = []
    for number, (key, members) in enumerate(
        groupby(enumerate(phases), key=lambda each: each[1].activation_policy.group)
    ):
        places, group = list(members), None if key is None else number

        def run(kind: str, places=places, group=group) -> list[Step]:
            return [
                Step(kind, phase, i, group, group is not None and i == places[0][0])
                for i, phase in places
            ]

        forward += run("forward")
        backward = [
            *(run("recompute") if group is not None else ()),
            *run("backward")[::-1],
            *backward,
        ]
    wgrad = [Step("wgrad", phase, i) for i, phase in reversed(list(enumerate(phases)))]
    return {"F": forward, "B": backward, "I": backward, "W": wgrad}


class Stage:
    """Runs the phases of one model chunk for any number of micro-batches in flight.

    Args:
        phases: called as `phase(x, batch, defer) -> y` with hidden states `[s/cp/tp, b, h]`; the
            first stage's first phase ignores x (None) and reads tokens from the batch, the last
            stage's last returns sums of losses. A stage without phases passes its input on.
        hooks: called when phases begin and end; None = no hooks.
        graphs: replay the phases (train.cuda_graph); None = phases run as they are.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        hooks: PhaseHooks | None = None,
        graphs: StageGraphs | None = None,
    ) -> None:
        self.phases, self.graphs = list(phases), graphs
        self.hooks: PhaseHooks = hooks or NoHooks()
        if self.phases:
            self.hooks.register(self.phases)
        self.steps = steps_of(self.phases)
        policies = [phase.activation_policy for phase in self.phases]
        self.offloads = any(
            each.host_bytes is not None or each.input_host_bytes is not None for each in policies
        )
        self._in_flight: dict[int, InFlight] = {}

    def prefetch(self, op: str) -> None:
        """Tells the hooks with which phase the next action begins, whose weights they gather early;
        W needs none."""
        if op != "W" and self.phases:
            self.hooks.prefetch(self.phases[0 if op == "F" else -1], op == "F")

    def begin(
        self,
        op: str,
        microbatch: int,
        x: Any = None,
        batch: MicroBatch | None = None,
        split: bool = False,
    ) -> Pass:
        """Returns an action that is ready to run.

        Args:
            op: F, B, I or W.
            microbatch: its number; B, I and W follow its F, and W its I.
            x: F: the stage's input, None for the first; B and I: the gradient of its output.
            batch: F: what phases read beside their input.
            split: F: the backward will run as I and W.
        """
        if op == "F" and self.graphs is not None and batch is not None:
            self._in_flight[microbatch] = self.graphs.open(self.phases, batch, split)
        elif op == "F":
            self._in_flight[microbatch] = InFlight(batch, len(self.phases))
        saved = self._in_flight[microbatch]
        if op in "BW":
            del self._in_flight[microbatch]
        return Pass(self, op, saved, x)

    def evaluate(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Runs the forward without gradients and keeps nothing."""
        batch = copy(batch)  # which keeps what phases make `once`
        with torch.no_grad():
            for phase in self.phases:
                self.hooks.before(phase, "forward")
                x = phase(x, batch, run_now)
                self.hooks.after(phase, "forward")
        assert x is not None
        return x

    def host_bytes(self, microbatch: int) -> int:
        """Returns bytes that a micro-batch, whose forward has begun, keeps in the host's memory."""
        return self._in_flight[microbatch].host_bytes if microbatch in self._in_flight else 0

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose weight gradients are still owed."""
        return len(self._in_flight)


class Pass:
    """An action on its way through a stage, step by step.

    Args:
        op: F, B, I or W.
        state: F: the stage's input, and at the end its output. B and I: the gradient of its output,
            and at the end that of its input; None where it has none.
    """

    __slots__ = ("steps", "state", "_at", "_inner", "_op", "_hooks", "_saved", "_fetches")

    def __init__(self, stage: Stage, op: str, saved: InFlight, state: Any) -> None:
        self.steps, self.state = stage.steps[op], state
        self._op, self._hooks, self._saved, self._fetches = (
            op,
            stage.hooks,
            saved,
            stage.offloads and op in "BI",
        )
        self._at = 0
        self._inner: Any = None  # goes from phase to phase of a group that runs once more

    def advance(self) -> bool:
        """Runs the next step, if there is one; returns whether another follows."""
        if self._at == len(self.steps):
            return False
        step, saved, hooks = self.steps[self._at], self._saved, self._hooks
        kind, phase = step.kind, step.phase
        if self._fetches:
            self._fetch_ahead()
        hooks.before(phase, kind)
        if kind == "forward" and step.group is None:
            self.state = saved.open(step).forward(self.state)
        elif kind == "forward":
            if step.opens:
                saved.inputs[step.group] = _kept(phase, self.state)  # type: ignore[index]
            self.state = saved.evaluate(step, self.state)
        elif kind == "recompute":
            if step.opens:
                self._inner = on_device(saved.inputs.pop(step.group))  # type: ignore[arg-type]
            self._inner = saved.open(step).forward(self._inner)
        elif kind == "backward":
            self._inner = None
            self.state = saved.of(step).backward(self.state, split=self._op == "I")
        else:
            saved.of(step).run_wgrad()
        self._at += 1
        more = self._at < len(self.steps)
        if not more:
            self.state = saved.end(self._op, self.state)  # before hooks make room for gradients
        hooks.after(phase, kind)
        if self._op == "B" and kind == "backward":
            hooks.after(phase, "wgrad")
        return more

    def _fetch_ahead(self) -> None:
        """Copies come back from the host one step before they are read; those of the first step
        have no such time."""
        if self._at == 0:
            self._saved.fetch(self.steps[0])
        if self._at + 1 < len(self.steps):
            self._saved.fetch(self.steps[self._at + 1])


def _kept(phase: Phase, x: Any) -> Any:
    """Returns a recompute group's input as it is kept: large tensors on the host where its first
    phase says so."""
    at_least = phase.activation_policy.input_host_bytes
    if at_least is None:
        return x
    return map_tensors(lambda t: HostCopy(t) if t.numel() * t.element_size() >= at_least else t, x)
