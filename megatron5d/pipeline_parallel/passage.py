"""One micro-batch's way through one phase, or through neighbouring phases that keep nothing but their input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron5d.precision.gradient import Closure, hand_over_grads
from megatron5d.precision.host import HostCopy


class PhaseHooks(Protocol):
    """What a data-parallel engine wants to know; phases are its unit of gathering and reducing."""

    def follow(self, phases: Sequence[nn.Module]) -> None:
        """A stage passes these phases, in this order forward."""

    def expect(self, phase: nn.Module, forward: bool) -> None:
        """The action after the one that starts now begins with this phase."""

    def before_forward(self, phase: nn.Module) -> None:
        """Its weights are about to be read."""

    def after_forward(self, phase: nn.Module) -> None:
        """Its weights are not needed before the next action that passes it."""

    def before_recompute(self, phase: nn.Module) -> None:
        """A backward runs the phase forward again; its weights stay until `after_backward`."""

    def after_recompute(self, phase: nn.Module) -> None:
        """It has run forward again."""

    def before_backward(self, phase: nn.Module) -> None:
        """In B or I. W reads no weights."""

    def after_backward(self, phase: nn.Module) -> None:
        """The gradient of its input is made; its weights are not needed before the next action."""

    def before_weight_grads(self, phase: nn.Module) -> None:
        """In W: what the phase has put off is about to be made."""

    def after_weight_grads(self, phase: nn.Module) -> None:
        """In B or W, after `after_backward`: the micro-batch has added all that this phase owes."""


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
        """W: adds up all that was put off, in the order in which it was."""
        with torch.no_grad():  # as in the backward that has kept them: their inputs still ask for gradients
            for closure in self.waiting:
                closure()
        self.waiting.clear()


def _each(change: Callable[[Tensor], Any], state: Any) -> Any:
    """`state` with its floating-point tensors changed."""
    if isinstance(state, tuple):
        return tuple(_each(change, item) for item in state)
    return change(state) if isinstance(state, Tensor) and state.is_floating_point() else state


def _entries(state: Any) -> list[Any]:
    """What a state holds, tuples within tuples opened; an edge, itself a named tuple, stays whole."""
    return [entry for item in state for entry in _entries(item)] if type(state) is tuple else [state]


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Where a gradient of the tensor enters the graph; unlike the tensor it keeps no values alive."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _backward(edges: Any, grad: Any) -> None:
    """Backward of a phase's output; entries that no gradient has reached, or that ask for none, are left out."""
    both = zip(_entries(edges), _entries(grad), strict=True)
    pairs = [(edge, g) for edge, g in both if isinstance(edge, GradientEdge) and isinstance(g, Tensor)]
    roots, grads = tuple(edge for edge, _ in pairs), tuple(g for _, g in pairs)
    # what torch.autograd.backward ends in: its own checks of edges, which the engine repeats, take as long as the pass
    _ENGINE.run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Slot:
    """Where the gradient of a phase's input arrives."""

    __slots__ = ("grad",)

    def __init__(self, _: Tensor) -> None:
        self.grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    """Hands a phase its input and takes the gradient, so that the input's values live no longer than they are needed.

    A leaf of the graph would hold them until the backward, also where every operation knows how to have them again.
    """

    @staticmethod
    def forward(ctx, anchor, x, slot: _Slot):
        ctx.slot = slot
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.slot.grad = grad
        return None, None, None


def _enter(x: Any, slots: Any, anchor: Tensor) -> Any:
    if isinstance(x, tuple):
        return tuple(_enter(item, slot, anchor) for item, slot in zip(x, slots))
    return _Enter.apply(anchor, x, slots) if isinstance(slots, _Slot) else x


_ENGINE = torch.autograd.Variable._execution_engine
_ANCHOR = torch.empty(0, requires_grad=True)  # makes autograd record the entrance; gets no gradient


def _parameters_of(phase: nn.Module) -> tuple[nn.Parameter, ...]:
    """Listed once: walking the modules takes as long as a small phase."""
    listed = phase.__dict__.get("listed_parameters")
    if listed is None:
        listed = phase.__dict__["listed_parameters"] = tuple(phase.parameters())
    return listed


def _arrived(slots: Any) -> Any:
    if isinstance(slots, tuple):
        return tuple(map(_arrived, slots))
    return slots.grad if isinstance(slots, _Slot) else slots


class Passage:
    """One micro-batch's way through one phase, with the graph between forward and backward.

    Args:
        phase: called as `phase(x, batch, defer)`; a context that it names as `keeping` is open during its forward and
            tells what waits on the host.
        batch: what phases read beside their input.
    """

    __slots__ = ("phase", "batch", "slots", "edges", "copies", "weight_grads")

    def __init__(self, phase: nn.Module, batch: Any) -> None:
        self.phase, self.batch = phase, batch
        self.slots: Any = None  # like the input, with a slot for each tensor that gets a gradient
        self.edges: Any = None
        self.copies: list[HostCopy] = []
        self.weight_grads = WeightGrads()

    def forward(self, x: Any) -> Any:
        """The phase's output, without its graph; `x` is the output of the phase before, without its."""
        self.slots = _each(_Slot, x)
        keeping = getattr(self.phase, "keeping", None)
        with torch.enable_grad(), nullcontext([]) if keeping is None else keeping(self.phase) as self.copies:
            y = self.phase(_enter(x, self.slots, _ANCHOR), self.batch, self.weight_grads)
        self.edges = _each(_edge, y)
        return _each(Tensor.detach, y)

    def fetch(self) -> None:
        """Starts the way back of what waits on the host."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.fetch()

    def backward(self, grad: Any, split: bool) -> Any:
        """Gradient of the input; `split` keeps the weight gradients for `weight_grads.run`."""
        self.weight_grads.immediate = not split
        edges, self.edges = self.edges, None
        _backward(edges, grad)
        hand_over_grads(_parameters_of(self.phase), self.weight_grads)
        slots, self.slots = self.slots, None
        return _arrived(slots)


def _values(state: Any) -> Any:
    """`state` with what waits on the host back on its device."""
    if isinstance(state, tuple):
        return tuple(map(_values, state))
    return state.value() if isinstance(state, HostCopy) else state


class Segment:
    """One micro-batch's way through neighbouring phases; recomputed ones keep their common input alone.

    Args:
        phases: in order.
        batch: what they read beside their input.
        recompute: run forward without graphs, and once more before the backward, in B or I and never in W.
        hooks: told when a phase begins and ends to need its weights, and when its weight gradients are complete.
    """

    def __init__(self, phases: Sequence[nn.Module], batch: Any, recompute: bool, hooks: PhaseHooks) -> None:
        self.phases, self.batch, self.recompute, self.hooks = phases, batch, recompute, hooks
        self.passages: list[Passage] = []
        self.x: Any = None
        self._host_bytes = getattr(phases[0], "input_host_bytes", None)

    def forward_steps(self, x: Any) -> Iterator[Any]:
        """Yields after each phase with its output."""
        if not self.recompute:
            for phase in self.phases:
                self.hooks.before_forward(phase)
                x = self._with_graph(phase, x)
                self.hooks.after_forward(phase)
                yield x
            return
        self.x = _each(self._kept, x)
        for phase in self.phases:
            self.hooks.before_forward(phase)
            with torch.no_grad():
                x = phase(x, self.batch, None)
            self.hooks.after_forward(phase)
            yield x

    def _kept(self, x: Tensor) -> Tensor | HostCopy:
        large = self._host_bytes is not None and x.numel() * x.element_size() >= self._host_bytes
        return HostCopy(x) if large else x

    def fetch(self) -> None:
        """Starts the way back of what the backward will ask for first."""
        if self.passages:
            self.passages[-1].fetch()
        for item in _entries(self.x):
            if isinstance(item, HostCopy):
                item.fetch()

    @property
    def host_bytes(self) -> int:
        """What waits in the host's memory until a backward begins to fetch it."""
        inputs = [item for item in _entries(self.x) if isinstance(item, HostCopy)]
        return sum(copy.num_bytes for copy in inputs + [copy for each in self.passages for copy in each.copies])

    def _with_graph(self, phase: nn.Module, x: Any) -> Any:
        passage = Passage(phase, self.batch)
        self.passages.append(passage)
        return passage.forward(x)

    def backward_steps(self, grad: Any, split: bool) -> Iterator[Any]:
        """Yields None after each phase that is run again, then after each one with the gradient of its input."""
        if self.recompute:
            x, self.x = _values(self.x), None
            for phase in self.phases:
                self.hooks.before_recompute(phase)
                x = self._with_graph(phase, x)
                self.hooks.after_recompute(phase)
                yield None
            del x
        for earlier, passage in reversed(list(zip([None, *self.passages], self.passages))):
            if earlier is not None:
                earlier.fetch()
            self.hooks.before_backward(passage.phase)
            upstream = passage.backward(grad, split)
            self.hooks.after_backward(passage.phase)
            if not split:
                self.hooks.after_weight_grads(passage.phase)
            if upstream is not None:
                grad = upstream
            yield upstream

    def weight_steps(self) -> Iterator[None]:
        """Yields after each phase, last to first, whose kept weight gradients have been computed."""
        for passage in reversed(self.passages):
            self.hooks.before_weight_grads(passage.phase)
            passage.weight_grads.run()
            self.hooks.after_weight_grads(passage.phase)
            yield None
