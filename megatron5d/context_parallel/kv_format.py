"""The format of a block that travels: keys and values themselves, or something smaller that they are computed from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class KVFormat(Protocol):
    """Turns a block into keys and values, and their gradients into that of the block; runs outside of autograd."""

    value_dim: int  # dv

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """`[t, b, ...]` -> k `[t, b, g, d]`, v `[t, b, g, dv]`."""

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """dk, dv in fp32 (fp64) -> the gradient of the block, in their dtype and the block's shape."""

    def for_heads(self, rank: int, size: int) -> KVFormat:
        """The format for the heads of one rank, where `size` ranks hold equal shares of them."""


class ConcatenatedKV:
    """A block is keys and values themselves, `[t, b, g, d+dv]`.

    Args:
        key_dim, value_dim: d and dv.
    """

    def __init__(self, key_dim: int, value_dim: int) -> None:
        self.key_dim, self.value_dim = key_dim, value_dim

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        k, v = block.split([self.key_dim, self.value_dim], -1)
        return k, v

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return torch.cat((dk, dv), -1)

    def for_heads(self, rank: int, size: int) -> ConcatenatedKV:
        return self
