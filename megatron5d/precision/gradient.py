"""Where a parameter's gradient goes: straight into its main gradient, which is usually wider than the parameter.

In training a parameter carries `.main_grad`, a view of its unit's flat buffer (data_parallel/buckets.py), and under
ZeRO-2 and 3 `.allocate_main_grad`, which allocates that buffer. `grad_buffer` is the only way to it.
Layers that compute their weight gradient themselves add it there through `defer`. What autograd leaves in `.grad`
follows the same way (`hand_over_grads`), so that I adds up no weight gradient and W all of them.
Without a main gradient (inference, unit tests) `.grad` is used, as anywhere in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from kernels import accumulate_weight_grad

Closure = Callable[[], None]
Defer = Callable[[Closure], None]
"""Takes the weight-gradient half of a backward: runs it now (B) or keeps it for later (W)."""


def run_now(closure: Closure) -> None:
    closure()


def grad_buffer(parameter: Tensor) -> Tensor:
    """The tensor that collects this parameter's gradient; allocated, with zeros, if there is none yet."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        hold = getattr(parameter, "allocate_main_grad", None)
        if hold is not None:
            hold()
        return main_grad
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def add_weight_grad(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """grad(weight) += dyᵀ·x.

    Args:
        weight: `[out, in]`.
        dy: `[..., out]`, gradient of the output.
        x: `[..., in]`, input of the layer.
    """
    accumulate_weight_grad(grad_buffer(weight), dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))


def hand_over_grads(parameters: Iterable[Tensor], defer: Defer) -> None:
    """Takes what a backward has left in `.grad`, and lets `defer` add it to the main gradient.

    Args:
        parameters: of a phase whose backward has run; those without a main gradient keep their `.grad`.
        defer: takes the weight-gradient half of the backward.
    """
    for parameter in parameters:
        if parameter.grad is not None and hasattr(parameter, "main_grad"):
            grad, parameter.grad = parameter.grad, None
            defer(partial(_add, parameter, grad))


def _add(parameter: Tensor, grad: Tensor) -> None:
    grad_buffer(parameter).add_(grad)
