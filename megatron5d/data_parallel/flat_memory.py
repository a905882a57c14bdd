"""Allocates and frees the memory of a flat buffer in place: the tensor, its views and its storage object stay.

So a view that autograd or a deferred weight gradient has saved sees the new values when the buffer is filled again.
"""

from torch import Tensor


def allocate(flat: Tensor) -> None:
    """Allocates the memory of a flat buffer; its values are undefined."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def free(flat: Tensor) -> None:
    """Frees the memory of a flat buffer and of all its views."""
    flat.untyped_storage().resize_(0)
