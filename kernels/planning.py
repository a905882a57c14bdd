"""What operations would allocate on a GPU that is not there.

On the meta device tensors have shapes and no memory. Within `planned`, operations on them go the way that they would go
on a GPU: each allocates its outputs, keeps what it keeps for the backward, and launches nothing.
"""

import contextlib
from collections.abc import Iterator

from kernels.dispatch import PLANNED
from kernels.language import KernelInterface
from kernels.tuning import nearest


@contextlib.contextmanager
def planned(architecture: str) -> Iterator[None]:
    """Within, tensors on the meta device take the paths of a GPU that has Triton, which need not be installed here.

    Args:
        architecture: for example sm_90; the newest older one with a table of tiles stands for it.

    Raises:
        ValueError: no table is old enough.
    """
    token = PLANNED.set(nearest(architecture))
    try:
        with _no_launches():
            yield
    finally:
        PLANNED.reset(token)


@contextlib.contextmanager
def _no_launches() -> Iterator[None]:
    on_grid = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda self, grid: lambda *args, **kwargs: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = on_grid
