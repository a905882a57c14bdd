"""Memory that a kernel may access where there is no GPU: that of its arguments."""

from collections.abc import Iterator

import torch

allowed: list[tuple[int, int]] = []
"""First byte, and the byte after the last, of each tensor that the running kernel may access."""


def storages(argument) -> Iterator[tuple[int, int]]:
    """Byte ranges of every tensor an argument holds."""
    if isinstance(argument, (tuple, list)):
        for element in argument:
            yield from storages(element)
    elif hasattr(argument, "base") and hasattr(argument, "block_shape"):
        yield from storages(argument.base)
    elif isinstance(argument, torch.Tensor):
        storage = argument.untyped_storage()
        yield (storage.data_ptr(), storage.data_ptr() + storage.nbytes())


class allow_memory:
    """Lets kernels access these tensors through an array of addresses."""

    def __init__(self, *tensors: torch.Tensor):
        self.ranges = list(storages(tensors))

    def __enter__(self):
        allowed.extend(self.ranges)

    def __exit__(self, *_):
        for bounds in self.ranges:
            allowed.remove(bounds)
