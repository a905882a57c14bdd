"""Counts the bytes of tensors while operations run: alive now, the most so far, and the largest tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree; of a wrapper subclass, which has no memory of its own, those inside it."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            yield from (getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])
        elif isinstance(leaf, torch.Tensor):
            yield leaf


class MemoryWatch(TorchDispatchMode):
    """Counts the storages made inside this context, of any device, until they are freed or resized.

    `live_bytes` are alive now, `peak_bytes` were the most; `largest` is (elements, shape, operation) of the largest
    tensor made, without views. On the meta device, sizes are counted that have no memory.

    Args:
        block: sizes are rounded up to a multiple of so many bytes (512 for torch's CUDA allocator).
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.block = block
        self.live_bytes = self.peak_bytes = 0
        self.largest: tuple[int, tuple[int, ...], str] = (0, (), "")
        self._sizes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # storage -> [its bytes]
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self):
        watch, resize = self, self._resize

        def resized(storage, num_bytes):  # a dispatch mode does not see resize_
            before = storage.nbytes()
            result = resize(storage, num_bytes)
            watch._changed(storage, before)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        return super().__exit__(*error)

    def forget_peak(self) -> int:
        """Starts a new `peak_bytes`; returns the bytes that are alive now."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if id(tensor.untyped_storage()) not in given:
                self._made(tensor, str(func))
        return out

    def _made(self, tensor: torch.Tensor, operation: str) -> None:
        self.largest = max(self.largest, (tensor.numel(), tuple(tensor.shape), operation))
        storage = tensor.untyped_storage()
        if storage in self._sizes:
            return
        size = self._sizes[storage] = [0]
        self._grow(size, storage.nbytes())
        weakref.finalize(storage, self._grow, size, 0)

    def _changed(self, storage: torch.UntypedStorage, before: int) -> None:
        size = self._sizes.get(storage)
        if size is None:  # made before the context: only the change counts, as long as the storage lives
            size = self._sizes[storage] = [self.rounded(before)]
        self._grow(size, storage.nbytes())

    def _grow(self, size: list[int], num_bytes: int) -> None:
        now = self.rounded(num_bytes)
        self.live_bytes += now - size[0]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        size[0] = now

    def rounded(self, num_bytes: int) -> int:
        """The bytes that the allocator uses for a request."""
        return -(-num_bytes // self.block) * self.block
