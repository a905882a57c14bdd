"""Stand-ins for the names that kernels import from Triton, where it is not installed.

Modules of kernels can be imported for their plain paths, and the host code around a kernel runs on
meta tensors, for which nothing is launched (`tuning.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class KernelInterface:
    """A kernel that cannot be compiled or launched."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.__name__, self.__doc__ = kernel.__name__, kernel.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Stands for `kernel[grid]`, which `tuning.py` replaces.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self.__name__} needs Triton, which is not installed: `pip install triton`"
        )


def jit(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stands for `@jit` and `@jit(options)`."""
    return KernelInterface if kernel is None else KernelInterface(kernel)


@dataclass
class TensorDescriptor:
    """A tensor, and the tile of it that a copy engine loads."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]

    @classmethod
    def from_tensor(cls, x: Tensor, block_shape: Sequence[int]) -> "TensorDescriptor":
        return cls(x, x.shape, x.stride(), block_shape)


class _Language:
    """triton.language as far as it is used outside kernels: dtypes, annotations, constants."""

    def __getattr__(self, name: str) -> "_Language":
        return self

    def constexpr(self, value: Any) -> Any:
        return value


tl = _Language()
