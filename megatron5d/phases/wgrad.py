"""Adds weight gradients to a parameter's main gradient, which usually has a wider dtype than the
parameter.

In training a parameter carries `.main_grad`, a view of its unit's flat buffer
(data_parallel/bucket.py), and under ZeRO-2 and 3 `.allocate_main_grad`, which allocates that
buffer. While its `.holds_grad` is False, the main gradient is the last step's or has no values, and
the next gradient is written over it instead of added to zeros. All access goes through
`grad_target`, or through `grad_buffer`, which fills it with zeros first. Layers that compute their
own weight gradient pass the addition to `defer`. `hand_over` does the same with what autograd
computes, so that W adds up all weight gradients and I none. A parameter without a main gradient
(inference, unit tests) uses `.grad`, as usual in torch. Of a parameter that is `.frozen` no weight
gradient is computed, and what autograd leaves is dropped.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from megatron5d.kernels import accumulate_weight_grad

Closure = Callable[[], None]
Defer = Callable[[Closure], None]
"""Takes the weight-gradient half of a backward, and runs it now (B) or later (W)."""


def run_now(closure: Closure) -> None:
    """Runs the closure: the `Defer` that defers nothing."""
    closure()


def grad_buffer(parameter: Tensor) -> Tensor:
    """Returns the tensor in which a parameter's gradient is accumulated; allocated and zeroed if
    missing."""
    target, accumulate = grad_target(parameter)
    return target if accumulate else target.zero_()


def grad_target(parameter: Tensor) -> tuple[Tensor, bool]:
    """Returns the tensor for a gradient of a parameter, and whether that is added there.

    Else it is written over all of the tensor, whose values are undefined.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        allocate = getattr(parameter, "allocate_main_grad", None)
        if allocate is not None:
            allocate()
        accumulate = getattr(parameter, "holds_grad", True)
        if not accumulate:
            parameter.holds_grad = True  # type: ignore[attr-defined]
        return main_grad, accumulate
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad, True


def defer_weight_grad(weight: Tensor, defer: Defer, closure: Closure) -> None:
    """Passes the weight-gradient half of a backward to `defer`, unless the parameter is frozen and
    needs none."""
    if not getattr(weight, "frozen", False):
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


def hand_over(parameter: Tensor, grad: Tensor, defer: Defer) -> None:
    """Adds what autograd has computed to a parameter's gradient, through `defer`."""
    defer_weight_grad(parameter, defer, partial(_add, parameter, grad))


def hand_over_grads(parameters: Iterable[Tensor], defer: Defer) -> None:
    """Moves what autograd has left in `.grad` to the main gradient, through `defer`.

    Args:
        parameters: of a phase whose backward has run; those without a main gradient keep their
            `.grad`.
        defer: takes the weight-gradient half of the backward.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and (
            hasattr(parameter, "main_grad") or getattr(parameter, "frozen", False)
        ):
            parameter.grad = None
            hand_over(parameter, grad, defer)


def _add(parameter: Tensor, grad: Tensor) -> None:
    main_grad, accumulate = grad_target(parameter)
    if accumulate:
        main_grad.add_(grad)
    else:
        main_grad.copy_(grad)
