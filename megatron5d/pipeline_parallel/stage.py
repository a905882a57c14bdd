"""One stage of the model at run time: a list of phases, run forward and backward micro-batch by micro-batch.

Every phase is a small autograd graph of its own, cut off at its input. That gives the three actions of a schedule
without surgery on graphs:

    F   run the phases, keep each one's input and output
    B   per phase, last to first: gradient of the input, weight gradients at once
    I   the same, but what phases hand to `defer` (the weight-gradient GEMMs) is kept ...
    W   ... and runs now

A forward and a backward advance phase by phase (`forward_steps`, `backward_steps` are generators), so that two
micro-batches can be interleaved: one's communication under the other's compute.
Between the phases of a stage travels a tensor, or a tuple: its floating-point tensors have gradients where a phase
asks for them, everything else (indices, plans, None) is passed on as it is. Between stages travels one tensor.
A phase with `recompute` keeps its input alone and runs again, once, in B or I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron5d.precision.gradient import Closure


class PhaseHooks(Protocol):
    """What a data-parallel engine wants to know; phases are its unit of gathering and reducing."""

    def before_forward(self, phase: nn.Module) -> None: ...

    def after_weight_grads(self, phase: nn.Module) -> None: ...


class NoHooks:
    """For a stage that nobody reduces or gathers."""

    def before_forward(self, phase: nn.Module) -> None:
        pass

    def after_weight_grads(self, phase: nn.Module) -> None:
        pass


class WeightGrads:
    """The `defer` of one phase and micro-batch: runs closures at once, or keeps them until W."""

    def __init__(self) -> None:
        self.immediate = True
        self.waiting: list[Closure] = []

    def __call__(self, closure: Closure) -> None:
        if self.immediate:
            closure()
        else:
            self.waiting.append(closure)

    def run(self) -> None:
        with torch.no_grad():  # as in the backward that has kept them: their inputs still ask for gradients
            for closure in self.waiting:
                closure()
        self.waiting.clear()


def _each(change: Callable[[Tensor], Any], state: Any) -> Any:
    """`state` with its floating-point tensors changed."""
    if isinstance(state, tuple):
        return tuple(_each(change, item) for item in state)
    return change(state) if isinstance(state, Tensor) and state.is_floating_point() else state


def _backward(y: Any, grad: Any) -> None:
    """Backward of a phase's output; entries that no gradient has reached, or that ask for none, are left out."""
    pairs = list(zip(y, grad)) if isinstance(y, tuple) else [(y, grad)]
    pairs = [(a, g) for a, g in pairs if isinstance(a, Tensor) and a.requires_grad and isinstance(g, Tensor)]
    torch.autograd.backward([a for a, _ in pairs], [g for _, g in pairs])


class _Passage:
    """One micro-batch's way through one phase."""

    __slots__ = ("phase", "batch", "x", "y", "weight_grads")

    def __init__(self, phase: nn.Module, batch: Any, x: Any) -> None:
        self.phase, self.batch = phase, batch
        self.x = _each(lambda tensor: tensor.detach().requires_grad_(), x)
        self.y: Any = None
        self.weight_grads = WeightGrads()

    def forward(self) -> Any:
        if getattr(self.phase, "recompute", False):
            with torch.no_grad():
                return self.phase(self.x, self.batch, self.weight_grads)
        self.y = self.phase(self.x, self.batch, self.weight_grads)
        return _each(Tensor.detach, self.y)

    def backward(self, grad: Any, split: bool) -> Any:
        self.weight_grads.immediate = not split
        if self.y is None:
            with torch.enable_grad():
                self.y = self.phase(self.x, self.batch, self.weight_grads)
        y, self.y = self.y, None
        _backward(y, grad)
        x, self.x = self.x, None
        return _each(lambda tensor: tensor.grad, x)


class Stage:
    """Runs the phases of one model chunk for any number of micro-batches in flight.

    Args:
        phases: called as `phase(x, batch, defer) -> y` with hidden states `[s/cp/tp, b, h]`; the first stage's first
            phase ignores x (None) and reads tokens from the batch, the last stage's last returns sums of losses.
        hooks: told before a phase runs forward and after its weight gradients of a micro-batch are complete.
    """

    def __init__(self, phases: Sequence[nn.Module], hooks: PhaseHooks | None = None) -> None:
        self.phases = list(phases)
        self.hooks: PhaseHooks = hooks or NoHooks()
        self._in_flight: dict[int, list[_Passage]] = {}

    def forward_steps(self, microbatch: int, x: Tensor | None, batch: Any) -> Iterator[Any]:
        """Yields after each phase with its output; the last one yielded is the stage's output, a tensor."""
        passages = self._in_flight[microbatch] = []
        for phase in self.phases:
            self.hooks.before_forward(phase)
            passage = _Passage(phase, batch, x)
            with torch.enable_grad():
                x = passage.forward()
            passages.append(passage)
            yield x

    def backward_steps(self, microbatch: int, grad: Tensor, split: bool = False) -> Iterator[Any]:
        """Yields after each phase, last to first, with the gradient of its input; None for the tokens' phase.

        Args:
            microbatch: one whose forward has run.
            grad: gradient of the stage's output.
            split: keep the weight gradients for `backward_weight`.
        """
        passages = self._in_flight[microbatch]
        for passage in reversed(passages):
            upstream = passage.backward(grad, split)
            if not split:
                self.hooks.after_weight_grads(passage.phase)
            if upstream is not None:
                grad = upstream
            yield upstream
        if not split:
            del self._in_flight[microbatch]

    def weight_steps(self, microbatch: int) -> Iterator[None]:
        """Yields after each phase, last to first, whose kept weight gradients have been computed."""
        for passage in reversed(self._in_flight.pop(microbatch)):
            passage.weight_grads.run()
            self.hooks.after_weight_grads(passage.phase)
            yield None

    def forward(self, microbatch: int, x: Tensor | None, batch: Any) -> Tensor:
        """F: `[s/cp/tp, b, h]` -> the stage's output."""
        *_, y = self.forward_steps(microbatch, x, batch)
        return y

    def backward(self, microbatch: int, grad: Tensor) -> Tensor | None:
        """B: gradient of the output -> gradient of the input, weight gradients included."""
        *_, dx = self.backward_steps(microbatch, grad)
        return dx

    def backward_input(self, microbatch: int, grad: Tensor) -> Tensor | None:
        """I: gradient of the output -> gradient of the input; weight gradients are kept."""
        *_, dx = self.backward_steps(microbatch, grad, split=True)
        return dx

    def backward_weight(self, microbatch: int) -> None:
        """W: the weight gradients that I kept."""
        for _ in self.weight_steps(microbatch):
            pass

    def evaluate(self, x: Tensor | None, batch: Any) -> Tensor:
        """Forward alone, nothing kept."""
        with torch.no_grad():
            for phase in self.phases:
                self.hooks.before_forward(phase)
                x = phase(x, batch, None)
        assert x is not None
        return x

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose weight gradients are still owed."""
        return len(self._in_flight)
