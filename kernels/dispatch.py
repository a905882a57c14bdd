"""Which path a tensor takes, and which precision its sums are kept in."""

import os
from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

from kernels.language import HAS_TRITON

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLANNED: ContextVar[str | None] = ContextVar("planned_architecture", default=None)
"""The GPU architecture whose fast paths tensors on the meta device take (`planning.py`); None = the plain paths."""
_NUM_PROCESSORS_WITHOUT_GPU = 4
_NUM_PROCESSORS_PLANNED = 132  # of an H100; it sizes partial sums of a few megabytes


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float64 stays exact, everything narrower is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on this tensor runs its Triton kernel: on a GPU, or on the CPU under the interpreter.

    float64 has no fast path anywhere and always takes the plain one, and so do empty tensors. Tensors on the meta
    device go the way of the GPU that is planned for.
    """
    if not HAS_TRITON or x.dtype == torch.float64 or x.numel() == 0:
        return False
    if x.is_meta:
        return PLANNED.get() is not None
    return x.is_cuda or (INTERPRETED and x.device.type == "cpu")


def gradients_of(reference: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a plain operation's inputs, by running it again."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        y = reference(*leaves)
    return torch.autograd.grad(y, leaves, dy)


def num_processors(device: torch.device) -> int:
    """How many streaming multiprocessors the device has; a few without a GPU, so that loops over work are tested."""
    if device.type == "meta" and PLANNED.get() is not None:
        return _NUM_PROCESSORS_PLANNED
    if device.type != "cuda":
        return _NUM_PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of(x: Tensor) -> Tensor:
    """`[..., n]` as `[rows, n]` with neighbours in memory along the row; a copy only where the layout demands it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
