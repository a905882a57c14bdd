"""One stage of the model at run time: a list of phases, run forward and backward micro-batch by
micro-batch.

Every phase has its own small autograd graph, cut off at its input (saved_phase.py). That gives the
actions of a schedule without surgery on graphs:

    F   run the phases, keep each one's input and graph
    B   per phase, last to first: gradient of the input, and weight gradients at once
    I   per phase, last to first: gradient of the input; weight-gradient GEMMs (`defer`) are kept
    W   per phase, last to first: the kept weight gradients

The steps of an action are data, made once per stage (`steps_of`). A `Pass` runs them one at a time,
so that two micro-batches can be interleaved, the communication of one under the compute of the
other.

A tensor or a tuple passes between the phases of a stage; its floating-point tensors have gradients,
everything else (indices, plans, None) is passed unchanged. One tensor passes between stages.
Adjacent phases of one recompute group (ActivationPolicy.group) keep only the input of the first of
them, and run once more, communication included, in B or I.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron5d.phases.activations import HostCopy
from megatron5d.phases.phase import MicroBatch, Phase, PhaseHooks
from megatron5d.phases.saved_phase import SavedMicroBatch, Step, map_tensors, on_device
from megatron5d.phases.wgrad import run_now


class StageGraphs(Protocol):
    """Replays a stage's phases from captured graphs (pipeline_parallel/phase_graphs.py)."""

    def open(self, phases: Sequence[Phase], batch: MicroBatch, split: bool) -> SavedMicroBatch:
        """Makes the state of a micro-batch whose phases are captured or replayed."""
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
    """The steps of every op; B and I run a recompute group's forward before its backward."""
    forward: list[Step] = []
    backward: list[Step] = []
    for number, (key, members) in enumerate(
        groupby(enumerate(phases), key=lambda member: member[1].activation_policy.group)
    ):
        group = None if key is None else number
        steps = [
            Step("forward", phase, position, group, group is not None and index == 0)
            for index, (position, phase) in enumerate(members)
        ]
        recompute = [] if group is None else [step._replace(kind="recompute") for step in steps]
        forward += steps
        backward = [
            *recompute,
            *(step._replace(kind="backward") for step in steps[::-1]),
            *backward,
        ]
    wgrad = [Step("wgrad", phase, position) for position, phase in enumerate(phases)][::-1]
    return {"F": forward, "B": backward, "I": backward, "W": wgrad}


class Stage:
    """Runs the phases of one model chunk for any number of micro-batches in flight.

    Args:
        phases: take and return hidden states `[s/cp/tp, b, h]`. The first stage's first phase gets
            None and reads tokens from the batch; the last stage's last phase returns sums of
            losses. A stage without phases passes its input on.
        hooks: called when phases begin and end; None = no hooks.
        graphs: replay the phases (train.cuda_graph); None = phases run without graphs.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        hooks: PhaseHooks | None = None,
        graphs: StageGraphs | None = None,
    ) -> None:
        self.phases, self.graphs = list(phases), graphs
        self.hooks = hooks or PhaseHooks()
        if self.phases:
            self.hooks.register(self.phases)
        self.steps = steps_of(self.phases)
        policies = [phase.activation_policy for phase in self.phases]
        self.offloads = any(
            policy.host_bytes is not None or policy.input_host_bytes is not None
            for policy in policies
        )
        self._in_flight: dict[int, SavedMicroBatch] = {}

    def prefetch(self, op: str) -> None:
        """Announces to the hooks the first phase of the next action, whose weights they gather.

        Args:
            op: of the next action; W reads no weights.
        """
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
        """Makes an action that is ready to run.

        Args:
            op: F, B, I or W.
            microbatch: its number; B, I and W follow its F, and W its I.
            x: F: the stage's input, None for the first; B and I: the gradient of its output.
            batch: F: what phases read in addition to their input.
            split: F: the backward will run as I and W.
        """
        if op == "F" and self.graphs is not None and batch is not None:
            self._in_flight[microbatch] = self.graphs.open(self.phases, batch, split)
        elif op == "F":
            self._in_flight[microbatch] = SavedMicroBatch(batch, len(self.phases))
        saved = self._in_flight[microbatch]
        if op in "BW":
            del self._in_flight[microbatch]
        return Pass(self, op, saved, x)

    def evaluate(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Runs the forward without gradients; saves nothing."""
        # The copy's cache of results is freed with it.
        batch = copy(batch)
        with torch.no_grad():
            for phase in self.phases:
                self.hooks.before(phase, "forward")
                x = phase(x, batch, run_now)
                self.hooks.after(phase, "forward")
        assert x is not None
        return x

    def host_bytes(self, microbatch: int) -> int:
        """Bytes that a micro-batch, whose forward has begun, keeps in host memory."""
        return self._in_flight[microbatch].host_bytes if microbatch in self._in_flight else 0

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches whose weight gradients have not run yet."""
        return len(self._in_flight)


class Pass:
    """An action that runs through a stage, step by step.

    Args:
        stage: whose steps it runs.
        op: F, B, I or W.
        saved: of the micro-batch.
        state: F: the stage's input, and at the end its output. B and I: the gradient of its output,
            and at the end that of its input; None where it has none.
    """

    __slots__ = ("steps", "state", "_next", "_group_state", "_op", "_hooks", "_saved", "_fetches")

    def __init__(self, stage: Stage, op: str, saved: SavedMicroBatch, state: Any) -> None:
        self.steps, self.state = stage.steps[op], state
        self._op, self._hooks, self._saved = op, stage.hooks, saved
        self._fetches = stage.offloads and op in "BI"
        self._next = 0
        self._group_state: Any = None  # passes between the phases of a group that is recomputed

    def advance(self) -> bool:
        """Runs the next step, if there is one; returns whether another follows."""
        if self._next == len(self.steps):
            return False
        step, saved, hooks = self.steps[self._next], self._saved, self._hooks
        kind, phase = step.kind, step.phase
        if self._fetches:
            self._fetch_early()
        hooks.before(phase, kind)
        if kind == "forward" and step.group is None:
            self.state = saved.open(step).forward(self.state)
        elif kind == "forward":
            if step.starts_group:
                saved.group_inputs[step.group] = _group_input(phase, self.state)
            self.state = saved.evaluate(step, self.state)
        elif kind == "recompute":
            if step.starts_group:
                self._group_state = on_device(saved.group_inputs.pop(step.group))
            self._group_state = saved.open(step).forward(self._group_state)
        elif kind == "backward":
            self._group_state = None
            self.state = saved.saved_phase(step).backward(self.state, split=self._op == "I")
        else:
            saved.saved_phase(step).run_wgrad()
        self._next += 1
        has_more = self._next < len(self.steps)
        if not has_more:
            # Frees the graph before hooks allocate memory for gradients.
            self.state = saved.finish(self._op, self.state)
        hooks.after(phase, kind)
        if self._op == "B" and kind == "backward":
            hooks.after(phase, "wgrad")
        return has_more

    def _fetch_early(self) -> None:
        """Starts copies from the host one step before use; those of the first step just before."""
        if self._next == 0:
            self._saved.fetch(self.steps[0])
        if self._next + 1 < len(self.steps):
            self._saved.fetch(self.steps[self._next + 1])


def _group_input(phase: Phase, x: Any) -> Any:
    """A recompute group's input as the stage keeps it: large tensors on the host if its first phase
    offloads."""
    min_bytes = phase.activation_policy.input_host_bytes
    if min_bytes is None:
        return x
    return map_tensors(lambda t: HostCopy(t) if t.numel() * t.element_size() >= min_bytes else t, x)
