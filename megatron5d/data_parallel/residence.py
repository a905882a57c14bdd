"""Flat buffers that come and go: the tensor, its views and its storage object stay, the memory does not.

So whatever autograd or a kept weight gradient has saved of a view sees the new values when the buffer is filled again.
"""

from torch import Tensor


def take(flat: Tensor) -> None:
    """Gives a flat buffer its memory; the values are undefined."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def give_back(flat: Tensor) -> None:
    """Leaves a flat buffer, and every view of it, without memory."""
    flat.untyped_storage().resize_(0)
