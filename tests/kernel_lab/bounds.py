"""Which memory a kernel may touch where there is no GPU: that of its arguments."""

from collections.abc import Iterator

import torch

allowed: list[tuple[int, int]] = []
"""First byte, and the byte after the last, of each tensor that the running kernel may touch."""


def storages(argument) -> Iterator[tuple[int, int]]:
    """Byte ranges of every tensor an argument holds."""
    if isinstance(argument, (tuple, list)):
        for part in argument:
            yield from storages(part)
    elif hasattr(argument, "base") and hasattr(argument, "block_shape"):
        yield from storages(argument.base)
    elif isinstance(argument, torch.Tensor):
        storage = argument.untyped_storage()
        yield (storage.data_ptr(), storage.data_ptr() + storage.nbytes())


class allow_memory:
    """Let kernels touch these tensors too, though they reach them through an array of addresses."""

    def __init__(self, *tensors: torch.Tensor):
        self.ranges = list(storages(tensors))

    def __enter__(self):
        allowed.extend(self.ranges)

    def __exit__(self, *_):
        for one in self.ranges:
            allowed.remove(one)
