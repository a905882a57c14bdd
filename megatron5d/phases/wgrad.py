"""Adds weight gradients to a parameter's main gradient, which usually has a wider dtype.

All that the code records about a parameter is its `ParameterState` (topology/shard_spec.py), with
the main gradient, a view of the bucket's flat buffer (data_parallel/bucket.py), and under ZeRO-2
and 3 the function that allocates that buffer. While `holds_grad` is False, the main gradient is the
last step's or undefined, and the next gradient overwrites it, which saves zeroing the buffer. All
access goes through `grad_target`, or through `grad_buffer`, which zeroes such a buffer first.

Layers that compute their own weight gradient pass the addition to `defer`.
`defer_autograd_grad` does the same with gradients that autograd computes, so that W adds all weight
gradients and I none. A parameter without a main gradient (inference, unit tests) uses `.grad`, as
usual in torch. A frozen parameter gets no weight gradient; one that autograd computes for it is
dropped.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from megatron5d.kernels import accumulate_weight_grad
from megatron5d.topology.shard_spec import state_of

Closure = Callable[[], None]
Defer = Callable[[Closure], None]
"""Takes the weight-gradient half of a backward, and runs it at once (B) or later (W)."""


def run_now(closure: Closure) -> None:
    """Runs the closure: the `Defer` that defers nothing."""
    closure()


def grad_buffer(parameter: Tensor) -> Tensor:
    """The tensor that accumulates a parameter's gradient, allocated and zeroed if missing."""
    target, accumulate = grad_target(parameter)
    return target if accumulate else target.zero_()


def grad_target(parameter: Tensor) -> tuple[Tensor, bool]:
    """The tensor for a parameter's gradient, and whether the gradient is added to it.

    If not, the gradient must overwrite the entire tensor, whose values are undefined.
    """
    state = state_of(parameter)
    main_grad = state.main_grad
    if main_grad is not None:
        if state.allocate_main_grad is not None:
            state.allocate_main_grad()
        accumulate, state.holds_grad = state.holds_grad, True
        return main_grad, accumulate
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad, True


def defer_weight_grad(weight: Tensor, defer: Defer, closure: Closure) -> None:
    """Passes the weight-gradient half of a backward to `defer`, unless the weight is frozen."""
    if not state_of(weight).frozen:
        defer(closure)


def add_weight_grad(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """Adds dyᵀ·x to a weight's gradient.

    Args:
        weight: `[out, in]`.
        dy: `[..., out]`, gradient of the output.
        x: `[..., in]`, input of the layer.
    """
    main_grad, accumulate = grad_target(weight)
    accumulate_weight_grad(main_grad, dy.flatten(0, -2), x.flatten(0, -2), accumulate=accumulate)


def defer_autograd_grad(parameter: Tensor, grad: Tensor, defer: Defer) -> None:
    """Adds a gradient that autograd has computed to the parameter's gradient, through `defer`."""
    defer_weight_grad(parameter, defer, partial(_add, parameter, grad))


def defer_autograd_grads(parameters: Iterable[Tensor], defer: Defer) -> None:
    """Moves the gradients in `.grad` to the main gradients, through `defer`.

    Args:
        parameters: of a phase whose backward has run; those without a main gradient keep their
            `.grad`.
        defer: takes the weight-gradient half of the backward.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        state = state_of(parameter)
        if state.main_grad is not None or state.frozen:
            parameter.grad = None
            defer_autograd_grad(parameter, grad, defer)


def _add(parameter: Tensor, grad: Tensor) -> None:
    main_grad, accumulate = grad_target(parameter)
    if accumulate:
        main_grad.add_(grad)
    else:
        main_grad.copy_(grad)
