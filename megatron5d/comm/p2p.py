"""Channels from one rank of an axis to another, whose messages arrive in the order of sending.

Each channel is independent of all others, so no order between channels is ever needed. On gloo
channels are tags of one group. NCCL has no tags and runs all messages of a pair of ranks in one
group in one order, so there channels between the same two ranks live in different groups.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.comm.failures import P2PError
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import group_settings

Link = tuple[int, int]
"""Positions on the axis: (source, destination)."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and device of every message of a channel, known to sender and receiver."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str = "cpu"


class _End:
    """One end of a channel: its messages in progress, oldest first, each with its work handle."""

    _action = ""  # for messages of errors

    def __init__(self, axis: Axis, peer: int, group: Any, tag: int) -> None:
        self.axis, self.peer, self._group, self._tag = axis, peer, group, tag
        self.peer_rank = axis.ranks[peer]
        self._in_flight: deque[tuple[Any, Tensor]] = deque()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.axis}, rank {self.peer_rank}, tag {self._tag})"

    def _start(self, transfer: Any, x: Tensor) -> None:
        try:
            work = transfer([x], self.peer, self._tag)
        except RuntimeError as error:
            raise P2PError(self._action, self.peer_rank, error) from error
        self._in_flight.append((work, x))

    def _wait_first(self) -> Tensor:
        work, x = self._in_flight.popleft()
        try:
            self.axis.wait(work.wait)
        except RuntimeError as error:
            raise P2PError(self._action, self.peer_rank, error) from error
        return x


class SendChannel(_End):
    """The sending end. A message is kept until its transfer has completed."""

    _action = "sending to"

    def __init__(self, axis: Axis, peer: int, group: Any, tag: int) -> None:
        super().__init__(axis, peer, group, tag)
        self._num_released = 0

    def send(self, x: Tensor) -> None:
        """Starts sending.

        Args:
            x: as the peer expects it; not to be changed before it is released.

        Raises:
            P2PError: the peer is dead or hangs.

        Comm: one message of numel elements.
        """
        x = x.contiguous()
        self.axis.record("send", x.numel(), x.element_size())
        self._start(self._group.send, x)

    def release_first(self, count: int) -> None:
        """Releases the first `count` messages since the last `finish`: the peer has used them."""
        while self._num_released < count:
            self._release()

    def release_all_but(self, count: int) -> None:
        """Releases all but the last `count` messages, once they have been sent."""
        while len(self._in_flight) > count:
            self._release()

    def finish(self) -> None:
        """Waits until everything has been sent, and counts from 0 again."""
        self.release_all_but(0)
        self._num_released = 0

    def _release(self) -> None:
        self._wait_first()
        self._num_released += 1


class ReceiveChannel(_End):
    """The receiving end."""

    _action = "receiving from"

    def post(self, meta: TensorMeta) -> None:
        """Starts receiving the channel's next message into new memory.

        Raises:
            P2PError: the peer is dead or hangs; here or in `take`.
        """
        self._start(self._group.recv, torch.empty(meta.shape, dtype=meta.dtype, device=meta.device))

    def take(self) -> Tensor:
        """Waits for the oldest posted message that has not been taken, and returns it.

        Raises:
            P2PError: the peer is dead or hangs.
        """
        return self._wait_first()

    def finish(self) -> None:
        """Asserts that every posted message has been taken."""
        count = len(self._in_flight)
        assert not count, f"{count} receives of {self} were posted and never taken"


def group_indices(links: Sequence[Link]) -> list[int]:
    """Group of every link, as few as possible: no two links between the same ranks share one."""
    num_groups: dict[frozenset[int], int] = {}
    indices = []
    for link in links:
        index = num_groups.get(frozenset(link), 0)
        num_groups[frozenset(link)] = index + 1
        indices.append(index)
    return indices


def open_channels(
    links: Sequence[Link],
    axis: Axis,
    device: torch.device | str = "cpu",
    timeout_s: float | None = None,
) -> list[SendChannel | ReceiveChannel | None]:
    """Opens this rank's end of every channel.

    Every rank of the axis must call it with the same links. One element is sent over each channel,
    in the order of the links, so that connections are made here and not in the middle of a step,
    where ranks could wait for each other.

    Args:
        axis: on which they run.
        device: on which messages will lie.
        timeout_s: seconds after which a message fails, as in `build_mesh`.

    Returns:
        One entry per link; None if this rank is at neither end.

    Comm: creation of one group (with NCCL, of one per channel between the same two
        ranks); one element per channel.
    """
    if axis.size == 1 or not links:
        return [None] * len(links)
    has_tags = dist.get_backend(axis.group) != "nccl"
    indices = [0] * len(links) if has_tags else group_indices(links)
    # not the axis's group: torch's checks count messages and collectives of a group together, and
    # ranks have unequal numbers of messages
    groups = [
        dist.new_group(list(axis.ranks), group_desc="p2p", **group_settings(timeout_s))
        for _ in range(max(indices) + 1)
    ]
    ends: list[SendChannel | ReceiveChannel | None] = []
    for tag, ((source, destination), index) in enumerate(zip(links, indices)):
        if axis.rank == source:
            send_channel = SendChannel(axis, destination, groups[index], tag)
            send_channel.send(torch.zeros(1, dtype=torch.float32, device=device))
            send_channel.finish()
            ends.append(send_channel)
        elif axis.rank == destination:
            receive_channel = ReceiveChannel(axis, source, groups[index], tag)
            receive_channel.post(TensorMeta((1,), torch.float32, device))
            receive_channel.take()
            ends.append(receive_channel)
        else:
            ends.append(None)
    return ends
