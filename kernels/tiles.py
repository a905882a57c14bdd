"""How products reach tiles of a matrix: by a descriptor for the copy engine, or, before Hopper, by aligned pointers.

Without a copy engine Triton takes a descriptor apart and knows nothing of its shape and stride: every element would be
loaded by itself, and nothing ahead of time. Made in the kernel, from arguments that are known to be multiples of 16,
the same descriptor becomes wide asynchronous loads.
"""

import torch
from torch import Tensor

from kernels import tuning
from kernels.language import TensorDescriptor, jit, tl

_WITHOUT_COPY_ENGINE = ("sm_80", "gfx942")


def by_pointers(device: torch.device) -> bool:
    """Whether the device has no copy engine."""
    return tuning.architecture(device) in _WITHOUT_COPY_ENGINE


def readable(x: Tensor) -> bool:
    """Whether the copy engine can read matrix x: neighbours in memory, rows 16 bytes apart."""
    return x.stride(-1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def tiles_of(x: Tensor, tile: list[int]) -> TensorDescriptor | tuple[Tensor, int]:
    """What a kernel gives to `matrix`: x `[rows, columns]`, which is `readable`."""
    return (x, x.stride(0)) if by_pointers(x.device) else TensorDescriptor.from_tensor(x, tile)


@jit
def matrix(tiles, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, POINTERS: tl.constexpr):
    """The matrix behind `tiles_of`, of which `load` takes a tile; zeros beyond its rows and columns."""
    if POINTERS:
        tiles = tl.make_tensor_descriptor(tiles[0], [rows, columns], [tiles[1].to(tl.int64), 1], [ROWS, COLUMNS])
    return tiles
