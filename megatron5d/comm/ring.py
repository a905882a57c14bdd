"""Passing a tensor one rank on, around an axis."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.collectives import as_bytes
from megatron5d.comm.failures import finish
from megatron5d.topology.axis import Axis


class Shift:
    """A transfer under way: our tensor to the next rank, the previous rank's to us."""

    def __init__(self, sent: Tensor, received: Tensor, works: list, axis: Axis) -> None:
        self._sent, self._received, self._works, self._axis = sent, received, works, axis

    def wait(self) -> Tensor:
        """The previous rank's tensor; ours may be overwritten from now on.

        Raises:
            LineLost: a rank of the ring is dead or hangs.
        """
        for work in self._works:
            finish(work, "shift", self._axis)
        return self._received


def start_shift(x: Tensor, axis: Axis, tag: int = 0, distance: int = 1) -> Shift:
    """Sends `x` to the next rank of the ring, or one further on, and receives that of the rank as far before.

    Args:
        x: contiguous, the same shape on every rank; must not change until `wait`.
        axis: the ring; at least 2 ranks.
        tag: tells apart transfers that are under way at once; every rank starts them in the same order.
        distance: ranks that it goes on, back if negative; the same on every rank, no multiple of the axis' size.

    Comm: point to point, numel elements per rank.
    """
    assert distance % axis.size and x.is_contiguous()
    following = axis.ranks[(axis.rank + distance) % axis.size]
    previous = axis.ranks[(axis.rank - distance) % axis.size]
    received = torch.empty_like(x)
    axis.record("shift", x.numel(), x.element_size())
    if x.is_meta:
        return Shift(x, received, [], axis)
    sending = dist.P2POp(dist.isend, as_bytes(x), following, axis.group, tag)
    receiving = dist.P2POp(dist.irecv, as_bytes(received), previous, axis.group, tag)
    return Shift(x, received, dist.batch_isend_irecv([sending, receiving]), axis)
