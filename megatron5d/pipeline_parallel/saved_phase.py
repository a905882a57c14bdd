"""The saved context of one phase and micro-batch: its graph between forward and backward.

What passes from phase to phase is called a state: a tensor, or a tuple of tensors, tuples and other values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron5d.autograd.offload import HostCopy
from megatron5d.autograd.recompute import policy_of
from megatron5d.autograd.wgrad import Closure, hand_over_grads
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.pipeline_parallel.phase import MicroBatch

_ENGINE = torch.autograd.Variable._execution_engine
_ANCHOR = torch.empty(0, requires_grad=True)  # makes autograd record a phase's input; gets no gradient itself


class SavedPhase:
    """One phase and micro-batch, with the graph between forward and backward.

    Args:
        phase: called as `phase(x, batch, defer)`; its ActivationPolicy says what the graph keeps.
        batch: what phases read beside their input.
    """

    __slots__ = ("phase", "batch", "input_grads", "output_edges", "copies", "weight_grads")

    def __init__(self, phase: nn.Module, batch: MicroBatch | None) -> None:
        self.phase, self.batch = phase, batch
        self.input_grads: Any = None  # state of the input, with an _InputGrad in place of each tensor with a gradient
        self.output_edges: Any = None  # state of the output, with its place in the graph instead of each such tensor
        self.copies: list[HostCopy] = []  # saved tensors that are offloaded to the host
        self.weight_grads = WeightGrads()

    def forward(self, x: Any) -> Any:
        """Returns the phase's output, detached from its graph; `x` is the detached output of the phase before."""
        self.input_grads = map_tensors(_InputGrad, x)
        with torch.enable_grad(), policy_of(self.phase).saving(self.phase) as self.copies:
            y = self.phase(_attach(x, self.input_grads), self.batch, self.weight_grads)
        self.output_edges = map_tensors(_edge, y)
        return map_tensors(Tensor.detach, y)

    def fetch(self) -> None:
        """Starts copying offloaded tensors back to the device."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.fetch()

    def backward(self, grad: Any, split: bool) -> Any:
        """Returns the gradient of the input; `split` keeps the weight gradients for `weight_grads.run`."""
        self.weight_grads.immediate = not split
        edges, self.output_edges = self.output_edges, None
        _backward(edges, grad)
        hand_over_grads(_parameters_of(self.phase), self.weight_grads)
        input_grads, self.input_grads = self.input_grads, None
        return _arrived(input_grads)


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
        """Runs the deferred weight gradients (W) in the order in which they were deferred."""
        with torch.no_grad():  # as in the backward that deferred them: their inputs still require gradients
            for closure in self.waiting:
                closure()
        self.waiting.clear()


class _InputGrad:
    """Receives the gradient of one tensor that a phase was given."""

    __slots__ = ("grad",)

    def __init__(self, _: Tensor) -> None:
        self.grad: Tensor | None = None


class _PhaseInput(FirstOrderFunction):
    """Gives a phase its input and takes the gradient.

    Not a leaf of the graph, which would keep the input's values until the backward even where no operation needs them.
    """

    @staticmethod
    def forward(ctx, anchor, x, input_grad: _InputGrad):
        ctx.input_grad = input_grad
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.input_grad.grad = grad
        return None, None, None


def _attach(x: Any, input_grads: Any) -> Any:
    """Returns the state that a phase is called with, whose gradients go to `input_grads`."""
    if isinstance(x, tuple):
        return tuple(map(_attach, x, input_grads))
    return _PhaseInput.apply(_ANCHOR, x, input_grads) if isinstance(input_grads, _InputGrad) else x


def _arrived(input_grads: Any) -> Any:
    """Takes the gradients that a backward has left, so that the graph, which deferred W keeps, no longer holds them."""
    if isinstance(input_grads, tuple):
        return tuple(map(_arrived, input_grads))
    if not isinstance(input_grads, _InputGrad):
        return input_grads
    grad, input_grads.grad = input_grads.grad, None
    return grad


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Returns where the gradient of a tensor enters the graph; unlike the tensor itself it keeps no values alive."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _backward(edges: Any, grad: Any) -> None:
    """Runs backward from a phase's output, without entries that have or require no gradient."""
    both = zip(flattened(edges), flattened(grad), strict=True)
    pairs = [(edge, g) for edge, g in both if isinstance(edge, GradientEdge) and isinstance(g, Tensor)]
    roots, grads = tuple(edge for edge, _ in pairs), tuple(g for _, g in pairs)
    # What torch.autograd.backward calls in the end: its own checks of edges, which the engine repeats, would take as
    # long as the pass.
    _ENGINE.run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _parameters_of(phase: nn.Module) -> tuple[nn.Parameter, ...]:
    """Returns the parameters, listed once: walking the modules takes as long as a small phase."""
    listed = phase.__dict__.get("listed_parameters")
    if listed is None:
        listed = phase.__dict__["listed_parameters"] = tuple(phase.parameters())
    return listed


def map_tensors(change: Callable[[Tensor], Any], state: Any) -> Any:
    """Returns a state with its floating-point tensors changed."""
    if isinstance(state, tuple):
        return tuple(map_tensors(change, item) for item in state)
    return change(state) if isinstance(state, Tensor) and state.is_floating_point() else state


def flattened(state: Any) -> list[Any]:
    """Returns the entries of a state in order; an edge, which is a named tuple, counts as one."""
    return [entry for item in state for entry in flattened(item)] if type(state) is tuple else [state]


def on_device(state: Any) -> Any:
    """Returns a state with offloaded tensors back on its device."""
    if isinstance(state, tuple):
        return tuple(map(on_device, state))
    return state.value() if isinstance(state, HostCopy) else state
