"""Which path a tensor takes, and which precision its sums are kept in.

Kernels take Triton's names from here: Triton's own where it is installed, otherwise those of
without_triton.py, so that plain paths run and a GPU can be planned for.
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
    from triton import jit
    from triton.runtime.jit import KernelInterface
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
except ImportError:
    from megatron5d.kernels.without_triton import KernelInterface, TensorDescriptor, jit, tl

    HAS_TRITON = False

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
HALF_DTYPES = (torch.bfloat16, torch.float16)  # of tensor-core kernels

__all__ = ["HAS_TRITON", "TRITON_DTYPES", "KernelInterface", "TensorDescriptor", "jit", "tl"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLANNED: ContextVar[str | None] = ContextVar("planned_architecture", default=None)
"""The GPU architecture whose fast paths tensors on the meta device take (`tuning.py`); None = the plain paths."""
_NUM_PROCESSORS_WITHOUT_GPU = 4
_NUM_PROCESSORS_PLANNED = 132  # of an H100; it sizes partial sums of a few megabytes


def cdiv(x: int, y: int) -> int:
    """Returns x / y rounded up, on the host, where Triton's own, made for kernels too, takes
    microseconds."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Returns the least power of two that is not below n, on the host."""
    return 1 << (n - 1).bit_length()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype sums are kept in: float64 stays exact, everything narrower is summed in
    float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def runs_triton(x: Tensor) -> bool:
    """Says whether an operation on this tensor runs its Triton kernel: on a GPU, or on the CPU
    under the interpreter.

    float64 has no fast path anywhere and always takes the plain one, and so do empty tensors.
    Tensors on the meta device go the way of the GPU that is planned for.

    Raises ValueError: x lies on another GPU than the current one, where Triton would launch.
    """
    if (x.is_cpu and not INTERPRETED) or x.dtype == torch.float64 or x.numel() == 0:
        return False
    if x.is_meta:
        return PLANNED.get() is not None
    if not HAS_TRITON:
        return False
    if x.is_cuda:
        if x.get_device() != torch.cuda.current_device():
            raise ValueError(
                f"a tensor {tuple(x.shape)} lies on cuda:{x.get_device()}, and kernels run on the current device, "
                f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device, or use `with torch.cuda.device(...)`"
            )
        return True
    return x.is_cpu


class _Recorded(FunctionMeta):
    """Gives each function the backward that the engine calls, without the frames that torch puts
    around it."""

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
        super().__init__(name, bases, attributes)
        backward = attributes.get("backward")
        if backward is not None:
            cls._backward_cls.apply = _once(backward.__func__)  # type: ignore[attr-defined]


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses a backward of which a graph is wanted."""

    @functools.wraps(backward)
    def refusing(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{backward.__qualname__.lstrip('_')} is differentiable once: no create_graph=True"
            )
        return backward(ctx, *gradients)

    return refusing


class FirstOrderFunction(torch.autograd.Function, metaclass=_Recorded):
    """An autograd Function with one derivative; a small call costs the host half of what torch's
    own does.

    What kernels compute is not recorded, nor is what was kept from the forward, such as the
    log-sum-exp: a second derivative (`create_graph=True`) would lack terms, and nothing would tell,
    so it raises RuntimeError. Transforms of torch.func, which torch tests for in every call, do not
    take it.
    """

    apply = torch._C._FunctionBase.__dict__["apply"]


def gradients_of(
    reference: Callable[..., Tensor], dy: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Returns the gradients of a plain operation's inputs, by running it again."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        y = reference(*leaves)
    return torch.autograd.grad(y, leaves, dy)


def num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors; a few without a GPU, so that loops over work
    are tested."""
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
    """Loads as float32, and zeros where the mask is false."""
    return tl.load(pointer, mask, other=0.0).to(tl.float32)


def rows_of(x: Tensor) -> Tensor:
    """Views `[..., n]` as `[rows, n]` with contiguous rows; copies only if the layout demands
    it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
