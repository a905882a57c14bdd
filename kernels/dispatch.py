"""Which path a tensor takes, and in which precision its sums are computed.

Kernels import Triton's names from here: Triton's own where it is installed, otherwise the stand-ins
of without_triton.py, so that plain paths run and a GPU can be planned for.
"""

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta

try:
    import triton.language as tl
    from triton import __version__, jit
    from triton.runtime.jit import KernelInterface
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
    TRITON_VERSION = tuple(map(int, __version__.split(".")[:2]))
except ImportError:
    from megatron5d.kernels.without_triton import KernelInterface, TensorDescriptor, jit, tl

    HAS_TRITON = False
    TRITON_VERSION = (3, 6)  # what is planned for

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
HALF_DTYPES = (torch.bfloat16, torch.float16)  # that tensor-core kernels support

__all__ = ["HAS_TRITON", "TRITON_DTYPES", "KernelInterface", "TensorDescriptor", "jit", "tl"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLANNED: ContextVar[str | None] = ContextVar("planned_architecture", default=None)
"""The GPU architecture whose paths meta tensors follow (`tuning.py`); None = the plain paths."""
_NUM_PROCESSORS_WITHOUT_GPU = 4
_NUM_PROCESSORS_PLANNED = 132  # an H100's; it sizes partial sums of a few megabytes


def cdiv(x: int, y: int) -> int:
    """x / y rounded up, on the host, where Triton's own `cdiv` would take microseconds."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Least power of two that is not below n, on the host."""
    return 1 << (n - 1).bit_length()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on x runs its Triton kernel: on a GPU, or interpreted on the CPU.

    float64 and empty tensors always take the plain path. Meta tensors follow the path of the GPU
    that is planned for.

    Raises:
        ValueError: x is on another GPU than the current one, on which Triton would launch.
    """
    if (x.is_cpu and not INTERPRETED) or x.dtype == torch.float64 or x.numel() == 0:
        return False
    if x.is_meta:
        return PLANNED.get() is not None
    if not HAS_TRITON:
        return False
    if x.is_cuda:
        if x.get_device() != (current := torch.cuda.current_device()):
            raise ValueError(
                f"kernels require tensors on the current device, cuda:{current} "
                f"(got {tuple(x.shape)} on cuda:{x.get_device()}): "
                "call torch.cuda.set_device, or use `with torch.cuda.device(...)`"
            )
        return True
    return x.is_cpu


class _FirstOrderMeta(FunctionMeta):
    """Lets the engine call each function's backward without torch's frames around it."""

    _backward_cls: Any  # set by FunctionMeta

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
        super().__init__(name, bases, attributes)
        backward = attributes.get("backward")
        if backward is not None:
            cls._backward_cls.apply = _differentiable_once(backward.__func__)


def _differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{backward.__qualname__.lstrip('_')} is differentiable once: no create_graph=True"
            )
        return backward(ctx, *gradients)

    return checked


class FirstOrderFunction(torch.autograd.Function, metaclass=_FirstOrderMeta):
    """An autograd Function with a first derivative only; a call costs the host half as much.

    Autograd records neither what kernels compute nor how they use saved statistics, such as the
    log-sum-exp. A second derivative would silently lack terms, so `create_graph=True` raises
    RuntimeError. Transforms of torch.func, for which torch checks each call, are not supported.
    """

    apply = torch._C._FunctionBase.__dict__["apply"]


def gradients_of(
    reference: Callable[..., Tensor], dy: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of a plain operation's inputs, from running it again."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        y = reference(*leaves)
    return torch.autograd.grad(y, leaves, dy)


def num_processors(device: torch.device) -> int:
    """Number of streaming multiprocessors; without a GPU a few, to test loops over work."""
    if device.type == "meta" and PLANNED.get() is not None:
        return _NUM_PROCESSORS_PLANNED
    if device.type != "cuda":
        return _NUM_PROCESSORS_WITHOUT_GPU
    return _multi_processor_count(device)


@functools.cache
def _multi_processor_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@jit
def load_float32(pointer, mask):
    """Loads as float32, with zeros where the mask is false."""
    return tl.load(pointer, mask, other=0.0).to(tl.float32)


def rows_of(x: Tensor) -> Tensor:
    """Views `[..., n]` as `[rows, n]` with contiguous rows; copies only if necessary."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
