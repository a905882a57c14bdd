"""What travels from rank to rank in the place of keys and values, and what becomes of it where it arrives."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Carrier(Protocol):
    """Opens a block that has arrived, and closes the gradients found with it into a gradient of the block."""

    value_dim: int  # dv

    def open(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """`[t, b, ...]` -> k `[t, b, g, d]`, v `[t, b, g, dv]`; runs outside of autograd."""

    def close(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """dk, dv in fp32 (fp64) -> the gradient of the block, in their dtype and the block's shape."""

    def share(self, rank: int, size: int) -> Carrier:
        """The same for one of `size` equal shares of the heads."""


class SideBySide:
    """Keys and values themselves: a block is `[t, b, g, d+dv]`.

    Args:
        key_dim, value_dim: d and dv.
    """

    def __init__(self, key_dim: int, value_dim: int) -> None:
        self.key_dim, self.value_dim = key_dim, value_dim

    def open(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.key_dim, self.value_dim], -1)
        return k, v

    def close(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return torch.cat((dk, dv), -1)

    def share(self, rank: int, size: int) -> SideBySide:
        return self
