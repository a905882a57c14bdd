"""The names that kernels take from Triton, where it is not installed: all but the compiler.

Files of kernels can be imported for their plain paths, and on the meta device, where nothing is
launched (`tuning.py`), the code around a kernel is what it is with Triton.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class KernelInterface:
    """A kernel that nobody can compile: it has a name, and is launched on no grid."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.__name__, self.__doc__ = kernel.__name__, kernel.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Stands for `kernel[grid]`, which `tuning.py` replaces. Raises RuntimeError: always."""
        raise RuntimeError(
            f"{self.__name__} needs Triton, which is not installed: `pip install triton`"
        )


def jit(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Serves `@jit` and `@jit(options)`."""
    return KernelInterface if kernel is None else KernelInterface(kernel)


@dataclass
class TensorDescriptor:
    """A tensor, and the tile of it that a copy engine takes."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]

    @classmethod
    def from_tensor(cls, x: Tensor, block_shape: Sequence[int]) -> "TensorDescriptor":
        return cls(x, x.shape, x.stride(), block_shape)


class _Language:
    """triton.language, as far as it is named outside kernels: dtypes, annotations of their
    arguments, and constants."""

    def __getattr__(self, name: str) -> "_Language":
        return self

    def constexpr(self, value: Any) -> Any:
        return value


tl = _Language()
