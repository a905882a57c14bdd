"""What a stage saves of one micro-batch between its forward and its backward.

For each phase that is its autograd graph, cut off at the phase's input and output. The value passed
from phase to phase is called a state: a tensor, or a tuple of tensors, tuples and other values.
"""

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron5d.phases.activations import HostCopy, run_backward
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.wgrad import Closure, defer_autograd_grad, defer_autograd_grads, run_now

# makes autograd record a phase's input; gets no gradient itself
_ANCHOR = torch.empty(0, requires_grad=True)


class Step(NamedTuple):
    """One phase in one pass: the unit in which actions are interleaved."""

    kind: str  # one of KINDS in phase.py
    phase: Phase
    position: int  # of the phase in its stage
    group: int | None = None  # of recomputation; None = the phase keeps its graph
    starts_group: bool = False  # the group's first phase, whose input the group keeps


class SavedPhase:
    """One phase and micro-batch, with the graph between forward and backward.

    Args:
        phase: its ActivationPolicy says what the graph keeps.
        batch: what phases read in addition to their input.
    """

    __slots__ = ("phase", "batch", "input_edges", "output_edges", "host_copies", "weight_grads")

    def __init__(self, phase: Phase, batch: MicroBatch | None) -> None:
        self.phase, self.batch = phase, batch
        # where gradients of the input's floating-point tensors leave the graph
        self.input_edges: list[GradientEdge] = []
        # where those of the output enter the graph
        self.output_edges: list[GradientEdge | None] = []
        self.host_copies: list[HostCopy] = []  # saved tensors that are offloaded to the host
        self.weight_grads = WeightGrads()

    def forward(self, x: Any) -> Any:
        """Runs the phase.

        Args:
            x: the detached output of the phase before.

        Returns:
            The phase's output, detached from its graph.
        """
        x, policy = _attach(x, self.input_edges), self.phase.activation_policy
        if policy.keeps_all:
            y = self.phase(x, self.batch, self.weight_grads)
        else:
            with policy.saving(self.phase.parameter_list) as self.host_copies:
                y = self.phase(x, self.batch, self.weight_grads)
        return _detach(y, self.output_edges)

    def fetch(self) -> None:
        """Starts copying offloaded tensors back to the device."""
        host_copies, self.host_copies = self.host_copies, []
        for host_copy in host_copies:
            host_copy.fetch()

    def backward(self, grad: Any, split: bool) -> Any:
        """Runs the backward from the output.

        Args:
            grad: of the output: a tensor, or a tuple for several tensors; None where there is none.
            split: keep the weight gradients for `run_wgrad`.

        Returns:
            The gradient of the input, in the same form.
        """
        defer, inputs, parameters = self.weight_grads, self.input_edges, self.phase.parameter_list
        defer.is_immediate = not split
        roots, root_grads = [], []
        for edge, output_grad in zip(
            self.output_edges, grad if isinstance(grad, tuple) else (grad,), strict=True
        ):
            if edge is not None and output_grad is not None:
                roots.append(edge)
                root_grads.append(output_grad)
        self.output_edges, self.input_edges = [], []
        grads = run_backward(tuple(roots), tuple(root_grads), (*inputs, *parameters))
        for parameter, weight_grad in zip(parameters, grads[len(inputs) :]):
            if weight_grad is not None:
                defer_autograd_grad(parameter, weight_grad, defer)
        if not self.phase.activation_policy.keeps_all:
            # The backward of a recomputed part leaves its weight gradients in `.grad`.
            defer_autograd_grads(parameters, defer)
        return grads[: len(inputs)] if len(inputs) > 1 else grads[0] if inputs else None

    def run_wgrad(self) -> None:
        """Runs the weight gradients that the backward has kept (W)."""
        self.weight_grads.run()


class SavedMicroBatch:
    """What a stage saves of one micro-batch between its forward and its backward.

    Args:
        batch: what phases read in addition to their input.
        num_phases: of the stage.
    """

    def __init__(self, batch: MicroBatch | None, num_phases: int) -> None:
        self.batch = copy(batch)  # the copy's cache of results is freed with it
        self.phases: list[SavedPhase | None] = [None] * num_phases
        self.group_inputs: dict[int | None, Any] = {}  # recompute group -> the state that enters it

    def open(self, step: Step) -> SavedPhase:
        """Makes the SavedPhase of a step, whose `forward` will make its graph."""
        saved = self.phases[step.position] = SavedPhase(step.phase, self.batch_for(step.phase))
        return saved

    def batch_for(self, phase: Phase) -> MicroBatch | None:
        """The batch that this phase reads."""
        return self.batch

    def saved_phase(self, step: Step) -> SavedPhase:
        """The SavedPhase of a step, whose `forward` has made its graph."""
        saved = self.phases[step.position]
        assert saved is not None, f"the forward of {type(step.phase).__name__} has not run"
        return saved

    def evaluate(self, step: Step, x: Any) -> Any:
        """Runs the phase without a graph, because it will run again before its backward."""
        with torch.no_grad():
            return step.phase(x, self.batch_for(step.phase), run_now)

    def finish(self, op: str, state: Any) -> Any:
        """Frees everything after the last action; returns the state that leaves the stage."""
        if op in "BW":
            self.batch, self.phases = None, []
        return state

    def fetch(self, step: Step) -> None:
        """Starts copying back from the host what a step of a backward will read."""
        if step.kind == "recompute" and step.starts_group:
            for item in _leaves(self.group_inputs[step.group]):
                if isinstance(item, HostCopy):
                    item.fetch()
        elif step.kind == "backward" and (saved := self.phases[step.position]) is not None:
            saved.fetch()

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory that no backward has fetched yet."""
        saved_tensors = [item for saved in self.phases if saved for item in saved.host_copies]
        inputs = _leaves(tuple(self.group_inputs.values()))
        return sum(item.num_bytes for item in saved_tensors + inputs if isinstance(item, HostCopy))


class WeightGrads:
    """The `defer` of one phase and micro-batch: runs closures at once, or keeps them until W."""

    def __init__(self) -> None:
        self.is_immediate = True
        self.closures: list[Closure] = []

    def __call__(self, closure: Closure) -> None:
        if self.is_immediate:
            closure()
        else:
            self.closures.append(closure)

    def run(self) -> None:
        """Runs the deferred weight gradients (W) in the order in which they were deferred."""
        # no_grad as in the backward that deferred them: their inputs still require gradients
        with torch.no_grad():
            for closure in self.closures:
                closure()
        self.closures.clear()


def _attach(x: Any, edges: list[GradientEdge]) -> Any:
    """Makes the state that a phase is called with; adds the edges of its gradients to `edges`.

    A node of torch passes the tensors on. A backward takes the gradients at its edges before the
    node would run, and raise. Leaves would keep the values until the backward even where no
    operation needs them.
    """
    tensors = _floating_tensors(x)
    if not tensors:
        return x
    attached = torch._C._functions.DelayedError(
        b"a phase's graph ends at its input", 1 + len(tensors)
    )(_ANCHOR, *tensors)
    node = attached[0].grad_fn
    assert node is not None
    edges += [GradientEdge(node, number) for number in range(1, len(attached))]
    remaining = iter(attached[1:])
    return map_tensors(lambda _: next(remaining), x)


def _detach(y: Any, edges: list[GradientEdge | None]) -> Any:
    """Detaches a state from its graph; adds the edges where its gradients enter it to `edges`.

    An edge keeps no values alive.
    """
    for tensor in _floating_tensors(y):
        if tensor.requires_grad and (
            tensor.grad_fn is None or isinstance(tensor.grad_fn, torch._C._FunctionBase)
        ):
            # An edge into a function in Python does not keep it alive; one into a view's does.
            tensor = tensor.view_as(tensor)
        edges.append(
            None if tensor.grad_fn is None else GradientEdge(tensor.grad_fn, tensor.output_nr)
        )
    return map_tensors(Tensor.detach, y)


def _leaves(state: Any) -> list[Any]:
    if not isinstance(state, tuple):
        return [state]
    return [leaf for item in state for leaf in _leaves(item)]


def _floating_tensors(state: Any) -> list[Tensor]:
    return [
        leaf for leaf in _leaves(state) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def map_tensors(change: Callable[[Tensor], Any], state: Any) -> Any:
    """Applies `change` to the floating-point tensors of a state, in order."""
    if isinstance(state, tuple):
        return tuple([map_tensors(change, item) for item in state])
    return change(state) if isinstance(state, Tensor) and state.is_floating_point() else state


def on_device(state: Any) -> Any:
    """A state whose offloaded tensors are back on their device."""
    if isinstance(state, tuple):
        return tuple(map(on_device, state))
    return state.value() if isinstance(state, HostCopy) else state
