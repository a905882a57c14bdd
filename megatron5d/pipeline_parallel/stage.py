"""One stage of the model at run time: a list of phases, run forward and backward micro-batch by micro-batch.

Every phase is a small autograd graph of its own, cut off at its input (saved_phase.py). That gives the actions of a
schedule without surgery on graphs:

    F   run the phases, keep each one's input and graph
    B   per phase, last to first: gradient of the input, and weight gradients at once
    I   per phase, last to first: gradient of the input; what phases hand to `defer` (the weight-gradient GEMMs) is kept
    W   per phase, last to first: the kept weight gradients

A forward and a backward advance phase by phase (`forward_steps` and `backward_steps` are generators), so that two
micro-batches can be interleaved, the communication of one under the compute of the other.
Between the phases of a stage goes a tensor or a tuple; its floating-point tensors have gradients, everything else
(indices, plans, None) is passed on as it is. Between stages goes one tensor.
Neighbouring phases of one recompute group (ActivationPolicy.group) keep only the input of the first of them, and run
once more, in B or I, communication included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from megatron5d.autograd.recompute import policy_of
from megatron5d.autograd.wgrad import run_now
from megatron5d.pipeline_parallel.phase import MicroBatch, NoHooks, PhaseHooks
from megatron5d.pipeline_parallel.saved_phase import GroupPassage


class Stage:
    """Runs the phases of one model chunk for any number of micro-batches in flight.

    Args:
        phases: called as `phase(x, batch, defer) -> y` with hidden states `[s/cp/tp, b, h]`; the first stage's first
            phase ignores x (None) and reads tokens from the batch, the last stage's last returns sums of losses.
        hooks: told when phases begin and end; None = nobody listens.
    """

    def __init__(self, phases: Sequence[nn.Module], hooks: PhaseHooks | None = None) -> None:
        self.phases = list(phases)
        self.hooks: PhaseHooks = hooks or NoHooks()
        self.hooks.register(self.phases)
        self._groups = phase_groups(self.phases)
        self._in_flight: dict[int, list[GroupPassage]] = {}

    def prefetch(self, op: str) -> None:
        """Tells the hooks with which phase the next action begins, whose weights they gather early; W needs none."""
        if op != "W":
            self.hooks.prefetch(self.phases[0 if op == "F" else -1], op == "F")

    def forward_steps(self, microbatch: int, x: Tensor | None, batch: MicroBatch) -> Iterator[Any]:
        """F: yields after each phase with its output; the last one yielded is the stage's output, a tensor."""
        passages = self._in_flight[microbatch] = []
        for phases, recompute in self._groups:
            passage = GroupPassage(phases, batch, recompute, self.hooks)
            passages.append(passage)
            for y in passage.forward_steps(x):
                x = y
                yield y

    def backward_steps(self, microbatch: int, grad: Tensor, split: bool = False) -> Iterator[Any]:
        """B, or I with `split`: yields after each phase, last to first, with the gradient of its input.

        Yields None after the embedding, which has no input, and after each phase that has run forward again.

        Args:
            microbatch: one whose forward has run.
            grad: gradient of the stage's output.
            split: keep the weight gradients for `weight_steps`.
        """
        passages = self._in_flight[microbatch]
        passages[-1].fetch()
        for earlier, passage in reversed(list(zip([None, *passages], passages))):
            if earlier is not None:
                earlier.fetch()
            for upstream in passage.backward_steps(grad, split):
                if upstream is not None:
                    grad = upstream
                yield upstream
        if not split:
            del self._in_flight[microbatch]

    def weight_steps(self, microbatch: int) -> Iterator[None]:
        """W: yields after each phase, last to first, whose kept weight gradients have been computed."""
        for passage in reversed(self._in_flight.pop(microbatch)):
            yield from passage.weight_steps()

    def evaluate(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """Forward without gradients; nothing is kept."""
        with torch.no_grad():
            for phase in self.phases:
                self.hooks.before(phase, "forward")
                x = phase(x, batch, run_now)
                self.hooks.after(phase, "forward")
        assert x is not None
        return x

    def host_bytes(self, microbatch: int) -> int:
        """Bytes that a micro-batch, whose forward has begun, keeps in the host's memory."""
        return sum(passage.host_bytes for passage in self._in_flight.get(microbatch, ()))

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose weight gradients are still owed."""
        return len(self._in_flight)


class Relay:
    """A stage without layers: it hands on what it is given."""

    num_in_flight = 0

    def __init__(self) -> None:
        self.phases: list[nn.Module] = []

    def prefetch(self, op: str) -> None:
        pass

    def forward_steps(self, microbatch: int, x: Tensor | None, batch: MicroBatch) -> Iterator[Any]:
        """The input, in one step."""
        return iter((x,))

    def backward_steps(self, microbatch: int, grad: Tensor, split: bool = False) -> Iterator[Tensor]:
        """The gradient, in one step."""
        return iter((grad,))

    def weight_steps(self, microbatch: int) -> Iterator[None]:
        """No weights, no steps."""
        return iter(())

    def evaluate(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        assert x is not None
        return x


def phase_groups(phases: Sequence[nn.Module]) -> list[tuple[list[nn.Module], bool]]:
    """Neighbours of one recompute group, or of none, and whether they are recomputed."""
    groups = groupby(phases, key=lambda phase: policy_of(phase).group)
    return [(list(group), key is not None) for key, group in groups]
