"""Watches the tensors that operations make: how many bytes are alive, the most there ever were, the largest of all."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryWatch(TorchDispatchMode):
    """Counts storages made inside the context until they are freed; what was there before is not counted.

    It sees tensors of any device, also those of the meta device, which have sizes and no memory.
    `live_bytes`, `peak_bytes`; `largest` (elements, shape, operation) of any tensor made, views aside.

    Args:
        block: bytes that an allocator hands out at least and in multiples of (512 for torch's CUDA allocator).
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.block = block
        self.live_bytes = self.peak_bytes = 0
        self.largest: tuple[int, tuple[int, ...], str] = (0, (), "")
        self._known: weakref.WeakSet = weakref.WeakSet()

    def forget_peak(self) -> int:
        """From now on `peak_bytes` is the most since now; returns what is alive."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given:
                self._made(tensor, str(func))
        return out

    def _made(self, tensor: torch.Tensor, operation: str) -> None:
        self.largest = max(self.largest, (tensor.numel(), tuple(tensor.shape), operation))
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        num_bytes = self.rounded(storage.nbytes())
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, num_bytes)

    def _freed(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes

    def rounded(self, num_bytes: int) -> int:
        """What the allocator hands out for so many bytes."""
        return -(-num_bytes // self.block) * self.block
