"""Where a parameter's gradient goes: into its main gradient, which is wider than the parameter and never copied.

A parameter under training carries `.main_grad` (a view of its unit's flat buffer, see data_parallel/buckets.py).
Layers that write their weight gradient themselves add into it; what autograd produces is moved there by a hook.
Without a main gradient (inference, unit tests) `.grad` is used, as anywhere in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import accumulate_weight_grad

Closure = Callable[[], None]
Defer = Callable[[Closure], None]
"""Takes the weight-gradient half of a backward: runs it now (B) or keeps it for later (W)."""


def run_now(closure: Closure) -> None:
    closure()


def grad_buffer(parameter: Tensor) -> Tensor:
    """The tensor that collects this parameter's gradient, created zero where there is none yet."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
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


def move_to_main_grad(parameter: Tensor) -> None:
    """Post-accumulate hook: adds what autograd left in `.grad` to the main gradient and frees it.

    It also fires, with nothing to move, for weights whose layer has written the main gradient itself.
    """
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
