"""What a stage keeps of one micro-batch between its forward and its backward: each phase's autograd
graph.

What passes from phase to phase is called a state: a tensor, or a tuple of tensors, tuples and other
values.
"""

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron5d.phases.offload import HostCopy
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.recompute import run_backward
from megatron5d.phases.wgrad import Closure, hand_over, hand_over_grads, run_now

# makes autograd record a phase's input; gets no gradient itself
_ANCHOR = torch.empty(0, requires_grad=True)


class Step(NamedTuple):
    """One phase in one pass: a part of an action that is not interrupted."""

    kind: str  # one of KINDS in phase.py
    phase: Phase
    place: int  # of the phase in its stage
    group: int | None = None  # of recomputation; None = the phase keeps its graph
    opens: bool = False  # the group's first phase, whose input the group keeps


class SavedPhase:
    """One phase and micro-batch, with the graph between forward and backward.

    Args:
        phase: called as `phase(x, batch, defer)`; its ActivationPolicy says what the graph keeps.
        batch: what phases read beside their input.
    """

    __slots__ = ("phase", "batch", "input_edges", "output_edges", "copies", "weight_grads")

    def __init__(self, phase: Phase, batch: MicroBatch | None) -> None:
        self.phase, self.batch = phase, batch
        # where gradients of the input's floating-point tensors come out
        self.input_edges: list[GradientEdge] = []
        # where those of the output enter the graph
        self.output_edges: list[GradientEdge | None] = []
        self.copies: list[HostCopy] = []  # saved tensors that are offloaded to the host
        self.weight_grads = WeightGrads()

    def forward(self, x: Any) -> Any:
        """Returns the phase's output, detached from its graph; `x` is the detached output of the
        phase before."""
        x, policy = _attach(x, self.input_edges), self.phase.activation_policy
        if policy.keeps_all:
            y = self.phase(x, self.batch, self.weight_grads)
        else:
            with policy.saving(self.phase.parameter_list) as self.copies:
                y = self.phase(x, self.batch, self.weight_grads)
        return _detach(y, self.output_edges)

    def fetch(self) -> None:
        """Starts copying offloaded tensors back to the device."""
        copies, self.copies = self.copies, []
        for each in copies:
            each.fetch()

    def backward(self, grad: Any, split: bool) -> Any:
        """Runs backward from the output; `split` keeps the weight gradients for `weight_grads.run`.

        Args:
            grad: of the output: a tensor, of several tensors a tuple; None where there is none.

        Returns:
            That of the input, the same.
        """
        defer, inputs, parameters = self.weight_grads, self.input_edges, self.phase.parameter_list
        defer.immediate = not split
        roots, given = [], []
        for edge, each in zip(
            self.output_edges, grad if isinstance(grad, tuple) else (grad,), strict=True
        ):
            if edge is not None and each is not None:
                roots.append(edge)
                given.append(each)
        self.output_edges, self.input_edges = [], []
        grads = run_backward(tuple(roots), tuple(given), (*inputs, *parameters))
        for parameter, each in zip(parameters, grads[len(inputs) :]):
            if each is not None:
                hand_over(parameter, each, defer)
        if not self.phase.activation_policy.keeps_all:
            hand_over_grads(parameters, defer)  # which recomputed parts have left
        return grads[: len(inputs)] if len(inputs) > 1 else grads[0] if inputs else None

    def run_wgrad(self) -> None:
        """Runs the weight gradients that the backward has kept (W)."""
        self.weight_grads.run()


class InFlight:
    """What a stage keeps of one micro-batch between its forward and its backward.

    Args:
        batch: what phases read beside their input.
    """

    def __init__(self, batch: MicroBatch | None, num_phases: int) -> None:
        self.batch = copy(batch)  # with it goes what phases make `once`
        self.phases: list[SavedPhase | None] = [None] * num_phases
        self.inputs: dict[int, Any] = {}  # recompute group -> what enters it

    def open(self, step: Step) -> SavedPhase:
        """Returns the phase with a graph to be made by its `forward`."""
        saved = self.phases[step.place] = SavedPhase(step.phase, self.read_by(step.phase))
        return saved

    def read_by(self, phase: Phase) -> MicroBatch | None:
        """Returns the batch as this phase reads it."""
        return self.batch

    def of(self, step: Step) -> SavedPhase:
        """Returns the phase with the graph that its `forward` has made."""
        saved = self.phases[step.place]
        assert saved is not None, f"the forward of {type(step.phase).__name__} has not run"
        return saved

    def evaluate(self, step: Step, x: Any) -> Any:
        """Runs the phase without a graph: it will run once more before its backward."""
        with torch.no_grad():
            return step.phase(x, self.read_by(step.phase), run_now)

    def end(self, op: str, state: Any) -> Any:
        """Returns the state in which an action leaves the stage, and drops everything after the
        last one."""
        if op in "BW":
            self.batch, self.phases = None, []
        return state

    def fetch(self, step: Step) -> None:
        """Starts copying back from the host what a step of a backward will need."""
        if step.kind == "recompute" and step.opens:
            for item in flattened(self.inputs[step.group]):  # type: ignore[index]
                if isinstance(item, HostCopy):
                    item.fetch()
        elif step.kind == "backward" and (saved := self.phases[step.place]) is not None:
            saved.fetch()

    @property
    def host_bytes(self) -> int:
        """Bytes that wait in the host's memory until a backward fetches them."""
        copies = [copy for saved in self.phases if saved is not None for copy in saved.copies]
        inputs = [
            item
            for x in self.inputs.values()
            for item in flattened(x)
            if isinstance(item, HostCopy)
        ]
        return sum(copy.num_bytes for copy in copies + inputs)


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
        # as in the backward that deferred them: their inputs still require gradients
        with torch.no_grad():
            for closure in self.waiting:
                closure()
        self.waiting.clear()


def _attach(x: Any, edges: list[GradientEdge]) -> Any:
    """Returns the state that a phase is called with, and adds where its gradients leave the phase's
    graph.

    There a node of torch passes the tensors on; a backward takes the gradients before it would run,
    and raise. Leaves would keep the values until the backward even where no operation needs them.
    """
    tensors = _floating(x, [])
    if not tensors:
        return x
    attached = torch._C._functions.DelayedError(
        b"a phase's graph ends at its input", 1 + len(tensors)
    )(_ANCHOR, *tensors)
    node = attached[0].grad_fn
    assert node is not None
    edges += [GradientEdge(node, number) for number in range(1, len(attached))]
    return attached[1] if x is tensors[0] else _with(x, iter(attached[1:]))


def _detach(y: Any, edges: list[GradientEdge | None]) -> Any:
    """Returns a state without its graph, and adds where its gradients enter that: an edge keeps no
    values alive."""
    tensors = _floating(y, [])
    for each in tensors:
        if each.requires_grad and (
            each.grad_fn is None or isinstance(each.grad_fn, torch._C._FunctionBase)
        ):
            # an edge into a function in Python, unlike this view's, does not keep it alive
            each = each.view_as(each)
        edges.append(None if each.grad_fn is None else GradientEdge(each.grad_fn, each.output_nr))
    return (
        y.detach() if isinstance(y, Tensor) and tensors else _with(y, map(Tensor.detach, tensors))
    )


def _floating(state: Any, found: list[Tensor]) -> list[Tensor]:
    """Returns `found` and a state's floating-point tensors, in order."""
    for item in state if isinstance(state, tuple) else (state,):
        if isinstance(item, Tensor):
            if item.is_floating_point():
                found.append(item)
        elif isinstance(item, tuple):
            _floating(item, found)
    return found


def _with(state: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns a tuple with other floating-point tensors, and anything else as it is."""
    if not isinstance(state, tuple):
        return state
    new = []
    for item in state:
        if isinstance(item, Tensor):
            new.append(next(tensors) if item.is_floating_point() else item)
        else:
            new.append(_with(item, tensors) if isinstance(item, tuple) else item)
    return tuple(new)


def map_tensors(change: Callable[[Tensor], Any], state: Any) -> Any:
    """Returns a state with its floating-point tensors changed."""
    if isinstance(state, Tensor):
        return change(state) if state.is_floating_point() else state
    return (
        tuple([map_tensors(change, item) for item in state]) if isinstance(state, tuple) else state
    )


def flattened(state: Any) -> list[Any]:
    """Returns the entries of a state in order."""
    return (
        [entry for item in state for entry in flattened(item)]
        if isinstance(state, tuple)
        else [state]
    )


def on_device(state: Any) -> Any:
    """Returns a state with offloaded tensors back on its device."""
    if isinstance(state, tuple):
        return tuple(map(on_device, state))
    return state.value() if isinstance(state, HostCopy) else state
